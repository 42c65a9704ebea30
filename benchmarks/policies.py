"""Cost of policies: `sync.mean` against hand-written `pmean`, `sync.exact` against `sync.mean`.

    python benchmarks/policies.py [--quick] [--json] [--devices 4] [--case cnn]

Cases: `mlp` (two layers) and `cnn` (of the digits example), AdamW, batch 64, the same for all. `exact` runs 8 virtual replicas
on the devices; its peers are one replica per device under `sync.mean()`, without micro-batches and with 8 micro-batches.
The losses of the first steps are checked to agree up to rounding. On CPU every candidate waits for each step.
"""

import functools

import jax

import sidebyside

options = sidebyside.parser("Policies against hand-written steps.")
options.add_argument("--devices", type=int, default=0, help="default: all accelerators, or 4 CPU devices")
options.add_argument("--case", choices=["mlp", "cnn"], help="run only this case")
args = options.parse_args()
jax.config.update("jax_num_cpu_devices", args.devices or 4)

import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec
from models import CNN

import jdist

DEVICES = jax.devices()[: args.devices or None]
ON_CPU = DEVICES[0].platform == "cpu"
MESH = sidebyside.mesh_of(DEVICES)
VIRTUAL = 8


class MLP(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(10)(nn.relu(nn.Dense(128)(x.reshape(len(x), -1))))


CASES = {"mlp": (50, MLP()), "cnn": (10, CNN())}


def step_of(model, tx, gradient, state, batch):
    def loss_fn(params, images, labels):
        return optax.softmax_cross_entropy_with_integer_labels(model.apply(params, images), labels)

    params, opt_state = state
    loss, grads = gradient(loss_fn)(params, *batch)
    updates, opt_state = tx.update(grads, opt_state, params)
    return (optax.apply_updates(params, updates), opt_state), loss


def mean_gradient(loss_fn):
    return jax.value_and_grad(lambda params, *batch: loss_fn(params, *batch).mean())


class Loop:
    """Runs steps sequentially; the state continues from call to call."""

    def __init__(self, step, state, batch):
        self.step, self.state, self.batch = step, state, batch

    def losses(self, steps):
        losses = []
        for _ in range(steps):
            self.state, loss = self.step(self.state, self.batch)
            if ON_CPU:
                jax.block_until_ready(loss)
            losses.append(loss)
        jax.block_until_ready(self.state)
        return [float(np.mean(loss.tree if isinstance(loss, jdist.PerReplica) else loss)) for loss in losses]


def with_policy(model, params, data, policy, gradient, virtual=None):
    strategy = jdist.MirroredStrategy(DEVICES, virtual_replicas=virtual)
    tx = optax.chain(policy, optax.adamw(1e-3))
    state = strategy.init(lambda params: (params, tx.init(params)), params)
    (batch,) = strategy.distribute_dataset(data, len(data[1]))
    return Loop(strategy.step(functools.partial(step_of, model, tx, gradient)), state, batch)


def by_hand(model, params, data):
    def update(grads, state, params=None):
        return lax.pmean(grads, "replica"), state

    tx = optax.chain(optax.GradientTransformation(lambda params: optax.EmptyState(), update), optax.adamw(1e-3))

    def step(state, batch):
        state, loss = step_of(model, tx, mean_gradient, state, batch)
        return state, loss[None]

    rows, whole = PartitionSpec("replica"), PartitionSpec()
    over_mesh = jax.shard_map(step, mesh=MESH, in_specs=(whole, rows), out_specs=(whole, rows), check_vma=False)
    state = jax.device_put(jax.tree.map(jnp.copy, (params, tx.init(params))), NamedSharding(MESH, whole))
    return Loop(jax.jit(over_mesh, donate_argnums=0), state, jax.device_put(data, NamedSharding(MESH, rows)))


def compare(case, loops, steps):
    first, *others = (np.array(one.losses(5)) for one in loops.values())
    for other in others:
        np.testing.assert_allclose(first, other, rtol=1e-4)
    timed = {
        peer: functools.partial(sidebyside.seconds, functools.partial(one.losses, steps)) for peer, one in loops.items()
    }
    sidebyside.report(case, sidebyside.rounds(timed, args.rounds or (3 if args.quick else 31)), args.json, steps)


def main():
    sidebyside.versions(args.json)
    random = np.random.default_rng(0)
    data = random.normal(size=(64, 8, 8, 1)).astype(np.float32), random.integers(0, 10, 64).astype(np.int32)
    for name, (steps, model) in CASES.items():
        if args.case not in (None, name):
            continue
        params = model.init(jax.random.key(0), data[0][:1])
        make = functools.partial(with_policy, model, params, data)
        mean, exact = jdist.sync.mean(), jdist.sync.exact()
        parts = functools.partial(jdist.value_and_grad, micro_batches=max(VIRTUAL // len(DEVICES), 1))
        loops = {"jdist": make(mean, mean_gradient), "pmean by hand": by_hand(model, params, data)}
        compare(f"{name}, mean, {len(DEVICES)} devices", loops, steps)
        loops = {
            "jdist": make(exact, mean_gradient, VIRTUAL),
            "mean": make(mean, mean_gradient),
            "mean, micro-batches": make(mean, parts),
        }
        compare(f"{name}, exact, {len(DEVICES)} devices", loops, steps)


if __name__ == "__main__":
    main()
