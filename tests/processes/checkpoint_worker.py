"""Trains, saves and restores on one process of several."""

import functools
import os
import pathlib
import shutil

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh

import jdist
from jdist._src.checkpoint import manifest, storage
from jdist._src.checkpoint.checkpointer import Checkpointer


def make(key):
    index = jdist.replica_id()
    return {
        "w": jax.random.normal(key, (8, 4)),
        "key": key,
        "total": jdist.SyncOnRead(1.0 + index, "sum"),
        "drift": jdist.SyncOnRead(jnp.arange(4.0) + index, "mean"),
    }


def count_up(state):
    return {name: leaf if name == "key" else leaf + 1 for name, leaf in state.items()}, None


def gathered(strategy, state):
    """Returns every leaf as a numpy array, on each process."""
    read = jdist.read_values({**state, "key": jax.random.key_data(state["key"])})
    return jax.tree.map(
        np.asarray, jax.jit(lambda tree: tree, out_shardings=strategy.replicas.replicated_sharding)(read)
    )


def restored_states(folder):
    """Returns the leaves of the restored states."""
    folder, count, devices = pathlib.Path(folder), jax.process_count(), jax.devices()
    strategies = {
        "mirrored": jdist.MirroredStrategy(devices),
        "all": jdist.ShardedStrategy("all", mesh=Mesh(np.array(devices), ("data",))),
    }

    results = {}
    for name, strategy in strategies.items():
        step = strategy.step(count_up)
        state = strategy.init(make, jax.random.key(0))
        with Checkpointer(folder / f"{name}_{count}", keep=2) as checkpointer:
            for at in range(1, 4):
                state, _ = step(state)
                extra = {"at": np.int64(at), "w": state["w"] if count == 1 or name == "mirrored" else None}
                assert checkpointer.save(at, state, {"batch": at}, extra=extra)
            assert not checkpointer.save(3, state)
            restored = checkpointer.restore(strategy, like=state)
            assert checkpointer.steps() == (2, 3) and restored.step == 3 and restored.data_position == {"batch": 3}
            assert restored.extra["at"] == 3
            shardings = [
                [leaf.sharding for leaf in jax.tree.leaves(tree)] for tree in (restored.state, strategy.put(state))
            ]
            assert shardings[0] == shardings[1]
            results |= {f"{name}/{key}": leaf for key, leaf in gathered(strategy, restored.state).items()}
            after, _ = step(restored.state)
            assert gathered(strategy, after)["drift"].tolist() == (gathered(strategy, state)["drift"] + 1).tolist()
        if count > 1:  # a checkpoint that a single process saved
            with Checkpointer(folder / f"{name}_1") as checkpointer:
                state = checkpointer.restore(
                    strategy, like=jax.eval_shape(functools.partial(strategy.init, make), jax.random.key(0))
                ).state
                results |= {f"of one process {name}/{key}": leaf for key, leaf in gathered(strategy, state).items()}
    return results


def restored_after_damage(folder):
    """Returns the restored step, where process 0 has truncated a file of step 3, and process 1 cannot read step 2."""
    strategy = jdist.MultiWorkerMirroredStrategy()
    with Checkpointer(folder, fallback=True) as checkpointer:
        for step in (1, 2, 3):
            checkpointer.save(step, strategy.put({"w": np.full((64, 64), step, np.float32)}), wait=True)
        if jax.process_index() == 0:
            files = [path for path in pathlib.Path(folder, "3/arrays").rglob("*") if path.is_file()]
            largest = max(files, key=lambda path: path.stat().st_size)
            largest.write_bytes(largest.read_bytes()[:100])
        multihost_utils.sync_global_devices("damaged")
        if jax.process_index() == 1:
            manifest.manifest_path = lambda folder, step: storage.manifest_path(folder, step if step != 2 else -1)
        restored = checkpointer.restore(strategy)
        manifest.manifest_path = storage.manifest_path
        assert checkpointer.latest == 1 and checkpointer.save(2, restored.state)
    return restored.step, int(restored.state["w"][0, 0])


def restored_from_a_store_that_stalls(folder):
    """Returns the errors of `restore` where the files of process 1 do not answer, and then the restored step."""
    strategy, folder, results = jdist.MultiWorkerMirroredStrategy(), pathlib.Path(folder), []
    with Checkpointer(folder / "0") as checkpointer:
        for step in (1, 2):
            checkpointer.save(step, strategy.put({"w": np.full((64, 64), step, np.float32)}), wait=True)
    if jax.process_index() == 0:
        shutil.copytree(folder / "0", folder / "1")
    multihost_utils.sync_global_devices("copied")
    own = folder / str(jax.process_index())
    with Checkpointer(own, fallback=True) as checkpointer:
        checkpointer.restore(strategy, step=1)
        for file in ("manifest/manifest.json", "arrays/_METADATA"):
            path = own / "2" / file
            content = path.read_bytes()
            if jax.process_index() == 1:
                os.environ["JDIST_WORK_SECONDS"] = "1"
                path.unlink()
                os.mkfifo(path)
            try:
                checkpointer.restore(strategy)
            except TimeoutError as error:
                results.append(str(error))
            if jax.process_index() == 1:
                del os.environ["JDIST_WORK_SECONDS"]
                os.close(os.open(path, os.O_WRONLY | os.O_NONBLOCK))  # ends the read
                path.unlink()
                path.write_bytes(content)
        results.append(checkpointer.restore(strategy).step)
    return results
