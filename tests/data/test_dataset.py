"""Distributed batches: order and placement of examples, equal for any number of replicas."""

import logging

import chex
import jax
import numpy as np
import pytest

import jdist

from laws import STRATEGIES, arrays, assert_resumes_at_every_batch, each_row, replica_devices

REPLICAS = {name: make() for name, make in STRATEGIES.items()}
every_strategy = each_row("strategy", REPLICAS.values(), ids=REPLICAS)
ORDERED = [(shuffle, remainder) for shuffle in (False, True) for remainder in ("drop", "pad")]
BATCH = 24  # every number of replicas divides it
EXAMPLES = 60  # neither number divides the other


def _source(count=EXAMPLES):
    numbers = np.arange(count)
    image = np.random.default_rng(0).normal(size=(count, 2, 3)).astype(np.float32)
    return {"number": numbers, "pair": (image, {"flag": numbers % 2 == 0, "none": None})}


def _global(element):
    """Returns the global batch of an element, and its weights, on the host."""
    pair = element if isinstance(element, tuple) else (element, None)
    return jax.tree.map(lambda x: np.asarray(x).reshape(-1, *x.shape[2:]), arrays(pair))


def _numbers(dataset):
    """Returns the numbers of the examples without padding, one list per batch."""
    batches = []
    for element in dataset:
        batch, weights = _global(element)
        keep = slice(None) if weights is None else weights > 0
        batches.append(batch["number"][keep].tolist())
    return batches


@every_strategy
@each_row("shuffle, remainder", ORDERED)
def test_global_batches_are_the_same_for_any_number_of_replicas(shuffle, remainder, strategy):
    options = dict(shuffle=shuffle, seed=5, epochs=2, remainder=remainder)
    dataset = strategy.distribute_dataset(_source(), BATCH, **options)
    expected = REPLICAS["one_device"].distribute_dataset(_source(), BATCH, **options)
    assert len(dataset) == len(expected) == len(list(dataset))
    for ours, theirs in zip(dataset, expected, strict=True):
        chex.assert_trees_all_equal(_global(ours), _global(theirs))


@every_strategy
@each_row("shuffle, remainder", ORDERED)
def test_rows_of_a_batch_match_and_are_placed_on_their_replica(shuffle, remainder, strategy):
    n, source = strategy.num_replicas_in_sync, _source()
    for element in strategy.distribute_dataset(source, BATCH, shuffle=shuffle, remainder=remainder):
        batch, weights = element if remainder == "pad" else (element, None)
        rows = _global(element)[0]["number"]
        chex.assert_trees_all_equal(
            arrays(batch), jax.tree.map(lambda x, i=rows: x[i].reshape(n, BATCH // n, *x.shape[1:]), source)
        )
        for part, devices in zip(strategy.local_results(batch), replica_devices(strategy), strict=True):
            assert part["number"].devices() == devices
        if weights is not None:
            assert isinstance(weights, jdist.PerReplica)
            assert (weights.tree.shape, weights.tree.dtype) == ((n, BATCH // n), np.float32)


@every_strategy
def test_element_spec_is_the_batch_that_a_compiled_step_takes(strategy):
    dataset = strategy.distribute_dataset({"x": np.zeros((9, 3)), "y": np.arange(9)}, 5, remainder="pad")
    spec = dataset.element_spec
    element = next(iter(dataset))
    shapes = lambda tree: [(x.shape, x.dtype) for x in jax.tree.leaves(tree)]
    assert shapes(spec) == shapes(element)
    assert jax.tree.structure(spec) == jax.tree.structure(element)

    def step(state, element):
        batch, weights = element
        return state + jdist.all_reduce("sum", (batch["x"].sum(1) * weights).sum()), None

    state = strategy.put(np.float32(0))
    assert strategy.compile(strategy.step(step), state, spec).memory_analysis() is not None


def test_element_spec_does_not_read_arrays_and_reads_one_example_of_a_sequence(two):
    read = []

    class Recording:
        def __len__(self):
            return 9

        def __getitem__(self, number):
            read.append(number)
            return {"x": np.zeros(3)}

    assert str(two.distribute_dataset(Recording(), 4).element_spec) == "{'x': PerReplica(float32[2,2,3])}"
    assert read == [0]


@every_strategy
def test_every_batch_of_any_size_is_filled_up_to_a_multiple_of_the_replicas(strategy):
    parts = strategy.replicas.num_parts
    for size in (1, 5, 10):
        dataset = strategy.distribute_dataset(_source(), size, shuffle=True, remainder="pad")
        expected = REPLICAS["one_device"].distribute_dataset(_source(), size, shuffle=True)
        assert _numbers(dataset) == _numbers(expected)
        for batch, weights in dataset:
            assert weights.tree.size == -(-size // parts) * parts
            assert np.asarray(weights.tree).ravel().tolist() == [1.0] * size + [0.0] * (weights.tree.size - size)
            assert len(_global((batch, weights))[0]["number"]) == weights.tree.size


def test_weights_of_full_batches_are_transferred_once(two):
    first, second, last = (weights.tree for _, weights in two.distribute_dataset(_source(), BATCH, remainder="pad"))
    assert second is first
    assert np.asarray(last).sum() == 12
    iterator = iter(two.distribute_dataset(_source(), BATCH, remainder="pad", prefetch=0))
    next(iterator)[1].tree.delete()  # donated to a program of the user
    assert np.asarray(next(iterator)[1].tree).sum() == BATCH


def _pair(x, y):
    return {"sum": jdist.all_reduce("sum", (x.sum(), y.sum())), "own": x[0]}


@every_strategy
def test_batch_has_the_structure_of_the_source_and_unpacks_into_run(strategy):
    x, y = np.arange(24, dtype=np.float32), np.arange(24, dtype=np.int32) % 3
    for x_batch, y_batch in strategy.distribute_dataset((x, y), BATCH):
        assert isinstance(x_batch, jdist.PerReplica) and isinstance(y_batch, jdist.PerReplica)
        outputs = strategy.run(_pair, args=(x_batch, y_batch))
    assert [float(number) for number in outputs["sum"]] == [x.sum(), y.sum()]
    np.testing.assert_array_equal(np.ravel(outputs["own"].tree), np.ravel(x_batch.tree[:, 0]))
    (named,) = strategy.distribute_dataset({"x": x, "none": None, "both": [y, (x, y)]}, BATCH)
    whole = strategy.run(lambda batch: _pair(batch["x"], batch["both"][1][1]), (named,))
    assert [float(number) for number in whole["sum"]] == [x.sum(), y.sum()]
    assert named["none"] is None and isinstance(named["both"][1][0], jdist.PerReplica)


@every_strategy
def test_padded_batch_is_a_pair_of_batch_and_weights(strategy):
    x, y = np.arange(20, dtype=np.float32), np.arange(20, dtype=np.int32)
    weighted = lambda x, y, weights: jdist.all_reduce("sum", ((x * weights).sum(), (y * weights).sum()))
    for (x_batch, y_batch), weights in strategy.distribute_dataset((x, y), BATCH, remainder="pad"):
        assert [float(number) for number in strategy.run(weighted, (x_batch, y_batch, weights))] == [x.sum(), y.sum()]
        assert all(isinstance(value, jdist.PerReplica) for value in (x_batch, y_batch, weights))


def test_step_of_a_batch_of_several_leaves_compiles_to_the_program_of_one_wrapper(two):
    def step(w, batch):
        x, y = batch
        return w - 0.1 * jdist.all_reduce("mean", ((x * w - y) * x).mean()), ()

    (batch,) = two.distribute_dataset((np.ones(BATCH, np.float32), np.zeros(BATCH, np.float32)), BATCH)
    w, wrapped = two.put(np.float32(1)), jdist.PerReplica(arrays(batch))
    texts = [two.step(step).lower(w, one).as_text() for one in (batch, wrapped)]
    assert texts[0] == texts[1]


def test_dataset_smaller_than_a_batch_is_padded(two):
    ((batch, weights),) = two.distribute_dataset(np.arange(3), 8, remainder="pad")
    np.testing.assert_array_equal(batch.tree, [[0, 1, 2, 0], [0, 0, 0, 0]])  # the first example is the padding
    np.testing.assert_array_equal(weights.tree, [[1, 1, 1, 0], [0, 0, 0, 0]])


def test_dataset_that_drops_examples_warns_once_with_their_number(two, caplog):
    with caplog.at_level(logging.WARNING, logger="jdist"):
        dataset = two.distribute_dataset(_source(), BATCH, epochs=3)
        for _ in range(2):
            _numbers(dataset)
    (message,) = caplog.messages
    assert "drops 12 of 60 examples per epoch, which do not fill a batch of 24" in message
    assert 'remainder="pad" to keep them' in message


@pytest.mark.parametrize("count, remainder", [(48, "drop"), (60, "pad")])
def test_dataset_that_drops_nothing_does_not_warn(count, remainder, two, caplog):
    with caplog.at_level(logging.DEBUG, logger="jdist"):
        _numbers(two.distribute_dataset(_source(count), BATCH, remainder=remainder))
    assert caplog.messages == []


def test_position_between_filled_up_batches_continues_on_another_number_of_replicas():
    options = dict(batch_size=7, shuffle=True, epochs=2, remainder="pad")
    dataset = lambda strategy: strategy.distribute_dataset(np.arange(EXAMPLES), **options)
    others = [REPLICAS[name] for name in ("one_device", "mirrored_2", "mirrored_8")]
    assert_resumes_at_every_batch(dataset, REPLICAS["mirrored_3"], others)


SPLIT = r"batch of {} examples cannot be split over 2 replicas"
REFUSED = {
    "batch_between": (dict(batch_size=5), SPLIT.format(5) + r" \(1 left over\).*use 4 or 6"),
    "batch_below": (dict(batch_size=1), SPLIT.format(1) + r" \(1 left over\).*use 2, or pass remainder=\"pad\""),
    "batch_of_nothing": (dict(batch_size=0), SPLIT.format(0) + r".*use 2\."),
    "batch_negative": (dict(batch_size=-2), SPLIT.format(-2) + r".*use 2\."),
    "no_full_batch": (
        dict(batch_size=14),
        r"12 examples do not fill one batch of 14.*smaller `batch_size`, or pass remainder=\"pad\"",
    ),
    "remainder": (dict(remainder="keep"), r"`remainder` must be \"drop\", \"pad\" or \"error\", got 'keep'"),
    "seed_negative": (dict(seed=-1), r"`seed` must be an integer from 0 to 2\*\*64 - 1, got -1"),
    "seed_too_large": (dict(seed=2**64), r"`seed` must be an integer from 0 to 2\*\*64 - 1, got 18446744073709551616"),
    "no_epoch": (dict(epochs=0), r"`epochs` must be at least 1, or None for an infinite data set, got 0"),
    "empty": (dict(source={"x": np.zeros((0, 3))}), r"The source is empty: there is nothing to distribute"),
    **{
        f"{name}_{value}": ({name: value}, rf"`{name}` must be an integer, got {value}")
        for name, value in (
            ("batch_size", 4.0),
            ("batch_size", True),
            ("seed", 1.5),
            ("prefetch", 1.5),
            ("epochs", 1.5),
        )
    },
    **{
        f"shuffle_{value!r}": (dict(shuffle=value), r"`shuffle` must be True, False or None, got")
        for value in ("no", "", 1, 0, [], 0.0)
    },
}


@each_row("options, says", REFUSED.values(), ids=REFUSED)
def test_dataset_that_cannot_be_distributed_is_refused(options, says, two):
    with pytest.raises(TypeError if "integer, got" in says or "shuffle" in options else ValueError, match=says):
        two.distribute_dataset(**{"source": np.zeros(12), "batch_size": 4, **options})


def test_batch_smaller_than_the_number_of_replicas_is_refused_with_the_minimum():
    says = r"batch of 7 examples .* over 8 replicas \(7 left over\).*use 8, or pass remainder=\"pad\", which fills up"
    with pytest.raises(ValueError, match=says):
        REPLICAS["mirrored_8"].distribute_dataset(np.zeros(12), 7)


def test_shuffle_may_be_a_numpy_bool(two):
    shuffled, expected = (two.distribute_dataset(np.arange(8), 4, shuffle=flag, seed=2) for flag in (np.True_, True))
    assert [x.tree.tolist() for x in shuffled] == [x.tree.tolist() for x in expected]


def test_reshuffled_data_set_has_another_order_of_the_same_examples(two):
    dataset = two.distribute_dataset(np.arange(32), 4, shuffle=True, seed=3, epochs=2)
    orders = [[x for batch in dataset.reshuffled(i) for x in batch.tree.ravel().tolist()] for i in (0, 1, 0)]
    original = [x for batch in dataset for x in batch.tree.ravel().tolist()]
    assert [sorted(order[:32]) for order in orders] == [list(range(32))] * 3
    assert orders[0] == orders[2]
    assert len({tuple(order) for order in (original, *orders)}) == 3
    assert all(order[:32] != order[32:] for order in orders)


def test_reshuffled_data_set_that_is_not_shuffled_is_the_same(two):
    dataset = two.distribute_dataset(np.arange(8), 4).reshuffled(5)
    assert [batch.tree.ravel().tolist() for batch in dataset] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    with pytest.raises(ValueError, match="`index` must be an integer >= 0, got -1"):
        dataset.reshuffled(-1)
