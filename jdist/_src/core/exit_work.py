"""Work that the interpreter finishes before it exits, and the exit status: 1 if some work fails, or the status of an error.

It runs before Python stops the thread pools of `concurrent.futures`, and before the functions of `atexit`.
"""

import atexit
import concurrent.futures.thread as concurrent_futures_thread
import contextlib
import functools
import os
import sys
import threading
import traceback
from collections.abc import Callable, Hashable
from typing import TypeVar

import jax  # noqa: F401  # registers its function of `atexit`

ErrorT = TypeVar("ErrorT", bound=BaseException)
_FAILED = 1  # the exit status
_status = _FAILED
_ends_without_jax = False
_work: dict[Hashable, tuple[Callable[[], object], str]] = {}


def add(key: Hashable, finish: Callable[[], object], description: str) -> bool:
    """Lets the interpreter call `finish` before it exits, unless `key` is removed before. Both are kept alive.

    If `finish` raises an error, the error is printed and the program ends with exit status 1.

    Args:
        key: Identifies the work.
        finish: Finishes it.
        description: The part of the message for Ctrl-C after "while", such as "a checkpoint was being written".

    Returns:
        False if it is too late: the interpreter already runs the functions of `atexit`.
    """
    if not threading.main_thread().is_alive():
        return False
    _install_exit_function()
    _work[key] = finish, description
    return True


def remove(key: Hashable) -> None:
    """Removes work that is finished, or whose error was raised."""
    _work.pop(key, None)


def end_with_failure(message: str) -> None:
    """Prints a message, and lets the interpreter end with the exit status of a failure."""
    _print(f"jdist: {message} The program ends with exit status {_FAILED}.")
    _end_with(_FAILED)


def with_exit_status(error: ErrorT, status: int) -> ErrorT:
    """Returns `error`. If it ends the program, also as the cause of another error, the exit status is `status`."""
    error._jdist_exit_status = status  # pyright: ignore[reportAttributeAccessIssue]
    add(_end_by_error, _end_by_error, "the program ended")
    return error


def status_of(error: BaseException | None) -> int:
    """Returns the exit status of a program that an error ends."""
    while error is not None:
        if (status := getattr(error, "_jdist_exit_status", None)) is not None:
            return status
        error = error.__cause__
    return _FAILED


def end_without_jax(status: int) -> None:
    """Lets the interpreter end with `status` before JAX's function of `atexit`, which waits for all processes."""
    global _status, _ends_without_jax
    _status, _ends_without_jax = max(status, _status), True


@atexit.register  # after JAX's function, so it runs before it
def _end_before_jax() -> None:
    if _ends_without_jax:
        _flush()
        os._exit(_status)


def _end_by_error() -> None:
    status = status_of(getattr(sys, "last_value", None))
    if status != _FAILED:
        _end_with(status)


def _end_with(status: int) -> None:
    global _status
    _status = max(status, _status)
    atexit.unregister(_exit)
    atexit.register(_exit)


@functools.cache
def _install_exit_function() -> None:
    # A function of `atexit` would run too late: when `concurrent.futures` has stopped its thread pools. Python does not have a
    # public function for it (https://github.com/python/cpython/issues/86128). The functions that this one registers run in
    # reverse order, so `concurrent.futures` has to be imported before.
    _ = concurrent_futures_thread
    threading._register_atexit(_finish_all)  # pyright: ignore[reportAttributeAccessIssue]


def _finish_all() -> None:
    while _work:
        key, (finish, description) = next(iter(_work.items()))
        try:
            finish()
        except Exception as error:
            end_with_failure("".join(traceback.format_exception(error)).rstrip() + "\n")
        except KeyboardInterrupt:
            _print(f"jdist: Interrupted at exit, while {description}.")
            _exit()  # now: threads that are not daemons would be waited for again
        finally:
            remove(key)


def _print(message: str) -> None:
    with contextlib.suppress(Exception):  # of any type: the stream may be replaced or closed
        print(message, file=sys.stderr, flush=True)


def _exit() -> None:
    """Ends the process as the interpreter would, except for the exit status, which Python lets no exit function change."""
    atexit.unregister(_exit)
    atexit._run_exitfuncs()
    _flush()
    os._exit(_status)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):  # as above
            stream.flush()


if hasattr(os, "register_at_fork"):  # a forked child does not have the threads that do the work
    os.register_at_fork(after_in_child=_work.clear)
