"""The programs of the pages on Ray and on sweeps run on a cluster of one node; training continues after a failure."""

import json
import os
import pathlib
import re
import subprocess
import sys

import pytest

from ray_namespace import environment, ray_cluster

TEXT = (pathlib.Path(__file__).parent.parent.parent / "docs/ray.md").read_text(encoding="utf-8")
(PROGRAM,) = re.findall(r"```python\n# train_with_ray.py\n(.*?)```", TEXT, flags=re.DOTALL)
SAVING = "callbacks=[log, saving]"


def run_in_cluster(num_cpus, name, program, folder):
    """Runs a program, which gets `folder` as its argument, with Ray on one node; returns its output."""
    (folder / name).write_text(program, encoding="utf-8")
    with ray_cluster(num_cpus=num_cpus, store_bytes=80_000_000) as enter:
        done = subprocess.run(
            [*enter, sys.executable, name, str(folder)],
            cwd=folder,
            env=environment() | {"JAX_PLATFORMS": "cpu"},
            capture_output=True,
            text=True,
            timeout=280,
        )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize("fails", [False, True], ids=["no failure", "a failure"])
def test_ray_train_program_of_the_page_trains(fails, tmp_path):
    pytest.importorskip("ray.train", reason="Ray Train is not installed.", exc_type=ImportError)
    program = PROGRAM
    if fails:  # process 1 ends in step 45, once
        assert program.count(SAVING) == 1
        function = """
    def fails(event):
        import os
        mark = f"{config['folder']}/failed"
        if event.step == 45 and resolver.process_id == 1 and not os.path.exists(mark):
            open(mark, "w").close()
            os._exit(1)

"""
        line = "    trainer = jdist.Trainer("
        program = program.replace(SAVING, "callbacks=[fails, log, saving]").replace(line, function + line)
    run_in_cluster(3, "train_with_ray.py", program, tmp_path)
    rows = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [16, 32, 48, 64, 80]
    assert os.path.exists(tmp_path / "failed") == fails
    assert (tmp_path / "checkpoints/80").is_dir()


@pytest.mark.slow
@pytest.mark.processes
def test_ray_tune_program_of_the_page_on_sweeps_reports_each_trial(tmp_path):
    pytest.importorskip("ray.tune", reason="Ray Tune is not installed.", exc_type=ImportError)
    page = (pathlib.Path(__file__).parent.parent.parent / "docs/sweeps.md").read_text(encoding="utf-8")
    (program,) = re.findall(r"```python\n# tune.py\n(.*?)```", page, flags=re.DOTALL)
    output = run_in_cluster(2, "tune.py", program, tmp_path)
    assert 0 < float(re.search(r"best loss (\S+)", output)[1]) < 2
