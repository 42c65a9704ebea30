"""The two programs of `docs/from_pytorch.md` print the losses of the page: with jdist, and in session `libraries` with torch."""

import os
import re
import subprocess
import sys

import pytest
from test_docs import ROOT

TEXT = (ROOT / "docs/from_pytorch.md").read_text(encoding="utf-8")
PROGRAMS = {name: code for name, code in re.findall(r"```python\n# (\w+\.py)\n(.*?)```", TEXT, flags=re.DOTALL)}


def losses(text):
    return [float(loss) for loss in re.findall(r"^(?:\[0\] )?epoch \d: loss (\d\.\d+)$", text, flags=re.MULTILINE)]


def output_of(name, folder, *launcher, **variables):
    (folder / name).write_text(PROGRAMS[name], encoding="utf-8")
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "OMP_NUM_THREADS": "1", **variables}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    command = [sys.executable, *launcher, name]
    done = subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


PRINTED = losses(TEXT)


def test_page_has_both_programs_and_their_losses():
    assert sorted(PROGRAMS) == ["train_ddp.py", "train_jdist.py"]
    assert len(PRINTED) == 5
    assert sorted(PRINTED, reverse=True) == PRINTED


@pytest.mark.slow
@pytest.mark.parametrize(
    "launcher", [(), ("-m", "jdist_tools", "run", "-n", "2")], ids=["one process", "two processes"]
)
def test_jdist_program_prints_the_losses_of_the_page(launcher, tmp_path):
    devices = {} if launcher else {"JAX_NUM_CPU_DEVICES": "2"}
    assert losses(output_of("train_jdist.py", tmp_path, *launcher, **devices)) == pytest.approx(PRINTED, abs=2e-4)
    assert (tmp_path / "checkpoints/5").is_dir()


def test_torch_program_prints_the_losses_of_the_page(tmp_path):
    pytest.importorskip("torch")
    launcher = ("-m", "torch.distributed.run", "--nproc-per-node", "2")
    assert losses(output_of("train_ddp.py", tmp_path, *launcher)) == pytest.approx(PRINTED, abs=2e-4)
    assert (tmp_path / "model.pt").is_file()
