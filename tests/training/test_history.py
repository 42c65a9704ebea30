"""The history as columns, tables and charts: every history can be drawn, and the charts contain its values."""

import math
import pickle
import re
import subprocess
import sys
import warnings
import xml.etree.ElementTree as ET

import hypothesis
import hypothesis.strategies as st
import matplotlib
import numpy as np
import pytest
from matplotlib.colors import to_hex
from matplotlib.figure import Figure

from jdist._src.core.html_page import COLORS
from jdist._src.core.rendering import printable
from jdist._src.training.history import History, format_value
from jdist._src.training.report.charts import (
    chart_panels,
    draw_figure,
    figure_as_svg,
    metric_columns,
)

from laws import each_row

few = hypothesis.settings(
    max_examples=12,
    deadline=None,
    derandomize=True,
    database=None,
    phases=[hypothesis.Phase.generate],  # shrinking is too slow with figures
    suppress_health_check=list(hypothesis.HealthCheck),
)

VALUES = st.one_of(st.floats(), st.integers(), st.sampled_from([0.5, 1.0, 0.0, -1.0, 1e-320, 1.7e308, None, "text"]))
NAMES = st.one_of(
    st.sampled_from(["epoch", "step", "loss", "val_loss", "accuracy", "val_accuracy", "learning_rate", "val_", ""]),
    st.sampled_from(["examples_per_second", "stalled_fraction", "$x$", "_hidden", "<script>"]),
    st.sampled_from(["\ud800", "a\nb", "損失", "val_val_"]),
    st.text(max_size=40),
)
HISTORIES = st.builds(
    History,
    st.lists(st.dictionaries(NAMES, VALUES, max_size=6), max_size=5),
    st.dictionaries(st.integers(), VALUES, max_size=40),
)


def epochs(count, **columns):
    """Returns the rows of `count` epochs of 10 steps; each column is a function of the epoch."""
    return [
        {"epoch": e, "step": 10 * (e + 1)} | {name: function(e) for name, function in columns.items()}
        for e in range(count)
    ]


def steps(count, loss=lambda step: 2.0 + math.sin(step)):
    return {step: loss(step) for step in range(1, count + 1)}


FULL = History(
    epochs(
        4,
        seconds=lambda e: 1.5 * e,
        examples_per_second=lambda e: 1000.0 + e,
        stalled_fraction=lambda e: 0.1 * e,
        loss=lambda e: 2.0 - 0.3 * e,
        accuracy=lambda e: 0.2 * e,
        perplexity=lambda e: 40.0 - e,
        val_loss=lambda e: 2.1 - 0.3 * e,
        val_accuracy=lambda e: 0.19 * e,
        val_recall=lambda e: 0.1 * e,
        learning_rate=lambda e: 0.01 / (e + 1),
    ),
    steps(40),
)


def axes_of(history):
    """Returns the axes of the figure by their titles."""
    return {axes.get_title(loc="left"): axes for axes in history.plot().axes}


@pytest.fixture(scope="module")
def full():
    return axes_of(FULL)


def lines_of(axes):
    return {line.get_label(): line for line in axes.lines}


# ---- columns


def test_column_contains_the_values_of_the_rows_that_have_it():
    history = History([{"epoch": 0, "loss": 2.0}, {"epoch": 1, "loss": 1.0, "val_loss": 1.5}])
    assert history["loss"] == [2.0, 1.0] and history["val_loss"] == [1.5] and history["epoch"] == [0, 1]
    assert history.columns == ("epoch", "loss", "val_loss")
    assert len(history) == 2 and "val_loss" in history and "accuracy" not in history


def test_unknown_column_raises_with_the_known_ones():
    for column in ("los", None):
        with pytest.raises(KeyError, match=r"no column .*The columns are 'epoch', 'loss'"):
            History([{"epoch": 0, "loss": 2.0}])[column]
    with pytest.raises(KeyError, match="none: no epoch has ended"):
        History()["loss"]


def test_history_is_a_list_of_its_rows_and_its_losses_are_an_array():
    assert list(FULL) == list(FULL.rows) and FULL[:2] == list(FULL.rows[:2])
    assert FULL[-1] == FULL[np.int64(-1)] == FULL.rows[-1]
    with pytest.raises(IndexError, match=r"no row 99: the history has \d+ rows"):
        FULL[99]
    history = History((), {2: 0.5, 1: 1.0})
    axes = Figure().add_subplot()
    (line,) = axes.plot(history.losses)
    assert line.get_ydata().tolist() == np.asarray(history.losses).tolist() == [1.0, 0.5]
    assert history.losses == {1: 1.0, 2: 0.5} and pickle.loads(pickle.dumps(history)).losses == history.losses


# ---- tables


def test_history_as_text_is_a_table_of_its_rows():
    history = History([{"epoch": 0, "loss": 2.25}, {"epoch": 1, "loss": 0.125, "val_loss": 0.5}], {1: 1.0})
    assert str(history).split() == ["epoch", "loss", "val_loss", "0", "2.25", "1", "0.125", "0.5"]
    assert len({len(line) for line in str(FULL).splitlines()}) == 1
    assert repr(history) == "History(2 rows of epoch, loss, val_loss; 1 losses)"
    assert str(History()) == repr(History()) == "History(0 rows of nothing; 0 losses)"
    with pytest.raises(AttributeError):  # it is frozen
        FULL.rows = ()


def test_long_table_contains_the_first_and_last_rows_and_the_number_of_omitted_ones():
    lines = str(History(epochs(1000))).splitlines()
    assert len(lines) == 32 and lines[1].split() == ["0", "10"] and lines[-1].split() == ["999", "10,000"]
    assert "… 970 more" in lines[16]
    assert len(History(epochs(1000))._repr_html_().splitlines()) == 202 + 1


def test_html_table_escapes_names_and_values():
    text = History([{"<script>": "<b>"}])._repr_html_()
    assert "&lt;b&gt;" in text and "&lt;script&gt;" in text and not {"<b>", "<script>"} & set(re.findall("<.*?>", text))


@pytest.mark.parametrize(
    "value, text",
    [(0, "0"), (12, "12"), (1234567, "1,234,567"), (10**15, "1,000,000,000,000,000"), (1.0, "1"), (0.98765, "0.9877")]
    + [(98765.4, "98,765"), (1e30, "1e+30"), (float("inf"), "inf"), (None, "None"), (10**400, printable(str(10**400)))],
)
def test_values_are_formatted_with_few_digits(value, text):
    assert format_value(value) == text


def test_metric_names_start_with_the_loss():
    assert list(metric_columns(FULL.columns)) == ["loss", "accuracy", "perplexity", "recall"]


# ---- charts


def test_figure_has_a_chart_per_recorded_quantity(full):
    assert " | ".join(full) == (
        "Loss | Metrics | Perplexity | Learning rate | Examples per second | Steps that waited for input"
    )


CURVES = [
    ("Loss", "training", "loss"),
    ("Loss", "validation", "val_loss"),
    ("Metrics", "accuracy", "accuracy"),
    ("Metrics", "accuracy validation", "val_accuracy"),
    ("Metrics", "recall validation", "val_recall"),
    ("Perplexity", "training", "perplexity"),
    ("Learning rate", "", "learning_rate"),
    ("Steps that waited for input", "", "stalled_fraction"),
]


@each_row("title, label, column", CURVES)
def test_curve_contains_the_values_of_its_column(full, title, label, column):
    line = lines_of(full[title])[label or "_child0"]
    assert line.get_xdata().tolist() == FULL["step"] and line.get_ydata().tolist() == FULL[column]
    assert line.get_linestyle() == ("--" if column.startswith("val_") else "-")


def test_loss_of_every_step_is_drawn(full):
    line = lines_of(full["Loss"])["every step"]
    assert dict(zip(line.get_xdata().tolist(), line.get_ydata().tolist(), strict=True)) == FULL.losses


def test_steps_are_sorted():
    (panel,) = chart_panels((), dict(reversed(steps(20).items())))
    assert panel.curves[0].x.tolist() == list(range(1, 21)) and panel.curves[0].y.tolist() == list(steps(20).values())


def test_validation_has_the_color_of_its_metric(full):
    lines = lines_of(full["Metrics"])
    colors = [lines[label].get_color() for label in ("accuracy", "accuracy validation", "recall validation")]
    assert colors[0] == colors[1] != colors[2]


def test_legend_shows_each_name_verbatim():
    axes = axes_of(History([{"$x^": 0.1, "_hidden": 0.9, "recall_of_class_1": 0.5, "val_recall_of_class_1": 0.6}]))
    names = [text.get_text() for text in axes["Metrics"].get_legend().get_texts()]
    axes["Metrics"].figure.canvas.draw()
    assert names == ["$x^", "_hidden", "recall_of_class_1", "recall_of_class_1 valid…"]


def test_more_metrics_than_colors_use_several_panels():
    panels = chart_panels(epochs(2, **{f"m{i}": lambda e: 0.5 for i in range(7)}), {})
    assert [len(panel.curves) for panel in panels] == [5, 2]
    assert all(len({curve.color for curve in panel.curves}) == len(panel.curves) for panel in panels)


@pytest.mark.parametrize(
    "values, log",
    [((1.0, 0.5), False), ((1.0, 1e-3), True), ((1.0, 0.0), False), ((1e3, -1.0), False), ((0.0, 0.0), False)],
)
def test_scale_is_logarithmic_for_values_of_different_orders_of_magnitude(values, log):
    (panel,) = chart_panels(epochs(2, loss=values.__getitem__), {})
    axes = axes_of(History(epochs(2, loss=values.__getitem__)))["Loss"]
    assert panel.log is log is ("log scale" in panel.caption) and axes.get_yscale() == ("log" if log else "linear")


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 1.7e308])
def test_non_finite_values_are_marked_and_counted(bad):
    rows, losses = epochs(3, loss=[1.0, bad, 0.5].__getitem__), steps(30, lambda s: bad if s in (7, 20) else 1.0)
    (panel,) = chart_panels(rows, losses)
    assert panel.bad.tolist() == [7, 20] and "2 not finite (×)" in panel.caption
    lines = lines_of(axes_of(History(rows, losses))["Loss"])
    assert lines["not finite"].get_xdata().tolist() == [7, 20]
    assert to_hex(lines["not finite"].get_color()) == COLORS["bad"][0]
    assert np.isnan(lines["training"].get_ydata()).tolist() == [False, True, False]


def test_axes_span_the_steps_if_no_loss_is_finite():
    axes = axes_of(History((), steps(30, lambda step: math.nan)))["Loss"]
    low, high = axes.get_xlim()
    assert low <= 1 and high >= 30 and len(lines_of(axes)["not finite"].get_xdata()) == 30


@pytest.mark.parametrize("count, every", [(200, 1), (201, 2), (10_007, 51), (100_000, 500)])
@pytest.mark.parametrize("bad", [False, True])
def test_long_run_is_drawn_as_a_range(count, every, bad):
    values = np.random.default_rng(0).standard_normal(count)
    values[count // 2] = 99.0
    values[3] = math.nan if bad else 1.0
    (panel,) = chart_panels((), dict(enumerate(values.tolist(), start=1)))
    (curve,) = panel.curves
    assert len(curve.x) <= 200 and np.nanmax(curve.high) == 99.0
    parts = np.split(values, range(every, count, every))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # a group without a finite loss
        for drawn, of in ((curve.low, np.nanmin), (curve.high, np.nanmax), (curve.y, np.nanmean)):
            np.testing.assert_allclose(drawn, [of(part) for part in parts], atol=1e-12)
    assert curve.label == ("every step" if every == 1 else f"range of {every} steps")
    assert panel.bad.tolist() == [4] * bad
    assert (len(axes_of(History((), dict(enumerate(values, 1))))["Loss"].collections)) == 1


def test_single_row_and_single_loss_are_points():
    lines = lines_of(axes_of(History(epochs(1, loss=lambda e: 2.0), {10: 2.5}))["Loss"])
    assert lines["training"].get_marker() == "o" and lines["every step"].get_marker() == "."


def test_figure_of_an_empty_history():
    figure = History().plot()
    assert not figure.axes and [text.get_text() for text in figure.texts] == ["Nothing was recorded."]


@pytest.mark.parametrize(
    "rows, x_label, positions",
    [
        ([{"step": 5, "loss": 1.0}], "step", [5]),
        ([{"epoch": 0, "loss": 1.0}, {"epoch": 1, "loss": 1.0}], "epoch", [0, 1]),
        ([{"loss": 1.0}, {"epoch": 1, "loss": 1.0}], "row", [1, 2]),
    ],
)
def test_positions_of_rows_are_steps_or_else_epochs_or_else_row_numbers(rows, x_label, positions):
    (panel,) = chart_panels(rows, {})
    assert panel.x_label == x_label and panel.curves[0].x.tolist() == positions


@pytest.mark.parametrize("suffix, start", [("png", b"\x89PNG"), ("svg", b"<?xml"), ("pdf", b"%PDF")])
def test_figure_is_saved(tmp_path, suffix, start):
    figure = FULL.plot(tmp_path / f"run.{suffix}")
    assert (tmp_path / f"run.{suffix}").read_bytes().startswith(start) and len(figure.axes) == 6


def test_figure_is_shown_in_a_notebook_and_can_be_pickled():
    figure = History(epochs(2, loss=lambda e: 1.0)).plot()
    assert figure._repr_png_().startswith(b"\x89PNG")
    assert len(pickle.loads(pickle.dumps(figure)).axes) == 1


def test_drawing_neither_uses_nor_changes_the_settings_of_the_user():
    with matplotlib.rc_context({"lines.linewidth": 9.0, "axes.grid": False, "font.size": 30.0}):
        settings = dict(matplotlib.rcParams)
        figure = FULL.plot()
        assert dict(matplotlib.rcParams) == settings
    assert figure.axes[0].xaxis.label.get_size() < 12


@pytest.mark.slow
def test_drawing_does_not_import_pyplot():
    code = (
        "import sys; from jdist._src.training.history import History; assert 'matplotlib' not in sys.modules;"
        "History([{'step': 1, 'loss': 2.0}]).plot(); assert 'matplotlib.pyplot' not in sys.modules; print('drawn')"
    )
    process = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, timeout=120)
    assert process.stdout == "drawn\n", process.stderr


def test_missing_matplotlib_raises_with_the_install_command(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ModuleNotFoundError, match=r'python -m pip install "jdist\[plot\]"'):
        FULL.plot()


def test_svg_uses_css_colors_and_is_deterministic():
    text = figure_as_svg(FULL.plot())
    root = ET.fromstring(text)
    assert root.tag.endswith("svg") and "viewBox" in root.attrib and "width" not in root.attrib
    assert text == figure_as_svg(FULL.plot())
    assert "var(--muted)" in text and not any(light in text for light, _ in COLORS.values())


@pytest.mark.slow
@few
@hypothesis.given(HISTORIES)
def test_any_history_is_shown_as_text_table_and_charts_that_contain_all_values(history):
    assert str(history) and repr(history) and history._repr_html_().startswith("<pre")
    str(history).encode()
    panels = chart_panels(history.rows, history.losses)
    curves = [curve for panel in panels for curve in panel.curves]
    num_drawn = sum(len(curve.y) for curve in curves if curve.low is None)
    assert num_drawn == sum(name not in ("epoch", "step", "seconds") for row in history.rows for name in row)
    assert sum(len(curve.x) for curve in curves if curve.low is not None) == len(history.losses)
    ET.fromstring(figure_as_svg(draw_figure(panels)))
