"""Trains one model under every synchronization policy, and compares the communication and the loss of the policies.

    python examples/policies.py                         # all policies, 4 CPU devices
    python examples/policies.py --policy mean int8 --plot policies.png

A policy is one argument: the step below is the same function for all of them. The model predicts the next character of
the reference documentation in the standard library, `pydoc_data.topics`. The bytes are counted in the compiled programs
(`jdist.hlo`).
"""

import argparse
import itertools
import json
import math
import pathlib
import time
from pydoc_data.topics import topics
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from rich.console import Console
from rich.table import Column, Table

import jdist
from jdist import hlo, sync

WINDOW = 64  # characters per example
VIRTUAL_REPLICAS = 8


class CharacterModel(nn.Module):
    """Two causal convolutions with a receptive field of 16 characters: `[batch, time]` to `[batch, time, characters]`."""

    characters: int

    @nn.compact
    def __call__(self, codes: jax.Array) -> jax.Array:
        """Returns the logits of each next character."""
        x = nn.Embed(self.characters, 64)(codes)
        x = nn.relu(nn.Dense(128)(with_past(x, 1)))
        x = x + nn.relu(nn.Dense(128)(with_past(x, 4)))
        return nn.Dense(self.characters)(x)


def with_past(x: jax.Array, apart: int) -> jax.Array:
    """Concatenates each position with three earlier ones, `apart` positions apart: `[batch, time, n]` to `[batch, time, 4 n]`.

    Followed by a matrix product this is a convolution, and as fast inside the loop that `exact` runs on CPU.
    """
    time = x.shape[1]
    padded = jnp.pad(x, ((0, 0), (3 * apart, 0), (0, 0)))
    return jnp.concatenate([padded[:, i * apart : i * apart + time] for i in range(4)], axis=-1)


class Setting(NamedTuple):
    """A policy and its settings.

    Attributes:
        tx: The policy, with the optimizer.
        period: The number of steps between two runs of a conditional collective.
        strategy: Arguments of `MirroredStrategy` that the policy needs.
    """

    tx: optax.GradientTransformation
    period: int = 1
    strategy: dict[str, Any] = {}


class Result(NamedTuple):
    """The held-out loss of a policy; per step and replica, the bytes sent and the collectives; milliseconds per step."""

    loss: float
    sent: float
    collectives: float
    milliseconds: float


def make_settings(steps: int) -> dict[str, Setting]:
    def adamw(rate=2e-2, updates=steps):
        return optax.adamw(optax.cosine_decay_schedule(rate, updates))

    # DiLoCo's outer optimizer amplifies the pseudo-gradients, so the learning rate of the replicas is smaller.
    slower = adamw(5e-3)
    groups = {"cross_device_ops": jdist.HierarchicalAllReduce(group_size=2)}
    return {
        "mean": Setting(optax.chain(sync.mean(), adamw())),
        "in_dtype(bfloat16)": Setting(optax.chain(sync.in_dtype(jnp.bfloat16), adamw())),
        "in_dtype(float16)": Setting(optax.chain(sync.in_dtype(jnp.float16), adamw())),
        "hierarchical": Setting(optax.chain(sync.hierarchical("replica", "group"), adamw()), strategy=groups),
        "exact": Setting(optax.chain(sync.exact(), adamw()), strategy={"virtual_replicas": VIRTUAL_REPLICAS}),
        "skip_nonfinite": Setting(sync.skip_nonfinite(optax.chain(sync.mean(), adamw()))),
        "int8": Setting(optax.chain(sync.int8(), adamw())),
        "int8(stochastic)": Setting(optax.chain(sync.int8(rounding="stochastic"), adamw())),
        "top_k(0.1)": Setting(optax.chain(sync.top_k(0.1), adamw())),
        "power_sgd(16)": Setting(optax.chain(sync.power_sgd(rank=16), adamw())),
        "every(4)": Setting(sync.every(optax.chain(sync.mean(), adamw(updates=max(steps // 4, 1))), 4), period=4),
        "local_sgd(8)": Setting(sync.local_sgd(adamw(), every=8), period=8),
        "diloco(16)": Setting(sync.diloco(slower, every=16), period=16),
        "diloco(16, int8)": Setting(sync.diloco(slower, every=16, reduction=sync.int8()), period=16),
        "streaming_diloco(16)": Setting(sync.streaming_diloco(slower, every=16, fragments=4), period=16),
    }


POLICIES = tuple(make_settings(1))


@jdist.step(static_argnames=("model", "tx"))
def train_step(state, windows, *, model: nn.Module, tx: optax.GradientTransformation):
    """The training step of one replica, which is the same for every policy."""
    loss, grads = jax.value_and_grad(mean_loss)(state["params"], model, windows)
    updates, opt_state = tx.update(grads, state["opt_state"], state["params"])
    return {"params": optax.apply_updates(state["params"], updates), "opt_state": opt_state}, loss


def losses(params, model, windows):
    """Returns the loss of each character, `[batch, time]`."""
    logits = model.apply({"params": params}, windows[:, :-1])
    return optax.softmax_cross_entropy_with_integer_labels(logits, windows[:, 1:])


def mean_loss(params, model, windows):
    return losses(params, model, windows).mean()


def evaluate(strategy, model, params, data, batch_size):
    """Returns the mean loss of all windows of `data`."""

    def total(params, windows, weights):
        each = losses(params, model, windows).mean(axis=1)
        return jdist.all_reduce("sum", jnp.sum(weights * each))

    batches = strategy.distribute_dataset(data, batch_size, remainder="pad")
    return sum(float(strategy.run(total, (params, *batch))) for batch in batches) / len(data)


def train(setting: Setting, model: nn.Module, train_data: np.ndarray, test_data: np.ndarray, args: Any) -> Result:
    strategy = jdist.MirroredStrategy(jax.devices()[: args.replicas], **setting.strategy)

    def make_state(key):
        params = model.init(key, jnp.zeros((1, WINDOW), jnp.int32))["params"]
        return {"params": params, "opt_state": setting.tx.init(params)}

    state = strategy.init(make_state, jax.random.key(args.seed))
    program = train_step.on(strategy, model=model, tx=setting.tx)
    batches = strategy.distribute_dataset(train_data, args.batch_size, shuffle=True, seed=args.seed, epochs=None)
    batches = itertools.islice(batches, args.steps)
    first = next(batches)
    sent = hlo.collectives(program.lower(state, first).compile())
    state, loss = program(state, first)
    jax.block_until_ready(loss)
    start = time.perf_counter()
    for batch in batches:
        state, loss = program(state, batch)
    jax.block_until_ready(loss)
    seconds = time.perf_counter() - start

    # `executions` is None in a loop of unknown length; no policy has a collective in such a loop.
    runs = [one.executions / (setting.period if one.conditional else 1) for one in sent]
    return Result(
        loss=evaluate(strategy, model, jdist.read_values(state["params"]), test_data, args.batch_size),
        sent=math.fsum(run * one.bytes_sent for run, one in zip(runs, sent, strict=True)),
        collectives=math.fsum(runs),
        milliseconds=1e3 * seconds / max(args.steps - 1, 1),
    )


def make_data() -> tuple[np.ndarray, np.ndarray, int, int]:
    """Returns training windows, held-out windows (the last tenth), the length of the text, and the number of characters."""
    text = np.array(list("".join(topics[name] for name in sorted(topics))))
    characters, codes = np.unique(text, return_inverse=True)

    def windows(part):  # one character longer than the input: the last one is predicted
        starts = range(0, len(part) - WINDOW, WINDOW)
        return np.stack([part[start : start + WINDOW + 1] for start in starts]).astype(np.int32)

    cut = len(codes) * 9 // 10
    return windows(codes[:cut]), windows(codes[cut:]), len(codes), len(characters)


def human(size: float) -> str:
    return f"{size / 1e3:,.1f} kB"


def make_table(results: dict[str, Result]) -> Table:
    title = "Held-out loss; bytes that a replica sends per step, and in how many collectives; milliseconds per step"
    table = Table(Column("Policy", no_wrap=True), caption=title, caption_justify="left")
    for heading in ("Loss", "vs. mean", "Sent", "Collectives", "ms"):
        table.add_column(heading, justify="right", no_wrap=True)
    for name, one in results.items():
        relative = f"{one.loss / results['mean'].loss - 1:+.1%}" if "mean" in results else ""
        row = f"{one.loss:.4f}", relative, human(one.sent), f"{one.collectives:.2f}", f"{one.milliseconds:.1f}"
        table.add_row(name, *row)
    return table


def pyplot():
    try:
        import matplotlib
    except ModuleNotFoundError:
        raise SystemExit('The figure needs matplotlib: python -m pip install -e ".[plot]"') from None
    matplotlib.use("Agg")
    matplotlib.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "policies"})  # text stays text
    from matplotlib import pyplot

    return pyplot


KINDS = {  # by the prefix of the name
    "every gradient, every step": ("mean", "hierarchical", "exact", "skip"),
    "compressed gradients": ("in_dtype", "int8", "top_k", "power_sgd"),
    "fewer synchronization steps": ("every", "local", "diloco", "streaming"),
}


def draw(results: dict[str, Result], title: str, path: str) -> None:
    """Draws the loss against the bytes, with the name of each policy."""
    plt = pyplot()
    figure, axes = plt.subplots(figsize=(9, 5.6), dpi=160, layout="constrained")
    for (kind, prefixes), color in zip(KINDS.items(), ("#4c566a", "#1f77b4", "#d1632a"), strict=True):
        points = [(one.sent / 1e3, one.loss) for name, one in results.items() if name.startswith(prefixes)]
        if points:
            axes.scatter(*zip(*points, strict=True), s=46, color=color, edgecolors="white", label=kind, zorder=3)
    axes.set_xscale("log")
    axes.margins(x=0.22, y=0.18)
    axes.set_xlabel("bytes sent per step and replica, kB (log scale)")
    axes.set_ylabel("held-out loss, nats per character")
    axes.set_title(title, loc="left", fontsize=11)
    axes.grid(True, which="major", color="#e5e9f0", zorder=0)
    axes.spines[["top", "right"]].set_visible(False)
    axes.xaxis.set_major_formatter(lambda x, _: f"{x:g}")
    axes.legend(frameon=False, loc="lower left", fontsize=9)
    figure.canvas.draw()
    label(axes, {name: (one.sent / 1e3, one.loss) for name, one in results.items()})
    points = {name: (round(one.sent / 1e3, 1), round(one.loss, 4)) for name, one in results.items()}
    is_svg = pathlib.Path(path).suffix == ".svg"
    figure.savefig(path, metadata={"Date": None, "Description": json.dumps(points)} if is_svg else None)


def label(axes: Any, points: dict[str, tuple[float, float]]) -> None:
    """Labels each point, as close as possible without covering points or other labels. Points in one place share a label."""
    figure = axes.figure
    figure.canvas.draw()
    figure.set_layout_engine("none")  # the layout is fixed from here
    axes.autoscale(False)
    pixel = figure.dpi / 72
    together: dict[tuple[float, float], list[str]] = {}
    for name, point in points.items():
        spot = tuple(axes.transData.transform(point))
        near = next((other for other in together if math.dist(spot, other) < 4 * pixel), spot)
        together.setdefault(near, []).append(name)
    spots, taken = np.array([*together]), [axes.get_legend().get_window_extent()]
    size = figure.bbox.size
    for spot, names in zip(spots, together.values(), strict=True):
        # As fractions: the pixels of an SVG file have another size.
        options: Any = {"xycoords": "figure fraction", "fontsize": 8, "ha": "center", "va": "center"}
        text = axes.annotate("\n".join(names), spot / size, **options)
        extent = text.get_window_extent()
        half = np.array([extent.width, extent.height]) / 2
        for distance, turn in itertools.product(range(8, 120, 4), np.linspace(0, 2 * np.pi, 24, endpoint=False)):
            way = np.array([math.cos(turn), math.sin(turn)])
            middle = spot + way * (distance * pixel + half)
            box = extent.translated(*(middle - spot))
            covers = any(box.overlaps(other) for other in taken) or box.padded(6 * pixel).count_contains(spots)
            if not covers and axes.bbox.contains(*box.min) and axes.bbox.contains(*box.max):
                break
        text.set_position(middle / size)
        taken.append(box)
        if distance > 16:
            ends = axes.transData.inverted().transform([spot, spot + way * distance * pixel])
            axes.plot(*ends.T, color="#9aa5b8", linewidth=0.7, zorder=1)


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--policy", nargs="+", choices=POLICIES, default=POLICIES, metavar="NAME", help="default: all")
    parser.add_argument("--replicas", type=int, default=4, help="number of devices (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=512, help="training steps per policy (default: %(default)s)")
    parser.add_argument("--batch-size", type=int, default=32, help="global batch size (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of weights and shuffling (default: %(default)s)")
    parser.add_argument("--plot", metavar="FILE.png", help="draws the loss against the bytes, also as FILE.svg")
    parser.add_argument("--json", metavar="FILE.json", help="writes the table")
    args = parser.parse_args()
    jdist.use_cpu_devices(args.replicas)  # before JAX starts; no effect on accelerators
    # The settings of `exact` and `hierarchical` need these; checked here, before other policies train for minutes.
    if "hierarchical" in args.policy and args.replicas % 2:
        parser.error(f"--replicas must be even for `hierarchical`, which has groups of 2, got {args.replicas}")
    if "exact" in args.policy and args.batch_size % VIRTUAL_REPLICAS:
        parser.error(f"--batch-size must be a multiple of {VIRTUAL_REPLICAS} for `exact`, got {args.batch_size}")
    return args


def main():
    args = parse_arguments()
    if args.plot:
        pyplot()  # reports a missing matplotlib now, not after minutes
    console = Console(highlight=False, soft_wrap=True)
    train_data, test_data, length, characters = make_data()
    if args.batch_size > len(train_data):
        raise SystemExit(
            f"--batch-size must be at most {len(train_data)}, the number of training windows, got {args.batch_size}"
        )
    train_data = train_data[: len(train_data) // args.batch_size * args.batch_size]
    device = jax.devices()[0]
    console.print(
        f"{length:,} characters, {characters} distinct characters, {len(train_data):,} training windows of {WINDOW}; "
        f"{args.steps} steps on {args.replicas} replicas on {device.device_kind}"
    )
    model, settings, results = CharacterModel(characters), make_settings(args.steps), {}
    for name in args.policy:
        with console.status(f"Training under {name}"):
            start = time.perf_counter()
            results[name] = train(settings[name], model, train_data, test_data, args)
        seconds = time.perf_counter() - start
        console.print(f"{len(results)}/{len(args.policy)} {name}: loss {results[name].loss:.4f}, {seconds:.0f} s")
    console.print(make_table(results))
    if device.platform == "cpu":
        console.print(
            "On CPU, XLA may reduce in a wider dtype than requested, and sends that dtype: bfloat16 becomes float32."
        )
    if args.json:
        rows = {name: one._asdict() for name, one in results.items()}
        pathlib.Path(args.json).write_text(json.dumps(rows, indent=1) + "\n")
    if args.plot:
        draw(results, f"Communication and loss of policies: {args.steps} steps, {args.replicas} replicas", args.plot)
        console.print(f"Drawn to {args.plot}")


if __name__ == "__main__":
    main()
