"""`Strategy`: runs replica functions on its devices, and places, splits and reduces values for the host program."""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Concatenate, Literal, ParamSpec, TypeVar, overload

import jax
import numpy as np
from jax.sharding import Mesh

from jdist._src.cluster.resolver import ClusterResolver
from jdist._src.collectives.cross_device_ops import AllReduce, CommunicationOptions, CrossDeviceOps
from jdist._src.collectives.ops import axes_argument, axis_argument
from jdist._src.core import activity, jax_compat
from jdist._src.core.arguments import as_int, keyword_arguments
from jdist._src.core.call_errors import explain_constructor, explains_arguments
from jdist._src.core.identity_cache import IdentityCache
from jdist._src.core.migration_hints import explains_attributes
from jdist._src.core.nn_modules import from_array_tree, to_array_tree
from jdist._src.core.tree import PyTree, argument_names, describe_type
from jdist._src.core.uncopied import Uncopied
from jdist._src.data.buckets import Buckets
from jdist._src.data.config import Cache, Remainder
from jdist._src.data.dataset import DistributedDataset
from jdist._src.data.distribute import dataset_from_function, dataset_from_source
from jdist._src.data.shards import AutoShard, InputContext
from jdist._src.devices.mesh import Replicas
from jdist._src.devices.topology import is_topology_device
from jdist._src.execution.argument_stages import raise_option_error
from jdist._src.execution.backend import Backend, Equivalence
from jdist._src.execution.build_programs import (
    StepOptions,
    View,
    check_compiler_options,
    init_program,
    run_program,
    step_program,
)
from jdist._src.execution.program import Program
from jdist._src.execution.traced import Proof
from jdist._src.faults import watchdog
from jdist._src.replica.context import ReplicaContext, ValueContext, current_context, require_cross_replica_context
from jdist._src.replica.metric_sums import check_state_metrics
from jdist._src.replica.precision import Precision
from jdist._src.strategies import host_reductions
from jdist._src.strategies.description import Description, describe
from jdist._src.strategies.late_bound_step import Step
from jdist._src.strategies.pickling import with_devices, with_names
from jdist._src.strategies.scope import Scope
from jdist._src.values.base import DistributedValues
from jdist._src.values.batch_layout import BatchLayout
from jdist._src.values.device_put import check_devices_attached, put, put_per_replica, split_batch, split_by_layout
from jdist._src.values.per_replica import PerReplica
from jdist._src.values.process_calls import launches_on
from jdist._src.values.reduce_op import ReduceOp

_StateT = TypeVar("_StateT")
_T = TypeVar("_T")
_InputsT = ParamSpec("_InputsT")
_OutputsT = TypeVar("_OutputsT")


@explains_attributes("strategy")
class Strategy(Uncopied):
    """Runs replica functions, one replica per device of a mesh, each on its own part of the data.

    A replica function is ordinary JAX code. It receives the arguments of one replica: a `PerReplica` argument is this replica's
    own value, any other argument is the same on all replicas. Replicas communicate by `jdist.all_reduce` and the other
    collectives. A strategy is immutable, except for its cache of compiled functions: a copy is the strategy itself, and a
    pickle builds it again on the devices of the same names.

    Args:
        backend: Runs replica functions on the devices.
        cross_device_ops: The implementation of reductions over the replicas.
        communication_options: The packing of small leaves, and the time limit of collectives.
        arguments: The arguments of the constructor of the strategy's class that build it again, with devices in place of names.
        cluster_resolver: Describes the processes of the strategy, if it was created with one.
    """

    @explains_arguments("base_strategy")
    def __init__(
        self,
        backend: Backend,
        cross_device_ops: CrossDeviceOps = AllReduce(),  # noqa: B008  # immutable
        communication_options: CommunicationOptions = CommunicationOptions(0),  # noqa: B008
        *,
        arguments: Mapping[str, Any],
        cluster_resolver: ClusterResolver | None = None,
    ):
        self._arguments = dict(arguments)
        self._cluster_resolver = cluster_resolver
        self._backend = backend
        self._put_shardings = functools.partial(backend.state_shardings, is_state=False)
        # Replicates the leaves that are stored elsewhere on the mesh.
        self._on_mesh: Callable[[PyTree], PyTree] = lambda tree: tree
        self._context = ReplicaContext.of(self, backend.replicas, cross_device_ops, communication_options)
        self._runs: IdentityCache[Program] = IdentityCache()
        self._inits: IdentityCache[Program] = IdentityCache()
        self._steps: IdentityCache[dict[Any, Program]] = IdentityCache()  # of `jdist.step`, see `Step.on`
        self._spans_processes = _span_joined_processes(self.devices)
        if self._spans_processes:
            watchdog.start(communication_options.timeout_seconds)

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        explain_constructor(cls, "strategy")

    def __repr__(self) -> str:
        return f"{type(self).__name__}({[str(device) for device in self.devices]})"

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuilt, (type(self), with_names(type(self).__name__, self._arguments))

    @property
    def replicas(self) -> Replicas:
        """The number of replicas and their devices."""
        return self._backend.replicas

    @property
    def mesh(self) -> Mesh:
        """The mesh of the devices, in the order of the replicas."""
        return self.replicas.mesh

    @property
    def devices(self) -> tuple[jax.Device, ...]:
        """The devices, in the order of the replicas."""
        return tuple(self.mesh.devices.flat)

    @property
    def num_replicas_in_sync(self) -> int:
        """The number of replicas. In a step of this strategy, the number that the trace is for."""
        context = current_context()
        if isinstance(context, ReplicaContext) and context.strategy is self:
            return context.num_replicas_in_sync
        return self.replicas.size

    @property
    def cluster_resolver(self) -> ClusterResolver | None:
        """The resolver that described the processes; None if the strategy was created without one."""
        return self._cluster_resolver

    def scope(self) -> Scope:
        """Returns a context manager that makes this the current strategy, which `jdist.get_strategy()` returns.

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

    # `run` and steps are declared to return the result of the function. A leaf of it that varies is a `PerReplica` at run
    # time.
    def run(
        self,
        fn: Callable[..., _OutputsT],
        args: Sequence[PyTree] = (),
        kwargs: Mapping[str, PyTree] | None = None,
    ) -> _OutputsT:
        """Calls `fn` once per replica, and returns the results of all replicas.

        The function is compiled at its first call with arguments of these shapes, and cached by its identity: define it once,
        outside the loop. The cache does not keep the function alive, and is freed with it.

        Args:
            fn: A replica function.
            args: Its positional arguments: trees of `PerReplica`, arrays and numbers. On several processes each one passes
                the same numbers.
            kwargs: Its keyword arguments.

        Returns:
            The result of `fn`. A leaf that is proved to be the same on every replica is a plain array `[...]`, any other leaf
            is a `PerReplica` of `[replica, ...]`.

        Raises:
            TypeError: `fn` is not a function, `args` not a tuple, `kwargs` not a mapping, or a result is not a number or an
                array of numbers.
            ValueError: An argument is placed on the devices of another strategy; or an argument or a result is a host integer
                of more than 32 bits, which JAX would truncate to 32 bits.
            DivergentCollectiveError: Some replicas may reach a collective that others do not.

        Example:
            >>> strategy = jdist.MirroredStrategy(["cpu:0", "cpu:1"])
            >>> def spread(x):
            ...     mine = x * jdist.replica_id()
            ...     return {"mine": mine, "all": jdist.all_reduce("sum", mine)}
            >>> strategy.run(spread, (10,))
            {'all': Array(10, dtype=int32), 'mine': PerReplica([ 0, 10], dtype=int32)}
        """
        if not isinstance(args, (tuple, list)):
            raise TypeError(f"`args` is a tuple of arguments, got {describe_type(args)}: write `run(fn, (value,))`.")
        program = self._runs.get(fn, lambda reference: run_program(reference, self._backend, self._context))
        return program(tuple(args), keyword_arguments("run", kwargs))[1]

    @explains_arguments("init", "strategy.init")
    def init(self, fn: Callable[..., _StateT], *args: PyTree) -> _StateT:
        """Creates a state on the devices by a replica function, without a full copy on the host or on one device.

        Args:
            fn: Creates the state from `args`. Each leaf has to be the same on every replica, unless `fn` wraps it, as in
                `jdist.PerReplica(jdist.replica_key(key))`.
            args: The arguments of `fn`: trees of arrays and numbers.

        Returns:
            The result of `fn`, each leaf with the sharding that this strategy gives to a state.

        Raises:
            NotMirroredError: A leaf that is not wrapped may differ between the replicas.
            TypeError: `fn` is not a function; or a leaf is not a number or an array of numbers.
            ValueError: A leaf is a host integer of more than 32 bits, which JAX would truncate to 32 bits.

        Example:
            >>> strategy = jdist.MirroredStrategy(["cpu:0", "cpu:1"])
            >>> state = strategy.init(
            ...     lambda key: {"w": jax.random.normal(key, (3,))}, jax.random.key(0)
            ... )
            >>> len(state["w"].sharding.device_set)
            2
        """
        if not callable(fn):
            raise TypeError(
                f"`fn` must be a function, got {describe_type(fn)}. Pass the function that creates the state, without calling "
                "it: `strategy.init(make_state)`. `strategy.put(value)` places a value that exists."
            )
        program = self._inits.get(fn, lambda reference: init_program(reference, self._backend, self._context))
        names = argument_names(fn, args, {})
        return program(*put(args, self.replicas, self._backend.input_shardings, names))[0]

    @overload
    def step(
        self,
        fn: Callable[Concatenate[_StateT, _InputsT], tuple[Any, _OutputsT]],
        *,
        precision: Precision | None = None,
        steps_per_call: None = None,
        donate: bool = True,
        compiler_options: Mapping[str, Any] | None = None,
        static_argnames: str | Sequence[str] = (),
        view: View = "replica",
        equivalence: Equivalence = "warn",
    ) -> Program[_StateT, _InputsT, _OutputsT]: ...

    @overload
    def step(
        self,
        fn: Callable[Concatenate[_StateT, ...], tuple[Any, _OutputsT]],
        *,
        precision: Precision | None = None,
        steps_per_call: int | None,
        donate: bool = True,
        compiler_options: Mapping[str, Any] | None = None,
        static_argnames: str | Sequence[str] = (),
        view: View = "replica",
        equivalence: Equivalence = "warn",
    ) -> Program[_StateT, ..., _OutputsT]: ...

    @overload
    def step(
        self,
        *,
        precision: Precision | None = None,
        steps_per_call: None = None,
        donate: bool = True,
        compiler_options: Mapping[str, Any] | None = None,
        static_argnames: str | Sequence[str] = (),
        view: View = "replica",
        equivalence: Equivalence = "warn",
    ) -> Callable[
        [Callable[Concatenate[_StateT, _InputsT], tuple[Any, _OutputsT]]], Program[_StateT, _InputsT, _OutputsT]
    ]: ...

    @overload
    def step(
        self,
        *,
        precision: Precision | None = None,
        steps_per_call: int | None,
        donate: bool = True,
        compiler_options: Mapping[str, Any] | None = None,
        static_argnames: str | Sequence[str] = (),
        view: View = "replica",
        equivalence: Equivalence = "warn",
    ) -> Callable[[Callable[Concatenate[_StateT, ...], tuple[Any, _OutputsT]]], Program[_StateT, ..., _OutputsT]]: ...

    @explains_arguments("step", "strategy.step")
    def step(
        self,
        fn: Any = ...,
        *,
        precision: Precision | None = None,
        steps_per_call: int | None = None,
        donate: bool = True,
        compiler_options: Mapping[str, Any] | None = None,
        static_argnames: str | Sequence[str] = (),
        view: View = "replica",
        equivalence: Equivalence = "warn",
    ) -> Any:
        """Compiles a training step from `fn`, a replica function `(state, *inputs) -> (state, outputs)`.

        The first call traces the function. A state leaf that is a plain array has to be proved to be the same on every replica
        after the step, for all inputs; a leaf in a wrapper returns to it. Then the step is compiled, and a call costs as
        much as a call of `jax.jit(jax.shard_map(...))` written by hand. The memory of the state is reused for the new state
        (the state is *donated*): continue with the state that the step returns.

        Args:
            fn: The step of one replica; omitted in `@strategy.step(precision=...)`.
            precision: The dtypes that `jdist.value_and_grad` computes in within the step.
            steps_per_call: The number of steps that one call runs in one program, so that the overhead of a call is shared by
                all of them. Each input is then a list with the input of each step, and each output contains the outputs of all
                steps: leaves `[step, ...]`, or `[replica, step, ...]` in a `PerReplica`. `CentralStorageStrategy` runs
                one program per step instead.
            donate: Whether the new state reuses the memory of the old state. Without donation the old state stays valid, and
                both states need memory.
            compiler_options: Options of XLA for this program, such as `jdist.xla_flags("tpu").compiler_options`.
            static_argnames: The names of the last parameters of `fn` that are Python values while it is traced, such as a flag
                or an optimizer. They are hashable, and each combination of values has its own program.
            view: `"global"` for a step of the global batch that is written for `jax.jit`, without `jdist.all_reduce`. Only a
                strategy with one replica can run it, such as `ShardedStrategy`. The batch is the same value as otherwise
                (`strategy.split`, `distribute_dataset`); every result is a plain array, and none has to be proved.
            equivalence: What to do if the analysis finds a leaf of the new state that is not what one device computes from the
                global batch: `"warn"` (`NotEquivalentWarning`), `"error"` (`NotEquivalentError`), or `"ignore"`, with which the
                step is not analyzed.

        Returns:
            The step for all replicas, a `jdist.Program`, called like `fn`: inputs by position or by name. Its `proof` reports
            which results are replicated, and `__wrapped__` is `fn`. Outputs are like the results of `run`.

        Raises:
            TypeError: `fn` is not a function, or `steps_per_call` not an integer; or, when called, the arguments do not fit the
                parameters of `fn`, or `fn` did not return a pair, or changed a structure, shape or dtype.
            NotMirroredError: When called: a leaf of the new state may differ between the replicas.
            NotEquivalentError: When called, with `equivalence="error"`: a leaf is not what one device computes.
            ValueError: `steps_per_call` is less than 1; `static_argnames` are not the last parameters; `view` or
                `equivalence` is unknown; or `view` is `"global"` and there are several replicas. When called: the state was
                donated before, or is placed on other devices; or an input is not a list of `steps_per_call` values of the same
                shapes.

        Example:
            >>> strategy = jdist.MirroredStrategy(["cpu:0", "cpu:1"])
            >>> @strategy.step
            ... def descend(w, x):
            ...     loss, grad = jax.value_and_grad(lambda w: jax.numpy.mean((w * x) ** 2))(w)
            ...     return w - 0.1 * jdist.all_reduce("mean", grad), jdist.all_reduce("mean", loss)
            >>> w = strategy.init(lambda: jax.numpy.float32(1.0))
            >>> w, loss = descend(w, strategy.split(np.float32([1, 2])))
            >>> float(w), float(loss)
            (0.5, 2.5)
            >>> print(descend.proof)
            2 of 2 results are replicated
            2 of 2 results are what one device computes from the global batch
        """
        options = StepOptions(precision, steps_per_call, donate, compiler_options, static_argnames, view, equivalence)
        if fn is ...:
            return functools.partial(self.step, **vars(options))
        if isinstance(fn, Step):
            raise TypeError(
                f"`{fn.__name__}` is a step already. Its program for this strategy is `{fn.__name__}.on(strategy)`."
            )
        return step_program(fn, options, self._backend, self._context)

    def compile(
        self,
        step: Any,
        state: PyTree,
        *inputs: PyTree,
        compiler_options: Mapping[str, Any] | None = None,
        **named: PyTree,
    ) -> jax.stages.Compiled:
        """Compiles a step for arguments of these shapes, without running it. The devices may be topology devices.

        Args:
            step: The result of `step` or of `jdist.step`, or a function for it.
            state: The state, or its shapes: `jax.eval_shape(lambda key: strategy.init(make, key), key)`.
            inputs: The other arguments of the step: arrays or `jax.ShapeDtypeStruct`s, a batch as `PerReplica` of
                `[replica, batch, ...]`, such as `dataset.element_spec` of a distributed data set.
            compiler_options: Options of XLA, such as `jdist.xla_flags("tpu").compiler_options`.
            named: Inputs by name, and static values.

        Returns:
            The compiled program: `as_text()`, `memory_analysis()` per device, `cost_analysis()`.

        Raises:
            ValueError: The state cannot be placed; another strategy made `step`; or XLA refuses an option.
        """
        if isinstance(step, Step):
            step = step.on(self)
        program = step if isinstance(step, Program) else self.step(step)
        if program.backend is not self._backend:
            raise ValueError(
                "Another strategy made the step. Pass its function, or a step that this strategy made of it."
            )
        check_compiler_options(compiler_options)
        try:
            return program.lower(state, *inputs, **named).compile(program.compiler_options(compiler_options))
        except RuntimeError as error:
            raise_option_error(error)
            raise

    @overload
    def reduce(
        self,
        op: ReduceOp | Literal["sum", "mean", "max", "min"],
        value: DistributedValues,
        axis: int | Sequence[int] | None,
    ) -> PyTree: ...
    @overload
    def reduce(
        self, op: ReduceOp | Literal["sum", "mean", "max", "min"], value: _T, axis: int | Sequence[int] | None
    ) -> _T: ...
    @explains_arguments("reduce", "strategy.reduce")
    def reduce(
        self,
        op: ReduceOp | Literal["sum", "mean", "max", "min"],
        value: PyTree,
        axis: int | Sequence[int] | None,
    ) -> PyTree:
        """Reduces the values of all replicas to one value.

        Args:
            op: `"sum"`, `"mean"`, `"max"` or `"min"`. The mean of integers is a float.
            value: A result of `run`: a tree of wrapped values, of replicated arrays (each replica's copy counts), or of
                `RowSlices`. The mean, maximum and minimum of a host value is the value itself.
            axis: None to reduce over the replicas, element by element. A dimension of one replica's value, or several, to
                reduce over these as well; a mean is then over all elements, however many each replica has. -1 is the last.

        Returns:
            The same tree of plain arrays, replicated.

        Raises:
            ValueError: The operation or the dimension does not exist; or the shapes differ beyond `axis`, all values are empty,
                or a host value is to be summed.
            TypeError: A leaf is boolean, a random key, or complex for an operation that needs an order.

        Example:
            >>> strategy = jdist.MirroredStrategy(["cpu:0", "cpu:1"])
            >>> rows = strategy.distribute_values_from_function(
            ...     lambda c: [1.0, 2.0 + c.replica_id_in_sync_group]
            ... )
            >>> [float(x) for x in strategy.reduce("sum", rows, axis=None)]
            [2.0, 5.0]
        """
        require_cross_replica_context("reduce", "use `jdist.all_reduce` there")
        check_devices_attached(self.mesh)
        arguments = ReduceOp.of(op), self._on_mesh(value), axes_argument(axis), self.replicas
        return _recorded(self, "strategy.reduce", host_reductions.reduce, *arguments)

    @overload
    def gather(self, value: DistributedValues, axis: int) -> PyTree: ...
    @overload
    def gather(self, value: _T, axis: int) -> _T: ...
    def gather(self, value: PyTree, axis: int) -> PyTree:
        """Concatenates the values of all replicas along a dimension.

        Args:
            value: A result of `run`, leaves `[..., n, ...]` per replica, where `n` may differ. A host value is unchanged.
            axis: The dimension of one replica's value to concatenate along; -1 is the last.

        Returns:
            The same tree of plain arrays `[..., sum of n, ...]`, replicated.

        Raises:
            ValueError: A leaf does not have this dimension, or the replicas' shapes differ along another.
            TypeError: `value` contains `RowSlices`, or `axis` is not an integer.

        Example:
            >>> strategy = jdist.MirroredStrategy(["cpu:0", "cpu:1"])
            >>> ids = strategy.run(lambda: jdist.replica_id()[None])
            >>> strategy.gather(ids, axis=0).tolist()
            [0, 1]
        """
        require_cross_replica_context("gather", "use `jdist.all_gather` there")
        check_devices_attached(self.mesh)
        arguments = self._on_mesh(value), axis_argument(axis), self.replicas
        return _recorded(self, "strategy.gather", host_reductions.gather, *arguments)

    def local_results(self, value: PyTree) -> tuple[PyTree, ...]:
        """Returns the value of each replica of this process, one tree per replica; `(value,)` for a host value.

        Example:
            >>> strategy = jdist.MirroredStrategy(["cpu:0", "cpu:1"])
            >>> [int(i) for i in strategy.local_results(strategy.run(jdist.replica_id))]
            [0, 1]
        """
        require_cross_replica_context("local_results")
        return host_reductions.local_results(self._on_mesh(value), self.replicas)

    @overload
    def put(self, tree: complex | np.ndarray | np.generic) -> jax.Array: ...
    @overload
    def put(self, tree: _T) -> _T: ...
    def put(self, tree: PyTree) -> PyTree:
        """Places `tree` on the strategy's devices: plain leaves like a state, wrapped leaves as specified by their wrapper.

        A state of another strategy can continue on this one: a `SyncOnRead` is read, and its value is split over the replicas.

        Raises:
            ValueError: A wrapper does not fit the replicas: the first dimension of its leaves counts them; or, on several
                processes, the processes pass different values.

        Example:
            >>> strategy = jdist.MirroredStrategy(["cpu:0", "cpu:1"])
            >>> len(strategy.put(1.0).sharding.device_set)
            2
        """
        require_cross_replica_context("put")
        check_state_metrics(tree)
        return put(tree, self.replicas, self._put_shardings)

    def shardings(self, tree: PyTree) -> PyTree:
        """Returns the sharding of each leaf of a state on this strategy's devices, as `put` places it.

        Args:
            tree: A state or part of one: arrays or `jax.ShapeDtypeStruct`, some in wrappers.

        Returns:
            The same tree with a `jax.sharding.NamedSharding` for each leaf.

        Raises:
            ValueError: A leaf does not fit the layout of the strategy.

        Example:
            >>> strategy = jdist.MirroredStrategy(["cpu:0", "cpu:1"])
            >>> strategy.shardings({"w": jax.ShapeDtypeStruct((8, 4), "float32")})["w"].spec
            P()
        """
        arrays = to_array_tree(tree)
        return from_array_tree(jax.tree.unflatten(jax.tree.structure(arrays), self._put_shardings(arrays)))

    @overload
    def split(self, batch: np.ndarray, *, axis: int = 0, layout: PyTree = None) -> jax.Array: ...
    @overload
    def split(self, batch: _T, *, axis: int = 0, layout: PyTree = None) -> _T: ...
    def split(self, batch: PyTree, *, axis: int = 0, layout: PyTree = None) -> PyTree:
        """Splits one global batch over the replicas, for a loop that has batches already.

        A batch that a step gets as plain arrays is replicated: every replica computes all of its examples.

        Args:
            batch: A tree of arrays `[batch, ...]`, of numpy or JAX; the number of replicas divides `batch`. On several
                processes each one passes the same global batch, and its devices receive their parts. To read only its own
                part, a process uses `distribute_dataset`.
            axis: The dimension that is split. With 1, the sequences of a batch `[batch, sequence, ...]` are split: replica i
                holds the i-th block of each sequence, and leaves are `[replica, batch, sequence / replica, ...]`. A leaf
                without this dimension is replicated.
            layout: A `jax.sharding.PartitionSpec` of the global batch for all leaves, or a tree of them with the structure
                of the batch or of its upper levels: each names, by dimension, the mesh axes that split it. A leaf with fewer
                dimensions uses the first entries. Under `ShardedStrategy` `PartitionSpec("data", "model")` splits the batch
                over one axis and the sequences over the other. Under other strategies `"replica"` names all replicas,
                other names for the axes of the devices of a replica, and a leaf whose spec does not name `"replica"` is
                replicated.

        Returns:
            The same tree with a `PerReplica` `[replica, batch / replica, ...]` for each leaf, as `distribute_dataset` returns
            it: replica i holds the i-th block of consecutive examples. A step takes a leaf with this sharding.

        Raises:
            TypeError: A leaf is not an array of numbers, or is split already; or `layout` contains other values than specs.
            ValueError: The examples do not split evenly, or the leaves have different numbers of them; or a spec names an axis
                that does not exist, or does not divide its dimension.

        Example:
            >>> strategy = jdist.MirroredStrategy(["cpu:0", "cpu:1"])
            >>> x, y = strategy.split((np.zeros((8, 3), np.float32), np.arange(8)))
            >>> x, y.tree.tolist()
            (PerReplica(float32[2,4,3]), [[0, 1, 2, 3], [4, 5, 6, 7]])
            >>> strategy.split(np.array([[1, 2, 3, 4], [5, 6, 7, 8]]), axis=1).tree.tolist()
            [[[1, 2], [5, 6]], [[3, 4], [7, 8]]]
        """
        require_cross_replica_context("split")
        if layout is not None or as_int("`axis`", axis, 0):
            if layout is not None and axis:
                raise ValueError("`axis` and `layout` both choose the dimension that is split. Pass one of them.")
            chosen = BatchLayout.of_axis(axis, self.replicas) if layout is None else BatchLayout(layout, self.replicas)
            return split_by_layout(batch, chosen, self.replicas)
        return split_batch(batch, self.replicas, self._put_shardings)

    def distribute_values_from_function(self, fn: Callable[[ValueContext], PyTree]) -> PerReplica:
        """Creates one value per replica on the host.

        Args:
            fn: Called once for each replica of this process; all values have the same structure, ranks and dtypes.

        Returns:
            `PerReplica` of the values, `[replica, ...]`. If their shapes differ, it stores the shapes (`PerReplica.padded`).

        Raises:
            ValueError: The values differ in structure, rank or dtype; the message names the leaf.

        Example:
            >>> strategy = jdist.MirroredStrategy(["cpu:0", "cpu:1"])
            >>> strategy.distribute_values_from_function(
            ...     lambda c: {"id": c.replica_id_in_sync_group}
            ... )
            PerReplica({'id': int32[2]})
        """
        require_cross_replica_context("distribute_values_from_function")
        return put_per_replica(
            [fn(ValueContext(i, self.replicas.size)) for i in self.replicas.local_devices], self.replicas
        )

    @explains_arguments("distribute_dataset")
    def distribute_dataset(
        self,
        source: Any,
        batch_size: int | None,
        *,
        shuffle: bool | None = False,
        seed: int = 0,
        epochs: int | None = 1,
        remainder: Remainder = "drop",
        auto_shard: AutoShard = "auto",
        prefetch: int = 2,
        cache: Cache | None = None,
        buckets: Buckets | None = None,
        layout: PyTree = None,
    ) -> DistributedDataset:
        """Returns the batches of a data set, split over the replicas and prefetched to the devices.

        Args:
            source: A tree of arrays `[example, ...]`; a sequence or an iterable of examples; a dataset of grain, TensorFlow,
                torch or Hugging Face; `jdist.data.Files`; a generator function without arguments; a function from the step, 0,
                1, ..., to its batch; or, with `batch_size=None`, a list of batches.
            batch_size: The number of examples in a global batch; a multiple of the number of replicas, unless batches are
                padded. None: the source returns such batches.
            shuffle: Whether each epoch has its own order, a function of `seed` and epoch alone. For sources with random access,
                such as arrays; a stream shuffles its examples itself. None: shuffle if the source has random access.
            seed: An integer.
            epochs: The number of passes over the source; None for endless repetition. A function of the step is endless, so
                more than one epoch of it is refused: end the loop by `itertools.islice(dataset, 1000)`.
            remainder: How the examples that do not fill a batch at the end of an epoch are treated. `"drop"` omits them, and
                logs once how many. `"pad"` includes them: elements are then `(batch, weights)`, with weight 1 for an example
                and 0 for padding. It also fills up every batch to a multiple of the replicas. `"error"` raises an error.
            auto_shard: How several processes share the reading, see `AutoShardPolicy`.
            prefetch: The number of batches to read and transfer in advance. 0 reads the same batches in the loop's thread, for
                debugging.
            cache: `"device"` stores the arrays of the source on every device, when the first batch is read. A batch then
                consists of indices, and the program of the step gathers the examples. Order, values and positions are the same.
            buckets: The widths that batches of varying width are padded to, `jdist.data.Buckets((32, 64, 128))`.
            layout: The dimensions of a batch that are split, as in `split`. The weights of `"pad"` are split like the first
                one. Each of several processes reads the examples that its devices hold, or hold a part of.

        Returns:
            Batches with the structure of the source's elements and `PerReplica` leaves `[replica, batch / replica, ...]`: for
            a source `(x, y)`, `for x, y in dataset`. With `"pad"` pairs, `for (x, y), weights in dataset`. The global batches
            are the same for any number of replicas and processes. With `cache`, a leaf is a wrapper with the values and the
            methods of this `PerReplica`.

        Raises:
            ValueError: The source is not supported, or cannot be shuffled, shared or cached this way, or the batch cannot be
                split. While batches are read: the arrays do not fit in the memory of a device.
            TypeError: A number is not an integer.

        Example:
            >>> strategy = jdist.MirroredStrategy(["cpu:0", "cpu:1"])
            >>> for batch, weights in strategy.distribute_dataset(
            ...     np.arange(3), batch_size=4, remainder="pad"
            ... ):
            ...     print(batch.tree.tolist(), weights.tree.tolist())
            [[0, 1], [2, 0]] [[1.0, 1.0], [1.0, 0.0]]
        """
        return dataset_from_source(
            source,
            batch_size,
            shuffle,
            seed,
            epochs,
            remainder,
            auto_shard,
            prefetch,
            cache,
            buckets,
            self.replicas,
            None if layout is None else BatchLayout(layout, self.replicas),
        )

    def distribute_datasets_from_function(
        self,
        fn: Callable[[InputContext], Any],
        *,
        epochs: int | None = 1,
        remainder: Remainder = "drop",
        prefetch: int = 2,
        batched: bool = True,
    ) -> DistributedDataset:
        """Returns the batches of one input pipeline per process. They end on all processes after the same step.

        Args:
            fn: Called on each process. Returns the batches of its replicas, one after the other: a step takes one for each
                replica. The result is a list, a dataset or another iterable of batches; a generator, and `fn` is called again
                for each further epoch; or a generator function without arguments.
            epochs: See `distribute_dataset`.
            remainder: See `distribute_dataset`. A step in which a replica lacks rows is a partial batch.
            prefetch: See `distribute_dataset`.
            batched: Whether the leaves of an element have a first dimension of rows, equal for all leaves. False: an element is
                any tree of arrays for one replica, such as a padded graph. Its leaves have any shapes, equal for all elements,
                and become `[replica, ...]`; the weights of `"pad"` are `[replica]`, one per element.

        Example:
            >>> strategy = jdist.MirroredStrategy(["cpu:0", "cpu:1"])
            >>> def batches(context):
            ...     size = context.get_per_replica_batch_size(4)
            ...     return (np.arange(i, i + size) for i in range(0, 8, size))
            >>> [
            ...     batch.tree.tolist()
            ...     for batch in strategy.distribute_datasets_from_function(batches)
            ... ]
            [[[0, 1], [2, 3]], [[4, 5], [6, 7]]]
        """
        return dataset_from_function(fn, epochs, remainder, prefetch, batched, self.replicas)

    def describe(self, state: PyTree = None, *, max_rows: int = 40, proof: Proof | None = None) -> Description:
        """Describes the mesh, the devices and the processes, and the placement and size of each leaf of a state.

        Args:
            state: A state, or its shapes, for which the placement is the one that this strategy would choose.
            max_rows: The maximum number of rows in the table of the leaves; similar leaves share a row.
            proof: The proof of a step of this state, `step.proof`: the table has both verdicts on each leaf.

        Example:
            >>> strategy = jdist.ShardedStrategy()
            >>> description = strategy.describe(strategy.put({"w": np.zeros((8, 4), np.float32)}))
            >>> description.leaves[0].placement, description.bytes, description.device_bytes
            ("split dim 0 over 'data' (8 parts)", 128, 16)
        """
        require_cross_replica_context("describe")
        return describe(type(self).__name__, self._backend, state, max_rows, proof)


def _recorded(strategy: Strategy, name: str, collective: Callable[..., PyTree], *arguments: Any) -> PyTree:
    """Returns `collective(*arguments)`, and records it if processes may wait for each other in it."""
    if not strategy._spans_processes or jax_compat.is_tracing():
        return collective(*arguments)
    label = activity.Label(name, launches=launches_on(strategy.mesh), is_collective=True)
    return activity.launch(label, collective, *arguments)


def _span_joined_processes(devices: Sequence[jax.Device]) -> bool:
    """Whether the devices are attached, and several processes that have joined hold them."""
    is_joined = jax.distributed.is_initialized() and not is_topology_device(devices[0])
    return is_joined and len({device.process_index for device in devices}) > 1


def _rebuilt(kind: type[Strategy], arguments: dict[str, Any]) -> Strategy:
    return kind(**with_devices(kind.__name__, arguments))
