"""Bounded staleness: no order in which workers finish exceeds the bound, and none waits forever."""

from hypothesis import given
from hypothesis import strategies as st

from jdist._src.parameter_server.staleness import may_apply, may_start


@given(st.integers(1, 5), st.integers(0, 6), st.randoms(use_true_random=False))
def test_bound_holds_and_training_continues_in_every_order(num_workers, bound, random):
    versions, version, largest = [], 0, 0  # the versions that the workers in progress have read, in ascending order
    for _ in range(60):
        while len(versions) < num_workers and may_start(len(versions), bound):
            versions.append(version)
        assert versions
        allowed = [index for index in range(len(versions)) if may_apply(index, versions, version, bound)]
        assert 0 in allowed  # the worker with the oldest version never waits
        staleness = version - versions.pop(random.choice(allowed))
        largest, version = max(largest, staleness), version + 1
    assert largest <= bound


def test_without_a_bound_everything_is_allowed():
    assert may_start(100, None) and may_apply(3, [0, 0, 0, 0], 50, None)


def test_bound_of_zero_allows_one_worker():
    assert may_start(0, 0) and not may_start(1, 0)


def test_push_that_would_make_another_too_old_waits():
    assert not may_apply(1, [0, 1], 1, 1) and may_apply(0, [0, 1], 1, 1)
