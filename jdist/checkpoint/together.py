"""What all processes do together: where it fails on one, the others hear why, and none waits for it."""

import math
import time
from collections.abc import Callable
from typing import TypeVar

import jax

from jdist.checkpoint.storage import CheckpointError, in_short
from jdist.conversation import Conversation, named

T = TypeVar("T")


class Group:
    """All processes, each of which hears how it goes with the others.

    Mutable: it knows whether all went well so far. Processes make theirs in the same order.
    """

    def __init__(self) -> None:
        count, late = jax.process_count(), lambda: time.monotonic() > self._deadline
        self._conversation: Conversation | None = None
        if count > 1:
            self._conversation = Conversation(named("jdist/checkpoint"), jax.process_index(), count, late)
        self._deadline = math.inf
        self._has_failed = False

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
            said = self._conversation.round({})
            for process, heard in enumerate(said):
                if "error" in heard:
                    raise CheckpointError(f"It failed on process {process}: {heard['error']}")
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
            self._conversation.say({"error": in_short(error)})
        self._has_failed = True

    def leave(self) -> None:
        """There is nothing more to do together."""
        if self._conversation is not None:
            self._conversation.leave({"error": "it has left"})
            self._conversation = None


def together(work: Callable[[], T]) -> T:
    """What `work` gives, when it went well on all processes.

    Raises:
        CheckpointError: It failed on another process.
    """
    group = Group()
    try:
        return group.told(work)
    finally:
        group.leave()
