"""Values that live on many devices.

Four words, used the same way everywhere:

* *replica*: one copy of the computation, an index along the mesh axis `"replica"`.
* *mirrored*: the same on every replica. What is not wrapped is mirrored: a plain array.
* *per-replica*: one value a replica, `PerReplica(tree)`. Its leaves are `[replica, ...]`, sharded on the first dimension.
* *replica context*: inside a function that a strategy runs. There nobody sees a wrapper, only one replica's plain arrays.

A wrapper is a placement: it says how leaves lie on the mesh (`spec`), how they enter a replica and how they leave it.
Wrappers stand anywhere in a tree: in arguments, in the state of a step, in what a replica function returns.
"""

import abc
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax import core, lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jdist._tree import PyTree, named_leaves, spec
from jdist.mesh import local_replicas, mirrored_sharding, per_replica_sharding


class DistributedValues(abc.ABC):
    """A tree of arrays that lies on the devices of a mesh in a way that its class names.

    It is a frozen pytree. Outside a replica function it offers `values`, `read` and `map`, and no arithmetic: what a
    sum of two values on eight devices should mean is said by a replica function, or by `Strategy.reduce`.
    """

    __slots__ = ()

    tree: PyTree

    @staticmethod
    @abc.abstractmethod
    def spec(axes: tuple[str, ...]) -> PartitionSpec:
        """How a leaf lies on a mesh whose replica axes are `axes`."""

    @staticmethod
    @abc.abstractmethod
    def enter(tree: PyTree) -> PyTree:
        """From what one device holds to what the replica function sees."""

    @staticmethod
    @abc.abstractmethod
    def leave(tree: PyTree) -> PyTree:
        """From what the replica function gives to what one device holds."""

    @property
    @abc.abstractmethod
    def values(self) -> tuple[PyTree, ...]:
        """One tree a replica of this process."""

    @abc.abstractmethod
    def read(self) -> PyTree:
        """The value as plain arrays that every replica together holds."""

    @abc.abstractmethod
    def map(self, fn: Callable[[PyTree], PyTree]) -> "DistributedValues":
        """The same placement of `fn` of each replica's value."""

    def __repr__(self) -> str:
        return f"{type(self).__name__}({jax.tree.map(_Spec, self.tree)!r})"


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True, eq=False, repr=False)
class PerReplica(DistributedValues):
    """One value a replica.

    Made by `Strategy.run` for what differs between replicas, by `Strategy.distribute_dataset` for batches and by
    `Strategy.distribute_values_from_function`. Written in the state that `Strategy.init` makes, it says that these
    leaves are not kept in step: in the replica function, `PerReplica(x)` holds that replica's own `x`.

    Attributes:
        tree: On the host, a tree of `[replica, ...]` arrays, sharded on the first dimension.

    Example:
        >>> strategy = jdist.MirroredStrategy(["cpu:0", "cpu:1"])
        >>> ids = strategy.run(jdist.replica_id)
        >>> ids
        PerReplica(int32[2])
        >>> [int(i) for i in ids.values]
        [0, 1]
        >>> ids + 1
        Traceback (most recent call last):
        TypeError: `+` on a PerReplica(int32[2]): it holds one value a replica, ...
    """

    tree: PyTree

    @staticmethod
    def spec(axes: tuple[str, ...]) -> PartitionSpec:
        """The first dimension is split over the replica axes."""
        return PartitionSpec(axes)

    @staticmethod
    def enter(tree: PyTree) -> PyTree:
        """`[1, ...]` to `[...]`."""
        return jax.tree.map(lambda x: lax.squeeze(x, (0,)), tree)

    @staticmethod
    def leave(tree: PyTree) -> PyTree:
        """`[...]` to `[1, ...]`."""
        return jax.tree.map(lambda x: lax.expand_dims(x, (0,)), tree)

    @property
    def values(self) -> tuple[PyTree, ...]:
        """One tree a replica of this process, in the order of the replicas; leaves `[...]`, each on its own device."""
        leaves, treedef = jax.tree.flatten(self.tree)
        rows = [_rows(leaf) for leaf in leaves]
        return tuple(treedef.unflatten(row) for row in zip(*rows, strict=True))

    def read(self) -> PyTree:
        """The leaves as they lie, `[replica, ...]`: nothing says how one value should be made of them."""
        return self.tree

    def map(self, fn: Callable[[PyTree], PyTree]) -> "PerReplica":
        """`PerReplica` of `fn` of each replica's tree, computed where the values are."""
        first = jax.tree.leaves(self.tree)[0]
        place = first.sharding if is_placed(first) else None
        return PerReplica(jax.jit(jax.vmap(fn), out_shardings=place)(self.tree))


def is_distributed(node: object) -> bool:
    """Whether `node` is a wrapper; what `jax.tree` functions take as `is_leaf`."""
    return isinstance(node, DistributedValues)


def is_placed(leaf: object) -> bool:
    """Whether `leaf` is an array on devices, and not a host value or a tracer."""
    return isinstance(leaf, jax.Array) and not isinstance(leaf, core.Tracer)


def check_rows(name: str, value: Any, mesh: Mesh) -> None:
    """Raises ValueError if `value` is a `PerReplica` that has not one row for each replica of `mesh`."""
    for leaf_name, leaf in named_leaves(name, value.tree) if isinstance(value, PerReplica) else ():
        shape = np.shape(leaf)
        if not shape or shape[0] != mesh.size:
            raise ValueError(
                f"{leaf_name} is a PerReplica of {spec(leaf)}, for {shape[0] if shape else 'no'} replicas; this strategy "
                f"has {mesh.size}. A PerReplica belongs to the strategy that made it: distribute the data with this one, "
                "or read the other's with `.values`."
            )


def check_place(name: str, array: jax.Array, mesh: Mesh) -> None:
    """Raises ValueError if `array` does not lie on the devices of `mesh`, in their order."""
    ours = list(mesh.devices.flat)
    theirs = sorted(array.sharding.device_set, key=lambda device: device.id)
    if isinstance(array.sharding, NamedSharding):
        theirs = list(array.sharding.mesh.devices.flat)  # pyright: ignore[reportOptionalMemberAccess]
    elif set(theirs) == set(ours):
        theirs = ours
    if theirs != ours:
        there, here = (", ".join(map(str, devices)) for devices in (theirs, ours))
        raise ValueError(
            f"{name} lies on {there}, and this strategy on {here}. If another strategy made it, let this one make it; if "
            "it is a plain array, hand it in as a numpy array, or place it with `strategy.put`."
        )


def mirror(tree: PyTree, mesh: Mesh) -> PyTree:
    """`tree` with every plain leaf on all devices of `mesh`, and every wrapper as its class says.

    On several processes each of them has to hand in the same values.
    """

    def place(path: Any, node: Any) -> Any:
        if not is_distributed(node):
            return _place(node, mirrored_sharding(mesh))
        check_rows("value" + jax.tree_util.keystr(path), node, mesh)
        sharding = NamedSharding(mesh, node.spec(mesh.axis_names))
        return dataclasses.replace(node, tree=jax.tree.map(lambda x: _place(x, sharding), node.tree))

    return jax.tree_util.tree_map_with_path(place, tree, is_leaf=is_distributed)


def stack_local(trees: Sequence[PyTree], mesh: Mesh) -> PerReplica:
    """`PerReplica` of one tree for each replica of this process, each put directly on its own device.

    Raises:
        ValueError: The trees differ in structure, or a leaf in shape or dtype; the message names replica and leaf.
    """
    devices = list(local_replicas(mesh).values())
    for number, tree in zip(local_replicas(mesh), trees, strict=True):
        if difference := _difference(trees[0], tree):
            raise ValueError(
                f"The value of replica {number} {difference} of replica {min(local_replicas(mesh))}. Give every replica a "
                "value of the same structure, shapes and dtypes."
            )

    def stack(*leaves: Any) -> jax.Array:
        placed = [jax.device_put(jax.numpy.asarray(x)[None], d) for x, d in zip(leaves, devices, strict=True)]
        shape = (mesh.size, *placed[0].shape[1:])
        return jax.make_array_from_single_device_arrays(shape, per_replica_sharding(mesh), placed)

    return PerReplica(jax.tree.map(stack, *trees))


def _place(x: Any, sharding: NamedSharding) -> jax.Array:
    """A copy of `x` that lies as `sharding` says: a step takes over the memory of its state, and `x` is the caller's."""
    if isinstance(x, jax.Array) and (sharding.is_fully_addressable or not x.is_fully_addressable):
        return jax.device_put(x.copy(), sharding)
    if isinstance(x, jax.Array) and jax.numpy.issubdtype(x.dtype, jax.dtypes.prng_key):
        data = _place(np.asarray(jax.random.key_data(x)), sharding)
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(x))
    host = np.array(x)  # no dtype of its own that may change, as a Python number would have
    if sharding.is_fully_addressable:
        return jax.device_put(host, sharding)
    return jax.make_array_from_callback(host.shape, sharding, lambda index: host[index])


def _difference(like: PyTree, tree: PyTree) -> str | None:
    if jax.tree.structure(like) != jax.tree.structure(tree):
        return f"has the structure {jax.tree.structure(tree)}, and not the {jax.tree.structure(like)}"
    for (name, a), (_, b) in zip(named_leaves("value", like), named_leaves("value", tree), strict=True):
        if spec(jax.numpy.asarray(a)) != spec(jax.numpy.asarray(b)):
            return f"has {spec(jax.numpy.asarray(b))} for {name}, and not the {spec(jax.numpy.asarray(a))}"
    return None


class _Spec:
    """Stands for a leaf in a repr."""

    def __init__(self, leaf: Any):
        self._spec = spec(leaf)

    def __repr__(self) -> str:
        return self._spec


def _rows(leaf: Any) -> list[Any]:
    if not isinstance(leaf, jax.Array):  # made by hand, and on no device yet
        return list(leaf)
    shards = sorted(leaf.addressable_shards, key=lambda shard: shard.index[0].start or 0)
    return [shard.data.reshape(shard.data.shape[1:]) for shard in shards]


def _refuse(sign: str) -> Callable[..., Any]:
    def refuse(self: DistributedValues, *_: Any, **__: Any) -> Any:
        raise TypeError(
            f"`{sign}` on a {self!r}: it holds one value a replica, and arithmetic is for plain arrays. Compute inside a "
            "replica function (`strategy.run(fn, (value,))`), make one value of it (`strategy.reduce`, "
            "`strategy.gather`), or take the values apart (`.values`, `.map(fn)`)."
        )

    return refuse


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
