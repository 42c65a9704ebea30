"""Which strategy is in force: in scopes, in replica functions, and outside."""

import jax
import pytest

import jdist


def test_strategy_outside_any_scope_is_one_replica_on_the_default_device():
    assert not jdist.has_strategy()
    default = jdist.get_strategy()
    assert isinstance(default, jdist.OneDeviceStrategy)
    assert list(default.mesh.devices.flat) == [jax.local_devices()[0]]
    assert jdist.get_strategy() is default


def test_strategy_in_scope_is_that_of_the_scope(strategy):
    with strategy.scope() as entered:
        assert entered is None
        assert jdist.get_strategy() is strategy
        assert jdist.has_strategy()
    assert not jdist.has_strategy()


def test_strategy_in_replica_function_is_the_one_that_runs_it(strategy):
    seen = []
    strategy.run(lambda: seen.append((jdist.get_strategy(), jdist.has_strategy())))
    assert seen == [(strategy, True)]


def test_scope_within_its_own_scope_is_allowed_and_left_one_by_one(strategy):
    with strategy.scope():
        with strategy.scope():
            assert jdist.get_strategy() is strategy
        assert jdist.get_strategy() is strategy
    assert not jdist.has_strategy()


def test_scope_within_the_scope_of_another_is_refused_and_changes_nothing(strategy):
    other = jdist.MirroredStrategy(["cpu:6", "cpu:7"])
    says = r"scope of MirroredStrategy\(\['cpu:6', 'cpu:7'\]\) is inside the scope of .*Leave that one first"
    with strategy.scope():
        with pytest.raises(RuntimeError, match=says), other.scope():
            raise AssertionError("entered")
        assert jdist.get_strategy() is strategy


def test_scope_in_replica_function_is_refused(strategy):
    def enter():
        with strategy.scope():
            raise AssertionError("entered")

    says = r"`strategy\.scope` is called by the host program, not in a replica function: enter it around the call"
    with pytest.raises(RuntimeError, match=says):
        strategy.run(enter)
