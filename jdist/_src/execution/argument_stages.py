"""Stages that check the arguments of a call: `ArgumentErrors` after an error, `HostValues` before the call.

JAX reports errors in terms of buffers and devices. They are raised again in terms of the caller's values.
"""

import re
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from jdist._src.core import activity, jax_compat
from jdist._src.core.nn_modules import to_array_tree
from jdist._src.core.tree import dtype_and_shape, one_line
from jdist._src.execution.backend import ProgramSpec
from jdist._src.execution.compiled_function import CompiledFunction
from jdist._src.execution.cpu_stages import check_donated_state
from jdist._src.execution.interrupts import defer_interrupt
from jdist._src.execution.stage import Stage
from jdist._src.execution.traced import Arguments, CallFn, Results
from jdist._src.values.array_checks import (
    check_array,
    check_not_leaked,
    check_not_ref,
    check_range,
    host_leaves,
    is_device_array,
    is_jit_argument,
)
from jdist._src.values.device_put import check_devices_attached, check_same_devices

_WRONG_OPTION = re.compile(r"No such compile option: '(\w+)'|While setting option (\w+), ([^\n]*)")
_ERRORS = TypeError, ValueError, RuntimeError, AttributeError  # that JAX raises because of an argument


class ArgumentErrors(Stage):
    """Names the argument that caused an error of a call."""

    def __init__(self, spec: ProgramSpec):
        self._spec = spec

    def wrap_call(self, call: CallFn, compiled: CompiledFunction) -> CallFn:
        """See `Stage`."""

        def call_explained(args: Arguments) -> Results:
            try:
                return call(args)
            except _ERRORS as error:
                self._raise_argument_error(error, args)
                raise

        return call_explained

    def _raise_argument_error(self, error: Exception, args: Arguments) -> None:
        """Raises an error that names the argument that caused `error`, or returns if no argument did.

        Raises:
            TypeError: An argument is not an array.
            ValueError: An argument was deleted, is donated twice, or is on other devices; or XLA does not have an option.
        """
        spec, mesh = self._spec, self._spec.backend.replicas.mesh
        check_devices_attached(mesh)
        call = spec.user_call(tuple(map(to_array_tree, args)) if spec.has_state else to_array_tree(args))
        raise_option_error(error)
        is_about_memory = jax_compat.is_deleted_memory_error(error)
        # A call that fails after its launch has deleted the state itself, and its error has another cause.
        if is_about_memory and spec.donates and args:
            check_donated_state(call.args[0], tuple(call.args[1:]))
        for name, leaf in call.leaves():
            check_not_ref(name, leaf)
            if isinstance(error, TypeError):
                _check_argument(name, leaf)
            if is_about_memory and is_device_array(leaf) and leaf.is_deleted():
                raise ValueError(
                    f"{name} ({dtype_and_shape(leaf)}) was deleted: its memory was donated to a step, or freed by `delete`. A "
                    "step with `donate=False` leaves the old state valid."
                ) from None
            if is_device_array(leaf) and leaf.committed and not spec.backend.accepts(leaf):
                check_same_devices(name, leaf, mesh)


class HostValues(Stage):
    """Checks the host values among the arguments.

    A state has many leaves and stays on the devices. It is checked before a call only if JAX may have compiled the program
    for a state with host values, and after a call that compiled the program for a new signature.

    Mutable: it stores whether a state had host values.

    Args:
        spec: The program.
        record: Called with the host values of a call, if there are any, after it.
    """

    def __init__(self, spec: ProgramSpec, record: Callable[[Sequence[Any]], None] | None = None):
        self._spec, self._record = spec, record
        self._accepts_host_state = False

    def wrap_call(self, call: CallFn, compiled: CompiledFunction) -> CallFn:
        """See `Stage`."""
        compiled.on_new_signature.append(self._note_host_state)

        def call_checked(args: Arguments) -> Results:
            if host_values := host_leaves(args):
                self._check(args, host_values)
            pair = call(args)
            if host_values and self._record is not None:
                self._record(host_values)
            return pair

        def step_checked(args: Arguments) -> Results:
            skips_state = compiled.num_signatures and not self._accepts_host_state
            host_values = host_leaves(args[1:] if skips_state else args)
            if host_values:
                self._check(args, host_values)
                if not skips_state:
                    args = (jax.tree.map(_strongly_typed, args[0]), *args[1:])
            calls = activity.calls
            for before_step in tuple(calls.before_step):
                before_step(calls.steps + 1)
            pair = call(args)
            calls.steps += 1
            try:
                if host_values and self._record is not None:
                    self._record(host_values)
                compiled.note_signature(args)
            except KeyboardInterrupt:  # the old state is donated: the caller needs the new one
                defer_interrupt()
                compiled.note_signature(args)
            return pair

        return step_checked if self._spec.has_state else call_checked

    def _note_host_state(self, args: Arguments) -> None:
        if values := host_leaves(args[0]):
            self._accepts_host_state = True
            self._check_range(args, values)

    def _check(self, args: Arguments, values: Sequence[Any]) -> None:
        self._check_range(args, values)
        if activity.host_value_observers:
            leaves = [
                (name, leaf) for name, leaf in self._spec.user_call(args).leaves() if isinstance(leaf, np.ndarray)
            ]
            for observe in tuple(activity.host_value_observers):
                observe(leaves)

    def _check_range(self, args: Arguments, values: Sequence[Any]) -> None:
        """Raises an error that names the argument if JAX would truncate one of these host values."""
        if not all(map(is_jit_argument, values)):
            for name, leaf in self._spec.user_call(args).leaves():
                check_not_leaked(name, leaf)
                check_range(name, leaf)


def _strongly_typed(leaf: Any) -> Any:
    """Returns a Python number of a state in the dtype of the new state, so that the next call is not traced again."""
    return np.asarray(leaf, jax.typeof(leaf).dtype) if isinstance(leaf, (bool, int, float, complex)) else leaf


def raise_option_error(error: Exception) -> None:
    """Raises ValueError if XLA raised `error` because of `compiler_options`."""
    if wrong := _WRONG_OPTION.search(str(error)):
        problem = wrong[3] if wrong[2] else "this version of XLA does not have it."
        raise ValueError(
            f"The option {wrong[1] or wrong[2]!r} of `compiler_options` is refused: {problem} Names and values are those of "
            '`XLA_FLAGS`, without the dashes: `{"xla_cpu_enable_fast_math": True}`. `jdist.xla_flags` returns recommended '
            "options."
        ) from error


def _check_argument(name: str, leaf: Any) -> None:
    try:
        check_array(name, leaf)
        jax.typeof(leaf if isinstance(leaf, jax.Array) else np.asarray(leaf))
    except TypeError as error:
        raise TypeError(
            f"{name} is {one_line(leaf)}: the arguments of a replica function are arrays and numbers. Close over it, or bind "
            "it once with `functools.partial(fn, name=value)` and pass the other arguments."
        ) from error
