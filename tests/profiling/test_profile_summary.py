"""Laws of the summary, over all traces, and of the intervals that it is computed from."""

import json
import pathlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jdist._src.profiling.hlo_metadata import NO_FACTS
from jdist._src.profiling.intervals import difference, length, union
from jdist._src.profiling.summary import (
    PARTS,
    ProcessTime,
    ProfileSummary,
    merge_summaries,
    process_summary,
    summary_from_dict,
)
from jdist._src.profiling.trace import OperationKey, Trace

INTERVALS = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30)), max_size=8)


def points(intervals):
    return {point for start, end in intervals for point in range(start, end)}


@given(INTERVALS, INTERVALS, st.tuples(st.integers(0, 30), st.integers(0, 30)))
def test_intervals_are_sets(a, b, within):
    joined, other, clipped = union(a), union(b), union(a, within)
    assert points(joined) == points(a)
    assert points(clipped) == points(a) & points([within])
    rest = difference(joined, other)
    assert points(rest) == points(a) - points(b)
    for result in (joined, clipped, rest):
        assert length(result) == len(points(result))
        assert all(first[1] < second[0] for first, second in zip(result, result[1:], strict=False))


COMPUTE, COLLECTIVE = (OperationKey("jit_f", name, NO_FACTS, name == "all-reduce") for name in ("dot", "all-reduce"))


@given(*[INTERVALS] * 5)
def test_parts_are_disjoint_and_add_up_to_the_interval(compute, collectives, compilation, input, dispatch):
    trace = Trace(
        (5, 25), 0, 1, {"cpu:0": {COMPUTE: compute, COLLECTIVE: collectives}}, compilation, input, dispatch, {}
    )
    summary = process_summary("logs", pathlib.Path("trace"), trace)
    (device,), (process,) = summary.devices, summary.processes
    wall = points([(5, 25)])
    computes, reduces = points(compute) & wall, points(collectives) & wall
    idle = wall - computes - reduces
    expected = {
        "compute": computes,
        "exposed_collectives": reduces - computes,
        "input": idle & points(input) - points(compilation),
        "compile": idle & points(compilation),
        "host": idle - points(input) - points(compilation),
    }
    assert {part: round(getattr(device, part) * 1e9) for part in PARTS} == {
        part: len(times) for part, times in expected.items()
    }
    assert sum(expected_part for expected_part in map(len, expected.values())) == 20
    assert round(device.collectives * 1e9) == len(reduces)
    assert sum(summary.parts.values()) == pytest.approx(1)
    assert round(process.seconds * 1e9) == 20
    assert round(process.working * 1e9) == 20 - len(expected["exposed_collectives"]) - len(expected["compile"])
    assert round(process.dispatch * 1e9) == len((points(dispatch) - points(compilation)) & wall)
    assert summary_from_dict(json.loads(summary.to_json())) == summary
    assert str(summary) and "<pre" in summary._repr_html_()


def _processes(times, seconds=10.0):
    processes = tuple(ProcessTime(i, seconds, time, 0.0, 0.0, 0.0, "trace") for i, time in enumerate(times))
    return ProfileSummary("logs", processes=processes)


STRAGGLERS = {
    "one process": ([9.0], ()),
    "two equal": ([3.0, 3.2], ()),
    "two": ([3.0, 8.0], (1,)),
    "three": ([3.0, 8.0, 3.1], (1,)),
    "no deviation": ([3.0, 3.0, 3.0, 8.0], (3,)),
    "below a tenth of the interval": ([3.0, 3.0, 3.0, 3.9], ()),
    "within 3 MAD": ([2.0, 3.0, 4.0, 5.0, 6.0, 8.0], ()),
    "two of many": ([3.0, 3.1, 2.9, 9.0, 3.0, 3.1, 8.0, 3.0], (3, 6)),
    "a fast one": ([3.0, 3.0, 3.0, 0.1], ()),
}


@pytest.mark.parametrize("times, stragglers", STRAGGLERS.values(), ids=STRAGGLERS)
def test_stragglers(times, stragglers):
    summary = _processes(times)
    assert summary.stragglers == stragglers
    if len(times) > 1:
        names = ", ".join(f"process {process}" for process in stragglers) or "none"
        assert f"stragglers      {names}" in str(summary)


def test_parts_of_processes_are_merged():
    def part(process, name, seconds):
        keys = {OperationKey("jit_f", name, NO_FACTS, False): [(0, seconds)], COMPUTE: [(50, 60)]}
        examples = {2 * process: 5, 2 * process + 1: 3}
        trace = Trace((0, 100), process, 3, {"cpu:0": keys}, [], [], [], examples)
        return process_summary("logs", pathlib.Path("trace"), trace)

    merged = merge_summaries([part(2, "slow", 40), part(0, "fast", 5)], 3)
    assert [device.process for device in merged.devices] == [0, 2]
    assert [process.process for process in merged.processes] == [0, 2]
    assert merged.missing == (1,)
    assert "the parts of the processes 1" in str(merged)
    assert [(each.name, each.count, round(each.share, 6)) for each in merged.operations] == [
        ("slow", 1, 0.2), ("dot", 2, 0.1), ("fast", 1, 0.025)
    ]  # fmt: skip
    assert dict(merged.examples) == {0: 5, 1: 3, 4: 5, 5: 3}
    assert merged.imbalance == 1.25
