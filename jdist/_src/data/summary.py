"""Short texts and HTML tables for distributed data sets and their iterators. Nothing of the source is read for them."""

from collections.abc import Mapping

import numpy as np

from jdist._src.core import html
from jdist._src.data.array_rows import kind
from jdist._src.data.batches import InputConfig
from jdist._src.data.files import Files
from jdist._src.data.shards import ProcessShare
from jdist._src.data.sources import Arrays, Stream

_LONGEST = 120  # characters of a list of leaves


def facts(reading: InputConfig, share: ProcessShare) -> dict[str, str]:
    """Returns the source and the options of a data set as text, by their names."""
    size = reading.batch_size
    return {
        "source": source_in_words(reading),
        "batch_size": "that of the source" if size is None else f"{size:,}",
        "epochs": "without an end" if reading.epochs is None or _is_endless(reading) else f"{reading.epochs:,}",
        "shuffle": f"True, seed={reading.seed}" if reading.shuffle else "False",
        "remainder": reading.remainder,
        "replicas": str(share.num_replicas),
    }


def source_in_words(reading: InputConfig) -> str:
    """Returns the number and the kind of the examples, as far as they are known before the source is read."""
    source = reading.source
    if isinstance(source, Arrays):
        leaves = kind(source.take(np.zeros(min(len(source), 1), int), ""))
        leaves = leaves if len(leaves) <= _LONGEST else f"{leaves[:_LONGEST]}..."
        return f"{len(source):,} examples, {leaves}"
    if isinstance(source, Files):
        return f"{len(source.paths):,} files"
    if isinstance(source, Stream):
        return f"{'batches' if source.batches else 'examples'} {'without an end' if source.endless else 'of a stream'}"
    return f"{len(source):,} examples"


def text(title: str, described: Mapping[str, str]) -> str:
    """Returns a title and facts as one line of text.

    Example:
        >>> text("DistributedDataset", {"source": "8 examples", "batch_size": "4"})
        '<DistributedDataset: source: 8 examples; batch_size: 4>'
    """
    return f"<{title}: {'; '.join(f'{name}: {fact}' for name, fact in described.items())}>"


def table(title: str, described: Mapping[str, str]) -> str:
    """Returns a title and facts as an HTML table with one row per fact."""
    return html.block(html.heading(title), html.table(described.items()))


def _is_endless(reading: InputConfig) -> bool:
    return isinstance(reading.source, Stream) and reading.source.endless
