"""The 254 behaviours and all public names of tf.distribute 2.21: each has its state, tests and an explanation where it differs.

A test, or a row of its table, has the rows that it covers in its name (`test_rd1_rd4_...`, `"rd5_rd35_sum": ...`).
`docs/from_tf_distribute.md` explains a behaviour that differs or has no counterpart.
"""

import collections
import re

import conformance

ROWS = conformance.read_rows()
TESTS = conformance.tests_by_row()
EXPLANATIONS = conformance.explanations()


def _rows_of(*states):
    return {row for row, (state, *_) in ROWS.items() if state in states}


def test_all_rows_of_the_reference_are_listed_once():
    assert len(ROWS) == len((conformance.HERE / "rows.txt").read_text(encoding="utf-8").splitlines()) == 254
    counts = dict(SC=11, RD=26, CD=9, GA=17, AR=16, RU=12, VA=29, SV=9, MA=6, DS=25, MW=18, CR=24, PT=12, PS=20)
    assert collections.Counter(row[:2] for row in ROWS) == counts | dict(FT=8, PE=2, KE=10)


def test_every_row_is_the_same_or_differs_or_has_no_counterpart():
    assert _rows_of("same", "differs", "none") == ROWS.keys()


def test_rows_with_a_counterpart_have_tests_and_the_others_have_none():
    assert TESTS.keys() == _rows_of("same", "differs")


def test_rows_that_differ_are_explained_in_the_guide():
    is_same = {row for row, text in EXPLANATIONS.items() if re.match("the same\\b", text)}
    assert EXPLANATIONS.keys() - is_same == _rows_of("differs", "none")
    assert is_same <= _rows_of("same")
    assert set(re.findall(rf"\b(?:{'|'.join(conformance.GROUPS)})\d+\b", conformance.GUIDE)) == EXPLANATIONS.keys()


def test_names_of_the_reference_are_listed_once():
    assert len(conformance.NAMES) == len(set(conformance.NAMES))


def test_every_name_is_in_the_guide():
    assert set(conformance.NAMES) <= conformance.counterparts().keys()


def test_page_equals_the_output_of_its_script():
    assert conformance.PAGE.read_text(encoding="utf-8") == conformance.page()
