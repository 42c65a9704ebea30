"""`PreemptionCheckpointHandler` in a single process. Rows PE1 and PE2 of `tests/parity/rows.txt`."""

import os
import signal
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jdist
from jdist._src.core.exit_statuses import PREEMPTED

from laws import STRATEGIES

ROWS = np.random.default_rng(0).normal(size=(12, 3)).astype(np.float32)


def terminate():
    os.kill(os.getpid(), signal.SIGTERM)


@pytest.fixture(scope="module")
def strategy():
    return STRATEGIES["mirrored_2"]()


@pytest.fixture(scope="module")
def step(strategy):
    def descend(state, rows):
        grads = jdist.all_reduce("mean", jax.grad(lambda w: jnp.tanh(rows @ w).mean())(state["w"]))
        return {"w": state["w"] - 0.1 * grads, "v": state["v"] + 1}, None

    return strategy.step(descend)


def make(strategy):
    return strategy.put({"w": np.float32([1, 2, 3]), "v": np.int32(0)})


def batches(strategy):
    return iter(strategy.distribute_dataset(ROWS, batch_size=2, shuffle=True))


def bits(state):
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(state)]


def test_pe1_calls_without_a_signal_are_counted_and_save_nothing(strategy, step, tmp_path):
    state = make(strategy)
    with jdist.Checkpointer(tmp_path / "run") as checkpointer:
        with jdist.PreemptionCheckpointHandler(checkpointer) as handler:
            for batch in [next(batches(strategy))] * 5:
                state, outputs = handler.run(step, state, batch)
        assert handler.total_run_calls == 5 and outputs is None
        assert checkpointer.steps() == ()


def test_pe2_signal_before_the_third_call_saves_a_checkpoint_after_it_and_a_restarted_handler_continues(
    strategy, step, tmp_path
):
    data, state, exits = batches(strategy), make(strategy), []
    with jdist.Checkpointer(tmp_path / "run") as checkpointer:
        options = {"data": data, "exit_fn": lambda: exits.append(checkpointer.steps())}
        with jdist.PreemptionCheckpointHandler(checkpointer, **options) as handler:
            for number in range(4):
                if number == 2:
                    terminate()
                state, _ = handler.run(step, state, next(data))
    assert exits == [(3,)] and handler.total_run_calls == 4  # `exit_fn` returned, and the notice was handled
    with jdist.Checkpointer(tmp_path / "run") as checkpointer:
        restored = checkpointer.restore(strategy)
        with jdist.PreemptionCheckpointHandler(checkpointer) as handler:
            assert handler.total_run_calls == 3
    assert int(restored.state["v"]) == 3 and restored.data_position["batch"] == 3


@pytest.mark.parametrize("number", [0, 2, 5])
def test_restarted_loop_continues_with_the_same_bits(number, strategy, step, tmp_path):
    undisturbed = make(strategy)
    for batch in batches(strategy):
        undisturbed, _ = step(undisturbed, batch)

    def run(is_preempted):
        data, state = batches(strategy), make(strategy)
        with jdist.Checkpointer(tmp_path / "run") as checkpointer:
            if checkpointer.latest is not None:
                restored = checkpointer.restore(strategy)
                state = restored.state
                data.set_state(restored.data_position)
            with jdist.PreemptionCheckpointHandler(checkpointer, data=data) as handler:
                for batch in data:
                    if is_preempted and handler.total_run_calls == number:
                        terminate()
                        terminate()
                    state, _ = handler.run(step, state, batch)
        return state

    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit) as raised:
        run(is_preempted=True)
    assert raised.value.code == PREEMPTED == 42
    assert signal.getsignal(signal.SIGTERM) is before
    assert bits(run(is_preempted=False)) == bits(undisturbed)


def test_signal_during_the_write_of_another_checkpoint(strategy, step, tmp_path, monkeypatch, caplog):
    from etils import epath

    path_class = type(epath.Path(tmp_path))
    write_text, writing, preempted = path_class.write_text, threading.Event(), threading.Event()

    def write_slowly(path, *args, **kwargs):
        if path.name == "manifest.json":
            writing.set()
            assert preempted.wait(60)
        return write_text(path, *args, **kwargs)

    monkeypatch.setattr(path_class, "write_text", write_slowly)
    state, data = make(strategy), batches(strategy)
    with jdist.Checkpointer(tmp_path / "run") as checkpointer:
        with pytest.raises(SystemExit), jdist.PreemptionCheckpointHandler(checkpointer, data=data) as handler:
            state, _ = handler.run(step, state, next(data))
            checkpointer.save(1, state, data.get_state())
            assert writing.wait(60)
            terminate()
            threading.Timer(0.2, preempted.set).start()
            handler.run(step, state, next(data))
        assert checkpointer.steps() == (1, 2)
    assert f"Preempted: the checkpoint of step 2 is in {tmp_path / 'run'}." in caplog.text
    assert "The program ends with exit status 42." in caplog.text


def test_checkpoint_of_the_same_step_is_not_saved_twice(strategy, step, tmp_path):
    with jdist.Checkpointer(tmp_path / "run") as checkpointer:

        def step_and_save(state, batch):
            state, outputs = step(state, batch)
            checkpointer.save(1, state)
            terminate()
            return state, outputs

        with pytest.raises(SystemExit), jdist.PreemptionCheckpointHandler(checkpointer) as handler:
            handler.run(step_and_save, make(strategy), next(batches(strategy)))
        assert checkpointer.steps() == (1,)


def test_position_of_a_function_is_saved_and_inputs_by_name_are_passed(strategy, tmp_path):
    @jdist.step(static_argnames="rate")
    def decay(w, x, *, rate):
        return w * rate + jdist.all_reduce("mean", x.mean()), rate

    with jdist.Checkpointer(tmp_path / "run") as checkpointer, strategy.scope():
        options = {"data": lambda: {"number": 7}, "total_run_calls": 10}
        with pytest.raises(SystemExit), jdist.PreemptionCheckpointHandler(checkpointer, **options) as handler:
            w, rate = handler.run(decay, strategy.put(1.0), strategy.split(np.ones(2, np.float32)), rate=0.5)
            assert (float(w), rate) == (1.5, 0.5)
            terminate()
            handler.run(decay, w, strategy.split(np.ones(2, np.float32)), rate=0.5)
        restored = checkpointer.restore(strategy)
        assert (restored.step, restored.data_position) == (12, {"number": 7})


def test_arguments_of_other_types_are_refused(strategy, tmp_path):
    with pytest.raises(TypeError, match=r"needs a `jdist.Checkpointer`, got 'run'. Write `Preemption"):
        jdist.PreemptionCheckpointHandler("run")
    before = signal.getsignal(signal.SIGTERM)
    with jdist.Checkpointer(tmp_path / "run") as checkpointer:
        dataset = strategy.distribute_dataset(ROWS, batch_size=2)
        with pytest.raises(TypeError, match="`data` must be an iterator with `get_state`.*got DistributedDataset"):
            jdist.PreemptionCheckpointHandler(checkpointer, data=dataset)
        with pytest.raises(TypeError, match="`exit_fn` must be a function without arguments, got 3"):
            jdist.PreemptionCheckpointHandler(checkpointer, exit_fn=3)
        with pytest.raises(ValueError, match="`total_run_calls` must be an integer >= 0, got -1"):
            jdist.PreemptionCheckpointHandler(checkpointer, total_run_calls=-1)
    assert signal.getsignal(signal.SIGTERM) is before
