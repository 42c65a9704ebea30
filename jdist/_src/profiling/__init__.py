"""Profiles: a trace of `jax.profiler`, and a summary of where the time went.

`profile` opens and closes the trace, `trace` reads its events, with the metadata of the programs from `hlo_metadata`, and
`summary` computes the times from them.
"""
