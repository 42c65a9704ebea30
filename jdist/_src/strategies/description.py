"""`Strategy.describe`: the mesh, the devices, and the placement of each leaf of a state, as data, text and HTML."""

import collections
import dataclasses
import itertools
import math
import re
from collections.abc import Iterable, Sequence
from typing import Any, TypeAlias, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import core
from jax.sharding import NamedSharding, Sharding

from jdist._src.core.arguments import as_int
from jdist._src.core.nn_modules import leaves_with_path, to_array_tree
from jdist._src.core.rendering import facts_table, html_of, rows_table, text_of
from jdist._src.core.tree import PyTree, dtype_and_shape, has_dtype
from jdist._src.devices.mesh import Replicas, num_replica_devices
from jdist._src.execution.backend import Backend
from jdist._src.execution.traced import Proof
from jdist._src.strategies.mesh_drawing import WIDTH, draw_mesh
from jdist._src.values.array_checks import is_device_array
from jdist._src.values.base import is_distributed
from jdist._src.values.device_put import check_wrapper
from jdist._src.values.per_replica import PerReplica
from jdist._src.values.state_sharding import StateLeaf, StateSharding, state_leaves

Row: TypeAlias = tuple[str, ...]
LeafT = TypeVar("LeafT", bound=Any)
_MAX_WIDTHS = (None, 17, None, 14, 9, 9, 9)  # of the columns
_HEAD = ("leaf", "array", "placement", "proof", "bytes", "bytes per device", "host bytes per device")


@dataclasses.dataclass(frozen=True)
class LeafDescription:
    """The placement of a leaf of a state, or the placement that a strategy would choose for it.

    Attributes:
        path: The keys of the leaf, as the patterns of a layout match them: `params/dense/kernel`.
        dtype_and_shape: Dtype and global shape: `float32[8,3]`.
        placement: A description of the sharding, of the wrapper and of the memory.
        bytes: The size of one copy.
        device_bytes: The bytes that each of `devices` stores in its own memory.
        host_bytes: The bytes that each of `devices` stores in the memory of its host.
        devices: The devices of the strategy that store the leaf.
        proof: The verdicts on the leaf of the new state, if `describe` got a proof: `replicated, equivalent`.
    """

    path: str
    dtype_and_shape: str
    placement: str
    bytes: int = 0
    device_bytes: int = 0
    host_bytes: int = 0
    devices: frozenset[jax.Device] = frozenset()
    proof: str = ""


@dataclasses.dataclass(frozen=True, repr=False)
class Description:
    """A strategy's mesh and devices, and the placement of the leaves of a state. Text when printed, tables in a notebook.

    Attributes:
        strategy: The name of the strategy.
        replicas: The number of replicas and their devices: `replicas.size`, `replicas.mesh`.
        leaves: The leaves of the state, in order.
        unsplit: The paths of the leaves that the strategy would split if one of their dims were divisible.
        note: A sentence about `unsplit`; empty if there are none.
        max_rows: The maximum number of rows in the table of the leaves.
    """

    strategy: str
    replicas: Replicas
    leaves: tuple[LeafDescription, ...] = ()
    unsplit: tuple[str, ...] = ()
    note: str = ""
    max_rows: int = 40

    @property
    def bytes(self) -> int:
        """The size of one copy of the state."""
        return sum(leaf.bytes for leaf in self.leaves)

    @property
    def device_bytes(self) -> int:
        """The largest number of bytes that a device of the strategy stores."""
        return _most_on_a_device(self.leaves, "device_bytes")

    @property
    def host_bytes(self) -> int:
        """The largest number of bytes that a device of the strategy stores in the memory of its host."""
        return _most_on_a_device(self.leaves, "host_bytes")

    def __repr__(self) -> str:
        count = self.replicas.size
        facts = [self.strategy, f"{count:,} {'replica' if count == 1 else 'replicas'}"]
        if self.leaves:
            facts.append(f"{_leaf_count(self.leaves)}, {size_text(self.bytes)}")
        return f"Description({', '.join(facts)})"

    def __str__(self) -> str:
        return text_of(self, WIDTH)

    def __rich__(self) -> Any:
        from rich.console import Group
        from rich.text import Text  # a plain string would be read as markup: paths contain brackets

        drawing = Text(_mesh_drawing(self.replicas), no_wrap=True)
        parts = [facts_table(self.strategy, _facts(self.replicas)), drawing]
        if self.leaves:
            *rows, total = self._rows()
            head, widths = self._shown(_HEAD), self._shown(_MAX_WIDTHS)
            num_texts = head.index("bytes")
            parts.append(rows_table(head, rows, footer=total, num_texts=num_texts, max_widths=widths))
        return Group(*parts, *([Text(self.note)] if self.note else []))

    def _repr_html_(self) -> str:
        return html_of(self)

    def _rows(self) -> list[Row]:
        """The table of the leaves; the last row is the total."""
        rows = [_row(path, leaves) for path, leaves in grouped(self.leaves, self.max_rows)]
        return list(map(self._shown, [*rows, ("total", _leaf_count(self.leaves), "", "", *_sizes(self.leaves))]))

    def _shown(self, row: tuple[Any, ...]) -> tuple[Any, ...]:
        """Returns a row without the columns that are empty for all leaves."""
        has_proof = any(leaf.proof for leaf in self.leaves)
        return tuple(itertools.compress(row, (True, True, True, has_proof, True, True, self.host_bytes)))


def describe(
    name: str, backend: Backend, state: PyTree = None, max_rows: int = 40, proof: Proof | None = None
) -> Description:
    """Describes a strategy, and the placement of the leaves of a state.

    Args:
        name: The name of the strategy.
        backend: The backend of the strategy, which places states.
        state: A tree, some leaves in wrappers. The description of an array is its placement, of a
            `jax.ShapeDtypeStruct` the placement that the strategy would choose. Other leaves are allowed.
        max_rows: The maximum number of rows of the table. If a state has more leaves, leaves with the same first keys, or whose
            paths differ in a number, share a row.
        proof: The proof of a step of this state, `step.proof`.

    Raises:
        ValueError: `max_rows` is less than 1; or the strategy could not place a leaf with this shape.
        TypeError: `max_rows` is not an integer.

    Example:
        >>> strategy = jdist.MirroredStrategy(["cpu:0", "cpu:1"])
        >>> state = strategy.put({"w": np.zeros((4, 8), np.float32)})
        >>> (leaf,) = describe("MirroredStrategy", strategy._backend, state).leaves
        >>> leaf.path, leaf.dtype_and_shape, leaf.placement, leaf.device_bytes
        ('w', 'float32[4,8]', 'replicated', 128)
        >>> print(describe("MirroredStrategy", strategy._backend))
        MirroredStrategy
        mesh       'replica' 2
        devices    2 of kind cpu (cpu), memory: device, ...
        processes  1
        replicas   2, one per device
        columns along 'replica'
        ┌───────┐
        │ 0   1 │
        └───────┘
    """
    max_rows = as_int("`max_rows`", max_rows, 1)
    state = to_array_tree(state)
    items = leaves_with_path(state, is_leaf=is_distributed)
    for path, item in items:
        if any(map(_is_shape, jax.tree.leaves(item))):
            check_wrapper("state" + jax.tree_util.keystr(path), item, backend.replicas)
    values, shapes = jax.tree.leaves(state), jax.tree.map(_as_shape, state)
    wrappers = [item if is_distributed(item) else None for _, item in items for _ in jax.tree.leaves(item)]
    names = ["state" + jax.tree_util.keystr(path) for path, item in items for _ in jax.tree.leaves(item)]
    # A tree with shapes is a complete state, which the strategy would place. A tree of arrays may be a part of one.
    shardings = backend.state_shardings(shapes, any(map(_is_shape, values)))
    devices = frozenset().union(backend.replicas.mesh.devices.flat, *(sharding.device_set for sharding in shardings))
    rules = backend.state_sharding
    leaves, unsplit = [], []
    rows = zip(state_leaves(shapes), values, wrappers, shardings, names, strict=True)
    for leaf, value, wrapper, sharding, leaf_name in rows:
        path = "/".join(leaf.path) or "state"
        description = _describe_leaf(path, value, wrapper, sharding, backend.replicas, devices)
        description = dataclasses.replace(description, proof=_verdicts(proof, leaf_name))
        leaves.append(description)
        if rules and description.devices and not isinstance(wrapper, PerReplica) and _is_unsplit(rules, leaf, sharding):
            unsplit.append(path)
    note = _unsplit_note(rules, unsplit) if rules and unsplit else ""
    return Description(name, backend.replicas, tuple(leaves), tuple(unsplit), note, max_rows)


def _verdicts(proof: Proof | None, name: str) -> str:
    """Returns the verdicts on a result of a step; an empty text if the proof has none."""
    if proof is None or name not in (*proof.replicated, *proof.per_replica):
        return ""
    verdict = proof.equivalence.get(name)
    return ("replicated" if name in proof.replicated else "per replica") + (f", {verdict.name}" if verdict else "")


def _describe_leaf(
    path: str, value: Any, wrapper: Any, default: Sharding, replicas: Replicas, devices: frozenset[jax.Device]
) -> LeafDescription:
    """Describes a leaf.

    Args:
        path: Its path.
        value: The leaf.
        wrapper: The wrapper that contains it, or None.
        default: The sharding that the strategy would give it.
        replicas: The replicas of the strategy.
        devices: All devices that the strategy uses, for computation or storage.
    """
    if not is_device_array(value) and not _is_shape(value):
        is_number = has_dtype(value) or isinstance(value, (bool, int, float, complex))
        placement = "on the host; not placed" if is_number else "not an array"
        return LeafDescription(path, dtype_and_shape(value), placement, getattr(value, "nbytes", 0))
    if is_device_array(value) and value.is_deleted():
        return LeafDescription(path, dtype_and_shape(value), "deleted: its memory was donated to a step, or freed")
    sharding = value.sharding if is_device_array(value) else default
    leaf_devices = frozenset(sharding.device_set)
    is_host = sharding.memory_kind not in (None, replicas.replicated_sharding.memory_kind)
    placement = _placement(value.shape, wrapper, sharding, replicas)
    placement += f", in host memory ({sharding.memory_kind})" if is_host else ""
    if not leaf_devices <= devices:
        names = f", on {listed(sorted(map(str, leaf_devices)), 3)}" if len(leaf_devices) > 1 else ""
        placement += f"{names}, not this strategy's"
    size = math.prod(value.shape) * value.dtype.itemsize
    is_used = bool(leaf_devices & devices)
    shard_size = math.prod(sharding.shard_shape(value.shape)) * value.dtype.itemsize if is_used else 0
    sizes = (0, shard_size) if is_host else (shard_size, 0)
    return LeafDescription(path, dtype_and_shape(value), placement, size, *sizes, leaf_devices & devices)


def _placement(shape: tuple[int, ...], wrapper: Any, sharding: Sharding, replicas: Replicas) -> str:
    shard_shape = sharding.shard_shape(shape)
    mesh_devices = list(replicas.mesh.devices.flat)
    in_order = not isinstance(sharding, NamedSharding) or list(sharding.mesh.devices.flat) == mesh_devices  # pyright: ignore
    split = _split_text(shape, shard_shape, sharding)
    split += ", the devices in another order" if sharding.device_set == set(mesh_devices) and not in_order else ""
    aggregation = getattr(wrapper, "aggregation", None)
    wrapper_text = f"{type(wrapper).__name__} {aggregation.name if aggregation else ''}".strip()
    if wrapper is None or wrapper_text == "Mirrored NONE":
        return split
    if not wrapper._is_stacked:
        return f"{split} ({wrapper_text})"
    if sharding.device_set != set(mesh_devices) or not in_order or shape[:1] <= (1,):
        return f"one per replica ({wrapper_text}), {split}"
    return f"one per replica ({wrapper_text})" + (f", {shard_shape[0]} per device" if shard_shape[0] > 1 else "")


def _split_text(shape: tuple[int, ...], shard_shape: tuple[int, ...], sharding: Sharding) -> str:
    if len(sharding.device_set) == 1:
        return f"on {next(iter(sharding.device_set))}"
    counts = {dim: size // shard_shape[dim] for dim, size in enumerate(shape) if size != shard_shape[dim]}
    if not counts:
        return "replicated"
    spec = sharding.spec if isinstance(sharding, NamedSharding) else [()] * len(shape)
    over = {dim: " and ".join(map(repr, _axis_names(spec[dim]))) for dim in counts}
    dims = [f"dim {dim}{over[dim] and ' over ' + over[dim]} ({count} parts)" for dim, count in counts.items()]
    copies = len(sharding.device_set) // math.prod(counts.values())
    return f"split {', '.join(dims)}" + (f", {copies} copies" if copies > 1 else "")


def _axis_names(entry: Any) -> tuple[str, ...]:
    """The axes in an entry of a `PartitionSpec`."""
    return (entry,) if isinstance(entry, str) else tuple(entry or ())


def _is_shape(value: Any) -> bool:
    """Whether `value` has a shape and no elements yet."""
    return isinstance(value, (jax.ShapeDtypeStruct, core.Tracer))


def _as_shape(value: Any) -> jax.ShapeDtypeStruct:
    """The shape of a leaf. A leaf that is not on a device is not placed, so its dtype has no effect."""
    if is_device_array(value) or _is_shape(value):
        return jax.ShapeDtypeStruct(value.shape, value.dtype)
    return jax.ShapeDtypeStruct(value.shape if isinstance(value, np.ndarray) else (), np.float32)


def _is_unsplit(rules: StateSharding, leaf: StateLeaf, sharding: NamedSharding) -> bool:
    """Whether `rules` would split the leaf over their axis if a dim were divisible. Scalars and keys are never split."""
    is_key = jnp.issubdtype(leaf.value.dtype, jax.dtypes.prng_key)
    is_selected = (leaf.is_optimizer or rules.shard == "all") and math.prod(leaf.shape) > 1 and not is_key
    is_on_mesh = (
        rules.axis is not None and rules.mesh.shape[rules.axis] > 1 and len(sharding.device_set) == rules.mesh.size
    )
    return is_selected and is_on_mesh and all(rules.axis not in _axis_names(entry) for entry in sharding.spec)


def _unsplit_note(rules: StateSharding, paths: Sequence[str]) -> str:
    leaves = "1 leaf is" if len(paths) == 1 else f"{len(paths):,} leaves are"
    dim = "no dim that `layout` leaves unsplit" if rules.patterns else "no dim"
    names = paths if len(paths) <= 6 else list(dict.fromkeys(map(numberless, paths)))
    parts = rules.mesh.shape[str(rules.axis)]
    return f"{leaves} not split over {rules.axis!r}, because {dim} is divisible by {parts}: {listed(names, 6)}."


def listed(names: Sequence[str], most: int, comma: str = ", ") -> str:
    """Returns the first `most` names, and the number of the others."""
    return comma.join(names[:most]) + (f" and {len(names) - most:,} more" if len(names) > most else "")


def grouped(leaves: Sequence[LeafT], max_groups: int, separator: str = "/") -> list[tuple[str, Sequence[LeafT]]]:
    """Returns the leaves in at most `max_groups` groups with a common path, splitting the largest group first.

    Args:
        leaves: Leaves with a `path`.
        max_groups: The maximum number of groups.
        separator: The characters between the keys of a path.
    """
    if len(leaves) <= max_groups:
        return [(leaf.path, [leaf]) for leaf in leaves]
    groups: dict[Row, list[LeafT]] = {(): list(leaves)}
    closed: set[Row] = set()
    while open_groups := [prefix for prefix in groups if prefix not in closed]:
        largest = max(open_groups, key=lambda prefix: len(groups[prefix]))
        parts: dict[Row, list[LeafT]] = {}
        for leaf in groups[largest]:
            parts.setdefault(tuple(numberless(leaf.path).split(separator))[: len(largest) + 1], []).append(leaf)
        if list(parts) == [largest] or len(groups) - 1 + len(parts) > max_groups:
            closed.add(largest)
        else:
            items = [parts.items() if prefix == largest else [(prefix, group)] for prefix, group in groups.items()]
            groups = dict(itertools.chain(*items))
    return [(group[0].path if len(group) == 1 else separator.join(prefix), group) for prefix, group in groups.items()]


def _leaf_count(leaves: Sequence[LeafDescription]) -> str:
    return f"{len(leaves):,} {'leaf' if len(leaves) == 1 else 'leaves'}"


def numberless(path: str) -> str:
    """Returns a path with `*` in place of each number, equal for the layers of a stack."""
    return re.sub(r"\d+", "*", path)


def _row(path: str, leaves: Sequence[LeafDescription]) -> Row:
    count = f" ({len(leaves):,} leaves)" if len(leaves) > 1 else ""
    arrays = list(dict.fromkeys(leaf.dtype_and_shape for leaf in leaves))
    placements = list(dict.fromkeys(leaf.placement for leaf in leaves))
    proofs = list(dict.fromkeys(leaf.proof for leaf in leaves))
    texts = listed(arrays, 3), listed(placements, 3, "; "), listed(proofs, 3, "; ")
    return (f"{path or 'state'}{count}", *texts, *_sizes(leaves))


def _sizes(leaves: Sequence[LeafDescription]) -> Row:
    sizes = (
        sum(leaf.bytes for leaf in leaves),
        *(_most_on_a_device(leaves, field) for field in ("device_bytes", "host_bytes")),
    )
    return tuple(map(size_text, sizes))


def _most_on_a_device(leaves: Iterable[LeafDescription], field: str) -> int:
    """Returns the largest sum of a field of these leaves over the leaves that one device stores."""
    by_devices, by_device = collections.Counter(), collections.Counter()
    for leaf in leaves:  # most of them are on the same set of devices
        by_devices[leaf.devices] += getattr(leaf, field)
    for devices, size in by_devices.items():
        by_device.update(dict.fromkeys(devices, size))
    return max(by_device.values(), default=0)


def size_text(num_bytes: float) -> str:
    """Returns a number of bytes as text.

    Example:
        >>> size_text(100), size_text(3 << 20)
        ('100 B', '3.0 MiB')
    """
    power = min((max(int(num_bytes), 1).bit_length() - 1) // 10, 5)
    return f"{num_bytes / 1024**power:.1f} {' KMGTP'[power]}iB" if power else f"{int(num_bytes)} B"


def _ranges(numbers: Sequence[int]) -> str:
    runs = [
        [pair[1] for pair in run] for _, run in itertools.groupby(enumerate(numbers), lambda pair: pair[1] - pair[0])
    ]
    return listed([f"{run[0]}-{run[-1]}" if len(run) > 1 else f"{run[0]}" for run in runs], 4)


def _memories(replicas: Replicas) -> str:
    """The memory kinds of the devices, the default first. A device of another process may not list its memories."""
    default = str(replicas.replicated_sharding.memory_kind)
    kinds = ([memory.kind for memory in device.addressable_memories()] for device in replicas.mesh.devices.flat)
    return ", ".join(dict.fromkeys([default, *sorted(next(filter(None, kinds), []))]))


def _facts(replicas: Replicas) -> dict[str, str]:
    devices = list(replicas.mesh.devices.flat)
    kinds = collections.Counter(f"{device.device_kind} ({device.platform})" for device in devices)
    kind_counts = ", ".join(f"{count:,} of kind {kind}" for kind, count in kinds.items())
    ids_by_process: dict[int, list[int]] = {}
    for device in sorted(devices, key=lambda device: (device.process_index, device.id)):
        ids_by_process.setdefault(device.process_index, []).append(device.id)
    owners = listed([f"process {process} has {_ranges(ids)}" for process, ids in ids_by_process.items()], 8, "; ")
    placement = "over all devices" if replicas.batch_axes else "one per device"
    if replicas.model_axes:
        placement = f"one per {replicas.mesh.size // num_replica_devices(replicas.mesh)} devices"
    if replicas.virtual:
        placement = f"virtual, at most {replicas.max_per_device} per device"
    return {
        "mesh": " x ".join(f"{axis!r} {size:,}" for axis, size in replicas.mesh.shape.items()),
        "devices": f"{kind_counts}, memory: {_memories(replicas)}",
        "processes": f"{len(ids_by_process):,}" + (f"; {owners}" if len(ids_by_process) > 1 else ""),
        "replicas": f"{replicas.size:,}, {placement}",
    }


def _mesh_drawing(replicas: Replicas) -> str:
    devices = replicas.mesh.devices
    ids, processes = (
        np.vectorize(lambda device, of=of: getattr(device, of))(devices) for of in ("id", "process_index")
    )
    return draw_mesh(replicas.mesh.axis_names, ids, processes)
