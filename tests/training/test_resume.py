"""Training that is interrupted and goes on ends in the bits of training that is not."""

import random

import jax
import numpy as np
import optax
import pytest

import jdist
from jdist.callbacks import CallbackResult, Moment

from laws import STRATEGIES
from small_fits import assert_bitwise_equal, digits, fit, trainer

DATA = tuple(array[:500] for array in digits())  # 9 batches of 60 an epoch, the last of which has 20
STEPS = 27


def train(strategy, path=None, stop_at=None, every=1, **options):
    """Three epochs with checkpoints, from the newest there is, until `stop_at`."""
    stops = lambda event: (
        CallbackResult(stop_reason="Killed.") if event.moment is Moment.STEP and event.step == stop_at else None
    )
    if path is None:
        return fit(strategy, DATA, batch_size=60, **options)
    with jdist.Checkpointer(path, every=every) as checkpointer:
        saves = jdist.callbacks.Checkpoint(checkpointer)
        # Who is killed does not save at the end.
        until_killed = lambda event: saves(event) if stop_at is None or event.moment is not Moment.END else None
        return fit(strategy, DATA, batch_size=60, callbacks=[until_killed, stops], resume=checkpointer, **options)


def interrupted(strategy, path, seed, every=1, **options):
    """Is stopped at three random steps, each time behind the one before, and goes on from the last checkpoint."""
    for step in sorted(random.Random(seed).sample(range(2, STEPS), 3)):
        train(strategy, path, stop_at=step, every=every, **options)
    return train(strategy, path, every=every, **options)


CASES = {
    "adam": dict(optimizer=optax.adam(3e-3)),
    "a_call_of_several": dict(steps_per_call=2),
    "int8": dict(optimizer=optax.chain(jdist.sync.int8(), optax.sgd(0.1))),
    "top_k": dict(optimizer=optax.chain(jdist.sync.top_k(0.1), optax.sgd(0.1))),
    "local_sgd": dict(optimizer=jdist.sync.local_sgd(optax.sgd(0.1, momentum=0.9), every=4)),
    "every": dict(optimizer=jdist.sync.every(optax.chain(jdist.sync.mean(), optax.adam(3e-3)), 2)),
}


@pytest.mark.parametrize(
    "options",
    [
        pytest.param(options, id=name, marks=() if name == "adam" else pytest.mark.slow)
        for name, options in CASES.items()
    ],
)
def test_interrupted_training_ends_in_the_same_bits(two, tmp_path, options):
    found = interrupted(two, tmp_path, seed=0, every=3, **options)
    expected = train(two, **options)
    assert found.steps == expected.steps == STEPS
    assert_bitwise_equal(found.state, expected.state)
    for row, straight in zip(found.history.rows, expected.history.rows, strict=True):
        assert row["step"] == straight["step"]
        assert row["loss"] == pytest.approx(straight["loss"], rel=1e-6)
        assert row["accuracy"] == pytest.approx(straight["accuracy"], rel=1e-6)
    assert found.history.losses == expected.history.losses


@pytest.mark.slow
@pytest.mark.parametrize("place", ["one_device", "mirrored_3", "sharded_4", "central_2"])
def test_interrupted_training_ends_in_the_same_bits_under_every_strategy(place, tmp_path):
    strategy = STRATEGIES[place]()
    assert_bitwise_equal(interrupted(strategy, tmp_path, seed=1, every=2).state, train(strategy).state)


@pytest.mark.slow
def test_exact_training_goes_on_over_another_number_of_devices_to_the_same_bits(tmp_path):
    exact = dict(optimizer=optax.chain(jdist.sync.exact(), optax.adam(3e-3)))
    on = lambda n: jdist.MirroredStrategy([f"cpu:{i}" for i in range(n)], virtual_replicas=4)
    train(on(1), tmp_path, stop_at=5, **exact)
    train(on(4), tmp_path, stop_at=16, **exact)
    assert_bitwise_equal(train(on(2), tmp_path, **exact).state, train(on(2), **exact).state)


@pytest.mark.slow
def test_training_goes_on_under_another_strategy(two, tmp_path):
    train(two, tmp_path, stop_at=13)
    other = train(STRATEGIES["sharded_4"](), tmp_path)
    assert other.steps == STEPS
    for a, b in zip(jax.tree.leaves(other.state.params), jax.tree.leaves(train(two).state.params), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)


def test_training_that_is_at_its_end_takes_no_further_step(two, tmp_path):
    first = train(two, tmp_path, every=100)
    again = train(two, tmp_path, every=100)
    assert again.steps == first.steps == STEPS
    assert_bitwise_equal(again.state, first.state)
    assert again.history.rows == first.history.rows
    assert again.history.losses == first.history.losses


@pytest.mark.slow
def test_callbacks_go_on_with_what_they_kept(two, tmp_path):
    averages = {}

    def averaged(path, stops):
        for stop_at in stops:
            ema = jdist.callbacks.EMA(0.9)
            stop = lambda event, at=stop_at: (
                CallbackResult(stop_reason="") if event.step == at and event.moment is Moment.STEP else None
            )
            with jdist.Checkpointer(path) as checkpointer:
                saving = jdist.callbacks.Checkpoint(checkpointer)
                fit(two, DATA, batch_size=60, callbacks=[ema, saving, stop], resume=checkpointer)
        return ema.params

    averages["straight"] = averaged(tmp_path / "a", [None])
    averages["resumed"] = averaged(tmp_path / "b", [7, 20, None])
    assert_bitwise_equal(averages["straight"], averages["resumed"])


@pytest.mark.slow
def test_path_of_checkpoints_is_enough_to_go_on(two, tmp_path):
    train(two, tmp_path, stop_at=13)
    found = fit(two, DATA, batch_size=60, resume=tmp_path)
    assert_bitwise_equal(found.state, train(two).state)


def test_path_without_checkpoints_begins_anew(two, tmp_path):
    assert fit(two, DATA, batch_size=60, epochs=1, resume=tmp_path / "none").steps == 9


def test_checkpoint_of_another_model_is_refused_with_the_leaves_that_differ(two, tmp_path):
    train(two, tmp_path, stop_at=3)
    other = jdist.Trainer(
        (lambda key, x: {"w": np.zeros((64, 10), np.float32)}, lambda params, x: x @ params["w"]),
        optax.adam(3e-3),
        optax.softmax_cross_entropy_with_integer_labels,
        strategy=two,
    )
    with pytest.raises(ValueError, match="holds another state than `like`") as error:
        other.fit(DATA, batch_size=60, resume=tmp_path, progress="off")
    assert "Dense_0" in str(error.value)
    assert "more" in str(error.value)


def test_checkpoint_of_other_data_is_refused(two, tmp_path):
    train(two, tmp_path, stop_at=3)
    with pytest.raises(
        ValueError, match="The position was taken with examples=500, and this data set has examples=499"
    ):
        trainer(two).fit(tuple(x[:499] for x in DATA), batch_size=60, resume=tmp_path, progress="off")


def test_callbacks_that_are_fewer_than_were_are_refused(two, tmp_path):
    with jdist.Checkpointer(tmp_path) as checkpointer:
        kept = [jdist.callbacks.EMA(0.9), jdist.callbacks.Checkpoint(checkpointer)]
        fit(two, DATA, batch_size=60, epochs=1, callbacks=kept)
    with pytest.raises(
        ValueError, match=r"has the memory of EMA\(0\.9, debias=True\), and `callbacks` has no such callback"
    ):
        fit(two, DATA, batch_size=60, epochs=2, resume=tmp_path)
    other = [jdist.callbacks.EMA(0.99)]
    with pytest.raises(
        ValueError, match=r"These have one: EMA\(0\.99, debias=True\)\. Pass a callback of the same class"
    ):
        fit(two, DATA, batch_size=60, epochs=2, callbacks=other, resume=tmp_path)


def test_callbacks_in_another_order_and_new_ones_get_their_own_memory(two, tmp_path):
    def run(*callbacks, path, epochs):
        with jdist.Checkpointer(path) as checkpointer:
            saving = jdist.callbacks.Checkpoint(checkpointer)
            fit(two, DATA, batch_size=60, epochs=epochs, callbacks=[*callbacks, saving], resume=checkpointer)
        return callbacks

    fast, slow = run(jdist.callbacks.EMA(0.5), jdist.callbacks.EMA(0.9), path=tmp_path / "a", epochs=2)
    run(jdist.callbacks.EMA(0.5), jdist.callbacks.EMA(0.9), path=tmp_path / "b", epochs=1)
    patient = jdist.callbacks.EarlyStopping("loss", patience=5)
    _, slow_again, fast_again = run(
        patient, jdist.callbacks.EMA(0.9), jdist.callbacks.EMA(0.5), path=tmp_path / "b", epochs=2
    )
    assert_bitwise_equal(fast_again.params, fast.params)
    assert_bitwise_equal(slow_again.params, slow.params)
    # The patience may change: what is remembered does not depend on it.
    run(
        *[fast_again, slow_again, jdist.callbacks.EarlyStopping("loss", patience=9)],
        path=tmp_path / "b",
        epochs=2,
    )


def test_checkpoint_at_the_end_of_an_epoch_has_what_callbacks_made_of_it(two, tmp_path):
    """Early stopping that is resumed right behind an epoch stops where it would have stopped."""

    def stopped(path, stops):
        for stop_at in stops:
            stopping = jdist.callbacks.EarlyStopping("loss", patience=1, min_delta=10.0, restore_best=False)
            stop = lambda event, at=stop_at: (
                CallbackResult(stop_reason="") if event.step == at and event.moment is Moment.STEP else None
            )
            with jdist.Checkpointer(path, every=9) as checkpointer:
                saving = jdist.callbacks.Checkpoint(checkpointer)
                found = fit(two, DATA, batch_size=60, callbacks=[saving, stopping, stop], resume=checkpointer)
        return found

    straight, resumed = stopped(tmp_path / "a", [None]), stopped(tmp_path / "b", [10, None])
    assert straight.steps == resumed.steps == 18
    assert straight.stop_reason == resumed.stop_reason
    assert len(resumed.history.rows) == 2
