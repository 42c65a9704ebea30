"""`CentralStorageStrategy`: what it trains is what `MirroredStrategy` trains, wherever the state lies and whatever of it."""

import functools
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
from laws import among

PLACES = {"host": "host", "apart": "cpu:5", "among": "cpu:0"}
OFFLOADS = ("all", "optimizer")
FEATURES, BATCH, STEPS = 6, 24, 3
SLOW = pytest.mark.slow


def devices(n):
    return [f"cpu:{i}" for i in range(n)]


def central(n=2, place="host", offload="all"):
    return jdist.CentralStorageStrategy(devices(n), PLACES[place], offload)


def mirrored(n=2):
    return jdist.MirroredStrategy(devices(n))


def some(cases, more):
    """`cases`, and those of `more` that are not among them for when there is time."""
    return [*cases, *(pytest.param(*case, marks=SLOW) for case in more[::3] if case not in cases)]


def placements(tree):
    """Where each leaf lies: on which devices, which part of it, in which memory."""
    return [
        (x.sharding.device_set, x.sharding.shard_shape(x.shape), x.sharding.memory_kind) for x in jax.tree.leaves(tree)
    ]


def host(tree):
    """`tree` as the host reads it, random keys as their data."""
    bits = lambda x: jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x
    return jax.tree.map(lambda x: np.asarray(bits(x)), jdist.read_values(tree))


def assert_close(found, expected, rtol=2e-5, atol=2e-6):
    chex.assert_trees_all_close(host(found), host(expected), rtol=rtol, atol=atol)


# --- training


def first_params():
    draw = np.random.default_rng(0).normal
    weights = lambda *shape: jnp.float32(0.4 * draw(size=shape))
    # 12 divides by 1, 2, 3 and 4; none of the dims of "second" by all of them, and 7 by none.
    return {"first": weights(FEATURES, 12), "second": weights(12, 7), "bias": jnp.zeros(7), "scale": jnp.ones(())}


def loss_of(params, x, y):
    hidden = jnp.tanh(x @ params["first"])
    return jnp.mean((params["scale"] * (hidden @ params["second"] + params["bias"]) - y) ** 2)


def batches(strategy):
    draw = np.random.default_rng(1).normal
    x, y = (draw(size=(STEPS * BATCH, size)).astype(np.float32) for size in (FEATURES, 7))
    return strategy.distribute_dataset((x, y), BATCH)


def made(strategy, tx):
    return strategy.init(lambda: {"params": (params := first_params()), "opt_state": tx.init(params)})


def step_of(tx, loss=loss_of):
    def step(state, batch):
        value, grads = jdist.all_reduce("mean", jax.value_and_grad(loss)(state["params"], *batch))
        updates, opt_state = tx.update(grads, state["opt_state"], state["params"])
        after = {"params": optax.apply_updates(state["params"], updates), "opt_state": opt_state}
        return after, {"loss": value, "update": optax.tree.norm(updates), "largest": jnp.max(after["params"]["first"])}

    return step


def train(strategy, tx, state=None):
    """The state after so many steps, and their outputs."""
    step, state, outputs = strategy.step(step_of(tx)), made(strategy, tx) if state is None else state, []
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
MORE = [
    (name, place, offload, n) for name in OPTIMIZERS for place in PLACES for offload in OFFLOADS for n in (1, 2, 3, 4)
]


@pytest.mark.parametrize("name, place, offload, n", some(CASES, MORE))
@pytest.mark.one_in(3)
def test_training_is_that_of_mirrored_and_the_state_stays_where_it_is(name, place, offload, n):
    strategy, tx = central(n, place, offload), OPTIMIZERS[name]
    state = made(strategy, tx)
    before = placements(state)
    chex.assert_trees_all_equal(host(state), host(made(mirrored(n), tx)))
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


@pytest.mark.parametrize("place, offload", some([("host", "all")], [(p, o) for p in PLACES for o in OFFLOADS]))
def test_model_with_batch_norm_and_dropout_is_trained_as_by_mirrored(place, offload):
    assert_close(train_flax(central(2, place, offload)), train_flax(mirrored()), rtol=2e-4, atol=2e-5)


POLICIES = [name for name in policies.POLICIES if name != "hierarchical"]
QUICK = [("int8", "host"), ("every", "host")]


@pytest.mark.parametrize("name, place", some(QUICK, [(name, place) for name in POLICIES for place in PLACES]))
def test_policy_trains_as_under_mirrored(name, place):
    tx = policies.POLICIES[name](optax.adam(1e-2))
    found, _ = policies.train(central(2, place), tx, 4)
    expected, _ = policies.train(mirrored(), tx, 4)
    # Rounding to few bits may turn a difference in the last bit into one in a bit that counts.
    chex.assert_trees_all_close(host(found.params), host(expected.params), rtol=2e-3, atol=1e-3)


# --- where it lies, and what a call costs


def test_parts_of_the_state_lie_where_was_asked_for():
    state = made(central(4), OPTIMIZERS["adamw"])
    first, scale = state["params"]["first"], state["params"]["scale"]
    assert (first.sharding.memory_kind, first.sharding.shard_shape((6, 12))) == ("pinned_host", (6, 3))
    assert scale.sharding.memory_kind == "device"
    bias = state["params"]["bias"]  # 7 is no multiple of 4
    assert (bias.sharding.memory_kind, bias.sharding.shard_shape((7,))) == ("pinned_host", (7,))
    state = made(central(4, offload="optimizer"), OPTIMIZERS["adamw"])
    moment = state["opt_state"][0].mu["first"]
    assert (moment.sharding.memory_kind, state["params"]["first"].sharding.memory_kind) == ("pinned_host", "device")
    assert state["params"]["first"].sharding.is_fully_replicated
    state = made(central(2, "apart"), OPTIMIZERS["adamw"])
    assert state["params"]["first"].sharding.device_set == {jax.devices()[5]}
    assert state["opt_state"][0].count.sharding.device_set == set(jax.devices()[:2])


@pytest.mark.parametrize("offload", OFFLOADS)
@pytest.mark.parametrize("place", PLACES)
def test_step_is_traced_and_compiled_once(place, offload):
    strategy, tx, traced = central(2, place, offload), OPTIMIZERS["clipped"], []

    def loss(params, x, y):
        traced.append(None)
        return loss_of(params, x, y)

    step, state, found = strategy.step(step_of(tx, loss)), made(strategy, tx), list(batches(strategy))
    # Between a device that stores and those that compute, the transfer is the point.
    with jax.transfer_guard("disallow" if place == "host" else "allow"):
        for batch in found:
            state, outputs = step(state, batch)
            jax.block_until_ready(outputs)
    assert len(traced) == 1
    assert step._compiled._cache_size() == 1


@pytest.mark.parametrize("place", PLACES)
def test_step_from_one_device_to_others_copies_nothing_by_way_of_the_host(place):
    strategy, tx = central(2, place), OPTIMIZERS["sgd"]
    step, state, batch = strategy.step(step_of(tx)), made(strategy, tx), next(iter(batches(strategy)))
    with jax.transfer_guard_host_to_device("disallow"), jax.transfer_guard_device_to_host("disallow"):
        jax.block_until_ready(step(state, batch))


@pytest.mark.parametrize("place", PLACES)
def test_state_that_was_given_away_is_refused(place):
    strategy = central(2, place)
    step = strategy.step(lambda state: (jax.tree.map(lambda x: x + 1, state), None))
    state = strategy.put({"w": np.ones((8, 4), np.float32)})
    step(state)
    assert state["w"].is_deleted()
    with pytest.raises(ValueError, match=r"state\['w'\] was donated to a step before.*Continue with the state"):
        step(state)


TWICE = """
import jax, numpy as np, jdist
strategy = jdist.CentralStorageStrategy(["cpu:0", "cpu:1"], "{device}")
w = strategy.put(np.ones((8, 4), np.float32))
try:
    strategy.step(lambda state: (jax.tree.map(lambda x: x + 1, state), None))({{"a": w, "b": w}})
except ValueError as error:
    print(error)
"""


@pytest.mark.parametrize("device", PLACES.values(), ids=PLACES)
def test_leaf_that_is_given_twice_is_refused(device):
    # In a process of its own: memory that is given away twice may end it, or let it wait for ever.
    done = subprocess.run(
        [sys.executable, "-c", TWICE.format(device=device)],
        cwd=pathlib.Path(jdist.__file__).parent.parent,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert "state['b'] is the same array as state['a']" in done.stdout


@pytest.mark.parametrize("place", PLACES)
def test_state_that_lies_on_other_devices_is_refused(place):
    state = mirrored(3).put({"w": np.ones((8, 4), np.float32)})
    says = r"\['w'\] is on cpu:0, cpu:1, cpu:2, and this strategy uses cpu:0, cpu:1"
    with pytest.raises(ValueError, match=says):
        central(2, place).step(lambda state: (state, None))(state)


# --- a state of every kind


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
        "handed_on": 2 * ones,
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
        "handed_on": s["handed_on"],
        "own": s["own"] + number + w,
        "seen": s["seen"] + x + s["w"],
        "mean": s["mean"] + number + s["w"],
        "first": s["first"] * (number + 2),
        "opt_state": {"m": s["opt_state"]["m"] + s["handed_on"], "own": s["opt_state"]["own"] * 3, "twice": w},
    }
    return after, {"old": s["w"], "new": w, "own": w + number, "norm": optax.tree.norm(w), "constant": jnp.ones(3)}


@pytest.mark.parametrize("place, offload", [("host", "all"), ("host", "optimizer"), ("apart", "all"), ("among", "all")])
def test_leaves_of_every_kind_are_those_of_mirrored(place, offload):
    found = []
    for strategy in (central(2, place, offload), mirrored()):
        step, state = strategy.step(use_every_kind), strategy.init(every_kind)
        before = placements(state)
        for number in range(2):
            x = strategy.put(jdist.PerReplica(np.arange(48, dtype=np.float32).reshape(2, 4, 6) + number))
            state, outputs = step(state, x)
        assert placements(state) == before
        assert isinstance(outputs["own"], jdist.PerReplica)
        found.append((state, outputs | {"own": outputs["own"].tree}))
        assert all(x.sharding.memory_kind == "device" for x in jax.tree.leaves(outputs))
    own = lambda pair: [pair[0]["own"].tree, pair[0]["opt_state"]["own"].tree]
    assert_close(own(found[0]), own(found[1]))
    drop = lambda pair: ({k: v for k, v in pair[0].items() if k not in ("own", "opt_state")}, pair[1])
    assert_close(drop(found[0]), drop(found[1]))


# --- what the host does with it


def held(strategy):
    return strategy.put({"w": np.arange(32, dtype=np.float32).reshape(8, 4), "odd": np.ones((3, 5), np.float32)})


ASKED = {
    "run": lambda s, state: s.run(lambda state: jdist.all_reduce("mean", state["w"].sum() + state["odd"]), (state,)),
    "run_handed_on": lambda s, state: s.run(lambda state: state, (state,)),
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
@pytest.mark.parametrize("ask", ASKED.values(), ids=ASKED)
def test_what_the_host_asks_of_a_central_state_is_as_of_a_mirrored_one(ask, place):
    found, expected = (host(ask(strategy, held(strategy))) for strategy in (central(2, place), mirrored()))
    chex.assert_trees_all_equal(found, expected)


@pytest.mark.parametrize("place", among(PLACES, "host"))
def test_state_moves_to_other_strategies_and_checkpoints_to_the_bit(place, tmp_path):
    strategy, tx = central(2, place), OPTIMIZERS["clipped"]
    state, _ = train(strategy, tx)
    mesh = jax.sharding.Mesh(jax.devices()[:4], ("data",))
    moved = state
    for other in (mirrored(3), jdist.ShardedStrategy("all", mesh), central(4), jdist.OneDeviceStrategy("cpu:0")):
        moved = other.put(moved)
        chex.assert_trees_all_equal(host(moved), host(state))
    assert placements(strategy.put(moved)) == placements(state)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", state)
        checkpointer.wait_until_finished()
        found = checkpointer.restore(tmp_path / "state", made(strategy, tx))
    chex.assert_trees_all_equal(host(found), host(state))
    assert placements(found) == placements(state)
    assert_close(train(strategy, tx, found)[0], train(mirrored(), tx, mirrored().put(state))[0])


def test_description_says_what_lies_in_the_memory_of_the_host():
    leaves = {leaf.path: leaf for leaf in central(4).describe(held(central(4))).leaves}
    assert (leaves["w"].device_bytes, leaves["w"].host_bytes) == (0, 32)
    assert "in host memory (pinned_host)" in leaves["w"].placement


WRONG = {
    "offload": (ValueError, {"offload": "x"}, r'`offload` is "all" or "optimizer", got \'x\''),
    "offload_none": (ValueError, {"offload": None}, r'`offload` is "all" or "optimizer", got None'),
    "device": (ValueError, {"parameter_device": "tpu:0"}, r"Device 'tpu:0' not found.*This process has cpu:0"),
    "number": (ValueError, {"parameter_device": "cpu:99"}, r"Device 'cpu:99' not found"),
    "kind": (TypeError, {"parameter_device": None}, r"A device must be a `jax\.Device` or a name .*got None"),
    "empty": (ValueError, {"compute_devices": []}, r"is empty\. Name at least one device"),
    "twice": (ValueError, {"compute_devices": ["cpu:1", "cpu:1"]}, r"has duplicates: cpu:1"),
    "text": (TypeError, {"compute_devices": "cpu:0"}, r"must be a list of devices, got 'cpu:0'"),
}


@pytest.mark.parametrize("error, options, says", WRONG.values(), ids=WRONG)
def test_options_that_make_no_strategy_are_refused(error, options, says):
    with pytest.raises(error, match=says):
        jdist.CentralStorageStrategy(**options)


@pytest.mark.parametrize("place", PLACES)
def test_step_that_forgets_to_reduce_is_refused_by_leaf(place):
    def step(state, batch):
        grads = jax.grad(loss_of)(state["params"], *batch)
        return {**state, "params": jax.tree.map(lambda p, g: p - g, state["params"], grads)}, None

    strategy = central(2, place)
    with pytest.raises(jdist.NotMirroredError, match=r"state\['params'\].*is not proved to be the same"):
        strategy.step(step)(made(strategy, OPTIMIZERS["sgd"]), next(iter(batches(strategy))))
