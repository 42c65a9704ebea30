"""The 254 behaviours and all public names of tf.distribute 2.21: each has a test or an explanation.

`rows.txt` lists the behaviours, one row per line: identifier, input, result. `api.txt` lists the names. A test, or a row of its
table, carries the rows that it covers in its name (`test_rd1_rd4_...`, `"rd5_rd35_sum": ...`). `docs/from_tf_distribute.md` explains a behaviour that differs or has no
counterpart.
"""

import collections
import pathlib
import re

HERE = pathlib.Path(__file__).parent
LINES = (HERE / "rows.txt").read_text(encoding="utf-8").splitlines()
ROWS = dict(line.split(" | ", 1) for line in LINES)
NAMES = (HERE / "api.txt").read_text(encoding="utf-8").split()
GUIDE = (HERE.parent.parent / "docs/from_tf_distribute.md").read_text(encoding="utf-8")
TYPES = {row[:2] for row in ROWS}


def _test_names():
    """Yields the name of each test and of each row of a table, as one of a pair."""
    for path in sorted(HERE.parent.rglob("test_*.py")):
        yield from re.findall(r"^ *def (test_\w+)|^    \"(\w+)\": ", path.read_text(encoding="utf-8"), re.M)


def _rows_of_name(name):
    parts = (part.upper() for part in name.split("_"))
    return {part for part in parts if re.fullmatch(r"[A-Z]{2}\d+", part) and part[:2] in TYPES}


def _rows_of_text(text):
    return set(re.findall(rf"\b(?:{'|'.join(TYPES)})\d+\b", text))


TESTED = set().union(*(_rows_of_name(name or key) for name, key in _test_names()))
EXPLAINED = _rows_of_text(GUIDE)


def test_all_rows_of_the_reference_are_listed_once():
    assert len(LINES) == len(ROWS) == 254
    counts = dict(SC=11, RD=26, CD=9, GA=17, AR=16, RU=12, VA=29, SV=9, MA=6, DS=25, MW=18, CR=24, PT=12, PS=20)
    assert collections.Counter(row[:2] for row in ROWS) == counts | dict(FT=8, PE=2, KE=10)


def test_every_row_has_a_test_or_an_explanation():
    assert [f"{row}: {ROWS[row]}" for row in ROWS if row not in TESTED | EXPLAINED] == []


def test_every_row_that_a_test_or_the_guide_names_is_listed():
    assert not (TESTED | EXPLAINED) - ROWS.keys()


def test_rows_of_keras_are_tested():
    assert {row for row in ROWS if row.startswith("KE")} <= TESTED


def test_names_of_the_reference_are_listed_once():
    assert len(NAMES) == len(set(NAMES))


def test_every_name_is_in_the_guide():
    assert [name for name in NAMES if not re.search(rf"`{re.escape(name)}(?!\w)", GUIDE)] == []
