"""From what the user hands in to a `DistributedDataset`: which kind of source, who reads what, and what cannot be."""

import dataclasses
import functools
import logging
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np

from jdist._src.core.arguments import as_int
from jdist._src.core.tree import dtype_and_shape
from jdist._src.data.array_rows import kind
from jdist._src.data.batch_sync import ProcessBatchSync, channel_name
from jdist._src.data.batches import InputConfig, Remainder, check_epochs
from jdist._src.data.dataset import DistributedDataset, DistributedIterator
from jdist._src.data.files import Files
from jdist._src.data.shards import AutoShardPolicy, InputContext, ProcessShare, check_split, process_share
from jdist._src.data.source_adapters import accepts_one, is_single, source_of
from jdist._src.data.sources import READ_AGAIN, Arrays, Called, Stream, restarted
from jdist._src.devices.mesh import Replicas
from jdist._src.values.device_put import check_devices_attached

_log = logging.getLogger("jdist")


def dataset_from_source(
    source: Any,
    batch_size: int | None,
    shuffle: bool | None,
    seed: int,
    epochs: int | None,
    remainder: Remainder,
    auto_shard: AutoShardPolicy | str,
    prefetch: int,
    replicas: Replicas,
) -> DistributedDataset:
    """The batches of `source`; the arguments are those of `Strategy.distribute_dataset`."""
    check_devices_attached(replicas.mesh)
    share = process_share(replicas)

    def make() -> tuple[DistributedDataset, str]:
        _check_shuffle(shuffle)
        _check_options(batch_size, seed, epochs, remainder, prefetch)
        if batch_size is not None:
            check_split(batch_size, replicas.num_parts, "devices" if replicas.split else "replicas")
        if isinstance(source, (DistributedDataset, DistributedIterator)):
            raise ValueError(f"The source is a {type(source).__name__} already. Hand in what that was made from.")
        policy = _policy(AutoShardPolicy.of(auto_shard), source, share.num_pipelines)
        given = _sharded(source, share) if policy is AutoShardPolicy.HINT else source
        own = policy in (AutoShardPolicy.OFF, AutoShardPolicy.HINT)
        found = given if isinstance(given, Files) else source_of(given, batch_size is None, bool(shuffle), seed)
        size = None if batch_size is None else int(batch_size)  # an integer of numpy is no JSON
        shuffled = not isinstance(found, (Stream, Files)) if shuffle is None else bool(shuffle)
        reading = InputConfig(found, size, shuffled, int(seed), epochs, remainder, own, warn=_once())
        _check_batches(reading, share, given)
        shards = share.num_pipelines if own or policy is AutoShardPolicy.FILE else 1
        options = f"{policy.name}, {batch_size=}, {shuffle=}, {seed=}, {epochs=}, {remainder=}"
        return DistributedDataset(reading, shards, replicas, prefetch), f"{_described(reading, share)}, {options}"

    return _on_all(make, share, replicas)


def dataset_from_function(
    fn: Callable[[InputContext], Any], epochs: int | None, remainder: Remainder, prefetch: int, replicas: Replicas
) -> DistributedDataset:
    """The batches of what `fn` makes; the arguments are those of `Strategy.distribute_datasets_from_function`."""
    check_devices_attached(replicas.mesh)
    share = process_share(replicas, by_replica=True)

    def make() -> tuple[DistributedDataset, str]:
        _check_pipeline_function(fn)
        _check_options(None, 0, epochs, remainder, prefetch)
        context = InputContext(share.num_pipelines, share.pipeline, share.num_replicas)
        source = _pipeline(lambda: fn(context))
        reading = InputConfig(source, None, False, 0, epochs, remainder, own=True, replica_batches=True, warn=_once())
        return DistributedDataset(reading, share.num_pipelines, replicas, prefetch), f"{epochs=}, {remainder=}"

    return _on_all(make, share, replicas)


def _check_pipeline_function(fn: Any) -> None:
    """Raises TypeError if `fn` is not a function of one argument."""
    if callable(fn) and accepts_one(fn):
        return
    problem = "a function with other arguments" if callable(fn) else dtype_and_shape(fn)
    raise TypeError(
        f"`fn` must be a function of one argument, an `InputContext`, that returns the batches of this process, got {problem}. "
        "Write `lambda context: batches`."
    )


def _pipeline(make: Callable[[], Any]) -> Stream:
    """The batches that `make` returns; where they are an iterator, it is called again for each further pass.

    Raises:
        ValueError: It does not return batches.
    """
    result = make()
    if isinstance(result, (Files, DistributedDataset, DistributedIterator)) or is_single(result):
        raise _no_batches(result)
    if isinstance(result, (list, Iterator)):
        made = [result]
        again = lambda: made.pop() if made else make()
        source = Stream(restarted(result if isinstance(result, list) else Called(again, _iterator)), True, lends=True)
    elif callable(result) or isinstance(result, Iterable) or hasattr(result, "__getitem__"):
        source = source_of(result, True, False, 0)
        assert isinstance(source, Stream)
    else:
        raise _no_batches(result)
    stack = "Return batches of one replica: stack `context.get_per_replica_batch_size(64)` examples"
    return dataclasses.replace(source, if_not_batched=stack)


def _iterator(result: Any) -> Iterator[Any]:
    if not isinstance(result, Iterator):
        raise _no_batches(result)
    return result


def _no_batches(result: Any) -> ValueError:
    return ValueError(
        f"The function returned {dtype_and_shape(result)}, and not the batches of this process. Return an iterable whose elements are the "
        "batches of one replica each: a generator, a list, or a dataset that makes batches."
    )


def _on_all(
    make: Callable[[], tuple[DistributedDataset, str]], share: ProcessShare, replicas: Replicas
) -> DistributedDataset:
    """A data set on every process, or an error on every one: what cannot be on one of them, and what is not alike."""
    if share.num_pipelines == 1:
        return make()[0]
    agreement = ProcessBatchSync(channel_name(replicas.mesh), share.pipeline, share.num_pipelines)
    try:
        dataset, said = agreement.told(make)
        agreement.same(f"a data set of {said}")
        return dataset
    finally:
        agreement.leave()


def _described(reading: InputConfig, share: ProcessShare) -> str:
    """What has to be alike on all processes, beyond the options."""
    if reading.own:
        return "its own examples"
    if isinstance(reading.source, Files):
        return f"the files {', '.join(map(str, reading.source.paths))}"
    if isinstance(reading.source, Arrays):
        return f"{len(reading.source)} examples of {kind(reading.source.take(np.zeros(1, int), ''))}"
    return f"{reading.num_examples(share)} examples"


def _once() -> Callable[[str], None]:
    return functools.cache(_log.warning)


def _policy(policy: AutoShardPolicy, source: Any, processes: int) -> AutoShardPolicy:
    """What AUTO means for this source; and whether FILE is possible."""
    files = len(source.paths) if isinstance(source, Files) else None
    if policy is AutoShardPolicy.AUTO:
        if files is not None and files < processes:
            _log.warning(
                "auto_shard: too few files (%d) for %d processes to read their own, so each reads them all (DATA).",
                files,
                processes,
            )
        return AutoShardPolicy.FILE if files is not None and files >= processes else AutoShardPolicy.DATA
    if policy is AutoShardPolicy.FILE and files is None:
        raise ValueError(
            f'auto_shard="file" needs files to share out, and the source is {type(source).__name__}. Hand in '
            '`jdist.data.Files(paths, read)`, or take "data".'
        )
    if policy is AutoShardPolicy.FILE and files is not None and files < processes:
        raise ValueError(
            f'auto_shard="file": too few files ({files}) for {processes} processes to read their own. Take "data", and each '
            "process reads them all."
        )
    return policy


def _sharded(source: Any, share: ProcessShare) -> Any:
    if not hasattr(source, "shard"):
        raise ValueError(
            f'auto_shard="hint" asks the source for its `shard(num_shards, index)`, and {type(source).__name__} has none. Take '
            'a part of it by hand, and auto_shard="off".'
        )
    return source.shard(num_shards=share.num_pipelines, index=share.pipeline)


def _check_batches(reading: InputConfig, share: ProcessShare, source: Any) -> None:
    """Raises ValueError if the source has no batches as they are asked for; says what is left out."""
    _check_once(source, reading.epochs)
    size, count = reading.batch_size, reading.num_examples(share)
    if isinstance(reading.source, Stream) and reading.source.batch_size and size:
        here = size // share.num_replicas * len(share.replicas) if reading.own else size
        if reading.source.batch_size != here:
            raise ValueError(
                f"The source makes batches of {reading.source.batch_size} examples, and {here} are asked for. Let it make "
                "those, or leave it to the source: `batch_size=None`."
            )
    if count is None or size is None:
        return
    if count == 0:
        raise ValueError("The source is empty: there is nothing to distribute.")
    left = count % size
    if left and reading.remainder == "error":
        raise ValueError(
            f'{count} examples leave {left} over in batches of {size}, and remainder="error" allows only full batches: '
            '"drop" leaves them out, "pad" fills the last batch up.'
        )
    if count < size and reading.remainder == "drop":
        raise ValueError(
            f'{count} examples do not fill one batch of {size}, and remainder="drop" leaves out what does not. Take a '
            'smaller `batch_size`, or remainder="pad".'
        )
    if left and reading.remainder == "drop":
        reading.warn(
            f"distribute_dataset leaves out {left} of {count} examples an epoch, which do not fill a batch of {size}. "
            'remainder="pad" keeps them.'
        )


def _check_once(source: Any, epochs: int | None) -> None:
    if isinstance(source, Iterator) and epochs != 1:
        raise ValueError(
            f"The source is a {type(source).__name__}, which can be gone through once, and epochs={epochs}. {READ_AGAIN}"
        )


def _check_shuffle(shuffle: Any) -> None:
    if shuffle is not None and not isinstance(shuffle, (bool, np.bool_)):
        raise TypeError(f"`shuffle` must be True, False or None, got {shuffle!r}.")


def _check_options(batch_size: int | None, seed: int, epochs: int | None, remainder: Remainder, prefetch: int) -> None:
    if batch_size is not None:
        as_int("`batch_size`", batch_size)
    as_int("`seed`", seed)
    if remainder not in ("drop", "pad", "error"):
        raise ValueError(f'`remainder` is "drop", "pad" or "error", got {remainder!r}.')
    if not 0 <= seed < 2**64:
        raise ValueError(f"`seed` is a whole number from 0 to 2**64 - 1, got {seed}.")
    check_epochs(epochs)
    if as_int("`prefetch`", prefetch) < 0:
        raise ValueError(f"`prefetch` is how many batches to read ahead, 0 for none, got {prefetch}.")
