"""The GPUs of each process, where several processes share a host.

Without a division each process would use all GPUs of its host: JAX takes every GPU that it sees.
"""

from typing import NamedTuple

from jdist._src.cluster.settings import Variables

_VISIBLE = ("CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES")


class GpuShare(NamedTuple):
    """The GPUs of one process.

    Attributes:
        count: The number of GPUs, or None if unknown.
        local_device_ids: The GPUs among the visible ones, or None if all visible GPUs belong to this process.
    """

    count: int | None
    local_device_ids: tuple[int, ...] | None

    @property
    def accelerators(self) -> dict[str, int] | None:
        """The number of accelerators of each kind, or None if unknown."""
        return None if self.count is None else {"GPU": self.count} if self.count else {}


def share_gpus(
    variables: Variables,
    local_id: int,
    local_count: int,
    *,
    per_process: int | None = None,
    per_host: int | None = None,
) -> GpuShare:
    """Returns the GPUs of the process `local_id` of `local_count` on this host: equal parts in order.

    A launcher may have divided the GPUs already, so that each process sees its own. If the number of GPUs is unknown, each
    process gets one, as in JAX.

    Args:
        variables: The environment variables, with the visible GPUs.
        local_id: The index of this process on its host.
        local_count: The number of processes on this host.
        per_process: The number of GPUs per process; default: an equal part.
        per_host: The number of GPUs of the host; default: the visible ones.

    Raises:
        ValueError: The processes need more GPUs than there are.
    """
    visible = _visible_count(variables)
    total = visible if per_host is None else per_host
    if per_process is not None and total is not None:
        # A process that sees exactly its GPUs does not show the number of the others.
        is_divided = per_host is None and visible == per_process
        if per_process * local_count > total and not is_divided:
            raise ValueError(
                f"{local_count} processes per host with {per_process} GPUs each need {per_process * local_count} GPUs, but the "
                f"host has {total}. Start fewer processes per host, or use fewer GPUs per process."
            )
    if per_process is not None:
        share = per_process
    elif total is not None:
        share = total // local_count
    else:
        return GpuShare(None, (local_id,) if local_count > 1 else None)
    if local_count == 1 and share == total:
        return GpuShare(share, None)
    if share == 0 or (visible is not None and visible <= share and visible != per_host):
        return GpuShare(visible if share == 0 else share, None)
    return GpuShare(share, tuple(range(local_id * share, (local_id + 1) * share)))


def _visible_count(variables: Variables) -> int | None:
    for name in _VISIBLE:
        if name in variables:
            devices = [device.strip() for device in variables[name].split(",")]
            return len([device for device in devices if device and device not in ("-1", "NoDevFiles")])
    return None
