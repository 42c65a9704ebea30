"""Programs: the number of traces and compilations, donation, loops of unblocked calls, and errors about arguments."""

import contextlib
import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jdist

from laws import STRATEGIES, copies, each_row, forget_failed_callbacks, rows, traces_of_a_step

COMPILE = "/jax/core/compile/backend_compile_duration"


@pytest.fixture
def compiled():
    """A list with one entry per compilation by XLA."""
    durations = []

    def listen(event, seconds, **_):
        if event == COMPILE:
            durations.append(seconds)

    jax.monitoring.register_event_duration_secs_listener(listen)
    yield durations
    jax.monitoring.unregister_event_duration_listener(listen)


# --- once per signature


@pytest.mark.filterwarnings("ignore::jdist.RetraceWarning")
@pytest.mark.parametrize("method", ["step", "run"])
def test_step_and_run_are_traced_and_compiled_once_per_signature(method, strategy, compiled):
    traces = []

    def descend(state, batch):
        traces.append(batch)
        gradient = jax.grad(lambda w: jnp.mean((batch["x"] @ w - batch["y"]) ** 2))(state["w"])
        return {"w": state["w"] - 0.1 * jdist.all_reduce("mean", gradient), "n": state["n"] + 1}, batch["y"].sum()

    state = strategy.init(lambda: {"w": jnp.zeros(4), "n": 0})
    source = {"x": np.ones((240, 4), np.float32), "y": np.ones(240, np.float32)}
    batches, larger = strategy.distribute_dataset(source, 48), strategy.distribute_dataset(source, 120)
    step = strategy.step(descend)

    def call(state, batch):
        if method == "step":
            return step(state, batch)[0]
        strategy.run(descend, (state, batch))  # its results are not placed as a state is
        return state

    compiled.clear()
    for batch in batches:
        state = call(state, batch)
    num_traces = traces_of_a_step(strategy) if method == "step" else 1
    assert (len(batches), len(traces), len(compiled)) == (5, num_traces, 1)
    for batch in larger:
        state = call(state, batch)
    assert (len(traces), len(compiled)) == (2 * num_traces, 2)


def test_step_that_returns_python_numbers_is_traced_and_compiled_once(strategy, compiled):
    traces = []

    def count(state):
        traces.append(state)
        return {"n": 1, "rate": 0.5}, None

    step, state = strategy.step(count), strategy.init(lambda: {"n": 0, "rate": 0.1})
    compiled.clear()
    for _ in range(3):
        state, _ = step(state)
    assert (len(traces), len(compiled)) == (1, 1)
    assert (int(state["n"]), float(state["rate"])) == (1, 0.5)


def test_init_of_same_function_is_traced_and_compiled_once(strategy, compiled):
    traces = []

    def make(key):
        traces.append(key)
        return {"w": jax.random.normal(key, (3,)), "own": jdist.PerReplica(jdist.replica_key(key))}

    keys = [jax.random.key(seed) for seed in range(3)]
    strategy.put(keys)  # compiled before the count starts
    compiled.clear()
    for key in keys:
        strategy.init(make, key)
    assert (len(traces), len(compiled)) == (1, 1)


@pytest.mark.filterwarnings("ignore::jdist.RetraceWarning")
def test_steady_steps_transfer_nothing_between_host_and_devices_implicitly(strategy):
    step = strategy.step(lambda state, batch: (state + jdist.all_reduce("mean", batch.sum(0)), batch.sum()))
    state = strategy.init(lambda: jnp.zeros(4))
    batches = iter(strategy.distribute_dataset(np.ones((96, 4), np.float32), 24))
    state, _ = step(state, next(batches))
    with jax.transfer_guard("disallow"):
        for _ in range(3):
            state, _ = step(state, next(batches))
        with pytest.raises(Exception, match="Disallowed host-to-device transfer"):
            # The guard is active.
            step(state, jdist.PerReplica(np.ones((strategy.num_replicas_in_sync, 4, 4), np.float32)))
    np.testing.assert_array_equal(state, 4 * 24 / strategy.num_replicas_in_sync)


# --- a loop without blocking


def _roll(state, share):
    rolled = state["roll"] @ state["w"]
    return {
        **state,
        "w": jdist.all_reduce("sum", share * rolled),
        "n": state["n"] + jdist.all_reduce("sum", share),
    }, None


@pytest.mark.parametrize("replicas, steps", [(2, 200), (8, 200), pytest.param(8, 2000, marks=pytest.mark.slow)])
def test_loop_of_unblocked_steps_has_the_right_result(replicas, steps):
    """The steps roll the rows of `w` by one, each replica computing a share. All values are exact in float32."""
    strategy = jdist.MirroredStrategy([f"cpu:{i}" for i in range(replicas)])
    w = np.random.default_rng(0).integers(-99, 99, size=(64, 64)).astype(np.float32)
    roll = np.roll(np.eye(64, dtype=np.float32), 1, axis=0)
    state = strategy.put({"w": w, "roll": roll, "n": np.float32(0)})
    shares = (2 * np.arange(replicas, dtype=np.float32) + 1) / replicas**2
    share = strategy.put(jdist.PerReplica(shares))
    step = strategy.step(_roll)
    for _ in range(steps):
        state, _ = step(state, share)
    np.testing.assert_array_equal(state["w"], np.roll(w, steps, axis=0))
    assert float(state["n"]) == steps


@pytest.mark.parametrize("replicas", [2, 8])
def test_loop_of_unblocked_runs_has_the_right_result(replicas):
    strategy = jdist.MirroredStrategy([f"cpu:{i}" for i in range(replicas)])
    total = lambda w, x: jdist.all_reduce("sum", jdist.all_reduce("max", w @ w)[0, 0] + x)
    w, x = strategy.put(np.eye(64, dtype=np.float32)), strategy.put(jdist.PerReplica(np.zeros(replicas, np.float32)))
    results = [strategy.run(total, (w, x)) for _ in range(100)]
    assert set(map(float, results)) == {float(replicas)}


# --- donation of the state


def _double(state):
    return jax.tree.map(lambda x: x * 2, state), None


def test_step_donates_its_state_and_no_other_argument(strategy):
    state = strategy.put({"w": np.ones((64, 64), np.float32), "own": rows(strategy, 64)})
    x = strategy.put(np.ones((64, 64), np.float32))
    new, _ = strategy.step(lambda state, x: ({"w": state["w"] + x, "own": state["own"]}, None))(state, x)
    assert state["w"].is_deleted()
    assert state["own"].tree.is_deleted()
    np.testing.assert_array_equal(new["w"], 1 + np.asarray(x))


DONATED = {
    "plain": lambda s: s.put({"w": np.ones(3)}),
    "wrapped": lambda s: {"w": jdist.PerReplica({"x": rows(s, 3).tree})},
}


@pytest.mark.parametrize("make", DONATED.values(), ids=DONATED)
@pytest.mark.parametrize("again", ["same_step", "another_step"])
def test_error_about_a_donated_state_names_the_state_to_continue_with(make, again, strategy):
    step, state = strategy.step(_double), make(strategy)
    new_state, _ = step(state)
    if again == "another_step":
        step = strategy.step(lambda state: (state, None))
    message = (
        r"state.*\['w'\].* was donated to an earlier step.*Continue with the state that the step returned, `state, outputs = "
        r"step\(state, batch\)`, or make the step with `donate=False`"
    )
    with pytest.raises(ValueError, match=message):
        step(state)
    step(new_state)


def test_outputs_stay_valid_after_further_steps(strategy):
    def advance(state):
        doubled = state["w"] * 2
        return {"w": doubled, "same": state["same"]}, {"w": doubled, "before": state["w"], "same": state["same"]}

    step, state, history = strategy.step(advance), strategy.put({"w": np.float32(1), "same": np.arange(3)}), []
    for _ in range(4):
        state, outputs = step(state)
        history.append(outputs)
    assert [(float(o["before"]), float(o["w"])) for o in history] == [(1, 2), (2, 4), (4, 8), (8, 16)]
    for outputs in history:
        np.testing.assert_array_equal(outputs["same"], np.arange(3))


def test_init_may_return_one_array_for_two_leaves(strategy):
    """As the initial value of weights and of their moving average."""
    state = strategy.init(lambda: (lambda w: {"w": w, "average": w})(jnp.ones(64)))
    advance = lambda s: ({"w": s["w"] * 2, "average": (s["w"] + s["average"]) / 2}, None)
    for _ in range(2):
        state, _ = strategy.step(advance)(state)
    chex.assert_trees_all_equal(state, {"w": np.full(64, 4, np.float32), "average": np.full(64, 1.5, np.float32)})


def test_state_refused_by_the_proof_is_not_donated(strategy):
    state = strategy.put(np.ones(3, np.float32))
    with pytest.raises(jdist.NotMirroredError):
        strategy.step(lambda state, x: (state + x, None))(state, rows(strategy, 3))
    np.testing.assert_array_equal(state, 1)


OTHER_DEVICES = {
    "more": (lambda: STRATEGIES["mirrored_8"]().put({"w": np.ones(3)}), r"cpu:0, cpu:1, .*cpu:7"),
    "others": (lambda: jdist.MirroredStrategy(["cpu:2", "cpu:3"]).put({"w": np.ones(3)}), r"cpu:2, cpu:3"),
    "same_in_other_order": (lambda: jdist.MirroredStrategy(["cpu:1", "cpu:0"]).put({"w": np.ones(3)}), r"cpu:1, cpu:0"),
    "one": (lambda: {"w": jax.device_put(np.ones(3), jax.devices()[1])}, r"cpu:1"),
}


@pytest.mark.parametrize("make, devices", OTHER_DEVICES.values(), ids=OTHER_DEVICES)
def test_error_about_a_state_on_other_devices_names_the_devices(make, devices, two):
    message = rf"state\['w'\] is on {devices}, and this strategy uses cpu:0, cpu:1\..*`strategy\.put`"
    with pytest.raises(ValueError, match=message):
        two.step(_double)(make())


# --- under JAX's transformations


def _descend(state, x):
    return {"w": state["w"] + jdist.all_reduce("sum", x), "n": state["n"] + 1}, x.sum()


def test_step_under_jit_equals_the_step(strategy):
    step, x = strategy.step(_descend), rows(strategy, 3)
    make = lambda: strategy.put({"w": np.ones(3, np.float32), "n": 0})
    twice = jax.jit(lambda state, x: step(step(state, x)[0], x))
    state = make()
    new = twice(state, x)
    expected = step(step(make(), x)[0], x)
    chex.assert_trees_all_close(new, expected, rtol=1e-6)
    assert isinstance(new[1], jdist.PerReplica)
    assert not state["w"].is_deleted()  # the outer jit decides what is donated
    assert len(set(copies(new[0]["w"]))) == 1


def test_step_under_eval_shape_has_the_shapes_and_the_proof(strategy):
    step, n = strategy.step(_descend), strategy.num_replicas_in_sync
    state = {"w": jax.ShapeDtypeStruct((3,), np.float32), "n": jax.ShapeDtypeStruct((), np.int32)}
    new, output = jax.eval_shape(step, state, jdist.PerReplica(jax.ShapeDtypeStruct((n, 3), np.float32)))
    assert jax.tree.map(lambda x: (x.shape, x.dtype), new) == {"w": ((3,), np.float32), "n": ((), np.int32)}
    assert output.tree.shape == (n,)
    assert step.proof.per_replica == ("output",)


def test_run_under_jit_equals_the_run(strategy):
    predict, x = (lambda x: {"own": x * 2, "all": jdist.all_reduce("max", x)}), rows(strategy, 3)
    chex.assert_trees_all_close(jax.jit(lambda x: strategy.run(predict, (x,)))(x), strategy.run(predict, (x,)))


HOST_FUNCTIONS = {
    "reduce": lambda s, x: s.reduce("mean", x, axis=0),
    "gather": lambda s, x: s.gather(x, axis=0),
    "map": lambda s, x: x.map(lambda row: row * 2).tree,
}


@pytest.mark.parametrize("call", HOST_FUNCTIONS.values(), ids=HOST_FUNCTIONS)
def test_host_function_of_per_replica_under_jit_returns_the_same(call, two):
    x = rows(two, 3)
    chex.assert_trees_all_close(jax.jit(lambda x: call(two, x))(x), call(two, x), rtol=1e-6)


def test_run_under_grad_is_the_gradient(two):
    x = rows(two, 3)
    loss = lambda w: two.run(lambda w, x: jdist.all_reduce("mean", jnp.sum(w * x)), (w, x))
    np.testing.assert_allclose(jax.grad(loss)(jnp.ones(3)), np.mean(x.tree, 0), rtol=1e-6)


TRANSFORMS = {"eval_shape": jax.eval_shape, "jit": lambda fn, *args: jax.jit(fn)(*args)}


@pytest.mark.parametrize("transform", TRANSFORMS.values(), ids=TRANSFORMS)
def test_step_refused_under_a_transformation_raises_the_same_error(transform, strategy):
    step = strategy.step(lambda state, x: ({"w": state["w"] + x}, None))
    with pytest.raises(jdist.NotMirroredError, match=r"state\['w'\] is not proved"):
        transform(step, strategy.put({"w": np.ones(3, np.float32)}), rows(strategy, 3))


def test_proof_before_the_first_call_raises(two):
    step = two.step(_double)
    with pytest.raises(
        RuntimeError, match=r"Nothing is proved yet: a step is traced when it is called for the first time"
    ):
        _ = step.proof
    step(two.put(1.0))
    assert step.proof.replicated == ("state",)


# --- the jaxpr that was proved is the jaxpr that runs


class Lazy:
    """Reduces only in the first call, like an object that builds its layers lazily."""

    def __init__(self):
        self.is_built = False

    def __call__(self, x):
        first, self.is_built = not self.is_built, True
        return jdist.all_reduce("mean", jnp.sum(x)) if first else jnp.sum(x)


def set_option():
    """Changes an option of JAX that is part of the key of its caches."""
    jax.config.update("jax_default_matmul_precision", "float32")


LOST_CACHES = {
    "disable_jit": (jax.disable_jit, lambda: None),
    "clear_caches": (contextlib.nullcontext, jax.clear_caches),
    "option": (contextlib.nullcontext, set_option),
}


@pytest.mark.parametrize("context, lose", LOST_CACHES.values(), ids=LOST_CACHES)
def test_function_whose_second_trace_would_differ_runs_as_it_was_proved(context, lose, two):
    lazy = Lazy()

    def step(w, x):
        loss = lazy(x)
        lose()
        return w - loss, None

    program = two.step(step)
    try:
        with context():
            w, _ = program(two.put(np.float32(1)), rows(two, 3))
    finally:
        jax.config.update("jax_default_matmul_precision", None)
    assert str(program.proof).startswith("1 of 1 results are replicated")
    assert len(set(copies(w))) == 1


# --- donation, contexts of the host, arguments


def test_step_that_does_not_donate_leaves_the_old_state_valid(strategy):
    step, state = strategy.step(_double, donate=False), strategy.put({"w": np.ones(3, np.float32)})
    for _ in range(2):
        new, _ = step(state)
        np.testing.assert_array_equal(new["w"], 2)
    np.testing.assert_array_equal(state["w"], 1)


def test_numpy_view_of_a_state_keeps_its_values_after_a_step(strategy):
    step = strategy.step(lambda state, x: ({"w": state["w"] + 1}, x))
    state, batch = strategy.put({"w": np.arange(24, dtype=np.float32).reshape(8, 3)}), strategy.split(np.ones(12))
    views = []
    for _ in range(3):
        views.append(np.asarray(state["w"]))
        state, _ = step(state, batch)
    for number, view in enumerate([*views, np.asarray(state["w"])]):
        np.testing.assert_array_equal(view, np.arange(24).reshape(8, 3) + number)


# The error of a GPU. A CPU device copies the memory itself, so that no test can provoke it.
SHARED = (
    "INVALID_ARGUMENT: Invalid buffer passed to Execute() as argument 0 to replica 0: INVALID_ARGUMENT: Donation requested for "
    "buffer with external reference"
)


def test_state_whose_memory_a_gpu_does_not_donate_is_copied(strategy):
    step = strategy.step(lambda state, x: (state, x))
    state, batch = strategy.put({"w": np.arange(8.0), "n": np.int32(3)}), strategy.split(np.ones(12))
    copied, same = step._compiled._after_failure(ValueError(SHARED), (state, batch))
    assert same is batch
    assert [leaf.sharding for leaf in copied.values()] == [leaf.sharding for leaf in state.values()]
    jax.tree.map(np.testing.assert_array_equal, copied, state)
    state["w"].delete()
    assert not copied["w"].is_deleted()
    assert step._compiled._after_failure(ValueError("another error"), (copied, batch)) is None
    kept = strategy.step(lambda state, x: (state, x), donate=False)
    assert kept._compiled._after_failure(ValueError(SHARED), (copied, batch)) is None


def test_failure_of_a_step_at_run_time_is_not_reported_as_a_donated_state(two):
    def fail(x):
        raise ZeroDivisionError("in the callback")

    step = two.step(lambda w: (w + jax.pure_callback(fail, jax.ShapeDtypeStruct((), jnp.float32), w), None))
    with pytest.raises(jax.errors.JaxRuntimeError, match="in the callback"):
        jax.block_until_ready(step(two.put(np.float32(1))))
    forget_failed_callbacks()


def test_step_in_scope_and_outside_is_traced_and_compiled_once(two, compiled):
    traces = []

    def fn(w):
        traces.append(1)
        return w + 1, None

    step, w = two.step(fn), two.put(np.float32(1))
    w, _ = step(w)
    del compiled[:]
    with two.scope():
        w, _ = step(w)
    jdist.set_strategy(two)
    w, _ = step(w)
    jdist.set_strategy(None)
    assert (float(w), len(traces), len(compiled)) == (4, 1, 0)


def test_program_runs_inside_set_mesh_of_another_mesh(strategy):
    other = jax.make_mesh((2, 2), ("a", "b"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    step = strategy.step(lambda w: (w + 1, None))
    with jax.set_mesh(other):
        w, _ = step(strategy.put(np.float32(1)))
        assert jax.sharding.get_abstract_mesh() == other.abstract_mesh
    assert float(w) == 2


def test_program_called_in_a_jit_inside_set_mesh_of_another_mesh_raises(two):
    other = jax.make_mesh((2, 2), ("a", "b"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    message = r"runs on the mesh \{'replica': 2\}.*`jax.set_mesh` has set the mesh \{'a': 2, 'b': 2\}"
    with jax.set_mesh(other), pytest.raises(ValueError, match=message):
        jax.jit(lambda x: two.run(lambda x: x + 1, (x,)))(1.0)


NOT_ARRAYS = {"string": "train", "object": object(), "function": np.sin}


@pytest.mark.parametrize("value", NOT_ARRAYS.values(), ids=NOT_ARRAYS)
def test_error_about_an_argument_that_is_not_an_array_names_it(value, two):
    message = r"mode\['a'\] is .*: the arguments of a replica function are arrays and numbers.*`functools.partial\("
    with pytest.raises(TypeError, match=message):
        two.run(lambda x, mode: x, (1.0, {"a": value}))
    with pytest.raises(TypeError, match=message):
        two.step(lambda state, mode: (state, None))(two.put(1.0), {"a": value})


def test_result_without_tangents_is_returned(strategy):
    """The gradient of an integer has the dtype float0."""
    grad = strategy.run(lambda x: jax.grad(lambda x: 1.0 * x, allow_int=True)(x), (3,))
    assert grad.dtype == jax.dtypes.float0


# --- integers of 64 bits, and leaves that are not numbers


BIG = np.int64(2**40)
TOO_LARGE = r" holds -?\d+, which is out of the range of u?int32\. Use smaller numbers, or enable 64-bit types: `jax\.config\.update"
identity = lambda x: x


def _step(fn, *args):
    return lambda s: s.step(fn)(*args)


TRUNCATED = {
    "run_argument": (lambda s: s.run(identity, (BIG,)), "x"),
    "run_unsigned_argument": (lambda s: s.run(identity, ({"n": np.uint64(2**40)},)), r"x\['n'\]"),
    "run_python_argument": (lambda s: s.run(identity, ([1, 2**31],)), r"x\[1\]"),
    "run_argument_by_name": (lambda s: s.run(identity, kwargs={"x": np.array([0, -(2**40)])}), "x"),
    "run_rows": (lambda s: s.run(identity, (jdist.PerReplica([np.full(s.num_replicas_in_sync, BIG)]),)), r"x\[0\]"),
    "run_result": (lambda s: s.run(lambda: {"n": (1, BIG)}), r"output\['n'\]\[1\]"),
    "run_python_result": (lambda s: s.run(lambda: 2**70), "output"),
    "run_wrapped_result": (lambda s: s.run(lambda: jdist.PerReplica({"n": BIG})), r"output\['n'\]"),
    "init_argument": (lambda s: s.init(lambda n, at: n, 1, BIG), "at"),
    "init_argument_in_wrapper": (lambda s: s.init(lambda n: n, jdist.Mirrored([BIG])), r"n\[0\]"),
    "init_result": (lambda s: s.init(lambda: {"n": np.array([BIG])}), r"state\['n'\]"),
    "init_result_in_wrapper": (lambda s: s.init(lambda: [jdist.SyncOnRead(BIG, "mean")]), r"state\[0\]"),
    "step_argument": (_step(lambda state, i: (state, i), {"w": 1.0}, BIG), "i"),
    "step_state": (_step(lambda state: (state, None), {"w": BIG}), r"state\['w'\]"),
    "step_new_state": (_step(lambda state: ({"w": BIG}, None), {"w": 1}), r"state\['w'\]"),
    "step_write": (_step(lambda state: ([BIG], None), [jdist.Mirrored(1, "only_first_replica")]), r"state\[0\]"),
    "step_output": (_step(lambda state: (state, [BIG]), {"w": 1.0}), r"output\[0\]"),
    "variable": (lambda s: jdist.variable([BIG], synchronization="on_read", aggregation="sum"), r"value\[0\]"),
}


@each_row("call, name", TRUNCATED.values(), ids=TRUNCATED)
def test_integer_that_would_be_truncated_raises_with_its_name(call, name, strategy):
    with strategy.scope(), pytest.raises(ValueError, match=f"^{name}{TOO_LARGE}"):
        call(strategy)


def test_large_integer_in_a_later_call_of_a_compiled_step_raises(two):
    step = two.step(lambda state, i: (state, i))
    state, _ = step(two.put({"w": 1.0}), np.int64(3))
    with pytest.raises(ValueError, match=f"^i{TOO_LARGE}"):
        step(state, BIG)
    _, number = step(state, np.int64(2**31 - 1))
    assert int(number) == 2**31 - 1


def test_large_integer_in_the_state_of_a_later_call_of_a_compiled_step_raises(strategy):
    step = strategy.step(lambda state, x: ({"n": state["n"] + 1}, x))
    state = strategy.put({"n": np.int32(1)})
    for _ in range(3):
        state, _ = step(state, 1.0)
    # Host values: a signature that JAX has not compiled yet, then one that it has.
    for number in (BIG, np.int64(5), BIG):
        if number == BIG:
            with pytest.raises(ValueError, match=rf"^state\['n'\]{TOO_LARGE}"):
                step({"n": number}, 1.0)
        else:
            assert int(step({"n": number}, 1.0)[0]["n"]) == 6
    assert int(step(strategy.put({"n": np.int32(1)}), 1.0)[0]["n"]) == 2


NOT_NUMBERS = {
    "text": ("a word", "str"),
    "object": (object(), "object"),
    "ragged": (np.array([[1], [2, 3]], dtype=object), r"object\[2\]"),
    "time": (np.datetime64("2020-01-01"), r"datetime64\[D\]\[\]"),
}


@each_row("value, dtype", NOT_NUMBERS.values(), ids=NOT_NUMBERS)
def test_leaf_that_is_not_a_number_raises_with_its_name(value, dtype, two):
    for name, call in (
        ("value['x']", lambda: two.put({"x": value})),
        ("value['x'][0]", lambda: two.put({"x": jdist.Mirrored([value])})),
        ("state['x']", lambda: two.init(lambda: {"x": value})),
        ("batch[0]", lambda: two.init(lambda batch: 1.0, [value])),
        ("output['x']", lambda: two.run(lambda: {"x": value})),
        ("output[0]", lambda: two.step(lambda state: (state, [value]))(two.put(1.0))),
        ("value", lambda: two.run(lambda: jdist.broadcast(value))),
        ("value[0]", lambda: two.run(lambda: jdist.all_gather([value], 0))),
    ):
        with pytest.raises(TypeError, match=rf"^{re.escape(name)} is {dtype}: devices hold numbers, booleans and"):
            call()


CALLS = {
    "kwargs_list": (
        lambda s, step: s.run(identity, (), [1.0]),
        r'^`kwargs` must be a mapping from argument names to values, got list\. Write `run\(fn, kwargs=\{"x": value\}\)`',
    ),
    "kwargs_array": (lambda s, step: s.run(identity, (), jnp.ones(2)), r"^`kwargs` must be .*, got an array\. Write"),
    "kwargs_by_number": (lambda s, step: s.run(identity, (), {1: 1.0}), r"^`kwargs` must be .*, got dict\. Write"),
    "args_array": (
        lambda s, step: s.run(identity, jnp.ones(2)),
        r"^`args` is a tuple of arguments, got float32\[2\]: write",
    ),
    "step_of_nothing": (
        lambda s, step: step(),
        r"^`count` is a step and was called without arguments\. Pass its state: `step",
    ),
    "step_by_unknown_name": (
        lambda s, step: step(1.0, 2.0, train=True),
        r"^`count\(state, x.*\)` is called with other arguments: got an unexpected keyword argument 'train'\.$",
    ),
    "donate": (lambda s, step: s.step(identity, donate="no"), r"`donate` is True or False, got 'no'"),
    "step_with_an_argument_of_jit": (
        lambda s, step: s.step(identity, static_argnums=1),
        r"^`strategy\.step` has no argument `static_argnums`\. Write `static_argnames=`, the names of the last parameters",
    ),
    "step_with_an_argument_of_pmap": (
        lambda s, step: s.step(axis_name="batch"),
        r'`strategy\.step` has no argument `axis_name`\. The strategy has the name, `jdist\.MirroredStrategy\(axis_name="batch"\)`',
    ),
    "step_with_an_unknown_argument": (
        lambda s, step: s.step(identity, donated=True),
        r"^`strategy\.step` has no argument `donated`\. Did you mean `donate`\?$",
    ),
}


@pytest.mark.parametrize("call, message", CALLS.values(), ids=CALLS)
def test_call_with_arguments_of_another_form_raises(call, message, strategy):
    def count(state, x):
        return state + x, None

    with pytest.raises(TypeError, match=message):
        call(strategy, strategy.step(count))


LEAKS = {
    "run": (lambda s, leaked: s.run(identity, ([leaked],)), r"x\[0\]"),
    "step": (lambda s, leaked: s.step(lambda state, y: (state, y))(s.put(1.0), leaked), "y"),
    "put": (lambda s, leaked: s.put({"a": leaked}), r"value\['a'\]"),
    "reduce": (lambda s, leaked: s.reduce("sum", [leaked], axis=None), r"value\[0\]"),
    "gather": (lambda s, leaked: s.gather(leaked, axis=0), "value"),
}


@pytest.mark.parametrize("call, name", LEAKS.values(), ids=LEAKS)
def test_leaked_tracer_raises_with_its_name(call, name, two):
    leaked = []
    two.run(lambda x: leaked.append(x), (rows(two, 3),))
    with pytest.raises(
        TypeError, match=rf"^{name} is a traced value \(float32\[3\]\) from a function that is no longer traced"
    ):
        call(two, leaked[0])


def add_all_reduced(state, x):
    return jax.tree.map(lambda p: p + jdist.all_reduce("mean", x.sum()), state), None


def one_array(placed, w):
    return w, w


def placed_twice(placed, w):
    return jax.device_put(w, placed.sharding), jax.device_put(w, placed.sharding)


def placed_and_not_placed(placed, w):
    return w, jax.device_put(w, placed.sharding)


def made_from_blocks(placed, w):
    w = jax.device_put(w, placed.sharding)
    blocks = [shard.data for shard in w.addressable_shards]
    return w, jax.make_array_from_single_device_arrays(w.shape, w.sharding, blocks)


@pytest.mark.filterwarnings("ignore::jdist.RetraceWarning")
@pytest.mark.parametrize("call", ["first", "of_new_shape", "of_same_shape", "of_same_signature"])
@pytest.mark.parametrize("pair", [one_array, placed_twice, placed_and_not_placed, made_from_blocks])
def test_memory_in_two_leaves_of_a_state_is_refused_before_a_device_starts(pair, call, two):
    step = two.step(add_all_reduced)
    (x,) = two.distribute_dataset(np.ones(4, np.float32), 4)
    pairs = [pair(two.put(jnp.ones(3)), jnp.ones(4)) for _ in range(3)]
    match call:
        case "of_new_shape":
            step(two.put({"emb": jnp.ones(3), "head": jnp.ones(3)}), x)
        case "of_same_shape":
            step(two.put({"emb": jnp.ones(4), "head": jnp.ones(4)}), x)
        case "of_same_signature":
            state, _ = step({"emb": pairs[0][0], "head": pairs[1][1]}, x)
            step(state, x)
    emb, head = pairs[2]
    with pytest.raises(
        ValueError, match=r"^state\['head'\] (is the same array as|has the same memory as) state\['emb'\].*jnp\.copy"
    ):
        step({"emb": emb, "head": head}, x)
    assert not emb.is_deleted() and not head.is_deleted()
    state, _ = step({"emb": emb, "head": jnp.copy(head)}, x)
    np.testing.assert_array_equal(state["head"], 3)


def test_memory_in_two_leaves_that_are_replaced_in_place_is_refused(two):
    step, state = two.step(lambda state: (state, None)), two.put({name: jnp.ones(4) for name in "abc"})
    for _ in range(2):
        state, _ = step(state)
    state["b"], state["c"] = placed_twice(state["a"], jnp.ones(4))
    with pytest.raises(ValueError, match=r"^state\['c'\] has the same memory as state\['b'\]"):
        step(state)


def test_memory_in_two_leaves_of_a_child_at_the_address_of_a_dropped_one_is_refused(two):
    step = two.step(lambda state: (state, None))
    state, _ = step((two.put([jnp.ones(4)]), two.put([jnp.ones(4), jnp.ones(4)])))
    pair = placed_twice(state[0][0], jnp.ones(4))
    params, address = state[0], id(state[1])
    del state
    lists = [list(pair) for _ in range(100)]  # one of them has the address of the second child
    child = next((values for values in lists if id(values) == address), lists[0])
    with pytest.raises(ValueError, match=r"^state\[1\]\[1\] has the same memory as state\[1\]\[0\]"):
        step((params, child))
    assert not pair[0].is_deleted()


def test_dir_of_a_step_has_the_names_for_users(two):
    step = two.step(lambda state: (state, None))
    assert {"lower", "proof", "__wrapped__"} <= set(dir(step))
    internal = {"backend", "call", "forget_arguments", "on_trace", "options"}
    assert not internal & set(dir(step)) and all(hasattr(step, name) for name in internal)


def test_deleted_array_in_two_leaves_of_a_state_is_refused(two):
    """As if one device had already reused the memory."""
    w = two.put(jnp.ones(3))
    w.delete()
    with pytest.raises(ValueError, match=r"^state\['head'\] is the same array as state\['emb'\]"):
        two.step(lambda state: (state, None))({"emb": w, "head": w})


def test_memory_of_a_state_among_the_inputs_is_refused(two):
    step, w = two.step(lambda state, x: (state + x, None)), jnp.ones(3)
    state, x = (jax.device_put(w, two.put(w).sharding) for _ in range(2))
    with pytest.raises(ValueError, match=r"^state has the same memory as inputs\[0\], an input, and .*jnp\.copy"):
        step(state, x)
    for _ in range(2):  # the second time as if one device had already reused the memory
        with pytest.raises(ValueError, match=r"^state is also among the inputs, as .*its own memory: `jnp\.copy\(x\)`"):
            step(x, x)
        x.delete()


def test_state_of_arrays_with_the_memory_of_a_numpy_array_is_accepted(two):
    buffer = np.zeros(4096 + 64, np.uint8)
    buffer = buffer[-buffer.ctypes.data % 64 :][:4096].view(np.float32)  # aligned: JAX does not copy it
    state = {name: jax.device_put(buffer, two.put(1.0).sharding) for name in "ab"}
    (x,) = two.distribute_dataset(np.ones(4, np.float32), 4)
    for _ in range(2):
        state, _ = two.step(add_all_reduced)(state, x)
    np.testing.assert_array_equal(state["b"], np.full(1024, 4))
    np.testing.assert_array_equal(buffer, 0)
