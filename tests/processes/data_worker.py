"""One process of several that read data together; writes which rows it got, its positions and what was refused.

python data_worker.py COORDINATOR COUNT NUMBER FOLDER TASK...

Tasks: `write`, all batches and positions among them; `resume:COUNT`, what follows the positions that COUNT processes wrote;
`refusals`, `wrong_on_one` and `function_fails`, what happens if something goes wrong. Tests import this file too, to be the
one process that they compare with.
"""

import functools
import itertools
import json
import logging
import pathlib
import pickle
import sys
import threading

import jax
import numpy as np

import jdist

DEVICES = 4  # of all processes together
BATCH, EXAMPLES, ENOUGH = 8, 21, 10  # ENOUGH batches of what has no end


class Elements:
    """What `make` gives, as often as it is asked for."""

    def __init__(self, make):
        self._make = make

    def __iter__(self):
        return iter(self._make())


class Sequence:
    """Examples that have numbers, made by a function."""

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

# Name -> source, batch size, options. Files that are shared out are read in as many parts as there are processes, so only
# what follows a position has to be the same on any number of them.
SOURCES = {
    "arrays": lambda: (stack(range(EXAMPLES)), BATCH, dict(shuffle=True, seed=5, epochs=2)),
    "range": lambda: (range(EXAMPLES), BATCH, dict(shuffle=True, seed=6, epochs=2)),
    "fewer_than_replicas": lambda: (range(3), 4, dict(shuffle=True, epochs=3)),
    "iterable": lambda: (Elements(lambda: map(example, range(EXAMPLES))), BATCH, dict(epochs=2)),
    "iterable_of_batches": lambda: (Elements(_batched), None, dict(epochs=2)),
    "generator": lambda: ((example(i) for i in range(EXAMPLES)), BATCH, {}),
    "map_dataset": lambda: (_mapped(), BATCH, dict(epochs=2)),
    "map_dataset_of_batches": lambda: (_mapped(16).batch(BATCH), None, dict(epochs=2)),
    "map_dataset_without_end": lambda: (_mapped().repeat(), BATCH, {}),
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
SHARED_OUT = {
    "files": lambda: (FILES, BATCH, dict(auto_shard="file", epochs=2)),
    "files_shuffled": lambda: (FILES_OF_ARRAYS, BATCH, dict(auto_shard="file", shuffle=True, seed=3, epochs=2)),
}
ALL = SOURCES | SHARED_OUT
HOW = {  # remainder and prefetch, by the number of processes: four take long
    1: [("drop", 0), ("pad", 2)],
    2: [("drop", 0), ("drop", 2), ("pad", 0), ("pad", 2)],
    4: [("drop", 2), ("pad", 0)],
}
NEVER = {("fewer_than_replicas", "drop")}  # which has no full batch
LEFT_OUT = NEVER | {
    (name, "drop")
    for name in (
        "iterable_of_batches",
        "map_dataset_of_batches",
        "iter_dataset_of_batches",
        "function",
        "files_read_by_all",
    )
}
LEFT = {  # how many batches were taken where a position is; of the others 2 and all
    "fewer_than_replicas": (1,),
    "map_dataset_without_end": (3,),
    "function": (3,),
    "arrays": (0, 2, 3, 5, 6),
    "files": (0, 1, 2, 3, 4, 5, 6),
    "files_shuffled": (1, 2, 3, 5),
}


def dataset(strategy, name, remainder, prefetch):
    source, size, options = ALL[name]()
    return strategy.distribute_dataset(source, size, remainder=remainder, prefetch=prefetch, **options)


def cases(count):
    """Name, remainder, prefetch, as `count` processes read it."""
    return [
        (name, *how) for name in ALL for how in HOW[count] if (name, how[0]) not in (LEFT_OUT if count == 4 else NEVER)
    ]


def local(element):
    """What this process holds of an element, leaves `[local replica, row, ...]`."""
    return jax.tree.map(
        lambda x: np.stack([np.asarray(part.data)[0] for part in x.addressable_shards]), _plain(element)
    )


def _plain(element):
    return jax.tree.map(lambda value: value.tree, element, is_leaf=lambda node: isinstance(node, jdist.PerReplica))


def taken(iterator, most=ENOUGH, states=()):
    """The batches that follow; into `states`, if it is a list, goes the position before each, and that behind the last."""
    found = []
    while len(found) < most:
        if isinstance(states, list):
            states.append(iterator.get_state())
        element = next(iterator, None)
        if element is None:
            break
        found.append(local(element))
    iterator.close()
    return found


def write(strategy, folder, count, number):
    """All batches of each case, and positions among them."""
    batches, states = {}, {}
    for case in cases(count):
        positions = []
        batches[case] = taken(iter(dataset(strategy, *case)), states=positions)
        if case[1:] in HOW[4 if count == 2 else count]:
            left = LEFT.get(case[0], (2, len(batches[case])))
            states |= {f"{case[0]}/{case[1]}/{number}": positions[number] for number in left if number < len(positions)}
    (folder / f"states_{count}_{number}.json").write_text(json.dumps(states))
    (folder / f"batches_{count}_{number}.pickle").write_bytes(pickle.dumps(batches))


def resume(strategy, folder, who, writer):
    """What follows each position that `writer`, so many processes, took."""
    follows = {}
    for key, state in json.loads((folder / f"states_{writer}_0.json").read_text()).items():
        name, remainder, left = key.split("/")
        iterator = iter(dataset(strategy, name, remainder, prefetch=2))
        iterator.set_state(state)
        follows[name, remainder, int(left)] = taken(iterator, ENOUGH - int(left))
    (folder / f"follows_{writer}_{who}.pickle").write_bytes(pickle.dumps(follows))


def attempt(data, most=100):
    """The numbers of the examples that this process got, a list a batch, and what was raised: at once, or while reading."""
    got, said = [], "nothing"
    try:
        data = data()
        for element in data:
            rows, weights = local(element) if isinstance(element, tuple) else (local(element), None)
            leaf = jax.tree.leaves(rows)[0]
            got.append(leaf[slice(None) if weights is None else weights > 0].ravel().tolist())
            if len(got) == most:
                break
    except (ValueError, RuntimeError, OSError) as error:
        said = f"{type(error).__name__}: {error} {getattr(error, '__notes__', '')}"
    return {"got": got, "said": said}


def _numbers(count, fail_at=None, failing=True):
    for i in range(count):
        if failing and i == fail_at:
            raise OSError("the disk is gone")
        yield np.int32(i)


def _fail(failing):
    if failing:
        raise OSError("the disk is gone")


def _failing_sources(failing):
    """Sources of 24 numbers which fail here if `failing`, with the options of the data set, and where they fail."""
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
        "own": (Elements(lambda: _numbers(12, 5, failing)), 8, dict(auto_shard="off")),
        "own_padded": (Elements(lambda: _numbers(12, 5, failing)), 8, dict(auto_shard="off", remainder="pad")),
        "text": (Elements(lambda: ("x" if failing and i in (9, 13) else np.int32(i) for i in range(24))), 8, {}),
        "shape": (Elements(lambda: (np.zeros(1 + (failing and i > 7)) for i in range(24))), 8, {}),
    }


def _batches(numbers):
    while batch := list(itertools.islice(numbers, 8)):
        yield np.stack(batch)


LENGTHS = [(8, 8), (6, 11), (1, 9), (9, 2), (3, 20), (20, 3), (4, 5)]
UNLIKE = {
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


def refusals(strategy, count, number):
    """What each process is told when something goes wrong on one of two, and that all can go on afterwards."""
    found = {}
    make = strategy.distribute_dataset
    later = lambda: attempt(lambda: make(Elements(lambda: _numbers(16)), 8, remainder="pad"))
    for failing in range(count):
        for prefetch in (0, 2):
            for name, (source, size, options) in _failing_sources(number == failing).items():
                key = f"fails/{name}/{failing}/{prefetch}"
                found[key] = attempt(lambda: make(source, size, prefetch=prefetch, **options))  # noqa: B023
            own = lambda context: Elements(lambda: _batches(_numbers(24, 9, number == failing)))  # noqa: B023
            found[f"fails/from_function/{failing}/{prefetch}"] = attempt(
                lambda: strategy.distribute_datasets_from_function(own, prefetch=prefetch)  # noqa: B023
            )
            found[f"later/{failing}/{prefetch}"] = later()
    for lengths in [(16, 24), (17, 18), (24, 16)]:
        for remainder in ("drop", "pad"):
            source = Elements(lambda: _numbers(lengths[number]))  # noqa: B023
            found[f"lengths/{lengths}/{remainder}"] = attempt(lambda: make(source, 8, remainder=remainder))  # noqa: B023
    for name, unlike in UNLIKE.items():
        rows = lambda: (jax.tree.map(lambda x, i=i: x[i], unlike(number)) for i in range(8))  # noqa: B023
        for how, source in {"arrays": unlike(number), "stream": Elements(rows)}.items():
            found[f"unlike/{name}/{how}/off"] = attempt(lambda: make(source, 8, auto_shard="off"))  # noqa: B023
        found[f"unlike/{name}/stream/data"] = attempt(lambda: make(Elements(rows), 8))  # noqa: B023
    for name, options in OPTIONS.items():
        given = {"source": np.arange(16), "batch_size": 4, **options(number)}
        found[f"options/{name}"] = attempt(lambda: make(**given))  # noqa: B023
    for lengths in LENGTHS:
        for remainder in ("drop", "pad", "error"):
            mine = lengths[number]
            for how, source in {"arrays": np.arange(mine), "stream": Elements(lambda: _numbers(mine))}.items():  # noqa: B023
                found[f"own/{lengths}/{remainder}/{how}"] = attempt(
                    lambda: make(source, 8, auto_shard="off", remainder=remainder)  # noqa: B023
                )
    endless = Elements(lambda: map(np.int32, itertools.count()) if number == 0 else _numbers(10))
    found["own_without_end"] = attempt(lambda: make(endless, 8, auto_shard="off"))
    nothing = Elements(lambda: _numbers([8, 0][number]))
    for remainder in ("drop", "pad"):
        found[f"nothing/{remainder}"] = attempt(lambda: make(nothing, 8, auto_shard="off", remainder=remainder))  # noqa: B023
    found["nothing_of_batches"] = attempt(
        lambda: strategy.distribute_datasets_from_function(lambda context: Elements(lambda: _batches(iter(nothing))))
    )
    found["other_prefetch"] = attempt(lambda: make(Elements(lambda: _numbers(16)), 8, prefetch=[0, 2][number]))
    found["later"] = later()
    found |= _stops(strategy, number)
    found["trained"] = _trained(strategy)
    found["keys"] = _keys_after_loops(strategy)
    found["other_positions"] = attempt(lambda: _at(make(Elements(lambda: _numbers(32)), 8), number))
    return found


def _at(data, batch):
    iterator = iter(data)
    iterator.set_state({**iterator.get_state(), "batch": batch})
    return iterator


def _stops(strategy, number):
    """Iterators left early on all processes, and one that is closed while it waits for another process."""
    found = {}
    for prefetch in (0, 2):
        data = strategy.distribute_dataset(Elements(lambda: _numbers(40)), 8, prefetch=prefetch)
        iterator = iter(data)
        found[f"closed/{prefetch}"] = attempt(lambda: iterator, most=2)  # noqa: B023
        iterator.close()
        found[f"closed/{prefetch}/again"] = attempt(lambda: data)  # noqa: B023
        found[f"left/{prefetch}"] = [attempt(lambda: data, most=2) for _ in range(3)]  # noqa: B023
        found[f"left/{prefetch}/again"] = attempt(lambda: data)  # noqa: B023
    go_on = threading.Event()
    waits = lambda: (number and i == 8 and go_on.wait(20) and None or np.int32(i) for i in range(40))
    iterator = iter(strategy.distribute_dataset(Elements(waits), 8))
    first = local(next(iterator)).ravel().tolist()
    if number:
        go_on.set()
    iterator.close()
    found["closed_while_waiting"] = [first, attempt(lambda: strategy.distribute_dataset(Elements(waits), 8))]
    return found


def _trained(strategy):
    """Steps of collectives while batches are read ahead, and now and then another data set in between."""
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
    """How many keys there are in the store that the processes share, after one more loop over ten batches and after six."""
    from jdist._src.core.jax_compat import key_value_store

    data, found = strategy.distribute_dataset(Elements(lambda: _numbers(80)), 8), []
    for loops in (1, 5):
        for _ in range(loops):
            for _ in data:
                pass
        strategy.put(1)  # all processes are here
        found.append(len(key_value_store().key_value_dir_get("jdist/input")))
        strategy.put(1)
    return found


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
    """What each process is told of a data set that only one of them can see to be wrong, and of the next one."""
    found = {}
    for name, options in WRONG_ON_ONE.items():
        given = {"source": np.arange(16), "batch_size": 8, **options(number)}
        found[name] = attempt(lambda: strategy.distribute_dataset(**given))  # noqa: B023
        found[f"{name}/later"] = attempt(lambda: strategy.distribute_dataset(np.arange(16), 8))
    return found


def function_fails(strategy, number):
    """What each process is told when the function that makes its batches fails on one."""

    def batches(context):
        _fail(number == 1)
        return Elements(lambda: _batches(_numbers(16)))

    later = Elements(lambda: _numbers(16))
    return {
        "function": attempt(lambda: strategy.distribute_datasets_from_function(batches)),
        "later": attempt(lambda: strategy.distribute_dataset(later, 8)),
    }


def main():
    address, count, number, folder = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), pathlib.Path(sys.argv[4])
    jax.distributed.initialize(address, count, number, coordinator_bind_address=address)
    logging.getLogger("jdist").setLevel(logging.ERROR)  # which examples are left out
    strategy = jdist.MirroredStrategy(jax.devices())
    answers = {
        "refusals": lambda: refusals(strategy, count, number),
        "wrong_on_one": lambda: wrong_on_one(strategy, number),
        "function_fails": lambda: function_fails(strategy, number),
    }
    for task in sys.argv[5:]:
        if task == "write":
            write(strategy, folder, count, number)
        elif task in answers:
            (folder / f"{task}_{number}.json").write_text(json.dumps(answers[task]()))
        else:
            resume(strategy, folder, f"{count}_{number}", task.removeprefix("resume:"))
    jax.distributed.shutdown()  # the process that holds the coordinator leaves last


if __name__ == "__main__":
    main()
