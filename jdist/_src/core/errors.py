"""The errors that a caller may want to catch. All others are `ValueError`, `TypeError` or `RuntimeError`."""

from typing import Any


class NotMirroredError(ValueError):
    """A value that has to be the same on every replica could not be proved to be.

    Raised while the function is traced, before any device does anything. The message names the leaf, the chain of
    causes with the lines of the user's own code, and the ways out.
    """


class DivergentCollectiveError(ValueError):
    """A collective that some replicas may reach and others not, where all of them would wait for ever.

    Raised while the function is traced, for a collective below a `cond`, `switch` or `while_loop` whose predicate is
    not the same on every replica.
    """


class RepeatedSumWarning(UserWarning):
    """A sum over the replicas of a value that is the same on each: it multiplies by the number of replicas."""


class ReplicatedBatchWarning(UserWarning):
    """A step gets its batch as a plain array: each replica computes all of its examples, and the mean is over equal values."""


class BatchedElementsWarning(UserWarning):
    """Each element of a data source has as many rows as the batch that is made of such elements: it may be a batch already."""


class ClippedPerReplicaWarning(UserWarning):
    """Gradients are clipped before they are reduced, so each replica clips by the norm of its own."""


class FitError(RuntimeError):
    """Training was ended by an error, the cause of this one.

    Attributes:
        fit: The record, `jdist.Fit`: the history, and the state after the last step. The state is None if the error came from
            a step that had taken the memory of the state over; the message then names the last checkpoint.
    """

    def __init__(self, message: str, fit: Any):
        super().__init__(message)
        self.fit = fit

    def __reduce__(self) -> tuple[Any, ...]:
        rest = {name: value for name, value in vars(self).items() if name != "fit"}
        return type(self), (*self.args, self.fit), rest
