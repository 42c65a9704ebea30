"""When data end for all: processes that read for themselves agree on each batch before any of them hands it out.

How many examples there are is said, and whether one has failed, so none waits in a collective for another that is at its end.
It is said through the store that the processes share, from the thread that reads ahead: no device takes part, and no step
waits.
"""

import itertools
import zlib
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from jax.sharding import Mesh

from jdist._src.core.process_messages import MessageExchange, numbered_name

T = TypeVar("T")


def channel_name(mesh: Mesh) -> str:
    """A name for a new conversation of the processes of `mesh`."""
    among = tuple(sorted({device.process_index for device in mesh.devices.flat}))
    return numbered_name(f"jdist/input/{zlib.crc32(repr(among).encode())}")


class SingleProcessSync:
    """Nobody to agree with."""

    def told(self, work: Callable[[], T]) -> T:
        """What `work` gives."""
        return work()

    def counts(self, mine: dict[int, int], kind: str | None, where: str) -> list[int]:
        """How many examples each shard has."""
        return list(mine.values())

    def leave(self) -> None:
        """Nobody waits."""


class ProcessBatchSync:
    """One conversation of the processes that feed a strategy, a round a batch.

    Args:
        name: That of the conversation.
        pipeline: The number of this process among them.
        num_pipelines: How many they are.
        stopped: Says whether to give up.
    """

    def __init__(self, name: str, pipeline: int, num_pipelines: int, stopped: Callable[[], bool] = bool):
        self._conversation = MessageExchange(name, pipeline, num_pipelines, stopped)

    def told(self, work: Callable[[], T]) -> T:
        """What `work` gives; if it fails, the other processes hear of it in this round."""
        try:
            return work()
        except Exception as error:
            self._conversation.post({"error": f"{type(error).__name__}: {error}"})
            raise

    def same(self, what: str) -> None:
        """Raises ValueError, on all, if the processes do not all say the same in this round; RuntimeError if one failed."""
        self._compared([message["what"] for message in self._round({"what": what})])

    def counts(self, mine: dict[int, int], kind: str | None, where: str) -> list[int]:
        """How many examples each shard has in this batch, shard by shard, the same on every process.

        Args:
            mine: How many there are in the shards that this process reads.
            kind: What its batches are like, if it has had any.
            where: Which batch it is.

        Raises:
            RuntimeError: Another process failed.
            ValueError: The processes do not have the same, or not of the same kind, or are at different batches.
            InterruptedError: It was given up.
        """
        said = self._round({"counts": list(mine.items()), "kind": kind, "where": where}, where)
        self._compared([f"the rows{message['where']}" for message in said])
        self._compared([message["kind"] and f"{message['kind']}{where}" for message in said])
        counts: dict[int, int] = {}
        for shard, count in itertools.chain.from_iterable(message["counts"] for message in said):
            if counts.setdefault(shard, count) != count:
                raise ValueError(
                    f"One process has {counts[shard]} examples{where}, and another has {count}. Each has to hand in "
                    'the same source; if each has a share of its own, say `auto_shard="off"`.'
                )
        return [counts[shard] for shard in sorted(counts)]

    def leave(self) -> None:
        """Nothing more is said: others that go on are told so, and do not wait."""
        self._conversation.leave({"error": "it was closed there, and not here"})

    def _round(self, message: dict[str, Any], where: str = "") -> list[dict[str, Any]]:
        said = self._conversation.round(message)
        for process, heard in enumerate(said):
            if "error" in heard:
                raise RuntimeError(f"Input pipeline {process} could not read its data{where}: {heard['error']}")
        return said

    @staticmethod
    def _compared(said: Sequence[str | None]) -> None:
        kinds = {what: process for process, what in enumerate(said) if what is not None}
        if len(kinds) > 1:
            (one, a), (other, b), *_ = kinds.items()
            raise ValueError(f"Input pipeline {a} has {one}, and {b} has {other}. Make them alike on all processes.")
