"""Comparison of sources between processes: digests of examples, random leaves, and sources that name their shard."""

import types

import numpy as np
import pytest

from jdist._src.data.source_check import check_same_digests, digest_of, digest_of_indexed, shard_of
from jdist._src.data.sources import Arrays, Examples

NUMBERS = [{"x": np.int32(i), "constant": np.int32(1)} for i in range(20)]


def test_digests_are_equal_only_for_equal_examples():
    assert digest_of(NUMBERS[:8]) == digest_of(NUMBERS[:8]) == digest_of_indexed(Examples(NUMBERS[:8]))
    for others in (NUMBERS[1:9], NUMBERS[7::-1], [{"x": np.float32(i), "constant": np.int32(1)} for i in range(8)]):
        assert digest_of(others)["source['x']"] != digest_of(NUMBERS[:8])["source['x']"]
    assert {name: values[1] for name, values in digest_of(NUMBERS).items()} == {
        "source['x']": 1,
        "source['constant']": 0,
    }


def test_examples_are_compared_over_the_complete_source_without_random_leaves():
    rows = np.arange(1000)
    changed = np.where(rows == 999, 0, rows)
    assert digest_of_indexed(Arrays(rows)) != digest_of_indexed(Arrays(changed))
    draws = iter(range(1000))

    class Random:
        def __len__(self):
            return 4

        def __getitem__(self, index):
            return {"x": index, "random": np.float32(next(draws))}

    assert list(digest_of_indexed(Examples(Random()))) == ["source['x']"]
    assert digest_of_indexed(Examples(["text"])) == {}  # reading reports the error with its place
    assert digest_of_indexed(Examples([])) == {}


# Values of the leaves on two processes: at first, and read again; the leaf that the error names.
SAME, OTHER, CONSTANT = [1, 1], [2, 1], [7, 0]
STREAMS = {
    "equal": (({"x": SAME}, {"x": SAME}), None, None),
    "divided": (({"x": SAME}, {"x": OTHER}), ({"x": SAME}, {"x": OTHER}), "x"),
    "divided_and_augmented": (
        ({"a": [1, 1], "x": SAME}, {"a": [2, 1], "x": OTHER}),
        ({"a": [3, 1], "x": SAME}, {"a": [4, 1], "x": OTHER}),
        "x",
    ),
    "augmented": (
        ({"a": [1, 1], "x": SAME}, {"a": [2, 1], "x": SAME}),
        ({"a": [3, 1], "x": SAME}, {"a": [4, 1], "x": SAME}),
        None,
    ),
    "random_order": (
        ({"x": SAME, "constant": CONSTANT}, {"x": OTHER, "constant": CONSTANT}),
        ({"x": [3, 1], "constant": CONSTANT}, {"x": [4, 1], "constant": CONSTANT}),
        "x",
    ),
}


@pytest.mark.parametrize("first, again, leaf", STREAMS.values(), ids=STREAMS)
def test_random_values_are_told_from_a_random_order(first, again, leaf):
    if leaf is None:
        check_same_digests(first, " in batch 0 of epoch 0", lambda: again)
        return
    with pytest.raises(
        ValueError, match=f"not the same on all processes: {leaf} of the same examples in batch 0 of epoch 0"
    ):
        check_same_digests(first, " in batch 0 of epoch 0", lambda: again)


def _shards():
    loader = lambda **values: types.SimpleNamespace(**values)
    options = types.SimpleNamespace(shard_index=1, shard_count=2)
    distributed = types.SimpleNamespace(rank=1, world_size=2)
    return {
        "sampler": (loader(sampler=loader(num_replicas=2, rank=1)), "SimpleNamespace(num_replicas=2, rank=1)"),
        "grain": (loader(_shard_options=options), "ShardOptions(shard_index=1, shard_count=2)"),
        "grain_sampler": (
            loader(_sampler=loader(_shard_options=options)),
            "ShardOptions(shard_index=1, shard_count=2)",
        ),
        "datasets": (loader(_distributed=distributed), "split_dataset_by_node(rank=1, world_size=2)"),
        "one_process": (loader(sampler=loader(num_replicas=1, rank=0)), None),
        "range": (range(4), None),
        "arrays": ({"x": np.arange(4)}, None),
    }


@pytest.mark.parametrize("name", _shards())
def test_shard_that_a_source_names_is_described(name):
    source, text = _shards()[name]
    assert shard_of(source) == text
