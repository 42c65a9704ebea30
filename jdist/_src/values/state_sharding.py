"""Which dims of the leaves of a state are split over which mesh axes.

A leaf is split in two ways, one after the other. A *pattern* that its path matches says how tensor parallelism splits it;
an optimizer's moments of a parameter are split as the parameter is. Then, if it is of a kind that data parallelism need
not hold in full on every device, its largest dim that is left and divides is split over the data axis.

Source:
    S. Rajbhandari et al., "ZeRO: memory optimizations toward training trillion parameter models", arXiv:1910.02054: the
    kinds, in three stages. Y. Xu et al., "GSPMD: general and scalable parallelization for ML computation graphs",
    arXiv:2105.04663: one program, and annotations of where its values lie.
"""

import dataclasses
import math
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, Literal, TypeAlias, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jdist._src.core.tree import PyTree, dtype_and_shape
from jdist._src.values.arrays import Shape
from jdist._src.values.base import is_distributed

Shard: TypeAlias = Literal["optimizer", "gradients", "all"]
_OPTIMIZER = frozenset(("opt_state", "optimizer", "optimizer_state"))
_SEPARATOR = "/"


@dataclasses.dataclass(frozen=True)
class StateLeaf:
    """A leaf of a state.

    Attributes:
        name: What messages call it.
        path: The keys that lead to it.
        shape: Its shape, as one replica has it.
        value: What it is like.
        is_optimizer: Whether it belongs to the state of an optimizer.
        is_stacked: Whether the host sees `[replica, ...]`.
        is_own: Whether each replica has its own, or a part of its own.
    """

    name: str
    path: tuple[str, ...]
    shape: Shape
    value: Any
    is_optimizer: bool
    is_stacked: bool = False
    is_own: bool = False


@dataclasses.dataclass(frozen=True)
class StateSharding:
    """How the state of a model lies on a mesh.

    Attributes:
        mesh: The devices.
        axis: The mesh axis that ZeRO splits over.
        shard: What of the state it splits: the optimizer's part, or all. `"gradients"` splits these as well as the
            optimizer's part.
        patterns: From a regular expression, searched in the paths of parameters, `params/dense/kernel`, to how a
            parameter that it is found in is split.
        tile: What sizes of the last dims of a part ZeRO's split has to leave multiples of.
    """

    mesh: Mesh
    axis: str
    shard: Shard
    patterns: Mapping[str, PartitionSpec]
    tile: Shape = ()

    def __post_init__(self) -> None:
        if self.shard not in get_args(Shard):
            raise ValueError(f'`shard` is "optimizer", "gradients" or "all", got {self.shard!r}.')
        for pattern, wanted in self.patterns.items():
            if not isinstance(pattern, str) or not isinstance(wanted, PartitionSpec):
                raise TypeError(
                    f"`layout` maps patterns, as text, to `jax.sharding.PartitionSpec`s, got {pattern!r}: {wanted!r}."
                )
            try:
                re.compile(pattern)
            except re.error as error:
                raise ValueError(f"`layout` has the pattern {pattern!r}, no regular expression: {error}.") from None
            unknown = [axis for axis in _axes_of(wanted) if axis not in self.mesh.shape]
            if unknown:
                raise ValueError(
                    f"`layout[{pattern!r}]` names the axis {unknown[0]!r}, and the mesh has {', '.join(self.mesh.axis_names)}."
                )
            axes = _axes_of(wanted)
            if len(set(axes)) < len(axes):
                twice = next(axis for axis in axes if axes.count(axis) > 1)
                raise ValueError(
                    f"`layout[{pattern!r}]` is {wanted} and names the axis {twice!r} twice. Name each once."
                )

    def shardings(self, tree: PyTree, is_state: bool = True) -> list[NamedSharding]:
        """How each leaf of `tree` lies on the mesh.

        Args:
            tree: A state, of arrays or their shapes, some in wrappers.
            is_state: Whether it is known to be a whole one, in which every pattern is found.

        Raises:
            ValueError: A pattern is found in no parameter, or two in one; or it does not fit there.
        """
        leaves = state_leaves(tree)
        wanted = self._wanted(leaves, is_state)
        companions = _Companions(leaves, wanted)
        shardings: list[NamedSharding] = []
        for leaf in leaves:
            base = wanted.get(companions.parameter(leaf).path if leaf.is_optimizer else leaf.path, PartitionSpec())
            split = self._split(leaf, base) if self._splits(leaf) else base
            split = PartitionSpec(None, *split) if leaf.is_stacked and len(split) else split
            shardings.append(NamedSharding(self.mesh, split))
        return shardings

    def is_split(self, tree: PyTree) -> list[bool]:
        """For each leaf of `tree`, whether it is an array for all replicas, and of a kind that is split."""
        return [
            self._splits(leaf) and not leaf.is_own and bool(leaf.shape) and not _is_key(leaf.value)
            for leaf in state_leaves(tree)
        ]

    def part(self, x: Any) -> NamedSharding:
        """How an array of this shape is split, if it is of a kind that is, and no pattern says otherwise."""
        leaf = StateLeaf("value", (), jnp.shape(x), x, is_optimizer=True)
        return NamedSharding(self.mesh, self._split(leaf, PartitionSpec()))

    def reduced(self, state: PyTree) -> Callable[[PyTree], PyTree] | None:
        """What brings reduced gradients to the devices that hold that part of the optimizer's state; None if nothing has to."""
        if self.shard == "optimizer":
            return None
        leaves = state_leaves(state)
        wanted = self._wanted(leaves, is_state=True)
        companions = _Companions(leaves, wanted)

        def one(path: Any, x: Any) -> Any:
            gradient = StateLeaf("gradient", _keys(path), jnp.shape(x), x, is_optimizer=True)
            parameter = companions.parameter(gradient)
            if parameter is gradient:
                return x
            split = self._split(gradient, wanted.get(parameter.path, PartitionSpec()))
            return lax.with_sharding_constraint(x, NamedSharding(self.mesh, split))

        return lambda tree: jax.tree_util.tree_map_with_path(one, tree)

    def _wanted(self, leaves: Sequence[StateLeaf], is_state: bool) -> dict[tuple[str, ...], PartitionSpec]:
        """How patterns split the parameters that they are found in, by their paths."""
        parameters = [leaf for leaf in leaves if not leaf.is_optimizer]
        wanted: dict[tuple[str, ...], PartitionSpec] = {}
        unused = set(self.patterns)
        for leaf in parameters:
            path = _SEPARATOR.join(leaf.path)
            found = [pattern for pattern in self.patterns if re.search(pattern, path)]
            if len(found) > 1:
                raise ValueError(
                    f"{leaf.name} ({path}) is matched by {len(found)} patterns of `layout`, {_listed(found)}, and is split in "
                    "one way. Make them exclude each other."
                )
            for pattern in found:
                self._check(pattern, leaf)
                wanted[leaf.path] = self.patterns[pattern]
                unused.discard(pattern)
        # What is put may be any tree, but one in which some patterns are found is meant to be a state. One of metrics has none.
        is_model = len(unused) < len(self.patterns) or (is_state and any(not leaf.is_stacked for leaf in parameters))
        if unused and is_model:
            raise ValueError(
                f"`layout` has the pattern {min(unused)!r}, which matches no parameter. There are "
                f"{_listed([_SEPARATOR.join(leaf.path) for leaf in parameters])}."
            )
        return wanted

    def _splits(self, leaf: StateLeaf) -> bool:
        return leaf.is_optimizer or self.shard == "all"

    def _check(self, pattern: str, leaf: StateLeaf) -> None:
        """Raises ValueError if the leaf cannot be split as the pattern says."""
        wanted = self.patterns[pattern]
        if len(wanted) > len(leaf.shape):
            raise ValueError(
                f"`layout[{pattern!r}]` is {wanted}, for {len(wanted)} dims, and {leaf.name} is {dtype_and_shape(leaf.value)}."
            )
        for dim, (size, axes) in enumerate(zip(leaf.shape, wanted, strict=False)):
            parts = math.prod(self.mesh.shape[axis] for axis in _axes_of([axes]))
            if size % parts:
                raise ValueError(
                    f"`layout[{pattern!r}]` splits dim {dim} of {leaf.name}, {dtype_and_shape(leaf.value)}, over "
                    f"{axes!r}, and {size} is "
                    f"no multiple of {parts}. Split another dim, or make this one a multiple."
                )

    def _split(self, leaf: StateLeaf, base: PartitionSpec) -> PartitionSpec:
        """`base`, and the largest dim that is left and divides over the data axis."""
        parts = self.mesh.shape[self.axis]
        if parts == 1 or self.axis in _axes_of(base) or _is_key(leaf.value):
            return base
        axes = [*base, *[None] * (len(leaf.shape) - len(base))]
        steps = [1] * len(leaf.shape)
        for dim, step in zip(reversed(range(len(steps))), reversed(self.tile), strict=False):
            steps[dim] = step
        fits = [bool(size) and size % (parts * step) == 0 for size, step in zip(leaf.shape, steps, strict=True)]
        free = [dim for dim, can in enumerate(fits) if can and axes[dim] is None]
        if not free:
            return base
        axes[max(free, key=lambda dim: leaf.shape[dim])] = self.axis
        return PartitionSpec(*axes)


def state_leaves(state: PyTree) -> list[StateLeaf]:
    """The leaves of a state, in order."""
    leaves: list[StateLeaf] = []

    def visit(prefix: tuple[Any, ...], tree: PyTree, is_optimizer: bool) -> None:
        stops = lambda node: is_distributed(node) or (not is_optimizer and _is_of_optimizer(node))
        for path, node in jax.tree_util.tree_flatten_with_path(tree, is_leaf=stops)[0]:
            path = (*prefix, *path)
            if is_distributed(node):
                add(path, node.tree, is_optimizer, node._is_stacked, not node._is_replicated)
            elif not is_optimizer and _is_of_optimizer(node):
                visit(path, node, True)
            else:
                add(path, node, is_optimizer, False, False)

    def add(prefix: tuple[Any, ...], tree: PyTree, is_optimizer: bool, is_stacked: bool, is_own: bool) -> None:
        for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
            keys = _keys((*prefix, *path))
            shape = np.shape(leaf)[1:] if is_stacked else np.shape(leaf)
            by_name = is_optimizer or not _OPTIMIZER.isdisjoint(keys)
            name = "state" + jax.tree_util.keystr((*prefix, *path))
            leaves.append(StateLeaf(name, keys, shape, leaf, by_name, is_stacked, is_own))

    visit((), state, False)
    return leaves


class _Companions:
    """Which parameter an optimizer keeps a leaf for: the one of its shape whose path ends like its own, the longest way.

    Of several, it is one that a pattern is found in: the others are copies of it.
    """

    def __init__(self, leaves: Sequence[StateLeaf], wanted: Collection[tuple[str, ...]]):
        self._by_end: dict[tuple[tuple[str, ...], Shape], StateLeaf] = {}
        for leaf in sorted(leaves, key=lambda leaf: leaf.path not in wanted):
            if not leaf.is_optimizer:
                for start in range(len(leaf.path) + 1):
                    self._by_end.setdefault((leaf.path[start:], leaf.shape), leaf)

    def parameter(self, leaf: StateLeaf) -> StateLeaf:
        """That parameter; the leaf itself if there is none."""
        ends = ((leaf.path[start:], leaf.shape) for start in range(len(leaf.path) + 1))
        return next((self._by_end[end] for end in ends if end in self._by_end), leaf)


def _is_of_optimizer(node: Any) -> bool:
    """Whether `node` is what an optimizer of optax, or a policy, keeps."""
    module = type(node).__module__
    return isinstance(node, tuple) and (module.partition(".")[0] == "optax" or module.startswith("jdist._src.sync."))


def _is_key(value: Any) -> bool:
    return jnp.issubdtype(getattr(value, "dtype", np.float32), jax.dtypes.prng_key)


def _keys(path: Sequence[Any]) -> tuple[str, ...]:
    # The state of a `Trainer` lies in a container whose key has no name: its paths are those of the state alone.
    return tuple(filter(None, (jax.tree_util.keystr((key,), simple=True) for key in path)))


def _axes_of(split: Iterable[Any]) -> list[str]:
    return [axis for axes in split if axes is not None for axis in ((axes,) if isinstance(axes, str) else axes)]


def _listed(names: Sequence[str]) -> str:
    return ", ".join(map(repr, names[:6])) + (f" and {len(names) - 6} more" if len(names) > 6 else "")
