"""Programs: replica functions compiled for a mesh, and how they are called.

A call of a program is a call of `jax.jit`. Around it, an error that JAX reports in terms of buffers and devices is raised
again in terms of the caller's values, and on the CPU one call runs at a time (`jdist._src.devices.dispatch`).
"""

import contextlib
import functools
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn, Self

import jax
import numpy as np
from jax.sharding import Mesh, Sharding

from jdist._src.core import jax_compat
from jdist._src.core.arguments import as_int
from jdist._src.core.trace_key import is_keyed, unkeyed
from jdist._src.core.tree import PyTree, named_leaves
from jdist._src.devices.dispatch import is_bounded, record_call, wait_for_previous
from jdist._src.execution.argument_errors import check_donated_state, raise_argument_error
from jdist._src.execution.backend import Backend
from jdist._src.execution.multi_step import inputs_per_step, run_sequentially, scan_steps
from jdist._src.execution.replicate import Call, Proof, Traced, replicate
from jdist._src.execution.state_update import apply_writes, rewrap, split_result, strongly_typed
from jdist._src.replica import leaf_annotations, precision
from jdist._src.replica.context import ReplicaContext, in_replica_function
from jdist._src.replica.precision import Precision
from jdist._src.values.arrays import (
    check_array,
    check_not_leaked,
    check_range,
    host_leaves,
    is_device_array,
    is_jit_argument,
)
from jdist._src.values.device_put import check_devices_attached
from jdist._src.values.same_program import check_same_program

_NO_MESH = Mesh(np.empty((), object), ())
_IS_DELETED = operator.methodcaller("is_deleted")


class Program:
    """A replica function compiled for the devices of a strategy.

    Mutable: JAX's cache of compiled programs is inside, and the proof of the last one that was traced.

    Args:
        call: From the arguments of the program to the call of the user's function that they make.
        trace: The function that `jax.jit` traces.
        name: What profiles call it.
        view: How it runs on the devices.
        has_state: Whether the first argument is a state, which the program replaces.
        donates: Whether the memory of that state is reused for the new state.
        turns: How often one call runs it, each time on the next of so many inputs; None for once on its inputs.
    """

    def __init__(
        self,
        call: Callable[..., Call],
        trace: Callable[[Call], Traced],
        name: str,
        view: Backend,
        has_state: bool = False,
        donates: bool = False,
        turns: int | None = None,
    ):
        proofs: list[Proof] = []

        def traced(*args: PyTree) -> tuple[PyTree, PyTree]:
            with self._compared() as programs:
                pair, proof, program = trace(call(*args))
                programs.append(program)
            proofs[:] = [proof]
            sizes = list(map(np.size, jax.tree.leaves(pair)))
            self._smallest = sizes.index(min(sizes)) if sizes else 0
            return pair

        traced.__name__ = traced.__qualname__ = self._name = name
        self._proofs = proofs
        self._call_of = call
        self.view = view
        self._has_state = has_state
        self._donates = donates
        self._turns = turns
        self._smallest = 0  # the index of the smallest result: the results of a call are held until the next call
        compile_ = functools.partial(jax.jit, donate_argnums=(0,) if donates else ())
        self._compiled = compile_(traced)
        self._spans_processes = len({device.process_index for device in view.replicas.mesh.devices.flat}) > 1
        # Processes compare a program when they call it. One that `lower` has traced would not be traced by the call.
        self._lowered = compile_(_copy(traced)) if self._spans_processes else self._compiled
        self._arguments: tuple[PyTree, ...] | None = None  # of the call that may be tracing, where processes compare
        self._launch = self._launch_alone if is_bounded(view.replicas.mesh) else self._compiled
        if self._spans_processes:
            self._launch = functools.partial(self._launch_together, self._launch)
        if view.home is not None:
            self._launch = functools.partial(self._fetch_and_store, self._launch)
        if turns is not None:
            self._launch = functools.partial(run_sequentially, self._launch, turns)
        self._signatures = 0  # how many JAX has seen; 0 if it does not say
        self._sees_host_state = False  # whether one of them had a host value in the state
        self._launch = functools.partial(self._check_and_launch, self._launch)

    def __call__(self, *args: PyTree, **named: PyTree) -> tuple[PyTree, PyTree]:
        """`(state, outputs)` of the replica function, as the host sees them."""
        if named:
            raise TypeError(
                f"`{self._name}` got {', '.join(f'`{name}`' for name in named)} by name. A step takes its arguments by "
                "position: `step(state, *inputs)`."
            )
        if in_replica_function():
            raise RuntimeError(
                "A strategy runs a function inside a function that a strategy is already running. Call the inner one "
                "directly: in a replica function the values are one replica's plain arrays."
            )
        try:
            if is_keyed() or not jax.sharding.get_abstract_mesh().empty:
                return self._launch_apart(*args)
            return self._launch(*args)
        except (TypeError, ValueError, RuntimeError, AttributeError) as error:
            check_devices_attached(self.view.replicas.mesh)
            has_donated = self._donates and bool(args)
            raise_argument_error(error, self._call_of(*args), self.view.replicas.mesh, self.view.home, has_donated)
            raise

    def lower(self, *args: PyTree) -> jax.stages.Lowered:
        """The program for arguments of these shapes, to be compiled and looked at: `lower(...).compile().as_text()`."""
        if self._turns is not None:
            args = (args[0], *inputs_per_step(args[1:], self._turns)[0])
        state, inputs = args[: self._has_state], args[self._has_state :]
        where = self.view.shardings if self.view.home is None else self.view.inputs
        shardings = where(state[0]) if self._has_state else []
        return self._lowered.lower(*_shapes(args, [*shardings, *self.view.inputs(inputs)]))

    @property
    def proof(self) -> Proof:
        """What was proved when the function was traced last.

        Raises:
            RuntimeError: It was not called yet.
        """
        if not self._proofs:
            raise RuntimeError("Nothing is proved yet: a step is traced when it is called for the first time.")
        return self._proofs[0]

    def __copy__(self) -> Self:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "A step cannot be pickled: it is compiled for devices of this process. Pickle its function, `step.__wrapped__`, "
            "and the strategy, and call `strategy.step(fn)` again. `jdist.export` saves a function with its weights."
        )

    def _launch_apart(self, *args: PyTree) -> tuple[PyTree, PyTree]:
        """Calls the program outside the host's contexts: in `scope()` or `jax.set_mesh` it would be compiled again."""
        context_mesh = jax.sharding.get_abstract_mesh()
        if context_mesh.empty:
            with unkeyed():
                return self._launch(*args)
        if jax_compat.is_tracing() and context_mesh != self.view.replicas.mesh.abstract_mesh:
            raise ValueError(
                f"This program runs on the mesh {dict(self.view.replicas.mesh.shape)} of its strategy, and `jax.set_mesh` has "
                f"set the mesh {dict(context_mesh.shape)} around the `jax.jit` that calls it. Call it outside that `jax.jit`, "
                "or outside `jax.set_mesh`."
            )
        with unkeyed(), contextlib.nullcontext() if jax_compat.is_tracing() else jax.set_mesh(_NO_MESH):
            return self._launch(*args)

    def _check_and_launch(self, launch: Callable[..., tuple[PyTree, PyTree]], *args: PyTree) -> tuple[PyTree, PyTree]:
        """Refuses host values that `jax.jit` would cut silently.

        A state has many leaves and stays on the devices. It is looked at before a call only if JAX may have compiled this
        program for a state with host values, and after a call that JAX has compiled it for anew.
        """
        trusts_state = self._has_state and self._signatures and not self._sees_host_state
        self._check_host_values(args, args[1:] if trusts_state else args)
        pair = launch(*args)
        signatures = jax_compat.num_signatures(self._compiled)
        if self._has_state and signatures != self._signatures:
            self._signatures = signatures
            self._sees_host_state |= bool(host_leaves(args[0]))
            self._check_host_values(args, args[0])
        return pair

    def _check_host_values(self, args: tuple[PyTree, ...], checked: PyTree) -> None:
        if not all(map(is_jit_argument, host_leaves(checked))):
            for name, leaf in self._call_of(*args).leaves():
                check_not_leaked(name, leaf)
                check_range(name, leaf)

    def _launch_alone(self, *args: PyTree) -> tuple[PyTree, PyTree]:
        if self._donates and jax_compat.CRASHES_ON_DONATED_MEMORY:
            self._check_memory(args)
        wait_for_previous(self)
        pair = self._compiled(*args)
        record_call(jax.tree.leaves(pair), self._smallest, self)
        return pair

    def _launch_together(self, launch: Callable[..., Any], *args: PyTree) -> tuple[PyTree, PyTree]:
        """Calls a program of several processes, which compare it if this call traces it."""
        # Inside a `jax.jit` of the user nothing runs yet.
        self._arguments = None if jax_compat.is_tracing() else args
        try:
            return launch(*args)
        finally:
            self._arguments = None

    @contextlib.contextmanager
    def _compared(self) -> Iterator[list[Any]]:
        """Compares the program that is appended inside with those of the other processes."""
        programs: list[Any] = []
        args, replicas, name = self._arguments, self.view.replicas, self._name
        if args is None:
            yield programs
            return
        try:
            yield programs
        except Exception as error:
            check_same_program(name, None, [], replicas, failure=error)
            raise
        check_same_program(name, programs[0], self._call_of(*args).leaves(), replicas)

    def _fetch_and_store(self, launch: Callable[..., tuple[PyTree, PyTree]], *args: PyTree) -> tuple[PyTree, PyTree]:
        if self._donates:
            self._check_memory(args)
        state, outputs = launch(*self.view.fetched(args))
        # A central leaf was fetched into memory of its own, so XLA has not deleted it.
        for leaf in jax.tree.leaves(args[: self._donates]):
            if is_device_array(leaf) and not leaf.is_deleted():
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
            check_donated_state(args[0], args[1:])


def _shapes(args: tuple[PyTree, ...], shardings: Sequence[Sharding]) -> tuple[PyTree, ...]:
    leaves, treedef = jax.tree.flatten(args)
    for name, leaf in named_leaves("args", args):
        if not isinstance(leaf, jax.ShapeDtypeStruct):
            check_array(name, leaf)
    avals = [x if isinstance(x, jax.ShapeDtypeStruct) else jax.typeof(x) for x in leaves]
    pairs = zip(avals, shardings, strict=True)
    return treedef.unflatten([jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding) for x, sharding in pairs])


def _copy(fn: Callable[..., Any]) -> Callable[..., Any]:
    return functools.wraps(fn)(lambda *args: fn(*args))


def run_program(fn: Callable[[], Callable[..., PyTree]], view: Backend, context: ReplicaContext) -> Program:
    """What `Strategy.run` calls: from positional and named arguments to the outputs of `fn()`, which it does not keep alive."""
    _require_function(fn())

    def trace(call: Call) -> Traced:
        return replicate(call, lambda *args, **kwargs: ((), call.fn(*args, **kwargs)), view, context)

    return Program(lambda args, kwargs: Call(fn(), args, kwargs), trace, _name(fn()), view)


def init_program(fn: Callable[[], Callable[..., PyTree]], view: Backend, context: ReplicaContext) -> Program:
    """What `Strategy.init` calls: from its arguments to the state that `fn()` makes."""
    _require_function(fn())

    def trace(call: Call) -> Traced:
        def body(*args: PyTree) -> tuple[PyTree, PyTree]:
            with leaf_annotations.collect_local_leaves() as partials:
                state = call.fn(*args)
            return strongly_typed(leaf_annotations.wrap_local_leaves(state, partials)), ()

        return replicate(call, body, view, context)

    return Program(lambda *args: Call(fn(), args, {}), trace, _name(fn()), view)


def step_program(
    fn: Callable[..., tuple[PyTree, PyTree]],
    dtypes: Precision | None,
    steps_per_call: int | None,
    donate: bool,
    view: Backend,
    context: ReplicaContext,
) -> Program:
    """What `Strategy.step` returns: from state and inputs to new state and outputs."""
    _require_function(fn)
    if not isinstance(dtypes, Precision | None):
        raise TypeError(f"`precision` is a `jdist.Precision(param_dtype=, compute_dtype=, output_dtype=)`, got {dtypes!r}.")
    if steps_per_call is not None:
        steps_per_call = as_int("`steps_per_call`", steps_per_call, 1)
    scans = steps_per_call if view.scans else None

    def trace(call: Call) -> Traced:
        placed = call.args[0]

        def one(before: PyTree, *inputs: PyTree) -> tuple[PyTree, PyTree]:
            # Containers of its own, so that what `fn` changes in place is seen as a change.
            with leaf_annotations.collect_sync_targets() as landings, precision.use_precision(dtypes, before):
                after, outputs = split_result(fn(jax.tree.map(lambda x: x, before), *inputs))
            return apply_writes(placed, before, leaf_annotations.apply_sync_targets(before, after, landings)), outputs

        def body(before: PyTree, *inputs: PyTree) -> tuple[PyTree, PyTree]:
            run = one if scans is None else functools.partial(scan_steps, one, scans)
            after, outputs = run(before, *inputs)
            return rewrap(placed, after), outputs

        return replicate(call, body, view, context, has_state=True)

    def call(*args: PyTree) -> Call:
        if not args:
            raise TypeError(
                f"`{_name(fn)}` is a step and got no arguments. Call it with its state: `step(state, *inputs)`."
            )
        return Call(fn, args, {})

    turns = None if view.scans else steps_per_call
    program = Program(call, trace, _name(fn), view, has_state=True, donates=donate, turns=turns)
    functools.update_wrapper(program, fn, updated=())
    return program


def _require_function(fn: Any) -> None:
    if not callable(fn):
        raise TypeError(f"A function is needed, got {type(fn).__name__}.")


def _name(fn: Callable[..., Any]) -> str:
    return getattr(fn, "__name__", None) or (_name(fn.func) if isinstance(fn, functools.partial) else type(fn).__name__)
