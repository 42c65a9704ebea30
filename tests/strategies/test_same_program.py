"""The law of speed, as far as a test can hold it: what XLA runs for a step is what it runs for the step written by hand."""

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
    """How often each kind of instruction stands in the program, but for those that only give values another shape."""
    kinds = re.findall(r"= \S+ ([a-z][a-z0-9-]*)\(", compiled.as_text())
    return collections.Counter(kind for kind in kinds if kind not in ("bitcast", "parameter", "reshape"))


@pytest.mark.parametrize("name", among(["one_device", "mirrored_2", "mirrored_8"], "mirrored_2"))
@pytest.mark.parametrize("model", [MLP(), Recurrent()], ids=["mlp", "recurrent"])
def test_step_has_the_instructions_of_the_step_written_by_hand(model, name):
    devices = STRATEGIES[name]().mesh.devices.flat
    # As by hand: each leaf goes alone. What jdist does by itself on the CPU is better, and so not the same.
    strategy = jdist.MirroredStrategy(list(devices), communication_options=jdist.CommunicationOptions(bytes_per_pack=0))
    replicas = strategy.num_replicas_in_sync
    state = strategy.init(lambda: make_state(model))
    rows = (np.ones((4 * replicas, 6), np.float32), np.ones((4 * replicas, 4), np.float32))

    (batch,) = strategy.distribute_dataset(rows, 4 * replicas)
    mean = functools.partial(jdist.all_reduce, "mean")
    step = jax.jit(strategy.step(functools.partial(train_step, model, mean)), donate_argnums=0)

    by_hand = functools.partial(train_step, model, lambda tree: lax.pmean(tree, "replica"))
    split, whole = PartitionSpec("replica"), PartitionSpec()
    body = jax.shard_map(by_hand, mesh=strategy.mesh, in_specs=(whole, split), out_specs=whole, check_vma=False)
    placed = jax.device_put(rows, NamedSharding(strategy.mesh, split))

    ours = instructions(step.lower(state, batch).compile())
    assert ours["fusion"] > 10
    assert ours == instructions(jax.jit(body, donate_argnums=0).lower(state, placed).compile())
