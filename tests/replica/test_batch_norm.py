"""Batch normalization of flax in a step: per replica, over all replicas, and with padding excluded."""

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jdist

from laws import assert_in_step

BATCHES = np.float32([[[0], [2]], [[10], [14]]])  # two replicas, as in the tests of tf.distribute and Keras
FOUR = [f"cpu:{i}" for i in range(4)]
OPTIMIZER = optax.sgd(0.1, momentum=0.9)


class LinenNet(nn.Module):
    """Two layers with a normalization between them."""

    norm: nn.Module

    @nn.compact
    def __call__(self, x, weights):
        x = nn.Dense(4)(x)
        x = self.norm(x, weights) if isinstance(self.norm, CountedNorm) else self.norm(x)
        return nn.Dense(2)(nn.tanh(x))


class CountedNorm(nn.Module):
    """Normalizes with the statistics of all rows of all replicas whose weight is greater than 0."""

    momentum: float = 0.9

    @nn.compact
    def __call__(self, x, weights):
        features, axes = x.shape[-1:], tuple(range(x.ndim - 1))
        running = {
            "mean": self.variable("batch_stats", "mean", jnp.zeros, features),
            "var": self.variable("batch_stats", "var", jnp.ones, features),
        }
        mean = jdist.global_mean(x, weights, axis=axes)
        var = jdist.global_mean(jnp.square(x - mean), weights, axis=axes)
        if not self.is_initializing():
            for name, now in (("mean", mean), ("var", var)):
                running[name].value = self.momentum * running[name].value + (1 - self.momentum) * now
        scale = self.param("scale", nn.initializers.ones, features)
        bias = self.param("bias", nn.initializers.zeros, features)
        return (x - mean) * jax.lax.rsqrt(var + 1e-5) * scale + bias


class CountedNnxNorm(nnx.Module):
    """The same for nnx."""

    def __init__(self, features, momentum=0.9):
        self.momentum = momentum
        self.mean = nnx.BatchStat(jnp.zeros(features))
        self.var = nnx.BatchStat(jnp.ones(features))
        self.scale = nnx.Param(jnp.ones(features))
        self.bias = nnx.Param(jnp.zeros(features))

    def __call__(self, x, weights):
        axes = tuple(range(x.ndim - 1))
        mean = jdist.global_mean(x, weights, axis=axes)
        var = jdist.global_mean(jnp.square(x - mean), weights, axis=axes)
        self.mean[...] = self.momentum * self.mean[...] + (1 - self.momentum) * mean
        self.var[...] = self.momentum * self.var[...] + (1 - self.momentum) * var
        return (x - mean) * jax.lax.rsqrt(var + 1e-5) * self.scale[...] + self.bias[...]


class NnxNet(nnx.Module):
    """Two layers with a normalization between them."""

    def __init__(self, norm):
        self.first = nnx.Linear(3, 4, rngs=nnx.Rngs(0))
        self.norm = norm
        self.second = nnx.Linear(4, 2, rngs=nnx.Rngs(1))

    def __call__(self, x, weights):
        x = self.first(x)
        x = self.norm(x, weights) if isinstance(self.norm, CountedNnxNorm) else self.norm(x)
        return self.second(nnx.tanh(x))


def linen(model, *batch):
    """Returns initial parameters and statistics, and a function from these and a batch to outputs and new statistics."""
    variables = model.init(jax.random.key(0), *batch)

    def apply(params, stats, *batch):
        out, new = model.apply({"params": params, "batch_stats": stats}, *batch, mutable=["batch_stats"])
        return out, new["batch_stats"]

    return variables["params"], variables["batch_stats"], apply


def of_nnx(model):
    """Does the same for an nnx model, whose states are stored in the state of the step."""
    graph, params, stats = nnx.split(model, nnx.Param, nnx.BatchStat)

    def apply(params, stats, *batch):
        merged = nnx.merge(graph, params, stats, copy=True)
        out = merged(*batch)
        return out, nnx.state(merged, nnx.BatchStat)

    return params, stats, apply


def plain(stats):
    """Returns statistics of a linen or nnx model as a dict of arrays."""
    return nnx.to_pure_dict(stats) if isinstance(stats, nnx.State) else stats


NORMS = {
    "linen": lambda **how: linen(nn.BatchNorm(use_running_average=False, **how), np.zeros((2, 1), np.float32)),
    "nnx": lambda **how: of_nnx(nnx.BatchNorm(1, rngs=nnx.Rngs(0), **how)),
}
every_norm = pytest.mark.parametrize("make", NORMS.values(), ids=NORMS)


def normalise(apply):
    """Returns a step that only normalizes, and its outputs."""

    def step(state, x):
        out, stats = apply(state["params"], state["stats"], x)
        return {"params": state["params"], "stats": stats}, out

    return step


@every_norm
def test_statistics_of_each_replica_follow_its_own_batches_and_are_read_as_their_mean(make, strategy):
    params, stats, apply = make(momentum=0.75)
    n = strategy.num_replicas_in_sync
    x = np.random.default_rng(0).normal(size=(2, n, 3, 1)).astype(np.float32)
    state = strategy.init(lambda: {"params": params, "stats": jdist.SyncOnRead(stats, "mean")})
    step = strategy.step(normalise(apply))
    for batch in x:
        state, out = step(state, jdist.PerReplica(batch))
    assert step.proof.per_replica == ("state['stats']", "output")
    mean, var = x.mean(2), x.var(2)
    normalized = (x[1] - mean[1][:, None]) / np.sqrt(var[1][:, None] + 1e-5)
    np.testing.assert_allclose(out.tree, normalized, rtol=1e-3, atol=1e-4)
    expected = {
        "mean": 0.75 * 0.25 * mean[0] + 0.25 * mean[1],
        "var": 0.75**2 + 0.75 * 0.25 * var[0] + 0.25 * var[1],
    }
    for number, row in enumerate(state["stats"].values):
        chex.assert_trees_all_close(plain(row), jax.tree.map(lambda x, i=number: x[i], expected), rtol=1e-4, atol=1e-5)
    chex.assert_trees_all_close(
        plain(state["stats"].read()), jax.tree.map(lambda x: x.mean(0), expected), rtol=1e-4, atol=1e-5
    )


@every_norm
def test_statistics_of_each_replica_in_a_plain_leaf_are_refused_by_name(make, two):
    params, stats, apply = make(momentum=0.9)
    state = two.init(lambda: {"params": params, "stats": stats})
    with pytest.raises(jdist.NotMirroredError, match=r"state\['stats'\]\['mean'\](\.value)? is not proved"):
        two.step(normalise(apply))(state, jdist.PerReplica(BATCHES))


@every_norm
def test_synchronized_normalization_equals_that_of_the_batch_on_one_device(make, two):
    params, stats, apply = make(momentum=0.0, axis_name="replica")
    state = two.init(lambda: {"params": params, "stats": stats})
    step = two.step(normalise(apply))
    state, out = step(state, jdist.PerReplica(BATCHES))
    chex.assert_trees_all_close(plain(state["stats"]), {"mean": np.float32([6.5]), "var": np.float32([32.75])})
    np.testing.assert_allclose(out.tree[..., 0], [[-1.1358, -0.7863], [0.6116, 1.3105]], atol=1e-4)
    assert sum("stats" in name for name in step.proof.replicated) == 2
    assert step.proof.per_replica == ("output",)
    assert_in_step(state)


@every_norm
def test_synchronized_normalization_over_groups_names_both_axes(make):
    strategy = jdist.MirroredStrategy(FOUR, cross_device_ops=jdist.HierarchicalAllReduce(group_size=2))
    x = np.random.default_rng(1).normal(size=(4, 3, 1)).astype(np.float32)
    params, stats, apply = make(momentum=0.0, axis_name=("group", "replica"))
    state = strategy.init(lambda: {"params": params, "stats": stats})
    state, _ = strategy.step(normalise(apply))(state, jdist.PerReplica(x))
    expected = {"mean": x.mean((0, 1)), "var": x.var((0, 1))}
    chex.assert_trees_all_close(plain(state["stats"]), expected, rtol=1e-4, atol=1e-6)


@every_norm
def test_normalization_synchronized_within_a_group_only_is_refused(make):
    strategy = jdist.MirroredStrategy(FOUR, cross_device_ops=jdist.HierarchicalAllReduce(group_size=2))
    params, stats, apply = make(momentum=0.0, axis_name="replica")
    state = strategy.init(lambda: {"params": params, "stats": stats})
    with pytest.raises(jdist.NotMirroredError, match=r"state\['stats'\]\['mean'\]"):
        strategy.step(normalise(apply))(state, jdist.PerReplica(np.ones((4, 2, 1), np.float32)))


def _linen_net(norm):
    x, weights = np.zeros((2, 3), np.float32), np.ones(2, np.float32)
    return lambda: linen(LinenNet(norm), x, weights)


def _synced_linen(axis_name):
    return _linen_net(nn.BatchNorm(use_running_average=False, momentum=0.9, axis_name=axis_name))


def _synced_nnx(axis_name):
    return lambda: of_nnx(NnxNet(nnx.BatchNorm(4, momentum=0.9, axis_name=axis_name, rngs=nnx.Rngs(2))))


def training(apply):
    """Returns a training step that also returns its gradients."""

    def step(state, batch, weights):
        x, y = batch

        def loss(params):
            out, stats = apply(params, state["stats"], x, weights)
            return jdist.global_mean(jnp.square(out - y).sum(-1), weights), (out, stats)

        (value, (out, stats)), grads = jax.value_and_grad(loss, has_aux=True)(state["params"])
        grads = jdist.all_reduce("mean", grads)
        updates, optimizer = OPTIMIZER.update(grads, state["optimizer"], state["params"])
        params = optax.apply_updates(state["params"], updates)
        return {"params": params, "stats": stats, "optimizer": optimizer}, (value, grads, out)

    return step


def begin(params, stats):
    return {"params": params, "stats": stats, "optimizer": OPTIMIZER.init(params)}


def examples(count):
    rng = np.random.default_rng(3)
    return rng.normal(size=(count, 3)).astype(np.float32), rng.normal(size=(count, 2)).astype(np.float32)


TRAINED = {
    "linen": (_synced_linen("replica"), _synced_linen(None)),
    "nnx": (_synced_nnx("replica"), _synced_nnx(None)),
}


@pytest.mark.slow
@pytest.mark.parametrize("synced, alone", TRAINED.values(), ids=TRAINED)
def test_training_with_synchronized_normalization_on_four_replicas_equals_that_on_one_device(synced, alone):
    strategy = jdist.MirroredStrategy(FOUR)
    params, stats, apply = synced()
    step, state = strategy.step(training(apply)), strategy.init(lambda: begin(params, stats))
    params, stats, apply = alone()
    one_step, single = jax.jit(training(apply)), begin(params, stats)
    x, y = examples(24)
    for now in (slice(0, 8), slice(8, 16), slice(16, 24)):
        batch = (x[now], y[now]), np.ones(8, np.float32)
        split = [jdist.PerReplica(jax.tree.map(lambda a: a.reshape(4, 2, *a.shape[1:]), part)) for part in batch]
        state, (value, grads, out) = step(state, *split)
        single, expected = one_step(single, *batch)
        chex.assert_trees_all_close((value, grads, out.tree.reshape(8, 2)), expected, rtol=1e-3, atol=1e-5)
    chex.assert_trees_all_close(state, single, rtol=1e-3, atol=1e-5)
    assert step.proof.per_replica == ("output[2]",)
    assert_in_step(state)


COUNTED = {
    "linen": (_linen_net(CountedNorm()), _synced_linen(None)),
    "nnx": (lambda: of_nnx(NnxNet(CountedNnxNorm(4))), _synced_nnx(None)),
}


@pytest.mark.parametrize("counted, alone", COUNTED.values(), ids=COUNTED)
def test_normalization_of_padded_batches_equals_that_of_the_batches_without_padding_on_one_device(counted, alone):
    count = 11  # the second batch has two rows on one replica, one row and padding on another, and only padding on two
    strategy = jdist.MirroredStrategy(FOUR)
    params, stats, apply = counted()
    step, state = strategy.step(training(apply)), strategy.init(lambda: begin(params, stats))
    params, stats, apply = alone()
    one_step, single = jax.jit(training(apply)), begin(params, stats)
    x, y = examples(count)
    padding = []
    for number, (batch, weights) in enumerate(strategy.distribute_dataset((x, y), 8, remainder="pad")):
        state, (value, grads, out) = step(state, batch, weights)
        now = slice(8 * number, min(8 * number + 8, count))
        single, expected = one_step(single, (x[now], y[now]), np.ones(len(x[now]), np.float32))
        true = np.asarray(weights.tree).ravel() > 0
        chex.assert_trees_all_close(
            (value, grads, np.asarray(out.tree).reshape(8, 2)[true]), expected, rtol=1e-3, atol=1e-5
        )
        padding += np.asarray(weights.tree).sum(1).tolist()
    chex.assert_trees_all_close(state, single, rtol=1e-3, atol=1e-5)
    assert 0 in padding
    assert step.proof.per_replica == ("output[2]",)


class NnxNorm(nnx.Module):
    def __init__(self):
        self.norm = nnx.BatchNorm(1, rngs=nnx.Rngs(0))

    def __call__(self, x):
        return self.norm(x)


@pytest.mark.parametrize("library", ["linen", "nnx"])
def test_statistics_of_each_replica_are_an_error_with_the_argument_to_write(library, two):
    if library == "linen":
        norm = nn.BatchNorm(use_running_average=False)
        state = two.put(norm.init(jax.random.key(0), BATCHES[0]))
        function = lambda state, x: ({**state, **norm.apply(state, x, mutable=["batch_stats"])[1]}, None)
    else:
        state = two.init(NnxNorm)
        function = lambda model, x: (model, model(x))
    with pytest.raises(jdist.NotMirroredError, match=r'Write `BatchNorm\(..., axis_name="replica"\)`'):
        two.step(function)(state, two.put(jdist.PerReplica(BATCHES)))
