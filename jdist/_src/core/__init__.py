"""Argument checks, tree paths, errors, files and everything that depends on the version of JAX.

These modules import no other package of jdist. Read `tree` first: it defines the leaf paths that errors show.
"""
