"""The house: a file imports only from the floors below its own. The floors are those of docs/architecture.md."""

import ast
import pathlib
import re

import pytest

ROOT = pathlib.Path(__file__).parent.parent
PLAN = re.search(r"```text\n(.*?)```", (ROOT / "docs/architecture.md").read_text(), re.DOTALL)[1]
FLOORS = [re.split(r"\s{3,}", line)[0].split() for line in PLAN.splitlines()]
FLOOR = {module: number for number, modules in enumerate(FLOORS) for module in modules}


def _modules():
    for path in sorted((ROOT / "jdist").rglob("*.py")):
        if path.name != "__init__.py":
            yield ".".join(path.relative_to(ROOT / "jdist").with_suffix("").parts), path


def _imports(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            assert not any(alias.name.split(".")[0] == "jdist" for alias in node.names), (
                "the package is above its parts"
            )
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "jdist":
            below = node.module.split(".")[1:]
            names = [".".join([*below, alias.name]) for alias in node.names]
            yield from (name if name in FLOOR else ".".join(below) for name in names)


def test_plan_has_every_file_and_no_other():
    assert set(FLOOR) == {name for name, _ in _modules()}


@pytest.mark.parametrize("name, path", list(_modules()), ids=[name for name, _ in _modules()])
def test_file_imports_only_from_floors_below(name, path):
    for imported in _imports(path):
        assert FLOOR[imported] < FLOOR[name], f"{name} imports {imported}"


@pytest.mark.parametrize("name, path", list(_modules()), ids=[name for name, _ in _modules()])
def test_file_is_no_longer_than_a_reader_can_hold(name, path):
    assert len(path.read_text().splitlines()) <= 350
