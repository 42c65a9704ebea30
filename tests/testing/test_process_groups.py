"""`jdist.testing.processes`: calls, results, errors, and the end of the processes in every case."""

import atexit
import contextlib
import os
import signal
import subprocess
import sys
import threading
import time

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.experimental import multihost_utils

from jdist.testing import processes

pytestmark = pytest.mark.processes

THIS = __name__
RESULT = f"{THIS}:result"


# Functions of the processes.


def describe():
    return jax.process_index(), jax.process_count(), jax.local_device_count(), jax.device_count()


def total(x):
    return multihost_utils.process_allgather(jnp.float32(x * (1 + jax.process_index()))).sum()


def every_type():
    return {
        "tree": [True, None, 1, 2.5, "x", (float("inf"), []), {}],
        "bfloat16": jnp.full((2, 0, 3), 1, jnp.bfloat16),
        "scalar": ml_dtypes.bfloat16(1.5),
        "text": np.array(["a", "bc"]),
        "transposed": np.arange(6, dtype=np.int8).reshape(2, 3).T,
        "replicated": jax.make_array_from_callback(
            (), jax.sharding.NamedSharding(jax.make_mesh((4,), ("d",)), jax.P()), lambda _: np.float32(3)
        ),
    }


def result(name):
    sharded = jax.sharding.NamedSharding(jax.make_mesh((4,), ("d",)), jax.P("d"))
    return {
        "key": lambda: [jax.random.key(0)],
        "object": lambda: {"a": np.array([object()])},
        "integer key": lambda: {1: 2},
        "sharded": lambda: jax.make_array_from_callback((4,), sharded, lambda i: np.zeros(4)[i]),
    }[name]()


def fail(index, text):
    if index in (None, jax.process_index()):
        raise KeyError(text)
    print("did not fail", flush=True)


def own_id():
    return os.getpid()


def pid_later(seconds):
    time.sleep(seconds)
    return os.getpid()


def wait_on(index):
    if jax.process_index() == index:
        time.sleep(100)  # the line that hangs
    return "returned"


def end(status):
    print("the last words of it")
    sys.stdout.flush()
    os._exit(status)


def leave_a_thread():
    threading.Thread(target=time.sleep, args=(100,)).start()


def fail_at_exit():
    atexit.register(os._exit, 5)


def is_running(pid):
    """Whether a process exists; one that has ended and was not waited for does not count."""
    with contextlib.suppress(FileNotFoundError), open(f"/proc/{pid}/stat") as stat:
        return stat.read().rpartition(")")[2].split()[0] != "Z"
    return False


def wait_until_ended(pid):
    deadline = time.monotonic() + 30
    while is_running(pid):
        assert time.monotonic() < deadline, f"process {pid} is still running"
        time.sleep(0.05)


# Two processes, which no test ends.


@pytest.fixture(scope="module")
def pair():
    with processes(2, devices_per_process=2) as pair:
        yield pair


def test_processes_join_and_run_collectives_and_their_results_are_in_order(pair):
    assert len(pair) == 2
    assert pair.run(f"{THIS}:describe") == [(0, 2, 2, 4), (1, 2, 2, 4)]
    assert pair.run(f"{THIS}:total", 2) == [6, 6]
    assert pair.run("operator:add", [1], [2]) == [[1, 2]] * 2
    assert pair.run("os:environ.get", "JAX_COMPILATION_CACHE_DIR") == [os.environ["JAX_COMPILATION_CACHE_DIR"]] * 2


def test_results_have_the_types_and_bits_of_the_process(pair, tmp_path):
    for value in pair.run(f"{THIS}:every_type"):
        assert value["tree"] == [True, None, 1, 2.5, "x", (float("inf"), []), {}]
        assert (value["bfloat16"].dtype, value["bfloat16"].shape) == (jnp.bfloat16, (2, 0, 3))
        assert (value["scalar"].dtype, float(value["scalar"])) == (jnp.bfloat16, 1.5)
        assert value["text"].tolist() == ["a", "bc"]
        assert (value["transposed"].dtype, value["transposed"].tolist()) == (np.int8, [[0, 3], [1, 4], [2, 5]])
        assert value["replicated"] == 3
    assert pair.run("os.path:basename", tmp_path / "file") == ["file"] * 2


def test_error_names_the_process_and_has_its_traceback_and_the_next_call_succeeds(pair):
    with pytest.raises(
        RuntimeError,
        match=r"fail` raised an error on process 1 of 2:\nTraceback (.*\n)+.*in fail\n(.*\n)+KeyError: 'no'",
    ):
        pair.run(f"{THIS}:fail", 1, "no")
    assert pair.output(0).endswith("did not fail\n") and "did not fail" not in pair.output(1)
    with pytest.raises(RuntimeError) as caught:
        pair.run(f"{THIS}:fail", None, "both")
    assert str(caught.value).count("KeyError: 'both'") == 1 and "on processes 0, 1 of 2" in str(caught.value)
    assert pair.run(f"{THIS}:total", 1) == [3, 3]


def start(*arguments, **options):
    with processes(*arguments, **options):
        pass


NOT_SENT = ", which cannot be sent"
ERRORS = {
    "key": (lambda pair: pair.run(RESULT, "key"), RuntimeError, rf"TypeError: result\[0\] is PRNGKeyArray{NOT_SENT} to the test\. Return numbers, strings"),
    "object": (lambda pair: pair.run(RESULT, "object"), RuntimeError, rf"TypeError: result\['a'\] is ndarray{NOT_SENT}"),
    "integer key": (lambda pair: pair.run(RESULT, "integer key"), RuntimeError, rf"TypeError: result is dict{NOT_SENT} .* dicts with string keys"),
    "sharded": (lambda pair: pair.run(RESULT, "sharded"), RuntimeError, r"TypeError: result is a jax.Array float32\[4(@d)?\] with parts on other processes\. Return the parts of this"),
    "module": (lambda pair: pair.run("absent:f"), RuntimeError, "ModuleNotFoundError: No module named 'absent'"),
    "name": (lambda pair: pair.run("os:absent"), RuntimeError, "AttributeError: module 'os' has no attribute 'absent'"),
    "no name": (lambda pair: pair.run("os"), ValueError, '`function` must be "module:function", got \'os\''),
    "empty name": (lambda pair: pair.run("os:"), ValueError, '`function` must be "module:function", got \'os:\''),
    "no module": (lambda pair: pair.run(":getpid"), ValueError, '`function` must be "module:function", got \':getpid\''),
    "path": (lambda pair: pair.run("tests/steps.py:f"), ValueError, '`function` must be "module:function", got \'tests/steps.py:f\''),
    "argument": (lambda pair: pair.run("a:b", 1, np.ones(1)), TypeError, r"Argument 1 of `a:b` cannot be represented as JSON: .*not ndarray.* Pass numbers"),
    "timeout of a call": (lambda pair: pair.run("os:getpid", timeout=0), ValueError, "`timeout` must be a positive number of seconds, got 0"),
    "index": (lambda pair: pair.stop(2), ValueError, r"`index` must be in \[0, 2\), the processes that were started; got 2"),
    "count": (lambda pair: start(0), ValueError, "`count` must be an integer >= 1, got 0"),
    "devices": (lambda pair: start(2, devices_per_process=0), ValueError, "`devices_per_process` must be an integer >= 1, got 0"),
    "timeout": (lambda pair: start(2, timeout=-1), ValueError, "`timeout` must be a positive number of seconds, got -1"),
    "start": (lambda pair: start(1, timeout=0.01), TimeoutError, r"the start of the process did not return within 0\.01 seconds on process 0 of 1"),
}  # fmt: skip


@pytest.mark.parametrize("call, error, message", ERRORS.values(), ids=ERRORS)
def test_call_with_wrong_arguments_or_results_is_an_error(call, error, message, pair):
    with pytest.raises(error, match=message):
        call(pair)


def test_stopped_process_is_not_called_until_it_is_resumed(pair):
    first, second = pair.run(f"{THIS}:own_id")
    pair.stop(1)
    assert pair.run(f"{THIS}:own_id") == [first, None]
    pair.resume(1)
    assert pair.run(f"{THIS}:own_id") == [first, second]


def test_process_that_is_stopped_during_a_call_has_no_result_and_its_late_result_is_not_that_of_the_next_call(pair):
    first, second = pair.run(f"{THIS}:own_id")
    stop = threading.Timer(0.2, pair.stop, [1])
    stop.start()
    assert pair.run(f"{THIS}:pid_later", 1.0) == [first, None]
    stop.join()
    pair.resume(1)
    assert pair.run(f"{THIS}:describe") == [(0, 2, 2, 4), (1, 2, 2, 4)]
    assert pair.run(f"{THIS}:own_id") == [first, second]


# Processes that end.


@pytest.mark.slow
def test_hanging_call_is_an_error_with_its_line_and_ends_the_processes():
    with processes(1) as one:
        (pid,) = one.run(f"{THIS}:own_id")
        with pytest.raises(
            TimeoutError, match=r"did not return within 1 seconds on process 0 of 1\.(.*\n)+.*in wait_on"
        ):
            one.run(f"{THIS}:wait_on", 0, timeout=1)
        assert not is_running(pid)
        with pytest.raises(
            RuntimeError, match=r"were ended after an earlier call: .* did not return within 1 seconds.* Start new ones"
        ):
            one.run(f"{THIS}:own_id")
    for call in (lambda: one.run(f"{THIS}:own_id"), lambda: one.output(0)):
        with pytest.raises(
            RuntimeError, match=r"the processes ended with the block of `jdist\.testing\.processes`. Call it in"
        ):
            call()


@pytest.mark.slow
def test_call_continues_without_a_process_that_is_killed_and_a_process_that_ends_is_an_error_with_its_output():
    with processes(2) as pair:
        first, second = pair.run(f"{THIS}:own_id")
        kill = threading.Timer(0.5, pair.kill, [1])
        kill.start()
        assert pair.run(f"{THIS}:wait_on", 1) == ["returned", None]
        kill.join()
        assert not is_running(second)
        for call in (pair.stop, pair.resume):
            with pytest.raises(RuntimeError, match="Process 1 has ended, so it cannot be (stopped|resumed)"):
                call(1)
        pair.stop(0)
        with pytest.raises(RuntimeError, match="No process can run `os:getpid`: the test has stopped or killed all of"):
            pair.run("os:getpid")
        pair.resume(0)
        with pytest.raises(
            RuntimeError, match=r"Process 0 of 2 ended with exit status 3 during .*end`(.*\n)+the last words of it"
        ):
            pair.run(f"{THIS}:end", 3)
        assert not is_running(first)
        pair.kill(0)


@pytest.mark.slow
def test_stopped_process_ends_with_the_block():
    with processes(1) as one:
        (pid,) = one.run(f"{THIS}:own_id")
        one.stop(0)
    assert not is_running(pid)


def fail_or_wait():
    if jax.process_index():
        raise ValueError("before the collective")
    total(1)


@pytest.mark.slow
def test_process_that_raises_ends_a_process_that_waits_for_it():
    message = r"(.*\n)+ValueError: before the collective\n(.*\n)*.*had not returned on process 0 10 seconds after the error on process 1"
    with processes(2) as pair, pytest.raises(RuntimeError, match=message):
        pair.run(f"{THIS}:fail_or_wait")


@pytest.mark.slow
@pytest.mark.parametrize(
    "function, error, message",
    [
        ("leave_a_thread", TimeoutError, "its exit did not return within 1 seconds on process 0 of 1"),
        ("fail_at_exit", RuntimeError, "Process 0 of 1 ended with exit status 5 during its exit"),
    ],
)
def test_process_that_does_not_exit_or_fails_at_its_exit_is_an_error(monkeypatch, function, error, message):
    monkeypatch.setattr("jdist._src.testing.processes._EXIT_SECONDS", 1.0 if error is TimeoutError else 60.0)
    with pytest.raises(error, match=message), processes(1) as one:
        one.run(f"{THIS}:{function}")


PARENT = """
import os, signal, threading
import jdist

def start():
    with jdist.testing.processes(1) as one:
        print(*one.run("os:getpid"), flush=True)
        {stop}
        os.kill(os.getpid(), signal.SIGKILL)

{start}
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="On other systems a stopped process does not end with its parent.")
@pytest.mark.parametrize(
    "stop, start",
    [
        ("one.stop(0)", "start()"),
        ("", "thread = threading.Thread(target=start); thread.start(); thread.join()"),
    ],
    ids=["stopped", "started by a thread"],
)
def test_processes_end_when_the_test_is_killed(stop, start, tmp_path):
    program = PARENT.format(stop=stop, start=start)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "TMPDIR": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == -signal.SIGKILL, done.stderr
    wait_until_ended(int(done.stdout))
