"""Rows of different lengths, padded or joined."""

import jax.numpy as jnp
import numpy as np
import pytest

import jdist

ROWS = [[5, 1, 2], np.int32([3]), [], np.int64([7, 7])]


def test_padded_rows_have_weights_row_ds33():
    ids, weights = jdist.data.pad_rows(ROWS, 4, fill=9)
    assert ids.tolist() == [[5, 1, 2, 9], [3, 9, 9, 9], [9] * 4, [7, 7, 9, 9]] and ids.dtype == np.int64
    assert weights.tolist() == [[1, 1, 1, 0], [1, 0, 0, 0], [0] * 4, [1, 1, 0, 0]] and weights.dtype == np.float32
    assert jdist.data.pad_rows(ROWS)[0].shape == (4, 3)
    assert jdist.data.pad_rows(ROWS, 2, truncate=True)[0].tolist() == [[5, 1], [3, 0], [0, 0], [7, 7]]


def test_weighted_mean_of_looked_up_rows_ignores_the_padding():
    table = jnp.arange(20.0).reshape(10, 2)
    ids, weights = jdist.data.pad_rows([[0, 3], [4], [1, 2, 3]])
    means = (jdist.lookup(table, ids) * weights[..., None]).sum(1) / weights.sum(1)[:, None]
    np.testing.assert_allclose(means, [[3, 4], [8, 9], [4, 5]])


def test_joined_rows_have_lengths():
    values, lengths = jdist.data.join_rows([np.ones((2, 3)), np.zeros((0, 3)), np.full((1, 3), 2.0)])
    assert values.tolist() == [[1] * 3, [1] * 3, [2] * 3] and lengths.tolist() == [2, 0, 1]
    assert [x.size for x in jdist.data.join_rows([])] == [0, 0] == [x.size for x in jdist.data.pad_rows([])]


def test_rows_that_do_not_fit_are_errors():
    with pytest.raises(ValueError, match="Row 0 has 3 elements, but `width` is 2"):
        jdist.data.pad_rows(ROWS, 2)
    with pytest.raises(ValueError, match=r"Row 1 has the shape \(1, 2\), and the first row with elements \(2,\)"):
        jdist.data.join_rows([[1, 2], [[1, 2]]])
    with pytest.raises(ValueError, match=r"Row 0 has the shape \(\)"):
        jdist.data.pad_rows([3])
    with pytest.raises(ValueError, match="`width` must be an integer >= 1"):
        jdist.data.pad_rows(ROWS, 0)
