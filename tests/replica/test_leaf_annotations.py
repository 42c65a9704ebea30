"""Annotations of state leaves: `mark_local`, `snap_to_target`, and how they are applied to the state."""

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


# --- local leaves


def test_annotated_leaves_are_found_by_identity_anywhere_in_the_state():
    leaf, other, plain = jnp.zeros(2), jnp.zeros(2), jnp.zeros(2)
    with collect_local_leaves() as annotations:
        mark_local("sync.some", [leaf], MEAN, trainable=True)
        mark_local("sync.some", {"x": other}, SUM)
    state = wrap_local_leaves({"a": (plain, [other]), "b": leaf}, annotations)
    assert kinds(state) == [None, SUM, MEAN]
    assert (state["b"].trainable, state["a"][1][0].trainable) == (True, False)
    assert state["a"][0] is plain


def test_leaf_of_equal_value_is_not_the_annotated_leaf():
    leaf = jnp.zeros(2)
    with collect_local_leaves() as annotations:
        mark_local("sync.some", leaf, MEAN)
    assert kinds(wrap_local_leaves((jnp.zeros(2), leaf), annotations)) == [None, MEAN]


def test_annotations_outside_a_collector_have_no_effect():
    mark_local("sync.some", (1.0, jnp.zeros(2)), MEAN)
    snap_to_target(jnp.zeros(2), jnp.zeros(2), jnp.zeros(2), jnp.bool_(True))
    with collect_local_leaves() as annotations, collect_sync_targets() as targets:
        pass
    assert (annotations, targets) == ([], [])


def test_nested_collectors_collect_separately():
    with collect_local_leaves() as outer:
        with collect_local_leaves() as inner:
            mark_local("sync.some", jnp.zeros(1), MEAN)
        mark_local("sync.other", jnp.zeros(1), MEAN)
    assert [annotation.policy for annotation in inner] == ["sync.some"]
    assert [annotation.policy for annotation in outer] == ["sync.other"]


def test_collector_is_removed_after_an_error():
    with pytest.raises(KeyError), collect_local_leaves() as annotations:
        raise KeyError
    mark_local("sync.some", jnp.zeros(1), MEAN)
    assert annotations == []


def test_python_number_is_refused_with_its_name():
    with (
        collect_local_leaves(),
        pytest.raises(TypeError, match=r"params\['b'\] is 2, not an array\. `jdist\.sync\.some`"),
    ):
        mark_local("sync.some", {"a": jnp.zeros(1), "b": 2}, MEAN)


def test_numpy_arrays_are_found():
    leaf = np.zeros(3, np.float32)
    with collect_local_leaves() as annotations:
        mark_local("sync.some", leaf, MEAN)
    assert kinds(wrap_local_leaves([leaf], annotations)) == [MEAN]


def test_annotated_leaf_in_a_wrapper_is_refused():
    """A parameter in `jdist.PerReplica` contradicts the annotation of the policy."""
    leaf = jnp.zeros(2)
    with collect_local_leaves() as annotations:
        mark_local("sync.some", leaf, MEAN, trainable=True)
    with pytest.raises(ValueError, match=r"`jdist\.sync\.some` stores parameters that diverge.* 0 of its 1 arrays"):
        wrap_local_leaves(jdist.PerReplica(leaf), annotations)


@pytest.mark.parametrize("num_found", [0, 1, 2])
def test_missing_leaves_are_refused_with_their_number(num_found):
    leaves = [jnp.zeros(2) for _ in range(3)]
    with collect_local_leaves() as annotations:
        mark_local("sync.some", leaves, SUM)
    with pytest.raises(ValueError, match=rf"per-replica values, and {num_found} of its 3 arrays are in the state"):
        wrap_local_leaves(leaves[:num_found], annotations)


def test_annotation_in_an_inner_trace_is_ignored_if_the_policy_annotates_again():
    leaf = jnp.zeros(2)

    def init(x):
        mark_local("sync.some", x, MEAN)
        return x

    with collect_local_leaves() as annotations:
        jax.eval_shape(init, leaf)
        init(leaf)
    assert kinds(wrap_local_leaves([leaf], annotations)) == [MEAN]
    with collect_local_leaves() as annotations:
        jax.eval_shape(lambda x: init(x), leaf)  # a new function, because JAX caches traces
    with pytest.raises(ValueError, match="0 of its 1 arrays"):
        wrap_local_leaves([leaf], annotations)


def test_leaves_of_each_annotation_must_be_found():
    lost, result = [jnp.zeros(2), jnp.zeros(3)], [jnp.zeros(2), jnp.zeros(3)]
    with collect_local_leaves() as annotations:
        mark_local("sync.some", lost, MEAN)
        mark_local("sync.some", result, MEAN)
    assert kinds(wrap_local_leaves([*result, *lost], annotations)) == [MEAN] * 4
    with pytest.raises(ValueError, match="1 of its 2 arrays"):
        wrap_local_leaves([*result, lost[0]], annotations)


def test_annotation_without_leaves_does_not_hide_a_missing_leaf():
    with collect_local_leaves() as annotations:
        mark_local("sync.some", [], MEAN)
        mark_local("sync.some", [jnp.zeros(2)], MEAN, trainable=True)
    with pytest.raises(ValueError, match="0 of its 1 arrays"):
        wrap_local_leaves((jnp.zeros(2),), annotations)


def test_leaf_that_is_in_the_state_twice_is_wrapped_twice():
    leaf = jnp.zeros(2)
    with collect_local_leaves() as annotations:
        mark_local("sync.some", leaf, MEAN)
    assert kinds(wrap_local_leaves([leaf, {"again": leaf}], annotations)) == [MEAN, MEAN]


# --- sync targets


def _targets(old, target, when=True):
    with collect_sync_targets() as annotations:
        snap_to_target([old], [target - old], [target], jnp.bool_(when))
    return annotations


def _applied(old, new, target, when=True):
    return apply_sync_targets([old], [new], _targets(old, target, when))[0]


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_sum_of_parameter_and_update_becomes_bitwise_equal_to_the_target(dtype):
    rng = np.random.default_rng(0)
    scale = 10.0 ** rng.integers(-4, 4, size=(2, 2000))
    old, target = (jnp.asarray(x, dtype) for x in rng.normal(size=(2, 2000)) * scale)
    new = old + (target - old)
    assert (new != target).any()
    assert np.asarray(_applied(old, new, target)).tobytes() == np.asarray(target).tobytes()


def test_target_has_no_effect_where_the_condition_is_false():
    old, target = jnp.float32(1.0), jnp.float32(1e-9)
    new = old + (target - old)
    assert float(_applied(old, new, target, when=False)) == float(new) != float(target)


def test_parameter_that_the_user_changed_is_not_set_to_the_target():
    old, target = jnp.float32([1.0, 1.0]), jnp.float32([3.0, 3.0])
    assert _applied(old, jnp.float32([2.0, 3.0]), target).tolist() == [2.0, 3.0]


def test_value_that_is_not_finite_is_unchanged():
    old = jnp.float32([1, 1, jnp.inf])
    new = jnp.float32([jnp.nan, jnp.inf, 2])
    np.testing.assert_array_equal(_applied(old, new, jnp.float32([1, 1, 1])), new)


def test_other_leaves_and_other_structures_are_unchanged():
    old, other = jnp.float32(1.0), jnp.float32(5.0)
    targets = _targets(jnp.float32(1.0), jnp.float32(9.0))
    after = [jnp.float32(2.0), other]
    assert apply_sync_targets([old, other], after, targets)[1] is other
    assert apply_sync_targets([old, other], after[:1], targets) == after[:1]


def test_leaf_whose_shape_the_step_changes_is_unchanged():
    old = jnp.zeros(2)
    new = jnp.zeros(3)
    assert _applied(old, new, jnp.ones(2)) is new


def test_policy_initialized_in_a_jitted_function_is_refused_every_time(two):
    tx = jdist.sync.local_sgd(optax.sgd(0.1), every=2)
    make = jax.jit(lambda: (lambda params: (params, tx.init(params)))({"w": jnp.zeros(3)}))
    for _ in range(2):
        with pytest.raises(ValueError, match=r"`jdist\.sync\.local_sgd` stores parameters.*not within `jax\.jit`"):
            two.init(lambda: make())
