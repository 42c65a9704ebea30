"""Analyses and rewrites of jaxprs.

Read `interpreter` first: it has the rules of calls and control flow, for every analysis and rewrite. `replication` decides
which results of a traced replica function are replicated; `single_replica`, `virtual_replicas` and `update_partition`
rewrite a jaxpr for one replica, for virtual replicas, or for an update on the host; `clip_check`, `count_check` and
`batch_check` warn about likely mistakes; `program_fingerprint` describes a jaxpr so that processes can compare theirs, and
`trace_errors` explains the errors of tracing.
"""
