"""Programs: replica functions compiled for a mesh, and how they are called.

A call of a program is a call of `jax.jit`, with two things around it:

* A failure that JAX reports in terms of buffers and devices is said again in terms of the caller's values.
* On the CPU backend with several devices, one call is in flight at a time. XLA's CPU collectives wait for each other on
  a thread pool as large as the machine; with several steps in flight they can wait for ever, and XLA then ends the
  process. Waiting for each step costs what waiting for it by hand costs. On GPU and TPU calls stay asynchronous.
"""

from collections.abc import Callable

import jax
from jax import core
from jax.sharding import Mesh

from jdist._tree import PyTree, named_leaves
from jdist.context import in_replica_function
from jdist.replicate import Proof


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
        self._call = self._wait_for if mesh.devices.flat[0].platform == "cpu" and mesh.size > 1 else self._compiled

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

    def _wait_for(self, *args: PyTree) -> tuple[PyTree, PyTree]:
        if self._donates:
            # jax 0.10 ends the process with a segmentation fault when a donated array comes again.
            _check_not_donated(args[0])
        state, outputs = self._compiled(*args)
        # All arrays of one execution are ready together, so one of them stands for all.
        leaves = jax.tree.leaves(outputs) or jax.tree.leaves(state)
        if not leaves:
            jax.effects_barrier()
        elif not isinstance(leaves[0], core.Tracer):
            leaves[0].block_until_ready()
        return state, outputs

    def _check_places(self, args: tuple[PyTree, ...]) -> None:
        """Raises ValueError if what went wrong is that an array is spent, or lies on other devices."""
        if self._donates:
            _check_not_donated(args[0])
        ours = set(self._mesh.devices.flat)
        for name, leaf in named_leaves("arguments", args):
            if isinstance(leaf, jax.Array) and leaf.committed and leaf.sharding.device_set != ours:
                there = ", ".join(sorted(map(str, leaf.sharding.device_set)))
                here = ", ".join(map(str, self._mesh.devices.flat))
                raise ValueError(
                    f"{name} lies on {there}, and this strategy on {here}. If another strategy made it, let this one "
                    "make it; if it is a plain array, hand it in as a numpy array, or place it with `strategy.put`."
                )


def _check_not_donated(state: PyTree) -> None:
    try:
        spent = [leaf.is_deleted() for leaf in jax.tree.leaves(state)]
    except (AttributeError, jax.errors.ConcretizationTypeError):  # a number, or a tracer: nothing was donated
        return
    if any(spent):
        name, _ = named_leaves("state", state)[spent.index(True)]
        raise ValueError(
            f"{name} was given to a step before, which used its memory for the new state. Go on with the state that "
            "the step returned: `state, outputs = step(state, batch)`."
        )
