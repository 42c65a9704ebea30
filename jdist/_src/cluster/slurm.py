"""The tasks of a Slurm job step, which `srun` starts."""

import os
import re
from collections.abc import Mapping, Sequence
from typing import ClassVar

from jdist._src.cluster.gpus import share_gpus
from jdist._src.cluster.hostlist import expand_hostlist
from jdist._src.cluster.resolver import ClusterNotFoundError
from jdist._src.cluster.settings import (
    Variables,
    check_complete,
    check_index,
    coordinator_override,
    missing,
    port_of_job,
    read_integer,
)
from jdist._src.cluster.simple import SimpleClusterResolver

_COUNT, _NODES, _TASKS = "SLURM_STEP_NUM_TASKS", "SLURM_STEP_NODELIST", "SLURM_STEP_TASKS_PER_NODE"
_RANK = "SLURM_PROCID"


class SlurmClusterResolver(SimpleClusterResolver):
    """The tasks of a Slurm job step: the processes that `srun python train.py` starts.

    If several tasks share a node, each gets an equal part of the GPUs of the node, unless Slurm has bound GPUs to tasks
    already.

    Args:
        jobs: The number of tasks of each job, such as `{"ps": 1, "worker": 4}`. The tasks are assigned to the jobs in
            alphabetical order, as in TensorFlow. Default: all tasks are workers.
        port_base: The port of the first task of each node; the next task of the node has the next port. Default: a port that
            depends on the job and the step.
        gpus_per_node: The number of GPUs per node; default: `SLURM_GPUS_ON_NODE`.
        gpus_per_task: The number of GPUs per task; default: `SLURM_GPUS_PER_TASK`, or an equal part.
        tasks_per_node: The number of tasks per node, one number or one per node; default: `SLURM_STEP_TASKS_PER_NODE`.
        coordinator_address: The `"host:port"` where process 0 listens. Default: `JAX_COORDINATOR_ADDRESS`, or the address of
            process 0.
        environ: The environment variables to read; default: `os.environ`.

    Raises:
        ClusterNotFoundError: This process was not started by `srun`.
        ValueError: The variables of Slurm are incomplete, or contradict each other or the arguments.

    Example:
        >>> resolver = SlurmClusterResolver(
        ...     port_base=8476,
        ...     environ={
        ...         "SLURM_STEP_NODELIST": "gpu[01-02]",
        ...         "SLURM_STEP_NUM_TASKS": "4",
        ...         "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
        ...         "SLURM_PROCID": "3",
        ...         "SLURM_GPUS_ON_NODE": "4",
        ...     },
        ... )
        >>> (
        ...     resolver.master(),
        ...     resolver.num_processes,
        ...     resolver.process_id,
        ...     resolver.local_device_ids,
        ... )
        ('gpu01:8476', 4, 3, (2, 3))
    """

    _source: ClassVar[str] = "the Slurm job step"

    def __init__(
        self,
        jobs: Mapping[str, int] | None = None,
        *,
        port_base: int | None = None,
        gpus_per_node: int | None = None,
        gpus_per_task: int | None = None,
        tasks_per_node: int | Sequence[int] | None = None,
        coordinator_address: str | None = None,
        environ: Mapping[str, str] | None = None,
    ):
        variables = os.environ if environ is None else environ
        _check_variables(variables, tasks_per_node is not None)
        count = read_integer(variables, _COUNT, 1)
        rank = check_index(read_integer(variables, _RANK), _RANK, count, _COUNT)
        nodes = expand_hostlist(variables[_NODES])
        node_counts = _tasks_per_node(variables, tasks_per_node, nodes, count)
        places = _places(node_counts, variables)
        node, local_id = places[rank]
        share = share_gpus(
            variables,
            local_id,
            node_counts[node],
            per_process=_last_integer(variables, "SLURM_GPUS_PER_TASK") if gpus_per_task is None else gpus_per_task,
            per_host=_last_integer(variables, "SLURM_GPUS_ON_NODE") if gpus_per_node is None else gpus_per_node,
        )
        port = port_of_job(f"{variables.get('SLURM_JOB_ID')}.{variables.get('SLURM_STEP_ID')}")
        base = port if port_base is None else port_base
        spec, tasks = _assign(jobs, [f"{nodes[node]}:{base + local_id}" for node, local_id in places])
        super().__init__(
            spec,
            task_type=tasks[rank][0],
            task_id=tasks[rank][1],
            environment="variables",
            num_accelerators=share.accelerators,
            coordinator_address=coordinator_override(coordinator_address, variables),
            local_device_ids=share.local_device_ids,
        )


def _check_variables(variables: Variables, has_tasks_per_node: bool) -> None:
    names = [_COUNT, _NODES, *([] if has_tasks_per_node else [_TASKS])]
    if missing(variables, names) == names:  # SLURM_PROCID is also set in the script of `sbatch`
        job = variables.get("SLURM_JOB_ID")
        place = f"This process is in Slurm job {job}, but" if job else "This process"
        raise ClusterNotFoundError(
            f"{place} was not started by `srun`: {', '.join(names)} are not set. In the script of `sbatch`, write `srun "
            "python train.py`."
        )
    advice = "`srun` sets all of them. Start the program with `srun`, and pass its environment on (`--export=ALL`)."
    check_complete(variables, [_RANK, *names], advice)


def _tasks_per_node(
    variables: Variables, argument: int | Sequence[int] | None, nodes: list[str], count: int
) -> list[int]:
    if argument is None:
        text, source = variables[_TASKS], f"{_TASKS} is {variables[_TASKS]!r}"
        counts = _parse_counts(text)
    else:
        counts = [argument] * len(nodes) if isinstance(argument, int) else list(argument)
        source = f"`tasks_per_node` is {argument}"
    if len(counts) != len(nodes):
        raise ValueError(
            f"{source}, for {len(counts)} nodes, but {_NODES} has {len(nodes)}: {', '.join(nodes)}. Correct one."
        )
    if sum(counts) != count:
        raise ValueError(f"{source}, {sum(counts)} tasks, but {_COUNT} is {count}. Correct one of them.")
    return counts


def _parse_counts(text: str) -> list[int]:
    """Returns one number per node of a text such as `"2(x3),1"`."""
    counts: list[int] = []
    for item in text.split(","):
        match = re.fullmatch(r"([0-9]+)(?:\(x([0-9]+)\))?", item.strip(), re.ASCII)
        if not match:
            raise ValueError(f"{_TASKS} must have numbers such as '2(x3),1', got {text!r}.")
        counts += [int(match[1])] * int(match[2] or 1)
    return counts


def _places(node_counts: list[int], variables: Variables) -> list[tuple[int, int]]:
    """Returns the node and the local index of each task.

    A block distribution fills one node after the other. A cyclic one assigns one task per node in each round, a plane one
    several.
    """
    distribution = variables.get("SLURM_DISTRIBUTION", "block").split(":")[0].split(",")[0]
    if distribution == "arbitrary":
        raise ValueError(
            "SLURM_DISTRIBUTION is 'arbitrary', so the node of each task is unknown. Use `--distribution=block`, or set "
            "JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID."
        )
    sizes = {"cyclic": 1, "plane": _last_integer(variables, "SLURM_DIST_PLANESIZE")}
    size = sizes.get(distribution) or max(node_counts)
    places: list[tuple[int, int]] = []
    for first in range(0, max(node_counts), size):
        for node, count in enumerate(node_counts):
            places += [(node, local_id) for local_id in range(first, min(first + size, count))]
    return places


def _last_integer(variables: Variables, name: str) -> int | None:
    """Returns the last number of a variable, such as 4 of `"4"` or `"gpu:a100:4"`; None if it is not set."""
    text = variables.get(name, "").split(":")[-1].strip()
    return read_integer({name: text}, name) if text else None


def _assign(jobs: Mapping[str, int] | None, addresses: list[str]) -> tuple[dict[str, list[str]], list[tuple[str, int]]]:
    """Returns the cluster spec, and the job and the index of each task."""
    counts = {"worker": len(addresses)} if jobs is None else dict(sorted(jobs.items()))
    if sum(counts.values()) != len(addresses):
        raise ValueError(
            f"`jobs` {counts} has {sum(counts.values())} tasks, but {_COUNT} is {len(addresses)}. Correct `jobs`, or `srun "
            "--ntasks`."
        )
    tasks = [(job, index) for job, count in counts.items() for index in range(count)]
    spec: dict[str, list[str]] = {job: [] for job in counts}
    for (job, _), address in zip(tasks, addresses, strict=True):
        spec[job].append(address)
    return spec, tasks
