"""What writes checkpoints: orbax, in the background, on all processes together."""

import asyncio
import dataclasses
import functools
import pathlib
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from jdist._src.checkpoint.process_sync import ProcessGroup
from jdist._src.checkpoint.storage import (
    ARRAYS,
    DELETED,
    MANIFEST,
    MANIFEST_FILE,
    empty_deleted,
    set_aside,
    silence_orbax,
)

_TRIAL = 2**16  # bytes that the disk has to take before orbax begins


class Writer:
    """Writes checkpoints into a folder, and removes what was left unfinished there, and all but the newest `keep`.

    Mutable: it knows of the save that is on its way. When one has failed, on any process, it has failed on all, and another
    writer is to be made.
    """

    def __init__(self, folder: pathlib.Path, keep: int | None):
        self._folder, self._keep = folder, keep
        self._group = ProcessGroup()
        self._manager: Any = None
        self._caller = threading.get_ident()

    def write(self, step: int, pack: Callable[[], tuple[list[Any], str]], damaged: Sequence[int] = ()) -> None:
        """Begins to write a checkpoint; returns when the arrays are copied off the devices.

        Args:
            step: The step.
            pack: Returns the arrays and the manifest.
            damaged: Steps whose folders are damaged, and are set aside first.

        Raises:
            OSError: The folder cannot be written to.
            CheckpointError: So it is on another process.
        """
        # orbax would leave threads behind when it finds out, and the other processes in a collective.
        self._group.told(lambda: _prepared(self._folder, damaged))
        arrays, text = self._group.told(pack)
        import orbax.checkpoint as ocp

        self._caller = threading.get_ident()
        empty_deleted(self._folder)
        stored = {str(number): x for number, x in enumerate(arrays) if x.size}  # orbax refuses arrays of no elements
        items = {ARRAYS: ocp.args.StandardSave(stored or {"none": np.zeros(1)}), MANIFEST: _text_item()(text)}
        try:
            self._manager = self._manager or self._made()
            self._manager.save(step, args=ocp.args.Composite(**items), force=True)
        except Exception as error:
            self._group.fail(error)
            raise

    def wait(self) -> None:
        """Waits until what is on its way is written. What went wrong with it, on any process, is raised on all."""
        if self._manager is not None:
            self._manager.wait_until_finished()

    def close(self) -> None:
        """Waits for what is on its way, and ends the threads that write."""
        try:
            if self._manager is not None:
                self._manager.close()
                empty_deleted(self._folder)
        finally:
            self._group.leave()

    def _made(self) -> Any:
        import orbax.checkpoint as ocp

        silence_orbax()
        options = ocp.CheckpointManagerOptions(
            max_to_keep=self._keep,
            todelete_subdir=DELETED,
            cleanup_tmp_directories=True,
            enable_async_checkpointing=True,
            async_options=ocp.AsyncOptions(barrier_sync_fn=self._barrier),
        )
        return ocp.CheckpointManager(self._folder, options=options)

    def _barrier(self, *, key: str, timeout_ms: int) -> None:
        """Where orbax has processes wait for each other. Whose thread has failed comes too, on its way out."""
        error = sys.exception() if threading.get_ident() != self._caller else None  # else it is one of the caller's
        if error is None:
            self._group.meet(timeout_ms / 1000)
        else:
            self._group.fail(error)


def _prepared(folder: pathlib.Path, damaged: Sequence[int]) -> None:
    """Sets damaged folders aside. Raises OSError if `folder` cannot be written to."""
    trial = folder / f".trial.{jax.process_index()}"
    try:
        trial.write_bytes(bytes(_TRIAL))
    finally:
        trial.unlink(missing_ok=True)
    for step in damaged if jax.process_index() == 0 else ():
        set_aside(folder, step)


@functools.cache
def _text_item() -> Any:
    """What tells orbax to write a text beside the arrays. Its own item for JSON puts all of it into one line."""
    import orbax.checkpoint as ocp
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
