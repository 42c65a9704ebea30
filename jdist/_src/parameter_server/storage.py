"""The storage of a state on servers: which server stores which rows of a leaf."""

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp


class Shard(NamedTuple):
    """Consecutive rows of a leaf, or a complete leaf.

    Attributes:
        server: The number of the server that stores them.
        start: The first row; 0 for a complete leaf.
        stop: The row after the last; None for a complete leaf.
    """

    server: int
    start: int = 0
    stop: int | None = None


@dataclasses.dataclass
class LeafStorage:
    """A leaf of the state as arrays on the servers.

    Mutable: an update of `LocalExecutor` replaces the arrays, and reuses their memory.

    Attributes:
        shape: The shape of the leaf.
        dtype: The dtype of the leaf.
        shards: The rows that each array contains. A scalar has a copy on each server.
        arrays: The arrays; with `RayExecutor`, the key of each array on its server.
    """

    shape: tuple[int, ...]
    dtype: Any
    shards: tuple[Shard, ...]
    arrays: list[Any]


def rows_of(x: Any, shard: Shard) -> Any:
    """Returns the rows of an array, or of a tracer, that a shard contains."""
    return x if shard.stop is None else x[shard.start : shard.stop]


def is_split(shards: Sequence[Shard]) -> bool:
    """Whether each shard contains a part of the leaf, so that all of them together are its value."""
    return shards[0].stop is not None


def to_arrays(x: Any, shards: Sequence[Shard], devices: Sequence[jax.Device]) -> list[jax.Array]:
    """Returns a copy of an array as one array per shard, each on the device of its server."""
    values = [rows_of(x, shard) for shard in shards]
    return jax.device_put(values, [devices[shard.server] for shard in shards], may_alias=False)


def joined(arrays: Sequence[Any], shards: Sequence[Shard]) -> Any:
    """Returns the value of a leaf, given its arrays on one device."""
    return jnp.concatenate(arrays) if is_split(shards) and len(arrays) > 1 else arrays[0]
