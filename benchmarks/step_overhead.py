"""Steps of jdist against the same steps written by hand (four variants).

    python benchmarks/step_overhead.py [--quick] [--json] [--devices 4]

Cases: `tiny` (a step of a few microseconds, which measures the call), `mlp` and `transformer` (a block with its
loss and AdamW). Peers: `shard_map` (`jax.jit(jax.shard_map(...))`), `jit` (`jax.jit` over `NamedSharding`s) and `pmap`. `run`
is `strategy.run` against the same `shard_map`, `sharded step` a step of `ShardedStrategy("all")` against `jit` with the same
placements. All of them donate the state; on CPU every candidate waits for each step, and jdist uses the collectives
of its peers, one per leaf: `train_step.py` measures the defaults. `jdist.step` (case `tiny`) is a step that finds its strategy
at the call, against the program that it calls (`Program`), both on one device and in the scope of the strategy.
"""

import functools
import sys

import jax

import sidebyside

options = sidebyside.parser("Steps of jdist against hand-written steps.")
options.add_argument("--devices", type=int, default=0, help="default: all accelerators, or 4 CPU devices")
options.add_argument("--case", choices=["tiny", "mlp", "transformer"], help="run only this case")
args = options.parse_args()
jax.config.update("jax_num_cpu_devices", args.devices or 4)

import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from models import MLP, train_step

import jdist

DEVICES = jax.devices()[: args.devices or None]
ON_CPU = DEVICES[0].platform == "cpu"
MESH = sidebyside.mesh_of(DEVICES)
ROWS, WHOLE = NamedSharding(MESH, PartitionSpec("replica")), NamedSharding(MESH, PartitionSpec())


class Block(nn.Module):
    @nn.compact
    def __call__(self, x):
        y = nn.LayerNorm()(x)
        x = x + nn.MultiHeadDotProductAttention(num_heads=4)(y, y)
        x = x + nn.Dense(x.shape[-1])(nn.gelu(nn.Dense(4 * x.shape[-1])(nn.LayerNorm()(x))))
        return nn.Dense(10)(x.mean(axis=1))


def tiny(mean):
    def step(state, batch):
        grad = mean(jnp.mean(batch[0]))
        return state - 0.1 * grad, grad

    return jnp.zeros(()), step, (np.ones((8 * len(DEVICES), 4), np.float32),)


def trained(model, batch, mean):
    optimizer = optax.adamw(1e-3)
    params = model.init(jax.random.key(0), batch[0][:1])
    step = functools.partial(train_step, model, optimizer, mean)
    return (params, optimizer.init(params)), step, batch


def labelled(*shape):
    random = np.random.default_rng(0)
    return random.normal(size=shape).astype(np.float32), random.integers(0, 10, shape[0]).astype(np.int32)


CASES = {
    "tiny": (200, tiny),
    "mlp": (10, functools.partial(trained, MLP((512, 512)), labelled(256 * len(DEVICES), 256))),
    "transformer": (5, functools.partial(trained, Block(), labelled(8 * len(DEVICES), 64, 128))),
}


def split(batch):
    return jax.tree.map(lambda x: x.reshape(len(DEVICES), -1, *x.shape[1:]), batch)


def loop(step, state, batch, steps):
    """Returns a function that runs `steps` steps and returns the seconds. The state continues from call to call."""
    kept = [state]

    def work():
        state = kept[0]
        for _ in range(steps):
            state, loss = step(state, batch)
            if ON_CPU:
                loss.block_until_ready()
        jax.block_until_ready(state)
        kept[0] = state

    return lambda: sidebyside.seconds(work)


def over_shard_map(step, donate=(0,)):
    rows, whole = PartitionSpec("replica"), PartitionSpec()
    body = jax.shard_map(step, mesh=MESH, in_specs=(whole, rows), out_specs=whole, check_vma=False)
    return jax.jit(body, donate_argnums=donate)


def strategy_like_by_hand():
    return jdist.MirroredStrategy(
        DEVICES,
        cross_device_ops=jdist.AllReduce(bytes_to_scatter=sys.maxsize),
        communication_options=jdist.CommunicationOptions(bytes_per_pack=0),
    )


def candidates(make, steps):
    strategy = strategy_like_by_hand()
    by_hand = lambda tree: lax.pmean(tree, "replica")
    state, step, batch = make(functools.partial(jdist.all_reduce, "mean"))
    _, step_by_hand, _ = make(by_hand)
    _, step_global, _ = make(lambda tree: tree)
    whole = lambda: jax.device_put(jax.tree.map(jnp.copy, state), WHOLE)
    repeated = jax.tree.map(lambda x: jnp.broadcast_to(x, (len(DEVICES), *x.shape)), state)
    compiled = {
        "jdist": (strategy.step(step), whole(), jdist.PerReplica(jax.device_put(split(batch), ROWS))),
        "shard_map": (over_shard_map(step_by_hand), whole(), jax.device_put(batch, ROWS)),
        "jit": (jax.jit(step_global, donate_argnums=0), whole(), jax.device_put(batch, ROWS)),
        "pmap": (
            jax.pmap(step_by_hand, "replica", devices=DEVICES, donate_argnums=0),
            jax.device_put(repeated, ROWS),
            jax.device_put(split(batch), ROWS),
        ),
    }
    return {name: loop(*parts, steps) for name, parts in compiled.items()}


def run_candidates(make, steps):
    strategy = strategy_like_by_hand()
    state, step, batch = make(functools.partial(jdist.all_reduce, "mean"))
    _, step_by_hand, _ = make(lambda tree: lax.pmean(tree, "replica"))
    run = lambda state, batch: strategy.run(step, (state, batch))
    placed = jdist.PerReplica(jax.device_put(split(batch), ROWS))
    return {
        "jdist": loop(run, jax.device_put(state, WHOLE), placed, steps),
        "shard_map": loop(
            over_shard_map(step_by_hand, ()), jax.device_put(state, WHOLE), jax.device_put(batch, ROWS), steps
        ),
    }


def unbound_candidates(make, steps):
    """Returns a step that is compiled for the current strategy, and its program, both called in the scope of the strategy."""
    strategy = jdist.OneDeviceStrategy(DEVICES[0])
    state, step, batch = make(functools.partial(jdist.all_reduce, "mean"))
    unbound, placed = jdist.step(step), strategy.split(batch)

    def in_scope(step):
        return strategy.scope()(loop(step, strategy.put(state), placed, steps))

    return {"jdist": in_scope(unbound), "Program": in_scope(unbound.on(strategy))}


def sharded_candidates(make, steps):
    """Returns the candidates with a sharded state: the same placements, by jdist and by `jax.jit` with shardings."""
    mesh = Mesh(np.array(DEVICES), ("data",))
    strategy = jdist.ShardedStrategy("all", mesh=mesh)
    state, step, batch = make(functools.partial(jdist.all_reduce, "mean"))
    _, step_by_hand, _ = make(lambda tree: tree)
    placed = jax.device_put(batch, NamedSharding(mesh, PartitionSpec("data")))
    where = jax.tree.map(lambda x: x.sharding, strategy.put(state))
    by_hand = jax.jit(step_by_hand, donate_argnums=0, out_shardings=(where, NamedSharding(mesh, PartitionSpec())))
    return {
        "jdist": loop(
            strategy.step(step), strategy.put(state), jdist.PerReplica(jax.tree.map(lambda x: x[None], placed)), steps
        ),
        "jit": loop(by_hand, strategy.put(state), placed, steps),
    }


def main():
    sidebyside.versions(args.json)
    count = args.rounds or (3 if args.quick else 41)
    for name, (steps, make) in CASES.items():
        if args.case in (None, name):
            case = f"{name}, {len(DEVICES)} devices"
            sidebyside.report(f"step, {case}", sidebyside.rounds(candidates(make, steps), count), args.json, steps)
            sidebyside.report(f"run, {case}", sidebyside.rounds(run_candidates(make, steps), count), args.json, steps)
            if name == "tiny":
                taken = sidebyside.rounds(unbound_candidates(make, steps), 10 * count)
                sidebyside.report("jdist.step, tiny, 1 device", taken, args.json, steps)
            taken = sidebyside.rounds(sharded_candidates(make, steps), count)
            sidebyside.report(f"sharded step, {case}", taken, args.json, steps)


if __name__ == "__main__":
    main()
