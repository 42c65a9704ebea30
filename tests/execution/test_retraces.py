"""`RetraceWarning`: names the leaf that has changed, and is not shown where another program is expected."""

import itertools
import re
import warnings
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jdist
from jdist._src.core import declared_shapes

from laws import STATES, STRATEGIES, each_row


@pytest.fixture(autouse=True)
def no_declared_shapes(monkeypatch):
    """The shapes of the buckets of other tests in this process are not expected here."""
    monkeypatch.setattr(declared_shapes, "_declared", set())


def add_mean(state, *xs):
    means = [jdist.all_reduce("mean", jnp.mean(x.astype(jnp.float32))) for x in jax.tree.leaves(xs)]
    return jax.tree.map(lambda w: w + sum(means), state), None


def retraces(call):
    """The messages and the places of the warnings of a call."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call()
    return [warning for warning in caught if warning.category is jdist.RetraceWarning]


def ones(*shape, dtype=np.float32):
    return np.ones(shape, dtype)


@jax.tree_util.register_pytree_node_class
class Flagged:
    """A node with a static value."""

    def __init__(self, value, flag):
        self.value, self.flag = value, flag

    def tree_flatten(self):
        return (self.value,), self.flag

    @classmethod
    def tree_unflatten(cls, flag, children):
        return cls(*children, flag)


def batch_norm(use_running_average):
    return nnx.BatchNorm(3, use_running_average=use_running_average, rngs=nnx.Rngs(0))


def replicated(strategy, array, spec=()):
    return jax.device_put(array, jax.NamedSharding(strategy.mesh, jax.P(*spec)))


CHANGES = {
    "shape": (lambda s: s.split(ones(8, 3)), lambda s: s.split(ones(8, 4)), "xs[0] is float32[2,4,4], and was float32[2,4,3]. Pass arrays of one shape"),
    "last batch": (lambda s: s.split(ones(8, 3)), lambda s: s.split(ones(4, 3)), 'was float32[2,4,3]. Pass arrays of one shape: `remainder="pad"`'),
    "dtype": (lambda s: s.split(ones(8)), lambda s: s.split(ones(8, dtype=np.int32)), "xs[0] is int32[2,4], and was float32[2,4]. Pass arrays of one dtype"),
    "weak type": (lambda s: s.put(1.0), lambda s: 1.0, "xs[0] is float32[] of weak type, and was float32[]. Pass an array with a dtype in each call"),
    "two leaves": (lambda s: s.put({"a": 1.0, "b": ones(2)}), lambda s: s.put({"a": 1, "b": ones(3)}), "xs[0]['a'] is int32[], and was float32[] (and 1 more leaves)."),
    "new leaf": (lambda s: s.put({"a": 1.0}), lambda s: s.put({"a": 1.0, "b": 1.0}), "xs[0]['b'] is new. Pass arguments of one structure"),
    "missing leaf": (lambda s: s.put({"a": 1.0, "b": 1.0}), lambda s: s.put({"a": 1.0}), "xs[0]['b'] is missing."),
    "static value": (lambda s: Flagged(s.put(1.0), "a"), lambda s: Flagged(s.put(1.0), "b"), "a static value in `xs[0]` is `Flagged` with b, and was `Flagged` with a. Pass a value that"),
    "attribute": (lambda s: s.put(batch_norm(False)), lambda s: s.put(batch_norm(True)), "is `BatchNorm` with use_running_average=True, and was `BatchNorm` with use_running_average=False. Pass"),
    "part of a static value": (lambda s: Flagged(s.put(1.0), ("x" * 200, 1)), lambda s: Flagged(s.put(1.0), ("x" * 200, 2)), "is `Flagged` with 2, and was `Flagged` with 1."),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore::jdist.ReplicatedBatchWarning")
@each_row("first, second, message", CHANGES.values(), ids=CHANGES)
def test_the_warning_names_the_change_and_the_line_of_the_call(first, second, message, two):
    step = two.step(add_mean)
    state, _ = step(two.put(0.0), first(two))
    call = lambda: step(state, second(two))
    (warning,) = retraces(call)
    assert str(warning.message).startswith("`add_mean` is traced and compiled again: ")
    assert message in str(warning.message)
    assert (warning.filename, warning.lineno) == (__file__, call.__code__.co_firstlineno)


@pytest.mark.filterwarnings("ignore::jdist.ReplicatedBatchWarning")
@pytest.mark.parametrize("name", ["mirrored_3", "sharded_4", "central_2", "parameter_server"])
def test_all_strategies_and_ways_to_call_a_step(name):
    strategy = jdist.ParameterServerStrategy(workers=2) if name == "parameter_server" else STRATEGIES[name]()
    size = len(strategy.devices)
    late = jdist.step(add_mean)
    for step in (strategy.step(add_mean), late.on(strategy)):
        state, _ = step(strategy.put(0.0), strategy.split(ones(4 * size)))
        assert len(retraces(lambda: step(state, strategy.split(ones(size))))) == 1  # noqa: B023
    with strategy.scope():
        assert len(retraces(lambda: late(strategy.put(0.0), strategy.split(ones(2 * size))))) == 1


def test_a_warning_that_is_an_error_leaves_the_state_valid(two):
    step = two.step(add_mean)
    state, _ = step(two.put(0.0), two.split(ones(8)))
    with pytest.raises(jdist.RetraceWarning):
        step(state, two.split(ones(4)))
    assert float(state) == 1.0
    step(state, two.split(ones(8)))


def test_sharding_of_a_state(two):
    strategy = STRATEGIES["sharded_4"]()
    step, x = strategy.step(add_mean), strategy.split(ones(8))
    state = {"w": replicated(strategy, ones(8, 8))}

    def call():
        new, _ = step(state, x)
        step(new, x)

    (warning,) = retraces(call)
    assert re.search(
        r"`add_mean` is compiled again: the sharding of state\['w'\] is .*'data'.*, and was ", str(warning.message)
    )
    assert "Place the arguments as the step returns them: the state by `strategy.put`" in str(warning.message)


def test_the_message_counts_programs_from_five_on(two):
    step = two.step(add_mean)
    caught = retraces(lambda: [step(two.put(0.0), two.split(ones(2 * n))) for n in (1, 2, 1, 3, 4, 5, 2)])
    assert ["programs of this step" in str(warning.message) for warning in caught] == [False, False, False, True]
    assert "These are 5 programs of this step. Pass arrays of one shape" in str(caught[-1].message)


def of_buckets(two):
    batches = lambda: (ones(4, width) for width in (3, 7, 4, 12, 5))
    step, state = two.step(add_mean), two.put(0.0)
    for batch in two.distribute_dataset(batches, batch_size=None, buckets=jdist.data.Buckets((4, 8, 16))):
        state, _ = step(state, batch)


def of_lowering(two):
    step, state = two.step(add_mean), two.put(0.0)
    for n in (2, 4, 6):
        two.compile(step, state, two.split(ones(n)))
        jdist.debug.explain(step, state, two.split(ones(n)))
    step(state, two.split(ones(8)))
    two.compile(step, two.put(0.0), two.split(ones(2)))


def of_cleared_caches(two):
    step, state = two.step(add_mean), two.put(0.0)
    for _ in range(3):
        jax.clear_caches()
        state, _ = step(state, two.split(ones(4)))


def of_host_arrays(two):
    for state in ({"w": ones(3), "n": 0.0}, {"w": jnp.ones(3), "n": np.float32(0)}, {"w": ones(3), "n": np.float64(1)}):
        step = two.step(add_mean)
        for _ in range(3):
            state, _ = step(state, two.split(ones(4)))


def of_other_arguments(two):
    step, state = two.step(add_mean), two.put(0.0)
    for number in (1, 2, 3):
        state, _ = step(state, *[two.split(ones(4))] * number)


def of_evaluation(two):
    evaluate = jdist.eval_step(lambda w, x: {"x": x * w})
    with two.scope():
        for n in (2, 4, 6):
            evaluate(two.put(1.0), two.split(ones(n)))


def of_run(two):
    for n in (2, 4, 6):
        two.run(of_run.mean, (two.split(ones(n)),))


of_run.mean = lambda x: jdist.all_reduce("mean", x.mean())


def of_steps_per_call(two):
    step, state = two.step(add_mean, steps_per_call=2), two.put(0.0)
    for _ in range(3):
        state, _ = step(state, [two.split(ones(4))] * 2)


def of_last_group(two):
    # Five batches are two calls of two steps, and one step; the last one is padded.
    model = (lambda key, x: {"w": jnp.ones(3)}, lambda params, x: x @ params["w"])
    trainer = jdist.Trainer(model, optax.sgd(0.1), optax.squared_error, strategy=two)
    trainer.fit((ones(18, 3), ones(18)), batch_size=4, epochs=2, steps_per_call=2)


def of_debug_strategy(two):
    strategy = jdist.testing.DebugStrategy(2)
    step, state = strategy.step(add_mean), strategy.put(0.0)
    for n in (2, 4):
        state, _ = step(state, strategy.split(ones(n)))


EXPECTED = {fn.__name__: fn for fn in (of_buckets, of_lowering, of_cleared_caches, of_host_arrays, of_other_arguments, of_evaluation, of_run, of_steps_per_call, of_last_group, of_debug_strategy)}  # fmt: skip


@pytest.mark.parametrize("name", EXPECTED)
def test_expected_programs_are_not_reported(name, two):
    assert [str(warning.message) for warning in retraces(lambda: EXPECTED[name](two))] == []


@pytest.mark.parametrize("kind", STATES)
def test_a_loop_over_any_state_is_traced_once(kind, two):
    state_kind = STATES[kind]()
    step, state = two.step(state_kind.step), two.init(state_kind.make)
    x = two.split(ones(8, 4))

    def call():
        new = state
        for _ in range(3):
            new, _ = step(new, x)

    assert retraces(call) == []


def run_lambdas(two):
    for i in range(22):
        two.run(lambda x: x * i, (1.0,))  # noqa: B023


def make_steps(two):
    for _ in range(22):
        two.step(lambda w: (w + 1, None))(two.put(0))


def make_late_steps(two):
    with two.scope():
        for _ in range(22):
            jdist.step(lambda w: (w + 1, None))(two.put(0))


def change_static_arguments(two):
    step = jdist.step(lambda w, rate: (w * rate, None), static_argnames="rate")
    with two.scope():
        for i in range(22):
            step(two.put(1.0), rate=i)


def make_partials(two):
    for i in range(22):
        two.run(partial(lambda i, x: x * i, i), (1.0,))


LOOPS = [run_lambdas, make_steps, make_late_steps, change_static_arguments, make_partials]


@pytest.mark.parametrize("loop", LOOPS, ids=lambda loop: loop.__name__)
def test_functions_that_are_made_in_a_loop_are_reported_once(loop, two):
    (warning,) = retraces(lambda: loop(two))
    assert warning.filename == __file__
    first = loop.__code__.co_firstlineno
    assert first < warning.lineno <= first + 5
    assert "has compiled `" in str(warning.message)
    assert "` 20 times: once for each function object" in str(warning.message)


def test_many_functions_and_strategies_of_one_line_are_not_reported(two):
    functions = [eval(f"lambda x: x + {i}") for i in range(22)]
    for fn in functions:
        assert retraces(lambda: two.run(fn, (1.0,))) == []  # noqa: B023
    for _ in range(22):
        strategy = jdist.MirroredStrategy(["cpu:0", "cpu:1"])
        assert retraces(lambda: strategy.run(lambda x: x, (1.0,))) == []  # noqa: B023
    for _ in range(22):
        assert retraces(lambda: two.run(functions[0], (1.0,))) == []


PLACEMENTS = {
    "numpy": lambda s, tree: tree,
    "put": lambda s, tree: s.put(tree),
    "jax": lambda s, tree: jax.tree.map(jnp.asarray, tree),
    "replicated": lambda s, tree: replicated(s, tree),
    "split": lambda s, tree: replicated(s, tree, s.mesh.axis_names[-1:]),
}


def swapped(state, x):
    mean = jdist.all_reduce("mean", x.mean())
    return {"a": state["b"], "b": state["a"] * mean, "c": state["c"], "d": jnp.zeros(8)}, jnp.zeros(8) + mean


@pytest.mark.parametrize("name", ["one_device", "mirrored_1", "mirrored_2", "sharded_4", "central_2"])
def test_the_memory_of_every_leaf_is_reused(name):
    """JAX warns of donated buffers that it cannot reuse, which is an error here. A state keeps shapes and dtypes, so none is left."""
    strategy = STRATEGIES[name]()
    x = strategy.split(ones(8))
    for place, fn in itertools.product(PLACEMENTS, (add_mean, swapped)):
        state = PLACEMENTS[place](strategy, {key: ones(8) for key in "abcd"})
        step = strategy.step(fn)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", jdist.RetraceWarning)
            for _ in range(2):
                state, _ = step(state, x)
