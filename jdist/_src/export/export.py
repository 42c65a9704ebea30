"""`export`: a function and its weights, for use without the code that made them."""

import hashlib
import json
import pathlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jdist._src.core import jax_compat, source_lines
from jdist._src.core.atomic_files import Path, check_path, write_on_process_0
from jdist._src.core.tree import PyTree, argument_names, dtype_and_shape
from jdist._src.core.version import __version__
from jdist._src.export import weights
from jdist._src.replica.context import ReplicaContext, enter_context, require_cross_replica_context
from jdist._src.values.arrays import check_array
from jdist._src.values.base import is_distributed

FORMAT = 1
MANIFEST, FUNCTION, WEIGHTS = "manifest.json", "function.bin", "weights.safetensors"

_PLATFORMS = ("cpu", "cuda", "rocm", "tpu")

# What says where in a mesh something lies. Over several devices and with a batch of any size, JAX ends the process when such
# a program is called.
_OF_DEVICES = frozenset(("shard_map", "sharding_constraint", "reshard", "mesh_cast", "pmap", "xla_pmap"))


def export(
    path: Path,
    apply: Callable[..., PyTree],
    state: PyTree,
    signature: Sequence[PyTree],
    *,
    platforms: Sequence[str] = ("cpu", "cuda", "tpu"),
) -> None:
    """Writes a function and its weights to a folder, to be used without the code of the function; see `jdist.load`.

    The function takes a batch of any size. The folder has the program (`function.bin`, of `jax.export`), the weights
    (`weights.safetensors`) and what they are, in words (`manifest.json`). An export that is there is replaced, once the new
    one is whole. On several processes all call it, and process 0 writes.

    A later JAX reads what an earlier one wrote, and not the other way round.

    Args:
        path: The folder.
        apply: `apply(state, *inputs)` gives a tree of arrays `[batch, ...]`: what it makes of each example. It sees the state
            without wrappers, and there is one replica: jdist's words are the identity.
        state: The weights, wherever they lie, under any strategy; wrapped values are read, as by `jdist.read_values`.
        signature: What the inputs are, in a tuple: for each a tree of arrays, or `jax.ShapeDtypeStruct`, of a batch of any
            size. The first dim of each is the batch; an input without dims is the same for all examples.
        platforms: What the program is for.

    Raises:
        ValueError: `apply` does not take such inputs, or not in batches of any size; what it returns has no batch; or it says
            how it is split over devices.
        TypeError: The signature is no tuple of arrays, or a leaf of the state is no array.
        OSError: The folder cannot be written, or is there and no export; what was there before is there still.
        ImportError: The packages that it needs are not there.

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
    check_path("export(path, apply, state, signature)", path, apply)
    require_flatbuffers()
    inputs = _inputs(apply, signature)
    _check_platforms(platforms)
    values = jax.tree.map(_as_jax_has_it, weights.to_host(state))
    exported = _exported(apply, values, inputs, tuple(platforms))
    function, gradient = _serialized(exported)
    manifest = _manifest(exported, list(inputs), function, gradient)
    write_weights = weights.file_writer(values)

    def write(folder: pathlib.Path) -> None:
        folder.mkdir()
        (folder / FUNCTION).write_bytes(function)
        write_weights(folder / WEIGHTS)
        (folder / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n")

    write_on_process_0(path, write, lambda there: is_export(there) or (there.is_dir() and not any(there.iterdir())))


def is_export(folder: pathlib.Path) -> bool:
    """Whether `export` wrote this folder."""
    return (folder / MANIFEST).is_file() and (folder / FUNCTION).is_file()


def require_flatbuffers() -> None:
    """Raises ImportError, with what to install, if `jax.export` cannot work."""
    try:
        import flatbuffers as flatbuffers  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise ImportError('Programs are exported with flatbuffers: `python -m pip install "jdist[export]"`.') from error


def _inputs(apply: Callable[..., PyTree], signature: Sequence[PyTree]) -> dict[str, PyTree]:
    """What each input is, by the name that `apply` has for it."""
    if not isinstance(signature, (tuple, list)):
        raise TypeError(f"`signature` is a tuple of inputs, got {type(signature).__name__}: write `(value,)`.")
    names = argument_names(apply, (None, *signature), {})[1:]
    inputs = {name: _kinds(name, tree) for name, tree in zip(names, signature, strict=True)}
    sizes = {leaf: kind.shape[0] for leaf, kind in _named(inputs).items() if kind.shape}
    if not sizes:
        raise ValueError(
            f"No input has a batch: the signature is ({_told(inputs)}). Give at least one a first dim for it."
        )
    if len(set(sizes.values())) > 1:
        raise ValueError(
            f"The first dim of every input is the batch, and it is of one size: the signature is ({_told(inputs)}). What "
            "has no batch belongs to the state."
        )
    return inputs


def _check_platforms(platforms: Sequence[str]) -> None:
    if isinstance(platforms, str) or not platforms or not set(platforms) <= set(_PLATFORMS):
        raise ValueError(f"`platforms` is a tuple of some of {', '.join(map(repr, _PLATFORMS))}, got {platforms!r}.")


def _kinds(name: str, tree: PyTree) -> PyTree:
    for node in jax.tree.leaves(tree, is_leaf=is_distributed):
        if is_distributed(node):
            raise TypeError(
                f"The signature has {node!r} for {name}. Say what one replica sees: an array of `.values[0]`."
            )
    for leaf_name, leaf in weights.leaves_by_name(tree, name).items():
        if not isinstance(leaf, jax.ShapeDtypeStruct):
            check_array(leaf_name, leaf)
    host = lambda leaf: leaf if hasattr(leaf, "dtype") else np.asarray(leaf)
    kind = lambda leaf: jax.ShapeDtypeStruct(np.shape(leaf), weights.jax_dtype(host(leaf)))
    some = lambda kind: (
        _with_batch(kind, max(kind.shape[0], 1)) if kind.shape else kind
    )  # an empty batch is a signature too
    return jax.tree.map(lambda leaf: some(kind(leaf)), tree)


def _as_jax_has_it(leaf: Any) -> Any:
    return leaf if weights.is_random_key(leaf) else np.asarray(leaf, weights.jax_dtype(leaf))


def _exported(
    apply: Callable[..., PyTree], values: PyTree, inputs: Mapping[str, PyTree], platforms: tuple[str, ...]
) -> Any:
    """The program of `apply` on one device, with a batch of any size."""
    trees = (jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), values), *inputs.values())
    program = jax.jit(_of_plain_trees(apply, trees))
    (batch,) = jax.export.symbolic_shape("batch")
    state, *kinds = map(plain_containers, trees)
    symbolic = (state, *jax.tree.map(lambda x: _with_batch(x, batch), kinds))
    with enter_context(ReplicaContext()):
        _check_takes(program, (state, *kinds), inputs)
        _check_any_batch(program, symbolic, batch)
        try:
            exported = jax.export.export(program, platforms=platforms)(*symbolic)
        except Exception as error:
            raise ValueError(
                f"`apply` cannot be exported for {', '.join(platforms)}: {_said(error)}. If one of them cannot do it, leave it "
                'out: `platforms=("cpu",)`.'
            ) from error
    if exported.nr_devices != 1:
        raise ValueError(
            f"`apply` is written for {exported.nr_devices} devices, and an export is the function of one, which every "
            "strategy can split. Leave out of it where things lie."
        )
    return exported


def _of_plain_trees(apply: Callable[..., PyTree], trees: Sequence[PyTree]) -> Callable[..., PyTree]:
    """`apply` of trees without containers of the user's own, giving one."""
    treedefs = [(list(weights.leaves_by_name(tree)), jax.tree.structure(tree)) for tree in trees]

    def of_plain_trees(*given: PyTree) -> PyTree:
        leaves = map(weights.leaves_by_name, given)
        back = [treedef.unflatten([x[n] for n in names]) for x, (names, treedef) in zip(leaves, treedefs, strict=True)]
        return plain_containers(apply(*back))

    return of_plain_trees


def plain_containers(node: PyTree) -> PyTree:
    """A tree of dictionaries, lists and tuples: any other container becomes a dictionary of what it has."""
    if node is None or type(node) in (list, tuple):
        return node if node is None else type(node)(map(plain_containers, node))
    children, _ = jax.tree_util.tree_flatten_with_path(node, is_leaf=lambda x: x is not node)
    if [path for path, _ in children] == [()]:
        return node
    return {jax.tree_util.keystr(path, simple=True): plain_containers(child) for path, child in children}


def _check_takes(program: Callable[..., PyTree], trees: Sequence[PyTree], inputs: Mapping[str, PyTree]) -> None:
    """Raises ValueError if `apply` fails with such inputs, or speaks of devices."""
    try:
        traced = jax.make_jaxpr(program)(*trees)
    except Exception as error:
        raise ValueError(f"`apply` does not take the signature ({_told(inputs)}): {_said(error)}") from error
    for equation in _equations(traced.jaxpr):
        if equation.primitive.name in _OF_DEVICES:
            line = source_lines.equation_frame(equation)
            where = f"`{equation.primitive.name}`" + (f" at {line}" if line else "")
            raise ValueError(
                f"`apply` says how it is split over devices, by a {where}. An export is the function of one device, which "
                "every strategy can split: leave that out of it."
            )


def _equations(program: Any) -> Iterator[Any]:
    for equation in program.eqns:
        yield equation
        for inner in jax_compat.contents(equation).programs:
            yield from _equations(inner)


def _with_batch(kind: jax.ShapeDtypeStruct, batch: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((batch, *kind.shape[1:]), kind.dtype) if kind.shape else kind


def _check_any_batch(program: Any, trees: Sequence[PyTree], batch: Any) -> None:
    """Raises ValueError if `apply` works for some sizes of the batch only, or loses it."""
    try:
        outputs = program.eval_shape(*trees)
    except Exception as error:
        raise ValueError(
            "`apply` takes the batch of the signature, and not one of any size. Take sizes from the array, as in "
            f"`x.reshape(x.shape[0], -1)`, and neither write them as numbers nor decide by them: {_said(error)}"
        ) from error
    for name, leaf in weights.leaves_by_name(outputs, "output").items():
        if not leaf.shape or leaf.shape[0] != batch:
            raise ValueError(
                f"`apply` returns {name} as {dtype_and_shape(leaf)}, whose first dim is not the batch, of any size. Return a row for "
                "each example, however many there are: reshape by `x.shape[0]`, and leave averages over them to the caller."
            )


def _serialized(exported: Any) -> tuple[bytes, bool]:
    """The program in bytes, and whether its gradient is with it."""
    try:
        return bytes(exported.serialize(vjp_order=1)), True
    except Exception:  # not every function has one
        return bytes(exported.serialize()), False


def _manifest(exported: Any, arguments: Sequence[str], function: bytes, gradient: bool) -> dict[str, Any]:
    (state, *inputs), _ = exported.in_tree.unflatten(exported.in_avals)
    outputs = exported.out_tree.unflatten(exported.out_avals)
    return {
        "format": FORMAT,
        "jdist": __version__,
        "jax": jax.__version__,
        "calling_convention_version": exported.calling_convention_version,
        "platforms": list(exported.platforms),
        "gradient": gradient,
        "function": {"bytes": len(function), "sha256": hashlib.sha256(function).hexdigest()},
        "arguments": list(arguments),
        "inputs": _listed(_named(dict(zip(arguments, inputs, strict=True)))),
        "outputs": _listed(weights.leaves_by_name(outputs, "output")),
        "weights": _listed(weights.leaves_by_name(state)),
    }


def _listed(kinds: Mapping[str, Any]) -> dict[str, Any]:
    size = lambda dim: int(dim) if isinstance(dim, int) else str(dim)
    return {name: {"shape": list(map(size, kind.shape)), "dtype": str(kind.dtype)} for name, kind in kinds.items()}


def _named(inputs: Mapping[str, PyTree]) -> dict[str, Any]:
    return {
        leaf_name: leaf
        for name, tree in inputs.items()
        for leaf_name, leaf in weights.leaves_by_name(tree, name).items()
    }


def _told(inputs: Mapping[str, PyTree]) -> str:
    return ", ".join(f"{name}: {dtype_and_shape(kind)}" for name, kind in _named(inputs).items())


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
