"""Calls that the main threads of several processes make together: the comparison of the calls, and of facts about them.

The processes of a mesh have one exchange of messages for all their calls. Calls in different orders on the processes are
therefore found in the next message, and do not wait for each other.
"""

import functools
import json
import math
import time
import zlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh

from jdist._src.core import activity
from jdist._src.core.process_messages import SAME_CALLS, MessageExchange, numbered_name
from jdist._src.core.source_lines import caller_frame, code_at

_TIME_LIMIT: float | None = None  # seconds; None for 20 minutes, or more with a larger time limit of waits
_deadline = math.inf  # of the wait for the other processes


class Difference(NamedTuple):
    """A fact that differs between the processes.

    Attributes:
        subject: The name of the fact.
        first: The first process.
        others: The processes that differ from it.
        local: The process that this process describes: itself if it is one of `others`, else the first.
        value: The value on `local`.
        other_value: The value on the first process, or if `local` is the first, on the first of `others`.
    """

    subject: str
    first: int
    others: Sequence[int]
    local: int
    value: Sequence[Any]
    other_value: Sequence[Any]


def processes_of(mesh: Mesh) -> tuple[int, ...]:
    """Returns the indices of the processes of a mesh, in ascending order."""
    return tuple(sorted({device.process_index for device in mesh.devices.flat}))


def exchange_call(call: str, message: Mapping[str, Any], processes: tuple[int, ...]) -> list[dict[str, Any]]:
    """Posts a message about a call, and returns the messages of all processes that make the call.

    Args:
        call: The call, for errors: "the comparison of `train_step`".
        message: JSON. The calls are different if the entries "kind" differ, by default `call`.
        processes: The processes that make the call.

    Raises:
        ValueError: The processes make different calls; raised on all of them.
        RuntimeError: A process has ended, has posted a failure, or did not make the call within 20 minutes.
    """
    global _deadline
    frame = caller_frame()
    line = f" ({code_at(frame)})" if frame else ""
    # The watchdog ends the job earlier, unless the other processes trace or compile.
    limit = max(1200.0, 2 * activity.time_limit) if _TIME_LIMIT is None else _TIME_LIMIT
    _deadline = time.monotonic() + limit
    exchange = _exchange_of(processes)
    try:
        messages = exchange.exchange(
            {**message, "call": call, "line": line}, f"{call}, which all processes have to call"
        )
    except InterruptedError:
        raise RuntimeError(
            f"{listed(exchange.missing())} did not reach {call} within {limit:g} seconds of process {jax.process_index()}. "
            "Every process must call the same functions in the same order, with arguments of the same shapes: check whether it "
            "still runs, waits for data, or took another branch."
        ) from None
    for received in messages:
        if "failure" in received:
            raise RuntimeError(received["failure"])
    kinds = [received.get("kind", received["call"]) for received in messages]
    if len(set(kinds)) > 1:
        calls = [f"{received['call']}{received['line']}" for received in messages]
        first = next(i for i, kind in enumerate(kinds) if kind != kinds[0])
        raise ValueError(
            f"The processes make different calls: process {processes[0]} is in {calls[0]}, and process {processes[first]} in "
            f"{calls[first]}. {SAME_CALLS}"
        )
    return messages


def post_failure(failure: str, processes: tuple[int, ...]) -> None:
    """Posts the reason why this process cannot make a call. The other processes raise it as an error."""
    _exchange_of(processes).post({"failure": failure})


def find_difference(
    call: str, facts: Mapping[str, Sequence[Any]], messages: Sequence[Mapping[str, Any]], processes: tuple[int, ...]
) -> Difference | None:
    """Returns the first fact that differs between the processes. All of them call it with the same messages.

    Args:
        call: See `exchange_call`.
        facts: The facts of this process: JSON.
        messages: The result of `exchange_call` of messages with `digests_of(facts)` under the key "digests".
        processes: The processes.
    """
    digests = [message["digests"] for message in messages]
    for subject in facts:
        different = [i for i, of_process in enumerate(digests) if of_process[subject] != digests[0][subject]]
        if different:
            index = processes.index(jax.process_index())
            posts = index in (0, different[0])
            details = exchange_call(
                call, {"kind": "values", "values": list(facts[subject]) if posts else []}, processes
            )
            local = index if index in different else 0
            other = different[0] if local == 0 else 0
            others = [processes[i] for i in different]
            return Difference(subject, processes[0], others, processes[local], facts[subject], details[other]["values"])
    return None


def digests_of(facts: Mapping[str, Sequence[Any]]) -> dict[str, int]:
    """Returns a checksum of each fact."""
    return {subject: zlib.crc32(json.dumps(list(values)).encode()) for subject, values in facts.items()}


def listed(processes: Sequence[int]) -> str:
    """Returns the processes as text.

    Example:
        >>> listed([1]), listed([1, 3])
        ('process 1', 'processes 1, 3')
    """
    return f"process{'es' * (len(processes) > 1)} {', '.join(map(str, processes))}"


@functools.cache
def _exchange_of(processes: tuple[int, ...]) -> MessageExchange:
    """Returns the exchange of the calls of these processes."""
    return MessageExchange(
        numbered_name(f"jdist/calls/{zlib.crc32(repr(processes).encode())}"),
        processes.index(jax.process_index()),
        len(processes),
        "a call of all processes",
        lambda: time.monotonic() > _deadline,
        processes=processes,
        in_main_thread=True,
    )
