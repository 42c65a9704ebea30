"""`assert_collectives`, `assert_no_transfer`, `assert_same_as_one_device`."""

import threading

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jdist
from jdist import testing

rng = np.random.default_rng(0)
BATCHES = [(rng.normal(size=(8, 3)).astype(np.float32), rng.normal(size=8).astype(np.float32)) for _ in range(2)]
tx = optax.sgd(0.1, momentum=0.9)


def make_state():
    params = {"w": jnp.ones(3), "b": jnp.zeros(())}
    return params, tx.init(params), jax.random.key(0)


def loss_of(params, x, y):
    return jnp.mean((x @ params["w"] + params["b"] - y) ** 2)


def train_step(state, x, y):
    params, opt_state, key = state
    local_loss, grads = jax.value_and_grad(loss_of)(params, x, y)
    loss, grads = jdist.all_reduce("mean", (local_loss, grads))
    updates, opt_state = tx.update(grads, opt_state, params)
    return (optax.apply_updates(params, updates), opt_state, key), {"loss": loss, "local": local_loss}


def sum_step(state, x, y):
    params, opt_state, key = state
    grads = jdist.all_reduce("sum", jax.grad(loss_of)(params, x, y))
    updates, opt_state = tx.update(grads, opt_state, params)
    return (optax.apply_updates(params, updates), opt_state, key), None


@testing.strategies("mirrored_2", "sharded_4")
def test_same_as_one_device(strategy):
    testing.assert_same_as_one_device(make_state, train_step, BATCHES)
    testing.assert_same_as_one_device(make_state, strategy.step(train_step), BATCHES, rtol=1e-4)


def test_a_sum_in_place_of_a_mean_is_found(two):
    with pytest.raises(AssertionError) as error:
        testing.assert_same_as_one_device(make_state, sum_step, BATCHES, strategy=two)
    assert f"After batch 0, {two!r} and one device computed different numbers (rtol=1e-05, atol=1e-06)." in str(
        error.value
    )
    assert "state/0/b" in str(error.value)
    assert "Max absolute difference" in str(error.value)


def test_a_missing_all_reduce_is_found_by_the_proof(two):
    def step(w, x, y):
        return w - x.mean(), None

    with pytest.raises(jdist.NotMirroredError):
        testing.assert_same_as_one_device(lambda: jnp.zeros(()), step, BATCHES, strategy=two)


def test_collectives_of_steps_functions_jitted_and_compiled_programs(two):
    step = two.step(train_step)
    state, batch = two.init(make_state), two.split(BATCHES[0])
    testing.assert_collectives(step, {"all-reduce": 1}, state, *batch)
    testing.assert_collectives(two.compile(step, state, *batch), {"all-reduce": 1, "all-gather": 0})
    with two.scope():
        testing.assert_collectives(train_step, {"all-reduce": 1}, state, *batch)
    testing.assert_collectives(jax.jit(jnp.sin), {}, 1.0)
    with pytest.raises(AssertionError) as error:
        testing.assert_collectives(step, {"all-gather": 2}, state, *batch)
    assert str(error.value) == (
        "The program executes {'all-reduce': 1}, expected {'all-gather': 2}. Its collectives: all-reduce over 2 devices (20 bytes, "
        "1 times)."
    )


def test_collectives_in_loops_are_counted_per_execution(two):
    def in_loop(x):
        return jax.lax.fori_loop(0, 3, lambda _, y: jdist.all_reduce("mean", y * 2), x)

    def in_while(x):
        return jax.lax.while_loop(lambda y: y < 100, lambda y: jdist.all_reduce("mean", y) * 2, x)

    with two.scope():
        testing.assert_collectives(
            lambda s, x: (s, in_loop(x)), {"all-reduce": 3}, 0.0, two.put(jdist.PerReplica(np.ones(2, np.float32)))
        )
        with pytest.raises(
            AssertionError,
            match=r"executions of all-reduce over 2 devices \(4 bytes, unknown times\) is unknown: it is",
        ):
            testing.assert_collectives(lambda s, x: (in_while(s), x), {"all-reduce": 3}, np.float32(1), np.float32(1))


same, collectives = testing.assert_same_as_one_device, testing.assert_collectives
WRONG_ARGUMENTS = {
    "step": (lambda: same(make_state, 3, BATCHES), TypeError, r"`step` must be a function `\(state, \*inputs\) -> \(state, outputs\)`, got int"),
    "batches": (lambda: same(make_state, train_step, []), ValueError, "`batches` is empty. Pass at least one global batch."),
    "kind": (lambda: collectives(train_step, {"allreduce": 1}), ValueError, "Unknown collective 'allreduce'; the kinds are 'all-reduce', 'all-gather'"),
    "number": (lambda: collectives(train_step, {"all-reduce": -1}), ValueError, r"`expected\['all-reduce'\]` must be an integer >= 0, got -1"),
    "function": (lambda: collectives(train_step, {"all-reduce": 1}), TypeError, "compiles a step for its arguments; got function with 0 arguments"),
    "compiled": (lambda: collectives(jax.jit(jnp.sin).lower(1.0).compile(), {}, 1.0), TypeError, "A compiled program has its shapes already"),
}  # fmt: skip


@pytest.mark.parametrize("call, error, message", WRONG_ARGUMENTS.values(), ids=WRONG_ARGUMENTS)
def test_wrong_arguments_are_refused(call, error, message, two):
    with two.scope(), pytest.raises(error, match=message):
        call()


@pytest.mark.filterwarnings("ignore::jdist.RetraceWarning")
def test_a_loop_over_placed_batches_makes_no_transfer(two):
    step = two.step(train_step)
    batch = two.split(BATCHES[0])
    state, outputs = step(two.init(make_state), *batch)
    with testing.assert_no_transfer():
        for _ in range(2):
            state, outputs = step(state, *batch)
        jax.device_get(outputs["loss"])
        jax.device_put(np.ones(3))
    assert float(outputs["loss"]) > 0

    for read in (float, np.asarray, str, lambda x: x.item(), bool):
        with (
            pytest.raises(
                AssertionError, match=r"device-to-host transfer of float32\[\]: its value is read on the host"
            ),
            testing.assert_no_transfer(),
        ):
            state, outputs = step(state, *batch)
            read(outputs["loss"])
    with (
        pytest.raises(
            AssertionError, match=r"implicit host-to-device transfer of ShapedArray\(float32\[8,3\]\). Place the value"
        ),
        testing.assert_no_transfer(),
        pytest.warns(jdist.ReplicatedBatchWarning),
    ):
        step(state, *BATCHES[0])
    with pytest.raises(ZeroDivisionError), testing.assert_no_transfer():
        1 / 0  # noqa: B018


def test_reads_in_other_threads_are_allowed(two):
    x = two.put(np.float32(3))
    values = []
    with testing.assert_no_transfer():
        thread = threading.Thread(target=lambda: values.append(float(x)))
        thread.start()
        thread.join()
    assert values == [3.0]
