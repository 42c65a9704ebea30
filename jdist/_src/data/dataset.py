"""A distributed data set and its iterator: batches on the devices, prefetched before the step that uses them."""

import contextlib
import dataclasses
import functools
import time
import warnings
from collections.abc import Callable, Generator, Mapping
from typing import Any, NoReturn

import jax
import numpy as np

from jdist._src.core import profiler_annotations
from jdist._src.core.arguments import as_int
from jdist._src.core.declared_shapes import declare_shapes
from jdist._src.core.errors import BatchedElementsWarning
from jdist._src.core.migration_hints import explains_attributes
from jdist._src.core.rendering import facts_table, html_of
from jdist._src.core.source_lines import levels_to_user
from jdist._src.core.tree import PyTree, one_line
from jdist._src.data.batch_sync import Channel, ProcessBatchSync, new_channel
from jdist._src.data.batches import LocalBatch, Position, element_shapes, in_memory_on_all, read_batches
from jdist._src.data.config import InputConfig, check_epochs
from jdist._src.data.device_cache import DeviceCache
from jdist._src.data.files import Files
from jdist._src.data.placement import LayoutPlacement, RowPlacement
from jdist._src.data.prefetch import Inline, Threaded
from jdist._src.data.shards import ProcessShare, layout_share, process_share
from jdist._src.data.source_state import check_state
from jdist._src.data.sources import Stream
from jdist._src.data.stats import LoopTimer, Stats
from jdist._src.devices.mesh import Replicas
from jdist._src.values.batch_layout import BatchLayout
from jdist._src.values.per_replica import PerReplica

_is_profiling = jax.profiler.TraceAnnotation.is_enabled  # costs 0.03 µs


@explains_attributes("dataset")
class DistributedDataset:
    """Batches of examples, split over the replicas. Made by `Strategy.distribute_dataset`; each `for` loop starts anew.

    A batch has the structure of the source's elements. Each leaf is a `PerReplica` `[replica, batch / replica, ...]`; the
    replicas hold consecutive rows of the global batch. With `remainder="pad"` an element is `(batch, weights)`: weights
    `[replica, batch / replica]`, float32, are 1 for an example and 0 for padding.

    Example:
        >>> strategy = jdist.MirroredStrategy(["cpu:0", "cpu:1"])
        >>> dataset = strategy.distribute_dataset(np.arange(6), batch_size=4, remainder="pad")
        >>> for batch, weights in dataset:
        ...     print(batch.tree.tolist(), weights.tree.tolist())
        [[0, 1], [2, 3]] [[1.0, 1.0], [1.0, 1.0]]
        [[4, 5], [4, 4]] [[1.0, 1.0], [0.0, 0.0]]
    """

    def __init__(
        self,
        config: InputConfig,
        shards: int,
        replicas: Replicas,
        prefetch: int,
        cache: DeviceCache | None = None,
        layout: BatchLayout | None = None,
    ):
        self._config, self._shards, self._replicas, self._prefetch = config, shards, replicas, prefetch
        self._cache, self._layout = cache, layout
        by_layout = layout and layout_share(layout, replicas)
        self._share = by_layout or process_share(replicas, config.replica_batches)

    def __len__(self) -> int:
        """Returns the number of batches of all epochs.

        Raises:
            TypeError: The number is unknown before the source is read, or infinite.
        """
        if self.is_endless:
            raise TypeError("The source is endless, so the length of the data set is undefined.")
        per_epoch, epochs = self._config.num_batches(self._share), self._config.epochs
        if per_epoch is None:
            raise TypeError("The number of batches is unknown before the source is read.")
        if epochs is None:
            raise TypeError("With epochs=None the data set is endless, so its length is undefined.")
        return per_epoch * epochs

    def __iter__(self) -> "DistributedIterator":
        return DistributedIterator(self)

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "A distributed data set cannot be pickled: it places batches on devices of this process. Pickle its source and the "
            "position (`iterator.get_state()`), and call `strategy.distribute_dataset` again."
        )

    def __repr__(self) -> str:
        return _text(type(self).__name__, self._config.facts(self._share))

    def _repr_html_(self) -> str:
        return html_of(facts_table(type(self).__name__, self._config.facts(self._share)))

    @property
    def element_spec(self) -> PyTree:
        """The shapes and dtypes of a batch, as `Strategy.compile` and a step take it: `jax.ShapeDtypeStruct` leaves.

        It has the structure of an element, with a `PerReplica` in place of each leaf; with `remainder="pad"`, it is a pair with
        the spec of the weights. It is known without reading for arrays; from other sources with indices, one example is read,
        and from streams the first batch.

        Raises:
            ValueError: The source is an iterator, which can be read only once.

        Example:
            >>> strategy = jdist.MirroredStrategy(["cpu:0", "cpu:1"])
            >>> strategy.distribute_dataset(np.zeros((9, 3), np.float32), batch_size=4).element_spec
            PerReplica(float32[2,2,3])
        """
        channel = new_channel(self._replicas.mesh)
        shapes = element_shapes(self._config, self._share, self._first_position(), channel)
        if self._layout is None:
            return jax.tree.map(self._spec, shapes)
        placement = LayoutPlacement(self._layout, self._share)
        if self.has_weights:
            return placement.specs(shapes[0]), placement.specs(shapes[1], are_weights=True)
        return placement.specs(shapes)

    @property
    def has_weights(self) -> bool:
        """Whether its elements are pairs of a batch and the weights of its rows."""
        return self._config.remainder == "pad"

    @property
    def is_endless(self) -> bool:
        """Whether the source is infinite, such as a function of the step."""
        return self._config.is_endless

    @property
    def epochs(self) -> int | None:
        """The number of epochs; None for an infinite data set."""
        return self._config.epochs

    @property
    def is_one_shot(self) -> bool:
        """Whether the source is an iterator, which can be read only once."""
        return self._config.one_shot is not None

    def repeated(self, epochs: int | None) -> "DistributedDataset":
        """Returns the data set with another number of epochs; None for an infinite data set.

        Example:
            >>> dataset = jdist.OneDeviceStrategy("cpu:0").distribute_dataset(
            ...     np.arange(6), batch_size=2
            ... )
            >>> len(dataset), len(dataset.repeated(4))
            (3, 12)

        Raises:
            ValueError: `epochs` is less than 1; or the source is endless or can be read only once, and `epochs` is more than 1.
        """
        check_epochs(epochs)
        return self._with(epochs=epochs)

    def reshuffled(self, index: int) -> "DistributedDataset":
        """Returns the data set with another order for each `index`, for several readers; the same if it is not shuffled.

        The order is a function of the seed of this data set, `index` and the epoch.

        Raises:
            ValueError: `index` is negative.
            TypeError: `index` is not an integer.

        Example:
            >>> dataset = jdist.OneDeviceStrategy("cpu:0").distribute_dataset(
            ...     np.arange(4), batch_size=4, shuffle=True
            ... )
            >>> [next(iter(dataset.reshuffled(reader))).tree.tolist() for reader in range(2)]
            [[[1, 3, 0, 2]], [[1, 2, 3, 0]]]
        """
        entropy = self._config.seed, as_int("`index`", index, 0)
        seed = int(np.random.SeedSequence(entropy).generate_state(1, np.uint64)[0])
        return self._with(seed=seed) if self._config.shuffle else self._with()

    def checked(self, check: Callable[[PyTree, str], None]) -> "DistributedDataset":
        """Returns the data set with a check of its examples, which raises on all processes.

        Args:
            check: Raises an error for examples, leaves `[example, ...]`, of a batch whose place in the data is the second
                argument. It is called at once for arrays in memory, otherwise for each batch that is read.
        """
        if in_memory_on_all(self._config, self._share):
            check(self._config.source.tree, "")  # pyright: ignore[reportAttributeAccessIssue]  # `Arrays`
            return self
        return self._with(check=check)

    def _with(self, **options: Any) -> "DistributedDataset":
        config = dataclasses.replace(self._config, **options)
        return DistributedDataset(config, self._shards, self._replicas, self._prefetch, self._cache, self._layout)

    def _identity(self) -> dict[str, Any]:
        """Returns the properties that must be equal where a position is taken and where it is used."""
        config = self._config
        return {
            "examples": config.num_examples(self._share),
            "replicas": self._share.num_replicas if config.replica_batches else None,
            "shuffle": config.shuffle,
            "seed": config.seed,
            "remainder": config.remainder,
            "own": config.own_source,
        }

    def _first_position(self) -> Position:
        return Position(0, 0, self._config.batch_size, self._shards)

    def _check_position(self, state: Mapping[str, Any]) -> Position:
        """Returns the position in `state`, a dict from `get_state`.

        Raises:
            ValueError: `state` is not a position, or is a position of other data.
        """
        config, expected = self._config, self._identity()
        if not isinstance(state, Mapping) or not {*Position._fields, *expected} <= state.keys():
            raise ValueError(
                f"{one_line(state)} is not a position. Pass the result of `get_state()` of an iterator over batches."
            )
        if config.batch_size is not None:
            expected["batch_size"] = config.batch_size
        # For files the position determines the number of shards.
        if config.own_source or not isinstance(config.source, Files):
            expected["shards"] = self._shards
        for name, value in expected.items():
            if state[name] != value:
                raise ValueError(
                    f"The position was taken with {name}={one_line(state[name])}, but this data set has {name}={value!r}, so "
                    "the next examples would differ. Use the same value, or start from the beginning."
                )
        last_epoch = None if config.epochs is None else config.epochs - 1
        ranges = {"epoch": (0, last_epoch), "batch": (0, self._config.num_batches(self._share)), "shards": (1, None)}
        # Before the first batch the size is unknown for a source of batches.
        if state["batch"] or state["batch_size"] is not None:
            ranges["batch_size"] = (1, None)
        for name, (minimum, maximum) in ranges.items():
            value = state[name]
            is_int = isinstance(value, int) and not isinstance(value, bool)
            if not is_int or value < minimum or (maximum is not None and value > maximum):
                bound = f" >= {minimum}" if maximum is None else f" from {minimum} to {maximum}"
                hint = f" The data set has epochs={config.epochs}." if name == "epoch" and maximum is not None else ""
                raise ValueError(f"The position has {name}={one_line(value)}, which must be an integer{bound}.{hint}")
        check_state(state["source"])
        is_random = isinstance(config.source, Stream) and not config.source.repeatable
        if is_random and state["batch"] > 0 and state["source"] is None:
            shuffle_here = "" if config.replica_batches else ", or pass the loader's dataset with `shuffle=True`"
            raise ValueError(
                "The source shuffles in another order each time, so it cannot resume in the middle of an epoch. Give it a "
                f"sampler whose order is a function of the epoch (`set_epoch`){shuffle_here}."
            )
        return Position(*(state[name] for name in Position._fields))

    def _spec(self, leaf: jax.ShapeDtypeStruct) -> PerReplica:
        """Returns the spec on the devices of `[local replica, row, ...]`."""
        replicas = self._replicas
        shape = (replicas.size, *leaf.shape[1:])
        if replicas.batch_axes and leaf.ndim > 1:
            shape = (1, self._share.num_replicas * leaf.shape[1], *leaf.shape[2:])
        return PerReplica(jax.ShapeDtypeStruct(shape, leaf.dtype, sharding=replicas.batch_sharding(shape)))

    def _start_prefetch(self, position: Position) -> "Inline[LocalBatch] | Threaded[LocalBatch]":
        config, share = self._config, self._share
        # The name of the exchange is made here, not in the thread, so that the order of names is the same on every process.
        channel = new_channel(self._replicas.mesh)
        make = functools.partial(_device_batches, config, share, self._replicas, self._layout, position, channel)
        if self._cache is not None:
            make = functools.partial(self._cache.batches, config, share, position)
        in_memory = in_memory_on_all(config, share)
        if in_memory and share.num_pipelines > 1:
            with contextlib.closing(ProcessBatchSync(channel, share)) as sync:
                sync.check_same(f"the position {position}")
        # A thread only costs time where reading does not block, since transfers are asynchronous. Reading blocks where the
        # processes exchange messages.
        reads_ahead = isinstance(config.source, Stream) and config.source.reads_ahead and share.num_pipelines == 1
        is_inline = in_memory or reads_ahead or self._prefetch == 0
        return (Inline if is_inline else Threaded)(make, self._prefetch)


@explains_attributes("dataset")
class DistributedIterator:
    """Iterates over the batches of a `DistributedDataset`, with a position that can be saved.

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
        self._position = dataset._first_position()
        self._prefetched: Inline[LocalBatch] | Threaded[LocalBatch] | None = None
        self._closed = False
        self._timer = LoopTimer()
        self._identity = dataset._identity()

    def __iter__(self) -> "DistributedIterator":
        return self

    def __repr__(self) -> str:
        return _text(type(self).__name__, self._facts())

    def _repr_html_(self) -> str:
        return html_of(facts_table(type(self).__name__, self._facts()))

    def _facts(self) -> dict[str, str]:
        dataset, position, measured = self._dataset, self._position, self._timer.stats()
        return {
            "position": "closed" if self._closed else f"before batch {position.batch} of epoch {position.epoch}",
            "received": f"{measured.batches:,} batches, {measured.examples:,} examples",
            **dataset._config.facts(dataset._share),
        }

    def __next__(self) -> Any:
        """Returns the next batch.

        Raises:
            StopIteration: There are no more batches, or the iterator is closed.
            ValueError: The source yields data that cannot be distributed; the message names the batch and the leaf.
            RuntimeError: Another process could not read its data.
        """
        try:
            if self._closed:
                raise StopIteration
            requested = time.perf_counter()
            wait = profiler_annotations.input_wait() if _is_profiling() else None
            try:
                if self._prefetched is None:
                    self._prefetched = self._dataset._start_prefetch(self._position)
                stalled = not self._prefetched.ready()
                rows, weights, examples, position, warning = self._prefetched.take()
            finally:
                if wait is not None:
                    wait.__exit__(None, None, None)
            if wait is not None and profiler_annotations.is_profile_open:
                self._mark_examples(weights, examples)
            self._timer.receive(requested, examples, stalled)
            self._position = position
            if warning:
                warnings.warn(warning, BatchedElementsWarning, stacklevel=levels_to_user())
            return rows if weights is None else (rows, weights)
        except KeyboardInterrupt as error:
            # An interrupted generator has ended. The next call starts a new one at the same position.
            self._prefetched = None if isinstance(self._prefetched, Inline) else self._prefetched
            # A notebook stores the last traceback. Its frames must not keep the iterator, and so its thread, alive.
            del self
            raise error.with_traceback(None) from None

    def _mark_examples(self, weights: PerReplica | None, examples: int) -> None:
        """Adds the number of true examples of each replica of this process in a batch to the profile."""
        share = self._dataset._share
        counts = np.full(share.num_replicas, examples // share.num_replicas)
        if weights is not None:
            counts = _true_examples(jax.tree.leaves(weights)[0], share.num_replicas)
        texts = " ".join(f"{replica}:{counts[replica]}" for replica in share.replicas)
        profiler_annotations.mark(profiler_annotations.BATCH, examples=texts)

    def get_state(self) -> dict[str, Any]:
        """Returns the position after the received batches, as a small JSON-able dict; prefetched batches do not count.

        The result is the same on every process.
        """
        return {**self._position._asdict(), **self._identity}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Continues from a position of an iterator over the same data, with any number of devices and processes.

        A stream without its own `get_state` is read again up to the position.

        Raises:
            ValueError: `state` is not a position, or is a position of other data, another order or another batch size.
        """
        position = self._dataset._check_position(state)
        self.close()
        self._closed, self._position = False, position
        self._timer.pause()

    def close(self) -> None:
        """Stops prefetching, and ends the iteration. The same happens when the iterator is deleted."""
        self._closed = True
        if self._prefetched is not None:
            self._prefetched.close()
            self._prefetched = None


def stats(iterator: DistributedIterator) -> Stats:
    """Returns the waiting time of the loop over `iterator` so far.

    Raises:
        TypeError: `iterator` is not an iterator over batches.

    Example:
        >>> strategy = jdist.OneDeviceStrategy("cpu:0")
        >>> batches = iter(strategy.distribute_dataset(np.arange(6), batch_size=2))
        >>> for batch in batches:
        ...     pass
        >>> jdist.data.stats(batches).batches, jdist.data.stats(batches).examples
        (3, 6)
    """
    if not isinstance(iterator, DistributedIterator):
        raise TypeError(
            f"`stats` takes the iterator of a loop, `iterator = iter(dataset)`, got {type(iterator).__name__}."
        )
    return iterator._timer.stats()


def examples_and_stalled_fraction(iterator: DistributedIterator) -> tuple[int, float]:
    """Returns two of the `stats` of `iterator`, in less time: a training loop reads them after each batch."""
    return iterator._timer.examples, iterator._timer.stalled_fraction


def _true_examples(weights: jax.Array, num_replicas: int) -> np.ndarray:
    """Returns the number of weights other than 0 of each replica of this process, `[replica]`; 0 for other replicas."""
    starts = {}  # one shard for each block of rows: with model axes, several devices hold the same rows
    for shard in weights.addressable_shards:
        first = [part.indices(size)[0] for part, size in zip(shard.index, weights.shape, strict=True)]
        starts[int(np.ravel_multi_index(first, weights.shape))] = shard.data
    indices = [start + np.flatnonzero(np.asarray(rows)) for start, rows in starts.items()]
    return np.bincount(np.concatenate(indices) // (weights.size // num_replicas), minlength=num_replicas)


def _text(title: str, facts: Mapping[str, str]) -> str:
    return f"<{title}: {'; '.join(f'{name}: {fact}' for name, fact in facts.items())}>"


def _device_batches(
    config: InputConfig,
    share: ProcessShare,
    replicas: Replicas,
    layout: BatchLayout | None,
    position: Position,
    channel: Channel,
    should_stop: Callable[[], bool],
) -> Generator[LocalBatch]:
    """Yields the batches on the devices; the transfers may still be running."""
    placement = RowPlacement(replicas, share) if layout is None else LayoutPlacement(layout, share)
    full_weights: tuple[Any, Any] = None, None  # weights that the reader returned for a full batch, and on the devices
    for batch in read_batches(config, share, position, channel, should_stop):
        # The user's transfer guard is for implicit transfers of the step; these are explicit.
        with jax.transfer_guard_host_to_device("allow"):
            rows, weights = placement.batch(batch.rows), batch.weights
            if config.buckets is not None:
                declare_shapes(array.shape for array in jax.tree.leaves(rows))
            if weights is not None and (
                weights is not full_weights[0] or jax.tree.leaves(full_weights[1])[0].is_deleted()
            ):
                full_weights = weights, placement.weights(weights)
        yield batch._replace(rows=rows, weights=None if weights is None else full_weights[1])
