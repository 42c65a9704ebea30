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
    assert InputContext() == InputContext(1, 0, 1)
    assert [InputContext().get_per_replica_batch_size(size) for size in (1, 7)] == [1, 7]


NO_SPLIT = r"batch of {} examples cannot be split over {} replicas"
# The arguments of the context, the global batch size if it is requested, and the error.
WRONG_CONTEXTS = {
    "one_over": ((1, 0, 6), 13, ValueError, NO_SPLIT.format(13, 6) + r" \(1 left over\).*use 12 or 18\."),
    "two_over": ((1, 0, 4), 10, ValueError, NO_SPLIT.format(10, 4) + r" \(2 left over\).*use 8 or 12\."),
    "below": ((1, 0, 4), 3, ValueError, NO_SPLIT.format(3, 4) + r" \(3 left over\).*use 4\."),
    "nothing": ((1, 0, 4), 0, ValueError, NO_SPLIT.format(0, 4) + r".*use 4\."),
    "negative": ((1, 0, 4), -4, ValueError, NO_SPLIT.format(-4, 4) + r".*use 4\."),
    "names_its_argument": (
        (1, 0, 2),
        3,
        ValueError,
        "`global_batch_size` is the number of examples of all replicas together",
    ),
    "fraction": ((1, 0, 2), 4.0, TypeError, r"`global_batch_size` must be an integer, got 4\.0"),
    "pipeline_5": (
        (2, 5),
        None,
        ValueError,
        r"`input_pipeline_id` must be less than .*input_pipeline_id=5 and num_input_pipelines=2",
    ),
    "pipeline_2": ((2, 2), None, ValueError, r"input_pipeline_id=2 and num_input_pipelines=2"),
    "pipeline_negative": ((2, -1), None, ValueError, r"`input_pipeline_id` must be an integer >= 0, got -1"),
    "no_pipelines": ((0, 0), None, ValueError, r"`num_input_pipelines` must be an integer >= 1, got 0"),
    "no_replicas": ((1, 0, 0), None, ValueError, r"`num_replicas_in_sync` must be an integer >= 1, got 0"),
    **{
        str(wrong): (wrong, None, TypeError, "must be an integer >= [01], got")
        for wrong in ((2.0, 1), (2, "1"), (2, 1, None), (True, 0))
    },
}


@each_row("arguments, size, error, says", WRONG_CONTEXTS.values(), ids=WRONG_CONTEXTS)
def test_wrong_context_or_batch_size_is_refused(arguments, size, error, says):
    with pytest.raises(error, match=says):
        InputContext(*arguments).get_per_replica_batch_size(size)


def test_context_as_text_names_its_pipeline():
    assert str(InputContext(3, 2, 12)) == "jdist.InputContext(input pipeline id 2, total: 3)"


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
@hypothesis.given(layouts(), st.integers(1, 48), st.data())
def test_rows_of_shards_are_the_batch_with_each_row_once_in_the_order_of_the_replicas_and_the_padding(
    shares, size, data
):
    n = shares[0].num_replicas
    each = -(-size // n)
    shards = data.draw(st.integers(1, size))
    starts = [size * shard // shards for shard in range(shards + 1)]
    sizes = np.diff(starts).tolist()  # they differ by at most one
    held, padding = [], 0
    for share in shares:
        parts = share.rows_of_shards(size, shards)
        assert [part.shard for part in parts] == sorted({part.shard for part in parts})
        assert [part.size for part in parts] == [sizes[part.shard] for part in parts]
        assert all(part.rows.tolist() == sorted(set(part.rows.tolist())) != [] for part in parts)
        assert sum(len(part.rows) for part in parts) == len(share.replicas) * each
        if size % n == 0:
            rows = [starts[part.shard] + row for part in parts for row in part.rows.tolist()]
            assert rows == [i * each + row for i in share.replicas for row in range(each)]
        held += [(part.shard, row) for part in parts for row in part.rows.tolist() if row < part.size]
        padding += sum((part.rows >= part.size).sum() for part in parts)
    assert sorted(held) == [(shard, row) for shard in range(shards) for row in range(sizes[shard])]
    assert padding == each * n - size


@few
@hypothesis.given(layouts(), st.integers(1, 48))
def test_rows_of_own_shards_are_the_rows_of_the_replicas(shares, size):
    n = shares[0].num_replicas
    parts = [share.rows_of_own_shard(size) for share in shares]
    assert sum(part.size for (part,) in parts) == size
    for share, (part,) in zip(shares, parts, strict=True):
        assert part.shard == share.pipeline
        assert part.size <= len(part.rows) == len(share.replicas) * -(-size // n)
        assert size % n or part.rows.tolist() == list(range(part.size))


@each_row("size", [8, 9, 10, 11])
def test_equal_processes_read_one_shard_each(size):
    shares = [ProcessShare((0, 1), 4, 0, 2), ProcessShare((2, 3), 4, 1, 2)]
    assert [[part.shard for part in share.rows_of_shards(size, 2)] for share in shares] == [[0], [1]]


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


HINT = r"auto_shard=\"hint\" calls `shard\(num_shards, index\)` of the source, but {} does not have"
FILE = r"auto_shard=\"file\" needs a source of files, got {}.*jdist\.data\.Files"
NO_POLICY = {
    "hint_of_an_array": (np.arange(8), "hint", HINT.format("ndarray")),
    "hint_of_a_list": ([1, 2], "hint", HINT.format("list")),
    "hint_of_files": (_files(), "hint", HINT.format("Files")),
    "file_of_an_array": (np.arange(8), AutoShardPolicy.FILE, FILE.format("ndarray")),
    "file_of_a_generator": ((i for i in range(3)), AutoShardPolicy.FILE, FILE.format("generator")),
    "unknown": (np.arange(8), "rows", r"'rows' is not a policy for `auto_shard`; take one of 'OFF'"),
}


@each_row("source, policy, says", NO_POLICY.values(), ids=NO_POLICY)
def test_policy_that_the_source_does_not_have_is_refused(source, policy, says):
    with pytest.raises(ValueError, match=says):
        REPLICAS["mirrored_2"].distribute_dataset(source, 4, auto_shard=policy)


def test_auto_with_enough_files_does_not_warn(caplog):
    REPLICAS["mirrored_2"].distribute_dataset(jdist.data.Files(["a"], lambda path: np.arange(8)), 4)
    assert caplog.messages == []
