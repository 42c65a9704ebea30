"""The `ClusterResolver` protocol, which every cluster resolver implements, and the error of an absent cluster."""

from collections.abc import Mapping
from typing import Protocol, runtime_checkable


@runtime_checkable
class ClusterResolver(Protocol):
    """The processes of a cluster, and the index of this process among them.

    Example:
        >>> resolver = jdist.cluster.TPUClusterResolver(
        ...     environ={"TPU_WORKER_HOSTNAMES": "localhost"}
        ... )
        >>> isinstance(resolver, jdist.cluster.ClusterResolver)
        True
    """

    @property
    def coordinator_address(self) -> str:
        """The address at which process 0 listens, host and port, the same on every process."""
        ...

    @property
    def num_processes(self) -> int:
        """The number of processes."""
        ...

    @property
    def process_id(self) -> int:
        """The index of this process, from 0."""
        ...

    @property
    def environment(self) -> str:
        """The source of the information, such as `"variables"`."""
        ...

    @property
    def task_type(self) -> str:
        """The job of this process: a key of `cluster_spec()`."""
        ...

    @property
    def task_id(self) -> int:
        """The index of this process in its job."""
        ...

    def cluster_spec(self) -> dict[str, dict[int, str]]:
        """Returns the known addresses of each job, by task index."""
        ...

    def master(self) -> str:
        """Returns the address of the coordinator."""
        ...

    def num_accelerators(self) -> Mapping[str, int]:
        """Returns the number of accelerators of each kind per process."""
        ...

    def initialize(self) -> None:
        """Joins the other processes by `jax.distributed.initialize`, unless it has been called. Call it before JAX is used."""
        ...


class ClusterNotFoundError(ValueError):
    """The source of a resolver does not describe a cluster, such as an environment variable that is not set.

    Settings that contradict each other or are incomplete are a plain ValueError. So a program can continue without a cluster,
    and wrong settings are still reported.

    Example:
        >>> try:
        ...     jdist.cluster.TFConfigClusterResolver(environ={})
        ... except jdist.cluster.ClusterNotFoundError as error:
        ...     print(error)
        TF_CONFIG is not set. Set it on each process to ...
    """
