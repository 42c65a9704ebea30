"""Each line of jdist in the tables of `docs/coming_from.md` runs, in the order of the page."""

import ast
import os
import re
import subprocess
import sys

import pytest
from test_docs import ROOT, RUN_PAGE

PAGE = ROOT / "docs/coming_from.md"
ROW = re.compile(r"^\| .* \| `([^`]+)` \|$")


def as_example(line: str) -> str:
    """Returns a row of a table as a doctest of its last cell, without output; other lines are returned unchanged."""
    match = ROW.match(line)
    if not match:
        return line
    code = match[1]
    try:
        ast.parse(code, mode="eval")
    except SyntaxError:
        return f">>> {code}\n"
    return f">>> _ = {code}\n"


@pytest.mark.slow
def test_each_line_of_the_tables_runs(tmp_path):
    lines = PAGE.read_text(encoding="utf-8").splitlines()
    examples = list(map(as_example, lines))
    assert sum(a != b for a, b in zip(lines, examples, strict=True)) > 70
    page = tmp_path / PAGE.name
    page.write_text("\n".join(examples), encoding="utf-8")
    environment = {k: v for k, v in os.environ.items() if k != "JAX_NUM_CPU_DEVICES"}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    # The lines of one table call one step with the batches of others.
    filters = "import warnings, jdist; warnings.simplefilter('ignore', jdist.RetraceWarning)"
    command = [sys.executable, "-W", "error", "-c", f"{filters}\n{RUN_PAGE}", str(page)]
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr


def test_each_row_of_the_tables_of_lines_has_one_line():
    """A cell that is not one code span would not be run."""
    text = PAGE.read_text(encoding="utf-8")
    tables = re.findall(r"^\| \w+ \| jdist \|\n\|---\|---\|\n((?:\|.*\n)+)", text, flags=re.MULTILINE)
    assert len(tables) == 5
    for row in "".join(tables).splitlines():
        assert ROW.match(row), row
