"""Parts of a checkpoint: the structure of a tree as JSON, and fingerprints of arrays."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import jdist
from jdist._src.checkpoint.fingerprint import fingerprints
from jdist._src.checkpoint.tree_format import from_json, leaves_of, to_json

from laws import STRATEGIES

leaf = st.sampled_from([0, 1.5, None]) | st.builds(lambda: jdist.SyncOnRead([1, 2], "mean", True))
trees = st.recursive(
    leaf,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)


@given(trees)
@settings(deadline=None, derandomize=True)
def test_tree_of_dicts_lists_and_wrappers_is_restored_from_json(tree):
    leaves = jax.tree.leaves(tree)
    restored = from_json(to_json(tree), leaves.__getitem__)
    assert jax.tree.structure(restored) == jax.tree.structure(tree) and jax.tree.leaves(restored) == leaves
    assert [leaf.keys for leaf in leaves_of(restored)] == [leaf.keys for leaf in leaves_of(tree)]


def test_leaves_have_the_same_keys_in_a_class_and_in_a_dict():
    state = optax.adam(0.1).init({"a/b": jnp.zeros(2), "a": {"b": jnp.zeros(3)}})
    leaves = leaves_of(state)
    assert len({leaf.keys for leaf in leaves}) == len(leaves) == 5
    numbers = from_json(to_json(state), lambda number: number)
    assert {leaf.keys for leaf in leaves_of(numbers)} == {leaf.keys for leaf in leaves}


def test_text_and_python_numbers_are_inlined_or_numbered():
    assert to_json([1, "a"], inline=True) == {"list": [{"value": 1}, {"value": "a"}]}
    assert to_json([1, "a"], start=5) == {"list": [5, 6]}
    assert from_json(to_json({"a": {}, "b": (), "c": None}), None) == {"a": {}, "b": [], "c": None}


ARRAYS = {
    "float32": np.random.default_rng(0).normal(size=(8, 4)).astype(np.float32),
    "bfloat16": np.arange(32).reshape(4, 8).astype(jnp.bfloat16),
    "bool": np.arange(32).reshape(8, 4) % 3 == 0,
    "complex64": (np.arange(32).reshape(8, 4) * (1 + 2j)).astype(np.complex64),
    "int4": (np.arange(32).reshape(8, 4) % 8).astype(jnp.int4),
    "empty": np.zeros((0, 8), np.float32),
}


def test_fingerprint_does_not_depend_on_the_sharding():
    expected = fingerprints(list(ARRAYS.values()))
    for name in ("one_device", "mirrored_2", "central_2"):
        strategy = STRATEGIES[name]()
        assert fingerprints(jax.tree.leaves(strategy.put(list(ARRAYS.values())))) == expected
        even = [x for x in ARRAYS.values() if len(x) % 2 == 0]
        sharded = [jdist.Sharded(x) for x in even]
        assert fingerprints(jax.tree.leaves(strategy.put(sharded))) == fingerprints(even)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.int64, np.uint8, jnp.bfloat16])
def test_fingerprint_changes_with_every_bit(dtype):
    x = np.arange(6).reshape(2, 3).astype(dtype)
    changed_arrays = []
    for bit in range(8 * x.nbytes):
        raw = bytearray(x.tobytes())
        raw[bit // 8] ^= 1 << bit % 8
        changed_arrays.append(np.frombuffer(bytes(raw), x.dtype).reshape(x.shape))
    assert fingerprints([x])[0] not in fingerprints(changed_arrays)


def test_fingerprint_changes_with_the_order():
    x = np.random.default_rng(0).integers(0, 9, (50, 4)).astype(np.int32)
    swapped = x[np.r_[1, 0, 2:50]]
    assert len(set(fingerprints([x, swapped, x[:, ::-1], x.T]))) == 4
