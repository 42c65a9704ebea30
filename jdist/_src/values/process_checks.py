"""Compares values between the processes of a mesh, and exchanges small arrays between them.

Every process runs the same program and takes part in each comparison, so an error is raised on all of them.
"""

import zlib
from collections.abc import Sequence
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np

from jdist._src.core import activity
from jdist._src.devices.mesh import Replicas
from jdist._src.values.array_copies import device_put_copy
from jdist._src.values.process_calls import exchange_call, launches_on, processes_of

_ERROR_CHARACTERS = 1000


def check_same_on_processes(
    leaves: Sequence[tuple[str, str, Any]], replicas: Replicas, error: Exception | None = None
) -> None:
    """Raises ValueError, on every process, if names, dtypes, shapes or values differ between the processes.

    Args:
        leaves: The name, the dtype and shape as text, and the value of each leaf; None for a value that may differ.
        replicas: The replicas.
        error: The error with which the call fails on this process. It is raised; on the other processes, a ValueError names it.
    """
    if replicas.batch_axes or replicas.model_axes:
        replicas = replicas.per_device
    num_local = len(replicas.local_devices)
    if num_local < replicas.size:
        kinds_crc = zlib.crc32(repr(error or [(name, kind) for name, kind, _ in leaves]).encode())
        if len({int(crc) for crc in exchange_rows([np.uint32(kinds_crc)] * num_local, replicas)}) > 1:
            _raise_difference(leaves, processes_of(replicas.mesh), error)
    if error is not None:
        raise error
    if num_local == replicas.size:
        return
    value_crcs = np.array([zlib.crc32(_bytes(leaf)) for _, _, leaf in leaves], np.uint32)
    crcs_by_leaf = zip(*exchange_rows([value_crcs] * num_local, replicas), strict=True)
    for (name, kind, _), crcs in zip(leaves, crcs_by_leaf, strict=True):
        if len(set(map(int, crcs))) > 1:
            raise ValueError(
                f"{name} ({kind}) differs between the processes, and must be the same on every replica. Compute it from the "
                "same seed on all processes, or pass it as a `PerReplica`."
            )


def _raise_difference(
    leaves: Sequence[tuple[str, str, Any]], processes: tuple[int, ...], error: Exception | None
) -> NoReturn:
    text = "" if error is None else f"{type(error).__name__}: {error}"
    messages = exchange_call("a comparison of values", {"error": text[:_ERROR_CHARACTERS]}, processes)
    if error is not None:
        raise error
    for process, message in zip(processes, messages, strict=True):
        if message["error"]:
            raise ValueError(f"The same call failed on process {process}: {message['error']}")
    listed = ", ".join(f"{name} {kind}" for name, kind, _ in leaves)
    raise ValueError(
        "The processes pass values of different structures, dtypes or shapes; this process has "
        f"{listed}. Pass the same on every process."
    )


def exchange_rows(arrays: Sequence[Any], replicas: Replicas) -> Sequence[Any]:
    """Returns the arrays of all replicas, the same on every process, given one array per replica of this process."""
    if len(arrays) == replicas.size:
        return arrays
    label = activity.Label("an exchange of values", launches=launches_on(replicas.mesh), is_collective=True)
    copy = jax.jit(jnp.copy, out_shardings=replicas.replicated_sharding)
    return list(np.asarray(activity.launch(label, copy, put_local_rows(arrays, replicas))))


def put_local_rows(arrays: Sequence[Any], replicas: Replicas) -> jax.Array:
    """Returns rows over the mesh, given one array per replica of this process."""
    if not replicas.per_replica_axes:
        rows = jnp.stack(arrays)
        return device_put_copy(rows, replicas.batch_sharding(rows.shape))
    sharding, slots = replicas.per_replica_sharding, {number: i for i, number in enumerate(replicas.local_devices)}
    placed: list[jax.Array] = []
    for device, (index,) in sharding.addressable_devices_indices_map((replicas.size,)).items():  # pyright: ignore
        first, last, _ = index.indices(replicas.size)
        rows = arrays[slots[first] : slots[first] + last - first]
        placed.append(jax.device_put(rows[0][None] if len(rows) == 1 else jnp.stack(rows), device))
    return jax.make_array_from_single_device_arrays((replicas.size, *placed[0].shape[1:]), sharding, placed)


def _bytes(leaf: Any) -> bytes:
    """Returns the bytes of a host value; no bytes for an array of several processes, whose values are not compared."""
    if leaf is None or (isinstance(leaf, jax.Array) and not leaf.is_fully_addressable):
        return b""
    if isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    return np.asarray(leaf).tobytes()
