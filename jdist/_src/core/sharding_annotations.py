"""Sharding annotations in a replica function: the axes that exist keep their effect, the others have none.

A model is annotated for one mesh: `jax.lax.with_sharding_constraint(x, PartitionSpec("data", "model"))`, the partition metadata
of flax linen, `out_sharding` of nnx variables. The mesh of a strategy may lack these axes, or one replica may hold its part
along them. JAX refuses both, and so does flax. `restrict_annotations` removes such axes while a strategy traces.

The functions of JAX and flax call the code below, because there is no hook, and no mesh in the context avoids the errors: with
none, JAX refuses a `PartitionSpec` and flax refuses `out_sharding`; with the mesh of a strategy, both refuse an unknown axis.
"""

import contextlib
import functools
import sys
import types
from collections.abc import Callable, Collection, Iterator
from contextvars import ContextVar
from typing import Any, Literal, TypeAlias

import jax
import jax.numpy as jnp
from jax.lax import with_sharding_constraint
from jax.sharding import NamedSharding, PartitionSpec

from jdist._src.core import source_lines
from jdist._src.core.partition_specs import axes_of

Place: TypeAlias = Literal["replica", "global arrays", "outside"]
_place: ContextVar[Place | None] = ContextVar("jdist_annotations_place", default=None)


@contextlib.contextmanager
def restrict_annotations(place: Place) -> Iterator[None]:
    """Restricts sharding annotations to the automatic axes of the mesh in the context, while this thread runs the block.

    An annotation without such an axis has no effect: it adds no equation. Names in the metadata of flax never need to exist.

    Args:
        place: What runs: the function of one of several replicas; a function of global arrays, in which a direct
            `with_sharding_constraint` is left to JAX, and an axis that the mesh does not have is an error; or a model outside
            a strategy, in which a `NamedSharding` is left to JAX. In a function of a strategy, a model is not outside.
    """
    _install()
    _install_in_flax()
    token = _place.set((_place.get() or place) if place == "outside" else place)
    try:
        yield
    finally:
        _place.reset(token)


@functools.cache
def _install() -> None:
    """Lets `jax.lax.with_sharding_constraint` restrict its argument. Outside `restrict_annotations` it works as before.

    The code of the function is replaced and not the function, which programs import by name.
    """
    function: Any = with_sharding_constraint
    code = function.__code__
    function.original = types.FunctionType(code, function.__globals__, function.__name__)
    function.effective = _effective
    # With the names of JAX's file the frame is one of JAX in tracebacks and in the lines of equations.
    function.__code__ = _hooked.__code__.replace(
        co_filename=code.co_filename, co_firstlineno=code.co_firstlineno, co_name=code.co_name
    )


def _hooked(x: Any, shardings: Any) -> Any:
    # It runs in the module of JAX's function, in which no other name of this module exists.
    hook: Any = with_sharding_constraint
    shardings, convert = hook.effective(shardings)
    return hook.original(x, shardings) if convert is None else convert(x)


def _effective(shardings: Any) -> tuple[Any, Callable[[Any], Any] | None]:
    """Returns the shardings that JAX receives, or the function that is called instead since they have no effect."""
    place = _place.get()
    if place is None:
        return shardings, None
    caller = sys._getframe(2).f_globals.get("__name__") or ""
    if place == "global arrays" and not caller.startswith("flax."):
        _check_axes(shardings)
        return shardings, None
    return _restricted(shardings)


def _restricted(shardings: Any) -> tuple[Any, Callable[[Any], Any] | None]:
    axes = jax.sharding.get_abstract_mesh().auto_axes
    leaves, treedef = jax.tree.flatten(shardings, is_leaf=lambda leaf: leaf is None)
    if _place.get() == "outside" and any(isinstance(leaf, NamedSharding) for leaf in leaves):
        return shardings, None
    if axes:
        return treedef.unflatten([_restricted_leaf(leaf, axes) for leaf in leaves]), None
    has_no_effect = all(isinstance(leaf, NamedSharding | PartitionSpec | None) for leaf in leaves)
    return shardings, _as_arrays if has_no_effect else None


def _restricted_leaf(sharding: Any, axes: Collection[str]) -> Any:
    if isinstance(sharding, NamedSharding):  # perhaps of another mesh, whose axes have other sizes
        return _restricted_leaf(sharding.spec, axes)
    if not isinstance(sharding, PartitionSpec):
        return sharding
    return PartitionSpec(*(_restricted_dim(dim, axes) for dim in sharding))


def _restricted_dim(dim: Any, axes: Collection[str]) -> Any:
    if isinstance(dim, str):
        return dim if dim in axes else None
    return tuple(axis for axis in dim if axis in axes) or None if isinstance(dim, tuple) else dim


def _as_arrays(tree: Any) -> Any:
    return jax.tree.map(lambda x: x if isinstance(x, jax.Array) else jnp.asarray(x), tree)


def _check_axes(shardings: Any) -> None:
    """Raises ValueError if a `PartitionSpec` names an axis that the mesh in the context does not have."""
    mesh = jax.sharding.get_abstract_mesh()
    for spec in jax.tree.leaves(shardings):
        axes = axes_of(spec) if isinstance(spec, PartitionSpec) else ()
        unknown = [axis for axis in axes if axis not in mesh.shape]
        if unknown:
            frame = source_lines.caller_frame()
            raise ValueError(
                f"{f'{frame} in {frame.function}' if frame else 'The function'} constrains a value to {spec}, and the mesh of "
                f"the strategy has no axis {unknown[0]!r}. Its axes are {', '.join(map(repr, mesh.axis_names))}: name one of "
                "these, or pass a mesh with this axis to the strategy. In the metadata of flax (`nn.with_partitioning`, "
                "`out_sharding`) such a name has no effect."
            )


def _install_in_flax() -> None:
    """Lets nnx variables with `out_sharding` restrict it too: flax constructs a `NamedSharding`, which JAX checks."""
    spmd: Any = sys.modules.get("flax.core.spmd")
    original = getattr(spmd, "shard_value", None)
    if original is None or hasattr(original, "__wrapped__"):
        return

    @functools.wraps(original)
    def shard_value(value: Any, out_sharding: Any, sharding_rules: Any, mesh: Any) -> Any:
        if _place.get() is None or not out_sharding:
            return original(value, out_sharding, sharding_rules, mesh)
        shardings, convert = _restricted(spmd.apply_rules(out_sharding, sharding_rules))
        return with_sharding_constraint.original(value, shardings) if convert is None else convert(value)  # pyright: ignore

    spmd.shard_value = shard_value
