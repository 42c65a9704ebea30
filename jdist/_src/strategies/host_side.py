"""What the host program asks of the replicas, and hands to them."""

from collections.abc import Callable, Sequence
from typing import Any

from jax.sharding import Mesh

from jdist._src.collectives.ops import axes_argument, axis_argument
from jdist._src.core.tree import PyTree
from jdist._src.data.config import Remainder
from jdist._src.data.dataset import DistributedDataset
from jdist._src.data.distribute import dataset_from_function, dataset_from_source
from jdist._src.data.shards import AutoShard, InputContext
from jdist._src.devices.mesh import Replicas
from jdist._src.execution.backend import Backend
from jdist._src.replica.context import ValueContext, require_cross_replica_context
from jdist._src.strategies import host_reductions
from jdist._src.strategies.description import Description, describe
from jdist._src.values.device_put import check_devices_attached, put, put_per_replica, split_batch
from jdist._src.values.per_replica import PerReplica
from jdist._src.values.reduce_op import ReduceOp


class HostSide:
    """The half of a strategy that runs no replica function: the other half is `Strategy`, which has its fields."""

    _backend: Backend

    @property
    def replicas(self) -> Replicas:
        """How many replicas there are, and on which devices."""
        return self._backend.replicas

    @property
    def mesh(self) -> Mesh:
        """The devices, in the order of the replicas."""
        return self.replicas.mesh

    @property
    def num_replicas_in_sync(self) -> int:
        """How many replicas compute together."""
        return self.replicas.size

    def reduce(self, op: ReduceOp | str, value: PyTree, axis: int | Sequence[int] | None) -> PyTree:
        """One value of what all replicas hold.

        Args:
            op: `"sum"`, `"mean"`, `"max"` or `"min"`. The mean of integers is a float.
            value: A tree of what `run` returned: wrapped values, or arrays that every replica holds (each counts), or
                `RowSlices`. The mean, greatest and least of a host value is itself.
            axis: None to reduce over the replicas, element by element. A dimension of one replica's value, or several, to
                reduce over these as well; a mean is then over all elements, however many each replica has. -1 is the last.

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
        require_cross_replica_context("reduce", "use `jdist.all_reduce` there")
        check_devices_attached(self.mesh)
        return host_reductions.reduce(ReduceOp.of(op), self._backend.fetched(value), axes_argument(axis), self.replicas)

    def gather(self, value: PyTree, axis: int) -> PyTree:
        """What all replicas hold, joined along a dimension.

        Args:
            value: A tree of what `run` returned, leaves `[..., n, ...]` a replica, where `n` may differ; a host value stays.
            axis: The dimension of one replica's value to join along; -1 is the last.

        Returns:
            The same tree of plain arrays `[..., sum of n, ...]`, held by every replica.

        Raises:
            ValueError: A leaf has no such dimension, or the replicas' shapes differ along another.
            TypeError: There are `RowSlices` in it, or `axis` is not a whole number.

        Example:
            >>> strategy = jdist.MirroredStrategy(["cpu:0", "cpu:1"])
            >>> ids = strategy.run(lambda: jdist.replica_id()[None])
            >>> strategy.gather(ids, axis=0).tolist()
            [0, 1]
        """
        require_cross_replica_context("gather", "use `jdist.all_gather` there")
        check_devices_attached(self.mesh)
        return host_reductions.gather(self._backend.fetched(value), axis_argument(axis), self.replicas)

    def local_results(self, value: PyTree) -> tuple[PyTree, ...]:
        """What each replica of this process holds, one tree a replica; `(value,)` of a host value.

        Example:
            >>> strategy = jdist.MirroredStrategy(["cpu:0", "cpu:1"])
            >>> [int(i) for i in strategy.local_results(strategy.run(jdist.replica_id))]
            [0, 1]
        """
        require_cross_replica_context("local_results")
        return host_reductions.local_results(self._backend.fetched(value), self.replicas)

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
        require_cross_replica_context("put")
        return put(tree, self.replicas, lambda tree: self._backend.shardings(tree, is_state=False))

    def split(self, batch: PyTree) -> PyTree:
        """Splits one global batch over the replicas, for a loop that has batches already.

        A batch that a step gets as plain arrays is replicated: every replica computes all of its examples.

        Args:
            batch: A tree of arrays `[batch, ...]`, of numpy or JAX; the number of replicas divides `batch`. On several
                processes each one passes the same global batch, and its devices receive their parts. To read only its own
                part, a process uses `distribute_dataset`.

        Returns:
            The same tree with a `PerReplica` `[replica, batch / replica, ...]` for each leaf, as `distribute_dataset` returns
            it: replica i holds the i-th block of consecutive examples.

        Raises:
            TypeError: A leaf is not an array of numbers, or is split already.
            ValueError: The examples do not split evenly, or the leaves have different numbers of them.

        Example:
            >>> strategy = jdist.MirroredStrategy(["cpu:0", "cpu:1"])
            >>> x, y = strategy.split((np.zeros((8, 3), np.float32), np.arange(8)))
            >>> x, y.tree.tolist()
            (PerReplica(float32[2,4,3]), [[0, 1, 2, 3], [4, 5, 6, 7]])
        """
        require_cross_replica_context("split")
        return split_batch(batch, self.replicas, lambda tree: self._backend.shardings(tree, is_state=False))

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
        require_cross_replica_context("distribute_values_from_function")
        return put_per_replica([fn(ValueContext(i, self.replicas.size)) for i in self.replicas.local], self.replicas)

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
    ) -> DistributedDataset:
        """Batches of examples, one part a replica, on the devices before the step asks for them.

        Args:
            source: A tree of arrays `[example, ...]`; a sequence or an iterable of examples; a dataset of grain, TensorFlow,
                torch or Hugging Face; `jdist.data.Files`; a generator function without arguments; or a function from the step,
                0, 1, ..., to its batch.
            batch_size: Examples in a batch of all replicas together, which divide it. None: the source gives such batches.
            shuffle: Whether each epoch has an order of its own, a function of `seed` and epoch alone. For examples that are
                found by their numbers, as in arrays; a stream shuffles itself. None: if they are.
            seed: A whole number.
            epochs: How often to go through them; None for ever. A function of the step has no end, so more than one epoch of
                it is refused: end the loop by `itertools.islice(dataset, 1000)`.
            remainder: What becomes of the examples that do not fill a batch at the end of an epoch. `"drop"` leaves them
                out, and says once how many. `"pad"` keeps them: elements are then `(batch, weights)`, with weight 1 for an
                example and 0 for a row that only fills up. `"error"` refuses them.
            auto_shard: Who reads what, where there are several processes, see `AutoShardPolicy`.
            prefetch: How many batches to read and send ahead; 0, for debugging, gives the same from the loop's thread.

        Returns:
            Batches with the structure of the source's elements and `PerReplica` leaves `[replica, batch / replica, ...]`: of
            a source `(x, y)`, `for x, y in dataset`. With `"pad"` pairs, `for (x, y), weights in dataset`. The global batches
            are the same for any number of replicas and processes.

        Raises:
            ValueError: There is no such source, it cannot be shuffled or shared out so, or the batch cannot be split.
            TypeError: A number is no whole one.

        Example:
            >>> strategy = jdist.MirroredStrategy(["cpu:0", "cpu:1"])
            >>> for batch, weights in strategy.distribute_dataset(np.arange(3), batch_size=4, remainder="pad"):
            ...     print(batch.tree.tolist(), weights.tree.tolist())
            [[0, 1], [2, 0]] [[1.0, 1.0], [1.0, 0.0]]
        """
        return dataset_from_source(
            source, batch_size, shuffle, seed, epochs, remainder, auto_shard, prefetch, self.replicas
        )

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
            fn: Called on each process. Returns the batches of its replicas, one after the other: a step takes one for each
                replica. A list, a dataset or another iterable of batches; a generator, and `fn` is called again for each
                further epoch; or a generator function without arguments.
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
        return dataset_from_function(fn, epochs, remainder, prefetch, self.replicas)

    def describe(self, state: PyTree = None, max_rows: int = 40) -> Description:
        """The mesh, the devices and the processes, and where each leaf of a state lies and what it takes; to be printed.

        Args:
            state: A state, or its shapes, for which it says where it would lie.
            max_rows: How many rows the table of the leaves has at most; similar leaves share one.

        Example:
            >>> strategy = jdist.ShardedStrategy()
            >>> found = strategy.describe(strategy.put({"w": np.zeros((8, 4), np.float32)}))
            >>> found.leaves[0].placement, found.bytes, found.device_bytes
            ("split dim 0 over 'data' (8 parts)", 128, 16)
        """
        require_cross_replica_context("describe")
        return describe(type(self).__name__, self._backend, state, max_rows)
