"""One process of several that read data together; writes which rows it got, its positions and what was refused.

python data_worker.py COORDINATOR COUNT NUMBER FOLDER TASK...

Tasks: `write`, all batches and a position among them; `resume:COUNT`, what follows the position that COUNT processes wrote;
`refusals`, what goes wrong on one process. Tests import this file as well, to be a process of their own.
"""

import functools
import json
import logging
import pathlib
import pickle
import sys

import jax
import numpy as np

import jdist

DEVICES = 4  # of all processes together
BATCH, EXAMPLES, ENOUGH = 8, 21, 9  # ENOUGH batches of what has no end


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
FILES = jdist.data.Files(PATHS, lambda path: Elements(lambda: map(example, range(100 * int(path), 101 * int(path) + 4))))
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
    1: [("drop", 2), ("pad", 0)],
    2: [("drop", 0), ("drop", 2), ("pad", 0), ("pad", 2)],
    4: [("drop", 0), ("pad", 2)],
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


def cases(hows):
    """Name, remainder, prefetch; examples that are fewer than a batch are no data set under "drop"."""
    return [(name, *how) for name in ALL for how in hows if (name, how[0]) != ("fewer_than_replicas", "drop")]


def local(element):
    """What this process holds of an element, leaves `[local replica, row, ...]`."""
    return jax.tree.map(lambda x: np.stack([np.asarray(part.data)[0] for part in x.addressable_shards]), _plain(element))


def _plain(element):
    return tuple(part.tree for part in element) if isinstance(element, tuple) else element.tree


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
    for case in cases(HOW[count]):
        positions = []
        batches[case] = taken(iter(dataset(strategy, *case)), states=positions)
        if case[1:] in HOW[4] or count == 1:
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


def main():
    address, count, number, folder = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), pathlib.Path(sys.argv[4])
    jax.distributed.initialize(address, count, number, coordinator_bind_address=address)
    logging.getLogger("jdist").setLevel(logging.ERROR)  # which examples are left out
    strategy = jdist.MirroredStrategy(jax.devices())
    for task in sys.argv[5:]:
        if task == "write":
            write(strategy, folder, count, number)
        elif task == "refusals":
            found = refusals(strategy, count, number)
            (folder / f"refusals_{count}_{number}.json").write_text(json.dumps(found))
        else:
            resume(strategy, folder, f"{count}_{number}", task.removeprefix("resume:"))
    jax.distributed.shutdown()  # the process that holds the coordinator leaves last


if __name__ == "__main__":
    main()
