"""Early stopping, the best state at the end, and time limits."""

import datetime
import math

import hypothesis
import hypothesis.strategies as st
import jax
import numpy as np
import pytest

import jdist
from jdist import callbacks
from jdist._src.training.state_copies import from_saved, to_saved

from laws import each_row
from small_loop import idle, place, regression, train

few = hypothesis.settings(max_examples=60, deadline=None, derandomize=True, database=None)
PLACES = ["one_device", "mirrored_2", "sharded_4", "central_2"]
ONE, TWO = place("one_device"), place("mirrored_2")
STATE, CALL = regression(ONE)


def _run_with_losses(stopping, values, **options):
    """Runs with the next of `values` as the validation loss after each epoch."""
    validation = lambda epoch: {"loss": values[epoch], "worst": [1.0, 2.0]}
    return train(ONE, [stopping], epochs=len(values), steps=1, state=STATE, call=idle, validation=validation, **options)


def _expected(values, patience, min_delta, sign):
    best, since = sign * math.inf, 0
    for epoch, value in enumerate(values):
        if sign * value < sign * best - min_delta:
            best, since = value, 0
        else:
            since += 1
            if since >= patience:
                return epoch
    return None


losses = st.lists(st.sampled_from([0.0, 0.5, 1.0, 1.25, 2.0, math.nan, math.inf, -math.inf]), min_size=1, max_size=8)


@few
@hypothesis.given(losses, st.integers(1, 3), st.sampled_from([0.0, 0.6]), st.sampled_from(["min", "max"]))
def test_stops_after_the_number_of_epochs_without_improvement(values, patience, min_delta, mode):
    stopping = callbacks.EarlyStopping(patience=patience, min_delta=min_delta, mode=mode, restore_best=False)
    run = _run_with_losses(stopping, values)
    at = _expected(values, patience, min_delta, 1 if mode == "min" else -1)
    assert (run.step, bool(run.stop_reason)) == ((len(values), False) if at is None else (at + 1, True))


@few
@hypothesis.given(losses, st.integers(1, 3), st.integers(1, 7))
def test_resumed_run_stops_at_the_same_step(values, patience, cut):
    options = dict(patience=patience, restore_best=False)
    uninterrupted = _run_with_losses(callbacks.EarlyStopping(**options), values)
    if cut >= uninterrupted.step:
        return
    resumed = _run_with_losses(callbacks.EarlyStopping(**options), values, start=cut, saved=uninterrupted.saved[cut])
    assert (resumed.step, resumed.stop_reason) == (uninterrupted.step, uninterrupted.stop_reason)


def test_stop_reason_contains_the_best_value_and_its_step():
    assert _run_with_losses(callbacks.EarlyStopping(patience=2), [3.0, 1.0, 2.0, 1.5]).stop_reason == (
        "val_loss was best, 1, after step 2, and did not improve for 2 epochs."
    )
    run = _run_with_losses(callbacks.EarlyStopping(), [math.nan])
    assert run.stop_reason == "val_loss was NaN or infinite for 1 epoch."


@pytest.mark.parametrize("name", PLACES)
@pytest.mark.parametrize("stops", [True, False])
def test_training_ends_with_the_best_state_with_its_shardings(name, stops):
    strategy = place(name)
    state, call = regression(strategy)
    shardings = jax.tree.map(lambda x: x.sharding, state)
    values = [3.0, 1.0, 2.0, 2.0]
    stopping = callbacks.EarlyStopping(patience=2 if stops else 9)
    run = train(
        strategy, [stopping], epochs=4, steps=1, state=state, call=call, validation=lambda e: {"loss": values[e]}
    )
    assert (run.step, bool(run.stop_reason)) == (4, stops)
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(run.state.params), run.states[1][1])
    assert int(run.state.step) == 2
    assert jax.tree.map(lambda x: x.sharding, run.state) == shardings
    call(run.state, 0)  # the state can be used


def test_training_ends_with_the_last_state_if_it_is_best_and_the_copy_is_released():
    state, call = regression(ONE)
    stopping = callbacks.EarlyStopping()
    run = train(ONE, [stopping], steps=1, state=state, call=call, validation=lambda e: {"loss": -e})
    assert int(run.state.step) == 2
    assert stopping.get_state()["best_state"] == []


def test_events_contain_the_last_state_until_the_end():
    state, call = regression(ONE)
    stopping = callbacks.EarlyStopping()
    steps = []
    note = lambda event: steps.append(int(event.state.step))
    train(ONE, [stopping, note], epochs=3, steps=1, state=state, call=call, validation=lambda e: {"loss": e})
    assert steps == [0, 1, 1, 2, 2, 2]


@pytest.mark.parametrize("name", PLACES)
def test_resumed_run_ends_with_the_best_state_before_the_interruption(name):
    strategy = place(name)
    values = [1.0, 3.0, 2.0, 2.0]
    options = dict(epochs=4, steps=1, validation=lambda e: {"loss": values[e]})
    state, call = regression(strategy)
    uninterrupted = train(strategy, [callbacks.EarlyStopping(patience=3)], state=state, call=call, **options)
    state, _ = regression(strategy)
    for number in range(2):
        state, _ = call(state, number)
    stopping = callbacks.EarlyStopping(patience=3)
    saved = uninterrupted.saved[2]
    resumed = train(strategy, [stopping], state=state, call=call, start=2, saved=saved, **options)
    assert resumed.stop_reason == uninterrupted.stop_reason
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(resumed.state), jax.device_get(uninterrupted.state))
    shardings = [jax.tree.map(lambda x: x.sharding, run.state) for run in (resumed, uninterrupted)]
    assert shardings[0] == shardings[1]


def test_callback_is_reset_by_another_run():
    stopping = callbacks.EarlyStopping(restore_best=False)
    assert stopping.best is None
    assert _run_with_losses(stopping, [0.0, 1.0]).stop_reason
    assert not _run_with_losses(stopping, [3.0, 2.0]).stop_reason
    assert stopping.best == 2.0


def test_missing_and_array_metrics_raise_after_the_first_epoch():
    message = r"EarlyStopping needs the metric 'val_loss'; available are 'loss'\. Pass `validation_data`\."
    with pytest.raises(ValueError, match=message):
        train(ONE, [callbacks.EarlyStopping()], state=STATE, call=idle)
    with pytest.raises(ValueError, match=r"needs the metric 'acc'; available are 'loss', 'val_loss', 'val_worst'\.$"):
        _run_with_losses(callbacks.EarlyStopping("acc"), [1.0])
    with pytest.raises(ValueError, match=r"needs a scalar metric; 'val_worst' has 2 values"):
        _run_with_losses(callbacks.EarlyStopping("val_worst"), [1.0])


def test_epochs_without_validation_do_not_count():
    values = {0: {"loss": 1.0}, 2: {"loss": 2.0}, 3: {"loss": 2.0}}
    options = dict(epochs=4, steps=1, state=STATE, call=idle, validation=lambda epoch: values.get(epoch))
    run = train(ONE, [callbacks.EarlyStopping(patience=2)], **options)
    assert run.stop_reason and run.step == 4


WRONG_OPTIONS = {
    "metric": (dict(metric=3), TypeError, "`metric` must be the name of a metric, got int"),
    "patience": (dict(patience=0), ValueError, "`patience` must be an integer >= 1, got 0"),
    "patience_bool": (dict(patience=True), TypeError, "`patience` must be an integer >= 1, got True"),
    "delta": (dict(min_delta=-1.0), ValueError, "`min_delta` must be a number >= 0, got -1.0"),
    "delta_nan": (dict(min_delta=math.nan), ValueError, "`min_delta` must be a number >= 0, got nan"),
    "mode": (dict(mode="auto"), ValueError, "`mode` must be 'min' or 'max', got 'auto'"),
}


@each_row("options, error, message", WRONG_OPTIONS.values(), WRONG_OPTIONS)
def test_wrong_options_of_early_stopping_raise(options, error, message):
    with pytest.raises(error, match=message):
        callbacks.EarlyStopping(**options)


F32, RESUME = np.zeros(3, np.float32), r"Resume with the model that was"
LEAVES = {
    "fewer": ([F32], rf"Best was saved with 1 leaves, and has 2 now\. {RESUME}"),
    "names": (
        {"names": [["a"], ["c"]], "leaves": [F32, np.int32(0)]},
        rf"Best was saved with a leaf c, which does not exist now\. {RESUME}",
    ),
    "shape": (
        [np.zeros(4, np.float32), np.int32(0)],
        r"Best\['a'\] was saved as float32\[4\], and is float32\[3\] now",
    ),
    "dtype": ([np.zeros(3, np.int32), np.int32(0)], r"Best\['a'\] was saved as int32\[3\], and is float32\[3\] now"),
}


@each_row("leaves, message", LEAVES.values(), LEAVES)
def test_saved_leaves_of_another_model_raise(leaves, message):
    like = TWO.put({"a": np.zeros(3, np.float32), "b": np.int32(0)})
    with pytest.raises(ValueError, match=message):
        from_saved("Best", leaves, like, TWO)


def test_local_values_and_keys_are_restored_on_another_number_of_replicas():
    make = lambda s, x: s.put({"key": jax.random.key(3), "w": jdist.SyncOnRead(x, "mean")})
    leaves = jax.device_get(to_saved(make(TWO, np.float32([1, 3]))))
    like = make(place("mirrored_3"), np.zeros(3, np.float32))
    restored = from_saved("Best", leaves, like, place("mirrored_3"))
    np.testing.assert_array_equal(restored["w"].tree, [2, 2, 2])
    np.testing.assert_array_equal(jax.random.key_data(restored["key"]), jax.random.key_data(jax.random.key(3)))


TIMES = [
    (90, "1m30s"),
    (0.25, "0.25s"),
    ("90s", "1m30s"),
    ("1h30m", "1h30m"),
    ("2d", "2d"),
    ("1d 2h 3m 4.5s", "1d2h3m4.5s"),
]


@each_row("limit, text", [*TIMES, (datetime.timedelta(hours=1), "1h")])
def test_stop_reason_contains_the_time_limit(limit, text):
    run = train(ONE, [callbacks.TimeLimit(limit)], state=STATE, call=idle, seconds=200_000.0)
    assert run.stop_reason == f"The time limit of {text} was exceeded after step 1."


def test_time_limit_stops_after_the_step_that_exceeds_it():
    run = train(ONE, [callbacks.TimeLimit(1.0)], steps=10, state=STATE, call=idle, seconds=0.25)
    assert (run.step, run.stop_reason) == (4, "The time limit of 1s was exceeded after step 4.")
    assert train(ONE, [callbacks.TimeLimit(99)], state=STATE, call=idle).stop_reason == ""


@each_row("limit", ["", "soon", "1x", "30m1h", "-1s", "90"])
def test_wrong_time_limit_text_raises(limit):
    with pytest.raises(ValueError, match="`limit` must be seconds, or a string such as '90s', '1h30m' or '2d', got"):
        callbacks.TimeLimit(limit)


@each_row("limit", [0, -1, math.inf, math.nan, None, True, "0s", datetime.timedelta(0)])
def test_time_limit_that_is_not_positive_raises(limit):
    with pytest.raises(ValueError, match="`limit` must be a positive number of seconds, got"):
        callbacks.TimeLimit(limit)
