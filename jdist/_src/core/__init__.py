"""Argument checks, leaf paths, errors, files, messages between processes, and all code that depends on JAX's version.

These modules import no other package of jdist. Read `tree` first: it defines the leaf paths that errors show. Everything
that depends on the version of JAX is in `jax_compat`.
"""
