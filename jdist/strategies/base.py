"""What every strategy does: run functions of one replica on its devices."""

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax

from jdist._identity import IdentityCache
from jdist._tree import PyTree
from jdist.context import (
    CrossReplicaContext,
    ReplicaContext,
    current,
    entered,
    in_replica_function,
    require_host,
)
from jdist.cross_device_ops import AllReduce, CommunicationOptions, CrossDeviceOps
from jdist.precision import Precision
from jdist.strategies.host_side import HostSide
from jdist.strategies.program import Program, init_program, run_program, step_program
from jdist.values.place import put
from jdist.views.base import View


class Strategy(HostSide):
    """Where a step runs: one replica a device of a mesh, all running the same function on their own part of the data.

    A replica function is ordinary JAX code. Its arguments are what one replica sees: a `PerReplica` argument is that
    replica's own value, anything else is the same on all. What it says to the other replicas it says with
    `jdist.all_reduce` and its kin. Immutable, but for the compiled functions that it remembers.
    """

    def __init__(
        self,
        view: View,
        cross_device_ops: CrossDeviceOps = AllReduce(),  # noqa: B008  # immutable
        communication_options: CommunicationOptions = CommunicationOptions(0),  # noqa: B008
    ):
        self._view = view
        self._context = ReplicaContext.of(self, view.replicas, cross_device_ops, communication_options)
        self._runs: IdentityCache[Program] = IdentityCache()
        self._inits: IdentityCache[Program] = IdentityCache()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({[str(device) for device in self.mesh.devices.flat]})"

    @contextlib.contextmanager
    def scope(self) -> Iterator[None]:
        """Makes this the strategy that `jdist.get_strategy()` returns, and that `jdist.variable` places values for.

        Raises:
            RuntimeError: Another strategy's scope is around.
        """
        require_host("scope", "enter it around the call that runs the function")
        here = current()
        if here.strategy is not None and here.strategy is not self:
            raise RuntimeError(
                f"The scope of {self!r} is inside the scope of {here.strategy!r}. Leave that one first (`set_strategy(None)`, "
                "if `set_strategy` entered it)."
            )
        with entered(CrossReplicaContext(self, merging=in_replica_function())):
            yield

    def run(
        self, fn: Callable[..., PyTree], args: Sequence[PyTree] = (), kwargs: Mapping[str, PyTree] | None = None
    ) -> PyTree:
        """Calls `fn` once a replica and gives back what it returned.

        The function is compiled at the first call with arguments of these shapes, and found again by its identity: define it
        once, outside the loop. What was compiled for a function that is gone is gone too.

        Args:
            fn: A replica function.
            args: Its positional arguments: trees of `PerReplica`, arrays and numbers. On several processes each one hands in
                the same numbers.
            kwargs: Its arguments by name.

        Returns:
            What `fn` returned. A leaf that is proved to be the same on every replica is a plain array `[...]`, every other
            a `PerReplica` of `[replica, ...]`.

        Raises:
            TypeError: `fn` is no function, or `args` no tuple.
            ValueError: An argument lies on the devices of another strategy.
            DivergentCollectiveError: Some replicas may reach a collective that others do not.

        Example:
            >>> strategy = jdist.MirroredStrategy(["cpu:0", "cpu:1"])
            >>> def spread(x):
            ...     mine = x * jdist.replica_id()
            ...     return {"mine": mine, "all": jdist.all_reduce("sum", mine)}
            >>> strategy.run(spread, (10,))
            {'all': Array(10, dtype=int32), 'mine': PerReplica(int32[2])}
        """
        if not isinstance(args, (tuple, list)):
            raise TypeError(f"`args` is a tuple of arguments, got {type(args).__name__}: write `run(fn, (value,))`.")
        program = self._runs.get(fn, lambda reference: run_program(reference, self._view, self._context))
        return program(tuple(args), dict(kwargs or {}))[1]

    def init(self, fn: Callable[..., PyTree], *args: PyTree) -> PyTree:
        """A state, created on the devices by a replica function: no leaf is ever whole on the host, or on one device first.

        Args:
            fn: Makes the state from `args`. Each leaf has to be the same on every replica, unless `fn` wraps it, as in
                `jdist.PerReplica(jdist.replica_key(key))`.
            args: What `fn` takes: trees of arrays and numbers.

        Raises:
            NotMirroredError: A leaf that is not wrapped may differ between the replicas.

        Example:
            >>> strategy = jdist.MirroredStrategy(["cpu:0", "cpu:1"])
            >>> state = strategy.init(lambda key: {"w": jax.random.normal(key, (3,))}, jax.random.key(0))
            >>> len(state["w"].sharding.device_set)
            2
        """
        program = self._inits.get(fn, lambda reference: init_program(reference, self._view, self._context))
        return program(*put(args, self.replicas, self._view.inputs))[0]

    def step(self, fn: Any = ..., *, precision: Precision | None = None, steps_per_call: int | None = None) -> Any:
        """Makes a training step of `fn`, a replica function `(state, *inputs) -> (state, outputs)`.

        At the first call it is traced once. A state leaf that is a plain array has to be proved the same on every replica
        after the step, whatever the inputs; a leaf in a wrapper goes back into it. Then it is compiled, and a call costs what
        one of `jax.jit(jax.shard_map(...))` written by hand costs. The state's memory is given to the new state (it is
        *donated*): go on with what the step returns.

        Args:
            fn: The step of one replica; left out in `@strategy.step(precision=...)`.
            precision: The dtypes that `jdist.value_and_grad` computes in within it.
            steps_per_call: How many steps a call runs, one after the other, in one program: what a call costs is paid once
                for all of them. Each input is then a list of so many, the input of each step, and each output has them all:
                leaves `[step, ...]`, `PerReplica` ones `[replica, step, ...]`. Under `CentralStorageStrategy`, which
                updates a state behind each step's program, it is as many programs.

        Returns:
            The step for all of them, a `Program`, called like `fn` with arguments by position; its `proof` says what was
            proved, and `__wrapped__` is `fn`. Outputs are as `run` gives them.

        Raises:
            TypeError: `fn` is no function, or `steps_per_call` no whole number; or, when called, `fn` returned no pair, or
                changes a structure, shape or dtype.
            NotMirroredError: When called: a leaf of the new state may differ between the replicas.
            ValueError: `steps_per_call` is less than 1. When called: the state was donated before, or lies on other devices;
                or an input is no list of `steps_per_call` that are alike.

        Example:
            >>> strategy = jdist.MirroredStrategy(["cpu:0", "cpu:1"])
            >>> @strategy.step
            ... def descend(w, x):
            ...     loss, grad = jax.value_and_grad(lambda w: (w * x) ** 2)(w)
            ...     return w - 0.1 * jdist.all_reduce("mean", grad), jdist.all_reduce("mean", loss)
            >>> w = strategy.init(lambda: jax.numpy.float32(1.0))
            >>> x = strategy.distribute_values_from_function(lambda c: 1.0 + c.replica_id_in_sync_group)
            >>> w, loss = descend(w, x)
            >>> float(w), float(loss)
            (0.5, 2.5)
            >>> print(descend.proof)
            2 of 2 results are the same on every replica
        """
        if fn is ...:
            return functools.partial(self.step, precision=precision, steps_per_call=steps_per_call)
        return step_program(fn, precision, steps_per_call, self._view, self._context)

    def compile(
        self, step: Any, state: PyTree, *inputs: PyTree, compiler_options: Mapping[str, Any] | None = None
    ) -> jax.stages.Compiled:
        """A step for arguments of these shapes, compiled and not run, for devices that need not be there.

        Args:
            step: What `step` made, or a function that it would take.
            state: The state, or its shapes: `jax.eval_shape(lambda key: strategy.init(make, key), key)`.
            inputs: What the step takes besides: arrays or `jax.ShapeDtypeStruct`s, a batch as `PerReplica` of
                `[replica, batch, ...]`.
            compiler_options: For XLA, such as `jdist.xla_flags("tpu").compiler_options`.

        Returns:
            The program: `as_text()`, `memory_analysis()` of a device, `cost_analysis()`.

        Raises:
            ValueError: The state cannot be laid out; or `step` is another strategy's.
        """
        program = step if isinstance(step, Program) else self.step(step)
        if program.view is not self._view:
            raise ValueError(
                "The step was made by another strategy. Hand in its function, or what this one made of it."
            )
        if not isinstance(compiler_options, Mapping | None):
            raise TypeError(
                f"`compiler_options` maps names to values, got {type(compiler_options).__name__}: of flags, hand in "
                '`jdist.xla_flags("tpu").compiler_options`.'
            )
        return program.lower(state, *inputs).compile(None if compiler_options is None else dict(compiler_options))
