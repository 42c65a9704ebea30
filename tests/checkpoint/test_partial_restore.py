"""Restores of a part of a checkpoint, and of leaves under other names."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jdist
from jdist._src.checkpoint.checkpointer import Checkpointer

from laws import STRATEGIES

STATE = {
    "params": {"encoder": {"w": np.float32([[1, 2], [3, 4]]), "b": np.float32([5, 6])}, "head": np.float32([7])},
    "seen": jdist.SyncOnRead({"total": np.ones((1, 2), np.float32), "count": np.ones((1,), np.float32)}, "sum"),
    "step": np.int32(8),
    "layers": [np.float32([1]), np.float32([2])],
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with a checkpoint of STATE."""
    path = tmp_path_factory.mktemp("run")
    with Checkpointer(path) as checkpointer:
        checkpointer.save(3, STRATEGIES["one_device"]().put(STATE), {"batch": 3}, extra={"x": np.arange(3)})
    return path


def restore(folder, strategy, **options):
    return Checkpointer(folder).restore(strategy, **options)


def fresh(strategy, **parts):
    """Returns a new state whose values are all 0."""
    zeros = {"params": {"encoder": {"w": np.zeros((2, 2), np.float32), "b": np.zeros(2, np.float32)}}, **parts}
    return strategy.put(zeros)


def test_part_of_a_state_is_restored_and_the_rest_is_that_of_like(folder, strategy):
    like = fresh(strategy, new_head=np.zeros(3, np.float32))
    restored = restore(folder, strategy, like=like, only="params/encoder")
    values = jdist.read_values(restored.state)
    np.testing.assert_array_equal(values["params"]["encoder"]["w"], STATE["params"]["encoder"]["w"])
    np.testing.assert_array_equal(values["params"]["encoder"]["b"], STATE["params"]["encoder"]["b"])
    assert restored.state["new_head"] is like["new_head"]
    assert restored.unrestored == ("new_head",)
    assert restored.unused == ("layers/0", "layers/1", "params/head", "seen/count", "seen/total", "step")
    assert jax.tree.structure(restored.state) == jax.tree.structure(like)
    expected = [x.sharding for x in jax.tree.leaves(like)]
    assert [x.sharding for x in jax.tree.leaves(restored.state)] == expected
    assert restored.data_position == {"batch": 3} and restored.extra["x"].tolist() == [0, 1, 2]


def test_part_is_restored_without_like(folder, two):
    restored = restore(folder, two, only=["params/encoder/w", "step", "layers/1"])
    assert jax.tree.map(np.shape, restored.state) == {
        "params": {"encoder": {"w": (2, 2)}},
        "step": (),
        "layers": [None, (1,)],
    }
    assert restored.unrestored == () and "params/head" in restored.unused
    assert float(restored.state["layers"][1][0]) == 2


def test_part_of_a_wrapper_is_restored_without_like(folder, two):
    state = restore(folder, two, only="seen/total").state
    assert list(state) == ["seen"] and isinstance(state["seen"], jdist.SyncOnRead)
    assert state["seen"].read() == {"total": pytest.approx(np.ones(2))}


def test_complete_restore_leaves_nothing_out(folder, two):
    restored = restore(folder, two)
    assert (restored.unrestored, restored.unused) == ((), ())


def test_only_the_selected_arrays_are_read(folder, two, monkeypatch):
    from jdist._src.checkpoint import storage

    read, numbers = storage.read_arrays, []
    monkeypatch.setattr(
        storage, "read_arrays", lambda folder, step, shapes: numbers.append(len(shapes)) or read(folder, step, shapes)
    )
    restore(folder, two, only="params/encoder")
    assert numbers == [3]  # with `extra`


def test_renamed_leaves_are_restored(folder, two):
    like = two.put({"params": {"backbone": {"w": np.zeros((2, 2), np.float32), "bias": np.zeros(2, np.float32)}}})
    rename = {"params/encoder": "params/backbone", "params/encoder/b": "params/backbone/bias"}
    restored = restore(folder, two, like=like, only="params/backbone", rename=rename)
    np.testing.assert_array_equal(restored.state["params"]["backbone"]["bias"], [5, 6])
    np.testing.assert_array_equal(restored.state["params"]["backbone"]["w"], [[1, 2], [3, 4]])
    assert "params/encoder/w" not in restored.unused and "params/head" in restored.unused


def test_rename_moves_leaves_to_another_depth_and_to_keys_with_slashes(folder, two):
    like = two.put({"weights": {"encoder/w": np.zeros((2, 2), np.float32), "encoder/b": np.zeros(2, np.float32)}})
    restored = restore(folder, two, like=like, only="weights", rename={"params/encoder": "weights/encoder"})
    np.testing.assert_array_equal(restored.state["weights"]["encoder/b"], [5, 6])


def test_train_state_gets_the_parameters_of_another_model(tmp_path, two):
    """Transfer learning: the body of a saved model, a new head, and a new optimizer."""

    def make(head, optimizer):
        def init(key):
            params = {"body": jax.random.normal(key, (3, 4)), head: jnp.zeros(4)}
            return jdist.TrainState.create(params, optimizer, rng=key)

        return two.init(init, jax.random.key(0))

    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, make("classes", optax.sgd(0.1)))
        restored = checkpointer.restore(two, like=make("scores", optax.adam(0.1)), only="params/body")
    assert restored.unused == ("params/classes", "rng", "step")
    assert "params/scores" in restored.unrestored and "opt_state/0/mu/body" in restored.unrestored
    assert isinstance(restored.state, jdist.TrainState)


W = np.zeros((2, 2), np.float32)


@pytest.mark.parametrize("like, options, error, message", [
    (None, {"only": "params/decoder"}, ValueError,
     r'The checkpoint of step 3 in .* and `like` do not have the path only="params/decoder"\. The leaves are layers/0, '),
    ({"params": {"w": W}}, {"only": "params/w"}, ValueError, r"Only in `like`: params/w float32\[2,2\]"),
    ({"params": {"encoder": {"w": W}}}, {"only": "params/encoder"}, ValueError,
     r"Only in the checkpoint: params/encoder/b float32\[2\].*restore a part that matches, `only=\"params\"`"),
    ({"params": {"encoder": {"w": np.zeros(3)}}}, {"only": "params/encoder/w"}, ValueError, "Different shape or dtype"),
    ({"params": {"encoder": {"w": W}}, "step": jax.ShapeDtypeStruct((), "int32")}, {"only": "params/encoder/w"}, ValueError,
     "`only` does not restore step, and `like` contains shapes there, without values. Pass a state with values"),
    (None, {"rename": {"step": "number"}}, ValueError, r"`rename` needs the new structure: `restore\(strategy, like=state"),
    ({"step": 0}, {"rename": {"params/decoder": "p"}, "only": "step"}, ValueError,
     'does not have the path "params/decoder", which `rename` contains. The leaves are layers/0'),
    ({"step": 0}, {"rename": {"params/head": "step"}, "only": "step"}, ValueError,
     "After `rename`, params/head and step of The checkpoint of step 3 in .* have the same path, step"),
    (None, {"only": 3}, TypeError, '`only` must be a path such as "params/encoder", or a list of paths, got 3'),
    (None, {"only": "/"}, ValueError, "`only` contains an empty path"),
    ({"step": 0}, {"rename": ["a", "b"]}, TypeError, "`rename` must be a mapping from saved paths to paths in `like`"),
    ({"step": 0}, {"rename": {"step": ""}}, ValueError, "`rename` contains an empty path"),
])  # fmt: skip
def test_mismatches_name_the_leaves(folder, two, like, options, error, message):
    with pytest.raises(error, match=message):
        restore(folder, two, like=like, **options)
