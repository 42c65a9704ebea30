"""`jdist.profile`: traces a block, and summarizes the trace."""

import contextlib
import os
import pathlib
import time
import warnings
from collections.abc import Sequence
from types import TracebackType
from typing import Any

import jax
import numpy as np

from jdist._src.core import profiler_annotations
from jdist._src.core.path_arguments import local_path_argument, make_directory
from jdist._src.core.process_messages import MessageExchange, numbered_name
from jdist._src.core.source_lines import caller_frame, levels_to_user
from jdist._src.core.trace_key import outside_mesh
from jdist._src.profiling.summary import (
    SUMMARY_FILE,
    ProfileSummary,
    merge_summaries,
    newest_traces,
    summary_from_dict,
    summary_of_traces,
)

_OTHERS_SECONDS = 60.0  # in which the other processes must have ended the block and read their traces
_COMPILE_EVENTS = "/jax/core/compile/"  # of `jax.monitoring`: tracing, lowering, compilation
_open_at: str | None = None  # the line that opened the profile of this process; JAX allows one per process


def profile(logdir: str | os.PathLike[str]) -> "Profile":
    """Traces a block with `jax.profiler`, and summarizes where its time went.

    The trace is for XProf, TensorBoard or Perfetto. The summary is read from it: the time of each device in computation,
    collectives and exposed collectives, and idle for input, compilation or the host; the slowest operations with their lines
    of code; the processes that others wait for; and the imbalance of the true examples of the replicas::

        with jdist.profile("run/trace") as profile:
            for batch in batches:
                state, loss = step(state, batch)
        print(profile.summary)

    At both ends the block waits for the devices, so that the trace contains the work of the block only. Python calls are not
    traced, because this would slow the host down. Data sets of jdist annotate their waits for batches. Annotate the waits for
    another source with `jax.profiler.TraceAnnotation("jdist.input")`.

    With several processes, all of them open the profile. Each process writes its trace to the folder `process_N` of the
    directory, and has the summary of all processes. If a process does not post its part within 60 seconds, the summary has
    only the part of this process, with a warning. Process 0 writes the summary to `summary.json`, which
    `jdist.ProfileSummary.read` reads.

    Reading a trace takes a few seconds per second of many small operations, so profile a few steps.

    If the block raises an error, the trace is written and there is no summary. An executable from JAX's persistent compilation
    cache has the lines of code of the program that compiled it, unless the option
    `jax_compilation_cache_include_metadata_in_key` is set.

    Args:
        logdir: The directory of the trace and of the summary, on a local file system.

    Returns:
        A context manager. After the block, its `summary` is a `jdist.ProfileSummary`.

    Raises:
        TypeError: `logdir` is not a path.
        ValueError: `logdir` is a URL; or, when the block is entered, it cannot be made or is not writable.
        RuntimeError: When the block is entered: another trace is open in this process.

    Example:
        >>> jdist.profile("run/trace")
        profile('run/trace')
    """
    return Profile(local_path_argument("logdir", logdir))


class Profile:
    """The context manager that `profile` returns.

    Mutable: it holds the summary, once the block has ended.
    """

    def __init__(self, logdir: pathlib.Path):
        self._logdir = logdir
        self._summary: ProfileSummary | None = None
        self._is_open = False
        self._deadline = 0.0  # of the exchange of summaries

    def __repr__(self) -> str:
        return f"profile({str(self._logdir)!r})"

    @property
    def summary(self) -> ProfileSummary:
        """The summary.

        Raises:
            RuntimeError: The block has not ended, or raised an error.
        """
        if self._summary is None:
            state = "its block has not ended" if self._is_open else "no block of it has ended without an error"
            raise RuntimeError(f"The profile in {self._logdir} has no summary: {state}.")
        return self._summary

    def __enter__(self) -> "Profile":
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.end(has_failed=error is not None)

    def start(self) -> None:
        """Starts the trace.

        Raises:
            ValueError: The directory cannot be made, or is not writable.
            RuntimeError: Another trace is open in this process.
        """
        global _open_at
        if _open_at is not None:
            raise RuntimeError(
                f"A profile is open already, since {_open_at}: JAX traces once per process. End it before the next one starts."
            )
        self._exchange = self._new_exchange()  # first: the number of exchanges is the same on all processes
        folder = self._logdir / f"process_{jax.process_index()}" if self._exchange else self._logdir
        try:
            make_directory(folder)
            if jax.process_index() == 0:
                (self._logdir / SUMMARY_FILE).unlink(missing_ok=True)  # of an earlier profile
            self._probes = [jax.device_put(np.float32(0), device) for device in jax.local_devices()]
            _wait_for_devices(self._probes)
            _start_trace(folder)
        except BaseException:
            self._post_failure()
            raise
        frame = caller_frame()
        _open_at = str(frame) if frame else "the program started it"
        self._folder, self._summary, self._is_open = folder, None, True
        profiler_annotations.is_profile_open = True
        jax.monitoring.register_event_duration_secs_listener(_mark_compilation)
        numbers = {"process": jax.process_index(), "num_processes": jax.process_count()}
        self._block = jax.profiler.TraceAnnotation(profiler_annotations.BLOCK, **numbers)
        self._block.__enter__()

    def end(self, has_failed: bool = False) -> None:
        """Ends the trace, and reads its summary if the block has not failed. Has no effect if the trace is not open."""
        if not self._is_open:
            return
        part = None
        try:
            try:
                if not has_failed:
                    _wait_for_devices(self._probes)
            finally:
                self._stop()
            if not has_failed:
                traces = newest_traces(self._folder)
                if not traces:
                    raise FileNotFoundError(
                        f"`jax.profiler` has not written a trace to {self._folder}. Check its free space, and its log messages."
                    )
                part = summary_of_traces(str(self._logdir), traces[-1:])
        finally:
            if part is None:
                self._post_failure()
        if part is not None:
            self._summary = self._of_all_processes(part)
            if jax.process_index() == 0:
                self._summary.write()

    def _stop(self) -> None:
        """Ends the trace, and writes it."""
        global _open_at
        self._block.__exit__(None, None, None)
        jax.monitoring.unregister_event_duration_listener(_mark_compilation)
        profiler_annotations.is_profile_open, _open_at, self._is_open = False, None, False
        jax.profiler.stop_trace()

    def _new_exchange(self) -> MessageExchange | None:
        if jax.process_count() == 1:
            return None
        return MessageExchange(
            numbered_name("jdist/profile"),
            jax.process_index(),
            jax.process_count(),
            "the summary of `jdist.profile`, which all processes have to open",
            lambda: time.monotonic() > self._deadline,
        )

    def _of_all_processes(self, part: ProfileSummary) -> ProfileSummary:
        """Returns the summary of all processes, given the part of this process; only this part if others post nothing."""
        if self._exchange is None:
            return part
        self._deadline = time.monotonic() + _OTHERS_SECONDS
        try:
            messages = self._exchange.exchange({"summary": part.as_dict()})
            self._exchange.close({})
        except (InterruptedError, RuntimeError) as error:
            reason = str(error)
            if isinstance(error, InterruptedError):
                names = ", ".join(map(str, self._exchange.missing()))
                reason = (
                    f"within {_OTHERS_SECONDS:.0f} s there was no part of process {names}. Open it on all processes."
                )
            warnings.warn(
                f"The summary of the profile in {self._logdir} has only the part of this process: {reason}",
                stacklevel=levels_to_user(),
            )
            return merge_summaries([part], jax.process_count())
        parts = [summary_from_dict(message["summary"]) for message in messages if message.get("summary")]
        return merge_summaries(parts, jax.process_count())

    def _post_failure(self) -> None:
        """Posts that this process has no part, so that the other processes do not wait for it."""
        if self._exchange is not None:
            with contextlib.suppress(RuntimeError):  # process 0, which holds the messages, has ended
                self._exchange.post({"summary": None})
                self._exchange.close({})


def _start_trace(folder: pathlib.Path) -> None:
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0
    try:
        jax.profiler.start_trace(folder, profiler_options=options)
    except RuntimeError as error:
        raise RuntimeError(
            f"The profile cannot start ({error}). JAX traces once per process: end the other trace of `jax.profiler` first."
        ) from error


def _mark_compilation(event: str, duration_secs: float, **_: Any) -> None:
    if event.startswith(_COMPILE_EVENTS):
        profiler_annotations.mark(profiler_annotations.COMPILE, seconds=f"{duration_secs:.9f}")


@jax.jit
def jdist_barrier(x: jax.Array) -> jax.Array:
    """Runs on a device after the programs before it."""
    return x + 1


def _wait_for_devices(probes: Sequence[jax.Array]) -> None:
    """Waits for all arrays, and for the programs before this call, also if their results were dropped.

    A device runs its programs in order, so it has run them when it has run one for its array in `probes`.
    """
    with outside_mesh(), jax.disable_jit(False):
        barriers = [jdist_barrier(probe) for probe in probes]
    for array in [*jax.live_arrays(), *barriers]:
        with contextlib.suppress(Exception):  # it is raised where the array is used, or the array was donated
            array.block_until_ready()
