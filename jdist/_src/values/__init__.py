"""Distributed values: wrappers that specify how a tree is placed on the devices, and functions that place trees.

Read `base` first: it defines `DistributedValues`, the common type of `Mirrored`, `PerReplica`, `SyncOnRead` and `Sharded`.
`device_put` places trees on a mesh, `reduce_op` and `aggregation` define how the replicas' values are combined,
`state_sharding` computes which dimensions of a state are sharded. `process_checks` and `same_program` compare processes.
"""
