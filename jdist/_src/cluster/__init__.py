"""Cluster resolvers: find the processes of a cluster, their addresses, and the index of this process.

Read `resolver` first: it defines the `ClusterResolver` protocol. `simple` implements it for a cluster spec. A module for each
source reads a spec and passes it to `simple`: `environment`, `tf_config`, `mpi`, `slurm` (with `hostlist`), `sagemaker`,
`kubernetes` (with `kubernetes_api`), `gce`. `tpu` implements the protocol for TPU slices, and `union` for several resolvers.
`resolution` tries them in order. `joining` joins the processes. `settings`, `gpus`, `polling` and `metadata` are used by
several of them.
"""
