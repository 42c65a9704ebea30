"""`debug.checked`: a function whose operations are checked for NaN, indices out of bounds and divisions by zero."""

import functools
from collections.abc import Callable, Collection, Sequence
from typing import Any, ParamSpec, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from jdist._src.core import jax_compat
from jdist._src.core.arguments import check_callable
from jdist._src.core.tree import PyTree, one_line
from jdist._src.execution.compiled_function import CompiledFunction
from jdist._src.execution.stage import Stage
from jdist._src.execution.traced import Arguments, CallFn, ReplicaFn, Results, UserCall
from jdist._src.replica.context import all_gather

InputsT = ParamSpec("InputsT")
ResultT = TypeVar("ResultT")

_CHECKS = {"nan": "nan_checks", "index": "index_checks", "division": "div_checks"}


class CheckError(RuntimeError):
    """A replica has computed a NaN, used an index out of bounds, divided by zero, or failed a `checkify.check`.

    Attributes:
        replicas: The indices of the replicas whose checks failed.
    """

    def __init__(self, message: str, replicas: Sequence[int]):
        super().__init__(message)
        self.replicas = tuple(replicas)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (*self.args, self.replicas)


def checked(
    fn: Callable[InputsT, ResultT], errors: Collection[str] = ("nan", "index", "division")
) -> "Checked[InputsT, ResultT]":
    """Returns `fn` with checks of its operations: NaN, indices out of bounds, and divisions by zero.

    `strategy.step(checked(fn))` and `strategy.run(checked(fn), args)` raise a `CheckError` in the call in which a check fails. It
    names the replicas, the operation and the line of the code. The first failed check of a replica is reported. A step does not
    donate its state: after the error it can be inspected, and passed to the step again. With several processes, all of them
    raise the error. Each call waits for its results, and a checked program is slower. Without `checked` nothing changes.

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
        jdist.debug.CheckError: A check failed on replica 0: division by zero at ...
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
        """Returns the result of the function. A program with the stages calls it while it is traced, and it adds no checks.

        Raises:
            CheckError: A check failed.
        """
        if jax_compat.is_tracing():
            return self._fn(*args, **kwargs)
        error, result = _checkified(self._fn, self._errors)(*args, **kwargs)
        _raise_failed([error])
        return result


class Checks(Stage):
    """Adds checks to a program, and raises the errors of all replicas in the call.

    Args:
        errors: The errors of `checkify`.
    """

    donates = False

    def __init__(self, errors: frozenset[Any]):
        self._errors = errors

    def wrap_function(self, fn: ReplicaFn, call: UserCall) -> ReplicaFn:
        """See `Stage`. The errors of all replicas are a further output, the same on every replica."""

        def function_of_checks(*args: PyTree, **kwargs: PyTree) -> Results:
            error, (state, outputs) = _checkified(fn, self._errors)(*args, **kwargs)
            errors = jax.tree.map(lambda x: all_gather(jnp.asarray(x)[None], 0), error)
            return state, (outputs, errors)

        return function_of_checks

    def wrap_call(self, call: CallFn, compiled: CompiledFunction) -> CallFn:
        """See `Stage`."""

        def call_checked(args: Arguments) -> Results:
            state, (outputs, errors) = call(args)
            if not jax_compat.is_tracing():
                _raise_failed(_per_replica(errors))
            return state, outputs

        return call_checked


def _errors_of(names: Collection[Any]) -> frozenset[Any]:
    """Returns the errors of `checkify` for names of checks; a set of errors is returned as it is."""
    from jax.experimental import checkify

    unknown = [name for name in names if name not in _CHECKS and not isinstance(name, type)]
    if isinstance(names, str) or unknown:
        raise ValueError(
            f"`errors` must be a collection of {', '.join(map(repr, _CHECKS))}, or a set of errors of "
            f"`jax.experimental.checkify`, got {one_line(names)}."
        )
    groups = [getattr(checkify, _CHECKS[name]) if name in _CHECKS else {name} for name in names]
    return checkify.user_checks.union(*groups)


def _checkified(fn: Callable[..., Any], errors: frozenset[Any]) -> Callable[..., Any]:
    from jax.experimental import checkify

    return checkify.checkify(fn, errors=errors)


def _per_replica(errors: Any) -> list[Any]:
    leaves, treedef = jax.tree.flatten(errors)
    rows = [np.asarray(leaf) for leaf in jax.device_get(leaves)]
    return [treedef.unflatten(row) for row in zip(*rows, strict=True)] if rows else []


def _raise_failed(errors: Sequence[Any]) -> None:
    """Raises CheckError if a check of a replica failed."""
    texts = [error.get() for error in errors]
    replicas = [number for number, text in enumerate(texts) if text]
    if not replicas:
        return
    by_text: dict[str, list[int]] = {}
    for number in replicas:
        by_text.setdefault(texts[number], []).append(number)
    failed = [
        f"on replica{'s' * (len(numbers) > 1)} {', '.join(map(str, numbers))}: {text}"
        for text, numbers in by_text.items()
    ]
    raise CheckError(f"A check failed {'; '.join(failed)}. The state that was passed is valid.", replicas)
