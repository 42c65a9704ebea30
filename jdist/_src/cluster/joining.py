"""Joins the processes of a cluster, for all resolvers."""

import atexit
import os
from collections.abc import Sequence

import jax

from jdist._src.cluster.rendezvous import await_service, compare_processes, split_address
from jdist._src.core import sigterm
from jdist._src.core.arguments import check_seconds
from jdist._src.core.backend_start import backend_start_line
from jdist._src.core.connections import is_loopback
from jdist._src.core.jax_compat import has_backend, use_loopback_for_cpu_collectives, write_compilation_cache
from jdist._src.core.process_messages import post_end_at_exit
from jdist._src.launch.notices import report_join_state


def join_processes(
    coordinator_address: str,
    num_processes: int,
    process_id: int,
    *,
    local_device_ids: Sequence[int] | None = None,
    timeout_seconds: float = 300.0,
) -> None:
    """Joins the other processes by `jax.distributed.initialize`, unless this process has joined or is alone.

    Before, all processes connect to process 0, which compares their number, indices, versions and programs. A difference is
    the same error on all of them.

    JAX's preemption service does not receive SIGTERM, unless the program uses it (`jdist.callbacks.Preemption`,
    `multihost_utils.reached_preemption_sync_point`): its default action ends the process.

    Args:
        coordinator_address: Host and port at which process 0 listens, the same on every process.
        num_processes: The number of processes.
        process_id: The index of this process.
        local_device_ids: The GPUs of this process among the visible GPUs of its host; default: all of them.
        timeout_seconds: The time in which all processes must join.

    Raises:
        ValueError: The address is not a host and a port, or this process has joined as another one.
        RuntimeError: JAX has started already, a process is missing or does not fit, or the port is in use.
    """
    check_seconds("timeout_seconds", timeout_seconds)
    if jax.distributed.is_initialized():
        _check_joined(num_processes, process_id)
        return
    if num_processes == 1:
        return
    if has_backend():
        raise RuntimeError(
            f"Process {process_id} of {num_processes} cannot join the others: JAX has started{backend_start_line()}, with the "
            "devices of this process only. Create the strategy, or call the resolver's `initialize()`, before the first use "
            "of JAX: before `jax.devices()`, and before the first array."
        )
    host, _ = split_address(coordinator_address)
    # By default JAX's service listens on all interfaces, also if the address is a loopback address.
    bind_address = os.environ.get("JAX_COORDINATOR_BIND_ADDRESS") or (
        coordinator_address if is_loopback(host) else None
    )
    bind_host = split_address(bind_address)[0] if bind_address else ""
    if is_loopback(host):
        use_loopback_for_cpu_collectives()
    # The launcher ends the wait for a process that ends before it joins.
    is_launched = os.environ.get("JDIST_NUM_PROCESSES") == str(num_processes)
    report = report_join_state if is_launched else lambda state: None
    report("joining")
    compare_processes(coordinator_address, process_id, num_processes, timeout_seconds, bind_host)
    if process_id:
        await_service(coordinator_address)
    atexit.register(report, "left")  # not called by `os._exit`
    with sigterm.action_unchanged():
        jax.distributed.initialize(
            coordinator_address,
            num_processes,
            process_id,
            local_device_ids,
            cluster_detection_method="deactivate",  # everything that JAX would detect is passed
            initialization_timeout=max(1, round(timeout_seconds)),
            coordinator_bind_address=bind_address,
        )
    report("joined")
    post_end_at_exit(process_id)
    if folder := os.environ.get("JDIST_COMPILATION_CACHE_DIR"):  # from `jdist run`, for this process only
        write_compilation_cache(folder)


def _check_joined(num_processes: int, process_id: int) -> None:
    joined = jax.process_count(), jax.process_index()
    if joined != (num_processes, process_id):
        raise ValueError(
            f"The cluster resolver describes process {process_id} of {num_processes}, but this process has joined as process "
            f"{joined[1]} of {joined[0]}. Omit the resolver, or pass the one that the processes joined with."
        )
