"""`load`: what `jdist.export` wrote, without the code that it was made by."""

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
from jdist._src.core.tree import PyTree, dtype_and_shape
from jdist._src.export import weights
from jdist._src.export.export import FORMAT, FUNCTION, MANIFEST, WEIGHTS, is_export, require_flatbuffers
from jdist._src.values.arrays import check_range, host_leaves, is_jit_argument
from jdist._src.values.base import is_distributed


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Loaded:
    """A function and its weights; called with a batch, it computes with these on JAX's default device.

    Attributes:
        apply: `apply(state, *inputs)`, for any strategy: `strategy.run(loaded.apply, (state, batch))`, where `state` is
            `strategy.put(loaded.state)`. It has a gradient, if the manifest says so. A state in other containers does as well,
            if its leaves have the same paths: such as the one that was exported.
        state: The weights, numpy arrays in dictionaries, lists and tuples.
        manifest: What it is: inputs, outputs and weights with shapes and dtypes, and by which JAX for which platforms.

    Example:
        >>> import tempfile
        >>> path = tempfile.mkdtemp() + "/line"
        >>> line = lambda state, x: x @ state["w"]
        >>> jdist.export(path, line, {"w": np.ones((3, 2), np.float32)}, (np.zeros((1, 3), np.float32),))
        >>> loaded = jdist.load(path)
        >>> loaded
        Loaded(x: float32[batch,3] -> float32[batch,2]; 1 array of weights, 24 bytes)
        >>> strategy = jdist.MirroredStrategy(["cpu:0", "cpu:1"])
        >>> batch = strategy.distribute_values_from_function(lambda c: np.ones((4, 3), np.float32))
        >>> strategy.run(loaded.apply, (strategy.put(loaded.state), batch))
        PerReplica(float32[2,4,2])
    """

    apply: Callable[..., PyTree]
    state: PyTree
    manifest: Mapping[str, Any]

    def __call__(self, *inputs: PyTree) -> PyTree:
        """What the function makes of a batch, with the weights that came with it.

        Args:
            inputs: As the signature said, of any size of the batch.

        Raises:
            ValueError: An input has another shape or other leaves, the sizes of the batches differ, or a whole number is out of
                range.
            TypeError: An input has another dtype, or there are too few or too many.
        """
        if not all(map(is_jit_argument, host_leaves(inputs))):
            for name, tree in zip(self.manifest["arguments"], inputs, strict=False):
                for leaf_name, leaf in weights.leaves_by_name(tree, name).items():
                    check_range(leaf_name, leaf)
        return self._compiled(self._on_device, *inputs)

    @functools.cached_property
    def _compiled(self) -> Callable[..., PyTree]:
        return jax.jit(self.apply)

    @functools.cached_property
    def _on_device(self) -> PyTree:
        with jax.ensure_compile_time_eval():  # not for the program alone that may be traced here
            return jax.device_put(self.state)

    def __repr__(self) -> str:
        inputs, outputs = ([*map(_text, self.manifest[key].values())] for key in ("inputs", "outputs"))
        takes = ", ".join(f"{name}: {text}" for name, text in zip(self.manifest["inputs"], inputs, strict=True))
        leaves = jax.tree.leaves(self.state)
        arrays = f"{len(leaves)} array{'s' * (len(leaves) != 1)} of weights"
        return f"Loaded({takes} -> {', '.join(outputs)}; {arrays}, {sum(leaf.nbytes for leaf in leaves)} bytes)"


def load(path: Path) -> Loaded:
    """What `jdist.export` wrote: a function and its weights, without the code that it was made by.

    Args:
        path: The folder.

    Raises:
        FileNotFoundError: There is no export.
        ValueError: It is damaged, or a later JAX or jdist wrote it, which this one cannot read.
        RuntimeError: It computes with 64 bits, and these are not turned on.
        ImportError: The packages that it needs are not there.

    Example:
        >>> import tempfile
        >>> path = tempfile.mkdtemp() + "/double"
        >>> jdist.export(path, lambda state, x: x * state, np.float32(2), (np.zeros(1, np.float32),))
        >>> jdist.load(path)(np.arange(3, dtype=np.float32)).tolist()
        [0.0, 2.0, 4.0]
    """
    require_flatbuffers()
    check_path("load(path)", path)
    folder = pathlib.Path(path)
    manifest = _manifest(folder)
    exported = _exported(folder, manifest)
    (state, *inputs), _ = exported.in_tree.unflatten(exported.in_avals)
    _check_bits(folder, jax.tree.leaves((state, inputs)))
    apply = _apply(exported, [state, *inputs], manifest["arguments"])
    return Loaded(apply, weights.load(folder / WEIGHTS, like=state), manifest)


def _manifest(folder: pathlib.Path) -> dict[str, Any]:
    if not is_export(folder):
        raise FileNotFoundError(
            f"There is no export at {folder}: a folder with {MANIFEST}, {FUNCTION} and {WEIGHTS}. `jdist.export` writes one."
        )
    try:
        manifest = json.loads((folder / MANIFEST).read_text())
        form = manifest["format"], manifest["jdist"], manifest["jax"], manifest["arguments"], manifest["function"]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{folder / MANIFEST} is not what `jdist.export` writes: {error!r}. Export again.") from error
    if form[0] != FORMAT:
        raise ValueError(
            f"{folder} is of the form {form[0]}, written by jdist {form[1]}, and this one reads the form {FORMAT}. Upgrade "
            "jdist here, or export again."
        )
    return manifest


def _exported(folder: pathlib.Path, manifest: Mapping[str, Any]) -> Any:
    data = (folder / FUNCTION).read_bytes()
    if hashlib.sha256(data).hexdigest() != manifest["function"].get("sha256"):
        raise ValueError(
            f"{folder / FUNCTION} is not what was exported: it is damaged, or not all there. Export again."
        )
    try:
        exported = jax.export.deserialize(bytearray(data))
        exported.mlir_module()  # what this JAX cannot read it finds out here, and else at the first call
    except Exception as error:
        raise ValueError(
            f"{folder} was written by JAX {manifest['jax']}, and JAX {jax.__version__} cannot read it. A later JAX reads what "
            f"an earlier one wrote, and not the other way round: upgrade JAX here, or export with this one. ({error})"
        ) from error
    return exported


def _check_bits(folder: pathlib.Path, kinds: Sequence[Any]) -> None:
    if any(kind.dtype != weights.jax_dtype(kind) for kind in kinds):
        raise RuntimeError(
            f'{folder} computes with 64 bits. Turn them on, before all else: `jax.config.update("jax_enable_x64", True)`.'
        )


def _apply(exported: Any, kinds: Sequence[PyTree], arguments: Sequence[str]) -> Callable[..., PyTree]:
    def apply(state: PyTree, *inputs: PyTree) -> PyTree:
        if len(inputs) != len(arguments):
            raise TypeError(
                f"The loaded function takes {len(arguments)} inputs ({', '.join(arguments)}), got {len(inputs)}."
            )
        names = ["state", *arguments]
        given = [_fitting(*one) for one in zip(names, (state, *inputs), kinds, strict=True)]
        _check_batch(names, given, kinds)
        return exported.call(*given)

    return apply


def _fitting(name: str, tree: PyTree, kinds: PyTree) -> PyTree:
    """`tree` in the containers that the program knows, by the names of its leaves."""
    for node in jax.tree.leaves(tree, is_leaf=is_distributed):
        if is_distributed(node):
            raise TypeError(
                f"{name} has {node!r} in it, which lies on the devices of a strategy: `strategy.run(loaded.apply, (state, "
                "batch))`; or take one value out, `jdist.read_values(value)`."
            )
    wanted = weights.leaves_by_name(kinds, name)
    leaves = weights.in_order_of(f"{name} is not as it was exported", weights.leaves_by_name(tree, name), wanted)
    fitting = [_array(leaf_name, leaf, wanted[leaf_name]) for leaf_name, leaf in zip(wanted, leaves, strict=True)]
    return jax.tree.unflatten(jax.tree.structure(kinds), fitting)


def _array(name: str, leaf: Any, kind: Any) -> Any:
    """`leaf`, if it is of that kind. A Python number, which has no dtype of its own, takes on that of `kind`."""
    number = isinstance(leaf, (bool, int, float, complex)) or getattr(leaf, "weak_type", False)
    if number and jnp.result_type(leaf, kind.dtype) == kind.dtype:
        leaf = jnp.asarray(leaf, kind.dtype)
    leaf = leaf if hasattr(leaf, "dtype") else np.asarray(leaf)
    if getattr(leaf.dtype, "kind", "") in tuple("OUSMm") or weights.jax_dtype(leaf) != kind.dtype:
        raise TypeError(f"{name} is {dtype_and_shape(leaf)}, and was exported as {dtype_and_shape(kind)}. Cast it.")
    same = [
        one == other or jax.export.is_symbolic_dim(other) for one, other in zip(leaf.shape, kind.shape, strict=False)
    ]
    if len(leaf.shape) != len(kind.shape) or not all(same):
        raise ValueError(
            f"{name} is {dtype_and_shape(leaf)}, and was exported as {dtype_and_shape(kind)}. Give it these dims."
        )
    return leaf


def _check_batch(names: Sequence[str], given: Sequence[PyTree], kinds: Sequence[PyTree]) -> None:
    leaves = [x for name, tree in zip(names, given, strict=True) for x in weights.leaves_by_name(tree, name).items()]
    pairs = zip(leaves, jax.tree.leaves(kinds), strict=True)
    batch = {name: leaf for (name, leaf), kind in pairs if any(map(jax.export.is_symbolic_dim, kind.shape))}
    told = ", ".join(f"{name}: {dtype_and_shape(leaf)}" for name, leaf in batch.items())
    sizes = [leaf.shape[0] for leaf in batch.values()]
    if any(size != sizes[0] for size in sizes):
        raise ValueError(
            f"The inputs have batches of different sizes ({told}). Cut them alike: the first dim is the batch."
        )
    if isinstance(sizes[0], int) and not sizes[0]:
        raise ValueError(f"The batch is empty ({told}). Give it an example, at least.")


def _text(kind: Mapping[str, Any]) -> str:
    return f"{kind['dtype']}[{','.join(map(str, kind['shape']))}]"
