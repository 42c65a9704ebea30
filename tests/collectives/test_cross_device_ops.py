"""All-reduce algorithms and packing: equal results from every algorithm and packing, and the number of collectives."""

import itertools
import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jdist
from jdist import AllReduce, CommunicationOptions, HierarchicalAllReduce, ReductionToOneDevice

from laws import assert_in_step, each_row, rows

NUMPY = {"sum": np.sum, "mean": np.mean, "max": np.max, "min": np.min}
ALGORITHMS = {
    "all_reduce": (AllReduce(), (1, 8)),
    "scattered": (AllReduce(bytes_to_scatter=0), (3,)),
    "scattered_from_16": (AllReduce(bytes_to_scatter=16), (2,)),
    "one_device": (ReductionToOneDevice(), (3,)),
    "groups_of_1": (HierarchicalAllReduce(1), (1, 2)),
    "groups_of_2": (HierarchicalAllReduce(2), (2, 8)),
    "groups_of_3": (HierarchicalAllReduce(3), (3,)),
    "groups_of_4": (HierarchicalAllReduce(4), (8,)),
    "groups_of_a_process": (HierarchicalAllReduce(), (3,)),
}
ALGORITHM_CASES = {f"{name}-{n}": (ops, n) for name, (ops, counts) in ALGORITHMS.items() for n in counts}
FEW = {
    name: ALGORITHM_CASES[name]
    for name in ("all_reduce-8", "scattered-3", "one_device-3", "groups_of_2-2", "groups_of_2-8")
}
every_algorithm = pytest.mark.parametrize("ops, count", ALGORITHM_CASES.values(), ids=ALGORITHM_CASES)
PACKS = (0, 24, 2**40)


def _strategy(count, ops=None, bytes_per_pack=None):
    return jdist.MirroredStrategy(
        [f"cpu:{i}" for i in range(count)],
        cross_device_ops=ops,
        communication_options=CommunicationOptions(bytes_per_pack),
    )


def _tree(count):
    """Returns leaves of many dtypes and shapes that vary between replicas; integers, so that any order gives the same sum."""
    random = np.random.default_rng(count)
    draw = lambda dtype, *shape: random.integers(1, 9, size=(count, *shape)).astype(jnp.dtype(dtype))
    return {
        "w": draw("float32", 3, 5),
        "b": [draw("float32", 5), draw("float32"), None],
        "empty": draw("float32", 0, 2),
        "half": draw("bfloat16", 2, 2),
        "count": draw("int32", 2),
    }


def _reduced(tree):
    reduced = {op: jdist.all_reduce(op, tree) for op in NUMPY}
    for number, bytes_per_pack in enumerate(PACKS):
        reduced[f"sum{number}"] = jdist.all_reduce("sum", tree, options=CommunicationOptions(bytes_per_pack))
    return reduced


@every_algorithm
def test_every_algorithm_and_packing_equals_numpy_on_all_replicas(ops, count):
    tree = _tree(count)
    results = _strategy(count, ops).run(_reduced, (jdist.PerReplica(tree),))
    assert_in_step(results)
    for name, reduced in results.items():
        reduction = NUMPY[re.match("[a-z]+", name)[0]]
        expected = jax.tree.map(lambda x, reduction=reduction: reduction(x.astype(np.float64), axis=0), tree)
        as_doubles = jax.tree.map(lambda x: np.asarray(x, np.float64), reduced)
        chex.assert_trees_all_close(as_doubles, expected, rtol=1e-2 if name == "mean" else 0)
        for leaf, original in zip(jax.tree.leaves(reduced), jax.tree.leaves(tree), strict=True):
            counts = name == "mean" and np.issubdtype(original.dtype, np.integer)
            assert (isinstance(leaf, jax.Array), leaf.dtype) == (True, jnp.float32 if counts else original.dtype)


@pytest.mark.parametrize("ops, count", FEW.values(), ids=FEW)
def test_every_algorithm_adds_complex_numbers(ops, count):
    x = np.stack([np.complex64([1 + 2j, -i * 1j, i]) for i in range(count)])
    total, mean = _strategy(count, ops).run(
        lambda x: (jdist.all_reduce("sum", x), jdist.all_reduce("mean", x)), (jdist.PerReplica(x),)
    )
    np.testing.assert_allclose(total, x.sum(0), rtol=1e-6)
    np.testing.assert_allclose(mean, x.mean(0), rtol=1e-6)


def test_reduction_to_one_device_adds_in_the_order_of_the_replicas():
    x = rows(_strategy(8), 5, seed=3)
    total = _strategy(8, ReductionToOneDevice()).run(lambda x: jdist.all_reduce("sum", x), (x,))
    assert_in_step(total)
    expected = np.zeros(5, np.float32)
    for row in np.asarray(x.tree):
        expected = expected + row
    np.testing.assert_array_equal(total, expected)


@every_algorithm
def test_results_of_every_algorithm_are_proved_replicated(ops, count):
    strategy = _strategy(count, ops)
    step = strategy.step(lambda w, x: (w - jdist.all_reduce("mean", x), jdist.all_reduce("max", x)))
    w, greatest = step(strategy.put(np.zeros(3, np.float32)), rows(strategy, 3))
    assert step.proof.per_replica == ()
    np.testing.assert_allclose(w, -np.asarray(rows(strategy, 3).tree).mean(0), rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(greatest, np.asarray(rows(strategy, 3).tree).max(0))


@pytest.mark.parametrize("ops, count", FEW.values(), ids=FEW)
def test_gradient_through_every_algorithm_equals_the_gradient_of_psum(ops, count):
    strategy = _strategy(count, ops, 2**40)
    x = jdist.PerReplica({"w": rows(strategy, 2, 3).tree, "b": [rows(strategy).tree, rows(strategy, 0).tree]})

    def loss(reduce_all, tree):
        sums = reduce_all(tree)
        return sum(jnp.sum(jnp.sin(total) * x) for total, x in zip(*map(jax.tree.leaves, (sums, tree)), strict=True))

    axes = strategy.mesh.axis_names
    gradients = strategy.run(lambda tree: jax.grad(loss, 1)(lambda tree: jdist.all_reduce("sum", tree), tree), (x,))
    expected = strategy.run(lambda tree: jax.grad(loss, 1)(lambda tree: lax.psum(tree, axes), tree), (x,))
    for a, b in zip(strategy.local_results(gradients), strategy.local_results(expected), strict=True):
        chex.assert_trees_all_close(a, b, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("ops", [AllReduce(0), ReductionToOneDevice(), HierarchicalAllReduce(2)], ids=repr)
def test_every_algorithm_works_in_control_flow(ops):
    strategy = _strategy(2, ops, 2**40)
    total = lambda x: jdist.all_reduce("sum", {"a": x, "b": x.sum()})

    def flow(x):
        scanned = lax.scan(lambda c, y: (c, total(y)), 0, jnp.stack([x, 2 * x]))[1]
        chosen = lax.cond(jdist.num_replicas() > 1, lambda: total(x), lambda: total(3 * x))
        return scanned, chosen, jax.vmap(total)(jnp.stack([x, 2 * x]))

    x = rows(strategy, 3)
    expected = np.asarray(x.tree).sum(0)
    one = lambda k: {"a": k * expected, "b": k * expected.sum()}
    both = jax.tree.map(lambda *leaves: np.stack(leaves), one(1), one(2))
    chex.assert_trees_all_close(strategy.run(flow, (x,)), (both, one(1), both), rtol=1e-4, atol=1e-5)


def _collectives(strategy, fn, *args):
    """Returns the number of occurrences of each collective in the jaxpr of `fn`."""
    traced = str(jax.make_jaxpr(lambda *args: strategy.run(fn, args))(*args))
    names = re.findall(r"= (psum|pmax|pmin|reduce_scatter|all_gather|ppermute)\w*\[", traced)
    return {name: names.count(name) for name in names}


def _leaves(*sizes, dtype=np.float32):
    return [np.ones((2, size), dtype) for size in sizes]


PACKED = {
    "default": (None, _leaves(1, 2, 1000), {"psum": 1}),
    "none": (0, _leaves(1, 2, 1000), {"psum": 3}),
    "all": (2**40, _leaves(1, 2, 1000), {"psum": 1}),
    "smaller_than_64": (64, _leaves(1, 15, 16, 1000), {"psum": 3}),
    "one_leaf": (2**40, _leaves(4), {"psum": 1}),
    "each_dtype": (64, [*_leaves(1, 2), *_leaves(3, 4, dtype=np.int32), *_leaves(1, dtype=np.uint8)], {"psum": 3}),
    "one_byte": (1, [*_leaves(0, 0), *_leaves(1)], {"psum": 2}),
    "nothing": (2**40, [], {}),
}


@pytest.mark.parametrize("bytes_per_pack, leaves, expected", PACKED.values(), ids=PACKED)
def test_small_leaves_share_a_buffer_and_large_ones_do_not(bytes_per_pack, leaves, expected):
    x = jdist.PerReplica(leaves)
    everything = lambda op: lambda tree: jdist.all_reduce(op, tree)
    strategy = _strategy(2, bytes_per_pack=bytes_per_pack)
    assert _collectives(strategy, everything("sum"), x) == expected
    assert _collectives(strategy, everything("max"), x) == ({"pmax": expected["psum"]} if expected else {})


def test_options_of_a_call_override_the_options_of_the_strategy():
    x = jdist.PerReplica(_leaves(1, 2, 3))
    counts = itertools.product((0, 2**40), repeat=2)
    for strategy_bytes, call_bytes in counts:
        call = lambda tree, size=call_bytes: jdist.all_reduce("sum", tree, options=CommunicationOptions(size))
        assert _collectives(_strategy(2, bytes_per_pack=strategy_bytes), call, x) == {"psum": 1 if call_bytes else 3}


def test_nothing_is_packed_on_one_replica():
    x = jdist.PerReplica([leaf[:1] for leaf in _leaves(1, 2, 3)])
    for strategy in (_strategy(1), jdist.OneDeviceStrategy("cpu:0")):
        assert _collectives(strategy, lambda tree: jdist.all_reduce("sum", tree), x) == {"psum": 3}


ONE_PACK = {
    "scattered": (AllReduce(0), {"reduce_scatter": 1, "all_gather": 1}),
    "not_scattered": (AllReduce(2**40), {"psum": 1}),
    "one_device": (ReductionToOneDevice(), {"all_gather": 1}),
    "groups": (HierarchicalAllReduce(1), {"reduce_scatter": 1, "psum": 1, "all_gather": 1}),
}


@pytest.mark.parametrize("ops, expected", ONE_PACK.values(), ids=ONE_PACK)
def test_pack_is_reduced_once_by_every_algorithm(ops, expected):
    x = jdist.PerReplica(_leaves(1, 2, 3))
    assert _collectives(_strategy(2, ops, 2**40), lambda tree: jdist.all_reduce("sum", tree), x) == expected


def test_only_sums_of_at_least_the_threshold_are_scattered():
    x = jdist.PerReplica(_leaves(3, 4, 0))
    reduce_all = lambda op: lambda tree: jdist.all_reduce(op, tree)
    strategy = _strategy(2, AllReduce(16), 0)
    assert _collectives(strategy, reduce_all("sum"), x) == {"psum": 2, "reduce_scatter": 1, "all_gather": 1}
    assert _collectives(strategy, reduce_all("max"), x) == {"pmax": 3}


def test_strategy_resolves_default_parameters():
    resolve = lambda count: (
        AllReduce().resolve(_strategy(count).mesh),
        CommunicationOptions().resolve(_strategy(count).mesh),
    )
    assert resolve(1) == (AllReduce(None), CommunicationOptions(0))
    assert resolve(2) == (AllReduce(2 * 2**20), CommunicationOptions(128 * 2**10))
    mesh = _strategy(2).mesh
    assert AllReduce(5).resolve(mesh) == AllReduce(5)
    assert CommunicationOptions(0).resolve(mesh) == CommunicationOptions(0)
    assert ReductionToOneDevice().resolve(mesh) == ReductionToOneDevice()


def test_groups_are_neighbouring_devices_on_a_mesh_of_two_axes():
    strategy = _strategy(6, HierarchicalAllReduce(3))
    assert dict(strategy.mesh.shape) == {"group": 2, "replica": 3}
    assert [device.id for device in strategy.mesh.devices.flat] == list(range(6))
    assert dict(_strategy(3, HierarchicalAllReduce()).mesh.shape) == {"group": 1, "replica": 3}
    ids = strategy.run(lambda: (jdist.replica_id(), jdist.num_replicas() + 0, lax.axis_index("group")))
    np.testing.assert_array_equal(ids[0].tree, np.arange(6))
    assert int(ids[1]) == 6
    np.testing.assert_array_equal(ids[2].tree, [0, 0, 0, 1, 1, 1])


def test_replica_context_has_the_algorithm_and_the_options_of_the_strategy():
    strategy = _strategy(2, ReductionToOneDevice(), 7)
    contexts = []
    strategy.run(lambda: contexts.append(jdist.get_replica_context()))
    assert contexts[0].cross_device_ops == ReductionToOneDevice()
    assert contexts[0].communication_options == CommunicationOptions(7)


class Doubling(jdist.CrossDeviceOps):
    """A user-defined algorithm."""

    def reduce(self, op, x, axes):
        assert op is not jdist.ReduceOp.MEAN
        return {jdist.ReduceOp.SUM: lax.psum, jdist.ReduceOp.MAX: lax.pmax}[op](2 * x, axes)


def test_user_defined_algorithm_is_used_for_every_reduction():
    strategy = _strategy(2, Doubling())
    results = strategy.run(lambda x: [jdist.all_reduce(op, x) for op in ("sum", "mean", "max")], (rows(strategy, 3),))
    x = np.asarray(rows(strategy, 3).tree)
    chex.assert_trees_all_close(results, [2 * x.sum(0), 2 * x.mean(0), 2 * x.max(0)], rtol=1e-5)


NEGATIVE = {
    "pack": (
        lambda: CommunicationOptions(-1),
        r"`bytes_per_pack` must be >= 0, got -1\. It is a number of bytes; None",
    ),
    "scatter": (
        lambda: AllReduce(-5),
        r"`bytes_to_scatter` must be >= 0, got -5\. It is a number of bytes; None selects",
    ),
}


@each_row("make, message", NEGATIVE.values(), ids=NEGATIVE)
def test_negative_number_of_bytes_is_an_error(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@each_row("size", [-1, 0, 3, 5, 16])
def test_group_size_that_does_not_divide_the_replicas_is_an_error(size):
    message = rf"8 replicas cannot form groups of {size}: `group_size` must be a divisor of 8\."
    with pytest.raises(ValueError, match=message):
        jdist.MirroredStrategy(cross_device_ops=HierarchicalAllReduce(size))


WRONG_TYPES = {
    "algorithm": (
        lambda: jdist.MirroredStrategy(None, cross_device_ops=CommunicationOptions()),
        r"`cross_device_ops` must be a CrossDeviceOps, such as `jdist\.AllReduce\(\)`, got CommunicationOptions\(",
    ),
    "class": (
        lambda: jdist.MirroredStrategy(None, cross_device_ops=AllReduce),
        r"`cross_device_ops` must be a CrossDeviceOps, such as `jdist\.AllReduce\(\)`, got <class",
    ),
    "options": (
        lambda: jdist.MirroredStrategy(communication_options=AllReduce()),
        r"`communication_options` must be a CommunicationOptions, such as `jdist\.CommunicationOptions\(\)`, got AllReduce\(",
    ),
    "number": (
        lambda: jdist.MirroredStrategy(communication_options=64),
        r"`communication_options` must be a .*, got 64\.",
    ),
}


@each_row("make, message", WRONG_TYPES.values(), ids=WRONG_TYPES)
def test_options_of_a_wrong_type_are_errors(make, message):
    with pytest.raises(TypeError, match=message):
        make()
