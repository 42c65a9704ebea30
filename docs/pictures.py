"""Draws the figures of the documentation with the code that they show.

python docs/pictures.py
"""

import pathlib

import guide_pictures
import jax
import jax.numpy as jnp
import numpy as np
import timeline_pictures
import topology_pictures
from drawing import BLUE, GREEN, ORANGE, PURPLE, card
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import jdist
from jdist._src.data.batches import Position, read_batches
from jdist._src.data.config import InputConfig
from jdist._src.data.files import Files
from jdist._src.data.shards import ProcessShare

HERE = pathlib.Path(__file__).parent
PROCESSES, DEVICES, FILES, IN_FILE, BATCH = 2, 4, 4, 6, 16
COLORS = (BLUE, ORANGE, GREEN, PURPLE)  # one per file
CELL, HEIGHT, LEFT, TOP, GAP = 72, 34, 76, 64, 20


def who_reads() -> str:
    """Returns an SVG: which process reads which of 24 examples in 4 files, for 2 processes of 4 devices, with DATA and FILE."""
    panels = [
        _panel("DATA: every process has the complete source, and reads the examples of its replicas", 1, 0),
        _panel("FILE: process 0 reads the files 0 and 2, process 1 the files 1 and 3", PROCESSES, 1),
    ]
    width, height = LEFT + PROCESSES * (DEVICES * CELL + GAP), 2 * _panel_height() + 34
    key = "".join(
        f'<rect x="{LEFT + i * 120}" y="{height - 24}" width="14" height="14" fill="{color}"/>'
        f'<text x="{LEFT + i * 120 + 20}" y="{height - 12}">file {i}: {i * IN_FILE} to {(i + 1) * IN_FILE - 1}</text>'
        for i, color in enumerate(COLORS)
    )
    key += f'<text x="{LEFT + 490}" y="{height - 12}" fill="#666">grey: weight 0</text>'
    return card(width, height, [*panels, key], 13)


def _panel(title: str, shards: int, number: int) -> str:
    top = number * _panel_height()
    parts = [f'<text x="8" y="{top + 22}" font-weight="bold">{title}</text>']
    for process in range(PROCESSES):
        x = LEFT + process * (DEVICES * CELL + GAP)
        parts.append(f'<text x="{x}" y="{top + 46}">process {process}</text>')
        for device in range(DEVICES):
            parts.append(
                f'<text x="{x + device * CELL}" y="{top + TOP}" fill="#666">replica {process * DEVICES + device}</text>'
            )
        for row, (examples, weights) in enumerate(_rows(process, shards)):
            y = top + TOP + 8 + row * (HEIGHT + 6)
            parts.append(f'<text x="8" y="{y + 22}">batch {row}</text>')
            for device in range(DEVICES):
                for place in range(BATCH // (PROCESSES * DEVICES)):
                    left = x + device * CELL + place * (CELL - 8) // 2
                    parts.append(_example(left, y, int(examples[device][place]), bool(weights[device][place])))
    return "\n".join(parts)


def _example(x: int, y: int, example: int, is_example: bool) -> str:
    width = (CELL - 8) // 2 - 2
    fill, text = (COLORS[example // IN_FILE], str(example)) if is_example else ("#eeeeee", "0")
    color = "black" if is_example else "#999"
    label = f'<text x="{x + width / 2}" y="{y + 22}" text-anchor="middle" fill="{color}">{text}</text>'
    return f'<rect x="{x}" y="{y}" width="{width}" height="{HEIGHT}" fill="{fill}"/>{label}'


def _rows(process: int, shards: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """Returns the examples `[replica, row]` of a process in each batch, and their weights."""
    files = Files([str(i) for i in range(FILES)], lambda path: np.arange(IN_FILE) + IN_FILE * int(path))
    config = InputConfig(files, BATCH, False, 0, 1, "pad")
    share = ProcessShare(tuple(range(process * DEVICES, (process + 1) * DEVICES)), PROCESSES * DEVICES)
    local_batches = read_batches(config, share, Position(0, 0, BATCH, shards))
    return [(batch.rows, batch.weights) for batch in local_batches if batch.weights is not None]


def explanation() -> str:
    """Returns the picture of the proof of a step that does not reduce its gradient, for docs/debugging.md."""

    def forgets_to_reduce(w: jax.Array, x: jax.Array, y: jax.Array) -> tuple[jax.Array, jax.Array]:
        loss, grad = jax.value_and_grad(lambda w: jnp.mean((x @ w - y) ** 2))(w)
        return w - 0.1 * grad, jdist.all_reduce("mean", loss)

    strategy = jdist.testing.DebugStrategy(replicas=8)  # on one device
    batch = [jdist.PerReplica(jax.ShapeDtypeStruct(shape, jnp.float32)) for shape in ((8, 64, 4), (8, 64))]
    step = strategy.step(forgets_to_reduce)
    return jdist.debug.explain(step, jax.ShapeDtypeStruct((4,), jnp.float32), *batch).svg


def _panel_height() -> int:
    return TOP + 2 * (HEIGHT + 6) + 24


def tensor_parallelism() -> str:
    """Returns an SVG: the parts that 2 replicas of 2 devices hold, with the columns and rows of two layers over "model"."""
    arrays = {
        "batch [example, feature]": ((4, 4), PartitionSpec("replica")),
        "up [feature, hidden]": ((4, 8), PartitionSpec(None, "model")),
        "down [hidden, feature]": ((8, 4), PartitionSpec("model")),
    }
    return _who_holds("model", arrays)


def expert_parallelism() -> str:
    """Returns an SVG: the parts that 2 replicas of 2 devices hold, with 4 experts over "expert"."""
    arrays = {
        "batch [example, token]": ((4, 4), PartitionSpec(("replica", "expert"))),
        "router [feature, expert]": ((4, 4), PartitionSpec()),
        "experts [expert, weight]": ((4, 8), PartitionSpec("expert")),
    }
    return _who_holds("expert", arrays)


def sequence_parallelism() -> str:
    """Returns an SVG: the parts that 2 replicas of 2 devices hold, with the tokens of each example over "sequence"."""
    arrays = {
        "batch [example, token]": ((4, 8), PartitionSpec("replica", "sequence")),
        "parameters": ((4, 4), PartitionSpec()),
    }
    return _who_holds("sequence", arrays)


def pipeline_parallelism() -> str:
    """Returns an SVG: the parts that 2 replicas of 2 devices hold, with 4 layers over "stage"."""
    arrays = {
        "batch [example, feature]": ((4, 4), PartitionSpec("replica")),
        "layers [layer, weight]": ((4, 8), PartitionSpec("stage")),
    }
    return _who_holds("stage", arrays)


def _who_holds(axis: str, arrays: dict[str, tuple[tuple[int, int], PartitionSpec]]) -> str:
    """Returns an SVG with each array on each of 2 x 2 devices; the part that a device holds has the color of the part."""
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("replica", axis))
    unit, label = 13, 176
    heights = [shape[0] * unit + 20 for shape, _ in arrays.values()]
    width, height = label + 4 * 132 + 16, 64 + sum(heights)
    parts = []
    for (replica, part), device in np.ndenumerate(mesh.devices):
        x = label + (2 * replica + part) * 128 + replica * 16
        if not part:
            parts.append(f'<text x="{x}" y="20" font-weight="bold">replica {replica}</text>')
        parts.append(f'<text x="{x}" y="42" fill="#666">{axis} {part}</text>')
        y = 56
        for (shape, spec), step in zip(arrays.values(), heights, strict=True):
            indices = NamedSharding(mesh, spec).devices_indices_map(shape)
            distinct = sorted({_bounds(index, shape) for index in indices.values()})
            bounds = _bounds(indices[device], shape)
            (top, bottom), (left, right) = bounds
            color = COLORS[distinct.index(bounds)]
            parts.append(
                f'<rect x="{x}" y="{y}" width="{shape[1] * unit}" height="{shape[0] * unit}" fill="#f4f4f4" stroke="#ccc"/>'
                f'<rect x="{x + left * unit}" y="{y + top * unit}" width="{(right - left) * unit}" '
                f'height="{(bottom - top) * unit}" fill="{color}" stroke="#666"/>'
            )
            y += step
    y = 56
    for (name, (shape, _)), step in zip(arrays.items(), heights, strict=True):
        parts.append(f'<text x="8" y="{y + shape[0] * unit / 2 + 4}">{name}</text>')
        y += step
    return card(width, height, parts, 13)


def _bounds(index: tuple[slice, ...], shape: tuple[int, int]) -> tuple[tuple[int, int], ...]:
    return tuple(part.indices(size)[:2] for part, size in zip(index, shape, strict=True))


def pipeline_schedule() -> str:
    """Returns an SVG: which micro-batch each of 4 stages computes at which time, for 8 micro-batches in GPipe order."""
    stages, micro_batches, unit, left = 4, 8, 26, 76
    forward = stages + micro_batches - 1
    parts = [
        f'<text x="{left + start * unit}" y="18" font-weight="bold">{name}</text>'
        for start, name in ((0, "forward"), (forward, "backward"))
    ]
    for stage in range(stages):
        y = 28 + stage * (unit + 2)
        parts.append(f'<text x="8" y="{y + 18}">stage {stage}</text>')
        parts.append(f'<rect x="{left}" y="{y}" width="{2 * forward * unit - 2}" height="{unit}" fill="#eeeeee"/>')
        for batch in range(micro_batches):
            times = stage + batch, forward + stages - 1 - stage + batch
            for time, color in zip(times, COLORS, strict=False):
                x = left + time * unit
                parts.append(
                    f'<rect x="{x}" y="{y}" width="{unit - 2}" height="{unit}" fill="{color}"/>'
                    f'<text x="{x + unit / 2 - 1}" y="{y + 18}" text-anchor="middle">{batch}</text>'
                )
    bubble = (stages - 1) / forward
    y = 28 + stages * (unit + 2) + 18
    parts.append(
        f'<text x="{left}" y="{y}" fill="#666">grey: idle, {stages - 1} of {forward} times, {bubble:.0%}</text>'
    )
    return card(left + 2 * forward * unit + 8, y + 12, parts, 13)


PICTURES = (
    who_reads,
    explanation,
    tensor_parallelism,
    expert_parallelism,
    sequence_parallelism,
    pipeline_parallelism,
    pipeline_schedule,
    topology_pictures.mirrored,
    topology_pictures.several_workers,
    topology_pictures.parameter_servers,
    topology_pictures.central_storage,
    topology_pictures.who_holds_what,
    topology_pictures.distributed_values,
    topology_pictures.resharding,
    topology_pictures.forced_devices,
    topology_pictures.virtual_replicas,
    topology_pictures.plan_memory,
    timeline_pictures.life_of_a_step,
    timeline_pictures.life_of_a_push,
    timeline_pictures.life_of_a_batch,
    timeline_pictures.restart,
    timeline_pictures.local_updates,
    timeline_pictures.callback_moments,
    timeline_pictures.profile_parts,
    timeline_pictures.elastic,
    timeline_pictures.asynchronous_dispatch,
    guide_pictures.trainer,
    guide_pictures.export_formats,
    guide_pictures.ddp_and_jdist,
)

if __name__ == "__main__":
    jdist.use_cpu_devices(8)
    for draw in PICTURES:
        (HERE / f"pictures/{draw.__name__}.svg").write_text(draw())
