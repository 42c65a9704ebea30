"""What every strategy does: run a function of one replica on its devices, and ask what the replicas hold."""

import contextlib
import functools
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from jax.sharding import Mesh

from jdist import reductions
from jdist._identity import IdentityCache
from jdist._tree import PyTree
from jdist.collectives import dims_of
from jdist.context import (
    CrossReplicaContext,
    ReplicaContext,
    ValueContext,
    current,
    entered,
    in_replica_function,
    require_host,
)
from jdist.cross_device_ops import CommunicationOptions, CrossDeviceOps, ways
from jdist.data.batches import Remainder
from jdist.data.dataset import DistributedDataset
from jdist.data.distribute import from_function, from_source
from jdist.data.sharding import AutoShardPolicy, InputContext
from jdist.mesh import Replicas
from jdist.precision import Precision
from jdist.reduce_op import ReduceOp
from jdist.strategies.program import Program, init_program, run_program, step_program
from jdist.values.per_replica import PerReplica
from jdist.values.place import put, put_rows


class Strategy:
    """Where a step runs: one replica a device of a mesh, all running the same function on their own part of the data.

    A replica function is ordinary JAX code. Its arguments are what one replica sees: a `PerReplica` argument is that
    replica's own value, anything else is the same on all. What it says to the other replicas it says with
    `jdist.all_reduce` and its kin. Immutable, but for the compiled functions that it remembers.

    Attributes:
        replicas: How many there are, and on which devices.
    """

    def __init__(
        self,
        mesh: Mesh,
        cross_device_ops: CrossDeviceOps | None = None,
        communication_options: CommunicationOptions | None = None,
        virtual_replicas: int | None = None,
    ):
        mesh, ops, options = ways(mesh, cross_device_ops, communication_options, virtual_replicas is not None)
        self.replicas = Replicas.on(mesh, virtual_replicas)
        self._context = ReplicaContext.of(self, self.replicas, ops, options)
        self._runs: IdentityCache[Program] = IdentityCache()
        self._inits: IdentityCache[Program] = IdentityCache()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({[str(device) for device in self.mesh.devices.flat]})"

    @property
    def mesh(self) -> Mesh:
        """The devices, in the order of the replicas."""
        return self.replicas.mesh

    @property
    def num_replicas_in_sync(self) -> int:
        """How many replicas compute together."""
        return self.replicas.size

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
        program = self._runs.get(fn, lambda reference: run_program(reference, self.replicas, self._context))
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
        program = self._inits.get(fn, lambda reference: init_program(reference, self.replicas, self._context))
        return program(*put(args, self.replicas))[0]

    def step(self, fn: Any = ..., *, precision: Precision | None = None) -> Any:
        """Makes a training step of `fn`, a replica function `(state, *inputs) -> (state, outputs)`.

        At the first call it is traced once. A state leaf that is a plain array has to be proved the same on every replica
        after the step, whatever the inputs; a leaf in a wrapper goes back into it. Then it is compiled, and a call costs what
        one of `jax.jit(jax.shard_map(...))` written by hand costs. The state's memory is given to the new state (it is
        *donated*): go on with what the step returns.

        Args:
            fn: The step of one replica; left out in `@strategy.step(precision=...)`.
            precision: The dtypes that `jdist.value_and_grad` computes in within it.

        Returns:
            The step for all of them, a `Program`, called like `fn` with arguments by position; its `proof` says what was
            proved, and `__wrapped__` is `fn`. Outputs are as `run` gives them.

        Raises:
            TypeError: `fn` is no function; or, when called, returned no pair, or changes a structure, shape or dtype.
            NotMirroredError: When called: a leaf of the new state may differ between the replicas.
            ValueError: When called: the state was donated before, or lies on other devices.

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
            return functools.partial(self.step, precision=precision)
        return step_program(fn, precision, self.replicas, self._context)

    def reduce(self, op: ReduceOp | str, value: PyTree, axis: int | Sequence[int] | None) -> PyTree:
        """One value of what all replicas hold.

        Args:
            op: `"sum"`, `"mean"`, `"max"` or `"min"`. The mean of integers is a float.
            value: A tree of what `run` returned: wrapped values, or arrays that every replica holds (each counts), or
                `RowSlices`. The mean, greatest and least of a host value is itself.
            axis: None to reduce over the replicas, element by element. A dimension of one replica's value, or several, to
                reduce over these as well; a mean is then over all elements, however many each replica has.

        Returns:
            The same tree of plain arrays, held by every replica.

        Raises:
            ValueError: No such operation or dimension, shapes that differ beyond `axis`, all empty, or a sum of a host value.
            TypeError: A leaf is boolean, a random key, or complex where an order is asked for.

        Example:
            >>> strategy = jdist.MirroredStrategy(["cpu:0", "cpu:1"])
            >>> rows = strategy.distribute_values_from_function(lambda c: [1.0, 2.0 + c.replica_id_in_sync_group])
            >>> [float(x) for x in strategy.reduce("sum", rows, axis=None)]
            [2.0, 5.0]
        """
        require_host("reduce", "use `jdist.all_reduce` there")
        return reductions.reduce(ReduceOp.of(op), value, dims_of(axis), self.replicas)

    def gather(self, value: PyTree, axis: int) -> PyTree:
        """What all replicas hold, joined along a dimension.

        Args:
            value: A tree of what `run` returned, leaves `[..., n, ...]` a replica, where `n` may differ; a host value stays.
            axis: The dimension to join along, from 0 up.

        Returns:
            The same tree of plain arrays `[..., sum of n, ...]`, held by every replica.

        Raises:
            ValueError: A leaf has no such dimension, or the replicas' shapes differ along another.
            TypeError: There are `RowSlices` in it.

        Example:
            >>> strategy = jdist.MirroredStrategy(["cpu:0", "cpu:1"])
            >>> ids = strategy.run(lambda: jdist.replica_id()[None])
            >>> strategy.gather(ids, axis=0).tolist()
            [0, 1]
        """
        require_host("gather", "use `jdist.all_gather` there")
        return reductions.gather(value, operator.index(axis), self.replicas)

    def local_results(self, value: PyTree) -> tuple[PyTree, ...]:
        """What each replica of this process holds, one tree a replica; `(value,)` of a host value.

        Example:
            >>> strategy = jdist.MirroredStrategy(["cpu:0", "cpu:1"])
            >>> [int(i) for i in strategy.local_results(strategy.run(jdist.replica_id))]
            [0, 1]
        """
        require_host("local_results")
        return reductions.local_results(value, self.replicas)

    def put(self, tree: PyTree) -> PyTree:
        """`tree` on the strategy's devices: plain leaves on every one, wrapped leaves as their wrapper says.

        So a state goes on with another strategy: what is `SyncOnRead` is read, and shared out among its replicas.

        Raises:
            ValueError: A wrapper does not fit the replicas; or, on several processes, they hand in different values.

        Example:
            >>> strategy = jdist.MirroredStrategy(["cpu:0", "cpu:1"])
            >>> len(strategy.put(1.0).sharding.device_set)
            2
        """
        require_host("put")
        return put(tree, self.replicas)

    def distribute_values_from_function(self, fn: Callable[[ValueContext], PyTree]) -> PerReplica:
        """A value for each replica, made on the host.

        Args:
            fn: Called once for each replica of this process; all values have the same structure, ranks and dtypes.

        Returns:
            `PerReplica` of the values, `[replica, ...]`; where their shapes differ, it remembers them (`PerReplica.padded`).

        Raises:
            ValueError: The values are not alike; the message names the leaf.

        Example:
            >>> strategy = jdist.MirroredStrategy(["cpu:0", "cpu:1"])
            >>> strategy.distribute_values_from_function(lambda c: {"id": c.replica_id_in_sync_group})
            PerReplica({'id': int32[2]})
        """
        require_host("distribute_values_from_function")
        return put_rows([fn(ValueContext(i, self.replicas.size)) for i in self.replicas.local], self.replicas)

    def distribute_dataset(
        self,
        source: Any,
        batch_size: int | None,
        *,
        shuffle: bool = False,
        seed: int = 0,
        epochs: int | None = 1,
        remainder: Remainder = "drop",
        auto_shard: AutoShardPolicy | str = "auto",
        prefetch: int = 2,
    ) -> DistributedDataset:
        """Batches of examples, one part a replica, on the devices before the step asks for them.

        Args:
            source: A tree of arrays `[example, ...]`; a sequence or an iterable of examples; a dataset of grain, TensorFlow,
                torch or Hugging Face; `jdist.data.Files`; or a function from the step, 0, 1, ..., to its batch.
            batch_size: Examples in a batch of all replicas together, which divide it. None: the source gives such batches.
            shuffle: Whether each epoch has an order of its own, a function of `seed` and epoch alone. For examples that are
                found by their numbers, as in arrays; a stream shuffles itself.
            seed: A whole number.
            epochs: How often to go through them; None for ever.
            remainder: What becomes of the examples that do not fill a batch at the end of an epoch. `"drop"` leaves them
                out, and says once how many. `"pad"` keeps them: elements are then `(batch, weights)`, with weight 1 for an
                example and 0 for a row that only fills up. `"error"` refuses them.
            auto_shard: Who reads what, where there are several processes, see `AutoShardPolicy`.
            prefetch: How many batches to read and send ahead; 0, for debugging, gives the same from the loop's thread.

        Returns:
            `PerReplica` batches with leaves `[replica, batch / replica, ...]`, or pairs of two. The global batches are the same
            for any number of replicas and processes.

        Raises:
            ValueError: There is no such source, it cannot be shuffled or shared out so, or the batch cannot be split.

        Example:
            >>> strategy = jdist.MirroredStrategy(["cpu:0", "cpu:1"])
            >>> for batch, weights in strategy.distribute_dataset(np.arange(3), batch_size=4, remainder="pad"):
            ...     print(batch.tree.tolist(), weights.tree.tolist())
            [[0, 1], [2, 0]] [[1.0, 1.0], [1.0, 0.0]]
        """
        return from_source(source, batch_size, shuffle, seed, epochs, remainder, auto_shard, prefetch, self.replicas)

    def distribute_datasets_from_function(
        self,
        fn: Callable[[InputContext], Any],
        *,
        epochs: int | None = 1,
        remainder: Remainder = "drop",
        prefetch: int = 2,
    ) -> DistributedDataset:
        """Batches from an input pipeline of each process's own; they end on all processes at once.

        Args:
            fn: Called once on each process. Gives its replicas' batches, one after the other: a step takes one for each.
            epochs: As in `distribute_dataset`.
            remainder: As there; a step where a replica lacks rows is a partial batch.
            prefetch: As there.

        Example:
            >>> strategy = jdist.MirroredStrategy(["cpu:0", "cpu:1"])
            >>> def batches(context):
            ...     size = context.get_per_replica_batch_size(4)
            ...     return (np.arange(i, i + size) for i in range(0, 8, size))
            >>> [batch.tree.tolist() for batch in strategy.distribute_datasets_from_function(batches)]
            [[[0, 1], [2, 3]], [[4, 5], [6, 7]]]
        """
        return from_function(fn, epochs, remainder, prefetch, self.replicas)
