"""Checkpoints while training goes on."""

from collections.abc import Mapping, Sequence
from typing import Any, final

import jax

from jdist._src.callbacks.state_copies import in_order, with_names
from jdist._src.checkpoint.checkpointer import Checkpointer
from jdist._src.checkpoint.tree_format import Leaf, leaves_of
from jdist._src.core.tree import PyTree
from jdist._src.strategies.base import Strategy
from jdist._src.training.events import Event, Moment
from jdist._src.values.aggregation import VariableAggregation
from jdist._src.values.base import is_distributed
from jdist._src.values.sync_on_read import SyncOnRead


def shares(state: PyTree) -> dict[str, Any]:
    """What each replica has of the values that are read as a sum, leaves `[replica, ...]`, with their names.

    A checkpoint has their total, for any number of replicas to share. As many replicas as before go on to the same bits only
    with the shares that they had.
    """
    leaves = _summed(state)
    return with_names(leaves, [leaf.value for leaf in leaves])


def with_shares(state: PyTree, kept: Mapping[str, Any] | Sequence[PyTree], strategy: Strategy) -> PyTree:
    """`state` with what `shares` gave of it."""
    left = iter(in_order(kept, _summed(state)))
    filled = lambda item: item._with_tree(jax.tree.map(lambda _: next(left), item.tree))
    own = lambda item: strategy.put(filled(item)) if _is_sum(item) else item
    return jax.tree.map(own, state, is_leaf=is_distributed)


def _summed(state: PyTree) -> list[Leaf]:
    return [leaf for leaf in leaves_of(state) if _is_sum(leaf.wrapper)]


def _is_sum(item: Any) -> bool:
    return isinstance(item, SyncOnRead) and item.aggregation is VariableAggregation.SUM


@final
class Checkpoint:
    """Saves the training state, the position in the data, what callbacks remember, and the history.

    That is done after the step, or the call of several, in which one that the checkpointer's `every` divides was taken; if
    that ends an epoch, behind its validation; and at the end, where it is waited for. The state at the end is the one after
    the last step, whatever another callback ends training with: that is where a resumed run goes on.

    Args:
        checkpointer: Says how often, where, and how many are kept.

    Raises:
        TypeError: It is no `jdist.Checkpointer`.

    Example:
        >>> import tempfile
        >>> trainer = jdist.Trainer(
        ...     (lambda key, x: jax.numpy.zeros(3), lambda w, x: x @ w), optax.sgd(0.1), optax.squared_error,
        ...     strategy=jdist.OneDeviceStrategy("cpu:0"),
        ... )
        >>> with tempfile.TemporaryDirectory() as folder, jdist.Checkpointer(folder, every=2) as checkpointer:
        ...     saving = Checkpoint(checkpointer)
        ...     data = (np.ones((10, 3), np.float32), np.ones(10, np.float32))
        ...     fit = trainer.fit(data, batch_size=2, callbacks=[saving], resume=checkpointer, progress="off")
        ...     print(checkpointer.steps())
        (2, 4, 5)
    """

    def __init__(self, checkpointer: Checkpointer):
        if not isinstance(checkpointer, Checkpointer):
            raise TypeError(
                f"`Checkpoint` takes a `jdist.Checkpointer(path, every=...)`, got {type(checkpointer).__name__}."
            )
        self._checkpointer = checkpointer
        self._seen = self._latest = 0
        self._is_due = False

    @property
    def checkpointer(self) -> Checkpointer:
        """The checkpointer that it saves with."""
        return self._checkpointer

    def __call__(self, event: Event, /) -> None:
        """Called by the loop, behind other callbacks: what they keep is then of this event too."""
        every = self._checkpointer.every
        self._is_due |= event.step // every > self._seen // every
        self._seen = event.step
        match event.moment:
            case Moment.START:
                self._latest, self._is_due = event.step, False
            case Moment.STEP if self._is_due and not event.ends_epoch:
                self._save(event)
            case Moment.EPOCH if self._is_due:
                self._save(event)
            case Moment.END:
                # A step back: later ones were refused, for a loss that is not finite, and left the state as it is.
                if event.step > self._latest:
                    self._save(event)
                self._checkpointer.wait()

    def close(self) -> None:
        """Waits for what is being saved."""
        self._checkpointer.wait()

    def _save(self, event: Event) -> None:
        self._is_due = False
        if not event.is_sound() and event.moment is not Moment.END:
            return
        replicas = event.strategy.num_replicas_in_sync
        extra = {**event.kept(), "replicas": replicas, "shares": shares(event.state)}
        seed = event.position.get("seed")
        self._checkpointer.save(event.step, event.state, event.position, seed=seed, extra=extra, now=True)
        self._latest = event.step
