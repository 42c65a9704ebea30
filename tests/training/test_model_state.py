"""Variables that a model does not change: they keep their bits and are not communicated."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jdist
from jdist import hlo
from jdist._src.training.steps import TrainCarry

from laws import STRATEGIES

WIDTH = 64
X = np.random.default_rng(0).normal(size=(24, WIDTH)).astype(np.float32)
Y = (np.arange(24) % 2).astype(np.int32)
BASE = np.random.default_rng(1).normal(size=(WIDTH, WIDTH)).astype(np.float32)
cross_entropy = optax.softmax_cross_entropy_with_integer_labels


def keras_layer(keras):
    return keras.layers.Dense(WIDTH, use_bias=False, trainable=False, kernel_initializer=lambda *_, **__: BASE)


def keras_model(keras):
    return keras.Sequential([keras.Input((WIDTH,)), keras_layer(keras), keras.layers.Dense(2)])


def keras_norm(keras):
    """Also has batch statistics that change, and others that do not."""
    norm = keras.layers.BatchNormalization
    layers = [norm(name="statistics"), keras_layer(keras), norm(trainable=False)]
    return keras.Sequential([keras.Input((WIDTH,)), *layers, keras.layers.Dense(2)])


class Frozen(nnx.Variable):
    pass


class Nnx(nnx.Module):
    def __init__(self):
        self.base, self.last = Frozen(jnp.asarray(BASE)), nnx.Linear(WIDTH, 2, rngs=nnx.Rngs(0))

    def __call__(self, x):
        return self.last(x @ self.base[...])


class NnxRemat(Nnx):
    """The variables pass through a transformation of flax, which returns new ones."""

    def __call__(self, x):
        return self.last(nnx.remat(lambda model, x: x @ model.base[...])(self, x))


class Base(nn.Module):
    @nn.compact
    def __call__(self, x, _=None):
        return x @ self.variable("frozen", "base", lambda: jnp.asarray(BASE)).value, None


class Linen(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(2)(Base()(x)[0])


class LinenScan(nn.Module):
    """Two layers whose variables are scanned over, in a `jax.checkpoint`."""

    @nn.compact
    def __call__(self, x):
        layers = nn.scan(nn.remat(Base), variable_axes={"frozen": 0}, split_rngs={}, length=2)()
        return nn.Dense(2)(layers(x / WIDTH, None)[0])


def haiku_model(keras):
    hk = pytest.importorskip("haiku")
    base = lambda: hk.get_state("base", BASE.shape, BASE.dtype, lambda *_: jnp.asarray(BASE))
    return hk.transform_with_state(lambda x: hk.Linear(2)(x @ base()))


def equinox_model(keras):
    eqx = pytest.importorskip("equinox")

    class Model(eqx.Module):
        base: eqx.nn.StateIndex
        last: eqx.nn.Linear

        def __init__(self):
            self.base = eqx.nn.StateIndex(jnp.asarray(BASE))
            self.last = eqx.nn.Linear(WIDTH, 2, key=jax.random.key(0))

        def __call__(self, x, state):
            base = state.get(self.base)
            return self.last(x @ base), state.set(self.base, base)

    return eqx.nn.make_with_state(Model)()


MODELS = {
    "keras": keras_model,
    "keras_norm": keras_norm,
    "nnx": lambda keras: Nnx(),
    "nnx_remat": lambda keras: NnxRemat(),
    "linen": lambda keras: Linen(),
    "linen_scan": lambda keras: LinenScan(),
    "haiku": haiku_model,
    "equinox": equinox_model,
}


def trainer_of(make, keras, strategy, **options):
    return jdist.Trainer(make(keras), optax.sgd(0.1), cross_entropy, strategy=strategy, **options)


def frozen_leaves(state):
    """Returns the bits of the leaves of the model state that are not statistics which change."""
    leaves = jax.tree_util.tree_leaves_with_path(state.model_state)
    return [np.asarray(leaf).tobytes() for path, leaf in leaves if "statistics" not in jax.tree_util.keystr(path)]


PLACES = [(name, "mirrored_3", 3) for name in MODELS]
PLACES += [
    (name, place, 1) for name in ("keras_norm", "nnx_remat", "linen_scan") for place in ("sharded_4", "central_2")
]


@pytest.mark.slow
@pytest.mark.parametrize("name, place, micro_batches", PLACES)
def test_frozen_variables_keep_their_bits(name, place, micro_batches, keras):
    strategy = STRATEGIES[place]()
    trainer = trainer_of(MODELS[name], keras, strategy)
    state = trainer.init(X)
    before = frozen_leaves(state)
    data = (X[:21], Y[:21]) if micro_batches == 1 else (X[:18], Y[:18])  # with padding
    size = 12 if micro_batches == 1 else 9 * strategy.num_replicas_in_sync
    fit = trainer.fit(data, batch_size=size, state=state, epochs=2, micro_batches=micro_batches, progress="off")
    assert frozen_leaves(fit.state) == before and before
    state = trainer.init(X)
    changed = zip(jax.tree.leaves(fit.state.params), jax.tree.leaves(state.params), strict=True)
    assert any(not np.array_equal(new, old) for new, old in changed)


def bytes_sent(trainer):
    """Returns the bytes that a training step sends."""
    state = trainer.init(X)
    carry = TrainCarry(
        state, trainer.strategy.init(trainer._functions.empty_metrics), trainer.strategy.put(np.bool_(False))
    )
    (batch,) = trainer.strategy.distribute_dataset((X, Y), 24)
    step = trainer.strategy.step(trainer._functions.train)
    return sum(one.bytes_sent for one in hlo.collectives(step.lower(carry, batch).compile()))


@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
def test_frozen_variables_are_not_communicated(make, keras):
    trainer = trainer_of(make, keras, STRATEGIES["mirrored_3"]())
    assert 0 < bytes_sent(trainer) < BASE.nbytes


def test_frozen_variables_of_central_storage_are_gathered_and_not_reduced():
    trainer = trainer_of(lambda keras: Nnx(), None, STRATEGIES["central_2"]())
    assert 0 < bytes_sent(trainer) < BASE.nbytes  # each device stores one half


class Counts(nn.Module):
    """The new values of its variable are the same on all replicas, also if the weights of their examples differ."""

    @nn.compact
    def __call__(self, x):
        counts = self.variable("kept", "counts", lambda: jnp.asarray(BASE))
        if not self.is_initializing():
            counts.value = counts.value * 1.1
        return nn.Dense(2)(x)


def test_values_that_are_proved_replicated_are_not_communicated(two):
    trainer = trainer_of(lambda keras: Counts(), None, two)
    assert 0 < bytes_sent(trainer) < BASE.nbytes
    fit = trainer.fit((X[:5], Y[:5]), batch_size=8, steps=2, progress="off")
    expected = jnp.asarray(BASE) * 1.1 * 1.1
    np.testing.assert_array_equal(fit.state.model_state["kept"]["counts"], expected)
