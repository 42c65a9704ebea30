"""The statuses of all processes in JAX's key-value store, the decision to end the job, and different calls of programs.

A thread of each process posts the status of the process at regular intervals, and reads the decision. If a wait of a process
exceeds the time limit, its thread reads the statuses twice. A process whose status has not changed in between does not
answer. If no process works, the first thread that posts a decision ends the job. So all processes act alike.

A status contains digests of the records of calls (`jdist._src.core.call_records`), which process 0 compares.
"""

import contextlib
import json
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax

from jdist._src.core import activity, call_records
from jdist._src.core.background_threads import start_thread
from jdist._src.core.jax_compat import key_value_store

_STATUS, _DECISIONS, _REPORTED = "jdist/status", "jdist/decisions", "jdist/reported"
# The names of decisions: to end the job, and to compare the calls of two processes; and of the records of one of the two.
_END, _COMPARED, _RECORDS = "end", "compared", "records"
_FAST = 1 / 20  # of the interval: the polls of a thread that other processes wait for
# Seconds without a new status after which the others do not wait at their exit for a process that has not ended.
LOST_SECONDS = 30.0


class Status(NamedTuple):
    """The activity of a process.

    Attributes:
        line: The sentence about the process in warnings and reports.
        waits: Whether it waits for other processes.
        work: Its work without a time limit, or None.
        has_ended: Whether it has reached the end of its program.
        has_failed: Whether an error has ended its program.
        number: The number of statuses that it posted before.
        launches: The number of launches of programs, by the processes that take part in them.
        newest_launch: The name of these launches, and of the program that was launched last.
        awaits: What it waits for: the round of messages, or the name of such launches and their number; and the processes that
            take part, or None for all.
        marks: The marks of its records of calls.
    """

    line: str
    waits: bool = False
    work: str | None = None
    has_ended: bool = False
    has_failed: bool = False
    number: int = 0
    launches: Mapping[str, int] = {}  # noqa: RUF012
    newest_launch: tuple[str, str] = ("", "")
    awaits: tuple[str, int, Sequence[int] | None] | None = None
    marks: Sequence[Sequence[int]] = ()


class Decision(NamedTuple):
    """The decision to end the job.

    Attributes:
        process: The process that decided.
        silent: The processes that do not answer.
        reason: The reason, for the report.
    """

    process: int
    silent: Sequence[int]
    reason: str


def awaited_processes(process: int, statuses: Mapping[int, Status]) -> set[int]:
    """Returns the processes that a process waits for: they have not launched the same program, or are not in the same round."""
    status = statuses[process]
    if status.awaits is None:
        return set()
    name, number, processes = status.awaits
    others = (statuses.keys() if processes is None else statuses.keys() & set(processes)) - {process}
    if not number:
        return {other for other in others if (statuses[other].awaits or ("",))[0] != name}

    def has_launched(other: Status) -> bool:
        count = other.launches.get(name, 0)
        launch, other_launch = list(status.newest_launch), list(other.newest_launch)
        is_other_program = launch != other_launch and launch[0] == other_launch[0]
        return count > number or (count == number and not is_other_program)

    return {other for other in others if not has_launched(statuses[other])}


def stuck_processes(statuses: Mapping[int, Status]) -> set[int]:
    """Returns the processes that have ended, and those that can never continue.

    A program needs all processes that take part. In a round of messages, a process may have posted and not wait, so it is
    stuck only if all processes that do not wait in it are.
    """
    ended = {process for process, status in statuses.items() if status.has_ended}
    stuck = ended | {process for process, status in statuses.items() if status.awaits is not None and not status.work}
    while True:
        free = set[int]()
        for process in stuck - ended:
            awaits, awaited = statuses[process].awaits, awaited_processes(process, statuses)
            is_program = awaits is not None and awaits[1] > 0
            if not awaited & stuck or not (is_program or awaited <= stuck):
                free.add(process)
        if not free:
            return stuck
        stuck -= free


class StatusBoard:
    """Exchanges the statuses of all processes.

    Mutable: its thread and the watchdog communicate by the attributes.

    Args:
        interval: The seconds between two exchanges.
        answer_seconds: The seconds in which a process must post a new status to have answered.

    Attributes:
        status: The status of this process. Written by the watchdog.
        suspicion: The reason to end the job, if a wait of this process exceeds its time limit. Written by the watchdog.
        needs_answers: Whether this is a reason only if all processes answer. Written by the watchdog.
        reads_statuses: Whether to read the statuses of all processes in each exchange. Written by the watchdog.
        has_reported: Set when the watchdog has printed the report.
        statuses: The statuses of the processes, as read last.
        answer_times: The time of the read that found the last new status of each process.
        decision: The decision to end the job, once there is one.
        difference: `CallLog.num_forgotten`, and the message about different calls of programs; None if there are none.
        last_exchange: The time of the last complete exchange.
        num_postponed: The number of times that the job was not ended because a process works.
        all_have_reported: Set when all processes that answer have printed their reports.
    """

    def __init__(self, interval: float, answer_seconds: float):
        self._interval, self._answer_seconds = interval, answer_seconds
        self._process, self._num_processes = jax.process_index(), jax.process_count()
        self._number = 0
        self._stop = threading.Event()
        self.status = Status("")
        self.suspicion, self.needs_answers, self.reads_statuses = "", False, False
        self.has_reported, self.all_have_reported = threading.Event(), threading.Event()
        self.statuses: Mapping[int, Status] = {}
        self.answer_times: dict[int, float] = {}
        self.decision: Decision | None = None
        self.difference: tuple[int, str] | None = None
        self.last_exchange = time.monotonic()
        self.num_postponed = 0

    def start(self) -> None:
        """Starts the thread."""
        start_thread(self._run, (), name="jdist status", stop=self._stop.set)

    def wait_for_end_of_others(self, silent_seconds: float = LOST_SECONDS) -> list[int]:
        """Waits until the other processes have ended their programs, or have not answered for `silent_seconds`.

        Returns:
            The processes that have not ended.
        """
        poll = self._interval * _FAST
        statuses: dict[int, Status] = {}
        times: dict[int, float] = {}  # of the last change of each status
        while jax.distributed.is_initialized():
            store, now = key_value_store(), time.monotonic()
            self._post(store)
            before, statuses = statuses, _read_statuses(store)
            times |= {process: now for process, status in statuses.items() if before.get(process) != status}
            if all(status.has_ended or now - times[i] > silent_seconds for i, status in statuses.items()):
                return [process for process, status in statuses.items() if not status.has_ended]
            time.sleep(poll)
            poll = min(self._interval / 2, 1.5 * poll)
        return []

    def _run(self) -> None:
        while self.decision is None and jax.distributed.is_initialized():
            # A process that loses process 0 gets errors here, until JAX ends it.
            with contextlib.suppress(RuntimeError):
                self._exchange(key_value_store())
                self.last_exchange = time.monotonic()
            if self._stop.wait(self._interval):
                return
        if self.decision is not None:
            with contextlib.suppress(RuntimeError):  # as above
                self._await_reports(key_value_store(), self.decision)
            self.all_have_reported.set()

    def _exchange(self, store: Any) -> None:
        self._post(store)
        decisions = _read_decisions(store)
        self.decision = _decision_of(decisions)
        if self.suspicion and self.decision is None:
            self._decide(store, self.suspicion)
        elif self.reads_statuses or self._process == 0:
            self._read(store)
        self._compare_calls(store, decisions, activity.calls.num_forgotten)

    def _compare_calls(self, store: Any, decisions: Mapping[str, str], num_forgotten: int) -> None:
        """Finds out whether two processes have made different calls: first by the digests, then by the records of the two."""
        if self.difference is not None and self.difference[0] == num_forgotten:
            return
        compared = f"{_COMPARED}-{num_forgotten}"
        if compared not in decisions:
            marks = {process: status.marks for process, status in self.statuses.items()} if self._process == 0 else {}
            marks = {process: [mark for mark in marks[process] if mark[0] == num_forgotten] for process in marks}
            if different := call_records.different_processes(marks):
                store.key_value_set(f"{_DECISIONS}/{compared}", json.dumps(different), True)
            return
        first, other = json.loads(decisions[compared])
        key = f"{_RECORDS}-{num_forgotten}-{self._process}"
        if self._process in (first, other) and key not in decisions:
            store.key_value_set(f"{_DECISIONS}/{key}", json.dumps(activity.calls.newest_records()), True)
        posted = (decisions.get(f"{_RECORDS}-{num_forgotten}-{process}", "[]") for process in (first, other))
        records = list(map(json.loads, posted))
        if all(records):
            first_records, other_records = records
            text = call_records.difference_text(first, first_records, other, other_records)
            self.difference = num_forgotten, text

    def _decide(self, store: Any, reason: str) -> None:
        """Ends the job, unless the wait ends meanwhile, or a process works."""
        deadline = time.monotonic() + self._answer_seconds
        before = _read_statuses(store)
        silent = list(range(self._num_processes))
        while silent and time.monotonic() < deadline:
            self._stop.wait(self._interval / 4)
            self._post(store)
            self.last_exchange = time.monotonic()
            self.decision = _decision_of(_read_decisions(store))
            if self.decision is not None:  # the process that decided posts no new status
                return
            self._read(store)
            silent = [process for process in silent if not self._has_answered(process, before)]
        if not self.suspicion:
            return
        is_working = any(status.work for process, status in self.statuses.items() if process not in silent)
        if is_working or (silent and self.needs_answers):
            self.num_postponed += 1
            self.suspicion = ""
            return
        with contextlib.suppress(jax.errors.JaxRuntimeError):  # another process has decided
            store.key_value_set(f"{_DECISIONS}/{_END}", json.dumps(Decision(self._process, silent, reason)))
        self.decision = _decision_of(_read_decisions(store))

    def _read(self, store: Any) -> None:
        before, self.statuses = self.statuses, _read_statuses(store)
        changed = [process for process, status in self.statuses.items() if before.get(process) != status]
        self.answer_times |= dict.fromkeys(changed, time.monotonic())

    def silent_seconds(self, process: int) -> float:
        """Returns the time in which the reads have found no new status of a process that has not ended its program."""
        status = self.statuses.get(process)
        if process == 0 and self._process != 0:  # it has the store
            return time.monotonic() - self.last_exchange
        if status is None or status.has_ended or not self.reads_statuses:
            return 0.0
        return time.monotonic() - self.answer_times[process]

    def _has_answered(self, process: int, before: Mapping[int, Status]) -> bool:
        status = self.statuses.get(process)
        if status is None or status.has_ended:
            return status is not None
        return process not in before or status.number != before[process].number

    def _await_reports(self, store: Any, decision: Decision) -> None:
        deadline = time.monotonic() + self._answer_seconds
        self.has_reported.wait(self._answer_seconds)
        store.key_value_set(f"{_REPORTED}/{self._process}", "1")
        expected = self._num_processes - len(decision.silent)
        while len(store.key_value_dir_get(f"{_REPORTED}/")) < expected and time.monotonic() < deadline:
            time.sleep(self._interval * _FAST)

    def _post(self, store: Any) -> None:
        self._number += 1
        text = json.dumps(self.status._replace(number=self._number))
        store.key_value_set(f"{_STATUS}/{self._process}", text, allow_overwrite=True)


def _read_statuses(store: Any) -> dict[int, Status]:
    entries = store.key_value_dir_get(f"{_STATUS}/")
    return {int(key.rpartition("/")[2]): Status(*json.loads(text)) for key, text in entries}


def _read_decisions(store: Any) -> dict[str, str]:
    return {key.rpartition("/")[2]: text for key, text in store.key_value_dir_get(f"{_DECISIONS}/")}


def _decision_of(decisions: Mapping[str, str]) -> Decision | None:
    return Decision(*json.loads(decisions[_END])) if _END in decisions else None
