"""`DebugStrategy`: the example of a backend in docs/extend.md, and debugging with the values of all replicas."""

import ast
import doctest
import pathlib
import re
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jdist
from jdist._src.testing import debug

from laws import STATES, STRATEGIES, rows

PAGE = pathlib.Path(__file__).parents[2] / "docs/extend.md"


def classes(source):
    """Returns the code of the classes, without docstrings, annotations and the names of modules."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            node.body = node.body[ast.get_docstring(node) is not None :]
        if isinstance(node, ast.FunctionDef):
            node.returns = None
        if isinstance(node, ast.arg):
            node.annotation = None
    code = "\n".join(ast.unparse(node) for node in tree.body if isinstance(node, ast.ClassDef))
    return re.sub(r"\b(jdist|extend)\.", "", code)


def test_page_shows_the_classes_of_the_test_kit():
    examples = doctest.DocTestParser().get_examples(PAGE.read_text())
    page = [example.source for example in examples if re.match(r"class (Debug|Operation)", example.source)]
    kit = classes(pathlib.Path(debug.__file__).read_text())
    assert classes("".join(page)) == kit.replace("        map_linear_calls()\n", "")
    assert len("".join(page).splitlines()) <= 60


def test_breakpoint_stops_once_per_call_with_the_values_of_all_replicas(monkeypatch):
    stops = []
    monkeypatch.setattr(sys, "breakpointhook", lambda: stops.append(sys._getframe(1).f_locals["x"].val.tolist()))
    strategy = jdist.testing.DebugStrategy(2)

    @jax.jit
    def inner(x):
        breakpoint()
        return x + 1

    def fn(x):
        return jax.lax.scan(lambda carry, _: (inner(carry), None), x, length=2)[0]

    value = strategy.put(jdist.PerReplica(np.float32([[1], [2]])))
    assert strategy.run(fn, (value,)).tree.tolist() == [[3], [4]] and stops == [[[1], [2]], [[2], [3]]]
    assert strategy.run(fn, (value,)).tree.tolist() == [[3], [4]] and len(stops) == 4


@pytest.mark.parametrize("kind", STATES)
def test_training_equals_the_mirrored_strategy(kind):
    states = []
    for strategy in (STRATEGIES["mirrored_2"](), jdist.testing.DebugStrategy(2)):
        case = STATES[kind]()
        step, state = strategy.step(case.step), strategy.init(case.make)
        for seed in range(3):
            state, _ = step(state, rows(strategy, 3, 4, seed=seed))
        states.append(jax.tree.leaves(jdist.read_values(state)))
    for expected, actual in zip(*states, strict=True):
        if not jnp.issubdtype(actual.dtype, jax.dtypes.extended):
            np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-6)


def test_state_that_is_not_replicated_is_refused():
    strategy = jdist.testing.DebugStrategy(2)
    step = strategy.step(lambda state, x: (state + x.sum(), None))
    with pytest.raises(jdist.NotMirroredError, match="state is not proved to be replicated"):
        step(jnp.float32(0), rows(strategy, 3))
