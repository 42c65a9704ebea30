"""When data end for all: processes that read for themselves agree on each batch before any of them hands it out.

How many examples there are is said, and whether one has failed, so none waits in a collective for another that is at its end.
It is said through the store that the processes share, from the thread that reads ahead: no device takes part, and no step
waits.
"""

import itertools
import json
from collections.abc import Callable
from typing import Any, TypeVar

from jdist._compat import shared_store

_PATIENCE = 200  # milliseconds between two looks at whether to go on waiting
_conversations = itertools.count()  # every process runs the same program, and so counts alike
T = TypeVar("T")


class Alone:
    """Nobody to agree with."""

    def told(self, work: Callable[[], T]) -> T:
        """What `work` gives."""
        return work()

    def counts(self, mine: dict[int, int], kind: str | None, where: str) -> list[int]:
        """How many examples each shard has."""
        return list(mine.values())


class Agreement:
    """One conversation of the processes that feed a strategy, a round a batch.

    Args:
        pipeline: The number of this process among them.
        num_pipelines: How many they are.
        stopped: Says whether to give up.
    """

    def __init__(self, pipeline: int, num_pipelines: int, stopped: Callable[[], bool]):
        self._pipeline, self._num_pipelines, self._stopped = pipeline, num_pipelines, stopped
        self._store = shared_store()
        self._name = f"jdist/input/{next(_conversations)}"
        self._round = 0

    def told(self, work: Callable[[], T]) -> T:
        """What `work` gives; if it fails, the other processes hear of it in this round."""
        try:
            return work()
        except Exception as error:
            self._say({"error": f"{type(error).__name__}: {error}"})
            raise

    def counts(self, mine: dict[int, int], kind: str | None, where: str) -> list[int]:
        """How many examples each shard has in this batch, shard by shard, the same on every process.

        Args:
            mine: How many there are in the shards that this process reads.
            kind: What its batches are like, if it has had any.
            where: Which batch it is.

        Raises:
            RuntimeError: Another process failed.
            ValueError: The processes do not have the same, or not of the same kind.
            InterruptedError: It was given up.
        """
        own = {"counts": list(mine.items()), "kind": kind}
        self._say(own)
        said = [own if i == self._pipeline else json.loads(self._heard(i)) for i in range(self._num_pipelines)]
        if self._round > 0:  # whoever has spoken in this round has heard the one before
            self._store.key_value_delete(self._key(self._round - 1, self._pipeline))
        self._round += 1
        for process, message in enumerate(said):
            if "error" in message:
                raise RuntimeError(f"Input pipeline {process} could not read its data{where}: {message['error']}")
        kinds = {message["kind"]: process for process, message in enumerate(said) if message["kind"] is not None}
        if len(kinds) > 1:
            (one, a), (other, b), *_ = kinds.items()
            raise ValueError(
                f"Input pipeline {a} gives {one}, and {b} gives {other}{where}. Make their sources give the "
                "same structure, dtypes and shapes."
            )
        counts: dict[int, int] = {}
        for shard, count in itertools.chain.from_iterable(message["counts"] for message in said):
            if counts.setdefault(shard, count) != count:
                raise ValueError(
                    f"One process has {counts[shard]} examples{where}, and another has {count}. Each has to hand in "
                    'the same source; if each has a share of its own, say `auto_shard="off"`.'
                )
        return [counts[shard] for shard in sorted(counts)]

    def _key(self, number: int, pipeline: int) -> str:
        return f"{self._name}/{number}/{pipeline}"

    def _say(self, message: dict[str, Any]) -> None:
        self._store.key_value_set(self._key(self._round, self._pipeline), json.dumps(message))

    def _heard(self, pipeline: int) -> str:
        while not self._stopped():
            try:
                return self._store.blocking_key_value_get(self._key(self._round, pipeline), _PATIENCE)
            except RuntimeError as error:
                if "DEADLINE_EXCEEDED" not in str(error):
                    raise
        raise InterruptedError("The iterator was closed while it waited for what other processes read.")
