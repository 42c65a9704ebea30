"""What a policy says of leaves, and how the strategy finds them again."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jdist
from jdist._src.replica.leaf_annotations import (
    apply_sync_targets,
    collect_local_leaves,
    collect_sync_targets,
    mark_local,
    snap_to_target,
    wrap_local_leaves,
)
from jdist._src.values.aggregation import VariableAggregation

MEAN, SUM = VariableAggregation.MEAN, VariableAggregation.SUM


def kinds(tree):
    leaves = jax.tree.leaves(tree, is_leaf=lambda node: isinstance(node, jdist.SyncOnRead))
    return [x.aggregation if isinstance(x, jdist.SyncOnRead) else None for x in leaves]


# --- what is kept apart


def test_noted_leaves_are_found_by_identity_wherever_they_stand():
    one, other, plain = jnp.zeros(2), jnp.zeros(2), jnp.zeros(2)
    with collect_local_leaves() as noted:
        mark_local("sync.some", [one], MEAN, trainable=True)
        mark_local("sync.some", {"x": other}, SUM)
    state = wrap_local_leaves({"a": (plain, [other]), "b": one}, noted)
    assert kinds(state) == [None, SUM, MEAN]
    assert (state["b"].trainable, state["a"][1][0].trainable) == (True, False)
    assert state["a"][0] is plain


def test_leaf_of_equal_value_is_not_taken_for_the_one_that_was_noted():
    one = jnp.zeros(2)
    with collect_local_leaves() as noted:
        mark_local("sync.some", one, MEAN)
    assert kinds(wrap_local_leaves((jnp.zeros(2), one), noted)) == [None, MEAN]


def test_nothing_is_noted_where_nobody_listens():
    mark_local("sync.some", (1.0, jnp.zeros(2)), MEAN)
    snap_to_target(jnp.zeros(2), jnp.zeros(2), jnp.zeros(2), jnp.bool_(True))
    with collect_local_leaves() as noted, collect_sync_targets() as points:
        pass
    assert (noted, points) == ([], [])


def test_listeners_within_one_another_hear_for_themselves():
    with collect_local_leaves() as outer:
        with collect_local_leaves() as inner:
            mark_local("sync.some", jnp.zeros(1), MEAN)
        mark_local("sync.other", jnp.zeros(1), MEAN)
    assert [one.policy for one in inner] == ["sync.some"]
    assert [one.policy for one in outer] == ["sync.other"]


def test_listener_is_gone_after_an_error():
    with pytest.raises(KeyError), collect_local_leaves() as noted:
        raise KeyError
    mark_local("sync.some", jnp.zeros(1), MEAN)
    assert noted == []


def test_python_number_is_refused_with_its_name():
    with (
        collect_local_leaves(),
        pytest.raises(TypeError, match=r"params\['b'\] is 2, no array, and `jdist\.sync\.some`"),
    ):
        mark_local("sync.some", {"a": jnp.zeros(1), "b": 2}, MEAN)


def test_numbers_of_numpy_are_found_too():
    one = np.zeros(3, np.float32)
    with collect_local_leaves() as noted:
        mark_local("sync.some", one, MEAN)
    assert kinds(wrap_local_leaves([one], noted)) == [MEAN]


def test_wrapped_leaf_of_a_policy_is_not_lost_in_silence():
    """The user wraps a parameter in `jdist.PerReplica`, which says another thing of it than the policy does."""
    one = jnp.zeros(2)
    with collect_local_leaves() as noted:
        mark_local("sync.some", one, MEAN, trainable=True)
    with pytest.raises(ValueError, match=r"`jdist\.sync\.some` keeps parameters that drift.* 0 of its 1 arrays"):
        wrap_local_leaves(jdist.PerReplica(one), noted)


@pytest.mark.parametrize("there", [0, 1, 2])
def test_missing_leaves_are_refused_with_their_number(there):
    leaves = [jnp.zeros(2) for _ in range(3)]
    with collect_local_leaves() as noted:
        mark_local("sync.some", leaves, SUM)
    with pytest.raises(
        ValueError, match=rf"values of each replica's own, and {there} of its 3 arrays are in the state"
    ):
        wrap_local_leaves(leaves[:there], noted)


def test_policy_asked_in_vain_within_another_function_is_forgiven_if_it_is_asked_again():
    leaf = jnp.zeros(2)

    def ask(x):
        mark_local("sync.some", x, MEAN)
        return x

    with collect_local_leaves() as noted:
        jax.eval_shape(ask, leaf)
        ask(leaf)
    assert kinds(wrap_local_leaves([leaf], noted)) == [MEAN]
    with collect_local_leaves() as noted:
        jax.eval_shape(lambda x: ask(x), leaf)  # a new function: JAX remembers what it traced
    with pytest.raises(ValueError, match="0 of its 1 arrays"):
        wrap_local_leaves([leaf], noted)


def test_each_of_two_policies_has_to_be_found():
    lost, found = [jnp.zeros(2), jnp.zeros(3)], [jnp.zeros(2), jnp.zeros(3)]
    with collect_local_leaves() as noted:
        mark_local("sync.some", lost, MEAN)
        mark_local("sync.some", found, MEAN)
    assert kinds(wrap_local_leaves([*found, *lost], noted)) == [MEAN] * 4
    with pytest.raises(ValueError, match="1 of its 2 arrays"):
        wrap_local_leaves([*found, lost[0]], noted)


def test_note_of_no_leaves_does_not_excuse_one_that_is_lost():
    with collect_local_leaves() as noted:
        mark_local("sync.some", [], MEAN)
        mark_local("sync.some", [jnp.zeros(2)], MEAN, trainable=True)
    with pytest.raises(ValueError, match="0 of its 1 arrays"):
        wrap_local_leaves((jnp.zeros(2),), noted)


def test_leaf_that_stands_in_the_state_twice_is_placed_twice():
    one = jnp.zeros(2)
    with collect_local_leaves() as noted:
        mark_local("sync.some", one, MEAN)
    assert kinds(wrap_local_leaves([one, {"again": one}], noted)) == [MEAN, MEAN]


# --- what lands


def _landing(was, target, when=True):
    with collect_sync_targets() as noted:
        snap_to_target([was], [target - was], [target], jnp.bool_(when))
    return noted


def _landed(was, now, target, when=True):
    return apply_sync_targets([was], [now], _landing(was, target, when))[0]


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_sum_of_parameter_and_update_lands_on_the_target_to_the_bit(dtype):
    rng = np.random.default_rng(0)
    scale = 10.0 ** rng.integers(-4, 4, size=(2, 2000))
    was, target = (jnp.asarray(x, dtype) for x in rng.normal(size=(2, 2000)) * scale)
    now = was + (target - was)
    assert (now != target).any()
    assert np.asarray(_landed(was, now, target)).tobytes() == np.asarray(target).tobytes()


def test_nothing_lands_where_it_is_not_time():
    was, target = jnp.float32(1.0), jnp.float32(1e-9)
    now = was + (target - was)
    assert float(_landed(was, now, target, when=False)) == float(now) != float(target)


def test_parameter_that_the_user_has_changed_does_not_land():
    was, target = jnp.float32([1.0, 1.0]), jnp.float32([3.0, 3.0])
    assert _landed(was, jnp.float32([2.0, 3.0]), target).tolist() == [2.0, 3.0]


def test_value_that_is_not_finite_stays():
    was = jnp.float32([1, 1, jnp.inf])
    now = jnp.float32([jnp.nan, jnp.inf, 2])
    np.testing.assert_array_equal(_landed(was, now, jnp.float32([1, 1, 1])), now)


def test_other_leaves_and_other_structures_are_left_alone():
    was, other = jnp.float32(1.0), jnp.float32(5.0)
    point = _landing(jnp.float32(1.0), jnp.float32(9.0))
    after = [jnp.float32(2.0), other]
    assert apply_sync_targets([was, other], after, point)[1] is other
    assert apply_sync_targets([was, other], after[:1], point) == after[:1]


def test_leaf_whose_shape_the_step_changes_is_left_to_the_message_about_that():
    was = jnp.zeros(2)
    now = jnp.zeros(3)
    assert _landed(was, now, jnp.ones(2)) is now


def test_policy_initialized_in_a_jitted_function_is_refused_every_time(two):
    tx = jdist.sync.local_sgd(optax.sgd(0.1), every=2)
    make = jax.jit(lambda: (lambda params: (params, tx.init(params)))({"w": jnp.zeros(3)}))
    for _ in range(2):
        with pytest.raises(ValueError, match=r"`jdist\.sync\.local_sgd` keeps parameters.*not within `jax\.jit`"):
            two.init(lambda: make())
