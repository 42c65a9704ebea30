"""What restores a lost server: its first values or a checkpoint, and the updates since then."""

import numpy as np

from jdist._src.parameter_server.ray_actors import Update
from jdist._src.parameter_server.storage import Shard
from jdist._src.parameter_server.update_history import RequestedUpdate, Snapshot, StoredLeaf, UpdateHistory


def update(history, server, number):
    history.add_update(server, RequestedUpdate(Update(number, 0, 0), f"values {number}"))


def sequences(history, server):
    start, requests = history.updates(server)
    return start, [request.update.sequence for request in requests]


def make_history():
    history = UpdateHistory(2)
    history.add_leaf(0, StoredLeaf([Shard(0, 0, 2), Shard(1, 2, 3)], [(0, 0), (0, 1)], ["first rows", "last rows"]))
    history.add_leaf(1, StoredLeaf([Shard(1)], [(1, 0)], ["other leaf"]))
    for number in (1, 2, 3):
        update(history, 0, number)
    update(history, 1, 1)
    return history


def snapshot(step):
    return Snapshot(step, [1, 0], lambda: [np.float32(step), np.arange(3) + step])


def test_without_a_checkpoint_all_updates_are_repeated():
    history = make_history()
    assert dict(history.values(0)) == {(0, 0): "first rows"}
    assert dict(history.values(1)) == {(0, 1): "last rows", (1, 0): "other leaf"}
    assert sequences(history, 0) == (0, [1, 2, 3]) and sequences(history, 1) == (0, [1])
    assert history.describe(0) == "its first values and 3 updates"


def test_checkpoint_replaces_the_values_and_the_updates_before_it():
    history = make_history()
    history.add_snapshot(snapshot(10))
    update(history, 0, 4)
    assert history.describe(0) == "the checkpoint of step 10 and 1 updates"
    assert {key: np.asarray(value).tolist() for key, value in history.values(0)} == {(0, 0): [10, 11]}
    assert {key: np.asarray(value).tolist() for key, value in history.values(1)} == {(0, 1): [12], (1, 0): 10}
    assert sequences(history, 0) == (3, [4]) and sequences(history, 1) == (1, [])


def test_next_checkpoint_completes_the_one_before():
    history = make_history()
    history.add_snapshot(snapshot(10))
    update(history, 0, 4)
    history.add_snapshot(snapshot(20))
    update(history, 1, 2)
    assert history.describe(1) == "the checkpoint of step 20 and 1 updates" and sequences(history, 0) == (4, [])


def test_leaf_that_was_added_after_a_checkpoint_has_its_first_value():
    history = make_history()
    history.add_snapshot(snapshot(10))
    history.add_leaf(2, StoredLeaf([Shard(0)], [(2, 0)], ["new leaf"]))
    assert dict(history.values(0))[2, 0] == "new leaf"


def test_history_starts_again_with_the_current_values_after_a_leaf_was_removed():
    history = make_history()
    history.add_snapshot(snapshot(10))
    update(history, 0, 4)
    history.start_again({1: StoredLeaf([Shard(1)], [(1, 0)], ["current"])})
    update(history, 1, 2)
    assert dict(history.values(0)) == {} and dict(history.values(1)) == {(1, 0): "current"}
    assert sequences(history, 0) == (4, []) and sequences(history, 1) == (1, [2])
