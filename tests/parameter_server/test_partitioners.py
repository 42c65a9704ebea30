"""The number of shards of a leaf, the rows of each shard, and the check of a partitioner's result."""

import math
import pickle

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jdist
from jdist import FixedShardsPartitioner, MaxSizePartitioner, MinSizePartitioner
from jdist._src.parameter_server.partitioners import check_partitions, row_ranges

few = hypothesis.settings(max_examples=60, deadline=None, derandomize=True, database=None)
f32 = np.float32
partitioners = st.one_of(
    st.builds(FixedShardsPartitioner, st.integers(1, 20)),
    st.builds(MinSizePartitioner, st.integers(1, 100), max_shards=st.integers(1, 20)),
    st.builds(MaxSizePartitioner, st.integers(1, 100), max_shards=st.none() | st.integers(1, 20)),
)


def test_pt1_fixed_number_of_shards():
    assert FixedShardsPartitioner(2)((10, 3), f32) == [2, 1]
    assert FixedShardsPartitioner(4)((3,), f32) == [3]
    assert FixedShardsPartitioner(2)((10, 3), f32, axis=1) == [1, 2]
    assert FixedShardsPartitioner(2)((10, 3), f32, axis=-1) == [1, 2]


@pytest.mark.parametrize("partitioner", [FixedShardsPartitioner(2), MinSizePartitioner(1), MaxSizePartitioner(1)])
def test_pt1_axis_that_the_leaf_does_not_have_is_an_error(partitioner):
    with pytest.raises(IndexError, match=r"shape \[\] cannot be divided along axis 0.*A scalar is not divided\."):
        partitioner((), f32)
    with pytest.raises(ValueError, match=r"shape \[2, 3\] cannot be divided along axis 2.*Use an axis from 0 to 1\."):
        partitioner((2, 3), f32, 2)


def test_pt3_smallest_size_of_a_shard():
    assert MinSizePartitioner(max_shards=10)((1000, 128), f32) == [2, 1]
    assert MinSizePartitioner()((1000, 128), f32) == [1, 1]
    assert MinSizePartitioner(4, max_shards=3)((6, 1), f32) == [3, 1]
    assert MinSizePartitioner(4, max_shards=10)((6, 1), f32) == [6, 1]
    assert MinSizePartitioner(4, max_shards=10)((6, 2), jnp.bfloat16, axis=1) == [1, 2]


@pytest.mark.parametrize(
    "partitioner, shards",
    [
        (MaxSizePartitioner(4), 6),
        (MaxSizePartitioner(4, max_shards=2), 2),
        (MaxSizePartitioner(1024), 1),
        (MaxSizePartitioner(8), 3),
        (MaxSizePartitioner(5), 6),
        (MaxSizePartitioner(3), 6),
    ],
)
def test_pt4_largest_size_of_a_shard(partitioner, shards):
    assert partitioner((6, 1), f32) == [shards, 1]
    assert partitioner((1, 6), f32, axis=1) == [1, shards]


def test_size_of_an_element_is_known_for_every_dtype_of_jax():
    partitioner = MaxSizePartitioner(16)
    sizes = {"float32": 4, np.int8: 1, jnp.bfloat16: 2, jax.random.key(0).dtype: 8}
    assert {dtype: partitioner((32,), dtype)[0] for dtype in sizes} == {k: 32 * v // 16 for k, v in sizes.items()}


@pytest.mark.parametrize(
    "make, name",
    [
        (lambda n: FixedShardsPartitioner(n), "num_shards"),
        (lambda n: MinSizePartitioner(n), "min_shard_bytes"),
        (lambda n: MinSizePartitioner(max_shards=n), "max_shards"),
        (lambda n: MaxSizePartitioner(n), "max_shard_bytes"),
        (lambda n: MaxSizePartitioner(4, max_shards=n), "max_shards"),
    ],
)
def test_pt6_numbers_that_are_not_positive_are_refused(make, name):
    with pytest.raises(ValueError, match=rf"^`{name}` must be an integer >= 1, got 0\.$"):
        make(0)
    with pytest.raises(TypeError, match=rf"^`{name}` must be an integer >= 1, got 2\.5\.$"):
        make(2.5)


@pytest.mark.parametrize("partitions", [None, [], [0, 1], [2, 2], [1, 2], [2], [2, 1, 1], [True, 1], [2.0, 1], "21"])
def test_pt10_wrong_result_of_a_partitioner_is_an_error_that_names_the_leaf(partitions):
    with pytest.raises(
        ValueError,
        match=r"^`variable_partitioner` must return a list of one integer per dimension, \[n, 1\] with n >= 1 for the leaf "
        r"state\['table'\] of shape \[8, 2\], got .*A leaf is divided along its first dimension only\.$",
    ):
        check_partitions(partitions, (8, 2), "state['table']")


def test_more_shards_than_rows_are_an_error_that_names_the_leaf():
    with pytest.raises(
        ValueError, match=r"returned 9 shards for the leaf w of shape \[8, 2\].*only 8 rows.*at most 8\."
    ):
        check_partitions((9, 1), (8, 2), "w")
    assert check_partitions((8, 1), (8, 2), "w") == 8
    assert check_partitions([np.int64(1)], (0,), "w") == 1


def test_rows_are_divided_evenly_and_the_first_shards_hold_the_rest():
    assert row_ranges(8, 3) == [(0, 3), (3, 6), (6, 8)]
    assert row_ranges(0, 1) == [(0, 0)]


@few
@hypothesis.given(st.integers(0, 100), st.integers(1, 20))
def test_shards_cover_all_rows_in_order_and_differ_by_at_most_one_row(num_rows, num_shards):
    ranges = row_ranges(num_rows, num_shards)
    assert [row for start, stop in ranges for row in range(start, stop)] == list(range(num_rows))
    sizes = [stop - start for start, stop in ranges]
    assert len(sizes) == num_shards
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] - sizes[-1] <= 1


@few
@hypothesis.given(partitioners, st.lists(st.integers(0, 30), min_size=1, max_size=3))
def test_result_of_every_partitioner_is_valid(partitioner, shape):
    num_shards = check_partitions(partitioner(shape, f32), shape, "x")
    assert 1 <= num_shards <= max(1, shape[0])
    assert partitioner(shape, f32, -1)[-1] == partitioner(shape[::-1], f32)[0]


@few
@hypothesis.given(st.integers(1, 200), st.lists(st.integers(1, 30), min_size=1, max_size=3))
def test_shards_do_not_exceed_the_largest_size_unless_they_are_one_row(max_bytes, shape):
    num_shards = MaxSizePartitioner(max_bytes)(shape, f32)[0]
    row_bytes = math.prod(shape[1:]) * 4
    largest = -(-shape[0] // num_shards) * row_bytes
    assert largest <= max(max_bytes, row_bytes)


@pytest.mark.parametrize("partitioner", [FixedShardsPartitioner(2), MinSizePartitioner(8), MaxSizePartitioner(8)])
def test_partitioners_are_values(partitioner):
    assert isinstance(partitioner, jdist.Partitioner)
    assert pickle.loads(pickle.dumps(partitioner)) == partitioner
    assert len({partitioner, type(partitioner)(2) if type(partitioner) is FixedShardsPartitioner else partitioner}) == 1
