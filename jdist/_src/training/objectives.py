"""The losses, metrics and new model state of a batch: of a model and a loss, or of an objective of the user."""

import contextlib
import dataclasses
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jdist._src.core.tree import PyTree, add_note_once, describe_tree, dtype_and_shape, one_line, short_line
from jdist._src.replica.context import all_reduce, num_replicas
from jdist._src.replica.losses import WeightedLosses
from jdist._src.replica.metrics import Metric
from jdist._src.replica.precision import Precision
from jdist._src.training.loss_functions import split_result, weighted_losses
from jdist._src.training.metric_adapters import TrainerMetric, batch_metrics, check_losses
from jdist._src.training.model_functions import ModelFunctions, ModelLosses, ModelResult, as_inputs, example_mask


class BatchResult(NamedTuple):
    """The results of an objective for the examples of a replica, or of a micro-batch.

    Attributes:
        losses: `[batch, ...]`, with the losses that the model adds; with weights if the objective returned some.
        metrics: The loss and the metrics of these examples.
        model_state: The new model state.
    """

    losses: jax.Array | WeightedLosses
    metrics: Mapping[str, Metric]
    model_state: PyTree


# The losses of optax for names that Keras accepts.
_OPTAX_LOSSES = {
    "sparse_categorical_crossentropy": "optax.softmax_cross_entropy_with_integer_labels",
    "categorical_crossentropy": "optax.softmax_cross_entropy",
    "binary_crossentropy": "optax.sigmoid_binary_cross_entropy",
    "cross_entropy": "optax.softmax_cross_entropy_with_integer_labels",
    "mse": "optax.squared_error",
    "mean_squared_error": "optax.squared_error",
    "huber": "optax.huber_loss",
}


@dataclasses.dataclass(frozen=True)
class Objective:
    """The losses of a batch: of the outputs of a model, or of a function of the user; plus the losses that the model adds.

    Attributes:
        model: The model.
        loss: A function from outputs and targets to losses `[batch, ...]`, one or several per example.
        fn: A function `fn(params, batch, key, apply)` in place of `loss`. It returns losses, possibly with their weights and
            with auxiliary values.
        metrics: The metrics, by name.
        precision: The dtypes of the computation.
    """

    model: ModelFunctions
    loss: Any
    fn: Callable[..., Any] | None
    metrics: Mapping[str, TrainerMetric]
    precision: Precision | None

    def __post_init__(self) -> None:
        if self.loss is not None and not callable(self.loss):
            is_optimizer = hasattr(self.loss, "init") and hasattr(self.loss, "update")
            got = "an optimizer" if is_optimizer else one_line(self.loss)
            order = " The order is `Trainer(model, optimizer, loss)`." * is_optimizer
            example = _OPTAX_LOSSES.get(self.loss, "") if isinstance(self.loss, str) else ""
            raise TypeError(
                "`loss` must be a function from outputs and targets to losses [batch, ...], such as "
                f"`optax.softmax_cross_entropy_with_integer_labels` or `optax.squared_error`, got {got}.{order}"
                f"{f' Write `loss={example}`.' if example else ''}"
            )
        if not isinstance(self.precision, Precision | None):
            raise TypeError(
                "`precision` must be a `jdist.Precision`, such as `jdist.Precision(compute_dtype=jnp.bfloat16)`, got "
                f"{one_line(self.precision)}."
            )
        if self.fn is not None:
            _check_objective(self.fn)

    @property
    def takes_weights(self) -> bool:
        """Whether the function of the user, or the model, receives the weights of the examples."""
        return self.model.takes_weights or (self.fn is not None and "weights" in inspect.signature(self.fn).parameters)

    def split(self, element: PyTree, padding_weights: Any) -> tuple[PyTree, Any]:
        """Returns the batch for `__call__`, and the weights of its examples."""
        if self.fn is not None:
            return element, padding_weights
        inputs, targets, weights = split_element(element, padding_weights)
        return (inputs, targets), weights

    def __call__(
        self,
        params: PyTree,
        model_state: PyTree,
        batch: PyTree,
        key: jax.Array,
        train: bool,
        weights: Any,
        *,
        element: PyTree,
        all_weights: Any = None,
        micro_batches: int = 1,
    ) -> BatchResult:
        """Computes losses and metrics.

        Args:
            params: The parameters.
            model_state: The model state.
            batch: The first result of `split`, or a micro-batch of it.
            key: A random key of this replica.
            train: Whether the model is trained.
            weights: The weights of the examples.
            element: The element of the data, for error messages.
            all_weights: The weights of all micro-batches of the replica, by default `weights`.
            micro_batches: The number of micro-batches.
        """
        num_examples, loss_weights = len(jax.tree.leaves(batch)[0]), None
        model = _ModelCalls(self, model_state, key, train, weights)
        if self.fn is None:
            inputs, targets = batch
            with explained_data_errors(element):
                outputs = model(params, inputs)
                losses, measured, name = self._call_loss(outputs, targets), (outputs, targets), "loss"
        else:
            objective_key, model.key = jax.random.split(key)
            result = self._call_fn(params, batch, objective_key, model, weights)
            losses, loss_weights, aux = split_result(result, takes_array_as_aux=False)
            measured, name = (aux, batch), "objective"
        try:
            losses = check_losses(losses, num_examples, name)
        except (TypeError, ValueError) as error:
            if self.fn is None:
                add_note_once(error, self._loss_note(*measured))
            raise
        if loss_weights is None:
            all_weights = weights if all_weights is None else all_weights
            losses = _with_model_losses(losses, model.losses, weights, all_weights, micro_batches)
            return BatchResult(losses, batch_metrics(self.metrics, losses, *measured, weights), model.state)
        weighted = weighted_losses(name, losses, loss_weights, weights)
        if any(model.losses) and micro_batches > 1:
            raise ValueError(
                "The objective returns weights of its losses, and the model adds losses, which is not supported with "
                "`micro_batches`: the weights of the other micro-batches are not known. Use `micro_batches=1`, or pass the "
                "weights as data, `(inputs, targets, weights)`, with `loss=`."
            )
        losses = _with_model_losses(losses, model.losses, weighted.weights, weighted.weights, micro_batches)
        metrics = batch_metrics(self.metrics, losses, *measured, weights, weighted.weights)
        return BatchResult(WeightedLosses(losses, weighted.weights), metrics, model.state)

    def model_inputs(self, element: PyTree) -> PyTree:
        """Returns the inputs with which the model is initialized, for an element of the data with these shapes.

        Raises:
            ValueError: The objective needs parameters before it applies the model.
        """
        if self.fn is None:
            return split_element(element, None)[0]

        def stop(params: PyTree, *args: Any, **kwargs: Any) -> None:
            raise _FirstInputs(as_inputs(args, kwargs))

        try:
            weights = jnp.ones(len(jax.tree.leaves(element)[0]))
            jax.eval_shape(
                lambda batch, key: self._call_fn(None, batch, key, stop, weights), element, jax.random.key(0)
            )
        except _FirstInputs as first:
            return jax.tree.map(lambda x: jax.ShapeDtypeStruct(jnp.shape(x), jnp.asarray(x).dtype), first.inputs)
        except Exception as error:
            if isinstance(element, tuple):
                return element[0]
            raise ValueError(
                "The inputs of the model are not known, because the objective uses `params` before it calls `apply` "
                f"({type(error).__name__}: {error}). Pass a state: `fit(data, state=trainer.init(inputs))`."
            ) from error
        return element

    def _call_loss(self, outputs: PyTree, targets: PyTree) -> Any:
        try:
            return self.loss(outputs, targets)
        except Exception as error:
            add_note_once(error, self._loss_note(outputs, targets))
            raise

    @staticmethod
    def _loss_note(outputs: PyTree, targets: PyTree) -> str:
        return f"The loss was called with outputs {describe_tree(outputs)} and targets {describe_tree(targets)}."

    def _call_fn(self, params: PyTree, batch: PyTree, key: jax.Array, apply: Callable[..., Any], weights: Any) -> Any:
        assert self.fn is not None
        keywords = {"weights": weights} if "weights" in inspect.signature(self.fn).parameters else {}
        return self.fn(params, batch, key, apply, **keywords)

    def apply(
        self, params: PyTree, model_state: PyTree, inputs: PyTree, key: jax.Array, train: bool, weights: Any
    ) -> ModelResult:
        """Applies the model in the dtypes of the precision."""
        if not self.precision:
            return self.model.apply(params, model_state, inputs, key, train, weights)
        params, inputs = self.precision.cast_compute((params, inputs))
        result = self.model.apply(params, model_state, inputs, key, train, weights)
        return result._replace(outputs=self.precision.cast_output(result.outputs))


class _FirstInputs(Exception):
    """Ends the trace of an objective at its first call of the model."""

    def __init__(self, inputs: PyTree):
        self.inputs = inputs


class _ModelCalls:
    """The function `apply` of an objective: `apply(params, inputs)` returns the outputs of the model.

    Mutable: each call continues with the model state of the previous call, and uses another key.
    """

    def __init__(self, objective: Objective, model_state: PyTree, key: jax.Array, train: bool, weights: Any):
        self._objective, self._train, self._weights = objective, train, weights
        self._num_calls, self.key = 0, key
        self.state, self.losses = model_state, ModelLosses()

    def __call__(self, params: PyTree, *args: Any, **kwargs: Any) -> PyTree:
        key = self.key if self._num_calls == 0 else jax.random.fold_in(self.key, self._num_calls)
        self._num_calls += 1
        inputs = as_inputs(args, kwargs)
        result = self._objective.apply(params, self.state, inputs, key, self._train, self._weights)
        self.state = result.state
        self.losses = ModelLosses(*([*a, *b] for a, b in zip(self.losses, result.losses, strict=True)))
        return result.outputs


def _check_objective(fn: Any) -> None:
    if not callable(fn):
        raise TypeError(f"`objective` must be a function `fn(params, batch, key, apply)`, got {one_line(fn)}.")
    try:
        signature = inspect.signature(fn)
        signature.bind(None, None, None, None, **({"weights": None} if "weights" in signature.parameters else {}))
    except TypeError as error:
        raise TypeError(
            f"`objective` is called as `fn(params, batch, key, apply)`, and optionally with `weights=`: {error}. "
            "`apply(params, inputs)` returns the outputs of the model."
        ) from None


def _with_model_losses(
    losses: jax.Array, added: ModelLosses, weights: Any, all_weights: Any, micro_batches: int
) -> jax.Array:
    """Returns `losses` plus a number that adds the losses of the model to the weighted mean over all examples.

    In that mean, the number has the weight of this micro-batch: the sum of its weights. The losses of a model count each
    example once, unless its weight is 0.
    """
    if not any(added):
        return losses
    num_examples = len(losses)
    mask = jnp.ones(num_examples, jnp.float32) if weights is None else example_mask(weights)
    of_examples = lambda value, reduce: jnp.where(mask == 0, 0, _per_example(value, num_examples, reduce)).sum()
    mean = sum((of_examples(value, jnp.mean) for value in added.means), jnp.float32(0))
    total = sum((of_examples(value, jnp.sum) for value in added.sums), jnp.float32(0)) * num_replicas()
    if weights is None:
        return losses + (mean / num_examples + total * micro_batches).astype(losses.dtype)
    weight = jnp.sum(weights)
    mean_weight, mean_count = all_reduce("mean", (jnp.sum(all_weights), example_mask(all_weights).sum()))
    share = mean / jnp.where(mean_count == 0, 1, mean_count) + total
    number = jnp.where(weight == 0, 0, share * mean_weight / jnp.where(weight == 0, 1, weight))
    return losses + number.astype(losses.dtype)


def _per_example(value: Any, num_examples: int, reduce: Callable[..., jax.Array]) -> jax.Array:
    """Returns a loss of the model as one number per example, float32 `[batch]`.

    Raises:
        ValueError: It is neither a number nor one or several values per example.
    """
    if jnp.ndim(value) and len(value) != num_examples:
        raise ValueError(
            f"The model adds the loss {dtype_and_shape(value)} for {num_examples} examples. It must be one number [], the mean "
            f"over the examples or a function of the parameters, or values per example, [{num_examples}, ...]."
        )
    value = jnp.asarray(value, jnp.float32)
    return reduce(value, axis=tuple(range(1, value.ndim))) if value.ndim else jnp.broadcast_to(value, num_examples)


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
        kind = f"dicts of {short_line(', '.join(map(repr, element)))}" if isinstance(element, dict) else "lists"
        raise TypeError(
            f"The model or the loss failed on data that are {kind} ({type(error).__name__}: {error}). A `Trainer` passes all "
            "of it to the model as inputs, and to the loss as targets. Pass tuples `(inputs, targets)`; or select the entries "
            "in the model and in the loss, or in an `objective`."
        ) from error
