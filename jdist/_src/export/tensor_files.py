"""Reads safetensors files, and sets of files with an index, array by array and part by part.

A file is the length of its header, the header as JSON, and the bytes of the arrays. Hugging Face splits large models into
several files, with an index that names the file of each array (https://huggingface.co/docs/safetensors). Local files are mapped
into memory, so only the parts that are used are read; of files at a URL, ranges of bytes are read.
"""

import dataclasses
import json
import math
import pathlib
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from jdist._src.core.byte_dtypes import from_bytes
from jdist._src.core.paths import is_file, is_url

DTYPES = {
    "BOOL": np.bool_, "I8": np.int8, "I16": np.int16, "I32": np.int32, "I64": np.int64,
    "U8": np.uint8, "U16": np.uint16, "U32": np.uint32, "U64": np.uint64,
    "F16": np.float16, "BF16": ml_dtypes.bfloat16, "F32": np.float32, "F64": np.float64, "C64": np.complex64,
    "F8_E4M3": ml_dtypes.float8_e4m3fn, "F8_E5M2": ml_dtypes.float8_e5m2,
}  # fmt: skip
# Entries of the metadata: the names of arrays of random keys, with the implementations of the keys; and the names of arrays
# that are stored as bytes, with their dtypes.
RANDOM_KEYS, BYTE_DTYPES = "jdist.random_keys", "jdist.dtypes"
INDEX_SUFFIX = ".index.json"
_MAX_HEADER_BYTES = 100_000_000  # of the safetensors package


@dataclasses.dataclass(frozen=True)
class StoredTensor:
    """An array in a file, which has not been read.

    Attributes:
        path: The file.
        start: The position of its first byte.
        shape: Its shape.
        dtype: Its dtype after `read`.
        file_dtype: Its dtype in the file: a wider one for integers that fit into `dtype`; bytes for a dtype that safetensors
            does not have.
    """

    path: pathlib.Path
    start: int
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    file_dtype: np.dtype[Any]

    def read(self, index: tuple[slice, ...] | None = None) -> np.ndarray:
        """Returns the array, or the part of it at `index`, as a new array. Only the rows of this part are read.

        Raises:
            OSError: The file cannot be read.
        """
        part = self._read_part(() if index is None else index)
        if self.dtype == self.file_dtype:
            return part
        return from_bytes(part, self.dtype) if self.file_dtype.itemsize == 1 else part.astype(self.dtype)

    def _read_part(self, index: tuple[slice, ...]) -> np.ndarray:
        if is_url(self.path):
            return self._read_url(index)
        if not math.prod(self.shape):  # an empty range cannot be mapped
            return np.zeros(self.shape, self.file_dtype)[index].copy()
        size = math.prod(self.shape) * self.file_dtype.itemsize
        mapped = np.memmap(self.path, np.uint8, "r", self.start, (size,))
        return np.array(mapped.view(self.file_dtype).reshape(self.shape)[index], order="C", ndmin=0)

    def _read_url(self, index: tuple[slice, ...]) -> np.ndarray:
        first, stop, _ = index[0].indices(self.shape[0]) if index else (0, self.shape[0] if self.shape else 1, 1)
        row_bytes = math.prod(self.shape[1:]) * self.file_dtype.itemsize
        with self.path.open("rb") as file:
            file.seek(self.start + first * row_bytes)
            data: Any = file.read((stop - first) * row_bytes)
        rows = np.frombuffer(data, self.file_dtype).reshape((stop - first, *self.shape[1:]) if self.shape else ())
        return rows[(slice(None), *index[1:])].copy() if index else rows.copy()


def read_tensors(path: pathlib.Path) -> dict[str, Any]:
    """Returns the arrays of a safetensors file, or of all files of an index, by their names.

    They are `StoredTensor`s; random keys, which are small, are read.

    Raises:
        FileNotFoundError: The file, or a file of the index, does not exist.
        ValueError: A file is damaged, or has a dtype that JAX lacks; or the index does not match the files.
    """
    if path.name.endswith(INDEX_SUFFIX):
        return _read_index(path)
    return _read_header(path)


def _read_index(path: pathlib.Path) -> dict[str, Any]:
    _check_exists(path)
    files: dict[str, str] = {}
    try:
        files = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
        is_valid = all(isinstance(text, str) for pair in files.items() for text in pair)
    except (ValueError, KeyError, TypeError, AttributeError):
        is_valid = False
    if not is_valid:
        raise ValueError(f"{path} is not an index of safetensors files: it has no `weight_map`. Download it again.")
    tensors: dict[str, Mapping[str, Any]] = {}
    for name, file in files.items():
        if file not in tensors:
            if pathlib.PurePosixPath(file).name != file:
                raise ValueError(f"{path} names the file {file!r} for {name}, which is not in its folder.")
            tensors[file] = _read_header(path.parent / file)
        if name not in tensors[file]:
            raise ValueError(
                f"{path} names the file {file} for {name}, which is not in this file. Download both again."
            )
    return {name: tensors[file][name] for name, file in files.items()}


def _read_header(path: pathlib.Path) -> dict[str, Any]:
    _check_exists(path)
    file_bytes = path.stat().length if is_url(path) else path.stat().st_size  # pyright: ignore[reportAttributeAccessIssue]
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if not 2 <= length <= min(_MAX_HEADER_BYTES, file_bytes - 8):
            raise _damaged(path, "its header is longer than the file")
        text = file.read(length)
    try:
        header = json.loads(text)
        metadata = header.pop("__metadata__", {})
        entries = {
            name: (entry["dtype"], tuple(map(int, entry["shape"])), *map(int, entry["data_offsets"]))
            for name, entry in header.items()
        }
    except (ValueError, KeyError, TypeError, AttributeError):
        raise _damaged(path, "its header is not JSON of this format") from None
    position = 0
    for name, (_, _, first, stop) in sorted(entries.items(), key=lambda entry: entry[1][2:]):
        if first != position or stop < first:
            raise _damaged(path, f"the bytes of {name} do not follow the bytes of the previous array")
        position = stop
    if position != file_bytes - 8 - length:
        raise _damaged(path, f"it has {file_bytes - 8 - length:,} bytes of arrays, and its header names {position:,}")
    keys, dtypes = json.loads(metadata.get(RANDOM_KEYS, "{}")), json.loads(metadata.get(BYTE_DTYPES, "{}"))
    tensors: dict[str, Any] = {}
    for name, (dtype_name, shape, first, stop) in entries.items():
        if dtype_name not in DTYPES:
            raise ValueError(
                f"{name} in {path} has dtype {dtype_name}, and jdist reads {', '.join(DTYPES)}. Cast it before the "
                "file is written."
            )
        dtype = np.dtype(DTYPES[dtype_name])
        if math.prod(shape) * dtype.itemsize != stop - first:
            raise _damaged(path, f"{name} has {stop - first:,} bytes, which is not the size of {dtype}{list(shape)}")
        tensor = StoredTensor(path, 8 + length + first, shape, np.dtype(dtypes.get(name, dtype)), dtype)
        tensors[name] = (
            jax.random.wrap_key_data(jnp.asarray(tensor.read()), impl=keys[name]) if name in keys else tensor
        )
    return tensors


def _check_exists(path: pathlib.Path) -> None:
    if not is_file(path):
        raise FileNotFoundError(f"The file {path} does not exist, or is a folder. Pass the path of a safetensors file.")


def _damaged(path: pathlib.Path, reason: str) -> ValueError:
    return ValueError(f"{path} is not a safetensors file, or it is incomplete: {reason}. Save or download it again.")
