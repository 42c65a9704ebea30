"""Explains the errors that JAX raises while a replica function is traced, in terms of the function's own arguments."""

import contextlib
import inspect
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import jax

from jdist._src.core import jax_compat, source_lines
from jdist._src.core.jax_compat import Jaxpr
from jdist._src.core.tree import PyTree, add_note_once, describe_tree, short_line

_UNKNOWN_VALUE = (
    jax.errors.ConcretizationTypeError,
    jax.errors.TracerArrayConversionError,
    jax.errors.TracerBoolConversionError,
    jax.errors.TracerIntegerConversionError,
)
_SELECTS_CODE = (jax.errors.TracerBoolConversionError, jax.errors.TracerIntegerConversionError)
_FORMAT = "Tracer.__format__"  # in the message for a traced value in an f-string
# JAX's messages name the arguments of the function that it traced: `given[0]`, of `one_replica` in `execution/replicate.py`.
_ARGUMENT = re.compile(r"value of the arguments? .*?\bgiven\[(\d+)\]")

# Attributes of `jdist.PerReplica` and the other wrappers, which a replica function does not receive.
_WRAPPER_ATTRIBUTE = re.compile(
    r"^'?(\w*Tracer|tuple|list|dict)'?(?: object)? has no attribute '?(tree|values|read|map|padded|aggregation|assign\w*)'?"
)
_UNBOUND_AXIS = re.compile(r"unbound axis name: (\w+)")


@contextlib.contextmanager
def explain_trace_errors(names: Sequence[str], mesh: jax.sharding.Mesh, axes: Sequence[str]) -> Iterator[None]:
    """Replaces JAX's errors about traced values, and about captured sharded arrays, by errors that name them.

    Args:
        names: The names of the arguments, in the order of the traced function's `given`.
        mesh: The mesh of the strategy.
        axes: The mesh axes of the replicas.

    Raises:
        TypeError: Python code needs the value of a traced array.
        IndexError: A traced mask is an index, so that the shape of the result depends on values.
        ValueError: The function closes over an array that is sharded over the mesh, or maps over a mesh that it does not have.
        AttributeError: The function reads an attribute of a wrapper.
        NameError: The function names a mesh axis that the replicas do not have.
    """
    try:
        yield
    except NameError as error:
        unbound = _UNBOUND_AXIS.search(str(error))
        if not unbound:
            raise
        raise NameError(
            f"{_place(error)} uses the axis {unbound[1]!r}, and the replicas of this strategy have the axis "
            f"{' and '.join(map(repr, axes))}. Use `jdist.all_reduce`, which needs no name, or the name of the axis. A "
            f'strategy with `axis_name="{unbound[1]}"` takes the function as it is.'
        ) from error
    except jax.errors.NonConcreteBooleanIndexError as error:
        raise IndexError(
            f"{_place(error)} selects elements by a mask that is not known when the function is traced, so the shape of the "
            "result is not known. Keep the shape: `jnp.where(mask, x, 0)`, or weights, `jdist.global_mean(values, "
            "weights=mask)`."
        ) from error
    except AttributeError as error:
        if "AbstractRef" in str(error):  # `shard_map` refuses it
            raise TypeError(_CAPTURED_REF) from error
        attribute = _WRAPPER_ATTRIBUTE.match(str(error))
        if not attribute:
            raise
        raise AttributeError(
            f"{_place(error)} reads `.{attribute[2]}` of a value that has no wrapper there: a replica function receives the "
            "values of one replica, without `jdist.PerReplica`, `jdist.SyncOnRead` and the other wrappers. Use the value as it "
            "is. The state that a step returns gets its wrappers again."
        ) from error
    except TypeError as error:
        if not isinstance(error, _UNKNOWN_VALUE) and _FORMAT not in str(error) and not _ARGUMENT.search(str(error)):
            raise
        raise TypeError(_unknown_value(error, names)) from error
    except ValueError as error:
        if "context mesh cannot be empty" in str(error):
            raise ValueError(
                f"{_place(error)} calls `jax.shard_map` without `mesh=`, and under this strategy one replica has no mesh. Use "
                '`jdist.MirroredStrategy(mesh=Mesh(devices, ("replica", "model")))` without `virtual_replicas`, or call the '
                'function of one device where `"model" in jax.sharding.get_abstract_mesh().axis_names` is False.'
            ) from error
        if "should match the mesh" not in str(error):
            raise
        raise ValueError(
            f"{_place(error)} uses an array that the function closes over and that is sharded over the mesh "
            f"{dict(mesh.shape)}. Inside a replica function JAX cannot represent its sharding. Pass it as an argument: a "
            "replicated array as it is, an array `[replica, ...]` in `jdist.PerReplica(x)`."
        ) from error


_CAPTURED_REF = (
    "The function closes over a `jax.Ref`, which has no placement on several devices. Pass its value, `ref[...]`, as an "
    "argument, and return the new value."
)


def check_no_captured_ref(program: Jaxpr) -> None:
    """Raises TypeError if a traced function closes over a mutable reference."""
    if any(map(jax_compat.is_ref, program.constvars)):
        raise TypeError(_CAPTURED_REF)


def check_no_callback(program: Jaxpr, axes: Sequence[str]) -> None:
    """Raises NotImplementedError if a function that XLA partitions over `axes` calls Python code outside a `shard_map`."""
    for equation in program.eqns:
        name = equation.primitive.name
        if name in ("pure_callback", "io_callback"):
            module = "jax.experimental" if name == "io_callback" else "jax"
            raise NotImplementedError(
                f"`{module}.{name}` at {source_lines.equation_frame(equation)}: jax {jax.__version__} "
                f"cannot partition a callback over the devices of a replica. Call it in a `jax.shard_map` "
                f"with `axis_names={{{', '.join(map(repr, axes))}}}`, or outside the step."
            )
        if name != "shard_map":
            for inner in jax_compat.contents(equation).jaxprs:
                check_no_callback(inner, axes)


class _Call(Protocol):
    """The attributes of a call of the user's function that a note names."""

    @property
    def fn(self) -> Callable[..., Any]:
        """The function."""
        ...

    def named_arguments(self) -> list[tuple[str, PyTree]]:
        """Returns the name and the value of each argument."""
        ...


@contextlib.contextmanager
def note_arguments(call: _Call, num_replicas: int) -> Iterator[None]:
    """Adds a note to an error in the function of the user: its arguments, which are the part of one replica.

    The shapes in such an error are the shapes of the part, and the user passed the shapes of the global batch.
    """
    try:
        yield
    except Exception as error:
        arguments = ", ".join(f"{name} {describe_tree(value)}" for name, value in call.named_arguments())
        part = (
            "the only replica, with the complete batch"
            if num_replicas == 1
            else f"one of {num_replicas} replicas, with its part of the batch"
        )
        add_note_once(
            error, f"While `{_name_of(call.fn)}` was traced for {part}: {short_line(arguments or 'no arguments', 500)}."
        )
        if isinstance(error, TypeError) and "positional argument" in str(error):
            _note_number_of_arguments(error, call)
        raise


def _note_number_of_arguments(error: TypeError, call: _Call) -> None:
    """Adds a note to an error if the function of the user takes another number of arguments."""
    arguments = call.named_arguments()
    try:
        signature = inspect.signature(call.fn)
    except ValueError:  # of a function that is not written in Python
        return
    try:
        signature.bind(*(value for _, value in arguments))
    except TypeError:
        add_note_once(
            error,
            f"`{_name_of(call.fn)}{signature}` was called with {len(arguments)} argument{'s' * (len(arguments) != 1)}. "
            "A batch is one argument, `step(state, batch)`, or several, `step(state, *batch)`.",
        )


def _name_of(fn: Any) -> str:
    return getattr(inspect.unwrap(fn), "__name__", type(fn).__name__)


def _unknown_value(error: Exception, names: Sequence[str]) -> str:
    arguments = [
        names[int(number)] for number in re.findall(r"\bgiven\[(\d+)\]", str(error)) if int(number) < len(names)
    ]
    if arguments:
        value = "a value computed from " + ", ".join(f"`{name}`" for name in dict.fromkeys(arguments))
        advice = (
            "If it selects code, do not pass it as an argument: close over it, or bind it with `functools.partial(fn, "
            "name=value)`; otherwise use `jax.lax.cond` or `jnp.where`."
        )
    elif "replica_id" in str(error):
        value = "the replica index"
        advice = (
            "Use `jax.lax.cond(jdist.replica_id() == 0, ...)` or `jnp.where`; do printing, logging and saving on the host, "
            "with what `strategy.run` returns."
        )
    else:
        value = "a traced value"
        advice = "Use `jax.lax.cond` or `jnp.where`, or compute it on the host and close over it."
    if not isinstance(error, _SELECTS_CODE) and (isinstance(error, _UNKNOWN_VALUE) or _FORMAT in str(error)):
        advice = (
            "To log a value, return it from the function and convert it after the call, `float(loss)`, or print it within the "
            f"function with `jax.debug.print`. {advice}"
        )
    return (
        f"{_place(error)} needs {value} as a Python value (in an `if`, an index, `float()`, an f-string or a numpy function), "
        f"but a replica function is traced before any value is known. {advice}"
    )


def _place(error: Exception) -> str:
    line = source_lines.error_frame(error)
    return f"{line} in {line.function}" if line else "The function"
