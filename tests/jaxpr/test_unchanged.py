"""Outputs of a jaxpr that are its inputs: through calls, branches and loops."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jdist._src.jaxpr.unchanged import unchanged_outputs

A, B = np.arange(3.0, dtype=np.float32), np.ones((2, 3), np.float32)


def in_scan(a, b):
    def body(carry, row):
        return (carry[0], carry[1] + 1), (row, row + 1, carry[0])

    (kept, count), (rows, changed, copies) = lax.scan(body, (a, 0), b)
    return kept, count, rows, changed, copies


def in_nested_scan(a, b):
    """The inner loop stacks a slice of the outer one, which is not the array that the outer one scans over."""

    def outer(carry, row):
        _, (slices, elements) = lax.scan(lambda c, x: (c, (row, x)), 0, row)
        return carry, (slices, elements)

    return lax.scan(outer, a, b)[1]


def in_while(a, b):
    return lax.while_loop(lambda c: c[2] < 3, lambda c: (c[0], c[1] * 2, c[2] + 1), (a, b, 0))


PROGRAMS = {
    "identity": (lambda a, b: (b, a, a), [1, 0, 0]),
    "arithmetic": (lambda a, b: (a + 0, a * 1, b), [None, None, 1]),
    "calls": (lambda a, b: jax.jit(jax.checkpoint(lambda a, b: (jnp.sin(a), b, lax.stop_gradient(a))))(a, b), [None, 1, 0]),
    "copy": (lambda a, b: (jnp.copy(a), lax.optimization_barrier((b, a))), [0, 1, 0]),
    "branches": (lambda a, b: lax.cond(a[0] > 0, lambda: (a, b), lambda: (a, b + 1)), [0, None]),
    "scan": (in_scan, [0, None, 1, None, 0]),
    "nested_scan": (in_nested_scan, [None, 1]),
    "while": (in_while, [0, None, None]),
    "swapped": (lambda a, b: lax.fori_loop(0, 3, lambda i, c: c[::-1], (a, a + 1)), [None, None]),
    "constant": (lambda a, b: (jnp.asarray(A), a), [None, 0]),
    "gradient": (lambda a, b: jax.value_and_grad(lambda a: (jax.checkpoint(jnp.sin)(a).sum(), b), has_aux=True)(a)[0][1], [1]),
}  # fmt: skip


@pytest.mark.parametrize("fn, expected", PROGRAMS.values(), ids=PROGRAMS)
def test_sources_of_outputs(fn, expected):
    assert unchanged_outputs(jax.make_jaxpr(fn)(A, B).jaxpr) == expected


def test_parts_of_a_sharded_array_are_not_the_array():
    mesh = jax.make_mesh((2,), ("d",), (jax.sharding.AxisType.Auto,), devices=jax.devices()[:2])
    spec = jax.sharding.PartitionSpec
    halves = jax.shard_map(lambda x: x, mesh=mesh, in_specs=spec("d"), out_specs=spec(), check_vma=False)
    assert unchanged_outputs(jax.make_jaxpr(halves)(B).jaxpr) == [None]
