"""What a step may do to its state: a new value for every leaf, in the same place, and nothing else."""

import dataclasses

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jdist
from jdist import state as states

from laws import assert_in_step, rows


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Train:
    w: object
    count: object


def _state(strategy):
    return strategy.put({"w": np.ones(3, np.float32), "n": np.int32(0)})


def _changing(**leaves):
    return lambda state: ({**state, **{name: new(state) for name, new in leaves.items()}}, None)


KEEPS = r"A state keeps its structure: begin with every leaf that it will have"
KEEPS_SHAPE = r"A state keeps its shapes and dtypes.*cast the new value \(`\.astype`\), or begin with this shape"
CHANGES = {
    "leaf_gone": (lambda s: ({"w": s["w"]}, None), rf"state\['n'\] is gone\. {KEEPS}"),
    "leaf_none": (lambda s: ({"w": s["w"], "n": None}, None), rf"state\['n'\] is gone\. {KEEPS}"),
    "leaf_new": (lambda s: ({**s, "m": s["n"]}, None), rf"state\['m'\] is new\. {KEEPS}"),
    "leaf_renamed": (lambda s: ({"w": s["w"], "m": s["n"]}, None), rf"\['n'\] is gone; state\['m'\] is new\. {KEEPS}"),
    "container": (lambda s: ((s["n"], s["w"]), None), rf"structure of the state: .*state\['n'\].*state\[0\].* {KEEPS}"),
    "shape": (_changing(w=lambda s: s["w"][:2]), rf"state\['w'\] from float32\[3\] to float32\[2\]\. {KEEPS_SHAPE}"),
    "rank": (_changing(n=lambda s: s["n"][None]), rf"state\['n'\] from int32\[\] to int32\[1\]\. {KEEPS_SHAPE}"),
    "dtype": (
        _changing(w=lambda s: s["w"].astype(jnp.bfloat16)),
        rf"state\['w'\] from float32\[3\] to bfloat16\[3\]\. {KEEPS_SHAPE}",
    ),
    "promoted": (_changing(n=lambda s: s["n"] + 1.0), rf"state\['n'\] from int32\[\] to float32\[\]\. {KEEPS_SHAPE}"),
    "wrapped": (
        _changing(w=lambda s: jdist.PerReplica(s["w"])),
        r"returned state\['w'\] as PerReplica: inside a replica function values are plain\. Return the array",
    ),
    "all_wrapped": (lambda s: (jdist.PerReplica(s), None), r"returned state as PerReplica: .*Return the array"),
}


@pytest.mark.parametrize("fn, says", CHANGES.values(), ids=CHANGES)
def test_step_that_changes_the_kind_of_its_state_is_refused(fn, says, strategy):
    state = _state(strategy)
    with pytest.raises(TypeError, match=says):
        strategy.step(fn)(state)
    assert not state["w"].is_deleted()  # nothing ran


def test_step_that_makes_a_list_of_a_tuple_is_refused(two):
    says = r"structure of the state: PyTreeDef\(\(\*,\)\) became PyTreeDef\(\[\*\]\)\. A state keeps"
    with pytest.raises(TypeError, match=says):
        two.step(lambda s: (list(s), None))(two.put((1.0,)))


def test_step_that_drops_a_field_is_refused_by_its_name(two):
    with pytest.raises(TypeError, match=r"state\.count is gone"):
        two.step(lambda s: (Train(s.w, None), None))(two.put(Train(1.0, 2)))


def test_step_that_changes_a_wrapped_leaf_is_refused_as_the_replica_sees_it(two):
    with pytest.raises(TypeError, match=r"state\['own'\] from float32\[3\] to float32\[\]"):
        two.step(lambda s: ({"own": s["own"][0]}, None))({"own": rows(two, 3)})


NO_PAIRS = {
    "nothing": (lambda s: None, "None"),
    "three": (lambda s: (s, 1, 2), "a tuple of 3"),
    "one": (lambda s: (s,), "a tuple of 1"),
    "list": (lambda s: [s, None], "list"),
    "dict": (lambda s: s, "dict"),
    "array": (lambda s: s["w"], r"float32\[3\]"),
}


@pytest.mark.parametrize("fn, got", NO_PAIRS.values(), ids=NO_PAIRS)
def test_step_that_returns_no_pair_is_refused(fn, got, two):
    says = rf"returns a pair `\(state, outputs\)`, and this one returned .*{got}.*returns `\(state, None\)`"
    with pytest.raises(TypeError, match=says):
        two.step(fn)(_state(two))


def test_settled_state_has_definite_dtypes():
    found = states.settled({"f": 1.0, "n": 2, "b": True, "x": np.float32(3), "weak": jnp.asarray(1.0), "none": None})
    assert [jax.typeof(leaf).weak_type for leaf in jax.tree.leaves(found)] == [False] * 5
    dtypes = jax.tree.map(lambda leaf: str(leaf.dtype), found)
    assert dtypes == {"f": "float32", "n": "int32", "b": "bool", "x": "float32", "weak": "float32", "none": None}


def test_step_may_return_python_numbers_for_leaves_of_their_dtype(two):
    state, _ = two.step(_changing(n=lambda s: 3))(_state(two))
    assert (int(state["n"]), state["n"].dtype) == (3, np.int32)


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


def _places(tree):
    return [leaf.sharding for leaf in jax.tree.leaves(tree)]


def test_step_leaves_every_leaf_in_its_place_and_its_wrapper(strategy):
    step = strategy.step(advance)
    state = strategy.init(make_state, jax.random.key(4))
    structure, places = jax.tree.structure(state), _places(state)
    shapes = jax.tree.map(jax.typeof, state)
    for seed in range(3):
        state, _ = step(state, rows(strategy, 2, 3, seed=seed))
        assert jax.tree.structure(state) == structure
        assert _places(state) == places
        chex.assert_trees_all_equal(jax.tree.map(jax.typeof, state), shapes)
    assert isinstance(state["own"], jdist.PerReplica)
    assert_in_step((state["w"], state["rest"]))


def test_step_keeps_wrapped_leaf_of_each_replica_its_own(strategy):
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
