"""Device selection, the replica mesh, topology devices, dispatch on CPU devices and recommended XLA flags.

Read `mesh` first: it turns the devices that the user names into a mesh, and defines `Replicas`, which relates replicas, devices
and batches.
"""
