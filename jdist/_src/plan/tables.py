"""The tables of a `Plan`, drawn by rich. The module of this class imports this one."""

from collections.abc import Sequence
from typing import Any

from jdist._src.core.rendering import html_of, rows_table, text_of
from jdist._src.strategies.description import size_text

WIDTH = 128
_VERDICTS = {None: "unknown", True: "yes", False: "no"}
_MAX_COLLECTIVES = 12  # rows per number of devices


def plan_text(plan: Any) -> str:
    """Returns the tables as plain text."""
    return text_of(plan, WIDTH)


def plan_html(plan: Any) -> str:
    """Returns the tables as an HTML element."""
    return html_of(plan, WIDTH)


def plan_tables(plan: Any) -> Any:
    """Returns the tables for rich."""
    from rich.console import Group
    from rich.text import Text

    parts: list[Any] = [Text(f"Plan of {plan.step}", style="bold"), overview_tables(plan)]
    for size in plan.sizes:
        parts += [Text(""), Text(size_name(size), style="bold"), size_tables(size)]
    return Group(*parts, Text(""), Text(plan_notes(plan)))


def size_name(size: Any) -> str:
    """Returns the heading of the tables of one number of devices."""
    return f"{size.devices:,} devices, {size.hardware}"


def overview_tables(plan: Any) -> Any:
    """Returns the tables with one row per number of devices."""
    from rich.console import Group

    return Group(_overview(plan.sizes), _memory(plan.sizes), _work(plan.sizes))


def size_tables(size: Any) -> Any:
    """Returns the tables of one number of devices."""
    from rich.console import Group
    from rich.text import Text

    parts: list[Any] = [_buffers(size)]
    if size.collectives:
        parts.append(_collectives(size))
    if size.remedies:
        parts += [Text("It does not fit. Compiled variants:"), _remedies(size)]
    return Group(*parts)


def _overview(sizes: Sequence[Any]) -> Any:
    head = (
        "devices",
        "hardware",
        "strategy",
        "replicas",
        "fits",
        "memory",
        "limit",
        "sent per step",
        "step (model)",
        "efficiency",
    )
    rows = []
    for size in sizes:
        time = (
            [f"{_seconds(size.time.total)}, {size.time.bound}", f"{size.time.efficiency:.0%}"]
            if size.time
            else ["", ""]
        )
        limit = "" if size.memory.limit is None else size_text(size.memory.limit)
        sent = size_text(size.collective_bytes) if size.collectives else ""
        rows.append(
            [
                f"{size.devices:,}",
                size.hardware,
                size.strategy,
                f"{size.replicas:,}",
                _VERDICTS[size.fits],
                size_text(size.memory.total),
                limit,
                sent,
                *time,
            ]
        )
    return rows_table(head, rows)


def _memory(sizes: Sequence[Any]) -> Any:
    """Returns the bytes per device by their contents, one row per number of devices."""
    names = ("parameters", "optimizer", "inputs", "outputs", "activations", "temporaries", "code", "host")
    names = [name for name in names if any(getattr(size.memory, name) for size in sizes)]
    rows = [[f"{size.devices:,}", *(size_text(getattr(size.memory, name)) for name in names)] for size in sizes]
    return rows_table(["bytes per device of", *names], rows)


def _work(sizes: Sequence[Any]) -> Any:
    """Returns the work of one device per step, and its time according to the model."""
    head = ("per device and step", "flops", "memory traffic", "compute", "memory", "collectives", "exposed")
    rows = []
    for size in sizes:
        traffic = size_text(size.memory_traffic) if size.memory_traffic else ""
        time = size.time
        parts = [time.compute, time.memory, time.communication, time.exposed] if time else []
        rows.append([f"{size.devices:,}", f"{size.flops:.3g}", traffic, *(map(_seconds, parts) if parts else [""] * 4)])
    return rows_table(head, rows)


def _buffers(size: Any) -> Any:
    rows = [[size_text(buffer.bytes), buffer.name, buffer.line or ""] for buffer in size.largest]
    return rows_table(["largest buffers", "value", "line"], rows)


def _collectives(size: Any) -> Any:
    """Returns the collectives, equal ones in one row, those that send most first."""
    groups: dict[tuple[str, ...], list[Any]] = {}
    for each in size.collectives:
        axes = "?" if each.axes is None else " and ".join(each.axes)
        groups.setdefault((each.kind, axes, "yes" if each.overlaps else "no", each.line or ""), []).append(each)
    sent = lambda group: sum(each.bytes_per_run for each in group)
    largest = sorted(groups.items(), key=lambda item: -sent(item[1]))
    rows = [
        [f"{sum(each.num_executions for each in group):,}", kind, axes, size_text(sent(group)), overlaps, line]
        for (kind, axes, overlaps, line), group in largest[:_MAX_COLLECTIVES]
    ]
    if len(largest) > _MAX_COLLECTIVES:
        rows.append(["...", f"{len(largest) - _MAX_COLLECTIVES} more", "", "", "", ""])
    return rows_table(["count", "collective", "axis", "sent per device", "overlaps", "line"], rows)


def _remedies(size: Any) -> Any:
    rows = []
    for remedy in size.remedies:
        memory = size_text(remedy.total) if remedy.total else ""
        step = "" if remedy.step_seconds is None else _seconds(remedy.step_seconds)
        verdict = "not compiled" if remedy.fits is None else _VERDICTS[remedy.fits]
        rows.append([remedy.name, verdict, memory, step, remedy.note])
    return rows_table(["variant", "fits", "memory", "step (model)", "note"], rows)


def plan_notes(plan: Any) -> str:
    """Returns the sentences about the times of a plan."""
    notes = []
    if any(size.time for size in plan.sizes):
        notes.append(
            "Times are a model: rates of the hardware, without latencies. Efficiency is the part of a step that is not exposed "
            "communication."
        )
    elif not all(size.fits is False for size in plan.sizes):
        notes.append("Step times are unknown: no rates are published for these devices. Pass `calibrate=`.")
    if plan.calibration:
        each = plan.calibration
        notes.append(
            f"Calibrated on {each.devices} devices of kind {each.kind}: {_seconds(each.measured)} measured (median of "
            f"{each.steps} steps), {_seconds(each.predicted)} predicted before, error {each.error:+.0%}."
        )
    return " ".join(notes)


def _seconds(seconds: float) -> str:
    for unit, size in (("s", 1), ("ms", 1e-3)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds * 1e6:.3g} us"
