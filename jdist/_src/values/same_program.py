"""Compares the programs of several processes before they run.

JAX compiles and runs a program of several processes without a comparison. If the processes traced different programs, or
captured different values, replicated values would silently differ between them, or a collective would wait forever.
"""

import itertools
import zlib
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from jdist._src.core.tree import dtype_and_shape, has_dtype
from jdist._src.devices.mesh import Replicas
from jdist._src.jaxpr.program_fingerprint import Constant, Line, constants_of, crc_of, lines_of
from jdist._src.values.process_calls import (
    digests_of,
    exchange_call,
    find_difference,
    post_failure,
    processes_of,
    processes_text,
)


def check_same_program(
    name: str, program: Any, arguments: Sequence[tuple[str, Any]], replicas: Replicas, failure: Exception | None = None
) -> int:
    """Returns a checksum of a program, or raises on every process if the processes of a mesh traced different programs.

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
    processes = processes_of(replicas.mesh)
    if failure is not None:
        reason = f"{type(failure).__name__}: {failure}"[:2000]
        post_failure(f"`{name}` could not be traced on process {jax.process_index()}: {reason}", processes)
        return 0
    lines, constants = lines_of(program), constants_of(program)
    facts = {
        "function": [name],
        "arguments": [
            f"{leaf_name} {dtype_and_shape(np.asarray(leaf) if not has_dtype(leaf) else leaf)}"
            for leaf_name, leaf in arguments
        ],
        "values": [[leaf_name, crc_of(leaf)] for leaf_name, leaf in arguments],
        "constants": [f"{constant.dtype_and_shape} #{constant.crc}" for constant in constants],
        "equations": [zlib.crc32(line.text.encode()) for line in lines],
    }
    call = f"the comparison of `{name}`"
    message = {"kind": "program", "function": name, "digests": digests_of(facts)}
    messages = exchange_call(call, message, processes)
    difference = find_difference(call, facts, messages, processes)
    if difference is not None:
        text = _difference(difference.subject, difference.value, difference.other_value, lines, constants)
        raise ValueError(
            f"The processes do not run the same program: {processes_text(difference.others)} "
            f"differ{'s' * (len(difference.others) == 1)} from process {difference.first} in `{messages[0]['function']}`. On "
            f"process {difference.local}, {text}. {_ADVICE[difference.subject]}"
        )
    return zlib.crc32(repr((name, message["digests"]["constants"], message["digests"]["equations"])).encode())


def _difference(subject: str, local: Any, other: Any, lines: Sequence[Line], constants: Sequence[Constant]) -> str:
    if subject == "arguments":
        pairs = itertools.zip_longest(local, other, fillvalue="absent")
        return next(f"an argument is {a}, and on the other process {b}" for a, b in pairs if a != b)
    if subject == "values":
        names = [name for (name, crc), (_, other_crc) in zip(local, other, strict=True) if crc != other_crc]
        return f"{', '.join(names)} has other values"
    if subject == "constants":
        return _constant_difference(constants, other)
    if subject == "equations":
        return _equation_difference(lines, local, other)
    return f"the function is `{local[0]}`, on the other process `{other[0]}`"


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
    constant = next(c for c, text in zip(constants, other, strict=True) if f"{c.dtype_and_shape} #{c.crc}" != text)
    if constant.name:
        return f"{constant.name}, {constant.dtype_and_shape}, has other values"
    use = f" that {constant.place} uses" if constant.place else ""
    return f"a captured value {constant.dtype_and_shape}{use} has other values"


def _equation_difference(lines: Sequence[Line], local: Sequence[int], other: Sequence[int]) -> str:
    pairs = itertools.zip_longest(local, other)
    differing = [min(i, len(lines) - 1) for i, (a, b) in enumerate(pairs) if a != b]
    # The call of a function precedes the equation in it that differs. jdist's own calls have no place.
    index = next((i for i in differing if lines[i].place), differing[0])
    # A line without a source location, such as a return, follows the line that computes its operands.
    place = next((line.place for line in reversed(lines[: index + 1]) if line.place), "")
    location = f" at {place}" if place else ""
    return f"equation {index} of {len(lines)} differs{location}: {lines[index].text:.300}"
