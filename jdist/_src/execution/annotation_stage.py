"""`ShardingAnnotations`: annotations of axes that one replica does not span have no effect in its function."""

from jdist._src.core.sharding_annotations import Place, restrict_annotations
from jdist._src.core.tree import PyTree
from jdist._src.execution.stage import Stage
from jdist._src.execution.traced import ReplicaFn, Results, UserCall


class ShardingAnnotations(Stage):
    """Restricts sharding annotations to the mesh axes inside one replica.

    Args:
        sees_global_arrays: Whether the function is of one replica that spans all devices, so that a constraint on an unknown
            axis is an error.
    """

    def __init__(self, sees_global_arrays: bool):
        self._place: Place = "global arrays" if sees_global_arrays else "replica"

    def wrap_function(self, fn: ReplicaFn, call: UserCall) -> ReplicaFn:
        """See `Stage`."""

        def restricted(*args: PyTree, **kwargs: PyTree) -> Results:
            with restrict_annotations(self._place):
                return fn(*args, **kwargs)

        return restricted
