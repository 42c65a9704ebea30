"""Checkpoints while training goes on: when, and what is in them."""

import dataclasses

import hypothesis
import hypothesis.strategies as st
import jax
import numpy as np
import pytest

from jdist import callbacks
from jdist._src.checkpoint.checkpointer import Checkpointer

from small_loop import place, regression, train

few = hypothesis.settings(max_examples=6, deadline=None, derandomize=True, database=None)
ONE = place("one_device")


def _idle(state, number):
    return state, 0.0


def _saved(path, every, **options):
    with Checkpointer(path, keep=None, every=every) as checkpointer:
        train(ONE, [callbacks.Checkpoint(checkpointer)], state=ONE.put({"w": 1.0}), call=_idle, **options)
        return checkpointer.steps()


@few
@hypothesis.given(every=st.integers(1, 5), a_call=st.integers(1, 4))
def test_checkpoint_is_saved_after_the_call_in_which_one_is_due_and_at_the_end(tmp_path_factory, every, a_call):
    found = _saved(tmp_path_factory.mktemp("run"), every, epochs=1, steps=7, a_call=a_call)
    ends = [min(first + a_call, 7) for first in range(0, 7, a_call)]
    due = [end for before, end in zip([0, *ends], ends, strict=False) if end // every > before // every]
    assert found == tuple(sorted({*due, 7}))


def test_checkpoint_is_saved_at_the_end_of_training_that_stops(tmp_path):
    with Checkpointer(tmp_path / "run", every=100) as checkpointer:
        limit = callbacks.time_limit(0.2)
        train(ONE, [limit, callbacks.Checkpoint(checkpointer)], state=ONE.put({"w": 1.0}), call=_idle)
        assert checkpointer.steps() == (2,)


@pytest.mark.parametrize("name", ["mirrored_2", "central_2"])
def test_checkpoint_has_all_that_a_run_goes_on_from(name, tmp_path):
    strategy = place(name)
    values = [1.0, 2.0, 3.0]
    make = lambda: [callbacks.EMA(0.75), callbacks.EarlyStopping(patience=3)]
    options = dict(epochs=3, steps=2, validation=lambda epoch: {"loss": values[epoch]})
    whole = make()
    with Checkpointer(tmp_path / "run", every=5) as checkpointer:
        state, call = regression(strategy)
        straight = train(strategy, [*whole, callbacks.Checkpoint(checkpointer)], state=state, call=call, **options)
        state, _ = regression(strategy)
        found = checkpointer.restore(strategy, like=state, step=5)
    assert (found.data_position, [row["step"] for row in found.extra["history"]]) == ({"batch": 5}, [2, 4])
    again = make()
    resumed = train(strategy, again, state=found.state, call=call, start=5, saved=found.extra, **options)
    for one, other in ((again[0].params, whole[0].params), (resumed.state, straight.state)):
        jax.tree.map(np.testing.assert_array_equal, *map(jax.device_get, (one, other)))
    assert int(resumed.state.step) == 2  # the best
    with Checkpointer(tmp_path / "run") as checkpointer:
        at_end = checkpointer.restore(strategy, like=resumed.state)
    assert (at_end.step, int(at_end.state.step)) == (6, 6)  # the last, at the position that belongs to it


def test_run_that_took_no_step_saves_nothing(tmp_path):
    assert _saved(tmp_path / "run", 1, epochs=0) == ()


def test_what_is_no_checkpointer_is_refused():
    with pytest.raises(TypeError, match=r"`Checkpoint` takes a `jdist\.Checkpointer\(path, every=\.\.\.\)`, got str"):
        callbacks.Checkpoint("run")


def test_run_that_was_not_resumed_does_not_write_over_another(tmp_path):
    _saved(tmp_path / "run", 1)
    with pytest.raises(ValueError, match="has a checkpoint of step 6, and one of step 1 would not be found again"):
        _saved(tmp_path / "run", 1)


def test_end_at_an_earlier_step_saves_nothing_more(tmp_path):
    """As where the loop finds late that a loss was not finite, and that it refused the steps since."""
    run = train(ONE, [lambda event: None], state=ONE.put({"w": 1.0}), call=_idle)
    *events, end = run.events
    with Checkpointer(tmp_path / "run", every=2) as checkpointer:
        saving = callbacks.Checkpoint(checkpointer)
        for event in [*events, dataclasses.replace(end, step=3)]:
            saving(event)
        assert checkpointer.steps() == (2, 4, 6)
