"""`run`, `init` and `step` of every strategy, and its cache of compiled functions."""

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

from laws import STRATEGIES, assert_in_step, each_row, rows


def test_repr_and_devices_of_a_strategy():
    strategy = STRATEGIES["mirrored_3"]()
    assert repr(strategy) == "MirroredStrategy(['cpu:5', 'cpu:1', 'cpu:2'])"
    assert repr(STRATEGIES["one_device"]()) == "OneDeviceStrategy(['cpu:0'])"
    assert strategy.num_replicas_in_sync == strategy.mesh.size == 3
    assert [device.id for device in strategy.devices] == [5, 1, 2]
    assert strategy.devices == tuple(strategy.mesh.devices.flat)


def test_num_replicas_raises_with_the_name_to_write(two):
    with pytest.raises(AttributeError, match=r"no attribute 'num_replicas'\. Write `strategy\.num_replicas_in_sync`"):
        two.num_replicas  # noqa: B018


@each_row("count", [1, 8])
def test_number_of_devices_raises_with_the_line_to_write(count):
    with pytest.raises(TypeError, match=rf"got {count}: write `MirroredStrategy\(jax\.devices\(\)\[:{count}\]\)`"):
        jdist.MirroredStrategy(count)


@pytest.mark.parametrize("shape", [(8,), (4, 2)])
def test_shardings_are_the_shardings_of_put(strategy, shape):
    tree = {"x": np.ones(shape, np.float32), "own": rows(strategy, 3), "key": jax.random.key(0)}
    expected = jax.tree.map(lambda leaf: leaf.sharding, strategy.put(tree))
    assert jax.tree.leaves(strategy.shardings(tree)) == jax.tree.leaves(expected)
    assert isinstance(strategy.shardings(tree)["own"], jdist.PerReplica)


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


def test_steps_of_least_squares_equal_numpy_on_the_global_batch(strategy):
    generator = np.random.default_rng(1)
    x, y = generator.normal(size=(120, 3)), generator.normal(size=120)
    model, losses = _by_numpy(x, y, 24, 5)

    step, step_losses = strategy.step(descend), []
    state = strategy.init(lambda: {"model": {"w": jnp.zeros(3), "b": jnp.zeros(())}, "steps": 0})
    for batch in strategy.distribute_dataset({"x": np.float32(x), "y": np.float32(y)}, 24):
        state, outputs = step(state, batch)
        step_losses.append(outputs["loss"])
    chex.assert_trees_all_close(state["model"], jax.tree.map(np.float32, model), rtol=1e-5)
    np.testing.assert_allclose(step_losses, losses, rtol=1e-5)
    assert int(state["steps"]) == 5
    assert outputs["own"].tree.shape == (strategy.num_replicas_in_sync,)
    assert_in_step(state)


def test_step_takes_several_inputs_or_none(strategy):
    step = strategy.step(lambda state, x, pair: (state + jdist.all_reduce("sum", x) + pair[0], pair[1]))
    x = strategy.put(jdist.PerReplica(np.ones(strategy.num_replicas_in_sync, np.float32)))
    state, outputs = step(strategy.put(np.float32(1)), x, (2.0, None))
    assert (float(state), outputs) == (3.0 + strategy.num_replicas_in_sync, None)
    state, outputs = strategy.step(lambda state: (state * 2, ()))(state)
    assert (float(state), outputs) == (6.0 + 2 * strategy.num_replicas_in_sync, ())


def test_step_has_the_name_and_docstring_of_its_function(two):
    def train(state):
        """Trains."""
        return state, None

    step = two.step(train)
    assert (step.__name__, step.__doc__, step.__wrapped__) == ("train", "Trains.", train)


class Trainer:
    """A callable object with attributes of the same names as those of a program."""

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


def test_init_creates_every_leaf_on_all_devices_without_weak_types(strategy):
    def make(key, tree):
        return {"w": jax.random.normal(key, (2, 3)), "key": key, "n": 0, "rate": 0.5, "argument": tree, "none": None}

    state = strategy.init(make, jax.random.key(1), {"x": np.arange(3, dtype=np.float32)})
    for leaf in jax.tree.leaves(state):
        assert leaf.sharding.device_set == set(strategy.mesh.devices.flat)
        assert leaf.committed
        assert not jax.typeof(leaf).weak_type
    assert_in_step(state)
    np.testing.assert_allclose(state["w"], jax.random.normal(jax.random.key(1), (2, 3)), rtol=1e-6)
    np.testing.assert_array_equal(state["argument"]["x"], np.arange(3))
    assert (int(state["n"]), state["n"].dtype, float(state["rate"])) == (0, np.int32, 0.5)


def test_init_of_wrapped_replica_key_differs_per_replica(strategy):
    state = strategy.init(lambda key: {"own": jdist.PerReplica(jdist.replica_key(key))}, jax.random.key(1))
    expected = [jax.random.fold_in(jax.random.key(1), i) for i in range(strategy.num_replicas_in_sync)]
    actual = [jax.random.key_data(key).tolist() for key in state["own"].values]
    assert actual == [jax.random.key_data(key).tolist() for key in expected]


def test_init_of_unwrapped_replica_key_raises_under_every_strategy(strategy):
    message = (
        r"(?s)state\['dropout'\] is not proved.*axis_index.*test_base\.py:\d+.*wrap the value.*`jdist\.PerReplica\(x\)`"
    )
    with pytest.raises(jdist.NotMirroredError, match=message):
        strategy.init(lambda key: {"dropout": jdist.replica_key(key)}, jax.random.key(1))


def test_init_takes_arrays_on_any_devices(two):
    arguments = STRATEGIES["mirrored_3"]().put(np.arange(3)), jax.device_put(1.0, jax.devices()[7]), np.ones(2), 3
    state = two.init(lambda *args: args, *arguments)
    chex.assert_trees_all_close(
        state, (np.arange(3, dtype=np.int32), np.float32(1), np.ones(2, np.float32), np.int32(3))
    )
    assert all(leaf.sharding.device_set == set(two.mesh.devices.flat) for leaf in state)


# Sources of a state. They stay valid, although each step donates its state.
SOURCES = {
    "numpy": lambda s: np.arange(4096, dtype=np.float32),
    "array_on_the_default_device": lambda s: jnp.arange(4096, dtype=jnp.float32),
    "array_on_these_devices": lambda s: s.put(np.arange(4096, dtype=np.float32)),
}
MAKERS = {"put": lambda s, x: s.put({"w": x}), "init": lambda s, x: s.init(lambda x: {"w": x}, x)}


@pytest.mark.parametrize("source", SOURCES.values(), ids=SOURCES)
@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
@pytest.mark.parametrize("name", ["one_device", "mirrored_2"])
def test_array_that_a_state_is_made_of_stays_valid(name, make, source):
    strategy = STRATEGIES[name]()
    array = source(strategy)
    state = make(strategy, array)
    step = strategy.step(lambda state: ({"w": state["w"] * 2}, None))
    for _ in range(2):
        state, _ = step(state)
    np.testing.assert_array_equal(array, np.arange(4096))
    np.testing.assert_array_equal(state["w"], 4 * np.arange(4096))


# --- calls that raise


@each_row("method", ["run", "init", "step"])
@each_row("value, got", [(3, "int"), (None, "NoneType"), ("train", "str")])
def test_function_that_is_not_callable_raises(method, value, got, two):
    with pytest.raises(TypeError, match=rf"`fn` must be a function, got {got}"):
        getattr(two, method)(value)


@each_row("value, got", [(np.ones(2), "ndarray"), (3.0, "float"), ({"x": 1}, "dict")])
def test_run_with_arguments_that_are_not_a_tuple_raises(value, got, two):
    with pytest.raises(TypeError, match=rf"`args` is a tuple of arguments, got {got}: write `run\(fn, \(value,\)\)`"):
        two.run(lambda x: x, value)


def test_run_with_a_per_replica_that_is_not_in_a_tuple_raises(two):
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


@each_row("outer", OUTER.values(), ids=OUTER)
@each_row("inner", INNER.values(), ids=INNER)
def test_call_inside_a_replica_function_raises(inner, outer, two):
    message = r"a step is called inside a replica function\. Call the inner function directly"
    with pytest.raises(RuntimeError, match=message):
        outer(two, lambda x: inner(two, x))
    assert not jdist.has_strategy()


# --- the cache of compiled functions


def test_run_traces_a_function_once_and_another_function_again(two):
    traces = []

    def double(x):
        traces.append(x)
        return x * 2

    for _ in range(3):
        two.run(double, (np.ones(3),))
    assert len(traces) == 1
    assert len(two._runs) == 1
    two.run(lambda x: double(x), (np.ones(3),))
    assert len(traces) == 2


def test_methods_and_partials_are_cached(two):
    class Model:
        traces = 0

        def predict(self, x):
            Model.traces += 1
            return x

    model = Model()
    for _ in range(3):
        two.run(model.predict, (1.0,))
    assert Model.traces == 1
    other = Model()
    two.run(other.predict, (1.0,))
    assert Model.traces == 2
    bound = functools.partial(model.predict, 1.0)
    for _ in range(3):
        two.run(bound)
    assert Model.traces == 3
    assert len(two._runs) == 3


def _closure(number):
    return lambda x: x + number


@pytest.mark.filterwarnings("ignore::jdist.RetraceWarning")
@pytest.mark.parametrize("method, cache", [("run", "_runs"), ("init", "_inits")])
def test_deleted_functions_leave_the_cache(method, cache, two):
    closures = [_closure(number) for number in range(30)]
    for number, closure in enumerate(closures):
        result = two.run(closure, (1.0,)) if method == "run" else two.init(closure, 1.0)
        assert float(result) == 1 + number
    assert len(getattr(two, cache)) == 30
    references = [weakref.ref(closure) for closure in closures]
    del closure, closures
    gc.collect()
    assert len(getattr(two, cache)) == 0
    assert [reference() for reference in references] == [None] * 30


def _stepped(strategy):
    """Returns a step that has run, and a weak reference to the model that it closes over."""
    model = Trainer()
    step = strategy.step(lambda state, x: model(state, x))
    step(strategy.put(np.zeros(3, np.float32)), rows(strategy, 3))
    return step, weakref.ref(model)


def test_deleted_step_releases_the_model_of_its_function(two):
    step, model = _stepped(two)
    gc.collect()
    assert model() is not None
    del step
    gc.collect()
    assert model() is None


def _resident():
    """Returns the resident memory of this process in bytes."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


@pytest.mark.slow
def test_memory_of_run_does_not_grow_with_the_number_of_functions(two, frozen_heap):
    resident = []
    for number in range(400):
        two.run(lambda x: x + 1, (1.0,))  # a new function each time; their program is the same, and compiled once
        if number % 20 == 19:
            gc.collect()  # often: memory that was in use once may stay resident
        if number in (99, 399):
            resident.append(_resident())
    before, after = resident
    assert len(two._runs) == 0
    assert after < before * 1.1 + 2**24


HOST_METHODS = {
    "put": lambda s: s.put(1.0),
    "local_results": lambda s: s.local_results(1.0),
    "distribute_values_from_function": lambda s: s.distribute_values_from_function(lambda c: 1.0),
}


@each_row("method", HOST_METHODS)
def test_host_method_inside_a_replica_function_raises(method, two):
    with pytest.raises(
        RuntimeError, match=rf"`strategy\.{method}` cannot be called inside a replica .*: call it outside, and pass"
    ):
        two.run(lambda: HOST_METHODS[method](two))


def test_deleted_array_among_the_inputs_raises_with_its_name(two):
    deleted = two.put(np.ones(3, np.float32))
    deleted.delete()
    with pytest.raises(ValueError, match=r"x\['a'\] \(float32\[3\]\) was deleted: its memory was donated to a step"):
        two.run(lambda x: x, ({"a": deleted},))


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
