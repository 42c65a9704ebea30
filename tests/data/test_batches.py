"""Global batches of any number of processes and replicas, computed and joined in one process."""

import itertools
import json
import math
import re

import chex
import hypothesis
import hypothesis.strategies as st
import jax
import numpy as np
import pytest

from jdist._src.data.batches import Position, read_batches
from jdist._src.data.config import InputConfig
from jdist._src.data.files import Files
from jdist._src.data.shards import ProcessShare
from jdist._src.data.source_adapters import source_of

few = hypothesis.settings(max_examples=60, deadline=None, derandomize=True, database=None)
START = Position(0, 0, None, 1)


def _arrays(count):
    numbers = np.arange(count, dtype=np.int32)
    image = np.random.default_rng(1).normal(size=(count, 2, 3)).astype(np.float32)
    return {"number": numbers, "pair": (image, {"odd": numbers % 2 == 1, "none": None})}


def _example(tree, i):
    return jax.tree.map(lambda x: x[i], tree)


class _Stream:
    """A stream of examples, or of batches of `rows`, from the beginning in each epoch."""

    def __init__(self, count, rows=None):
        self.count, self.rows = count, rows

    def __iter__(self):
        tree = _arrays(self.count)
        if self.rows is None:
            return (_example(tree, i) for i in range(self.count))
        return (_example(tree, slice(i, i + self.rows)) for i in range(0, self.count, self.rows))


class _Placed:
    """A stream whose iterators report their position; it records the elements that are read."""

    def __init__(self, count, live=False):
        self.count, self.live, self.begun = count, live, []

    def __iter__(self):
        return _PlacedIterator(self)


class _PlacedIterator:
    def __init__(self, source):
        self._source, self._tree, self._at = source, _arrays(source.count), {"next": 0}

    def __iter__(self):
        return self

    def __next__(self):
        i = self._at["next"]
        if i == self._source.count:
            raise StopIteration
        self._source.begun.append(i)
        self._at["next"] = i + 1
        return _example(self._tree, i)

    def get_state(self):
        return self._at if self._source.live else dict(self._at)

    def set_state(self, state):
        self._at = dict(state)


def _config(source, batch_size, **options):
    options = {"shuffle": False, "seed": 3, "epochs": 1, "remainder": "pad", **options}
    adapted = source_of(source, batch_size is None, options["shuffle"], options["seed"])
    return InputConfig(adapted, batch_size, **options)


def _files(counts, batch_size, **options):
    """Returns the configuration of files with these numbers of examples, numbered over all files."""
    options = {"shuffle": False, "seed": 3, "epochs": 1, "remainder": "pad", **options}
    edges = [0, *itertools.accumulate(counts)]
    tree = _arrays(edges[-1])
    files = Files(list(range(len(counts))), lambda i: _example(tree, slice(edges[i], edges[i + 1])))
    return InputConfig(files, batch_size, **options)


def _single_process(replicas):
    return [ProcessShare(tuple(range(replicas)), replicas)]


def _join(config, shares, start=START):
    """Returns the joined batches of all shares: `(global rows, weights, examples, position after it)` each."""
    start = start._replace(batch_size=start.batch_size or config.batch_size)
    joined = []
    for parts in zip(*(read_batches(config, share, start) for share in shares), strict=True):
        order = np.argsort(np.concatenate([share.replicas for share in shares]))
        whole = lambda *x, order=order: np.concatenate(x)[order].reshape(-1, *x[0].shape[2:])
        for part, share in zip(parts, shares, strict=True):
            assert {len(x) for x in jax.tree.leaves((part.rows, part.weights))} == {len(share.replicas)}
        ((examples, after),) = {(part.examples, repr(part.position)) for part in parts}
        assert after == repr(parts[0].position)
        rows = jax.tree.map(whole, *(part.rows for part in parts))
        assert {part.weights is None for part in parts} == {config.remainder != "pad"}
        weights = np.ones(examples) if config.remainder != "pad" else whole(*(part.weights for part in parts))
        joined.append((rows, weights, examples, parts[0].position))
    return joined


def _example_numbers(joined):
    """Returns the numbers of the examples without padding, one list per batch."""
    return [rows["number"][weights > 0].tolist() for rows, weights, *_ in joined]


def _same(ours, theirs):
    assert len(ours) == len(theirs)
    for (rows, *rest), (other_rows, *other_rest) in zip(ours, theirs, strict=True):
        chex.assert_trees_all_equal(rows, other_rows, strict=True)
        chex.assert_trees_all_equal(rest[0], other_rest[0], strict=True)
        assert rest[1:] == other_rest[1:]


def _unweighted(batch):
    rows, weights, *rest = batch
    return rows, weights.astype(np.float32), *rest


def _json(position):
    return Position(**json.loads(json.dumps(position._asdict())))


@st.composite
def layouts(draw, replicas=(1, 2, 3, 4, 8), processes=(1, 2, 4)):
    """Draws the shares of processes that hold arbitrary replicas: blocks, interleaved, unequal numbers."""
    n = draw(st.sampled_from(replicas))
    owner = draw(st.lists(st.integers(0, draw(st.sampled_from(processes)) - 1), min_size=n, max_size=n))
    used = sorted(set(owner))
    return [
        ProcessShare(tuple(i for i in range(n) if owner[i] == process), n, number, len(used))
        for number, process in enumerate(used)
    ]


SOURCES = {
    "arrays": lambda count, size, **options: _config(_arrays(count), size, **options),
    "examples": lambda count, size, **options: _config(_Stream(count), size, **options),
    "batches": lambda count, size, **options: _config(_Stream(count, size), None, **options),
    "placed": lambda count, size, **options: _config(_Placed(count), size, **options),
}


def _of_one_process(shares):
    """Returns the shares as shares of a single process, for a source that is the same on all processes."""
    return [ProcessShare(share.replicas, share.num_replicas) for share in shares]


counts, seeds, remainders = st.integers(1, 70), st.integers(0, 2**64 - 1), st.sampled_from(["pad", "drop"])
epochs = st.integers(1, 3)


def _unpadded(joined):
    return [jax.tree.map(lambda x, keep=weights > 0: x[keep], rows) for rows, weights, *_ in joined]


def _same_examples(ours, theirs):
    """The examples of each batch and the positions are equal; the padding may differ."""
    chex.assert_trees_all_equal(_unpadded(ours), _unpadded(theirs), strict=True)
    assert [batch[2:] for batch in ours] == [batch[2:] for batch in theirs]


@few
@hypothesis.given(layouts(), layouts(), st.integers(1, 3), counts, st.booleans(), seeds, remainders, epochs, st.data())
def test_global_batches_of_arrays_are_bitwise_equal_for_any_layout_and_when_resumed_on_another(
    one, two, each, count, shuffle, seed, remainder, epochs, data
):
    size = math.lcm(one[0].num_replicas, two[0].num_replicas) * each
    hypothesis.assume(remainder == "pad" or count >= size)
    config = _config(_arrays(count), size, shuffle=shuffle, seed=seed, remainder=remainder, epochs=epochs)
    expected = _join(config, _single_process(1))
    _same(_join(config, one), expected)
    cut = data.draw(st.integers(0, len(expected)))
    _same(_join(config, two, _json(expected[cut - 1][3]) if cut else START), expected[cut:])


@few
@hypothesis.given(layouts(), layouts(), st.integers(1, 30), counts, st.booleans(), seeds, epochs, st.data())
def test_padded_batches_of_any_size_have_each_example_once_per_epoch_on_any_layout_and_when_resumed_on_another(
    one, two, size, count, shuffle, seed, epochs, data
):
    config = _config(_arrays(count), size, shuffle=shuffle, seed=seed, epochs=epochs)
    joined = _join(config, one)
    assert len(joined) == epochs * math.ceil(count / size)
    for epoch in range(epochs):
        numbers = sum(_example_numbers([batch for batch in joined if batch[3].epoch == epoch]), [])
        assert sorted(numbers) == list(range(count))
        assert shuffle or numbers == list(range(count))
    filled = -(-size // one[0].num_replicas) * one[0].num_replicas
    for rows, weights, examples, _ in joined:
        assert (weights.dtype, weights.shape) == (np.float32, (filled,))
        assert weights.tolist() == [1.0] * examples + [0.0] * (filled - examples)
        chex.assert_trees_all_equal(rows, jax.tree.map(lambda x, i=rows["number"]: x[i], _arrays(count)))
    cut = data.draw(st.integers(0, len(joined)))
    _same_examples(_join(config, two, _json(joined[cut - 1][3]) if cut else START), joined[cut:])


@pytest.mark.parametrize("kind", SOURCES)
@hypothesis.settings(few, max_examples=25)
@hypothesis.given(layouts(), layouts(), st.integers(1, 12), counts, remainders, st.data())
def test_source_of_any_kind_gives_every_layout_the_batches_of_arrays_and_is_resumed_on_another(
    kind, one, two, each, count, remainder, data
):
    size = each if remainder == "pad" else math.lcm(one[0].num_replicas, two[0].num_replicas)
    hypothesis.assume(count >= size)  # the first batch of a stream determines the batch size
    options = dict(remainder=remainder, epochs=2, warn=lambda messages: None)
    config = SOURCES[kind](count, size, **options)
    joined = _join(config, _of_one_process(one))
    expected = _join(_config(_arrays(count), size, **options), _single_process(1))
    chex.assert_trees_all_equal(_unpadded(joined), _unpadded(expected), strict=True)
    cut = data.draw(st.integers(0, len(joined)))
    position = _json(joined[cut - 1][3]) if cut else START
    _same_examples(_join(config, _of_one_process(two), position), joined[cut:])


@few
@hypothesis.given(
    st.lists(st.integers(1, 12), min_size=1, max_size=6),
    st.integers(1, 6),
    st.integers(1, 8),
    st.integers(1, 8),
    st.integers(6, 20),
    st.booleans(),
    seeds,
    st.data(),
)
def test_sharded_files_have_each_example_once_per_epoch_on_any_replicas_and_when_resumed_on_others(
    sizes, shards, one, two, size, shuffle, seed, data
):
    config = _files(sizes, size, shuffle=shuffle, seed=seed, epochs=2)
    start = START._replace(shards=min(shards, len(sizes)), batch_size=size)
    joined = _join(config, _single_process(one), start)
    for epoch in range(2):
        epoch_batches = [batch for batch in joined if batch[3].epoch == epoch]
        assert sorted(sum(_example_numbers(epoch_batches), [])) == list(range(sum(sizes)))
        assert sum(weights.sum() for _, weights, *_ in epoch_batches) == sum(sizes)
    cut = data.draw(st.integers(0, len(joined)))
    _same_examples(_join(config, _single_process(two), _json(joined[cut - 1][3]) if cut else start), joined[cut:])


@few
@hypothesis.given(layouts(), st.integers(1, 3), counts, st.booleans(), seeds)
def test_batches_with_drop_are_the_full_batches_with_pad(shares, each, count, shuffle, seed):
    size = shares[0].num_replicas * each
    hypothesis.assume(count >= size)
    dropped = _join(_config(_arrays(count), size, shuffle=shuffle, seed=seed, remainder="drop"), shares)
    padded = _join(_config(_arrays(count), size, shuffle=shuffle, seed=seed), shares)
    assert len(dropped) == count // size
    assert all(weights.all() and examples == size for _, weights, examples, _ in dropped)
    _same([_unweighted(batch) for batch in dropped], [_unweighted(batch) for batch in padded[: count // size]])


@few
@hypothesis.given(layouts(), st.integers(1, 3), counts)
def test_batches_with_error_are_the_full_ones_and_then_an_error_with_the_rest(shares, each, count):
    size = shares[0].num_replicas * each
    config = _config(_arrays(count), size, remainder="error")
    if count % size == 0:
        return _same(_join(config, shares), _join(_config(_arrays(count), size, remainder="drop"), shares))
    says = rf"There are only {count % size} of {size} examples in batch {count // size} of epoch 0, and remainder=\"error\""
    for share in shares:
        iterator = read_batches(config, share, START._replace(batch_size=size))
        full = list(itertools.islice(iterator, count // size))
        assert [batch.examples for batch in full] == [size] * (count // size)
        with pytest.raises(ValueError, match=says):
            next(iterator)


@few
@hypothesis.given(layouts(), counts)
def test_batches_of_fewer_examples_than_one_batch_with_drop_are_refused(shares, left):
    size = shares[0].num_replicas * 8
    count = (left - 1) % (size - 1) + 1
    with pytest.raises(ValueError, match=rf"{count} examples do not fill one batch of {size}, and remainder=\"drop\""):
        _join(_config(_arrays(count), size, remainder="drop"), shares)


def test_padding_repeats_the_first_example_of_its_batch():
    shares = [ProcessShare((1,), 2, 0, 2), ProcessShare((0,), 2, 1, 2)]
    _, (rows, *_) = _join(_config(_arrays(9), 6, shuffle=True), shares)
    assert rows["number"].tolist() == rows["number"][:3].tolist() + [rows["number"][0]] * 3


def test_position_of_a_stream_whose_state_changes_in_place_is_a_copy():
    config = _config(_Placed(20, live=True), 4)
    joined = _join(config, _single_process(1))  # as if all batches were prefetched
    for number, (*_, after) in enumerate(joined):
        resumed = _join(_config(_Placed(20), 4), _single_process(1), after)
        assert _example_numbers(resumed) == _example_numbers(joined[number + 1 :])


def test_sharded_files_are_assigned_round_robin():
    joined = _join(_files([4, 4, 4, 4], 4, epochs=1), _single_process(2), START._replace(shards=2))
    # Shard 0 has files 0 and 2, shard 1 has files 1 and 3; each fills half of a batch.
    assert _example_numbers(joined) == [[0, 1, 4, 5], [2, 3, 6, 7], [8, 9, 12, 13], [10, 11, 14, 15]]


def test_shard_of_files_without_examples_is_refused_with_its_index():
    with pytest.raises(ValueError, match=r"Shard 1 of the 2 shards of the data contains no examples.*\"data\""):
        _join(_files([4, 0, 4], 4), _single_process(2), START._replace(shards=2))


def test_warning_for_files_of_unequal_length_reports_a_lower_bound_of_the_dropped_examples():
    messages = []
    config = _files([100, 4], 8, remainder="drop", warn=messages.append)
    joined = _join(config, _single_process(2), START._replace(shards=2))
    assert sum(batch[2] for batch in joined) == 8
    (message,) = messages
    assert "left out 96 examples" in message or re.search(r"at least \d+", message), message


def test_stream_that_drops_examples_warns_with_their_number_in_the_first_epoch():
    messages = []
    joined = _join(_config(_Stream(11), 4, remainder="drop", epochs=3, warn=messages.append), _single_process(2))
    assert len(joined) == 6
    (message,) = messages
    assert "dropped 3 examples of the first epoch, which do not fill a batch of 4" in message


def test_source_shorter_in_a_later_epoch_ends_it_earlier():
    lengths = iter([8, 4])

    class Shrinking:
        def __iter__(self):
            return iter(_Stream(next(lengths)))

    joined = _join(_config(Shrinking(), 4, epochs=2), _single_process(2))
    assert [(batch[3].epoch, batch[3].batch) for batch in joined] == [(0, 1), (0, 2), (1, 1)]


@few
@hypothesis.given(st.integers(1, 4), st.integers(1, 5), st.integers(1, 20), st.booleans())
def test_weights_of_replica_batches_count_the_examples_of_the_source(replicas, rows, count, whole):
    hypothesis.assume(count >= rows)
    count = count // rows * rows if whole else count
    config = _config(_Stream(count, rows), None, own_source=True, replica_batches=True)
    joined = _join(config, _single_process(replicas))
    assert sum(weights.sum() for _, weights, *_ in joined) == count
    assert sum(_example_numbers(joined), []) == list(range(count))
    assert {len(weights) for _, weights, *_ in joined} == {replicas * rows}
