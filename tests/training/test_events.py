"""Moments, and the record that `fit` returns: how it prints, is copied and is pickled."""

import copy
import dataclasses
import pickle

import jax
import numpy as np
import pytest

import jdist
from jdist.callbacks import Moment

from small_fits import assert_bitwise_equal, digits, fit, trainer

SMALL = tuple(array[:240] for array in digits())


@pytest.fixture
def ended(two):
    """A record of four steps, with validation."""
    return fit(two, SMALL, batch_size=60, epochs=1, validation_data=SMALL)


def test_moment_is_equal_to_its_name_and_to_no_other():
    assert Moment.EPOCH == "epoch" and Moment.EPOCH != "end"
    assert Moment.EPOCH is not None and Moment.EPOCH != 3
    assert {Moment.EPOCH: 1}["epoch"] == 1
    assert pickle.loads(pickle.dumps(Moment.END)) is copy.deepcopy(Moment.END) is Moment.END


@pytest.mark.parametrize("name", ["EPOCH", "epochs", "after the last step"])
def test_moment_compared_with_another_text_is_an_error(name):
    for compare in (lambda: name == Moment.EPOCH, lambda: name != Moment.EPOCH, lambda: Moment.EPOCH in ("end", name)):
        with pytest.raises(
            ValueError, match=f"There is no moment '{name}'. The moments are 'start', 'step', 'epoch', 'end'"
        ):
            compare()


def test_fit_is_short_in_text_and_tables_in_a_notebook(ended):
    text, page = repr(ended), ended._repr_html_()
    assert len(text) < 250
    assert text.startswith("Fit(4 steps, 1 epoch, loss ") and "val_accuracy" in text
    assert text.endswith("; state: TrainState, 3,633 numbers)")
    assert ">stop</td>" in page and ">All requested steps were taken.</td>" in page
    assert page.count("<table") == 2


def test_fit_with_a_spent_state_prints_and_says_why_it_is_not_copied(ended, two):
    trainer(two).fit(SMALL, batch_size=60, steps=5, state=ended.state, progress="off")
    spent = "state: TrainState, spent: a later step took its memory over"
    assert spent in repr(ended) and "spent: a later step" in ended._repr_html_()
    for move, word in ((pickle.dumps, "pickled"), (copy.deepcopy, "copied")):
        with pytest.raises(
            ValueError, match=rf"cannot be {word}: the memory of its state .* `dataclasses.replace\(fit, state=N"
        ):
            move(ended)
    assert pickle.loads(pickle.dumps(dataclasses.replace(ended, state=None))).steps == 4


def test_copy_of_a_fit_has_arrays_of_its_own_in_the_same_places(ended):
    of_its_own = copy.deepcopy(ended)
    assert_bitwise_equal(of_its_own.state, ended.state)
    for new, old in zip(jax.tree.leaves(of_its_own.state), jax.tree.leaves(ended.state), strict=True):
        assert new is not old and new.sharding == old.sharding
    assert of_its_own.history.rows == ended.history.rows and of_its_own.description is ended.description


def test_pickled_fit_comes_back_with_its_state_on_the_host_and_goes_on(ended, two):
    back = pickle.loads(pickle.dumps(ended))
    assert (back.steps, back.stop_reason, back.proof, back.description) == (4, ended.stop_reason, ended.proof, None)
    assert back.history.rows == ended.history.rows and back.history.losses == ended.history.losses
    assert isinstance(back.state.params["Dense_0"]["bias"], np.ndarray)
    resumed = [
        trainer(two).fit(SMALL, batch_size=60, steps=8, shuffle=False, state=state, progress="off").state
        for state in (two.put(back.state), ended.state)
    ]
    assert_bitwise_equal(*resumed)


def test_pickled_fit_of_parameters_that_drift_keeps_one_set_per_replica(two):
    import optax

    drifting = fit(two, SMALL, batch_size=60, epochs=1, optimizer=jdist.sync.local_sgd(optax.sgd(0.1), every=5))
    back = pickle.loads(pickle.dumps(drifting))
    assert_bitwise_equal(two.put(back.state), drifting.state)


def test_fit_error_is_copied_and_pickled_with_its_record(two):
    with pytest.raises(jdist.FitError) as caught:
        fit(two, SMALL, batch_size=60, callbacks=[_fails])
    error = caught.value
    for other in (pickle.loads(pickle.dumps(error)), copy.deepcopy(error)):
        assert type(other) is jdist.FitError and str(other) == str(error)
        assert_bitwise_equal(two.put(other.fit.state), error.fit.state)


def _fails(event):
    if event.step == 2:
        raise OSError("no space left")
