"""Values that go through a checkpoint: the rows SV of `rows.txt`."""

import dataclasses

import numpy as np
import orbax.checkpoint as ocp
import pytest

import jdist

from laws import STRATEGIES, assert_in_step


@pytest.fixture
def through_checkpoint(tmp_path):
    """Saves a tree of arrays, and restores it like another tree."""

    def save_and_restore(tree, like):
        with ocp.StandardCheckpointer() as checkpointer:
            checkpointer.save(tmp_path / "state", tree)
            checkpointer.wait_until_finished()
            return checkpointer.restore(tmp_path / "state", like)

    return save_and_restore


def _read_as_sum(strategy, *values):
    return strategy.put(jdist.SyncOnRead(np.float32(values), "sum"))


def _components(value):
    return [np.asarray(x).tolist() for x in value.values]


HOST = {"v": np.zeros((), np.float32)}


def test_sv1_sync_on_read_sum_is_saved_as_one_value(two, through_checkpoint):
    restored = through_checkpoint({"v": _read_as_sum(two, 4, 3).read()}, HOST)
    assert restored["v"].item() == 7.0
    assert [float(x) for x in two.local_results(two.put(restored["v"]))] == [7.0, 7.0]
    assert _components(_read_as_sum(two, 0, 0).assign(restored["v"])) == [3.5, 3.5]


def test_sv4_sync_on_read_sum_is_restored_in_equal_shares(two, through_checkpoint):
    saved = _read_as_sum(two, 1.5, 2)
    assert float(saved.read()) == 3.5
    restored = through_checkpoint({"v": saved.read()}, HOST)
    assert _components(saved.assign(restored["v"])) == [1.75, 1.75]


def test_sv4_sum_saved_under_every_strategy_is_restored_on_two(strategy, two, through_checkpoint):
    saved = _read_as_sum(strategy, *range(strategy.num_replicas_in_sync)).read()
    restored = _read_as_sum(two, 5, 6).assign(through_checkpoint({"v": saved}, HOST)["v"])
    assert _components(restored) == [float(saved) / 2] * 2


def test_sv6_mirrored_value_is_restored_as_a_plain_one_and_back(strategy, through_checkpoint):
    with strategy.scope():
        mirrored = jdist.variable(np.float32([1, 2]), synchronization="on_write", aggregation="mean")
    plain = through_checkpoint({"v": mirrored.read()}, {"v": np.zeros(2, np.float32)})["v"]
    np.testing.assert_array_equal(plain, [1, 2])
    again = mirrored.assign(np.zeros(2, np.float32)).assign(plain)
    assert _components(again) == [[1.0, 2.0]] * strategy.num_replicas_in_sync


def test_sv6_plain_value_is_restored_as_a_mirrored_one_with_its_placement(strategy, through_checkpoint):
    with strategy.scope():
        like = jdist.variable(np.zeros(2, np.float32), synchronization="on_write", aggregation="mean")
    restored = through_checkpoint({"v": np.float32([3, 4])}, {"v": like.read()})["v"]
    assert_in_step(restored)
    assert restored.sharding == like.read().sharding
    assert _components(dataclasses.replace(like, tree=restored)) == [[3.0, 4.0]] * strategy.num_replicas_in_sync


@pytest.fixture
def four():
    return jdist.MirroredStrategy([f"cpu:{i}" for i in range(4)])


def _sharded(strategy, values):
    return strategy.put(jdist.Sharded(np.float32(values)))


PARTS = {"one_device": [[0.0, 1.0, 2.0, 3.0]], "mirrored_2": [[0.0, 1.0], [2.0, 3.0]]}


@pytest.mark.parametrize("name, parts", PARTS.items(), ids=PARTS)
def test_sv11_sv13_value_sharded_over_four_devices_is_restored_over_fewer(name, parts, four, through_checkpoint):
    saved = _sharded(four, [0, 1, 2, 3])
    assert _components(saved) == [[0.0], [1.0], [2.0], [3.0]]
    like = _sharded(STRATEGIES[name](), [0, 0, 0, 0])
    restored = through_checkpoint({"v": saved.read()}, {"v": like.read()})["v"]
    assert restored.sharding == like.read().sharding
    assert _components(like.assign(restored)) == _components(dataclasses.replace(like, tree=restored)) == parts


def test_sv11_value_restored_without_a_placement_is_sharded_later(four, two, through_checkpoint):
    saved = _sharded(four, [0, 1, 2, 3])
    loaded = through_checkpoint({"v": saved.read()}, {"v": np.zeros(4, np.float32)})["v"]
    assert _components(_sharded(two, loaded)) == [[0.0, 1.0], [2.0, 3.0]]


def test_sv12_value_on_one_replica_is_restored_over_four(four, through_checkpoint):
    saved = _sharded(STRATEGIES["one_device"](), [5, 10, 15, 20])
    like = _sharded(four, [0, 0, 0, 0])
    restored = through_checkpoint({"v": saved.read()}, {"v": like.read()})["v"]
    assert _components(dataclasses.replace(like, tree=restored)) == [[5.0], [10.0], [15.0], [20.0]]
