"""The options of `jdist run`, and their checks."""

import argparse
import importlib.util
import os
import re
import socket
import sys
from typing import Any, NamedTuple

from jdist._src.launch.command import Command
from jdist._src.launch.end_rules import EndTimes
from jdist._src.launch.variables import visible_gpus

DEFAULT_MAX_RESTARTS = 10  # with --elastic
DEFAULT_GRACE_SECONDS = 5.0
RESTART_GRACE_SECONDS = 1.0  # a process with a handler of SIGTERM cannot save a checkpoint without the one that failed
DEFAULT_ANSWER_SECONDS = 60.0
DEFAULT_REJOIN_SECONDS = 30.0
DEFAULT_JOIN_SECONDS = 600.0


class Elastic(NamedTuple):
    """The value of `--elastic`: the smallest and the largest number of processes."""

    minimum: int
    maximum: int


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `jdist run`."""
    add = parser.add_argument
    number = parser.add_mutually_exclusive_group()
    number.add_argument(
        "-n",
        "--processes",
        type=_positive,
        metavar="N",
        help="processes on this machine, or with --engine ray on the cluster (default: one per GPU, or per D GPUs with "
        "--devices-per-process D; one without GPUs)",
    )
    number.add_argument(
        "--elastic",
        type=_elastic,
        metavar="MIN:MAX",
        help="in place of -n: from MIN to MAX processes. The job continues with fewer processes after a "
        "failure, and with more when they can run again, by a restart of all",
    )
    add(
        "--devices-per-process",
        type=_positive,
        metavar="D",
        help="CPU devices per process, and on a machine with GPUs the GPUs per process "
        "(default: one CPU device; the GPUs of the machine, divided by N)",
    )
    add("--nodes", type=_positive, metavar="M", help="machines; run the same command on each with its --node-rank")
    add("--node-rank", type=int, metavar="K", help="index of this machine, 0 to M-1")
    add(
        "--coordinator",
        type=_address,
        metavar="HOST:PORT",
        help="address of machine 0, and a free port there",
    )
    add(
        "--max-restarts",
        type=_number,
        metavar="N",
        help="after a failure, start all processes again, at most N times "
        f"(default: 0; with --elastic {DEFAULT_MAX_RESTARTS})",
    )
    add(
        "--answer-timeout",
        type=_positive_seconds,
        metavar="SECONDS",
        help="with restarts: a process that does not answer for this time is killed "
        f"(default: {DEFAULT_ANSWER_SECONDS:g})",
    )
    add(
        "--rejoin-after",
        type=_seconds,
        metavar="SECONDS",
        help="with --elastic: time after which a process is started again in place of one that failed, and on a node that "
        f"was added to the Ray cluster (default: {DEFAULT_REJOIN_SECONDS:g})",
    )
    add(
        "--join-timeout",
        type=_seconds,
        metavar="SECONDS",
        help="with restarts and --engine ray: time in which nodes must be added to the cluster, if too few are left "
        f"(default: {DEFAULT_JOIN_SECONDS:g})",
    )
    add(
        "--grace",
        type=_seconds,
        metavar="SECONDS",
        help="time between SIGTERM and SIGKILL for the other processes after a failure, and for all after a signal "
        f"(default: {DEFAULT_GRACE_SECONDS:g}; with restarts {RESTART_GRACE_SECONDS:g}; after a signal "
        f"{EndTimes().signal_seconds:g})",
    )
    add(
        "--engine",
        choices=("local", "ray"),
        default="local",
        help="where the processes are started: on this machine (default), or by actors of a running Ray cluster",
    )
    add("-m", "--module", action="store_true", help="the program is a module, as in `python -m`")
    for hint, names in _OTHER_LAUNCHERS.items():
        add(*names.split(), nargs="?", action=_OtherLauncher, const=hint, help=argparse.SUPPRESS)
    add("program", help="a Python script, or with -m a module")
    add("arguments", nargs=argparse.REMAINDER, metavar="...", help="arguments of the program")


# The line to write for options of torchrun, `accelerate launch` and mpirun.
_OTHER_LAUNCHERS = {
    "-n N, the number of processes on this machine": "-np --np --nproc --nproc-per-node --nproc_per_node --num-processes "
    "--num_processes",
    "--nodes M, the number of machines": "--nnodes --num-nodes --num_nodes --num_machines --num-machines",
    "--node-rank K, the index of this machine": "--node_rank --machine_rank --machine-rank",
    "--coordinator HOST:PORT, the address of machine 0": "--master-addr --master_addr --master-port --master_port "
    "--main_process_ip --main_process_port --rdzv-endpoint --rdzv_endpoint",
    "--devices-per-process D": "--gpus-per-node --gpus_per_node --num-gpus --num_gpus --gpus",
}


class _OtherLauncher(argparse.Action):
    """An option of another launcher: an error with the option to write."""

    def __call__(self, parser: argparse.ArgumentParser, namespace: Any, values: Any, option_string: Any = None) -> None:
        parser.error(f"{option_string} is an option of another launcher. Write {self.const}.")


def note_misplaced_number(arguments: argparse.Namespace) -> str:
    """Returns a line about `-n N` after the program, which is then an argument of the program; empty if there is none."""
    if arguments.processes is not None or arguments.elastic is not None:
        return ""
    pairs = zip(arguments.arguments, arguments.arguments[1:], strict=False)
    number = next((value for name, value in pairs if name in ("-n", "--processes") and value.isdigit()), None)
    if number is None:
        return ""
    return (
        f"jdist run: `-n {number}` after the program is an argument of {arguments.program}. To start {number} processes, write "
        f"`jdist run -n {number} {arguments.program}`."
    )


def has_restarts(arguments: argparse.Namespace) -> bool:
    """Whether the job may start again after a failure."""
    return arguments.max_restarts is not None or arguments.elastic is not None


def set_number_of_processes(arguments: argparse.Namespace) -> None:
    """Sets the default of `-n`: the processes for all GPUs of this machine, or one.

    Raises:
        ValueError: Ray places the processes.
    """
    if arguments.processes is not None or arguments.elastic is not None:
        return
    if arguments.engine == "ray":
        raise ValueError("--engine ray needs -n, the number of processes on the cluster.")
    gpus = visible_gpus(os.environ)
    arguments.processes = max(1, len(gpus) // (arguments.devices_per_process or 1))


def check_restarts(arguments: argparse.Namespace) -> None:
    """Raises ValueError for options that contradict each other, or have no effect."""
    requirements = {
        "--answer-timeout": (arguments.answer_timeout, has_restarts(arguments), "--max-restarts or --elastic"),
        "--rejoin-after": (arguments.rejoin_after, arguments.elastic is not None, "--elastic"),
        "--join-timeout": (
            arguments.join_timeout,
            has_restarts(arguments) and arguments.engine == "ray",
            "--engine ray, and --max-restarts or --elastic",
        ),
    }
    for option, (value, is_used, needed) in requirements.items():
        if value is not None and not is_used:
            raise ValueError(f"{option} has no effect without {needed}. Add {needed}, or remove {option}.")
    if has_restarts(arguments) and arguments.nodes is not None and arguments.nodes > 1:
        option = "--elastic" if arguments.elastic is not None else "--max-restarts"
        raise ValueError(
            f"{option} with --nodes {arguments.nodes}: the launchers of several machines do not restart each other's "
            "processes. Use a Ray cluster (--engine ray instead of --nodes, --node-rank and --coordinator), or remove "
            f"{option} and let the scheduler restart the job, as `sbatch --requeue` of Slurm or `failurePolicy.maxRestarts` of "
            "a Kubernetes JobSet."
        )


def check_program(command: Command) -> None:
    """Raises ValueError if the program does not exist."""
    if command.kind == "script":
        if os.path.isfile(command.target):
            return
        advice = "Pass the path of a Python script, without `python`, or a module after `-m`."
        raise ValueError(f"{command.target!r} is not a file in {os.getcwd()}. {advice}")
    name = command.target.partition(".")[0]
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # as in the processes
    if not re.fullmatch(r"\w+(\.\w+)*", command.target) or importlib.util.find_spec(name) is None:
        raise ValueError(
            f"the module {command.target!r} is not found. Pass its name without `.py`, or a script without `-m`."
        )


def check_nodes(arguments: argparse.Namespace) -> None:
    """Raises ValueError if the options for several machines are incomplete, or the coordinator's port is in use."""
    options = {
        "--nodes": arguments.nodes,
        "--node-rank": arguments.node_rank,
        "--coordinator": arguments.coordinator,
    }
    if missing := [name for name, value in options.items() if value is None]:
        if len(missing) < len(options):
            present = ", ".join(name for name in options if name not in missing)
            raise ValueError(
                f"{present} without {' and '.join(missing)}. Pass all of --nodes, --node-rank and --coordinator to start "
                "processes on several machines, or none of them for this machine only."
            )
        return
    if not 0 <= arguments.node_rank < arguments.nodes:
        raise ValueError(
            f"--node-rank must be 0 to {arguments.nodes - 1} for --nodes {arguments.nodes}, got {arguments.node_rank}."
        )
    if arguments.node_rank == 0:
        _check_port(arguments.coordinator)


def _check_port(address: str) -> None:
    """Raises ValueError if process 0, on this machine, cannot listen on the port of `address`."""
    port = int(address.rpartition(":")[2])
    with socket.socket() as probe:
        try:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # connections of an earlier run may linger
            probe.bind(("", port))
            probe.listen()
        except OSError as error:
            raise ValueError(
                f"port {port} of --coordinator {address} cannot be used on this machine, which has --node-rank 0: "
                f"{error.strerror}. End the program that uses the port (`ss -ltnp 'sport = :{port}'`), or pass another port on "
                "all machines."
            ) from None


def _positive(text: str) -> int:
    if not re.fullmatch("[0-9]+", text) or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be an integer >= 1, got {text!r}")
    return int(text)


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"must be a number of seconds >= 0, got {text!r}")
    return value


def _address(text: str) -> str:
    match = re.fullmatch(r"([^:\s]+|\[[^\]\s]+\]):([0-9]{1,5})", text)
    if not match or not 0 < int(match[2]) < 1 << 16:
        raise argparse.ArgumentTypeError(f"must be a host and a port, such as 10.0.0.1:8476, got {text!r}")
    return text


def _number(text: str) -> int:
    if not re.fullmatch("[0-9]+", text):
        raise argparse.ArgumentTypeError(f"must be an integer >= 0, got {text!r}")
    return int(text)


def _positive_seconds(text: str) -> float:
    if not _seconds(text):
        raise argparse.ArgumentTypeError(f"must be a number of seconds > 0, got {text!r}")
    return _seconds(text)


def _elastic(text: str) -> Elastic:
    match = re.fullmatch("([0-9]+):([0-9]+)", text)
    if not match or not 1 <= int(match[1]) <= int(match[2]):
        raise argparse.ArgumentTypeError(f"must be MIN:MAX, integers with 1 <= MIN <= MAX, such as 2:8, got {text!r}")
    return Elastic(int(match[1]), int(match[2]))
