"""The time from a failure to the next training step under `jdist run --max-restarts`, and its parts.

    python benchmarks/recovery.py [--quick] [--json] [--case raise|kill|stop] [--model transformer] [--processes 2]

Two processes train a model of `benchmarks/models.py` with `MultiWorkerMirroredStrategy`, and save a checkpoint after two
steps. After the third step, process 1 raises an error, is killed (SIGKILL), or is stopped (SIGSTOP). The parts:

- `detect`: until the launcher reports the failure. For a stopped process this is `--answer-timeout`, 5 seconds here.
- `end`: until all processes have ended.
- `import`: the start of the processes, and their imports.
- `join`: until the processes have joined.
- `restore`: the model, the data and the checkpoint.
- `compile`: the first step, without the time of the second: tracing, and compilation or reading the compilation cache.
- `step`: the second step.

`jdist` uses the compilation cache that `jdist run` creates for the restarts; the peer `no cache` compiles again. The peer
`torchrun` trains the same model with DDP over gloo, under `torchrun --max-restarts 1`, and saves with `torch.save`; its `end`
includes `detect`. It has no row for `stop`, which torchrun does not detect.
"""

import argparse
import atexit
import datetime
import itertools
import json
import os
import pathlib
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time

import sidebyside

START = time.time()
PARTS = ("detect", "end", "import", "join", "restore", "compile", "step")
FAULTS = ("raise", "kill", "stop")
options = sidebyside.parser("The time from a failure to the next step, with and without the compilation cache.")
options.add_argument("--case", choices=FAULTS, help="run only this failure")
options.add_argument("--model", help="a case of benchmarks/models.py (default: transformer, with --quick mlp)")
options.add_argument("--processes", type=int, default=2, help="number of processes")
options.add_argument("--folder", help=argparse.SUPPRESS)  # set for the processes: checkpoints and times
options.add_argument("--torch", action="store_true", help=argparse.SUPPRESS)  # set for the processes of torchrun
args = options.parse_args()
args.model = args.model or ("mlp" if args.quick else "transformer")


def train():
    """Trains, and fails in the first attempt. Process 0 of the second attempt writes the times of its events."""
    import jax
    from models import CASES, train_step

    import jdist

    restarts, process = int(os.environ["JDIST_RESTARTS"]), int(os.environ["JDIST_PROCESS_ID"])
    is_noted = process == 0 and restarts == 1
    events = [("import", time.time())]
    strategy = jdist.MultiWorkerMirroredStrategy()
    events.append(("join", time.time()))
    _, model, optimizer, batch = CASES[args.model]
    (placed,) = strategy.distribute_dataset(batch, len(batch[1]))
    step = strategy.step(
        lambda state, batch: train_step(model, optimizer, lambda tree: jdist.all_reduce("mean", tree), state, batch)
    )
    with jdist.Checkpointer(pathlib.Path(args.folder, "checkpoints"), every=2) as checkpointer:
        params = model.init(jax.random.key(0), batch[0][:1])
        state = strategy.put((params, optimizer.init(params)))
        if checkpointer.latest is not None:
            state = checkpointer.restore(strategy, like=state).state
        events.append(("restore", time.time()))
        for number in range(3):
            state, loss = step(state, placed)
            jax.block_until_ready((state, loss))
            events.append((("first", "second", "third")[number], time.time()))
            if restarts == 0 and number == 1:
                checkpointer.save(2, state)
                checkpointer.wait()
        if restarts == 0:
            fail(process)
    if is_noted:
        pathlib.Path(args.folder, "events").write_text(json.dumps(dict(events)))


def train_with_torch():
    """The same with DDP under torchrun."""
    import torch
    import torch_models
    from models import CASES

    restarts, process = int(os.environ["TORCHELASTIC_RESTART_COUNT"]), int(os.environ["RANK"])
    events = [("end", START), ("import", time.time())]
    torch.distributed.init_process_group("gloo", timeout=datetime.timedelta(seconds=60))
    atexit.register(torch.distributed.destroy_process_group)  # or a process may abort at its exit
    events.append(("join", time.time()))
    _, model, _, batch = CASES[args.model]
    size, path = len(batch[1]) // args.processes, pathlib.Path(args.folder, "checkpoint.pt")
    loop = torch_models.DDPLoop(model, tuple(part[process * size : (process + 1) * size] for part in batch), fused=True)
    if path.exists():
        saved = torch.load(path)
        loop.model.load_state_dict(saved["model"])
        loop.optimizer.load_state_dict(saved["optimizer"])
    events.append(("restore", time.time()))
    for number in range(3):
        loop.losses(1)
        events.append((("first", "second", "third")[number], time.time()))
        if restarts == 0 and number == 1:
            if process == 0:
                torch.save({"model": loop.model.state_dict(), "optimizer": loop.optimizer.state_dict()}, path)
            torch.distributed.barrier()
    if restarts == 0:
        fail(process, torch.distributed.barrier)
    elif process == 0:
        pathlib.Path(args.folder, "events").write_text(json.dumps(dict(events)))


def wait_for_others():
    from jax.experimental import multihost_utils

    multihost_utils.sync_global_devices("after the failure")


def fail(process, wait=wait_for_others):
    """Process 1 fails, the others wait for it in a collective."""
    if process == 1:
        pathlib.Path(args.folder, "fault").write_text(json.dumps([os.environ["JDIST_FAULT"], time.time()]))
        if os.environ["JDIST_FAULT"] == "raise":
            raise ValueError("The failure of the benchmark.")
        os.kill(os.getpid(), signal.SIGKILL if os.environ["JDIST_FAULT"] == "kill" else signal.SIGSTOP)
    wait()


LAUNCHERS = {
    "jdist": ["-m", "jdist", "run", "--max-restarts", "1", "-n"],
    "torchrun": ["-m", "torch.distributed.run", "--standalone", "--max-restarts=1", "--nproc-per-node"],
}


def recovery(fault, launcher, uses_cache=True):
    """Returns the seconds of each part."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, *LAUNCHERS[launcher], str(args.processes), __file__, "--model", args.model]
        if fault == "stop":
            command[4:4] = ["--answer-timeout", "5"]
        command += ["--processes", str(args.processes), "--folder", folder, *["--torch"] * (launcher == "torchrun")]
        environment = {name: value for name, value in os.environ.items() if name != "JAX_COMPILATION_CACHE_DIR"}
        environment |= {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "1", "JDIST_FAULT": fault}
        if launcher == "torchrun":
            # With the store that its agents share, torch 2.13 connects the new processes to addresses of those before.
            environment |= {
                "GLOO_SOCKET_IFNAME": "lo",
                "OMP_NUM_THREADS": "1",
                "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
            }
        environment["JAX_ENABLE_COMPILATION_CACHE"] = str(int(uses_cache))
        times, lines = {}, []
        with subprocess.Popen(
            command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
        ) as launcher:
            for line in launcher.stderr:
                lines.append(line)
                if re.match(r"jdist run: process \d+ failed: ", line):  # process 0 may report its lost connection first
                    times.setdefault("detect", time.time())
                elif line.startswith("jdist run: restart 1 of 1"):
                    times["end"] = time.time()
        if launcher.returncode:
            sys.exit("".join(lines))
        _, failed = json.loads(pathlib.Path(folder, "fault").read_text())
        times |= json.loads(pathlib.Path(folder, "events").read_text())
    step = times["second"] - times["first"]
    times["compile"] = times["first"] - step
    times["step"] = times["first"]
    times["start"], names = failed, ["start", *(part for part in PARTS if part in times)]
    return {part: times[part] - times[before] for before, part in itertools.pairwise(names)}


def report(fault, taken):
    """Prints the median of each part, and the ratios of the total times."""
    case = f"{fault}, {args.processes} processes"
    medians = {
        name: {part: statistics.median(one[part] for one in runs) for part in runs[0]} for name, runs in taken.items()
    }
    totals = {name: [sum(one.values()) for one in runs] for name, runs in taken.items()}
    for name, parts in medians.items():
        parts["total"] = statistics.median(totals[name])
        if not args.json:
            print(
                f"{case:20} {name:9}",
                "  ".join(f"{part} {seconds:5.2f}" for part, seconds in parts.items()),
                flush=True,
            )
    for peer in list(taken)[1:]:
        ratios = [other / ours for ours, other in zip(totals["jdist"], totals[peer], strict=True)]
        low, ratio, high = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else 3 * ratios
        row = {"case": case, "peer": peer, "ratio": ratio, "low": low, "high": high, "rounds": len(ratios)}
        if args.json:
            print(json.dumps({**row, "seconds": medians}), flush=True)
        else:
            print(f"{case:20} ratio to {peer} {ratio:.2f} [{low:.2f}, {high:.2f}]", flush=True)


def main():
    sidebyside.versions(args.json)
    has_torch, rounds = sidebyside.has("torch", args.json), args.rounds or (1 if args.quick else 5)
    for fault in FAULTS:
        if args.case in (None, fault):
            candidates = {"jdist": ("jdist", True), "no cache": ("jdist", False)}
            if has_torch and fault != "stop":
                candidates["torchrun"] = ("torchrun",)
            taken = {name: [] for name in candidates}
            for _ in range(rounds):
                for name, arguments in candidates.items():
                    taken[name].append(recovery(fault, *arguments))
            report(fault, taken)


if __name__ == "__main__":
    (train_with_torch if args.torch else train)() if args.folder else main()
