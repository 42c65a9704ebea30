"""Descriptions of pytrees for messages: leaf paths, dtypes and shapes, argument names."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jdist._src.core.modules import leaves_with_path

PyTree = Any


def dtype_and_shape(leaf: Any) -> str:
    """Returns `float32[8,3]` for an array, the repr of a Python number, and the class name of any other object."""
    if not hasattr(leaf, "dtype"):
        return type(leaf).__name__ if not isinstance(leaf, (bool, int, float, complex)) else repr(leaf)
    return f"{leaf.dtype}[{','.join(str(size) for size in np.shape(leaf))}]"


def describe_type(value: Any) -> str:
    """Returns the class name of `value`; for a JAX array, whose class is private, its dtype and shape."""
    return dtype_and_shape(value) if isinstance(value, jax.Array) else type(value).__name__


def named_leaves(name: str, tree: PyTree) -> list[tuple[str, Any]]:
    """Returns each leaf of `tree` with its path, which starts with `name`."""
    return [(name + jax.tree_util.keystr(path), leaf) for path, leaf in leaves_with_path(tree)]


def argument_names(fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[str]:
    """Returns the parameter names of `fn` for these arguments: first the positional ones, then the keyword arguments."""
    try:
        parameters = inspect.signature(fn).parameters.values()
    except (TypeError, ValueError):  # some builtins have no signature
        parameters = ()
    names: list[str] = []
    for parameter in parameters:
        if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD):
            names.append(parameter.name)
        elif parameter.kind is parameter.VAR_POSITIONAL:
            names += [f"{parameter.name}[{i}]" for i in range(len(args) - len(names))]
    names += [f"args[{i}]" for i in range(len(names), len(args))]
    return names[: len(args)] + list(kwargs)
