"""A step whose loss or gradient is infinite or NaN changes nothing; and the numbers that decide this."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jdist
from jdist._src.replica import finite
from jdist._src.training import gradient_step
from jdist._src.training.steps import TrainCarry

from laws import assert_in_step

BATCH, BAD = 24, 1  # three batches; the second has a gradient that is not finite, and a finite loss
X = np.random.default_rng(0).normal(size=(72, 3)).astype(np.float32)
Y = (X @ np.float32([1, -2, 3])).astype(np.float32)
MODEL = (lambda key, x: {"w": jnp.zeros(3), "frozen": jnp.ones(2)}, lambda params, x: x @ params["w"])


def bad_derivative(outputs, targets):
    """Squared errors, whose derivative is NaN for a target of 7."""
    zero_at_7 = jnp.where(targets == 7, outputs * 0, 1)
    return jnp.square(outputs - targets) + jnp.where(targets == 7, jnp.sqrt(zero_at_7), 0)


def data():
    y = Y.copy()
    y[BATCH * BAD + 3] = 7
    return X, y


def trainer_of(strategy, optimizer=None, loss=bad_derivative, model=MODEL, **options):
    return jdist.Trainer(model, optimizer or optax.adamw(0.1), loss, strategy=strategy, **options)


def train(trainer, examples=None, **options):
    examples = data() if examples is None else examples
    return trainer.fit(examples, **{"batch_size": BATCH, "shuffle": False, "progress": "off", **options})


def bits(tree):
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(jax.tree.map(np.asarray, jdist.read_values(tree)))]


def assert_same_training(fit, expected):
    assert bits((fit.state.params, fit.state.opt_state)) == bits((expected.state.params, expected.state.opt_state))


# -- the law -----------------------------------------------------------------------------------------------------------


def test_non_finite_gradient_stops_with_the_state_before_it(strategy):
    fit = train(trainer_of(strategy), epochs=2)
    before = train(trainer_of(strategy), tuple(part[:BATCH] for part in data()))
    assert np.isfinite(fit.history.losses[2]) and fit.steps == int(fit.state.step) == 1
    assert_same_training(fit, before)
    assert fit.stop_reason == (
        "A gradient or the update of step 2 is infinite or NaN (batch 1 of epoch 0). The state is the one before that step."
    )


@pytest.mark.parametrize("steps_per_call", [1, 3])
def test_step_with_a_non_finite_gradient_is_skipped(two, steps_per_call):
    fit = train(trainer_of(two, non_finite="skip"), steps_per_call=steps_per_call)
    expected = train(trainer_of(two), tuple(np.delete(part, slice(BATCH, 2 * BATCH), 0) for part in data()))
    assert_same_training(fit, expected)
    assert fit.steps == int(fit.state.step) == 3
    assert fit.history["loss"] == expected.history["loss"]


REDUCES = {
    "mean": lambda: optax.chain(jdist.sync.mean(), optax.adam(0.1)),
    "local": lambda: jdist.sync.local_sgd(optax.sgd(0.1), every=2),
    "float16": lambda: optax.chain(jdist.sync.in_dtype(jnp.float16), optax.sgd(0.1)),
}


@pytest.mark.parametrize("optimizer", REDUCES.values(), ids=REDUCES)
@pytest.mark.parametrize("non_finite", ["stop", "skip"])
def test_replicas_agree_with_an_optimizer_that_reduces(optimizer, non_finite, two):
    """The bad example is on one replica, whose update alone is not finite if the updates are local."""
    fit = train(trainer_of(two, optimizer(), non_finite=non_finite))
    if non_finite == "stop":
        assert fit.steps == 1
        assert_same_training(fit, train(trainer_of(two, optimizer()), tuple(part[:BATCH] for part in data())))
    else:
        assert fit.steps == 3
        assert all(np.isfinite(np.asarray(leaf)).all() for leaf in jax.tree.leaves(fit.state.params))
    assert_in_step(fit.state)


# -- the numbers that decide -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rate", [np.nan, np.inf])
@pytest.mark.parametrize("non_finite", ["stop", "skip"])
def test_learning_rate_that_is_not_finite_changes_nothing(two, rate, non_finite):
    optimizer = optax.sgd(lambda count: jnp.where(count == 1, rate, 0.1))
    fit = train(trainer_of(two, optimizer, non_finite=non_finite), (X, Y))
    assert np.isfinite(np.asarray(fit.state.params["w"])).all()
    # A skipped step does not count in the state of the optimizer, so the schedule returns the same rate again.
    assert fit.steps == (1 if non_finite == "stop" else 3)
    expected = train(trainer_of(two, optax.sgd(0.1)), (X[:BATCH], Y[:BATCH]))
    np.testing.assert_array_equal(fit.state.params["w"], expected.state.params["w"])


@pytest.mark.parametrize(
    "optimizer",
    [
        lambda: jdist.sync.skip_nonfinite(optax.chain(jdist.sync.mean(), optax.sgd(0.1))),
        lambda: optax.apply_if_finite(optax.sgd(0.1), 5),
        lambda: optax.chain(optax.zero_nans(), optax.sgd(0.1)),
    ],
    ids=["skip_nonfinite", "apply_if_finite", "zero_nans"],
)
def test_optimizer_that_tests_numbers_itself_decides(two, optimizer):
    fit = train(trainer_of(two, optimizer()))
    assert fit.steps == 3 and fit.stop_reason.startswith("All requested steps were taken.")
    is_counted = not isinstance(fit.state.opt_state, tuple) or hasattr(fit.state.opt_state, "_fields")
    assert ("1 of 3 steps were skipped" in fit.stop_reason) is is_counted


def test_gradients_that_the_optimizer_does_not_read_do_not_count(two):
    model = (MODEL[0], lambda params, x: x @ params["w"] + jnp.sqrt(params["frozen"].sum() * 0))
    groups = {"w": "trained", "frozen": "frozen"}
    optimizer = optax.multi_transform({"trained": optax.sgd(0.1), "frozen": optax.set_to_zero()}, groups)
    assert train(trainer_of(two, optimizer, optax.squared_error, model), (X, Y)).steps == 3
    fit = train(trainer_of(two, optax.sgd(0.1), optax.squared_error, model), (X, Y))
    assert fit.steps == 0 and "A gradient or the update of step 1" in fit.stop_reason


def spoil_second_number():
    """Returns an optimizer whose second update is NaN at the second number of `w`."""

    def update(grads, count, params=None):
        spoiled = grads["w"].at[1].set(jnp.where(count == 1, jnp.nan, grads["w"][1]))
        return {**jax.tree.map(jnp.negative, grads), "w": -0.1 * spoiled}, count + 1

    return optax.GradientTransformation(lambda params: jnp.int32(0), update)


def test_update_that_is_not_finite_elsewhere_is_reported_by_the_next_loss_and_not_saved(two, tmp_path):
    trainer = trainer_of(two, spoil_second_number(), optax.squared_error)
    with jdist.Checkpointer(tmp_path, every=1) as checkpointer:
        fit = train(trainer, (X, Y), callbacks=[jdist.callbacks.Checkpoint(checkpointer)])
        assert checkpointer.latest == 1
    assert fit.steps == int(fit.state.step) == 2 and np.isnan(fit.state.params["w"]).tolist() == [False, True, False]
    reason = "The loss of step 3 is nan (batch 2 of epoch 0). The state is the one before that"
    assert fit.stop_reason.startswith(reason) and "Parameters of this state are infinite or NaN" in fit.stop_reason


def test_initial_parameters_that_are_not_finite_are_named(two):
    fit = train(trainer_of(two, model=(lambda key, x: jnp.float32([1, np.nan, 2]), lambda w, x: x @ w)))
    assert fit.steps == 0 and "Parameters of this state are infinite or NaN" in fit.stop_reason


# -- finite numbers ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16, jnp.float32, jnp.complex64])
@pytest.mark.parametrize("columns", [100, 1 << 18])
def test_are_finite_finds_every_number_that_is_not(columns, dtype):
    are_finite = jax.jit(finite.are_finite)
    largest = jnp.full((3, columns), jnp.finfo(dtype).max, dtype)  # their sum would overflow
    assert are_finite({"x": largest, "n": jnp.arange(3)}) and are_finite([largest[:0], jnp.int32(1)])
    for value in (jnp.inf, -jnp.inf, jnp.nan):
        for index in [(0, 0), (1, 57), (2, 99)]:
            assert not are_finite([jnp.ones(2), largest.at[index].set(value)])


def test_replicas_that_share_the_test_of_large_gradients_find_every_number(two):
    size = (4 << 20) // 4 + 1

    def test(index):
        value = jnp.where(jdist.replica_id() == 1, jnp.nan, 0)
        grads = {"b": jnp.ones(3) * value, "w": jnp.zeros(size).at[index].set(value)}
        _, grads, is_finite = gradient_step.mean_loss_and_grads(jnp.float32(1), grads, [False, True])
        return is_finite, jnp.isnan(grads["w"]).sum()

    for index in (0, size // 2, size // 2 + 1, size - 1, size):  # the last one is outside of the array
        is_finite, count = two.run(test, (index,))
        assert (bool(is_finite), int(count)) == ((True, 0) if index == size else (False, 1))


def test_the_guard_reads_the_state_once(two):
    """The choice between old and new values is fused into the update: no array of the size of a parameter is added."""
    model = (lambda key, x: jnp.zeros((64, 64)), lambda w, x: (x @ w).sum(-1))
    x, sizes = np.ones((8, 64), np.float32), {}
    for non_finite in ("stop", "keep"):
        trainer = trainer_of(two, optax.adamw(0.1), optax.squared_error, model, non_finite=non_finite)
        sizes[non_finite] = temporary_bytes(two, trainer, x)
    assert sizes["stop"] <= sizes["keep"] + 64 * 64 * 4


def temporary_bytes(strategy, trainer, x):
    step = strategy.step(trainer._functions.train)
    metrics = strategy.init(trainer._functions.empty_metrics)
    carry = TrainCarry(trainer.init(x), metrics, strategy.put(np.bool_(False)))
    (batch,) = strategy.distribute_dataset((x, x[:, 0]), len(x))
    return strategy.compile(step, carry, batch).memory_analysis().temp_size_in_bytes


def test_custom_step_that_is_not_finite_stops_though_later_steps_are(two):
    def step(state, batch, weights=None):
        x, y = batch
        loss = jdist.all_reduce("mean", jnp.where(y == 7, jnp.nan, x @ state.params["w"] - y).mean())
        params = jax.tree.map(lambda p: p - loss, state.params)
        return dataclasses.replace(state, step=state.step + 1, params=params), loss

    trainer = jdist.Trainer(step=step, strategy=two)
    state = two.init(lambda: jdist.TrainState.create(MODEL[0](None, None), optax.sgd(0.1)))
    fit = train(trainer, state=state, epochs=40)
    assert fit.steps == 1 and fit.stop_reason.startswith("The loss of step 2 is nan")
