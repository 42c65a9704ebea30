"""`debug.checked`: a function whose operations are checked for NaN, indices out of bounds and divisions by zero."""

import functools
from collections.abc import Callable, Collection, Iterable, Sequence
from contextvars import ContextVar
from typing import Any, ParamSpec, TypeVar

import jax
import jax.numpy as jnp
from jax.tree_util import PyTreeDef

from jdist._src.core import jax_compat
from jdist._src.core.arguments import check_callable
from jdist._src.core.source_lines import code_at, stack_frame
from jdist._src.core.tree import PyTree, one_line
from jdist._src.execution.compiled_function import CompiledFunction
from jdist._src.execution.stage import Stage
from jdist._src.execution.traced import Arguments, CallFn, ReplicaFn, Results, UserCall
from jdist._src.jaxpr.primitives import WAITING_FOR_GROUP
from jdist._src.replica.context import all_gather

InputsT = ParamSpec("InputsT")
ResultT = TypeVar("ResultT")

_CHECKS = {"nan": "nan_checks", "index": "index_checks", "division": "div_checks"}


class CheckError(RuntimeError):
    """A replica has computed a NaN, used an index out of bounds, divided by zero, or failed a `checkify.check`.

    Attributes:
        replicas: The indices of the replicas whose checks failed.
    """

    def __init__(self, message: str, replicas: Iterable[int]):
        super().__init__(message)
        self.replicas = tuple(replicas)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (*self.args, self.replicas)


def checked(
    fn: Callable[InputsT, ResultT], errors: Collection[str] = ("nan", "index", "division")
) -> Callable[InputsT, ResultT]:
    """Returns `fn` with checks of its operations: NaN, indices out of bounds, and divisions by zero.

    `strategy.step(checked(fn))` and `strategy.run(checked(fn), args)` raise a `CheckError` in the call in which a check fails.
    It names the replicas, the operation and the line of the code. The first failed check of a replica is reported. A step does
    not donate its state: after the error it can be inspected, and passed to the step again. With several processes, all of
    them raise the error. Each call waits for its results, and a checked program is slower. Without `checked` nothing changes.

    The checks are those of `jax.experimental.checkify`, whose `check(predicate, message)` can be used in `fn`. A call of
    `checked(fn)` outside a strategy is checked as well. Inside the function, gradients, `scan`, `cond` and `while_loop` are
    checked. Pass the result of one call of `checked` to `strategy.run`, which compiles a function once.

    Args:
        fn: A replica function, as `strategy.step` or `strategy.run` take it.
        errors: The checks: `"nan"`, `"index"`, `"division"`; or a set of errors of `checkify`, such as `checkify.float_checks`.

    Raises:
        TypeError: `fn` is not a function.
        ValueError: `errors` names a check that does not exist.

    Example:
        >>> strategy = jdist.MirroredStrategy(["cpu:0", "cpu:1"])
        >>> ratio = jdist.debug.checked(lambda x: x / jdist.replica_id())
        >>> strategy.run(ratio, (1.0,))
        Traceback (most recent call last):
        jdist.debug.CheckError: A check failed on replica 0: division by zero, in ...
    """
    check_callable(fn)
    return Checked(fn, errors)


class Checked:
    """A function with checks: the result of `jdist.debug.checked`.

    Args:
        fn: The function.
        errors: See `checked`.
    """

    def __init__(self, fn: Callable[..., Any], errors: Collection[str]):
        self._errors = _errors_of(errors)
        functools.update_wrapper(self, fn, updated=())
        self._fn = fn

    def program_stages(self) -> list[Stage]:
        """Returns the stages of a program of this function."""
        return [Checks(self._errors)]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Returns the result of the function, checked. In a program, the stage adds the checks.

        Raises:
            CheckError: A check failed.
            RuntimeError: Called while JAX traces another function, where no error can be raised.
        """
        if _has_stage.get():
            return self._fn(*args, **kwargs)
        if jax_compat.is_tracing():
            raise RuntimeError(
                "The result of `jdist.debug.checked` is called while JAX traces another function. Its checks are known only "
                "when that function runs. Check the outer function instead of `jax.jit(outer)`: "
                "`jdist.debug.checked(outer)`, or `strategy.step(jdist.debug.checked(step))`."
            )
        error, result = _checkified(self._fn, self._errors)(*args, **kwargs)
        _raise_failed([error], in_program=False)
        return result


_has_stage: ContextVar[bool] = ContextVar("jdist_has_checks", default=False)


class Checks(Stage):
    """Adds checks to a program, and raises the errors of all replicas in the call.

    Mutable: it holds the texts of the checks of each trace.

    Args:
        errors: The errors of `checkify`.
    """

    donates = False

    def __init__(self, errors: frozenset[Any]):
        self._errors = errors
        self._treedefs: list[PyTreeDef] = []  # of the errors of each trace, with the texts of the checks

    def wrap_function(self, fn: ReplicaFn, call: UserCall) -> ReplicaFn:
        """See `Stage`. The errors of all replicas are a further output, the same on every replica."""

        def checked_function(*args: PyTree, **kwargs: PyTree) -> Results:
            token = _has_stage.set(True)
            try:
                error, (state, outputs) = _checkified(fn, self._errors)(*args, **kwargs)
            finally:
                _has_stage.reset(token)
            leaves, treedef = jax.tree.flatten(error)
            self._treedefs.append(treedef)
            rows = [all_gather(jnp.asarray(leaf)[None], 0) for leaf in leaves]
            return state, (outputs, (jnp.int32(len(self._treedefs) - 1), rows))

        return checked_function

    def wrap_call(self, call: CallFn, compiled: CompiledFunction) -> CallFn:
        """See `Stage`."""

        def call_checked(args: Arguments) -> Results:
            if jax_compat.is_tracing():
                raise RuntimeError(
                    "A program of `jdist.debug.checked` is called inside a `jax.jit`, where its errors cannot be raised. Call "
                    "it outside."
                )
            state, (outputs, errors) = call(args)
            with jax.transfer_guard_device_to_host("allow"):
                number, rows = jax.device_get(errors)
            treedef = self._treedefs[int(number)]
            _raise_failed([treedef.unflatten(row) for row in zip(*rows, strict=True)], in_program=True)
            return state, outputs

        return call_checked


def _errors_of(names: Collection[Any]) -> frozenset[Any]:
    """Returns the errors of `checkify` for names of checks; a set of errors is returned as it is."""
    from jax.experimental import checkify

    is_collection = isinstance(names, Collection) and not isinstance(names, str)
    if not is_collection or any(name not in _CHECKS and not isinstance(name, type) for name in names):
        raise ValueError(
            f"`errors` must be a collection of {', '.join(map(repr, _CHECKS))}, or a set of errors of "
            f"`jax.experimental.checkify`, got {one_line(names)}."
        )
    groups = [getattr(checkify, _CHECKS[name]) if name in _CHECKS else {name} for name in names]
    return checkify.user_checks.union(*groups)


def _checkified(fn: Callable[..., Any], errors: frozenset[Any]) -> Callable[..., Any]:
    from jax.experimental import checkify

    return checkify.checkify(fn, errors=errors)


def _raise_failed(errors: Sequence[Any], in_program: bool) -> None:
    """Raises CheckError if a check failed.

    Args:
        errors: The error of each replica.
        in_program: Whether the errors are from a program of a strategy.
    """
    failures = {
        number: failure for number, error in enumerate(errors) if (failure := error.get_exception()) is not None
    }
    if not failures:
        return
    # A NaN of one replica is a NaN of each collective that uses it, on all replicas.
    received = {
        n: str(failure.prim) for n, failure in failures.items() if str(getattr(failure, "prim", "")) in _COLLECTIVES
    }
    causes = {n: failure for n, failure in failures.items() if n not in received} or failures
    replicas_of: dict[str, list[int]] = {}
    for number, failure in causes.items():
        replicas_of.setdefault(_failure_text(failure), []).append(number)
    parts = [
        f" on {_replicas(numbers)}: {text}" if in_program else f": {text}" for text, numbers in replicas_of.items()
    ]
    others = sorted(failures.keys() - causes.keys())
    through = f" {_replicas(others).capitalize()} received the NaN by {received[others[0]]}." if others else ""
    valid = " The arguments of the call are valid." if in_program else ""
    raise CheckError(f"A check failed{'; '.join(parts)}.{through}{valid}", causes)


_COLLECTIVES = WAITING_FOR_GROUP | {"ppermute", "psum_invariant"}


def _failure_text(failure: Any) -> str:
    frame = stack_frame(failure.traceback_info)
    return f"{str(failure).rstrip('. ')}{f', in {code_at(frame)}' if frame else ''}"


def _replicas(numbers: Sequence[int]) -> str:
    return f"replica{'s' * (len(numbers) > 1)} {', '.join(map(str, numbers))}"
