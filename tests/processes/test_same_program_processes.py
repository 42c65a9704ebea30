"""Processes that are about to run different programs are refused, all of them, before the first step."""

import pathlib

import pytest

from processes.runner import run_processes

WORKER = pathlib.Path(__file__).parent / "same_program_worker.py"


@pytest.fixture(scope="module")
def printed():
    """For each process, what it printed for each case."""
    outputs = run_processes(WORKER, 2, 2)
    return [dict(line.split(": ", 1) for line in output.splitlines() if ": " in line) for output in outputs]


CASES = {
    "init": ("make", "a captured value float32[3]", "from the same seed"),
    "argument": ("train", "rate has other values", "strategy.distribute_values_from_function"),
    "python": ("<lambda>", "x has other values"),
    "shape": ("<lambda>", "an argument is x float32[", "on the other process x float32["),
    "literal": ("<lambda>", " of 5 differs at ", "same_program_worker.py", "in with_rate"),
    "branch": ("by_process", "same_program_worker.py", "in by_process", "no `jax.process_index()`"),
    "trainer": (None, "a captured value float32[3]"),
}


@pytest.mark.parametrize("case", CASES)
def test_different_programs_are_refused_on_all_processes_with_the_difference(case, printed):
    name, *parts = CASES[case]
    for number, output in enumerate(printed):
        name = name or output[case].split("`")[1]  # a function of the trainer
        start = "ValueError: The processes do not run the same program: process 1 differs from process 0 in "
        assert output[case].startswith(f"{start}`{name}`. On process {number}, "), output[case]
        assert all(part in output[case] for part in parts), output[case]


def test_different_functions_are_named(printed):
    for number, name in enumerate(["first", "second"]):
        assert f"On process {number}, the function is `{name}`" in printed[number]["function"]


def test_trace_that_fails_on_one_process_fails_on_all(printed):
    assert printed[1]["failing"] == "KeyError: 'no such layer'"
    assert printed[0]["failing"] == (
        "RuntimeError: `failing` could not be traced on process 1: KeyError: 'no such layer'"
    )


def test_same_program_runs_whoever_has_lowered_it_and_whatever_its_later_arguments(printed):
    assert [output["same"] for output in printed] == [str([0.25] * 3)] * 2
    assert [output["captured"] for output in printed] == ["[1.0, 2.0, 3.0]"] * 2


def test_process_that_waits_for_the_others_says_for_which_and_gives_up(printed):
    assert printed[0]["alone"].startswith(
        "RuntimeError: process 1 did not trace `<lambda>` within 4.0 seconds of process 0."
    )
