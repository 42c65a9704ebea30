"""`Step`: a training step that is compiled for the current strategy when it is called."""

import functools
import inspect
import types
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Concatenate, Generic, NamedTuple, ParamSpec, Self, TypeVar, overload

import jax

from jdist._src.core.arguments import function_name
from jdist._src.core.identity_cache import IdentityCache
from jdist._src.core.tree import PyTree, argument_names, one_line
from jdist._src.execution.build_programs import StepOptions
from jdist._src.execution.program import Program
from jdist._src.execution.traced import Proof
from jdist._src.replica.context import current_context
from jdist._src.values.array_checks import is_device_array

StateT = TypeVar("StateT")
InputsT = ParamSpec("InputsT")
OutputsT = TypeVar("OutputsT")


class Step(Generic[StateT, InputsT, OutputsT]):
    """A training step that is compiled for the current strategy when it is called: the result of `jdist.step`.

    A call, `step(state, *inputs)`, is a call of the `jdist.Program` for the current strategy, with inputs by position or by
    name. `step.__wrapped__` is the function: outside any strategy it runs as plain JAX. Each strategy stores its programs, so
    they are freed with the strategy, and also with the step.

    As the method of a class, the step receives the object as its state, like any function of Python: `state.train(batch)`.

    Mutable: it stores a weak reference to the program that was called last.

    Args:
        fn: The step of one replica.
        options: The options of `Strategy.step`.
        static_argnames: The names of the parameters that are Python values at trace time.
        current_strategy: Returns the current strategy.
    """

    __name__: str
    __qualname__: str
    __wrapped__: Callable[Concatenate[StateT, InputsT], tuple[Any, OutputsT]]

    def __init__(
        self,
        fn: Callable[..., Any],
        options: StepOptions,
        static_argnames: Sequence[str],
        current_strategy: Callable[[], Any],
    ):
        functools.update_wrapper(self, fn, updated=())
        self.__name__ = function_name(fn)
        self.options = options
        self._static_argnames = static_argnames
        self._current_strategy = current_strategy
        self._orders: dict[tuple[int, tuple[str, ...]], _ArgumentOrder] = {}
        self._last: Callable[[], Program | None] = _no_program
        self._last_positional: Callable[[], Program | None] = (
            _no_program  # the last one, if it takes `args` as they are
        )

    if TYPE_CHECKING:

        def __call__(
            self, state: StateT, /, *inputs: InputsT.args, **named: InputsT.kwargs
        ) -> tuple[StateT, OutputsT]: ...

    else:

        def __call__(self, *args: PyTree, **named: PyTree) -> tuple[PyTree, PyTree]:
            """Returns the new state and the outputs, as global values."""
            program = self._last_positional()
            if named or program is None or program.backend is not self._current_strategy()._backend:
                program, args = self._program(self._current_strategy(), args, named)
                self._last = weakref.ref(program)
                self._last_positional = _no_program if named or self._static_argnames else self._last
            try:
                return program.call(args)
            except ValueError as error:
                _add_missing_strategy_note(error, args)
                raise

    @overload
    def __get__(self, instance: None, owner: Any = None) -> Self: ...
    @overload
    def __get__(self, instance: object, owner: Any = None) -> Callable[InputsT, tuple[StateT, OutputsT]]: ...
    def __get__(self, instance: Any, owner: Any = None) -> Any:
        return self if instance is None else bind_state(self, instance)

    def __repr__(self) -> str:
        return f"Step({self.__qualname__})"

    def __reduce__(self) -> str:
        return self.__qualname__  # pickled by name, as a function

    def on(self, strategy: Any, **static: Any) -> Program[StateT, InputsT, OutputsT]:
        """Returns the program of this step for a strategy. The program takes its inputs by position.

        Args:
            strategy: The strategy.
            static: The values of the parameters in `static_argnames`, by name.

        Raises:
            TypeError: `strategy` is not a strategy, or a name is not in `static_argnames`.

        Example:
            >>> @jdist.step
            ... def count(replicas):
            ...     return replicas + jdist.num_replicas(), None
            >>> two, one = jdist.MirroredStrategy(["cpu:0", "cpu:1"]), jdist.OneDeviceStrategy("cpu:0")
            >>> [int(count.on(strategy)(strategy.put(0))[0]) for strategy in (two, one)]
            [2, 1]
        """
        unknown = [name for name in static if name not in self._static_argnames]
        if unknown:
            raise TypeError(
                f"`on` got `{unknown[0]}`, which is not in the `static_argnames` of `{self.__name__}`. Pass inputs when the "
                "program is called."
            )
        names = [name for name in self._static_argnames if name in static]
        return self._program_of(strategy, _CallForm(static_names=tuple(names)), [static[name] for name in names])

    @property
    def proof(self) -> Proof:
        """The proof of the program that this step called last. For another one, `step.on(strategy).proof`.

        Raises:
            RuntimeError: The step was not called yet, or the strategy of the last call does not exist any more.
        """
        program = self._last()
        if program is None:
            raise RuntimeError(
                "Nothing is proved yet: a step is traced when it is called for the first time. If it was called, its strategy "
                "does not exist any more: hold the strategy, or `step.on(strategy)`."
            )
        return program.proof

    def _program(
        self, strategy: Any, args: tuple[PyTree, ...], named: Mapping[str, PyTree]
    ) -> tuple[Program, tuple[PyTree, ...]]:
        """Returns the program for these arguments and a strategy, and its arguments."""
        if not named and not self._static_argnames:
            return self._program_of(strategy, _AS_WRITTEN, ()), args
        signature = len(args), tuple(named)
        order = self._orders.get(signature)
        if order is None:
            order = self._orders[signature] = _argument_order(self, self._static_argnames, *signature)
        values = (*args, *named.values())
        program = self._program_of(strategy, order.form, [values[i] for i in order.static])
        return program, tuple(values[i] for i in order.inputs)

    def _program_of(self, strategy: Any, form: "_CallForm", static_values: Sequence[Any]) -> Program:
        strategy_steps = getattr(strategy, "_steps", None)
        if not isinstance(strategy_steps, IdentityCache):
            raise TypeError(
                f"`strategy` must be a strategy, such as `jdist.MirroredStrategy()`, got {one_line(strategy)}."
            )
        # Stored by the strategy: a program references its strategy, and a step of a module exists as long as the process.
        programs = strategy_steps.get(self, lambda _: {})
        # 1 and True are equal, and can be different programs.
        key = form, tuple(static_values), tuple(map(type, static_values))
        try:
            program = programs.get(key)
        except TypeError as error:
            raise TypeError(
                f"The static arguments of `{self.__name__}` must be hashable, because each value has its own program: {error}."
            ) from None
        if program is None:
            fn = (
                self.__wrapped__
                if form == _AS_WRITTEN
                else _with_positional_inputs(self.__wrapped__, form, static_values)
            )
            program = programs[key] = strategy.step(fn, **vars(self.options))
        return program


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


def _no_program() -> None:
    return None


def check_static_argnames(fn: Callable[..., Any], names: Any) -> tuple[str, ...]:
    """Returns the argument `static_argnames` of `jdist.step` as a tuple.

    Raises:
        TypeError: It is not a name or a sequence of names.
        ValueError: A name is not a parameter of `fn`, is the state, or is followed by an input that is not static.
    """
    names = (names,) if isinstance(names, str) else names
    if not isinstance(names, (tuple, list)) or not all(isinstance(name, str) for name in names):
        raise TypeError(
            f"`static_argnames` must be the name of a parameter or a tuple of names, got {one_line(names)}."
        )
    if not names:
        return ()
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
    return tuple(names)


_NAMED_KINDS = inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY
_POSITIONAL_KINDS = inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.VAR_POSITIONAL


def _argument_order(step: Step, static_argnames: Sequence[str], num_args: int, names: Sequence[str]) -> _ArgumentOrder:
    """Returns the order of the arguments of a call with `num_args` arguments by position, and others with these `names`.

    Raises:
        TypeError: They do not fit the parameters of the function.
    """
    signature = inspect.signature(step.__wrapped__)
    try:
        bound = signature.bind(*range(num_args), **{name: num_args + i for i, name in enumerate(names)})
    except TypeError as error:
        raise TypeError(f"`{step.__name__}{signature}` is called with other arguments: {error}.") from None
    static = {name: bound.arguments.pop(name) for name in static_argnames if name in bound.arguments}
    # `kwargs` contains keyword-only inputs, and inputs after an omitted one. Sorted: the order of a call has no effect.
    args, keywords = bound.args, dict(sorted(bound.kwargs.items()))
    parameter_names = argument_names(step.__wrapped__, args, keywords) if keywords else []
    if not all(map(str.isidentifier, parameter_names)):
        raise TypeError(
            f"`{step.__name__}{signature}` is called with the input `{next(iter(keywords))}` by name, in addition to inputs "
            "without names. Give these names, or pass all inputs by position."
        )
    form = _CallForm(tuple(parameter_names), tuple(keywords), tuple(static))
    return _ArgumentOrder(form, (*args, *keywords.values()), tuple(static.values()))


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


def _add_missing_strategy_note(error: ValueError, args: Sequence[PyTree]) -> None:
    """Adds a note to an error if no strategy is current, and an argument is on several devices."""
    arrays = [leaf for leaf in jax.tree.leaves(args) if is_device_array(leaf)]
    if current_context().strategy is None and any(len(array.sharding.device_set) > 1 for array in arrays):
        error.add_note(
            "No strategy is current, so the step uses one replica on the default device. Call it in `strategy.scope()` or "
            "after `jdist.set_strategy(strategy)`, or call `step.on(strategy)`."
        )


def bind_state(step: Callable[..., Any], instance: Any) -> types.MethodType:
    """Returns the step `step` as a method of `instance`, which is its state.

    Raises:
        TypeError: `instance` is not a pytree.
    """
    if jax.tree_util.all_leaves([instance]):
        name = step.__name__
        raise TypeError(
            f"The step `{name}` is a method of {type(instance).__name__}, which is not a pytree. `self` would be its state, "
            "the first argument. If `self` is not the state, a program would not notice that its attributes change: define the "
            f"step outside the class, or create it in `__init__`, `self.{name} = jdist.step(self._{name})`, where it reads the "
            "attributes once."
        )
    return types.MethodType(step, instance)
