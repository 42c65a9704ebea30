"""Log files: their contents, and that a resumed run neither omits nor repeats a row."""

import csv
import importlib
import json
import math

import hypothesis
import hypothesis.strategies as st
import jax
import numpy as np
import optax
import pytest

from jdist import callbacks
from jdist._src.callbacks.rows import EVENT_COLUMNS
from jdist._src.training.events import as_callbacks

from laws import each_row
from small_loop import State, idle, place, regression, train

few = hypothesis.settings(max_examples=15, deadline=None, derandomize=True, database=None)
ONE = place("one_device")
KINDS = {"csv": callbacks.CSVLog, "json": callbacks.JSONLog}
every_kind = pytest.mark.parametrize("kind", KINDS)


def _rows(path):
    text = path.read_text()
    if text.startswith("{"):
        return [json.loads(line) for line in text.splitlines()]
    return list(csv.DictReader(text.splitlines()))


def _run(log, **options):
    options = dict(state=0, call=idle, logs=lambda step: {"loss": 1 / (step + 1)}) | options
    return train(ONE, [log], **options)


def _moments(path):
    return [(row["moment"], int(row["step"])) for row in _rows(path)]


@every_kind
def test_log_has_one_row_per_epoch(kind, tmp_path):
    path = tmp_path / "new" / "log"
    _run(KINDS[kind](path), validation=lambda epoch: {"loss": 2.0 + epoch})
    assert _moments(path) == [("epoch", 3), ("epoch", 6)]
    last = {name: float(value) for name, value in _rows(path)[1].items() if name != "moment"}
    facts = {"epoch": 1, "step": 6, "seconds": pytest.approx(0.6), "examples": 24, "stalled_fraction": 0}
    assert last == {**facts, "loss": 1 / 7, "val_loss": 3.0}


@every_kind
@few
@hypothesis.given(every=st.integers(1, 5), steps_per_call=st.integers(1, 4), steps=st.integers(1, 6))
def test_log_has_a_row_every_given_number_of_steps(kind, tmp_path_factory, every, steps_per_call, steps):
    path = tmp_path_factory.mktemp("logs") / "log"
    _run(KINDS[kind](path, every=every), steps=steps, steps_per_call=steps_per_call)
    first_steps = range(0, steps, steps_per_call)
    ends = [min(first + steps_per_call, steps) + epoch * steps for epoch in range(2) for first in first_steps]
    due = [end for before, end in zip([0, *ends], ends, strict=False) if end // every > before // every]
    expected = [("step", end) for end in due] + [("epoch", steps), ("epoch", 2 * steps)]
    assert _moments(path) == sorted(expected, key=lambda row: (row[1], row[0] == "epoch"))


@every_kind
@pytest.mark.parametrize("killed", range(1, 7))
def test_resumed_run_continues_the_log(kind, killed, tmp_path):
    uninterrupted, path = tmp_path / "uninterrupted", tmp_path / "log"
    options = dict(validation=lambda epoch: {"loss": 1.0}, seconds=0.0)  # because a resumed run measures from 0
    _run(KINDS[kind](uninterrupted, every=2), **options)
    _run(KINDS[kind](path, every=2), **options)
    with path.open("a") as file:
        file.write(path.read_text().splitlines()[-1][:9])  # an incomplete row
    _run(KINDS[kind](path, every=2), start=killed, **options)
    without_examples = lambda path: [{**row, "examples": 0} for row in _rows(path)]
    assert without_examples(path) == without_examples(uninterrupted)
    assert {entry.name for entry in tmp_path.iterdir()} == {"uninterrupted", "log"}


@every_kind
def test_run_from_the_beginning_renames_an_existing_log(kind, tmp_path):
    path = tmp_path / "log"
    texts = []
    for epochs in (1, 2, 3):
        _run(KINDS[kind](path), epochs=epochs)
        texts.append(path.read_text())
    assert [(tmp_path / name).read_text() for name in ("log.1", "log.2", "log")] == texts


@every_kind
def test_training_that_stops_within_an_epoch_writes_a_row_at_the_end(kind, tmp_path):
    path = tmp_path / "log"
    train(ONE, [callbacks.TimeLimit(0.4), KINDS[kind](path)], state=0, call=idle)
    assert _moments(path) == [("epoch", 3), ("end", 4)]


@every_kind
def test_row_is_in_the_file_before_the_next_step(kind, tmp_path):
    path, counts = tmp_path / "log", []
    count = lambda event: counts.append(len(path.read_text().splitlines()))
    train(ONE, [KINDS[kind](path, every=1), count], steps=2, epochs=1, state=0, call=idle)
    assert [number - counts[0] for number in counts] == [0, 1, 2, 3, 3]


def test_column_that_appears_later_is_empty_before(tmp_path):
    path = tmp_path / "log.csv"
    _run(callbacks.CSVLog(path, every=3), validation=lambda epoch: {"loss": 5.0} if epoch else None)
    assert [row["val_loss"] for row in _rows(path)] == ["", "", "", "5.0"]
    assert path.read_text().splitlines()[0] == ",".join([*EVENT_COLUMNS, "loss", "val_loss"])
    _run(callbacks.CSVLog(path), start=6, epochs=3, validation=lambda epoch: {"late": 1.0})
    assert [row["val_late"] for row in _rows(path)] == ["", "", "", "", "1.0"]


@every_kind
def test_non_finite_numbers_are_read_back(kind, tmp_path):
    path = tmp_path / "log"
    numbers = {"a": math.nan, "b": math.inf, "c": np.float32(-math.inf), "d": np.array(1.5), "e": np.int32(3)}
    _run(KINDS[kind](path), epochs=1, logs=lambda step: numbers)
    (row,) = _rows(path)
    np.testing.assert_equal([float(row[name]) for name in numbers], [math.nan, math.inf, -math.inf, 1.5, 3])


def test_json_contains_array_metrics_and_only_standard_json(tmp_path):
    path = tmp_path / "log"
    _run(callbacks.JSONLog(path), epochs=1, logs=lambda step: {"table": np.float32([[1, math.nan]])})
    reject = lambda constant: pytest.fail(f"{constant} is not JSON")
    assert json.loads(path.read_text(), parse_constant=reject)["table"] == [[1.0, "nan"]]


@every_kind
@each_row("path", ["file/log", "", "bytes"], ["under_a_file", "a_directory", "not_text"])
def test_unwritable_log_raises_before_the_first_step(kind, path, tmp_path):
    (tmp_path / "file").write_text("")
    (tmp_path / "bytes").write_bytes(b"\xff\xfe\xff")
    steps, message = [], r"cannot be written: .*Pass another path|is not a log that .*Pass another path"
    with pytest.raises(ValueError, match=message):
        train(ONE, [KINDS[kind](tmp_path / path), steps.append], state=0, call=idle)
    assert steps == []


def test_callbacks_with_one_destination_raise(tmp_path):
    as_callbacks([callbacks.CSVLog(tmp_path / "a"), callbacks.JSONLog(tmp_path / "b"), print])
    pair = [callbacks.CSVLog(tmp_path / "a"), callbacks.JSONLog(tmp_path / "b" / ".." / "a", every=2)]
    message = r"Two callbacks, CSVLog and JSONLog, write to '.*a'\. Pass a different path to each"
    with pytest.raises(ValueError, match=message):
        as_callbacks(pair)


@every_kind
@each_row("text", ["a,b\n1,2\n", '{"a": 1}\n', "hello\n", "[1]\n"])
def test_file_that_is_not_a_log_is_not_changed(kind, text, tmp_path):
    path = tmp_path / "mine.csv"
    path.write_text(text)
    message = r"mine\.csv' exists, and is not a log that (CSV|JSON)Log wrote\. Pass another path"
    with pytest.raises(ValueError, match=message):
        _run(KINDS[kind](path))
    assert path.read_text() == text


@every_kind
def test_metric_with_the_name_of_a_column_raises(kind, tmp_path):
    with pytest.raises(ValueError, match=r"Two columns have the name 'step'\. Rename one of them"):
        _run(KINDS[kind](tmp_path / "log"), logs=lambda step: {"step": 0.5})
    log_with_two_losses = KINDS[kind](tmp_path / "log", also=[lambda event: {"loss": 0.0}])
    with pytest.raises(ValueError, match="Two columns have the name 'loss'"):
        _run(log_with_two_losses)


RATE = callbacks.learning_rate()
WRONG_OPTIONS = [
    (dict(path=3), TypeError, "`path` must be a path, got int"),
    (dict(path=""), ValueError, "`path` must not be empty"),
    (dict(path="x", every=0), ValueError, "`every` must be an integer >= 1, got 0"),
    (dict(path="x", also=RATE), TypeError, "`also` must be a list of functions of an event, got f"),
    (dict(path="x", also=[1]), TypeError, "`also` must be a function of an event, got int"),
]


@every_kind
@each_row("options, error, message", WRONG_OPTIONS)
def test_wrong_options_of_a_log_raise(kind, options, error, message):
    with pytest.raises(error, match=message):
        KINDS[kind](**options)


def test_processes_other_than_process_0_do_not_write(tmp_path, monkeypatch):
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    writers = [callbacks.CSVLog(tmp_path / "a"), callbacks.JSONLog(tmp_path / "b"), callbacks.Progress("lines")]
    if importlib.util.find_spec("tensorboardX"):
        writers.append(callbacks.TensorBoard(tmp_path / "d"))
    run = train(ONE, writers, state=0, call=idle)
    assert list(tmp_path.iterdir()) == []
    assert run.reads == 2  # for the rows of the history


SCHEDULE = optax.linear_schedule(1.0, 0.0, 10)
OPTIMIZERS = {
    "schedule": (optax.adam(SCHEDULE), SCHEDULE, 0.6),
    "step": (optax.adam(0.1), SCHEDULE, 0.6),  # the optimizer does not count: the number of steps is used
    "injected": (optax.inject_hyperparams(optax.sgd)(learning_rate=SCHEDULE), None, 0.6),
    "constant": (optax.chain(optax.clip(1.0), optax.inject_hyperparams(optax.sgd)(learning_rate=0.25)), None, 0.25),
    "accumulated": (optax.MultiSteps(optax.sgd(SCHEDULE), 2), SCHEDULE, 0.9),  # the second update of 5 steps
}


@pytest.mark.parametrize("name", ["mirrored_2", "central_2"])
@pytest.mark.parametrize("optimizer, schedule, rate", OPTIMIZERS.values(), ids=OPTIMIZERS)
@pytest.mark.filterwarnings("ignore:The gradients of the last step were accumulated")
def test_learning_rate_is_that_of_the_last_update(name, optimizer, schedule, rate, tmp_path):
    strategy = place(name)
    state, call = regression(strategy, optimizer)
    log = callbacks.JSONLog(tmp_path / "log", also=[callbacks.learning_rate(schedule)])
    train(strategy, [log], epochs=1, steps=5, state=state, call=call)
    assert _rows(tmp_path / "log")[0]["learning_rate"] == pytest.approx(
        rate, rel=3e-3
    )  # the oldest optax stores a bfloat16


def test_learning_rate_that_is_not_in_the_state_and_schedule_that_is_not_a_function_raise(tmp_path):
    state, call = regression(ONE)
    log = callbacks.CSVLog(tmp_path / "log", also=[callbacks.learning_rate()])
    message = r"The state contains no learning rate, or several\. Pass the schedule, `learning"
    with pytest.raises(ValueError, match=message):
        train(ONE, [log], state=state, call=call)
    assert callbacks.learning_rate_of(state) is None
    with pytest.raises(TypeError, match="`schedule` must be a function of the number of updates, got float"):
        callbacks.learning_rate(0.1)


def test_learning_rate_is_none_if_parts_have_different_rates():
    sgd = optax.inject_hyperparams(optax.sgd)
    states = [sgd(learning_rate=rate).init({"w": np.zeros(2, np.float32)}) for rate in (0.5, 0.25, 0.25)]
    assert callbacks.learning_rate_of(State(0, None, states)) is None
    assert callbacks.learning_rate_of(State(0, None, states[1:])) == 0.25
