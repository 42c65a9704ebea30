"""Weights in safetensors files: bits that come back, names, placements, and what is no such file."""

import json
import os
import pathlib
import subprocess
import sys
from typing import NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
from flax.core import FrozenDict
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh

import jdist
from jdist import weights
from jdist._src.export import weights as weight_files

from laws import STRATEGIES

ROOT = pathlib.Path(__file__).parent.parent.parent
DTYPES = [np.dtype(dtype) for dtype in weight_files._DTYPES.values()]


class Pair(NamedTuple):
    kernel: jax.Array
    bias: jax.Array


@st.composite
def arrays(draw):
    dtype = draw(st.sampled_from(DTYPES))
    shape = draw(st.lists(st.integers(0, 3), max_size=3))
    size = int(np.prod(shape)) * dtype.itemsize
    bits = draw(st.binary(min_size=size, max_size=size))
    if dtype == np.bool_:
        bits = bytes(byte & 1 for byte in bits)
    array = np.frombuffer(bits, dtype).reshape(shape)
    return array.T if draw(st.booleans()) else array


KEYS = st.text("abcß_ /0", min_size=1, max_size=4)
TREES = st.recursive(
    arrays(),
    lambda inner: st.one_of(
        st.dictionaries(KEYS, inner, max_size=3),
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.builds(Pair, inner, inner),
    ),
    max_leaves=6,
)


def assert_same_bits(tree, other):
    assert jax.tree.structure(tree) == jax.tree.structure(other)
    for a, b in zip(jax.tree.leaves(tree), jax.tree.leaves(other), strict=True):
        assert (a.dtype, a.shape, np.asarray(a).tobytes()) == (b.dtype, b.shape, np.asarray(b).tobytes())


@settings(deadline=None, max_examples=150)
@given(tree=TREES)
def test_tree_that_is_saved_comes_back_bit_for_bit(tree, tmp_path_factory):
    path = tmp_path_factory.mktemp("law") / "w.safetensors"
    weights.save(path, tree)
    assert_same_bits(weights.load(path, like=tree), tree)
    assert_same_bits(weight_files.leaves_by_name(weights.load(path)), weight_files.leaves_by_name(tree))


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: dtype.name)
def test_every_dtype_of_these_files_comes_back_bit_for_bit(dtype, tmp_path):
    bits = np.arange(256, dtype=np.uint8)
    array = (bits % 2).view(np.bool_) if dtype == np.bool_ else bits.view(dtype)
    weights.save(tmp_path / "w", [array])
    assert_same_bits(weights.load(tmp_path / "w", like=[array]), [array])


@pytest.mark.parametrize(
    "array",
    [
        np.asfortranarray(np.arange(6.0).reshape(2, 3)),
        np.arange(12.0).reshape(3, 4)[:, ::2],
        np.arange(4.0)[::-1],
        np.arange(4, dtype=">i4"),
        np.broadcast_to(np.float32(2), (3, 2)),
        np.zeros((0, 3), np.float32),
        np.array(3.0),
        np.float16(2),
    ],
    ids=["fortran", "strided", "reversed", "big_endian", "broadcast", "empty", "scalar", "numpy_number"],
)
def test_array_that_lies_in_memory_in_another_way_is_saved_as_it_reads(array, tmp_path):
    weights.save(tmp_path / "w", {"x": array})
    loaded = weights.load(tmp_path / "w")["x"]
    np.testing.assert_array_equal(loaded, array)
    assert loaded.shape == array.shape and loaded.dtype == array.dtype.newbyteorder("=")


def test_names_are_the_paths_of_the_leaves(tmp_path):
    tree = {"layers": [Pair(np.zeros(1), np.zeros(2)), FrozenDict({"kernel": np.zeros(3)})], "none": None, "v": (1,)}
    weights.save(tmp_path / "w", tree)
    names = safetensors.numpy.load_file(tmp_path / "w")
    assert sorted(names) == ["layers.0.bias", "layers.0.kernel", "layers.1.kernel", "v.0"]
    assert weights.load(tmp_path / "w")["layers"]["1"]["kernel"].shape == (3,)
    assert weights.load(tmp_path / "w", like=tree)["layers"][0].bias.shape == (2,)


def test_file_says_which_jdist_wrote_it(tmp_path):
    weights.save(tmp_path / "w", {"x": np.zeros(1)})
    with safetensors.safe_open(tmp_path / "w", framework="np") as file:
        assert file.metadata() == {"format": "np", "jdist": jdist.__version__}


def test_file_that_others_wrote_is_read_into_a_tree(tmp_path):
    theirs = {"blocks.0.weight": np.ones((2, 3), np.float16), "head.bias": np.ones(1, ml_dtypes.bfloat16)}
    safetensors.numpy.save_file(theirs, tmp_path / "w", {"format": "pt"})
    tree = weights.load(tmp_path / "w")
    assert_same_bits(
        tree, {"blocks": {"0": {"weight": theirs["blocks.0.weight"]}}, "head": {"bias": theirs["head.bias"]}}
    )
    assert_same_bits(weights.load(tmp_path / "w", like=theirs), theirs)


def test_one_array_is_a_tree(tmp_path):
    weights.save(tmp_path / "w", np.arange(3))
    assert weights.load(tmp_path / "w").tolist() == [0, 1, 2]


def test_numbers_of_python_are_saved_with_the_dtypes_of_jax(tmp_path):
    weights.save(tmp_path / "w", {"step": 3, "rate": 0.5, "on": True})
    tree = weights.load(tmp_path / "w", like={"step": 0, "rate": 0.0, "on": False})
    assert {name: (x.dtype.name, x.item()) for name, x in tree.items()} == {
        "step": ("int32", 3),
        "rate": ("float32", 0.5),
        "on": ("bool", True),
    }


@pytest.mark.parametrize("impl", ["threefry2x32", "rbg"])
def test_random_keys_come_back_as_keys(impl, tmp_path, strategy):
    key = jax.random.split(jax.random.key(3, impl=impl), 2)
    weights.save(tmp_path / "w", {"rng": strategy.put(key), "w": np.zeros(1, np.float32)})
    for loaded in (weights.load(tmp_path / "w"), weights.load(tmp_path / "w", like={"rng": key, "w": np.float32([0])})):
        assert loaded["rng"].dtype == key.dtype
        np.testing.assert_array_equal(jax.random.key_data(loaded["rng"]), jax.random.key_data(key))


def state_of(strategy):
    n = strategy.num_replicas_in_sync
    rows = np.arange(1.0, n + 1, dtype=np.float32)
    return strategy.put(
        {
            "plain": np.arange(8, dtype=np.float32),
            "mirrored": jdist.Mirrored(np.ones(3, np.float32), "mean"),
            "total": jdist.SyncOnRead(rows, "sum"),
            "drift": jdist.SyncOnRead(np.stack([rows, rows], 1), "mean", trainable=True),
            "seen": jdist.SyncOnRead(np.arange(n, dtype=np.int32), "sum"),
            "split": jdist.Sharded(np.arange(24, dtype=np.float32).reshape(24, 1)),
        }
    )


def read(tree):
    return jax.tree.map(np.asarray, jdist.read_values(tree))


def test_state_of_any_strategy_is_saved_as_it_reads_and_goes_back_into_its_wrappers(strategy, tmp_path):
    state = state_of(strategy)
    weights.save(tmp_path / "w", state)
    plain = weights.load(tmp_path / "w")
    np.testing.assert_array_equal(plain["drift"], np.asarray(jdist.read_values(state)["drift"]))
    assert plain["total"].shape == () and plain["split"].shape == (24, 1)
    again = weights.load(tmp_path / "w", like=state, strategy=strategy)
    assert jax.tree.structure(again) == jax.tree.structure(state)
    assert [x.shape for x in jax.tree.leaves(again)] == [x.shape for x in jax.tree.leaves(state)]
    assert [x.sharding for x in jax.tree.leaves(again)] == [x.sharding for x in jax.tree.leaves(state)]
    for a, b in zip(jax.tree.leaves(read(again)), jax.tree.leaves(read(state)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6)


@pytest.mark.parametrize("there", ["mirrored_2", "sharded_4", "central_2"])
def test_state_goes_on_under_another_strategy(there, strategy, tmp_path):
    state, there = state_of(strategy), STRATEGIES[there]()
    weights.save(tmp_path / "w", state)
    again = weights.load(tmp_path / "w", like=state, strategy=there)
    assert len(again["seen"].values) == there.num_replicas_in_sync
    for a, b in zip(jax.tree.leaves(read(again)), jax.tree.leaves(read(state)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6)


def test_wrappers_of_like_are_kept_without_a_strategy(two, tmp_path):
    state = state_of(two)
    weights.save(tmp_path / "w", state)
    again = weights.load(tmp_path / "w", like=state)
    assert again["total"].tree.tolist() == [1.5, 1.5]
    assert again["seen"].tree.tolist() == [1, 0]


def test_per_replica_values_are_saved_as_rows(two, tmp_path):
    state = two.put(jdist.PerReplica(np.arange(4).reshape(2, 2)))
    weights.save(tmp_path / "w", state)
    again = weights.load(tmp_path / "w", like=state, strategy=two)
    assert again.tree.tolist() == [[0, 1], [2, 3]] and isinstance(again, jdist.PerReplica)


def test_array_split_by_a_mesh_of_the_users_own_is_saved_whole(tmp_path):
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("a", "b"))
    split = jax.device_put(np.arange(8), jax.NamedSharding(mesh, jax.P(("b", "a"))))
    weights.save(tmp_path / "w", split)
    assert weights.load(tmp_path / "w").tolist() == list(range(8))


def test_file_that_is_there_is_replaced_and_nothing_else_left(tmp_path):
    for value in (1, 2):
        weights.save(tmp_path / "w", np.int32(value))
    assert weights.load(tmp_path / "w") == 2
    assert os.listdir(tmp_path) == ["w"]


def test_link_is_written_through(tmp_path):
    weights.save(tmp_path / "w", np.int32(1))
    (tmp_path / "link").symlink_to(tmp_path / "w")
    weights.save(tmp_path / "link", np.int32(2))
    assert weights.load(tmp_path / "w") == 2 and (tmp_path / "link").is_symlink()


FULL = """
import resource, signal, sys
import numpy as np
from jdist import weights
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
try:
    weights.save(sys.argv[1], np.zeros(10_000))
except OSError as error:
    print("refused:", error)
"""


def test_disk_that_is_full_leaves_what_was_there(tmp_path):
    weights.save(tmp_path / "w", np.int32(1))
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", FULL, tmp_path / "w"], env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.stdout.startswith("refused: The weights could not be written"), done.stderr
    assert weights.load(tmp_path / "w") == 1 and os.listdir(tmp_path) == ["w"]


def saved(tmp_path, tree):
    weights.save(tmp_path / "w", tree)
    return tmp_path / "w"


def test_like_with_other_names_is_refused_with_few_of_them_and_their_number(tmp_path):
    path = saved(tmp_path, {"kept": np.zeros(1), **{f"old{i}": np.zeros(1) for i in range(5)}})
    like = {"kept": np.zeros(1), "new": np.zeros(1)}
    with pytest.raises(
        ValueError,
        match=r"does not fit `like`: of the names, 1 of 2 are missing \(new\) and 5 of 6 are not wanted \(old",
    ):
        weights.load(path, like=like)


def test_like_with_other_shapes_and_dtypes_is_refused_by_name(tmp_path):
    path = saved(tmp_path, {"a": np.zeros((2, 3), np.float32), "b": np.zeros(1, np.float32), "c": np.zeros(1)})
    like = {"a": np.zeros((3, 2), np.float32), "b": np.zeros(1, np.float16), "c": np.zeros(1)}
    wrong = (
        r"2 of 3 are of another shape or dtype \(a: float32\[2,3\], and not float32\[3,2\], b: float32\[1\], and not "
    )
    with pytest.raises(ValueError, match=wrong):
        weights.load(path, like=like)


@pytest.mark.parametrize("contents", [b"", b"abcdefgh", b"x" * 200, json.dumps({"a": 1}).encode()])
def test_file_that_is_none_of_these_is_refused(contents, tmp_path):
    (tmp_path / "w").write_bytes(contents)
    with pytest.raises(ValueError, match="is no safetensors file, or not all of one"):
        weights.load(tmp_path / "w")


@pytest.mark.parametrize("left", [3, 50, -1])
def test_file_that_is_cut_off_is_refused(left, tmp_path):
    path = saved(tmp_path, {"a": np.zeros(100)})
    path.write_bytes(path.read_bytes()[:left])
    with pytest.raises(ValueError, match="is no safetensors file, or not all of one"):
        weights.load(path)


def test_missing_file_and_folder_are_told(tmp_path):
    for path in (tmp_path / "none", tmp_path):
        with pytest.raises(FileNotFoundError, match="There is no safetensors file"):
            weights.load(path)
    with pytest.raises(FileNotFoundError, match="There is no folder .*none to write w in. Make it first"):
        weights.save(tmp_path / "none" / "w", np.zeros(1))
    with pytest.raises(FileExistsError, match="is there already, and nothing of the kind"):
        weights.save(tmp_path, np.zeros(1))


@pytest.mark.parametrize("name", ["float4_e2m1fn_x2", "float8_e5m2fnuz"])
def test_file_of_a_dtype_that_jax_lacks_is_refused_by_name(name, tmp_path):
    data = np.zeros(4, np.uint8)
    tensor = safetensors.TensorSpec(dtype=name, shape=(4,), data_ptr=data.ctypes.data, data_len=4)
    (tmp_path / "w").write_bytes(safetensors.serialize({"odd": tensor}))
    with pytest.raises(ValueError, match="odd in .* is of the dtype F.*; jdist reads BOOL, I8"):
        weights.load(tmp_path / "w")


@pytest.mark.parametrize("array", [np.zeros(1, complex), np.zeros(1, ml_dtypes.int4)], ids=["complex128", "int4"])
def test_dtype_that_the_file_lacks_is_refused_before_anything_is_written(array, tmp_path):
    with pytest.raises(
        TypeError, match=r"a\.b is (complex128|int4)\[1\], and safetensors files have no such dtype. Cast"
    ):
        weights.save(tmp_path / "w", {"a": {"b": array}})
    assert not os.listdir(tmp_path)


def test_arguments_of_save_and_load_that_are_swapped_are_refused_with_the_right_call(tmp_path):
    path, tree = str(tmp_path / "w.safetensors"), {"w": np.zeros(2)}
    message = r"`path` must be a string or an `os\.PathLike`, got dict\. The path '.*safetensors' is the second argument: swap"
    with pytest.raises(TypeError, match=message + r".*Call `jdist\.weights\.save\(path, tree\)`"):
        weights.save(tree, path)
    with pytest.raises(TypeError, match=message + r".*Call `jdist\.weights\.load\(path, like=tree\)`"):
        weights.load(tree, pathlib.Path(path))
    with pytest.raises(TypeError, match=r"must be .* got function\. The path .* Call `jdist\.export\(path, apply"):
        jdist.export(lambda state, x: x, path, tree, ())
    for make, call in ((jdist.load, "load"), (jdist.Checkpointer, "Checkpointer")):
        with pytest.raises(TypeError, match=rf"got dict\. Call `jdist\.{call}\(path\)`"):
            make(tree)
    assert not os.listdir(tmp_path)


@pytest.mark.parametrize("leaf", ["text", np.array("text"), np.zeros(1, "M8[s]")])
def test_leaf_that_is_no_array_is_refused_by_name(leaf, tmp_path):
    with pytest.raises(TypeError, match="x is .*: devices hold numbers"):
        weights.save(tmp_path / "w", {"x": leaf})


def test_object_that_is_no_array_is_refused_by_name(tmp_path):
    with pytest.raises(TypeError, match="x is object"):
        weights.save(tmp_path / "w", {"x": object()})


def test_names_that_are_the_same_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"Two leaves have the name `a\.b`"):
        weights.save(tmp_path / "w", {"a": {"b": np.zeros(1)}, "a.b": np.zeros(1)})


def test_names_that_are_no_tree_are_read_into_like(tmp_path):
    flat = {"a": np.zeros(1), "a.b": np.zeros(2), "a.b.c.d": np.zeros(3)}
    path = saved(tmp_path, flat)
    with pytest.raises(ValueError, match=r"`a.*` in .* begins with the name of another array.*`like=`"):
        weights.load(path)
    assert_same_bits(weights.load(path, like=flat), flat)


def test_leaf_that_was_given_to_a_step_is_refused_by_name(two, tmp_path):
    state = two.put({"w": np.zeros(1, np.float32)})
    two.step(lambda state: (state, None))(state)
    with pytest.raises(ValueError, match=r"w \(float32\[1\]\) was donated to a step"):
        weights.save(tmp_path / "w", state)


def test_64_bits_are_not_cut_for_a_strategy_in_silence(two, tmp_path):
    path = saved(tmp_path, {"n": np.array([2**40])})
    with pytest.raises(TypeError, match=r"n in .* is int64\[1\], and would become int32 on the devices"):
        weights.load(path, strategy=two)


def test_missing_package_is_told_with_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "safetensors.numpy", None)
    with pytest.raises(ImportError, match=r'`python -m pip install "jdist\[export\]"`'):
        weights.save(tmp_path / "w", jnp.zeros(1))


def test_weights_are_the_business_of_the_host(two, tmp_path):
    for word, call in {"save": lambda: weights.save(tmp_path, 1), "load": lambda: weights.load(tmp_path)}.items():
        with pytest.raises(RuntimeError, match=f"weights.{word}"):
            two.run(call)
