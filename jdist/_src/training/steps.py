"""The functions of one replica that a `Trainer` runs: a step of training, of evaluation, and of prediction."""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.tree_util import GetAttrKey

from jdist._src.core import jax_compat
from jdist._src.core.tree import PyTree, dtype_and_shape, named_leaves
from jdist._src.replica import leaf_annotations, precision
from jdist._src.replica.context import all_reduce, require_replica_context
from jdist._src.replica.gradients import value_and_grad
from jdist._src.replica.metrics import Mean, Metric
from jdist._src.replica.precision import Precision
from jdist._src.replica.random import replica_key
from jdist._src.training.metric_adapters import MetricAdapter, batch_metrics, checked_losses
from jdist._src.training.model_adapters import ModelFunctions
from jdist._src.training.state import ModelVariables, TrainState, replace_fields, state_fields
from jdist._src.values.aggregation import VariableAggregation
from jdist._src.values.sync_on_read import SyncOnRead


class StepOutcome(NamedTuple):
    """How a step went.

    Attributes:
        loss: Of all examples in its batch, float32 `[]`.
        sound: Whether loss and update were finite, or nobody asked.
    """

    loss: jax.Array
    sound: jax.Array


class _NoName:
    """A key in the path of a leaf that messages leave out."""

    def __str__(self) -> str:
        return ""


@dataclasses.dataclass(frozen=True)
class TrainCarry:
    """The input of a training step that the step before it returned.

    Attributes:
        state: The training state.
        seen: The loss and the metrics of the epoch so far, of each replica's own examples.
        failed: Whether a step was refused because its loss or its update was not finite; none is taken after it.
    """

    state: PyTree
    seen: Mapping[str, Metric]
    failed: jax.Array


# Messages name the leaves of the training state as the caller does: `state.params`, not `state.state.params`.
_CARRY_KEYS = _NoName(), GetAttrKey("seen"), GetAttrKey("failed")
jax.tree_util.register_pytree_with_keys(
    TrainCarry,
    lambda carry: (tuple(zip(_CARRY_KEYS, (carry.state, carry.seen, carry.failed), strict=True)), None),
    lambda _, children: TrainCarry(*children),
    lambda carry: ((carry.state, carry.seen, carry.failed), None),
)


@dataclasses.dataclass(frozen=True)
class StepFunctions:
    """What is trained, and how.

    Attributes:
        model: The model.
        loss: From outputs and targets to losses, one an example or several, `[batch, ...]`.
        measures: The metrics, by name.
        precision: The dtypes to compute in.
        optimizer: What makes updates of gradients.
        micro_batches: How many parts a batch is taken in.
        non_finite: What becomes of a step whose loss or update is not finite: it ends training, is left out, or is taken.
    """

    model: ModelFunctions
    loss: Any
    measures: Mapping[str, MetricAdapter]
    precision: Precision | None
    optimizer: Any = None
    micro_batches: int = 1
    non_finite: str = "stop"

    def __post_init__(self) -> None:
        if self.optimizer is not None and not (hasattr(self.optimizer, "init") and hasattr(self.optimizer, "update")):
            raise TypeError(
                f"`optimizer` is a transformation of optax, such as `optax.adamw(1e-3)`; got {self.optimizer!r}."
            )
        if self.loss is not None and not callable(self.loss):
            raise TypeError(f"`loss` is a function from outputs and targets to losses [batch, ...]; got {self.loss!r}.")
        if not isinstance(self.precision, Precision | None):
            raise TypeError(f"`precision` is a `jdist.Precision(params, compute, output)`; got {self.precision!r}.")
        if self.non_finite not in ("stop", "skip", "keep"):
            raise ValueError(f'`non_finite` is "stop", "skip" or "keep", got {self.non_finite!r}.')

    def begin(self, inputs: PyTree, key: jax.Array) -> TrainState:
        """The state before the first step, for inputs of such shapes."""
        of_params, rng = jax.random.split(key)
        examples = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), inputs)
        params, model_state = self.model.init(of_params, examples)
        params = self.precision.cast_params(params) if self.precision else params
        return TrainState.create(params, self.optimizer, model_state=model_state, rng=rng)

    def nothing_seen(self) -> SyncOnRead:
        """The loss and the metrics of no examples."""
        empty = {"loss": Mean(), **{name: measure.empty for name, measure in self.measures.items()}}
        return SyncOnRead(jax.tree.map(jnp.asarray, empty), VariableAggregation.SUM)

    # The parameters of these three have the names that messages give to the state and to the batch.
    def train(self, state: TrainCarry, batch: PyTree, weights: Any = None) -> tuple[TrainCarry, StepOutcome]:
        """A step of training: the carry after it, and how it went."""
        carry, parts = state, state_fields(state.state)
        inputs, targets, weights = split_element(batch, weights)
        key = replica_key(jax.random.fold_in(parts.rng, parts.step))
        if self.precision:
            precision.check_loss_scale(self.precision, precision.step_precision().scale)
            self.precision.check_params(parts.params)

        def losses_of(params: PyTree, inputs: PyTree, targets: PyTree, weights: Any, ids: jax.Array) -> Any:
            draw = jax.random.fold_in(key, ids[0])
            with explained(batch):
                outputs, model_state = self._apply(params, parts.model_state, inputs, draw, True, weights)
                losses = self.loss(outputs, targets)
            losses = checked_losses(losses, len(ids))
            if not jnp.issubdtype(losses.dtype, jnp.floating):
                raise TypeError(
                    f"`loss` returned {dtype_and_shape(losses)}, which has no gradient: train on floating-point numbers."
                )
            return losses, (batch_metrics(self.measures, losses, outputs, targets, weights), model_state)

        ids = jnp.arange(len(jax.tree.leaves(inputs)[0]))
        differentiate = value_and_grad(losses_of, micro_batches=self.micro_batches, has_aux=True, weights=weights)
        (value, (seen, model_state)), grads = differentiate(parts.params, inputs, targets, weights, ids)
        if self.micro_batches > 1:
            seen = jax.tree.map(lambda x: x.sum(0), seen)
            model_state = _of_parts(model_state, weights, self.micro_batches)
        model_state = jax.tree.map(_in_dtype_of, model_state, parts.model_state)

        talks = _talks(self.optimizer.update, grads, parts.opt_state, parts.params)
        if talks:
            value = all_reduce("mean", value)
        else:
            value, grads = all_reduce("mean", (value, grads))
        updates, opt_state = self.optimizer.update(grads, parts.opt_state, parts.params)
        params = optax.apply_updates(parts.params, updates)
        new = replace_fields(carry.state, parts.step + 1, params, opt_state, _agreed(model_state, weights))
        after = TrainCarry(new, jax.tree.map(jnp.add, carry.seen, seen), carry.failed)
        if self.non_finite == "keep":
            return after, StepOutcome(value.astype(jnp.float32), jnp.bool_(True))
        # What each replica makes of its own gradients, it does not know of the others.
        agree = functools.partial(all_reduce, "min") if talks else lambda x: x
        sound = jnp.isfinite(value) & (agree(_are_finite(updates)) == 1)
        return self._guarded(carry, after, sound), StepOutcome(value.astype(jnp.float32), sound)

    def evaluate(self, seen: PyTree, state: ModelVariables, batch: PyTree, weights: Any = None) -> Any:
        """The loss and the metrics with those of one more batch."""
        inputs, targets, weights = split_element(batch, weights)
        with explained(batch):
            outputs = self.outputs(state, inputs, weights)
            losses = self.loss(outputs, targets)
        losses = checked_losses(losses, len(jax.tree.leaves(inputs)[0]))
        return jax.tree.map(jnp.add, seen, batch_metrics(self.measures, losses, outputs, targets, weights)), None

    def predict(self, state: ModelVariables, batch: PyTree, weights: Any = None) -> tuple[PyTree, Any]:
        """The outputs for a batch, `[batch, ...]`, and the weights of its rows."""
        inputs, _, _ = split_element(batch, weights)
        with explained(batch):
            outputs = self.outputs(state, inputs, weights)
        rows = len(jax.tree.leaves(inputs)[0])
        for name, leaf in named_leaves("outputs", outputs):
            if jnp.ndim(leaf) == 0 or jnp.shape(leaf)[0] != rows:
                raise ValueError(
                    f"{name} is {dtype_and_shape(leaf)} for {rows} examples: to predict, a model gives each output as [batch, ...]."
                )
        return outputs, jnp.ones(rows) if weights is None else weights

    def outputs(self, parameters: ModelVariables, inputs: PyTree, weights: Any = None) -> PyTree:
        """Returns the outputs of the model for `inputs`, outside of training."""
        outputs, _ = self._apply(*parameters, inputs, jax.random.key(0), False, weights)
        return outputs

    def _apply(self, params: PyTree, model_state: PyTree, inputs: PyTree, key: Any, train: bool, weights: Any) -> Any:
        if not self.precision:
            return self.model.apply(params, model_state, inputs, key, train, weights)
        params, inputs = self.precision.cast_compute((params, inputs))
        outputs, model_state = self.model.apply(params, model_state, inputs, key, train, weights)
        return self.precision.cast_output(outputs), model_state

    def _guarded(self, before: TrainCarry, after: TrainCarry, sound: jax.Array) -> TrainCarry:
        """`after`; or `before`, if the step was not sound, or one before it was not and that ends training."""
        if self.non_finite == "stop":
            failed = before.failed | ~sound
            guarded = jax.tree.map(lambda old, new: _where(failed, old, new), before, after)
            return dataclasses.replace(guarded, failed=failed)
        kept = jax.tree.map(lambda old, new: _where(~sound, old, new), before, after)
        return dataclasses.replace(kept, state=dataclasses.replace(kept.state, step=state_fields(after.state).step))


def split_element(element: PyTree, padding: Any) -> tuple[PyTree, PyTree, Any]:
    """Inputs, targets and weights of what the data give for a batch.

    A tuple of two is inputs and targets, one of three weights `[batch]` too. Anything else is both inputs and targets.
    """
    if not isinstance(element, tuple) or len(element) not in (2, 3):
        return element, element, padding
    inputs, targets, *weights = element
    if not weights:
        return inputs, targets, padding
    return inputs, targets, weights[0] if padding is None else _weighted(weights[0], padding)


@contextlib.contextmanager
def explained(element: PyTree) -> Iterator[None]:
    """Raises an error of a model or a loss as one that names the data, if the data are a dict or a list.

    Such data have no targets: the model and the loss both get all of it, and fail with whatever error that leads to.
    """
    try:
        yield
    except (TypeError, ValueError, LookupError, AttributeError) as error:
        if not isinstance(element, (dict, list)) or type(error).__module__ != "builtins":
            raise
        what = f"dicts of {', '.join(map(repr, element))}" if isinstance(element, dict) else "lists"
        raise TypeError(
            f"The model, or the loss, failed on data that are {what} ({type(error).__name__}: {error}). A `Trainer` passes all "
            "of it to the model as inputs, and to the loss as targets. Pass tuples `(inputs, targets)`; or take what each "
            "needs in the model and in the loss."
        ) from error


def totals(seen: Mapping[str, Metric]) -> dict[str, jax.Array]:
    """What metrics say of the examples of all replicas."""
    return {name: metric.compute() for name, metric in all_reduce("sum", seen).items()}


def _weighted(weights: Any, padding: Any) -> Any:
    beside = padding.reshape(padding.shape + (1,) * (jnp.ndim(weights) - 1))
    return jnp.where(beside == 0, 0, weights * beside)


def _where(condition: Any, old: Any, new: Any) -> Any:
    return new if new is old else jnp.where(condition, old, new)


def _in_dtype_of(new: Any, old: Any) -> jax.Array:
    return jnp.asarray(new).astype(old.dtype)


def _of_parts(stacked: PyTree, weights: Any, parts: int) -> PyTree:
    """What micro-batches made of the same state of a model: of numbers the mean, each as much as it has examples."""
    counts = None if weights is None else jnp.reshape(weights, (parts, -1)).sum(1)

    def one(x: jax.Array) -> jax.Array:
        if not jnp.issubdtype(x.dtype, jnp.inexact):
            return x[-1]
        return x.mean(0) if counts is None else jnp.mean(_shared(x, counts, counts.mean()), 0)

    return jax.tree.map(one, stacked)


def _shared(value: jax.Array, count: jax.Array, mean_count: jax.Array) -> jax.Array:
    """`value` as often as it counts: its mean over all is then the mean over their examples. If none has any, once each."""
    share = jnp.where(mean_count == 0, 1, count / jnp.where(mean_count == 0, 1, mean_count))
    share = share.astype(value.dtype).reshape(share.shape + (1,) * (value.ndim - share.ndim))
    return jnp.where(share == 0, 0, value * share)


def _are_finite(tree: PyTree) -> jax.Array:
    """1 if all numbers are finite, else 0; int32 `[]`."""
    leaves = [leaf for leaf in jax.tree.leaves(tree) if jnp.issubdtype(leaf.dtype, jnp.inexact)]
    return jnp.stack([jnp.isfinite(leaf).all() for leaf in leaves]).all().astype(jnp.int32) if leaves else jnp.int32(1)


def _agreed(model_state: PyTree, weights: Any) -> PyTree:
    """What the replicas' models keep, averaged over them, each as much as it has examples."""
    leaves, treedef = jax.tree.flatten(model_state)
    numbers = [i for i, leaf in enumerate(leaves) if jnp.issubdtype(jnp.asarray(leaf).dtype, jnp.inexact)]
    if not numbers:
        return model_state
    values = [leaves[i] for i in numbers]
    if weights is not None:
        mine = jnp.sum(weights)
        values = [_shared(value, mine, all_reduce("mean", mine)) for value in values]
    for i, value in zip(numbers, all_reduce("mean", values), strict=True):
        leaves[i] = value
    return treedef.unflatten(leaves)


def _talks(update: Callable[..., Any], *args: PyTree) -> bool:
    """Whether an optimizer says something to the other replicas, as a policy of `jdist.sync` does."""
    axes = frozenset(require_replica_context("sync", "strategy.step").axes)
    with leaf_annotations.collect_sync_targets():  # what it says of this trace is not for the step
        program = jax.make_jaxpr(update)(*args).jaxpr
    return any(jax_compat.uses_axes(equation, axes) for equation in program.eqns)
