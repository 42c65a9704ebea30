"""`RemoteArray`: an array whose value is stored elsewhere; and `materialize`, which reads the remote arrays of a tree."""

import abc
import math
from typing import Any, NoReturn

import jax
import numpy as np

from jdist._src.core.tree import PyTree, dtype_and_shape, one_line


class RemoteArray(abc.ABC):
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


def materialize(tree: PyTree) -> PyTree:
    """Returns `tree` with the value of each `RemoteArray`; `tree` itself if there is none."""
    leaves, treedef = jax.tree.flatten(tree)
    if not any(isinstance(leaf, RemoteArray) for leaf in leaves):
        return tree
    return treedef.unflatten([leaf.read() if isinstance(leaf, RemoteArray) else leaf for leaf in leaves])
