"""`assert_bitwise_equal` and `assert_replicated`: equal bits, and the messages about the first difference."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import jdist
from jdist.testing import assert_bitwise_equal, assert_replicated

DTYPES = ["float32", "float16", "bfloat16", "int8", "bool", "complex64"]


def test_numbers_keys_empty_arrays_and_nan_are_compared_by_bits():
    arrays = {dtype: np.arange(6).astype(dtype).reshape(2, 3) for dtype in DTYPES}
    assert_bitwise_equal(arrays, jax.tree.map(jnp.asarray, arrays))
    tree = {"n": 3, "key": jax.random.key(1), "empty": np.zeros((0, 2)), "nan": np.float32("nan"), "none": None}
    assert_bitwise_equal(tree, dict(tree))
    with pytest.raises(
        AssertionError, match=r"at \['key'\] uint32\[2\]: element \[1\] is 1 and should be 2. 1 of 2 elements differ"
    ):
        assert_bitwise_equal({"key": jax.random.key(1)}, {"key": jax.random.key(2)})


@pytest.mark.parametrize(
    "actual, expected, difference",
    [
        (np.float32([1, 2, 3]), np.float32([1, np.nextafter(np.float32(2), 9), 4]), "element [1] is 2.0 and should be 2.0000002 (1 ULP). 2 of 3"),
        (np.float32([[0.0]]), np.float32([[-0.0]]), "element [0, 0] is 0.0 and should be -0.0 (0 ULPs). 1 of 1"),
        (np.float32(1e-45), np.float32(-1e-45), "element [] is 1e-45 and should be -1e-45 (2 ULPs)"),
        (ml_dtypes.bfloat16(1), ml_dtypes.bfloat16(1.0078125), "element [] is 1 and should be 1.00781 (1 ULP)"),
        (np.float32("nan"), np.float32(1), "element [] is nan and should be 1.0. 1 of 1"),
        (np.int32([5]), np.int32([7]), "element [0] is 5 and should be 7. 1 of 1"),
    ],
)  # fmt: skip
def test_message_has_index_values_and_ulps(actual, expected, difference):
    with pytest.raises(AssertionError) as error:
        assert_bitwise_equal({"w": actual}, {"w": expected})
    assert f"differ at ['w'] {actual.dtype}" in str(error.value)
    assert difference in str(error.value)


def test_first_differing_leaf_is_named_and_dtypes_shapes_and_structures_are_compared():
    with pytest.raises(AssertionError, match=r"differ at \['b'\]\[0\] float32"):
        assert_bitwise_equal({"a": 1, "b": [np.float32(1), 5]}, {"a": 1, "b": [np.float32(2), 6]})
    with pytest.raises(AssertionError, match=r"differ at the root: float32\[2\], expected float32\[3\]"):
        assert_bitwise_equal(np.zeros(2, np.float32), np.zeros(3, np.float32))
    with pytest.raises(AssertionError, match=r"float32\[2\], expected float16\[2\]"):
        assert_bitwise_equal(np.zeros(2, np.float32), np.zeros(2, np.float16))
    with pytest.raises(AssertionError, match=r"different structures: .*'a'.*, expected .*'b'"):
        assert_bitwise_equal({"a": 1}, {"b": 1})


def test_states_of_a_strategy_are_compared_with_states_of_another(two):
    tree = {"w": np.arange(8, dtype=np.float32)}
    assert_bitwise_equal(two.put(tree), jdist.testing.strategy("sharded_4").put(tree))


def diverged(two):
    """Returns an array that claims to be replicated, with another copy on the second device."""
    copies = [
        jax.device_put(np.float32([[1, 2, value]]), device) for value, device in zip((3, 5), two.devices, strict=True)
    ]
    return jax.make_array_from_single_device_arrays((1, 3), NamedSharding(two.mesh, PartitionSpec()), copies)


def test_different_copies_are_reported_with_device_and_element(two):
    assert_replicated(two.put({"w": np.ones(3, np.float32), "key": jax.random.key(0)}))
    with pytest.raises(AssertionError) as error:
        assert_replicated({"w": two.put(np.ones(3)), "b": [diverged(two)]})
    assert str(error.value) == (
        f"['b'][0] float32[1,3] is not replicated: {two.devices[1]} and {two.devices[0]} hold different copies. On "
        f"{two.devices[1]}, element [0, 2] is 5.0 and should be 3.0 (6291456 ULPs). 1 of 3 elements differ."
    )


def test_parts_of_a_sharded_leaf_are_compared_where_devices_hold_the_same_part(two):
    mesh = jax.make_mesh((2, 2), ("a", "b"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    assert_replicated(jax.device_put(np.arange(8), NamedSharding(mesh, PartitionSpec("a"))))
    assert_replicated(
        {"s": jdist.testing.strategy("sharded_4").put(np.zeros(8)), "m": two.put(jdist.Mirrored(np.ones(2)))}
    )


@pytest.mark.parametrize("wrapper", [jdist.PerReplica, lambda x: jdist.SyncOnRead(x, "mean")])
def test_values_per_replica_are_not_replicated(two, wrapper):
    with pytest.raises(
        AssertionError, match=r"\['x'\] is not replicated: it is a \w+\(.*float32.*one value per replica"
    ):
        assert_replicated({"x": two.put(wrapper(np.zeros(2, np.float32)))})


def test_host_values_have_no_copies():
    with pytest.raises(TypeError, match=r"\['n'\] is float64\[3\] on the host. Pass arrays that are on devices."):
        assert_replicated({"n": np.zeros(3)})


def test_traceback_of_a_failed_assertion_ends_in_the_test():
    with pytest.raises(AssertionError) as caught:
        assert_bitwise_equal(np.float32(1), np.float32(2))
    assert [entry.path.name for entry in caught.traceback.filter(caught)] == ["test_bitwise.py"]
