"""Messages between processes through JAX's key-value store. No device takes part, so any thread may send them."""

import atexit
import contextlib
import itertools
import json
from collections.abc import Callable, Iterator
from typing import Any

from jdist._src.core import activity
from jdist._src.core.jax_compat import key_value_store

_POLL_MILLISECONDS = 200  # between two calls of `should_stop`
_ANSWER_MILLISECONDS = 200  # for a message that has been posted
_counters: dict[str, Iterator[int]] = {}  # by the subject of the exchanges
_unread_keys: dict[str, list[str]] = {}  # last keys of closed exchanges, by subject; the next exchange deletes them


def numbered_name(subject: str) -> str:
    """Returns `subject/0`, then `subject/1`, and so on. Processes that run the same program get the same names."""
    return f"{subject}/{next(_counters.setdefault(subject, itertools.count()))}"


def post_end_at_exit(process: int) -> None:
    """Lets the other processes see that this process has ended, by `has_ended`. Call it after the processes have joined.

    At exit, JAX waits for all processes, so they would wait for a message of this one until a time limit.
    """

    def post_end() -> None:
        with contextlib.suppress(RuntimeError):  # the processes have separated
            key_value_store().key_value_set(_end_key(process), "1")

    atexit.register(post_end)  # runs before JAX's function, which is registered when the processes join


def has_ended(process: int) -> bool:
    """Whether a process of `post_end_at_exit` has ended its program."""
    try:
        key_value_store().blocking_key_value_get(_end_key(process), _ANSWER_MILLISECONDS)
    except RuntimeError as error:
        if "DEADLINE_EXCEEDED" not in str(error):
            raise
        return False
    return True


def _end_key(process: int) -> str:
    return f"jdist/ended/{process}"


class MessageExchange:
    """An exchange of messages in rounds: each process posts one message per round.

    Mutable: it counts the rounds.

    Args:
        name: A name from `numbered_name`, the same on every process.
        process: Index of this process in the exchange.
        num_processes: Number of processes in the exchange.
        reason: The reason why a process waits for a message, for the report of a hang.
        should_stop: Whether to stop waiting for messages.
    """

    def __init__(
        self, name: str, process: int, num_processes: int, reason: str, should_stop: Callable[[], bool] = bool
    ):
        self._reason = reason
        self._name, self._process, self._num_processes, self._should_stop = name, process, num_processes, should_stop
        self._store = key_value_store()
        self._next_read = self._next_post = 0  # rounds
        # A process that posts here has closed the earlier exchanges of the subject, so their messages are not read any more.
        self._unread_keys = _unread_keys.setdefault(name.rpartition("/")[0], [])
        self._obsolete_keys, self._unread_keys[:] = list(self._unread_keys), []

    def exchange(self, message: dict[str, Any], reason: str = "") -> list[dict[str, Any]]:
        """Posts `message` and returns the messages of all processes in this round, ordered by process.

        Args:
            message: The message of this process.
            reason: The reason why this process waits, if it is not that of the exchange.

        Raises:
            InterruptedError: `should_stop` returned True while this process waited.
        """
        with activity.waiting(reason or self._reason):
            self._post(message)
            messages = [
                message if i == self._process else json.loads(self._wait_for(i)) for i in range(self._num_processes)
            ]
            self._finish_round()
            while self._obsolete_keys:
                self._store.key_value_delete(self._obsolete_keys.pop())
        return messages

    def post(self, message: dict[str, Any]) -> None:
        """Posts `message` in the next round without waiting for the messages of other processes."""
        with activity.waiting(self._reason):  # process 0 stores the message
            self._post(message)

    def post_without_reading(self, message: dict[str, Any]) -> None:
        """Posts `message` and skips the messages of other processes in this round. Later rounds can follow."""
        self.post(message)
        self._finish_round()

    def close(self, message: dict[str, Any]) -> None:
        """Posts `message` as the last message of this process, so that processes that still wait for one receive it."""
        self.post(message)
        self._unread_keys.extend(self._key(number, self._process) for number in range(self._next_post)[-3:])

    def _post(self, message: dict[str, Any]) -> None:
        self._store.key_value_set(self._key(self._next_post, self._process), json.dumps(message))
        self._next_post += 1

    def _finish_round(self) -> None:
        if self._next_read > 0:  # processes that posted in this round have read the round before
            self._obsolete_keys.append(self._key(self._next_read - 1, self._process))
        self._next_read += 1

    def _key(self, number: int, process: int) -> str:
        return f"{self._name}/{number}/{process}"

    def _wait_for(self, process: int) -> str:
        while not self._should_stop():
            try:
                return self._store.blocking_key_value_get(self._key(self._next_read, process), _POLL_MILLISECONDS)
            except RuntimeError as error:
                if "DEADLINE_EXCEEDED" not in str(error):
                    raise
        raise InterruptedError("Stopped waiting for messages from other processes.")
