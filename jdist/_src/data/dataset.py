"""Batches on the devices, ahead of the step that takes them."""

import dataclasses
import functools
import os
import sys
import warnings
from collections.abc import Callable, Generator, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

from jdist._src.core.errors import BatchedElementsWarning
from jdist._src.data import summary
from jdist._src.data.batch_sync import ProcessBatchSync, channel_name
from jdist._src.data.batches import InputConfig, Position, check_epochs, in_memory_on_all, read_batches
from jdist._src.data.files import Files
from jdist._src.data.prefetch import Inline, Threaded
from jdist._src.data.shard_readers import check_state
from jdist._src.data.shards import ProcessShare, process_share
from jdist._src.data.sources import Stream
from jdist._src.data.stats import LoopTimer, Stats
from jdist._src.devices.mesh import Replicas
from jdist._src.values.per_replica import PerReplica


class DistributedDataset:
    """Batches of examples, one part a replica. Made by `Strategy.distribute_dataset`; every `for` starts anew.

    A batch has the structure of the source's elements. Each leaf is a `PerReplica` `[replica, batch / replica, ...]`; the
    replicas hold consecutive rows of the global batch. With `remainder="pad"` an element is `(batch, weights)`: weights
    `[replica, batch / replica]`, float32, are 1 for an example and 0 for a row that only fills up.
    """

    def __init__(self, reading: InputConfig, shards: int, replicas: Replicas, prefetch: int):
        self._reading, self._shards, self._replicas, self._prefetch = reading, shards, replicas, prefetch
        self._share = process_share(replicas, reading.replica_batches)

    def __len__(self) -> int:
        """How many batches there are, all epochs together.

        Raises:
            TypeError: It is not known before they are read, or they have no end.
        """
        if self.is_endless:
            raise TypeError("The source has no end, so the data set has no length.")
        per_epoch, epochs = self._batches_per_epoch(), self._reading.epochs
        if per_epoch is None:
            raise TypeError("How many batches there are is not known before they are read.")
        if epochs is None:
            raise TypeError("With epochs=None there is no last batch.")
        return per_epoch * epochs

    def __iter__(self) -> "DistributedIterator":
        return DistributedIterator(self)

    def __repr__(self) -> str:
        return summary.text(type(self).__name__, summary.facts(self._reading, self._share))

    def _repr_html_(self) -> str:
        return summary.table(type(self).__name__, summary.facts(self._reading, self._share))

    @property
    def has_weights(self) -> bool:
        """Whether its elements are pairs of a batch and the weights of its rows."""
        return self._reading.remainder == "pad"

    @property
    def is_endless(self) -> bool:
        """Whether the source itself has no end, as a function of the step."""
        return isinstance(self._reading.source, Stream) and self._reading.source.endless

    def repeated(self, epochs: int | None) -> "DistributedDataset":
        """The same, so many times instead; None for ever.

        Example:
            >>> dataset = jdist.OneDeviceStrategy("cpu:0").distribute_dataset(np.arange(6), batch_size=2)
            >>> len(dataset), len(dataset.repeated(4))
            (3, 12)
        """
        check_epochs(epochs)
        reading = dataclasses.replace(self._reading, epochs=epochs)
        return DistributedDataset(reading, self._shards, self._replicas, self._prefetch)

    def _batches_per_epoch(self) -> int | None:
        """Returns the number of batches in an epoch, or None if it is not known before the source is read."""
        reading, examples = self._reading, self._reading.num_examples(self._share)
        if examples is None or reading.batch_size is None:
            return None
        full, left = divmod(examples, reading.batch_size)
        return full + (left > 0 and reading.remainder == "pad")

    def _identity(self) -> dict[str, Any]:
        """What has to be the same where a position is taken and where it is used."""
        identity = {name: getattr(self._reading, name) for name in ("shuffle", "seed", "remainder", "own")}
        replicas = self._share.num_replicas if self._reading.replica_batches else None
        return {"examples": self._reading.num_examples(self._share), "replicas": replicas, **identity}

    def _begin(self) -> Position:
        return Position(0, 0, self._reading.batch_size, self._shards)

    def _position(self, state: Mapping[str, Any]) -> Position:
        """The position that `state` says.

        Raises:
            ValueError: It is none, or does not fit this data set.
        """
        reading, expected = self._reading, self._identity()
        if not isinstance(state, Mapping) or not {*Position._fields, *expected} <= state.keys():
            raise ValueError(f"{state!r} is no position: take what `get_state()` of an iterator over batches gave.")
        if reading.batch_size is not None:
            expected["batch_size"] = reading.batch_size
        if reading.own or not isinstance(reading.source, Files):  # of files, it says in how many parts they are read
            expected["shards"] = self._shards
        for name, value in expected.items():
            if state[name] != value:
                raise ValueError(
                    f"The position was taken with {name}={state[name]!r}, and this data set has {name}={value!r}. Make it "
                    "alike, or begin anew: what comes next would be other examples."
                )
        last_epoch = None if reading.epochs is None else reading.epochs - 1
        ranges = {"epoch": (0, last_epoch), "batch": (0, self._batches_per_epoch()), "shards": (1, None)}
        if (
            state["batch"] or state["batch_size"] is not None
        ):  # before the first batch a source of batches has no size yet
            ranges["batch_size"] = (1, None)
        for name, (least, greatest) in ranges.items():
            value = state[name]
            whole = isinstance(value, int) and not isinstance(value, bool)
            if not whole or value < least or (greatest is not None and value > greatest):
                upto = "up" if greatest is None else f"to {greatest}"
                more = f" The data set has epochs={reading.epochs}." if name == "epoch" and greatest is not None else ""
                raise ValueError(
                    f"The position has {name}={value!r}, which is no whole number from {least} {upto}.{more}"
                )
        check_state(state["source"])
        shuffle_here = "" if reading.replica_batches else ", or shuffle here: hand in its dataset, with `shuffle=True`"
        if isinstance(reading.source, Stream) and not reading.source.repeats and state["batch"] > 0:
            raise ValueError(
                "The source shuffles in another order each time, so there is no going on in the middle of an epoch. Give it a "
                f"sampler whose order is a function of the epoch (`set_epoch`){shuffle_here}."
            )
        return Position(*(state[name] for name in Position._fields))

    def _ahead(self, position: Position) -> "Inline[_Sent] | Threaded[_Sent]":
        reading, share = self._reading, self._share
        # Named here and not by the thread, so that the order is the same on every process.
        name = channel_name(self._replicas.mesh)
        make = functools.partial(_sent, reading, share, self._replicas, position, name)
        in_memory = in_memory_on_all(reading, share)
        if in_memory and share.num_pipelines > 1:
            agreement = ProcessBatchSync(name, share.pipeline, share.num_pipelines)
            try:
                agreement.same(f"the position {position}")
            finally:
                agreement.leave()
        # Where the examples are at hand, a thread would only cost: a transfer goes on by itself. To agree, one has to wait.
        reads_ahead = isinstance(reading.source, Stream) and reading.source.reads_ahead and share.num_pipelines == 1
        at_hand = in_memory or reads_ahead or self._prefetch == 0
        return (Inline if at_hand else Threaded)(make, self._prefetch)


class DistributedIterator:
    """The batches of a `DistributedDataset`, one after the other, and the position among them.

    Example:
        >>> strategy = jdist.MirroredStrategy(["cpu:0", "cpu:1"])
        >>> dataset = strategy.distribute_dataset(np.arange(6), batch_size=2)
        >>> first, second = iter(dataset), iter(dataset)
        >>> next(first).tree.tolist()
        [[0], [1]]
        >>> second.set_state(first.get_state())
        >>> next(second).tree.tolist()
        [[2], [3]]
    """

    def __init__(self, dataset: DistributedDataset):
        self._dataset = dataset
        self._position = dataset._begin()
        self._ahead: Inline[_Sent] | Threaded[_Sent] | None = None
        self._closed = False
        self._clock = LoopTimer()

    def __iter__(self) -> "DistributedIterator":
        return self

    def __repr__(self) -> str:
        return summary.text(type(self).__name__, self._facts())

    def _repr_html_(self) -> str:
        return summary.table(type(self).__name__, self._facts())

    def _facts(self) -> dict[str, str]:
        dataset, position, taken = self._dataset, self._position, self._clock.stats()
        return {
            "position": "closed" if self._closed else f"epoch {position.epoch}, batch {position.batch} is next",
            "taken": f"{taken.batches:,} batches, {taken.examples:,} examples",
            **summary.facts(dataset._reading, dataset._share),
        }

    def __next__(self) -> Any:
        """The next batch.

        Raises:
            StopIteration: There is none, or the iterator is closed.
            ValueError: The source gives something that cannot be distributed; the message names the batch and the leaf.
            RuntimeError: Another process could not read its data.
        """
        if self._closed:
            raise StopIteration
        self._clock.ask()
        if self._ahead is None:
            self._ahead = self._dataset._ahead(self._position)
        stalled = not self._ahead.ready()
        try:
            sent = self._ahead.take()
        except KeyboardInterrupt:
            # What was interrupted is at its end. The next call begins anew where this one was.
            self._ahead = None if isinstance(self._ahead, Inline) else self._ahead
            raise
        self._clock.have(sent.examples, stalled)
        self._position = sent.after
        if sent.warning:
            warnings.warn(sent.warning, BatchedElementsWarning, stacklevel=_levels_to_user())
        return sent.element

    def get_state(self) -> dict[str, Any]:
        """The position behind the batches that were taken, as a small JSON-able dict; what is read ahead does not count.

        Every process gives the same.
        """
        return {**self._position._asdict(), **self._dataset._identity()}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Goes on from a position that an iterator of the same data gave, over any number of devices and processes.

        A stream that has no `get_state` of its own is read again up to there.

        Raises:
            ValueError: It is no position, or one of other data, or of another order or batch size.
        """
        position = self._dataset._position(state)
        self.close()
        self._closed, self._position = False, position
        self._clock.pause()

    def close(self) -> None:
        """Stops reading ahead; there are no more batches then. Leaving the loop and forgetting the iterator does it too."""
        self._closed = True
        if self._ahead is not None:
            self._ahead.close()
            self._ahead = None


def stats(iterator: DistributedIterator) -> Stats:
    """What the loop over `iterator` has waited for so far.

    Raises:
        TypeError: It is no iterator over batches.

    Example:
        >>> strategy = jdist.OneDeviceStrategy("cpu:0")
        >>> batches = iter(strategy.distribute_dataset(np.arange(6), batch_size=2))
        >>> for batch in batches:
        ...     pass
        >>> jdist.data.stats(batches).batches, jdist.data.stats(batches).examples
        (3, 6)
    """
    if not isinstance(iterator, DistributedIterator):
        raise TypeError(f"Stats are those of one loop: of `iterator = iter(dataset)`, got {type(iterator).__name__}.")
    return iterator._clock.stats()


class _Sent(NamedTuple):
    element: Any
    examples: int
    after: Position
    warning: str | None


def _levels_to_user() -> int:
    """Returns the `stacklevel` for a warning in the caller that names the first frame outside this package."""
    package = f"{os.path.dirname(os.path.dirname(__file__))}{os.sep}"
    frame, levels = sys._getframe(1), 1
    while frame.f_back is not None and frame.f_code.co_filename.startswith(package):
        frame, levels = frame.f_back, levels + 1
    return levels


def _sent(
    reading: InputConfig,
    share: ProcessShare,
    replicas: Replicas,
    position: Position,
    name: str,
    stopped: Callable[[], bool],
) -> Generator[_Sent]:
    """The elements that the loop gets, on their way to the devices: they are given before they have arrived."""
    places = {part: place for place, part in enumerate(share.replicas)}

    def send(local: np.ndarray) -> jax.Array:
        """`[local part, rows, ...]` to `[replica, rows, ...]`; faster than `device_put` (`benchmarks/input.py`)."""
        if replicas.split:
            return joined(local)

        def rows(index: Any) -> np.ndarray:
            start, stop, _ = index[0].indices(replicas.size)
            return local[places[start] : places[start] + stop - start]

        return jax.make_array_from_callback((replicas.size, *local.shape[1:]), replicas.rows, rows)

    def joined(local: np.ndarray) -> jax.Array:
        """The same where all parts are those of one replica, one after the other: `[1, part * rows, ...]`."""
        each, shape = local.shape[1], (1, share.num_replicas * local.shape[1], *local.shape[2:])

        def rows(index: Any) -> np.ndarray:
            start, stop, _ = index[1].indices(shape[1])
            first = places[start // each] * each + start % each
            return local.reshape(-1, *shape[2:])[None, first : first + stop - start]

        return jax.make_array_from_callback(shape, replicas.batch(shape), rows)

    for batch in read_batches(reading, share, position, name, stopped):
        # What a guard is to find are transfers that nobody asked for.
        with jax.transfer_guard_host_to_device("allow"):
            element = jax.tree.map(lambda leaf: PerReplica(send(leaf)), batch.rows)
            element = element if batch.weights is None else (element, PerReplica(send(batch.weights)))
        yield _Sent(element, batch.examples, batch.after, batch.warning)
