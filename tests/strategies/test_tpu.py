"""`TPUStrategy`: its mesh, programs compiled for topology devices, and its errors."""

import functools
import importlib.util
import itertools
import math
import pathlib
import re
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn

import jdist
from jdist import hlo

from laws import among, each_row


def _example(name):
    path = pathlib.Path(__file__).parent.parent.parent / "examples" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(name, path)
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


digits = _example("digits")
SHAPE = jax.ShapeDtypeStruct
KEY = jax.eval_shape(lambda: jax.random.key(0))
TOPOLOGIES = {
    "v5e:2x4": ("v5e:2x4", 1, 8),
    "v5e:4x4": ("v5e:4x4", 1, 16),
    "v5p:4x4x4": ("v5p:4x4x4", 1, 64),
    "two_slices": ("v5e:4x4", 2, 32),
}


# --- two models and their reductions


class Block(nn.Module):
    """Attention and two dense layers, with dropout."""

    @nn.compact
    def __call__(self, x):
        y = nn.LayerNorm()(x)
        x = x + nn.MultiHeadDotProductAttention(4, dropout_rate=0.1, deterministic=False)(y, y)
        y = nn.Dense(128)(nn.LayerNorm()(x))
        return x + nn.Dropout(0.1, deterministic=False)(nn.Dense(64)(nn.gelu(y)))


class Transformer(nn.Module):
    """Tokens `[batch, position]` to logits `[batch, position, 256]`."""

    @nn.compact
    def __call__(self, tokens):
        x = nn.Embed(256, 64)(tokens)
        for _ in range(2):
            x = Block()(x)
        return nn.Dense(256)(x)


TX = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))


def make_transformer(key):
    own, key = jax.random.split(key)
    params = Transformer().init({"params": own, "dropout": own}, jnp.zeros((1, 16), jnp.int32))["params"]
    return {"params": params, "opt_state": TX.init(params), "key": key}


def transformer_step(state, tokens):
    key, now = jax.random.split(state["key"])

    def loss_fn(params):
        logits = Transformer().apply({"params": params}, tokens[:, :-1], rngs={"dropout": jdist.replica_key(now)})
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

    loss, grads = jdist.all_reduce("mean", jax.value_and_grad(loss_fn)(state["params"]))
    updates, opt_state = TX.update(grads, state["opt_state"], state["params"])
    return {"params": optax.apply_updates(state["params"], updates), "opt_state": opt_state, "key": key}, loss


digits_step = functools.partial(digits.train_step.__wrapped__, steps=10)


def digits_batch(replicas):
    images, labels = SHAPE((replicas, 8, 8, 8, 1), jnp.float32), SHAPE((replicas, 8), jnp.int32)
    return jdist.PerReplica((images, labels)), jdist.PerReplica(SHAPE((replicas, 8), jnp.float32))


# The state, the step, its inputs, the number of values that it reduces beside the gradients, and the number of calls.
MODELS = {
    "digits": (lambda key: digits.make_state(key, 10), lambda: digits_step, digits_batch, 2, 2),
    "transformer": (
        make_transformer,
        lambda: transformer_step,
        lambda replicas: (jdist.PerReplica(SHAPE((replicas, 4, 17), jnp.int32)),),
        1,
        1,
    ),
}


@functools.cache
def compiled(model, where):
    """Returns the strategy, the shapes of the state, and the compiled step."""
    topology, num_slices, _ = TOPOLOGIES[where]
    strategy = jdist.TPUStrategy(topology=topology, num_slices=num_slices)
    make, step, batch, *_ = MODELS[model]
    state = jax.eval_shape(lambda key: strategy.init(make, key), KEY)
    return strategy, state, strategy.compile(step(), state, *batch(strategy.num_replicas_in_sync))


def bytes_of(tree):
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def operand_bytes(one):
    """Returns the bytes per device of the operand of an all-reduce or a reduce-scatter."""
    return one.bytes_sent / {"all-reduce": 2, "reduce-scatter": 1}[one.kind] * one.group_size / (one.group_size - 1)


# Compiling a transformer takes long: on one slice, one topology is enough.
ONE_SLICE = [
    *itertools.product(["digits"], [name for name in TOPOLOGIES if name != "two_slices"]),
    ("transformer", "v5e:2x4"),
]


@pytest.mark.slow
@pytest.mark.parametrize("model, where", ONE_SLICE)
def test_step_on_one_slice_all_reduces_its_gradients_and_sends_nothing_else(model, where):
    strategy, state, program = compiled(model, where)
    replicas = TOPOLOGIES[where][2]
    *_, numbers, calls = MODELS[model]
    assert strategy.num_replicas_in_sync == replicas
    collectives = hlo.collectives(program.as_text())
    assert {(one.kind, one.group_size, one.executions, one.conditional) for one in collectives} == {
        ("all-reduce", replicas, 1, False)
    }
    assert len(collectives) == calls
    assert sum(map(operand_bytes, collectives)) == bytes_of(state["params"]) + 4 * numbers


@pytest.mark.parametrize("model", among(MODELS, "digits"))
def test_step_on_two_slices_reduces_within_each_and_sends_parts_across(model):
    _, state, program = compiled(model, "two_slices")
    lines = program.as_text().splitlines()
    across = [line for line in lines if re.search(r" (send|recv)(-done)?\(", line)]
    within = hlo.collectives("\n".join(line for line in lines if line not in across))
    gradients = bytes_of(state["params"])
    assert {one.kind for one in within} <= {"all-reduce", "reduce-scatter", "all-gather"}
    assert {one.group_size for one in within} == {16}
    reduced = sum(operand_bytes(one) for one in within if one.kind != "all-gather")
    # Small arrays are concatenated, and padded to rows of 128.
    assert gradients + 4 <= reduced <= gradients + 4 * 128 * len(jax.tree.leaves(state["params"]))
    sends, receives = ([line for line in across if f" {kind}(" in line] for kind in ("send", "recv"))
    assert len(sends) == len(receives) > 0
    sent = sum(4 * math.prod(map(int, re.search(r"= \(f32\[([\d,]+)\]", line)[1].split(","))) for line in sends)
    assert gradients / 16 <= sent <= reduced


@pytest.mark.slow
@pytest.mark.parametrize("where", TOPOLOGIES)
def test_memory_of_a_device_is_one_donated_state(where):
    _, state, program = compiled("digits", where)
    memory = program.memory_analysis()
    state_bytes = bytes_of(state)
    assert state_bytes <= memory.alias_size_in_bytes <= memory.argument_size_in_bytes <= 1.2 * state_bytes
    assert memory.temp_size_in_bytes > 0


@pytest.mark.slow
def test_recommended_flags_are_accepted():
    strategy, state, plain = compiled("digits", "v5e:4x4")
    step, batch = digits_step, digits_batch(16)
    options = jdist.xla_flags("tpu").compiler_options
    assert options
    program = strategy.compile(step, state, *batch, compiler_options=options)
    actual, expected = (sum(map(operand_bytes, hlo.collectives(each.as_text()))) for each in (program, plain))
    assert actual == expected
    with pytest.raises(ValueError, match="xla_no_such_option"):
        strategy.compile(step, state, *batch, compiler_options={"xla_no_such_option": True})


SMALLEST = {
    "v2": "2x2",
    "v3": "2x2",
    "v4": "2x2x1",
    "v5e": "2x2",
    "v5p": "2x2x1",
    "v6e": "2x2",
    "tpu7x": "2x2x1",
}


UNREADABLE = pytest.mark.xfail(
    jax.__version_info__ < (0, 11),
    raises=jax.errors.JaxRuntimeError,
    reason="this JAX cannot read the program that the newer compiler makes for it (async-update)",
)


@pytest.mark.parametrize("num_slices", [1, 2])
@pytest.mark.parametrize(
    "generation", [pytest.param(name, marks=UNREADABLE if name == "tpu7x" else ()) for name in SMALLEST]
)
def test_every_generation_compiles_a_step(generation, num_slices):
    strategy = jdist.TPUStrategy(topology=f"{generation}:{SMALLEST[generation]}", num_slices=num_slices)
    replicas = strategy.num_replicas_in_sync
    step = strategy.step(
        lambda w, x: (w - jdist.all_reduce("mean", jax.grad(lambda w: jnp.sum((x @ w) ** 2))(w)), None)
    )
    x = jdist.PerReplica(SHAPE((replicas, 8, 128), jnp.float32))
    text = strategy.compile(step, SHAPE((128, 128), jnp.float32), x).as_text()
    assert re.search(r" (all-reduce|reduce-scatter)(-start)?\(", text)
    assert (" send(" in text) == (num_slices == 2)


# --- the mesh


def coordinates(devices):
    return [device.coords for device in devices]


def links(one, other):
    return sum(abs(a - b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("topology", ["v5e:2x2", "v5e:4x4", "v6e:4x4"])
def test_neighbours_in_the_mesh_are_neighbours_in_the_network(topology):
    devices = jdist.TPUStrategy(topology=topology).mesh.devices.flat
    assert [links(*pair) for pair in itertools.pairwise(coordinates(devices))] == [1] * (len(devices) - 1)


@pytest.mark.parametrize("topology", ["v5e:2x4", "v5e:4x8", "v5p:4x4x4", "v3:4x4", "tpu7x:2x2x2"])
def test_mesh_contains_every_device_once(topology):
    strategy = jdist.TPUStrategy(topology=topology)
    locations = [(*device.coords, device.core_on_chip) for device in strategy.mesh.devices.flat]
    assert sorted(locations) == sorted((*d.coords, d.core_on_chip) for d in jdist.topology_devices(topology))
    assert dict(strategy.mesh.shape) == {"replica": len(locations)}


@pytest.mark.parametrize(
    "topology, num_slices, slice_size", [("v5e:4x4", 2, 16), ("v5p:2x2x1", 3, 4), ("v3:2x2", 2, 8)]
)
def test_each_slice_is_a_row_of_the_mesh(topology, num_slices, slice_size):
    strategy = jdist.TPUStrategy(topology=topology, num_slices=num_slices)
    assert dict(strategy.mesh.shape) == {"group": num_slices, "replica": slice_size}
    assert [{d.slice_index for d in row} for row in strategy.mesh.devices] == [{i} for i in range(num_slices)]
    assert strategy.num_replicas_in_sync == num_slices * slice_size
    orders = {tuple(map(tuple, coordinates(row))) for row in strategy.mesh.devices}
    assert len(orders) == 1  # so that each part of a sum is at the same location in each slice


def test_description_of_topology_devices():
    strategy = jdist.TPUStrategy(topology="v5e:4x4", num_slices=2)
    text = str(strategy.describe({"w": SHAPE((256, 128), jnp.float32)}))
    assert "TPUStrategy" in text
    assert "'group' 2 x 'replica' 16" in text
    assert "32 of kind TPU v5 lite (tpu)" in text
    assert re.search(r"w .*128\.0 KiB", text)


# --- errors


def test_error_without_a_tpu_lists_the_devices_and_what_to_do():
    with pytest.raises(
        RuntimeError, match=r"There is no TPU: JAX has the devices cpu:0, .*cpu:7, and reports for TPUs: \S"
    ) as error:
        jdist.TPUStrategy()
    for advice in (
        "choose a runtime with a TPU",
        '`pip install "jax[tpu]"`',
        "JAX_PLATFORMS",
        '`TPUStrategy(topology="v5e:4x4")`',
        "`jdist.auto_strategy()`",
    ):
        assert advice in str(error.value)


def test_resolver_of_one_host_joins_no_processes():
    resolver = jdist.cluster.TPUClusterResolver(environ={"TPU_WORKER_HOSTNAMES": "localhost", "TPU_WORKER_ID": "0"})
    with pytest.raises(RuntimeError, match="There is no TPU: JAX has the devices cpu:0"):
        jdist.TPUStrategy(resolver)
    assert not jax.distributed.is_initialized()


def test_error_of_a_resolver_is_raised():
    class Unreachable(jdist.cluster.TPUClusterResolver):
        def initialize(self):
            raise RuntimeError("host 3 does not answer")

    resolver = Unreachable(environ={"TPU_WORKER_HOSTNAMES": "localhost"})
    with pytest.raises(RuntimeError, match="host 3 does not answer"):
        jdist.TPUStrategy(resolver)


@each_row("resolver", ["v5e:4x4", "local", "", 3, ["cpu:0"], jdist.cluster.TPUClusterResolver])
def test_cluster_resolver_of_another_type_raises(resolver):
    message = r"`cluster_resolver` is such as `jdist\.cluster\.TPUClusterResolver\(\)`, got "
    with pytest.raises(
        TypeError, match=message + re.escape(repr(resolver)) + r".*`TPUStrategy\(topology=\"v5e:4x4\"\)`"
    ):
        jdist.TPUStrategy(resolver)


def test_unknown_topology_raises_with_the_known_ones():
    with pytest.raises(
        ValueError, match=r"The TPU topology 'v5e:3x3' does not exist\. Valid topologies are .*v5e: 2x2, 2x4"
    ):
        jdist.TPUStrategy(topology="v5e:3x3")


def test_num_slices_without_a_topology_raises():
    with pytest.raises(ValueError, match=r"topology=None, num_slices=2.*`num_slices` applies to a topology"):
        jdist.TPUStrategy(num_slices=2)


def test_mirrored_and_tpu_strategy_have_the_same_collectives():
    devices = jdist.topology_devices("v5e:2x4")
    step = lambda w, x: (w + jdist.all_reduce("mean", x), None)
    arguments = SHAPE((4,), np.float32), jdist.PerReplica(SHAPE((8, 4), np.float32))
    texts = [
        strategy.compile(step, *arguments).as_text()
        for strategy in (jdist.MirroredStrategy(devices), jdist.TPUStrategy(topology="v5e:2x4"))
    ]
    collectives = [hlo.collectives(text) for text in texts]
    assert collectives[0] == collectives[1] != []
