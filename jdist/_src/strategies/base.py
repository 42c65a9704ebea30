"""What every strategy does: run functions of one replica on its devices."""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Self

import jax

from jdist._src.collectives.cross_device_ops import AllReduce, CommunicationOptions, CrossDeviceOps
from jdist._src.core import other_names
from jdist._src.core.arguments import keyword_arguments
from jdist._src.core.identity_cache import IdentityCache
from jdist._src.core.tree import PyTree, argument_names, describe_type
from jdist._src.execution.backend import Backend
from jdist._src.execution.program import Program, init_program, run_program, step_program
from jdist._src.replica.context import ReplicaContext
from jdist._src.replica.precision import Precision
from jdist._src.strategies.host_side import HostSide
from jdist._src.strategies.pickling import with_devices, with_names
from jdist._src.strategies.scope import Scope
from jdist._src.values.device_put import put


class Strategy(HostSide):
    """Where a step runs: one replica a device of a mesh, all running the same function on their own part of the data.

    A replica function is ordinary JAX code. Its arguments are what one replica sees: a `PerReplica` argument is that
    replica's own value, anything else is the same on all. What it says to the other replicas it says with
    `jdist.all_reduce` and its kin. Immutable, but for the compiled functions that it remembers: a copy is the strategy itself,
    and a pickle builds it again on the devices of the same names.

    Args:
        view: How it runs functions on its devices.
        cross_device_ops: How the replicas' values are added up.
        communication_options: Which leaves are reduced together.
        arguments: The arguments of the constructor of its class that build it again, with devices in place of their names.
    """

    def __init__(
        self,
        view: Backend,
        cross_device_ops: CrossDeviceOps = AllReduce(),  # noqa: B008  # immutable
        communication_options: CommunicationOptions = CommunicationOptions(0),  # noqa: B008
        *,
        arguments: Mapping[str, Any],
    ):
        self._arguments = dict(arguments)
        self._backend = view
        self._context = ReplicaContext.of(self, view.replicas, cross_device_ops, communication_options)
        self._runs: IdentityCache[Program] = IdentityCache()
        self._inits: IdentityCache[Program] = IdentityCache()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({[str(device) for device in self.mesh.devices.flat]})"

    def __copy__(self) -> Self:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuilt, (type(self), with_names(type(self).__name__, self._arguments))

    if not TYPE_CHECKING:  # a type checker would then accept every name

        def __getattr__(self, name: str) -> Any:
            if name in other_names.STRATEGY_NAMES:
                raise other_names.missing_attribute_error(
                    f"{type(self).__name__!r} object", name, other_names.STRATEGY_NAMES
                )
            # Also called where a property raises AttributeError: raises that error again.
            return object.__getattribute__(self, name)

    def scope(self) -> Scope:
        """A context manager that makes this the current strategy: `jdist.get_strategy()` returns it, `jdist.variable` uses it.

        The same object can be entered again, nested or later, as in TensorFlow.

        Raises:
            RuntimeError: On entry, the scope of another strategy is current.

        Example:
            >>> strategy = jdist.MirroredStrategy(["cpu:0", "cpu:1"])
            >>> scope = strategy.scope()
            >>> with scope, scope:
            ...     jdist.get_strategy() is strategy
            True
        """
        return Scope(self)

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
            TypeError: `fn` is no function, `args` no tuple, `kwargs` no mapping, or a result is no number or array of numbers.
            ValueError: An argument lies on the devices of another strategy; or an argument or a result is a host number of more
                than 32 bits, where JAX keeps 32.
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
            raise TypeError(f"`args` is a tuple of arguments, got {describe_type(args)}: write `run(fn, (value,))`.")
        program = self._runs.get(fn, lambda reference: run_program(reference, self._backend, self._context))
        return program(tuple(args), keyword_arguments("run", kwargs))[1]

    def init(self, fn: Callable[..., PyTree], *args: PyTree) -> PyTree:
        """A state, created on the devices by a replica function: no leaf is ever whole on the host, or on one device first.

        Args:
            fn: Makes the state from `args`. Each leaf has to be the same on every replica, unless `fn` wraps it, as in
                `jdist.PerReplica(jdist.replica_key(key))`.
            args: What `fn` takes: trees of arrays and numbers.

        Raises:
            NotMirroredError: A leaf that is not wrapped may differ between the replicas.
            TypeError: A leaf is no number or array of numbers.
            ValueError: A leaf is a host number of more than 32 bits, where JAX keeps 32.

        Example:
            >>> strategy = jdist.MirroredStrategy(["cpu:0", "cpu:1"])
            >>> state = strategy.init(lambda key: {"w": jax.random.normal(key, (3,))}, jax.random.key(0))
            >>> len(state["w"].sharding.device_set)
            2
        """
        program = self._inits.get(fn, lambda reference: init_program(reference, self._backend, self._context))
        names = argument_names(fn, args, {})
        return program(*put(args, self.replicas, self._backend.inputs, names))[0]

    def step(
        self,
        fn: Any = ...,
        *,
        precision: Precision | None = None,
        steps_per_call: int | None = None,
        donate: bool = True,
    ) -> Any:
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
            donate: Whether the new state reuses the memory of the old state. Without donation the old state stays valid, and
                both states need memory.

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
            return functools.partial(self.step, precision=precision, steps_per_call=steps_per_call, donate=donate)
        if not isinstance(donate, bool):
            raise TypeError(f"`donate` is True or False, got {donate!r}.")
        return step_program(fn, precision, steps_per_call, donate, self._backend, self._context)

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
        if program.view is not self._backend:
            raise ValueError(
                "The step was made by another strategy. Hand in its function, or what this one made of it."
            )
        if not isinstance(compiler_options, Mapping | None):
            raise TypeError(
                f"`compiler_options` maps names to values, got {type(compiler_options).__name__}: of flags, hand in "
                '`jdist.xla_flags("tpu").compiler_options`.'
            )
        return program.lower(state, *inputs).compile(None if compiler_options is None else dict(compiler_options))


def _rebuilt(kind: type[Strategy], arguments: dict[str, Any]) -> Strategy:
    return kind(**with_devices(kind.__name__, arguments))
