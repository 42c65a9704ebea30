"""Mean, sum and the hierarchical mean: results, collectives, and errors."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jdist
from jdist import sync

from laws import STRATEGIES, rows
from policies import TWO_LEVELS, compiled, once, sent

HIERARCHICAL = lambda: sync.hierarchical("replica", "group")


@pytest.mark.parametrize("place", STRATEGIES)
@pytest.mark.parametrize("policy, reduce", [(sync.mean, np.mean), (sync.sum, np.sum)])
def test_policy_returns_the_reduction_over_the_replicas(policy, reduce, place):
    strategy = STRATEGIES[place]()
    grads = rows(strategy, 5, 3)
    _, results = once(strategy, policy(), grads)
    np.testing.assert_allclose(results, reduce(np.asarray(grads.tree), axis=0), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("place", TWO_LEVELS)
@pytest.mark.parametrize("shape", [(), (1,), (7,), (5, 3), (0, 3), (64, 64)])
def test_hierarchical_equals_mean_for_every_shape(shape, place):
    strategy = TWO_LEVELS[place]()
    grads = rows(strategy, *shape)
    _, results = once(strategy, HIERARCHICAL(), grads)
    np.testing.assert_allclose(results, np.mean(grads.tree, axis=0), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float32])
def test_policies_keep_the_dtype(dtype):
    strategy = TWO_LEVELS["groups_of_2"]()
    grads = strategy.put(jdist.PerReplica(jnp.arange(12, dtype=dtype).reshape(4, 3)))
    for policy in (sync.mean(), sync.sum(), HIERARCHICAL()):
        assert once(strategy, policy, grads)[1].dtype == dtype


def test_hierarchical_with_swapped_axes_equals_mean():
    strategy = TWO_LEVELS["groups_of_2"]()
    grads = rows(strategy, 5)
    _, results = once(strategy, sync.hierarchical("group", "replica"), grads)
    np.testing.assert_allclose(results, np.mean(grads.tree, axis=0), rtol=1e-6, atol=1e-6)


def test_hierarchical_scatters_reduces_and_gathers():
    strategy = jdist.MirroredStrategy(
        [f"cpu:{i}" for i in range(4)], cross_device_ops=jdist.HierarchicalAllReduce(group_size=2)
    )
    text = compiled(strategy, HIERARCHICAL(), [(256, 256)])
    assert [sent(text, word) for word in ("reduce-scatter", "all-reduce", "all-gather")] == [["f32"]] * 3


def test_mean_sends_one_all_reduce(two):
    text = compiled(two, sync.mean(), [(40, 50), (3,)])
    assert sent(text, "all-reduce") == ["f32"]
    assert not [word for word in ("all-gather", "all-to-all", "reduce-scatter") if sent(text, word)]


@pytest.mark.parametrize("place", ["one_device", "mirrored_2"])
def test_hierarchical_on_one_axis_is_refused(place):
    strategy = STRATEGIES[place]()
    with pytest.raises(
        ValueError, match=r"needs a mesh whose replicas span these two axes.*strategy has 'replica'.*Hierarchical"
    ):
        once(strategy, HIERARCHICAL(), rows(strategy, 3))


@pytest.mark.parametrize("axes", [("replica", "host"), ("device", "host"), ("replica", "replica"), ("group", "group")])
def test_hierarchical_with_unknown_mesh_axes_is_refused(axes):
    strategy = TWO_LEVELS["groups_of_2"]()
    says = rf"hierarchical\('{axes[0]}', '{axes[1]}'\)` needs .* has 'group', 'replica'"
    with pytest.raises(ValueError, match=says):
        once(strategy, sync.hierarchical(*axes), rows(strategy, 3))


@pytest.mark.parametrize("policy", [sync.mean, HIERARCHICAL], ids=["mean", "hierarchical"])
def test_mean_of_equal_gradients_is_that_gradient(policy):
    strategy = TWO_LEVELS["groups_of_2"]()
    grads = strategy.put(jdist.PerReplica(np.tile(np.float32([0.5, -3]), (4, 1))))
    np.testing.assert_array_equal(once(strategy, policy(), grads)[1], [0.5, -3])


def test_sum_of_a_reduced_gradient_warns(two):
    tx = sync.sum()
    with pytest.warns(jdist.RepeatedSumWarning):
        two.run(lambda x: tx.update(jdist.all_reduce("mean", x), tx.init(x))[0], (rows(two, 3),))


def test_policies_are_stateless():
    for policy in (sync.mean(), sync.sum(), HIERARCHICAL()):
        assert not jax.tree.leaves(policy.init({"w": jnp.ones(3)}))
