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


class ClippedPerReplicaWarning(UserWarning):
    """Gradients are clipped before they are reduced, so each replica clips by the norm of its own."""


class FitError(RuntimeError):
    """Training was ended by an error, the cause of this one, after steps whose results are not lost.

    Attributes:
        fit: The record of it, `jdist.Fit`: the state after the last step, and the history.
    """

    def __init__(self, message: str, fit: Any):
        super().__init__(message)
        self.fit = fit
