"""Writes docs/conformance.md: each behaviour and each name of tf.distribute 2.21, its state in jdist and the tests.

python tests/parity/conformance.py

`rows.txt` has one behaviour per line: identifier, state, input and result. The states are `same` (the same result, or an error for
the same reason), `differs` and `none` (no counterpart in jdist). `test_rows.py` checks them against the tests and the guide. `api.txt`
has one public name per line.
"""

import collections
import inspect
import pathlib
import re
from typing import NamedTuple

import jdist

HERE = pathlib.Path(__file__).parent
TESTS, DOCS = HERE.parent, HERE.parent.parent / "docs"
PAGE = DOCS / "conformance.md"
GUIDE = (DOCS / "from_tf_distribute.md").read_text(encoding="utf-8")
GROUPS = {
    "SC": "Scopes and contexts",
    "RD": "Reduce",
    "CD": "Algorithms of all-reduce",
    "GA": "Gather",
    "AR": "All-reduce, merge_call and control flow",
    "RU": "Run",
    "VA": "Variables",
    "SV": "Save and restore",
    "MA": "Moving averages",
    "DS": "Data sets in one process",
    "MW": "Data sets in several processes",
    "CR": "Cluster resolvers",
    "PT": "Partitioners and sharded variables",
    "PS": "Parameter servers",
    "FT": "Lost workers",
    "PE": "Preemption",
    "KE": "Keras",
}
STATES = {"differs": "differs", "none": "no counterpart"}
NAMES = (HERE / "api.txt").read_text(encoding="utf-8").split()
MODULES = (jdist, jdist.cluster, jdist.coordinator, jdist.data)


class Row(NamedTuple):
    """A behaviour: `same`, `differs` or `none`, the input, and the result in TensorFlow."""

    state: str
    input: str
    result: str


def read_rows() -> dict[str, Row]:
    """Returns the behaviours by identifier."""
    rows = {}
    for line in (HERE / "rows.txt").read_text(encoding="utf-8").splitlines():
        identifier, state, behaviour = line.split(" | ", 2)
        rows[identifier] = Row(state, *behaviour.split(" -> ", 1))
    return rows


def tests_by_row() -> dict[str, list[str]]:
    """Returns the tests of each behaviour, as `file::name`: tests, and rows of the tables of tests, with its identifier in their names."""
    tests = collections.defaultdict(list)
    for path in sorted(TESTS.rglob("test_*.py")):
        text = path.read_text(encoding="utf-8")
        for function, key in re.findall(r"^ *def (test_\w+)|^    \"(\w+)\": ", text, re.M):
            for part in (function or key).upper().split("_"):
                if re.fullmatch(r"[A-Z]{2}\d+", part) and part[:2] in GROUPS:
                    tests[part].append(f"{path.relative_to(TESTS).as_posix()}::{function or key}")
    return tests


def explanations() -> dict[str, str]:
    """Returns the last cell of the line of the guide that explains a behaviour."""
    lines = re.findall(r"^\| ((?:[A-Z]{2}\d+(?:, )?)+) \|.*\| (.*) \|$", GUIDE, re.M)
    return {row: text for rows, text in lines for row in rows.split(", ")}


def counterparts() -> dict[str, str]:
    """Returns the last cell of the line of the guide that has a name in its first cell."""
    section = GUIDE.partition("## Every name")[2].partition("\n## ")[0]
    lines = re.findall(r"^\| (`.*?) \| (.*) \|$", section, re.M)
    return {name: text for names, text in lines for name in re.findall(r"`([\w.]+)`", names)}


OBJECTS = {
    "strategy": "Strategy",
    "value": "DistributedValues",
    "coordinator": "coordinator.ClusterCoordinator",
    "resolver": "cluster.ClusterResolver",
}


def name_state(name: str, counterpart: str) -> str:
    """Returns whether jdist has the name, has no counterpart according to the guide, or has another name for it."""
    if _same_name(name):
        return "same name"
    return "no counterpart" if re.match("not needed|no |deprecated", counterpart) else "another name"


def _same_name(name: str) -> str | None:
    """Returns the public name of jdist that equals a name of TensorFlow, except for `experimental`."""
    path = re.sub(r"^tf\.distribute\.|experimental[._]", "", name)
    return next((f"{module.__name__}.{path}" for module in MODULES if _find(module, path)), None)


def _find(value: object, path: str) -> object | None:
    """Returns the attribute or the field of a dataclass at a path, or None."""
    for part in path.split("."):
        fields = getattr(value, "__dataclass_fields__", {})
        value = fields.get(part) or inspect.getattr_static(value, part, None)
    return value


def examples(name: str, counterpart: str) -> list[str]:
    """Returns the public names of jdist with an example in their docstrings: for a name of TensorFlow, or in the code of a counterpart."""
    names = [_same_name(name) or ""]
    for path in re.findall(r"(?<![\w.])[a-z]\w*(?:\.\w+)+", " ".join(re.findall(r"`([^`]*)`", counterpart))):
        root, _, rest = path.partition(".")
        names.append(f"jdist.{OBJECTS[root]}.{rest}" if root in OBJECTS else path)
    found = []
    for path in names:
        while path.startswith("jdist."):
            value = _find(jdist, path.removeprefix("jdist."))
            value = getattr(value, "__func__", value)
            if ">>>" in (getattr(value, "__doc__", None) or ""):
                found.append(path)
                break
            path = path.rpartition(".")[0]  # the example of a class holds its methods
    return list(dict.fromkeys(found))


def page() -> str:
    """Returns the text of the page."""
    rows, texts = read_rows(), counterparts()
    counts = collections.Counter(row.state for row in rows.values())
    name_counts = collections.Counter(name_state(name, texts[name]) for name in NAMES)
    tests, texts_of_rows = tests_by_row(), explanations()
    number = len({test for row in rows for test in tests[row]})
    lines = [
        "<!-- Written by tests/parity/conformance.py -->",
        "# Conformance with tf.distribute",
        "",
        f"This page compares jdist with tf.distribute 2.21: {len(rows)} behaviours, each with the tests that hold it, and {len(NAMES)} public",
        "names. The results of TensorFlow come from its tests and from small programs on CPU devices. The tests run on CPU devices too.",
        "",
        "| behaviours | number | |",
        "|---|---|---|",
        f"| same | {counts['same']} | the same result, or an error for the same reason; types of errors are those of Python |",
        f"| differs | {counts['differs']} | another result, or another call for it; TensorFlow's defects are here too |",
        f"| no counterpart | {counts['none']} | of variables, graphs and strings, which JAX does not have |",
        "",
        "| names | number | |",
        "|---|---|---|",
        f"| same name | {name_counts['same name']} | without `experimental_` |",
        f"| another name | {name_counts['another name']} | another call of jdist, JAX or Python |",
        f"| no counterpart | {name_counts['no counterpart']} | not needed, or deprecated in TensorFlow |",
        "",
        f"A behaviour has its identifier in the names of its tests. {number} tests, and rows of tables in tests, have one. The files are in",
        "`tests`. [Migrating from tf.distribute](from_tf_distribute.md) has the calls side by side. `python tests/parity/conformance.py` writes",
        "this page.",
        "",
        "In the tables, R is the number of replicas, `rid` the index of the replica, PR a value per replica, X-ctx the cross-replica context,",
        "R-ctx the replica context and *comps* the values of a variable on the replicas. A semicolon separates cases.",
        "",
    ]
    for group, title in GROUPS.items():
        lines += [f"## {title}", "", "| row | input | TensorFlow | jdist | tests |", "|---|---|---|---|---|"]
        for identifier, row in rows.items():
            if identifier.startswith(group):
                text = texts_of_rows.get(identifier, "same")
                jdist_cell = text if row.state == "same" else f"**{STATES[row.state]}**: {text}"
                cells = identifier, _escaped(row.input), _escaped(row.result), jdist_cell, _by_file(tests[identifier])
                lines.append(f"| {' | '.join(cells)} |")
        lines.append("")
    lines += [
        "## Names",
        "",
        "The last column has the docstrings whose examples `test_docs.py` runs.",
        "",
        "| TensorFlow | state | jdist | docstrings |",
        "|---|---|---|---|",
    ]
    for name in NAMES:
        cells = f"`{name}`", name_state(name, texts[name]), texts[name], _codes(examples(name, texts[name]))
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _escaped(text: str) -> str:
    return re.sub(r"([\\`*_\[\]<>|#~])", r"\\\1", text)


def _by_file(tests: list[str]) -> str:
    """Returns each file with its tests, so that the names of files are not repeated."""
    by_file = collections.defaultdict(list)
    for test in tests:
        path, _, name = test.partition("::")
        by_file[path].append(name)
    return "; ".join(f"`{path}` {_codes(names)}" for path, names in by_file.items())


def _codes(texts: list[str]) -> str:
    return ", ".join(f"`{text}`" for text in texts)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
