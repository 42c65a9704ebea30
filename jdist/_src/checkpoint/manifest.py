"""What a checkpoint says of itself: a text file that people read, and that says how its arrays are put together again."""

import dataclasses
import datetime
import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from jdist._src.core.version import __version__

_FORMAT = 2
_UNSIGNED = 1  # the format of manifests that have no fingerprint of their own


@dataclasses.dataclass(frozen=True)
class StoredArray:
    """An array of a checkpoint.

    Attributes:
        number: What its file is called.
        path: What it is: `state/params/w`.
        shape: As it is stored.
        dtype: The same, of random keys as JAX calls it.
        placement: In which wrapper it was, and how it lay on the devices, in words.
        fingerprint: That of its bits.
        key: Of random keys, how their bits are made.
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
        """Its shape and dtype."""
        dtype = np.dtype(self.dtype) if self.key is None else jax.eval_shape(self._one_key).dtype
        return jax.ShapeDtypeStruct(self.shape, dtype)

    @property
    def bits(self) -> jax.ShapeDtypeStruct:
        """Shape and dtype of what is in the file: of random keys, their data."""
        if self.key is None:
            return self.array
        data = jax.eval_shape(lambda: jax.random.key_data(self._one_key()))
        return jax.ShapeDtypeStruct(self.shape + data.shape, data.dtype)

    @property
    def bytes(self) -> int:
        """What it takes in memory."""
        return math.prod(self.bits.shape) * self.bits.dtype.itemsize

    @classmethod
    def of(cls, number: int, path: str, x: Any, wrapper: str, fingerprint: int) -> "StoredArray":
        """What there is to say of an array on the devices or on the host."""
        is_key = jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
        key = str(jax.random.key_impl(x)) if is_key else None
        return cls(number, path, tuple(x.shape), str(x.dtype), f"{wrapper}{_where(x)}", fingerprint, key)

    def _one_key(self) -> jax.Array:
        return jax.random.key(0, impl=self.key)


def make_manifest(
    step: int, seed: Any, position: Any, entries: Sequence[StoredArray], state: Any, extra: Any
) -> dict[str, Any]:
    """The manifest of a checkpoint.

    Args:
        step: Its number.
        seed: As it was handed in.
        position: The position of the data, the same.
        entries: One an array.
        state: The structure of the state, with numbers of entries.
        extra: The same of what is kept beside it.
    """
    return signed(
        {
            "format": _FORMAT,
            "step": step,
            "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "jdist": __version__,
            "jax": jax.__version__,
            "seed": seed,
            "data_position": position,
            "bytes": sum(entry.bytes for entry in entries),
            "leaves": [
                {name: value for name, value in dataclasses.asdict(entry).items() if value is not None}
                for entry in entries
            ],
            "state": state,
            "extra": extra,
        }
    )


def signed(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the manifest with the fingerprint of all its other entries.

    Example:
        >>> signed({"step": 3})["fingerprint"][:14]
        'sha256:a76b25b'
    """
    rest = {name: value for name, value in manifest.items() if name != "fingerprint"}
    text = json.dumps(rest, sort_keys=True)
    return {**rest, "fingerprint": f"sha256:{hashlib.sha256(text.encode()).hexdigest()}"}


def to_text(manifest: Mapping[str, Any]) -> str:
    """The manifest as JSON, a line a leaf.

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
        f'  "{name}": {_block(value) if name == "leaves" else json.dumps(value)}' for name, value in manifest.items()
    ]
    return "{\n" + ",\n".join(lines) + "\n}"


def from_text(text: str, step: int) -> dict[str, Any]:
    """Returns the manifest that `to_text` wrote. Format 1 has no fingerprint, and is read without the check.

    Args:
        text: The content of the file.
        step: The step of its folder.

    Raises:
        ValueError: It is not a manifest, was changed after it was written, or has a later format than this version knows.
    """
    manifest = json.loads(text)
    if manifest["format"] > _FORMAT:
        raise ValueError(
            f"It was written by jdist {manifest['jdist']}, in a form that {__version__} does not know. Install that."
        )
    has_fingerprint = manifest["format"] != _UNSIGNED or "fingerprint" in manifest
    if has_fingerprint and manifest.get("fingerprint") != signed(manifest)["fingerprint"]:
        raise ValueError("The manifest was changed after it was written: its fingerprint does not match its content")
    if manifest["step"] != step:
        raise ValueError(f"The manifest belongs to step {manifest['step']}, and the folder is named {step}")
    return manifest


def stored_arrays(manifest: Mapping[str, Any]) -> list[StoredArray]:
    """Its arrays, by their numbers."""
    return [StoredArray(**{**leaf, "shape": tuple(leaf["shape"])}) for leaf in manifest["leaves"]]


def checked_json(name: str, value: Any) -> Any:
    """A copy of `value`.

    Raises:
        TypeError: JSON would not give it back.
    """
    try:
        back = json.loads(json.dumps(value))
    except (TypeError, ValueError) as error:
        raise TypeError(f"`{name}` is kept as JSON, and {value!r} is none: {error}.") from None
    if back != value:
        raise TypeError(f"`{name}` is kept as JSON, from which {value!r} comes back as {back!r}. Hand that in.")
    return back


def _block(leaves: Sequence[Mapping[str, Any]]) -> str:
    return "[" + ",".join(f"\n    {json.dumps(leaf)}" for leaf in leaves) + ("\n  ]" if leaves else "]")


def _where(x: Any) -> str:
    if not isinstance(x, jax.Array) or not isinstance(x.sharding, NamedSharding):
        return ""
    sizes = ", ".join(f"{axis} {size}" for axis, size in x.sharding.mesh.shape.items())
    return f" on {sizes}" if x.is_fully_replicated else f" on {sizes}, split as {tuple(x.sharding.spec)}"
