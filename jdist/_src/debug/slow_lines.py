"""`find_slow_lines`: finds lines of a loop that transfer values, or compile a function, again and again."""

import contextlib
import dataclasses
import linecache
import threading
import warnings
import weakref
import zlib
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np

from jdist._src.core import activity
from jdist._src.core.errors import RetraceWarning, TransferWarning
from jdist._src.core.jax_compat import on_host_read
from jdist._src.core.source_lines import Frame, code_at, reader_frame
from jdist._src.core.tree import dtype_and_shape

_MIN_STEPS = 3  # with a transfer on one line
_STEPS_PER_TRANSFER = 4  # at most, on average: a loop may call several steps per iteration
_MIN_COUNT = 10  # of events on one line of a loop without steps, and of compilations


@contextlib.contextmanager
def find_slow_lines() -> Iterator[None]:
    """Returns a context manager that warns, at its end, of the lines of this thread that slow down a loop.

    It finds lines that read a result on the host in each step (`float(loss)`, `np.asarray(x)`, `if loss < 1:`), which wait for
    the step; calls of a step that receive the same numpy array again, which copy it to the devices each time; and functions of
    `jax.jit` that are made, and compiled, again in a loop. `jax.device_get` is an explicit transfer, and jdist itself reads
    values when it needs them: neither is reported. Outside the block nothing is recorded, and nothing costs time.

    Warns:
        TransferWarning: A line transfers values in at least a quarter of the steps.
        RetraceWarning: A line compiles functions of one name 10 times or more often.

    Example:
        >>> strategy = jdist.MirroredStrategy(["cpu:0", "cpu:1"])
        >>> step = strategy.step(lambda w, x: (w + 1, jdist.all_reduce("mean", x.mean())))
        >>> w, x = strategy.put(0), strategy.split(np.ones(8, np.float32))
        >>> import warnings
        >>> with (
        ...     warnings.catch_warnings(record=True, action="always") as found,
        ...     jdist.debug.find_slow_lines(),
        ... ):
        ...     for _ in range(10):
        ...         w, loss = step(w, x)
        ...         total = float(loss)
        >>> print(
        ...     str(found[0].message).partition(" at ")[2].partition(": ")[2].partition(".")[0]
        ... )
        float32[] is read on the host after 10 of 10 steps, and each read waits for the step
    """
    recorder = _Recorder()
    activity.host_value_observers.append(recorder.note_host_values)
    jax.monitoring.register_event_duration_secs_listener(recorder.note_compilation)
    try:
        with on_host_read(recorder.note_read, includes_shared=True):
            yield
    except KeyboardInterrupt:  # the usual end of a loop in a notebook
        recorder.warn()
        raise
    finally:
        jax.monitoring.unregister_event_duration_listener(recorder.note_compilation)
        activity.host_value_observers.remove(recorder.note_host_values)
    recorder.warn()


@dataclasses.dataclass
class _Events:
    """The events of one kind on one line.

    Attributes:
        value: The dtype and shape of the last value.
        count: The number of events.
        steps: The numbers of the steps before them.
        digest: Of the values, None once they have changed.
    """

    value: str = ""
    count: int = 0
    steps: set[int] = dataclasses.field(default_factory=set)
    digest: Any = None

    def note(self, value: str) -> None:
        self.value = value
        self.count += 1
        self.steps.add(activity.calls.steps)


class _Recorder:
    """Records the events of a block.

    Mutable: the callbacks add events.
    """

    def __init__(self) -> None:
        self._thread, self._first_step = threading.get_ident(), activity.calls.steps
        self._read_arrays: dict[int, weakref.ref[jax.Array]] = {}  # a second read of an array is not a transfer
        self._reads: dict[Frame, _Events] = {}
        self._host_values: dict[tuple[Frame, str], _Events] = {}
        self._compilations: dict[tuple[Frame, str], _Events] = {}

    def note_read(self, array: jax.Array) -> None:
        place, reference = reader_frame(), self._read_arrays.get(id(array))
        if place and (reference is None or reference() is not array):
            self._read_arrays[id(array)] = weakref.ref(array)
            self._reads.setdefault(place, _Events()).note(dtype_and_shape(array))

    def note_host_values(self, leaves: Sequence[tuple[str, Any]]) -> None:
        if threading.get_ident() != self._thread or not (place := reader_frame()):
            return
        for name, leaf in leaves:
            if np.ndim(leaf):
                digest = leaf.shape, leaf.dtype, zlib.crc32(np.ascontiguousarray(leaf).view(np.uint8))
                events = self._host_values.setdefault((place, name), _Events(digest=digest))
                events.digest = digest if events.digest == digest else None
                events.note(dtype_and_shape(leaf))

    def note_compilation(self, event: str, duration_secs: float, **kwargs: Any) -> None:
        if not event.endswith("backend_compile_duration") or threading.get_ident() != self._thread:
            return
        name, place = str(kwargs.get("fun_name")).removeprefix("jit(").removesuffix(")"), reader_frame()
        # Functions of JAX are compiled for each shape; a function of the user is defined in a file of the user.
        source = "".join(linecache.getlines(place.file)) if place else ""
        if place and (name == "<lambda>" or f"def {name}(" in source):
            self._compilations.setdefault((place, name), _Events()).note("")

    def warn(self) -> None:
        """Warns of each line that slows down the loop."""
        for place, events in self._reads.items():
            if self._is_repeated(events):
                _warn(
                    TransferWarning,
                    place,
                    f"{code_at(place)}: {events.value} is read on the host {self._when('after', events)}, and each read waits "
                    "for the step. Read it every 100 steps, or collect the arrays in a list and read them after the loop with "
                    "one `jax.device_get`. `jdist.Trainer` records a history without waiting.",
                )
        for (place, name), events in self._host_values.items():
            if events.digest is not None and self._is_repeated(events):
                _warn(
                    TransferWarning,
                    place,
                    f"{code_at(place)}: `{name}`, {events.value}, is a numpy array with the same values "
                    f"{self._when('in', events)}, and each call copies it to the devices. Place it once before the loop: "
                    "`strategy.put(x)`, or `strategy.split(x)` for a batch.",
                )
        for (place, name), events in self._compilations.items():
            if events.count >= _MIN_COUNT:
                _warn(
                    RetraceWarning,
                    place,
                    f"{code_at(place)}: a function `{name}` is compiled {events.count} times. Apply `jax.jit` once, outside "
                    "the loop, and pass arguments of the same shapes.",
                )

    def _is_repeated(self, events: _Events) -> bool:
        num_steps = activity.calls.steps - self._first_step
        if num_steps < _MIN_STEPS:
            return events.count >= _MIN_COUNT
        return len(events.steps) >= _MIN_STEPS and _STEPS_PER_TRANSFER * len(events.steps) >= num_steps

    def _when(self, preposition: str, events: _Events) -> str:
        num_steps = activity.calls.steps - self._first_step
        if num_steps < _MIN_STEPS:
            return f"{events.count} times"
        return f"{preposition} {min(len(events.steps), num_steps)} of {num_steps} steps"


def _warn(category: type[Warning], place: Frame, message: str) -> None:
    warnings.warn_explicit(message, category, place.file, place.line)
