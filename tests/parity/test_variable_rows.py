"""Rows VA of `rows.txt`: writes by the replicas, and reads and writes by the host."""

import copy

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jdist

from laws import STRATEGIES, assert_in_step, each_row

AGGREGATIONS = ["none", "sum", "mean", "only_first_replica"]
PLACES = [("on_write", aggregation) for aggregation in AGGREGATIONS]
PLACES += [("on_read", aggregation) for aggregation in AGGREGATIONS[1:]]


def _made(strategy, value, synchronization, aggregation="none", **options):
    with strategy.scope():
        return jdist.variable(value, synchronization=synchronization, aggregation=aggregation, **options)


def _written(strategy, variable, write):
    """Returns the variable after a step that writes `write(value, replica index)` on each replica."""
    return strategy.step(lambda old: (write(old, _number()), None))(variable)[0]


def _number():
    return jdist.replica_id().astype(jnp.float32)


def _components(variable):
    return [np.asarray(x).tolist() for x in variable.values]


def _per_replica(strategy, *values):
    return strategy.put(jdist.PerReplica(np.float32(values)))


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_va1_value_without_synchronization_is_one_per_replica(aggregation, strategy):
    value = _made(strategy, 1.0, "none", aggregation)
    assert isinstance(value, jdist.PerReplica)
    n = strategy.num_replicas_in_sync
    assert _components(_written(strategy, value, lambda old, number: old + number)) == [1.0 + i for i in range(n)]


def test_va2_value_without_synchronization_is_allowed_on_one_device():
    assert _components(_made(STRATEGIES["one_device"](), 1.0, "none")) == [1.0]


def test_va3_unknown_choice_is_an_error(two):
    with pytest.raises(ValueError, match=r"Invalid variable synchronization mode: 'x'; take one of 'AUTO', 'NONE'"):
        _made(two, 1.0, "x")
    message = r"Invalid variable aggregation mode: 'x'; take one of 'NONE', 'SUM', 'MEAN', 'ONLY_FIRST_REPLICA'"
    for make in (lambda: _made(two, 1.0, "auto", "x"), lambda: jdist.Mirrored(1.0, "x")):
        with pytest.raises(ValueError, match=message):
            make()


def test_va4_sync_on_read_value_is_not_trainable_by_default(strategy):
    assert jdist.trainable(_made(strategy, 1.0, "on_read", "sum")) is False
    assert jdist.trainable(_made(strategy, 1.0, "on_read", "sum", trainable=True)) is True


@pytest.mark.parametrize("synchronization", ["auto", "on_write"])
@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_va5_value_that_the_host_assigns_is_replicated(aggregation, synchronization, two):
    value = _made(two, 1.0, synchronization, aggregation)
    if isinstance(value, jdist.Mirrored):
        assigned = value.assign(5)
        assert _components(assigned) == [5.0, 5.0]
        assert _components(assigned.assign_add(1)) == [6.0, 6.0]
        assert _components(assigned.assign_sub(1)) == [4.0, 4.0]
    else:  # AUTO without aggregation is a plain array, which plain arithmetic writes
        assigned = two.put(np.full_like(value, 5))
        assert [float(x) for x in two.local_results(assigned)] == [5.0, 5.0]
        assert [float(x) for x in two.local_results(assigned + 1)] == [6.0, 6.0]


@each_row("write", [lambda old, number: number + 1, lambda old, number: old + number])
@each_row("synchronization", ["auto", "on_write"])
def test_va6_varying_writes_without_aggregation_are_errors(synchronization, write, strategy):
    value = _made(strategy, 1.0, synchronization)
    message = r"state is not proved to be replicated(.|\n)*`jdist\.Mirrored\(x, aggregation\)`"
    with pytest.raises(jdist.NotMirroredError, match=message):
        _written(strategy, value, write)
    assert [float(x) for x in strategy.local_results(value)] == [1.0] * strategy.num_replicas_in_sync


def test_va7_on_write_sum_is_the_sum_of_the_written_values(two):
    value = _made(two, 1.0, "on_write", "sum")
    written = _written(two, value, lambda old, number: number + 1)
    assert _components(written) == [3.0, 3.0]
    assert [float(x) for x in two.local_results(two.run(lambda old: old, (written,)))] == [3.0, 3.0]
    added = _written(two, two.put(1.0), lambda old, number: old + jdist.all_reduce("sum", number + 1))
    assert [float(x) for x in two.local_results(added)] == [4.0, 4.0]


def test_va8_on_write_mean_is_the_mean_of_the_written_values(two):
    assert _components(_written(two, _made(two, 1.0, "on_write", "mean"), lambda old, number: number + 1)) == [1.5, 1.5]
    added = _written(two, _made(two, 1.0, "on_write", "mean"), lambda old, number: old + number + 1)
    assert _components(added) == [2.5, 2.5]


ON_WRITE = {"sum": np.sum, "mean": np.mean, "only_first_replica": lambda rows, axis: rows[0]}


@pytest.mark.parametrize("aggregation, expected", ON_WRITE.items(), ids=ON_WRITE)
def test_va7_va8_on_write_is_its_aggregation_under_every_strategy(aggregation, expected, strategy):
    value = _made(strategy, np.float32([0, 0]), "on_write", aggregation)
    written = _written(strategy, value, lambda old, number: old + number + jnp.arange(2) + 1)
    rows = np.arange(strategy.num_replicas_in_sync)[:, None] + np.float32([1, 2])
    np.testing.assert_allclose(written.read(), expected(rows, axis=0), rtol=1e-6)
    assert_in_step(written.read())


def test_va10_host_number_written_to_an_on_write_sum_is_an_error(strategy):
    message = r"the replicas wrote 3\.0, a host value, .*\. Write an array \(`jnp\.as.*or aggregate by MEAN"
    with pytest.raises(ValueError, match=message):
        _written(strategy, _made(strategy, 1.0, "on_write", "sum"), lambda old, number: 3.0)


@pytest.mark.parametrize("aggregation", ["mean", "only_first_replica", "none"])
def test_va11_written_host_number_is_replicated(aggregation, strategy):
    written = _written(strategy, _made(strategy, 1.0, "on_write", aggregation), lambda old, number: 3.0)
    assert _components(written) == [3.0] * strategy.num_replicas_in_sync


def test_va12_mean_of_the_replica_indices(two):
    assert float(_written(two, _made(two, 1.0, "on_write", "mean"), lambda old, number: number).read()) == 0.5


def test_va13_initial_sync_on_read_sum_is_on_every_replica(strategy):
    value = _made(strategy, 1.0, "on_read", "sum")
    n = strategy.num_replicas_in_sync
    assert (_components(value), float(value.read())) == ([1.0] * n, n)


def test_va14_sync_on_read_sum_is_assigned_in_equal_shares(two):
    assigned = _made(two, 1.0, "on_read", "sum").assign(5.0)
    assert (_components(assigned), float(assigned.read())) == ([2.5, 2.5], 5.0)


@each_row("word", ["assign_add", "assign_sub"])
def test_va14_addition_on_the_host_to_a_sync_on_read_sum_is_an_error(word, strategy):
    value = _made(strategy, 1.0, "on_read", "sum")
    message = (
        rf"`{word}` of one value to SyncOnRead.*`value\.assign\(value\.read\(\) \+ x\)`; .*`value\.{word}\(PerReplica"
    )
    with pytest.raises(ValueError, match=message):
        getattr(value, word)(1.0)
    ones = _per_replica(strategy, *[1.0] * strategy.num_replicas_in_sync)
    added = getattr(value, word)(ones)
    assert float(added.read()) == {"assign_add": 2.0, "assign_sub": 0.0}[word] * strategy.num_replicas_in_sync


def test_va15_integer_sync_on_read_sum_has_no_remainder(two):
    assigned = _made(two, np.int32(0), "on_read", "sum").assign(7)
    assert (_components(assigned), int(assigned.read())) == ([4, 3], 7)


@each_row("number", [-7, -1, 0, 1, 5, 7])
def test_va15_integer_sync_on_read_sum_equals_the_assigned_value_under_every_strategy(number, strategy):
    assert int(_made(strategy, np.int32(0), "on_read", "sum").assign(number).read()) == number


def test_va16_sync_on_read_sum_stores_the_value_of_each_replica(two):
    written = _written(two, _made(two, 1.0, "on_read", "sum"), lambda old, number: number + 1)
    assert _components(written) == [1.0, 2.0]
    assert float(written.read()) == 3.0
    assert float(written.read() + 1) == 4.0
    assert _components(two.run(lambda old: old, (written,))) == [1.0, 2.0]


def test_va17_sync_on_read_mean_is_written_by_the_host_and_by_the_replicas(two):
    assigned = _made(two, 1.0, "on_read", "mean").assign(5.0)
    assert _components(assigned) == [5.0, 5.0]
    assert _components(assigned.assign_add(1.0)) == [6.0, 6.0]
    written = _written(two, _made(two, 1.0, "on_read", "mean"), lambda old, number: number + 1)
    assert (_components(written), float(written.read()), float(written.read() + 1)) == ([1.0, 2.0], 1.5, 2.5)


def test_va18_value_read_from_the_first_replica_is_its_written_value(two):
    written = _written(two, _made(two, 0.0, "on_read", "only_first_replica"), lambda old, number: number + 1)
    assert (_components(written), float(written.read())) == ([1.0, 2.0], 1.0)


ON_READ = {"sum": lambda n: n * (n - 1) / 2, "mean": lambda n: (n - 1) / 2, "only_first_replica": lambda n: 0}


@pytest.mark.parametrize("aggregation, expected", ON_READ.items(), ids=ON_READ)
def test_va20_read_is_the_aggregation_of_the_written_values(aggregation, expected, strategy):
    written = _written(strategy, _made(strategy, 7.0, "on_read", aggregation), lambda old, number: number)
    assert float(written.read()) == expected(strategy.num_replicas_in_sync)
    assert_in_step(written.read())


@pytest.mark.parametrize("aggregation", ["sum", "mean", "only_first_replica"])
def test_va21_sync_on_read_value_on_one_device_is_a_single_value(aggregation):
    strategy = STRATEGIES["one_device"]()
    value = _made(strategy, 1.0, "on_read", aggregation)
    assert float(value.assign(5.0).read()) == 5.0
    assert float(_written(strategy, value, lambda old, number: old + 2).read()) == 3.0


def test_va21_sync_on_read_value_under_central_storage_is_one_per_replica():
    strategy = STRATEGIES["central_2"]()
    written = _written(strategy, _made(strategy, 1.0, "on_read", "sum"), lambda old, number: number + 1)
    assert (_components(written), float(written.read())) == ([1.0, 2.0], 3.0)


AGGREGATED = {"sum": 3.0, "mean": 1.5, "only_first_replica": 1.0}


@pytest.mark.parametrize("aggregation, expected", AGGREGATED.items(), ids=AGGREGATED)
def test_va24_per_replica_value_assigned_to_a_mirrored_value_is_aggregated(aggregation, expected, two):
    assigned = _made(two, 0.0, "on_write", aggregation).assign(_per_replica(two, 1, 2))
    assert _components(assigned) == [expected, expected]


def test_va24_per_replica_value_assigned_without_aggregation_is_an_error(two):
    message = r"one value per replica without an aggregation.*`strategy\.reduce`.*`Mirrored\(tree, aggregation\)`"
    with pytest.raises(ValueError, match=message):
        _made(two, 0.0, "on_write").assign(_per_replica(two, 1, 2))


def _drawn(key):
    return jdist.variable(jax.random.normal(key, (3,)), synchronization="on_write")


def test_va27_random_initial_value_is_the_same_on_every_replica(strategy):
    value = strategy.init(_drawn, jax.random.key(3))
    assert isinstance(value, jdist.Mirrored)
    np.testing.assert_array_equal(value.read(), jax.random.normal(jax.random.key(3), (3,)))
    assert_in_step(value.read())


def test_va27_initial_value_from_a_replica_key_is_an_error_until_it_is_broadcast(two):
    key = jax.random.key(3)
    message = r"state is not proved to be replicated(.|\n)*`replica_key`"
    with pytest.raises(jdist.NotMirroredError, match=message):
        two.init(lambda key: _drawn(jdist.replica_key(key)), key)
    value = two.init(lambda key: _drawn(jdist.broadcast(jdist.replica_key(key))), key)
    np.testing.assert_array_equal(value.read(), jax.random.normal(jax.random.fold_in(key, 0), (3,)))
    assert_in_step(value.read())


def _row(number):
    """Returns `i + 2` for row `i` of three on replica `i`."""
    return jdist.RowSlices((number + 2)[None], jdist.replica_id()[None], num_rows=3)


ADDED_ROWS = {
    "mean": (lambda old, number: old + jdist.all_reduce("mean", _row(number)).dense(), [5.0, 5.5, 4.0]),
    "sum": (lambda old, number: jdist.all_reduce("sum", _row(number)).add_to(old), [6.0, 7.0, 4.0]),
    "only_first_replica": (lambda old, number: jdist.broadcast(_row(number)).add_to(old), [6.0, 4.0, 4.0]),
}


@pytest.mark.parametrize("write, expected", ADDED_ROWS.values(), ids=ADDED_ROWS)
def test_va31_rows_added_by_all_replicas_are_aggregated(write, expected, two):
    written = _written(two, two.put(np.float32([4, 4, 4])), write)
    assert [x.tolist() for x in two.local_results(written)] == [expected, expected]


def test_va31_rows_that_a_replica_adds_without_aggregation_are_local(two):
    add_own = lambda old, number: _row(number).add_to(old)
    table = np.float32([4, 4, 4])
    assert _components(_written(two, _made(two, table, "none"), add_own)) == [[6.0, 4.0, 4.0], [4.0, 7.0, 4.0]]
    with pytest.raises(jdist.NotMirroredError, match=r"state is not proved(.|\n)*or all-reduce the result"):
        _written(two, _made(two, table, "on_write"), add_own)


@each_row("op", ["min", "max"])
def test_va32_min_and_max_of_slices_are_errors(op, strategy):
    message = rf"value is RowSlices, whose {op.upper()} over the replicas.*Use SUM or MEAN.*`value\.dense\(\)`"
    with pytest.raises(TypeError, match=message):
        strategy.run(lambda: jdist.all_reduce(op, _row(_number())))


def _from_all(change):
    def write(old, number):
        slices = _row(number)
        rows, indices = jdist.all_gather((slices.rows, slices.indices), 0)
        return change(old.at[indices], rows)

    return write


CHANGED_ROWS = {
    "min": (_from_all(lambda at, rows: at.min(rows)), [2.0, 2.5, 2.5]),
    "max": (_from_all(lambda at, rows: at.max(rows)), [2.5, 3.0, 2.5]),
    "update": (_from_all(lambda at, rows: at.set(rows)), [2.0, 3.0, 2.5]),
}


@pytest.mark.parametrize("write, expected", CHANGED_ROWS.values(), ids=CHANGED_ROWS)
def test_va32_gathered_rows_of_all_replicas_change_a_table(write, expected, two):
    written = _written(two, two.put(np.float32([2.5, 2.5, 2.5])), write)
    assert [x.tolist() for x in two.local_results(written)] == [expected, expected]


def _two_rows():
    pair = jnp.stack([jdist.replica_id(), jdist.replica_id() + 1])
    return jdist.RowSlices(pair, pair, num_rows=3)


def test_va33_rows_of_all_replicas_are_subtracted_and_added(two):
    mean = lambda old, number: old - jdist.all_reduce("mean", _two_rows()).dense()
    assert _written(two, two.put(np.zeros(3, np.float32)), mean).tolist() == [0.0, -1.0, -1.0]
    total = _written(
        two, two.put(np.zeros(3, np.int32)), lambda old, number: jdist.all_reduce("sum", _two_rows()).add_to(old)
    )
    assert (total.tolist(), total.dtype) == ([0, 2, 2], jnp.int32)


@pytest.mark.parametrize("synchronization, aggregation", PLACES)
def test_va35_value_is_not_hashable_not_a_bool_and_not_a_sequence(synchronization, aggregation, two):
    value = _made(two, np.ones(2, np.float32), synchronization, aggregation)
    with pytest.raises(TypeError, match=r"unhashable type"):
        hash(value)
    for name, ask in {"bool": bool, "iter": list, "len": len}.items():
        with pytest.raises(TypeError, match=rf"`{name}` is not defined for .*\.read\(\)`.*`\.values`"):
            ask(value)


@pytest.mark.parametrize("synchronization, aggregation", PLACES)
def test_va36_copy_is_an_independent_value_with_the_same_placement(synchronization, aggregation, two):
    value = _made(two, 3.0, synchronization, aggregation)
    copied = copy.deepcopy(value)
    changed = copied.assign(9.0)
    assert (type(copied), copied.tree.sharding, repr(copied)) == (type(value), value.tree.sharding, repr(value))
    assert _components(value) == _components(copied) == [3.0, 3.0]
    assert float(changed.read()) == 9.0
    two.step(lambda old: (old, None))(copied)  # donates the memory of the copy
    assert _components(value) == [3.0, 3.0]


def test_va38_varying_initial_value_is_an_error_until_it_is_broadcast(two):
    begins = _per_replica(two, 5, 15)
    with pytest.raises(jdist.NotMirroredError, match=r"state is not proved(.|\n)*holds one value per replica"):
        two.init(lambda x: jdist.variable(x, synchronization="on_write"), begins)
    value = two.init(lambda x: jdist.variable(jdist.broadcast(x), synchronization="on_write"), begins)
    assert _components(value) == [5.0, 5.0]


def test_va40_first_replica_is_the_first_of_all_groups(two):
    groups = jdist.HierarchicalAllReduce(group_size=2)
    strategy = jdist.MirroredStrategy([f"cpu:{i}" for i in range(4)], cross_device_ops=groups)
    value = _made(strategy, 0.0, "on_write", "only_first_replica")
    assert _components(_written(strategy, value, lambda old, number: number + 1)) == [1.0] * 4
