"""At most one call in flight on CPU devices: a call waits for the previous call before it donates its state."""

import os
import signal
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jdist._src.devices import dispatch

from laws import forget_failed_callbacks


@pytest.fixture
def gate():
    """An event that the callback of `slow_step` waits for. It is set at the end, so that every call finishes."""
    event = threading.Event()
    yield event
    event.set()


def slow_step(strategy, gate, calls, **options):
    """Returns a step over a scalar that runs until `gate` is set."""

    def wait(x):
        calls.append(float(x))
        assert gate.wait(60)
        return x

    def step(state, x):
        return state + jax.pure_callback(wait, jax.ShapeDtypeStruct((), jnp.float32), x), state

    return strategy.step(step, **options)


def test_call_returns_before_the_step_has_finished(two, gate):
    step = slow_step(two, gate, [])
    state, _ = step(two.put(np.float32(1)), np.float32(2))  # would deadlock if the call waited for its results
    gate.set()
    assert float(state) == 3


def test_interrupt_while_a_call_waits_leaves_the_state_valid(two, gate):
    step, entered = slow_step(two, gate, []), threading.Event()

    def interrupt():
        assert entered.wait(60)
        os.kill(os.getpid(), signal.SIGINT)
        gate.set()

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        state, _ = step(two.put(np.float32(1)), np.float32(2))
        thread = threading.Thread(target=interrupt)
        thread.start()
        with pytest.raises(KeyboardInterrupt):
            entered.set()
            step(state, np.float32(5))
            raise AssertionError("the second call did not wait for the first")
    finally:
        signal.signal(signal.SIGINT, before)
    thread.join()
    assert float(state) == 3
    state, _ = step(state, np.float32(5))
    assert float(state) == 8


def test_calls_of_different_programs_run_one_at_a_time(two, gate):
    order = []
    first = slow_step(two, gate, order)
    second = two.step(lambda x: (x + jax.pure_callback(_note(order), jax.ShapeDtypeStruct((), jnp.float32), x), None))
    first(two.put(np.float32(1)), np.float32(2))
    threading.Timer(0.2, gate.set).start()
    state, _ = second(two.put(np.float32(7)))
    assert float(state) == 14
    assert order.index(2.0) < order.index(7.0)


def _note(order):
    def note(x):
        order.append(float(x))
        return x

    return note


def test_error_of_a_call_is_raised_by_the_next_call_of_the_same_program(two):
    def fail(x):
        raise ZeroDivisionError("in the callback")

    step = two.step(lambda state, x: (state + jax.pure_callback(fail, jax.ShapeDtypeStruct((), jnp.float32), x), None))
    other = two.step(lambda state: (state + 1, None))
    state, _ = step(two.put(np.float32(1)), np.float32(2))
    assert float(other(two.put(np.float32(1)))[0]) == 2  # not an error of this program
    with pytest.raises(jax.errors.JaxRuntimeError, match="in the callback"):
        float(state)
    failed, _ = step(two.put(np.float32(1)), np.float32(2))
    with pytest.raises(jax.errors.JaxRuntimeError, match="in the callback"):
        step(failed, np.float32(2))
    forget_failed_callbacks()


def test_result_that_was_donated_to_another_program_is_not_waited_for(two):
    step = two.step(lambda state: (state + 1, None))
    state, _ = step(two.put(np.float32(1)))
    doubled = jax.jit(lambda x: x * 2, donate_argnums=0)(state)
    assert state.is_deleted()
    state, _ = step(two.put(np.float32(1)))
    assert (float(doubled), float(state)) == (4, 2)


def test_only_the_smallest_result_of_a_call_is_stored(two):
    results = two.run(lambda: {"a": jnp.zeros(4), "b": jnp.zeros(()), "c": jnp.zeros(8)})
    ((stored, _),) = dispatch._in_flight
    assert stored is results["b"]
