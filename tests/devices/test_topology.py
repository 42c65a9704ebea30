"""Devices that are described: those of every topology that is offered, and what is said of those that are not."""

import math
import os
import re
import subprocess
import sys

import jax
import pytest

import jdist

CORES = {"v2": 2, "v3": 2, "v4": 2, "v5e": 1, "v5p": 1, "v6e": 1, "tpu7x": 2}  # devices a chip


def offered():
    """The topologies that the message lists: generation to shapes, the last of which may be a bound."""
    with pytest.raises(ValueError, match="There is no TPU topology 'v0:1x1'") as error:
        jdist.topology_devices("v0:1x1")
    listed = re.search(r"There are (.*?)\. Write", str(error.value))[1]
    return {name: re.findall(r"\d+(?:x\d+)+", shapes) for name, shapes in re.findall(r"(\w+): ([^;]*)", listed)}


def run(code, **environment):
    """What a process of its own prints; with None, a variable is taken away."""
    merged = {name: value for name, value in (os.environ | environment).items() if value is not None}
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", code], env=merged, text=True, capture_output=True, timeout=120
    )


@pytest.mark.parametrize("generation", CORES)
def test_every_topology_that_the_message_lists_is_there(generation):
    shapes = offered()
    assert shapes.keys() == CORES.keys()
    for shape in shapes[generation]:
        devices = jdist.topology_devices(f"{generation}:{shape}")
        assert len(devices) == math.prod(map(int, shape.split("x"))) * CORES[generation], shape
        assert len(set(devices)) == len(devices)
        assert {device.platform for device in devices} == {"tpu"}


@pytest.mark.parametrize("topology", ["v4:4x4x8", "v5p:4x4x4", "v5p:8x4x4", "v5p:4x8x12", "tpu7x:4x4x4"])
def test_shapes_of_multiples_of_four_are_there(topology):
    generation, shape = topology.split(":")
    assert len(jdist.topology_devices(topology)) == math.prod(map(int, shape.split("x"))) * CORES[generation]


@pytest.mark.parametrize("slices", [2, 3])
def test_slices_are_equal_and_numbered(slices):
    devices = jdist.topology_devices("v5e:2x4", num_slices=slices)
    assert [device.slice_index for device in devices] == sorted([*range(slices)] * 8)
    assert len({(device.slice_index, *device.coords) for device in devices}) == 8 * slices


WRONG = {
    "generation": "v9:2x2",
    "other_name_of_a_generation": "v7x:2x2x1",
    "case": "V5E:4x4",
    "shape": "v5e:3x3",
    "other_order": "v5e:4x2",
    "rank": "v5e:2x2x1",
    "flat": "v5p:4x4",
    "too_large": "v5p:16x16x28",
    "no_multiple_of_four": "v5p:4x4x6",
    "zero": "v5p:0x4x4",
    "negative": "v5p:-4x4x4",
    "no_shape": "v5e",
    "empty_shape": "v5e:",
    "space": "v5e:4x4 ",
    "more": "v5e:4x4:2",
    "empty": "",
    "none": None,
    "number": 16,
    "bytes": b"v5e:4x4",
    "pair": ("v5e", "4x4"),
    "gpus": "1x1x8",
    # Three numbers that are multiples of 4, and something else
    "two_x": "v5p:4xx4x4",
    "x_ahead": "v5p:x4x4x4",
    "x_behind": "v5p:4x4x4x",
    "letter": "v5p:ax4x4x4",
    "other_digits": "v5p:٤x٤x٤",
    "leading_zero": "v5p:04x4x4",
}


@pytest.mark.parametrize("topology", WRONG.values(), ids=WRONG)
def test_topology_that_does_not_exist_is_refused_with_those_that_do(topology):
    says = rf"There is no TPU topology {re.escape(repr(topology))}\. There are v2: 2x2, .*v5e: 2x2, 2x4, 4x4, .*v5p: .*"
    with pytest.raises(
        ValueError, match=says + r"multiples of 4 up to 16x16x24.*Write generation and shape: 'v5e:4x4'"
    ):
        jdist.topology_devices(topology)


@pytest.mark.parametrize("number", [0, -1, True, False, "2", 2.0, None])
@pytest.mark.parametrize("make", [jdist.topology_devices, jdist.TPUStrategy], ids=["devices", "strategy"])
def test_number_of_slices_that_is_none_is_refused(make, number):
    with pytest.raises(
        (TypeError, ValueError), match=rf"`num_slices` is a whole number from 1 up, got {re.escape(repr(number))}\."
    ):
        make(topology="v5e:2x2", num_slices=number)


def test_environment_is_left_as_it_was():
    before = dict(os.environ)
    jdist.topology_devices("v5e:2x2")
    with pytest.raises(ValueError):
        jdist.topology_devices("v5e:2x3")
    assert dict(os.environ) == before


COMPILE = """
import os
import jax, jdist
before = dict(os.environ)  # JAX sets some when it is imported
strategy = jdist.TPUStrategy(topology="v5e:4x4")
shape = jax.ShapeDtypeStruct
step = lambda w, x: (w + jdist.all_reduce("mean", x), None)
program = strategy.compile(step, shape((), "float32"), jdist.PerReplica(shape((16,), "float32")))
assert "all-reduce" in program.as_text()
assert dict(os.environ) == before
"""
VARIABLES = {
    "none": {},
    "another_slice": {"TPU_ACCELERATOR_TYPE": "v5litepod-4", "TPU_WORKER_ID": "0"},
    "a_pod": {
        "TPU_ACCELERATOR_TYPE": "v4-32",
        "TPU_TOPOLOGY": "2x2x4",
        "TPU_WORKER_HOSTNAMES": "10.0.0.1,10.0.0.2,10.0.0.3,10.0.0.4",
        "TPU_WORKER_ID": "2",
        "TPU_SKIP_MDS_QUERY": "true",
    },
}


@pytest.mark.parametrize("variables", VARIABLES.values(), ids=VARIABLES)
def test_variables_that_the_user_set_stay_and_do_no_harm(variables):
    done = run(COMPILE, **variables)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("first", ["described", "there"])
def test_devices_that_are_there_run_beside_those_that_are_described(first):
    """As on a laptop: nothing says which platform to take, and libtpu is installed."""
    there = "import jax, jdist\ntwo = jdist.MirroredStrategy(['cpu:0', 'cpu:1'])\nassert int(two.put(3)) == 3\n"
    code = "".join([COMPILE, there] if first == "described" else [there, COMPILE])
    done = run(code + "assert jax.default_backend() == 'cpu'", JAX_PLATFORMS=None, JAX_NUM_CPU_DEVICES="2")
    assert done.returncode == 0, done.stderr


def test_two_processes_compile_at_once():
    wait = "print('compiled', flush=True)\ninput()"
    command = [sys.executable, "-c", COMPILE + wait]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    started = [subprocess.Popen(command, **pipes) for _ in range(2)]
    try:
        # Each holds the compiler until both have used it.
        said = [process.stdout.readline() for process in started]
        ended = [process.communicate("go\n", timeout=60) for process in started]
    finally:
        for process in started:
            process.kill()
    assert said == ["compiled\n"] * 2, [errors for _, errors in ended]


@pytest.mark.parametrize("how", ["jdist.topology_devices('v5e:4x4')", "jdist.TPUStrategy(topology='v5e:4x4')"])
def test_without_the_compiler_it_is_said_how_to_get_it(how):
    code = f"import sys\nsys.modules['libtpu'] = None\nimport jdist\n{how}"
    done = run(code)
    last = done.stderr.splitlines()[-1]
    assert last.startswith(
        "ModuleNotFoundError: To compile for 'v5e:4x4' without a TPU, the compiler for TPUs is needed"
    )
    assert '`pip install "jdist[plan]"`' in last


def test_without_the_compiler_a_wrong_topology_is_still_said_to_be_wrong():
    done = run("import sys\nsys.modules['libtpu'] = None\nimport jdist\njdist.described_devices('v5e:3x3')")
    assert "ValueError: There is no TPU topology 'v5e:3x3'" in done.stderr


def test_target_config_that_is_not_there_is_named():
    with pytest.raises(FileNotFoundError, match="nowhere.txtpb"):
        jdist.topology_devices("1x1x8", gpu_target_config="nowhere.txtpb")


def test_order_is_that_of_ids():
    devices = jdist.topology_devices("v5p:2x2x4", num_slices=2)
    assert [device.id for device in devices] == sorted({device.id for device in devices})


def test_described_and_real_devices_are_no_mesh():
    described, real = jdist.topology_devices("v5e:2x2")[0], jax.devices()[0]
    with pytest.raises(ValueError, match=r"`devices` mixes the platforms cpu and tpu"):
        jdist.MirroredStrategy([described, real])
