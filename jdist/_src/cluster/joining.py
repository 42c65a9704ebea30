"""Joins this process to the other processes of a cluster."""

from collections.abc import Sequence

import jax


def join_processes(
    coordinator_address: str, num_processes: int, process_id: int, *, local_device_ids: Sequence[int] | None = None
) -> None:
    """Joins the other processes by `jax.distributed.initialize`, unless it has been called or there is one process.

    Args:
        coordinator_address: The `"host:port"` where process 0 listens.
        num_processes: The number of processes.
        process_id: The index of this process.
        local_device_ids: The GPUs of this process among the visible GPUs of its host; None for all.

    Raises:
        RuntimeError: A JAX backend has started already, or the other processes cannot be reached.
    """
    if num_processes > 1 and not jax.distributed.is_initialized():
        jax.distributed.initialize(
            coordinator_address,
            num_processes,
            process_id,
            local_device_ids=local_device_ids,
            cluster_detection_method="deactivate",  # everything that JAX would detect is passed
        )
