"""jdist: write the step for one replica, say where it runs, and have it proved that the replicas stay in step.

Importing jdist starts no backend and imports no optional package.
"""

from typing import TYPE_CHECKING

from jdist import _tf_names
from jdist import callbacks as callbacks
from jdist import cluster as cluster
from jdist import data as data
from jdist import metrics as metrics
from jdist import sync as sync
from jdist import weights as weights
from jdist._version import __version__ as __version__
from jdist.checkpoint.checkpointer import Checkpoint as Checkpoint
from jdist.checkpoint.checkpointer import Checkpointer as Checkpointer
from jdist.checkpoint.storage import CheckpointError as CheckpointError
from jdist.compiler_flags import XlaFlag as XlaFlag
from jdist.compiler_flags import XlaFlags as XlaFlags
from jdist.compiler_flags import xla_flags as xla_flags
from jdist.context import ReplicaContext as ReplicaContext
from jdist.context import ValueContext as ValueContext
from jdist.context import all_gather as all_gather
from jdist.context import all_reduce as all_reduce
from jdist.context import broadcast as broadcast
from jdist.context import in_cross_replica_context as in_cross_replica_context
from jdist.context import num_replicas as num_replicas
from jdist.context import replica_id as replica_id
from jdist.cross_device_ops import AllReduce as AllReduce
from jdist.cross_device_ops import CommunicationOptions as CommunicationOptions
from jdist.cross_device_ops import CrossDeviceOps as CrossDeviceOps
from jdist.cross_device_ops import HierarchicalAllReduce as HierarchicalAllReduce
from jdist.cross_device_ops import ReductionToOneDevice as ReductionToOneDevice
from jdist.data.dataset import DistributedDataset as DistributedDataset
from jdist.data.dataset import DistributedIterator as DistributedIterator
from jdist.data.sharding import AutoShardPolicy as AutoShardPolicy
from jdist.data.sharding import InputContext as InputContext
from jdist.errors import BatchedElementsWarning as BatchedElementsWarning
from jdist.errors import ClippedPerReplicaWarning as ClippedPerReplicaWarning
from jdist.errors import DivergentCollectiveError as DivergentCollectiveError
from jdist.errors import FitError as FitError
from jdist.errors import NotMirroredError as NotMirroredError
from jdist.errors import RepeatedSumWarning as RepeatedSumWarning
from jdist.errors import ReplicatedBatchWarning as ReplicatedBatchWarning
from jdist.exported import export as export
from jdist.gradients import value_and_grad as value_and_grad
from jdist.loaded import Loaded as Loaded
from jdist.loaded import load as load
from jdist.losses import compute_average_loss as compute_average_loss
from jdist.losses import mean as mean
from jdist.losses import scale_regularization_loss as scale_regularization_loss
from jdist.precision import Precision as Precision
from jdist.randomness import example_key as example_key
from jdist.randomness import replica_key as replica_key
from jdist.reduce_op import ReduceOp as ReduceOp
from jdist.replicate import Proof as Proof
from jdist.strategies.automatic import auto_strategy as auto_strategy
from jdist.strategies.base import Strategy as Strategy
from jdist.strategies.central_storage import CentralStorageStrategy as CentralStorageStrategy
from jdist.strategies.current import get_replica_context as get_replica_context
from jdist.strategies.current import get_strategy as get_strategy
from jdist.strategies.current import has_strategy as has_strategy
from jdist.strategies.current import set_strategy as set_strategy
from jdist.strategies.description import Description as Description
from jdist.strategies.mirrored import MirroredStrategy as MirroredStrategy
from jdist.strategies.one_device import OneDeviceStrategy as OneDeviceStrategy
from jdist.strategies.sharded import ShardedStrategy as ShardedStrategy
from jdist.strategies.tpu import TPUStrategy as TPUStrategy
from jdist.topology import described_devices as described_devices
from jdist.training.events import Fit as Fit
from jdist.training.history import History as History
from jdist.training.state import TrainState as TrainState
from jdist.training.trainer import Trainer as Trainer
from jdist.values.aggregation import VariableAggregation as VariableAggregation
from jdist.values.aggregation import VariableSynchronization as VariableSynchronization
from jdist.values.base import DistributedValues as DistributedValues
from jdist.values.mirrored import Mirrored as Mirrored
from jdist.values.per_replica import PerReplica as PerReplica
from jdist.values.row_slices import RowSlices as RowSlices
from jdist.values.sharded import Sharded as Sharded
from jdist.values.sync_on_read import SyncOnRead as SyncOnRead
from jdist.variables import read as read
from jdist.variables import trainable as trainable
from jdist.variables import variable as variable

if not TYPE_CHECKING:  # a type checker would then accept every name

    def __getattr__(name: str) -> object:
        raise _tf_names.missing(f"module {__name__!r}", name, _tf_names.IN_MODULE)


del TYPE_CHECKING
