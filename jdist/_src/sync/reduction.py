"""Policies that reduce the gradients of all replicas at every step, exact up to rounding."""

import jax
import jax.numpy as jnp

from jdist._src.collectives import cross_device_ops
from jdist._src.collectives.cross_device_ops import HierarchicalAllReduce, num_replicas_along
from jdist._src.core.call_errors import explains_arguments
from jdist._src.core.tree import PyTree
from jdist._src.replica.context import ReplicaContext
from jdist._src.sync.policy import Policy, stateless_policy, synchronous_context
from jdist._src.values.reduce_op import ReduceOp


def mean() -> Policy:
    """Averages the gradients over the replicas: the result is the gradient of the global batch.

    Place it before the optimizer, and before clipping, which then receives the reduced gradient.

    Returns:
        A transformation of each replica's gradients `[...]` into their mean; replicated.

    Example:
        >>> strategy = jdist.MirroredStrategy(["cpu:0", "cpu:1"])
        >>> tx = optax.chain(jdist.sync.mean(), optax.sgd(0.5))
        >>> state = strategy.init(lambda: (w := jnp.float32(1), tx.init(w)))
        >>> @strategy.step
        ... def descend(state, x):
        ...     w, opt_state = state
        ...     grad = jax.grad(lambda w: w * x)(w)
        ...     updates, opt_state = tx.update(grad, opt_state, w)
        ...     return (optax.apply_updates(w, updates), opt_state), None
        >>> x = strategy.distribute_values_from_function(
        ...     lambda c: float(c.replica_id_in_sync_group)
        ... )
        >>> (w, _), _ = descend(state, x)
        >>> float(w)
        0.75
    """
    return stateless_policy("mean", lambda context, grads: context.all_reduce(ReduceOp.MEAN, grads))


def sum() -> Policy:  # noqa: A001  # `sync.sum`
    """Sums the gradients over the replicas, for a loss that is divided by the global batch size (`jdist.compute_average_loss`).

    Returns:
        A transformation of each replica's gradients `[...]` into their sum; replicated.

    Example:
        >>> tx = optax.chain(jdist.sync.sum(), optax.sgd(0.1))
    """
    return stateless_policy("sum", lambda context, grads: context.all_reduce(ReduceOp.SUM, grads))


@explains_arguments()
def hierarchical(inner_axis: str, outer_axis: str) -> Policy:
    """Averages the gradients in two levels: reduce-scatter within a group, all-reduce between groups, all-gather in the group.

    Over the slow network between groups, each replica sends only its part of the gradient. For a strategy whose replicas span
    two mesh axes, such as `MirroredStrategy(cross_device_ops=HierarchicalAllReduce(group_size))`. Outside any strategy it is
    the identity.

    Args:
        inner_axis: The mesh axis within a group.
        outer_axis: The mesh axis between groups.

    Returns:
        A transformation of each replica's gradients `[...]` into their mean; replicated.

    Raises:
        ValueError: When applied: the strategy's mesh does not have these two axes.

    Source:
        X. Jia et al., "Highly scalable deep learning training system with mixed-precision", arXiv:1807.11205.

    Example:
        >>> ops = jdist.HierarchicalAllReduce(group_size=2)
        >>> strategy = jdist.MirroredStrategy(jax.devices()[:4], cross_device_ops=ops)
        >>> tx = jdist.sync.hierarchical("replica", "group")
        >>> reduce = lambda: tx.update({"w": 1.0 * jdist.replica_id()}, tx.init(None))[0]
        >>> float(strategy.run(reduce)["w"])
        1.5
    """
    two_levels = HierarchicalAllReduce()

    def reduce(context: ReplicaContext, grads: PyTree) -> PyTree:
        if not context.axes:
            return grads
        axes = (outer_axis, inner_axis)
        if sorted(axes) != sorted(context.axes):
            raise ValueError(
                f"`jdist.sync.hierarchical({inner_axis!r}, {outer_axis!r})` needs a mesh whose replicas span these two axes, "
                f"but the mesh of this strategy has {', '.join(map(repr, context.axes))}. "
                "`MirroredStrategy(cross_device_ops=jdist.HierarchicalAllReduce(group_size))` creates the two axes 'replica' "
                "(inner) and 'group' (outer)."
            )
        leaves, treedef = jax.tree.flatten(grads)
        arrays = [jnp.asarray(leaf) for leaf in leaves]
        sums = cross_device_ops.all_reduce_packed(ReduceOp.SUM, arrays, axes, two_levels, context.communication_options)
        return treedef.unflatten([total / num_replicas_along(axes) for total in sums])

    return stateless_policy("hierarchical", reduce)


def exact() -> Policy:
    """Averages the gradients in an order of additions that does not depend on the number of devices: bitwise equal results.

    For a strategy with virtual replicas, `MirroredStrategy(..., virtual_replicas=V)`: the result is defined by V replicas, and
    the devices only decide the speed. Outside any strategy it is the identity.

    Returns:
        A transformation of each replica's gradients `[...]` into their mean; replicated.

    Raises:
        ValueError: When applied: the strategy does not have virtual replicas.

    Example:
        >>> tx = jdist.sync.exact()
        >>> third = lambda: tx.update(jdist.replica_id() / 3, tx.init(None))[0]
        >>> on_one = jdist.MirroredStrategy(["cpu:0"], virtual_replicas=8).run(third)
        >>> on_four = jdist.MirroredStrategy(jax.devices()[:4], virtual_replicas=8).run(third)
        >>> on_one.tobytes() == on_four.tobytes()
        True
    """

    def reduce(context: ReplicaContext, grads: PyTree) -> PyTree:
        synchronous_context("exact")
        if context.axes and not context.virtual:
            raise ValueError(
                "`jdist.sync.exact()` adds the gradients of a fixed number of virtual replicas, but this strategy does not "
                "have virtual replicas. Pass their number: `MirroredStrategy(..., "
                f"virtual_replicas={context.num_replicas_in_sync})`."
            )
        return context.all_reduce(ReduceOp.MEAN, grads)

    return stateless_policy("exact", reduce)
