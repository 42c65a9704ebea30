"""Synchronization policies as optax gradient transformations.

Read `policy` first: it defines the parts that all policies share. Each other module holds related policies.
"""
