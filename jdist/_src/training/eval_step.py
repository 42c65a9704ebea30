"""`eval_step`: metrics of a batch, or of all batches of a data set, over the examples of all replicas."""

import functools
from collections.abc import Callable, Iterable
from typing import Any, Generic, Self, TypeVar, overload

import jax
import jax.numpy as jnp
import numpy as np

from jdist._src.core import source_lines
from jdist._src.core.arguments import function_name
from jdist._src.core.errors import ReplicatedBatchWarning
from jdist._src.core.tree import PyTree, describe_type, dtype_and_shape, has_dtype, named_leaves
from jdist._src.data.dataset import DistributedDataset
from jdist._src.devices.mesh import Replicas
from jdist._src.jaxpr.batch_check import replicated_batch_message
from jdist._src.jaxpr.replication import warn_once
from jdist._src.replica.context import all_reduce
from jdist._src.replica.metric_sums import clu_metric_types
from jdist._src.replica.metrics import Mean, Metric
from jdist._src.strategies.current import get_strategy
from jdist._src.strategies.late_bound_step import add_missing_strategy_note, bind_state
from jdist._src.training.foreign_metrics import is_foreign_metric
from jdist._src.training.loss_functions import check_metric_weights, is_metric, optional_parameters
from jdist._src.values.aggregation import VariableAggregation
from jdist._src.values.base import is_distributed
from jdist._src.values.sync_on_read import SyncOnRead

MetricsT = TypeVar("MetricsT")
ValuesT = TypeVar("ValuesT")


class EvalStep(Generic[MetricsT, ValuesT]):
    """An evaluation step for the current strategy: the result of `jdist.eval_step`.

    `evaluate(state, batch)` returns the metrics of one batch, and `evaluate.over(state, batches)` their values over several
    batches. `evaluate.__wrapped__` is the function.

    Immutable, except for a count of its traces. Its programs are stored by the strategies.

    Args:
        fn: The function of the user, for one replica.

    Example:
        >>> evaluate = jdist.eval_step(lambda w, x: {"error": abs(x - w)})
        >>> strategy = jdist.MirroredStrategy(["cpu:0", "cpu:1"])
        >>> with strategy.scope():
        ...     metrics = evaluate(0.5, strategy.split(np.float32([1, 2])))
        >>> float(metrics["error"].compute())
        1.0
    """

    __name__: str
    __qualname__: str
    __wrapped__: Callable[..., Any]

    def __init__(self, fn: Callable[..., Any]):
        receivers = optional_parameters("fn", fn, "weights")
        functools.update_wrapper(self, fn, updated=())
        self.__name__ = function_name(fn)

        # `strategy.run` caches the program by the identity of this function.
        @functools.wraps(fn)
        def batch_metrics(state: PyTree, batch: PyTree, weights: Any = None) -> PyTree:
            result = fn(state, batch, **{name: weights for name in receivers.values()})
            check_metric_weights(function_name(fn), result, weights, receivers)
            num_examples = len(jax.tree.leaves(batch)[0])
            as_metric = functools.partial(_as_metric, function_name(fn), weights, num_examples)
            self._num_traces += 1
            return all_reduce("sum", jax.tree_util.tree_map_with_path(as_metric, result, is_leaf=is_metric))

        del batch_metrics.__wrapped__  # error messages name the arguments by the parameters of `batch_metrics`
        self._batch_metrics = batch_metrics
        self._num_traces = 0

    def __call__(self, state: PyTree, batch: PyTree, weights: Any = None) -> MetricsT:
        """Returns the metrics of a batch.

        Args:
            state: The state, or the part of it that the function uses. It is not donated. The replicas receive the aggregated
                value of a `SyncOnRead`.
            batch: A batch, `PerReplica`.
            weights: The weights of its examples, 0 for padding.

        Returns:
            The result of the function with a metric of `jdist.metrics` in place of each value, over the examples of all
            replicas. `a.merge(b)` is the metric of two batches.

        Warns:
            ReplicatedBatchWarning: The batch is replicated, so every replica evaluates all of its examples.
        """
        return self._run(_read(state), batch, weights)

    def over(self, state: PyTree, batches: Iterable[PyTree]) -> ValuesT:
        """Returns the values of the metrics over all examples of several batches.

        Args:
            state: See `__call__`.
            batches: A distributed data set, padded or not, or another iterable of batches without padding.

        Returns:
            The result of the function with the value of each metric: a number, or a numpy array.

        Raises:
            TypeError: `batches` is not iterable, or is one batch.
            ValueError: There are no batches, or the data set is endless.

        Example:
            >>> strategy = jdist.MirroredStrategy(["cpu:0", "cpu:1"])
            >>> evaluate = jdist.eval_step(lambda w, x: {"error": abs(x - w)})
            >>> data = strategy.distribute_dataset(np.float32([1, 2, 6]), 2, remainder="pad")
            >>> with strategy.scope():
            ...     evaluate.over(0.5, data)
            {'error': 2.5}
        """
        if is_distributed(batches) or isinstance(batches, dict) or not isinstance(batches, Iterable):
            raise TypeError(
                f"`batches` must be an iterable of batches, such as a distributed data set, got {describe_type(batches)}. Of "
                "one batch, call `evaluate(state, batch)`."
            )
        has_weights = isinstance(batches, DistributedDataset) and batches.has_weights
        if isinstance(batches, DistributedDataset) and (batches.epochs is None or batches.is_endless):
            raise ValueError("The data set is endless. Evaluate a data set with `epochs=1`.")
        state, sums, treedef = _read(state), None, None
        for element in batches:
            metrics = self._run(state, *element) if has_weights else self._run(state, element, None)
            leaves, treedef = jax.tree.flatten(metrics)
            sums = leaves if sums is None else _add(sums, leaves)
        if treedef is None:
            raise ValueError("There are no batches to evaluate: the data set is empty, or was read before.")
        # The classes of metrics that the function defines differ between its traces, but not their leaves.
        total = treedef.unflatten(map(jnp.asarray, jax.device_get(sums)))
        values = jax.device_get(jax.tree.map(lambda metric: metric.compute(), total, is_leaf=is_metric))
        return jax.tree.map(lambda value: value if np.ndim(value) else np.asarray(value).item(), values)

    @overload
    def __get__(self, instance: None, owner: Any = None) -> Self: ...
    @overload
    def __get__(self, instance: object, owner: Any = None) -> Callable[..., MetricsT]: ...
    def __get__(self, instance: Any, owner: Any = None) -> Any:
        return self if instance is None else bind_state(self, instance)

    def __repr__(self) -> str:
        return f"EvalStep({self.__qualname__})"

    def __reduce__(self) -> str:
        return self.__qualname__  # pickled by name, as a function

    def _run(self, state: PyTree, batch: PyTree, weights: Any) -> Any:
        args = (state, batch) if weights is None else (state, batch, weights)
        strategy, num_traces = get_strategy(), self._num_traces
        try:
            metrics = strategy.run(self._batch_metrics, args)
        except ValueError as error:
            add_missing_strategy_note(error, args)
            raise
        if self._num_traces != num_traces:  # as for a step, the check is a part of the trace
            _warn_of_replicated_batch(strategy.replicas, batch)
        return metrics


@overload
def eval_step(fn: Callable[..., dict[str, Any]]) -> EvalStep[dict[str, Metric], dict[str, Any]]: ...
@overload
def eval_step(fn: Callable[..., Any]) -> EvalStep[Any, Any]: ...
def eval_step(fn: Callable[..., Any]) -> EvalStep[Any, Any]:
    """Returns an evaluation step, which computes metrics over the examples of all replicas. Nothing is donated.

    Args:
        fn: `fn(state, batch)` of one replica returns a tree, such as a dict, of metrics of `jdist.metrics` with the examples of
            the batch, or of values `[batch, ...]`, which are averaged. `jdist.metrics.adapt` makes metrics of other libraries
            metrics of jdist; states of clu and metrax are accepted as they are. A parameter `weights`, or a third parameter
            without a default, receives the weights of the examples, 0 for padding, or None without padding: pass it to
            `update` of a metric. The weights of values are applied by jdist.

    Returns:
        A `jdist.EvalStep` for the current strategy: `evaluate(state, batch)`, or `evaluate(state, batch, weights)` with the
        weights of a padded batch, returns metrics that are merged over the replicas. `evaluate.over(state, batches)` returns
        their values over all batches.

    Raises:
        TypeError: `fn` is not a function of a state and a batch. When called: it returns metrics of a padded batch and has no
            parameter for the weights; or another value than metrics and arrays.
        ValueError: When called: a value is not one per example, or the `merge` of a metric of clu is not a sum.

    Example:
        >>> @jdist.eval_step
        ... def evaluate(w, batch, weights):
        ...     x, y = batch
        ...     predictions = w * x
        ...     squares = jdist.metrics.MeanSquaredError().update(
        ...         predictions, y, weights=weights
        ...     )
        ...     return {"squares": squares, "distance": abs(predictions - y)}
        >>> strategy = jdist.MirroredStrategy(["cpu:0", "cpu:1"])
        >>> data = strategy.distribute_dataset(
        ...     (np.float32([1, 2, 3]), np.float32([2, 4, 9])), batch_size=4, remainder="pad"
        ... )
        >>> with strategy.scope():
        ...     for batch, weights in data:
        ...         metrics = evaluate(2.0, batch, weights)
        ...     print(evaluate.over(2.0, data))
        {'distance': 1.0, 'squares': 3.0}
        >>> float(metrics["squares"].compute())
        3.0
    """
    return EvalStep(fn)


def _warn_of_replicated_batch(replicas: Replicas, batch: PyTree) -> None:
    place = source_lines.caller_frame()
    if replicas.num_parts == 1 or any(map(is_distributed, jax.tree.leaves(batch, is_leaf=is_distributed))) or not place:
        return
    names = [name for name, _ in named_leaves("batch", batch)]
    workers = "devices" if replicas.batch_axes else "replicas"
    warn_once(replicated_batch_message(names, replicas.num_parts, workers), ReplicatedBatchWarning, place)


def _as_metric(name: str, weights: Any, num_examples: int, path: Any, value: Any) -> Any:
    if isinstance(value, (Metric, *clu_metric_types())):
        return value
    if is_foreign_metric(value):
        raise TypeError(
            f"`{name}` returned result{jax.tree_util.keystr(path)}, a metric {describe_type(value)}. Adapt the metric outside "
            f"`{name}`, `metric = jdist.metrics.adapt(...)`, and return `metric.update(..., weights=weights)`."
        )
    if not has_dtype(value) or jnp.ndim(value) == 0 or jnp.shape(value)[0] != num_examples:
        raise (TypeError if not has_dtype(value) else ValueError)(
            f"`{name}` returned result{jax.tree_util.keystr(path)} as {dtype_and_shape(value)} for {num_examples} examples. "
            f"Return one value per example, [{num_examples}, ...], without `.mean()`, or a metric."
        )
    return Mean().update(value, weights=weights)


def _read(state: PyTree) -> PyTree:
    """Returns `state` with the aggregated value in place of each `SyncOnRead`."""

    def read(node: Any) -> PyTree:
        is_aggregated = isinstance(node, SyncOnRead) and node.aggregation is not VariableAggregation.NONE
        return node.read() if is_aggregated else node

    return jax.tree.map(read, state, is_leaf=is_distributed)


@jax.jit
def _add(a: list[jax.Array], b: list[jax.Array]) -> list[jax.Array]:
    return list(map(jnp.add, a, b))
