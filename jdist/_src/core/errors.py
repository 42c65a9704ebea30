"""The exception and warning classes of jdist. Other errors are `ValueError`, `TypeError` or `RuntimeError`."""

from typing import Any


class NotMirroredError(ValueError):
    """A value that must be replicated could not be proved to be replicated.

    Raised while the function is traced, before anything runs on a device. The message names the leaf, the chain of causes
    with source lines of the user's code, and the possible fixes.
    """


class DivergentCollectiveError(ValueError):
    """A collective that only some replicas may reach; the replicas that reach it would wait forever.

    Raised while the function is traced, for a collective inside a `cond`, `switch` or `while_loop` whose predicate may
    differ between replicas.
    """


class NotEquivalentError(ValueError):
    """A step on several replicas does not compute what one device computes from the global batch (`equivalence="error"`).

    Raised while the step is traced. The message names the leaf of the state, the factor or the reason, the chain of operations
    with source lines, and the fix.
    """


class NotEquivalentWarning(UserWarning):
    """A step on several replicas does not compute what one device computes from the global batch."""


class RepeatedSumWarning(UserWarning):
    """A replicated value is summed over the replicas, which multiplies it by the number of replicas."""


class ReplicatedBatchWarning(UserWarning):
    """A step receives its batch as a plain array: every replica computes all examples, and the mean is over equal values."""


class BatchedElementsWarning(UserWarning):
    """Each element of a data source has as many rows as the batch size: the elements may already be batches."""


class ClippedPerReplicaWarning(UserWarning):
    """Gradients are clipped before they are reduced, so each replica clips by the norm of its local gradients."""


class SharedRandomnessWarning(UserWarning):
    """Every replica combines its own examples with the same random numbers, such as one dropout mask."""


class LocalCountWarning(UserWarning):
    """Values that each replica divided by its own count, such as its number of tokens, are averaged over the replicas."""


class UnrecognizedOptimizerStateWarning(UserWarning):
    """A part of a state looks like the state of an optimizer and is not recognized, so it is not sharded as one."""


class RetraceWarning(UserWarning):
    """A step is traced or compiled again because its arguments have changed, or functions are compiled again and again."""


class TransferWarning(UserWarning):
    """A line of a loop transfers values between host and devices in each step."""


class FitError(RuntimeError):
    """Training ended with an error, which is the `__cause__` of this exception.

    Attributes:
        fit: The `jdist.Fit` record: the history, and the state after the last completed step. The state is None if the
            failed step had already received the state's memory by donation; the message then names the last checkpoint.
    """

    def __init__(self, message: str, fit: Any):
        super().__init__(message)
        self.fit = fit

    def __reduce__(self) -> tuple[Any, ...]:
        attributes = {name: value for name, value in vars(self).items() if name != "fit"}
        return type(self), (*self.args, self.fit), attributes
