"""The processes that an MPI launcher starts, from its environment variables. mpi4py is not needed."""

import os
import re
from collections.abc import Mapping
from typing import ClassVar, NamedTuple

from jdist._src.cluster.gpus import share_gpus
from jdist._src.cluster.hostlist import expand_hostlist
from jdist._src.cluster.resolver import ClusterNotFoundError
from jdist._src.cluster.settings import (
    DEFAULT_PORT,
    Variables,
    check_complete,
    check_index,
    coordinator_override,
    missing,
    port_of_job,
    read_integer,
    unknown_addresses,
    with_port,
)
from jdist._src.cluster.simple import SimpleClusterResolver


class _Launcher(NamedTuple):
    """The environment variables that a launcher sets."""

    name: str
    size: str
    rank: str
    local_count: tuple[str, ...]
    local_rank: tuple[str, ...]


_LAUNCHERS = (
    _Launcher(
        "Open MPI",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_RANK",
        ("OMPI_COMM_WORLD_LOCAL_SIZE",),
        ("OMPI_COMM_WORLD_LOCAL_RANK",),
    ),
    # MPICH, Intel MPI (local: MPI_*), Cray
    _Launcher(
        "PMI", "PMI_SIZE", "PMI_RANK", ("MPI_LOCALNRANKS", "PMI_LOCAL_SIZE"), ("MPI_LOCALRANKID", "PMI_LOCAL_RANK")
    ),
)
_PMIX = "PMIX_RANK"
# The job, the same on each process: the launch where that is known, else the batch job.
_JOB_IDS = ("PMIX_NAMESPACE", "OMPI_MCA_orte_hnp_uri", "PMI_JOBID", "SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID")


class MPIClusterResolver(SimpleClusterResolver):
    """The processes that `mpirun` or `mpiexec` starts, of Open MPI, MPICH, Intel MPI and other launchers with PMI.

    The launcher passes the number of processes and the index. It does not pass the host of process 0: if all processes are on
    this host, it is `localhost`. Otherwise it is the first host of the batch job (Slurm, PBS), or the host of `mpirun` (Open
    MPI). Set `JAX_COORDINATOR_ADDRESS` if process 0 runs on another host.

    If several processes share a host, each gets an equal part of its GPUs.

    Args:
        port: The port where process 0 listens. Default: a port that depends on the job, or 8476 if the job is unknown.
        gpus_per_process: The number of GPUs per process; default: an equal part of the visible ones, or one if unknown.
        coordinator_address: The `"host:port"` where process 0 listens. Default: `JAX_COORDINATOR_ADDRESS`, or as above.
        environ: The environment variables to read; default: `os.environ`.

    Raises:
        ClusterNotFoundError: This process was not started by an MPI launcher, or by `srun`, which has its own resolver.
        ValueError: The variables are incomplete or contradict each other, or the host of process 0 is unknown.

    Example:
        >>> resolver = MPIClusterResolver(
        ...     port=8476,
        ...     environ={
        ...         "OMPI_COMM_WORLD_SIZE": "4",
        ...         "OMPI_COMM_WORLD_RANK": "1",
        ...         "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
        ...         "OMPI_COMM_WORLD_LOCAL_RANK": "1",
        ...     },
        ... )
        >>> resolver.master(), resolver.num_processes, resolver.process_id
        ('localhost:8476', 4, 1)
    """

    _source: ClassVar[str] = "the MPI job"

    def __init__(
        self,
        *,
        port: int | None = None,
        gpus_per_process: int | None = None,
        coordinator_address: str | None = None,
        environ: Mapping[str, str] | None = None,
    ):
        variables = os.environ if environ is None else environ
        launcher = _launcher(variables)
        count = read_integer(variables, launcher.size, 1)
        rank = check_index(read_integer(variables, launcher.rank), launcher.rank, count, launcher.size)
        local_count = _first_integer(variables, launcher.local_count)
        local_rank = _first_integer(variables, launcher.local_rank)
        address = coordinator_override(coordinator_address, variables)
        if address is None:
            host = "localhost" if local_count == count or count == 1 else _first_host(variables, count)
            job = next((variables[name] for name in _JOB_IDS if variables.get(name)), None)
            default = DEFAULT_PORT if job is None else port_of_job(job)
            address = with_port(host, default if port is None else port)
        share = None
        if local_count and local_rank is not None:
            share = share_gpus(variables, local_rank, local_count, per_process=gpus_per_process)
        super().__init__(
            unknown_addresses(count, address),
            task_type="worker",
            task_id=rank,
            environment="variables",
            num_accelerators=share.accelerators if share else None,
            coordinator_address=address,
            local_device_ids=share.local_device_ids if share else None,
        )


def _launcher(variables: Variables) -> _Launcher:
    """Returns the launcher of this process. Its variables are complete."""
    launcher = next((x for x in _LAUNCHERS if len(missing(variables, (x.size, x.rank))) < 2), None)
    has_srun = not missing(variables, ("SLURM_STEP_NUM_TASKS", "SLURM_PROCID"))
    if launcher is None and missing(variables, (_PMIX,)):
        names = "; ".join(f"{launcher.size}, {launcher.rank} ({launcher.name})" for launcher in _LAUNCHERS)
        raise ClusterNotFoundError(
            f"This process was not started by an MPI launcher: {names} are not set. Use `mpirun`."
        )
    if has_srun and (launcher is None or _equals_srun(variables, launcher)):
        name = _PMIX if launcher is None else launcher.rank
        raise ClusterNotFoundError(
            f"{name} is set, but `srun` started this process, not an MPI launcher. Use `SlurmClusterResolver`."
        )
    if launcher is None:
        raise ValueError(
            f"{_PMIX} is {variables[_PMIX]!r}, but PMIx does not pass the number of processes. Start the program with "
            "`mpirun`, or set JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID."
        )
    check_complete(variables, (launcher.size, launcher.rank), "The launcher sets both. Pass its environment on.")
    return launcher


def _equals_srun(variables: Variables, launcher: _Launcher) -> bool:
    """Whether `srun --mpi=pmi2` has set the variables. An `mpirun` in a Slurm job has other numbers or other variables."""
    pairs = ((launcher.size, "SLURM_STEP_NUM_TASKS"), (launcher.rank, "SLURM_PROCID"))
    return launcher.name == "PMI" and all(variables.get(mpi) == variables[slurm] for mpi, slurm in pairs)


def _first_integer(variables: Variables, names: tuple[str, ...]) -> int | None:
    return next((read_integer(variables, name) for name in names if not missing(variables, (name,))), None)


def _first_host(variables: Variables, count: int) -> str:
    """Returns the host of process 0: the first host of the batch job, or the host of `mpirun`."""
    if nodes := variables.get("SLURM_JOB_NODELIST") or variables.get("SLURM_NODELIST"):
        return expand_hostlist(nodes)[0]
    if path := variables.get("PBS_NODEFILE"):
        try:
            with open(path, encoding="utf-8") as file:
                if host := file.readline().strip():
                    return host
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"PBS_NODEFILE is {path!r}, which cannot be read: {error}") from error
    # Open MPI 4: "1314521088.0;tcp6://[fe80::1,2620::2]:43370" or "1531576320.0;tcp://10.96.0.1,10.148.0.1:34911"
    uri = variables.get("OMPI_MCA_orte_hnp_uri", "")
    if match := re.search(r"tcp6?://\[?([^,\]/;]+?)(?:[,\]]|:[0-9]+(?:;|$))", uri):
        return match[1]
    # Open MPI 5: "prterun-HOST-PID@1"
    if match := re.fullmatch(r"prterun-(.+)-[0-9]+@[0-9]+", variables.get("PMIX_NAMESPACE", "")):
        return match[1]
    raise ValueError(
        f"MPI started {count} processes, and some are on other hosts, but the host of process 0 is unknown. Set "
        "JAX_COORDINATOR_ADDRESS to that host with a free port on all processes: with Open MPI `mpirun -x "
        "JAX_COORDINATOR_ADDRESS=HOST:8476 ...`, with MPICH and Intel MPI `mpirun -genv JAX_COORDINATOR_ADDRESS HOST:8476 ...`."
    )
