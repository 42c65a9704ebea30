"""Decides when the processes of all machines start and end. It runs in the launcher of machine 0, and reads no sockets."""

import dataclasses
import time
from collections.abc import Callable, Iterable
from typing import NamedTuple

from jdist._src.launch.end_rules import NOT_JOINED, EndTimes, Failure, failure_report, signal_status
from jdist._src.launch.messages import Absent, End, Ended, Finish, Joining, Message, Signal, Start
from jdist._src.launch.output import Console

_FIRST_MESSAGE_SECONDS = 1.0  # in which machines usually connect
_MESSAGE_SECONDS = 30.0


class JobSettings(NamedTuple):
    """The settings of a job.

    Attributes:
        num_machines: The number of machines.
        slots_per_machine: The number of processes that a machine can run.
        min_processes: The smallest number of processes, over all machines.
        max_restarts: How many failures are followed by a restart.
        rejoin_seconds: The time after which a slot with a failed process, or a machine that connects while processes run, is
            used again.
        join_seconds: The time in which machines have to connect, if too few are connected.
        times: The time that processes have to end.
    """

    num_machines: int
    slots_per_machine: int
    min_processes: int
    max_restarts: int
    rejoin_seconds: float
    join_seconds: float
    times: EndTimes

    @property
    def max_processes(self) -> int:
        """The largest number of processes, over all machines."""
        return self.num_machines * self.slots_per_machine


class Place(NamedTuple):
    """Where a process runs: the machine and its slot."""

    machine: int
    slot: int


@dataclasses.dataclass
class _Machine:
    """A connected machine. Mutable: `free_times` are the times from which on each slot is used."""

    name: str
    send: Callable[[Message], None]
    free_times: list[float]


@dataclasses.dataclass
class _Attempt:
    """The running attempt. Mutable.

    Attributes:
        places: The place of each process.
        running: The machines whose processes have not all ended.
        statuses: The exit statuses of processes that have ended.
        leaving: The machines that leave after a signal.
        joining: The machines with processes that wait for the others to join.
        absent: The machines of processes that have ended before they joined.
        reason: Why the processes are being ended; empty if they are not.
        ended_at: The time of that.
        status: The exit status of the launcher, if the job ends for that reason.
        report: The message of the launcher in that case.
        is_failure: Whether it counts as a failure.
        is_last: Whether the job ends with this attempt.
    """

    places: list[Place]
    running: set[int]
    statuses: list[int] = dataclasses.field(default_factory=list)
    leaving: set[int] = dataclasses.field(default_factory=set)
    joining: set[int] = dataclasses.field(default_factory=set)
    absent: dict[int, int] = dataclasses.field(default_factory=dict)
    reason: str = ""
    ended_at: float = 0.0
    status: int = 0
    report: str = ""
    is_failure: bool = False
    is_last: bool = False


class Job:
    """The attempts of a program on all machines.

    Mutable: it stores the connected machines, and the running attempt.

    A machine has slots, and each process of an attempt has one. A slot whose process has failed is not used for some time,
    unless the job would have fewer than `min_processes` without it. An attempt ends for the first of these reasons: a process
    fails; a machine with processes is lost, or leaves; more slots can be used; or machine 0 receives a signal. The
    processes of all machines are ended, and the next attempt starts with the slots that can be used then.

    Args:
        settings: The settings.
        console: Receives messages.
        clock: Returns the time in seconds.
    """

    def __init__(self, settings: JobSettings, console: Console, clock: Callable[[], float] = time.monotonic):
        self._settings, self._console, self._clock = settings, console, clock
        self._machines: dict[int, _Machine] = {}
        self._attempt: _Attempt | None = None
        self._restarts = self._failures = 0
        self._last: _Attempt | None = None  # the attempt before
        self._signal: int | None = None
        self._refusal = ""  # of the last machine that was refused
        self._is_finished = False
        self._wait_since = clock()
        self._next_message = clock() + _FIRST_MESSAGE_SECONDS

    # What happens.

    def connect(self, machine: int, name: str, send: Callable[[Message], None]) -> None:
        """Adds a machine.

        Args:
            machine: The index of the machine.
            name: Its name, for messages.
            send: Sends a message to it.
        """
        free_time = self._clock() + (self._settings.rejoin_seconds if self._attempt is not None else 0.0)
        self._machines[machine] = _Machine(name, send, [free_time] * self._settings.slots_per_machine)

    def refuse(self, name: str, problem: str) -> None:
        """Reports that a machine was refused. The job still waits for it: the same machine may connect with other options.

        Args:
            name: Its name, for messages.
            problem: Why it was refused.
        """
        self._refusal = f" The launcher on {name} was refused: {problem}"
        self._console.message(f"the launcher on {name} was refused: {problem}")

    def disconnect(self, machine: int, reason: str) -> None:
        """Removes a machine.

        Args:
            machine: The index of the machine.
            reason: Why it was lost.
        """
        lost = self._machines.pop(machine, None)
        attempt = self._attempt
        if lost is None or attempt is None or machine not in attempt.running:
            return
        text = f"machine {machine} ({lost.name}) was lost: {reason}"
        is_failure = machine not in attempt.leaving
        self._end_attempt(text, self._settings.times.grace_seconds, status=1, report=text, is_failure=is_failure)
        self._note_end(machine, [])

    def receive(self, machine: int, message: Message) -> None:
        """Processes a message of a machine. A machine that has left may still send some."""
        attempt = self._attempt
        if machine not in self._machines:
            return
        if isinstance(message, Signal):
            self._receive_signal(machine, message)
        elif isinstance(message, Failure) and attempt is not None:
            self._note_failure(attempt, machine, message)
        elif isinstance(message, Joining | Absent) and attempt is not None:
            self._note_presence(attempt, machine, message)
        elif isinstance(message, Ended) and attempt is not None and machine in attempt.running:
            if machine in attempt.leaving:
                text = f"machine {machine} ({self._machines[machine].name}) has left after a signal"
                self._end_attempt(text, self._settings.times.save_seconds, except_machine=machine)
                self._dismiss(machine, signal_status(message.signal or 0, message.statuses))
            self._note_end(machine, list(message.statuses))

    def apply(self) -> None:
        """Starts an attempt, or ends it because more slots can be used. Call it after each event, and every second."""
        if self._is_finished:
            return
        attempt = self._attempt
        if attempt is None:
            self._start_or_wait()
            return
        free = [place for place in self._free_places() if place not in attempt.places]
        if free and not (attempt.reason or attempt.leaving or self._signal):
            machines = sorted({place.machine for place in free})
            text = (
                f"{len(free)} more process{'es' * (len(free) > 1)} can run on machine {', '.join(map(str, machines))}"
            )
            self._end_attempt(text, self._settings.times.save_seconds)

    # The end of an attempt.

    def _receive_signal(self, machine: int, received: Signal) -> None:
        attempt = self._attempt
        is_elastic = self._settings.min_processes < self._settings.max_processes
        if is_elastic and machine != 0:  # the job continues without it
            if attempt is not None and machine in attempt.running:
                attempt.leaving.add(machine)
            else:
                self._dismiss(machine, 128 + received.number)
            return
        self._signal = self._signal or received.number
        if attempt is None:
            self._finish(128 + received.number)
            return
        for other in attempt.running - {machine}:
            self._machines[other].send(received)

    def _note_presence(self, attempt: _Attempt, machine: int, message: Joining | Absent) -> None:
        """Ends the attempt if processes of a machine wait for one of another machine that ends before it joins them."""
        if isinstance(message, Joining):
            attempt.joining.add(machine)
        else:
            attempt.absent[message.process] = machine
        for process, of_process in attempt.absent.items():
            if (attempt.joining & attempt.running) - {of_process}:
                self._note_failure(attempt, of_process, Failure(process, 1, "", NOT_JOINED), ends_itself=False)

    def _note_failure(self, attempt: _Attempt, machine: int, failure: Failure, ends_itself: bool = True) -> None:
        if failure.process >= 0 and machine in self._machines:
            place = attempt.places[failure.process]
            self._machines[machine].free_times[place.slot] = self._clock() + self._settings.rejoin_seconds
        self._end_attempt(
            failure.description,
            self._settings.times.seconds_after(failure.status),
            status=failure.exit_status,
            report=failure_report(failure, len(attempt.places)),
            is_failure=not attempt.leaving,
            except_machine=machine if ends_itself else None,
        )
        attempt.is_last |= failure.process < 0  # the reader of the output has ended

    def _end_attempt(
        self,
        reason: str,
        seconds: float,
        *,
        status: int = 0,
        report: str = "",
        is_failure: bool = False,
        except_machine: int | None = None,
    ) -> None:
        """Ends the processes on all machines except for one, which ends its processes itself. The first reason counts."""
        attempt = self._attempt
        assert attempt is not None
        if attempt.reason:
            return
        attempt.reason, attempt.status, attempt.report, attempt.is_failure = reason, status, report, is_failure
        attempt.ended_at = self._clock()
        for machine in attempt.running - {except_machine}:
            if machine in self._machines:
                self._machines[machine].send(End(seconds, reason))

    def _note_end(self, machine: int, statuses: Iterable[int]) -> None:
        attempt = self._attempt
        assert attempt is not None
        attempt.running.discard(machine)
        attempt.statuses += statuses
        if not attempt.running:
            self._attempt, self._last = None, attempt
            self._wait_since = self._clock()
            self._next_message = self._wait_since + _FIRST_MESSAGE_SECONDS
            self._conclude(attempt)

    def _conclude(self, attempt: _Attempt) -> None:
        has_succeeded = len(attempt.statuses) == len(attempt.places) and not any(attempt.statuses)
        if self._signal is not None:
            self._finish(attempt.status or signal_status(self._signal, attempt.statuses), attempt.report)
        elif has_succeeded:
            self._finish(0)
        elif attempt.is_last or (attempt.is_failure and self._failures >= self._settings.max_restarts):
            self._finish(attempt.status, attempt.report)
        else:
            self._restarts += 1
            self._failures += attempt.is_failure

    def _finish(self, status: int, text: str = "") -> None:
        self._is_finished = True
        for machine in list(self._machines):
            self._dismiss(machine, status, text)

    def _dismiss(self, machine: int, status: int, text: str = "") -> None:
        """Ends the part of a machine in the job."""
        self._machines.pop(machine).send(Finish(status, text))

    # The start of an attempt.

    def _start_or_wait(self) -> None:
        places = self._places_of_next_attempt()
        if len(places) >= self._settings.min_processes and self._is_complete_or_late(places):
            self._start(places)
            return
        now = self._clock()
        absent = [str(i) for i in range(self._settings.num_machines) if i not in self._machines]
        is_plural = len(absent) > 1
        text = f"machine{'s' * is_plural} {', '.join(absent)} of {self._settings.num_machines}"
        if now > self._wait_since + self._settings.join_seconds:
            self._finish(
                (self._last.status if self._last is not None else 0) or 1,
                f"the job ends: {text} {'have' if is_plural else 'has'} not connected within "
                f"{self._settings.join_seconds:g} seconds. Start `jdist run` there with its --node-rank, and check that it can "
                f"reach machine 0.{self._refusal}",
            )
        elif now > self._next_message:
            self._next_message = now + _MESSAGE_SECONDS
            least = f"at least {self._settings.min_processes} processes must run, and {len(places)} can run now"
            self._console.message(f"waits for {text}: {least}.{self._refusal}")

    def _is_complete_or_late(self, places: list[Place]) -> bool:
        """Whether all slots can be used, or the first attempt has waited long enough for them."""
        if self._last is not None or len(places) == self._settings.max_processes:
            return True
        seconds = min(self._settings.rejoin_seconds, self._settings.join_seconds)
        return self._clock() > self._wait_since + seconds

    def _free_places(self) -> list[Place]:
        now = self._clock()
        return [
            Place(machine, slot)
            for machine in sorted(self._machines)
            for slot, time in enumerate(self._machines[machine].free_times)
            if time <= now
        ]

    def _places_of_next_attempt(self) -> list[Place]:
        """Returns the free slots, and others if they are too few. Process 0 runs on machine 0."""
        places = self._free_places()
        others = [
            (machine != 0, time, Place(machine, slot))
            for machine, connected in self._machines.items()
            for slot, time in enumerate(connected.free_times)
            if Place(machine, slot) not in places
        ]
        for is_other_machine, _, place in sorted(others):
            has_process_0 = any(chosen.machine == 0 for chosen in places)
            if len(places) < self._settings.min_processes or not (has_process_0 or is_other_machine):
                places.append(place)
        return sorted(places)

    def _start(self, places: list[Place]) -> None:
        text = self._restart_text(len(places))
        machines = sorted({place.machine for place in places})
        self._attempt = _Attempt(places, set(machines))
        first_process = 0
        for machine in machines:
            slots = [place.slot for place in places if place.machine == machine]
            self._machines[machine].send(Start(self._restarts, len(places), first_process, slots, text))
            first_process += len(slots)

    def _restart_text(self, num_processes: int) -> str:
        last = self._last
        if last is None:
            return ""
        text = "restart"
        if last.is_failure:
            text += f" {self._failures} of {self._settings.max_restarts}"
        text += f", {self._clock() - last.ended_at:.1f} seconds after this: {last.reason}."
        if num_processes != len(last.places):
            text += f" The job continues with {num_processes} instead of {len(last.places)} processes."
        return text
