"""`not_accumulated`: a program adds to each accumulator a value of its other inputs, and does nothing else with it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jdist._src.core.jax_compat import open_jaxpr
from jdist._src.jaxpr.accumulators import not_accumulated

SUMS = {
    "add": lambda s, x: s + x.sum(),
    "of_a_difference": lambda s, x: x[0] - x[1] + s - x[2],
    "in_a_jit": lambda s, x: jax.jit(lambda a, b: a + b)(s, x[0]),
    "in_a_branch": lambda s, x: lax.cond(x[0] > 0, lambda a: a + x[1], lambda a: a, s),
    "select": lambda s, x: jnp.where(x[0] > 0, s + 1, s),
    "scan": lambda s, x: lax.scan(lambda a, b: (a + b, b), s, x)[0],
    "loop": lambda s, x: lax.fori_loop(0, 3, lambda i, a: a + x[i], s),
}
OTHERS = {
    "last_value": lambda s, x: x[0],
    "product": lambda s, x: s * 2,
    "negative": lambda s, x: x[0] - s,
    "twice": lambda s, x: s + s,
    "extreme": lambda s, x: jnp.maximum(s, x[0]),
    "mean": lambda s, x: s + (x[0] - s) / 2,
    "rounded": lambda s, x: (s + 0.5).astype(jnp.int32).astype(jnp.float32),
    "test_of_the_state": lambda s, x: lax.cond(s > 0, lambda a: a + 1, lambda a: a, s),
    "select_of_the_state": lambda s, x: jnp.where(s > 0, s + 1, s),
    "decay": lambda s, x: lax.scan(lambda a, b: (0.9 * a + b, None), s, x)[0],
    "loop_until": lambda s, x: lax.while_loop(lambda a: a < 3, lambda a: a + 1, s),
    "sliced_history": lambda s, x: lax.scan(lambda a, b: (a + b, a), s, x)[1][0],
}


def analyze(fn, *states):
    program = jax.make_jaxpr(fn)(*states, np.float32([1, 2, 3]))
    return not_accumulated(open_jaxpr(program), len(states))


@pytest.mark.parametrize("fn", SUMS.values(), ids=SUMS)
def test_sum_is_recognized(fn):
    assert analyze(fn, np.float32(0)) == {}


@pytest.mark.parametrize("fn", OTHERS.values(), ids=OTHERS)
def test_other_update_is_refused(fn):
    assert list(analyze(fn, np.float32(0))) == [0]


def test_reasons_and_numbers_are_those_of_the_accumulators():
    fn = lambda a, b, c, d, x: (a + x[0], x[0], c + a, c)
    reasons = {1: "replaces it", 2: "does more than to add to it", 3: "replaces it"}
    assert analyze(fn, *np.zeros(4, np.float32)) == reasons


def test_elements_of_an_accumulator_are_added_to():
    add = lambda s, x: s.at[x.astype(jnp.int32)].add(1.0)
    assert analyze(add, np.zeros(4, np.float32)) == {}
    assert list(analyze(lambda s, x: s.at[x.astype(jnp.int32)].set(1.0), np.zeros(4, np.float32))) == [0]
    assert list(analyze(lambda s, x: s.at[s.astype(jnp.int32)].add(1.0), np.zeros(4, np.float32))) == [0]
