"""`Checkpointer`: saves training states in the background, and restores them onto any devices."""

import contextlib
import dataclasses
import inspect
import logging
import os
import pathlib
import threading
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, Generic, NoReturn, Self, TypeVar, overload

import jax

from jdist._src.checkpoint import storage, unfinished_saves
from jdist._src.checkpoint.leaf_selection import as_paths, as_renames
from jdist._src.checkpoint.manifest import read_manifest
from jdist._src.checkpoint.preservation import Mode, Preservation, as_best_metric, as_metrics
from jdist._src.checkpoint.process_sync import Facts, ProcessGroup
from jdist._src.checkpoint.read_limit import read_limits, read_within_limit
from jdist._src.checkpoint.restore_plan import RestorePlan, make_restore_plan
from jdist._src.checkpoint.save_plan import SavePlan, make_save_plan
from jdist._src.checkpoint.storage import CheckpointError, FolderLock, listed, short_message, write_error
from jdist._src.checkpoint.writer import Writer
from jdist._src.core import activity
from jdist._src.core.arguments import as_int, function_name
from jdist._src.core.atomic_files import check_path
from jdist._src.core.call_errors import explains_arguments
from jdist._src.core.source_lines import caller_frame
from jdist._src.core.tree import PyTree
from jdist._src.replica.context import in_replica_function
from jdist._src.strategies.base import Strategy
from jdist._src.values.device_put import check_devices_attached
from jdist._src.values.process_calls import record_lines

T = TypeVar("T")
_LOG = logging.getLogger("jdist")


@dataclasses.dataclass(frozen=True)
class RestoredCheckpoint(Generic[T]):
    """A checkpoint that `Checkpointer.restore` returned.

    Attributes:
        step: The number of steps that led to the state.
        state: The state, on the strategy's devices.
        data_position: The data position that was passed to `save`.
        extra: The `extra` that was passed to `save`, in dicts and lists, with arrays on the host.
        manifest: The content of the manifest: versions, time, seed, metrics, and a description of each array.
        unrestored: The paths of the leaves of `like` that `only` excluded: they are the leaves of `like`.
        unused: The paths of the saved leaves that `only` excluded.

    Example:
        >>> import tempfile
        >>> strategy = jdist.OneDeviceStrategy("cpu:0")
        >>> folder = tempfile.TemporaryDirectory()
        >>> with jdist.Checkpointer(folder.name) as checkpointer:
        ...     checkpointer.save(7, strategy.put({"w": np.float32(2)}), extra={"lr": 0.1})
        ...     restored = checkpointer.restore(strategy)
        True
        >>> restored.step, float(restored.state["w"]), restored.extra
        (7, 2.0, {'lr': 0.1})
        >>> folder.cleanup()
    """

    step: int
    state: T
    data_position: Any
    extra: PyTree
    manifest: Mapping[str, Any]
    unrestored: tuple[str, ...] = ()
    unused: tuple[str, ...] = ()


class Checkpointer:
    """A folder of checkpoints, with one folder per step.

    A checkpoint is written while training continues, by all processes together. Its folder gets its final name when it is
    complete, so a process that is killed at any moment leaves the previous checkpoint intact. A checkpoint does not depend on
    the devices: it can be restored onto any number of them, under any strategy. `STEP/manifest/manifest.json` describes its
    contents as text.

    Use it in a `with` statement, or call `close`: they raise the error of a save that could not be written. Otherwise the
    interpreter waits for the save at exit, and if it cannot be written, prints the error and ends with exit status 1. A process
    that is killed, or ends by `os._exit`, does not wait. Mutable: it holds the save in progress.

    Args:
        path: The folder: new, empty, or with checkpoints; also a URL, `gs://bucket/run`. On several processes, a folder that
            all of them can read and write.
        keep: The number of newest checkpoints that are kept; None keeps all. Older ones are deleted, except for those that
            `keep_best` or `keep_every` names.
        every: A checkpoint is due at every step that `every` divides.
        keep_best: The best checkpoint by a metric is kept too: a pair such as `("val_loss", "min")` or `("val_accuracy",
            "max")`, of the metrics that were passed to `save`. `jdist.callbacks.Checkpoint` passes the metrics of each row of
            the history, and then also saves after each validation that is better than all saved ones.
        keep_every: Checkpoints of steps that `keep_every` divides are kept too.
        fallback: Whether `restore` without `step`, and `fit(resume=checkpointer)`, restore the newest older checkpoint if the
            newest one is damaged or cannot be read. A store that does not answer is not damage. A warning in the log names the
            damaged checkpoint, the reason, and the restored step; the next `save` renames the damaged folder to `STEP.damaged`.

    Raises:
        ValueError: The folder contains other files, a number is less than 1, or the mode of `keep_best` is unknown.
        TypeError: `path` is not a path; a number is not an integer; `keep_best` is not a pair.
        CheckpointError: The folder cannot be created.

    Example:
        >>> import tempfile
        >>> strategy = jdist.MirroredStrategy(["cpu:0", "cpu:1"])
        >>> state = strategy.put({"w": np.float32([1, 2]), "step": np.int32(100)})
        >>> folder = tempfile.TemporaryDirectory()
        >>> with Checkpointer(folder.name, every=100) as checkpointer:
        ...     saved = [checkpointer.save(step, state, {"batch": step}) for step in (99, 100)]
        ...     restored = checkpointer.restore(jdist.ShardedStrategy())
        >>> saved, restored.step, restored.state["w"].tolist(), restored.data_position
        ([False, True], 100, [1.0, 2.0], {'batch': 100})
        >>> folder.cleanup()
    """

    @explains_arguments()
    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        keep: int | None = 3,
        every: int = 1,
        keep_best: tuple[str, Mode] | None = None,
        keep_every: int | None = None,
        fallback: bool = False,
    ):
        check_path("Checkpointer(path)", path)
        self.every, self.fallback = as_int("`every`", every, 1), fallback
        newest = None if keep is None else as_int("`keep`", keep, 1)
        interval = None if keep_every is None else as_int("`keep_every`", keep_every, 1)
        best = as_best_metric(keep_best)
        self._folder = storage.open_folder(path)
        self._preservation = Preservation(self._folder, newest, best, interval)
        self._writer: Writer | None = None
        self._calls: ProcessGroup | None = None  # compares the calls of all processes
        self._lock: FolderLock | None = None
        self._saving_step = -1
        self._has_warned = False  # of a save without the metric of `keep_best`
        self._damaged: set[int] = set()  # steps that `restore` could not read

    def __repr__(self) -> str:
        newest, best, interval = self._preservation.newest, self._preservation.best, self._preservation.interval
        options = "" if best is None else f", keep_best={tuple(best)}"
        options += "" if interval is None else f", keep_every={interval}"
        options += ", fallback=True" if self.fallback else ""
        return f"Checkpointer({str(self._folder)!r}, keep={newest}, every={self.every}{options})"

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
        except CheckpointError as close_error:
            if error is None:
                raise
            error.add_note(str(close_error))

    @explains_arguments()
    def save(
        self,
        step: int,
        state: PyTree,
        data_position: Any = None,
        *,
        seed: Any = None,
        extra: PyTree = None,
        metrics: Mapping[str, float] | None = None,
        now: bool = False,
        wait: bool = False,
    ) -> bool:
        """Saves a checkpoint in the background, if one is due.

        It returns when the folders are created and the arrays are copied, so the next step may donate the state; with
        `wait`, when the checkpoint is complete. All processes call it with the same arguments.

        Args:
            step: The number of steps that led to the state.
            state: The training state: a tree of arrays and numbers, some in wrappers.
            data_position: The position in the data: the result of `get_state` of an iterator, or other JSON.
            seed: The seed of the run, for the manifest.
            extra: Other values: a tree of dicts and lists of arrays, numbers and text.
            metrics: Numbers by name, for `keep_best` and the manifest. Those that are not finite are not stored. A warning in
                the log names the first save without the metric of `keep_best`, unless `metrics` is `{}`.
            now: Whether to save even if no checkpoint is due at this step.
            wait: Whether to return only when the checkpoint is complete, as `checkpointer.wait()` does.

        Returns:
            Whether it saves the checkpoint. False if none is due, or if there is one of this step already.

        Raises:
            ValueError: The folder has a checkpoint of a later step, or a leaf was donated.
            TypeError: A leaf cannot be saved, or a metric is not a number.
            CheckpointError: This checkpoint, or the previous one, could not be written. The state is unchanged, and the next
                `save` tries again.
            RuntimeError: It is called in a replica function.
        """
        if in_replica_function():
            raise RuntimeError("`save` cannot be called in a replica function. Call it between the steps.")
        if not now and not self._is_due(step):
            return False
        self._warn_without_metric(metrics)
        return self._save(step, state, data_position, seed, extra, metrics, wait)

    def _save(
        self, step: int, state: PyTree, data_position: Any, seed: Any, extra: PyTree, metrics: Any, wait: bool = False
    ) -> bool:
        """Saves a checkpoint, without a warning if the metric of `keep_best` is missing: not each row of a history has it."""
        self.wait()
        with jax.transfer_guard("allow"):  # a training loop may forbid implicit transfers
            plan = self._run_compared("save", lambda: self._plan_save(step, state, data_position, seed, extra, metrics))
            if plan is not None:
                self._write(plan)
        if wait:
            self.wait()
        return plan is not None

    def _warn_without_metric(self, metrics: Mapping[str, float] | None) -> None:
        best = self._preservation.best
        if best is None or metrics == {} or best.name in (metrics or {}) or self._has_warned:
            return
        self._has_warned = True
        _LOG.warning(
            "%s: the checkpoint is saved with %s, and `keep_best` compares checkpoints by %r, so it cannot be the best. Write "
            '`save(step, state, metrics={"%s": value})`; or `metrics={}` for a checkpoint that is not compared.',
            *(caller_frame(), f"the metrics {', '.join(map(repr, metrics))}" if metrics else "no metrics"),
            *(best.name, best.name),
        )

    @overload
    def restore(
        self,
        strategy: Strategy,
        *,
        like: None = None,
        step: int | None = None,
        only: str | Sequence[str] | None = None,
        rename: Mapping[str, str] | None = None,
    ) -> RestoredCheckpoint[PyTree]: ...
    @overload
    def restore(
        self,
        strategy: Strategy,
        *,
        like: T,
        step: int | None = None,
        only: str | Sequence[str] | None = None,
        rename: Mapping[str, str] | None = None,
    ) -> RestoredCheckpoint[T]: ...
    @explains_arguments()
    def restore(
        self,
        strategy: Strategy,
        *,
        like: PyTree = None,
        step: int | None = None,
        only: str | Sequence[str] | None = None,
        rename: Mapping[str, str] | None = None,
    ) -> RestoredCheckpoint[Any]:
        """Restores a checkpoint onto the devices of a strategy. Each device reads its own part.

        Wrappers are preserved. A `SyncOnRead` SUM is split into shares for the new replicas. Other values per replica, of a
        `SyncOnRead` or a `PerReplica`, are restored bit for bit on the same number of replicas. On another number, the
        values of a `SyncOnRead` are aggregated and every replica gets the result; a `PerReplica` is an error.

        Args:
            strategy: The strategy of the restored state.
            like: A state or its shapes, `jax.eval_shape(lambda key: strategy.init(make, key), key)`, with the containers and
                wrappers of the restored state. By default the state has its saved wrappers, in dicts and lists.
            step: The step of the checkpoint; the newest by default, or with `Checkpointer(fallback=True)` the newest that can
                be read.
            only: Paths of parts of the state, such as `"params/encoder"`: only the leaves below them are read and restored, and
                all of them must match. The other leaves of the result are those of `like`, which must be arrays; without
                `like`, the result contains these parts only. `unrestored` and `unused` of the result name the other leaves.
            rename: Paths in the checkpoint and their new paths in `like`: `{"params/encoder": "params/backbone"}`. A path
                renames all leaves below it; the longest one applies. Paths in `only` are new paths.

        Raises:
            FileNotFoundError: The folder does not contain a checkpoint, or not one of this step.
            ValueError: The saved state does not match `like`, or does not fit the strategy; a path in `only` or `rename` does
                not exist. The message names the leaves.
            TypeError: `only` or `rename` does not contain paths.
            CheckpointError: A file is damaged, or cannot be read.
            TimeoutError: The store has not answered for `JDIST_WORK_SECONDS`, by default 3,600 seconds. On several processes,
                all of them raise it.
        """
        read_limits()  # raises ValueError: a wrong variable is not damage
        self.wait()
        plan = lambda step: self._plan_restore(strategy, like, step, only, rename)
        restore = lambda step: self._read(self._run_compared("restore", lambda: plan(step)))
        with jax.transfer_guard("allow"):
            restored = restore(step) if step is not None or not self.fallback else self._restore_or_fall_back(restore)
        if step is None:
            storage.warn_of_incomplete(self._folder, restored.step)
        return restored

    def _restore_or_fall_back(self, restore: Callable[[int | None], RestoredCheckpoint]) -> RestoredCheckpoint:
        """Restores the newest checkpoint that all processes can read."""
        while True:
            latest = self.latest
            try:
                return restore(latest)
            except Exception as error:
                # Another process gets an error without the cause, so the processes exchange whether one of them found damage.
                is_damaged = self._calls is not None and self._calls.any(latest in self._damaged)
                older = [other for other in self.steps() if latest is not None and other < latest]
                if not is_damaged or latest is None or not set(older) - self._damaged:
                    raise
                self._damaged.add(latest)
                reason = str(error) if error.__cause__ is None else short_message(error.__cause__)
                _LOG.warning(
                    "The checkpoint of step %d in %s is damaged or cannot be read: %s Falling back to the checkpoint of step "
                    "%s.",
                    *(latest, self._folder, reason, self.latest),
                )

    def steps(self) -> tuple[int, ...]:
        """The steps of all complete checkpoints, in ascending order."""
        return storage.complete_steps(self._folder)

    @property
    def latest(self) -> int | None:
        """The step of the newest complete checkpoint; None if there is none.

        With `fallback`, a checkpoint that `restore` could not read does not count.
        """
        return max(set(self.steps()) - (self._damaged if self.fallback else set()), default=None)

    @property
    def best(self) -> int | None:
        """The step of the complete checkpoint that is the best by `keep_best`; None if none has the metric.

        Raises:
            ValueError: The checkpointer has no `keep_best`.
        """
        if self._preservation.best is None:
            raise ValueError('`best` needs a metric: `Checkpointer(path, keep_best=("val_loss", "min"))`.')
        return self._preservation.best_step(self.steps())

    def wait(self) -> None:
        """Waits until the save in progress is written.

        Raises:
            CheckpointError: It could not be written.
        """
        unfinished_saves.finish_dropped(self._folder)
        if self._writer is None:
            return
        try:
            with activity.waiting_for_thread("the write of a checkpoint"):
                self._writer.wait()
        except Exception as error:
            self._raise_write_error(error)
        unfinished_saves.remove(self._writer)

    def close(self) -> None:
        """Waits until the save in progress is written, ends the threads, and releases the lock. `save` can be called again.

        Raises:
            CheckpointError: The save in progress could not be written.
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
                self._calls.close("its `Checkpointer` is closed")
                self._calls = None

    def _is_due(self, step: Any) -> bool:
        try:
            return as_int("`step`", step, 0) % self.every == 0
        except (TypeError, ValueError):
            return True  # `_plan_save` raises the error, on all processes

    def _run_compared(self, call: str, work: Callable[[], tuple[T, Facts]]) -> T:
        """See `ProcessGroup.run_compared`. One group for all calls, so that different calls are noticed."""
        self._calls = self._calls or ProcessGroup(in_main_thread=True)
        if jax.process_count() == 1 or threading.current_thread() is not threading.main_thread():
            return self._calls.run_compared(call, work)

        def work_with_calls() -> tuple[T, Facts]:
            result, facts = work()
            # Last: other arguments of the save are the better message.
            return result, {**facts, "the calls of programs before": record_lines()}

        return self._calls.run_compared(call, work_with_calls)

    def _plan_save(
        self, step: int, state: PyTree, data_position: Any, seed: Any, extra: PyTree, metrics: Any
    ) -> tuple[SavePlan | None, Facts]:
        """Returns the plan of a save, or None if there is a checkpoint of this step; and facts for `run_compared`.

        Uses no collectives: it may fail on one process of several.
        """
        step = as_int("`step`", step, 0)
        if self._lock is None and jax.process_index() == 0:  # process 0 of a job writes the manifest
            self._lock = FolderLock(self._folder)
        latest = max(set(self.steps()) - self._damaged, default=None)
        if latest is not None and step < latest:
            raise ValueError(
                f"{self._folder} has a checkpoint of step {latest}, so a checkpoint of step {step} would not be the newest. "
                f"Delete the later checkpoints ({self._folder / str(latest)}), or use another folder."
            )
        facts = {"`step`": [str(step)], "the latest checkpoint": [f"step {latest}"]}
        if step == latest:
            return None, facts
        plan = make_save_plan(step, state, data_position, seed, extra, metrics)
        return plan, {**facts, **plan.facts, "the damaged checkpoints": [str(self._damaged_steps(step))]}

    def _damaged_steps(self, step: int) -> list[int]:
        """The steps of damaged folders that orbax would take for newer checkpoints, or for one of `step`."""
        incomplete = {int(child.name) for child in storage.incomplete_folders(self._folder, step - 1)}
        return sorted(self._damaged | (incomplete & {step}))

    def _write(self, plan: SavePlan) -> None:
        self._saving_step = plan.step
        try:
            damaged = self._damaged_steps(plan.step)
            if damaged and self._writer is not None:  # orbax caches the steps of the folder
                self._writer.close()
                self._writer = None
            self._preservation.known[plan.step] = plan.metrics
            self._writer = self._writer or Writer(self._folder, self._preservation)
            unfinished_saves.add(self._writer, self, self._lock)
            self._writer.write(plan.step, plan.pack, damaged)
            self._damaged.clear()
        except Exception as error:
            self._raise_write_error(error)

    def _raise_write_error(self, error: Exception) -> NoReturn:
        self._preservation.known.pop(self._saving_step, None)
        writer, self._writer = self._writer, None
        if writer is not None:
            unfinished_saves.remove(writer)
            try:
                writer.close()
            except Exception as close_error:
                error.add_note(str(close_error))
        message = write_error(self._folder, self._saving_step, error)
        raise CheckpointError(f"{message} The training state is unchanged, and the next `save` tries again.") from error

    def _plan_restore(
        self, strategy: Strategy, like: PyTree, step: int | None, only: Any, rename: Any
    ) -> tuple[RestorePlan, Facts]:
        """Returns the plan of a restore, and facts for `run_compared`. Uses no collectives."""
        if not isinstance(strategy, Strategy):
            raise TypeError(
                f"The first argument of `restore` must be the strategy of the restored state, got {type(strategy).__name__}. "
                "Call `restore(strategy)`."
            )
        check_devices_attached(strategy.mesh)
        if inspect.isroutine(like):
            raise TypeError(
                f"`like` is the function `{function_name(like)}`. Pass the state that it creates, or its shapes: "
                "`like=strategy.init(make_state)`, or `like=jax.eval_shape(make_state)`."
            )
        step = storage.find_step(self._folder, step)
        try:
            path = storage.manifest_path(self._folder, step)
            manifest, saved = read_within_limit(path, step, lambda: read_manifest(self._folder, step))
        except Exception as error:
            self._raise_read_error(step, error)
        only, rename = as_paths(only), as_renames(rename)
        return make_restore_plan(self._folder, manifest, saved, strategy, like, only, rename)

    def _read(self, plan: RestorePlan) -> RestoredCheckpoint:
        try:
            with contextlib.closing(ProcessGroup()) as group:
                arrays, extra = plan.read(group)
        except Exception as error:
            self._raise_read_error(plan.step, error)
        state = plan.finish(arrays)
        self._damaged.discard(plan.step)
        position = plan.manifest["data_position"]
        return RestoredCheckpoint(plan.step, state, position, extra, plan.manifest, plan.unrestored, plan.unused)

    def _raise_read_error(self, step: int, error: Exception) -> NoReturn:
        if isinstance(error, TimeoutError | ImportError):  # the store does not answer, or orbax is missing: no damage
            raise error
        self._damaged.add(step)
        older = [other for other in self.steps() if other < step]
        advice = (
            f"Earlier complete checkpoints: {listed(older)}. To use the last one, call `restore(strategy, step={older[-1]})`. "
            f"The next `save` of this `Checkpointer` renames the damaged folder to {step}.damaged. To continue with "
            f"`fit(resume=...)`, pass `resume=Checkpointer(path, fallback=True)`, or delete {self._folder / str(step)}."
            if older
            else "The folder does not contain an earlier checkpoint."
        )
        raise CheckpointError(
            f"The checkpoint of step {step} in {self._folder} is damaged or cannot be read: {short_message(error)} {advice}"
        ) from error


def latest_step(checkpointer: Checkpointer) -> int | None:
    """Returns the step of the latest checkpoint, from which training resumes; None without one. All processes call it.

    Raises:
        CheckpointError: The latest checkpoint is not the same on all processes.
    """

    def read_latest() -> tuple[int | None, Facts]:
        latest = checkpointer.latest
        return latest, {"the latest checkpoint": ["none" if latest is None else f"step {latest}"]}

    checkpointer.wait()
    latest = checkpointer._run_compared("resume", read_latest)
    storage.warn_of_incomplete(checkpointer._folder, latest)
    return latest


def is_best(checkpointer: Checkpointer, metrics: Mapping[str, Any]) -> bool:
    """Returns whether a checkpoint with these metrics would be better by `keep_best` than all saved ones.

    False without `keep_best`. The checkpoint that is being written counts as saved.
    """
    preservation = checkpointer._preservation
    best = preservation.best
    if best is None or best.name not in (finite := as_metrics(metrics)):
        return False
    steps = {*checkpointer.steps(), *preservation.known}
    return all(best.is_better(finite, preservation.metrics_of(step)) for step in steps)


def best_metric(checkpointer: Checkpointer) -> str | None:
    """Returns the name of the metric of `keep_best`, if there is one."""
    return None if checkpointer._preservation.best is None else checkpointer._preservation.best.name
