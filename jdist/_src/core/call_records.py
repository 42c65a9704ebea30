"""The records of calls that all processes make (`jdist._src.core.activity`): their comparison between the processes.

A record has a digest of all records before it. Two processes that record different calls have different digests from there on.
"""

from collections.abc import Mapping, Sequence
from typing import Any

SAME_CALLS = "Every process must call the same functions in the same order, the same number of times."
DIFFERENT_CALLS = "The processes have made different calls of programs, so replicated values may differ between them."
_SAME_VALUES = "Host values that a program receives must be equal on all processes."


def different_processes(marks_by_process: Mapping[int, Sequence[Sequence[int]]]) -> tuple[int, int] | None:
    """Returns two processes whose digests differ at the first of the marks that both have; None if there are none."""
    firsts: dict[tuple[int, int], tuple[int, int]] = {}
    differences = []
    for process in sorted(marks_by_process):
        for num_forgotten, number, digest in marks_by_process[process]:
            first, first_digest = firsts.setdefault((num_forgotten, number), (process, digest))
            if digest != first_digest:
                differences.append((num_forgotten, number, first, process))
    return min(differences)[2:] if differences else None


def difference_text(first: int, first_records: Sequence[Any], other: int, other_records: Sequence[Any]) -> str:
    """Returns the message about the first record that differs between two processes.

    Args:
        first: A process.
        first_records: The result of `CallLog.newest_records` on it.
        other: Another process.
        other_records: The result there.
    """
    by_number = [{number: record for number, *record in records} for records in (first_records, other_records)]
    oldest = max(min(records, default=1) for records in by_number)
    for number in sorted(number for number in by_number[0].keys() | by_number[1].keys() if number >= oldest):
        (digest, text), (other_digest, other_text) = (records.get(number, (None, "none")) for records in by_number)
        if digest == other_digest:
            continue
        place = f"Record {number} is {text} on process {first}, and {other_text} on process {other}."
        if text == other_text:
            place = f"They differ since record {number}, {text}, or earlier."
        return f"{DIFFERENT_CALLS} {place} {SAME_CALLS} {_SAME_VALUES}"
    return f"{DIFFERENT_CALLS} {SAME_CALLS} {_SAME_VALUES}"
