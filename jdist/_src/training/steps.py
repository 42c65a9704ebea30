"""The replica functions that a `Trainer` runs: the steps of training, evaluation and prediction."""

import dataclasses
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.tree_util import GetAttrKey

from jdist._src.core.tree import PyTree, describe_tree, dtype_and_shape, has_dtype, is_float, named_leaves, one_line
from jdist._src.replica import precision
from jdist._src.replica.context import all_reduce, num_replicas
from jdist._src.replica.finite import NonFinite, select
from jdist._src.replica.gradients import GradientOptions, Remat, pad_to_parts, resolved_options, value_and_grad
from jdist._src.replica.losses import WeightedLosses, global_mean
from jdist._src.replica.random import replica_key
from jdist._src.strategies.base import Strategy
from jdist._src.training.arguments import require_arguments
from jdist._src.training.gradient_step import check_optimizer, gradient_step
from jdist._src.training.history_columns import NORMS
from jdist._src.training.metric_adapters import (
    PackedMetrics,
    TrainerMetric,
    batch_metrics,
    check_losses,
    empty_metrics,
    pack_metrics,
    unpack_metrics,
)
from jdist._src.training.model_functions import example_mask
from jdist._src.training.model_state import mean_model_state
from jdist._src.training.objectives import Objective, explained_data_errors, split_element
from jdist._src.training.state import (
    ModelVariables,
    TrainState,
    replace_fields,
    state_fields,
    step_of,
    with_step,
)
from jdist._src.values.aggregation import VariableAggregation
from jdist._src.values.sync_on_read import SyncOnRead


@dataclasses.dataclass(frozen=True)
class TrainCarry:
    """The values that a training step passes to the next one.

    Attributes:
        state: The training state.
        metrics: The loss and the metrics since the last row of the history, of each replica's examples, packed.
        has_failed: Whether a step was rejected because its loss or a gradient was not finite; later steps then change nothing.
    """

    state: PyTree
    metrics: PackedMetrics
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
    """The replica functions of a trainer, for its objective and optimizer, or for a step of the user.

    Attributes:
        objective: The losses and metrics of a batch.
        optimizer: The optimizer.
        custom_step: A function `fn(state, batch[, weights])` of the user that takes a training step, or None.
        micro_batches: The number of parts that a batch is split into.
        remat: See `jdist.value_and_grad`.
        non_finite: The treatment of a step whose loss or gradient is not finite.
        tokens: From an element of the data to an array `[batch, ...]` whose non-zero numbers are its tokens, or None.
        norms: Whether the training step computes the norms of gradient, update and parameters.
    """

    objective: Objective
    optimizer: Any = None
    custom_step: Any = None
    micro_batches: int = 1
    remat: Remat = False
    non_finite: NonFinite = "stop"
    tokens: Callable[[PyTree], Any] | None = None
    norms: bool = False

    def __post_init__(self) -> None:
        if self.optimizer is not None:
            check_optimizer(self.optimizer)
        if self.non_finite not in get_args(NonFinite):
            raise ValueError(f'`non_finite` must be "stop", "skip" or "keep", got {one_line(self.non_finite)}.')
        value_and_grad(lambda params: params, remat=self.remat)  # checks `remat`
        if self.tokens is not None and not callable(self.tokens):
            raise TypeError(
                "`tokens` must be a function from an element of the data to an array [batch, ...] whose non-zero numbers are "
                f'its tokens, such as `lambda batch: batch["mask"]`, got {one_line(self.tokens)}.'
            )

    @property
    def takes_weights(self) -> bool:
        """Whether the training step receives the weights of a padded batch."""
        return self.custom_step is None or len(inspect.signature(self.custom_step).parameters) > 2

    @property
    def needs_all_weights(self) -> bool:
        """Whether the step receives the weights of full batches too, which are 1, because a function of the user reads them."""
        return self.custom_step is not None or self.objective.takes_weights

    @property
    def metrics(self) -> Mapping[str, TrainerMetric]:
        """The metrics, by name."""
        return self.objective.metrics

    @property
    def outcome_names(self) -> tuple[str, ...]:
        """The names of the numbers that follow the first three in the outcome of a step."""
        return (*(["tokens"] if self.tokens else []), *(NORMS if self.norms else []))

    @property
    def step(self) -> Callable[..., tuple[TrainCarry, jax.Array]]:
        """The training step."""
        return self.train if self.custom_step is None else self.train_by_custom_step

    def check_fit(self, state: PyTree) -> None:
        """Raises TypeError or ValueError if an argument that `fit` needs is missing, or one does not fit."""
        if not isinstance(self.norms, bool):
            raise TypeError(f"`norms` is True or False, got {one_line(self.norms)}.")
        if self.norms and self.custom_step is not None:
            raise ValueError(
                "`norms=True` needs a trainer with `optimizer=`: the gradients of a function `step=` are not known. Return the "
                'norms from the step, `{"loss": loss, "gradient_norm": optax.global_norm(grads)}`, with '
                '`metrics=["gradient_norm"]`.'
            )
        repeated = [name for name in NORMS if self.norms and name in self.metrics]
        if repeated:
            raise ValueError(f"With `norms=True`, no metric can have the name {repeated[0]!r}. Rename the metric.")
        if self.custom_step is None:
            loss = self.objective.loss or self.objective.fn
            require_arguments("fit", optimizer=self.optimizer, loss=loss)
            if state is not None and state_fields(state).opt_state is None:
                raise ValueError(
                    "`state.opt_state` is None: the state was created without an optimizer, and can only be evaluated. To "
                    "train it, write "
                    "`fit(state=jdist.TrainState.create(state.params, optimizer, model_state=state.model_state))`."
                )
        elif state is None:
            raise TypeError(
                "A trainer with `step=` needs the state to start with: `fit(data, state=strategy.init(make, key))`, where "
                "`make(key)` returns it."
            )

    def check_evaluate(self, method: str) -> None:
        """Raises TypeError if an argument of the trainer that evaluation needs is missing."""
        require_arguments(method, loss=self.objective.loss or self.objective.fn)

    def check_weights(self, has_weights: bool) -> None:
        """Raises TypeError if the batches are padded, and the step does not receive weights."""
        if has_weights and not self.takes_weights:
            raise TypeError(
                "The data set pads its last batch, and the step has no parameter for the weights of the examples. Write "
                '`def step(state, batch, weights)`, or create the data set with `remainder="drop"`.'
            )

    def init(self, element: PyTree, key: jax.Array) -> TrainState:
        """Returns the state before the first step, for elements of the data with these shapes."""
        return self.init_for_inputs(self.objective.model_inputs(element), key)

    def init_for_inputs(self, inputs: PyTree, key: jax.Array) -> TrainState:
        """Returns the state before the first step, for inputs of these shapes."""
        params_key, rng = jax.random.split(key)
        example = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), inputs)
        params, model_state = self.objective.model.init(params_key, example)
        params = self.objective.precision.cast_params(params) if self.objective.precision else params
        return TrainState.create(params, self.optimizer, model_state=model_state, rng=rng)

    def first_carry(self, element: PyTree, key: jax.Array) -> TrainCarry:
        """Returns the carry before the first step, for elements of the data with these shapes, in a replica context."""
        metrics: Any = self.empty_metrics()
        return TrainCarry(self.init(element, key), metrics, jnp.bool_(False))

    def empty_metrics(self) -> SyncOnRead:
        """Returns the loss and the metrics of no examples, packed."""
        return SyncOnRead(pack_metrics(empty_metrics(self.metrics)), VariableAggregation.SUM)

    def total_metrics(self, metrics: PackedMetrics) -> dict[str, jax.Array]:
        """Returns the values of packed metrics over the examples of all replicas; NaN without examples."""
        totals: Any = unpack_metrics(all_reduce("sum", metrics), empty_metrics(self.metrics))
        values = {name: metric.compute() for name, metric in totals.items()}
        # 0 would be a good loss: the steps may all have been skipped, or the weights of all examples may be 0.
        is_empty = totals["loss"].weight == 0
        return jax.tree.map(lambda x: jnp.where(is_empty, jnp.nan, x) if is_float(x) else x, values)

    def read_metrics(self, strategy: Strategy, metrics: PyTree) -> dict[str, Any]:
        """Returns the values of packed metrics on the host: numbers, or numpy arrays."""
        totals = jax.device_get(strategy.run(self.total_metrics, (metrics,)))
        values = {name: totals[name] for name in ("loss", *self.metrics)}  # in the order of the user
        return {name: value.item() if np.ndim(value) == 0 else np.asarray(value) for name, value in values.items()}

    # Error messages name the state and the batch after the parameters of the next functions.
    def train(self, state: TrainCarry, batch: PyTree, weights: Any = None) -> tuple[TrainCarry, jax.Array]:
        """Takes a training step. Returns the carry and the outcome, see `_outcome`."""
        carry, fields, element = state, state_fields(state.state), batch
        micro_batches, remat = resolved_options(GradientOptions(self.micro_batches, self.remat))
        batch, weights = self.objective.split(element, weights)
        num_tokens = self._num_tokens(element, weights)
        batch, weights = pad_to_parts(batch, weights, micro_batches)
        key = replica_key(jax.random.fold_in(fields.rng, fields.step))
        if self.objective.precision:
            precision.check_loss_scale(self.objective.precision, precision.step_precision().scale)
            self.objective.precision.check_params(fields.params)

        def compute_losses(
            params: PyTree, batch: PyTree, weights_part: Any, part: jax.Array, model_state: PyTree
        ) -> Any:
            result = self.objective(
                params,
                model_state,
                batch,
                jax.random.fold_in(key, part[0]),
                True,
                weights_part,
                element=element,
                all_weights=weights,
                micro_batches=micro_batches,
            )
            losses = result.losses.losses if isinstance(result.losses, WeightedLosses) else result.losses
            if not is_float(losses):
                raise TypeError(
                    f"`loss` returned {dtype_and_shape(losses)}, which is not differentiable: the dtype must be a float."
                )
            return result.losses, (result.metrics, result.model_state)

        new = gradient_step(
            self.optimizer,
            compute_losses,
            fields,
            batch,
            weights,
            micro_batches=micro_batches,
            remat=remat,
            non_finite=self.non_finite,
            has_failed=carry.has_failed,
            num_weighted=(None if weights is None else example_mask(weights).sum(), num_tokens),
            norms=self.norms,
        )
        metrics = new.aux if micro_batches == 1 else jax.tree.map(lambda x: x.sum(0), new.aux)
        model_state = mean_model_state(new.model_state, new.varies, weights)
        metrics = jax.tree.map(jnp.add, carry.metrics, pack_metrics(metrics))
        is_finite = new.is_finite
        step, has_failed, is_taken = fields.step + 1, carry.has_failed, is_finite & ~carry.has_failed
        if self.non_finite != "keep":
            old = fields.model_state, carry.metrics
            model_state, metrics = select(is_taken, (model_state, metrics), old)
        if self.non_finite == "stop":
            # XLA's CPU runtime divides operations that are ready at the same time between threads, which takes longer than
            # small operations. After the barrier, the next two wait for the step number.
            step = lax.optimization_barrier(jnp.where(is_taken, step, fields.step))
            has_failed, is_finite = step == fields.step, step != fields.step
        new_state = replace_fields(carry.state, step, new.params, new.opt_state, model_state)
        outcome = _outcome(new.loss, is_finite, new.count, *new.num_weighted, norms=new.norms)
        return TrainCarry(new_state, metrics, has_failed), outcome

    def train_by_custom_step(
        self, state: TrainCarry, batch: PyTree, weights: Any = None
    ) -> tuple[TrainCarry, jax.Array]:
        """Takes a training step by the function of the user. Returns the same as `train`.

        Raises:
            TypeError: Its results are not a state and a loss, or its state has the same step number as before.
        """
        carry = state
        result = self.custom_step(carry.state, batch, *([weights] if self.takes_weights else []))
        if not isinstance(result, tuple) or len(result) != 2:
            raise TypeError(
                f"`step` must return a pair of the new state and a loss or a dict, got {type(result).__name__}."
            )
        new_state, outputs = result
        loss: Any = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
        if not has_dtype(loss):
            is_number = isinstance(loss, (int, float))
            number = " A Python number is a constant of the compiled step: return the array that the step computes."
            raise TypeError(
                "The second result of `step` must be the loss, an array, or a dict with the key `loss` and the values of "
                f"metrics, got {describe_tree(outputs)}.{number if is_number else ''}"
            )
        if step_of(new_state) is step_of(carry.state):
            raise TypeError("`step` returned a state with the same step number. Return `step=state.step + 1`.")
        num_examples = len(jax.tree.leaves(batch)[0])
        losses = jnp.broadcast_to(loss, num_examples) if loss.ndim == 0 else check_losses(loss, num_examples, "step")
        metrics = batch_metrics(self.metrics, losses, outputs, batch, weights)
        loss = global_mean(losses, weights)
        is_finite, has_failed = jnp.isfinite(loss) | (self.non_finite == "keep"), carry.has_failed
        metrics = jax.tree.map(jnp.add, carry.metrics, pack_metrics(metrics))
        if self.non_finite != "keep":
            old, is_taken = (carry.state, carry.metrics), is_finite & ~has_failed
            guarded_state, metrics = select(is_taken, (new_state, metrics), old)
            if self.non_finite == "skip":
                new_state = with_step(guarded_state, step_of(new_state))
            else:
                new_state, has_failed, is_finite = guarded_state, ~is_taken, is_taken
        num_tokens = all_reduce("mean", self._num_tokens(batch, weights))
        return TrainCarry(new_state, metrics, has_failed), _outcome(loss, is_finite, num_tokens=num_tokens)

    def _num_tokens(self, element: PyTree, weights: Any) -> jax.Array | None:
        """Returns the number of tokens of this replica in examples with a weight, float32 `[]`; None without `tokens`."""
        if self.tokens is None:
            return None
        tokens, num_examples = self.tokens(element), len(jax.tree.leaves(element)[0])
        if not has_dtype(tokens) or jnp.shape(tokens)[:1] != (num_examples,):
            raise ValueError(
                f"`tokens` returned {describe_tree(tokens)} for {num_examples} examples. It must return one array "
                f"[{num_examples}, ...] whose non-zero numbers are the tokens, such as a mask; without one, "
                "`jnp.ones_like(ids)`."
            )
        is_token = jnp.reshape(tokens, (num_examples, -1)) != 0
        is_example = True if weights is None else example_mask(weights)[:, None] != 0
        return jnp.sum(is_token & is_example, dtype=jnp.float32)

    def evaluate(self, metrics: PyTree, state: ModelVariables, batch: PyTree, weights: Any = None) -> Any:
        """Returns the loss and the metrics with one more batch."""
        element = batch
        batch, weights = self.objective.split(element, weights)
        result = self.objective(*state, batch, replica_key(jax.random.key(0)), False, weights, element=element)
        return jax.tree.map(jnp.add, metrics, pack_metrics(result.metrics)), None

    def predict(self, state: ModelVariables, batch: PyTree, weights: Any = None) -> tuple[PyTree, Any]:
        """Returns the outputs for a batch, `[batch, ...]`, and the weights of its examples."""
        inputs, _, _ = split_element(batch, weights)
        with explained_data_errors(batch):
            outputs = self.outputs(state, inputs, weights, replica_key(jax.random.key(0)))
        size = len(jax.tree.leaves(inputs)[0])
        for name, leaf in named_leaves("outputs", outputs):
            if jnp.ndim(leaf) == 0 or jnp.shape(leaf)[0] != size:
                raise ValueError(
                    f"{name} is {dtype_and_shape(leaf)} for {size} examples: `predict` needs outputs of shape [batch, ...]."
                )
        return outputs, jnp.ones(size) if weights is None else weights

    def outputs(self, variables: ModelVariables, inputs: PyTree, weights: Any = None, key: Any = None) -> PyTree:
        """Returns the outputs of the model for `inputs`, in evaluation mode, with random numbers from `key`."""
        key = jax.random.key(0) if key is None else key
        return self.objective.apply(*variables, inputs, key, False, weights).outputs


def _outcome(
    loss: jax.Array,
    is_finite: jax.Array,
    count: Any = None,
    num_weighted: Any = None,
    num_tokens: Any = None,
    norms: Sequence[jax.Array] = (),
) -> jax.Array:
    """Returns the outcome of a step: its loss, 1 if it was finite, the number of its examples with a weight, further numbers.

    The loss is the mean over all examples of the batch; NaN if all weights are 0. A step is finite if its loss and its
    gradients, or its updates, are; always with `non_finite="keep"`, and with `"stop"` not after a failure. The number is -1
    if the batch has no weights. The further numbers have the names `outcome_names`. One array `[3 + further]`, because each
    result of a program costs time on the host.

    Args:
        loss: The loss.
        is_finite: Whether the step was finite.
        count: The mean of the weights of all losses, or None without weights.
        num_weighted: The mean over the replicas of the number of examples with a weight, or None.
        num_tokens: The mean over the replicas of the number of tokens, or None.
        norms: The norms of gradient, update and parameters, if they are computed.
    """
    loss = loss.astype(jnp.float32)
    loss = loss if count is None else jnp.where(count == 0, jnp.nan, loss)
    total = lambda mean: jnp.round(mean * num_replicas())
    numbers = [loss, is_finite.astype(loss.dtype)]
    numbers.append(jnp.full_like(loss, -1) if num_weighted is None else total(num_weighted))
    tokens = [] if num_tokens is None else [total(num_tokens)]
    return jnp.stack([*numbers, *tokens, *norms])
