"""Partition metadata of flax in the models of a `Trainer`."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.core import meta
from jax import lax
from jax.sharding import Mesh, PartitionSpec

import jdist

P = PartitionSpec
X = np.random.default_rng(0).normal(size=(24, 4)).astype(np.float32)
RULES = [("embed", None), ("mlp", "model")]
INIT = nn.initializers.lecun_normal()


def mesh_of(**shape):
    return Mesh(np.array(jax.devices()[:4]).reshape(tuple(shape.values())), tuple(shape))


class Linen(nn.Module):
    annotate: bool = True
    is_logical: bool = False

    @nn.compact
    def __call__(self, x, train):
        partitioning = nn.with_logical_partitioning if self.is_logical else nn.with_partitioning
        names = ("embed", "mlp") if self.is_logical else (None, "model")
        init = lambda names: partitioning(INIT, names) if self.annotate else INIT
        zeros = partitioning(nn.initializers.zeros, names[1:]) if self.annotate else nn.initializers.zeros
        mean = self.variable("batch_stats", "mean", zeros, None, (8,))
        x = nn.tanh(nn.Dense(8, kernel_init=init(names), name="first")(x) + mean.value)
        if train:
            mean.value = 0.9 * mean.value + 0.1 * x.mean(0)
        x = lax.with_sharding_constraint(x, P(None, "model")) if self.annotate else x
        return nn.Dense(4, kernel_init=init(names[::-1]), name="second")(x)


class NNX(nnx.Module):
    def __init__(self, annotate=True):
        init = lambda names: nnx.with_partitioning(INIT, names) if annotate else INIT
        rngs = nnx.Rngs(0)
        self.first = nnx.Linear(4, 8, kernel_init=init((None, "model")), rngs=rngs)
        self.mean = nnx.BatchStat(jnp.zeros(8), **({"out_sharding": ("model",)} if annotate else {}))
        self.second = nnx.Linear(8, 4, kernel_init=init(("model", None)), rngs=rngs)
        self.scale = nnx.data(jnp.full(4, 2.0))  # an array without a variable

    def __call__(self, x, train):
        h = jnp.tanh(self.first(x) + self.mean[...])
        if train:
            self.mean[...] = 0.9 * self.mean[...] + 0.1 * h.mean(0)
        return self.scale * self.second(h)


def nnx_model(annotate=True):
    with nnx.use_eager_sharding(False):
        return NNX(annotate)


def placed_nnx_model():
    with jax.set_mesh(mesh_of(data=2, model=2)):
        return NNX()


MODELS = {
    "linen": (Linen, lambda: Linen(False)),
    "linen_logical": (lambda: Linen(True, True), lambda: Linen(False)),
    "nnx": (nnx_model, lambda: nnx_model(False)),
    "nnx_on_the_mesh": (placed_nnx_model, lambda: nnx_model(False)),
}
STRATEGIES = {
    "fsdp_and_tensor": lambda: jdist.ShardedStrategy(mesh=mesh_of(data=2, model=2), model_axis="model"),
    "groups": lambda: jdist.MirroredStrategy(mesh=mesh_of(replica=2, model=2)),
    "one_device": lambda: jdist.OneDeviceStrategy(),
    "central": lambda: jdist.CentralStorageStrategy(["cpu:0", "cpu:1"]),
}


def train(model, strategy, **options):
    trainer = jdist.Trainer(model, optax.adam(0.1), lambda y, x: optax.squared_error(y, x).mean(-1), strategy=strategy)
    with nn.logical_axis_rules(RULES):
        return trainer, trainer.fit((X, X), batch_size=8, shuffle=False, progress="off", **options)


def train_and_save(model, strategy, path):
    with jdist.Checkpointer(path) as checkpointer:
        return train(model, strategy, callbacks=[jdist.callbacks.Checkpoint(checkpointer)])


def kernel(tree, layer):
    return meta.unbox(tree)[layer]["kernel"]


@pytest.mark.parametrize("name", STRATEGIES)
@pytest.mark.parametrize("kind", MODELS)
def test_fit_has_the_numbers_of_the_model_without_annotations(kind, name, tmp_path):
    make, make_plain = MODELS[kind]
    plain_trainer, plain = train(make_plain(), jdist.OneDeviceStrategy(), epochs=2)
    strategy = STRATEGIES[name]()
    train_and_save(make(), strategy, tmp_path)
    trainer, fit = train(make(), strategy, epochs=2, resume=tmp_path)
    assert fit.history["loss"][-1] == pytest.approx(plain.history["loss"][-1], rel=1e-4)
    assert trainer.evaluate(fit.state, (X, X), batch_size=8) == pytest.approx(
        plain_trainer.evaluate(plain.state, (X, X), batch_size=8), rel=1e-4
    )
    expected = plain_trainer.predict(plain.state, X, batch_size=8)
    np.testing.assert_allclose(trainer.predict(fit.state, X, batch_size=8), expected, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(trainer.apply(fit.state, X), expected, rtol=1e-4, atol=1e-5)
    model = trainer.model(fit.state)
    np.testing.assert_allclose(model(X, False) if "nnx" in kind else model(X), expected, rtol=1e-4, atol=1e-5)
    axis = "data" if name == "fsdp_and_tensor" else None
    if name in ("fsdp_and_tensor", "groups"):
        for tree in (fit.state.params, fit.state.opt_state[0].mu):
            assert (*kernel(tree, "first").sharding.spec, None)[:2] == (axis, "model")
            assert (*kernel(tree, "second").sharding.spec, None)[:2] == ("model", axis)


@pytest.mark.parametrize("kind", ["linen", "nnx"])
def test_with_the_other_options_of_a_fit(kind):
    make, make_plain = MODELS[kind]
    options = {"steps_per_call": 3, "micro_batches": 2, "norms": True}
    _, plain = train(make_plain(), jdist.OneDeviceStrategy(), **options)
    _, fit = train(make(), STRATEGIES["groups"](), **options)
    for name in ("loss", "gradient_norm", "update_norm"):
        assert fit.history[name][-1] == pytest.approx(plain.history[name][-1], rel=1e-3)


@pytest.mark.parametrize("kind", ["linen", "nnx"])
def test_metadata_is_not_part_of_names(kind, tmp_path):
    make, make_plain = MODELS[kind]
    _, plain = train_and_save(make_plain(), jdist.OneDeviceStrategy(), tmp_path)
    _, fit = train(make(), STRATEGIES["groups"](), epochs=1, resume=tmp_path)  # all of its steps are taken already
    np.testing.assert_array_equal(kernel(fit.state.params, "first"), kernel(plain.state.params, "first"))
    assert kernel(fit.state.params, "first").sharding.spec == P(None, "model")
    paths = [[layer.path for layer in jdist.summary(each.state).layers] for each in (fit, plain)]
    assert paths[0] == paths[1]
    jdist.weights.save(tmp_path / "plain.safetensors", plain.state.params)
    loaded = jdist.weights.load(tmp_path / "plain.safetensors", like=fit.state.params)
    np.testing.assert_array_equal(kernel(loaded, "second"), kernel(fit.state.params, "second"))
