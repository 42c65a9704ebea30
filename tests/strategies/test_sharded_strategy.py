"""`ShardedStrategy`: it computes the same as one device, for every option and mesh."""

import math

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax import lax
from jax.sharding import AxisType, Mesh, PartitionSpec

import jdist

import policies
from laws import STRATEGIES, each_row

SHARDS = ("optimizer", "gradients", "all")
LAYOUT = {r"first/kernel": PartitionSpec(None, "model"), r"second/kernel": PartitionSpec("model", None)}
MESHES = {
    "one": ((1,), ("data",)),
    "four": ((4,), ("data",)),
    "eight": ((8,), ("data",)),
    "data_model": ((2, 2), ("data", "model")),
    "host_data": ((2, 2), ("host", "data")),
}


def sharded(shard="all", where="four", layout=None):
    shape, axes = MESHES[where]
    mesh = Mesh(np.array(jax.devices()[: math.prod(shape)]).reshape(shape), axes)
    if "model" not in axes:
        return jdist.ShardedStrategy(shard, mesh=mesh)
    return jdist.ShardedStrategy(shard, mesh=mesh, model_axis="model", layout=LAYOUT if layout is None else layout)


def some(cases, more):
    """Returns `cases`, and a third of the product `more`, which contains every value of each factor, as slow cases."""
    return [*cases, *(pytest.param(*case, marks=pytest.mark.slow) for case in more[::3] if case not in cases)]


def one_device():
    return STRATEGIES["one_device"]()


def placements(tree):
    return [leaf.sharding for leaf in jax.tree.leaves(tree)]


def host(tree):
    """Returns `tree` as numpy arrays, random keys as their data."""
    bits = lambda x: jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x
    return jax.tree.map(lambda x: np.asarray(bits(x)), jdist.read_values(tree))


def assert_close(actual, expected, rtol=2e-5, atol=2e-6):
    chex.assert_trees_all_close(host(actual), host(expected), rtol=rtol, atol=atol)


# --- training


FEATURES, BATCH = 6, 16


def first_params():
    draw = np.random.default_rng(0).normal
    weights = lambda *shape: jnp.float32(0.4 * draw(size=shape))
    return {
        "first": {"kernel": weights(FEATURES, 16), "bias": jnp.zeros(16)},
        "second": {"kernel": weights(16, 3), "bias": jnp.zeros(3)},
        "scale": jnp.ones(()),
    }


def predict(params, x):
    hidden = jnp.tanh(x @ params["first"]["kernel"] + params["first"]["bias"])
    return params["scale"] * (hidden @ params["second"]["kernel"] + params["second"]["bias"])


def loss_of(params, x, y):
    return jnp.mean((predict(params, x) - y) ** 2)


def batches(strategy, steps=3, size=BATCH):
    draw = np.random.default_rng(1).normal
    x, y = draw(size=(steps * size, FEATURES)).astype(np.float32), draw(size=(steps * size, 3)).astype(np.float32)
    return strategy.distribute_dataset((x, y), size)


def step_of(tx, loss=loss_of):
    def step(state, batch):
        value, grads = jdist.all_reduce("mean", jax.value_and_grad(loss)(state["params"], *batch))
        updates, opt_state = tx.update(grads, state["opt_state"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "opt_state": opt_state}, value

    return step


def initial_state(strategy, tx, make=first_params):
    return strategy.init(lambda: {"params": (params := make()), "opt_state": tx.init(params)})


def train(strategy, tx, state=None, loss=loss_of, steps=3):
    """Returns the state after `steps` steps, and the outputs of each step."""
    step, state, outputs = strategy.step(step_of(tx, loss)), initial_state(strategy, tx) if state is None else state, []
    for batch in batches(strategy, steps):
        state, value = step(state, batch)
        outputs.append(value)
    return state, outputs


OPTIMIZERS = {
    "sgd": optax.sgd(0.1),
    "adamw_clipped": optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(1e-2)),
    "adafactor": optax.adafactor(1e-2, min_dim_size_to_factor=4),
}
CASES = [("adamw_clipped", "all", "four"), ("adamw_clipped", "gradients", "data_model")]
MORE = [(name, shard, where) for name in OPTIMIZERS for shard in SHARDS for where in MESHES]


@pytest.mark.parametrize("name, shard, where", some(CASES, MORE))
def test_training_equals_one_device_and_the_state_keeps_its_placement(name, shard, where):
    strategy, tx = sharded(shard, where), OPTIMIZERS[name]
    state = initial_state(strategy, tx)
    before = placements(state)
    chex.assert_trees_all_equal(host(state), host(initial_state(one_device(), tx)))  # `init` is bitwise equal
    after, outputs = train(strategy, tx, state)
    expected, values = train(one_device(), tx)
    assert_close((after, outputs), (expected, values))
    assert placements(after) == before


def test_leaves_are_split_as_requested():
    for shard in SHARDS:
        state = initial_state(sharded(shard), OPTIMIZERS["adamw_clipped"])
        parameter, moment = state["params"]["first"]["kernel"], state["opt_state"][1][0].mu["first"]["kernel"]
        assert moment.sharding.shard_shape(moment.shape) == (6, 4)
        assert parameter.sharding.shard_shape(parameter.shape) == ((6, 4) if shard == "all" else (6, 16))
    state = initial_state(sharded("all", "host_data"), OPTIMIZERS["adamw_clipped"])
    kernel = state["params"]["first"]["kernel"]
    assert kernel.sharding.spec == PartitionSpec(None, "data")  # over the devices of a host, not over hosts
    assert {shard.replica_id for shard in kernel.addressable_shards} == {0, 1}
    state = initial_state(sharded("all", "data_model"), OPTIMIZERS["adamw_clipped"])
    for kernel in (state["params"]["first"]["kernel"], state["opt_state"][1][0].nu["first"]["kernel"]):
        assert kernel.sharding.spec == PartitionSpec("data", "model")


class Linen(nn.Module):
    """With batch normalization over the replica axis, and dropout."""

    @nn.compact
    def __call__(self, x, key):
        x = nn.BatchNorm(use_running_average=False, axis_name="replica")(nn.Dense(16)(x))
        return nn.Dense(3)(nn.Dropout(0.5, deterministic=False)(nn.relu(x), rng=key))


def train_linen(strategy):
    model, tx = Linen(), optax.sgd(0.1, momentum=0.9)

    def make(key):
        # Binds the axis, which is bound only in a step.
        variables = jax.vmap(lambda x: model.init(key, x, key), axis_name="replica", in_axes=None, axis_size=1)(
            jnp.zeros((2, FEATURES))
        )
        params, stats = jax.tree.map(lambda x: x[0], (variables["params"], variables["batch_stats"]))
        return {"params": params, "stats": stats, "opt_state": tx.init(params), "key": jax.random.key(3)}

    @strategy.step
    def step(state, batch):
        key, used = jax.random.split(state["key"])

        def loss(params):
            variables = {"params": params, "batch_stats": state["stats"]}
            y, changed = model.apply(variables, batch[0], jdist.replica_key(used), mutable=["batch_stats"])
            return jnp.mean((y - batch[1]) ** 2), changed["batch_stats"]

        (value, stats), grads = jdist.all_reduce("mean", jax.value_and_grad(loss, has_aux=True)(state["params"]))
        updates, opt_state = tx.update(grads, state["opt_state"], state["params"])
        params = optax.apply_updates(state["params"], updates)
        return {"params": params, "stats": stats, "opt_state": opt_state, "key": key}, value

    state = strategy.init(make, jax.random.key(0))
    for batch in batches(strategy):
        state, _ = step(state, batch)
    return state


class Nnx(nnx.Module):
    def __init__(self, rngs):
        self.first, self.second = nnx.Linear(FEATURES, 16, rngs=rngs), nnx.Linear(16, 3, rngs=rngs)
        self.norm = nnx.BatchNorm(16, rngs=rngs, axis_name="replica")
        self.dropout = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x):
        return self.second(self.dropout(nnx.relu(self.norm(self.first(x)))))


def train_nnx(strategy):
    def make():
        model = Nnx(nnx.Rngs(0))
        return model, nnx.Optimizer(model, optax.sgd(0.1, momentum=0.9), wrt=nnx.Param)

    graph = nnx.graphdef(nnx.eval_shape(make))

    @strategy.step
    def step(state, batch):
        model, optimizer = nnx.merge(graph, state)
        value, grads = nnx.value_and_grad(lambda model: jnp.mean((model(batch[0]) - batch[1]) ** 2))(model)
        optimizer.update(model, jdist.all_reduce("mean", grads))
        return nnx.state((model, optimizer)), jdist.all_reduce("mean", value)

    state = strategy.init(lambda: nnx.state(make()))
    for batch in batches(strategy):
        state, _ = step(state, batch)
    return state


@pytest.mark.slow
@pytest.mark.parametrize(
    "trained, where", some([(train_linen, "four")], [(train_nnx, "four"), (train_linen, "host_data")])
)
def test_flax_model_trains_like_one_device(trained, where):
    assert_close(trained(sharded("all", where)), trained(one_device()), rtol=2e-4, atol=2e-5)


@jax.custom_vjp
def halved(x):
    return x


halved.defvjp(lambda x: (x, None), lambda _, g: (g / 2,))


def _scanned(params, x, y):
    body = lambda carry, row: (carry + lax.pmean(jnp.mean((predict(params, row[0]) - row[1]) ** 2), "replica"), None)
    return lax.scan(body, 0.0, (x.reshape(4, -1, FEATURES), y.reshape(4, -1, 3)))[0]


def _branched(params, x, y):
    mean = lax.pmean(jnp.mean(x), "replica")
    return lax.cond(
        mean > 0, lambda: jdist.all_reduce("mean", loss_of(params, x, y)), lambda: 2 * loss_of(params, x, -y)
    )


def _looped(params, x, y):
    body = lambda carry: (carry[0] + 1, carry[1] * 0.5 + jdist.all_reduce("mean", jnp.mean(x)))
    _, value = lax.while_loop(lambda carry: carry[0] < 3, body, (0, jnp.float32(1)))
    return loss_of(params, x, y) * (1 + value**2)


LOSSES = {
    "pmean": lambda params, x, y: loss_of(params, x - lax.pmean(x.mean(0), "replica"), y),
    "axis_index": lambda params, x, y: (
        loss_of(params, x, y) * (1 + lax.axis_index("replica")) / lax.axis_size("replica")
    ),
    "all_gather": lambda params, x, y: loss_of(
        params, lax.all_gather(x, "replica", tiled=True), jdist.all_gather(y, 0)
    ),
    "psum_scatter": lambda params, x, y: loss_of(params, lax.psum_scatter(x, "replica", tiled=True), y),
    "ppermute": lambda params, x, y: loss_of(params, lax.ppermute(x, "replica", [(0, 0)]), y),
    "all_to_all": lambda params, x, y: loss_of(params, lax.all_to_all(x, "replica", 0, 0, tiled=True), y),
    "groups": lambda params, x, y: loss_of(params, lax.psum(x, "replica", axis_index_groups=[[0]]), y),
    "ppermute_without_pairs": lambda params, x, y: loss_of(params, x + lax.ppermute(y.sum(), "replica", []), y),
    "broadcast": lambda params, x, y: loss_of(params, x + jdist.broadcast(x.mean()), y),
    "scan": _scanned,
    "cond": _branched,
    "while_loop": _looped,
    "custom_vjp": lambda params, x, y: halved(loss_of(params, halved(x @ jnp.eye(FEATURES)), y)),
    "remat": jax.checkpoint(loss_of),
    "jit": jax.jit(loss_of),
    "vmap": lambda params, x, y: jnp.mean(jax.vmap(lambda x, y: loss_of(params, x, y))(x, y)),
    "random": lambda params, x, y: loss_of(
        params, x + jax.random.normal(jdist.replica_key(jax.random.key(1)), x.shape), y
    ),
}


FEW = [("scan", "all", "four"), ("axis_index", "all", "four"), ("custom_vjp", "gradients", "data_model")]
MANY = [(name, *where) for name in LOSSES for where in (("all", "four"), ("gradients", "data_model"))]


@pytest.mark.parametrize("name, shard, where", some(FEW, MANY))
def test_step_with_collectives_and_control_flow_equals_one_device(name, shard, where):
    loss = LOSSES[name]
    tx = OPTIMIZERS["sgd"]
    assert_close(train(sharded(shard, where), tx, loss=loss), train(one_device(), tx, loss=loss))


@pytest.mark.parametrize(("shard",), some([("all",)], [(shard,) for shard in SHARDS]))
def test_step_is_traced_and_compiled_once_and_transfers_nothing(shard):
    strategy, tx, traces = sharded(shard), OPTIMIZERS["adamw_clipped"], []

    def loss(params, x, y):
        traces.append(None)
        return loss_of(params, x, y)

    step, state, inputs = strategy.step(step_of(tx, loss)), initial_state(strategy, tx), list(batches(strategy))
    with jax.transfer_guard("disallow"):
        for batch in inputs:
            state, value = step(state, batch)
            jax.block_until_ready(value)
    assert len(traces) == 1
    assert step._compiled._jitted._cache_size() == 1
    assert value.sharding.is_fully_replicated


@pytest.mark.parametrize(("shard",), some([("all",)], [(shard,) for shard in SHARDS]))
def test_state_is_donated(shard):
    strategy, tx = sharded(shard), OPTIMIZERS["adamw_clipped"]
    state, batch = initial_state(strategy, tx), next(iter(batches(strategy)))
    step = strategy.step(step_of(tx))
    figures = step.lower(state, batch).compile().memory_analysis()
    part = sum(leaf.addressable_shards[0].data.nbytes for leaf in jax.tree.leaves(state))
    assert figures.alias_size_in_bytes == part
    after, _ = step(state, batch)
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(state))
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(after))


@each_row("axis_type", [AxisType.Explicit, AxisType.Manual])
def test_mesh_with_axes_that_are_not_auto_raises(axis_type):
    mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(AxisType.Auto, axis_type), devices=jax.devices()[:4])
    message = rf"axis types 'data': Auto, 'model': {axis_type.name}, and .* needs `Auto`.*`mesh=jax\.sharding\.Mesh\("
    with pytest.raises(ValueError, match=message):
        jdist.ShardedStrategy("all", mesh=mesh)
    assert (
        jdist.ShardedStrategy("all", mesh=Mesh(mesh.devices, mesh.axis_names)).mesh.axis_types == (AxisType.Auto,) * 2
    )


# --- policies


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name",), some([("diloco",)], [(name,) for name in policies.POLICIES if name != "hierarchical"])
)
def test_policy_trains_like_one_device(name):
    tx = policies.POLICIES[name](optax.sgd(0.1, momentum=0.9))
    strategy = sharded()
    first = policies.start(strategy, tx)
    before = placements(first)
    state, step = policies.train(strategy, tx, 4, first)
    expected, _ = policies.train(one_device(), tx, 4)
    assert_close(state.params, expected.params, rtol=1e-4, atol=1e-5)
    assert placements(state) == before
