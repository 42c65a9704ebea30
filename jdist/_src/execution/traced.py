"""The facts of a traced program: the call of the user's function, the results, and their proof."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
from jax.tree_util import PyTreeDef

from jdist._src.core import jax_compat
from jdist._src.core.nn_modules import leaves_with_path
from jdist._src.core.tree import PyTree, argument_names
from jdist._src.jaxpr.equivalence_verdict import Verdict
from jdist._src.values.base import is_distributed, named_values

Arguments = tuple[PyTree, ...]
Results = tuple[PyTree, PyTree]  # (state, outputs)
ReplicaFn = Callable[..., Results]  # from the values of one replica, without wrappers
CallFn = Callable[[Arguments], Results]
LowerFn = Callable[[Arguments], jax.stages.Lowered]


@dataclasses.dataclass(frozen=True)
class Proof:
    """The proof of a replica function: which results are replicated, and which equal the results of one device.

    Attributes:
        replicated: The names of the results that are the same on every replica, for all inputs.
        per_replica: The names of the results that have one value per replica.
    """

    replicated: tuple[str, ...]
    per_replica: tuple[str, ...]
    _comparison: Callable[[], Mapping[str, Verdict]] = dataclasses.field(default=dict, repr=False, compare=False)

    @property
    def equivalence(self) -> Mapping[str, Verdict]:
        """For each result of a step by name, whether it is what one device computes from the global batch.

        Empty for one replica, for asynchronous workers, and with `equivalence="ignore"`. A step that is traced and not
        compiled is compared with one device when this is read.
        """
        return self._comparison()

    @property
    def equivalent(self) -> tuple[str, ...]:
        """The names of the results that are what one device computes, for all inputs of these shapes, up to rounding."""
        return self._with_verdict("equivalent")

    @property
    def not_equivalent(self) -> tuple[str, ...]:
        """The names of the results that are not what one device computes."""
        return self._with_verdict("not equivalent")

    @property
    def unknown(self) -> tuple[str, ...]:
        """The names of the results for which the analysis cannot decide whether one device computes them."""
        return self._with_verdict("unknown")

    def _with_verdict(self, verdict: str) -> tuple[str, ...]:
        return tuple(name for name, one in self.equivalence.items() if one.name == verdict)

    def __str__(self) -> str:
        total = len(self.replicated) + len(self.per_replica)
        others = f"; one value per replica: {', '.join(self.per_replica)}" if self.per_replica else ""
        text = f"{len(self.replicated)} of {total} results are replicated{others}"
        if not self.equivalence:
            return text
        text += f"\n{len(self.equivalent)} of {total} results are what one device computes from the global batch"
        for kind, names in (("not", self.not_equivalent), ("unknown", self.unknown)):
            more = f" and {len(names) - 3:,} more" if len(names) > 3 else ""
            text += f"; {kind}: {', '.join(names[:3])}{more}" if names else ""
        return text


@dataclasses.dataclass(frozen=True)
class ReplicaResults:
    """The results of a traced replica function: `(state, outputs)`, flattened to items.

    Attributes:
        items: Each result: the wrapper that the function returned, or None for a plain leaf.
        names: The name of each result in messages.
        num_state: The number of leading items that are the new state.
        treedef: The structure of `(state, outputs)`.
        wrappers: The wrapper class that each result is placed in, None if it is replicated. Empty until the proof is done.
    """

    items: Sequence[Any]
    names: Sequence[str]
    num_state: int
    treedef: PyTreeDef
    wrappers: Sequence[Any] = ()

    @property
    def is_varying(self) -> list[bool]:
        """Whether each result has one value per replica."""
        return [wrapper is not None and not wrapper._is_replicated for wrapper in self.wrappers]

    @property
    def trees(self) -> list[PyTree]:
        """Each result as the tree of its leaves."""
        return [0 if item is None else item.tree for item in self.items]

    def as_trees(self, leaves: Sequence[Any]) -> list[PyTree]:
        """Returns the leaves of all results, grouped into one tree per result."""
        remaining = iter(leaves)
        return [jax.tree.map(lambda _: next(remaining), tree) for tree in self.trees]

    def to_blocks(self, values: Sequence[PyTree]) -> list[PyTree]:
        """Returns the block of each result that one device stores, from the results of one replica."""
        pairs = zip(self.wrappers, values, strict=True)
        return [wrapper._to_block(value) if wrapper else value for wrapper, value in pairs]

    def evaluator(self, program: Any, evaluate: Callable[..., list[Any]] | None = None) -> Callable[..., list[PyTree]]:
        """Returns a function that runs the jaxpr of one replica, from blocks of arguments to blocks of results.

        Args:
            program: The closed jaxpr.
            evaluate: Runs it; by default as it is.
        """
        evaluate = evaluate or jax_compat.jaxpr_function(program)
        return lambda *blocks: self.to_blocks(self.as_trees(evaluate(*jax.tree.leaves(blocks))))

    def as_pair(self, values: Sequence[PyTree]) -> tuple[PyTree, PyTree]:
        """Returns `(state, outputs)` with the global value of each result in its wrapper."""
        wrapped = [
            item._with_tree(value) if item is not None else wrapper(value) if wrapper else value  # pyright: ignore[reportCallIssue]
            for item, wrapper, value in zip(self.items, self.wrappers, values, strict=True)
        ]
        return self.treedef.unflatten(wrapped)


class Traced(NamedTuple):
    """A replica function that was traced and analyzed.

    Attributes:
        pair: The global values of `(state, outputs)`.
        proof: Which of them are replicated.
        jaxpr: The closed jaxpr of one replica.
        results: The results of one replica.
        retrace: Returns the closed jaxpr of another call of the same function, for the replicas of a program.
        num_steps: The number of steps that it takes, if the function is a step.
    """

    pair: Results
    proof: Proof
    jaxpr: Any
    results: ReplicaResults
    retrace: Callable[["UserCall", Any], Any]
    num_steps: int = 1


TraceFn = Callable[[Arguments], Traced]


class UserCall(NamedTuple):
    """A call of the user's function.

    Attributes:
        fn: The function.
        args: Its positional arguments, with wrappers.
        kwargs: Its keyword arguments.
    """

    fn: Callable[..., Any]
    args: Sequence[PyTree]
    kwargs: Mapping[str, PyTree]

    def item_names(self) -> list[str]:
        """Returns the name of each item of the arguments. An item is a plain leaf or a complete wrapper."""
        return [name for root, value in self.named_arguments() for name in item_names(root, value)]

    def leaves(self) -> list[tuple[str, Any]]:
        """Returns the name and the value of each leaf of the arguments."""
        return [leaf for root, value in self.named_arguments() for leaf in named_values(root, value)]

    def with_arguments(self, args: Sequence[PyTree], kwargs: Mapping[str, PyTree]) -> "UserCall":
        """Returns a call of the same function with other values of its arguments."""
        return UserCall(self.fn, args, kwargs)

    def named_arguments(self) -> list[tuple[str, PyTree]]:
        """Returns the name and the value of each argument."""
        values = [*self.args, *self.kwargs.values()]
        return list(zip(argument_names(self.fn, self.args, self.kwargs), values, strict=True))


def item_names(root: str, tree: PyTree) -> list[str]:
    """Returns the name of each item of a tree. An item is a plain leaf or a complete wrapper."""
    return [root + jax.tree_util.keystr(path) for path, _ in leaves_with_path(tree, is_leaf=is_distributed)]
