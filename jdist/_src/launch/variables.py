"""The environment variables of each process: its index, the coordinator, its devices, and its number of threads."""

import importlib.util
import os
import pathlib
import re
from collections.abc import Mapping, Sequence

_GPU_PLUGINS = ("jax_cuda12_plugin", "jax_cuda13_plugin")


def process_variables(
    environ: Mapping[str, str],
    *,
    coordinator: str,
    num_processes: int,
    first_process: int,
    num_local_processes: int,
    devices_per_process: int | None = None,
    gpus: list[str] | None = None,
    cores: int = 1,
) -> dict[int, dict[str, str]]:
    """Returns the environment variables of each process of this machine, by the index of the process.

    Variables for the number of threads that are set already are not changed.

    Args:
        environ: The environment variables of the launcher.
        coordinator: The address of the coordinator, `"host:port"`.
        num_processes: The number of processes on all machines.
        first_process: The index of the first process of this machine.
        num_local_processes: The number of processes of this machine.
        devices_per_process: The number of CPU devices per process; by default JAX's.
        gpus: The GPUs of this machine as in `CUDA_VISIBLE_DEVICES`, divided evenly over its processes; None for no change.
        cores: The number of cores that this machine can use.

    Example:
        >>> variables = process_variables(
        ...     {},
        ...     coordinator="h:1",
        ...     num_processes=4,
        ...     first_process=2,
        ...     num_local_processes=2,
        ...     cores=8,
        ... )
        >>> (
        ...     variables[3]["JDIST_PROCESS_ID"],
        ...     variables[3]["JDIST_LOCAL_PROCESS_ID"],
        ...     variables[3]["NPROC"],
        ... )
        ('3', '1', '4')
    """
    shared = {
        **environ,
        "JDIST_COORDINATOR_ADDRESS": coordinator,
        "JDIST_NUM_PROCESSES": str(num_processes),
        "PYTHONUNBUFFERED": "1",  # of Python programs that a process starts, too
    }
    if num_local_processes > 1:
        # `NPROC` is the size of XLA's thread pools. BLAS and torch read `OMP_NUM_THREADS`, and XLA does not.
        for name in ("NPROC", "OMP_NUM_THREADS"):
            shared.setdefault(name, str(max(1, cores // num_local_processes)))
    if devices_per_process is not None:
        shared["JAX_NUM_CPU_DEVICES"] = str(devices_per_process)
    variables = {}
    for i in range(num_local_processes):
        variables[first_process + i] = {
            **shared,
            "JDIST_PROCESS_ID": str(first_process + i),
            "JDIST_LOCAL_PROCESS_ID": str(i),
        }
        if gpus is not None:
            share = len(gpus) // num_local_processes
            variables[first_process + i]["CUDA_VISIBLE_DEVICES"] = ",".join(gpus[i * share : (i + 1) * share])
    return variables


def visible_gpus(environ: Mapping[str, str], folder: str = "/dev") -> list[str]:
    """Returns the NVIDIA GPUs of this machine, as in `CUDA_VISIBLE_DEVICES`; none if JAX does not use GPUs.

    Args:
        environ: The environment variables of the launcher.
        folder: The folder of the device files.
    """
    platforms = environ.get("JAX_PLATFORMS", "")
    if platforms and not re.search("cuda|gpu", platforms):
        return []
    if not any(map(importlib.util.find_spec, _GPU_PLUGINS)):
        return []
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return [gpu.strip() for gpu in visible.split(",") if gpu.strip()]
    return [str(i) for i in range(len([name for name in os.listdir(folder) if re.fullmatch("nvidia[0-9]+", name)]))]


def divisible_gpus(
    environ: Mapping[str, str], num_local_processes: int, gpus_per_process: int | None, folder: str = "/dev"
) -> list[str] | None:
    """Returns the NVIDIA GPUs that the processes of this machine divide among themselves; None if JAX does not use GPUs.

    Args:
        environ: The environment variables of the launcher.
        num_local_processes: The number of processes of this machine.
        gpus_per_process: The number of GPUs per process; by default all GPUs are divided.
        folder: The folder of the device files.

    Raises:
        ValueError: The GPUs cannot be divided evenly.
    """
    gpus = visible_gpus(environ, folder)
    if not gpus:
        return None
    source = "this machine has" if environ.get("CUDA_VISIBLE_DEVICES") is None else "CUDA_VISIBLE_DEVICES contains"
    needed = num_local_processes * (gpus_per_process or 1)
    count = f"{source} {len(gpus)} GPU{'s' * (len(gpus) > 1)}"
    if needed > len(gpus):
        raise ValueError(
            f"{num_local_processes} processes with {gpus_per_process or 1} GPU per process need {needed} GPUs, but {count}. "
            "Start fewer processes, or set JAX_PLATFORMS=cpu to use CPU devices."
        )
    if gpus_per_process is None and len(gpus) % num_local_processes:
        raise ValueError(
            f"{count}, which cannot be divided evenly over {num_local_processes} processes. Change `-n`, or pass "
            f"`--devices-per-process {len(gpus) // num_local_processes}` to leave {len(gpus) % num_local_processes} unused."
        )
    return gpus[:needed] if gpus_per_process else gpus


def gpus_of_slots(gpus: Sequence[str], num_slots: int, slots: Sequence[int]) -> list[str]:
    """Returns the GPUs of some of the slots among which the GPUs of this machine are divided evenly.

    Example:
        >>> gpus_of_slots(["0", "1", "2", "3"], 2, [1])
        ['2', '3']
    """
    share = len(gpus) // num_slots
    return [gpu for slot in slots for gpu in gpus[slot * share : (slot + 1) * share]]


def usable_cores(folder: str = "/sys/fs/cgroup") -> int:
    """Returns the number of cores that this process can use: the CPU affinity and the CPU quota of the container.

    Args:
        folder: The control group of this process.

    Example:
        >>> usable_cores() >= 1
        True
    """
    # `os.process_cpu_count` is new in Python 3.13; macOS does not have an affinity.
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = (pathlib.Path(folder) / "cpu.max").read_text().split()
        return cores if quota == "max" else max(1, min(cores, round(int(quota) / int(period))))
    except (OSError, ValueError):  # no control groups of version 2
        return cores
