"""The messages between the job and the launchers of its machines, as lines of JSON."""

import json
from collections.abc import Sequence
from typing import NamedTuple

from jdist._src.core.connections import json_line
from jdist._src.launch.end_rules import Failure

PROTOCOL = "jdist-job-2"


class Hello(NamedTuple):
    """The first message of a machine to machine 0.

    Attributes:
        protocol: `PROTOCOL`.
        machine: The index of the machine.
        num_machines: The number of machines that it expects.
        num_slots: The number of processes that it can run.
        program: The script or the module.
        name: The host and the id of the launcher, for messages.
    """

    protocol: str
    machine: int
    num_machines: int
    num_slots: int
    program: str
    name: str


class Alive(NamedTuple):
    """A sign of life, in both directions."""


class Start(NamedTuple):
    """Starts the processes of an attempt on a machine.

    Attributes:
        restarts: The number of restarts before this attempt.
        num_processes: The number of processes on all machines.
        first_process: The index of the first process on this machine.
        slots: The slot of each process of this machine.
        text: The reason of a restart; empty at the first attempt.
    """

    restarts: int
    num_processes: int
    first_process: int
    slots: Sequence[int]
    text: str


class End(NamedTuple):
    """Ends the processes of a machine.

    Attributes:
        seconds: The time between SIGTERM and SIGKILL.
        reason: Why.
    """

    seconds: float
    reason: str


class Signal(NamedTuple):
    """A signal to forward to the processes: from a machine that has received it, and to the others.

    Attributes:
        number: The signal.
        times: How often the machine has received it.
    """

    number: int
    times: int


class Finish(NamedTuple):
    """The end of the job.

    Attributes:
        status: The exit status.
        text: Why the job has failed; empty if it has not.
    """

    status: int
    text: str


class Joining(NamedTuple):
    """A process of a machine waits for the other processes to join."""


class Absent(NamedTuple):
    """A process of a machine has ended with exit status 0 before it joined the others.

    Attributes:
        process: The index of the process.
    """

    process: int


class Ended(NamedTuple):
    """All processes of a machine have ended.

    Attributes:
        statuses: Their exit statuses, `-n` after signal `n`.
        signal: The first signal that the launcher forwarded, or None.
    """

    statuses: Sequence[int]
    signal: int | None


Message = Hello | Alive | Start | End | Signal | Finish | Joining | Absent | Ended | Failure
_KINDS = {kind.__name__: kind for kind in (Hello, Alive, Start, End, Signal, Finish, Joining, Absent, Ended, Failure)}


def encode(message: Message) -> bytes:
    r"""Returns a message as a line of JSON.

    Example:
        >>> encode(Signal(15, 1))
        b'{"kind": "Signal", "number": 15, "times": 1}\n'
    """
    return json_line({"kind": type(message).__name__, **message._asdict()})


def decode(line: bytes) -> Message:
    """Returns the message of a line.

    Raises:
        ValueError: The line is not a message.

    Example:
        >>> decode(encode(Signal(15, 1)))
        Signal(number=15, times=1)
    """
    try:
        fields = json.loads(line)
        return _KINDS[fields.pop("kind")](**fields)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"not a message: {line[:80]!r}") from error
