"""Parts of a step as bytes that another process loads: functions of flat lists of arrays that numpy can represent.

Random keys are sent as their numbers (`jax.random.key_data`).
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import numpy as np

from jdist._src.core.tree import PyTree, has_dtype


def export_part(fn: Callable[..., PyTree], arguments: Sequence[PyTree], platform: str) -> bytes:
    """Returns a function as bytes.

    Args:
        fn: The function.
        arguments: The shapes and dtypes of its arguments.
        platform: The platform on which it will run.

    Raises:
        ValueError: The function has effects, such as callbacks, which cannot run in another process.
    """
    leaves, treedef = jax.tree.flatten(tuple(arguments))
    specs = [as_sent(leaf) for leaf in leaves]

    def flat(*operands: Any) -> list[Any]:
        values = [from_numbers(x, leaf.dtype) for x, leaf in zip(operands, leaves, strict=True)]
        return [to_numbers(x) for x in jax.tree.leaves(fn(*treedef.unflatten(values)))]

    try:
        exported = jax.export.export(jax.jit(flat, keep_unused=True), platforms=[platform])(*specs)
        return bytes(exported.serialize())
    except (ValueError, NotImplementedError) as error:
        raise ValueError(
            f"The step cannot be sent to other processes: {error}\n  Callbacks into Python, such as `jax.debug.print`, run in "
            'one process only. Remove them, or use `engine="local"`.'
        ) from error


def load_part(data: bytes, donated: Sequence[int] = ()) -> Callable[..., list[jax.Array]]:
    """Returns the function of `export_part`, compiled when it is called first.

    Args:
        data: The bytes.
        donated: The numbers of the operands whose memory it reuses.
    """
    exported = jax.export.deserialize(bytearray(data))
    return jax.jit(exported.call, donate_argnums=tuple(donated), keep_unused=True)


def as_sent(leaf: Any) -> jax.ShapeDtypeStruct:
    """Returns the shape and dtype of a leaf as it is sent."""
    if not is_key(leaf.dtype):
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
    return jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct(leaf.shape, leaf.dtype))


def to_numbers(x: Any) -> Any:
    """Returns an array as it is sent: a random key as its numbers, any other array unchanged."""
    return jax.random.key_data(x) if has_dtype(x) and is_key(x.dtype) else x


def from_numbers(x: Any, dtype: Any) -> Any:
    """Returns an array of `dtype` that was sent as numbers."""
    if not is_key(dtype):
        return x
    return jax.random.wrap_key_data(jnp.asarray(x), impl=str(jax.random.key_impl(jnp.empty((), dtype))))


def is_key(dtype: Any) -> bool:
    """Returns whether an array of this dtype contains random keys."""
    return jnp.issubdtype(dtype, jax.dtypes.prng_key)


def to_host(x: Any) -> np.ndarray:
    """Returns an array as it is sent, in the memory of the host."""
    return np.asarray(to_numbers(x))
