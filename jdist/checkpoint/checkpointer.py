"""`Checkpointer`: saves the state of training in the background, and brings it back onto any devices."""

import dataclasses
import os
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, NoReturn, Self

import jax

from jdist._arguments import whole
from jdist._tree import PyTree
from jdist.checkpoint import storage
from jdist.checkpoint.contents import packed, plans_of, read, saved_tree
from jdist.checkpoint.manifest import from_text
from jdist.checkpoint.placement import as_saved, differences, over
from jdist.checkpoint.storage import CheckpointError, in_short
from jdist.checkpoint.structure import leaves_of
from jdist.checkpoint.together import together
from jdist.checkpoint.writer import Writer
from jdist.context import in_replica_function
from jdist.strategies.base import Strategy
from jdist.values.place import check_there


@dataclasses.dataclass(frozen=True)
class Checkpoint:
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
        TypeError: `keep` or `every` is no whole number.
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
        self._keep, self.every = None if keep is None else whole("`keep`", keep, 1), whole("`every`", every, 1)
        self._folder = storage.open_folder(path)
        self._writer: Writer | None = None
        self._saving = -1

    def __repr__(self) -> str:
        return f"Checkpointer({str(self._folder)!r}, keep={self._keep}, every={self.every})"

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
        step = whole("`step`", step, 0)
        if not now and step % self.every:
            return False
        self.wait()
        latest = self.latest
        if latest is not None and step < latest:
            raise ValueError(
                f"{self._folder} has a checkpoint of step {latest}, and one of step {step} would not be found again behind it. "
                f"If that run is given up, delete what it saved later ({self._folder / str(latest)}), or take another folder."
            )
        if step == latest:
            return False
        with jax.transfer_guard("allow"):  # a loop may forbid what it does not mean to do
            arrays, text = packed(step, state, data_position, seed, extra)
            self._write(step, arrays, text)
        return True

    def restore(self, strategy: Strategy, like: PyTree = None, step: int | None = None) -> Checkpoint:
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
        if not isinstance(strategy, Strategy):
            raise TypeError(
                f"`restore` takes a strategy first, to say where the state goes, got {type(strategy).__name__}."
            )
        check_there(strategy.mesh)
        self.wait()
        step = self._found(step)
        with jax.transfer_guard("allow"):
            return self._restored(strategy, like, step)

    def steps(self) -> tuple[int, ...]:
        """The steps of all complete checkpoints, in ascending order."""
        return storage.steps_in(self._folder)

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
        self.wait()
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def _write(self, step: int, arrays: Sequence[Any], text: str) -> None:
        self._saving = step
        try:
            if self._writer is None:
                self._writer = Writer(self._folder, self._keep)
            self._writer.write(step, arrays, text)
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
            f"The checkpoint of step {self._saving} could not be written to {self._folder}: {in_short(error)} "
            f"{self._left()} The state of training is as it was, and the next checkpoint will be tried."
        ) from error

    def _left(self) -> str:
        try:
            steps = self.steps()
        except OSError:
            return "The folder cannot be read either."
        return f"Complete are those of the steps {', '.join(map(str, steps))}." if steps else "There is no other one."

    def _found(self, step: int | None) -> int:
        steps = self.steps()
        if step is None and steps:
            return steps[-1]
        if step is None:
            raise FileNotFoundError(f"There is no complete checkpoint in {self._folder}.")
        if whole("`step`", step, 0) not in steps:
            there = f"There are the steps {', '.join(map(str, steps))}." if steps else "There is none."
            raise FileNotFoundError(f"There is no complete checkpoint of step {step} in {self._folder}. {there}")
        return step

    def _restored(self, strategy: Strategy, like: PyTree, step: int) -> Checkpoint:
        try:
            manifest = from_text(together(lambda: storage.text_file(self._folder, step).read_text()))
            saved = saved_tree(manifest)
        except Exception as error:
            self._refuse(step, error)
        target = as_saved(saved, strategy.replicas.size) if like is None else over(like, strategy.replicas.size)
        if like is not None and (found := differences(leaves_of(saved), leaves_of(target))):
            raise ValueError(
                f"The checkpoint of step {step} in {self._folder} holds another state than `like`. {' '.join(found)} Hand in "
                "the state of the same model and optimizer; or restore without `like`, and take from it what is wanted."
            )
        plans = plans_of(saved, target, strategy.replicas, strategy._view.shardings(target, is_state=False))
        try:
            leaves, extra = read(self._folder, step, manifest, plans)
        except Exception as error:
            self._refuse(step, error)
        leaves = [each.finish(leaf) for each, leaf in zip(plans, leaves, strict=True)]
        state = jax.tree.unflatten(jax.tree.structure(target), leaves)
        return Checkpoint(step, state, manifest["data_position"], extra, manifest)

    def _refuse(self, step: int, error: Exception) -> NoReturn:
        older = [str(other) for other in self.steps() if other < step]
        way_out = (
            f"Complete before it are the steps {', '.join(older)}: `restore(strategy, step={older[-1]})`. To go on from there, "
            f"delete {self._folder / str(step)}."
            if older
            else "There is none before it."
        )
        raise CheckpointError(
            f"The checkpoint of step {step} in {self._folder} is damaged, or cannot be read: {in_short(error)} {way_out}"
        ) from error
