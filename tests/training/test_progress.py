"""What is shown while training goes on: how often, what of it, and that the terminal is left as it was."""

import io
import math
import re
import sys
import types

import pytest

from jdist import callbacks
from jdist._src.training.progress import displays
from jdist._src.training.progress.display_callback import detect_kind

from small_loop import place, regression, train

ONE = place("one_device")
HIDE, SHOW = "\x1b[?25l", "\x1b[?25h"  # the cursor


def _idle(state, number):
    return state, 0.0


def _run(shown, **options):
    options = dict(epochs=1, steps=10, state=0, call=_idle, logs=lambda step: {"loss": 1 / (step + 1)}) | options
    return train(ONE, [shown], **options)


def _lines(every=None, **options):
    stream = io.StringIO()
    run = _run(callbacks.Progress("lines", every=every, stream=stream), **options)
    return stream.getvalue().splitlines(), run


def test_lines_say_all_of_it():
    lines, _ = _lines(every=4, seconds=1.0, stalled_fraction=0.25)
    assert lines == [
        "step 4/10  epoch 0  4 examples/s  0:00:06 left  loss 0.2  input stall 25 %",
        "step 8/10  epoch 0  4 examples/s  0:00:02 left  loss 0.1111  input stall 25 %",
        "step 10/10  epoch 0  4 examples/s  0:00:10  loss 0.09091  input stall 25 %",
    ]


def test_line_at_the_end_of_training_that_stops_says_how_long_it_took():
    stream = io.StringIO()
    shown = [callbacks.TimeLimit(4), callbacks.Progress("lines", every=60, stream=stream)]
    train(ONE, shown, epochs=1, steps=10, state=0, call=_idle, seconds=1.0, logs=lambda step: {"loss": 0.5})
    assert stream.getvalue() == "step 4/10  epoch 0  4 examples/s  0:00:04  loss 0.5  input stall 0 %\n"


def test_line_is_not_said_twice_at_the_end():
    lines, _ = _lines(every=5, seconds=1.0)
    assert [line.split()[1] for line in lines] == ["5/10", "10/10"]


def test_lines_of_unknown_length_say_how_long_it_has_run():
    lines, _ = _lines(every=5, seconds=1.0, total=None)
    assert lines[0] == "step 5  epoch 0  4 examples/s  0:00:05  loss 0.1667  input stall 0 %"


def test_validation_is_shown_until_there_is_another():
    found = lambda epoch: {"loss": 7.0 + epoch}
    lines, _ = _lines(every=1, seconds=1.0, epochs=2, steps=2, validation=found)
    assert ["val_loss" in line for line in lines] == [False, False, True, True, True]
    assert "val_loss 7 " in lines[3] and "val_loss 8 " in lines[4]


def test_rate_is_that_of_the_last_seconds():
    times = [0.0, 100.0, *(100.0 + 0.25 * number for number in range(1, 101))]  # the first step is compiled
    stream, events = io.StringIO(), []
    _run(events.append, steps=101)
    shown = callbacks.Progress("lines", every=1, stream=stream)
    for event in events:
        shown(event.__class__(**{**vars(event), "seconds": times[event.step]}))
    assert " 16 examples/s" in stream.getvalue().splitlines()[-1]


@pytest.mark.parametrize("kind, every", [("live", 0.25), ("lines", 10.0)])
@pytest.mark.parametrize("seconds", [0.001, 0.1, 1.0])
def test_metrics_are_read_as_often_as_they_are_shown_and_no_oftener(kind, every, seconds):
    run = _run(callbacks.Progress(kind, stream=io.StringIO()), steps=300, seconds=seconds)
    shown_at_most = 300 * seconds / every + 2
    assert run.reads - 1 <= shown_at_most  # one is for the row of the history
    assert run.reads - 1 >= min(300, math.floor(shown_at_most / 2))


def test_metrics_of_several_numbers_are_not_shown():
    lines, _ = _lines(logs=lambda step: {"loss": math.nan, "table": [1.0, 2.0]})
    assert "loss nan" in lines[0] and "table" not in lines[0]


def test_live_line_is_one_line_and_leaves_the_cursor(monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    stream = io.StringIO()
    _run(callbacks.Progress("live", stream=stream))
    text = stream.getvalue()
    assert text.count(HIDE) == text.count(SHOW) == 1 and text.index(HIDE) < text.index(SHOW)
    assert text.count("\n") == 2  # that of the epoch; all readings but the last are written over
    assert "waiting for the first step" in text and "step 10/10" in text


def _screen(text, width):
    """The lines that a terminal shows after `text`, which moves up and erases lines."""
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


def test_live_line_of_80_columns_shows_metrics_and_validation_and_leaves_a_line_per_epoch(monkeypatch):
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
    shown = _screen(stream.getvalue(), 80)
    assert shown[:4] == [
        "epoch 0  step 1,200  0:00:12  loss 0.0008326  accuracy 12  val_loss 2.5",
        "val_accuracy 0.125",
        "epoch 1  step 2,400  0:00:24  loss 0.0004165  accuracy 24  val_loss 3.5",
        "val_accuracy 0.125",
    ]
    assert shown[4].endswith("step 2,400/2,400  epoch 1  400 examples/s  0:00:24  loss 0.0004165")
    assert shown[5] == "accuracy 24  val_loss 3.5  val_accuracy 0.125  input stall 0 %"


def test_live_line_leaves_the_terminal_where_a_callback_ends_training():
    stream, out = io.StringIO(), sys.stdout

    def fails(event):
        if event.step == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(ONE, [callbacks.Progress("live", stream=stream), fails], state=0, call=_idle)
    assert stream.getvalue().count(SHOW) == 1
    assert sys.stdout is out


def test_live_line_begun_anew_leaves_no_other_behind():
    stream = io.StringIO()
    shown = callbacks.Progress("live", stream=stream)
    events = []
    _run(events.append)
    shown(events[0])  # of a loop that did not close it
    _run(shown)
    assert stream.getvalue().count(HIDE) == stream.getvalue().count(SHOW) == 2


def test_names_are_text_and_no_markup():
    stream = io.StringIO()
    _run(callbacks.Progress("live", stream=stream), logs=lambda step: {"[red]x": 1.0}, total=None)
    assert "[red]x 1" in stream.getvalue()


def test_off_shows_nothing_and_reads_nothing(capfd):
    run = _run(callbacks.Progress("off"))
    assert (run.reads, capfd.readouterr()) == (1, ("", ""))


class _Terminal(io.StringIO):
    def isatty(self):
        return True


def test_auto_shows_what_suits_the_place(monkeypatch):
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


def test_auto_is_chosen_when_training_begins(capsys):
    _run(callbacks.Progress())  # made before or after, it writes to what `sys.stdout` is now
    assert re.fullmatch(r"step 10/10 .*\n", capsys.readouterr().out)


def test_page_is_a_bar_and_text():
    reading = displays.Reading(3, 10, 0, 1.0, None, None, 0.0, {"<b>": 1.0})
    page = displays.page(reading)
    assert '<progress value="3" max="10"></progress> step 3/10' in page and "&lt;b&gt; 1" in page
    assert "epoch 0  loss &lt;<br>" in displays.page(reading, ["epoch 0  loss <"])
    assert "<progress" not in displays.page(displays.Reading(3, None, 0, 1.0, None, None, 0.0, {}))


CELL = """
import os
os.environ["JAX_PLATFORMS"] = "cpu"
from jdist import callbacks
from small_loop import place, train
run = train(place("one_device"), [callbacks.Progress()], epochs=1, steps=30, state=0,
            call=lambda state, number: (state, 0.0), logs=lambda step: {"loss": 0.5})
"""


@pytest.mark.slow
def test_notebook_shows_one_output_that_is_written_anew(tmp_path, monkeypatch):
    nbclient = pytest.importorskip("nbclient", reason="nbclient, which runs notebooks, is not installed.")
    pytest.importorskip("ipykernel", reason="ipykernel, which notebooks run in, is not installed.")
    import nbformat

    monkeypatch.setenv("PYTHONPATH", ":".join(sys.path))
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(CELL)])
    notebook.metadata["kernelspec"] = {"name": "python3", "display_name": "", "language": "python"}
    nbclient.NotebookClient(notebook, timeout=120).execute()
    (output,) = [out for out in notebook.cells[0].outputs if out.output_type == "display_data"]
    assert '<progress value="30" max="30"></progress> step 30/30' in output["data"]["text/html"]
    assert [out for out in notebook.cells[0].outputs if out.output_type == "stream"] == []


def test_notebook_form_is_displayed_once_and_updated(monkeypatch):
    pytest.importorskip("IPython", reason="IPython is not installed.")
    from IPython.core.interactiveshell import InteractiveShell
    from IPython.utils.capture import capture_output

    InteractiveShell.instance()
    try:
        with capture_output() as captured:
            _run(callbacks.Progress("notebook"), seconds=1.0)
    finally:
        InteractiveShell.clear_instance()
    assert "step 10/10" in captured.outputs[-1].data["text/html"]
    assert len(captured.outputs) == 13  # the first is empty; those after it take its place


def test_notebook_without_ipython_is_refused(monkeypatch):
    from jdist._src.callbacks import progress

    assert progress is callbacks.progress
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(
        ModuleNotFoundError, match='There is no IPython here, so no notebook shows this: take "lines", or "auto"'
    ):
        callbacks.Progress("notebook")


def test_progress_refuses_what_makes_no_sense():
    with pytest.raises(ValueError, match="^`kind` of progress is one of 'auto', .*'off', got 'loud'"):
        callbacks.Progress("loud")
    with pytest.raises(ValueError, match="`every` is a positive number of seconds, got 0"):
        callbacks.Progress(every=0)


@pytest.mark.parametrize("name", ["mirrored_2", "central_2"])
def test_progress_of_real_steps_shows_their_loss(name):
    strategy, stream = place(name), io.StringIO()
    state, call = regression(strategy)
    train(strategy, [callbacks.Progress("lines", stream=stream)], state=state, call=call)
    assert re.search(r"loss \d+\.\d+", stream.getvalue())
