"""The current strategy: in scopes, in replica functions, and outside."""

import concurrent.futures
import threading

import jax
import pytest

import jdist


def test_strategy_outside_any_scope_is_one_replica_on_the_default_device():
    assert not jdist.has_strategy()
    default = jdist.get_strategy()
    assert isinstance(default, jdist.OneDeviceStrategy)
    assert list(default.mesh.devices.flat) == [jax.local_devices()[0]]
    assert jdist.get_strategy() is default


def test_strategy_in_a_scope_is_the_strategy_of_the_scope(strategy):
    with strategy.scope() as entered:
        assert entered is strategy
        assert jdist.get_strategy() is strategy
        assert jdist.has_strategy()
    assert not jdist.has_strategy()


def test_strategy_in_replica_function_is_the_one_that_runs_it(strategy):
    results = []
    strategy.run(lambda: results.append((jdist.get_strategy(), jdist.has_strategy())))
    assert results == [(strategy, True)]


def test_scope_may_be_nested_in_a_scope_of_the_same_strategy(strategy):
    with strategy.scope():
        with strategy.scope():
            assert jdist.get_strategy() is strategy
        assert jdist.get_strategy() is strategy
    assert not jdist.has_strategy()


def test_scope_object_may_be_entered_again_nested_and_later(two):
    scope = two.scope()
    for _ in range(2):
        with scope, scope:
            assert jdist.get_strategy() is two
            with scope:
                pass
            assert jdist.has_strategy()
        assert not jdist.has_strategy()


def test_scope_object_may_be_entered_in_two_threads_concurrently(two):
    scope, barrier = two.scope(), threading.Barrier(2, timeout=60)

    def enter(exits_first):
        with scope:
            barrier.wait()
            if exits_first:
                current = jdist.get_strategy()
            else:
                barrier.wait()
                current = jdist.get_strategy()
        if exits_first:
            barrier.wait()
        return current, jdist.has_strategy()

    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        assert list(pool.map(enter, [True, False])) == [(two, False)] * 2


def test_scope_object_that_raised_inside_another_scope_can_be_entered_later(two):
    scope, other = two.scope(), jdist.MirroredStrategy(["cpu:6", "cpu:7"])
    with other.scope():
        with pytest.raises(RuntimeError, match="is inside the scope of"):
            scope.__enter__()
        assert jdist.get_strategy() is other
    with scope:
        assert jdist.get_strategy() is two


def test_scope_object_as_decorator_is_entered_at_each_call(two):
    @two.scope()
    def current_strategy():
        return jdist.get_strategy()

    assert current_strategy() is current_strategy() is two
    assert not jdist.has_strategy()


def test_exit_of_a_scope_that_was_not_entered_raises(two):
    with pytest.raises(
        RuntimeError, match=r"MirroredStrategy\(.*\)\.scope\(\)` was exited in a thread or task that has not entered it"
    ):
        two.scope().__exit__(None, None, None)


def test_scope_inside_the_scope_of_another_strategy_raises_and_changes_nothing(strategy):
    other = jdist.MirroredStrategy(["cpu:6", "cpu:7"])
    message = r"scope of MirroredStrategy\(\['cpu:6', 'cpu:7'\]\) is inside the scope of .*Exit that one first"
    with strategy.scope():
        with pytest.raises(RuntimeError, match=message), other.scope():
            raise AssertionError("entered")
        assert jdist.get_strategy() is strategy


def test_scope_in_a_replica_function_raises(strategy):
    def enter():
        with strategy.scope():
            raise AssertionError("entered")

    message = r"`strategy\.scope` cannot be called inside a replica function: enter it around the call"
    with pytest.raises(RuntimeError, match=message):
        strategy.run(enter)
