"""Descriptions of pytrees for messages: leaf paths, dtypes and shapes, argument names."""

import contextlib
import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jdist._src.core.nn_modules import leaves_with_path

PyTree = Any


def has_dtype(leaf: Any) -> bool:
    """Returns whether `leaf` is an array of any library, a traced value, or the shape of an array."""
    return hasattr(leaf, "dtype") and not isinstance(leaf, type)


def is_float(leaf: Any) -> bool:
    """Returns whether `leaf` is an array of real floating-point numbers."""
    return has_dtype(leaf) and jnp.issubdtype(leaf.dtype, jnp.floating)


def supports_array(value: Any) -> bool:
    """Returns whether `value` is an array of a library, which `np.asarray` converts by `__array__`."""
    return hasattr(value, "__array__")


def is_named_tuple(node: Any) -> bool:
    """Returns whether `node` is a named tuple."""
    return isinstance(node, tuple) and hasattr(node, "_fields")


def dtype_and_shape(leaf: Any) -> str:
    """Returns `float32[8,3]` for an array, the repr of a Python number, and the class name of any other object."""
    if not has_dtype(leaf):
        return repr(leaf) if isinstance(leaf, (bool, int, float, complex)) else type(leaf).__name__
    return f"{leaf.dtype}[{','.join(str(size) for size in np.shape(leaf))}]"


class ReprText(str):
    """A text without quotes in the repr of a tree: the dtype and shape of a leaf."""

    @classmethod
    def of(cls, leaf: Any) -> "ReprText":
        """Returns the dtype and shape of `leaf`; a text is returned as it is, since the repr of a node may map its leaves."""
        return leaf if isinstance(leaf, cls) else cls(dtype_and_shape(leaf))

    def __repr__(self) -> str:
        return str(self)


def describe_type(value: Any) -> str:
    """Returns the class name of `value`; for a JAX array, whose class is private, its dtype and shape."""
    return dtype_and_shape(value) if isinstance(value, jax.Array) else type(value).__name__


def describe_tree(tree: PyTree, max_length: int = 100) -> str:
    """Returns `tree` in one line for messages: dtypes and shapes in place of leaves, or their number if the text is too long.

    Example:
        >>> (
        ...     describe_tree((np.zeros((4, 2), np.float32), {"n": 3})),
        ...     describe_tree([np.zeros(2)] * 99),
        ... )
        ('(float32[4,2], {n: 3})', 'list of 99 arrays')
    """
    with contextlib.suppress(Exception):  # the class of a node may not accept texts as its leaves
        text = repr(jax.tree.map(ReprText.of, tree)).replace("'", "")
        if len(text) <= max_length and "\n" not in text:
            return text
    return f"{type(tree).__name__} of {len(jax.tree.leaves(tree)):,} arrays"


_ADDRESS = re.compile(r" at 0x[0-9a-f]+(?=>)")  # of a function, or of an object without a repr of its class


def one_line(value: Any, max_length: int = 80) -> str:
    """Returns `repr(value)` for messages, on one line and shortened; for arrays and trees of them their dtypes and shapes.

    Example:
        >>> (
        ...     one_line("adam"),
        ...     one_line(np.zeros((1000, 3), np.float32)),
        ...     one_line({"w": np.ones(99)}),
        ... )
        ("'adam'", 'float32[1000,3]', '{w: float64[99]}')
        >>> one_line(np.int64(0))  # a value, unlike an array
        'np.int64(0)'
    """
    if has_dtype(value) and not isinstance(value, np.generic):
        return dtype_and_shape(value)
    try:
        text = _ADDRESS.sub("", repr(value))
    except Exception:  # of an array that was donated, for example
        text = f"<{type(value).__name__}>"
    if len(text) <= max_length and "\n" not in text:
        return text
    if any(map(has_dtype, jax.tree.leaves(value))):
        return describe_tree(value, max_length)
    return short_line(text, max_length)


def short_line(text: Any, max_length: int = 200) -> str:
    """Returns `str(text)` for messages, on one line, with `…` in place of what exceeds `max_length`."""
    line = " ".join(str(text).split())
    return line if len(line) <= max_length else f"{line[: max_length - 1]}…"


def add_note_once(error: BaseException, note: str) -> None:
    """Adds a note to an error, unless an inner function has added it: a function may be traced by several programs."""
    if note not in getattr(error, "__notes__", ()):
        error.add_note(note)


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
