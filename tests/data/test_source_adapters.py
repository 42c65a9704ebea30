"""Data sets of other libraries: each yields its examples once, in its order, and jdist does not import the library."""

import itertools
import os
import subprocess
import sys
import textwrap
import warnings

os.environ.setdefault("HF_DATASETS_OFFLINE", "1")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import chex
import jax
import numpy as np
import pytest

import jdist
from jdist._src.data.source_iterators import restart_each_epoch

from laws import STRATEGIES, arrays, assert_resumes_at_every_batch, each_row, example_numbers, resumed

REPLICAS = {name: STRATEGIES[name]() for name in ("one_device", "mirrored_2", "mirrored_3")}
COUNT, BATCH = 16, 6
CUT = [list(range(i, min(i + BATCH, COUNT))) for i in range(0, COUNT, BATCH)]


@pytest.fixture
def torch():
    return _imported("torch")


@pytest.fixture
def tensorflow():
    return _imported("tensorflow")


@pytest.fixture
def datasets():
    read_numbers = _imported("datasets")
    read_numbers.disable_progress_bars()
    return read_numbers


def _imported(name):
    with warnings.catch_warnings(action="ignore"):  # its repr
        return pytest.importorskip(name)


def _mapped(torch, count=COUNT):
    class Mapped(torch.utils.data.Dataset):
        def __len__(self):
            return count

        def __getitem__(self, number):
            return {"x": torch.full((2,), float(number)), "y": number}

    return Mapped()


def _stream(torch, count=COUNT, sized=False):
    class Stream(torch.utils.data.IterableDataset):
        def __iter__(self):
            return iter(torch.arange(count))

    class Sized(Stream):
        def __len__(self):
            return count

    return Sized() if sized else Stream()


def _loader(data, batch_size=BATCH, **options):
    return _imported("torch").utils.data.DataLoader(data, batch_size, **options)


def _pairs(torch):
    return torch.utils.data.TensorDataset(torch.arange(COUNT), torch.arange(COUNT)[:, None].float())


def _tensors(tf, count=COUNT):
    return tf.data.Dataset.range(count).map(lambda n: {"x": tf.fill([2], tf.cast(n, tf.float32)), "y": (n, n)})


def _slices(tf, tree):
    return tf.data.Dataset.from_tensor_slices(tree)


def _table(datasets, count=COUNT):
    numbers = np.arange(count)
    return datasets.Dataset.from_dict({"n": numbers, "x": np.repeat(numbers[:, None], 2, 1).astype(np.float32)})


def _rows():
    return ({"n": i, "x": [i, i]} for i in range(COUNT))


# Name -> library, source, batch size.
SOURCES = {
    "torch_tensor": ("torch", lambda t: t.arange(COUNT), BATCH),
    "torch_tensors": ("torch", lambda t: {"x": t.arange(COUNT), "y": t.arange(COUNT).float()}, BATCH),
    "torch_tensor_dataset": ("torch", lambda t: t.utils.data.TensorDataset(t.arange(COUNT), t.arange(COUNT)), BATCH),
    "torch_map_style": ("torch", _mapped, BATCH),
    "torch_subset": ("torch", lambda t: t.utils.data.Subset(_mapped(t, 40), range(COUNT)), BATCH),
    "torch_iterable": ("torch", _stream, BATCH),
    "torch_iterable_with_length": ("torch", lambda t: _stream(t, sized=True), BATCH),
    "torch_loader": ("torch", lambda t: _loader(_mapped(t)), None),
    "torch_loader_of_that_size": ("torch", lambda t: _loader(_mapped(t)), BATCH),
    "torch_loader_of_pairs": ("torch", lambda t: _loader(_pairs(t)), None),
    "torch_loader_of_a_stream": ("torch", lambda t: _loader(_stream(t)), None),
    "torch_loader_of_examples": ("torch", lambda t: _loader(_mapped(t), None), BATCH),
    "torch_loader_of_a_stream_of_examples": ("torch", lambda t: _loader(_stream(t), None), BATCH),
    "torch_loader_of_batches": ("torch", lambda t: _loader(list(t.arange(COUNT).split(BATCH)), None), None),
    "torch_loader_with_batch_sampler": ("torch", lambda t: _loader(_mapped(t), 1, batch_sampler=CUT), None),
    "tensorflow_examples": ("tensorflow", _tensors, BATCH),
    "tensorflow_slices": (
        "tensorflow",
        lambda tf: _slices(tf, (np.arange(COUNT), np.arange(COUNT, dtype="u1"))),
        BATCH,
    ),
    "tensorflow_batches": ("tensorflow", lambda tf: _tensors(tf).batch(BATCH), None),
    "tensorflow_prefetched": ("tensorflow", lambda tf: _tensors(tf).batch(BATCH).prefetch(2), None),
    "tensorflow_tensor": ("tensorflow", lambda tf: tf.range(COUNT), BATCH),
    "tensorflow_tensors": ("tensorflow", lambda tf: {"x": tf.range(COUNT), "y": [tf.range(COUNT)]}, BATCH),
    "hugging_face": ("datasets", _table, BATCH),
    "hugging_face_with_numpy": ("datasets", lambda d: _table(d).with_format("numpy"), BATCH),
    "hugging_face_with_columns": ("datasets", lambda d: _table(d).with_format("numpy", columns=["x"]), BATCH),
    "hugging_face_selected": ("datasets", lambda d: _table(d, 40).select(range(COUNT)), BATCH),
    "hugging_face_column": ("datasets", lambda d: _table(d)["n"], BATCH),
    "hugging_face_batches": ("datasets", lambda d: _table(d).batch(BATCH), None),
    "hugging_face_stream": ("datasets", lambda d: _table(d).to_iterable_dataset(), BATCH),
    "hugging_face_stream_of_shards": ("datasets", lambda d: _table(d).to_iterable_dataset(num_shards=2), BATCH),
    "hugging_face_stream_of_batches": ("datasets", lambda d: _table(d).to_iterable_dataset().batch(BATCH), None),
    "hugging_face_stream_of_a_generator": ("datasets", lambda d: d.IterableDataset.from_generator(_rows), BATCH),
}


@pytest.mark.parametrize("library, make, batch_size", SOURCES.values(), ids=SOURCES)
def test_source_yields_each_example_once_per_epoch_and_resumes_at_every_batch(library, make, batch_size, two):
    module = _imported(library)
    make_dataset = lambda strategy: strategy.distribute_dataset(make(module), batch_size, epochs=2, remainder="pad")
    assert assert_resumes_at_every_batch(make_dataset, two, REPLICAS.values()) == CUT * 2
    dropping = two.distribute_dataset(make(module), batch_size, epochs=2)
    assert example_numbers(dropping, has_weights=False) == CUT[:-1] * 2


@pytest.mark.parametrize("library, make", [("torch", _mapped), ("datasets", _table)], ids=["torch", "datasets"])
def test_dataset_of_examples_is_shuffled_like_any_other(library, make, two):
    source = make(_imported(library))
    for remainder in ("drop", "pad"):
        options = dict(batch_size=BATCH, shuffle=True, seed=4, epochs=2, remainder=remainder)
        expected = example_numbers(two.distribute_dataset(np.arange(COUNT), **options))
        assert example_numbers(two.distribute_dataset(source, **options)) == expected


def _torch_of_dtype(torch, dtype):
    tensor = torch.tensor([0, 1, 1, 0]).to(getattr(torch, dtype))
    dataset = torch.utils.data.TensorDataset(tensor)
    return (tensor, 4), (lambda: iter(tensor), 4), (dataset, 4), (_loader(dataset, 4), None)


def _tensorflow_of_dtype(tf, dtype):
    tensor = tf.cast([0, 1, 1, 0], getattr(tf, dtype))
    return (tensor, 4), (_slices(tf, tensor), 4), (_slices(tf, tensor).batch(4), None)


def _hugging_face_of_dtype(datasets, dtype):
    table = datasets.Dataset.from_dict({"x": [0, 1, 1, 0]}, features=datasets.Features({"x": datasets.Value(dtype)}))
    return (table, 4), (table.to_iterable_dataset(), 4)


DTYPES = ["uint8", "int16", "int32", "float16", "float32", "bool"]
OF_DTYPE = {
    "torch": (_torch_of_dtype, [*DTYPES, "complex64", "bfloat16", "float8_e4m3fn"]),
    "tensorflow": (_tensorflow_of_dtype, [*DTYPES, "complex64", "bfloat16"]),
    "datasets": (_hugging_face_of_dtype, [*DTYPES, "uint32"]),
}


@pytest.mark.parametrize("library", OF_DTYPE)
def test_dtype_is_unchanged(library, two, subtests):
    make, dtypes = OF_DTYPE[library]
    for dtype in dtypes:
        with subtests.test(dtype):
            for source, batch_size in make(_imported(library), dtype):
                assert _leaf(two.distribute_dataset(source, batch_size)) == (dtype, [0, 1, 1, 0])


def _hugging_face(columns, **dtypes):
    def make(datasets):
        features = {name: datasets.Value(dtype) for name, dtype in dtypes.items()}
        return datasets.Dataset.from_dict(columns, features=datasets.Features(features) if dtypes else None)

    return make


IN_SOURCE = r"yields its elements sequentially, but shuffle=True needs .*Shuffle in the source"
STRINGS = {"s": ["a", "bc"], "x": [1, 2]}
HF_STRINGS = r"source\['s'\] is <U\d(\[2\]|\[\]) in batch 0 of epoch 0, a dtype that JAX does not support\. .*remove it"
TF_STRINGS = r"source\['s'\] is (\|S\d|object)\[2?\] in (batch 0 of epoch 0|the first batch)"
RAGGED = {"r": [[1, 2, 3], [3, 4, 5], [5], [6, 7, 8]]}
HF_RAGGED = r"source\['r'\] (is object\[2\]|has the shape \[3\] in example 1) in batch 1 of epoch 0[,:] .*[Pp]ad"
LARGE = _hugging_face({"id": np.array([1, 2**40 + 5], np.uint64)}, id="uint64")
HF_LARGE = rf"source\['id'\] holds {2**40 + 5}, which is out of the range of uint32"
GRADIENT = r"source\['x'\] is Tensor{}.*requires grad"
# Name -> library, source, options, error.
REFUSED = {
    "torch_loader_shuffled": (
        "torch",
        lambda t: _loader(_mapped(t)),
        dict(batch_size=None, shuffle=True),
        r"The source is a DataLoader, but shuffle=True needs .* Shuffle in the source",
    ),
    "torch_stream_shuffled": ("torch", _stream, dict(shuffle=True), "shuffle=True needs examples with an index"),
    "torch_sized_stream_shuffled": (
        "torch",
        lambda t: _stream(t, sized=True),
        dict(shuffle=True),
        "shuffle=True needs examples with an index",
    ),
    "tensorflow_shuffled": ("tensorflow", _tensors, dict(shuffle=True), IN_SOURCE),
    "hugging_face_stream_shuffled": (
        "datasets",
        lambda d: _table(d).to_iterable_dataset(),
        dict(shuffle=True),
        IN_SOURCE,
    ),
    "torch_loader_of_another_batch_size": (
        "torch",
        lambda t: _loader(_mapped(t), 4),
        dict(batch_size=BATCH),
        r"The source makes batches of 4 examples, but 6 are expected\. .*`batch_size=None`",
    ),
    "torch_gradient": (
        "torch",
        lambda t: {"x": t.zeros(4, requires_grad=True)},
        {},
        GRADIENT.format(", which is not convertible to numpy: "),
    ),
    "torch_gradient_in_an_example": (
        "torch",
        lambda t: iter([{"x": row} for row in t.zeros(4, requires_grad=True)]),
        {},
        GRADIENT.format(" in batch 0 of epoch 0, "),
    ),
    "tensorflow_strings": ("tensorflow", lambda tf: _slices(tf, STRINGS), {}, TF_STRINGS),
    "tensorflow_batch_of_strings": (
        "tensorflow",
        lambda tf: _slices(tf, STRINGS).batch(2),
        dict(batch_size=None),
        TF_STRINGS,
    ),
    "tensorflow_ragged": (
        "tensorflow",
        lambda tf: _slices(tf, {"r": tf.ragged.constant([[1], [1, 2]])}),
        {},
        r"source(\['r'\])? .*batch",
    ),
    "tensorflow_ragged_batch": (
        "tensorflow",
        lambda tf: _slices(tf, {"r": tf.ragged.constant([[1], [1, 2]])}).batch(2),
        dict(batch_size=None),
        r"source\['r'\].* in the first batch",
    ),
    "hugging_face_strings": ("datasets", _hugging_face(STRINGS), {}, HF_STRINGS),
    "hugging_face_stream_of_strings": (
        "datasets",
        lambda d: _hugging_face(STRINGS)(d).to_iterable_dataset(),
        {},
        HF_STRINGS,
    ),
    "hugging_face_ragged": ("datasets", _hugging_face(RAGGED), {}, HF_RAGGED),
    "hugging_face_ragged_stream": ("datasets", lambda d: _hugging_face(RAGGED)(d).to_iterable_dataset(), {}, HF_RAGGED),
    "hugging_face_large_integer": ("datasets", LARGE, {}, HF_LARGE),
    "hugging_face_large_integer_in_a_stream": ("datasets", lambda d: LARGE(d).to_iterable_dataset(), {}, HF_LARGE),
    "hugging_face_splits": (
        "datasets",
        lambda d: d.DatasetDict({"train": _table(d), "test": _table(d)}),
        {},
        "The source is .*DatasetDict",
    ),
}


@pytest.mark.parametrize("library, make, options, says", REFUSED.values(), ids=REFUSED)
def test_source_that_cannot_be_distributed_is_refused(library, make, options, says, two):
    with pytest.raises(ValueError, match=says):
        list(two.distribute_dataset(make(_imported(library)), **{"batch_size": 2, **options}))


def _leaf(dataset):
    """Returns the dtype and the values of the single leaf of the first batch."""
    (leaf,) = jax.tree.leaves(next(iter(dataset)))
    return leaf.dtype, np.asarray(leaf).reshape(-1, *leaf.shape[2:]).tolist()


@pytest.mark.slow
def test_jdist_does_not_import_data_libraries():
    program = """
        import sys
        import numpy as np
        import jdist

        strategy = jdist.MirroredStrategy(["cpu:0", "cpu:1"])
        sources = [
            (np.arange(8), 4), (range(8), 4), ((i for i in range(8)), 4), (iter([np.arange(4)]), None),
            (lambda step: np.arange(4), None), (jdist.data.Files(["a"], lambda path: np.arange(8)), 4),
        ]
        for source, batch_size in sources:
            iterator = iter(strategy.distribute_dataset(source, batch_size))
            assert next(iterator).tree.shape == (2, 2)
            iterator.close()
        try:
            strategy.distribute_dataset(object(), 4)
        except ValueError as error:
            assert "a dataset of grain, TensorFlow, torch or Hugging Face" in str(error)
        else:
            raise AssertionError
        libraries = {"tensorflow", "torch", "datasets", "grain"}
        print(sorted(libraries & {name.split(".")[0] for name in sys.modules}))
    """
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "2"}
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True, env=environment
    )
    assert (done.returncode, done.stdout) == (0, "[]\n"), done.stderr


# Widths of every kind of source


WIDTHS = [1 + 3 * i % 7 for i in range(COUNT)]
TOKENS = [np.full(width, number, np.int32) for number, width in enumerate(WIDTHS)]
BUCKETS = jdist.data.Buckets((4, 8), leaves=("tokens", 1))


class Sentences:
    """Examples of different widths, with an index."""

    def __len__(self):
        return COUNT

    def __getitem__(self, number):
        if number >= COUNT:
            raise IndexError
        return {"number": np.int32(number), "tokens": TOKENS[number]}


def _sentence_table():
    tokens = np.empty(COUNT, object)
    tokens[:] = TOKENS
    return {"number": np.arange(COUNT), "tokens": tokens}


def _sentence_rows():
    return {"number": list(range(COUNT)), "tokens": [tokens.tolist() for tokens in TOKENS]}


def _sentence_lists():
    """Returns examples whose tokens are lists of Python numbers."""
    return [{"number": number, "tokens": tokens.tolist()} for number, tokens in enumerate(TOKENS)]


def _sentence_batches(make_batch):
    """Returns a generator function of batches, each made from a list of examples."""
    examples = list(Sentences())
    return lambda: (make_batch(examples[i : i + BATCH]) for i in range(0, COUNT, BATCH))


def _columns_of_lists(examples):
    return {"number": [int(x["number"]) for x in examples], "tokens": [x["tokens"].tolist() for x in examples]}


def _torch_sentences(torch):
    class Tensors(Sentences, torch.utils.data.Dataset):
        def __getitem__(self, number):
            return jax.tree.map(torch.as_tensor, Sentences.__getitem__(self, number))

    return Tensors()


def _tf_sentences(tf):
    return _slices(tf, {"number": tf.range(COUNT), "tokens": tf.ragged.constant(_sentence_rows()["tokens"])})


def _hf_sentences(datasets):
    return datasets.Dataset.from_dict(_sentence_rows())


def _hf_stream(datasets):
    return _hf_sentences(datasets).to_iterable_dataset()


def _table_batches():
    return ({k: v[i : i + BATCH] for k, v in _sentence_table().items()} for i in range(0, COUNT, BATCH))


# Name -> library, source, whether it has indices, whether its elements are batches.
SENTENCES = {
    "object_array": (None, lambda _: _sentence_table(), True, False),
    "list_of_object_arrays": (None, lambda _: list(_sentence_table().values()), True, False),
    "dict_of_lists": (None, lambda _: _sentence_rows(), True, False),
    "dict_of_lists_of_arrays": (None, lambda _: {"number": np.arange(COUNT), "tokens": TOKENS}, True, False),
    "batches_of_lists": (None, lambda _: _sentence_batches(_columns_of_lists), False, True),
    "batches_of_examples": (None, lambda _: _sentence_batches(list), False, True),
    "sequence": (None, lambda _: Sentences(), True, False),
    "list_of_examples": (None, lambda _: list(Sentences()), True, False),
    "list_of_lists": (None, lambda _: _sentence_lists(), True, False),
    "generator_function": (None, lambda _: lambda: iter(list(Sentences())), False, False),
    "generator_function_of_lists": (None, lambda _: lambda: iter(_sentence_lists()), False, False),
    "batches_of_object_arrays": (None, lambda _: _table_batches, False, True),
    "files": (None, lambda _: jdist.data.Files(["a"], lambda path: Sentences()), False, False),
    "files_of_lists": (None, lambda _: jdist.data.Files(["a"], lambda path: _sentence_lists()), False, False),
    "files_of_object_arrays": (None, lambda _: jdist.data.Files(["a"], lambda path: _sentence_table()), False, False),
    "grain": ("grain", lambda grain: grain.MapDataset.source(Sentences()), True, False),
    "grain_stream": ("grain", lambda grain: grain.MapDataset.source(Sentences()).to_iter_dataset(), False, False),
    "torch": ("torch", _torch_sentences, True, False),
    "torch_loader": ("torch", lambda t: _loader(_torch_sentences(t), None), False, False),
    "torch_loader_of_examples": ("torch", lambda t: _loader(_torch_sentences(t), collate_fn=list), False, True),
    "torch_loader_of_lists": ("torch", lambda _: _loader(Sentences(), collate_fn=_columns_of_lists), False, True),
    "hugging_face": ("datasets", _hf_sentences, True, False),
    "hugging_face_torch": ("datasets", lambda d: _hf_sentences(d).with_format("torch"), True, False),
    "hugging_face_stream": ("datasets", _hf_stream, False, False),
    "hugging_face_batches": ("datasets", lambda d: _hf_sentences(d).batch(BATCH), True, True),
    "hugging_face_torch_batches": (
        "datasets",
        lambda d: _hf_sentences(d).batch(BATCH).with_format("torch"),
        True,
        True,
    ),
    "hugging_face_torch_stream_of_batches": (
        "datasets",
        lambda d: _hf_stream(d).with_format("torch").batch(BATCH),
        False,
        True,
    ),
    "hugging_face_stream_of_batches": ("datasets", lambda d: _hf_stream(d).batch(BATCH), False, True),
    "tensorflow": ("tensorflow", _tf_sentences, False, False),
    "tensorflow_batches": ("tensorflow", lambda tf: _tf_sentences(tf).batch(BATCH), False, True),
}


@pytest.mark.parametrize("library, make, has_indices, are_batches", SENTENCES.values(), ids=SENTENCES)
def test_widths_shuffle_and_weights_of_every_kind_of_source(library, make, has_indices, are_batches, two):
    module = _imported(library) if library else None
    if library == "datasets":
        _imported("torch")
        module.disable_progress_bars()
    for shuffle in (False, True) if has_indices else (False,):
        options = dict(buckets=BUCKETS, remainder="pad", shuffle=shuffle, seed=0)
        numbers = []
        dataset = two.distribute_dataset(make(module), None if are_batches else BATCH, **options)
        shapes, spec = (
            [(x.shape, x.dtype) for x in jax.tree.leaves(t)] for t in (next(iter(dataset)), dataset.element_spec)
        )
        assert shapes == spec
        for (batch, weights), same in zip(dataset, dataset, strict=True):
            chex.assert_trees_all_equal(arrays((batch, weights)), arrays(same))
            parts = batch if isinstance(batch, list) else (batch["number"], batch["tokens"])
            number, tokens, weight = (np.asarray(x.tree).reshape(-1, *x.tree.shape[2:]) for x in (*parts, weights))
            keep = weight > 0
            widest = max(WIDTHS[i] for i in number[keep])
            assert tokens.shape[1] == (4 if widest <= 4 else 8)
            for i, row in zip(number[keep], tokens[keep], strict=True):
                np.testing.assert_array_equal(row, np.pad(TOKENS[i], (0, len(row) - WIDTHS[i])))
            numbers += number[keep].tolist()
        assert sorted(numbers) == list(range(COUNT))
        assert (numbers != sorted(numbers)) == shuffle


# Iterators that are open at the same time


def _hugging_face_stream(datasets):
    return datasets.Dataset.from_dict({"n": list(range(COUNT))}).to_iterable_dataset(num_shards=2)


def _parts(datasets):
    stream = _hugging_face_stream(datasets)
    return [stream.take(7), stream.skip(7)]


def _function_of(stream):
    return lambda: stream


def _torch_loader_with_sampler(torch):
    sampler = torch.utils.data.DistributedSampler(_mapped(torch), num_replicas=1, rank=0, shuffle=True)
    return _loader(_mapped(torch), BATCH, sampler=sampler)


def _torch_loader_with_workers(torch):
    # Not forked: this process has threads.
    options = dict(num_workers=1, persistent_workers=True, multiprocessing_context="spawn")
    return _loader(range(COUNT), BATCH, **options)


def _stateful_loader(data, **options):
    with warnings.catch_warnings(action="ignore"):  # torch has deprecated what torchdata calls
        return _imported("torchdata.stateful_dataloader").StatefulDataLoader(data, BATCH, **options)


def _stateful_loader_with_sampler(torch):
    stateful = _imported("torchdata.stateful_dataloader.sampler")
    return _stateful_loader(_mapped(torch), sampler=stateful.StatefulDistributedSampler(_mapped(torch), 1, 0))


# Name -> library, source, whether its elements are batches.
ORDERED = {
    "hugging_face_stream": ("datasets", _hugging_face_stream, False),
    "hugging_face_mapped": ("datasets", lambda d: _hugging_face_stream(d).map(dict).filter(bool), False),
    "hugging_face_concatenated": ("datasets", lambda d: d.concatenate_datasets(_parts(d)), False),
    "hugging_face_interleaved": (
        "datasets",
        lambda d: d.interleave_datasets(_parts(d), stopping_strategy="all_exhausted"),
        False,
    ),
    "hugging_face_repeated": ("datasets", lambda d: _parts(d)[0].repeat(2), False),
    "hugging_face_shuffled": ("datasets", lambda d: _hugging_face_stream(d).shuffle(seed=0, buffer_size=8), False),
    "hugging_face_function": ("datasets", lambda d: _function_of(d.concatenate_datasets(_parts(d))), False),
    "torch_loader_of_hugging_face": (
        "datasets",
        lambda d: _loader(d.concatenate_datasets(_parts(d)).with_format("torch")),
        True,
    ),
    "torch_loader_with_sampler": ("torch", _torch_loader_with_sampler, True),
    "torch_loader_with_workers": ("torch", _torch_loader_with_workers, True),
    "torchdata": ("torch", lambda t: _stateful_loader(_mapped(t)), True),
    "torchdata_with_sampler": ("torch", _stateful_loader_with_sampler, True),
    "torchdata_of_hugging_face": (
        "datasets",
        lambda d: _stateful_loader(d.concatenate_datasets(_parts(d)).with_format("torch")),
        True,
    ),
    "grain": ("grain", lambda grain: grain.MapDataset.range(COUNT).shuffle(seed=0).to_iter_dataset(), False),
    "tensorflow": ("tensorflow", lambda tf: tf.data.Dataset.range(COUNT), False),
}


@pytest.mark.parametrize("prefetch", [0, 2])
@pytest.mark.parametrize("library, make, are_batches", ORDERED.values(), ids=ORDERED)
def test_iterators_that_are_open_at_the_same_time_do_not_move_each_other(library, make, are_batches, prefetch, two):
    source, options = make(_imported(library)), dict(epochs=2, remainder="pad", prefetch=prefetch)
    dataset = two.distribute_dataset(source, None if are_batches else BATCH, **options)
    alone = example_numbers(dataset)
    states = []
    for ahead in (2, len(alone) // 2 + 2):  # in the same epoch, and in the one before
        first = iter(dataset)
        first_numbers, second_numbers = example_numbers(itertools.islice(first, ahead)), []
        for later, earlier in itertools.zip_longest(dataset, first):
            second_numbers += example_numbers([later])
            if earlier is not None:
                first_numbers += example_numbers([earlier])
                states.append((len(first_numbers), first.get_state()))
        assert first_numbers == second_numbers == alone
    for taken, state in states:
        assert example_numbers(resumed(dataset, state)) == alone[taken:]


@pytest.mark.parametrize("name", ["hugging_face_shuffled", "torch_loader_with_sampler"])
def test_start_of_another_iterator_does_not_change_the_epoch_of_one_that_is_not_read_yet(name):
    library, make, _ = ORDERED[name]
    start = restart_each_epoch(make(_imported(library)))
    numbers = lambda elements: [np.asarray(jax.tree.leaves(element)[0]).tolist() for element in elements]
    alone = [numbers(start(epoch, 0)) for epoch in (0, 1)]
    second, first = start(1, 0), start(0, 0)
    assert [numbers(first), numbers(second)] == alone
    assert alone[0] != alone[1]


@pytest.mark.parametrize("prefetch", [0, 2])
def test_data_sets_of_parts_of_one_stream_do_not_move_each_other(prefetch, datasets, two):
    stream = datasets.concatenate_datasets(_parts(datasets))
    options = dict(batch_size=2, remainder="pad", prefetch=prefetch)
    training, validation = (two.distribute_dataset(part, **options) for part in (stream.skip(4), stream.take(10)))
    first = iter(training)
    next(first)
    pairs = [example_numbers(pair) for pair in zip(validation, first, strict=True)]
    assert pairs == [[[i, i + 1], [i + 6, i + 7]] for i in range(0, 10, 2)]


# torch


class EpochSampler:
    """A sampler with another order each epoch, like `DistributedSampler`."""

    def __init__(self, count=COUNT):
        self._count, self._epoch, self.epochs = count, 0, []

    def set_epoch(self, epoch):
        self._epoch = epoch
        self.epochs.append(epoch)

    def __len__(self):
        return self._count

    def __iter__(self):
        return iter(np.random.default_rng(self._epoch).permutation(self._count).tolist())


SAMPLED = {
    "sampler": lambda t, sampler: _loader(_mapped(t), sampler=sampler),
    "batch_sampler": lambda t, sampler: _loader(
        _mapped(t), 1, batch_sampler=t.utils.data.BatchSampler(sampler, BATCH, False)
    ),
}


@pytest.mark.parametrize("make", SAMPLED.values(), ids=SAMPLED)
def test_torch_sampler_receives_the_epoch_and_resumes_in_its_order(make, torch, two):
    sampler = EpochSampler()
    read_numbers = example_numbers(two.distribute_dataset(make(torch, sampler), None, epochs=3, remainder="pad"))
    for epoch in range(3):
        sampler.set_epoch(epoch)
        assert sum(read_numbers[3 * epoch : 3 * epoch + 3], []) == list(sampler)
    dataset = lambda strategy: strategy.distribute_dataset(make(torch, EpochSampler()), None, epochs=3, remainder="pad")
    assert assert_resumes_at_every_batch(dataset, two, REPLICAS.values()) == read_numbers


def test_torch_loader_with_random_order_is_not_resumed(torch, two):
    def iterator():
        loader = _loader(_mapped(torch), BATCH, shuffle=True)
        return iter(two.distribute_dataset(loader, None, remainder="pad"))

    first = iterator()
    next(first)
    with pytest.raises(ValueError, match="shuffle"):  # the rest of another order would have repeats and gaps
        iterator().set_state(first.get_state())


@pytest.mark.parametrize("batch_size", [None, BATCH], ids=["batches", "examples"])
def test_stateful_loader_of_torchdata_resumes_in_its_random_order(batch_size, torch, two):
    stateful = _imported("torchdata.stateful_dataloader")

    def dataset():
        size = BATCH if batch_size is None else None  # of a batch that the loader makes
        with warnings.catch_warnings(action="ignore"):  # torch has deprecated what torchdata calls
            loader = stateful.StatefulDataLoader(_mapped(torch), size, shuffle=True)
        return two.distribute_dataset(loader, batch_size, epochs=2, remainder="pad")

    torch.manual_seed(0)
    first = iter(dataset())
    order = example_numbers(itertools.islice(first, 1))
    torch.manual_seed(1)
    later = resumed(dataset(), first.get_state())
    rest = example_numbers(itertools.islice(first, 2))
    assert example_numbers(itertools.islice(later, 2)) == rest
    assert sorted(sum(order + rest, [])) == list(range(COUNT)) != sum(order + rest, [])


def test_torch_loader_of_less_than_a_batch_is_padded(torch, two):
    loader = _loader(_mapped(torch, 3), 8)
    ((batch, weights),) = two.distribute_dataset(loader, None, remainder="pad")
    assert np.asarray(batch["y"].tree).ravel().tolist() == [0, 1, 2, 0, 0, 0, 0, 0]
    assert np.asarray(weights.tree).ravel().tolist() == [1, 1, 1, 0, 0, 0, 0, 0]


@each_row("prefetch", [0, 2])
@each_row("whole", [False, True])
def test_torch_stream_with_a_reused_buffer_does_not_change_batches(whole, prefetch, torch, one):
    class Lending(torch.utils.data.IterableDataset):
        def __iter__(self):
            raw = np.zeros(4 * 2 * 16 + 64, np.uint8)
            start = -raw.ctypes.data % 64
            rows = raw[start : start + 4 * 2 * 16].view(np.int32).reshape(2, 16)
            for i in range(4):
                rows[:] = np.arange(2 * i, 2 * i + 2)[:, None]
                yield from [rows] if whole else rows

    loader = _loader(Lending(), batch_size=None)
    batches = list(one.distribute_dataset(loader, None if whole else 1, prefetch=prefetch))
    read_numbers = np.concatenate([np.asarray(batch.tree)[0] for batch in batches])
    np.testing.assert_array_equal(read_numbers, np.broadcast_to(np.arange(8)[:, None], (8, 16)))


def test_torch_error_in_an_example_surfaces_with_its_own_traceback(torch, two):
    class Broken(torch.utils.data.Dataset):
        def __len__(self):
            return 8

        def __getitem__(self, number):
            if number == 5:
                raise OSError("disk is gone")
            return number

    for source, batch_size in ((Broken(), 4), (_loader(Broken(), 4), None)):
        iterator = iter(two.distribute_dataset(source, batch_size))
        assert example_numbers([next(iterator)]) == [[0, 1, 2, 3]]
        with pytest.raises(OSError, match="disk is gone") as error:
            next(iterator)
        assert error.traceback[-1].name == "__getitem__"


# TensorFlow


def test_endless_tensorflow_dataset_continues(tensorflow, two):
    iterator = iter(two.distribute_dataset(_tensors(tensorflow, BATCH).repeat().batch(BATCH), None))
    assert example_numbers(itertools.islice(iterator, 5)) == [list(range(BATCH))] * 5
    iterator.close()


def test_tensorflow_error_is_raised_unchanged(tensorflow, two):
    def check(number):
        tensorflow.debugging.assert_less(number, tensorflow.constant(5, tensorflow.int64), "too far")
        return number

    iterator = iter(two.distribute_dataset(tensorflow.data.Dataset.range(8).map(check), 4))
    assert example_numbers([next(iterator)]) == [[0, 1, 2, 3]]
    with pytest.raises(tensorflow.errors.InvalidArgumentError, match="too far"):
        next(iterator)


# Hugging Face


def test_hugging_face_stream_in_torch_format_keeps_bfloat16(datasets, torch, two):
    table = datasets.Dataset.from_dict({"x": [0.5, -1.0, 2.0, 3.0]}).to_iterable_dataset().with_format("torch")
    stream = table.map(lambda example: {"x": example["x"].detach().bfloat16()})
    with warnings.catch_warnings(action="ignore"):  # datasets copies tensors with `torch.tensor`
        for source, batch_size in ((stream, 4), (stream.batch(4), None)):
            assert _leaf(two.distribute_dataset(source, batch_size)) == ("bfloat16", [0.5, -1, 2, 3])


def test_hugging_face_dataset_keeps_its_own_format(datasets, two):
    table = _table(datasets)
    next(iter(two.distribute_dataset(table, BATCH)))
    assert table.format["type"] is None
    assert isinstance(table[0]["n"], int)
