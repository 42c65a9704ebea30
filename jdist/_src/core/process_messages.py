"""What processes say to each other, through the store that they share: no device takes part, so any thread may speak."""

import itertools
import json
from collections.abc import Callable, Iterator
from typing import Any

from jdist._src.core.jax_compat import key_value_store

_PATIENCE = 200  # milliseconds between two looks at whether to go on waiting
_numbers: dict[str, Iterator[int]] = {}  # of the conversations there were, by what they were about
_left: dict[str, list[str]] = {}  # keys that nobody waits for any more, likewise


def numbered_name(subject: str) -> str:
    """A name for a new conversation. Its processes run the same program, and so count alike."""
    return f"{subject}/{next(_numbers.setdefault(subject, itertools.count()))}"


class MessageExchange:
    """A conversation of processes, in which each says one thing a round.

    Mutable: it knows in which round it is.

    Args:
        name: What `named` gave.
        speaker: The number of this process among them.
        speakers: How many they are.
        stopped: Says whether to give up.
    """

    def __init__(self, name: str, speaker: int, speakers: int, stopped: Callable[[], bool] = bool):
        self._name, self._speaker, self._speakers, self._stopped = name, speaker, speakers, stopped
        self._store = key_value_store()
        self._heard_rounds = self._said_rounds = 0
        # Who speaks in this conversation has left those about the same that this process left before.
        self._left = _left.setdefault(name.rpartition("/")[0], [])
        self._stale, self._left[:] = list(self._left), []

    def round(self, message: dict[str, Any]) -> list[dict[str, Any]]:
        """What every process says in this round, in their order; this one says `message`.

        Raises:
            InterruptedError: It was given up.
        """
        self.post(message)
        said = [message if i == self._speaker else json.loads(self._heard(i)) for i in range(self._speakers)]
        if self._heard_rounds > 0:  # who has spoken in this round has heard the one before
            self._stale.append(self._key(self._heard_rounds - 1, self._speaker))
        while self._stale:
            self._store.key_value_delete(self._stale.pop())
        self._heard_rounds += 1
        return said

    def post(self, message: dict[str, Any]) -> None:
        """Says `message` in the next round, and does not wait for what others say."""
        self._store.key_value_set(self._key(self._said_rounds, self._speaker), json.dumps(message))
        self._said_rounds += 1

    def fail(self, message: dict[str, Any]) -> None:
        """Posts `message` in the next round without waiting for the other messages. The conversation can be continued."""
        self.post(message)
        if self._heard_rounds > 0:
            self._stale.append(self._key(self._heard_rounds - 1, self._speaker))
        self._heard_rounds += 1

    def leave(self, message: dict[str, Any]) -> None:
        """Says `message` to those that go on, who shall not wait; and nothing more."""
        self.post(message)
        self._left.extend(self._key(number, self._speaker) for number in range(self._said_rounds)[-3:])

    def _key(self, number: int, speaker: int) -> str:
        return f"{self._name}/{number}/{speaker}"

    def _heard(self, speaker: int) -> str:
        while not self._stopped():
            try:
                return self._store.blocking_key_value_get(self._key(self._heard_rounds, speaker), _PATIENCE)
            except RuntimeError as error:
                if "DEADLINE_EXCEEDED" not in str(error):
                    raise
        raise InterruptedError("It was given up to wait for what other processes say.")
