"""Checks of programs at run time: replicated values, prints of replicas, and operations with an invalid result.

`copies` compares the copies of replicated values by checksums (`checksums`).
"""
