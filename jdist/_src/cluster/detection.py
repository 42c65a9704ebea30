"""Detects that a launcher has started this process as one of several, and variables of a cluster that no resolver accepts."""

import os
import re

from jdist._src.cluster.resolution import resolve
from jdist._src.cluster.resolver import ClusterNotFoundError, ClusterResolver
from jdist._src.cluster.settings import Variables
from jdist._src.core.source_lines import warn_at_caller

# Variables of launchers, queues and operators that no resolver reads, or only if all of a group are set: the number of
# processes or nodes, and other variables of the same source for the message.
_SIZE_VARIABLES = {
    "PET_NNODES": ("PET_RDZV_ENDPOINT", "PET_NODE_RANK"),  # elastic PyTorchJob, or torchrun's own variables
    "PADDLE_NNODES": ("PADDLE_MASTER", "PADDLE_TRAINER_ID"),
    "PADDLE_TRAINERS_NUM": ("PADDLE_TRAINER_ID",),
    "DMLC_NUM_WORKER": ("DMLC_TASK_ID", "DMLC_TRACKER_URI"),  # XGBoost, MXNet
    "NUM_PROCESSES": ("PROCESS_ID", "COORDINATOR_ADDRESS"),
    "NNODES": ("NODE_RANK", "MASTER_ADDR"),
    "GROUP_WORLD_SIZE": ("GROUP_RANK",),
    "HOROVOD_SIZE": ("HOROVOD_RANK",),
    "MV2_COMM_WORLD_SIZE": ("MV2_COMM_WORLD_RANK",),
    "MPI_WORLD_SIZE": ("MPI_WORLD_RANK",),
    "PALS_SIZE": ("PALS_RANKID",),
    "JSM_NAMESPACE_SIZE": ("JSM_NAMESPACE_RANK",),  # jsrun
    "FLUX_JOB_SIZE": ("FLUX_TASK_RANK",),
    "PBS_NUM_NODES": ("PBS_JOBID",),
    "SLURM_JOB_NUM_NODES": ("SLURM_JOB_ID",),  # a job script without `srun`
    "NHOSTS": ("PE_HOSTFILE",),  # Grid Engine
    "LWS_GROUP_SIZE": ("LWS_WORKER_INDEX", "LWS_LEADER_ADDRESS"),
    "VC_WORKER_NUM": ("VC_WORKER_HOSTS", "VK_TASK_INDEX"),  # Volcano
    "AWS_BATCH_JOB_NUM_NODES": ("AWS_BATCH_JOB_NODE_INDEX",),
    "SKYPILOT_NUM_NODES": ("SKYPILOT_NODE_RANK",),
}
# A second variable is needed where the first has other uses too.
_AMBIGUOUS = ("NUM_PROCESSES", "NNODES", "NHOSTS")


def launched_process() -> ClusterResolver | None:
    """Returns the resolver of a process that a launcher has started as one of several; None if it is the only one.

    Raises:
        ValueError: The settings of a resolver are incomplete or malformed.
    """
    try:
        resolver = resolve()
    except ClusterNotFoundError:
        return None
    return None if resolver.num_processes == 1 or resolver.task_type == "ps" else resolver


def unresolved_variables(environ: Variables) -> list[str]:
    """Returns the variables that show a cluster of several processes, where no resolver has found one.

    Example:
        >>> unresolved_variables({"LWS_GROUP_SIZE": "4", "LWS_WORKER_INDEX": "1"})
        ['LWS_GROUP_SIZE', 'LWS_WORKER_INDEX']
    """
    names: list[str] = []
    for size, others in _SIZE_VARIABLES.items():
        present = [name for name in others if environ.get(name, "").strip()]
        numbers = map(int, re.findall("[0-9]+", environ.get(size, "")))  # `"1:4"` is a range
        if max(numbers, default=0) > 1 and (present or size not in _AMBIGUOUS):
            names += [size, *present]
    return list(dict.fromkeys(names))


def warn_of_unresolved_variables() -> None:
    """Warns, at the caller's line, of variables that show a cluster where no resolver has found one."""
    if names := unresolved_variables(os.environ):
        listed = ", ".join(f"{name}={os.environ[name]}" for name in names)
        warn_at_caller(
            f"The environment has variables of a launcher or a queue, but no resolver accepts them: {listed}. This process "
            "trains by itself. If it is one of several, start it with a launcher such as `jdist run`, `srun` or `mpirun`, set "
            "JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID, or pass a resolver: "
            "`MultiWorkerMirroredStrategy(resolver)`."
        )
