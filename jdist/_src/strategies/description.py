"""What a strategy runs on, and where the leaves of a state lie: as data, in a terminal and in a notebook."""

import collections
import dataclasses
import io
import itertools
import math
import re
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from jdist._src.core import html
from jdist._src.core.arguments import as_int
from jdist._src.core.html import Row
from jdist._src.core.tree import PyTree
from jdist._src.devices.mesh import Replicas
from jdist._src.execution.backend import Backend
from jdist._src.strategies.leaf_description import LeafDescription, describe_leaf, is_shape, listed, names_of, shape_of
from jdist._src.strategies.mesh_drawing import WIDTH, draw_mesh
from jdist._src.values.base import is_distributed
from jdist._src.values.device_put import check_wrapper
from jdist._src.values.per_replica import PerReplica
from jdist._src.values.state_sharding import StateLeaf, StateSharding, state_leaves

_HEAD = ("leaf", "spec", "placement", "bytes", "bytes a device", "host bytes a device")


@dataclasses.dataclass(frozen=True, repr=False)
class Description:
    """What a strategy runs on, and where the leaves of a state lie. Text when printed, tables in a notebook.

    Attributes:
        strategy: What it is called.
        replicas: How many there are, and on which devices: `replicas.size`, `replicas.mesh`.
        leaves: The leaves of the state, in order.
        unsplit: The paths of those that the strategy would split, had they a dim that divides.
        note: The same in words; empty if there are none.
        max_rows: How many rows the table of the leaves has at most.
    """

    strategy: str
    replicas: Replicas
    leaves: tuple[LeafDescription, ...] = ()
    unsplit: tuple[str, ...] = ()
    note: str = ""
    max_rows: int = 40

    @property
    def bytes(self) -> int:
        """What one copy of the state takes."""
        return sum(leaf.bytes for leaf in self.leaves)

    @property
    def device_bytes(self) -> int:
        """The most that any one device of the strategy holds."""
        return _most(self.leaves, "device_bytes")

    @property
    def host_bytes(self) -> int:
        """The most that any one device of the strategy keeps in the memory of its host."""
        return _most(self.leaves, "host_bytes")

    def __repr__(self) -> str:
        count = self.replicas.size
        facts = [self.strategy, f"{count:,} {'replica' if count == 1 else 'replicas'}"]
        if self.leaves:
            facts.append(f"{_leaf_count(self.leaves)}, {_size(self.bytes)}")
        return f"Description({', '.join(facts)})"

    def __str__(self) -> str:
        from rich.console import Console  # not needed until something is printed

        console = Console(file=io.StringIO(), width=WIDTH, color_system=None, force_terminal=False, force_jupyter=False)
        with console.capture() as captured:
            console.print(self)
        return "\n".join(line.rstrip() for line in captured.get().rstrip().splitlines())

    def __rich__(self) -> Any:
        from rich.console import Group
        from rich.table import Column, Table
        from rich.text import Text  # a plain string would be read as markup: paths have brackets in them

        facts = Table.grid(Column(style="bold"), Column(overflow="fold"), padding=(0, 2))
        for row in _facts(self.replicas):
            facts.add_row(*map(Text, row))
        parts = [Text(self.strategy, style="bold"), facts, Text(_picture_of(self.replicas), no_wrap=True)]
        if self.leaves:
            *rows, total = self._rows()
            columns = [
                Column(
                    name, footer=Text(last), justify="left" if i < 3 else "right", overflow="fold"
                )  # nothing is cut off
                for i, (name, last) in enumerate(zip(_HEAD, total, strict=False))
            ]
            table = Table(*columns, show_footer=True)
            for row in rows:
                table.add_row(*map(Text, row))
            parts.append(table)
        return Group(*parts, *([Text(self.note)] if self.note else []))

    def _repr_html_(self) -> str:
        parts = [
            html.heading(self.strategy),
            html.table(_facts(self.replicas)),
            html.monospaced(_picture_of(self.replicas)),
        ]
        if self.leaves:
            rows = self._rows()
            parts.append(html.table(rows[:-1], _HEAD[: len(rows[0])], rows[-1], right_from=3))
        return html.block(*parts, html.paragraph(self.note))

    def _rows(self) -> list[Row]:
        """The table of the leaves; the last row is the total."""
        rows = [_row(path, leaves) for path, leaves in _folded(self.leaves, self.max_rows)]
        total = ("total", _leaf_count(self.leaves), "", *_sizes(self.leaves))
        return [row if self.host_bytes else row[:-1] for row in (*rows, total)]


def describe(name: str, view: Backend, state: PyTree = None, max_rows: int = 40) -> Description:
    """Describes a strategy, and where the leaves of a state lie.

    Args:
        name: What the strategy is called.
        view: How it runs, and places a state.
        state: A tree of arrays, described as they lie, of `jax.ShapeDtypeStruct`s, as the strategy would place them, and of
            anything else; some in wrappers.
        max_rows: How many rows its table has at most. If a state has more leaves, those whose paths begin alike, or differ
            by a number, share a row.

    Raises:
        ValueError: `max_rows` is less than 1; or the strategy could not place a leaf of which the shape is given.
        TypeError: `max_rows` is no whole number.

    Example:
        >>> strategy = jdist.MirroredStrategy(["cpu:0", "cpu:1"])
        >>> state = strategy.put({"w": np.zeros((4, 8), np.float32)})
        >>> (leaf,) = describe("MirroredStrategy", strategy._view, state).leaves
        >>> leaf.path, leaf.spec, leaf.placement, leaf.device_bytes
        ('w', 'float32[4,8]', 'mirrored', 128)
        >>> print(describe("MirroredStrategy", strategy._view))
        MirroredStrategy
        mesh       'replica' 2
        devices    2 of kind cpu (cpu), memory: device, ...
        processes  1
        replicas   2, one a device
        columns along 'replica'
        ┌───────┐
        │ 0   1 │
        └───────┘
    """
    max_rows = as_int("`max_rows`", max_rows, 1)
    items = jax.tree_util.tree_flatten_with_path(state, is_leaf=is_distributed)[0]
    for path, item in items:
        if any(map(is_shape, jax.tree.leaves(item))):
            check_wrapper("state" + jax.tree_util.keystr(path), item, view.replicas)
    values, shapes = jax.tree.leaves(state), jax.tree.map(shape_of, state)
    wrappers = [item if is_distributed(item) else None for _, item in items for _ in jax.tree.leaves(item)]
    # What is only a shape is to be placed by the strategy, as a state. Arrays may be any part of one.
    wanted = view.shardings(shapes, any(map(is_shape, values)))
    home = frozenset().union(view.replicas.mesh.devices.flat, *(place.device_set for place in wanted))
    layout: StateSharding | None = getattr(view, "layout", None)
    leaves, unsplit = [], []
    for leaf, value, wrapper, place in zip(state_leaves(shapes), values, wrappers, wanted, strict=True):
        described = describe_leaf("/".join(leaf.path) or "state", value, wrapper, place, view.replicas, home)
        leaves.append(described)
        if layout and described.devices and not isinstance(wrapper, PerReplica) and _is_unsplit(layout, leaf, place):
            unsplit.append(described.path)
    note = _unsplit_in_words(layout, unsplit) if layout and unsplit else ""
    return Description(name, view.replicas, tuple(leaves), tuple(unsplit), note, max_rows)


def _is_unsplit(layout: StateSharding, leaf: StateLeaf, place: NamedSharding) -> bool:
    """Whether `layout` would split the leaf over its axis, if it could: scalars and keys are never meant to be."""
    is_key = jnp.issubdtype(leaf.value.dtype, jax.dtypes.prng_key)
    is_meant = (leaf.is_optimizer or layout.shard == "all") and math.prod(leaf.shape) > 1 and not is_key
    is_spread = layout.mesh.shape[layout.axis] > 1 and len(place.device_set) == layout.mesh.size
    return is_meant and is_spread and all(layout.axis not in names_of(axes) for axes in place.spec)


def _unsplit_in_words(layout: StateSharding, paths: Sequence[str]) -> str:
    leaves = "1 leaf is" if len(paths) == 1 else f"{len(paths):,} leaves are"
    dim = "no dim that `layout` leaves" if layout.patterns else "no dim"
    names = paths if len(paths) <= 6 else list(dict.fromkeys(map(_numberless, paths)))
    parts = layout.mesh.shape[layout.axis]
    return f"{leaves} not split over {layout.axis!r}, as {dim} divides by {parts}: {listed(names, 6)}."


def _folded(leaves: Sequence[LeafDescription], most: int) -> list[tuple[str, Sequence[LeafDescription]]]:
    """The leaves in groups, at most so many, each with its path. All begin as one; the largest that can be is taken apart."""
    if len(leaves) <= most:
        return [(leaf.path, [leaf]) for leaf in leaves]
    groups: dict[Row, list[LeafDescription]] = {(): list(leaves)}
    closed: set[Row] = set()
    while open_groups := [prefix for prefix in groups if prefix not in closed]:
        chosen = max(open_groups, key=lambda prefix: len(groups[prefix]))
        parts: dict[Row, list[LeafDescription]] = {}
        for leaf in groups[chosen]:
            parts.setdefault(tuple(_numberless(leaf.path).split("/"))[: len(chosen) + 1], []).append(leaf)
        if list(parts) == [chosen] or len(groups) - 1 + len(parts) > most:
            closed.add(chosen)
        else:
            each = [parts.items() if prefix == chosen else [(prefix, group)] for prefix, group in groups.items()]
            groups = dict(itertools.chain(*each))
    return [(group[0].path if len(group) == 1 else "/".join(prefix), group) for prefix, group in groups.items()]


def _leaf_count(leaves: Sequence[LeafDescription]) -> str:
    return f"{len(leaves):,} {'leaf' if len(leaves) == 1 else 'leaves'}"


def _numberless(path: str) -> str:
    return re.sub(r"\d+", "*", path)


def _row(path: str, leaves: Sequence[LeafDescription]) -> Row:
    count = f" ({len(leaves):,} leaves)" if len(leaves) > 1 else ""
    specs, placements = (list(dict.fromkeys(getattr(leaf, of) for leaf in leaves)) for of in ("spec", "placement"))
    return (f"{path or 'state'}{count}", listed(specs, 3), listed(placements, 3, "; "), *_sizes(leaves))


def _sizes(leaves: Sequence[LeafDescription]) -> Row:
    return tuple(
        map(_size, (sum(leaf.bytes for leaf in leaves), _most(leaves, "device_bytes"), _most(leaves, "host_bytes")))
    )


def _most(leaves: Iterable[LeafDescription], of: str) -> int:
    """The most that any one device has of these leaves."""
    by_devices, by_device = collections.Counter(), collections.Counter()
    for leaf in leaves:  # of which most lie on the same devices
        by_devices[leaf.devices] += getattr(leaf, of)
    for devices, size in by_devices.items():
        by_device.update(dict.fromkeys(devices, size))
    return max(by_device.values(), default=0)


def _size(number: int) -> str:
    power = min((max(number, 1).bit_length() - 1) // 10, 5)
    return f"{number / 1024**power:.1f} {' KMGTP'[power]}iB" if power else f"{number} B"


def _runs(numbers: Sequence[int]) -> str:
    runs = [
        [pair[1] for pair in run] for _, run in itertools.groupby(enumerate(numbers), lambda pair: pair[1] - pair[0])
    ]
    return listed([f"{run[0]}-{run[-1]}" if len(run) > 1 else f"{run[0]}" for run in runs], 4)


def _memories(replicas: Replicas) -> str:
    """The kinds of memory of the devices, their own first. A device that is out of reach may have none to tell of."""
    own = replicas.whole.memory_kind
    known = ([memory.kind for memory in device.addressable_memories()] for device in replicas.mesh.devices.flat)
    return ", ".join(dict.fromkeys([str(own), *sorted(next(filter(None, known), []))]))


def _facts(replicas: Replicas) -> list[Row]:
    devices = list(replicas.mesh.devices.flat)
    kinds = collections.Counter(f"{device.device_kind} ({device.platform})" for device in devices)
    kinds_in_words = ", ".join(f"{count:,} of kind {kind}" for kind, count in kinds.items())
    owned: dict[int, list[int]] = {}
    for device in sorted(devices, key=lambda device: (device.process_index, device.id)):
        owned.setdefault(device.process_index, []).append(device.id)
    owners = listed([f"process {process} has {_runs(ids)}" for process, ids in owned.items()], 8, "; ")
    where = "over all devices" if replicas.split else "one a device"
    return [
        ("mesh", " x ".join(f"{axis!r} {size:,}" for axis, size in replicas.mesh.shape.items())),
        ("devices", f"{kinds_in_words}, memory: {_memories(replicas)}"),
        ("processes", f"{len(owned):,}" + (f"; {owners}" if len(owned) > 1 else "")),
        (
            "replicas",
            f"{replicas.size:,}, " + (f"virtual, at most {replicas.each} a device" if replicas.virtual else where),
        ),
    ]


def _picture_of(replicas: Replicas) -> str:
    devices = replicas.mesh.devices
    ids, processes = (
        np.vectorize(lambda device, of=of: getattr(device, of))(devices) for of in ("id", "process_index")
    )
    return draw_mesh(replicas.mesh.axis_names, ids, processes)
