"""Equinox modules as states: leaves that are not arrays are part of the structure."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jdist

from laws import traces_of_a_step

eqx = pytest.importorskip("equinox")

X = np.random.default_rng(0).normal(size=(24, 3)).astype(np.float32)
Y = X.sum(axis=1)
OPTIMIZER = optax.adam(0.1)


class Net(eqx.Module):
    """A perceptron, whose activation is a leaf, and dropout, whose rate and mode are leaves."""

    mlp: eqx.nn.MLP
    dropout: eqx.nn.Dropout

    def __init__(self, key, rate=0.0):
        self.mlp, self.dropout = eqx.nn.MLP(3, "scalar", 4, 1, activation=jnp.tanh, key=key), eqx.nn.Dropout(rate)

    def __call__(self, x, key=None):
        return self.mlp(self.dropout(x, key=key))


def make_state(key):
    model = Net(key)
    return {"model": model, "opt_state": OPTIMIZER.init(eqx.filter(model, eqx.is_inexact_array))}


def loss_of(model, x, y):
    return jnp.mean((jax.vmap(model)(x) - y) ** 2)


def train_step(state, x, y):
    loss, grads = jdist.all_reduce("mean", eqx.filter_value_and_grad(loss_of)(state["model"], x, y))
    updates, opt_state = OPTIMIZER.update(grads, state["opt_state"])
    return {"model": eqx.apply_updates(state["model"], updates), "opt_state": opt_state}, loss


def arrays_of(tree):
    return [np.asarray(leaf) for leaf in jax.tree.leaves(tree) if eqx.is_array(leaf)]


@pytest.mark.parametrize("create", ["init", "put"])
def test_modules_train_as_in_plain_jax(strategy, create):
    key = jax.random.key(0)
    state = strategy.init(make_state, key) if create == "init" else strategy.put(make_state(key))
    traces = []

    @strategy.step
    def step(state, x, y):
        traces.append(state["model"].mlp.activation)
        return train_step(state, x, y)

    expected = make_state(key)
    for _ in range(2):
        state, loss = step(state, *strategy.split((X, Y)))
        expected, expected_loss = eqx.filter_jit(train_step)(expected, X, Y)
    assert set(traces) == {jnp.tanh} and len(traces) == traces_of_a_step(strategy)
    assert state["model"].mlp.activation is jnp.tanh and state["model"].dropout.p == 0.0
    np.testing.assert_allclose(loss, expected_loss, rtol=1e-4)
    for a, b in zip(arrays_of(state), arrays_of(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)
    assert "state['model'].mlp.layers[0].weight" in step.proof.replicated


def test_modules_are_arguments_and_results_of_run(two):
    model = two.put(Net(jax.random.key(0), rate=0.5))

    def predict(model, x):
        model = eqx.nn.inference_mode(model)
        return jax.vmap(model)(x), model

    for _ in range(2):
        predictions, in_inference = two.run(predict, (model, two.split(X)))
    expected = jax.vmap(eqx.nn.inference_mode(Net(jax.random.key(0))))(X)
    np.testing.assert_allclose(two.gather(predictions, axis=0), expected, rtol=1e-5)
    assert in_inference.dropout.inference is True and in_inference.dropout.p == 0.5


def test_checkpoint_and_weights(two, tmp_path):
    pytest.importorskip("safetensors")
    state = two.init(make_state, jax.random.key(0))
    like = make_state(jax.random.key(1))
    with jdist.Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, state)
        restored = checkpointer.restore(two, like=like).state
    jdist.weights.save(tmp_path / "model.safetensors", state["model"])
    loaded = jdist.weights.load(tmp_path / "model.safetensors", like=like["model"], strategy=two)
    for model in (restored["model"], loaded):
        assert model.mlp.activation is jnp.tanh
        for a, b in zip(arrays_of(model), arrays_of(state["model"]), strict=True):
            np.testing.assert_array_equal(a, b)


def test_shardings_read_values_and_describe(two):
    state = two.put(make_state(jax.random.key(0)))
    assert two.shardings(state)["model"].mlp.activation is jnp.tanh
    assert jdist.read_values(state)["model"].mlp.activation is jnp.tanh
    assert "model/mlp/layers/0/weight" in {leaf.path for leaf in two.describe(state).leaves}


def test_functions_outside_of_modules_are_refused(two):
    with pytest.raises(TypeError, match=r"state\['activation'\] is .*tanh.*: the arguments of a replica"):
        two.step(lambda state: (state, None))({"activation": jnp.tanh, "model": Net(jax.random.key(0))})
