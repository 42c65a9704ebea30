"""What a device holds under `ShardedStrategy`, from what the compiler says of programs that never run.

The compiler for CPUs leaves temporary memory out of its peak, so what a device holds is counted here: arguments, results that
take over no argument's memory, and what is temporary.
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
    """The programs of a strategy, compiled; and its step as it was written for the compiler."""

    init: jax.stages.Compiled
    step: jax.stages.Compiled
    written: str


@functools.cache
def compiled(shard, devices, model=1):
    grid = np.array(jax.devices()[: devices * model]).reshape(devices, model)
    layout = {r"qkv|up": PartitionSpec(None, "model"), r"out|down": PartitionSpec("model")} if model > 1 else None
    strategy = jdist.ShardedStrategy(shard, Mesh(grid, ("data", "model")), "model", layout)
    key = jax.eval_shape(lambda: jax.random.key(0))
    init = jax.jit(lambda key: strategy.init(make, key))
    program = init.lower(key).compile()
    with_place = lambda x, where: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where)
    state = jax.tree.map(with_place, jax.eval_shape(init, key), program.output_shardings)
    batch = jdist.PerReplica(jax.ShapeDtypeStruct((1, ROWS, LENGTH, WIDTH), jnp.float32))
    step = strategy.step(train).lower(state, batch)
    return Programs(program, step.compile(), step.as_text())


def held(program):
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


@pytest.mark.parametrize("shard, devices", CASES)
def test_state_on_a_device_is_one_part_in_n_of_what_is_split(shard, devices):
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


@pytest.mark.parametrize("devices", [8, *(pytest.param(n, marks=pytest.mark.slow) for n in (2, 4))])
def test_init_of_all_holds_one_part_in_n_at_its_peak(devices):
    whole, part = compiled("all", 1).init, compiled("all", devices).init
    assert held(part) == pytest.approx(held(whole) / devices, rel=0.1, abs=SMALL)
    assert part.memory_analysis().peak_memory_in_bytes <= 1.1 * split("all", devices) + SMALL


@pytest.mark.parametrize("devices", [8, *(pytest.param(n, marks=pytest.mark.slow) for n in (2, 4))])
def test_init_of_all_has_no_parameter_whole_in_its_program(devices):
    text = compiled("all", devices).init.as_text()
    for shape in SHAPES.values():
        assert f"f32[{shape[0]},{shape[1]}]" not in text
        part = (shape[0] // devices, shape[1]) if shape[0] >= shape[1] else (shape[0], shape[1] // devices)
        assert f"f32[{part[0]},{part[1]}]" in text
    assert "all-gather" not in text


@pytest.mark.slow
@pytest.mark.parametrize("devices", DEVICES)
def test_init_of_the_optimizer_has_no_moment_whole_beside_the_parameters(devices):
    whole, part = (compiled("optimizer", n).init.memory_analysis() for n in (1, devices))
    assert part.temp_size_in_bytes <= whole.temp_size_in_bytes + SMALL  # of the random bits that parameters are made of
    assert part.output_size_in_bytes - PARAMETERS == pytest.approx(2 * PARAMETERS / devices, abs=SMALL)


@pytest.mark.slow
@pytest.mark.parametrize("shard", SHARDS)
def test_step_holds_less_on_more_devices(shard):
    peaks = [held(compiled(shard, devices).step) for devices in DEVICES]
    parts = [split(shard, devices) for devices in DEVICES]
    assert peaks == sorted(peaks, reverse=True)
    # What is beside the state does not grow with the devices.
    assert peaks[0] - peaks[-1] >= 0.95 * (parts[0] - parts[-1])


@pytest.mark.slow
@pytest.mark.parametrize("devices", DEVICES)
def test_step_holds_the_less_the_more_is_split(devices):
    optimizer, gradients, everything = (held(compiled(shard, devices).step) for shard in SHARDS)
    assert everything < gradients <= optimizer
    # Not all parameters are gathered at once: those of a block or two, and their gradients.
    beside = everything - split("all", devices)
    assert beside < PARAMETERS


@pytest.mark.slow
def test_step_of_gradients_says_where_each_of_them_goes():
    said = {shard: compiled(shard, 8).written.count("sdy.sharding_constraint") for shard in SHARDS}
    assert said["gradients"] == said["optimizer"] + BLOCKS * len(SHAPES)


@pytest.mark.slow
def test_model_axis_splits_parameters_and_moments_beside_the_data_axis():
    programs = compiled("optimizer", 2, 2)
    expected = PARAMETERS / 2 + 2 * PARAMETERS / 4
    assert programs.init.memory_analysis().output_size_in_bytes == pytest.approx(expected, abs=SMALL)
    assert programs.step.memory_analysis().argument_size_in_bytes == pytest.approx(expected, abs=SMALL)
    assert held(programs.step) < held(compiled("optimizer", 2).step)
    text = programs.init.as_text()
    assert not any(
        f"f32[{rows},{columns}]" in text for rows, columns in SHAPES.values() if (rows, columns) != SHAPES["out"]
    )


def test_state_given_to_init_is_split_and_not_whole_first():
    strategy = jdist.ShardedStrategy("all", Mesh(jax.devices(), ("data",)))
    given = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in SHAPES.items()}
    init = jax.jit(lambda params: strategy.init(lambda params: (params, OPTIMIZER.init(params)), params))
    moments = jax.tree.leaves(init.lower(given).compile().output_shardings)
    assert all(where.spec != PartitionSpec() for where in moments if where.spec is not None and len(where.spec) > 1)


def test_loop_over_stacked_blocks_gathers_one_block_at_a_time():
    strategy = jdist.ShardedStrategy("all", Mesh(jax.devices(), ("data",)))
    blocks = 16
    shapes = {name: jax.ShapeDtypeStruct((blocks, *shape), jnp.float32) for name, shape in SHAPES.items()}

    @strategy.step
    def step(state, x):
        turn = lambda y, params: (block(params, y), None)
        grads = jax.grad(lambda params: jnp.mean((lax.scan(turn, x, params)[0] - x) ** 2))(state)
        return jax.tree.map(lambda p, g: p - 0.1 * g, state, jdist.all_reduce("mean", grads)), None

    init = jax.jit(lambda: strategy.init(lambda: jax.tree.map(lambda x: jnp.ones(x.shape), shapes)))
    where = init.lower().compile().output_shardings
    state = jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), shapes, where)
    batch = jdist.PerReplica(jax.ShapeDtypeStruct((1, ROWS, LENGTH, WIDTH), jnp.float32))
    temporary = step.lower(state, batch).compile().memory_analysis().temp_size_in_bytes
    assert temporary < blocks / 2 * (PARAMETERS / BLOCKS)
