"""Observations of this process: pending results, work without a time limit, and the line of the main thread."""

import io
import pdb
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import jdist
from jdist._src.core import activity
from jdist._src.core.activity import Label
from jdist._src.faults.observation import Observer


@pytest.fixture
def no_calls(monkeypatch):
    """Replaces the record of calls by an empty one."""
    monkeypatch.setattr(activity, "calls", activity.CallLog())
    return activity.calls


def blocked(ready):
    """Returns an array that a callback computes when `ready` is set. On one device, the call would wait for it."""

    def wait(x):
        assert ready.wait(60)
        return np.asarray(x)

    def replica(x):
        return jax.pure_callback(wait, jax.ShapeDtypeStruct(x.shape, x.dtype), x)

    mesh = Mesh(jax.devices()[:2], "replica")
    return jax.jit(jax.shard_map(replica, mesh=mesh, in_specs=P("replica"), out_specs=P("replica")))(np.ones(2))


def test_process_without_waits_runs_a_line_of_its_program(no_calls):
    observation = Observer().observe()
    assert observation.waits == [] and observation.work is None
    assert observation.text.startswith(", before the first step, runs `observation = Observer().observe()` at ")
    assert "test_observation.py:" in observation.text


def test_results_that_are_not_computed_are_a_wait_for_the_oldest_call(no_calls):
    first, second = threading.Event(), threading.Event()
    observer = Observer()
    labels = Label("train", 4, ["all_reduce at train.py:1", "b", "c", "d", "e"]), Label("evaluate", 1)
    arrays = blocked(first), blocked(second)
    for label, array in zip(labels, arrays, strict=True):
        no_calls.steps += 1
        no_calls.last = [array, label]
        (wait,) = observer.observe().waits
        assert (wait.name, wait.steps) == ("train", 4)
        assert wait.text.startswith(
            "waits for the results of step 1 (`train`): all_reduce at train.py:1, b, c and 2 others (`"
        )
    first.set()
    arrays[0].block_until_ready()
    (wait,) = observer.observe().waits
    assert wait.name == "evaluate" and "step 2 (`evaluate`) (`" in wait.text
    second.set()
    arrays[1].block_until_ready()
    assert observer.observe().waits == []
    assert no_calls.last == [None, labels[1]]  # the results are released
    assert ", after step 2 (`evaluate`), runs `" in observer.observe().text


def test_deleted_results_random_keys_and_host_values_are_computed(no_calls):
    x = jnp.ones(3)
    x.delete()
    no_calls.last = [{"x": x, "n": 1, "key": jax.random.key(0), "text": None}, Label("train", 1)]
    assert Observer().observe().waits == []


def test_call_that_has_not_returned_is_a_wait_with_the_identity_of_the_call(no_calls):
    observer, waits = Observer(), []
    for _ in range(2):
        activity.launch(Label("strategy.reduce"), lambda: waits.extend(observer.observe().waits))
    assert [wait.text.partition(" (")[0] for wait in waits] == ["waits in `strategy.reduce`"] * 2
    assert waits[0].key != waits[1].key


def test_wait_of_the_host_program_names_its_reason(no_calls):
    with activity.waiting("a barrier"):
        observation = Observer().observe()
    (wait,) = observation.waits
    assert wait.text.startswith("waits for other processes in a barrier (`observation = Observer().observe()` at ")


def in_thread(work, function):
    """Observes this process until a thread that calls `function` again and again does `work`; returns that observation."""
    observer, errors, end = Observer(), [], threading.Event()

    def run():
        try:
            while not end.is_set():
                function()
        except Exception as error:  # reported below
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    found, deadline = None, time.monotonic() + 60
    while thread.is_alive() and found is None and time.monotonic() < deadline:
        time.sleep(0.01)
        observation = observer.observe()
        found = observation if observation.work == work else None
    end.set()
    thread.join()
    assert not errors
    return found


def trace(folder):
    activity.calls.running = Label("train", 1)  # a call of a program that traces it
    jax.jit(lambda x: (time.sleep(0.3), x)[1])(1.0)


def compile_a_new_function(folder):
    def compute(x):
        for number in range(200):
            x = jnp.sin(x @ x) + number
        return x

    jax.jit(lambda x: compute(x))(np.ones((4, 4), np.float32))


class SlowInput(io.StringIO):
    def readline(self, *args):
        time.sleep(0.3)
        return "continue\n"


def debug(folder):
    pdb.Pdb(stdin=SlowInput(), stdout=io.StringIO(), nosigint=True).set_trace()


def save(folder):
    strategy = jdist.OneDeviceStrategy("cpu:0")
    with jdist.Checkpointer(folder / "run") as checkpointer:
        for step in range(3):
            checkpointer.save(step, strategy.put({"w": np.ones(3, np.float32)}))


WORK = {
    "traces a function": trace,
    "compiles a program": compile_a_new_function,
    "is stopped in a debugger": debug,
    "reads or writes a checkpoint": save,
}


@pytest.mark.parametrize("work", WORK)
def test_work_is_observed_while_it_is_done(work, no_calls, tmp_path):
    observation = in_thread(work, lambda: WORK[work](tmp_path))
    assert observation is not None
    if work == "traces a function":
        assert observation.waits == []


def test_process_at_its_end_waits_without_a_time_limit(no_calls):
    observer = Observer()
    observer.end = "has ended its program"
    with activity.working("writes a file"):
        observation = observer.observe()
    assert observation.text == (
        ", before the first step, has ended its program, and waits for the end of the other programs"
    )
    (wait,) = observation.waits
    assert wait.steps == float("inf")
