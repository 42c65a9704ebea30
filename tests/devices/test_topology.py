"""Topology devices: every valid topology, errors for invalid ones, and independence from the environment."""

import math
import os
import re
import subprocess
import sys

import jax
import pytest

import jdist

from laws import each_row

CORES = {"v2": 2, "v3": 2, "v4": 2, "v5e": 1, "v5p": 1, "v6e": 1, "tpu7x": 2}  # devices a chip


def valid_topologies():
    """Returns the shapes that the error message lists, by generation. The last shape may be an upper bound."""
    with pytest.raises(ValueError, match="The TPU topology 'v0:1x1' does not exist") as error:
        jdist.topology_devices("v0:1x1")
    valid = re.search(r"Valid topologies are (.*?)\. Write", str(error.value))[1]
    return {name: re.findall(r"\d+(?:x\d+)+", shapes) for name, shapes in re.findall(r"(\w+): ([^;]*)", valid)}


def run(code, **environment):
    """Runs `code` in a new process. An environment variable with the value None is removed."""
    environment = {
        "JAX_COMPILATION_CACHE_DIR": None
    } | environment  # programs for a TPU cannot be read from it, which warns
    merged = {name: value for name, value in (os.environ | environment).items() if value is not None}
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", code], env=merged, text=True, capture_output=True, timeout=120
    )


@pytest.mark.parametrize("generation", CORES)
def test_every_topology_that_the_message_lists_exists(generation):
    shapes = valid_topologies()
    assert shapes.keys() == CORES.keys()
    for shape in shapes[generation]:
        devices = jdist.topology_devices(f"{generation}:{shape}")
        assert len(devices) == math.prod(map(int, shape.split("x"))) * CORES[generation], shape
        assert len(set(devices)) == len(devices)
        assert {device.platform for device in devices} == {"tpu"}


@pytest.mark.parametrize("topology", ["v4:4x4x8", "v5p:4x4x4", "v5p:8x4x4", "v5p:4x8x12", "tpu7x:4x4x4"])
def test_shapes_of_multiples_of_four_exist(topology):
    generation, shape = topology.split(":")
    assert len(jdist.topology_devices(topology)) == math.prod(map(int, shape.split("x"))) * CORES[generation]


@pytest.mark.parametrize("slices", [2, 3])
def test_slices_have_the_same_shape_and_ascending_indices(slices):
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
    # Variations of three numbers that are multiples of 4
    "two_x": "v5p:4xx4x4",
    "x_ahead": "v5p:x4x4x4",
    "x_behind": "v5p:4x4x4x",
    "letter": "v5p:ax4x4x4",
    "other_digits": "v5p:٤x٤x٤",
    "leading_zero": "v5p:04x4x4",
}


@each_row("topology", WRONG.values(), ids=WRONG)
def test_topology_that_does_not_exist_is_an_error_that_lists_the_valid_ones(topology):
    message = (
        rf"The TPU topology {re.escape(repr(topology))} does not exist\. Valid topologies are v2: .*v5e: 2x2, .*v5p: .*"
    )
    with pytest.raises(
        ValueError, match=message + r"multiples of 4 up to 16x16x24.*Write generation and shape: 'v5e:4x4'"
    ):
        jdist.topology_devices(topology)


@each_row("number", [0, -1, True, False, "2", 2.0, None])
@each_row("make", [jdist.topology_devices, jdist.TPUStrategy], ids=["devices", "strategy"])
def test_invalid_number_of_slices_is_an_error(make, number):
    with pytest.raises(
        (TypeError, ValueError), match=rf"`num_slices` must be an integer >= 1, got {re.escape(repr(number))}\."
    ):
        make(topology="v5e:2x2", num_slices=number)


def test_environment_is_unchanged():
    before = dict(os.environ)
    jdist.topology_devices("v5e:2x2")
    with pytest.raises(ValueError):
        jdist.topology_devices("v5e:2x3")
    assert dict(os.environ) == before


COMPILE = """
import os
import jax, jdist
before = dict(os.environ)  # JAX sets some variables when it is imported
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


@pytest.mark.slow
@pytest.mark.parametrize("variables", VARIABLES.values(), ids=VARIABLES)
def test_variables_of_the_user_are_unchanged_and_do_not_prevent_compilation(variables):
    done = run(COMPILE, **variables)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("first", ["topology", "attached"])
def test_attached_devices_run_in_a_process_with_topology_devices(first):
    """As on a laptop: `JAX_PLATFORMS` is not set, and libtpu is installed."""
    attached = "import jax, jdist\ntwo = jdist.MirroredStrategy(['cpu:0', 'cpu:1'])\nassert int(two.put(3)) == 3\n"
    code = "".join([COMPILE, attached] if first == "topology" else [attached, COMPILE])
    done = run(code + "assert jax.default_backend() == 'cpu'", JAX_PLATFORMS=None, JAX_NUM_CPU_DEVICES="2")
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_two_processes_compile_concurrently():
    wait = "print('compiled', flush=True)\ninput()"
    command = [sys.executable, "-c", COMPILE + wait]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    started = [subprocess.Popen(command, **pipes) for _ in range(2)]
    try:
        # Each process keeps the compiler loaded until both have used it.
        lines = [process.stdout.readline() for process in started]
        ended = [process.communicate("go\n", timeout=60) for process in started]
    finally:
        for process in started:
            process.kill()
    assert lines == ["compiled\n"] * 2, [errors for _, errors in ended]


@pytest.mark.parametrize("call", ["jdist.topology_devices('v5e:4x4')", "jdist.TPUStrategy(topology='v5e:4x4')"])
@pytest.mark.slow
def test_missing_compiler_is_an_error_with_the_command_that_installs_it(call):
    code = f"import sys\nsys.modules['libtpu'] = None\nimport jdist\n{call}"
    done = run(code)
    last = done.stderr.splitlines()[-1]
    assert last.startswith("ModuleNotFoundError: Compiling for 'v5e:4x4' without a TPU needs libtpu, the TPU compiler")
    assert '`python -m pip install "jdist[plan]"`' in last


@pytest.mark.slow
def test_invalid_topology_is_reported_before_a_missing_compiler():
    done = run("import sys\nsys.modules['libtpu'] = None\nimport jdist\njdist.topology_devices('v5e:3x3')")
    assert "ValueError: The TPU topology 'v5e:3x3' does not exist" in done.stderr


def test_missing_target_config_is_an_error_with_its_path():
    with pytest.raises(FileNotFoundError, match="nowhere.txtpb"):
        jdist.topology_devices("1x1x8", gpu_target_config="nowhere.txtpb")


def test_devices_are_ordered_by_id():
    devices = jdist.topology_devices("v5p:2x2x4", num_slices=2)
    assert [device.id for device in devices] == sorted({device.id for device in devices})


def test_topology_devices_and_attached_devices_cannot_form_a_mesh():
    topology_device, attached = jdist.topology_devices("v5e:2x2")[0], jax.devices()[0]
    with pytest.raises(ValueError, match=r"`devices` mixes the platforms cpu and tpu"):
        jdist.MirroredStrategy([topology_device, attached])
