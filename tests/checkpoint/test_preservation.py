"""Which checkpoints are kept: the newest, the best by a metric, and those at multiples of an interval."""

import itertools
import json
import math
import pathlib
import types

import hypothesis
import hypothesis.strategies as st
import numpy as np
import optax
import pytest

import jdist
from jdist import callbacks
from jdist._src.checkpoint.checkpointer import Checkpointer
from jdist._src.checkpoint.preservation import BestMetric, Preservation

from laws import STRATEGIES

STATE = {"w": np.float32([1, 2])}
few = hypothesis.settings(max_examples=60, deadline=None, derandomize=True, database=None)
values = st.one_of(st.none(), st.sampled_from([0.0, 0.5, 1.0, 2.0]))


@pytest.fixture
def one():
    return STRATEGIES["one_device"]()


def _saved(one, path, losses, **options):
    """Saves a checkpoint per loss, at the steps 1, 2, ...; returns the steps on disk."""
    with Checkpointer(path, **options) as checkpointer:
        for step, loss in enumerate(losses, start=1):
            checkpointer.save(step, one.put(STATE), metrics=None if loss is None else {"loss": loss})
        checkpointer.wait()
        return checkpointer.steps()


@few
@hypothesis.given(st.lists(values, min_size=1, max_size=9), st.sampled_from(["min", "max"]), st.integers(1, 3), values)
def test_union_of_the_parts_is_preserved(losses, mode, newest, every):
    every = int(every or 0) + 1
    metrics = {step: {} if loss is None else {"loss": loss} for step, loss in enumerate(losses, start=1)}
    steps = list(metrics)
    rule = Preservation(pathlib.Path(), newest, BestMetric("loss", mode), every, metrics)
    checkpoints = [types.SimpleNamespace(step=step) for step in steps]
    preserved = set(itertools.compress(steps, rule.should_preserve(checkpoints)))
    known = [loss for loss in losses if loss is not None]
    best = [losses.index({"min": min, "max": max}[mode](known)) + 1] if known else []
    assert preserved == {*steps[-newest:], *best, *(step for step in steps if step % every == 0)}


@pytest.mark.slow
def test_best_checkpoint_and_multiples_of_the_interval_are_kept(tmp_path, one):
    losses = [3.0, 1.0, 2.0, None, math.nan, 5.0, 4.0]
    assert _saved(one, tmp_path / "min", losses, keep=1, keep_best=("loss", "min")) == (2, 7)
    assert _saved(one, tmp_path / "max", losses, keep=2, keep_best=("loss", "max")) == (6, 7)
    assert _saved(one, tmp_path / "every", losses, keep=1, keep_every=3) == (3, 6, 7)
    assert _saved(one, tmp_path / "all", losses, keep=1, keep_best=("loss", "min"), keep_every=4) == (2, 4, 7)


def test_best_checkpoint_is_kept_by_the_next_process(tmp_path, one):
    _saved(one, tmp_path, [3.0, 1.0, 2.0], keep=1, keep_best=("loss", "min"))
    with Checkpointer(tmp_path, keep=1, keep_best=("loss", "min")) as checkpointer:
        assert checkpointer.best == 2
        checkpointer.save(4, one.put(STATE), metrics={"loss": np.float32(1.5)})
        checkpointer.save(5, one.put(STATE))
        checkpointer.wait()
        assert (checkpointer.steps(), checkpointer.best) == ((2, 5), 2)
        assert checkpointer.restore(one, step=checkpointer.best).manifest["metrics"] == {"loss": 1.0}


def test_checkpoints_without_metrics_are_never_the_best(tmp_path, one):
    """As are those of earlier versions, whose manifests do not contain metrics."""
    _saved(one, tmp_path, [3.0, 1.0], keep=None)
    path = tmp_path / "2/manifest/manifest.json"
    manifest = json.loads(path.read_text())
    del manifest["metrics"], manifest["fingerprint"]
    path.write_text(json.dumps(manifest | {"format": 1}))
    with Checkpointer(tmp_path, keep_best=("loss", "min")) as checkpointer:
        assert checkpointer.best == 1
    with Checkpointer(tmp_path, keep_best=("accuracy", "max")) as checkpointer:
        assert checkpointer.best is None


def test_damaged_checkpoint_is_not_the_best(tmp_path, one):
    _saved(one, tmp_path, [3.0, 1.0], keep=None)
    (tmp_path / "2/manifest/manifest.json").write_text("{")
    with Checkpointer(tmp_path, keep_best=("loss", "min")) as checkpointer:
        assert checkpointer.best == 1


def test_best_needs_a_metric(tmp_path):
    with pytest.raises(
        ValueError, match=r"`best` needs a metric: `Checkpointer\(path, keep_best=\(\"val_loss\", \"min\""
    ):
        _ = Checkpointer(tmp_path).best


def test_first_save_without_the_metric_is_named_in_the_log(tmp_path, one, caplog):
    with Checkpointer(tmp_path, keep_best=("val_loss", "min")) as checkpointer:
        for step, metrics in enumerate([{}, {"val_loss": 1.0}, {"loss": 1.0}, None]):
            assert checkpointer.save(step, one.put(STATE), metrics=metrics)
    (message,) = [record.getMessage() for record in caplog.records if "keep_best" in record.getMessage()]
    assert "test_preservation.py:" in message and "saved with the metrics 'loss', and `keep_best` compares" in message
    assert (
        "checkpoints by 'val_loss', so it cannot be the best. Write `save(step, state, metrics={\"val_loss\": "
        in message
    )


def test_options_are_in_the_text(tmp_path):
    text = repr(Checkpointer(tmp_path, keep_best=("val_loss", "min"), keep_every=100))
    assert text.endswith("keep=3, every=1, keep_best=('val_loss', 'min'), keep_every=100)")


@pytest.mark.parametrize("options, error, message", [
    ({"keep_every": 0}, ValueError, "`keep_every` must be an integer >= 1, got 0"),
    ({"keep_best": "val_loss"}, TypeError, r"pair of the name of a metric and its mode, such as \(\"val_loss\", \"min\"\)"),
    ({"keep_best": ("val_loss", "least")}, ValueError, "mode in `keep_best` must be 'min' or 'max', got 'least'"),
])  # fmt: skip
def test_invalid_options_are_refused(options, error, message, tmp_path):
    with pytest.raises(error, match=message):
        Checkpointer(tmp_path, **options)


@pytest.mark.parametrize("metrics, message", [
    ([1.0], "`metrics` must be a mapping from names to numbers, got list"),
    ({"loss": np.zeros(2)}, r"`metrics` must be a mapping from names to numbers, got float64\[2\] for 'loss'"),
    ({3: 1.0}, "`metrics` must be a mapping from names to numbers, got 1.0 for 3"),
    ({"loss": "low"}, "`metrics` must be a mapping from names to numbers, got 'low' for 'loss'"),
])  # fmt: skip
def test_metrics_that_are_not_numbers_are_refused(metrics, message, tmp_path, one):
    with Checkpointer(tmp_path) as checkpointer, pytest.raises(TypeError, match=message):
        checkpointer.save(1, one.put(STATE), metrics=metrics)


# ---- in training

X = np.random.default_rng(0).normal(size=(80, 4)).astype(np.float32)
DATA = (X, X @ np.float32([1, -2, 3, 0.5]))


def _fit(strategy, path, rate, **options):
    model = (lambda key, x: np.zeros(4, np.float32), lambda w, x: x @ w)
    trainer = jdist.Trainer(model, optax.sgd(rate), optax.squared_error, strategy=strategy)
    with Checkpointer(path, **{"keep": 1, "every": 7, **options}) as checkpointer:
        fit = trainer.fit(
            DATA, batch_size=10, epochs=2, validation_data=DATA, validate_every=5, progress="off",
            callbacks=[callbacks.Checkpoint(checkpointer)],
        )  # fmt: skip
        return fit, checkpointer.steps(), checkpointer


@pytest.mark.parametrize("rate, steps", [(0.1, (15, 16)), (-0.01, (5, 16))])
def test_best_validation_is_on_disk_although_its_step_is_not_due(two, tmp_path, rate, steps):
    fit, saved, checkpointer = _fit(two, tmp_path, rate, keep_best=("val_loss", "min"), keep=1)
    best = min(row["step"] for row in fit.history.rows if row.get("val_loss") == min(fit.history["val_loss"]))
    assert checkpointer.best == best
    assert saved == (tuple(sorted({best, 16})))
    restored = checkpointer.restore(two, step=best)
    assert restored.manifest["metrics"]["val_loss"] == min(fit.history["val_loss"])


def test_missing_metric_raises_before_the_first_step(two, tmp_path):
    with pytest.raises(ValueError, match=r"`Checkpointer\(keep_best=...\)` needs the metric 'val_accuracy'; available are "
                       r"'loss', 'val_loss'\.$"):  # fmt: skip
        _fit(two, tmp_path, 0.1, keep_best=("val_accuracy", "max"))
