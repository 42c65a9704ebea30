"""Construction of a `DistributedDataset`: the source, the part that each process reads, and checks of the options."""

import contextlib
import dataclasses
import functools
import logging
from collections.abc import Callable, Iterable, Iterator
from typing import Any, get_args

import numpy as np

from jdist._src.core.arguments import as_int
from jdist._src.core.tree import dtype_and_shape, one_line
from jdist._src.data.array_rows import describe_row
from jdist._src.data.batch_sync import ProcessBatchSync, new_channel
from jdist._src.data.batches import empty_epoch_text
from jdist._src.data.buckets import Buckets
from jdist._src.data.config import Cache, InputConfig, Remainder, check_epochs
from jdist._src.data.dataset import DistributedDataset, DistributedIterator
from jdist._src.data.device_cache import DeviceCache
from jdist._src.data.files import Files
from jdist._src.data.shards import (
    PAD_EVERY_BATCH,
    AutoShard,
    AutoShardPolicy,
    InputContext,
    ProcessShare,
    check_split,
    layout_share,
    process_share,
)
from jdist._src.data.source_adapters import accepts_one, is_single, source_of
from jdist._src.data.source_check import SAME_SOURCE, digest_of_indexed, shard_of
from jdist._src.data.source_iterators import CallableIterable, restart_each_epoch
from jdist._src.data.sources import Arrays, Stream, with_row_dimension
from jdist._src.devices.mesh import Replicas
from jdist._src.values.batch_layout import BatchLayout
from jdist._src.values.device_put import check_devices_attached

_log = logging.getLogger("jdist")


def dataset_from_source(
    source: Any,
    batch_size: int | None,
    shuffle: bool | None,
    seed: int,
    epochs: int | None,
    remainder: Remainder,
    auto_shard: AutoShard,
    prefetch: int,
    cache: Cache | None,
    buckets: Buckets | None,
    replicas: Replicas,
    layout: BatchLayout | None = None,
) -> DistributedDataset:
    """Returns the batches of `source`; see `Strategy.distribute_dataset` for the arguments."""
    check_devices_attached(replicas.mesh)
    share = process_share(replicas) if layout is None else layout_share(layout, replicas)

    def make() -> tuple[DistributedDataset, str]:
        if shuffle is not None and not isinstance(shuffle, (bool, np.bool_)):
            raise TypeError(f"`shuffle` must be True, False or None, got {one_line(shuffle)}.")
        _check_options(batch_size, seed, epochs, remainder, prefetch)
        if batch_size is not None and (remainder != "pad" or batch_size <= 0):
            what = "devices" if replicas.batch_axes else "replicas"
            check_split(batch_size, share.num_replicas, what, advice=PAD_EVERY_BATCH if batch_size > 0 else "")
        if isinstance(source, (DistributedDataset, DistributedIterator)):
            raise ValueError(f"The source is a {type(source).__name__} already. Pass the data that it was made from.")
        policy = _resolve_policy(AutoShardPolicy.of(auto_shard), source, share.num_pipelines)
        own_source = policy in (AutoShardPolicy.OFF, AutoShardPolicy.HINT)
        local_source = _shard_by_hint(source, share) if policy is AutoShardPolicy.HINT else source
        if not own_source and share.num_pipelines > 1 and (shard := shard_of(source)):
            raise ValueError(f"The source reads one shard of the data: {shard}. {SAME_SOURCE}")
        if not isinstance(buckets, Buckets | None):
            raise TypeError(f"`buckets` must be a `jdist.data.Buckets((32, 64, 128))`, got {one_line(buckets)}.")
        adapted = local_source
        if not isinstance(adapted, Files):
            adapted = source_of(local_source, batch_size is None, bool(shuffle), seed, buckets)
        size = None if batch_size is None else int(batch_size)  # numpy integers are not JSON-able
        is_shuffled = not isinstance(adapted, (Stream, Files)) if shuffle is None else bool(shuffle)
        config = InputConfig(
            adapted, size, is_shuffled, int(seed), epochs, remainder, own_source, buckets=buckets, warn=_warn_once()
        )
        _check_batches(config, share)
        shards = share.num_pipelines if own_source or policy is AutoShardPolicy.FILE else 1
        if size is not None and size < shards:
            raise ValueError(
                f"A batch of {size} examples cannot consist of examples of {shards} processes that read their own data. Use a "
                f'larger `batch_size`, at least {shards}, or auto_shard="data".'
            )
        options = f"{policy.name}, {batch_size=}, {shuffle=}, {seed=}, {epochs=}, {remainder=}, {cache=}, {buckets=}"
        _check_cache(cache, config, share, local_source)
        if layout is not None:
            _check_layout(layout, config, share, cache, process_share(replicas))
        cached = cache and DeviceCache(config, replicas)
        return DistributedDataset(config, shards, replicas, prefetch, cached, layout), options

    return _make_on_all_processes(make, share, replicas)


def dataset_from_function(
    fn: Callable[[InputContext], Any],
    epochs: int | None,
    remainder: Remainder,
    prefetch: int,
    batched: bool,
    replicas: Replicas,
) -> DistributedDataset:
    """Returns the batches that `fn` makes; see `Strategy.distribute_datasets_from_function` for the arguments."""
    check_devices_attached(replicas.mesh)
    share = process_share(replicas, by_replica=True)

    def make() -> tuple[DistributedDataset, str]:
        if not (callable(fn) and accepts_one(fn)):
            problem = "a function with other arguments" if callable(fn) else dtype_and_shape(fn)
            raise TypeError(
                f"`fn` must be a function of one argument, an `InputContext`, that returns the batches of this process, got "
                f"{problem}. Write `lambda context: batches`."
            )
        _check_options(None, 0, epochs, remainder, prefetch)
        if not isinstance(batched, bool):
            raise TypeError(f"`batched` must be True or False, got {one_line(batched)}.")
        if not batched and replicas.batch_axes and share.num_pipelines > 1:
            raise ValueError(
                "`batched=False` yields one value per replica, and the replica of this strategy spans several processes. "
                "Return batches, whose rows are split over the devices."
            )
        context = InputContext(share.num_pipelines, share.pipeline, share.num_replicas)
        source = _stream_of_batches(lambda: fn(context))
        if not batched:
            source = with_row_dimension(source)
        config = InputConfig(
            source,
            None,
            False,
            0,
            epochs,
            remainder,
            own_source=True,
            replica_batches=True,
            has_rows=batched,
            warn=_warn_once(),
        )
        return DistributedDataset(
            config, share.num_pipelines, replicas, prefetch
        ), f"{epochs=}, {remainder=}, {batched=}"

    return _make_on_all_processes(make, share, replicas)


def _stream_of_batches(make: Callable[[], Any]) -> Stream:
    """Returns the batches that `make` returns. If they are an iterator, `make` is called again for each further epoch.

    Raises:
        ValueError: `make` does not return batches.
    """
    result = make()
    if isinstance(result, (Files, DistributedDataset, DistributedIterator)) or is_single(result):
        raise _not_batches(result)
    if isinstance(result, (list, Iterator)):
        first_results = [result]
        make_again = lambda: first_results.pop() if first_results else make()
        batches = result if isinstance(result, list) else CallableIterable(make_again, _as_iterator)
        source = Stream(restart_each_epoch(batches), True, reuses_buffers=True)
    elif callable(result) or isinstance(result, Iterable) or hasattr(result, "__getitem__"):
        source = source_of(result, True, False, 0)
        assert isinstance(source, Stream)
    else:
        raise _not_batches(result)
    advice = "Return batches of one replica: stack `context.get_per_replica_batch_size(64)` examples"
    return dataclasses.replace(source, advice=advice)


def _as_iterator(result: Any) -> Iterator[Any]:
    if not isinstance(result, Iterator):
        raise _not_batches(result)
    return result


def _not_batches(result: Any) -> ValueError:
    return ValueError(
        f"The function returned {dtype_and_shape(result)} instead of the batches of this process. Return an iterable whose "
        "elements are the batches of one replica each: a generator, a list, or a dataset that makes batches."
    )


def _make_on_all_processes(
    make: Callable[[], tuple[DistributedDataset, str]], share: ProcessShare, replicas: Replicas
) -> DistributedDataset:
    """Returns the data set that `make` returns with a description of its options.

    If `make` fails on a process, or the options or the sources differ between processes, an error is raised on all processes.
    """
    if share.num_pipelines == 1:
        return make()[0]
    with contextlib.closing(ProcessBatchSync(new_channel(replicas.mesh), share)) as sync:
        dataset, options = sync.run(make)
        sync.check_same(f"a data set of {options}")
        config = dataset._config
        if not config.own_source:
            description = sync.run(lambda: _describe_source(config, share))
            digest = {} if isinstance(config.source, (Stream, Files)) else digest_of_indexed(config.source)
            sync.check_same(f"a data set of {description}", digest)
        return dataset


def _describe_source(config: InputConfig, share: ProcessShare) -> str:
    """Returns a description of the source that must be equal on all processes."""
    if isinstance(config.source, Files):
        return f"the files {', '.join(map(str, config.source.paths))}"
    if isinstance(config.source, Arrays):
        return f"{len(config.source)} examples of {describe_row(config.source.take(np.zeros(1, int), ''))}"
    return f"{config.num_examples(share)} examples"


def _warn_once() -> Callable[[str], None]:
    return functools.cache(_log.warning)


def _resolve_policy(policy: AutoShardPolicy, source: Any, processes: int) -> AutoShardPolicy:
    """Returns the policy for `source`, with AUTO resolved.

    Raises:
        ValueError: The policy is FILE, and the source does not have a file per process.
    """
    files = len(source.paths) if isinstance(source, Files) else None
    if policy is AutoShardPolicy.AUTO:
        if files is not None and files < processes:
            _log.warning(
                "auto_shard: the number of files (%d) is less than the number of processes (%d), so each process reads all "
                "files (DATA).",
                files,
                processes,
            )
        return AutoShardPolicy.FILE if files is not None and files >= processes else AutoShardPolicy.DATA
    if policy is AutoShardPolicy.FILE and files is None:
        raise ValueError(
            f'auto_shard="file" needs a source of files, got {type(source).__name__}. Pass `jdist.data.Files(paths, read)`, or '
            'auto_shard="data".'
        )
    if policy is AutoShardPolicy.FILE and files is not None and files < processes:
        raise ValueError(
            f'auto_shard="file": the number of files ({files}) is less than the number of processes ({processes}). With '
            'auto_shard="data" each process reads all files.'
        )
    return policy


def _shard_by_hint(source: Any, share: ProcessShare) -> Any:
    if not hasattr(source, "shard"):
        raise ValueError(
            f'auto_shard="hint" calls `shard(num_shards, index)` of the source, but {type(source).__name__} does not have '
            'that method. Select the part of this process yourself, and pass auto_shard="off".'
        )
    return source.shard(num_shards=share.num_pipelines, index=share.pipeline)


def _check_batches(config: InputConfig, share: ProcessShare) -> None:
    """Raises ValueError if the source cannot be split into batches; logs the number of examples that are dropped."""
    size, count = config.batch_size, config.num_examples(share)
    if isinstance(config.source, Stream) and config.source.batch_size and size:
        expected = share.own_size(size) if config.own_source else size
        if config.source.batch_size != expected:
            raise ValueError(
                f"The source makes batches of {config.source.batch_size} examples, but {expected} are expected. Change the "
                "batch size of the source, or pass `batch_size=None` to use it."
            )
    if count is None or size is None:
        return
    if count == 0:
        raise ValueError(empty_epoch_text(config, 0, 0, size, []))
    rest = count % size
    if rest and config.remainder == "error":
        raise ValueError(
            f'{count} examples in batches of {size} leave {rest} over, and remainder="error" allows only full batches. Pass '
            '"drop" to drop them, or "pad" to pad the last batch.'
        )
    if count < size and config.remainder == "drop":
        raise ValueError(empty_epoch_text(config, 0, count, size, []))
    if rest and config.remainder == "drop":
        config.warn(
            f"distribute_dataset drops {rest} of {count} examples per epoch, which do not fill a batch of {size}. Pass "
            'remainder="pad" to keep them.'
        )


def _check_cache(cache: Cache | None, config: InputConfig, share: ProcessShare, source: Any) -> None:
    """Raises ValueError if the source cannot be stored on the devices as `cache` requires."""
    if cache is not None and cache not in get_args(Cache):
        raise ValueError(f'`cache` must be "device" or None, got {one_line(cache)}.')
    if cache is None:
        return
    if not isinstance(config.source, Arrays):
        raise ValueError(
            f'cache="device" stores arrays on the devices, and the source is {type(source).__name__}. Pass a tree of arrays '
            "`[example, ...]`, or omit `cache`."
        )
    if config.buckets is not None:
        raise ValueError(
            '`buckets` pads batches on the host, and cache="device" stores the examples on the devices. Omit one.'
        )
    if share.num_pipelines > 1:
        raise ValueError(
            f'cache="device" needs the devices of a single process, and this strategy has devices of {share.num_pipelines} '
            "processes. Omit `cache`."
        )


def _check_layout(
    layout: BatchLayout, config: InputConfig, share: ProcessShare, cache: Cache | None, default: ProcessShare
) -> None:
    """Raises ValueError if batches cannot be read for this layout."""
    if cache is not None:
        raise ValueError(
            '`layout` places batches from the host, and cache="device" makes them on the devices. Omit one.'
        )
    if layout.row_axes is None and config.remainder == "pad":
        raise ValueError(
            '`layout` splits the first dimension of some leaves over other axes than that of others, and remainder="pad" has '
            'one weight per example. Split it over the same axes, or pass remainder="drop".'
        )
    if config.own_source and share.num_pipelines > 1 and share != default:
        raise ValueError(
            "`layout` does not split the first dimension as a batch is split without it, so a process needs examples of "
            'others, and the source of each process is its own part of the data. Pass the same source: auto_shard="data".'
        )


def _check_options(batch_size: int | None, seed: int, epochs: int | None, remainder: Remainder, prefetch: int) -> None:
    if batch_size is not None:
        as_int("`batch_size`", batch_size)
    as_int("`seed`", seed)
    if remainder not in get_args(Remainder):
        raise ValueError(f'`remainder` must be "drop", "pad" or "error", got {one_line(remainder)}.')
    if not 0 <= seed < 2**64:
        raise ValueError(f"`seed` must be an integer from 0 to 2**64 - 1, got {seed}.")
    check_epochs(epochs)
    if as_int("`prefetch`", prefetch) < 0:
        raise ValueError(f"`prefetch` must be at least 0, the number of batches to read ahead, got {prefetch}.")
