"""States that `fit` and `evaluate` receive: on the host, on other devices, without an optimizer, and unusable ones."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training import train_state

import jdist

from laws import STRATEGIES, each_row
from small_fits import CROSS_ENTROPY, MLP, assert_bitwise_equal, digits, trainer

DATA = tuple(array[:480] for array in digits())


def continued(of, state, **options):
    return of.fit(DATA, batch_size=240, epochs=1, state=state, progress="off", **options)


@pytest.fixture
def trained(two):
    """A trainer, and the result of two steps."""
    of_two = trainer(two)
    return of_two, of_two.fit(DATA, batch_size=240, progress="off")


def test_state_on_the_host_is_placed(strategy):
    of_strategy = trainer(strategy)
    state = of_strategy.init(DATA[0])
    data = jax.random.key_data(state.rng)
    on_host = jax.tree.map(np.asarray, dataclasses.replace(jdist.read_values(state), rng=data))
    on_host = dataclasses.replace(on_host, rng=jax.random.wrap_key_data(on_host.rng))
    placed = continued(of_strategy, on_host)
    assert_bitwise_equal(placed.state, continued(of_strategy, state).state)
    sharding = strategy.put(on_host).params["Dense_0"]["kernel"].sharding
    assert placed.state.params["Dense_0"]["kernel"].sharding.is_equivalent_to(sharding, 2)
    again = continued(of_strategy, on_host)  # the state on the host was not donated
    assert_bitwise_equal(again.state, placed.state)


def test_state_that_was_created_without_a_strategy_is_placed(two):
    params = MLP().init(jax.random.key(0), DATA[0][:1])["params"]
    optimizer = optax.adam(3e-3)
    state = jdist.TrainState.create(params, optimizer)
    result = continued(trainer(two, optimizer), state)
    assert result.steps == 2 and result.state.step.sharding.device_set == two.put(0).sharding.device_set
    assert int(state.step) == 0 and not state.params["Dense_0"]["kernel"].is_deleted()


def test_flax_state_whose_step_is_a_python_number_is_placed(two):
    variables = MLP().init(jax.random.key(0), DATA[0][:1])
    optimizer = optax.adam(3e-3)
    state = train_state.TrainState.create(apply_fn=MLP().apply, params=variables["params"], tx=optimizer)
    assert isinstance(state.step, int)
    assert continued(trainer(two, optimizer), state).steps == 2


def test_state_of_other_devices_is_placed(two, trained):
    one = trainer(STRATEGIES["one_device"]())
    expected = continued(trained[0], trained[1].state)
    _, result = trained[0], trained[0].fit(DATA, batch_size=240, progress="off")
    on_one = continued(one, result.state)
    for a, b in zip(jax.tree.leaves(on_one.state.params), jax.tree.leaves(expected.state.params), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)
    assert on_one.steps == 4


def test_state_that_is_partly_on_the_devices_is_refused_with_the_fix(two, trained):
    of_two, result = trained
    for step, place in (
        (0, "0\\) is on the host"),
        (jnp.int32(0), r"int32\[\]\) is on "),
        (np.int32(0), "on the host"),
    ):
        partly = dataclasses.replace(result.state, step=step)
        with pytest.raises(ValueError, match=rf"state.step \(.*{place}.*, and state\.params.* is on the devices of the strategy: a "
                           r"part of the state was replaced. Place all of it: `fit\(state=strategy.put\(state\)\)`"):  # fmt: skip
            continued(of_two, partly)
    assert continued(of_two, two.put(dataclasses.replace(result.state, step=0))).steps == 2


@each_row("state, error, message", [
    (5, TypeError, "`state` must be a training state, got 5. Pass the `state` of an earlier `Fit` .* take a number of steps, `s"),
    ("run", TypeError, "`state` must be a training state, got 'run'. .* to continue from a checkpoint, write `resume=path`"),
    (jdist.Fit(None, jdist.History(), 0, ""), TypeError,
     r"`state` is a `Fit`. Pass the state in it: `fit\(state=earlier.state\)`"),
    (jdist.TrainState(np.int32(0), {"w": jax.ShapeDtypeStruct((3,), "float32")}, (), {}, None), TypeError,
     r"state.params\['w'\] is a shape without a value, and there is no checkpoint to restore"),
    (jdist.TrainState.create({"w": np.zeros(3)}, None), ValueError,
     r"`state.opt_state` is None: the state was created without an optimizer, .*=jdist.TrainState.create\(state.params, opt"),
])  # fmt: skip
def test_unusable_states_are_refused_with_the_fix(two, state, error, message):
    with pytest.raises(error, match=message):
        continued(trainer(two), state)


# ---- without an optimizer


def evaluator(strategy):
    return jdist.Trainer(MLP(), loss=CROSS_ENTROPY, strategy=strategy)


def test_trainer_without_optimizer_creates_a_state_and_evaluates_it(strategy):
    evaluating = evaluator(strategy)
    state = evaluating.init(DATA[0])
    assert state.opt_state is None
    expected = trainer(strategy).evaluate(trainer(strategy).init(DATA[0]), DATA, batch_size=240)["loss"]
    assert evaluating.evaluate(state, DATA, batch_size=240)["loss"] == expected
    assert evaluating.predict(state, DATA[0], batch_size=240).shape == (480, 10)


def test_model_without_optimizer_is_applied(two):
    evaluating = evaluator(two)
    assert evaluating.apply(evaluating.init(DATA[0]), DATA[0][:3]).shape == (3, 10)


@pytest.mark.slow
def test_restored_parameters_are_evaluated(two, trained, tmp_path):
    of_two, result = trained
    expected = of_two.evaluate(result.state, DATA, batch_size=240)["loss"]
    with jdist.Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(2, result.state)
        evaluating = evaluator(two)
        with_like = checkpointer.restore(two, like=evaluating.init(DATA[0]), only=["params", "model_state"])
        without_like = checkpointer.restore(two, only="params")
    assert {path.partition("/")[0] for path in with_like.unused} == {"opt_state", "rng", "step"}
    for state in (with_like.state, without_like.state):
        assert evaluating.evaluate(state, DATA, batch_size=240)["loss"] == expected
        assert evaluating.predict(state, DATA[0], batch_size=240).shape == (480, 10)


def test_state_without_parameters_is_refused(two):
    with pytest.raises(TypeError, match=r"The state must have `params`, as an attribute or a key: .*; got dict"):
        evaluator(two).evaluate({"weights": 1}, DATA, batch_size=240)
