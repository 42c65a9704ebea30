"""Faults for tests: a process that is killed, stops, raises an error or is slow at a step."""

import contextlib
import os
import signal
import time
from collections.abc import Callable
from typing import Any, Literal, TypeAlias, get_args

import jax

from jdist._src.core import activity
from jdist._src.core.arguments import as_int, check_seconds
from jdist._src.core.tree import one_line

Fault: TypeAlias = Literal["kill", "stop", "raise", "slow"]


class InjectedFault(RuntimeError):  # noqa: N818  # not a problem of the program
    """The error that `inject_fault(process, at_step, "raise")` raises."""


def inject_fault(
    process: int, at_step: int, fault: Fault, *, seconds: float = 1.0, attempt: int = 0
) -> contextlib.AbstractContextManager[Any]:
    """Lets a process fail when it calls a step, to test how a program and its launcher react.

    All processes call it, before their steps. Calls of all steps of `strategy.step`, `jdist.step` and a `Trainer` count, also
    of its validation. The function has no cost for programs that do not call it.

    Args:
        process: The index of the process.
        at_step: The number of the call: 1 is the first call of a step after this function was called.
        fault: `"kill"`: the process ends with SIGKILL, as if its machine was lost. `"stop"`: it stops with SIGSTOP, as if its
            machine hangs. `"raise"`: the call raises `InjectedFault`. `"slow"`: this call and all later ones wait first.
        seconds: The time that `"slow"` waits before each call.
        attempt: The attempt of a supervised job in which the fault occurs: the number of restarts before it, which
            `jdist run` passes in the environment variable `JDIST_RESTARTS`. By default the first one.

    Returns:
        A context manager that removes the fault. Without `with`, the fault remains until the process ends.

    Raises:
        ValueError: `fault` is unknown, or a number is out of range.
        TypeError: A number is not an integer.

    Example:
        >>> step = jdist.OneDeviceStrategy("cpu:0").step(lambda w: (w + 1, None))
        >>> with inject_fault(process=0, at_step=2, fault="raise"):
        ...     w, _ = step(np.float32(0))
        ...     step(w)
        Traceback (most recent call last):
        jdist.testing.InjectedFault: Process 0 fails at step 2, as `inject_fault` requested.
    """
    process, at_step = as_int("`process`", process, 0), as_int("`at_step`", at_step, 1)
    if fault not in get_args(Fault):
        raise ValueError(f"`fault` must be one of {', '.join(map(repr, get_args(Fault)))}, got {one_line(fault)}.")
    check_seconds("seconds", seconds)
    stack = contextlib.ExitStack()
    if int(os.environ.get("JDIST_RESTARTS", "0")) != as_int("`attempt`", attempt, 0):
        return stack
    steps_before = activity.calls.steps

    def before_step(number: int) -> None:
        if number - steps_before < at_step or jax.process_index() != process:
            return
        if fault == "slow":
            time.sleep(seconds)
        else:
            _remove(before_step)  # the program may handle the error, and continue
            _fail(fault, process, at_step)

    activity.calls.before_step.append(before_step)
    stack.callback(_remove, before_step)
    return stack


def _remove(before_step: Callable[[int], None]) -> None:
    with contextlib.suppress(ValueError):  # it has been removed before
        activity.calls.before_step.remove(before_step)


def _fail(fault: Fault, process: int, at_step: int) -> None:
    if fault == "raise":
        raise InjectedFault(f"Process {process} fails at step {at_step}, as `inject_fault` requested.")
    os.kill(os.getpid(), signal.SIGKILL if fault == "kill" else signal.SIGSTOP)
