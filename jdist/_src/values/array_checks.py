"""Predicates and checks of leaves: which are arrays on devices, and which values JAX can store there."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import core
from jax.sharding import Mesh, NamedSharding

from jdist._src.core import jax_compat
from jdist._src.core.nn_modules import is_nnx_object
from jdist._src.core.tree import PyTree, dtype_and_shape
from jdist._src.values.remote_array import RemoteArray


def is_device_array(leaf: object) -> bool:
    """Returns whether `leaf` is an array on devices, and not a host value or a tracer."""
    return isinstance(leaf, jax.Array) and not isinstance(leaf, core.Tracer)


def is_on_mesh(leaf: object) -> bool:
    """Returns whether `leaf` is an array that a strategy placed on its mesh."""
    return is_device_array(leaf) and isinstance(leaf.sharding, NamedSharding)  # pyright: ignore[reportAttributeAccessIssue]


def is_in_host_memory(x: Any) -> bool:
    """Returns whether an array or a traced value is in the host memory of its devices, as a state in central storage."""
    return isinstance(x, jax.Array) and getattr(jax.typeof(x), "memory_space", None) == jax.memory.Space.Host


def check_array(name: str, leaf: Any) -> None:
    """Raises TypeError if `leaf` is not a number or an array of numbers."""
    check_not_ref(name, leaf)
    if is_traceable(leaf) or isinstance(leaf, int):
        return
    if isinstance(leaf, np.ma.MaskedArray):  # numpy would drop the mask silently
        raise TypeError(f"{name} is a masked array, which JAX does not support. Fill it: `x.filled(0)`.")
    if is_nnx_object(leaf):
        raise TypeError(
            f"{name} is {dtype_and_shape(leaf)}, an nnx object that is not a pytree. Remove `pytree=False` from its class, or "
            "separate its arrays: `nnx.split(module)`."
        )
    if callable(leaf):
        raise TypeError(
            f"{name} is {dtype_and_shape(leaf)}, a function: devices hold numbers, booleans and random keys. Separate arrays "
            "and functions: `eqx.partition(tree, eqx.is_array)` of equinox, an `nnx` or equinox module, or a static field of a "
            "dataclass, `jax.tree_util.register_dataclass` with `meta_fields`."
        )
    if np.asarray(leaf).dtype.kind in "USOmM":
        raise TypeError(
            f"{name} is {dtype_and_shape(leaf)}: devices hold numbers, booleans and random keys. Store it on the host."
        )


def check_not_ref(name: str, leaf: Any) -> None:
    """Raises TypeError if `leaf` is a mutable reference."""
    if isinstance(leaf, jax.Ref):
        raise TypeError(
            f"{name} is a `jax.Ref`, which has no placement on several devices. Pass its value, `ref[...]`."
        )


def check_not_deleted(name: str, leaf: Any) -> None:
    """Raises ValueError if `leaf` was donated to a step, or deleted."""
    if is_device_array(leaf) and leaf.is_deleted():
        raise ValueError(
            f"{name} ({dtype_and_shape(leaf)}) was deleted: it was donated to a step, or `delete` was called. Pass the state "
            "that the last step or `fit` returned. A step with `donate=False` leaves the old state valid."
        )


def check_range(name: str, leaf: Any, to_dtype: Any = None) -> None:
    """Raises ValueError if `leaf`, on the host, holds an integer that is out of the range of `to_dtype`, by default JAX's."""
    check_not_ref(name, leaf)
    if is_traceable(leaf):
        return
    is_python = type(leaf) is int  # of any number of bits
    array = np.asarray(leaf, object if is_python else None)
    dtype = np.dtype(np.int64) if is_python else array.dtype
    if not array.size or dtype.kind not in "iu":
        return
    to_dtype = jax.dtypes.canonicalize_dtype(dtype) if to_dtype is None else to_dtype
    limits = jnp.iinfo(to_dtype)
    for extreme in () if to_dtype == array.dtype else (array.min(), array.max()):
        if not limits.min <= extreme <= limits.max:
            raise ValueError(
                f"{name} holds {extreme}, which is out of the range of {to_dtype}. Use smaller numbers, or enable 64-bit "
                'types: `jax.config.update("jax_enable_x64", True)`.'
            )


def check_not_leaked(name: str, leaf: Any) -> None:
    """Raises TypeError if `leaf` is a leaked tracer: a traced value while no function is being traced."""
    if isinstance(leaf, core.Tracer) and not jax_compat.is_tracing():
        raise TypeError(
            f"{name} is a traced value ({dtype_and_shape(leaf)}) from a function that is no longer traced. Return it from that "
            "function, and use the result of the call."
        )


def is_jit_argument(leaf: Any) -> bool:
    """Returns whether `leaf` can be passed to `jax.jit`: it is not a leaked tracer, and no integer would be truncated."""
    try:
        check_not_leaked("", leaf)
        check_range("", leaf)
    except (TypeError, ValueError):
        return False
    return True


def check_value(name: str, leaf: Any) -> None:
    """Raises TypeError if `leaf` is not a number or an array of numbers, ValueError if JAX would truncate an integer in it."""
    check_not_leaked(name, leaf)
    check_array(name, leaf)
    check_range(name, leaf)


def is_traceable(leaf: Any) -> bool:
    """Returns whether JAX accepts `leaf` as an array without a conversion on the host."""
    return isinstance(leaf, jax.Array) or hasattr(leaf, "__jax_array__")


def host_leaves(tree: PyTree) -> list[Any]:
    """Returns the leaves that are not arrays on devices. Runs at every call of a program: without a loop over arrays."""
    leaves = jax.tree.leaves(tree)
    if _ARRAY_CLASSES.issuperset(map(type, leaves)):
        return []
    _ARRAY_CLASSES.update(type(leaf) for leaf in leaves if is_device_array(leaf) or isinstance(leaf, RemoteArray))
    return [leaf for leaf in leaves if type(leaf) not in _ARRAY_CLASSES]


_ARRAY_CLASSES: set[type] = set()  # of arrays on devices, which JAX does not export, and on other machines


def mesh_of(leaf: jax.Array) -> Mesh:
    """Returns the mesh of an array that a strategy placed; its devices are in the order of the replicas."""
    assert isinstance(leaf.sharding, NamedSharding) and isinstance(leaf.sharding.mesh, Mesh)
    return leaf.sharding.mesh
