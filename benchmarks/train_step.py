"""Whole training steps as jdist runs them by default, beside `jit` and `shard_map` written by hand.

    python benchmarks/train_step.py [--quick] [--json] [--devices 4] [--case mlp]

Cases: `mlp` (two layers), `deep` (ten layers of width 64, with SGD: all that is left is many small leaves), `cnn` (the digits
example's) and `transformer` (4 blocks of width 256); AdamW but for `deep`. `alone` is the step by hand without any reduction:
what no reduction can be faster than, but no training. The others begin with the same state, and the losses of their first
steps are checked to be equal. On the CPU all wait for each step.
"""

import functools

import jax

import sidebyside

options = sidebyside.parser("Training steps of jdist beside steps written by hand.")
options.add_argument("--devices", type=int, default=0, help="all accelerators by default, else 4 CPU devices")
options.add_argument("--case", choices=["mlp", "deep", "cnn", "transformer"], help="only this one")
args = options.parse_args()
jax.config.update("jax_num_cpu_devices", args.devices or 4)

import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

import jdist

DEVICES = jax.devices()[: args.devices or None]
ON_CPU = DEVICES[0].platform == "cpu"
MESH = sidebyside.mesh_of(DEVICES)
ROWS, WHOLE = NamedSharding(MESH, PartitionSpec("replica")), NamedSharding(MESH, PartitionSpec())


class MLP(nn.Module):
    widths: tuple[int, ...]

    @nn.compact
    def __call__(self, x):
        for width in self.widths:
            x = nn.relu(nn.Dense(width)(x))
        return nn.Dense(10)(x)


class CNN(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.relu(nn.Conv(32, (3, 3))(x))
        x = nn.max_pool(nn.relu(nn.Conv(64, (3, 3))(x)), (2, 2), strides=(2, 2))
        return nn.Dense(10)(nn.relu(nn.Dense(128)(x.reshape(len(x), -1))))


class Transformer(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.Embed(1000, 256)(x)
        for _ in range(4):
            y = nn.LayerNorm()(x)
            x = x + nn.MultiHeadDotProductAttention(num_heads=4)(y, y)
            x = x + nn.Dense(256)(nn.gelu(nn.Dense(1024)(nn.LayerNorm()(x))))
        return nn.Dense(10)(x.mean(axis=1))


def labelled(shape, kind=np.float32):
    random = np.random.default_rng(0)
    inputs = random.normal(size=shape) if kind is np.float32 else random.integers(0, 1000, shape)
    return inputs.astype(kind), random.integers(0, 10, shape[0]).astype(np.int32)


CASES = {
    "mlp": (50, MLP((128,)), optax.adamw(1e-3), labelled((64, 64))),
    "deep": (50, MLP((64,) * 9), optax.sgd(1e-2), labelled((64, 64))),
    "cnn": (10, CNN(), optax.adamw(1e-3), labelled((64, 8, 8, 1))),
    "transformer": (2, Transformer(), optax.adamw(1e-3), labelled((16, 32), np.int32)),
}


def train_step(model, optimizer, mean, state, batch):
    def loss_fn(params):
        logits = model.apply(params, batch[0])
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch[1]).mean()

    params, opt_state = state
    loss, grads = mean(jax.value_and_grad(loss_fn)(params))
    updates, opt_state = optimizer.update(grads, opt_state, params)
    return (optax.apply_updates(params, updates), opt_state), loss


def candidates(model, optimizer, batch):
    params = model.init(jax.random.key(0), batch[0][:1])
    state = (params, optimizer.init(params))
    whole = lambda: jax.device_put(jax.tree.map(jnp.copy, state), WHOLE)
    make = lambda mean: functools.partial(train_step, model, optimizer, mean)
    strategy = jdist.MirroredStrategy(DEVICES)
    (split,) = strategy.distribute_dataset(batch, len(batch[1]))
    specs = {"in_specs": (PartitionSpec(), PartitionSpec("replica")), "out_specs": PartitionSpec()}
    over_mesh = lambda mean: jax.jit(jax.shard_map(make(mean), mesh=MESH, **specs, check_vma=False), donate_argnums=0)
    placed = jax.device_put(batch, ROWS)
    return {
        "jdist": (strategy.step(make(functools.partial(jdist.all_reduce, "mean"))), strategy.put(state), split),
        "shard_map": (over_mesh(lambda tree: lax.pmean(tree, "replica")), whole(), placed),
        "jit": (jax.jit(make(lambda tree: tree), donate_argnums=0), whole(), placed),
        "alone": (over_mesh(lambda tree: tree), whole(), placed),
    }


class Loop:
    """Steps one after the other; the state lives on between the calls."""

    def __init__(self, step, state, batch):
        self.step, self.state, self.batch = step, state, batch

    def losses(self, steps):
        losses = []
        for _ in range(steps):
            self.state, loss = self.step(self.state, self.batch)
            if ON_CPU:
                loss.block_until_ready()
            losses.append(loss)
        jax.block_until_ready(self.state)
        return losses


def main():
    sidebyside.versions(args.json)
    for name, (steps, *case) in CASES.items():
        if args.case in (None, name):
            loops = {peer: Loop(*parts) for peer, parts in candidates(*case).items()}
            first, *others = (np.array(one.losses(5)) for peer, one in loops.items() if peer != "alone")
            for other in others:
                np.testing.assert_allclose(first, other, rtol=1e-4)
            work = {peer: functools.partial(one.losses, steps) for peer, one in loops.items()}
            timed = {peer: functools.partial(sidebyside.seconds, one) for peer, one in work.items()}
            taken = sidebyside.rounds(timed, 7 if args.quick else 31)
            sidebyside.report(f"{name}, {len(DEVICES)} devices", taken, args.json, steps)


if __name__ == "__main__":
    main()
