"""Private: the programs of jdist that start without JAX, the command `jdist` and the pytest plugin.

They are not in the package `jdist`: the import of any of its modules imports JAX and optax, which takes a second and 170 MB.
"""
