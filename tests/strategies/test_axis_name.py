"""`axis_name=`: the function of a `jax.pmap`, with its own axis name, is a replica function without changes."""

import pickle

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from jax import lax

import jdist
from jdist import sync

STRATEGIES = {
    "mirrored": lambda axis: jdist.MirroredStrategy(["cpu:3", "cpu:1", "cpu:2", "cpu:0"], axis_name=axis),
    "virtual": lambda axis: jdist.MirroredStrategy(["cpu:0", "cpu:1"], virtual_replicas=4, axis_name=axis),
    "one_device": lambda axis: jdist.OneDeviceStrategy("cpu:2", axis_name=axis),
    "sharded": lambda axis: jdist.ShardedStrategy(axis_name=axis),
    "multi_worker": lambda axis: jdist.MultiWorkerMirroredStrategy(axis_name=axis),
    "central": lambda axis: jdist.CentralStorageStrategy(["cpu:0", "cpu:1"], axis_name=axis),
    "central_device": lambda axis: jdist.CentralStorageStrategy(
        ["cpu:0", "cpu:1"], parameter_device="cpu:2", axis_name=axis
    ),
    "groups": lambda axis: jdist.MirroredStrategy(mesh={axis: 4, "model": 2}, axis_name=axis),
    "automatic": lambda axis: jdist.auto_strategy(axis_name=axis),
}
X = np.random.default_rng(0).normal(size=(16, 4)).astype(np.float32)


def train_step(params, batch):
    """As written for `jax.pmap(train_step, axis_name="batch")`."""

    def loss_fn(params):
        hidden = batch @ params
        norm = nn.BatchNorm(use_running_average=False, axis_name="batch")
        hidden, _ = norm.init_with_output(jax.random.key(0), hidden)
        return jnp.mean((hidden - 1) ** 2 * jnp.arange(3.0))

    loss, grads = jax.value_and_grad(loss_fn)(params)
    key = jax.random.fold_in(jax.random.key(0), lax.axis_index("batch"))
    noise = jnp.mean(jax.random.normal(key, batch.shape) * batch)
    grads, metrics = lax.pmean((grads, {"loss": loss, "noise": noise}), "batch")
    return params - 0.1 * grads, metrics


def pmapped():
    """Returns the parameters and the metrics of three steps of `jax.pmap`."""
    devices = jax.devices()[:4]
    step = jax.pmap(train_step, axis_name="batch", devices=devices)
    params = np.repeat(np.ones((1, 4, 3), np.float32), 4, 0)
    for _ in range(3):
        params, metrics = step(params, X.reshape(4, 4, 4))
    return jax.tree.map(lambda x: np.asarray(x)[0], (params, metrics))


@pytest.mark.parametrize("name", ["mirrored", "virtual"])
def test_function_of_a_pmap_is_a_step_and_equals_the_pmap(name):
    strategy = STRATEGIES[name]("batch")
    step = strategy.step(train_step)
    params = strategy.init(lambda: jnp.ones((4, 3)))
    for _ in range(3):
        params, metrics = step(params, strategy.split(X))
    expected_params, expected_metrics = pmapped()
    np.testing.assert_allclose(params, expected_params, rtol=1e-4, atol=1e-6)
    for key, value in expected_metrics.items():
        np.testing.assert_allclose(metrics[key], value, rtol=1e-4, atol=1e-6)
    assert step.proof.per_replica == ()


@pytest.mark.parametrize("name", STRATEGIES)
def test_jdist_functions_use_the_axis(name):
    strategy = STRATEGIES[name]("batch")
    n = strategy.num_replicas_in_sync

    def each():
        index = jdist.replica_id()
        return {
            "index": lax.axis_index("batch"),
            "size": lax.axis_size("batch"),
            "sum": jdist.all_reduce("sum", index),
            "psum": lax.psum(index, "batch"),
            "gathered": jdist.all_gather(index[None], 0),
        }

    results = strategy.run(each)
    assert [int(i) for i in strategy.local_results(results["index"])] == list(range(n))
    assert int(results["size"]) == n
    assert int(results["sum"]) == int(results["psum"]) == sum(range(n))
    assert results["gathered"].tolist() == list(range(n))
    assert strategy.replicas.axes == ("batch",)
    copy = pickle.loads(pickle.dumps(strategy))
    assert (copy.replicas.axes, copy.devices) == (("batch",), strategy.devices)


@pytest.mark.parametrize("name", STRATEGIES)
def test_values_and_policies_equal_those_of_the_default_axis(name):
    results = []
    for axis in ("batch", "replica"):
        strategy = STRATEGIES[name](axis)
        tx = sync.local_sgd(optax.sgd(0.1), every=2)
        state = strategy.init(
            lambda tx=tx: (w := jnp.ones((4, 3)), tx.init(w), jdist.SyncOnRead(jnp.float32(0), "sum"))
        )

        @strategy.step
        def step(state, x, tx=tx):
            w, opt_state, seen = state
            grads = jax.grad(lambda w: jnp.mean((x @ w) ** 2))(w)
            updates, opt_state = tx.update(grads, opt_state, w)
            return (optax.apply_updates(w, updates), opt_state, seen + x.sum()), None

        for _ in range(3):
            state, _ = step(state, strategy.split(X))
        placed = strategy.put(jax.device_get(jdist.read_values(state)[0]))
        results.append([np.asarray(leaf) for leaf in jax.tree.leaves((jdist.read_values(state), placed))])
    for first, second in zip(*results, strict=True):
        np.testing.assert_array_equal(first, second)


def test_step_without_the_reduction_is_rejected_under_another_axis():
    strategy = STRATEGIES["mirrored"]("batch")
    state = strategy.init(lambda: jnp.ones(4))
    for reduce in (lambda x: x, lambda x: lax.pmean(x, "replica")):  # the axis `"replica"` of the mesh has size one
        with pytest.raises(jdist.NotMirroredError):
            strategy.step(lambda w, x, reduce=reduce: (w - reduce(x.mean(0)), None))(state, strategy.split(X))


def test_axis_of_another_name_is_refused_with_the_line_and_the_fix(strategy):
    state = strategy.init(lambda: jnp.ones((4, 3)))
    message = (
        r"test_axis_name\.py:\d+ in .* uses the axis 'batch', and the replicas of this strategy have the axis 'replica'.*"
        r'`jdist\.all_reduce`.*`axis_name="batch"`'
    )
    with pytest.raises(NameError, match=message):
        strategy.step(lambda w, x: (w - lax.pmean(x, "batch").mean(), None))(
            state, strategy.split(np.ones((24, 4), np.float32))
        )


@pytest.mark.parametrize("make", STRATEGIES.values(), ids=STRATEGIES)
def test_axis_name_is_checked(make):
    with pytest.raises(TypeError, match=r"`axis_name` must be a string, .*got 3\."):
        make(3)
    with pytest.raises(ValueError, match=r"`axis_name` is empty"):
        make("")


def test_axis_name_and_two_axes_are_refused():
    ops = jdist.HierarchicalAllReduce(group_size=2)
    with pytest.raises(ValueError, match=r"`HierarchicalAllReduce` reduces over two axes, and `axis_name='batch'`"):
        jdist.MirroredStrategy(["cpu:0", "cpu:1"], cross_device_ops=ops, axis_name="batch")
    with pytest.raises(ValueError, match=r"The mesh has an axis 'data', and `axis_name` gives this name"):
        jdist.ShardedStrategy(axis_name="data")
