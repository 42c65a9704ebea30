"""Trees as JSON: containers and wrappers in words, with a number for each leaf."""

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from jax.tree_util import DictKey, GetAttrKey, keystr, tree_flatten_with_path

from jdist._src.core.tree import PyTree
from jdist._src.values.base import DistributedValues, is_distributed
from jdist._src.values.mirrored import Mirrored
from jdist._src.values.per_replica import PerReplica
from jdist._src.values.sharded import Sharded
from jdist._src.values.sync_on_read import SyncOnRead

_WRAPPERS = {kind.__name__: kind for kind in (Mirrored, PerReplica, Sharded, SyncOnRead)}
_INLINE = (str, bool, int, float)


class Leaf(NamedTuple):
    """A leaf of a tree.

    Attributes:
        keys: What leads to it, whatever the containers: that of a dict and of a dataclass are the same.
        value: The leaf itself.
        wrapper: The wrapper that it is in, or None.
    """

    keys: tuple[str, ...]
    value: Any
    wrapper: DistributedValues | None

    @property
    def path(self) -> str:
        """The keys as text: `params/dense/kernel`."""
        return "/".join(self.keys)

    def replace(self, value: Any) -> "Leaf":
        """The same place with another value."""
        return self._replace(value=value)


def leaves_of(tree: PyTree) -> list[Leaf]:
    """Every leaf of a tree, in JAX's order.

    Example:
        >>> [(leaf.path, leaf.wrapper) for leaf in leaves_of({"w": 1, "seen": [jdist.Mirrored(2)]})]
        [('seen/0', Mirrored(2)), ('w', None)]
    """
    leaves = []
    for path, item in tree_flatten_with_path(tree, is_leaf=is_distributed)[0]:
        wrapper = item if is_distributed(item) else None
        for inner, value in tree_flatten_with_path(item.tree if is_distributed(item) else item)[0]:
            leaves.append(Leaf(tuple(keystr((key,), simple=True) for key in (*path, *inner)), value, wrapper))
    return leaves


def to_json(tree: PyTree, inline: bool = False, start: int = 0) -> Any:
    """The structure of a tree as JSON.

    Args:
        tree: Any tree; dataclasses and the like are said as dicts, all other containers as lists.
        inline: Whether text and Python's numbers are said, too, instead of being leaves with a number.
        start: The number of the first leaf.

    Example:
        >>> to_json({"w": 1.5, "rest": (None, 2)})
        {'dict': [['rest', {'list': [None, 0]}], ['w', 1]]}
    """
    numbers = itertools.count(start)

    def visit(node: Any) -> Any:
        if node is None:
            return None
        if isinstance(node, DistributedValues):
            options = {
                name: value for name in ("aggregation", "trainable") if (value := getattr(node, name, None)) is not None
            }
            words = {name: getattr(value, "name", value) for name, value in options.items()}
            return {type(node).__name__: visit(node.tree), **words}
        children = tree_flatten_with_path(node, is_leaf=lambda child: child is not node)[0]
        if [path for path, _ in children] == [()]:
            return {"value": node} if inline and is_inline(node) else next(numbers)
        named = all(isinstance(path[0], DictKey | GetAttrKey) for path, _ in children)
        if named and (children or isinstance(node, Mapping)):
            return {"dict": [[_key(path[0]), visit(child)] for path, child in children]}
        return {"list": [visit(child) for _, child in children]}

    return visit(tree)


def from_json(structure: Any, leaf: Callable[[int], Any]) -> PyTree:
    """The tree of which `to_json` gave the structure, of dicts, lists and wrappers.

    Args:
        structure: What `to_json` gave.
        leaf: From its number to the leaf.

    Example:
        >>> from_json(to_json(jdist.SyncOnRead([7], "sum")), lambda number: number)
        SyncOnRead([0], SUM)
    """

    def visit(node: Any) -> Any:
        if node is None or isinstance(node, int):
            return None if node is None else leaf(node)
        (kind, inside), *options = node.items()
        if kind == "value":
            return inside
        if kind == "dict":
            return {key: visit(child) for key, child in inside}
        if kind == "list":
            return [visit(child) for child in inside]
        return _WRAPPERS[kind](visit(inside), **dict(options))

    return visit(structure)


def is_inline(value: Any) -> bool:
    """Whether `value` is text or a Python number, which JSON says as it is."""
    return type(value) in _INLINE


def check_distinct(leaves: Sequence[Leaf]) -> None:
    """Raises ValueError if two leaves have the same keys, by which a checkpoint knows them."""
    seen: set[tuple[str, ...]] = set()
    for leaf in leaves:
        if leaf.keys in seen:
            raise ValueError(f"Two leaves of the state are called {leaf.path}, and a checkpoint knows them by name.")
        seen.add(leaf.keys)


def _key(key: Any) -> Any:
    name = key.key if isinstance(key, DictKey) else key.name
    return name if isinstance(name, _INLINE) else str(name)
