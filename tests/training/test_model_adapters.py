"""Models of every library: initial parameters, model state, random numbers, keyword arguments."""

import os
import subprocess
import sys

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jdist
from jdist._src.training.model_adapters import adapt_model

from laws import assert_in_step, each_row

X = np.random.default_rng(0).normal(size=(8, 3)).astype(np.float32)
Y = X @ np.float32([1, -2, 3])
BATCHES = np.float32([[0], [2], [10], [14]])  # two per replica, as in the tests of tf.distribute and Keras
FEATURES = 16


def squared(outputs, targets):
    return jnp.square(outputs.reshape(len(outputs)) - targets)


def trainer_of(model, strategy, loss=squared, optimizer=None, **options):
    return jdist.Trainer(model, optimizer or optax.sgd(0.1), loss, strategy=strategy, **options)


def train(trainer, data, batch_size, **options):
    return trainer.fit(data, batch_size=batch_size, shuffle=False, progress="off", **options)


def bits(tree):
    return [np.asarray(_without_key(leaf)).tobytes() for leaf in jax.tree.leaves(tree)]


def _without_key(leaf):
    return jax.random.key_data(leaf) if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf


class Linen(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(1)(nn.tanh(nn.Dense(4)(x)))


class Nnx(nnx.Module):
    def __init__(self):
        self.first, self.last = nnx.Linear(3, 4, rngs=nnx.Rngs(0)), nnx.Linear(4, 1, rngs=nnx.Rngs(1))

    def __call__(self, x):
        return self.last(nnx.tanh(self.first(x)))


def pair():
    return lambda key, x: jax.random.normal(key, (x.shape[-1], 1)), lambda w, x: x @ w


def of_keras(keras):
    return keras.Sequential([keras.Input((3,)), keras.layers.Dense(4, "tanh"), keras.layers.Dense(1)])


# A function from Keras to a model, and a function that computes the outputs with its library alone.
KINDS = {
    "linen": (lambda keras: Linen(), lambda model, state, x: model.apply({"params": state.params}, x)),
    "nnx": (lambda keras: Nnx(), lambda model, state, x: model(x)),
    "keras": (of_keras, lambda model, state, x: model(x)),
    "pair": (lambda keras: pair(), lambda model, state, x: x @ np.asarray(state.params)),
}
every_kind = pytest.mark.parametrize("make, reference", KINDS.values(), ids=KINDS)


@every_kind
def test_initial_state_is_replicated_and_predicts_as_the_library_does(make, reference, two, keras):
    model = make(keras)
    trainer = trainer_of(model, two)
    state = trainer.init(X)
    assert int(state.step) == 0
    assert_in_step(state)
    assert all(leaf.sharding.device_set == set(two.mesh.devices.flat) for leaf in jax.tree.leaves(state.params))
    np.testing.assert_allclose(
        trainer.predict(state, X[:7], batch_size=4),
        reference(model, jax.device_get(state), X[:7]),
        rtol=1e-5,
        atol=1e-6,
    )


def test_parameters_depend_on_the_seed_only(two):
    one = jdist.OneDeviceStrategy("cpu:0")
    init = lambda strategy, seed, x=X: bits(trainer_of(pair(), strategy, seed=seed).init(x).params)
    assert init(two, 3) == init(two, 3) == init(one, 3) != init(two, 4)
    assert init(two, 3) == init(two, 3, X[:1]) == init(two, 3, jax.ShapeDtypeStruct((99, 3), jnp.float32))


# -- model state -------------------------------------------------------------------------------------------------------


class LinenNorm(nn.Module):
    momentum: float = 0.0

    @nn.compact
    def __call__(self, x, train):
        return nn.BatchNorm(use_running_average=not train, momentum=self.momentum)(x)


class NnxNorm(nnx.Module):
    def __init__(self):
        self.norm = nnx.BatchNorm(1, momentum=0.0, rngs=nnx.Rngs(0))

    def __call__(self, x):
        return self.norm(x)


def keras_norm(keras):
    return keras.Sequential([keras.Input((1,)), keras.layers.BatchNormalization(momentum=0.0, epsilon=1e-5)])


NORMS = {"linen": lambda keras: LinenNorm(), "nnx": lambda keras: NnxNorm(), "keras": keras_norm}
every_norm = pytest.mark.parametrize("make", NORMS.values(), ids=NORMS)


def statistics(state):
    """Returns the mean and the variance in the model state."""
    leaves = {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(state.model_state)}
    mean = next(leaf for name, leaf in leaves.items() if "mean" in name)
    var = next(leaf for name, leaf in leaves.items() if "var" in name)
    return [float(np.asarray(mean)[0]), float(np.asarray(var)[0])]


def zero(outputs, targets):
    return 0 * outputs[:, 0]


@every_norm
# The means are 1 and 12, the variances 1 and 4; in the second case replica 1 has only padding.
@pytest.mark.parametrize("rows, expected", [(4, [6.5, 2.5]), (2, [1.0, 1.0])], ids=["all", "padding_only"])
def test_batch_statistics_are_averaged_over_replicas_that_have_examples(make, rows, expected, two, keras):
    fit = train(trainer_of(make(keras), two, zero), (BATCHES[:rows], np.zeros(rows, np.float32)), 4)
    np.testing.assert_allclose(statistics(fit.state), expected, rtol=1e-5)
    assert_in_step(fit.state)


@every_norm
def test_evaluation_uses_the_stored_statistics_and_does_not_change_them(make, two, keras):
    trainer = trainer_of(make(keras), two, zero)
    state = train(trainer, (BATCHES, np.zeros(4, np.float32)), 4).state
    before = bits(state)
    expected = (BATCHES - 6.5) / np.sqrt(2.5)
    np.testing.assert_allclose(trainer.predict(state, BATCHES, batch_size=2), expected, rtol=1e-4)
    assert trainer.evaluate(state, (BATCHES, BATCHES[:, 0]), batch_size=4)["examples"] == 4
    assert bits(state) == before


def test_statistics_continue_over_steps(two):
    fit = train(trainer_of(LinenNorm(0.5), two, zero), (BATCHES, np.zeros(4, np.float32)), 4, steps=2)
    np.testing.assert_allclose(statistics(fit.state), [0.75 * 6.5, 0.25 + 0.75 * 2.5], rtol=1e-5)


def test_statistics_of_micro_batches_are_averaged(two):
    x = np.float32([[0], [2], [4], [8], [10], [14], [1], [1]])
    fit = train(trainer_of(LinenNorm(), two, zero), (x, np.zeros(8, np.float32)), 8, micro_batches=2)
    np.testing.assert_allclose(statistics(fit.state), [(1 + 6 + 12 + 1) / 4, (1 + 4 + 4 + 0) / 4], rtol=1e-5)


class Counted(nn.Module):
    """Stores the mean of the examples without padding, the number of batches, and a constant."""

    guarded: bool = True
    dtype: type = jnp.float32

    @nn.compact
    def __call__(self, x, weights):
        mean = self.variable("kept", "mean", jnp.zeros, x.shape[-1:], self.dtype)
        batches = self.variable("kept", "batches", lambda: jnp.int32(0))
        self.variable("kept", "table", lambda: jnp.arange(3))
        if not self.is_initializing():
            total = weights.sum()
            mean.value = ((weights @ x) / (jnp.where(total > 0, total, 1) if self.guarded else total)).astype(
                self.dtype
            )
            batches.value = batches.value + 1
        return nn.Dense(1)(x)


@pytest.mark.parametrize(
    "rows, weights", [(1, None), (3, None), (4, None), (4, np.float32([1, 3, 0, 0.5]))], ids=["1", "3", "4", "weights"]
)
def test_model_state_is_averaged_with_the_weights_of_the_examples_per_replica(rows, weights, two):
    data = (X[:rows], Y[:rows]) if weights is None else (X[:rows], Y[:rows], weights)
    kept = train(trainer_of(Counted(), two), data, 4).state.model_state["kept"]
    np.testing.assert_allclose(kept["mean"], np.average(X[:rows], 0, weights), rtol=1e-5, atol=1e-6)
    assert int(kept["batches"]) == 1 and np.asarray(kept["table"]).tolist() == [0, 1, 2]


@pytest.mark.parametrize("guarded", [True, False], ids=["zero", "nan"])
def test_model_state_of_a_micro_batch_with_only_padding_is_ignored(guarded, two):
    fit = train(trainer_of(Counted(guarded=guarded), two), (X[:2], Y[:2]), 8, micro_batches=2)
    np.testing.assert_allclose(fit.state.model_state["kept"]["mean"], X[:2].mean(0), rtol=1e-5)


def test_model_state_keeps_its_dtype_in_lower_precision(two):
    fit = train(trainer_of(Counted(dtype=jnp.bfloat16), two, precision=jdist.Precision()), (X[:4], Y[:4]), 4)
    assert fit.state.model_state["kept"]["mean"].dtype == jnp.bfloat16
    assert fit.state.model_state["kept"]["batches"].dtype == jnp.int32


def test_model_state_in_float32_is_not_rounded_to_the_output_dtype(two):
    precision = jdist.Precision(compute_dtype=jnp.float32, output_dtype=jnp.bfloat16)
    data = (1 + X[:4] / 1000, Y[:4])
    fit = train(trainer_of(LinenNorm(), two, zero, precision=precision), data, 4)
    means = data[0].reshape(2, 2, 3).mean((0, 1))
    np.testing.assert_allclose(fit.state.model_state["batch_stats"]["BatchNorm_0"]["mean"], means, rtol=1e-6)


# -- random numbers ----------------------------------------------------------------------------------------------------


class LinenDropout(nn.Module):
    """Also has a model state."""

    @nn.compact
    def __call__(self, x, train):
        self.variable("kept", "nothing", lambda: jnp.zeros(()))
        return nn.Dropout(0.5, deterministic=not train)(nn.Dense(FEATURES, use_bias=False)(x))


class NnxDropout(nnx.Module):
    def __init__(self):
        rngs = nnx.Rngs(0)
        self.dense, self.dropout = nnx.Linear(8, FEATURES, use_bias=False, rngs=rngs), nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x):
        return self.dropout(self.dense(x))


def keras_dropout(keras):
    dense = keras.layers.Dense(FEATURES, use_bias=False)
    return keras.Sequential([keras.Input((8,)), dense, keras.layers.Dropout(0.5)])


def _drop(w, x, key, train):
    return jnp.where(jax.random.bernoulli(key, 0.5, (len(x), FEATURES)), 2 * (x @ w), 0) if train else x @ w


DROPOUTS = {
    "linen": lambda keras: LinenDropout(),
    "nnx": lambda keras: NnxDropout(),
    "keras": keras_dropout,
    "pair": lambda keras: (lambda key, x: jnp.zeros((8, FEATURES)), _drop),
}
every_dropout = pytest.mark.parametrize("make", DROPOUTS.values(), ids=DROPOUTS)


def masks(trainer, steps):
    """Returns the masks of each step, `[step, example, feature]`, and the state.

    The examples are the rows of an identity matrix, and the loss is the sum of the outputs: the gradient of row i of the kernel
    is the mask of example i.
    """
    examples = np.eye(8, dtype=np.float32), np.zeros(8, np.float32)
    state = trainer.init(examples[0])
    kernels = [np.asarray(jax.tree.leaves(state.params)[0])]
    for step in range(1, steps + 1):
        state = train(trainer, examples, 8, steps=step, state=state, micro_batches=2).state
        kernels.append(np.asarray(jax.tree.leaves(state.params)[0]))
    return np.round(-np.diff(kernels, axis=0) * 8, 2), state


@every_dropout
def test_ke14_dropout_differs_between_replicas_micro_batches_and_steps_and_is_off_in_evaluation(make, two, keras):
    trainer = trainer_of(make(keras), two, lambda outputs, targets: outputs.sum(-1), optax.sgd(1.0))
    all_masks, state = masks(trainer, 2)
    assert set(np.unique(all_masks)) == {0.0, 2.0}
    parts = all_masks.reshape(2, 4, 2, FEATURES)  # by step and micro-batch
    assert len({part.tobytes() for step in parts for part in step}) == 8
    x = np.eye(8, dtype=np.float32)
    outputs = trainer.predict(state, x, batch_size=4)
    np.testing.assert_allclose(outputs, jax.tree.leaves(state.params)[0], rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(outputs, trainer.predict(state, x, batch_size=8))


@pytest.mark.slow
def test_dropout_depends_on_the_seed(two):
    loss = lambda outputs, targets: outputs.sum(-1)
    draw = lambda seed: masks(trainer_of(NnxDropout(), two, loss, optax.sgd(1.0), seed=seed), 1)[0]
    first, second, other = draw(1), draw(1), draw(2)
    np.testing.assert_array_equal(first, second)
    assert (first != other).any()


# -- no side effects ---------------------------------------------------------------------------------------------------


class NnxAll(nnx.Module):
    def __init__(self):
        rngs = nnx.Rngs(0)
        self.layers = nnx.List([nnx.Linear(3, 4, rngs=rngs), nnx.BatchNorm(4, rngs=rngs), nnx.Dropout(0.5, rngs=rngs)])
        self.last = nnx.Linear(4, 1, rngs=rngs)

    def __call__(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.last(x)


@pytest.mark.slow
def test_nnx_module_of_the_user_is_not_changed_and_its_mode_has_no_effect(two):
    results = []
    for mode in ("train", "eval"):
        module = NnxAll()
        getattr(module, mode)()
        graph, state = nnx.split(module)
        before = bits(state)
        trainer = trainer_of(module, two)
        fit = train(trainer, (X, Y), 4, epochs=2)
        results.append((bits(fit.state), trainer.evaluate(fit.state, (X, Y), batch_size=4)))
        graph_after, after = nnx.split(module)
        assert graph_after == graph and bits(after) == before
        module(X)  # its arrays were not donated
    assert results[0] == results[1]


@pytest.mark.slow
def test_keras_model_of_the_user_is_not_changed(two, keras):
    dense, norm, dropout = keras.layers.Dense, keras.layers.BatchNormalization, keras.layers.Dropout
    model = keras.Sequential([keras.Input((3,)), dense(4), norm(), dropout(0.5), dropout(0.5), dense(1)])
    before = bits([variable.value for variable in model.variables])
    trainer = trainer_of(model, two)
    fit = train(trainer, (X, Y), 4, epochs=2)
    trainer.predict(fit.state, X, batch_size=4)
    assert bits([variable.value for variable in model.variables]) == before
    assert model(X).shape == (8, 1)


def test_keras_layers_with_equal_names_have_separate_parameters(two, keras):
    class Twice(keras.Model):
        def __init__(self):
            super().__init__()
            self.first, self.second = keras.layers.Dense(3, name="same"), keras.layers.Dense(3, name="same")

        def call(self, x, training=False):
            return self.second(self.first(x))

    model = Twice()
    expected = np.asarray(model(X))
    trainer = trainer_of(model, two)
    np.testing.assert_allclose(trainer.predict(trainer.init(X), X, batch_size=8), expected, rtol=1e-5, atol=1e-6)


def test_keras_model_without_training_argument_is_called_without_it(keras):
    class Plain(keras.Model):
        def __init__(self):
            super().__init__()
            self.dense = keras.layers.Dense(1)

        def call(self, x):
            return self.dense(x)

    plain = Plain()
    expected, model = np.asarray(plain(X)), adapt_model(plain)
    params, state = model.init(jax.random.key(0), X)
    for train in (True, False):
        outputs, *_ = model.apply(params, state, X, jax.random.key(1), train, None)
        np.testing.assert_allclose(outputs, expected, rtol=1e-5, atol=1e-6)


# -- keyword arguments -------------------------------------------------------------------------------------------------


MODES = [
    (lambda w, x, train: x * train, True),
    (lambda w, x, *, training=None: x * training, True),
    (lambda w, x, *, is_training: x * is_training, True),
    (lambda w, x, deterministic: x * deterministic, False),
]


@each_row("apply, in_training", MODES, ["train", "training", "is_training", "deterministic"])
def test_mode_is_passed_by_the_name_of_the_parameter(apply, in_training):
    model = adapt_model((lambda key, x: jnp.zeros(()), apply))
    params, state = model.init(jax.random.key(0), X)
    for train in (True, False):
        outputs = model.apply(params, state, X, jax.random.key(1), train, None)[0]
        np.testing.assert_array_equal(outputs, X * (train is in_training))


def test_pair_receives_weights_and_a_key(two):
    def apply(w, x, weights, key):
        assert jnp.issubdtype(key.dtype, jax.dtypes.prng_key)
        return x @ w + 100 * (1 - weights[:, None])  # changes padding only

    trainer = trainer_of((lambda key, x: jnp.zeros((3, 1)), apply), two)
    fit = train(trainer, (X[:5], Y[:5]), 8)
    np.testing.assert_allclose(fit.history.rows[0]["loss"], np.mean(Y[:5] ** 2), rtol=1e-5)
    results = trainer.evaluate(fit.state, (X[:5], Y[:5], np.float32([1, 1, 1, 0, 0])), batch_size=8)
    w = np.asarray(fit.state.params)
    np.testing.assert_allclose(results["loss"], np.mean(((X[:3] @ w)[:, 0] - Y[:3]) ** 2), rtol=1e-5)


def test_model_receives_the_weights_of_its_micro_batch(two):
    def apply(w, x, weights):
        assert weights.shape == x.shape[:1]
        return x @ w

    assert train(trainer_of((lambda key, x: jnp.zeros((3, 1)), apply), two), (X, Y), 8, micro_batches=2).steps == 1


@pytest.mark.parametrize(
    "apply", [lambda weights, x: x @ weights, lambda w, key: key @ w, lambda w, train: train @ w],
    ids=["weights", "key", "train"],
)  # fmt: skip
def test_positional_parameters_of_a_pair_may_have_the_names_of_keywords(apply):
    model = adapt_model((lambda key, x: jnp.ones((3, 1)), apply))
    params, state = model.init(jax.random.key(0), X)
    outputs, *_ = model.apply(params, state, X, jax.random.key(1), True, jnp.ones(8))
    np.testing.assert_allclose(outputs[:, 0], X.sum(1), rtol=1e-5)


def test_inputs_may_be_a_tree(two):
    def apply(w, x):
        return x["a"] @ w + x["b"][0][:, None]

    data = {"a": X, "b": (Y,)}, Y
    trainer = trainer_of((lambda key, x: jnp.zeros((x["a"].shape[-1], 1)), apply), two)
    fit = train(trainer, data, 8)
    assert fit.history.rows[0]["loss"] == 0.0
    assert trainer.predict(fit.state, data, batch_size=4).shape == (8, 1)


def test_sown_intermediates_are_not_in_the_model_state(two):
    class Sows(nn.Module):
        @nn.compact
        def __call__(self, x):
            self.sow("intermediates", "x", x)
            return nn.Dense(1)(x)

    fit = train(trainer_of(Sows(), two), (X, Y), 4, epochs=2)
    assert fit.steps == 4 and fit.state.model_state == {}


# -- errors ------------------------------------------------------------------------------------------------------------


WRONG_MODELS = [
    (Linen, "the class Linen: pass an instance"),
    (Nnx, "the class Nnx: pass an instance"),
    (None, "NoneType"),
    (lambda params, x: x, "function"),
    ((lambda key, x: x,), "tuple"),
    ((lambda key, x: x, None), "tuple"),
    ({"init": len, "apply": len}, "dict"),
    (np.zeros(3), "ndarray"),
]


@each_row("model, got", WRONG_MODELS)
def test_wrong_model_raises(model, got, two):
    with pytest.raises(TypeError, match=rf"`model` must be a module of flax .*\(init, apply\).*got {got}"):
        trainer_of(model, two)


def test_keras_class_and_model_that_is_not_built_raise(two, keras):
    with pytest.raises(TypeError, match="got the class Sequential: pass an instance"):
        trainer_of(keras.Sequential, two)
    with pytest.raises(ValueError, match=r"is not built\. Add a `keras.Input"):
        trainer_of(keras.Sequential([keras.layers.Dense(1)]), two)


@pytest.mark.slow
def test_keras_with_another_backend_raises(keras, tmp_path):
    program = (
        "import keras, jdist\n"
        "from jdist._src.training.model_adapters import adapt_model\n"
        "model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])\n"
        "try:\n    adapt_model(model)\nexcept ValueError as error:\n    print(error)\n"
    )
    environment = {**os.environ, "KERAS_BACKEND": "numpy", "KERAS_HOME": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=120)
    assert "The backend of Keras is numpy" in done.stdout and "KERAS_BACKEND=jax" in done.stdout, done.stderr


def test_adapted_model_is_returned_unchanged():
    model = adapt_model(pair())
    assert adapt_model(model) is model


@pytest.mark.filterwarnings("ignore:__array__ implementation")  # of Keras, where it copies a model
@every_dropout
def test_trained_model_is_a_function_of_inputs_in_evaluation_mode(make, two, keras):
    trainer, x = trainer_of(make(keras), two), np.ones((4, 8), np.float32)
    state = trainer.init(x)
    outputs = trainer.predict(state, x, batch_size=4)
    np.testing.assert_allclose(trainer.model(state)(x), outputs, rtol=1e-4, atol=1e-5)


# -- Keras models that are built again ---------------------------------------------------------------------------------


def hidden_layers(keras):
    layers = [
        keras.layers.Dense(3, "tanh", kernel_initializer=keras.initializers.GlorotUniform(seed)) for seed in range(3)
    ]
    return keras.Sequential([keras.Input((3,)), *layers, keras.layers.Dense(1, kernel_initializer="ones")])


@pytest.mark.slow
def test_training_with_a_keras_model_that_is_built_again_resumes_bitwise_equal(two, keras, tmp_path):
    keras.utils.clear_session()
    optimizer, data = optax.chain(jdist.sync.int8(), optax.adam(0.1)), (X, Y)

    def run(epochs, path):
        ema = jdist.callbacks.EMA(0.9)
        with jdist.Checkpointer(path) as checkpointer:
            callbacks = [ema, jdist.callbacks.Checkpoint(checkpointer)]
            trainer = trainer_of(hidden_layers(keras), two, optimizer=optimizer)
            fit = train(trainer, data, 4, epochs=epochs, callbacks=callbacks, resume=checkpointer)
        layers = sorted(fit.state.params, key=lambda path: (int("0" + path.split("/")[1][6:]), path))
        leaves = [np.asarray(tree[path]).tobytes() for tree in (fit.state.params, ema.params) for path in layers]
        return leaves, list(fit.state.params)

    uninterrupted, names = run(2, tmp_path / "uninterrupted")
    assert names[0].startswith("sequential/dense/")
    for _ in range(3):  # the next layers are dense_7 to dense_10, and dense_10 is the first in the order of names
        keras.layers.Dense(1)
    run(1, tmp_path / "resumed")
    resumed, _ = run(2, tmp_path / "resumed")
    assert resumed == uninterrupted


def sequential_with_dropout(keras):
    layers = keras.layers
    return keras.Sequential([keras.Input((3,)), layers.Dense(4), layers.Dropout(0.1), layers.Dense(4), layers.Dense(1)])


def nested(keras):
    """A model in a model, a layer of the user with variables without names, and names that the user chose."""

    class Scale(keras.layers.Layer):
        def build(self, shape):
            self.scale, self.w = self.add_weight(shape=shape[-1:]), self.add_weight(shape=(1,), name="w_2")

        def call(self, x):
            return x * self.scale + self.w

    inputs = keras.Input((3,))
    hidden = keras.layers.Dense(3, name="block_3")(inputs)
    inner = keras.Sequential([keras.Input((3,)), keras.layers.Dense(3), keras.layers.BatchNormalization()])
    return keras.Model(inputs, keras.layers.Dense(1)(Scale()(keras.layers.Dropout(0.1)(inner(hidden)))))


def subclassed(keras):
    class Custom(keras.Model):
        def __init__(self):
            super().__init__()
            self.blocks, self.drop = [keras.layers.Dense(3) for _ in range(2)], keras.layers.Dropout(0.1)
            self.last = keras.layers.Dense(1)

        def call(self, x, training=False):
            return self.last(self.drop(self.blocks[1](self.blocks[0](x)), training=training))

        def get_config(self):
            return {}

    model = Custom()
    model(X)
    return model


BUILT_AGAIN = [sequential_with_dropout, *(pytest.param(make, marks=pytest.mark.slow) for make in (nested, subclassed))]


@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")  # of Keras, when it copies a model
@pytest.mark.parametrize("make", BUILT_AGAIN)
def test_state_of_a_keras_model_is_used_with_the_model_built_again(make, two, keras, tmp_path):
    with jdist.Checkpointer(tmp_path) as checkpointer:
        trainer = trainer_of(make(keras), two, optimizer=optax.adam(0.1))
        fit = train(trainer, (X, Y), 4, callbacks=[jdist.callbacks.Checkpoint(checkpointer)])
        outputs = trainer.predict(fit.state, X, batch_size=4)
        keras.layers.Dense(1), keras.layers.Dropout(0.5)
        again = trainer_of(make(keras), two, optimizer=optax.adam(0.1))
        np.testing.assert_allclose(again.predict(fit.state, X, batch_size=4), outputs, rtol=1e-5)
        assert again.evaluate(fit.state, (X, Y), batch_size=4) == trainer.evaluate(fit.state, (X, Y), batch_size=4)
        np.testing.assert_allclose(again.model(fit.state)(X), outputs, rtol=1e-4, atol=1e-5)
        resumed = train(again, (X, Y), 4, epochs=2, resume=checkpointer)
        continued = train(again, (X, Y), 4, state=fit.state)
    assert resumed.steps == continued.steps == 4
    assert resumed.state.params.keys() == continued.state.params.keys() == again.init(X).params.keys()


def test_names_of_keras_variables_are_the_paths_with_counters_from_0(keras):
    keras.layers.Dense(1), keras.layers.Dense(1)
    names = set(trainer_of(nested(keras), jdist.OneDeviceStrategy("cpu:0")).init(X).params)
    kernels = {"block_3/kernel", "sequential/dense/kernel", "dense_1/kernel", "scale/variable", "scale/w_2"}
    assert kernels < names


def test_state_of_another_keras_model_is_an_error_that_names_the_variables(two, keras):
    state = trainer_of(hidden_layers(keras), two).init(X)
    trainer = trainer_of(sequential_with_dropout(keras), two)
    message = "another model than the Keras model 'sequential.*': 1 of its 7 variables.*'seed_generator/.*, and 2 of the state"
    for call in (lambda: trainer.predict(state, X, batch_size=4), lambda: trainer.model(state)):
        with pytest.raises(ValueError, match=message):
            call()
