"""What a view is: how the program of one replica is traced and run over devices, and where the leaves of a state lie."""

import abc
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.sharding import NamedSharding

from jdist._src.core.tree import PyTree
from jdist._src.devices.mesh import Replicas
from jdist._src.values.base import DistributedValues, is_distributed
from jdist._src.values.per_replica import PerReplica


@dataclasses.dataclass(frozen=True)
class ReplicaFunction:
    """A replica function that is being traced.

    Attributes:
        fn: From what a device holds of the arguments to the results, as one replica gives them.
        items: The arguments: each a plain leaf, or a wrapper as a whole.
        num_state: How many of the first arguments, and of the first results, are the items of a state.
    """

    fn: Callable[..., list[PyTree]]
    items: Sequence[Any]
    num_state: int = 0

    @property
    def blocks(self) -> list[PyTree]:
        """The arguments without their wrappers, as the host sees them."""
        return [item.tree if is_distributed(item) else item for item in self.items]


@dataclasses.dataclass(frozen=True)
class ResultPlacements:
    """What is known of the results of a traced replica function.

    Attributes:
        trees: The results, for each the tree of its leaves.
        placements: For each the wrapper that it goes into, or None for what every replica has.
    """

    trees: Sequence[PyTree]
    placements: Sequence[type[DistributedValues] | None]

    def leave(self, values: Sequence[PyTree]) -> list[PyTree]:
        """From the results as one replica gives them to what a device holds."""
        pairs = zip(self.placements, values, strict=True)
        return [placement.leave(value) if placement else value for placement, value in pairs]

    def as_trees(self, leaves: Sequence[Any]) -> list[PyTree]:
        """So many leaves as the results that they make up."""
        left = iter(leaves)
        return [jax.tree.map(lambda _: next(left), tree) for tree in self.trees]


class Backend(abc.ABC):
    """How the program of one replica becomes a program over devices.

    Attributes:
        replicas: The replicas, and the devices that they lie on.
        home: Where a state lies between programs, if that is elsewhere: it is fetched before each, and stored after.
        scans: Whether one program may run several steps.
    """

    home: NamedSharding | None = None
    scans: bool = True

    def __init__(self, replicas: Replicas):
        self.replicas = replicas

    @abc.abstractmethod
    def trace(self, one: ReplicaFunction) -> Any:
        """The closed program of one replica, with the axes of the replicas in it."""

    @abc.abstractmethod
    def run(self, one: ReplicaFunction, program: Any, results: ResultPlacements) -> list[PyTree]:
        """The results as the host sees them."""

    def inputs(self, tree: PyTree) -> list[NamedSharding]:
        """How each leaf of an argument lies on the devices: plain ones whole on each, others as their wrapper says."""
        items = jax.tree.leaves(tree, is_leaf=is_distributed)
        return [self._of_leaf(item, leaf) for item in items for leaf in jax.tree.leaves(item)]

    def shardings(self, tree: PyTree, is_state: bool = True) -> list[NamedSharding]:
        """How each leaf of a state lies on the devices.

        Args:
            tree: A tree of arrays or of their shapes, some in wrappers.
            is_state: Whether it is known to be a whole state.
        """
        return self.inputs(tree)

    def reduced(self, state: PyTree) -> Callable[[PyTree], PyTree] | None:
        """What is done to what a step has all-reduced, or None: nothing."""
        return None

    def arranged(self, state: PyTree, outputs: PyTree) -> tuple[PyTree, PyTree]:
        """State and outputs of a program, brought to where they belong while it is traced."""
        return state, outputs

    def fetched(self, tree: PyTree) -> PyTree:
        """A tree with what lies elsewhere on the devices of the replicas, whole."""
        return tree

    def stored(self, state: PyTree) -> PyTree:
        """The state that a program returned, where it lies until the next."""
        return state

    def _of_leaf(self, item: Any, leaf: Any) -> NamedSharding:
        if not is_distributed(item) or item.agrees:
            return self.replicas.whole
        if isinstance(item, PerReplica):
            return self.replicas.batch(leaf.shape)
        return NamedSharding(self.replicas.mesh, item.spec(self.replicas.per_replica_axes))
