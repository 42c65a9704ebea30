"""Examples in files: the order of reading, resuming, and errors with the path."""

import itertools
import pathlib
import traceback

import grain
import numpy as np
import pytest
from array_record.python.array_record_module import ArrayRecordWriter

import jdist
from jdist.data import Files

from laws import STRATEGIES, Numbered, assert_resumes_at_every_batch, each_row, example_numbers

REPLICAS = {name: STRATEGIES[name]() for name in ("one_device", "mirrored_2", "mirrored_3")}
COUNTS = [5, 0, 7, 1, 300, 12]  # examples per file: none, fewer than a batch, more than a chunk
EDGES = np.cumsum([0, *COUNTS]).tolist()
BATCH = 30
ALL = list(range(sum(COUNTS)))


def _save_npy(path, numbers):
    np.save(path, np.array(numbers, np.int32))


def _save_text(path, numbers):
    path.write_text("".join(f"{number}\n" for number in numbers))


def _save_records(path, numbers):
    writer = ArrayRecordWriter(str(path), "group_size:1")
    for number in numbers:
        writer.write(int(number).to_bytes(4, "little"))
    writer.close()


def _read_text(path):
    with open(path) as lines:
        for line in lines:
            yield np.int32(line)


class Lines:
    """An iterable over a text file, from the beginning each time."""

    def __init__(self, path):
        self._path = path

    def __iter__(self):
        return _read_text(self._path)


def _decoded(record):
    return np.frombuffer(record, "<i4")[0]


def _records(path):
    return grain.MapDataset.source(grain.sources.ArrayRecordDataSource(str(path))).map(_decoded)


READERS = {
    "npy": (_save_npy, np.load),
    "npy_mapped": (_save_npy, lambda path: np.load(path, mmap_mode="r")),
    "text": (_save_text, _read_text),
    "text_again": (_save_text, Lines),
    "list_of_text": (_save_text, lambda path: Numbered(list(_read_text(path)))),
    "records": (_save_records, _records),
    "records_as_stream": (_save_records, lambda path: _records(path).to_iter_dataset()),
}
BY_NUMBER = {name: READERS[name] for name in ("npy", "npy_mapped", "list_of_text", "records")}
every_reader_by_number = pytest.mark.parametrize("save, read", BY_NUMBER.values(), ids=BY_NUMBER)


def _files(folder, save, read, counts=COUNTS):
    """Returns files that together contain 0, 1, 2, ... in order."""
    paths, start = [], 0
    for i, count in enumerate(counts):
        path = folder / f"part-{i}"
        path = path.with_suffix(".npy") if save is _save_npy else path
        save(path, range(start, start + count))
        paths.append(path)
        start += count
    return Files(paths, read)


POSITIONED = {
    **{name: (*reader, False) for name, reader in READERS.items()},
    **{f"{name}_shuffled": (*reader, True) for name, reader in BY_NUMBER.items()},
}


@pytest.mark.parametrize("save, read, shuffle", POSITIONED.values(), ids=POSITIONED)
def test_files_yield_their_examples_once_per_epoch_and_resume_within_files_at_every_batch(
    save, read, shuffle, two, tmp_path
):
    options = dict(batch_size=6, shuffle=shuffle, epochs=2)
    counts = [5, 0, 7, 1, 12]
    files = _files(tmp_path, save, read, counts)
    padding = lambda strategy: strategy.distribute_dataset(files, remainder="pad", **options)
    read_numbers = assert_resumes_at_every_batch(padding, two, REPLICAS.values())
    cut = [list(range(i, min(i + 6, 25))) for i in range(0, 25, 6)]
    assert shuffle or read_numbers == cut * 2
    assert sorted(sum(read_numbers[:5], [])) == sorted(sum(read_numbers[5:], [])) == list(range(25))
    if not shuffle:
        dropping = two.distribute_dataset(_files(tmp_path, save, read), BATCH, epochs=2)
        assert sum(example_numbers(dropping), []) == ALL[: len(ALL) // BATCH * BATCH] * 2


def _file_of(number):
    return next(i for i, edge in enumerate(EDGES[1:]) if number < edge)


@every_reader_by_number
def test_shuffled_files_are_read_completely_in_another_order_each_epoch(save, read, two, tmp_path):
    files = _files(tmp_path, save, read)
    batches = example_numbers(two.distribute_dataset(files, BATCH, shuffle=True, epochs=2, remainder="pad"))
    first, second = sum(batches[: len(batches) // 2], []), sum(batches[len(batches) // 2 :], [])
    assert sorted(first) == sorted(second) == ALL
    assert first != second
    orders = []
    for epoch in (first, second):
        runs = [list(run) for _, run in itertools.groupby(epoch, _file_of)]
        assert len(runs) == 5  # examples of a file stay together
        assert all(run != sorted(run) for run in runs if len(run) > 5)
        orders.append([_file_of(run[0]) for run in runs])
    assert orders[0] != orders[1]
    assert orders[0] != sorted(orders[0]) or orders[1] != sorted(orders[1])


def test_order_of_shuffled_files_depends_on_the_seed_and_not_on_the_replicas(tmp_path):
    files = _files(tmp_path, _save_npy, np.load)

    def order(name, seed):
        dataset = REPLICAS[name].distribute_dataset(files, BATCH, shuffle=True, seed=seed, remainder="pad")
        return str(example_numbers(dataset))

    assert len({order(name, 1) for name in REPLICAS}) == 1
    assert len({order("one_device", seed) for seed in range(5)}) == 5


def test_shuffled_files_of_equal_length_have_different_orders(two, tmp_path):
    files = _files(tmp_path, _save_npy, np.load, [20] * 4)
    (read_numbers,) = example_numbers(two.distribute_dataset(files, 80, shuffle=True))
    within = {tuple(number % 20 for number in read_numbers[i : i + 20]) for i in range(0, 80, 20)}
    assert len(within) == 4


def test_each_file_is_opened_once_per_epoch_and_when_it_is_needed(one, tmp_path):
    opened = []

    def read(path):
        opened.append(path.name)
        return np.load(path)

    iterator = iter(one.distribute_dataset(_files(tmp_path, _save_npy, read), BATCH, epochs=2, prefetch=0))
    next(iterator)
    assert opened == [f"part-{i}.npy" for i in range(5)]  # and not the last one
    example_numbers(iterator)
    assert opened == [f"part-{i}.npy" for i in range(6)] * 2


def test_files_are_closed_when_the_loop_ends_early(one, tmp_path):
    closed = []

    def read(path):
        try:
            yield from _read_text(path)
        finally:
            closed.append(path.name)

    iterator = iter(one.distribute_dataset(_files(tmp_path, _save_text, read), BATCH))
    next(iterator)
    iterator.close()
    assert closed == [f"part-{i}" for i in range(5)]


@pytest.mark.parametrize("remainder", ["drop", "pad"])
def test_files_of_batches_are_concatenated(remainder, two, tmp_path):
    def read(path):
        rows = np.load(path)
        return (rows[i : i + 4] for i in range(0, len(rows), 4))

    files = _files(tmp_path, _save_npy, read, [8, 0, 4, 6])
    dataset = two.distribute_dataset(files, None, epochs=2, remainder=remainder)
    whole = [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11], [12, 13, 14, 15], [16, 17]]
    assert example_numbers(dataset) == (whole if remainder == "pad" else whole[:-1]) * 2


def test_indexed_batches_in_files_are_shuffled_as_batches(two, tmp_path):
    files = _files(tmp_path, _save_records, lambda path: _records(path).batch(4), [24, 24])
    read_numbers = example_numbers(two.distribute_dataset(files, None, shuffle=True, seed=1))
    assert read_numbers != sorted(read_numbers)
    assert sorted(read_numbers) == [list(range(i, i + 4)) for i in range(0, 48, 4)]


def test_trees_in_files_have_their_structure(two, tmp_path):
    def read(path):
        rows = np.load(path)
        return {"x": rows, "pair": (np.stack([rows, -rows], axis=1), [None])}

    (batch,) = two.distribute_dataset(_files(tmp_path, _save_npy, read, [3, 1]), 4)
    np.testing.assert_array_equal(batch["x"].tree, [[0, 1], [2, 3]])
    np.testing.assert_array_equal(batch["pair"][0].tree, [[[0, 0], [1, -1]], [[2, -2], [3, -3]]])
    assert batch["pair"][1] == [None]


# Errors.


class Broken(Exception):
    pass


def _breaks_at_once(path):
    if path.name == "part-2":
        raise Broken("no header")
    return _read_text(path)


def _breaks_later(path):
    for number in _read_text(path):
        if number == 9:
            raise Broken("bad line")
        yield number


class _BreaksByNumber:
    def __init__(self, path):
        self._numbers = list(_read_text(path))

    def __len__(self):
        return len(self._numbers)

    def __getitem__(self, number):
        if self._numbers[number] == 9:
            raise Broken("bad row")
        return self._numbers[number]


BROKEN = {
    "_breaks_at_once": (_breaks_at_once, "no header", 2),
    "_breaks_later": (_breaks_later, "bad line", 4),
    "_BreaksByNumber": (_BreaksByNumber, "bad row", 2),
}


@pytest.mark.parametrize("prefetch", [0, 2])
@pytest.mark.parametrize("read, says, whole", BROKEN.values(), ids=BROKEN)
def test_error_of_the_reader_has_its_traceback_and_the_path(read, says, whole, prefetch, two, tmp_path):
    files = _files(tmp_path, _save_text, read)
    received = []
    with pytest.raises(Broken, match=f"^{says}") as error:
        received.extend(example_numbers([batch])[0] for batch in two.distribute_dataset(files, 2, prefetch=prefetch))
    assert received == [[2 * i, 2 * i + 1] for i in range(whole)]  # the batches before it
    assert error.value.__notes__ == [f"while reading {tmp_path / 'part-2'}"]
    functions = [frame.name for frame in traceback.extract_tb(error.value.__traceback__)]
    assert functions[-1] in (read.__name__, "__getitem__")
    assert pathlib.Path(traceback.extract_tb(error.value.__traceback__)[-1].filename).name == "test_files.py"


def test_missing_file_is_named(two, tmp_path):
    files = Files([tmp_path / "no.npy"], np.load)
    with pytest.raises(FileNotFoundError, match=r"no\.npy") as error:
        next(iter(two.distribute_dataset(files, 2)))
    assert error.value.__notes__ == [f"while reading {tmp_path / 'no.npy'}"]


def _batches_of_the_step(path):
    return lambda step: np.zeros((2, 3), np.float32)


# What reads the file, the batch size, and the error, which names the file.
NO_EXAMPLES = {
    "nothing": (lambda path: None, 2, r"The data source contains no arrays"),
    "number": (lambda path: 5, 2, r"The source is int, which is not supported"),
    "text": (lambda path: "1 2 3", 2, r"The source is '1 2 3'"),
    "lengths": (lambda path: (np.zeros(3), np.zeros(4)), 2, r"source\[0\] has 3 rows but source\[1\] has 4"),
    "words": (lambda path: np.array(["a", "b"]), 2, r"source is <U1\[2\], a dtype that JAX does not support"),
    "objects": (
        lambda path: np.array([[1], [1, 2]], object),
        2,
        r"source is object\[2\]: its rows have different lengths",
    ),
    "too_large": (lambda path: np.array([2**40]), 2, r"source holds 1099511627776, which is out of the range of int32"),
    "no_size": (lambda path: np.zeros(4), None, r"Pass the number of examples per batch: `batch_size=64`"),
    "batches": (_batches_of_the_step, 2, r"`read` returns batches, not examples\. .*`batch_size=None`"),
}


@each_row("auto_shard", ["data", "file"])
@each_row("read, batch_size, says", NO_EXAMPLES.values(), ids=NO_EXAMPLES)
def test_file_without_examples_is_refused_with_the_path(read, batch_size, says, auto_shard, two):
    with pytest.raises(ValueError, match=says) as error:
        next(iter(two.distribute_dataset(Files(["here"], read), batch_size, auto_shard=auto_shard)))
    assert error.value.__notes__ == ["while reading here"]


DIFFERENT = {
    4: r"source\['x'\] as float64\[4\] per row, expected float64\[3\] in batch 2 of epoch 0",
    6: r"source\['x'\] has the shape \[4\] in example 2 in batch 1 of epoch 0, but \[3\] in the first",
}


@each_row("batch_size, says", DIFFERENT.items())
def test_files_that_differ_are_refused_with_leaf_and_batch(batch_size, says, two):
    files = Files([3, 3, 4], lambda size: {"x": np.zeros((4, size))})
    with pytest.raises(ValueError, match=says):
        list(two.distribute_dataset(files, batch_size))


NO_LIST = r"`paths` must be a list of paths, got "
REFUSED = {
    "no_paths": ([], np.load, ValueError, r"`paths` is empty\. Pass at least one path"),
    "no_paths_in_an_iterator": (iter([]), np.load, ValueError, r"`paths` is empty\. Pass at least one path"),
    "text": ("a.npy", np.load, TypeError, NO_LIST + r".*a\.npy.*\. Write `\['a\.npy'\]`"),
    "path": (pathlib.Path("a.npy"), np.load, TypeError, NO_LIST + r".*a\.npy.*\. Write `\['a\.npy'\]`"),
    "number": (5, np.load, TypeError, NO_LIST),
    "none": (None, np.load, TypeError, NO_LIST),
    "bytes": (b"a.npy", np.load, TypeError, NO_LIST),
    **{
        f"reader_{read}": (
            ["a"],
            read,
            TypeError,
            r"`read` must be a function from a path to the examples of that file, got ",
        )
        for read in (None, "npy", 5)
    },
}


@each_row("paths, read, error, says", REFUSED.values(), ids=REFUSED)
def test_invalid_files_are_refused(paths, read, error, says):
    with pytest.raises(error, match=says):
        Files(paths, read)


def test_empty_files_are_refused(two, tmp_path):
    for remainder in ("drop", "pad", "error"):
        dataset = two.distribute_dataset(_files(tmp_path, _save_npy, np.load, [0, 0]), 2, remainder=remainder)
        with pytest.raises(ValueError, match=r"The source is empty: there is nothing to distribute\."):
            next(iter(dataset))


def test_paths_may_be_any_iterable_and_are_stored_as_a_tuple(tmp_path, two):
    _save_npy(tmp_path / "0.npy", range(4))
    files = Files(tmp_path.glob("*.npy"), np.load)
    assert files.paths == (tmp_path / "0.npy",)
    for _ in range(2):
        assert example_numbers(two.distribute_dataset(files, 4)) == [[0, 1, 2, 3]]


def test_single_process_reads_all_files_under_every_policy(two, tmp_path):
    files = _files(tmp_path, _save_npy, np.load, [4, 4])
    for policy in ("auto", "FILE", "data", "off", jdist.data.AutoShardPolicy.FILE):
        assert example_numbers(two.distribute_dataset(files, 4, auto_shard=policy)) == [[0, 1, 2, 3], [4, 5, 6, 7]]
