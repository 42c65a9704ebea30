"""Names of leaves and arguments, and the description of a leaf in a message."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jdist._src.core.tree import argument_names, dtype_and_shape, named_leaves

DESCRIPTIONS = {
    "scalar_array": (np.float32(1), "float32[]"),
    "matrix": (np.zeros((8, 3), np.int32), "int32[8,3]"),
    "bfloat16": (jnp.zeros(2, jnp.bfloat16), "bfloat16[2]"),
    "key": (jax.random.key(0), "key<fry>[]"),
    "shape_without_contents": (jax.ShapeDtypeStruct((2,), np.float32), "float32[2]"),
    "python_number": (3, "3"),
    "python_boolean": (True, "True"),
    "string": ("a secret", "str"),
    "object": (object(), "object"),
}


@pytest.mark.parametrize("leaf, description", DESCRIPTIONS.values(), ids=DESCRIPTIONS)
def test_description_of_a_leaf_has_dtype_and_shape(leaf, description):
    assert dtype_and_shape(leaf) == description


def test_named_leaves_have_the_name_of_the_tree_and_their_path():
    tree = {"b": [1, None, (2,)], "a": 3}
    assert named_leaves("state", tree) == [("state['a']", 3), ("state['b'][0]", 1), ("state['b'][2][0]", 2)]


def test_named_leaf_of_a_bare_leaf_has_the_name_of_the_tree():
    assert named_leaves("batch", 7) == [("batch", 7)]


class Model:
    def step(self, state, batch):
        return state, batch


class Unsigned:
    __signature__ = "not one"

    def __call__(self, *args):
        return args


ARGUMENTS = {
    "positional": (lambda state, batch: 0, 2, {}, ["state", "batch"]),
    "fewer_than_parameters": (lambda state, batch=1: 0, 1, {}, ["state"]),
    "variable": (lambda state, *rest: 0, 3, {}, ["state", "rest[0]", "rest[1]"]),
    "variable_after_defaults": (lambda state, rate=1, *rest: 0, 1, {}, ["state"]),
    "keyword_only": (lambda state, *, rate: 0, 1, {"rate": 1}, ["state", "rate"]),
    "by_name": (lambda state, batch: 0, 0, {"batch": 1, "state": 2}, ["batch", "state"]),
    "more_than_parameters": (lambda state: 0, 2, {}, ["state", "args[1]"]),
    "method": (Model().step, 2, {}, ["state", "batch"]),
    "partial": (functools.partial(lambda rate, state: 0, 0.1), 1, {}, ["state"]),
    "builtin": (max, 2, {}, ["args[0]", "args[1]"]),
    "unsigned": (Unsigned(), 1, {"x": 0}, ["args[0]", "x"]),
}


@pytest.mark.parametrize("fn, count, kwargs, names", ARGUMENTS.values(), ids=ARGUMENTS)
def test_argument_names_are_the_parameter_names(fn, count, kwargs, names):
    assert argument_names(fn, range(count), kwargs) == names
