"""The one transform: a function of one replica becomes a program over the mesh.

`replicated(body, ...)` runs while `jax.jit` traces around it, and does everything that jdist does to a function:

1. take the wrappers off the arguments;
2. trace `body` once, as the program of one replica (gradients are local until they are reduced);
3. prove which results are mirrored, and refuse a state that is not;
4. run that program on the devices, as the view of the strategy says, with the results in their placements.

What it leaves behind is the program that one would write by hand, so a call costs what a call of that costs.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax

from jdist._src.core import jax_compat
from jdist._src.core.errors import NotMirroredError
from jdist._src.core.tree import PyTree, argument_names, named_leaves
from jdist._src.execution.backend import Backend, ReplicaFunction, ResultPlacements
from jdist._src.jaxpr import clip_check, replication
from jdist._src.jaxpr.batch_check import warn_of_replicated_batch
from jdist._src.jaxpr.replication import Variation
from jdist._src.jaxpr.trace_errors import explain_trace_errors
from jdist._src.replica.context import ReplicaContext, enter_context
from jdist._src.values.arrays import check_value
from jdist._src.values.base import DistributedValues, is_distributed, named_values
from jdist._src.values.device_put import check_not_nested, check_uniform_shape, check_wrapper
from jdist._src.values.per_replica import PerReplica


@dataclasses.dataclass(frozen=True)
class Proof:
    """What tracing proved about the results of a replica function.

    Attributes:
        mirrored: The results that are the same on every replica, whatever the inputs: their names.
        per_replica: The results of which each replica has its own.
    """

    mirrored: tuple[str, ...]
    per_replica: tuple[str, ...]

    def __str__(self) -> str:
        total = len(self.mirrored) + len(self.per_replica)
        others = f"; one value a replica: {', '.join(self.per_replica)}" if self.per_replica else ""
        return f"{len(self.mirrored)} of {total} results are the same on every replica{others}"


class Traced(NamedTuple):
    """A replica function that was traced and analyzed.

    Attributes:
        pair: The state and the outputs, as the host sees them.
        proof: Which of them are replicated.
        program: The closed jaxpr of one replica.
    """

    pair: tuple[PyTree, PyTree]
    proof: Proof
    program: Any


class Call(NamedTuple):
    """A function and what it is called with, as its author names it.

    Attributes:
        fn: The user's function.
        args: Its positional arguments, wrappers and all.
        kwargs: Its arguments by name.
    """

    fn: Callable[..., Any]
    args: Sequence[PyTree]
    kwargs: Mapping[str, PyTree]

    def item_names(self) -> list[str]:
        """The name of each item of the arguments: a leaf, or a wrapper as a whole."""
        return [name for root, value in self._named() for name in _names_of_items(root, value)]

    def leaves(self) -> list[tuple[str, Any]]:
        """Every leaf of the arguments with its name."""
        return [leaf for root, value in self._named() for leaf in named_values(root, value)]

    def _named(self) -> list[tuple[str, PyTree]]:
        values = [*self.args, *self.kwargs.values()]
        return list(zip(argument_names(self.fn, self.args, self.kwargs), values, strict=True))


def replicate(
    call: Call,
    body: Callable[..., tuple[PyTree, PyTree]],
    view: Backend,
    context: ReplicaContext,
    has_state: bool = False,
) -> Traced:
    """Runs `body` once a replica, on the arguments of `call` as one replica sees them.

    Args:
        call: Where the arguments and their names come from.
        body: Called like `call.fn`; returns a pair. What is plain in its first part, the state, has to be mirrored.
        view: How its program runs on the devices.
        context: What each replica knows of the others.
        has_state: Whether the first argument is a state, which the new one replaces.

    Returns:
        The pair, its proof and the traced program. In the second part, a value that is not proved replicated is `PerReplica`.

    Raises:
        NotMirroredError: A leaf of the state is not proved mirrored.
        ValueError: A wrapper among the arguments does not fit the replicas.
    """
    items, treedef = jax.tree.flatten((tuple(call.args), dict(call.kwargs)), is_leaf=is_distributed)
    names = call.item_names()
    for item, name in zip(items, names, strict=True):
        check_wrapper(name, item, view.replicas)
        check_uniform_shape(name, item)
    taken_apart = _Results()
    if has_state:
        context = dataclasses.replace(context, reduced=view.reduced(call.args[0]))

    @jax.jit
    def one_replica(*given: PyTree) -> list[PyTree]:
        args, kwargs = treedef.unflatten(given)
        with enter_context(context):
            return taken_apart.of(body(*args, **kwargs))

    def enter_and_run(*blocks: PyTree) -> list[PyTree]:
        pairs = zip(items, blocks, strict=True)
        return one_replica(*(item.enter(block) if is_distributed(item) else block for item, block in pairs))

    num_state = len(jax.tree.leaves(call.args[0], is_leaf=is_distributed)) if has_state else 0
    one = ReplicaFunction(enter_and_run, items, num_state)
    with explain_trace_errors(names, view.replicas.mesh):
        traced = view.trace(one)
    program = jax_compat.open_jaxpr(traced)
    inputs = _inputs(items, names, context.axes)
    known = replication.prove(program, inputs, context.axes)
    clip_check.warn_of_clipped_gradients(program)
    if has_state:
        num_state_leaves = len(jax.tree.leaves(call.args[0]))
        warn_of_replicated_batch(program, inputs, num_state_leaves, context.axes, context.num_replicas_in_sync)
    placements = taken_apart.place(known)
    values = view.run(one, traced, ResultPlacements(taken_apart.trees(), placements))
    pair = taken_apart.put_together(placements, values)
    return Traced(view.arranged(*pair), taken_apart.proof(placements), traced)


class _Results:
    """What one replica returned: noted while it is traced, read when its results are placed on the mesh."""

    def __init__(self) -> None:
        self._items: list[Any] = []  # wrappers as returned; None for a plain leaf
        self._names: list[str] = []
        self._num_state = 0
        self._treedef: Any = None

    def of(self, pair: tuple[PyTree, PyTree]) -> list[PyTree]:
        items, self._treedef = jax.tree.flatten(pair, is_leaf=is_distributed)
        self._items = [item if is_distributed(item) else None for item in items]
        state, output = pair
        self._names = [*_names_of_items("state", state), *_names_of_items("output", output)]
        self._num_state = len(jax.tree.leaves(state, is_leaf=is_distributed))
        for item, name in zip(items, self._names, strict=True):
            check_not_nested(name, item)
            for leaf_name, leaf in named_values(name, item):
                check_value(leaf_name, leaf)
        return [item.tree if is_distributed(item) else item for item in items]

    def place(self, known: list[Variation]) -> list[type[DistributedValues] | None]:
        """How each result lies on the mesh: in its wrapper; else whole where it is proved mirrored."""
        left = iter(known)
        placements: list[type[DistributedValues] | None] = []
        refused: list[tuple[str, Variation]] = []
        for number, (item, name) in enumerate(zip(self._items, self._names, strict=True)):
            found = [next(left) for _ in jax.tree.leaves(item.tree)] if item is not None else [next(left)]
            differs = next(filter(None, found), None)
            placements.append(type(item) if item is not None else PerReplica if differs else None)
            if differs and (item.agrees if item is not None else number < self._num_state):
                refused.append((name, differs))
        if refused:
            raise NotMirroredError(_refusal(refused, self._num_state))
        return placements

    def trees(self) -> list[PyTree]:
        """Each result as a tree of its leaves."""
        return [0 if item is None else item.tree for item in self._items]

    def put_together(self, placements: Sequence[Any], values: Sequence[PyTree]) -> tuple[PyTree, PyTree]:
        wrapped = [
            item._with_tree(value) if item is not None else placement(value) if placement else value
            for item, placement, value in zip(self._items, placements, values, strict=True)
        ]
        return self._treedef.unflatten(wrapped)

    def proof(self, placements: Sequence[Any]) -> Proof:
        pairs = list(zip(self._names, placements, strict=True))
        return Proof(
            mirrored=tuple(name for name, placement in pairs if placement is None or placement.agrees),
            per_replica=tuple(name for name, placement in pairs if placement and not placement.agrees),
        )


def _refusal(refused: Sequence[tuple[str, Variation]], num_state: int) -> str:
    (name, knowledge), *others = refused
    cause = min(knowledge.values(), key=lambda cause: cause.depth)
    more = ", ".join(other for other, _ in others[:3]) + (", ..." if len(others) > 3 else "")
    also = f" (and so are {len(others)} more of {num_state}: {more})" if others else ""
    return (
        f"{name} is not proved to be the same on every replica{also}.\n"
        f"  It may differ because of\n    {replication.explain_cause(cause)}\n"
        f"  {replication.fix_for(cause)}\n"
        "  If each replica is meant to keep its own, wrap it where the state is made: `jdist.PerReplica(x)`; if its writes "
        "are meant to agree by themselves, `jdist.Mirrored(x, aggregation)`. What a policy of `jdist.sync` keeps is placed by "
        "`strategy.init`, if the state is made there."
    )


def _names_of_items(root: str, tree: PyTree) -> list[str]:
    items, _ = jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_distributed)
    return [root + jax.tree_util.keystr(path) for path, _ in items]


def _inputs(placed: Sequence[Any], names: Sequence[str], axes: tuple[str, ...]) -> list[replication.Input]:
    inputs: list[replication.Input] = []
    for item, name in zip(placed, names, strict=True):
        if is_distributed(item):
            differing = () if item.agrees else axes
            inputs += [replication.Input(leaf_name, differing) for leaf_name, _ in named_leaves(name, item.tree)]
        else:
            inputs.append(replication.Input(name, ()))
    return inputs
