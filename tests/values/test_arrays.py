"""Arrays on a mesh: copies, shards, rows, and reductions of rows on the host."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jdist._src.devices.mesh import Replicas, replica_mesh, replicated_sharding
from jdist._src.values import array_checks, array_copies, replica_rows
from jdist._src.values.reduce_op import ReduceOp

from laws import STRATEGIES


@pytest.fixture(params=[1, 2, 3, 8])
def mesh(request):
    return replica_mesh(jax.devices()[: request.param])


def test_device_array_is_neither_on_the_host_nor_traced():
    assert array_checks.is_device_array(jnp.ones(2))
    assert array_checks.is_device_array(jax.random.key(0))
    assert not any(map(array_checks.is_device_array, (np.ones(2), 1.0, None)))
    seen = []
    jax.eval_shape(lambda x: seen.append(array_checks.is_device_array(x)), 1.0)
    assert seen == [False]


PLACED = {
    "numpy": np.arange(3),
    "double": np.arange(3.0),
    "number": 3,
    "bool": True,
    "jax": jnp.arange(3),
    "bfloat16": jnp.ones(3, jnp.bfloat16),
    "key": jax.random.key(3),
    "raw_key": jax.random.PRNGKey(3),
    "empty": np.zeros((0, 2), np.float32),
}


@pytest.mark.parametrize("x", PLACED.values(), ids=PLACED)
def test_placed_array_is_a_copy_without_weak_type(x, two):
    mesh = two.mesh
    result = array_copies.device_put_copy(x, replicated_sharding(mesh))
    assert result is not x
    assert not jax.typeof(result).weak_type
    assert result.sharding == replicated_sharding(mesh)
    assert result.dtype == jnp.asarray(x).dtype
    plain = jax.random.key_data if jnp.issubdtype(result.dtype, jax.dtypes.prng_key) else np.asarray
    np.testing.assert_array_equal(plain(result), plain(x))


def test_placed_array_does_not_share_memory(mesh):
    x = jax.device_put(jnp.arange(3.0), replicated_sharding(mesh))
    array_copies.device_put_copy(x, replicated_sharding(mesh)).delete()
    assert not x.is_deleted()


UNEVEN = ((2, 3), (0, 3), (1, 3))
NUMPY = {ReduceOp.SUM: np.sum, ReduceOp.MEAN: np.mean, ReduceOp.MAX: np.max, ReduceOp.MIN: np.min}


def _filled(shapes):
    """Returns random rows of these shapes, padded to the largest with 1e6, and the rows without padding."""
    largest = tuple(map(max, zip(*shapes, strict=True)))
    unpadded = [np.random.default_rng(i).normal(size=shape).astype(np.float32) for i, shape in enumerate(shapes)]
    filled = np.full((len(shapes), *largest), 1e6, np.float32)
    for row, values in zip(filled, unpadded, strict=True):
        row[tuple(map(slice, values.shape))] = values
    return jnp.asarray(filled), unpadded


@pytest.mark.parametrize("op", NUMPY, ids=str)
def test_reduction_of_rows_of_different_lengths_ignores_padding(op):
    x, unpadded = _filled(UNEVEN)
    joined = np.concatenate(unpadded)
    result = replica_rows.reduce_rows(op, "value", x, UNEVEN, (0,), None)
    np.testing.assert_allclose(result, NUMPY[op](joined, axis=0), rtol=1e-5)
    result = replica_rows.reduce_rows(op, "value", x, UNEVEN, (0, 1), None)
    np.testing.assert_allclose(result, NUMPY[op](joined), rtol=1e-5)


@pytest.mark.parametrize("op", NUMPY, ids=str)
@pytest.mark.parametrize("dims", [(), (1,), (0, 1)], ids=str)
def test_reduction_of_rows_of_one_shape_equals_numpy(op, dims):
    x = np.random.default_rng(0).normal(size=(3, 2, 4)).astype(np.float32)
    result = replica_rows.reduce_rows(op, "value", jnp.asarray(x), None, dims, None)
    np.testing.assert_allclose(result, NUMPY[op](x, axis=(0, *(dim + 1 for dim in dims))), rtol=1e-5)


def test_reduction_without_elements_is_refused_unless_it_is_a_sum():
    empty, shapes = jnp.zeros((2, 0, 3)), ((0, 3), (0, 3))
    for row_shapes in (None, shapes):
        np.testing.assert_array_equal(
            replica_rows.reduce_rows(ReduceOp.SUM, "value", empty, row_shapes, (0,), None), np.zeros(3)
        )
        for op in (ReduceOp.MEAN, ReduceOp.MAX, ReduceOp.MIN):
            with pytest.raises(ValueError, match=rf"{op.name} of value\['x'\]: it is empty on every"):
                replica_rows.reduce_rows(op, "value['x']", empty, row_shapes, (0,), None)


def test_reduction_that_leaves_different_shapes_is_refused():
    x, _ = _filled(UNEVEN)
    for dims in ((), (1,)):
        message = (
            r"value\['x'\] has the shapes \[2, 3\], \[0, 3\], \[1, 3\] on the replicas, which also differ in "
            rf"dimensions other than the reduced ones, \[{1 if dims else ''}\].*as in `axis=0`, or concatenate the "
            r"values: `strategy\.gather`"
        )
        with pytest.raises(ValueError, match=message):
            replica_rows.reduce_rows(ReduceOp.SUM, "value['x']", x, UNEVEN, dims, None)


@pytest.mark.parametrize("dim, shapes", [(0, UNEVEN), (1, ((2, 1), (2, 3), (2, 0))), (0, None), (1, None)], ids=str)
def test_joined_rows_equal_numpy(dim, shapes):
    x, unpadded = _filled(shapes or ((2, 3),) * 3)
    result = replica_rows.join_rows("value", x, shapes, dim, None)
    np.testing.assert_array_equal(result, np.concatenate(unpadded, axis=dim))


def test_rows_that_differ_along_another_dimension_are_not_joined():
    x, _ = _filled(UNEVEN)
    message = (
        r"value has the shapes \[2, 3\], \[0, 3\], \[1, 3\] .* along dimension 1 .*Concatenate along the dimension "
        r"that differs"
    )
    with pytest.raises(ValueError, match=message):
        replica_rows.join_rows("value", x, UNEVEN, 1, None)


def test_reduction_and_join_have_the_requested_sharding():
    mesh = STRATEGIES["mirrored_3"]().mesh
    x = array_copies.device_put_copy(_filled(UNEVEN)[0], Replicas.from_mesh(mesh, None).per_replica_sharding)
    everywhere = replicated_sharding(mesh)
    for shapes, op in itertools.product((UNEVEN, None), (ReduceOp.MEAN, ReduceOp.MAX)):
        assert replica_rows.reduce_rows(op, "value", x, shapes, (0,), everywhere).sharding.is_equivalent_to(
            everywhere, 1
        )
        assert replica_rows.join_rows("value", x, shapes, 0, everywhere).sharding.is_equivalent_to(everywhere, 2)


def test_argument_whose_memory_cannot_be_donated_is_copied(two):
    tree, seen = two.put({"w": np.arange(6.0)}), []

    def donating(tree, number):
        seen.append(tree["w"])
        if number == 3 or tree["w"] is not seen[0]:
            return tree["w"] + number
        raise jax.errors.JaxRuntimeError("INVALID_ARGUMENT: Donation requested for buffer with external reference")

    np.testing.assert_array_equal(array_copies.call_donating(donating, tree, 3), np.arange(6) + 3)
    assert len(seen) == 1
    np.testing.assert_array_equal(array_copies.call_donating(donating, tree, 1), np.arange(6) + 1)
    assert len(seen) == 3
    assert seen[2].sharding == tree["w"].sharding
    with pytest.raises(ZeroDivisionError):
        array_copies.call_donating(lambda tree: 1 / 0, tree)
