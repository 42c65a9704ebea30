"""Modules of flax nnx and equinox in trees.

Both are pytrees, with two differences from a tree of arrays:

* An `nnx.Variable` may occur several times, as a tied weight does. JAX flattens it to one leaf per occurrence.
* An equinox module has leaves that are not arrays: activation functions, rates, flags.

`to_array_tree` replaces both by nodes without leaves, so that each leaf of the result is one array, and `from_array_tree` is
its inverse. Neither library is imported: their objects exist only where the user has imported them.
"""

import dataclasses
import operator
import sys
from collections.abc import Callable
from typing import Any

import jax

PyTree = Any


def is_variable(node: Any) -> bool:
    """Returns whether `node` is an `nnx.Variable`."""
    return isinstance(node, getattr(sys.modules.get("flax.nnx"), "Variable", ()))


def is_box(node: Any) -> bool:
    """Returns whether `node` contains one value with metadata: an `nnx.Variable`, or a box of linen (`nn.Partitioned`)."""
    return is_variable(node) or isinstance(node, getattr(sys.modules.get("flax.core.meta"), "Partitioned", ()))


def value_in(box: Any) -> Any:
    """Returns the value in an `nnx.Variable` or a box of linen."""
    return box.get_raw_value() if is_variable(box) else box.value


def is_nnx_object(node: Any) -> bool:
    """Returns whether `node` is an object of nnx with attributes: a module, an optimizer, `nnx.Rngs`, a metric."""
    return isinstance(node, getattr(sys.modules.get("flax.nnx"), "Pytree", ()))


def is_nnx_module(node: Any) -> bool:
    """Returns whether `node` is an object of nnx with attributes, and a pytree."""
    return is_nnx_object(node) and getattr(node, "_pytree__is_pytree", True)


def is_equinox_module(node: Any) -> bool:
    """Returns whether `node` is an `equinox.Module`."""
    return isinstance(node, getattr(sys.modules.get("equinox"), "Module", ()))


def is_module(node: Any) -> bool:
    """Returns whether `node` is a module of nnx or equinox, or an `nnx.Variable`."""
    return is_nnx_module(node) or is_variable(node) or is_equinox_module(node)


def contains_modules(tree: PyTree) -> bool:
    """Returns whether a node of `tree` is a module or an `nnx.Variable`."""
    if "flax.nnx" not in sys.modules and "equinox" not in sys.modules:
        return False
    return any(map(is_module, jax.tree.leaves(tree, is_leaf=is_module)))


@dataclasses.dataclass(frozen=True)
class NonArray:
    """A leaf of an equinox module that is not an array, as a node without leaves.

    Attributes:
        value: The leaf, a hashable object.
    """

    value: Any


@dataclasses.dataclass(frozen=True)
class RepeatedVariable:
    """A further occurrence of an `nnx.Variable`, as a node without leaves.

    Attributes:
        number: The number of the variable in the tree, in the order of the first occurrences.
    """

    number: int


jax.tree_util.register_dataclass(NonArray, data_fields=(), meta_fields=("value",))
jax.tree_util.register_dataclass(RepeatedVariable, data_fields=(), meta_fields=("number",))


def to_array_tree(tree: PyTree) -> PyTree:
    """Returns `tree` with arrays as its only leaves: the array tree of `tree`.

    Other leaves of equinox modules, and repeated nnx variables, become nodes without leaves. A tree without them is returned
    unchanged.
    """
    if not contains_modules(tree):
        return tree
    numbers: dict[int, int] = {}

    def convert(node: Any) -> Any:
        if is_equinox_module(node):
            return jax.tree.map(lambda leaf: leaf if _is_array(leaf) else NonArray(leaf), node)
        if id(node) in numbers:
            return RepeatedVariable(numbers[id(node)])
        if is_variable(node):
            numbers[id(node)] = len(numbers)
        return node

    nodes, treedef = jax.tree.flatten(tree, is_leaf=lambda node: is_variable(node) or is_equinox_module(node))
    converted = list(map(convert, nodes))
    # Building new modules is slow.
    return tree if all(map(operator.is_, nodes, converted)) else treedef.unflatten(converted)


def from_array_tree(tree: PyTree) -> PyTree:
    """Returns the tree for which `to_array_tree` returned `tree`, with the leaves of `tree`."""
    if not contains_modules(tree):
        return tree
    nodes, treedef = jax.tree.flatten(tree, is_leaf=_is_converted_node)
    if not any(isinstance(node, (NonArray, RepeatedVariable)) for node in nodes):
        return tree
    variables = [node for node in nodes if is_variable(node)]

    def convert(node: Any) -> Any:
        if isinstance(node, NonArray):
            return node.value
        return variables[node.number] if isinstance(node, RepeatedVariable) else node

    return treedef.unflatten(map(convert, nodes))


def leaves_with_path(tree: PyTree, is_leaf: Callable[[Any], bool] | None = None) -> list[tuple[tuple[Any, ...], Any]]:
    """Returns the leaves of `tree` with their paths, without the key of the value in an nnx variable or a box of linen.

    So a parameter has the path under which its module defines it, `.layers[0].kernel`, and not `.layers[0].kernel.value`, with
    and without metadata.
    """
    if "flax" not in sys.modules:
        return jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_leaf)
    leaves: list[tuple[tuple[Any, ...], Any]] = []
    ends = is_box if is_leaf is None else lambda node: is_box(node) or is_leaf(node)
    for path, node in jax.tree_util.tree_leaves_with_path(tree, is_leaf=ends):
        if not is_box(node) or (is_leaf is not None and is_leaf(node)):
            leaves.append((path, node))
            continue
        for inner_path, leaf in jax.tree_util.tree_leaves_with_path(node, is_leaf=is_leaf):
            leaves.append(((*path, *inner_path[1:]), leaf))
    return leaves


def array_children(children: list[tuple[Any, Any]]) -> list[tuple[Any, Any]]:
    """Returns the children of an nnx module with leaves: flax stores the status of a module in a child without leaves."""
    return [(path, child) for path, child in children if jax.tree.leaves(child)]


def update_in_place(old: PyTree, new: PyTree) -> PyTree:
    """Returns `new` with the nnx modules and variables of `old`, which get the values of `new`.

    Args:
        old: A tree, whose modules and variables are changed.
        new: A tree of the same structure.
    """
    if is_variable(old):
        old.set_raw_value(new.get_raw_value())
        return old
    if not contains_modules(old) or is_equinox_module(old):
        return new
    is_child = lambda node: node is not old and node is not new
    children = jax.tree_util.tree_leaves_with_path(old, is_leaf=is_child)
    new_children, treedef = jax.tree.flatten(new, is_leaf=is_child)
    updated = [update_in_place(child, other) for (_, child), other in zip(children, new_children, strict=True)]
    if not is_nnx_module(old):
        return treedef.unflatten(updated)
    for ((key,), child), other in zip(children, updated, strict=True):
        if other is not child and jax.tree.leaves(child):
            setattr(old, jax.tree_util.keystr((key,), simple=True), other)
    return old


def _is_array(leaf: Any) -> bool:
    return hasattr(leaf, "dtype") and hasattr(leaf, "shape")


def _is_converted_node(node: Any) -> bool:
    return is_variable(node) or isinstance(node, (NonArray, RepeatedVariable))
