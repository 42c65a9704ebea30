"""Names of TensorFlow and JAX on a strategy and on `jdist`: errors with the line to write, and the lists of public names."""

import copy
import importlib
import inspect
import pathlib
import pickle
import re
import subprocess
import sys

import numpy as np
import pytest

import jdist
from jdist._src.core.migration_hints import migration_hints

from laws import each_row

ROOT = pathlib.Path(__file__).parent.parent.parent
GUIDE = (ROOT / "docs/from_tf_distribute.md").read_text()
HINTS = {owner: [table["hints"] for table in tables] for owner, tables in migration_hints()["attributes"].items()}
STRATEGY_NAMES = HINTS["strategy"][0]
MODULE_NAMES, JAX_NAMES, TORCH_NAMES = HINTS["jdist"]
NAMES = [
    *(ROOT / "tests/parity/api.txt").read_text().split(),
    *re.findall(r"`((?:tf\.distribute\.|Strategy\.)[\w.]+)`", GUIDE),
]


def _names_after(*prefixes):
    """Returns the names of the guide and of `api.txt` directly after one of the prefixes."""
    pattern = re.compile(rf"(?:{'|'.join(map(re.escape, prefixes))})(\w+)$")
    return sorted({match[1] for name in NAMES if (match := pattern.match(name))})


def _plain_names():
    """Returns the classes and functions that `api.txt` lists without a prefix."""
    return sorted({name for name in NAMES if "." not in name})


@each_row("name", STRATEGY_NAMES)
def test_tensorflow_name_on_a_strategy_is_an_error_with_the_line_to_write(name, two):
    message = rf"^'MirroredStrategy' object has no attribute '{name}'\. TensorFlow's `{name}`: .*See docs/from_tf"
    with pytest.raises(AttributeError, match=message):
        getattr(two, name)
    assert not hasattr(two, name)
    assert name not in dir(two)


@each_row("name", MODULE_NAMES)
def test_tensorflow_name_in_the_module_is_an_error_with_the_line_to_write(name):
    message = rf"^module 'jdist' has no attribute '{name}'\. TensorFlow's `{name}`: .*See docs/from_tf"
    with pytest.raises(AttributeError, match=message):
        getattr(jdist, name)
    assert not hasattr(jdist, name)
    assert name not in dir(jdist)


@each_row(
    "name, line",
    [
        ("experimental_distribute_dataset", "strategy.distribute_dataset(source, batch_size)"),
        ("experimental_local_results", "strategy.local_results(value)"),
        ("experimental_distribute_values_from_function", "strategy.distribute_values_from_function(fn)"),
        ("experimental_make_numpy_dataset", "strategy.distribute_dataset(arrays, batch_size)"),
        ("extended", "strategy.mesh.devices"),
    ],
)
def test_tensorflow_name_on_every_strategy_is_an_error_with_the_new_name(name, line, strategy):
    with pytest.raises(AttributeError, match=re.escape(line)):
        getattr(strategy, name)


@each_row("name", _names_after("Strategy."))
def test_name_of_the_guide_on_a_strategy_exists_or_has_advice(name, two):
    assert hasattr(two, name) or name in STRATEGY_NAMES


@each_row("name", [*_names_after("tf.distribute.", "tf.distribute.experimental."), *_plain_names()])
def test_name_of_the_guide_in_the_module_exists_or_has_advice(name):
    assert hasattr(jdist, name) or name in MODULE_NAMES


@each_row("name", JAX_NAMES)
def test_jax_name_in_the_module_is_an_error_with_the_line_to_write(name):
    message = rf"^module 'jdist' has no attribute '{name}'\. JAX's `{name}`: (write|not needed|call)"
    with pytest.raises(AttributeError, match=message):
        getattr(jdist, name)
    assert not hasattr(jdist, name)
    assert name not in dir(jdist)


def test_names_of_torch_keras_and_others_are_errors_with_the_line_to_write(two):
    iterator = iter(two.distribute_dataset(np.ones(4, np.float32), batch_size=2))
    owners = [
        (jdist, TORCH_NAMES),
        (jdist.callbacks, HINTS["jdist.callbacks"][0]),
        (jdist.sync, HINTS["jdist.sync"][0]),
        (jdist.metrics, HINTS["jdist.metrics"][0]),
        (iterator, HINTS["dataset"][0]),
        (next(iterator), HINTS["values"][0]),
    ]
    for owner, names in owners:
        for name in names:
            with pytest.raises(
                AttributeError, match=rf"has no attribute '{name}'\. \S+ (name )?`{name}`: (write|not|pass)"
            ):
                getattr(owner, name)
            assert name not in dir(owner)
        with pytest.raises(AttributeError, match="has no attribute 'nothing'$"):
            owner.nothing  # noqa: B018


def test_names_of_other_libraries_on_objects_are_errors_with_the_line_to_write(two):
    fit = jdist.Fit(None, jdist.History((), {}), 0, "ended", None)
    trainer = jdist.Trainer(((lambda key, x: x), (lambda w, x: x)), strategy=two)
    tables = [
        (two, HINTS["strategy"][1]),
        (trainer, HINTS["trainer"][0]),
        (fit.history, HINTS["history"][0]),
        (jdist.metrics.Mean(), HINTS["metric"][0]),
    ]
    for owner, names in tables:
        for name in names:
            with pytest.raises(AttributeError, match=rf"object has no attribute '{name}'\. (Write|A |Not|Pass|Keep)"):
                getattr(owner, name)
            assert name not in dir(owner)
        with pytest.raises(AttributeError, match="has no attribute 'nothing'$"):
            owner.nothing  # noqa: B018


TABLES = [*sum(HINTS.values(), []), *migration_hints()["arguments"].values()]
ADVICE = [item for table in TABLES for item in table.items()]


@each_row("advice", ADVICE)
def test_advice_mentions_existing_names_only(advice, two):
    owners = {"jdist": jdist, "strategy": two}
    for module in ("callbacks", "cluster", "coordinator", "sync"):
        owners[f"jdist.{module}"] = getattr(jdist, module)
    for owner, name in re.findall(r"`(strategy|jdist(?:\.(?:callbacks|cluster|coordinator|sync))?)\.(\w+)", advice[1]):
        assert hasattr(owners[owner], name)


def test_hints_are_read_when_a_name_is_missing():
    program = """
import jdist
from jdist._src.core.migration_hints import migration_hints
assert not migration_hints.cache_info().misses
assert not hasattr(jdist, "pmap")
assert migration_hints.cache_info().misses == 1
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=100)


def test_unknown_name_has_the_usual_error(two):
    with pytest.raises(AttributeError, match="^'MirroredStrategy' object has no attribute 'nothing'$"):
        two.nothing  # noqa: B018
    with pytest.raises(AttributeError, match="^module 'jdist' has no attribute 'nothing'$"):
        jdist.nothing  # noqa: B018
    assert getattr(two, "nothing", None) is getattr(jdist, "nothing", None) is None
    assert not hasattr(jdist, "TYPE_CHECKING")
    assert not hasattr(jdist, "__wrapped__")
    assert not hasattr(two, "__jax_array__")


def test_error_in_a_property_of_a_strategy_is_raised(two):
    empty = object.__new__(jdist.MirroredStrategy)  # without fields, as during unpickling
    with pytest.raises(AttributeError, match="has no attribute '_backend'"):
        empty.mesh  # noqa: B018
    assert copy.copy(two).mesh is two.mesh


_MODULES = [jdist, *filter(inspect.ismodule, vars(jdist).values())]
PUBLIC_MODULES = [module for module in _MODULES if "._" not in module.__name__]


@pytest.mark.parametrize("module", PUBLIC_MODULES, ids=lambda module: module.__name__)
def test_dir_of_a_public_module_lists_public_names_only(module):
    names = dir(module)
    assert len(names) == len(set(names))
    for name in names:
        assert name == "__version__" or not name.startswith("_")
        value = getattr(module, name)
        assert not inspect.ismodule(value) or value in PUBLIC_MODULES
    assert {name for name in vars(module) if not name.startswith("_")} == set(names) - {"__version__"}


def test_classes_and_functions_show_their_public_module():
    for module in PUBLIC_MODULES:
        for name in dir(module):
            value = getattr(module, name)
            if inspect.isclass(value) or inspect.isfunction(value):
                public = getattr(value, "__module__", "jdist")
                assert "_src" not in public and getattr(importlib.import_module(public), name) is value, (module, name)


ERRORS = [value for value in vars(jdist).values() if isinstance(value, type) and issubclass(value, Exception)]


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: error.__name__)
def test_exceptions_and_warnings_show_their_public_name_and_pickle(error):
    assert f"{error.__module__}.{error.__qualname__}" == f"jdist.{error.__name__}"
    instance = error("message", None) if error is jdist.FitError else error("message")
    copied = pickle.loads(pickle.dumps(instance))
    assert (type(copied), copied.args) == (error, ("message",))
