"""Every kind of source yields its examples exactly once, in order, from any position."""

import functools
import itertools
import json
import os
import subprocess
import sys
import textwrap

import grain
import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jdist

from laws import STRATEGIES, arrays, each_row

few = hypothesis.settings(max_examples=60, deadline=None, derandomize=True, database=None)
REPLICAS = {name: make() for name, make in STRATEGIES.items()}
every_strategy = each_row("strategy", REPLICAS.values(), ids=REPLICAS)
BATCH = 24  # every number of replicas divides it
COUNT = 60  # 12 examples are left over


class Sequence:
    """Examples with an index; every element of every leaf of example i is i."""

    def __init__(self, count=COUNT):
        self._count = count

    def __len__(self):
        return self._count

    def __repr__(self):  # grain's DataLoader compares sources by it
        return f"Sequence({self._count})"

    def __getitem__(self, number):
        if not 0 <= number < self._count:
            raise IndexError(number)
        return {"number": np.int32(number), "row": [np.full(2, number, np.float32), {"none": None}]}


def _examples_from(first=0, count=COUNT):
    for i in range(first, count):
        yield Sequence(count)[i]


class Again:
    """An iterable that calls `make` for each iteration."""

    def __init__(self, make):
        self._make = make

    def __iter__(self):
        return iter(self._make())


def _examples(count=COUNT):
    return (Sequence(count)[i] for i in range(count))


def _cut(count=COUNT, size=BATCH):
    return (np.arange(i, min(i + size, count), dtype=np.int32) for i in range(0, count, size))


def _arrays(count=COUNT):
    numbers = np.arange(count)
    return {
        "number": numbers,
        "pair": (np.repeat(numbers[:, None], 3, 1).astype(np.float32), [None, numbers.astype("u1")]),
    }


def _map(count=COUNT):
    return grain.MapDataset.source(Sequence(count))


def _loader(count=COUNT, batched=False):
    return grain.DataLoader(
        data_source=Sequence(count),
        sampler=grain.samplers.SequentialSampler(num_records=count, shard_options=grain.sharding.NoSharding()),
        operations=[grain.transforms.Batch(batch_size=BATCH)] if batched else [],
        worker_count=0,
    )


NUMBERED = {
    "array": lambda count: np.arange(count, dtype=np.int16),
    "nest": _arrays,
    "jax_arrays": lambda count: jax.tree.map(jnp.asarray, _arrays(count)),
    "range": range,
    "sequence": Sequence,
    "list": lambda count: list(Sequence(count)),
    "grain_map": _map,
}
STREAMS = {
    "generator": _examples,
    "iterator": lambda count: iter(Sequence(count)),
    "iterable": lambda count: Again(lambda: _examples(count)),
    "generator_function": lambda count: lambda: _examples(count),
    "generator_function_with_default": lambda count: functools.partial(_examples_from, count=count),
    "grain_iter": lambda count: _map(count).to_iter_dataset(),
    "grain_loader": _loader,
    "files": lambda count: jdist.data.Files([0, 1], lambda part: _part(count, part)),
}
BATCHES = {
    "iterable_of_batches": lambda count: Again(lambda: _cut(count)),
    "generator_of_batches": _cut,
    "generator_function_of_batches": lambda count: lambda: _cut(count),
    "grain_map_of_batches": lambda count: _map(count).batch(BATCH),
    "grain_iter_of_batches": lambda count: _map(count).to_iter_dataset().batch(BATCH),
    "grain_loader_of_batches": lambda count: _loader(count, batched=True),
}
ENDLESS = {
    "grain_repeated": (lambda: _map(BATCH).repeat(), BATCH),
    "grain_repeated_batches": (lambda: _map(BATCH).repeat().batch(BATCH), None),
    "function": (lambda: lambda step: np.arange(BATCH, dtype=np.int32), None),
    "function_with_batch_size": (lambda: lambda step: {"x": np.arange(BATCH, dtype=np.int32)}, BATCH),
}
KINDS = {
    **{name: (make, BATCH) for name, make in {**NUMBERED, **STREAMS}.items()},
    **{name: (make, None) for name, make in BATCHES.items()},
}
ONCE = ("generator", "iterator", "generator_of_batches")  # can be read only once
AGAIN = {name: kind for name, kind in KINDS.items() if name not in ONCE}


def _part(count, part):
    edge = count // 3 + 1
    return (Sequence(count)[i] for i in (range(edge) if part == 0 else range(edge, count)))


def _table(kinds):
    return each_row("make, batch_size", kinds.values(), ids=kinds)


def _numbers(elements):
    """Returns the numbers of the examples without padding, one list per batch; asserts that all leaves agree."""
    read_numbers = []
    for element in elements:
        batch, weights = element if isinstance(element, tuple) else (element, None)
        leaves = [np.asarray(x).reshape(BATCH, -1) for x in jax.tree.leaves(batch)]
        for leaf in leaves:
            np.testing.assert_array_equal(leaf, np.broadcast_to(leaves[0][:, :1], leaf.shape))
        keep = slice(None) if weights is None else np.asarray(weights.tree).ravel() > 0
        read_numbers.append(leaves[0][keep, 0].tolist())
    return read_numbers


def _expected(count, remainder):
    whole = [list(range(i, min(i + BATCH, count))) for i in range(0, count, BATCH)]
    return whole if remainder == "pad" else [batch for batch in whole if len(batch) == BATCH]


REMAINDERS = [("drop", COUNT), ("pad", COUNT), ("error", 48)]


@each_row("remainder, count", REMAINDERS)
@_table(KINDS)
def test_source_yields_its_examples_once_and_in_order(make, batch_size, remainder, count, two):
    dataset = two.distribute_dataset(make(count), batch_size, remainder=remainder)
    assert _numbers(dataset) == _expected(count, remainder)


@each_row("strategy", REPLICAS.values(), ids=REPLICAS)
@each_row("remainder, count", REMAINDERS)
def test_examples_are_in_order_on_any_number_of_replicas(remainder, count, strategy):
    for source, batch_size in ((Sequence(count), BATCH), (Again(lambda: _cut(count)), None)):
        dataset = strategy.distribute_dataset(source, batch_size, remainder=remainder)
        assert _numbers(dataset) == _expected(count, remainder)


@_table(ENDLESS)
def test_endless_source_continues(make, batch_size, two):
    dataset = two.distribute_dataset(make(), batch_size)
    iterator = iter(dataset)
    assert _numbers(itertools.islice(iterator, 5)) == [list(range(BATCH))] * 5
    iterator.close()
    with pytest.raises(TypeError, match="The source is endless"):
        len(dataset)


@_table(KINDS)
def test_source_with_error_refuses_a_partial_batch(make, batch_size, two):
    says = r"60 examples in batches of 24 leave 12 over|There are only 12 of 24 examples in batch 2 of epoch 0"
    with pytest.raises(ValueError, match=rf"({says}).*remainder=\"error\" allows only full batches"):
        list(two.distribute_dataset(make(COUNT), batch_size, remainder="error"))


@_table(AGAIN)
@each_row("remainder", ["drop", "pad"])
def test_source_is_read_once_per_epoch(make, batch_size, remainder, two):
    dataset = two.distribute_dataset(make(COUNT), batch_size, epochs=3, remainder=remainder)
    assert _numbers(dataset) == _expected(COUNT, remainder) * 3


@_table(AGAIN)
def test_source_with_infinite_epochs_continues(make, batch_size, two):
    iterator = iter(two.distribute_dataset(make(COUNT), batch_size, epochs=None, remainder="pad"))
    assert _numbers(itertools.islice(iterator, 8)) == (_expected(COUNT, "pad") * 3)[:8]
    iterator.close()


@_table(AGAIN)
def test_each_loop_reads_the_source_from_the_beginning(make, batch_size, two):
    dataset = two.distribute_dataset(make(COUNT), batch_size)
    next(iter(dataset))
    assert _numbers(dataset) == _numbers(dataset) == _expected(COUNT, "drop")


@_table({name: KINDS[name] for name in ONCE})
@each_row("epochs", [2, None])
def test_iterator_for_several_epochs_is_refused(epochs, make, batch_size, two):
    with pytest.raises(
        ValueError, match=rf"The source is a \w+, which can be read only once, but epochs={epochs}\. .*`__iter__`"
    ):
        two.distribute_dataset(make(COUNT), batch_size, epochs=epochs)


def test_generator_for_several_epochs_is_refused_with_the_line_to_write(two):
    def rows():
        yield from np.arange(8)

    line = r"Write `rows` instead of `rows\(\)`"
    with pytest.raises(ValueError, match=rf"The source is a generator, .*epochs=2\..*{line}"):
        two.distribute_dataset(rows(), 4, epochs=2)
    with pytest.raises(ValueError, match=rf"epochs=3\..*{line}"):
        two.distribute_dataset(rows(), 4).repeated(3)
    with pytest.raises(
        ValueError, match=r"read only once.*first batch determines|first batch determines.*read only once"
    ):
        two.distribute_dataset(rows(), 4).element_spec  # noqa: B018
    with pytest.raises(ValueError, match=r"`__iter__` starts at the beginning\.$"):
        two.distribute_dataset((i for i in range(8)), 4, epochs=2)


@_table(KINDS)
@each_row("remainder", ["drop", "pad"])
def test_element_spec_has_the_shapes_of_the_batches(remainder, make, batch_size, two):
    dataset = two.distribute_dataset(make(COUNT), batch_size, remainder=remainder)
    if dataset.is_one_shot:
        return
    spec = dataset.element_spec
    element = next(iter(dataset))
    shapes = lambda tree: [(x.shape, x.dtype, x.sharding) for x in jax.tree.leaves(tree)]
    assert shapes(spec) == shapes(element)
    assert jax.tree.structure(spec) == jax.tree.structure(element)


@_table({name: KINDS[name] for name in ONCE})
def test_iterator_in_a_second_loop_is_refused(make, batch_size, two):
    dataset = two.distribute_dataset(make(COUNT), batch_size)
    assert len(_numbers(dataset)) == 2
    with pytest.raises(ValueError, match=r"The source is a \w+, which can be read only once, and has been read\."):
        next(iter(dataset))


def test_iterable_that_does_not_restart_is_refused_in_epoch_1(two):
    left = iter(Sequence(BATCH))
    dataset = two.distribute_dataset(Again(lambda: left), BATCH, epochs=2)
    iterator = iter(dataset)
    next(iterator)
    with pytest.raises(ValueError, match=r"The source yields no examples in epoch 1, but did in the one before\."):
        next(iterator)


@pytest.mark.parametrize("remainder", ["drop", "pad"])
def test_iterator_that_restarts_after_its_end_is_not_called_again(remainder, one):
    class Rewinding:
        """Restarts after its end, like many hand-written iterators."""

        def __init__(self):
            self._next, self._asked = 0, 0

        def __iter__(self):
            return self

        def __next__(self):
            self._asked += 1
            assert self._asked < 10 * BATCH, "this goes on for ever"
            if self._next == BATCH + 6:
                self._next = 0
                raise StopIteration
            self._next += 1
            return np.int32(self._next - 1)

    dataset = one.distribute_dataset(Rewinding(), BATCH, remainder=remainder)
    assert _numbers(dataset) == _expected(BATCH + 6, remainder)


@pytest.mark.parametrize("make", NUMBERED.values(), ids=NUMBERED)
@pytest.mark.parametrize("remainder", ["drop", "pad"])
def test_shuffled_order_is_the_same_for_all_indexed_sources(remainder, make, two):
    options = dict(shuffle=True, seed=3, epochs=2, remainder=remainder)
    read_numbers = _numbers(two.distribute_dataset(make(COUNT), BATCH, **options))
    assert read_numbers == _numbers(two.distribute_dataset(np.arange(COUNT), BATCH, **options))
    assert read_numbers[: len(read_numbers) // 2] != read_numbers[len(read_numbers) // 2 :]
    if remainder == "pad":
        assert sorted(sum(read_numbers, [])) == sorted([*range(COUNT)] * 2)


def test_shuffle_of_indexed_batches_permutes_the_batches(two):
    dataset = two.distribute_dataset(_map(10 * BATCH).batch(BATCH), None, shuffle=True, epochs=2)
    read_numbers = _numbers(dataset)
    whole = [list(range(i, i + BATCH)) for i in range(0, 10 * BATCH, BATCH)]
    assert sorted(read_numbers[:10]) == sorted(read_numbers[10:]) == whole
    assert len({str(whole), str(read_numbers[:10]), str(read_numbers[10:])}) == 3


UNSHUFFLED = {
    **{name: kind for name, kind in KINDS.items() if name in {*STREAMS, *BATCHES} - {"files", "grain_map_of_batches"}},
    **{name: (lambda _, make=make: make(), batch_size) for name, (make, batch_size) in ENDLESS.items()},
}


@_table(UNSHUFFLED)
def test_shuffle_of_a_stream_is_refused(make, batch_size, two):
    with pytest.raises(ValueError, match=r"The source .*shuffle=True needs examples with an index"):
        two.distribute_dataset(make(COUNT), batch_size, shuffle=True)


def test_shuffle_of_files_that_are_streams_is_refused_with_the_path(two):
    dataset = two.distribute_dataset(STREAMS["files"](COUNT), BATCH, shuffle=True)
    with pytest.raises(ValueError, match="yields its elements sequentially, but shuffle=True needs") as error:
        next(iter(dataset))
    assert error.value.__notes__[0] in ("while reading 0", "while reading 1")


def _buffer(*shape):
    """Returns memory that JAX uses without a copy."""
    raw = np.zeros(4 * int(np.prod(shape)) + 64, np.uint8)
    start = -raw.ctypes.data % 64
    return raw[start : start + 4 * int(np.prod(shape))].view(np.int32).reshape(shape)


class LentByNumber:
    def __init__(self):
        self._buffer = _buffer(16)

    def __len__(self):
        return 8

    def __getitem__(self, number):
        self._buffer[:] = number
        return {"x": self._buffer}


def _lent_examples():
    sequence = LentByNumber()
    return Again(lambda: map(sequence.__getitem__, range(8)))


def _lent_batches(count=4):
    rows = _buffer(2, 16)
    for i in range(count):
        rows[:] = np.arange(2 * i, 2 * i + 2)[:, None]
        yield {"x": rows}


def _lent_by_step():
    rows = _buffer(2, 16)

    def batch(step):
        rows[:] = np.arange(2 * step, 2 * step + 2)[:, None]
        return {"x": rows}

    return batch


LENT = {
    "sequence": (LentByNumber, 2),
    "grain_map": (lambda: grain.MapDataset.source(LentByNumber()), 2),
    "grain_repeated": (lambda: grain.MapDataset.source(LentByNumber()).repeat(), 2),
    "iterable": (_lent_examples, 2),
    "batches": (lambda: Again(_lent_batches), None),
    "function": (_lent_by_step, None),
    "files": (lambda: jdist.data.Files(["a"], lambda _: _lent_examples()), 2),
    "files_by_number": (lambda: jdist.data.Files(["a"], lambda _: LentByNumber()), 2),
    "files_of_batches": (lambda: jdist.data.Files(["a"], lambda _: Again(_lent_batches)), None),
}


@each_row("prefetch", [0, 2])
@each_row("replicas", ["one_device", "mirrored_2"])
@_table(LENT)
def test_reused_buffer_of_the_source_does_not_change_batches(make, batch_size, replicas, prefetch):
    iterator = iter(REPLICAS[replicas].distribute_dataset(make(), batch_size, prefetch=prefetch))
    batches = list(itertools.islice(iterator, 4))
    iterator.close()
    read_numbers = np.stack([np.asarray(batch["x"].tree).reshape(2, 16) for batch in batches])
    np.testing.assert_array_equal(read_numbers, np.broadcast_to(np.arange(8).reshape(4, 2, 1), (4, 2, 16)))


@pytest.mark.parametrize("prefetch", [0, 2])
@pytest.mark.parametrize("replicas", ["one_device", "mirrored_2", "mirrored_3"])
def test_reused_buffer_of_an_input_pipeline_does_not_change_batches(replicas, prefetch):
    strategy = REPLICAS[replicas]
    n = strategy.num_replicas_in_sync
    dataset = strategy.distribute_datasets_from_function(
        lambda _: Again(lambda: _lent_batches(2 * n)), prefetch=prefetch
    )
    read_numbers = np.stack([np.asarray(batch["x"].tree) for batch in list(dataset)])
    np.testing.assert_array_equal(read_numbers, np.broadcast_to(np.arange(4 * n).reshape(2, n, 2, 1), (2, n, 2, 16)))


@pytest.mark.parametrize("prefetch", [0, 2])
def test_writing_to_the_source_array_does_not_change_received_batches(prefetch, one):
    rows = _buffer(4, 16)
    iterator = iter(one.distribute_dataset(rows, 2, prefetch=prefetch))
    first = next(iterator)
    rows[:] = 7
    np.testing.assert_array_equal(first.tree, np.zeros((1, 2, 16)))


POSITIONED = {
    **{name: (make, size, 1 if name in ONCE else 2, name in NUMBERED) for name, (make, size) in KINDS.items()},
    "grain_map_of_shuffled_batches": (BATCHES["grain_map_of_batches"], None, 2, True),
    **{name: (lambda _, make=make: make(), size, 1, False) for name, (make, size) in ENDLESS.items()},
}


CONTINUED = [(name, "mirrored_3") for name in POSITIONED]
CONTINUED += itertools.product(("sequence", "iterable_of_batches"), ("one_device", "mirrored_2", "mirrored_8"))


@each_row("name, goes_on", CONTINUED)
def test_position_resumes_at_every_batch_on_any_number_of_replicas(name, goes_on, two):
    make, batch_size, epochs, shuffle = POSITIONED[name]
    options = dict(shuffle=shuffle, epochs=epochs, remainder="pad", seed=2)

    def iterator(strategy):
        return iter(strategy.distribute_dataset(make(COUNT), batch_size, **options))

    source, states, read_numbers = iterator(two), [], []
    states.append(json.dumps(source.get_state()))
    for element in itertools.islice(source, 6):
        read_numbers += _numbers([element])
        states.append(json.dumps(source.get_state()))
    source.close()
    for taken, state in enumerate(states):
        resumed = iterator(REPLICAS[goes_on])
        resumed.set_state(json.loads(state))
        assert json.dumps(resumed.get_state()) == state
        assert _numbers(itertools.islice(resumed, len(read_numbers) - taken)) == read_numbers[taken:]
        resumed.close()


@pytest.mark.parametrize("batched", [False, True])
def test_position_of_a_grain_source_comes_from_grain_and_nothing_is_read_again(batched, two):
    asked = []

    class Asked(Sequence):
        def __getitem__(self, number):
            asked.append(number)
            return super().__getitem__(number)

    def iterator():
        source = grain.MapDataset.source(Asked(4 * BATCH)).to_iter_dataset(grain.ReadOptions(1, 1))
        return iter(two.distribute_dataset(source.batch(BATCH) if batched else source, None if batched else BATCH))

    first = iterator()
    next(first), next(first)
    state = json.loads(json.dumps(first.get_state()))
    first.close()
    resumed = iterator()
    resumed.set_state(state)
    asked.clear()
    assert _numbers(resumed) == [list(range(2 * BATCH, 3 * BATCH)), list(range(3 * BATCH, 4 * BATCH))]
    assert min(asked) == 2 * BATCH
    assert len(asked) == len(set(asked))


class Stateful:
    """An iterator whose `get_state` returns the dict that it modifies."""

    def __init__(self):
        self._at = {"next": 0}

    def __iter__(self):
        return self

    def __next__(self):
        if self._at["next"] == COUNT:
            raise StopIteration
        self._at["next"] += 1
        return np.int32(self._at["next"] - 1)

    def get_state(self):
        return self._at

    def set_state(self, state):
        self._at = state


class StatefulInBytes(Stateful):
    def get_state(self):
        return bytes([255, self._at["next"]])  # without a text form

    def set_state(self, state):
        self._at = {"next": state[1]}


@pytest.mark.parametrize("prefetch", [0, 1, 2, 5])
@pytest.mark.parametrize("kind", [Stateful, StatefulInBytes])
def test_position_of_a_source_is_the_one_after_the_received_batches(kind, prefetch, one):
    def iterator():
        return iter(one.distribute_dataset(Again(kind), BATCH, prefetch=prefetch, remainder="pad"))

    first = iterator()
    assert _numbers([next(first)]) == [list(range(BATCH))]
    state = json.dumps(first.get_state())
    for _ in range(2):  # resuming does not change it
        resumed = iterator()
        resumed.set_state(json.loads(state))
        assert _numbers(resumed) == _expected(COUNT, "pad")[1:]
    assert json.dumps(first.get_state()) == state


def test_position_may_be_set_twice_from_one_dict(one):
    def iterator():
        return iter(one.distribute_dataset(Again(Stateful), BATCH, remainder="pad"))

    first = iterator()
    next(first)
    state = first.get_state()
    for _ in range(2):
        resumed = iterator()
        resumed.set_state(state)
        assert _numbers(resumed) == _expected(COUNT, "pad")[1:]


@each_row("remainder", ["drop", "error"])
def test_position_of_batches_that_the_replicas_cannot_split_is_refused(remainder):
    def iterator(replicas):
        source = Again(lambda: _cut(18, 6))
        return iter(REPLICAS[replicas].distribute_dataset(source, None, remainder=remainder))

    first = iterator("mirrored_2")
    next(first)
    resumed = iterator("mirrored_8")
    with pytest.raises(ValueError, match=r"batch of 6 examples cannot be split over 8 replicas \(6 left over\)"):
        resumed.set_state(first.get_state())
        next(resumed)


@each_row("wrong", [{"batch": -1}, {"batch": 4}, {"batch": 1.5}, {"batch": "1"}, {"epoch": -1}])
def test_invalid_position_is_refused(wrong, two):
    iterator = iter(two.distribute_dataset(np.arange(12), 4))  # the batches are 0, 1 and 2
    with pytest.raises(ValueError, match="position"):
        iterator.set_state({**iterator.get_state(), **wrong})


def test_position_of_padded_batches_resumes_with_every_example_on_more_replicas():
    def iterator(replicas):
        return iter(REPLICAS[replicas].distribute_dataset(Again(lambda: _cut(20, 5)), None, remainder="pad"))

    def rows(elements):
        return sum((np.asarray(b.tree)[np.asarray(w.tree) > 0].tolist() for b, w in elements), [])

    first = iterator("mirrored_2")
    assert rows([next(first)]) == [0, 1, 2, 3, 4]
    resumed = iterator("mirrored_8")
    resumed.set_state(first.get_state())
    assert rows(resumed) == list(range(5, 20))


def test_function_of_the_step_with_small_batches_is_refused_instead_of_an_infinite_loop(two):
    def batch(step):
        assert step < 100, "this goes on for ever"
        return np.zeros((6, 2), np.float32)

    with pytest.raises(ValueError, match=r"\b6\b.*\b8\b"):
        next(iter(two.distribute_dataset(batch, 8)))


def test_function_of_the_step_with_a_larger_batch_is_refused_with_its_number(two):
    dataset = two.distribute_dataset(lambda step: np.zeros((4 if step < 2 else 6, 2), np.float32), 4)
    with pytest.raises(ValueError, match=r"a batch of 6 rows in batch 2 of epoch 0, expected 4 rows"):
        list(dataset)


@each_row("epochs", [2, 3])
@_table(ENDLESS)
def test_endless_source_for_several_epochs_is_refused_with_the_fix(make, batch_size, epochs, two):
    says = rf"The source is endless, .*got epochs={epochs}\. Pass `epochs=None`, .*`itertools\.islice\(dataset, 1000\)`"
    with pytest.raises(ValueError, match=says):
        two.distribute_dataset(make(), batch_size, epochs=epochs)
    dataset = two.distribute_dataset(make(), batch_size, epochs=None)
    with pytest.raises(ValueError, match=says):
        dataset.repeated(epochs)
    assert len(list(itertools.islice(dataset, 5))) == 5


def test_function_of_the_step_is_called_once_per_step(two):
    steps = []

    def batch(step):
        steps.append(step)
        return np.full((2, 3), step, np.float32)

    iterator = iter(two.distribute_dataset(batch, None, prefetch=0))
    assert [next(iterator).tree[0, 0, 0].item() for _ in range(4)] == [0, 1, 2, 3]
    assert steps == [0, 1, 2, 3]
    state = iterator.get_state()
    steps.clear()
    iterator.set_state(state)
    next(iterator)
    assert steps == [4]


def test_first_batch_of_the_source_determines_the_batch_size(two):
    dataset = two.distribute_dataset(Again(lambda: _cut(10, 4)), None)
    assert [batch.tree.tolist() for batch in dataset] == [[[0, 1], [2, 3]], [[4, 5], [6, 7]]]


def test_first_batch_of_the_source_that_cannot_be_split_is_refused(two):
    with pytest.raises(ValueError, match=r"batch of 5 examples cannot be split over 2 replicas \(1 left over\)"):
        next(iter(two.distribute_dataset(Again(lambda: _cut(10, 5)), None)))


@few
@hypothesis.given(
    count=st.integers(1, 40),
    each=st.integers(1, 5),
    replicas=st.sampled_from(["one_device", "mirrored_2", "mirrored_3"]),
    kind=st.sampled_from(["array", "sequence", "iterable", "batches"]),
    prefetch=st.integers(0, 3),
    taken=st.integers(0, 10),
    goes_on=st.sampled_from(["one_device", "mirrored_2", "mirrored_3"]),
)
def test_padded_epoch_holds_each_example_once_for_any_sizes(count, each, replicas, kind, prefetch, taken, goes_on):
    size = 6 * each if replicas != goes_on else each * REPLICAS[replicas].num_replicas_in_sync

    def iterator(name):
        make, batch_size = {
            "array": (lambda: np.arange(count), size),
            "sequence": (lambda: range(count), size),
            "iterable": (lambda: Again(lambda: iter(range(count))), size),
            "batches": (lambda: Again(lambda: _cut(count, size)), None),
        }[kind]
        strategy = REPLICAS[name]
        return iter(strategy.distribute_dataset(make(), batch_size, remainder="pad", prefetch=prefetch))

    def rows(elements):
        read_numbers = []
        for batch, weights in elements:
            weights = np.asarray(weights.tree).ravel()
            assert set(weights) <= {0.0, 1.0}
            read_numbers += np.asarray(batch.tree).ravel()[weights > 0].tolist()
        return read_numbers

    first = iterator(replicas)
    before = rows(itertools.islice(first, taken))
    state = json.loads(json.dumps(first.get_state()))
    first.close()
    then = iterator(goes_on)
    then.set_state(state)
    assert before + rows(then) == list(range(count))


NO_SOURCE = {
    "number": (5, r"The source is int, which is not supported\. Pass arrays"),
    "object": (object(), r"The source is object, which is not supported"),
    "text": ("train.npy", r"The source is 'train\.npy'\. To read files, pass `jdist\.data\.Files\(paths, read\)`"),
    "list_of_dicts": (
        [{"x": np.zeros(2)}, {"x": np.zeros(2)}],
        r"The source is a list of 2 elements with equal dtypes and shapes, which is ambiguous\. .*`batch_size=None`.*np\.stack",
    ),
    "list_of_lists": (
        [[1, 2], [3, 4]],
        r"source\[0\]\[0\] is 1, but must be an array with one row per example",
    ),
    "list_of_nothing": ([], r"The data source contains no arrays\."),
    "range_of_nothing": (range(0), r"The source is empty: there is nothing to distribute"),
    "sequence_of_nothing": (Sequence(0), r"The source is empty: there is nothing to distribute"),
}


@each_row("source, says", NO_SOURCE.values(), ids=NO_SOURCE)
def test_unsupported_source_is_refused(source, says, two):
    with pytest.raises(ValueError, match=says):
        two.distribute_dataset(source, 2, remainder="pad")


def _generator_of_the_step(step):
    yield np.zeros(2)


NO_FUNCTION = {
    "generator_of_the_step": (
        _generator_of_the_step,
        r"a generator function with the arguments \(step\), .*`functools\.partial`",
    ),
    "two_arguments": (
        lambda a, b: np.zeros(2),
        r"The source is a function with the arguments \(a, b\)\. Pass a function of the",
    ),
    "argument_by_name": (lambda *, a: np.zeros(2), r"The source is a function with the arguments \(\*, a\)\."),
}


@each_row("source, says", NO_FUNCTION.values(), ids=NO_FUNCTION)
def test_function_with_other_arguments_is_refused_with_its_signature(source, says, two):
    with pytest.raises(ValueError, match=says):
        two.distribute_dataset(source, 2)


@each_row("result", [np.zeros(4), (np.zeros(4), np.zeros(4)), {"x": np.zeros(4)}, None, 5, "text"])
def test_function_without_arguments_that_does_not_return_elements_is_refused(result, two):
    with pytest.raises(
        ValueError, match=r"a function without arguments that returned .*\. Such a function must return an iterator"
    ):
        next(iter(two.distribute_dataset(lambda: result, 2)))


def test_generator_function_is_called_for_each_epoch_and_each_loop(two):
    calls = []

    def source():
        calls.append(len(calls))
        yield from np.arange(8, dtype=np.int32)

    dataset = two.distribute_dataset(source, 4, epochs=3, prefetch=0)
    assert calls == []
    for _ in range(2):
        assert [batch.tree.ravel().tolist() for batch in dataset] == [[0, 1, 2, 3], [4, 5, 6, 7]] * 3
    assert calls == list(range(6))


def test_shuffle_of_a_generator_function_is_refused(two):
    with pytest.raises(ValueError, match="The source is a generator function, but shuffle=True needs"):
        two.distribute_dataset(lambda: iter(range(8)), 2, shuffle=True)


# Batches passed with a batch size


def _batches_of_pairs(count=24):
    for _ in range(count):
        yield {"x": np.zeros((8, 3), np.float32), "y": np.zeros(8, np.int32)}


LOOKS_BATCHED = {
    "generator": _batches_of_pairs,
    "iterable": lambda: Again(_batches_of_pairs),
    "generator_function": lambda: _batches_of_pairs,
    "grain_map": lambda: grain.MapDataset.source(list(_batches_of_pairs())),
    "files": lambda: jdist.data.Files(["a"], lambda path: _batches_of_pairs()),
}


@pytest.mark.parametrize("prefetch", [0, 2])
@pytest.mark.parametrize("make", LOOKS_BATCHED.values(), ids=LOOKS_BATCHED)
def test_elements_with_batch_size_rows_warn_once_at_the_line_of_the_loop(make, prefetch, two):
    dataset = two.distribute_dataset(make(), 8, prefetch=prefetch)
    says = r"Each element of the source has 8 rows \(.*\), and batch_size=8: .*8 x 8 rows\. .*pass `batch_size=None`"
    with pytest.warns(jdist.BatchedElementsWarning, match=says) as warned:
        assert len([batch for batch in dataset]) == 3
    assert [warning.filename for warning in warned] == [__file__]


def test_elements_with_batch_size_rows_that_do_not_fill_a_batch_are_refused_with_the_fix(two):
    with pytest.raises(ValueError, match=r"3 examples do not fill one batch of 8, .*pass `batch_size=None`"):
        list(two.distribute_dataset(_batches_of_pairs(3), 8))


NOT_BATCHED = {
    "batches_that_are_taken_as_such": (lambda: _batches_of_pairs(), None),
    "labels_without_rows": (lambda: ({"x": np.zeros((8, 3), np.float32), "y": 0} for _ in range(8)), 8),
    "other_rows": (lambda: _batches_of_pairs(), 4),
    "square_array": (lambda: np.zeros((8, 8), np.float32), 8),
    "function_of_the_step": (lambda: lambda step: np.zeros((8, 8), np.float32), 8),
}


@pytest.mark.parametrize("make, batch_size", NOT_BATCHED.values(), ids=NOT_BATCHED)
def test_elements_with_other_numbers_of_rows_do_not_warn(make, batch_size, two):
    next(iter(two.distribute_dataset(make(), batch_size)))


# Functions of an input context


def _context_batches(context):
    for i in range(0, 12, 2):
        yield np.arange(i, i + 2, dtype=np.int32)


FROM_CONTEXT = {
    "generator": _context_batches,
    "generator_function": lambda context: lambda: _context_batches(context),
    "list": lambda context: list(_context_batches(context)),
    "iterator": lambda context: iter(list(_context_batches(context))),
}


@pytest.mark.parametrize("make", FROM_CONTEXT.values(), ids=FROM_CONTEXT)
def test_function_of_the_context_is_read_again_for_each_epoch_and_each_loop(make, two):
    dataset = two.distribute_datasets_from_function(make, epochs=3)
    epoch = [[[0, 1], [2, 3]], [[4, 5], [6, 7]], [[8, 9], [10, 11]]]
    assert [batch.tree.tolist() for batch in dataset] == epoch * 3
    assert [batch.tree.tolist() for batch in dataset] == epoch * 3


@pytest.mark.parametrize("make", FROM_CONTEXT.values(), ids=FROM_CONTEXT)
def test_position_of_a_function_of_the_context_is_resumed_in_a_later_epoch(make, two):
    iterator = iter(two.distribute_datasets_from_function(make, epochs=3))
    before = [next(iterator).tree.tolist() for _ in range(4)]
    resumed = iter(two.distribute_datasets_from_function(make, epochs=3))
    resumed.set_state(json.loads(json.dumps(iterator.get_state())))
    after = [batch.tree.tolist() for batch in resumed]
    assert before[:3] == after[2:] and before[3:] + after[:2] == before[:3]


NO_BATCHES = {
    "array": (np.zeros((4, 2)), r"The function returned float64\[4,2\] instead of the batches"),
    "tuple": ((np.zeros(4), np.zeros(4)), r"The function returned tuple instead of the batches"),
    "nothing": (None, r"The function returned NoneType instead"),
    "number": (5, r"The function returned 5 instead"),
    "text": ("train.npy", r"The function returned str instead"),
    "files": (jdist.data.Files(["a"], np.load), r"The function returned Files instead"),
    "examples": (
        [np.float32(1), np.float32(2)],
        r"source is float32\[\].*Return batches of one replica: stack `context\.",
    ),
    "examples_by_number": (range(8), r"one row per example\. Return batches of one replica"),
    "too_few": ([np.zeros(4)], r"4 examples do not fill one batch of 8, .*Let the function return smaller batches, or"),
    "no_batches": ([], r"The source is empty"),
}


@each_row("result, says", NO_BATCHES.values(), ids=NO_BATCHES)
def test_function_of_the_context_that_does_not_return_batches_is_refused_with_advice(result, says, two):
    with pytest.raises(ValueError, match=says) as refused:
        list(two.distribute_datasets_from_function(lambda context: result))
    assert not any(name in str(refused.value) for name in ("`batch_size", "auto_shard", "shuffle"))


@each_row(
    "fn, got",
    [([np.zeros(2)], "list"), (lambda: [np.zeros(2)], "a function with other arguments")],
    ids=["list", "no_arguments"],
)
def test_pipeline_that_is_not_a_function_of_a_context_is_refused(fn, got, two):
    says = rf"`fn` must be a function of one argument, an `InputContext`.*got {got}\. Write `lambda context: batches`"
    with pytest.raises(TypeError, match=says):
        two.distribute_datasets_from_function(fn)


def test_warning_for_dropped_examples_names_the_method(two, caplog):
    list(two.distribute_datasets_from_function(lambda context: [np.zeros(2, np.float32)] * 3))
    assert caplog.messages == [
        "distribute_datasets_from_function dropped 2 examples of the first epoch, which do not fill a batch of 4. "
        'Pass remainder="pad" to keep them.'
    ]


def test_archive_of_arrays_is_refused_with_its_type(tmp_path, two):
    np.savez(tmp_path / "all.npz", x=np.zeros(8), y=np.ones(8))
    with np.load(tmp_path / "all.npz") as archive, pytest.raises(ValueError, match="The source is .*NpzFile"):
        next(iter(two.distribute_dataset(archive, 2)))


@each_row("begun", [False, True])
def test_distributed_dataset_as_a_source_is_refused(begun, two):
    dataset = two.distribute_dataset(np.arange(12), 4)
    with pytest.raises(ValueError, match="The source is .*Distributed(Dataset|Iterator)"):
        next(iter(two.distribute_dataset(iter(dataset) if begun else dataset, 2)))


def _pairs(*sizes):
    return [(np.full((size, 2), number, np.float32), np.full(size, number)) for number, size in enumerate(sizes)]


@every_strategy
@pytest.mark.parametrize("remainder", ["drop", "pad"])
def test_list_of_batches_is_read_as_batches(remainder, strategy):
    for batches in (_pairs(BATCH, BATCH, 12), [{"x": x, "y": [y]} for x, y in _pairs(BATCH, BATCH, 12)]):
        elements = list(strategy.distribute_dataset(batches, None, remainder=remainder))
        read_numbers = [element[0] if remainder == "pad" else element for element in elements]
        assert len(read_numbers) == (3 if remainder == "pad" else 2)
        assert jax.tree.structure(arrays(read_numbers[0])) == jax.tree.structure(batches[0])
        for number, batch in enumerate(read_numbers):
            assert all((np.asarray(leaf) == number).all() for leaf in jax.tree.leaves(arrays(batch)))
        weights = sum(np.asarray(element[1].tree).sum() for element in elements) if remainder == "pad" else 2 * BATCH
        assert weights == (2 * BATCH + 12 if remainder == "pad" else 2 * BATCH)


def test_list_of_batches_is_shuffled_by_batch_and_resumed(two):
    options = dict(batch_size=None, shuffle=True, seed=1, epochs=2)
    numbers = lambda dataset: [int(np.ravel(y.tree)[0]) for _, y in dataset]
    shuffled = numbers(two.distribute_dataset(_pairs(*[4] * 9), **options))
    assert sorted(shuffled[:9]) == sorted(shuffled[9:]) == list(range(9))
    assert shuffled[:9] != shuffled[9:]
    iterator = iter(two.distribute_dataset(_pairs(*[4] * 9), **options))
    next(iterator)
    resumed = iter(two.distribute_dataset(_pairs(*[4] * 9), **options))
    resumed.set_state(json.loads(json.dumps(iterator.get_state())))
    assert numbers(resumed) == shuffled[1:]


LISTS = {
    "batches": (lambda: _pairs(4, 4), r"ambiguous\. If each element is a batch, pass `batch_size=None`"),
    "batches_with_a_partial_one": (
        lambda: _pairs(4, 2),
        r"source\[0\]\[0\] has 4 rows but source\[1\]\[0\] has 2\. .*If each element of the list is a batch, pass `batch_size",
    ),
}


@each_row("make, says", LISTS.values(), ids=LISTS)
def test_list_of_batches_with_a_batch_size_is_refused_with_the_fix(make, says, two):
    with pytest.raises(ValueError, match=says):
        two.distribute_dataset(make(), 4)


def test_list_of_arrays_without_batch_size_is_refused_with_the_fix(two):
    batches = [np.zeros((4, 2)), np.zeros((4, 2))]
    with pytest.raises(ValueError, match=r"list of batches, pass `lambda: iter\(batches\)`"):
        two.distribute_dataset(batches, None)
    assert len(list(two.distribute_dataset(lambda: iter(batches), None))) == 2


def test_list_of_distributed_batches_is_refused(two):
    batches = list(two.distribute_dataset((np.arange(8), np.arange(8)), 4))
    with pytest.raises(ValueError, match="distributed over the devices of a strategy already"):
        two.distribute_dataset(batches, None)


def test_arrays_without_batch_size_are_refused(two):
    with pytest.raises(
        ValueError, match=r"The source consists of arrays, which are split into batches\. .*`batch_size=64`"
    ):
        two.distribute_dataset(np.zeros(8), None)


EMPTY = {
    "generator": (lambda: _examples(0), 2),
    "iterable": (lambda: Again(lambda: []), 2),
    "batches": (lambda: Again(lambda: []), None),
    "batches_of_nothing": (lambda: Again(lambda: [np.zeros((0, 2))]), None),
    "grain_iter": (lambda: _map(4).filter(lambda _: False).to_iter_dataset(), 2),
}


@each_row("remainder", ["drop", "pad", "error"])
@each_row("make, batch_size", EMPTY.values(), ids=EMPTY)
def test_empty_stream_is_refused(make, batch_size, remainder, two):
    with pytest.raises(ValueError, match=r"The source is empty: there is nothing to distribute\."):
        next(iter(two.distribute_dataset(make(), batch_size, remainder=remainder)))


def test_stream_smaller_than_a_batch_is_refused_with_drop(two):
    with pytest.raises(ValueError, match=r"3 examples do not fill one batch of 4, .*smaller `batch_size`"):
        list(two.distribute_dataset(_examples(3), 4))


@pytest.mark.slow
@pytest.mark.parametrize("forgotten", [False, True])
def test_process_exits_cleanly_while_iterators_read(forgotten):
    program = f"""
        import numpy as np
        import jdist

        strategy = jdist.MirroredStrategy(["cpu:0", "cpu:1"])
        rows = np.zeros((2, 8_000_000), np.float32)
        iterators = [iter(strategy.distribute_dataset(lambda step: rows, None)) for _ in range(4)]
        for iterator in iterators:
            next(iterator)
        if {forgotten}:
            del iterator, iterators
    """
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "2"}
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True, env=environment
    )
    assert (done.returncode, done.stderr) == (0, "")


# Elements that are one tree per replica


def _graphs(count, nodes=5):
    for i in range(count):
        yield {
            "nodes": np.full((nodes, 2), i, np.float32),
            "edges": np.arange(8, dtype=np.int32),
            "size": np.int32(i),
            "none": None,
        }


@pytest.mark.parametrize("remainder", ["drop", "pad"])
def test_elements_of_any_shape_are_one_per_replica(remainder, strategy):
    n = strategy.num_replicas_in_sync
    dataset = strategy.distribute_datasets_from_function(
        lambda context: _graphs(2 * n + 1), remainder=remainder, batched=False, epochs=2
    )
    sizes, total = [], 0
    step = strategy.step(
        lambda state, graph: (state + jdist.all_reduce("sum", graph["nodes"].mean() + graph["size"]), None)
    )
    state = strategy.put(np.float32(0))
    for element in dataset:
        graph, weights = element if remainder == "pad" else (element, None)
        assert (graph["nodes"].tree.shape, graph["edges"].tree.shape) == ((n, 5, 2), (n, 8))
        chosen = np.asarray(graph["size"].tree)
        assert chosen.shape == (n,)
        if weights is not None:
            assert weights.tree.shape == (n,)
            chosen = chosen[np.asarray(weights.tree) > 0]
        sizes += chosen.tolist()
        total += 2 * np.asarray(graph["size"].tree).sum()
        state, _ = step(state, graph)
    assert sizes == list(range(2 * n + (remainder == "pad" or n == 1))) * 2
    assert float(state) == total
    spec = lambda tree: [(x.shape, x.dtype) for x in jax.tree.leaves(tree)]
    assert spec(dataset.element_spec) == spec(element)


def test_elements_of_any_shape_resume_and_keep_their_structure(two):
    dataset = two.distribute_datasets_from_function(lambda context: _graphs(8), batched=False, epochs=2)
    iterator = iter(dataset)
    for taken in range(8):
        resumed = iter(dataset)
        resumed.set_state(json.loads(json.dumps(iterator.get_state())))
        sizes = [graph["size"].tree.tolist() for graph in resumed]
        assert sizes == ([[0, 1], [2, 3], [4, 5], [6, 7]] * 2)[taken:]
        next(iterator)


WRONG_ELEMENTS = {
    "shape": (
        lambda c: [*_graphs(1), *_graphs(1, nodes=6)],
        ValueError,
        r"source\['nodes'\] as float32\[6,2\] .*expected float32\[5,2\]",
    ),
    "text": (lambda c: [{"nodes": "a"}] * 2, ValueError, r"source\['nodes'\] is <U1\[\].*does not support"),
}


@each_row("make, error, says", WRONG_ELEMENTS.values(), ids=WRONG_ELEMENTS)
def test_elements_that_replicas_cannot_hold_are_refused(make, error, says, two):
    with pytest.raises(error, match=says):
        next(iter(two.distribute_datasets_from_function(make, batched=False)))


def test_batched_that_is_not_a_flag_is_refused(two):
    with pytest.raises(TypeError, match="`batched` must be True or False, got 4"):
        two.distribute_datasets_from_function(lambda context: _graphs(8), batched=4)
