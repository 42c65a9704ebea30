"""The replica-context API: the functions that can be called inside a replica function.

Read `context` first: it tracks whether code runs in a replica function or on the host, and defines the collectives that replica
functions use. Losses, random keys, gradients, metrics and leaf annotations build on it.
"""
