"""The training state as one pytree, and the values that are read from it."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol, Self, TypeAlias, final

import jax
import jax.numpy as jnp
import optax

from jdist._src.core.tree import PyTree, describe_tree, describe_type, has_dtype, is_named_tuple, named_leaves, one_line
from jdist._src.replica.precision import LossScaleState
from jdist._src.strategies.variables import read_values
from jdist._src.sync.accumulation import EveryState, SkipState
from jdist._src.values.array_checks import check_array, check_not_deleted
from jdist._src.values.base import is_distributed

Schedule: TypeAlias = Callable[[Any], Any]
GROWING_MODEL_STATE = (
    "A `sow` appends a value in each call. Sow losses in the collection `losses`, which the trainer adds to the loss, and "
    "other values in `intermediates`, which it ignores; or store a value of a fixed shape with `self.variable`."
)
GROWING_OPTIMIZER_STATE = (
    "`init` of the optimizer must return all leaves. `optax.monitor` adds its measurements in the first update; "
    "`optax.snapshot` has them from the beginning."
)


@final
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
    """The state of training: a frozen pytree. Each step returns a new one.

    Attributes:
        step: The number of steps taken, int32 `[]`.
        params: The parameters, which the optimizer updates.
        opt_state: The state of the optimizer.
        model_state: The other variables of the model, such as batch statistics.
        rng: The random key from which, with the step number, every step derives its keys; the same in all steps.

    Example:
        >>> strategy = jdist.MirroredStrategy(["cpu:0", "cpu:1"])
        >>> def make(key):
        ...     return jdist.TrainState.create(
        ...         {"w": jax.numpy.zeros(3)}, optax.adam(1e-3), rng=key
        ...     )
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
        optimizer: optax.GradientTransformation | None,
        *,
        model_state: PyTree = None,
        rng: jax.Array | None = None,
    ) -> Self:
        """Returns the state before the first step. Call it inside `strategy.init`, which creates it on the devices.

        Args:
            params: The initial parameters.
            optimizer: The optimizer that will update them; None for a state that is only evaluated, with None as `opt_state`.
            model_state: The other variables of the model.
            rng: A random key; by default `jax.random.key(0)`.

        Raises:
            TypeError: A leaf of `params` is not an array, such as an activation function of an equinox module.
        """
        for name, leaf in named_leaves("params", params):
            check_array(name, leaf)
        rng = jax.random.key(0) if rng is None else rng
        opt_state = None if optimizer is None else optimizer.init(params)
        return cls(jnp.int32(0), params, opt_state, {} if model_state is None else model_state, rng)


class TrainingState(Protocol):
    """The fields that a training state of any class has: `jdist.TrainState`, flax's `TrainState`, or another dataclass."""

    @property
    def step(self) -> Any:
        """The number of steps taken."""
        ...

    @property
    def params(self) -> Any:
        """The parameters."""
        ...

    @property
    def opt_state(self) -> Any:
        """The state of the optimizer."""
        ...


def state_fields(state: PyTree) -> TrainState:
    """Returns the fields of a `TrainState`, or of another dataclass with `step`, `params` and `opt_state`.

    Such a dataclass may also have `model_state`, or `batch_stats` as is common with flax, and `rng`.

    Raises:
        TypeError: A field is missing, or `state` is not a dataclass.
    """
    missing = [name for name in ("step", "params", "opt_state") if not hasattr(state, name)]
    is_dataclass = dataclasses.is_dataclass(type(state))
    if missing or not is_dataclass:
        problem = f"lacks {', '.join(missing)}" if is_dataclass else "is not a dataclass"
        actual = describe_type(state)
        raise TypeError(
            "The training state must be a `jdist.TrainState`, or a dataclass with `step`, `params` and `opt_state`; "
            f"{actual} {problem}. Create one: `jdist.init(lambda: jdist.TrainState.create(params, optimizer))`."
        )
    rng = getattr(state, "rng", None)
    rng = jax.random.key(0) if rng is None else rng
    return TrainState(state.step, state.params, state.opt_state, model_state_of(state), rng)


def _get(state: PyTree, name: str) -> Any:
    """Returns an attribute or a key of a state, or None."""
    return state.get(name) if isinstance(state, Mapping) else getattr(state, name, None)


def model_state_of(state: PyTree) -> PyTree:
    """Returns the other variables of the model in a state: `model_state`, or `batch_stats`; an empty dict without any."""
    model_state, batch_stats = _get(state, "model_state"), _get(state, "batch_stats")
    return ({"batch_stats": batch_stats} if model_state is None and batch_stats else model_state) or {}


def step_of(state: PyTree) -> Any:
    """Returns the number of steps that a state contains, as the attribute or the key `step`.

    Raises:
        TypeError: There is none, or it is not one integer.
    """
    step = _get(state, "step")
    if type(step) is int:  # on the host, as `flax.training.train_state.TrainState.create` returns it
        return step
    if not has_dtype(step) or step.shape != () or not jnp.issubdtype(step.dtype, jnp.integer):
        got = "no `step`" if step is None else f"`step` {one_line(step)}"
        raise TypeError(
            "The training state must contain the number of steps taken, an int32 array [], as the attribute or the key `step`; "
            f"{type(state).__name__} has {got}."
        )
    return step


def params_of(state: PyTree) -> PyTree:
    """Returns the attribute or the key `params` of a state; an empty tree if it has none."""
    params = _get(state, "params")
    return () if params is None else params


def with_step(state: Any, step: Any) -> Any:
    """Returns `state` with another number of steps."""
    if isinstance(state, Mapping):
        return {**state, "step": step}
    return state._replace(step=step) if is_named_tuple(state) else dataclasses.replace(state, step=step)


class ModelVariables(NamedTuple):
    """The part of a training state that the model is applied with.

    Attributes:
        params: The parameters.
        model_state: The other variables of the model.
    """

    params: PyTree
    model_state: PyTree


def model_variables(state: PyTree, eval_params: Callable[[PyTree, PyTree], PyTree] | None = None) -> ModelVariables:
    """Returns the variables of the model as plain arrays.

    Values that differ between replicas are averaged; sharded values stay sharded.

    Args:
        state: A training state, or another state with `params`, as an attribute or a key, such as the result of
            `Checkpointer.restore(strategy, only=["params", "model_state"])`.
        eval_params: A function from the state of the optimizer and the parameters to the parameters for evaluation.

    Raises:
        ValueError: The state was donated.
        TypeError: There are no `params`; `eval_params` does not accept the state of this optimizer, or its result has
            other leaves than the parameters.
    """
    if _get(state, "params") is None:
        raise TypeError(
            "The state must have `params`, as an attribute or a key: pass a `jdist.TrainState`, or a dict such as "
            f'{{"params": params, "model_state": variables}}; got {type(state).__name__}.'
            f"{' Write `fit.state`.' * hasattr(state, 'state')}"
        )
    for name, leaf in named_leaves("state", state):
        check_not_deleted(name, leaf)
    read = lambda node: node.read() if is_distributed(node) else node
    values = jax.tree.map(read, (_get(state, "params"), model_state_of(state)), is_leaf=is_distributed)
    variables = ModelVariables(*values)
    if eval_params is None:
        return variables
    opt_state = jax.tree.map(read, _get(state, "opt_state"), is_leaf=is_distributed)
    try:
        params = eval_params(opt_state, variables.params)
    except (AttributeError, TypeError, LookupError) as error:
        raise TypeError(
            f"`eval_params` fails for the state of this optimizer, {describe_tree(opt_state)} ({type(error).__name__}: "
            f"{error}). It is called with `state.opt_state` and `state.params`: `optax.contrib.schedule_free_eval_params` "
            "needs the state of `optax.contrib.schedule_free`."
        ) from error
    if jax.tree.structure(params) != jax.tree.structure(variables.params):
        raise TypeError(
            f"`eval_params` must return parameters with the same leaves as `params`, {describe_tree(variables.params)}, "
            f"got {describe_tree(params)}."
        )
    return variables._replace(params=params)


def check_same_leaves(name: str, old: PyTree, new: PyTree, hint: str) -> None:
    """Raises TypeError if a part of the state has other leaves after a step.

    Args:
        name: The field of the state.
        old: The field before the step.
        new: The field after it.
        hint: The cause, and what to do.
    """
    names, new_names = ([leaf_name for leaf_name, _ in named_leaves(f"state.{name}", tree)] for tree in (old, new))
    if names != new_names:
        gained = [one for one in new_names if one not in names] or ["no leaf"]
        lost = [one for one in names if one not in new_names] or ["no leaf"]
        raise TypeError(
            f"A step changes the leaves of `state.{name}`: it gains {', '.join(gained[:3])} and loses {', '.join(lost[:3])}. "
            f"{hint}"
        )


def check_optimizer_state(optimizer: Any, opt_state: PyTree, params: PyTree) -> None:
    """Raises TypeError if the state of an optimizer, as a step receives it, is the state of another optimizer.

    An optimizer may ignore a state that it did not create: `optax.sgd` returns the moments of Adam as they are.
    """
    expected = jax.eval_shape(optimizer.init, params)
    names = ", ".join(_state_classes(opt_state)), ", ".join(_state_classes(expected))
    problem = (
        f"it contains {names[0] or 'no states of optax'}, and `init` of this optimizer returns {names[1] or 'none'}"
    )
    if names[0] == names[1]:
        shapes, expected_shapes = (
            {n: jnp.shape(x) for n, x in named_leaves("", tree)} for tree in (opt_state, expected)
        )
        different = [n for n in {**shapes, **expected_shapes} if shapes.get(n) != expected_shapes.get(n)]
        if not different:
            return
        of = lambda shapes: f"of shape {list(shapes[different[0]])}" if different[0] in shapes else "missing"
        problem = (
            f"state.opt_state{different[0]} is {of(shapes)}, and {of(expected_shapes)} in the state that `init` returns"
        )
    raise TypeError(
        f"`state.opt_state` is the state of another optimizer, or of other parameters: {problem}. Pass the optimizer that "
        "created the state. To continue with another optimizer, create its state: "
        "`strategy.init(lambda params: jdist.TrainState.create(params, optimizer), state.params)`."
    )


def _state_classes(tree: PyTree) -> list[str]:
    """Returns the names of the named tuples in the state of an optimizer, from the outside in."""
    names = []
    for node in jax.tree.leaves(tree, is_leaf=is_named_tuple):
        if is_named_tuple(node):
            names += [type(node).__name__, *_state_classes(tuple(node))]
    return names


def replace_fields(state: Any, step: Any, params: PyTree, opt_state: PyTree, model_state: PyTree) -> Any:
    """Returns `state` with the fields that a step updates replaced."""
    fields = {"step": step, "params": params, "opt_state": opt_state}
    if getattr(state, "model_state", None):
        fields["model_state"] = model_state
    elif getattr(state, "batch_stats", None):
        fields["batch_stats"] = model_state["batch_stats"]
    return dataclasses.replace(state, **fields)


def learning_rate_of(state: PyTree, schedule: Schedule | None = None, *, step: int = 0) -> float | None:
    """Returns the learning rate of the last update; None if the state contains none, or several different ones.

    Args:
        state: A training state, or the state of an optimizer.
        schedule: A function from the number of previous updates to the rate. The number is read from the state of an optimizer
            that was made with a schedule.
        step: The number of updates, if the state does not contain it.

    Example:
        >>> optimizer = optax.inject_hyperparams(optax.sgd)(learning_rate=0.5)
        >>> learning_rate_of(optimizer.init({"w": jnp.zeros(3)}))
        0.5
    """
    if schedule is not None:
        nodes = _nodes(state, lambda node: isinstance(node, optax.ScaleByScheduleState))
        counts = _distinct_values([node.count for node in nodes])
        count = int(counts.pop()) if len(counts) == 1 else step
        return float(schedule(max(0, count - 1)))
    rates = _distinct_values([node.hyperparams["learning_rate"] for node in _nodes(state, _has_learning_rate)])
    return rates.pop() if len(rates) == 1 else None


def skipped_updates(state: PyTree) -> int:
    """Returns the number of steps that the optimizer itself has skipped, if its state counts them; otherwise 0.

    `jdist.sync.skip_nonfinite`, `jdist.sync.dynamic_loss_scale` and `optax.apply_if_finite` count them.

    Example:
        >>> skipped_updates(optax.apply_if_finite(optax.sgd(0.1), 3).init({"w": jnp.zeros(3)}))
        0
    """
    kinds = LossScaleState, SkipState, optax.ApplyIfFiniteState
    nodes: list[Any] = _nodes(state, lambda node: isinstance(node, kinds))
    counts = [node.total_notfinite if isinstance(node, optax.ApplyIfFiniteState) else node.skipped for node in nodes]
    return int(max(_distinct_values(counts), default=0))


def accumulated_steps(state: PyTree) -> int:
    """Returns the number of steps whose gradients wait in an accumulator: of `jdist.sync.every`, or of `optax.MultiSteps`.

    Example:
        >>> optimizer = jdist.sync.every(optax.sgd(0.5), 3)
        >>> params = jnp.zeros(2)
        >>> _, opt_state = optimizer.update(params, optimizer.init(params), params)
        >>> accumulated_steps(opt_state)
        1
    """
    nodes = _nodes(state, lambda node: isinstance(node, (EveryState, optax.MultiStepsState)))
    counts = [node.steps if isinstance(node, EveryState) else node.mini_step for node in nodes]
    return int(max(_distinct_values(counts), default=0))


def _nodes(state: PyTree, condition: Callable[[Any], bool]) -> list[Any]:
    return [node for node in jax.tree.leaves(state, is_leaf=condition) if condition(node)]


def _distinct_values(values: list[Any]) -> set[float]:
    return {float(x) for value in values for x in jax.device_get(jax.tree.leaves(read_values(value)))}


def _has_learning_rate(node: Any) -> bool:
    hyperparams = getattr(node, "hyperparams", None)
    return isinstance(hyperparams, Mapping) and "learning_rate" in hyperparams
