"""Gradient accumulation (a step on a batch k times as large), and skipping of non-finite steps."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from test_local_updates import (
    START,
    batches,
    collectives,
    collectives_of,
    kinds,
    make_state,
    make_step,
    mirrored,
    predictions,
    trained,
    tree_of,
)

import jdist
from jdist import sync

from laws import traces_of_a_step

OPTIMIZERS = {
    "sgd": lambda: optax.sgd(0.1),
    "momentum": lambda: optax.sgd(0.05, momentum=0.8, nesterov=True),
    "adamw": lambda: optax.adamw(0.03, weight_decay=0.1),
    "clipped": lambda: optax.chain(optax.clip_by_global_norm(0.5), optax.adam(0.05)),
    "schedule": lambda: optax.sgd(optax.linear_schedule(0.1, 0.0, 5)),
}


def vector(params):
    return np.concatenate([np.asarray(params[name]) for name in "abc"])


def reduced(optimizer):
    return optax.chain(sync.mean(), optimizer)


def on_one_device(optimizer, data):
    """Returns the parameters after each step on a global batch of inputs x, targets y and weights."""
    params, history = tree_of(START), []
    opt_state = optimizer.init(params)
    weighted = lambda params, x, y, w: jnp.sum(w * (predictions(params, x) - y) ** 2) / max(w.sum(), 1e-30)
    for x, y, w in data:
        updates, opt_state = optimizer.update(jax.grad(weighted)(params, x, y, w), opt_state, params)
        params = optax.apply_updates(params, updates)
        history.append(vector(params))
    return np.stack(history)


def together(data, k):
    """Returns the examples of all replicas, of `k` batches each, as one batch."""
    for start in range(0, len(data), k):
        parts = data[start : start + k]
        joined = [
            np.concatenate([part[i].reshape(-1, *part[i].shape[2:]) for part in parts]) for i in range(len(parts[0]))
        ]
        yield (*joined, np.ones(len(joined[1]), np.float32))[:3]


# --- accumulation


@pytest.mark.parametrize(
    "replicas, k, name",
    [
        (1, 3, "adamw"),
        (2, 1, "momentum"),
        (2, 2, "clipped"),
        (2, 4, "sgd"),
        (3, 2, "momentum"),
        (3, 3, "schedule"),
        (4, 2, "adamw"),
    ],
)
def test_accumulated_steps_equal_one_step_on_the_larger_batch(replicas, k, name):
    data = list(batches(3 * k, replicas))
    _, history = trained(mirrored(replicas), sync.every(reduced(OPTIMIZERS[name]()), k), data)
    expected = on_one_device(OPTIMIZERS[name](), together(data, k))
    np.testing.assert_allclose(history[k - 1 :: k, 0], expected, rtol=1e-4, atol=1e-5)
    for number in range(3 * k):
        counted = (number + 1) // k
        np.testing.assert_array_equal(history[number][0], history[counted * k - 1][0] if counted else START)


def weighted_batches(steps, replicas, seed=3):
    """Returns weighted batches: some weights are zero, and in one batch all weights of replica 0 are zero."""
    rng = np.random.default_rng(seed)
    for number, (x, y) in enumerate(batches(steps, replicas, seed=seed)):
        weights = np.float32(rng.integers(0, 3, size=y.shape))
        if number == 1:
            weights[0] = 0
        yield x, y, weights


def weighted_step(strategy, tx, weight=lambda w: jdist.all_reduce("sum", w.sum())):
    @strategy.step
    def step(state, batch):
        params, opt_state = state
        x, y, w = batch
        losses = lambda params, x, y: (predictions(params, x) - y) ** 2
        value, grads = jdist.value_and_grad(losses, weights=w)(params, x, y)
        updates, opt_state = tx.update(grads, opt_state, params, weight=weight(w))
        return (optax.apply_updates(params, updates), opt_state), value

    return step


@pytest.mark.parametrize(
    "replicas, k, name", [(1, 2, "adamw"), (2, 3, "sgd"), (2, 4, "momentum"), (3, 1, "sgd"), (3, 4, "adamw")]
)
def test_batches_are_averaged_by_their_weights(replicas, k, name):
    data, strategy = list(weighted_batches(2 * k, replicas)), mirrored(replicas)
    tx = sync.every(reduced(OPTIMIZERS[name]()), k)
    state, step, history = make_state(strategy, tx), weighted_step(strategy, tx), []
    for batch in data:
        state, _ = step(state, strategy.put(jdist.PerReplica(batch)))
        history.append(vector(state[0]))
    expected = on_one_device(OPTIMIZERS[name](), together(data, k))
    np.testing.assert_allclose(history[k - 1 :: k], expected, rtol=1e-4, atol=1e-5)


def test_batches_of_weight_zero_do_not_change_the_state_or_later_updates(two):
    data = list(weighted_batches(4, 2))
    data[:2] = [(x, y, 0 * w) for x, y, w in data[:2]]
    tx = sync.every(reduced(optax.sgd(0.1)), 2)
    state, step = make_state(two, tx), weighted_step(two, tx)
    for number, batch in enumerate(data):
        state, _ = step(state, two.put(jdist.PerReplica(batch)))
        if number == 1:
            np.testing.assert_array_equal(vector(state[0]), START)
    expected = on_one_device(optax.sgd(0.1), together(data[2:], 2))[-1]
    np.testing.assert_allclose(vector(state[0]), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("k", [1, 2])
def test_weight_that_varies_between_replicas_is_refused_by_the_proof(two, k):
    tx = sync.every(reduced(optax.sgd(0.1)), k)
    batch = two.put(jdist.PerReplica(next(weighted_batches(1, 2))))
    state, step = make_state(two, tx), weighted_step(two, tx, weight=lambda w: w.sum())
    if k == 1:  # the weight of a single batch cancels
        step(state, batch)
    else:
        with pytest.raises((jdist.NotMirroredError, jdist.DivergentCollectiveError), match=r"batch"):
            step(state, batch)


@pytest.mark.parametrize(
    "make",
    [
        lambda: sync.every(reduced(optax.adam(0.1)), 3),
        lambda: sync.every(optax.chain(sync.int8(block_size=2), optax.adam(0.1)), 3),
        lambda: sync.every(sync.every(reduced(optax.sgd(0.1)), 2), 2),
    ],
)
def test_step_without_an_update_executes_no_collective(two, make):
    in_every_call, when_it_counts = collectives_of(two, make())
    assert in_every_call == 0
    assert when_it_counts >= 1


@pytest.mark.slow
def test_weight_costs_one_collective_per_step(two):
    tx = sync.every(reduced(optax.adam(0.1)), 3)
    batch = two.put(jdist.PerReplica(next(weighted_batches(1, 2))))
    plain = weighted_step(two, tx, weight=lambda w: 1.0)
    weighted = weighted_step(two, tx)
    counts = [collectives(step.lower(make_state(two, tx), batch).compile().as_text())[0] for step in (plain, weighted)]
    assert counts[1] <= counts[0] + 1


@pytest.mark.slow
def test_another_number_of_replicas_resumes_in_the_middle_of_an_accumulation():
    before, after = list(batches(5, 2)), list(batches(1, 3, seed=1))
    two, three = mirrored(2), mirrored(3)
    tx = sync.every(reduced(optax.adam(0.05)), 3)
    state, _ = trained(two, tx, before)
    assert kinds(state[1].sums) == [("MEAN", False)] * 3
    assert set(kinds(state[1]._replace(sums=()))) == {None}
    _, history = trained(three, tx, after, state=three.put(state))

    weights = lambda batch, rows: np.full(
        rows, 1 / rows, np.float32
    )  # batches have equal weight, independent of their number of examples
    rows = [[*next(together([batch], 1))[:2]] for batch in before + after]
    data = [
        tuple(np.concatenate(part) for part in zip(*[(x, y, weights(x, len(y))) for x, y in group], strict=True))
        for group in (rows[:3], rows[3:])
    ]
    np.testing.assert_allclose(history[-1][0], on_one_device(optax.adam(0.05), data)[-1], rtol=1e-4, atol=1e-5)


def test_nested_accumulation_equals_one_of_the_product(two):
    """Also with weights: four batches, accumulated in pairs, are averaged as in one accumulation of four."""
    data, results = list(weighted_batches(4, 2)), []
    for tx in (sync.every(reduced(optax.sgd(0.1)), 4), sync.every(sync.every(reduced(optax.sgd(0.1)), 2), 2)):
        state, step = make_state(two, tx), weighted_step(two, tx)
        for batch in data:
            state, _ = step(state, two.put(jdist.PerReplica(batch)))
        results.append(vector(state[0]))
    np.testing.assert_allclose(*results, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    "make",
    [
        lambda: sync.every(sync.local_sgd(optax.sgd(0.1), every=2), 2),
        lambda: sync.local_sgd(sync.every(optax.sgd(0.1), 2), every=4),  # the accumulation is local to each replica
    ],
    ids=["around", "within"],
)
def test_accumulation_around_or_within_local_sgd_is_local_sgd_on_the_larger_batches(two, make):
    data = list(batches(8, 2))
    _, history = trained(two, make(), data)
    larger = [tuple(np.concatenate(pair, axis=1) for pair in zip(*data[i : i + 2], strict=True)) for i in (0, 2, 4, 6)]
    _, expected = trained(two, sync.local_sgd(optax.sgd(0.1), every=2), larger)
    np.testing.assert_allclose(history[1::2], expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_gradients_of_few_bits_are_accumulated_in_float32(two, dtype):
    tx = sync.every(reduced(optax.sgd(1.0)), 300)
    state = two.init(lambda: (w := jnp.zeros(2, dtype), tx.init(w)))

    @two.step
    def step(state):
        w, opt_state = state
        updates, opt_state = tx.update(jnp.full(2, 0.01, dtype), opt_state, w)
        return (optax.apply_updates(w, updates), opt_state), None

    for _ in range(300):
        state, _ = step(state)
    assert state[0].dtype == dtype
    np.testing.assert_array_equal(state[0], -jnp.full(2, 0.01, dtype))


def test_steps_trace_once_a_signature_and_move_nothing(two):
    seen, tx = [], sync.every(sync.skip_nonfinite(reduced(optax.adam(0.1))), 2)
    step, state = make_step(two, tx, seen=seen), make_state(two, tx)
    data = [two.put(jdist.PerReplica(batch)) for batch in batches(5, 2)]
    state, _ = step(state, data[0])
    with jax.transfer_guard("disallow"):
        for batch in data[1:]:
            state, _ = step(state, batch)
    assert len(seen) == traces_of_a_step(two)


@pytest.mark.parametrize(
    "k, error, message",
    [
        (0, ValueError, ">= 1, got 0"),
        (-1, ValueError, ">= 1, got -1"),
        (True, TypeError, "got True"),
        (2.5, TypeError, ">= 1, got 2.5"),
        (None, TypeError, ">= 1, got None"),
    ],
)
def test_steps_that_are_not_a_positive_integer_are_refused(k, error, message):
    with pytest.raises(error, match=rf"`steps` of `jdist\.sync\.every` must be an integer.*{message.split(', ')[-1]}"):
        sync.every(sync.mean(), k)


def test_arguments_of_every_in_the_wrong_order_are_refused_with_the_call_to_write():
    with pytest.raises(TypeError, match=r"write `jdist\.sync\.every\(optimizer, 4\)`"):
        sync.every(4, sync.mean())


# --- skipping non-finite steps


def reports(strategy, tx):
    """Returns a step that takes gradients `[replica, 6]` as its input."""

    @strategy.step
    def step(state, vector):
        params, opt_state = state
        parts = jnp.split(vector, [3, 5])
        grads = {name: part.astype(params[name].dtype) for name, part in zip("abc", parts, strict=True)}
        updates, opt_state = tx.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), None

    return lambda state, grads: step(state, strategy.put(jdist.PerReplica(np.float32(grads))))[0]


def bits(tree):
    keys = lambda x: jax.random.key_data(x) if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key) else x
    return [np.asarray(keys(leaf)).tobytes() for leaf in jax.tree.leaves(tree)]


POLICIES = {
    "mean": lambda: reduced(optax.adam(0.1)),
    "sum": lambda: optax.chain(sync.sum(), optax.adam(0.1)),
    "in_dtype": lambda: optax.chain(sync.in_dtype(jnp.bfloat16), optax.adam(0.1)),
    "int8": lambda: optax.chain(sync.int8(block_size=2), optax.adam(0.1)),
    "int8_stochastic": lambda: optax.chain(sync.int8(rounding="stochastic", block_size=2), optax.adam(0.1)),
    "top_k": lambda: optax.chain(sync.top_k(0.4), optax.adam(0.1)),
    "every": lambda: sync.every(reduced(optax.adam(0.1)), 2),
    "local_sgd": lambda: sync.local_sgd(optax.adam(0.1), every=2),
    "diloco": lambda: sync.diloco(optax.adam(0.1), every=2, reduction=sync.int8(block_size=2)),
    "streaming_diloco": lambda: sync.streaming_diloco(optax.adam(0.1), every=3, fragments=2),
}


@pytest.mark.parametrize("policy", POLICIES)
def test_step_with_a_non_finite_number_on_one_replica_is_skipped_by_all(two, policy):
    tx, rng = sync.skip_nonfinite(POLICIES[policy]()), np.random.default_rng(0)
    state, step, left_out = make_state(two, tx), reports(two, tx), 0
    for number in range(6):
        grads = rng.normal(size=(2, 6))
        if number in (2, 3, 5):
            grads[number % 2, number] = {2: np.nan, 3: np.inf, 5: -np.inf}[number]
            left_out += 1
        before = bits((state[0], state[1].opt_state))
        state = step(state, grads)
        assert int(state[1].skipped) == left_out
        assert (bits((state[0], state[1].opt_state)) == before) == (number in (2, 3, 5))
    assert all(np.isfinite(np.asarray(leaf.astype(jnp.float32))).all() for leaf in jax.tree.leaves(state[0]))


def test_skipped_synchronization_step_does_not_change_replicas_that_differ_by_a_rounding(two):
    """A leaf without a gradient, whose replicas differ by one rounding, in a step that is skipped because of another leaf."""
    tx = sync.skip_nonfinite(sync.local_sgd(optax.sgd(1.0), every=2))
    state, step = make_state(two, tx), reports(two, tx)
    grads = np.zeros((2, 6))
    grads[1, 0] = -1e-7
    state = step(state, grads)
    differ = bits(state[0])
    assert differ != bits(make_state(two, tx)[0])
    state = step(state, [[0, 0, 0, 0, 0, np.nan]] * 2)
    assert int(state[1].skipped) == 1
    assert bits(state[0]) == differ


def test_step_whose_sum_overflows_but_no_replica_alone_is_skipped(two):
    tx = sync.skip_nonfinite(optax.chain(sync.sum(), optax.sgd(0.1)))
    state, step = make_state(two, tx), reports(two, tx)
    state = step(state, np.full((2, 6), 3e38))
    assert int(state[1].skipped) == 1
    np.testing.assert_array_equal(vector(state[0]), START)


def test_accumulation_does_not_count_skipped_steps(two):
    tx = sync.skip_nonfinite(sync.every(reduced(optax.sgd(1.0)), 2))
    state, step = make_state(two, tx), reports(two, tx)
    for grads in ([[1] * 6, [3] * 6], [[np.nan] * 6, [1] * 6], [[5] * 6, [7] * 6]):
        state = step(state, grads)
    np.testing.assert_allclose(vector(state[0]), START - 4, rtol=1e-6)
    assert int(state[1].skipped) == 1


def test_non_finite_batch_skips_the_complete_accumulation(two):
    tx = sync.every(sync.skip_nonfinite(reduced(optax.sgd(1.0))), 2)
    state, step = make_state(two, tx), reports(two, tx)
    for grads in ([[np.inf] * 6, [3] * 6], [[1] * 6, [1] * 6]):
        state = step(state, grads)
    np.testing.assert_array_equal(vector(state[0]), START)
    assert int(state[1].opt_state.skipped) == 1
    for grads in ([[1] * 6, [3] * 6], [[5] * 6, [7] * 6]):
        state = step(state, grads)
    np.testing.assert_allclose(vector(state[0]), START - 4, rtol=1e-6)


def test_batch_of_weight_zero_is_ignored_even_if_its_gradient_is_nan(two):
    tx = sync.every(reduced(optax.sgd(1.0)), 2)
    state = two.init(lambda: (w := jnp.float32(0), tx.init(w)))

    @two.step
    def step(state, grad, weight):
        w, opt_state = state
        updates, opt_state = tx.update(grad, opt_state, w, weight=weight)
        return (w + updates, opt_state), None

    for grad, weight in ((np.nan, 0), (2.0, 5)):
        grads = two.put(jdist.PerReplica(np.float32([grad, grad])))
        state, _ = step(state, grads, two.put(np.float32(weight)))
    assert float(state[0]) == -2.0


def test_integers_among_the_gradients_are_finite():
    tx = sync.skip_nonfinite(optax.identity())
    state = tx.init({"n": jnp.int32(0)})
    updates, state = tx.update({"n": jnp.int32(3)}, state)
    assert (int(updates["n"]), int(state.skipped)) == (3, 0)


def test_every_without_a_reduction_is_rejected_with_the_fix(two):
    tx = sync.every(optax.adam(0.1), 2)
    state = two.init(lambda: (w := jnp.ones(3), tx.init(w)))

    def step(state, x):
        w, opt_state = state
        updates, opt_state = tx.update(x * w, opt_state, w)
        return (optax.apply_updates(w, updates), opt_state), None

    message = (
        r"(?s)state\[0\] is not proved.*`jdist\.sync\.every\(optax\.chain\(jdist\.sync\.mean\(\), optimizer\), k\)`"
    )
    with pytest.raises(jdist.NotMirroredError, match=message):
        two.step(step).lower(state, two.put(jdist.PerReplica(np.ones((2, 3), np.float32))))
