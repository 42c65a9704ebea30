"""Batches on the devices, ahead of the step that takes them."""

import collections
import itertools
import logging
import numbers
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from jdist._tree import PyTree, named_leaves, spec
from jdist.data.order import Order
from jdist.mesh import local_replicas, per_replica_sharding
from jdist.values.per_replica import PerReplica

_log = logging.getLogger("jdist")
_AHEAD = 2  # one batch that the step takes, and one on its way


class DistributedDataset:
    """Batches of examples, one part a replica. Made by `Strategy.distribute_dataset`; every `for` starts anew.

    A batch is `PerReplica`, leaves `[replica, batch / replica, ...]`; the replicas hold consecutive rows of the global
    batch. With `remainder="pad"` an element is `(batch, weights)`: weights `[replica, batch / replica]`, float32, are 1
    for an example and 0 for a row that fills the last batch up.
    """

    def __init__(self, arrays: PyTree, order: Order, epochs: int, mesh: Mesh):
        _check(arrays, order, epochs, mesh)
        self._arrays = jax.tree.map(np.asarray, arrays)
        self._order = order
        self._epochs = epochs
        self._mesh = mesh
        if order.left_out:
            _log.warning(
                "distribute_dataset leaves out %d of %d examples an epoch, which do not fill a batch of %d. "
                'remainder="pad" keeps them.',
                order.left_out,
                order.num_examples,
                order.batch_size,
            )

    def __len__(self) -> int:
        """How many batches there are, all epochs together."""
        return self._order.batches * self._epochs

    def __iter__(self) -> Iterator[Any]:
        # `device_put` returns before the data has arrived, so to be ahead is to have asked.
        ahead: collections.deque[Any] = collections.deque()
        for batch in itertools.chain(self._batches(), itertools.repeat(None, _AHEAD - 1)):
            ahead.append(batch)
            if len(ahead) == _AHEAD and (ready := ahead.popleft()) is not None:
                yield ready

    def _batches(self) -> Iterator[Any]:
        for epoch in range(self._epochs):
            yield from map(self._place, self._order.epoch_batches(epoch))

    def _place(self, rows: np.ndarray) -> Any:
        size = self._order.batch_size
        # A row that fills up repeats the first example: its values are harmless, its weight is zero.
        filled = np.concatenate([rows, np.full(size - len(rows), rows[0])]) if len(rows) < size else rows
        parts = filled.reshape(self._mesh.size, -1)
        mine = list(local_replicas(self._mesh))
        local = jax.tree.map(lambda array: np.take(array, parts[mine], axis=0), self._arrays)
        if self._order.remainder == "drop":
            return PerReplica(self._transfer(local))
        weights = (np.arange(size) < len(rows)).astype(np.float32).reshape(parts.shape)[mine]
        batch, weights = self._transfer((local, weights))
        return PerReplica(batch), PerReplica(weights)

    def _transfer(self, local: PyTree) -> PyTree:
        """`[local replica, ...]` numpy arrays to `[replica, ...]` arrays on the devices."""
        sharding = per_replica_sharding(self._mesh)
        if sharding.is_fully_addressable:
            return jax.device_put(local, sharding)
        return jax.tree.map(lambda x: jax.make_array_from_process_local_data(sharding, x), local)


def num_examples(arrays: PyTree) -> int:
    """How many examples the arrays hold.

    Raises:
        ValueError: They have none, or differ in their first dimension; the message names the leaves.
    """
    leaves = named_leaves("source", arrays)
    if not leaves:
        raise ValueError("The data source has no arrays. Pass an array, or a tree of arrays with one row an example.")
    for name, leaf in leaves:
        if not hasattr(leaf, "shape") or len(leaf.shape) == 0:
            raise ValueError(f"{name} is {spec(leaf)}: an array with one row an example is needed.")
        if leaf.dtype.kind in "OSUM":
            raise ValueError(f"{name} is {spec(leaf)}, which no device holds. Turn it into numbers first.")
    (first_name, first), *others = leaves
    for name, leaf in others:
        if len(leaf) != len(first):
            raise ValueError(
                f"{first_name} has {len(first)} rows and {name} has {len(leaf)}: row i of each array has to belong to "
                "example i."
            )
    if len(first) == 0:
        raise ValueError(f"{first_name} has no rows: there is nothing to distribute.")
    return len(first)


def _check(arrays: PyTree, order: Order, epochs: int, mesh: Mesh) -> None:
    size, replicas = order.batch_size, mesh.size
    for name, value in (("batch_size", size), ("epochs", epochs), ("seed", order.seed)):
        if not isinstance(value, numbers.Integral) or isinstance(value, bool):
            raise ValueError(f"`{name}` is a whole number, got {value!r}.")
    if size < 1 or size % replicas:
        down, up = size // replicas * replicas, (size // replicas + 1) * replicas
        near = f"{down} or {up}" if down > 0 else str(max(up, replicas))
        raise ValueError(
            f"A batch of {size} examples cannot be split over {replicas} replicas ({size % replicas} left over). "
            f"`batch_size` counts the examples of all replicas together: take {near}."
        )
    if order.remainder not in ("drop", "pad"):
        raise ValueError(f'`remainder` is "drop" or "pad", got {order.remainder!r}.')
    if not 0 <= order.seed < 2**64:
        raise ValueError(f"`seed` is a whole number from 0 to 2**64 - 1, got {order.seed}.")
    if epochs < 1:
        raise ValueError(f"`epochs` is at least 1, got {epochs}.")
    if order.batches == 0:
        raise ValueError(
            f'{order.num_examples} examples do not fill one batch of {size}, and remainder="drop" leaves out what does '
            'not. Take a smaller `batch_size`, or remainder="pad".'
        )
