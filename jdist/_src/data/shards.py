"""Which rows of a global batch a process holds, and which part of the data they come from."""

import dataclasses
import enum
from typing import NamedTuple

import jax
import numpy as np

from jdist._src.core.arguments import as_int, enum_member
from jdist._src.devices.mesh import Replicas


class AutoShardPolicy(enum.Enum):
    """Who reads what, where several processes feed one strategy. Wherever one is asked for, its name does as well.

    Attributes:
        AUTO: FILE for `jdist.data.Files` with at least a file a process, else DATA.
        FILE: Every process reads its own files.
        DATA: Every process has the whole source, and takes the rows of its own replicas from each batch.
        OFF: The source of each process is its own share: what it gives goes to the replicas of that process.
        HINT: As OFF, of `source.shard(num_shards, index)`.
    """

    OFF = -1
    AUTO = 0
    FILE = 1
    DATA = 2
    HINT = 3

    @classmethod
    def of(cls, policy: "AutoShardPolicy | str") -> "AutoShardPolicy":
        """The policy of that name.

        Raises:
            ValueError: There is none.
        """
        return enum_member(cls, policy, f"{policy!r} is no way to shard")


@dataclasses.dataclass(frozen=True)
class InputContext:
    """What an input pipeline knows of itself: what `Strategy.distribute_datasets_from_function` gives its function.

    Attributes:
        num_input_pipelines: How many there are: one a process.
        input_pipeline_id: Which one this is, from 0.
        num_replicas_in_sync: How many replicas all of them feed.

    Raises:
        ValueError: There are fewer than one pipeline or replica, or `input_pipeline_id` is not one of the pipelines.
        TypeError: An argument is not an integer.

    Example:
        >>> print(InputContext(2, 1, 8))
        jdist.InputContext(input pipeline id 1, total: 2)
    """

    num_input_pipelines: int = 1
    input_pipeline_id: int = 0
    num_replicas_in_sync: int = 1

    def __post_init__(self) -> None:
        for name, least in (("num_input_pipelines", 1), ("input_pipeline_id", 0), ("num_replicas_in_sync", 1)):
            as_int(f"`{name}`", getattr(self, name), least)
        if self.input_pipeline_id >= self.num_input_pipelines:
            raise ValueError(
                f"`input_pipeline_id` must be less than `num_input_pipelines`, got input_pipeline_id={self.input_pipeline_id} "
                f"and num_input_pipelines={self.num_input_pipelines}. The pipelines are numbered from 0."
            )

    def __str__(self) -> str:
        return f"jdist.InputContext(input pipeline id {self.input_pipeline_id}, total: {self.num_input_pipelines})"

    def get_per_replica_batch_size(self, global_batch_size: int) -> int:
        """How many examples of a global batch each replica gets.

        Raises:
            ValueError: The replicas cannot have as many each.

        Example:
            >>> InputContext(num_replicas_in_sync=6).get_per_replica_batch_size(12)
            2
        """
        as_int("`global_batch_size`", global_batch_size)
        check_split(global_batch_size, self.num_replicas_in_sync, argument="global_batch_size")
        return global_batch_size // self.num_replicas_in_sync


def check_split(size: int, parts: int, what: str = "replicas", argument: str = "batch_size") -> None:
    """Raises ValueError if a batch of `size` examples cannot be split evenly over so many `what`."""
    if size < 1 or size % parts:
        down, up = size // parts * parts, (size // parts + 1) * parts
        near = f"{down} or {up}" if down > 0 else str(max(up, parts))
        raise ValueError(
            f"A batch of {size} examples cannot be split over {parts} {what} ({size % parts} left over). "
            f"`{argument}` counts the examples of all {what} together: take {near}."
        )


class ShardRows(NamedTuple):
    """What a process takes from one shard of the data in each batch.

    Attributes:
        shard: Which one.
        size: How many rows of a batch come from it.
        rows: Which of these the process holds, `[row]`.
    """

    shard: int
    size: int
    rows: np.ndarray


@dataclasses.dataclass(frozen=True)
class ProcessShare:
    """Which part of each global batch a process holds: that of its replicas. Replica i has the i-th of equal blocks of rows.

    Where one replica spans devices, the devices that share its batch stand for replicas here.

    Attributes:
        replicas: The replicas of this process, in ascending order.
        num_replicas: How many there are in all.
        pipeline: The number of this process among those that feed the strategy.
        num_pipelines: How many these are.
    """

    replicas: tuple[int, ...]
    num_replicas: int
    pipeline: int = 0
    num_pipelines: int = 1

    def common(self, size: int, shards: int) -> list[ShardRows]:
        """What this process takes where a batch of `size` is one block of rows after the other, one from each shard."""
        each = size // self.num_replicas
        mine = np.concatenate([np.arange(i * each, (i + 1) * each) for i in self.replicas])
        edges = [size * shard // shards for shard in range(shards + 1)]
        parts = []
        for shard, (start, stop) in enumerate(zip(edges, edges[1:], strict=False)):
            if len(rows := mine[(mine >= start) & (mine < stop)] - start):
                parts.append(ShardRows(shard, stop - start, rows))
        return parts

    def own(self, size: int) -> list[ShardRows]:
        """What this process takes where all its rows come from a shard of its own."""
        here = size // self.num_replicas * len(self.replicas)
        return [ShardRows(self.pipeline, here, np.arange(here))]


def process_share(replicas: Replicas, by_replica: bool = False) -> ProcessShare:
    """The share of this process in what feeds the replicas; `by_replica`: if it is read a replica's batch at a time."""
    processes = sorted({device.process_index for device in replicas.mesh.devices.flat})
    here = jax.process_index()
    number = processes.index(here) if here in processes else 0
    if by_replica and replicas.split and len(processes) == 1:
        return ProcessShare((0,), 1)
    return ProcessShare(replicas.local_parts, replicas.num_parts, number, len(processes))
