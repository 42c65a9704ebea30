"""`Step`: a training step that is compiled for the current strategy when it is called."""

import functools
import types
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Concatenate, Generic, ParamSpec, Self, TypeVar, overload

import jax

from jdist._src.core.arguments import function_name
from jdist._src.core.identity_cache import IdentityCache
from jdist._src.core.tree import PyTree, one_line
from jdist._src.execution.build_programs import StepOptions
from jdist._src.execution.call_forms import check_static_argnames
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
        current_strategy: Returns the current strategy.
    """

    __name__: str
    __qualname__: str
    __wrapped__: Callable[Concatenate[StateT, InputsT], tuple[Any, OutputsT]]

    def __init__(
        self,
        fn: Callable[..., Any],
        options: StepOptions,
        current_strategy: Callable[[], Any],
    ):
        check_static_argnames(fn, options.static_argnames)
        functools.update_wrapper(self, fn, updated=())
        self.__name__ = function_name(fn)
        self.options = options
        self._current_strategy = current_strategy
        self._last: Callable[[], Program | None] = _no_program
        # The program that was called last, if it takes `args` as they are.
        self._last_positional: Callable[[], Program | None] = _no_program

    if TYPE_CHECKING:

        def __call__(
            self, state: StateT, /, *inputs: InputsT.args, **named: InputsT.kwargs
        ) -> tuple[StateT, OutputsT]: ...

    else:

        def __call__(self, *args: PyTree, **named: PyTree) -> tuple[PyTree, PyTree]:
            """Returns the new state and the outputs, as global values."""
            program = self._last_positional()
            if named or program is None or program.backend is not self._current_strategy()._backend:
                program, args = self._program(self._current_strategy())._forms.bind(args, named)
                self._last = weakref.ref(program)
                self._last_positional = _no_program if named or self.options.static_argnames else self._last
            try:
                return program.call(args)
            except ValueError as error:
                add_missing_strategy_note(error, args)
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
        """Returns the program of this step for a strategy.

        Args:
            strategy: The strategy.
            static: The values of the parameters in `static_argnames`, by name. A program of such values takes only inputs.

        Raises:
            TypeError: `strategy` is not a strategy, or a name is not in `static_argnames`.

        Example:
            >>> @jdist.step
            ... def count(replicas):
            ...     return replicas + jdist.num_replicas(), None
            >>> two = jdist.MirroredStrategy(["cpu:0", "cpu:1"])
            >>> one = jdist.OneDeviceStrategy("cpu:0")
            >>> [int(count.on(strategy)(strategy.put(0))[0]) for strategy in (two, one)]
            [2, 1]
        """
        unknown = [name for name in static if name not in self.options.static_argnames]
        if unknown:
            raise TypeError(
                f"`on` got `{unknown[0]}`, which is not in the `static_argnames` of `{self.__name__}`. Pass inputs when the "
                "program is called."
            )
        return self._program(strategy)._forms.with_static(static)

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

    def _program(self, strategy: Any) -> Program:
        strategy_steps = getattr(strategy, "_steps", None)
        if not isinstance(strategy_steps, IdentityCache):
            raise TypeError(
                f"`strategy` must be a strategy, such as `jdist.MirroredStrategy()`, got {one_line(strategy)}."
            )
        # Stored by the strategy: a program references its strategy, and a step of a module exists as long as the process.
        return strategy_steps.get(self, lambda _: strategy.step(self.__wrapped__, **vars(self.options)))


def _no_program() -> None:
    return None


def add_missing_strategy_note(error: ValueError, args: Sequence[PyTree]) -> None:
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
