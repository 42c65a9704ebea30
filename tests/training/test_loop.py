"""The training loop: its events, and its ends by Ctrl-C, losses that are not finite, errors of callbacks and of data."""

import contextlib
import os
import signal
import sys
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jdist
from jdist.callbacks import CallbackResult, Moment

from small_fits import MLP, assert_bitwise_equal, digits, fit, trainer

SMALL = tuple(array[:240] for array in digits())  # 4 batches of 60


def small(strategy, **options):
    return fit(strategy, SMALL, **{"batch_size": 60, "epochs": 2, **options})


@pytest.fixture(autouse=True)
def ctrl_c_interrupts():
    """Installs the default handler: a shell that starts the tests in the background ignores Ctrl-C."""
    previous_handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, previous_handler)


@pytest.mark.parametrize("steps_per_call", [1, 3])
def test_callbacks_receive_events_of_every_call_epoch_and_end(two, steps_per_call):
    events, names = [], ["loss", "accuracy", "val_loss", "val_accuracy"]

    def record(event):
        events.append((event.moment.name, event.step, event.epoch, event.examples))
        if event.moment is Moment.EPOCH:
            assert {"loss", "accuracy"} == set(event.metrics)
            assert list(event.logs) == names
        assert event.total_steps == 8
        assert list(event.metric_names) == names  # also before the first epoch

    small(two, callbacks=[record], steps_per_call=steps_per_call, validation_data=SMALL)
    steps = [1, 2, 3, 4] if steps_per_call == 1 else [3, 4]
    expected = [("START", 0, 0, 0)]
    for epoch in (0, 1):
        expected += [("STEP", 4 * epoch + step, epoch) for step in steps] + [("EPOCH", 4 * epoch + 4, epoch)]
    expected += [("END", 8, 1)]
    assert [event[:3] for event in events] == [event[:3] for event in expected]
    assert events[-1][3] == 480


def test_callbacks_that_need_few_step_events_receive_the_first_of_fit_and_the_last_of_each_epoch(two):
    class Seldom(jdist.callbacks.Callback):
        step_interval_seconds = 1e6

        def __init__(self):
            self.steps = []

        def __call__(self, event):
            self.steps += [event.step] if event.moment is Moment.STEP else []

    alone, together = Seldom(), Seldom()
    small(two, callbacks=[alone])
    small(two, callbacks=[together, lambda event: None])
    assert alone.steps == [1, 4, 8]
    assert together.steps == [1, 2, 3, 4, 5, 6, 7, 8]


class _Guard(jdist.callbacks.Callback):
    """Refuses implicit transfers between the first step and the last one."""

    def __init__(self):
        self.stack = contextlib.ExitStack()

    def __call__(self, event):
        if event.moment is Moment.START:
            self.stack.enter_context(jdist.testing.assert_no_transfer())
        if event.moment is Moment.END:
            self.stack.close()

    def close(self):
        self.stack.close()


GUARDED = {
    "one step per call": {},
    "two steps per call": {"steps_per_call": 2},
    "micro-batches": {"micro_batches": 2},
    "cached": {"cache": "device"},
    "validation": {"validation_data": SMALL, "validate_every": 3},
    "wide": {"data": (np.repeat(SMALL[0], 400, axis=1), SMALL[1])},  # parameters of more than a megabyte
}


@pytest.mark.parametrize("options", GUARDED.values(), ids=GUARDED)
def test_compiled_training_transfers_nothing_implicitly(options, strategy):
    options = {"data": SMALL, "batch_size": 60, "epochs": 2, "progress": "off", **options}
    trained = trainer(strategy)
    trained.fit(**options)
    trained.fit(**options, callbacks=[_Guard()])


def test_callbacks_transfer_nothing_implicitly(strategy, tmp_path):
    trained = trainer(strategy)
    for folder, guard in (("first", []), ("second", [_Guard()])):
        with jdist.Checkpointer(tmp_path / folder, every=3) as checkpointer:
            own = [
                jdist.callbacks.EMA(0.9),
                jdist.callbacks.CSVLog(tmp_path / f"{folder}.csv"),
                jdist.callbacks.JSONLog(tmp_path / f"{folder}.jsonl"),
                jdist.callbacks.Rows(lambda row, step: None),
                jdist.callbacks.EarlyStopping("loss"),
                jdist.callbacks.Checkpoint(checkpointer),
                jdist.callbacks.Preemption(checkpointer),
            ]
            trained.fit(SMALL, batch_size=60, epochs=2, progress="off", callbacks=[*guard, *own])


@pytest.mark.parametrize("options", [{}, {"norms": True}, {"steps_per_call": 2}, {"micro_batches": 2}], ids=str)
def test_later_calls_compile_nothing(options, two):
    digits_trainer, names = trainer(two), []
    arguments = {"batch_size": 240, "epochs": 1, "progress": "off", "validation_data": digits(), **options}
    state = digits_trainer.fit(digits(), **arguments).state
    digits_trainer.evaluate(state, digits(), batch_size=240), digits_trainer.predict(state, digits(), batch_size=240)
    listen = lambda event, duration, **_: names.append(event)
    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        digits_trainer.fit(digits(), **arguments)
        state = digits_trainer.fit(digits(), state=state, **arguments).state
        (
            digits_trainer.evaluate(state, digits(), batch_size=240),
            digits_trainer.predict(state, digits(), batch_size=240),
        )
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
    assert "/jax/core/compile/backend_compile_duration" not in names


def test_functions_are_traced_and_callbacks_called_under_the_transfer_guard_of_the_application(two):
    # A GPU copies an array that a loss closes over to the host when it compiles; a guard of `fit` would forbid that.
    scale, seen = jnp.float32(2), []

    def loss(logits, labels):
        seen.append(jax.config.jax_transfer_guard_device_to_host)
        return scale * optax.softmax_cross_entropy_with_integer_labels(logits, labels)

    trained = jdist.Trainer(MLP(), optax.adam(3e-3), loss, strategy=two)
    see = lambda event: seen.append(jax.config.jax_transfer_guard_device_to_host)
    trained.fit(SMALL, batch_size=60, callbacks=[see], validation_data=SMALL, progress="off")
    assert len(seen) > 6
    assert set(seen) == {jax.config.jax_transfer_guard_device_to_host}


@pytest.mark.parametrize("steps_per_call", [1, 4])
def test_batches_are_released_after_their_step(two, steps_per_call):
    counts = []
    count_batches = lambda event: counts.append(sum(x.shape == (2, 6, 64) for x in jax.live_arrays()))
    small(two, batch_size=12, epochs=3, steps_per_call=steps_per_call, callbacks=[count_batches])
    assert len(counts) > 60 / steps_per_call
    assert max(counts) <= 2 * steps_per_call + 3  # of this call, of the next call, and prefetched ones


def test_metrics_within_an_epoch_cover_its_examples_so_far(two):
    events = []
    record = lambda event: events.append((event.moment, event.metrics, event.position))
    small(two, callbacks=[record], epochs=1, shuffle=False, optimizer=optax.sgd(0.0))
    of_two = trainer(two)
    state = of_two.init(SMALL[0])
    for number, (moment, metrics, position) in enumerate(events[1:5], start=1):
        part = tuple(array[: 60 * number] for array in SMALL)
        expected = of_two.evaluate(state, part, batch_size=60)
        assert moment is Moment.STEP and position["batch"] == number
        assert metrics["accuracy"] == pytest.approx(expected["accuracy"], abs=1e-6)
        assert metrics["loss"] == pytest.approx(expected["loss"], abs=1e-5)
    assert events[5][1] == events[4][1] == events[6][1]  # the metrics of the complete epoch


def test_callback_stops_training_with_its_reason(two):
    stop = lambda event: CallbackResult(stop_reason="Enough.") if event.step == 3 else None
    result = small(two, callbacks=[stop])
    assert (result.stop_reason, result.steps, int(result.state.step)) == ("Enough.", 3, 3)
    assert_bitwise_equal(result.state, small(two, epochs=None, steps=3).state)


def test_callback_replaces_the_state_after_all_callbacks_received_the_event(two):
    steps = []
    copies = {}

    def swap(event):
        if event.moment is Moment.START:
            copies["state"] = jax.tree.map(jnp.copy, event.state)
        if event.moment is Moment.END:
            return CallbackResult(state=copies["state"])

    record = lambda event: steps.append(int(event.state.step))
    result = small(two, callbacks=[swap, record])
    assert int(result.state.step) == 0
    assert steps[-1] == 8


def test_wrong_result_of_a_callback_raises(two):
    def wrong(event):
        return 3

    with pytest.raises(TypeError, match="The callback wrong returned 3. A callback must return None, or a"):
        small(two, callbacks=[wrong])


def test_error_of_a_callback_contains_the_state_so_far(two):
    closed = []

    class Closes(jdist.callbacks.Callback):
        def close(self):
            closed.append(1)

    def fails(event):
        if event.moment is Moment.STEP and event.step == 5:
            raise OSError("no space left")

    with pytest.raises(jdist.FitError, match="Training failed after step 5: OSError: no space left") as error:
        small(two, callbacks=[fails, Closes()])
    assert isinstance(error.value.__cause__, OSError)
    assert error.value.fit.steps == int(error.value.fit.state.step) == 5
    assert len(error.value.fit.history.rows) == 1
    assert closed == [1]
    assert_bitwise_equal(error.value.fit.state, small(two, epochs=None, steps=5).state)


def test_error_before_the_first_step_is_not_wrapped(two):
    def fails(event):
        raise OSError("no space left")

    with pytest.raises(OSError, match="no space left"):
        small(two, callbacks=[fails])


def _failing_loss(step):
    """Returns a loss whose program raises on the host in this step, once."""
    calls = []

    def check(value):
        calls.append(1)
        if len(calls) == step:
            raise RuntimeError("the disk of the loss is full")
        return value

    def loss(outputs, targets):
        zero = 0 * jax.experimental.io_callback(check, jax.ShapeDtypeStruct((), np.float32), targets.sum())
        return jnp.square(outputs - targets) + zero

    return loss


LINEAR = (lambda key, x: jnp.zeros(x.shape[-1]), lambda w, x: x @ w)
X = np.random.default_rng(0).normal(size=(24, 3)).astype(np.float32)


# On one device: with several, XLA aborts the process if one fails while the others wait for it.
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("step", [1, 4])
def test_error_at_run_time_reports_the_lost_state_and_the_last_checkpoint(step, tmp_path):
    failing = jdist.Trainer(LINEAR, optax.sgd(0.1), _failing_loss(step), strategy=jdist.OneDeviceStrategy("cpu:0"))
    # The host may still use the arrays of a state that was just saved; then its buffers are not donated, and it is not lost.
    with jdist.Checkpointer(tmp_path, every=2) as checkpointer:
        save = jdist.callbacks.Checkpoint(checkpointer)
        with pytest.raises(jdist.FitError, match="The state is lost: it was donated to the step that failed") as error:
            failing.fit((X, X[:, 0]), batch_size=4, callbacks=[save], progress="off")
    assert error.value.fit.state is None and isinstance(error.value.__cause__, jax.errors.JaxRuntimeError)
    assert "the disk of the loss is full" in str(error.value)
    assert "state: lost: an error ended the step" in repr(error.value.fit)
    if step == 1:
        assert "There is no checkpoint to resume from" in str(error.value)
        return
    assert f"The last checkpoint is that of step 2, in {str(tmp_path)!r}: `fit(resume=" in str(error.value)
    assert failing.fit((X, X[:, 0]), batch_size=4, resume=tmp_path, progress="off").steps == 6


def test_every_callback_is_closed_if_one_raises(two):
    closed = []

    class Closes(jdist.callbacks.Callback):
        def __init__(self, fails):
            self.fails = fails

        def close(self):
            closed.append(self.fails)
            if self.fails:
                raise OSError("cannot be closed")

    with pytest.raises(OSError, match="cannot be closed"):
        small(two, callbacks=[Closes(False), Closes(True), Closes(False)])
    assert sorted(closed) == [False, False, True]


def test_error_of_the_data_contains_the_state_so_far(two):
    class Broken:
        def __iter__(self):
            yield from ((SMALL[0][i : i + 60], SMALL[1][i : i + 60]) for i in range(0, 180, 60))
            raise OSError("disk gone")

    with pytest.raises(jdist.FitError, match="disk gone") as error:
        trainer(two).fit(Broken(), progress="off")
    # The next batch is drawn before a step is taken, to find out whether the step ends an epoch.
    assert error.value.fit.steps == int(error.value.fit.state.step) == 2


@pytest.mark.parametrize("steps_per_call", [1, 3])
def test_non_finite_loss_stops_with_the_state_before_it(two, steps_per_call):
    images = SMALL[0].copy()
    images[60 * 2] = np.nan
    options = {"batch_size": 60, "shuffle": False}
    result = fit(two, (images, SMALL[1]), epochs=2, steps_per_call=steps_per_call, **options)
    reason = "The loss of step 3 is nan (batch 2 of epoch 0). The state is the one before that step."
    assert (result.stop_reason, result.steps, int(result.state.step)) == (reason, 2, 2)
    assert_bitwise_equal(result.state, fit(two, SMALL, epochs=None, steps=2, **options).state)
    assert list(result.history.losses) == [1, 2, 3]
    assert np.isnan(result.history.losses[3])


def test_reasons_to_stop_without_a_step_and_with_data_that_end_before_the_requested_steps(two):
    result = small(two, epochs=None, steps=0)
    assert (result.steps, result.history.rows, result.stop_reason) == (0, (), "All requested steps were taken.")
    result = small(two, epochs=1, steps=10)
    assert (result.stop_reason, result.steps) == ("The data ended after 4 of 10 steps.", 4)


def press_ctrl_c_after_step_3(times):
    def press(event):
        if event.moment is Moment.STEP and event.step == 3:
            for _ in range(times):
                os.kill(os.getpid(), signal.SIGINT)

    return press


def test_ctrl_c_during_a_step_ends_training_after_it(two):
    result = small(two, callbacks=[press_ctrl_c_after_step_3(1)])
    assert (result.stop_reason, result.steps, int(result.state.step)) == ("Ctrl-C was pressed.", 3, 3)
    assert_bitwise_equal(result.state, small(two, epochs=None, steps=3).state)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_ctrl_c_while_waiting_for_data_ends_training(two):
    waits = threading.Event()

    class Slow:
        def __iter__(self):
            yield from ((SMALL[0][i : i + 60], SMALL[1][i : i + 60]) for i in range(0, 240, 60))
            assert waits.wait(60)
            time.sleep(0.3)  # until the loop waits
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(3)

    after_step_3 = lambda event: waits.set() if event.moment is Moment.STEP and event.step == 3 else None
    result = trainer(two).fit(Slow(), callbacks=[after_step_3], progress="off")
    assert result.stop_reason == "Ctrl-C was pressed."
    assert result.steps == int(result.state.step) == 3


def test_ctrl_c_twice_during_a_step_raises(two):
    with pytest.raises(KeyboardInterrupt):
        small(two, callbacks=[press_ctrl_c_after_step_3(2)])
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_fit_works_in_another_thread(two):
    results = []
    thread = threading.Thread(target=lambda: results.append(small(two, epochs=1)))
    thread.start()
    thread.join()
    assert results[0].steps == 4


def test_handler_of_the_application_is_not_replaced(two):
    signals = []
    signal.signal(signal.SIGINT, lambda *_: signals.append(1))  # the fixture restores the previous handler
    assert small(two, callbacks=[press_ctrl_c_after_step_3(1)]).steps == 8
    assert signals


def test_report_of_a_fit_contains_its_results(two, tmp_path):
    result = small(two, validation_data=SMALL)
    text = result.report(tmp_path / "run.html").read_text()
    python = sys.version.split()[0]
    for expected in (
        result.stop_reason,
        "MirroredStrategy",
        str(result.proof).splitlines()[0],
        jax.__version__,
        python,
    ):
        assert expected in text
