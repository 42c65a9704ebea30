"""`jdist.testing.inject_fault`: a process that is killed, stops, raises an error or is slow at a step."""

import os
import signal
import subprocess
import sys
import time

import numpy as np
import optax
import pytest

import jdist
from jdist._src.core import activity
from jdist.testing import InjectedFault, inject_fault

STEP = jdist.OneDeviceStrategy("cpu:0").step(lambda w: (w + 1, None))


def count(number, w=0.0):
    w = np.float32(w)
    for _ in range(number):
        w, _ = STEP(w)
    return float(w)


def test_error_is_raised_once_at_the_given_step_before_the_state_is_donated():
    inject_fault(0, 3, "raise")
    w = np.float32(count(2))
    with pytest.raises(InjectedFault, match=r"^Process 0 fails at step 3, as `inject_fault` requested\.$"):
        STEP(w)
    assert count(1, w) == 3.0
    assert not activity.calls.before_step


def test_steps_are_counted_from_the_call_of_the_function_and_other_programs_do_not_count():
    count(2)
    with inject_fault(0, 2, "raise"):
        assert count(1) == 1.0
        jdist.OneDeviceStrategy("cpu:0").run(lambda: 1.0)
        with pytest.raises(InjectedFault):
            count(1)


def test_other_process_and_other_attempt_are_not_affected(monkeypatch):
    with inject_fault(1, 1, "raise"), inject_fault(0, 1, "raise", attempt=1):
        assert count(2) == 2.0
    monkeypatch.setenv("JDIST_RESTARTS", "1")
    with inject_fault(0, 1, "raise"):
        assert count(2) == 2.0
    with inject_fault(0, 1, "raise", attempt=1), pytest.raises(InjectedFault):
        count(1)


def test_slow_step_waits_from_the_given_step_on_until_the_fault_is_removed(monkeypatch):
    waits = []
    monkeypatch.setattr(time, "sleep", waits.append)
    with inject_fault(0, 2, "slow", seconds=3.0):
        count(4)
    count(1)
    assert waits == [3.0] * 3


def test_fault_in_fit_is_an_error_of_fit():
    trainer = jdist.Trainer(
        (lambda key, x: np.zeros(3, np.float32), lambda w, x: x @ w), optax.sgd(0.1), optax.squared_error,
        strategy=jdist.OneDeviceStrategy("cpu:0"),
    )  # fmt: skip
    data = np.ones((8, 3), np.float32), np.ones(8, np.float32)
    with inject_fault(0, 3, "raise"), pytest.raises(jdist.FitError, match="after step 2: InjectedFault") as raised:
        trainer.fit(data, batch_size=2, progress="off")
    assert raised.value.fit.steps == 2


@pytest.mark.parametrize(
    "argument", [{"fault": "die"}, {"at_step": 0}, {"process": -1}, {"seconds": 0}, {"attempt": -1}]
)
def test_wrong_arguments_are_refused(argument):
    with pytest.raises(ValueError, match=f"`{next(iter(argument))}` must be"):
        inject_fault(**{"process": 0, "at_step": 1, "fault": "raise", **argument})
    assert not activity.calls.before_step


PROGRAM = """
import sys, jdist, numpy as np
step = jdist.OneDeviceStrategy("cpu:0").step(lambda w: (w + 1, None))
jdist.testing.inject_fault(0, 3, sys.argv[1])
w = np.float32(0)
for number in range(1, 5):
    w, _ = step(w)
    print(number, flush=True)
"""


def start(fault):
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(os.path.abspath, sys.path)), "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-c", PROGRAM, fault]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)


def test_killed_process_ends_before_the_step():
    process = start("kill")
    output, _ = process.communicate(timeout=100)
    assert (process.returncode, output) == (-signal.SIGKILL, "1\n2\n")


@pytest.mark.slow
def test_stopped_process_continues_with_the_step_after_sigcont():
    process = start("stop")
    try:
        _, status = os.waitpid(process.pid, os.WUNTRACED)
        assert os.WIFSTOPPED(status) and os.WSTOPSIG(status) == signal.SIGSTOP
        process.send_signal(signal.SIGCONT)
        output, _ = process.communicate(timeout=100)
        assert (process.returncode, output) == (0, "1\n2\n3\n4\n")
    finally:
        process.kill()
        process.communicate()
