"""Calls that all processes make together: an error on one process is raised on all of them, and no process waits for it."""

import hashlib
import itertools
import json
import math
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias, TypeVar

import jax

from jdist._src.checkpoint.storage import CheckpointError, short_message
from jdist._src.core.process_messages import MessageExchange, numbered_name

T = TypeVar("T")
Facts: TypeAlias = Mapping[str, Sequence[str]]  # name of an argument -> lines that describe its value
_MOST_LINES = 20_000


class ProcessGroup:
    """All processes of a program, or some, for calls that succeed on all of them or fail on all of them.

    Processes must create their groups in the same order. On a single process the methods only call `work`.

    Mutable: a group stores whether a call of `run` or `barrier` has failed.

    Args:
        in_main_thread: Whether no other thread than the main one calls the methods.
        processes: The indices of the processes; by default all.
    """

    def __init__(self, in_main_thread: bool = False, processes: Sequence[int] | None = None) -> None:
        self._deadline = math.inf
        self._has_failed = False
        self._exchange: MessageExchange | None = None
        self._processes = range(jax.process_count()) if processes is None else processes
        if len(self._processes) > 1:
            is_late = lambda: time.monotonic() > self._deadline
            subset = f"/{zlib.crc32(repr(list(self._processes)).encode())}"
            self._exchange = MessageExchange(
                numbered_name(f"jdist/checkpoint{subset * (len(self._processes) < jax.process_count())}"),
                self._processes.index(jax.process_index()),
                len(self._processes),
                "a barrier of a checkpoint",
                is_late,
                processes=self._processes,
                in_main_thread=in_main_thread,
            )

    def run_compared(self, call: str, work: Callable[[], tuple[T, Facts]]) -> T:
        """Runs the local part of a call, and checks that all processes make the same call.

        The group can be used again after an error.

        Args:
            call: The name of the call.
            work: Returns a result, and facts that must be equal on all processes. It may not use collectives.

        Returns:
            The result of `work`.

        Raises:
            CheckpointError: `work` failed on another process, or the processes make different calls.
        """
        try:
            result, facts = work()
        except Exception as error:
            if self._exchange is not None:
                self._exchange.post(_error_message(error))
            raise
        if self._exchange is not None:
            self._compare(self._exchange, call, {"the call": [f"`{call}`"], **facts})
        return result

    def _compare(self, exchange: MessageExchange, call: str, facts: Facts) -> None:
        self._deadline = math.inf
        digests = {name: hashlib.sha256(json.dumps(list(lines)).encode()).hexdigest() for name, lines in facts.items()}
        reason = f"`{call if '.' in call else f'Checkpointer.{call}'}`, which all processes have to call"
        messages = exchange.exchange({"digests": digests}, reason)
        _raise_errors(self._processes, messages, call)
        first, *others = (message.get("digests", {}) for message in messages)
        for index, other in enumerate(others, start=1):
            different = [name for name in {**first, **other} if first.get(name) != other.get(name)]
            if different:
                compared = self._processes[0], self._processes[index]
                is_compared = jax.process_index() in compared
                lines = list(facts.get(different[0], []))[:_MOST_LINES] if is_compared else []
                all_lines = [message.get("lines", []) for message in exchange.exchange({"lines": lines})]
                raise CheckpointError(_difference(different[0], compared, all_lines[0], all_lines[index]))

    def any(self, value: bool) -> bool:
        """Returns whether `value` is true on a process. All processes call it."""
        if self._exchange is None:
            return value
        return any(message.get("value", False) for message in self._exchange.exchange({"value": value}))

    def run(self, work: Callable[[], T], facts_of: Callable[[T], Facts] | None = None) -> T:
        """Returns the result of `work` once it has succeeded on all processes.

        Args:
            work: Returns a result.
            facts_of: From the result to facts that must be equal on all processes.

        Raises:
            CheckpointError: `work` failed on another process, or the facts differ; raised on all processes.
        """
        try:
            result = work()
        except Exception as error:
            self.fail(error)
            raise
        if facts_of is None or self._exchange is None or self._has_failed:
            self.barrier()
            return result
        try:
            self._compare(self._exchange, "save", facts_of(result))
        except BaseException:
            self._has_failed = True  # on all processes
            raise
        return result

    def barrier(self, seconds: float = math.inf) -> None:
        """Waits until all processes have called it. Returns immediately if a call has failed before.

        Raises:
            CheckpointError: Another process failed, or did not call it within `seconds`.
        """
        if self._exchange is None or self._has_failed:
            return
        self._deadline = time.monotonic() + seconds
        try:
            _raise_errors(self._processes, self._exchange.exchange({}))
        except InterruptedError:
            timeout = CheckpointError(f"Another process did not reach the same point within {seconds:g} seconds.")
            self.fail(timeout)
            raise timeout from None
        except BaseException as error:
            self.fail(error)
            raise

    def fail(self, error: BaseException) -> None:
        """Reports `error` to the other processes, which raise it at their next barrier."""
        if self._exchange is not None and not self._has_failed:
            self._exchange.post(_error_message(error))
        self._has_failed = True

    def close(self, reason: str = "it has ended the call") -> None:
        """Ends the group. Processes that continue receive an error with the reason."""
        if self._exchange is not None:
            self._exchange.close({"error": reason})
            self._exchange = None


def _error_message(error: BaseException) -> dict[str, Any]:
    return {"error": short_message(error), "is_timeout": isinstance(error, TimeoutError)}


def _raise_errors(processes: Sequence[int], messages: Sequence[Mapping[str, Any]], call: str | None = None) -> None:
    for process, message in zip(processes, messages, strict=True):
        if "error" in message:
            subject = f"Process {process} failed" if call is None else f"`{call}` failed on process {process}"
            error_type = TimeoutError if message.get("is_timeout") else CheckpointError
            raise error_type(f"{subject}: {message['error']}")


def _difference(name: str, processes: tuple[int, int], first_lines: Sequence[str], other_lines: Sequence[str]) -> str:
    """Returns the message for facts that differ between two processes."""
    pairs = itertools.zip_longest(first_lines, other_lines, fillvalue="nothing")
    first, other = next((pair for pair in pairs if pair[0] != pair[1]), ("another value", "another value"))
    return (
        f"The processes differ in {name}: process {processes[0]} has {first}, process {processes[1]} has {other}. Make the "
        "same call with the same arguments on all processes, in a folder that all of them can read and write."
    )
