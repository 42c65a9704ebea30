"""A step whose batch is not split warns, and no other step does."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jdist

from laws import STRATEGIES


def _mean_step(state, batch):
    loss, grad = jax.value_and_grad(lambda w: jnp.mean((batch @ w) ** 2))(state)
    return state - 0.1 * jdist.all_reduce("mean", grad), jdist.all_reduce("mean", loss)


def test_batch_that_is_replicated_warns_on_the_line_of_the_reduction(two):
    batch = np.ones((4, 3), np.float32)
    message = r"batch is replicated, so each of the 2 replicas computes all of its examples.*strategy\.split\(batch\)"
    with pytest.warns(jdist.ReplicatedBatchWarning, match=message) as caught:
        two.step(lambda state, batch: _mean_step(state, batch))(two.put(np.ones(3, np.float32)), batch)
    assert [(w.filename, w.category) for w in caught] == [(__file__, jdist.ReplicatedBatchWarning)]


def test_replicated_batch_of_one_replica_on_several_devices_warns():
    strategy, batch = STRATEGIES["sharded_4"](), np.ones((4, 3), np.float32)
    message = r"batch is replicated, so each of the 4 devices computes all of its examples.*strategy\.split\(batch\)"
    with pytest.warns(jdist.ReplicatedBatchWarning, match=message) as caught:
        strategy.step(lambda state, batch: _mean_step(state, batch))(strategy.put(np.ones(3, np.float32)), batch)
    assert [w.filename for w in caught] == [__file__]


QUIET = {
    "per_replica": ("mirrored_2", _mean_step, lambda s: jdist.PerReplica(np.ones((2, 4, 3), np.float32))),
    "one_replica": ("mirrored_1", _mean_step, lambda s: np.ones((4, 3), np.float32)),
    "no_reduction": ("mirrored_2", lambda w, x: (w - x.mean(0), None), lambda s: np.ones((4, 3), np.float32)),
    "reduction_of_something_else": (
        "mirrored_2",
        lambda w, x: (w - x.mean(0) * jdist.all_reduce("mean", 1.0 * jdist.replica_id()), None),
        lambda s: np.ones((4, 3), np.float32),
    ),
    "noise_per_replica": (
        "mirrored_2",
        lambda w, x: (w - jdist.all_reduce("mean", x.mean(0) * jdist.replica_id()), None),
        lambda s: np.ones((4, 3), np.float32),
    ),
    "scalar": (
        "mirrored_2",
        lambda w, rate: (w - jdist.all_reduce("mean", rate * w), None),
        lambda s: np.float32(0.1),
    ),
}


@pytest.mark.parametrize("case", QUIET)
def test_step_without_a_replicated_batch_does_not_warn(case):
    name, step, batch = QUIET[case]
    strategy = STRATEGIES[name]()
    strategy.step(step)(strategy.put(np.ones(3, np.float32)), batch(strategy))
