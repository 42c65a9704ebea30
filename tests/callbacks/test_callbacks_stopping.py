"""Training that stops because it gets no better, or because time is over; and the best state, which it ends with."""

import datetime
import math

import hypothesis
import hypothesis.strategies as st
import jax
import numpy as np
import pytest

import jdist
from jdist import callbacks
from jdist._src.callbacks.state_copies import from_saved, leaves_to_save

from small_loop import place, regression, train

few = hypothesis.settings(max_examples=60, deadline=None, derandomize=True, database=None)
PLACES = ["one_device", "mirrored_2", "sharded_4", "central_2"]
ONE, TWO = place("one_device"), place("mirrored_2")
STATE, CALL = regression(ONE)


def _idle(state, number):
    """A step that leaves the state alone: for what concerns numbers only."""
    return state, 0.0


def _judged(stopping, values, **options):
    """A run whose validation loss after each epoch is the next of `values`."""
    found = lambda epoch: {"loss": values[epoch], "worst": [1.0, 2.0]}
    return train(ONE, [stopping], epochs=len(values), steps=1, state=STATE, call=_idle, validation=found, **options)


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
def test_stopping_stops_after_so_many_epochs_without_a_better_value(values, patience, min_delta, mode):
    stopping = callbacks.EarlyStopping(patience=patience, min_delta=min_delta, mode=mode, restore_best=False)
    run = _judged(stopping, values)
    at = _expected(values, patience, min_delta, 1 if mode == "min" else -1)
    assert (run.step, bool(run.stop)) == ((len(values), False) if at is None else (at + 1, True))


@few
@hypothesis.given(losses, st.integers(1, 3), st.integers(1, 7))
def test_resumed_run_stops_where_the_one_in_one_go_stops(values, patience, cut):
    options = dict(patience=patience, restore_best=False)
    whole = _judged(callbacks.EarlyStopping(**options), values)
    if cut >= whole.step:
        return
    again = callbacks.EarlyStopping(**options)
    resumed = _judged(again, values, start=cut, saved=whole.saved[cut])
    assert (resumed.step, resumed.stop) == (whole.step, whole.stop)


def test_stop_is_a_sentence_with_the_best_value_and_its_step():
    assert _judged(callbacks.EarlyStopping(patience=2), [3.0, 1.0, 2.0, 1.5]).stop == (
        "val_loss was best, 1, after step 2, and got no better in 2 epochs."
    )
    run = _judged(callbacks.EarlyStopping(), [math.nan])
    assert run.stop == "val_loss was no number in 1 epoch."


def test_best_is_none_before_there_is_one():
    stopping = callbacks.EarlyStopping()
    assert stopping.best is None
    _judged(stopping, [2.0, 1.0, 3.0])
    assert stopping.best == 1.0


@pytest.mark.parametrize("name", PLACES)
@pytest.mark.parametrize("stops", [True, False])
def test_training_ends_with_the_best_state_in_its_place(name, stops):
    strategy = place(name)
    state, call = regression(strategy)
    places = jax.tree.map(lambda x: x.sharding, state)
    values = [3.0, 1.0, 2.0, 2.0]
    stopping = callbacks.EarlyStopping(patience=2 if stops else 9)
    run = train(
        strategy, [stopping], epochs=4, steps=1, state=state, call=call, validation=lambda e: {"loss": values[e]}
    )
    assert (run.step, bool(run.stop)) == (4, stops)
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(run.state.params), run.states[1][1])
    assert int(run.state.step) == 2
    assert jax.tree.map(lambda x: x.sharding, run.state) == places
    call(run.state, 0)  # it goes on from there


def test_training_whose_last_state_is_best_ends_with_that_one():
    state, call = regression(ONE)
    run = train(ONE, [callbacks.EarlyStopping()], steps=1, state=state, call=call, validation=lambda e: {"loss": -e})
    assert int(run.state.step) == 2


def test_state_is_that_of_the_last_step_until_the_end():
    state, call = regression(ONE)
    stopping = callbacks.EarlyStopping()
    seen = []
    note = lambda event: seen.append(int(event.state.step))
    train(ONE, [stopping, note], epochs=3, steps=1, state=state, call=call, validation=lambda e: {"loss": e})
    assert seen == [0, 1, 1, 2, 2, 2]


@pytest.mark.parametrize("name", PLACES)
def test_resumed_run_ends_with_the_best_state_of_before(name):
    strategy = place(name)
    values = [1.0, 3.0, 2.0, 2.0]
    options = dict(epochs=4, steps=1, validation=lambda e: {"loss": values[e]})
    state, call = regression(strategy)
    whole = train(strategy, [callbacks.EarlyStopping(patience=3)], state=state, call=call, **options)
    state, _ = regression(strategy)
    for number in range(2):
        state, _ = call(state, number)
    again = [callbacks.EarlyStopping(patience=3)]
    resumed = train(strategy, again, state=state, call=call, start=2, saved=whole.saved[2], **options)
    assert resumed.stop == whole.stop
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(resumed.state), jax.device_get(whole.state))
    assert jax.tree.map(lambda x: x.sharding, resumed.state) == jax.tree.map(lambda x: x.sharding, whole.state)


def test_stopping_lets_its_copy_go_when_training_is_over():
    stopping = callbacks.EarlyStopping()
    state, call = regression(ONE)
    train(ONE, [stopping], steps=1, state=state, call=call, validation=lambda e: {"loss": e})
    assert stopping.get_state()["best_state"] == []


def test_stopping_begins_anew_with_another_run():
    stopping = callbacks.EarlyStopping(restore_best=False)
    assert _judged(stopping, [0.0, 1.0]).stop
    assert not _judged(stopping, [3.0, 2.0]).stop


def test_metric_that_is_not_there_is_said_after_the_first_epoch():
    says = r"EarlyStopping watches 'val_loss', and there are only 'loss'\. Hand in `validation_data`\."
    with pytest.raises(ValueError, match=says):
        train(ONE, [callbacks.EarlyStopping()], state=STATE, call=_idle)
    with pytest.raises(ValueError, match=r"watches 'acc', and there are only 'loss', 'val_loss', 'val_worst'\.$"):
        _judged(callbacks.EarlyStopping("acc"), [1.0])


def test_epochs_without_validation_do_not_count():
    values = {0: {"loss": 1.0}, 2: {"loss": 2.0}, 3: {"loss": 2.0}}
    options = dict(epochs=4, steps=1, state=STATE, call=_idle, validation=lambda epoch: values.get(epoch))
    run = train(ONE, [callbacks.EarlyStopping(patience=2)], **options)
    assert run.stop and run.step == 4


def test_metric_of_several_numbers_is_refused():
    with pytest.raises(ValueError, match=r"watches 'val_worst', which is 2 numbers\. Watch a metric that is one"):
        _judged(callbacks.EarlyStopping("val_worst"), [1.0])


BAD = {
    "metric": (dict(metric=3), TypeError, "`metric` is the name of one, got int"),
    "patience": (dict(patience=0), ValueError, "`patience` must be an integer >= 1, got 0"),
    "patience_bool": (dict(patience=True), TypeError, "`patience` must be an integer >= 1, got True"),
    "delta": (dict(min_delta=-1.0), ValueError, "`min_delta` is a number from 0 up, got -1.0"),
    "delta_nan": (dict(min_delta=math.nan), ValueError, "`min_delta` is a number from 0 up, got nan"),
    "mode": (dict(mode="auto"), ValueError, "`mode` is 'min' or 'max', whichever is better, got 'auto'"),
}


@pytest.mark.parametrize("options, kind, says", BAD.values(), ids=BAD)
def test_stopping_refuses_what_makes_no_sense(options, kind, says):
    with pytest.raises(kind, match=says):
        callbacks.EarlyStopping(**options)


LEAVES = {
    "fewer": (
        [np.zeros(3, np.float32)],
        r"Best was saved with 1 leaves, and has 2 now\. Resume with the model that was",
    ),
    "names": (
        {"names": [["a"], ["c"]], "leaves": [np.zeros(3, np.float32), np.int32(0)]},
        r"Best was saved with a leaf c, and has none of this name now\. Resume with the model that was",
    ),
    "shape": (
        [np.zeros(4, np.float32), np.int32(0)],
        r"Best\['a'\] was saved as float32\[4\], and is float32\[3\] now",
    ),
    "dtype": ([np.zeros(3, np.int32), np.int32(0)], r"Best\['a'\] was saved as int32\[3\], and is float32\[3\] now"),
}


@pytest.mark.parametrize("leaves, says", LEAVES.values(), ids=LEAVES)
def test_what_was_saved_of_another_model_is_refused(leaves, says):
    like = TWO.put({"a": np.zeros(3, np.float32), "b": np.int32(0)})
    with pytest.raises(ValueError, match=says):
        from_saved("Best", leaves, like, TWO)


def test_what_drifts_and_keys_go_on_with_another_number_of_replicas():
    drifting = lambda s, x: s.put({"key": jax.random.key(3), "w": jdist.SyncOnRead(x, "mean")})
    leaves = jax.device_get(leaves_to_save(drifting(TWO, np.float32([1, 3]))))
    like = drifting(place("mirrored_3"), np.zeros(3, np.float32))
    found = from_saved("Best", leaves, like, place("mirrored_3"))
    np.testing.assert_array_equal(found["w"].tree, [2, 2, 2])
    np.testing.assert_array_equal(jax.random.key_data(found["key"]), jax.random.key_data(jax.random.key(3)))


TIMES = {
    "number": (90, "1m30s"), "float": (0.25, "0.25s"), "s": ("90s", "1m30s"), "hm": ("1h30m", "1h30m"), "d": ("2d", "2d"),
    "all": ("1d 2h 3m 4.5s", "1d2h3m4.5s"), "delta": (datetime.timedelta(hours=1), "1h"),
}  # fmt: skip


@pytest.mark.parametrize("limit, words", TIMES.values(), ids=TIMES)
def test_time_limit_says_how_long_it_was(limit, words):
    run = train(ONE, [callbacks.time_limit(limit)], state=STATE, call=_idle, seconds=200_000.0)
    assert run.stop == f"The time limit of {words} was over after step 1."


def test_time_limit_stops_after_the_step_in_which_the_time_is_over():
    run = train(ONE, [callbacks.time_limit(1.0)], steps=10, state=STATE, call=_idle, seconds=0.25)
    assert (run.step, run.stop) == (4, "The time limit of 1s was over after step 4.")
    assert train(ONE, [callbacks.time_limit(99)], state=STATE, call=_idle).stop == ""


@pytest.mark.parametrize("limit", ["", "soon", "1x", "30m1h", "-1s", "90"])
def test_time_limit_of_no_time_in_words_is_refused(limit):
    with pytest.raises(ValueError, match="A time limit is seconds, or words such as '90s', '1h30m' or '2d', got"):
        callbacks.time_limit(limit)


@pytest.mark.parametrize("limit", [0, -1, math.inf, math.nan, None, True, "0s", datetime.timedelta(0)])
def test_time_limit_that_is_not_positive_is_refused(limit):
    with pytest.raises(ValueError, match="`limit` is a positive number of seconds, got"):
        callbacks.time_limit(limit)
