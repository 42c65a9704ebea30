"""Weights in safetensors files, which every framework reads: arrays under names, and no code.

A name is the path of a leaf, its parts joined by dots: `layers.0.kernel`.
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
_NAMES = {np.dtype(dtype).name for dtype in _DTYPES.values()}
_KEYS = "jdist.random_keys"


def save(path: Path, tree: PyTree) -> None:
    """Writes a tree of arrays to a safetensors file.

    A file that is there is replaced, at once and only when the new one is whole. On several processes all call it, and
    process 0 writes.

    Args:
        path: The file; by custom its name ends in `.safetensors`.
        tree: Arrays and numbers, in any containers. Wrapped values are read, as by `jdist.read_values`; random keys are kept.

    Raises:
        ValueError: Two leaves have the same name, or a leaf was donated to a step.
        TypeError: A leaf is no array, or of a dtype that these files do not have; or the two arguments are swapped.
        OSError: There is no such folder, or it cannot be written to; what was there before is there still.

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


def load(path: Path, like: PyTree = None, strategy: Strategy | None = None) -> PyTree:
    """The arrays of a safetensors file, whoever wrote it.

    Args:
        path: The file.
        like: A tree with the structure, shapes and dtypes that are wanted: arrays, or `jax.ShapeDtypeStruct`. Its wrappers
            are put around what is loaded.
        strategy: Puts them on its devices.

    Returns:
        A tree like `like`; without it, dictionaries by the parts of the names. Its leaves are arrays of the strategy, or
        else numpy's.

    Raises:
        ValueError: It is no safetensors file, or not all there; or it holds other names, shapes or dtypes than `like`.
        TypeError: It holds 64-bit numbers for a strategy, which JAX would cut to 32 bits.
        FileNotFoundError: There is no such file.

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
    values = _read(path)
    if strategy is not None:
        _check_kept(path, values)
    if like is None:
        tree = _nested(path, values)
    else:
        replicas = strategy.num_replicas_in_sync if strategy else None
        wrapped = lambda node, value: _rewrapped(node, value, replicas)
        tree = jax.tree.map(wrapped, like, _filled(path, values, like), is_leaf=is_distributed)
    return strategy.put(tree) if strategy else tree


def leaves_by_name(tree: PyTree, name: str = "") -> dict[str, Any]:
    """The leaves of `tree` by their names, which begin with `name`; those of a wrapper by what is in it.

    Raises:
        ValueError: Two of them have the same name.
    """
    found: dict[str, Any] = {}
    for path, leaf in jax.tree_util.tree_flatten_with_path(_unwrapped(tree))[0]:
        own = jax.tree_util.keystr(path, simple=True, separator=".")
        full = ".".join(part for part in (name, own) if part)
        if full in found:
            raise ValueError(
                f"Two leaves have the name `{full}`: a dictionary has a dot in a key, or keys that are written alike. Rename "
                "one of them."
            )
        found[full] = leaf
    return found


def to_host(tree: PyTree) -> PyTree:
    """`tree` with every wrapper read, and every leaf whole in this process: numpy arrays, and random keys.

    Leaf by leaf, so no device has to hold all of it. On several processes all call it.
    """
    for name, leaf in leaves_by_name(tree).items():
        check_array(name, leaf)
        if isinstance(leaf, jax.Array) and leaf.is_deleted():
            raise ValueError(
                f"{name} ({dtype_and_shape(leaf)}) was donated to a step. Hand in the state that the step returned, in its place."
            )
    return jax.tree.map(
        lambda node: jax.tree.map(_on_host, node.read() if is_distributed(node) else node), tree, is_leaf=is_distributed
    )


def jax_dtype(leaf: Any) -> Any:
    """The dtype that JAX makes of that of `leaf`: without 64 bits turned on, it has no more than 32."""
    if jnp.issubdtype(leaf.dtype, jax.dtypes.extended):
        return leaf.dtype
    return jax.dtypes.canonicalize_dtype(leaf.dtype)


def file_writer(tree: PyTree) -> Callable[[pathlib.Path], None]:
    """What writes a tree of host values to a file.

    Raises:
        ValueError: Two leaves have the same name.
        TypeError: A leaf is of a dtype that these files do not have.
    """
    package = _safetensors()
    leaves = leaves_by_name(tree)
    keys = {name: str(jax.random.key_impl(leaf)) for name, leaf in leaves.items() if is_random_key(leaf)}
    arrays = {name: jax.random.key_data(leaf) if name in keys else leaf for name, leaf in leaves.items()}
    for name, array in arrays.items():
        if array.dtype.name not in _NAMES:
            raise TypeError(
                f"{name} is {dtype_and_shape(array)}, and safetensors files have no such dtype. Cast it, to one of "
                f"{', '.join(sorted(_NAMES))}."
            )
    # What is not in C order would be written in the order in which it lies.
    plain = {name: np.asarray(array, order="C") for name, array in arrays.items()}
    about = {"jdist": __version__, "format": "np"} | ({_KEYS: json.dumps(keys)} if keys else {})

    def write(path: pathlib.Path) -> None:
        try:
            package.numpy.save_file(plain, path, about)
        except package.SafetensorError as error:
            raise OSError(f"The weights could not be written: {error}") from error

    return write


def in_order_of(wrong: str, values: Mapping[str, Any], like: Mapping[str, Any]) -> list[Any]:
    """Those `values` that are wanted, in the order of `like`.

    Raises:
        ValueError: They have other names than `like`; the message begins with `wrong`.
    """
    missing = [name for name in like if name not in values]
    foreign = [name for name in values if name not in like]
    if missing or foreign:
        told = [_told(len(like), "missing", missing)] * bool(missing)
        told += [_told(len(values), "not wanted", foreign)] * bool(foreign)
        raise ValueError(
            f"{wrong}: of the names, {' and '.join(told)}. Rename the leaves, or hand in the tree that was saved."
        )
    return [values[name] for name in like]


def is_random_key(leaf: Any) -> bool:
    """Whether `leaf` is an array of random keys."""
    return jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _unwrapped(tree: PyTree) -> PyTree:
    return jax.tree.map(lambda node: node.tree if is_distributed(node) else node, tree, is_leaf=is_distributed)


def _on_host(leaf: Any) -> Any:
    if isinstance(leaf, jax.Array) and is_random_key(leaf):
        return jax.random.wrap_key_data(_on_host(jax.random.key_data(leaf)), impl=jax.random.key_impl(leaf))
    if isinstance(leaf, jax.Array) and not (leaf.is_fully_addressable or leaf.is_fully_replicated):
        from jax.experimental import multihost_utils

        leaf = multihost_utils.process_allgather(leaf, tiled=True)
    if isinstance(leaf, (bool, int, float, complex)):
        return np.asarray(leaf, jax_dtype(np.asarray(leaf)))
    return np.asarray(leaf)


def _safetensors() -> Any:
    try:
        import safetensors.numpy
    except ImportError as error:
        raise ImportError('Weights are kept in safetensors files: `python -m pip install "jdist[export]"`.') from error
    return safetensors


def _read(path: Path) -> dict[str, Any]:
    package = _safetensors()
    if not os.path.isfile(path):
        raise FileNotFoundError(f"There is no safetensors file {path}. Give the path of the file itself.")
    try:
        with package.safe_open(path, framework="np") as file:  # it checks that the header fits the file
            about = file.metadata() or {}
    except package.SafetensorError as error:
        raise ValueError(
            f"{path} is no safetensors file, or not all of one: {error}. Save or fetch it anew."
        ) from error
    keys = json.loads(about.get(_KEYS, "{}"))
    return {
        name: jax.random.wrap_key_data(jnp.asarray(array), impl=keys[name]) if name in keys else array
        for name, array in _arrays(path)
    }


def _arrays(path: Path) -> Iterator[tuple[str, np.ndarray]]:
    """The arrays of a file that is known to be one. The package's own reader does not know all of its dtypes."""
    with open(path, "rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        start = file.tell()
        header.pop("__metadata__", None)
        for name, entry in header.items():
            if entry["dtype"] not in _DTYPES:
                raise ValueError(
                    f"{name} in {path} is of the dtype {entry['dtype']}; jdist reads {', '.join(_DTYPES)}. Cast it, where the "
                    "file was written."
                )
            first, last = entry["data_offsets"]
            file.seek(start + first)
            data = np.fromfile(file, np.uint8, last - first)
            yield name, data.view(_DTYPES[entry["dtype"]]).reshape(entry["shape"])


def _check_kept(path: Path, values: Mapping[str, Any]) -> None:
    for name, leaf in values.items():
        if leaf.dtype != (kept := jax_dtype(leaf)):
            raise TypeError(
                f"{name} in {path} is {dtype_and_shape(leaf)}, and would become {kept} on the devices. Load it without a strategy, cast "
                'it, and `strategy.put` it; or turn on 64 bits: `jax.config.update("jax_enable_x64", True)`.'
            )


def _nested(path: Path, values: Mapping[str, Any]) -> PyTree:
    if list(values) == [""]:
        return values[""]
    tree: dict[str, Any] = {}
    for name, value in values.items():
        *above, last = name.split(".")
        node = tree
        for part in above:
            node = node.setdefault(part, {})
            if not isinstance(node, dict):
                break
        if not isinstance(node, dict) or last in node:
            raise ValueError(
                f"`{name}` in {path} begins with the name of another array, so they are no tree. Say which tree they are: "
                "`like=`."
            )
        node[last] = value
    return tree


def _filled(path: Path, values: Mapping[str, Any], like: PyTree) -> PyTree:
    """The plain tree that is read of `like`, with `values` in it."""
    plain = jax.tree.map(_read_kind, like, is_leaf=is_distributed)
    found = in_order_of(f"{path} does not fit `like`", values, leaves_by_name(plain))
    kinds = zip(leaves_by_name(plain), found, jax.tree.leaves(plain), strict=True)
    other = [
        f"{name}: {dtype_and_shape(x)}, and not {dtype_and_shape(kind)}"
        for name, x, kind in kinds
        if dtype_and_shape(x) != dtype_and_shape(kind)
    ]
    if other:
        told = _told(len(found), "of another shape or dtype", other)
        raise ValueError(
            f"{path} does not fit `like`: {told}. Cast or reshape them: without `like` they load as they are."
        )
    return jax.tree.unflatten(jax.tree.structure(plain), found)


def _read_kind(node: Any) -> PyTree:
    def kind(leaf: Any) -> jax.ShapeDtypeStruct:
        dtype = leaf.dtype if hasattr(leaf, "dtype") else _on_host(leaf).dtype
        return jax.ShapeDtypeStruct(np.shape(leaf)[isinstance(node, SyncOnRead) :], dtype)

    return jax.tree.map(kind, node.tree if is_distributed(node) else node)


def _rewrapped(node: Any, value: PyTree, num_replicas: int | None) -> PyTree:
    """`value` in the wrapper that `node` is."""
    if not isinstance(node, SyncOnRead):
        return node._with_tree(value) if is_distributed(node) else value
    one_row = node._with_tree(jax.tree.map(lambda x: x[None], value))
    return one_row.over(num_replicas or np.shape(jax.tree.leaves(node.tree)[0])[0])


def _told(total: int, what: str, names: Sequence[str]) -> str:
    few = ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
    return f"{len(names)} of {total} are {what} ({few})"
