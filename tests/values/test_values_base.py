"""All wrappers: no arithmetic, a frozen tree, a repr without contents, and `assign`."""

import copy
import dataclasses
import operator
import pickle
import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jdist

from laws import BACKENDS, STRATEGIES, each_row, replica_devices

X = np.arange(6.0, dtype=np.float32).reshape(2, 3)
WRAPPERS = {
    "PerReplica": lambda: jdist.PerReplica(X),
    "Mirrored": lambda: jdist.Mirrored(X, "mean", trainable=False),
    "SyncOnRead": lambda: jdist.SyncOnRead(X, "sum", trainable=True),
    "Sharded": lambda: jdist.Sharded(X),
}
every_wrapper = each_row("make", WRAPPERS.values(), ids=WRAPPERS)

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
OTHERS = {"number": 2, "numpy_scalar": np.float32(2), "numpy_array": np.ones(3)}
# What is computed, and the name in the error. Python and numpy may call another operator if the wrapper is on the right.
OPERATIONS = {
    **{
        f"{sign} {name}": (lambda x, fn=fn, other=other: fn(x, other), f"`{re.escape(sign)}`")
        for sign, fn in BINARY.items()
        for name, other in OTHERS.items()
    },
    **{
        f"{name} {sign}": (lambda x, fn=fn, other=other: fn(other, x), "")
        for sign, fn in BINARY.items()
        for name, other in OTHERS.items()
    },
    **{f"{sign}=": (lambda x, fn=fn: fn(x, 1), f"`{re.escape(sign)}`") for sign, fn in IN_PLACE.items()},
    **{f"{sign} unary": (fn, f"`{re.escape(sign)}`") for sign, fn in UNARY.items()},
    **{f"numpy {name}": (fn, "") for name, fn in NUMPY.items()},
    **{f"jax {name}": (fn, "`jax.numpy`") for name, fn in JAX.items()},
}


@every_wrapper
@each_row("operation, name", OPERATIONS.values(), ids=OPERATIONS)
def test_ru17_operation_of_a_wrapper_is_refused_with_the_fix(operation, name, make):
    value = make()
    says = rf"{name} is not defined for {re.escape(repr(value))}, .*`strategy\.run.*`\.values`"
    with pytest.raises(TypeError, match=says):
        operation(value)


# --- values, `map` and `assign`


KINDS = {
    "PerReplica": jdist.PerReplica,
    "SyncOnRead": lambda tree: jdist.SyncOnRead(tree, "mean", trainable=True),
    "SyncOnRead_sum": lambda tree: jdist.SyncOnRead(tree, "sum"),
    "Sharded": jdist.Sharded,
    "Mirrored": lambda tree: jdist.Mirrored(tree, "sum", trainable=False),
}
BY_ROW = [kind for kind in KINDS if kind != "Mirrored"]


def _value(kind, tree):
    """Returns the value whose part on replica `i` is row `i` of the leaves, or row 0 of a replicated value."""
    stored = {"Sharded": jnp.concatenate, "Mirrored": lambda rows: rows[0]}.get(kind, lambda rows: rows)
    return KINDS[kind](jax.tree.map(stored, tree))


def _row(tree, i):
    return jax.tree.map(lambda rows: rows[i], tree)


def _numbers(strategy, seed=0, dtype=np.float32):
    return np.random.default_rng(seed).integers(1, 9, (strategy.num_replicas_in_sync, 2, 3)).astype(dtype)


def _plain(tree):
    is_key = lambda leaf: jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    return jax.tree.map(lambda leaf: np.asarray(jax.random.key_data(leaf) if is_key(leaf) else leaf), tree)


@pytest.mark.parametrize("kind", KINDS)
def test_values_are_the_parts_of_the_replicas_on_their_own_devices(kind, strategy):
    n = strategy.num_replicas_in_sync
    tree = {"a": _numbers(strategy), "b": (np.arange(2 * n).reshape(n, 2), None)}
    tree["key"] = jax.random.split(jax.random.key(3), (n, 2))
    parts = strategy.put(_value(kind, tree)).values
    for number, (part, devices) in enumerate(zip(parts, replica_devices(strategy), strict=True)):
        chex.assert_trees_all_equal(_plain(part), _plain(_row(tree, 0 if kind == "Mirrored" else number)))
        assert devices == set().union(*(leaf.devices() for leaf in jax.tree.leaves(part)))


MAPS = {
    "elementwise": lambda x: x * 2 + 1,
    "reduction": lambda x: x.sum(0),
    "other_structure": lambda x: {"max": x.max(0), "same": x},
    "constant": lambda x: jnp.zeros(3),
}


@pytest.mark.parametrize("kind", KINDS)
@each_row("name", MAPS)
def test_map_computes_the_function_of_each_part_on_its_devices(name, kind, strategy):
    fn = MAPS[name]
    value = strategy.put(_value(kind, _numbers(strategy)))
    mapped = value.map(fn)
    assert (type(mapped), _fields(mapped)) == (type(value), _fields(value))
    for before, after in zip(value.values, mapped.values, strict=True):
        chex.assert_trees_all_close(after, fn(np.asarray(before)), rtol=1e-6)
        assert all(leaf.devices() == before.devices() for leaf in jax.tree.leaves(after))


@pytest.mark.parametrize("kind", BY_ROW)
def test_assign_of_one_value_per_replica_assigns_each(kind, strategy):
    old, new = _numbers(strategy), _numbers(strategy, seed=1)
    value, parts = strategy.put(_value(kind, old)), strategy.put(jdist.PerReplica(new))
    for assigned, rows in (
        (value.assign(parts), new),
        (value.assign_add(parts), old + new),
        (value.assign_sub(parts), old - new),
        (value.assign(value.assign(parts)), new),
    ):
        np.testing.assert_array_equal(assigned.tree, _value(kind, rows).tree)


ASSIGNED = [(name, "float32") for name in BACKENDS]
ASSIGNED += [("mirrored_3", dtype) for dtype in ("bfloat16", "int32", "uint8", "complex64")]


@each_row("kind", [kind for kind in KINDS if kind != "SyncOnRead_sum"])
@each_row("name, dtype", ASSIGNED)
def test_assign_of_one_value_gives_it_to_every_replica_in_the_dtype_and_sharding(name, dtype, kind):
    strategy, dtype = STRATEGIES[name](), jnp.dtype(dtype)
    n = strategy.num_replicas_in_sync
    if kind == "SyncOnRead" and jnp.issubdtype(dtype, jnp.integer):
        return  # integers have no mean
    rows = _numbers(strategy, dtype=dtype)
    rows = rows if kind == "Sharded" else np.stack([rows[0]] * n)
    new = np.concatenate(rows) if kind == "Sharded" else rows[0]
    value = strategy.put(_value(kind, {"x": np.zeros_like(rows)}))  # numpy 2.0: bfloat16 * 0 is float32
    for assigned in (value.assign({"x": new}), value.assign(strategy.put(jdist.Mirrored({"x": new})))):
        expected = _value(kind, {"x": rows}).tree
        for result in (assigned, assigned.assign_add({"x": new}).assign_sub({"x": new})):
            chex.assert_trees_all_equal(result.tree, expected)
            assert (_fields(result), result.tree["x"].dtype) == (_fields(value), dtype)
            assert result.tree["x"].sharding.is_equivalent_to(value.tree["x"].sharding, rows.ndim)


@every_wrapper
def test_wrapper_has_no_hash_and_no_field_that_can_be_set(make):
    value = make()
    with pytest.raises(TypeError, match="unhashable"):
        hash(value)
    with pytest.raises(dataclasses.FrozenInstanceError):
        value.tree = 1


def _fields(value):
    return {field.name: getattr(value, field.name) for field in dataclasses.fields(value) if field.name != "tree"}


COPIES = {
    "tree_map": lambda value: jax.tree.map(lambda x: x, value),
    "flatten": lambda value: jax.tree.unflatten(jax.tree.structure(value), jax.tree.leaves(value)),
    "deepcopy": copy.deepcopy,
    "pickle": lambda value: pickle.loads(pickle.dumps(value)),
    "jit": jax.jit(lambda value: value),
}


@every_wrapper
@each_row("name", COPIES)
def test_copy_of_a_wrapper_has_the_same_options_and_placement(name, make, two):
    for value in (make(), two.put(make())):
        result = COPIES[name](value)
        assert (type(result), repr(result), _fields(result)) == (type(value), repr(value), _fields(value))
        np.testing.assert_array_equal(result.tree, X)
        if isinstance(value.tree, jax.Array) and name != "pickle":
            assert result.tree.sharding.is_equivalent_to(value.tree.sharding, 2)


REPRS = {
    "per_replica": (lambda x: jdist.PerReplica(x), "PerReplica(float32[2,3])"),
    "mirrored": (lambda x: jdist.Mirrored(x), "Mirrored(float32[2,3])"),
    "mirrored_mean": (lambda x: jdist.Mirrored(x, "Mean"), "Mirrored(float32[2,3], MEAN)"),
    "mirrored_frozen": (lambda x: jdist.Mirrored(x, trainable=False), "Mirrored(float32[2,3], trainable=False)"),
    "mirrored_all": (lambda x: jdist.Mirrored(x, "sum", False), "Mirrored(float32[2,3], SUM, trainable=False)"),
    "sync_on_read": (lambda x: jdist.SyncOnRead(x, "sum"), "SyncOnRead(float32[2,3], SUM)"),
    "sync_trainable": (lambda x: jdist.SyncOnRead(x, "mean", True), "SyncOnRead(float32[2,3], MEAN, trainable=True)"),
    "sharded": (lambda x: jdist.Sharded(x), "Sharded(float32[2,3])"),
    "tree": (lambda x: jdist.Mirrored({"a": x, "b": None}, "sum"), "Mirrored({'a': float32[2,3], 'b': None}, SUM)"),
    "key": (lambda x: jdist.Mirrored(jax.random.key(0)), "Mirrored(key<fry>[])"),
    "number": (lambda x: jdist.Mirrored(1.5), "Mirrored(1.5)"),
    "nothing": (lambda x: jdist.Sharded({}), "Sharded({})"),
}


@pytest.mark.parametrize("make, text", REPRS.values(), ids=REPRS)
def test_repr_of_a_wrapper_shows_dtypes_and_shapes_and_no_contents(make, text):
    assert repr(make(X)) == text
    traced = []
    jax.eval_shape(lambda x: traced.append(repr(make(x))), X)
    assert traced == [text]


NESTED = {
    "mirrored": (
        lambda: jdist.Mirrored({"a": jdist.PerReplica(X)}),
        r"is a Mirrored around PerReplica\(float32\[2,3\]\): a value has one placement\. Remove a wrapper",
    ),
    "sharded": (
        lambda: jdist.Sharded(jdist.Mirrored(X)),
        r"is a Sharded around Mirrored\(float32\[2,3\]\): .*Remove a wrapper",
    ),
    "per_replica": (lambda: jdist.PerReplica([jdist.Sharded(X)]), r"is a PerReplica around Sharded.*Remove a wrapper"),
    "sync_on_read": (
        lambda: jdist.SyncOnRead(jdist.SyncOnRead(X, "sum"), "sum"),
        r"is a SyncOnRead around SyncOnRead\(float32\[2,3\], SUM\): .*Remove a wrapper",
    ),
}


@each_row("make, message", NESTED.values(), ids=NESTED)
def test_wrapper_inside_a_wrapper_is_refused_by_every_function(make, message, two):
    with pytest.raises(TypeError, match=r"value\['x'\] " + message):
        two.put({"x": make()})
    with pytest.raises(TypeError, match=r"x " + message):
        two.run(lambda x: x, (make(),))
    with pytest.raises(TypeError, match=r"state\['x'\] " + message):
        two.step(lambda state: (state, None))({"x": make()})
    with pytest.raises(TypeError, match=r"state\['x'\] " + message):
        two.init(lambda: {"x": make()})


@every_wrapper
@each_row("method", ["assign", "assign_add", "assign_sub"])
def test_assign_to_a_value_that_is_not_placed_is_refused(method, make):
    message = r"value is float32\[2,3\], and is not on the devices of a strategy yet\. Place it first: `strategy\.put"
    for value in (make(), jax.tree.map(jnp.asarray, make())):
        with pytest.raises(ValueError, match=message):
            getattr(value, method)(jdist.PerReplica(X))


ASSIGN_REFUSED = {
    "shape": (
        lambda row: np.ones(5, np.float32),
        ValueError,
        r"`assign`: value\['a'\] has the shape \[.*3\], and the new value has \[5\]\. A value keeps its shape",
    ),
    "scalar": (lambda row: 1.0, ValueError, r"`assign`: value\['a'\] has the shape .*, and the new value has \[\]"),
    "list": (
        lambda row: row.tolist(),
        ValueError,
        r"`assign` received a value with the structure .* for .*\(\{'a': float32\[2,3\]\}.*Pass a tree with the "
        r"structure of the value that it repl",
    ),
    "complex": (
        lambda row: row * 1j,
        TypeError,
        r"value\['a'\] is float32 and cannot hold complex\w+\[.*\] without loss\. Cast the new value first",
    ),
    "key": (
        lambda row: jax.random.split(jax.random.key(0), row.shape),
        TypeError,
        r"value\['a'\] is float32 and cannot hold key<fry>",
    ),
}


@every_wrapper
@each_row("change, error, message", ASSIGN_REFUSED.values(), ids=ASSIGN_REFUSED)
def test_assign_of_another_shape_or_dtype_is_refused_by_name(change, error, message, make, two):
    value = make()
    value = two.put(dataclasses.replace(value, tree={"a": value.tree}))
    row = X if isinstance(value, (jdist.Mirrored, jdist.Sharded)) else X[0]
    with pytest.raises(error, match=message):
        value.assign({"a": change(row)})


STRUCTURES = {
    "assign_add": {"a": X},
    "assign": {"a": X, "b": None},
    "assign_sub": jdist.PerReplica(X),
}


@each_row("method, new", STRUCTURES.items())
def test_assign_of_another_structure_is_refused(method, new, two):
    value = two.put(jdist.Mirrored({"a": X, "b": X}))
    with pytest.raises(ValueError, match=rf"`{method}` received a value with the structure .*Pass a tree with the"):
        getattr(value, method)(new)


HELD = [
    (np.float32(0), 3),
    (np.float32(0), np.float64(0.5)),
    (np.float32(0), True),
    (jnp.bfloat16(0), 1.5),
    (jnp.bfloat16(0), np.float32(1.5)),
    (np.complex64(0), 2.5),
    (np.complex64(0), 1 - 2j),
    (np.False_, True),
    (np.int32(0), np.int64(7)),
    (np.uint8(0), 255),
    (np.int32(0), 2**31 - 1),
    (np.int32(0), np.int64(2**31 - 1)),
]
LOST = [
    (np.uint8(0), 256, "256"),
    (np.uint8(0), -1, "-1"),
    (np.uint8(0), 1.5, r"1\.5"),
    (np.int32(0), 2**31, str(2**31)),
    (np.int32(0), 1.5, r"1\.5"),
    (np.int32(0), np.int64(2**31), r"int64\[\]"),
]


@each_row("old, new", HELD)
def test_assign_casts_without_loss(old, new, two):
    result = two.put(jdist.Mirrored(old)).assign(new).read()
    assert result.dtype == old.dtype
    assert complex(result) == complex(new)


@each_row("old, new, text", LOST)
def test_assign_with_a_loss_is_refused(old, new, text, two):
    with pytest.raises(TypeError, match=rf"is {old.dtype} and cannot hold {text} without loss"):
        two.put(jdist.Mirrored(old)).assign(new)


def test_assign_of_keys_accepts_keys_of_the_same_dtype(two):
    value = two.put(jdist.Mirrored(jax.random.key(0)))
    result = value.assign(jax.random.key(5)).read()
    np.testing.assert_array_equal(jax.random.key_data(result), jax.random.key_data(jax.random.key(5)))
    for other in (1.0, np.uint32(1), jax.random.key(5, impl="rbg")):
        with pytest.raises(TypeError, match=r"`assign`: value is key<fry> and cannot hold"):
            value.assign(other)


def test_assign_to_an_empty_tree_is_an_empty_tree(two):
    for value in (jdist.Mirrored({}), jdist.PerReplica({}), jdist.Sharded({}), jdist.SyncOnRead({}, "mean")):
        result = two.put(value).assign({})
        assert (type(result), result.tree) == (type(value), {})


def test_unpacking_a_wrapper_around_a_tree_is_refused_with_the_line_to_write(two):
    pair = two.put(jdist.PerReplica((X, X)))
    with pytest.raises(
        TypeError, match=r"wraps a tuple.*wrap each element: `x, y = map\(jdist\.PerReplica, value\.tree\)`"
    ):
        x, y = pair
    with pytest.raises(TypeError, match=r"wraps a dict.*for name, leaf in value\.tree\.items\(\)"):
        two.put(jdist.Mirrored({"x": X}, "mean"))["x"]
    with pytest.raises(TypeError) as error:
        iter(two.put(jdist.PerReplica(X)))
    assert "whole" not in str(error.value)
