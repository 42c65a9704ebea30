"""`CentralStorageStrategy`: it trains like `MirroredStrategy`, for every storage and offload option."""

import functools
import itertools
import pathlib
import subprocess
import sys

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest

import jdist

import policies
from laws import among, each_row, each_value, traces_of_a_step

PLACES = {"host": "host", "apart": "cpu:5", "among": "cpu:0"}
OFFLOADS = ("all", "optimizer")
FEATURES, BATCH, STEPS = 6, 24, 3
SLOW = pytest.mark.slow


def devices(n):
    return [f"cpu:{i}" for i in range(n)]


def central(n=2, place="host", offload="all"):
    return jdist.CentralStorageStrategy(devices(n), parameter_device=PLACES[place], offload=offload)


def mirrored(n=2):
    return jdist.MirroredStrategy(devices(n))


def some(cases, more):
    """Returns `cases`, and a third of `more` as slow cases."""
    return [*cases, *(pytest.param(*case, marks=SLOW) for case in more[::3] if case not in cases)]


def placements(tree):
    """Returns the devices, the shard shape and the memory kind of each leaf."""
    return [
        (x.sharding.device_set, x.sharding.shard_shape(x.shape), x.sharding.memory_kind) for x in jax.tree.leaves(tree)
    ]


def host(tree):
    """Returns `tree` as numpy arrays, random keys as their data."""
    bits = lambda x: jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x
    return jax.tree.map(lambda x: np.asarray(bits(x)), jdist.read_values(tree))


def assert_close(actual, expected, rtol=2e-5, atol=2e-6):
    chex.assert_trees_all_close(host(actual), host(expected), rtol=rtol, atol=atol)


# --- training


def first_params():
    draw = np.random.default_rng(0).normal
    weights = lambda *shape: jnp.float32(0.4 * draw(size=shape))
    # 12 is divisible by 1, 2, 3 and 4; no dim of "second" by all of them, and 7 by none.
    return {"first": weights(FEATURES, 12), "second": weights(12, 7), "bias": jnp.zeros(7), "scale": jnp.ones(())}


def loss_of(params, x, y):
    hidden = jnp.tanh(x @ params["first"])
    return jnp.mean((params["scale"] * (hidden @ params["second"] + params["bias"]) - y) ** 2)


def batches(strategy):
    draw = np.random.default_rng(1).normal
    x, y = (draw(size=(STEPS * BATCH, size)).astype(np.float32) for size in (FEATURES, 7))
    return strategy.distribute_dataset((x, y), BATCH)


def initial_state(strategy, tx):
    return strategy.init(lambda: {"params": (params := first_params()), "opt_state": tx.init(params)})


def step_of(tx, loss=loss_of):
    def step(state, batch):
        value, grads = jdist.all_reduce("mean", jax.value_and_grad(loss)(state["params"], *batch))
        updates, opt_state = tx.update(grads, state["opt_state"], state["params"])
        after = {"params": optax.apply_updates(state["params"], updates), "opt_state": opt_state}
        return after, {"loss": value, "update": optax.tree.norm(updates), "largest": jnp.max(after["params"]["first"])}

    return step


def train(strategy, tx, state=None):
    """Returns the state after `STEPS` steps, and the outputs of each step."""
    step, state, outputs = strategy.step(step_of(tx)), initial_state(strategy, tx) if state is None else state, []
    for batch in batches(strategy):
        state, output = step(state, batch)
        outputs.append(output)
    return state, outputs


OPTIMIZERS = {
    "sgd": optax.sgd(0.1),
    "adamw": optax.adamw(1e-2),
    "clipped": optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(1e-2)),
    "adafactor": optax.adafactor(1e-2, min_dim_size_to_factor=4),
    "lamb": optax.lamb(1e-2),
    "muon": optax.contrib.muon(1e-2),
    "schedule_free": optax.contrib.schedule_free_adamw(1e-2, warmup_steps=2),
}


@functools.cache
def by_mirrored(name, n):
    return train(mirrored(n), OPTIMIZERS[name])


CASES = [
    ("clipped", "host", "all", 2),
    ("adamw", "host", "optimizer", 4),
    ("sgd", "host", "all", 3),
    ("muon", "host", "all", 2),
    ("adamw", "apart", "all", 2),
    ("clipped", "among", "optimizer", 3),
]
LAYOUTS = list(itertools.product(PLACES, OFFLOADS, (1, 3)))  # `CASES` has 2 and 4 replicas, too
EACH = [(name, *layout) for name, layout in each_value(list(itertools.product(OPTIMIZERS, LAYOUTS)))]


@pytest.mark.parametrize("name, place, offload, n", CASES + [pytest.param(*case, marks=SLOW) for case in EACH])
def test_training_equals_mirrored_and_the_state_keeps_its_placement(name, place, offload, n):
    strategy, tx = central(n, place, offload), OPTIMIZERS[name]
    state = initial_state(strategy, tx)
    before = placements(state)
    chex.assert_trees_all_equal(host(state), host(initial_state(mirrored(n), tx)))
    after, outputs = train(strategy, tx, state)
    assert_close((after, outputs), by_mirrored(name, n))
    assert placements(after) == before


class Model(nn.Module):
    @nn.compact
    def __call__(self, x, key):
        x = nn.BatchNorm(use_running_average=False, axis_name="replica")(nn.Dense(12)(x))
        return nn.Dense(7)(nn.Dropout(0.5, deterministic=False)(nn.relu(x), rng=key))


def train_flax(strategy):
    model, tx = Model(), optax.sgd(0.1, momentum=0.9)

    def make(key):
        variables = model.init(key, jnp.zeros((2, FEATURES)), key)
        opt_state = tx.init(variables["params"])
        own = jdist.PerReplica(jdist.replica_key(key))
        return {"params": variables["params"], "stats": variables["batch_stats"], "opt_state": opt_state, "key": own}

    @strategy.step
    def step(state, batch):
        key, used = jax.random.split(state["key"])

        def loss(params):
            variables = {"params": params, "batch_stats": state["stats"]}
            y, changed = model.apply(variables, batch[0], used, mutable=["batch_stats"])
            return jnp.mean((y - batch[1]) ** 2), changed["batch_stats"]

        grads, stats = jax.grad(loss, has_aux=True)(state["params"])
        updates, opt_state = tx.update(jdist.all_reduce("mean", grads), state["opt_state"], state["params"])
        params = optax.apply_updates(state["params"], updates)
        return {"params": params, "stats": stats, "opt_state": opt_state, "key": key}, None

    state = strategy.init(make, jax.random.key(0))
    for batch in batches(strategy):
        state, _ = step(state, batch)
    return state


@pytest.mark.slow
@pytest.mark.parametrize("place, offload", some([("host", "all")], [(p, o) for p in PLACES for o in OFFLOADS]))
def test_model_with_batch_norm_and_dropout_trains_like_mirrored(place, offload):
    assert_close(train_flax(central(2, place, offload)), train_flax(mirrored()), rtol=2e-4, atol=2e-5)


POLICIES = [name for name in policies.POLICIES if name != "hierarchical"]
QUICK = [("int8", "host"), ("every", "host")]


@pytest.mark.slow
@pytest.mark.parametrize("name, place", some(QUICK, [(name, place) for name in POLICIES for place in PLACES]))
def test_policy_trains_like_mirrored(name, place):
    tx = policies.POLICIES[name](optax.adam(1e-2))
    actual, _ = policies.train(central(2, place), tx, 4)
    expected, _ = policies.train(mirrored(), tx, 4)
    # Quantization may turn a difference in the last bit into a larger one.
    chex.assert_trees_all_close(host(actual.params), host(expected.params), rtol=2e-3, atol=1e-3)


# --- placement, compilations and transfers


def test_leaves_are_stored_as_requested():
    state = initial_state(central(4), OPTIMIZERS["adamw"])
    first, scale = state["params"]["first"], state["params"]["scale"]
    assert (first.sharding.memory_kind, first.sharding.shard_shape((6, 12))) == ("pinned_host", (6, 3))
    assert scale.sharding.memory_kind == "device"
    bias = state["params"]["bias"]  # 7 is not a multiple of 4
    assert (bias.sharding.memory_kind, bias.sharding.shard_shape((7,))) == ("pinned_host", (7,))
    state = initial_state(central(4, offload="optimizer"), OPTIMIZERS["adamw"])
    moment = state["opt_state"][0].mu["first"]
    assert (moment.sharding.memory_kind, state["params"]["first"].sharding.memory_kind) == ("pinned_host", "device")
    assert state["params"]["first"].sharding.is_fully_replicated
    state = initial_state(central(2, "apart"), OPTIMIZERS["adamw"])
    assert state["params"]["first"].sharding.device_set == {jax.devices()[5]}
    assert state["opt_state"][0].count.sharding.device_set == set(jax.devices()[:2])


@pytest.mark.parametrize("offload", OFFLOADS)
@pytest.mark.parametrize("place", PLACES)
def test_step_is_traced_and_compiled_once(place, offload):
    strategy, tx, traces = central(2, place, offload), OPTIMIZERS["clipped"], []

    def loss(params, x, y):
        traces.append(None)
        return loss_of(params, x, y)

    step, state, inputs = strategy.step(step_of(tx, loss)), initial_state(strategy, tx), list(batches(strategy))
    # A device that only stores the state needs transfers.
    with jax.transfer_guard("disallow" if place == "host" else "allow"):
        for batch in inputs:
            state, outputs = step(state, batch)
            jax.block_until_ready(outputs)
    assert len(traces) == traces_of_a_step(strategy)
    assert step._compiled._jitted._cache_size() == 1


@pytest.mark.parametrize("place", PLACES)
def test_step_copies_nothing_through_the_host(place):
    strategy, tx = central(2, place), OPTIMIZERS["sgd"]
    step, state, batch = strategy.step(step_of(tx)), initial_state(strategy, tx), next(iter(batches(strategy)))
    with jax.transfer_guard_host_to_device("disallow"), jax.transfer_guard_device_to_host("disallow"):
        jax.block_until_ready(step(state, batch))


@each_row("place", PLACES)
def test_donated_state_raises(place):
    strategy = central(2, place)
    step = strategy.step(lambda state: (jax.tree.map(lambda x: x + 1, state), None))
    state = strategy.put({"w": np.ones((8, 4), np.float32)})
    step(state)
    assert state["w"].is_deleted()
    with pytest.raises(ValueError, match=r"state\['w'\] was donated to an earlier step.*Continue with the state"):
        step(state)


TWICE = """
import jax, numpy as np, jdist
strategy = jdist.CentralStorageStrategy(["cpu:0", "cpu:1"], parameter_device="{device}")
w = strategy.put(np.ones((8, 4), np.float32))
try:
    strategy.step(lambda state: (jax.tree.map(lambda x: x + 1, state), None))({{"a": w, "b": w}})
except ValueError as error:
    print(error)
"""


@pytest.mark.slow
@each_row("device", PLACES.values(), ids=PLACES)
def test_array_in_two_leaves_raises(device):
    # In a new process: memory that is donated twice may end the process, or block it forever.
    completed = subprocess.run(
        [sys.executable, "-c", TWICE.format(device=device)],
        cwd=pathlib.Path(jdist.__file__).parent.parent,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert completed.returncode == 0, completed.stderr
    assert "state['b'] is the same array as state['a']" in completed.stdout


@each_row("place", PLACES)
def test_state_on_other_devices_raises(place):
    state = mirrored(3).put({"w": np.ones((8, 4), np.float32)})
    message = r"\['w'\] is on cpu:0, cpu:1, cpu:2, and this strategy uses cpu:0, cpu:1"
    with pytest.raises(ValueError, match=message):
        central(2, place).step(lambda state: (state, None))(state)


# --- leaves of every kind


def every_kind():
    ones = jnp.ones((4, 6))
    return {
        "w": ones,
        "odd": jnp.ones((3, 5)),
        "empty": jnp.zeros((0, 4)),
        "half": jnp.ones(8, jnp.bfloat16),
        "flags": jnp.ones(8, bool),
        "n": jnp.int32(0),
        "keys": jax.random.split(jax.random.key(0), 4),
        "unchanged": 2 * ones,
        "own": jdist.PerReplica(ones * (1 + jdist.replica_id())),
        "seen": jdist.SyncOnRead(jnp.zeros((4, 6)), "sum"),
        "mean": jdist.Mirrored(ones, "mean"),
        "first": jdist.Mirrored(ones, "only_first_replica"),
        "opt_state": {"m": jdist.Mirrored(ones), "own": jdist.PerReplica(ones), "twice": ones},
    }


def use_every_kind(s, x):
    number = jdist.replica_id()
    total = jdist.all_reduce("sum", x)
    w = s["w"] * 0.5 + total.mean() + s["mean"]
    after = {
        "w": w,
        "odd": s["odd"] @ jnp.eye(5) + jnp.cumsum(s["odd"], 0),
        "empty": s["empty"] + 1,
        "half": s["half"][::-1] * 2,
        "flags": ~s["flags"],
        "n": s["n"] + jnp.sum(s["w"] > 1).astype(jnp.int32),
        "keys": jax.vmap(lambda key: jax.random.fold_in(key, 1))(s["keys"]),
        "unchanged": s["unchanged"],
        "own": s["own"] + number + w,
        "seen": s["seen"] + x + s["w"],
        "mean": s["mean"] + number + s["w"],
        "first": s["first"] * (number + 2),
        "opt_state": {"m": s["opt_state"]["m"] + s["unchanged"], "own": s["opt_state"]["own"] * 3, "twice": w},
    }
    return after, {"old": s["w"], "new": w, "own": w + number, "norm": optax.tree.norm(w), "constant": jnp.ones(3)}


@pytest.mark.parametrize("place, offload", [("host", "all"), ("host", "optimizer"), ("apart", "all"), ("among", "all")])
def test_leaves_of_every_kind_equal_mirrored(place, offload):
    results = []
    for strategy in (central(2, place, offload), mirrored()):
        step, state = strategy.step(use_every_kind), strategy.init(every_kind)
        before = placements(state)
        for number in range(2):
            x = strategy.put(jdist.PerReplica(np.arange(48, dtype=np.float32).reshape(2, 4, 6) + number))
            state, outputs = step(state, x)
        assert placements(state) == before
        assert isinstance(outputs["own"], jdist.PerReplica)
        results.append((state, outputs | {"own": outputs["own"].tree}))
        assert all(x.sharding.memory_kind == "device" for x in jax.tree.leaves(outputs))
    own = lambda pair: [pair[0]["own"].tree, pair[0]["opt_state"]["own"].tree]
    assert_close(own(results[0]), own(results[1]))
    drop = lambda pair: ({k: v for k, v in pair[0].items() if k not in ("own", "opt_state")}, pair[1])
    assert_close(drop(results[0]), drop(results[1]))


# --- host functions of the state


def offloaded_state(strategy):
    return strategy.put({"w": np.arange(32, dtype=np.float32).reshape(8, 4), "odd": np.ones((3, 5), np.float32)})


HOST_FUNCTIONS = {
    "run": lambda s, state: s.run(lambda state: jdist.all_reduce("mean", state["w"].sum() + state["odd"]), (state,)),
    "run_unchanged": lambda s, state: s.run(lambda state: state, (state,)),
    "init": lambda s, state: s.init(lambda state: {"v": state["w"] * 2}, state),
    "input": lambda s, state: s.step(lambda v, state: (v + state["w"], state["odd"]))(s.put(jnp.ones((8, 4))), state),
    "sum": lambda s, state: s.reduce("sum", state, axis=None),
    "mean": lambda s, state: s.reduce("mean", state, axis=0),
    "gather": lambda s, state: s.gather(state, axis=0),
    "local_results": lambda s, state: [jax.tree.map(np.asarray, tree) for tree in s.local_results(state)],
    "read": lambda s, state: jdist.read_values(state),
    "arithmetic": lambda s, state: (state["w"] + 1, state["w"] * state["w"], jnp.sum(state["odd"])),
    "index": lambda s, state: jdist.read_values(state["w"])[2:, 1],
}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("call", HOST_FUNCTIONS.values(), ids=HOST_FUNCTIONS)
def test_host_function_of_an_offloaded_state_equals_mirrored(call, place):
    actual, expected = (host(call(strategy, offloaded_state(strategy))) for strategy in (central(2, place), mirrored()))
    chex.assert_trees_all_equal(actual, expected)


@pytest.mark.parametrize("place", among(PLACES, "host"))
def test_state_moves_to_other_strategies_and_checkpoints_bit_for_bit(place, tmp_path):
    strategy, tx = central(2, place), OPTIMIZERS["clipped"]
    state, _ = train(strategy, tx)
    mesh = jax.sharding.Mesh(jax.devices()[:4], ("data",))
    moved = state
    for other in (mirrored(3), jdist.ShardedStrategy("all", mesh=mesh), central(4), jdist.OneDeviceStrategy("cpu:0")):
        moved = other.put(moved)
        chex.assert_trees_all_equal(host(moved), host(state))
    assert placements(strategy.put(moved)) == placements(state)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", state)
        checkpointer.wait_until_finished()
        restored = checkpointer.restore(tmp_path / "state", initial_state(strategy, tx))
    chex.assert_trees_all_equal(host(restored), host(state))
    assert placements(restored) == placements(state)
    assert_close(train(strategy, tx, restored)[0], train(mirrored(), tx, mirrored().put(state))[0])


def test_description_counts_host_memory():
    leaves = {leaf.path: leaf for leaf in central(4).describe(offloaded_state(central(4))).leaves}
    assert (leaves["w"].device_bytes, leaves["w"].host_bytes) == (0, 32)
    assert "in host memory (pinned_host)" in leaves["w"].placement


INVALID = {
    "offload": (ValueError, {"offload": "x"}, r'`offload` is "all" or "optimizer", got \'x\''),
    "offload_none": (ValueError, {"offload": None}, r'`offload` is "all" or "optimizer", got None'),
    "device": (ValueError, {"parameter_device": "tpu:0"}, r"Device 'tpu:0' not found.*This process has cpu:0"),
    "number": (ValueError, {"parameter_device": "cpu:99"}, r"Device 'cpu:99' not found"),
    "kind": (TypeError, {"parameter_device": None}, r"A device must be a `jax\.Device` or a name .*got None"),
    "empty": (ValueError, {"compute_devices": []}, r"is empty\. Name at least one device"),
    "twice": (ValueError, {"compute_devices": ["cpu:1", "cpu:1"]}, r"has duplicates: cpu:1"),
    "text": (TypeError, {"compute_devices": "cpu:0"}, r"must be a list of devices, got 'cpu:0'"),
}


@each_row("error, options, message", INVALID.values(), ids=INVALID)
def test_invalid_options_raise(error, options, message):
    with pytest.raises(error, match=message):
        jdist.CentralStorageStrategy(**options)


@each_row("place", PLACES)
def test_step_without_a_reduction_raises_with_the_leaf(place):
    def step(state, batch):
        grads = jax.grad(loss_of)(state["params"], *batch)
        return {**state, "params": jax.tree.map(lambda p, g: p - g, state["params"], grads)}, None

    strategy = central(2, place)
    with pytest.raises(jdist.NotMirroredError, match=r"state\['params'\].*is not proved to be replicated"):
        strategy.step(step)(initial_state(strategy, OPTIMIZERS["sgd"]), next(iter(batches(strategy))))
