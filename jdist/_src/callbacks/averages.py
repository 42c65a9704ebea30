"""Averages of the parameters over the steps."""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, final

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, Sharding

from jdist._src.callbacks.arguments import check_function
from jdist._src.callbacks.state_copies import from_saved, leaves_to_save
from jdist._src.core.tree import PyTree
from jdist._src.devices.dispatch import is_bounded, wait_for_results
from jdist._src.devices.mesh import HOST_MEMORY
from jdist._src.training.events import Event, Moment


def _params(state: PyTree) -> PyTree:
    try:
        return state["params"] if isinstance(state, Mapping) else state.params
    except (AttributeError, KeyError):
        raise ValueError(
            f"The state, {type(state).__name__}, has no `params`. Say where they are: `EMA(decay, params=lambda state: ...)`."
        ) from None


@final
class EMA:
    """An exponential moving average of the parameters, kept on the devices.

    It lies as the parameters do, leaf by leaf, in their wrappers, so no device hears of another's part. Where they drift
    (`SyncOnRead`) each replica averages its own, and `jdist.read_values` of the average is the average of what would have been
    read. It is kept as float32 at least. Whole numbers are not averaged: the last ones are kept.

    Mutable: the average is in it. It is saved with checkpoints, and a resumed run goes on with the same bits. A further `fit`
    of the same state goes on, too; one of another state begins anew.

    Args:
        decay: The weight of what was, a step. With several steps a call only the parameters after the last of them are seen:
            they get the weight of all, `1 - decay**steps`.
        debias: Whether the average is that of the parameters after each step, their weights scaled to add up to 1, so that
            those in the beginning leave no trace. Otherwise it begins with them, as in TensorFlow.
        params: From the state to the parameters, `state.params` by default.

    Raises:
        ValueError: Said before the first step: the state has no `params`.

    Example:
        >>> average = jdist.callbacks.EMA(0.999)
        >>> # Afterwards: trainer.evaluate(dataclasses.replace(fit.state, params=average.params), data, batch_size=64)
    """

    def __init__(self, decay: float, *, debias: bool = True, params: Callable[[PyTree], PyTree] = _params):
        if isinstance(decay, bool) or not isinstance(decay, (int, float)) or not 0 < decay < 1:
            raise ValueError(f"`decay` is a number between 0 and 1, such as 0.999, got {decay!r}.")
        check_function("params", params, "the state")
        self.decay, self.debias, self._params = float(decay), debias, params
        self._average: PyTree = None
        self._dtypes: list[Any] = []  # of the parameters
        self._step = self._count = 0
        self._saved: Mapping[str, Any] | None = None

    def __repr__(self) -> str:
        return f"EMA({self.decay:g}, debias={self.debias})"

    @property
    def identity(self) -> str:
        """What its memory in a checkpoint is found by: all options."""
        params = "" if self._params is _params else f", params={getattr(self._params, '__qualname__', 'function')}"
        return f"EMA({self.decay!r}, debias={self.debias}{params})"

    @property
    def params(self) -> PyTree:
        """The average now, in the dtypes and the places of the parameters; a copy.

        Raises:
            RuntimeError: There was no step yet.
        """
        if self._average is None:
            raise RuntimeError("There is no average yet: it begins when training does.")
        return _cast(self._average, self._dtypes)

    def __call__(self, event: Event, /) -> None:
        """Called by the loop."""
        if event.moment is Moment.START:
            self._begin(event)
        if event.moment is Moment.STEP:
            self._take(event)

    def get_state(self) -> dict[str, Any]:
        """What a resumed run needs."""
        average = [] if self._average is None else leaves_to_save(self._average)
        return {"step": self._step, "count": self._count, "average": average}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Takes it back."""
        self._saved = state

    def _begin(self, event: Event) -> None:
        saved, self._saved = self._saved, None
        params = self._params(event.state)
        if not saved and self._count and event.step == self._step and _lie_alike(self._average, params):
            return
        self._dtypes = [x.dtype for x in jax.tree.leaves(params)]
        self._average = _cast(params, [_wide(dtype) for dtype in self._dtypes])
        self._step, self._count = event.step, 0
        if saved and len(saved["average"]):
            self._average = from_saved("The average", saved["average"], self._average, event.strategy)
            self._step, self._count = int(saved["step"]), int(saved["count"])

    def _take(self, event: Event) -> None:
        steps, self._step = event.step - self._step, event.step
        if steps <= 0:
            return
        self._count += steps
        new = _lost(self.decay, steps) / (_lost(self.decay, self._count) if self.debias else 1.0)
        leaves, treedef = jax.tree.flatten(self._average)
        params = jax.tree.leaves(self._params(event.state))
        for group in _by_devices(leaves):
            places = tuple(leaves[i].sharding for i in group)
            found = _mixed([leaves[i] for i in group], [params[i] for i in group], np.float32(new), places)
            _landed(group, found, leaves)
        self._average = treedef.unflatten(leaves)


def _lost(decay: float, steps: int) -> float:
    """What so many steps take off the weight of what was: `1 - decay**steps`, without cancellation."""
    return -math.expm1(steps * math.log(decay))


def _wide(dtype: Any) -> Any:
    """What an average is kept in: a small part of a 16-bit number, added to one, would be lost."""
    return jnp.promote_types(dtype, jnp.float32) if jnp.issubdtype(dtype, jnp.inexact) else dtype


def _lie_alike(average: PyTree, params: PyTree) -> bool:
    places = lambda tree: (jax.tree.structure(tree), [(x.shape, x.sharding) for x in jax.tree.leaves(tree)])
    return places(average) == places(params)


def _cast(tree: PyTree, dtypes: Sequence[Any]) -> PyTree:
    """A copy of `tree` in these dtypes, in the same places."""
    leaves, treedef = jax.tree.flatten(tree)
    for group in _by_devices(leaves):
        places = tuple(leaves[i].sharding for i in group)
        found = _converted([leaves[i] for i in group], tuple(dtypes[i] for i in group), places)
        _landed(group, found, leaves)
    return treedef.unflatten(leaves)


def _by_devices(leaves: Sequence[jax.Array]) -> list[list[int]]:
    """The numbers of those that lie on the same devices, as one program takes them: a central state lies on others."""
    groups: dict[Any, list[int]] = {}
    for i, leaf in enumerate(leaves):
        groups.setdefault(frozenset(leaf.sharding.device_set), []).append(i)
    return list(groups.values())


def _landed(group: Sequence[int], found: Sequence[jax.Array], leaves: list[jax.Array]) -> None:
    """Puts what was found in the place of the leaves."""
    sharding = found[0].sharding
    if isinstance(sharding, NamedSharding) and is_bounded(sharding.mesh):  # pyright: ignore[reportArgumentType]
        wait_for_results(found)
    for i, leaf in zip(group, found, strict=True):
        leaves[i] = leaf


@functools.partial(jax.jit, static_argnums=3, donate_argnums=0)
def _mixed(
    average: Sequence[jax.Array], params: Sequence[jax.Array], new: jax.Array, places: Sequence[Sharding]
) -> list[jax.Array]:
    def mixed(old: jax.Array, now: jax.Array) -> jax.Array:
        if not jnp.issubdtype(old.dtype, jnp.inexact):
            return jnp.copy(now)
        part = new.astype(old.real.dtype)
        return (1 - part) * old + part * now.astype(old.dtype)

    triples = zip(average, params, places, strict=True)
    return [_there(mixed(_here(old, place), _here(now, place)), place) for old, now, place in triples]


@functools.partial(jax.jit, static_argnums=(1, 2))
def _converted(leaves: Sequence[jax.Array], dtypes: Sequence[Any], places: Sequence[Sharding]) -> list[jax.Array]:
    triples = zip(leaves, dtypes, places, strict=True)
    converted = lambda x, dtype: jnp.copy(x) if x.dtype == dtype else x.astype(dtype)
    return [_there(converted(_here(x, place), dtype), place) for x, dtype, place in triples]


def _here(x: jax.Array, place: Sharding) -> jax.Array:
    """`x` on the devices, if it lies in the memory of their hosts."""
    return jax.device_put(x, place.with_memory_kind("device")) if place.memory_kind == HOST_MEMORY else x


def _there(x: jax.Array, place: Sharding) -> jax.Array:
    return jax.device_put(x, place) if place.memory_kind == HOST_MEMORY else jax.lax.with_sharding_constraint(x, place)
