"""Reads data in the cases that were run with tf.distribute, on one process of several."""

import logging
import pathlib

import jax
import numpy as np

import jdist


def refusal(call):
    try:
        call()
    except (ValueError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return "not refused"


class Batched:
    """The batches of an array, the last one partial."""

    def __init__(self, array, size):
        self._array, self._size = np.asarray(array), size

    def __iter__(self):
        return (self._array[i : i + self._size] for i in range(0, len(self._array), self._size))


class Numbers:
    """A range with the `shard` method of a TensorFlow data set."""

    def __init__(self, numbers):
        self._numbers = numbers

    def __iter__(self):
        return map(np.int32, self._numbers)

    def shard(self, num_shards, index):
        return Numbers(self._numbers[index::num_shards])


def examples_of(dataset):
    """Returns for each step the examples of each replica of this process, without padding."""
    steps = []
    for element in dataset:
        batch, weights = element if isinstance(element, tuple) else (element, None)
        masks = [np.ones(len(x)) for x in batch.values] if weights is None else weights.values
        steps.append([np.asarray(x)[np.asarray(w) > 0].tolist() for x, w in zip(batch.values, masks, strict=True)])
    return steps


def examples_by_case(folder):
    """Returns the examples of the replicas of this process in each case."""
    folder, count = pathlib.Path(folder), jax.process_count()

    def files(count):
        paths = [folder / f"{i}.txt" for i in range(count)]
        return jdist.data.Files(paths, lambda path: np.loadtxt(path, dtype=np.int32))

    log = []
    handler = logging.Handler()
    handler.emit = lambda record: log.append(record.getMessage())
    logging.getLogger("jdist").addHandler(handler)

    def logged(call):
        log.clear()
        return [call(), list(log)]

    def both(array, size):
        """Returns an indexed source of examples, and a source of batches."""
        return {"examples": (np.asarray(array), size), "batches": (Batched(array, size), None)}

    firsts = [next(d for d in jax.devices() if d.process_index == process) for process in range(count)]
    one_each = jdist.MirroredStrategy(firsts)
    every = jdist.MultiWorkerMirroredStrategy()
    read = lambda *source, **options: examples_of(
        one_each.distribute_dataset(*source, **{"remainder": "pad", **options})
    )
    results = {}

    for policy in ("auto", "data"):
        for how, source in both(np.arange(14), 8).items():
            results[f"mw1_{policy}_{how}"] = read(*source, auto_shard=policy)
    results["mw2_examples"] = read(np.arange(14), 8, auto_shard="off")
    results["mw2_batches"] = read(Batched(np.arange(14), 4), None, auto_shard="off")
    for how, source in both(np.arange(9), 4).items():
        results[f"mw3_{how}"] = read(*source, auto_shard="data")
    results["mw4_refused"] = refusal(lambda: read(np.arange(9), 5, remainder="drop"))
    results["mw4_batches_refused"] = refusal(lambda: read(Batched(np.arange(9), 5), None, remainder="drop"))
    for how, source in both(np.arange(9), 5).items():
        results[f"mw4_{how}"] = read(*source)
    for how, source in both(np.arange(10), 4).items():
        results[f"mw5_{how}"] = read(*source, remainder="drop")
    results["mw6_file"] = refusal(lambda: read(range(8), 4, auto_shard="file"))
    results["mw6_auto"] = logged(lambda: read(range(8), 4))
    for policy in ("file", "auto", "data"):
        results[f"mw7_mw8_{policy}"] = logged(lambda policy=policy: read(files(4), 4, auto_shard=policy))
    results["mw9"] = read(files(3), 4, auto_shard="file")
    results["mw10_file"] = refusal(lambda: read(files(1), 2, auto_shard="file"))
    results["mw10_auto"] = logged(lambda: read(files(1), 2))
    results["mw10_later"] = read(files(4), 4)
    for policy in ("auto", "data", "off", "hint"):
        results[f"mw11_{policy}"] = read(Numbers(range(7)), 2, auto_shard=policy)
    results["mw11_no_hint"] = refusal(lambda: read(np.arange(7), 2, auto_shard="hint"))
    results["mw12_dataset"] = read(np.arange(4), 2)
    results["mw12_function"] = examples_of(
        one_each.distribute_datasets_from_function(lambda context: Batched(np.arange(4), 1))
    )
    results["mw13_function"] = examples_of(
        every.distribute_datasets_from_function(lambda context: Batched(np.arange(9), 2), remainder="pad")
    )

    results["mw13_refused"] = refusal(lambda: every.distribute_dataset(np.arange(9), 2))
    results["mw13_dataset"] = examples_of(every.distribute_dataset(np.arange(9), 8, remainder="pad"))

    contexts = []

    def shard(context):
        contexts.append([context.num_input_pipelines, context.input_pipeline_id, context.num_replicas_in_sync])
        batches = list(Batched(np.arange(14), context.get_per_replica_batch_size(8)))
        return batches[context.input_pipeline_id :: context.num_input_pipelines].__iter__()

    results["mw15"] = examples_of(one_each.distribute_datasets_from_function(shard, remainder="pad"))
    results["mw15_contexts"] = contexts
    logging.getLogger("jdist").removeHandler(handler)
    return results
