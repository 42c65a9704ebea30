"""Distributed values, and their placement on the devices.

Read `base` first: it defines `DistributedValues`. `device_put` places trees on a mesh, `reduce_op` and `aggregation` define how
values of the replicas become one, `state_sharding` which dimensions of a state are split.
"""
