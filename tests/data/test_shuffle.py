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
epochs, sizes = st.integers(0, 5), st.integers(1, 20)


@few
@hypothesis.given(orders, epochs)
def test_epoch_is_a_permutation_of_all_examples(order, epoch):
    assert sorted(order.epoch(epoch)) == list(range(order.num_examples))


@few
@hypothesis.given(orders, epochs, sizes, st.integers(0, 3))
def test_batches_of_an_epoch_are_slices_of_its_order(order, epoch, size, first):
    batches = [batch.tolist() for batch in order.batches(epoch, size, first)]
    assert sum(batches, []) == order.epoch(epoch)[first * size :].tolist()
    assert all(len(batch) == size for batch in batches[:-1])


def test_order_without_shuffle_is_the_order_of_the_source():
    assert [batch.tolist() for batch in ExampleOrder(5, shuffle=False, seed=3).batches(7, 2)] == [[0, 1], [2, 3], [4]]


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
