"""The state of training, as one tree."""

import dataclasses
from typing import Any, NamedTuple, Self, final

import jax
import jax.numpy as jnp
import optax

from jdist._src.core.tree import PyTree, named_leaves
from jdist._src.values.arrays import check_not_deleted
from jdist._src.values.base import is_distributed


@final
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
    """What training goes on from: a frozen tree, of which each step makes a new one.

    Attributes:
        step: How many steps it has gone through, int32 `[]`.
        params: What the optimizer changes.
        opt_state: What the optimizer keeps.
        model_state: What the model keeps besides, such as batch statistics.
        rng: The key that every step draws from, together with its number; the same in all steps.

    Example:
        >>> strategy = jdist.MirroredStrategy(["cpu:0", "cpu:1"])
        >>> def make(key):
        ...     return jdist.TrainState.create({"w": jax.numpy.zeros(3)}, optax.adam(1e-3), rng=key)
        >>> state = strategy.init(make, jax.random.key(0))
        >>> int(state.step), state.params["w"].shape
        (0, (3,))
    """

    step: Any
    params: PyTree
    opt_state: PyTree
    model_state: PyTree
    rng: jax.Array

    @classmethod
    def create(
        cls,
        params: PyTree,
        optimizer: optax.GradientTransformation,
        *,
        model_state: PyTree = None,
        rng: jax.Array | None = None,
    ) -> Self:
        """The state before the first step; to be called in `strategy.init`, where it is made on the devices.

        Args:
            params: The parameters to begin with.
            optimizer: What will change them.
            model_state: What the model keeps besides.
            rng: A key; by default `jax.random.key(0)`.
        """
        rng = jax.random.key(0) if rng is None else rng
        return cls(jnp.int32(0), params, optimizer.init(params), {} if model_state is None else model_state, rng)


class StateFields(NamedTuple):
    """What a training step needs of a state, whatever class that is of.

    Attributes:
        step: How many steps it has gone through.
        params: What the optimizer changes.
        opt_state: What the optimizer keeps.
        model_state: What the model keeps besides.
        rng: The key of all steps.
    """

    step: Any
    params: PyTree
    opt_state: PyTree
    model_state: PyTree
    rng: Any


def state_fields(state: PyTree) -> StateFields:
    """The parts of a `TrainState`, or of another dataclass with `step`, `params` and `opt_state`.

    That may have a `model_state` too, or `batch_stats` as is the custom with flax, and a `rng`.

    Raises:
        TypeError: It has not.
    """
    missing = [name for name in ("step", "params", "opt_state") if not hasattr(state, name)]
    is_record = dataclasses.is_dataclass(type(state))
    if missing or not is_record:
        what = f"lacks {', '.join(missing)}" if is_record else "is none"
        raise TypeError(
            f"The state of training is a `jdist.TrainState`, or a dataclass with `step`, `params` and `opt_state`; "
            f"{type(state).__name__} {what}."
        )
    model_state = getattr(state, "model_state", None)
    if model_state is None and getattr(state, "batch_stats", None):
        model_state = {"batch_stats": state.batch_stats}
    rng = getattr(state, "rng", None)
    return StateFields(
        state.step, state.params, state.opt_state, model_state or {}, jax.random.key(0) if rng is None else rng
    )


class ModelVariables(NamedTuple):
    """The part of a training state that the model is applied with.

    Attributes:
        params: The parameters.
        model_state: The other variables of the model.
    """

    params: PyTree
    model_state: PyTree


def model_variables(state: PyTree) -> ModelVariables:
    """Returns the parameters, and the other variables of the model, as plain arrays.

    Of values that differ between the replicas it is the mean; of values that are split, each part where it is stored.

    Raises:
        ValueError: The memory of the state was given away.
        TypeError: `state` is no training state.
    """
    parts = state_fields(state)
    for name, leaf in named_leaves("state", state):
        check_not_deleted(name, leaf)
    read = lambda node: node.read() if is_distributed(node) else node
    return ModelVariables(*jax.tree.map(read, (parts.params, parts.model_state), is_leaf=is_distributed))


def replace_fields(state: Any, step: Any, params: PyTree, opt_state: PyTree, model_state: PyTree) -> Any:
    """`state` with what a step made of it."""
    new = {"step": step, "params": params, "opt_state": opt_state}
    if getattr(state, "model_state", None):
        new["model_state"] = model_state
    elif getattr(state, "batch_stats", None):
        new["batch_stats"] = model_state["batch_stats"]
    return dataclasses.replace(state, **new)
