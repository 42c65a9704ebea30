"""Gradients that are clipped before they are reduced, each replica's by itself: legal, and seldom meant.

Policies name what they are handed (`GRADIENT_MARK`). Once a function is traced, the few equations behind that name are
looked at: if one was written by a clipping of optax, it is said once.
"""

import warnings
from collections.abc import Iterator
from typing import Any

from jdist._src.core import jax_compat, source_lines
from jdist._src.core.errors import ClippedPerReplicaWarning
from jdist._src.core.jax_compat import Equation, Jaxpr

GRADIENT_MARK = "jdist.sync.gradients"  # names what a policy is to reduce
PSEUDO_GRADIENT_MARK = (
    "jdist.sync.way"  # names what it is made of, where that is the way that a replica has gone by itself
)

_REACH = 12  # equations back: a few transformations may stand between
_warned: dict[str | tuple[str, type[Warning], int], int] = {}  # once a line, where warnings are shown once


def warn_of_clipped_gradients(program: Jaxpr) -> None:
    """Says where a policy of `program` is handed what was clipped.

    Warns:
        ClippedPerReplicaWarning: There is such a place.
    """
    for clip in _clips(program):
        place = source_lines.equation_frame(clip)
        if place:
            warnings.warn_explicit(_MESSAGE, ClippedPerReplicaWarning, place.file, place.line, registry=_warned)
            return


_MESSAGE = (
    "Gradients are clipped before they are reduced: each replica clips its own, by its own norm, and the mean of clipped "
    "gradients is not the clipped mean. Put the policy first: `optax.chain(jdist.sync.mean(), "
    "optax.clip_by_global_norm(1.0), ...)`."
)


def _clips(program: Jaxpr) -> Iterator[Equation]:
    makers: dict[Any, Equation] = {}
    for equation in program.eqns:
        if equation.primitive.name == "name" and equation.params["name"] == GRADIENT_MARK:
            yield from _behind(equation, makers)
        for inner in jax_compat.contents(equation).programs:
            yield from _clips(inner)
        makers.update(dict.fromkeys(equation.outvars, equation))


def _behind(mark: Equation, makers: dict[Any, Equation]) -> Iterator[Equation]:
    """The equations of a clipping that what is marked comes from, nearest first."""
    front, seen = [mark], set()
    for _ in range(_REACH):
        behind = [
            makers[v] for one in front for v in one.invars if not isinstance(v, jax_compat.Literal) and v in makers
        ]
        front = [one for one in behind if id(one) not in seen and one.primitive.name != "name"]
        seen.update(map(id, front))
        yield from (one for one in front if source_lines.is_from_file(one, "optax", "clip"))
