"""Checkpoints, exports and weights are never unpickled: a pickle in place of any of their files does not run."""

import contextlib
import hashlib
import json
import os
import pathlib
import pickle
import shutil

import numpy as np

import jdist

STATE = {"w": np.arange(8, dtype=np.float32)}


class MakesFolder:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def save_checkpoint(folder):
    strategy = jdist.OneDeviceStrategy("cpu:0")
    with jdist.Checkpointer(folder) as checkpointer:
        checkpointer.save(1, strategy.put(STATE), extra={"note": "text", "array": np.ones(3)}, wait=True)


def save_export(folder):
    jdist.export(folder, lambda state, x: x * state["w"], STATE, (np.zeros((1, 8), np.float32),))


def save_weights(folder):
    folder.mkdir()
    jdist.weights.save(folder / "w.safetensors", STATE)


def load_export(folder):
    manifest = folder / "manifest.json"
    with contextlib.suppress(ValueError):  # an attacker writes the fingerprint, too
        contents = json.loads(manifest.read_text())
        contents["function"]["sha256"] = hashlib.sha256((folder / "function.bin").read_bytes()).hexdigest()
        manifest.write_text(json.dumps(contents))
    return jdist.load(folder).state


KINDS = {
    "checkpoint": (
        save_checkpoint,
        lambda folder: jdist.Checkpointer(folder).restore(jdist.OneDeviceStrategy("cpu:0")).state,
    ),
    "export": (save_export, load_export),
    "weights": (save_weights, lambda folder: jdist.weights.load(folder / "w.safetensors")),
}


def test_pickle_in_place_of_a_file_does_not_run(tmp_path):
    trap = tmp_path / "unpickled"
    payload = pickle.dumps(MakesFolder(trap))
    pickle.loads(payload)
    assert trap.is_dir()  # the payload works
    trap.rmdir()
    num_files = {}
    for kind, (save, load) in KINDS.items():
        save(tmp_path / kind)
        np.testing.assert_array_equal(load(tmp_path / kind)["w"], STATE["w"])
        files = sorted(path.relative_to(tmp_path / kind) for path in (tmp_path / kind).rglob("*") if path.is_file())
        num_files[kind] = len(files)
        for file in files:
            copy = tmp_path / "copy"
            shutil.copytree(tmp_path / kind, copy)
            pathlib.Path(copy, file).write_bytes(payload)
            with contextlib.suppress(Exception):  # some files are not read by this load
                load(copy)
            assert not trap.exists(), f"{kind}: {file} was unpickled"
            shutil.rmtree(copy)
    assert num_files["weights"] == 1 and num_files["export"] == 3 and num_files["checkpoint"] > 3, num_files
