"""Programs for topology devices of GPUs, compiled by XLA's GPU compiler if JAX's CUDA plugin is installed."""

import functools
import importlib.util
import math
import pathlib
import re
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh

import jdist
from jdist import hlo

_EXAMPLES = pathlib.Path(__file__).parent.parent.parent / "examples"
TARGET = pathlib.Path(__file__).parent.parent / "kit/h100_target_config.txtpb"
SHAPE = jax.ShapeDtypeStruct
HAS_PLUGIN = bool(importlib.util.find_spec("jax_plugins") and importlib.util.find_spec("jax_plugins.xla_cuda13"))
needs_plugin = pytest.mark.skipif(
    not HAS_PLUGIN,
    reason="NOT TESTED: programs for GPUs. `pip install --no-deps jax-cuda13-plugin jax-cuda13-pjrt` in JAX's version",
)


def _example(name):
    spec = importlib.util.spec_from_file_location(name, _EXAMPLES / f"{name}.py")
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


digits = _example("digits")


def gpus(topology="1x1x8"):
    return jdist.topology_devices(topology, gpu_target_config=TARGET)


def bytes_of(tree):
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


TX = optax.adamw(1e-3)
WIDTH = 256


def make(key):
    params = {"in": jax.random.normal(key, (WIDTH, WIDTH)), "out": jax.random.normal(key, (WIDTH, WIDTH))}
    return {"params": params, "opt_state": TX.init(params)}


def step(state, x):
    loss_fn = lambda params: jnp.mean((jnp.tanh(x @ params["in"]) @ params["out"]) ** 2)
    loss, grads = jdist.all_reduce("mean", jax.value_and_grad(loss_fn)(state["params"]))
    updates, opt_state = TX.update(grads, state["opt_state"], state["params"])
    return {"params": optax.apply_updates(state["params"], updates), "opt_state": opt_state}, loss


def shapes_of(strategy, make):
    return jax.eval_shape(lambda key: strategy.init(make, key), jax.eval_shape(lambda: jax.random.key(0)))


STRATEGIES = {
    "mirrored": lambda: jdist.MirroredStrategy(gpus()),
    "one_device": lambda: jdist.OneDeviceStrategy(gpus()[0]),
    "sharded_all": lambda: jdist.ShardedStrategy("all", mesh=Mesh(np.array(gpus()), ("data",))),
}
# The bytes of the state per device, and per host, as multiples of the bytes of the parameters.
STATE_SIZES = {
    "mirrored": (3.0, 0.0),
    "one_device": (3.0, 0.0),
    "sharded_all": (3 / 8, 0.0),
}


@needs_plugin
@pytest.mark.parametrize("name", STRATEGIES)
def test_every_strategy_compiles_and_reports_its_memory(name):
    strategy = STRATEGIES[name]()
    replicas = strategy.num_replicas_in_sync
    state, batch = shapes_of(strategy, make), jdist.PerReplica(SHAPE((replicas, 64 // replicas, WIDTH), jnp.float32))
    program = strategy.compile(step, state, batch)
    memory = program.memory_analysis()
    params = bytes_of(state["params"])
    # This compiler counts arguments in host memory too. The text of the program shows which ones these are.
    text = program.as_text()
    arguments = text.split("entry_computation_layout={", 1)[1].split("->", 1)[0]
    on_host = re.findall(r"f32\[([\d,]+)\]\{[^}]*S\(5\)\}", arguments)
    host = sum(4 * math.prod(map(int, dims.split(","))) for dims in on_host)
    sizes = (memory.argument_size_in_bytes - host) / params, host / params
    assert sizes == pytest.approx(STATE_SIZES[name], abs=0.15)
    groups = {one.group_size for one in hlo.collectives(text)}
    assert groups == (set() if name == "one_device" else {8})


@needs_plugin
@pytest.mark.parametrize(
    "topology, replicas",
    [("1x1x8", 8), *(pytest.param(*case, marks=pytest.mark.slow) for case in [("1x2x8", 16), ("2x1x4", 8)])],
)
def test_digits_step_all_reduces_its_gradients_and_sends_nothing_else(topology, replicas):
    strategy = jdist.MirroredStrategy(gpus(topology))
    assert strategy.num_replicas_in_sync == replicas
    state = shapes_of(strategy, lambda key: digits.make_state(key, 10))
    images, labels = SHAPE((replicas, 8, 8, 8, 1), jnp.float32), SHAPE((replicas, 8), jnp.int32)
    batch = jdist.PerReplica((images, labels)), jdist.PerReplica(SHAPE((replicas, 8), jnp.float32))
    collectives = hlo.collectives(
        strategy.compile(functools.partial(digits.train_step.__wrapped__, steps=10), state, *batch).as_text()
    )
    assert {(one.kind, one.group_size, one.executions, one.conditional) for one in collectives} == {
        ("all-reduce", replicas, 1, False)
    }
    put_in = sum(one.bytes_sent * replicas / (2 * (replicas - 1)) for one in collectives)
    assert put_in == pytest.approx(bytes_of(state["params"]) + 8, abs=1e-3)  # the loss, and the number of examples


@needs_plugin
def test_running_on_topology_devices_of_gpus_raises():
    message = r"The 8 devices of this strategy \(NVIDIA H100 80GB HBM3\) come from a topology description"
    with pytest.raises(RuntimeError, match=message):
        jdist.MirroredStrategy(gpus()).put(1.0)


@needs_plugin
@pytest.mark.parametrize("topology", ["", "8", "1x8", "axb", "0x1x8", "1x1x8x2", "v5e:4x4", None, 8])
def test_invalid_gpu_topology_raises(topology):
    message = (
        rf"{re.escape(repr(topology))} is not a GPU topology\. A GPU topology is three numbers, such as '1x2x8': NVLink"
    )
    with pytest.raises(ValueError, match=message):
        gpus(topology)


@needs_plugin
@pytest.mark.parametrize("text", [b"no target {", b"", b"\xff\xfe\x00"], ids=["words", "empty", "bytes"])
def test_invalid_gpu_target_file_raises(tmp_path, text):
    path = tmp_path / "some.txtpb"
    path.write_bytes(text)
    with pytest.raises(ValueError, match="some.txtpb"):
        jdist.topology_devices("1x1x8", gpu_target_config=path)


def test_num_slices_of_gpus_raises():
    with pytest.raises(ValueError, match=r"`num_slices=2` is for TPUs\. A GPU topology contains the number of domains"):
        jdist.topology_devices("1x1x8", num_slices=2, gpu_target_config=TARGET)


@needs_plugin
def test_central_storage_on_topology_devices_of_gpus_raises():
    with pytest.raises(ValueError, match=r"H100.* have the memories \[\], and not 'pinned_host'.*compile for TPUs"):
        jdist.CentralStorageStrategy(gpus())


@pytest.mark.skipif(HAS_PLUGIN, reason="the plugin is installed")
def test_error_without_the_plugin_contains_the_install_command():
    with pytest.raises(ModuleNotFoundError, match=r"requires JAX's CUDA plugin.*`pip install --no-deps jax-cuda13"):
        gpus()
