"""Moving averages of the parameters: values, placement, and bitwise equal resumption."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jdist
from jdist import callbacks

from laws import each_row
from small_loop import place, regression, train

TWO = place("mirrored_2")
PLACES = ["one_device", "mirrored_2", "sharded_4", "central_2"]
every_place = pytest.mark.parametrize("name", PLACES)


def _varying(params):
    return {**params, "w": jdist.SyncOnRead(params["w"] + jdist.replica_id(), "mean")}


WRAPS = {"plain": lambda params: params, "varying": _varying}
every_wrap = pytest.mark.parametrize("wrap", WRAPS)


def _numbers(tree):
    return jax.tree.map(lambda x: np.asarray(x, np.float64), jax.device_get(tree))


def _expected(first, states, decay, debias):
    """Returns the average by definition, in float64: a weighted sum over the parameters after each call."""
    last = states[-1][0]
    steps = np.diff([0, *(step for step, _ in states)])
    weights = [(1 - decay**n) * decay ** (last - step) for n, (step, _) in zip(steps, states, strict=True)]
    params = [params for _, params in states]
    if debias:
        weights = list(np.array(weights) / sum(weights))
    else:
        weights, params = [decay**last, *weights], [first, *params]
    return jax.tree.map(lambda *x: sum(w * a for w, a in zip(weights, x, strict=True)), *map(_numbers, params))


@every_place
@every_wrap
@pytest.mark.parametrize("debias, steps_per_call", [(True, 3), (False, 1)])
def test_average_is_the_weighted_sum_with_the_shardings_of_the_parameters(name, wrap, debias, steps_per_call):
    strategy = place(name)
    state, call = regression(strategy, wrap=WRAPS[wrap])
    first = jax.device_get(state.params)
    average = callbacks.EMA(0.75, debias=debias)
    run = train(strategy, [average], epochs=1, steps=7, steps_per_call=steps_per_call, state=state, call=call)
    expected = _expected(first, run.states, 0.75, debias)
    params = average.params
    assert jax.tree.structure(params) == jax.tree.structure(run.state.params)
    for got, want, like in zip(*map(jax.tree.leaves, (params, expected, run.state.params)), strict=True):
        assert (got.dtype, got.sharding) == (like.dtype, like.sharding)
        if jnp.issubdtype(got.dtype, jnp.inexact):
            rtol = 5e-3 if got.dtype == jnp.bfloat16 else 1e-5
            np.testing.assert_allclose(np.asarray(got, np.float64), want, rtol=rtol, atol=1e-6)
    assert int(params["n"]) == 7


@every_place
@pytest.mark.parametrize("wrap, debias", [("plain", False), ("varying", True)])
def test_resumed_average_is_bitwise_equal(name, wrap, debias):
    strategy = place(name)
    options = dict(epochs=1, steps=6)
    uninterrupted, resumed = callbacks.EMA(0.9, debias=debias), callbacks.EMA(0.9, debias=debias)
    state, call = regression(strategy, wrap=WRAPS[wrap])
    run = train(strategy, [uninterrupted], state=state, call=call, **options)
    state, _ = regression(strategy, wrap=WRAPS[wrap])
    for number in range(4):
        state, _ = call(state, number)
    train(strategy, [resumed], state=state, call=call, start=4, saved=run.saved[4], **options)
    jax.tree.map(np.testing.assert_array_equal, *map(jax.device_get, (resumed.params, uninterrupted.params)))


def test_average_of_values_that_differ_between_replicas_reads_as_the_average_of_the_values_read():
    state, call = regression(TWO, wrap=_varying)
    average, values = callbacks.EMA(0.5), []
    note = lambda event: values.append(jax.device_get(jdist.read_values(event.state.params["w"])))
    train(TWO, [average, note], epochs=1, steps=3, state=state, call=call)
    after_steps = values[1:4]
    expected = sum(w * x for w, x in zip((1 / 7, 2 / 7, 4 / 7), after_steps, strict=True))
    np.testing.assert_allclose(jdist.read_values(average.params)["w"], expected, rtol=1e-5)


def test_average_of_bfloat16_is_stored_as_float32():
    params = {"b": TWO.put(np.ones(4, jnp.bfloat16))}
    call = lambda state, number: ({"params": {"b": state["params"]["b"] + jnp.bfloat16(1)}}, 0.0)
    average = callbacks.EMA(0.999, debias=False)
    train(TWO, [average], epochs=1, steps=3, state={"params": params}, call=call)
    stored = average.get_state()["average"]["leaves"][0]
    assert stored.dtype == np.float32
    expected = 1 + (1 - 0.999) * (1 * 0.999**2 + 2 * 0.999 + 3)
    np.testing.assert_allclose(stored, expected, rtol=1e-6)  # bfloat16 would round the change away
    assert average.params["b"].dtype == jnp.bfloat16


def test_copies_of_the_average_survive_later_steps():
    average, copies = callbacks.EMA(0.5), []
    note = lambda event: copies.append(average.params)
    train(TWO, [average, note], epochs=1)
    assert all(np.isfinite(np.asarray(x, np.float32)).all() for x in jax.tree.leaves(copies))
    assert not any(x.is_deleted() for x in jax.tree.leaves(copies))


def test_previous_average_is_donated_to_the_next():
    average = callbacks.EMA(0.5)
    state, call = regression(TWO)
    averages = []
    note = lambda event: averages.append(average.get_state()["average"]["leaves"][-1])
    train(TWO, [average, note], epochs=1, state=state, call=call)
    assert averages[0].is_deleted() and not averages[-1].is_deleted()


def test_average_continues_with_a_further_fit_and_restarts_with_another_state():
    state, call = regression(TWO)
    average, expected = callbacks.EMA(0.75), callbacks.EMA(0.75)
    first = train(TWO, [average], epochs=1, state=state, call=call)
    train(TWO, [average], epochs=2, start=3, state=first.state, call=call)
    train(TWO, [expected], epochs=2)
    jax.tree.map(np.testing.assert_array_equal, *map(jax.device_get, (average.params, expected.params)))
    train(TWO, [average], epochs=2)
    jax.tree.map(np.testing.assert_array_equal, *map(jax.device_get, (average.params, expected.params)))


def test_average_of_selected_parameters():
    state, call = regression(TWO)
    average = callbacks.EMA(0.5, params=lambda state: {"w": state.params["w"]})
    train(TWO, [average], state=state, call=call)
    assert list(average.params) == ["w"]


@dataclasses.dataclass
class _Other:
    weights: int = 0


def test_state_without_params_raises_before_the_first_step():
    message = r"has no `params`\. Pass a function that .*: `EMA\(decay, params=lambda state: \.\.\.\)`"
    with pytest.raises(ValueError, match="The state, _Other, " + message):
        train(TWO, [callbacks.EMA(0.5)], state=_Other(), call=lambda *_: pytest.fail("There was a step."))


def test_average_of_another_model_raises():
    run = train(TWO, [callbacks.EMA(0.5)], epochs=1)
    only_w = callbacks.EMA(0.5, params=lambda state: state.params["w"])
    with pytest.raises(ValueError, match=r"The average was saved with 3 leaves, and has 1 now\. Resume with the model"):
        train(TWO, [only_w], start=3, saved=run.saved[3])


@each_row("decay", [0, 1, -0.1, 1.5, math.nan, None, True, "0.9"])
def test_wrong_decay_raises(decay):
    with pytest.raises(ValueError, match=r"`decay` must be a number between 0 and 1, such as 0\.999, got"):
        callbacks.EMA(decay)


def test_params_that_are_not_a_function_and_an_average_before_training_raise():
    with pytest.raises(TypeError, match="`params` must be a function of the state, got dict"):
        callbacks.EMA(0.5, params={})
    with pytest.raises(RuntimeError, match=r"The average does not exist yet: it starts with training"):
        _ = callbacks.EMA(0.5).params
