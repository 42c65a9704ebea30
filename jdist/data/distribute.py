"""From what the user hands in to a `DistributedDataset`: which kind of source, who reads what, and what cannot be."""

import functools
import logging
import numbers
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from jax.sharding import Mesh

from jdist.data.batches import Reading, Remainder
from jdist.data.dataset import DistributedDataset
from jdist.data.files import Files
from jdist.data.rows import kind
from jdist.data.sharding import AutoShardPolicy, InputContext, Share, check_split, share_of
from jdist.data.sources import Arrays, Indexed, Stream, source_of
from jdist.values.processes import check_same

_log = logging.getLogger("jdist")


def from_source(
    source: Any,
    batch_size: int | None,
    shuffle: bool,
    seed: int,
    epochs: int | None,
    remainder: Remainder,
    auto_shard: AutoShardPolicy | str,
    prefetch: int,
    mesh: Mesh,
) -> DistributedDataset:
    """The batches of `source`; the arguments are those of `Strategy.distribute_dataset`."""
    _check_options(batch_size, seed, epochs, remainder, prefetch)
    if batch_size is not None:
        check_split(batch_size, mesh.size)
    share = share_of(mesh)
    policy = _policy(AutoShardPolicy.of(auto_shard), source, share.num_pipelines)
    if policy is AutoShardPolicy.HINT:
        source = _sharded(source, share)
    own = policy in (AutoShardPolicy.OFF, AutoShardPolicy.HINT)
    shards = share.num_pipelines if own or policy is AutoShardPolicy.FILE else 1
    if isinstance(source, Files):
        files = functools.partial(source.stream, batch_size is None, shuffle, seed)
        supply, counted = (lambda shard, shards: files(0, 1)) if own else files, False
        said = f"the files {', '.join(map(str, source.paths))}"
    else:
        found = source_of(source, batch_size is None, shuffle, seed)
        supply, counted = (
            (lambda shard, shards: found),
            not isinstance(found, Stream) and not (own and share.num_pipelines > 1),
        )
        said = _check_found(found, source, batch_size, epochs, remainder, share, own)
    said += f", {policy.name}, {batch_size=}, {shuffle=}, {seed=}, {epochs=}, {remainder=}"
    check_same([("The data set", said, None)], mesh)
    common_files = isinstance(source, Files) and not own
    reading = Reading(supply, batch_size, shuffle, seed, epochs, remainder, own, counted, common_files, warn=_once())
    return DistributedDataset(reading, shards, mesh, prefetch)


def from_function(
    fn: Callable[[InputContext], Any], epochs: int | None, remainder: Remainder, prefetch: int, mesh: Mesh
) -> DistributedDataset:
    """The batches of what `fn` makes; the arguments are those of `Strategy.distribute_datasets_from_function`."""
    _check_options(None, 0, epochs, remainder, prefetch)
    share = share_of(mesh)
    made = fn(InputContext(share.num_pipelines, share.pipeline, share.num_replicas))
    _check_once(made, epochs)
    source = source_of(made, True, False, 0)
    reading = Reading(
        lambda *_: source, None, False, 0, epochs, remainder, own=True, replica_batches=True, warn=_once()
    )
    return DistributedDataset(reading, share.num_pipelines, mesh, prefetch)


def _once() -> Callable[[str], None]:
    return functools.cache(_log.warning)


def _policy(policy: AutoShardPolicy, source: Any, processes: int) -> AutoShardPolicy:
    """What AUTO means for this source; and whether FILE is possible."""
    files = len(source.paths) if isinstance(source, Files) else None
    if policy is AutoShardPolicy.AUTO:
        if files is not None and files < processes:
            _log.warning(
                "auto_shard: %d files are not enough for %d processes to read their own, so each reads them all (DATA).",
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
            f'auto_shard="file": {files} files are not enough for {processes} processes to read their own. Take "data", and '
            "each process reads them all."
        )
    return policy


def _sharded(source: Any, share: Share) -> Any:
    if not hasattr(source, "shard"):
        raise ValueError(
            f'auto_shard="hint" asks the source for its `shard(num_shards, index)`, and {type(source).__name__} has none. Take '
            'a part of it by hand, and auto_shard="off".'
        )
    return source.shard(num_shards=share.num_pipelines, index=share.pipeline)


def _check_found(
    found: Indexed | Stream,
    source: Any,
    batch_size: int | None,
    epochs: int | None,
    remainder: Remainder,
    share: Share,
    own: bool,
) -> str:
    """Raises ValueError if `found` has no batches as they are asked for. Says what has to be alike on all processes."""
    if isinstance(found, Stream):
        _check_once(source, epochs)
        here = batch_size if batch_size is None or not own else batch_size // share.num_replicas * len(share.replicas)
        if here and found.batch_size not in (None, here):
            raise ValueError(
                f"The source makes batches of {found.batch_size} examples, and {here} are asked for. Let it make those, or "
                "leave it to the source: `batch_size=None`."
            )
        return "a stream"
    count = len(found)
    if count == 0:
        raise ValueError("The source is empty: there is nothing to distribute.")
    assert batch_size is not None
    left = count % batch_size
    apart = own and share.num_pipelines > 1
    if apart:
        return "own examples"
    if left and remainder == "error":
        raise ValueError(
            f'{count} examples leave {left} over in batches of {batch_size}, and remainder="error" allows only full batches: '
            '"drop" leaves them out, "pad" fills the last batch up.'
        )
    if count < batch_size and remainder == "drop":
        raise ValueError(
            f'{count} examples do not fill one batch of {batch_size}, and remainder="drop" leaves out what does not. Take a '
            'smaller `batch_size`, or remainder="pad".'
        )
    if left and remainder == "drop":
        _log.warning(
            "distribute_dataset leaves out %d of %d examples an epoch, which do not fill a batch of %d. "
            'remainder="pad" keeps them.',
            left,
            count,
            batch_size,
        )
    return f"{count} examples of {kind(found.take(np.zeros(1, int), '')) if isinstance(found, Arrays) else 'any kind'}"


def _check_once(source: Any, epochs: int | None) -> None:
    if isinstance(source, Iterator) and epochs != 1:
        raise ValueError(
            f"The source is a {type(source).__name__}, which can be gone through once, and epochs={epochs}. Hand in what makes "
            "it anew: an object whose `__iter__` starts at the beginning."
        )


def _check_options(batch_size: int | None, seed: int, epochs: int | None, remainder: Remainder, prefetch: int) -> None:
    for name, value in {"batch_size": batch_size, "epochs": epochs, "seed": seed, "prefetch": prefetch}.items():
        optional = name in ("batch_size", "epochs") and value is None
        if not optional and (not isinstance(value, numbers.Integral) or isinstance(value, bool)):
            raise ValueError(f"`{name}` is a whole number, got {value!r}.")
    if remainder not in ("drop", "pad", "error"):
        raise ValueError(f'`remainder` is "drop", "pad" or "error", got {remainder!r}.')
    if not 0 <= seed < 2**64:
        raise ValueError(f"`seed` is a whole number from 0 to 2**64 - 1, got {seed}.")
    if epochs is not None and epochs < 1:
        raise ValueError(f"`epochs` is at least 1, or None for no end, got {epochs}.")
    if prefetch < 0:
        raise ValueError(f"`prefetch` is how many batches to read ahead, 0 for none, got {prefetch}.")
