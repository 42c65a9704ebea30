"""Evaluation and prediction: exact over all examples and in order, for every batch size and strategy; and errors."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jdist

from digits_data import load_digits
from laws import STRATEGIES, Numbered, each_row

IMAGES, LABELS = load_digits()
IMAGES = IMAGES.reshape(-1, 64)
WEIGHTS = np.random.default_rng(0).normal(size=(64, 10)).astype(np.float32)
X = np.random.default_rng(1).normal(size=(11, 3)).astype(np.float32)
Y = (X @ np.float32([1, -2, 3])).astype(np.float32)
LINEAR = (lambda key, x: jnp.float32([1, 1, 1]), lambda w, x: x @ w)
cross_entropy = optax.softmax_cross_entropy_with_integer_labels
place = functools.cache(lambda name: STRATEGIES[name]())


def margin(outputs, targets):
    return outputs[jnp.arange(len(outputs)), targets] - outputs.max(-1)


METRICS = {
    "accuracy": jdist.metrics.Accuracy(),
    "confusion": (jdist.metrics.ConfusionMatrix.empty(10), lambda outputs, targets: (outputs.argmax(-1), targets)),
    "margin": margin,
}


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Correct(jdist.metrics.Metric):
    """The number of correct predictions. With other dtypes or shapes than `empty`, it cannot be accumulated."""

    count: Any

    def update(self, outputs, targets, *, weights=None):
        return Correct(self.count + ((outputs.argmax(-1) == targets) * weights).sum())

    def compute(self):
        return self.count


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Integers(jdist.metrics.Metric):
    """Integers that float32 does not have: per replica and batch, `2**24 + 1` and the number of examples."""

    sums: Any

    def update(self, outputs, targets, *, weights=None):
        return Integers(self.sums + jnp.array([[2**24 + 1], [len(targets)]]))

    def compute(self):
        return self.sums


@functools.cache
def classifier(name):
    """Returns a trainer for the digits, and a state whose parameters are `WEIGHTS`."""
    model = (lambda key, x: jnp.asarray(WEIGHTS), lambda w, x: x @ w)
    trainer = jdist.Trainer(model, optax.sgd(0.1), cross_entropy, metrics=METRICS, strategy=place(name))
    return trainer, trainer.init(IMAGES)


@functools.cache
def regressor(name="mirrored_2", **options):
    trainer = jdist.Trainer(LINEAR, optax.sgd(0.1), optax.squared_error, strategy=place(name), **options)
    return trainer, trainer.init(X)


def by_numpy(images, labels):
    """Returns the loss and the metrics of the classifier, computed in float64."""
    logits = images.astype(np.float64) @ WEIGHTS
    peaks, predictions, rows = logits.max(-1), logits.argmax(-1), np.arange(len(logits))
    confusion = np.zeros((10, 10))
    np.add.at(confusion, (labels, predictions), 1)
    log_sums = np.log(np.exp(logits - peaks[:, None]).sum(-1)) + peaks
    return {
        "loss": (log_sums - logits[rows, labels]).mean(),
        "accuracy": (predictions == labels).mean(),
        "confusion": confusion,
        "margin": (logits[rows, labels] - peaks).mean(),
        "examples": len(labels),
    }


PLACES = [name for name in STRATEGIES if name != "mirrored_1"]
SIZES = [("mirrored_2", size) for size in (14, 1796, 2000)] + [("mirrored_3", 6), ("sharded_4", 4000)]


@pytest.mark.parametrize("name, size", [*((name, 240) for name in PLACES), *SIZES])
def test_metrics_of_all_digits_equal_those_of_numpy(name, size):
    trainer, state = classifier(name)
    results, expected = trainer.evaluate(state, (IMAGES, LABELS), batch_size=size), by_numpy(IMAGES, LABELS)
    assert results["examples"] == 1797 and results.keys() == expected.keys()
    np.testing.assert_array_equal(results["confusion"], expected["confusion"])
    assert results["accuracy"] == pytest.approx(expected["accuracy"], abs=1e-7)
    assert results["loss"] == pytest.approx(expected["loss"], rel=1e-5)
    assert results["margin"] == pytest.approx(expected["margin"], rel=1e-5)
    assert all(isinstance(results[name], float) for name in ("loss", "accuracy", "margin"))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mirrored_3", "sharded_4", "central_2"])
def test_predictions_are_in_the_order_of_the_data_without_padding(name):
    trainer, state = classifier(name)
    outputs = trainer.predict(state, IMAGES, batch_size=240)
    assert isinstance(outputs, np.ndarray) and outputs.dtype == np.float32
    np.testing.assert_allclose(outputs, IMAGES @ WEIGHTS, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("rows", range(1, 12))
def test_any_number_of_examples_is_evaluated_and_predicted_exactly(rows):
    trainer, state = regressor()
    results = trainer.evaluate(state, (X[:rows], Y[:rows]), batch_size=4)
    assert results == {
        "loss": pytest.approx(np.mean((X[:rows].sum(1) - Y[:rows]) ** 2), rel=1e-5),
        "examples": rows,
    }
    np.testing.assert_allclose(trainer.predict(state, X[:rows], batch_size=4), X[:rows].sum(1), rtol=1e-5, atol=1e-6)


def test_weights_of_examples_apply_to_the_loss_and_not_to_the_count():
    trainer, state = regressor()
    weights = np.float32([0, 1, 2, 0.5, 0, 3, 1, 1, 0, 0, 4])
    results = trainer.evaluate(state, (X, Y, weights), batch_size=4)
    assert results["loss"] == pytest.approx(np.average((X.sum(1) - Y) ** 2, weights=weights), rel=1e-5)
    assert results["examples"] == 11


def test_examples_of_weight_0_are_predicted_and_targets_are_not_used():
    trainer, state = regressor()
    expected = trainer.predict(state, X, batch_size=4)
    for data in ((X, Y), (X, Y + np.nan), (X, Y, np.zeros(11, np.float32))):
        np.testing.assert_array_equal(trainer.predict(state, data, batch_size=4), expected)


def test_trees_of_outputs_are_predicted_as_trees(two):
    def apply(w, x):
        return {"sum": x @ w, "pair": (x, (x > 0).astype(jnp.int8)), "half": x.astype(jnp.bfloat16), "is": x[:, 0] > 0}

    trainer = jdist.Trainer((LINEAR[0], apply), optax.sgd(0.1), strategy=two)
    results = trainer.predict(trainer.init(X), X, batch_size=4)
    np.testing.assert_array_equal(results["pair"][0], X)
    np.testing.assert_array_equal(results["pair"][1], (X > 0).astype(np.int8))
    np.testing.assert_array_equal(results["half"], X.astype(jnp.bfloat16))
    np.testing.assert_array_equal(results["is"], X[:, 0] > 0)
    assert results["pair"][1].dtype == np.int8 and results["half"].dtype == jnp.bfloat16 and results["is"].dtype == bool
    np.testing.assert_allclose(results["sum"], X.sum(1), rtol=1e-5, atol=1e-6)


def test_replicated_outputs_are_predicted_for_each_example(two):
    """Outputs that are proved replicated are returned by `run` in another form."""
    model = (lambda key, x: jnp.arange(2.0), lambda w, x: {"same": jnp.broadcast_to(w, (len(x), 2)), "own": x})
    trainer = jdist.Trainer(model, optax.sgd(0.1), strategy=two)
    results = trainer.predict(trainer.init(X), X, batch_size=4)
    np.testing.assert_array_equal(results["same"], np.tile(np.float32([0, 1]), (11, 1)))
    np.testing.assert_array_equal(results["own"], X)


def test_data_of_any_kind_are_not_shuffled():
    trainer, state = regressor()
    expected = trainer.predict(state, X, batch_size=4)
    numbered = Numbered([(x, y) for x, y in zip(X, Y, strict=True)])
    batches = [(X[:4], Y[:4]), (X[4:8], Y[4:8]), (X[8:], Y[8:])]
    np.testing.assert_array_equal(trainer.predict(state, numbered, batch_size=4), expected)
    np.testing.assert_array_equal(trainer.predict(state, iter(batches)), expected)
    assert trainer.evaluate(state, numbered, batch_size=4) == trainer.evaluate(state, (X, Y), batch_size=4)
    assert trainer.evaluate(state, iter(batches)) == trainer.evaluate(state, (X, Y), batch_size=4)


@pytest.mark.parametrize("remainder, rows", [("pad", 11), ("drop", 8)])
def test_distributed_dataset_is_used_unchanged(remainder, rows, two):
    trainer, state = regressor()
    dataset = trainer.strategy.distribute_dataset((X, Y), 4, remainder=remainder, shuffle=False)
    for _ in range(2):
        np.testing.assert_allclose(trainer.predict(state, dataset), X[:rows].sum(1), rtol=1e-5, atol=1e-6)
        assert trainer.evaluate(state, dataset)["examples"] == rows


@pytest.mark.timeout(20)  # otherwise an error would never end
@each_row("epochs", [3, None])
def test_each_example_counts_once_if_the_dataset_repeats(epochs):
    trainer, state = regressor()
    dataset = trainer.strategy.distribute_dataset((X, Y), 4, remainder="pad", shuffle=False, epochs=epochs)
    assert trainer.evaluate(state, dataset)["examples"] == 11
    assert len(trainer.predict(state, dataset)) == 11


def test_nan_of_padding_is_ignored(two):
    model = (LINEAR[0], lambda w, x, weights: jnp.where(weights > 0, x @ w, jnp.nan))
    trainer = jdist.Trainer(
        model, optax.sgd(0.1), optax.squared_error, metrics={"error": lambda o, t: jnp.abs(o - t)}, strategy=two
    )
    results = trainer.evaluate(trainer.init(X), (X[:9], Y[:9]), batch_size=8)
    assert results["loss"] == pytest.approx(np.mean((X[:9].sum(1) - Y[:9]) ** 2), rel=1e-5)
    assert results["error"] == pytest.approx(np.mean(np.abs(X[:9].sum(1) - Y[:9])), rel=1e-5)


def test_nan_of_examples_is_not_ignored():
    trainer, state = regressor()
    x = X.copy()
    x[3] = np.nan
    assert np.isnan(trainer.evaluate(state, (x, Y), batch_size=4)["loss"])
    assert np.isnan(trainer.predict(state, x, batch_size=4)).nonzero()[0].tolist() == [3]


def test_several_losses_per_example_are_averaged(two):
    model = (lambda key, x: jnp.float32(2), lambda w, x: w * x)
    trainer = jdist.Trainer(model, optax.sgd(0.1), optax.squared_error, strategy=two)
    results = trainer.evaluate(trainer.init(X), (X, X[:, ::-1].copy()), batch_size=4)  # losses [batch, length]
    assert results["loss"] == pytest.approx(np.mean((2 * X - X[:, ::-1]) ** 2), rel=1e-5)


def test_model_is_traced_once_for_all_batches(two):
    traced = []

    def apply(w, x):
        traced.append(x.shape)
        return x @ w

    trainer = jdist.Trainer((LINEAR[0], apply), optax.sgd(0.1), optax.squared_error, strategy=two)
    state = trainer.init(X)
    for call in (
        lambda: trainer.predict(state, X, batch_size=2),
        lambda: trainer.evaluate(state, (X, Y), batch_size=2),
    ):
        call()
        num_traces = len(traced)
        call()
        assert len(traced) == num_traces
    assert len(traced) <= 4


def test_targets_and_counts_are_exact_in_lower_precision(two):
    precision = jdist.Precision(compute_dtype=jnp.bfloat16)
    model = (lambda key, x: jnp.zeros(3), lambda w, x: x @ w)
    metrics = {"target": lambda outputs, targets: targets, "mse": jdist.metrics.MeanSquaredError()}
    trainer = jdist.Trainer(
        model, optax.sgd(0.1), optax.squared_error, metrics=metrics, strategy=two, precision=precision
    )
    targets = np.full(600, 1.001, np.float32)  # 1 in bfloat16, which also cannot represent 300, the number per replica
    results = trainer.evaluate(trainer.init(X), (np.ones((600, 3), np.float32), targets), batch_size=600)
    assert results["target"] == pytest.approx(1.001, rel=1e-6)
    assert results["loss"] == results["mse"] == pytest.approx(1.001**2, rel=1e-6)


@pytest.mark.parametrize("policy", [jdist.sync.local_sgd, jdist.sync.diloco], ids=["local_sgd", "diloco"])
def test_parameters_that_differ_between_replicas_are_averaged_for_evaluation(policy, two):
    trainer = jdist.Trainer(LINEAR, policy(optax.sgd(0.1), every=5), optax.squared_error, strategy=two)
    state = trainer.fit((X[:8], Y[:8]), batch_size=8, steps=2, shuffle=False, progress="off").state
    first, second = (np.asarray(one) for one in state.params.values)
    assert (first != second).any()
    w = (first + second) / 2
    np.testing.assert_allclose(trainer.predict(state, X, batch_size=4), X @ w, rtol=1e-4, atol=1e-5)
    results = trainer.evaluate(state, (X, Y), batch_size=4)
    assert results["loss"] == pytest.approx(np.mean((X @ w - Y) ** 2), rel=1e-4)


def test_state_on_the_host_is_accepted():
    trainer, state = regressor()
    host_state = jax.device_get(state)
    assert trainer.evaluate(host_state, (X, Y), batch_size=4) == trainer.evaluate(state, (X, Y), batch_size=4)


# -- errors ------------------------------------------------------------------------------------------------------------


distributed = lambda strategy, **options: strategy.distribute_dataset((X, Y), 4, **options)
mirrored = lambda *numbers: jdist.MirroredStrategy([f"cpu:{number}" for number in numbers])
OTHER_DEVICES = "is on .*this strategy uses cpu:0, cpu:1"
NO_PARAMS = "The state must have `params`, as an attribute or a key"
# Functions from a strategy and a state to the arguments of `evaluate` and `predict`, the error, and whether it names `data`.
WRONG_ARGUMENTS = {
    "empty": (lambda s, state: (state, (X[:0], Y[:0]), 4), ValueError, "The source is empty", True),
    "empty_iterator": (lambda s, state: (state, iter([]), None), ValueError, "The source is empty", False),
    "no_batch_size": (
        lambda s, state: (state, (X, Y), None), ValueError, "consists of arrays, .* Pass the number of examples per batch", True,
    ),
    "two_batch_sizes": (
        lambda s, state: (state, distributed(s, remainder="pad"), 4), ValueError,
        "`data` is already distributed.*`batch_size`", True,
    ),
    "other_devices": (lambda s, state: (state, distributed(mirrored(2, 3)), None), ValueError, OTHER_DEVICES, False),
    "fewer_devices": (lambda s, state: (state, distributed(mirrored(0)), None), ValueError, OTHER_DEVICES, False),
    "more_devices": (
        lambda s, state: (state, distributed(mirrored(0, 1, 2, 3), remainder="pad"), None), ValueError, OTHER_DEVICES, False,
    ),
    "state_of_other_devices": (lambda s, state: (regressor("sharded_4")[1], (X, Y), 4), ValueError, OTHER_DEVICES, False),
    "array": (lambda s, state: (np.ones(3, np.float32), (X, Y), 4), TypeError, NO_PARAMS, False),
    "dict": (lambda s, state: ({"weights": np.ones(3)}, (X, Y), 4), TypeError, NO_PARAMS, False),
    "none": (lambda s, state: (None, (X, Y), 4), TypeError, NO_PARAMS, False),
}  # fmt: skip


@each_row("make, error, message, names_data", WRONG_ARGUMENTS.values(), WRONG_ARGUMENTS)
def test_wrong_data_and_states_raise(make, error, message, names_data):
    trainer, state = regressor()
    for call in (trainer.evaluate, trainer.predict):
        with pytest.raises(error, match=message) as raised:
            wrong_state, data, batch_size = make(trainer.strategy, state)
            call(wrong_state, data, batch_size=batch_size)
        assert not names_data or "`data`" in "".join([str(raised.value), *getattr(raised.value, "__notes__", ())])


WRONG_OUTPUTS = [
    (lambda o: o.mean(), r"outputs is float32\[\] for 2 examples"),
    (lambda o: {"a": o, "b": o[:1]}, r"outputs\['b'\] is float32\[1\] for 2 examples"),
    (lambda o: (o, jnp.float32(1)), r"outputs\[1\] is float32\[\] for 2 examples"),
    (lambda o: jnp.concatenate([o, o]), r"outputs is float32\[4\] for 2 examples"),
]


@each_row("outputs, message", WRONG_OUTPUTS, ["scalar", "fewer", "number", "more"])
def test_outputs_that_are_not_one_value_per_example_raise(outputs, message, two):
    trainer = jdist.Trainer((LINEAR[0], lambda w, x: outputs(x @ w)), optax.sgd(0.1), strategy=two)
    with pytest.raises(ValueError, match=message + r".*\[batch, \.\.\.\]"):
        trainer.predict(trainer.init(X), X, batch_size=4)


def test_sums_of_several_dtypes_are_exact(two):
    model = (lambda key, x: jnp.asarray(WEIGHTS), lambda w, x: x @ w)
    count = 2**24 + 1  # not a float32
    metrics = {"correct": Correct(np.float32(0)), "integers": Integers(np.int32([[0], [0]])), "margin": margin}
    trainer = jdist.Trainer(model, optax.sgd(0.1), cross_entropy, metrics=metrics, strategy=two)
    values = trainer.evaluate(trainer.init(IMAGES), (IMAGES[:8], LABELS[:8]), batch_size=4)
    expected = by_numpy(IMAGES[:8], LABELS[:8])
    assert values["correct"] == expected["accuracy"] * 8 and values["integers"].tolist() == [[4 * count], [8]]
    np.testing.assert_allclose(values["margin"], expected["margin"], rtol=1e-4)


def test_metric_whose_dtype_depends_on_the_batch_raises(two):
    model = (lambda key, x: jnp.asarray(WEIGHTS), lambda w, x: x @ w)
    trainer = jdist.Trainer(
        model, optax.sgd(0.1), cross_entropy, metrics={"correct": Correct(np.int32(0))}, strategy=two
    )
    message = r"'correct' is Correct\(count=int32\[\]\) without examples, and Correct\(count=float32\[\]\) with a batch"
    with pytest.raises(ValueError, match=message):
        trainer.evaluate(trainer.init(IMAGES), (IMAGES, LABELS), batch_size=4)


def test_evaluation_needs_a_loss_and_prediction_needs_neither_loss_nor_optimizer(two):
    _, state = regressor()
    trainer = jdist.Trainer(LINEAR, strategy=two)
    with pytest.raises(TypeError, match="`evaluate` needs the argument `loss` of the trainer"):
        trainer.evaluate(None, (X, Y), batch_size=4)
    np.testing.assert_allclose(trainer.predict(state, X, batch_size=4), X.sum(1), rtol=1e-5, atol=1e-6)


def test_random_numbers_in_evaluation_differ_between_the_replicas_and_do_not_warn(two):
    """A model such as a variational autoencoder draws in evaluation, too. Warnings are errors in the tests."""
    noisy = (lambda key, x: jnp.zeros(3), lambda w, x, key: x @ w + jax.random.normal(key, (len(x),)))
    trainer = jdist.Trainer(noisy, optax.sgd(0.0), optax.squared_error, strategy=two)
    state = trainer.fit((X, Y), batch_size=4, epochs=1, progress="off").state
    assert len(set(trainer.predict(state, X[:8], batch_size=8).tolist())) == 8
    assert trainer.evaluate(state, (X, Y), batch_size=4)["examples"] == 11
