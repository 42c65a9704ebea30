"""Distributed data on one process: the rows DS of `rows.txt`.

A `tf.data.Dataset` that was batched is a source of batches here (`batch_size=None`); one that was not is a source of examples.
"""

import functools
import itertools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jdist

from laws import STRATEGIES, arrays, each_row, replica_devices


class Batched:
    """The batches of an array, the last one partial; can be iterated repeatedly."""

    def __init__(self, array, size):
        self._array, self._size = np.asarray(array), size

    def __iter__(self):
        return (self._array[i : i + self._size] for i in range(0, len(self._array), self._size))


def _per_replica(element, leaf=lambda batch: batch):
    """Returns the rows of an element on each replica, without padding."""
    batch, weights = element if isinstance(element, tuple) else (element, None)
    rows = np.asarray(leaf(batch).tree)
    is_example = np.ones(rows.shape[:2], bool) if weights is None else np.asarray(weights.tree) > 0
    return [part[mask].tolist() for part, mask in zip(rows, is_example, strict=True)]


def _steps(dataset, **options):
    return [_per_replica(element, **options) for element in dataset]


def _both(array, size):
    """Returns the two kinds of batches: batches of indexed examples, and batches from the source."""
    return {"of_examples": (np.asarray(array), size), "of_batches": (Batched(array, size), None)}.values()


def test_ds2_partial_batch_is_dropped(two):
    for source in _both(np.arange(9), 4):
        assert _steps(two.distribute_dataset(*source)) == [[[0, 1], [2, 3]], [[4, 5], [6, 7]]]


def test_ds3_ds4_partial_batch_fills_the_replicas_sequentially_and_the_weights_mark_its_examples(two):
    for source in _both(np.arange(10), 4):
        steps = [[[0, 1], [2, 3]], [[4, 5], [6, 7]], [[8, 9], []]]
        assert _steps(two.distribute_dataset(*source, remainder="pad")) == steps
    for source in _both(np.arange(7), 4):
        assert _steps(two.distribute_dataset(*source, remainder="pad")) == [[[0, 1], [2, 3]], [[4, 5], [6]]]
    for source in _both(np.arange(14), 8):
        steps = [[[0, 1, 2, 3], [4, 5, 6, 7]], [[8, 9, 10, 11], [12, 13]]]
        assert _steps(two.distribute_dataset(*source, remainder="pad")) == steps


@pytest.mark.parametrize("count", [5, 6, 7, 9, 10, 13, 14])
def test_ds4_mean_over_an_uneven_last_batch_is_the_mean_of_its_examples(count, two):
    def mean(batch, weights):
        return jdist.global_mean(batch.astype(jnp.float32), weights)

    for source in _both(np.arange(count), 8):
        *_, last = two.distribute_dataset(*source, remainder="pad")
        assert float(two.run(mean, last)) == np.mean(range(count // 9 * 8, count))


def test_ds6_batch_that_three_replicas_do_not_divide_is_an_error_or_padded():
    three = STRATEGIES["mirrored_3"]()
    for source in _both(np.arange(8), 4):
        message = r"batch of 4 examples cannot be split over 3 replicas \(1 left over\).*use 3 or 6"
        with pytest.raises(ValueError, match=message):
            list(three.distribute_dataset(*source))
    padded = three.distribute_dataset(Batched(np.arange(8), 4), None, remainder="pad")
    assert _steps(padded) == [[[0, 1], [2, 3], []], [[4, 5], [6, 7], []]]


def test_ds10_examples_instead_of_batches_are_errors_and_vectors_are_split(two):
    with pytest.raises(
        ValueError, match=r"source is int32\[\] in the first batch, but must be an array with one row per example"
    ):
        list(two.distribute_dataset((np.int32(i) for i in range(4)), None))
    with pytest.raises(ValueError, match=r"batch of 3 examples cannot be split over 2 replicas \(1 left over\)"):
        list(two.distribute_dataset([np.array([1, 2, 3])].__iter__(), None))
    vectors = two.distribute_dataset(iter([np.array([1, 2, 3])]), None, remainder="pad")
    assert _steps(vectors) == [[[1, 2], [3]]]


@each_row("source", [object(), 5, 1.5], ids=["object", "int", "float"])
def test_ds11_invalid_source_is_an_error_with_its_type(source, two):
    with pytest.raises(ValueError, match=rf"The source is {type(source).__name__}, which is not supported"):
        two.distribute_dataset(source, 2)


@each_row("remainder", ["drop", "pad", "error"])
def test_ds12_empty_data_set_is_an_error(remainder, two):
    empty = "The source is empty: there is nothing to distribute"
    with pytest.raises(ValueError, match=empty):
        two.distribute_dataset(np.zeros((0, 3)), 2, remainder=remainder)
    for size in (2, None):
        dataset = two.distribute_dataset(Batched([], 2), size, remainder=remainder)
        with pytest.raises(ValueError, match=empty):
            list(dataset)


def test_ds13_leaves_of_a_dict_are_split_alike_and_keep_their_dtype_if_empty(two):
    source = {"a": np.int32([1, 2, 3]), "b": np.float32([4, 5, 6])}
    dataset = two.distribute_dataset(source, 2, remainder="pad")
    assert _steps(dataset, leaf=lambda batch: batch["a"]) == [[[1], [2]], [[3], []]]
    assert _steps(dataset, leaf=lambda batch: batch["b"]) == [[[4], [5]], [[6], []]]
    for batch, _ in dataset:
        assert {name: (x.dtype, x.shape) for name, x in arrays(batch).items()} == {
            "a": (np.int32, (2, 1)),
            "b": (np.float32, (2, 1)),
        }


def test_ds15_repeated_batches_have_a_partial_one_per_epoch_and_batches_of_a_repeated_source_do_not(two):
    epoch = [[[0], [1]], [[2], []]]
    for source in _both(np.arange(3), 2):
        assert _steps(two.distribute_dataset(*source, epochs=2, remainder="pad")) == epoch * 2
    repeated = (np.int32(i) for _ in range(2) for i in range(3))
    assert _steps(two.distribute_dataset(repeated, 2)) == [[[0], [1]], [[2], [0]], [[1], [2]]]
    mapped = (batch + 10 for batch in Batched(np.arange(3), 4))
    assert _steps(two.distribute_dataset(mapped, None, remainder="pad")) == [[[10, 11], [12]]]


def test_ds16_batches_of_different_widths_are_errors_and_of_one_width_are_split(two):
    rows = [[1], [2, 2], [3, 3, 3]]
    widen = lambda rows, width: np.stack([np.pad(np.int32(row), (0, width - len(row))) for row in rows])
    with pytest.raises(
        ValueError, match=r"source as int32\[3\] per row, expected int32\[2\] in batch 1 of epoch 0.*same structure"
    ):
        list(two.distribute_dataset(iter([widen(rows[:2], 2), widen(rows[2:], 3)]), None, remainder="pad"))
    with pytest.raises(
        ValueError, match=r"source has the shape \[2\] in example 1 in batch 0 of epoch 0, but \[1\] in"
    ):
        list(two.distribute_dataset(map(np.int32, rows), 2, remainder="pad"))
    widened = two.distribute_dataset(widen(rows, 3), 2, remainder="pad")
    assert _steps(widened) == [[[[1, 0, 0]], [[2, 2, 0]]], [[[3, 3, 3]], []]]


def test_ds17_mean_of_a_partial_batch_is_the_mean_of_its_examples(two):
    for source in _both(np.float32([5, 6, 7]), 4):
        (element,) = two.distribute_dataset(*source, remainder="pad")
        means, sizes = two.run(lambda x, w: ((x * w).sum() / w.sum(), w.sum()), element)
        assert ([float(x) for x in means.values], [int(x) for x in sizes.values]) == ([5.5, 7.0], [2, 1])
        assert float(two.run(jdist.global_mean, element)) == 6.0


def test_ds18_mean_over_examples_keeps_the_other_dimension(two):
    (element,) = two.distribute_dataset(np.ones((3, 2), np.float32), 4, remainder="pad")
    assert two.run(lambda x, w: jdist.global_mean(x, w, axis=0), element).tolist() == [1, 1]


def test_ds20_steps_come_in_order(two):
    dataset = two.distribute_dataset(np.int32([5, 6, 7, 8]), 2)
    squares = [two.run(lambda x: x[0] ** 2, (batch,)) for batch in dataset]
    assert [[int(x) for x in square.values] for square in squares] == [[25, 36], [49, 64]]


def _sum_of_all(state, batch):
    return state + jdist.all_reduce("sum", batch.sum()), None


def test_ds21_loop_to_the_end_sums_every_example(two):
    step, state = two.step(_sum_of_all), two.put(np.int32(0))
    for batch in two.distribute_dataset(np.int32([5, 6, 7, 8]), 2):
        state, _ = step(state, batch)
    assert int(state) == 26


def test_ds22_each_loop_starts_again(two):
    mean = lambda batch: jdist.global_mean(batch)
    dataset = two.distribute_dataset(np.float32([5, 6, 7, 8]), 2)
    count, state = two.step(lambda state, batch: (state + 1, None)), two.put(1)
    for _ in range(2):
        means = []
        for batch in dataset:
            means.append(float(two.run(mean, (batch,))))
            state, _ = count(state, batch)
        assert 2 * np.prod(means) == 2 * 5.5 * 7.5
    assert int(state) == 5


@pytest.mark.parametrize("name, expected", [("mirrored_1", 10.0), ("one_device", 10.0), ("mirrored_2", 7.5)])
def test_ds23_step_of_batch_and_state_is_reduced_over_the_replicas(name, expected):
    strategy = STRATEGIES[name]()
    step = strategy.step(lambda one, x: (one, jdist.all_reduce("mean", x[0] ** 2 + one)))
    one, outputs = strategy.put(1.0), []
    for batch in strategy.distribute_dataset(np.float32([2, 3]), strategy.num_replicas_in_sync):
        one, output = step(one, batch)
        outputs.append(float(output))
    assert outputs[-1] == expected


@pytest.mark.parametrize("prefetch", [0, 2])
def test_ds24_next_after_the_end_keeps_raising_stop_iteration(prefetch, two):
    for source in _both(np.arange(4), 4):
        iterator = iter(two.distribute_dataset(*source, prefetch=prefetch))
        assert _per_replica(next(iterator)) == [[0, 1], [2, 3]]
        for _ in range(3):
            with pytest.raises(StopIteration):
                next(iterator)
        assert next(iterator, None) is None  # the counterpart of `get_next_as_optional`


def test_ds26_reduction_over_the_batches_is_a_loop(two):
    dataset = two.distribute_dataset(np.arange(6), 2)
    total = functools.reduce(lambda s, batch: s + two.reduce("sum", batch, axis=0), dataset, 0)
    assert int(total) == 15


def test_ds27_length_is_known_if_the_source_has_a_length_and_an_element_is_its_spec(two):
    for remainder, steps in {"drop": 2, "pad": 3}.items():
        dataset = two.distribute_dataset(np.arange(10), 4, remainder=remainder)
        assert len(dataset) == len(list(dataset)) == steps
    for source, size in (((np.int32(i) for i in range(4)), 2), (Batched(np.arange(4), 2), None)):
        dataset = two.distribute_dataset(source, size)
        with pytest.raises(TypeError, match="The number of batches is unknown before the source is read"):
            len(dataset)
        spec = jax.tree.map(jax.typeof, next(iter(dataset)))
        assert (repr(spec), spec.tree.dtype, spec.tree.shape) == ("PerReplica(int32[2,1])", np.int32, (2, 1))


def test_ds28_function_is_called_once_with_its_input_context(two):
    calls = []

    def batches(context):
        calls.append(context)
        return Batched(np.arange(6), context.get_per_replica_batch_size(4))

    dataset = two.distribute_datasets_from_function(batches, remainder="pad")
    assert calls == [jdist.data.InputContext(num_input_pipelines=1, input_pipeline_id=0, num_replicas_in_sync=2)]
    assert _steps(dataset) == _steps(dataset) == [[[0, 1], [2, 3]], [[4, 5], []]]
    assert len(calls) == 1


def _pipeline_for_each_replica(strategy, make):
    """The counterpart of `InputReplicationMode.PER_REPLICA`: the pipelines of the replicas of a process, alternating."""

    def batches(context):
        here = len(strategy.mesh.local_devices)
        pipelines = [make(context.input_pipeline_id * here + i) for i in range(here)]
        return itertools.chain.from_iterable(zip(*pipelines, strict=True))

    return strategy.distribute_datasets_from_function(batches)


def test_ds30_pipeline_per_replica_is_one_pipeline_that_alternates(two):
    calls = []

    def pipeline(replica):
        calls.append(replica)
        return Batched(np.arange(4), 1)

    assert _steps(_pipeline_for_each_replica(two, pipeline)) == [[[i], [i]] for i in range(4)]
    assert calls == [0, 1]


def test_ds32_pipeline_per_replica_does_not_affect_later_data_sets(two):
    files = jdist.data.Files(["a", "b"], lambda path: np.arange(2) + 2 * "ab".index(path))
    before = _steps(two.distribute_dataset(files, 2, auto_shard="off"))
    _steps(_pipeline_for_each_replica(two, lambda replica: Batched(np.arange(4), 1)))
    after = _steps(two.distribute_dataset(files, 2, auto_shard="off"))
    assert before == after == [[[0], [1]], [[2], [3]]]


@each_row("remainder, total", [("pad", 310), ("drop", 200)])
def test_ds33_ragged_rows_are_errors_and_padded_ones_are_split_with_their_masks(remainder, total, two):
    ragged = [np.full(i % 4, i, np.int32) for i in range(20)]
    with pytest.raises(ValueError, match=r"source has the shape \[1\] in example 1 in batch 0 of epoch 0, but \[0\]"):
        list(two.distribute_dataset(iter(ragged), 8, remainder=remainder))
    source = {
        "value": np.stack([np.pad(row, (0, 3 - len(row))) for row in ragged]),
        "length": np.int32([len(row) for row in ragged]),
    }
    dataset = two.distribute_dataset(source, 8, remainder=remainder)
    first = next(iter(dataset))
    assert [sum(x) for x in _per_replica(first, lambda batch: batch["length"])] == [6, 6]
    assert _per_replica(first, lambda batch: batch["value"])[1] == source["value"][4:8].tolist()
    values = _steps(dataset, leaf=lambda batch: batch["value"])
    assert sum(np.sum(part) for step in values for part in step if part) == total


def test_ds34_batch_that_cannot_be_split_evenly_is_an_error():
    sixth = jdist.data.InputContext(num_replicas_in_sync=6)
    assert sixth.get_per_replica_batch_size(12) == 2
    message = r"batch of 13 examples cannot be split over 6 replicas \(1 left over\).*use 12 or 18"
    with pytest.raises(ValueError, match=message):
        sixth.get_per_replica_batch_size(13)
    with pytest.raises(ValueError, match=r"batch of 10 examples cannot be split over 4 replicas \(2 left over\)"):
        jdist.data.InputContext(num_replicas_in_sync=4).get_per_replica_batch_size(10)


@pytest.mark.parametrize("prefetch", [0, 2])
def test_ds35_each_part_is_placed_on_the_device_of_its_replica(prefetch, strategy):
    n = strategy.replicas.num_parts
    for source in _both(np.arange(2 * n), n):
        for batch, weights in strategy.distribute_dataset(*source, remainder="pad", prefetch=prefetch):
            for tree in (batch, weights):
                assert [part.devices() for part in tree.values] == replica_devices(strategy)


def test_position_replaces_skipping(two):
    """`get_next` in a loop over a range of steps, interrupted and resumed."""
    iterator = iter(two.distribute_dataset(np.arange(8), 2))
    taken = [_per_replica(next(iterator)) for _ in range(2)]
    later = iter(two.distribute_dataset(np.arange(8), 2))
    later.set_state(json.loads(json.dumps(iterator.get_state())))
    assert taken + _steps(later) == [[[i], [i + 1]] for i in (0, 2, 4, 6)]
    assert jax.tree.leaves(_steps(iterator)) == [4, 5, 6, 7]
