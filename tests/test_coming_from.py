"""Each line of jdist in the tables of the pages for users of other libraries runs, in the order of its page."""

import ast
import os
import re
import subprocess
import sys

import pytest
from test_docs import ROOT, RUN_PAGE

PAGES = {  # the number of tables, and the least number of rows
    "coming_from": (5, 100),
    "from_pytorch": (1, 30),
    "from_horovod": (1, 20),
}
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


def text_of(page: str) -> str:
    return (ROOT / f"docs/{page}.md").read_text(encoding="utf-8")


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES)
def test_each_line_of_the_tables_runs(page, tmp_path):
    examples = list(map(as_example, text_of(page).splitlines()))
    page = tmp_path / f"{page}.md"
    page.write_text("\n".join(examples), encoding="utf-8")
    environment = {k: v for k, v in os.environ.items() if k != "JAX_NUM_CPU_DEVICES"}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    # The lines of one table call one step with the batches of others.
    filters = "import warnings, jdist; warnings.simplefilter('ignore', jdist.RetraceWarning)"
    command = [sys.executable, "-W", "error", "-c", f"{filters}\n{RUN_PAGE}", str(page)]
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("page", PAGES)
def test_each_row_of_the_tables_of_lines_has_one_line(page):
    """A cell that is not one code span would not be run."""
    tables = re.findall(r"^\| \w+ \| jdist \|\n\|---\|---\|\n((?:\|.*\n)+)", text_of(page), flags=re.MULTILINE)
    rows = "".join(tables).splitlines()
    for row in rows:
        assert ROW.match(row), row
    assert len(tables) == PAGES[page][0]
    assert len(rows) >= PAGES[page][1]
