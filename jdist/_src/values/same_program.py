"""Compares the programs of several processes before they run.

JAX compiles and runs a program of several processes without a comparison: where the processes traced different programs, or
captured different values, replicated values would differ between them unnoticed, or a collective would wait forever.
"""

import itertools
import json
import logging
import time
import zlib
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from jdist._src.core import jax_compat
from jdist._src.core.process_messages import numbered_name
from jdist._src.core.tree import dtype_and_shape
from jdist._src.devices.mesh import Replicas
from jdist._src.jaxpr.program_fingerprint import Constant, Line, constants_of, crc_of, lines_of

_LOG = logging.getLogger("jdist")
_POLL = 1000  # milliseconds
_REPORT = 30.0  # seconds between two warnings
_TIME_LIMIT = 600.0  # seconds


def check_same_program(
    name: str, program: Any, arguments: Sequence[tuple[str, Any]], replicas: Replicas, failure: Exception | None = None
) -> None:
    """Raises on every process if the processes of a mesh are about to run different programs.

    Called by each process when it has traced a program, before the program runs.

    Args:
        name: The name of the traced function.
        program: The closed jaxpr; None if tracing failed.
        arguments: The name and value of each leaf of the arguments.
        replicas: The replicas that run the program.
        failure: The error of a trace that failed on this process, for the others to report.

    Raises:
        ValueError: Names, shapes or dtypes of arguments, host values among them, captured constants or equations differ.
        RuntimeError: Another process failed, or did not trace a program within 10 minutes.
    """
    processes = sorted({device.process_index for device in replicas.mesh.devices.flat})
    here = jax.process_index()
    if failure is not None:
        _post(processes, {"failure": f"{type(failure).__name__}: {failure}"[:2000]})
        return
    lines, constants = lines_of(program), constants_of(program)
    message = {
        "function": name,
        "arguments": [f"{leaf_name} {_spec(leaf)}" for leaf_name, leaf in arguments],
        "values": {leaf_name: crc_of(leaf) for leaf_name, leaf in arguments},
        "constants": [f"{one.spec} #{one.crc}" for one in constants],
        "equations": [zlib.crc32(line.text.encode()) for line in lines],
    }
    messages = _received(processes, _post(processes, message), name)
    messages[here] = message
    for process in processes:
        if "failure" in messages[process]:
            raise RuntimeError(f"`{name}` could not be traced on process {process}: {messages[process]['failure']}")
    first = processes[0]
    for subject in message:
        others = [process for process in processes if messages[process][subject] != messages[first][subject]]
        if others:
            theirs = messages[others[0] if here == first else first][subject]
            difference = _difference(subject, message[subject], theirs, lines, constants)
            raise ValueError(
                f"The processes do not run the same program: {_listed(others)} differ{'s' * (len(others) == 1)} from process "
                f"{first} in `{messages[first]['function']}`. On process {here}, {difference}. {_ADVICE[subject]}"
            )


def _difference(subject: str, mine: Any, theirs: Any, lines: Sequence[Line], constants: Sequence[Constant]) -> str:
    if subject == "arguments":
        return f"an argument is {_first_difference(mine, theirs)}"
    if subject == "values":
        return f"{', '.join(name for name in mine if mine[name] != theirs[name])} has other values"
    if subject == "constants":
        return _constant_difference(constants, theirs)
    if subject == "equations":
        return _equation_difference(lines, mine, theirs)
    return f"the function is `{mine}`, on the other process `{theirs}`"


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


def _first_difference(mine: Sequence[str], theirs: Sequence[str]) -> str:
    pairs = itertools.zip_longest(mine, theirs, fillvalue="absent")
    return next(f"{a}, and on the other process {b}" for a, b in pairs if a != b)


def _constant_difference(constants: Sequence[Constant], theirs: Sequence[str]) -> str:
    if len(constants) != len(theirs):
        return f"the function captures {len(constants)} arrays, and on the other process {len(theirs)}"
    differing = next(one for one, other in zip(constants, theirs, strict=True) if f"{one.spec} #{one.crc}" != other)
    used = f" that {differing.place} uses" if differing.place else ""
    return f"a captured value {differing.spec}{used} has other values"


def _equation_difference(lines: Sequence[Line], mine: Sequence[int], theirs: Sequence[int]) -> str:
    pairs = itertools.zip_longest(mine, theirs)
    number = min(next(i for i, (a, b) in enumerate(pairs) if a != b), len(lines) - 1)
    # A line without a place, such as a return, follows the line that made its operands.
    place = next((line.place for line in reversed(lines[: number + 1]) if line.place), "")
    where = f" at {place}" if place else ""
    return f"equation {number} of {len(lines)} differs{where}: {lines[number].text:.300}"


def _spec(leaf: Any) -> str:
    return dtype_and_shape(leaf if hasattr(leaf, "dtype") else np.asarray(leaf))


def _listed(processes: Sequence[int]) -> str:
    return f"process{'es' * (len(processes) > 1)} {', '.join(map(str, processes))}"


def _post(processes: Sequence[int], message: dict[str, Any]) -> str:
    """Stores the message of this process, and returns the prefix of the keys of all processes."""
    prefix = numbered_name(f"jdist/programs/{'-'.join(map(str, processes))}")
    jax_compat.key_value_store().key_value_set(f"{prefix}/{jax.process_index()}", json.dumps(message))
    return prefix


def _received(processes: Sequence[int], prefix: str, name: str) -> dict[int, dict[str, Any]]:
    """The messages of the other processes; waits for them."""
    store, start, due = jax_compat.key_value_store(), time.monotonic(), _REPORT
    messages: dict[int, dict[str, Any]] = {}
    others = [process for process in processes if process != jax.process_index()]
    while missing := [process for process in others if process not in messages]:
        try:
            messages[missing[0]] = json.loads(store.blocking_key_value_get(f"{prefix}/{missing[0]}", _POLL))
        except RuntimeError as error:
            if "DEADLINE_EXCEEDED" not in str(error):
                raise
            waited = time.monotonic() - start
            if waited > _TIME_LIMIT:
                raise RuntimeError(
                    f"{_listed(missing)} did not trace `{name}` within {_TIME_LIMIT} seconds of process {jax.process_index()}. "
                    "Every process calls the same functions in the same order, with arguments of the same shapes: see whether "
                    "it still runs, waits for data, or has taken another branch."
                ) from None
            if waited > due:
                _LOG.warning("Waiting for %s to trace `%s` for %d s.", _listed(missing), name, waited)
                due += _REPORT
    return messages
