"""`train_step`: a training step from a loss function and an optimizer."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

import jax
import jax.numpy as jnp
import optax

from jdist._src.core.nn_modules import is_nnx_module
from jdist._src.core.tree import PyTree, describe_tree, dtype_and_shape, has_dtype, is_float
from jdist._src.replica.context import all_reduce
from jdist._src.replica.gradients import GradientOptions, Remat, pad_to_parts, resolved_options, value_and_grad
from jdist._src.replica.losses import is_loss
from jdist._src.replica.precision import Precision
from jdist._src.replica.random import replica_key
from jdist._src.strategies.current import step
from jdist._src.strategies.late_bound_step import Step
from jdist._src.training.gradient_step import check_optimizer, gradient_step
from jdist._src.training.loss_functions import (
    check_metric_weights,
    is_metric,
    optional_parameters,
    split_result,
    weighted_losses,
)
from jdist._src.training.state import TrainingState, replace_fields, state_fields

StateT = TypeVar("StateT", bound=TrainingState)

if TYPE_CHECKING:

    class TrainStep(Step[Any, ..., Any]):
        """The declared type of a training step, a `jdist.Step`."""

        def __call__(self, state: StateT, batch: Any, weights: Any = None) -> tuple[StateT, Any]: ...  # pyright: ignore


def train_step(
    loss_fn: Callable[..., Any],
    optimizer: optax.GradientTransformation,
    *,
    micro_batches: int = 1,
    remat: Remat = False,
    precision: Precision | None = None,
    steps_per_call: int | None = None,
    donate: bool = True,
    compiler_options: Mapping[str, Any] | None = None,
) -> "TrainStep":
    """Returns a training step that minimizes the mean of a loss over the examples of all replicas.

    The step is `train_step(state, batch)`, or `train_step(state, batch, weights)` with the weights of a padded batch. Gradients
    are averaged over the replicas, unless the optimizer itself uses collectives, as the policies of `jdist.sync` do.

    The state is a `jdist.TrainState`, or another dataclass with `step`, `params` and `opt_state`. Create it on the devices with
    the same optimizer: `jdist.init(make, key)`, where `make(key)` returns
    `jdist.TrainState.create(params, optimizer, rng=key)`. The step replaces `step`, `params` and `opt_state`.

    Args:
        loss_fn: `loss_fn(params, batch)` returns losses `[batch, ...]`, one or several per example, or a pair of these and
            auxiliary values. Without `weights`, it may return the mean over its examples, `[]`. A parameter `key`, or a third
            parameter without a default, receives a random key that differs between steps and replicas (derived from
            `state.rng`), a parameter `weights` the weights of the examples, None without padding. For a mean over tokens it
            returns `(losses, weights)`, or `((losses, weights), aux)`: the weights are the first dimensions of the losses, and
            are multiplied by the weights of the examples. In a pair, an array with at least one dimension, and no more than the
            losses, is weights: return auxiliary values of such a shape in a dict.
        optimizer: An optax transformation. Its update receives the extra arguments of the optimizer of `jdist.Trainer`.
        micro_batches: The number of parts that the batch of a replica is split into, to reduce the memory of activations. A
            batch that is not divisible is padded with examples of weight 0; losses of several micro-batches are then one or
            several per example.
        remat: See `jdist.value_and_grad`.
        precision: See `jdist.Strategy.step`.
        steps_per_call: See `jdist.Strategy.step`.
        donate: See `jdist.Strategy.step`.
        compiler_options: See `jdist.Strategy.step`.

    Returns:
        A `jdist.Step`, compiled for the current strategy. Its outputs are the mean loss `[]`, or a pair of it and the auxiliary
        values: metrics of `jdist.metrics` are summed over the replicas and the micro-batches, other values are as the results
        of `strategy.run`, stacked over several micro-batches.

    Raises:
        TypeError: `loss_fn` or `optimizer` is of another type. When called: the state lacks a field or is of another optimizer,
            `params` is an nnx module, a parameter or the losses are not floats, or `loss_fn` returns metrics of a padded batch
            and has no parameter `weights`.
        ValueError: `micro_batches` or `steps_per_call` is less than 1. When called: the losses are not one or several per
            example, their shape does not match weights, or the state was created without an optimizer.

    Example:
        >>> import optax
        >>> optimizer = optax.sgd(0.5)
        >>> train_step = jdist.train_step(lambda w, x: (w - x) ** 2, optimizer)
        >>> strategy = jdist.MirroredStrategy(["cpu:0", "cpu:1"])
        >>> with strategy.scope():
        ...     state = jdist.init(
        ...         lambda: jdist.TrainState.create(jax.numpy.float32(0), optimizer)
        ...     )
        ...     for batch, weights in strategy.distribute_dataset(
        ...         np.float32([1, 2, 6]), batch_size=4, remainder="pad"
        ...     ):
        ...         state, loss = train_step(state, batch, weights)
        >>> float(state.params), int(state.step)  # the mean of 1, 2 and 6, after one step
        (3.0, 1)
    """
    receivers = optional_parameters("loss_fn", loss_fn, "key", "weights")
    check_optimizer(optimizer)
    options = GradientOptions(micro_batches, remat)
    value_and_grad(loss_fn, **options._asdict())  # checks both options

    # Error messages name the arguments by the parameters of this function.
    def train_step(state: PyTree, batch: PyTree, weights: Any = None) -> tuple[PyTree, Any]:
        fields = state_fields(state)
        if fields.opt_state is None:
            raise ValueError(
                "`state.opt_state` is None: the state was created without an optimizer. Create it with the optimizer of the "
                "step: `jdist.TrainState.create(params, optimizer)`."
            )
        if is_nnx_module(fields.params):
            raise TypeError(
                "`state.params` is a module of nnx, whose optimizer is `nnx.Optimizer`. Write the step, `loss, grads = "
                "jdist.value_and_grad(loss_fn)(model, batch); optimizer.update(model, grads)`, or pass the parameters of "
                "`graph, params = nnx.split(model)` and call `nnx.merge(graph, params)` in `loss_fn`."
            )
        micro_batches, remat = resolved_options(options)
        batch, weights = pad_to_parts(batch, weights, micro_batches)
        key = replica_key(jax.random.fold_in(fields.rng, fields.step)) if "key" in receivers else None

        def compute_losses(
            params: PyTree, batch: PyTree, weights_part: Any, part: jax.Array, model_state: PyTree
        ) -> Any:
            arguments = {"weights": weights_part, "key": None if key is None else jax.random.fold_in(key, part[0])}
            result = loss_fn(params, batch, **{receivers[name]: arguments[name] for name in receivers})
            losses, loss_weights, aux = split_result(result, takes_array_as_aux=True)
            if not is_loss(losses):
                raise TypeError(
                    "`loss_fn` must return losses [batch, ...], or a pair of these and their weights or other values, got "
                    f"{describe_tree(result)}."
                )
            _check_losses(losses, batch)
            check_metric_weights("loss_fn", aux, weights, receivers)
            if loss_weights is not None:
                losses = weighted_losses("loss_fn", losses, loss_weights, weights_part)
            return losses, (aux, model_state)

        without_model = dataclasses.replace(fields, model_state=None)
        new = gradient_step(
            optimizer, compute_losses, without_model, batch, weights, micro_batches=micro_batches, remat=remat
        )
        new_state = replace_fields(state, fields.step + 1, new.params, new.opt_state, fields.model_state)
        return new_state, new.loss if new.aux is None else (new.loss, _total_metrics(new.aux, micro_batches))

    train_step.__qualname__ = "train_step"
    return step(  # pyright: ignore[reportReturnType]  # a `Step` with more general types
        train_step,
        precision=precision,
        steps_per_call=steps_per_call,
        donate=donate,
        compiler_options=compiler_options,
    )


def _check_losses(losses: Any, batch: PyTree) -> None:
    """Raises TypeError or ValueError if `losses` are not floats, or are not one or several per example."""
    if has_dtype(losses) and not is_float(losses):
        raise TypeError(
            f"`loss_fn` returned {dtype_and_shape(losses)}, which is not differentiable: the dtype must be a float."
        )
    # The first dimensions of a batch of graphs, for example, differ: its nodes and its edges.
    counts = list(dict.fromkeys(jnp.shape(leaf)[0] for leaf in jax.tree.leaves(batch) if jnp.ndim(leaf)))
    if jnp.ndim(losses) and counts and jnp.shape(losses)[0] not in counts:
        examples = " or ".join(map(str, counts))
        raise ValueError(
            f"`loss_fn` returned {dtype_and_shape(losses)} for {examples} examples. It must return one or several losses per "
            f"example, [{counts[0]}, ...], or one number that is their mean. For losses of all tokens of a batch in one "
            f"dimension, return `losses.reshape({counts[0]}, -1)`."
        )


def _total_metrics(aux: PyTree, micro_batches: int) -> PyTree:
    """Returns auxiliary values with each metric summed over the replicas, and over the micro-batches if there are several."""
    nodes, treedef = jax.tree.flatten(aux, is_leaf=is_metric)
    metrics = [node for node in nodes if is_metric(node)]
    if micro_batches > 1:
        metrics = jax.tree.map(lambda x: x.sum(0), metrics)
    totals = iter(all_reduce("sum", metrics))
    return treedef.unflatten([next(totals) if is_metric(node) else node for node in nodes])
