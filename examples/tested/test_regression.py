"""Tests of a training step on one device, on all devices, and on two processes."""

import chex
import numpy as np
import pytest
from absl.testing import parameterized

import jdist

import regression


@jdist.testing.strategies("one_device", "mirrored", "sharded", "central")
def test_training_is_the_same_as_on_one_device():
    jdist.testing.assert_same_as_one_device(regression.make_state, regression.train_step, regression.make_batches(3))


@jdist.testing.strategies("mirrored", "sharded")
def test_devices_hold_the_same_state_and_a_step_makes_no_transfer(strategy):
    step = strategy.step(chex.assert_max_traces(regression.train_step, n=1))
    state = strategy.init(regression.make_state)
    batches = [strategy.split(batch) for batch in regression.make_batches(3)]
    state, loss = step(state, *batches[0])
    with jdist.testing.assert_no_transfer():
        for batch in batches[1:]:
            state, loss = step(state, *batch)
    jdist.testing.assert_replicated((state, loss))


def test_gradients_are_reduced_in_one_message():
    strategy = jdist.testing.strategy("mirrored")
    expected = {"all-reduce": 1} if strategy.num_replicas_in_sync > 1 else {}
    state, batch = strategy.init(regression.make_state), strategy.split(regression.make_batches(1)[0])
    jdist.testing.assert_collectives(strategy.step(regression.train_step), expected, state, *batch)


class LossTest(chex.TestCase):
    @jdist.testing.variants(one_device=True, mirrored=True)
    @parameterized.parameters(0.0, 2.0)
    def test_loss_of_constant_predictions(self, b):
        x, y = np.ones((8, 3), np.float32), np.zeros(8, np.float32)
        mean_loss = self.variant(
            lambda x, y: jdist.all_reduce("mean", regression.loss_of({"w": np.zeros(3), "b": b}, x, y))
        )
        self.assertEqual(mean_loss(*self.variant.strategy.split((x, y))), b**2)


@pytest.fixture(scope="module")
def pair():
    """Two processes, as two hosts would be."""
    with jdist.testing.processes(2, devices_per_process=2) as pair:
        yield pair


def train_on_all_processes() -> float:
    """Trains in one process of several; the processes compare their results."""
    with jdist.testing.strategy("mirrored").scope() as strategy:
        jdist.testing.assert_same_as_one_device(
            regression.make_state, regression.train_step, regression.make_batches(3)
        )
        step, state = strategy.step(regression.train_step), strategy.init(regression.make_state)
        for batch in regression.make_batches(20):
            state, loss = step(state, *strategy.split(batch))
    jdist.testing.assert_replicated(state)
    return float(loss)


def test_two_processes_train_one_model(pair):
    first, second = pair.run("test_regression:train_on_all_processes")
    assert first == second
