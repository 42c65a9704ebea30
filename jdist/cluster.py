"""Cluster resolvers: the processes of a cluster and the index of this process.

`ClusterResolver` is a protocol: an object of any class with these attributes and methods is a resolver.
"""

from jdist._src.cluster.resolver import ClusterResolver as ClusterResolver
from jdist._src.cluster.tpu import TPUClusterResolver as TPUClusterResolver


def __dir__() -> list[str]:
    return sorted(name for name in globals() if not name.startswith("_"))
