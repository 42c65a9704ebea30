"""Starts the processes of a program again after a failure, and with more processes when more can run."""

import select
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from jdist._src.launch.end_rules import AttemptResult, EndRules, EndTimes, report_failure
from jdist._src.launch.output import Console
from jdist._src.launch.signals import ReceivedSignals

_CAPACITY_CHECK_SECONDS = 1.0
_MESSAGE_SECONDS = 30.0


class JobSettings(NamedTuple):
    """The settings of a job.

    Attributes:
        max_processes: The largest number of processes.
        min_processes: The smallest number of processes.
        max_restarts: The number of failures that are followed by a restart.
        rejoin_seconds: The time after which a slot with a failed process, or a node that was added, is used again.
        join_seconds: The time in which nodes have to be added, if too few processes can run.
        times: The time that processes have to end.
    """

    max_processes: int
    min_processes: int
    max_restarts: int
    rejoin_seconds: float
    join_seconds: float
    times: EndTimes


class AttemptPlan(NamedTuple):
    """An attempt to start.

    Attributes:
        restarts: The number of restarts before it.
        num_processes: The number of processes on all machines.
        first_process: The index of the first process that is started here.
        slots: The slot of each process that is started here.
    """

    restarts: int
    num_processes: int
    first_process: int
    slots: Sequence[int]


class CapacityError(ValueError):
    """Too few processes can run on the nodes of a cluster."""


class Job:
    """The attempts of a program.

    Mutable: it stores the times from which on the slots are used, and the restarts.

    A job has `max_processes` slots, and each process of an attempt has one. A slot whose process has failed is not used for
    some time, unless the job would have fewer than `min_processes` without it. An attempt ends for the first of these reasons:
    a process fails, more processes can run, or the launcher receives a signal. All processes are ended, and the next attempt
    starts with the slots that can be used then.

    Args:
        settings: The settings.
        run: Runs the processes of an attempt. It calls its second argument after each event, and every second. It raises
            `CapacityError` if too few processes can run.
        signals: The signals that this process receives.
        console: Receives messages.
        capacity: Returns the number of processes that can run.
        place: Where further processes can run, for messages.
    """

    def __init__(
        self,
        settings: JobSettings,
        run: Callable[[AttemptPlan, Callable[[EndRules], None]], AttemptResult],
        signals: ReceivedSignals,
        console: Console,
        capacity: Callable[[], int],
        place: str,
    ):
        self._settings, self._run, self._signals, self._console = settings, run, signals, console
        self._capacity, self._place = capacity, place
        self._free_times = [0.0] * settings.max_processes
        # The number of processes that can run. It grows when the capacity was larger for `rejoin_seconds`.
        self._usable = settings.max_processes
        self._usable_time = self._next_check = 0.0
        self._restarts = self._failures = 0
        self._attempt = AttemptPlan(0, 0, 0, ())
        self._end_reason, self._end_time = "", 0.0  # of the attempt

    def run(self) -> int:
        """Runs the attempts, and returns the exit status of the launcher."""
        result = AttemptResult((), None, None)
        while True:
            slots = self._wait_for_slots()
            if self._signals.numbers:
                return 128 + self._signals.numbers[0]
            if len(slots) < self._settings.min_processes:
                return result.exit_status or 1
            if self._end_reason:
                self._console.message(self._restart_text(result, len(slots)))
            last = self._attempt, self._end_reason, self._end_time
            self._attempt = AttemptPlan(self._restarts, len(slots), 0, slots)
            self._end_reason, self._end_time = "", 0.0
            try:
                result = self._run(self._attempt, self._check)
            except CapacityError:  # a node was lost before the processes started
                self._attempt, self._end_reason, self._end_time = last
                continue
            self._end_time = self._end_time or time.monotonic()
            if self._ends_after(result):
                report_failure(result, len(slots), self._console)
                return result.exit_status
            failure = result.first_failure
            self._end_reason = self._end_reason or (failure.description if failure is not None else "")
            self._restarts += 1
            self._failures += failure is not None

    def _check(self, rules: EndRules) -> None:
        """Ends the running attempt if more processes can run, and records when it ends for another reason."""
        now = time.monotonic()
        if rules.is_ending():
            self._end_time = self._end_time or now
            return
        if now < self._next_check:
            return
        self._next_check = now + _CAPACITY_CHECK_SECONDS
        capacity = self._capacity()
        if capacity <= self._usable or now > self._usable_time + self._settings.rejoin_seconds:
            self._usable, self._usable_time = capacity, now
        if (count := len(self._free_slots()) - len(self._attempt.slots)) > 0:
            self._end_time = now
            self._end_reason = f"{count} more process{'es' * (count > 1)} can run on {self._place}"
            rules.end(self._settings.times.save_seconds, self._end_reason)

    def _ends_after(self, result: AttemptResult) -> bool:
        """Returns whether the job ends after an attempt. If not, the slot of a failed process is not used for some time."""
        failure = result.first_failure
        if failure is None:
            return result.signal is not None or not any(result.statuses)
        if result.signal is not None or failure.process < 0:  # the reader of the output has ended
            return True
        self._free_times[self._attempt.slots[failure.process]] = self._end_time + self._settings.rejoin_seconds
        return self._failures >= self._settings.max_restarts

    def _free_slots(self) -> list[int]:
        """Returns the slots that can be used."""
        now = time.monotonic()
        return [slot for slot, free_time in enumerate(self._free_times) if free_time <= now][: self._usable]

    def _wait_for_slots(self) -> list[int]:
        """Returns the slots of the next attempt; too few after a signal, or if no nodes were added in time."""
        start = time.monotonic()
        next_message = start + _CAPACITY_CHECK_SECONDS
        while True:
            self._usable, self._usable_time = self._capacity(), time.monotonic()
            slots = self._free_slots()
            unused = [slot for slot in range(self._settings.max_processes) if slot not in slots]
            unused.sort(key=lambda slot: self._free_times[slot])
            slots += unused[: max(0, min(self._settings.min_processes, self._usable) - len(slots))]
            if len(slots) >= self._settings.min_processes or self._signals.numbers:
                return sorted(slots)
            least = f"at least {self._settings.min_processes} processes must run, and {len(slots)} can run now."
            if time.monotonic() > start + self._settings.join_seconds:
                self._console.message(
                    f"the job ends: {least} No node was added to {self._place} within {self._settings.join_seconds:g} seconds."
                )
                return slots
            if time.monotonic() > next_message:
                next_message = time.monotonic() + _MESSAGE_SECONDS
                self._console.message(f"waits for nodes of {self._place}: {least}")
            select.select([self._signals.wake_up], [], [], _CAPACITY_CHECK_SECONDS)
            self._signals.discard_wake_ups()

    def _restart_text(self, result: AttemptResult, num_processes: int) -> str:
        text = "restart"
        if result.first_failure is not None:
            text += f" {self._failures} of {self._settings.max_restarts}"
        text += f", {time.monotonic() - self._end_time:.1f} seconds after this: {self._end_reason}."
        if num_processes != self._attempt.num_processes:
            text += f" The job continues with {num_processes} instead of {self._attempt.num_processes} processes."
        return text
