"""Data that stay on the devices (`cache="device"`): the same batches, positions and steps as without the cache."""

import concurrent.futures
import copy
import itertools
import pickle
import types

import flax.nnx  # noqa: F401  # where it is imported, the first call of a program looks for modules, and must not read batches
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jdist
from jdist._src.data import device_cache
from jdist._src.data.distribute import _check_cache
from jdist._src.data.shards import ProcessShare
from jdist._src.values.base import is_distributed
from jdist._src.values.per_replica import unread_rows

from laws import STRATEGIES, among, each_row

STRATEGIES_AND_VIRTUAL = {
    **STRATEGIES,
    "virtual_5": lambda: jdist.MirroredStrategy(["cpu:0", "cpu:1"], virtual_replicas=5),
}
every_strategy = pytest.mark.parametrize("name", among(STRATEGIES_AND_VIRTUAL, "mirrored_3", "sharded_4", "virtual_5"))
SIZE, EXAMPLES = 24, 61


def _source(count=EXAMPLES):
    numbers = np.arange(count)
    image = np.random.default_rng(0).normal(size=(count, 2, 3)).astype(np.float32)
    return {"number": numbers, "pair": (image, {"flag": numbers % 2 == 0, "none": None})}


def _host(tree):
    return [np.asarray(node.tree) for node in jax.tree.leaves(tree, is_leaf=is_distributed)]


def _pair(strategy, size=SIZE, **options):
    """Returns the data set without and with the cache."""
    options = {"shuffle": True, "seed": 4, "epochs": 2, **options}
    return (strategy.distribute_dataset(_source(), size, **options, cache=cache) for cache in (None, "device"))


def assert_same(elements, expected):
    for ours, theirs in itertools.zip_longest(elements, expected):
        for a, b in zip(_host(ours), _host(theirs), strict=True):
            np.testing.assert_array_equal(a, b)
            assert a.dtype == b.dtype


@every_strategy
@pytest.mark.parametrize("size, remainder", [(120, "drop"), (SIZE, "pad"), (7, "pad"), (120, "pad")])
def test_batches_weights_and_positions_are_those_without_the_cache(size, remainder, name):
    source, strategy = _source(EXAMPLES * 5), STRATEGIES_AND_VIRTUAL[name]()
    datasets = [
        strategy.distribute_dataset(source, size, shuffle=True, epochs=2, remainder=remainder, cache=cache)
        for cache in (None, "device")
    ]
    plain, cached = map(iter, datasets)
    assert len(datasets[0]) == len(datasets[1])
    for ours, theirs in itertools.zip_longest(cached, plain):
        assert_same([ours], [theirs])
        assert cached.get_state() == plain.get_state()
        assert jdist.data.stats(cached).examples == jdist.data.stats(plain).examples


def test_position_continues_with_and_without_the_cache_and_on_other_replicas(two, monkeypatch):
    monkeypatch.setattr(device_cache, "_MAX_GROUP", 4)
    plain, cached = _pair(two, size=7, remainder="pad", epochs=3)
    number = lambda elements: [
        np.asarray(batch["number"].tree).ravel()[np.asarray(weights.tree).ravel() > 0].tolist()
        for batch, weights in elements
    ]
    expected = number(plain)
    for taken in (0, 1, 5, 8, 9, 10, 26, 27):
        states = []
        for dataset in (plain, cached):
            iterator = iter(dataset)
            list(itertools.islice(iterator, taken))
            states.append(iterator.get_state())
        assert states[0] == states[1]
        for dataset in (plain, cached, *_pair(STRATEGIES["mirrored_3"](), size=7, remainder="pad", epochs=3)):
            resumed = iter(dataset)
            resumed.set_state(states[0])
            assert number(resumed) == expected[taken:]


def _train(state, batch, *rest):
    image = batch["pair"][0] * batch["number"][:, None, None]
    loss = jdist.all_reduce("mean", jnp.tanh(image).sum(0))
    return state + loss, (loss, batch["number"])


@pytest.mark.parametrize("num_steps", [None, 3])
def test_steps_are_those_without_the_cache(num_steps, strategy):
    """Central storage runs one program per step; a replica that spans devices does not gather several batches at once."""
    results = []
    for dataset in _pair(strategy):
        step = strategy.step(_train, steps_per_call=num_steps)
        state, outputs, batches = strategy.init(lambda: jnp.zeros((2, 3))), [], iter(dataset)
        while group := list(itertools.islice(batches, num_steps or 1)):
            if num_steps is None or len(group) == num_steps:
                state, out = step(state, group if num_steps else group[0])
                outputs.append(jax.device_get(out))
        results.append((np.asarray(state), outputs, step))
    (state, outputs, _), (cached_state, cached_outputs, step) = results
    assert len(outputs) == (1 if num_steps else 4)
    jax.tree.map(np.testing.assert_array_equal, cached_outputs, outputs)
    np.testing.assert_array_equal(cached_state, state)
    assert str(step.proof) == str(results[0][2].proof)


def test_batches_are_ordinary_values_in_any_order(two):
    """The leaves of a batch are its values: functions of pytrees, copies, and several steps per call in any order."""
    plain, cached = (list(dataset) for dataset in _pair(two, remainder="pad", epochs=4))
    assert jax.tree.structure(cached) == jax.tree.structure(plain)
    assert_same(jax.tree.map(lambda x: x[:, :3], cached), jax.tree.map(lambda x: x[:, :3], plain))
    assert_same(jax.device_get(cached), jax.device_get(plain))
    step = two.step(lambda state, element: _train(state, element[0]), steps_per_call=3)

    def results(elements):
        return jax.device_get(step(two.init(lambda: jnp.zeros((2, 3))), elements))

    for order in ([0, 1, 2], [3, 4, 5], [2, 1, 0], [0, 0, 1]):
        expected = results([plain[i] for i in order])
        jax.tree.map(np.testing.assert_array_equal, results([cached[i] for i in order]), expected)
    mixed = [cached[0], plain[1], cached[2]]
    jax.tree.map(np.testing.assert_array_equal, results(mixed), results(plain[:3]))
    assert step._compiled.num_signatures == 1
    with pytest.raises(ValueError, match="each input is a list of 3 elements"):
        results(cached[:2])


def test_steps_transfer_nothing_and_compile_once(two, monkeypatch):
    monkeypatch.setattr(device_cache, "_MAX_GROUP", 2)
    for dataset in (_pair(two, epochs=3), _pair(two, epochs=3)):
        _, cached = dataset
        one, three = two.step(_train), two.step(_train, steps_per_call=2)
        state = two.init(lambda: jnp.zeros((2, 3)))
        batches = iter(cached)
        traced = []
        with jax.transfer_guard("disallow"):
            for batch in itertools.islice(batches, 2):
                state, _ = one(state, batch)
                traced.append(one._compiled.num_signatures)
            for _ in range(2):
                state, _ = three(state, list(itertools.islice(batches, 2)))
                traced.append(three._compiled.num_signatures)
        assert traced == [1, 1, 1, 1]


@pytest.mark.parametrize("name", among(STRATEGIES_AND_VIRTUAL, "mirrored_8", "sharded_4"))
def test_one_program_gathers_a_group_without_communication(name, monkeypatch):
    monkeypatch.setattr(device_cache, "_MAX_GROUP", 3)
    texts, gather = [], device_cache._gather

    def compiled(*args):
        texts.append(gather.lower(*args).compile().as_text())
        return gather(*args)

    monkeypatch.setattr(device_cache, "_gather", compiled)
    _, cached = _pair(STRATEGIES_AND_VIRTUAL[name](), remainder="pad")
    assert len(jax.block_until_ready(list(cached))) == 6
    assert len(texts) == 2  # three batches in each of two epochs
    collectives = ("all-gather", "all-reduce", "all-to-all", "collective-permute")
    assert not [name for name in collectives if name in texts[0]]


@pytest.mark.parametrize("name", among(STRATEGIES_AND_VIRTUAL, "mirrored_3", "sharded_4", "virtual_5"))
def test_several_steps_take_batches_stacked(name, monkeypatch):
    """A call takes unread batches as one array per leaf, in one signature: all in a group or not, in any order, with weights."""
    monkeypatch.setattr(device_cache, "_MAX_STACKED", 4)
    gathered, gather = [], device_cache._gather_stacked
    monkeypatch.setattr(device_cache, "_gather_stacked", lambda *args: gathered.append(args) or gather(*args))
    strategy = STRATEGIES_AND_VIRTUAL[name]()
    plain, cached = (list(dataset) for dataset in _pair(strategy, size=12, remainder="pad", epochs=3))
    step = strategy.step(lambda state, element: _train(state, element[0], element[1]), steps_per_call=2)
    stacks = not any(stage.runs_one_step for stage in step._stages)

    def results(elements):
        return jax.device_get(step(strategy.init(lambda: jnp.zeros((2, 3))), elements))

    for order in ([0, 1], [2, 3], [4, 6], [5, 9], [8, 7], [9, 9]):  # an epoch has 6 batches, and its last one is padded
        jax.tree.map(
            np.testing.assert_array_equal, results([cached[i] for i in order]), results([plain[i] for i in order])
        )
        assert not stacks or all(unread_rows(cached[i][0]["number"]) for i in order)
    if stacks:
        assert len(gathered) == 5  # the first two calls share the batches 0 to 3
        assert step._compiled.num_signatures == 2
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(cached), jax.device_get(plain))


def test_unread_batches_of_different_structures_are_refused_by_name(two):
    first, second = itertools.islice(list(_pair(two))[1], 2)
    with pytest.raises(ValueError, match=r"inputs\[0\]\[1\] and inputs\[0\]\[0\] have different structures"):
        two.step(_train, steps_per_call=2)(two.init(lambda: jnp.zeros((2, 3))), [first, second["number"]])


def test_unread_batches_of_two_data_sets_are_stacked_in_one_call(two):
    (plain, cached), (others, cached_others) = _pair(two), _pair(two, shuffle=False)
    step = two.step(
        lambda state, pair: _train(state, {**pair[0], "number": pair[0]["number"] + pair[1]["number"]}),
        steps_per_call=2,
    )
    state = lambda: two.init(lambda: jnp.zeros((2, 3)))
    expected = step(state(), list(zip(list(plain)[:2], list(others)[:2], strict=True)))
    result = step(state(), list(zip(list(cached)[:2], list(cached_others)[:2], strict=True)))
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(result), jax.device_get(expected))


def test_copies_of_an_unread_batch_and_a_batch_that_a_trace_reads_first_have_its_values(two):
    plain, cached = (next(iter(dataset))["number"] for dataset in _pair(two))
    fresh = lambda: next(iter(list(_pair(two))[1]))["number"]
    for copied in (copy.copy(cached), copy.deepcopy(fresh()), pickle.loads(pickle.dumps(fresh()))):
        np.testing.assert_array_equal(copied.tree, plain.tree)
    read_in_trace = fresh()
    np.testing.assert_array_equal(jax.jit(lambda x: x + read_in_trace.tree)(0), plain.tree)
    np.testing.assert_array_equal(read_in_trace.tree, plain.tree)
    with pytest.raises(AttributeError, match="'PerReplica' object has no attribute 'wrong'"):
        _ = fresh().wrong


def test_threads_that_read_a_batch_together_get_its_values(two):
    plain, cached = (next(iter(dataset))["number"] for dataset in _pair(two))
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        for tree in pool.map(lambda _: cached.tree, range(8)):
            np.testing.assert_array_equal(tree, plain.tree)


def test_batches_are_gathered_inside_set_mesh(two):
    plain, cached = _pair(two)
    with jax.set_mesh(two.mesh), two.scope():
        assert_same(cached, plain)


def test_run_and_the_host_functions_take_cached_batches(two):
    plain, cached = (next(iter(dataset)) for dataset in _pair(two))
    mean = lambda batch: jdist.all_reduce("mean", batch["number"].sum())
    assert int(two.run(mean, (plain,))) == int(two.run(mean, (cached,)))
    for function in (
        lambda batch: two.gather(batch["number"], 0),
        lambda batch: two.reduce("sum", batch["pair"][0], axis=0),
        lambda batch: [part["number"] for part in two.local_results(batch)],
        lambda batch: batch["number"].values,
        lambda batch: batch["number"].read(),
        lambda batch: batch["number"].map(lambda x: x + 1).tree,
        lambda batch: two.put(batch)["number"].tree,
        lambda batch: two.init(lambda batch: jdist.PerReplica(batch["number"]), batch).tree,
        lambda batch: batch["number"].assign(jdist.PerReplica(np.zeros((2, 12), np.int32))).tree,
        lambda batch: batch["number"].assign_add(batch["number"]).tree,
        lambda batch: jax.jit(lambda batch: batch["number"].tree + 1)(batch),
    ):
        jax.tree.map(np.testing.assert_array_equal, function(cached), function(plain))
    assert repr(cached["pair"][0]) == "PerReplica(float32[2,12,2,3])"


def test_cached_batch_of_another_strategy_is_refused_with_its_name(two):
    _, cached = _pair(STRATEGIES["mirrored_3"]())
    with pytest.raises(ValueError, match=r"batch\['number'\] is on cpu:5, cpu:1, cpu:2, and this strategy uses cpu:0"):
        two.step(_train)(two.put(jnp.zeros((2, 3))), next(iter(cached)))


def test_arrays_are_transferred_once_for_all_iterators(two):
    _, cached = _pair(two)
    stored = []
    for dataset in (cached, cached.repeated(5)):
        next(iter(dataset))
        stored.append(dataset._cache._leaves)
    assert stored[0] is stored[1]


# The number of batches of an epoch, the bytes of a batch, and the number of batches in a group, and stacked.
GROUPS = {
    "epoch": (32, 48, 32, 32),
    "equal_parts": (33, 48, 17, 64),
    "many": (5000, 48, 32, 256),
    "most_bytes": (300, 1 << 22, 16, 16),
    "large_batches": (300, 1 << 27, 1, 1),
    "one_batch": (1, 1 << 20, 1, 1),
}


@pytest.mark.parametrize("num_batches, num_bytes, size, stacked_size", GROUPS.values(), ids=GROUPS)
def test_groups_have_equal_sizes_and_few_bytes(num_batches, num_bytes, size, stacked_size, two):
    cache = two.distribute_dataset(np.zeros((8, 4)), 4, cache="device")._cache
    cache._leaves = [jax.ShapeDtypeStruct((100, num_bytes // 4), np.uint8)]
    assert cache._group_size(4, num_batches) == size
    assert cache._stacked_size(4, num_batches) == stacked_size


def test_doubles_are_converted_with_the_warning(two, caplog):
    dataset = two.distribute_dataset(np.arange(8.0), 4, cache="device")
    assert next(iter(dataset)).tree.dtype == np.float32
    assert "source (float64[8]): JAX converts 64-bit floats to 32 bits by default" in caplog.text


REFUSED = {
    "unknown": (dict(cache="host"), r"`cache` must be \"device\" or None, got 'host'"),
    "stream": (
        dict(source=lambda: iter([np.arange(3)] * 4), cache="device"),
        r"cache=\"device\" stores arrays on the devices, and the source is function\. Pass a tree of arrays",
    ),
    "examples": (dict(source=range(9), cache="device"), "the source is range"),
}


@each_row("options, says", REFUSED.values(), ids=REFUSED)
def test_source_that_cannot_be_cached_is_refused(options, says, two):
    with pytest.raises(ValueError, match=says):
        two.distribute_dataset(**{"source": np.zeros(12), "batch_size": 4, **options})


def test_several_processes_are_refused(two):
    config = two.distribute_dataset(np.zeros(12), 4)._config
    with pytest.raises(ValueError, match="devices of a single process, and this strategy has devices of 3 processes"):
        _check_cache("device", config, ProcessShare((0,), 3, 0, 3), None)


def test_arrays_that_do_not_fit_are_refused_with_the_bytes():
    device = types.SimpleNamespace(memory_stats=lambda: {"bytes_limit": 5_000_000_000, "bytes_in_use": 2_000_000_000})
    silent = types.SimpleNamespace(memory_stats=lambda: None)
    replicas = types.SimpleNamespace(mesh=types.SimpleNamespace(local_devices=[silent, device]))
    device_cache._check_memory(2_900_000_000, replicas)
    with pytest.raises(ValueError, match=r"stores 3\.10 GB on each device, and .* has 3\.00 GB of memory left\. Omit"):
        device_cache._check_memory(3_100_000_000, replicas)
