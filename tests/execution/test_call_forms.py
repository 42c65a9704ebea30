"""Inputs by name, defaults, keyword-only parameters and static values: one contract for `strategy.step` and `jdist.step`."""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jdist
from jdist import testing

from laws import STRATEGIES, each_row, fixture_of_all_backends, rows

strategy = fixture_of_all_backends()


def late_bound(strategy, fn, **options):
    step = jdist.step(fn, **options)

    def call(*args, **named):
        with strategy.scope():
            return step(*args, **named)

    return call


KINDS = {"strategy.step": lambda strategy, fn, **options: strategy.step(fn, **options), "jdist.step": late_bound}


@pytest.fixture(params=KINDS)
def make_step(request):
    return KINDS[request.param]


def descend(w, x, rate=0.5, *, scale=2.0, **others):
    loss, grad = jax.value_and_grad(lambda w: scale * jnp.mean((w * x) ** 2))(w)
    return w - rate * jdist.all_reduce("mean", grad) + sum(others.values()), jdist.all_reduce("mean", loss)


# Calls with the same meaning, for an input x.
FORMS = {
    "defaults": [((), {}), ((0.5,), {}), ((), {"rate": 0.5}), ((), {"scale": 2.0, "rate": 0.5})],
    "values": [((0.25,), {"scale": 3.0}), ((), {"scale": 3.0, "rate": 0.25}), ((), {"rate": 0.25, "scale": 3.0})],
    "others": [((), {"b": 1.0, "a": 2.0}), ((), {"a": 2.0, "b": 1.0, "rate": 0.5, "scale": 2.0})],
}


@pytest.mark.filterwarnings("ignore::jdist.RetraceWarning")
def test_forms_of_a_call_have_the_results_of_the_function(strategy, make_step):
    x, step = rows(strategy, 6), make_step(strategy, descend, donate=False)
    for forms in FORMS.values():
        (args, named), *_ = forms
        expected = strategy.step(lambda w, x, args=args, named=named: descend(w, x, *args, **named))(
            strategy.put(1.0), x
        )
        for args, named in forms:
            for call in (
                lambda args=args, named=named: step(strategy.put(1.0), x, *args, **named),
                lambda args=args, named=named: step(
                    w=strategy.put(1.0), x=x, **dict(zip(["rate"], args, strict=False)), **named
                ),
            ):
                np.testing.assert_allclose(call(), expected, rtol=1e-6)


@pytest.mark.filterwarnings("error::jdist.RetraceWarning")
def test_calls_that_differ_in_names_only_share_a_trace(strategy, make_step):
    traces = []

    def add(state, x, *, offset, flag=False):
        traces.append(flag)
        return state + jdist.all_reduce("mean", x) + offset * (2 if flag else 1), None

    step = make_step(strategy, add, static_argnames="flag")
    for named in ({"offset": 1.0, "flag": False}, {"flag": False, "offset": 2.0}, {"flag": True, "offset": 3.0}) * 2:
        state, _ = step(0.0, 1.0, **named)
        assert float(state) == 1 + named["offset"] * (2 if named["flag"] else 1)
    assert (
        list(dict.fromkeys(traces)) == [False, True] and len(traces) <= 4 or isinstance(strategy, testing.DebugStrategy)
    )  # which calls the function each time


@pytest.mark.filterwarnings("error::jdist.RetraceWarning")
def test_steps_per_call_take_lists_by_name(strategy, make_step):
    x = [rows(strategy, 6, seed=seed) for seed in range(2)]
    step = make_step(strategy, lambda w, *, x: descend(w, x), steps_per_call=2)
    expected = strategy.step(descend, steps_per_call=2)(strategy.put(1.0), x)
    for _ in range(2):
        np.testing.assert_allclose(step(strategy.put(1.0), x=x)[0], expected[0], rtol=1e-6)


def test_donation_reuses_the_state_of_a_call_by_name(strategy, make_step):
    state, kept = strategy.put(np.float32([1, 2])), strategy.put(np.float32([1, 2]))
    make_step(strategy, lambda w, *, x: (w + x, None))(w=state, x=1.0)
    make_step(strategy, lambda w, *, x: (w + x, None), donate=False)(w=kept, x=1.0)
    assert not kept.is_deleted()
    assert state.is_deleted() or strategy.replicas.mesh.devices.flat[0].platform == "cpu"


def test_proof_lower_compile_and_explain_take_names(two):
    step, x = two.step(descend), rows(two, 4)
    for text in (
        step.lower(1.0, x=x, scale=3.0).compile().as_text(),
        two.compile(step, 1.0, x, scale=3.0).as_text(),
        two.compile(jdist.step(descend), 1.0, rate=0.5, x=x).as_text(),
        two.compile(descend, 1.0, x, rate=0.5).as_text(),
    ):
        assert "all-reduce" in text
    assert str(step.proof).splitlines()[0] == "2 of 2 results are replicated"
    for target in (step, descend, jdist.step(descend)):
        explanation = jdist.debug.explain(target, 1.0, strategy=two, x=x, scale=3.0)
        assert [leaf.replicated for leaf in explanation.leaves] == [True, True]
    varying = two.step(lambda state, *, x=0.0: (state, x))
    varying(1.0, x=x)
    assert varying.proof.per_replica == ("output",)


def test_asynchronous_steps_take_names():
    strategy = jdist.ParameterServerStrategy(workers=1, max_staleness=0)
    with contextlib.closing(strategy) if hasattr(strategy, "close") else contextlib.nullcontext():
        state = strategy.init(lambda: jnp.float32(1))
        step = strategy.step(descend)
        state, _ = step(state, np.float32([1.0, 2.0]), rate=0.25, scale=1.0)
        strategy.join()
        assert float(jdist.read_values(state)) == pytest.approx(1 - 0.25 * 5)


INVALID = {
    "unknown_name": (
        lambda step: step(1.0, 2.0, z=1.0, w=1.0),
        "`descend.*` is called with other arguments: multiple values",
    ),
    "missing": (lambda step: step(w=1.0), "`descend.*` is called with other arguments: missing .*'x'"),
    "leaf": (lambda step: step(1.0, 2.0, scale="text"), "^scale is 'text'"),
    "nothing": (lambda step: step(), "^`descend` is a step and was called without arguments"),
}


@each_row("call, message", INVALID.values(), ids=INVALID)
def test_invalid_calls_are_explained(call, message, make_step):
    with pytest.raises(TypeError, match=message):
        call(make_step(STRATEGIES["mirrored_2"](), descend))


def test_static_argnames_are_checked_at_the_definition(make_step, two):
    with pytest.raises(ValueError, match=r"^`static_argnames` contains 'train', which is not an input of `descend`"):
        make_step(two, descend, static_argnames="train")
    with pytest.raises(ValueError, match=r"^The input `rate` of `descend` follows the static `x`"):
        make_step(two, descend, static_argnames=("x",))
    with pytest.raises(
        TypeError, match=r"^`static_argnames` must be the name of a parameter or a tuple of names, got 1"
    ):
        make_step(two, descend, static_argnames=1)
    with pytest.raises(TypeError, match=r"^The static arguments of `descend` must be hashable"):
        make_step(two, descend, static_argnames="rate")(1.0, 2.0, rate=[1])


def test_debug_strategy_takes_names():
    strategy = testing.DebugStrategy(2)
    state, _ = strategy.step(descend)(strategy.put(1.0), x=rows(strategy, 4), scale=0.0)
    assert float(state) == 1
