"""Calls that the main threads of several processes make together: the comparison of the calls, and of facts about them.

The processes of a mesh have one exchange of messages for all their calls. Calls in different orders on the processes are
therefore found in the next message, and do not wait for each other.
"""

import collections
import functools
import json
import math
import sys
import time
import zlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import core
from jax.sharding import Mesh

from jdist._src.core import activity, exit_work
from jdist._src.core.call_records import SAME_CALLS, difference_text
from jdist._src.core.exit_statuses import HUNG
from jdist._src.core.jax_compat import key_value_store
from jdist._src.core.process_messages import MessageExchange, numbered_name
from jdist._src.core.source_lines import caller_text

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


def launches_on(mesh: Mesh) -> activity.Launches:
    """Returns the launches of the programs that run on the processes of a mesh."""
    processes = processes_of(mesh)
    return activity.launches_of(None if len(processes) == jax.process_count() else processes)


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
    line = caller_text()
    # The watchdog ends the job earlier, unless the other processes trace or compile.
    limit = max(1200.0, 2 * activity.time_limit) if _TIME_LIMIT is None else _TIME_LIMIT
    _deadline = time.monotonic() + limit
    exchange, calls = _exchange_of(processes), activity.calls
    _record_all()
    record = [calls.num_records, calls.digest] if len(processes) == jax.process_count() else []
    posted = {**message, "call": call, "line": line, "record": record}
    try:
        messages = exchange.exchange(posted, f"{call}, which all processes have to call")
    except InterruptedError:
        text = (
            f"{processes_text(exchange.missing())} did not reach {call} within {limit:g} seconds of process "
            f"{jax.process_index()}. "
            "Every process must call the same functions in the same order, with arguments of the same shapes: check whether it "
            "still runs, waits for data, or took another branch."
        )
        raise exit_work.with_exit_status(RuntimeError(text), HUNG) from None
    for received in messages:
        if "failure" in received:
            _forget_records(processes)
            raise RuntimeError(received["failure"])
    kinds = [received.get("kind", received["call"]) for received in messages]
    if len(set(kinds)) > 1:
        _forget_records(processes)
        places = [f"{received['call']}{received['line']}" for received in messages]
        first = next(i for i, kind in enumerate(kinds) if kind != kinds[0])
        raise ValueError(
            f"The processes make different calls: process {processes[0]} is in {places[0]}, and process {processes[first]} in "
            f"{places[first]}. {SAME_CALLS}"
        )
    different = [i for i, received in enumerate(messages) if received["record"] != messages[0]["record"]]
    if different:
        index = processes.index(jax.process_index())
        details = exchange.exchange({"newest": activity.calls.newest_records() if index in (0, different[0]) else []})
        _forget_records(processes)
        other = different[0]
        records, other_records = details[0]["newest"], details[other]["newest"]
        raise ValueError(difference_text(processes[0], records, processes[other], other_records))
    return messages


def record_lines() -> list[str]:
    """Returns a line per newest record of this process, which must be equal on all processes."""
    _record_all()
    return [
        f"call {n}: {text} #{digest % 2**32:08x}" for n, digest, text in activity.calls.newest_records()[-_MOST_LINES:]
    ]


_MOST_LINES = 64
_MOST_BYTES = 2**20


def is_of_all_processes(mesh: Mesh) -> bool:
    """Whether all processes have devices in `mesh`. Their calls of its programs are then compared until they end."""
    if len(processes_of(mesh)) < jax.process_count():
        return False
    exit_work.add(_check_calls_at_exit, _check_calls_at_exit, "the calls of the processes were compared")
    return True


def record_host_values(name: str, values: Sequence[Any]) -> None:
    """Adds a record of host values that a program receives: all bytes of small arrays, every n-th element of large ones."""
    checksum = 0
    for value in values:
        array = np.asarray(value).reshape(-1)
        if array.dtype.kind != "O":
            checksum = zlib.crc32(array[:: max(1, array.nbytes // _MOST_BYTES)].tobytes(), checksum)
    are_numbers = len(values) <= _MOST_SHOWN and all(isinstance(value, (int, float, np.number)) for value in values)
    activity.calls.record(f"host values of `{name}`", checksum, ", ".join(map(str, values)) if are_numbers else "")


_MOST_SHOWN = 4


def local_arrays(inputs: Any) -> list[jax.Array]:
    """Returns the leaves that are small arrays on the devices of this process only, and should be equal on all processes."""
    arrays = [
        leaf for leaf in jax.tree.leaves(inputs) if isinstance(leaf, jax.Array) and not isinstance(leaf, core.Tracer)
    ]
    return [leaf for leaf in arrays if leaf.is_fully_addressable and leaf.nbytes <= _MOST_BYTES]


def record_local_arrays(name: str, inputs: Any) -> None:
    """Records the local arrays of an earlier call: the arrays of this call may wait for programs that are not finished."""
    _unread.append((name, local_arrays(inputs)))
    if len(_unread) > _CALLS_UNTIL_READ:
        _record_oldest()


def _record_oldest() -> None:
    name, arrays = _unread.popleft()
    record_host_values(name, [_to_host(array) for array in arrays if not array.is_deleted()])


def _to_host(array: jax.Array) -> Any:
    is_key = jnp.issubdtype(array.dtype, jax.dtypes.prng_key)
    with jax.ensure_compile_time_eval():  # processes compare a program while they trace it
        return np.asarray(jax.random.key_data(array) if is_key else array)[()]


def _record_all() -> None:
    while _unread:
        _record_oldest()


_CALLS_UNTIL_READ = 16
_unread: collections.deque[tuple[str, list[jax.Array]]] = collections.deque()


def _check_calls_at_exit() -> None:
    """Raises RuntimeError if a process that has ended before has made other calls. Does not wait for processes that run."""
    if getattr(sys, "last_value", None) is not None or not jax.distributed.is_initialized():
        return
    _record_all()
    calls, store = activity.calls, key_value_store()
    own = [jax.process_index(), activity.calls.newest_records()]
    # One key per different end: the first process that has it.
    store.key_value_set(f"{_AT_EXIT}/{calls.num_records}/{calls.digest}", json.dumps(own), True)
    ends = sorted(json.loads(text) for _, text in store.key_value_dir_get(f"{_AT_EXIT}/"))
    if len(ends) > 1:
        raise RuntimeError(difference_text(*ends[0], *ends[1]))


_AT_EXIT = "jdist/calls-at-exit"


def post_failure(failure: str, processes: tuple[int, ...]) -> None:
    """Posts the reason why this process cannot make a call. The other processes raise it as an error."""
    _exchange_of(processes).post({"failure": failure})
    _forget_records(processes)


def _forget_records(processes: tuple[int, ...]) -> None:
    if len(processes) == jax.process_count():  # or the others would not forget them
        activity.calls.forget_records()


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


def check_same_facts(call: str, facts: Mapping[str, Sequence[Any]], processes: tuple[int, ...]) -> None:
    """Raises ValueError, on all processes, if values of replicated arrays differ between them.

    Args:
        call: See `exchange_call`.
        facts: The fingerprint of each array by its path.
        processes: The processes.
    """
    messages = exchange_call(call, {"digests": digests_of(facts)}, processes)
    structures = [sorted(message["digests"]) for message in messages]
    other = next((i for i, names in enumerate(structures) if names != structures[0]), None)
    if other is not None:
        raise ValueError(
            f"At {call}, the states of processes {processes[0]} and {processes[other]} have different leaves. {_REPLICATED}"
        )
    difference = find_difference(call, facts, messages, processes)
    if difference is not None:
        raise ValueError(
            f"At {call}, `{difference.subject}` has other values on {processes_text(difference.others)} than on process "
            f"{difference.first}. {_REPLICATED}"
        )


_REPLICATED = (
    "It must be replicated: look for a callback that returns a state on one process only, or another one per process."
)


def digests_of(facts: Mapping[str, Sequence[Any]]) -> dict[str, int]:
    """Returns a checksum of each fact."""
    return {subject: zlib.crc32(json.dumps(list(values)).encode()) for subject, values in facts.items()}


def processes_text(processes: Sequence[int]) -> str:
    """Returns the processes as text.

    Example:
        >>> processes_text([1]), processes_text([1, 3])
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
