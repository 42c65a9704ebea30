"""The rows of a batch that each process holds, and the part of the source that it reads."""

import itertools

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest

import jdist
from jdist._src.data.shards import ProcessShare, check_split, process_share
from jdist.data import AutoShardPolicy, InputContext

from laws import STRATEGIES, each_row

few = hypothesis.settings(max_examples=100, deadline=None, derandomize=True, database=None)
REPLICAS = {name: STRATEGIES[name]() for name in ("one_device", "mirrored_1", "mirrored_2", "mirrored_3")}
every_strategy = each_row("strategy", REPLICAS.values(), ids=REPLICAS)


# The policies


@pytest.mark.parametrize("policy", AutoShardPolicy)
def test_policy_is_a_member_or_its_name_in_any_case(policy):
    names = [policy.name, policy.name.lower(), policy.name.title()]
    assert [AutoShardPolicy.of(given) for given in [policy, *names]] == [policy] * 4


def test_policies_have_the_values_of_tensorflow():
    assert {policy.name: policy.value for policy in AutoShardPolicy} == {
        "OFF": -1,
        "AUTO": 0,
        "FILE": 1,
        "DATA": 2,
        "HINT": 3,
    }


@each_row("given", ["files", "", " data", None, 1, True, False, ["data"], "AutoShardPolicy.DATA"])
def test_policy_of_an_unknown_name_is_refused_with_the_valid_names(given):
    with pytest.raises(
        ValueError, match=r"is not a policy for `auto_shard`; take one of 'OFF', 'AUTO', 'FILE', 'DATA', 'HINT'"
    ) as e:
        AutoShardPolicy.of(given)
    assert str(e.value).startswith(repr(given))


# The context of an input pipeline


def test_context_returns_the_batch_size_per_replica():
    context = InputContext(num_input_pipelines=2, input_pipeline_id=1, num_replicas_in_sync=6)
    assert context.get_per_replica_batch_size(12) == 2
    assert (context.num_input_pipelines, context.input_pipeline_id, context.num_replicas_in_sync) == (2, 1, 6)


@each_row(
    "replicas, size, says",
    [
        (6, 13, r"batch of 13 examples cannot be split over 6 replicas \(1 left over\).*use 12 or 18\."),
        (4, 10, r"batch of 10 examples cannot be split over 4 replicas \(2 left over\).*use 8 or 12\."),
        (4, 3, r"batch of 3 examples cannot be split over 4 replicas \(3 left over\).*use 4\."),
        (4, 0, r"batch of 0 examples cannot be split over 4 replicas.*use 4\."),
        (4, -4, r"batch of -4 examples cannot be split over 4 replicas.*use 4\."),
    ],
)
def test_context_refuses_a_batch_that_cannot_be_split_with_the_nearest_sizes(replicas, size, says):
    with pytest.raises(ValueError, match=says):
        InputContext(num_replicas_in_sync=replicas).get_per_replica_batch_size(size)


@each_row(
    "wrong, says",
    [
        ((2, 5), r"`input_pipeline_id` must be less than .*input_pipeline_id=5 and num_input_pipelines=2"),
        ((2, 2), r"input_pipeline_id=2 and num_input_pipelines=2"),
        ((2, -1), r"`input_pipeline_id` must be an integer >= 0, got -1"),
        ((0, 0), r"`num_input_pipelines` must be an integer >= 1, got 0"),
        ((1, 0, 0), r"`num_replicas_in_sync` must be an integer >= 1, got 0"),
    ],
)
def test_inconsistent_context_is_refused(wrong, says):
    with pytest.raises(ValueError, match=says):
        InputContext(*wrong)


@each_row("wrong", [(2.0, 1), (2, "1"), (2, 1, None), (True, 0)])
def test_context_argument_that_is_not_an_integer_is_refused(wrong):
    with pytest.raises(TypeError, match="must be an integer >= [01], got"):
        InputContext(*wrong)


def test_context_names_the_argument_of_a_batch_that_cannot_be_split():
    with pytest.raises(ValueError, match="`global_batch_size` is the number of examples of all replicas together"):
        InputContext(num_replicas_in_sync=2).get_per_replica_batch_size(3)
    with pytest.raises(TypeError, match=r"`global_batch_size` must be an integer, got 4\.0"):
        InputContext(num_replicas_in_sync=2).get_per_replica_batch_size(4.0)


def test_context_as_text_names_its_pipeline():
    assert str(InputContext(3, 2, 12)) == "jdist.InputContext(input pipeline id 2, total: 3)"


def test_default_context_has_one_replica():
    context = InputContext()
    assert (context.num_input_pipelines, context.input_pipeline_id, context.num_replicas_in_sync) == (1, 0, 1)
    assert [context.get_per_replica_batch_size(size) for size in (1, 7)] == [1, 7]


@every_strategy
def test_function_receives_the_context_of_its_strategy(strategy):
    given = []
    n = strategy.num_replicas_in_sync

    def batches(context):
        given.append(context)
        size = context.get_per_replica_batch_size(6 * n)
        return (np.arange(i, i + size) for i in range(0, 12 * n, size))

    dataset = strategy.distribute_datasets_from_function(batches)
    assert given == [InputContext(1, 0, n)]
    first, second = dataset
    assert np.ravel(first.tree).tolist() == list(range(6 * n))
    assert np.ravel(second.tree).tolist() == list(range(6 * n, 12 * n))


@few
@hypothesis.given(st.integers(-5, 60), st.integers(1, 12))
def test_batch_is_refused_if_and_only_if_it_cannot_be_split_evenly(size, replicas):
    if size > 0 and size % replicas == 0:
        return check_split(size, replicas)
    near = {(size // replicas) * replicas, (size // replicas + 1) * replicas} if size > 0 else {replicas}
    with pytest.raises(ValueError) as caught:
        check_split(size, replicas)
    for good in near - {0}:
        check_split(good, replicas)
        assert str(good) in str(caught.value).partition("use")[2]


# Shares


@st.composite
def layouts(draw):
    """Draws the shares of processes that hold arbitrary replicas."""
    n = draw(st.integers(1, 8))
    owner = draw(st.lists(st.integers(0, 3), min_size=n, max_size=n))
    used = sorted(set(owner))
    return [
        ProcessShare(tuple(i for i in range(n) if owner[i] == process), n, number, len(used))
        for number, process in enumerate(used)
    ]


@few
@hypothesis.given(layouts(), st.integers(1, 6), st.data())
def test_rows_of_shards_of_all_processes_are_the_batch_with_each_row_once(shares, each, data):
    n = shares[0].num_replicas
    size = n * each
    shards = data.draw(st.integers(1, size))
    sizes, held = {}, []
    for share in shares:
        parts = share.rows_of_shards(size, shards)
        assert [part.shard for part in parts] == sorted({part.shard for part in parts})
        for part in parts:
            assert sizes.setdefault(part.shard, part.size) == part.size
            assert 0 < len(part.rows) <= part.size
            assert part.rows.tolist() == sorted(set(part.rows.tolist()))
            assert set(part.rows.tolist()) <= set(range(part.size))
            held += [(part.shard, row) for row in part.rows.tolist()]
    # The numbers of rows per shard differ by at most one, and every row is held by one process.
    assert sorted(sizes) == list(range(shards))
    assert sum(sizes.values()) == size
    assert max(sizes.values()) - min(sizes.values()) <= 1
    assert sorted(held) == [(shard, row) for shard in range(shards) for row in range(sizes[shard])]


@few
@hypothesis.given(layouts(), st.integers(1, 6), st.data())
def test_rows_of_shards_are_the_rows_of_the_replicas_in_order(shares, each, data):
    n = shares[0].num_replicas
    size = n * each
    shards = data.draw(st.integers(1, size))
    starts = [size * shard // shards for shard in range(shards)]
    for share in shares:
        rows = [starts[part.shard] + row for part in share.rows_of_shards(size, shards) for row in part.rows.tolist()]
        assert rows == [i * each + row for i in share.replicas for row in range(each)]


@few
@hypothesis.given(layouts(), st.integers(1, 40), st.data())
def test_shards_of_a_batch_that_replicas_do_not_divide_have_all_examples_and_the_padding(shares, size, data):
    n = shares[0].num_replicas
    shards = data.draw(st.integers(1, size))
    held, padding = [], 0
    for share in shares:
        parts = share.rows_of_shards(size, shards)
        assert sum(len(part.rows) for part in parts) == len(share.replicas) * -(-size // n)
        for part in parts:
            held += [(part.shard, row) for row in part.rows.tolist() if row < part.size]
            padding += sum(part.rows >= part.size)
    sizes = [size * (shard + 1) // shards - size * shard // shards for shard in range(shards)]
    assert sorted(held) == [(shard, row) for shard in range(shards) for row in range(sizes[shard])]
    assert padding == -(-size // n) * n - size
    own = [share.rows_of_own_shard(size) for share in shares]
    assert sum(part.size for (part,) in own) == size
    assert all(part.size <= len(part.rows) for (part,) in own)


@pytest.mark.parametrize("size", [9, 10, 11])
def test_equal_processes_read_one_shard_each_of_a_batch_that_replicas_do_not_divide(size):
    shares = [ProcessShare((0, 1), 4, 0, 2), ProcessShare((2, 3), 4, 1, 2)]
    assert [[part.shard for part in share.rows_of_shards(size, 2)] for share in shares] == [[0], [1]]


@few
@hypothesis.given(layouts(), st.integers(1, 6))
def test_rows_of_own_shards_are_the_rows_of_the_replicas(shares, each):
    n = shares[0].num_replicas
    parts = [share.rows_of_own_shard(n * each) for share in shares]
    assert [part.shard for (part,) in parts] == [share.pipeline for share in shares]
    assert [part.size for (part,) in parts] == [len(share.replicas) * each for share in shares]
    assert sum(part.size for (part,) in parts) == n * each
    for (part,) in parts:
        assert part.rows.tolist() == list(range(part.size))


def test_equal_processes_read_one_shard_each():
    shares = [ProcessShare((0, 1), 4, 0, 2), ProcessShare((2, 3), 4, 1, 2)]
    assert [[part.shard for part in share.rows_of_shards(8, 2)] for share in shares] == [[0], [1]]


@every_strategy
def test_single_process_has_the_complete_share(strategy):
    n = strategy.num_replicas_in_sync
    assert process_share(strategy.replicas) == ProcessShare(tuple(range(n)), n, 0, 1)


# Policies in one process

PATHS = [0, 5, 10]


def _files():
    return jdist.data.Files(PATHS, lambda i: np.arange(i, i + 5))


class _Sharded:
    """A source with `shard`, which records the arguments."""

    def __init__(self, log, first=0, step=1):
        self.log, self.first, self.step = log, first, step

    def shard(self, num_shards, index):
        self.log.append((num_shards, index))
        return _Sharded(self.log, index, num_shards)

    def __iter__(self):
        return iter(np.arange(15)[self.first :: self.step])


SOURCES = {
    "arrays": lambda: np.arange(15),
    "stream": lambda: _Sharded([]),
    "batches": lambda: (np.arange(15)[i : i + 6] for i in range(0, 15, 6)),
    "files": _files,
}


@each_row(
    "kind, policy",
    [
        *itertools.product(SOURCES, [AutoShardPolicy.AUTO, AutoShardPolicy.DATA, AutoShardPolicy.OFF]),
        ("files", AutoShardPolicy.FILE),
        ("stream", AutoShardPolicy.HINT),
    ],
)
@each_row("shuffle", [False, True])
def test_single_process_reads_everything_under_every_policy(kind, policy, shuffle, two):
    if shuffle and kind in ("stream", "batches"):
        return
    size = None if kind == "batches" else 6
    found = two.distribute_dataset(SOURCES[kind](), size, auto_shard=policy, remainder="pad", shuffle=shuffle, seed=2)
    expected = REPLICAS["one_device"].distribute_dataset(
        SOURCES[kind](), size, auto_shard="data", remainder="pad", shuffle=shuffle, seed=2
    )
    pairs = lambda data: [[np.ravel(part.tree).tolist() for part in element] for element in data]
    batches = pairs(found)
    assert batches == pairs(expected)
    assert sorted(x for rows, weights in batches for x, w in zip(rows, weights, strict=True) if w) == list(range(15))


def test_hint_calls_shard_with_the_index_of_this_process():
    log = []
    source = _Sharded(log)
    dataset = REPLICAS["mirrored_2"].distribute_dataset(source, 4, auto_shard="hint")
    assert log == [(1, 0)]
    assert np.ravel([batch.tree for batch in dataset]).tolist() == list(range(12))
    assert log == [(1, 0)]


@each_row("source", [np.arange(8), [1, 2], _files()], ids=["array", "list", "files"])
def test_hint_without_shard_is_refused_with_the_type_of_the_source(source):
    says = rf"auto_shard=\"hint\" calls `shard\(num_shards, index\)` of the source, but {type(source).__name__} does not have"
    with pytest.raises(ValueError, match=says):
        REPLICAS["mirrored_2"].distribute_dataset(source, 4, auto_shard="hint")


@each_row("source", [np.arange(8), (i for i in range(3))], ids=["array", "generator"])
def test_file_policy_without_files_is_refused_with_the_type_of_the_source(source):
    says = rf"auto_shard=\"file\" needs a source of files, got {type(source).__name__}.*jdist\.data\.Files"
    with pytest.raises(ValueError, match=says):
        REPLICAS["mirrored_2"].distribute_dataset(source, 4, auto_shard=AutoShardPolicy.FILE)


def test_unknown_policy_of_a_data_set_is_refused_by_name():
    with pytest.raises(ValueError, match=r"'rows' is not a policy for `auto_shard`; take one of 'OFF'"):
        REPLICAS["mirrored_2"].distribute_dataset(np.arange(8), 4, auto_shard="rows")


def test_auto_with_enough_files_does_not_warn(caplog):
    REPLICAS["mirrored_2"].distribute_dataset(jdist.data.Files(["a"], lambda path: np.arange(8)), 4)
    assert caplog.messages == []
