"""Names of `tf.distribute` and of JAX that jdist does not have, each with the line to write instead.

`docs/from_tf_distribute.md` is the guide for moving a program from TensorFlow.
"""

from collections.abc import Iterable, Mapping

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
    "unwrap": "write `strategy.local_results(value)`",
    "update_config_proto": _DEPRECATED,
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


def missing_attribute_error(
    owner_name: str, name: str, tensorflow_names: Mapping[str, str], jax_names: Mapping[str, str] | None = None
) -> AttributeError:
    """Returns the error for an attribute that does not exist, with the line to write if it is a name of TensorFlow or JAX.

    Args:
        owner_name: The object or module as the error names it.
        name: The attribute.
        tensorflow_names: The advice for each name of TensorFlow.
        jax_names: The advice for each name of JAX.
    """
    advice = ""
    if name in tensorflow_names:
        advice = f". TensorFlow's `{name}`: {tensorflow_names[name]}. See docs/from_tf_distribute.md."
    elif jax_names and name in jax_names:
        advice = f". JAX's `{name}`: {jax_names[name]}."
    return AttributeError(f"{owner_name} has no attribute {name!r}{advice}")
