"""What jdist asks of whoever knows the processes."""

from collections.abc import Mapping
from typing import Protocol, runtime_checkable


@runtime_checkable
class ClusterResolver(Protocol):
    """Who the processes are that compute together, and which of them this one is.

    Example:
        >>> alone = jdist.cluster.TPUClusterResolver(environ={"TPU_WORKER_HOSTNAMES": "localhost"})
        >>> isinstance(alone, jdist.cluster.ClusterResolver)
        True
    """

    @property
    def coordinator_address(self) -> str:
        """Host and port where process 0 listens, the same on every process."""
        ...

    @property
    def num_processes(self) -> int:
        """How many processes there are."""
        ...

    @property
    def process_id(self) -> int:
        """The number of this one, from 0."""
        ...

    @property
    def environment(self) -> str:
        """Where it was found."""
        ...

    @property
    def task_type(self) -> str:
        """What this process is for: a job of `cluster_spec()`."""
        ...

    @property
    def task_id(self) -> int:
        """The number of this process among those of its job."""
        ...

    def cluster_spec(self) -> dict[str, dict[int, str]]:
        """Of each job the addresses that are known, by task."""
        ...

    def master(self) -> str:
        """The address of the process that the others ask."""
        ...

    def num_accelerators(self) -> Mapping[str, int]:
        """How many accelerators of each kind a process has."""
        ...

    def initialize(self) -> None:
        """Joins the others, unless there are none or it has been done. To be called before JAX is used."""
        ...
