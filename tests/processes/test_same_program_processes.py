"""Processes that trace different programs all get an error before the first step."""

import pytest

import jdist

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def results():
    """Returns for each process the output of each case."""
    with jdist.testing.processes(2, devices_per_process=2) as pair:
        return pair.run("processes.same_program_worker:results_by_case")


CASES = {
    "init": ("make", "a captured value float32[3]", "from the same seed"),
    "init_shape": ("<lambda>", "same_program_worker.py", "broadcast_in_dim", "no `jax.process_index()`"),
    "named": ("<lambda>", "the weight `head`, float32[3], has other values", "from the same seed"),
    "argument": ("train", "rate has other values", "strategy.distribute_values_from_function"),
    "python": ("<lambda>", "x has other values"),
    "shape": ("<lambda>", "an argument is x float32[", "on the other process x float32["),
    "literal": ("<lambda>", " of 5 differs at ", "same_program_worker.py", "with_rate"),
    "branch": ("by_process", "same_program_worker.py", "by_process", "no `jax.process_index()`"),
    "trainer": (None, "a captured value float32[3]"),
}


@pytest.mark.parametrize("case", CASES)
def test_different_programs_are_refused_on_all_processes_and_the_error_names_the_difference(case, results):
    name, *parts = CASES[case]
    for number, output in enumerate(results):
        name = name or output[case].split("`")[1]  # a function of the trainer
        start = "ValueError: The processes do not run the same program: process 1 differs from process 0 in "
        assert output[case].startswith(f"{start}`{name}`. On process {number}, "), output[case]
        assert all(part in output[case] for part in parts), output[case]


def test_error_names_different_functions(results):
    for number, name in enumerate(["first", "second"]):
        assert f"On process {number}, the function is `{name}`" in results[number]["function"]


def test_trace_that_fails_on_one_process_fails_on_all(results):
    assert results[1]["failing"] == "KeyError: 'no such layer'"
    assert results[0]["failing"] == (
        "RuntimeError: `failing` could not be traced on process 1: KeyError: 'no such layer'"
    )


def test_same_program_runs_after_one_process_lowered_it_and_with_other_arguments(results):
    assert [output["same"] for output in results] == [[0.25] * 3] * 2
    assert [output["captured"] for output in results] == [[1.0, 2.0, 3.0]] * 2


def test_process_that_waits_for_another_process_names_it_and_times_out(results):
    assert results[0]["alone"].startswith(
        "RuntimeError: process 1 did not reach the comparison of `<lambda>` within 4 seconds of process 0."
    )
