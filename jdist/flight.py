"""How many calls may be in flight: on the CPU one, elsewhere as many as the caller gives.

XLA's CPU collectives meet on a thread pool as large as the machine. A loop that dispatches steps over several CPU devices
faster than they finish can make them wait for each other for ever, and XLA then ends the process. So on the CPU backend
a call over several devices is waited for, which costs what waiting for it by hand costs.
"""

import jax
from jax import core
from jax.sharding import Mesh

from jdist._tree import PyTree


def is_bounded(mesh: Mesh) -> bool:
    """Whether calls over this mesh have to land one by one."""
    return mesh.devices.flat[0].platform == "cpu" and mesh.size > 1


def land(results: PyTree) -> None:
    """Waits for the call that gave `results`, all of one execution: they are ready together, so the last stands for all."""
    leaves = jax.tree.leaves(results)
    if not leaves:
        jax.effects_barrier()
    elif not isinstance(leaves[-1], core.Tracer):
        leaves[-1].block_until_ready()
