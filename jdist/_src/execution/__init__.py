"""Compilation of replica functions: tracing, the proof, and the backends that run a jaxpr for all replicas.

Read `replicate` first: it traces a function, runs the replication analysis and passes the jaxpr to a backend. `build_programs`
builds the programs of `Strategy.run`, `init` and `step`, `program` is the compiled function that users call, and each backend
(`shard_map`, `auto_sharded`, `virtual`, `host_offload`, `device_offload`) defines how the devices run a jaxpr. `stage_order`
lists the stages around a program.
"""
