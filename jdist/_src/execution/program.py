"""`Program`: a replica function compiled for a mesh, and the call of it.

A call of a program is a call of `jax.jit`. Errors that JAX reports in terms of buffers and devices are raised again in terms of
the caller's values, and on several CPU devices one call runs at a time (`jdist._src.devices.dispatch`).
"""

import contextlib
import functools
import inspect
import operator
import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Concatenate, Generic, NamedTuple, NoReturn, ParamSpec, Self, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, Sharding
from jax.tree_util import PyTreeDef

from jdist._src.core import activity, jax_compat
from jdist._src.core.modules import contains_modules, from_array_tree, to_array_tree, update_in_place
from jdist._src.core.trace_key import is_keyed, unkeyed
from jdist._src.core.tree import PyTree, dtype_and_shape, named_leaves, one_line
from jdist._src.devices.dispatch import is_bounded, record_call, wait_for_previous
from jdist._src.execution.backend import Backend
from jdist._src.execution.interrupts import (
    handle_signals,
    hold_back,
    is_donated,
    raise_pending,
    run_held_back,
    uninterrupted,
)
from jdist._src.execution.multi_step import SlowLoopError, StackedInputs, inputs_per_step, run_sequentially
from jdist._src.execution.packed_state import PackedState, StatePacker
from jdist._src.execution.replicate import Call, Proof, Traced
from jdist._src.jaxpr.collective_lines import collective_lines
from jdist._src.jaxpr.interpreter import all_equations
from jdist._src.replica.context import in_replica_function
from jdist._src.values.arrays import (
    check_array,
    check_not_leaked,
    check_not_ref,
    check_range,
    copy_tree,
    host_leaves,
    is_device_array,
    is_jit_argument,
)
from jdist._src.values.base import named_values
from jdist._src.values.device_put import check_devices_attached, check_same_devices
from jdist._src.values.process_calls import (
    is_of_all_processes,
    launches_on,
    local_arrays,
    processes_of,
    record_host_values,
    record_local_arrays,
)
from jdist._src.values.same_program import check_same_program

StateT = TypeVar("StateT")
InputsT = ParamSpec("InputsT")
OutputsT = TypeVar("OutputsT")


class _ModulesError(Exception):
    """Arguments contain modules that the call did not convert. Raised while the program is traced; `Program` handles it."""


_WRONG_OPTION = re.compile(r"No such compile option: '(\w+)'|While setting option (\w+), ([^\n]*)")
_SMALL_OUTPUTS = 2**16  # elements: outputs that are held until the next call
_NO_MESH = Mesh(np.empty((), object), ())
_IS_DELETED = operator.methodcaller("is_deleted")
_IS_COMMITTED = operator.attrgetter("committed")


class _Launching:
    """The thread that launches a program on several CPU devices, and the arguments, of which it donates the first one."""

    call: tuple[int, tuple[PyTree, ...]] | None = None  # an attribute of `threading.local` takes longer


_launching = _Launching()


def _check_compiled_call(event: str, *_: Any, **__: Any) -> None:
    """Checks the arguments of the program that JAX compiles.

    On several CPU devices JAX starts some before it refuses memory that is donated twice, and jax 0.12 ends the process 60
    seconds later. A call of a signature that is compiled costs nothing more.
    """
    call = _launching.call
    if call is None or call[0] != threading.get_ident() or not event.startswith("/jax/core/compile/"):
        return
    args = call[1]
    if not jax_compat.is_tracing() and not is_donated(args):  # else a callback of the launched program compiles
        _launching.call = None
        _check_donated_state(args[0], args[1:])


jax.monitoring.register_event_duration_secs_listener(_check_compiled_call)


class Program(Generic[StateT, InputsT, OutputsT]):
    """A replica function compiled for the devices of a strategy: the result of `Strategy.step`.

    `step(state, *inputs)` returns the new state and the outputs. `step.proof` reports which results are replicated, and
    `step.__wrapped__` is the function.

    Mutable: it holds JAX's cache of compiled programs, and the proof of the last program that was traced.

    Args:
        call: Returns the call of the user's function for the arguments of the program.
        trace: Traces a call, inside `jax.jit`.
        name: The name of the program in profiles.
        backend: Runs the program on the devices.
        has_state: Whether the first argument is a state, which the program replaces.
        donates: Whether the memory of that state is reused for the new state.
        compiler_options: Options of XLA for the program.
        steps_per_call: The number of times that one call runs the program, on successive elements of its inputs; None to run it
            once on its inputs.
        scanned_steps: The number of steps in the program, whose inputs are then lists with one element per step; None if its
            inputs are those of one step.
        without_scan: Returns an equal program that does not scan over several steps, for a program whose trace raises
            `SlowLoopError`.
    """

    __wrapped__: Callable[Concatenate[StateT, InputsT], tuple[Any, OutputsT]]

    def __init__(
        self,
        call: Callable[..., Call],
        trace: Callable[[Call], Traced],
        name: str,
        backend: Backend,
        has_state: bool = False,
        donates: bool = False,
        compiler_options: Mapping[str, Any] | None = None,
        steps_per_call: int | None = None,
        scanned_steps: int | None = None,
        without_scan: "Callable[[], Program[..., Any, Any]] | None" = None,
    ):
        proofs: list[Proof] = []

        def traced_pair(*args: PyTree) -> tuple[PyTree, PyTree]:
            if not self._has_modules and contains_modules(args):
                raise _ModulesError
            arrays = self._unpacked(args)
            with self._compared() as programs:
                pair, proof, program = trace(call(*arrays))
                programs.append(program)
            if contains_modules(pair):
                self._expect_modules()
            if has_state and isinstance(args[0], PackedState):
                pair = args[0].with_state(pair[0]), pair[1]
            proofs[:] = [proof]
            self._has_python = self._has_python or _has_python(program, pair)
            return pair

        def traced(*args: PyTree) -> tuple[PyTree, PyTree] | dict[int, list[Any]]:
            # `jax.jit` builds tuples, lists and dicts in C. It builds other nodes of a tree by Python code, in which an
            # interrupt would lose all of them.
            pair = traced_pair(*args)
            if not self._records and _is_built_in_c(jax.tree.structure(pair)):
                return pair
            self._structures.append(_structure_of(pair))
            return {len(self._structures) - 1: jax.tree.leaves(pair)}

        traced.__name__ = traced.__qualname__ = self._name = name  # the name of the program in profiles
        self._text = f"`{name}`"
        self._proofs = proofs
        self._structures: list[_ResultStructure] = []  # of the results of each program that was traced
        self._has_python = False  # whether one of them runs Python code after it has donated the state
        self._is_first_call = True
        self._call_of = lambda *args: call(*self._unpacked(args))
        self.backend = backend
        self._has_state = has_state
        self._donates = donates
        self._steps_per_call = steps_per_call
        self._stacks_inputs = scanned_steps is not None
        self._without_scan = without_scan
        self._replacement: Any = None  # the program without a scan, after `SlowLoopError`
        # A call passes its arguments on as one tuple. After `fn(*args)` Python 3.11 may handle Ctrl-C before the result has a
        # name, also where `fn` is written in Python, and the caller's state is donated then.
        self._call: Callable[[tuple[PyTree, ...]], tuple[PyTree, PyTree]] = self._call_with_arrays
        self._has_modules = False  # whether arguments or results contain modules of nnx or equinox
        self._packer = StatePacker()
        compile_ = functools.partial(
            jax.jit,
            donate_argnums=(0,) if donates else (),
            compiler_options=backend.compiler_options(compiler_options),
        )
        self._compiled = compile_(traced)
        self._spans_processes = len(processes_of(backend.replicas.mesh)) > 1
        self._is_of_all_processes = self._spans_processes and is_of_all_processes(backend.replicas.mesh)
        self._launches = launches_on(backend.replicas.mesh)
        self._label = activity.Label(name, (scanned_steps or 1) if has_state else 0, launches=self._launches)
        # Processes compare a program when they call it. The call would not trace a program that `lower` has traced.
        copy = functools.wraps(traced)(lambda *args: traced(*args))
        self._lowered = compile_(copy) if self._spans_processes else self._compiled
        self._arguments: tuple[PyTree, ...] | None = None  # of the call that may be tracing, where processes compare
        self._is_bounded = is_bounded(backend.replicas.mesh)
        self._records = self._is_bounded or self._spans_processes
        self._dispatch = uninterrupted(self._compiled, self._finish, self._runs_python, self._after_failure)
        self._launch_local = self._launch_alone if self._is_bounded else self._dispatch
        launch = self._launch_together if self._spans_processes else self._launch_local
        if backend.storage is not None:
            launch = lambda args, on_mesh=launch: self._launch_on_mesh(on_mesh, args)
        step_call = backend.step_call(traced_pair, name) if has_state and donates else None
        self._packs_modules = backend.storage is None and step_call is None
        if step_call is not None:
            launch = lambda args: step_call(*args)
        if backend.compiler_options(None) is not None:
            inlined = jax.jit(lambda *args: jax_compat.refuse_to_compile(traced_pair(*args), _inlined_program(name)))
            launch = lambda args, not_inlined=launch: _launch_or_inline(not_inlined, inlined, args)
        if steps_per_call is not None:
            launch = lambda args, one_step=launch: run_sequentially(one_step, steps_per_call, args)
        self._launch: Callable[[tuple[PyTree, ...]], tuple[PyTree, PyTree]] = launch
        self._num_signatures = 0  # the number of signatures that JAX has compiled; 0 if JAX does not report it
        self._records_arrays = False  # whether some inputs are arrays of one process, which a call then records
        self._accepts_host_state = False  # whether one of them has a host value in the state
        self._accepts_unplaced_state = False  # whether one of them has an array that JAX copies to the devices
        self._returned_state = 0  # the identity of the state that the last call returned

    if TYPE_CHECKING:

        def __call__(
            self, state: StateT, /, *inputs: InputsT.args, **named: InputsT.kwargs
        ) -> tuple[StateT, OutputsT]: ...

    else:

        def __call__(self, *args: PyTree, **named: PyTree) -> tuple[PyTree, PyTree]:
            """Returns the new state and the outputs, as global values."""
            if named:
                raise TypeError(_named_arguments(self._name, getattr(self, "__wrapped__", None), list(named)))
            return self._checked_call(args)

    def _checked_call(self, args: tuple[PyTree, ...]) -> tuple[PyTree, PyTree]:
        """Returns `self(*args)`. Where a Python function calls it, no Ctrl-C is handled before the result has a name."""
        raise_pending()
        if in_replica_function():
            raise RuntimeError(
                "`strategy.run`, `strategy.init` or a step is called inside a replica function. Call the inner function "
                "directly, of a step `step.__wrapped__`: inside a replica function the values are one replica's plain "
                "arrays."
            )
        if self._replacement is not None:
            return self._replacement._checked_call(args)
        pair = None
        try:
            if is_keyed() or not jax.sharding.get_abstract_mesh().empty:
                with self._outside_contexts():
                    pair = self._call(args)
            else:
                pair = self._call(args)
            handle_signals()  # the last time before the caller has the result
            return pair
        except KeyboardInterrupt:
            if pair is None:
                jax_compat.end_interrupted_trace()
                raise
            hold_back()
            return pair
        except SlowLoopError:
            return self._replaced()._checked_call(args)
        except _ModulesError:
            self._expect_modules()
        except (TypeError, ValueError, RuntimeError, AttributeError) as error:
            if self._has_modules or not contains_modules(args):
                mesh, has_donated = self.backend.replicas.mesh, self._donates and bool(args)
                check_devices_attached(mesh)
                call = self._call_of(*self._to_array_trees(args))
                _raise_argument_error(error, call, mesh, self.backend.storage, has_donated)
                raise
            self._expect_modules()  # `jax.jit` refused a module with functions
        return self._checked_call(args)

    def lower(self, *args: PyTree) -> jax.stages.Lowered:
        """Returns the program lowered for arguments of these shapes: `lower(...).compile().as_text()`."""
        if self._replacement is not None:
            return self._replacement.lower(*args)
        if contains_modules(args):
            self._expect_modules()
            args = self._to_array_trees(args)
        if self._steps_per_call is not None:
            args = (args[0], *inputs_per_step(args[1:], self._steps_per_call)[0])
        state, inputs = args[: self._has_state], args[self._has_state :]
        backend = self.backend
        state_shardings = backend.state_shardings if backend.storage is None else backend.input_shardings
        shardings = state_shardings(state[0]) if self._has_state else []
        try:
            lowered = self._lowered.lower(*_shapes(args, [*shardings, *backend.input_shardings(inputs)]))
        except SlowLoopError:
            return self._replaced().lower(*args)
        except KeyboardInterrupt:
            jax_compat.end_interrupted_trace()
            raise
        result = jax.tree.unflatten(lowered.out_tree, [0] * lowered.out_tree.num_leaves)
        if isinstance(result, dict):
            lowered.out_tree = self._structures[min(result)].treedef  # its leaves are those of the dict, in this order
        return lowered

    @property
    def proof(self) -> Proof:
        """The proof of the program that was traced last.

        Raises:
            RuntimeError: The program was not traced yet.
        """
        if self._replacement is not None:
            return self._replacement.proof
        if not self._proofs:
            raise RuntimeError("Nothing is proved yet: a step is traced when it is called for the first time.")
        return self._proofs[0]

    def __copy__(self) -> Self:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self

    def __repr__(self) -> str:
        mesh = self.backend.replicas.mesh
        return f"Program({self._name}, on {mesh.size} {mesh.devices.flat[0].platform} devices)"

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "A step cannot be pickled: it is compiled for devices of this process. Pickle its function, `step.__wrapped__`, "
            "and the strategy, and call `strategy.step(fn)` again. `jdist.export` saves a function with its weights."
        )

    def _replaced(self) -> Any:
        assert self._without_scan is not None
        self._replacement = self._without_scan()
        return self._replacement

    def _outside_contexts(self) -> contextlib.AbstractContextManager[None]:
        """Returns a context outside those of the host: in `scope()` or `jax.set_mesh` a program would be compiled again."""
        context_mesh = jax.sharding.get_abstract_mesh()
        if context_mesh.empty:
            return unkeyed()
        mesh = self.backend.replicas.mesh
        if not jax_compat.is_tracing():
            return _outside_mesh()
        if context_mesh != mesh.abstract_mesh:
            raise ValueError(
                f"This program runs on the mesh {dict(mesh.shape)} of its strategy, and `jax.set_mesh` has set the mesh "
                f"{dict(context_mesh.shape)} around the `jax.jit` that calls it. Call it outside that `jax.jit`, or outside "
                "`jax.set_mesh`."
            )
        return unkeyed()

    def _expect_modules(self) -> None:
        """Makes calls convert modules. A program without modules does not look for them."""
        self._has_modules = True
        self._call = self._call_with_modules

    def _to_array_trees(self, args: tuple[PyTree, ...]) -> tuple[PyTree, ...]:
        return tuple(map(to_array_tree, args)) if self._has_state else to_array_tree(args)

    def _unpacked(self, args: tuple[PyTree, ...]) -> tuple[PyTree, ...]:
        """Returns the arguments as array trees. A step packs its state, `run` and `init` all arguments as one tree."""
        if not args or not isinstance(args[0], PackedState):
            return args
        return (args[0].state(), *args[1:]) if self._has_state else args[0].state()

    def _call_with_modules(self, args: tuple[PyTree, ...]) -> tuple[PyTree, PyTree]:
        """Calls the program with modules of nnx and equinox. nnx modules in a donated state are updated, and returned."""
        if not self._has_state or not args:
            packing = None if jax_compat.is_tracing() or self.backend.storage is not None else self._packer.pack(args)
            arrays = self._to_array_trees(args) if packing is None else (packing.packed,)
            return tuple(map(from_array_tree, self._run(arrays)))
        # A storage that is not the mesh places each leaf by its path and the class of its container.
        updates = self._donates and not jax_compat.is_tracing()
        packing = self._packer.pack(args[0]) if updates and self._packs_modules else None
        arrays = to_array_tree(args[0]) if packing is None else packing.packed
        pair = self._run((arrays, *map(to_array_tree, args[1:])))

        def with_modules() -> tuple[PyTree, PyTree]:
            state, outputs = pair
            if packing is not None:
                return packing.update(state), from_array_tree(outputs)
            state = from_array_tree(state)
            return update_in_place(args[0], state) if updates else state, from_array_tree(outputs)

        try:
            return with_modules()
        except KeyboardInterrupt:  # the old values are donated: all variables need the new ones
            hold_back()
            return with_modules()

    def _call_with_arrays(self, args: tuple[PyTree, ...]) -> tuple[PyTree, PyTree]:
        """Calls the program. Its first call finds out whether its results contain modules."""
        pair = self._run(args)
        return tuple(map(from_array_tree, pair)) if self._has_modules else pair

    def _run(self, args: tuple[PyTree, ...]) -> tuple[PyTree, PyTree]:
        """Calls the program with array trees, and refuses host values that `jax.jit` would truncate silently.

        A state has many leaves and stays on the devices. It is checked before a call only if JAX may have compiled the program
        for a state with host values, and after a call that compiled the program for a new signature.
        """
        if self._stacks_inputs:
            args = (*args[:1], *map(StackedInputs.of, args[1:]))
        skips_state = self._has_state and self._num_signatures and not self._accepts_host_state
        host_values = self._check_host_values(args, args[1:] if skips_state else args)
        calls = activity.calls
        if calls.before_step is not None and self._has_state:
            calls.before_step(calls.steps + 1)
        pair = self._launch(args)
        calls.steps += self._has_state
        try:
            if host_values and self._is_of_all_processes and not jax_compat.is_tracing():
                record_host_values(self._name, host_values)
            self._check_new_signature(args)
        except KeyboardInterrupt:  # the old state is donated: the caller needs the new one
            hold_back()
            self._check_new_signature(args)
        return pair

    def _check_new_signature(self, args: tuple[PyTree, ...]) -> None:
        num_signatures = jax_compat.num_signatures(self._compiled) if self._has_state else 0
        if num_signatures != self._num_signatures:
            self._accepts_host_state |= bool(host_leaves(args[0]))
            self._accepts_unplaced_state |= not all(map(_is_placed, jax.tree.leaves(args[0])))
            if self._is_of_all_processes and not self._records_arrays and local_arrays(args[1:]):
                self._records_arrays, launch = True, self._launch
                self._launch = lambda args: (record_local_arrays(self._name, args[1:]), launch(args))[1]
            self._check_host_values(args, args[0])
            self._num_signatures = num_signatures

    def _check_host_values(self, args: tuple[PyTree, ...], checked: PyTree) -> list[Any]:
        """Returns the host values in `checked`, a part of the arguments, or raises an error if JAX would truncate one."""
        values = host_leaves(checked)
        if values and not all(map(is_jit_argument, values)):
            for name, leaf in self._call_of(*args).leaves():
                check_not_leaked(name, leaf)
                check_range(name, leaf)
        return values

    def _launch_alone(self, args: tuple[PyTree, ...]) -> tuple[PyTree, PyTree]:
        """Launches the program after the previous call has finished (`jdist._src.devices.dispatch`)."""
        if not self._donates or not args:
            wait_for_previous(self)
            return self._dispatch(args)
        if self._is_first_call:
            _check_donated_state(args[0], args[1:])
        elif jax_compat.CRASHES_ON_DONATED_MEMORY or (
            self._accepts_unplaced_state and _identity(args[0]) != self._returned_state
        ):
            self._check_memory(args)
        wait_for_previous(self)
        _launching.call = threading.get_ident(), args
        try:
            return self._dispatch(args)
        finally:
            _launching.call = None

    def _runs_python(self) -> bool:
        """Whether `jax.jit` runs Python code in the next call: in every one of this program, or in the first one."""
        return self._donates and (self._has_python or self._is_first_call)

    def _after_failure(self, error: BaseException, args: tuple[PyTree, ...]) -> tuple[PyTree, ...] | None:
        """Returns the arguments of another call, with a copy of the state, if JAX refused to donate memory that is in use.

        It also handles that `jax.jit` runs Python code in all calls of a signature whose first call failed, ten times as slow.
        """
        if self._is_first_call:
            self._compiled.clear_cache()  # pyright: ignore[reportAttributeAccessIssue]
        else:
            self._has_python = True
        shares_memory = self._donates and jax_compat.is_shared_memory_error(error)
        return (copy_tree(args[0]), *args[1:]) if shares_memory else None

    def _finish(self, result: tuple[PyTree, PyTree] | dict[int, list[Any]]) -> tuple[PyTree, PyTree]:
        """Returns the results of a call from those of the compiled program, and records them."""
        self._is_first_call = False
        if isinstance(result, tuple):
            return result
        ((number, leaves),) = result.items()
        structure = self._structures[number]
        pair = structure.treedef.unflatten(leaves)
        if self._records:
            self._record(leaves, structure)
            self._returned_state = _identity(pair[0])
        return pair

    def _record(self, leaves: list[Any], structure: "_ResultStructure") -> None:
        """Records the results of a call, for the next call on CPU devices and for the report of a job that hangs."""
        if self._is_bounded:
            record_call(leaves, structure.smallest, self)
        if self._spans_processes and not jax_compat.is_tracing():
            smallest = leaves[structure.smallest] if leaves else None
            outputs = leaves[structure.num_state :]
            activity.calls.last = [outputs if structure.has_small_outputs else smallest, self._label]

    def _launch_together(self, args: tuple[PyTree, ...]) -> tuple[PyTree, PyTree]:
        """Launches a program of several processes, which compare it if this call traces it."""
        if jax_compat.is_tracing():  # inside a `jax.jit` of the user nothing runs yet
            return self._launch_local(args)
        calls = activity.calls
        self._arguments = args
        self._launches.count += 1
        calls.running = self._label
        if self._is_of_all_processes:
            calls.record(self._text, self._label.checksum)
        try:
            return self._launch_local(args)
        except BaseException:  # as where the processes compare the program: the others do not launch it
            self._launches.count -= 1
            raise
        finally:
            self._arguments = calls.running = None

    @contextlib.contextmanager
    def _compared(self) -> Iterator[list[Any]]:
        """Compares the program that the block appends to the list with the programs of the other processes."""
        programs: list[Any] = []
        args, replicas, name = self._arguments, self.backend.replicas, self._name
        if args is None:
            yield programs
            return
        try:
            yield programs
        except SlowLoopError:  # on all processes, which compare the program without a scan
            raise
        except Exception as error:
            check_same_program(name, None, [], replicas, failure=error)
            raise
        self._label.collectives = collective_lines(programs[0])
        self._label.is_collective = bool(self._label.collectives)
        self._label.checksum = check_same_program(name, programs[0], self._call_of(*args).leaves(), replicas)

    def _launch_on_mesh(
        self, launch: Callable[[tuple[PyTree, ...]], tuple[PyTree, PyTree]], args: tuple[PyTree, ...]
    ) -> tuple[PyTree, PyTree]:
        """Launches the program on a state that is stored elsewhere between programs (`Backend.storage`)."""
        if self._donates:
            self._check_memory(args)
        copies = self.backend.to_mesh(args)

        def launch_and_store() -> tuple[PyTree, PyTree]:
            state, outputs = launch(copies)
            # XLA donates the copy of an offloaded leaf, not the leaf itself.
            for leaf in jax.tree.leaves(args[: self._donates]):
                if is_device_array(leaf) and not leaf.is_deleted():
                    leaf.delete()
            return self.backend.to_storage(state), outputs

        return run_held_back(launch_and_store)

    def _check_memory(self, args: tuple[PyTree, ...]) -> None:
        """Raises ValueError if memory of the state was donated before, or would be donated twice."""
        state, inputs = jax.tree.leaves(args[:1]), jax.tree.leaves(args[1:])
        try:
            ids = set(map(id, state))
            is_valid = len(ids) == len(state) and ids.isdisjoint(map(id, inputs))  # an input may occur several times
            is_valid = is_valid and not any(map(_IS_DELETED, state)) and not any(map(_IS_DELETED, inputs))
            if is_valid and self._accepts_unplaced_state and _identity(args[0]) != self._returned_state:
                is_valid = all(map(_IS_COMMITTED, state))
        except (AttributeError, jax.errors.ConcretizationTypeError):  # some are numbers, or tracers
            is_valid = False
        if not is_valid:
            _check_donated_state(args[0], args[1:])


@contextlib.contextmanager
def _outside_mesh() -> Iterator[None]:
    with unkeyed(), jax.set_mesh(_NO_MESH):
        yield


def _launch_or_inline(
    launch: Callable[[tuple[PyTree, ...]], tuple[PyTree, PyTree]],
    inlined: Callable[..., tuple[PyTree, PyTree]],
    args: tuple[PyTree, ...],
) -> tuple[PyTree, PyTree]:
    """Launches a program with options of XLA. JAX accepts options of the outermost `jax.jit` only."""
    return inlined(*args) if jax_compat.is_tracing() else launch(args)


def _inlined_program(name: str) -> str:
    """Returns the message for a program with options of XLA that another program is compiled with."""
    return (
        f"`{name}` is called inside a `jax.jit`, and has virtual replicas. Their results are equal on any number of devices "
        "only with options of XLA, which a `jax.jit` inside another one cannot have. Call it outside that `jax.jit`. A step "
        "with `steps_per_call` runs several steps in one call."
    )


class _ResultStructure(NamedTuple):
    """The structure of the results of a compiled program, a list of arrays.

    Attributes:
        treedef: The structure of `(state, outputs)`.
        num_state: The number of leaves of the state.
        smallest: The index of the smallest leaf, which is held until the next call.
        has_small_outputs: Whether there are outputs, and so few elements that they are held until the next call.
    """

    treedef: PyTreeDef
    num_state: int
    smallest: int
    has_small_outputs: bool


def _is_built_in_c(treedef: PyTreeDef) -> bool:
    """Whether JAX builds a tree of this structure without Python code."""
    node = treedef.node_data()
    return node is None or (node[0] in (tuple, list, dict, type(None)) and all(map(_is_built_in_c, treedef.children())))


def _structure_of(pair: tuple[PyTree, PyTree]) -> _ResultStructure:
    leaves, treedef = jax.tree.flatten(pair)
    sizes, num_state = list(map(np.size, leaves)), len(jax.tree.leaves(pair[0]))
    smallest = sizes.index(min(sizes)) if sizes else 0
    return _ResultStructure(treedef, num_state, smallest, 0 < sum(sizes[num_state:]) <= _SMALL_OUTPUTS)


def _has_python(program: Any, pair: tuple[PyTree, PyTree]) -> bool:
    """Whether a call of a program runs Python code: a callback, or the constructor of a random key among its results."""
    has_keys = any(jnp.issubdtype(jax.typeof(leaf).dtype, jax.dtypes.extended) for leaf in jax.tree.leaves(pair))
    equations = all_equations(jax_compat.open_jaxpr(program))
    return has_keys or any("callback" in equation.primitive.name for equation in equations)


def _named_arguments(name: str, fn: Any, named: Sequence[str]) -> str:
    """Returns the message for arguments that are passed to a step by name."""
    parameters = list(inspect.signature(fn).parameters) if fn is not None else []
    unknown = [argument for argument in named if argument not in parameters]
    message = f"`{name}` got {', '.join(f'`{argument}`' for argument in named)} by name. "
    if not unknown:
        return message + "A step takes its arguments by position: `step(state, *inputs)`."
    return message + (
        f"A step takes its arguments by position, and its function has no parameter `{unknown[0]}`: its parameters are "
        f"{', '.join(f'`{parameter}`' for parameter in parameters) or 'not known'}."
    )


def _shapes(args: tuple[PyTree, ...], shardings: Sequence[Sharding]) -> tuple[PyTree, ...]:
    leaves, treedef = jax.tree.flatten(args)
    for name, leaf in named_leaves("args", args):
        if not isinstance(leaf, jax.ShapeDtypeStruct):
            check_array(name, leaf)
    avals = [x if isinstance(x, jax.ShapeDtypeStruct) else jax.typeof(x) for x in leaves]
    pairs = zip(avals, shardings, strict=True)
    return treedef.unflatten([jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding) for x, sharding in pairs])


def _raise_argument_error(
    error: Exception, call: Call, mesh: Mesh, storage: NamedSharding | None, donates: bool
) -> None:
    """Raises an error that names the argument that caused `error`, or returns if no argument did.

    Args:
        error: The error of JAX, or of the function.
        call: The call that failed.
        mesh: The mesh of the strategy.
        storage: The sharding of a state between steps, if it is not stored on the mesh.
        donates: Whether the call donates its first argument.

    Raises:
        TypeError: An argument is not an array.
        ValueError: An argument was deleted, is donated twice, or is on other devices; or XLA does not have an option.
    """
    raise_option_error(error)
    is_about_memory = jax_compat.is_deleted_memory_error(error)
    # A call that fails after its launch has deleted the state itself, and its error has another cause.
    if is_about_memory and donates:
        _check_donated_state(call.args[0], tuple(call.args[1:]))
    for name, leaf in call.leaves():
        check_not_ref(name, leaf)
        if isinstance(error, TypeError):
            _check_argument(name, leaf)
        if is_about_memory and is_device_array(leaf) and leaf.is_deleted():
            raise ValueError(
                f"{name} ({dtype_and_shape(leaf)}) was deleted: its memory was donated to a step, or freed by `delete`. A "
                "step with `donate=False` leaves the old state valid."
            ) from None
        if is_device_array(leaf) and leaf.committed and leaf.sharding != storage:
            check_same_devices(name, leaf, mesh)


def raise_option_error(error: Exception) -> None:
    """Raises ValueError if XLA raised `error` because of `compiler_options`."""
    if wrong := _WRONG_OPTION.search(str(error)):
        problem = wrong[3] if wrong[2] else "this version of XLA does not have it."
        raise ValueError(
            f"The option {wrong[1] or wrong[2]!r} of `compiler_options` is refused: {problem} Names and values are those of "
            '`XLA_FLAGS`, without the dashes: `{"xla_cpu_enable_fast_math": True}`. `jdist.xla_flags` returns recommended '
            "options."
        ) from error


def _check_donated_state(state: PyTree, inputs: tuple[PyTree, ...]) -> None:
    """Raises ValueError if a leaf of a state that will be donated was donated before, or occurs twice in the arguments."""
    names: dict[int, str] = {}
    arrays = [(name, leaf) for name, leaf in named_values("state", state) if is_device_array(leaf)]
    # Before the check for deleted arrays: memory that JAX found to be donated twice may be deleted by now.
    for name, leaf in arrays:
        if id(leaf) in names:
            raise ValueError(f"{name} is the same array as {names[id(leaf)]}, and {_DONATED_ONCE}")
        names[id(leaf)] = name
    for name, leaf in named_values("inputs", inputs):
        if id(leaf) in names:
            raise ValueError(f"{names[id(leaf)]} is also among the inputs, as {name}, and {_DONATED_ONCE}")
    for name, leaf in arrays:
        if leaf.is_deleted():
            raise ValueError(
                f"{name} was donated to an earlier step, which reused its memory for the new state. Continue with the state "
                "that the step returned, `state, outputs = step(state, batch)`, or make the step with `donate=False`."
            )
    _check_shared_memory(arrays, named_values("inputs", inputs))


def _check_shared_memory(arrays: list[tuple[str, jax.Array]], inputs: list[tuple[str, Any]]) -> None:
    """Raises ValueError if a leaf of a state has memory of another leaf, or of an input."""
    owners: dict[tuple[Any, int], tuple[str, jax.Array]] = {}
    for name, leaf in arrays:
        for memory, block in _blocks(leaf):
            other_name, other = owners.setdefault(memory, (name, block))
            if other_name != name and _is_donated_twice(other, block):
                raise ValueError(f"{name} has the same memory as {other_name}, and {_DONATED_ONCE}")
    for name, leaf in inputs:
        for memory, block in _blocks(leaf) if is_device_array(leaf) else ():
            if memory in owners and _is_donated_twice(owners[memory][1], block):
                raise ValueError(f"{owners[memory][0]} has the same memory as {name}, an input, and {_DONATED_ONCE}")


def _identity(state: PyTree) -> int:
    """Returns the `id` of a state; of a packed state, which each call makes again, that of its first value."""
    return id(state.values[0] if isinstance(state, PackedState) and state.values else state)


def _is_placed(leaf: Any) -> bool:
    """Whether `leaf` is not an array that JAX copies to the devices of the program, where it donates the copies."""
    return not is_device_array(leaf) or leaf.committed


def _blocks(array: jax.Array) -> list[tuple[tuple[Any, int], jax.Array]]:
    """Returns the part of `array` on each device of this process, with the device and the address of its memory."""
    if array.is_deleted():
        return []
    blocks = [shard.data for shard in array.addressable_shards]
    try:
        return [((block.device, block.unsafe_buffer_pointer()), block) for block in blocks]
    except jax.errors.JaxRuntimeError:  # the device does not tell addresses
        return []


def _is_donated_twice(a: jax.Array, b: jax.Array) -> bool:
    """Whether XLA refuses to donate both of two arrays at one address. It copies memory that it does not own, as NumPy's.

    XLA reports the first argument that it refuses. It always refuses the last one, so no array is donated.
    """
    last = jax.device_put(np.float32(0), a.sharding)
    try:
        _donate(a, b, last, last)
    except (ValueError, jax.errors.JaxRuntimeError) as error:
        return "flattened argument 1," in str(error)
    return False


@functools.partial(jax.jit, donate_argnums=(0, 1, 2, 3))
def _donate(*arrays: jax.Array) -> list[jax.Array]:
    return list(map(jnp.copy, arrays))


_DONATED_ONCE = (
    "a step donates the memory of each leaf of its state. Give one of the two its own memory: `jnp.copy(x)`, or build "
    "the state with `strategy.init` or `strategy.put`."
)


def _check_argument(name: str, leaf: Any) -> None:
    try:
        check_array(name, leaf)
        jax.typeof(leaf if isinstance(leaf, jax.Array) else np.asarray(leaf))
    except TypeError as error:
        raise TypeError(
            f"{name} is {one_line(leaf)}: the arguments of a replica function are arrays and numbers. Close over it, or bind "
            "it once with `functools.partial(fn, name=value)` and pass the other arguments."
        ) from error
