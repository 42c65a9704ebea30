"""`jdist.eval_step`: metrics that are exact over batches, replicas and padding; and its checks."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jdist
from jdist import metrics, sync

X = np.random.default_rng(0).normal(size=(11, 3)).astype(np.float32)
Y = np.arange(11, dtype=np.int32) % 3


@jdist.eval_step
def evaluate(w, batch, weights):
    x, y = batch
    logits = x * w
    matrix = metrics.ConfusionMatrix.empty(3).update(logits.argmax(-1), y, weights=weights)
    accuracy = metrics.Accuracy().update(logits, y, weights=weights)
    return {"loss": optax.softmax_cross_entropy_with_integer_labels(logits, y), "accuracy": accuracy, "matrix": matrix}


def expected(w):
    logits = X * w
    return {
        "loss": optax.softmax_cross_entropy_with_integer_labels(logits, Y).mean(),
        "accuracy": (logits.argmax(-1) == Y).mean(),
        "matrix": np.array([[((i == Y) & (logits.argmax(-1) == j)).sum() for j in range(3)] for i in range(3)]),
    }


def assert_close(values, w):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), values, expected(w))


def test_values_are_exact_over_batches_replicas_and_padding(strategy):
    w = strategy.put(np.float32([1, 2, 3]))
    data = strategy.distribute_dataset((X, Y), 2 * strategy.num_replicas_in_sync, remainder="pad")
    with strategy.scope():
        values = evaluate.over(w, data)
        total = None
        for batch, weights in data:
            one = evaluate(w, batch, weights)
            total = one if total is None else {name: total[name].merge(one[name]) for name in total}
    assert_close(values, np.float32([1, 2, 3]))
    assert_close({name: metric.compute() for name, metric in total.items()}, np.float32([1, 2, 3]))
    assert isinstance(values["loss"], float) and isinstance(values["matrix"], np.ndarray)
    assert not w.is_deleted()


def test_batches_without_padding_have_no_weights(two):
    with two.scope():
        batches = [two.split((X[start : start + 2], Y[start : start + 2])) for start in range(0, 10, 2)]
        values = evaluate.over(1.0, batches)
    assert values["matrix"].sum() == 10


def test_replicas_receive_the_aggregated_parameters(two):
    """Parameters of a policy differ between the replicas between synchronization steps."""
    state = {
        "w": two.put(jdist.SyncOnRead(np.float32([[1, 1, 1], [3, 3, 3]]), "mean")),
        "own": two.put(jdist.PerReplica(np.arange(2))),
    }
    data = two.distribute_dataset((X, Y), 4, remainder="pad")
    by_state = jdist.eval_step(lambda state, batch, weights: evaluate.__wrapped__(state["w"], batch, weights))
    with two.scope():
        assert_close(by_state.over(state, data), np.float32([2, 2, 2]))


def test_policy_of_sync_is_evaluated_at_its_mean(two):
    optimizer = sync.local_sgd(optax.sgd(0.1), every=100)
    train_step = jdist.train_step(lambda w, x: (w - x) ** 2, optimizer)
    with two.scope():
        state = jdist.init(lambda: jdist.TrainState.create(jnp.float32(0), optimizer))
        state, _ = train_step(state, two.split(np.float32([1, 3])))
        value = jdist.eval_step(lambda state, x: state.params - x).over(state, [two.split(np.zeros(2, np.float32))])
    assert value == pytest.approx(0.4)  # the mean of 0.2 and 0.6


INVALID_CALLS = {
    "metric_without_weights": (
        lambda w, x: metrics.Mean().update(x), TypeError,
        r"returned result, a metric Mean, for a padded batch without the weights .*Add the parameter `weights`",
    ),
    "mean": (
        lambda w, x: {"loss": x.mean()}, ValueError,
        r"returned result\['loss'\] as float32\[\] for 2 examples\. Return one value",
    ),
    "number": (lambda w, x: 1.0, TypeError, r"returned result as 1\.0 for 2 examples"),
}  # fmt: skip


@pytest.mark.parametrize("fn, kind, message", INVALID_CALLS.values(), ids=INVALID_CALLS)
def test_invalid_results_raise(fn, kind, message, two):
    data = two.distribute_dataset(X[:, 0], 4, remainder="pad")
    with two.scope(), pytest.raises(kind, match=message):
        jdist.eval_step(fn).over(1.0, data)


def test_evaluation_outside_the_scope_of_the_state_is_an_error_with_a_note(two):
    w = two.put(np.ones(3, np.float32))
    with pytest.raises(ValueError, match="is on .*cpu:1, and this strategy uses") as caught:
        evaluate.over(w, [(X, Y)])
    assert "No strategy is current" in caught.value.__notes__[-1]


def test_data_without_an_end_or_without_batches_raise(two):
    with pytest.raises(ValueError, match=r"^The data set is endless"):
        evaluate.over(1.0, two.distribute_dataset((X, Y), 4, epochs=None))
    with pytest.raises(ValueError, match=r"^There are no batches to evaluate"):
        evaluate.over(1.0, [])
    with pytest.raises(TypeError, match=r"^`fn` is called with two arguments, and optionally with `weights=`"):
        jdist.eval_step(lambda batch: batch)
