"""A page about a training run: one HTML file that needs nothing else, to be read in a browser, sent or printed."""

import contextlib
import datetime
import html
import importlib.metadata
import importlib.resources
import math
import os
import pathlib
import platform
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

import jax

from jdist._src.core.atomic_files import replace_atomically
from jdist._src.execution.replicate import Proof
from jdist._src.strategies.description import Description
from jdist._src.training.history import History, format_value
from jdist._src.training.report import matplotlib_charts
from jdist._src.training.report.charts import VALIDATION, metrics_of, number, panels, shown

_LISTED = 2_000  # names of results
_SAID = 400  # letters of a proof
# Nothing is loaded and nothing runs, whatever a name in it may try.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'"
# The ground behind the cards, and the lines and letters, on light and dark; the other colours are those of the pictures.
_PAGE_COLORS = {"ground": ("#f5f6f7", "#0e1013"), "text": ("#1c2126", "#e4e7eb"), "line": ("#e2e5e9", "#272c32")}


class Ended(Protocol):
    """What is known of a training run that has ended."""

    @property
    def history(self) -> History:
        """What was recorded."""
        ...

    @property
    def steps(self) -> int:
        """How many steps the state has gone through."""
        ...

    @property
    def stop(self) -> str:
        """Why training stopped, a sentence."""
        ...

    @property
    def description(self) -> Description | None:
        """What it ran on, and where the leaves of the state lie."""
        ...

    @property
    def proof(self) -> Proof | None:
        """What was proved of the step."""
        ...


def report(fit: Ended, path: str | os.PathLike[str], *, title: str = "Training") -> pathlib.Path:
    """Writes a page about a training run. Process 0 does; the others do nothing.

    The file is written whole or not at all, and an older one at its place is replaced.

    Args:
        fit: How training ended.
        path: Where to write it, `.html`.
        title: What the page is headed with.

    Returns:
        The path.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
        OSError: The file cannot be written.

    Example:
        >>> import tempfile, types
        >>> history = History([{"epoch": 0, "step": 2, "loss": 0.5}], {1: 0.75, 2: 0.25})
        >>> fit = types.SimpleNamespace(history=history, steps=2, stop="All 1 epochs are done.", description=None, proof=None)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     text = report(fit, f"{folder}/run.html", title="Digits").read_text(encoding="utf-8")
        >>> "<h1>Digits</h1>" in text and "All 1 epochs are done." in text
        True
    """
    path = pathlib.Path(path)
    if jax.process_index() == 0:
        page = _page(fit, title)
        with replace_atomically(path) as new:
            new.write_text(page, encoding="utf-8", errors="xmlcharrefreplace")
    return path


def _page(fit: Ended, title: str) -> str:
    history, written = fit.history, datetime.datetime.now(datetime.UTC)
    pictures = "".join(
        f'<figure role="img" aria-label="{_escaped(panel.title)}"><figcaption><strong>{_escaped(panel.title)}</strong>'
        f"<span>{_escaped(panel.reading)}</span></figcaption>{matplotlib_charts.svg(panel, f'picture-{i}')}</figure>"
        for i, panel in enumerate(panels(history.rows, history.losses))
    )
    sections = [
        *(f'<dl class="cards">{"".join(cards)}</dl>' for cards in (_results(history), _facts(fit))),
        _section("Pictures", f'<div class="pictures">{pictures}</div>' if pictures else "<p>Nothing was recorded.</p>"),
    ]
    if len(history):
        sections.append(_section("Epochs", f'<div class="wide epochs" tabindex="0">{history._repr_html_()}</div>'))
    if fit.description is not None:
        about = fit.description._repr_html_()
        sections.append(_section("Strategy", f'<div class="wide strategy" tabindex="0">{about}</div>'))
    if fit.proof is not None:
        sections.append(_section("Proof", f'<div class="wide proof">{_proof(fit.proof)}</div>'))
    facts = "".join(f"<dt>{_escaped(name)}</dt><dd>{_escaped(fact)}</dd>" for name, fact in _environment().items())
    sections.append(_section("Environment", f'<dl class="environment">{facts}</dl>'))
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f'<meta name="color-scheme" content="light dark">\n<title>{_escaped(title)}</title>\n'
        f"<style>\n{_style()}</style>\n</head>\n<body>\n<main>\n"
        f'<header><h1>{_escaped(title)}</h1><p class="stop">{_escaped(fit.stop)}</p>'
        f"<p>Written {written:%Y-%m-%d %H:%M} UTC by jdist.</p></header>\n"
        + "\n".join(sections)
        + "\n</main>\n</body>\n</html>\n"
    )


def _section(title: str, inside: str) -> str:
    return f"<section><h2>{title}</h2>\n{inside}</section>"


def _escaped(text: str) -> str:
    return html.escape(shown(text, 10_000))


def _style() -> str:
    """The style sheet, and the colours that it and the pictures speak of: on light, on dark, and on paper."""
    colors = matplotlib_charts.COLORS | _PAGE_COLORS
    light, dark = (" ".join(f"--{name}: {pair[i]};" for name, pair in colors.items()) for i in (0, 1))
    sheet = importlib.resources.files("jdist._src.training.report").joinpath("report.css").read_text(encoding="utf-8")
    return (
        f":root {{ color-scheme: light dark; {light} }}\n"
        f"@media screen and (prefers-color-scheme: dark) {{ :root {{ {dark} }} }}\n{sheet}"
    )


def _results(history: History) -> Iterable[str]:
    """The last loss and metrics."""
    for name in metrics_of(history.columns):
        training, validation = (history[of][-1] if of in history else None for of in (name, VALIDATION + name))
        if validation is None:
            yield _card(name, format_value(training), "training")
        else:
            beside = "" if training is None else f" · training {format_value(training)}"
            yield _card(name, format_value(validation), "validation" + beside)


def _facts(fit: Ended) -> Iterable[str]:
    """How many steps, how long and how fast."""
    history = fit.history
    yield _card("steps", f"{fit.steps:,}", f"{len(history):,} epoch{'' if len(history) == 1 else 's'}")
    if "seconds" in history:
        yield _card("time", _duration(number(history["seconds"][-1])), "compilation included")
    if "rows_per_second" in history:
        yield _card("rows a second", format_value(_median(history["rows_per_second"])), "median of the epochs")
    if "stalled" in history:
        yield _card("waited for input", f"{_median(history['stalled']):.1%}", "of the steps, median of the epochs")


def _card(name: str, value: str, beside: str) -> str:
    name, value, beside = map(_escaped, (name, value, beside))
    return f'<div><dt>{name}</dt><dd class="value">{value}</dd><dd class="beside">{beside}</dd></div>'


def _median(values: Sequence[float]) -> float:
    known = [number(value) for value in values if math.isfinite(number(value))]
    return statistics.median(known) if known else math.nan


def _duration(seconds: float) -> str:
    if not 0 <= seconds < 1e12:
        return format_value(seconds)
    if seconds < 60:
        return f"{seconds:.3g} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours:,} h {minutes} min" if hours else f"{minutes} min {rest} s"


def _proof(proof: Proof) -> str:
    kinds = (("The same on every replica", proof.mirrored), ("One value a replica", proof.per_replica))
    lists = "".join(_folded(f"{kind} ({len(names):,})", names) for kind, names in kinds if names)
    return f"<p>{html.escape(shown(str(proof), _SAID))}</p>{lists}"


def _folded(title: str, names: Sequence[str]) -> str:
    items = "".join(f"<li>{_escaped(name)}</li>" for name in names[:_LISTED])
    more = f"<li>… {len(names) - _LISTED:,} more</li>" if len(names) > _LISTED else ""
    return f"<details><summary>{title}</summary><ul>{items}{more}</ul></details>"


def _environment() -> Mapping[str, str]:
    """The versions of what took part, and the machine."""
    versions = {}
    for package in ("jdist", "jax", "jaxlib", "flax", "optax"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):  # a source tree on the path has none
            versions[package] = importlib.metadata.version(package)
    kinds = sorted({f"{device.device_kind} ({device.platform})" for device in jax.devices()})
    return versions | {
        "Python": platform.python_version(),
        "platform": platform.platform(),
        "devices": f"{jax.device_count():,} of kind {', '.join(kinds)}",
        "processes": f"{jax.process_count():,}",
    }
