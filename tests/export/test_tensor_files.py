"""Sets of safetensors files with an index, parts of arrays, and files in object stores."""

import json

import jax
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
from hypothesis import given, settings
from hypothesis import strategies as st

from jdist import weights
from jdist._src.export.tensor_files import StoredTensor, read_tensors

from laws import STRATEGIES

TREE = {
    "layers": [{"kernel": np.arange(24, dtype=np.float32).reshape(8, 3)}, {"bias": np.arange(8, dtype=np.int32)}],
    "scale": np.ones((), ml_dtypes.bfloat16),
}


def write_as_hugging_face(folder, parts):
    """Writes files and an index as `transformers` does; returns the path of the index."""
    files = {f"model-{i:05}-of-{len(parts):05}.safetensors": part for i, part in enumerate(parts, start=1)}
    for name, part in files.items():
        safetensors.numpy.save_file(part, folder / name, {"format": "pt"})
    weight_map = {tensor: file for file, part in files.items() for tensor in part}
    index = {"metadata": {"total_size": 1}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2, sort_keys=True))
    return folder / "model.safetensors.index.json"


def assert_equal(tree, other):
    assert jax.tree.structure(tree) == jax.tree.structure(other)
    for a, b in zip(jax.tree.leaves(tree), jax.tree.leaves(other), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


def test_index_of_another_program_is_loaded(strategy, tmp_path):
    parts = [{"a.w": TREE["layers"][0]["kernel"]}, {"b": TREE["scale"], "a.b": TREE["layers"][1]["bias"]}]
    index = write_as_hugging_face(tmp_path, parts)
    expected = {"a": {"w": parts[0]["a.w"], "b": parts[1]["a.b"]}, "b": parts[1]["b"]}
    assert_equal(weights.load(index), expected)
    loaded = weights.load(index, like=expected, strategy=strategy)
    assert_equal(loaded, expected)
    assert [x.sharding for x in jax.tree.leaves(loaded)] == jax.tree.leaves(strategy.shardings(expected))


def test_split_files_are_saved_and_loaded(two, tmp_path):
    path = tmp_path / "model.safetensors"
    tree = {**TREE, "key": jax.random.key(3)}
    weights.save(path, two.put(tree), max_file_bytes=110)
    assert sorted(child.name for child in tmp_path.iterdir()) == [
        "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors", "model.safetensors.index.json"
    ]  # fmt: skip
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == 96 + 32 + 2 + 8
    assert set(index["weight_map"]) == {"layers.0.kernel", "layers.1.bias", "scale", "key"}
    loaded = weights.load(tmp_path / "model.safetensors.index.json", like=tree)
    assert jax.random.key_data(loaded.pop("key")).tolist() == jax.random.key_data(tree.pop("key")).tolist()
    assert_equal(loaded, tree)


def test_file_that_becomes_split_and_one_again_leaves_no_old_file(tmp_path):
    path, index = tmp_path / "w.safetensors", tmp_path / "w.safetensors.index.json"
    weights.save(path, TREE, max_file_bytes=1000)
    assert path.exists() and not index.exists()
    weights.save(path, TREE, max_file_bytes=1)
    assert not path.exists() and len(json.loads(index.read_text())["weight_map"]) == 3
    weights.save(path, TREE, max_file_bytes=1000)
    assert path.exists() and not index.exists()
    assert_equal(weights.load(path, like=TREE), TREE)


def test_wrong_options_of_split_files_are_refused(tmp_path):
    with pytest.raises(ValueError, match="`max_file_bytes` must be an integer >= 1, got 0"):
        weights.save(tmp_path / "w.safetensors", TREE, max_file_bytes=0)
    with pytest.raises(ValueError, match=r"the name of the file must end in \.safetensors, got '.*/w'"):
        weights.save(tmp_path / "w", TREE, max_file_bytes=10)


@pytest.mark.parametrize("text, message", [
    ("{", "is not an index of safetensors files: it has no `weight_map`"),
    ("{}", "is not an index of safetensors files: it has no `weight_map`"),
    ('{"weight_map": {"a": 3}}', "is not an index of safetensors files"),
    ('{"weight_map": {"a": "../w"}}', r"names the file '\.\./w' for a, which is not in its folder"),
    ('{"weight_map": {"b": "w"}}', "names the file w for b, which is not in this file. Download both again"),
])  # fmt: skip
def test_index_that_does_not_match_is_refused(text, message, tmp_path):
    weights.save(tmp_path / "w", {"a": np.zeros(1)})
    (tmp_path / "m.safetensors.index.json").write_text(text)
    with pytest.raises(ValueError, match=message):
        weights.load(tmp_path / "m.safetensors.index.json")


def test_missing_file_of_an_index_is_named(tmp_path):
    index = write_as_hugging_face(tmp_path, [{"a": np.zeros(1)}, {"b": np.zeros(1)}])
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match="model-00002-of-00002.safetensors does not exist"):
        weights.load(index)
    index.unlink()
    with pytest.raises(FileNotFoundError, match="model.safetensors.index.json does not exist, or is a folder"):
        weights.load(index)


@pytest.mark.parametrize("header, data, message", [
    ({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}, 4, r"a has 4 bytes, which is not the size of float32\[2\]"),
    ({"a": {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]}}, 8, "the bytes of a do not follow the bytes of the previous"),
    ({"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}, 9, "it has 9 bytes of arrays, and its header names 4"),
    ({"a": {"dtype": "F32", "shape": [1]}}, 4, "its header is not JSON of this format"),
])  # fmt: skip
def test_header_that_does_not_match_its_bytes_is_refused(header, data, message, tmp_path):
    text = json.dumps(header).encode()
    (tmp_path / "w").write_bytes(len(text).to_bytes(8, "little") + text + bytes(data))
    with pytest.raises(ValueError, match=rf"is not a safetensors file, or it is incomplete: {message}"):
        weights.load(tmp_path / "w")


@settings(deadline=None, max_examples=60)
@given(shape=st.lists(st.integers(0, 6), max_size=3), data=st.data())
def test_part_of_an_array_is_the_part_of_the_file(shape, data, tmp_path_factory):
    path = tmp_path_factory.mktemp("part") / "w"
    array = np.arange(np.prod(shape, dtype=int), dtype=np.int32).reshape(shape)
    weights.save(path, {"x": np.zeros(3, np.int8), "y": array})
    index = tuple(slice(*sorted((data.draw(st.integers(0, size)), data.draw(st.integers(0, size))))) for size in shape)
    part = read_tensors(path)["y"].read(index)
    np.testing.assert_array_equal(part, array[index])
    assert part.flags.owndata and part.shape == array[index].shape


@pytest.mark.parametrize("kind", ["file", "gs"])
def test_each_device_reads_its_part_only(kind, tmp_path, store, monkeypatch):
    strategy = STRATEGIES["sharded_4"]()
    tree = {"w": np.arange(64, dtype=np.float32).reshape(16, 4), "b": np.float32(3)}
    path = tmp_path / "w.safetensors" if kind == "file" else "gs://bucket/w.safetensors"
    weights.save(path, tree)
    sizes, read = [], StoredTensor.read

    def record(self, index=()):
        part = read(self, index)
        sizes.append(part.size)
        return part

    monkeypatch.setattr(StoredTensor, "read", record)
    loaded = weights.load(path, like=tree, strategy=strategy)
    assert loaded["w"].sharding == strategy.shardings(tree)["w"] and not loaded["w"].is_fully_replicated
    assert [size for size in sizes if size > 1] == [16] * 4
    assert_equal(loaded, tree)


@pytest.mark.parametrize("scheme", ["gs", "s3"])
def test_files_are_written_to_and_read_from_object_stores(scheme, two, store):
    path = f"{scheme}://bucket/run/model.safetensors"
    tree = {**TREE, "empty": np.zeros((0, 3), np.float32)}
    for size in (None, 60):
        weights.save(path, tree, max_file_bytes=size)
        source = path if size is None else f"{path}.index.json"
        assert_equal(weights.load(source, like=tree), tree)
        assert_equal(weights.load(source, like=tree, strategy=two), tree)
    assert not (store / scheme / "bucket/run/model.safetensors").exists()
    with pytest.raises(FileNotFoundError, match=f"The file {scheme}://bucket/none does not exist"):
        weights.load(f"{scheme}://bucket/none")
