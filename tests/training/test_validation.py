"""Validation by steps and of several data sets: rows, events, callbacks, resume."""

import io
import itertools
import json

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jdist
from jdist import callbacks
from jdist._src.training.report.charts import chart_panels

from laws import each_row
from small_fits import assert_bitwise_equal

RNG = np.random.default_rng(0)
INPUTS = RNG.normal(size=(120, 4)).astype(np.float32)
TRUE = np.float32([1, -2, 3, 0.5])
DATA = (INPUTS[:80], INPUTS[:80] @ TRUE)  # 8 steps per epoch
EASY, HARD = ((INPUTS[a:b], INPUTS[a:b] @ TRUE) for a, b in ((80, 95), (95, 120)))
LINE = (lambda key, x: jnp.zeros(4), lambda w, x: x @ w)
METRICS = {"error": lambda outputs, targets: abs(outputs - targets)}


def trainer(strategy, optimizer=None, **options):
    return jdist.Trainer(
        LINE, optimizer or optax.adam(0.1), optax.squared_error, metrics=METRICS, strategy=strategy, **options
    )


def fit(strategy, data=DATA, of=None, **options):
    options = {"batch_size": 10, "validation_data": EASY, "progress": "off", **options}
    return (of or trainer(strategy)).fit(data, **options)


def stream(stop=None):
    """An iterable of examples without epochs."""
    return ((INPUTS[i % 80], DATA[1][i % 80]) for i in itertools.islice(itertools.count(), stop))


def rows_of(result, *columns):
    return [tuple(row.get(column) for column in columns) for row in result.history.rows]


def test_stream_without_epochs_has_a_row_per_validation(strategy):
    of_strategy = trainer(strategy)
    result = fit(strategy, stream(1000), of_strategy, batch_size=24, steps=20, validate_every=8)
    assert [row["step"] for row in result.history.rows] == [8, 16, 20]
    shorter = of_strategy.fit(stream(1000), batch_size=24, steps=8, progress="off")
    expected = of_strategy.evaluate(shorter.state, EASY, batch_size=24)
    assert (result.history["val_loss"][0], result.history["val_error"][0]) == (expected["loss"], expected["error"])
    last = of_strategy.evaluate(result.state, EASY, batch_size=24)
    assert result.history["val_loss"][-1] == last["loss"]


def test_metrics_of_a_row_are_those_since_the_previous_row(two):
    result = fit(two, stream(1000), steps=20, validate_every=8)
    losses = result.history.losses
    for row, (first, last) in zip(result.history.rows, [(1, 8), (9, 16), (17, 20)], strict=True):
        np.testing.assert_allclose(row["loss"], np.mean([losses[step] for step in range(first, last + 1)]), rtol=1e-6)


def test_data_that_end_are_validated_after_their_last_step(two):
    result = fit(two, stream(90), validate_every=4)
    assert rows_of(result, "step", "epoch") == [(4, 0), (8, 0), (9, 0)]
    assert all("val_loss" in row for row in result.history.rows)


@pytest.mark.parametrize(
    "steps_per_call, expected",
    [
        (1, ["validation 5", "epoch 8", "validation 10", "validation 15", "epoch 16"]),
        (3, ["validation 6", "epoch 8", "validation 11", "validation 15", "epoch 16"]),
    ],
)
def test_each_row_has_one_event(two, steps_per_call, expected):
    events, validated = [], []

    def record(event):
        if event.moment in ("validation", "epoch"):
            events.append(f"{event.moment} {event.step}")
            row = event.history.rows[-1]
            logs = {name: row[name] for name in row if name in event.metric_names}
            assert event.logs == logs and set(event.metrics) == {"loss", "error"}
            if event.validation:
                validated.append(event.step)
        if event.moment == "step":
            validates.append((event.step, event.validates))

    validates = []
    fit(two, epochs=2, validate_every=5, steps_per_call=steps_per_call, callbacks=[record])
    assert events == expected
    assert validated == [int(event.split()[1]) for event in expected if event != "epoch 8"]
    assert [step for step, is_due in validates if is_due] == validated


def test_several_sets_have_their_names_in_the_metrics(two):
    of_two = trainer(two)
    result = fit(two, of=of_two, epochs=2, validation_data={"easy": EASY, "hard": HARD})
    assert [name for name in result.history.columns if "val" in name] == [
        "val_easy_loss", "val_easy_error", "val_hard_loss", "val_hard_error"
    ]  # fmt: skip
    for name, data in (("easy", EASY), ("hard", HARD)):
        expected = of_two.evaluate(result.state, data, batch_size=10)
        assert result.history[f"val_{name}_loss"][-1] == expected["loss"]
        assert result.history[f"val_{name}_error"][-1] == expected["error"]


def test_distributed_sets_and_a_mapping_of_sources_are_accepted(two):
    hard = two.distribute_dataset(HARD, 6, remainder="pad")
    direct = fit(two, validation_data={"hard": HARD, "easy": EASY})
    mixed = two.distribute_dataset(EASY, 10, remainder="pad")
    result = trainer(two).fit(
        two.distribute_dataset(DATA, 10, shuffle=True, seed=0, remainder="pad"),
        validation_data={"hard": hard, "easy": mixed}, progress="off",
    )  # fmt: skip
    np.testing.assert_allclose(result.history["val_hard_loss"], direct.history["val_hard_loss"], rtol=1e-5)
    assert result.history["val_easy_loss"] == direct.history["val_easy_loss"]


@pytest.mark.parametrize(
    "wrap", [lambda pair: {"x": pair[0], "y": pair[1]}, lambda pair: {"x": {"a": pair[0]}, "y": {"b": pair[1]}}]
)
def test_mapping_that_is_one_source_is_one_set(two, wrap):
    inner = lambda node: node if not isinstance(node, dict) else next(iter(node.values()))
    of_two = jdist.Trainer(
        (lambda key, batch: jnp.zeros(4), lambda w, batch: inner(batch["x"]) @ w), optax.sgd(0.1),
        lambda outputs, batch: (outputs - inner(batch["y"])) ** 2, strategy=two,
    )  # fmt: skip
    result = of_two.fit(wrap(DATA), batch_size=10, validation_data=wrap(EASY), progress="off")
    assert "val_loss" in result.history


@pytest.mark.parametrize("cut, every", [(7, 3), (10, 5), (13, 13)])
def test_resumed_run_is_bitwise_equal(two, tmp_path, cut, every):
    """The checkpoint is between two validations, at one, and at the step at which the process ends."""

    def run(path, stop_at=None):
        stop = lambda event: (
            callbacks.CallbackResult("Killed.") if event.moment == "step" and event.step == stop_at else None
        )
        with jdist.Checkpointer(path, every=every, keep=None) as checkpointer:
            save = callbacks.Checkpoint(checkpointer)
            save_until_killed = lambda event: save(event) if stop_at is None or event.moment != "end" else None
            stopping = callbacks.EarlyStopping("val_hard_loss", patience=100)
            return fit(
                two, of=of_two, epochs=3, validate_every=5, validation_data={"easy": EASY, "hard": HARD},
                callbacks=[stopping, save_until_killed, stop], resume=checkpointer,
            ), stopping  # fmt: skip

    of_two = trainer(two)
    (expected, best), _ = run(tmp_path / "straight"), run(tmp_path / "cut", cut)
    with jdist.Checkpointer(tmp_path / "cut") as checkpointer:
        assert checkpointer.latest == cut // every * every
    resumed, resumed_best = run(tmp_path / "cut")
    assert_bitwise_equal(resumed.state, expected.state)
    assert resumed.history.losses == expected.history.losses
    timed = {"seconds", "examples_per_second", "stalled_fraction"}
    rows = lambda result: [{k: v for k, v in row.items() if k not in timed} for row in result.history.rows]
    assert rows(resumed) == rows(expected)
    assert resumed_best.best == best.best


def test_early_stopping_judges_by_validations(two):
    stopping = callbacks.EarlyStopping("val_hard_loss", patience=2)
    of_two = trainer(two, optax.sgd(-0.01))  # every step makes it worse
    data = {"easy": EASY, "hard": HARD}
    result = fit(two, stream(), of_two, steps=40, validate_every=3, validation_data=data, callbacks=[stopping])
    assert result.stop_reason.startswith("val_hard_loss was best, ")
    assert result.stop_reason.endswith("after step 3, and did not improve for 2 validations.")
    assert (int(result.state.step), result.steps) == (3, 9)
    assert stopping.best == result.history["val_hard_loss"][0]


def test_early_stopping_compares_a_training_metric_in_each_row_and_waits_for_the_first_validation(two):
    of_two = trainer(two, optax.sgd(-0.01))
    stopping = callbacks.EarlyStopping("loss", restore_best=False)
    assert fit(two, stream(), of_two, steps=40, validate_every=3, callbacks=[stopping]).steps == 6
    result = fit(two, epochs=3, validate_every=20, callbacks=[callbacks.EarlyStopping()])
    assert rows_of(result, "step", "val_loss")[0] == (8, None)
    assert result.steps == 24


def test_logs_and_displays_and_checkpoints_contain_each_validation(two, tmp_path, monkeypatch):
    tensorboardX = pytest.importorskip("tensorboardX", reason="tensorboardX is optional and not installed.")
    scalars = []
    add_scalar = lambda self, name, value, step: scalars.append((name, step))
    monkeypatch.setattr(tensorboardX.SummaryWriter, "add_scalar", add_scalar)
    log = callbacks.JSONLog(tmp_path / "log.jsonl", every=4)
    streams = {"lines": io.StringIO(), "live": io.StringIO()}
    intervals = {"lines": 1e-9, "live": 100}
    displays = [
        callbacks.Progress(kind, interval_seconds=intervals[kind], stream=stream) for kind, stream in streams.items()
    ]
    with jdist.Checkpointer(tmp_path / "run", every=5, keep=None) as checkpointer:
        writers = [log, callbacks.TensorBoard(tmp_path / "board"), callbacks.Checkpoint(checkpointer), *displays]
        fit(two, epochs=1, validate_every=5, callbacks=writers)
        extra = checkpointer.restore(two, step=5).extra
    rows = [json.loads(line) for line in log.path.read_text().splitlines()]
    assert [(row["moment"], row["step"], "val_loss" in row) for row in rows] == [
        ("step", 4, False), ("validation", 5, True), ("step", 8, False), ("epoch", 8, True)
    ]  # fmt: skip
    assert [step for name, step in scalars if name == "val_loss"] == [5, 8]
    assert [row["step"] for row in extra["history"]] == [5] and "val_loss" in extra["history"][0]
    for stream in streams.values():
        lines = [line for line in stream.getvalue().splitlines() if "val_loss" in line]
        assert all(any(f"step {step}" in line for line in lines) for step in (5, 8))


def test_report_plots_and_texts_show_named_sets(two, tmp_path):
    result = fit(two, epochs=1, validate_every=2, validation_data={"easy": EASY, "hard": HARD})
    panels = {panel.title: panel for panel in chart_panels(result.history.rows, result.history.losses)}
    assert [(curve.label, curve.dashed) for curve in panels["Loss"].curves[1:]] == [
        ("training", False), ("easy", True), ("hard", True)
    ]  # fmt: skip
    assert "Easy loss" not in panels
    page = result.report(tmp_path / "run.html").read_text()
    assert "val_easy_loss" in page and "in 4 rows" in page and "<h2>Rows</h2>" in page
    assert "8 steps, 4 rows, " in repr(result)
    assert len(result.history.plot().axes) >= 3


def test_labels_of_named_sets_in_a_panel_of_several_metrics():
    rows = [{"step": 1, "a": 0.5, "val_big_a": 0.25, "b": 0.5, "val_b": 0.5}]
    (panel,) = chart_panels(rows, {})
    assert [(curve.label, curve.dashed) for curve in panel.curves] == [
        ("a", False), ("a big", True), ("b", False), ("b validation", True)
    ]  # fmt: skip


WRONG_OPTIONS = [
    (dict(validate_every=0), ValueError, "`validate_every` must be an integer >= 1, got 0"),
    (dict(validate_every=2.5), TypeError, "`validate_every` must be an integer"),
    (dict(validate_every=5, validation_data=None), ValueError, "`validate_every=5` needs data to evaluate: pass `val"),
    (dict(validation_data={}), ValueError, "`validation_data` is an empty mapping"),
    (dict(validation_data={1: EASY}), TypeError, "sets in `validation_data` must be non-empty strings, got 1"),
    (dict(validation_data={"": EASY}), ValueError, "sets in `validation_data` must be non-empty strings, got ''"),
    (dict(validation_data={"a": EASY, "a_b": HARD}), ValueError, "would be named 'val_a_b_loss'. Rename a set"),
    (dict(validation_data={"easy": lambda step: EASY}), ValueError, r"`validation_data\['easy'\]` is endless"),
]


@each_row("options, error, message", WRONG_OPTIONS, [message for *_, message in WRONG_OPTIONS])
def test_wrong_options_raise_before_the_first_step(two, options, error, message):
    metrics = {"b_loss": lambda outputs, targets: abs(outputs - targets)}
    of_two = jdist.Trainer(LINE, optax.sgd(0.1), optax.squared_error, strategy=two, metrics=metrics)
    with pytest.raises(error, match=message):
        fit(two, of=of_two, **options)


@pytest.mark.parametrize(
    "data, name",
    [
        ((INPUTS[:, :2], INPUTS @ TRUE), "validation_data"),
        ({"easy": EASY, "hard": (HARD[0], HARD[1][:, None])}, "validation_data['hard']"),
        (lambda: ((x[:2], y) for x, y in zip(*EASY, strict=True)), "validation_data"),
        (INPUTS, "validation_data"),
    ],
    ids=["width", "named", "stream", "no_targets"],
)
def test_validation_data_that_do_not_fit_raise_before_the_first_step(two, data, name):
    calls = []
    with pytest.raises((TypeError, ValueError, AssertionError)) as caught:  # optax before 0.2.8: AssertionError
        fit(two, validation_data=data, callbacks=[calls.append])
    assert f"in the evaluation of `{name}`, before the first step" in "".join(caught.value.__notes__)
    assert not calls
