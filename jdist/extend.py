"""Classes for a backend or a stage that is written outside jdist. The page "Extending jdist" has a complete example."""

from jdist._src.core.public_names import set_public_module as _set_public_module
from jdist._src.devices.mesh import replica_mesh as replica_mesh
from jdist._src.execution.backend import Backend as Backend
from jdist._src.execution.backend import ProgramSpec as ProgramSpec
from jdist._src.execution.backend import ReplicaFunction as ReplicaFunction
from jdist._src.execution.compiled_function import CompiledFunction as CompiledFunction
from jdist._src.execution.stage import Stage as Stage
from jdist._src.execution.traced import ReplicaResults as ReplicaResults
from jdist._src.execution.traced import Traced as Traced
from jdist._src.execution.traced import UserCall as UserCall

_set_public_module(globals(), __name__)


def __dir__() -> list[str]:
    return sorted(name for name in globals() if not name.startswith("_"))
