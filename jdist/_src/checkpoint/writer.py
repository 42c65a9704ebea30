"""Writes checkpoints in the background with orbax, on all processes together."""

import asyncio
import contextlib
import dataclasses
import functools
import pathlib
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any

import jax

from jdist._src.checkpoint.orbax_compat import configure_orbax, import_orbax
from jdist._src.checkpoint.preservation import Preservation
from jdist._src.checkpoint.process_sync import Facts, ProcessGroup
from jdist._src.checkpoint.storage import (
    ARRAYS,
    DELETED,
    MANIFEST,
    MANIFEST_FILE,
    NO_ARRAYS,
    remove_deleted,
    rename_damaged,
    write_error,
)
from jdist._src.core import activity
from jdist._src.core.paths import is_url

_TRIAL_BYTES = 2**16  # written to the folder before orbax starts


class Writer:
    """Writes checkpoints into a folder, and deletes incomplete ones and those that are not preserved.

    When a write has failed on any process, it has failed on all of them, and a new writer is needed.

    Mutable: it holds the write in progress.

    Args:
        folder: The folder.
        preservation: The rule by which old checkpoints are deleted.

    Attributes:
        folder: The folder.
        step: The step of the last write.
    """

    def __init__(self, folder: pathlib.Path, preservation: Preservation):
        self.folder, self._preservation = folder, preservation
        self.step = -1
        self._group = ProcessGroup()
        self._manager: Any = None
        self._caller = threading.get_ident()

    def write(self, step: int, pack: Callable[[], tuple[list[Any], str, Facts]], damaged: Sequence[int] = ()) -> None:
        """Starts to write a checkpoint; returns when the arrays are copied off the devices.

        Args:
            step: The step.
            pack: Returns the arrays, the text of the manifest, and facts that must be equal on all processes.
            damaged: Steps with damaged folders, which are renamed first.

        Raises:
            OSError: The folder cannot be written to.
            CheckpointError: The folder cannot be written to on another process, or the values of the state differ.
        """
        self.step = step
        # If orbax were the first to fail, its threads would continue, and the other processes would wait in a collective.
        self._group.run(lambda: self._prepare_folder(damaged))
        arrays, manifest, _ = self._group.run(pack, lambda packed: packed[2])
        ocp = import_orbax()

        self._caller = threading.get_ident()
        remove_deleted(self.folder)
        items = {str(number): x for number, x in enumerate(arrays) if x.size}  # orbax refuses arrays without elements
        args = {ARRAYS: ocp.args.StandardSave(items or NO_ARRAYS), MANIFEST: _text_args()(manifest)}
        try:
            self._manager = self._manager or self._make_manager()
            self._manager.save(step, args=ocp.args.Composite(**args), force=True)
        except Exception as error:
            self._group.fail(error)
            raise

    def wait(self) -> None:
        """Waits until the write in progress is complete. An error on any process is raised on all of them."""
        if self._manager is not None:
            self._manager.wait_until_finished()

    def finish(self) -> None:
        """Waits until the write in progress is complete, and ends the threads, also after an error.

        Raises:
            CheckpointError: The checkpoint could not be written.
        """
        try:
            self.wait()
        except Exception as error:
            with contextlib.suppress(Exception):  # it would report the same error
                self.close()
            raise write_error(self.folder, self.step, error) from error
        self.close()

    def close(self) -> None:
        """Waits until the write in progress is complete, and ends the threads."""
        try:
            if self._manager is not None:
                self._manager.close()
                remove_deleted(self.folder)
        finally:
            self._group.close()

    def _prepare_folder(self, damaged: Sequence[int]) -> None:
        """Writes and deletes a trial file, and renames damaged folders. Raises OSError if the folder cannot be written to."""
        trial_file = self.folder / f".trial.{jax.process_index()}"
        try:
            trial_file.write_bytes(bytes(_TRIAL_BYTES))
        finally:
            trial_file.unlink(missing_ok=True)
        for step in damaged if jax.process_index() == 0 else ():
            rename_damaged(self.folder, step)

    def _make_manager(self) -> Any:
        ocp = import_orbax()

        configure_orbax(self.folder)
        options = ocp.CheckpointManagerOptions(
            preservation_policy=self._preservation,
            todelete_subdir=None if is_url(self.folder) else DELETED,
            cleanup_tmp_directories=True,
            enable_async_checkpointing=True,
            # In the background, a folder that cannot be created would leave threads behind that wait for it for 20 minutes, and
            # a thread for its metadata could not start while the interpreter of Python 3.12.0 or 3.12.1 exits:
            # https://github.com/python/cpython/issues/113964
            async_options=ocp.AsyncOptions(barrier_sync_fn=self._barrier, create_directories_asynchronously=False),
        )
        manager = ocp.CheckpointManager(self.folder, options=options)
        # orbax would pass the step to JAX's agreement on preemption, which counts the checks of `PreemptionNotice`.
        manager.reached_preemption = lambda step: False
        return manager

    def _barrier(self, *, key: str, timeout_ms: int) -> None:
        """The barrier between processes that orbax calls; also from a `finally` clause of a thread that has failed."""
        # In the thread of the caller, `sys.exception()` may be one that the caller handles, not one of orbax.
        is_caller = threading.get_ident() == self._caller
        error = None if is_caller else sys.exception()
        with contextlib.nullcontext() if is_caller else activity.background_thread():
            if error is None:
                self._group.barrier(timeout_ms / 1000)
            else:
                self._group.fail(error)


@functools.cache
def _text_args() -> Any:
    """Returns the orbax argument type of a text item. orbax's own JSON item writes everything into one line."""
    ocp = import_orbax()
    from orbax.checkpoint.future import CommitFutureAwaitingContractedSignals

    class TextHandler(ocp.AsyncCheckpointHandler):
        async def async_save(self, directory: Any, args: Any) -> Any:
            if jax.process_index() != 0:
                return None
            write = asyncio.to_thread((directory / MANIFEST_FILE).write_text, args.text)
            return [CommitFutureAwaitingContractedSignals(write)]

        def save(self, directory: Any, args: Any) -> None:
            (directory / MANIFEST_FILE).write_text(args.text)

        def restore(self, directory: Any, args: Any) -> str:
            return (directory / MANIFEST_FILE).read_text()

    @ocp.args.register_with_handler(TextHandler, for_save=True, for_restore=True)
    @dataclasses.dataclass
    class Text(ocp.args.CheckpointArgs):
        text: str = ""

    return Text
