"""The replica-context API: what a function of one replica may call.

Read `context` first: it tracks whether code runs in a replica function or on the host, and defines the collectives that replica
functions use. Losses, random keys, gradients, metrics and leaf annotations build on it.
"""
