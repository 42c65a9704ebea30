"""Traces of a few steps: which, and that there is always an end to them."""

import os
import pathlib
import subprocess
import sys

import jax
import pytest

from jdist import callbacks

from small_loop import place, train

HERE = pathlib.Path(__file__).parent
ONE = place("one_device")


def _idle(state, number):
    return state, 0.0


@pytest.fixture
def calls(monkeypatch):
    """What was asked of the profiler; for which steps are traced. That a trace comes of it is tested with the real one."""
    asked = []
    monkeypatch.setattr(jax.profiler, "start_trace", lambda directory: asked.append("start"))
    monkeypatch.setattr(jax.profiler, "stop_trace", lambda: asked.append("stop"))
    return asked


def _traced(calls, profile, **options):
    """The steps that ran while there was a trace."""

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
    "whole_calls": (6, 7, 4, 0, [9, 10, 11, 12]),
    "resumed": (4, 8, 1, 5, [6, 7, 8]),
    "resumed_behind": (4, 5, 1, 5, []),
}


@pytest.mark.parametrize("start, stop, a_call, resumed, steps", CASES.values(), ids=CASES)
def test_trace_has_the_steps_that_were_asked_for(start, stop, a_call, resumed, steps, calls, tmp_path):
    profile = callbacks.Profile(tmp_path, start=start, stop=stop)
    assert _traced(calls, profile, a_call=a_call, start=resumed) == steps


def test_trace_is_ended_where_a_callback_ends_training(calls, tmp_path):
    def fails(event):
        if event.step == 2:
            raise OSError("The disk is full.")

    with pytest.raises(OSError, match="The disk is full"):
        train(ONE, [callbacks.Profile(tmp_path, start=2, stop=9), fails], state=0, call=_idle)
    assert calls == ["start", "stop"]


def test_trace_that_training_did_not_come_to_is_said(calls, tmp_path):
    says = "Steps 50 to 60 were to be traced, and training was at its end after step 6"
    with pytest.warns(UserWarning, match=says):
        train(ONE, [callbacks.Profile(tmp_path, start=50, stop=60)], state=0, call=_idle)
    assert calls == []


def test_profiler_writes_a_trace_with_the_steps(tmp_path):
    worker, tests = HERE / "trace_worker.py", os.pathsep.join([str(HERE), str(HERE.parent)])
    command = [sys.executable, worker, tmp_path / "new" / "trace"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([tests, str(HERE.parent.parent)])}
    traced = subprocess.run(command, env=environment, text=True, capture_output=True, check=True, timeout=200).stdout
    assert any("step" in name for name in traced.splitlines())


BAD = {
    "order": (
        dict(start=5, stop=4),
        ValueError,
        "Steps 5 to 4 are none: `start` is the first of them, `stop` the last",
    ),
    "start": (dict(start=0, stop=4), ValueError, "`start` must be an integer >= 1, got 0"),
    "stop": (dict(start=1, stop=2.5), TypeError, "`stop` must be an integer >= 1, got 2.5"),
}


@pytest.mark.parametrize("steps, error, says", BAD.values(), ids=BAD)
def test_steps_that_are_none_are_refused(steps, error, says):
    with pytest.raises(error, match=says):
        callbacks.Profile("trace", **steps)


def test_directory_that_cannot_be_written_to_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # whoever runs this may be allowed everything
    with pytest.raises(ValueError, match=r"The directory '.*' cannot be written to\. Give one that can"):
        train(ONE, [callbacks.Profile(tmp_path, start=1, stop=1)], state=0, call=_idle)


def test_directory_that_cannot_be_made_is_refused_before_the_first_step(tmp_path):
    (tmp_path / "file").write_text("")
    steps = []
    with pytest.raises(ValueError, match=r"The directory '.*trace' cannot be made: .*Give one that can"):
        train(ONE, [callbacks.Profile(tmp_path / "file" / "trace", start=1, stop=1), steps.append], state=0, call=_idle)
    assert steps == []
