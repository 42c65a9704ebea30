"""Bounded staleness: whether a worker may start, and whether the servers may apply its results next.

The *version* of a state is the number of updates that were applied to it. The results of a worker that read version `v` and
are applied to version `n` have the staleness `n - v`. Under a bound `s` they must be applied while `n <= v + s`: each has a
deadline, and the deadlines of all workers can be met exactly if they can be met in the order of the versions read.

Source:
    Q. Ho et al., "More effective distributed ML via a stale synchronous parallel parameter server", NeurIPS 2013. There a clock
    counts the updates of each worker; here one version counts the updates of all workers, so the bound is about the state.
"""

from collections.abc import Sequence


def may_start(num_in_progress: int, bound: int | None) -> bool:
    """Returns whether another worker may read the current version: its results have the latest deadline of all."""
    return bound is None or num_in_progress <= bound


def may_apply(index: int, versions: Sequence[int], version: int, bound: int | None) -> bool:
    """Returns whether the results of one worker may be applied before the results of the others.

    Args:
        index: The index of the worker's version in `versions`.
        versions: The version that each worker in progress has read, in ascending order.
        version: The version of the state.
        bound: The maximum staleness, or None.
    """
    if bound is None:
        return True
    others = [*versions[:index], *versions[index + 1 :]]
    return all(version + 1 + number <= other + bound for number, other in enumerate(others))
