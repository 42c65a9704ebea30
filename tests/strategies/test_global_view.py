"""`view="global"`: a step that is written for `jax.jit` runs as it is where one replica sees the global batch."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import jdist
from jdist import testing

from laws import each_row

X = np.random.default_rng(0).normal(size=(8, 4)).astype(np.float32)
tx = optax.chain(optax.clip_by_global_norm(1.0), jdist.sync.mean(), optax.adam(1e-2))  # not clipped per replica
MESH = lambda: Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("data", "model"))

ONE_REPLICA = {
    "sharded_4": lambda: testing.strategy("sharded_4"),
    "sharded_2x2": lambda: jdist.ShardedStrategy("optimizer", mesh=MESH(), model_axis="model"),
    "sharded_zero2": lambda: jdist.ShardedStrategy("gradients", mesh=MESH()),
    "one_device": lambda: testing.strategy("one_device"),
    "mirrored_1": lambda: testing.strategy("mirrored_1"),
    "central_1": lambda: testing.strategy("central_1"),
}
SEVERAL = {
    "MirroredStrategy": lambda: testing.strategy("mirrored_2"),
    "CentralStorageStrategy": lambda: testing.strategy("central_2"),
    "MultiWorkerMirroredStrategy": lambda: jdist.MultiWorkerMirroredStrategy(),
    "DebugStrategy": lambda: testing.DebugStrategy(2),
    "ParameterServerStrategy": lambda: jdist.ParameterServerStrategy(workers=2),
}


def make():
    params = {"w": jnp.linspace(-1, 1, 32).reshape(4, 8), "b": jnp.ones((8, 4))}
    return {"params": params, "opt_state": tx.init(params)}


def train(state, x):
    """As for `jax.jit`: it calls no collective. Its outputs are the loss, and the predictions `[batch, 4]`."""

    def loss_fn(params):
        y = jnp.tanh(x @ params["w"]) @ params["b"]
        return jnp.mean((y - 1) ** 2), y

    outputs, grads = jax.value_and_grad(loss_fn, has_aux=True)(state["params"])
    updates, opt_state = tx.update(grads, state["opt_state"], state["params"])
    return {"params": optax.apply_updates(state["params"], updates), "opt_state": opt_state}, outputs


def assert_close(actual, expected):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), actual, expected)


@pytest.fixture(scope="module")
def expected():
    step, state, outputs = jax.jit(train), make(), []
    for _ in range(2):
        state, output = step(state, X)
        outputs.append(output)
    return state["params"], outputs


@pytest.mark.parametrize("name", ONE_REPLICA)
def test_it_computes_what_jit_computes(name, expected, recwarn):
    strategy, (params, outputs) = ONE_REPLICA[name](), expected
    state, step = strategy.init(make), strategy.step(train, view="global")
    for output in outputs:
        state, (loss, predictions) = step(state, strategy.split(X))
        assert isinstance(predictions, jax.Array)
        assert predictions.shape == X.shape
        assert_close((loss, predictions), output)
    assert_close(state["params"], params)
    assert step.proof.per_replica == ()
    assert not [warning for warning in recwarn if warning.category.__module__.startswith("jdist")]


@each_row("name", ["sharded_2x2", "one_device"])
def test_with_the_other_options_of_a_step(name, expected):
    strategy, (params, outputs) = ONE_REPLICA[name](), expected
    step = strategy.step(train, view="global", steps_per_call=2, donate=False)
    state, stacked = step(strategy.init(make), [strategy.split(X)] * 2)
    assert_close(state["params"], params)
    assert_close(stacked, jax.tree.map(lambda *x: np.stack(x), *outputs))


@each_row("name", ["sharded_2x2", "one_device"])
def test_with_precision_and_micro_batches(name):
    loss_fn = lambda w, x: jnp.mean((x @ w - 1) ** 2, axis=1)
    w, precision = np.ones((4, 2), np.float32) / 4, jdist.Precision(compute_dtype=jnp.float32)

    def step(w, x):
        loss, grads = jdist.value_and_grad(loss_fn, micro_batches=2)(w, x)
        return w - 0.1 * grads, loss

    strategy = ONE_REPLICA[name]()
    new, loss = strategy.step(step, view="global", precision=precision)(strategy.put(w), strategy.split(X))
    expected_loss, grads = jax.value_and_grad(lambda w: loss_fn(w, X).mean())(w)
    assert_close((loss, new), (expected_loss, w - 0.1 * grads))


def test_late_bound_step_and_methods_of_a_program(expected):
    step, strategy = jdist.step(train, view="global", donate=False), ONE_REPLICA["sharded_4"]()
    with strategy.scope():
        state, outputs = step(strategy.init(make), strategy.split(X))
    assert_close(outputs, expected[1][0])
    explanation = jdist.debug.explain(step.on(strategy), state, strategy.split(X))
    assert all(leaf.replicated for leaf in explanation.leaves)
    strategy.compile(step, state, strategy.split(X))
    with testing.strategy("mirrored_2").scope(), pytest.raises(ValueError, match="`train` has `view"):
        step(state, X)


def test_modules_of_nnx():
    def make():
        model = nnx.Linear(4, 2, rngs=nnx.Rngs(0))
        return model, nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)

    def step(state, x):
        model, optimizer = state
        loss, grads = nnx.value_and_grad(lambda model: jnp.mean(model(x) ** 2))(model)
        optimizer.update(model, grads)
        return state, loss

    reference, strategy = jax.jit(step)(make(), X), ONE_REPLICA["sharded_2x2"]()
    (model, _), loss = strategy.step(step, view="global")(strategy.init(make), strategy.split(X))
    assert_close(loss, reference[1])
    assert_close(model.kernel[...], reference[0][0].kernel[...])


def test_batch_that_the_program_has_placed_itself(expected):
    """A plain array that is sharded over the mesh of the strategy, as for `jax.jit`."""
    strategy = ONE_REPLICA["sharded_2x2"]()
    x = jax.device_put(X, NamedSharding(strategy.mesh, PartitionSpec("data")))
    _, outputs = strategy.step(train, view="global")(strategy.init(make), x)
    assert_close(outputs, expected[1][0])


@each_row("name", SEVERAL)
def test_refused_where_it_would_compute_something_else(name):
    strategy = SEVERAL[name]()
    with pytest.raises(ValueError, match=re.escape('`grads = jdist.all_reduce("mean", grads)`')) as caught:
        strategy.step(train, view="global")
    reason = (
        "at different times" if name == "ParameterServerStrategy" else f"of {strategy.num_replicas_in_sync} replicas"
    )
    assert f"Under `{name}`" in str(caught.value)
    assert reason in str(caught.value)


def test_without_it_the_step_is_refused():
    strategy = ONE_REPLICA["sharded_4"]()
    with pytest.raises(jdist.NotMirroredError):
        strategy.step(lambda w, x: (w - x.mean(0), None))(strategy.put(np.zeros(4, np.float32)), strategy.split(X))


@each_row(
    "make",
    [
        lambda **options: jdist.step(train, **options),
        lambda **options: jdist.OneDeviceStrategy().step(train, **options),
    ],
)
def test_unknown_view_is_an_error(make):
    with pytest.raises(ValueError, match="`view` is \"replica\".*got 'mesh'"):
        make(view="mesh")
