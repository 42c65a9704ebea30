"""How the function of one replica becomes a compiled program.

Read `replicate` first: it traces the function, runs the replication analysis and hands the jaxpr to a backend. `program` is the
compiled step that users call; each backend runs one jaxpr for all replicas in its own way.
"""
