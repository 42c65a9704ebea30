"""Wrappers: what a `PerReplica` offers, what it refuses, and how values come to lie on a mesh."""

import dataclasses
import operator
import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jdist

from laws import assert_in_step, rows

WAY_OUT = r" on a PerReplica\(float32\[2,3\]\): it holds one value a replica.*`strategy\.run.*`\.values`"
BINARY = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "/": operator.truediv,
    "//": operator.floordiv,
    "%": operator.mod,
    "**": operator.pow,
    "@": operator.matmul,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
    "&": operator.and_,
    "|": operator.or_,
    "^": operator.xor,
    "<<": operator.lshift,
    ">>": operator.rshift,
    "divmod": divmod,
}
IN_PLACE = {"+": operator.iadd, "-": operator.isub, "*": operator.imul, "/": operator.itruediv, "|": operator.ior}
UNARY = {
    "-": operator.neg,
    "+": operator.pos,
    "~": operator.invert,
    "abs": abs,
    "bool": bool,
    "int": int,
    "float": float,
    "complex": complex,
    "len": len,
    "iter": iter,
    "[]": lambda x: x[0],
}
NUMPY = {
    "asarray": np.asarray,
    "array": np.array,
    "array_of_dtype": lambda x: np.asarray(x, np.float64),
    "sum": np.sum,
    "mean": np.mean,
    "sin": np.sin,
    "add": lambda x: np.add(1, x),
    "stack": lambda x: np.stack([x, x]),
    "concatenate": lambda x: np.concatenate([x, x]),
    "array_plus": lambda x: np.ones(3) + x,
    "scalar_times": lambda x: np.float32(2) * x,
    "array_at": lambda x: np.ones(3) @ x,
    "where": lambda x: np.where(x, 1, 2),
}
JAX = {
    "asarray": jnp.asarray,
    "array": jnp.array,
    "sum": jnp.sum,
    "sin": jnp.sin,
    "add": lambda x: jnp.add(1, x),
    "stack": lambda x: jnp.stack([x, x]),
    "array_plus": lambda x: jnp.ones(3) + x,
    "array_at": lambda x: jnp.ones(3) @ x,
    "where": lambda x: jnp.where(x, 1, 2),
}


@pytest.mark.parametrize("sign", BINARY)
@pytest.mark.parametrize("other", [2, np.float32(2), np.ones(3)], ids=["number", "numpy_scalar", "numpy_array"])
def test_operator_on_per_replica_is_refused_from_both_sides(sign, other, two):
    with pytest.raises(TypeError, match=f"`{re.escape(sign)}`" + WAY_OUT):
        BINARY[sign](rows(two, 3), other)
    with pytest.raises(TypeError, match=WAY_OUT):  # Python and numpy may ask for it under another name
        BINARY[sign](other, rows(two, 3))


@pytest.mark.parametrize("sign", IN_PLACE)
def test_operator_in_place_on_per_replica_is_refused(sign, two):
    with pytest.raises(TypeError, match=f"`{re.escape(sign)}`" + WAY_OUT):
        IN_PLACE[sign](rows(two, 3), 1)


@pytest.mark.parametrize("sign", UNARY)
def test_operator_of_per_replica_alone_is_refused(sign, two):
    with pytest.raises(TypeError, match=f"`{re.escape(sign)}`" + WAY_OUT):
        UNARY[sign](rows(two, 3))


@pytest.mark.parametrize("fn", NUMPY.values(), ids=NUMPY)
def test_numpy_function_of_per_replica_is_refused_with_the_way_out(fn, two):
    with pytest.raises(TypeError, match=WAY_OUT):
        fn(rows(two, 3))


@pytest.mark.parametrize("fn", JAX.values(), ids=JAX)
def test_jax_function_of_per_replica_is_refused_with_the_way_out(fn, two):
    with pytest.raises(TypeError, match="`jax.numpy`" + WAY_OUT):
        fn(rows(two, 3))


REPRS = {
    "array": (np.zeros((2, 3), np.float32), "PerReplica(float32[2,3])"),
    "tree": ({"a": np.zeros(2, np.int32), "b": None}, "PerReplica({'a': int32[2], 'b': None})"),
    "key": (jax.random.split(jax.random.key(0)), "PerReplica(key<fry>[2])"),
}


@pytest.mark.parametrize("tree, said", REPRS.values(), ids=REPRS)
def test_repr_of_per_replica_says_specs_and_no_contents(tree, said):
    assert repr(jdist.PerReplica(tree)) == said


def test_repr_of_traced_per_replica_says_specs(two):
    seen = []
    jax.eval_shape(lambda x: seen.append(repr(x)), rows(two, 3))
    assert seen == ["PerReplica(float32[2,3])"]


def test_values_of_per_replica_are_rows_on_their_own_devices(strategy):
    n = strategy.num_replicas_in_sync
    tree = {"a": np.arange(n * 2).reshape(n, 2), "b": (np.arange(n), None)}
    parts = strategy.put(jdist.PerReplica(tree)).values
    assert len(parts) == n
    for number, (part, device) in enumerate(zip(parts, strategy.mesh.devices.flat, strict=True)):
        chex.assert_trees_all_equal(part, jax.tree.map(lambda x, i=number: x[i], tree))
        assert {device} == set().union(*(leaf.devices() for leaf in jax.tree.leaves(part)))


def test_values_of_per_replica_keys_are_keys(strategy):
    keys = jax.random.split(jax.random.key(3), strategy.num_replicas_in_sync)
    for mine, key in zip(strategy.put(jdist.PerReplica(keys)).values, keys, strict=True):
        assert mine.dtype == key.dtype
        np.testing.assert_array_equal(jax.random.key_data(mine), jax.random.key_data(key))


def test_read_of_per_replica_is_the_stacked_tree(strategy):
    value = rows(strategy, 2)
    np.testing.assert_array_equal(value.read(), np.stack(value.values))


MAPS = {
    "elementwise": (lambda x: x * 2 + 1, lambda x: x * 2 + 1),
    "reduction": (lambda x: x.sum(0), lambda x: x.sum(0)),
    "other_structure": (lambda x: {"max": x.max(), "same": x}, lambda x: {"max": x.max(), "same": x}),
    "constant": (lambda x: jnp.zeros(3), lambda x: np.zeros(3, np.float32)),
}


@pytest.mark.parametrize("fn, expected", MAPS.values(), ids=MAPS)
def test_map_of_per_replica_is_the_function_of_each_row_where_it_lies(fn, expected, strategy):
    value = rows(strategy, 4)
    mapped = value.map(fn)
    assert isinstance(mapped, jdist.PerReplica)
    for before, after in zip(value.values, mapped.values, strict=True):
        chex.assert_trees_all_close(after, expected(np.asarray(before)), rtol=1e-6)
        assert all(leaf.devices() == before.devices() for leaf in jax.tree.leaves(after))


def test_per_replica_is_a_frozen_tree(two):
    value = rows(two, 3)
    with pytest.raises(dataclasses.FrozenInstanceError):
        value.tree = 1
    doubled = jax.tree.map(lambda x: x * 2, {"x": value})["x"]
    assert isinstance(doubled, jdist.PerReplica)
    np.testing.assert_array_equal(doubled.tree, 2 * np.asarray(value.tree))


def test_put_of_plain_leaves_is_the_same_on_every_device(strategy):
    tree = {"a": np.arange(6.0, dtype=np.float32).reshape(2, 3), "n": 3, "key": jax.random.key(1), "none": None}
    placed = strategy.put(tree)
    assert_in_step(placed)
    for leaf in jax.tree.leaves(placed):
        assert leaf.sharding.device_set == set(strategy.mesh.devices.flat)
        assert leaf.sharding.is_fully_replicated
        assert not jax.typeof(leaf).weak_type
    chex.assert_trees_all_equal(
        [placed["a"], placed["n"], jax.random.key_data(placed["key"]), placed["none"]],
        [tree["a"], np.int32(3), jax.random.key_data(tree["key"]), None],
    )


def test_put_of_wrapped_leaves_is_one_row_a_device(strategy):
    n = strategy.num_replicas_in_sync
    placed = strategy.put({"own": jdist.PerReplica(np.arange(n * 2).reshape(n, 2)), "all": np.arange(2)})
    assert placed["own"].tree.sharding.shard_shape((n, 2)) == (1, 2)
    assert placed["all"].sharding.is_fully_replicated


def test_put_of_what_was_put_is_the_same(strategy):
    once = strategy.put({"own": rows(strategy, 2), "all": np.arange(3)})
    again = strategy.put(once)
    chex.assert_trees_all_equal(again, once)
    assert [x.sharding for x in jax.tree.leaves(again)] == [x.sharding for x in jax.tree.leaves(once)]


PUT_REFUSED = {
    "other_number": (np.ones((3, 2), np.float32), r"float32\[3,2\].*3 replicas.*this strategy has 2"),
    "no_rows": (np.float32(1), r"float32\[\].*no replicas.*this strategy has 2"),
}


@pytest.mark.parametrize("rows, says", PUT_REFUSED.values(), ids=PUT_REFUSED)
def test_put_of_per_replica_for_another_number_of_replicas_is_refused(rows, says, two):
    with pytest.raises(ValueError, match=says):
        two.put({"x": jdist.PerReplica(rows)})


def test_values_from_function_are_those_of_each_replica(strategy):
    n = strategy.num_replicas_in_sync
    made = strategy.distribute_values_from_function(
        lambda c: {"id": c.replica_id_in_sync_group, "x": np.full(2, c.num_replicas_in_sync, np.float32), "none": None}
    )
    assert isinstance(made, jdist.PerReplica)
    chex.assert_trees_all_equal(
        made.tree, {"id": np.arange(n, dtype=np.int32), "x": np.full((n, 2), n, np.float32), "none": None}
    )
    for value, device in zip(made.values, strategy.mesh.devices.flat, strict=True):
        assert value["x"].devices() == {device}


def test_values_from_function_may_be_keys(strategy):
    made = strategy.distribute_values_from_function(lambda c: jax.random.key(c.replica_id_in_sync_group))
    for number, key in enumerate(made.values):
        np.testing.assert_array_equal(jax.random.key_data(key), jax.random.key_data(jax.random.key(number)))


ALIKE = r"Give every replica a value of the same structure, ranks and dtypes"
UNLIKE = {
    "rank": (
        lambda i: {"a": np.ones([1] * (i + 1), np.float32)},
        rf"replica 1 has float32\[1,1\] for value\['a'\], and not the float32\[1\] of replica 0\. {ALIKE}",
    ),
    "dtype": (
        lambda i: {"a": [np.int32(1), np.float32(1)][i]},
        rf"replica 1 has float32\[\] for value\['a'\], and not the int32\[\] of replica 0\. {ALIKE}",
    ),
    "more_leaves": (
        lambda i: {"a": 1, "b": 2} if i else {"a": 1},
        rf"replica 1 has the structure .*'b'.*, and not the .*'a'.* of replica 0\. {ALIKE}",
    ),
    "other_leaf": (
        lambda i: {"b": 1} if i else {"a": 1},
        rf"replica 1 has .*'b'.* not the .*'a'.* replica 0\. {ALIKE}",
    ),
    "other_container": (
        lambda i: (1,) if i else [1],
        rf"replica 1 has .*\(\*,\).* not the .*\[\*\].* replica 0\. {ALIKE}",
    ),
    "none_for_a_leaf": (
        lambda i: {"a": 1, "b": None} if i else {"a": 1},
        rf"replica 1 has .*None.* replica 0\. {ALIKE}",
    ),
}


@pytest.mark.parametrize("make, says", UNLIKE.values(), ids=UNLIKE)
def test_values_from_function_that_differ_in_kind_are_refused(make, says, two):
    with pytest.raises(ValueError, match=says):
        two.distribute_values_from_function(lambda c: make(c.replica_id_in_sync_group))
