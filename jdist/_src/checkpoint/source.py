"""What a restore reads: which checkpoint of a folder, its manifest, and a plan for each leaf. Uses no collectives."""

import pathlib
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax

from jdist._src.checkpoint import storage
from jdist._src.checkpoint.manifest import from_text, signed
from jdist._src.checkpoint.process_sync import Facts
from jdist._src.checkpoint.renaming import pair_renamed
from jdist._src.checkpoint.restore_plan import Plan, as_saved, differences, over, value_spec
from jdist._src.checkpoint.serialization import plans_of, saved_tree
from jdist._src.checkpoint.tree_format import Leaf, leaves_of
from jdist._src.core.arguments import as_int
from jdist._src.core.tree import PyTree, dtype_and_shape
from jdist._src.strategies.base import Strategy


class RestorePlan(NamedTuple):
    """What a restore reads.

    Attributes:
        step: The step.
        manifest: The manifest of its checkpoint.
        structure: The structure of the state to make.
        plans: How each of its leaves is read.
    """

    step: int
    manifest: Mapping[str, Any]
    structure: Any
    plans: list[Plan]


def found_step(folder: pathlib.Path, step: int | None) -> int:
    """Returns `step`, or the step of the newest complete checkpoint.

    Raises:
        FileNotFoundError: There is no such checkpoint.
    """
    steps = storage.complete_steps(folder)
    if step is None and steps:
        return steps[-1]
    damaged = "".join(f" {path} has no {_MANIFEST}." for path in storage.incomplete_folders(folder, -1))
    if step is None:
        raise FileNotFoundError(f"There is no complete checkpoint in {folder}.{damaged}")
    if as_int("`step`", step, 0) not in steps:
        there = f"There are the steps {', '.join(map(str, steps))}." if steps else "There is none."
        raise FileNotFoundError(f"There is no complete checkpoint of step {step} in {folder}. {there}{damaged}")
    return step


def warn_of_incomplete(folder: pathlib.Path, newest: int | None) -> None:
    """Warns, on process 0, about folders of steps later than the newest complete checkpoint that have no manifest."""
    damaged = storage.incomplete_folders(folder, -1 if newest is None else newest)
    if not damaged or jax.process_index() != 0:
        return
    way = (
        "There is no complete checkpoint."
        if newest is None
        else f"The newest complete checkpoint is that of step {newest}."
    )
    warnings.warn(
        f"{', '.join(map(str, damaged))} is damaged: {_MANIFEST} is missing. {way} A `save` of the same step renames "
        f"the damaged folder to {damaged[-1].name}.damaged.",
        stacklevel=3,
    )


def manifest_in(folder: pathlib.Path, step: int) -> tuple[Mapping[str, Any], PyTree]:
    """Returns the manifest of a checkpoint, and its state with entries for leaves.

    Raises:
        Exception: Of any kind: the manifest is damaged.
    """
    manifest = from_text(storage.manifest_path(folder, step).read_text(), step)
    saved = saved_tree(manifest)
    for leaf in leaves_of(saved):  # a manifest of format 1 has no fingerprint: this raises where a dtype is none
        _ = leaf.value.bits
    return manifest, saved


def source_of(
    name: str, manifest: Mapping[str, Any], saved: PyTree, strategy: Strategy, like: PyTree
) -> tuple[RestorePlan, Facts]:
    """Returns what a restore reads, and what all processes must agree on.

    Args:
        name: The checkpoint, for messages.
        manifest: What `manifest_in` returned.
        saved: The same.
        strategy: Where the state goes.
        like: A state of the wanted structure; None for that of the checkpoint.

    Raises:
        ValueError: The state is another one than `like`, or does not fit the strategy.
    """
    replicas = strategy.replicas
    target = as_saved(saved, replicas.size) if like is None else over(like, replicas.size)
    leaves, wanted = leaves_of(saved), leaves_of(target)
    if like is not None:
        leaves = _named_as(name, leaves, wanted)
    if like is not None and (found := differences(leaves, wanted)):
        raise ValueError(
            f"{name} holds another state than `like`. {' '.join(found)} Hand in the state of the same model and optimizer; or "
            "restore without `like`, and take from it what is wanted."
        )
    plans = plans_of(leaves, target, replicas, strategy._backend.shardings(target, is_state=False))
    facts = {
        "`step`": [str(manifest["step"])],
        "the manifest of the checkpoint": [signed(manifest)["fingerprint"]],
        "`like`": [f"{leaf.path} {dtype_and_shape(leaf.value)}" for leaf in wanted],
    }
    return RestorePlan(manifest["step"], manifest, jax.tree.structure(target), plans), facts


def _named_as(name: str, saved: Sequence[Leaf], wanted: Sequence[Leaf]) -> Sequence[Leaf]:
    """Returns the saved leaves with the names of the wanted ones, where these differ in counters of layers only.

    Raises:
        ValueError: It is not certain which of them belong together.
    """
    there, here = ({leaf.keys: value_spec(leaf) for leaf in leaves} for leaves in (saved, wanted))
    try:
        pairs = pair_renamed(there, here)
    except ValueError as error:
        raise ValueError(
            f"{name} has layers with other names than `like`, and which of them belong together is not certain: {error}. Give "
            "the layers names of their own when the model is built (`name=`), or call `keras.utils.clear_session()` before, "
            "so that the names are those of the checkpoint."
        ) from None
    if pairs is None:
        return saved
    wanted_keys = {keys: new for new, keys in pairs.items()}
    return [leaf._replace(keys=wanted_keys[leaf.keys]) for leaf in saved]


_MANIFEST = f"{storage.MANIFEST}/{storage.MANIFEST_FILE}"
