"""`jax.disable_jit`, `chex.fake_jit` and pdb with a replica function, as the page "Testing" describes them."""

import contextlib
import pdb

import chex
import jax
import jax.numpy as jnp
import pytest

import jdist

MODES = {"disable_jit": jax.disable_jit, "fake_jit": chex.fake_jit, "none": contextlib.nullcontext}


def step(state, x):
    values.append(x)
    return state + jdist.all_reduce("mean", x.mean()), None


values = []


@pytest.mark.parametrize("mode", ["disable_jit", "fake_jit"])
def test_step_of_a_strategy_is_traced_in_all_modes_with_the_same_result(mode):
    strategy = jdist.OneDeviceStrategy("cpu:0")
    results = []
    for name in (mode, "none"):
        values.clear()
        with MODES[name]():
            state, _ = strategy.step(step)(strategy.put(jnp.zeros(())), strategy.split(jnp.arange(4.0)))
        assert isinstance(values[0], jax.core.Tracer)
        results.append(state)
    assert results[0] == results[1] == 1.5


def test_function_outside_strategies_receives_values():
    values.clear()
    with chex.fake_jit():
        state, _ = jax.jit(jdist.OneDeviceStrategy("cpu:0").step(step).__wrapped__)(0.0, jnp.arange(4.0))
    assert values[0].tolist() == [0, 1, 2, 3]
    assert state == 1.5


class Debugger(pdb.Pdb):
    """Reads the value of `x` at a breakpoint, and continues."""

    def user_line(self, frame):
        if frame.f_code.co_name == "with_breakpoint":
            stops.append(frame.f_locals["x"])
        self.set_continue()


stops = []


def with_breakpoint(state, x):
    Debugger(nosigint=True).set_trace()
    return state + jdist.all_reduce("mean", x.mean()), None


def test_breakpoint_stops_once_while_tracing_and_with_values_in_the_function_itself():
    strategy = jdist.OneDeviceStrategy("cpu:0")
    program = strategy.step(with_breakpoint)
    state = strategy.put(jnp.zeros(()))
    for _ in range(2):
        state, _ = program(state, strategy.split(jnp.arange(4.0)))
    program.__wrapped__(0.0, jnp.arange(4.0))
    traced, value = stops
    assert isinstance(traced, jax.core.Tracer) and traced.shape == (4,)
    assert value.tolist() == [0, 1, 2, 3]
