"""Records the functions that a program maps over devices with `jax.pmap` and `jax.shard_map`, each as a pair of jaxprs.

`local` is the function of one device. `single` is the same Python function, traced as if there were a single device: every
manual mesh axis has size 1, and every operand has its global shape. Analyses compare the two. The program that is recorded
runs unchanged: both traces are made before its own, and an exception in them becomes the `reason` of the record.

Functions under `jax.jit` with shardings are recorded as well, without jaxprs: they are one program in the global view.
"""

import contextlib
import dataclasses
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jdist._src.core import jax_compat, source_lines
from jdist._src.core.jax_compat import Equation, JitCall, MapBinding, TracedBody
from jdist._src.core.source_lines import Frame
from jdist._src.core.trace_key import keyed
from jdist._src.core.tree import one_line, short_line
from jdist._src.jaxpr.interpreter import all_equations
from jdist._src.jaxpr.program_fingerprint import lines_of


@dataclasses.dataclass(frozen=True)
class Operand:
    """An operand of a mapped function.

    Attributes:
        name: The user's name for it: `batch['image']`.
        splits: The mesh axes that each dimension is split over.
        per_device: The mesh axes along which the operand has one value per device that is not a part of a larger array: random
            keys and numbers.
    """

    name: str
    splits: Mapping[int, tuple[str, ...]] = dataclasses.field(default_factory=dict)
    per_device: tuple[str, ...] = ()

    @property
    def axes(self) -> tuple[str, ...]:
        """The mesh axes along which it may vary."""
        return tuple(dict.fromkeys([axis for axes in self.splits.values() for axis in axes] + list(self.per_device)))


@dataclasses.dataclass(frozen=True)
class Result:
    """A result of a mapped function.

    Attributes:
        name: Its name: `output[0]['w']`.
        splits: The mesh axes that each dimension is split over. Empty for a result of `pmap`, which stacks one per device.
        replicated_over: The mesh axes over which it must be replicated.
    """

    name: str
    splits: Mapping[int, tuple[str, ...]]
    replicated_over: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class MappedFunction:
    """A function that a program maps over devices.

    Attributes:
        kind: `"pmap"`, `"shard_map"`, or `"jit"` for one in the global view, which has no jaxprs.
        name: The name of the function.
        definition: The file and line of the function, or "".
        line: The user's line that calls it.
        axes: The mesh axes that are manual in the function, with their sizes.
        operands: The inputs of the jaxprs. The first ones are values that the function captures, which are replicated.
        results: The outputs of the jaxprs.
        checked_by_jax: Whether JAX has proved that the results are replicated (`check_vma=True`).
        local: The closed jaxpr of one device, or None if the function could not be traced.
        single: The closed jaxpr of a single device with the global shapes, or None if it could not be traced.
        reason: Why `local` or `single` is None, on one line; else empty.
    """

    kind: str
    name: str
    definition: str
    line: Frame | None
    axes: Mapping[str, int] = dataclasses.field(default_factory=dict)
    operands: tuple[Operand, ...] = ()
    results: tuple[Result, ...] = ()
    checked_by_jax: bool = False
    local: Any = None
    single: Any = None
    reason: str = ""


@contextlib.contextmanager
def record_mapped_functions() -> Iterator[list[MappedFunction]]:
    """Records the functions that this thread maps over devices while the block runs, each program once, in a list.

    Functions that were traced before the block are traced again.
    """
    recorder = _Recorder()
    with (
        keyed(object()),
        jax_compat.on_mapped_call(recorder.note_mapped),
        jax_compat.on_jit_call(recorder.note_jit),
    ):
        try:
            yield recorder.functions
        finally:
            recorder.add_global_views()


class _Recorder:
    """Traces the functions that are mapped.

    Attributes:
        functions: The records.
    """

    def __init__(self) -> None:
        self.functions: list[MappedFunction] = []
        self._calls: list[tuple[Any, ...]] = []  # that were recorded
        self._programs: set[tuple[Any, ...]] = set()
        self._jit_calls: list[tuple[JitCall, Frame | None]] = []
        self._is_tracing = False
        self._caller = source_lines.caller_frame()

    def _call_line(self) -> Frame | None:
        """Returns the user's line of the current call; None if it is the line that started the recording, as `jdist.check`."""
        line = source_lines.caller_frame()
        return None if line == self._caller else line

    def note_mapped(self, read: Callable[[], MapBinding | None]) -> None:
        """Records the call of a mapped function."""
        if self._is_tracing:
            return
        self._is_tracing = True
        try:
            with keyed(object()):
                function = self._record(read)
        except Exception as error:  # a version of JAX that binds it in another way
            reason = f"jdist cannot read this call: {error_line(error)}"
            function = MappedFunction("shard_map", "unknown function", "", self._call_line(), reason=reason)
        finally:
            self._is_tracing = False
        if function is not None and (key := _program_key(function)) not in self._programs:
            self._programs.add(key)
            self.functions.append(function)

    def _record(self, read: Callable[[], MapBinding | None]) -> MappedFunction | None:
        binding: MapBinding | None = read()
        if binding is None:
            return None
        # Python functions are compared by identity, and stay alive here.
        call = (binding.function, binding.operands, binding.specs, tuple(binding.axis_sizes.items()))
        if any(call[0] is other[0] and call[1:] == other[1:] for other in self._calls):
            return None
        self._calls.append(call)
        return _mapped_function(binding, self._call_line())

    def note_jit(self, read: Callable[[], JitCall]) -> None:
        """Notes a call of a user's function under `jax.jit`."""
        if self._is_tracing:
            return
        with contextlib.suppress(Exception):  # a version of JAX that calls it in another way: it has no findings
            call = read()
            place = Frame(call.file, call.line, call.name)
            if source_lines.user_frame([place]) and source_lines.is_user_frame(place):  # not of JAX or another library
                self._jit_calls.append((call, self._call_line()))

    def add_global_views(self) -> None:
        """Adds the functions under `jax.jit` with shardings that contain no `shard_map` and are not inside another one."""
        equations = [list(all_equations(jax_compat.open_jaxpr(call.program))) for call, _ in self._jit_calls]
        inside = {id(jax_compat.jit_program(one)) for each in equations for one in each}
        places = set()
        for (call, line), each in zip(self._jit_calls, equations, strict=True):
            place = f"{call.file}:{call.line}"
            if id(call.program) in inside or place in places or not _has_shardings(call, each):
                continue
            if all(one.primitive.name != "shard_map" for one in each):
                places.add(place)
                self.functions.append(MappedFunction("jit", call.name, place, line))


def _has_shardings(call: JitCall, equations: Iterable[Equation]) -> bool:
    constraints = (sharding for one in equations if (sharding := jax_compat.constraint_sharding(one)) is not None)
    return any(sharding.num_devices > 1 for sharding in (*call.shardings, *constraints))


def error_line(error: BaseException) -> str:
    """Returns the type and the first line of an exception."""
    text = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    return short_line(f"{type(error).__name__}: {text}" if text else type(error).__name__, 200)


@contextlib.contextmanager
def _without_warnings() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _program_key(function: MappedFunction) -> tuple[Any, ...]:
    local = tuple(line.text for line in lines_of(function.local)) if function.local is not None else ()
    places = function.kind, function.name, function.definition, str(function.line)
    operands = tuple((one.name, tuple(one.splits.items()), one.per_device) for one in function.operands)
    return *places, tuple(function.axes.items()), operands, function.reason, local


def _mapped_function(binding: MapBinding, line: Frame | None) -> MappedFunction:
    name, _, definition = binding.source.rpartition(" at ")
    function = MappedFunction(
        binding.kind,
        (name or binding.source or type(binding.function).__name__).rpartition(".")[2],
        definition,
        line,
        binding.axis_sizes,
        checked_by_jax=binding.check_vma,
    )
    count = len(binding.operands)
    names = binding.names if len(binding.names) == count else [f"operand {number}" for number in range(count)]
    try:
        with _without_warnings():
            local = binding.trace(binding.operands, False)
    except Exception as error:
        return dataclasses.replace(function, reason=f"cannot be traced: {error_line(error)}")
    if binding.kind == "pmap":
        states, results = _states(binding, local)
        operands = _pmap_operands(binding, names, states)
        global_types = [
            _global_type(*pair, binding.axis_sizes) for pair in zip(binding.operands, operands, strict=True)
        ]
    else:
        operands = [Operand(name, _splits(spec)) for name, spec in zip(names, binding.specs, strict=True)]
        results = [_result(name, spec, binding) for name, spec in _named_specs(local)]
        global_types = list(binding.operands)
    single, reason = None, ""
    try:
        with _without_warnings(), jax_compat.one_device():
            single = binding.trace(global_types, True)
        reason = _difference(local, single)
    except Exception as error:
        reason = f"cannot be traced for the global shapes: {error_line(error)}"
    programs = [local.program] if single is None or reason else [local.program, single.program]
    programs, num_captured = jax_compat.captures_as_inputs(programs)
    captured = [Operand(f"captured value {number}") for number in range(num_captured)]
    return dataclasses.replace(
        function,
        operands=(*captured, *operands),
        results=tuple(results),
        local=programs[0],
        single=programs[1] if len(programs) > 1 else None,
        reason=reason,
    )


def _difference(local: TracedBody, single: TracedBody) -> str:
    """Returns why the traces cannot be compared, or ""."""
    structures = jax.tree.structure(local.results), jax.tree.structure(single.results)
    if structures[0] != structures[1]:
        return f"for the global shapes it returns another structure: {one_line(structures[1])}"
    return ""


def _named_specs(body: TracedBody) -> list[tuple[str, Any]]:
    paths = [path for path, _ in jax.tree_util.tree_flatten_with_path(body.results)[0]]
    return [(f"output{jax.tree_util.keystr(path)}", spec) for path, spec in zip(paths, body.specs, strict=True)]


def _splits(spec: Any) -> dict[int, tuple[str, ...]]:
    """Returns the mesh axes of each dimension that a `PartitionSpec` splits."""
    entries = ((dim, (entry,) if isinstance(entry, str) else entry) for dim, entry in enumerate(spec))
    return {dim: tuple(entry) for dim, entry in entries if isinstance(entry, tuple) and entry}


def _result(name: str, spec: Any, binding: MapBinding) -> Result:
    splits = _splits(spec)
    split_axes = {axis for axes in splits.values() for axis in axes}
    return Result(name, splits, tuple(axis for axis in binding.axis_sizes if axis not in split_axes))


# pmap: operands and results have a dimension for the devices, which contains parts of a batch or copies of a state.


def _states(binding: MapBinding, local: TracedBody) -> tuple[frozenset[int], list[Result]]:
    """Returns the numbers of the operands that are copies of a state, and the results."""
    elements = local.results if _is_tuple(local.results) else (local.results,)
    types = dict(enumerate(binding.operands))
    args, kwargs = binding.arguments
    arguments = [jax.tree.map(types.__getitem__, one) for one in (*args, *kwargs.values())]
    numbers = [frozenset(jax.tree.leaves(one)) for one in (*args, *kwargs.values())]
    mapped = frozenset(number for number, spec in enumerate(binding.specs) if _splits(spec))
    states: set[int] = set()
    state_elements: set[int] = set()
    is_state = len(elements) > 1 and any(_same_types(one, local.results) for one in arguments)
    if is_state:
        states |= _first_match(arguments, numbers, local.results)
        state_elements |= set(range(len(elements)))
    for position, element in enumerate(elements):
        # Of the elements after the first, trees only: an array may be a prediction with the shape of the inputs.
        matched = _first_match(arguments, numbers, element, taken=states) if _may_be_state(position, element) else ()
        if matched:
            states |= set(matched)
            state_elements.add(position)
    available = {(kind.shape, kind.dtype) for kind in jax.tree.leaves(local.results)}
    for members in numbers:
        is_donated = members and all(binding.donated[number] for number in members)
        if is_donated and all((types[number].shape, types[number].dtype) in available for number in members):
            states |= members
    if mapped <= states and jax.tree.structure(elements[0]).num_nodes == 1 and not any(binding.donated):
        states, state_elements = set(), set()  # an array to an array: without a batch, it is one
    names = _named_specs(local)
    tops = [number for number, element in enumerate(elements) for _ in jax.tree.leaves(element)]
    axes = tuple(binding.axis_sizes)
    return frozenset(states & mapped), [
        Result(name, {}, axes if top in state_elements or not _splits(spec) else ())
        for (name, spec), top in zip(names, tops, strict=True)
    ]


def _is_tuple(results: Any) -> bool:
    return type(results) in (tuple, list) and len(results) > 0


def _may_be_state(position: int, element: Any) -> bool:
    return bool(jax.tree.leaves(element)) and (position == 0 or jax.tree.structure(element).num_nodes > 1)


def _first_match(
    arguments: Sequence[Any], numbers: Sequence[frozenset[int]], element: Any, taken: Iterable[int] = ()
) -> frozenset[int]:
    """Returns the leaves of the first argument with the structure and the types of an element of the result."""
    taken = frozenset(taken)
    candidates = (
        members
        for argument, members in zip(arguments, numbers, strict=True)
        if members and not members & taken and _same_types(argument, element)
    )
    return next(candidates, frozenset())


def _same_types(first: Any, second: Any) -> bool:
    if jax.tree.structure(first) != jax.tree.structure(second):
        return False
    pairs = zip(jax.tree.leaves(first), jax.tree.leaves(second), strict=True)
    return all(one.shape == other.shape and one.dtype == other.dtype for one, other in pairs)


def _pmap_operands(binding: MapBinding, names: Sequence[str], states: frozenset[int]) -> list[Operand]:
    operands = []
    axes = tuple(binding.axis_sizes)
    for number, (name, kind, spec) in enumerate(zip(names, binding.operands, binding.specs, strict=True)):
        if not _splits(spec) or number in states:
            operands.append(Operand(name))
        elif not kind.shape or _is_key(kind):
            operands.append(Operand(name, per_device=axes))
        else:
            operands.append(Operand(name, {0: axes}))
    return operands


def _is_key(kind: Any) -> bool:
    is_raw = kind.shape == (2,) and kind.dtype == jnp.uint32
    return is_raw or jnp.issubdtype(kind.dtype, jax.dtypes.prng_key)


def _global_type(kind: jax.ShapeDtypeStruct, operand: Operand, axis_sizes: Mapping[str, int]) -> jax.ShapeDtypeStruct:
    shape = list(kind.shape)
    for dim, axes in operand.splits.items():
        for axis in axes:
            shape[dim] *= axis_sizes[axis]
    return jax.ShapeDtypeStruct(tuple(shape), kind.dtype, weak_type=kind.weak_type)
