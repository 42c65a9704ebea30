"""Pairs leaves of two trees whose names differ only in counters that a library appends, as Keras does: `dense`, `dense_1`.

Keras counts layers per process, so a model that is built twice has other names the second time. Layers of one parent and
one base name are paired in the order of their counters.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

Keys: TypeAlias = tuple[str, ...]
_COUNTED = re.compile(r"(.+)_([1-9]\d*)")
_MOST_NAMED = 4


class _Name(NamedTuple):
    """A part of a path. A key with slashes, as of a Keras variable, has several parts."""

    begins_key: bool
    base: str
    counter: int

    def __str__(self) -> str:
        return f"{self.base}_{self.counter}" if self.counter else self.base


_Node: TypeAlias = dict[_Name, Any]  # its values are nodes, or the keys and the kind of a leaf


def pair_renamed(
    saved: Mapping[Keys, str], wanted: Mapping[Keys, str], *, must_be_certain: bool = True
) -> dict[Keys, Keys] | None:
    """Returns the saved keys for each of the wanted keys.

    Args:
        saved: The kinds of the saved leaves by their keys. A kind is any text that equal leaves have in common.
        wanted: The same of the wanted leaves.
        must_be_certain: Whether to refuse names that can be paired in several ways; otherwise counters decide.

    Returns:
        None if the names differ in more than counters.

    Raises:
        ValueError: The pairs are not certain; the message names them.

    Example:
        >>> paired({("dense_9/w",): "f32[2]"}, {("dense_10/w",): "f32[2]"})
        {('dense_10/w',): ('dense_9/w',)}
    """
    if saved.keys() == wanted.keys():
        return {keys: keys for keys in wanted}
    pairs: dict[Keys, Keys] = {}
    uncertain: list[str] = []
    if not _pair(_tree(saved), _tree(wanted), (), pairs, uncertain):
        return None
    if uncertain and must_be_certain:
        raise ValueError(f"{'; '.join(uncertain[:_MOST_NAMED])}{'; ...' if len(uncertain) > _MOST_NAMED else ''}")
    return pairs


def _tree(leaves: Mapping[Keys, str]) -> _Node:
    root: _Node = {}
    for keys, kind in leaves.items():
        node: Any = root
        names = [_name(number == 0, part) for key in keys for number, part in enumerate(key.split("/"))]
        for name in names:
            node = node.setdefault(name, {})
        node[_Name(True, "", -1)] = (keys, kind)
    return root


def _name(begins_key: bool, text: str) -> _Name:
    counted = _COUNTED.fullmatch(text)
    return _Name(begins_key, counted[1], int(counted[2])) if counted else _Name(begins_key, text, 0)


def _groups(node: _Node) -> dict[tuple[bool, str], list[_Name]]:
    """The names below a node, by what they are without counters, in the order of these."""
    groups: dict[tuple[bool, str], list[_Name]] = {}
    for name in sorted(node):
        groups.setdefault(name[:2], []).append(name)
    return groups


def _pair(saved: Any, wanted: Any, above: Sequence[str], pairs: dict[Keys, Keys], uncertain: list[str]) -> bool:
    """Pairs all leaves below two nodes; returns whether their names differ in counters only."""
    if isinstance(saved, tuple) or isinstance(wanted, tuple):
        if not (isinstance(saved, tuple) and isinstance(wanted, tuple)):
            return False
        pairs[wanted[0]] = saved[0]
        return True
    there, here = _groups(saved), _groups(wanted)
    if {base: len(names) for base, names in there.items()} != {base: len(names) for base, names in here.items()}:
        return False
    for base, names in there.items():
        if not _is_certain(saved, wanted, names, here[base]):
            listed = [", ".join("/".join([*above, str(name)]) for name in group) for group in (names, here[base])]
            uncertain.append(f"{listed[0]} in the checkpoint and {listed[1]} in `like`")
        for one, other in zip(names, here[base], strict=True):
            if not _pair(saved[one], wanted[other], [*above, str(one)], pairs, uncertain):
                return False
    return True


def _is_certain(saved: _Node, wanted: _Node, there: Sequence[_Name], here: Sequence[_Name]) -> bool:
    """Whether the order of the counters is the only way to pair these names.

    It is not if names that are on both sides could also be paired with themselves, or if counters are left out on one side.
    """
    if list(there) == list(here):
        return True
    if len({other.counter - one.counter for one, other in zip(there, here, strict=True)}) > 1:
        return False
    common = set(there) & set(here)
    return not common or any(_kinds(saved[name]) != _kinds(wanted[name]) for name in common)


def _kinds(node: Any) -> Any:
    """The kinds of the leaves below a node, by their names without counters."""
    if isinstance(node, tuple):
        return node[1]
    return [(base, [_kinds(node[name]) for name in names]) for base, names in _groups(node).items()]
