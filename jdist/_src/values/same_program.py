"""Compares the programs of several processes before they run.

JAX compiles and runs a program of several processes without a comparison. If the processes traced different programs, or
captured different values, replicated values would silently differ between them, or a collective would wait forever.
"""

import itertools
import json
import time
import zlib
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from jdist._src.core import activity, jax_compat
from jdist._src.core.process_messages import has_ended, numbered_name
from jdist._src.core.tree import dtype_and_shape
from jdist._src.devices.mesh import Replicas
from jdist._src.jaxpr.program_fingerprint import Constant, Line, constants_of, crc_of, lines_of

_POLL_MS = 1000
_TIME_LIMIT: float | None = None  # seconds; None for 20 minutes, or more with a larger time limit of waits


def check_same_program(
    name: str, program: Any, arguments: Sequence[tuple[str, Any]], replicas: Replicas, failure: Exception | None = None
) -> None:
    """Raises on every process if the processes of a mesh traced different programs.

    Each process calls it after tracing a program, before running it.

    Args:
        name: The name of the traced function.
        program: The closed jaxpr; None if tracing failed.
        arguments: The name and value of each leaf of the arguments.
        replicas: The replicas that run the program.
        failure: The error of tracing on this process; the other processes report it.

    Raises:
        ValueError: Names, shapes or dtypes of arguments, host values, captured constants or equations differ.
        RuntimeError: Tracing failed on another process, took more than 20 minutes longer there, or the process has ended.
    """
    processes = sorted({device.process_index for device in replicas.mesh.devices.flat})
    process_index = jax.process_index()
    reason = f"the comparison of `{name}`, which all processes have to call"
    if failure is not None:
        with activity.waiting(reason):
            _post(processes, {"failure": f"{type(failure).__name__}: {failure}"[:2000]})
        return
    lines, constants = lines_of(program), constants_of(program)
    message = {
        "function": name,
        "arguments": [
            f"{leaf_name} {dtype_and_shape(np.asarray(leaf) if not hasattr(leaf, 'dtype') else leaf)}"
            for leaf_name, leaf in arguments
        ],
        "values": {leaf_name: crc_of(leaf) for leaf_name, leaf in arguments},
        "constants": [f"{constant.spec} #{constant.crc}" for constant in constants],
        "equations": [zlib.crc32(line.text.encode()) for line in lines],
    }
    with activity.waiting(reason):
        messages = _received(processes, _post(processes, message), name)
    messages[process_index] = message
    for process in processes:
        if "failure" in messages[process]:
            raise RuntimeError(f"`{name}` could not be traced on process {process}: {messages[process]['failure']}")
    first = processes[0]
    for subject in message:
        others = [process for process in processes if messages[process][subject] != messages[first][subject]]
        if others:
            other = messages[others[0] if process_index == first else first][subject]
            difference = _difference(subject, message[subject], other, lines, constants)
            raise ValueError(
                f"The processes do not run the same program: {_listed(others)} differ{'s' * (len(others) == 1)} from process "
                f"{first} in `{messages[first]['function']}`. On process {process_index}, {difference}. {_ADVICE[subject]}"
            )


def _difference(subject: str, local: Any, other: Any, lines: Sequence[Line], constants: Sequence[Constant]) -> str:
    if subject == "arguments":
        pairs = itertools.zip_longest(local, other, fillvalue="absent")
        return next(f"an argument is {a}, and on the other process {b}" for a, b in pairs if a != b)
    if subject == "values":
        return f"{', '.join(name for name in local if local[name] != other[name])} has other values"
    if subject == "constants":
        return _constant_difference(constants, other)
    if subject == "equations":
        return _equation_difference(lines, local, other)
    return f"the function is `{local}`, on the other process `{other}`"


_ADVICE = {
    "function": "Call the same functions in the same order on every process.",
    "arguments": "Pass arguments of the same structure, shapes and dtypes on every process.",
    "values": "A host value is replicated, so it must be the same on every process: compute it from the same seed or "
    "configuration, or pass one value per replica with `strategy.distribute_values_from_function`.",
    "constants": "A captured value is replicated, so it must be the same on every process: compute it from the same seed "
    "(`jax.random` with one key), or read it on one process and `multihost_utils.broadcast_one_to_all` it.",
    "equations": "Do not let the traced code depend on the process: no `jax.process_index()`, random numbers of the host, or "
    "settings that differ.",
}


def _constant_difference(constants: Sequence[Constant], other: Sequence[str]) -> str:
    if len(constants) != len(other):
        return f"the function captures {len(constants)} arrays, and on the other process {len(other)}"
    constant = next(c for c, text in zip(constants, other, strict=True) if f"{c.spec} #{c.crc}" != text)
    use = f" that {constant.place} uses" if constant.place else ""
    return f"a captured value {constant.spec}{use} has other values"


def _equation_difference(lines: Sequence[Line], local: Sequence[int], other: Sequence[int]) -> str:
    pairs = itertools.zip_longest(local, other)
    index = min(next(i for i, (a, b) in enumerate(pairs) if a != b), len(lines) - 1)
    # A line without a source location, such as a return, follows the line that computes its operands.
    place = next((line.place for line in reversed(lines[: index + 1]) if line.place), "")
    location = f" at {place}" if place else ""
    return f"equation {index} of {len(lines)} differs{location}: {lines[index].text:.300}"


def _listed(processes: Sequence[int]) -> str:
    return f"process{'es' * (len(processes) > 1)} {', '.join(map(str, processes))}"


def _post(processes: Sequence[int], message: dict[str, Any]) -> str:
    """Stores the message of this process, and returns the prefix of the keys of all processes."""
    prefix = numbered_name(f"jdist/programs/{'-'.join(map(str, processes))}")
    jax_compat.key_value_store().key_value_set(f"{prefix}/{jax.process_index()}", json.dumps(message))
    return prefix


def _received(processes: Sequence[int], prefix: str, name: str) -> dict[int, dict[str, Any]]:
    """Returns the messages of the other processes; waits for them."""
    store, start = jax_compat.key_value_store(), time.monotonic()
    # The watchdog ends the job earlier, unless the other processes trace or compile.
    limit = max(1200.0, 2 * activity.time_limit) if _TIME_LIMIT is None else _TIME_LIMIT
    messages: dict[int, dict[str, Any]] = {}
    ended: set[int] = set()
    others = [process for process in processes if process != jax.process_index()]
    while missing := [process for process in others if process not in messages]:
        try:
            messages[missing[0]] = json.loads(store.blocking_key_value_get(f"{prefix}/{missing[0]}", _POLL_MS))
        except RuntimeError as error:
            if "DEADLINE_EXCEEDED" not in str(error):
                raise
            if missing[0] in ended:
                raise RuntimeError(
                    f"Process {missing[0]} has ended, and did not call `{name}`, which process {jax.process_index()} calls. "
                    "Every process must call the same functions in the same order, the same number of times."
                ) from None
            if has_ended(missing[0]):  # it may have posted its message before
                ended.add(missing[0])
                continue
            if time.monotonic() - start > limit:
                raise RuntimeError(
                    f"{_listed(missing)} did not trace `{name}` within {limit:g} seconds of process {jax.process_index()}. "
                    "Every process must call the same functions in the same order, with arguments of the same shapes: check "
                    "whether it still runs, waits for data, or took another branch."
                ) from None
    return messages
