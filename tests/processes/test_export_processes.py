"""What several processes hold is exported by one of them, and all of them hear of it if that fails."""

import os
import pathlib

from processes.runner import run_processes

WORKER = pathlib.Path(__file__).parent / "export_worker.py"


def test_state_on_two_processes_is_exported_and_saved_once(tmp_path):
    first, second = run_processes(WORKER, 2, 2, tmp_path)
    assert sorted(os.listdir(tmp_path)) == ["w", "x"]
    assert "told: The folder" in first
    assert "heard: Process 0 could not write" in second
