"""Records of calls: marks that processes have in common, and the message about the first difference."""

import pytest

from jdist._src.core import activity, call_records
from jdist._src.core.activity import CallLog


@pytest.fixture
def calls(monkeypatch):
    """Returns records without a record, in place of those of this process."""
    calls = CallLog()
    monkeypatch.setattr(activity, "calls", calls)
    return calls


def test_two_processes_have_a_mark_in_common_unless_they_are_too_far_apart(calls):
    marks = [set()]
    for number in range(1, 2001):
        calls.record("step", number)
        marks.append({tuple(mark) for mark in calls.marks()})
        assert len(marks[-1]) <= 8
    for first in range(64, 2001):
        for other in range(first, min(first + first // 8, 2000) + 1):
            assert marks[first] & marks[other], (first, other)


def test_first_difference_names_the_record_and_both_processes(calls):
    def records(checksums):
        calls.forget_records()
        for number, checksum in enumerate(checksums):
            calls.record("step", checksum, f"{checksum}" if number == 40 else "")
        return calls.marks(), calls.newest_records()

    equal, other = [7] * 60, [7] * 40 + [8] + [7] * 19
    calls.num_forgotten = 0
    marks, newest = records(equal)
    calls.num_forgotten = 0
    other_marks, other_newest = records(other)
    assert call_records.different_processes({0: marks, 1: marks, 5: other_marks}) == (0, 5)
    assert call_records.different_processes({0: marks, 1: marks, 2: []}) is None
    text = call_records.difference_text(0, newest, 5, other_newest)
    assert "Record 41 is step (7) on process 0, and step (8) on process 5. Every process must call" in text
    assert "Record 41 is step (7) on process 0, and none on process 5." in call_records.difference_text(
        0, newest[:41], 5, other_newest[:40]
    )
    text = call_records.difference_text(0, newest[50:], 5, other_newest[45:])
    assert "They differ since record 51, step, or earlier." in text
    _, later = records(equal)  # another number of deleted records: not compared
    assert call_records.different_processes({0: marks, 1: calls.marks()}) is None
