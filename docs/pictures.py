"""Draws the figures of the documentation with the code that they show.

python docs/pictures.py
"""

import pathlib

import jax
import jax.numpy as jnp
import numpy as np

import jdist
from jdist._src.data.batches import Position, read_batches
from jdist._src.data.config import InputConfig
from jdist._src.data.files import Files
from jdist._src.data.shards import ProcessShare

HERE = pathlib.Path(__file__).parent
PROCESSES, DEVICES, FILES, IN_FILE, BATCH = 2, 4, 4, 6, 16
COLORS = ("#9ecae9", "#ffbf79", "#a1d99b", "#d4b5e3")  # one per file
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
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" font-size="13">\n'
        f'<rect width="{width}" height="{height}" fill="white"/>\n' + "\n".join(panels) + f"\n{key}\n</svg>\n"
    )


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


if __name__ == "__main__":
    (HERE / "who_reads.svg").write_text(who_reads())
    (HERE / "explanation.svg").write_text(explanation())
