"""The state of a step: each leaf gets a new value with the same placement, and nothing else changes."""

import collections
import dataclasses
import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx, struct

import jdist
from jdist._src.execution.state_stages import strongly_typed

from laws import STRATEGIES, assert_in_step, fixture_of_all_backends, rows

strategy = fixture_of_all_backends()


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Train:
    w: object
    count: object


def _state(strategy):
    return strategy.put({"w": np.ones(3, np.float32), "n": np.int32(0)})


def rename_in_place(state):
    state["m"] = state.pop("n")
    return state, None


def widen_in_place(state):
    state["n"] = state["n"] + 1.5
    return state, None


def _changing(**leaves):
    return lambda state: ({**state, **{name: new(state) for name, new in leaves.items()}}, None)


KEEPS = r"A state keeps its structure: start with every leaf that it will have"
KEEPS_SHAPE = r"A state keeps its shapes and dtypes.*cast the new value \(`\.astype`\), or start with this shape"
RETURNED_AS = r"returned state\['w'\] as"
PLAIN = r": inside a replica function values are plain\. Return the array"
CHANGES = {
    "leaf_gone": (lambda s: ({"w": s["w"]}, None), rf"state\['n'\] is missing\. {KEEPS}"),
    "leaf_none": (lambda s: ({"w": s["w"], "n": None}, None), rf"state\['n'\] is missing\. {KEEPS}"),
    "leaf_new": (lambda s: ({**s, "m": s["n"]}, None), rf"state\['m'\] is new\. {KEEPS}"),
    "leaf_renamed": (rename_in_place, rf"\['n'\] is missing; state\['m'\] is new\. {KEEPS}"),
    "container": (lambda s: ((s["n"], s["w"]), None), rf"structure of the state: .*state\['n'\].*state\[0\].* {KEEPS}"),
    "shape": (_changing(w=lambda s: s["w"][:2]), rf"state\['w'\] from float32\[3\] to float32\[2\]\. {KEEPS_SHAPE}"),
    "rank": (_changing(n=lambda s: s["n"][None]), rf"state\['n'\] from int32\[\] to int32\[1\]\. {KEEPS_SHAPE}"),
    "dtype": (
        _changing(w=lambda s: s["w"].astype(jnp.bfloat16)),
        rf"state\['w'\] from float32\[3\] to bfloat16\[3\]\. {KEEPS_SHAPE}",
    ),
    "promoted": (widen_in_place, rf"state\['n'\] from int32\[\] to float32\[\]\. {KEEPS_SHAPE}"),
    **{
        wrap.__name__: (_changing(w=lambda s, wrap=wrap: wrap(s["w"])), rf"{RETURNED_AS} {wrap.__name__}{PLAIN}")
        for wrap in (jdist.PerReplica, jdist.Mirrored, jdist.Sharded)
    },
    "SyncOnRead": (_changing(w=lambda s: jdist.SyncOnRead(s["w"], "sum")), rf"{RETURNED_AS} SyncOnRead{PLAIN}"),
    "all_wrapped": (lambda s: (jdist.PerReplica(s), None), r"returned state as PerReplica: .*Return the array"),
}


@pytest.mark.parametrize("fn, message", CHANGES.values(), ids=CHANGES)
def test_step_that_changes_structure_shape_or_dtype_of_its_state_raises(fn, message, strategy):
    state = _state(strategy)
    with pytest.raises(TypeError, match=message):
        strategy.step(fn)(state)
    assert not state["w"].is_deleted()  # the step did not run


OTHER_STATES = {
    "list": (lambda s: s.put((1.0,)), lambda s: (list(s), None), r"structure of the state: PyTreeDef\(\(\*,\)\) became PyTreeDef\(\[\*\]\)\. A state keeps"),
    "field": (lambda s: s.put(Train(1.0, 2)), lambda s: (Train(s.w, None), None), r"state\.count is missing"),
    "row": (lambda s: {"own": rows(s, 3)}, lambda s: ({"own": s["own"][0]}, None), r"state\['own'\] from float32\[3\] to float32\[\]"),
}  # fmt: skip


@pytest.mark.parametrize("make, fn, message", OTHER_STATES.values(), ids=OTHER_STATES)
def test_error_about_a_changed_state_names_its_containers_fields_and_shapes_of_one_replica(make, fn, message, two):
    with pytest.raises(TypeError, match=message):
        two.step(fn)(make(two))


NOT_PAIRS = {
    "nothing": (lambda s: None, "None"),
    "three": (lambda s: (s, 1, 2), "a tuple of 3"),
    "one": (lambda s: (s,), "a tuple of 1"),
    "list": (lambda s: [s, None], "list"),
    "dict": (lambda s: s, "dict"),
    "array": (lambda s: s["w"], r"float32\[3\]"),
}


@pytest.mark.parametrize("fn, got", NOT_PAIRS.values(), ids=NOT_PAIRS)
def test_step_that_does_not_return_a_pair_raises(fn, got, two):
    message = rf"must return a pair `\(state, outputs\)`, and this one returned .*{got}.*returns `\(state, None\)`"
    with pytest.raises(TypeError, match=message):
        two.step(fn)(_state(two))


def test_step_that_changes_several_objects_and_returns_none_is_answered_with_its_signature(two):
    """As a function of `nnx.jit` does."""

    def train_step(model, optimizer, metrics, batch):
        pass

    message = (
        r"returned None\. The state is the first argument, `model`\. A step that changes several arguments takes them as one "
        r"tuple: `def train_step\(state, batch\)` with `model, optimizer, metrics = state`, which returns "
        r"`\(\(model, optimizer, metrics\), None\)`\."
    )
    with pytest.raises(TypeError, match=message):
        two.step(train_step)(_state(two), 1.0, 2.0, 3.0)
    with pytest.raises(TypeError, match=r"returned None\. A step without outputs returns `\(state, None\)`\."):
        two.step(lambda state, x, y: None)(_state(two), 1.0, 2.0)


def test_strongly_typed_state_has_no_weak_types():
    state = strongly_typed({"f": 1.0, "n": 2, "b": True, "x": np.float32(3), "weak": jnp.asarray(1.0), "none": None})
    assert [jax.typeof(leaf).weak_type for leaf in jax.tree.leaves(state)] == [False] * 5
    dtypes = jax.tree.map(lambda leaf: str(leaf.dtype), state)
    assert dtypes == {"f": "float32", "n": "int32", "b": "bool", "x": "float32", "weak": "float32", "none": None}


def make_state(key):
    own = {"key": jdist.replica_key(key), "count": jnp.zeros((), jnp.int32)}
    return {"w": jnp.ones((2, 3)), "own": jdist.PerReplica(own), "rest": (jnp.int32(0), key, None)}


def advance(state, x):
    own = state["own"]
    drawn = jax.random.normal(own["key"], x.shape)
    count, key, none = state["rest"]
    w = state["w"] + jdist.all_reduce("sum", x * drawn)
    own = {"key": jax.random.split(own["key"])[0], "count": own["count"] + jdist.replica_id()}
    return {"w": w, "own": own, "rest": (count + 1, key, none)}, drawn


def _shardings(tree):
    return [leaf.sharding for leaf in jax.tree.leaves(tree)]


def test_step_keeps_the_sharding_and_the_wrapper_of_every_leaf(strategy):
    step = strategy.step(advance)
    state = strategy.init(make_state, jax.random.key(4))
    structure, shardings = jax.tree.structure(state), _shardings(state)
    shapes = jax.tree.map(jax.typeof, state)
    for seed in range(3):
        state, _ = step(state, rows(strategy, 2, 3, seed=seed))
        assert jax.tree.structure(state) == structure
        assert _shardings(state) == shardings
        chex.assert_trees_all_equal(jax.tree.map(jax.typeof, state), shapes)
    assert isinstance(state["own"], jdist.PerReplica)
    assert_in_step((state["w"], state["rest"]))


def test_step_updates_a_per_replica_leaf_on_each_replica_separately(strategy):
    step, n = strategy.step(advance), strategy.num_replicas_in_sync
    state = strategy.init(make_state, jax.random.key(4))
    keys = [jax.random.fold_in(jax.random.key(4), i) for i in range(n)]
    for seed in range(2):
        state, drawn = step(state, rows(strategy, 2, 3, seed=seed))
        np.testing.assert_allclose(drawn.tree, [jax.random.normal(key, (2, 3)) for key in keys], rtol=1e-5)
        keys = [jax.random.split(key)[0] for key in keys]
    np.testing.assert_array_equal(state["own"].tree["count"], 2 * np.arange(n))
    for mine, key in zip(state["own"].values, keys, strict=True):
        np.testing.assert_array_equal(jax.random.key_data(mine["key"]), jax.random.key_data(key))


AGGREGATES = {"sum": np.sum, "mean": np.mean, "only_first_replica": lambda x, axis: x[0]}


def _state_with_every_aggregation(strategy):
    n = strategy.num_replicas_in_sync
    mirrored = {name: jdist.Mirrored(np.float32([1, 1]), name) for name in AGGREGATES}
    return strategy.put({**mirrored, "read": jdist.SyncOnRead(np.zeros((n, 2), np.float32), "sum"), "own": _own(n)})


def _own(n):
    return jdist.PerReplica(np.zeros((n, 2), np.float32))


GROUPS = {
    "groups": lambda: jdist.MirroredStrategy(cross_device_ops=jdist.HierarchicalAllReduce(2)),
    "one_device_reduces": lambda: jdist.MirroredStrategy(
        ["cpu:1", "cpu:2"], cross_device_ops=jdist.ReductionToOneDevice()
    ),
    "scattered": lambda: jdist.MirroredStrategy(["cpu:1", "cpu:2"], cross_device_ops=jdist.AllReduce(0)),
}
WRITERS = {**{name: STRATEGIES[name] for name in ("one_device", "mirrored_3", "sharded_4", "central_2")}, **GROUPS}


@pytest.mark.parametrize("make", WRITERS.values(), ids=WRITERS)
def test_write_is_aggregated_as_its_wrapper_declares(make):
    strategy = make()
    x = rows(strategy, 2)
    step = strategy.step(lambda state, x: ({name: value * 0 + x for name, value in state.items()}, None))
    state = _state_with_every_aggregation(strategy)
    kinds = {name: repr(value) for name, value in state.items()}
    for _ in range(2):
        state, _ = step(state, x)
        assert {name: repr(value) for name, value in state.items()} == kinds
        for name, aggregate in AGGREGATES.items():
            expected = aggregate(np.asarray(x.tree), axis=0)
            np.testing.assert_allclose(state[name].read(), expected, rtol=1e-5, atol=1e-6)
            assert_in_step(state[name].tree)
        np.testing.assert_array_equal(state["read"].tree, x.tree)
        np.testing.assert_array_equal(state["own"].tree, x.tree)
    assert step.proof.replicated == ("state['mean']", "state['only_first_replica']", "state['sum']")
    assert step.proof.per_replica == ("state['own']", "state['read']")


def test_leaf_that_is_returned_unchanged_is_not_aggregated(strategy):
    n = strategy.num_replicas_in_sync
    step = strategy.step(lambda state, x: ({**state, "mean": x}, None))
    state, _ = step(_state_with_every_aggregation(strategy), rows(strategy, 2))
    state, _ = strategy.step(lambda state: (jax.tree.map(lambda x: x, state), None))(state)
    np.testing.assert_array_equal(state["sum"].read(), [1, 1])
    np.testing.assert_array_equal(state["only_first_replica"].read(), [1, 1])
    np.testing.assert_allclose(state["mean"].read(), np.asarray(rows(strategy, 2).tree).mean(0), rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(state["read"].tree, np.zeros((n, 2)))


def test_unchanged_leaf_of_a_wrapper_with_a_written_leaf_is_not_aggregated(strategy):
    n = strategy.num_replicas_in_sync
    state = strategy.put({"v": jdist.Mirrored({"unchanged": np.float32(3), "written": np.float32(3)}, "sum")})
    write = lambda state: ({"v": {**state["v"], "written": jdist.replica_id() * 1.0}}, None)
    new = strategy.step(write)(state)[0]["v"].read()
    assert (float(new["unchanged"]), float(new["written"])) == (3, n * (n - 1) / 2)


@pytest.mark.parametrize("wrap", [lambda x: x, jdist.Mirrored], ids=["plain", "mirrored"])
def test_value_without_aggregation_needs_the_proof(wrap, strategy):
    state = strategy.put({"v": wrap(np.float32([1, 2]))})
    with pytest.raises(
        jdist.NotMirroredError, match=r"state\['v'\] is not proved.*(?s:.)*`jdist\.Mirrored\(x, aggregation"
    ):
        strategy.step(lambda state: ({"v": state["v"] + jdist.replica_id()}, None))(state)
    add = lambda state: ({"v": state["v"] + jdist.all_reduce("sum", jdist.replica_id())}, None)
    new, _ = strategy.step(add)(state)
    n = strategy.num_replicas_in_sync
    np.testing.assert_array_equal(getattr(new["v"], "tree", new["v"]), np.float32([1, 2]) + n * (n - 1) // 2)


LEAVES = {
    "int32": np.int32([3, -4]),
    "uint8": np.uint8([3, 4]),
    "bfloat16": np.array([1.5, 2], jnp.bfloat16),
    "complex64": np.complex64([1j, 2]),
    "empty": np.zeros((0, 2), np.float32),
    "scalar": np.float32(2),
}


@pytest.mark.parametrize("leaf", LEAVES.values(), ids=LEAVES)
@pytest.mark.parametrize("name", AGGREGATES)
def test_write_keeps_the_dtype_and_the_shape(name, leaf, two):
    if name == "mean" and not np.issubdtype(leaf.dtype, np.inexact) and leaf.dtype != jnp.bfloat16:
        name = "sum"
    state = two.put({"v": jdist.Mirrored({"x": leaf, "none": None}, name)})
    step = two.step(lambda state: (jax.tree.map(lambda x: x * (1 + jdist.replica_id()).astype(x.dtype), state), None))
    new = step(state)[0]["v"].read()["x"]
    assert (new.dtype, new.shape) == (leaf.dtype, leaf.shape)
    np.testing.assert_array_equal(new, (leaf * np.array({"sum": 3, "mean": 1.5}.get(name, 1))).astype(leaf.dtype))


def test_booleans_and_keys_take_the_value_of_the_first_replica(strategy):
    state = strategy.put(
        {
            "odd": jdist.Mirrored(np.array([False, True]), "only_first_replica"),
            "key": jdist.Mirrored(jax.random.key(3), "only_first_replica"),
            "raw": jdist.Mirrored(jax.random.PRNGKey(3), "only_first_replica"),
        }
    )

    def write(state):
        mine = jdist.replica_id()
        keys = {name: jax.random.fold_in(state[name], mine + 5) for name in ("key", "raw")}
        return {"odd": jnp.stack([mine % 2 == 0, mine > 0]), **keys}, None

    state, _ = strategy.step(write)(state)
    np.testing.assert_array_equal(state["odd"].read(), [True, False])
    folded = jax.random.fold_in(jax.random.key(3), 5)
    np.testing.assert_array_equal(jax.random.key_data(state["key"].read()), jax.random.key_data(folded))
    np.testing.assert_array_equal(state["raw"].read(), jax.random.key_data(folded))
    assert_in_step(jax.tree.leaves(state))


WRITES = {
    "mean_of_bools": (np.True_, "mean", lambda x: jdist.replica_id() > 0, TypeError, r"state\['v'\]\['x'\] is bool"),
    "mean_of_keys": (
        jax.random.key(0),
        "mean",
        jdist.replica_key,
        TypeError,
        r"state\['v'\]\['x'\] is a random key \(key<fry>\[\]\)",
    ),
    "sum_of_a_number": (
        np.float32(1),
        "sum",
        lambda x: 3.0,
        ValueError,
        r"state\['v'\]\['x'\] is aggregated by SUM, and the replicas wrote 3\.0, a host value.*`jnp\.asarray`.*by MEAN",
    ),
    "sum_of_numpy": (
        np.float32([1]),
        "sum",
        lambda x: np.float32([2]),
        ValueError,
        r"state\['v'\]\['x'\] is aggregated by SUM.* wrote float32\[1\], a host value, which is not one value per replica",
    ),
}


@pytest.mark.parametrize("leaf, aggregation, write, error, message", WRITES.values(), ids=WRITES)
def test_write_that_cannot_be_aggregated_raises_with_its_name(leaf, aggregation, write, error, message, two):
    state = two.put({"v": jdist.Mirrored({"x": leaf}, aggregation)})
    with pytest.raises(error, match=message):
        two.step(lambda state: ({"v": {"x": write(state["v"]["x"])}}, None))(state)
    new, _ = two.step(lambda state: (dict(state), None))(state)  # a leaf that is not written needs no aggregation
    assert new["v"].aggregation is jdist.VariableAggregation[aggregation.upper()]


@pytest.mark.parametrize("aggregation", ["mean", "only_first_replica", "none"])
def test_host_number_that_every_replica_writes_is_stored(aggregation, two):
    state = two.put({"v": jdist.Mirrored(np.float32(0), aggregation)})
    state, _ = two.step(lambda state: ({"v": 2.5}, None))(state)
    assert float(state["v"].read()) == 2.5


def add(state):
    state["v"] = jnp.float32(1)
    return state, None


def test_array_that_is_written_to_a_sum_counts_once_per_replica_also_by_a_change_in_place(strategy):
    for write in (lambda state: ({"v": jnp.float32(1)}, None), add):
        state, _ = strategy.step(write)(strategy.put({"v": jdist.Mirrored(np.float32(0), "sum")}))
        assert float(state["v"].read()) == strategy.num_replicas_in_sync


def _collectives(program, *args):
    """Returns the number of occurrences of each collective in the traced program."""
    names = re.findall(
        r"= (psum|pmax|pmin|reduce_scatter|all_gather|ppermute)\w*\[", str(jax.make_jaxpr(program)(*args))
    )
    return {name: names.count(name) for name in names}


COUNTED = {
    "nothing": ({}, {}),
    "sum": ({"sum": 3}, {"psum": 1}),
    "each_aggregation": ({"sum": 2, "mean": 3, "only_first_replica": 2}, {"psum": 3}),
    "local": ({"read": 2, "own": 2}, {}),
    "all": ({"sum": 2, "mean": 1, "only_first_replica": 2, "read": 1, "own": 3}, {"psum": 3}),
}
MAKERS = {
    **{
        name: lambda name=name: jdist.Mirrored({"x": np.float32(1), "y": np.ones((2, 2), np.float32)}, name)
        for name in AGGREGATES
    },
    "read": lambda: jdist.SyncOnRead(np.zeros(2, np.float32), "sum"),
    "own": lambda: _own(2),
}


@pytest.mark.parametrize("kinds, expected", COUNTED.values(), ids=COUNTED)
def test_all_writes_of_an_aggregation_share_one_collective(kinds, expected, two):
    state = two.put({f"{kind}{i}": MAKERS[kind]() for kind, count in kinds.items() for i in range(count)})
    step = two.step(lambda state: (jax.tree.map(lambda x: x + jdist.replica_id(), state), None))
    assert _collectives(step, state) == expected
    assert _collectives(two.step(lambda state: (state, None)), state) == {}


def test_writes_of_one_dtype_share_one_collective(two):
    state = two.put({d: jdist.Mirrored(np.zeros(2, jnp.dtype(d)), "sum") for d in ("float32", "int32", "bfloat16")})
    add = lambda state: ({d: x + jdist.replica_id().astype(d) for d, x in state.items()}, None)
    assert _collectives(two.step(add), state) == {"psum": 3}


class Model(nnx.Module):
    def __init__(self):
        self.w = nnx.Param(jnp.float32([1, 2]))
        self.seen = nnx.BatchStat(jnp.float32(0))


def test_state_of_nnx_may_hold_wrappers(strategy):
    graph, params, stats = nnx.split(Model(), nnx.Param, nnx.BatchStat)
    n = strategy.num_replicas_in_sync
    params = jax.tree.map(lambda x: jdist.Mirrored(x, "mean"), params)
    stats = jax.tree.map(lambda x: jdist.SyncOnRead(np.stack([x] * n), "sum"), stats)

    def train(state, x):
        model = nnx.merge(graph, *state, copy=True)
        model.w[...] = model.w[...] - x
        model.seen[...] = model.seen[...] + 1
        return nnx.split(model, nnx.Param, nnx.BatchStat)[1:], None

    x = rows(strategy, 2)
    (params, stats), _ = strategy.step(train)(strategy.put((params, stats)), x)
    (w,) = jax.tree.leaves(params)
    np.testing.assert_allclose(w, np.float32([1, 2]) - np.asarray(x.tree).mean(0), rtol=1e-5, atol=1e-6)
    (seen,) = jax.tree.leaves(stats, is_leaf=lambda node: isinstance(node, jdist.SyncOnRead))
    assert float(seen.read()) == n


@chex.dataclass
class Moments:
    mean: object
    count: object


@struct.dataclass
class FlaxMoments:
    mean: object
    count: object


MOMENTS = {
    "chex": Moments,
    "dataclass": lambda mean, count: Train(w=mean, count=count),
    "flax": FlaxMoments,
    "namedtuple": collections.namedtuple("TupleMoments", "mean count"),
}


@pytest.mark.parametrize("make", MOMENTS.values(), ids=MOMENTS)
def test_container_may_hold_wrappers(make, strategy):
    state = strategy.put(
        make(mean=jdist.Mirrored(np.float32([0, 0]), "mean"), count=jdist.Mirrored(np.int32(0), "sum"))
    )
    add = lambda state, x: (
        jax.tree.map(lambda old, new: old + new, state, make(mean=x, count=jdist.replica_id())),
        None,
    )
    x = rows(strategy, 2)
    state, _ = strategy.step(add)(state, x)
    mean, count = (
        node.read() for node in jax.tree.leaves(state, is_leaf=lambda node: isinstance(node, jdist.Mirrored))
    )
    mean, count = (mean, count) if np.shape(mean) else (count, mean)
    np.testing.assert_allclose(mean, np.asarray(x.tree).mean(0), rtol=1e-5, atol=1e-6)
    assert int(count) == sum(range(strategy.num_replicas_in_sync))


def test_wrapper_inside_a_wrapper_of_a_state_raises(strategy):
    n = strategy.num_replicas_in_sync
    with pytest.raises(
        TypeError, match=r"state\['v'\] is a Mirrored around PerReplica.*one placement\. Remove a wrapper"
    ):
        strategy.step(lambda state: (state, None))({"v": jdist.Mirrored({"own": _own(n)}, "sum")})


def test_state_of_one_strategy_can_be_put_on_another_and_written_there():
    two, three = STRATEGIES["mirrored_2"](), STRATEGIES["mirrored_3"]()
    add = lambda state: ({"v": state["v"] * 0 + jdist.replica_id()}, None)
    state, _ = two.step(add)(two.put({"v": jdist.Mirrored(np.float32(0), "sum")}))
    assert float(state["v"].read()) == 1
    state, _ = three.step(add)(three.put(state))
    assert float(state["v"].read()) == 3


def test_row_slices_in_a_wrapper_with_an_aggregation_raise(two):
    slices = jdist.RowSlices(np.ones((1, 2), np.float32), np.int32([1]), 3)
    for make in (
        lambda: jdist.variable(slices, synchronization="on_read", aggregation="sum"),
        lambda: jdist.Mirrored(slices, "mean"),
    ):
        with pytest.raises(
            TypeError, match=r"state is a \w+ of RowSlices, and its aggregation would also add their indices"
        ):
            two.init(make)
