"""The pytest plugin, in sessions of pytest of its own: few, because each starts Python and JAX."""

import os
import pathlib
import re
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parent.parent.parent
ENVIRONMENT = {
    name: value
    for name, value in os.environ.items()
    if not name.startswith(("JAX_NUM", "JAX_PLATFORMS", "XLA_FLAGS", "PYTEST"))
}

TESTS = """
import os, sys, pytest

def test_devices():
    import jax
    assert len(jax.devices()) == 3 and os.environ["JAX_NUM_CPU_DEVICES"] == "3"

def test_more_devices_than_configured_is_an_error():
    import jdist
    with pytest.raises(ValueError, match="`jdist_devices = 4`"):
        jdist.testing.strategy("mirrored_4")

@pytest.mark.skip(reason="needs 8 devices")
def test_marked(): pass

def test_skips(): pytest.skip("Not enough devices: 3")

def test_without_gpu(): pytest.skip("needs a GPU device")

def test_without_network(): pytest.skip("no network")

@pytest.mark.xfail(strict=True)
def test_expected_failure(): raise ValueError("not enough devices")
"""

SETS_OTHER_NUMBER = """
import jax
jax.config.update("jax_num_cpu_devices", 2)

def test_first(): jax.devices()

def test_second(): pass
"""


def run(folder, *arguments, ini="jdist_devices = 3", program=("-m", "pytest"), **variables):
    """Runs pytest in `folder`; returns its output and its errors."""
    (folder / "pytest.ini").write_text(f"[pytest]\n{ini}\n")
    environment = {**ENVIRONMENT, "PYTHONPATH": os.pathsep.join([str(ROOT), str(folder)]), **variables}
    command = [
        sys.executable,
        *program,
        "-p",
        "no:cacheprovider",
        "-p",
        "jdist_tools.pytest_plugin",
        "--tb=short",
        *arguments,
    ]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=120)
    return done.stdout + done.stderr


def outcomes(output):
    return {name: int(number) for number, name in re.findall(r"(\d+) (passed|failed|skipped|xfailed|error)", output)}


@pytest.mark.parametrize("workers", [(), pytest.param(("-n", "1"), marks=pytest.mark.slow)])
def test_devices_are_forced_and_skips_for_lack_of_devices_fail(tmp_path, workers):
    (tmp_path / "test_it.py").write_text(TESTS)
    (tmp_path / "test_module.py").write_text(
        "import pytest\npytest.skip('multiple devices needed', allow_module_level=True)"
    )
    output = run(
        tmp_path, "--continue-on-collection-errors", *workers, XLA_FLAGS="--xla_force_host_platform_device_count=5"
    )
    header = "jdist: 3 CPU devices (jdist_devices); `--xla_force_host_platform_device_count=5` in XLA_FLAGS is not used"
    assert header in output
    assert outcomes(output) == {"passed": 2, "failed": 1, "skipped": 2, "xfailed": 1, "error": 2}, output
    assert "which is an error with `jdist_devices = 3`. Increase `jdist_devices`, or deselect the test." in output


def test_flag_of_a_conftest_that_is_not_used_is_reported_with_q_too(tmp_path):
    (tmp_path / "conftest.py").write_text(
        "import os\nos.environ['XLA_FLAGS'] = '--xla_force_host_platform_device_count=' + os.environ['COUNT']\n"
    )
    (tmp_path / "test_it.py").write_text("def test_it(): pass\n")
    line = "jdist: 3 CPU devices (jdist_devices); `--xla_force_host_platform_device_count=5` in XLA_FLAGS is not used"
    assert run(tmp_path, "-q", COUNT="5").count(line) == 1
    assert run(tmp_path, COUNT="5").count(line) == 1
    assert "CPU devices" not in run(tmp_path, "-q", COUNT="3")


def test_plugin_without_configuration_is_inactive_and_does_not_import_jax(tmp_path):
    (tmp_path / "test_it.py").write_text(
        "import os, sys, pytest\n"
        "def test_it(): assert 'jax' not in sys.modules and 'JAX_NUM_CPU_DEVICES' not in os.environ\n"
        "def test_skip(): pytest.skip('needs 8 devices')\n"
    )
    output = run(tmp_path, ini="")
    assert outcomes(output) == {"passed": 1, "skipped": 1}, output
    assert "CPU devices" not in output


@pytest.mark.slow
def test_jax_started_by_another_plugin_is_an_error_that_names_it(tmp_path):
    (tmp_path / "starts_jax.py").write_text("import optax, jax\njax.devices()\n")
    (tmp_path / "imports_jax.py").write_text("import jax\n")
    (tmp_path / "test_it.py").write_text("import jax\ndef test_it(): assert len(jax.devices()) == 3\n")
    (tmp_path / "runs_pytest.py").write_text(
        "import jax, sys\njax.devices()\nimport pytest\npytest.main(sys.argv[1:])\n"
    )
    late = "`jdist_devices = 3` is too late: JAX has started with 1 CPU device before pytest read its configuration. JAX was imported by"
    assert outcomes(run(tmp_path, "-p", "imports_jax")) == {"passed": 1}
    assert f"{late} the plugin `starts_jax`. Load it later" in run(tmp_path, "-p", "starts_jax", JAX_PLATFORMS="cpu")
    output = run(tmp_path, program=("runs_pytest.py",), JAX_PLATFORMS="cpu")
    assert f"{late} the program that started pytest. Load it later" in output


@pytest.mark.slow
def test_test_that_sets_another_number_fails_and_so_do_the_tests_after_it(tmp_path):
    (tmp_path / "test_it.py").write_text(SETS_OTHER_NUMBER)
    output = run(tmp_path)
    assert outcomes(output) == {"failed": 1, "error": 1}, output
    assert (
        "`jdist_devices = 3`, but JAX has started with 2 CPU devices. Remove the calls of `jdist.use_cpu_devices`"
        in output
    )


def test_number_must_be_positive(tmp_path):
    assert "`jdist_devices` must be an integer >= 1, got '0'." in run(tmp_path, ini="jdist_devices = 0")
