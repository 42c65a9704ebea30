"""What several processes hand in: whether they agree, and what each has to tell the others.

Every process runs the same program, so what is said here is said by all of them, and an error is raised on all.
"""

import zlib
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jdist._src.devices.mesh import Replicas
from jdist._src.values.arrays import device_put_copy


def check_same_on_processes(leaves: Sequence[tuple[str, str, Any]], replicas: Replicas) -> None:
    """Raises ValueError, on every process, if the processes hand in different names, kinds or values."""
    replicas = Replicas(replicas.mesh, replicas.mesh.size) if replicas.split else replicas
    here = len(replicas.local)
    if here == replicas.size:
        return
    kinds = zlib.crc32(repr([(name, kind) for name, kind, _ in leaves]).encode())
    if len({int(kind) for kind in exchange_rows([np.uint32(kinds)] * here, replicas)}) > 1:
        listed = ", ".join(f"{name} {kind}" for name, kind, _ in leaves)
        raise ValueError(
            f"The processes hand in values of different structure or kind; this one has {listed}. Make them alike."
        )
    sums = np.array([zlib.crc32(_bytes(leaf)) for _, _, leaf in leaves], np.uint32)
    for (name, kind, _), numbers in zip(leaves, zip(*exchange_rows([sums] * here, replicas), strict=True), strict=True):
        if len(set(map(int, numbers))) > 1:
            raise ValueError(
                f"{name} ({kind}) differs between the processes, and is to be the same on every replica. Compute it alike on "
                "all (the same seed), or hand it in as a `PerReplica`."
            )


def exchange_rows(arrays: Sequence[Any], replicas: Replicas) -> Sequence[Any]:
    """The arrays of all replicas, of those of this process; the same on every process."""
    if len(arrays) == replicas.size:
        return arrays
    return list(np.asarray(jax.jit(jnp.copy, out_shardings=replicas.whole)(put_local_rows(arrays, replicas))))


def put_local_rows(arrays: Sequence[Any], replicas: Replicas) -> jax.Array:
    """Rows of one array for each replica of this process."""
    if not replicas.per_replica_axes:
        rows = jnp.stack(arrays)
        return device_put_copy(rows, replicas.batch(rows.shape))
    each, devices = replicas.each, list(replicas.local.values())[:: replicas.each]
    blocks = [arrays[i][None] if each == 1 else jnp.stack(arrays[i : i + each]) for i in range(0, len(arrays), each)]
    placed = [jax.device_put(block, device) for block, device in zip(blocks, devices, strict=True)]
    return jax.make_array_from_single_device_arrays((replicas.size, *placed[0].shape[1:]), replicas.rows, placed)


def _bytes(leaf: Any) -> bytes:
    """What tells host values apart; an array that several processes hold is not looked into."""
    if leaf is None or (isinstance(leaf, jax.Array) and not leaf.is_fully_addressable):
        return b""
    if isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    return np.asarray(leaf).tobytes()
