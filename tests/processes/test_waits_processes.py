"""Waits that can never end are errors on all processes, which name the calls."""

import os
import subprocess
import sys

import pytest

import jdist

import laws

pytestmark = pytest.mark.slow


def test_processes_that_wait_in_different_calls_all_get_an_error_with_the_call_of_each(tmp_path):
    with jdist.testing.processes(3) as three:
        results = three.run("processes.waits_worker:error_of_different_calls", tmp_path)
    texts, later = zip(*results, strict=True)
    assert texts == (texts[0],) * 3
    assert later == ([True, 3.0],) * 3  # the calls after the error are in step
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


DIVERGENCES = {
    "state of one": (" is a state that a callback returned on process 0, and ",),
    "last state of one": (" is a state that a callback returned on process 0, and none on process 1",),
    "other states": (", a state that a callback returned, or earlier",),
    "host value": (" is host values of `train` (1.0) on process 0, and host values of `train` (2.0) on process 1",),
    "host array": (", host values of `train`, or earlier",),
    "step": ("CheckpointError", "The processes differ in the calls of programs before: process 0 has call "),
    "next call": (", `train`, or earlier",),
    "values": ("CheckpointError", "The processes differ in the values of `state`: process 0 has state/w #"),
}


def test_replicated_values_that_may_differ_after_the_first_call_are_errors_on_all_processes(pair, tmp_path):
    results = pair.run("processes.waits_worker:results_by_divergence", tmp_path)
    for name, parts in DIVERGENCES.items():
        for output in results:
            assert "Error: " in str(output[name]), (name, output[name])
            assert all(part in output[name] for part in parts), output
    for output in results:
        assert output["same states"] == output["same values"] == 8


def test_loop_over_a_stream_in_which_host_values_differ_is_an_error_for_every_kind_of_state(pair):
    for output in pair.run("processes.waits_worker:errors_in_loops_over_streams"):
        values = " is host values of `<lambda>` (0.0) on process 0, and host values of `<lambda>` (1.0) on process 1."
        for kind in (*laws.STATES, "array", "key"):
            assert output[kind].startswith("ValueError: The processes have made different calls of programs"), output
            assert (", host values of `<lambda>`, or earlier." if kind == "key" else values) in output[kind], output
            assert "Error: The processes have made different calls" in output[f"{kind} later"]


PROGRAM = """
import time
import jax, jax.numpy as jnp, numpy as np, jdist
strategy = jdist.MultiWorkerMirroredStrategy()
step = strategy.step(lambda w, x, rate: (w - rate * jdist.all_reduce("mean", x.mean()), None))
w = strategy.init(lambda: jnp.zeros(()))
for number, batch in enumerate(strategy.distribute_dataset(np.ones(8 * {batches}, np.float32), batch_size=8)):
    w, _ = step(w, batch, np.float32(0.25 * (1 + (number > 2 and jax.process_index() * {factor}))))
    time.sleep(0.01 * (number > 4))
print(float(w))
"""


@pytest.mark.parametrize("batches, factor, status", [(4, 1, 1), (100_000, 1, 1), (4, 0, 0)])
def test_different_host_values_in_an_own_loop_are_an_error_within_seconds_or_at_the_end(
    batches, factor, status, tmp_path
):
    (tmp_path / "train.py").write_text(PROGRAM.format(batches=batches, factor=factor))
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "1"}
    command = [sys.executable, "-m", "jdist_tools", "run", "-n", "2", str(tmp_path / "train.py")]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=200, env=environment)
    assert ended.returncode == status, ended.stderr
    text = "The processes have made different calls of programs, so replicated values may differ between them. Record "
    assert (text in ended.stderr) == (status == 1)
    assert ("host values of `<lambda>` (0.25)" in ended.stderr) == (status == 1)
    assert ("    w, _ = step(" in ended.stderr) == (batches > 4)
