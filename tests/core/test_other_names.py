"""TensorFlow's names on a strategy and on `jdist`: errors that name what to write, and nothing else changes."""

import copy
import pathlib
import re

import pytest

import jdist
from jdist._src.core import other_names

ROOT = pathlib.Path(__file__).parent.parent.parent
GUIDE = (ROOT / "docs/from_tf_distribute.md").read_text()
NAMES = [
    *(ROOT / "tests/parity/api.txt").read_text().split(),
    *re.findall(r"`((?:tf\.distribute\.|Strategy\.)[\w.]+)`", GUIDE),
]


def _names_after(*prefixes):
    """The names of the guide and of `api.txt` that follow one of the prefixes directly."""
    pattern = re.compile(rf"(?:{'|'.join(map(re.escape, prefixes))})(\w+)$")
    return sorted({found[1] for name in NAMES if (found := pattern.match(name))})


def _plain_names():
    """The classes and functions that `api.txt` lists without a prefix."""
    return sorted({name for name in NAMES if "." not in name})


@pytest.mark.parametrize("name", other_names.STRATEGY_NAMES)
def test_name_of_tensorflow_on_a_strategy_raises_with_what_to_write(name, two):
    says = rf"^'MirroredStrategy' object has no attribute '{name}'\. TensorFlow's `{name}`: .*See docs/from_tf"
    with pytest.raises(AttributeError, match=says):
        getattr(two, name)
    assert not hasattr(two, name)
    assert name not in dir(two)


@pytest.mark.parametrize("name", other_names.MODULE_NAMES)
def test_name_of_tensorflow_in_the_module_raises_with_what_to_write(name):
    says = rf"^module 'jdist' has no attribute '{name}'\. TensorFlow's `{name}`: .*See docs/from_tf"
    with pytest.raises(AttributeError, match=says):
        getattr(jdist, name)
    assert not hasattr(jdist, name)
    assert name not in dir(jdist)


@pytest.mark.parametrize(
    "name, new",
    [
        ("experimental_distribute_dataset", "strategy.distribute_dataset(source, batch_size)"),
        ("experimental_local_results", "strategy.local_results(value)"),
        ("experimental_distribute_values_from_function", "strategy.distribute_values_from_function(fn)"),
        ("experimental_make_numpy_dataset", "strategy.distribute_dataset(arrays, batch_size)"),
        ("extended", "strategy.mesh.devices"),
    ],
)
def test_name_of_tensorflow_on_every_strategy_names_the_new_one(name, new, strategy):
    with pytest.raises(AttributeError, match=re.escape(new)):
        getattr(strategy, name)


@pytest.mark.parametrize("name", _names_after("Strategy."))
def test_name_of_the_guide_on_a_strategy_is_there_or_has_an_error_of_its_own(name, two):
    assert hasattr(two, name) or name in other_names.STRATEGY_NAMES


@pytest.mark.parametrize("name", [*_names_after("tf.distribute.", "tf.distribute.experimental."), *_plain_names()])
def test_name_of_the_guide_in_the_module_is_there_or_has_an_error_of_its_own(name):
    assert hasattr(jdist, name) or name in other_names.MODULE_NAMES


@pytest.mark.parametrize(
    "advice", [*other_names.STRATEGY_NAMES.items(), *other_names.MODULE_NAMES.items()], ids=lambda advice: advice[0]
)
def test_advice_names_only_what_there_is(advice, two):
    for owner, name in re.findall(r"`(jdist|strategy|jdist\.cluster)\.(\w+)", advice[1]):
        assert hasattr({"jdist": jdist, "strategy": two, "jdist.cluster": jdist.cluster}[owner], name)


def test_name_that_nobody_has_is_refused_as_ever(two):
    with pytest.raises(AttributeError, match="^'MirroredStrategy' object has no attribute 'nothing'$"):
        two.nothing  # noqa: B018
    with pytest.raises(AttributeError, match="^module 'jdist' has no attribute 'nothing'$"):
        jdist.nothing  # noqa: B018
    assert getattr(two, "nothing", None) is getattr(jdist, "nothing", None) is None
    assert not hasattr(jdist, "TYPE_CHECKING")
    assert not hasattr(jdist, "__wrapped__")
    assert not hasattr(two, "__jax_array__")


def test_error_within_a_property_of_a_strategy_is_not_hidden(two):
    empty = object.__new__(jdist.MirroredStrategy)  # its fields are missing, as while it is unpickled
    with pytest.raises(AttributeError, match="has no attribute '_backend'"):
        empty.mesh  # noqa: B018
    assert copy.copy(two).mesh is two.mesh
