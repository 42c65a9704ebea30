"""`Modules`: states and inputs with modules of flax nnx and equinox."""

import jax

from jdist._src.core import jax_compat
from jdist._src.core.nn_modules import contains_modules, from_array_tree, is_module, to_array_tree, update_in_place
from jdist._src.core.tree import PyTree
from jdist._src.execution.compiled_function import CompiledFunction
from jdist._src.execution.interrupts import defer_interrupt
from jdist._src.execution.nn_mutation import check_returned, check_state_returned, variables_before
from jdist._src.execution.packed_state import PackedState, StatePacker
from jdist._src.execution.stage import Stage
from jdist._src.execution.traced import Arguments, CallFn, LowerFn, ReplicaFn, Results, Traced, TraceFn, UserCall
from jdist._src.values.per_replica import unread_rows


class Modules(Stage):
    """Converts modules to array trees for the call, and back. nnx modules in a donated state are updated, and returned.

    A call of a program whose first call had no modules does not look for them.

    Mutable: it stores whether arguments or results contain modules.

    Args:
        has_state: Whether the first argument is a state. If not, all arguments are converted as one tree.
        donates: Whether the memory of the state is reused.
        packs: Whether the variables of nnx modules are passed as a list. Not where each leaf is placed by its path and by the
            class of its container.
    """

    def __init__(self, has_state: bool, donates: bool, packs: bool):
        self._has_state, self._donates, self._packs = has_state, donates, packs
        self._is_first_call = True
        self._has_modules = False
        self._packer = StatePacker()

    def wrap_function(self, fn: ReplicaFn, call: UserCall) -> ReplicaFn:
        """See `Stage`. A change of a module in place must be among the results."""

        def function_of_modules(*args: PyTree, **kwargs: PyTree) -> Results:
            if not contains_modules((args, kwargs)):
                state, outputs = fn(*args, **kwargs)
                return to_array_tree(state), to_array_tree(outputs)
            if self._has_state:
                args = tuple(map(from_array_tree, args))
            else:
                args, kwargs = from_array_tree((args, kwargs))
            named = call.with_arguments(args, kwargs).named_arguments()
            state_variables = variables_before([("state", args[0])]) if self._has_state else []
            input_variables = variables_before(named[self._has_state :])
            pair = fn(*args, **kwargs)
            check_returned(input_variables, pair)
            state, outputs = map(to_array_tree, pair)
            check_state_returned(state_variables, state)
            return state, outputs

        return function_of_modules

    def wrap_trace(self, trace: TraceFn) -> TraceFn:
        """See `Stage`."""

        def trace_packed(args: Arguments) -> Traced:
            if not self._has_modules and contains_modules(args):
                raise TypeError("An argument contains modules that the call did not convert.")  # the call converts them
            traced = trace(args)
            self._has_modules = self._has_modules or contains_modules(traced.pair)
            if self._has_state and isinstance(args[0], PackedState):
                state, outputs = traced.pair
                return traced._replace(pair=(args[0].with_state(state), outputs))
            return traced

        return trace_packed

    def wrap_call(self, call: CallFn, compiled: CompiledFunction) -> CallFn:
        """See `Stage`."""

        def call_any(args: Arguments) -> Results:
            if self._is_first_call:
                self._has_modules = self._has_modules or _contain_modules(args)
            if self._has_modules:
                return self._call_with_modules(call, args)
            try:
                pair = call(args)
            except (TypeError, ValueError, RuntimeError, AttributeError):
                if not contains_modules(args):
                    raise
            else:
                self._is_first_call = False
                return tuple(map(from_array_tree, pair)) if self._has_modules else pair
            self._has_modules = True
            return self._call_with_modules(call, args)

        return call_any

    def wrap_lower(self, lower: LowerFn, compiled: CompiledFunction) -> LowerFn:
        """See `Stage`."""

        def lower_arrays(args: Arguments) -> jax.stages.Lowered:
            self._has_modules = self._has_modules or contains_modules(args)
            return lower(self._to_array_trees(args))

        return lower_arrays

    def _to_array_trees(self, args: Arguments) -> Arguments:
        return tuple(map(to_array_tree, args)) if self._has_state else to_array_tree(args)

    def _call_with_modules(self, call: CallFn, args: Arguments) -> Results:
        is_tracing = jax_compat.is_tracing()
        if not self._has_state or not args:
            packing = self._packer.pack(args) if self._packs and not is_tracing else None
            arrays = self._to_array_trees(args) if packing is None else (packing.packed,)
            return tuple(map(from_array_tree, call(arrays)))
        updates = self._donates and not is_tracing
        packing = self._packer.pack(args[0]) if updates and self._packs else None
        arrays = to_array_tree(args[0]) if packing is None else packing.packed
        pair = call((arrays, *map(to_array_tree, args[1:])))

        def with_modules() -> Results:
            state, outputs = pair
            if packing is not None:
                return packing.update(state), from_array_tree(outputs)
            state = from_array_tree(state)
            return update_in_place(args[0], state) if updates else state, from_array_tree(outputs)

        try:
            return with_modules()
        except KeyboardInterrupt:  # the old values are donated: all variables need the new ones
            defer_interrupt()
            return with_modules()


def _contain_modules(args: Arguments) -> bool:
    """Returns whether the arguments contain modules. It does not read batches: unread ones can be passed as one array."""
    nodes = jax.tree.leaves(args, is_leaf=lambda node: is_module(node) or unread_rows(node) is not None)
    return any(map(is_module, nodes))


def unpacked(args: Arguments, has_state: bool) -> Arguments:
    """Returns the arguments as array trees. A step packs its state, `run` and `init` all arguments as one tree."""
    if not args or not isinstance(args[0], PackedState):
        return args
    return (args[0].state(), *args[1:]) if has_state else args[0].state()
