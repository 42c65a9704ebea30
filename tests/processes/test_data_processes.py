"""Data sets on several processes: the same batches on any number of processes, and an error on all when one fails."""

import functools
import json
import logging
import pickle
import re

import chex
import jax
import numpy as np
import pytest

import jdist

from processes import data_worker
from processes.data_worker import (
    ALL,
    AUGMENTED,
    DEVICES,
    DIFFERENT_BATCHES,
    DIVIDED,
    FAILING,
    HOW,
    LENGTHS,
    OPTIONS,
    SHARDED,
    SKIPPED_ON_FOUR,
    SOURCES,
    WITHOUT_BATCHES,
    WRONG_ON_ONE,
    cases,
)

pytestmark = pytest.mark.slow
TASKS = "processes.data_worker:run_tasks"


@pytest.fixture(scope="module")
def folder_and_results(pair, tmp_path_factory, request):
    """Returns the folder with the batches of 1 and 2 processes and the batches after the positions of the other, and the refusals."""
    folder = tmp_path_factory.mktemp("data")
    jdist_log = logging.getLogger("jdist")
    level = jdist_log.level
    jdist_log.setLevel(logging.ERROR)  # not the log of dropped examples
    request.addfinalizer(lambda: jdist_log.setLevel(level))
    strategy = jdist.MirroredStrategy(jax.devices()[:DEVICES])
    data_worker.write(strategy, folder, 1, 0)
    results = pair.run(TASKS, folder, "write", "resume:1", "refusals")
    data_worker.resume(strategy, folder, "1_0", 2)
    return folder, [of_process["refusals"] for of_process in results]


@pytest.fixture(scope="module")
def folder(folder_and_results):
    return folder_and_results[0]


@pytest.fixture(scope="module")
def folder_of_4(folder, pair):
    """Returns the same folder with the results of 4 processes added."""
    with jdist.testing.processes(4) as four:
        four.run(TASKS, folder, "write", "resume:2")
    pair.run(TASKS, folder, "resume:4")
    data_worker.resume(jdist.MirroredStrategy(jax.devices()[:DEVICES]), folder, "1_0", 4)
    return folder


@pytest.fixture(scope="module")
def batches(folder, request):
    """Returns a function from a number of processes to case -> global batches, with leaves `[replica, example, ...]`."""

    @functools.cache
    def batches_of(count):
        return _joined(request.getfixturevalue("folder_of_4") if count == 4 else folder, "batches", count)

    return batches_of


@pytest.fixture(scope="module")
def refusals(folder_and_results):
    return folder_and_results[1]


def _joined(folder, name, count):
    parts = [pickle.loads((folder / f"{name}_{count}_{number}.pickle").read_bytes()) for number in range(count)]
    return {case: _global([part[case] for part in parts]) for case in parts[0]}


def _global(parts):
    steps = [len(part) for part in parts]
    assert len(set(steps)) == 1, f"the processes have {steps} batches"
    return [jax.tree.map(lambda *x: np.concatenate(x), *step) for step in zip(*parts, strict=True)]


def _examples(batch):
    """Returns the examples of a global batch without padding, in order."""
    rows, weights = batch if isinstance(batch, tuple) else (batch, None)
    rows = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), rows)
    return rows if weights is None else jax.tree.map(lambda x: x[weights.ravel() > 0], rows)


def _assert_equal(result, expected):
    chex.assert_trees_all_equal(result, expected)
    chex.assert_trees_all_equal_dtypes(result, expected)


@pytest.mark.parametrize("remainder", ["drop", "pad"])
@pytest.mark.parametrize("name", SOURCES)
def test_global_batches_do_not_depend_on_the_number_of_processes_or_on_prefetch(name, remainder, batches):
    if (name, remainder) in WITHOUT_BATCHES:
        pytest.skip("This source has too few examples for a batch.")
    variants = {
        (count, prefetch): batches(count)[name, remainder, prefetch]
        for count in (1, 2, 4)
        for *case, prefetch in cases(count)
        if tuple(case) == (name, remainder)
    }
    assert len(variants) == 3 + ((name, remainder) not in SKIPPED_ON_FOUR)
    expected = variants.popitem()[1]
    assert expected
    for steps in variants.values():
        _assert_equal(steps, expected)


@pytest.mark.parametrize("count", [1, 2, 4])
@pytest.mark.parametrize("name", sorted(ALL.keys() - {"function", "infinite_map_dataset", "iter_dataset_of_batches"}))
def test_padded_epoch_has_each_example_once_and_the_weights_count_the_examples(name, count, batches):
    source, size, options = ALL[name]()
    steps = batches(count)[name, "pad", 2 if count == 1 else 0]
    numbers = np.concatenate([jax.tree.leaves(_examples(step))[-1] for step in steps])  # after "image"
    epochs = np.split(numbers, options.get("epochs", 1))
    for epoch in epochs:
        assert len(set(epoch.tolist())) == len(epoch)
        assert set(epoch.tolist()) == set(epochs[0].tolist())
    assert sum(float(weights.sum()) for _, weights in steps) == len(numbers)


@pytest.mark.parametrize("reader, writer", [(2, 1), (1, 2), (2, 4), (1, 4), (4, 2)])
@pytest.mark.parametrize("name", ALL)
def test_position_of_some_processes_is_resumed_exactly_on_another_number(name, reader, writer, batches, folder):
    expected_of, _ = batches(writer), batches(reader)  # starts 4 processes if needed
    resumed = _joined(folder, f"resumed_{writer}", reader)
    steps_after = {case[1:]: steps for case, steps in resumed.items() if case[0] == name}
    assert steps_after
    for (remainder, position), steps in steps_after.items():
        prefetch = dict(HOW[4] if writer == 2 else HOW[writer])[remainder]
        expected = expected_of[name, remainder, prefetch][position:]
        if name in SHARDED:  # a part that has ended is padded with another of its examples
            _assert_equal([_examples(x) for x in steps], [_examples(x) for x in expected])
            assert [len(jax.tree.leaves(x)[0]) for x in steps] == [DEVICES] * len(expected)
        else:
            _assert_equal(steps, expected)


@pytest.mark.parametrize("count", [2, 4])
def test_positions_are_the_same_on_every_process(count, batches, folder):
    batches(count)
    positions = [json.loads((folder / f"states_{count}_{number}.json").read_text()) for number in range(count)]
    assert len(positions[0]) > 2 * len(ALL)
    assert all(of_process == positions[0] for of_process in positions)


FAILURES = {  # of a source of 24 numbers in batches of 8: number of batches before the error, and its position
    **{
        name: (1, "batch 1 of epoch 0") for name in ("iterable", "sequence", "function", "batches", "off", "off_padded")
    },
    **{name: (1, "batch 1 of epoch 0") for name in ("text", "shape")},
    "first_element": (0, "batch 0 of epoch 0"),
    "start": (0, "batch 0 of epoch 0"),
    "second_epoch": (4, "batch 1 of epoch 1"),
    "files": (2, "batch 2 of epoch 0"),
    "from_function": (0, "batch 0 of epoch 0"),
}
MESSAGES = {
    "text": "ValueError: source is <U",
    "shape": "ValueError: The source yields source as float64[2] per row, expected float64[1]",
}


@pytest.mark.parametrize("failing, prefetch", FAILING)
@pytest.mark.parametrize("name", FAILURES)
def test_source_that_fails_on_one_process_raises_on_all(name, failing, prefetch, refusals):
    count, position = FAILURES[name]
    failing_result, other_result = (
        refusals[number][f"fails/{name}/{failing}/{prefetch}"] for number in (failing, 1 - failing)
    )
    message = MESSAGES.get(name, "OSError: the disk failed")
    assert failing_result["error"].startswith(message)
    assert other_result["error"].startswith(
        f"RuntimeError: Input pipeline {failing} could not read its data in {position}: {message}"
    )
    assert len(failing_result["examples"]) == len(other_result["examples"]) == count
    if name == "files":
        assert "while reading " + "ab"[failing] in failing_result["error"]


SIXTEEN = [[[0, 1, 2, 3], [8, 9, 10, 11]], [[4, 5, 6, 7], [12, 13, 14, 15]]]  # the batches of 8 of the numbers below 16


def _assert_examples(results, expected):
    assert results == [{"examples": examples, "error": "none"} for examples in expected]


@pytest.mark.parametrize("key", [f"later/{failing}/{prefetch}" for failing, prefetch in FAILING] + ["later"])
def test_next_data_set_after_a_failure_is_read(key, refusals):
    _assert_examples([process[key] for process in refusals], SIXTEEN)


@pytest.mark.parametrize(
    "lengths, batch, counts",
    [((16, 24), 2, (0, 8)), ((17, 18), 2, (1, 2)), ((24, 16), 2, (8, 0))],
    ids=["by_a_batch", "in_the_last_batch", "other_way_round"],
)
@pytest.mark.parametrize("remainder", ["drop", "pad"])
def test_streams_of_different_length_are_refused_on_all_processes(lengths, batch, counts, remainder, refusals):
    one, other = counts
    for process in refusals:
        result = process[f"lengths/{lengths}/{remainder}"]
        assert len(result["examples"]) == batch
        assert result["error"].startswith(
            f"ValueError: One process has {one} examples in batch {batch} of epoch 0, and another has {other}. The source is "
            "not the same on all processes."
        )
        assert 'pass auto_shard="off"' in result["error"]


@pytest.mark.parametrize("name", DIVIDED)
def test_source_that_differs_between_processes_is_refused_on_all_with_the_causes(name, refusals):
    for process in refusals:
        result = process[f"divided/{name}"]
        assert result["examples"] == []
        assert re.match(
            "ValueError: (The source is not the same|The source reads one shard|Input pip)", result["error"]
        )
        assert (
            "random" not in result["error"].partition(" of the same examples")[0]
        )  # names a leaf without random numbers
        for text in ("divided by process already", 'auto_shard="off"', "the same seed on all processes"):
            assert text in result["error"]


@pytest.mark.parametrize("name", AUGMENTED)
def test_random_augmentation_is_not_a_difference(name, refusals):
    for process in refusals:
        assert process[f"augmented/{name}"]["error"].strip() == "none"


@pytest.mark.parametrize("how", ["arrays/off", "stream/off", "stream/data"])
@pytest.mark.parametrize("name", DIFFERENT_BATCHES)
def test_batches_of_another_shape_or_dtype_on_each_process_are_refused_on_all(name, how, refusals):
    kinds = {
        "dtype": ("source int32[]", "source float32[]"),
        "shape": ("source int32[1]", "source int32[2]"),
        "structure": ("source['a'] int32[]", "source['b'] int32[]"),
        "rank": ("source int32[]", "source int32[1]"),
    }[name]
    for process in refusals:
        result = process[f"different/{name}/{how}"]
        message = result["error"].replace("int64", "int32")
        assert result["examples"] == []
        assert message.startswith("ValueError: Input pipeline 0 has batches of 8 examples of " + kinds[0])
        assert f"but pipeline 1 has batches of 8 examples of {kinds[1]} in batch 0 of epoch 0" in message


@pytest.mark.parametrize("name", OPTIONS)
def test_data_sets_with_different_options_on_each_process_are_refused_on_all(name, refusals):
    results = [process[f"options/{name}"] for process in refusals]
    for result in results:
        assert "Input pipeline 0 has a data set of " in result["error"]
        assert "They must be equal on all processes" in result["error"]
        assert result["examples"] == []
        assert re.match(r"(ValueError|RuntimeError): .*(The processes pass|[Pp]ipeline)", result["error"])


def test_processes_may_prefetch_different_numbers_of_batches(refusals):
    _assert_examples([process["different_prefetch"] for process in refusals], SIXTEEN)


def _split(count, size=4):
    return [list(range(i, min(i + size, count))) for i in range(0, count, size)]


@pytest.mark.parametrize("how", ["arrays", "stream"])
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_sources_of_different_length_with_off_and_pad_end_with_the_longest(lengths, how, refusals):
    steps = max(-(-length // 4) for length in lengths)
    expected = [_split(length) + [[]] * (steps - len(_split(length))) for length in lengths]
    _assert_examples([process[f"off/{lengths}/pad/{how}"] for process in refusals], expected)


@pytest.mark.parametrize("how", ["arrays", "stream"])
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_sources_of_different_length_with_off_and_drop_end_with_the_shortest(lengths, how, refusals):
    results = [process[f"off/{lengths}/drop/{how}"] for process in refusals]
    if steps := min(lengths) // 4:
        _assert_examples(results, [_split(4 * steps)] * 2)
    else:
        assert all(result["examples"] == [] and result["error"].startswith("ValueError: ") for result in results)


@pytest.mark.parametrize("how", ["arrays", "stream"])
@pytest.mark.parametrize("lengths", [of for of in LENGTHS if min(of) < 4 <= max(of)], ids=str)
def test_source_too_short_for_one_batch_with_off_and_drop_is_named_in_the_error(lengths, how, refusals):
    """All sources together may have enough examples for a batch."""
    for process in refusals:
        message = process[f"off/{lengths}/drop/{how}"]["error"]
        number, length = min(enumerate(lengths), key=lambda x: x[1])
        assert re.search(rf"([Pp]ipeline|[Pp]rocess|[Ss]hard) {number}\b.*\b{length} examples", message)


@pytest.mark.parametrize("how", ["arrays", "stream"])
@pytest.mark.parametrize("lengths", [of for of in LENGTHS if of != (8, 8)], ids=str)
def test_sources_with_a_remainder_with_off_and_error_are_refused_on_all(lengths, how, refusals):
    full = min(lengths) // 4
    left = sum(min(4, length - 4 * full) for length in lengths)
    for process in refusals:
        result = process[f"off/{lengths}/error/{how}"]
        assert result["examples"] == _split(4 * full)
        assert (
            f'There are only {left} of 8 examples in batch {full} of epoch 0, and remainder="error"' in result["error"]
        )


def _cut(numbers, size):
    return [numbers[i : i + size] for i in range(0, len(numbers), size)]


ANY_SIZE = {  # the examples of both processes, per batch of 7
    **{
        name: [
            [list(range(i, min(i + 4, 23))) for i in range(0, 23, 7)],
            [list(range(i + 4, min(i + 7, 23))) for i in range(0, 23, 7)],
        ]
        for name in ("data", "stream")
    },
    "file": [_cut(list(range(13)), 3), [*_cut(list(range(100, 113)), 4), []]],
    "off": [_cut(list(range(11)), 3), [*_cut(list(range(100, 111)), 4), []]],
    "off_batches": [_cut(list(range(11)), 5), _cut(list(range(100, 111)), 5)],
}


@pytest.mark.parametrize("name", ANY_SIZE)
def test_batches_that_the_replicas_do_not_divide_are_filled_up(name, refusals):
    _assert_examples([process[f"any_size/{name}"] for process in refusals], ANY_SIZE[name])


def test_batch_of_fewer_examples_than_processes_with_their_own_data_is_refused(refusals):
    for process in refusals:
        assert (
            "A batch of 1 examples cannot consist of examples of 2 processes" in process["any_size/too_small"]["error"]
        )


def test_processes_pad_batches_of_varying_width_to_the_same_width(refusals):
    for process in refusals:
        assert process["widths"] == [[4, 2, 4], [4, 2, 8], [4, 2, 8], [4, 2, 4]]


def test_infinite_source_with_off_and_drop_ends_with_the_others(refusals):
    _assert_examples([process["off_infinite"] for process in refusals], [_split(8)] * 2)


@pytest.mark.parametrize("remainder", ["drop", "pad"])
def test_source_without_examples_on_one_process_is_refused_on_all(remainder, refusals):
    for process in refusals:
        message = process[f"empty/{remainder}"]["error"]
        assert message.startswith(
            "ValueError: Shard 1 of the 2 shards of the data contains no examples. Pass a source with examples on each process"
        )


def test_source_without_batches_on_one_process_is_refused_on_all(refusals):
    empty = "ValueError: The source is empty: there is nothing to distribute."
    first, second = (process["empty_batches"]["error"] for process in refusals)
    assert first.startswith(f"RuntimeError: Input pipeline 1 could not read its data in batch 0 of epoch 0: {empty}")
    assert second.startswith(empty)


FORTY = [[list(range(i, i + 4)) for i in range(4 * number, 40, 8)] for number in (0, 1)]


@pytest.mark.parametrize("prefetch", [0, 2])
def test_data_set_that_all_processes_stop_early_can_be_read_again(prefetch, refusals):
    for key, expected in {
        "closed": [x[:2] for x in FORTY],
        "closed/again": FORTY,
        "left/again": FORTY,
    }.items():
        name, *again = key.split("/")
        _assert_examples([process["/".join([name, str(prefetch), *again])] for process in refusals], expected)
    for time in range(3):
        _assert_examples([process[f"left/{prefetch}"][time] for process in refusals], [x[:2] for x in FORTY])


def test_iterator_closed_while_it_waits_for_another_process_ends_and_the_next_one_is_read(refusals):
    assert [process["closed_while_waiting"][0] for process in refusals] == [FORTY[0][0], FORTY[1][0]]
    _assert_examples([process["closed_while_waiting"][1] for process in refusals], FORTY)


def test_steps_with_collectives_run_while_batches_are_prefetched(refusals):
    total, checks = sum(range(400)), 5 * 9  # five evaluations of nine examples
    assert [process["trained"] for process in refusals] == [[total, checks, 50, 400]] * 2


def test_loops_over_a_data_set_leave_no_additional_keys_in_the_store(refusals):
    for one, six in (process["keys"] for process in refusals):
        assert six <= one


def test_iterators_at_different_positions_are_refused_on_all(refusals):
    """As if each process restored another checkpoint: a batch would consist of parts of two batches."""
    for process in refusals:
        assert process["different_positions"]["examples"] == []
        assert process["different_positions"]["error"].startswith("ValueError")


@pytest.mark.parametrize("task", ["wrong_on_one", "function_fails"])
def test_data_set_that_is_invalid_on_one_process_is_refused_on_all_and_the_next_one_is_read(pair, task, tmp_path):
    results = [of_process[task] for of_process in pair.run(TASKS, tmp_path, task)]
    for name in WRONG_ON_ONE if task == "wrong_on_one" else ["function"]:
        for result in results:
            assert result[name]["examples"] == [], name
            assert "Error: " in result[name]["error"], name
        later = f"{name}/later" if task == "wrong_on_one" else "later"
        _assert_examples([result[later] for result in results], SIXTEEN)
