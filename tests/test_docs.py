"""Every example in a docstring and in the documents runs and prints what it says."""

import doctest
import importlib
import inspect
import pathlib
import pkgutil
import runpy

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jdist

ROOT = pathlib.Path(__file__).parent.parent
FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
MODULES = [importlib.import_module(m.name) for m in pkgutil.walk_packages(jdist.__path__, "jdist.")]
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
WORDS = {"jdist": jdist, "jax": jax, "jnp": jnp, "np": np, "optax": optax}


def _examples():
    finder = doctest.DocTestFinder(exclude_empty=True)
    for module in MODULES:
        words = {**WORDS, **vars(module)}
        yield from (test for test in finder.find(module, globs=words) if test.examples)


def _documents():
    parser = doctest.DocTestParser()
    for path in DOCUMENTS:
        # A fence ends an example's output.
        text = path.read_text().replace("```", "\n")
        test = parser.get_doctest(text, dict(WORDS), path.name, str(path), 0)
        if test.examples:
            yield test


@pytest.mark.parametrize("test", [*_examples(), *_documents()], ids=lambda test: test.name)
def test_example_runs_and_prints_what_it_says(test):
    result = doctest.DocTestRunner(optionflags=FLAGS).run(test)
    assert result.failed == 0
    assert result.attempted > 0


def test_pictures_are_what_the_code_draws():
    drawing = runpy.run_path(str(ROOT / "docs/pictures.py"))
    assert (ROOT / "docs/who_reads.svg").read_text() == drawing["who_reads"]()


def _public():
    for name, value in vars(jdist).items():
        if not name.startswith("_") and not inspect.ismodule(value):
            yield name, value
            if inspect.isclass(value):
                members = inspect.getmembers_static(value)
                yield from ((f"{name}.{m}", v) for m, v in members if not m.startswith("_") and m in vars(value))


@pytest.mark.parametrize("name, value", list(_public()), ids=[name for name, _ in _public()])
def test_public_name_is_documented(name, value):
    target = getattr(value, "__func__", getattr(value, "fget", value))
    if callable(target):
        assert inspect.getdoc(target), name
