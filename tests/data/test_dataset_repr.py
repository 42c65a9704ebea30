"""Text and HTML representations of data sets and iterators."""

import html
import re

import numpy as np
import pytest

import jdist


def _pairs():
    return np.zeros((1800, 3), np.float32), np.arange(1800, dtype=np.int32)


def test_dataset_has_a_short_repr_of_its_source_and_options(two):
    dataset = two.distribute_dataset(_pairs(), 60, shuffle=True, seed=3, epochs=2, remainder="pad")
    assert repr(dataset) == (
        "<DistributedDataset: source: 1,800 examples, source[0] float32[3], source[1] int32[]; batch_size: 60; epochs: 2; "
        "shuffle: True, seed=3; remainder: pad; replicas: 2>"
    )


def _unread():
    yield pytest.fail("The source was read.")


SOURCES = {
    "stream": (lambda: _unread(), 4, "source: a stream of examples; batch_size: 4; epochs: 1;"),
    "batches": (lambda: _unread, None, "source: a stream of batches; batch_size: from the source; epochs: 1;"),
    "function": (
        lambda: lambda step: next(_unread()),
        4,
        "source: endless stream of batches; batch_size: 4; epochs: endless",
    ),
    "numbered": (lambda: range(1234), 4, "source: 1,234 examples; batch_size: 4;"),
    "files": (lambda: jdist.data.Files(["a", "b"], _unread), 4, "source: 2 files; batch_size: 4;"),
}


@pytest.mark.parametrize("make, batch_size, says", SOURCES.values(), ids=SOURCES)
def test_dataset_is_described_without_reading_its_source(make, batch_size, says, two):
    dataset = two.distribute_dataset(make(), batch_size)
    for shown in (repr(dataset), repr(iter(dataset))):
        assert says in shown
        assert len(shown) < 300


def test_dataset_of_many_arrays_has_a_short_repr(two):
    dataset = two.distribute_dataset({f"column_{i}": np.zeros((8, 3)) for i in range(100)}, 4)
    assert len(repr(dataset)) < 400
    assert "..." in repr(dataset)


def test_repr_of_an_iterator_has_its_position(two):
    iterator = iter(two.distribute_dataset(_pairs(), 900, epochs=2))
    assert repr(iterator).startswith(
        "<DistributedIterator: position: before batch 0 of epoch 0; received: 0 batches, 0 examples;"
    )
    for _ in range(3):
        next(iterator)
    assert "position: before batch 1 of epoch 1; received: 3 batches, 2,700 examples; source: 1,800 examples" in repr(
        iterator
    )
    iterator.close()
    assert "position: closed; received: 3 batches" in repr(iterator)


def test_dataset_and_iterator_are_tables_in_notebooks_with_the_facts_of_their_repr(two):
    dataset = two.distribute_dataset({"<b>": np.zeros((8, 3), np.float32)}, 4)
    for shown in (dataset, iter(dataset)):
        page = shown._repr_html_()
        lines = html.unescape(re.sub("<.*?>", "", page)).split("\n")
        facts = dict(re.split("  +", line.strip(), maxsplit=1) for line in lines[1:] if line)
        title = type(shown).__name__
        assert lines[0] == title and f"<{title}: {'; '.join(map(': '.join, facts.items()))}>" == repr(shown)
        assert "&lt;b&gt;" in page
        assert "<b>" not in page
