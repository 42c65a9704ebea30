"""Rows of numbers that are passed to a function, as trackers of experiments take them."""

import jax
import numpy as np
import pytest

from jdist import callbacks

from laws import each_row
from small_loop import idle, place, regression, train

ONE = place("one_device")
STATE, _ = regression(ONE)
FACTS = {"epoch", "seconds", "examples", "stalled_fraction"}


def run(callback, **options):
    return train(ONE, [callback], state=STATE, call=idle, **{"logs": lambda step: {"loss": 1.0 * step}, **options})


class Tracker:
    """Functions with the signatures of wandb, mlflow and tensorboardX."""

    def __init__(self):
        self.logged = []

    def log(self, data, step=None, commit=None):
        self.logged.append((step, data))

    def log_metrics(self, metrics, step=None, synchronous=None, run_id=None):
        assert all(isinstance(value, float | int) for value in metrics.values())
        self.logged.append((step, metrics))

    def add_scalar(self, tag, scalar_value, global_step=None):
        self.logged.append((global_step, {tag: scalar_value}))


def test_function_receives_a_row_per_epoch_and_every_given_number_of_steps():
    tracker = Tracker()
    run(callbacks.Rows(tracker.log, every=2), epochs=2, steps=3, validation=lambda epoch: {"loss": 10.0 + epoch})
    assert [(step, row["loss"], row.get("val_loss")) for step, row in tracker.logged] == [
        (2, 2.0, None), (3, 3.0, 10.0), (4, 4.0, None), (6, 6.0, None), (6, 6.0, 11.0)
    ]  # fmt: skip
    assert all(set(row) - {"val_loss"} == FACTS | {"loss"} for _, row in tracker.logged)


def test_functions_of_the_trackers_are_accepted():
    tracker = Tracker()
    run(callbacks.Rows(tracker.log_metrics), epochs=1)
    run(callbacks.Rows(lambda row, step: [tracker.add_scalar(name, x, step) for name, x in row.items()]), epochs=1)
    assert [step for step, _ in tracker.logged] == [3] * 6
    assert {name for _, row in tracker.logged[1:] for name in row} == FACTS | {"loss"}


def test_arrays_are_left_out_and_additional_columns_are_included():
    tracker = Tracker()
    also = [lambda event: {"rate": np.float32(0.5)}]
    run(callbacks.Rows(tracker.log, also=also), epochs=1, logs=lambda step: {"loss": 1.0, "classes": np.zeros(3)})
    assert set(tracker.logged[0][1]) == FACTS | {"loss", "rate"}


def test_only_process_0_calls_the_function(monkeypatch):
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    tracker = Tracker()
    run(callbacks.Rows(tracker.log, every=1))
    assert not tracker.logged


WRONG_ARGUMENTS = [
    (lambda: callbacks.Rows(None), TypeError, "`function` must be a function of a row and a step, got NoneType"),
    (lambda: callbacks.Rows([].append), TypeError, r"calls `append\(row, step=step\)`, .* `Rows\(lambda row, step: append"),
    (lambda: callbacks.Rows(lambda row: None), TypeError, "does not accept these arguments"),
    (lambda: callbacks.Rows(Tracker().log, every=0), ValueError, "`every` must be an integer >= 1, got 0"),
    (lambda: callbacks.Rows(Tracker().log, also=len), TypeError, "`also` must be a list of functions of an event"),
]  # fmt: skip


@each_row("make, error, message", WRONG_ARGUMENTS, [message for *_, message in WRONG_ARGUMENTS])
def test_wrong_arguments_raise(make, error, message):
    with pytest.raises(error, match=message):
        make()
