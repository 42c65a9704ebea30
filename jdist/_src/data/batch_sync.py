"""Agreement on each batch between processes that read independently.

The processes exchange the number of examples of each batch, and errors, so that the data end in the same batch on all
processes and no process waits in a collective for another one that has no more data. The messages go through the key-value
store of `jax.distributed`, from the prefetch thread: no device takes part, and no step waits.
"""

import itertools
import zlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import jax
from jax.sharding import Mesh

from jdist._src.core import activity, call_records
from jdist._src.core.process_messages import MessageExchange, numbered_name
from jdist._src.data.shards import ProcessShare
from jdist._src.data.source_check import SAME_SOURCE, Digest, check_same_digests
from jdist._src.values.process_calls import processes_of

T = TypeVar("T")
_BATCHES_PER_COMPARISON = 16


class Channel(NamedTuple):
    """The name and the processes of a message exchange that has not begun.

    Attributes:
        name: The name of the exchange, which no other exchange has.
        processes: JAX's indices of the processes.
    """

    name: str
    processes: Sequence[int]


def new_channel(mesh: Mesh) -> Channel:
    """Returns the channel of a new exchange between the processes of `mesh`. All of them call it in the same order."""
    processes = processes_of(mesh)
    return Channel(numbered_name(f"jdist/input/{zlib.crc32(repr(processes).encode())}"), processes)


def batch_location(epoch: int, number: int) -> str:
    """Returns the number and the epoch of a batch, for messages."""
    return f" in batch {number} of epoch {epoch}"


class ProcessBatchSync:
    """The agreement of the processes that feed a strategy, with one message exchange per batch.

    Args:
        channel: The exchange. None: this process reads alone, and nothing is exchanged.
        share: The part of each batch that this process holds.
        should_stop: Whether to stop waiting for messages; by default `bool`, which returns False.
    """

    def __init__(self, channel: Channel | None, share: ProcessShare, should_stop: Callable[[], bool] = bool):
        self._exchange: MessageExchange | None = None
        self._pipeline, self._processes, self._num_batches = share.pipeline, channel.processes if channel else (), 0
        if channel is not None:
            self._exchange = MessageExchange(
                channel.name,
                share.pipeline,
                share.num_pipelines,
                "an agreement on a batch",
                should_stop,
                processes=channel.processes,
            )
        self._marks: list[list[int]] | None = None

    def run(self, work: Callable[[], T]) -> T:
        """Returns the result of `work`. If `work` raises, the other processes receive the error instead of a message."""
        try:
            return work()
        except Exception as error:
            if self._exchange is not None:
                self._exchange.post({"error": f"{type(error).__name__}: {error}"})
            raise

    def check_same(self, description: str, digest: Digest | None = None) -> None:
        """Checks that `description` is equal on all processes; and the source, with the digest of some of its examples.

        Raises:
            ValueError: It differs; raised on all processes.
            RuntimeError: A process failed.
        """
        messages = self._all_messages({"description": description, "digest": digest or {}})
        self._check_equal([message["description"] for message in messages], f" {SAME_SOURCE}" * (digest is not None))
        check_same_digests([message["digest"] for message in messages], "", None)

    def exchange(
        self,
        local_counts: dict[int, int],
        width: int,
        description: str | None,
        epoch: int,
        number: int,
        digest: Digest | None = None,
        reread: Callable[[], Digest | None] | None = None,
    ) -> tuple[list[int], int]:
        """Returns the number of examples of each shard in this batch, ordered by shard, and the largest width of all processes.

        Args:
            local_counts: The number of examples of the shards that this process reads.
            width: The width that the rows of this process are padded to, or 0.
            description: The description of the rows of this process, if it has read any.
            epoch: The epoch of the batch.
            number: The number of the batch in the epoch.
            digest: The digest of the first examples of the batch, if the processes compare them.
            reread: Returns the digest after reading these examples again.

        Raises:
            RuntimeError: Another process failed.
            ValueError: The counts, the rows or the digests differ between processes, or the processes are at different batches.
            InterruptedError: `should_stop` returned True.
        """
        if self._exchange is None:
            return list(local_counts.values()), width
        where = batch_location(epoch, number)
        # The same message for all full batches of an epoch: a message that has changed takes another request.
        offset = number - self._num_batches
        message = {
            "counts": list(local_counts.items()),
            "width": width,
            "rows": description,
            "epoch": epoch,
            "offset": offset,
        }
        if digest is not None:
            message["digest"] = digest
        if len(self._processes) == jax.process_count():  # the calls of programs that all processes make are recorded
            if self._num_batches % _BATCHES_PER_COMPARISON == 0:
                self._marks = activity.calls.marks()
            message["marks"] = self._marks
        messages = self._all_messages(message, where)
        self._check_calls([message.get("marks", []) for message in messages])
        self._check_equal([f"the rows{batch_location(m['epoch'], m['offset'] + self._num_batches)}" for m in messages])
        self._num_batches += 1
        self._check_equal([message["rows"] and f"{message['rows']}{where}" for message in messages])
        if digest is not None and reread is not None:
            reread_on_all = lambda: [m["digest"] for m in self._all_messages({"digest": self.run(reread)}, where)]
            check_same_digests([message["digest"] for message in messages], where, reread_on_all)
        counts: dict[int, int] = {}
        for shard, count in itertools.chain.from_iterable(message["counts"] for message in messages):
            if counts.setdefault(shard, count) != count:
                raise ValueError(
                    f"One process has {counts[shard]} examples{where}, and another has {count}. The source is not the same on "
                    f"all processes. {SAME_SOURCE}"
                )
        return [counts[shard] for shard in sorted(counts)], max(message["width"] for message in messages)

    def close(self) -> None:
        """Ends the exchange. Processes that continue receive an error instead of waiting."""
        if self._exchange is not None:
            self._exchange.close({"error": "the iterator was closed there, but not here"})

    def _check_calls(self, marks: Sequence[Sequence[Sequence[int]]]) -> None:
        """Raises ValueError, on all processes, if the processes have made different calls of programs until now."""
        different = call_records.different_processes(dict(enumerate(marks)))
        if different:
            is_different = self._pipeline in different
            messages = self._all_messages({"records": activity.calls.newest_records() if is_different else []})
            activity.calls.note_difference()
            first, other = ((self._processes[pipeline], messages[pipeline]["records"]) for pipeline in different)
            raise ValueError(call_records.difference_text(*first, *other))

    def _all_messages(self, message: dict[str, Any], where: str = "") -> list[dict[str, Any]]:
        messages = self._exchange.exchange(message) if self._exchange is not None else []
        for process, received in enumerate(messages):
            if "error" in received:
                raise RuntimeError(f"Input pipeline {process} could not read its data{where}: {received['error']}")
        return messages

    @staticmethod
    def _check_equal(descriptions: Sequence[str | None], advice: str = "") -> None:
        processes = {text: process for process, text in enumerate(descriptions) if text is not None}
        if len(processes) > 1:
            (text, process), (other_text, other), *_ = processes.items()
            raise ValueError(
                f"Input pipeline {process} has {text}, but pipeline {other} has {other_text}. They must be equal on all "
                f"processes.{advice}"
            )
