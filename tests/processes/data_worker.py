"""Reads data on one process of several: its batches, its positions and the errors.

Tasks: `write` writes all batches, and positions between them; `resume:COUNT` writes the batches after the positions that COUNT
processes wrote; `refusals`, `wrong_on_one` and `function_fails` return errors. Tests import this file too, for the results of a
single process.
"""

import functools
import itertools
import json
import logging
import pathlib
import pickle
import threading

import jax
import numpy as np

import jdist

DEVICES = 4  # the total of all processes
BATCH, EXAMPLES, ENOUGH = 8, 21, 10  # ENOUGH batches of an infinite source


class Elements:
    """An iterable that calls `make` for each iterator."""

    def __init__(self, make):
        self._make = make

    def __iter__(self):
        return iter(self._make())


class Sequence:
    """Indexed examples, from a function."""

    def __init__(self, count, make):
        self._count, self._make = count, make

    def __len__(self):
        return self._count

    def __getitem__(self, number):
        return self._make(number)


@functools.cache
def example(i):
    return {"number": np.int32(i), "image": np.random.default_rng(i).normal(size=(2, 3)).astype(np.float32)}


def stack(numbers):
    return jax.tree.map(lambda *x: np.stack(x), *map(example, numbers))


def _mapped(count=EXAMPLES):
    import grain

    return grain.MapDataset.range(count).shuffle(seed=7).map(example)


def _batched():
    return (stack(range(i, min(i + BATCH, EXAMPLES))) for i in range(0, EXAMPLES, BATCH))


def _random_map():
    import grain

    return grain.MapDataset.range(EXAMPLES).shuffle(seed=1).map(example).repeat(2)


PATHS = ["0", "1", "2", "3"]
FILES = jdist.data.Files(
    PATHS, lambda path: Elements(lambda: map(example, range(100 * int(path), 101 * int(path) + 4)))
)
FILES_OF_ARRAYS = jdist.data.Files(PATHS, lambda path: stack(range(100 * int(path), 102 * int(path) + 3)))

# Name -> source, batch size, options. Files that are sharded over the processes are read in one part per process, so only the
# batches after a position are equal on any number of processes.
SOURCES = {
    "arrays": lambda: (stack(range(EXAMPLES)), BATCH, dict(shuffle=True, seed=5, epochs=2)),
    "range": lambda: (range(EXAMPLES), BATCH, dict(shuffle=True, seed=6, epochs=2)),
    "fewer_than_replicas": lambda: (range(3), 4, dict(shuffle=True, epochs=3)),
    "iterable": lambda: (Elements(lambda: map(example, range(EXAMPLES))), BATCH, dict(epochs=2)),
    "iterable_of_batches": lambda: (Elements(_batched), None, dict(epochs=2)),
    "generator": lambda: ((example(i) for i in range(EXAMPLES)), BATCH, {}),
    "map_dataset": lambda: (_mapped(), BATCH, dict(epochs=2)),
    "map_dataset_of_batches": lambda: (_mapped(16).batch(BATCH), None, dict(epochs=2)),
    "infinite_map_dataset": lambda: (_mapped().repeat(), BATCH, {}),
    "iter_dataset": lambda: (_mapped().to_iter_dataset(), BATCH, dict(epochs=2)),
    "iter_dataset_of_batches": lambda: (_random_map().to_iter_dataset().batch(BATCH), None, {}),
    "function": lambda: (lambda step: stack(range(BATCH * step, BATCH * step + BATCH)), None, {}),
    "files_read_by_all": lambda: (FILES, BATCH, dict(auto_shard="data", epochs=2)),
    "files_shuffled_read_by_all": lambda: (
        FILES_OF_ARRAYS,
        BATCH,
        dict(auto_shard="data", shuffle=True, seed=3, epochs=2),
    ),
}
SHARDED = {
    "files": lambda: (FILES, BATCH, dict(auto_shard="file", epochs=2)),
    "files_shuffled": lambda: (FILES_OF_ARRAYS, BATCH, dict(auto_shard="file", shuffle=True, seed=3, epochs=2)),
}
ALL = SOURCES | SHARDED
HOW = {  # number of processes -> (remainder, prefetch); fewer for four processes, which are slow
    1: [("drop", 0), ("pad", 2)],
    2: [("drop", 0), ("drop", 2), ("pad", 0), ("pad", 2)],
    4: [("drop", 2), ("pad", 0)],
}
WITHOUT_BATCHES = {("fewer_than_replicas", "drop")}  # fewer examples than a batch
SKIPPED_ON_FOUR = WITHOUT_BATCHES | {
    (name, "drop")
    for name in (
        "iterable_of_batches",
        "map_dataset_of_batches",
        "iter_dataset_of_batches",
        "function",
        "files_read_by_all",
    )
}
POSITIONS = {  # the number of batches before each position; for other names 2 and all
    "fewer_than_replicas": (1,),
    "infinite_map_dataset": (3,),
    "function": (3,),
    "arrays": (0, 2, 3, 5, 6),
    "files": (0, 1, 2, 3, 4, 5, 6),
    "files_shuffled": (1, 2, 3, 5),
}


def dataset(strategy, name, remainder, prefetch):
    source, size, options = ALL[name]()
    return strategy.distribute_dataset(source, size, remainder=remainder, prefetch=prefetch, **options)


def cases(count):
    """Returns the cases (name, remainder, prefetch) of `count` processes."""
    return [
        (name, *how)
        for name in ALL
        for how in HOW[count]
        if (name, how[0]) not in (SKIPPED_ON_FOUR if count == 4 else WITHOUT_BATCHES)
    ]


def local(element):
    """Returns the part of an element on this process, with leaves `[local replica, example, ...]`."""
    return jax.tree.map(
        lambda x: np.stack([np.asarray(part.data)[0] for part in x.addressable_shards]), _plain(element)
    )


def _plain(element):
    return jax.tree.map(lambda value: value.tree, element, is_leaf=lambda node: isinstance(node, jdist.PerReplica))


def take(iterator, most=ENOUGH, states=()):
    """Returns the next batches. Appends the positions before and after each batch to `states`, if it is a list."""
    batches = []
    while len(batches) < most:
        if isinstance(states, list):
            states.append(iterator.get_state())
        element = next(iterator, None)
        if element is None:
            break
        batches.append(local(element))
    iterator.close()
    return batches


def write(strategy, folder, count, number):
    """Writes all batches of each case, and positions between them."""
    batches, states = {}, {}
    for case in cases(count):
        positions = []
        batches[case] = take(iter(dataset(strategy, *case)), states=positions)
        if case[1:] in HOW[4 if count == 2 else count]:
            numbers = POSITIONS.get(case[0], (2, len(batches[case])))
            states |= {
                f"{case[0]}/{case[1]}/{number}": positions[number] for number in numbers if number < len(positions)
            }
    (folder / f"states_{count}_{number}.json").write_text(json.dumps(states))
    (folder / f"batches_{count}_{number}.pickle").write_bytes(pickle.dumps(batches))


def resume(strategy, folder, reader, writer):
    """Writes the batches after each position that `writer` processes wrote."""
    batches = {}
    for key, state in json.loads((folder / f"states_{writer}_0.json").read_text()).items():
        name, remainder, number = key.split("/")
        iterator = iter(dataset(strategy, name, remainder, prefetch=2))
        iterator.set_state(state)
        batches[name, remainder, int(number)] = take(iterator, ENOUGH - int(number))
    (folder / f"resumed_{writer}_{reader}.pickle").write_bytes(pickle.dumps(batches))


def attempt(data, most=100):
    """Returns the examples of this process, one list per batch, and the error of creating or reading the data set."""
    examples, text = [], "none"
    try:
        data = data()
        for element in data:
            rows, weights = local(element) if isinstance(element, tuple) else (local(element), None)
            leaf = jax.tree.leaves(rows)[0]
            examples.append(leaf[slice(None) if weights is None else weights > 0].ravel().tolist())
            if len(examples) == most:
                break
    except (ValueError, RuntimeError, OSError) as error:
        text = f"{type(error).__name__}: {error} {getattr(error, '__notes__', '')}"
    return {"examples": examples, "error": text}


def _numbers(count, fail_at=None, failing=True):
    for i in range(count):
        if failing and i == fail_at:
            raise OSError("the disk failed")
        yield np.int32(i)


def _fail(failing):
    if failing:
        raise OSError("the disk failed")


def _failing_sources(failing):
    """Returns sources of 24 numbers that fail on this process if `failing`, with the batch size and options of the data set."""
    epochs = iter((False, failing))
    second_epoch = lambda: _numbers(24, 9, next(epochs))
    read = lambda path: Elements(lambda: _numbers(12, 9, failing))
    return {
        "iterable": (Elements(lambda: _numbers(24, 9, failing)), 8, {}),
        "first_element": (Elements(lambda: _numbers(24, 0, failing)), 8, {}),
        "start": (Elements(lambda: _fail(failing) or _numbers(24)), 8, {}),
        "second_epoch": (Elements(second_epoch), 8, dict(epochs=2)),
        "sequence": (Sequence(24, lambda i: _fail(failing and i in (9, 13)) or np.int32(i)), 8, {}),
        "function": (lambda step: _fail(failing and step == 1) or np.arange(step * 8, step * 8 + 8), None, {}),
        "batches": (Elements(lambda: _batches(_numbers(24, 9, failing))), None, {}),
        "files": (jdist.data.Files(["a", "b"], read), 8, dict(auto_shard="file")),
        "off": (Elements(lambda: _numbers(12, 5, failing)), 8, dict(auto_shard="off")),
        "off_padded": (Elements(lambda: _numbers(12, 5, failing)), 8, dict(auto_shard="off", remainder="pad")),
        "text": (Elements(lambda: ("x" if failing and i in (9, 13) else np.int32(i) for i in range(24))), 8, {}),
        "shape": (Elements(lambda: (np.zeros(1 + (failing and i > 7)) for i in range(24))), 8, {}),
    }


def _batches(numbers):
    while batch := list(itertools.islice(numbers, 8)):
        yield np.stack(batch)


LENGTHS = [(8, 8), (6, 11), (1, 9), (20, 3), (4, 5)]
DIFFERENT_BATCHES = {
    "dtype": lambda number: np.zeros(8, [np.int32, np.float32][number]),
    "shape": lambda number: np.zeros((8, 1 + number), np.int32),
    "structure": lambda number: {"ab"[number]: np.arange(8)},
    "rank": lambda number: np.zeros([8] + [1] * number, np.int32),
}
OPTIONS = {
    "batch_size": lambda number: dict(batch_size=[4, 8][number]),
    "shuffle": lambda number: dict(shuffle=bool(number)),
    "seed": lambda number: dict(seed=number),
    "epochs": lambda number: dict(epochs=[None, 3][number]),
    "remainder": lambda number: dict(remainder=["drop", "pad"][number]),
    "auto_shard": lambda number: dict(auto_shard=["data", "off"][number]),
    "length": lambda number: dict(source=np.arange(16 + 4 * number)),
    "length_of_a_range": lambda number: dict(source=range(16 + 4 * number)),
    "dtype": lambda number: dict(source=np.zeros(16, [np.int32, np.float32][number])),
    "kind_of_source": lambda number: dict(source=[range(16), Elements(lambda: _numbers(16))][number]),
    "files": lambda number: dict(source=jdist.data.Files([["a", "b"], ["a", "c"]][number], lambda path: np.arange(8))),
}

_random = lambda i: {"number": np.int32(i), "random": np.random.default_rng().random(dtype=np.float32)}
# By process: sources that are parts of the data, or are shuffled without a common seed.
DIVIDED = {
    "stride": lambda number: (np.arange(16)[number::2], 4),
    "halves": lambda number: (np.arange(16)[8 * number : 8 * number + 8], 4),
    "unequal_parts": lambda number: (np.arange(15)[number::2], 4),
    "permutation": lambda number: (np.random.default_rng(number).permutation(16), 4),
    "sequence": lambda number: (Sequence(8, lambda i: _random(2 * i + number)), 4),
    "map_dataset": lambda number: (_mapped()[number::2], 4),
    "sampler": lambda number: (_WithSampler(number), 4),
    "stream": lambda number: (Elements(lambda: map(_random, range(number, 16, 2))), 4),
    "stream_in_random_order": lambda number: (
        Elements(lambda: map(np.int32, np.random.default_rng().permutation(16))),
        4,
    ),
    "stream_of_equal_labels": lambda number: (
        Elements(lambda: ((np.int32(i), np.int32(i % 4)) for i in range(8 * number, 8 * number + 8))),
        4,
    ),
    "generator": lambda number: (map(np.int32, range(number, 16, 2)), 4),
    "batches": lambda number: (Elements(lambda: (np.arange(4) + 4 * i for i in range(number, 4, 2))), None),
    "function": lambda number: (lambda step: np.arange(4) + 4 * step + number, None),
}
AUGMENTED = {
    "sequence": lambda: (Sequence(16, _random), 4),
    "only_random": lambda: (Sequence(16, lambda i: _random(i)["random"]), 4),
    "stream": lambda: (Elements(lambda: map(_random, range(16))), 4),
}


class _WithSampler:
    """A loader with a sampler that names its shard, like torch's `DistributedSampler`."""

    def __init__(self, number):
        self.sampler = self
        self.num_replicas, self.rank = 2, number

    def __iter__(self):
        return map(np.int32, range(self.rank, 16, 2))


FAILING = [(0, 2), (1, 2), (1, 0)]  # the process that fails, and `prefetch`


def refusals(strategy, number):
    """Returns the errors when one of two processes fails, and the results of the data sets after them."""
    results = {}
    make = strategy.distribute_dataset
    later = lambda: attempt(lambda: make(Elements(lambda: _numbers(16)), 8, remainder="pad"))
    for failing, prefetch in FAILING:
        for name, (source, size, options) in _failing_sources(number == failing).items():
            key = f"fails/{name}/{failing}/{prefetch}"
            results[key] = attempt(lambda: make(source, size, prefetch=prefetch, **options))  # noqa: B023
        batches_of = lambda context: Elements(lambda: _batches(_numbers(24, 9, number == failing)))  # noqa: B023
        results[f"fails/from_function/{failing}/{prefetch}"] = attempt(
            lambda: strategy.distribute_datasets_from_function(batches_of, prefetch=prefetch)  # noqa: B023
        )
        results[f"later/{failing}/{prefetch}"] = later()
    for lengths in [(16, 24), (17, 18), (24, 16)]:
        for remainder in ("drop", "pad"):
            source = Elements(lambda: _numbers(lengths[number]))  # noqa: B023
            results[f"lengths/{lengths}/{remainder}"] = attempt(lambda: make(source, 8, remainder=remainder))  # noqa: B023
    for name, make_batch in DIFFERENT_BATCHES.items():
        rows = lambda: (jax.tree.map(lambda x, i=i: x[i], make_batch(number)) for i in range(8))  # noqa: B023
        for how, source in {"arrays": make_batch(number), "stream": Elements(rows)}.items():
            results[f"different/{name}/{how}/off"] = attempt(lambda: make(source, 8, auto_shard="off"))  # noqa: B023
        results[f"different/{name}/stream/data"] = attempt(lambda: make(Elements(rows), 8))  # noqa: B023
    for name, options in OPTIONS.items():
        arguments = {"source": np.arange(16), "batch_size": 4, **options(number)}
        results[f"options/{name}"] = attempt(lambda: make(**arguments))  # noqa: B023
    for name, make_source in DIVIDED.items():
        results[f"divided/{name}"] = attempt(lambda: make(*make_source(number)))  # noqa: B023
    for name, make_source in AUGMENTED.items():
        results[f"augmented/{name}"] = attempt(lambda: make(*make_source()))  # noqa: B023
    for lengths in LENGTHS:
        for remainder in ("drop", "pad", "error"):
            length = lengths[number]
            for how, source in {"arrays": np.arange(length), "stream": Elements(lambda: _numbers(length))}.items():  # noqa: B023
                results[f"off/{lengths}/{remainder}/{how}"] = attempt(
                    lambda: make(source, 8, auto_shard="off", remainder=remainder)  # noqa: B023
                )
    infinite = Elements(lambda: map(np.int32, itertools.count()) if number == 0 else _numbers(10))
    results["off_infinite"] = attempt(lambda: make(infinite, 8, auto_shard="off"))
    empty = Elements(lambda: _numbers([8, 0][number]))
    for remainder in ("drop", "pad"):
        results[f"empty/{remainder}"] = attempt(lambda: make(empty, 8, auto_shard="off", remainder=remainder))  # noqa: B023
    results["empty_batches"] = attempt(
        lambda: strategy.distribute_datasets_from_function(lambda context: Elements(lambda: _batches(iter(empty))))
    )
    results["different_prefetch"] = attempt(lambda: make(Elements(lambda: _numbers(16)), 8, prefetch=[0, 2][number]))
    results["later"] = later()
    results |= _any_size(strategy, number)
    results["widths"] = _widths(strategy, number)
    results |= _stops(strategy, number)
    results["trained"] = _trained(strategy)
    results["keys"] = _keys_after_loops(strategy)
    results["different_positions"] = attempt(lambda: _at_position(make(Elements(lambda: _numbers(32)), 8), number))
    return results


ANY_SIZE = 7  # not a multiple of the replicas


def _any_size(strategy, number):
    """Returns padded batches of `ANY_SIZE` examples under each policy; process i reads the numbers from 100 i on if it has its own."""
    make = functools.partial(strategy.distribute_dataset, remainder="pad")
    files = jdist.data.Files(["0", "1"], lambda path: np.arange(13) + 100 * int(path))
    own = np.arange(11) + 100 * number
    batches = Elements(lambda: (own[i : i + 5] for i in range(0, 11, 5)))
    return {
        "any_size/data": attempt(lambda: make(np.arange(23), ANY_SIZE)),
        "any_size/stream": attempt(lambda: make(Elements(lambda: _numbers(23)), ANY_SIZE)),
        "any_size/file": attempt(lambda: make(files, ANY_SIZE, auto_shard="file")),
        "any_size/off": attempt(lambda: make(own, ANY_SIZE, auto_shard="off")),
        "any_size/off_batches": attempt(lambda: make(batches, None, auto_shard="off")),
        "any_size/too_small": attempt(lambda: make(own, 1, auto_shard="off")),
    }


WIDTHS = [(3, 2), (7, 3), (2, 5), (4, 1)]  # of the batches of both processes


def _widths(strategy, number):
    """Returns the shapes of batches whose width differs between the processes."""
    batches = Elements(lambda: (np.zeros((4, widths[number]), np.int32) for widths in WIDTHS))
    buckets = jdist.data.Buckets((4, 8))
    data = strategy.distribute_dataset(batches, None, auto_shard="off", buckets=buckets)
    return [list(batch.tree.shape) for batch in data]


def _at_position(data, batch):
    iterator = iter(data)
    iterator.set_state({**iterator.get_state(), "batch": batch})
    return iterator


def _stops(strategy, number):
    """Returns the results of iterators that all processes stop early, and of one that is closed while it waits."""
    results = {}
    for prefetch in (0, 2):
        data = strategy.distribute_dataset(Elements(lambda: _numbers(40)), 8, prefetch=prefetch)
        iterator = iter(data)
        results[f"closed/{prefetch}"] = attempt(lambda: iterator, most=2)  # noqa: B023
        iterator.close()
        results[f"closed/{prefetch}/again"] = attempt(lambda: data)  # noqa: B023
        results[f"left/{prefetch}"] = [attempt(lambda: data, most=2) for _ in range(3)]  # noqa: B023
        results[f"left/{prefetch}/again"] = attempt(lambda: data)  # noqa: B023
    resumed = threading.Event()
    waits = lambda: (number and i == 8 and resumed.wait(20) and None or np.int32(i) for i in range(40))
    iterator = iter(strategy.distribute_dataset(Elements(waits), 8))
    first = local(next(iterator)).ravel().tolist()
    if number:
        resumed.set()
    iterator.close()
    results["closed_while_waiting"] = [first, attempt(lambda: strategy.distribute_dataset(Elements(waits), 8))]
    return results


def _trained(strategy):
    """Returns the results of steps with collectives while batches are prefetched, and of other data sets between the steps."""
    step = strategy.step(lambda total, batch: (total + jdist.all_reduce("sum", batch.sum()), None))
    total, checked = strategy.put(np.int32(0)), 0
    batches = iter(strategy.distribute_dataset(Elements(lambda: _numbers(400)), 8))
    for number, batch in enumerate(batches):
        total, _ = step(total, batch)
        if number % 10 == 0:
            for held_out, weights in strategy.distribute_dataset(Elements(lambda: _numbers(9)), 8, remainder="pad"):
                checked += int(strategy.reduce("sum", weights, axis=0))
                total, _ = step(total, held_out.map(lambda x: 0 * x))
    stats = jdist.data.stats(batches)
    return [int(total), checked, stats.batches, stats.examples]


def _keys_after_loops(strategy):
    """Returns the number of keys in the key-value store after one loop over ten batches, and after five more."""
    from jdist._src.core.jax_compat import key_value_store

    data, counts = strategy.distribute_dataset(Elements(lambda: _numbers(80)), 8), []
    for loops in (1, 5):
        for _ in range(loops):
            for _ in data:
                pass
        strategy.put(1)  # a barrier
        counts.append(len(key_value_store().key_value_dir_get_bytes("jdist/input")))
        strategy.put(1)
    return counts


WRONG_ON_ONE = {
    "batch_size": lambda number: dict(batch_size=[8, 6][number]),
    "no_whole_batch": lambda number: dict(source=np.arange([16, 7][number])),
    "rows_left_over": lambda number: dict(source=np.arange([16, 17][number]), remainder="error"),
    "no_examples": lambda number: dict(source=np.arange([16, 0][number]), auto_shard="off"),
    "no_source": lambda number: dict(source=[np.arange(16), object()][number]),
    "leaf_too_short": lambda number: dict(source=(np.arange(16), np.arange([16, 15][number]))),
    "too_few_files": lambda number: dict(
        source=jdist.data.Files(["a", "b"][: 2 - number], lambda path: np.arange(16)), auto_shard="file"
    ),
    "option": lambda number: dict(remainder=["drop", "dorp"][number]),
}


def wrong_on_one(strategy, number):
    """Returns the errors of data sets that are invalid on one process only, and the results of the next data sets."""
    results = {}
    for name, options in WRONG_ON_ONE.items():
        arguments = {"source": np.arange(16), "batch_size": 8, **options(number)}
        results[name] = attempt(lambda: strategy.distribute_dataset(**arguments))  # noqa: B023
        results[f"{name}/later"] = attempt(lambda: strategy.distribute_dataset(np.arange(16), 8))
    return results


def function_fails(strategy, number):
    """Returns the error when the function of a data set fails on one process, and the result of the next data set."""

    def batches(context):
        _fail(number == 1)
        return Elements(lambda: _batches(_numbers(16)))

    later = Elements(lambda: _numbers(16))
    return {
        "function": attempt(lambda: strategy.distribute_datasets_from_function(batches)),
        "later": attempt(lambda: strategy.distribute_dataset(later, 8)),
    }


def run_tasks(folder, *tasks):
    """Returns the results of the tasks that return one."""
    count, number, folder = jax.process_count(), jax.process_index(), pathlib.Path(folder)
    strategy = jdist.MultiWorkerMirroredStrategy()
    results = {}
    log = logging.getLogger("jdist")
    level = log.level
    log.setLevel(logging.ERROR)  # not the log of dropped examples
    try:
        for task in tasks:
            if task == "write":
                write(strategy, folder, count, number)
            elif task.startswith("resume:"):
                resume(strategy, folder, f"{count}_{number}", task.removeprefix("resume:"))
            else:
                results[task] = RESULTS[task](strategy, number)
    finally:
        log.setLevel(level)
    return results


RESULTS = {"refusals": refusals, "wrong_on_one": wrong_on_one, "function_fails": function_fails}
