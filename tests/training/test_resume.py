"""Training that is interrupted and resumed is bitwise equal to uninterrupted training."""

import random

import jax
import numpy as np
import optax
import pytest

import jdist
from jdist.callbacks import CallbackResult, Moment

from laws import STRATEGIES, among
from small_fits import assert_bitwise_equal, digits, fit, trainer

DATA = tuple(array[:500] for array in digits())  # 9 batches of 60 per epoch; the last has 20
STEPS = 27


def train(strategy, path=None, stop_at=None, every=3, **options):
    """Trains three epochs with checkpoints, from the newest one, until step `stop_at`."""
    stop = lambda event: (
        CallbackResult(stop_reason="Killed.") if event.moment is Moment.STEP and event.step == stop_at else None
    )
    if path is None:
        return fit(strategy, DATA, batch_size=60, **options)
    with jdist.Checkpointer(path, every=every) as checkpointer:
        save = jdist.callbacks.Checkpoint(checkpointer)
        # A process that is killed does not save at the end.
        save_until_killed = lambda event: save(event) if stop_at is None or event.moment is not Moment.END else None
        return fit(strategy, DATA, batch_size=60, callbacks=[save_until_killed, stop], resume=checkpointer, **options)


def interrupted(strategy, path, seed, times=1, every=3, **options):
    """Trains with interruptions at random steps in ascending order, each time from the last checkpoint."""
    for step in sorted(random.Random(seed).sample(range(2, STEPS), times)):
        train(strategy, path, stop_at=step, every=every, **options)
    return train(strategy, path, every=every, **options)


CASES = {
    "adam": dict(optimizer=optax.adam(3e-3)),
    "int8": dict(optimizer=optax.chain(jdist.sync.int8(), optax.sgd(0.1)), steps_per_call=2),
    "local_sgd": dict(optimizer=jdist.sync.local_sgd(optax.sgd(0.1, momentum=0.9), every=4)),
    "every": dict(optimizer=jdist.sync.every(optax.chain(jdist.sync.mean(), optax.adam(3e-3)), 2)),
}


@pytest.mark.filterwarnings("ignore:The gradients of the last step were accumulated")  # by `every`
@pytest.mark.parametrize("name", among(CASES, "adam"))
def test_interrupted_training_is_bitwise_equal(two, tmp_path, name):
    options = CASES[name]
    resumed = interrupted(two, tmp_path, seed=0, times=3 if name == "adam" else 1, every=3, **options)
    expected = train(two, **options)
    assert resumed.steps == expected.steps == STEPS
    assert_bitwise_equal(resumed.state, expected.state)
    for row, expected_row in zip(resumed.history.rows, expected.history.rows, strict=True):
        assert row["step"] == expected_row["step"]
        assert row["loss"] == pytest.approx(expected_row["loss"], rel=1e-6)
        assert row["accuracy"] == pytest.approx(expected_row["accuracy"], rel=1e-6)
    assert resumed.history.losses == expected.history.losses


@pytest.mark.slow
@pytest.mark.parametrize("place", ["sharded_4", "central_2"])
def test_interrupted_training_is_bitwise_equal_under_every_strategy(place, tmp_path):
    strategy = STRATEGIES[place]()
    assert_bitwise_equal(interrupted(strategy, tmp_path, seed=1, every=4).state, train(strategy).state)


@pytest.mark.slow
def test_exact_training_resumes_bitwise_equal_on_another_number_of_devices(tmp_path):
    exact = dict(optimizer=optax.chain(jdist.sync.exact(), optax.adam(3e-3)))
    on = lambda n: jdist.MirroredStrategy([f"cpu:{i}" for i in range(n)], virtual_replicas=4)
    train(on(1), tmp_path, stop_at=5, **exact)
    train(on(4), tmp_path, stop_at=16, **exact)
    assert_bitwise_equal(train(on(2), tmp_path, **exact).state, train(on(2), **exact).state)


@pytest.mark.slow
def test_training_resumes_under_another_strategy(two, tmp_path):
    train(two, tmp_path, stop_at=13)
    other = train(STRATEGIES["sharded_4"](), tmp_path)
    assert other.steps == STEPS
    for a, b in zip(jax.tree.leaves(other.state.params), jax.tree.leaves(train(two).state.params), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)


def test_finished_training_takes_no_further_step(two, tmp_path):
    first = train(two, tmp_path, every=100)
    second = train(two, tmp_path, every=100)
    assert second.steps == first.steps == STEPS
    assert_bitwise_equal(second.state, first.state)
    assert second.history.rows == first.history.rows
    assert second.history.losses == first.history.losses


def test_path_without_checkpoints_starts_from_the_beginning(two, tmp_path):
    assert fit(two, DATA, batch_size=60, epochs=1, resume=tmp_path / "none").steps == 9


def test_checkpoint_of_another_model_raises_with_the_leaves_that_differ(two, tmp_path):
    train(two, tmp_path, stop_at=3)
    other = jdist.Trainer(
        (lambda key, x: {"w": np.zeros((64, 10), np.float32)}, lambda params, x: x @ params["w"]),
        optax.adam(3e-3),
        optax.softmax_cross_entropy_with_integer_labels,
        strategy=two,
    )
    with pytest.raises(ValueError, match="does not match `like`") as error:
        other.fit(DATA, batch_size=60, resume=tmp_path, progress="off")
    assert "Dense_0" in str(error.value)
    assert "more" in str(error.value)


def test_checkpoint_of_other_data_raises(two, tmp_path):
    train(two, tmp_path, stop_at=3)
    message = "The position was taken with examples=500, but this data set has examples=499"
    with pytest.raises(ValueError, match=message):
        trainer(two).fit(tuple(x[:499] for x in DATA), batch_size=60, resume=tmp_path, progress="off")


@pytest.mark.slow
def test_callbacks_in_another_order_and_new_ones_get_their_states(two, tmp_path):
    fast, slow, stopping = (
        lambda: jdist.callbacks.EMA(0.5), lambda: jdist.callbacks.EMA(0.9), lambda: jdist.callbacks.EarlyStopping("loss")
    )  # fmt: skip

    def run(path, *makes, epochs):
        callbacks = [make() for make in makes]
        with jdist.Checkpointer(path) as checkpointer:
            save = jdist.callbacks.Checkpoint(checkpointer)
            fit(two, DATA, batch_size=60, epochs=epochs, callbacks=[*callbacks, save], resume=checkpointer)
        return callbacks

    expected_fast, expected_slow = run(tmp_path / "a", fast, slow, epochs=2)
    run(tmp_path / "b", fast, slow, epochs=1)
    _, resumed_slow, resumed_fast = run(tmp_path / "b", stopping, slow, fast, epochs=2)
    assert_bitwise_equal(resumed_fast.params, expected_fast.params)
    assert_bitwise_equal(resumed_slow.params, expected_slow.params)


@pytest.mark.slow
def test_checkpoint_at_the_end_of_an_epoch_contains_the_states_of_callbacks_after_it(two, tmp_path):
    """Early stopping that is resumed directly after an epoch stops at the same step."""

    def train_until_stop(path, stops):
        for stop_at in stops:
            stopping = jdist.callbacks.EarlyStopping("loss", patience=1, min_delta=10.0, restore_best=False)
            stop = lambda event, at=stop_at: (
                CallbackResult(stop_reason="") if event.step == at and event.moment is Moment.STEP else None
            )
            with jdist.Checkpointer(path, every=9) as checkpointer:
                save = jdist.callbacks.Checkpoint(checkpointer)
                result = fit(two, DATA, batch_size=60, callbacks=[save, stopping, stop], resume=checkpointer)
        return result

    uninterrupted = train_until_stop(tmp_path / "a", [None])
    resumed = train_until_stop(tmp_path / "b", [10, None])
    assert uninterrupted.steps == resumed.steps == 18
    assert uninterrupted.stop_reason == resumed.stop_reason
    assert len(resumed.history.rows) == 2
