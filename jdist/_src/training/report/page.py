"""The report of a training run: one self-contained HTML file."""

import contextlib
import html
import importlib.metadata
import importlib.resources
import math
import os
import pathlib
import platform
import statistics
from collections.abc import Sequence
from typing import Any

import jax

from jdist._src.core.atomic_files import replace_atomically
from jdist._src.core.html_page import escaped, html_page
from jdist._src.core.paths import as_path
from jdist._src.core.rendering import facts_html, printable
from jdist._src.execution.traced import Proof
from jdist._src.training.history import format_value, row_name
from jdist._src.training.history_columns import NON_METRIC_COLUMNS
from jdist._src.training.report.charts import chart_panels, figure_as_svg, to_float

_MAX_NAMES = 2_000  # in a list of results
_MAX_PROOF_LENGTH = 400


def write_report(fit: Any, path: str | os.PathLike[str], *, title: str = "Training") -> pathlib.Path:
    """Writes the report of a training run. With several processes, process 0 writes it.

    The file is written atomically and replaces an existing one.

    Args:
        fit: The result of training, a `Fit`, whose module imports this one.
        path: The file to write, `.html`.
        title: The heading of the page.

    Returns:
        The path.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
        OSError: The file cannot be written.

    Example:
        >>> import tempfile, types
        >>> from jdist._src.training.history import History
        >>> history = History([{"epoch": 0, "step": 2, "loss": 0.5}], {1: 0.75, 2: 0.25})
        >>> fit = types.SimpleNamespace(
        ...     history=history,
        ...     steps=2,
        ...     stop_reason="All requested steps were taken.",
        ...     description=None,
        ...     proof=None,
        ... )
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = write_report(fit, f"{folder}/run.html", title="Digits")
        ...     text = path.read_text(encoding="utf-8")
        >>> "<h1>Digits</h1>" in text and "All requested steps were taken." in text
        True
    """
    path = as_path(path)
    if jax.process_index() == 0:
        page = _page(fit, title)
        with replace_atomically(path) as new:
            new.write_text(page, encoding="utf-8", errors="xmlcharrefreplace")
    return path


def _page(fit: Any, title: str) -> str:
    history = fit.history
    titles = escaped(", ".join(panel.title for panel in chart_panels(history.rows, history.losses)))
    charts = f'<figure role="img" aria-label="{titles}">{figure_as_svg(history.plot())}</figure>'
    sections = {"Results": facts_html("", _results(fit)), "Charts": charts}
    summary = getattr(fit, "summary", lambda: None)()
    if summary is not None:
        sections["Model"] = summary._repr_html_()
    if len(history):
        sections[f"{row_name(history).title()}s"] = history._repr_html_()
    if fit.description is not None:
        sections["Strategy"] = fit.description._repr_html_()
    if fit.proof is not None:
        sections["Proof"] = _proof(fit.proof)
    sections["Environment"] = facts_html("", _environment())
    return html_page(title, [fit.stop_reason], sections)


def _results(fit: Any) -> dict[str, str]:
    """Returns the last loss and metrics, the number of steps, the duration and the throughput."""
    history = fit.history
    results = {name: format_value(history[name][-1]) for name in history.columns if name not in NON_METRIC_COLUMNS}
    row = row_name(history)
    results["steps"] = f"{fit.steps:,} in {len(history):,} {row}{'s' * (len(history) != 1)}"
    if "seconds" in history:
        results["time"] = f"{_duration(to_float(history['seconds'][-1]))}, compilation included"
    if "examples_per_second" in history:
        results["examples per second"] = (
            f"{format_value(_median(history['examples_per_second']))}, median of the {row}s"
        )
    if "tokens_per_second" in history:
        results["tokens per second"] = f"{format_value(_median(history['tokens_per_second']))}, median of the {row}s"
    if step_flops := getattr(fit, "step_flops", None):
        results["model flops"] = f"{_flops_text(step_flops)} per step, of matrix products and convolutions"
    if "mfu" in history:
        results["model flops utilization"] = f"{_median(history['mfu']):.1%}, median of the {row}s"
    if "stalled_fraction" in history:
        stalled = _median(history["stalled_fraction"])
        results["waited for input"] = f"{stalled:.1%} of the steps, median of the {row}s"
    return results


def _flops_text(number: float) -> str:
    power = min(max(int(math.log10(number)), 0) // 3, 6)
    return f"{number / 1000**power:.3g} {['', 'k', 'M', 'G', 'T', 'P', 'E'][power]}FLOP"


def _median(values: Sequence[float]) -> float:
    numbers = [to_float(value) for value in values if math.isfinite(to_float(value))]
    return statistics.median(numbers) if numbers else math.nan


def _duration(seconds: float) -> str:
    if not 0 <= seconds < 1e12:
        return format_value(seconds)
    if seconds < 60:
        return f"{seconds:.3g} s"
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours:,} h {minutes} min" if hours else f"{minutes} min {seconds} s"


def _proof(proof: Proof) -> str:
    groups = (
        ("Replicated", proof.replicated),
        ("One value per replica", proof.per_replica),
        ("What one device computes", proof.equivalent),
        ("Not what one device computes", proof.not_equivalent),
        ("Not known whether one device computes it", proof.unknown),
    )
    lists = "".join(_details(f"{title} ({len(names):,})", names) for title, names in groups if names)
    return f"<p>{html.escape(printable(str(proof), _MAX_PROOF_LENGTH))}</p>{lists}"


def _details(title: str, names: Sequence[str]) -> str:
    items = "".join(f"<li>{escaped(name)}</li>" for name in names[:_MAX_NAMES])
    more = f"<li>… {len(names) - _MAX_NAMES:,} more</li>" if len(names) > _MAX_NAMES else ""
    return f"<details><summary>{title}</summary><ul>{items}{more}</ul></details>"


def _environment() -> dict[str, str]:
    """Returns the versions of packages, and the platform."""
    versions = {}
    for package in ("jdist", "jax", "jaxlib", "flax", "optax"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):  # a source tree on the path has no metadata
            versions[package] = importlib.metadata.version(package)
    kinds = sorted({f"{device.device_kind} ({device.platform})" for device in jax.devices()})
    return versions | {
        "Python": platform.python_version(),
        "platform": platform.platform(),
        "devices": f"{jax.device_count():,} of kind {', '.join(kinds)}",
        "processes": f"{jax.process_count():,}",
    }
