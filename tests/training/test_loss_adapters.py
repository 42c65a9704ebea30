"""Loss functions of Keras in a `Trainer`: the argument order, and one value per example."""

import functools

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jdist

RNG = np.random.default_rng(0)
X = RNG.normal(size=(10, 3)).astype(np.float32)
LABELS = (X[:, :1] > 0).astype(np.float32)
CLASSES = RNG.integers(0, 4, 10)


def evaluate(two, loss, targets, width, **options):
    """Returns the loss and the metrics of 10 examples in batches of 4, and the outputs."""
    weights = RNG.normal(size=(3, width)).astype(np.float32)
    model = (lambda key, x: jnp.asarray(weights), lambda w, x: x @ w)
    trainer = jdist.Trainer(model, optax.sgd(0.1), loss, strategy=two, **options)
    return trainer.evaluate(trainer.init(X), (X, targets), batch_size=4), X @ weights


def subclass(keras):
    """Returns a loss whose attributes its `get_config` does not return, and that calls another loss."""

    class Scaled(keras.losses.Loss):
        def __init__(self, scale, inner):
            super().__init__()
            self.scale, self.inner = scale, inner

        def call(self, y_true, y_pred):
            return self.scale * self.inner(y_true, y_pred)

    return Scaled


def losses(keras):
    """Yields losses, their targets, and the width of the outputs."""
    of_logits = lambda function: functools.partial(function, from_logits=True)
    yield keras.losses.BinaryCrossentropy(from_logits=True, reduction=None), LABELS, 1
    yield keras.losses.BinaryCrossentropy(from_logits=True), LABELS, 1
    yield keras.losses.SparseCategoricalCrossentropy(from_logits=True), CLASSES, 4
    yield keras.losses.Huber(), LABELS[:, 0], 1
    yield of_logits(keras.losses.binary_crossentropy), LABELS, 1
    yield of_logits(keras.ops.sparse_categorical_crossentropy), CLASSES, 4
    yield keras.losses.Huber(delta=0.3), LABELS, 1
    yield keras.losses.BinaryFocalCrossentropy(gamma=3.0, from_logits=True, label_smoothing=0.1), LABELS, 1
    yield subclass(keras)(7.0, keras.losses.LogCosh(reduction=None)), LABELS, 1


def test_keras_loss_is_called_with_the_targets_first_and_averaged_over_the_examples(subtests, two, keras):
    for loss, targets, width in losses(keras):
        with subtests.test(str(loss)):
            results, outputs = evaluate(two, loss, targets, width)
            expected = float(np.mean(loss(jnp.asarray(targets), jnp.asarray(outputs))))
            assert results["loss"] == pytest.approx(expected, abs=1e-6)


def test_keras_loss_trains_as_the_loss_of_optax_does(two, keras):
    model = (lambda key, x: jnp.zeros((3, 1)), lambda w, x: x @ w)

    def train(loss):
        trainer = jdist.Trainer(model, optax.sgd(0.1), loss, strategy=two)
        return trainer.fit((X, LABELS), batch_size=4, progress="off").state.params

    loss = keras.losses.BinaryCrossentropy(from_logits=True)
    np.testing.assert_allclose(train(loss), train(optax.sigmoid_binary_cross_entropy), atol=1e-6)
    assert loss.reduction == "sum_over_batch_size"  # the object of the user is not changed


def test_weights_of_examples_apply_to_a_keras_loss(two, keras):
    loss, weights = keras.losses.Huber(delta=0.2), np.arange(10, dtype=np.float32)
    trainer = jdist.Trainer((lambda key, x: x[0], lambda w, x: x), loss=loss, strategy=two)
    result = trainer.evaluate({"params": X[0]}, (X, 0 * X, weights), batch_size=4)["loss"]
    each = keras.losses.Huber(delta=0.2, reduction=None)(0 * X, X)
    assert result == pytest.approx(float(np.average(each, weights=weights)), rel=1e-5)


def test_keras_loss_of_a_complete_batch_raises(two, keras):
    for loss in (keras.losses.Dice(), subclass(keras)(1.0, keras.losses.Huber())):
        message = rf"Keras loss {loss.name} returned one number .*`reduction=None`; of `Dice`"
        with pytest.raises(ValueError, match=message):
            evaluate(two, loss, LABELS, 1)
        assert loss.reduction == "sum_over_batch_size"


def test_keras_function_as_a_metric_is_called_with_the_targets_first(two, keras):
    metrics = {"percent": keras.losses.mean_absolute_percentage_error, "huber": keras.losses.Huber()}
    results, outputs = evaluate(two, optax.squared_error, LABELS + 1, 1, metrics=metrics)
    for name, metric in metrics.items():
        assert results[name] == pytest.approx(float(np.mean(metric(LABELS + 1, outputs))), rel=1e-5)


def test_function_with_parameters_named_as_in_keras_is_called_with_the_targets_first(two):
    results, outputs = evaluate(two, lambda y_true, y_pred: y_pred - 2 * y_true, LABELS, 1)
    assert results["loss"] == pytest.approx(float(np.mean(outputs - 2 * LABELS)), abs=1e-6)


def test_loss_with_sum_reduction_and_loss_class_and_metric_of_keras_raise(subtests, two, keras):
    rows = [
        (dict(loss=keras.losses.MeanSquaredError(reduction="sum")), ValueError,
         r'Keras loss mean_squared_error has reduction="sum".*`reduction=None`'),
        (dict(loss=keras.losses.Huber), TypeError, r"`loss` is the class Huber\. Pass an instance of it: `Huber\(\.\.\.\)`"),
        (dict(metrics={"auc": keras.metrics.AUC}), TypeError, "The metric 'auc' must be a metric of .* class AUC: call it"),
    ]  # fmt: skip
    for options, error, message in rows:
        with subtests.test(message), pytest.raises(error, match=message):
            jdist.Trainer((lambda key, x: x, lambda w, x: x), strategy=two, **options)
