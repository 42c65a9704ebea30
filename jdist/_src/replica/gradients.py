"""`value_and_grad` and `global_loss`: the mean loss over all replicas and micro-batches, and its gradient."""

import contextlib
import functools
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any, Concatenate, Literal, NamedTuple, ParamSpec, TypeAlias, TypeVar, overload

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_derivatives import linear_call

from jdist._src.collectives.ops import check_unwrapped
from jdist._src.core.arguments import as_int
from jdist._src.core.nn_modules import is_nnx_module
from jdist._src.core.trace_key import keyed
from jdist._src.core.tree import PyTree, argument_names, describe_tree, dtype_and_shape, named_leaves, one_line
from jdist._src.jaxpr.marks import GUARD_CALL, named_call
from jdist._src.replica import precision
from jdist._src.replica.context import ReplicaContext, require_replica_context
from jdist._src.replica.losses import WeightedLosses, is_loss, weighted_sums, weights_array
from jdist._src.values.array_checks import check_array
from jdist._src.values.reduce_op import ReduceOp

Params = TypeVar("Params")
Aux = TypeVar("Aux")
Batch = ParamSpec("Batch")
Remat: TypeAlias = bool | Callable[..., Any]


class GradientOptions(NamedTuple):
    """How a gradient is computed: options that change memory and time, and not the result.

    Attributes:
        micro_batches: See `value_and_grad`.
        remat: See `value_and_grad`.
    """

    micro_batches: int = 1
    remat: Remat = False


class _Override:
    """Options in place of the user's; `is_used` becomes True where a step reads them."""

    def __init__(self, options: GradientOptions):
        self.options, self.is_used = options, False


_override: ContextVar[_Override | None] = ContextVar("jdist_gradient_options", default=None)


@contextlib.contextmanager
def other_gradient_options(options: GradientOptions) -> Iterator[_Override]:
    """Lets steps that are traced in this context compute their gradients with other options.

    A plan compiles variants of a step in this way.

    Args:
        options: More micro-batches, by this factor, and the recomputation, if it is not False.
    """
    override = _Override(options)
    token = _override.set(override)
    try:
        with keyed(object()):
            yield override
    finally:
        _override.reset(token)


def resolved_options(options: GradientOptions) -> GradientOptions:
    """Returns the options of a gradient: the user's, with the changes of `other_gradient_options`."""
    override = _override.get()
    if override is None:
        return options
    override.is_used = True
    other = override.options
    return GradientOptions(options.micro_batches * other.micro_batches, other.remat or options.remat)


@overload
def value_and_grad(
    loss_fn: Callable[Concatenate[Params, Batch], tuple[Any, Aux]],
    *,
    micro_batches: int = 1,
    has_aux: Literal[True],
    weights: Any = None,
    remat: Remat = False,
) -> Callable[Concatenate[Params, Batch], tuple[tuple[jax.Array, Aux], Params]]: ...
@overload
def value_and_grad(
    loss_fn: Callable[Concatenate[Params, Batch], Any],
    *,
    micro_batches: int = 1,
    has_aux: Literal[False] = False,
    weights: Any = None,
    remat: Remat = False,
) -> Callable[Concatenate[Params, Batch], tuple[jax.Array, Params]]: ...
@overload
def value_and_grad(
    loss_fn: Callable[..., Any],
    *,
    micro_batches: int = 1,
    has_aux: bool = False,
    weights: Any = None,
    remat: Remat = False,
) -> Callable[..., tuple[Any, PyTree]]: ...
def value_and_grad(
    loss_fn: Callable[..., Any],
    *,
    micro_batches: int = 1,
    has_aux: bool = False,
    weights: Any = None,
    remat: Remat = False,
) -> Callable[..., tuple[Any, PyTree]]:
    """Returns a function that computes this replica's share of the mean loss over all examples, and its gradient.

    The mean of the shares over the replicas is the loss of the global batch, and the mean of the gradients is its gradient, for
    every split of the batch and every position of padding. So with `jdist.sync.mean()`, or `jdist.all_reduce("mean", ...)`, the
    result is the one of a single device. It uses a collective only to add `weights`.

    With `micro_batches`, the micro-batches are computed sequentially, and activations need the memory of one micro-batch. In a
    step with a `jdist.Precision`, parameters, data and results are cast to its dtypes, and the loss is scaled if the state has
    a loss scale (`jdist.sync.dynamic_loss_scale`); the returned gradients are unscaled, in the dtype of the parameters.

    Args:
        loss_fn: `loss_fn(params, *batch)` returns losses `[batch, ...]`, one or several per example, or one number `[]` that
            is the mean over its examples. Values that are not data are captured by closure. `params` may be an nnx module: as
            in `nnx.value_and_grad`, the gradient with respect to its `nnx.Param` variables is an `nnx.State`, and all other
            variables, such as statistics and random counters, are updated in place.
        micro_batches: The number of parts into which the batch is split. If greater than 1, each array in `batch` is
            `[batch, ...]`.
        has_aux: Whether `loss_fn` returns a pair `(losses, aux)`. With several micro-batches `aux` is stacked,
            `[micro_batch, ...]`.
        weights: `[batch]`, or the first dimensions of the losses: the weight of each loss. An example with weight 0 has no
            effect. By default all weights are 1.
        remat: Whether the backward pass recomputes the values of the forward pass, which saves memory (`jax.checkpoint`); or a
            policy of `jax.checkpoint_policies`, which selects the values to store.

    Returns:
        A function like `jax.value_and_grad(loss_fn)`: `(value, grads)`, or `((value, aux), grads)`. Zero if all weights are 0.

    Raises:
        ValueError: `micro_batches` is less than 1. When called: the batch cannot be split into micro-batches, or the shape of
            `weights` does not match the losses.
        TypeError: `micro_batches` is not an integer, or `remat` is neither a boolean nor a policy; when called, the losses are
            not one array or number, or a parameter is not a float.
        RuntimeError: When called: by the host program, within `strategy.scope()`.

    Example:
        >>> strategy = jdist.MirroredStrategy(["cpu:0", "cpu:1"])
        >>> @strategy.step
        ... def descend(w, batch):
        ...     x, weights = batch
        ...     loss, grad = jdist.value_and_grad(
        ...         lambda w, x: (w - x) ** 2, micro_batches=2, weights=weights
        ...     )(w, x)
        ...     return w - 0.5 * jdist.all_reduce("mean", grad), jdist.all_reduce("mean", loss)
        >>> (batch,) = strategy.distribute_dataset(
        ...     np.float32([1, 2, 6]), batch_size=4, remainder="pad"
        ... )
        >>> w, loss = descend(strategy.put(np.float32(0)), batch)
        >>> float(w), float(loss)  # the mean of 1, 2 and 6, and of their squares
        (3.0, 13.666666984558105)
    """
    options = GradientOptions(as_int("`micro_batches`", micro_batches, 1), remat)
    _checkpoint(remat)

    @functools.wraps(loss_fn)
    def share(params: PyTree, *batch: PyTree) -> tuple[Any, PyTree]:
        context = require_replica_context("value_and_grad", "strategy.step")
        resolved = resolved_options(options)
        totals_of = gradient_totals(loss_fn, has_aux=has_aux, weights=weights, **resolved._asdict())
        factor = None
        if weights is not None:
            check_unwrapped(weights)
            # The loss is divided, not its gradients: a pass over large gradients can cost as much as half of the step.
            mean_weight = context.all_reduce(ReduceOp.MEAN, jnp.mean(weights_array(weights), dtype=jnp.float32))
            factor = 1 / jnp.where(mean_weight == 0, 1, mean_weight)
        totals, aux = totals_of(params, *batch, factor=factor)
        grads = jax.tree.map(lambda g, p: g.astype(jnp.asarray(p).dtype), totals.grads, totals.params)
        return ((totals.loss, aux) if has_aux else totals.loss), grads

    return share


class GradientTotals(NamedTuple):
    """The results of `value_and_grad` on one replica, before the division by the weights of all replicas.

    Attributes:
        loss: The weighted total of the losses, divided by their number.
        count: The total of their weights, divided by the number of losses; None without weights, where it is 1. The weights
            are the ones of the examples, or the ones that the loss function returned.
        grads: The gradient of `loss`, possibly in a wider dtype than the parameters.
        params: The parameters that it was differentiated with respect to.
        num_losses: The number of losses.
    """

    loss: jax.Array
    count: Any
    grads: PyTree
    params: PyTree
    num_losses: int


@jax.tree_util.register_static
class _NumLosses(int):
    """The number of losses in all micro-batches of a replica, as a part of a tree without leaves."""


def gradient_totals(
    loss_fn: Callable[..., Any],
    *,
    micro_batches: int = 1,
    has_aux: bool = False,
    weights: Any = None,
    remat: Remat = False,
) -> Callable[..., tuple[GradientTotals, PyTree]]:
    """Returns a function that computes what `value_and_grad` computes without its only collective, the mean of the counts.

    Where loss and gradients are reduced next, the count is reduced in the same message, and `divide_by_count` follows.

    Args:
        loss_fn: See `value_and_grad`. In place of losses it may return `WeightedLosses`.
        micro_batches: See `value_and_grad`.
        has_aux: See `value_and_grad`.
        weights: See `value_and_grad`.
        remat: See `value_and_grad`.

    Returns:
        A function of `(params, *batch)`: the totals of this replica, and `aux`. With `factor`, the loss is multiplied by it.
    """
    micro_batches = as_int("`micro_batches`", micro_batches, 1)
    checkpointed = _checkpoint(remat)

    @functools.wraps(loss_fn)
    def totals_of(params: PyTree, *batch: PyTree, factor: Any = None) -> tuple[GradientTotals, PyTree]:
        module, carried = params, ()
        loss = functools.partial(_loss_of_params, loss_fn, has_aux)
        if is_nnx_module(params):
            params, carried, loss = _split_module(loss_fn, has_aux, params)
        require_replica_context("value_and_grad", "strategy.step")
        check_unwrapped((params, batch, weights))
        step_precision = precision.step_precision()
        if step_precision.precision:
            step_precision.precision.check_params(params)
        _check_differentiable(params)
        differentiate = _differentiated(loss, step_precision, micro_batches, checkpointed, factor)
        if micro_batches == 1:
            (total, count), grads, (carried, aux, num_losses) = differentiate(carried, params, batch, weights)
        else:
            parts = _split(loss_fn, batch, weights, micro_batches)
            (total, count), grads, (carried, aux, num_losses) = _accumulated(differentiate, carried, params, parts)
        if is_nnx_module(module):
            _update_module(module, carried)
        if step_precision.scale is not None:
            unscale = 1 / step_precision.scale
            grads = jax.tree.map(lambda g: g * unscale, grads)
        return GradientTotals(total, count, grads, params, num_losses), aux

    return totals_of


def divide_by_count(loss: jax.Array, grads: PyTree, count: Any) -> tuple[jax.Array, PyTree]:
    """Returns a total loss and its gradients, in their dtypes, divided by a total of weights; unchanged if it is 0 or None."""
    if count is None:
        return loss, grads
    inverse = 1 / jnp.where(count == 0, 1, count)
    return loss * inverse, jax.tree.map(lambda g: (g * inverse).astype(g.dtype), grads)


def global_loss(
    loss_fn: Callable[..., Any], *, micro_batches: int = 1, weights: Any = None, remat: Remat = False
) -> Callable[..., jax.Array]:
    """Returns a function that computes the mean loss over all replicas, and has the gradient of the global batch.

    For replicated parameters the value is replicated, and so is the result of `jax.grad`: the function equals the loss of a
    single device, also under `jax.jvp`, in second derivatives, and in `scan` and `while_loop`. Optimizers that evaluate the
    loss need it, such as the line search of `optax.lbfgs` (`value_fn`) and `optax.contrib.sophia` (`obj_fn`). Each gradient
    costs an all-reduce of all parameters, and must not be reduced again. For one gradient per step use `jdist.value_and_grad`.

    Args:
        loss_fn: See `value_and_grad`.
        micro_batches: See `value_and_grad`. The values of a micro-batch are recomputed in the backward pass.
        weights: See `value_and_grad`.
        remat: See `value_and_grad`.

    Returns:
        A function of `(params, *batch)`: the loss, float32 or wider, `[]`; replicated. Zero if all weights are 0.

    Raises:
        ValueError: See `value_and_grad`.
        TypeError: See `value_and_grad`.
        RuntimeError: When called: by the host program, within `strategy.scope()`.

    Example:
        >>> strategy = jdist.MirroredStrategy(["cpu:0", "cpu:1"])
        >>> (x,) = strategy.distribute_dataset(np.float32([1, 2, 6, 7]), batch_size=4)
        >>> loss = jdist.global_loss(lambda w, x: (w - x) ** 2)
        >>> [
        ...     float(number)
        ...     for number in strategy.run(
        ...         jax.value_and_grad(loss), (strategy.put(np.float32(0)), x)
        ...     )
        ... ]
        [22.5, -8.0]
    """
    micro_batches = as_int("`micro_batches`", micro_batches, 1)
    checkpointed = _checkpoint(remat or micro_batches > 1)

    @functools.wraps(loss_fn)
    def loss(params: PyTree, *batch: PyTree) -> jax.Array:
        context = require_replica_context("global_loss", "strategy.step")
        check_unwrapped((params, batch, weights))
        dtypes = precision.step_precision().precision
        if dtypes:
            dtypes.check_params(params)
        unscaled = precision.StepPrecision(dtypes)
        loss_of_params = functools.partial(_loss_of_params, loss_fn, False, ())
        scaled_total = checkpointed(_scaled_total(loss_of_params, unscaled, micro_batches))
        local_params = _with_reduced_gradient(context, params)

        def without_gradient_if(condition: jax.Array) -> PyTree:  # a model may compute NaN from padding alone
            return jax.tree.map(lambda p: jnp.where(condition, lax.stop_gradient(p), p), local_params)

        def totals(batch: PyTree, weights: Any) -> tuple[jax.Array, Any]:
            params = local_params
            if weights is not None:
                params = without_gradient_if(jnp.all(jnp.asarray(weights) == 0))
            total, (_, count, is_masked, _) = scaled_total(params, batch, weights)
            if is_masked is not None:  # XLA removes the first trace, except for the weights
                total, (_, count, _, _) = scaled_total(without_gradient_if(is_masked), batch, weights)
            return total, count

        if micro_batches == 1:
            total, count = totals(batch, weights)
        else:
            parts = lax.map(lambda part: totals(*part), _split(loss_fn, batch, weights, micro_batches))
            total, count = jax.tree.map(lambda x: x.sum(0), parts)
        total, count = context.all_reduce(ReduceOp.MEAN, (total, count))
        return total if count is None else total / jnp.where(count == 0, 1, count)

    return loss


def _with_reduced_gradient(context: ReplicaContext, params: Params) -> Params:
    """Returns `params`, whose gradients are averaged over the replicas in the backward pass."""
    leaves, treedef = jax.tree.flatten(params)
    indices = [i for i, leaf in enumerate(leaves) if jnp.issubdtype(jnp.asarray(leaf).dtype, jnp.inexact)]
    reduced = linear_call(
        lambda _, values: values,
        lambda _, grads: context.all_reduce(ReduceOp.MEAN, grads),
        (),
        [jnp.asarray(leaves[i]) for i in indices],
    )
    for i, value in zip(indices, reduced, strict=True):
        leaves[i] = value
    return treedef.unflatten(leaves)


def _checkpoint(remat: Remat) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Returns `jax.checkpoint` with the policy `remat`; the identity if `remat` is False.

    Raises:
        TypeError: `remat` is neither a boolean nor a function.
    """
    if not isinstance(remat, bool) and not callable(remat):
        raise TypeError(
            "`remat` must be a boolean or a policy of `jax.checkpoint_policies`, such as "
            f"`jax.checkpoint_policies.dots_with_no_batch_dims_saveable`, got {one_line(remat)}."
        )
    if not remat:
        return lambda fn: fn
    return functools.partial(jax.checkpoint, policy=None if remat is True else remat)


def _check_differentiable(params: PyTree) -> None:
    """Raises TypeError if a leaf of `params` is not a float."""
    for name, leaf in named_leaves("params", params):
        check_array(name, leaf)
        if not jnp.issubdtype(jax.dtypes.result_type(leaf), jnp.inexact):
            raise TypeError(
                f"{name} is {dtype_and_shape(leaf)}, and only parameters that are floats have a gradient. Store it in another "
                "part of the state, such as `model_state` of a `jdist.TrainState`, or close over it in the loss function."
            )


def _loss_of_params(
    loss_fn: Callable[..., Any], has_aux: bool, carried: tuple[()], params: PyTree, *batch: PyTree
) -> tuple[Any, Any]:
    """Returns losses and `(carried, aux)`, as `_split_module` defines, for a loss that is a function of its parameters."""
    losses, aux = _split_aux(loss_fn(params, *batch), has_aux)
    return losses, (carried, aux)


def _scaled_total(
    loss: Callable[..., Any], step_precision: precision.StepPrecision, parts: int, factor: Any = None
) -> Callable[..., Any]:
    """Returns a function from parameters, batch and weights to the scaled total, and `(total, count, is_masked, aux)`.

    Total and count are divided by the number of losses in all parts, so that the gradients do not overflow in float16. The
    total is multiplied by `factor`. The count is None without weights. `is_masked` is True if all weights that the loss
    returned are 0, and None if it returned none. `aux` ends with that number of losses.
    """
    dtypes = step_precision.precision

    def scaled_total(params: PyTree, batch: PyTree, weights: Any) -> tuple[jax.Array, tuple[Any, Any, Any, PyTree]]:
        params, batch = dtypes.cast_compute((params, batch)) if dtypes else (params, batch)
        losses, (carried, aux) = loss(params, *batch)
        is_masked = None
        if isinstance(losses, WeightedLosses):
            losses, weights = losses.losses, losses.weights
            is_masked = jnp.all(weights == 0)
        if dtypes:
            losses, aux = dtypes.cast_output((losses, aux))
        total, count = weighted_sums("losses", losses, weights)
        num_losses = max(jnp.size(losses), 1) * parts
        total = total / num_losses if factor is None else total / num_losses * factor
        scaled = total if step_precision.scale is None else total * step_precision.scale
        count = None if weights is None else jnp.float32(count / num_losses)
        return scaled, (total, count, is_masked, (carried, aux, _NumLosses(num_losses)))

    return scaled_total


def _differentiated(
    loss: Callable[..., Any],
    step_precision: precision.StepPrecision,
    parts: int,
    checkpointed: Callable[[Callable[..., Any]], Callable[..., Any]],
    factor: Any,
) -> Callable[..., Any]:
    """Returns a function from the arguments to `((total, count), grads of total, (carried, aux, number of losses))`."""

    def differentiate(carried: PyTree, params: PyTree, batch: PyTree, weights: Any) -> Any:
        scaled_total = checkpointed(_scaled_total(functools.partial(loss, carried), step_precision, parts, factor))
        (_, (total, count, is_masked, aux)), grads = jax.value_and_grad(scaled_total, has_aux=True)(
            params, batch, weights
        )
        if weights is not None and is_masked is None:
            is_masked = jnp.all(jnp.asarray(weights) == 0)
        if is_masked is not None:  # a model may compute NaN from padding alone
            grads = _zeros_if(is_masked, grads)
        return (total, count), grads, aux

    return differentiate


def _zeros_if(condition: jax.Array, grads: PyTree) -> PyTree:
    """Returns zeros if `condition`, else `grads`.

    XLA's CPU programs pass large gradients from a matrix product to a reduction without a copy, also through a `cond`; a
    `select` between them costs as much as half of the step. On other platforms a `cond` would wait for all gradients. A worker
    of parameter servers sends the looked-up rows of a gradient, and a `cond` would hide them (`jdist._src.jaxpr.table_rows`).
    """
    zeros = functools.partial(jax.tree.map, jnp.zeros_like)
    selected = lambda condition, grads: jax.tree.map(lambda g: jnp.where(condition, 0, g), grads)
    if require_replica_context("value_and_grad", "strategy.step").is_asynchronous:
        return selected(condition, grads)
    passed = lambda condition, grads: lax.cond(condition, zeros, lambda grads: grads, grads)
    guarded = lambda condition, grads: lax.platform_dependent(condition, grads, cpu=passed, default=selected)
    return named_call(guarded, GUARD_CALL)(condition, grads)


def _accumulated(differentiate: Callable[..., Any], carried: PyTree, params: PyTree, parts: PyTree) -> Any:
    """Returns the results of `differentiate`, accumulated over the parts; `aux` is stacked."""

    def add(carry: PyTree, part: PyTree) -> tuple[PyTree, PyTree]:
        sums, carried = carry
        totals, grads, (carried, *others) = differentiate(carried, params, *part)
        return (jax.tree.map(lambda s, x: s + x.astype(s.dtype), sums, (totals, grads)), carried), others

    shapes = jax.eval_shape(lambda part: differentiate(carried, params, *part)[:2], jax.tree.map(lambda x: x[0], parts))
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.promote_types(x.dtype, jnp.float32)), shapes)
    ((totals, grads), carried), others = lax.scan(add, (zeros, carried), parts)
    return totals, grads, (carried, *others)


def pad_to_parts(batch: PyTree, weights: Any, parts: int) -> tuple[PyTree, Any]:
    """Returns a batch `[batch, ...]` and its weights, with rows of weight 0 up to a multiple of `parts` rows.

    The rows repeat the first one. Unchanged if `parts` divides the rows, or if the leaves do not have the same number of rows.
    """
    parts = as_int("`micro_batches`", parts, 1)
    sizes = {jnp.shape(leaf)[:1] for leaf in jax.tree.leaves((batch, weights))}
    ((size,),) = sizes if len(sizes) == 1 and () not in sizes else {(0,)}
    missing = -size % parts
    if not missing:
        return batch, weights
    weights = jnp.ones(size, jnp.float32) if weights is None else jnp.asarray(weights)
    repeat = lambda x: jnp.concatenate([x, jnp.broadcast_to(x[:1], (missing, *x.shape[1:]))])
    zeros = jnp.zeros((missing, *weights.shape[1:]), weights.dtype)
    return jax.tree.map(repeat, batch), jnp.concatenate([weights, zeros])


def _split(loss_fn: Callable[..., Any], batch: tuple[PyTree, ...], weights: Any, parts: int) -> PyTree:
    """Returns `(batch, weights)` as `[micro_batch, batch / micro_batches, ...]`.

    Raises:
        ValueError: A leaf has no examples, or their number is not divisible by the number of micro-batches.
    """
    names = argument_names(loss_fn, (None, *batch), {})[1:]
    leaves = [leaf for name, tree in zip(names, batch, strict=True) for leaf in named_leaves(name, tree)]
    for name, leaf in [*leaves, *named_leaves("weights", weights)]:
        if not jnp.ndim(leaf) or jnp.shape(leaf)[0] % parts:
            examples = f"{jnp.shape(leaf)[0]} examples" if jnp.ndim(leaf) else "no examples"
            raise ValueError(
                f"{name} is {dtype_and_shape(leaf)}, with {examples}, and cannot be split into {parts} micro-batches. "
                "Use a divisor of "
                "the number of examples per replica, and let the loss function capture values that are not data."
            )
    return jax.tree.map(
        lambda x: jnp.reshape(x, (parts, jnp.shape(x)[0] // parts, *jnp.shape(x)[1:])), (batch, weights)
    )


def _split_module(
    loss_fn: Callable[..., Any], has_aux: bool, module: Any
) -> tuple[PyTree, PyTree, Callable[..., tuple[Any, Any]]]:
    """Returns the parameters of an nnx module, its other variables, and the loss as a function of both.

    An nnx module changes in place while it computes: batch norm updates statistics, dropout counts random numbers. These
    variables are carried from one micro-batch to the next. The function takes `(carried, params, *batch)`, and returns the
    losses and `(carried, aux)`.
    """
    from flax import nnx

    graph, params, carried = nnx.split(module, nnx.Param, ...)

    def loss(carried: PyTree, params: PyTree, *batch: PyTree) -> tuple[Any, Any]:
        merged = nnx.merge(graph, params, carried, copy=True)
        losses, aux = _split_aux(loss_fn(merged, *batch), has_aux)
        return losses, (nnx.state(merged, nnx.Not(nnx.Param)), aux)

    return params, carried, loss


def _update_module(module: Any, carried: PyTree) -> None:
    """Sets the variables of an nnx module that are not parameters."""
    from flax import nnx

    nnx.update(module, carried)


def _split_aux(result: Any, has_aux: bool) -> tuple[Any, Any]:
    """Returns the losses and the auxiliary values that a loss function returned.

    Raises:
        TypeError: The result is not a pair although `has_aux`, or the losses are not one array or number.
    """
    if has_aux and not (isinstance(result, tuple) and len(result) == 2):
        raise TypeError(
            f"With `has_aux` the loss function must return a pair `(losses, aux)`, and it returned {describe_tree(result)}."
        )
    losses, aux = result if has_aux else (result, None)
    if is_loss(losses) or isinstance(losses, WeightedLosses):
        return losses, aux
    hint = ""
    if isinstance(losses, (tuple, list)) and not has_aux:
        hint = " If it returns a loss and another value, return a pair, and pass `has_aux=True`."
    raise TypeError(
        f"The loss function returned {describe_tree(losses)}, and the losses must be one array or number.{hint}"
    )
