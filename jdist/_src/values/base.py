"""Values that live on many devices.

Words, used the same way everywhere:

* *replica*: one copy of the computation, an index along the mesh axis `"replica"`.
* *mirrored*: the same on every replica. What is not wrapped is mirrored: a plain array.
* *per-replica*: one value a replica. *Sync-on-read*: one partial value a replica, aggregated when it is read. *Sharded*:
  one value, split over the replicas.
* *replica context*: inside a function that a strategy runs. There nobody sees a wrapper, only one replica's plain arrays.

A wrapper is a placement: it says how leaves lie on the mesh (`spec`), how they enter a replica and how they leave it.
Wrappers stand anywhere in a tree: in arguments, in the state of a step, in what a replica function returns.
"""

import abc
import dataclasses
import enum
from collections.abc import Callable
from typing import Any, ClassVar, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from jdist._src.core.tree import PyTree, dtype_and_shape, named_leaves
from jdist._src.values.arrays import check_array, is_on_mesh, mesh_of, num_replicas_on


class DistributedValues(abc.ABC):
    """A tree of arrays that lies on the devices of a mesh in a way that its class names.

    It is a frozen pytree. Outside a replica function it offers `values`, `read`, `map` and `assign`, and no arithmetic:
    what a sum of two values on eight devices should mean is said by a replica function, or by `Strategy.reduce`.
    """

    __slots__ = ()
    __hash__ = None  # pyright: ignore[reportAssignmentType]  # like a `jax.Array`

    agrees: ClassVar[bool] = False  # whether every replica sees the same
    stacked: ClassVar[bool] = False  # whether the host sees `[replica, ...]`
    tree: PyTree

    @staticmethod
    @abc.abstractmethod
    def spec(axes: tuple[str, ...]) -> PartitionSpec:
        """How a leaf lies on a mesh whose replica axes are `axes`."""

    @staticmethod
    @abc.abstractmethod
    def check(name: str, leaf: Any, num_replicas: int) -> None:
        """Raises ValueError if `leaf`, as the host sees it, does not fit so many replicas."""

    @staticmethod
    def enter(tree: PyTree) -> PyTree:
        """From what one device holds to what the replica function sees."""
        return tree

    @staticmethod
    def leave(tree: PyTree) -> PyTree:
        """From what the replica function gives to what one device holds."""
        return tree

    @abc.abstractmethod
    def rows(self, num_replicas: int) -> PyTree:
        """What each replica holds, leaves `[replica, ...]`."""

    @property
    @abc.abstractmethod
    def values(self) -> tuple[PyTree, ...]:
        """One tree a replica of this process."""

    @abc.abstractmethod
    def read(self) -> PyTree:
        """The value as plain arrays that every replica together holds."""

    @abc.abstractmethod
    def map(self, fn: Callable[[PyTree], PyTree]) -> Self:
        """The same placement of `fn` of each replica's value."""

    def over(self, num_replicas: int) -> Self:
        """The same value for so many replicas, if it has a meaning for any number of them; else as it is."""
        return self

    @abc.abstractmethod
    def _assigned_leaf(self, name: str, leaf: jax.Array, value: Any, own: bool) -> jax.Array:
        """`value`, meant for `leaf` of this tree, laid out as `leaf` is; `own`: it holds one row a replica."""

    def given(self, to_rows: bool) -> tuple[PyTree, bool]:
        """What another value is assigned from this one, and whether that is one row a replica; `to_rows`: if it has rows."""
        return self.read(), False

    def assign(self, value: PyTree) -> Self:
        """A new value in the same place: what the host program writes.

        Args:
            value: A tree like this one's, of plain values for all replicas, or a `PerReplica` with one for each.

        Raises:
            ValueError: A shape or structure differs, or this value lies on no devices yet.
            TypeError: A dtype would lose what is assigned.
        """
        return self._with_tree(self._incoming("assign", value))

    def assign_add(self, value: PyTree) -> Self:
        """A new value in the same place, with `value` added. As `assign` otherwise."""
        self._check_addition("assign_add", value)
        return self._with_tree(jax.tree.map(jnp.add, self.tree, self._incoming("assign_add", value)))

    def assign_sub(self, value: PyTree) -> Self:
        """A new value in the same place, with `value` subtracted. As `assign` otherwise."""
        self._check_addition("assign_sub", value)
        return self._with_tree(jax.tree.map(jnp.subtract, self.tree, self._incoming("assign_sub", value)))

    def _check_addition(self, word: str, value: PyTree) -> None:  # noqa: B027  # most have nothing to check
        """Raises ValueError if it is not clear what `word` of `value` would mean."""

    def _with_tree(self, tree: PyTree) -> Self:
        """The same wrapper around another tree."""
        return dataclasses.replace(self, tree=tree)  # pyright: ignore[reportArgumentType]  # every wrapper is a dataclass

    def _incoming(self, word: str, value: PyTree) -> PyTree:
        leaves = [(name, _placed(name, leaf)) for name, leaf in named_leaves(f"`{word}`: value", self.tree)]
        if any(getattr(node, "shapes", None) for node in (self, value)):
            raise ValueError(
                f"`{word}` to {self!r} of {value!r}: values of different shapes on the replicas are not assigned. Make a new "
                "one: `strategy.distribute_values_from_function`."
            )
        own = False
        if isinstance(value, DistributedValues):
            for name, leaf in named_leaves(f"`{word}`: the new value", value.tree):
                value.check(name, leaf, self._num_replicas(leaves[0][1]))
            value, own = value.given(self.stacked)
        if jax.tree.structure(value) != jax.tree.structure(self.tree):
            raise ValueError(
                f"`{word}` got a value of the structure {jax.tree.structure(value)} for {self!r}. Give a tree like the "
                "one that it replaces."
            )
        pairs = zip(leaves, jax.tree.leaves(value), strict=True)
        new = [self._assigned_leaf(name, leaf, x, own) for (name, leaf), x in pairs]
        return jax.tree.unflatten(jax.tree.structure(self.tree), new)

    def _num_replicas(self, leaf: jax.Array) -> int:
        return len(leaf) if self.stacked else num_replicas_on(mesh_of(leaf))

    def __repr__(self) -> str:
        _, *options = dataclasses.fields(self)  # pyright: ignore[reportArgumentType]  # every wrapper is a dataclass
        said = [
            _said(option.name, value) for option in options if (value := getattr(self, option.name)) != option.default
        ]
        return f"{type(self).__name__}({', '.join([repr(jax.tree.map(ReprText.of, self.tree)), *said])})"


class ReprText:
    """Stands for a leaf in a repr."""

    def __init__(self, text: str):
        self._text = text

    @classmethod
    def of(cls, leaf: Any) -> "ReprText":
        """Dtype and shape of `leaf`."""
        return cls(dtype_and_shape(leaf))

    def __repr__(self) -> str:
        return self._text


def _said(name: str, value: Any) -> str:
    return value.name if isinstance(value, enum.Enum) else f"{name}={value!r}"


def named_values(name: str, tree: PyTree) -> list[tuple[str, Any]]:
    """Every leaf of `tree` with its name, in which wrappers leave no trace: `name`, then the leaf's path."""
    nodes, _ = jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_distributed)
    return [
        leaf
        for path, node in nodes
        for leaf in named_leaves(name + jax.tree_util.keystr(path), node.tree if is_distributed(node) else node)
    ]


def is_distributed(node: object) -> bool:
    """Whether `node` is a wrapper; what `jax.tree` functions take as `is_leaf`."""
    return isinstance(node, DistributedValues)


def cast_without_loss(name: str, value: Any, shape: tuple[int, ...], dtype: Any) -> Any:
    """`value` as an array of this shape and dtype.

    Raises:
        ValueError: It has another shape.
        TypeError: It is of a kind that this dtype cannot hold.
    """
    check_array(name, value)
    if np.shape(value) != shape:
        raise ValueError(
            f"{name} has the shape {list(shape)}, and the new value has {list(np.shape(value))}. A value keeps its shape: "
            "reshape the new one, or place it by itself with `strategy.put`."
        )
    given = jax.dtypes.result_type(value)
    if any(jnp.issubdtype(kind, jax.dtypes.prng_key) for kind in (given, dtype)):
        keeps = given == dtype
    elif jnp.issubdtype(dtype, jnp.integer) and jnp.issubdtype(given, jnp.integer):
        # On the host `given` may be more than JAX says.
        is_kept = given == dtype and isinstance(value, jax.Array)
        keeps = is_kept or _is_in_range(np.asarray(value), jnp.iinfo(dtype))
    else:
        keeps = jnp.can_cast(given, dtype, "same_kind")
    if not keeps:
        raise TypeError(
            f"{name} is {dtype} and cannot hold {dtype_and_shape(value)} without loss. Cast it first, if that is meant."
        )
    return value if jnp.issubdtype(dtype, jax.dtypes.prng_key) else _cast(value, dtype)


def _is_in_range(numbers: np.ndarray, limits: Any) -> bool:
    return not numbers.size or bool(limits.min <= numbers.min() and numbers.max() <= limits.max)


def _cast(value: Any, dtype: Any) -> Any:
    return value.astype(dtype) if isinstance(value, jax.Array) else np.asarray(value, dtype)


def _placed(name: str, leaf: Any) -> jax.Array:
    if is_on_mesh(leaf):
        return leaf
    raise ValueError(
        f"{name} is {dtype_and_shape(leaf)}, and on no strategy's devices yet. Place it first: `strategy.put(value)`."
    )


def _refuse(sign: str) -> Callable[..., Any]:
    def refuse(self: DistributedValues, *_: Any, **__: Any) -> Any:
        raise TypeError(
            f"`{sign}` on a {self!r}: it lies on many devices, and arithmetic is for plain arrays. Compute inside a "
            "replica function (`strategy.run(fn, (value,))`), make one value of it (`.read()`, `strategy.reduce`, "
            f"`strategy.gather`), or take the values apart (`.values`, `.map(fn)`).{_instead(sign, self)}"
        )

    return refuse


def _instead(sign: str, value: DistributedValues) -> str:
    """What to write where a wrapper around a whole tuple or dict is unpacked or indexed."""
    if sign not in ("iter", "[]") or not isinstance(value.tree, (tuple, list, dict)):
        return ""
    kind = type(value).__name__
    if isinstance(value.tree, dict):
        unpacked = f"`parts = {{name: jdist.{kind}(leaf) for name, leaf in value.tree.items()}}`"
    else:
        unpacked = f"`x, y = map(jdist.{kind}, value.tree)`"
    return f" This one wraps a whole {type(value.tree).__name__}. To unpack it, wrap each element: {unpacked}."


for _sign, _names in {
    "+": "add radd pos", "-": "sub rsub neg", "*": "mul rmul", "/": "truediv rtruediv", "//": "floordiv rfloordiv",
    "%": "mod rmod", "divmod": "divmod rdivmod", "<<": "lshift rlshift", ">>": "rshift rrshift", "**": "pow rpow",
    "@": "matmul rmatmul", "<": "lt", "<=": "le", ">": "gt", ">=": "ge",
    "&": "and rand", "|": "or ror", "^": "xor rxor", "~": "invert", "abs": "abs", "[]": "getitem", "len": "len",
    "iter": "iter", "bool": "bool", "int": "int index", "float": "float", "complex": "complex",
    "numpy": "array array_ufunc", "jax.numpy": "jax_array",
}.items():  # fmt: skip
    for _name in _names.split():
        setattr(DistributedValues, f"__{_name}__", _refuse(_sign))
