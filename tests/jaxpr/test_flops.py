"""Counts of flops, compared with numbers that are written by hand and with XLA's cost analysis where it is right."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from jdist._src.jaxpr.flops import matmul_flops

A, B = np.ones((8, 16), np.float32), np.ones((16, 32), np.float32)
ONE = 2 * 8 * 16 * 32
IMAGES, KERNEL = np.ones((2, 8, 8, 3), np.float32), np.ones((3, 3, 3, 5), np.float32)
DIMS = ("NHWC", "HWIO", "NHWC")


def layers(step):
    return lambda x, w: jax.lax.scan(lambda h, _: (step(h @ w), None), x, None, length=5)[0]


def conv(stride):
    return lambda x, k: jax.lax.conv_general_dilated(x, k, (stride, stride), "VALID", dimension_numbers=DIMS)


@jax.custom_vjp
def doubled(a, b):
    return 2 * (a @ b)


doubled.defvjp(lambda a, b: (doubled(a, b), (a, b)), lambda saved, g: (g @ saved[1].T, saved[0].T @ g))

CASES = {
    "one product": (lambda a, b: a @ b, (A, B), ONE),
    "batched": (jax.vmap(lambda a, b: a @ b), (np.stack([A] * 3), np.stack([B] * 3)), 3 * ONE),
    "jit": (lambda a, b: jax.jit(jnp.matmul)(a, b), (A, B), ONE),
    "gradient of both": (jax.grad(lambda a, b: (a @ b).sum(), (0, 1)), (A, B), 2 * ONE),  # the product itself is unused
    "value and gradient": (jax.grad(lambda a, b: ((a @ b) ** 2).sum(), (0, 1)), (A, B), 3 * ONE),
    "scan over layers": (layers(jnp.tanh), (A, np.ones((16, 16), np.float32)), 5 * 2 * 8 * 16 * 16),
    "remat": (
        lambda x, w: jax.grad(lambda w: (layers(jax.checkpoint(jnp.sin))(x, w) ** 2).sum())(w),
        (A, np.ones((16, 16), np.float32)),
        3 * 5 * 2 * 8 * 16 * 16,
    ),
    "cond": (lambda a, b: jax.lax.cond(a[0, 0] > 0, lambda: (a @ b) @ b.T @ b, lambda: a @ b), (A, B), 3 * ONE),
    "while": (
        lambda a, b: jax.lax.while_loop(lambda c: c[0, 0] < 9, lambda c: c @ (b @ b.T), a),
        (A, B),
        2 * 16 * 32 * 16 + 2 * 8 * 16 * 16,
    ),
    "custom_vjp": (jax.grad(lambda a, b: (doubled(a, b) ** 2).sum(), (0, 1)), (A, B), 3 * ONE),
    "convolution": (conv(1), (IMAGES, KERNEL), 2 * (2 * 6 * 6 * 5) * 27),
    "strided convolution": (conv(2), (IMAGES, KERNEL), 2 * (2 * 3 * 3 * 5) * 27),
    "elementwise only": (lambda a, b: jnp.tanh(a).sum(), (A, B), 0),
    "ragged": (
        lambda a, b: jax.lax.ragged_dot(a, jnp.stack([b, b]), jnp.array([3, 5])),
        (A, B),
        ONE,
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_flops_of_known_functions(case):
    fn, args, expected = CASES[case]
    assert matmul_flops(jax.make_jaxpr(fn)(*args)) == expected


def test_flops_inside_shard_map_are_of_all_devices():
    mesh = jax.make_mesh((4,), ("i",), axis_types=(jax.sharding.AxisType.Auto,))
    fn = jax.shard_map(jnp.matmul, mesh=mesh, in_specs=(P("i"), P()), out_specs=P("i"), check_vma=False)
    assert matmul_flops(jax.make_jaxpr(fn)(A, B)) == ONE


@pytest.mark.parametrize("stride", [1, 2, 3])
@pytest.mark.parametrize("argument", [0, 1])
def test_gradient_of_a_convolution_costs_about_as_much_as_the_convolution(argument, stride):
    images = np.ones((4, 24, 24, 8), np.float32)
    kernel = np.ones((3, 3, 8, 16), np.float32)
    forward = matmul_flops(jax.make_jaxpr(conv(stride))(images, kernel))
    gradient = jax.grad(lambda x, k: conv(stride)(x, k).sum(), argument)
    assert matmul_flops(jax.make_jaxpr(gradient)(images, kernel)) == pytest.approx(forward, rel=0.35)


@pytest.mark.parametrize("sizes", [(32, 64, 8), (128, 16, 16, 4)])
def test_count_equals_xlas_cost_analysis_without_elementwise_operations(sizes):
    weights = [np.ones(shape, np.float32) for shape in zip(sizes, sizes[1:], strict=False)]
    network = functools.partial(functools.reduce, jnp.matmul)
    fn = lambda x, weights: network(weights, x)
    lowered = jax.jit(fn).lower(np.ones((16, sizes[0]), np.float32), weights)
    counted = matmul_flops(jax.make_jaxpr(fn)(np.ones((16, sizes[0]), np.float32), weights))
    assert counted == lowered.cost_analysis()["flops"]
