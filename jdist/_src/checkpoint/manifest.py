"""The manifest of a checkpoint: a JSON file, for people and for `restore`, that describes the contents of the checkpoint.

It contains the versions, the step, the data position, a `StoredArray` per array, and the structures of the trees.
"""

import dataclasses
import datetime
import hashlib
import json
import math
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from jdist._src.checkpoint.storage import manifest_path
from jdist._src.checkpoint.tree_format import from_json, leaves_of
from jdist._src.core.byte_dtypes import byte_dtype, from_bytes
from jdist._src.core.tree import PyTree, one_line
from jdist._src.core.version import __version__

AS_BYTES = ("uint2", "uint4", "float8_e4m3")  # dtypes that TensorStore does not have
_FORMAT = 2
_WITHOUT_FINGERPRINT = 1  # the format of manifests that do not contain a fingerprint of themselves


@dataclasses.dataclass(frozen=True)
class StoredArray:
    """The description of an array in a checkpoint.

    Attributes:
        number: The name of the array in orbax's files.
        path: Its path in the checkpoint: `state/params/w`.
        shape: Its shape in the file.
        dtype: Its dtype; for random keys the dtype of JAX.
        placement: Its wrapper and sharding when it was saved, as text.
        fingerprint: The fingerprint of its bits.
        key: For random keys, the name of the generator.
    """

    number: int
    path: str
    shape: tuple[int, ...]
    dtype: str
    placement: str
    fingerprint: int
    key: str | None = None

    @property
    def array(self) -> jax.ShapeDtypeStruct:
        """The shape and dtype of the array."""
        dtype = np.dtype(self.dtype) if self.key is None else jax.eval_shape(self._make_key).dtype
        return jax.ShapeDtypeStruct(self.shape, dtype)

    @property
    def bits(self) -> jax.ShapeDtypeStruct:
        """The shape and dtype of the array in the file: for random keys, of the key data; bytes for `AS_BYTES`."""
        if self.key is None:
            dtype = byte_dtype(self.dtype) if self.dtype in AS_BYTES else None
            return jax.ShapeDtypeStruct(self.shape, dtype or self.array.dtype)
        data = jax.eval_shape(lambda: jax.random.key_data(self._make_key()))
        return jax.ShapeDtypeStruct(self.shape + data.shape, data.dtype)

    @property
    def bytes(self) -> int:
        """The size in memory."""
        return math.prod(self.bits.shape) * self.bits.dtype.itemsize

    @classmethod
    def of(cls, number: int, path: str, x: Any, wrapper: str, fingerprint: int) -> "StoredArray":
        """Returns the description of an array on the devices or on the host."""
        is_key = jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
        key = str(jax.random.key_impl(x)) if is_key else None
        return cls(number, path, tuple(x.shape), str(x.dtype), f"{wrapper}{_sharding_text(x)}", fingerprint, key)

    def from_bits(self, bits: Any) -> Any:
        """Returns the array that is stored as `bits`, on the same devices."""
        if self.key is None:
            return from_bytes(bits, self.array.dtype) if self.dtype in AS_BYTES else bits
        keys = jax.random.wrap_key_data(bits, impl=self.key)
        return keys if isinstance(bits, np.ndarray) else jax.device_put(keys, bits.sharding)

    def _make_key(self) -> jax.Array:
        return jax.random.key(0, impl=self.key)


def make_manifest(
    step: int,
    seed: Any,
    position: Any,
    metrics: Mapping[str, float],
    arrays: Sequence[StoredArray],
    state: Any,
    extra: Any,
) -> dict[str, Any]:
    """Returns the manifest of a checkpoint.

    Args:
        step: The step.
        seed: The seed, as JSON.
        position: The data position, as JSON.
        metrics: The finite metrics of the checkpoint.
        arrays: The arrays, ordered by number.
        state: The structure of the state, with the numbers of its arrays.
        extra: The structure of `extra`, likewise.
    """
    return with_fingerprint(
        {
            "format": _FORMAT,
            "step": step,
            "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "jdist": __version__,
            "jax": jax.__version__,
            "seed": seed,
            "data_position": position,
            "metrics": dict(metrics),
            "bytes": sum(array.bytes for array in arrays),
            "leaves": [
                {name: value for name, value in dataclasses.asdict(array).items() if value is not None}
                for array in arrays
            ],
            "state": state,
            "extra": extra,
        }
    )


def with_fingerprint(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the manifest with the fingerprint of all its other fields.

    Example:
        >>> with_fingerprint({"step": 3})["fingerprint"][:14]
        'sha256:a76b25b'
    """
    fields = {name: value for name, value in manifest.items() if name != "fingerprint"}
    text = json.dumps(fields, sort_keys=True)
    return {**fields, "fingerprint": f"sha256:{hashlib.sha256(text.encode()).hexdigest()}"}


def to_text(manifest: Mapping[str, Any]) -> str:
    """Returns the manifest as JSON, with one line per array.

    Example:
        >>> print(to_text({"step": 3, "leaves": [{"path": "w"}, {"path": "b"}]}))
        {
          "step": 3,
          "leaves": [
            {"path": "w"},
            {"path": "b"}
          ]
        }
    """
    lines = [
        f'  "{name}": {_leaf_lines(value) if name == "leaves" else json.dumps(value)}'
        for name, value in manifest.items()
    ]
    return "{\n" + ",\n".join(lines) + "\n}"


def from_text(text: str, step: int) -> dict[str, Any]:
    """Returns the manifest that `to_text` wrote. Format 1 is read without the check of the fingerprint.

    Args:
        text: The content of the file.
        step: The step in the name of its folder.

    Raises:
        ValueError: The text is not a manifest, was changed after it was written, or has a format of a later version of jdist.
    """
    manifest = json.loads(text)
    if manifest["format"] > _FORMAT:
        raise ValueError(
            f"It was written by jdist {manifest['jdist']} in format {manifest['format']}. jdist {__version__} reads formats up "
            f"to {_FORMAT}. Install jdist {manifest['jdist']} or later"
        )
    has_fingerprint = manifest["format"] != _WITHOUT_FINGERPRINT or "fingerprint" in manifest
    if has_fingerprint and manifest.get("fingerprint") != with_fingerprint(manifest)["fingerprint"]:
        raise ValueError("The manifest was changed after it was written: its fingerprint does not match its content")
    if manifest["step"] != step:
        raise ValueError(f"The manifest is of step {manifest['step']}, but the folder is named {step}")
    return manifest


def stored_arrays(manifest: Mapping[str, Any]) -> list[StoredArray]:
    """Returns the arrays of a manifest, ordered by number."""
    return [StoredArray(**{**leaf, "shape": tuple(leaf["shape"])}) for leaf in manifest["leaves"]]


def read_manifest(folder: pathlib.Path, step: int) -> tuple[Mapping[str, Any], PyTree]:
    """Returns the manifest of a checkpoint, and the saved state with a `StoredArray` for each leaf.

    Raises:
        Exception: Of any type: the manifest is damaged.
    """
    manifest = from_text(manifest_path(folder, step).read_text(), step)
    saved = from_json(manifest["state"], stored_arrays(manifest).__getitem__)
    for leaf in leaves_of(saved):
        _ = leaf.value.bits  # raises for an invalid dtype: a manifest of format 1 is not checked by a fingerprint
    return manifest, saved


def checked_json(name: str, value: Any) -> Any:
    """Returns a copy of `value`, as JSON represents it.

    Raises:
        TypeError: JSON cannot represent the value, or returns another one.
    """
    try:
        copy = json.loads(json.dumps(value))
    except (TypeError, ValueError) as error:
        raise TypeError(f"`{name}` is saved as JSON, which cannot represent {one_line(value)}: {error}.") from None
    if copy != value:
        raise TypeError(
            f"`{name}` is saved as JSON, which returns {one_line(copy)} for {one_line(value)}. Pass {one_line(copy)}."
        )
    return copy


def _leaf_lines(leaves: Sequence[Mapping[str, Any]]) -> str:
    return "[" + ",".join(f"\n    {json.dumps(leaf)}" for leaf in leaves) + ("\n  ]" if leaves else "]")


def _sharding_text(x: Any) -> str:
    if not isinstance(x, jax.Array) or not isinstance(x.sharding, NamedSharding):
        return ""
    sizes = ", ".join(f"{axis} {size}" for axis, size in x.sharding.mesh.shape.items())
    return f" on {sizes}" if x.is_fully_replicated else f" on {sizes}, split as {tuple(x.sharding.spec)}"
