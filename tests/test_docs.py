"""The examples of docstrings and documentation pages run and print the documented output. Public names are documented."""

import ast
import doctest
import importlib
import inspect
import json
import os
import pathlib
import pkgutil
import re
import runpy
import subprocess
import sys
import textwrap
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jdist

ROOT = pathlib.Path(__file__).parent.parent
FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
# Classes are found in the module of their public name.
MODULES = [jdist, *(importlib.import_module(m.name) for m in pkgutil.walk_packages(jdist.__path__, "jdist."))]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "docs/api").glob("*.md"))]
NAMES = {"jdist": jdist, "jax": jax, "jnp": jnp, "np": np, "optax": optax}

# A closing fence ends the expected output of an example. Only the page itself defines names.
RUN_PAGE = f"""
import doctest, pathlib, sys
page = pathlib.Path(sys.argv[1])
text = page.read_text(encoding="utf-8").replace("```", "\\n")
test = doctest.DocTestParser().get_doctest(text, {{"__name__": "__main__"}}, page.name, str(page), 0)
results = doctest.DocTestRunner(optionflags={FLAGS}).run(test)
sys.exit(results.failed > 0 or results.attempted == 0)
"""


class _Finder(doctest.DocTestFinder):
    def _from_module(self, module, object):
        is_method = (
            inspect.isfunction(object) and "." in object.__qualname__
        )  # its globals are those of a private module
        return is_method or super()._from_module(module, object)


def _docstrings():
    finder = _Finder(exclude_empty=True)
    for module in MODULES:
        tests = finder.find(module, globs={**NAMES, **vars(module)})
        yield from (test for test in tests if test.examples)


@pytest.mark.parametrize("test", list(_docstrings()), ids=lambda test: test.name)
def test_docstring_example_runs_and_prints_the_documented_output(test):
    warnings.simplefilter("error", jdist.NotEquivalentWarning)
    result = doctest.DocTestRunner(optionflags=FLAGS).run(test)
    assert result.failed == 0
    assert result.attempted > 0


@pytest.mark.slow
@pytest.mark.parametrize("page", [page for page in PAGES if "\n>>> " in page.read_text()], ids=lambda page: page.stem)
def test_page_runs_in_a_fresh_interpreter_on_one_device(page, tmp_path):
    environment = {k: v for k, v in os.environ.items() if k not in {"JAX_NUM_CPU_DEVICES", "JAX_COMPILATION_CACHE_DIR"}}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    command = [sys.executable, "-W", "error", "-c", RUN_PAGE, str(page)]
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    assert list(tmp_path.iterdir()) == []


# Pages whose examples have no prompts, so that they can be copied from anywhere; `print(...)  # text` states the output.
PASTED = [page for page in PAGES if page.stem in {"README", "index"}]


@pytest.mark.slow
@pytest.mark.parametrize("page", PASTED, ids=lambda page: page.stem)
def test_examples_run_as_pasted_and_print_the_stated_output(page, tmp_path):
    program = "\n".join(
        re.findall(r"^```python\n(.*?)^```", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    )
    environment = {k: v for k, v in os.environ.items() if k not in {"JAX_NUM_CPU_DEVICES", "JAX_COMPILATION_CACHE_DIR"}}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    command = [sys.executable, "-W", "error", "-c", program]
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    printed = re.findall(r"^print\(.*\)  # (.*)$", program, re.MULTILINE)
    assert printed and done.stdout.splitlines() == printed


def test_badges_equal_the_output_of_their_script():
    badges = runpy.run_path(str(ROOT / "docs/badges.py"))["badges"]()
    assert {path.stem: path.read_text() for path in (ROOT / "docs/pictures/badges").glob("*.svg")} == badges


def test_pictures_equal_the_output_of_their_script(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "docs")
    drawing = runpy.run_path(str(ROOT / "docs/pictures.py"))
    for draw in drawing["PICTURES"]:
        assert (ROOT / f"docs/pictures/{draw.__name__}.svg").read_text() == draw(), draw.__name__


def test_every_picture_exists_and_is_on_a_page_with_a_description():
    shown = set()
    for page in PAGES:
        for text, path in re.findall(r"!\[([^\]]*)\]\((\S+\.svg)\)", page.read_text(encoding="utf-8")):
            if "badges" not in path:
                assert len(text.split()) > 5, f"{page.name}: {path}"
                shown.add((page.parent / path).resolve())
    assert shown == set((ROOT / "docs/pictures").glob("*.svg"))


CODE_COLUMNS = 88
_FENCE = re.compile(r"^( *)```(\S*)[^\n]*\n(.*?)^\1```", re.MULTILINE | re.DOTALL)
_ROW_OF_A_TABLE = re.compile(r"(\S {3,}(?=\S).*){3}")  # an output that cannot be wrapped


def _code_lines_of_page(text):
    """Yields the lines of the code blocks of a page, without the indentation of the block."""
    for indent, language, block in _FENCE.findall(text):
        if not language.startswith("{"):
            yield from (line.removeprefix(indent) for line in block.splitlines())


def _code_lines_of_docstrings(source):
    """Yields the lines of the examples of all docstrings of a module, with their prompts and outputs."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            for example in re.findall(r"^ *>>> (?:.*\S.*\n?)+", ast.get_docstring(node) or "", re.MULTILINE):
                yield from textwrap.dedent(example).splitlines()


def test_no_code_line_is_wider_than_88_columns():
    """Wider lines scroll on the pages of the site, and are cut off in a terminal with two windows."""
    pages = [*PAGES, *sorted((ROOT / "docs/api").glob("*.md"))]
    lines = {page: list(_code_lines_of_page(page.read_text(encoding="utf-8"))) for page in pages}
    for path in sorted((ROOT / "jdist").rglob("*.py")):
        lines[path] = list(_code_lines_of_docstrings(path.read_text(encoding="utf-8")))
    for path in sorted((ROOT / "examples/notebooks").glob("*.ipynb")):
        cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
        lines[path] = [
            line for cell in cells if cell["cell_type"] == "code" for line in "".join(cell["source"]).splitlines()
        ]
    assert sum(map(len, lines.values())) > 4000
    wide = [
        f"{path.relative_to(ROOT)}: {line}"
        for path, code in lines.items()
        for line in code
        if len(line) > CODE_COLUMNS and not (_ROW_OF_A_TABLE.search(line) and not line.startswith((">>>", "...")))
    ]
    assert not wide, "\n".join(wide)


def test_code_lines_are_found_in_pages_and_docstrings():
    page = "text\n\n1. item\n\n   ```python\n   >>> f()\n   1\n   ```\n\n```{toctree}\na\n```\n"
    assert list(_code_lines_of_page(page)) == [">>> f()", "1"]
    source = (
        'class A:\n    """Text.\n\n    Example:\n        >>> f(\n        ...     1)\n        1\n\n    Text.\n    """\n'
    )
    assert list(_code_lines_of_docstrings(source)) == [">>> f(", "...     1)", "1"]


PUBLIC_MODULES = [jdist, *(getattr(jdist, name) for name in dir(jdist) if inspect.ismodule(getattr(jdist, name)))]


def _public():
    """Yields the public names of all public modules, and of their classes, with the objects."""
    for module in PUBLIC_MODULES:
        prefix = module.__name__.removeprefix("jdist").removeprefix(".")
        for name in dir(module):
            value = getattr(module, name)
            is_in_jdist = module is not jdist and getattr(jdist, name, None) is value
            if not inspect.ismodule(value) and not is_in_jdist and name != "__version__":
                full_name = f"{prefix}.{name}" if prefix else name
                yield full_name, value
                if inspect.isclass(value):
                    members = inspect.getmembers_static(value)
                    yield from ((f"{full_name}.{m}", v) for m, v in members if m[0] != "_" and m in vars(value))


PUBLIC = dict(_public())


def test_public_names_are_documented():
    targets = {name: getattr(value, "__func__", getattr(value, "fget", value)) for name, value in PUBLIC.items()}
    assert [name for name, target in targets.items() if callable(target) and not inspect.getdoc(target)] == []


API_PAGE = (ROOT / "docs/api.md").read_text(encoding="utf-8")
LISTED = re.findall(r"`([\w.]+)`", API_PAGE.partition("## Public names")[2].partition("\n## ")[0])


def test_api_page_lists_every_public_name_once_and_no_other():
    modules = [module.__name__ for module in PUBLIC_MODULES]
    names = [name for name in PUBLIC if name.count(".") == 0 or f"jdist.{name.rpartition('.')[0]}" in modules]
    assert sorted(name for name in LISTED if name not in modules) == sorted(names)


def test_topic_pages_document_every_public_name_once():
    pages = "".join(page.read_text(encoding="utf-8") for page in sorted((ROOT / "docs/api").glob("*.md")))
    assert sorted(re.findall(r":: jdist\.([\w.]+)\n", pages)) == sorted(LISTED)
