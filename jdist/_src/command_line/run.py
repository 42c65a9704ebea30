"""`jdist run`: starts the processes of a program on this machine, or its share of the processes on several machines.

This module and those that it imports do not import JAX, so that `jdist run` starts fast.
"""

import argparse
import contextlib
import os
import socket
import sys
from collections.abc import Iterator

from jdist._src.command_line.run_options import (
    DEFAULT_ANSWER_SECONDS,
    DEFAULT_GRACE_SECONDS,
    DEFAULT_JOIN_SECONDS,
    DEFAULT_MAX_RESTARTS,
    DEFAULT_REJOIN_SECONDS,
    RESTART_GRACE_SECONDS,
    add_arguments,
    check_nodes,
    check_program,
    check_restarts,
    has_restarts,
    set_number_of_processes,
)
from jdist._src.command_line.verb import Verb
from jdist._src.launch.attempt import AttemptSettings, Link, Program, run_attempt
from jdist._src.launch.child_processes import reserved_address
from jdist._src.launch.compilation_cache import CompilationCache, compilation_cache
from jdist._src.launch.control import Address, ControlServer, connect_to_job
from jdist._src.launch.end_rules import AttemptResult, EndTimes, report_failure
from jdist._src.launch.job import Job, JobSettings
from jdist._src.launch.messages import PROTOCOL, Hello, Start
from jdist._src.launch.output import Console
from jdist._src.launch.ray_engine import run_ray_attempt
from jdist._src.launch.signals import ReceivedSignals, received_signals
from jdist._src.launch.supervisor import AttemptRunner, Channel, LocalChannel, RemoteChannel, run_attempts
from jdist._src.launch.variables import gpu_shares, gpus_of_slots, process_variables, usable_cores

_EXIT_SECONDS = 0.3  # after an error, if the job can start again


def _run(arguments: argparse.Namespace) -> int:
    try:
        program = Program("module" if arguments.module else "script", arguments.program, arguments.arguments)
        check_program(program)
        set_number_of_processes(arguments)
        check_nodes(arguments)
        check_restarts(arguments)
        if arguments.engine == "ray" and arguments.nodes is not None:
            raise ValueError(
                "--engine ray takes the nodes of the Ray cluster. Remove --nodes, --node-rank and --coordinator."
            )
        with received_signals() as signals, contextlib.closing(Console()) as console:
            return (_run_job if has_restarts(arguments) else _run_once)(program, arguments, console, signals)
    except (ValueError, ImportError) as error:
        print(f"jdist run: {error}", file=sys.stderr)
        return 2


def _run_once(program: Program, arguments: argparse.Namespace, console: Console, signals: ReceivedSignals) -> int:
    """Runs one attempt, without connections to other machines."""
    processes, machines = arguments.processes, arguments.nodes or 1
    start = Start(0, processes * machines, processes * (arguments.node_rank or 0), range(processes), "")
    times = _times(arguments, _default(arguments.grace, DEFAULT_GRACE_SECONDS))
    settings = AttemptSettings(times, console, signals)
    result = _attempt_runner(program, arguments, processes, settings, CompilationCache(None))(start, None)
    report_failure(result, start.num_processes, console)
    return result.exit_status


def _run_job(program: Program, arguments: argparse.Namespace, console: Console, signals: ReceivedSignals) -> int:
    """Runs the attempts of a job that starts again after a failure."""
    job_settings = _job_settings(arguments)
    answer_seconds = _default(arguments.answer_timeout, DEFAULT_ANSWER_SECONDS)
    settings = AttemptSettings(job_settings.times, console, signals, answer_seconds)
    with contextlib.ExitStack() as stack:
        # The nodes of a Ray cluster do not have the folder of the cache.
        cache = stack.enter_context(compilation_cache(os.environ, arguments.engine == "local"))
        run = _attempt_runner(program, arguments, job_settings.slots_per_machine, settings, cache)
        try:
            channel = stack.enter_context(_channel(program, arguments, job_settings, settings))
        except InterruptedError:
            return 128 + signals.numbers[0]
        return run_attempts(channel, run, signals=signals, console=console)


def _job_settings(arguments: argparse.Namespace) -> JobSettings:
    machines = arguments.nodes or 1
    most = arguments.elastic.maximum if arguments.elastic else arguments.processes * machines
    grace_seconds = _default(arguments.grace, RESTART_GRACE_SECONDS)
    return JobSettings(
        num_machines=machines,
        slots_per_machine=most // machines,
        min_processes=arguments.elastic.minimum if arguments.elastic else most,
        max_restarts=DEFAULT_MAX_RESTARTS if arguments.max_restarts is None else arguments.max_restarts,
        rejoin_seconds=_default(arguments.rejoin_after, DEFAULT_REJOIN_SECONDS),
        join_seconds=_default(arguments.join_timeout, DEFAULT_JOIN_SECONDS),
        times=_times(arguments, grace_seconds)._replace(exit_seconds=min(grace_seconds, _EXIT_SECONDS)),
    )


def _times(arguments: argparse.Namespace, grace_seconds: float) -> EndTimes:
    """Returns the time that processes have to end. `--grace` also applies after a signal, where they may save a checkpoint."""
    times = EndTimes(grace_seconds)
    return times if arguments.grace is None else times._replace(signal_seconds=grace_seconds)


def _default(value: float | None, default: float) -> float:
    return default if value is None else value


@contextlib.contextmanager
def _channel(
    program: Program, arguments: argparse.Namespace, job_settings: JobSettings, settings: AttemptSettings
) -> Iterator[Channel]:
    """Connects this machine with the job, which is on machine 0."""
    if arguments.nodes is None:
        yield LocalChannel(Job(job_settings, settings.console), None)
        return
    hello = Hello(
        PROTOCOL,
        arguments.node_rank,
        job_settings.num_machines,
        job_settings.slots_per_machine,
        os.path.basename(program.target),
        f"{socket.gethostname()}, pid {os.getpid()}",
    )
    host, _, port = arguments.coordinator.rpartition(":")
    address = Address(host.strip("[]"), int(port) + 1)
    if arguments.node_rank == 0:
        job = Job(job_settings, settings.console)
        with contextlib.closing(ControlServer(address, hello, job, settings.answer_seconds)) as server:
            yield LocalChannel(job, server)
    else:
        connection = connect_to_job(address, hello, job_settings.join_seconds, settings)
        with contextlib.closing(connection):
            yield RemoteChannel(connection)


def _attempt_runner(
    program: Program, arguments: argparse.Namespace, num_slots: int, settings: AttemptSettings, cache: CompilationCache
) -> AttemptRunner:
    """Returns the function that runs the processes of an attempt, on this machine or on the Ray cluster."""
    if arguments.engine == "ray":
        return lambda start, link: run_ray_attempt(
            program,
            {**os.environ, "JDIST_RESTARTS": str(start.restarts)},
            settings,
            link,
            num_processes=start.num_processes,
            devices_per_process=arguments.devices_per_process,
        )
    gpus = gpu_shares(os.environ, num_slots, arguments.devices_per_process)

    def run(start: Start, link: Link | None) -> AttemptResult:
        cache.remove_incomplete_entries()
        with contextlib.ExitStack() as stack:
            environments = process_variables(
                {**os.environ, "JDIST_RESTARTS": str(start.restarts)},
                coordinator=arguments.coordinator or stack.enter_context(reserved_address()),
                num_processes=start.num_processes,
                first_process=start.first_process,
                num_local_processes=len(start.slots),
                devices_per_process=arguments.devices_per_process,
                gpus=gpus if gpus is None else gpus_of_slots(gpus, num_slots, start.slots),
                cores=usable_cores(),
            )
            for environment, slot in zip(environments.values(), start.slots, strict=True):
                environment |= cache.variables(slot)
            return run_attempt(program, environments, settings, link)

    return run


RUN = Verb(
    "start the processes of a program, and show their output", "run -n 2 train.py --epochs 3", add_arguments, _run
)
