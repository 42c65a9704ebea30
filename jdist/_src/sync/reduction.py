"""Policies that make one gradient of all replicas' at every step, and lose nothing but rounding."""

import jax
import jax.numpy as jnp

from jdist._src.collectives import cross_device_ops
from jdist._src.collectives.cross_device_ops import HierarchicalAllReduce, num_replicas
from jdist._src.core.tree import PyTree
from jdist._src.replica.context import ReplicaContext
from jdist._src.sync.policy import Policy, stateless_policy
from jdist._src.values.reduce_op import ReduceOp


def mean() -> Policy:
    """The mean over the replicas: what one device would compute of the whole batch.

    Put it ahead of the optimizer, and of clipping, so that this looks at the whole gradient.

    Returns:
        A transformation of each replica's gradients `[...]` into their mean; mirrored.

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
        >>> x = strategy.distribute_values_from_function(lambda c: float(c.replica_id_in_sync_group))
        >>> (w, _), _ = descend(state, x)
        >>> float(w)
        0.75
    """
    return stateless_policy("mean", lambda context, grads: context.all_reduce(ReduceOp.MEAN, grads))


def sum() -> Policy:  # noqa: A001  # `sync.sum`
    """The sum over the replicas, for losses that are divided by the global batch already (`jdist.compute_average_loss`).

    Returns:
        A transformation of each replica's gradients `[...]` into their sum; mirrored.

    Example:
        >>> tx = optax.chain(jdist.sync.sum(), optax.sgd(0.1))
    """
    return stateless_policy("sum", lambda context, grads: context.all_reduce(ReduceOp.SUM, grads))


def hierarchical(inner_axis: str, outer_axis: str) -> Policy:
    """The mean in two levels: reduce-scatter in a group, all-reduce between groups, all-gather in the group.

    Between groups, where the network is slow, each replica sends one part only. For a strategy whose replicas lie along two
    axes, as `MirroredStrategy(cross_device_ops=HierarchicalAllReduce(group_size))` has them. Outside any strategy it is the
    identity.

    Args:
        inner_axis: The mesh axis within a group.
        outer_axis: The mesh axis between groups.

    Returns:
        A transformation of each replica's gradients `[...]` into their mean; mirrored.

    Raises:
        ValueError: When applied: the strategy's mesh has not these two axes.

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
    ways = HierarchicalAllReduce()

    def reduce(context: ReplicaContext, grads: PyTree) -> PyTree:
        if not context.axes:
            return grads
        axes = (outer_axis, inner_axis)
        if sorted(axes) != sorted(context.axes):
            raise ValueError(
                f"`jdist.sync.hierarchical({inner_axis!r}, {outer_axis!r})` needs replicas along these two axes, and this "
                f"strategy has them along {', '.join(map(repr, context.axes))}. Two axes, 'replica' within 'group', come from "
                "`MirroredStrategy(cross_device_ops=jdist.HierarchicalAllReduce(group_size))`."
            )
        leaves, treedef = jax.tree.flatten(grads)
        arrays = [jnp.asarray(leaf) for leaf in leaves]
        sums = cross_device_ops.all_reduce_packed(ReduceOp.SUM, arrays, axes, ways, context.communication_options)
        return treedef.unflatten([total / num_replicas(axes) for total in sums])

    return stateless_policy("hierarchical", reduce)


def exact() -> Policy:
    """The mean, added up in one order whatever the number of devices: bit-equal results.

    For a strategy with virtual replicas, `MirroredStrategy(..., virtual_replicas=V)`: the mathematics is that of V replicas,
    and the devices only decide how fast it is done. Outside any strategy it is the identity.

    Returns:
        A transformation of each replica's gradients `[...]` into their mean; mirrored.

    Raises:
        ValueError: When applied: the strategy has no virtual replicas.

    Example:
        >>> tx = jdist.sync.exact()
        >>> third = lambda: tx.update(jdist.replica_id() / 3, tx.init(None))[0]
        >>> on_one = jdist.MirroredStrategy(["cpu:0"], virtual_replicas=8).run(third)
        >>> on_four = jdist.MirroredStrategy(jax.devices()[:4], virtual_replicas=8).run(third)
        >>> on_one.tobytes() == on_four.tobytes()
        True
    """

    def reduce(context: ReplicaContext, grads: PyTree) -> PyTree:
        if context.axes and not context.virtual:
            raise ValueError(
                "`jdist.sync.exact()` adds up the gradients of a fixed number of virtual replicas, and this strategy has none. "
                f"Say how many: `MirroredStrategy(..., virtual_replicas={context.num_replicas_in_sync})`."
            )
        return context.all_reduce(ReduceOp.MEAN, grads)

    return stateless_policy("exact", reduce)
