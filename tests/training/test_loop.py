"""The loop: what is told when, and how it ends: Ctrl-C, losses that are not finite, errors of callbacks and of data."""

import os
import signal
import sys
import threading

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jdist
from jdist.callbacks import CallbackResult, Moment

from small_fits import assert_bitwise_equal, digits, fit, to_host, trainer

SMALL = tuple(array[:240] for array in digits())  # 4 batches of 60


def small(strategy, **options):
    return fit(strategy, SMALL, **{"batch_size": 60, "epochs": 2, **options})


@pytest.fixture(autouse=True)
def ctrl_c_interrupts():
    """As in a terminal: whoever starts the tests in the background has Ctrl-C ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("a_call", [1, 3])
def test_callbacks_are_told_in_order_of_every_call_epoch_and_end(two, a_call):
    told = []

    def note(event):
        told.append((event.moment.name, event.step, event.epoch, event.examples))
        if event.moment is Moment.EPOCH:
            assert {"loss", "accuracy"} == set(event.metrics)
            assert set(event.logs) == {"loss", "accuracy", "val_loss", "val_accuracy"}
        assert event.total_steps == 8

    small(two, callbacks=[note], steps_per_call=a_call, validation_data=SMALL)
    steps = [1, 2, 3, 4] if a_call == 1 else [3, 4]
    expected = [("START", 0, 0, 0)]
    for epoch in (0, 1):
        expected += [("STEP", 4 * epoch + step, epoch) for step in steps] + [("EPOCH", 4 * epoch + 4, epoch)]
    expected += [("END", 8, 1)]
    assert [one[:3] for one in told] == [one[:3] for one in expected]
    assert told[-1][3] == 480


def test_names_of_an_epoch_are_known_before_it(two):
    events = []
    small(two, callbacks=[events.append], epochs=1, validation_data=SMALL)
    assert list(events[0].metric_names) == list(events[-2].logs) == ["loss", "accuracy", "val_loss", "val_accuracy"]


@pytest.mark.parametrize("a_call", [1, 4])
def test_batches_of_steps_that_are_over_are_not_kept(two, a_call):
    kept = []
    batches = lambda event: kept.append(sum(x.shape == (2, 6, 64) for x in jax.live_arrays())) and None
    small(two, batch_size=12, epochs=3, steps_per_call=a_call, callbacks=[batches])
    assert len(kept) > 60 / a_call
    assert max(kept) <= 2 * a_call + 3  # those of a call, and of the next; some are on their way


def test_metrics_within_an_epoch_are_those_of_its_examples_so_far(two):
    seen = []
    note = lambda event: seen.append((event.moment, event.metrics, event.position)) and None
    small(two, callbacks=[note], epochs=1, shuffle=False, optimizer=optax.sgd(0.0))
    of_two = trainer(two)
    state = of_two.init(SMALL[0])
    for number, (moment, metrics, position) in enumerate(seen[1:5], start=1):
        part = tuple(array[: 60 * number] for array in SMALL)
        expected = of_two.evaluate(state, part, batch_size=60)
        assert moment is Moment.STEP and position["batch"] == number
        assert metrics["accuracy"] == pytest.approx(expected["accuracy"], abs=1e-6)
        assert metrics["loss"] == pytest.approx(expected["loss"], abs=1e-5)
    assert seen[5][1] == seen[4][1] == seen[6][1]  # of the epoch that has ended


def test_callback_stops_training_with_its_sentence(two):
    stop = lambda event: CallbackResult(stop_reason="Enough.") if event.step == 3 else None
    found = small(two, callbacks=[stop])
    assert (found.stop_reason, found.steps, int(found.state.step)) == ("Enough.", 3, 3)
    assert_bitwise_equal(found.state, small(two, epochs=None, steps=3).state)


def test_callback_hands_in_another_state_and_all_are_told_the_same(two):
    steps_seen = []
    first = {}

    def swap(event):
        if event.moment is Moment.START:
            first["state"] = jax.tree.map(jnp.copy, event.state)
        if event.moment is Moment.END:
            return CallbackResult(state=first["state"])

    look = lambda event: steps_seen.append(int(event.state.step))
    found = small(two, callbacks=[swap, look])
    assert int(found.state.step) == 0
    assert steps_seen[-1] == 8


def test_answer_of_another_kind_is_refused(two):
    with pytest.raises(TypeError, match="The callback wrong returned 3: a callback returns None, or a"):

        def wrong(event):
            return 3

        small(two, callbacks=[wrong])


def failing_at(step):
    def fails(event):
        if event.moment is Moment.STEP and event.step == step:
            raise OSError("no space left")

    return fails


def test_error_of_a_callback_comes_with_the_state_so_far(two):
    closed = []

    class Closes:
        def __call__(self, event):
            return None

        def close(self):
            closed.append(1)

    with pytest.raises(jdist.FitError, match="behind step 5 by OSError: no space left") as error:
        small(two, callbacks=[failing_at(5), Closes()])
    assert isinstance(error.value.__cause__, OSError)
    assert error.value.fit.steps == int(error.value.fit.state.step) == 5
    assert len(error.value.fit.history.rows) == 1
    assert closed == [1]
    assert_bitwise_equal(error.value.fit.state, small(two, epochs=None, steps=5).state)


def test_error_before_the_first_step_is_itself(two):
    with pytest.raises(OSError, match="no space left"):
        small(two, callbacks=[lambda event: failing_at(0)(event) or _fail(event)])


def _fail(event):
    raise OSError("no space left")


def _failing_loss(step):
    """A loss whose program raises on the host in this step, once."""
    calls = []

    def check(value):
        calls.append(1)
        if len(calls) == step:
            raise RuntimeError("the disk of the loss is full")
        return value

    def loss(outputs, targets):
        checked = jax.experimental.io_callback(check, jax.ShapeDtypeStruct((), np.float32), targets.sum())
        return jnp.square(outputs - targets) + 0 * checked

    return loss


LINE = (lambda key, x: jnp.zeros(x.shape[-1]), lambda w, x: x @ w)
ROWS = np.random.default_rng(0).normal(size=(24, 3)).astype(np.float32)


# On one device: of several, XLA ends the process where one fails and the others wait for it.
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("step", [1, 4])
def test_error_at_run_time_of_a_step_says_that_the_state_is_lost_and_where_a_checkpoint_is(step, tmp_path):
    failing = jdist.Trainer(LINE, optax.sgd(0.1), _failing_loss(step), strategy=jdist.OneDeviceStrategy("cpu:0"))
    # Of a state that was just saved, the host may have the arrays: the step does not get its memory, and it is not lost.
    with jdist.Checkpointer(tmp_path, every=2) as checkpointer:
        saving = jdist.callbacks.Checkpoint(checkpointer)
        with pytest.raises(jdist.FitError, match="The state is lost: the step had taken its memory over") as error:
            failing.fit((ROWS, ROWS[:, 0]), batch_size=4, callbacks=[saving], progress="off")
    assert error.value.fit.state is None and isinstance(error.value.__cause__, jax.errors.JaxRuntimeError)
    assert "the disk of the loss is full" in str(error.value)
    assert "state: lost: an error ended the step" in repr(error.value.fit)
    if step == 1:
        assert "There is no checkpoint to go on from" in str(error.value)
        return
    assert f"The last checkpoint is that of step 2, in {str(tmp_path)!r}: `fit(resume=" in str(error.value)
    assert failing.fit((ROWS, ROWS[:, 0]), batch_size=4, resume=tmp_path, progress="off").steps == 6


def test_every_callback_is_closed_though_one_cannot_be(two):
    closed = []

    class Closes:
        def __init__(self, fails):
            self.fails = fails

        def __call__(self, event):
            return None

        def close(self):
            closed.append(self.fails)
            if self.fails:
                raise OSError("cannot be closed")

    with pytest.raises(OSError, match="cannot be closed"):
        small(two, callbacks=[Closes(False), Closes(True), Closes(False)])
    assert sorted(closed) == [False, False, True]


def test_error_of_the_data_comes_with_the_state_so_far(two):
    class Broken:
        def __iter__(self):
            yield from ((SMALL[0][i : i + 60], SMALL[1][i : i + 60]) for i in range(0, 180, 60))
            raise OSError("disk gone")

    with pytest.raises(jdist.FitError, match="disk gone") as error:
        trainer(two).fit(Broken(), progress="off")
    # The batch behind the last one is asked for before a step is taken, to know whether it is the last of its epoch.
    assert error.value.fit.steps == int(error.value.fit.state.step) == 2


def poisoned(number):
    """The small data with a batch that makes the loss nan."""
    images = SMALL[0].copy()
    images[60 * number] = np.nan
    return images, SMALL[1]


@pytest.mark.parametrize("a_call", [1, 3])
def test_loss_that_is_not_finite_stops_with_the_state_before(two, a_call):
    found = fit(two, poisoned(2), batch_size=60, epochs=2, shuffle=False, steps_per_call=a_call)
    assert found.stop_reason == "The loss of step 3 is nan, of batch 2 of epoch 0. The state is that before the step."
    assert found.steps == int(found.state.step) == 2
    assert_bitwise_equal(found.state, fit(two, SMALL, batch_size=60, epochs=None, steps=2, shuffle=False).state)
    assert list(found.history.losses) == [1, 2, 3]
    assert np.isnan(found.history.losses[3])


def test_loss_that_is_not_finite_is_skipped(two):
    found = fit(
        two,
        poisoned(2),
        batch_size=60,
        epochs=1,
        shuffle=False,
        optimizer=optax.sgd(0.1),
        trainer_options={"non_finite": "skip"},
    )
    without = tuple(np.concatenate([array[:120], array[180:]]) for array in SMALL)
    expected = fit(two, without, batch_size=60, epochs=1, shuffle=False, optimizer=optax.sgd(0.1))
    assert_bitwise_equal(found.state.params, expected.state.params)
    assert found.steps == int(found.state.step) == 4
    assert found.history["loss"] == pytest.approx(expected.history["loss"])


def test_loss_that_is_not_finite_is_kept_if_asked_for(two):
    found = fit(two, poisoned(2), batch_size=60, epochs=1, shuffle=False, trainer_options={"non_finite": "keep"})
    assert found.steps == 4
    assert not all(np.isfinite(leaf).all() for leaf in to_host(found.state.params))


def test_data_that_end_before_the_steps_say_so(two):
    found = small(two, epochs=1, steps=10)
    assert (found.stop_reason, found.steps) == ("The data ended after 4 of 10 steps.", 4)


def test_no_step_at_all_gives_the_state_that_there_is(two):
    found = small(two, epochs=None, steps=0)
    assert (found.steps, found.history.rows, found.stop_reason) == (0, (), "All requested steps were taken.")


def test_ctrl_c_in_a_step_ends_after_it_with_its_state(two):
    press = lambda event: (
        os.kill(os.getpid(), signal.SIGINT) if event.moment is Moment.STEP and event.step == 3 else None
    )
    found = small(two, callbacks=[press])
    assert (found.stop_reason, found.steps, int(found.state.step)) == ("Ctrl-C was pressed.", 3, 3)
    assert_bitwise_equal(found.state, small(two, epochs=None, steps=3).state)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_ctrl_c_while_waiting_for_data_ends_with_the_state_so_far(two):
    class Slow:
        def __iter__(self):
            yield from ((SMALL[0][i : i + 60], SMALL[1][i : i + 60]) for i in range(0, 240, 60))
            threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
            threading.Event().wait(60)

    found = trainer(two).fit(Slow(), progress="off")
    assert found.stop_reason == "Ctrl-C was pressed."
    assert found.steps == int(found.state.step) == 3


def test_ctrl_c_twice_in_a_step_interrupts(two):
    def press(event):
        if event.moment is Moment.STEP and event.step == 3:
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        small(two, callbacks=[press])
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_fit_in_another_thread_than_the_main_one_trains(two):
    found = []
    thread = threading.Thread(target=lambda: found.append(small(two, epochs=1)))
    thread.start()
    thread.join()
    assert found[0].steps == 4


def test_handler_of_somebody_else_is_left_alone(two):
    heard = []
    before = signal.signal(signal.SIGINT, lambda *_: heard.append(1))
    try:
        press = lambda event: os.kill(os.getpid(), signal.SIGINT) if event.step == 3 else None
        assert small(two, callbacks=[press]).steps == 8
    finally:
        signal.signal(signal.SIGINT, before)
    assert heard


def test_report_of_a_fit_is_a_page_with_its_numbers(two, tmp_path):
    found = small(two, validation_data=SMALL)
    text = found.report(tmp_path / "run.html").read_text()
    for said in (found.stop_reason, "MirroredStrategy", str(found.proof), jax.__version__, sys.version.split()[0]):
        assert said in text
