"""Every benchmark runs and prints its rows. The figures are not checked."""

import json
import os
import pathlib
import signal
import subprocess
import sys

import pytest

pytestmark = pytest.mark.skipif(
    sys.version_info < (3, 12), reason="Benchmarks take long and run only on the newest Python."
)
BENCHMARKS = sorted((pathlib.Path(__file__).parent.parent / "benchmarks").glob("*.py"))
# The shared code, and the benchmarks with tests of their own.
OTHERS = (
    "accelerator",
    "sidebyside",
    "models",
    "keras_models",
    "page",
    "torch_models",
    "tensorflow_models",
    "tensorflow_parameter_server",
    "memory",
)
# The options of benchmarks whose other cases run the same code for minutes.
OPTIONS = {
    "train_step": ["--case small", "--case fit-small"],
    "step_overhead": ["--case tiny"],
    "all_reduce": ["--case small --devices 2"],
    "policies": ["--case mlp"],
    "multi_process": ["--case mlp", "--case sum"],
    "parameter_server": ["--case sparse"],
    "recovery": ["--case kill"],
    "devices": ["--case mlp --devices 2"],
    "first_step": ["--devices 2 --processes 2"],
}


def printed(path, *options):
    """Returns the JSON lines that a benchmark prints."""
    of_tests = ("JAX_NUM_CPU_DEVICES", "JAX_COMPILATION_CACHE_DIR")
    environment = {name: value for name, value in os.environ.items() if name not in of_tests}
    command = [sys.executable, path, "--quick", "--json", *options]
    lines = subprocess.run(command, env=environment, text=True, capture_output=True, check=True, timeout=280).stdout
    return [json.loads(line) for line in lines.splitlines()]


@pytest.mark.slow
@pytest.mark.parametrize("path", [p for p in BENCHMARKS if p.stem not in OTHERS], ids=lambda path: path.stem)
def test_benchmark_prints_one_row_per_case_and_peer(path):
    rows = []
    for options in OPTIONS.get(path.stem, [""]):
        header, *others = printed(path, *options.split())
        assert "jax 0." in header["versions"]
        rows += [row for row in others if "versions" not in row]  # each process of `devices` prints a header
    for row in [row for row in rows if "skipped" in row]:
        assert "is not installed, its row is skipped" in row["skipped"]
        rows.remove(row)
    assert rows
    for row in rows:
        assert row["case"]
        assert row["peer"]
        assert 0 < row["low"] <= row["ratio"] <= row["high"]


@pytest.mark.slow
def test_benchmark_of_several_processes_ends_with_its_launcher_at_sigterm():
    (path,) = [path for path in BENCHMARKS if path.stem == "multi_process"]
    command = [sys.executable, path, "--case", "sum", "--floats", "10000", "--rounds", "1000000", "--processes", "2"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as benchmark:
        assert benchmark.stdout.readline().startswith("jdist ")  # the processes have joined, and ignore SIGTERM
        benchmark.terminate()
        benchmark.communicate(timeout=60)  # until the launcher, which has the same standard error, has ended
    assert benchmark.returncode == 128 + signal.SIGTERM


@pytest.mark.slow
def test_memory_benchmark_prints_the_bytes_per_device_of_each_strategy():
    (path,) = [path for path in BENCHMARKS if path.stem == "memory"]
    memory = {(row["strategy"], row["devices"]): row for row in printed(path)}
    assert {name for name, _ in memory} >= {"mirrored", 'sharded "all"', 'central "all"'}
    for (name, devices), row in memory.items():
        assert 0 <= row["state"] <= memory["mirrored", devices]["state"]
        assert row["step"] > 0
        assert row["host"] == 0 or name.startswith("central")


@pytest.mark.slow
def test_script_for_accelerators_has_no_case_that_fails_and_writes_its_rows(tmp_path):
    (path,) = [path for path in BENCHMARKS if path.stem == "accelerator"]
    output = tmp_path / "rows.json"
    header, *rows = printed(path, "--devices", "2", "--minutes", "60", "--output", str(output))
    written = json.loads(output.read_text())
    assert written["rows"] == rows and written["versions"] == header["versions"] and written["devices"] == 2
    assert not [row for row in rows if "skipped" in row or row.get("holds") is False]
    assert {"README: weights", "fit, mlp", "donation, mlp", "bfloat16, transformer", "profile"} <= {
        row["case"] for row in rows
    }
