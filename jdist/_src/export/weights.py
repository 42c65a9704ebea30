"""Weights as safetensors files, which every framework can read: named arrays, and no code.

The name of an array is the path of the leaf, with its parts joined by dots: `layers.0.kernel`.
"""

import json
import os
import pathlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from jdist._src.core.atomic_files import Path, check_path, write_on_process_0
from jdist._src.core.tree import PyTree, dtype_and_shape
from jdist._src.core.version import __version__
from jdist._src.replica.context import require_cross_replica_context
from jdist._src.strategies.base import Strategy
from jdist._src.values.arrays import check_array
from jdist._src.values.base import is_distributed
from jdist._src.values.sync_on_read import SyncOnRead

_DTYPES = {
    "BOOL": np.bool_, "I8": np.int8, "I16": np.int16, "I32": np.int32, "I64": np.int64,
    "U8": np.uint8, "U16": np.uint16, "U32": np.uint32, "U64": np.uint64,
    "F16": np.float16, "BF16": ml_dtypes.bfloat16, "F32": np.float32, "F64": np.float64, "C64": np.complex64,
    "F8_E4M3": ml_dtypes.float8_e4m3fn, "F8_E5M2": ml_dtypes.float8_e5m2,
}  # fmt: skip
_DTYPE_NAMES = {np.dtype(dtype).name for dtype in _DTYPES.values()}
_KEYS = "jdist.random_keys"


def save(path: Path, tree: PyTree) -> None:
    """Writes a tree of arrays to a safetensors file.

    An existing file is replaced when the new one is complete. On several processes all of them call `save`, and process 0
    writes.

    Args:
        path: The file; its name usually ends in `.safetensors`.
        tree: Arrays and numbers, in any containers. Wrapped values are read, as by `jdist.read_values`. Random keys are
            restored as random keys.

    Raises:
        ValueError: Two leaves have the same name, or a leaf was donated to a step.
        TypeError: A leaf is not an array, or safetensors does not have its dtype; or the two arguments are swapped.
        OSError: The folder does not exist, or cannot be written to. An existing file is unchanged.

    Example:
        >>> import tempfile
        >>> path = tempfile.mkdtemp() + "/model.safetensors"
        >>> jdist.weights.save(path, {"layers": [{"kernel": np.ones((2, 3), np.float32)}]})
        >>> jdist.weights.load(path)
        {'layers': {'0': {'kernel': array([[1., 1., 1.],
               [1., 1., 1.]], dtype=float32)}}}
    """
    require_cross_replica_context("weights.save")
    check_path("weights.save(path, tree)", path, tree)
    write_on_process_0(path, file_writer(to_host(tree)))


def load(path: Path, *, like: PyTree = None, strategy: Strategy | None = None) -> PyTree:
    """Returns the arrays of a safetensors file that jdist or any other program wrote.

    Args:
        path: The file.
        like: A tree with the structure, shapes and dtypes of the result: arrays, or `jax.ShapeDtypeStruct`. The result has the
            same wrappers.
        strategy: The strategy on whose devices the arrays are placed. By default they are numpy arrays.

    Returns:
        A tree like `like`; without it, nested dicts by the parts of the names.

    Raises:
        ValueError: The file is damaged or not a safetensors file; or it has other names, shapes or dtypes than `like`.
        TypeError: With a strategy: the file has 64-bit numbers, which JAX would truncate to 32 bits.
        FileNotFoundError: The file does not exist.

    Example:
        >>> import tempfile
        >>> path = tempfile.mkdtemp() + "/model.safetensors"
        >>> jdist.weights.save(path, {"w": np.ones(3, np.float32)})
        >>> strategy = jdist.MirroredStrategy(["cpu:0", "cpu:1"])
        >>> jdist.weights.load(path, like={"w": jax.ShapeDtypeStruct((3,), "float32")}, strategy=strategy)
        {'w': Array([1., 1., 1.], dtype=float32)}
    """
    require_cross_replica_context("weights.load")
    check_path("weights.load(path, like=tree)", path, like)
    values = _read_file(path)
    if strategy is not None:
        _check_not_truncated(path, values)
    if like is None:
        tree = _nested_dicts(path, values)
    else:
        replicas = strategy.num_replicas_in_sync if strategy else None
        rewrap = lambda node, value: _rewrap(node, value, replicas)
        tree = jax.tree.map(rewrap, like, _in_structure_of(path, values, like), is_leaf=is_distributed)
    return strategy.put(tree) if strategy else tree


def leaves_by_name(tree: PyTree, name: str = "") -> dict[str, Any]:
    """Returns the leaves of `tree` by their names, which begin with `name`. A wrapper is not part of a name.

    Raises:
        ValueError: Two leaves have the same name.
    """
    leaves: dict[str, Any] = {}
    unwrapped = jax.tree.map(lambda x: x.tree if is_distributed(x) else x, tree, is_leaf=is_distributed)
    for path, leaf in jax.tree_util.tree_flatten_with_path(unwrapped)[0]:
        leaf_path = jax.tree_util.keystr(path, simple=True, separator=".")
        full_name = ".".join(part for part in (name, leaf_path) if part)
        if full_name in leaves:
            raise ValueError(
                f"Two leaves have the name `{full_name}`: a dict has a key with a dot, or two keys with the same text. Rename "
                "one of them."
            )
        leaves[full_name] = leaf
    return leaves


def to_host(tree: PyTree) -> PyTree:
    """Returns `tree` with every wrapper read and every leaf on the host: numpy arrays, and random keys.

    It works leaf by leaf, so no device needs memory for all of them. All processes call it.
    """
    for name, leaf in leaves_by_name(tree).items():
        check_array(name, leaf)
        if isinstance(leaf, jax.Array) and leaf.is_deleted():
            raise ValueError(
                f"{name} ({dtype_and_shape(leaf)}) was donated to a step. Pass the state that the step returned."
            )
    read = lambda node: node.read() if is_distributed(node) else node
    return jax.tree.map(lambda node: jax.tree.map(_leaf_to_host, read(node)), tree, is_leaf=is_distributed)


def jax_dtype(leaf: Any) -> Any:
    """Returns the dtype of `leaf` as a JAX array, which has at most 32 bits unless 64-bit types are enabled."""
    if jnp.issubdtype(leaf.dtype, jax.dtypes.extended):
        return leaf.dtype
    return jax.dtypes.canonicalize_dtype(leaf.dtype)


def is_random_key(leaf: Any) -> bool:
    """Whether `leaf` is an array of random keys."""
    return jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def file_writer(tree: PyTree) -> Callable[[pathlib.Path], None]:
    """Returns a function that writes a tree of host values to a file.

    Raises:
        ValueError: Two leaves have the same name.
        TypeError: safetensors does not have the dtype of a leaf.
    """
    package = _import_safetensors()
    leaves = leaves_by_name(tree)
    keys = {name: str(jax.random.key_impl(leaf)) for name, leaf in leaves.items() if is_random_key(leaf)}
    arrays = {name: jax.random.key_data(leaf) if name in keys else leaf for name, leaf in leaves.items()}
    for name, array in arrays.items():
        if array.dtype.name not in _DTYPE_NAMES:
            raise TypeError(
                f"{name} is {dtype_and_shape(array)}, and safetensors files do not have this dtype. Cast it to one of "
                f"{', '.join(sorted(_DTYPE_NAMES))}."
            )
    # `save_file` writes the memory of an array as it is, so it must be in C order.
    contiguous = {name: np.asarray(array, order="C") for name, array in arrays.items()}
    metadata = {"jdist": __version__, "format": "np"} | ({_KEYS: json.dumps(keys)} if keys else {})

    def write(path: pathlib.Path) -> None:
        try:
            package.numpy.save_file(contiguous, path, metadata)
        except package.SafetensorError as error:
            raise OSError(f"The weights could not be written to {path.parent}: {error}") from error

    return write


def in_order_of(mismatch: str, values: Mapping[str, Any], like: Mapping[str, Any]) -> list[Any]:
    """Returns `values` in the order of the names of `like`.

    Raises:
        ValueError: The names differ; the message begins with `mismatch`.
    """
    missing = [name for name in like if name not in values]
    unknown = [name for name in values if name not in like]
    if missing or unknown:
        counts = [_count_text(len(like), "names are missing", missing)] * bool(missing)
        counts += [_count_text(len(values), "names are unknown", unknown)] * bool(unknown)
        raise ValueError(f"{mismatch}: {' and '.join(counts)}. Rename the leaves, or pass the tree that was saved.")
    return [values[name] for name in like]


def _leaf_to_host(leaf: Any) -> Any:
    if isinstance(leaf, jax.Array) and is_random_key(leaf):
        return jax.random.wrap_key_data(_leaf_to_host(jax.random.key_data(leaf)), impl=jax.random.key_impl(leaf))
    if isinstance(leaf, jax.Array) and not (leaf.is_fully_addressable or leaf.is_fully_replicated):
        from jax.experimental import multihost_utils

        leaf = multihost_utils.process_allgather(leaf, tiled=True)
    if isinstance(leaf, (bool, int, float, complex)):
        return np.asarray(leaf, jax_dtype(np.asarray(leaf)))
    return np.asarray(leaf)


def _import_safetensors() -> Any:
    try:
        import safetensors.numpy
    except ImportError as error:
        raise ImportError('Weights need safetensors: `python -m pip install "jdist[export]"`.') from error
    return safetensors


def _read_file(path: Path) -> dict[str, Any]:
    package = _import_safetensors()
    if not os.path.isfile(path):
        raise FileNotFoundError(f"The file {path} does not exist, or is a folder. Pass the path of a safetensors file.")
    try:
        with package.safe_open(path, framework="np") as file:  # checks that the header fits the file
            metadata = file.metadata() or {}
    except package.SafetensorError as error:
        raise ValueError(
            f"{path} is not a safetensors file, or it is incomplete: {error}. Save or download it again."
        ) from error
    keys = json.loads(metadata.get(_KEYS, "{}"))
    return {
        name: jax.random.wrap_key_data(jnp.asarray(array), impl=keys[name]) if name in keys else array
        for name, array in _read_arrays(path)
    }


def _read_arrays(path: Path) -> Iterator[tuple[str, np.ndarray]]:
    """Yields the arrays of a valid file. The reader of the safetensors package does not support all of its dtypes."""
    with open(path, "rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        start = file.tell()
        header.pop("__metadata__", None)
        for name, entry in header.items():
            if entry["dtype"] not in _DTYPES:
                raise ValueError(
                    f"{name} in {path} has dtype {entry['dtype']}, and jdist reads {', '.join(_DTYPES)}. Cast it before the "
                    "file is written."
                )
            first, last = entry["data_offsets"]
            file.seek(start + first)
            data = np.fromfile(file, np.uint8, last - first)
            yield name, data.view(_DTYPES[entry["dtype"]]).reshape(entry["shape"])


def _check_not_truncated(path: Path, values: Mapping[str, Any]) -> None:
    for name, leaf in values.items():
        if leaf.dtype != (dtype := jax_dtype(leaf)):
            raise TypeError(
                f"{name} in {path} is {dtype_and_shape(leaf)}, and would become {dtype} on the devices. Load it without a "
                "strategy, cast it, and call `strategy.put`; or enable 64-bit types: "
                '`jax.config.update("jax_enable_x64", True)`.'
            )


def _nested_dicts(path: Path, values: Mapping[str, Any]) -> PyTree:
    if list(values) == [""]:
        return values[""]
    tree: dict[str, Any] = {}
    for name, value in values.items():
        *parents, last = name.split(".")
        node = tree
        for part in parents:
            node = node.setdefault(part, {})
            if not isinstance(node, dict):
                break
        if not isinstance(node, dict) or last in node:
            raise ValueError(
                f"`{name}` in {path} begins with the name of another array, so the names do not form nested dicts. Pass "
                "the tree as `like=`."
            )
        node[last] = value
    return tree


def _in_structure_of(path: Path, values: Mapping[str, Any], like: PyTree) -> PyTree:
    """Returns `values` in the structure of `like` after its wrappers are read."""
    mismatch = f"{path} does not match `like`"
    shapes = jax.tree.map(_shapes_when_read, like, is_leaf=is_distributed)
    leaves = in_order_of(mismatch, values, leaves_by_name(shapes))
    differences = [
        f"{name}: {dtype_and_shape(x)} instead of {dtype_and_shape(shape)}"
        for name, x, shape in zip(leaves_by_name(shapes), leaves, jax.tree.leaves(shapes), strict=True)
        if dtype_and_shape(x) != dtype_and_shape(shape)
    ]
    if differences:
        text = _count_text(len(leaves), "arrays have another shape or dtype", differences)
        raise ValueError(f"{mismatch}: {text}. Load them without `like`, and cast or reshape them.")
    return jax.tree.unflatten(jax.tree.structure(shapes), leaves)


def _shapes_when_read(node: Any) -> PyTree:
    def shape_of(leaf: Any) -> jax.ShapeDtypeStruct:
        dtype = leaf.dtype if hasattr(leaf, "dtype") else _leaf_to_host(leaf).dtype
        return jax.ShapeDtypeStruct(np.shape(leaf)[isinstance(node, SyncOnRead) :], dtype)

    return jax.tree.map(shape_of, node.tree if is_distributed(node) else node)


def _rewrap(node: Any, value: PyTree, num_replicas: int | None) -> PyTree:
    """Returns `value` in the wrapper of `node`."""
    if not isinstance(node, SyncOnRead):
        return node._with_tree(value) if is_distributed(node) else value
    one_row = node._with_tree(jax.tree.map(lambda x: x[None], value))
    return one_row._for_num_replicas(num_replicas or np.shape(jax.tree.leaves(node.tree)[0])[0])


def _count_text(total: int, statement: str, names: Sequence[str]) -> str:
    shortened = ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
    return f"{len(names)} of {total} {statement} ({shortened})"
