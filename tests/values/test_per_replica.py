"""`PerReplica`: one value per replica, of one shape or of several."""

import dataclasses

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jdist

from laws import STRATEGIES, each_row, rows


def test_repr_of_keys_and_empty_trees_shows_dtypes_and_shapes():
    tree = {"a": np.zeros(2, np.int32), "b": None, "key": jax.random.split(jax.random.key(0))}
    assert repr(jdist.PerReplica(tree)) == "PerReplica({'a': int32[2], 'b': None, 'key': key<fry>[2]})"


def test_values_of_rows_that_are_not_placed_are_the_rows():
    value = jdist.PerReplica({"a": np.arange(6).reshape(2, 3)})
    chex.assert_trees_all_equal(value.values, ({"a": np.arange(3)}, {"a": np.arange(3, 6)}))


def test_read_of_per_replica_is_the_stacked_tree(strategy):
    value = rows(strategy, 2)
    np.testing.assert_array_equal(value.read(), np.stack(value.values))


DTYPES = ["float32", "bfloat16", "int32", "uint8", "complex64"]


def test_assign_of_keys_assigns_one_key_per_replica(strategy):
    keys = [jax.random.split(jax.random.key(seed), strategy.num_replicas_in_sync) for seed in (1, 2)]
    result = strategy.put(jdist.PerReplica(keys[0])).assign(jdist.PerReplica(keys[1]))
    np.testing.assert_array_equal(jax.random.key_data(result.tree), jax.random.key_data(keys[1]))


def test_assign_of_rows_for_another_number_of_replicas_is_refused(two):
    with pytest.raises(
        ValueError, match=r"`assign`: .* is a PerReplica of float32\[3,3\], for 3 replicas; this .* has 2"
    ):
        rows(two, 3).assign(jdist.PerReplica(np.ones((3, 3), np.float32)))


def test_assign_where_the_replicas_hold_different_shapes_is_refused(two):
    value, other = _uneven(two), _uneven(two)
    message = rf"`{{}}` to {SHAPES} of .*: values with different shapes .* `strategy\.distribute_values_from_function`"
    for method, new in (("assign", other), ("assign", np.ones(2, np.float32)), ("assign_add", np.ones(2, np.float32))):
        with pytest.raises(ValueError, match=message.format(method)):
            getattr(value, method)(new)
    with pytest.raises(
        ValueError, match=rf"`assign` to Mirrored\(float32\[2\], SUM\) of {SHAPES}: values with different"
    ):
        two.put(jdist.Mirrored(np.ones(2, np.float32), "sum")).assign(other)


def _uneven(strategy, *shape, dtype=np.float32):
    """Returns a value of which replica `i` of `n` holds `n - i` rows of the number `i + 1`."""
    n = strategy.num_replicas_in_sync
    return strategy.distribute_values_from_function(
        lambda c: np.full((n - c.replica_id_in_sync_group, *shape), c.replica_id_in_sync_group + 1, dtype)
    )


@pytest.mark.parametrize("dtype", [*DTYPES, "bool"])
def test_values_of_different_shapes_have_the_shape_of_each_replica(dtype):
    strategy, n = STRATEGIES["mirrored_3"](), 3
    value = _uneven(strategy, 2, dtype=jnp.dtype(dtype))
    for number, (row, device) in enumerate(zip(value.values, strategy.mesh.devices.flat, strict=True)):
        assert row.devices() == {device}
        assert row.dtype == jnp.dtype(dtype)
        np.testing.assert_array_equal(row, np.full((n - number, 2), number + 1).astype(row.dtype))
    chex.assert_trees_all_equal(strategy.local_results(value), value.values)
    chex.assert_trees_all_equal(strategy.put(value).values, value.values)


def test_values_of_different_shapes_may_be_empty_or_differ_in_any_dimension(two):
    shapes = [(0, 3), (2, 1)]
    value = two.distribute_values_from_function(lambda c: np.ones(shapes[c.replica_id_in_sync_group], np.int32))
    assert [row.shape for row in value.values] == shapes
    assert repr(value) == "PerReplica(int32[0,3] | int32[2,1])"


def test_repr_of_different_shapes_shows_the_shape_of_each_replica():
    value = _uneven(STRATEGIES["mirrored_3"](), 2)
    assert repr(value) == "PerReplica(float32[3,2] | float32[2,2] | float32[1,2])"


def test_leaf_of_one_shape_is_not_padded_beside_a_leaf_of_several(two):
    value = two.distribute_values_from_function(
        lambda c: {"x": np.ones(1 + c.replica_id_in_sync_group), "id": c.replica_id_in_sync_group, "none": None}
    )
    chex.assert_trees_all_equal(
        value.values,
        ({"x": np.ones(1, np.float32), "id": 0, "none": None}, {"x": np.ones(2, np.float32), "id": 1, "none": None}),
    )
    assert [[x.shape for x in jax.tree.leaves(row)] for row in value.values] == [[(), (1,)], [(), (2,)]]


def test_padded_has_zeros_and_weights(strategy):
    n = strategy.num_replicas_in_sync
    value, weights = _uneven(strategy, 2).padded()
    true = np.arange(n)[None] < n - np.arange(n)[:, None]
    np.testing.assert_array_equal(weights.tree, true.astype(np.float32))
    np.testing.assert_array_equal(value.tree, true[..., None] * np.arange(1, n + 1)[:, None, None] * np.ones((1, 1, 2)))
    assert value.shapes is weights.shapes is None
    assert weights.tree.sharding.is_equivalent_to(value.tree.sharding, 2)


def test_padded_in_run_counts_every_row_once(strategy):
    n = strategy.num_replicas_in_sync
    value, weights = _uneven(strategy).padded()
    result = strategy.run(jdist.global_mean, (value, weights))
    every = np.concatenate([np.full(n - i, i + 1) for i in range(n)])
    np.testing.assert_allclose(result, every.mean(), rtol=1e-6)


def test_padded_of_a_tree_has_one_weight_per_row(two):
    value = two.distribute_values_from_function(
        lambda c: {"x": np.ones((2 - c.replica_id_in_sync_group, 3)), "y": np.ones(2 - c.replica_id_in_sync_group, int)}
    )
    padded, weights = value.padded()
    assert jax.tree.map(jnp.shape, padded.tree) == {"x": (2, 2, 3), "y": (2, 2)}
    np.testing.assert_array_equal(weights.tree, [[1, 1], [1, 0]])


def test_padded_of_one_shape_weighs_all_rows(strategy):
    value = rows(strategy, 2, 3)
    padded, weights = value.padded()
    np.testing.assert_array_equal(padded.tree, value.tree)
    np.testing.assert_array_equal(weights.tree, np.ones((strategy.num_replicas_in_sync, 2)))


NOT_PADDED = {
    "scalar_beside_rows": lambda i: {"x": np.ones(1 + i), "id": i},
    "other_counts": lambda i: {"x": np.ones(1 + i), "y": np.ones(2 - i)},
    "other_dimension": lambda i: np.ones((2, 1 + i)),
}


@each_row("make", NOT_PADDED.values(), ids=NOT_PADDED)
def test_padded_of_leaves_that_differ_in_another_dim_is_refused(make, two):
    value = two.distribute_values_from_function(lambda c: make(c.replica_id_in_sync_group))
    message = r"PerReplica\(.* \| .*\) cannot be padded by rows: its leaves differ.*Pad each replica's value to one shape where"
    with pytest.raises(ValueError, match=message):
        value.padded()


SHAPES = r"PerReplica\(float32\[2\] \| float32\[1\]\)"


def test_read_and_map_of_different_shapes_are_refused(two):
    message = (
        SHAPES
        + r" has different shapes on the replicas\. Use `\.values` or `\.padded\(\)`, or concatenate: `strategy\.gather`"
    )
    with pytest.raises(ValueError, match=message):
        _uneven(two).read()
    with pytest.raises(ValueError, match=message):
        _uneven(two).map(lambda x: x)


def test_different_shapes_are_refused_by_programs_with_the_fix(two):
    message = (
        rf"\['x'\] is {SHAPES}: .* different shapes.*`value, weights = value\.padded\(\)`, then "
        r"`jdist\.global_mean\(values, weights"
    )
    batch = {"x": _uneven(two)}
    with pytest.raises(ValueError, match="batch" + message):
        two.run(lambda batch: batch, (batch,))
    with pytest.raises(ValueError, match="batch" + message):
        two.step(lambda state, batch: (state, None))(two.put(1.0), batch)
    with pytest.raises(ValueError, match="state" + message):
        two.step(lambda state: (state, None))(batch)


def test_shapes_are_kept_by_tree_functions_and_cannot_be_set(two):
    value = _uneven(two)
    doubled = jax.tree.map(lambda x: x * 2, value)
    chex.assert_trees_all_equal(doubled.values, (np.float32([2, 2]), np.float32([4])))
    with pytest.raises(dataclasses.FrozenInstanceError):
        value.shapes = None


@pytest.mark.parametrize("use", [lambda x: x.item(), lambda x: f"{x:.3f}", float])
def test_one_number_per_replica_used_as_a_number_is_answered_with_the_line_to_write(use, two):
    value = two.run(jdist.replica_id)
    with pytest.raises(
        TypeError, match=r'one number per replica.*float\(strategy.reduce\("mean".*all_reduce\("mean", loss\)'
    ):
        use(value)
    assert f"{value}" == "PerReplica([0, 1], dtype=int32)"


def test_repr_shows_one_number_per_replica_and_the_shapes_of_other_values(two):
    value = two.run(lambda: (jdist.replica_id() + 0.25, jdist.replica_id()[None]))
    assert [repr(leaf) for leaf in value] == ["PerReplica([0.25, 1.25], dtype=float32)", "PerReplica(int32[2,1])"]
    keys = two.run(lambda: jdist.replica_key(jax.random.key(0)))
    assert repr(keys).startswith("PerReplica(key<")
    assert repr(jdist.PerReplica({"loss": value[0].tree})) == "PerReplica({'loss': float32[2]})"
    assert repr(jdist.PerReplica(np.ones(2, np.float32))) == "PerReplica(float32[2])"  # not placed on devices
    value[0].tree.delete()
    assert repr(value[0]) == "PerReplica(float32[2])"
