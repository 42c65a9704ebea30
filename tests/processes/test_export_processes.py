"""A state on several processes is exported by process 0, and an error is raised on all processes."""

import os


def test_state_on_two_processes_is_exported_and_saved_once(pair, tmp_path):
    first, second = pair.run("processes.export_worker:error_of_saving", tmp_path)
    assert sorted(os.listdir(tmp_path)) == ["w", "x"]
    assert first.startswith("FileNotFoundError: The folder")
    assert second.startswith("RuntimeError: Process 0 could not write")
