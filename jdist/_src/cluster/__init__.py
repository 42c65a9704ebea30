"""Cluster resolvers: find the processes of a cluster, their addresses, and the index of this process.

Read `resolver` first: it defines the `ClusterResolver` protocol. `tpu` implements it for TPU slices and `metadata` requests the
attributes of a TPU virtual machine.
"""
