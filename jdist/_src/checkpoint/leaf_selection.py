"""The part of a checkpoint that is restored: leaves below some paths, and saved leaves under other paths."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax

from jdist._src.checkpoint.tree_format import MOST_NAMED, Keys, Leaf
from jdist._src.core.tree import PyTree, one_line, short_line
from jdist._src.values.base import is_distributed


def as_paths(only: Any) -> tuple[str, ...] | None:
    """Returns the argument `only` of `restore` and `weights.load` as paths; None for all leaves.

    Raises:
        TypeError: It is not a path or a sequence of paths.
        ValueError: A path is empty, or there is none.
    """
    if only is None:
        return None
    paths = (only,) if isinstance(only, str) else only
    if not isinstance(paths, Sequence) or not all(isinstance(path, str) for path in paths):
        raise TypeError(f'`only` must be a path such as "params/encoder", or a list of paths, got {one_line(only)}.')
    if not paths:
        raise ValueError("`only` is empty, which restores nothing. Omit it to restore all leaves.")
    return tuple(_checked_path("only", path) for path in paths)


def as_renames(rename: Any) -> dict[str, str]:
    """Returns the argument `rename` of `restore` and `weights.load` as a dict from saved paths to new paths.

    Raises:
        TypeError: It is not a mapping of strings.
        ValueError: A path is empty.
    """
    if rename is None:
        return {}
    if not isinstance(rename, Mapping) or not all(isinstance(path, str) for pair in rename.items() for path in pair):
        raise TypeError(
            "`rename` must be a mapping from saved paths to paths in `like`, such as "
            f'{{"params/encoder": "params/backbone"}}, got {one_line(rename)}.'
        )
    return {_checked_path("rename", old): _checked_path("rename", new) for old, new in rename.items()}


def is_below(path: str, paths: Sequence[str] | None, separator: str = "/") -> bool:
    """Returns whether a leaf with a path is one of `paths` or below one of them; always with None.

    Args:
        path: The path of the leaf.
        paths: The paths above leaves.
        separator: The separator of the parts of paths.

    Example:
        >>> (
        ...     is_below("params/encoder/w", ["params/encoder"]),
        ...     is_below("params/encoder_2/w", ["params/encoder"]),
        ... )
        (True, False)
    """
    return paths is None or any(path == parent or path.startswith(parent + separator) for parent in paths)


def check_each_path(
    name: str, only: Sequence[str] | None, leaves: Sequence[Leaf], saved: PyTree = None, separator: str = "/"
) -> None:
    """Raises ValueError if neither the leaves nor the saved state, which may have empty parts, have a path of `only`.

    The message begins with `name`.
    """
    for path in only or ():
        if not any(is_below(leaf.path, [path], separator) for leaf in leaves) and not _has_node(saved, path.split("/")):
            raise ValueError(
                f'{name} and `like` do not have the path only="{short_line(path)}". {_named_leaves(leaves)}'
            )


def renamed_leaves(name: str, leaves: Sequence[Leaf], rename: Mapping[str, str], separator: str = "/") -> list[Leaf]:
    """Returns the saved leaves with their new paths. The longest path in `rename` above a leaf applies.

    Raises:
        ValueError: A path of `rename` does not exist, or two leaves get the same path. The message begins with `name`.
    """
    unused = [old for old in rename if not any(is_below(leaf.path, [old], separator) for leaf in leaves)]
    if unused:
        raise ValueError(
            f'{name} does not have the path "{unused[0]}", which `rename` contains. {_named_leaves(leaves)}'
        )
    renamed = [leaf._replace(keys=_renamed_keys(leaf.keys, rename, separator)) for leaf in leaves]
    sources: dict[str, str] = {}
    for old, new in zip(leaves, renamed, strict=True):
        if sources.setdefault(new.path, old.path) != old.path:
            raise ValueError(
                f"After `rename`, {sources[new.path]} and {old.path} of {name} have the same path, {new.path}."
            )
    return renamed


def with_keys_of(leaves: Sequence[Leaf], wanted: Sequence[Leaf]) -> list[Leaf]:
    """Returns `leaves` with the keys of those wanted leaves that have the same path, because a key may contain a slash."""
    keys = {leaf.path: leaf.keys for leaf in wanted}
    return [leaf._replace(keys=keys.get(leaf.path, leaf.keys)) for leaf in leaves]


def unchanged_leaves(like: PyTree, leaves: Sequence[Leaf], selected: set[int]) -> dict[int, Any]:
    """Returns the leaves of `like` that are not restored, by their numbers.

    Raises:
        ValueError: One of them is a shape without a value.
    """
    unchanged = {number: leaf for number, leaf in enumerate(jax.tree.leaves(like)) if number not in selected}
    shapes = [leaves[number].path for number, leaf in unchanged.items() if isinstance(leaf, jax.ShapeDtypeStruct)]
    if shapes:
        raise ValueError(
            f"`only` does not restore {shortened(shapes)}, and `like` contains shapes there, without values. Pass a state "
            "with values as `like`, such as the result of `trainer.init`; or restore without `like`, or with the part of it "
            "that `only` names."
        )
    return unchanged


def shortened(names: Sequence[str]) -> str:
    """Returns the first names as text, and how many more there are."""
    more = f" and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else ""
    return ", ".join(names[:MOST_NAMED]) + more


def pruned(tree: PyTree, only: Sequence[str] | None) -> PyTree:
    """Returns a tree of dicts, lists and wrappers without the leaves that are not below `only`.

    Dicts lose the keys without leaves. Lists keep their length, with None.

    Example:
        >>> pruned({"params": {"encoder": 1, "head": 2}, "step": 3}, ["params/encoder"])
        {'params': {'encoder': 1}}
    """
    if only is None:
        return tree

    def visit(node: Any, keys: Keys) -> PyTree:
        if is_distributed(node):
            inner = visit(node.tree, keys)
            return None if inner is None else node._with_tree(inner)
        if isinstance(node, dict):
            children = {key: visit(child, (*keys, str(key))) for key, child in node.items()}
            return {key: child for key, child in children.items() if child is not None} or None
        if isinstance(node, list):
            items = [visit(child, (*keys, str(number))) for number, child in enumerate(node)]
            return items if jax.tree.leaves(items) else None
        return node if is_below("/".join(keys), only) else None

    return visit(tree, ())


def _has_node(tree: PyTree, keys: Sequence[str]) -> bool:
    for key in keys:
        if not isinstance(tree, dict) or key not in tree:
            return False
        tree = tree[key]
    return True


def _renamed_keys(keys: Keys, rename: Mapping[str, str], separator: str) -> Keys:
    path = "/".join(keys)
    parents = [old for old in rename if is_below(path, [old], separator)]
    if not parents:
        return keys
    old = max(parents, key=len)
    return tuple((rename[old] + path[len(old) :]).split("/"))


def _checked_path(name: str, path: str) -> str:
    stripped = path.strip("/")
    if not stripped:
        raise ValueError(f'`{name}` contains an empty path. A path is a list of keys, such as "params/encoder".')
    return stripped


def _named_leaves(leaves: Sequence[Leaf]) -> str:
    return f"The leaves are {shortened([leaf.path for leaf in leaves])}."
