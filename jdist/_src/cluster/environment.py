"""The processes of explicit variables: those of `jdist run`, of JAX, and of torchrun."""

import os
from collections.abc import Mapping
from typing import ClassVar, NamedTuple

from jdist._src.cluster.gpus import share_gpus
from jdist._src.cluster.resolver import ClusterNotFoundError
from jdist._src.cluster.settings import (
    Variables,
    check_complete,
    check_coordinator,
    check_index,
    missing,
    read_integer,
    unknown_addresses,
    with_port,
)
from jdist._src.cluster.simple import SimpleClusterResolver


class _Family(NamedTuple):
    count: str
    index: str
    address: tuple[str, ...]  # one variable, or the host and the port

    @property
    def names(self) -> tuple[str, ...]:
        return (*self.address, self.count, self.index)


_FAMILIES = (
    _Family("JDIST_NUM_PROCESSES", "JDIST_PROCESS_ID", ("JDIST_COORDINATOR_ADDRESS",)),
    _Family("JAX_NUM_PROCESSES", "JAX_PROCESS_ID", ("JAX_COORDINATOR_ADDRESS",)),
    _Family("WORLD_SIZE", "RANK", ("MASTER_ADDR", "MASTER_PORT")),
)
_ADVICE = "Set them on each process, the same except for the index, or none of them."


class EnvironmentClusterResolver(SimpleClusterResolver):
    """The processes of the variables that `jdist run`, a user of JAX, or torchrun sets.

    The first of these groups of which the number of processes or the index is set is used, and must be complete:

    - `JDIST_COORDINATOR_ADDRESS`, `JDIST_NUM_PROCESSES`, `JDIST_PROCESS_ID`
    - `JAX_COORDINATOR_ADDRESS`, `JAX_NUM_PROCESSES`, `JAX_PROCESS_ID`
    - `MASTER_ADDR`, `MASTER_PORT`, `WORLD_SIZE`, `RANK`, which torchrun, Azure ML and Kubeflow set. `LOCAL_RANK` and
      `LOCAL_WORLD_SIZE` divide the GPUs of a host between its processes. Where torchrun itself listens on `MASTER_PORT`,
      process 0 listens on the next port.

    Args:
        environ: The environment variables to read; default: `os.environ`.

    Raises:
        ClusterNotFoundError: No number of processes and no index is set. An address alone is used by other resolvers.
        ValueError: A group is incomplete, or its values are not valid.

    Example:
        >>> resolver = EnvironmentClusterResolver(
        ...     environ={"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500", "WORLD_SIZE": "4", "RANK": "3"}
        ... )
        >>> resolver.master(), resolver.num_processes, resolver.process_id
        ('10.0.0.1:29500', 4, 3)
    """

    _source: ClassVar[str] = "the environment"

    def __init__(self, *, environ: Mapping[str, str] | None = None):
        variables = os.environ if environ is None else environ
        family = next((f for f in _FAMILIES if len(missing(variables, (f.count, f.index))) < 2), None)
        if family is None:
            raise ClusterNotFoundError(_not_found_message(variables))
        check_complete(variables, family.names, _ADVICE)
        count = read_integer(variables, family.count, 1)
        index = check_index(read_integer(variables, family.index), family.index, count, family.count)
        address = _address(variables, family)
        # The processes of `jdist run` see their own GPUs only, and JAX reads JAX_LOCAL_DEVICE_IDS.
        is_torchrun = family is _FAMILIES[-1]
        has_local = is_torchrun and not missing(variables, ("LOCAL_RANK", "LOCAL_WORLD_SIZE"))
        share = _share(variables) if has_local else None
        super().__init__(
            unknown_addresses(count, address),
            task_type="worker",
            task_id=index,
            environment="variables",
            coordinator_address=address,
            num_accelerators=share.accelerators if share else None,
            local_device_ids=share.local_device_ids if share else None,
        )


def check_no_lone_address(variables: Variables) -> None:
    """Raises ValueError if the address of the coordinator is set, but neither the number of processes nor the index is."""
    for family in _FAMILIES[:-1]:
        if not missing(variables, family.address) and len(missing(variables, family.names)) == 2:
            check_complete(variables, family.names, _ADVICE)


def _share(variables: Variables):
    local_count = read_integer(variables, "LOCAL_WORLD_SIZE", 1)
    local_id = check_index(read_integer(variables, "LOCAL_RANK"), "LOCAL_RANK", local_count, "LOCAL_WORLD_SIZE")
    return share_gpus(variables, local_id, local_count)


def _address(variables: Variables, family: _Family) -> str:
    if len(family.address) == 1:
        return check_coordinator(variables[family.address[0]].strip(), family.address[0])
    host, port = family.address
    # The agent of torchrun has a store at MASTER_PORT, which torch's processes share.
    is_taken = variables.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    address = with_port(variables[host].strip(), read_integer(variables, port, 1) + is_taken)
    return check_coordinator(address, f"{host} with {port}{' + 1' if is_taken else ''}")


def _not_found_message(variables: Variables) -> str:
    groups = "; ".join(", ".join(family.names) for family in _FAMILIES)
    present = [name for family in _FAMILIES for name in family.address if not missing(variables, (name,))]
    only = f"Only {', '.join(present)} {'is' if len(present) == 1 else 'are'} set. " if present else ""
    return (
        f"No variables of processes are set. {only}Set one of these groups on each process: {groups}. `jdist run` sets the "
        "first."
    )
