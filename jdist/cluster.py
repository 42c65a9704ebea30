"""Cluster resolvers: the processes of a cluster and the index of this process.

`resolve()` returns the resolver of the environment in which this process runs. `ClusterResolver` is a protocol: an object of
any class with these attributes and methods is a resolver.
"""

from jdist._src.cluster.environment import EnvironmentClusterResolver as EnvironmentClusterResolver
from jdist._src.cluster.gce import GCEClusterResolver as GCEClusterResolver
from jdist._src.cluster.kubernetes import KubernetesClusterResolver as KubernetesClusterResolver
from jdist._src.cluster.mpi import MPIClusterResolver as MPIClusterResolver
from jdist._src.cluster.ray import RayClusterResolver as RayClusterResolver
from jdist._src.cluster.resolution import resolve as resolve
from jdist._src.cluster.resolution import resolve_each as resolve_each
from jdist._src.cluster.resolver import ClusterNotFoundError as ClusterNotFoundError
from jdist._src.cluster.resolver import ClusterResolver as ClusterResolver
from jdist._src.cluster.sagemaker import SageMakerClusterResolver as SageMakerClusterResolver
from jdist._src.cluster.simple import SimpleClusterResolver as SimpleClusterResolver
from jdist._src.cluster.slurm import SlurmClusterResolver as SlurmClusterResolver
from jdist._src.cluster.tf_config import TFConfigClusterResolver as TFConfigClusterResolver
from jdist._src.cluster.tpu import TPUClusterResolver as TPUClusterResolver
from jdist._src.cluster.union import UnionResolver as UnionResolver
from jdist._src.core.public_names import set_public_module as _set_public_module

_set_public_module(globals(), __name__)


def __dir__() -> list[str]:
    return sorted(name for name in globals() if not name.startswith("_"))
