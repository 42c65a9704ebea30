"""Distribution strategies for JAX: write a training step for one replica, choose where it runs with a strategy object.

jdist proves, while it traces the step, that the replicas stay synchronized. Read `jdist.MirroredStrategy` and
`jdist.Strategy.step` first. The public names are in this package and in its modules `callbacks`, `cluster`, `coordinator`,
`data`, `debug`, `extend`, `hlo`, `metrics`, `sync`, `testing` and `weights`; everything in `_src` is private. Importing jdist
does not start a JAX backend and does not import optional packages.
"""

from typing import TYPE_CHECKING

from jdist import callbacks as callbacks
from jdist import cluster as cluster
from jdist import coordinator as coordinator
from jdist import data as data
from jdist import debug as debug
from jdist import extend as extend
from jdist import hlo as hlo
from jdist import metrics as metrics
from jdist import sync as sync
from jdist import testing as testing
from jdist import weights as weights
from jdist._src.checkpoint.checkpointer import Checkpointer as Checkpointer
from jdist._src.checkpoint.checkpointer import RestoredCheckpoint as RestoredCheckpoint
from jdist._src.checkpoint.preemption import PreemptionCheckpointHandler as PreemptionCheckpointHandler
from jdist._src.checkpoint.storage import CheckpointError as CheckpointError
from jdist._src.collectives.cross_device_ops import AllReduce as AllReduce
from jdist._src.collectives.cross_device_ops import CommunicationOptions as CommunicationOptions
from jdist._src.collectives.cross_device_ops import CrossDeviceOps as CrossDeviceOps
from jdist._src.collectives.cross_device_ops import HierarchicalAllReduce as HierarchicalAllReduce
from jdist._src.collectives.cross_device_ops import ReductionToOneDevice as ReductionToOneDevice
from jdist._src.core.errors import BatchedElementsWarning as BatchedElementsWarning
from jdist._src.core.errors import ClippedPerReplicaWarning as ClippedPerReplicaWarning
from jdist._src.core.errors import DivergentCollectiveError as DivergentCollectiveError
from jdist._src.core.errors import FitError as FitError
from jdist._src.core.errors import LocalCountWarning as LocalCountWarning
from jdist._src.core.errors import NotEquivalentError as NotEquivalentError
from jdist._src.core.errors import NotEquivalentWarning as NotEquivalentWarning
from jdist._src.core.errors import NotMirroredError as NotMirroredError
from jdist._src.core.errors import RepeatedSumWarning as RepeatedSumWarning
from jdist._src.core.errors import ReplicatedBatchWarning as ReplicatedBatchWarning
from jdist._src.core.errors import RetraceWarning as RetraceWarning
from jdist._src.core.errors import SharedRandomnessWarning as SharedRandomnessWarning
from jdist._src.core.errors import TransferWarning as TransferWarning
from jdist._src.core.errors import UnrecognizedOptimizerStateWarning as UnrecognizedOptimizerStateWarning
from jdist._src.core.migration_hints import missing_attribute_error as _missing_attribute_error
from jdist._src.core.public_names import set_public_module as _set_public_module
from jdist._src.core.version import __version__ as __version__
from jdist._src.data.dataset import DistributedDataset as DistributedDataset
from jdist._src.data.dataset import DistributedIterator as DistributedIterator
from jdist._src.data.shards import AutoShardPolicy as AutoShardPolicy
from jdist._src.data.shards import InputContext as InputContext
from jdist._src.debug.check import check as check
from jdist._src.debug.check_report import CheckReport as CheckReport
from jdist._src.debug.check_report import CheckVerdict as CheckVerdict
from jdist._src.debug.check_report import FunctionCheck as FunctionCheck
from jdist._src.debug.check_report import ResultCheck as ResultCheck
from jdist._src.devices.cpu_devices import use_cpu_devices as use_cpu_devices
from jdist._src.devices.mesh import Replicas as Replicas
from jdist._src.devices.topology import topology_devices as topology_devices
from jdist._src.devices.xla_flags import XlaFlag as XlaFlag
from jdist._src.devices.xla_flags import XlaFlags as XlaFlags
from jdist._src.devices.xla_flags import xla_flags as xla_flags
from jdist._src.execution.program import Program as Program
from jdist._src.execution.traced import Proof as Proof
from jdist._src.export.export import export as export
from jdist._src.export.load import Loaded as Loaded
from jdist._src.export.load import load as load
from jdist._src.jaxpr.equivalence_verdict import Verdict as Verdict
from jdist._src.parameter_server.engine import WorkerProgress as WorkerProgress
from jdist._src.parameter_server.partitioners import FixedShardsPartitioner as FixedShardsPartitioner
from jdist._src.parameter_server.partitioners import MaxSizePartitioner as MaxSizePartitioner
from jdist._src.parameter_server.partitioners import MinSizePartitioner as MinSizePartitioner
from jdist._src.parameter_server.partitioners import Partitioner as Partitioner
from jdist._src.parameter_server.server_array import ServerArray as ServerArray
from jdist._src.parameter_server.strategy import ParameterServerStrategy as ParameterServerStrategy
from jdist._src.plan.cost_model import StepTime as StepTime
from jdist._src.plan.memory import MemoryPlan as MemoryPlan
from jdist._src.plan.plan import Plan as Plan
from jdist._src.plan.plan import SizePlan as SizePlan
from jdist._src.plan.plan import plan as plan
from jdist._src.plan.remedies import Remedy as Remedy
from jdist._src.profiling.profile import profile as profile
from jdist._src.profiling.summary import DeviceTime as DeviceTime
from jdist._src.profiling.summary import OperationTime as OperationTime
from jdist._src.profiling.summary import ProcessTime as ProcessTime
from jdist._src.profiling.summary import ProfileSummary as ProfileSummary
from jdist._src.replica.context import ReplicaContext as ReplicaContext
from jdist._src.replica.context import ValueContext as ValueContext
from jdist._src.replica.context import all_gather as all_gather
from jdist._src.replica.context import all_reduce as all_reduce
from jdist._src.replica.context import broadcast as broadcast
from jdist._src.replica.context import in_cross_replica_context as in_cross_replica_context
from jdist._src.replica.context import num_replicas as num_replicas
from jdist._src.replica.context import reduce_scatter as reduce_scatter
from jdist._src.replica.context import replica_id as replica_id
from jdist._src.replica.gradients import global_loss as global_loss
from jdist._src.replica.gradients import value_and_grad as value_and_grad
from jdist._src.replica.losses import compute_average_loss as compute_average_loss
from jdist._src.replica.losses import global_mean as global_mean
from jdist._src.replica.losses import scale_regularization_loss as scale_regularization_loss
from jdist._src.replica.pipeline import pipeline as pipeline
from jdist._src.replica.precision import Precision as Precision
from jdist._src.replica.random import example_key as example_key
from jdist._src.replica.random import replica_key as replica_key
from jdist._src.replica.random import replica_rngs as replica_rngs
from jdist._src.replica.tables import lookup as lookup
from jdist._src.strategies.automatic import auto_strategy as auto_strategy
from jdist._src.strategies.base import Strategy as Strategy
from jdist._src.strategies.central_storage import CentralStorageStrategy as CentralStorageStrategy
from jdist._src.strategies.current import get_replica_context as get_replica_context
from jdist._src.strategies.current import get_strategy as get_strategy
from jdist._src.strategies.current import has_strategy as has_strategy
from jdist._src.strategies.current import init as init
from jdist._src.strategies.current import set_strategy as set_strategy
from jdist._src.strategies.current import step as step
from jdist._src.strategies.description import Description as Description
from jdist._src.strategies.description import LeafDescription as LeafDescription
from jdist._src.strategies.late_bound_step import Step as Step
from jdist._src.strategies.mirrored import MirroredStrategy as MirroredStrategy
from jdist._src.strategies.multi_worker import MultiWorkerMirroredStrategy as MultiWorkerMirroredStrategy
from jdist._src.strategies.one_device import OneDeviceStrategy as OneDeviceStrategy
from jdist._src.strategies.scope import Scope as Scope
from jdist._src.strategies.sharded import ShardedStrategy as ShardedStrategy
from jdist._src.strategies.tpu import TPUStrategy as TPUStrategy
from jdist._src.strategies.variables import read_values as read_values
from jdist._src.strategies.variables import trainable as trainable
from jdist._src.strategies.variables import variable as variable
from jdist._src.training.eval_step import EvalStep as EvalStep
from jdist._src.training.eval_step import eval_step as eval_step
from jdist._src.training.fit import Fit as Fit
from jdist._src.training.history import History as History
from jdist._src.training.state import TrainState as TrainState
from jdist._src.training.summary import LayerSummary as LayerSummary
from jdist._src.training.summary import Summary as Summary
from jdist._src.training.summary import summary as summary
from jdist._src.training.train_step import train_step as train_step
from jdist._src.training.trainer import Trainer as Trainer
from jdist._src.values.aggregation import VariableAggregation as VariableAggregation
from jdist._src.values.aggregation import VariableSynchronization as VariableSynchronization
from jdist._src.values.base import DistributedValues as DistributedValues
from jdist._src.values.mirrored import Mirrored as Mirrored
from jdist._src.values.per_replica import PerReplica as PerReplica
from jdist._src.values.reduce_op import ReduceOp as ReduceOp
from jdist._src.values.row_slices import RowSlices as RowSlices
from jdist._src.values.sharded import Sharded as Sharded
from jdist._src.values.sync_on_read import SyncOnRead as SyncOnRead

_set_public_module(globals(), __name__)

if not TYPE_CHECKING:  # a type checker would then accept every name

    def __getattr__(name: str) -> object:
        raise _missing_attribute_error(__name__, name)


del TYPE_CHECKING


def __dir__() -> list[str]:
    return sorted(name for name in globals() if not name.startswith("_")) + ["__version__"]
