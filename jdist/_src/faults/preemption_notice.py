"""Notices that the platform will end the job: SIGTERM, or the result of a function that reads a service of the platform.

Processes that have joined use JAX's preemption service: it receives SIGTERM from `start` to `close`, and all processes agree on
a check after which they stop. A single process has its own handler of SIGTERM.
"""

import contextlib
import itertools
import logging
import os
import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

import jax
from jax.experimental import multihost_utils

from jdist._src.core import sigterm
from jdist._src.core.background_threads import start_thread

_LOG = logging.getLogger("jdist")
_WATCHER_INTERVAL = 5.0  # seconds between two calls of the watcher
# JAX's service agrees on the number of a check. It must increase by one per check of this process, over all objects.
_checks = itertools.count(1)


class PreemptionNotice:
    """Receives notices of preemption.

    Mutable: it stores a notice until `reset`.

    Args:
        watcher: Returns whether the platform has announced the end of this machine. Called in a thread every 5 seconds.
    """

    def __init__(self, watcher: Callable[[], Any] | None = None):
        if watcher is not None and not callable(watcher):
            raise TypeError(
                f"`watcher` must be a function without arguments that returns whether the platform has announced the end of "
                f"this machine, got {type(watcher).__name__}."
            )
        self._watcher = watcher
        self._is_received = self._is_joined = self._is_armed = self._has_agreed = False
        self._previous_handler: Any = None
        self._stop = threading.Event()

    def start(self) -> None:
        """Starts to receive notices.

        Raises:
            RuntimeError: JAX's preemption service is disabled.
        """
        jax.local_devices()  # starts the backend: the library of a TPU installs a handler of SIGTERM when it starts
        self._is_joined = jax.distributed.is_initialized()
        if self._is_joined:
            _check_preemption_service()
            if not self._is_armed:
                sigterm.arm()
            self._is_armed = True
        elif threading.current_thread() is not threading.main_thread():
            others = " The watcher is called." if self._watcher else ""
            _LOG.warning(
                "SIGTERM ends this process: only the main thread can handle it, and this is another one.%s", others
            )
        else:
            self._previous_handler = signal.getsignal(signal.SIGTERM)
            signal.signal(signal.SIGTERM, self._receive)
        if self._watcher is not None:
            self._stop.clear()
            start_thread(self._watch, (self._watcher,), name="jdist preemption", stop=self._stop.set)

    def is_agreed(self) -> bool:
        """Returns whether to stop now. All processes call it equally often, and the same call returns True on all of them."""
        if self._is_joined:
            is_agreed = multihost_utils.reached_preemption_sync_point(next(_checks))
            self._has_agreed |= is_agreed
            return is_agreed
        return self._is_received

    def reset(self) -> None:
        """Discards a notice. Processes that have joined receive one notice only."""
        self._is_received = False

    def close(self) -> None:
        """Restores the previous action of SIGTERM, unless the program has replaced this one, and ends the thread.

        After an agreement of processes that have joined, SIGTERM has no effect: the processes end, each at another time.
        """
        self._stop.set()
        if self._is_armed and not self._has_agreed:
            sigterm.disarm()
            self._is_armed = False
        previous, self._previous_handler = self._previous_handler, None
        if previous is not None and signal.getsignal(signal.SIGTERM) == self._receive:
            with contextlib.suppress(ValueError):  # in another thread than the main one
                signal.signal(signal.SIGTERM, previous)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        self._is_received = True

    def _watch(self, watcher: Callable[[], Any]) -> None:
        while not self._stop.is_set():
            try:
                is_announced = bool(watcher())
            except Exception:  # of any type: the platform may not answer for some time
                is_announced = False
                _LOG.warning("The watcher of preemption raised an error; it is called again.", exc_info=True)
            if is_announced:
                self._is_received = True
                if self._is_joined:
                    os.kill(os.getpid(), signal.SIGTERM)  # JAX's service notifies the other processes
                return
            self._stop.wait(_WATCHER_INTERVAL)


def _check_preemption_service() -> None:
    if not jax.config.jax_enable_preemption_service:  # pyright: ignore[reportAttributeAccessIssue]
        raise RuntimeError(
            "JAX's preemption service is disabled, by which the processes agree on the step after which they stop. Enable it "
            'before the processes join: `jax.config.update("jax_enable_preemption_service", True)`.'
        )
