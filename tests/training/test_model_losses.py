"""Losses that a model adds: regularizers, `add_loss` of Keras, `sow` of flax. They equal those of one device."""

import dataclasses

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jdist

EXAMPLES = 48
X = np.random.default_rng(0).normal(size=(EXAMPLES, 3)).astype(np.float32)
Y = (X @ np.float32([1, -2, 3]) + 1).astype(np.float32)
WEIGHTS = np.tile(np.float32([1, 2, 0, 0.5, 1, 1, 3, 1, 0, 0, 1, 2]), 4) * np.float32([1] * 24 + [3] * 24)
RATE = 0.1


def squared(outputs, targets):
    return jnp.square(outputs[:, 0] - targets)


def fit(model, strategy, rows=EXAMPLES, weights=None, **options):
    """Returns the fit of one step, and its trainer."""
    data = (X[:rows], Y[:rows]) if weights is None else (X[:rows], Y[:rows], weights[:rows])
    trainer = jdist.Trainer(model, optax.sgd(RATE), squared, strategy=strategy)
    options = {"batch_size": EXAMPLES, "shuffle": False, "progress": "off", **options}
    return trainer, trainer.fit(data, **options)


def assert_equals(fitted, loss, params):
    """Asserts that the loss of the only step, in both forms, and the parameters after it have these values."""
    np.testing.assert_allclose(fitted.history.losses[1], loss, rtol=1e-5)
    np.testing.assert_allclose(fitted.history["loss"], [loss], rtol=1e-5)
    for a, b in zip(jax.tree.leaves(fitted.state.params), jax.tree.leaves(params), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


# -- flax --------------------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Added:
    """The losses that the models of this section add, and their value on one device."""

    of_params: float = 0.0
    scalar: float = 0.0
    per_example: float = 0.0

    def values(self, kernel, outputs):
        return [
            self.of_params * jnp.square(kernel).sum(),
            self.scalar * jnp.abs(outputs).mean(),
            self.per_example * jnp.square(outputs),
        ]

    def loss(self, w, x, y, weights=None):
        outputs = x @ w["kernel"] + w["bias"]
        of_params, scalar, per_example = self.values(w["kernel"], outputs)
        is_example = np.ones(len(x)) if weights is None else weights != 0
        per_example = (per_example.mean(1) * is_example).sum() / is_example.sum()
        return jnp.average(squared(outputs, y), weights=weights) + of_params + scalar + per_example


class LinenAdds(nn.Module):
    added: Added

    @nn.compact
    def __call__(self, x):
        dense = nn.Dense(2)
        outputs = dense(x)
        for number, value in enumerate(self.added.values(dense.variables["params"]["kernel"], outputs)):
            self.sow("losses", f"value_{number % 2}", value)  # one name is used twice
        self.sow("intermediates", "outputs", outputs)
        return outputs


class NnxAdds(nnx.Module):
    def __init__(self, added):
        self.dense, self.added = nnx.Linear(3, 2, rngs=nnx.Rngs(0)), added

    def __call__(self, x):
        outputs = self.dense(x)
        for value in self.added.values(self.dense.kernel[...], outputs):
            self.sow(nnx.Intermediate, "losses", value)
        self.sow(nnx.Intermediate, "outputs", outputs)
        return outputs


FLAX = {"linen": LinenAdds, "nnx": NnxAdds}
every_flax = pytest.mark.parametrize("kind", FLAX.values(), ids=FLAX)


def dense_params(state):
    return jax.device_get(state.params["Dense_0"] if "Dense_0" in state.params else state.params["dense"])


def one_step(trainer, added, rows, weights=None):
    """Returns the loss before a step, and the parameters after it, on one device."""
    w = dense_params(trainer.init(X))
    part = None if weights is None else weights[:rows]
    loss, grads = jax.value_and_grad(added.loss)(w, X[:rows], Y[:rows], part)
    return loss, jax.tree.map(lambda p, g: p - RATE * g, w, grads)


@pytest.mark.slow
@every_flax
def test_losses_of_flax_modules_are_added_as_on_one_device(kind, strategy):
    added = Added(of_params=0.3, scalar=0.7, per_example=0.2)
    trainer, fitted = fit(kind(added), strategy, micro_batches=2)
    assert_equals(fitted, *one_step(trainer, added, EXAMPLES))
    evaluated = trainer.evaluate(fitted.state, (X, Y), batch_size=EXAMPLES)["loss"]
    np.testing.assert_allclose(evaluated, added.loss(dense_params(fitted.state), X, Y), rtol=1e-5)


@pytest.mark.slow
@every_flax
@pytest.mark.parametrize("rows, weights, micro_batches", [(5, None, 3), (29, WEIGHTS, 1)], ids=["padding", "weights"])
def test_losses_of_parameters_and_of_examples_are_exact_with_padding_and_weights(
    kind, rows, weights, micro_batches, two
):
    added = Added(of_params=0.3, per_example=0.2)
    trainer, fitted = fit(kind(added), two, rows, weights, micro_batches=micro_batches)
    assert_equals(fitted, *one_step(trainer, added, rows, weights))


def test_number_has_the_weight_of_the_examples_of_its_replica(two):
    added = Added(scalar=1.0)
    weights = np.float32(np.arange(EXAMPLES) < 29)
    trainer, fitted = fit(NnxAdds(added), two, weights=weights)
    w = dense_params(trainer.init(X))
    outputs = X @ np.asarray(w["kernel"]) + np.asarray(w["bias"])
    number = (24 * np.abs(outputs[:24]).mean() + 5 * np.abs(outputs[24:]).mean()) / 29
    np.testing.assert_allclose(fitted.history.losses[1], squared(outputs[:29], Y[:29]).mean() + number, rtol=1e-5)


def test_intermediates_of_an_earlier_call_have_no_effect(two):
    added = Added(of_params=0.3)
    module = NnxAdds(added)
    with pytest.warns(DeprecationWarning):
        module(X)
    before = nnx.to_pure_dict(nnx.state(module))
    trainer, fitted = fit(module, two)
    assert_equals(fitted, *one_step(trainer, added, EXAMPLES))
    jax.tree.map(np.testing.assert_array_equal, before, nnx.to_pure_dict(nnx.state(module)))


@pytest.mark.slow
def test_losses_in_lower_precision_are_added_in_float32(two):
    trainer = jdist.Trainer(
        LinenAdds(Added(of_params=0.3)), optax.sgd(RATE), squared, strategy=two, precision=jdist.Precision()
    )
    fitted = trainer.fit((X, Y), batch_size=EXAMPLES, shuffle=False, progress="off")
    reference, _ = one_step(trainer, Added(of_params=0.3), EXAMPLES)
    np.testing.assert_allclose(fitted.history.losses[1], reference, rtol=0.02)


@every_flax
def test_loss_of_another_shape_raises(kind, two):
    class Wrong(Added):
        def values(self, kernel, outputs):
            return [jnp.ones(5)]

    with pytest.raises(ValueError, match=r"The model adds the loss float32\[5\] for 24 examples.*\[24, \.\.\.\]"):
        fit(kind(Wrong()), two)


# -- Keras -------------------------------------------------------------------------------------------------------------


def keras_model(keras, mean=0.0):
    """Returns a Keras model with all kinds of losses; a layer is used twice."""
    keras.utils.clear_session()  # the names of the layers are compared in alphabetical order: dense_10 would come before dense_9
    layers, ops = keras.layers, keras.ops

    class Adds(layers.Layer):
        def call(self, x):
            self.add_loss(0.01 * ops.square(x))  # an array: Keras adds up its values
            self.add_loss(mean * ops.mean(ops.abs(x)))
            return x

    inputs, adds = keras.Input((3,)), Adds()
    dense = layers.Dense(3, "tanh", kernel_regularizer="l2", activity_regularizer=keras.regularizers.L1(0.3))
    hidden = adds(dense(adds(inputs)))
    return keras.Model(inputs, layers.Dense(1, bias_regularizer=keras.regularizers.L1L2(0.1, 0.2))(hidden))


def keras_loss(keras, model, x, y, weights=None):
    """Returns the loss that Keras reports, and its gradient."""

    def loss(params):
        mapping = list(zip(model.trainable_variables, params, strict=True))
        with keras.StatelessScope(mapping, collect_losses=True):
            outputs = model(x)
            losses = model.losses
        return jnp.average(squared(outputs, y), weights=weights) + sum(jnp.sum(value) for value in losses)

    return jax.value_and_grad(loss)([v.value for v in model.trainable_variables])


@pytest.mark.slow
def test_losses_of_a_keras_model_are_added_as_on_one_device(strategy, keras):
    model = keras_model(keras, mean=0.5)
    loss, grads = keras_loss(keras, model, X, Y)
    params = {v.path: v.value - RATE * g for v, g in zip(model.trainable_variables, grads, strict=True)}
    before = [np.asarray(v.value) for v in model.variables]
    trainer, fitted = fit(model, strategy, micro_batches=2)
    assert_equals(fitted, loss, params)
    for v, value in zip(model.variables, before, strict=True):
        np.testing.assert_array_equal(np.asarray(v.value), value)
    initial = trainer.evaluate(trainer.init(X), (X, Y), batch_size=EXAMPLES)["loss"]
    np.testing.assert_allclose(initial, loss, rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("rows, micro_batches", [(29, 1), (5, 3)])
def test_regularizers_and_arrays_of_a_keras_model_are_exact_with_padding(rows, micro_batches, two, keras):
    model = keras_model(keras)
    loss, grads = keras_loss(keras, model, X[:rows], Y[:rows])
    params = {v.path: v.value - RATE * g for v, g in zip(model.trainable_variables, grads, strict=True)}
    regularizers = [layer.activity_regularizer for layer in model.layers]
    assert_equals(fit(model, two, rows, micro_batches=micro_batches)[1], loss, params)
    assert [layer.activity_regularizer for layer in model.layers] == regularizers


@pytest.mark.slow
def test_keras_reports_the_same_loss(two, keras):
    model = keras_model(keras, mean=0.5)
    model.compile("sgd", "mse")
    reported = model.evaluate(X, Y[:, None], batch_size=EXAMPLES, verbose=0)
    trainer = jdist.Trainer(model, loss=keras.losses.mean_squared_error, strategy=two)
    state = jdist.Trainer(model, optax.sgd(0.1), squared, strategy=two).init(X)
    # Keras' own evaluation loses the losses of the first call of the layer that is used twice.
    first = 0.01 * np.square(X).sum() + 0.5 * np.abs(X).mean()
    evaluated = trainer.evaluate(state, (X, Y[:, None]), batch_size=EXAMPLES)["loss"]
    np.testing.assert_allclose(evaluated - first, reported, rtol=1e-4)
