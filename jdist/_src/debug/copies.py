"""Compares the copies of replicated values between devices and processes.

Read `start_comparison` first. It launches one program per mesh, and `Comparison.differences` reads the result: a loop can
take steps in between.
"""

import collections
import dataclasses
import zlib
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import core
from jax.sharding import Mesh

from jdist._src.core import activity, jax_compat
from jdist._src.core.nn_modules import leaves_with_path, to_array_tree
from jdist._src.core.trace_key import outside_mesh
from jdist._src.core.tree import PyTree, dtype_and_shape, has_dtype
from jdist._src.debug.checksums import checksum, checksum_program, devices_of_parts, on_named_mesh
from jdist._src.devices.dispatch import is_bounded, record_call, wait_for_previous
from jdist._src.values.array_checks import (
    check_array,
    check_not_deleted,
    is_in_host_memory,
    is_on_mesh,
    mesh_of,
)
from jdist._src.values.base import is_distributed, named_values
from jdist._src.values.mirrored import Mirrored
from jdist._src.values.process_calls import (
    digests_of,
    exchange_call,
    find_difference,
    launches_on,
    post_failure,
    processes_of,
    processes_text,
)
from jdist._src.values.remote_array import RemoteArray
from jdist._src.values.sharded import Sharded

_CALL = "the comparison of the copies of replicated values"
_MOST_NAMED = 4  # differences in a message


class Difference(NamedTuple):
    """A leaf whose copies differ.

    Attributes:
        leaf: The path of the leaf.
        devices: The devices whose copies differ from the majority of the copies of the same part; all devices that hold this
            part if no majority is equal. Empty for a host value.
        processes: The processes of these devices, or that pass another host value than the majority.
        has_majority: Whether more than half of the copies are equal.
    """

    leaf: str
    devices: tuple[jax.Device, ...]
    processes: tuple[int, ...]
    has_majority: bool


class CopiesDifferError(RuntimeError):
    """The copies of a replicated value differ between devices or processes.

    Attributes:
        differences: A `Difference` per leaf and per part of it whose copies differ.
    """

    def __init__(self, message: str, differences: Sequence[Difference]):
        super().__init__(message)
        self.differences = tuple(differences)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (*self.args, ())  # devices cannot be pickled


def check_replicated(tree: PyTree) -> None:
    """Raises `CopiesDifferError` if the copies of a replicated value differ in a bit, on any device or process.

    A proof at trace time (`step.proof`) cannot exclude defective memory, wrong kernels, or a process that changes its copy. The
    devices compute a checksum of each copy, and 4 bytes per leaf and device are sent. Each single flipped bit is found. Other
    differences are missed with a probability of 2**-32.

    It compares replicated arrays; the parts of a sharded array that several devices hold, as on a mesh with an axis that the
    array is not sharded over; and with several processes host values, and arrays on a device of this process only. It ignores
    values that may differ (`jdist.PerReplica`, `jdist.SyncOnRead`), and arrays on parameter servers, which have one copy.

    With several processes, all that hold arrays of the tree have to call it, with trees of one structure; all of them raise the
    same error. The first call for a tree of these shapes compiles a program.

    Args:
        tree: A tree of arrays, host values, distributed values and modules: a state, for example.

    Raises:
        CopiesDifferError: Copies differ. The message names the leaves, devices and processes; `error.differences` lists them.
        TypeError: A leaf is not an array or a number.
        ValueError: An array was donated, or the processes pass trees of different structures.
        RuntimeError: Called while JAX traces a function.

    Example:
        >>> strategy = jdist.MirroredStrategy(["cpu:0", "cpu:1", "cpu:2"])
        >>> state = strategy.put({"w": np.zeros(4, np.float32)})
        >>> jdist.debug.check_replicated(state)
        >>> blocks = [shard.data for shard in state["w"].addressable_shards]
        >>> blocks[1] = blocks[1].at[2].set(-0.0)
        >>> state["w"] = jax.make_array_from_single_device_arrays(
        ...     (4,), state["w"].sharding, blocks
        ... )
        >>> jdist.debug.check_replicated(state)
        Traceback (most recent call last):
        jdist.debug.CopiesDifferError: The copies of ['w'] float32[4] differ: cpu:1 ...
    """
    raise_differences(start_comparison(tree))


class _Leaf(NamedTuple):
    """A leaf of the tree.

    Attributes:
        name: Its path.
        value: Its value.
        place: The mesh of an array with copies on several devices; "process" for a value that each process holds; else None.
    """

    name: str
    value: Any
    place: Mesh | str | None

    @property
    def text(self) -> str:
        kind = dtype_and_shape(self.value) if has_dtype(self.value) else type(self.value).__name__
        return f"{self.name} {kind}"


@dataclasses.dataclass(frozen=True)
class _Copies:
    """The checksums of leaves over one mesh, while the devices compute them.

    Attributes:
        leaves: The text of each leaf.
        parts: For each leaf, the positions in the mesh of the devices of each part.
        devices: The devices of the mesh.
        table: The checksums, `[device, leaf]`.
    """

    leaves: Sequence[tuple[str, str]]
    parts: Sequence[Sequence[Sequence[int]]]
    devices: Sequence[jax.Device]
    table: jax.Array

    def differences(self) -> Iterable[tuple[str, Difference]]:
        """Yields the text of a leaf and its difference."""
        with jax.transfer_guard_device_to_host("allow"):
            table = np.asarray(self.table.addressable_data(0))
        for number in np.flatnonzero((table != table[:1]).any(axis=0)).tolist():
            name, text = self.leaves[number]
            for part in self.parts[number]:
                for wrong, has_majority in _minority(table[part, number]):
                    devices = tuple(self.devices[part[i]] for i in wrong)
                    processes = tuple(sorted({device.process_index for device in devices}))
                    places = ", ".join(self._place(part[i]) for i in wrong)
                    if has_majority:
                        verdict = f"{places} differs from the other {len(part) - len(wrong)} copies"
                        verdict = verdict if len(wrong) == 1 else verdict.replace(" differs", " differ")
                    else:
                        verdict = f"no majority of {places} is equal"
                    yield f"{text} differ: {verdict}", Difference(name, devices, processes, has_majority)

    def _place(self, position: int) -> str:
        device = self.devices[position]
        return f"{device} (device {position} of the mesh, process {device.process_index})"


@dataclasses.dataclass(frozen=True)
class Comparison:
    """A comparison of copies, which devices compute.

    Attributes:
        copies: Per mesh, the checksums of its arrays.
        between_processes: The text of a value that differs between the processes, and its difference.
        structure: The names, dtypes, shapes and shardings of the leaves, which are equal on all processes.
    """

    copies: Sequence[_Copies]
    between_processes: Sequence[tuple[str, Difference]]
    structure: Any

    def differences(self) -> list[tuple[str, Difference]]:
        """Waits for the checksums, and returns a text and a `Difference` per leaf whose copies differ."""
        return [*self.between_processes, *(pair for copies in self.copies for pair in copies.differences())]


def start_comparison(tree: PyTree, root: str = "", compared: Any = None) -> Comparison:
    """Starts the comparison of a tree. See `check_replicated`.

    Args:
        tree: The tree.
        root: The name of the tree in messages.
        compared: The structure of an earlier comparison, which the processes do not compare again.
    """
    if jax_compat.is_tracing():
        raise RuntimeError(
            "The copies of values that are traced cannot be compared. Call `jdist.debug.check_replicated` outside `jax.jit` "
            "and replica functions, with the state that the step returns."
        )
    nodes = leaves_with_path(to_array_tree(tree), is_leaf=is_distributed)
    pairs = [
        pair
        for path, node in nodes
        if not is_distributed(node) or isinstance(node, (Mirrored, Sharded))
        for pair in named_values(root + jax.tree_util.keystr(path), node)
    ]
    meshes = [mesh_of(value) for _, value in pairs if is_on_mesh(value)]
    processes = sorted({process for mesh in set(meshes) for process in processes_of(mesh)})
    processes = tuple(processes or range(jax.process_count()))
    has_others = processes != (jax.process_index(),)  # other processes than this one hold the tree
    try:
        leaves = [_leaf(name or "the value", value, has_others) for name, value in pairs]
    except Exception as error:
        if has_others:
            post_failure(f"{_CALL} failed on process {jax.process_index()}: {error}", processes)
        raise
    structure = [f"{leaf.text} {_sharding_text(leaf)}" for leaf in leaves]
    of_processes = [leaf for leaf in leaves if leaf.place == "process"]
    between_processes: list[tuple[str, Difference]] = []
    if has_others and (of_processes or structure != compared):
        between_processes = _compare_processes(structure, of_processes, processes)
    groups: dict[Any, list[_Leaf]] = {}
    for number, leaf in enumerate(leaves):
        if isinstance(leaf.place, Mesh):
            # An array in host memory has its own program: several of them may be too large for the memory of the devices.
            groups.setdefault((leaf.place, number if is_in_host_memory(leaf.value) else None), []).append(leaf)
    with outside_mesh(), jax.disable_jit(False):
        copies = [_start_checksums(mesh, group) for (mesh, _), group in groups.items()]
    return Comparison(copies, between_processes, structure)


def raise_differences(comparison: Comparison, after: str = "") -> None:
    """Waits for a comparison, and raises its differences.

    Args:
        comparison: The result of `start_comparison`.
        after: The time of the comparison, for the message: " after step 100".

    Raises:
        CopiesDifferError: Copies differ.
    """
    differences = comparison.differences()
    if not differences:
        return
    named = "; of ".join(text for text, _ in differences[:_MOST_NAMED])
    more = f"; and of {len(differences) - _MOST_NAMED} more" if len(differences) > _MOST_NAMED else ""
    raise CopiesDifferError(
        f"The copies of {named}{more}{after}. They have to be equal in every bit. Continue from a checkpoint that was saved "
        "before, and look for a process that changes its own copy. If the same device differs again, its memory or its "
        "arithmetic may be defective: leave it out.",
        [difference for _, difference in differences],
    )


def _leaf(name: str, value: Any, has_others: bool) -> _Leaf:
    if isinstance(value, core.Tracer):
        raise RuntimeError(f"{name} is a traced value, which has left the function that JAX traced.")
    if isinstance(value, RemoteArray):
        return _Leaf(name, value, None)
    if not isinstance(value, jax.Array):
        check_array(name, value)
        return _Leaf(name, value, "process" if has_others else None)
    check_not_deleted(name, value)
    if value.is_fully_addressable and has_others:
        return _Leaf(name, value, "process")
    if len(value.sharding.device_set) == 1:
        return _Leaf(name, value, None)
    return _Leaf(name, value, mesh_of(on_named_mesh(value)))


def _sharding_text(leaf: _Leaf) -> str:
    if not isinstance(leaf.place, Mesh):
        return str(leaf.place)
    return f"{getattr(leaf.value.sharding, 'spec', '')} over {dict(leaf.place.shape)}"


def _compare_processes(
    structure: Sequence[str], leaves: Sequence[_Leaf], processes: tuple[int, ...]
) -> list[tuple[str, Difference]]:
    """Returns a text and a `Difference` per value that differs between the processes.

    Raises:
        ValueError: The processes compare trees of different structures.
    """
    facts = {"leaves": structure}
    message = {"digests": digests_of(facts), "values": [_host_checksum(leaf.value) for leaf in leaves]}
    messages = exchange_call(_CALL, message, processes)
    difference = find_difference(_CALL, facts, messages, processes)
    if difference is not None:
        only = sorted(set(difference.value) ^ set(difference.other_value)) or ["the order of the leaves"]
        raise ValueError(
            f"The processes compare trees of different structures: {processes_text(difference.others)} differ"
            f"{'s' * (len(difference.others) == 1)} from process {difference.first} in {', '.join(only[:_MOST_NAMED])}. Pass "
            "the same tree on every process."
        )
    differences: list[tuple[str, Difference]] = []
    for leaf, values in zip(leaves, zip(*(message["values"] for message in messages), strict=True), strict=True):
        for wrong, has_majority in _minority(np.array(values, np.uint32)):
            others = tuple(processes[i] for i in wrong)
            verdict = "from the majority" if has_majority else "from each other, and no majority is equal"
            text = f"{leaf.text} differ: {processes_text(others)} differ{'s' * (len(others) == 1)} {verdict}"
            differences.append((text, Difference(leaf.name, (), others, has_majority)))
    return differences


def _host_checksum(value: Any) -> int:
    """Returns a checksum of a value of this process; of an array on several of its devices, of all different copies."""
    if isinstance(value, jax.Array):
        copies = {(str(shard.index), int(_checksum(shard.data))) for shard in value.addressable_shards}
        return zlib.crc32(repr(sorted(copies)).encode())
    array = np.asarray(value)
    return zlib.crc32(repr(value).encode() if array.dtype.hasobject else array.tobytes())


_checksum = jax.jit(checksum)


def _start_checksums(mesh: Mesh, leaves: Sequence[_Leaf]) -> _Copies:
    arrays = [on_named_mesh(leaf.value) for leaf in leaves]
    program: Any = checksum_program(mesh, tuple(x.sharding.spec for x in arrays))  # pyright: ignore[reportAttributeAccessIssue]
    if is_bounded(mesh):
        wait_for_previous()
    if len(processes_of(mesh)) > 1:
        label = activity.Label(_CALL, launches=launches_on(mesh), is_collective=True)
        table = activity.launch(label, program, *arrays)
    else:
        table = program(*arrays)
    if is_bounded(mesh):
        record_call([table], 0)
    devices = list(mesh.devices.flat)
    positions = {device: position for position, device in enumerate(devices)}
    parts = [
        [[positions[device] for device in part] for part in devices_of_parts(leaf.value.sharding, leaf.value.shape)]
        for leaf in leaves
    ]
    return _Copies([(leaf.name, leaf.text) for leaf in leaves], parts, devices, table)


def _minority(checksums: np.ndarray) -> Iterable[tuple[list[int], bool]]:
    """Yields the positions of the copies that differ from the majority, or of all without one; nothing if all are equal."""
    ((most_frequent, count),) = collections.Counter(checksums.tolist()).most_common(1)
    if count == len(checksums):
        return
    has_majority = 2 * count > len(checksums)
    yield [i for i, value in enumerate(checksums) if not has_majority or value != most_frequent], has_majority
