"""A state on several processes is exported by process 0, and an error is raised on all processes."""

import os


def test_state_on_two_processes_is_exported_and_saved_once(pair, tmp_path):
    first, second = pair.run("processes.export_worker:error_of_saving", tmp_path)
    assert sorted(os.listdir(tmp_path)) == ["w", "x"]
    assert first.startswith("FileNotFoundError: The folder")
    assert second.startswith("RuntimeError: Process 0 could not write")


REFUSED = {
    "missing": ("`weights.load` failed on process 1: ", "FileNotFoundError: The file "),
    "damaged": ("`weights.load` failed on process 1: ", "ValueError: "),
    "names": ("`weights.load` failed on process 1: ", "ValueError: "),
    "put": ("The same call failed on process 1: ", "ValueError: value['w'] (float32[4]) was deleted"),
    "split": ("The same call failed on process 1: ", "ValueError: batch (float32[4]) was deleted"),
}


def test_call_that_one_process_refuses_fails_on_all_processes_and_names_its_error(pair, tmp_path):
    first, second = pair.run("processes.export_worker:errors_of_one_process", tmp_path)
    for case, (heading, error) in REFUSED.items():
        assert second[case].startswith(error), second[case]
        assert first[case].partition(": ")[2].startswith(f"{heading}{error}"), first[case]
    assert first["later"] == second["later"] == [1.0] * 3
