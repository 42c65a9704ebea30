"""Waits that can never end are errors on all processes, which name the calls."""

import pytest

import jdist

pytestmark = pytest.mark.slow


def test_processes_that_wait_in_different_calls_all_get_an_error_with_the_call_of_each(tmp_path):
    with jdist.testing.processes(3) as three:
        texts = three.run("processes.waits_worker:error_of_different_calls", tmp_path)
    assert texts == [texts[0]] * 3
    heading, *lines, advice = texts[0].splitlines()
    assert heading == "The processes wait for each other in different calls, so none of them can continue:"
    assert lines[0].startswith(
        "  Process 0 waits in `Checkpointer.save`, which all processes have to call (`checkpointer.save(1,"
    )
    for number in (1, 2):
        assert lines[number].startswith(
            f"  Process {number} waits in the comparison of `<lambda>`, which all processes have to call (`strategy.run("
        )
    assert all("waits_worker.py:" in line for line in lines)
    assert advice.startswith("Every process must call the same functions in the same order")


DIFFERENCES = {
    "epochs": ("Trainer.fit", "epochs", "2", "3"),
    "steps": ("Trainer.fit", "steps", "2", "3"),
    "no steps": ("Trainer.fit", "steps", "None", "2"),
    "batch_size": ("Trainer.fit", "batch_size", "8", "16"),
    "shuffle": ("Trainer.fit", "shuffle", "True", "False"),
    "validation": ("Trainer.fit", "validation_data", "a value", "None"),
    "validation sets": ("Trainer.fit", "validation_data", "a value for 'a', a value for 'b'", "a value for 'a'"),
    "validate_every": ("Trainer.fit", "validate_every", "2", "3"),
    "resume": ("Trainer.fit", "resume", "a value", "None"),
    "state": ("Trainer.fit", "state", "a value", "None"),
    "steps_per_call": ("Trainer.fit", "steps_per_call", "2", "1"),
    "checkpoint": ("Trainer.fit", "callbacks", "Checkpoint(every=1)", "none"),
    "average": ("Trainer.fit", "callbacks", "EMA(decay=0.5, debias=True)", "none"),
    "decay": ("Trainer.fit", "callbacks", "EMA(decay=0.5, debias=True)", "EMA(decay=0.75, debias=True)"),
    "restore_best": ("Trainer.fit", "callbacks", "restore_best=True", "restore_best=False"),
    "metrics": ("Trainer.fit", "metrics", "'a'", "none"),
    "non_finite": ("Trainer.fit", "non_finite", "'stop'", "'skip'"),
    "evaluate": ("Trainer.evaluate", "batch_size", "8", "16"),
    "predict": ("Trainer.predict", "batch_size", "8", "16"),
}


def test_arguments_that_differ_between_processes_are_errors_on_all_before_the_first_step(pair, tmp_path):
    results = pair.run("processes.waits_worker:results_by_arguments", tmp_path)
    for name, (call, argument, *values) in DIFFERENCES.items():
        for number, output in enumerate(results):
            start = f"ValueError: `{call}` was called with different values of `{argument}`: "
            assert output[name].startswith(start), (name, output[name])
            here, _, there = output[name].removeprefix(start).partition(f" on process {number}, and ")
            there, _, advice = there.partition(f" on process {1 - number}. ")
            assert values[number] in here, (name, here)
            assert values[1 - number] in there, (name, there)
            assert advice.startswith("Pass the same arguments on every process.")
            assert ("logs may be on one only" in advice) == (argument == "callbacks")
    for output in results:
        assert output["other call"].startswith(
            "ValueError: The processes make different calls: process 0 is in the start of `Trainer.fit` ("
        )
        assert "waits_worker.py:" in output["other call"]
        assert "and process 1 in the start of `Trainer.evaluate` (" in output["other call"]
        assert "and process 1 in the comparison of `<lambda>` (" in output["program"]
        assert output["logs"] == output["numpy"] == 4
    assert results[0]["events"]
    assert not results[1]["events"]
