"""Distributed values: the wrappers that specify how the leaves of a tree are placed on the devices of a mesh.

Terms:

* *replica*: one copy of the computation, an index along the mesh axis `"replica"`.
* *replicated* (mirrored): the same value on every replica. An unwrapped array is replicated.
* *per-replica*: one value per replica. *Sync-on-read*: one partial value per replica, aggregated when it is read.
  *Sharded*: one value, split over the replicas.
* *replica context*: inside a function that a strategy runs, where values are the plain arrays of one replica.

A wrapper declares a placement: the partition spec of its leaves, the conversion from the block of one device to the value of
one replica, and its inverse. Wrappers can be used anywhere in a tree: in arguments, in the state of a step, and in the results
of a replica function.
"""

import abc
import dataclasses
import enum
from collections.abc import Callable
from typing import Any, ClassVar, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec

from jdist._src.core.migration_hints import explains_attributes
from jdist._src.core.nn_modules import leaves_with_path
from jdist._src.core.tree import PyTree, ReprText, dtype_and_shape, named_leaves, one_line, short_line
from jdist._src.devices.mesh import num_replica_devices
from jdist._src.values.array_checks import check_array, is_on_mesh, mesh_of
from jdist._src.values.remote_array import materialize


@explains_attributes("values")
class DistributedValues(abc.ABC):
    """Base class of the wrappers: a tree of arrays that is placed on the devices of a mesh as the subclass defines.

    It is a frozen pytree. Outside a replica function it has `values`, `read`, `map` and `assign`, and no arithmetic: compute
    with plain arrays inside a replica function, or combine the replicas' values with `Strategy.reduce`.

    Attributes:
        tree: The wrapped tree.
    """

    __slots__ = ()
    __hash__ = None  # pyright: ignore[reportAssignmentType]  # like a `jax.Array`

    _is_replicated: ClassVar[bool] = False  # whether every replica has the same value
    _is_stacked: ClassVar[bool] = False  # whether the leaves on the host are `[replica, ...]`
    tree: PyTree

    @property
    def _arrays(self) -> PyTree:
        """The tree, with the values of its remote arrays."""
        return materialize(self.tree)

    @classmethod
    def _partition_spec(cls, axes: tuple[str, ...]) -> PartitionSpec:
        """Returns the spec of a leaf on a mesh whose replica axes are `axes`: they split its first dimension, if any."""
        return PartitionSpec() if cls._is_replicated else PartitionSpec(axes)

    @classmethod
    def _check_leaf(cls, name: str, leaf: Any, num_replicas: int) -> None:
        """Raises ValueError if `leaf`, as stored on the host, cannot be divided among `num_replicas` replicas."""
        shape = np.shape(leaf)
        if cls._is_stacked and (not shape or shape[0] != num_replicas):
            raise ValueError(
                f"{name} is a {cls.__name__} of {dtype_and_shape(leaf)}, for {shape[0] if shape else 'no'} replicas; this "
                f"strategy has {num_replicas}. A {cls.__name__} can only be used with the strategy that created it: "
                "distribute the data with this strategy, or read the values with `.values`."
            )

    @classmethod
    def _from_block(cls, tree: PyTree) -> PyTree:
        """Returns the value of one replica, given the block of the arrays that one device holds."""
        return jax.tree.map(lambda x: lax.squeeze(x, (0,)), tree) if cls._is_stacked else tree

    @classmethod
    def _to_block(cls, tree: PyTree) -> PyTree:
        """Returns the block that one device holds, given the value of one replica."""
        return jax.tree.map(lambda x: lax.expand_dims(x, (0,)), tree) if cls._is_stacked else tree

    def _rows(self, num_replicas: int) -> PyTree:
        """Returns the value of each replica, with leaves `[replica, ...]`."""
        return self.tree

    @property
    @abc.abstractmethod
    def values(self) -> tuple[PyTree, ...]:
        """One tree per replica of this process."""

    @abc.abstractmethod
    def read(self) -> PyTree:
        """Returns the value of all replicas together as plain arrays."""

    @abc.abstractmethod
    def map(self, fn: Callable[[PyTree], PyTree]) -> Self:
        """Returns `fn` of each replica's value, in the same placement."""

    def _for_num_replicas(self, num_replicas: int) -> Self:
        """Returns an equivalent value for `num_replicas` replicas; or the value itself without an equivalent."""
        return self

    @abc.abstractmethod
    def _assigned_leaf(self, name: str, leaf: jax.Array, value: Any, is_per_replica: bool) -> jax.Array:
        """Returns `value` placed like `leaf` of this tree; `is_per_replica`: its first dimension counts the replicas."""

    def _assign_source(self, wants_rows: bool) -> tuple[PyTree, bool]:
        """Returns the tree to assign to another value, and whether it has one row per replica.

        `wants_rows`: whether the other value stores one row per replica.
        """
        return self.read(), False

    def assign(self, value: PyTree) -> Self:
        """Returns a new value with the same placement: a write by the host program.

        Args:
            value: A tree with the structure of this one: plain values for all replicas, or a `PerReplica` with one per replica.

        Raises:
            ValueError: A shape or the structure differs, or this value is not placed on devices yet.
            TypeError: The dtype of a leaf cannot represent the new value without loss.
        """
        return self._with_tree(self._assigned_tree("assign", value))

    def assign_add(self, value: PyTree) -> Self:
        """Returns a new value with the same placement, with `value` added. See `assign` for arguments and errors."""
        self._check_addition("assign_add", value)
        return self._with_tree(jax.tree.map(jnp.add, self._arrays, self._assigned_tree("assign_add", value)))

    def assign_sub(self, value: PyTree) -> Self:
        """Returns a new value with the same placement, with `value` subtracted. See `assign` for arguments and errors."""
        self._check_addition("assign_sub", value)
        return self._with_tree(jax.tree.map(jnp.subtract, self._arrays, self._assigned_tree("assign_sub", value)))

    def _check_addition(self, method: str, value: PyTree) -> None:  # noqa: B027  # most subclasses accept every value
        """Raises ValueError if the meaning of `method` with `value` is ambiguous."""

    def _with_tree(self, tree: PyTree) -> Self:
        """Returns the same wrapper around another tree."""
        return dataclasses.replace(self, tree=tree)  # pyright: ignore[reportArgumentType]  # every wrapper is a dataclass

    def _assigned_tree(self, method: str, value: PyTree) -> PyTree:
        leaves = named_leaves(f"`{method}`: value", self._arrays)
        for name, leaf in leaves:
            if not is_on_mesh(leaf):
                raise ValueError(
                    f"{name} is {dtype_and_shape(leaf)}, and is not on the devices of a strategy yet. Place it first: "
                    "`strategy.put(value)`."
                )
        if any(getattr(node, "shapes", None) for node in (self, value)):
            raise ValueError(
                f"`{method}` to {one_line(self)} of {one_line(value)}: values with different shapes on the replicas cannot be "
                "assigned. Make a new value: `strategy.distribute_values_from_function`."
            )
        is_per_replica = False
        if isinstance(value, DistributedValues):
            mesh = mesh_of(leaves[0][1])
            num_replicas = len(leaves[0][1]) if self._is_stacked else num_replica_devices(mesh)
            for name, leaf in named_leaves(f"`{method}`: the new value", value.tree):
                value._check_leaf(name, leaf, num_replicas)
            value, is_per_replica = value._assign_source(self._is_stacked)
        if jax.tree.structure(value) != jax.tree.structure(self.tree):
            raise ValueError(
                f"`{method}` received a value with the structure {short_line(jax.tree.structure(value))} for {one_line(self)}. "
                "Pass a tree with the structure of the value that it replaces."
            )
        pairs = zip(leaves, jax.tree.leaves(value), strict=True)
        new_leaves = [self._assigned_leaf(name, leaf, new, is_per_replica) for (name, leaf), new in pairs]
        return jax.tree.unflatten(jax.tree.structure(self.tree), new_leaves)

    def __repr__(self) -> str:
        parts = [repr(jax.tree.map(ReprText.of, self.tree))]
        for option in dataclasses.fields(self)[1:]:  # pyright: ignore[reportArgumentType]  # every wrapper is a dataclass
            value = getattr(self, option.name)
            if value != option.default:
                parts.append(value.name if isinstance(value, enum.Enum) else f"{option.name}={value!r}")
        return f"{type(self).__name__}({', '.join(parts)})"


def named_values(name: str, tree: PyTree) -> list[tuple[str, Any]]:
    """Returns each leaf of `tree` with its name, `name` followed by the leaf's path; wrappers are left out of the path."""
    nodes = leaves_with_path(tree, is_leaf=is_distributed)
    return [
        leaf
        for path, node in nodes
        for leaf in named_leaves(name + jax.tree_util.keystr(path), node.tree if is_distributed(node) else node)
    ]


def is_distributed(node: object) -> bool:
    """Returns whether `node` is a wrapper. Used as `is_leaf` of `jax.tree` functions."""
    return isinstance(node, DistributedValues)


def cast_without_loss(name: str, value: Any, shape: tuple[int, ...], dtype: Any) -> Any:
    """Returns `value` as an array of this shape and dtype.

    Raises:
        ValueError: `value` has another shape.
        TypeError: This dtype cannot represent values of its kind.
    """
    check_array(name, value)
    if np.shape(value) != shape:
        raise ValueError(
            f"{name} has the shape {list(shape)}, and the new value has {list(np.shape(value))}. A value keeps its shape: "
            "reshape the new value, or place it separately with `strategy.put`."
        )
    value_dtype = jax.dtypes.result_type(value)
    if any(jnp.issubdtype(kind, jax.dtypes.prng_key) for kind in (value_dtype, dtype)):
        is_lossless = value_dtype == dtype
    elif jnp.issubdtype(dtype, jnp.integer) and jnp.issubdtype(value_dtype, jnp.integer):
        # A host array may hold 64-bit integers where `result_type` reports 32 bits.
        is_lossless = value_dtype == dtype and isinstance(value, jax.Array)
        if not is_lossless:
            numbers, limits = np.asarray(value), jnp.iinfo(dtype)
            is_lossless = not numbers.size or bool(limits.min <= numbers.min() and numbers.max() <= limits.max)
    else:
        is_lossless = jnp.can_cast(value_dtype, dtype, "same_kind")
    if not is_lossless:
        raise TypeError(
            f"{name} is {dtype} and cannot hold {dtype_and_shape(value)} without loss. Cast the new value first if the loss is "
            "intended."
        )
    if jnp.issubdtype(dtype, jax.dtypes.prng_key):
        return value
    return value.astype(dtype) if isinstance(value, jax.Array) else np.asarray(value, dtype)


def _unsupported(operator: str) -> Callable[..., Any]:
    def raise_type_error(self: DistributedValues, *_: Any, **__: Any) -> Any:
        raise TypeError(
            f"`{operator}` is not defined for {one_line(self)}, whose values are stored on several devices. Compute inside a "
            "replica function (`strategy.run(fn, (value,))`), combine the replicas' values (`.read()`, `strategy.reduce`, "
            f"`strategy.gather`), or access the value of each replica (`.values`, `.map(fn)`).{_unpacking(operator, self)}"
            f"{_as_number(operator, self)}"
        )

    raise_type_error.__doc__ = f"Raises TypeError: `{operator}` is not defined for the values of several replicas."
    return raise_type_error


def _unpacking(operator: str, value: DistributedValues) -> str:
    """Returns the line to write where a wrapper around a tuple or dict was unpacked or indexed."""
    if operator not in ("iter", "[]") or not isinstance(value.tree, (tuple, list, dict)):
        return ""
    kind = type(value).__name__
    if isinstance(value.tree, dict):
        line = f"`parts = {{name: jdist.{kind}(leaf) for name, leaf in value.tree.items()}}`"
    else:
        line = f"`x, y = map(jdist.{kind}, value.tree)`"
    return f" This {kind} wraps a {type(value.tree).__name__}. To unpack it, wrap each element: {line}."


def _as_number(operator: str, value: DistributedValues) -> str:
    """Returns the lines to write where one number per replica was used as one number."""
    leaves = jax.tree.leaves(value.tree)
    is_number = value._is_stacked and len(leaves) == 1 and len(np.shape(leaves[0])) == 1
    if operator not in ("item", "format", "float", "int") or not is_number:
        return ""
    return (
        ' This value has one number per replica. For their mean, write `float(strategy.reduce("mean", value, axis=None))`, or '
        'return `jdist.all_reduce("mean", loss)` from the step, which is one plain array.'
    )


def _format(self: DistributedValues, spec: str) -> str:
    return str(self) if not spec else _unsupported("format")(self)


for _operator, _names in {
    "+": "add radd pos", "-": "sub rsub neg", "*": "mul rmul", "/": "truediv rtruediv", "//": "floordiv rfloordiv",
    "%": "mod rmod", "divmod": "divmod rdivmod", "<<": "lshift rlshift", ">>": "rshift rrshift", "**": "pow rpow",
    "@": "matmul rmatmul", "<": "lt", "<=": "le", ">": "gt", ">=": "ge",
    "&": "and rand", "|": "or ror", "^": "xor rxor", "~": "invert", "abs": "abs", "[]": "getitem", "len": "len",
    "iter": "iter", "bool": "bool", "int": "int index", "float": "float", "complex": "complex",
    "numpy": "array array_ufunc", "jax.numpy": "jax_array",
}.items():  # fmt: skip
    for _name in _names.split():
        setattr(DistributedValues, f"__{_name}__", _unsupported(_operator))
for _name in ("item", "tolist"):
    setattr(DistributedValues, _name, _unsupported(_name))
DistributedValues.__format__ = _format
