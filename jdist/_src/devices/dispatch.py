"""Bounds the program calls in flight on CPU devices to one.

XLA's CPU collectives wait for each other on a thread pool as large as the machine. A loop that dispatches steps over several
CPU devices faster than they finish can therefore deadlock, and XLA then aborts the process. So a call over several CPU
devices first waits for the call before it. It waits before it donates anything: Ctrl-C during the wait, where a loop spends
nearly all of its time, leaves the caller with a state that is valid.
"""

from collections.abc import Sequence
from typing import Any

import jax
from jax import core
from jax.sharding import Mesh

from jdist._src.core.tree import PyTree

_in_flight: list[tuple[jax.Array, int]] = []  # one result of the last call, and the `id` of the program that was called


def is_bounded(mesh: Mesh) -> bool:
    """Whether calls over this mesh have to run one at a time."""
    return mesh.devices.flat[0].platform == "cpu" and mesh.size > 1


def wait_for_previous(program: object = None) -> None:
    """Waits until the call that `track` recorded last has finished.

    Raises:
        jax.errors.JaxRuntimeError: That was a call of `program`, and it failed, as by an exception in a callback. The error of
            another program is raised where its results are read.
    """
    for array, owner in _in_flight[-1:]:
        try:
            if not array.is_deleted():  # else it was donated to another program, which runs after this one
                array.block_until_ready()
        except Exception:
            _in_flight.clear()
            if owner == id(program):
                raise
        _in_flight.clear()  # not where Ctrl-C ends the wait


def record_call(leaves: Sequence[Any], index: int, program: object = None) -> None:
    """Records the results of a call: all are ready together, so `leaves[index]` stands for all of them."""
    if not leaves:
        jax.effects_barrier()
    elif isinstance(leaf := leaves[min(index, len(leaves) - 1)], jax.Array) and not isinstance(leaf, core.Tracer):
        _in_flight[:] = [(leaf, id(program))]


def wait_for_results(results: PyTree) -> None:
    """Waits for `results`, all of one call: they are ready together, so the last stands for all."""
    leaves = jax.tree.leaves(results)
    if not leaves:
        jax.effects_barrier()
    elif not isinstance(leaves[-1], core.Tracer):
        leaves[-1].block_until_ready()
