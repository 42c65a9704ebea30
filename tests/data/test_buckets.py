"""Batches of varying width, padded to declared widths."""

import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jdist
from jdist._src.data import batch_sync
from jdist._src.values.base import is_distributed
from jdist.data import Buckets

from laws import each_row

WIDTHS = [3, 7, 8, 1, 5, 2]


def _batch(width, rows=4):
    tokens = np.arange(rows * width, dtype=np.int32).reshape(rows, width) + 1
    return {"tokens": tokens, "features": np.ones((rows, 6), np.float32), "label": np.arange(rows, dtype=np.int32)}


def _examples():
    for i, width in enumerate(WIDTHS * 2):
        yield {"tokens": np.arange(width, dtype=np.int32) + 1, "label": np.int32(i)}


class Indexed:
    """Examples of different widths, with an index."""

    def __len__(self):
        return len(WIDTHS) * 2

    def __getitem__(self, number):
        return list(_examples())[number]


def test_batches_are_padded_to_the_next_width(strategy):
    rows = 2 * strategy.replicas.num_parts
    buckets = Buckets((4, 8), leaves=("tokens",), fill=-1)
    source = lambda: (_batch(width, rows) for width in WIDTHS)
    dataset = strategy.distribute_dataset(source, None, buckets=buckets)
    step = strategy.step(lambda total, batch: (total + jdist.all_reduce("sum", (batch["tokens"] > 0).sum()), None))
    total = strategy.put(0)
    for width, batch in zip(WIDTHS, dataset, strict=True):
        padded = 4 if width <= 4 else 8
        tokens = np.asarray(batch["tokens"].tree).reshape(rows, padded)
        np.testing.assert_array_equal(tokens[:, :width], _batch(width, rows)["tokens"])
        assert (tokens[:, width:] == -1).all()
        assert np.asarray(batch["features"].tree).size == rows * 6
        total, _ = step(total, batch)
    assert int(total) == rows * sum(WIDTHS)
    assert step._compiled.num_signatures == 2


@pytest.mark.parametrize("source", [lambda: _examples, Indexed], ids=["stream", "indexed"])
@pytest.mark.parametrize("remainder", ["drop", "pad"])
def test_examples_of_one_batch_may_have_different_widths(source, remainder, two):
    dataset = (
        two.distribute_dataset(source(), 5, buckets=Buckets([4, 8]), remainder=remainder)
        if remainder == "pad"
        else (two.distribute_dataset(source(), 4, buckets=Buckets([4, 8])))
    )
    found, widths = [], []
    for element in dataset:
        batch, weights = element if remainder == "pad" else (element, None)
        tokens = np.asarray(batch["tokens"].tree)
        tokens = tokens.reshape(-1, tokens.shape[-1])
        chosen = slice(None) if weights is None else np.asarray(weights.tree).ravel() > 0
        found += [row[row > 0].tolist() for row in tokens[chosen]]
        widths.append(tokens.shape[-1])
    assert found == [list(range(1, width + 1)) for width in WIDTHS * 2]
    assert set(widths) <= {4, 8}


def test_position_of_batches_of_varying_width_resumes(two):
    dataset = two.distribute_dataset(lambda: map(_batch, WIDTHS), None, buckets=Buckets((4, 8)), epochs=2)
    shapes = [batch["tokens"].tree.shape for batch in dataset]
    iterator = iter(dataset)
    for taken in (1, 5, 7):
        while jdist.data.stats(iterator).batches < taken:
            next(iterator)
        resumed = iter(dataset)
        resumed.set_state(iterator.get_state())
        assert [batch["tokens"].tree.shape for batch in resumed] == shapes[taken:]


def test_buckets_pad_every_leaf_with_a_width_by_default(two):
    (batch,) = two.distribute_dataset([_batch(3)], None, buckets=Buckets((8,)))
    assert (batch["tokens"].tree.shape, batch["features"].tree.shape) == ((2, 2, 8), (2, 2, 8))
    (pair,) = two.distribute_dataset(
        [(_batch(3)["tokens"], _batch(3)["features"])], None, buckets=Buckets((8,), leaves=(0,))
    )
    assert [leaf.tree.shape for leaf in pair] == [(2, 2, 8), (2, 2, 6)]


def test_processes_agree_on_the_largest_width():
    sync = batch_sync.ProcessBatchSync.__new__(batch_sync.ProcessBatchSync)
    sync._processes, sync._num_batches = (0, 1), 0
    others = [{"counts": [(1, 4)], "width": 8, "rows": None, "epoch": 0, "offset": 0}]
    sync._exchange = types.SimpleNamespace(exchange=lambda message: [message, *others])
    assert sync.exchange({0: 4}, 4, None, 0, 0) == ([4, 4], 8)


REFUSED = {
    "too_wide": (
        Buckets((4, 6)),
        [_batch(3), _batch(7)],
        r"source\['tokens'\] is int32\[4,7\] in batch 1 of epoch 0: its dimension 1 is larger than the largest bucket of \[4, 6\]",
    ),
    "no_leaf": (
        Buckets((4,), leaves=("text",)),
        [_batch(3)],
        r"`buckets` pads no leaf of the source in batch 0.*source\['features'\]",
    ),
    "other_dimension": (
        Buckets((8,)),
        [{"x": np.zeros((4, 2, 3))}, {"x": np.zeros((4, 2, 5))}],
        r"source\['x'\] as float64\[0,5\] per row, expected float64\[0,3\]",
    ),
}


@each_row("buckets, batches, says", REFUSED.values(), ids=REFUSED)
def test_batches_that_do_not_fit_are_refused(buckets, batches, says, two):
    with pytest.raises(ValueError, match=says):
        list(two.distribute_dataset(lambda: iter(batches), None, buckets=buckets))


def test_wrong_buckets_are_refused(two):
    with pytest.raises(ValueError, match=r"`widths` must be ascending, and at least one, got \[8, 4\]"):
        Buckets((8, 4))
    with pytest.raises(ValueError, match=r"at least one, got \[\]"):
        Buckets(())
    with pytest.raises(TypeError, match="`widths` must be an integer >= 1, got 4.0"):
        Buckets((4.0,))
    with pytest.raises(
        TypeError, match=r"`leaves` must be a collection of names, got 'tokens'\. Write `\('tokens',\)`"
    ):
        Buckets((4,), leaves="tokens")
    with pytest.raises(TypeError, match=r"`buckets` must be a `jdist.data.Buckets\(\(32, 64, 128\)\)`, got \(4, 8\)"):
        two.distribute_dataset([_batch(3)], None, buckets=(4, 8))
    with pytest.raises(ValueError, match="`buckets` pads batches on the host, and cache="):
        two.distribute_dataset(np.zeros((8, 3)), 4, buckets=Buckets((4,)), cache="device")


LISTS = {
    "examples": [{"tokens": [1, 2, 3], "y": 0.5}, {"tokens": [], "y": 1.5}],
    "pairs": [([1, 2, 3], 0.5), ([], 1.5)],
    "lists": [[1, 2, 3], []],
    "arrays": [np.int32([1, 2, 3]), np.int32([])],
    "floats": [{"x": [1.0, 2.0, 3.0]}, {"x": []}],
}


@pytest.mark.parametrize("examples", LISTS.values(), ids=LISTS)
@pytest.mark.parametrize("is_stream", [False, True])
def test_list_of_numbers_in_an_example_is_one_array(is_stream, examples, two, caplog):
    source = (lambda: iter(examples)) if is_stream else examples
    (batch,) = two.distribute_dataset(source, 2, buckets=Buckets((4,), fill=-1))
    leaf = jax.tree.leaves(batch)[0]
    assert np.asarray(leaf).tolist() == [[[1, 2, 3, -1]], [[-1] * 4]]
    assert leaf.dtype == (np.float32 if isinstance(examples[0], dict) and "x" in examples[0] else np.int32)
    assert not caplog.messages  # Python floats have no width to lose


def test_list_of_numbers_without_buckets_is_a_tree_and_its_error_says_what_to_write(two):
    examples = [{"tokens": [1, 2, 3], "y": 0}, {"tokens": [4, 5], "y": 1}]
    for source in (examples, lambda: iter(examples)):
        with pytest.raises(
            ValueError, match=r"same structure\. A list is a tree.* `np\.asarray\(x\)` .*pass `buckets`"
        ):
            next(iter(two.distribute_dataset(source, 2)))
    other = Buckets((4,), leaves=("ids",))
    with pytest.raises(ValueError, match=r"A list is a tree"):
        next(iter(two.distribute_dataset(examples, 2, buckets=other)))
    for rows, batch_size in ((examples[0], 2), (lambda: iter(examples), None)):
        with pytest.raises(ValueError, match=r"source\['y'\] is 0.* must be an array with one row per example"):
            next(iter(two.distribute_dataset(rows, batch_size, buckets=Buckets((4,)))))
    with pytest.raises(ValueError, match=r"has 3 rows but .* has 2\. .*is an example, pad .*, or pass `buckets`"):
        two.distribute_dataset([np.arange(3), np.arange(2)], 2)


def test_lists_of_values_are_columns_unless_they_are_a_tree_of_arrays(two):
    table = {"x": [[0.5, 1], [2, 3], [4, 5]], "inputs": ([jnp.arange(2)] * 3, np.arange(3)), "y": [True, False, True]}
    for source, batch_size in ((table, 3), (lambda: iter([table]), None)):
        ((batch, _),) = two.distribute_dataset(source, batch_size, remainder="pad")
        shapes = jax.tree.map(lambda x: (x.tree.dtype.name, x.tree.shape[2:]), batch, is_leaf=is_distributed)
        assert shapes == {"x": ("float32", (2,)), "inputs": (("int32", (2,)), ("int32", ())), "y": ("bool", ())}
        np.testing.assert_array_equal(batch["x"].tree.reshape(4, 2)[:3], table["x"])
    views = {"views": [np.zeros((4, 2)), np.ones((4, 2))], "y": np.arange(4)}
    (batch,) = two.distribute_dataset(views, 4)
    with pytest.raises(ValueError, match=r"lists of 5 arrays with equal shapes, which is ambiguous.*np\.stack.*tuples"):
        two.distribute_dataset({"x": [np.ones(3)] * 5, "y": [np.ones((3, 2))] * 5}, 4)
    assert [view.tree.shape for view in batch["views"]] == [(2, 2, 2)] * 2


def test_list_of_arrays_of_all_examples_is_a_tree_also_with_buckets(two):
    (batch,) = two.distribute_dataset([np.arange(4), np.ones((4, 3))], 4, buckets=Buckets((5,)))
    assert [leaf.tree.shape for leaf in batch] == [(2, 2), (2, 2, 5)]


def test_spec_has_the_width_of_the_first_batch(two):
    dataset = two.distribute_dataset(lambda: map(_batch, WIDTHS), None, buckets=Buckets((4, 8), leaves=("tokens",)))
    assert [leaf.shape for leaf in jax.tree.leaves(dataset.element_spec["tokens"])] == [(2, 2, 4)]
