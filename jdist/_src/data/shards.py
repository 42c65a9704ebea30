"""The rows of a global batch that a process holds, and the shards of the data that they are read from."""

import dataclasses
import enum
from typing import Literal, NamedTuple, TypeAlias

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jdist._src.core.arguments import as_int, enum_member
from jdist._src.core.tree import one_line
from jdist._src.devices.mesh import Replicas
from jdist._src.values.batch_layout import BatchLayout
from jdist._src.values.process_calls import processes_of


class AutoShardPolicy(enum.Enum):
    """The part of the source that each process reads, where several processes feed a strategy.

    Functions accept a member or its name: `auto_shard="file"`.

    Attributes:
        AUTO: FILE for `jdist.data.Files` with at least one file per process, else DATA.
        FILE: Each process reads its own files.
        DATA: Each process has the complete source, and takes the rows of its own replicas from each batch.
        OFF: The source of each process is its own part of the data, for the replicas of that process.
        HINT: As OFF, with the source `source.shard(num_shards, index)`.

    Example:
        >>> jdist.data.AutoShardPolicy.of("file")
        <AutoShardPolicy.FILE: 1>
    """

    OFF = -1
    AUTO = 0
    FILE = 1
    DATA = 2
    HINT = 3

    @classmethod
    def of(cls, policy: "AutoShardPolicy | str") -> "AutoShardPolicy":
        """Returns the policy with that name, in any case.

        Raises:
            ValueError: There is no such policy.
        """
        return enum_member(cls, policy, f"{one_line(policy)} is not a policy for `auto_shard`")


AutoShard: TypeAlias = AutoShardPolicy | Literal["auto", "file", "data", "off", "hint"]


@dataclasses.dataclass(frozen=True)
class InputContext:
    """The input pipeline of one process, as `Strategy.distribute_datasets_from_function` passes it to its function.

    Attributes:
        num_input_pipelines: The number of input pipelines: one per process.
        input_pipeline_id: The index of this pipeline, from 0.
        num_replicas_in_sync: The number of replicas that all pipelines feed together.

    Raises:
        ValueError: A number is less than 1, or `input_pipeline_id` is not less than `num_input_pipelines`.
        TypeError: An argument is not an integer.

    Example:
        >>> print(InputContext(2, 1, 8))
        jdist.InputContext(input pipeline id 1, total: 2)
    """

    num_input_pipelines: int = 1
    input_pipeline_id: int = 0
    num_replicas_in_sync: int = 1

    def __post_init__(self) -> None:
        for name, minimum in (("num_input_pipelines", 1), ("input_pipeline_id", 0), ("num_replicas_in_sync", 1)):
            as_int(f"`{name}`", getattr(self, name), minimum)
        if self.input_pipeline_id >= self.num_input_pipelines:
            raise ValueError(
                f"`input_pipeline_id` must be less than `num_input_pipelines`, got input_pipeline_id={self.input_pipeline_id} "
                f"and num_input_pipelines={self.num_input_pipelines}. The pipelines are numbered from 0."
            )

    def __str__(self) -> str:
        return f"jdist.InputContext(input pipeline id {self.input_pipeline_id}, total: {self.num_input_pipelines})"

    def get_per_replica_batch_size(self, global_batch_size: int) -> int:
        """Returns the number of examples of a global batch per replica.

        Raises:
            ValueError: The number of replicas does not divide the batch.
            TypeError: `global_batch_size` is not an integer.

        Example:
            >>> InputContext(num_replicas_in_sync=6).get_per_replica_batch_size(12)
            2
        """
        as_int("`global_batch_size`", global_batch_size)
        check_split(global_batch_size, self.num_replicas_in_sync, argument="global_batch_size")
        return global_batch_size // self.num_replicas_in_sync


def check_split(size: int, parts: int, what: str = "replicas", argument: str = "batch_size", advice: str = "") -> None:
    """Raises ValueError if a batch of `size` examples cannot be split evenly over `parts` replicas or devices (`what`)."""
    if size < 1 or size % parts:
        smaller, larger = size // parts * parts, (size // parts + 1) * parts
        valid_sizes = f"{smaller} or {larger}" if smaller > 0 else str(max(larger, parts))
        raise ValueError(
            f"A batch of {size} examples cannot be split over {parts} {what} ({size % parts} left over). "
            f"`{argument}` is the number of examples of all {what} together: use {valid_sizes}{advice}."
        )


PAD_EVERY_BATCH = ', or pass remainder="pad", which fills up every batch with rows of weight 0'  # advice for messages


class ShardRows(NamedTuple):
    """The rows that a process takes from one shard of the data in each batch.

    Attributes:
        shard: The index of the shard.
        size: The number of examples of a batch that come from the shard.
        rows: The indices of the shard's rows that the process holds, `[row]`, ascending. Rows from `size` on are padding, which
            fills up the batch to a multiple of the replicas.
    """

    shard: int
    size: int
    rows: np.ndarray


@dataclasses.dataclass(frozen=True)
class ProcessShare:
    """The part of each global batch that a process holds: the rows of its replicas. Replica i has the i-th of equal blocks.

    Where one replica spans several devices, the devices that split its batch take the place of replicas here.

    Attributes:
        replicas: The replicas of this process, in ascending order.
        num_replicas: The number of replicas of all processes.
        pipeline: The index of this process among the processes that feed the strategy.
        num_pipelines: The number of these processes.
    """

    replicas: tuple[int, ...]
    num_replicas: int
    pipeline: int = 0
    num_pipelines: int = 1

    def rows_of_shards(self, size: int, shards: int) -> list[ShardRows]:
        """Returns the rows of this process in a batch of `size` examples that consists of one block of rows from each shard."""
        per_replica = self.rows_per_replica(size)
        local_rows = np.concatenate([np.arange(i * per_replica, (i + 1) * per_replica) for i in self.replicas])
        counts = [size * (shard + 1) // shards - size * shard // shards for shard in range(shards)]
        parts, start = [], 0
        for shard, count in enumerate(counts):
            # Padding is distributed over the blocks, so that the rows of a process come from as few shards as possible.
            stop = max(per_replica * self.num_replicas * (shard + 1) // shards, start + count)
            if len(rows := local_rows[(local_rows >= start) & (local_rows < stop)] - start):
                parts.append(ShardRows(shard, count, rows))
            start = stop
        return parts

    def rows_of_own_shard(self, size: int) -> list[ShardRows]:
        """Returns the rows of this process in a batch of `size` examples if it has its own shard."""
        return [
            ShardRows(self.pipeline, self.own_size(size), np.arange(self.rows_per_replica(size) * len(self.replicas)))
        ]

    def rows_per_replica(self, size: int) -> int:
        """Returns the number of rows of each replica in a batch of `size` examples, including padding."""
        return -(-size // self.num_replicas)

    def own_size(self, size: int) -> int:
        """Returns the number of examples that this process contributes to a batch of `size` if it has its own shard."""
        edges = [size * i // self.num_replicas for i in range(self.num_replicas + 1)]
        return sum(edges[i + 1] - edges[i] for i in self.replicas)


def process_share(replicas: Replicas, by_replica: bool = False) -> ProcessShare:
    """Returns the share of this process in the batches of a strategy.

    Args:
        replicas: The replicas of the strategy.
        by_replica: Whether the source yields the batch of one replica at a time.
    """
    processes = processes_of(replicas.mesh)
    process = jax.process_index()
    pipeline = processes.index(process) if process in processes else 0
    if by_replica and replicas.batch_axes and len(processes) == 1:
        return ProcessShare((0,), 1)
    return ProcessShare(replicas.local_parts, replicas.num_parts, pipeline, len(processes))


def layout_share(layout: BatchLayout, replicas: Replicas) -> ProcessShare:
    """Returns the share of this process in batches that are split by a layout: the rows that one of its devices holds."""
    share = process_share(replicas)
    axes = layout.row_axes or ()
    if axes == layout.default_axes:
        return share
    num_parts = layout.num_parts(axes)
    sharding = NamedSharding(replicas.mesh, PartitionSpec(axes))
    starts = sharding.addressable_devices_indices_map((num_parts,)).values()
    parts = {index[0].start or 0 for index in starts if index is not None}
    return dataclasses.replace(share, replicas=tuple(sorted(parts)), num_replicas=num_parts)
