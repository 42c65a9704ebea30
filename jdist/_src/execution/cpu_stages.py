"""Stages of programs on several CPU devices: `DonatedMemory` checks the state, and `OneAtATime` waits for the previous call.

JAX starts some of the devices before it refuses memory that is donated twice (https://github.com/jax-ml/jax/issues/12627 is
the same on a GPU), and jax 0.12 ends the process 60 seconds later.
`jdist._src.devices.dispatch` explains why calls run one at a time.
"""

import functools
import itertools
import weakref
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jdist._src.core import jax_compat
from jdist._src.core.tree import PyTree
from jdist._src.devices.dispatch import record_call, wait_for_previous
from jdist._src.execution.compiled_function import CompiledFunction, ResultStructure
from jdist._src.execution.packed_state import PackedState
from jdist._src.execution.stage import Stage
from jdist._src.execution.traced import Arguments, CallFn, Results
from jdist._src.values.array_checks import is_device_array
from jdist._src.values.base import named_values


class OneAtATime(Stage):
    """Waits for the previous call, and records the results of this one for the next."""

    def wrap_call(self, call: CallFn, compiled: CompiledFunction) -> CallFn:
        """See `Stage`."""
        compiled.on_results.append(self._record)

        def call_alone(args: Arguments) -> Results:
            wait_for_previous(self)
            return call(args)

        return call_alone

    def _record(self, pair: Results, leaves: list[Any], structure: ResultStructure) -> None:
        record_call(leaves, structure.smallest, self)


class DonatedMemory(Stage):
    """Checks the memory of the state that a call donates, unless a call of a program has just returned this state.

    Mutable: it stores the addresses of the state that its last call returned. From the first state that has other children on,
    as in `step(state.replace(step=0), batch)`, it also stores those of the leaves, and the class stores the addresses of the
    leaves that the last call of any program returned.

    Args:
        checks_every_call: Whether every call looks for memory that was donated before, which else JAX refuses.
    """

    _records_leaves = False
    _last_leaves: Sequence[int] = ()

    def __init__(self, checks_every_call: bool = False):
        self._checks_every_call = checks_every_call or jax_compat.CRASHES_ON_DONATED_MEMORY
        self._returned_state: tuple[int, ...] | None = None
        self._returned_leaves: Sequence[int] = ()
        self._last_of_children: Sequence[weakref.ref[jax.Array]] = ()

    def wrap_call(self, call: CallFn, compiled: CompiledFunction) -> CallFn:
        """See `Stage`."""
        compiled.on_results.append(self._note_returned_state)

        def call_checked(args: Arguments) -> Results:
            if args:
                is_returned = self._is_returned(_addresses(args[0]))
                if (self._checks_every_call or not is_returned) and not self._is_valid(args, is_returned):
                    check_donated_state(args[0], args[1:])
            return call(args)

        return call_checked

    def _is_returned(self, addresses: tuple[int, ...]) -> bool:
        """Whether the last call returned this state, or its children, now in a new container such as `(params, opt_state)`.

        Python uses the address of a child again when it was dropped, and then its leaves are dropped too.
        """
        returned = self._returned_state
        if returned is None or (addresses != returned and (addresses[1:] != returned[1:] or len(addresses) == 1)):
            return False
        return all(leaf() is not None for leaf in self._last_of_children)

    def _note_returned_state(self, pair: Results, leaves: list[Any], structure: ResultStructure) -> None:
        self._returned_state = _addresses(pair[0])
        self._last_of_children = [weakref.ref(leaves[index]) for index in structure.last_of_children]
        if self._records_leaves:
            DonatedMemory._last_leaves = self._returned_leaves = list(map(_address, leaves[: structure.num_state]))

    def _is_valid(self, args: Arguments, is_returned: bool) -> bool:
        """Whether the leaves of the state are results of the last call, so that each has its own memory, and are not inputs."""
        if self._returned_state is None:
            return False
        state, inputs = jax.tree.leaves(args[:1]), jax.tree.leaves(args[1:])
        leaves = list(map(_address, state))
        if not is_returned:
            DonatedMemory._records_leaves = True
            if leaves not in (self._returned_leaves, self._last_leaves):
                return False
        if len(set(leaves)) < len(state) or any(map(leaves.__contains__, map(_address, inputs))):
            return False
        return not self._checks_every_call or not any(map(_is_deleted, itertools.chain(state, inputs)))


_address = object.__hash__  # `id` raises an audit event, which takes a microsecond where a hook is installed


def _addresses(state: PyTree) -> tuple[int, ...]:
    """Returns the addresses of a state and of its children.

    The address of a state alone is used again soon after the caller has dropped it. The caller may replace children in place.
    """
    if isinstance(state, PackedState):  # each call has a new one
        return (0, *map(_address, state.values))
    children = state.values() if type(state) is dict else state if isinstance(state, (tuple, list)) else ()
    return tuple(map(_address, (state, *children)))


def check_donated_state(state: PyTree, inputs: Arguments) -> None:
    """Raises ValueError if a leaf of a state that will be donated was donated before, or occurs twice in the arguments."""
    names: dict[int, str] = {}
    arrays = [(name, leaf) for name, leaf in named_values("state", state) if is_device_array(leaf)]
    # Before the check for deleted arrays: memory that JAX found to be donated twice may be deleted by now.
    for name, leaf in arrays:
        if id(leaf) in names:
            raise ValueError(f"{name} is the same array as {names[id(leaf)]}, and {_DONATED_ONCE}")
        names[id(leaf)] = name
    for name, leaf in named_values("inputs", inputs):
        if id(leaf) in names:
            raise ValueError(f"{names[id(leaf)]} is also among the inputs, as {name}, and {_DONATED_ONCE}")
    for name, leaf in arrays:
        if leaf.is_deleted():
            raise ValueError(
                f"{name} was donated to an earlier step, which reused its memory for the new state. Continue with the state "
                "that the step returned, `state, outputs = step(state, batch)`, or make the step with `donate=False`."
            )
    _check_shared_memory(arrays, named_values("inputs", inputs))


def _check_shared_memory(arrays: list[tuple[str, jax.Array]], inputs: list[tuple[str, Any]]) -> None:
    """Raises ValueError if a leaf of a state has memory of another leaf, or of an input."""
    owners: dict[tuple[Any, int], tuple[str, jax.Array]] = {}
    for name, leaf in arrays:
        for memory, block in _blocks(leaf):
            other_name, other = owners.setdefault(memory, (name, block))
            if other_name != name and _is_donated_twice(other, block):
                raise ValueError(f"{name} has the same memory as {other_name}, and {_DONATED_ONCE}")
    for name, leaf in inputs:
        for memory, block in _blocks(leaf) if is_device_array(leaf) else ():
            if memory in owners and _is_donated_twice(owners[memory][1], block):
                raise ValueError(f"{owners[memory][0]} has the same memory as {name}, an input, and {_DONATED_ONCE}")


def _is_deleted(leaf: Any) -> bool:
    return is_device_array(leaf) and leaf.is_deleted()


def _blocks(array: jax.Array) -> list[tuple[tuple[Any, int], jax.Array]]:
    """Returns the part of `array` on each device of this process, with the device and the address of its memory."""
    if array.is_deleted():
        return []
    blocks = [shard.data for shard in array.addressable_shards]
    try:
        return [((block.device, block.unsafe_buffer_pointer()), block) for block in blocks]
    except jax.errors.JaxRuntimeError:  # the device does not expose addresses
        return []


def _is_donated_twice(a: jax.Array, b: jax.Array) -> bool:
    """Whether XLA refuses to donate both of two arrays at one address. It copies memory that it does not own, as NumPy's.

    XLA reports the first argument that it refuses. It always refuses the last one, so no array is donated.
    """
    last = jax.device_put(np.float32(0), a.sharding)
    try:
        _donate(a, b, last, last)
    except (ValueError, jax.errors.JaxRuntimeError) as error:
        return "flattened argument 1," in str(error)
    return False


@functools.partial(jax.jit, donate_argnums=(0, 1, 2, 3))
def _donate(*arrays: jax.Array) -> list[jax.Array]:
    return list(map(jnp.copy, arrays))


_DONATED_ONCE = (
    "a step donates the memory of each leaf of its state. Give one of the two its own memory: `jnp.copy(x)`, or build "
    "the state with `strategy.init` or `strategy.put`."
)
