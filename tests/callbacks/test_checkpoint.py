"""Checkpoints during training: when they are saved, and their contents."""

import dataclasses

import hypothesis
import hypothesis.strategies as st
import jax
import numpy as np
import pytest

from jdist import callbacks
from jdist._src.checkpoint.checkpointer import Checkpointer

from small_loop import idle, place, regression, train

few = hypothesis.settings(max_examples=6, deadline=None, derandomize=True, database=None)
ONE = place("one_device")


def _saved(path, every, **options):
    with Checkpointer(path, keep=None, every=every) as checkpointer:
        train(ONE, [callbacks.Checkpoint(checkpointer)], state=ONE.put({"w": 1.0}), call=idle, **options)
        return checkpointer.steps()


@few
@hypothesis.given(every=st.integers(1, 5), steps_per_call=st.integers(1, 4))
def test_checkpoint_is_saved_after_each_call_that_contains_a_due_step_and_at_the_end(
    tmp_path_factory, every, steps_per_call
):
    steps_saved = _saved(tmp_path_factory.mktemp("run"), every, epochs=1, steps=7, steps_per_call=steps_per_call)
    ends = [min(first + steps_per_call, 7) for first in range(0, 7, steps_per_call)]
    due = [end for before, end in zip([0, *ends], ends, strict=False) if end // every > before // every]
    assert steps_saved == tuple(sorted({*due, 7}))


def test_checkpoint_is_saved_at_the_end_of_training_that_stops(tmp_path):
    with Checkpointer(tmp_path / "run", every=100) as checkpointer:
        limit = callbacks.TimeLimit(0.2)
        train(ONE, [limit, callbacks.Checkpoint(checkpointer)], state=ONE.put({"w": 1.0}), call=idle)
        assert checkpointer.steps() == (2,)


@pytest.mark.parametrize("name", ["mirrored_2", "central_2"])
def test_checkpoint_contains_the_data_that_a_resumed_run_needs(name, tmp_path):
    strategy = place(name)
    values = [1.0, 2.0, 3.0]
    make = lambda: [callbacks.EMA(0.75), callbacks.EarlyStopping(patience=3)]
    options = dict(epochs=3, steps=2, validation=lambda epoch: {"loss": values[epoch]})
    callbacks_before = make()
    with Checkpointer(tmp_path / "run", every=5) as checkpointer:
        state, call = regression(strategy)
        all_callbacks = [*callbacks_before, callbacks.Checkpoint(checkpointer)]
        uninterrupted = train(strategy, all_callbacks, state=state, call=call, **options)
        state, _ = regression(strategy)
        checkpoint = checkpointer.restore(strategy, like=state, step=5)
    assert (checkpoint.data_position, [row["step"] for row in checkpoint.extra["history"]]) == ({"batch": 5}, [2, 4])
    callbacks_after = make()
    state, saved = checkpoint.state, checkpoint.extra
    resumed = train(strategy, callbacks_after, state=state, call=call, start=5, saved=saved, **options)
    averages = callbacks_after[0].params, callbacks_before[0].params
    for pair in (averages, (resumed.state, uninterrupted.state)):
        jax.tree.map(np.testing.assert_array_equal, *map(jax.device_get, pair))
    assert int(resumed.state.step) == 2  # the best state
    with Checkpointer(tmp_path / "run") as checkpointer:
        at_end = checkpointer.restore(strategy, like=resumed.state)
    assert (at_end.step, int(at_end.state.step)) == (6, 6)  # the last state, which corresponds to the data position


def test_run_without_steps_saves_nothing(tmp_path):
    assert _saved(tmp_path / "run", 1, epochs=0) == ()


def test_path_instead_of_a_checkpointer_raises_with_the_line_to_write():
    line = r"`with jdist\.Checkpointer\(path, every=100\) as checkpointer:` .*\[jdist\.callbacks\.Checkpoint\(checkpointer\)\]"
    with pytest.raises(TypeError, match=rf"`Checkpoint` needs a `jdist\.Checkpointer`, got 'run'\. Write {line}"):
        callbacks.Checkpoint("run")


def test_run_from_the_beginning_does_not_overwrite_another(tmp_path):
    _saved(tmp_path / "run", 1)
    message = "has a checkpoint of step 6, so a checkpoint of step 1 would not be the newest"
    with pytest.raises(ValueError, match=message):
        _saved(tmp_path / "run", 1)


def test_end_at_an_earlier_step_does_not_save(tmp_path):
    """This happens if the loop finds out late that a loss was not finite and later steps were rejected."""
    run = train(ONE, [lambda event: None], state=ONE.put({"w": 1.0}), call=idle)
    *events, end = run.events
    with Checkpointer(tmp_path / "run", every=2) as checkpointer:
        callback = callbacks.Checkpoint(checkpointer)
        for event in [*events, dataclasses.replace(end, step=3)]:
            callback(event)
        assert checkpointer.steps() == (2, 4, 6)
