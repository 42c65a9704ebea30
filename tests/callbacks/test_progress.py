"""The progress display: its contents, its interval, and that it restores the terminal."""

import io
import math
import re
import sys
import types

import numpy as np
import optax
import pytest

import jdist
from jdist import callbacks
from jdist._src.training.progress import detect_kind

from small_loop import idle, place, regression, train

ONE = place("one_device")
X = np.zeros((4, 2), np.float32)
HIDE, SHOW = "\x1b[?25l", "\x1b[?25h"  # the cursor


def _run(callback, **options):
    options = dict(epochs=1, steps=10, state=0, call=idle, logs=lambda step: {"loss": 1 / (step + 1)}) | options
    return train(ONE, [callback], **options)


def _lines(interval_seconds=None, **options):
    stream = io.StringIO()
    run = _run(callbacks.Progress("lines", interval_seconds=interval_seconds, stream=stream), **options)
    return stream.getvalue().splitlines(), run


def test_lines_contain_all_facts():
    lines, _ = _lines(interval_seconds=4, seconds=1.0, stalled_fraction=0.25)
    assert lines == [
        "step 4/10  epoch 0  4 examples/s  0:00:06 left  loss 0.2  input stall 25 %",
        "step 8/10  epoch 0  4 examples/s  0:00:02 left  loss 0.1111  input stall 25 %",
        "epoch 0  step 10  0:00:10  loss 0.09091",
        "step 10/10  epoch 0  4 examples/s  0:00:10  loss 0.09091  input stall 25 %",
    ]


def test_last_line_of_training_that_stops_contains_the_duration():
    stream = io.StringIO()
    display = [callbacks.TimeLimit(4), callbacks.Progress("lines", interval_seconds=60, stream=stream)]
    train(ONE, display, epochs=1, steps=10, state=0, call=idle, seconds=1.0, logs=lambda step: {"loss": 0.5})
    assert stream.getvalue().splitlines()[-1] == "step 4/10  epoch 0  4 examples/s  0:00:04  loss 0.5  input stall 0 %"


def test_last_line_is_not_repeated():
    lines, _ = _lines(interval_seconds=5, seconds=1.0)
    assert [line.split("  ")[0] for line in lines] == ["step 5/10", "step 10/10", "epoch 0"]


def test_lines_without_a_known_end_contain_the_duration_and_no_array_metrics():
    logs = lambda step: {"loss": math.nan, "table": [1.0, 2.0]}
    lines, _ = _lines(interval_seconds=5, seconds=1.0, total=None, logs=logs)
    assert lines[0] == "step 5  epoch 0  4 examples/s  0:00:05  loss nan  input stall 0 %"


def test_validation_is_shown_until_the_next_validation():
    validation = lambda epoch: {"loss": 7.0 + epoch}
    lines, _ = _lines(interval_seconds=1, seconds=1.0, epochs=2, steps=2, validation=validation)
    assert ["val_loss" in line for line in lines] == [False, False, True, True, True, True, True]
    assert "val_loss 7" in lines[4] and "val_loss 8" in lines[5]


def test_throughput_is_measured_over_the_last_seconds():
    times = [0.0, 100.0, *(100.0 + 0.25 * number for number in range(1, 101))]  # the first step compiles
    stream, events = io.StringIO(), []
    _run(events.append, steps=101)
    display = callbacks.Progress("lines", interval_seconds=1, stream=stream)
    for event in events:
        display(event.__class__(**{**vars(event), "seconds": times[event.step]}))
    assert " 16 examples/s" in stream.getvalue().splitlines()[-2]


@pytest.mark.parametrize("kind, interval_seconds", [("live", 0.25), ("lines", 10.0)])
@pytest.mark.parametrize("seconds", [0.001, 0.1, 1.0])
def test_metrics_are_read_only_when_they_are_shown(kind, interval_seconds, seconds):
    run = _run(callbacks.Progress(kind, stream=io.StringIO()), steps=300, seconds=seconds)
    max_reports = 300 * seconds / interval_seconds + 2
    assert run.reads - 1 <= max_reports  # one read is for the row of the history
    assert run.reads - 1 >= min(300, math.floor(max_reports / 2))


def test_live_display_is_one_line_and_restores_the_cursor(monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    stream = io.StringIO()
    _run(callbacks.Progress("live", stream=stream))
    text = stream.getvalue()
    assert text.count(HIDE) == text.count(SHOW) == 1 and text.index(HIDE) < text.index(SHOW)
    assert text.count("\n") == 2  # the line of the epoch, and the last report
    assert "waiting for the first step" in text and "step 10/10" in text


def _screen(text, width):
    """Returns the lines that a terminal shows after `text`, which moves the cursor up and erases lines."""
    lines, row = [""], 0
    for token in re.findall(r"\x1b\[[0-9;?]*[A-Za-z]|\r|\n|[^\x1b\r\n]+", text):
        if token == "\n":
            row += 1
            lines += [""] * (row + 1 - len(lines))
        elif token.endswith("A"):
            row -= int(token[2:-1] or 1)
        elif token.endswith("K"):
            lines[row] = ""
        elif not token.startswith(("\x1b", "\r")):
            assert len(lines[row]) + len(token) <= width
            lines[row] += token
    return [line.rstrip() for line in lines]


def test_live_display_with_80_columns_shows_all_metrics_and_a_line_per_epoch(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    stream = io.StringIO()
    metrics = lambda step: {"loss": 1 / (step + 1), "accuracy": step / 100}
    _run(
        callbacks.Progress("live", stream=stream),
        epochs=2,
        steps=1200,
        seconds=0.01,
        logs=metrics,
        validation=lambda epoch: {"loss": 2.5 + epoch, "accuracy": 0.125},
    )
    screen = _screen(stream.getvalue(), 80)
    assert [" ".join(screen[i : i + 2]) for i in (0, 2)] == [
        "epoch 0  step 1,200  0:00:12  loss 0.0008326  accuracy 12  val_loss 2.5 val_accuracy 0.125",
        "epoch 1  step 2,400  0:00:24  loss 0.0004165  accuracy 24  val_loss 3.5 val_accuracy 0.125",
    ]
    assert " ".join("".join(screen[4:]).replace("━", "").split()) == (
        "step 2,400/2,400 epoch 1 400 examples/s 0:00:24 loss 0.0004165 accuracy 24 val_loss 3.5 val_accuracy 0.125 "
        "input stall 0 %"
    )


def test_live_display_restores_the_terminal_if_a_callback_raises():
    stream, stdout = io.StringIO(), sys.stdout

    def fails(event):
        if event.step == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(ONE, [callbacks.Progress("live", stream=stream), fails], state=0, call=idle)
    assert stream.getvalue().count(SHOW) == 1
    assert sys.stdout is stdout


def test_live_display_that_is_started_again_closes_the_first():
    stream = io.StringIO()
    display = callbacks.Progress("live", stream=stream)
    events = []
    _run(events.append)
    display(events[0])  # from a loop that does not call `close`
    _run(display)
    assert stream.getvalue().count(HIDE) == stream.getvalue().count(SHOW) == 2


def test_names_are_not_parsed_as_markup():
    stream = io.StringIO()
    _run(callbacks.Progress("live", stream=stream), logs=lambda step: {"[red]x": 1.0}, total=None)
    assert "[red]x 1" in stream.getvalue()


def test_off_neither_shows_nor_reads(capfd):
    run = _run(callbacks.Progress("off"))
    assert (run.reads, capfd.readouterr()) == (1, ("", ""))


class _Terminal(io.StringIO):
    def isatty(self):
        return True


def test_auto_detects_the_environment(monkeypatch):
    monkeypatch.delitem(sys.modules, "IPython", raising=False)
    assert (detect_kind(io.StringIO()), detect_kind(_Terminal())) == ("lines", "live")
    for shell, kind in [
        (types.SimpleNamespace(kernel=1), "notebook"),
        (types.SimpleNamespace(), "live"),
        (None, "live"),
    ]:
        ipython = types.SimpleNamespace(get_ipython=lambda shell=shell: shell)
        monkeypatch.setitem(sys.modules, "IPython", ipython)
        assert detect_kind(_Terminal()) == kind


def test_auto_is_resolved_at_the_start_of_training(capsys):
    _run(callbacks.Progress())  # it writes to the current `sys.stdout`, not that of its creation
    assert re.fullmatch(r"epoch 0  step 10 .*\nstep 10/10 .*\n", capsys.readouterr().out)


CELL = """
import os
os.environ["JAX_PLATFORMS"] = "cpu"
from jdist import callbacks
from small_loop import place, train
run = train(place("one_device"), [callbacks.Progress()], epochs=1, steps=30, state=0,
            call=lambda state, number: (state, 0.0), logs=lambda step: {"loss": 0.5})
"""


@pytest.mark.slow
def test_notebook_shows_one_output_that_is_updated(tmp_path, monkeypatch):
    nbclient = pytest.importorskip("nbclient", reason="nbclient, which runs notebooks, is not installed.")
    pytest.importorskip("ipykernel", reason="ipykernel, which notebooks run in, is not installed.")
    import nbformat

    monkeypatch.setenv("PYTHONPATH", ":".join(sys.path))
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(CELL)])
    notebook.metadata["kernelspec"] = {"name": "python3", "display_name": "", "language": "python"}
    nbclient.NotebookClient(notebook, timeout=120).execute()
    (output,) = [out for out in notebook.cells[0].outputs if out.output_type == "display_data"]
    assert "━━━━━━━━━━━━" in output["data"]["text/html"] and "step 30/30" in output["data"]["text/html"]
    assert [out for out in notebook.cells[0].outputs if out.output_type == "stream"] == []


def test_notebook_display_is_displayed_once_and_updated(monkeypatch):
    pytest.importorskip("IPython", reason="IPython is not installed.")
    from IPython.core.interactiveshell import InteractiveShell
    from IPython.utils.capture import capture_output

    InteractiveShell.instance()
    try:
        with capture_output() as captured:
            _run(callbacks.Progress("notebook"), seconds=1.0, logs=lambda step: {"<b>": 0.5})
    finally:
        InteractiveShell.clear_instance()
    page = captured.outputs[-1].data["text/html"]
    assert re.search("epoch 0  step 10  0:00:10  &lt;b&gt; 0.5\n.*━━━.* step 10/10  epoch 0 .*  &lt;b&gt; 0.5", page)
    assert len(captured.outputs) == 13  # the first is empty; the others update it


def test_wrong_options_of_the_display_raise(monkeypatch):
    with pytest.raises(ValueError, match="^The kind of progress display must be one of 'auto', .*'off', got 'loud'"):
        callbacks.Progress("loud")
    with pytest.raises(ValueError, match="`interval_seconds` must be a positive number of seconds, got 0"):
        callbacks.Progress(interval_seconds=0)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    message = 'A "notebook" display needs IPython, which is not installed. Use "lines" or "auto"'
    with pytest.raises(ModuleNotFoundError, match=message):
        callbacks.Progress("notebook")


@pytest.mark.parametrize("name", ["mirrored_2", "central_2"])
def test_display_of_real_steps_shows_their_loss(name):
    strategy, stream = place(name), io.StringIO()
    state, call = regression(strategy)
    train(strategy, [callbacks.Progress("lines", stream=stream)], state=state, call=call)
    assert re.search(r"loss \d+\.\d+", stream.getvalue())


@pytest.mark.parametrize("kind", ["lines", "live"])
def test_display_begins_before_the_initial_state_and_is_closed_after_an_error_in_it(kind):
    stream, seen = io.StringIO(), []

    def init(key, x):
        seen.append(stream.getvalue())
        raise ValueError("no parameters")

    trainer = jdist.Trainer((init, lambda w, x: x), optax.sgd(0.1), optax.squared_error, strategy=ONE)
    with pytest.raises(ValueError, match="no parameters"):
        trainer.fit((X, X), batch_size=4, callbacks=[callbacks.Progress(kind, stream=stream)])
    assert "waiting for the first batch and the initial state" in seen[0]
    assert stream.getvalue().count(HIDE) == stream.getvalue().count(SHOW) == (kind == "live")
