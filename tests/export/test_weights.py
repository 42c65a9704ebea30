"""Weights in safetensors files: restored bits, names, shardings, and files that cannot be read."""

import os
import pathlib
import subprocess
import sys
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
from flax.core import FrozenDict
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh

import jdist
from jdist import weights
from jdist._src.export import tensor_files
from jdist._src.export import weights as weight_files

from laws import STRATEGIES, each_row

ROOT = pathlib.Path(__file__).parent.parent.parent
DTYPES = [np.dtype(dtype) for dtype in tensor_files.DTYPES.values()]


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
def test_saved_tree_is_loaded_bit_for_bit(tree, tmp_path_factory):
    path = tmp_path_factory.mktemp("law") / "w.safetensors"
    weights.save(path, tree)
    assert_same_bits(weights.load(path, like=tree), tree)
    assert_same_bits(weight_files.leaves_by_name(weights.load(path)), weight_files.leaves_by_name(tree))


@each_row("dtype", DTYPES)
def test_every_dtype_of_safetensors_is_loaded_bit_for_bit(dtype, tmp_path):
    bits = np.arange(256, dtype=np.uint8)
    array = (bits % 2).view(np.bool_) if dtype == np.bool_ else bits.view(dtype)
    weights.save(tmp_path / "w", [array])
    assert_same_bits(weights.load(tmp_path / "w", like=[array]), [array])


ARRAYS = {
    "fortran": np.asfortranarray(np.arange(6.0).reshape(2, 3)),
    "strided": np.arange(12.0).reshape(3, 4)[:, ::2],
    "reversed": np.arange(4.0)[::-1],
    "big_endian": np.arange(4, dtype=">i4"),
    "broadcast": np.broadcast_to(np.float32(2), (3, 2)),
    "empty": np.zeros((0, 3), np.float32),
    "scalar": np.array(3.0),
    "numpy_number": np.float16(2),
}


@each_row("array", ARRAYS.values(), ARRAYS)
def test_array_in_another_memory_order_is_saved_with_its_values(array, tmp_path):
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


def test_file_names_the_version_of_jdist(tmp_path):
    weights.save(tmp_path / "w", {"x": np.zeros(1)})
    with safetensors.safe_open(tmp_path / "w", framework="np") as file:
        assert file.metadata() == {"format": "np", "jdist": jdist.__version__}


def test_python_numbers_are_saved_with_the_dtypes_of_jax(tmp_path):
    weights.save(tmp_path / "w", {"step": 3, "rate": 0.5, "on": True})
    tree = weights.load(tmp_path / "w", like={"step": 0, "rate": 0.0, "on": False})
    assert {name: (x.dtype.name, x.item()) for name, x in tree.items()} == {
        "step": ("int32", 3),
        "rate": ("float32", 0.5),
        "on": ("bool", True),
    }


@pytest.mark.parametrize("impl", ["threefry2x32", "rbg"])
def test_random_keys_are_loaded_as_keys(impl, tmp_path, strategy):
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


def assert_same_numbers(tree, other):
    for a, b in zip(*(jax.tree.leaves(jdist.read_values(each)) for each in (tree, other)), strict=True):
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=1e-6)


def test_sv10_state_of_any_strategy_is_saved_as_read_and_loaded_into_its_wrappers(strategy, tmp_path):
    state = state_of(strategy)
    weights.save(tmp_path / "w", state)
    plain = weights.load(tmp_path / "w")
    np.testing.assert_array_equal(plain["drift"], np.asarray(jdist.read_values(state)["drift"]))
    assert plain["total"].shape == () and plain["split"].shape == (24, 1)
    loaded = weights.load(tmp_path / "w", like=state, strategy=strategy)
    assert jax.tree.structure(loaded) == jax.tree.structure(state)
    placements = [[(x.shape, x.sharding) for x in jax.tree.leaves(tree)] for tree in (loaded, state)]
    assert placements[0] == placements[1]
    assert_same_numbers(loaded, state)


@pytest.mark.parametrize("target", ["mirrored_2", "sharded_4", "central_2"])
def test_state_is_loaded_under_another_strategy(target, strategy, tmp_path):
    state, target = state_of(strategy), STRATEGIES[target]()
    weights.save(tmp_path / "w", state)
    loaded = weights.load(tmp_path / "w", like=state, strategy=target)
    assert len(loaded["seen"].values) == target.num_replicas_in_sync
    assert_same_numbers(loaded, state)


def test_wrappers_of_like_are_loaded_without_a_strategy(two, tmp_path):
    state = state_of(two)
    weights.save(tmp_path / "w", state)
    loaded = weights.load(tmp_path / "w", like=state)
    assert loaded["total"].tree.tolist() == [1.5, 1.5]
    assert loaded["seen"].tree.tolist() == [1, 0]


def test_per_replica_values_are_saved_as_rows(two, tmp_path):
    state = two.put(jdist.PerReplica(np.arange(4).reshape(2, 2)))
    weights.save(tmp_path / "w", state)
    loaded = weights.load(tmp_path / "w", like=state, strategy=two)
    assert loaded.tree.tolist() == [[0, 1], [2, 3]] and isinstance(loaded, jdist.PerReplica)


def test_array_that_is_sharded_over_a_mesh_of_the_user_is_saved(tmp_path):
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("a", "b"))
    sharded = jax.device_put(np.arange(8), jax.NamedSharding(mesh, jax.P(("b", "a"))))
    weights.save(tmp_path / "w", sharded)
    assert weights.load(tmp_path / "w").tolist() == list(range(8))


def test_existing_file_or_target_of_a_link_is_replaced_and_no_other_file_is_left(tmp_path):
    weights.save(tmp_path / "w", np.int32(1))
    weights.save(tmp_path / "w", np.int32(2))
    assert weights.load(tmp_path / "w") == 2 and os.listdir(tmp_path) == ["w"]
    (tmp_path / "link").symlink_to(tmp_path / "w")
    weights.save(tmp_path / "link", np.int32(3))
    assert weights.load(tmp_path / "w") == 3 and (tmp_path / "link").is_symlink()


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


@pytest.mark.slow
def test_full_disk_leaves_the_existing_file(tmp_path):
    weights.save(tmp_path / "w", np.int32(1))
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    completed = subprocess.run(
        [sys.executable, "-c", FULL, tmp_path / "w"], env=environment, capture_output=True, text=True, timeout=120
    )
    assert completed.stdout.startswith("refused: The weights could not be written to "), completed.stderr
    assert weights.load(tmp_path / "w") == 1 and os.listdir(tmp_path) == ["w"]


def saved(tmp_path, tree):
    weights.save(tmp_path / "w", tree)
    return tmp_path / "w"


F32 = np.zeros(1, np.float32)
OTHER_LIKES = [
    ({"kept": F32, **{f"old{i}": F32 for i in range(5)}}, {"kept": F32, "new": F32},
     r"does not match `like`: 1 of 2 names are missing \(new\) and 5 of 6 names are unknown \(old"),
    ({"a": np.zeros((2, 3), np.float32), "b": F32, "c": F32},
     {"a": np.zeros((3, 2), np.float32), "b": np.zeros(1, np.float16), "c": F32},
     r"2 of 3 arrays have another shape or dtype \(a: float32\[2,3\] instead of float32\[3,2\], "
     r"b: float32\[1\] instead of float16"),
]  # fmt: skip


@each_row("tree, like, message", OTHER_LIKES, ["names", "shapes"])
def test_like_with_other_names_shapes_or_dtypes_is_refused_by_name(tree, like, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        weights.load(saved(tmp_path, tree), like=like)


WHOLE = safetensors.numpy.save({"a": np.zeros(100)})
NOT_FILES = [b"", b"abcdefgh", b"x" * 200, b'{"a": 1}', WHOLE[:3], WHOLE[:50], WHOLE[:-1]]


@each_row("contents", NOT_FILES)
def test_file_that_is_not_a_complete_safetensors_file_is_refused(contents, tmp_path):
    (tmp_path / "w").write_bytes(contents)
    with pytest.raises(ValueError, match="is not a safetensors file, or it is incomplete"):
        weights.load(tmp_path / "w")


def test_missing_file_and_folder_are_errors(tmp_path):
    message = "The file .* does not exist, or is a folder. Pass the path of a safetensors file"
    for path in (tmp_path / "none", tmp_path):
        with pytest.raises(FileNotFoundError, match=message):
            weights.load(path)
    with pytest.raises(FileNotFoundError, match="The folder .*none does not exist. Create it before writing w to it"):
        weights.save(tmp_path / "none" / "w", np.zeros(1))
    with pytest.raises(FileExistsError, match="exists and is not a file or folder of the kind"):
        weights.save(tmp_path, np.zeros(1))


@each_row("name", ["float4_e2m1fn_x2", "float8_e5m2fnuz"])
def test_file_of_a_dtype_that_jax_lacks_is_refused_by_name(name, tmp_path):
    data = np.zeros(4, np.uint8)
    tensor = safetensors.TensorSpec(dtype=name, shape=(4,), data_ptr=data.ctypes.data, data_len=4)
    (tmp_path / "w").write_bytes(safetensors.serialize({"odd": tensor}))
    with pytest.raises(ValueError, match="odd in .* has dtype F.*, and jdist reads BOOL, I8"):
        weights.load(tmp_path / "w")


BYTE_DTYPES = ["int2", "uint2", "int4", "uint4", "float4_e2m1fn", "float8_e4m3", "float8_e5m2fnuz", "float8_e8m0fnu"]


def test_dtypes_that_safetensors_does_not_have_are_stored_as_bytes(strategy, tmp_path):
    bits = np.uint8([[0, 1], [1, 0], [1, 1], [0, 1]])
    tree = {name: bits.astype(name) if "int" in name else bits.view(name) for name in BYTE_DTYPES}
    weights.save(tmp_path / "w", strategy.put(tree))
    for loaded in (weights.load(tmp_path / "w"), weights.load(tmp_path / "w", like=tree, strategy=strategy)):
        assert_same_bits(jax.device_get(loaded), tree)
    assert safetensors.numpy.load_file(tmp_path / "w")["int4"].tolist() == bits.tolist()  # another program reads values


def test_save_leaves_no_host_copy_in_the_arrays(tmp_path):
    strategy = STRATEGIES["sharded_4"]()
    state = strategy.put({"w": np.ones((8, 2), np.float32), "rows": np.zeros(3, np.float32)})
    rows = STRATEGIES["mirrored_2"]().run(lambda: jdist.replica_id() * 1.0)
    weights.save(tmp_path / "w", {**state, "per_replica": rows})
    assert [x._npy_value for x in (*state.values(), rows.tree)] == [None] * 3


TORCH = {
    "encoder.0.weight": np.ones((2, 3), np.float32),
    "encoder.1.num_batches_tracked": np.array(7, np.int64),
    "encoder.10.weight": np.zeros(2, np.float32),
    "head.weight": np.ones(3, np.float32),
    "position_ids": np.array([[0, 2**31 - 1, -(2**31)]], np.int64),
}


def test_64_bit_integers_are_converted_if_their_values_fit(strategy, tmp_path):
    safetensors.numpy.save_file(TORCH, tmp_path / "w")
    loaded = weights.load(tmp_path / "w", strategy=strategy)
    assert loaded["position_ids"].dtype == np.int32 and int(loaded["encoder"]["1"]["num_batches_tracked"]) == 7
    assert np.asarray(loaded["position_ids"]).tolist() == TORCH["position_ids"].tolist()
    assert weights.load(tmp_path / "w")["position_ids"].dtype == np.int64  # numpy has 64 bits
    like = {name: jax.ShapeDtypeStruct(x.shape, jax.dtypes.canonicalize_dtype(x.dtype)) for name, x in TORCH.items()}
    for options in ({}, {"strategy": strategy}):
        assert weights.load(tmp_path / "w", like=like, **options)["position_ids"].dtype == np.int32
    assert weights.load(tmp_path / "w", like=TORCH, strategy=strategy)["position_ids"].dtype == np.int32


@each_row("values", [[2**31], [-(2**31) - 1], [2.0]])
def test_64_bit_numbers_are_not_truncated_silently_for_a_strategy(values, two, tmp_path):
    path = saved(tmp_path, {"n": np.array(values), "w": np.zeros(1, np.float32)})
    message = r"n in .* is (int64|float64)\[1\], and would become (int32|float32) on the devices"
    with pytest.raises(TypeError, match=message):
        weights.load(path, strategy=two)
    assert list(weights.load(path, strategy=two, only="w")) == ["w"]


def test_only_and_rename_select_and_rename_arrays(strategy, tmp_path):
    safetensors.numpy.save_file(TORCH, tmp_path / "w")
    load = lambda **options: weights.load(tmp_path / "w", **options)
    names = lambda tree: sorted(weight_files.leaves_by_name(tree))
    assert names(load(only="encoder.1")) == ["encoder.1.num_batches_tracked"]  # not encoder.10
    assert names(load(rename={"encoder": "params.body", "encoder.10": "last"}, only=["params", "last"])) == [
        "last.weight",
        "params.body.0.weight",
        "params.body.1.num_batches_tracked",
    ]
    new = strategy.put({"params": {"w": np.zeros(3, np.float32)}, "seen": jdist.Mirrored(np.float32(5))})
    loaded = load(like=new, only="params", rename={"head.weight": "params.w"}, strategy=strategy)
    assert loaded["params"]["w"].sharding == new["params"]["w"].sharding and loaded["params"]["w"].tolist() == [1] * 3
    assert loaded["seen"] is new["seen"] or loaded["seen"].tree is new["seen"].tree


WRONG_SELECTIONS = [
    ({"only": "encoder.2"}, r'w and `like` do not have the path only="encoder.2". The leaves are '),
    ({"rename": {"enc": "e"}}, 'w does not have the path "enc", which `rename` contains. The leaves are '),
    ({"rename": {"head.weight": "position_ids"}}, "of .*w have the same path, position_ids"),
    ({"only": "encoder.0", "like": {"head": {"weight": jax.ShapeDtypeStruct((3,), "float32")}}},
     "`only` does not restore head.weight, and `like` contains shapes there"),
]  # fmt: skip


@each_row("options, message", WRONG_SELECTIONS)
def test_wrong_only_and_rename_are_refused(options, message, tmp_path):
    safetensors.numpy.save_file(TORCH, tmp_path / "w")
    with pytest.raises(ValueError, match=message):
        weights.load(tmp_path / "w", **options)


def test_arguments_of_save_and_load_that_are_swapped_are_refused_with_the_right_call(tmp_path):
    path, tree = str(tmp_path / "w.safetensors"), {"w": np.zeros(2)}
    message = r"`path` must be a string or an `os\.PathLike`, got dict\. The path '.*safetensors' is the second argument: swap"
    with pytest.raises(TypeError, match=message + r".*Call `jdist\.weights\.save\(path, tree\)`"):
        weights.save(tree, path)
    with pytest.raises(TypeError, match=message + r".*Call `jdist\.weights\.load\(path, like=tree\)`"):
        weights.load(tree, like=pathlib.Path(path))
    with pytest.raises(TypeError, match=r"must be .* got function\. The path .* Call `jdist\.export\(path, apply"):
        jdist.export(lambda state, x: x, path, tree, ())
    for make, call in ((jdist.load, "load"), (jdist.Checkpointer, "Checkpointer")):
        with pytest.raises(TypeError, match=rf"got dict\. Call `jdist\.{call}\(path\)`"):
            make(tree)
    assert not os.listdir(tmp_path)


NO_NUMBERS = "x is .*: devices hold numbers"
NO_DTYPE = r"a\.b is complex128\[1\], and safetensors files do not have this dtype. Cast"
NOT_SAVED = {
    "text": ({"x": "text"}, TypeError, NO_NUMBERS),
    "array_of_text": ({"x": np.array("text")}, TypeError, NO_NUMBERS),
    "time": ({"x": np.zeros(1, "M8[s]")}, TypeError, NO_NUMBERS),
    "object": ({"x": object()}, TypeError, "x is object"),
    "names": ({"a": {"b": np.zeros(1)}, "a.b": np.zeros(1)}, ValueError, r"Two leaves have the name `a\.b`"),
    "dtype": ({"a": {"b": np.zeros(1, complex)}}, TypeError, NO_DTYPE),
}


@each_row("tree, error, message", NOT_SAVED.values(), NOT_SAVED)
def test_leaf_that_cannot_be_saved_is_refused_by_name_before_anything_is_written(tree, error, message, tmp_path):
    with pytest.raises(error, match=message):
        weights.save(tmp_path / "w", tree)
    assert not os.listdir(tmp_path)


def test_names_that_are_not_nested_dicts_are_loaded_into_like(tmp_path):
    flat = {"a": np.zeros(1), "a.b": np.zeros(2), "a.b.c.d": np.zeros(3)}
    path = saved(tmp_path, flat)
    with pytest.raises(ValueError, match=r"`a.*` in .* begins with the name of another array.*`like=`"):
        weights.load(path)
    assert_same_bits(weights.load(path, like=flat), flat)


def test_leaf_that_was_donated_to_a_step_is_refused_by_name(two, tmp_path):
    state = two.put({"w": np.zeros(1, np.float32)})
    two.step(lambda state: (state, None))(state)
    with pytest.raises(ValueError, match=r"w \(float32\[1\]\) was donated to a step"):
        weights.save(tmp_path / "w", state)


def test_missing_package_is_an_error_with_the_command_to_install_it(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "safetensors.numpy", None)
    with pytest.raises(ImportError, match=r'`python -m pip install "jdist\[export\]"`'):
        weights.save(tmp_path / "w", jnp.zeros(1))


def test_weights_in_a_replica_function_are_refused(two, tmp_path):
    for name, call in {"save": lambda: weights.save(tmp_path, 1), "load": lambda: weights.load(tmp_path)}.items():
        with pytest.raises(RuntimeError, match=f"weights.{name}"):
            two.run(call)
