"""Files with the results of functions of other processes: JSON and arrays in one npz file, without pickles."""

import json
import os
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

_LEAVES = (bool, int, float, str, type(None))


def save_value(path: pathlib.Path, value: Any) -> None:
    """Writes a tree of JSON values and arrays to an npz file, which exists when it is complete.

    Args:
        path: The file.
        value: Dicts with string keys, lists, tuples, strings, numbers, booleans, None, numpy arrays and jax arrays whose value
            is on this process.

    Raises:
        TypeError: The tree contains another type; the message has its path.
    """
    arrays: list[np.ndarray] = []
    tree = json.dumps(_encode(value, "result", arrays))
    unfinished = path.with_suffix(".unfinished")
    with unfinished.open("wb") as file:
        np.savez(file, np.array(tree), *arrays)
    os.replace(unfinished, path)


def load_value(path: pathlib.Path) -> Any:
    """Returns the tree that `save_value` wrote; jax arrays are numpy arrays."""
    with np.load(path, allow_pickle=False) as file:
        return _decode(json.loads(str(file["arr_0"])), file)


def _encode(value: Any, where: str, arrays: list[np.ndarray]) -> Any:
    """Returns `value` as JSON: a dict is a dict, other nodes are lists that begin with their type. Appends its arrays."""
    if type(value) in _LEAVES:
        return value
    if type(value) is dict and all(type(key) is str for key in value):
        return {key: _encode(item, f"{where}[{key!r}]", arrays) for key, item in value.items()}
    if type(value) in (list, tuple):
        return [type(value).__name__, *(_encode(item, f"{where}[{i}]", arrays) for i, item in enumerate(value))]
    array = _as_numpy(value, where)
    stored, dtype = array, None
    if array.dtype.type.__module__ != "numpy":  # such as bfloat16: npz does not store the name of the dtype
        stored, dtype = array[..., None].view(np.uint8), array.dtype.name
    arrays.append(stored)
    return ["array", f"arr_{len(arrays)}", dtype]


def _as_numpy(value: Any, where: str) -> np.ndarray:
    if isinstance(value, jax.Array) and not value.is_fully_addressable and not value.is_fully_replicated:
        raise TypeError(
            f"{where} is a jax.Array {value.aval.str_short()} with parts on other processes. Return the parts of this process, "
            "such as `[shard.data for shard in x.addressable_shards]`, or replicate it with `strategy.gather`."
        )
    if isinstance(value, (np.ndarray, np.generic, jax.Array)) and not jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
        array = np.asarray(value)
        if not array.dtype.hasobject and array.dtype.names is None:
            return array
    raise TypeError(
        f"{where} is {type(value).__qualname__}, which cannot be sent to the test. Return numbers, strings, booleans, None, "
        "arrays, and lists, tuples and dicts with string keys of them."
    )


def _decode(tree: Any, file: Any) -> Any:
    if isinstance(tree, dict):
        return {key: _decode(item, file) for key, item in tree.items()}
    if not isinstance(tree, list):
        return tree
    kind, *items = tree
    if kind == "array":
        name, dtype = items  # the name that `np.savez` gives: `arr_0` is the tree
        return file[name] if dtype is None else file[name].view(np.dtype(dtype))[..., 0]
    return [_decode(item, file) for item in items] if kind == "list" else tuple(_decode(item, file) for item in items)
