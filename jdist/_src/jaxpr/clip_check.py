"""Warns if gradients are clipped before they are reduced: legal, but each replica then clips its own gradients.

Policies mark their input with a name (`GRADIENT_MARK`). In the traced function, the few equations before such a mark are
searched for one that a clipping transformation of optax made. The search follows operands within one jaxpr: the update
functions of optax are traced into the jaxpr that calls them.
"""

from collections.abc import Iterator
from typing import Any

from jdist._src.core import jax_compat, source_lines
from jdist._src.core.errors import ClippedPerReplicaWarning
from jdist._src.core.jax_compat import Equation, Jaxpr, Literal
from jdist._src.jaxpr.marks import GRADIENT_MARK, mark_of
from jdist._src.jaxpr.replication import warn_once

_MAX_DISTANCE = 12  # equations between the clipping and the mark, for a few transformations in between


def warn_of_clipped_gradients(program: Jaxpr) -> None:
    """Warns on the user's line if a policy of `program` receives clipped gradients.

    Warns:
        ClippedPerReplicaWarning: The input of a policy comes from a clipping transformation.
    """
    for clip in _clips_before_policies(program):
        place = source_lines.warning_frame(clip)
        if place:
            warn_once(_MESSAGE, ClippedPerReplicaWarning, place)
            return


_MESSAGE = (
    "Gradients are clipped before they are reduced: each replica clips its own gradients by its own norm, and the mean of "
    "clipped gradients is not the clipped mean. Put the policy first: `optax.chain(jdist.sync.mean(), "
    "optax.clip_by_global_norm(1.0), ...)`."
)


def _clips_before_policies(jaxpr: Jaxpr) -> Iterator[Equation]:
    producers: dict[Any, Equation] = {}
    for equation in jaxpr.eqns:
        if mark_of(equation) == GRADIENT_MARK:
            yield from _clips_before(equation, producers)
        for inner in jax_compat.contents(equation).jaxprs:
            yield from _clips_before_policies(inner)
        producers.update(dict.fromkeys(equation.outvars, equation))


def _clips_before(mark: Equation, producers: dict[Any, Equation]) -> Iterator[Equation]:
    """Yields the equations of optax's clipping that the marked value is computed from, nearest first."""
    front, seen = [mark], set()
    for _ in range(_MAX_DISTANCE):
        operands = [atom for equation in front for atom in equation.invars if not isinstance(atom, Literal)]
        before = [producers[var] for var in operands if var in producers]
        front = [one for one in before if id(one) not in seen and one.primitive.name != "name"]
        seen.update(map(id, front))
        yield from (one for one in front if _may_clip(one) and _clip_functions(one) and not clips_per_example(one))


def _may_clip(equation: Equation) -> bool:
    """Whether an equation may be the last one of a clipping transformation; reading the functions of all takes long."""
    return equation.primitive.name in ("select_n", "jit", "div", "min", "max", "clamp")


def clips_per_example(equation: Equation) -> bool:
    """Whether an optax function that clips each row of `[example, ...]`, as DP-SGD does, traced `equation`."""
    return any("per_example" in name for name in _clip_functions(equation))


def _clip_functions(equation: Equation) -> list[str]:
    return source_lines.functions_in_file(equation, "optax", "clip")
