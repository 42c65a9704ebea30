"""Pytrees in words: how a leaf is named, and what it looks like."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

PyTree = Any


def dtype_and_shape(leaf: Any) -> str:
    """A leaf's dtype and shape, never its contents: `float32[8,3]`."""
    if not hasattr(leaf, "dtype"):
        return type(leaf).__name__ if not isinstance(leaf, (bool, int, float, complex)) else repr(leaf)
    return f"{leaf.dtype}[{','.join(str(size) for size in np.shape(leaf))}]"


def describe_type(value: Any) -> str:
    """The name of the class of an argument; dtype and shape of a JAX array, whose class has no public name."""
    return dtype_and_shape(value) if isinstance(value, jax.Array) else type(value).__name__


def named_leaves(name: str, tree: PyTree) -> list[tuple[str, Any]]:
    """Every leaf of `tree` with its name: the name of the tree, then the leaf's path."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    return [(name + jax.tree_util.keystr(path), leaf) for path, leaf in leaves]


def argument_names(fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[str]:
    """What the author of `fn` calls each of these arguments: positional ones first, then those given by name."""
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
