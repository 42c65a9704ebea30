"""Programs: replica functions compiled for a mesh, and how they are called.

A call of a program is a call of `jax.jit`. Around it, a failure that JAX reports in terms of buffers and devices is said
again in terms of the caller's values, and on the CPU the call is waited for (`jdist.flight`).
"""

from collections.abc import Callable

import jax
from jax import core
from jax.sharding import Mesh

from jdist._tree import PyTree, named_leaves
from jdist.context import in_replica_function
from jdist.flight import is_bounded, land
from jdist.replicate import Proof
from jdist.values import check_place


class Program:
    """A replica function compiled for the devices of a strategy.

    Mutable: JAX's cache of compiled programs is inside, and the proof of the last one that was traced.

    Args:
        whole: What `jax.jit` traces: gives the pair `(state, outputs)` and its proof.
        name: What profiles call it.
        mesh: The devices.
        donate: The positions of the arguments whose memory the results take over.
    """

    def __init__(
        self,
        whole: Callable[..., tuple[tuple[PyTree, PyTree], Proof]],
        name: str,
        mesh: Mesh,
        donate: tuple[int, ...] = (),
    ):
        proofs: list[Proof] = []

        def traced(*args: PyTree) -> tuple[PyTree, PyTree]:
            pair, proof = whole(*args)
            proofs[:] = [proof]
            return pair

        traced.__name__ = name
        self._proofs = proofs
        self._mesh = mesh
        self._donates = bool(donate)
        self._compiled = jax.jit(traced, donate_argnums=donate)
        self._call = self._call_and_land if is_bounded(mesh) else self._compiled

    def __call__(self, *args: PyTree) -> tuple[PyTree, PyTree]:
        """`(state, outputs)` of the replica function, as the host sees them."""
        if in_replica_function():
            raise RuntimeError(
                "A strategy runs a function inside a function that a strategy is already running. Call the inner one "
                "directly: in a replica function the values are one replica's plain arrays."
            )
        try:
            return self._call(*args)
        except (ValueError, RuntimeError):
            self._check_places(args)
            raise

    @property
    def proof(self) -> Proof:
        """What was proved when the function was traced last.

        Raises:
            RuntimeError: It was not called yet.
        """
        if not self._proofs:
            raise RuntimeError("Nothing is proved yet: a step is traced when it is called for the first time.")
        return self._proofs[0]

    def _call_and_land(self, *args: PyTree) -> tuple[PyTree, PyTree]:
        if self._donates:
            # jax 0.10 ends the process with a segmentation fault when a donated array comes again.
            _check_not_donated(args[0])
        state, outputs = self._compiled(*args)
        land(outputs if jax.tree.leaves(outputs) else state)
        return state, outputs

    def _check_places(self, args: tuple[PyTree, ...]) -> None:
        """Raises ValueError if what went wrong is that an array is spent, or lies on other devices."""
        if self._donates:
            _check_not_donated(args[0])
        for name, leaf in named_leaves("arguments", args):
            if isinstance(leaf, jax.Array) and leaf.committed:
                check_place(name, leaf, self._mesh)


def _check_not_donated(state: PyTree) -> None:
    leaves = jax.tree.leaves(state)
    try:
        spent = [leaf.is_deleted() for leaf in leaves]
    except (AttributeError, jax.errors.ConcretizationTypeError):  # some are numbers, or tracers: these are not donated
        arrays = [isinstance(leaf, jax.Array) and not isinstance(leaf, core.Tracer) for leaf in leaves]
        spent = [is_array and leaf.is_deleted() for is_array, leaf in zip(arrays, leaves, strict=True)]
    if any(spent):
        name, _ = named_leaves("state", state)[spent.index(True)]
        raise ValueError(
            f"{name} was given to a step before, which used its memory for the new state. Go on with the state that "
            "the step returned: `state, outputs = step(state, batch)`."
        )
