"""Several steps per call: the same results as one call per step."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jdist

from laws import STRATEGIES, assert_in_step

MAKERS = {
    **{name: make for name, make in STRATEGIES.items() if name not in ("mirrored_1", "mirrored_8")},
    "virtual_4": lambda: jdist.MirroredStrategy(["cpu:0", "cpu:1"], virtual_replicas=4),
    "stored": lambda: jdist.CentralStorageStrategy(["cpu:0", "cpu:1"], parameter_device="cpu:0"),
}
NUM_STEPS, BATCH_SIZE = 3, 24


@pytest.fixture(params=MAKERS)
def place(request):
    return MAKERS[request.param]()


def initial_state():
    return {
        "w": jnp.ones(3),
        "rows": jdist.SyncOnRead(jnp.float32(0), "sum"),
        "greatest": jdist.Mirrored(jnp.float32(0), "mean"),
        "key": jax.random.key(0),
    }


def step(state, batch, weights):
    x, y = batch
    key, noise = jax.random.split(state["key"])
    x = x + 0.01 * jax.random.normal(jdist.replica_key(noise), x.shape)
    value_and_grad = jdist.value_and_grad(lambda w, x, y: (x @ w - y) ** 2, weights=weights)
    loss, grad = jdist.all_reduce("mean", value_and_grad(state["w"], x, y))
    new = {"w": state["w"] - 0.1 * grad, "rows": state["rows"] + weights.sum(), "greatest": x.max(), "key": key}
    return new, (loss, y[0])


def batches_of(strategy, seed=0):
    rng = np.random.default_rng(seed)
    x, y = rng.normal(size=(NUM_STEPS * BATCH_SIZE - 5, 3)), rng.normal(size=NUM_STEPS * BATCH_SIZE - 5)
    data = (x.astype(np.float32), y.astype(np.float32))
    return list(strategy.distribute_dataset(data, BATCH_SIZE, remainder="pad"))


def test_one_call_of_several_steps_equals_one_call_per_step(place):
    batches, one_step = batches_of(place), place.step(step)
    state, outputs_per_step = place.init(initial_state), []
    for batch, weights in batches:
        state, outputs = one_step(state, batch, weights)
        outputs_per_step.append(outputs)
    many = place.step(step, steps_per_call=NUM_STEPS)
    after, (losses, firsts) = many(place.init(initial_state), *map(list, zip(*batches, strict=True)))
    for name in state:
        expected, actual = (jdist.read_values(x[name]) for x in (state, after))
        if name == "key":
            expected, actual = map(jax.random.key_data, (expected, actual))
        np.testing.assert_allclose(actual, expected, rtol=1e-6)
    assert type(after["rows"]) is jdist.SyncOnRead and float(after["rows"].read()) == NUM_STEPS * BATCH_SIZE - 5
    np.testing.assert_allclose(losses, [float(loss) for loss, _ in outputs_per_step], rtol=1e-6)
    assert losses.shape == (NUM_STEPS,)
    assert isinstance(firsts, jdist.PerReplica)
    np.testing.assert_array_equal(firsts.tree, np.stack([first.tree for _, first in outputs_per_step], axis=1))
    assert_in_step(after["w"])


def test_state_is_donated_and_further_calls_trace_nothing(place):
    traces = []

    def counted(*args):
        traces.append(1)
        return step(*args)

    many = place.step(counted, steps_per_call=NUM_STEPS)
    state, after_first = place.init(initial_state), 0
    for seed in range(3):
        before = state
        state, _ = many(state, *map(list, zip(*batches_of(place, seed), strict=True)))
        assert before["w"].is_deleted()
        after_first = after_first or len(traces)
    assert float(state["rows"].read()) == 3 * (NUM_STEPS * BATCH_SIZE - 5)
    assert len(traces) == after_first


@pytest.mark.parametrize(
    "fn, error, message",
    [
        (lambda w, x: (w + x.sum(), None), jdist.NotMirroredError, "state is not proved to be replicated"),
        (lambda w, x: (jnp.stack([w, w]), None), TypeError, r"changes state from float32\[\] to float32\[2\]"),
    ],
    ids=["proof", "shape"],
)
def test_refused_state_raises_in_a_scan_too(fn, error, message, two):
    batch = two.put(jdist.PerReplica(np.ones((2, 4), np.float32)))
    with pytest.raises(error, match=message):
        two.step(fn, steps_per_call=2)(two.put(np.float32(0)), [batch, batch])


def test_step_without_inputs_runs_steps_per_call_times(place):
    many = place.step(lambda count: (count + 1, count), steps_per_call=4)
    count, outputs = many(place.put(np.int32(0)))
    assert int(count) == 4
    assert np.asarray(outputs).tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("steps", [0, -1, 2.0, True, "3"])
def test_steps_per_call_that_is_not_a_positive_integer_raises(two, steps):
    with pytest.raises((TypeError, ValueError), match="`steps_per_call` must be an integer >= 1, got"):
        two.step(step, steps_per_call=steps)


@pytest.mark.parametrize("place", ["mirrored_2", "central_2"])
def test_inputs_that_are_not_lists_of_one_element_per_step_raise(place):
    strategy = STRATEGIES[place]()
    many = strategy.step(lambda w, x: (w, None), steps_per_call=3)
    batch = strategy.put(jdist.PerReplica(np.ones((2, 4), np.float32)))
    other = strategy.put(jdist.PerReplica(np.ones((2, 5), np.float32)))
    w = lambda: strategy.put(np.float32(0))
    with pytest.raises(
        ValueError,
        match=r"`steps_per_call=3` each input is a list of 3 elements, one per step, and input 1 is a list of 2",
    ):
        many(w(), [batch, batch])
    with pytest.raises(ValueError, match=r"input 1 is (PerReplica|float32\[.*\])\. Write"):
        many(w(), batch)
    with pytest.raises(ValueError, match=r"input 1 is tuple\. Write `step\(state, \[batch, \.\.\.\]\)`"):
        many(w(), (batch, batch, batch))  # one batch of three leaves, or three steps
    with pytest.raises(ValueError, match=r"inputs\[0\]\[2\].* is float32\[.*5\], and float32\[.*4\] in the first step"):
        many(w(), [batch, batch, other])
    with pytest.raises(ValueError, match=r"inputs\[0\]\[1\] and inputs\[0\]\[0\] have different structures"):
        many(w(), [batch, (batch, batch), batch])


def test_program_of_several_steps_is_compiled_for_shapes_of_lists(two):
    shapes = jax.eval_shape(lambda: two.init(initial_state))
    batch = jdist.PerReplica((jax.ShapeDtypeStruct((2, 12, 3), np.float32), jax.ShapeDtypeStruct((2, 12), np.float32)))
    weights = jdist.PerReplica(jax.ShapeDtypeStruct((2, 12), np.float32))
    compiled = two.compile(two.step(step, steps_per_call=2), shapes, [batch] * 2, [weights] * 2)
    assert "while" in compiled.as_text()


def one_proof(step, *args):
    step(*args)
    return step.proof


def conv_step(weights, batch):
    conv = lambda w, x: jax.lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
    loss = lambda w: jnp.square(jax.checkpoint(conv)(w, batch)).mean()
    value, grad = jdist.all_reduce("mean", jax.value_and_grad(loss)(weights))
    return weights - 0.1 * grad, (value, batch.sum())


@pytest.mark.parametrize("name", ["one_device", "mirrored_2", "sharded_4"])
def test_convolution_is_not_in_a_loop_on_cpu(name):
    """XLA's CPU convolutions are about 9 times slower in a loop. The results are those of one call per step, bit for bit."""
    strategy, traces = STRATEGIES[name](), []

    def counted(*args):
        traces.append(1)
        return conv_step(*args)

    images = np.random.default_rng(0).normal(size=(NUM_STEPS * 4, 6, 6, 1)).astype(np.float32)
    batches = list(strategy.distribute_dataset(images, 4))
    many, one = strategy.step(counted, steps_per_call=NUM_STEPS), strategy.step(conv_step)
    weights = lambda: strategy.put(np.full((3, 3, 1, 2), 0.1, np.float32))
    assert "while" not in strategy.compile(many, weights(), batches).as_text()
    start = weights()
    after, (losses, sums) = many(start, batches)
    assert start.is_deleted() and many.proof == one_proof(one, weights(), batches[0])
    state, outputs = weights(), []
    for batch in batches:
        state, output = one(state, batch)
        outputs.append(output)
    np.testing.assert_array_equal(after, state)
    np.testing.assert_array_equal(losses, [np.float32(loss) for loss, _ in outputs])
    first_traces = len(traces)
    many(after, batches)
    assert len(traces) == first_traces
    assert losses.shape == (NUM_STEPS,) and type(sums) is type(outputs[0][1])


def test_loop_that_contains_the_convolution_stays(two):
    """A step whose convolutions are in a loop of its own gains nothing from being repeated."""

    def step(weights, batch):
        return jax.lax.scan(lambda w, _: (conv_step(w, batch)[0], None), weights, None, 2)

    batch = two.put(jdist.PerReplica(np.ones((2, 4, 6, 6, 1), np.float32)))
    many = two.step(step, steps_per_call=3)
    text = two.compile(many, two.put(np.ones((3, 3, 1, 2), np.float32)), [batch] * 3).as_text()
    assert text.count(" while(") == 2
