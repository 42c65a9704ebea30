"""The bits of arrays as 32-bit words, and the positions of the words, for checksums that devices compute."""

import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

_WORD = {8: jnp.uint8, 16: jnp.uint16, 32: jnp.uint32, 64: jnp.uint32}


def bit_words(x: jax.Array) -> jax.Array:
    """Returns the bits of `x` as uint32; an element of several words has one more dimension."""
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        return bit_words(jnp.stack([x.real, x.imag], -1))
    if x.dtype == jnp.bool_:
        return x.astype(jnp.uint32)
    bits = (jnp.iinfo if jnp.issubdtype(x.dtype, jnp.integer) else jnp.finfo)(x.dtype).bits
    if bits < 8:
        x, bits = x.astype(jnp.float32), 32  # exact, for so few bits
    return lax.bitcast_convert_type(x, _WORD[bits]).astype(jnp.uint32)


def word_positions(shape: tuple[int, ...]) -> jax.Array:
    """Returns the position of each 32-bit number in an array of this shape, modulo 2**32.

    Not one iota over all positions: reshaping it to the shape of the array would all-gather a sharded array.
    """
    strides = [math.prod(shape[dim + 1 :]) % 2**32 for dim in range(len(shape))]
    offsets = [lax.broadcasted_iota(jnp.uint32, shape, dim) * np.uint32(s) for dim, s in enumerate(strides)]
    return sum(offsets, jnp.uint32(0))
