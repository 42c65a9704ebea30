"""The order of examples: pure arithmetic."""

import hypothesis
import hypothesis.strategies as st
import pytest

from jdist._src.data.shuffle import ExampleOrder

few = hypothesis.settings(max_examples=60, deadline=None, derandomize=True, database=None)
orders = st.builds(
    ExampleOrder,
    num_examples=st.integers(1, 50),
    shuffle=st.booleans(),
    seed=st.integers(0, 2**64 - 1),
    shard=st.integers(0, 3),
)
epochs = st.integers(0, 5)


@few
@hypothesis.given(orders, epochs)
def test_epoch_is_a_permutation_of_all_examples(order, epoch):
    assert sorted(order.epoch(epoch)) == list(range(order.num_examples))


def test_order_without_shuffle_is_the_order_of_the_source():
    assert ExampleOrder(5, shuffle=False, seed=3).epoch(7).tolist() == [0, 1, 2, 3, 4]


def test_order_with_shuffle_changes_with_epoch_seed_and_shard():
    order = lambda *of: tuple(ExampleOrder(50, True, of[0], of[2]).epoch(of[1]))
    orders_by_key = {
        of: order(*of)
        for of in [(seed, epoch, shard) for seed in (0, 1, 2**64 - 1) for epoch in (0, 1) for shard in (0, 1)]
    }
    assert len(set(orders_by_key.values())) == len(orders_by_key)
    assert order(1, 1, 1) == orders_by_key[1, 1, 1]


@pytest.mark.parametrize(
    "seed, epoch, expected",
    [
        (0, 0, [5, 0, 6, 1, 7, 2, 4, 3]),
        (0, 1, [2, 0, 4, 1, 7, 5, 3, 6]),
        (7, 2, [4, 1, 3, 7, 6, 2, 0, 5]),
        (2**64 - 1, 0, [0, 7, 2, 1, 4, 6, 5, 3]),
    ],
)
def test_shuffled_order_is_the_same_in_every_version(seed, epoch, expected):
    assert ExampleOrder(8, shuffle=True, seed=seed).epoch(epoch).tolist() == expected
