"""Several steps a call: one program that scans over their inputs, or one program, called for each in turn."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jdist._src.core.tree import PyTree, dtype_and_shape, named_leaves
from jdist._src.values.base import is_distributed
from jdist._src.values.per_replica import PerReplica


def scan_steps(step: Callable[..., tuple[PyTree, PyTree]], turns: int, state: PyTree, *inputs: PyTree) -> Any:
    """The state after so many steps, and their outputs, leaves `[step, ...]`; in a replica function."""
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *inputs_per_step(inputs, turns))
    return lax.scan(lambda state, inputs: step(state, *inputs), jax.tree.map(jnp.asarray, state), stacked, turns)


def run_sequentially(
    launch: Callable[..., tuple[PyTree, PyTree]], turns: int, state: PyTree, *inputs: PyTree
) -> tuple[PyTree, PyTree]:
    """The same of a program of one step, as the host calls it."""
    seen = []
    for given in inputs_per_step(inputs, turns):
        state, outputs = launch(state, *given)
        seen.append(outputs)
    return state, _stacked(seen)


def inputs_per_step(inputs: Sequence[Any], turns: int) -> list[tuple[PyTree, ...]]:
    """The inputs of each step.

    Raises:
        ValueError: One is no list of so many, or what is in it is not alike.
    """
    for number, given in enumerate(inputs, start=1):
        # A tuple is one batch `(x, y)`: read as two steps, it would be scanned silently.
        if not isinstance(given, list) or len(given) != turns:
            what = f"{len(given)}" if isinstance(given, list) else f"a {type(given).__name__}"
            raise ValueError(
                f"With `steps_per_call={turns}` each input is a list of {turns}, what each step takes, and input {number} is "
                f"{what}: `step(state, [batch, ...])`."
            )
        for turn, one in enumerate(given):
            _check_alike(f"inputs[{number - 1}]", given[0], turn, one)
    return list(zip(*inputs, strict=True)) if inputs else [()] * turns


def _check_alike(name: str, first: PyTree, turn: int, other: PyTree) -> None:
    if jax.tree.structure(first) != jax.tree.structure(other):
        raise ValueError(f"{name}[{turn}] has another structure than {name}[0]: the steps of a call take inputs alike.")
    for (leaf_name, a), (_, b) in zip(named_leaves(f"{name}[{turn}]", other), named_leaves(name, first), strict=True):
        if np.shape(a) != np.shape(b):
            raise ValueError(
                f"{leaf_name} is {dtype_and_shape(a)} and was {dtype_and_shape(b)} in the first: steps of a call take inputs alike."
            )


@jax.jit
def _stacked(outputs: list[PyTree]) -> PyTree:
    def one(*items: Any) -> Any:
        dim = 1 if isinstance(items[0], PerReplica) else 0
        return jax.tree.map(lambda *leaves: jnp.stack(leaves, axis=dim), *items)

    return jax.tree.map(one, *outputs, is_leaf=is_distributed)
