"""The attempts on a running Ray cluster: each process is started by a Ray actor in a placement group."""

import importlib
import math
import os
import re
import signal
import socket
import time
from collections.abc import Callable, Mapping
from typing import Any

from jdist._src.core.optional_import import optional_import
from jdist._src.launch.attempt import Attempt, AttemptSettings
from jdist._src.launch.command import Command, Report
from jdist._src.launch.end_rules import AttemptResult, EndRules, Failure
from jdist._src.launch.job import AttemptPlan, CapacityError
from jdist._src.launch.ray_worker import Node, RayWorker
from jdist._src.launch.signals import FORWARDED
from jdist._src.launch.variables import process_variables

_PASSED_VARIABLES = re.compile(r"(JAX|JDIST|NCCL|XLA)_|LIBTPU_INIT_ARGS$|NPROC$|PYTHONPATH$")
_CONNECT_SECONDS = 10.0
_POLL_SECONDS = 0.2  # in which an actor waits for output of its process
_WAIT_SECONDS = 0.5  # in which the launcher waits for an actor, and does not check for signals
_MESSAGE_SECONDS = 5.0  # until a message about resources that are in use
_END_SECONDS = 10.0  # in which the actors end their processes


def connect_to_ray(environ: Mapping[str, str]) -> Any:
    """Connects this process to a running Ray cluster, unless it is connected, and returns the module `ray`.

    Args:
        environ: Environment variables; `RAY_ADDRESS` is the address of the cluster.

    Raises:
        ImportError: Ray is not installed.
        ValueError: No Ray cluster runs.
    """
    with optional_import("The engine `ray` needs Ray", "jdist[ray]"):
        ray: Any = importlib.import_module("ray")
    if ray.is_initialized():
        return ray
    address = environ.get("RAY_ADDRESS") or "auto"
    os.environ.setdefault("RAY_IGNORE_UNHANDLED_ERRORS", "1")  # results of an attempt that failed
    try:
        if match := re.fullmatch(r"([^:/]+):(\d+)", address):  # Ray tries for minutes to connect
            socket.create_connection((match[1], int(match[2])), timeout=_CONNECT_SECONDS).close()
        ray.init(address=address, log_to_driver=False, logging_level="ERROR")
    except (OSError, ValueError) as error:
        raise ValueError(
            f"no Ray cluster was found at {address!r}. Start one with `ray start --head`, or set RAY_ADDRESS. ({error})"
        ) from error
    return ray


class RayEngine:
    """Runs a command in processes on the nodes of a running Ray cluster, to which this process is connected until `close`.

    Args:
        command: The command. The script, or the module, must exist on all nodes.
        environ: The environment variables of the launcher.
        settings: The settings.
        min_processes: The smallest number of processes.
        devices_per_process: The number of GPUs per process (default: 1), or of CPU devices where JAX does not use GPUs.

    Raises:
        ImportError: Ray is not installed.
        ValueError: No Ray cluster runs, or it cannot run these processes.
    """

    def __init__(
        self,
        command: Command,
        environ: Mapping[str, str],
        settings: AttemptSettings,
        *,
        min_processes: int,
        devices_per_process: int | None,
    ):
        handlers = {number: signal.getsignal(number) for number in FORWARDED}
        try:
            self._ray = connect_to_ray(environ)
        finally:
            for number, handler in handlers.items():  # which Ray replaces
                signal.signal(number, handler)
        self._command, self._environ, self._settings = command, environ, settings
        self._devices_per_process = devices_per_process
        self._bundle = process_bundle(self._ray.cluster_resources(), environ, min_processes, devices_per_process)
        self.close = self._ray.shutdown

    def capacity(self) -> int:
        """Returns the number of processes that the nodes can run."""
        nodes = [node["Resources"] for node in self._ray.nodes() if node["Alive"]]
        return sum(int(min(node.get(name, 0) // number for name, number in self._bundle.items())) for node in nodes)

    def run(self, plan: AttemptPlan, check: Callable[[EndRules], None] = lambda rules: None) -> AttemptResult:
        """Runs the processes of an attempt, and returns when all have ended.

        The rules for failures, signals and output are the rules of `run_attempt`. Ray ends the actors, and with them the
        processes, if this process is killed.

        Args:
            plan: The attempt.
            check: Called after each event, and every second. It may end the processes.

        Raises:
            CapacityError: The nodes cannot run these processes.
            ValueError: The program does not exist on a node.
        """
        ray, num_processes = self._ray, plan.num_processes
        attempt = Attempt(self._settings, check)
        strategy = "PACK" if "GPU" in self._bundle else "SPREAD"
        group = ray.util.placement_group([self._bundle] * num_processes, strategy=strategy)
        try:
            if not self._wait_for_resources(group, num_processes):
                return attempt.rules.result()._replace(statuses=(128 + self._settings.signals.numbers[0],))
            try:
                workers = self._start_workers(group, plan)
            except FileNotFoundError as error:  # Ray raises it as the error of the method
                raise ValueError(
                    f"{error.filename or self._command.target!r} does not exist on every node, in the folder {os.getcwd()}. "
                    "Use a file system that all nodes share, or copy the program to each node."
                ) from None
            except ray.exceptions.RayError as error:
                failure = Failure(0, -signal.SIGKILL, str(error), "its Ray actor could not be started")
                return attempt.rules.result()._replace(statuses=(failure.status,), first_failure=failure)
            self._wait(attempt, workers)
            ray.wait([worker.end.remote() for worker in workers], num_returns=num_processes, timeout=_END_SECONDS)
            return attempt.rules.result()
        finally:
            attempt.close()
            ray.util.remove_placement_group(group)

    def _wait(self, attempt: Attempt, workers: list[Any]) -> None:
        """Waits until the processes have ended."""
        ray = self._ray
        for index, worker in enumerate(workers):
            attempt.add(index, lambda number, to_group, worker=worker: worker.send_signal.remote(int(number), to_group))
        polls = [worker.poll.remote(_POLL_SECONDS) for worker in workers]

        def receive_reports(seconds: float) -> None:
            running = {polls[process.index]: process for process in attempt.processes if process.status is None}
            for poll in ray.wait(list(running), timeout=min(seconds, _WAIT_SECONDS))[0]:
                process = running[poll]
                try:
                    attempt.receive(process, ray.get(poll))
                except ray.exceptions.RayError as error:
                    report = Report(b"", f"{error}\n".encode(), [], -signal.SIGKILL)
                    attempt.receive(process, report, "its node or its Ray actor was lost")
                if process.status is None:
                    polls[process.index] = workers[process.index].poll.remote(_POLL_SECONDS)

        attempt.wait(receive_reports)

    def _wait_for_resources(self, group: Any, num_processes: int) -> bool:
        """Returns whether the placement group is ready; False after a signal."""
        ready, ray = group.ready(), self._ray
        next_message = time.monotonic() + _MESSAGE_SECONDS
        while not self._settings.signals.numbers:
            if (capacity := self.capacity()) < num_processes:
                raise CapacityError(
                    f"{num_processes} processes with {self._bundle} each cannot be placed on the nodes of the Ray cluster, "
                    f"which can run {capacity}. Start fewer processes, or add nodes to the cluster."
                )
            if ray.wait([ready], timeout=_WAIT_SECONDS)[0]:
                return True
            if time.monotonic() > next_message:
                next_message = math.inf
                self._settings.console.message(
                    f"waits for resources that other programs of the Ray cluster use: {self._bundle} per process."
                )
        return False

    def _start_workers(self, group: Any, plan: AttemptPlan) -> list[Any]:
        """Starts an actor per process, which starts the process; returns the actors in the order of the processes."""
        ray = self._ray
        strategies = importlib.import_module("ray.util.scheduling_strategies")
        workers = [
            ray.remote(RayWorker)
            .options(
                num_cpus=self._bundle["CPU"],
                num_gpus=self._bundle.get("GPU", 0),
                scheduling_strategy=strategies.PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=i),
            )
            .remote()
            for i in range(plan.num_processes)
        ]
        workers, nodes = in_order_of_nodes(workers, ray.get([worker.node.remote() for worker in workers]))
        coordinator = f"{nodes[0].address}:{ray.get(workers[0].reserve_port.remote())}"
        environ = {**self._environ, "JDIST_RESTARTS": str(plan.restarts)}
        variables = variables_on_nodes(
            environ, nodes, coordinator, None if "GPU" in self._bundle else self._devices_per_process
        )
        ray.get(
            [
                worker.start.remote(self._command, os.getcwd(), variables[i], self._settings.sends_answers)
                for i, worker in enumerate(workers)
            ]
        )
        return workers


def process_bundle(
    resources: Mapping[str, float], environ: Mapping[str, str], num_processes: int, devices_per_process: int | None
) -> dict[str, float]:
    """Returns the resources of one process, as a bundle of a placement group.

    Args:
        resources: The resources of the cluster.
        environ: The environment variables of the launcher.
        num_processes: The number of processes.
        devices_per_process: The number of GPUs per process; by default 1.

    Raises:
        CapacityError: The cluster does not have the resources of all processes.
    """
    bundle: dict[str, float] = {"CPU": 1}
    if resources.get("GPU") and re.search("cuda|gpu|^$", environ.get("JAX_PLATFORMS", "")):
        bundle["GPU"] = devices_per_process or 1
    for name, number in bundle.items():
        if num_processes * number > (available := resources.get(name, 0)):
            raise CapacityError(
                f"{num_processes} processes with {number:g} {name} each need {num_processes * number:g}, but the Ray cluster "
                f"has {available:g}. Start fewer processes, or add nodes to the cluster."
            )
    return bundle


def in_order_of_nodes(workers: list[Any], nodes: list[Node]) -> tuple[list[Any], list[Node]]:
    """Returns the actors and their nodes, so that the actors of a node follow each other.

    Args:
        workers: The actors.
        nodes: The node of each actor.
    """
    ids = list(dict.fromkeys(node.id for node in nodes))
    order = sorted(range(len(nodes)), key=lambda i: ids.index(nodes[i].id))
    return [workers[i] for i in order], [nodes[i] for i in order]


def variables_on_nodes(
    environ: Mapping[str, str], nodes: list[Node], coordinator: str, devices_per_process: int | None
) -> dict[int, dict[str, str]]:
    """Returns the environment variables of each process, in addition to the variables of its actor.

    Args:
        environ: The environment variables of the launcher; variables of JAX and of jdist are passed to the processes.
        nodes: The node of each process.
        coordinator: The address of the coordinator.
        devices_per_process: The number of CPU devices per process; by default JAX's.
    """
    passed = {name: value for name, value in environ.items() if _PASSED_VARIABLES.match(name)}
    variables: dict[int, dict[str, str]] = {}
    while len(variables) < len(nodes):
        node = nodes[len(variables)]
        variables |= process_variables(
            passed,
            coordinator=coordinator,
            num_processes=len(nodes),
            first_process=len(variables),
            num_local_processes=len([other for other in nodes if other.id == node.id]),
            devices_per_process=devices_per_process,
            cores=node.cores,
        )
    return variables
