"""Comparison of a source between processes that pass the complete source.

Each process uses its part of each batch. If the source of each process is already a part of the data, or has another order,
examples would be missed and others repeated. So the processes compare digests of a few examples that all of them read: by index
when the data set is created, and of a stream the first ones of each epoch.
"""

import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeAlias

import jax
import numpy as np

from jdist._src.core.tree import PyTree, named_leaves
from jdist._src.data.array_rows import num_rows
from jdist._src.data.source_iterators import samplers
from jdist._src.data.sources import Arrays, Indexed

NUM_COMPARED = 8  # examples
# By leaf: a checksum of its values, and 1 if they differ between the examples, else 0.
Digest: TypeAlias = dict[str, list[int]]

SAME_SOURCE = (
    'With auto_shard="data" or "auto" each process passes the complete source, and uses its part of each batch. If the source '
    "is divided by process already, such as by a slice, `shard`, `split_dataset_by_node` or a `DistributedSampler`, pass the "
    'complete source, or pass auto_shard="off". If the source shuffles, use the same seed on all processes; or, for a source '
    "with indices, let jdist shuffle: `shuffle=True`."
)


def digest_of(examples: Iterable[PyTree]) -> Digest:
    """Returns the digest of some examples."""
    checksums: dict[str, list[int]] = {}
    for example in examples:
        for name, leaf in named_leaves("source", example):
            array = np.asarray(leaf)
            checksum = zlib.crc32(array.tobytes(), zlib.crc32(f"{array.dtype}{array.shape}".encode()))
            checksums.setdefault(name, []).append(checksum)
    return {name: [zlib.crc32(repr(values).encode()), int(len(set(values)) > 1)] for name, values in checksums.items()}


def digest_of_rows(rows: PyTree) -> Digest:
    """Returns the digest of the first rows of a batch."""
    return digest_of(jax.tree.map(lambda x, i=i: x[i], rows) for i in range(min(NUM_COMPARED, num_rows(rows))))


def digest_of_indexed(source: Indexed) -> Digest:
    """Returns the digest of a few examples of `source`, without leaves that differ when an example is read again.

    It is empty if reading raises an error, which is raised later with the place of the example.
    """
    indices = np.unique(np.linspace(0, len(source) - 1, NUM_COMPARED).astype(int)) if len(source) else np.empty(0, int)
    try:
        digest, *again = [
            digest_of_rows(source.take(indices, "")) for _ in range(1 if isinstance(source, Arrays) else 2)
        ]
    except Exception:
        return {}
    return {name: values for name, values in digest.items() if all(other.get(name) == values for other in again)}


def check_same_digests(digests: Sequence[Digest], where: str, reread: Callable[[], Sequence[Digest]] | None) -> None:
    """Checks that the examples of all processes are equal, except for random augmentation.

    Args:
        digests: The digest of each process.
        where: The place of the examples, for messages.
        reread: Returns the digests after each process has read the same examples again. Called if they differ. A leaf that
            differs then is random, in its values or in its order: in its values if another leaf has the same order on all
            processes. None if random leaves are not in `digests`.

    Raises:
        ValueError: The examples differ.
    """
    different = list(_different(digests))
    if not different:
        return
    if reread is not None:
        again = reread()
        random = {name for one, two in zip(digests, again, strict=True) for name in one if one[name] != two.get(name)}
        equal = {name for name in digests[0] if name not in random and name not in dict(different)}
        if any(digest.get(name, (0, 0))[1] for name in equal for digest in digests):
            different = [(name, process) for name, process in different if name not in random]
        different.sort(key=lambda leaf: leaf[0] in random)
    for name, process in different:
        raise ValueError(
            f"The source is not the same on all processes: {name} of the same examples{where} differs between input pipelines "
            f"0 and {process}. {SAME_SOURCE} Random augmentation in the source needs a seed per example, such as "
            "`np.random.default_rng((seed, index))`."
        )


def _different(digests: Sequence[Digest]) -> Iterator[tuple[str, int]]:
    """Yields the name of each leaf that differs from that of process 0, and the first such process."""
    for name, values in digests[0].items():
        others = (process for process, digest in enumerate(digests) if digest.get(name, values) != values)
        if (process := next(others, None)) is not None:
            yield name, process


def shard_of(source: Any) -> str | None:
    """Returns a description of the shard that a source of a library reads, if it names one; None if it reads everything."""
    for sampler in samplers(source):  # torch's `DistributedSampler`, and samplers with its attributes
        if _is_many(count := getattr(sampler, "num_replicas", None)) and hasattr(sampler, "rank"):
            return f"{type(sampler).__name__}(num_replicas={count}, rank={sampler.rank})"
    for part in (source, getattr(source, "_sampler", None)):  # `grain.DataLoader`
        options = getattr(part, "_shard_options", None)
        if _is_many(count := getattr(options, "shard_count", None)):
            return f"ShardOptions(shard_index={getattr(options, 'shard_index', None)}, shard_count={count})"
    distributed = getattr(source, "_distributed", None)  # `split_dataset_by_node` of a Hugging Face `IterableDataset`
    if _is_many(count := getattr(distributed, "world_size", None)):
        return f"split_dataset_by_node(rank={getattr(distributed, 'rank', None)}, world_size={count})"
    parts: list[Any] = [source]
    while parts:  # the inputs of a `tf.data.Dataset`
        part = parts.pop()
        if type(part).__name__ == "_ShardDataset" and _is_many(count := _as_int(getattr(part, "_num_shards", None))):
            return f"shard(num_shards={count}, index={_as_int(getattr(part, '_index', None))})"
        if type(part).__module__.startswith("tensorflow") and hasattr(part, "_inputs"):
            parts += part._inputs()
    return None


def _is_many(count: Any) -> bool:
    return isinstance(count, (int, np.integer)) and int(count) > 1


def _as_int(tensor: Any) -> int | None:
    try:
        return int(tensor)
    except (TypeError, ValueError):  # a symbolic tensor
        return None
