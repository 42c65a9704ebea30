"""A program that ends after `save`: the interpreter waits for the checkpoint, or the exit status tells that it is lost."""

import asyncio
import os
import subprocess
import sys

import numpy as np
import pytest

import jdist

from notebook_kernel import Kernel

PREAMBLE = """
import atexit, os, resource, signal, sys, threading, time
os.environ["JAX_PLATFORMS"] = "cpu"
import jax, numpy as np, optax
import jdist
jdist.use_cpu_devices(2)
folder = sys.argv[1]
strategy = jdist.MirroredStrategy()
state = strategy.put({"w": np.random.default_rng(0).normal(size=(300, 1000)).astype(np.float32)})
c = jdist.Checkpointer(folder)
mkdir = os.mkdir

def slow_mkdir(*args, **kwargs):
    time.sleep(1)
    mkdir(*args, **kwargs)

def no_mkdir(*args, **kwargs):
    raise OSError(122, os.strerror(122))
"""
FULL = "resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))\n"
FORK = """
import warnings; warnings.simplefilter("ignore")
if child := os.fork(): os.waitpid(child, 0)
else: threading._shutdown(); os._exit(0)
"""
TRAINER = """
trainer = jdist.Trainer((lambda key, x: jax.numpy.zeros((300, 1000)), lambda w, x: x @ w), optax.sgd(0.1),
    optax.squared_error, strategy=strategy)
data = (np.ones((8, 300), np.float32), np.ones((8, 1000), np.float32))
class Fails(jdist.callbacks.Callback):
    def __call__(self, event):
        if event.step == 3: raise ValueError("unlucky")
c = jdist.Checkpointer(folder, every=2)
trainer.fit(data, batch_size=2, callbacks=[jdist.callbacks.Checkpoint(c), Fails()], progress="off")
"""

# code, exit status, complete checkpoints, a part of stdout, a part of stderr
PROGRAMS = {
    "dropped checkpointers": (
        "for i in range(5): jdist.Checkpointer(folder).save(i, state)\n"
        "print(jdist.Checkpointer(folder).restore(strategy).step)",
        0, (2, 3, 4), "4", "",
    ),
    "full disk": (
        f"{FULL}c.save(1, state); atexit.register(print, 'atexit runs')",
        1, (), "atexit runs", f"jdist: The checkpoint of step 1 could not be written to FOLDER: {os.strerror(27)}.",
    ),
    "exception": ("c.save(1, state); 1 / 0", 1, (1,), "", "ZeroDivisionError"),
    "signal handler": (
        "signal.signal(signal.SIGTERM, lambda *args: sys.exit(7)); c.save(1, state); os.kill(os.getpid(), signal.SIGTERM)\n"
        "time.sleep(60)",
        7, (1,), "", "",
    ),
    "reference cycle": ("c.save(1, state); c.cycle = c; del c", 0, (1,), "", ""),
    "two folders": (
        "other = jdist.Checkpointer(folder + '/../other'); c.save(1, state); other.save(2, state)\n"
        "atexit.register(lambda: print(c.steps(), other.steps()))",
        0, (1,), "(1,) (2,)", "",
    ),
    "closed by atexit": ("atexit.register(c.close); c.save(1, state)", 0, (1,), "", ""),
    "saved by atexit": (
        "c.save(1, state); atexit.register(c.save, 2, state)",
        0, (1,), "", "The checkpoint of step 2 could not be written to FOLDER: RuntimeError: the interpreter is exiting",
    ),
    "no exit functions run": ("c.save(1, state, wait=True); os._exit(0)", 0, (1,), "", ""),
    "thread of the user": (
        "c.save(1, state); threading.Thread(target=lambda: (time.sleep(0.5), print('ends'))).start()", 0, (1,), "ends", "",
    ),
    # The child ends without the functions of `atexit`: that of tensorstore takes a mutex that a thread may hold at the fork.
    "forked child": (f"c.save(1, state)\n{FORK}", 0, (1,), "", ""),
    "full disk, dropped": (f"{FULL}c.save(1, state); del c; 1 / 0", 1, (), "", "The program ends with exit status 1."),
    "full disk, handled": (
        f"{FULL}c.save(1, state)\ntry: c.wait()\nexcept jdist.CheckpointError: print('handled')", 0, (), "handled", "",
    ),
    "slow folders": ("os.mkdir = slow_mkdir\nc.save(1, state)", 0, (1,), "", ""),
    "no folders": (
        "os.mkdir = no_mkdir\nc.save(1, state)",
        1, (), "", f"CheckpointError: The checkpoint of step 1 could not be written to FOLDER: {os.strerror(122)}. ",
    ),
    "no folders at first": (
        "os.mkdir = no_mkdir\ntry: c.save(1, state)\nexcept jdist.CheckpointError: os.mkdir = mkdir\nc.save(1, state)",
        0, (1,), "", "",
    ),
    "trainer": (TRAINER, 1, (2,), "", "ValueError: unlucky"),
}  # fmt: skip
DEFAULT = ("dropped checkpointers", "full disk")


@pytest.mark.parametrize(
    "name", [name if name in DEFAULT else pytest.param(name, marks=pytest.mark.slow) for name in PROGRAMS]
)
def test_program_that_ends_after_a_save_waits_for_it_or_fails(name, tmp_path):
    code, status, steps, stdout, stderr = PROGRAMS[name]
    folder = tmp_path / "run"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", PREAMBLE + code, str(folder)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == status, done.stderr
    assert jdist.Checkpointer(folder).steps() == steps, done.stderr
    assert stdout in done.stdout and stderr.replace("FOLDER", str(folder)) in done.stderr
    assert stderr or not done.stderr


@pytest.mark.slow
def test_interrupt_while_the_interpreter_waits_ends_the_program(tmp_path):
    code = """
def interrupt():
    while not threading._SHUTTING_DOWN: time.sleep(0.001)
    time.sleep(0.02)
    os.kill(os.getpid(), signal.SIGINT)
threading.Thread(target=interrupt, daemon=True).start()
rename = os.rename
def slow_rename(*args, **kwargs):  # of the complete checkpoint, in the background
    time.sleep(60)
    rename(*args, **kwargs)
os.rename = slow_rename
c.save(1, state)
"""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", PREAMBLE + code, str(tmp_path / "run")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (1, "jdist: Interrupted at exit, while a checkpoint was being written.\n")


@pytest.mark.slow
def test_kernel_that_is_shut_down_waits_for_its_save(tmp_path):
    kernel = Kernel()
    try:
        code = PREAMBLE.replace("sys.argv[1]", repr(str(tmp_path / "run"))) + "c.save(1, state)"
        assert kernel.run(code).error == ""
        kernel._manager.shutdown_kernel()
    finally:
        kernel.close()
    assert jdist.Checkpointer(tmp_path / "run").steps() == (1,)


def test_save_in_a_notebook_does_not_run_the_event_loop_of_the_kernel(tmp_path, two):
    """The messages of later cells wait there for the end of this cell."""
    checkpointer, state, ran = jdist.Checkpointer(tmp_path / "run"), two.put(np.arange(4.0)), []

    async def cell():
        asyncio.get_running_loop().call_soon(ran.append, "message")
        checkpointer.save(1, state)
        checkpointer.wait()
        assert not ran
        return checkpointer.restore(two, like=state).state

    jdist.testing.assert_bitwise_equal(asyncio.run(cell()), state)
