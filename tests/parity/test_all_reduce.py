"""`all_reduce` and `merge_call` in replica functions: the rows AR of `rows.txt`."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jdist

from laws import STRATEGIES, each_row, rows


def _each(strategy, fn, *args):
    """Returns the result of `fn` on each replica."""
    return strategy.local_results(strategy.run(fn, args))


def _merged_sum(x):
    return jdist.get_replica_context().merge_call(lambda strategy, x: strategy.reduce("sum", x, axis=None), (x,))


WORDS = {"all_reduce": lambda x: jdist.all_reduce("sum", x), "merge_call": _merged_sum}


def test_ar2_all_reduce_of_a_tree_is_the_tree_of_sums_on_each_replica(two):
    values = jdist.PerReplica({"a": np.ones(2), "b": [np.full(2, 2.0), [np.full(2, 3.0), np.full(2, 4.0)]]})
    result = _each(two, lambda tree: jdist.all_reduce("sum", tree), values)
    expected = {"a": 2.0, "b": [4.0, [6.0, 8.0]]}
    chex.assert_trees_all_equal(jax.tree.map(float, result), (expected, expected))


def test_ar3_all_reduce_of_slices_is_the_sum_of_their_tables(strategy):
    n = strategy.num_replicas_in_sync
    slices = jdist.RowSlices(np.float32([[[1, 2]]] * n), np.int32([[1]] * n), num_rows=3)
    for table in _each(strategy, lambda s: jdist.all_reduce("sum", s).dense(), jdist.PerReplica(slices)):
        np.testing.assert_array_equal(table, [[0, 0], [n, 2 * n], [0, 0]])


def test_ar4_mean_of_integers_is_a_float(two):
    mean = two.run(lambda: jdist.all_reduce("mean", jdist.replica_id() + 1))
    assert (mean.item(), mean.dtype) == (1.5, jnp.float32)


def test_ar6_all_reduce_with_an_unknown_operation_is_an_error(two):
    with pytest.raises(ValueError, match=r"'PROD' is not a reduction; take one of 'SUM', 'MEAN', 'MAX', 'MIN'"):
        two.run(lambda: jdist.all_reduce("PROD", jdist.replica_id()))
    assert (
        int(two.run(lambda: jdist.all_reduce("MAX", jdist.replica_id() + 1))) == 2
    )  # jdist supports MAX, TensorFlow does not


def test_ar7_all_reduce_outside_any_strategy_is_the_value():
    assert jdist.all_reduce("sum", 3.0).item() == 3.0
    assert jdist.all_reduce("mean", 3.0).item() == 3.0


GRADIENTS = {"sum": [4.0, 8.0], "mean": [2.0, 4.0]}


@pytest.mark.parametrize("op, expected", GRADIENTS.items(), ids=GRADIENTS)
def test_ar10_gradient_of_all_reduced_squares_is_the_reduction_of_the_gradients(op, expected, two):
    result = _each(two, jax.grad(lambda x: jdist.all_reduce(op, x**2)), jdist.PerReplica(np.float32([1, 2])))
    assert [float(x) for x in result] == expected


def _pulled_back(op):
    def fn(x, c):
        y, pull = jax.vjp(lambda x: jdist.all_reduce(op, x), x)
        return y, *pull(c)

    return fn


PULLED = {"sum": (4.0, 4.0), "mean": (2.0, 2.0)}


@pytest.mark.parametrize("op, expected", PULLED.items(), ids=PULLED)
def test_ar11_gradient_of_all_reduce_is_the_same_reduction_of_the_incoming_gradients(op, expected, two):
    x = jdist.PerReplica(np.float32([1, 3]))
    for result in _each(two, _pulled_back(op), x, x):
        assert tuple(map(float, result)) == expected


@pytest.mark.parametrize("op", ["sum", "mean"])
def test_ar11_gradient_of_all_reduce_is_the_reduction_under_every_strategy(op, strategy):
    x, c = rows(strategy, 2), rows(strategy, 2, seed=1)
    reduction = {"sum": np.sum, "mean": np.mean}[op]
    for result in _each(strategy, _pulled_back(op), x, c):
        expected = reduction(np.asarray(x.tree), axis=0), reduction(np.asarray(c.tree), axis=0)
        chex.assert_trees_all_close(result, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["one_device", "mirrored_1"])
@pytest.mark.parametrize("op", ["sum", "mean"])
def test_ar11_gradient_of_all_reduce_on_one_replica_is_the_incoming_gradient(op, name):
    x, c = jdist.PerReplica(np.float32([1])), jdist.PerReplica(np.float32([3]))
    assert [tuple(map(float, result)) for result in _each(STRATEGIES[name](), _pulled_back(op), x, c)] == [(1.0, 3.0)]


TOGETHER = {"sum": (4.0, [42.0, 43.0]), "mean": (2.0, [21.0, 21.5])}


@pytest.mark.parametrize("op, expected", TOGETHER.items(), ids=TOGETHER)
def test_ar12_scalar_and_vector_in_one_call_are_reduced_separately(op, expected, two):
    values = jdist.PerReplica((np.float32([1, 3]), np.float32([[20, 20.5], [22, 22.5]])))
    for scalar, vector in _each(two, lambda tree: jdist.all_reduce(op, tree), values):
        assert (scalar.item(), vector.tolist()) == expected


def test_ar13_gradient_of_a_batch_is_local_to_each_replica(two):
    gradient = jax.grad(lambda x: jnp.sum(x**2))
    batches = two.distribute_dataset(np.float32([5, 6, 7, 8]), batch_size=2)
    result = [[x.item() for x in _each(two, gradient, batch)] for batch in batches]
    assert result == [[10.0, 12.0], [14.0, 16.0]]


def test_ar13_gradient_through_a_compiled_model_reaches_every_replica(strategy):
    model = jax.jit(lambda w, x: jnp.sum(jnp.tanh(w * x)))
    w, x = np.float32([0.5, 2.0]), rows(strategy, 2)
    result = _each(strategy, jax.grad(model), w, x)
    for gradient, row in zip(result, np.asarray(x.tree), strict=True):
        np.testing.assert_allclose(gradient, row / np.cosh(w * row) ** 2, rtol=1e-4)


FLOWS = {
    "cond": (lambda word, go, x: lax.cond(go, word, lambda x: x, x), 1),
    "while": (
        lambda word, go, x: lax.while_loop(
            lambda carry: carry[0] < 3, lambda carry: (carry[0] + go, carry[1] + word(x)), (0, jnp.zeros_like(x))
        )[1],
        3,
    ),
    "scan": (lambda word, go, x: lax.scan(lambda total, _: (total + word(x), None), jnp.zeros_like(x), length=2)[0], 2),
    "jit": (lambda word, go, x: jax.jit(word)(x), 1),
}


@each_row("word", WORDS.values(), ids=WORDS)
@each_row("flow, times", FLOWS.values(), ids=FLOWS)
def test_ar14_ar15_collective_in_control_flow_equals_the_collective_outside(flow, times, word, strategy):
    x = rows(strategy, 2)
    for result in _each(strategy, lambda go, x: flow(word, go, x), True, x):
        np.testing.assert_allclose(result, times * np.sum(x.tree, axis=0), rtol=1e-5, atol=1e-6)


def test_ar16_merge_call_in_a_compiled_replica_function_may_return_nothing(strategy):
    seen = []
    replica_fn = jax.jit(lambda: jdist.get_replica_context().merge_call(seen.append))
    assert strategy.run(replica_fn) is None
    assert seen == [strategy]


def test_ar18_merge_call_returns_to_each_replica_its_value(strategy):
    merge = lambda fn, x: jdist.get_replica_context().merge_call(fn, (x,))
    result = strategy.run(lambda: merge(lambda strategy, x: x, jdist.replica_id()))
    assert isinstance(result, jdist.PerReplica)
    assert [int(x) for x in result.values] == list(range(strategy.num_replicas_in_sync))
    assert strategy.run(lambda: merge(lambda strategy, x: None, jdist.replica_id())) is None


def test_ar19_context_in_merge_call_is_the_cross_replica_context(strategy):
    def look(merging):
        return jdist.in_cross_replica_context(), jdist.get_replica_context(), jdist.get_strategy(), merging

    inside, around = [], []

    def replica_fn():
        before = jdist.get_replica_context()
        before.merge_call(lambda merging: inside.append(look(merging)))
        around.append((before, jdist.get_replica_context(), jdist.in_cross_replica_context()))

    strategy.run(replica_fn)
    assert inside == [(True, None, strategy, strategy)]
    ((before, after, crossed),) = around
    assert (before, crossed) == (after, False)


@each_row("word", WORDS.values(), ids=WORDS)
def test_ar20_collective_on_replica_0_only_is_an_error(word, strategy):
    lonely = lambda x: lax.cond(jdist.replica_id() == 0, word, lambda x: x, x)
    message = (
        r"(psum|all_gather) .* waits for every replica(.|\n)*Make the predicate the same on every replica \(`jdist"
    )
    with pytest.raises(jdist.DivergentCollectiveError, match=message):
        strategy.run(lonely, (np.float32(1),))


def _divide_by_nothing(*_):
    raise ZeroDivisionError("mine")


RAISING = {
    "replica_function": _divide_by_nothing,
    "merge_call": lambda *_: jdist.get_replica_context().merge_call(_divide_by_nothing),
    "merge_call_in_scan": lambda *_: lax.scan(
        lambda carry, _: (jdist.get_replica_context().merge_call(_divide_by_nothing), None), 0, length=2
    ),
}


@pytest.mark.parametrize("fn", RAISING.values(), ids=RAISING)
def test_ar21_exception_of_a_replica_function_reaches_the_caller(fn, strategy):
    for call in (lambda: strategy.run(fn), lambda: strategy.step(fn)(np.float32(1))):
        with pytest.raises(ZeroDivisionError, match="mine"):
            call()
        assert not jdist.has_strategy()
        assert not jdist.in_cross_replica_context()
