"""Sums over the replicas: `jdist.all_reduce` against hand-written `lax.psum(tree)` on 2, 4 and 8 devices.

    python benchmarks/all_reduce.py [--quick] [--json] [--devices 4] [--case small]

Cases: `small` (200 leaves of 1k float32), `large` (10 leaves of 1M), `transformer` (gradients of a GPT with 10.7M parameters, 6
layers of width 384) and `edges` (leaf sizes around the thresholds of packing and splitting). Peers: `psum` (`lax.psum(tree)` in
`jax.jit(jax.shard_map(...))`, per-replica values donated) and, with `--algorithms`, the other algorithms of jdist.
"""

import jax

import sidebyside

options = sidebyside.parser("Sums over the replicas, against lax.psum.")
options.add_argument(
    "--devices", type=int, nargs="+", help="numbers of devices (default: all accelerators, or 2, 4 and 8 CPU devices)"
)
options.add_argument("--case", choices=["small", "large", "transformer", "edges"], help="run only this case")
options.add_argument("--algorithms", action="store_true", help="also compare the algorithms of jdist")
args = options.parse_args()
jax.config.update("jax_num_cpu_devices", max(args.devices or [8]))

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

import jdist

DEVICES = jax.devices()
ON_CPU = DEVICES[0].platform == "cpu"
WIDTH = 384
LAYER = [(WIDTH,), (WIDTH,), (WIDTH, 3 * WIDTH), (3 * WIDTH,), (WIDTH, WIDTH), (WIDTH,)]
LAYER += [(WIDTH,), (WIDTH,), (WIDTH, 4 * WIDTH), (4 * WIDTH,), (4 * WIDTH, WIDTH), (WIDTH,)]
CASES = {
    "small": {"200 x 1k": [(1024,)] * 200},
    "large": {"10 x 1M": [(1024, 1024)] * 10},
    "transformer": {"transformer, 10.7M": [(65, WIDTH), (256, WIDTH), *LAYER * 6, (WIDTH,), (WIDTH,), (WIDTH, 65)]},
    "edges": {
        "3 x 1k": [(1024,)] * 3,
        "100 x 16k (64 KiB)": [(16 * 1024,)] * 100,
        "2 x 32k (128 KiB)": [(32 * 1024,)] * 2,
        "100 x 32k (128 KiB)": [(32 * 1024,)] * 100,
        "60 x 64k (256 KiB)": [(64 * 1024,)] * 60,
        "20 x 256k (1 MiB)": [(256 * 1024,)] * 20,
        "10 x 512k (2 MiB)": [(512 * 1024,)] * 10,
        "6 x 600,001 (odd)": [(600_001,)] * 6,
        "4 x 256k, 8 x 512": [(256 * 1024,)] * 4 + [(512,)] * 8,
    },
}
ALGORITHMS = {
    "one device": jdist.ReductionToOneDevice(),
    "two levels": jdist.HierarchicalAllReduce(group_size=2),
}


def by_hand(tree, count):
    mesh = sidebyside.mesh_of(DEVICES[:count])
    rows = PartitionSpec("replica")

    def step(tree):
        sums = lax.psum(jax.tree.map(lambda x: x[0], tree), "replica")
        return jax.tree.map(lambda x: x[None] / count, sums)

    compiled = jax.jit(jax.shard_map(step, mesh=mesh, in_specs=rows, out_specs=rows, check_vma=False), donate_argnums=0)
    return compiled, jax.device_put(tree, NamedSharding(mesh, rows))


def by_jdist(tree, count, algorithm=None):
    strategy = jdist.MirroredStrategy(DEVICES[:count], cross_device_ops=algorithm)
    step = strategy.step(lambda tree: (jax.tree.map(lambda x: x / count, jdist.all_reduce("sum", tree)), None))
    return lambda tree: step(tree)[0], strategy.put(jdist.PerReplica(tree))


def loop(step, state, times):
    """Returns a function that sums `times` times and returns the seconds. The operand of a call is the result of the last."""
    kept = [state]

    def work():
        for _ in range(times):
            kept[0] = step(kept[0])
            if ON_CPU:
                jax.block_until_ready(kept[0])
        jax.block_until_ready(kept[0])

    return lambda: sidebyside.seconds(work)


def measure(case, shapes, count):
    random = np.random.default_rng(0)
    tree = [random.normal(size=(count, *shape)).astype(np.float32) for shape in shapes]
    parts = {"jdist": by_jdist(tree, count), "psum": by_hand(tree, count)}
    if args.algorithms:
        parts |= {name: by_jdist(tree, count, algorithm) for name, algorithm in ALGORITHMS.items()}
    first = jax.tree.leaves(parts["psum"][0](by_hand(tree, count)[1]))
    for step, state in (part for name, part in parts.items() if name != "psum"):
        ours = jax.tree.leaves(step(jax.tree.map(jnp.copy, state)))
        for a, b in zip(first, ours, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)
    times = max(1, min(20, 40_000_000 // (count * sum(np.prod(shape, dtype=int) for shape in shapes))))
    candidates = {name: loop(*part, times) for name, part in parts.items()}
    taken = sidebyside.rounds(candidates, args.rounds or (3 if args.quick else 21))
    sidebyside.report(f"{case}, {count} devices", taken, args.json, times)


def main():
    sidebyside.versions(args.json)
    for name, trees in CASES.items():
        if name == args.case or (args.case is None and not (args.quick and name == "edges")):
            for case, shapes in trees.items():
                for count in args.devices or ([2, 4, 8] if ON_CPU else [len(DEVICES)]):
                    measure(case, shapes, count)


if __name__ == "__main__":
    main()
