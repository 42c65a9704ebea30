"""`CallForms`: the programs of one step for calls with inputs by name and with static values.

A program takes its inputs by position. A call that passes some by name, or static values, is a call of the program of another
function, with the parameters by position in one order.
"""

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from jdist._src.core.arguments import function_name
from jdist._src.core.tree import PyTree, argument_names, one_line
from jdist._src.execution.traced import Arguments

_NAMED_KINDS = inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY
_POSITIONAL_KINDS = inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.VAR_POSITIONAL


class _CallForm(NamedTuple):
    """The arguments that the function of a step receives otherwise than by position.

    Attributes:
        names: The names of the state and the inputs, if some are received by name.
        keywords: The names of those inputs, which are the last ones.
        static_names: The names of the static arguments.
    """

    names: tuple[str, ...] = ()
    keywords: tuple[str, ...] = ()
    static_names: tuple[str, ...] = ()


class _ArgumentOrder(NamedTuple):
    """The arguments of a program and the static values, as indices of the arguments by position followed by those by name.

    Attributes:
        form: The form of the call of the function.
        inputs: The indices of the state and the inputs.
        static: The indices of the static values.
    """

    form: _CallForm
    inputs: Sequence[int]
    static: Sequence[int]


_AS_WRITTEN = _CallForm()


class CallForms:
    """The programs of a step, one per form of the call and per combination of static values.

    Mutable: a call in a new form makes its program.

    Args:
        fn: The step of one replica.
        static_argnames: The names of the parameters that are Python values at trace time.
        program: The program of `fn`, for calls by position.
        make: Returns the program of another function.
    """

    def __init__(
        self, fn: Callable[..., Any], static_argnames: Sequence[str], program: Any, make: Callable[[Any], Any]
    ):
        self._fn, self._static_argnames, self._make = fn, static_argnames, make
        self._orders: dict[tuple[int, tuple[str, ...]], _ArgumentOrder] = {}
        self._programs: dict[Any, Any] = {(_AS_WRITTEN, (), ()): program}

    @property
    def programs(self) -> list[Any]:
        """The programs that exist."""
        return list(self._programs.values())

    def bind(self, args: Arguments, named: Mapping[str, PyTree]) -> tuple[Any, Arguments]:
        """Returns the program of a call, and its arguments by position.

        Raises:
            TypeError: The arguments do not fit the parameters of the function, or a static value is not hashable.
        """
        signature = len(args), tuple(named)
        order = self._orders.get(signature)
        if order is None:
            order = self._orders[signature] = self._order(*signature)
        values = (*args, *named.values())
        program = self._program(order.form, [values[i] for i in order.static])
        return program, tuple(values[i] for i in order.inputs)

    def with_static(self, static: Mapping[str, Any]) -> Any:
        """Returns the program of these static values."""
        names = tuple(name for name in self._static_argnames if name in static)
        return self._program(_CallForm(static_names=names), [static[name] for name in names])

    def _order(self, num_args: int, names: Sequence[str]) -> _ArgumentOrder:
        fn, signature = self._fn, inspect.signature(self._fn)
        if not num_args and not names:  # the program refuses a call without a state
            return _ArgumentOrder(_AS_WRITTEN, (), ())
        try:
            bound = signature.bind(*range(num_args), **{name: num_args + i for i, name in enumerate(names)})
        except TypeError as error:
            raise TypeError(f"`{function_name(fn)}{signature}` is called with other arguments: {error}.") from None
        static = {name: bound.arguments.pop(name) for name in self._static_argnames if name in bound.arguments}
        # `kwargs` contains keyword-only inputs, and inputs after an omitted one. Sorted: the order of a call has no effect.
        args, keywords = bound.args, dict(sorted(bound.kwargs.items()))
        parameter_names = argument_names(fn, args, keywords) if keywords else []
        if not all(map(str.isidentifier, parameter_names)):
            raise TypeError(
                f"`{function_name(fn)}{signature}` is called with the input `{next(iter(keywords))}` by name, in addition to "
                "inputs without names. Give these names, or pass all inputs by position."
            )
        form = _CallForm(tuple(parameter_names), tuple(keywords), tuple(static))
        return _ArgumentOrder(form, (*args, *keywords.values()), tuple(static.values()))

    def _program(self, form: _CallForm, static_values: Sequence[Any]) -> Any:
        # 1 and True are equal, and can be different programs.
        key = form, tuple(static_values), tuple(map(type, static_values))
        try:
            program = self._programs.get(key)
        except TypeError as error:
            raise TypeError(
                f"The static arguments of `{function_name(self._fn)}` must be hashable, because each value has its own "
                f"program: {error}."
            ) from None
        if program is None:
            program = self._programs[key] = self._make(_with_positional_inputs(self._fn, form, static_values))
        return program


def check_static_argnames(fn: Callable[..., Any], names: Sequence[str]) -> None:
    """Raises ValueError if a name is not a parameter of `fn`, is the state, or is followed by an input that is not static."""
    if not names:
        return
    parameters = list(inspect.signature(fn).parameters.values())
    inputs = [parameter.name for parameter in parameters[1:] if parameter.kind in _NAMED_KINDS]
    for name in names:
        if name not in inputs:
            raise ValueError(
                f"`static_argnames` contains {one_line(name)}, which is not an input of `{function_name(fn)}`: its inputs are "
                f"{', '.join(f'`{name}`' for name in inputs) or 'not named'}."
            )
    first = min(i for i, parameter in enumerate(parameters) if parameter.name in names)
    for parameter in parameters[first:]:
        if parameter.name not in names and parameter.kind in _POSITIONAL_KINDS:
            raise ValueError(
                f"The input `{parameter.name}` of `{function_name(fn)}` follows the static `{parameters[first].name}`. Static "
                f"parameters are the last ones: `def {function_name(fn)}(state, {parameter.name}, *, {', '.join(names)})`."
            )


def _with_positional_inputs(
    fn: Callable[..., Any], form: _CallForm, static_values: Sequence[Any]
) -> Callable[..., Any]:
    """Returns `fn` as a function of its state and inputs by position."""
    static = dict(zip(form.static_names, static_values, strict=True))

    @functools.wraps(fn)
    def positional(*args: PyTree) -> Any:
        split = len(args) - len(form.keywords)
        return fn(*args[:split], **dict(zip(form.keywords, args[split:], strict=True)), **static)

    # Error messages name the inputs by the parameters.
    parameters = [p for p in inspect.signature(fn).parameters.values() if p.name not in static]
    if form.keywords:
        parameters = [inspect.Parameter(name, inspect.Parameter.POSITIONAL_ONLY) for name in form.names]
    positional.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return positional
