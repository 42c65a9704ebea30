"""Figures of programs over time: steps, updates, batches, restarts."""

import itertools

import jax
import numpy as np
import optax
from drawing import BLUE, GREEN, GREY, ORANGE, PURPLE, RED, Drawing

import jdist
from jdist._src.profiling.intervals import difference, union

LEFT = 14


def life_of_a_step() -> str:
    """Returns an SVG: the stages of the first call of a step, and of later calls."""
    d = Drawing()
    stages = [
        ("trace", BLUE, "once, for\none replica:\na jaxpr"),
        ("prove", GREEN, "the new state\nis replicated?"),
        ("compile", PURPLE, "shard_map over\nthe mesh; XLA"),
        ("run", ORANGE, "on all devices,\nasynchronously"),
    ]
    d.text(LEFT, 28, "first call", bold=True)
    width, gap = 136, 28
    for number, (name, color, detail) in enumerate(stages):
        x = LEFT + number * (width + gap)
        d.box(x, 40, width, 100, name, color, detail=detail, bold=True)
        if number:
            d.arrow(x - gap + 1, 90, x - 2, 90)
    second, third, last = (LEFT + i * (width + gap) for i in (1, 2, 3))
    d.arrow(second + width / 2, 141, second + width / 2, 172)
    d.box(LEFT, 174, 300, 52, "NotMirroredError", RED, detail="the leaf, its cause, the line, the fix")
    d.arrow(third + width / 2, 141, third + width / 2, 172)
    d.box(LEFT + 328, 174, 300, 52, "NotEquivalentWarning", RED, detail="not the result of one device")
    d.text(LEFT, 268, "later calls", bold=True)
    d.box(LEFT, 280, width, 40, "state, batch", GREY)
    d.arrow(LEFT + width + 1, 300, last - 2, 300)
    d.note(LEFT + width + 20, 292, "one call of the compiled program")
    d.box(last, 280, width, 40, "run", ORANGE, bold=True)
    return d.svg()


def life_of_a_push() -> str:
    """Returns an SVG: the updates of three workers of different speed, in versions of the state, and their staleness."""
    seconds, end_of_time, unit, left = (3, 4.2, 5.4), 13.4, 40, 100
    reads = [(0.0, worker, 0) for worker in range(3)]  # the time, the worker, and the version that it reads
    calls, version = [], 0
    while reads:
        start, worker, read = min(reads, key=lambda call: call[0] + seconds[call[1]])
        reads.remove((start, worker, read))
        end = start + seconds[worker]
        calls.append((worker, start, end, read, version))
        version += 1
        if end + seconds[worker] <= end_of_time:
            reads.append((end, worker, version))
    d = Drawing()
    d.note(left, 24, "a box: read the version, compute gradients, send them")
    for worker, _, end, _, _ in calls:  # before the boxes, which hide a part of them
        d.arrow(left + end * unit - 10, 75 + worker * 52, left + end * unit - 10, 194, color="#b5651d")
    d.box(left, 196, end_of_time * unit, 34, fill=GREEN)
    for worker in range(3):
        d.text(LEFT, 60 + worker * 52, f"worker {worker}", bold=True)
    for worker, start, end, read, applied in calls:
        d.box(left + start * unit, 36 + worker * 52, (end - start) * unit - 4, 38, f"version {read}", BLUE)
        d.text(left + end * unit - 10, 219, f"{applied + 1}", anchor="middle", bold=True)
        d.text(left + end * unit - 10, 254, f"{applied - read}", anchor="middle")
    d.text(LEFT, 219, "servers", bold=True)
    d.text(LEFT, 254, "staleness")
    d.note(LEFT, 286, "servers: the version after each update. Staleness: the updates of other workers since the read.")
    return d.svg()


def life_of_a_batch() -> str:
    """Returns an SVG: 12 examples that are shuffled, divided into batches of 4, prefetched and split over 2 replicas."""
    strategy = jdist.MirroredStrategy(jax.local_devices()[:2])
    dataset = strategy.distribute_dataset(np.arange(12), batch_size=4, shuffle=True, seed=3)
    batches = [[np.asarray(part).tolist() for part in batch.values] for batch in dataset]
    d, unit = Drawing(), 36

    def cells(x: float, y: float, numbers: list[int]) -> None:
        for place, number in enumerate(numbers):
            d.box(x + place * unit, y, unit, 30, str(number), (BLUE, ORANGE, PURPLE)[order.index(number) // 4])

    order = list(itertools.chain.from_iterable(itertools.chain.from_iterable(batches)))
    left = 170
    d.text(LEFT, 36, "source", bold=True)
    cells(left, 16, list(range(12)))
    d.text(LEFT, 90, "shuffled", bold=True)
    d.note(LEFT, 109, "seed, epoch")
    cells(left, 70, order)
    d.arrow(left + 6 * unit, 48, left + 6 * unit, 68)
    d.text(LEFT, 158, "prefetched", bold=True)
    d.note(LEFT, 177, "two batches ahead")
    for number, batch in enumerate(batches):
        x = left + number * (4 * unit + 14)
        d.arrow(left + (4 * number + 2) * unit, 102, x + 2 * unit, 132)
        cells(x, 134, batch[0] + batch[1])
        d.note(x, 184, f"batch {number}")
    d.text(LEFT, 232, "on the devices", bold=True)
    for replica, part in enumerate(batches[0]):
        x = left + replica * 190
        d.frame(x, 210, 170, 76, f"replica {replica}")
        cells(x + 10, 242, part)
        d.arrow(left + (1 + 2 * replica) * unit, 190, x + 46, 208)
    d.note(left, 312, "While the step computes batch 0, the next two are read and transferred.")
    return d.svg()


def restart() -> str:
    """Returns an SVG: two processes, a failure at step 7, and the restart from the checkpoint of step 4."""
    d, unit, left = Drawing(), 34, 104
    fails, saved, every = 7, 4, 4
    second = left + fails * unit + 56
    for process in range(2):
        y = 44 + process * 46
        d.text(LEFT, y + 20, f"process {process}", bold=True)
        for step in range(1, fails + 1):
            is_lost = step == fails and process == 1
            color = RED if is_lost else GREY if step == fails else BLUE
            text = "×" if is_lost else "" if step == fails else str(step)
            d.box(left + (step - 1) * unit, y, unit - 3, 30, text, color)
        for place, step in enumerate(range(saved + 1, saved + 6)):
            d.box(second + place * unit, y, unit - 3, 30, str(step), BLUE)
    d.text(left, 30, "attempt 0", bold=True)
    d.text(second, 30, "attempt 1", bold=True)
    d.text(LEFT, 166, "checkpoint", bold=True)
    for x, step in ((left + saved * unit, saved), (second + (2 * every - saved) * unit, 2 * every)):
        d.line(x - 2, 38, x - 2, 146)
        d.box(x - 34, 148, 64, 30, f"step {step}", GREEN)
    d.arrow(left + saved * unit + 32, 163, second - 8, 163)
    d.arrow(second - 8, 163, second + 10, 124)
    d.box(left + fails * unit + 2, 44, 46, 76, "end\nall", RED)
    d.note(LEFT, 208, "The launcher ends the other process and starts both again. The steps after the")
    d.note(LEFT, 227, "checkpoint are repeated with the same examples: the result is bitwise equal.")
    return d.svg()


def local_updates() -> str:
    """Returns an SVG: the communication of 8 steps with an all-reduce in each step, every 4 steps, and overlapped."""
    d, step, left = Drawing(), 44, 14
    every = 4

    def steps(y: float, first: float, numbers: range, width: float) -> float:
        for number in numbers:
            d.box(first, y, width, 30, str(number), BLUE)
            first += width
        return first

    d.text(left, 30, "sync.mean(): gradients, in every step", bold=True)
    x = left
    for number in range(1, 9):
        d.box(x, 40, step, 30, str(number), BLUE)
        d.box(x + step, 40, 30, 30, fill=ORANGE)
        x += step + 30
    d.text(left, 108, f"sync.local_sgd(optimizer, every={every}): parameters, every {every} steps", bold=True)
    x = left
    for start in (1, 1 + every):
        x = steps(118, x, range(start, start + every), step)
        d.box(x, 118, 30, 30, fill=ORANGE)
        x += 30
    d.text(left, 186, f"sync.streaming_diloco(optimizer, every={every}, fragments=2): overlapped", bold=True)
    x = left
    steps(196, x, range(1, 9), step)
    for index, fragment in itertools.product(range(1, 8), range(2)):
        if (index - fragment * every // 2) % every == 0:
            d.box(left + index * step, 230, step, 22, f"{fragment}", ORANGE)
    d.box(left, 272, 22, 16, fill=BLUE)
    d.text(left + 30, 285, "a step on each replica")
    d.box(left + 220, 272, 22, 16, fill=ORANGE)
    d.text(left + 250, 285, "an all-reduce; of fragment 0 or 1")
    return d.svg()


def callback_moments() -> str:
    """Returns an SVG: the events that a callback receives in a `fit` of 2 epochs of 3 steps, from a run."""
    moments = []
    model = (lambda key, x: {"w": x[0] * 0.0}, lambda params, x: x * params["w"])
    strategy = jdist.MirroredStrategy(jax.local_devices()[:2])
    trainer = jdist.Trainer(model, optax.sgd(0.1), optax.squared_error, strategy=strategy)
    x = np.ones(12, np.float32)
    trainer.fit(
        (x, x),
        batch_size=4,
        epochs=2,
        validation_data=(x, x),
        validate_every=2,
        callbacks=[lambda event: moments.append((str(event.moment), event.step))],
        progress="off",
    )
    d, at, y = Drawing(), LEFT, 40
    colors = {"start": GREY, "step": BLUE, "validation": PURPLE, "epoch": GREEN, "end": GREY}
    widths = {"start": 56, "step": 50, "validation": 92, "epoch": 62, "end": 50}
    for moment, step in moments:
        name = moment.rpartition(".")[2].lower()
        d.box(at, y, widths[name], 34, name, colors[name])
        d.note(at + widths[name] / 2, y + 54, f"{step}", anchor="middle")
        at += widths[name] + 6
        if name == "epoch" and y == 40:
            at, y = LEFT, y + 76
    d.text(LEFT, 26, "events of fit(epochs=2, validate_every=2), 3 steps per epoch", bold=True)
    d.note(LEFT, y + 84, "below: event.step, the number of steps so far")
    return d.svg()


def profile_parts() -> str:
    """Returns an SVG: what a device and its host do, and how a profile divides the time."""
    within = (0, 100)
    busy = {
        "compute": [(12, 34), (38, 52), (64, 82)],
        "collectives": [(28, 38), (52, 58), (78, 88)],
        "compile": [],
        "waits for input": [(0, 10), (56, 64)],
    }
    compute, collectives = union(busy["compute"], within), union(busy["collectives"], within)
    exposed = difference(collectives, compute)
    idle = difference(difference([within], compute), collectives)
    waits = union(busy["waits for input"], within)
    host = difference(idle, waits)
    inputs = difference(idle, host)
    d, left, unit = Drawing(), 150, 4.9
    colors = {"compute": BLUE, "collectives": ORANGE, "waits for input": RED}
    y = 34
    d.text(LEFT, 22, "a trace", bold=True)
    for name, color in colors.items():
        d.text(LEFT, y + 21, name)
        for start, end in busy[name]:
            d.box(left + start * unit, y, (end - start) * unit, 30, fill=color)
        y += 38
    d.text(LEFT, y + 24, "the parts", bold=True)
    y += 34
    for parts, color in ((compute, BLUE), (exposed, ORANGE), (inputs, RED), (host, GREY)):
        for start, end in parts:
            d.box(left + start * unit, y, (end - start) * unit, 34, fill=color)
    y += 56
    shares = {"compute": compute, "exposed_collectives": exposed, "input": inputs, "host": host}
    x = LEFT
    for (name, parts), color in zip(shares.items(), (BLUE, ORANGE, RED, GREY), strict=True):
        share = sum(end - start for start, end in parts)
        d.box(x, y, 22, 16, fill=color)
        d.text(x + 28, y + 13, f"{name} {share}%")
        x += 146 if name != "exposed_collectives" else 216
    return d.svg()


def elastic() -> str:
    """Returns an SVG: the examples of a global batch of 12 per process: with 4 processes, with 3, and with 4 again."""
    d, unit, left = Drawing(), 42, 130
    y = 16
    for title, note, count, lost in (
        ("4 processes", "steps 1 to 40", 4, None),
        ("one fails", "step 41", 4, 2),
        ("3 processes", "steps 41 to 60", 3, None),
        ("4 processes", "steps 61 to ...", 4, None),
    ):
        d.text(LEFT, y + 20, title, bold=True)
        d.note(LEFT, y + 40, note)
        share = 12 // count
        for process in range(count):
            x = left + process * share * unit
            text = "lost" if process == lost else f"{process * share} to {process * share + share - 1}"
            d.box(x, y, share * unit - 5, 40, text, RED if process == lost else GREY if lost else BLUE)
        y += 62
    d.box(left, y - 4, 12 * unit - 5, 30, "a global batch always has the same 12 examples", GREEN)
    d.note(LEFT, y + 50, "Each change is a restart from the newest checkpoint.")
    return d.svg()


def asynchronous_dispatch() -> str:
    """Returns an SVG: the host and a device over time, with a read of the loss in every step and with one at the end."""
    d, left, prepare, step = Drawing(), 90, 40, 84

    def row(y: float, bars: list[tuple[float, float, str, str]]) -> None:
        for start, length, text, color in bars:
            d.box(left + start, y, length - 3, 30, text, color)

    d.text(LEFT, 28, "float(loss) in every step: the device waits for the host", bold=True)
    at, host, device = 0.0, [], []
    for number in range(1, 5):
        host += [(at, prepare, "", BLUE), (at + prepare, step, "waits", GREY)]
        device.append((at + prepare, step, f"step {number}", ORANGE))
        at += prepare + step
    for name, bars, y in (("host", host, 40), ("device", device, 76)):
        d.text(LEFT, y + 20, name)
        row(y, bars)
    d.text(LEFT, 144, "losses read at the end of the epoch: the device always computes", bold=True)
    host = [((number - 1) * prepare, prepare, str(number), BLUE) for number in range(1, 5)]
    host.append((4 * prepare, 4 * step - 3 * prepare, "waits", GREY))
    device = [(prepare + (number - 1) * step, step, f"step {number}", ORANGE) for number in range(1, 5)]
    for name, bars, y in (("host", host, 156), ("device", device, 192)):
        d.text(LEFT, y + 20, name)
        row(y, bars)
    d.box(left, 240, 22, 16, fill=BLUE)
    d.text(left + 30, 253, "prepares and dispatches a step")
    return d.svg()
