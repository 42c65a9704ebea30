"""The time from the start of a program to the result of its first training step, against the number of replicas.

    python benchmarks/first_step.py [--quick] [--json] [--devices 1 8] [--processes 2 4] [--model transformer]

Each measurement starts fresh processes: interpreter, imports, devices or processes that join, model, state, tracing,
compilation (no compilation cache), one step. The model is a case of `benchmarks/models.py` with AdamW. Peers on several devices
of one process: `shard_map` (hand-written JAX), `Keras on JAX` (`model.fit` with `DataParallel`) and `TensorFlow`
(`MirroredStrategy`). Peers on several processes: `shard_map` (started by `jdist run` too), `torchrun` (DDP over gloo) and
`TensorFlow` (`MultiWorkerMirroredStrategy`).
"""

import argparse
import atexit
import functools
import os
import pathlib
import subprocess
import sys
import tempfile
import time

import sidebyside

options = sidebyside.parser("The time from the start of a program to the result of its first training step.")
options.add_argument(
    "--devices", type=int, nargs="*", help="numbers of devices (default: 1, 2, 4 and 8; with --quick 2 and 8)"
)
options.add_argument("--processes", type=int, nargs="*", help="numbers of processes (default: 2 and 4)")
options.add_argument("--model", default="mlp", help="a case of benchmarks/models.py")
options.add_argument("--role", help=argparse.SUPPRESS)  # set for the measured programs
options.add_argument("--count", type=int, help=argparse.SUPPRESS)
options.add_argument("--process", type=int, default=0, help=argparse.SUPPRESS)
options.add_argument("--folder", help=argparse.SUPPRESS)
args = options.parse_args()


# ---- The measured programs: each returns the loss of its first step


def case():
    from models import CASES

    return CASES[args.model][1:]


def with_jax(is_jdist, has_processes):
    import jax

    if not has_processes:
        jax.config.update("jax_num_cpu_devices", args.count)
    elif not is_jdist:
        address, count, process = (
            os.environ[f"JDIST_{name}"] for name in ("COORDINATOR_ADDRESS", "NUM_PROCESSES", "PROCESS_ID")
        )
        jax.distributed.initialize(address, int(count), int(process))
    from models import packed_mean, train_step

    model, optimizer, batch = case()

    def make_state():
        params = model.init(jax.random.key(0), batch[0][:1])
        return params, optimizer.init(params)

    if is_jdist:
        import jdist

        strategy = jdist.MultiWorkerMirroredStrategy() if has_processes else jdist.MirroredStrategy()
        mean = functools.partial(jdist.all_reduce, "mean")
        (placed,) = strategy.distribute_dataset(batch, len(batch[1]))
        step, state = strategy.step(functools.partial(train_step, model, optimizer, mean)), strategy.init(make_state)
    else:
        import numpy as np
        from jax.sharding import NamedSharding, PartitionSpec

        mesh = sidebyside.mesh_of(jax.devices())
        rows, whole = PartitionSpec("replica"), PartitionSpec()
        body = functools.partial(train_step, model, optimizer, packed_mean)
        over_mesh = jax.shard_map(body, mesh=mesh, in_specs=(whole, rows), out_specs=whole, check_vma=False)
        step = jax.jit(over_mesh, donate_argnums=0)
        state = jax.jit(make_state, out_shardings=NamedSharding(mesh, whole))()
        local = (np.split(part, jax.process_count())[jax.process_index()] for part in batch)
        placed = tuple(jax.make_array_from_process_local_data(NamedSharding(mesh, rows), part) for part in local)
    _, loss = step(state, placed)
    return float(loss), jax.process_index()


def with_keras():
    os.environ["KERAS_BACKEND"] = "jax"
    import jax

    jax.config.update("jax_num_cpu_devices", args.count)
    from keras_models import Fit

    model, _, batch = case()
    return Fit(model, batch, len(batch[1]), jax.devices(), None).losses()[0], 0


def with_tensorflow(has_processes):
    import tensorflow_models
    from tensorflow_models import tf

    model, _, batch = case()
    if has_processes:
        tensorflow_models.join(args.folder, args.process, args.count)
        batch = tuple(part[: len(part) // args.count] for part in batch)
    else:
        tensorflow_models.logical_devices(args.count)
        names = [f"CPU:{index}" for index in range(args.count)]
        tf.distribute.experimental_set_strategy(tf.distribute.MirroredStrategy(names))
    return tensorflow_models.StrategyLoop(model, batch, compiles=False).losses(1)[0], args.process


def with_torch():
    import torch.distributed
    import torch_models

    torch.distributed.init_process_group("gloo")  # from the variables of torchrun
    atexit.register(torch.distributed.destroy_process_group)  # or a process may abort at its exit
    model, _, batch = case()
    batch = tuple(part[: len(part) // torch.distributed.get_world_size()] for part in batch)
    return torch_models.DDPLoop(model, batch, fused=True).losses(1)[0], torch.distributed.get_rank()


ROLES = {
    "jdist": functools.partial(with_jax, True),
    "shard_map": functools.partial(with_jax, False),
    "Keras on JAX": lambda has_processes: with_keras(),
    "TensorFlow": with_tensorflow,
    "torchrun": lambda has_processes: with_torch(),
}


# ---- The measurement


def commands(role, unit, count, folder):
    """Returns the commands that start a measured program: one, or one per process."""
    words = [__file__, "--model", args.model, "--role", role, "--count", str(count), "--folder", folder]
    if unit == "devices":
        return [[sys.executable, *words]]
    words += ["--processes", str(count)]
    if role == "TensorFlow":
        return [[sys.executable, *words, "--process", str(index)] for index in range(count)]
    if role == "torchrun":
        return [[sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={count}", *words]]
    return [[sys.executable, "-m", "jdist", "run", "-n", str(count), *words]]


def first_step(role, unit, count):
    """Returns the seconds until process 0 has the loss of the first step."""
    threads = max(1, len(os.sched_getaffinity(0)) // count) if unit == "processes" else 0  # as `jdist run`
    environment = {name: value for name, value in os.environ.items() if name != "JAX_COMPILATION_CACHE_DIR"}
    environment |= {"JAX_PLATFORMS": "cpu", "GLOO_SOCKET_IFNAME": "lo", "TF_CPP_MIN_LOG_LEVEL": "3"}
    if unit == "processes":
        environment |= {"JAX_NUM_CPU_DEVICES": "1", "NPROC": str(threads), "OMP_NUM_THREADS": str(threads)}
    with tempfile.TemporaryDirectory() as folder:
        done, programs = pathlib.Path(folder, "done"), []
        pipes = {"env": environment, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}

        def work():
            programs.extend(subprocess.Popen(command, **pipes) for command in commands(role, unit, count, folder))
            while not done.exists() and not any(program.poll() for program in programs):
                time.sleep(0.002)

        taken = sidebyside.seconds(work)
        for program in programs:
            output, _ = program.communicate(timeout=60)
            if program.returncode:
                sys.exit(output.decode())
    return taken


def main():
    sidebyside.versions(args.json)
    peers = {"Keras on JAX": "keras", "TensorFlow": "tensorflow", "torchrun": "torch"}
    absent = [role for role, library in peers.items() if not sidebyside.has(library, args.json)]
    rounds = args.rounds or (2 if args.quick else 5)
    counts = {
        "devices": args.devices if args.devices is not None else [2, 8] if args.quick else [1, 2, 4, 8],
        "processes": args.processes if args.processes is not None else [2, 4],
    }
    roles = {
        "devices": ("jdist", "shard_map", "Keras on JAX", "TensorFlow"),
        "processes": ("jdist", "shard_map", "torchrun", "TensorFlow"),
    }
    for unit in counts:
        for count in counts[unit]:
            candidates = {
                role: functools.partial(first_step, role, unit, count) for role in roles[unit] if role not in absent
            }
            sidebyside.report(f"first step, {count} {unit}", sidebyside.rounds(candidates, rounds), args.json)


def program():
    """Runs a measured program, and reports its loss to the measurement."""
    loss, process = ROLES[args.role](args.processes is not None)
    if process == 0:
        pathlib.Path(args.folder, "done").write_text(f"{loss}\n")


if __name__ == "__main__":
    program() if args.role else main()
