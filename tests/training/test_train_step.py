"""`jdist.train_step`: equal to one device on all examples, under every strategy and policy; and its checks."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jdist
from jdist import sync

from laws import among, each_row

RATE = 0.1
X = np.random.default_rng(0).normal(size=(10, 3)).astype(np.float32)
Y = (X @ np.float32([1, -2, 3]) + 1).astype(np.float32)
W = np.float32([0.5, 0, -0.5])
SGD = optax.sgd(RATE)


def squares(w, batch):
    x, y = batch
    return (x @ w - y) ** 2


def by_hand(w, x, y):
    """Returns the loss of a linear regression, and the parameters after a step, in float64."""
    error = x.astype(np.float64) @ w - y
    return (error**2).mean(), w - RATE * 2 * error @ x / len(x)


def one_epoch(strategy, train_step, optimizer, batch_size=4):
    """Returns the state and the losses after one epoch of three batches, the last one padded."""
    with strategy.scope():
        state = jdist.init(lambda: jdist.TrainState.create(jnp.asarray(W), optimizer))
        losses = []
        for batch, weights in strategy.distribute_dataset((X, Y), batch_size, remainder="pad"):
            state, loss = train_step(state, batch, weights)
            losses.append(loss)
    return state, losses


def expected_epoch(batch_size=4):
    w, losses = W, []
    for start in range(0, len(X), batch_size):
        loss, w = by_hand(w, X[start : start + batch_size], Y[start : start + batch_size])
        losses.append(loss)
    return w, losses


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_padded_batches_give_the_step_of_one_device(strategy, micro_batches):
    batch_size = strategy.num_replicas_in_sync * 2
    train_step = jdist.train_step(squares, SGD, micro_batches=micro_batches)
    state, losses = one_epoch(strategy, train_step, SGD, batch_size)
    w, expected_losses = expected_epoch(batch_size)
    np.testing.assert_allclose(state.params, w, rtol=1e-4)
    np.testing.assert_allclose(losses, expected_losses, rtol=1e-4)
    assert int(state.step) == len(losses) and not train_step.proof.per_replica


POLICIES = {
    "mean": optax.chain(sync.mean(), SGD),
    "every": sync.every(optax.chain(sync.mean(), SGD), 1),
    "local_sgd": sync.local_sgd(SGD, every=3),
    "lbfgs": optax.lbfgs(),
}


@pytest.mark.parametrize("name", among(POLICIES, "mean", "local_sgd"))
def test_policies_and_optimizers_that_evaluate_the_loss(name, two):
    optimizer = POLICIES[name]
    state, losses = one_epoch(two, jdist.train_step(squares, optimizer), optimizer)
    w, expected_losses = expected_epoch()
    np.testing.assert_allclose(losses[0], expected_losses[0], rtol=1e-4)
    params = jdist.read_values(state.params)
    if name in ("mean", "every"):
        np.testing.assert_allclose(params, w, rtol=1e-4)
    elif name == "local_sgd":  # averaged after the third step
        assert [row.tolist() for row in state.params.values] == [params.tolist()] * 2
    assert squares(params, (X, Y)).mean() < squares(W, (X, Y)).mean()


def test_loss_may_be_a_mean_without_padding(two):
    train_step = jdist.train_step(lambda w, batch: squares(w, batch).mean(), SGD)
    with two.scope():
        state = jdist.init(lambda: jdist.TrainState.create(jnp.asarray(W), SGD))
        state, loss = train_step(state, two.split((X, Y)))
    expected_loss, w = by_hand(W, X, Y)
    np.testing.assert_allclose(loss, expected_loss, rtol=1e-4)
    np.testing.assert_allclose(state.params, w, rtol=1e-4)


def test_auxiliary_values_and_metrics(two):
    def loss_fn(w, batch, weights):
        errors = jdist.metrics.MeanAbsoluteError().update(batch[0] @ w, batch[1], weights=weights)
        return squares(w, batch), {"errors": errors, "predictions": batch[0] @ w}

    for micro_batches, shape in ((1, (2, 6)), (3, (2, 3, 2))):
        train_step = jdist.train_step(loss_fn, SGD, micro_batches=micro_batches)
        state, ((loss, aux),) = one_epoch(two, train_step, SGD, batch_size=12)
        np.testing.assert_allclose(loss, by_hand(W, X, Y)[0], rtol=1e-4)
        np.testing.assert_allclose(aux["errors"].compute(), np.abs(X @ W - Y).mean(), rtol=1e-4)
        assert float(aux["errors"].distances.weight) == 10
        assert aux["predictions"].tree.shape == shape


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_weights_per_token_are_multiplied_by_those_of_the_examples(strategy, micro_batches):
    tokens, of_tokens = np.square(X[:, :, None] + np.arange(4)), (X > 0).astype(np.float32)
    of_tokens[:3] = 0
    of_examples = np.arange(10, dtype=np.float32)
    total = (of_tokens * of_examples[:, None]).sum() * 4

    def plain(w, batch):
        return batch["tokens"] * w, batch["mask"]

    def with_aux(w, batch):
        return plain(w, batch), {"number": jnp.float32(1)}

    def ready(w, batch):  # a mean of this replica, with its number of tokens
        losses, mask = plain(w, batch)
        count = mask.sum() * 4
        mean = (losses * mask[..., None]).sum() / jnp.where(count == 0, 1, count)
        return (mean, count), None

    padded = lambda x, value: np.concatenate([x, np.full((2, *x.shape[1:]), value, np.float32)])
    batch = {"tokens": padded(tokens, 1e6), "mask": padded(of_tokens, 1)}
    weights = padded(of_examples, 0)
    with strategy.scope():
        make = lambda: jdist.TrainState.create(jnp.float32(1), SGD)
        mean = (tokens * of_tokens[..., None] * of_examples[:, None, None]).sum() / total
        for loss_fn in (plain, with_aux):
            train_step = jdist.train_step(loss_fn, SGD, micro_batches=micro_batches)
            state, loss = train_step(jdist.init(make), strategy.split(batch), strategy.split(weights))
            loss = loss[0] if loss_fn is with_aux else loss
            np.testing.assert_allclose([loss, state.params], [mean, 1 - RATE * mean], rtol=1e-4)
        if micro_batches == 1:
            train_step = jdist.train_step(ready, SGD)
            zeros = {"tokens": padded(tokens, 0), "mask": padded(of_tokens, 0)}
            _, loss = train_step(jdist.init(make), strategy.split(zeros))
            np.testing.assert_allclose(loss, (tokens * of_tokens[..., None]).sum() / of_tokens.sum() / 4, rtol=1e-4)


def test_array_of_another_rank_is_auxiliary(two):
    for values in (lambda batch: jnp.float32(3), lambda batch: batch[0]):
        train_step = jdist.train_step(lambda w, batch, values=values: (squares(w, batch), values(batch)), SGD)
        _, outputs = one_epoch(two, train_step, SGD)
        np.testing.assert_allclose(outputs[0][0], expected_epoch()[1][0], rtol=1e-4)


@pytest.mark.parametrize("third", ["key", pytest.param("rng", marks=pytest.mark.slow)])
def test_key_differs_between_steps_and_replicas(third, two):
    parameters = {
        "key": lambda w, batch, key=None: (squares(w, batch), jax.random.uniform(key)),
        "rng": lambda w, batch, rng, scale=1.0: (squares(w, batch), jax.random.uniform(rng)),
    }
    _, results = one_epoch(two, jdist.train_step(parameters[third], SGD), SGD)
    numbers = np.array([aux.tree for _, aux in results])
    assert len(np.unique(numbers)) == numbers.size == 6


def test_precision_and_several_steps_per_call_are_options_of_the_step(two):
    seen = []

    def loss_fn(w, batch):
        seen.append(w.dtype)
        return squares(w, batch)

    precision = jdist.Precision(compute_dtype=jnp.bfloat16)
    train_step = jdist.train_step(loss_fn, SGD, precision=precision, steps_per_call=2, donate=False)
    with two.scope():
        state = jdist.init(lambda: jdist.TrainState.create(jnp.asarray(W), SGD))
        new_state, losses = train_step(state, [two.split((X, Y))] * 2)
    assert set(seen) == {jnp.bfloat16.dtype} and losses.shape == (2,)
    assert (int(state.step), int(new_state.step)) == (0, 2)


def test_function_runs_without_a_strategy():
    state = jdist.TrainState.create(jnp.asarray(W), SGD)
    state, loss = jdist.train_step(squares, SGD).__wrapped__(state, (X, Y))
    np.testing.assert_allclose(state.params, by_hand(W, X, Y)[1], rtol=1e-4)


SIGNATURE = (
    r"^`loss_fn` is called with two arguments, and optionally with `key=` and `weights=`; its parameters are \(w\)"
)
INVALID = [
    (lambda: jdist.train_step("mse", SGD), TypeError, r"^`loss_fn` must be a function, got 'mse'"),
    (lambda: jdist.train_step(squares, "adam"), TypeError, r"Write `optimizer=optax\.adam\(1e-3\)`"),
    (lambda: jdist.train_step(lambda w: w, SGD), TypeError, SIGNATURE),
    (lambda: jdist.train_step(squares, SGD, micro_batches=0), ValueError, "`micro_batches`"),
]


@each_row("make, kind, message", INVALID, ["no_function", "no_optimizer", "parameters", "micro_batches"])
def test_invalid_arguments_raise_at_the_definition(make, kind, message):
    with pytest.raises(kind, match=message):
        make()


def integers(w, batch):
    return jnp.int32(batch[1])


def metrics(w, batch):
    return squares(w, batch), {"error": jdist.metrics.Mean().update(batch[1])}


INVALID_CALLS = [
    (lambda w, batch: (squares(w, batch), jnp.ones(3)), ValueError,
     r"^`loss_fn` returned losses float32\[5\] with weights float32\[3\].*Auxiliary values are a dict"),
    (integers, TypeError, r"^`loss_fn` returned int32\[5\], which is not differentiable"),
    (metrics, TypeError, r"^`loss_fn` returned result\['error'\], a metric Mean, for a padded batch without"),
    (lambda w, batch: jnp.zeros(7) * w[0], ValueError,
     r"^`loss_fn` returned float32\[7\] for 5 examples\..*one or several losses per example, \[5, \.\.\.\]"),
    (lambda w, batch: (batch[0] * w).ravel(), ValueError,
     r"^`loss_fn` returned float32\[15\] for 5 examples.*`losses\.reshape\(5, -1\)`"),
    (lambda w, batch: squares(w, batch).mean(), ValueError, r"^weights float32\[5\] do not match losses float32\[\]"),
]  # fmt: skip


@each_row("loss_fn, kind, message", INVALID_CALLS, [message for *_, message in INVALID_CALLS])
def test_invalid_results_raise(loss_fn, kind, message, two):
    with pytest.raises(kind, match=message):
        one_epoch(two, jdist.train_step(loss_fn, SGD), SGD, batch_size=10)


def test_invalid_states_raise(subtests, two):
    module = nnx.Linear(1, 1, rngs=nnx.Rngs(0))
    rows = [
        ({"params": W}, TypeError, r"must be a `jdist\.TrainState`, or a dataclass .*; dict lacks|is not a dataclass"),
        (jdist.TrainState.create(W, None), ValueError,
         r"^`state\.opt_state` is None: .*TrainState\.create\(params, optimizer\)"),
        (jdist.TrainState.create(module, SGD), TypeError,
         r"^`state\.params` is a module of nnx, .*`nnx\.Optimizer`.*nnx\.split"),
    ]  # fmt: skip
    for state, kind, message in rows:
        with subtests.test(message), two.scope(), pytest.raises(kind, match=message):
            jdist.train_step(squares, SGD)(state, two.split((X, Y)))


ADAM = optax.adam(RATE)
ONLY_B = optax.masked(ADAM, {"w": False, "b": True})
OTHER_OPTIMIZERS = {
    "adam_in_sgd": (ADAM, SGD, "contains ScaleByAdamState, EmptyState, and .* returns EmptyState, EmptyState"),
    "sgd_in_adam": (SGD, ADAM, "contains EmptyState, EmptyState, and .* returns ScaleByAdamState, EmptyState"),
    "adam_in_adabelief": (ADAM, optax.adabelief(RATE), "ScaleByAdamState, .* returns ScaleByBeliefState"),
    "no_schedule": (ADAM, optax.adam(lambda step: RATE), "EmptyState, .*, ScaleByScheduleState"),
    "no_policy": (SGD, sync.every(SGD, 2), "contains EmptyState, EmptyState, and .* returns EveryState, EmptyState"),
    "other_parameters": (ONLY_B, ADAM, "MaskedState, ScaleByAdamState, MaskedNode, .* returns ScaleByAdamState, EmptyState"),
}  # fmt: skip


@each_row("created, used, message", OTHER_OPTIMIZERS.values(), OTHER_OPTIMIZERS)
def test_state_of_another_optimizer_raises(created, used, message, two):
    params = {"w": jnp.asarray(W), "b": jnp.float32(0)}
    loss = lambda params, batch: squares(params["w"], batch) + params["b"]
    message = f"^`state.opt_state` is the state of another optimizer, or of other parameters: it .*{message}.*TrainState.create"
    with two.scope():
        state = jdist.init(lambda: jdist.TrainState.create(params, created))
        with pytest.raises(TypeError, match=message):
            jdist.train_step(loss, used)(state, two.split((X, Y)))
    model = (lambda key, x: params, lambda params, x: x @ params["w"])
    with pytest.raises(TypeError, match=message):
        jdist.Trainer(model, used, optax.squared_error, strategy=two).fit((X, Y), batch_size=10, state=state)


def test_optimizer_state_of_other_parameters_raises(two):
    state = jdist.TrainState.create(jnp.zeros(4), ADAM)
    state = two.put(dataclasses.replace(state, params=jnp.zeros(3)))
    message = r"state\.opt_state\[0\]\.mu is of shape \[4\], and of shape \[3\] in"
    with two.scope(), pytest.raises(TypeError, match=message):
        jdist.train_step(squares, ADAM)(state, two.split((X, Y)))
