"""jdist: write the step for one replica, say where it runs, and have it proved that the replicas stay in step.

Importing jdist starts no backend and imports no optional package.
"""

from jdist.collectives import ReduceOp as ReduceOp
from jdist.context import ReplicaContext as ReplicaContext
from jdist.context import ValueContext as ValueContext
from jdist.context import all_gather as all_gather
from jdist.context import all_reduce as all_reduce
from jdist.context import get_replica_context as get_replica_context
from jdist.context import num_replicas as num_replicas
from jdist.context import replica_id as replica_id
from jdist.context import replica_key as replica_key
from jdist.data.dataset import DistributedDataset as DistributedDataset
from jdist.errors import DivergentCollectiveError as DivergentCollectiveError
from jdist.errors import NotMirroredError as NotMirroredError
from jdist.errors import RepeatedSumWarning as RepeatedSumWarning
from jdist.replicate import Proof as Proof
from jdist.strategies.base import Strategy as Strategy
from jdist.strategies.current import get_strategy as get_strategy
from jdist.strategies.current import has_strategy as has_strategy
from jdist.strategies.mirrored import MirroredStrategy as MirroredStrategy
from jdist.strategies.one_device import OneDeviceStrategy as OneDeviceStrategy
from jdist.values import DistributedValues as DistributedValues
from jdist.values import PerReplica as PerReplica

__version__ = "0.1.0"
