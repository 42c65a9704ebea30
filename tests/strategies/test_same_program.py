"""The compiled program of a step has the same instructions as the step written by hand."""

import collections
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

import jdist

from laws import STRATEGIES, among

OPTIMIZER = optax.adamw(1e-2)


class MLP(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(4)(nn.relu(nn.Dense(8)(x)))


class Recurrent(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(4)(nn.RNN(nn.LSTMCell(8))(x[:, None])[:, -1])


def make_state(model):
    params = model.init(jax.random.key(0), jnp.zeros((2, 6)))
    return params, OPTIMIZER.init(params)


def train_step(model, mean, state, batch):
    def loss_fn(params):
        return jnp.mean((model.apply(params, batch[0]) - batch[1]) ** 2)

    params, opt_state = state
    loss, grads = mean(jax.value_and_grad(loss_fn)(params))
    updates, opt_state = OPTIMIZER.update(grads, opt_state, params)
    return (optax.apply_updates(params, updates), opt_state), loss


def instructions(compiled):
    """Returns the number of instructions of each kind, except for those that only reshape values."""
    kinds = re.findall(r"= \S+ ([a-z][a-z0-9-]*)\(", compiled.as_text())
    return collections.Counter(kind for kind in kinds if kind not in ("bitcast", "parameter", "reshape"))


@pytest.mark.parametrize("name", among(["one_device", "mirrored_2", "mirrored_8"], "mirrored_2"))
@pytest.mark.parametrize("model", [MLP(), Recurrent()], ids=["mlp", "recurrent"])
def test_step_has_the_same_instructions_as_the_step_written_by_hand(model, name):
    devices = STRATEGIES[name]().mesh.devices.flat
    # Like the step by hand: each leaf is reduced separately. The default of jdist on CPUs packs small leaves.
    strategy = jdist.MirroredStrategy(list(devices), communication_options=jdist.CommunicationOptions(bytes_per_pack=0))
    replicas = strategy.num_replicas_in_sync
    state = strategy.init(lambda: make_state(model))
    rows = (np.ones((4 * replicas, 6), np.float32), np.ones((4 * replicas, 4), np.float32))

    (batch,) = strategy.distribute_dataset(rows, 4 * replicas)
    mean = functools.partial(jdist.all_reduce, "mean")
    step = jax.jit(strategy.step(functools.partial(train_step, model, mean)), donate_argnums=0)

    by_hand = functools.partial(train_step, model, lambda tree: lax.pmean(tree, "replica"))
    split, replicated = PartitionSpec("replica"), PartitionSpec()
    body = jax.shard_map(
        by_hand, mesh=strategy.mesh, in_specs=(replicated, split), out_specs=replicated, check_vma=False
    )
    placed = jax.device_put(rows, NamedSharding(strategy.mesh, split))

    actual = instructions(step.lower(state, batch).compile())
    assert actual["fusion"] > 10
    assert actual == instructions(jax.jit(body, donate_argnums=0).lower(state, placed).compile())
