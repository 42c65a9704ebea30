"""Every kind of source yields its examples exactly once, in order, from any position."""

import functools
import io
import itertools
import json

import grain
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jdist

from laws import STRATEGIES, assert_resumes_at_every_batch, each_row, example_numbers, resumed

REPLICAS = {name: make() for name, make in STRATEGIES.items()}
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
    "list_of_batches": lambda count: [{"x": x, "y": [x]} for x in _cut(count)],
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


def _expected(count, remainder):
    whole = [list(range(i, min(i + BATCH, count))) for i in range(0, count, BATCH)]
    return whole if remainder == "pad" else [batch for batch in whole if len(batch) == BATCH]


REMAINDERS = [("drop", COUNT), ("pad", COUNT), ("error", 48)]


@each_row("remainder, count", REMAINDERS)
@_table({name: kind for name, kind in KINDS.items() if name not in ONCE})
def test_source_yields_its_examples_once_per_epoch_and_in_order_in_every_loop(make, batch_size, remainder, count, two):
    dataset = two.distribute_dataset(make(count), batch_size, epochs=2, remainder=remainder)
    epoch = _expected(count, remainder)
    next(iter(dataset))
    assert example_numbers(dataset) == example_numbers(dataset) == epoch * 2
    endless = iter(dataset.repeated(None))
    assert example_numbers(itertools.islice(endless, 8)) == (epoch * 4)[:8]
    endless.close()


@each_row("remainder, count", REMAINDERS)
@_table({name: KINDS[name] for name in ONCE})
def test_source_that_can_be_read_once_is_refused_in_a_second_loop_or_epoch(make, batch_size, remainder, count, two):
    dataset = two.distribute_dataset(make(count), batch_size, remainder=remainder)
    assert example_numbers(dataset) == _expected(count, remainder)
    says = r"The source is a \w+, which can be read only once"
    with pytest.raises(ValueError, match=rf"{says}, and has been read\."):
        next(iter(dataset))
    for epochs in (2, None):
        with pytest.raises(ValueError, match=rf"{says}, but epochs={epochs}\. .*`__iter__`"):
            two.distribute_dataset(make(count), batch_size, epochs=epochs)


@each_row("strategy", REPLICAS.values(), ids=REPLICAS)
@each_row("remainder, count", REMAINDERS)
def test_examples_are_in_order_on_any_number_of_replicas(remainder, count, strategy):
    for source, batch_size in ((Sequence(count), BATCH), (Again(lambda: _cut(count)), None)):
        dataset = strategy.distribute_dataset(source, batch_size, remainder=remainder)
        assert example_numbers(dataset) == _expected(count, remainder)


@_table(ENDLESS)
def test_endless_source_continues(make, batch_size, two):
    dataset = two.distribute_dataset(make(), batch_size)
    iterator = iter(dataset)
    assert example_numbers(itertools.islice(iterator, 5)) == [list(range(BATCH))] * 5
    iterator.close()
    with pytest.raises(TypeError, match="The source is endless"):
        len(dataset)


@_table(KINDS)
def test_source_with_error_refuses_a_partial_batch(make, batch_size, two):
    says = r"60 examples in batches of 24 leave 12 over|There are only 12 of 24 examples in batch 2 of epoch 0"
    with pytest.raises(ValueError, match=rf"({says}).*remainder=\"error\" allows only full batches"):
        list(two.distribute_dataset(make(COUNT), batch_size, remainder="error"))


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
    assert example_numbers(dataset) == _expected(BATCH + 6, remainder)


@each_row("make", NUMBERED.values(), ids=NUMBERED)
@each_row("remainder", ["drop", "pad"])
def test_shuffled_order_is_the_same_for_all_indexed_sources(remainder, make, two):
    options = dict(shuffle=True, seed=3, epochs=2, remainder=remainder)
    read_numbers = example_numbers(two.distribute_dataset(make(COUNT), BATCH, **options))
    assert read_numbers == example_numbers(two.distribute_dataset(np.arange(COUNT), BATCH, **options))
    assert read_numbers[: len(read_numbers) // 2] != read_numbers[len(read_numbers) // 2 :]
    if remainder == "pad":
        assert sorted(sum(read_numbers, [])) == sorted([*range(COUNT)] * 2)


SHUFFLED_BATCHES = ("list_of_batches", "grain_map_of_batches")
UNSHUFFLED = {
    **{name: kind for name, kind in KINDS.items() if name not in {*NUMBERED, *SHUFFLED_BATCHES, "files"}},
    **{name: (lambda _, make=make: make(), batch_size) for name, (make, batch_size) in ENDLESS.items()},
}


@_table({name: KINDS[name] for name in SHUFFLED_BATCHES})
def test_shuffle_of_indexed_batches_permutes_the_batches(make, batch_size, two):
    read_numbers = example_numbers(two.distribute_dataset(make(10 * BATCH), batch_size, shuffle=True, epochs=2))
    whole = [list(range(i, i + BATCH)) for i in range(0, 10 * BATCH, BATCH)]
    assert sorted(read_numbers[:10]) == sorted(read_numbers[10:]) == whole
    assert len({str(whole), str(read_numbers[:10]), str(read_numbers[10:])}) == 3


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
    **{f"shuffled_{name}": (*KINDS[name], 2, True) for name in SHUFFLED_BATCHES},
    **{name: (lambda _, make=make: make(), size, 1, False) for name, (make, size) in ENDLESS.items()},
}


CONTINUED = [(name, "mirrored_3") for name in POSITIONED]
CONTINUED += itertools.product(("sequence", "iterable_of_batches"), ("one_device", "mirrored_2", "mirrored_8"))


@each_row("name, goes_on", CONTINUED)
def test_position_resumes_at_every_batch_on_any_number_of_replicas(name, goes_on, two):
    make, batch_size, epochs, shuffle = POSITIONED[name]
    options = dict(shuffle=shuffle, epochs=epochs, remainder="pad", seed=2)
    dataset = lambda strategy: strategy.distribute_dataset(make(COUNT), batch_size, **options)
    assert assert_resumes_at_every_batch(dataset, two, [REPLICAS[goes_on]], limit=6)


@pytest.mark.parametrize("batched", [False, True])
def test_position_of_a_grain_source_comes_from_grain_and_nothing_is_read_again(batched, two):
    asked = []

    class Asked(Sequence):
        def __getitem__(self, number):
            asked.append(number)
            return super().__getitem__(number)

    source = grain.MapDataset.source(Asked(4 * BATCH)).to_iter_dataset(grain.ReadOptions(1, 1))
    dataset = two.distribute_dataset(source.batch(BATCH) if batched else source, None if batched else BATCH)
    first = iter(dataset)
    next(first), next(first)
    state = first.get_state()
    first.close()
    asked.clear()
    assert example_numbers(resumed(dataset, state)) == [
        list(range(2 * BATCH, 3 * BATCH)),
        list(range(3 * BATCH, 4 * BATCH)),
    ]
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


@each_row("prefetch", [0, 1, 2, 5])
@each_row("kind", [Stateful, StatefulInBytes])
def test_position_of_a_source_is_the_one_after_the_received_batches(kind, prefetch, one):
    dataset = one.distribute_dataset(Again(kind), BATCH, prefetch=prefetch, remainder="pad")
    first = iter(dataset)
    assert example_numbers([next(first)]) == [list(range(BATCH))]
    state = first.get_state()
    text = json.dumps(state)
    for position in (state, state, json.loads(text)):  # resuming does not change it
        later = iter(dataset)
        later.set_state(position)
        assert example_numbers(later) == _expected(COUNT, "pad")[1:]
    assert json.dumps(state) == json.dumps(first.get_state()) == text


@each_row("remainder", ["drop", "error"])
def test_position_of_batches_that_the_replicas_cannot_split_is_refused(remainder):
    source = Again(lambda: _cut(18, 6))
    two, eight = (
        REPLICAS[name].distribute_dataset(source, None, remainder=remainder) for name in ("mirrored_2", "mirrored_8")
    )
    first = iter(two)
    next(first)
    with pytest.raises(ValueError, match=r"batch of 6 examples cannot be split over 8 replicas \(6 left over\)"):
        next(resumed(eight, first.get_state()))


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


def _batches_of_pairs(count=24):
    for _ in range(count):
        yield {"x": np.zeros((8, 3), np.float32), "y": np.zeros(8, np.int32)}


def _pairs(*sizes):
    return [(np.full((size, 2), number, np.float32), np.full(size, number)) for number, size in enumerate(sizes)]


def _generator_of_the_step(step):
    yield np.zeros(2)


EQUAL = [np.zeros((4, 2)), np.zeros((4, 2))]
# The source, the batch size, and the error of `distribute_dataset`.
REFUSED = {
    "number": (5, 2, r"The source is int, which is not supported\. Pass arrays"),
    "object": (object(), 2, r"The source is object, which is not supported"),
    "text": ("train.npy", 2, r"The source is 'train\.npy'\. To read files, pass `jdist\.data\.Files\(paths, read\)`"),
    "list_of_dicts": (
        [{"x": np.zeros(2)}, {"x": np.zeros(2)}],
        2,
        r"The source is a list of 2 elements with equal dtypes and shapes, which is ambiguous\. .*`batch_size=None`.*np\.stack",
    ),
    "list_of_lists": ([[1, 2], [3, 4]], 2, r"source\[0\]\[0\] is 1, but must be an array with one row per example"),
    "list_of_nothing": ([], 2, r"The data source contains no arrays\."),
    "range_of_nothing": (range(0), 2, r"The source is empty: there is nothing to distribute"),
    "sequence_of_nothing": (Sequence(0), 2, r"The source is empty: there is nothing to distribute"),
    "generator_of_the_step": (
        _generator_of_the_step,
        2,
        r"a generator function with the arguments \(step\), .*`functools\.partial`",
    ),
    "two_arguments": (
        lambda a, b: np.zeros(2),
        2,
        r"The source is a function with the arguments \(a, b\)\. Pass a function of the",
    ),
    "argument_by_name": (lambda *, a: np.zeros(2), 2, r"The source is a function with the arguments \(\*, a\)\."),
    "batches_and_a_size": (_pairs(4, 4), 4, r"ambiguous\. If each element is a batch, pass `batch_size=None`"),
    "partial_batch_and_a_size": (
        _pairs(4, 2),
        4,
        r"source\[0\]\[0\] has 4 rows but source\[1\]\[0\] has 2\. .*If each element of the list is a batch, pass `batch_size",
    ),
    "list_of_arrays_without_a_size": (EQUAL, None, r"list of batches, pass `lambda: iter\(batches\)`"),
    "array_without_a_size": (
        np.zeros(8),
        None,
        r"The source consists of arrays, which are split into batches\. .*`batch_size=64`",
    ),
}


@each_row("source, batch_size, says", REFUSED.values(), ids=REFUSED)
def test_unsupported_source_is_refused(source, batch_size, says, two):
    with pytest.raises(ValueError, match=says):
        two.distribute_dataset(source, batch_size, remainder="pad")


def _archive():
    file = io.BytesIO()
    np.savez(file, x=np.zeros(8), y=np.ones(8))
    file.seek(0)
    return np.load(file)


NOT_ELEMENTS = [np.zeros(4), (np.zeros(4), np.zeros(4)), {"x": np.zeros(4)}, None, 5, "text"]
EMPTY = {
    "generator": (lambda: _examples(0), 2),
    "iterable": (lambda: Again(lambda: []), 2),
    "batches": (lambda: Again(lambda: []), None),
    "batches_of_nothing": (lambda: Again(lambda: [np.zeros((0, 2))]), None),
    "grain_iter": (lambda: _map(4).filter(lambda _: False).to_iter_dataset(), 2),
}
# The source, options, and the error when batches are read.
UNREADABLE = {
    **{
        f"result_{i}": (
            lambda result=result: lambda: result,
            dict(batch_size=2),
            r"a function without arguments that returned .*\. Such a function must return an iterator",
        )
        for i, result in enumerate(NOT_ELEMENTS)
    },
    **{
        f"empty_{name}_{remainder}": (
            make,
            dict(batch_size=batch_size, remainder=remainder),
            r"The source is empty: there is nothing to distribute\.",
        )
        for (name, (make, batch_size)), remainder in itertools.product(EMPTY.items(), ("drop", "pad", "error"))
    },
    "archive": (_archive, dict(batch_size=2), "The source is .*NpzFile"),
    "less_than_a_batch": (
        lambda: _examples(3),
        dict(batch_size=4),
        r"3 examples do not fill one batch of 4, .*smaller `batch_size`",
    ),
    "first_batch_that_cannot_be_split": (
        lambda: Again(lambda: _cut(10, 5)),
        dict(batch_size=None),
        r"batch of 5 examples cannot be split over 2 replicas \(1 left over\)",
    ),
    "function_of_small_batches": (  # instead of an infinite loop
        lambda: lambda step: np.zeros((6, 2), np.float32),
        dict(batch_size=8),
        r"\b6\b.*\b8\b",
    ),
    "function_of_a_larger_batch": (
        lambda: lambda step: np.zeros((4 if step < 2 else 6, 2), np.float32),
        dict(batch_size=4),
        r"a batch of 6 rows in batch 2 of epoch 0, expected 4 rows",
    ),
    "batches_as_examples": (
        lambda: _batches_of_pairs(3),
        dict(batch_size=8),
        r"3 examples do not fill one batch of 8, .*pass `batch_size=None`",
    ),
}


@each_row("make, options, says", UNREADABLE.values(), ids=UNREADABLE)
def test_source_without_batches_is_refused(make, options, says, two):
    with pytest.raises(ValueError, match=says):
        list(two.distribute_dataset(make(), **options))


def test_distributed_data_are_refused_as_a_source(two):
    dataset = two.distribute_dataset((np.arange(12), np.arange(12)), 4)
    for source in (dataset, iter(dataset)):
        with pytest.raises(ValueError, match="The source is .*Distributed(Dataset|Iterator)"):
            next(iter(two.distribute_dataset(source, 2)))
    with pytest.raises(ValueError, match="distributed over the devices of a strategy already"):
        two.distribute_dataset(list(dataset), None)


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


# Batches passed with a batch size

LOOKS_BATCHED = {
    "generator": _batches_of_pairs,
    "iterable": lambda: Again(_batches_of_pairs),
    "generator_function": lambda: _batches_of_pairs,
    "grain_map": lambda: grain.MapDataset.source(list(_batches_of_pairs())),
    "files": lambda: jdist.data.Files(["a"], lambda path: _batches_of_pairs()),
}


@each_row("prefetch", [0, 2])
@each_row("make", LOOKS_BATCHED.values(), ids=LOOKS_BATCHED)
def test_elements_with_batch_size_rows_warn_once_at_the_line_of_the_loop(make, prefetch, two):
    dataset = two.distribute_dataset(make(), 8, prefetch=prefetch)
    says = r"Each element of the source has 8 rows \(.*\), and batch_size=8: .*8 x 8 rows\. .*pass `batch_size=None`"
    with pytest.warns(jdist.BatchedElementsWarning, match=says) as warned:
        assert len([batch for batch in dataset]) == 3
    assert [warning.filename for warning in warned] == [__file__]


NOT_BATCHED = {
    "batches_that_are_taken_as_such": (lambda: _batches_of_pairs(), None),
    "labels_without_rows": (lambda: ({"x": np.zeros((8, 3), np.float32), "y": 0} for _ in range(8)), 8),
    "other_rows": (lambda: _batches_of_pairs(), 4),
    "square_array": (lambda: np.zeros((8, 8), np.float32), 8),
    "function_of_the_step": (lambda: lambda step: np.zeros((8, 8), np.float32), 8),
}


@_table(NOT_BATCHED)
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


@each_row("make", FROM_CONTEXT.values(), ids=FROM_CONTEXT)
def test_function_of_the_context_is_read_again_for_each_epoch_and_each_loop_and_resumed(make, two):
    dataset = two.distribute_datasets_from_function(make, epochs=3)
    epoch = [[[0, 1], [2, 3]], [[4, 5], [6, 7]], [[8, 9], [10, 11]]]
    for _ in range(2):
        assert [batch.tree.tolist() for batch in dataset] == epoch * 3
    assert assert_resumes_at_every_batch(lambda _: dataset, two, [two], limit=5)


# What the function returns, options, and the error.
NO_BATCHES = {
    "array": (np.zeros((4, 2)), {}, r"The function returned float64\[4,2\] instead of the batches"),
    "tuple": ((np.zeros(4), np.zeros(4)), {}, r"The function returned tuple instead of the batches"),
    "nothing": (None, {}, r"The function returned NoneType instead"),
    "number": (5, {}, r"The function returned 5 instead"),
    "text": ("train.npy", {}, r"The function returned str instead"),
    "files": (jdist.data.Files(["a"], np.load), {}, r"The function returned Files instead"),
    "examples": (
        [np.float32(1), np.float32(2)],
        {},
        r"source is float32\[\].*Return batches of one replica: stack `context\.",
    ),
    "examples_by_number": (range(8), {}, r"one row per example\. Return batches of one replica"),
    "too_few": (
        [np.zeros(4)],
        {},
        r"4 examples do not fill one batch of 8, .*Let the function return smaller batches, or",
    ),
    "no_batches": ([], {}, r"The source is empty"),
    "elements_of_other_shapes": (
        [{"x": np.zeros((5, 2), np.float32)}, {"x": np.zeros((6, 2), np.float32)}],
        dict(batched=False),
        r"source\['x'\] as float32\[6,2\] .*expected float32\[5,2\]",
    ),
    "elements_of_text": ([{"x": "a"}] * 2, dict(batched=False), r"source\['x'\] is <U1\[\].*does not support"),
}


@each_row("result, options, says", NO_BATCHES.values(), ids=NO_BATCHES)
def test_function_of_the_context_that_does_not_return_batches_is_refused_with_advice(result, options, says, two):
    with pytest.raises(ValueError, match=says) as refused:
        list(two.distribute_datasets_from_function(lambda context: result, **options))
    assert not any(name in str(refused.value) for name in ("`batch_size", "auto_shard", "shuffle"))


NO_FUNCTION = r"`fn` must be a function of one argument, an `InputContext`.*got {}\. Write `lambda context: batches`"
WRONG_ARGUMENTS = {
    "list": ([np.zeros(2)], {}, NO_FUNCTION.format("list")),
    "no_arguments": (lambda: [np.zeros(2)], {}, NO_FUNCTION.format("a function with other arguments")),
    "batched": (_context_batches, dict(batched=4), "`batched` must be True or False, got 4"),
}


@each_row("fn, options, says", WRONG_ARGUMENTS.values(), ids=WRONG_ARGUMENTS)
def test_wrong_argument_of_an_input_pipeline_is_refused(fn, options, says, two):
    with pytest.raises(TypeError, match=says):
        two.distribute_datasets_from_function(fn, **options)


def test_warning_for_dropped_examples_names_the_method(two, caplog):
    list(two.distribute_datasets_from_function(lambda context: [np.zeros(2, np.float32)] * 3))
    assert caplog.messages == [
        "distribute_datasets_from_function dropped 2 examples of the first epoch, which do not fill a batch of 4. "
        'Pass remainder="pad" to keep them.'
    ]


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
        sizes = [graph["size"].tree.tolist() for graph in resumed(dataset, iterator.get_state())]
        assert sizes == ([[0, 1], [2, 3], [4, 5], [6, 7]] * 2)[taken:]
        next(iterator)
