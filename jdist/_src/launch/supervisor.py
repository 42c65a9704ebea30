"""Runs attempts on this machine when the job starts them, and reports how they ended."""

import collections
import select
from collections.abc import Callable
from typing import Protocol

from jdist._src.launch.attempt import Link
from jdist._src.launch.control import ConnectionLostError, ControlServer, JobConnection
from jdist._src.launch.end_rules import AttemptResult, EndRules, Failure
from jdist._src.launch.job import Job
from jdist._src.launch.messages import Absent, End, Ended, Finish, Joining, Message, Signal, Start
from jdist._src.launch.output import Console
from jdist._src.launch.signals import ReceivedSignals

_POLL_SECONDS = 0.2  # while no processes run


AttemptRunner = Callable[[Start, Link | None], AttemptResult]


class Channel(Protocol):
    """The messages between the job and a machine."""

    def fileno(self) -> int | None:
        """Returns a file that is readable when a message has arrived; None if messages arrive by calls only."""
        ...

    def send(self, message: Message) -> None:
        """Sends a message to the job."""
        ...

    def receive(self) -> list[Message]:
        """Returns the messages that have arrived.

        Raises:
            ConnectionLostError: The connection has ended.
        """
        ...


class LocalChannel:
    """The messages between the job and machine 0, where the job is.

    Mutable: it stores messages for machine 0.

    Args:
        job: The job.
        server: The connections to the other machines; None if there are none.
    """

    def __init__(self, job: Job, server: ControlServer | None):
        self._job, self._server = job, server
        self._messages: list[Message] = []
        job.connect(0, "this machine", self._messages.append)

    def fileno(self) -> int | None:
        """Returns the file of the connections."""
        return self._server.fileno() if self._server is not None else None

    def send(self, message: Message) -> None:
        """Passes a message to the job."""
        self._job.receive(0, message)

    def receive(self) -> list[Message]:
        """Lets the job process its events, and returns its messages for machine 0."""
        if self._server is not None:
            self._server.poll()
        self._job.apply()
        messages, self._messages[:] = list(self._messages), []
        return messages


class RemoteChannel:
    """The messages between the job and another machine.

    Args:
        connection: The connection to machine 0.
    """

    def __init__(self, connection: JobConnection):
        self._connection = connection
        self.send, self.receive = connection.send, connection.receive

    def fileno(self) -> int | None:
        """Returns the socket."""
        return self._connection.socket.fileno()


class _Link:
    """The link of the running attempt. Mutable: it stores messages that concern later attempts."""

    def __init__(self, channel: Channel, signals: ReceivedSignals):
        self._channel, self._signals = channel, signals
        self._num_reported = 0  # signals
        self._later: collections.deque[Message] = collections.deque()
        self.lost: ConnectionLostError | None = None

    def fileno(self) -> int | None:
        return self._channel.fileno() if self.lost is None else None

    def note_failure(self, failure: Failure) -> None:
        self._channel.send(failure)

    def note_joining(self) -> None:
        self._channel.send(Joining())

    def note_absent(self, process: int) -> None:
        self._channel.send(Absent(process))

    def poll(self, rules: EndRules) -> None:
        self._report_signals()
        for message in self._receive():
            if isinstance(message, End):
                rules.end(message.seconds, message.reason)
            elif isinstance(message, Signal):
                self._signals.add(message.number, message.times)
            else:
                self._later.append(message)
        if self.lost is not None:
            rules.end(0.0, str(self.lost))

    def report_end(self, result: AttemptResult) -> None:
        """Reports that all processes of an attempt have ended."""
        self._report_signals()
        self._channel.send(Ended(result.statuses, result.signal))

    def next_message(self) -> Message:
        """Waits for the next start, or the end of the job."""
        while not self._later and self.lost is None:
            self._report_signals()
            self._later += self._receive()
            if not self._later and self.lost is None:
                files = [self._signals.wake_up, *filter(None, [self.fileno()])]
                select.select(files, [], [], _POLL_SECONDS)
                self._signals.discard_wake_ups()
        if not self._later and self.lost is not None:
            raise self.lost
        return self._later.popleft()

    def _report_signals(self) -> None:
        while self._num_reported < len(self._signals.own):
            number = self._signals.own[self._num_reported]
            self._num_reported += 1
            self._channel.send(Signal(number, self._signals.own[: self._num_reported].count(number)))

    def _receive(self) -> list[Message]:
        try:
            return self._channel.receive() if self.lost is None else []
        except ConnectionLostError as error:
            self.lost = error
            return []


def run_attempts(
    channel: Channel,
    run: AttemptRunner,
    *,
    signals: ReceivedSignals,
    console: Console,
) -> int:
    """Runs the attempts that the job starts on this machine, and returns the exit status when the job ends.

    Args:
        channel: The messages of the job.
        run: Runs the processes of an attempt.
        signals: The signals that this process receives.
        console: Receives messages.
    """
    link = _Link(channel, signals)
    while True:
        try:
            message = link.next_message()
        except ConnectionLostError as error:
            console.message(
                f"the connection to machine 0 was lost ({error}), and the processes of this machine were ended."
            )
            return 1
        if isinstance(message, Start | Finish) and message.text:
            console.message(message.text)
        if isinstance(message, Finish):
            return message.status
        if isinstance(message, Start):
            link.report_end(run(message, link))
