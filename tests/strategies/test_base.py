"""What every strategy does: run, init, step, and what it remembers of a function."""

import functools
import gc
import resource
import weakref

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jdist

from laws import STRATEGIES, assert_in_step, rows


def test_strategy_says_what_it_is():
    strategy = STRATEGIES["mirrored_3"]()
    assert repr(strategy) == "MirroredStrategy(['cpu:5', 'cpu:1', 'cpu:2'])"
    assert repr(STRATEGIES["one_device"]()) == "OneDeviceStrategy(['cpu:0'])"
    assert strategy.num_replicas_in_sync == strategy.mesh.size == 3
    assert [device.id for device in strategy.mesh.devices.flat] == [5, 1, 2]


# --- training


def squares(w, x, y):
    return jnp.mean((x @ w["w"] + w["b"] - y) ** 2)


def descend(state, batch):
    loss, gradient = jax.value_and_grad(squares)(state["model"], batch["x"], batch["y"])
    loss, gradient = jdist.all_reduce("mean", (loss, gradient))
    model = jax.tree.map(lambda w, g: w - 0.1 * g, state["model"], gradient)
    return {"model": model, "steps": state["steps"] + 1}, {"loss": loss, "own": squares(model, batch["x"], batch["y"])}


def _by_numpy(x, y, batch, steps):
    w, b, losses = np.zeros(3), 0.0, []
    for step in range(steps):
        rows = slice(step * batch, (step + 1) * batch)
        error = x[rows] @ w + b - y[rows]
        losses.append(np.mean(error**2))
        w, b = w - 0.2 * error @ x[rows] / batch, b - 0.2 * error.mean()
    return {"w": w, "b": b}, losses


def test_steps_of_least_squares_are_those_of_numpy_on_the_whole_batch(strategy):
    generator = np.random.default_rng(1)
    x, y = generator.normal(size=(120, 3)), generator.normal(size=120)
    model, losses = _by_numpy(x, y, 24, 5)

    step, found = strategy.step(descend), []
    state = strategy.init(lambda: {"model": {"w": jnp.zeros(3), "b": jnp.zeros(())}, "steps": 0})
    for batch in strategy.distribute_dataset({"x": np.float32(x), "y": np.float32(y)}, 24):
        state, outputs = step(state, batch)
        found.append(outputs["loss"])
    chex.assert_trees_all_close(state["model"], jax.tree.map(np.float32, model), rtol=1e-5)
    np.testing.assert_allclose(found, losses, rtol=1e-5)
    assert int(state["steps"]) == 5
    assert outputs["own"].tree.shape == (strategy.num_replicas_in_sync,)
    assert_in_step(state)


def test_step_takes_more_inputs_and_none(strategy):
    step = strategy.step(lambda state, x, pair: (state + jdist.all_reduce("sum", x) + pair[0], pair[1]))
    x = strategy.put(jdist.PerReplica(np.ones(strategy.num_replicas_in_sync, np.float32)))
    state, outputs = step(strategy.put(np.float32(1)), x, (2.0, None))
    assert (float(state), outputs) == (3.0 + strategy.num_replicas_in_sync, None)
    state, outputs = strategy.step(lambda state: (state * 2, ()))(state)
    assert (float(state), outputs) == (6.0 + 2 * strategy.num_replicas_in_sync, ())


def test_step_is_known_by_what_its_function_is_called(two):
    def train(state):
        """Trains."""
        return state, None

    step = two.step(train)
    assert (step.__name__, step.__doc__, step.__wrapped__) == ("train", "Trains.", train)


class Trainer:
    """A callable object, whose attributes are nobody else's business."""

    def __init__(self):
        self._compiled = self._call = self._mesh = self._proofs = self._donates = None

    def __call__(self, state, x):
        return state + jdist.all_reduce("mean", x), None

    def train(self, state, x):
        return self(state, x)


CALLABLES = {
    "object": Trainer,
    "method": lambda: Trainer().train,
    "partial": lambda: functools.partial(Trainer.train, Trainer()),
    "compiled": lambda: jax.jit(Trainer().train),
}


@pytest.mark.parametrize("make", CALLABLES.values(), ids=CALLABLES)
def test_step_may_be_any_callable(make, two):
    state, _ = two.step(make())(two.put(np.zeros(3, np.float32)), rows(two, 3))
    np.testing.assert_allclose(state, np.mean(rows(two, 3).tree, 0), rtol=1e-6)


# --- init


def test_init_makes_every_leaf_on_all_devices_with_a_definite_dtype(strategy):
    def make(key, tree):
        return {"w": jax.random.normal(key, (2, 3)), "key": key, "n": 0, "rate": 0.5, "given": tree, "none": None}

    state = strategy.init(make, jax.random.key(1), {"x": np.arange(3, dtype=np.float32)})
    for leaf in jax.tree.leaves(state):
        assert leaf.sharding.device_set == set(strategy.mesh.devices.flat)
        assert leaf.committed
        assert not jax.typeof(leaf).weak_type
    assert_in_step(state)
    np.testing.assert_allclose(state["w"], jax.random.normal(jax.random.key(1), (2, 3)), rtol=1e-6)
    np.testing.assert_array_equal(state["given"]["x"], np.arange(3))
    assert (int(state["n"]), state["n"].dtype, float(state["rate"])) == (0, np.int32, 0.5)


def test_init_of_wrapped_replica_key_differs_per_replica(strategy):
    state = strategy.init(lambda key: {"own": jdist.PerReplica(jdist.replica_key(key))}, jax.random.key(1))
    expected = [jax.random.fold_in(jax.random.key(1), i) for i in range(strategy.num_replicas_in_sync)]
    found = [jax.random.key_data(key).tolist() for key in state["own"].values]
    assert found == [jax.random.key_data(key).tolist() for key in expected]


def test_init_of_bare_replica_key_is_refused_under_every_strategy(strategy):
    says = r"(?s)state\['dropout'\] is not proved.*axis_index.*test_base\.py:\d+.*wrap it.*`jdist\.PerReplica\(x\)`"
    with pytest.raises(jdist.NotMirroredError, match=says):
        strategy.init(lambda key: {"dropout": jdist.replica_key(key)}, jax.random.key(1))


def test_init_takes_arrays_from_anywhere(two):
    given = STRATEGIES["mirrored_3"]().put(np.arange(3)), jax.device_put(1.0, jax.devices()[7]), np.ones(2), 3
    state = two.init(lambda *args: args, *given)
    chex.assert_trees_all_close(
        state, (np.arange(3, dtype=np.int32), np.float32(1), np.ones(2, np.float32), np.int32(3))
    )
    assert all(leaf.sharding.device_set == set(two.mesh.devices.flat) for leaf in state)


# What a state may be made of, again and again, though each step gives its state's memory away.
SOURCES = {
    "numpy": lambda s: np.arange(4096, dtype=np.float32),
    "array_on_the_default_device": lambda s: jnp.arange(4096, dtype=jnp.float32),
    "array_on_these_devices": lambda s: s.put(np.arange(4096, dtype=np.float32)),
}
MAKERS = {"put": lambda s, x: s.put({"w": x}), "init": lambda s, x: s.init(lambda x: {"w": x}, x)}


@pytest.mark.parametrize("source", SOURCES.values(), ids=SOURCES)
@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
@pytest.mark.parametrize("name", ["one_device", "mirrored_2"])
def test_state_made_of_an_array_leaves_the_array_to_its_owner(name, make, source):
    strategy = STRATEGIES[name]()
    mine = source(strategy)
    state = make(strategy, mine)
    step = strategy.step(lambda state: ({"w": state["w"] * 2}, None))
    for _ in range(2):
        state, _ = step(state)
    np.testing.assert_array_equal(mine, np.arange(4096))
    np.testing.assert_array_equal(state["w"], 4 * np.arange(4096))


# --- what may not be asked, and where


@pytest.mark.parametrize("ask", ["run", "init", "step"])
@pytest.mark.parametrize("what, got", [(3, "int"), (None, "NoneType"), ("train", "str")])
def test_function_that_is_none_is_refused(ask, what, got, two):
    with pytest.raises(TypeError, match=rf"A function is needed, got {got}"):
        getattr(two, ask)(what)


@pytest.mark.parametrize("what, got", [(np.ones(2), "ndarray"), (3.0, "float"), ({"x": 1}, "dict")])
def test_run_with_arguments_in_no_tuple_is_refused(what, got, two):
    with pytest.raises(TypeError, match=rf"`args` is a tuple of arguments, got {got}: write `run\(fn, \(value,\)\)`"):
        two.run(lambda x: x, what)


def test_run_with_a_per_replica_in_no_tuple_is_refused(two):
    with pytest.raises(TypeError, match=r"`args` is a tuple of arguments, got PerReplica"):
        two.run(lambda x: x, rows(two, 3))


INNER = {
    "run": lambda s, x: s.run(lambda x: x, (x,)),
    "run_of_another": lambda s, x: STRATEGIES["one_device"]().run(lambda x: x, (x,)),
    "run_of_nothing": lambda s, x: s.run(lambda: jnp.ones(3)),
    "init": lambda s, x: s.init(lambda x: x, x),
    "step": lambda s, x: s.step(lambda x: (x, None))(x)[0],
}
OUTER = {
    "run": lambda s, fn: s.run(fn, (rows(s, 3),)),
    "init": lambda s, fn: s.init(fn, np.ones(3)),
    "step": lambda s, fn: s.step(lambda state, x: (state, fn(x)))(s.put(np.ones(3)), rows(s, 3)),
}


@pytest.mark.parametrize("outer", OUTER.values(), ids=OUTER)
@pytest.mark.parametrize("inner", INNER.values(), ids=INNER)
def test_strategy_asked_to_run_within_a_replica_function_is_refused(inner, outer, two):
    says = r"runs a function inside a function that a strategy is already running\. Call the inner one directly"
    with pytest.raises(RuntimeError, match=says):
        outer(two, lambda x: inner(two, x))
    assert not jdist.has_strategy()


# --- what is remembered of a function


def test_run_of_same_function_is_traced_once_and_of_another_again(two):
    traced = []

    def double(x):
        traced.append(x)
        return x * 2

    for _ in range(3):
        two.run(double, (np.ones(3),))
    assert len(traced) == 1
    assert len(two._runs) == 1
    two.run(lambda x: double(x), (np.ones(3),))
    assert len(traced) == 2


def test_run_of_method_and_partial_is_found_again(two):
    class Model:
        traced = 0

        def predict(self, x):
            Model.traced += 1
            return x

    model = Model()
    for _ in range(3):
        two.run(model.predict, (1.0,))
    assert Model.traced == 1
    other = Model()
    two.run(other.predict, (1.0,))
    assert Model.traced == 2
    bound = functools.partial(model.predict, 1.0)
    for _ in range(3):
        two.run(bound)
    assert Model.traced == 3
    assert len(two._runs) == 3


def _closure(number):
    return lambda x: x + number


@pytest.mark.parametrize("ask, kept", [("run", "_runs"), ("init", "_inits")])
def test_functions_that_are_gone_are_forgotten(ask, kept, two):
    closures = [_closure(number) for number in range(30)]
    for number, closure in enumerate(closures):
        found = two.run(closure, (1.0,)) if ask == "run" else two.init(closure, 1.0)
        assert float(found) == 1 + number
    assert len(getattr(two, kept)) == 30
    references = [weakref.ref(closure) for closure in closures]
    del closure, closures
    gc.collect()
    assert len(getattr(two, kept)) == 0
    assert [reference() for reference in references] == [None] * 30


def _stepped(strategy):
    """A step that has run, and what tells whether the model that it closes over lives."""
    model = Trainer()
    step = strategy.step(lambda state, x: model(state, x))
    step(strategy.put(np.zeros(3, np.float32)), rows(strategy, 3))
    return step, weakref.ref(model)


def test_step_that_is_gone_lets_what_its_function_closes_over_go(two):
    step, model = _stepped(two)
    gc.collect()
    assert model() is not None
    del step
    gc.collect()
    assert model() is None


def _resident():
    """Bytes of this process in memory."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


@pytest.mark.slow
def test_memory_of_run_does_not_grow_with_the_functions_it_has_seen(two):
    resident = []
    for number in range(1000):
        two.run(_closure(number), (1.0,))
        if number in (199, 999):
            gc.collect()
            resident.append(_resident())
    before, after = resident
    assert len(two._runs) == 0
    assert after < before * 1.1 + 2**24


HOST_WORDS = {
    "put": lambda s: s.put(1.0),
    "local_results": lambda s: s.local_results(1.0),
    "distribute_values_from_function": lambda s: s.distribute_values_from_function(lambda c: 1.0),
}


@pytest.mark.parametrize("word", HOST_WORDS)
def test_word_of_the_host_said_in_a_replica_function_is_refused(word, two):
    with pytest.raises(
        RuntimeError, match=rf"`strategy\.{word}` cannot be called inside a replica .*: call it outside, and pass"
    ):
        two.run(lambda: HOST_WORDS[word](two))


def test_spent_array_among_the_inputs_is_named(two):
    spent = two.put(np.ones(3, np.float32))
    spent.delete()
    with pytest.raises(ValueError, match=r"x\['a'\] \(float32\[3\]\) was deleted: its memory was donated to a step"):
        two.run(lambda x: x, ({"a": spent},))


def test_newton_step_by_conjugate_gradients_is_the_least_squares_solution(strategy):
    _check_newton_step(strategy)


def test_newton_step_by_conjugate_gradients_on_virtual_replicas_is_the_least_squares_solution():
    _check_newton_step(jdist.MirroredStrategy(jax.devices()[:2], virtual_replicas=3))


def _check_newton_step(strategy):
    draw = np.random.default_rng(0)
    x, y = draw.normal(size=(24, 3)).astype(np.float32), draw.normal(size=24).astype(np.float32)

    @strategy.step
    def step(w, batch):
        x, y = batch
        gradient = jax.grad(lambda w: jnp.mean((x @ w - y) ** 2))
        product = lambda v: jdist.all_reduce("mean", jax.jvp(gradient, (w,), (v,))[1])
        direction, _ = jax.scipy.sparse.linalg.cg(product, jdist.all_reduce("mean", gradient(w)), tol=1e-7)
        return w - direction, None

    (batch,) = strategy.distribute_dataset((x, y), 24)
    w, _ = step(strategy.init(lambda: jnp.ones(3)), batch)
    np.testing.assert_allclose(np.asarray(jax.device_get(w)), np.linalg.lstsq(x, y)[0], rtol=1e-4)
    assert step.proof.per_replica == ()
