"""The coordinator of a `ParameterServerStrategy`: functions that its workers run asynchronously, and their results."""

from jdist._src.core.public_names import set_public_module as _set_public_module
from jdist._src.parameter_server.closure_queue import CancelledError as CancelledError
from jdist._src.parameter_server.coordinator import ClusterCoordinator as ClusterCoordinator
from jdist._src.parameter_server.per_worker import PerWorkerDataset as PerWorkerDataset
from jdist._src.parameter_server.per_worker import PerWorkerIterator as PerWorkerIterator
from jdist._src.parameter_server.per_worker import PerWorkerValues as PerWorkerValues
from jdist._src.parameter_server.remote_value import RemoteValue as RemoteValue
from jdist._src.parameter_server.worker_index import EndOfDataError as EndOfDataError
from jdist._src.parameter_server.worker_index import get_current_worker_index as get_current_worker_index

_set_public_module(globals(), __name__)


def __dir__() -> list[str]:
    return sorted(name for name in globals() if not name.startswith("_"))
