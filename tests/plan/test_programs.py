"""What a plan reads from the text of compiled programs: loops, buffers at the peak, memory traffic, lines."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import SingleDeviceSharding

import jdist
from jdist._src.devices.hlo_text import HloModule
from jdist._src.plan.buffers import peak_buffers
from jdist._src.plan.traffic import memory_traffic

LAYERS, WIDTH, ROWS = 12, 512, 2048


def scanned_loss(params, x):
    return (jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, params)[0] ** 2).mean()


def unrolled_loss(params, x):
    return (functools.reduce(lambda h, i: jnp.tanh(h @ params[i]), range(LAYERS), x) ** 2).mean()


PROGRAMS = {
    "gradient of a scan": lambda p, x: jax.grad(scanned_loss)(p, x),
    "gradient of a loop": lambda p, x: jax.grad(unrolled_loss)(p, x),
    "gradient of a checkpointed scan": lambda p, x: jax.grad(jax.checkpoint(scanned_loss))(p, x),
    "forward": scanned_loss,
}


@functools.cache
def compiled(name, topology, layers=LAYERS):
    sharding = SingleDeviceSharding(jdist.topology_devices(topology)[0]) if topology else None
    shape = lambda *sizes: jax.ShapeDtypeStruct(sizes, jnp.float32, sharding=sharding)
    return jax.jit(PROGRAMS[name]).lower(shape(layers, WIDTH, WIDTH), shape(ROWS, WIDTH)).compile()


@pytest.fixture(params=["", "v5e:2x2", "v5p:2x2x1", "tpu7x:2x2x1"])
def topology(request):
    return request.param


@pytest.mark.parametrize("name", PROGRAMS)
def test_buffers_at_the_peak_are_about_what_the_compiler_reports(name, topology):
    program = compiled(name, topology)
    buffers = peak_buffers(HloModule(program.as_text()))
    total, reported = sum(each.bytes for each in buffers), program.memory_analysis().temp_size_in_bytes
    one = ROWS * WIDTH * 4
    assert abs(total - reported) <= max(0.35 * reported, 2 * one)
    assert [each.bytes for each in buffers] == sorted((each.bytes for each in buffers), reverse=True)


def test_activations_of_a_scan_are_named_by_the_line_that_computes_them():
    largest = peak_buffers(HloModule(compiled("gradient of a scan", "").as_text()))[0]
    assert largest.is_activation
    assert largest.bytes == LAYERS * ROWS * WIDTH * 4
    assert "test_programs.py" in largest.line
    assert largest.name.startswith("jvp(")


def test_traffic_is_proportional_to_the_length_of_a_loop(topology):
    few, many = 256, 1024  # neither of which fits into the on-chip memory of a TPU
    traffic = {
        layers: memory_traffic(HloModule(compiled("gradient of a scan", topology, layers).as_text()))
        for layers in (few, many)
    }
    assert traffic[few] > few * WIDTH * WIDTH * 4  # it reads the weights
    assert 3.5 < traffic[many] / traffic[few] < 4.5


@pytest.mark.parametrize("length", [1, 2, 7, 100])
def test_length_of_a_loop_is_known_on_every_platform(topology, length):
    sharding = SingleDeviceSharding(jdist.topology_devices(topology)[0]) if topology else None
    shape = lambda *sizes: jax.ShapeDtypeStruct(sizes, jnp.float32, sharding=sharding)
    loop = lambda w, x: jax.lax.scan(lambda h, w: (jnp.sin(h @ w), None), x, w)[0]
    module = HloModule(jax.jit(loop).lower(shape(length, 256, 256), shape(64, 256)).compile().as_text())
    loops = [
        (each, name) for name, body in module.computations.items() for each in body.values() if each.opcode == "while"
    ]
    assert [module.trip_count(*loop) for loop in loops] == [length] * len(loops)
    assert loops or length <= 2  # XLA may unroll a short loop


def test_length_of_a_loop_until_a_condition_is_unknown(topology):
    sharding = SingleDeviceSharding(jdist.topology_devices(topology)[0]) if topology else None
    x = jax.ShapeDtypeStruct((64,), jnp.float32, sharding=sharding)
    loop = lambda x: jax.lax.while_loop(lambda x: x.sum() < 9, lambda x: jnp.sin(x) * 2, x)
    module = HloModule(jax.jit(loop).lower(x).compile().as_text())
    (count,) = (count for instruction, _, count, _ in module.executions() if instruction.opcode == "while")
    assert count == 1  # the loop itself runs once
    assert None in {count for _, _, count, _ in module.executions()}


def test_lines_are_those_of_the_user(topology):
    module = HloModule(compiled("gradient of a loop", topology).as_text())
    products = [each.instruction for each in module.executions() if "dot_general" in each.instruction.op_name]
    frames = {str(module.frame(each)) for each in products}
    assert products and all("test_programs.py" in frame for frame in frames)


def test_arrays_that_only_pass_through_are_not_traffic():
    shape = jax.ShapeDtypeStruct((1024,), jnp.float32)
    program = jax.jit(lambda x, y: (x + 1, y), donate_argnums=(0, 1)).lower(shape, shape).compile()
    assert memory_traffic(HloModule(program.as_text())) == pytest.approx(2 * 4096, rel=0.01)


def test_a_slice_reads_the_slice():
    shape = jax.ShapeDtypeStruct((1024, 256), np.float32)
    program = jax.jit(lambda x: jax.lax.dynamic_slice_in_dim(x, x[0, 0].astype(int), 4) * 2).lower(shape).compile()
    assert memory_traffic(HloModule(program.as_text())) < 5 * 4 * 256 * 4
