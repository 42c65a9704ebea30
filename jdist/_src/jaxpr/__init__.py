"""Analyses and rewrites of jaxprs.

Read `replication` first: it decides which results of a traced replica function are replicated. The other modules rewrite a
jaxpr for one replica, for virtual replicas or for an update on the host, and explain errors of tracing.
"""
