"""`ParameterServerStrategy`: workers compute gradients at their own speed, and servers apply them to the state.

A step is split (`jaxpr.server_partition`) into the part of a worker, and the updates of groups of state leaves, which the
servers run. Read `strategy` first, then `backend`, which splits a traced step and places the state, then `engine`, which
selects the worker of each call and applies its results. `step_parts` compiles the parts, `staleness` has the rule of the bound,
and `event_log` records the order of a run for its replay.

`partitioners` determines the number of shards of a leaf, and the rows of each shard. `storage` has the shards of a leaf on the
servers, and `server_array` the leaves that the host program holds.

An `executor` runs the parts: `local_executor` on devices of this process, `ray_executor` in actors (`ray_actors`) of a Ray
cluster (`ray_cluster`), which receive the parts as exported programs (`ray_programs`, `exported_parts`). `update_history`
restores a server that was lost.

`coordinator` schedules functions on the workers: `closure_queue` holds and runs them, `remote_value` is their result.
`per_worker` has values with one instance per worker, and `worker_index` the index of the current worker.
"""
