"""The collectives of a program with their source lines."""

import concurrent.futures
import functools
import re

import jax
import jax.numpy as jnp
from jax import lax

from jdist._src.collectives.ops import all_gather_tree
from jdist._src.jaxpr.collective_lines import collective_lines


def test_collectives_are_listed_in_order_once_per_line_also_inside_loops_and_calls():
    def replica(x):
        total = lax.psum(x, "replica") + lax.pmax(x, "replica")
        rows = lax.all_gather(total, "replica")
        index = lax.axis_index("replica")

        def body(carry, _):
            return lax.psum(carry, "replica"), None

        carry, _ = lax.scan(body, rows.sum() + index, None, length=3)
        return jax.jit(lambda y: lax.ppermute(y, "replica", [(0, 0)]))(carry)

    program = jax.make_jaxpr(replica, axis_env=[("replica", 1)])(jnp.ones(2))
    lines = collective_lines(program)
    assert [line.partition(" at ")[0] for line in lines] == ["all_reduce", "all_gather", "all_reduce", "ppermute"]
    assert all(re.search(r" at .*test_collective_lines\.py:\d+$", line) for line in lines)


def test_program_without_collectives_has_no_lines():
    assert collective_lines(jax.make_jaxpr(lambda x: x + 1)(1.0)) == []


def test_collective_that_only_jdist_traces_has_no_line():
    gather = functools.partial(all_gather_tree, axis=0, axes=("replica",))
    with concurrent.futures.ThreadPoolExecutor() as executor:  # whose thread does not run a line of this file
        program = executor.submit(jax.make_jaxpr(gather, axis_env=[("replica", 1)]), jnp.ones(2)).result()
    assert collective_lines(program) == ["all_gather"]
