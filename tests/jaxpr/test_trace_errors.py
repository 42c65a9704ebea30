"""JAX's tracing errors are raised again in terms of the replica function's own arguments."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jdist

NEEDS_A_VALUE = {
    "if": (lambda x, flag: x if flag else -x, (1.0, True), r"a value computed from `flag` .*functools\.partial"),
    "float": (lambda x: float(x), (1.0,), r"a value computed from `x` .*To log a value, return it .*`float\(loss\)`"),
    "item": (lambda x: (x + 1).item(), (1.0,), r"a value computed from `x` .*`jax\.debug\.print`"),
    "f_string": (lambda x: f"{x:.3f}", (1.0,), r"a traced value .*To log a value, return it"),
    "loss": (
        lambda w: jax.grad(lambda w: w if w**2 > 1 else w)(w),
        (1.0,),
        r"a value computed from `w` .*`jax\.lax\.cond`",
    ),
    "in_scan": (
        lambda x: jax.lax.scan(lambda c, _: (float(c), _), x, None, 2),
        (1.0,),
        r"a traced value .*To log a value",
    ),
    "shape": (lambda size: jnp.zeros(size), (3,), r"a value computed from `size`"),
    "numpy": (lambda tree: np.sin(tree["a"]), ({"a": 1.0},), r"a value computed from `tree\['a'\]`"),
    "replica_id": (lambda: 1.0 if jdist.replica_id() == 0 else 2.0, (), r"the replica index .*lax\.cond.*on the host"),
    "index": (lambda: [1, 2][jdist.replica_id()], (), r"the replica index"),
    "other": (lambda: float(jax.lax.axis_index("replica") + 1.0), (), r"a traced value .*close over it"),
}


@pytest.mark.parametrize("case", NEEDS_A_VALUE)
def test_traced_value_used_in_python_is_named_with_the_line(case, two):
    fn, args, message = NEEDS_A_VALUE[case]
    with pytest.raises(TypeError, match=rf"test_trace_errors\.py:\d+ in .* needs {message}") as caught:
        two.run(fn, args)
    assert isinstance(caught.value.__cause__, TypeError)


def test_mask_as_an_index_is_refused_with_the_line_and_the_fix(two):
    message = (
        r"test_trace_errors\.py:\d+ in <lambda> selects elements by a mask .*`jnp\.where\(mask, x, 0\)`.*weights=mask"
    )
    with pytest.raises(IndexError, match=message):
        two.run(lambda x: x[x > 0], (np.ones(3),))


def test_flag_bound_by_partial_selects_code(two):
    fn = lambda x, flag: x if flag else -x
    assert float(two.run(functools.partial(fn, flag=False), (1.0,))) == -1


def test_captured_array_that_is_sharded_over_the_mesh_is_refused_with_the_fix(two):
    table = two.put(jdist.PerReplica(np.arange(2.0))).tree
    message = (
        r"test_trace_errors\.py:\d+ in <lambda> uses an array that the function closes over.*`jdist\.PerReplica\(x\)`"
    )
    with pytest.raises(ValueError, match=message):
        two.run(lambda x: x + table[0], (1.0,))


def test_type_error_of_the_function_itself_passes_through(two):
    def fail(x):
        raise TypeError("of the function")

    with pytest.raises(TypeError, match=r"^of the function"):
        two.run(fail, (1.0,))


def test_value_error_of_the_function_itself_passes_through(two):
    def fail(x):
        raise ValueError("of the function")

    with pytest.raises(ValueError, match=r"^of the function"):
        two.run(fail, (1.0,))
