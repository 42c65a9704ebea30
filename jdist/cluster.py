"""Which processes: a resolver a kind of cluster, one file each, that looks once who they are and which this one is.

`ClusterResolver` is all that jdist asks of one, so a record of your own with these names does as well.
"""

from jdist._src.cluster.resolver import ClusterResolver as ClusterResolver
from jdist._src.cluster.tpu import TPUClusterResolver as TPUClusterResolver
