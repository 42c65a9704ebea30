"""Every benchmark runs and prints its rows; what they say is for the reader."""

import json
import os
import pathlib
import subprocess
import sys

import pytest

BENCHMARKS = sorted((pathlib.Path(__file__).parent.parent / "benchmarks").glob("*.py"))


@pytest.mark.slow
@pytest.mark.parametrize("path", [p for p in BENCHMARKS if p.stem != "sidebyside"], ids=lambda path: path.stem)
def test_benchmark_prints_a_row_a_case_and_peer(path):
    environment = {name: value for name, value in os.environ.items() if name != "JAX_NUM_CPU_DEVICES"}
    command = [sys.executable, path, "--quick", "--json"]
    printed = subprocess.run(command, env=environment, text=True, capture_output=True, check=True, timeout=280).stdout
    said, *rows = [json.loads(line) for line in printed.splitlines()]
    assert "jax 0." in said["versions"]
    for row in [row for row in rows if "skipped" in row]:
        assert "is not installed, its row is skipped" in row["skipped"]
        rows.remove(row)
    assert rows
    for row in rows:
        assert row["case"]
        assert row["peer"]
        assert 0 < row["low"] <= row["ratio"] <= row["high"]
