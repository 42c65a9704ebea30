"""The facts of a traced program: the call of the user's function, the results, and their proof."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax

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
    """What is proved of the results of a replica function: which are replicated, and which are those of one device.

    Attributes:
        replicated: The names of the results that are the same on every replica, for all inputs.
        per_replica: The names of the results that have one value per replica.
        equivalence: For each result of a step by name, whether it is what one device computes from the whole batch. Empty for
            one replica, for asynchronous workers, and with `equivalence="ignore"`.
    """

    replicated: tuple[str, ...]
    per_replica: tuple[str, ...]
    equivalence: Mapping[str, Verdict] = dataclasses.field(default_factory=dict)

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
        """The names of the results of which the analysis does not know whether one device computes them."""
        return self._with_verdict("unknown")

    def _with_verdict(self, verdict: str) -> tuple[str, ...]:
        return tuple(name for name, one in self.equivalence.items() if one.name == verdict)

    def __str__(self) -> str:
        total = len(self.replicated) + len(self.per_replica)
        others = f"; one value per replica: {', '.join(self.per_replica)}" if self.per_replica else ""
        text = f"{len(self.replicated)} of {total} results are replicated{others}"
        if not self.equivalence:
            return text
        text += f"\n{len(self.equivalent)} of {total} results are what one device computes from the whole batch"
        for kind, names in (("not", self.not_equivalent), ("unknown", self.unknown)):
            more = f" and {len(names) - 3:,} more" if len(names) > 3 else ""
            text += f"; {kind}: {', '.join(names[:3])}{more}" if names else ""
        return text


class Traced(NamedTuple):
    """A replica function that was traced and analyzed.

    Attributes:
        pair: The global values of `(state, outputs)`.
        proof: Which of them are replicated.
        jaxpr: The closed jaxpr of one replica.
        num_steps: The number of steps that it takes, if the function is a step.
    """

    pair: Results
    proof: Proof
    jaxpr: Any
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
