"""The equations of the installed JAX, as the package `jaxpr` reads them."""

import inspect
import os

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.experimental import io_callback
from jax.sharding import PartitionSpec

from jdist._src.core import jax_compat, source_lines
from jdist._src.devices.mesh import replica_mesh


def _equations(fn, *args):
    return jax.make_jaxpr(fn)(*args).jaxpr.eqns


def _inside_mesh(fn):
    """Returns the equations of `fn` as one of two replicas runs it."""
    mesh, replicated = replica_mesh(["cpu:0", "cpu:1"]), PartitionSpec()
    mapped = jax.shard_map(fn, mesh=mesh, in_specs=replicated, out_specs=replicated, check_vma=False)
    (equation,) = _equations(mapped, jnp.ones(4))
    return jax_compat.open_jaxpr(equation.params["jaxpr"]).eqns


def test_frame_in_the_working_directory_has_a_relative_path():
    assert str(source_lines.Frame(os.path.join(os.getcwd(), "a", "b.py"), 3, "f")) == os.path.join("a", "b.py") + ":3"
    assert str(source_lines.Frame("/elsewhere/b.py", 3, "f")) == "/elsewhere/b.py:3"


def test_open_jaxpr_of_closed_and_open_program_is_the_same():
    closed = jax.make_jaxpr(jnp.sin)(1.0)
    assert jax_compat.open_jaxpr(closed) is closed.jaxpr
    assert jax_compat.open_jaxpr(closed.jaxpr) is closed.jaxpr


def test_scan_parts_count_constants_and_carry():
    constant = jnp.arange(3.0)
    body = lambda carry, x: ((carry[0] + constant.sum() * x, carry[1] + 1), x)
    (scan,) = [
        e for e in _equations(lambda xs: lax.scan(body, (0.0, 1), xs), jnp.ones(5)) if e.primitive.name == "scan"
    ]
    parts = jax_compat.scan_parts(scan)
    assert parts.num_carry == 2
    assert parts.num_consts + parts.num_carry + 1 == len(scan.invars)
    assert parts.options == {"length": 5, "reverse": False, "unroll": 1}


def test_lowered_jaxpr_contains_its_jaxprs_and_has_the_same_results():
    fn = lambda x: lax.psum(jnp.nonzero(jnp.sort(x), size=2, fill_value=7)[0], "replica")
    traced = jax.make_jaxpr(fn, axis_env=[("replica", 2)])(jnp.zeros(3))
    program = jax_compat.lower_hi_primitives(traced, [("replica", 2)])
    equations = jax_compat.open_jaxpr(program).eqns
    assert not any(jax_compat.contents(one).opaque for one in [*equations, *_inner(equations)])
    rows = jnp.array([[3.0, 0.0, 0.0], [0.0, 0.0, 1.0]])
    run = lambda f: jax.vmap(f, axis_name="replica")(rows)
    np.testing.assert_array_equal(run(jax_compat.jaxpr_function(program))[0], run(fn))


def test_jaxpr_without_hi_primitives_is_returned_unchanged():
    traced = jax.make_jaxpr(jnp.sin)(1.0)
    assert jax_compat.lower_hi_primitives(traced) is traced


def _scanned_sum(x):
    return lax.scan(lambda carry, _: (lax.psum(carry, "replica"), None), x, None, length=2)[0]


NAMES = {  # whether the equations name the axis, and whether equations inside them do
    "sum": (lambda x: lax.psum(x, "replica"), True, False),
    "sum_in_a_scan": (_scanned_sum, False, True),
    "sum_in_a_branch": (lambda x: lax.cond(x[0] > 0, lambda: lax.pmax(x, "replica"), lambda: x), False, True),
    "sum_in_a_scan_in_a_branch": (lambda x: lax.cond(x[0] > 0, lambda: _scanned_sum(x), lambda: x), False, True),
    "index": (lambda x: x * lax.axis_index("replica"), True, False),
    "none": (lambda x: jax.jit(jnp.sin)(x), False, False),
}


def _inner(equations):
    """Returns the equations of all jaxprs inside `equations`."""
    inner = [
        each for equation in equations for program in jax_compat.contents(equation).jaxprs for each in program.eqns
    ]
    return inner + _inner(inner) if inner else []


@pytest.mark.parametrize("fn, outside, inside", NAMES.values(), ids=NAMES)
def test_contents_of_equation_are_its_names_and_jaxprs(fn, outside, inside):
    equations = _inside_mesh(fn)
    assert any("replica" in jax_compat.contents(equation).names for equation in equations) == outside
    assert any("replica" in jax_compat.contents(equation).names for equation in _inner(equations)) == inside
    assert not any(jax_compat.contents(equation).opaque for equation in equations)


EFFECTS = {
    "print": (lambda x: jax.debug.print("{}", x), False),
    "callback": (lambda x: io_callback(np.asarray, jax.ShapeDtypeStruct((), np.float32), x), True),
    "ordered_callback": (
        lambda x: io_callback(np.asarray, jax.ShapeDtypeStruct((), np.float32), x, ordered=True),
        True,
    ),
}


@pytest.mark.parametrize("fn, may_vary", EFFECTS.values(), ids=EFFECTS)
def test_effect_may_vary_unless_it_does_not_return_a_value(fn, may_vary):
    effects = set().union(*(equation.effects for equation in _equations(fn, 1.0)))
    assert effects
    assert any(map(jax_compat.may_vary_between_replicas, effects)) == may_vary


LINES = {
    "jax": lambda x: jnp.linalg.norm(x),
    "library": lambda x: optax.huber_loss(x),
    "user": lambda x: x * 2,
}


@pytest.mark.parametrize("fn", LINES.values(), ids=LINES)
def test_user_frame_of_equation_is_the_line_that_called_the_library(fn):
    _, first = inspect.getsourcelines(fn)
    frames = {source_lines.equation_frame(equation) for equation in _equations(fn, jnp.ones(3))}
    assert {(frame.file, frame.line) for frame in frames} == {(__file__, first)}


def test_key_value_store_of_a_process_that_has_not_joined_others_raises_with_the_fix():
    with pytest.raises(RuntimeError, match=r"has not joined other processes: call `jax\.distributed\.initialize`"):
        jax_compat.key_value_store()
