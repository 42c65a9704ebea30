"""Messages between processes through JAX's key-value store. No device takes part, so any thread may send them.

All processes exchange one message each in a round. A round takes two requests per process, and one more per process whose
message differs from its last one: each process counts itself in the store, and the process that completes the count stores the
changed messages of all as one value, which the others wait for. So the number of requests is linear in the number of processes.
"""

import atexit
import collections
import contextlib
import itertools
import json
import sys
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax

from jdist._src.core import activity, exit_work
from jdist._src.core.call_records import SAME_CALLS
from jdist._src.core.exit_statuses import HUNG
from jdist._src.core.jax_compat import are_recoverable, key_value_store, live_processes
from jdist._src.core.source_lines import caller_text

_POLL_MILLISECONDS = 200  # the first of a wait; also between two calls of `should_stop`
_POLL_MILLISECONDS_PER_PROCESS = 10  # later: the store answers a request in about 0.1 ms
_RESULT_MILLISECONDS = 10_000  # in which a process that has completed a round stores the result
_LONG_WAIT = 1.0  # seconds after which a process looks for the reason
_RECOVERY_SECONDS = 5.0  # of a wait, after which recoverable processes look for lost ones
_CHANGED = 1 << 15  # added to the count of a round by a process whose message has changed; the count has 31 bits
_ENDED, _WAITS, _DEADLOCKS = "jdist/ended", "jdist/waits", "jdist/deadlocks"
_ERROR_CHARACTERS = 300
_MOST_NAMES = 256
_counters: dict[str, Iterator[int]] = {}  # by the subject of the exchanges
_wait_numbers = itertools.count()
_num_posts: collections.OrderedDict[str, int] = collections.OrderedDict()  # of this process, in the newest exchanges


def numbered_name(subject: str) -> str:
    """Returns `subject/0`, then `subject/1`, and so on. Processes that run the same program get the same names."""
    return f"{subject}/{next(_counters.setdefault(subject, itertools.count()))}"


def post_end_at_exit(process: int) -> None:
    """Lets processes that wait for a message of this process see that it has ended. Call it after the processes have joined.

    At exit, JAX waits for all processes, so they would wait for a message of this one until a time limit.
    """

    def post_end() -> None:
        error = getattr(sys, "last_value", None)  # the error that has ended the program
        text = "" if error is None else f" with {type(error).__name__}: {error}"[:_ERROR_CHARACTERS]
        end = json.dumps({"error": text, "posts": dict(_num_posts)})
        with contextlib.suppress(RuntimeError):  # the processes have separated
            key_value_store().key_value_set(f"{_ENDED}/{process}", end, True)

    atexit.register(post_end)  # runs before JAX's function, which is registered when the processes join


class MessageExchange:
    """An exchange of messages in rounds: each process posts one message per round.

    Mutable: it counts the rounds, and holds the messages of the last one.

    Args:
        name: A name from `numbered_name`, the same on every process.
        process: Index of this process in the exchange.
        num_processes: Number of processes in the exchange.
        reason: The reason why a process waits for a message, for errors and the report of a hang.
        should_stop: Whether to stop waiting for messages.
        processes: JAX's indices of the processes in the exchange; by default all processes.
        in_main_thread: Whether the main threads of all processes post the messages. A wait for a main thread that itself waits
            in another such exchange is an error.
        store: The key-value store; by default the one of the joined processes.
    """

    def __init__(
        self,
        name: str,
        process: int,
        num_processes: int,
        reason: str,
        should_stop: Callable[[], bool] = bool,
        *,
        processes: Sequence[int] | None = None,
        in_main_thread: bool = False,
        store: Any = None,
    ):
        self._name, self._process, self._num_processes = name, process, num_processes
        self._reason, self._should_stop, self._in_main_thread = reason, should_stop, in_main_thread
        self._processes = range(num_processes) if processes is None else processes
        self._store = key_value_store() if store is None else store
        self._round = self._wait_round = 0
        # The message of this process that the other processes have; None to post the next one in full.
        self._last: dict[str, Any] | None = None
        self._messages: list[dict[str, Any]] = [{}] * num_processes

    def exchange(self, message: dict[str, Any], reason: str = "") -> list[dict[str, Any]]:
        """Posts `message` and returns the messages of all processes in this round, ordered by process.

        After an error, the message is not part of the round: the next one takes its place.

        Args:
            message: The message of this process: JSON.
            reason: The reason why this process waits; by default the reason of the exchange.

        Raises:
            InterruptedError: `should_stop` returned True while this process waited.
            RuntimeError: A process has ended without a message, or all processes wait for each other in different calls.
        """
        reason = reason or self._reason
        number, interrupt = self._round, None
        with activity.waiting(reason, f"{self._name}/{number}", self._processes):
            groups = self._post(message)
            if groups is None:
                try:
                    groups = self._wait_for_result(number, reason)
                except BaseException as error:
                    if self._withdraw(number, message):
                        raise
                    # All processes have posted, and the others use the result.
                    groups = self._store.blocking_key_value_get_bytes(self._key(number, "result"), _RESULT_MILLISECONDS)
                    interrupt = None if isinstance(error, Exception) else error
        are_complete = True
        for skips_round, text, indices in json.loads(zlib.decompress(groups)):
            are_complete &= not skips_round
            received = json.loads(text)
            for index in indices:
                self._messages[index] = received
        # A process that has not read this round does not have the messages of the others.
        self._last = message if are_complete else None
        if interrupt is not None:
            raise interrupt
        return list(self._messages)

    def post(self, message: dict[str, Any]) -> None:
        """Posts `message` and skips the messages of other processes in this round. Later rounds can follow."""
        with activity.waiting(self._reason):  # process 0 stores the message
            self._last = None
            self._post(message, reads_round=False)

    def close(self, message: dict[str, Any]) -> None:
        """Posts `message` as the last message of this process, so that processes that still wait for one receive it."""
        self.post(message)
        if self._store.key_value_increment(f"{self._name}/closed", 1) == self._num_processes:
            self._store.key_value_delete(self._name)  # with all keys that begin so

    def missing(self) -> list[int]:
        """Returns the processes without a message in the last round for which this process has waited for a few seconds."""
        posted = {self._process, *(int(key.rpartition("/")[2]) for key, _ in self._entries(self._wait_round))}
        return [process for index, process in enumerate(self._processes) if index not in posted]

    def _post(self, message: dict[str, Any], reads_round: bool = True) -> bytes | None:
        """Posts a message, and returns the result of the round if it is the last of the round."""
        number, is_changed = self._round, message != self._last
        if is_changed:
            entry = json.dumps([not reads_round, json.dumps(message)]).encode()
            self._store.key_value_set_bytes(self._message_key(number), entry)
        self._set_round(number + 1)
        count = self._store.key_value_increment(self._key(number, "count"), 1 + is_changed * _CHANGED)
        return self._complete(number, count) if count % _CHANGED == self._num_processes else None

    def _withdraw(self, number: int, message: dict[str, Any]) -> bool:
        """Removes the message of this process from a round, unless the round is complete. Returns whether it has done so."""
        added = 1 + (message != self._last) * _CHANGED
        try:
            count = self._store.key_value_increment(self._key(number, "count"), -added) + added
            if count % _CHANGED == self._num_processes:
                self._store.key_value_increment(self._key(number, "count"), added)
                return False
            self._store.key_value_delete(self._message_key(number))
        except RuntimeError:  # process 0, which holds the store, has ended
            return True
        self._set_round(number)
        return True

    def _set_round(self, number: int) -> None:
        self._round = _num_posts[self._name] = number
        _num_posts.move_to_end(self._name)
        if len(_num_posts) > _MOST_NAMES:
            _num_posts.popitem(last=False)

    def _complete(self, number: int, count: int) -> bytes:
        """Stores the result of a round in which all processes have posted."""
        groups: dict[bytes, list[int]] = {}
        for key, entry in self._entries(number) if count >= _CHANGED else ():
            if entry:
                groups.setdefault(entry, []).append(int(key.rpartition("/")[2]))
        result = zlib.compress(json.dumps([[*json.loads(entry), who] for entry, who in groups.items()]).encode())
        self._store.key_value_set_bytes(self._key(number, "result"), result, True)
        if number:  # all processes that post in a round have read the round before
            self._store.key_value_delete(self._key(number - 1, ""))
        return result

    def _wait_for_result(self, number: int, reason: str) -> bytes:
        milliseconds, start, self._wait_round = _POLL_MILLISECONDS, time.monotonic(), number
        longest = max(_POLL_MILLISECONDS, _POLL_MILLISECONDS_PER_PROCESS * self._num_processes)
        with contextlib.ExitStack() as stack:
            wait: _LongWait | None = None
            while not self._should_stop():
                try:
                    return self._store.blocking_key_value_get_bytes(self._key(number, "result"), milliseconds)
                except RuntimeError as error:
                    if "DEADLINE_EXCEEDED" not in str(error):
                        raise
                if time.monotonic() - start > _LONG_WAIT:
                    if wait is None:
                        wait = stack.enter_context(_LongWait(self._store, [self._name, number], reason))
                        self._show_presence(number)
                        if self._in_main_thread and threading.current_thread() is threading.main_thread():
                            wait.publish(self._num_processes)
                    self._check_can_end(number, wait, time.monotonic() - start)
                milliseconds = min(2 * milliseconds, longest)
        raise InterruptedError("Stopped waiting for messages from other processes.")

    def _show_presence(self, number: int) -> None:
        """Marks that this process has posted in a round, in which it has not stored an unchanged message."""
        with contextlib.suppress(RuntimeError):  # it has stored its message
            self._store.key_value_set_bytes(self._message_key(number), b"")

    def _check_can_end(self, number: int, wait: "_LongWait", seconds: float) -> None:
        """Raises RuntimeError if a process will not post in this round any more."""
        for process, end in _ends(self._store).items():
            if process in self._processes and end["posts"].get(self._name, 0) <= number:
                raise _endless(f"Process {process} has ended its program{end['error']}, and {wait.text(process)}")
        wait.check_deadlock()
        if seconds > _RECOVERY_SECONDS and are_recoverable():
            missing = self.missing()
            if not missing:  # the process that completed the count was lost before it stored the result
                self._complete(number, _CHANGED)
            elif lost := wait.lost(missing):
                raise _endless(f"Process {lost[0]} is lost, and {wait.text(lost[0])}")

    def _entries(self, number: int) -> list[tuple[str, bytes]]:
        return self._store.key_value_dir_get_bytes(f"{self._key(number, 'messages')}/")

    def _message_key(self, number: int) -> str:
        return f"{self._key(number, 'messages')}/{self._process}"

    def _key(self, number: int, kind: str) -> str:
        return f"{self._name}/{number}/{kind}".rstrip("/")


class _LongWait:
    """A wait for the messages of a round that takes long, and the check whether it can end.

    If the main threads of all processes wait in exchanges of main threads, and no round has all of its processes, none of the
    waits can end. Process 0 is one of them, and decides: it stores the waits, and every process in one of them raises an error.

    Mutable: it holds what process 0 has read last.

    Args:
        store: The key-value store.
        place: The name of the exchange, and the round.
        reason: The reason of the wait.
    """

    def __init__(self, store: Any, place: Sequence[Any], reason: str):
        self._store, self._place, self._reason = store, list(place), reason
        self._line = caller_text()
        self._own: str | None = None  # the published wait
        self._waits: Mapping[str, str] = {}
        self._lost: list[int] | None = None
        self._queried: Sequence[int] = ()

    def __enter__(self) -> "_LongWait":
        return self

    def __exit__(self, *error: object) -> None:
        if self._own is not None:
            with contextlib.suppress(RuntimeError):
                self._store.key_value_delete(f"{_WAITS}/{jax.process_index()}")

    def text(self, process: int) -> str:
        """Returns the end of a sentence about a process that will not post."""
        return (
            f"did not take part in {self._reason}. Process {jax.process_index()} waits there for process "
            f"{process}{self._line}. {SAME_CALLS}"
        )

    def publish(self, num_processes: int) -> None:
        """Stores this wait of the main thread for process 0."""
        # With a number: the same call at the same place may wait again after an error.
        own = [self._place, num_processes, f"{self._reason}{self._line}", next(_wait_numbers)]
        self._own = json.dumps(own)
        self._store.key_value_set(f"{_WAITS}/{jax.process_index()}", self._own, True)

    def check_deadlock(self) -> None:
        """Raises RuntimeError if all processes wait for each other."""
        if self._own is None:
            return
        if jax.process_index() == 0:
            self._decide()
        for _, text in self._store.key_value_dir_get(f"{_DEADLOCKS}/"):
            waits = json.loads(text)
            if waits.get(str(jax.process_index())) == self._own:
                lines = "".join(f"\n  Process {i} waits in {json.loads(wait)[2]}." for i, wait in waits.items())
                raise _endless(
                    f"The processes wait for each other in different calls, so none of them can continue:{lines}\n{SAME_CALLS}"
                )

    def _decide(self) -> None:
        before = self._waits
        self._waits = {key.rpartition("/")[2]: text for key, text in self._store.key_value_dir_get(f"{_WAITS}/")}
        if self._waits != before or len(self._waits) + len(_ends(self._store)) < jax.process_count():
            return
        waits = [json.loads(text) for text in self._waits.values()]
        num_in = collections.Counter(json.dumps(place) for place, *_ in waits)
        if all(num_in[json.dumps(place)] < num_processes for place, num_processes, *_ in waits):
            key = zlib.crc32(json.dumps(self._waits).encode())
            self._store.key_value_set(f"{_DEADLOCKS}/{key}", json.dumps(self._waits), True)

    def lost(self, missing: Sequence[int]) -> list[int]:
        """Returns the processes of `missing` that JAX has lost, once it is known. JAX's answer waits for those that live."""
        if tuple(missing) != tuple(self._queried):
            self._queried, self._lost = tuple(missing), None

            def query() -> None:
                with contextlib.suppress(RuntimeError):  # the processes have separated
                    live = live_processes(self._store, [jax.process_index(), *missing])
                    if tuple(missing) == tuple(self._queried):
                        self._lost = [process for process in missing if process not in live]

            threading.Thread(target=query, daemon=True, name="jdist live processes").start()
        return self._lost or []


def _endless(message: str) -> RuntimeError:
    """Returns the error of a wait that can never end. If it ends the program, the exit status is `HUNG`."""
    if threading.current_thread() is threading.main_thread():
        activity.calls.forget_records()  # the call was recorded here, but not on the others
    return exit_work.with_exit_status(RuntimeError(message), HUNG)


def _ends(store: Any) -> dict[int, dict[str, Any]]:
    """Returns the records of the processes that have ended."""
    return {int(key.rpartition("/")[2]): json.loads(text) for key, text in store.key_value_dir_get(f"{_ENDED}/")}
