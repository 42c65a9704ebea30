"""`load`: reads a function and its weights that `jdist.export` wrote, without the Python code of the function."""

import dataclasses
import functools
import hashlib
import json
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jdist._src.core.atomic_files import Path, check_path
from jdist._src.core.tree import PyTree, dtype_and_shape, has_dtype, one_line
from jdist._src.export import weights
from jdist._src.export.export import FORMAT, FUNCTION, MANIFEST, WEIGHTS, is_export, require_flatbuffers
from jdist._src.values.array_checks import check_range, host_leaves, is_jit_argument
from jdist._src.values.base import is_distributed


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Loaded:
    """A loaded function and its weights. Calling it with a batch computes on JAX's default device.

    Attributes:
        apply: The function `apply(state, *inputs)`, for any strategy: `strategy.run(loaded.apply, (state, batch))` with
            `state = strategy.put(loaded.state)`. It is differentiable if `manifest["gradient"]` is true. The state may have the
            containers that it had before the export, or any others with the same paths of leaves.
        state: The weights: numpy arrays in dicts, lists and tuples.
        manifest: The description: inputs, outputs and weights with shapes and dtypes, the platforms, and the versions.
        exported: The program, as a `jax.export.Exported`; `exported.mlir_module()` is its StableHLO text. Its arguments are the
            leaves of the state and then those of the inputs.

    Example:
        >>> import tempfile
        >>> path = tempfile.mkdtemp() + "/line"
        >>> line = lambda state, x: x @ state["w"]
        >>> jdist.export(
        ...     path, line, {"w": np.ones((3, 2), np.float32)}, (np.zeros((1, 3), np.float32),)
        ... )
        >>> loaded = jdist.load(path)
        >>> loaded
        Loaded(x: float32[batch,3] -> float32[batch,2]; 1 array of weights, 24 bytes)
        >>> strategy = jdist.MirroredStrategy(["cpu:0", "cpu:1"])
        >>> batch = strategy.distribute_values_from_function(
        ...     lambda c: np.ones((4, 3), np.float32)
        ... )
        >>> strategy.run(loaded.apply, (strategy.put(loaded.state), batch))
        PerReplica(float32[2,4,2])
    """

    apply: Callable[..., PyTree]
    state: PyTree
    manifest: Mapping[str, Any]
    exported: jax.export.Exported

    def __call__(self, *inputs: PyTree) -> PyTree:
        """Computes the function for a batch, with the loaded weights.

        Args:
            inputs: The inputs of the signature, with a batch of any size.

        Raises:
            ValueError: An input has another shape or other leaves than exported, the batch sizes differ, or an integer is out
                of range.
            TypeError: An input has another dtype than exported, or the number of inputs is wrong.
        """
        if not all(map(is_jit_argument, host_leaves(inputs))):
            for name, tree in zip(self.manifest["arguments"], inputs, strict=False):
                for leaf_name, leaf in weights.leaves_by_name(tree, name).items():
                    check_range(leaf_name, leaf)
        return self._compiled(self._device_state, *inputs)

    @functools.cached_property
    def _compiled(self) -> Callable[..., PyTree]:
        return jax.jit(self.apply)

    @functools.cached_property
    def _device_state(self) -> PyTree:
        with jax.ensure_compile_time_eval():  # the first call may be in a function that is being traced
            return jax.device_put(self.state)

    def __repr__(self) -> str:
        text = lambda leaf: f"{leaf['dtype']}[{','.join(map(str, leaf['shape']))}]"
        inputs = ", ".join(f"{name}: {text(leaf)}" for name, leaf in self.manifest["inputs"].items())
        outputs = ", ".join(map(text, self.manifest["outputs"].values()))
        leaves = jax.tree.leaves(self.state)
        arrays = f"{len(leaves)} array{'s' * (len(leaves) != 1)} of weights"
        return f"Loaded({inputs} -> {outputs}; {arrays}, {sum(leaf.nbytes for leaf in leaves)} bytes)"


def load(path: Path) -> Loaded:
    """Returns the function and the weights that `jdist.export` wrote. The code of the function is not needed.

    Args:
        path: The folder.

    Raises:
        FileNotFoundError: The folder is not an export.
        ValueError: The export is damaged, or was written by a later version of JAX or jdist than this one can read.
        RuntimeError: The export uses 64-bit types, and they are not enabled.
        ImportError: flatbuffers or safetensors is not installed.

    Example:
        >>> import tempfile
        >>> path = tempfile.mkdtemp() + "/double"
        >>> jdist.export(
        ...     path, lambda state, x: x * state, np.float32(2), (np.zeros(1, np.float32),)
        ... )
        >>> jdist.load(path)(np.arange(3, dtype=np.float32)).tolist()
        [0.0, 2.0, 4.0]
    """
    require_flatbuffers()
    check_path("load(path)", path)
    folder = pathlib.Path(path)
    manifest = _read_manifest(folder)
    exported = _read_program(folder, manifest)
    (state, *inputs), _ = exported.in_tree.unflatten(exported.in_avals)
    if any(leaf.dtype != weights.jax_dtype(leaf) for leaf in jax.tree.leaves((state, inputs))):
        raise RuntimeError(
            f"{folder} uses 64-bit types. Enable them at the start of the program: "
            '`jax.config.update("jax_enable_x64", True)`.'
        )
    apply = _checked_apply(exported, [state, *inputs], manifest["arguments"])
    return Loaded(apply, weights.load(folder / WEIGHTS, like=state), manifest, exported)


def _read_manifest(folder: pathlib.Path) -> dict[str, Any]:
    if not is_export(folder):
        raise FileNotFoundError(
            f"{folder} is not an export: a folder with {MANIFEST}, {FUNCTION} and {WEIGHTS}. `jdist.export` writes one."
        )
    try:
        manifest = json.loads((folder / MANIFEST).read_text())
        export_format, jdist_version = manifest["format"], manifest["jdist"]
        _ = manifest["jax"], manifest["arguments"], manifest["function"]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{folder / MANIFEST} is not a manifest of `jdist.export`: {error!r}. Export again."
        ) from error
    if export_format != FORMAT:
        raise ValueError(
            f"{folder} has format {export_format}, written by jdist {jdist_version}, and this version reads format {FORMAT}. "
            "Upgrade jdist here, or export again with this version."
        )
    return manifest


def _read_program(folder: pathlib.Path, manifest: Mapping[str, Any]) -> Any:
    data = (folder / FUNCTION).read_bytes()
    if hashlib.sha256(data).hexdigest() != manifest["function"].get("sha256"):
        raise ValueError(
            f"{folder / FUNCTION} is damaged or incomplete: its SHA-256 does not match the manifest. Export again."
        )
    try:
        exported = jax.export.deserialize(bytearray(data))
        exported.mlir_module()  # raises now, instead of at the first call, if this version of JAX cannot read it
    except Exception as error:
        raise ValueError(
            f"{folder} was written by JAX {manifest['jax']}, and JAX {jax.__version__} cannot read it: JAX reads exports of "
            f"the same and of earlier versions only. Upgrade JAX here, or export with this version. ({error})"
        ) from error
    return exported


def _checked_apply(exported: Any, shapes: Sequence[PyTree], arguments: Sequence[str]) -> Callable[..., PyTree]:
    """Returns `apply`, which checks its arguments against the exported shapes."""

    def apply(state: PyTree, *inputs: PyTree) -> PyTree:
        if len(inputs) != len(arguments):
            raise TypeError(
                f"The loaded function takes {len(arguments)} inputs ({', '.join(arguments)}), got {len(inputs)}."
            )
        names = ["state", *arguments]
        args = [_in_exported_containers(*each) for each in zip(names, (state, *inputs), shapes, strict=True)]
        _check_batch_sizes(names, args, shapes)
        return exported.call(*args)

    return apply


def _in_exported_containers(name: str, tree: PyTree, shapes: PyTree) -> PyTree:
    """Returns the leaves of `tree`, matched by name, in the containers of the exported program."""
    for node in jax.tree.leaves(tree, is_leaf=is_distributed):
        if is_distributed(node):
            raise TypeError(
                f"{name} contains {one_line(node)}, a value of a strategy. Call `strategy.run(loaded.apply, (state, batch))`, "
                "or pass the plain value: `jdist.read_values(value)`."
            )
    shapes_by_name = weights.leaves_by_name(shapes, name)
    leaves = weights.in_order_of(
        f"{name} does not match the exported {name}", weights.leaves_by_name(tree, name), shapes_by_name
    )
    arrays = [_check_leaf(*each) for each in zip(shapes_by_name, leaves, shapes_by_name.values(), strict=True)]
    return jax.tree.unflatten(jax.tree.structure(shapes), arrays)


def _check_leaf(name: str, leaf: Any, exported: Any) -> Any:
    """Returns `leaf` as an array, if it has the exported shape and dtype. A Python number takes the exported dtype."""
    is_weak = isinstance(leaf, (bool, int, float, complex)) or getattr(leaf, "weak_type", False)
    if is_weak and jnp.result_type(leaf, exported.dtype) == exported.dtype:
        leaf = jnp.asarray(leaf, exported.dtype)
    leaf = leaf if has_dtype(leaf) else np.asarray(leaf)
    if getattr(leaf.dtype, "kind", "") in tuple("OUSMm") or weights.jax_dtype(leaf) != exported.dtype:
        raise TypeError(
            f"{name} is {dtype_and_shape(leaf)}, and was exported as {dtype_and_shape(exported)}. Cast it to {exported.dtype}."
        )
    is_same = [
        size == other or jax.export.is_symbolic_dim(other)
        for size, other in zip(leaf.shape, exported.shape, strict=False)
    ]
    if len(leaf.shape) != len(exported.shape) or not all(is_same):
        raise ValueError(
            f"{name} is {dtype_and_shape(leaf)}, and was exported as {dtype_and_shape(exported)}. Pass an array of this shape."
        )
    return leaf


def _check_batch_sizes(names: Sequence[str], args: Sequence[PyTree], shapes: Sequence[PyTree]) -> None:
    leaves = [x for name, tree in zip(names, args, strict=True) for x in weights.leaves_by_name(tree, name).items()]
    pairs = zip(leaves, jax.tree.leaves(shapes), strict=True)
    batch = {name: leaf for (name, leaf), shape in pairs if any(map(jax.export.is_symbolic_dim, shape.shape))}
    text = ", ".join(f"{name}: {dtype_and_shape(leaf)}" for name, leaf in batch.items())
    sizes = [leaf.shape[0] for leaf in batch.values()]
    if any(size != sizes[0] for size in sizes):
        raise ValueError(
            f"The inputs have different batch sizes ({text}). The first dimension is the batch, and must be the same for all."
        )
    if isinstance(sizes[0], int) and not sizes[0]:
        raise ValueError(f"The batch is empty ({text}). Pass at least one example.")
