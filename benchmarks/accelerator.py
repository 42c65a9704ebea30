"""Checks and measures jdist on the accelerators of this machine: one GPU, eight TPU chips, or forced CPU devices.

    python benchmarks/accelerator.py [--quick] [--json] [--devices 4] [--minutes 5] [--output accelerator.json]

Takes at most five minutes, without a network, and needs jax, flax, optax, chex, orbax-checkpoint and rich. From a
checkout that is not installed: `PYTHONPATH=. python benchmarks/accelerator.py`. Each row is one of:

- a ratio to the same program written by hand with `jax.jit` or `jax.shard_map`, measured alternately: rates (higher is better),
  or bytes of device memory (`memory`: by hand divided by jdist, so higher is better there too);
- a check that holds or fails, such as bitwise equality of exact mode on one and on all devices.

A case that fails is a row with its error, and the others still run. Its traceback is on standard error, and the exit status
is 1. A case that does not start within the time limit is a row that says so. The rows are also written to a JSON file.
"""

import functools
import json
import pathlib
import sys
import tempfile
import time
import traceback

import jax

import sidebyside

options = sidebyside.parser("Checks and measures jdist on the accelerators of this machine.")
options.add_argument("--devices", type=int, default=0, help="default: all accelerators, or 4 CPU devices")
options.add_argument("--minutes", type=float, default=5, help="no case starts after 80 percent of this time")
options.add_argument("--output", default="accelerator.json", help="the JSON file of the rows")
options.add_argument("--case", action="append", help="run only this case; may be repeated")
args = options.parse_args()
jax.config.update("jax_num_cpu_devices", args.devices or 4)

import chex
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec
from models import MLP, Transformer, labelled, train_step

import jdist

START = time.monotonic()
DEVICES = jax.devices()[: args.devices or None]
ON_CPU = DEVICES[0].platform == "cpu"
MESH = sidebyside.mesh_of(DEVICES)
SHARDED, REPLICATED = NamedSharding(MESH, PartitionSpec("replica")), NamedSharding(MESH, PartitionSpec())
ROUNDS = args.rounds or (3 if args.quick else 15)
# On accelerators, models that take some milliseconds per step; on CPU, the same code in seconds.
WIDTH, EXAMPLES = (128, 64) if ON_CPU or args.quick else (2048, 1024)
MODELS = {
    "mlp": (MLP((WIDTH, WIDTH)), labelled((EXAMPLES * len(DEVICES), 256))),
    "transformer": (
        Transformer(1, 64) if WIDTH == 128 else Transformer(6, 512),
        labelled(((EXAMPLES // 16) * len(DEVICES), 32 if WIDTH == 128 else 256), np.int32),
    ),
}
mean = functools.partial(jdist.all_reduce, "mean")


# ---- Parts of the cases


class Loop:
    """Runs steps one after the other, and waits for the last one. The state continues from call to call."""

    def __init__(self, step, state, batch, per_call=1):
        self.step, self.state, self.batch, self.per_call = step, state, batch, per_call

    def __call__(self, steps):
        for _ in range(steps // self.per_call):
            self.state, self.loss = self.step(self.state, self.batch)
            if ON_CPU:
                jax.block_until_ready(self.loss)
        jax.block_until_ready(self.state)


def compare(case, loops, steps):
    """Returns the rows of `jdist` against each other loop."""
    timed = {
        name: functools.partial(sidebyside.seconds, functools.partial(loop, steps)) for name, loop in loops.items()
    }
    return sidebyside.rows(case, sidebyside.rounds(timed, ROUNDS), steps)


def create(name, optimizer):
    """Returns a model, a function that creates its state, and its batch."""
    model, batch = MODELS[name]

    def init():
        params = model.init(jax.random.key(0), batch[0][:1])
        return params, optimizer.init(params)

    return model, init, batch


def by_hand(name, optimizer):
    """Returns the hand-written step in the global view, its state and its batch."""
    model, init, batch = create(name, optimizer)
    step = jax.jit(functools.partial(train_step, model, optimizer, lambda tree: tree), donate_argnums=0)
    return step, jax.jit(init, out_shardings=REPLICATED)(), jax.device_put(batch, SHARDED)


def by_jdist(name, optimizer, strategy, **options):
    """Returns the step of a strategy, its state and its batch."""
    model, init, batch = create(name, optimizer)
    step = strategy.step(functools.partial(train_step, model, optimizer, mean), **options)
    return step, strategy.init(init), strategy.split(batch)


def holds(case, is_true, detail):
    """Returns a row for a check."""
    return [{"case": case, "holds": bool(is_true), "detail": detail}]


# ---- Cases: each returns rows


def readme():
    """The example of the README: it trains, and the proof refuses the step without its all-reduce."""
    x = np.random.default_rng(0).normal(size=(512, 3)).astype(np.float32)
    y = x @ np.float32([1, -2, 3])
    strategy = jdist.MirroredStrategy(DEVICES)

    def step(state, x, y, reduce=mean):
        loss, grads = reduce(jax.value_and_grad(lambda w: jnp.mean((x @ w - y) ** 2))(state["w"]))
        return {"w": state["w"] - 0.1 * grads}, loss

    state, train = strategy.init(lambda: {"w": jnp.zeros(3)}), strategy.step(step)
    for x_batch, y_batch in strategy.distribute_dataset((x, y), batch_size=64, shuffle=True, epochs=8):
        state, _ = train(state, x_batch, y_batch)
    rows = holds("README: weights", np.abs(state["w"] - np.float32([1, -2, 3])).max() < 0.02, str(state["w"]))
    if len(DEVICES) > 1:
        try:
            strategy.step(lambda *parts: step(*parts, reduce=lambda tree: tree))(state, x_batch, y_batch)
            rows += holds("README: step without all_reduce", False, "was accepted")
        except jdist.NotMirroredError as error:
            rows += holds("README: step without all_reduce", True, str(error).splitlines()[0])
    return rows


def step():
    """A training step with the defaults of `MirroredStrategy` against `jax.jit`, and of one device without a mesh."""
    rows = []
    for name in MODELS:
        optimizer = optax.adamw(1e-3)
        loops = {
            "jdist": Loop(*by_jdist(name, optimizer, jdist.MirroredStrategy(DEVICES))),
            "jit": Loop(*by_hand(name, optimizer)),
        }
        for loop in loops.values():
            loop(3)
        chex.assert_trees_all_close(*(loop.loss for loop in loops.values()), rtol=1e-2)
        rows += compare(f"step, {name}", loops, 10)
    return rows


def overhead():
    """The call of a step that computes almost nothing."""
    strategy = jdist.MirroredStrategy(DEVICES)
    batch = np.ones((8 * len(DEVICES), 4), np.float32)

    def step(mean, state, batch):
        grad = mean(jnp.mean(batch))
        return state - 0.1 * grad, grad

    specs = {"in_specs": (PartitionSpec(), PartitionSpec("replica")), "out_specs": PartitionSpec()}
    pmean = functools.partial(lax.pmean, axis_name="replica")
    mapped = jax.shard_map(functools.partial(step, pmean), mesh=MESH, **specs, check_vma=False)
    loops = {
        "jdist": Loop(strategy.step(functools.partial(step, mean)), strategy.put(jnp.zeros(())), strategy.split(batch)),
        "shard_map": Loop(
            jax.jit(mapped, donate_argnums=0), jax.device_put(jnp.zeros(()), REPLICATED), jax.device_put(batch, SHARDED)
        ),
    }
    return compare("step, tiny", loops, 200)


def fit():
    """An epoch of `Trainer.fit` with its defaults against a loop over a step written by hand, both fed with the same data."""
    model, optimizer, steps = MODELS["mlp"][0], optax.adamw(1e-3), 40 if ON_CPU or args.quick else 200
    x, y = (np.concatenate([part] * steps) for part in MODELS["mlp"][1])
    strategy = jdist.MirroredStrategy(DEVICES)
    dataset = strategy.distribute_dataset((x, y), len(x) // steps, shuffle=True, remainder="drop")
    losses = optax.softmax_cross_entropy_with_integer_labels
    trainer = jdist.Trainer(model, optimizer, losses, strategy=strategy)
    written = strategy.step(functools.partial(train_step, model, optimizer, mean))
    init = create("mlp", optimizer)[1]

    def loop(state):
        for batch in dataset:
            state, loss = written(state, batch)
            if ON_CPU:
                jax.block_until_ready(loss)
        jax.block_until_ready(state)

    def measured(create_state, epoch):
        state = jax.block_until_ready(create_state())
        return sidebyside.seconds(lambda: epoch(state))

    fit = lambda state: jax.block_until_ready(trainer.fit(dataset, state=state, progress="off").state)
    timed = {
        "jdist": functools.partial(measured, lambda: trainer.init(x[:1]), fit),
        "loop": functools.partial(measured, lambda: strategy.init(init), loop),
    }
    return sidebyside.rows("fit, mlp", sidebyside.rounds(timed, ROUNDS), steps)


def all_reduce():
    """`jdist.all_reduce` of 1 MB and 64 MB per device against `lax.pmean`."""
    if len(DEVICES) == 1:
        return [{"case": "all_reduce", "skipped": "there is one device"}]
    strategy, rows = jdist.MirroredStrategy(DEVICES), []
    for megabytes in (1, 4) if ON_CPU or args.quick else (1, 64):
        shape = (len(DEVICES), megabytes * 2**18)
        ours = strategy.step(lambda state, x: (state, mean(x)), donate=False)
        spec = PartitionSpec("replica")
        pmean = lambda state, x: (state, lax.pmean(x[0], "replica"))
        specs = {"in_specs": (PartitionSpec(), spec), "out_specs": PartitionSpec()}
        peer = jax.jit(jax.shard_map(pmean, mesh=MESH, **specs, check_vma=False))
        x = jax.device_put(np.ones(shape, np.float32), SHARDED)
        zero = strategy.put(jnp.zeros(()))
        rows += compare(
            f"all_reduce, {megabytes} MB",
            {"jdist": Loop(ours, zero, jdist.PerReplica(x)), "pmean": Loop(peer, zero, x)},
            10,
        )
    return rows


def bfloat16():
    """A step in bfloat16 (`jdist.Precision`) against the same step in float32: the ratio is the gain."""
    optimizer, strategy = optax.adamw(1e-3), jdist.MirroredStrategy(DEVICES)
    model, init, batch = create("transformer", optimizer)
    losses = optax.softmax_cross_entropy_with_integer_labels

    def train(precision):
        def step(state, batch):
            params, opt_state = state
            loss_fn = lambda params, x, y: losses(model.apply(params, x).astype(jnp.float32), y)
            loss, grads = mean(jdist.value_and_grad(loss_fn)(params, *batch))
            updates, opt_state = optimizer.update(grads, opt_state, params)
            return (optax.apply_updates(params, updates), opt_state), loss

        return strategy.step(step, precision=precision)

    loops = {
        "jdist": Loop(train(jdist.Precision(compute_dtype="bfloat16")), strategy.init(init), strategy.split(batch)),
        "float32": Loop(train(None), strategy.init(init), strategy.split(batch)),
    }
    for loop in loops.values():
        loop(3)
    chex.assert_trees_all_close(*(loop.loss for loop in loops.values()), rtol=0.1)
    return compare("bfloat16, transformer", loops, 10)


def memory():
    """Donation, and device memory of a step against the same step by hand."""
    rows, optimizer = [], optax.adamw(1e-3)
    for name in MODELS:
        ours, peer = by_jdist(name, optimizer, jdist.MirroredStrategy(DEVICES)), by_hand(name, optimizer)
        old = jax.tree.leaves(ours[1])
        state, _ = ours[0](*ours[1:])
        rows += holds(f"donation, {name}", all(leaf.is_deleted() for leaf in old), f"{len(old)} leaves")
        peaks = {}
        for key, compiled in {
            "jdist": ours[0].lower(state, ours[2]).compile(),
            "jit": peer[0].lower(*peer[1:]).compile(),
        }.items():
            of = compiled.memory_analysis()
            peaks[key] = (
                of.argument_size_in_bytes + of.output_size_in_bytes - of.alias_size_in_bytes + of.temp_size_in_bytes
            )
        ratio = peaks["jit"] / peaks["jdist"]
        rows.append({"case": f"memory, {name}", "peer": "jit", "ratio": ratio, "bytes": peaks["jdist"]})
    statistics = DEVICES[0].memory_stats() or {}
    if "peak_bytes_in_use" in statistics:
        rows += holds("memory, peak of the process", True, f"{statistics['peak_bytes_in_use']:,} bytes")
    return rows


def steps_per_call():
    """Ten steps per call against ten calls of the same step, both by jdist."""
    optimizer, strategy = optax.sgd(1e-2), jdist.MirroredStrategy(DEVICES)
    model, batch = MLP((16, 16)), labelled((64 * len(DEVICES), 16))

    def init():
        params = model.init(jax.random.key(0), batch[0][:1])
        return params, optimizer.init(params)

    train = functools.partial(train_step, model, optimizer, mean)
    several = [np.concatenate([part] * 10) for part in batch]
    batches = list(strategy.distribute_dataset(tuple(several), len(batch[1])))
    loops = {
        "jdist": Loop(strategy.step(train, steps_per_call=10), strategy.init(init), batches, 10),
        "one per call": Loop(strategy.step(train), strategy.init(init), batches[0]),
    }
    return compare("steps_per_call=10, small", loops, 50)


def exact():
    """Exact mode: bits on one and on all devices, and its rate against `sync.mean`."""
    optimizer = optax.chain(jdist.sync.exact(), optax.adamw(1e-3))
    replicas = 2 * len(DEVICES)
    parameters = {}
    for devices in (DEVICES[:1], DEVICES):
        strategy = jdist.MirroredStrategy(devices, virtual_replicas=replicas)
        loop = Loop(*by_jdist("transformer", optimizer, strategy))
        loop(5)
        parameters[len(devices)] = [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(loop.state[0])]
    one, several = parameters[1], parameters[len(DEVICES)]
    different = sum(a != b for a, b in zip(one, several, strict=True))
    rows = holds(
        f"exact, bits on 1 and {len(DEVICES)} devices", not different, f"{different} of {len(one)} leaves differ"
    )
    mirrored = by_jdist("transformer", optax.adamw(1e-3), jdist.MirroredStrategy(DEVICES))
    return rows + compare("exact, transformer", {"jdist": loop, "mean": Loop(*mirrored)}, 10)


def offload():
    """Steps whose state is in host memory, against the state in device memory: values, memory kinds and rates."""
    rows, optimizer = [], optax.adamw(1e-3)
    mesh = jax.sharding.Mesh(np.array(DEVICES), ("data",))
    strategies = {
        "central": (jdist.CentralStorageStrategy(DEVICES), jdist.MirroredStrategy(DEVICES)),
        "central, optimizer": (
            jdist.CentralStorageStrategy(DEVICES, offload="optimizer"),
            jdist.MirroredStrategy(DEVICES),
        ),
        "sharded, optimizer": (
            jdist.ShardedStrategy("all", mesh=mesh, offload="optimizer"),
            jdist.ShardedStrategy("all", mesh=mesh),
        ),
    }
    for name, (offloaded, resident) in strategies.items():
        loops = {
            "jdist": Loop(*by_jdist("mlp", optimizer, offloaded)),
            "on device": Loop(*by_jdist("mlp", optimizer, resident)),
        }
        for loop in loops.values():
            loop(3)
        # Adam divides by the root of small second moments, which enlarges rounding.
        chex.assert_trees_all_close(*(jax.device_get(loop.state[0]) for loop in loops.values()), rtol=1e-2, atol=1e-3)
        kinds = sorted({leaf.sharding.memory_kind for leaf in jax.tree.leaves(loops["jdist"].state)})
        rows += holds(f"offload {name}: in host memory", "pinned_host" in kinds or ON_CPU, ", ".join(kinds))
        rows += compare(f"offload {name}, mlp", loops, 5)
    return rows


def modules():
    """A step over an nnx model and its optimizer against `nnx.jit`."""

    class Model(nnx.Module):
        def __init__(self, rngs):
            self.layers = nnx.List([nnx.Linear(64, 64, rngs=rngs) for _ in range(4)])

        def __call__(self, x):
            for layer in self.layers:
                x = nnx.relu(layer(x))
            return x

    def create():
        model = Model(nnx.Rngs(0))
        return model, nnx.Optimizer(model, optax.adamw(1e-3), wrt=nnx.Param)

    def train(reduce, state, x):
        model, optimizer = state
        loss, grads = reduce(nnx.value_and_grad(lambda model: jnp.mean(model(x) ** 2))(model))
        optimizer.update(model, grads)
        return (model, optimizer), loss

    strategy, x = jdist.MirroredStrategy(DEVICES), np.ones((32 * len(DEVICES), 64), np.float32)
    by_nnx = nnx.jit(lambda state, x: train(lambda tree: tree, state, x)[1])
    state = jax.device_put(nnx.state(pair := create()), REPLICATED)
    nnx.update(pair, state)
    loops = {
        "jdist": Loop(strategy.step(functools.partial(train, mean)), strategy.init(create), strategy.split(x)),
        "nnx.jit": Loop(lambda state, x: (state, by_nnx(state, x)), pair, jax.device_put(x, SHARDED)),
    }
    return compare("step, nnx", loops, 20)


def checkpoint():
    """A checkpoint of a state on the devices is restored bit for bit."""
    strategy = jdist.MirroredStrategy(DEVICES)
    state = strategy.init(create("mlp", optax.adamw(1e-3))[1])
    with tempfile.TemporaryDirectory() as folder, jdist.Checkpointer(folder) as checkpointer:
        checkpointer.save(1, state, now=True)
        restored = checkpointer.restore(strategy, like=state).state
    pairs = zip(jax.tree.leaves(state), jax.tree.leaves(restored), strict=True)
    equal = [np.asarray(a).tobytes() == np.asarray(b).tobytes() for a, b in pairs]
    return holds("checkpoint: bits after restore", all(equal), f"{sum(equal)} of {len(equal)} leaves are equal")


def callbacks():
    """`fit` with a loss that closes over an array, validation, averages and checkpoints, for a state in either memory."""
    model, batch = MODELS["mlp"]
    scale = jnp.float32(2)
    loss = lambda logits, labels: scale * optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    x, y = (np.concatenate([part] * 8) for part in batch)
    losses = {}
    for strategy in (jdist.MirroredStrategy(DEVICES), jdist.CentralStorageStrategy(DEVICES)):
        trainer = jdist.Trainer(model, optax.adamw(1e-3), loss, strategy=strategy)
        with tempfile.TemporaryDirectory() as folder, jdist.Checkpointer(folder, every=3) as checkpointer:
            called = [jdist.callbacks.EMA(0.9), jdist.callbacks.Checkpoint(checkpointer)]
            options = {"batch_size": len(batch[1]), "validation_data": batch, "callbacks": called, "progress": "off"}
            losses[type(strategy).__name__] = trainer.fit((x, y), **options).history[-1]["val_loss"]
    first, second = losses.values()
    return holds("fit with callbacks", abs(first - second) < 1e-2 * abs(first), str(losses))


def profile():
    """`callbacks.Profile` writes a trace of two steps."""
    strategy = jdist.MirroredStrategy(DEVICES)
    model, batch = MODELS["mlp"]
    losses = optax.softmax_cross_entropy_with_integer_labels
    trainer = jdist.Trainer(model, optax.sgd(1e-2), losses, strategy=strategy)
    x, y = (np.concatenate([part] * 5) for part in batch)
    with tempfile.TemporaryDirectory() as folder:
        callback = jdist.callbacks.Profile(folder, start=3, stop=4)
        trainer.fit((x, y), batch_size=len(batch[1]), callbacks=[callback], progress="off")
        (trace,) = pathlib.Path(folder).rglob("*.xplane.pb")
        planes = [plane.name for plane in jax.profiler.ProfileData.from_file(str(trace)).planes]
        return holds("profile", planes, ", ".join(planes))


CASES = [
    readme,
    overhead,
    step,
    fit,
    memory,
    modules,
    bfloat16,
    all_reduce,
    steps_per_call,
    exact,
    offload,
    checkpoint,
    callbacks,
    profile,
]


def run(case):
    """Returns the rows of a case, or a row with its error."""
    if time.monotonic() - START > 0.8 * 60 * args.minutes:
        return [{"case": case.__name__, "skipped": f"the limit of {args.minutes:g} minutes"}]
    try:
        return case()
    except Exception as error:
        traceback.print_exc()
        return [{"case": case.__name__, "holds": False, "detail": f"{type(error).__name__}: {error}".splitlines()[0]}]


def describe(row):
    """Returns the line of a row."""
    if "skipped" in row:
        return f"{row['case']:36} skipped: {row['skipped']}"
    if "holds" in row:
        return f"{row['case']:36} {'ok' if row['holds'] else 'FAILED'}: {row['detail']}"
    spread = f"  [{row['low']:.3f}, {row['high']:.3f}]  {row['microseconds']:,.1f} us per step" if "low" in row else ""
    return f"{row['case']:36} against {row['peer']:12} ratio {row['ratio']:6.3f}{spread}"


def main():
    sidebyside.versions(args.json)
    rows = []
    for case in CASES:
        if not args.case or case.__name__ in args.case:
            for row in run(case):
                print(json.dumps(row) if args.json else describe(row), flush=True)
                rows.append(row)
    header = {"versions": sidebyside.version_line(), "devices": len(DEVICES), "seconds": time.monotonic() - START}
    pathlib.Path(args.output).write_text(json.dumps({**header, "rows": rows}, indent=1) + "\n")
    failed = [row["case"] for row in rows if row.get("holds") is False]
    if not args.json:
        print(f"{len(rows)} rows in {header['seconds']:.0f} s, in {args.output}; failed: {', '.join(failed) or 'none'}")
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
