"""A corpus of correct and incorrect programs, with the verdict of the replication analysis on each, under every strategy.

Each program is a step `(state, x) -> (state, outputs)`. The state has a replicated weight `w`, `[4]`, a replicated random key
and a running mean; `x`, `[4]`, is per replica. A verdict is "replicated", or an error and parts of its message.
"""

import pathlib
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.experimental import io_callback

import jdist

from laws import STRATEGIES, assert_in_step, each_row, rows

RIGHT, WRONG, HANGS, WARNS = {}, {}, {}, {}


def right(step):
    """The state stays replicated."""
    RIGHT[step.__name__] = step
    return step


def wrong(*parts):
    """The state would not stay replicated; the message of the error contains all of `parts`."""
    return lambda step: WRONG.setdefault(step.__name__, (step, parts))[0]


def hangs(*parts):
    """Some replicas would wait forever for the others; the message of the error contains all of `parts`."""
    return lambda step: HANGS.setdefault(step.__name__, (step, parts))[0]


def warns(step):
    """The state stays replicated, but is probably not what the user intended."""
    WARNS[step.__name__] = step
    return step


def make_state(key):
    return {"w": jnp.ones(4), "key": key, "mean": jnp.zeros(())}


def loss(w, x):
    return jnp.sum((w * x - 1.0) ** 2)


def descend(state, gradient):
    return {**state, "w": state["w"] - 0.1 * gradient}


# --- gradients


@right
def mean_of_gradients(state, x):
    return descend(state, jdist.all_reduce("mean", jax.grad(loss)(state["w"], x))), None


@right
def mean_by_lax(state, x):
    return descend(state, lax.pmean(jax.grad(loss)(state["w"], x), "replica")), None


@right
def mean_of_gradients_of_the_reduced_loss(state, x):
    gradient = jax.grad(lambda w: jdist.all_reduce("mean", loss(w, x)))(state["w"])
    return descend(state, jdist.all_reduce("mean", gradient)), None


@right
def sum_of_gradients_over_a_global_weight(state, x):
    weight = jdist.all_reduce("sum", jnp.sum(x > 0).astype(jnp.float32))
    return descend(state, jdist.all_reduce("sum", jax.grad(loss)(state["w"], x) / weight)), None


@right
def gradients_gathered_and_averaged(state, x):
    gathered = jdist.all_gather(jax.grad(loss)(state["w"], x)[None], axis=0)
    return descend(state, gathered.mean(0)), None


@right
def gradients_scattered_and_gathered(state, x):
    gradient = jnp.tile(jax.grad(loss)(state["w"], x), jdist.num_replicas())
    piece = lax.psum_scatter(gradient, "replica", tiled=True)
    return descend(state, lax.all_gather(piece, "replica", tiled=True)[:4]), None


@right
def gradients_clipped_after_the_mean(state, x):
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(0.1))
    gradient = jdist.all_reduce("mean", jax.grad(loss)(state["w"], x))
    updates, _ = optimizer.update(gradient, optimizer.init(state["w"]))
    return {**state, "w": optax.apply_updates(state["w"], updates)}, None


@right
def gradients_accumulated_by_a_scan(state, x):
    def add(total, micro):
        return total + jax.grad(loss)(state["w"], micro), None

    total, _ = lax.scan(add, jnp.zeros(4), jnp.stack([x, 2 * x]))
    return descend(state, jdist.all_reduce("mean", total)), None


@wrong("state['w']", "x, which holds one value per replica", "test_replication.py", "loss", 'all_reduce("mean", grads)')
def no_reduction(state, x):
    return descend(state, jax.grad(loss)(state["w"], x)), None


@wrong("state['w']", "x, which")
def gradients_of_the_reduced_loss(state, x):
    return descend(state, jax.grad(lambda w: jdist.all_reduce("mean", loss(w, x)))(state["w"])), None


@wrong("state['w']", "x, which")
def gradients_clipped_and_never_reduced(state, x):
    gradient = jax.grad(loss)(state["w"], x)
    return descend(state, gradient * jnp.minimum(1.0, jdist.all_reduce("max", jnp.linalg.norm(gradient)))), None


@wrong("state['w']", "reduce_scatter")
def gradients_scattered_and_not_gathered(state, x):
    gradient = jdist.all_reduce("mean", jax.grad(loss)(state["w"], x))
    return descend(state, lax.psum_scatter(jnp.tile(gradient, jdist.num_replicas()), "replica", tiled=True)), None


@wrong("state['w']", "ppermute")
def gradients_permuted(state, x):
    gradient = jdist.all_reduce("mean", jax.grad(loss)(state["w"], x))
    last = jdist.num_replicas() - 1
    return descend(state, lax.ppermute(gradient, "replica", [(0, last)])), None


@wrong("state['w']", "all_to_all")
def gradients_exchanged(state, x):
    pieces = jnp.ones((jdist.num_replicas(), 4))
    return descend(state, lax.all_to_all(pieces, "replica", 0, 0)[0]), None


@wrong("state['w']", "psum")
def gradients_reduced_in_groups(state, x):
    groups = [[i] for i in range(jdist.num_replicas())]
    return descend(state, lax.psum(jax.grad(loss)(state["w"], x), "replica", axis_index_groups=groups)), None


# --- statistics, counters, metrics in the state


@right
def batch_statistics_reduced(state, x):
    return {**state, "mean": 0.9 * state["mean"] + 0.1 * jdist.all_reduce("mean", x.mean())}, None


@wrong("state['mean']", "reduce_sum", "x, which")
def batch_statistics_not_reduced(state, x):
    return {**state, "mean": 0.9 * state["mean"] + 0.1 * x.mean()}, None


@right
def counter_of_steps(state, x):
    return {**state, "mean": state["mean"] + 1}, {"loss": loss(state["w"], x)}


@wrong("state['mean']", "axis_index", "Each replica has its own index")
def replica_index_stored(state, x):
    return {**state, "mean": jdist.replica_id().astype(jnp.float32)}, None


@right
def shape_of_the_batch_does_not_vary(state, x):
    return {**state, "mean": jnp.zeros_like(x)[0] + x.shape[0]}, None


# --- randomness


@right
def same_dropout_key_everywhere(state, x):
    key, use = jax.random.split(state["key"])
    return {**state, "key": key, "w": state["w"] * jax.random.bernoulli(use, 0.5, (4,))}, None


@right
def replica_key_used_and_not_stored(state, x):
    key, use = jax.random.split(state["key"])
    mask = jax.random.bernoulli(jdist.replica_key(use), 0.5, (4,))
    gradient = jdist.all_reduce("mean", jax.grad(loss)(state["w"], x * mask))
    return {**descend(state, gradient), "key": key}, None


@wrong("state['key']", "axis_index", "Each replica has its own index")
def replica_key_stored(state, x):
    return {**state, "key": jdist.replica_key(state["key"])}, None


@wrong("state['w']", "x, which")
def key_folded_with_the_data(state, x):
    key = jax.random.fold_in(state["key"], x[0].astype(jnp.int32))
    return {**state, "w": jax.random.normal(key, (4,))}, None


@wrong("state['w']", "rng_uniform")
def random_numbers_of_the_device(state, x):
    return {**state, "w": lax.rng_uniform(0.0, 1.0, (4,))}, None


@wrong("state['mean']", "io_callback", "Each replica runs the callback separately")
def result_of_a_callback(state, x):
    result = io_callback(lambda: np.float32(0), jax.ShapeDtypeStruct((), jnp.float32))
    return {**state, "mean": result}, None


@right
def result_of_a_pure_callback(state, x):
    result = jax.pure_callback(lambda m: np.float32(m + 1), jax.ShapeDtypeStruct((), jnp.float32), state["mean"])
    return {**state, "mean": result}, None


@wrong("state['mean']", "get", "mutable reference")
def value_read_from_a_reference(state, x):
    reference = jax.new_ref(state["mean"])
    reference[...] = x[0]
    return {**state, "mean": reference[...]}, None


# --- control flow


@right
def reduction_in_both_branches(state, x):
    reduced = lax.cond(state["mean"] > 0, lambda: jdist.all_reduce("mean", x), lambda: jdist.all_reduce("max", x))
    return {**state, "w": reduced}, None


@wrong("state['w']", "x, which")
def reduction_in_one_branch(state, x):
    return {**state, "w": lax.cond(state["mean"] > 0, lambda: jdist.all_reduce("mean", x), lambda: x)}, None


@right
def reduction_every_other_step(state, x):
    def skip():
        return state["w"]

    def take():
        return descend(state, jdist.all_reduce("mean", jax.grad(loss)(state["w"], x)))["w"]

    return {**state, "w": lax.cond(state["mean"] % 2 == 0, take, skip)}, None


@wrong("state['w']", "cond")
def branch_chosen_by_the_data(state, x):
    return {**state, "w": lax.cond(x[0] > 0, lambda: state["w"], lambda: -state["w"])}, None


@right
def branch_chosen_by_a_reduced_predicate(state, x):
    finite = jdist.all_reduce("min", jnp.isfinite(x).all().astype(jnp.int32))
    return {**state, "w": lax.cond(finite > 0, lambda: state["w"], lambda: -state["w"])}, None


@right
def select_of_a_reduced_condition(state, x):
    return {**state, "w": jnp.where(jdist.all_reduce("max", x[0]) > 0, state["w"], 0.0)}, None


@wrong("state['w']", "x, which")
def switch_by_the_data(state, x):
    index = jnp.argmax(x)
    return {**state, "w": lax.switch(index, [lambda: state["w"]] * 3 + [lambda: -state["w"]])}, None


@wrong("state['w']", "while", "x, which")
def while_with_a_predicate_of_the_data(state, x):
    return {**state, "w": lax.while_loop(lambda w: w[0] < x[0], lambda w: w + 1, state["w"])}, None


@right
def while_with_a_reduced_predicate(state, x):
    def more(carry):
        return jdist.all_reduce("max", x[0]) > carry[0]

    return {**state, "w": lax.while_loop(more, lambda w: w + 1, state["w"])}, None


@right
def fori_loop_with_a_reduction_inside(state, x):
    w = lax.fori_loop(0, 3, lambda i, w: w - 0.1 * jdist.all_reduce("mean", jax.grad(loss)(w, x)), state["w"])
    return {**state, "w": w}, None


@wrong("state['w']", "x, which")
def fori_loop_with_a_length_from_the_data(state, x):
    length = jnp.clip(x[0].astype(jnp.int32), 0, 3)
    return {**state, "w": lax.fori_loop(0, length, lambda i, w: w + 1.0, state["w"])}, None


@wrong("state['w']", "x, which")
def scan_that_moves_the_data_to_the_weight_in_the_third_iteration(state, x):
    def shift(carry, _):
        a, b, c = carry
        return (b, c, x), None

    (w, _, _), _ = lax.scan(shift, (state["w"],) * 3, None, length=3)
    return {**state, "w": w}, None


@right
def scan_beside_the_data(state, x):
    def body(carry, _):
        w, y = carry
        return (w * 0.9, y + x), y

    (w, y), _ = lax.scan(body, (state["w"], jnp.zeros(4)), None, length=3)
    return {**state, "w": w}, y


# --- functions within functions


@right
def jit_remat_and_custom_rules_inside(state, x):
    @jax.custom_vjp
    def square(w):
        return w * w

    square.defvjp(lambda w: (w * w, w), lambda w, g: (2 * w * g,))

    @jax.custom_jvp
    def double(w):
        return 2 * w

    double.defjvp(lambda primals, tangents: (double(*primals), 2 * tangents[0]))
    inner = jax.jit(jax.checkpoint(lambda w: jnp.sum(jnp.tanh(square(double(w)) * x))))
    return descend(state, jdist.all_reduce("mean", jax.grad(inner)(state["w"]))), None


@wrong("state['w']", "x, which")
def custom_gradient_rule_that_uses_the_data(state, x):
    @jax.custom_vjp
    def scaled(w):
        return w

    scaled.defvjp(lambda w: (w, None), lambda _, g: (g * x,))
    return descend(state, jax.grad(lambda w: jnp.sum(scaled(w)))(state["w"])), None


@right
def vmap_with_a_reduction_inside(state, x):
    pairs = jax.vmap(lambda row: jdist.all_reduce("mean", row))(jnp.stack([x, 2 * x]))
    return {**state, "w": pairs[0]}, None


@right
def helper_compiled_outside_first(state, x):
    return {**state, "w": _reduced(x)}, None


@jax.jit
def _reduced(x):
    return jdist.all_reduce("mean", x)


_reduced(jnp.ones(4))  # traced where it is the identity: JAX must not reuse that trace inside a replica function


@right
def barrier_between_the_two(state, x):
    w, y = lax.optimization_barrier((state["w"], x))
    return {**state, "w": w}, y


@wrong("state['w']", "x, which", "mul at")
def primitive_that_contains_jaxprs(state, x):
    solve = lambda _, b: b * 1.0
    return {**state, "w": lax.custom_linear_solve(lambda v: v, x, solve, symmetric=True)}, None


@right
def primitive_that_contains_jaxprs_on_replicated_values(state, x):
    return {**state, "w": jnp.linalg.solve(jnp.eye(4) * 2, state["w"])}, None


# --- programs that would wait forever


@hangs("psum", "x, which", "the predicate above it")
def collective_in_a_branch_of_some_replicas(state, x):
    return {**state, "w": lax.cond(x[0] > 0, lambda: jdist.all_reduce("mean", x), lambda: x)}, None


@hangs("psum", "x, which")
def collective_in_a_loop_of_varying_length(state, x):
    w = lax.while_loop(lambda w: w[0] < x[0], lambda w: w + 1 + jdist.all_reduce("mean", x), state["w"])
    return {**state, "w": w}, None


@hangs("pmax", "x, which")
def collective_in_the_test_of_a_loop_of_varying_length(state, x):
    w = lax.while_loop(lambda w: w[0] + jdist.all_reduce("max", x)[0] < x[0], lambda w: w + 1, state["w"])
    return {**state, "w": w}, None


@hangs("all_gather", "x, which")
def collective_in_a_scan_in_a_branch(state, x):
    def scan():
        return lax.scan(lambda c, _: (c + jdist.all_gather(x, 0).sum(), None), 0.0, None, length=2)[0]

    return {**state, "mean": lax.cond(x[0] > 0, scan, lambda: 0.0)}, None


@hangs("ppermute", "x, which")
def exchange_in_a_branch(state, x):
    round_trip = lambda: lax.ppermute(x, "replica", [(0, jdist.num_replicas() - 1)])
    return state, lax.cond(x[0] > 0, round_trip, lambda: x)


@right
def replica_index_in_a_branch_does_not_wait(state, x):
    return state, lax.cond(x[0] > 0, lambda: jdist.replica_id(), lambda: 0)


# --- probable mistakes


@warns
def sum_of_a_replicated_value(state, x):
    return {**state, "w": jdist.all_reduce("sum", state["w"])}, None


@warns
def sum_of_a_mean(state, x):
    return descend(state, jdist.all_reduce("sum", jdist.all_reduce("mean", jax.grad(loss)(state["w"], x)))), None


@right
def mean_of_a_replicated_value(state, x):
    return {**state, "w": jdist.all_reduce("mean", state["w"])}, None


@right
def sum_of_a_constant_is_a_count(state, x):
    return {**state, "mean": jdist.all_reduce("sum", 4.0)}, None


@right
def sum_in_a_loop_whose_carry_varies_from_the_second_iteration_on(state, x):
    def body(_, carry):
        a, b = carry
        return x, b + jdist.all_reduce("sum", a)

    _, w = lax.fori_loop(0, 3, body, (state["w"], state["w"]))
    return {**state, "w": w}, None


# --- solvers and custom rules


def reduced_curvature(state, x):
    """Returns the function that multiplies a vector by the Hessian of the mean loss."""
    product = lambda v: jax.jvp(lambda w: jax.grad(loss)(w, x), (state["w"],), (v,))[1]
    return lambda v: jdist.all_reduce("mean", product(v))


@right
def newton_step_by_conjugate_gradients(state, x):
    gradient = jdist.all_reduce("mean", jax.grad(loss)(state["w"], x))
    direction, _ = jax.scipy.sparse.linalg.cg(reduced_curvature(state, x), gradient, maxiter=4)
    return {**state, "w": state["w"] - direction}, None


@right
def gradient_of_a_solution_by_conjugate_gradients(state, x):
    solution = lambda b: jax.scipy.sparse.linalg.cg(reduced_curvature(state, x), b, maxiter=4)[0]
    return {**state, "w": jax.grad(lambda b: jnp.sum(solution(b) ** 2))(state["w"])}, None


@wrong("state['w']", "x, which")
def newton_step_with_a_curvature_per_replica(state, x):
    gradient = jdist.all_reduce("mean", jax.grad(loss)(state["w"], x))
    curvature = lambda v: jax.jvp(lambda w: jax.grad(loss)(w, x), (state["w"],), (v,))[1]
    return {**state, "w": jax.scipy.sparse.linalg.cg(curvature, gradient, maxiter=4)[0]}, None


@hangs("psum", "x, which")
def conjugate_gradients_of_varying_length(state, x):
    gradient = jax.grad(loss)(state["w"], x)
    return state, jax.scipy.sparse.linalg.cg(reduced_curvature(state, x), gradient, maxiter=4)[0]


def root_of(level, x):
    """Returns `r` with `mean(x**2) * r == level`; the mean is over all replicas."""
    slope = lambda r: jdist.all_reduce("mean", jnp.mean(x**2)) * r
    solve = lambda f, r: lax.fori_loop(0, 3, lambda _, r: r - f(r) / jax.grad(f)(r), r)
    return lax.custom_root(lambda r: slope(r) - level, jnp.float32(1), solve, lambda g, y: y / g(jnp.float32(1)))


@right
def gradient_of_a_root_of_a_reduced_function(state, x):
    level = jnp.sum(state["w"])
    return {**state, "mean": root_of(level, x) + jax.grad(lambda level: root_of(level, x))(level)}, None


@wrong("state['mean']", "x, which")
def root_of_a_reduced_function_at_a_level_per_replica(state, x):
    return {**state, "mean": root_of(jnp.sum(x), x)}, None


@jax.custom_batching.custom_vmap
def summed(x):
    return jdist.all_reduce("mean", x)


summed.def_vmap(lambda size, batched, x: (jdist.all_reduce("mean", x), batched[0]))


@right
def reduction_with_a_custom_vmap_rule(state, x):
    return {**state, "w": summed(x) + jax.vmap(summed)(x)}, None


@wrong("state['w']", "x, which")
def function_with_a_custom_vmap_rule_that_is_not_reduced(state, x):
    return {**state, "w": jax.custom_batching.sequential_vmap(lambda x: x + 1)(x)}, None


@right
def linear_function_with_a_custom_transpose(state, x):
    mean = lambda scale, x: jdist.all_reduce("mean", scale * x)
    return {**state, "w": jax.custom_derivatives.linear_call(mean, lambda scale, y: scale * y, 2.0, x)}, None


@right
def functions_that_jax_traces_to_python_code(state, x):
    w = jdist.all_reduce("mean", x)
    return {**state, "w": w + jnp.nonzero(w, size=4)[0] + jnp.searchsorted(w, 0.5) + jnp.ldexp(w, 2)}, None


@wrong("state['w']", "x, which")
def functions_that_jax_traces_to_python_code_of_a_varying_value(state, x):
    return {**state, "w": state["w"] + jnp.nonzero(x, size=4)[0]}, None


# --- the verdicts


@each_row("step", RIGHT.values(), ids=RIGHT)
def test_correct_program_runs_and_its_state_stays_replicated(step, strategy):
    state = strategy.init(make_state, jax.random.key(0))
    compiled = strategy.step(step)
    if step is result_of_a_pure_callback and strategy.replicas.model_axes:
        message = r"`jax\.pure_callback` at \S*test_replication\.py:\d+: jax \S+ cannot partition a callback.*axis_names={'model'}"
        with pytest.raises(NotImplementedError, match=message):
            compiled(state, rows(strategy, 4))
        return
    for seed in range(2):
        state, _ = compiled(state, rows(strategy, 4, seed=seed))
    assert_in_step(state)
    assert [name for name in compiled.proof.per_replica if name.startswith("state")] == []


@each_row("step, parts", WRONG.values(), ids=WRONG)
def test_incorrect_program_raises_with_the_cause(step, parts, strategy):
    state = strategy.init(make_state, jax.random.key(0))
    with pytest.raises(jdist.NotMirroredError) as error:
        strategy.step(step)(state, rows(strategy, 4))
    for part in parts:
        assert part in str(error.value)
    assert not state["w"].is_deleted()  # nothing ran


@each_row("step, parts", HANGS.values(), ids=HANGS)
def test_program_that_would_hang_raises_with_the_cause(step, parts, strategy):
    state = strategy.init(make_state, jax.random.key(0))
    with pytest.raises(jdist.DivergentCollectiveError) as error:
        strategy.run(step, (state, rows(strategy, 4)))
    for part in (*parts, "test_replication.py:"):
        assert part in str(error.value)


@each_row("step", WARNS.values(), ids=WARNS)
def test_probable_mistake_warns_on_its_line(step, strategy):
    state = strategy.init(make_state, jax.random.key(0))
    with pytest.warns(jdist.RepeatedSumWarning, match="multiplies it by the number of replicas") as warned:
        strategy.step(step)(state, rows(strategy, 4))
    assert warned[0].filename == __file__


def test_sum_of_a_replicated_write_warns_on_its_line(strategy):
    def step(state):
        doubled = state["n"] * 2.0  # here
        return {"n": doubled, "copied": state["n"]}, None

    state = {name: jdist.Mirrored(np.float32(1), "sum") for name in ("n", "copied")}
    with pytest.warns(jdist.RepeatedSumWarning) as warned:
        strategy.step(step)(strategy.put(state))  # the call
    lines = pathlib.Path(__file__).read_text().splitlines()
    assert {one.filename for one in warned} == {__file__}
    assert {lines[one.lineno - 1].partition("# ")[2] for one in warned} == {"here", "the call"}


def test_probable_mistake_warns_once_where_warnings_are_shown_once():
    strategy = STRATEGIES["mirrored_2"]()
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("default")
        for _ in range(2):
            strategy.step(sum_of_a_replicated_value)(strategy.init(make_state, jax.random.key(0)), rows(strategy, 4))
    assert [one.category for one in warned] == [jdist.RepeatedSumWarning, jdist.NotEquivalentWarning]


def test_corpus_has_correct_and_incorrect_programs():
    assert min(len(RIGHT), len(WRONG)) >= 15
    assert len(RIGHT) + len(WRONG) + len(HANGS) + len(WARNS) >= 50
