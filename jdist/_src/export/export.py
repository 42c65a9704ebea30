"""`export`: writes a function and its weights to a folder, for use without the Python code of the function."""

import contextlib
import hashlib
import json
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from jdist._src.checkpoint.process_sync import Facts, ProcessGroup
from jdist._src.core import source_lines
from jdist._src.core.atomic_files import Path, check_path, write_on_process_0
from jdist._src.core.byte_dtypes import to_bytes
from jdist._src.core.nn_modules import array_children, is_box, is_nnx_module, value_in
from jdist._src.core.optional_import import optional_import
from jdist._src.core.tree import PyTree, argument_names, dtype_and_shape, has_dtype, one_line
from jdist._src.core.version import __version__
from jdist._src.export import weights
from jdist._src.jaxpr.interpreter import all_equations
from jdist._src.jaxpr.primitives import PARTITIONING
from jdist._src.replica.context import ReplicaContext, enter_context, require_cross_replica_context
from jdist._src.values.array_checks import check_array
from jdist._src.values.base import is_distributed

FORMAT = 1
MANIFEST, FUNCTION, WEIGHTS = "manifest.json", "function.bin", "weights.safetensors"

Platform = Literal["cpu", "cuda", "rocm", "tpu"]
_TWO_BITS = (jnp.int2, jnp.uint2)
_PLATFORMS = ("cpu", "cuda", "rocm", "tpu")


def export(
    path: Path,
    apply: Callable[..., PyTree],
    state: PyTree,
    signature: Sequence[PyTree],
    *,
    platforms: Sequence[Platform] = ("cpu", "cuda", "tpu"),
) -> None:
    """Writes a function and its weights to a folder, for use without the code of the function; see `jdist.load`.

    The exported function takes a batch of any size. The folder contains the program (`function.bin`, of `jax.export`), the
    weights (`weights.safetensors`) and a description (`manifest.json`). An existing export is replaced when the new one is
    complete. On several processes all of them call `export`, and process 0 writes.

    An export can be loaded by the same or a later version of JAX, not by an earlier one.

    Args:
        path: The folder.
        apply: A function `apply(state, *inputs)` that returns a tree of arrays `[batch, ...]`, one result per example. The
            state is passed without wrappers, and there is one replica: jdist's collectives are the identity.
        state: The weights, with any sharding, under any strategy. Wrapped values are read, as by `jdist.read_values`. 2-bit
            integers, which `jax.export` does not have, are exported as bytes; `apply` receives them with their dtype.
        signature: The inputs, as a tuple: for each input a tree of arrays, or of `jax.ShapeDtypeStruct`, of a batch of any
            size. The first dimension is the batch. An input without dimensions is the same for all examples.
        platforms: The platforms of the program.

    Raises:
        ValueError: `apply` does not accept such inputs, or not for any batch size; a result is without a batch dimension; or
            `apply` refers to a mesh.
        TypeError: The signature is not a tuple of arrays, or a leaf of the state is not an array.
        CheckpointError: Another process fails, or has a state with other names, shapes or dtypes.
        OSError: The folder cannot be written, or exists and is not an export. Its previous content is unchanged.
        ImportError: flatbuffers or safetensors is not installed.

    Example:
        >>> import tempfile
        >>> path = tempfile.mkdtemp() + "/line"
        >>> line = lambda state, x: x @ state["w"] + state["b"]
        >>> state = {"w": np.ones((3, 2), np.float32), "b": np.zeros(2, np.float32)}
        >>> jdist.export(path, line, state, (jax.ShapeDtypeStruct((1, 3), "float32"),))
        >>> jdist.load(path)(np.ones((5, 3), np.float32)).shape
        (5, 2)
    """
    require_cross_replica_context("export")

    def check() -> tuple[dict[str, PyTree], Facts]:
        check_path("export(path, apply, state, signature)", path, apply)
        require_flatbuffers()
        if isinstance(platforms, str) or not platforms or not set(platforms) <= set(_PLATFORMS):
            raise ValueError(
                f"`platforms` must be a non-empty tuple of {', '.join(map(repr, _PLATFORMS))}, got {one_line(platforms)}."
            )
        weights.check_saved_leaves(state, has_jax_dtypes=True)
        return _input_shapes(apply, signature), {"`state`": weights.leaf_lines(state)}

    with contextlib.closing(ProcessGroup(in_main_thread=True)) as group:
        inputs = group.run_compared("jdist.export", check)
    values = jax.tree.map(
        lambda x: x if weights.is_random_key(x) else np.asarray(x, weights.jax_dtype(x)), weights.to_host(state)
    )
    apply, values = _with_stored_dtypes(apply, values)
    exported = _export_program(apply, values, inputs, tuple(platforms))
    function, has_gradient = _serialize(exported)
    manifest = _make_manifest(exported, list(inputs), function, has_gradient)
    write_weights = weights.file_writer(values)

    def write(folder: pathlib.Path) -> None:
        folder.mkdir()
        (folder / FUNCTION).write_bytes(function)
        write_weights(folder / WEIGHTS)
        (folder / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n")

    write_on_process_0(path, write, lambda folder: is_export(folder) or (folder.is_dir() and not any(folder.iterdir())))


def is_export(folder: pathlib.Path) -> bool:
    """Whether `folder` was written by `export`."""
    return (folder / MANIFEST).is_file() and (folder / FUNCTION).is_file()


def require_flatbuffers() -> None:
    """Raises ImportError if the package that `jax.export` needs is not installed."""
    with optional_import("Exported programs need flatbuffers", "jdist[export]"):
        import flatbuffers as flatbuffers  # pyright: ignore[reportMissingImports]


def _input_shapes(apply: Callable[..., PyTree], signature: Sequence[PyTree]) -> dict[str, PyTree]:
    """Returns the shapes and dtypes of each input, by the name of the parameter of `apply`."""
    if not isinstance(signature, (tuple, list)):
        raise TypeError(f"`signature` must be a tuple of inputs, got {type(signature).__name__}. Write `(value,)`.")
    names = argument_names(apply, (None, *signature), {})[1:]
    inputs = {name: _shapes(name, tree) for name, tree in zip(names, signature, strict=True)}
    sizes = {name: leaf.shape[0] for name, leaf in _named_leaves(inputs).items() if leaf.shape}
    if not sizes:
        raise ValueError(
            f"No input has a batch dimension: the signature is ({_signature_text(inputs)}). Add a first dimension to at least "
            "one input."
        )
    if len(set(sizes.values())) > 1:
        raise ValueError(
            f"The first dimension of every input is the batch, and must have the same size: the signature is "
            f"({_signature_text(inputs)}). Make a value without a batch dimension part of the state."
        )
    return inputs


def _shapes(name: str, tree: PyTree) -> PyTree:
    for node in jax.tree.leaves(tree, is_leaf=is_distributed):
        if is_distributed(node):
            raise TypeError(
                f"The signature has {one_line(node)} for {name}. Pass the arrays of one replica, such as `value.values[0]`."
            )
    for leaf_name, leaf in weights.leaves_by_name(tree, name).items():
        if not isinstance(leaf, jax.ShapeDtypeStruct):
            check_array(leaf_name, leaf)

    def shape_of(leaf: Any) -> jax.ShapeDtypeStruct:
        dtype = weights.jax_dtype(leaf if has_dtype(leaf) else np.asarray(leaf))
        shape = jax.ShapeDtypeStruct(np.shape(leaf), dtype)
        return _with_batch_size(shape, max(shape.shape[0], 1)) if shape.shape else shape  # an empty batch is allowed

    return jax.tree.map(shape_of, tree)


def _with_stored_dtypes(apply: Callable[..., PyTree], values: PyTree) -> tuple[Callable[..., PyTree], PyTree]:
    """Returns `apply` and its weights with bytes in place of integers of 2 bits."""
    dtypes = [leaf.dtype for leaf in jax.tree.leaves(values)]
    if not any(dtype in _TWO_BITS for dtype in dtypes):
        return apply, values

    def apply_to_bytes(state: PyTree, *args: PyTree) -> PyTree:
        leaves, treedef = jax.tree.flatten(state)
        leaves = [x if x.dtype == dtype else x.astype(dtype) for x, dtype in zip(leaves, dtypes, strict=True)]
        return apply(treedef.unflatten(leaves), *args)

    return apply_to_bytes, jax.tree.map(lambda x: to_bytes(x) if x.dtype in _TWO_BITS else x, values)


def _export_program(
    apply: Callable[..., PyTree], values: PyTree, inputs: Mapping[str, PyTree], platforms: tuple[str, ...]
) -> Any:
    """Returns the `jax.export.Exported` of `apply` for one device and a batch of any size."""
    trees = (jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), values), *inputs.values())
    program = jax.jit(_on_plain_containers(apply, trees))
    (batch,) = jax.export.symbolic_shape("batch")
    plain_state, *plain_inputs = map(plain_containers, trees)
    symbolic = (plain_state, *jax.tree.map(lambda x: _with_batch_size(x, batch), plain_inputs))
    with enter_context(ReplicaContext()):
        _check_accepts(program, (plain_state, *plain_inputs), inputs)
        _check_any_batch_size(program, symbolic, batch)
        try:
            exported = jax.export.export(program, platforms=platforms)(*symbolic)
        except Exception as error:
            raise ValueError(
                f"`apply` cannot be exported for {', '.join(platforms)}: {_error_text(error)}. If one of them does not "
                'support it, leave it out: `platforms=("cpu",)`.'
            ) from error
    if exported.nr_devices != 1:
        raise ValueError(
            f"`apply` is compiled for {exported.nr_devices} devices, and an export is a function for one device, which every "
            "strategy can split. Remove the shardings from `apply`."
        )
    return exported


def _on_plain_containers(apply: Callable[..., PyTree], trees: Sequence[PyTree]) -> Callable[..., PyTree]:
    """Returns `apply` with arguments and a result in dicts, lists and tuples; `trees` have the containers of the arguments."""
    treedefs = [(list(weights.leaves_by_name(tree)), jax.tree.structure(tree)) for tree in trees]

    def apply_to_plain(*args: PyTree) -> PyTree:
        leaves = map(weights.leaves_by_name, args)
        trees = [
            treedef.unflatten([x[name] for name in names]) for x, (names, treedef) in zip(leaves, treedefs, strict=True)
        ]
        return plain_containers(apply(*trees))

    return apply_to_plain


def plain_containers(node: PyTree) -> PyTree:
    """Returns a tree of dicts, lists and tuples.

    Any other container becomes a dict of its children; an nnx variable, or a box of linen, becomes its value.
    """
    if is_box(node):
        return plain_containers(value_in(node))
    if node is None or type(node) in (list, tuple):
        return node if node is None else type(node)(map(plain_containers, node))
    children, _ = jax.tree_util.tree_flatten_with_path(node, is_leaf=lambda x: x is not node)
    if [path for path, _ in children] == [()]:
        return node
    if is_nnx_module(node):
        children = array_children(children)
    return {jax.tree_util.keystr(path, simple=True): plain_containers(child) for path, child in children}


def _check_accepts(program: Callable[..., PyTree], trees: Sequence[PyTree], inputs: Mapping[str, PyTree]) -> None:
    """Raises ValueError if `apply` fails with the inputs of the signature, or refers to a mesh."""
    try:
        jaxpr = jax.make_jaxpr(program)(*trees).jaxpr
    except Exception as error:
        raise ValueError(
            f"`apply` does not accept the signature ({_signature_text(inputs)}): {_error_text(error)}"
        ) from error
    # JAX ends the process when a program with one of these primitives, and a symbolic batch size, is called on several devices.
    for equation in all_equations(jaxpr):
        if equation.primitive.name in PARTITIONING:
            line = source_lines.equation_frame(equation)
            location = f" at {line}" if line else ""
            raise ValueError(
                f"`apply` refers to a mesh, in `{equation.primitive.name}`{location}. An export is a function for one device, "
                "which every strategy can split: remove it from `apply`."
            )


def _with_batch_size(leaf: jax.ShapeDtypeStruct, batch: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((batch, *leaf.shape[1:]), leaf.dtype) if leaf.shape else leaf


def _check_any_batch_size(program: Any, trees: Sequence[PyTree], batch: Any) -> None:
    """Raises ValueError if `apply` works for some batch sizes only, or a result is without a batch dimension."""
    try:
        outputs = program.eval_shape(*trees)
    except Exception as error:
        raise ValueError(
            "`apply` accepts the batch size of the signature, but not any batch size. Take sizes from the arrays, as in "
            "`x.reshape(x.shape[0], -1)`, instead of numbers, and do not branch on the batch size: "
            f"{_error_text(error)}"
        ) from error
    for name, leaf in weights.leaves_by_name(outputs, "output").items():
        if not leaf.shape or leaf.shape[0] != batch:
            raise ValueError(
                f"`apply` returns {name} as {dtype_and_shape(leaf)}, whose first dimension is not the batch. Return one result "
                "per example: reshape with `x.shape[0]`, and let the caller compute means over the batch."
            )


def _serialize(exported: Any) -> tuple[bytes, bool]:
    """Returns the bytes of the program, and whether they contain its gradient."""
    try:
        return bytes(exported.serialize(vjp_order=1)), True
    except Exception:  # not every function has a gradient
        return bytes(exported.serialize()), False


def _make_manifest(exported: Any, arguments: Sequence[str], function: bytes, has_gradient: bool) -> dict[str, Any]:
    (state, *inputs), _ = exported.in_tree.unflatten(exported.in_avals)
    outputs = exported.out_tree.unflatten(exported.out_avals)
    return {
        "format": FORMAT,
        "jdist": __version__,
        "jax": jax.__version__,
        "calling_convention_version": exported.calling_convention_version,
        "platforms": list(exported.platforms),
        "gradient": has_gradient,
        "function": {"bytes": len(function), "sha256": hashlib.sha256(function).hexdigest()},
        "arguments": list(arguments),
        "inputs": _describe(_named_leaves(dict(zip(arguments, inputs, strict=True)))),
        "outputs": _describe(weights.leaves_by_name(outputs, "output")),
        "weights": _describe(weights.leaves_by_name(state)),
    }


def _describe(leaves: Mapping[str, Any]) -> dict[str, Any]:
    size = lambda dim: int(dim) if isinstance(dim, int) else str(dim)
    return {name: {"shape": list(map(size, leaf.shape)), "dtype": str(leaf.dtype)} for name, leaf in leaves.items()}


def _named_leaves(inputs: Mapping[str, PyTree]) -> dict[str, Any]:
    return {
        leaf_name: leaf
        for name, tree in inputs.items()
        for leaf_name, leaf in weights.leaves_by_name(tree, name).items()
    }


def _signature_text(inputs: Mapping[str, PyTree]) -> str:
    return ", ".join(f"{name}: {dtype_and_shape(leaf)}" for name, leaf in _named_leaves(inputs).items())


def _error_text(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
