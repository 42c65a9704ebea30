"""Which examples make which batch: pure arithmetic."""

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest

from jdist.data.order import Order

few = hypothesis.settings(max_examples=60, deadline=None, derandomize=True, database=None)
orders = st.builds(
    Order,
    num_examples=st.integers(1, 50),
    batch_size=st.integers(1, 20),
    shuffle=st.booleans(),
    seed=st.integers(0, 2**64 - 1),
    remainder=st.sampled_from(["drop", "pad"]),
)


def _epoch(order, epoch):
    return [batch.tolist() for batch in order.epoch_batches(epoch)]


@few
@hypothesis.given(orders, st.integers(0, 5))
def test_epoch_is_a_permutation_of_all_examples(order, epoch):
    assert sorted(order.epoch(epoch)) == list(range(order.num_examples))


@few
@hypothesis.given(orders, st.integers(0, 5))
def test_batches_of_an_epoch_are_its_order_cut_up(order, epoch):
    batches = _epoch(order, epoch)
    assert sum(batches, []) == order.epoch(epoch)[: order.num_examples - order.left_out].tolist()
    full = batches[:-1] if order.remainder == "pad" else batches
    assert all(len(batch) == order.batch_size for batch in full)
    assert order.left_out < order.batch_size
    assert order.remainder == "drop" or order.left_out == 0


@few
@hypothesis.given(orders, st.integers(0, 5), st.integers(1, 20))
def test_order_of_examples_does_not_depend_on_the_batch_size(order, epoch, other):
    cut_otherwise = Order(order.num_examples, other, order.shuffle, order.seed, order.remainder)
    np.testing.assert_array_equal(order.epoch(epoch), cut_otherwise.epoch(epoch))


def test_order_without_shuffle_is_that_of_the_source():
    assert _epoch(Order(5, 2, shuffle=False, seed=3, remainder="pad"), 7) == [[0, 1], [2, 3], [4]]
    assert _epoch(Order(5, 2, shuffle=False, seed=3, remainder="drop"), 7) == [[0, 1], [2, 3]]


def test_order_with_shuffle_changes_with_epoch_and_seed():
    order = lambda seed, epoch: tuple(Order(50, 5, shuffle=True, seed=seed, remainder="drop").epoch(epoch))
    found = [order(seed, epoch) for seed in (0, 1, 2**64 - 1) for epoch in range(3)]
    assert len(set(found)) == len(found)
    assert order(1, 1) == found[4]


@pytest.mark.parametrize(
    "seed, epoch, expected",
    [
        (0, 0, [0, 2, 1, 5, 4, 3, 6, 7]),
        (0, 1, [5, 3, 7, 2, 4, 1, 0, 6]),
        (7, 2, [6, 7, 4, 0, 1, 5, 3, 2]),
        (2**64 - 1, 0, [0, 7, 4, 2, 6, 3, 1, 5]),
    ],
)
def test_order_of_seed_and_epoch_is_the_same_in_every_version(seed, epoch, expected):
    assert Order(8, 4, shuffle=True, seed=seed, remainder="drop").epoch(epoch).tolist() == expected
