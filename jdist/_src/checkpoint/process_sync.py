"""What all processes do together: where it fails on one, the others hear why, and none waits for it."""

import hashlib
import itertools
import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, Self, TypeAlias, TypeVar

import jax

from jdist._src.checkpoint.storage import CheckpointError, short_message
from jdist._src.core.process_messages import MessageExchange, numbered_name

T = TypeVar("T")
Facts: TypeAlias = Mapping[str, Sequence[str]]  # by the name of an argument, lines that describe it
_MOST_LINES = 20_000


class ProcessGroup:
    """All processes, each of which hears how it goes with the others.

    Mutable: it knows whether all went well so far. Processes make theirs in the same order.
    """

    def __init__(self) -> None:
        count, late = jax.process_count(), lambda: time.monotonic() > self._deadline
        self._conversation: MessageExchange | None = None
        if count > 1:
            self._conversation = MessageExchange(numbered_name("jdist/checkpoint"), jax.process_index(), count, late)
        self._deadline = math.inf
        self._has_failed = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.leave()

    def agreed(self, call: str, work: Callable[[], tuple[T, Facts]]) -> T:
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
            if self._conversation is not None:
                self._conversation.fail({"error": short_message(error)})
            raise
        if self._conversation is not None:
            self._compare(self._conversation, call, {"the call": [f"`{call}`"], **facts})
        return result

    def _compare(self, conversation: MessageExchange, call: str, facts: Facts) -> None:
        self._deadline = math.inf
        digests = {name: hashlib.sha256(json.dumps(list(lines)).encode()).hexdigest() for name, lines in facts.items()}
        heard = conversation.round({"digests": digests})
        _raise_errors(f"`{call}`", heard)
        first, *others = (message.get("digests", {}) for message in heard)
        for process, other in enumerate(others, start=1):
            different = [name for name in {**first, **other} if first.get(name) != other.get(name)]
            if different:
                lines = list(facts.get(different[0], []))[:_MOST_LINES]
                all_lines = [message.get("lines", []) for message in conversation.round({"lines": lines})]
                raise CheckpointError(_difference(different[0], process, all_lines[0], all_lines[process]))

    def told(self, work: Callable[[], T]) -> T:
        """What `work` gives, when it went well on all.

        Raises:
            CheckpointError: It failed on another process.
        """
        try:
            result = work()
        except Exception as error:
            self.fail(error)
            raise
        self.meet()
        return result

    def meet(self, seconds: float = math.inf) -> None:
        """Waits until all have come; where something has failed already, for nobody.

        Raises:
            CheckpointError: Another process failed, or did not come in so many seconds.
        """
        if self._conversation is None or self._has_failed:
            return
        self._deadline = time.monotonic() + seconds
        try:
            _raise_errors("It", self._conversation.round({}))
        except InterruptedError:
            late = CheckpointError(f"Another process was waited for, and did not come within {seconds:g} seconds.")
            self.fail(late)
            raise late from None
        except BaseException as error:
            self.fail(error)
            raise

    def fail(self, error: BaseException) -> None:
        """Lets the others hear, where they meet next, that `error` is why this process does not come."""
        if self._conversation is not None and not self._has_failed:
            self._conversation.post({"error": short_message(error)})
        self._has_failed = True

    def leave(self, reason: str = "it has left") -> None:
        """Ends the group. Processes that continue get an error with the reason."""
        if self._conversation is not None:
            self._conversation.leave({"error": reason})
            self._conversation = None


def _raise_errors(call: str, messages: Sequence[Mapping[str, Any]]) -> None:
    for process, message in enumerate(messages):
        if "error" in message:
            raise CheckpointError(f"{call} failed on process {process}: {message['error']}")


def _difference(name: str, process: int, first: Sequence[str], other: Sequence[str]) -> str:
    """The message for facts that differ between process 0 and `process`."""
    pairs = itertools.zip_longest(first, other, fillvalue="nothing")
    here, there = next((pair for pair in pairs if pair[0] != pair[1]), ("another value", "another value"))
    return (
        f"The processes differ in {name}: process 0 has {here}, process {process} has {there}. Make the same call with the "
        "same arguments on all processes, in a folder that all of them see."
    )
