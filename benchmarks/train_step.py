"""Training steps of jdist with its defaults against hand-written `jit` and `shard_map`, and `Trainer.fit`.

    python benchmarks/train_step.py [--quick] [--json] [--devices 4] [--case mlp]

Cases: `small` (two hidden layers of width 16) and `deep` (ten layers of width 64), both with SGD, which have many small
leaves; `tabular` (batches of 64 x 32 floats, two hidden layers of width 32), `mlp` (two layers), `cnn` (of the digits
example) and `transformer` (4 blocks of width 256), with AdamW. `alone` is the
hand-written step without any reduction: a bound for every reduction, not a correct training step. The others start from
the same state, and the losses of their first steps are checked to be equal. On CPU every candidate waits for each step.

`small, 10 steps per call` is `strategy.step(fn, steps_per_call=10)` against peers with one step per call, and against `scan`,
a hand-written scan over the same number of steps that packs all leaves into one reduction. In a scan, XLA's CPU convolutions
(`cnn`) are slow; jdist does not use one there.

`fit, cnn` is an epoch of `Trainer.fit` with its defaults, on full batches. The first peer, `plain loop`, is `for batch in
dataset: state, loss = step(state, batch)` over `remainder="drop"`, with a step as users write it, without weights. In the
others the data set pads, and each step receives weights: `same step` calls the step of the trainer, with its metrics and its
guard of non-finite steps, and `with weights` is the step of the plain loop with `jdist.value_and_grad(weights=weights)`.
`wide` (5 million parameters, SGD with momentum) and `large` (12 million) show the cost per parameter, `tabular` the cost per
call, and `small` the same with a step that does less than most. `--case fit` runs all, `--case fit-cnn` one.

`weights, wide` is that step with weights against the step without, both on one full batch: `--case weights`.
"""

import contextlib
import dataclasses
import functools
import io

import jax

import sidebyside

options = sidebyside.parser("Training steps of jdist against hand-written steps.")
options.add_argument("--devices", type=int, default=0, help="default: all accelerators, or 4 CPU devices")
# The number of steps of an epoch of `fit`.
FIT_STEPS = {"small": 1000, "tabular": 1000, "cnn": 100, "transformer": 20, "large": 10, "wide": 40}
options.add_argument(
    "--case",
    choices=[
        "small",
        "tabular",
        "mlp",
        "deep",
        "cnn",
        "transformer",
        "large",
        "wide",
        "fit",
        "weights",
        *(f"fit-{name}" for name in FIT_STEPS),
    ],
    help="run only this case",
)
args = options.parse_args()
jax.config.update("jax_num_cpu_devices", args.devices or 4)

import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec
from models import CASES, packed_mean, train_step

import jdist
from jdist._src.training.steps import TrainCarry

DEVICES = jax.devices()[: args.devices or None]
ON_CPU = DEVICES[0].platform == "cpu"
MESH = sidebyside.mesh_of(DEVICES)
ROWS, WHOLE = NamedSharding(MESH, PartitionSpec("replica")), NamedSharding(MESH, PartitionSpec())


PER_CALL = {"small": 10, "mlp": 10, "deep": 10, "cnn": 10}  # cases with a row for several steps per call
ROUNDS = args.rounds or (3 if args.quick else 31)
OF_EXAMPLES = optax.softmax_cross_entropy_with_integer_labels


def candidates(model, optimizer, batch, per_call):
    params = model.init(jax.random.key(0), batch[0][:1])
    state = (params, optimizer.init(params))
    whole = lambda: jax.device_put(jax.tree.map(jnp.copy, state), WHOLE)
    make = lambda mean: functools.partial(train_step, model, optimizer, mean)
    ours = make(functools.partial(jdist.all_reduce, "mean"))
    strategy = jdist.MirroredStrategy(DEVICES)
    (split,) = strategy.distribute_dataset(batch, len(batch[1]))
    specs = {"in_specs": (PartitionSpec(), PartitionSpec("replica")), "out_specs": PartitionSpec()}
    over_mesh = lambda mean: jax.jit(jax.shard_map(make(mean), mesh=MESH, **specs, check_vma=False), donate_argnums=0)
    placed = jax.device_put(batch, ROWS)
    loops = {
        "jdist": Loop(strategy.step(ours), strategy.put(state), split),
        "shard_map": Loop(over_mesh(lambda tree: lax.pmean(tree, "replica")), whole(), placed),
        "jit": Loop(jax.jit(make(lambda tree: tree), donate_argnums=0), whole(), placed),
        "alone": Loop(over_mesh(lambda tree: tree), whole(), placed),
    }
    if per_call > 1:
        several = strategy.step(ours, steps_per_call=per_call)
        often = [np.concatenate([part] * per_call) for part in batch]
        batches = list(strategy.distribute_dataset(tuple(often), len(batch[1])))
        loops["several"] = Loop(several, strategy.put(state), batches, per_call)
        scanned = jax.jit(
            jax.shard_map(
                lambda state, batches: lax.scan(make(packed_mean), state, batches),
                mesh=MESH,
                in_specs=(PartitionSpec(), PartitionSpec(None, "replica")),
                out_specs=PartitionSpec(),
                check_vma=False,
            ),
            donate_argnums=0,
        )
        stacked = jax.device_put(
            jax.tree.map(lambda x: np.stack([x] * per_call), batch), NamedSharding(MESH, PartitionSpec(None, "replica"))
        )
        loops["scan"] = Loop(scanned, whole(), stacked, per_call)
    return loops


class Loop:
    """Runs steps sequentially; the state continues from call to call."""

    def __init__(self, step, state, batch, per_call=1):
        self.step, self.state, self.batch, self.per_call = step, state, batch, per_call

    def losses(self, steps):
        losses = []
        for _ in range(steps // self.per_call):
            self.state, loss = self.step(self.state, self.batch)
            if ON_CPU:
                loss.block_until_ready()
            losses.append(loss)
        jax.block_until_ready(self.state)
        return losses


def compare(name, steps, model, optimizer, batch):
    """Runs a case: rows with one step per call, and rows with several."""
    per_call = PER_CALL.get(name, 1)
    loops = candidates(model, optimizer, batch, per_call)
    first, *others = (np.hstack(one.losses(max(5, per_call))) for peer, one in loops.items() if peer != "alone")
    for other in others:
        np.testing.assert_allclose(first, other, rtol=1e-4)
    timed = {
        peer: functools.partial(sidebyside.seconds, functools.partial(one.losses, steps)) for peer, one in loops.items()
    }
    taken = sidebyside.rounds(timed, ROUNDS)
    several, scan = taken.pop("several", None), taken.pop("scan", None)
    sidebyside.report(f"{name}, {len(DEVICES)} devices", taken, args.json, steps)
    if several:
        taken = {"jdist": several, "scan": scan, "shard_map": taken["shard_map"], "jit": taken["jit"]}
        sidebyside.report(f"{name}, {per_call} steps per call", taken, args.json, steps)


def written_step(model, optimizer):
    """Returns a step of one replica as users write it, with and without weights."""

    def written(state, batch, weights=None):
        loss_fn = lambda params, x, y: OF_EXAMPLES(model.apply({"params": params}, x), y)
        loss, grads = jdist.value_and_grad(loss_fn, weights=weights)(state.params, *batch)
        loss, grads = jdist.all_reduce("mean", (loss, grads))
        updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        return dataclasses.replace(state, step=state.step + 1, params=params, opt_state=opt_state), loss

    return written


def compare_weights(name, steps, model, optimizer, batch):
    """Times a written step with weights, which are 1, against the same step without."""
    strategy = jdist.MirroredStrategy(DEVICES)
    trainer = jdist.Trainer(model, optimizer, OF_EXAMPLES, strategy=strategy)
    ((rows, weights),) = strategy.distribute_dataset(batch, len(batch[1]), remainder="pad")
    step = strategy.step(written_step(model, optimizer))
    loops = {
        "jdist": Loop(lambda state, batch: step(state, batch, weights), trainer.init(batch[0]), rows),
        "without weights": Loop(step, trainer.init(batch[0]), rows),
    }
    first, other = (loop.losses(3) for loop in loops.values())
    np.testing.assert_allclose(first, other, rtol=1e-4)
    timed = {
        peer: functools.partial(sidebyside.seconds, functools.partial(loop.losses, steps))
        for peer, loop in loops.items()
    }
    sidebyside.report(f"weights, {name}, {len(DEVICES)} devices", sidebyside.rounds(timed, ROUNDS), args.json, steps)


def compare_fit(name, steps, model, optimizer, batch):
    """Times an epoch of `fit` with its defaults against loops over the same examples."""
    x, y = (np.concatenate([part] * steps) for part in batch)
    strategy = jdist.MirroredStrategy(DEVICES)
    dataset, without_weights = (
        strategy.distribute_dataset((x, y), len(batch[1]), shuffle=True, remainder=remainder)
        for remainder in ("pad", "drop")
    )
    trainer = jdist.Trainer(model, optimizer, OF_EXAMPLES, strategy=strategy)
    written = strategy.step(written_step(model, optimizer))

    def loop(step, carry):
        for batch, weights in dataset:
            carry, outcome = step(carry, batch, weights)
        jax.block_until_ready(carry)
        return np.ravel(outcome)[0]

    def plain_loop(state):
        for batch in without_weights:
            state, loss = written(state, batch)
        jax.block_until_ready(state)
        return np.asarray(loss)

    same, empty_metrics = strategy.step(trainer._functions.train), trainer._functions.empty_metrics
    carried = lambda state: TrainCarry(state, strategy.init(empty_metrics), strategy.put(np.bool_(False)))

    def fit(state):
        with contextlib.redirect_stdout(io.StringIO()):  # the progress display of a run that writes to a file
            return trainer.fit(dataset, state=state).history.losses[steps]

    epochs = {
        "jdist": fit,
        "plain loop": plain_loop,
        "same step": lambda state: loop(same, carried(state)),
        "with weights": lambda state: loop(written, state),
    }
    first, *others = (epoch(trainer.init(x)) for epoch in epochs.values())
    for other in others:
        np.testing.assert_allclose(first, other, rtol=1e-2)

    def measured(epoch):
        state = jax.block_until_ready(trainer.init(x))
        return sidebyside.seconds(lambda: epoch(state))

    timed = {peer: functools.partial(measured, epoch) for peer, epoch in epochs.items()}
    taken = sidebyside.rounds(timed, ROUNDS)
    sidebyside.report(f"fit, {name}, {len(DEVICES)} devices", taken, args.json, steps)


def main():
    sidebyside.versions(args.json)
    for name, case in CASES.items():
        if args.case in (None, name):
            compare(name, *case)
    for name in ("wide", "transformer", "cnn"):
        if args.case in (None, "weights"):
            compare_weights(name, *CASES[name])
    for name, steps in FIT_STEPS.items():
        if args.case in (None, "fit", f"fit-{name}"):
            compare_fit(name, steps // 5 if args.quick else steps, *CASES[name][1:])


if __name__ == "__main__":
    main()
