"""The replica functions that a `Trainer` runs: the steps of training, evaluation and prediction."""

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple, get_args

import jax
import jax.numpy as jnp
import optax
from jax.tree_util import GetAttrKey

from jdist._src.core.tree import PyTree, dtype_and_shape, named_leaves
from jdist._src.replica import precision
from jdist._src.replica.context import all_reduce
from jdist._src.replica.gradients import value_and_grad
from jdist._src.replica.metrics import Mean, Metric
from jdist._src.replica.precision import Precision
from jdist._src.replica.random import replica_key
from jdist._src.training import finite_guard
from jdist._src.training.finite_guard import NonFinite
from jdist._src.training.metric_adapters import MetricAdapter, batch_metrics, check_losses
from jdist._src.training.model_adapters import ModelFunctions
from jdist._src.training.state import ModelVariables, StateFields, TrainState, replace_fields, state_fields
from jdist._src.values.aggregation import VariableAggregation
from jdist._src.values.sync_on_read import SyncOnRead


class StepOutcome(NamedTuple):
    """The loss of a step, and whether the step was finite.

    Attributes:
        loss: The mean loss of all examples of the batch, float32 `[]`.
        is_finite: Whether the loss and the gradients, or the updates, were finite; always true with `non_finite="keep"`. With
            `"stop"` false in all steps after a failure.
    """

    loss: jax.Array
    is_finite: jax.Array


@dataclasses.dataclass(frozen=True)
class TrainCarry:
    """The values that a training step passes to the next one.

    Attributes:
        state: The training state.
        metrics: The loss and the metrics of this epoch so far, of each replica's examples.
        has_failed: Whether a step was rejected because its loss or a gradient was not finite; later steps then change nothing.
    """

    state: PyTree
    metrics: Mapping[str, Metric]
    has_failed: jax.Array


class _OmittedKey:
    """A key in the path of a leaf that error messages omit."""

    def __str__(self) -> str:
        return ""


# Error messages name the leaves of the training state as the caller does: `state.params`, not `state.state.params`.
_CARRY_KEYS = _OmittedKey(), GetAttrKey("metrics"), GetAttrKey("has_failed")
jax.tree_util.register_pytree_with_keys(
    TrainCarry,
    lambda carry: (tuple(zip(_CARRY_KEYS, (carry.state, carry.metrics, carry.has_failed), strict=True)), None),
    lambda _, children: TrainCarry(*children),
    lambda carry: ((carry.state, carry.metrics, carry.has_failed), None),
)


@dataclasses.dataclass(frozen=True)
class StepFunctions:
    """The replica functions of a trainer, for its model, loss, metrics and optimizer.

    Attributes:
        model: The model.
        loss: A function from outputs and targets to losses `[batch, ...]`, one or several per example.
        metrics: The metrics, by name.
        precision: The dtypes of the computation.
        optimizer: The optimizer.
        micro_batches: The number of parts that a batch is split into.
        non_finite: The treatment of a step whose loss or gradient is not finite.
    """

    model: ModelFunctions
    loss: Any
    metrics: Mapping[str, MetricAdapter]
    precision: Precision | None
    optimizer: Any = None
    micro_batches: int = 1
    non_finite: NonFinite = "stop"

    def __post_init__(self) -> None:
        if self.optimizer is not None and not (hasattr(self.optimizer, "init") and hasattr(self.optimizer, "update")):
            raise TypeError(_not_an_optimizer(self.optimizer))
        if self.loss is not None and not callable(self.loss):
            raise TypeError(
                "`loss` must be a function from outputs and targets to losses [batch, ...], such as "
                f"`optax.softmax_cross_entropy_with_integer_labels` or `optax.squared_error`, got {self.loss!r}."
            )
        if not isinstance(self.precision, Precision | None):
            raise TypeError(
                "`precision` must be a `jdist.Precision`, such as `jdist.Precision(compute_dtype=jnp.bfloat16)`, got "
                f"{self.precision!r}."
            )
        if self.non_finite not in get_args(NonFinite):
            raise ValueError(f'`non_finite` must be "stop", "skip" or "keep", got {self.non_finite!r}.')

    def init(self, inputs: PyTree, key: jax.Array) -> TrainState:
        """Returns the state before the first step, for inputs of these shapes."""
        params_key, rng = jax.random.split(key)
        example = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), inputs)
        params, model_state = self.model.init(params_key, example)
        params = self.precision.cast_params(params) if self.precision else params
        return TrainState.create(params, self.optimizer, model_state=model_state, rng=rng)

    def empty_metrics(self) -> SyncOnRead:
        """Returns the loss and the metrics of no examples."""
        empty = {"loss": Mean(), **{name: adapter.empty for name, adapter in self.metrics.items()}}
        return SyncOnRead(jax.tree.map(jnp.asarray, empty), VariableAggregation.SUM)

    # Error messages name the state and the batch after the parameters of the next three functions.
    def train(self, state: TrainCarry, batch: PyTree, weights: Any = None) -> tuple[TrainCarry, StepOutcome]:
        """Takes a training step."""
        carry, fields = state, state_fields(state.state)
        inputs, targets, weights = split_element(batch, weights)
        key = replica_key(jax.random.fold_in(fields.rng, fields.step))
        if self.precision:
            precision.check_loss_scale(self.precision, precision.step_precision().scale)
            self.precision.check_params(fields.params)

        def compute_losses(params: PyTree, inputs: PyTree, targets: PyTree, weights: Any, ids: jax.Array) -> Any:
            micro_batch_key = jax.random.fold_in(key, ids[0])
            with explained_data_errors(batch):
                outputs, model_state = self._apply(params, fields.model_state, inputs, micro_batch_key, True, weights)
                losses = self.loss(outputs, targets)
            losses = check_losses(losses, len(ids))
            if not jnp.issubdtype(losses.dtype, jnp.floating):
                raise TypeError(
                    f"`loss` returned {dtype_and_shape(losses)}, which is not differentiable: the dtype must be a float."
                )
            return losses, (batch_metrics(self.metrics, losses, outputs, targets, weights), model_state)

        ids = jnp.arange(len(jax.tree.leaves(inputs)[0]))
        differentiate = value_and_grad(compute_losses, micro_batches=self.micro_batches, has_aux=True, weights=weights)
        (loss, (metrics, model_state)), grads = differentiate(fields.params, inputs, targets, weights, ids)
        if self.micro_batches > 1:
            metrics = jax.tree.map(lambda x: x.sum(0), metrics)
            model_state = _mean_over_micro_batches(model_state, weights, self.micro_batches)
        model_state = jax.tree.map(lambda new, old: jnp.asarray(new).astype(old.dtype), model_state, fields.model_state)

        loss, is_finite, params, opt_state = self._updated(carry.has_failed, loss, grads, fields)
        model_state = _mean_over_replicas(model_state, weights)
        metrics = jax.tree.map(jnp.add, carry.metrics, metrics)
        step, has_failed, is_taken = fields.step + 1, carry.has_failed, is_finite & ~carry.has_failed
        if self.non_finite != "keep":
            old = fields.model_state, carry.metrics
            model_state, metrics = finite_guard.select(is_taken, (model_state, metrics), old)
        if self.non_finite == "stop":
            step, has_failed, is_finite = jnp.where(is_taken, step, fields.step), ~is_taken, is_taken
        new_state = replace_fields(carry.state, step, params, opt_state, model_state)
        return TrainCarry(new_state, metrics, has_failed), StepOutcome(loss.astype(jnp.float32), is_finite)

    def evaluate(self, metrics: PyTree, state: ModelVariables, batch: PyTree, weights: Any = None) -> Any:
        """Returns the loss and the metrics with one more batch."""
        inputs, targets, weights = split_element(batch, weights)
        with explained_data_errors(batch):
            outputs = self.outputs(state, inputs, weights)
            losses = self.loss(outputs, targets)
        losses = check_losses(losses, len(jax.tree.leaves(inputs)[0]))
        return jax.tree.map(jnp.add, metrics, batch_metrics(self.metrics, losses, outputs, targets, weights)), None

    def predict(self, state: ModelVariables, batch: PyTree, weights: Any = None) -> tuple[PyTree, Any]:
        """Returns the outputs for a batch, `[batch, ...]`, and the weights of its examples."""
        inputs, _, _ = split_element(batch, weights)
        with explained_data_errors(batch):
            outputs = self.outputs(state, inputs, weights)
        size = len(jax.tree.leaves(inputs)[0])
        for name, leaf in named_leaves("outputs", outputs):
            if jnp.ndim(leaf) == 0 or jnp.shape(leaf)[0] != size:
                raise ValueError(
                    f"{name} is {dtype_and_shape(leaf)} for {size} examples: `predict` needs outputs of shape [batch, ...]."
                )
        return outputs, jnp.ones(size) if weights is None else weights

    def outputs(self, variables: ModelVariables, inputs: PyTree, weights: Any = None) -> PyTree:
        """Returns the outputs of the model for `inputs`, in evaluation mode."""
        outputs, _ = self._apply(*variables, inputs, jax.random.key(0), False, weights)
        return outputs

    def _apply(self, params: PyTree, model_state: PyTree, inputs: PyTree, key: Any, train: bool, weights: Any) -> Any:
        if not self.precision:
            return self.model.apply(params, model_state, inputs, key, train, weights)
        params, inputs = self.precision.cast_compute((params, inputs))
        outputs, model_state = self.model.apply(params, model_state, inputs, key, train, weights)
        return self.precision.cast_output(outputs), model_state

    def _updated(
        self, has_failed: jax.Array, loss: jax.Array, grads: PyTree, fields: StateFields
    ) -> tuple[jax.Array, jax.Array, PyTree, PyTree]:
        """Reduces loss and gradients of this replica, and updates the parameters, unless the step is not finite.

        Returns:
            The mean loss; whether the step is finite; the parameters and the state of the optimizer after it.
        """
        update = finite_guard.trace_update(self.optimizer.update, grads, fields.opt_state, fields.params)
        is_finite = jnp.bool_(True)
        if update.has_collectives:
            loss = all_reduce("mean", loss)
        elif self.non_finite == "keep" or update.tests_numbers:
            loss, grads = all_reduce("mean", (loss, grads))
        else:
            loss, grads, is_finite = finite_guard.mean_over_replicas(loss, grads, update.reads)
            is_finite &= finite_guard.are_finite(finite_guard.gradient_factors(update, fields.opt_state))
            is_taken = is_finite & ~has_failed
            updates, opt_state = finite_guard.guarded_update(update, is_taken, grads, fields.opt_state, fields.params)
            params = finite_guard.select(is_taken, optax.apply_updates(fields.params, updates), fields.params)
            return loss, is_finite, params, opt_state
        updates, opt_state = self.optimizer.update(grads, fields.opt_state, fields.params)
        params = optax.apply_updates(fields.params, updates)
        if self.non_finite == "keep":
            return loss, is_finite, params, opt_state
        # With collectives the updates of the replicas may differ, and the replicas have to agree.
        are_finite = finite_guard.are_finite_on_all_replicas if update.has_collectives else finite_guard.are_finite
        is_finite = jnp.isfinite(loss) & are_finite(updates)
        old = fields.params, fields.opt_state
        return loss, is_finite, *finite_guard.select(is_finite & ~has_failed, (params, opt_state), old)


def split_element(element: PyTree, padding_weights: Any) -> tuple[PyTree, PyTree, Any]:
    """Splits an element of the data into inputs, targets and weights.

    A tuple of two is inputs and targets, a tuple of three also contains weights `[batch]`. Anything else is both inputs and
    targets.
    """
    if not isinstance(element, tuple) or len(element) not in (2, 3):
        return element, element, padding_weights
    inputs, targets, *optional_weights = element
    if not optional_weights:
        return inputs, targets, padding_weights
    (weights,) = optional_weights
    if padding_weights is None:
        return inputs, targets, weights
    mask = padding_weights.reshape(padding_weights.shape + (1,) * (jnp.ndim(weights) - 1))
    return inputs, targets, jnp.where(mask == 0, 0, weights * mask)


@contextlib.contextmanager
def explained_data_errors(element: PyTree) -> Iterator[None]:
    """Raises errors of a model or a loss as errors that name the data, if the data are a dict or a list.

    The model and the loss both receive all of such data, without targets, and fail with an unrelated error.
    """
    try:
        yield
    except (TypeError, ValueError, LookupError, AttributeError) as error:
        if not isinstance(element, (dict, list)) or type(error).__module__ != "builtins":
            raise
        kind = f"dicts of {', '.join(map(repr, element))}" if isinstance(element, dict) else "lists"
        raise TypeError(
            f"The model or the loss failed on data that are {kind} ({type(error).__name__}: {error}). A `Trainer` passes all "
            "of it to the model as inputs, and to the loss as targets. Pass tuples `(inputs, targets)`; or select the entries "
            "in the model and in the loss."
        ) from error


def total_metrics(metrics: Mapping[str, Metric]) -> dict[str, jax.Array]:
    """Returns the values of metrics over the examples of all replicas."""
    return {name: metric.compute() for name, metric in all_reduce("sum", metrics).items()}


def _not_an_optimizer(optimizer: Any) -> str:
    name = optimizer if isinstance(optimizer, str) else getattr(optimizer, "__name__", None)
    example = "optax.adamw(1e-3)"
    if isinstance(name, str) and callable(getattr(optax, name.lower(), None)):
        example = f"optax.{name.lower()}(1e-3)"
    return f"`optimizer` must be an optax transformation, got {optimizer!r}. Write `optimizer={example}`."


def _mean_over_micro_batches(stacked: PyTree, weights: Any, micro_batches: int) -> PyTree:
    """Returns the model state after micro-batches: the mean of floats, weighted by examples; the last of other values."""
    counts = None if weights is None else jnp.reshape(weights, (micro_batches, -1)).sum(1)

    def mean(x: jax.Array) -> jax.Array:
        if not jnp.issubdtype(x.dtype, jnp.inexact):
            return x[-1]
        return x.mean(0) if counts is None else jnp.mean(_scaled_by_count(x, counts, counts.mean()), 0)

    return jax.tree.map(mean, stacked)


def _mean_over_replicas(model_state: PyTree, weights: Any) -> PyTree:
    """Returns the model state with the floats averaged over the replicas, weighted by examples."""
    leaves, treedef = jax.tree.flatten(model_state)
    indices = [i for i, leaf in enumerate(leaves) if jnp.issubdtype(jnp.asarray(leaf).dtype, jnp.inexact)]
    if not indices:
        return model_state
    values = [leaves[i] for i in indices]
    if weights is not None:
        count = jnp.sum(weights)
        values = [_scaled_by_count(value, count, all_reduce("mean", count)) for value in values]
    for i, value in zip(indices, all_reduce("mean", values), strict=True):
        leaves[i] = value
    return treedef.unflatten(leaves)


def _scaled_by_count(value: jax.Array, count: jax.Array, mean_count: jax.Array) -> jax.Array:
    """Returns `value * count / mean_count`, whose plain mean is the mean weighted by count; `value` if all counts are 0."""
    factor = jnp.where(mean_count == 0, 1, count / jnp.where(mean_count == 0, 1, mean_count))
    factor = factor.astype(value.dtype).reshape(factor.shape + (1,) * (value.ndim - factor.ndim))
    return jnp.where(factor == 0, 0, value * factor)
