"""`ServerArray`: a leaf of a state that parameter servers store; `OutputArray`: an output of a step on another machine."""

import abc
import math
from collections.abc import Callable
from typing import Any, NoReturn, final

import jax
import numpy as np

from jdist._src.core.tree import PyTree, dtype_and_shape, one_line


class _ReadableArray(abc.ABC):
    """An array whose value `read` returns. Functions of numpy and the constructors of numbers read it."""

    __slots__ = ()

    @property
    @abc.abstractmethod
    def shape(self) -> tuple[int, ...]:
        """The shape."""

    @property
    @abc.abstractmethod
    def dtype(self) -> Any:
        """The dtype."""

    @abc.abstractmethod
    def read(self) -> jax.Array:
        """Returns the value."""

    @property
    def ndim(self) -> int:
        """The number of dimensions."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)

    def item(self) -> Any:
        """Returns the value of a scalar as a Python number."""
        return self.read().item()

    def tolist(self) -> Any:
        """Returns the value as nested lists."""
        return self.read().tolist()

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        value = np.asarray(self.read())
        return value if dtype is None else value.astype(dtype)

    def __jax_array__(self) -> jax.Array:
        return self.read()

    def __float__(self) -> float:
        return float(self.read())

    def __int__(self) -> int:
        return int(self.read())

    def __bool__(self) -> bool:
        return bool(self.read())

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            f"{one_line(self)} cannot be pickled: its value is in another place. Pass its value, `x.read()`, or for a tree "
            "`jdist.read_values(tree)`."
        )

    def __repr__(self) -> str:
        return f"{type(self).__name__}({dtype_and_shape(self)})"


@final
class ServerArray(_ReadableArray):
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
class OutputArray(_ReadableArray):
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


def is_server_array(leaf: object) -> bool:
    """Returns whether `leaf` is a `ServerArray`."""
    return isinstance(leaf, ServerArray)


def without_values(tree: PyTree) -> PyTree:
    """Returns `tree` with the shape and dtype of each array that has to be read; `tree` itself if there is none."""
    return _replaced(tree, lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype))


def read_servers(tree: PyTree) -> PyTree:
    """Returns `tree` with the value of each array that has to be read; `tree` itself if there is none."""
    return _replaced(tree, lambda leaf: leaf.read())


def _replaced(tree: PyTree, replacement: Callable[[_ReadableArray], Any]) -> PyTree:
    leaves, treedef = jax.tree.flatten(tree)
    if not any(isinstance(leaf, _ReadableArray) for leaf in leaves):
        return tree
    return treedef.unflatten([replacement(leaf) if isinstance(leaf, _ReadableArray) else leaf for leaf in leaves])
