"""Names of `tf.distribute`, JAX, torch, Accelerate, Horovod and Keras that jdist does not have, with the line to write instead.

`docs/from_tf_distribute.md` is the guide for moving a program from TensorFlow, `docs/coming_from.md` for the others.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeAlias, TypeVar

T = TypeVar("T")
# The library, the advice for each of its names, and the end of the message. Without a library, the advice is a sentence.
Table: TypeAlias = tuple[str, Mapping[str, str], str]

_BATCHES = "write `strategy.distribute_dataset(source, batch_size)`, with the global batch size"
_DEPRECATED = "deprecated in TensorFlow; jdist does not have it"
_LAYOUT = "write `jdist.ShardedStrategy(mesh=mesh, model_axis=..., layout=...)`, which shards the parameters"
_PROCESSES = "call `jax.distributed.initialize()` in each process"
_RESOLVER = "write `jdist.cluster.{}`, or `jdist.cluster.resolve()`, which finds the resolver of the environment"
_CENTRAL = "not needed: `jdist.CentralStorageStrategy` stores plain arrays"
_STATE = "write a plain array in the state, or `jdist.Mirrored(x, aggregation)`"
_COMMUNICATION = "not configurable: XLA uses NCCL on GPUs, the interconnect on TPUs, and gloo between CPU processes"

STRATEGY_NAMES = {
    "colocate_vars_with": _DEPRECATED,
    "configure": _DEPRECATED,
    "experimental_assign_to_logical_device": _LAYOUT,
    "experimental_distribute_dataset": _BATCHES,
    "experimental_distribute_datasets_from_function": "write `strategy.distribute_datasets_from_function(fn)`",
    "experimental_distribute_values_from_function": "write `strategy.distribute_values_from_function(fn)`",
    "experimental_local_results": "write `strategy.local_results(value)`",
    "experimental_make_numpy_dataset": "write `strategy.distribute_dataset(arrays, batch_size)`",
    "experimental_replicate_to_logical_devices": _LAYOUT,
    "experimental_run": _DEPRECATED + ": write `strategy.run(fn, args)`",
    "experimental_run_v2": "write `strategy.run(fn, args)`",
    "experimental_split_to_logical_devices": _LAYOUT,
    "extended": (
        "not needed: `strategy.reduce` replaces `reduce_to` and `batch_reduce_to`, `strategy.mesh.devices` replaces "
        "`worker_devices` and `parameter_devices`, and a step or `value.map(fn)` replaces `update`"
    ),
    "group": "not needed: JAX has no graph of operations to group",
    "make_dataset_iterator": f"{_DEPRECATED}: {_BATCHES}",
    "make_input_fn_iterator": f"{_DEPRECATED}: write `strategy.distribute_datasets_from_function(fn)`",
    "batch_reduce_to": "write `strategy.reduce(op, tree, axis=None)`",
    "parameter_devices": "write `strategy.devices`",
    "reduce_to": "write `strategy.reduce(op, value, axis=None)`",
    "unwrap": "write `strategy.local_results(value)`",
    "update_config_proto": _DEPRECATED,
    "worker_devices": "write `strategy.devices`",
}

MODULE_NAMES = {
    "Checkpoint": "write `jdist.Checkpointer(path)`; the callback of `Trainer.fit` is `jdist.callbacks.Checkpoint`",
    "ClusterResolver": _RESOLVER.format("ClusterResolver"),
    "KubernetesExecutableLocation": "not needed: pass `client=` to `jdist.cluster.KubernetesClusterResolver`",
    "PerWorkerValue": "write `jdist.coordinator.PerWorkerValues(values)`",
    "PreemptionWatcher": "write `jdist.PreemptionCheckpointHandler(checkpointer)`, or `jdist.callbacks.Preemption` for `fit`",
    "RemoteValue": "write `jdist.coordinator.RemoteValue`, which `ClusterCoordinator.schedule` returns",
    "SHARD_HINT": 'write `auto_shard="hint"`, which calls `source.shard(num_shards=, index=)`',
    "TerminationConfig": "write `jdist.PreemptionCheckpointHandler(checkpointer, watcher=, exit_fn=)`",
    "experimental_get_current_worker_index": "write `jdist.coordinator.get_current_worker_index()`",
    "AggregatingVariable": _CENTRAL,
    "CachingVariable": _CENTRAL,
    "CollectiveCommunication": _COMMUNICATION,
    "CollectiveHints": "write `jdist.CommunicationOptions(bytes_per_pack)`",
    "CommunicationImplementation": _COMMUNICATION,
    "ClusterCoordinator": "write `jdist.coordinator.ClusterCoordinator(strategy)`",
    "DistributedDelegate": "not needed: inside a replica function a value is a plain array",
    "DistributedTable": "use a dictionary on the host, and look values up before the step",
    "DistributedVariable": _STATE,
    "GCEClusterResolver": _RESOLVER.format("GCEClusterResolver"),
    "HierarchicalCopyAllReduce": "write `jdist.HierarchicalAllReduce(group_size)`",
    "InputOptions": "write `prefetch=` and `auto_shard=` of `strategy.distribute_dataset`",
    "InputReplicationMode": "not needed: an input pipeline places the batches of all replicas of its process on their devices",
    "KubernetesClusterResolver": _RESOLVER.format("KubernetesClusterResolver"),
    "MirroredVariable": _STATE,
    "NcclAllReduce": "write `jdist.AllReduce()`, which uses NCCL on GPUs",
    "PerWorkerValues": "write `jdist.coordinator.PerWorkerValues(values)`",
    "PerWorkerVariable": "write `jdist.coordinator.ClusterCoordinator(strategy).per_worker_values(fn)`",
    "RunOptions": "not needed: shapes are static, and every step is compiled",
    "Server": f"not needed: {_PROCESSES}",
    "ShardedVariable": "write `jdist.Sharded(x)`",
    "SimpleClusterResolver": _RESOLVER.format("SimpleClusterResolver"),
    "SlurmClusterResolver": _RESOLVER.format("SlurmClusterResolver"),
    "StrategyExtended": "not needed: see `jdist.Strategy`",
    "SyncOnReadVariable": "write `jdist.SyncOnRead(x, aggregation)`",
    "TFConfigClusterResolver": _RESOLVER.format("TFConfigClusterResolver"),
    "TPUClusterResolver": _RESOLVER.format("TPUClusterResolver"),
    "UnionResolver": _RESOLVER.format("UnionResolver"),
    "cluster_resolver": "write `jdist.cluster`, with `jdist.cluster.resolve()` and the resolvers",
    "experimental": (
        "its names are in `jdist`: `jdist.CentralStorageStrategy`, `jdist.CommunicationOptions`, `jdist.ValueContext`, "
        "`jdist.auto_strategy()`"
    ),
    "experimental_set_strategy": "write `jdist.set_strategy(strategy)`",
}


_REPLICA_FUNCTION = "in a function that `strategy.run` or `strategy.step` runs"
_PROGRAM = "write `strategy.run(fn, args)`, or `@strategy.step` for a training step"
_JAX_DEVICES = "write `strategy.mesh.devices`, or `jax.devices()`"
_JAX_PROCESSES = "write `jax.process_index()` and `jax.process_count()`"
_JAX_LAYOUT = "write `jdist.ShardedStrategy(mesh=mesh, layout=...)` to shard a state, with `jax.sharding.PartitionSpec`"

# First guesses of JAX users: names of `jax`, `jax.lax`, `jax.sharding` and `flax.jax_utils`.
JAX_NAMES = {
    "Mesh": "write `jax.make_mesh`, and pass the mesh to `jdist.ShardedStrategy(mesh=mesh)`",
    "NamedSharding": _JAX_LAYOUT,
    "P": _JAX_LAYOUT,
    "PartitionSpec": _JAX_LAYOUT,
    "all_to_all": f'write `jax.lax.all_to_all(x, "replica", ...)` {_REPLICA_FUNCTION}',
    "axis_index": f"write `jdist.replica_id()` {_REPLICA_FUNCTION}",
    "axis_size": f"write `jdist.num_replicas()` {_REPLICA_FUNCTION}",
    "device_count": _JAX_DEVICES,
    "device_get": "write `jdist.read_values(tree)`, or `jax.device_get(tree)`",
    "device_put": "write `strategy.put(tree)` for replicated values, `strategy.put(jdist.PerReplica(tree))` for varying ones",
    "devices": _JAX_DEVICES,
    "distributed": _PROCESSES,
    "grad": f"write `jdist.value_and_grad`, or `jax.grad` {_REPLICA_FUNCTION}",
    "initialize": _PROCESSES,
    "jit": f"{_PROGRAM}; both compile `fn`",
    "local_device_count": _JAX_DEVICES,
    "local_devices": _JAX_DEVICES,
    "mean": "write `jdist.global_mean(values)` for the mean over all examples, `jdist.sync.mean()` for gradients",
    "make_mesh": "write `jax.make_mesh`, and pass the mesh to `jdist.ShardedStrategy(mesh=mesh)`",
    "pmap": _PROGRAM,
    "pmax": f'write `jdist.all_reduce("max", tree)` {_REPLICA_FUNCTION}',
    "pmean": f'write `jdist.all_reduce("mean", tree)` {_REPLICA_FUNCTION}',
    "pmin": f'write `jdist.all_reduce("min", tree)` {_REPLICA_FUNCTION}',
    "ppermute": f'write `jax.lax.ppermute(x, "replica", perm)` {_REPLICA_FUNCTION}',
    "process_count": _JAX_PROCESSES,
    "process_index": _JAX_PROCESSES,
    "psum": f'write `jdist.all_reduce("sum", tree)` {_REPLICA_FUNCTION}',
    "psum_scatter": f'write `jdist.reduce_scatter("sum", tree)` {_REPLICA_FUNCTION}',
    "replicate": "write `strategy.put(tree)`",
    "shard_map": f"{_PROGRAM}; both run `fn` in a `jax.shard_map` over the replicas",
    "unreplicate": "not needed: a replicated value is a plain array",
    "with_sharding_constraint": "write `jax.lax.with_sharding_constraint` in a step of `jdist.ShardedStrategy`",
}

_WRAP = "write `jdist.MirroredStrategy()`, or `jdist.MultiWorkerMirroredStrategy()` in several processes"
_SHARD = 'write `jdist.ShardedStrategy("all")`, which shards parameters, gradients and optimizer state'
_JOIN = "not needed: `jdist.MultiWorkerMirroredStrategy()` joins the processes that `jdist run -n N train.py` starts"
_SYNC = "not needed: `strategy.init` creates the same state on all replicas"
_WAIT = "not needed: a step waits for all replicas; `jax.experimental.multihost_utils.sync_global_devices(name)` is a barrier"
_REDUCE = f'write `jdist.all_reduce("mean", tree)` {_REPLICA_FUNCTION}'
_RANK = f"write `jax.process_index()` on the host, or `jdist.replica_id()` {_REPLICA_FUNCTION}"
_SIZE = "write `strategy.num_replicas_in_sync`, or `jax.process_count()` for processes"
_FEED = "write `strategy.distribute_dataset(source, batch_size)`, which divides the batches over the replicas"
_ACCUMULATE = "write `jdist.sync.every(optimizer, k)`, or `micro_batches=k` of `Trainer.fit`"

# Names of `torch.distributed`, Accelerate and Horovod.
TORCH_NAMES = {
    "Accelerator": _WRAP,
    "DataParallel": _WRAP,
    "DistributedDataParallel": _WRAP,
    "DistributedOptimizer": "write `optax.chain(jdist.sync.mean(), optimizer)`",
    "DistributedSampler": _FEED,
    "FSDP": _SHARD,
    "FullyShardedDataParallel": _SHARD,
    "accumulate": _ACCUMULATE,
    "all_gather_into_tensor": f"write `jdist.all_gather(tree)` {_REPLICA_FUNCTION}",
    "allgather": f"write `jdist.all_gather(tree)` {_REPLICA_FUNCTION}",
    "allreduce": _REDUCE,
    "average": _REDUCE,
    "barrier": _WAIT,
    "broadcast_optimizer_state": _SYNC,
    "broadcast_parameters": _SYNC,
    "fully_shard": _SHARD,
    "gather": "write `strategy.gather(value, axis)`",
    "get_rank": _RANK,
    "get_world_size": _SIZE,
    "init_process_group": _JOIN,
    "is_initialized": _JOIN,
    "is_main_process": "write `jax.process_index() == 0`",
    "launch": "write `jdist run -n N train.py` in a shell",
    "local_rank": "not needed: the strategy selects the devices of the process",
    "local_size": _JAX_DEVICES,
    "no_sync": _ACCUMULATE,
    "prepare": f"{_WRAP}, and {_FEED.removeprefix('write ')}",
    "rank": _RANK,
    "reduce_scatter_tensor": f'write `jdist.reduce_scatter("sum", tree)` {_REPLICA_FUNCTION}',
    "shard": "write `strategy.split(batch)` for a batch, `jdist.ShardedStrategy` for a state",
    "size": _SIZE,
    "wait_for_everyone": _WAIT,
    "world_size": _SIZE,
}

# Callbacks of Keras and Lightning.
CALLBACK_NAMES = {
    "BackupAndRestore": "write `fit(resume=jdist.Checkpointer(path))`",
    "CSVLogger": 'write `jdist.callbacks.CSVLog("log.csv")`',
    "GradientAccumulationScheduler": "write `micro_batches=k` of `Trainer.fit`, or `jdist.sync.every(optimizer, k)`",
    "History": "not needed: `Trainer.fit` returns it, `fit.history`",
    "LambdaCallback": "not needed: a function of a `jdist.callbacks.Event` is a callback",
    "LearningRateMonitor": "write `jdist.callbacks.learning_rate`",
    "LearningRateScheduler": "pass a schedule of optax to the optimizer: `optax.adam(optax.cosine_decay_schedule(...))`",
    "ModelCheckpoint": "write `jdist.callbacks.Checkpoint(jdist.Checkpointer(path))`",
    "ProgbarLogger": 'write `fit(progress="bar")`',
    "ReduceLROnPlateau": "write `optax.contrib.reduce_on_plateau` in the optimizer",
    "TerminateOnNaN": 'not needed: it is the default of a `jdist.Trainer`, `non_finite="stop"`',
    "Timer": "write `jdist.callbacks.TimeLimit(seconds)`",
    "WandbLogger": "write a function of a `jdist.callbacks.Event` that logs `event.metrics`",
}

SYNC_NAMES = {
    "all_reduce": "write `jdist.sync.mean()`, or `jdist.all_reduce` in a step",
    "allreduce": "write `jdist.sync.mean()`",
    "average": "write `jdist.sync.mean()`",
    "accumulate": "write `jdist.sync.every(optimizer, k)`",
    "bfloat16": "write `jdist.sync.in_dtype(jnp.bfloat16)`",
    "fp16": "write `jdist.sync.in_dtype(jnp.float16)`",
    "none": "not needed: without a policy, gradients are not reduced",
    "pmean": "write `jdist.sync.mean()`",
    "psum": "write `jdist.sync.sum()`",
    "quantize": "write `jdist.sync.int8()`",
}

_CLOSE_OVER = (
    "bind it before, `strategy.step(functools.partial(fn, name=value))`, or close over it; `@jdist.step` has "
    "`static_argnames`"
)
_ARRAYS_AND_WRAPPERS = (
    "not needed: a `jdist.PerReplica` is split (`strategy.split(batch)`), any other argument is replicated"
)
# Arguments of `jax.jit`, `jax.pmap` and `jax.shard_map` that steps do not have.
STEP_ARGUMENTS = {
    **dict.fromkeys(("static_argnums", "static_argnames", "static_broadcasted_argnums"), _CLOSE_OVER),
    **dict.fromkeys(
        ("donate_argnums", "donate_argnames"),
        "the state is donated, unless you write `strategy.step(fn, donate=False)`",
    ),
    **dict.fromkeys(
        ("in_axes", "out_axes", "in_specs", "out_specs", "in_shardings", "out_shardings"), _ARRAYS_AND_WRAPPERS
    ),
    **dict.fromkeys(
        ("devices", "axis_size", "mesh"), "the strategy has the devices, `jdist.MirroredStrategy(devices)`"
    ),
    "axis_name": 'the strategy has the name, `jdist.MirroredStrategy(axis_name="batch")`',
}


def check_no_other_arguments(function: str, names: Iterable[str], accepted: str) -> None:
    """Raises TypeError if there are `names` of arguments that `function` does not have.

    Args:
        function: `strategy.step` or `jdist.step`.
        names: The names of the arguments that it received and does not have.
        accepted: The arguments that it has, for the message.
    """
    for name in names:
        advice = STEP_ARGUMENTS.get(name, f"its arguments are {accepted}")
        raise TypeError(f"`{function}` has no argument `{name}`: {advice}.")


DATASET_NAMES = {
    "cardinality": "write `len(dataset)`",
    "get_next": "write `next(iterator)`",
    "get_next_as_optional": "write `next(iterator, None)`",
    "make_initializable_iterator": "write `iter(dataset)`",
    **dict.fromkeys(
        ("batch", "filter", "map", "padded_batch", "reduce", "repeat", "shard", "skip", "take", "unbatch"),
        "not possible on batches that are on the devices: transform the source, or write a loop over the batches",
    ),
}
VALUE_NAMES = {
    "cpu": "write `jax.device_get(value.read())`",
    "detach": "write `jax.lax.stop_gradient` in a replica function",
    "mean": 'write `strategy.reduce("mean", value, axis=None)`, or `jdist.all_reduce("mean", x)` in a replica function',
    "numpy": "write `value.values`, one array per replica, or `strategy.gather(value, axis=0)`",
    "primary": "write `value.values[0]`",
    "read_value": "write `value.read()`, or `value.values` for one value per replica",
    "sum": 'write `strategy.reduce("sum", value, axis=None)`, or `jdist.all_reduce("sum", x)` in a replica function',
    "value": "write `value.values`, one value per replica",
}

REPLICA_CONTEXT_NAMES = {
    "devices": "write `strategy.devices` on the host; a replica function runs on the device of its replica",
    "replica_id": "write `jdist.replica_id()`",
    "num_replicas": "write `jdist.num_replicas()`",
}

# Names of arguments in other libraries.
FIT_ARGUMENTS = {
    **dict.fromkeys(("num_epochs", "max_epochs", "n_epochs", "num_train_epochs"), "Write `epochs=`."),
    **dict.fromkeys(("max_steps", "num_steps", "steps_per_epoch"), "Write `steps=`, the number of all steps."),
    "validation_split": "Divide the data, and pass `validation_data=`.",
    "verbose": 'Write `progress="off"`, or another kind of display.',
    "accumulate_grad_batches": "Write `micro_batches=`.",
    "gradient_accumulation_steps": "Write `micro_batches=`.",
    "initial_epoch": "Write `resume=jdist.Checkpointer(path)`.",
    "ckpt_path": "Write `resume=jdist.Checkpointer(path)`.",
    "val_data": "Write `validation_data=`.",
    "val_dataloaders": "Write `validation_data=`.",
    "train_dataloaders": "Pass the data as the first argument.",
    "x": "Pass the data as the first argument: `fit((x, y), batch_size=...)`.",
    "y": "Pass the data as the first argument: `fit((x, y), batch_size=...)`.",
    "sample_weight": "Pass the weights with the data: `fit((x, y, weights), batch_size=...)`.",
}
TRAINER_ARGUMENTS = {
    **dict.fromkeys(
        ("learning_rate", "lr"), "Pass the rate to the optimizer: `Trainer(model, optax.adam(1e-3), loss)`."
    ),
    **dict.fromkeys(("devices", "num_devices", "accelerator"), "Write `strategy=jdist.MirroredStrategy(devices)`."),
    **dict.fromkeys(("max_epochs", "num_epochs", "epochs"), "Write `trainer.fit(data, epochs=...)`."),
    "callbacks": "Write `trainer.fit(data, callbacks=[...])`.",
    "batch_size": "Write `trainer.fit(data, batch_size=...)`.",
}
STRATEGY_ARGUMENTS = {
    **dict.fromkeys(
        ("num_replicas", "num_devices", "num_gpus", "world_size"),
        'Pass the devices: `jdist.MirroredStrategy(jax.devices()[:2])`, or names, `["gpu:0", "gpu:1"]`.',
    ),
    "devices": "Pass a mesh: `mesh=jax.sharding.Mesh(devices, ('data',))`.",
    "gpus": "Pass the devices: `jdist.MirroredStrategy(jax.devices())`.",
}


def missing_attribute_error(owner_name: str, name: str, *tables: Table, owner: Any = None) -> AttributeError:
    """Returns the error for an attribute that does not exist, with the line to write if it is a name of another library.

    Args:
        owner_name: The object or module as the error names it.
        name: The attribute.
        tables: The names of each library.
        owner: The object or module. Python looks for similar names in it.
    """
    for library, advice, end in tables:
        if name in advice:
            line = f"{library} `{name}`: {advice[name]}.{end}" if library else advice[name]
            return AttributeError(f"{owner_name} has no attribute {name!r}. {line}")
    return AttributeError(f"{owner_name} has no attribute {name!r}", name=name, obj=owner)


def explains_attributes(*tables: Table) -> Callable[[type[T]], type[T]]:
    """Returns a decorator of a class whose objects answer names of other libraries with the line to write."""

    def missing(self: Any, name: str) -> Any:
        if any(name in advice for _, advice, _ in tables):
            raise missing_attribute_error(f"{type(self).__name__!r} object", name, *tables)
        return object.__getattribute__(self, name)  # raises the error again, also one of a property

    def decorate(cls: type[T]) -> type[T]:
        # Not in the body of the class: a type checker would then accept every name.
        cls.__getattr__ = missing  # pyright: ignore[reportAttributeAccessIssue]
        return cls

    return decorate


_GUIDE = " See docs/from_tf_distribute.md."
STRATEGY_TABLES = (
    ("TensorFlow's", STRATEGY_NAMES, _GUIDE),
    ("", {"num_replicas": "Write `strategy.num_replicas_in_sync`."}, ""),
)
MODULE_TABLES = (
    ("TensorFlow's", MODULE_NAMES, _GUIDE),
    ("JAX's", JAX_NAMES, ""),
    ("The name", TORCH_NAMES, " See docs/coming_from.md."),
)
CALLBACK_TABLE = "The name", CALLBACK_NAMES, ""
SYNC_TABLE = "The name", SYNC_NAMES, ""
DATASET_TABLE = "TensorFlow's", DATASET_NAMES, ""
VALUE_TABLE = "The name", VALUE_NAMES, ""
REPLICA_CONTEXT_TABLE = "TensorFlow's", REPLICA_CONTEXT_NAMES, _GUIDE
