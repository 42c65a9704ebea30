"""An exponential moving average of the parameters."""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, final

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, Sharding

from jdist._src.callbacks.arguments import check_function
from jdist._src.core.tree import PyTree, one_line
from jdist._src.devices.dispatch import is_bounded, wait_for_results
from jdist._src.devices.mesh import HOST_MEMORY
from jdist._src.training.events import Callback, Event, Moment
from jdist._src.training.state_copies import from_saved, to_saved
from jdist._src.values.array_copies import call_donating, to_device_memory


def _params(state: PyTree) -> PyTree:
    try:
        return state["params"] if isinstance(state, Mapping) else state.params
    except (AttributeError, KeyError):
        raise ValueError(
            f"The state, {type(state).__name__}, has no `params`. Pass a function that returns the parameters: "
            "`EMA(decay, params=lambda state: ...)`."
        ) from None


@final
class EMA(Callback):
    """An exponential moving average of the parameters, stored on the devices.

    Each leaf has the sharding and the wrapper of its parameter, so updating it does not communicate. Where parameters differ
    between replicas (`SyncOnRead`), each replica averages its values, and `jdist.read_values` of the average is the average of
    the values read. It is stored as float32 or wider. Integers are not averaged: the last values are stored.

    Mutable: it stores the average. Checkpoints contain it, and a resumed run is bitwise equal. A further `fit` that continues
    from the same state also continues the average; a `fit` of another state starts a new one.

    Args:
        decay: The weight of the previous average, per step. With several steps per call, only the parameters after the last of
            them are used, with the weight of all, `1 - decay**steps`.
        debias: Whether the weights of the parameters after each step are scaled to sum to 1, so that the initial parameters do
            not contribute. Otherwise the average starts with the initial parameters, as in TensorFlow.
        params: From the state to the parameters, `state.params` by default.

    Raises:
        TypeError: `params` is not a function.
        ValueError: `decay` is not a number between 0 and 1. Raised before the first step: the state has no `params`.

    Example:
        >>> average = jdist.callbacks.EMA(0.999)
        >>> # Afterwards: state = dataclasses.replace(fit.state, params=average.params)
    """

    is_collective = True

    def __init__(self, decay: float, *, debias: bool = True, params: Callable[[PyTree], PyTree] = _params):
        if isinstance(decay, bool) or not isinstance(decay, (int, float)) or not 0 < decay < 1:
            raise ValueError(f"`decay` must be a number between 0 and 1, such as 0.999, got {one_line(decay)}.")
        check_function("params", params, "the state")
        self.decay, self.debias, self._params = float(decay), debias, params
        params_option = "" if params is _params else f", params={getattr(params, '__qualname__', 'function')}"
        self.identity = f"EMA({self.decay!r}, debias={debias}{params_option})"
        self._average: PyTree = None
        self._dtypes: list[Any] = []  # of the parameters
        self._step = self._count = 0
        self._saved: Mapping[str, Any] | None = None

    def __repr__(self) -> str:
        return f"EMA({self.decay:g}, debias={self.debias})"

    @property
    def params(self) -> PyTree:
        """A copy of the average, with the dtypes and shardings of the parameters.

        Raises:
            RuntimeError: Training has not started.
        """
        if self._average is None:
            raise RuntimeError("The average does not exist yet: it starts with training.")
        return _cast(self._average, self._dtypes)

    def __call__(self, event: Event, /) -> None:
        """Updates the average after a call of the step."""
        if event.moment is Moment.START:
            self._start(event)
        if event.moment is Moment.STEP:
            self._update(event)

    def get_state(self) -> dict[str, Any]:
        """Returns the average, and the number of steps in it."""
        average = [] if self._average is None else to_saved(self._average)
        return {"step": self._step, "count": self._count, "average": average}

    def set_state(self, state: Mapping[str, Any], /) -> None:
        """Stores the result of `get_state` until the START event."""
        self._saved = state

    def _start(self, event: Event) -> None:
        saved, self._saved = self._saved, None
        params = self._params(event.state)
        if not saved and self._count and event.step == self._step and _have_same_placement(self._average, params):
            return
        self._dtypes = [x.dtype for x in jax.tree.leaves(params)]
        self._average = _cast(params, [_average_dtype(dtype) for dtype in self._dtypes])
        self._step, self._count = event.step, 0
        if saved and len(saved["average"]):
            self._average = from_saved("The average", saved["average"], self._average, event.strategy)
            self._step, self._count = int(saved["step"]), int(saved["count"])

    def _update(self, event: Event) -> None:
        steps, self._step = event.step - self._step, event.step
        if steps <= 0:
            return
        self._count += steps
        new_weight = _weight(self.decay, steps) / (_weight(self.decay, self._count) if self.debias else 1.0)
        leaves, treedef = jax.tree.flatten(self._average)
        params = jax.tree.leaves(self._params(event.state))
        for group in _groups_by_devices(leaves):
            shardings = tuple(leaves[i].sharding for i in group)
            old, new = [leaves[i] for i in group], [params[i] for i in group]
            with jax.transfer_guard_host_to_device("allow"):  # of the weight
                averages = call_donating(_mix, old, new, np.float32(new_weight), shardings)
            _replace_leaves(leaves, group, averages)
        self._average = treedef.unflatten(leaves)


def _weight(decay: float, steps: int) -> float:
    """Returns `1 - decay**steps`, without the rounding of a difference of nearly equal numbers."""
    return -math.expm1(steps * math.log(decay))


def _average_dtype(dtype: Any) -> Any:
    """Returns float32 for 16-bit floats, whose precision is too low to add a small fraction."""
    return jnp.promote_types(dtype, jnp.float32) if jnp.issubdtype(dtype, jnp.inexact) else dtype


def _have_same_placement(average: PyTree, params: PyTree) -> bool:
    placement = lambda tree: (jax.tree.structure(tree), [(x.shape, x.sharding) for x in jax.tree.leaves(tree)])
    return placement(average) == placement(params)


def _cast(tree: PyTree, dtypes: Sequence[Any]) -> PyTree:
    """Returns a copy of `tree` in these dtypes, with the same shardings."""
    leaves, treedef = jax.tree.flatten(tree)
    for group in _groups_by_devices(leaves):
        shardings = tuple(leaves[i].sharding for i in group)
        copies = _cast_leaves([leaves[i] for i in group], tuple(dtypes[i] for i in group), shardings)
        _replace_leaves(leaves, group, copies)
    return treedef.unflatten(leaves)


def _groups_by_devices(leaves: Sequence[jax.Array]) -> list[list[int]]:
    """Returns the indices of leaves on the same devices, which one program can process. Central storage uses two groups."""
    groups: dict[Any, list[int]] = {}
    for i, leaf in enumerate(leaves):
        groups.setdefault(frozenset(leaf.sharding.device_set), []).append(i)
    return list(groups.values())


def _replace_leaves(leaves: list[jax.Array], group: Sequence[int], results: Sequence[jax.Array]) -> None:
    """Replaces the leaves with these indices by the results of a program."""
    sharding = results[0].sharding
    if isinstance(sharding, NamedSharding) and is_bounded(sharding.mesh):  # pyright: ignore[reportArgumentType]
        wait_for_results(results)
    for i, leaf in zip(group, results, strict=True):
        leaves[i] = leaf


@functools.partial(jax.jit, static_argnums=3, donate_argnums=0)
def _mix(
    averages: Sequence[jax.Array], params: Sequence[jax.Array], new_weight: jax.Array, shardings: Sequence[Sharding]
) -> list[jax.Array]:
    def mix(average: jax.Array, param: jax.Array) -> jax.Array:
        if not jnp.issubdtype(average.dtype, jnp.inexact):
            return jnp.copy(param)
        weight = new_weight.astype(average.real.dtype)
        return (1 - weight) * average + weight * param.astype(average.dtype)

    triples = zip(averages, params, shardings, strict=True)
    return [_to_storage(mix(to_device_memory(x), to_device_memory(y)), sharding) for x, y, sharding in triples]


@functools.partial(jax.jit, static_argnums=(1, 2))
def _cast_leaves(leaves: Sequence[jax.Array], dtypes: Sequence[Any], shardings: Sequence[Sharding]) -> list[jax.Array]:
    cast = lambda x, dtype: jnp.copy(x) if x.dtype == dtype else x.astype(dtype)
    triples = zip(leaves, dtypes, shardings, strict=True)
    return [_to_storage(cast(to_device_memory(x), dtype), sharding) for x, dtype, sharding in triples]


def _to_storage(x: jax.Array, storage: Sharding) -> jax.Array:
    if storage.memory_kind == HOST_MEMORY:
        return jax.device_put(x, storage)
    return jax.lax.with_sharding_constraint(x, storage)
