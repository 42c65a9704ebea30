"""Metrics of flax.nnx and clu that are added over the replicas: those whose merge is not a sum are refused."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jdist

from laws import STRATEGIES, each_row

X = np.float32([1, 2, 3, 8])


@pytest.fixture
def two():
    return STRATEGIES["mirrored_2"]()


def _metrics():
    return nnx.MultiMetric(loss=nnx.metrics.Average("loss"), accuracy=nnx.metrics.Accuracy())


def _update(metrics, x):
    logits = jnp.stack([x, 2.5 * jnp.ones_like(x)], axis=-1)
    metrics.update(loss=x, logits=logits, labels=jnp.zeros(len(x), jnp.int32))
    return metrics


def test_nnx_metrics_of_a_state_are_those_of_all_examples(strategy):
    state = strategy.init(lambda: jdist.SyncOnRead(_metrics(), "sum"))
    step = strategy.step(lambda metrics, x: (_update(metrics, x), None))
    for _ in range(2):
        state, _ = step(state, strategy.split(np.tile(X, 6)))
    assert jax.tree.map(float, state.read().compute()) == {"loss": 3.5, "accuracy": 0.5}


REFUSED = {
    "a metric": (nnx.metrics.Welford, r"\['m'\] is a metric Welford of flax\.nnx.*`metric = jdist\.metrics\.adapt"),
    "a part": (
        lambda: nnx.MultiMetric(a=nnx.metrics.Average(), w=nnx.metrics.Welford()),
        r"\['m'\]\.w is a metric Welford",
    ),
}
SUMS = {
    "init": lambda strategy, make: strategy.init(lambda: {"m": jdist.SyncOnRead(make(), "sum")}),
    "put": lambda strategy, make: strategy.put({"m": jdist.SyncOnRead(make(), "sum")}),
    "all_reduce": lambda strategy, make: strategy.run(lambda: jdist.all_reduce("sum", {"m": make()})),
}


@each_row("make, message", REFUSED.values(), ids=REFUSED)
@each_row("add", SUMS.values(), ids=SUMS)
def test_metrics_whose_state_is_not_a_sum_are_refused(make, message, add, two):
    with pytest.raises(ValueError, match=message):
        add(two, make)


def test_merge_of_clu_is_proved_to_be_a_sum(two):
    clu = pytest.importorskip("clu.metrics", reason="clu is optional and not installed.")
    reduced = lambda kind: two.run(
        lambda x: jdist.all_reduce("sum", kind.from_model_output(x, mask=x > 0)), (two.split(X),)
    )
    assert float(reduced(clu.Average).compute()) == 3.5
    with pytest.raises(
        ValueError, match=r"^value is a LastValue whose `merge` is not a sum: for its leaf 'total' it repl"
    ):
        reduced(clu.LastValue)
