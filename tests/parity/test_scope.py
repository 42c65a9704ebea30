"""Rows SC of `rows.txt`: the current strategy, and the devices of a strategy."""

import jax
import pytest

import jdist


def test_sc1_outside_any_scope_there_is_one_replica_numbered_0():
    assert not jdist.has_strategy()
    assert not jdist.in_cross_replica_context()
    assert jdist.get_strategy().num_replicas_in_sync == jdist.num_replicas() == 1
    assert int(jdist.replica_id()) == 0
    context = jdist.get_replica_context()
    assert context is not None
    assert context.strategy is jdist.get_strategy()
    assert (context.num_replicas_in_sync, int(context.replica_id_in_sync_group)) == (1, 0)


def test_sc2_in_scope_the_host_is_in_the_cross_replica_context(strategy):
    with strategy.scope():
        assert jdist.has_strategy()
        assert jdist.in_cross_replica_context()
        assert jdist.get_replica_context() is None
        assert jdist.get_strategy() is strategy


def test_sc4_scope_inside_the_scope_of_another_strategy_is_an_error(two):
    other = jdist.MirroredStrategy(["cpu:2", "cpu:3"])
    message = r"scope of MirroredStrategy\(\['cpu:2', 'cpu:3'\]\) is inside the scope of .*cpu:0.*Exit that one first"
    with two.scope(), pytest.raises(RuntimeError, match=message), other.scope():
        raise AssertionError("entered")


def test_sc5_set_strategy_is_current_until_the_next_one(two):
    other = jdist.MirroredStrategy(["cpu:2", "cpu:3"])
    default = jdist.get_strategy()
    try:
        jdist.set_strategy(two)
        assert jdist.get_strategy() is two
        jdist.set_strategy(other)
        assert jdist.get_strategy() is other
    finally:
        jdist.set_strategy(None)
    assert jdist.get_strategy() is default
    assert not jdist.has_strategy()


def test_sc12_scope_of_the_default_strategy_inside_another_is_an_error(two):
    default = jdist.get_strategy()
    message = r"scope of OneDeviceStrategy\(\['cpu:0'\]\) is inside the scope of MirroredStrategy.*Exit that one first"
    with two.scope(), pytest.raises(RuntimeError, match=message), default.scope():
        jdist.variable(1.0)


def test_sc13_device_named_twice_is_an_error():
    with pytest.raises(ValueError, match=r"`devices` has duplicates: cpu:0\..*name it once"):
        jdist.MirroredStrategy(["CPU:0", "CPU:0"])


def test_sc14_device_of_an_unknown_platform_is_an_error_with_the_local_devices():
    with pytest.raises(ValueError, match=r"Device 'TPUX:0' not found\. This process has cpu:0, cpu:1"):
        jdist.MirroredStrategy(["TPUX:0"])


def default_strategy():
    return str(jdist.MirroredStrategy())


@pytest.mark.slow
def test_sc15_default_is_all_local_devices():
    with jdist.testing.processes(1, devices_per_process=3) as one:
        assert one.run(f"{__name__}:default_strategy") == ["MirroredStrategy(['cpu:0', 'cpu:1', 'cpu:2'])"]
    assert list(jdist.MirroredStrategy().mesh.devices.flat) == jax.local_devices()


def test_sc16_empty_list_of_devices_is_an_error():
    with pytest.raises(ValueError, match=r"`devices` is empty\. Name at least one device, or omit it"):
        jdist.MirroredStrategy([])
