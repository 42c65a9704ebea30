"""Saving and restoring a training state, against orbax by hand and torch's distributed checkpoints (DCP).

    python benchmarks/checkpoint.py [--quick] [--json] [--devices 1]

The state is the training state of a case of `benchmarks/models.py` with AdamW: `large`, and with `--quick` `transformer`. Torch
has the same model in one process, and so has one copy of its state. Cases: `save` ends when the checkpoint is complete on the
disk, `save, returns` when training can continue (the arrays are copied, and are written in the background), `restore` when the
arrays are on the devices. Peers: `orbax` (`StandardCheckpointer`, which is asynchronous) and `torch DCP` (`save`, `async_save`,
`load`), with and without its `fsync` of each file. The restored arrays are checked to be equal to the saved ones.
"""

import pathlib
import shutil
import tempfile

import jax

import sidebyside

options = sidebyside.parser("Checkpoints of jdist against orbax by hand and torch DCP.")
options.add_argument("--devices", type=int, default=1, help="number of CPU devices, with a copy of the state each")
args = options.parse_args()
jax.config.update("jax_num_cpu_devices", args.devices)

import numpy as np
import orbax.checkpoint as ocp
from models import CASES

import jdist

_, MODEL, OPTIMIZER, BATCH = CASES["transformer" if args.quick else "large"]
FOLDER = pathlib.Path(tempfile.mkdtemp())
STRATEGY = jdist.MirroredStrategy()


class Candidate:
    """Saves a state and restores it. `save` returns when training can continue, `wait` when the checkpoint is complete."""

    def open(self, path):
        pass

    def save_and_wait(self, path):
        self.save(path)
        self.wait()

    def clear(self):
        pass

    def close(self):
        pass


class Jdist(Candidate):
    def __init__(self, state):
        self.state = state

    def open(self, path):
        self.checkpointer = jdist.Checkpointer(path)
        self.checkpointer.save(0, self.state, wait=True)  # a training run saves many times

    def save(self, path):
        self.checkpointer.save(1, self.state)

    def wait(self):
        self.checkpointer.wait()

    def restore(self, path):
        return jax.block_until_ready(self.checkpointer.restore(STRATEGY, like=self.state).state)

    def close(self):
        self.checkpointer.close()


class Orbax(Candidate):
    def __init__(self, state):
        self.state = state
        self.checkpointer = ocp.StandardCheckpointer()

    def save(self, path):
        self.checkpointer.save(path, self.state)

    def wait(self):
        self.checkpointer.wait_until_finished()

    def restore(self, path):
        described = jax.tree.map(ocp.utils.to_shape_dtype_struct, self.state)
        return jax.block_until_ready(self.checkpointer.restore(path, described))


class DCP(Candidate):
    def __init__(self, flushes):
        import torch
        import torch_models
        from torch.distributed import checkpoint
        from torch.distributed.checkpoint import state_dict

        self.dcp, self.state_dict, self.flushes = checkpoint, state_dict, flushes
        self.model = torch_models.torch_model(MODEL, BATCH[0].shape)
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        for parameter in self.model.parameters():
            parameter.grad = torch.ones_like(parameter)
        self.optimizer.step()  # creates the moments
        self.future = None

    @property
    def state(self):
        model, optimizer = self.state_dict.get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer}

    def save(self, path):
        writer = self.dcp.FileSystemWriter(path, sync_files=self.flushes)
        self.future = self.dcp.async_save(self.state, storage_writer=writer)

    def save_and_wait(self, path):
        self.dcp.save(self.state, storage_writer=self.dcp.FileSystemWriter(path, sync_files=self.flushes), no_dist=True)

    def wait(self):
        self.future.result()

    def clear(self):  # it restores in place
        for leaf in jax.tree.leaves(self.state):
            if hasattr(leaf, "zero_"):
                leaf.zero_()

    def restore(self, path):
        state = self.state
        self.dcp.load(state, storage_reader=self.dcp.FileSystemReader(path), no_dist=True)
        self.state_dict.set_state_dict(
            self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
        )
        return state


def measured(candidate, case):
    """Returns a function that measures a case, each time in a new folder."""

    def measure():
        path = pathlib.Path(tempfile.mkdtemp(dir=FOLDER), "checkpoint")
        candidate.open(path)
        if case == "save":
            taken = sidebyside.seconds(lambda: candidate.save_and_wait(path))
        else:
            taken = sidebyside.seconds(lambda: candidate.save(path))
            candidate.wait()
        if case == "restore":
            saved, restored = leaves(candidate.state), []
            candidate.clear()
            taken = sidebyside.seconds(lambda: restored.append(candidate.restore(path)))
            jax.tree.map(np.testing.assert_array_equal, saved, leaves(restored[0]))
        candidate.close()
        shutil.rmtree(path.parent)
        return taken

    return measure


def leaves(tree):
    return [np.array(leaf) for leaf in jax.tree.leaves(tree) if hasattr(leaf, "shape")]


def main():
    sidebyside.versions(args.json)

    def make_state():
        params = MODEL.init(jax.random.key(0), BATCH[0][:1])
        return params, OPTIMIZER.init(params)

    state = STRATEGY.init(make_state)
    candidates = {"jdist": Jdist(state), "orbax": Orbax(state)}
    if sidebyside.has("torch", args.json):
        import torch.distributed

        torch.distributed.init_process_group("gloo", init_method=f"file://{FOLDER}/store", rank=0, world_size=1)
        candidates |= {"torch DCP": DCP(flushes=True), "torch DCP, no fsync": DCP(flushes=False)}
    for case in ("save", "save, returns", "restore"):
        timed = {name: measured(candidate, case) for name, candidate in candidates.items()}
        sidebyside.report(case, sidebyside.rounds(timed, args.rounds or (3 if args.quick else 9)), args.json)
    shutil.rmtree(FOLDER)


if __name__ == "__main__":
    main()
