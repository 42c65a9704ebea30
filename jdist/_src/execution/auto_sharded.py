"""`WholeView`: the devices together are one replica, which sees the global batch, and the compiler splits its work.

The function is traced with an axis `"replica"` of size one, as the others are with theirs, so that the same is proved of it.
Then its collectives are taken out, for there is no other replica (`jdist._src.jaxpr.single_replica`): what is left is the program of one device.
Where its arguments, its state and its results lie is written to it, and XLA splits it, and puts in the collectives that are
needed for it.
"""

from collections.abc import Callable
from typing import Any, final

import jax
from jax import lax
from jax.sharding import NamedSharding

from jdist._src.core import jax_compat
from jdist._src.core.tree import PyTree
from jdist._src.devices.mesh import REPLICA_AXIS, Replicas
from jdist._src.execution.backend import Backend, ReplicaFunction, ResultPlacements
from jdist._src.jaxpr.single_replica import eliminate_collectives
from jdist._src.values.base import is_distributed
from jdist._src.values.per_replica import PerReplica
from jdist._src.values.state_sharding import StateSharding


@final
class AutoShardedBackend(Backend):
    """One replica over all devices.

    Args:
        replicas: The one replica.
        layout: How a state lies on its devices.
    """

    def __init__(self, replicas: Replicas, layout: StateSharding):
        super().__init__(replicas)
        self.layout = layout

    def trace(self, one: ReplicaFunction) -> Any:
        """See `View.trace`."""
        sizes = [(REPLICA_AXIS, 1)]
        return jax_compat.lower_hi_primitives(jax.make_jaxpr(one.fn, axis_env=sizes)(*one.blocks), sizes)

    def run(self, one: ReplicaFunction, program: Any, results: ResultPlacements) -> list[PyTree]:
        """See `View.run`."""
        blocks = [*one.blocks[: one.num_state], *map(self._split_batch, one.items[one.num_state :])]
        return results.leave(results.as_trees(eliminate_collectives(program, REPLICA_AXIS, jax.tree.leaves(blocks))))

    def shardings(self, tree: PyTree, is_state: bool = True) -> list[NamedSharding]:
        """See `View.shardings`."""
        items = jax.tree.leaves(tree, is_leaf=is_distributed)
        is_batch = [isinstance(item, PerReplica) for item in items for _ in jax.tree.leaves(item)]
        rules = zip(is_batch, self.inputs(tree), self.layout.shardings(tree, is_state), strict=True)
        return [batch if per_replica else split for per_replica, batch, split in rules]

    def reduced(self, state: PyTree) -> Callable[[PyTree], PyTree] | None:
        """See `View.reduced`."""
        return self.layout.reduced(state)

    def arranged(self, state: PyTree, outputs: PyTree) -> tuple[PyTree, PyTree]:
        """See `View.arranged`."""
        is_state = bool(jax.tree.leaves(state))
        return constrain_shardings(state, self.shardings(state, is_state)), constrain_shardings(
            outputs, self.inputs(outputs)
        )

    def _split_batch(self, item: Any) -> PyTree:
        if isinstance(item, PerReplica):
            return constrain_shardings(item, self.inputs(item))
        return getattr(item, "tree", item)


def constrain_shardings(tree: PyTree, shardings: list[NamedSharding]) -> PyTree:
    """`tree` with each leaf where its sharding says, in a program that is being traced."""
    leaves, treedef = jax.tree.flatten(tree)
    return treedef.unflatten(map(lax.with_sharding_constraint, leaves, shardings))
