"""Several inputs and random streams of models; models of haiku and equinox."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jdist

EXAMPLES = 8
X = np.random.default_rng(0).normal(size=(EXAMPLES, 3)).astype(np.float32)
Z = np.random.default_rng(1).normal(size=(EXAMPLES, 2)).astype(np.float32)
Y = (X.sum(1) - Z[:, 0]).astype(np.float32)


def squared(outputs, targets):
    return jnp.square(outputs.reshape(len(outputs)) - targets)


def trainer_of(model, strategy, optimizer=None, loss=squared, **options):
    return jdist.Trainer(model, optimizer or optax.sgd(0.1), loss, strategy=strategy, **options)


def fit(trainer, inputs, steps=2, **options):
    return trainer.fit((inputs, Y), batch_size=EXAMPLES, shuffle=False, progress="off", steps=steps, **options)


# -- several inputs ----------------------------------------------------------------------------------------------------


class LinenTwo(nn.Module):
    @nn.compact
    def __call__(self, x, z, train=False):
        return nn.Dense(1)(x) + nn.Dense(1)(z)


class NnxTwo(nnx.Module):
    def __init__(self):
        self.x, self.z = nnx.Linear(3, 1, rngs=nnx.Rngs(0)), nnx.Linear(2, 1, rngs=nnx.Rngs(1))

    def __call__(self, x, z):
        return self.x(x) + self.z(z)


def keras_two(keras):
    class Two(keras.Model):
        def __init__(self):
            super().__init__()
            self.x, self.z = keras.layers.Dense(1), keras.layers.Dense(1)

        def call(self, x, z, training=False):
            return self.x(x) + self.z(z)

    model = Two()
    model(X, Z)
    return model


def pair(keras):
    init = lambda key, x, z: {"x": jnp.ones(x.shape[-1]), "z": jnp.ones(z.shape[-1])}
    return init, lambda params, x, z, train: x @ params["x"] + z @ params["z"]


def haiku_two(keras):
    hk = pytest.importorskip("haiku")
    return hk.transform(lambda x, z, is_training: hk.Linear(1)(x) + hk.Linear(1)(z))


def equinox_two(keras):
    eqx = pytest.importorskip("equinox")

    class Two(eqx.Module):
        x: eqx.nn.Linear
        z: eqx.nn.Linear

        def __call__(self, x, z, *, key=None):
            return self.x(x) + self.z(z)

    return Two(eqx.nn.Linear(3, 1, key=jax.random.key(0)), eqx.nn.Linear(2, 1, key=jax.random.key(1)))


TWO_INPUTS = {
    "linen": lambda keras: LinenTwo(),
    "nnx": lambda keras: NnxTwo(),
    "keras": keras_two,
    "pair": pair,
    "haiku": haiku_two,
    "equinox": equinox_two,
}


@pytest.mark.parametrize("make", TWO_INPUTS.values(), ids=TWO_INPUTS)
def test_several_inputs_are_passed_by_position_and_by_keyword(make, two, keras):
    trainer = trainer_of(make(keras), two)
    by_position, by_keyword = fit(trainer, (X, Z)), fit(trainer, {"z": Z, "x": X})
    assert by_position.history.losses == by_keyword.history.losses
    assert by_position.history.losses[2] < by_position.history.losses[1]
    predictions = trainer.predict(by_position.state, ({"x": X, "z": Z}, Y), batch_size=4)
    np.testing.assert_allclose(predictions, trainer.apply(jax.device_get(by_position.state), (X, Z)), rtol=1e-5)


def test_inputs_of_a_model_with_one_parameter_are_one_argument(two):
    apply = lambda w, inputs: inputs[0] @ w + inputs[1][:, 0]
    fitted = fit(trainer_of((lambda key, inputs: jnp.zeros(inputs[0].shape[-1]), apply), two), (X, Z))
    assert fitted.steps == 2
    apply = lambda w, inputs: inputs["a"] @ w + inputs["b"][:, 0]
    fitted = fit(trainer_of((lambda key, inputs: jnp.zeros(inputs["a"].shape[-1]), apply), two), {"a": X, "b": Z})
    assert fitted.steps == 2


# -- random streams ----------------------------------------------------------------------------------------------------


class LinenNoise(nn.Module):
    @nn.compact
    def __call__(self, x, train):
        noise = jax.random.normal(self.make_rng("noise"), (len(x), 4))
        return nn.Dense(4)(x) * 0 + (noise if train else 0)


class NnxNoise(nnx.Module):
    def __init__(self):
        self.dense = nnx.Linear(3, 4, rngs=nnx.Rngs(0))

    def __call__(self, x, train, rngs):
        return self.dense(x) * 0 + (jax.random.normal(rngs.noise(), (len(x), 4)) if train else 0)


def haiku_noise():
    hk = pytest.importorskip("haiku")
    noise = lambda x: jax.random.normal(hk.next_rng_key(), (len(x), 4))
    return hk.transform(lambda x, is_training: hk.Linear(4)(x) * 0 + (noise(x) if is_training else 0))


NOISE = {"linen": LinenNoise, "nnx": NnxNoise, "haiku": haiku_noise}


@pytest.mark.parametrize("make", NOISE.values(), ids=NOISE)
def test_other_random_streams_differ_between_replicas_and_steps_and_are_off_in_evaluation(make, two):
    def change(outputs, targets):
        first, second = jnp.split(jdist.all_gather(outputs[:, 0], axis=0), 2)
        return jnp.abs(first - second)

    metrics = {"square": lambda outputs, targets: outputs[:, 0] ** 2, "change": change}
    trainer = trainer_of(make(), two, loss=lambda outputs, targets: outputs[:, 0], metrics=metrics)
    fitted = fit(trainer, X, 2)
    assert fitted.history.losses[1] != fitted.history.losses[2]
    assert fitted.history["square"][-1] > 0 and fitted.history["change"][-1] > 0
    assert trainer.evaluate(fitted.state, (X, Y), batch_size=EXAMPLES)["square"] == 0


# -- haiku -------------------------------------------------------------------------------------------------------------


def test_haiku_with_state_averages_batch_statistics(two):
    hk = pytest.importorskip("haiku")

    def net(x, is_training):
        x = hk.BatchNorm(True, True, decay_rate=0.9)(x, is_training)
        return hk.Linear(1)(x)

    model = hk.transform_with_state(net)
    trainer = trainer_of(model, two)
    fitted = fit(trainer, X)
    leaves = jax.tree_util.tree_leaves_with_path(jax.device_get(fitted.state.model_state))
    mean = next(leaf for path, leaf in leaves if "mean" in jax.tree_util.keystr(path) and leaf.shape[-1:] == (3,))
    assert np.isfinite(mean).all() and fitted.history.losses[2] < fitted.history.losses[1]
    params, state = trainer.model(fitted.state)
    expected, _ = model.apply(params, state, None, X, False)
    np.testing.assert_allclose(trainer.predict(fitted.state, X, batch_size=4), expected, rtol=1e-5)


@pytest.mark.slow
def test_haiku_without_a_random_key(two):
    hk = pytest.importorskip("haiku")
    model = hk.without_apply_rng(hk.transform(lambda x: hk.Linear(1)(x)))
    trainer = trainer_of(model, two)
    fitted = fit(trainer, X)
    expected = model.apply(trainer.model(fitted.state), X)
    np.testing.assert_allclose(trainer.predict(fitted.state, X, batch_size=4), expected, rtol=1e-5)


# -- equinox -----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_equinox_module_trains_as_on_one_device_and_comes_back(two):
    eqx = pytest.importorskip("equinox")
    expected = eqx.nn.MLP(3, 1, 8, 1, key=jax.random.key(0))
    trainer = trainer_of(expected, two)
    fitted = fit(trainer, X)
    gradient = eqx.filter_grad(lambda model: squared(jax.vmap(model)(X), Y).mean())
    for _ in range(2):
        expected = eqx.apply_updates(expected, jax.tree.map(lambda g: -0.1 * g, gradient(expected)))
    for outputs in (jax.vmap(trainer.model(fitted.state))(X), trainer.predict(fitted.state, X, batch_size=4)):
        np.testing.assert_allclose(outputs, jax.vmap(expected)(X), rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_equinox_module_with_dropout_and_state(two):
    eqx = pytest.importorskip("equinox")

    class Net(eqx.Module):
        norm: eqx.nn.BatchNorm
        dropout: eqx.nn.Dropout
        linear: eqx.nn.Linear

        def __init__(self, key):
            self.norm = eqx.nn.BatchNorm(3, axis_name="batch", mode="batch")
            self.dropout, self.linear = eqx.nn.Dropout(0.5), eqx.nn.Linear(3, 1, key=key)

        def __call__(self, x, state, *, key):
            x, state = self.norm(x, state)
            return self.linear(self.dropout(x, key=key)), state

    trainer = trainer_of(eqx.nn.make_with_state(Net)(jax.random.key(0)), two)
    fitted = fit(trainer, X, steps=4)
    predictions = trainer.predict(fitted.state, X, batch_size=4)
    np.testing.assert_array_equal(predictions, trainer.predict(fitted.state, X, batch_size=EXAMPLES))
    module, state = trainer.model(fitted.state)
    module = eqx.nn.inference_mode(module)
    apply = jax.vmap(lambda x: module(x, state, key=None)[0], axis_name="batch")
    np.testing.assert_allclose(apply(X), predictions, rtol=1e-5)


# -- errors ------------------------------------------------------------------------------------------------------------


def test_sow_in_an_unknown_collection_raises_with_the_known_ones(two):
    class Sows(nn.Module):
        @nn.compact
        def __call__(self, x):
            self.sow("router", "load", x.mean())
            return nn.Dense(1)(x)

    message = r"`state.model_state`: it gains \S*router\S*load.*collection `losses`.*`intermediates`"
    with pytest.raises(TypeError, match=message):
        fit(trainer_of(Sows(), two), X)


def test_loss_with_a_third_parameter_raises(two):
    loss = lambda outputs, targets, params: squared(outputs, targets)
    message = r"`loss` has a third parameter without a default, `params`.*`Trainer\(objective=fn\)`"
    with pytest.raises(TypeError, match=message):
        trainer_of(LinenTwo(), two, loss=loss)
    assert trainer_of(LinenTwo(), two, loss=lambda outputs, targets, delta=1.0: squared(outputs, targets))


def test_state_with_leaves_that_are_not_arrays_raises(two):
    eqx = pytest.importorskip("equinox")
    model = eqx.nn.MLP(3, 1, 8, 1, key=jax.random.key(0))
    trainer = trainer_of((lambda key, x: model, lambda model, x: jax.vmap(model)(x)), two)
    with pytest.raises(TypeError, match=r"params.activation is .* a function.*`eqx.partition.*static field"):
        fit(trainer, X)
