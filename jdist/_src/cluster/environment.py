"""The processes of explicit variables, of `jdist run`, JAX, torchrun or the Kubeflow operators."""

import os
import re
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


class _VariableGroup(NamedTuple):
    """The variables of a launcher. `is_explicit`: size or rank is enough to select the group, and then all are needed."""

    size: str
    rank: str
    address: tuple[str, ...]  # one variable, or the host and the port
    is_explicit: bool = True

    @property
    def names(self) -> tuple[str, ...]:
        return (*self.address, self.size, self.rank)


_TORCHRUN = _VariableGroup("WORLD_SIZE", "RANK", ("MASTER_ADDR", "MASTER_PORT"))
_GROUPS = (
    _VariableGroup("JDIST_NUM_PROCESSES", "JDIST_PROCESS_ID", ("JDIST_COORDINATOR_ADDRESS",)),
    _VariableGroup("JAX_NUM_PROCESSES", "JAX_PROCESS_ID", ("JAX_COORDINATOR_ADDRESS",)),
    _TORCHRUN,
    # Of the Kubeflow operators. Other programs use these names too, so only a complete group counts.
    _VariableGroup("NUM_PROCESSES", "PROCESS_ID", ("COORDINATOR_ADDRESS", "COORDINATOR_PORT"), is_explicit=False),
    _VariableGroup("PET_NNODES", "PET_NODE_RANK", ("PET_MASTER_ADDR", "PET_MASTER_PORT"), is_explicit=False),
    _VariableGroup("PADDLE_NNODES", "HOSTNAME", ("PADDLE_MASTER",), is_explicit=False),
)
# A number or an index. The index of a pod of a PaddleJob is the end of its name; servers are not processes of the cluster.
_NUMBERS = {"PET_NNODES": "[0-9]+", "HOSTNAME": ".*-worker-([0-9]+)"}
_ADVICE = "Set them on each process, the same except for the index, or none of them."


class EnvironmentClusterResolver(SimpleClusterResolver):
    """The processes of the variables that `jdist run`, a user of JAX, torchrun, or an operator of Kubeflow sets.

    These groups are tried in order. The first with a number of processes or an index is used, and must be complete:

    - `JDIST_COORDINATOR_ADDRESS`, `JDIST_NUM_PROCESSES`, `JDIST_PROCESS_ID`
    - `JAX_COORDINATOR_ADDRESS`, `JAX_NUM_PROCESSES`, `JAX_PROCESS_ID`, which the JAX runtime of a Kubeflow TrainJob sets too
    - `MASTER_ADDR`, `MASTER_PORT`, `WORLD_SIZE`, `RANK`, which torchrun, Azure ML, PyTorchJob and XGBoostJob set. `LOCAL_RANK`
      and `LOCAL_WORLD_SIZE` divide the GPUs of a host between its processes. Where torchrun itself listens on `MASTER_PORT`,
      process 0 listens on the next port.

    These are used only if they are complete, with one process per pod:

    - `COORDINATOR_ADDRESS`, `COORDINATOR_PORT`, `NUM_PROCESSES`, `PROCESS_ID`, of a Kubeflow JAXJob
    - `PET_MASTER_ADDR`, `PET_MASTER_PORT`, `PET_NNODES`, `PET_NODE_RANK`, of the torch runtime of a Kubeflow TrainJob
    - `PADDLE_MASTER`, `PADDLE_NNODES`, and `HOSTNAME` that ends with `-worker-` and an index, of a Kubeflow PaddleJob

    Args:
        environ: The environment variables to read; default: `os.environ`.

    Raises:
        ClusterNotFoundError: No number of processes and no index is set. An address alone is used by other resolvers.
        ValueError: A group is incomplete, or its values are not valid.

    Example:
        >>> resolver = EnvironmentClusterResolver(
        ...     environ={
        ...         "MASTER_ADDR": "10.0.0.1",
        ...         "MASTER_PORT": "29500",
        ...         "WORLD_SIZE": "4",
        ...         "RANK": "3",
        ...     }
        ... )
        >>> resolver.master(), resolver.num_processes, resolver.process_id
        ('10.0.0.1:29500', 4, 3)
    """

    _source: ClassVar[str] = "the environment"

    def __init__(self, *, environ: Mapping[str, str] | None = None):
        variables = os.environ if environ is None else environ
        group = next((group for group in _GROUPS if _is_set(variables, group)), None)
        if group is None:
            raise ClusterNotFoundError(_not_found_message(variables))
        check_complete(variables, group.names, _ADVICE)
        if match := re.fullmatch(_NUMBERS.get(group.rank, ""), variables[group.rank].strip()):
            variables = {**variables, group.rank: match[1]}
        count = read_integer(variables, group.size, 1)
        index = check_index(read_integer(variables, group.rank), group.rank, count, group.size)
        address = _address(variables, group)
        # The processes of `jdist run` see their own GPUs only, and JAX reads JAX_LOCAL_DEVICE_IDS.
        has_local = group is _TORCHRUN and not missing(variables, ("LOCAL_RANK", "LOCAL_WORLD_SIZE"))
        share = None
        if has_local:
            local_count = read_integer(variables, "LOCAL_WORLD_SIZE", 1)
            local_id = check_index(read_integer(variables, "LOCAL_RANK"), "LOCAL_RANK", local_count, "LOCAL_WORLD_SIZE")
            share = share_gpus(variables, local_id, local_count)
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
    for group in _GROUPS[: _GROUPS.index(_TORCHRUN)]:
        if not missing(variables, group.address) and len(missing(variables, group.names)) == 2:
            check_complete(variables, group.names, _ADVICE)


def _is_set(variables: Variables, group: _VariableGroup) -> bool:
    if group.is_explicit:
        return len(missing(variables, (group.size, group.rank))) < 2
    return not missing(variables, group.names) and all(
        re.fullmatch(_NUMBERS.get(name, ".*"), variables[name].strip()) for name in (group.size, group.rank)
    )


def _address(variables: Variables, group: _VariableGroup) -> str:
    if len(group.address) == 1:
        return check_coordinator(variables[group.address[0]].strip(), group.address[0])
    host, port = group.address
    # The agent of torchrun has a store at MASTER_PORT, which torch's processes share.
    is_taken = group is _TORCHRUN and variables.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    address = with_port(variables[host].strip(), read_integer(variables, port, 1) + is_taken)
    return check_coordinator(address, f"{host} with {port}{' + 1' if is_taken else ''}")


def _not_found_message(variables: Variables) -> str:
    explicit = [group for group in _GROUPS if group.is_explicit]
    groups = "; ".join(", ".join(group.names) for group in explicit)
    present = [name for group in explicit for name in group.address if not missing(variables, (name,))]
    only = f"Only {', '.join(present)} {'is' if len(present) == 1 else 'are'} set. " if present else ""
    return (
        f"No variables of processes are set. {only}Set one of these groups on each process: {groups}. `jdist run` sets the "
        "first."
    )
