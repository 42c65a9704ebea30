"""Meshes of replicas, device topologies for ahead-of-time compilation, dispatch on CPU devices and XLA flags.

Read `mesh` first: it builds the mesh with the axis `"replica"` from device names.
"""
