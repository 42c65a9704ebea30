"""Two processes that save and restore together; the disk of one of them fails."""

import contextlib
import os
import pathlib
import resource
import signal
import time

import jax
import numpy as np
import optax
from jax.sharding import Mesh

import jdist
from jdist._src.checkpoint.process_sync import ProcessGroup
from jdist._src.core.jax_compat import key_value_store


def results_by_case(folder, failing_process):
    """Returns the result of each call as text, the comparison of the restored state, and numbers of keys in the store."""
    folder, number, results = pathlib.Path(folder), jax.process_index(), {}
    strategy = jdist.ShardedStrategy("all", mesh=Mesh(np.array(jax.devices()), ("data",)))
    state = strategy.init(lambda key: {"w": jax.random.normal(key, (1024, 512))}, jax.random.key(0))
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # a file that grows too large is then an error, as on a full disk

    @contextlib.contextmanager
    def file_size_limit(num_bytes):
        """Limits the size of files on the failing process."""
        if number == failing_process:
            resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, resource.RLIM_INFINITY))
        yield
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))

    def attempt(case, function):
        try:
            results[case] = f"returned {function()}"
        except jdist.CheckpointError as error:
            text = str(error).replace("\n", " ")
            results[case] = text

    def trained():
        """Trains with a checkpoint every second step; no checkpoint can be written."""
        model = (lambda key, x: {"w": jax.random.normal(key, (1024, 512))}, lambda params, x: x @ params["w"])
        trainer = jdist.Trainer(model, optax.sgd(0.1), lambda y, _: (y**2).mean(-1), strategy=strategy)
        data = (np.ones((24, 1024), np.float32), np.zeros(24, np.float32))
        checkpointer = jdist.Checkpointer(folder / "run", every=2)
        try:
            trainer.fit(data, batch_size=4, callbacks=[jdist.callbacks.Checkpoint(checkpointer)], progress="off")
        except jdist.FitError as error:
            total = float(
                jax.jit(lambda w: w.sum(), out_shardings=strategy.replicas.replicated_sharding)(
                    error.fit.state.params["w"]
                )
            )
            return type(error.__cause__).__name__, error.fit.steps, int(error.fit.state.step), total == total

    with jdist.Checkpointer(folder / "checkpoints") as checkpointer:

        def saved(step):
            checkpointer.save(step, state)
            checkpointer.wait()
            return checkpointer.steps()

        attempt("before", lambda: saved(1))
        with file_size_limit(300_000):
            attempt("in the background", lambda: saved(2))
        with file_size_limit(30_000):
            attempt("before it begins", lambda: saved(2))
        try:
            raise ValueError("an exception of the caller, not of the disk")
        except ValueError:
            attempt("after", lambda: saved(3))

        with file_size_limit(300_000):
            attempt("training", trained)

        if number == 0:  # damages a file that the failing process reads
            part = "ocdbt.process_1" if failing_process else "ocdbt.process_0"
            largest = max(
                (folder / "checkpoints" / "3" / "arrays" / part).glob("d/*"), key=lambda file: file.stat().st_size
            )
            os.truncate(largest, 100_000)
        strategy.put(1)  # a barrier
        attempt("damaged", lambda: checkpointer.restore(strategy).step)
        restored = checkpointer.restore(strategy, step=1).state["w"]
        shards, saved_shards = (
            [np.asarray(shard.data) for shard in x.addressable_shards] for x in (restored, state["w"])
        )
        results["equal"] = bool(np.array_equal(shards, saved_shards))

        counts = []
        for repeats in (1, 5):
            for _ in range(repeats):
                checkpointer.restore(strategy, step=1)
            strategy.put(1)
            counts.append(len(key_value_store().key_value_dir_get_bytes("jdist/checkpoint")))
            strategy.put(1)
        results["keys"] = counts

        group = ProcessGroup()
        strategy.put(1)
        if number == failing_process:
            time.sleep(1.5)
        else:
            attempt("late", lambda: group.barrier(0.3))
        strategy.put(1)
        group.close()
    return results
