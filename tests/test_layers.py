"""Packages import only packages below their own. The order is the list at the top of docs/architecture.md."""

import ast
import graphlib
import pathlib
import re

ROOT = pathlib.Path(__file__).parent.parent
SOURCE = ROOT / "jdist/_src"
_LIST = re.search(r"```text\n(.*?)```", (ROOT / "docs/architecture.md").read_text(), re.DOTALL)[1]
PACKAGES = [line.split()[0].removesuffix("/") for line in _LIST.splitlines()]
MODULES = {
    ".".join(path.relative_to(SOURCE).with_suffix("").parts): path
    for path in sorted(SOURCE.rglob("*.py"))
    if path.name != "__init__.py"
}


def imported_modules(name: str) -> set[str]:
    """Returns the modules of `jdist._src` that the module `name` imports anywhere in its file."""
    modules = set()
    for node in ast.walk(ast.parse(MODULES[name].read_text())):
        if isinstance(node, ast.Import):
            assert not any(alias.name.split(".")[0] == "jdist" for alias in node.names), f"{name} imports jdist itself"
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "jdist":
            assert node.module.startswith("jdist._src."), f"{name} imports the public {node.module}"
            package = node.module.removeprefix("jdist._src.")
            names = {f"{package}.{alias.name}" for alias in node.names}
            modules |= {full if full in MODULES else package for full in names}
    return modules


IMPORTS = {name: imported_modules(name) for name in MODULES}


def depth(graph: dict[str, set[str]], name: str, path: tuple[str, ...] = ()) -> int:
    """Returns the length of the longest chain of imports from `name`; an import cycle is an AssertionError with its path."""
    assert name not in path, f"import cycle: {' -> '.join([*path, name])}"
    return 1 + max((depth(graph, below, (*path, name)) for below in graph[name]), default=0)


def test_list_of_packages_is_complete():
    assert sorted(PACKAGES) == sorted({name.split(".")[0] for name in MODULES})


def test_modules_import_only_packages_below_their_own():
    level = lambda name: PACKAGES.index(name.split(".")[0])
    upward = [(name, imported) for name in MODULES for imported in IMPORTS[name] if level(imported) > level(name)]
    assert upward == []


def test_modules_do_not_import_each_other_in_a_cycle():
    assert list(graphlib.TopologicalSorter(IMPORTS).static_order())  # a cycle is an error with its modules


def test_chain_of_packages_is_short():
    packages = {package: set() for package in PACKAGES}
    for name, imports in IMPORTS.items():
        package = name.split(".")[0]
        packages[package] |= {imported.split(".")[0] for imported in imports} - {package}
    assert max(depth(packages, package) for package in PACKAGES) <= 10
