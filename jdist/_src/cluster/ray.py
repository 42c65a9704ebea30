"""The processes that Ray Train started."""

import importlib
import os
import socket
from typing import Any, ClassVar

from jdist._src.cluster.gpus import share_gpus
from jdist._src.cluster.resolver import ClusterNotFoundError
from jdist._src.cluster.settings import unknown_addresses, with_port
from jdist._src.cluster.simple import SimpleClusterResolver
from jdist._src.core.optional_import import optional_import


class RayClusterResolver(SimpleClusterResolver):
    """The workers of a trainer of `ray.train`. Create it in the training function, on all workers.

    The number of processes and the index of this process are the world size and the world rank of `ray.train.get_context()`.
    Process 0 selects a free port, and Ray sends its address to the other workers, so the constructor waits for all of them.
    Processes that `jdist run --engine ray` starts have environment variables, which `resolve()` reads.

    Raises:
        ClusterNotFoundError: This process is not a worker of `ray.train`.
        ImportError: `ray.train` is not installed.

    Example:
        >>> def train():  # the training function of a `ray.train` trainer
        ...     jdist.cluster.RayClusterResolver().initialize()
        ...     strategy = jdist.MultiWorkerMirroredStrategy()
    """

    _source: ClassVar[str] = "`ray.train`"

    def __init__(self) -> None:
        train, collective = _import("ray.train"), _import("ray.train.collective")
        try:
            context = train.get_context()
            count, index = context.get_world_size(), context.get_world_rank()
        except RuntimeError as error:
            raise ClusterNotFoundError(
                "This process is not a worker of `ray.train`. Create the resolver in the training function of a trainer, or "
                "start the program with `jdist run --engine ray`."
            ) from error
        address = None
        if index == 0:
            # The port is free when the socket is closed, and another program may get it before process 0 listens.
            with socket.socket() as probe:
                probe.bind(("", 0))
                address = with_port(_import("ray.util").get_node_ip_address(), probe.getsockname()[1])
        address = collective.broadcast_from_rank_zero(address)
        super().__init__(
            unknown_addresses(count, address),
            task_type="worker",
            task_id=index,
            environment="ray.train",
            num_accelerators=share_gpus(os.environ, 0, 1).accelerators,  # Ray shows each worker its own GPUs
            coordinator_address=address,
        )


def _import(name: str) -> Any:
    with optional_import(f"`RayClusterResolver` needs {name}", "ray[train]"):
        return importlib.import_module(name)
