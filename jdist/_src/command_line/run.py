"""`jdist run`: starts the processes of a program on this machine, or its share of the processes on several machines.

This module and those that it imports do not import JAX, so that `jdist run` starts fast.
"""

import argparse
import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from typing import TypeVar

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
    note_misplaced_number,
    set_number_of_processes,
)
from jdist._src.command_line.verb import Verb
from jdist._src.launch.attempt import AttemptSettings, run_attempt
from jdist._src.launch.child_processes import reserved_address
from jdist._src.launch.command import Command
from jdist._src.launch.compilation_cache import compilation_cache
from jdist._src.launch.end_rules import AttemptResult, EndRules, EndTimes, report_failure
from jdist._src.launch.job import AttemptPlan, Job, JobSettings
from jdist._src.launch.output import Console
from jdist._src.launch.ray_engine import RayEngine
from jdist._src.launch.signals import ReceivedSignals, received_signals
from jdist._src.launch.variables import divisible_gpus, gpus_of_slots, process_variables, usable_cores

_Number = TypeVar("_Number", int, float)
_EXIT_SECONDS = 0.3  # after an error, if the job can start again


def _run(arguments: argparse.Namespace) -> int:
    try:
        command = Command("module" if arguments.module else "script", arguments.program, arguments.arguments)
        check_program(command)
        if note := note_misplaced_number(arguments):
            print(note, file=sys.stderr)
        set_number_of_processes(arguments)
        check_nodes(arguments)
        check_restarts(arguments)
        if arguments.engine == "ray" and arguments.nodes is not None:
            raise ValueError(
                "--engine ray takes the nodes of the Ray cluster. Remove --nodes, --node-rank and --coordinator."
            )
        with received_signals() as signals, contextlib.closing(Console()) as console:
            return (_run_job if has_restarts(arguments) else _run_once)(command, arguments, console, signals)
    except (ValueError, ImportError) as error:
        print(f"jdist run: {error}", file=sys.stderr)
        return 2


def _run_once(command: Command, arguments: argparse.Namespace, console: Console, signals: ReceivedSignals) -> int:
    """Runs one attempt, without connections to other machines."""
    processes, machines = arguments.processes, arguments.nodes or 1
    plan = AttemptPlan(0, processes * machines, processes * (arguments.node_rank or 0), range(processes))
    times = _times(arguments, _default(arguments.grace, DEFAULT_GRACE_SECONDS))
    settings = AttemptSettings(times, console, signals)
    with _engine(command, arguments, processes, processes, settings) as (run, _):
        result = run(plan)
    report_failure(result, plan.num_processes, console)
    return result.exit_status


def _run_job(command: Command, arguments: argparse.Namespace, console: Console, signals: ReceivedSignals) -> int:
    """Runs the attempts of a job that starts again after a failure."""
    job = _job_settings(arguments)
    answer_seconds = _default(arguments.answer_timeout, DEFAULT_ANSWER_SECONDS)
    settings = AttemptSettings(job.times, console, signals, answer_seconds)
    place = "the Ray cluster" if arguments.engine == "ray" else "machine 0"
    with _engine(command, arguments, job.min_processes, job.max_processes, settings) as (run, capacity):
        return Job(job, run, signals, console, capacity, place).run()


def _job_settings(arguments: argparse.Namespace) -> JobSettings:
    grace_seconds = _default(arguments.grace, RESTART_GRACE_SECONDS)
    return JobSettings(
        max_processes=arguments.elastic.maximum if arguments.elastic else arguments.processes,
        min_processes=arguments.elastic.minimum if arguments.elastic else arguments.processes,
        max_restarts=_default(arguments.max_restarts, DEFAULT_MAX_RESTARTS),
        rejoin_seconds=_default(arguments.rejoin_after, DEFAULT_REJOIN_SECONDS),
        join_seconds=_default(arguments.join_timeout, DEFAULT_JOIN_SECONDS),
        times=_times(arguments, grace_seconds)._replace(exit_seconds=min(grace_seconds, _EXIT_SECONDS)),
    )


def _times(arguments: argparse.Namespace, grace_seconds: float) -> EndTimes:
    """Returns the time that processes have to end. `--grace` also applies after a signal, where they may save a checkpoint."""
    times = EndTimes(grace_seconds)
    return times if arguments.grace is None else times._replace(signal_seconds=grace_seconds)


def _default(value: _Number | None, default: _Number) -> _Number:
    return default if value is None else value


@contextlib.contextmanager
def _engine(
    command: Command, arguments: argparse.Namespace, min_processes: int, num_slots: int, settings: AttemptSettings
) -> Iterator[tuple[Callable[..., AttemptResult], Callable[[], int]]]:
    """Returns the function that runs the processes of an attempt, and the one that returns how many can run."""
    if arguments.engine == "ray":
        devices = arguments.devices_per_process
        engine = RayEngine(command, os.environ, settings, min_processes=min_processes, devices_per_process=devices)
        with contextlib.closing(engine):
            yield engine.run, engine.capacity
        return
    gpus = divisible_gpus(os.environ, num_slots, arguments.devices_per_process)

    def run(plan: AttemptPlan, *check: Callable[[EndRules], None]) -> AttemptResult:
        cache.remove_incomplete_entries()
        with contextlib.ExitStack() as stack:
            environments = process_variables(
                {**os.environ, "JDIST_RESTARTS": str(plan.restarts)},
                coordinator=arguments.coordinator or stack.enter_context(reserved_address()),
                num_processes=plan.num_processes,
                first_process=plan.first_process,
                num_local_processes=len(plan.slots),
                devices_per_process=arguments.devices_per_process,
                gpus=gpus if gpus is None else gpus_of_slots(gpus, num_slots, plan.slots),
                cores=usable_cores(),
            )
            for environment, slot in zip(environments.values(), plan.slots, strict=True):
                environment |= cache.variables(slot)
            return run_attempt(command, environments, settings, *check)

    with compilation_cache(os.environ, has_restarts(arguments)) as cache:
        yield run, lambda: num_slots


RUN = Verb(
    "start the processes of a program, and show their output", "run -n 2 train.py --epochs 3", add_arguments, _run
)
