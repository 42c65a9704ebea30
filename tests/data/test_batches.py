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

from laws import each_row

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


@st.composite
def layouts_and_batch(draw):
    """Draws two layouts, and a batch size that both can split."""
    one, two = draw(layouts()), draw(layouts())
    return one, two, math.lcm(one[0].num_replicas, two[0].num_replicas) * draw(st.integers(1, 3))


counts, seeds, remainders = st.integers(1, 70), st.integers(0, 2**64 - 1), st.sampled_from(["pad", "drop"])
epochs = st.integers(1, 3)


@few
@hypothesis.given(layouts_and_batch(), counts, st.booleans(), seeds, remainders, epochs)
def test_global_batches_are_bitwise_equal_for_any_replicas_and_processes(
    layouts, count, shuffle, seed, remainder, epochs
):
    one, two, size = layouts
    hypothesis.assume(remainder == "pad" or count >= size)
    options = dict(shuffle=shuffle, seed=seed, remainder=remainder, epochs=epochs)
    config = _config(_arrays(count), size, **options)
    expected = _join(config, _single_process(1))
    _same(_join(config, one), expected)
    _same(_join(config, two), expected)


@each_row("processes", [1, 2, 4])
@each_row("replicas", [1, 2, 3, 4, 8])
@each_row("interleaved", [False, True])
@each_row("shuffle", [False, True])
def test_global_batches_are_bitwise_equal_for_every_tabulated_layout(replicas, processes, interleaved, shuffle):
    processes = min(processes, replicas)
    owner = np.arange(replicas) % processes if interleaved else np.arange(replicas) * processes // replicas
    shares = [
        ProcessShare(tuple(np.flatnonzero(owner == p).tolist()), replicas, p, processes) for p in range(processes)
    ]
    config = _config(_arrays(61), 24, shuffle=shuffle, epochs=2)
    _same(_join(config, shares), _join(config, _single_process(1)))


@few
@hypothesis.given(layouts(), st.integers(1, 3), counts, st.booleans(), seeds, epochs)
def test_padded_batches_of_arrays_have_each_example_once_per_epoch_and_weights_count_them(
    shares, each, count, shuffle, seed, epochs
):
    size = shares[0].num_replicas * each
    joined = _join(_config(_arrays(count), size, shuffle=shuffle, seed=seed, epochs=epochs), shares)
    assert len(joined) == epochs * math.ceil(count / size)
    for epoch in range(epochs):
        epoch_batches = [batch for batch in joined if batch[3].epoch == epoch]
        assert (
            sum(weights.sum() for _, weights, *_ in epoch_batches) == sum(batch[2] for batch in epoch_batches) == count
        )
        assert sorted(sum(_example_numbers(epoch_batches), [])) == list(range(count))
        assert shuffle or sum(_example_numbers(epoch_batches), []) == list(range(count))
    for rows, weights, examples, _ in joined:
        assert (weights.dtype, weights.shape) == (np.float32, (size,))
        assert weights.tolist() == [1.0] * examples + [0.0] * (size - examples)
        chex.assert_trees_all_equal(rows, jax.tree.map(lambda x, i=rows["number"]: x[i], _arrays(count)))


@few
@hypothesis.given(layouts(), layouts(), st.integers(1, 20), counts, st.booleans(), seeds, st.data())
def test_padded_batches_of_any_size_have_the_same_examples_on_every_layout(one, two, size, count, shuffle, seed, data):
    config = _config(_arrays(count), size, shuffle=shuffle, seed=seed, epochs=2)
    expected = _join(config, _single_process(1))
    joined = _join(config, one)
    assert _example_numbers(joined) == _example_numbers(expected)
    assert [batch[2:] for batch in joined] == [batch[2:] for batch in expected]
    for rows, weights, examples, _ in joined:
        assert weights.tolist() == [1.0] * examples + [0.0] * (
            -(-size // one[0].num_replicas) * one[0].num_replicas - examples
        )
        chex.assert_trees_all_equal(rows, jax.tree.map(lambda x, i=rows["number"]: x[i], _arrays(count)))
    cut = data.draw(st.integers(0, len(joined)))
    after = joined[cut - 1][3] if cut else START._replace(batch_size=size)
    resumed = _join(config, two, _json(after))
    assert _example_numbers(resumed) == _example_numbers(expected[cut:])
    assert [batch[2:] for batch in resumed] == [batch[2:] for batch in expected[cut:]]


@pytest.mark.parametrize("kind", ["examples", "batches", "placed"])
@pytest.mark.parametrize("size", [1, 5, 7])
def test_padded_batches_of_streams_of_any_size_have_the_same_examples_on_every_layout(kind, size):
    config = SOURCES[kind](23, size, epochs=2)
    expected = _join(config, _single_process(1))
    for shares in (_single_process(3), _views([ProcessShare((0, 2), 4), ProcessShare((1, 3), 4)])):
        for number, position in enumerate([START, *(batch[3] for batch in expected)]):
            joined = _join(config, shares, _json(position))
            assert _example_numbers(joined) == _example_numbers(expected[number:])
            assert [batch[2:] for batch in joined] == [batch[2:] for batch in expected[number:]]


@few
@hypothesis.given(
    st.lists(st.integers(1, 12), min_size=1, max_size=6), st.integers(1, 6), st.integers(1, 8), st.integers(6, 20)
)
def test_padded_batches_of_sharded_files_of_any_size_have_each_example_once(sizes, shards, replicas, size):
    shards = min(shards, len(sizes))
    start = START._replace(shards=shards)
    joined = _join(_files(sizes, size), _single_process(replicas), start)
    expected = _join(_files(sizes, size), _single_process(1), start)
    assert _example_numbers(joined) == _example_numbers(expected)
    assert sorted(sum(_example_numbers(joined), [])) == list(range(sum(sizes)))


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


@pytest.mark.parametrize("count", [1, 2, 7])
@pytest.mark.parametrize("processes", [1, 2, 4])
def test_batches_of_fewer_examples_than_replicas_have_each_once(count, processes):
    shares = [ProcessShare(tuple(range(p, 8, processes)), 8, p, processes) for p in range(processes)]
    ((rows, weights, examples, _),) = _join(_config(_arrays(count), 8), shares)
    assert rows["number"].tolist() == list(range(count)) + [0] * (8 - count)
    assert weights.tolist() == [1.0] * count + [0.0] * (8 - count)
    assert examples == count


def test_padding_repeats_the_first_example_of_its_batch():
    shares = [ProcessShare((1,), 2, 0, 2), ProcessShare((0,), 2, 1, 2)]
    _, (rows, *_) = _join(_config(_arrays(9), 6, shuffle=True), shares)
    assert rows["number"].tolist() == rows["number"][:3].tolist() + [rows["number"][0]] * 3


SOURCES = {
    "arrays": lambda count, size, **options: _config(_arrays(count), size, **options),
    "examples": lambda count, size, **options: _config(_Stream(count), size, **options),
    "batches": lambda count, size, **options: _config(_Stream(count, size), None, **options),
    "placed": lambda count, size, **options: _config(_Placed(count), size, **options),
}


def _views(shares):
    """Returns the shares as shares of a single process, for a source that is the same on all processes."""
    return [ProcessShare(share.replicas, share.num_replicas) for share in shares]


@pytest.mark.parametrize("kind", SOURCES)
@hypothesis.settings(few, max_examples=25)
@hypothesis.given(layouts_and_batch(), counts, remainders)
def test_shared_source_of_any_kind_gives_every_layout_the_same_batches(kind, layouts, count, remainder):
    one, two, size = layouts
    hypothesis.assume(count >= size)  # the first batch of a stream determines the batch size
    config = SOURCES[kind](count, size, remainder=remainder, epochs=2, warn=lambda messages: None)
    expected = _join(_config(_arrays(count), size, remainder=remainder, epochs=2), _single_process(1))
    for shares in (one, two):
        joined = _join(config, _views(shares))
        assert _example_numbers(joined) == _example_numbers(expected)
        assert [batch[1].tolist() for batch in joined] == [batch[1].tolist() for batch in expected]
        full = [(rows, other) for (rows, w, *_), (other, *_) in zip(joined, expected, strict=True) if w.all()]
        for rows, other in full:
            chex.assert_trees_all_equal(rows, other, strict=True)


@few
@hypothesis.given(layouts_and_batch(), counts, st.booleans(), seeds, remainders, epochs, st.data())
def test_batches_of_arrays_resumed_at_any_position_on_any_layout_continue_exactly(
    layouts, count, shuffle, seed, remainder, epochs, data
):
    one, two, size = layouts
    hypothesis.assume(remainder == "pad" or count >= size)
    config = _config(_arrays(count), size, shuffle=shuffle, seed=seed, remainder=remainder, epochs=epochs)
    whole = _join(config, one)
    cut = data.draw(st.integers(0, len(whole)))
    after = whole[cut - 1][3] if cut else START._replace(batch_size=size)
    _same(_join(config, two, _json(after)), whole[cut:])


@pytest.mark.parametrize("kind", SOURCES)
def test_batches_of_any_source_resumed_at_every_position_continue_exactly(kind):
    config = SOURCES[kind](27, 6, epochs=2)
    whole = _join(config, _single_process(2))
    assert len(whole) == 10
    positions = [START, *(batch[3] for batch in whole)]
    for number, position in enumerate(positions):
        for shares in (_single_process(1), _single_process(3), [ProcessShare((1, 2), 3), ProcessShare((0,), 3)]):
            joined = _join(config, shares, _json(position))
            # The padding is another example where the source is not read from the beginning.
            assert _example_numbers(joined) == _example_numbers(whole[number:])
            assert [batch[2:] for batch in joined] == [batch[2:] for batch in whole[number:]]
            assert [batch[1].tolist() for batch in joined] == [batch[1].tolist() for batch in whole[number:]]


def test_resumed_function_of_the_step_is_called_with_the_next_steps():
    steps = []

    def source(step):
        steps.append(step)
        return {"number": np.arange(step * 4, step * 4 + 4, dtype=np.int32)}

    config = _config(source, None, epochs=None)
    first = list(itertools.islice(read_batches(config, ProcessShare((0, 1), 2), START), 3))
    assert steps == [0, 1, 2]
    resumed = next(read_batches(config, ProcessShare((0,), 1), _json(first[-1].position)))
    assert steps == [0, 1, 2, 3]
    assert resumed.rows["number"].tolist() == [[12, 13, 14, 15]]


def test_stream_that_reports_its_position_is_not_read_from_the_beginning():
    source = _Placed(20)
    config = _config(source, 4)
    position = list(itertools.islice(read_batches(config, ProcessShare((0,), 1), START._replace(batch_size=4)), 2))[
        -1
    ].position
    source.begun.clear()
    assert sum(_example_numbers(_join(config, _single_process(2), _json(position))), []) == list(range(8, 20))
    assert source.begun == list(range(8, 20))


def test_position_of_a_stream_whose_state_changes_in_place_is_a_copy():
    config = _config(_Placed(20, live=True), 4)
    joined = _join(config, _single_process(1))  # as if all batches were prefetched
    for number, (*_, after) in enumerate(joined):
        resumed = _join(_config(_Placed(20), 4), _single_process(1), after)
        assert _example_numbers(resumed) == _example_numbers(joined[number + 1 :])


@few
@hypothesis.given(
    st.lists(st.integers(1, 12), min_size=1, max_size=6),
    st.integers(1, 6),
    st.sampled_from([1, 2, 3, 4, 8]),
    st.integers(1, 2),
    st.booleans(),
    seeds,
    epochs,
)
def test_sharded_files_have_each_example_once_and_weights_count_them(
    sizes, shards, replicas, each, shuffle, seed, epochs
):
    shards, size = min(shards, len(sizes)), 24 * each
    config = _files(sizes, size, shuffle=shuffle, seed=seed, epochs=epochs)
    joined = _join(config, _single_process(replicas), START._replace(shards=shards))
    _same(joined, _join(config, _single_process(1), START._replace(shards=shards)))
    for epoch in range(epochs):
        epoch_batches = [batch for batch in joined if batch[3].epoch == epoch]
        assert sorted(sum(_example_numbers(epoch_batches), [])) == list(range(sum(sizes)))
        assert sum(weights.sum() for _, weights, *_ in epoch_batches) == sum(sizes)


@few
@hypothesis.given(
    st.lists(st.integers(1, 12), min_size=2, max_size=6), st.integers(1, 4), st.booleans(), seeds, st.data()
)
def test_sharded_files_resumed_on_another_number_of_replicas_continue_exactly(sizes, shards, shuffle, seed, data):
    shards = min(shards, len(sizes))
    config = _files(sizes, 12, shuffle=shuffle, seed=seed, epochs=2)
    start = START._replace(shards=shards, batch_size=12)
    whole = _join(config, _single_process(3), start)
    cut = data.draw(st.integers(0, len(whole)))
    joined = _join(config, _single_process(4), _json(whole[cut - 1][3] if cut else start))
    assert _example_numbers(joined) == _example_numbers(whole[cut:])
    assert [batch[1].tolist() for batch in joined] == [batch[1].tolist() for batch in whole[cut:]]
    assert [batch[2:] for batch in joined] == [batch[2:] for batch in whole[cut:]]


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


def test_stream_of_batches_resumed_on_replicas_that_cannot_split_them_is_refused():
    config = _config(_Stream(18, 6), None, remainder="drop")
    first = next(read_batches(config, ProcessShare((0, 1), 2), START))
    with pytest.raises(ValueError, match=r"batch of 6 examples cannot be split over 4 replicas \(2 left over\)"):
        next(read_batches(config, ProcessShare((0, 1, 2, 3), 4), _json(first.position)))


@pytest.mark.parametrize("before, now", [(1, 2), (1, 4), (2, 4), (4, 1), (3, 2), (4, 8)])
def test_padded_stream_of_batches_resumed_on_other_replicas_has_every_remaining_example(before, now):
    config = _config(_Stream(15, 5), None)
    first = next(read_batches(config, ProcessShare(tuple(range(before)), before), START))
    rest = _join(config, _single_process(now), _json(first.position))
    assert _example_numbers(rest) == [[5, 6, 7, 8, 9], [10, 11, 12, 13, 14]]


def test_source_shorter_in_a_later_epoch_ends_it_earlier():
    lengths = iter([8, 4])

    class Shrinking:
        def __iter__(self):
            return iter(_Stream(next(lengths)))

    joined = _join(_config(Shrinking(), 4, epochs=2), _single_process(2))
    assert [(batch[3].epoch, batch[3].batch) for batch in joined] == [(0, 1), (0, 2), (1, 1)]


def test_source_without_examples_in_a_later_epoch_is_refused_with_the_epoch():
    lengths = iter([4, 0])

    class Emptied:
        def __iter__(self):
            return iter(_Stream(next(lengths)))

    with pytest.raises(ValueError, match=r"no examples in epoch 1, but did in the one before.*`__iter__`"):
        _join(_config(Emptied(), 4, epochs=2), _single_process(2))


@pytest.mark.parametrize("replicas", [1, 2, 3])
def test_examples_in_a_reused_buffer_are_copied(replicas):
    class Buffer:
        def __iter__(self):
            buffer = np.zeros(2, np.float32)
            for i in range(12):
                buffer[:] = i
                yield {"x": buffer, "number": i}

    joined = _join(_config(Buffer(), 6), _single_process(replicas))
    for rows, *_ in joined:
        np.testing.assert_array_equal(rows["x"][:, 0], rows["number"])


@pytest.mark.parametrize("replicas", [1, 2, 3])
def test_batches_in_a_reused_buffer_are_copied(replicas):
    class Buffer:
        def __iter__(self):
            buffer = np.zeros(6, np.float32)
            for i in range(4):
                buffer[:] = i
                yield buffer

    joined = _join(_config(Buffer(), None), _single_process(replicas))
    assert [rows.tolist() for rows, *_ in joined] == [[float(i)] * 6 for i in range(4)]


def test_replica_batches_in_a_reused_buffer_are_copied():
    class Buffer:
        def __iter__(self):
            buffer = np.zeros(2, np.float32)
            for i in range(6):
                buffer[:] = i
                yield buffer

    config = _config(Buffer(), None, own_source=True, replica_batches=True)
    assert [rows.tolist() for rows, *_ in _join(config, _single_process(3))] == [[0, 0, 1, 1, 2, 2], [3, 3, 4, 4, 5, 5]]


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
