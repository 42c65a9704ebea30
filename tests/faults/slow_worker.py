"""Work on one of two processes, or on both, that takes longer than the time limit of the watchdog and is no hang."""

import io
import pathlib
import pdb
import time

import jax
import numpy as np

import jdist

LIMIT = 1.5
SECONDS = 4.0  # longer than the limit and the time in which a process must answer


def run_case(case, folder, limit=LIMIT):
    """Returns the state after a step that process 0 calls while process 1 works, or after work of both."""
    strategy = jdist.MultiWorkerMirroredStrategy(
        communication_options=jdist.CommunicationOptions(timeout_seconds=limit)
    )
    return globals()[case](strategy, jax.process_index(), pathlib.Path(folder))


def _step(strategy, scale=1.0):
    return strategy.step(lambda w, x: (w + scale * jdist.all_reduce("mean", x.mean()), None))


def _batch(strategy):
    return strategy.split(np.arange(4, dtype=np.float32))


def trace(strategy, process, folder):
    def slow_to_trace(w, x):
        if process == 1:
            time.sleep(SECONDS)
        return w + jdist.all_reduce("mean", x.mean()), None

    return float(strategy.step(slow_to_trace)(strategy.put(0.0), _batch(strategy))[0])


def compilation(strategy, process, folder):
    from jax._src import compiler

    name = "backend_compile_and_load" if hasattr(compiler, "backend_compile_and_load") else "backend_compile"
    compile_now, step, w, batch = getattr(compiler, name), _step(strategy, 2.0), strategy.put(0.0), _batch(strategy)

    def compile_slowly(*args, **kwargs):
        time.sleep(SECONDS)
        return compile_now(*args, **kwargs)

    if process == 1:
        setattr(compiler, name, compile_slowly)
    try:
        return float(step(w, batch)[0])
    finally:
        setattr(compiler, name, compile_now)


def host_computation(strategy, process, folder):
    """Both processes compute between two steps. Process 1 takes longer, but not by the time limit."""
    step, w, batch = _step(strategy), strategy.put(0.0), _batch(strategy)
    w, _ = step(w, batch)
    time.sleep(SECONDS + 0.5 * process)
    return float(step(w, batch)[0])


def checkpoint(strategy, process, folder):
    """Process 0 writes a checkpoint slowly, and both wait for it before the next one."""
    from etils import epath

    path_class = type(epath.Path(folder))
    write_text, delays = path_class.write_text, [SECONDS] if process == 0 else []

    def write_slowly(path, *args, **kwargs):
        time.sleep(delays.pop() if delays and path.name == "manifest.json" else 0)
        return write_text(path, *args, **kwargs)

    path_class.write_text = write_slowly
    try:
        w = strategy.put(3.0)
        with jdist.Checkpointer(folder / "slow") as checkpointer:
            checkpointer.save(1, w)
            checkpointer.save(2, w)
    finally:
        path_class.write_text = write_text
    return float(w) if not delays else 0.0


class _SlowInput(io.StringIO):
    def readline(self, *args):
        time.sleep(SECONDS)
        return "continue\n"


def debugger(strategy, process, folder):
    step, w, batch = _step(strategy), strategy.put(0.0), _batch(strategy)
    if process == 1:
        pdb.Pdb(stdin=_SlowInput(), stdout=io.StringIO(), nosigint=True).set_trace()
    return float(step(w, batch)[0])


def stopped_job(strategy, process, folder):
    """Both processes are stopped and continued, as by Ctrl-Z and `fg`, while process 0 waits for process 1."""
    step, w, batch = _step(strategy), strategy.put(0.0), _batch(strategy)
    w, _ = step(w, batch)
    if process == 0:
        (folder / "waiting").touch()
    else:
        while not (folder / "continued").exists():  # written by the test
            time.sleep(0.05)
    result = float(step(w, batch)[0])
    (folder / f"result_{process}").write_text(str(result))
    return result


def steps_per_call(strategy, process, folder):
    """The time limit is per step: process 0 waits in a call of four steps for longer than the limit of one."""
    step = strategy.step(lambda w, x: (w + jdist.all_reduce("mean", x.mean()), None), steps_per_call=4)
    w, batches = strategy.put(0.0), [_batch(strategy)] * 4
    w, _ = step(w, batches)
    w.block_until_ready()
    time.sleep(2.5 * LIMIT * process)
    return float(step(w, batches)[0])


def write_by_process_0(strategy, process, folder):
    from jdist._src.core.atomic_files import write_on_process_0

    def write(path):
        time.sleep(SECONDS)
        path.write_text("3")

    write_on_process_0(folder / "file", write)
    return float((folder / "file").read_text())
