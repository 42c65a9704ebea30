"""`RemoteValue`: the result of a scheduled function."""

from concurrent.futures import Future
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jdist._src.core.tree import PyTree, supports_array
from jdist._src.parameter_server.closure_queue import result_of


class RemoteValue:
    """The result of a scheduled function, which may not have run yet. `ClusterCoordinator.schedule` returns it.

    It does not have to be read: the memory of a result is freed with its `RemoteValue`, and `ClusterCoordinator.join` raises
    the error of a function.

    Example:
        >>> strategy = jdist.ParameterServerStrategy(workers=2)
        >>> coordinator = jdist.coordinator.ClusterCoordinator(strategy)
        >>> value = coordinator.schedule(jax.numpy.arange, (3,))
        >>> value.fetch(), value.get(), value
        (array([0, 1, 2], dtype=int32), Array([0, 1, 2], dtype=int32),
         RemoteValue(arange, done))
    """

    def __init__(self, future: Future[Any], name: str):
        self._future, self._name = future, name

    @property
    def is_done(self) -> bool:
        """Whether the function has returned, failed, or was cancelled."""
        return self._future.done()

    def get(self) -> PyTree:
        """Waits for the function, and returns its result. Arrays stay on the device of the worker.

        Raises:
            BaseException: The error of the function, with the index of the worker.
            CancelledError: The function was cancelled, because another one failed before.
            RuntimeError: The call is in a scheduled function, and the result is not available yet.
        """
        return result_of(self._future)

    def fetch(self) -> PyTree:
        """Waits for the function, and returns its result with numpy arrays in place of JAX arrays.

        Raises:
            BaseException: The error of the function, with the index of the worker.
            CancelledError: The function was cancelled, because another one failed before.
            RuntimeError: The call is in a scheduled function, and the result is not available yet.
        """
        return jax.tree.map(_to_host, self.get())

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        result = self.fetch()
        if not jax.tree_util.all_leaves([result]):
            raise TypeError(
                f"The result of `{self._name}` is a {type(result).__name__}, not an array. Use `fetch()`, which returns a tree "
                "of arrays."
            )
        return np.array(result, dtype=dtype, copy=copy)

    def __repr__(self) -> str:
        state = "not done" if not self.is_done else "failed" if self._future.exception() else "done"
        return f"RemoteValue({self._name}, {state})"


def _to_host(leaf: Any) -> Any:
    """Returns an array in the memory of the host. Random keys, which numpy does not have, and other objects are unchanged."""
    if isinstance(leaf, (np.ndarray, np.generic)) or not supports_array(leaf):
        return leaf
    if isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.extended):
        return leaf
    return np.asarray(leaf)
