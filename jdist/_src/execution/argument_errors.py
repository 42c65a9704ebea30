"""Explains the errors that JAX raises about the arguments of a program: not arrays, deleted, or on other devices."""

from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from jdist._src.core import jax_compat
from jdist._src.core.tree import PyTree, dtype_and_shape
from jdist._src.execution.replicate import Call
from jdist._src.values.arrays import check_array, is_device_array
from jdist._src.values.base import named_values
from jdist._src.values.device_put import check_same_devices


def raise_argument_error(
    error: Exception, call: Call, mesh: Mesh, storage: NamedSharding | None, donates: bool
) -> None:
    """Raises the error that explains `error`, if an argument is the cause of it.

    Args:
        error: The error of JAX, or of the function.
        call: The call that failed.
        mesh: The mesh of the strategy.
        storage: Where a state is stored between steps, if not on the mesh.
        donates: Whether the call donates its first argument.

    Raises:
        TypeError: An argument is not an array.
        ValueError: An argument was deleted, is donated twice, or is on other devices.
    """
    is_about_memory = jax_compat.is_deleted_memory_error(error)
    # A call that fails later has deleted the state itself, and its error is not about that.
    if is_about_memory and donates:
        check_donated_state(call.args[0], tuple(call.args[1:]))
    for name, leaf in call.leaves():
        if isinstance(error, TypeError):
            _check_argument(name, leaf)
        if is_about_memory and is_device_array(leaf) and leaf.is_deleted():
            raise ValueError(
                f"{name} ({dtype_and_shape(leaf)}) was deleted: its memory was donated to a step, or freed by `delete`."
            ) from None
        if is_device_array(leaf) and leaf.committed and leaf.sharding != storage:
            check_same_devices(name, leaf, mesh)


def check_donated_state(state: PyTree, inputs: tuple[PyTree, ...]) -> None:
    """Raises ValueError if a leaf of a state that is to be donated was donated before, or is an argument twice."""
    names: dict[int, str] = {}
    placed = [(name, leaf) for name, leaf in named_values("state", state) if is_device_array(leaf)]
    # First: when it is found out that memory was given away twice, it may be gone.
    for name, leaf in placed:
        if id(leaf) in names:
            raise ValueError(f"{name} is the same array as {names[id(leaf)]}, and {_GIVEN_ONCE}")
        names[id(leaf)] = name
    for name, leaf in named_values("inputs", inputs):
        if id(leaf) in names:
            raise ValueError(f"{names[id(leaf)]} is also among the inputs, as {name}, and {_GIVEN_ONCE}")
    for name, leaf in placed:
        if leaf.is_deleted():
            raise ValueError(
                f"{name} was donated to a step before, which reused its memory for the new state. Continue with the state that "
                "the step returned, `state, outputs = step(state, batch)`, or make the step with `donate=False`."
            )


_GIVEN_ONCE = (
    "a step takes over the memory of each leaf of its state. Give this one memory of its own: `jnp.copy(x)`, or build the "
    "state with `strategy.init` or `strategy.put`."
)


def _check_argument(name: str, leaf: Any) -> None:
    try:
        check_array(name, leaf)
        jax.typeof(leaf if isinstance(leaf, jax.Array) else np.asarray(leaf))
    except TypeError as error:
        raise TypeError(
            f"{name} is {leaf!r:.80}: the arguments of a replica function are arrays and numbers. Close over it, or bind it "
            "once with `functools.partial(fn, name=value)` and pass the rest."
        ) from error
