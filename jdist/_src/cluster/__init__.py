"""Cluster resolvers: which processes take part, and which of them this process is.

Read `resolver` first: it defines the protocol that other clusters implement.
"""
