"""Warns of steps that are compiled again, with the leaf that has changed, and of functions that a loop compiles again."""

import collections
import functools
import inspect
import types
import warnings
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
from jax import core
from jax.sharding import Sharding
from jax.tree_util import PyTreeDef

from jdist._src.core import source_lines
from jdist._src.core.arguments import function_name
from jdist._src.core.declared_shapes import are_declared
from jdist._src.core.errors import RetraceWarning
from jdist._src.core.source_lines import Frame
from jdist._src.core.tree import named_leaves, short_line
from jdist._src.execution.backend import Backend, ProgramSpec
from jdist._src.execution.compiled_function import CompiledFunction
from jdist._src.execution.stage import Stage
from jdist._src.execution.traced import Arguments, CallFn, LowerFn, Traced, TraceFn
from jdist._src.values.array_checks import is_device_array

_MANY_OF_STEP = 5  # programs
_MANY_OF_LINE = 20
_programs: weakref.WeakKeyDictionary[Backend, collections.Counter[Any]] = weakref.WeakKeyDictionary()


class _Aval(NamedTuple):
    """The properties of a leaf that select a traced program.

    Attributes:
        shape: The global shape.
        dtype: The name of the dtype.
        weak_type: Whether it is a Python number, or computed from Python numbers only.
    """

    shape: tuple[int, ...]
    dtype: str
    weak_type: bool

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.shape))}]{' of weak type' * self.weak_type}"


class _Signature(NamedTuple):
    """The arguments of a traced program.

    Attributes:
        leaves: The properties of each leaf, by name.
        structures: The structure of each argument, by name.
    """

    leaves: dict[str, _Aval]
    structures: dict[str, PyTreeDef]


class _Change(NamedTuple):
    """A difference between the arguments of two programs.

    Attributes:
        text: The leaf, before and after.
        advice: What to do.
    """

    text: str
    advice: str


class Retraces(Stage):
    """Warns if JAX traces a step again because its arguments have changed, or compiles it for another sharding.

    It runs while JAX traces, so other calls do not pay for it. It does not compare programs that `lower` traces, calls with
    another number of arguments, host values with arrays on devices, and shapes that a data set declares.

    Mutable: it stores the shapes, structures and shardings of the arguments of earlier programs.

    Args:
        spec: The program.
    """

    def __init__(self, spec: ProgramSpec):
        self._spec = spec
        self._is_lowering = False
        self._signatures: list[_Signature] = []
        self._shardings: list[dict[str, tuple[_Aval, Sharding]]] = []
        self._num_programs = 1

    def forget_arguments(self) -> None:
        """See `Stage`."""
        self._signatures, self._shardings = [], []

    def wrap_lower(self, lower: LowerFn, compiled: CompiledFunction) -> LowerFn:
        """See `Stage`."""

        def lower_quietly(args: Arguments) -> jax.stages.Lowered:
            self._is_lowering = True
            try:
                return lower(args)
            finally:
                self._is_lowering = False

        return lower_quietly

    def wrap_trace(self, trace: TraceFn) -> TraceFn:
        """See `Stage`. Nothing is compiled or donated yet, where a warning is an error."""

        def trace_compared(args: Arguments) -> Traced:
            traced = trace(args)
            if not self._is_lowering and any(isinstance(leaf, core.Tracer) for leaf in jax.tree.leaves(args)):
                self._compare(self._signature(args))
            return traced

        return trace_compared

    def wrap_call(self, call: CallFn, compiled: CompiledFunction) -> CallFn:
        """See `Stage`. JAX compiles a traced program for other shardings without tracing it."""
        compiled.on_new_signature.append(self._compare_shardings)
        return call

    def _signature(self, args: Arguments) -> _Signature:
        call = self._spec.user_call(args)
        structures = {name: jax.tree.structure(value) for name, value in call.named_arguments()}
        return _Signature({name: _aval(leaf) for name, leaf in call.leaves()}, structures)

    def _compare(self, new: _Signature) -> None:
        others = [old for old in self._signatures if old.structures.keys() == new.structures.keys()]
        if new in others:  # as after `jax.clear_caches`
            return
        self._signatures.append(new)
        changes = min((_changes(old, new) for old in reversed(others)), key=len, default=[])
        self._warn(changes, "is traced and compiled again")

    def _compare_shardings(self, args: Arguments) -> None:
        # Only the wrappers of the state are removed: a batch may be a part of an array that is not read yet.
        named = [*self._spec.user_call(args[:1]).leaves(), *named_leaves("inputs", args[1:])]
        leaves = {
            name: (_aval(leaf), leaf.sharding) for name, leaf in named if is_device_array(leaf) and leaf.committed
        }
        alike = [old for old in self._shardings if old.keys() == leaves.keys()]
        alike = [old for old in alike if all(old[name][0] == leaves[name][0] for name in leaves)]
        self._shardings.append(leaves)
        changes = min((_sharding_changes(old, leaves) for old in reversed(alike)), key=len, default=[])
        self._warn(changes, "is compiled again")

    def _warn(self, changes: list[_Change], event: str) -> None:
        if not changes:
            return
        self._num_programs += 1
        more = f" (and {len(changes) - 1} more leaves)" if len(changes) > 1 else ""
        count = f" These are {self._num_programs} programs of this step." if self._num_programs >= _MANY_OF_STEP else ""
        message = f"`{self._spec.name}` {event}: {changes[0].text}{more}.{count} {changes[0].advice}"
        source_lines.warn_at_caller(message, RetraceWarning)


def warn_of_many_programs(fn: Callable[..., Any], backend: Backend) -> None:
    """Warns once of a line that lets this backend compile one function again and again, such as a lambda in a loop."""
    inner: Any = inspect.unwrap(fn)
    while isinstance(inner, functools.partial):
        inner = inspect.unwrap(inner.func)
    code, place = getattr(inner, "__code__", None), source_lines.caller_frame()
    if (
        place is None
        or not isinstance(code, types.CodeType)
        or source_lines.is_in_jdist(Frame(code.co_filename, 0, ""))
    ):
        return
    counts = _programs.setdefault(backend, collections.Counter())
    counts[place, code] += 1
    if counts[place, code] == _MANY_OF_LINE:
        message = (
            f"{source_lines.code_at(place)} has compiled `{function_name(fn)}` {_MANY_OF_LINE} times: once for each function "
            "object, and for each value of a static argument. Define the function, or the step, once outside the loop, and "
            "pass values that change as arguments."
        )
        warnings.warn_explicit(message, RetraceWarning, place.file, place.line)


def _aval(leaf: Any) -> _Aval:
    aval = jax.typeof(leaf)
    return _Aval(aval.shape, str(aval.dtype), getattr(aval, "weak_type", False))


def _changes(old: _Signature, new: _Signature) -> list[_Change]:
    """Returns the differences between the arguments of two programs that are not declared; the most important first."""
    missing, added = (
        [name for name in one.leaves if name not in other.leaves] for one, other in ((old, new), (new, old))
    )
    changes = [_Change(f"{name} is missing", _STRUCTURE_ADVICE) for name in missing]
    changes += [_Change(f"{name} is new", _STRUCTURE_ADVICE) for name in added]
    for name, after in new.leaves.items():
        before = old.leaves.get(name, after)
        is_expected = before[1:] == after[1:] and are_declared(before.shape, after.shape)
        if before != after and not is_expected:
            changes.append(_Change(f"{name} is {after}, and was {before}", _advice(before, after)))
    if not changes and old.leaves == new.leaves:
        changes = [
            _Change(f"a static value in `{name}` is {after}, and was {before}", _STATIC_ADVICE)
            for name in new.structures
            for before, after in _static_difference(old.structures[name], new.structures[name])
        ]
    return changes


def _advice(before: _Aval, after: _Aval) -> str:
    if before.shape != after.shape:
        return _SHAPE_ADVICE
    return _DTYPE_ADVICE if before.dtype != after.dtype else _WEAK_TYPE_ADVICE


def _static_difference(old: PyTreeDef, new: PyTreeDef) -> list[tuple[str, str]]:
    """Returns the first node that differs between two structures, before and after."""
    if old == new:
        return []
    before, after = old.node_data(), new.node_data()
    if before != after or len(old.children()) != len(new.children()):
        if before is None or after is None or before[0] is not after[0]:
            return [(_node_text(before), _node_text(after))]
        name, (old_part, new_part) = _differing_part(before[1], after[1])
        node = f"`{before[0].__name__}` with {name}"
        return [(f"{node}{short_line(old_part, 100)}", f"{node}{short_line(new_part, 100)}")]
    pairs = zip(old.children(), new.children(), strict=True)
    return next((found for pair in pairs if (found := _static_difference(*pair))), [])


def _differing_part(before: Any, after: Any, names: Sequence[str] | None = None) -> tuple[str, tuple[Any, Any]]:
    """Returns the innermost part that differs between two static values, and `NAME=` if it is an attribute of an nnx module.

    The static values of an nnx module are a tuple with names of attributes and a tuple with their values.
    """
    is_tuple = isinstance(before, tuple) and isinstance(after, tuple) and len(before) == len(after)
    index = next((i for i, (a, b) in enumerate(zip(before, after, strict=True)) if a != b), None) if is_tuple else None
    if index is None:
        return "", (before, after)
    length = len(before[index]) if isinstance(before[index], tuple) else None
    is_names = lambda part: (
        isinstance(part, tuple) and len(part) == length and all(isinstance(one, str) for one in part)
    )
    inner_names = next((part for part in before[:index] if is_names(part)), None)
    name, values = _differing_part(before[index], after[index], inner_names)
    return (f"{names[index]}={name}" if names else name), values


def _node_text(node: tuple[type, Any] | None) -> str:
    return "a leaf" if node is None else f"`{node[0].__name__}` with {short_line(node[1], 100)}"


def _sharding_changes(old: dict[str, tuple[_Aval, Sharding]], new: dict[str, tuple[_Aval, Sharding]]) -> list[_Change]:
    return [
        _Change(f"the sharding of {name} is {short_line(after)}, and was {short_line(before)}", _SHARDING_ADVICE)
        for name, (aval, after) in new.items()
        if not (before := old[name][1]).is_equivalent_to(after, len(aval.shape))
    ]


_SHAPE_ADVICE = (
    'Pass arrays of one shape: `remainder="pad"` of `distribute_dataset` pads the last batch, and `jdist.data.Buckets` pads '
    "batches whose width varies to few widths."
)
_DTYPE_ADVICE = "Pass arrays of one dtype: cast them (`.astype`)."
_WEAK_TYPE_ADVICE = (
    "Pass an array with a dtype in each call, such as `np.float32(x)`. "
    "`strategy.put` gives the leaves of a state a dtype."
)
_STRUCTURE_ADVICE = "Pass arguments of one structure."
_STATIC_ADVICE = "Pass a value that changes as an array."
_SHARDING_ADVICE = (
    "Place the arguments as the step returns them: the state by `strategy.put`, a batch by `strategy.split`."
)
