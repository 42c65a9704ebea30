"""The action of SIGTERM in a process that has joined others.

JAX's preemption service has a handler of SIGTERM in C++. It replaces any other one when a process joins, and only notes the
signal, so SIGTERM would not end a program that does not use the service. jdist restores the action from before, and gives
SIGTERM to JAX's handler only while the service is in use: by `Preemption`, or, from its first call on, by
`multihost_utils.reached_preemption_sync_point`. Python's `signal` does not see handlers of C++, so this module calls
`sigaction`.
"""

import contextlib
import ctypes
import signal
from collections.abc import Iterator
from typing import Any

from jdist._src.core.jax_compat import on_preemption_check

_ACTION_BYTES = 512  # more than the size of `struct sigaction` on any system
_POINTER_BYTES = ctypes.sizeof(ctypes.c_void_p)  # the handler is the first member

_jax_action: Any = None  # the action that JAX has installed
_previous_action: Any = None  # the action that `arm` has replaced
_num_armed = 0


@contextlib.contextmanager
def action_unchanged() -> Iterator[None]:
    """Restores the action of SIGTERM after the block, in which this process joins the others."""
    global _jax_action
    before = _exchange(None)
    yield
    if before is not None and _handler(_exchange(None)) != _handler(before):
        _jax_action = _exchange(before)
        on_preemption_check(_arm_once)


def arm() -> None:
    """Lets JAX's preemption service receive SIGTERM, until `disarm` was called as often as this function.

    Nothing changes if the program has joined the processes itself: then the service receives SIGTERM from there on.
    """
    global _num_armed, _previous_action
    if _jax_action is None:
        return
    if _num_armed == 0:
        _previous_action = _exchange(_jax_action)
    _num_armed += 1


def disarm() -> None:
    """Restores the action of SIGTERM from before `arm`, unless the program has installed a handler since then."""
    global _num_armed
    if _num_armed == 0:
        return
    _num_armed -= 1
    if _num_armed == 0 and _handler(_exchange(None)) == _handler(_jax_action):
        _exchange(_previous_action)


def _arm_once() -> None:
    if _num_armed == 0:
        arm()


def _exchange(action: Any) -> Any:
    """Sets the action of SIGTERM, unless it is None, and returns the previous one; None on systems without `sigaction`."""
    previous = ctypes.create_string_buffer(_ACTION_BYTES)
    try:
        failed = ctypes.CDLL(None).sigaction(int(signal.SIGTERM), action, previous)
    except (AttributeError, OSError, TypeError):
        return None
    return None if failed else previous


def _handler(action: Any) -> bytes:
    return action.raw[:_POINTER_BYTES]
