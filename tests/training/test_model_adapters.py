"""Models of every library as training sees them: what they begin with, what they keep, what they draw, how they are told."""

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

from laws import assert_in_step

X = np.random.default_rng(0).normal(size=(8, 3)).astype(np.float32)
Y = X @ np.float32([1, -2, 3])
BATCHES = np.float32([[0], [2], [10], [14]])  # two rows a replica, as in the tests of tf.distribute and Keras
FEATURES = 16


def squared(outputs, targets):
    return jnp.square(outputs.reshape(len(outputs)) - targets)


def trainer_of(model, strategy, loss=squared, optimizer=None, **options):
    return jdist.Trainer(model, optimizer or optax.sgd(0.1), loss, strategy=strategy, **options)


def fitted(trainer, data, batch_size, **options):
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


# From Keras to a model, and from it and parameters to its outputs as its library computes them.
KINDS = {
    "linen": (lambda keras: Linen(), lambda model, state, x: model.apply({"params": state.params}, x)),
    "nnx": (lambda keras: Nnx(), lambda model, state, x: model(x)),
    "keras": (of_keras, lambda model, state, x: model(x)),
    "pair": (lambda keras: pair(), lambda model, state, x: x @ np.asarray(state.params)),
}
every_kind = pytest.mark.parametrize("make, alone", KINDS.values(), ids=KINDS)


@every_kind
def test_a_state_begins_in_step_and_predicts_what_the_model_gives_alone(make, alone, two, keras):
    model = make(keras)
    trainer = trainer_of(model, two)
    state = trainer.init(X)
    assert int(state.step) == 0
    assert_in_step(state)
    assert all(leaf.sharding.device_set == set(two.mesh.devices.flat) for leaf in jax.tree.leaves(state.params))
    np.testing.assert_allclose(
        trainer.predict(state, X[:7], batch_size=4), alone(model, jax.device_get(state), X[:7]), rtol=1e-5, atol=1e-6
    )


@pytest.mark.slow
@every_kind
def test_training_on_two_replicas_is_that_on_one_device(make, alone, two, keras):
    model, found = make(keras), []
    for strategy in (two, jdist.OneDeviceStrategy("cpu:0")):
        fit = fitted(trainer_of(model, strategy), (X[:7], Y[:7]), 4, epochs=2)
        found.append(jax.device_get(fit.state))
    np.testing.assert_equal(found[0].step, 4)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), found[0].params, found[1].params)


def test_parameters_are_those_of_the_seed_under_any_strategy(two):
    one = jdist.OneDeviceStrategy("cpu:0")
    begin = lambda strategy, seed: bits(trainer_of(pair(), strategy, seed=seed).init(X).params)
    assert begin(two, 3) == begin(two, 3) == begin(one, 3) != begin(two, 4)


def test_a_batch_of_any_size_or_only_its_shape_makes_the_same_parameters(two):
    trainer = trainer_of(pair(), two)
    first = bits(trainer.init(X).params)
    assert (
        first
        == bits(trainer.init(X[:1]).params)
        == bits(trainer.init(jax.ShapeDtypeStruct((99, 3), jnp.float32)).params)
    )


# -- what a model keeps ------------------------------------------------------------------------------------------------


class LinenNorm(nn.Module):
    momentum: float = 0.0

    @nn.compact
    def __call__(self, x, train):
        return nn.BatchNorm(use_running_average=not train, momentum=self.momentum)(x)


class NnxNorm(nnx.Module):
    def __init__(self, momentum=0.0):
        self.norm = nnx.BatchNorm(1, momentum=momentum, rngs=nnx.Rngs(0))

    def __call__(self, x):
        return self.norm(x)


def keras_norm(keras):
    return keras.Sequential([keras.Input((1,)), keras.layers.BatchNormalization(momentum=0.0, epsilon=1e-5)])


NORMS = {"linen": lambda keras: LinenNorm(), "nnx": lambda keras: NnxNorm(), "keras": keras_norm}
every_norm = pytest.mark.parametrize("make", NORMS.values(), ids=NORMS)


def statistics(state):
    """The mean and the variance among what a model keeps."""
    found = {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(state.model_state)}
    mean = next(leaf for name, leaf in found.items() if "mean" in name)
    var = next(leaf for name, leaf in found.items() if "var" in name)
    return [float(np.asarray(mean)[0]), float(np.asarray(var)[0])]


def zero(outputs, targets):
    return 0 * outputs[:, 0]


@every_norm
@pytest.mark.parametrize(
    "rows, expected",
    [(4, [6.5, 2.5]), (2, [1.0, 1.0])],  # means 1 and 12, variances 1 and 4; and the second replica has only padding
    ids=["all", "padding_only"],
)
def test_batch_statistics_are_averaged_over_replicas_that_have_examples(make, rows, expected, two, keras):
    fit = fitted(trainer_of(make(keras), two, zero), (BATCHES[:rows], np.zeros(rows, np.float32)), 4)
    np.testing.assert_allclose(statistics(fit.state), expected, rtol=1e-5)
    assert_in_step(fit.state)


@every_norm
def test_evaluation_normalises_with_what_was_kept_and_changes_nothing(make, two, keras):
    trainer = trainer_of(make(keras), two, zero)
    state = fitted(trainer, (BATCHES, np.zeros(4, np.float32)), 4).state
    before = bits(state)
    expected = (BATCHES - 6.5) / np.sqrt(2.5)
    np.testing.assert_allclose(trainer.predict(state, BATCHES, batch_size=2), expected, rtol=1e-4)
    assert trainer.evaluate(state, (BATCHES, BATCHES[:, 0]), batch_size=4)["examples"] == 4
    assert bits(state) == before


@pytest.mark.parametrize("make", [LinenNorm, pytest.param(NnxNorm, marks=pytest.mark.slow)], ids=["linen", "nnx"])
def test_statistics_run_on_from_step_to_step(make, two):
    fit = fitted(trainer_of(make(0.5), two, zero), (BATCHES, np.zeros(4, np.float32)), 4, steps=2)
    np.testing.assert_allclose(statistics(fit.state), [0.75 * 6.5, 0.25 + 0.75 * 2.5], rtol=1e-5)


@pytest.mark.parametrize("make", [LinenNorm, pytest.param(NnxNorm, marks=pytest.mark.slow)], ids=["linen", "nnx"])
def test_statistics_of_micro_batches_are_averaged_too(make, two):
    x = np.float32([[0], [2], [4], [8], [10], [14], [1], [1]])
    fit = fitted(trainer_of(make(), two, zero), (x, np.zeros(8, np.float32)), 8, micro_batches=2)
    np.testing.assert_allclose(statistics(fit.state), [(1 + 6 + 12 + 1) / 4, (1 + 4 + 4 + 0) / 4], rtol=1e-5)


class Counted(nn.Module):
    """Keeps the mean of the true rows of a batch, how many batches there were, and what never changes."""

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


@pytest.mark.parametrize("rows", [1, 3, 4])
def test_what_is_kept_weighs_as_much_as_its_replica_has_examples(rows, two):
    fit = fitted(trainer_of(Counted(), two), (X[:rows], Y[:rows]), 4)
    kept = fit.state.model_state["kept"]
    np.testing.assert_allclose(kept["mean"], X[:rows].mean(0), rtol=1e-5, atol=1e-6)
    assert int(kept["batches"]) == 1 and np.asarray(kept["table"]).tolist() == [0, 1, 2]


def test_what_is_kept_weighs_as_much_as_sample_weights_say(two):
    weights = np.float32([1, 3, 0, 0.5])
    fit = fitted(trainer_of(Counted(), two), (X[:4], Y[:4], weights), 4)
    np.testing.assert_allclose(
        fit.state.model_state["kept"]["mean"], np.average(X[:4], axis=0, weights=weights), rtol=1e-5, atol=1e-6
    )


def test_what_a_replica_with_only_padding_keeps_does_not_count_though_it_is_nan(two):
    fit = fitted(trainer_of(Counted(guarded=False), two), (X[:2], Y[:2]), 4)
    np.testing.assert_allclose(fit.state.model_state["kept"]["mean"], X[:2].mean(0), rtol=1e-5)


@pytest.mark.parametrize("guarded", [True, False], ids=["zero", "nan"])
def test_what_a_micro_batch_with_only_padding_keeps_does_not_count(guarded, two):
    fit = fitted(trainer_of(Counted(guarded=guarded), two), (X[:2], Y[:2]), 8, micro_batches=2)
    np.testing.assert_allclose(fit.state.model_state["kept"]["mean"], X[:2].mean(0), rtol=1e-5)


def test_what_is_kept_keeps_its_dtype_in_lower_precision(two):
    fit = fitted(trainer_of(Counted(dtype=jnp.bfloat16), two, precision=jdist.Precision()), (X[:4], Y[:4]), 4)
    assert fit.state.model_state["kept"]["mean"].dtype == jnp.bfloat16
    assert fit.state.model_state["kept"]["batches"].dtype == jnp.int32


def test_what_is_kept_in_float32_is_not_rounded_by_the_precision_of_outputs(two):
    data = (1 + X[:4] / 1000, Y[:4])
    fit = fitted(
        trainer_of(LinenNorm(), two, zero, precision=jdist.Precision(compute_dtype=jnp.float32, output_dtype=jnp.bfloat16)), data, 4
    )
    means = data[0].reshape(2, 2, 3).mean((0, 1))
    np.testing.assert_allclose(fit.state.model_state["batch_stats"]["BatchNorm_0"]["mean"], means, rtol=1e-6)


# -- what a model draws ------------------------------------------------------------------------------------------------


class LinenDropout(nn.Module):
    @nn.compact
    def __call__(self, x, deterministic):
        return nn.Dropout(0.5)(nn.Dense(FEATURES, use_bias=False)(x), deterministic=deterministic)


class LinenDropoutAndNorm(nn.Module):
    """Keeps something too, and is told in another way."""

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
    "linen_with_state": lambda keras: LinenDropoutAndNorm(),
    "nnx": lambda keras: NnxDropout(),
    "keras": keras_dropout,
    "pair": lambda keras: (lambda key, x: jnp.zeros((8, FEATURES)), _drop),
}
every_dropout = pytest.mark.parametrize(
    "make",
    [pytest.param(make, marks=pytest.mark.slow) if name == "linen" else make for name, make in DROPOUTS.items()],
    ids=DROPOUTS,
)


def masks(trainer, steps):
    """The masks of each step, `[step, example, feature]`.

    The examples are the rows of an identity, and the loss is the sum of the outputs: the gradient of row i of the kernel is the
    mask of example i.
    """
    examples = np.eye(8, dtype=np.float32), np.zeros(8, np.float32)
    state = trainer.init(examples[0])
    kernels = [np.asarray(jax.tree.leaves(state.params)[0])]
    for step in range(1, steps + 1):
        state = fitted(trainer, examples, 8, steps=step, state=state, micro_batches=2).state
        kernels.append(np.asarray(jax.tree.leaves(state.params)[0]))
    return np.round(-np.diff(kernels, axis=0) * 8, 2), state


@every_dropout
def test_ke14_dropout_differs_between_replicas_micro_batches_and_steps_and_is_none_in_evaluation(make, two, keras):
    trainer = trainer_of(make(keras), two, lambda outputs, targets: outputs.sum(-1), optax.sgd(1.0))
    found, state = masks(trainer, 2)
    assert set(np.unique(found)) == {0.0, 2.0}
    drawn = found.reshape(2, 4, 2, FEATURES)  # by step, and part of the batch
    assert len({part.tobytes() for step in drawn for part in step}) == 8
    x = np.eye(8, dtype=np.float32)
    outputs = trainer.predict(state, x, batch_size=4)
    np.testing.assert_allclose(outputs, jax.tree.leaves(state.params)[0], rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(outputs, trainer.predict(state, x, batch_size=8))


@pytest.mark.slow
@every_dropout
def test_dropout_is_the_same_for_the_same_seed(make, two, keras):
    model, loss = make(keras), lambda outputs, targets: outputs.sum(-1)
    draw = lambda seed: masks(trainer_of(model, two, loss, optax.sgd(1.0), seed=seed), 1)[0]
    first, again, other = draw(1), draw(1), draw(2)
    np.testing.assert_array_equal(first, again)
    assert (first != other).any()


# -- the user's own ----------------------------------------------------------------------------------------------------


class NnxAll(nnx.Module):
    def __init__(self):
        rngs = nnx.Rngs(0)
        self.layers = nnx.List([nnx.Linear(3, 4, rngs=rngs), nnx.BatchNorm(4, rngs=rngs), nnx.Dropout(0.5, rngs=rngs)])
        self.last = nnx.Linear(4, 1, rngs=rngs)

    def __call__(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.last(x)


@pytest.mark.parametrize("mode", ["train", pytest.param("eval", marks=pytest.mark.slow)])
def test_a_module_of_nnx_stays_as_the_user_left_it(mode, two):
    module = NnxAll()
    getattr(module, mode)()
    graph, state = nnx.split(module)
    before = bits(state)
    trainer = trainer_of(module, two)
    fit = fitted(trainer, (X, Y), 4, epochs=2)
    trainer.evaluate(fit.state, (X, Y), batch_size=4)
    graph_after, after = nnx.split(module)
    assert graph_after == graph and bits(after) == before
    module(X)  # its arrays were given to no step


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["train", "eval"])
def test_a_module_of_nnx_is_trained_in_training_and_not_in_evaluation_whatever_its_mode(mode, two):
    module = NnxDropout()
    getattr(module, mode)()
    found, _ = masks(trainer_of(module, two, lambda outputs, targets: outputs.sum(-1), optax.sgd(1.0)), 1)
    assert set(np.unique(found)) == {0.0, 2.0}


def test_a_model_of_keras_stays_as_the_user_left_it(two, keras):
    layers = keras.layers
    model = keras.Sequential(
        [
            keras.Input((3,)),
            layers.Dense(4),
            layers.BatchNormalization(),
            layers.Dropout(0.5),
            layers.Dropout(0.5),
            layers.Dense(1),
        ]
    )
    before = bits([variable.value for variable in model.variables])
    trainer = trainer_of(model, two)
    fit = fitted(trainer, (X, Y), 4, epochs=2)
    trainer.predict(fit.state, X, batch_size=4)
    assert bits([variable.value for variable in model.variables]) == before
    assert model(X).shape == (8, 1)


def test_layers_of_keras_that_are_called_alike_keep_their_own_parameters(two, keras):
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


def test_a_model_of_keras_whose_call_takes_no_training_is_not_told_of_it(keras):
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
        outputs, _ = model.apply(params, state, X, jax.random.key(1), train, None)
        np.testing.assert_allclose(outputs, expected, rtol=1e-5, atol=1e-6)


# -- how a model is told -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name, trained, evaluated",
    [("train", True, False), ("training", True, False), ("is_training", True, False), ("deterministic", False, True)],
)
@pytest.mark.parametrize("kind", ["linen", "nnx", "pair"])
def test_a_model_is_told_by_name_whether_it_is_trained(kind, name, trained, evaluated):
    told = []
    scope = {"nn": nn, "nnx": nnx, "jnp": jnp, "told": told}
    exec(SOURCES[kind].format(name=name), scope)
    model = adapt_model(scope["make"]())
    params, state = model.init(jax.random.key(0), X)
    for train, expected in ((True, trained), (False, evaluated)):
        del told[:]
        assert model.apply(params, state, X, jax.random.key(1), train, None)[0].shape == (8, 1)
        assert set(told) == {expected}


SOURCES = {  # functions whose parameters have the name that is tested
    "linen": """
class Net(nn.Module):
    @nn.compact
    def __call__(self, x, {name}):
        told.append({name})
        return nn.Dense(1)(x)
make = Net
""",
    "nnx": """
class Net(nnx.Module):
    def __init__(self):
        self.dense = nnx.Linear(3, 1, rngs=nnx.Rngs(0))
    def __call__(self, x, {name}):
        told.append({name})
        return self.dense(x)
make = Net
""",
    "pair": """
def apply(w, x, *, {name}=None):
    told.append({name})
    return x @ w
make = lambda: (lambda key, x: jnp.zeros((3, 1)), apply)
""",
}


def test_a_pair_is_told_the_weights_of_its_rows_and_a_key(two):
    def apply(w, x, weights, key):
        assert jnp.issubdtype(key.dtype, jax.dtypes.prng_key)
        return x @ w + 100 * (1 - weights[:, None])  # of padding: it counts for nothing

    trainer = trainer_of((lambda key, x: jnp.zeros((3, 1)), apply), two)
    fit = fitted(trainer, (X[:5], Y[:5]), 8)
    np.testing.assert_allclose(fit.history.rows[0]["loss"], np.mean(Y[:5] ** 2), rtol=1e-5)
    found = trainer.evaluate(fit.state, (X[:5], Y[:5], np.float32([1, 1, 1, 0, 0])), batch_size=8)
    w = np.asarray(fit.state.params)
    np.testing.assert_allclose(found["loss"], np.mean(((X[:3] @ w)[:, 0] - Y[:3]) ** 2), rtol=1e-5)


def test_the_weights_that_a_model_is_told_are_those_of_its_micro_batch(two):
    def apply(w, x, weights):
        assert weights.shape == x.shape[:1]
        return x @ w

    init = lambda key, x: jnp.zeros((3, 1))
    fit = fitted(trainer_of((init, apply), two), (X, Y), 8, micro_batches=2)
    assert fit.steps == 1


@pytest.mark.parametrize(
    "apply", [lambda weights, x: x @ weights, lambda w, key: key @ w, lambda w, train: train @ w],
    ids=["weights", "key", "train"],
)  # fmt: skip
def test_parameters_and_inputs_of_a_pair_may_be_called_like_what_a_model_is_told(apply):
    model = adapt_model((lambda key, x: jnp.ones((3, 1)), apply))
    params, state = model.init(jax.random.key(0), X)
    outputs, _ = model.apply(params, state, X, jax.random.key(1), True, jnp.ones(8))
    np.testing.assert_allclose(outputs[:, 0], X.sum(1), rtol=1e-5)


def test_inputs_may_be_a_tree(two):
    def apply(w, x):
        return x["a"] @ w + x["b"][0][:, None]

    data = {"a": X, "b": (Y,)}, Y
    trainer = trainer_of((lambda key, x: jnp.zeros((x["a"].shape[-1], 1)), apply), two)
    fit = fitted(trainer, data, 8)
    assert fit.history.rows[0]["loss"] == 0.0
    assert trainer.predict(fit.state, data, batch_size=4).shape == (8, 1)


def test_what_linen_sows_for_a_look_is_no_state(two):
    class Sows(nn.Module):
        @nn.compact
        def __call__(self, x):
            self.sow("intermediates", "x", x)
            return nn.Dense(1)(x)

    fit = fitted(trainer_of(Sows(), two), (X, Y), 4, epochs=2)
    assert fit.steps == 4 and fit.state.model_state == {}


# -- what is no model --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "model, said",
    [
        (Linen, "the class Linen: hand in an instance"),
        (Nnx, "the class Nnx: hand in an instance"),
        (None, "NoneType"),
        (lambda params, x: x, "function"),
        ((lambda key, x: x,), "tuple"),
        ((lambda key, x: x, None), "tuple"),
        ({"init": len, "apply": len}, "dict"),
        (np.zeros(3), "ndarray"),
    ],
    ids=["linen_class", "nnx_class", "none", "one_function", "one_of_a_pair", "none_in_a_pair", "dict", "array"],
)
def test_what_is_no_model_is_refused(model, said, two):
    with pytest.raises(TypeError, match=rf"`model` is a module of flax .*\(init, apply\).*got {said}"):
        trainer_of(model, two)


def test_a_class_of_keras_is_refused(two, keras):
    with pytest.raises(TypeError, match="got the class Sequential: hand in an instance"):
        trainer_of(keras.Sequential, two)


def test_a_model_of_keras_without_weights_is_refused(two, keras):
    with pytest.raises(ValueError, match=r"no weights yet\. Begin it with a `keras.Input"):
        trainer_of(keras.Sequential([keras.layers.Dense(1)]), two)


@pytest.mark.slow
def test_keras_on_another_backend_is_refused(keras, tmp_path):
    program = (
        "import keras, jdist\n"
        "from jdist._src.training.model_adapters import model_of\n"
        "model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])\n"
        "try:\n    model_of(model)\nexcept ValueError as error:\n    print(error)\n"
    )
    environment = {**os.environ, "KERAS_BACKEND": "numpy", "KERAS_HOME": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=120)
    assert "Keras computes with numpy here" in done.stdout and "KERAS_BACKEND=jax" in done.stdout, done.stderr


def test_a_model_of_the_library_is_taken_as_it_is():
    model = adapt_model(pair())
    assert adapt_model(model) is model


# -- models of Keras that are built again -------------------------------------------------------------------------------


def hidden_layers(keras):
    layers = [
        keras.layers.Dense(3, "tanh", kernel_initializer=keras.initializers.GlorotUniform(seed)) for seed in range(3)
    ]
    return keras.Sequential([keras.Input((3,)), *layers, keras.layers.Dense(1, kernel_initializer="ones")])


@pytest.mark.slow
def test_training_with_a_keras_model_that_is_built_again_is_resumed_to_the_same_bits(two, keras, tmp_path):
    keras.utils.clear_session()
    optimizer, data = optax.chain(jdist.sync.int8(), optax.adam(0.1)), (X, Y)

    def run(epochs, path):
        ema = jdist.callbacks.EMA(0.9)
        with jdist.Checkpointer(path) as checkpointer:
            callbacks = [ema, jdist.callbacks.Checkpoint(checkpointer)]
            trainer = trainer_of(hidden_layers(keras), two, optimizer=optimizer)
            fit = fitted(trainer, data, 4, epochs=epochs, callbacks=callbacks, resume=checkpointer)
        layers = sorted(fit.state.params, key=lambda path: (int("0" + path.split("/")[1][6:]), path))
        trained = [np.asarray(tree[path]).tobytes() for tree in (fit.state.params, ema.params) for path in layers]
        return trained, list(fit.state.params)

    straight, names = run(2, tmp_path / "straight")
    assert names[0].startswith("sequential/dense/")
    for _ in range(3):  # the next layers are dense_7 to dense_10, and dense_10 is the first in the order of names
        keras.layers.Dense(1)
    run(1, tmp_path / "again")
    resumed, _ = run(2, tmp_path / "again")
    assert resumed == straight
