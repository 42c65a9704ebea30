"""Moments, callback results, and the record that `fit` returns: its display, copies and pickles."""

import copy
import dataclasses
import pickle
import re

import jax
import numpy as np
import pytest

import jdist
from jdist.callbacks import CallbackResult, Moment

from laws import each_row
from small_fits import assert_bitwise_equal, digits, fit, trainer

SMALL = tuple(array[:240] for array in digits())


@pytest.fixture
def result(two):
    """The result of four steps, with validation."""
    return fit(two, SMALL, batch_size=60, epochs=1, validation_data=SMALL)


def test_moment_is_equal_to_its_name_only():
    assert Moment.EPOCH == "epoch" and Moment.EPOCH != "end"
    assert Moment.EPOCH is not None and Moment.EPOCH != 3
    assert {Moment.EPOCH: 1}["epoch"] == 1
    assert pickle.loads(pickle.dumps(Moment.END)) is copy.deepcopy(Moment.END) is Moment.END


@each_row("name", ["EPOCH", "epochs", "after the last step"])
def test_comparing_a_moment_with_another_string_raises(name):
    message = f"There is no moment '{name}'. The moments are 'start', 'step', 'validation', 'epoch', 'end'"
    for compare in (lambda: name == Moment.EPOCH, lambda: name != Moment.EPOCH, lambda: Moment.EPOCH in ("end", name)):
        with pytest.raises(ValueError, match=message):
            compare()


def test_fit_is_a_short_text_and_tables_in_a_notebook(result):
    text, page = repr(result), result._repr_html_()
    assert len(text) < 250
    assert text.startswith("Fit(4 steps, 1 epoch, loss ") and "val_accuracy" in text
    assert text.endswith("; state: TrainState, 3,633 numbers)")
    assert re.search("stop reason *</span>All requested steps were taken.", page) and page.count("<pre") == 2


def test_fit_with_a_donated_state_prints_and_cannot_be_copied(result, two):
    trainer(two).fit(SMALL, batch_size=60, steps=5, state=result.state, progress="off")
    assert "state: TrainState, donated to a later step" in repr(result)
    assert "donated to a later step" in result._repr_html_()
    for function, participle in ((pickle.dumps, "pickled"), (copy.deepcopy, "copied")):
        message = rf"cannot be {participle}: its state was donated .* `dataclasses.replace\(fit, state=N"
        with pytest.raises(ValueError, match=message):
            function(result)
    assert pickle.loads(pickle.dumps(dataclasses.replace(result, state=None))).steps == 4


def test_copy_of_a_fit_has_new_arrays_with_the_same_shardings(result):
    copied = copy.deepcopy(result)
    assert_bitwise_equal(copied.state, result.state)
    for new, old in zip(jax.tree.leaves(copied.state), jax.tree.leaves(result.state), strict=True):
        assert new is not old and new.sharding == old.sharding
    assert copied.history.rows == result.history.rows and copied.description is result.description


def test_pickled_fit_has_its_state_on_the_host_and_can_be_continued(result, two):
    loaded = pickle.loads(pickle.dumps(result))
    for name in ("steps", "stop_reason", "proof"):
        assert getattr(loaded, name) == getattr(result, name)
    assert loaded.steps == 4 and loaded.description is None
    assert loaded.history.rows == result.history.rows and loaded.history.losses == result.history.losses
    assert isinstance(loaded.state.params["Dense_0"]["bias"], np.ndarray)
    resumed = [
        trainer(two).fit(SMALL, batch_size=60, steps=8, shuffle=False, state=state, progress="off").state
        for state in (two.put(loaded.state), result.state)
    ]
    assert_bitwise_equal(*resumed)


def test_pickled_fit_of_parameters_that_differ_between_replicas(two):
    import optax

    original = fit(two, SMALL, batch_size=60, epochs=1, optimizer=jdist.sync.local_sgd(optax.sgd(0.1), every=5))
    loaded = pickle.loads(pickle.dumps(original))
    assert_bitwise_equal(two.put(loaded.state), original.state)


def test_fit_error_is_copied_and_pickled_with_its_fit(two):
    with pytest.raises(jdist.FitError) as caught:
        fit(two, SMALL, batch_size=60, callbacks=[_fails])
    error = caught.value
    for other in (pickle.loads(pickle.dumps(error)), copy.deepcopy(error)):
        assert type(other) is jdist.FitError and str(other) == str(error)
        assert_bitwise_equal(two.put(other.fit.state), error.fit.state)


def _fails(event):
    if event.step == 2:
        raise OSError("no space left")


OTHER_NAMES = {
    "params": "fit.state.params",
    "step": "fit.steps",
    "stop": "fit.stop_reason",
    "losses": "fit.history.losses",
    "metrics": r"fit.history.rows\[-1\]",
}


def test_other_names_of_a_fit_raise_with_the_line_to_write():
    empty = jdist.Fit(None, jdist.History(), 0, "")
    for name, expression in OTHER_NAMES.items():
        with pytest.raises(AttributeError, match=f"no attribute '{name}'. Write `{expression}`"):
            getattr(empty, name)
    with pytest.raises(AttributeError, match="no attribute 'unknown'$"):
        _ = empty.unknown


def test_stop_reason_that_is_not_a_sentence_raises():
    with pytest.raises(TypeError, match=r'must be a sentence .* got True: `CallbackResult\(stop_reason="The loss'):
        CallbackResult(stop_reason=True)
