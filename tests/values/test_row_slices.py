"""`RowSlices`, a sparse table, compared with numpy."""

import dataclasses
import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jdist

from laws import each_row


def _dense(rows, indices, num_rows):
    table = np.zeros((num_rows, *np.shape(rows)[1:]), np.asarray(rows).dtype)
    np.add.at(table, np.asarray(indices), np.asarray(rows))
    return table


CASES = {
    "apart": (np.float32([[1, 2], [3, 4]]), np.int32([2, 0]), 3),
    "twice": (np.float32([[1, 2], [3, 4]]), np.int32([1, 1]), 3),
    "all_rows": (np.float32([[1], [2], [3]]), np.int32([2, 1, 0]), 3),
    "no_rows": (np.zeros((0, 2), np.float32), np.zeros(0, np.int32), 3),
    "empty_table": (np.zeros((0, 2), np.float32), np.zeros(0, np.int32), 0),
    "flat": (np.float32([1, 2]), np.int32([0, 0]), 2),
    "deep": (np.arange(12, dtype=np.float32).reshape(2, 3, 2), np.int32([1, 3]), 4),
    "narrow_rows": (np.zeros((2, 0), np.float32), np.int32([1, 3]), 4),
    "integers": (np.int32([[1], [-2]]), np.int32([0, 0]), 2),
    "bfloat16": (np.ones((2, 2), jnp.bfloat16), np.int32([0, 1]), 2),
    "complex64": (np.complex64([[1j], [2]]), np.int32([0, 0]), 2),
    "small_indices": (np.float32([[1], [2]]), np.uint8([1, 0]), 2),
}


@pytest.mark.parametrize("rows, indices, num_rows", CASES.values(), ids=CASES)
def test_dense_is_the_table_with_every_row_added(rows, indices, num_rows):
    for slices in (
        jdist.RowSlices(rows, indices, num_rows),
        jdist.RowSlices(jnp.asarray(rows), jnp.asarray(indices), num_rows),
    ):
        for result in (slices.dense(), jax.jit(jdist.RowSlices.dense)(slices)):
            np.testing.assert_array_equal(result, _dense(rows, indices, num_rows))
            assert result.dtype == rows.dtype


@pytest.mark.parametrize("rows, indices, num_rows", CASES.values(), ids=CASES)
def test_add_to_is_the_table_and_the_rows(rows, indices, num_rows):
    shape = (num_rows, *rows.shape[1:])
    table = np.arange(np.prod(shape)).reshape(shape).astype(rows.dtype)
    result = jdist.RowSlices(rows, indices, num_rows).add_to(table)
    np.testing.assert_array_equal(result, table + _dense(rows, indices, num_rows))


def test_gradient_with_respect_to_the_rows_equals_the_rows_of_the_gradient_of_the_table():
    indices = jnp.int32([2, 0, 2])
    weights = jnp.arange(8.0).reshape(4, 2)
    total = lambda rows: (jdist.RowSlices(rows, indices, 4).dense() * weights).sum()
    np.testing.assert_array_equal(jax.grad(total)(jnp.ones((3, 2))), weights[indices])


def test_row_slices_are_a_frozen_tree_that_keeps_its_number_of_rows():
    slices = jdist.RowSlices(np.ones((1, 2), np.float32), np.int32([3]), 4)
    with pytest.raises(dataclasses.FrozenInstanceError):
        slices.num_rows = 1
    doubled = jax.tree.map(lambda x: x * 2, {"x": slices})["x"]
    assert (doubled.num_rows, doubled.indices.tolist(), doubled.rows.tolist()) == (4, [6], [[2, 2]])
    assert len(jax.tree.leaves(slices)) == 2


def test_row_slices_are_arguments_and_results_of_run(strategy):
    n = strategy.num_replicas_in_sync
    made = strategy.run(lambda: jdist.RowSlices(jnp.ones((1, 2)), jdist.replica_id()[None], 9))
    assert (made.num_rows, np.shape(made.rows)) == (9, (1, 2))
    assert isinstance(made.indices, jdist.PerReplica)
    total = strategy.reduce("sum", made, axis=None)
    np.testing.assert_array_equal(total.dense(), _dense(np.ones((n, 2), np.float32), np.arange(n), 9))
    mean = strategy.reduce("mean", made, axis=None)
    np.testing.assert_allclose(mean.dense(), np.asarray(total.dense()) / n, rtol=1e-6)
    chex.assert_trees_all_equal(
        [part.indices.tolist() for part in strategy.local_results(made)], [[i] for i in range(n)]
    )


NOT_OF_TABLE = {
    "rows": ((3, 2), r"float32\[3,2\]"),
    "columns": ((4, 3), r"float32\[4,3\]"),
    "rank": ((4,), r"float32\[4\]"),
    "scalar": ((), r"float32\[\]"),
}


@each_row("shape, text", NOT_OF_TABLE.values(), ids=NOT_OF_TABLE)
def test_rows_of_another_table_are_refused(shape, text):
    slices = jdist.RowSlices(np.ones((1, 2), np.float32), np.int32([0]), 4)
    with pytest.raises(ValueError, match=rf"The table is {text}, and these are rows .* of a table of 4 rows"):
        slices.add_to(np.zeros(shape, np.float32))


ROWS = np.ones((2, 3), np.float32)
BAD = {
    "fewer_indices": (ROWS, np.int32([0]), "rows float32[2,3] and indices int32[1]: it needs one index per row"),
    "rank_two": (ROWS, np.int32([[0], [1]]), "rows float32[2,3] and indices int32[2,1]: it needs one index per row"),
    "scalar_index": (ROWS[:1], np.int32(0), "rows float32[1,3] and indices int32[]: it needs one index per row"),
    "scalar_rows": (ROWS[0, 0], np.int32([0]), "rows float32[] and indices int32[1]: it needs one index per row"),
    "float_indices": (ROWS[:1], np.float32([0]), "indices float32[1]: indices must be integers"),
    "bool_indices": (ROWS[:1], np.array([True]), "indices bool[1]: indices must be integers"),
}


@each_row("rows, indices, text", BAD.values(), ids=BAD)
def test_invalid_rows_and_indices_are_refused_by_name(rows, indices, text):
    slices = jdist.RowSlices(rows, indices, 4)
    error, message = TypeError if "integers" in text else ValueError, re.escape(f"is RowSlices with {text}")
    with pytest.raises(error, match=r"grads\['e'\] " + message):
        slices._check("grads['e']")
    with pytest.raises(error, match=r"value\['e'\] " + message):
        jdist.all_reduce("sum", {"e": slices})
    if np.ndim(rows):
        with pytest.raises(error, match=r"value " + message):
            slices.dense()
