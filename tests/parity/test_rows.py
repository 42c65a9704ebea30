"""Nothing of tf.distribute is left out in silence: each behaviour has a test that bears its row's name, or is explained.

`rows.txt` lists what tf.distribute 2.21 does, a row a line: name, input, result. `api.txt` lists its names.
"""

import ast
import pathlib
import re

import pytest

HERE = pathlib.Path(__file__).parent
ROWS = dict(line.split(" | ", 1) for line in (HERE / "rows.txt").read_text().splitlines())
GUIDE = (HERE.parent.parent / "docs/from_tf_distribute.md").read_text()


def _rows_with_a_test():
    for path in [*HERE.glob("test_*.py"), *(HERE.parent / "processes").glob("test_*.py")]:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                yield from (word.upper() for word in node.name.split("_") if re.fullmatch(r"[a-z]{2}\d+", word))


TESTED = set(_rows_with_a_test())
EXPLAINED = set(re.findall(r"\b[A-Z]{2}\d+\b", GUIDE))


@pytest.mark.parametrize("row", ROWS)
def test_row_has_a_test_or_an_explanation(row):
    assert row in TESTED | EXPLAINED, f"{row}: {ROWS[row]}"


def test_tests_and_explanations_are_of_rows_that_there_are():
    assert not (TESTED | EXPLAINED) - ROWS.keys()


@pytest.mark.parametrize("name", (HERE / "api.txt").read_text().split())
def test_name_is_in_the_guide(name):
    assert re.search(rf"`{re.escape(name)}\b", GUIDE), name
