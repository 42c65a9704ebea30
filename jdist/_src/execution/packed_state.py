"""`PackedState`: a tree with nnx modules as the values of its variables, which JAX flattens without Python code.

JAX flattens a tree of nnx modules by a Python function per module and variable, and builds the modules of the result by
another. For 50 parameters both take longer than the dispatch of a step. A `StatePacker` stores the variables of each module,
checks by identity that nothing was replaced since, and stores the new values in the same variables.
"""

import itertools
import operator
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple, final

import jax

from jdist._src.core.identity_cache import IdentityCache
from jdist._src.core.nn_modules import is_equinox_module, is_nnx_module, is_variable, leaves_with_path, to_array_tree
from jdist._src.core.tree import PyTree
from jdist._src.values.base import is_distributed


@final
class PackedState:
    """A state as a list of values, and its structure.

    Attributes:
        values: The value of each variable, and each leaf that is not in a variable: an array or a wrapper.
        treedef: The structure of the state as an array tree (`jdist._src.core.nn_modules`), whose leaves are the values.
    """

    def __init__(self, values: Sequence[Any], treedef: Any):
        self.values, self.treedef = values, treedef

    def state(self) -> PyTree:
        """Returns the state as an array tree."""
        return self.treedef.unflatten(self.values)

    def with_state(self, state: PyTree) -> "PackedState":
        """Returns another state of the same structure, packed."""
        return PackedState(self.treedef.flatten_up_to(state), self.treedef)

    def _keyed_values(self) -> tuple[list[tuple[Any, Any]], Any]:
        """Returns the values with their paths in the state, for error messages."""
        placeholder = self.treedef.unflatten(range(len(self.values)))
        paths = [jax.tree_util.keystr(path) for path, _ in leaves_with_path(placeholder)]
        return list(zip(map(_PathKey, paths), self.values, strict=True)), (self.treedef,)


class _PathKey:
    """The key of a value: its path in the state."""

    def __init__(self, path: str):
        self._path = path

    def __str__(self) -> str:
        return self._path


# The structure is in a tuple: JAX compares static data by `==`, which for elements of a tuple tests identity first.
jax.tree_util.register_pytree_with_keys(
    PackedState,
    PackedState._keyed_values,
    lambda data, values: PackedState(list(values), *data),
    lambda packed: (packed.values, (packed.treedef,)),
)


class _Structure(NamedTuple):
    """The structure of a state.

    Attributes:
        outer: The structure of the state above its modules.
        versions: The version of the variables of each module.
        treedef: The structure of the state as an array tree, whose leaves are the values.
        indices: The number of each value among the variables and leaves; some occur several times.
    """

    outer: Any
    versions: list[object]
    treedef: Any
    indices: list[int]


class StatePacker:
    """Packs the states of one program.

    Mutable: it stores the variables of each module as long as the module exists, and the structure of the last state.
    """

    def __init__(self) -> None:
        self._variables: IdentityCache[_Variables] = IdentityCache()
        self._structure: _Structure | None = None

    def pack(self, state: PyTree) -> "Packing | None":
        """Returns the state, packed; None if it has a part whose variables cannot be stored.

        Such parts are modules of equinox, variables outside of modules, and in a module arrays without a variable and unknown
        containers.
        """
        nodes, outer = jax.tree.flatten(state, is_leaf=_is_node)
        slots: list[Any] = []
        versions: list[object] = []
        for node in nodes:
            if not _is_container(node):
                if is_variable(node) or is_equinox_module(node):
                    return None
                slots.append(_Leaf(node))
                continue
            variables = self._variables.get(node, lambda _: _Variables())
            if not variables.find(node):
                return None
            slots += variables.items
            versions.append(variables.version)
        structure = self._structure
        if structure is None or structure.outer != outer or structure.versions != versions:
            structure = self._structure = _structure_of(state, slots, outer, versions)
        slots = [slots[index] for index in structure.indices]
        return Packing(PackedState(list(map(_value_of, slots)), structure.treedef), slots, nodes, outer)


def _structure_of(state: PyTree, slots: Sequence[Any], outer: Any, versions: list[object]) -> _Structure:
    values = set(map(id, map(_value_of, slots)))
    treedef = jax.tree.structure(to_array_tree(state), is_leaf=lambda node: id(node) in values)
    first = {id(slot): index for index, slot in reversed(list(enumerate(slots)))}
    return _Structure(outer, versions, treedef, sorted(first.values()))


class Packing(NamedTuple):
    """A packed state with the objects of the user that it came from.

    Attributes:
        packed: The state.
        slots: The variable of each value, or the leaf.
        nodes: The modules of the state, and its leaves outside of modules.
        outer: The structure of the state above the nodes.
    """

    packed: PackedState
    slots: list[Any]
    nodes: list[Any]
    outer: Any

    def update(self, new: PackedState) -> PyTree:
        """Returns the state with the values of `new`: the same modules, whose variables are changed."""
        for slot, value in zip(self.slots, new.values, strict=True):
            _set_attribute(slot, _VALUE, value)
        leaves = (slot._raw_value for slot in self.slots if type(slot) is _Leaf)
        return self.outer.unflatten([node if _is_container(node) else next(leaves) for node in self.nodes])


class _Leaf:
    """A leaf outside of modules, with the attribute of a variable."""

    __slots__ = ("_raw_value",)

    def __init__(self, value: Any):
        self._raw_value = value


# `Variable.set_raw_value` compares JAX's trace contexts twice, 8 µs per variable. Here no function is being traced.
_VALUE = "_raw_value"
_value_of = operator.attrgetter(_VALUE)
_set_attribute = object.__setattr__


class _Variables:
    """The variables of a module, in the order of JAX's leaves.

    Mutable: `find` searches the module again if an attribute of it, or of a module in it, was replaced.

    Attributes:
        items: The variables; one may occur several times.
        version: An object that is replaced with the items.
    """

    def __init__(self) -> None:
        self.items: list[Any] = []
        self.version = object()
        # Each dict of attributes, and the keys and values of all of them, which are compared by identity.
        self._dicts: list[dict[Any, Any]] = []
        self._keys: list[Any] | None = None
        self._values: list[Any] = []
        self._is_complete = False

    def find(self, module: Any) -> bool:
        """Finds the variables; returns whether they contain all arrays of the module."""
        values = list(itertools.chain.from_iterable(map(dict.values, self._dicts)))
        is_current = len(values) == len(self._values) and all(map(operator.is_, values, self._values))
        if not is_current or list(itertools.chain.from_iterable(self._dicts)) != self._keys:
            self.items, self._dicts, self.version = [], [], object()
            self._is_complete = self._visit(module)
            self._keys = list(itertools.chain.from_iterable(self._dicts))
            self._values = list(itertools.chain.from_iterable(map(dict.values, self._dicts)))
        return self._is_complete

    def _visit(self, node: Any) -> bool:
        """Adds the variables of `node`; returns whether they contain all of its arrays."""
        attributes = _attributes(node)
        if attributes is not None:
            self._dicts.append(attributes)
        elif not isinstance(node, tuple):
            return not jax.tree.leaves(node)
        if is_variable(node):
            self.items.append(node)
            return hasattr(node, _VALUE) and bool(jax.tree.leaves(node))
        return all([self._visit(child) for child in jax.tree.leaves(node, is_leaf=lambda child: child is not node)])


def _attributes(node: Any) -> dict[Any, Any] | None:
    """Returns the dict that a module, an `nnx.State` or a dict stores its children in, or the metadata of a variable."""
    if is_nnx_module(node):
        return vars(node)
    name = "_var_metadata" if is_variable(node) else "_mapping" if _is_container(node) else ""
    attributes = getattr(node, name, None) if name else node
    return attributes if type(attributes) is dict else None


def _is_container(node: Any) -> bool:
    return is_nnx_module(node) or isinstance(node, getattr(sys.modules.get("flax.nnx"), "State", ()))


def _is_node(node: Any) -> bool:
    return _is_container(node) or is_variable(node) or is_equinox_module(node) or is_distributed(node)
