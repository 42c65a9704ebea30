"""Cluster resolvers: find the processes of a cluster, their addresses, and the index of this process.

Read `resolver` first: it defines the `ClusterResolver` protocol. `simple` implements it for a cluster spec. A module for each
source reads a spec and passes it to `simple`: `environment`, `tf_config`, `mpi`, `slurm` (with `hostlist`), `sagemaker`,
`kubernetes` (with `kubernetes_api`), `gce`, `ray`, `tpu`; `union` reads the specs of several resolvers. `resolution` tries them
in order, and `detection` reports a cluster that none of them accepts. `joining` joins the processes, after `rendezvous` has
compared them. `settings`, `gpus`, `polling` and `metadata` are used by several of them.
"""
