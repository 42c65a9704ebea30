"""Conversion of sources to numeric rows, and errors that name the invalid leaf."""

import logging
import re

import chex
import hypothesis
import hypothesis.extra.numpy as hnp
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jdist._src.data import array_rows

from laws import STRATEGIES, Numbered, arrays, each_row

few = hypothesis.settings(max_examples=60, deadline=None, derandomize=True, database=None)
REPLICAS = {name: STRATEGIES[name]() for name in ("one_device", "mirrored_2")}
every_strategy = each_row("strategy", REPLICAS.values(), ids=REPLICAS)
shapes = hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=3).map(tuple)
held = st.sampled_from(["bool", "uint8", "int8", "int16", "uint32", "int32", "float16", "float32", "complex64"])


class Again:
    """An iterable of the same examples or batches each time."""

    def __init__(self, *elements):
        self._elements = elements

    def __iter__(self):
        return iter(self._elements)


def _all(dataset):
    return [arrays(batch) for batch in dataset]


# Pure functions.


@few
@hypothesis.given(st.integers(1, 5), shapes, held, st.integers(0, 2**32 - 1))
def test_stacked_examples_are_rows_in_order(count, shape, dtype, seed):
    values = np.random.default_rng(seed).integers(0, 2, size=(count, *shape)).astype(dtype)
    examples = [{"x": values[i], "y": (np.int32(i), None)} for i in range(count)]
    stack = array_rows.ExampleStack()
    for example in examples:
        stack.add(example)
    rows = stack.stacked()
    chex.assert_trees_all_equal(rows, {"x": values, "y": (np.arange(count, dtype=np.int32), None)})
    assert rows["x"].dtype == dtype
    assert array_rows.num_rows(rows) == count
    assert not any(np.shares_memory(rows["x"], example["x"]) for example in examples)


@few
@hypothesis.given(st.integers(0, 5), shapes, held)
def test_as_rows_keeps_values_dtypes_and_structure(count, shape, dtype):
    tree = {"x": np.zeros((count, *shape), dtype), "y": [np.arange(count), None]}
    rows = array_rows.as_rows(tree)
    chex.assert_trees_all_equal(rows, tree)
    assert rows["x"].dtype == dtype
    assert array_rows.num_rows(rows) == count


@few
@hypothesis.given(shapes, shapes, held, held)
def test_difference_is_described_if_and_only_if_a_row_differs(shape, other_shape, dtype, other_dtype):
    def tree(rows, shape, dtype):
        return {"a": np.zeros(rows, np.int8), "b": [np.zeros((rows, *shape), dtype)]}

    text = array_rows.describe_difference(tree(2, shape, dtype), tree(3, other_shape, other_dtype))
    assert (text is None) == ((shape, dtype) == (other_shape, other_dtype))
    if text is not None:
        now, before = (f"{d}[{','.join(map(str, s))}]" for d, s in ((other_dtype, other_shape), (dtype, shape)))
        assert text == f"source['b'][0] as {now} per row, expected {before}"


def test_difference_of_structure_is_described():
    text = array_rows.describe_difference({"a": np.zeros(2)}, {"a": np.zeros(2), "b": np.zeros(2)})
    assert "the structure PyTreeDef({'a': *, 'b': *}), expected PyTreeDef({'a': *})" in text
    assert array_rows.describe_difference({"a": np.zeros(2), "n": None}, {"a": np.ones(7), "n": None}) is None


def test_description_of_a_row_names_each_leaf():
    tree = {"x": np.zeros((4, 2, 3), np.float16), "y": (np.zeros(4, bool),)}
    assert array_rows.describe_row(tree) == "source['x'] float16[2,3], source['y'][0] bool[]"


@few
@hypothesis.given(hnp.arrays(st.sampled_from(["int64", "uint64"]), st.integers(0, 6)))
def test_integers_in_32_bits_are_equal_or_refused(array):
    limits = np.iinfo(np.int32 if array.dtype.kind == "i" else np.uint32)
    fits = all(limits.min <= int(x) <= limits.max for x in array)
    for check in (array_rows.check_ranges, array_rows.canonicalize_dtypes):
        if fits:
            check({"x": array})
        else:
            with pytest.raises(ValueError, match=r"source\['x'\] holds -?\d+, which is out of the range of u?int32\."):
                check({"x": array})
    if fits:
        narrow = array_rows.canonicalize_dtypes({"x": array})["x"]
        assert narrow.dtype == limits.dtype
        assert narrow.tolist() == array.tolist()


@few
@hypothesis.given(hnp.arrays(np.float64, st.integers(0, 6)))
def test_floats_in_32_bits_equal_jax(array):
    with np.errstate(over="ignore"):
        np.testing.assert_array_equal(array_rows.canonicalize_dtypes([array])[0], array.astype(np.float32))


def test_32_bit_leaves_are_returned_unchanged():
    tree = {"x": np.zeros(2, np.float32), "y": np.zeros(2, np.uint8)}
    assert array_rows.canonicalize_dtypes(tree) is tree


def test_warning_names_float64_leaves_with_dtype_and_shape():
    tree = {"a": np.zeros((2, 3)), "b": np.zeros(2, np.float32), "c": np.zeros(2, complex), "d": np.zeros(2, int)}
    leaves = "source['a'] (float64[2,3]), source['c'] (complex128[2])"
    assert array_rows.float64_warning(tree).startswith(f"{leaves}: JAX converts 64-bit floats")
    assert array_rows.float64_warning(tree["d"]) is None


# Values that stay unchanged.

KEPT = {
    "bool": np.array([True, False, True, False]),
    "uint8": np.array([0, 255, 1, 2], np.uint8),
    "int8": np.array([-128, 127, 0, 1], np.int8),
    "uint32": np.array([0, 2**32 - 1, 1, 2], np.uint32),
    "int32": np.array([-(2**31), 2**31 - 1, 0, 1], np.int32),
    "float16": np.array([0.5, -1, 2, np.inf], np.float16),
    "float32": np.array([0.1, -0.0, np.nan, np.inf], np.float32),
    "complex64": np.array([1j, -2, 3 + 4j, 0], np.complex64),
    "bfloat16": np.array([0.5, -1, 2, 3], jnp.bfloat16),
    "float8_e4m3fn": np.array([0.5, -1, 2, 3], jnp.float8_e4m3fn),
    "float8_e5m2": np.array([0.5, -1, 2, 3], jnp.float8_e5m2),
    "int4": np.array([-8, 7, 0, 1], jnp.int4),
}


@every_strategy
@each_row("values", KEPT.values(), ids=KEPT)
def test_supported_dtype_is_unchanged_bit_for_bit(values, strategy):
    sources = {
        "array": (values.copy(), 4),
        "examples": (Again(*values), 4),
        "batches": (Again(values.copy()), None),
        "columns": ({"x": values.copy()}, 4),
    }
    for source, batch_size in sources.values():
        (batch,) = _all(strategy.distribute_dataset(source, batch_size))
        (leaf,) = jax.tree.leaves(batch)
        assert leaf.dtype == values.dtype
        assert np.asarray(leaf).ravel().tobytes() == values.tobytes()


@every_strategy
@each_row("dtype", [">i2", ">i4", ">u4", ">i8", ">f4", ">f8"])
def test_numbers_in_another_byte_order_are_equal(dtype, strategy):
    values = np.arange(1, 5).astype(dtype)  # as in the IDX files of MNIST
    for source in (values, Again(*values)):
        with jax.enable_x64(dtype.endswith("8")):
            (batch,) = _all(strategy.distribute_dataset(source, 4))
        assert batch.dtype == values.dtype.newbyteorder("=")
        assert np.asarray(batch).ravel().tolist() == [1, 2, 3, 4]


PYTHON_NUMBERS = {
    "int": ([1, 1], np.int32, np.int64),
    "float": ([0.5, 0.5], np.float32, np.float64),
    "bool": ([True, True], np.bool_, np.bool_),
    "complex": ([1j, 1j], np.complex64, np.complex128),
    "mixed": ([1, 2.5], np.float32, np.float64),
}


@each_row("values, dtype, wide_dtype", PYTHON_NUMBERS.values(), ids=PYTHON_NUMBERS)
def test_python_numbers_as_examples_have_the_default_dtype_of_jax(values, dtype, wide_dtype, two, caplog):
    for examples in (values, [{"x": value} for value in values]):
        for x64, expected in ((False, dtype), (True, wide_dtype)):
            with jax.enable_x64(x64):
                (batch,) = _all(two.distribute_dataset(Again(*examples), 2))
            (leaf,) = jax.tree.leaves(batch)
            assert (leaf.dtype, leaf.ravel().tolist()) == (expected, values)
    assert caplog.messages == []  # a Python number does not have a width


def test_scalars_and_empty_rows_are_unchanged(two):
    source = {"nothing": np.zeros((4, 0), np.float32), "one": np.zeros((4, 1), np.float32)}
    (batch,) = _all(two.distribute_dataset(source, 4))
    assert jax.tree.map(np.shape, batch) == {"nothing": (2, 2, 0), "one": (2, 2, 1)}


def test_non_contiguous_memory_gives_equal_rows(two):
    values = np.arange(48, dtype=np.float32).reshape(4, 3, 4)
    for source in (values[::-1, :, ::2], values.T, np.asfortranarray(values), np.broadcast_to(values[:1], (4, 3, 4))):
        (batch,) = _all(two.distribute_dataset(source, 4))
        np.testing.assert_array_equal(np.asarray(batch).reshape(source.shape), source)


# 64-bit numbers.

WIDE = {
    "array": lambda: ({"x": np.arange(8) / 3}, 4, r"source\['x'\] \(float64\[\d\]\)"),
    "examples": lambda: (Again(*({"x": np.float64(i)} for i in range(8))), 4, r"source\['x'\] \(float64\[4\]\)"),
    "batches": lambda: (Again(np.zeros((4, 2)), np.ones((4, 2))), None, r"source \(float64\[4,2\]\)"),
    "complex": lambda: (np.zeros(8, complex), 4, r"source \(complex128\[\d\]\)"),
}


@pytest.mark.parametrize("make", WIDE.values(), ids=WIDE)
def test_float64_is_converted_with_one_warning_or_unchanged_if_x64_is_enabled(make, two, caplog):
    source, batch_size, says = make()
    with caplog.at_level(logging.WARNING, logger="jdist"):
        with jax.enable_x64(True):
            (leaf,) = jax.tree.leaves(_all(two.distribute_dataset(source, batch_size))[0])
        assert leaf.dtype in (np.float64, np.complex128) and caplog.messages == []
        dataset = two.distribute_dataset(source, batch_size, epochs=2)
        for _ in range(2):
            (leaf,) = jax.tree.leaves(_all(dataset)[0])
    assert leaf.dtype in (np.float32, np.complex64)
    (message,) = caplog.messages
    assert re.match(rf"{says}: JAX converts 64-bit floats to 32 bits by default\. Pass float32 arrays", message)


def test_integers_in_range_are_converted_without_a_warning(two, caplog):
    values = np.array([-(2**31), 2**31 - 1, 0, 5])
    for source in (values, Again(*values)):
        (batch,) = _all(two.distribute_dataset(source, 4))
        assert (batch.dtype, batch.ravel().tolist()) == (np.int32, values.tolist())
    assert caplog.messages == []


TOO_LARGE = [2**31, -(2**31) - 1, 2**63 - 1, np.uint64(2**32), np.uint64(2**64 - 1)]


@each_row("value", TOO_LARGE)
def test_integers_out_of_range_are_refused(value, two):
    kind = "uint32" if isinstance(value, np.uint64) else "int32"
    says = rf"source\['id'\] holds {value}, which is out of the range of {kind}\. .*jax_enable_x64"
    values = np.array([0, 1, 2, value], type(value) if kind == "uint32" else np.int64)
    with pytest.raises(ValueError, match=says):
        two.distribute_dataset({"id": values}, 2)
    for source, batch_size in ((Again(*({"id": x} for x in values)), 2), (Again({"id": values}), None)):
        with pytest.raises(ValueError, match=says):
            _all(two.distribute_dataset(source, batch_size))


def test_integers_beyond_64_bits_are_refused_by_name(two):
    with pytest.raises(ValueError, match=r"source\['id'\] is object\[2?\] in batch 1 of epoch 0"):
        _all(two.distribute_dataset(Again(*({"id": x} for x in (1, 2, 2**70, 4))), 2))


# Errors.

IN_FIRST = "( in batch 0 of epoch 0| in the first batch)"
UNSUPPORTED = "a dtype that JAX does not support"
UNSUPPORTED_DTYPES = {
    "strings": (np.array(["a", "b", "c", "d"]), "<U1"),
    "bytes": (np.array([b"ab"] * 4), r"\|S2"),
    "structured": (np.zeros(4, [("a", "i4"), ("b", "f4")]), r"\[.*'a'.*\]"),
    "dates": (np.zeros(4, "M8[s]"), r"datetime64\[s\]"),
    "durations": (np.zeros(4, "m8[s]"), r"timedelta64\[s\]"),
    "long_floats": (np.zeros(4, np.longdouble), "float128"),
}


def x(value):
    return {"x": value}


def _deleted():
    array = jnp.zeros(4)
    array.delete()
    return array


MASKED = np.ma.array([1.0, 2.0, 3.0, 4.0], mask=[0, 1, 0, 1])
LENGTHS = r"object\[\d\]{}: its rows have different lengths, or are not numbers\. Pad the rows to one length"


ARRAYS = {
    **{
        name: ({"a": (array,)}, rf"source\['a'\]\[0\] is {text}\[4\]{{}}, {UNSUPPORTED}\. Convert it to numbers")
        for name, (array, text) in UNSUPPORTED_DTYPES.items()
    },
    "lengths": (
        {"x": np.zeros((4, 2)), "y": np.zeros(3)},
        r"source\['x'\] has 4 rows but source\['y'\] has 3{}\. All arrays must have the same length: row i",
    ),
    "ragged": (x(np.array([[1], [1, 2], [3], [4]], object)), rf"source\['x'\] is {LENGTHS}"),
    "objects": ([np.array([object()] * 4)], rf"source\[0\] is {LENGTHS}"),
    "keys": (
        x(jax.random.split(jax.random.key(0), 4)),
        r"source\['x'\] is \w+{}, which is not convertible to numpy: ",
    ),
    "scalar": (
        {"x": np.zeros(4), "y": np.float32(1)},
        r"source\['y'\] is float32\[\]{}, but must be an array with one row per example",
    ),
    "python_number": (
        {"x": np.zeros(4), "y": 1},
        r"source\['y'\] is 1{}, but must be an array with one row per example",
    ),
    "ragged_list": (x([[1, 2], [3], [4], [5]]), r"source\['x'\] is object\[4\]{}: its rows have different lengths"),
    "text": ({"x": np.zeros(4), "name": "train"}, r"source\['name'\] is .*{}"),
    "no_arrays": ({"x": None, "y": []}, r"The data source contains no arrays{}\. Pass an array"),
}
NO_SOURCES = {
    **ARRAYS,
    "masked": (MASKED, r"source is a MaskedArray, which is not supported\. Fill the masked elements: `x\.filled"),
    "masked_leaf": (x(MASKED), r"source\['x'\] is .*mask"),
    "deleted": (x(_deleted()), r"source\['x'\] is ArrayImpl.*deleted"),
}


@each_row("tree, says", NO_SOURCES.values(), ids=NO_SOURCES)
def test_invalid_arrays_are_refused_by_name(tree, says, two):
    with pytest.raises(ValueError, match=says.format("")):
        _all(two.distribute_dataset(tree, 2))


@each_row("prefetch", [0, 2])
@each_row("tree, says", ARRAYS.values(), ids=ARRAYS)
def test_invalid_batches_are_refused_by_name_and_batch(tree, says, prefetch, two):
    for source in (Again(tree), lambda step: tree):
        with pytest.raises(ValueError, match=says.format(IN_FIRST)):
            _all(two.distribute_dataset(source, 4 if callable(source) else None, prefetch=prefetch))


GOOD = x(np.zeros(2, np.float32))
EXAMPLES = {
    **{
        name: ([x(value) for value in array[:2]], rf"source\['x'\] is {text}\[2?\]{{}}, {UNSUPPORTED}")
        for name, (array, text) in UNSUPPORTED_DTYPES.items()
    },
    "ragged": (
        [x(np.zeros(2, np.float32)), x(np.zeros(3, np.float32))],
        r"source\['x'\] has the shape \[3\] in example 1{}, but \[2\] in the first one\. .*pad shorter ones",
    ),
    "ragged_rank": (
        [x(np.zeros(2, np.float32)), x(np.zeros((2, 1), np.float32))],
        r"source\['x'\] has the shape \[2, 1\] in example 1{}, but \[2\] in the first one",
    ),
    "structure": (
        [GOOD, {"y": np.zeros(2, np.float32)}],
        r"Example 1 has the structure .*'y'.*{}, but the first one has .*'x'.*\. All examples must have the same structure",
    ),
    "none": ([GOOD, None], r"Example 1 has the structure .*None.*{}, but the first one"),
    "none_inside": ([GOOD, x(None)], r"Example 1 has the structure .*None.*{}, but the first one"),
    "only_none": ([None, None], r"An example of the source contains no arrays{}: None"),
    "empty": ([{}, {}], r"An example of the source contains no arrays{}: \{{\}}"),
    "objects": (
        [x(object()), x(object())],
        r"source\['x'\] is object\[2?\]{}: its rows have different lengths, or are not numbers",
    ),
    "keys": (
        [x(jax.random.key(0)), x(jax.random.key(1))],
        r"source\['x'\] is \w+{}, which is not convertible to numpy",
    ),
    "dtypes": ([x(np.int32(1)), x(np.float32(2.5))], r"source\['x'\].* float32\b.* example 1{}"),
}


@each_row("prefetch", [0, 2])
@each_row("examples, says", EXAMPLES.values(), ids=EXAMPLES)
def test_invalid_examples_are_refused_with_leaf_and_batch(examples, says, prefetch, two):
    with pytest.raises(ValueError, match=says.format(IN_FIRST)):
        _all(two.distribute_dataset(Again(*examples), 2, prefetch=prefetch))
    says = r"Example [01] is None{}" if None in examples else says
    with pytest.raises(ValueError, match=says.format(IN_FIRST)):
        _all(two.distribute_dataset(Numbered(examples), 2, prefetch=prefetch))


def test_examples_are_refused_with_the_number_of_their_batch_and_epoch(two):
    class LaterRagged:
        def __init__(self):
            self._epochs = -1

        def __iter__(self):
            self._epochs += 1
            for i in range(8):
                yield np.zeros(5 if self._epochs == 1 and i == 7 else 4)

    dataset = two.distribute_dataset(LaterRagged(), 2, epochs=3)
    given = []
    with pytest.raises(
        ValueError, match=r"source has the shape \[5\] in example 1 in batch 3 of epoch 1, but \[4\] in the first"
    ):
        given.extend(dataset)
    assert len(given) == 7  # the valid batches before it


CHANGES = {
    "dtype": (
        [x(np.zeros((2, 3), np.float32)), x(np.zeros((2, 3), np.int32))],
        r"The source yields source\['x'\] as int32\[3\] per row, expected float32\[3\]{}\. All batches must have the same",
    ),
    "width": (
        [x(np.zeros((2, 3), np.float32)), x(np.zeros((2, 3)))],
        r"The source yields source\['x'\] as float64\[3\] per row, expected float32\[3\]{}",
    ),
    "shape": (
        [{"a": (np.zeros(2), np.zeros((2, 3)))}, {"a": (np.zeros(2), np.zeros((2, 4)))}],
        r"The source yields source\['a'\]\[1\] as float64\[4\] per row, expected float64\[3\]{}",
    ),
    "rank": (
        [np.zeros((2, 3), np.float32), np.zeros((2, 3, 1), np.float32)],
        r"The source yields source as float32\[3,1\] per row, expected float32\[3\]{}",
    ),
    "more_leaves": (
        [x(np.zeros(2)), {"x": np.zeros(2), "y": np.zeros(2)}],
        r"The source yields the structure .*'y'.*, expected .*'x'.*{}",
    ),
    "container": (
        [[np.zeros(2)], (np.zeros(2),)],
        r"The source yields the structure .*\(\*,\).*, expected .*\[\*\].*{}",
    ),
}


@each_row("prefetch", [0, 2])
@each_row("batches, says", CHANGES.values(), ids=CHANGES)
def test_batches_that_change_midway_are_refused_with_leaf_and_batch(batches, says, prefetch, two):
    first, then = batches
    examples = [jax.tree.map(lambda leaf, i=i: leaf[i], batch) for batch in (first, first, then) for i in range(2)]
    for source, size in ((Again(first, first, then), None), (Again(*examples), 2), (Numbered(examples), 2)):
        given = []
        with pytest.raises(ValueError, match=says.format(" in batch 2 of epoch 0")):
            given.extend(two.distribute_dataset(source, size, prefetch=prefetch))
        assert len(given) == 2


@each_row("prefetch", [0, 2])
def test_batches_that_change_in_the_second_epoch_are_refused_there(prefetch, two):
    class Wider:
        def __init__(self):
            self._epochs = 0

        def __iter__(self):
            self._epochs += 1
            return iter([np.zeros((2, self._epochs), np.float32)])

    with pytest.raises(
        ValueError, match=r"source as float32\[2\] per row, expected float32\[1\] in batch 0 of epoch 1"
    ):
        _all(two.distribute_dataset(Wider(), None, epochs=2, prefetch=prefetch))


def test_generator_returned_by_a_function_of_the_step_is_refused_with_the_fix(two):
    dataset = two.distribute_dataset(lambda step: (np.zeros(2) for _ in range(3)), 2)
    with pytest.raises(
        ValueError,
        match=r"source is a generator in batch 0 of epoch 0, .*pass the generator function, without arguments",
    ):
        next(iter(dataset))
