"""Training steps of several processes with one CPU device each, against hand-written JAX, torch and TensorFlow.

    python benchmarks/multi_process.py [--quick] [--json] [--processes 2 4] [--case mlp]

Cases: `mlp`, `cnn` and `large` (a transformer of 10.7 million parameters) of `benchmarks/models.py`, with AdamW; the batch of a
case is divided over the processes. Peers: `shard_map` (hand-written, all gradients in one all-reduce), `jit` (hand-written with
`NamedSharding`; XLA inserts the all-reduces), `torch DDP` over gloo, with AdamW as a loop and fused, and `TensorFlow`: its
`MultiWorkerMirroredStrategy` over gRPC, without and with XLA. The losses of the first steps of the JAX candidates are checked
to be equal. `jdist` is `MultiWorkerMirroredStrategy` with its defaults.

`--variants` adds jdist with large leaves reduced separately, with a reduce-scatter and an all-gather, and with bfloat16
messages; `shard_map` with buckets of leaves, and with one packed buffer in chunks, one all-reduce each; and the steps without
any reduction (`alone`, `torch alone`), a bound for every reduction.

`sum` measures an all-reduce alone, of 0.04, 4 and 43 MB (the gradients of `mlp` and of `large`): `psum` (hand-written), `torch`
(its all-reduce over gloo), and `TCP`: loopback sockets that move the bytes of a ring all-reduce without any addition.

The processes run all candidates in the same order. Each process has as many threads as `jdist run` sets: the cores divided by
the processes. Rows of libraries that are not installed are skipped.
"""

import argparse
import functools
import importlib.util
import os
import pathlib
import random
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time

import sidebyside

options = sidebyside.parser("Training steps of several processes against hand-written JAX, torch DDP and TensorFlow.")
options.add_argument("--processes", type=int, nargs="+", help="numbers of processes (default: 2 and 4, with --quick 2)")
options.add_argument("--case", choices=["mlp", "cnn", "large", "sum"], help="run only this case")
options.add_argument("--variants", action="store_true", help="also other reductions, and none")
options.add_argument("--floats", type=int, nargs="+", default=[10_000, 1_000_000, 10_700_000], help="sizes of `sum`")
options.add_argument("--folder", help=argparse.SUPPRESS)  # set for the processes: where they exchange addresses
args = options.parse_args()


def start(count):
    """Runs this script in `count` processes, and prints the output of process 0."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "jdist", "run", "-n", str(count), __file__, *sys.argv[1:], "--folder", folder]
        environment = {**os.environ, "JAX_PLATFORMS": "cpu", "GLOO_SOCKET_IFNAME": "lo", "JAX_NUM_CPU_DEVICES": "1"}
        with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as launcher:
            try:
                for line in launcher.stdout:
                    if line.startswith("[0] ") and "[Gloo]" not in line:
                        print(line.removeprefix("[0] "), end="", flush=True)
            except BaseException:  # SIGTERM or Ctrl-C: the processes end with the launcher, and would ignore SIGTERM
                launcher.kill()
                raise
    if launcher.returncode:
        sys.exit(launcher.returncode)


if args.folder is None:
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    for count in args.processes or ([2] if args.quick else [2, 4]):
        start(count)
    sys.exit()

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.flatten_util import ravel_pytree
from jax.sharding import NamedSharding, PartitionSpec
from models import CASES, packed_mean, train_step

import jdist

STRATEGY = jdist.MultiWorkerMirroredStrategy()
COUNT, PROCESS = jax.process_count(), jax.process_index()
MESH = sidebyside.mesh_of(jax.devices())
SHARDED, REPLICATED = NamedSharding(MESH, PartitionSpec("replica")), NamedSharding(MESH, PartitionSpec())
ROUNDS = args.rounds or (3 if args.quick else 21)
HAS_TORCH, HAS_TENSORFLOW = (importlib.util.find_spec(name) is not None for name in ("torch", "tensorflow"))
if HAS_TORCH:
    import torch_models
if HAS_TENSORFLOW:
    import tensorflow_models


class Loop:
    """Runs steps sequentially; the state continues from call to call."""

    def __init__(self, step, state, batch):
        self.step, self.state, self.batch = step, state, batch

    def losses(self, steps):
        losses = []
        for _ in range(steps):
            self.state, loss = self.step(self.state, self.batch)
            losses.append(loss.block_until_ready())
        jax.block_until_ready(self.state)
        return np.hstack([loss.addressable_data(0) for loss in losses])


def replicated(tree):
    return jax.tree.map(lambda x: jax.make_array_from_process_local_data(REPLICATED, np.array(x)), tree)


def mean_of_replicas(tree):
    return jdist.all_reduce("mean", tree)


def narrow_mean(tree):
    """Averages with gradients sent as bfloat16."""
    loss, grads = tree
    narrow = jdist.all_reduce("mean", jax.tree.map(lambda x: x.astype(jnp.bfloat16), grads))
    return jdist.all_reduce("mean", loss), jax.tree.map(lambda x: x.astype(jnp.float32), narrow)


def bucket_mean(size, tree):
    """Averages with one all-reduce per bucket of about `size` bytes, the last leaves first."""
    leaves, treedef = jax.tree.flatten(tree)
    buckets, full = [], True
    for leaf in reversed(leaves):
        if full:
            buckets.append([])
        buckets[-1].append(leaf)
        full = sum(leaf.nbytes for leaf in buckets[-1]) >= size
    reduced = [leaf for bucket in buckets for leaf in packed_mean(bucket)]
    return jax.tree.unflatten(treedef, reduced[::-1])


def chunked_mean(size, tree):
    """Packs all leaves, and averages with one all-reduce per `size` bytes."""
    flat, unpacked = ravel_pytree(tree)
    chunks = jnp.split(flat, list(range(size // 4, flat.size, size // 4)))
    return unpacked(jnp.concatenate([lax.pmean(chunk, "replica") for chunk in chunks]))


def candidates(model, optimizer, batch):
    params = model.init(jax.random.key(0), batch[0][:1])
    state = (params, optimizer.init(params))
    size = len(batch[1]) // COUNT
    local = tuple(part[PROCESS * size : (PROCESS + 1) * size] for part in batch)
    placed = jax.tree.map(lambda x: jax.make_array_from_process_local_data(SHARDED, x), local)
    make = lambda mean: functools.partial(train_step, model, optimizer, mean)
    specs = {"in_specs": (PartitionSpec(), PartitionSpec("replica")), "out_specs": PartitionSpec()}
    by_hand = lambda mean: Loop(
        jax.jit(jax.shard_map(make(mean), mesh=MESH, **specs, check_vma=False), donate_argnums=0),
        replicated(state),
        placed,
    )

    def ours(mean=mean_of_replicas, **arguments):
        strategy = jdist.MultiWorkerMirroredStrategy(**arguments) if arguments else STRATEGY
        (split,) = strategy.distribute_dataset(batch, len(batch[1]))
        return Loop(strategy.step(make(mean)), strategy.put(state), split)

    loops = {
        "jdist": ours(),
        "shard_map": by_hand(packed_mean),
        "jit": Loop(jax.jit(make(lambda tree: tree), donate_argnums=0), replicated(state), placed),
    }
    if args.variants:
        packs = jdist.CommunicationOptions(bytes_per_pack=2**20)
        scattered = jdist.AllReduce(bytes_to_scatter=2**16)
        loops |= {
            "packs < 1 MiB": ours(communication_options=packs),
            "scattered": ours(cross_device_ops=scattered),
            "bf16": ours(narrow_mean),
            "buckets, 1 MiB": by_hand(functools.partial(bucket_mean, 2**20)),
            "buckets, 4 MiB": by_hand(functools.partial(bucket_mean, 2**22)),
            "chunks, 4 MiB": by_hand(functools.partial(chunked_mean, 2**22)),
            "alone": by_hand(lambda tree: tree),
        }
    if HAS_TORCH:
        loops["torch DDP"] = torch_models.DDPLoop(model, local, fused=False)
        loops["torch DDP, fused"] = torch_models.DDPLoop(model, local, fused=True)
        if args.variants:
            loops["torch alone"] = torch_models.DDPLoop(model, local, fused=True, reduces=False)
    if HAS_TENSORFLOW:
        loops["TensorFlow"] = tensorflow_models.StrategyLoop(model, local, compiles=False)
        loops["TensorFlow, XLA"] = tensorflow_models.StrategyLoop(model, local, compiles=True)
    return loops


def compare(name, steps, model, optimizer, batch):
    loops = candidates(model, optimizer, batch)
    first = loops["jdist"].losses(5)
    for peer, loop in loops.items():
        if peer not in ("jdist", "alone") and isinstance(loop, Loop):
            # The training of `large` amplifies differences, so only the first losses of bf16 are close.
            equal = 2 if peer == "bf16" else 5
            np.testing.assert_allclose(first[:equal], loop.losses(5)[:equal], rtol=1e-2 if peer == "bf16" else 1e-3)
    measure(name, {peer: functools.partial(loop.losses, steps) for peer, loop in loops.items()}, steps)


def compare_sum(size):
    """Compares the all-reduce of `size` floats alone."""

    def by_hand(mean):
        specs = {"in_specs": PartitionSpec(), "out_specs": PartitionSpec(), "check_vma": False}
        step = jax.jit(jax.shard_map(mean, mesh=MESH, **specs), donate_argnums=0)
        return summed(step, replicated(np.zeros(size, np.float32)))

    step = STRATEGY.step(lambda x: (jdist.all_reduce("mean", x), None))
    works = {
        "jdist": summed(lambda x: step(x)[0], STRATEGY.put(jnp.zeros(size))),
        "psum": by_hand(lambda x: lax.pmean(x, "replica")),
    }
    if args.variants:
        works |= {
            "chunks, 1 MiB": by_hand(functools.partial(chunked_mean, 2**20)),
            "chunks, 4 MiB": by_hand(functools.partial(chunked_mean, 2**22)),
            "scattered": by_hand(
                lambda x: lax.all_gather(lax.psum_scatter(x, "replica", tiled=True) / COUNT, "replica", tiled=True)
            ),
            "copy": by_hand(lambda x: x * 0.5),
        }
    if HAS_TORCH:
        works["torch"] = torch_models.all_reduce(size)
    works["TCP"] = ring(4 * size)
    steps = max(3, min(50, 20_000_000 // size))
    measure(f"sum of {4 * size / 1e6:.2g} MB", {peer: repeated(work, steps) for peer, work in works.items()}, steps)


def summed(step, x):
    values = [x]

    def work():
        values[0] = step(values[0]).block_until_ready()

    return work


def repeated(work, steps):
    return lambda: [work() for _ in range(steps)]


@functools.cache
def neighbours():
    """Returns sockets to the next process and from the previous one."""
    address = lambda process: pathlib.Path(args.folder, f"tcp{process}")
    with socket.create_server(("127.0.0.1", 0)) as server:
        address(PROCESS).with_suffix(".new").write_text(str(server.getsockname()[1]))
        address(PROCESS).with_suffix(".new").rename(address(PROCESS))
        while not address((PROCESS + 1) % COUNT).exists():
            time.sleep(0.01)
        following = socket.create_connection(("127.0.0.1", int(address((PROCESS + 1) % COUNT).read_text())))
        previous, _ = server.accept()
    for one in (following, previous):
        one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return following, previous


def ring(size):
    """Returns a function that sends and receives the bytes of a ring all-reduce of `size` bytes, in its 2 (N - 1) messages."""
    following, previous = neighbours()
    outgoing, incoming = bytearray(size // COUNT), bytearray(size // COUNT)

    def receive():
        view = memoryview(incoming)
        while view:
            view = view[previous.recv_into(view) :]

    def work():
        for _ in range(2 * (COUNT - 1)):
            sender = threading.Thread(target=following.sendall, args=(outgoing,))
            sender.start()
            receive()
            sender.join()

    return work


def measure(name, works, steps):
    timed = {peer: functools.partial(sidebyside.seconds, work) for peer, work in works.items()}
    taken = sidebyside.rounds(timed, ROUNDS, order=random.Random(0))
    if PROCESS == 0:
        sidebyside.report(f"{name}, {COUNT} processes", taken, args.json, steps)


def main():
    if PROCESS == 0:
        sidebyside.versions(args.json)
        for library in ("torch", "tensorflow"):
            sidebyside.has(library, args.json)
    if HAS_TORCH:
        torch_models.join(args.folder, PROCESS, COUNT)
    if HAS_TENSORFLOW and args.case != "sum":
        tensorflow_models.join(args.folder, PROCESS, COUNT)
    for name in ("mlp", "cnn", "large"):
        steps, *case = CASES[name]
        if args.case in (None, name):
            compare(name, steps, *case)
    if args.case in (None, "sum"):
        for size in args.floats:
            compare_sum(size)


if __name__ == "__main__":
    main()
