"""The configuration of a distributed data set: its source and the options of `distribute_dataset`."""

import dataclasses
import logging
from collections.abc import Callable
from typing import Any, Literal, TypeAlias

import numpy as np

from jdist._src.core.arguments import as_int
from jdist._src.data.array_rows import describe_row
from jdist._src.data.buckets import Buckets
from jdist._src.data.files import Files
from jdist._src.data.shards import ProcessShare
from jdist._src.data.sources import Arrays, Indexed, Stream

Remainder: TypeAlias = Literal["drop", "pad", "error"]
Cache: TypeAlias = Literal["device"]
_MAX_TEXT = 120  # characters of a list of leaves
_log = logging.getLogger("jdist")


@dataclasses.dataclass(frozen=True)
class InputConfig:
    """A source and the options of reading it.

    Attributes:
        source: The source.
        batch_size: The number of examples in a global batch; None if the source yields batches.
        shuffle: Whether each epoch has its own order, for examples with an index.
        seed: The seed of that order.
        epochs: The number of epochs; None for an infinite data set.
        remainder: The treatment of a partial batch.
        own_source: Whether each process has its own source, for its own replicas.
        replica_batches: Whether an element of the source is the batch of one replica.
        has_rows: Whether the leaves of an element have rows, one per example. If not, an element is one value of any shape,
            which the source yields as a batch of one row.
        buckets: The widths that batches of varying width are padded to.
        check: Raises an error for rows, leaves `[row, ...]`, of a batch whose place the second argument names.
        warn: Logs a warning. The one that `distribute` passes logs each text once.
    """

    source: Indexed | Stream | Files
    batch_size: int | None
    shuffle: bool
    seed: int
    epochs: int | None
    remainder: Remainder
    own_source: bool = False
    replica_batches: bool = False
    has_rows: bool = True
    buckets: Buckets | None = None
    check: Callable[[Any, str], None] | None = None
    warn: Callable[[str], None] = _log.warning

    def __post_init__(self) -> None:
        if self.is_endless and self.epochs not in (None, 1):
            raise ValueError(
                f"The source is endless, so its first epoch does not end, got epochs={self.epochs}. Pass `epochs=None`, and "
                "end the loop after a number of batches: `itertools.islice(dataset, 1000)`."
            )
        if self.one_shot is not None and self.epochs != 1:
            kind, advice = self.one_shot
            raise ValueError(f"The source is a {kind}, which can be read only once, but epochs={self.epochs}. {advice}")

    @property
    def is_endless(self) -> bool:
        """Whether the source is infinite, such as a function of the step."""
        return isinstance(self.source, Stream) and self.source.endless

    @property
    def one_shot(self) -> tuple[str, str] | None:
        """If the source can be read only once, its class and the advice to pass another one; see `Stream`."""
        return self.source.one_shot if isinstance(self.source, Stream) else None

    @property
    def method(self) -> str:
        """The name of the strategy's method, for messages."""
        return "distribute_datasets_from_function" if self.replica_batches else "distribute_dataset"

    @property
    def smaller_batch_advice(self) -> str:
        """Advice for messages: how to make smaller batches."""
        if self.replica_batches:
            return "Let the function return smaller batches"
        return "Let the source yield smaller batches" if self.batch_size is None else "Use a smaller `batch_size`"

    @property
    def no_examples_advice(self) -> str:
        """Advice for messages: what to do if a process reads zero examples."""
        if self.replica_batches:
            return "Let the function return at least one batch on each process."
        return 'Pass a source with examples on each process, or the same source on all: `auto_shard="data"`.'

    def num_examples(self, share: ProcessShare) -> int | None:
        """Returns the number of examples of an epoch, or None if it is unknown before the source is read."""
        is_partial = self.own_source and share.num_pipelines > 1
        return None if is_partial or isinstance(self.source, (Stream, Files)) else len(self.source)

    def num_batches(self, share: ProcessShare) -> int | None:
        """Returns the number of batches of an epoch, or None if it is unknown before the source is read."""
        examples = self.num_examples(share)
        if examples is None or self.batch_size is None:
            return None
        full, rest = divmod(examples, self.batch_size)
        return full + (rest > 0 and self.remainder == "pad")

    def facts(self, share: ProcessShare) -> dict[str, str]:
        """Returns the source and the options as text, by name. Does not read the source."""
        size = self.batch_size
        return {
            "source": self._source_text(),
            "batch_size": "from the source" if size is None else f"{size:,}",
            "epochs": "endless" if self.epochs is None or self.is_endless else f"{self.epochs:,}",
            "shuffle": f"True, seed={self.seed}" if self.shuffle else "False",
            "remainder": self.remainder,
            "replicas": str(share.num_replicas),
        }

    def _source_text(self) -> str:
        source = self.source
        if isinstance(source, Arrays):
            leaves = describe_row(source.take(np.zeros(min(len(source), 1), int), ""))
            leaves = leaves if len(leaves) <= _MAX_TEXT else f"{leaves[:_MAX_TEXT]}..."
            return f"{len(source):,} examples, {leaves}"
        if isinstance(source, Files):
            return f"{len(source.paths):,} files"
        if isinstance(source, Stream):
            return f"{'endless' if source.endless else 'a'} stream of {'batches' if source.are_batches else 'examples'}"
        return f"{len(source):,} examples"


def check_epochs(epochs: Any) -> None:
    """Raises TypeError or ValueError if `epochs` is not None or a positive integer."""
    if epochs is not None and as_int("`epochs`", epochs) < 1:
        raise ValueError(f"`epochs` must be at least 1, or None for an infinite data set, got {epochs}.")
