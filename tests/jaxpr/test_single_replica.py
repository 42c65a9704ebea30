"""A jaxpr without its collectives over a size-one axis: it has the results of a mesh of one device, and uses no axis."""

import functools

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import io_callback
from jax.sharding import Mesh, PartitionSpec

from jdist._src.core import jax_compat
from jdist._src.jaxpr.interpreter import all_equations, uses_axes
from jdist._src.jaxpr.single_replica import eliminate_collectives

few = hypothesis.settings(max_examples=3, deadline=None, derandomize=True, database=None)
more = hypothesis.settings(max_examples=40, deadline=None, derandomize=True, database=None)
X = np.random.default_rng(0).normal(size=(1, 2, 3)).astype(np.float32)


def traced(fn, *args):
    return jax_compat.lower_hi_primitives(jax.make_jaxpr(fn, axis_env=[("r", 1)])(*args), [("r", 1)])


def rewritten(fn, *args):
    """Returns the jaxpr of `fn` without its collectives; those without a rule are left for `jax.vmap`."""
    run = lambda *leaves: eliminate_collectives(traced(fn, *args), ["r"], leaves)
    return jax.make_jaxpr(run, axis_env=[("r", 1)])(*jax.tree.leaves(args)).jaxpr


def without_collectives(fn, *args):
    """Returns the leaves of the results of `fn` without collectives, as the auto-sharded backend computes them."""
    return jax.jit(lambda *leaves: eliminate_collectives(traced(fn, *args), ["r"], leaves))(*jax.tree.leaves(args))


def on_one_device(fn, *args):
    """Returns the leaves of the results of `fn` on a mesh of one device."""
    everywhere = PartitionSpec()
    mesh = Mesh(jax.devices()[:1], ("r",))
    run = jax.shard_map(fn, mesh=mesh, in_specs=everywhere, out_specs=everywhere, check_vma=False)
    return jax.tree.leaves(jax.jit(run)(*args))


def assert_same(results, expected):
    for one, other in zip(results, expected, strict=True):
        assert (jax.typeof(one).shape, one.dtype) == (jax.typeof(other).shape, other.dtype)
        assert getattr(one, "weak_type", None) == getattr(other, "weak_type", None)
        is_key = jnp.issubdtype(one.dtype, jax.dtypes.prng_key)
        one, other = map(np.asarray, map(jax.random.key_data, (one, other)) if is_key else (one, other))
        largest = np.max(np.abs(np.float64(other)), initial=1)
        np.testing.assert_allclose(np.float64(one), np.float64(other), rtol=2e-5, atol=1e-5 * largest)


def using_axis(jaxpr):
    """Returns the primitives of the equations of `jaxpr` that use the axis."""
    return [eqn.primitive.name for eqn in jaxpr.eqns if uses_axes(eqn, frozenset("r"))]


def primitives(jaxpr):
    """Returns the primitives of a jaxpr and of the jaxprs inside it, in order."""
    return [equation.primitive.name for equation in all_equations(jaxpr)]


def with_gradient(fn):
    """Returns `fn` with the gradient of a weighted sum of cosines of its results, in which every element has another weight."""
    total = lambda x: sum(
        jnp.sum(jnp.cos(y) * (1 + jnp.arange(y.size).reshape(y.shape))) for y in jax.tree.leaves(fn(x))
    )
    return lambda x: (fn(x), jax.grad(total)(x))


def law(fn, *args):
    """Checks that `fn` without collectives has the results of one device, and uses no axis."""
    assert using_axis(traced(fn, *args).jaxpr), "the case is about a collective"
    assert using_axis(rewritten(fn, *args)) == []
    assert_same(without_collectives(fn, *args), on_one_device(fn, *args))


# --- each collective


SAME = {
    "psum": lambda x: lax.psum(x, "r"),
    "pmean": lambda x: lax.pmean(x, "r"),
    "all_gather": lambda x: lax.all_gather(x, "r", axis=1, tiled=True),
    "psum_scatter": lambda x: lax.psum_scatter(x, "r", tiled=True),
    "all_to_all": lambda x: lax.all_to_all(x, "r", 0, 2, tiled=True),
    "ppermute": lambda x: lax.ppermute(x, "r", [(0, 0)]),
    "ppermute_to_nobody": lambda x: x + lax.ppermute(x * 5, "r", []),
    "axis_index": lambda x: x * (2 + lax.axis_index("r")),
    "groups": lambda x: lax.psum(x, "r", axis_index_groups=[[0]]),
}  # these preserve the shape, so they compose
COLLECTIVES = SAME | {
    "pmax": lambda x: lax.stop_gradient(lax.pmax(lax.stop_gradient(x), "r")) * x,
    "pmin": lambda x: lax.stop_gradient(lax.pmin(lax.stop_gradient(x), "r")) * x,
    "tree": lambda x: lax.psum({"x": x, "y": (x[0], 2 * x)}, "r"),
    "pswapaxes": lambda x: lax.pswapaxes(x, "r", 0),
    "gather": lambda x: [lax.all_gather(x, "r", axis=dim) for dim in range(4)],
    "gather_tiled": lambda x: [lax.all_gather(x, "r", axis=dim, tiled=True) for dim in range(3)],
    "scatter": lambda x: lax.psum_scatter(x, "r"),
    "scatter_tiled": lambda x: [lax.psum_scatter(x, "r", scatter_dimension=dim, tiled=True) for dim in range(3)],
    "exchange": lambda x: lax.all_to_all(x, "r", 0, 0),
    "exchange_tiled": lambda x: [lax.all_to_all(x, "r", a, b, tiled=True) for a in range(3) for b in range(3)],
}


@pytest.mark.parametrize("fn", COLLECTIVES.values(), ids=COLLECTIVES)
def test_collective_and_its_gradient_equal_one_device(fn):
    law(with_gradient(fn), X)


OTHERS = {
    # JAX fails to differentiate it.
    "exchange": lambda x: [lax.all_to_all(x, "r", 0, dim) for dim in range(1, 3)],
    "bool": lambda x: lax.psum(x > 0, "r"),
    "int8": lambda x: lax.pmax(x.astype(jnp.int8), "r"),
    "mean_of_integers": lambda x: lax.pmean(jnp.arange(3), "r"),
    "literal": lambda x: x * lax.psum(jnp.float32(2), "r"),
    "constant": lambda x: x + lax.psum(jnp.asarray(X), "r"),
    "index": lambda x: (lax.axis_index("r"), lax.axis_index(("r",))),
    "empty": lambda x: lax.all_gather(x[:, :0], "r"),
    "keys_exchanged": lambda x: lax.all_to_all(jax.random.split(jax.random.key(3), 1), "r", 0, 0),
    "unused": lambda x: (lax.psum(x, "r"), x)[1],
    "inner_index": lambda x: jax.vmap(lambda v: lax.axis_index(("b", "r")) + v, axis_name="b")(x[0]),
    "inner_axis_alone": lambda x: jax.vmap(lambda v: lax.psum(lax.psum(v, "b"), "r"), axis_name="b")(x[0]),
}


@pytest.mark.parametrize("fn", OTHERS.values(), ids=OTHERS)
def test_collective_of_another_kind_of_value_equals_one_device(fn):
    law(fn, X)


def test_sum_of_python_number_and_axis_size_are_known_while_tracing():
    sizes = lambda x: (x * lax.psum(1, "r"), x[: lax.axis_size("r")], x + lax.psum(2.5, "r"))
    assert using_axis(traced(sizes, X).jaxpr) == []
    assert_same(without_collectives(sizes, X), [jnp.asarray(X), jnp.asarray(X), jnp.asarray(X) + 2.5])


MIXED = {
    "psum": lambda v: lax.psum(v, ("b", "r")),
    "mean_in_other_order": lambda v: lax.pmean(v, ("r", "b")),
    "several": lambda v: lax.psum((v, 2 * v[0]), ("b", "r")),
    "in_scan": lambda v: lax.scan(lambda c, row: (c + lax.psum(row, ("b", "r")), c), 0.0, v),
    "in_cond": lambda v: lax.cond(v.sum() > 0, lambda v: lax.psum(v, ("b", "r")), lambda v: v, v),
}


@pytest.mark.parametrize("fn", MIXED.values(), ids=MIXED)
def test_reduction_over_axis_of_inner_vmap_too_equals_one_device(fn):
    each = lambda x: jax.vmap(fn, axis_name="b")(x[0])
    assert_same(without_collectives(each, X), on_one_device(each, X))
    assert using_axis(rewritten(each, X)) == []


@jax.custom_batching.custom_vmap
def _summed(x):
    return lax.psum(x, "r")


_summed.def_vmap(lambda size, batched, x: (lax.psum(x, "r"), batched[0]))


def _root(x):
    def newton(f, x):
        return lax.while_loop(lambda pair: pair[1] < 8, lambda pair: (pair[0] - f(pair[0]) / 4, pair[1] + 1), (x, 0))[0]

    squared = jnp.sum(x**2) + 1
    equation = lambda r: lax.psum(r**2, "r") - squared
    return lax.custom_root(equation, jnp.float32(1.5), newton, lambda g, y: y / g(jnp.float32(1)))


SOLVERS = {
    "cg": lambda x: jax.scipy.sparse.linalg.cg(lambda v: 2 * lax.psum(v, "r"), x[0, 0])[0],
    "root": lambda x: _root(0.1 * x),
    "custom_vmap": lambda x: (_summed(x), jax.vmap(_summed)(x)),
    "linear_call": lambda x: jax.custom_derivatives.linear_call(
        lambda r, x: lax.psum(r * x, "r"), lambda r, x: lax.psum(r * x, "r"), 2.0, x
    ),
    "composite": lambda x: lax.composite(lambda x: lax.psum(jnp.sin(x), "r"), "test.sum")(x),
}


@pytest.mark.parametrize("fn", SOLVERS.values(), ids=SOLVERS)
def test_collectives_in_solvers_and_custom_rules_equal_one_device(fn):
    assert_same(without_collectives(fn, X), on_one_device(fn, X))
    assert using_axis(rewritten(fn, X)) == []


# --- calls, branches and loops


@jax.custom_jvp
def _tripled(x):
    return 3 * lax.psum(x, "r")


_tripled.defjvp(lambda primals, tangents: (_tripled(*primals), 7 * lax.psum(tangents[0], "r")))  # 7: the custom rule's


def _with_vjp(f):
    @jax.custom_vjp
    def g(x):
        return f(x)

    g.defvjp(lambda x: (f(x), None), lambda _, ct: (7 * f(ct),))
    return g


def _with_jvp(f):
    return lambda x: f(_tripled(x))


NESTS = {
    "jit": jax.jit,
    "scan": lambda f: lambda x: lax.scan(lambda c, row: (f(c + row), row * 2), x, jnp.stack([x, -x]))[0],
    "scan_rows": lambda f: lambda x: lax.scan(lambda c, row: (c, f(row)), None, jnp.stack([x, -x]))[1][0],
    "scan_reverse": lambda f: (
        lambda x: lax.scan(lambda c, n: (f(c) + n, c * n), x, jnp.arange(3.0), reverse=True, unroll=2)[0]
    ),
    "scan_empty": lambda f: lambda x: x + lax.scan(lambda c, row: (f(c), f(row)), x, jnp.zeros((0, *x.shape)))[0],
    "cond": lambda f: lambda x: lax.cond(x.sum() < 100, f, lambda x: -x, x),
    "cond_not_taken": lambda f: lambda x: lax.cond(x.sum() > 100, f, lambda x: -x, x),
    "switch": lambda f: lambda x: lax.switch(lax.axis_index("r") + 1, [jnp.sin, f, jnp.cos], x),
    "switch_beyond": lambda f: lambda x: lax.switch(7, [jnp.sin, jnp.cos, f], x),
    "fori_loop": lambda f: lambda x: lax.fori_loop(0, 2, lambda i, c: f(c) * (i + 1), x),
    "remat": jax.checkpoint,
    "remat_policy": functools.partial(jax.checkpoint, policy=jax.checkpoint_policies.dots_saveable, prevent_cse=False),
    "custom_vjp": _with_vjp,
    "custom_jvp": _with_jvp,
    "vmap": lambda f: lambda x: jax.vmap(f)(jnp.stack([x, 2 * x]))[1],
    "inner_gradient": lambda f: lambda x: jax.grad(lambda x: jnp.sum(jnp.sin(f(x))))(x),
    "map": lambda f: lambda x: lax.map(f, jnp.stack([x, 2 * x]))[1],
}


def every_collective(x):
    """Returns `x` after all collectives that preserve the shape."""
    return functools.reduce(lambda x, fn: jnp.sin(fn(x)), SAME.values(), x)


# The random nests below contain the others.
@pytest.mark.parametrize("nest", ["scan_reverse", "cond", "fori_loop", "remat_policy", "custom_vjp"])
def test_collectives_inside_calls_branches_and_loops_equal_one_device(nest):
    law(with_gradient(NESTS[nest](every_collective)), X)


def _while(x):
    body = lambda carry: (carry[0] + lax.psum(1 + lax.axis_index("r"), "r"), every_collective(carry[1]))
    return lax.while_loop(lambda carry: lax.pmean(carry[0], "r") < 3, body, (0, x))


nested = st.tuples(st.lists(st.sampled_from(sorted(NESTS)), min_size=1, max_size=3), st.sampled_from(sorted(SAME)))


def _equals_one_device(drawn):
    names, collective = drawn
    law(with_gradient(functools.reduce(lambda fn, name: NESTS[name](fn), names, SAME[collective])), X)


test_random_nest_equals_one_device = few(hypothesis.given(nested)(_equals_one_device))
test_many_random_nests_equal_one_device = pytest.mark.slow(more(hypothesis.given(nested)(_equals_one_device)))


# --- carries, constants, effects


def _keys(x):
    def body(key, row):
        key, used = jax.random.split(key)
        return key, lax.psum(row + jax.random.normal(used, row.shape), "r")

    return lax.scan(body, jax.random.key(0), jnp.stack([x, x]))


def _accumulated(x):
    ref = jax.new_ref(jnp.zeros_like(x))

    def body(carry, row):
        ref[...] += lax.psum(carry + row, "r")
        return carry, None

    lax.scan(body, x, jnp.stack([x, x]))
    return ref[...]


CARRIES = {
    "collective_in_test": _while,
    "weak_first": lambda x: lax.scan(lambda c, row: (c + lax.psum(row.sum(), "r"), c), 0.0, x[0]),
    "half": lambda x: lax.fori_loop(0, 2, lambda i, c: c * 1.5 + lax.psum(c, "r"), jnp.bfloat16(1)),
    "weak_in_while": lambda x: lax.while_loop(lambda c: c < 3, lambda c: c + lax.psum(jnp.float32(1), "r"), 0.0),
    "becomes_a_literal": lambda x: lax.scan(lambda c, _: ((lax.psum(c[0], "r"), 1.0, 2), c[1]), (x, 0.0, 1), length=3),
    "literal_in_while": lambda x: lax.while_loop(lambda c: c[1] < 2, lambda c: (lax.psum(c[0], "r"), 3), (x, 1)),
    "keys": _keys,
    "integers": lambda x: lax.fori_loop(0, 3, lambda i, c: lax.psum(c, "r") + jnp.uint8(i), jnp.uint8(250)),
    "constant_of_a_jit": lambda x: jax.jit(lambda y: lax.psum(y * jnp.asarray(X), "r"))(x),
    "closed_over": lambda x: lax.cond(x.sum() > 0, lambda: lax.psum(x, "r"), lambda: 2 * lax.psum(x + X, "r")),
    "mutable": _accumulated,
}


@pytest.mark.parametrize("fn", CARRIES.values(), ids=CARRIES)
def test_carry_or_constant_equals_one_device(fn):
    law(fn, X)


@pytest.mark.parametrize("ordered", [False, True])
@pytest.mark.parametrize("nest", ["scan", "fori_loop", "cond"])
def test_effects_happen_as_often_as_on_one_device(nest, ordered, capsys):
    def fn(x):
        record = lambda x: np.float32(sums.append(float(x.sum())) or 1)
        jax.debug.print("sum {}", x.sum(), ordered=ordered)
        return lax.psum(x, "r") * io_callback(record, jax.ShapeDtypeStruct((), jnp.float32), x, ordered=ordered)

    counted = []
    for run in (without_collectives, on_one_device):
        sums = []
        jax.block_until_ready(run(NESTS[nest](fn), X))
        jax.effects_barrier()
        counted.append((sums, sorted(capsys.readouterr().out.splitlines())))
    assert counted[0] == counted[1]
    assert len(counted[0][0]) == len(counted[0][1]) == (1 if nest == "cond" else 2)


# --- structure that is preserved


WITHOUT_AXIS = ("jit", "scan", "cond", "fori_loop", "remat", "custom_vjp")


@pytest.mark.parametrize("nest", WITHOUT_AXIS)
def test_equation_that_does_not_use_the_axis_is_unchanged(nest):
    unchanged = jax.jit(with_gradient(NESTS[nest](lambda x: jnp.sin(x) @ jnp.ones((3, 3)))))
    fn = lambda x: unchanged(lax.psum(x, "r"))
    before = [name for name in primitives(traced(fn, X).jaxpr) if name != "psum"]
    assert primitives(rewritten(fn, X)) == before


@pytest.mark.parametrize("nest", ["scan", "scan_reverse", "cond", "switch", "fori_loop", "remat", "remat_policy"])
def test_loop_branch_and_remat_with_a_collective_stay_one_equation(nest):
    fn = NESTS[nest](lambda x: jnp.sin(lax.psum(x, "r")))
    kinds = {"scan", "while", "cond", "remat2", "checkpoint"}
    expected = [name for name in primitives(traced(fn, X).jaxpr) if name in kinds]
    assert expected and [name for name in primitives(rewritten(fn, X)) if name in kinds] == expected


def test_scan_keeps_its_length_direction_and_unrolling():
    options = {"length": 6, "reverse": True, "unroll": 3}
    fn = lambda x: lax.scan(lambda c, row: (lax.psum(c + row, "r"), c), x, jnp.ones((6, *x.shape)), **options)
    (params,) = (equation.params for equation in rewritten(fn, X).eqns if equation.primitive.name == "scan")
    assert {key: params[key] for key in options} == options


@pytest.mark.parametrize("prevent_cse, barriers", [(True, 2), (False, 0)])
def test_remat_with_a_collective_is_recomputed(prevent_cse, barriers):
    layer = jax.checkpoint(lambda x: jnp.sin(jnp.sin(lax.pmean(x, "r"))), prevent_cse=prevent_cse)
    fn = jax.grad(lambda x: layer(layer(x)).sum())
    run = lambda *leaves: eliminate_collectives(traced(fn, X), ["r"], leaves)
    # Without barriers, XLA would merge the recomputation with the first computation and save no memory.
    assert jax.jit(run).lower(X).as_text().count("optimization_barrier") == barriers


@pytest.mark.parametrize("axis", ["r", ("r", "d")])
def test_shard_map_with_a_collective_receives_shards(axis):
    split, mesh = PartitionSpec("d"), Mesh(jax.devices()[:2], ("d",))
    normed = lambda part: part / part.sum() - lax.pmean(part.mean(), axis)
    fn = jax.shard_map(normed, mesh=mesh, in_specs=split, out_specs=split, check_vma=False)
    parts = np.arange(8, dtype=np.float32).reshape(2, 4)
    means = parts.mean(1, keepdims=True) if axis == "r" else parts.mean()
    expected = parts / parts.sum(1, keepdims=True) - means
    np.testing.assert_allclose(without_collectives(fn, parts.ravel())[0], expected.ravel(), rtol=1e-6)
