"""Memory per device under `ShardedStrategy`, from the memory analysis of compiled programs.

The CPU compiler omits temporary memory from its peak, so the sum is computed here: arguments, results that do not reuse memory
of an argument, and temporary memory.
"""

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import Mesh, PartitionSpec

import jdist

WIDTH, BLOCKS, ROWS, LENGTH = 128, 3, 8, 4
OPTIMIZER = optax.adamw(1e-3)
SHAPES = {"qkv": (WIDTH, 3 * WIDTH), "out": (WIDTH, WIDTH), "up": (WIDTH, 5 * WIDTH), "down": (5 * WIDTH, WIDTH)}
PARAMETERS = BLOCKS * sum(math.prod(shape) for shape in SHAPES.values()) * 4  # in bytes; the largest block is a third
SMALL = 2 * ROWS * LENGTH * WIDTH * 4  # the batch, and the few scalars of a state


def make(key):
    def block(key):
        keys = zip(jax.random.split(key, len(SHAPES)), SHAPES.items(), strict=True)
        return {name: jax.random.normal(key, shape) / 16 for key, (name, shape) in keys}

    params = [block(key) for key in jax.random.split(key, BLOCKS)]
    return {"params": params, "opt_state": OPTIMIZER.init(params)}


@jax.checkpoint
def block(params, x):
    q, k, v = jnp.split(x @ params["qkv"], 3, -1)
    x = x + jax.nn.softmax(q @ jnp.swapaxes(k, -1, -2) / 16) @ v @ params["out"]
    return x + jax.nn.relu(x @ params["up"]) @ params["down"]


def loss(params, x):
    return jnp.mean((functools.reduce(lambda y, params: block(params, y), params, x) - x) ** 2)


def train(state, x):
    value, grads = jdist.all_reduce("mean", jax.value_and_grad(loss)(state["params"], x))
    updates, opt_state = OPTIMIZER.update(grads, state["opt_state"], state["params"])
    return {"params": optax.apply_updates(state["params"], updates), "opt_state": opt_state}, value


class Programs(NamedTuple):
    """The compiled programs of a strategy, and the lowered text of its step."""

    init: jax.stages.Compiled
    step: jax.stages.Compiled
    written: str


@functools.cache
def compiled(shard, devices, model=1):
    grid = np.array(jax.devices()[: devices * model]).reshape(devices, model)
    layout = {r"qkv|up": PartitionSpec(None, "model"), r"out|down": PartitionSpec("model")} if model > 1 else None
    strategy = jdist.ShardedStrategy(shard, mesh=Mesh(grid, ("data", "model")), model_axis="model", layout=layout)
    key = jax.eval_shape(lambda: jax.random.key(0))
    init = jax.jit(lambda key: strategy.init(make, key))
    program = init.lower(key).compile()
    with_sharding = lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)
    state = jax.tree.map(with_sharding, jax.eval_shape(init, key), program.output_shardings)
    batch = jdist.PerReplica(jax.ShapeDtypeStruct((1, ROWS, LENGTH, WIDTH), jnp.float32))
    step = strategy.step(train).lower(state, batch)
    return Programs(program, step.compile(), step.as_text())


def used_bytes(program):
    figures = program.memory_analysis()
    results = figures.output_size_in_bytes - figures.alias_size_in_bytes
    return figures.argument_size_in_bytes + results + figures.temp_size_in_bytes


def split(shard, devices):
    """The bytes of the state on each device: of the parameters, and of their two moments."""
    return PARAMETERS / (devices if shard == "all" else 1) + 2 * PARAMETERS / devices


SHARDS = ("optimizer", "gradients", "all")
DEVICES = (2, 4, 8)
QUICK = [("all", 8)]
SLOW = [(shard, devices) for shard in SHARDS for devices in DEVICES if (shard, devices) not in QUICK]
CASES = [*QUICK, *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW)]


@pytest.mark.slow
@pytest.mark.parametrize("shard, devices", CASES)
def test_device_stores_one_nth_of_the_split_leaves(shard, devices):
    programs = compiled(shard, devices)
    init, step = programs.init.memory_analysis(), programs.step.memory_analysis()
    expected = split(shard, devices)
    assert init.output_size_in_bytes == pytest.approx(expected, abs=SMALL)
    assert step.argument_size_in_bytes == pytest.approx(expected, abs=SMALL)
    assert step.output_size_in_bytes == pytest.approx(expected, abs=SMALL)
    assert step.alias_size_in_bytes == init.output_size_in_bytes - _tables(programs.init)


def _tables(program):
    """The bytes of the pointers to the results, which the compiler counts as a result of `init` and `step`."""
    outputs = jax.tree.leaves(program.out_info)
    parts = [math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in outputs]
    return program.memory_analysis().output_size_in_bytes - sum(parts)


@pytest.mark.slow
@pytest.mark.parametrize("devices", [8, *(pytest.param(n, marks=pytest.mark.slow) for n in (2, 4))])
def test_init_of_all_uses_one_nth_at_its_peak(devices):
    full, part = compiled("all", 1).init, compiled("all", devices).init
    assert used_bytes(part) == pytest.approx(used_bytes(full) / devices, rel=0.1, abs=SMALL)
    assert part.memory_analysis().peak_memory_in_bytes <= 1.1 * split("all", devices) + SMALL


@pytest.mark.parametrize("devices", [8, *(pytest.param(n, marks=pytest.mark.slow) for n in (2, 4))])
def test_init_of_all_never_materializes_a_full_parameter(devices):
    text = compiled("all", devices).init.as_text()
    for shape in SHAPES.values():
        assert f"f32[{shape[0]},{shape[1]}]" not in text
        part = (shape[0] // devices, shape[1]) if shape[0] >= shape[1] else (shape[0], shape[1] // devices)
        assert f"f32[{part[0]},{part[1]}]" in text
    assert "all-gather" not in text


@pytest.mark.slow
@pytest.mark.parametrize("devices", DEVICES)
def test_init_of_optimizer_never_materializes_a_full_moment(devices):
    full, part = (compiled("optimizer", n).init.memory_analysis() for n in (1, devices))
    assert part.temp_size_in_bytes <= full.temp_size_in_bytes + SMALL  # of the random bits of the parameters
    assert part.output_size_in_bytes - PARAMETERS == pytest.approx(2 * PARAMETERS / devices, abs=SMALL)


@pytest.mark.slow
@pytest.mark.parametrize("shard", SHARDS)
def test_step_uses_less_memory_on_more_devices(shard):
    peaks = [used_bytes(compiled(shard, devices).step) for devices in DEVICES]
    parts = [split(shard, devices) for devices in DEVICES]
    assert peaks == sorted(peaks, reverse=True)
    # Memory beside the state does not grow with the number of devices.
    assert peaks[0] - peaks[-1] >= 0.95 * (parts[0] - parts[-1])


@pytest.mark.slow
@pytest.mark.parametrize("devices", DEVICES)
def test_step_uses_less_memory_if_more_is_split(devices):
    optimizer, gradients, everything = (used_bytes(compiled(shard, devices).step) for shard in SHARDS)
    assert everything < gradients <= optimizer
    # Only the parameters of one or two blocks, and their gradients, are gathered at the same time.
    beside = everything - split("all", devices)
    assert beside < PARAMETERS


@pytest.mark.slow
def test_step_of_gradients_constrains_the_sharding_of_each_gradient():
    counts = {shard: compiled(shard, 8).written.count("sdy.sharding_constraint") for shard in SHARDS}
    assert counts["gradients"] == counts["optimizer"] + BLOCKS * len(SHAPES)


@pytest.mark.slow
def test_model_axis_splits_parameters_and_moments_beside_the_data_axis():
    programs = compiled("optimizer", 2, 2)
    expected = PARAMETERS / 2 + 2 * PARAMETERS / 4
    assert programs.init.memory_analysis().output_size_in_bytes == pytest.approx(expected, abs=SMALL)
    assert programs.step.memory_analysis().argument_size_in_bytes == pytest.approx(expected, abs=SMALL)
    assert used_bytes(programs.step) < used_bytes(compiled("optimizer", 2).step)
    text = programs.init.as_text()
    assert not any(
        f"f32[{rows},{columns}]" in text for rows, columns in SHAPES.values() if (rows, columns) != SHAPES["out"]
    )


def test_parameters_passed_to_init_are_split_in_its_program():
    strategy = jdist.ShardedStrategy("all", mesh=Mesh(jax.devices(), ("data",)))
    arguments = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in SHAPES.items()}
    init = jax.jit(lambda params: strategy.init(lambda params: (params, OPTIMIZER.init(params)), params))
    moments = jax.tree.leaves(init.lower(arguments).compile().output_shardings)
    assert all(where.spec != PartitionSpec() for where in moments if where.spec is not None and len(where.spec) > 1)


def test_scan_over_stacked_blocks_gathers_one_block_per_iteration():
    strategy = jdist.ShardedStrategy("all", mesh=Mesh(jax.devices(), ("data",)))
    blocks = 16
    shapes = {name: jax.ShapeDtypeStruct((blocks, *shape), jnp.float32) for name, shape in SHAPES.items()}

    @strategy.step
    def step(state, x):
        body = lambda y, params: (block(params, y), None)
        grads = jax.grad(lambda params: jnp.mean((lax.scan(body, x, params)[0] - x) ** 2))(state)
        return jax.tree.map(lambda p, g: p - 0.1 * g, state, jdist.all_reduce("mean", grads)), None

    init = jax.jit(lambda: strategy.init(lambda: jax.tree.map(lambda x: jnp.ones(x.shape), shapes)))
    where = init.lower().compile().output_shardings
    state = jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), shapes, where)
    batch = jdist.PerReplica(jax.ShapeDtypeStruct((1, ROWS, LENGTH, WIDTH), jnp.float32))
    temporary = step.lower(state, batch).compile().memory_analysis().temp_size_in_bytes
    assert temporary < blocks / 2 * (PARAMETERS / BLOCKS)
