"""`callbacks.Preemption` in a single process: real SIGTERM at every moment of `fit`, and the same bits after the restart."""

import os
import signal
import threading

import pytest
from training.small_fits import assert_bitwise_equal, digits, trainer

import jdist
from jdist._src.faults.preemption_notice import PreemptionNotice
from jdist.callbacks import EMA, Callback, Checkpoint, Moment, Preemption

DATA = tuple(array[:120] for array in digits())  # 4 batches of 30 per epoch
OPTIONS = {"batch_size": 30, "epochs": 3, "validation_data": DATA, "progress": "off"}
NOT_COMPARED = ("seconds", "examples_per_second", "stalled_fraction")


class Terminate(Callback):
    """Sends SIGTERM at an event: with a checkpointer after `Preemption` was called with it, otherwise before."""

    def __init__(self, checkpointer, moment, step, times=1):
        self.checkpointer, self._event, self._times = checkpointer, (moment, step), times

    def __call__(self, event):
        if (event.moment, event.step) == self._event:
            for _ in range(self._times):
                os.kill(os.getpid(), signal.SIGTERM)


@pytest.fixture(scope="module")
def train(two):
    """Returns a function that trains with the callbacks that `make(checkpointer)` returns."""
    model = trainer(two)

    def run(path, make, **options):
        with jdist.Checkpointer(path, keep=None, every=100) as checkpointer:
            callbacks = [EMA(0.9), *make(checkpointer)]
            return model.fit(DATA, callbacks=callbacks, resume=checkpointer, **{**OPTIONS, **options})

    return run


@pytest.fixture(scope="module")
def two():
    return jdist.MirroredStrategy(["cpu:0", "cpu:1"])


def undisturbed(train, path, **options):
    return train(path / "undisturbed", lambda checkpointer: [Checkpoint(checkpointer)], **options)


def assert_equal(fit, expected):
    assert_bitwise_equal(fit.state, expected.state)
    assert fit.history.losses == expected.history.losses
    rows, expected_rows = (
        [{name: value for name, value in row.items() if name not in NOT_COMPARED} for row in each.history.rows]
        for each in (fit, expected)
    )
    for row, expected_row in zip(rows, expected_rows, strict=True):  # sums of an epoch are split over the replicas
        assert row == pytest.approx(expected_row, rel=1e-6)
    assert fit.steps == expected.steps == 12


# The event at which SIGTERM arrives, and the step of the checkpoint.
CASES = {
    "before_the_first_step": (Moment.START, 0, 1),
    "between_steps": (Moment.STEP, 5, 6),
    "before_a_validation": (Moment.STEP, 8, 8),
    "after_a_validation": (Moment.EPOCH, 8, 9),
    "after_the_last_step": (Moment.EPOCH, 12, 12),
}


@pytest.mark.parametrize("case", CASES)
def test_sigterm_saves_a_checkpoint_from_which_training_continues_with_the_same_bits(case, train, tmp_path):
    moment, step, saved = CASES[case]
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit) as raised:
        train(
            tmp_path / "run", lambda checkpointer: [Preemption(checkpointer), Terminate(checkpointer, moment, step, 2)]
        )
    assert raised.value.code == 42
    assert signal.getsignal(signal.SIGTERM) is before
    with jdist.Checkpointer(tmp_path / "run") as checkpointer:
        assert checkpointer.steps() == (saved,)
    fit = train(tmp_path / "run", lambda checkpointer: [Checkpoint(checkpointer), Preemption(checkpointer)])
    assert_equal(fit, undisturbed(train, tmp_path))


def test_sigterm_during_a_validation_saves_a_checkpoint_after_it(train, tmp_path):
    class Images:
        num_reads = 0

        def __len__(self):
            return 30

        def __getitem__(self, index):
            Images.num_reads += 1
            if Images.num_reads == 45:  # in the second validation
                os.kill(os.getpid(), signal.SIGTERM)
            return DATA[0][index], DATA[1][index]

    options = {"validation_data": Images()}
    with pytest.raises(SystemExit):
        train(tmp_path / "run", lambda checkpointer: [Preemption(checkpointer)], **options)
    with jdist.Checkpointer(tmp_path / "run") as checkpointer:
        assert checkpointer.steps() == (8,)
    assert_equal(
        train(tmp_path / "run", lambda checkpointer: [Checkpoint(checkpointer)], **options),
        undisturbed(train, tmp_path, **options),
    )


def test_checkpoint_callback_with_the_same_checkpointer_saves_the_step_once(train, tmp_path):
    def make(checkpointer):
        checkpointer.every = 3
        return [Terminate(None, Moment.STEP, 7), Checkpoint(checkpointer), Preemption(checkpointer)]

    with pytest.raises(SystemExit):
        train(tmp_path / "run", make, validation_data=None, steps_per_call=3)
    with jdist.Checkpointer(tmp_path / "run") as checkpointer:
        assert checkpointer.steps() == (3, 7)  # calls of three steps, and of the last step of an epoch


def test_fit_in_another_thread_warns_and_continues(train, tmp_path, caplog):
    fits = []
    run = lambda: fits.append(train(tmp_path / "run", lambda checkpointer: [Preemption(checkpointer)]))
    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert fits[0].steps == 12 and "only the main thread can handle it" in caplog.text


def test_watcher_ends_training(train, tmp_path):
    started = threading.Event()

    def make(checkpointer):
        start = lambda event: started.set() if event.moment is Moment.STEP else None
        return [start, Preemption(checkpointer, watcher=lambda: started.wait(60))]

    with pytest.raises(SystemExit):
        train(tmp_path / "run", make, epochs=100_000)
    with jdist.Checkpointer(tmp_path / "run") as checkpointer:
        assert len(checkpointer.steps()) == 1


def test_notice_before_the_first_step_ends_the_program_without_a_checkpoint(train, tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(PreemptionNotice, "is_agreed", lambda notice: True)  # as JAX's service returns in this case
    with pytest.raises(SystemExit) as raised:
        train(tmp_path / "run", lambda checkpointer: [Preemption(checkpointer)])
    assert raised.value.code == 42 and "Preempted: no step was taken." in caplog.text


def test_argument_of_another_type_is_refused():
    message = r"`Preemption` needs a `jdist.Checkpointer`, got 'run'.*callbacks.Preemption\("
    with pytest.raises(TypeError, match=message):
        Preemption("run")
