"""`Checkpointer`: saves the state of training in the background, and brings it back onto any devices."""

import dataclasses
import os
import pathlib
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, NoReturn, Self, TypeVar

import jax

from jdist._src.checkpoint import storage
from jdist._src.checkpoint.lock import FolderLock
from jdist._src.checkpoint.process_sync import Facts, ProcessGroup
from jdist._src.checkpoint.serialization import SavePlan, checked, packed, read
from jdist._src.checkpoint.source import RestorePlan, found_step, manifest_in, source_of, warn_of_incomplete
from jdist._src.checkpoint.storage import CheckpointError, short_message
from jdist._src.checkpoint.writer import Writer
from jdist._src.core.arguments import as_int
from jdist._src.core.atomic_files import check_path
from jdist._src.core.tree import PyTree
from jdist._src.replica.context import in_replica_function
from jdist._src.strategies.base import Strategy
from jdist._src.values.device_put import check_devices_attached

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class RestoredCheckpoint:
    """What a checkpoint holds.

    Attributes:
        step: After which step it was saved.
        state: The state, on the strategy's devices.
        data_position: Where the data go on, as it was handed to `save`.
        extra: What was kept beside the state: dicts and lists, arrays on the host, numbers and text.
        manifest: What the checkpoint says of itself: versions, time, seed, and each leaf.
    """

    step: int
    state: PyTree
    data_position: Any
    extra: PyTree
    manifest: Mapping[str, Any]


class Checkpointer:
    """A folder of checkpoints, a folder for each step.

    A checkpoint is written while training goes on, by all processes together, and has its name only when it is complete:
    a process that ends at any moment leaves the one before. Nothing in it depends on the devices, and it comes back onto
    any number of them, under any strategy. `STEP/manifest/manifest.json` says in text what is in it.

    Mutable: it knows of the save that is on its way. Leave it by `with`, or call `close`, or the last save may be lost.

    Args:
        path: The folder: new, empty, or with checkpoints. On several processes, one that all of them see.
        keep: How many of the newest checkpoints are kept; None for all.
        every: Of which steps checkpoints are due: those that it divides.

    Raises:
        ValueError: `path` has other things in it, or a number is less than 1.
        TypeError: `path` is not a path; `keep` or `every` is not an integer.
        CheckpointError: The folder cannot be made.

    Example:
        >>> import tempfile
        >>> strategy = jdist.MirroredStrategy(["cpu:0", "cpu:1"])
        >>> state = strategy.put({"w": np.float32([1, 2]), "step": np.int32(100)})
        >>> folder = tempfile.TemporaryDirectory()
        >>> with Checkpointer(folder.name, every=100) as checkpointer:
        ...     saved = [checkpointer.save(step, state, {"batch": step}) for step in (99, 100)]
        ...     found = checkpointer.restore(jdist.ShardedStrategy())
        >>> saved, found.step, found.state["w"].tolist(), found.data_position
        ([False, True], 100, [1.0, 2.0], {'batch': 100})
        >>> folder.cleanup()
    """

    def __init__(self, path: str | os.PathLike[str], keep: int | None = 3, every: int = 1):
        check_path("Checkpointer(path)", path)
        self._keep, self.every = None if keep is None else as_int("`keep`", keep, 1), as_int("`every`", every, 1)
        self._folder = storage.open_folder(path)
        self._writer: Writer | None = None
        self._calls: ProcessGroup | None = None  # in which the processes compare their calls
        self._lock: FolderLock | None = None
        self._saving = -1
        self._damaged: set[int] = set()  # steps that `restore` could not read

    def __repr__(self) -> str:
        return f"Checkpointer({str(self._folder)!r}, keep={self._keep}, every={self.every})"

    @property
    def folder(self) -> pathlib.Path:
        """The folder of the checkpoints."""
        return self._folder

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.close()
        except CheckpointError as problem:
            if error is None:
                raise
            error.add_note(str(problem))

    def save(
        self,
        step: int,
        state: PyTree,
        data_position: Any = None,
        *,
        seed: Any = None,
        extra: PyTree = None,
        now: bool = False,
    ) -> bool:
        """Saves a checkpoint in the background, if one is due.

        When it returns, the arrays are copied: the next step may take their memory over. All processes call it alike.

        Args:
            step: After which step.
            state: The state of training: a tree of arrays and numbers, some in wrappers.
            data_position: Where the data go on: what `get_state` of an iterator gave, or other JSON.
            seed: What the run was seeded with, to be found in the manifest.
            extra: What is to be kept beside the state: a tree of dicts and lists of arrays, numbers and text.
            now: Whether it is due whatever the step.

        Returns:
            Whether it is saved now. Not if none is due, and not if that of this step is there already.

        Raises:
            ValueError: A later step is saved here already; or a leaf has no value any more.
            TypeError: A leaf is nothing that can be saved.
            CheckpointError: The checkpoint before, or this one, could not be written. The state is as it was, and the next
                one will be tried.
        """
        if in_replica_function():
            raise RuntimeError("`save` is called by the host program, between the calls of a step.")
        if not now and not self._is_due(step):
            return False
        self.wait()
        with jax.transfer_guard("allow"):  # a loop may forbid what it does not mean to do
            contents = self._agreed("save", lambda: self._contents(step, state, data_position, seed, extra))
            if contents is not None:
                self._write(contents)
        return contents is not None

    def restore(self, strategy: Strategy, like: PyTree = None, step: int | None = None) -> RestoredCheckpoint:
        """A checkpoint, its state on the devices of a strategy: each part is read to where it belongs.

        Wrappers keep their meaning. A sum over the replicas is shared out anew; other partial values, and what is
        `PerReplica`, come back bit by bit on as many replicas as before. On another number, partial values are
        aggregated and given to each, and a `PerReplica` is refused.

        Args:
            strategy: Where the state goes on.
            like: A state, or its shapes, `jax.eval_shape(lambda key: strategy.init(make, key), key)`, of which the state
                takes containers and wrappers. By default it has the wrappers with which it was saved, in dicts and lists.
            step: Which one; the newest by default.

        Raises:
            FileNotFoundError: There is no checkpoint, or none of this step.
            ValueError: The state is another one than `like`, or does not fit the strategy; the message names the leaves.
            CheckpointError: A file of it is damaged, or cannot be read.
        """
        self.wait()
        with jax.transfer_guard("allow"):
            source = self._agreed("restore", lambda: self._source(strategy, like, step))
            found = self._restored(source)
        if step is None:
            warn_of_incomplete(self._folder, found.step)
        return found

    def steps(self) -> tuple[int, ...]:
        """The steps of all complete checkpoints, in ascending order."""
        return storage.complete_steps(self._folder)

    @property
    def latest(self) -> int | None:
        """The step of the newest complete checkpoint; None if there is none."""
        return max(self.steps(), default=None)

    def wait(self) -> None:
        """Waits until what is on its way is written.

        Raises:
            CheckpointError: It could not be written.
        """
        if self._writer is None:
            return
        try:
            self._writer.wait()
        except Exception as error:
            self._fail(error)

    def close(self) -> None:
        """Waits for what is on its way, and ends the threads that write. The next save begins anew.

        Raises:
            CheckpointError: What was on its way could not be written.
        """
        try:
            self.wait()
            if self._writer is not None:
                self._writer.close()
                self._writer = None
        finally:
            if self._lock is not None:
                self._lock.release()
                self._lock = None
            if self._calls is not None:
                self._calls.leave("its `Checkpointer` is closed")
                self._calls = None

    def _is_due(self, step: Any) -> bool:
        try:
            return as_int("`step`", step, 0) % self.every == 0
        except (TypeError, ValueError):
            return True  # it is refused where the other processes hear of it

    def _agreed(self, call: str, work: Callable[[], tuple[T, Facts]]) -> T:
        """See `Group.agreed`. One group for all calls, so that different calls are noticed."""
        self._calls = self._calls or ProcessGroup()
        return self._calls.agreed(call, work)

    def _contents(
        self, step: int, state: PyTree, data_position: Any, seed: Any, extra: PyTree
    ) -> tuple[SavePlan | None, Facts]:
        """The checked contents of a checkpoint, None if there is one of this step; and what all processes must agree on."""
        step = as_int("`step`", step, 0)
        if (
            self._lock is None and jax.process_index() == 0
        ):  # of a job of several processes, process 0 writes the manifest
            self._lock = FolderLock(self._folder, owner=self)
        latest = max(set(self.steps()) - self._damaged, default=None)
        if latest is not None and step < latest:
            raise ValueError(
                f"{self._folder} has a checkpoint of step {latest}, and one of step {step} would not be found again behind it. "
                f"If that run is given up, delete what it saved later ({self._folder / str(latest)}), or take another folder."
            )
        facts = {"`step`": [str(step)], "the latest checkpoint": [f"step {latest}"]}
        if step == latest:
            return None, facts
        contents = checked(step, state, data_position, seed, extra)
        return contents, {**facts, **contents.facts, "the damaged checkpoints": [str(self._to_set_aside(step))]}

    def _to_set_aside(self, step: int) -> list[int]:
        """The steps of damaged folders that are in the way of a checkpoint of `step`, or would be taken for a newer one."""
        incomplete = {int(child.name) for child in storage.incomplete_folders(self._folder, step - 1)}
        return sorted(self._damaged | (incomplete & {step}))

    def _write(self, contents: SavePlan) -> None:
        self._saving = contents.step
        try:
            damaged = self._to_set_aside(contents.step)
            if damaged and self._writer is not None:  # it remembers the steps that it has seen
                self._writer.close()
                self._writer = None
            self._writer = self._writer or Writer(self._folder, self._keep)
            self._writer.write(contents.step, lambda: packed(contents), damaged)
            self._damaged.clear()
        except Exception as error:
            self._fail(error)

    def _fail(self, error: Exception) -> NoReturn:
        writer, self._writer = self._writer, None
        if writer is not None:
            try:
                writer.close()
            except Exception as again:
                error.add_note(str(again))
        raise CheckpointError(
            f"The checkpoint of step {self._saving} could not be written to {self._folder}: {short_message(error)} "
            f"{self._left()} The state of training is as it was, and the next checkpoint will be tried."
        ) from error

    def _left(self) -> str:
        try:
            steps = self.steps()
        except OSError:
            return "The folder cannot be read either."
        return f"Complete are those of the steps {', '.join(map(str, steps))}." if steps else "There is no other one."

    def _source(self, strategy: Strategy, like: PyTree, step: int | None) -> tuple[RestorePlan, Facts]:
        """What a restore reads, found without collectives, so that it can fail on one process of several."""
        if not isinstance(strategy, Strategy):
            raise TypeError(
                f"`restore` takes a strategy first, to say where the state goes, got {type(strategy).__name__}."
            )
        check_devices_attached(strategy.mesh)
        step = found_step(self._folder, step)
        try:
            manifest, saved = manifest_in(self._folder, step)
        except Exception as error:
            self._refuse(step, error)
        return source_of(f"The checkpoint of step {step} in {self._folder}", manifest, saved, strategy, like)

    def _restored(self, source: RestorePlan) -> RestoredCheckpoint:
        step, manifest = source.step, source.manifest
        try:
            with ProcessGroup() as group:
                leaves, extra = read(group, self._folder, step, manifest, source.plans)
        except Exception as error:
            self._refuse(step, error)
        leaves = [each.finish(leaf) for each, leaf in zip(source.plans, leaves, strict=True)]
        state = jax.tree.unflatten(source.structure, leaves)
        self._damaged.discard(step)
        return RestoredCheckpoint(step, state, manifest["data_position"], extra, manifest)

    def _refuse(self, step: int, error: Exception) -> NoReturn:
        self._damaged.add(step)
        older = [str(other) for other in self.steps() if other < step]
        way_out = (
            f"Complete before it are the steps {', '.join(older)}: `restore(strategy, step={older[-1]})`. The next `save` of "
            f"this `Checkpointer` renames the folder to {step}.damaged; to continue with `fit(resume=...)`, "
            f"delete {self._folder / str(step)}."
            if older
            else "There is none before it."
        )
        raise CheckpointError(
            f"The checkpoint of step {step} in {self._folder} is damaged, or cannot be read: {short_message(error)} {way_out}"
        ) from error


def newest_step(checkpointer: Checkpointer) -> int | None:
    """Returns the step that a resumed run begins with, None if there is no checkpoint. All processes call it.

    Raises:
        CheckpointError: The processes see different checkpoints.
    """

    def found() -> tuple[int | None, Facts]:
        latest = checkpointer.latest
        return latest, {"the latest checkpoint": ["none" if latest is None else f"step {latest}"]}

    checkpointer.wait()
    latest = checkpointer._agreed("resume", found)
    warn_of_incomplete(checkpointer._folder, latest)
    return latest
