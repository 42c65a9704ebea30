"""Compilation of replica functions: tracing, the proof, and the backends that run a jaxpr for all replicas.

Read `replicate` first: it traces a function, runs the replication analysis and passes the jaxpr to a backend. `step` builds
what `Strategy.run`, `init` and `step` compile, `program` is the compiled function that users call, and each backend
(`shard_map`, `auto_sharded`, `virtual`, `host_offload`, `device_offload`) runs a jaxpr on the devices in its own way.
"""
