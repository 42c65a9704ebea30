"""The summary of a profile: where the time went, as data, text and HTML."""

import dataclasses
import json
import os
import pathlib
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from jdist._src.core.atomic_files import replace_atomically
from jdist._src.core.rendering import facts_table, html_of, rows_table, text_of
from jdist._src.profiling.intervals import Interval, difference, length, union
from jdist._src.profiling.trace import OperationKey, Trace, read_trace

SUMMARY_FILE = "summary.json"
_MAX_OPERATIONS = 20
_MAX_DEVICES = 16  # in the table
_MAX_TEXT = 44  # characters of a path or a line of code in the table
_WIDTH = 130
_MAD_OF_NORMAL = 1.4826  # the standard deviation of normally distributed values is this multiple of their MAD
_LEAST_EXCESS = 0.1  # of the interval: the time that a job could save


@dataclasses.dataclass(frozen=True)
class DeviceTime:
    """The seconds of one device in the interval of a profile.

    `compute`, `exposed_collectives`, `input`, `compile` and `host` add up to the interval. A moment that several of them apply
    to is counted in the first of this order: compute, exposed collectives, compilation, input, host.

    Attributes:
        process: The index of the process.
        device: The device: `"cpu:0"`.
        compute: Time in operations other than collectives.
        collectives: Time in collectives.
        exposed_collectives: Time in collectives while no other operation of the device ran.
        input: Time without operations in which the host waited for a batch.
        compile: Time without operations in which the host traced, lowered or compiled.
        host: The remaining time without operations: Python code, dispatch, transfers.
    """

    process: int
    device: str
    compute: float
    collectives: float
    exposed_collectives: float
    input: float
    compile: float
    host: float


PARTS = "compute", "exposed_collectives", "input", "compile", "host"


@dataclasses.dataclass(frozen=True)
class ProcessTime:
    """The seconds of the host of one process in the interval of a profile, also those in which its devices computed.

    Attributes:
        process: The index of the process.
        seconds: The length of the interval.
        working: The interval without exposed collectives and compilation, as the mean over the devices: the work of this
            process, without waits for other processes.
        input: Time in which it waited for batches.
        dispatch: Time in calls of compiled functions, without compilation.
        compile: Time in which it traced, lowered or compiled.
        trace: The file of its trace.
    """

    process: int
    seconds: float
    working: float
    input: float
    dispatch: float
    compile: float
    trace: str


@dataclasses.dataclass(frozen=True)
class OperationTime:
    """An operation of a compiled program, over all its executions in the interval of a profile, on all devices.

    Attributes:
        name: The name of the HLO instruction.
        program: The name of the program: `"jit_step"`.
        path: The path in the JAX program: `"jit(step)/dot_general"`; empty if it is unknown.
        source: The line of the user's code that traced it, `"model.py:12"`, or None. For a fusion, the line of one of its
            operations.
        is_collective: Whether it is a collective.
        seconds: The sum of its durations.
        count: The number of executions.
        share: The fraction of the interval that it took, as the mean over the devices.
    """

    name: str
    program: str
    path: str
    source: str | None
    is_collective: bool
    seconds: float
    count: int
    share: float


@dataclasses.dataclass(frozen=True, repr=False)
class ProfileSummary:
    """Where the time of a profile went. Text when printed, a table in a notebook.

    Attributes:
        logdir: The directory of the profile.
        devices: The time of each device.
        processes: The time of the host of each process.
        operations: The slowest operations, the slowest one first.
        examples: The number of true examples, without padding, that each replica received in the batches of the interval.
        missing: The processes whose part is missing: they ended, failed, or did not open the profile.

    Example:
        >>> times = dict(
        ...     compute=3.0,
        ...     collectives=1.0,
        ...     exposed_collectives=0.5,
        ...     input=0.0,
        ...     compile=0.0,
        ...     host=0.5,
        ... )
        >>> device = DeviceTime(0, "tpu:0", **times)
        >>> process = ProcessTime(
        ...     0,
        ...     seconds=4.0,
        ...     working=3.5,
        ...     input=0.1,
        ...     dispatch=0.1,
        ...     compile=0.0,
        ...     trace="vm.xplane.pb",
        ... )
        >>> summary = ProfileSummary(
        ...     "run/trace", (device,), (process,), examples={0: 32, 1: 16}
        ... )
        >>> summary.parts["compute"], round(summary.imbalance, 2), summary.stragglers
        (0.75, 1.33, ())
    """

    logdir: str
    devices: tuple[DeviceTime, ...] = ()
    processes: tuple[ProcessTime, ...] = ()
    operations: tuple[OperationTime, ...] = ()
    examples: Mapping[int, int] = dataclasses.field(default_factory=dict)
    missing: tuple[int, ...] = ()

    @property
    def seconds(self) -> float:
        """The length of the interval, the longest of all processes."""
        return max((process.seconds for process in self.processes), default=0.0)

    @property
    def parts(self) -> dict[str, float]:
        """The fractions of compute, exposed collectives, input, compilation and host, of all devices. Their sum is 1."""
        times = {part: sum(getattr(device, part) for device in self.devices) for part in PARTS}
        total = sum(times.values())
        return {part: time / total if total else 0.0 for part, time in times.items()}

    @property
    def stragglers(self) -> tuple[int, ...]:
        """The processes that others wait for.

        Their `working` time is longer than the median of all processes by more than 3 MAD, and by more than a tenth of the
        interval. MAD is the median absolute deviation, scaled by 1.4826 to the standard deviation of normally distributed
        times. Of two processes, the slower one is compared with the other one.
        """
        times = [process.working for process in self.processes]
        if len(times) < 2:
            return ()
        others = times if len(times) > 2 else [min(times)]
        median = statistics.median(others)
        deviation = _MAD_OF_NORMAL * statistics.median(abs(time - median) for time in others)
        limit = median + max(3 * deviation, _LEAST_EXCESS * self.seconds)
        return tuple(process.process for process in self.processes if process.working > limit)

    @property
    def imbalance(self) -> float:
        """The largest number of true examples of a replica, divided by the mean; 1 if all have the same number."""
        total = sum(self.examples.values())
        return max(self.examples.values()) * len(self.examples) / total if total else 1.0

    def as_dict(self) -> dict[str, Any]:
        """Returns the summary as a tree of dicts, lists, strings and numbers."""
        return {
            **dataclasses.asdict(self),
            "seconds": self.seconds,
            "parts": self.parts,
            "stragglers": self.stragglers,
            "imbalance": self.imbalance,
        }

    def to_json(self) -> str:
        """Returns the summary as JSON."""
        return json.dumps(self.as_dict(), indent=1)

    @classmethod
    def read(cls, logdir: str | os.PathLike[str]) -> "ProfileSummary":
        """Returns the summary of the last profile in a log directory.

        Without a `summary.json`, it is computed from the traces, also from a trace of `jax.profiler.trace`, which does not
        contain the number of examples and the time of Python's tracing.

        Args:
            logdir: The directory, or the path of a trace, an `.xplane.pb` file.

        Raises:
            FileNotFoundError: There is neither a summary nor a trace.
            ValueError: The file of the summary, or a trace, is damaged.
        """
        path = pathlib.Path(logdir)
        if path.is_file():
            return summary_of_traces(str(path.parent), [path])
        if (path / SUMMARY_FILE).exists():
            return _read_json(path / SUMMARY_FILE)
        traces = newest_traces(path)
        if not traces:
            raise FileNotFoundError(
                f"{path} contains neither {SUMMARY_FILE} nor a trace (*.xplane.pb). Pass the directory of a `jdist.profile`."
            )
        return summary_of_traces(str(path), traces)

    def write(self) -> None:
        """Writes `summary.json` to the log directory, atomically."""
        with replace_atomically(pathlib.Path(self.logdir) / SUMMARY_FILE) as file:
            file.write_text(self.to_json())

    def __repr__(self) -> str:
        return f"ProfileSummary({self.logdir!r}, {self.seconds:.3f} s, {len(self.devices):,} devices)"

    def __str__(self) -> str:
        return text_of(self, _WIDTH)

    def _repr_html_(self) -> str:
        return html_of(self, _WIDTH)

    def __rich__(self) -> Any:
        from rich.console import Group

        tables = [self._device_table()] if self.devices else []
        if self.operations:
            tables.append(self._operation_table())
        return Group(*tables, facts_table("", self._facts()))

    def _device_table(self) -> Any:
        shown = [(f"process {each.process} " * (len(self.processes) > 1) + each.device, each) for each in self.devices]
        rows = [[name, *(_time(getattr(each, column), _total(each)) for column in _COLUMNS)] for name, each in shown]
        if len(rows) > 1:
            total = sum(map(_total, self.devices))
            sums = [sum(getattr(each, column) for each in self.devices) for column in _COLUMNS]
            mean = [_time(time / len(rows), total / len(rows)) for time in sums]
            more = f" ({len(rows) - _MAX_DEVICES:,} more)" if len(rows) > _MAX_DEVICES else ""
            rows = [["mean" + more, *mean], *rows[:_MAX_DEVICES]]
        head = ["device", *(column.replace("_", " ") for column in _COLUMNS)]
        return rows_table(head, rows, num_texts=1, title=f"{self.seconds:.3f} s")

    def _operation_table(self) -> Any:
        rows = [
            [each.name, _end(each.path), _end(each.source or ""), f"{1e3 * each.seconds:,.2f} ms", f"{each.count:,}"]
            + [f"{100 * each.share:.1f} %"]
            for each in self.operations
        ]
        head = ["operation", "path", "source", "time", "count", "share"]
        return rows_table(head, rows, num_texts=3, title="Slowest operations")

    def _facts(self) -> dict[str, str]:
        facts: dict[str, str] = {}
        if not self.devices:
            facts["devices"] = f"no operations ran in {self.seconds:.3f} s"
        for each in self.processes[:_MAX_DEVICES]:
            host = f"input {each.input:.3f} s, dispatch {each.dispatch:.3f} s, compilation {each.compile:.3f} s"
            facts[f"process {each.process}"] = f"working {each.working:.3f} s; on the host {host}"
        if len(self.processes) > 1:
            names = ", ".join(f"process {process}" for process in self.stragglers)
            facts["stragglers"] = names or "none"
        if self.missing:
            facts["missing"] = f"the parts of the processes {', '.join(map(str, self.missing))}"
        if self.examples:
            least, most = min(self.examples.values()), max(self.examples.values())
            facts["examples"] = f"{least:,} to {most:,} per replica, largest / mean = {self.imbalance:.2f}"
        if self.processes:
            folder = pathlib.Path(self.processes[0].trace).parent
            facts["open the trace"] = (
                f"`xprof --logdir={self.logdir}` (`python -m pip install xprof`), or TensorBoard with the same directory, or "
                f"the file *.trace.json.gz in {folder} at https://ui.perfetto.dev"
            )
        return facts


_COLUMNS = "compute", "collectives", *PARTS[1:]


def summary_of_traces(logdir: str, files: Iterable[pathlib.Path]) -> ProfileSummary:
    """Returns the summary of the traces of one profile.

    Raises:
        ValueError: A trace is damaged.
    """
    traces = {file: read_trace(file) for file in files}
    newest = next(reversed(traces.values()))
    are_numbered = len({trace.process for trace in traces.values()}) == len(traces)
    parts = [
        process_summary(logdir, file, trace if are_numbered else trace._replace(process=number))
        for number, (file, trace) in enumerate(traces.items())
        if not are_numbered or trace.process < newest.num_processes
    ]
    return merge_summaries(parts, newest.num_processes if are_numbered else len(parts))


def newest_traces(logdir: pathlib.Path) -> list[pathlib.Path]:
    """Returns the files of the last profile in a directory, the newest file last; of several processes, the last of each."""
    files = sorted(logdir.rglob("*.xplane.pb"), key=lambda file: file.stat().st_mtime_ns)
    if not files:
        return []
    runs: dict[pathlib.Path, pathlib.Path] = {}  # the newest folder of each process
    for file in files:
        runs[_process_folder(file)] = file.parent
    is_one_folder = not _process_folder(files[-1]).name.startswith("process_")
    chosen = {files[-1].parent} if is_one_folder else set(runs.values())
    return [file for file in files if file.parent in chosen]


def _process_folder(file: pathlib.Path) -> pathlib.Path:
    """Returns the directory that the profiler was started with: it writes `plugins/profile/RUN/HOST.xplane.pb`."""
    return file.parents[3] if len(file.parents) > 3 else file.parent


def process_summary(logdir: str, file: pathlib.Path, trace: Trace) -> ProfileSummary:
    """Returns the summary of one process."""
    interval = trace.interval
    compilation = union(trace.compilation, interval)
    waits = union(trace.input, interval)
    dispatch = difference(union(trace.dispatch, interval), compilation)
    devices, operations = [], []
    for device, ran in sorted(trace.operations.items(), key=lambda item: (len(item[0]), item[0])):
        compute, collectives = (
            union(
                (each for key, times in ran.items() if key.is_collective == is_collective for each in times), interval
            )
            for is_collective in (False, True)
        )
        idle = difference(difference([interval], compute), collectives)
        not_compiling = difference(idle, compilation)
        rest = difference(not_compiling, waits)
        devices.append(
            DeviceTime(
                trace.process,
                device,
                compute=_seconds(compute),
                collectives=_seconds(collectives),
                exposed_collectives=_seconds(difference(collectives, compute)),
                input=_seconds(not_compiling) - _seconds(rest),
                compile=_seconds(idle) - _seconds(not_compiling),
                host=_seconds(rest),
            )
        )
        for key, intervals in ran.items():
            inside = [each for each in intervals if interval[0] <= each[0] < interval[1]]
            operations.append(_operation(key, _seconds(inside), len(inside)))
    seconds = _seconds([interval])
    waiting = [device.exposed_collectives + device.compile for device in devices] or [_seconds(compilation)]
    process = ProcessTime(
        trace.process,
        seconds,
        working=seconds - statistics.mean(waiting),
        input=_seconds(waits),
        dispatch=_seconds(dispatch),
        compile=_seconds(compilation),
        trace=str(file),
    )
    slowest = _slowest(operations, seconds * len(devices))
    return ProfileSummary(logdir, tuple(devices), (process,), slowest, trace.examples)


def merge_summaries(parts: Sequence[ProfileSummary], num_processes: int) -> ProfileSummary:
    """Returns the summary of all processes, given the summaries of single processes."""
    parts = sorted(parts, key=lambda part: part.processes[0].process)
    present = {process.process for part in parts for process in part.processes}
    total = sum(sum(map(_total, part.devices)) for part in parts)
    return ProfileSummary(
        parts[0].logdir,
        tuple(device for part in parts for device in part.devices),
        tuple(process for part in parts for process in part.processes),
        _slowest((operation for part in parts for operation in part.operations), total),
        dict(sorted({replica: number for part in parts for replica, number in part.examples.items()}.items())),
        tuple(sorted({*range(num_processes)} - present)),
    )


def summary_from_dict(values: Mapping[str, Any]) -> ProfileSummary:
    """Returns the summary whose `as_dict` is `values`, also after it was JSON.

    Raises:
        KeyError, TypeError, ValueError: It is not the dict of a summary.
    """
    return ProfileSummary(
        str(values["logdir"]),
        tuple(DeviceTime(**each) for each in values["devices"]),
        tuple(ProcessTime(**each) for each in values["processes"]),
        tuple(OperationTime(**each) for each in values["operations"]),
        {int(replica): int(number) for replica, number in values["examples"].items()},
        tuple(values["missing"]),
    )


def _read_json(file: pathlib.Path) -> ProfileSummary:
    try:
        return summary_from_dict(json.loads(file.read_text()))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"{file} is not the summary of a profile: {type(error).__name__}: {error}. Remove it, and the summary is computed "
            "from the traces again."
        ) from error


def _operation(key: OperationKey, seconds: float, count: int) -> OperationTime:
    facts = key.facts
    return OperationTime(key.name, key.program, facts.path, facts.source, key.is_collective, seconds, count, share=0.0)


def _slowest(operations: Iterable[OperationTime], total: float) -> tuple[OperationTime, ...]:
    """Returns the slowest operations, given their times on several devices, and the sum of the intervals of the devices."""
    sums: dict[OperationTime, tuple[float, int]] = {}
    for each in operations:
        identity = dataclasses.replace(each, seconds=0.0, count=0, share=0.0)
        seconds, count = sums.get(identity, (0.0, 0))
        sums[identity] = seconds + each.seconds, count + each.count
    slowest = sorted(sums.items(), key=lambda item: -item[1][0])[:_MAX_OPERATIONS]
    return tuple(
        dataclasses.replace(identity, seconds=seconds, count=count, share=seconds / total)
        for identity, (seconds, count) in slowest
        if count
    )


def _total(device: DeviceTime) -> float:
    return sum(getattr(device, part) for part in PARTS)


def _seconds(intervals: Sequence[Interval]) -> float:
    return length(intervals) / 1e9


def _time(seconds: float, total: float) -> str:
    return f"{seconds:.3f} s {100 * seconds / total if total else 0:3.0f} %"


def _end(text: str) -> str:
    return text if len(text) <= _MAX_TEXT else "…" + text[1 - _MAX_TEXT :]
