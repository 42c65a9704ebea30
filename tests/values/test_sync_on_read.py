"""`SyncOnRead`: one partial value per replica, and reads and writes by the host."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jdist

from laws import STRATEGIES, assert_in_step, each_row, rows

NUMPY = {"sum": np.sum, "mean": np.mean, "only_first_replica": lambda x, axis: x[0]}


@pytest.mark.parametrize("aggregation", NUMPY)
def test_read_is_aggregated_and_replicated(aggregation, strategy):
    partial = np.asarray(rows(strategy, 3).tree)
    result = strategy.put(jdist.SyncOnRead({"x": partial, "none": None}, aggregation)).read()
    np.testing.assert_allclose(result["x"], NUMPY[aggregation](partial, axis=0), rtol=1e-5, atol=1e-6)
    assert result["none"] is None
    assert result["x"].sharding.device_set == set(strategy.mesh.devices.flat)
    assert_in_step(result)


def test_read_of_a_value_that_is_not_placed_is_aggregated():
    assert float(jdist.SyncOnRead(np.float32([1, 2]), "sum").read()) == 3
    assert float(jdist.SyncOnRead(jnp.float32([1, 2]), "mean").read()) == 1.5


READS = {
    "int32_sum": (np.int32([1, -4]), "sum", -3, "int32"),
    "int32_mean": (np.int32([1, -4]), "mean", -1.5, "float32"),
    "bfloat16_sum": (np.array([1.5, 2], jnp.bfloat16), "sum", 3.5, "bfloat16"),
    "bfloat16_mean": (np.array([1.5, 2.5], jnp.bfloat16), "mean", 2, "bfloat16"),
    "complex64_sum": (np.complex64([1 + 1j, 2]), "sum", 3 + 1j, "complex64"),
    "complex64_mean": (np.complex64([1 + 1j, 2]), "mean", 1.5 + 0.5j, "complex64"),
    "bool_first": (np.array([True, False]), "only_first_replica", True, "bool"),
    "int32_first": (np.int32([3, 4]), "only_first_replica", 3, "int32"),
}


@pytest.mark.parametrize("partial, aggregation, expected, dtype", READS.values(), ids=READS)
def test_read_of_every_dtype_has_the_dtype_of_the_reduction(partial, aggregation, expected, dtype, two):
    value = two.put(jdist.SyncOnRead(partial, aggregation))
    assert (complex(value.read()), value.read().dtype) == (expected, dtype)
    assert value.read().sharding.device_set == set(two.mesh.devices.flat)


UNREADABLE = {
    "sum_of_bools": (
        np.array([True, False]),
        "sum",
        r"is boolean \(bool\[2\]\), and SUM of booleans.*astype\(jnp\.int32",
    ),
    "mean_of_bools": (np.array([True, False]), "mean", r"is boolean \(bool\[2\]\), and MEAN of booleans"),
    "sum_of_keys": (
        jax.random.split(jax.random.key(0)),
        "sum",
        r"value is .*key<fry>\[2\]",
    ),
}


@each_row("partial, aggregation, message", UNREADABLE.values(), ids=UNREADABLE)
def test_read_and_assign_of_leaf_without_that_aggregation_is_refused(partial, aggregation, message, two):
    value = two.put(jdist.SyncOnRead(partial, aggregation))
    with pytest.raises(TypeError, match=message):
        value.read()


@pytest.mark.parametrize("x", [[6.0, -9.0, 0.25], [0.1, -1e30, np.inf]], ids=["exact", "rounded"])
def test_assign_to_a_sum_gives_equal_shares(x, strategy):
    n = strategy.num_replicas_in_sync
    value = strategy.put(jdist.SyncOnRead(rows(strategy, 3).tree, "sum"))
    result = value.assign(np.float32(x))
    for row in result.values:
        np.testing.assert_array_equal(row, np.float32(x) / n)
    np.testing.assert_allclose(result.read(), np.float32(x), rtol=1e-6)


INTEGERS = {
    "int32": np.int32([0, 1, -1, 7, -7, 2**31 - 1, -(2**31)]),
    "int8": np.int8([0, 1, -1, 127, -128]),
    "uint8": np.uint8([0, 1, 7, 255]),
    "uint32": np.uint32([0, 9, 2**32 - 1]),
}


@pytest.mark.parametrize("x", INTEGERS.values(), ids=INTEGERS)
def test_assign_to_a_sum_of_integers_keeps_the_remainder_on_the_first_replicas(x):
    strategy, n = STRATEGIES["mirrored_3"](), 3
    result = strategy.put(jdist.SyncOnRead(np.zeros((n, *x.shape), x.dtype), "sum")).assign(x)
    shares = np.stack(result.values).astype(np.int64)
    assert result.tree.dtype == x.dtype
    np.testing.assert_array_equal(shares.sum(0), x.astype(np.int64))
    np.testing.assert_array_equal(shares, -np.sort(-shares, axis=0))
    assert (shares.max(0) - shares.min(0)).max() <= 1


EXACT = {
    "bfloat16": np.array([8, -4], jnp.bfloat16),
    "float16": np.float16([8, -4]),
    "complex64": np.complex64([8 + 4j, -16j]),
}


@pytest.mark.parametrize("x", EXACT.values(), ids=EXACT)
def test_assign_to_a_sum_of_any_inexact_dtype_is_read_back(x, two):
    result = two.put(jdist.SyncOnRead(np.zeros((2, 2), x.dtype), "sum")).assign(x)
    assert result.read().dtype == x.dtype
    np.testing.assert_array_equal(result.read(), x)
    np.testing.assert_array_equal(result.values[0], result.values[1])


def test_assign_of_keys_gives_every_replica_the_key(two):
    keys = two.put(jdist.SyncOnRead(jax.random.split(jax.random.key(0)), "only_first_replica"))
    assert keys.assign(jax.random.key(7)).read() == jax.random.key(7)
    for row in keys.assign(jax.random.key(7)).values:
        np.testing.assert_array_equal(jax.random.key_data(row), jax.random.key_data(jax.random.key(7)))


@each_row("method", ["assign_add", "assign_sub"])
def test_addition_of_one_value_to_a_sum_is_refused_as_ambiguous(method, two):
    value = two.put(jdist.SyncOnRead(np.float32([1, 2]), "sum"))
    message = (
        rf"`{method}` of one value to SyncOnRead\(float32\[2\], SUM\) is ambiguous: "
        rf".*`value\.assign\(.*`value\.{method}\(PerReplica\(rows"
    )
    for addend in (1.0, two.put(1.0), two.put(jdist.Mirrored(1.0))):
        with pytest.raises(ValueError, match=message):
            getattr(value, method)(addend)


@pytest.mark.parametrize("none", ["none", jdist.VariableAggregation.NONE], ids=str)
def test_partial_values_without_an_aggregation_can_be_written_and_not_read(none, strategy):
    n = strategy.num_replicas_in_sync
    state = strategy.init(lambda: jdist.SyncOnRead(np.float32(1), none))
    state, _ = strategy.step(lambda x: (x + jdist.replica_id(), None))(state)
    assert [float(x) for x in state.values] == [1.0 + i for i in range(n)]
    assert [float(x) for x in state.assign(4.0).values] == [4.0] * n
    message = r"SyncOnRead\(float32\[.*\], NONE\) has no aggregation, so it cannot be read .*`\.values`.* use SUM, MEAN"
    for read in (
        state.read,
        lambda: jdist.read_values({"x": state}),
        lambda: strategy.put(jdist.Mirrored(1.0)).assign(state),
    ):
        with pytest.raises(ValueError, match=message):
            read()


def test_partial_values_without_an_aggregation_keep_their_number_of_replicas(two):
    value = jdist.MirroredStrategy(["cpu:0", "cpu:1", "cpu:2"]).put(jdist.SyncOnRead(np.ones(3, np.float32), "none"))
    with pytest.raises(ValueError, match=r"value is a SyncOnRead of float32\[3\], for 3 replicas; this strategy has 2"):
        two.put(value)


def test_partial_value_is_plain_in_a_replica_function(strategy):
    n = strategy.num_replicas_in_sync
    value = strategy.put(jdist.SyncOnRead(np.arange(n), "sum"))
    mine, total = strategy.run(lambda x: (x, jdist.all_reduce("sum", x)), (value,))
    assert isinstance(mine, jdist.PerReplica)
    np.testing.assert_array_equal(mine.tree, np.arange(n))
    assert int(total) == int(value.read()) == n * (n - 1) // 2
