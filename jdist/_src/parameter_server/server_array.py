"""`ServerArray`: a leaf of a state that parameter servers store; `OutputArray`: an output of a step on another machine."""

from collections.abc import Callable
from typing import Any, final

import jax

from jdist._src.values.remote_array import RemoteArray


@final
class ServerArray(RemoteArray):
    """A leaf of the state of `jdist.ParameterServerStrategy`, whose value is stored by the servers.

    It names the value and does not contain it: every read returns the current value, after waiting for the steps that were
    called before. `np.asarray(x)`, `jnp.asarray(x)` and `float(x)` read it, `jdist.read_values(state)` reads a state. Other
    functions of JAX take arrays: pass `x.read()`.

    Attributes:
        storage: The arrays on the servers.

    Example:
        >>> strategy = jdist.ParameterServerStrategy(workers=1, servers=1)
        >>> @strategy.step
        ... def add(total, x):
        ...     return total + jdist.all_reduce("mean", x), None
        >>> total, _ = add(strategy.put(1.0), np.float32(2))
        >>> total, float(total)
        (ServerArray(float32[]), 3.0)
    """

    __slots__ = ("__weakref__", "_read", "storage")

    def __init__(self, storage: Any, read: Callable[[Any], jax.Array]):
        self.storage, self._read = storage, read

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape."""
        return self.storage.shape

    @property
    def dtype(self) -> Any:
        """The dtype."""
        return self.storage.dtype

    def read(self) -> jax.Array:
        """Returns the value on the first worker's device, after waiting for the steps that were called before.

        Raises:
            RuntimeError: A worker failed.
        """
        return self._read(self.storage)


@final
class OutputArray(RemoteArray):
    """An output of a step that a worker on another machine computes. Reading it waits for this call of the step.

    Args:
        spec: The shape and the dtype.
        read: Returns the value.
    """

    __slots__ = ("__weakref__", "_read", "_spec")

    def __init__(self, spec: jax.ShapeDtypeStruct, read: Callable[[], jax.Array]):
        self._spec, self._read = spec, read

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape."""
        return self._spec.shape

    @property
    def dtype(self) -> Any:
        """The dtype."""
        return self._spec.dtype

    def read(self) -> jax.Array:
        """Returns the value on the device of the host program.

        Raises:
            RuntimeError: The worker failed.
        """
        return self._read()
