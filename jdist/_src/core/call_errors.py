"""Errors of calls whose arguments do not fit: the parameter that was meant, or the line to write."""

import difflib
import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from jdist._src.core.migration_hints import migration_hints

F = TypeVar("F", bound=Callable[..., Any])
_BY_NAME = inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY


def explains_arguments(hints: str = "", name: str = "") -> Callable[[F], F]:
    """Returns a decorator for functions that users call: arguments that do not fit are errors that name the parameter.

    Python's own message names neither the nearest parameter (before Python 3.13) nor the name of another library.

    Args:
        hints: The name of the function in `migration_hints.toml`, which has the line to write for names of other libraries.
        name: The function as the errors name it; default: its class and its name.
    """

    def decorate(fn: F) -> F:
        @functools.wraps(fn)
        def call(*args: Any, **kwargs: Any) -> Any:
            try:
                return fn(*args, **kwargs)
            except TypeError as error:
                traceback = error.__traceback__
                if traceback is None or traceback.tb_next is not None:  # raised within `fn`
                    raise
                message = _explanation(fn, name, args, kwargs, hints) or str(error)
            raise TypeError(message)

        return call  # pyright: ignore[reportReturnType]

    return decorate


def explain_constructor(cls: type, hints: str = "") -> None:
    """Makes errors of the constructor that a class defines explain its arguments."""
    if "__init__" in vars(cls):
        cls.__init__ = explains_arguments(hints)(cls.__init__)


def _explanation(
    fn: Callable[..., Any], name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], hints: str
) -> str | None:
    signature = inspect.signature(fn)
    parameters = {each: one for each, one in signature.parameters.items() if each != "self"}
    name = name or fn.__qualname__.removesuffix(".__init__")
    by_name = [each for each, one in parameters.items() if one.kind in _BY_NAME]
    other_names = migration_hints()["arguments"][hints] if hints else {}
    for unknown in kwargs:
        if unknown not in by_name:
            near = difflib.get_close_matches(unknown, by_name, 1)
            advice = other_names.get(unknown) or (f"Did you mean `{near[0]}`?" if near else other_names.get("**", ""))
            listed = ", ".join(f"`{each}`" for each in by_name)
            return f"`{name}` has no argument `{unknown}`. {advice or f'Its arguments are {listed}.'}"
    try:
        signature.bind_partial(*args, **kwargs)
    except TypeError:
        only = [each for each, one in parameters.items() if one.kind is inspect.Parameter.KEYWORD_ONLY]
        if not only:
            return None
        listed = ", ".join(f"`{each}=`" for each in only)
        return f"`{name}` takes these arguments by name: {listed}. {other_names.get('*', '')}".rstrip()
    shown = [one.replace(annotation=inspect.Parameter.empty) for one in parameters.values()]
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        call = signature.replace(parameters=shown, return_annotation=inspect.Signature.empty)
        # `predict(x)` lacks the first argument, and Python reports that the last one is missing.
        first = next(iter(parameters), "")
        hint = " The state is the first argument." if first == "state" and len(args) == 2 else ""
        advice = hint or (f" {other_names['?']}" if "?" in other_names else "")
        return f"`{name}`: {error}. Call it as `{name.split('.')[-1]}{call}`.{advice}"
    return None
