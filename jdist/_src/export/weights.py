"""Weights as safetensors files, which every framework can read: named arrays, and no code.

The name of an array is the path of the leaf, with its parts joined by dots: `layers.0.kernel`.
"""

import contextlib
import dataclasses
import functools
import json
import os
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from jdist._src.checkpoint.leaf_selection import (
    as_paths,
    as_renames,
    check_each_path,
    is_below,
    renamed_leaves,
    unchanged_leaves,
)
from jdist._src.checkpoint.process_sync import Facts, ProcessGroup
from jdist._src.checkpoint.tree_format import Leaf
from jdist._src.core import activity
from jdist._src.core.arguments import as_int
from jdist._src.core.atomic_files import Path, check_path, write_on_process_0
from jdist._src.core.byte_dtypes import byte_dtype, to_bytes
from jdist._src.core.nn_modules import from_array_tree, leaves_with_path, to_array_tree
from jdist._src.core.optional_import import optional_import
from jdist._src.core.paths import as_path
from jdist._src.core.tree import PyTree, dtype_and_shape, has_dtype
from jdist._src.core.version import __version__
from jdist._src.export.tensor_files import BYTE_DTYPES, DTYPES, INDEX_SUFFIX, RANDOM_KEYS, StoredTensor, read_tensors
from jdist._src.replica.context import require_cross_replica_context
from jdist._src.strategies.base import Strategy
from jdist._src.values.array_checks import check_array
from jdist._src.values.array_copies import device_put_copy, to_numpy
from jdist._src.values.base import is_distributed
from jdist._src.values.device_put import check_devices_attached, check_wrapper
from jdist._src.values.process_calls import processes_of
from jdist._src.values.sync_on_read import SyncOnRead

_DTYPE_NAMES = {np.dtype(dtype).name for dtype in DTYPES.values()}


def save(path: Path, tree: PyTree, *, max_file_bytes: int | None = None) -> None:
    """Writes a tree of arrays to a safetensors file, or to several with an index, as Hugging Face does.

    An existing file is replaced when the new one is complete. On several processes all of them call `save`, and process 0
    writes.

    Args:
        path: The file; its name usually ends in `.safetensors`. A local path, or a URL such as `gs://bucket/model.safetensors`.
        tree: Arrays and numbers, in any containers. Wrapped values are read, as by `jdist.read_values`. Random keys are
            restored as random keys. Dtypes of less than 8 bits, and 8-bit floats that safetensors does not have, are stored as
            bytes, which `load` converts back: integers by their values, floats by their bits.
        max_file_bytes: The largest size of a file, except for a larger array, which gets a separate file. Arrays that do not
            fit into one file `model.safetensors` are written to `model-00001-of-00002.safetensors` and so on, and last
            `model.safetensors.index.json`, which `load` reads; an existing `model.safetensors` is removed, or an existing index
            if one file is enough.

    Raises:
        ValueError: Two leaves have the same name, or a leaf was donated to a step; or `max_file_bytes` is less than 1, or the
            name of the file does not end in `.safetensors`.
        CheckpointError: Another process fails, or has a tree with other names, shapes or dtypes.
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

    def check() -> tuple[PyTree, Facts]:
        check_path("weights.save(path, tree)", path, tree)
        if max_file_bytes is not None:
            as_int("`max_file_bytes`", max_file_bytes, 1)
            if os.path.splitext(os.fspath(path))[1] != ".safetensors":
                raise ValueError(
                    f"With `max_file_bytes`, the name of the file must end in .safetensors, got {os.fspath(path)!r}."
                )
        arrays = to_array_tree(tree)
        check_saved_leaves(arrays)
        return arrays, {"`tree`": leaf_lines(arrays), "`max_file_bytes`": [str(max_file_bytes)]}

    with contextlib.closing(ProcessGroup(in_main_thread=True)) as group:
        arrays = group.run_compared("weights.save", check)
    files = {str(path): to_host(arrays)}
    if max_file_bytes is not None:
        files = _split_into_files(path, files[str(path)], max_file_bytes)
    writers = {file: file_writer(part) for file, part in files.items()}
    for file, write in writers.items():
        write_on_process_0(file, write)
    if max_file_bytes is not None:
        _write_index(as_path(path), files)


def load(
    path: Path,
    *,
    like: PyTree = None,
    strategy: Strategy | None = None,
    only: str | Sequence[str] | None = None,
    rename: Mapping[str, str] | None = None,
) -> PyTree:
    """Returns the arrays of a safetensors file, or of several with an index, that jdist or any other program wrote.

    With a strategy, each device gets its part directly: of a sharded array, a process reads the parts of its devices only. On
    several processes, all of them call `load`, and fail together.

    Integers of 64 bits become 32-bit integers if all values fit: with a strategy, unless 64-bit types are enabled, and where
    `like` has them. The files of PyTorch models contain such counters, as `num_batches_tracked`.

    Args:
        path: The file, or an index `model.safetensors.index.json` of files in the same folder. A local path, or a URL such as
            `gs://bucket/model.safetensors`.
        like: A tree with the structure, shapes and dtypes of the result: arrays, or `jax.ShapeDtypeStruct`. The result has the
            same wrappers.
        strategy: The strategy on whose devices the arrays are placed. By default they are numpy arrays.
        only: Names of arrays, or beginnings of names, such as `"encoder.layers"`: only these arrays are read. The other leaves
            of the result are those of `like`, which must be arrays; without `like`, the result contains these arrays only.
        rename: Names in the file and their new names in `like`: `{"backbone": "params.encoder"}`. A name renames all arrays
            that begin with it and a dot; the longest one applies. Names in `only` are new names.

    Returns:
        A tree like `like`; without it, nested dicts by the parts of the names.

    Raises:
        ValueError: The file is damaged or not a safetensors file; or it has other names, shapes or dtypes than `like`; or an
            index does not match its files; or a name in `only` or `rename` does not exist.
        TypeError: With a strategy: the file has 64-bit floats, or 64-bit integers that do not fit into 32 bits; or `only` or
            `rename` does not contain names.
        FileNotFoundError: The file, or a file of the index, does not exist.
        CheckpointError: With a strategy: another process fails, or has a file with other names, shapes or dtypes.

    Example:
        >>> import tempfile
        >>> path = tempfile.mkdtemp() + "/model.safetensors"
        >>> jdist.weights.save(path, {"w": np.ones(3, np.float32), "steps": np.int64(7)})
        >>> strategy = jdist.MirroredStrategy(["cpu:0", "cpu:1"])
        >>> jdist.weights.load(path, strategy=strategy)
        {'steps': Array(7, dtype=int32), 'w': Array([1., 1., 1.], dtype=float32)}
        >>> jdist.weights.load(path, only="bias", rename={"w": "bias"})
        {'bias': array([1., 1., 1.], dtype=float32)}
    """
    require_cross_replica_context("weights.load")
    processes = [jax.process_index()] if strategy is None else processes_of(strategy.mesh)

    def read() -> tuple[PyTree, Facts]:
        with activity.working(f"reads {path}"):
            return _load(path, like, strategy, only, rename)

    with contextlib.closing(ProcessGroup(in_main_thread=True, processes=processes)) as group:
        return group.run_compared("weights.load", read)


def _load(path: Path, like: PyTree, strategy: Strategy | None, only: Any, rename: Any) -> tuple[PyTree, Facts]:
    """Returns the result of `load`, and facts that must be equal on all processes. It uses no collectives."""
    check_path("weights.load(path, like=tree)", path, like)
    paths, renames = as_paths(only), as_renames(rename)
    stored = [Leaf((name,), value, None) for name, value in read_tensors(as_path(path)).items()]
    stored, like = renamed_leaves(str(path), stored, renames, "."), to_array_tree(like)
    named = [] if like is None else [Leaf((name,), leaf, None) for name, leaf in leaves_by_name(like).items()]
    check_each_path(str(path), paths, [*stored, *named], separator=".")
    values = {leaf.path: leaf.value for leaf in stored if is_below(leaf.path, paths, ".")}
    facts = {"`weights.load`": [f"{'.'.join(name)} {dtype_and_shape(value)}" for name, value in values.items()]}
    if like is None:
        return from_array_tree(_in_structure(path, values, None, strategy)), facts
    is_selected = [is_below(leaf.path, paths, ".") for leaf in named]
    unchanged = unchanged_leaves(like, named, {number for number, selected in enumerate(is_selected) if selected})
    leaves, treedef = jax.tree.flatten(like)
    # The leaves that are not loaded are None, which is not a leaf.
    part = treedef.unflatten([x if selected else None for x, selected in zip(leaves, is_selected, strict=True)])
    loaded = iter(jax.tree.leaves(_in_structure(path, values, part, strategy)))
    result = [next(loaded) if selected else unchanged[number] for number, selected in enumerate(is_selected)]
    return from_array_tree(treedef.unflatten(result)), facts


def _in_structure(path: Path, values: Mapping[str, Any], like: PyTree, strategy: Strategy | None) -> PyTree:
    """Returns stored arrays in the structure of `like`, or in nested dicts without it."""
    if like is not None:
        values = _in_order_of_like(path, values, like)
    if strategy is not None:
        values = {name: _with_dtype(path, name, leaf, jax_dtype(leaf)) for name, leaf in values.items()}
    if like is None:
        like = tree = _nested_dicts(path, values)
    else:
        unwrapped = jax.tree.map(lambda x: x.tree if is_distributed(x) else x, like, is_leaf=is_distributed)
        tree = jax.tree.unflatten(jax.tree.structure(unwrapped), list(values.values()))
    wrapped = jax.tree.map(lambda node, x: _in_wrapper(node, x, strategy), like, tree, is_leaf=is_distributed)
    return wrapped if strategy is None else _place(wrapped, strategy)


def leaves_by_name(tree: PyTree, name: str = "") -> dict[str, Any]:
    """Returns the leaves of `tree` by their names, which begin with `name`. A wrapper is not part of a name.

    Raises:
        ValueError: Two leaves have the same name.
    """
    leaves: dict[str, Any] = {}
    unwrapped = jax.tree.map(lambda x: x.tree if is_distributed(x) else x, tree, is_leaf=is_distributed)
    for path, leaf in leaves_with_path(unwrapped):
        leaf_path = jax.tree_util.keystr(path, simple=True, separator=".")
        full_name = ".".join(part for part in (name, leaf_path) if part)
        if full_name in leaves:
            raise ValueError(
                f"Two leaves have the name `{full_name}`: a dict has a key with a dot, or two keys with the same text. Rename "
                "one of them."
            )
        leaves[full_name] = leaf
    return leaves


def check_saved_leaves(tree: PyTree, has_jax_dtypes: bool = False) -> None:
    """Checks that all leaves of `tree` can be saved. Uses no collectives: it may fail on one process of several.

    Args:
        tree: Arrays and numbers, some in wrappers.
        has_jax_dtypes: Whether the leaves are saved with the dtypes of JAX.

    Raises:
        ValueError: Two leaves have the same name, or a leaf was donated to a step.
        TypeError: A leaf is not an array, or safetensors does not have its dtype.
        ImportError: safetensors is not installed.
    """
    _import_safetensors()
    for name, leaf in leaves_by_name(tree).items():
        check_array(name, leaf)
        if isinstance(leaf, jax.Array) and leaf.is_deleted():
            raise ValueError(
                f"{name} ({dtype_and_shape(leaf)}) was donated to a step. Pass the state that the step returned."
            )
        is_stored = has_jax_dtypes or not has_dtype(leaf) or is_random_key(leaf)
        if not is_stored and np.dtype(leaf.dtype).name not in _DTYPE_NAMES and byte_dtype(leaf.dtype) is None:
            raise TypeError(
                f"{name} is {dtype_and_shape(leaf)}, and safetensors files do not have this dtype. Cast it to one of "
                f"{', '.join(sorted(_DTYPE_NAMES))}."
            )


def leaf_lines(tree: PyTree) -> list[str]:
    """Returns a line per leaf, for the comparison of processes."""
    return [f"{name} {dtype_and_shape(leaf)}" for name, leaf in leaves_by_name(tree).items()]


def to_host(tree: PyTree) -> PyTree:
    """Returns `tree` with every wrapper read and every leaf on the host: numpy arrays, and random keys.

    It works leaf by leaf, so no device needs memory for all of them. All processes call it, after `check_saved_leaves`.
    """
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
    """Returns a function that writes a tree of host values, for which `check_saved_leaves` passes, to a file."""
    package = _import_safetensors()
    leaves = leaves_by_name(tree)
    keys = {name: str(jax.random.key_impl(leaf)) for name, leaf in leaves.items() if is_random_key(leaf)}
    arrays = {name: jax.random.key_data(leaf) if name in keys else leaf for name, leaf in leaves.items()}
    without_dtype = {name: x.dtype.name for name, x in arrays.items() if x.dtype.name not in _DTYPE_NAMES}
    # `save_file` writes the memory of an array as it is, so it must be in C order.
    contiguous = {
        name: np.asarray(to_bytes(array) if name in without_dtype else array, order="C")
        for name, array in arrays.items()
    }
    metadata = {"jdist": __version__, "format": "np"} | ({RANDOM_KEYS: json.dumps(keys)} if keys else {})
    metadata |= {BYTE_DTYPES: json.dumps(without_dtype)} if without_dtype else {}

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

        label = activity.Label("the shards of an array", is_collective=True)
        leaf = activity.launch(label, functools.partial(multihost_utils.process_allgather, tiled=True), leaf)
    if isinstance(leaf, (bool, int, float, complex)):
        return np.asarray(leaf, jax_dtype(np.asarray(leaf)))
    return to_numpy(leaf) if isinstance(leaf, jax.Array) else np.asarray(leaf)


def _import_safetensors() -> Any:
    with optional_import("Weights need safetensors", "jdist[export]"):
        import safetensors.numpy
    return safetensors


def _split_into_files(path: Path, tree: PyTree, max_file_bytes: int) -> dict[str, PyTree]:
    """Returns dicts of the arrays of each file, by the paths of the files, in the order of the leaves."""
    prefix, suffix = os.path.splitext(os.fspath(path))
    parts: list[dict[str, Any]] = [{}]
    for name, leaf in leaves_by_name(tree).items():
        if parts[-1] and sum(map(_num_bytes, parts[-1].values())) + _num_bytes(leaf) > max_file_bytes:
            parts.append({})
        parts[-1][name] = leaf
    if len(parts) == 1:
        return {os.fspath(path): tree}
    return {f"{prefix}-{i:05}-of-{len(parts):05}{suffix}": part for i, part in enumerate(parts, start=1)}


def _num_bytes(leaf: Any) -> int:
    return (jax.random.key_data(leaf) if is_random_key(leaf) else leaf).nbytes


def _write_index(path: pathlib.Path, files: Mapping[str, Mapping[str, Any]]) -> None:
    """Writes the index of several files, after them, and removes the file or index that it replaces."""
    index = path.with_name(path.name + INDEX_SUFFIX)
    is_split = list(files) != [str(path)]
    if is_split:
        names = {name: os.path.basename(file) for file, part in files.items() for name in part}
        size = sum(_num_bytes(leaf) for part in files.values() for leaf in part.values())
        text = json.dumps({"metadata": {"total_size": size}, "weight_map": names}, indent=2)

        def write(new: pathlib.Path) -> None:
            new.write_text(text, encoding="utf-8")

        write_on_process_0(index, write)
    if jax.process_index() == 0:
        (path if is_split else index).unlink(missing_ok=True)


def _in_wrapper(node: Any, value: PyTree, strategy: Strategy | None) -> PyTree:
    """Returns stored arrays in the wrapper of `node`.

    They are read without a strategy. Values per replica are always read, because they depend on the replicas.
    """
    if strategy is None or (is_distributed(node) and node._is_stacked):
        value = jax.tree.map(lambda x: x.read() if isinstance(x, StoredTensor) else x, value)
    if not isinstance(node, SyncOnRead) or not jax.tree.leaves(value):
        return node._with_tree(value) if is_distributed(node) else value
    one_row = node._with_tree(jax.tree.map(lambda x: x[None], value))
    if strategy is not None:
        return one_row._for_num_replicas(strategy.num_replicas_in_sync)
    return one_row._for_num_replicas(np.shape(jax.tree.leaves(node.tree)[0])[0])


def _place(tree: PyTree, strategy: Strategy) -> PyTree:
    """Returns `tree`, in which some leaves are not read, on the devices. Each process reads the parts of its devices."""
    check_devices_attached(strategy.mesh)
    shape_of = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype) if isinstance(x, StoredTensor) else x
    shapes = jax.tree.map(shape_of, tree)
    for path, node in jax.tree_util.tree_flatten_with_path(shapes, is_leaf=is_distributed)[0]:
        check_wrapper(f"value{jax.tree_util.keystr(path)}", node, strategy.replicas)
    leaves, treedef = jax.tree.flatten(tree)
    shardings = [x for x in jax.tree.leaves(strategy.shardings(shapes)) if isinstance(x, NamedSharding)]
    return treedef.unflatten(
        jax.make_array_from_callback(x.shape, sharding, x.read)
        if isinstance(x, StoredTensor)
        else device_put_copy(x, sharding)
        for x, sharding in zip(leaves, shardings, strict=True)
    )


def _with_dtype(path: Path, name: str, leaf: Any, dtype: Any) -> Any:
    """Returns a stored array with a dtype of fewer bits.

    Raises:
        TypeError: It has floats, which would be rounded, or integers that do not fit.
    """
    if leaf.dtype == dtype:
        return leaf
    problem = ""
    if jnp.issubdtype(leaf.dtype, jnp.integer):
        values = leaf.read()
        limits = np.iinfo(dtype)
        too_large = values[(values < limits.min) | (values > limits.max)]
        if not too_large.size:
            return dataclasses.replace(leaf, dtype=np.dtype(dtype))
        problem = f", which cannot hold {too_large[0]}"
    raise TypeError(
        f"{name} in {path} is {dtype_and_shape(leaf)}, and would become {dtype} on the devices{problem}. Load it without a "
        "strategy, cast it, and call `strategy.put`; leave it out with `only=`; or enable 64-bit types: "
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


def _in_order_of_like(path: Path, values: Mapping[str, Any], like: PyTree) -> dict[str, Any]:
    """Returns `values` in the order of the leaves of `like`, with its integer dtypes, after its wrappers are read."""
    mismatch = f"{path} does not match `like`"
    shapes = leaves_by_name(jax.tree.map(_shapes_when_read, like, is_leaf=is_distributed))
    leaves = dict(zip(shapes, in_order_of(mismatch, values, shapes), strict=True))
    for name, leaf in leaves.items():
        dtype = shapes[name].dtype
        if leaf.dtype != dtype == jax_dtype(leaf) and jnp.issubdtype(dtype, jnp.integer):
            leaves[name] = _with_dtype(path, name, leaf, dtype)
    differences = [
        f"{name}: {dtype_and_shape(x)} instead of {dtype_and_shape(shapes[name])}"
        for name, x in leaves.items()
        if dtype_and_shape(x) != dtype_and_shape(shapes[name])
    ]
    if differences:
        text = _count_text(len(leaves), "arrays have another shape or dtype", differences)
        raise ValueError(f"{mismatch}: {text}. Load them without `like`, and cast or reshape them.")
    return leaves


def _shapes_when_read(node: Any) -> PyTree:
    def shape_of(leaf: Any) -> jax.ShapeDtypeStruct:
        dtype = leaf.dtype if has_dtype(leaf) else _leaf_to_host(leaf).dtype
        return jax.ShapeDtypeStruct(np.shape(leaf)[isinstance(node, SyncOnRead) :], dtype)

    return jax.tree.map(shape_of, node.tree if is_distributed(node) else node)


def _count_text(total: int, statement: str, names: Sequence[str]) -> str:
    shortened = ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
    return f"{len(names)} of {total} {statement} ({shortened})"
