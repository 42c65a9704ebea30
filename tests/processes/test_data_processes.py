"""Data over real processes: the same batches on any number of them, and nothing hangs when one fails."""

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
    DEVICES,
    HOW,
    LEFT_OUT,
    LENGTHS,
    NEVER,
    OPTIONS,
    SHARED_OUT,
    SOURCES,
    UNLIKE,
    WRONG_ON_ONE,
    cases,
)
from processes.runner import run_processes

FOUR = pytest.mark.slow  # four processes


@pytest.fixture(scope="module")
def folder(tmp_path_factory, request):
    """What 1 and 2 processes read, and what each went on with from the positions of the other."""
    folder = tmp_path_factory.mktemp("data")
    jdist_log = logging.getLogger("jdist")
    level = jdist_log.level
    jdist_log.setLevel(logging.ERROR)  # which examples are left out
    request.addfinalizer(lambda: jdist_log.setLevel(level))
    strategy = jdist.MirroredStrategy(jax.devices()[:DEVICES])
    data_worker.write(strategy, folder, 1, 0)
    run_processes(data_worker.__file__, 2, 2, folder, "write", "resume:1", "refusals")
    data_worker.resume(strategy, folder, "1_0", 2)
    return folder


@pytest.fixture(scope="module")
def folder_of_4(folder):
    """The same folder, to which 4 processes have added theirs."""
    run_processes(data_worker.__file__, 4, 1, folder, "write", "resume:2")
    run_processes(data_worker.__file__, 2, 2, folder, "resume:4")
    data_worker.resume(jdist.MirroredStrategy(jax.devices()[:DEVICES]), folder, "1_0", 4)
    return folder


@pytest.fixture(scope="module")
def batches(folder, request):
    """A function from a number of processes to case -> global batches, leaves `[replica, row, ...]`."""

    @functools.cache
    def of(count):
        return _joined(request.getfixturevalue("folder_of_4") if count == 4 else folder, "batches", count)

    return of


@pytest.fixture(scope="module")
def refusals(folder):
    return [json.loads((folder / f"refusals_{number}.json").read_text()) for number in (0, 1)]


def _joined(folder, name, count):
    parts = [pickle.loads((folder / f"{name}_{count}_{number}.pickle").read_bytes()) for number in range(count)]
    return {case: _global([part[case] for part in parts]) for case in parts[0]}


def _global(parts):
    steps = [len(part) for part in parts]
    assert len(set(steps)) == 1, f"the processes got {steps} batches"
    return [jax.tree.map(lambda *x: np.concatenate(x), *step) for step in zip(*parts, strict=True)]


def _examples(batch):
    """The rows of a global batch that count, in order."""
    rows, weights = batch if isinstance(batch, tuple) else (batch, None)
    rows = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), rows)
    return rows if weights is None else jax.tree.map(lambda x: x[weights.ravel() > 0], rows)


def _same(found, expected):
    chex.assert_trees_all_equal(found, expected)
    chex.assert_trees_all_equal_dtypes(found, expected)


@pytest.mark.parametrize("counts", [(1, 2), pytest.param((1, 2, 4), marks=FOUR)], ids=str)
@pytest.mark.parametrize("remainder", ["drop", "pad"])
@pytest.mark.parametrize("name", SOURCES)
def test_global_batches_are_the_same_on_any_number_of_processes_however_far_ahead_they_are_read(
    name, remainder, counts, batches
):
    if (name, remainder) in NEVER:
        pytest.skip("no batch is full")
    found = {
        (count, prefetch): batches(count)[name, remainder, prefetch]
        for count in counts
        for case, kept, prefetch in cases(count)
        if (case, kept) == (name, remainder)
    }
    assert len(found) == 3 + (4 in counts and (name, remainder) not in LEFT_OUT)
    expected = found.popitem()[1]
    assert expected
    for steps in found.values():
        _same(steps, expected)


@pytest.mark.parametrize("count", [1, 2, pytest.param(4, marks=FOUR)])
@pytest.mark.parametrize(
    "name", sorted(ALL.keys() - {"function", "map_dataset_without_end", "iter_dataset_of_batches"})
)
def test_epoch_with_pad_has_each_example_once_and_the_weights_count_them(name, count, batches):
    source, size, options = ALL[name]()
    steps = batches(count)[name, "pad", 2 if count == 1 else 0]
    numbers = np.concatenate([jax.tree.leaves(_examples(step))[-1] for step in steps])  # after "image"
    epochs = np.split(numbers, options.get("epochs", 1))
    for epoch in epochs:
        assert len(set(epoch.tolist())) == len(epoch)
        assert set(epoch.tolist()) == set(epochs[0].tolist())
    assert sum(float(weights.sum()) for _, weights in steps) == len(numbers)


@pytest.mark.parametrize(
    "reader, writer", [(2, 1), (1, 2), *(pytest.param(*case, marks=FOUR) for case in [(2, 4), (1, 4), (4, 2)])]
)
@pytest.mark.parametrize("name", ALL)
def test_position_taken_on_some_processes_continues_exactly_on_another_number(name, reader, writer, batches, folder):
    expected_of, _ = batches(writer), batches(reader)  # which start 4 processes where one of them is 4
    follows = _joined(folder, f"follows_{writer}", reader)
    found = {case[1:]: steps for case, steps in follows.items() if case[0] == name}
    assert found
    for (remainder, left), steps in found.items():
        prefetch = dict(HOW[4] if writer == 2 else HOW[writer])[remainder]
        expected = expected_of[name, remainder, prefetch][left:]
        if name in SHARED_OUT:  # a part that is at its end is filled up with another of its examples
            _same([_examples(x) for x in steps], [_examples(x) for x in expected])
            assert [len(jax.tree.leaves(x)[0]) for x in steps] == [DEVICES] * len(expected)
        else:
            _same(steps, expected)


@pytest.mark.parametrize("count", [2, pytest.param(4, marks=FOUR)])
def test_positions_are_the_same_on_every_process(count, batches, folder):
    batches(count)
    positions = [json.loads((folder / f"states_{count}_{number}.json").read_text()) for number in range(count)]
    assert len(positions[0]) > 2 * len(ALL)
    assert all(found == positions[0] for found in positions)


FAILURES = {  # of a source of 24 numbers in batches of 8: after how many batches, and where
    **{
        name: (1, "batch 1 of epoch 0") for name in ("iterable", "sequence", "function", "batches", "own", "own_padded")
    },
    **{name: (1, "batch 1 of epoch 0") for name in ("text", "shape")},
    "first_element": (0, "batch 0 of epoch 0"),
    "start": (0, "batch 0 of epoch 0"),
    "second_epoch": (4, "batch 1 of epoch 1"),
    "files": (2, "batch 2 of epoch 0"),
    "from_function": (0, "batch 0 of epoch 0"),
}
OWN_WORDS = {
    "text": "ValueError: source is <U",
    "shape": "ValueError: The source gives source as float64[2] a row, and not float64[1]",
}


@pytest.mark.parametrize("prefetch", [0, 2])
@pytest.mark.parametrize("failing", [0, 1])
@pytest.mark.parametrize("name", FAILURES)
def test_source_that_fails_on_one_process_raises_on_all(name, failing, prefetch, refusals):
    count, where = FAILURES[name]
    own, other = (refusals[number][f"fails/{name}/{failing}/{prefetch}"] for number in (failing, 1 - failing))
    says = OWN_WORDS.get(name, "OSError: the disk is gone")
    assert own["said"].startswith(says)
    assert other["said"].startswith(
        f"RuntimeError: Input pipeline {failing} could not read its data in {where}: {says}"
    )
    assert len(own["got"]) == len(other["got"]) == count
    if name == "files":
        assert "while reading " + "ab"[failing] in own["said"]


def _fine(answers, expected):
    assert answers == [{"got": got, "said": "nothing"} for got in expected]


@pytest.mark.parametrize(
    "key", [f"later/{failing}/{prefetch}" for failing in (0, 1) for prefetch in (0, 2)] + ["later"]
)
def test_processes_go_on_with_another_data_set_after_failures(key, refusals):
    _fine([found[key] for found in refusals], [[[0, 1, 2, 3], [8, 9, 10, 11]], [[4, 5, 6, 7], [12, 13, 14, 15]]])


@pytest.mark.parametrize(
    "lengths, batch, counts",
    [((16, 24), 2, (0, 8)), ((17, 18), 2, (1, 2)), ((24, 16), 2, (8, 0))],
    ids=["by_a_batch", "in_the_last_batch", "other_way_round"],
)
@pytest.mark.parametrize("remainder", ["drop", "pad"])
def test_streams_of_different_length_are_refused_on_all_where_each_is_to_have_the_whole(
    lengths, batch, counts, remainder, refusals
):
    one, other = counts
    for found in refusals:
        answer = found[f"lengths/{lengths}/{remainder}"]
        assert len(answer["got"]) == batch
        assert answer["said"].startswith(
            f"ValueError: One process has {one} examples in batch {batch} of epoch 0, and another has {other}. Each has to "
            'hand in the same source; if each has a share of its own, say `auto_shard="off"`.'
        )


@pytest.mark.parametrize("how", ["arrays/off", "stream/off", "stream/data"])
@pytest.mark.parametrize("name", UNLIKE)
def test_batches_of_another_kind_on_each_process_are_refused_on_all(name, how, refusals):
    kinds = {
        "dtype": ("source int32[]", "source float32[]"),
        "shape": ("source int32[1]", "source int32[2]"),
        "structure": ("source['a'] int32[]", "source['b'] int32[]"),
        "rank": ("source int32[]", "source int32[1]"),
    }[name]
    for found in refusals:
        answer = found[f"unlike/{name}/{how}"]
        said = answer["said"].replace("int64", "int32")
        assert answer["got"] == []
        assert said.startswith("ValueError: Input pipeline 0 has batches of 8 examples of " + kinds[0])
        assert f"and 1 has batches of 8 examples of {kinds[1]} in batch 0 of epoch 0" in said


@pytest.mark.parametrize("name", OPTIONS)
def test_data_sets_that_differ_between_the_processes_are_refused_on_all(name, refusals):
    answers = [found[f"options/{name}"] for found in refusals]
    for answer in answers:
        assert "Input pipeline 0 has a data set of " in answer["said"]
        assert "Make them alike on all processes" in answer["said"]
        assert answer["got"] == []
        assert re.match(r"(ValueError|RuntimeError): .*(The processes pass|[Pp]ipeline)", answer["said"])


def test_processes_may_read_ahead_as_far_as_they_like(refusals):
    expected = [[[0, 1, 2, 3], [8, 9, 10, 11]], [[4, 5, 6, 7], [12, 13, 14, 15]]]
    _fine([found["other_prefetch"] for found in refusals], expected)


def _cut(count, size=4):
    return [list(range(i, min(i + size, count))) for i in range(0, count, size)]


@pytest.mark.parametrize("how", ["arrays", "stream"])
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_shares_of_different_length_end_on_all_with_the_longest_under_pad(lengths, how, refusals):
    steps = max(-(-length // 4) for length in lengths)
    expected = [_cut(length) + [[]] * (steps - len(_cut(length))) for length in lengths]
    _fine([found[f"own/{lengths}/pad/{how}"] for found in refusals], expected)


@pytest.mark.parametrize("how", ["arrays", "stream"])
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_shares_of_different_length_end_on_all_at_the_first_end_under_drop(lengths, how, refusals):
    answers = [found[f"own/{lengths}/drop/{how}"] for found in refusals]
    if steps := min(lengths) // 4:
        _fine(answers, [_cut(4 * steps)] * 2)
    else:
        assert all(answer["got"] == [] and answer["said"].startswith("ValueError: ") for answer in answers)


@pytest.mark.parametrize("how", ["arrays", "stream"])
@pytest.mark.parametrize("lengths", [of for of in LENGTHS if min(of) < 4 <= max(of)], ids=str)
def test_share_too_small_for_its_part_of_one_batch_is_named_under_drop(lengths, how, refusals):
    """The examples of all together may well be more than a batch."""
    for found in refusals:
        said = found[f"own/{lengths}/drop/{how}"]["said"]
        number, length = min(enumerate(lengths), key=lambda x: x[1])
        assert re.search(rf"([Pp]ipeline|[Pp]rocess|[Pp]art) {number}\b.*\b{length} examples", said)


@pytest.mark.parametrize("how", ["arrays", "stream"])
@pytest.mark.parametrize("lengths", [of for of in LENGTHS if of != (8, 8)], ids=str)
def test_shares_that_leave_examples_over_are_refused_on_all_under_error(lengths, how, refusals):
    full = min(lengths) // 4
    left = sum(min(4, length - 4 * full) for length in lengths)
    for found in refusals:
        answer = found[f"own/{lengths}/error/{how}"]
        assert answer["got"] == _cut(4 * full)
        assert f'There are {left} of 8 examples in batch {full} of epoch 0, and remainder="error"' in answer["said"]


def test_share_without_end_ends_with_the_others_under_drop(refusals):
    _fine([found["own_without_end"] for found in refusals], [_cut(8)] * 2)


@pytest.mark.parametrize("remainder", ["drop", "pad"])
def test_share_without_examples_is_refused_on_all(remainder, refusals):
    for found in refusals:
        said = found[f"nothing/{remainder}"]["said"]
        assert said.startswith(
            "ValueError: Part 1 of the 2 that the data are read in has no examples. Give each process some"
        )


def test_share_without_batches_is_refused_on_all(refusals):
    empty = "ValueError: The source is empty: there is nothing to distribute."
    first, second = (found["nothing_of_batches"]["said"] for found in refusals)
    assert first.startswith(f"RuntimeError: Input pipeline 1 could not read its data in batch 0 of epoch 0: {empty}")
    assert second.startswith(empty)


@pytest.mark.parametrize("prefetch", [0, 2])
def test_data_set_left_early_on_all_processes_can_be_read_again(prefetch, refusals):
    whole = [[list(range(i, i + 4)) for i in range(4 * number, 40, 8)] for number in (0, 1)]
    for key, expected in {
        "closed": [x[:2] for x in whole],
        "closed/again": whole,
        "left/again": whole,
    }.items():
        name, *again = key.split("/")
        _fine([found["/".join([name, str(prefetch), *again])] for found in refusals], expected)
    for time in range(3):
        _fine([found[f"left/{prefetch}"][time] for found in refusals], [x[:2] for x in whole])


def test_iterator_closed_while_it_waits_for_another_process_gives_up_and_the_next_one_works(refusals):
    whole = [[list(range(i, i + 4)) for i in range(4 * number, 40, 8)] for number in (0, 1)]
    assert [found["closed_while_waiting"][0] for found in refusals] == [whole[0][0], whole[1][0]]
    _fine([found["closed_while_waiting"][1] for found in refusals], whole)


def test_steps_with_collectives_go_on_while_batches_are_read_ahead(refusals):
    total, checks = sum(range(400)), 5 * 9  # five times nine examples held out
    assert [found["trained"] for found in refusals] == [[total, checks, 50, 400]] * 2


def test_loops_leave_no_more_in_the_store_than_the_last_of_them(refusals):
    for one, six in (found["keys"] for found in refusals):
        assert six <= one


def test_iterators_at_different_positions_are_refused_on_all(refusals):
    """As where each process restores a checkpoint of its own: halves of two batches would make one."""
    for found in refusals:
        assert found["other_positions"]["got"] == []
        assert found["other_positions"]["said"].startswith("ValueError")


@pytest.fixture(scope="module", params=["wrong_on_one", "function_fails"])
def told(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    run_processes(data_worker.__file__, 2, 2, folder, request.param, seconds=15)
    return request.param, [json.loads((folder / f"{request.param}_{number}.json").read_text()) for number in (0, 1)]


def test_data_set_that_only_one_process_sees_to_be_wrong_is_refused_on_all_and_the_next_one_works(told):
    task, answers = told
    for name in WRONG_ON_ONE if task == "wrong_on_one" else ["function"]:
        for found in answers:
            assert found[name]["got"] == [], name
            assert "Error: " in found[name]["said"], name
        later = f"{name}/later" if task == "wrong_on_one" else "later"
        _fine([found[later] for found in answers], [[[0, 1, 2, 3], [8, 9, 10, 11]], [[4, 5, 6, 7], [12, 13, 14, 15]]])
