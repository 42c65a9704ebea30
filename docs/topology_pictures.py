"""Figures of strategies: which devices compute, and which of them hold the state."""

import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
from drawing import BLUE, GREEN, GREY, ORANGE, PURPLE, RED, Drawing
from jax.sharding import Mesh

import jdist

REPLICAS = 4
WIDTH, GAP, LEFT = 148, 12, 14
FULL = REPLICAS * (WIDTH + GAP) - GAP


def _columns() -> list[int]:
    return [LEFT + i * (WIDTH + GAP) for i in range(REPLICAS)]


def mirrored() -> str:
    """Returns an SVG: a step of `MirroredStrategy` with a batch of 8 examples on 4 devices."""
    strategy = jdist.MirroredStrategy(jax.local_devices()[:REPLICAS])
    batch = strategy.split(np.arange(2 * REPLICAS))
    d = Drawing()
    d.text(LEFT, 28, "global batch", bold=True)
    for number, x in enumerate(_columns()):
        examples = np.asarray(batch.values[number])
        width = WIDTH / len(examples)
        for place, example in enumerate(examples):
            d.box(x + place * width, 38, width, 30, str(example), BLUE)
        d.arrow(x + WIDTH / 2, 70, x + WIDTH / 2, 94)
        d.frame(x, 96, WIDTH, 150, f"replica {number}")
        d.box(x + 10, 126, WIDTH - 20, 32, "parameters", GREEN)
        d.box(x + 10, 164, WIDTH - 20, 32, f"loss of {examples[0]}, {examples[1]}", BLUE)
        d.box(x + 10, 202, WIDTH - 20, 32, "gradients", ORANGE)
        d.arrow(x + WIDTH / 2, 247, x + WIDTH / 2, 270)
        d.arrow(x + WIDTH / 2, 312, x + WIDTH / 2, 334)
        d.box(x + 10, 336, WIDTH - 20, 32, "the same update", GREEN)
    d.box(LEFT, 272, FULL, 38, "all-reduce: the mean of the gradients", ORANGE)
    return d.svg()


def several_workers() -> str:
    """Returns an SVG: two processes with four replicas each, and their connections."""
    d = Drawing()
    width, replica, gap = 310, 66, 8.7
    for process in range(2):
        x = LEFT + process * (width + 24)
        d.frame(x, 14, width, 220, f"process {process}" + (", the chief" if process == 0 else ""))
        d.box(x + 10, 46, width - 20, 32, ["coordinator; writes logs", "connects at the start"][process])
        low = 32 * process
        d.box(x + 10, 92, width - 20, 32, f"reads the examples {low} to {low + 31}", BLUE)
        for i in range(4):
            left = x + 10 + i * (replica + gap)
            d.arrow(left + replica / 2, 125, left + replica / 2, 142)
            d.box(left, 144, replica, 78, f"replica\n{4 * process + i}", GREEN, detail="state")
            d.arrow(left + replica / 2, 223, left + replica / 2, 254, both=True)
    d.arrow(LEFT + width + 33, 62, LEFT + width - 9, 62)
    d.box(LEFT + 10, 256, 2 * width + 4, 38, "all-reduce of the gradients over all 8 replicas", ORANGE)
    d.note(LEFT + 10, 318, "The same program runs in both processes. The global batch has 64 examples.")
    return d.svg()


def parameter_servers() -> str:
    """Returns an SVG: three workers, two servers, and the messages of an update."""
    d = Drawing()
    d.box(LEFT, 14, 628, 36, "host program: step(state, batch) gives each batch to an idle worker", GREY)
    for worker in range(3):
        x = LEFT + worker * 214
        d.arrow(x + 100, 51, x + 100, 76)
        d.box(x, 78, 200, 62, f"worker {worker}", BLUE, detail="forward and backward", bold=True)
        d.arrow(x + 60, 196, x + 60, 142)
        d.arrow(x + 140, 141, x + 140, 196, color="#b5651d")
    d.note(LEFT + 4, 174, "reads")
    d.note(LEFT + 152, 174, "gradients")
    for server in range(2):
        x = LEFT + server * 321
        d.frame(x, 198, 307, 106, f"server {server}")
        for place in range(2):
            name = "abcd"[2 * place + server]
            d.box(x + 10 + place * 147, 228, 140, 32, f"parameter {name}", GREEN)
            d.box(x + 10 + place * 147, 264, 140, 32, "its moments", PURPLE)
    d.note(
        LEFT, 328, "All servers apply the updates in one order. A worker computes with the version that it has read."
    )
    return d.svg()


def central_storage() -> str:
    """Returns an SVG: the state in host memory, and a step of `CentralStorageStrategy`."""
    d = Drawing()
    d.frame(LEFT, 14, FULL, 136, "host memory: the state is stored once", dashed=True)
    for number, x in enumerate(_columns()):
        d.box(x + 10, 44, WIDTH - 20, 44, "parameters", GREEN, detail=f"part {number}")
        d.box(x + 10, 94, WIDTH - 20, 44, "moments", PURPLE, detail=f"part {number}")
        d.arrow(x + 50, 152, x + 50, 186)
        d.arrow(x + 100, 186, x + 100, 152, color="#b5651d")
        d.frame(x, 188, WIDTH, 108, f"replica {number}")
        d.box(x + 10, 218, WIDTH - 20, 32, "copy, for a step", GREEN)
        d.box(x + 10, 256, WIDTH - 20, 32, "gradients", ORANGE)
        d.arrow(x + WIDTH / 2, 297, x + WIDTH / 2, 318, both=True)
    d.box(LEFT, 320, FULL, 36, "all-reduce: the mean of the gradients", ORANGE)
    d.note(LEFT, 380, "Down: parameters. Up: averaged gradients. The update runs where the state is stored.")
    return d.svg()


def who_holds_what() -> str:
    """Returns an SVG: the bytes of parameters and Adam's moments per device, from `strategy.describe`, for 4 strategies."""
    devices = jax.local_devices()[:REPLICAS]
    mesh = Mesh(np.array(devices), ("data",))
    optimizer = optax.adam(1e-3)

    def make() -> dict:
        params = {"w": jnp.zeros((64, 64))}
        return {"params": params, "opt_state": optimizer.init(params)}

    strategies = {
        "MirroredStrategy()": jdist.MirroredStrategy(devices),
        'ShardedStrategy("optimizer")': jdist.ShardedStrategy("optimizer", mesh=mesh),
        'ShardedStrategy("all")': jdist.ShardedStrategy("all", mesh=mesh),
        "CentralStorageStrategy()": jdist.CentralStorageStrategy(devices),
    }
    d = Drawing()
    column, bar, top = 150, 60, 60
    for i in range(REPLICAS):
        d.text(LEFT + i * column, 24, f"device {i}", bold=True)
    for name, strategy in strategies.items():
        leaves = strategy.describe(strategy.init(make)).leaves
        kinds = {kind: [leaf for leaf in leaves if leaf.path.startswith(kind)] for kind in ("params", "opt_state")}
        on_device = {kind: sum(leaf.device_bytes for leaf in part if leaf.bytes > 4) for kind, part in kinds.items()}
        on_host = {kind: sum(leaf.host_bytes for leaf in part if leaf.bytes > 4) for kind, part in kinds.items()}
        total = sum(leaf.bytes for leaf in leaves if leaf.bytes > 4)
        memory = "host memory" if sum(on_host.values()) else "device memory"
        held = on_host if sum(on_host.values()) else on_device
        share = sum(held.values()) / total
        d.text(LEFT, top, name, bold=True)
        d.note(LEFT + 250, top, f"{share:.0%} of the state per device, in {memory}")
        for i in range(REPLICAS):
            x = LEFT + i * column
            d.box(x, top + 10, 138, bar + 8, fill="none", dashed=memory == "host memory")
            left = x + 4
            for kind, color in (("params", GREEN), ("opt_state", PURPLE)):
                # The width is the part of the state; all of it is as wide as the frame.
                width = 130 * held[kind] / total
                d.box(left, top + 14, width, bar, fill=color)
                left += width
        top += bar + 50
    d.box(LEFT, top - 16, 22, 16, fill=GREEN)
    d.text(LEFT + 30, top - 3, "parameters")
    d.box(LEFT + 130, top - 16, 22, 16, fill=PURPLE)
    d.text(LEFT + 160, top - 3, "Adam's moments")
    d.note(LEFT + 300, top - 3, "full width: the complete state")
    return d.svg()


def distributed_values() -> str:
    """Returns an SVG: the arrays of each kind of value on two replicas, and the result of `read()`."""
    strategy = jdist.MirroredStrategy(jax.local_devices()[:2])

    def write(value: object) -> object:
        step = strategy.step(lambda value: (value + 1.0 + jdist.replica_id(), None), equivalence="ignore")
        return step(strategy.put(value))[0]

    rows = [
        ("plain array", strategy.put(np.float32([1, 2])), "replicated: proved in each step"),
        ('Mirrored(x, "mean")', write(jdist.Mirrored(np.float32([0, 1]), "mean")), "writes are averaged"),
        (
            'SyncOnRead(x, "sum")',
            write(jdist.SyncOnRead(np.float32([0, 0]), "sum")),
            "local writes; the sum is read",
        ),
        ("PerReplica(x)", write(jdist.PerReplica(np.float32([4, 6]))), "one value per replica"),
        ("Sharded(x)", strategy.put(jdist.Sharded(np.float32([1, 2, 3, 4]))), "each replica holds a part"),
    ]
    d = Drawing()
    for x, title in ((220, "replica 0"), (348, "replica 1"), (480, "on the host")):
        d.text(x, 28, title, bold=True)
    y = 42
    for name, value, note in rows:
        is_array = isinstance(value, jax.Array)
        parts = [x.data for x in value.addressable_shards] if is_array else value.values
        read = value if is_array else value.read()
        color = {"Sharded(x)": PURPLE, "PerReplica(x)": BLUE}.get(name, ORANGE if "Sync" in name else GREEN)
        d.text(LEFT, y + 22, name, bold=True)
        d.note(LEFT, y + 44, note)
        for x, part in zip((220, 348), parts, strict=True):
            d.box(x, y + 4, 112, 30, _numbers(part), color)
        d.arrow(464, y + 19, 478, y + 19)
        d.box(480, y + 4, 160, 30, _numbers(read), GREY)
        y += 62
    return d.svg()


def _numbers(array: object) -> str:
    return str(np.asarray(array).astype(float).tolist()).replace(".0", "").replace("[[", "[").replace("]]", "]")


def _sharded(devices: int) -> jdist.ShardedStrategy:
    return jdist.ShardedStrategy("all", mesh=Mesh(np.array(jax.local_devices()[:devices]), ("data",)))


def resharding() -> str:
    """Returns an SVG: a checkpoint of an array of 16 rows, saved from 8 devices and restored on 4 devices and on one."""
    strategies = [
        ("saved by 8 devices", _sharded(8)),
        ("restored on 4", _sharded(4)),
        ("or on 1", jdist.OneDeviceStrategy(jax.local_devices()[0])),
    ]
    rows, width = 16, 30
    d = Drawing()
    for number, (title, strategy) in enumerate(strategies):
        y = [30, 196, 288][number]
        array = strategy.init(lambda: jnp.zeros((rows, 16)))
        d.text(LEFT, y + 26, title, bold=True)
        for device, index in array.sharding.devices_indices_map(array.shape).items():
            start, stop, _ = index[0].indices(rows)
            x = 160 + start * width
            d.box(x, y, (stop - start) * width - 4, 44, f"{device.id}", BLUE)
    d.text(LEFT, 140, "checkpoint", bold=True)
    d.box(160, 112, rows * width - 4, 44, "rows 0 to 15 of w, and the position in the data", GREEN)
    for x in (220, 340, 460, 580):
        d.arrow(x - 20, 78, x - 20, 110)
        d.arrow(x - 20, 158, x - 20, 194)
    d.line(637, 134, 652, 134)
    d.line(652, 134, 652, 310)
    d.arrow(652, 310, 639, 310)
    d.note(160, 358, "The numbers are devices. Each device writes and reads its rows only.")
    return d.svg()


def forced_devices() -> str:
    """Returns an SVG: the devices of the strategies of a test, on a CPU that JAX divides into 8 devices."""
    d = Drawing()
    d.frame(LEFT, 14, 632, 76, "one CPU, jdist_devices = 8")
    devices = jax.local_devices()[:8]
    for i, device in enumerate(devices):
        d.box(LEFT + 12 + i * 76.6, 46, 70, 32, f"cpu:{device.id}", GREY)
    d.text(LEFT, 118, "The same test under", bold=True)
    y = 130
    for name in ("one_device", "mirrored_2", "sharded_4"):
        strategy = jdist.testing.strategy(name)
        is_replica = strategy.num_replicas_in_sync > 1
        ids = [device.id for device in strategy.mesh.devices.flat]
        for place, i in enumerate(ids):
            text = f"replica {place}" if is_replica else f"part {place}" if len(ids) > 1 else "replica 0"
            d.box(LEFT + 12 + i * 76.6, y, 70, 32, text, PURPLE if len(ids) == 4 else GREEN)
        d.text(LEFT + 12 + (max(ids) + 1) * 76.6 + 8, y + 21, name)
        y += 42
    return d.svg()


def virtual_replicas() -> str:
    """Returns an SVG: 8 virtual replicas on 8, 3 devices and one, and the tree along which they are added on each of them."""
    virtual, unit, left = 8, 62, 150
    d = Drawing()
    d.text(LEFT, 44, "sum", bold=True)
    centers = [left + (i + 0.5) * unit for i in range(virtual)]
    top = y = 190
    while len(centers) > 1:  # neighbours are added, level by level
        sums = [(a + b) / 2 for a, b in zip(centers[::2], centers[1::2], strict=True)]
        for number, center in enumerate(centers):
            d.line(center, y, sums[number // 2], y - 32)
        for center in sums:
            d.box(center - 11, y - 54, 22, 22, "+", ORANGE)
        centers, y = sums, y - 54
    d.text(LEFT, top + 20, "virtual replicas", bold=True)
    for i in range(virtual):
        d.box(left + i * unit, top, unit - 4, 30, str(i), BLUE)
    y = top + 48
    for count in (8, 3, 1):
        strategy = jdist.MirroredStrategy(jax.local_devices()[:count], virtual_replicas=virtual)
        per_device = -(-strategy.num_replicas_in_sync // count)
        d.text(LEFT, y + 21, f"on {count} device{'s' * (count > 1)}")
        for device in range(count):
            first, last = device * per_device, min((device + 1) * per_device, virtual)
            d.box(left + first * unit, y, (last - first) * unit - 4, 30, f"{device}", GREEN)
        y += 38
    d.note(LEFT, y + 18, "The order of the additions is the same on any number of devices.")
    return d.svg()


def plan_memory() -> str:
    """Returns an SVG: the bytes of the table in docs/plan.md for 8 devices, against the memory of a device."""
    text = (pathlib.Path(__file__).parent / "plan.md").read_text(encoding="utf-8")
    limit = _mebibytes(re.findall(r"^8 .* yes .*", text, re.M)[0])[1]
    names, row = re.findall(r"^bytes per device of +(.*)\n8 (.*)", text, re.M)[0]
    parts = dict(zip(names.split(), _mebibytes(row), strict=True))
    parts = {name: size for name, size in parts.items() if size > 10}
    colors = dict(zip(parts, (GREEN, PURPLE, BLUE, RED, ORANGE), strict=True))
    d, unit = Drawing(), 628 / limit
    d.text(LEFT, 28, f"memory of a device: {limit / 1024:.1f} GiB", bold=True)
    d.box(LEFT, 38, limit * unit, 34, fill="none", dashed=True)
    used = sum(parts.values()) * unit
    d.box(LEFT, 38, used, 34, fill=GREY)
    d.line(LEFT, 73, LEFT, 118)
    d.line(LEFT + used, 73, LEFT + 628, 118)
    x, zoom = LEFT, 628 / sum(parts.values())
    for name, size in parts.items():
        d.box(x, 120, size * zoom, 34, fill=colors[name])
        x += size * zoom
    x = LEFT
    for name in parts:
        d.box(x, 174, 18, 16, fill=colors[name])
        d.text(x + 24, 187, name)
        x += 128
    d.text(LEFT + used + 12, 60, f"used: {sum(parts.values()) / 1024:.1f} GiB")
    return d.svg()


def _mebibytes(text: str) -> list[float]:
    scales = {"K": 1 / 1024, "M": 1, "G": 1024}
    return [float(number) * scales[unit] for number, unit in re.findall(r"([\d.]+) ([KMG])iB", text)]
