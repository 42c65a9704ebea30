"""`Strategy.compile`: programs for attached devices and for topology devices, and its errors."""

import functools
import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, PartitionSpec

import jdist
from jdist import hlo

from laws import STRATEGIES, each_row

SHAPE = jax.ShapeDtypeStruct
TX = optax.adam(1e-2)
WIDTH = 512


def make(key, width=WIDTH):
    params = {"in": jax.random.normal(key, (width, width)), "out": jax.random.normal(key, (width, width))}
    return {"params": params, "opt_state": TX.init(params)}


def step(state, x):
    loss_fn = lambda params: jnp.mean((jnp.tanh(x @ params["in"]) @ params["out"]) ** 2)
    loss, grads = jdist.all_reduce("mean", jax.value_and_grad(loss_fn)(state["params"]))
    updates, opt_state = TX.update(grads, state["opt_state"], state["params"])
    return {"params": optax.apply_updates(state["params"], updates), "opt_state": opt_state}, loss


def shapes_of(strategy):
    key = jax.eval_shape(lambda: jax.random.key(0))
    return jax.eval_shape(lambda key: strategy.init(make, key), key)


def batch_of(strategy, rows=64):
    replicas = strategy.num_replicas_in_sync
    return jdist.PerReplica(SHAPE((replicas, rows // replicas, WIDTH), jnp.float32))


def tpus():
    return jdist.topology_devices("v5e:2x4")


def sharded(shard):
    return lambda: jdist.ShardedStrategy(shard, mesh=Mesh(np.array(tpus()), ("data",)))


ON_TPUS = {
    "tpu": lambda: jdist.TPUStrategy(topology="v5e:2x4"),
    "mirrored": lambda: jdist.MirroredStrategy(tpus()),
    "virtual": lambda: jdist.MirroredStrategy(tpus(), virtual_replicas=16),
    "one_device": lambda: jdist.OneDeviceStrategy(tpus()[0]),
    "sharded_optimizer": sharded("optimizer"),
    "sharded_gradients": sharded("gradients"),
    "sharded_all": sharded("all"),
    "central": lambda: jdist.CentralStorageStrategy(tpus()),
    "central_optimizer": lambda: jdist.CentralStorageStrategy(tpus(), offload="optimizer"),
}
PARAMS = 2 * WIDTH * WIDTH * 4  # bytes


@functools.cache
def program_of(name):
    strategy = ON_TPUS[name]()
    return strategy.compile(step, shapes_of(strategy), batch_of(strategy))


# --- topology devices


@pytest.mark.slow
def test_every_strategy_compiles_and_reports_its_memory():
    memory = {name: program_of(name).memory_analysis() for name in ON_TPUS}
    device = {name: each.argument_size_in_bytes / PARAMS for name, each in memory.items()}
    # Parameters and two moments; an eighth of split leaves; nothing of leaves on the host. The tolerance covers the batch.
    expected = {name: 3.0 for name in ("tpu", "mirrored", "virtual", "one_device")}
    expected |= {"sharded_optimizer": 1 + 2 / 8, "sharded_gradients": 1 + 2 / 8, "sharded_all": 3 / 8}
    expected |= {"central": 0.0, "central_optimizer": 1.0}
    assert device == pytest.approx(expected, abs=0.1)
    host = {name: each.host_argument_size_in_bytes / PARAMS for name, each in memory.items()}
    expected = dict.fromkeys(ON_TPUS, 0.0) | {"central": 3 / 8, "central_optimizer": 2 / 8}
    assert host == pytest.approx(expected, abs=0.01)
    for name, each in memory.items():
        donated = each.alias_size_in_bytes + each.host_alias_size_in_bytes
        assert donated / PARAMS == pytest.approx(device[name] + host[name], abs=0.1), name
        assert each.temp_size_in_bytes > 0


def test_replicas_send_their_gradients_and_one_device_sends_nothing():
    for name in ("tpu", "mirrored"):
        (one,) = hlo.collectives(program_of(name).as_text())
        assert one[:5] == ("all-reduce", (PARAMS + 4) * 2 * 7 / 8, 8, 1, False)
    assert hlo.collectives(program_of("one_device").as_text()) == []


@pytest.mark.parametrize("shard", ["optimizer", "gradients", "all"])
def test_sharded_state_is_gathered_and_gradients_are_reduced(shard):
    collectives = hlo.collectives(program_of(f"sharded_{shard}").as_text())
    assert {one.group_size for one in collectives} == {8}
    sent = {}
    for one in collectives:
        sent[one.kind] = sent.get(one.kind, 0) + one.bytes_sent
    # Each device needs the parameters of the others, or results computed from them: once or twice, in float32 or bfloat16.
    assert sent.get("all-gather", 0) + sent.get("all-reduce", 0) >= PARAMS / 2 * 7 / 8
    assert set(sent) <= {"all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute"}
    assert "all-gather" in sent or shard != "all"
    assert sum(sent.values()) <= 4 * PARAMS


@pytest.mark.parametrize("shard", ["optimizer", "all"])
def test_layout_of_a_model_axis_is_compiled(shard):
    mesh = Mesh(np.array(tpus()).reshape(4, 2), ("data", "model"))
    layout = {"/in$": PartitionSpec(None, "model"), "/out$": PartitionSpec("model", None)}
    strategy = jdist.ShardedStrategy(shard, mesh=mesh, model_axis="model", layout=layout)
    program = strategy.compile(step, shapes_of(strategy), batch_of(strategy))
    size = program.memory_analysis().argument_size_in_bytes / PARAMS
    assert size == pytest.approx({"optimizer": 1 / 2 + 2 / 8, "all": 3 / 8}[shard], abs=0.1)
    assert {2, 4} & {one.group_size for one in hlo.collectives(program.as_text())}


RUNS = {
    "init": lambda s: s.init(lambda key: jax.random.normal(key, (8, 4)), jax.random.key(0)),
    "init_of_nothing": lambda s: s.init(lambda: jnp.ones((8, 4))),
    "put": lambda s: s.put({"w": np.ones(3)}),
    "put_of_rows": lambda s: s.put(jdist.PerReplica(np.ones((s.num_replicas_in_sync, 3)))),
    "run": lambda s: s.run(lambda x: x * 2, (np.float32(1),)),
    "run_of_nothing": lambda s: s.run(lambda: jnp.ones(3)),
    "step": lambda s: s.step(lambda w, x: (w, None))(np.ones(3, np.float32), np.float32(1)),
    "step_of_shapes": lambda s: s.step(lambda w: (w, None))(SHAPE((3,), np.float32)),
    "dataset": lambda s: next(iter(s.distribute_dataset(np.arange(64.0), 16))),
    "datasets_from_function": lambda s: next(
        iter(s.distribute_datasets_from_function(lambda context: iter([np.ones(16)] * 16)))
    ),
    "values": lambda s: s.distribute_values_from_function(lambda context: 1.0),
    "reduce": lambda s: s.reduce("sum", jdist.PerReplica(np.ones((s.num_replicas_in_sync, 3))), None),
    "gather": lambda s: s.gather(jdist.PerReplica(np.ones((s.num_replicas_in_sync, 3))), 0),
}


@each_row("call", RUNS.values(), ids=RUNS)
@each_row("name", ["tpu", "virtual", "sharded_all", "central"])
def test_running_on_topology_devices_raises(name, call):
    message = r"The 8 devices of this strategy \(TPU v5 lite\) come from a topology description: programs can be "
    with pytest.raises(
        RuntimeError, match=message + r"compiled for them \(`strategy\.compile\(.*`jdist\.auto_strategy\(\)`"
    ):
        call(ON_TPUS[name]())


@each_row("synchronization", ["auto", "on_write", "on_read"])
def test_variable_on_topology_devices_raises(synchronization):
    with ON_TPUS["tpu"]().scope(), pytest.raises(RuntimeError, match="come from a topology description"):
        jdist.variable(np.ones(3), synchronization=synchronization, aggregation="mean")


@pytest.mark.parametrize("name", ON_TPUS)
def test_eval_shape_of_init_works_with_and_without_arguments(name):
    strategy = ON_TPUS[name]()
    plain = jax.eval_shape(make, jax.random.key(0))
    key = jax.random.key(0)
    for shapes in (
        shapes_of(strategy),
        jax.eval_shape(lambda key: strategy.init(make, key), key),
        jax.eval_shape(lambda: strategy.init(make, key)),
        jax.eval_shape(lambda: strategy.init(lambda: make(key))),
    ):
        chex.assert_trees_all_equal_shapes_and_dtypes(shapes, plain)
    assert "TPU v5 lite" in str(strategy.describe(shapes_of(strategy)))


# --- arguments


def test_step_or_function_and_shapes_or_arrays_give_the_same_program():
    strategy = ON_TPUS["tpu"]()
    shapes = SHAPE((8, 4), np.float32), jdist.PerReplica(SHAPE((8, 2, 4), np.float32))
    arrays = jax.tree.map(lambda x: np.ones(x.shape, x.dtype), shapes)
    on_cpu = jax.tree.map(jnp.asarray, arrays)
    add = lambda w, x: (w + jdist.all_reduce("mean", x.sum()), None)
    programs = [
        strategy.compile(fn, *arguments)
        for fn, arguments in [
            (add, shapes),
            (strategy.step(add), shapes),
            (add, arrays),
            (add, on_cpu),
            (add, (arrays[0], shapes[1])),
        ]
    ]
    collectives = [hlo.collectives(program.as_text()) for program in programs]
    assert [[each[:5] for each in of_one] for of_one in collectives] == [[("all-reduce", 7.0, 8, 1, False)]] * len(
        programs
    )
    assert len({program.memory_analysis().argument_size_in_bytes for program in programs}) == 1


def test_wrappers_of_every_class_are_accepted():
    strategy = ON_TPUS["tpu"]()
    state = {
        "own": jdist.PerReplica(SHAPE((8, 3), np.float32)),
        "agreed": jdist.Mirrored(SHAPE((3,), np.float32), "mean"),
        "seen": jdist.SyncOnRead(SHAPE((8,), np.float32), "sum"),
        "table": jdist.Sharded(SHAPE((16, 4), np.float32)),
        "key": jax.eval_shape(lambda: jax.random.key(0)),
    }

    def count(state, x):
        changed = {"own": state["own"] + x, "agreed": state["agreed"] + x, "seen": state["seen"] + x.sum()}
        return {**state, **changed}, None

    program = strategy.compile(count, state, jdist.PerReplica(SHAPE((8, 3), np.float32)))
    (one,) = hlo.collectives(program.as_text())
    assert (one.kind, one.group_size, one.bytes_sent) == ("all-reduce", 8, 3 * 4 * 2 * 7 / 8)
    after, _ = program.out_info
    assert jax.tree.map(lambda x: x.shape, after["own"].tree) == (8, 3)


def test_step_without_inputs_and_empty_state_are_accepted():
    strategy = ON_TPUS["tpu"]()
    assert strategy.compile(lambda w: (w * 2, None), SHAPE((3,), np.float32)).as_text()
    assert strategy.compile(lambda w, x: (w, jdist.all_reduce("mean", x)), None, 1.0).as_text()


# --- attached devices

ATTACHED = {name: STRATEGIES[name] for name in ("one_device", "mirrored_2", "sharded_4")} | {
    "virtual_4": lambda: jdist.MirroredStrategy(["cpu:0", "cpu:1"], virtual_replicas=4),
    "central_2": lambda: jdist.CentralStorageStrategy(["cpu:0", "cpu:1"]),
}


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.slow if name in ("virtual_4", "central_2") else ()) for name in ATTACHED],
)
def test_program_for_attached_devices_runs_like_the_step(name):
    strategy = ATTACHED[name]()
    replicas = strategy.num_replicas_in_sync
    rows = np.random.default_rng(0).normal(size=(replicas, 4, 8)).astype(np.float32)
    start = lambda: strategy.init(lambda key: make(key, 8), jax.random.key(1))
    expected, loss = strategy.step(step)(start(), strategy.put(jdist.PerReplica(rows)))
    state = start()
    program = strategy.compile(step, jax.eval_shape(lambda: start()), jdist.PerReplica(rows))
    actual, other = program(state, strategy.put(jdist.PerReplica(rows)))
    chex.assert_trees_all_equal(jax.tree.map(np.asarray, actual), jax.tree.map(np.asarray, expected))
    assert float(loss) == float(other)
    assert [x.sharding for x in jax.tree.leaves(actual)] == [x.sharding for x in jax.tree.leaves(expected)]
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(state))


def test_compiling_does_not_donate_arrays():
    strategy = STRATEGIES["mirrored_2"]()
    w = strategy.put(np.ones(3, np.float32))
    strategy.compile(lambda w: (w + 1, None), w)
    assert w.tolist() == [1, 1, 1]


def test_compiled_step_has_a_proof():
    strategy = ON_TPUS["tpu"]()
    descend = strategy.step(step)
    with pytest.raises(RuntimeError, match="Nothing is proved yet"):
        _ = descend.proof
    strategy.compile(descend, shapes_of(strategy), batch_of(strategy))
    assert re.fullmatch(r"(\d+) of \1 results are replicated\n\1 of \1 .*", str(descend.proof))


# --- errors

X = jdist.PerReplica(SHAPE((8, 4), np.float32))
W = SHAPE((4,), np.float32)
add = lambda w, x: (w + jdist.all_reduce("mean", x), None)
REFUSED = {
    "step_of_another": (
        ValueError,
        lambda s: s.compile(STRATEGIES["mirrored_2"]().step(add), W, X),
        "Another strategy made the step. Pass its function, or a step that this strategy made of it.",
    ),
    "step_of_its_twin": (
        ValueError,
        lambda s: s.compile(ON_TPUS["tpu"]().step(add), W, X),
        "Another strategy made the step.",
    ),
    "not_a_function": (TypeError, lambda s: s.compile(3, W, X), "`fn` must be a function, got int."),
    "too_few_rows": (
        ValueError,
        lambda s: s.compile(add, W, jdist.PerReplica(SHAPE((4, 4), np.float32))),
        "x is a PerReplica of float32[4,4], for 4 replicas; this strategy has 8",
    ),
    "state_of_other_replicas": (
        ValueError,
        lambda s: s.compile(lambda w: (w, None), {"own": jdist.PerReplica(SHAPE((2, 4), np.float32))}),
        "w['own'] is a PerReplica of float32[2,4], for 2 replicas; this strategy has 8",
    ),
    "table_that_does_not_divide": (
        ValueError,
        lambda s: s.compile(lambda w: (w, None), {"t": jdist.Sharded(SHAPE((9, 4), np.float32))}),
        "w['t'] is Sharded, of float32[9,4], and its first dimension cannot be split into 8 equal shards",
    ),
    "not_reduced": (
        jdist.NotMirroredError,
        lambda s: s.compile(lambda w, x: ({"w": w["w"] + x}, None), {"w": W}, X),
        "state['w'] is not proved to be replicated.",
    ),
    "other_shape": (
        TypeError,
        lambda s: s.compile(lambda w: (w[:2], None), W),
        "state from float32[4] to float32[2]",
    ),
    "text": (TypeError, lambda s: s.compile(add, {"name": "resnet"}, X), "['name']"),
    "flags_object": (
        TypeError,
        lambda s: s.compile(add, W, X, compiler_options=jdist.xla_flags("tpu")),
        "compiler_options",
    ),
}


@each_row("error, call, message", REFUSED.values(), ids=REFUSED)
def test_invalid_arguments_of_compile_raise(error, call, message):
    with pytest.raises(error, match=re.escape(message)):
        call(ON_TPUS["tpu"]())


def test_layout_that_does_not_fit_raises_with_leaf_and_sizes():
    mesh = Mesh(np.array(tpus()).reshape(4, 2), ("data", "model"))
    strategy = jdist.ShardedStrategy("all", mesh=mesh, model_axis="model", layout={"w": PartitionSpec(None, "model")})
    message = r"splits dim 1 of state\['params'\]\['w'\], float32\[16,15\], over 'model', and 15 is not a multiple of 2"
    with pytest.raises(ValueError, match=message):
        strategy.compile(lambda state: (state, None), {"params": {"w": SHAPE((16, 15), np.float32)}})


def test_storage_on_a_cpu_for_topology_devices_raises():
    with pytest.raises(ValueError, match=r"copies a state from .*0 to TPU_0.*impossible for topology devices"):
        jdist.CentralStorageStrategy(tpus(), parameter_device="cpu:0")
