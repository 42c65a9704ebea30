"""Profiles of a few steps: the traced steps, and that every trace is ended."""

import os
import pathlib
import subprocess
import sys

import pytest
from training.small_fits import digits, trainer

from jdist import callbacks
from jdist._src.callbacks import profiling

from laws import each_row
from small_loop import idle, place, train

HERE = pathlib.Path(__file__).parent
ONE = place("one_device")
DATA = tuple(array[:60] for array in digits())


@pytest.fixture
def calls(monkeypatch):
    """Replaces the profile, and returns its calls. A test below uses the real profiler."""
    calls = []

    class Recorder:
        def start(self):
            calls.append("start")

        def end(self, has_failed):
            calls.append("failed" if has_failed else "stop")

    monkeypatch.setattr(profiling, "profile", lambda directory: Recorder())
    return calls


def _traced(calls, profile, **options):
    """Returns the steps that ran during the trace."""

    def step(state, number):
        if calls and calls[-1] == "start":
            steps.append(number + 1)
        return state, 0.0

    steps = []
    train(ONE, [profile], epochs=1, steps=12, state=0, call=step, **options)
    assert calls in ([], ["start", "stop"])
    return steps


CASES = {
    "middle": (4, 6, 1, 0, [4, 5, 6]),
    "first": (1, 2, 1, 0, [1, 2]),
    "last": (12, 12, 1, 0, [12]),
    "beyond": (11, 99, 1, 0, [11, 12]),
    "calls": (5, 8, 4, 0, [5, 6, 7, 8]),
    "complete_calls": (6, 7, 4, 0, [9, 10, 11, 12]),
    "resumed": (4, 8, 1, 5, [6, 7, 8]),
    "resumed_after_stop": (4, 5, 1, 5, []),
}


@pytest.mark.parametrize("start, stop, steps_per_call, resumed, steps", CASES.values(), ids=CASES)
def test_trace_contains_the_requested_steps(start, stop, steps_per_call, resumed, steps, calls, tmp_path):
    profile = callbacks.Profile(tmp_path, start=start, stop=stop)
    assert _traced(calls, profile, steps_per_call=steps_per_call, start=resumed) == steps


def test_trace_is_ended_if_a_callback_raises(calls, tmp_path):
    def fails(event):
        if event.step == 2:
            raise OSError("The disk is full.")

    with pytest.raises(OSError, match="The disk is full"):
        train(ONE, [callbacks.Profile(tmp_path, start=2, stop=9), fails], state=0, call=idle)
    assert calls == ["start", "failed"]


def test_steps_that_are_not_reached_warn(calls, tmp_path):
    with pytest.warns(UserWarning, match="Steps 50 to 60 were not traced: training ended after step 2") as caught:
        trainer(ONE).fit(
            DATA, batch_size=30, callbacks=[callbacks.Profile(tmp_path, start=50, stop=60)], progress="off"
        )
    assert calls == []
    assert [warning.filename for warning in caught] == [__file__]  # the line that calls `fit`


@pytest.mark.slow
def test_profiler_writes_a_trace_of_the_steps(tmp_path):
    worker, tests = HERE / "trace_worker.py", os.pathsep.join([str(HERE), str(HERE.parent / "kit")])
    command = [sys.executable, worker, tmp_path / "new" / "trace"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([tests, str(HERE.parent.parent)])}
    names = subprocess.run(command, env=environment, text=True, capture_output=True, check=True, timeout=200).stdout
    assert any("step" in name for name in names.splitlines())


WRONG_STEPS = [
    (dict(start=5, stop=4), ValueError, "`stop` must be >= `start`, got start=5, stop=4"),
    (dict(start=0, stop=4), ValueError, "`start` must be an integer >= 1, got 0"),
    (dict(start=1, stop=2.5), TypeError, "`stop` must be an integer >= 1, got 2.5"),
]


@each_row("steps, error, message", WRONG_STEPS)
def test_wrong_steps_raise(steps, error, message):
    with pytest.raises(error, match=message):
        callbacks.Profile("trace", **steps)


def test_unwritable_directory_raises(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # root may write everywhere
    with pytest.raises(ValueError, match=r"The directory '.*' is not writable\. Pass another path"):
        train(ONE, [callbacks.Profile(tmp_path, start=1, stop=1)], state=0, call=idle)


def test_directory_that_cannot_be_made_raises_before_the_first_step(tmp_path):
    (tmp_path / "file").write_text("")
    steps = []
    with pytest.raises(ValueError, match=r"The directory '.*trace' cannot be made: .*Pass another path"):
        train(ONE, [callbacks.Profile(tmp_path / "file" / "trace", start=1, stop=1), steps.append], state=0, call=idle)
    assert steps == []
