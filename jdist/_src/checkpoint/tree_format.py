"""Leaves of a tree by path, the structure of a tree as JSON, and the pairing of leaves whose names differ in counters."""

import itertools
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

from jax.tree_util import DictKey, GetAttrKey, keystr, tree_flatten_with_path

from jdist._src.core.nn_modules import array_children, is_box, is_nnx_module, leaves_with_path, value_in
from jdist._src.core.tree import PyTree
from jdist._src.values.aggregation import VariableAggregation
from jdist._src.values.base import DistributedValues, is_distributed
from jdist._src.values.mirrored import Mirrored
from jdist._src.values.per_replica import PerReplica
from jdist._src.values.sharded import Sharded
from jdist._src.values.sync_on_read import SyncOnRead

_WRAPPERS = {kind.__name__: kind for kind in (Mirrored, PerReplica, Sharded, SyncOnRead)}
_INLINE = (str, bool, int, float)
_COUNTED = re.compile(r"(.+)_([1-9]\d*)")
MOST_NAMED = 4  # names in a message

Keys: TypeAlias = tuple[str, ...]


class Leaf(NamedTuple):
    """A leaf of a tree.

    Attributes:
        keys: The path. A key of a dict and a field of a dataclass with the same name are the same key.
        value: An array or a number; its shape and dtype in `like`; a `StoredArray` in the tree of a checkpoint.
        wrapper: The wrapper that contains the leaf, or None.
    """

    keys: Keys
    value: Any
    wrapper: DistributedValues | None

    @property
    def path(self) -> str:
        """The keys as text: `params/dense/kernel`."""
        return "/".join(self.keys)

    @property
    def is_stacked(self) -> bool:
        """Whether the array is `[replica, ...]`."""
        return getattr(self.wrapper, "_is_stacked", False)

    @property
    def is_sum(self) -> bool:
        """Whether the wrapper is a `SyncOnRead` SUM, of which a checkpoint stores the total."""
        return isinstance(self.wrapper, SyncOnRead) and self.wrapper.aggregation is VariableAggregation.SUM

    @property
    def wrapper_name(self) -> str:
        """The name of the wrapper in the manifest."""
        if isinstance(self.wrapper, SyncOnRead):
            return f"SyncOnRead {self.wrapper.aggregation.name}{', their sum' if self.is_sum else ''}"
        return "plain" if self.wrapper is None else type(self.wrapper).__name__


def leaves_of(tree: PyTree) -> list[Leaf]:
    """Returns the leaves of a tree in JAX's order.

    Example:
        >>> [
        ...     (leaf.path, leaf.wrapper)
        ...     for leaf in leaves_of({"w": 1, "seen": [jdist.Mirrored(2)]})
        ... ]
        [('seen/0', Mirrored(2)), ('w', None)]
    """
    leaves = []
    for path, node in leaves_with_path(tree, is_leaf=is_distributed):
        wrapper = node if is_distributed(node) else None
        for inner_path, value in leaves_with_path(node.tree if is_distributed(node) else node):
            leaves.append(Leaf(tuple(keystr((key,), simple=True) for key in (*path, *inner_path)), value, wrapper))
    return leaves


def check_distinct(leaves: Sequence[Leaf]) -> None:
    """Raises ValueError if two leaves have the same path, by which a checkpoint identifies them."""
    seen: set[Keys] = set()
    for leaf in leaves:
        if leaf.keys in seen:
            raise ValueError(
                f"Two leaves of the state have the path {leaf.path}, and a checkpoint identifies leaves by path. Rename one of "
                "them."
            )
        seen.add(leaf.keys)


def to_json(tree: PyTree, inline: bool = False, start: int = 0) -> Any:
    """Returns the structure of a tree as JSON.

    Args:
        tree: Any tree. Dataclasses and other nodes with named children become dicts, all other containers become lists.
        inline: Whether text and Python numbers are part of the JSON. Otherwise they are leaves with a number.
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
            return {type(node).__name__: visit(node.tree)} | {k: getattr(v, "name", v) for k, v in options.items()}
        if is_box(node):
            return visit(value_in(node))
        children = tree_flatten_with_path(node, is_leaf=lambda child: child is not node)[0]
        if is_nnx_module(node):
            children = array_children(children)
        if [path for path, _ in children] == [()]:
            return {"value": node} if inline and is_inline(node) else next(numbers)
        is_named = all(isinstance(path[0], DictKey | GetAttrKey) for path, _ in children)
        if is_named and (children or isinstance(node, Mapping)):
            return {"dict": [[_json_key(path[0]), visit(child)] for path, child in children]}
        return {"list": [visit(child) for _, child in children]}

    return visit(tree)


def from_json(structure: Any, leaf: Callable[[int], Any]) -> PyTree:
    """Returns a tree of dicts, lists and wrappers with the structure that `to_json` returned.

    Args:
        structure: The JSON of `to_json`.
        leaf: Returns the leaf with a number.

    Example:
        >>> from_json(to_json(jdist.SyncOnRead([7], "sum")), lambda number: number)
        SyncOnRead([0], SUM)
    """

    def visit(node: Any) -> Any:
        if node is None or isinstance(node, int):
            return None if node is None else leaf(node)
        (kind, content), *options = node.items()
        if kind == "value":
            return content
        if kind == "dict":
            return {key: visit(child) for key, child in content}
        if kind == "list":
            return [visit(child) for child in content]
        return _WRAPPERS[kind](visit(content), **dict(options))

    return visit(structure)


def is_inline(value: Any) -> bool:
    """Whether `value` is text or a Python number, which JSON can contain as it is."""
    return type(value) in _INLINE


def _json_key(key: Any) -> Any:
    name = key.key if isinstance(key, DictKey) else key.name
    return name if isinstance(name, _INLINE) else str(name)


# Keras numbers its layers per process, `dense`, `dense_1`, ..., so a model that is built twice has other layer names the second
# time. `pair_renamed` pairs layers with the same parent and the same base name in the order of their counters.


class _Name(NamedTuple):
    """One part of a path. A key that contains slashes, such as the path of a Keras variable, has several parts."""

    begins_key: bool
    base: str
    counter: int

    def __str__(self) -> str:
        return f"{self.base}_{self.counter}" if self.counter else self.base


_Node: TypeAlias = dict[_Name, Any]  # the values are nodes, or the keys and the kind of a leaf


def pair_renamed(
    saved: Mapping[Keys, str], wanted: Mapping[Keys, str], *, must_be_certain: bool = True
) -> dict[Keys, Keys] | None:
    """Returns the saved keys that belong to each of the wanted keys; None if the names differ in more than counters.

    Args:
        saved: The kind of each saved leaf. Kinds are strings that are equal for leaves that may be paired.
        wanted: The kind of each wanted leaf.
        must_be_certain: Whether to raise if names can be paired in several ways. Otherwise the order of the counters decides.

    Raises:
        ValueError: The names can be paired in several ways; the message lists them.

    Example:
        >>> pair_renamed({("dense_9/w",): "f32[2]"}, {("dense_10/w",): "f32[2]"})
        {('dense_10/w',): ('dense_9/w',)}
    """
    if saved.keys() == wanted.keys():
        return {keys: keys for keys in wanted}
    pairs: dict[Keys, Keys] = {}
    ambiguous: list[str] = []
    if not _pair(_name_tree(saved), _name_tree(wanted), (), pairs, ambiguous):
        return None
    if ambiguous and must_be_certain:
        raise ValueError(f"{'; '.join(ambiguous[:MOST_NAMED])}{'; ...' if len(ambiguous) > MOST_NAMED else ''}")
    return pairs


def _name_tree(leaves: Mapping[Keys, str]) -> _Node:
    root: _Node = {}
    for keys, kind in leaves.items():
        node: Any = root
        for key in keys:
            for number, part in enumerate(key.split("/")):
                counted = _COUNTED.fullmatch(part)
                base, counter = (counted[1], int(counted[2])) if counted else (part, 0)
                node = node.setdefault(_Name(number == 0, base, counter), {})
        node[_Name(True, "", -1)] = (keys, kind)
    return root


def _by_base_name(node: _Node) -> dict[tuple[bool, str], list[_Name]]:
    """Returns the names of the children, grouped by the name without the counter, in the order of the counters."""
    groups: dict[tuple[bool, str], list[_Name]] = {}
    for name in sorted(node):
        groups.setdefault(name[:2], []).append(name)
    return groups


def _pair(saved: Any, wanted: Any, parents: Sequence[str], pairs: dict[Keys, Keys], ambiguous: list[str]) -> bool:
    """Pairs all leaves below two nodes; returns whether their names differ in counters only."""
    if isinstance(saved, tuple) or isinstance(wanted, tuple):
        if not (isinstance(saved, tuple) and isinstance(wanted, tuple)):
            return False
        pairs[wanted[0]] = saved[0]
        return True
    saved_groups, wanted_groups = _by_base_name(saved), _by_base_name(wanted)
    saved_counts, wanted_counts = (
        {base: len(names) for base, names in x.items()} for x in (saved_groups, wanted_groups)
    )
    if saved_counts != wanted_counts:
        return False
    for base, saved_names in saved_groups.items():
        wanted_names = wanted_groups[base]
        if not _is_certain(saved, wanted, saved_names, wanted_names):
            saved_text, wanted_text = (
                ", ".join("/".join([*parents, str(name)]) for name in names) for names in (saved_names, wanted_names)
            )
            ambiguous.append(f"{saved_text} in the checkpoint and {wanted_text} in `like`")
        for saved_name, wanted_name in zip(saved_names, wanted_names, strict=True):
            if not _pair(saved[saved_name], wanted[wanted_name], [*parents, str(saved_name)], pairs, ambiguous):
                return False
    return True


def _is_certain(saved: _Node, wanted: _Node, saved_names: Sequence[_Name], wanted_names: Sequence[_Name]) -> bool:
    """Whether the order of the counters is the only way to pair these names.

    It is not if names that occur on both sides could also be paired with themselves, or if the counters have gaps on one side.
    """
    if list(saved_names) == list(wanted_names):
        return True
    if len({other.counter - one.counter for one, other in zip(saved_names, wanted_names, strict=True)}) > 1:
        return False
    common = set(saved_names) & set(wanted_names)
    return not common or any(_kinds(saved[name]) != _kinds(wanted[name]) for name in common)


def _kinds(node: Any) -> Any:
    """Returns the kinds of the leaves below a node, by their names without counters."""
    if isinstance(node, tuple):
        return node[1]
    return [(base, [_kinds(node[name]) for name in names]) for base, names in _by_base_name(node).items()]
