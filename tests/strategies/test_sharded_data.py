"""`ShardedStrategy`: states, batches and results, and its errors."""

import math

import chex
import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from jax.sharding import Mesh, PartitionSpec
from test_sharded_strategy import (
    MESHES,
    OPTIMIZERS,
    assert_close,
    batches,
    host,
    initial_state,
    loss_of,
    one_device,
    placements,
    predict,
    sharded,
    step_of,
    train,
)

import jdist

from laws import STRATEGIES, Numbered, each_row

# --- errors


def test_step_without_a_reduction_raises_the_error_of_mirrored():
    def step(state, batch):
        value, grads = jax.value_and_grad(loss_of)(state["params"], *batch)
        return {**state, "params": jax.tree.map(lambda p, g: p - g, state["params"], grads)}, value

    messages = []
    for strategy in (sharded(), STRATEGIES["mirrored_2"]()):
        with pytest.raises(jdist.NotMirroredError, match=r"state\['params'\].*is not proved to be replicated") as error:
            strategy.step(step)(initial_state(strategy, OPTIMIZERS["sgd"]), next(iter(batches(strategy))))
        messages.append(str(error.value))
    assert messages[0] == messages[1]


CHANGES = {
    "leaf_new": (lambda s: {**s, "m": s["n"]}, r"state\['m'\] is new"),
    "shape": (lambda s: {**s, "w": s["w"][:2]}, r"state\['w'\] from float32\[8,4\] to float32\[2,4\]"),
    "dtype": (lambda s: {**s, "w": s["w"].astype(jnp.bfloat16)}, r"\['w'\] from float32\[8,4\] to bfloat16\[8,4\]"),
}


@each_row("change, message", CHANGES.values(), ids=CHANGES)
def test_step_that_changes_structure_shape_or_dtype_of_its_state_raises(change, message):
    strategy = sharded()
    state = strategy.put({"w": np.ones((8, 4), np.float32), "n": np.int32(0)})
    with pytest.raises(TypeError, match=message):
        strategy.step(lambda state: (change(state), None))(state)
    assert not state["w"].is_deleted()


def test_donated_state_and_state_on_other_devices_raise():
    strategy = sharded()
    step = strategy.step(lambda state: (jax.tree.map(lambda x: x + 1, state), None))
    state = strategy.put({"w": np.ones((8, 4), np.float32)})
    step(state)
    with pytest.raises(ValueError, match=r"state.*\['w'\].* was donated to an earlier step.*Continue with the state"):
        step(state)
    devices = r"cpu:0, cpu:1, cpu:2, cpu:3, cpu:4, cpu:5, cpu:6, cpu:7"
    with pytest.raises(
        ValueError, match=rf"\['w'\] is on {devices}, and this strategy uses cpu:0, cpu:1, cpu:2, cpu:3\."
    ):
        step(sharded(where="eight").put({"w": np.ones((8, 4), np.float32)}))
    again = strategy.put({"w": np.ones((8, 4), np.float32)})
    with pytest.raises(
        ValueError, match=r"state.*\['v'\] is the same array as .*\['w'\]|\['w'\] is the same array as .*\['v'\]"
    ):
        step({"w": again["w"], "v": again["w"]})


def test_array_that_is_state_and_input_raises():
    strategy = sharded()
    step = strategy.step(lambda state, x: (state + x, None))
    array = strategy.put(np.ones((8, 4), np.float32))
    with pytest.raises(ValueError, match=r"state is also among the inputs, as inputs\[0\], .*jnp\.copy"):
        step(array, array)
    assert not array.is_deleted()


@each_row("make", ["init", "step"])
def test_layout_that_does_not_fit_the_state_raises(make):
    strategy = sharded("all", "data_model", {"second/kernel": PartitionSpec(None, "model")})
    message = r"dim 1 of state\['params'\]\['second'\]\['kernel'\], float32\[16,3\], over 'model', and 3 is not a multiple of 2"
    with pytest.raises(ValueError, match=message):
        if make == "init":
            initial_state(strategy, OPTIMIZERS["sgd"])
        else:
            strategy.step(step_of(OPTIMIZERS["sgd"]))(
                jax.tree.map(np.asarray, initial_state(one_device(), OPTIMIZERS["sgd"])), (1, 1)
            )


INVALID = {
    "no_mesh": (TypeError, lambda: {"mesh": jax.devices()}, r"`mesh` is a `jax\.sharding\.Mesh`, got list"),
    "empty_mesh": (ValueError, lambda: {"mesh": Mesh(np.array([]), ("data",))}, r"mesh is empty"),
    "replica": (ValueError, lambda: {"mesh": Mesh(jax.devices(), ("replica",))}, r"axis 'replica', .*Rename it"),
    "model_axis": (
        ValueError,
        lambda: {"model_axis": "tensor"},
        r"`model_axis` is 'tensor', and the mesh has the axes 'data'",
    ),
    "only_model": (
        ValueError,
        lambda: {"mesh": Mesh(jax.devices(), ("model",)), "model_axis": "model"},
        r"The mesh has the axes 'model', and none of them is for the batch",
    ),
    "fsdp": (ValueError, lambda: {"shard": "FSDP"}, r"got 'FSDP': write `ShardedStrategy\(\"all\"\)`"),
    "zero_2": (ValueError, lambda: {"shard": "zero-2"}, r"stage 2\).*write `ShardedStrategy\(\"gradients\"\)`"),
    "zero_1": (ValueError, lambda: {"shard": "zero1"}, r"write `ShardedStrategy\(\"optimizer\"\)`"),
    "shard": (ValueError, lambda: {"shard": "some"}, r"got 'some'"),
    "mesh_first": (TypeError, lambda: {"shard": Mesh(jax.devices(), ("data",))}, r"`ShardedStrategy\(mesh=mesh\)`"),
    "layout": (TypeError, lambda: {"layout": "w"}, r"`layout` maps patterns.*, or is a list of pairs.*got str"),
    "rule": (TypeError, lambda: {"layout": [("w", None), "b"]}, r"`layout\[1\]` must be a pair of .*got 'b'"),
    "rule_spec": (
        TypeError,
        lambda: {"layout": [("w", "data")]},
        r"`layout\[0\]` must be a pair .*got \('w', 'data'\)",
    ),
    "rule_axis": (
        ValueError,
        lambda: {"layout": [("w", ("x",))]},
        r"The rule 'w' of `layout` names the axis 'x', and .* data",
    ),
    "rule_twice": (
        ValueError,
        lambda: {"layout": [("w", ("data", "data"))]},
        r"The rule 'w' .*names the axis 'data' twice",
    ),
    "rule_regex": (ValueError, lambda: {"layout": [("w(", None)]}, r"pattern 'w\(', which is not a regular expression"),
    "unknown_axis": (ValueError, lambda: {"layout": {"w": PartitionSpec("model")}}, r"'model', and the mesh has data"),
}


@each_row("error, options, message", INVALID.values(), ids=INVALID)
def test_invalid_options_raise(error, options, message):
    with pytest.raises(error, match=message):
        jdist.ShardedStrategy(**options())


# --- from one strategy to another


def _state():
    draw = np.random.default_rng(2).normal
    return {
        "w": draw(size=(8, 6)).astype(np.float32),
        "half": jnp.asarray(draw(size=(12,)), jnp.bfloat16),
        "odd": draw(size=(3, 5)).astype(np.float32),
        "empty": np.zeros((0, 8), np.float32),
        "n": np.int32(7),
        "flag": np.bool_(True),
        "key": jax.random.key(5),
        "keys": jax.random.split(jax.random.key(6), 4),
        "mirrored": jdist.Mirrored(np.float32([[1, 2], [3, 4]])),
        "table": jdist.Sharded(draw(size=(24, 2)).astype(np.float32)),
    }


@pytest.mark.slow
def test_state_moves_between_strategies_bit_for_bit():
    mirrored = jdist.MirroredStrategy(["cpu:0", "cpu:1", "cpu:2"])
    state = mirrored.put(_state())
    expected = host(state)
    strategies = [
        sharded("optimizer"),
        sharded("all", "eight"),
        one_device(),
        sharded("all", "host_data"),
        mirrored,
        sharded(),
    ]
    for strategy in strategies:
        state = strategy.put(state)
        chex.assert_trees_all_equal(host(state), expected)
        assert strategy.step(lambda state: (state, None))(strategy.put(state))  # it is a state of this strategy
    assert state["w"].sharding.shard_shape((8, 6)) == (2, 6)
    assert state["key"].sharding.is_fully_replicated


@pytest.mark.parametrize("aggregation, expected", [("sum", [24, 27, 30, 33]), ("mean", [8, 9, 10, 11])])
def test_sync_on_read_value_of_three_replicas_keeps_its_aggregate(aggregation, expected):
    value = jdist.SyncOnRead(np.arange(12, dtype=np.float32).reshape(3, 4) + 4, aggregation)
    value = jdist.MirroredStrategy(["cpu:0", "cpu:1", "cpu:2"]).put(value)
    state = sharded().put({"seen": value})
    assert state["seen"].tree.shape == (1, 4)
    for strategy in (STRATEGIES["mirrored_2"](), one_device(), sharded("all", "eight")):
        state = strategy.put(state)
        np.testing.assert_allclose(state["seen"].read(), expected, rtol=1e-6)


def test_per_replica_values_of_another_strategy_raise():
    value = jdist.MirroredStrategy(["cpu:0", "cpu:1", "cpu:2"]).put(jdist.PerReplica(np.ones((3, 4), np.float32)))
    message = r"value\['own'\] is a PerReplica of float32\[3,4\], for 3 replicas; this strategy has 1\..*`\.values`"
    with pytest.raises(ValueError, match=message):
        sharded().put({"own": value})


@pytest.mark.slow
def test_training_continues_with_another_strategy():
    tx = OPTIMIZERS["adamw_clipped"]
    expected, _ = train(one_device(), tx, train(one_device(), tx)[0])
    state, _ = train(sharded("all", "data_model"), tx)
    state, _ = train(STRATEGIES["mirrored_2"](), tx, STRATEGIES["mirrored_2"]().put(state))
    assert_close(state, expected)


@pytest.mark.slow
@pytest.mark.parametrize("other", ["mirrored", pytest.param("sharded", marks=pytest.mark.slow)])
def test_checkpoint_is_restored_under_another_strategy(other, tmp_path):
    tx = OPTIMIZERS["adamw_clipped"]
    saved, _ = train(sharded(), tx, steps=1)
    strategy = STRATEGIES["mirrored_2"]() if other == "mirrored" else sharded("optimizer", "eight")
    like = initial_state(strategy, tx)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", saved)
        checkpointer.wait_until_finished()
        restored = checkpointer.restore(tmp_path / "state", like)
    assert placements(restored) == placements(like)
    chex.assert_trees_all_equal(host(restored), host(saved))
    expected, _ = train(one_device(), tx, one_device().put(saved), steps=1)
    assert_close(train(strategy, tx, restored, steps=1)[0], expected)


# --- data


ROWS = np.arange(22, dtype=np.float32)
SOURCES = {
    "arrays": lambda: ROWS,
    "examples": lambda: Numbered(list(ROWS)),
    "stream": lambda: iter(list(ROWS)),
    "files": lambda: jdist.data.Files(["a", "b"], lambda path: ROWS[:10] if path == "a" else ROWS[10:]),
}


@each_row("where", MESHES)
@each_row("source", SOURCES.values(), ids=SOURCES)
def test_batches_equal_one_device_and_are_split_over_the_devices(source, where):
    strategy = sharded("all", where)
    actual = list(strategy.distribute_dataset(source(), 8, remainder="pad"))
    expected = list(one_device().distribute_dataset(source(), 8, remainder="pad"))
    chex.assert_trees_all_equal(host([pair[0].tree for pair in actual]), host([pair[0].tree for pair in expected]))
    chex.assert_trees_all_equal(host([pair[1].tree for pair in actual]), host([pair[1].tree for pair in expected]))
    shape, axes = MESHES[where]
    parts = math.prod(size for size, axis in zip(shape, axes, strict=True) if axis != "model")
    for batch, weights in actual:
        assert batch.tree.sharding.shard_shape((1, 8)) == weights.tree.sharding.shard_shape((1, 8)) == (1, 8 // parts)


def test_pipeline_function_is_called_once_for_the_global_batch():
    calls = []

    def pipeline(context):
        calls.append((context.num_input_pipelines, context.num_replicas_in_sync, context.get_per_replica_batch_size(8)))
        return (ROWS[start : start + 8] for start in (0, 8))

    actual = list(sharded().distribute_datasets_from_function(pipeline))
    assert calls == [(1, 1, 8)]
    np.testing.assert_array_equal(np.concatenate([batch.tree[0] for batch in actual]), ROWS[:16])
    assert {batch.tree.sharding.shard_shape((1, 8)) for batch in actual} == {(1, 2)}


def test_shuffled_epochs_have_the_order_of_one_device():
    rows_of = lambda s: [
        b.tree.tolist() for b in s.distribute_dataset(ROWS, 8, shuffle=True, seed=3, epochs=2, remainder="drop")
    ]
    assert rows_of(sharded()) == rows_of(one_device())


@each_row("where, size, parts", [("four", 6, 4), ("eight", 12, 8), ("data_model", 5, 2), ("host_data", 6, 4)])
def test_batch_that_is_not_divisible_raises_with_the_number_of_parts(where, size, parts):
    message = rf"batch of {size} examples cannot be split over {parts} .*\({size % parts} left"
    with pytest.raises(ValueError, match=message) as error:
        sharded("all", where).distribute_dataset(ROWS, size)
    assert f"{parts} replicas" not in str(error.value)  # there is one replica


@pytest.mark.parametrize("where", ["four", "data_model", "host_data"])
def test_evaluation_of_a_ragged_data_set_counts_every_example_once(where):
    strategy = sharded("all", where)
    labels = np.random.default_rng(3).integers(0, 3, 22)
    logits = np.random.default_rng(4).normal(size=(22, 3)).astype(np.float32)

    @strategy.step
    def evaluate(counted, batch, weights):
        return counted.update(*batch, weights=weights), jdist.all_reduce("sum", weights.sum())

    counted = strategy.init(lambda: jdist.SyncOnRead(jdist.metrics.Accuracy(), "sum"))
    seen = 0.0
    for batch, weights in strategy.distribute_dataset((logits, labels.astype(np.int32)), 8, remainder="pad"):
        counted, number = evaluate(counted, batch, weights)
        seen += float(number)
    assert seen == 22
    assert float(jdist.read_values(counted).compute()) == pytest.approx(np.mean(logits.argmax(1) == labels), abs=1e-7)


# --- host functions


def test_per_example_result_is_one_row_that_is_split_over_the_devices():
    strategy = sharded()
    (batch,) = strategy.distribute_dataset(np.arange(24, dtype=np.float32).reshape(8, 3), 8)
    own, total, pair = strategy.run(lambda x: (x * 2, jdist.all_reduce("sum", x), {"mean": x.mean(1)}), (batch,))
    assert isinstance(own, jdist.PerReplica) and isinstance(pair["mean"], jdist.PerReplica)
    assert own.tree.shape == (1, 8, 3)
    assert own.tree.sharding.shard_shape((1, 8, 3)) == (1, 2, 3)
    assert total.shape == (8, 3)
    np.testing.assert_array_equal(strategy.gather(own, 0), 2 * np.asarray(batch.tree)[0])
    np.testing.assert_array_equal(strategy.gather(pair["mean"], 0), np.asarray(batch.tree)[0].mean(1))
    (result,) = strategy.local_results(own)
    np.testing.assert_array_equal(result, 2 * np.asarray(batch.tree)[0])
    assert float(strategy.reduce("mean", own, (0, 1))) == 23.0
    np.testing.assert_array_equal(strategy.reduce("sum", own, None), result)
    np.testing.assert_array_equal(strategy.reduce("max", own, 0), [42, 44, 46])


def test_host_functions_see_one_replica():
    strategy = sharded()
    state = strategy.put({"w": np.ones((8, 4), np.float32)})
    assert strategy.num_replicas_in_sync == 1
    assert strategy.mesh.size == 4
    (value,) = strategy.local_results(state)
    np.testing.assert_array_equal(value["w"], np.ones((8, 4)))
    np.testing.assert_array_equal(strategy.reduce("sum", state, None)["w"], np.ones((8, 4)))
    np.testing.assert_array_equal(strategy.gather(state, 0)["w"], np.ones((8, 4)))


def test_run_takes_a_state_without_gathering_it():
    strategy = sharded("all", "eight")
    state = initial_state(strategy, OPTIMIZERS["sgd"])
    (batch,) = batches(strategy, 1)
    actual = strategy.run(lambda params, batch: predict(params, batch[0]), (state["params"], batch))
    expected = predict(host(state["params"]), np.asarray(batch[0].tree)[0])
    np.testing.assert_allclose(actual.tree[0], expected, rtol=1e-5, atol=1e-6)
    assert actual.tree.sharding.spec == PartitionSpec(None, ("data",))


def test_variables_of_a_scope_are_placed_like_a_state():
    strategy = sharded("all", "data_model")
    weights = np.arange(128, dtype=np.float32).reshape(8, 16)
    with strategy.scope():
        kernel = jdist.variable(weights)
        agreed = jdist.variable(weights, synchronization="on_write", aggregation="mean")
        seen = jdist.variable(weights, synchronization="on_read", aggregation="sum")
    for value in (kernel, agreed.tree):
        assert value.sharding == strategy.put({"w": weights})["w"].sharding
    assert seen.tree.sharding.shard_shape((1, 8, 16)) == (1, 8, 8)
    for value in (kernel, agreed, seen):
        np.testing.assert_array_equal(jdist.read_values(value), weights)


def test_parameters_passed_to_init_become_a_split_state():
    strategy = sharded()
    kernel = np.arange(128, dtype=np.float32).reshape(8, 16)
    arguments = {"host": kernel, "device": jax.device_put(kernel, jax.devices()[7])}
    shapes = []
    state = strategy.init(lambda params: shapes.append(jax.tree.map(jnp.shape, params)) or params, arguments)
    assert shapes == [{"host": (8, 16), "device": (8, 16)}]  # the function sees full arrays
    for leaf in state.values():
        assert leaf.sharding.shard_shape(leaf.shape) == (8, 4)
        np.testing.assert_array_equal(leaf, kernel)
    assert not arguments["device"].is_deleted()
