"""`StateSharding`: over which mesh axes each dimension of each leaf of a state is split.

A leaf is split in two stages. First, a *pattern* of `layout` that matches the path of a parameter defines its split for tensor
parallelism, of a list of rules the first one that matches. Where no pattern matches, the partition metadata of flax does
(`nn.with_partitioning`, `nn.with_logical_partitioning`, `out_sharding` of an `nnx.Variable`). The moments
that an optimizer stores for a parameter are split like the parameter. Second, if data parallelism does not need a full copy of
the leaf on every device, its largest remaining dimension that is divisible is split over the data axis.

The leaves of optimizer states are recognized by declared facts:

* the class of a node: the states of optax and `jdist.sync` are classes of these packages; `nnx.Optimizer` stores
  `nnx.optimizer.OptState` variables;
* the key under which a state is stored: `opt_state`, as in flax's `TrainState` and `jdist.TrainState`, `optimizer` or
  `optimizer_state`.

`optax.tree_map_params` is not used: it calls `init` of the optimizer with a placeholder for the parameters, and a strategy
receives the state but not the optimizer. It also fails for transformations that inspect their parameters (`optax.lbfgs`). A
warning names each `NamedTuple` or dataclass that looks like the state of an optimizer and is not recognized.

Source:
    S. Rajbhandari et al., "ZeRO: memory optimizations toward training trillion parameter models", arXiv:1910.02054: the
    three stages. Y. Xu et al., "GSPMD: general and scalable parallelization for ML computation graphs",
    arXiv:2105.04663: one program, with annotations of the shardings of its values.
"""

import dataclasses
import math
import re
import sys
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, TypeAlias, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jdist._src.core import source_lines
from jdist._src.core.errors import UnrecognizedOptimizerStateWarning
from jdist._src.core.nn_modules import is_box, leaves_with_path
from jdist._src.core.partition_specs import axes_of
from jdist._src.core.tree import PyTree, dtype_and_shape, is_named_tuple, one_line
from jdist._src.devices.mesh import HOST_MEMORY
from jdist._src.values.base import is_distributed
from jdist._src.values.replica_rows import Shape

Shard: TypeAlias = Literal["optimizer", "gradients", "all"]
Layout: TypeAlias = Mapping[str, PartitionSpec] | Sequence[tuple[str, Any]]
_OPTIMIZER_KEYS = frozenset(("opt_state", "optimizer", "optimizer_state"))
_SEPARATOR = "/"


@dataclasses.dataclass(frozen=True)
class StateLeaf:
    """A leaf of a state.

    Attributes:
        name: Its name in error messages.
        path: The keys of its path.
        shape: Its shape on one replica.
        value: The array, or its shape and dtype.
        is_optimizer: Whether it is part of the state of an optimizer.
        is_stacked: Whether it is `[replica, ...]` on the host.
        is_varying: Whether the replicas hold different values or shards.
        metadata: The axis names of flax's partition metadata; None without metadata.
    """

    name: str
    path: tuple[str, ...]
    shape: Shape
    value: Any
    is_optimizer: bool
    is_stacked: bool = False
    is_varying: bool = False
    metadata: PartitionSpec | None = None


@dataclasses.dataclass(frozen=True)
class StateSharding:
    """The rules that split the state of a model over a mesh.

    Attributes:
        mesh: The devices.
        axis: The mesh axis over which ZeRO splits; None if it does not split.
        shard: The leaves that ZeRO splits: the optimizer's state, or all. `"gradients"` also splits the gradients.
        patterns: Maps regular expressions, searched in the paths of parameters (`params/dense/kernel`), to their
            `PartitionSpec`.
        tile: ZeRO splits the last dimensions only into multiples of these sizes.
        host_tile: None, or sizes: an array of an optimizer is stored in host memory if the last dimensions of its parts are
            multiples of them; `()` for all arrays.
        replica_axes: The mesh axes over which the first dimension of a `[replica, ...]` leaf is split. A leaf is split over the
            other axes of the mesh only.
        first_match: Whether the first pattern that matches applies, and patterns may match nothing. Leaves of one element are
            then replicated.
    """

    mesh: Mesh
    axis: str | None
    shard: Shard
    patterns: Mapping[str, PartitionSpec]
    tile: Shape = ()
    host_tile: Shape | None = None
    replica_axes: tuple[str, ...] = ()
    first_match: bool = False

    def __post_init__(self) -> None:
        if self.shard not in get_args(Shard):
            raise ValueError(f'`shard` must be "optimizer", "gradients" or "all", got {one_line(self.shard)}.')
        for pattern, spec in self.patterns.items():
            if not isinstance(pattern, str) or not isinstance(spec, PartitionSpec):
                raise TypeError(
                    "`layout` must map patterns, which are strings, to `jax.sharding.PartitionSpec`s, got "
                    f"{pattern!r}: {one_line(spec)}."
                )
            source = self._source(pattern)
            try:
                re.compile(pattern)
            except re.error as error:
                raise ValueError(
                    f"`layout` has the pattern {pattern!r}, which is not a regular expression: {error}."
                ) from None
            axes = axes_of(spec)
            unknown_axes = [axis for axis in axes if axis not in self._split_axes]
            if unknown_axes:
                raise ValueError(
                    f"{source} names the axis {unknown_axes[0]!r}, and the mesh has "
                    f"{', '.join(self._split_axes)}{' within a replica' if self.replica_axes else ''}."
                )
            if len(set(axes)) < len(axes):
                duplicate = next(axis for axis in axes if axes.count(axis) > 1)
                raise ValueError(f"{source} is {spec} and names the axis {duplicate!r} twice. Name each axis once.")

    @property
    def _split_axes(self) -> list[str]:
        return [axis for axis in self.mesh.axis_names if axis not in self.replica_axes]

    def shardings(self, tree: PyTree, is_state: bool = True) -> list[NamedSharding]:
        """Returns the sharding of each leaf of `tree`.

        Args:
            tree: A state, of arrays or of their shapes, some in wrappers.
            is_state: Whether `tree` is a complete state, in which every pattern must match a parameter.

        Raises:
            ValueError: A spec does not fit its shape. Without `first_match`: a pattern matches no parameter, or two patterns
                match the same one.

        Warns:
            UnrecognizedOptimizerStateWarning: A node of a complete state looks like the state of an optimizer, is not
                recognized as one, and would be split differently if it were.
        """
        leaves = state_leaves(tree)
        parameter_specs = self._parameter_specs(leaves, is_state)
        if is_state and self.axis is not None and self.shard != "all":
            _warn_of_unrecognized_states(tree, leaves)
        parameter_of = _parameter_finder(leaves, parameter_specs)
        shardings: list[NamedSharding] = []
        for leaf in leaves:
            path = parameter_of(leaf).path if leaf.is_optimizer else leaf.path
            spec = parameter_specs.get(path, PartitionSpec())
            spec = self._with_data_axis(leaf, spec) if leaf.is_optimizer or self.shard == "all" else spec
            if leaf.is_stacked and (len(spec) or self.replica_axes):
                spec = PartitionSpec(self.replica_axes or None, *spec)
            sharding = NamedSharding(self.mesh, spec)
            shardings.append(sharding.with_memory_kind(HOST_MEMORY) if self._is_offloaded(leaf, sharding) else sharding)
        return shardings

    def _is_offloaded(self, leaf: StateLeaf, sharding: NamedSharding) -> bool:
        """Returns whether a leaf is stored in host memory: arrays of optimizers, in complete tiles if they are split."""
        if self.host_tile is None or not leaf.is_optimizer or not leaf.shape or leaf.is_stacked or _is_key(leaf.value):
            return False
        part = sharding.shard_shape(leaf.shape)
        pairs = zip(reversed(part), reversed(self.host_tile), strict=False)
        return part == leaf.shape or all(size % multiple == 0 for size, multiple in pairs)

    def is_split(self, tree: PyTree) -> list[bool]:
        """Returns for each leaf of `tree` whether `shard` includes it, and it is an array that is not varying."""
        return [
            self.axis is not None
            and (leaf.is_optimizer or self.shard == "all")
            and not leaf.is_varying
            and bool(leaf.shape)
            and not _is_key(leaf.value)
            for leaf in state_leaves(tree)
        ]

    def array_sharding(self, x: Any) -> NamedSharding:
        """Returns the sharding of an array of this shape that `shard` includes and no pattern matches."""
        leaf = StateLeaf("value", (), jnp.shape(x), x, is_optimizer=True)
        return NamedSharding(self.mesh, self._with_data_axis(leaf, PartitionSpec()))

    def gradient_constraint(self, state: PyTree) -> Callable[[PyTree], PyTree] | None:
        """Returns a function that constrains reduced gradients to the sharding of the optimizer's state, or None.

        The function accepts any tree: a leaf is a gradient if a parameter has its shape and the end of its path.
        """
        if self.shard == "optimizer":
            return None
        leaves = state_leaves(state)
        parameter_specs = self._parameter_specs(leaves, is_state=True)
        parameter_of = _parameter_finder(leaves, parameter_specs)

        def constrain(path: Any, x: Any) -> Any:
            gradient = StateLeaf("gradient", _keys(path), jnp.shape(x), x, is_optimizer=True)
            parameter = parameter_of(gradient)
            if parameter is gradient:
                return x
            spec = self._with_data_axis(gradient, parameter_specs.get(parameter.path, PartitionSpec()))
            return lax.with_sharding_constraint(x, NamedSharding(self.mesh, spec))

        return lambda tree: jax.tree.structure(tree).unflatten([constrain(*pair) for pair in leaves_with_path(tree)])

    def _parameter_specs(self, leaves: Sequence[StateLeaf], is_state: bool) -> dict[tuple[str, ...], PartitionSpec]:
        """Returns the spec of each parameter that a pattern matches or that has partition metadata, by its path."""
        parameters = [leaf for leaf in leaves if not leaf.is_optimizer]
        specs: dict[tuple[str, ...], PartitionSpec] = {}
        unused_patterns = set() if self.first_match else set(self.patterns)
        misfits: list[str] = []
        for leaf in parameters:
            if self.first_match and math.prod(leaf.shape) == 1:
                continue
            path = _SEPARATOR.join(leaf.path)
            matches = [pattern for pattern in self.patterns if re.search(pattern, path)]
            if self.first_match:
                matches = matches[:1]
            if len(matches) > 1:
                raise ValueError(
                    f"{leaf.name} ({path}) is matched by {len(matches)} patterns of `layout`, {_listed(matches)}. Make the "
                    "patterns exclude each other."
                )
            for pattern in matches:
                specs[leaf.path] = spec = self.patterns[pattern]
                if self.first_match and len(spec) > len(leaf.shape):
                    misfits.append(f"{path}, {dtype_and_shape(leaf.value)}, by ({pattern!r}, {spec})")
                    continue
                self._check_fit(self._source(pattern), spec, leaf, "Split another dim, or pad this one.")
                unused_patterns.discard(pattern)
            if not matches and leaf.metadata is not None:
                specs[leaf.path] = self._on_mesh(leaf.metadata)
                fix = f"Change the metadata, or override it: `layout={{{re.escape(path)!r}: PartitionSpec()}}`."
                self._check_fit("its partition metadata", specs[leaf.path], leaf, fix)
        if misfits:
            listed = "\n  ".join(misfits)
            raise ValueError(
                f"{len(misfits)} leaves have fewer dims than the first rule of `layout` that matches them:\n  {listed}\n"
                "Add a rule for these leaves before it, such as `(path, PartitionSpec())`."
            )
        # A tree passed to `put` may be any tree; if it matches some of the patterns, it must be a state, and match all. A state
        # of metrics matches none.
        is_model_state = len(unused_patterns) < len(self.patterns) or (
            is_state and any(not leaf.is_stacked for leaf in parameters)
        )
        if unused_patterns and is_model_state:
            raise ValueError(
                f"`layout` has the pattern {min(unused_patterns)!r}, which matches no parameter. The parameters are "
                f"{_listed([_SEPARATOR.join(leaf.path) for leaf in parameters])}."
            )
        return specs

    def _source(self, pattern: str) -> str:
        """Returns the rule as messages name it."""
        return f"The rule {pattern!r} of `layout`" if self.first_match else f"`layout[{pattern!r}]`"

    def _on_mesh(self, metadata: PartitionSpec) -> PartitionSpec:
        """Returns `metadata` without the names that are not axes of the mesh: these dimensions are not split."""
        dims = [tuple(axis for axis in axes_of([axes]) if axis in self._split_axes) for axes in metadata]
        return PartitionSpec(*[axes[0] if len(axes) == 1 else axes or None for axes in dims] if any(dims) else ())

    def _check_fit(self, source: str, spec: PartitionSpec, leaf: StateLeaf, fix: str) -> None:
        """Raises ValueError if the leaf cannot be split by `spec`, which comes from `source`."""
        if len(spec) > len(leaf.shape):
            raise ValueError(
                f"{source} is {spec}, for {len(spec)} dims, and {leaf.name} is {dtype_and_shape(leaf.value)}."
            )
        for dim, (size, axes) in enumerate(zip(leaf.shape, spec, strict=False)):
            num_parts = math.prod(self.mesh.shape[axis] for axis in axes_of([axes]))
            if size % num_parts:
                raise ValueError(
                    f"{source} splits dim {dim} of {leaf.name}, {dtype_and_shape(leaf.value)}, over {axes!r}, and {size} is "
                    f"not a multiple of {num_parts}. {fix}"
                )

    def _with_data_axis(self, leaf: StateLeaf, spec: PartitionSpec) -> PartitionSpec:
        """Returns `spec` with the largest remaining dim that is divisible split over the data axis."""
        num_parts = 1 if self.axis is None else self.mesh.shape[self.axis]
        if num_parts == 1 or self.axis in axes_of(spec) or _is_key(leaf.value):
            return spec
        dims = [*spec, *[None] * (len(leaf.shape) - len(spec))]
        tile = [1] * len(leaf.shape)
        for dim, size in zip(reversed(range(len(tile))), reversed(self.tile), strict=False):
            tile[dim] = size
        is_divisible = [
            bool(size) and size % (num_parts * step) == 0 for size, step in zip(leaf.shape, tile, strict=True)
        ]
        candidates = [dim for dim, divisible in enumerate(is_divisible) if divisible and dims[dim] is None]
        if not candidates:
            return spec
        dims[max(candidates, key=lambda dim: leaf.shape[dim])] = self.axis
        return PartitionSpec(*dims)


def layout_rules(layout: Any) -> dict[str, Any]:
    """Returns the fields `patterns` and `first_match` of `StateSharding` for the argument `layout` of a strategy.

    Raises:
        TypeError: It is not a mapping, and not a list of rules.

    Example:
        >>> layout_rules(
        ...     [("kernel", PartitionSpec("data")), ("bias", None), (".*", ("data",))]
        ... )["patterns"]
        {'kernel': P('data',), 'bias': P(), '.*': P('data',)}
    """
    if layout is None or isinstance(layout, Mapping):
        return {"patterns": dict(layout or {}), "first_match": False}
    if not isinstance(layout, (list, tuple)):
        raise TypeError(
            "`layout` maps patterns to `PartitionSpec`s, or is a list of pairs of them, of which the first match applies, got "
            f"{type(layout).__name__}."
        )
    patterns: dict[str, PartitionSpec] = {}
    for number, rule in enumerate(layout):
        is_pair = isinstance(rule, (list, tuple)) and len(rule) == 2 and isinstance(rule[0], str)
        if not is_pair or not isinstance(rule[1], PartitionSpec | tuple | None):
            raise TypeError(
                f"`layout[{number}]` must be a pair of a regular expression and a `PartitionSpec`, a tuple or None, got "
                f"{one_line(rule)}."
            )
        pattern, spec = rule
        patterns.setdefault(pattern, spec if isinstance(spec, PartitionSpec) else PartitionSpec(*spec or ()))
    return {"patterns": patterns, "first_match": True}


def state_leaves(state: PyTree) -> list[StateLeaf]:
    """Returns the leaves of a state, in the order of `jax.tree.leaves`."""
    leaves: list[StateLeaf] = []

    def visit(path: tuple[Any, ...], node: Any, parent: StateLeaf) -> None:
        if is_distributed(node):
            is_varying = not node._is_replicated
            visit(path, node.tree, dataclasses.replace(parent, is_stacked=node._is_stacked, is_varying=is_varying))
            return
        if not parent.is_optimizer and _is_optimizer_state(node):
            parent = dataclasses.replace(parent, is_optimizer=True)
        metadata = partition_metadata(node)
        if metadata is not None:
            parent = dataclasses.replace(parent, metadata=metadata)

        def is_next(child: Any) -> bool:
            is_declared = is_distributed(child) or partition_metadata(child) is not None
            return child is not node and (is_declared or (not parent.is_optimizer and _is_optimizer_state(child)))

        for child_path, child in leaves_with_path(node, is_leaf=is_next):
            full_path = (*path, *child_path)
            if is_next(child):
                visit(full_path, child, parent)
                continue
            keys = _keys(full_path)
            leaves.append(
                dataclasses.replace(
                    parent,
                    name="state" + jax.tree_util.keystr(full_path),
                    path=keys,
                    shape=np.shape(child)[1:] if parent.is_stacked else np.shape(child),
                    value=child,
                    is_optimizer=parent.is_optimizer or not _OPTIMIZER_KEYS.isdisjoint(keys),
                )
            )

    visit((), state, StateLeaf("state", (), (), None, is_optimizer=False))
    return leaves


def _parameter_finder(
    leaves: Sequence[StateLeaf], paths_with_spec: Collection[tuple[str, ...]]
) -> Callable[[StateLeaf], StateLeaf]:
    """Returns a function from a leaf to the parameter for which an optimizer stores it, or to the leaf without one.

    The parameter has the same shape, and the longest common end of their paths. If several parameters match, those with a spec
    are preferred: the others are copies, such as moving averages.
    """
    by_path_end: dict[tuple[tuple[str, ...], Shape], StateLeaf] = {}
    for leaf in sorted(leaves, key=lambda leaf: leaf.path not in paths_with_spec):
        if not leaf.is_optimizer:
            for end in _path_ends(leaf):
                by_path_end.setdefault(end, leaf)
    return lambda leaf: next((by_path_end[end] for end in _path_ends(leaf) if end in by_path_end), leaf)


def _path_ends(leaf: StateLeaf) -> Iterator[tuple[tuple[str, ...], Shape]]:
    """Yields the ends of the path of the leaf, the longest first, each with the shape of the leaf."""
    return ((leaf.path[start:], leaf.shape) for start in range(len(leaf.path) + 1))


def _is_optimizer_state(node: Any) -> bool:
    """Returns whether the class of `node` declares it as the state of an optimizer of optax, `jdist.sync` or nnx."""
    if isinstance(node, tuple):
        module = type(node).__module__
        return module.partition(".")[0] == "optax" or module.startswith("jdist._src.sync.")
    nnx_state = getattr(getattr(sys.modules.get("flax.nnx"), "optimizer", None), "OptState", ())
    return isinstance(node, nnx_state)


def partition_metadata(node: Any) -> PartitionSpec | None:
    """Returns the axis names of a linen box (`Partitioned`, `LogicallyPartitioned`) or an nnx variable; None without names.

    Logical names are translated by their rules, or the rules of the current context; a name without a rule stays unsplit.
    """
    partitioned = getattr(sys.modules.get("flax.core.meta"), "Partitioned", ())
    if isinstance(node, partitioned):
        linen = sys.modules.get("flax.linen")
        if isinstance(node, getattr(linen, "LogicallyPartitioned", ())):
            return linen.logical_to_mesh_axes(node.names, node.rules)  # pyright: ignore[reportOptionalMemberAccess]
        return node.get_partition_spec()
    nnx = sys.modules.get("flax.nnx")
    if not isinstance(node, getattr(nnx, "Variable", ())) or not node.get_metadata().get("out_sharding"):
        return None
    return nnx.get_partition_spec(node).get_value()  # pyright: ignore[reportOptionalMemberAccess]


def _warn_of_unrecognized_states(state: PyTree, leaves: Sequence[StateLeaf]) -> None:
    """Warns of each record with a field that has the structure and the shapes of parameters outside the record."""
    records = [(path, _keys(path), record) for path, record in _records(state)]
    for path, keys, record in records:
        # Parameters in a record of the same class are another model's, such as a target network.
        excluded = [other for _, other, twin in records if type(twin) is type(record)]
        parameters = [leaf for leaf in leaves if not leaf.is_optimizer and not _is_under(leaf, excluded)]
        path_ends = {end for leaf in parameters for end in _path_ends(leaf)}
        fields: dict[str, list[StateLeaf]] = {}
        for leaf in leaves:
            if leaf.shape and not leaf.is_optimizer and _is_under(leaf, [keys]):
                fields.setdefault(leaf.path[len(keys)], []).append(leaf)
        for field, field_leaves in fields.items():
            ends = [(leaf.path[len(keys) + 1 :], leaf.shape) for leaf in field_leaves]
            if all(end[0] and end in path_ends for end in ends):
                frame = source_lines.caller_frame()
                message = (
                    f"state{jax.tree_util.keystr(path)} ({type(record).__name__}) looks like the state of an optimizer: "
                    f"`{field}` has the structure and the shapes of parameters. It is not recognized as one, so it is sharded "
                    "like parameters. If it is one, store it under the key `opt_state`, `optimizer_state` or `optimizer`. The "
                    "states of optax, `jdist.sync` and `nnx.Optimizer` are recognized by their classes."
                )
                file, line = (frame.file, frame.line) if frame else (__file__, 0)
                warnings.warn_explicit(message, UnrecognizedOptimizerStateWarning, file, line, registry=_warned)
                break


_warned: dict[str | tuple[str, type[Warning], int], int] = {}  # the registry of warnings that are shown once per line


def _is_under(leaf: StateLeaf, paths: Iterable[tuple[str, ...]]) -> bool:
    return any(leaf.path[: len(path)] == path for path in paths)


def _records(state: PyTree) -> list[tuple[tuple[Any, ...], Any]]:
    """Returns path and value of each `NamedTuple` and dataclass below the root of `state`, except for optimizer states."""
    records: list[tuple[tuple[Any, ...], Any]] = []

    def visit(path: tuple[Any, ...], node: Any) -> None:
        is_record = lambda child: is_named_tuple(child) or (dataclasses.is_dataclass(child) and not is_box(child))
        is_next = lambda child: child is not node and is_record(child)
        for child_path, child in leaves_with_path(node, is_leaf=is_next):
            if is_next(child) and not is_distributed(child) and not _is_optimizer_state(child):
                records.append(((*path, *child_path), child))
                visit((*path, *child_path), child)

    visit((), state)
    return records


def _is_key(value: Any) -> bool:
    return jnp.issubdtype(getattr(value, "dtype", np.float32), jax.dtypes.prng_key)


def _keys(path: Sequence[Any]) -> tuple[str, ...]:
    # The state of a `Trainer` is stored in a container whose key is an empty name: paths do not include it.
    return tuple(filter(None, (jax.tree_util.keystr((key,), simple=True) for key in path)))


def _listed(names: Sequence[str]) -> str:
    return ", ".join(map(repr, names[:6])) + (f" and {len(names) - 6} more" if len(names) > 6 else "")
