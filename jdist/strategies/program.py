"""Programs: replica functions compiled for a mesh, and how they are called.

A call of a program is a call of `jax.jit`. Around it, a failure that JAX reports in terms of buffers and devices is said
again in terms of the caller's values, and on the CPU the call is waited for (`jdist.flight`).
"""

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import jax
from jax.sharding import Sharding

from jdist import _compat, notes, precision
from jdist._arguments import whole
from jdist._tree import PyTree, named_leaves, spec
from jdist.context import ReplicaContext, in_replica_function
from jdist.flight import is_bounded, land
from jdist.precision import Precision
from jdist.replicate import Call, Proof, replicated
from jdist.state import in_wrappers, kept_in_place, settled, split_result
from jdist.strategies.turns import each_turn, in_turn, scanned
from jdist.values.arrays import check_array, is_placed
from jdist.values.place import check_place, check_there
from jdist.views.base import View

Traced: TypeAlias = tuple[tuple[PyTree, PyTree], Proof]  # state and outputs, and what was proved of them

_IS_DELETED = operator.methodcaller("is_deleted")


class Program:
    """A replica function compiled for the devices of a strategy.

    Mutable: JAX's cache of compiled programs is inside, and the proof of the last one that was traced.

    Args:
        call: From the arguments of the program to the call of the user's function that they make.
        trace: What `jax.jit` traces of it: gives the pair `(state, outputs)` and its proof.
        name: What profiles call it.
        view: How it runs on the devices.
        donates: Whether the first argument is a state, whose memory the new state takes over.
        turns: How often one call runs it, each time on the next of so many inputs; None for once on its inputs.
    """

    def __init__(
        self,
        call: Callable[..., Call],
        trace: Callable[[Call], Traced],
        name: str,
        view: View,
        donates: bool = False,
        turns: int | None = None,
    ):
        proofs: list[Proof] = []

        def traced(*args: PyTree) -> tuple[PyTree, PyTree]:
            pair, proof = trace(call(*args))
            proofs[:] = [proof]
            return pair

        traced.__name__ = name
        self._proofs = proofs
        self._call_of = call
        self.view = view
        self._donates = donates
        self._turns = turns
        self._compiled = jax.jit(traced, donate_argnums=(0,) if donates else ())
        self._launch = self._launch_and_land if is_bounded(view.replicas.mesh) else self._compiled
        if view.home is not None:
            self._launch = functools.partial(self._fetch_and_store, self._launch)
        if turns is not None:
            self._launch = functools.partial(in_turn, self._launch, turns)

    def __call__(self, *args: PyTree) -> tuple[PyTree, PyTree]:
        """`(state, outputs)` of the replica function, as the host sees them."""
        if in_replica_function():
            raise RuntimeError(
                "A strategy runs a function inside a function that a strategy is already running. Call the inner one "
                "directly: in a replica function the values are one replica's plain arrays."
            )
        try:
            return self._launch(*args)
        except (ValueError, RuntimeError, AttributeError):
            check_there(self.view.replicas.mesh)
            self._check_arguments(args)
            raise

    def lower(self, *args: PyTree) -> jax.stages.Lowered:
        """The program for arguments of these shapes, to be compiled and looked at: `lower(...).compile().as_text()`."""
        if self._turns is not None:
            args = (args[0], *each_turn(args[1:], self._turns)[0])
        state, inputs = args[: self._donates], args[self._donates :]
        where = self.view.shardings if self.view.home is None else self.view.inputs
        shardings = where(state[0]) if self._donates else []
        return self._compiled.lower(*_shapes(args, [*shardings, *self.view.inputs(inputs)]))

    @property
    def proof(self) -> Proof:
        """What was proved when the function was traced last.

        Raises:
            RuntimeError: It was not called yet.
        """
        if not self._proofs:
            raise RuntimeError("Nothing is proved yet: a step is traced when it is called for the first time.")
        return self._proofs[0]

    def _launch_and_land(self, *args: PyTree) -> tuple[PyTree, PyTree]:
        if self._donates and _compat.CRASHES_ON_DONATED_MEMORY:
            self._check_memory(args)
        pair = self._compiled(*args)
        land(pair)
        return pair

    def _fetch_and_store(self, launch: Callable[..., tuple[PyTree, PyTree]], *args: PyTree) -> tuple[PyTree, PyTree]:
        if self._donates:
            self._check_memory(args)
        state, outputs = launch(*self.view.fetched(args))
        for leaf in jax.tree.leaves(args[: self._donates]):
            if is_placed(leaf) and not leaf.is_deleted():
                leaf.delete()
        return self.view.stored(state), outputs

    def _check_memory(self, args: tuple[PyTree, ...]) -> None:
        """Raises ValueError if the memory of the state was given away before, or would be given away twice."""
        leaves = jax.tree.leaves(args)
        try:
            fresh = len(set(map(id, leaves))) == len(leaves) and not any(map(_IS_DELETED, leaves))
        except (AttributeError, jax.errors.ConcretizationTypeError):  # some are numbers, or tracers
            fresh = False
        if not fresh:
            _check_state(args[0], args[1:])

    def _check_arguments(self, args: tuple[PyTree, ...]) -> None:
        """Raises ValueError if what went wrong is that an array is spent, or lies on other devices."""
        if self._donates and args:
            _check_state(args[0], args[1:])
        for name, leaf in self._call_of(*args).leaves():
            if is_placed(leaf) and leaf.is_deleted():
                raise ValueError(
                    f"{name} is {spec(leaf)} no longer: its memory was given to a step, or freed by `delete`."
                )
            if is_placed(leaf) and leaf.committed and leaf.sharding != self.view.home:
                check_place(name, leaf, self.view.replicas.mesh)


def _shapes(args: tuple[PyTree, ...], shardings: Sequence[Sharding]) -> tuple[PyTree, ...]:
    leaves, treedef = jax.tree.flatten(args)
    for name, leaf in named_leaves("args", args):
        if not isinstance(leaf, jax.ShapeDtypeStruct):
            check_array(name, leaf)
    avals = [x if isinstance(x, jax.ShapeDtypeStruct) else jax.typeof(x) for x in leaves]
    pairs = zip(avals, shardings, strict=True)
    return treedef.unflatten([jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding) for x, sharding in pairs])


def _check_state(state: PyTree, inputs: tuple[PyTree, ...]) -> None:
    names: dict[int, str] = {}
    placed = [(name, leaf) for name, leaf in named_leaves("state", state) if is_placed(leaf)]
    # First: when it is found out that memory was given away twice, it may be gone.
    for name, leaf in placed:
        if id(leaf) in names:
            raise ValueError(f"{name} is the same array as {names[id(leaf)]}, and {_GIVEN_ONCE}")
        names[id(leaf)] = name
    for name, leaf in named_leaves("inputs", inputs):
        if id(leaf) in names:
            raise ValueError(f"{names[id(leaf)]} is also among the inputs, as {name}, and {_GIVEN_ONCE}")
    for name, leaf in placed:
        if leaf.is_deleted():
            raise ValueError(
                f"{name} was given to a step before, which used its memory for the new state. Go on with the state that "
                "the step returned: `state, outputs = step(state, batch)`."
            )


_GIVEN_ONCE = (
    "a step takes over the memory of each leaf of its state. Give this one memory of its own: `jnp.copy(x)`, or build the "
    "state with `strategy.init` or `strategy.put`."
)


def run_program(fn: Callable[[], Callable[..., PyTree]], view: View, context: ReplicaContext) -> Program:
    """What `Strategy.run` calls: from positional and named arguments to the outputs of `fn()`, which it does not keep alive."""
    _require_function(fn())

    def trace(call: Call) -> Traced:
        return replicated(call, lambda *args, **kwargs: ((), call.fn(*args, **kwargs)), view, context)

    return Program(lambda args, kwargs: Call(fn(), args, kwargs), trace, _name(fn()), view)


def init_program(fn: Callable[[], Callable[..., PyTree]], view: View, context: ReplicaContext) -> Program:
    """What `Strategy.init` calls: from its arguments to the state that `fn()` makes."""
    _require_function(fn())

    def trace(call: Call) -> Traced:
        def body(*args: PyTree) -> tuple[PyTree, PyTree]:
            with notes.partials() as partials:
                state = call.fn(*args)
            return settled(notes.placed(state, partials)), ()

        return replicated(call, body, view, context)

    return Program(lambda *args: Call(fn(), args, {}), trace, _name(fn()), view)


def step_program(
    fn: Callable[..., tuple[PyTree, PyTree]],
    dtypes: Precision | None,
    steps_per_call: int | None,
    view: View,
    context: ReplicaContext,
) -> Program:
    """What `Strategy.step` returns: from state and inputs to new state and outputs."""
    _require_function(fn)
    if not isinstance(dtypes, Precision | None):
        raise TypeError(f"`precision` is a `jdist.Precision(params, compute, output)`, got {dtypes!r}.")
    if steps_per_call is not None:
        steps_per_call = whole("`steps_per_call`", steps_per_call, 1)
    scans = steps_per_call if view.scans else None

    def trace(call: Call) -> Traced:
        placed = call.args[0]

        def one(before: PyTree, *inputs: PyTree) -> tuple[PyTree, PyTree]:
            # Containers of its own, so that what `fn` changes in place is seen as a change.
            with notes.landings() as landings, precision.in_force(dtypes, before):
                after, outputs = split_result(fn(jax.tree.map(lambda x: x, before), *inputs))
            return kept_in_place(placed, before, notes.landed(before, after, landings)), outputs

        def body(before: PyTree, *inputs: PyTree) -> tuple[PyTree, PyTree]:
            run = one if scans is None else functools.partial(scanned, one, scans)
            after, outputs = run(before, *inputs)
            return in_wrappers(placed, after), outputs

        return replicated(call, body, view, context, has_state=True)

    def call(state: PyTree, *inputs: PyTree) -> Call:
        return Call(fn, (state, *inputs), {})

    program = Program(call, trace, _name(fn), view, donates=True, turns=None if view.scans else steps_per_call)
    functools.update_wrapper(program, fn, updated=())
    return program


def _require_function(fn: Any) -> None:
    if not callable(fn):
        raise TypeError(f"A function is needed, got {type(fn).__name__}.")


def _name(fn: Callable[..., Any]) -> str:
    return getattr(fn, "__name__", type(fn).__name__)
