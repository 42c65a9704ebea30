"""A state on several processes is exported by process 0, and an error is raised on all processes."""

import os
import pathlib

from processes.runner import run_processes

WORKER = pathlib.Path(__file__).parent / "export_worker.py"


def test_state_on_two_processes_is_exported_and_saved_once(tmp_path):
    first, second = run_processes(WORKER, 2, 2, tmp_path)
    assert sorted(os.listdir(tmp_path)) == ["w", "x"]
    assert "FileNotFoundError: The folder" in first
    assert "RuntimeError: Process 0 could not write" in second
