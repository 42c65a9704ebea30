"""Reads of a checkpoint that never return: a FIFO without a writer takes the place of a file. Reads that are interrupted."""

import contextlib
import os
import pathlib
import re
import subprocess
import sys

import jax
import numpy as np
import pytest

from jdist._src.checkpoint import storage
from jdist._src.checkpoint.checkpointer import Checkpointer
from jdist._src.checkpoint.storage import short_message
from jdist._src.core import activity
from jdist._src.faults.observation import Observer

from laws import STRATEGIES, among

# One is read by Python in the thread, one by Python in a pool of threads, and one by tensorstore.
FILES = ["manifest/manifest.json", "arrays/_METADATA", "arrays/manifest.ocdbt"]


@pytest.fixture
def one():
    return STRATEGIES["one_device"]()


@pytest.fixture
def run(tmp_path, one):
    """A folder with checkpoints of steps 1 and 2."""
    with Checkpointer(tmp_path) as checkpointer:
        for step in (1, 2):
            checkpointer.save(step, one.put({"w": np.full((64, 64), step, np.float32)}))
        checkpointer.restore(one, step=1)  # imports orbax
    return tmp_path


@contextlib.contextmanager
def stalled(path):
    """Replaces a file by a FIFO while the block runs. Then the reads of the FIFO end."""
    content = path.read_bytes()
    path.unlink()
    os.mkfifo(path)
    try:
        yield
    finally:
        with contextlib.suppress(OSError), open(os.open(path, os.O_WRONLY | os.O_NONBLOCK), "wb"):
            pass
        path.unlink()
        path.write_bytes(content)


@pytest.mark.parametrize("file", among(FILES, 1))
def test_read_that_never_returns_is_named_and_an_error_at_the_limit_but_no_damage(run, one, file, caplog, monkeypatch):
    read = run / "2" / (file if file.startswith("manifest") else "arrays")
    place = r"\(`checkpointer\.restore\(one\)` at .*test_read_limit\.py:\d+\)"
    subject = rf"The read of {read}, of the checkpoint of step 2 {place}, has not ended after"
    with Checkpointer(run, fallback=True) as checkpointer:
        with stalled(run / "2" / file), monkeypatch.context() as short_limits:
            short_limits.setenv("JDIST_WARNING_SECONDS", "0.2")
            short_limits.setenv("JDIST_WORK_SECONDS", "0.5")
            with pytest.raises(
                TimeoutError,
                match=rf"^{subject} 0\.5 seconds: the file system or the object store does not answer\. Check .*"
                "the checkpoint may be undamaged.*JDIST_WORK_SECONDS changes",
            ) as error:
                checkpointer.restore(one)
            assert activity.recorded_work() is None and Observer().observe().work is None
        assert checkpointer.latest == 2 and short_message(error.value) == str(error.value)
        assert checkpointer.restore(one).step == 2
    assert len(caplog.messages) == 2 and all(re.search(rf"^{subject} 0 seconds\.$", text) for text in caplog.messages)


def test_read_that_ends_is_not_named(run, one, caplog):
    assert Checkpointer(run).restore(one).step == 2
    assert caplog.text == ""


def test_context_of_64_bit_types_applies_to_the_read(run, one):
    with jax.enable_x64(True), Checkpointer(run) as checkpointer:
        checkpointer.save(3, one.put({"w": np.full(1, 0.1)}))
        restored = checkpointer.restore(one).state["w"]
    assert restored.dtype == np.float64 and np.asarray(restored)[0] == 0.1


def test_wrong_variable_is_no_damage(run, one, monkeypatch):
    monkeypatch.setenv("JDIST_WORK_SECONDS", "long")
    checkpointer = Checkpointer(run, fallback=True)
    with pytest.raises(ValueError, match="JDIST_WORK_SECONDS must be a number of seconds, got 'long'"):
        checkpointer.restore(one)
    assert checkpointer.latest == 2


def test_timeout_that_the_store_reports_is_no_damage(run, one, monkeypatch):
    def read_text(path):
        raise OSError(110, "Connection timed out", str(path))

    with Checkpointer(run, fallback=True) as checkpointer, monkeypatch.context() as patch:
        patch.setattr(pathlib.Path, "read_text", read_text)
        with pytest.raises(TimeoutError, match="Connection timed out"):
            checkpointer.restore(one)
        assert checkpointer.latest == 2


PROGRAM = """
import os, sys
os.environ["JAX_PLATFORMS"] = "cpu"
import numpy as np
import jdist
folder, *files = sys.argv[1:]
strategy = jdist.OneDeviceStrategy()
checkpointer = jdist.Checkpointer(folder)
for step, file in enumerate(files):
    checkpointer.save(step, strategy.put({"w": np.ones(8, np.float32)}), wait=True)
    os.environ["JDIST_WORK_SECONDS"] = "0.5"
    os.unlink(f"{folder}/{step}/{file}")
    os.mkfifo(f"{folder}/{step}/{file}")
    try:
        checkpointer.restore(strategy, step=step)
    except TimeoutError as error:
        print(error)
"""


@pytest.mark.slow
def test_program_exits_while_reads_do_not_return(tmp_path):
    (tmp_path / "train.py").write_text(PROGRAM)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(os.path.abspath, sys.path))}
    command = [sys.executable, "train.py", str(tmp_path / "run"), *FILES]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0 and done.stderr == "", done.stderr
    for step, line in enumerate(done.stdout.splitlines()):
        assert (
            f"step {step} (`checkpointer.restore(strategy, step=step)` at train.py:15), has not ended after 0.5" in line
        )
    assert len(done.stdout.splitlines()) == len(FILES)


INTERRUPTED = """
import os, pathlib, signal, threading, time
from jdist._src.checkpoint.read_limit import read_within_limit

def read():
    begun.set()
    interrupted.wait(20)
    time.sleep(0.5)
    os.write(1, b"read")  # a thread in C++ at this time would end the process

def press():
    begun.wait()
    time.sleep(0.3)  # until the wait has begun, where the interrupt is not noticed at once
    # The kernel gives the signal to this thread: no wait of another thread ends, as if it had arrived just before the wait.
    signal.pthread_kill(threading.get_ident(), signal.SIGINT)

begun, interrupted = threading.Event(), threading.Event()
signal.signal(signal.SIGINT, signal.default_int_handler)
threading.Thread(target=press).start()
try:
    read_within_limit(pathlib.Path("run"), 1, read)
except KeyboardInterrupt:
    os.write(1, b"interrupted ")
    interrupted.set()
"""


def test_exit_after_an_interrupted_read_waits_for_the_read():
    done = subprocess.run([sys.executable, "-c", INTERRUPTED], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "interrupted read", "")


IMPORT = """
import signal, sys
import jdist

class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == "tensorstore._tensorstore":
            sys.setprofile(press_in_the_extension)

def press_in_the_extension(frame, event, value):
    callers = frame.f_code.co_filename, frame.f_back and frame.f_back.f_code.co_name
    if event == "call" and "importlib" not in callers[0] and callers[1] == "_call_with_frames_removed":
        sys.setprofile(None)
        signal.raise_signal(signal.SIGINT)

signal.signal(signal.SIGINT, signal.default_int_handler)
sys.meta_path.insert(0, Finder())
strategy, checkpointer = jdist.OneDeviceStrategy(), jdist.Checkpointer(sys.argv[1])
try:
    checkpointer.restore(strategy)
except KeyboardInterrupt:
    print(checkpointer.restore(strategy).step)
"""


def test_interrupt_while_orbax_is_imported_is_no_damage(run):
    done = subprocess.run([sys.executable, "-c", IMPORT, str(run)], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "2\n", "")


def test_missing_package_is_no_damage(run, one, monkeypatch):
    def fail():
        raise ImportError("not installed")

    monkeypatch.setattr(storage, "import_orbax", fail)
    with Checkpointer(run, fallback=True) as checkpointer:
        with pytest.raises(ImportError, match="not installed"):
            checkpointer.restore(one)
        monkeypatch.undo()
        assert checkpointer.restore(one).step == 2
