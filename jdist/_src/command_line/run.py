"""`jdist run`: starts the processes of a program on this machine, or its share of the processes on several machines.

This module and those that it imports do not import JAX, so that `jdist run` starts fast.
"""

import argparse
import contextlib
import importlib.util
import os
import re
import socket
import sys

from jdist._src.command_line.verb import Verb
from jdist._src.launch.attempt import Program, run_attempt
from jdist._src.launch.child_processes import reserved_address
from jdist._src.launch.end_rules import report_failure
from jdist._src.launch.output import Console
from jdist._src.launch.ray_engine import run_ray_attempt
from jdist._src.launch.variables import gpu_shares, process_variables, usable_cores


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "-n",
        "--processes",
        type=_positive,
        required=True,
        metavar="N",
        help="processes on this machine, or with --engine ray on the cluster",
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
    add("--coordinator", type=_address, metavar="HOST:PORT", help="address of machine 0, and a free port there")
    add(
        "--grace",
        type=_seconds,
        default=5.0,
        metavar="SECONDS",
        help="time between SIGTERM and SIGKILL for the other processes after a failure (default: 5)",
    )
    add(
        "--engine",
        choices=("local", "ray"),
        default="local",
        help="where the processes are started: on this machine (default), or by actors of a running Ray cluster",
    )
    add("-m", "--module", action="store_true", help="the program is a module, as in `python -m`")
    add("program", help="a Python script, or with -m a module")
    add("arguments", nargs=argparse.REMAINDER, metavar="...", help="arguments of the program")


def _run(arguments: argparse.Namespace) -> int:
    try:
        program = Program("module" if arguments.module else "script", arguments.program, arguments.arguments)
        _check_program(program)
        _check_nodes(arguments)
        run = _run_on_ray if arguments.engine == "ray" else _run_here
        return run(program, arguments, Console())
    except (ValueError, ImportError) as error:
        print(f"jdist run: {error}", file=sys.stderr)
        return 2


def _run_on_ray(program: Program, arguments: argparse.Namespace, console: Console) -> int:
    if arguments.nodes is not None:
        raise ValueError(
            "--engine ray takes the nodes of the Ray cluster. Remove --nodes, --node-rank and --coordinator."
        )
    result = run_ray_attempt(
        program,
        os.environ,
        num_processes=arguments.processes,
        devices_per_process=arguments.devices_per_process,
        grace_seconds=arguments.grace,
        console=console,
    )
    report_failure(result, arguments.processes, console)
    return result.exit_status


def _run_here(program: Program, arguments: argparse.Namespace, console: Console) -> int:
    gpus = gpu_shares(os.environ, arguments.processes, arguments.devices_per_process)
    num_processes = arguments.processes * (arguments.nodes or 1)
    with contextlib.ExitStack() as stack:
        environments = process_variables(
            os.environ,
            coordinator=arguments.coordinator or stack.enter_context(reserved_address()),
            num_processes=num_processes,
            first_process=arguments.processes * (arguments.node_rank or 0),
            num_local_processes=arguments.processes,
            devices_per_process=arguments.devices_per_process,
            gpus=gpus,
            cores=usable_cores(),
        )
        result = run_attempt(program, environments, grace_seconds=arguments.grace, console=console)
    report_failure(result, num_processes, console)
    return result.exit_status


def _check_program(program: Program) -> None:
    if program.kind == "script":
        if os.path.isfile(program.target):
            return
        advice = "Pass the path of a Python script, without `python`, or a module after `-m`."
        raise ValueError(f"{program.target!r} is not a file in {os.getcwd()}. {advice}")
    name = program.target.partition(".")[0]
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # as in the processes
    if not re.fullmatch(r"\w+(\.\w+)*", program.target) or importlib.util.find_spec(name) is None:
        raise ValueError(
            f"the module {program.target!r} is not found. Pass its name without `.py`, or a script without `-m`."
        )


def _check_nodes(arguments: argparse.Namespace) -> None:
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


RUN = Verb(
    "start the processes of a program, and show their output", "run -n 2 train.py --epochs 3", _add_arguments, _run
)
