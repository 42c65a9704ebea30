"""The names of `tf.distribute` that jdist does not have, each with what to write instead.

`docs/from_tf_distribute.md` is the guide for whoever moves a program.
"""

_BATCHES = "write `strategy.distribute_dataset(source, batch_size)`, whose size is that of the global batch"
_DEPRECATED = "deprecated in TensorFlow, and not in jdist"
_LAYOUT = "write `jdist.ShardedStrategy(mesh=mesh, model_axis=..., layout=...)`, which splits parameters over devices"
_PROCESSES = "call `jax.distributed.initialize()` in each process"
_RESOLVER = (
    "`jdist.cluster` has the cluster resolvers; `jax.distributed.initialize()` finds the processes of Slurm, Open MPI and "
    "Kubernetes"
)
_PARAMETER_SERVERS = "it belongs to parameter servers, which jdist does not have"
_STATE = "write a plain array in the state, or `jdist.Mirrored(x, aggregation)`"

STRATEGY_NAMES = {
    "cluster_resolver": "pass it to `jdist.TPUStrategy`; then `jax.process_index()`, `jax.process_count()`, `strategy.mesh`",
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
        "`worker_devices` and `parameter_devices`, a step or `value.map(fn)` replaces `update`"
    ),
    "group": "not needed: there is no graph to hold operations together",
    "make_dataset_iterator": f"{_DEPRECATED}: {_BATCHES}",
    "make_input_fn_iterator": f"{_DEPRECATED}: write `strategy.distribute_datasets_from_function(fn)`",
    "unwrap": "write `strategy.local_results(value)`",
    "update_config_proto": _DEPRECATED,
}

_PARTITIONERS = "it belongs to parameter servers; `jdist.ShardedStrategy` splits each leaf over the devices"

MODULE_NAMES = {
    "ClusterResolver": "write `jdist.cluster.ClusterResolver`",
    "FixedShardsPartitioner": _PARTITIONERS,
    "KubernetesExecutableLocation": _RESOLVER,
    "MaxSizePartitioner": _PARTITIONERS,
    "MinSizePartitioner": _PARTITIONERS,
    "Partitioner": _PARTITIONERS,
    "PerWorkerValue": _PARAMETER_SERVERS,
    "PreemptionWatcher": "write `jdist.Checkpointer(path)` and `trainer.fit(resume=checkpointer)`",
    "RemoteValue": _PARAMETER_SERVERS,
    "SHARD_HINT": 'write `auto_shard="hint"`, which calls `source.shard(num_shards=, index=)`',
    "TerminationConfig": "write `jdist.Checkpointer(path)` and `trainer.fit(resume=checkpointer)`",
    "experimental_get_current_worker_index": _PARAMETER_SERVERS,
    "AggregatingVariable": _PARAMETER_SERVERS,
    "CachingVariable": _PARAMETER_SERVERS,
    "CollectiveCommunication": "no choice: XLA takes NCCL on GPUs, the interconnect on TPUs, gloo between CPU processes",
    "CollectiveHints": "write `jdist.CommunicationOptions(bytes_per_pack)`",
    "CommunicationImplementation": "no choice: XLA takes NCCL on GPUs, the interconnect on TPUs, gloo between CPU processes",
    "ClusterCoordinator": _PARAMETER_SERVERS,
    "DistributedDelegate": "not needed: inside a replica function a value is a plain array",
    "DistributedTable": "use a dictionary on the host, and look up before the step",
    "DistributedVariable": _STATE,
    "GCEClusterResolver": _RESOLVER,
    "HierarchicalCopyAllReduce": "write `jdist.HierarchicalAllReduce(group_size)`",
    "InputOptions": "write `prefetch=` and `auto_shard=` of `strategy.distribute_dataset`",
    "InputReplicationMode": "not needed: an input pipeline feeds all replicas of its process, on their devices",
    "KubernetesClusterResolver": _RESOLVER,
    "MirroredVariable": _STATE,
    "MultiWorkerMirroredStrategy": (
        f"{_PROCESSES}, then write `jdist.MirroredStrategy(devices=jax.devices())`, or `jdist.auto_strategy()`"
    ),
    "NcclAllReduce": "write `jdist.AllReduce()`, which uses NCCL on GPUs",
    "ParameterServerStrategy": (
        "jdist has no parameter servers: `jdist.CentralStorageStrategy` stores the state in one place, "
        "`jdist.ShardedStrategy` splits it over the devices"
    ),
    "PerWorkerValues": _PARAMETER_SERVERS,
    "PerWorkerVariable": _PARAMETER_SERVERS,
    "PreemptionCheckpointHandler": "write `jdist.Checkpointer(path)` and `trainer.fit(resume=checkpointer)`",
    "RunOptions": "not needed: shapes are static, and everything is compiled",
    "Server": f"not needed: {_PROCESSES}, which needs no server",
    "ShardedVariable": "write `jdist.Sharded(x)`",
    "SimpleClusterResolver": _RESOLVER,
    "SlurmClusterResolver": _RESOLVER,
    "StrategyExtended": "not needed: see `jdist.Strategy`",
    "SyncOnReadVariable": "write `jdist.SyncOnRead(x, aggregation)`",
    "TFConfigClusterResolver": _RESOLVER,
    "TPUClusterResolver": "write `jdist.cluster.TPUClusterResolver()`",
    "UnionResolver": _RESOLVER,
    "cluster_resolver": _RESOLVER,
    "coordinator": _PARAMETER_SERVERS,
    "experimental": (
        "its names are in `jdist` itself: `jdist.CentralStorageStrategy`, `jdist.CommunicationOptions`, `jdist.ValueContext`, "
        "`jdist.auto_strategy()`"
    ),
    "experimental_set_strategy": "write `jdist.set_strategy(strategy)`",
}


def missing_attribute_error(owner_name: str, name: str, moved: dict[str, str]) -> AttributeError:
    """The error about an attribute that does not exist, with what to write instead if TensorFlow has it.

    Args:
        owner_name: How the error names the object or module.
        name: The attribute.
        moved: What to write instead, by TensorFlow's name.
    """
    instead = f". TensorFlow's `{name}`: {moved[name]}. See docs/from_tf_distribute.md." if name in moved else ""
    return AttributeError(f"{owner_name} has no attribute {name!r}{instead}")
