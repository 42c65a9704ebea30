"""Timing of a loop over batches."""

import dataclasses
import json
import threading

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest

import jdist
from jdist.data import Stats

from laws import each_row

few = hypothesis.settings(max_examples=60, deadline=None, derandomize=True, database=None)
PATIENCE = 30  # seconds until a test fails
times = st.floats(0, 1e6)


class _Stream:
    def __init__(self, count):
        self.count = count

    def __iter__(self):
        return iter(np.arange(self.count, dtype=np.int32))


SOURCES = {"arrays": lambda count: np.arange(count, dtype=np.int32), "stream": _Stream}


@each_row("kind", SOURCES)
@each_row("prefetch", [0, 2])
@each_row("remainder, batches, examples", [("pad", 6, 40), ("drop", 6, 36)])
def test_stats_count_batches_and_examples_without_padding(kind, prefetch, remainder, batches, examples, two):
    options = dict(remainder=remainder, epochs=2, prefetch=prefetch)
    count, size = (20, 6) if remainder == "drop" else (20, 12)
    iterator = iter(two.distribute_dataset(SOURCES[kind](count), size, **options))
    counted = [jdist.data.stats(iterator).examples]
    for element in iterator:
        rows = sum(np.asarray(element[1].tree).ravel() > 0) if remainder == "pad" else size
        counted.append(counted[-1] + rows)
        assert jdist.data.stats(iterator).examples == counted[-1]
        assert jdist.data.stats(iterator).batches == len(counted) - 1
    stats = jdist.data.stats(iterator)
    assert (stats.batches, stats.examples) == (batches - 2 * (remainder == "pad"), examples)


@each_row("kind", SOURCES)
@each_row("prefetch", [0, 2])
def test_stats_of_no_batch_of_one_and_of_all(kind, prefetch, two):
    dataset = two.distribute_dataset(SOURCES[kind](16), 4, prefetch=prefetch)
    iterator = iter(dataset)
    assert jdist.data.stats(iterator) == Stats() == Stats(0, 0, 0.0, 0.0, 0.0, 0)
    next(iterator)
    first = jdist.data.stats(iterator)
    assert first.startup > 0
    assert dataclasses.replace(first, startup=0) == Stats(batches=1, examples=4, first=4)
    assert (first.stalled_fraction, first.waiting_fraction, first.examples_per_second) == (0, 0, 0)
    list(iterator)
    assert dataclasses.replace(first, startup=0) == Stats(batches=1, examples=4, first=4)  # unchanged
    assert jdist.data.stats(iter(dataset)) == Stats()  # of another iterator
    stats = jdist.data.stats(iterator)
    # Between receiving the first of 4 batches and the last one there are 3 steps: 12 examples, not 16.
    assert stats.examples_per_second * (stats.waiting + stats.working) == pytest.approx(12)
    if prefetch == 0:  # each step waits for its batch
        assert (stats.batches, stats.stalled) == (4, 3)
    elif kind == "arrays":
        assert (stats.batches, stats.stalled) == (4, 0)
    assert Stats(**json.loads(json.dumps(dataclasses.asdict(stats)))) == stats


def test_stats_do_not_count_a_failed_batch(two):
    def source(step):
        if step == 2:
            raise OSError("disk")
        return np.arange(4)

    iterator = iter(two.distribute_dataset(source, None, epochs=None))
    next(iterator), next(iterator)
    before = jdist.data.stats(iterator)
    with pytest.raises(OSError):
        next(iterator)
    assert next(iterator, None) is None
    assert jdist.data.stats(iterator) == before


class _Held:
    """A source that waits for `go` before each batch."""

    def __init__(self):
        self.asked, self.go = threading.Semaphore(0), threading.Semaphore(0)

    def __call__(self, step):
        self.asked.release()
        assert self.go.acquire(timeout=PATIENCE)
        return np.arange(4)


def test_stats_count_a_step_as_stalled_if_its_batch_was_not_ready(two):
    source = _Held()
    iterator = iter(two.distribute_dataset(source, None, epochs=None, prefetch=1))
    source.go.release()
    next(iterator)  # the first batch does not count as stalled
    for number in range(4):
        # The prefetch thread waits in the source until this loop has requested the batch.
        asked = threading.Event()
        releasing = threading.Thread(target=lambda asked=asked: (asked.wait(PATIENCE), source.go.release()))
        releasing.start()
        ready = iterator._prefetched.ready
        iterator._prefetched.ready = lambda ready=ready, asked=asked: (ready(), asked.set())[0]
        next(iterator)
        releasing.join(PATIENCE)
        iterator._prefetched.ready = ready
        stats = jdist.data.stats(iterator)
        assert (stats.batches, stats.stalled) == (number + 2, number + 1)
    assert stats.stalled_fraction == 1
    assert stats.waiting > 0
    assert 0 < stats.waiting_fraction <= 1
    for _ in range(8):
        source.go.release()
    iterator.close()


def test_stats_do_not_count_a_step_as_stalled_if_its_batch_was_prefetched(two):
    reached, given = threading.Event(), []

    def source(step):
        given.append(step)
        if step == 9:  # all batches before it are ready
            reached.set()
        return np.arange(4)

    iterator = iter(two.distribute_dataset(source, None, epochs=None, prefetch=12))
    next(iterator)
    assert reached.wait(PATIENCE)
    for _ in range(8):
        next(iterator)
    stats = jdist.data.stats(iterator)
    assert (stats.batches, stats.stalled, stats.stalled_fraction) == (9, 0, 0)
    iterator.close()


def test_stats_continue_after_set_state_and_exclude_the_time_between(two):
    iterator = iter(two.distribute_dataset(_Stream(40), 4))
    start = iterator.get_state()
    next(iterator), next(iterator)
    before = jdist.data.stats(iterator)
    iterator.set_state(start)
    assert jdist.data.stats(iterator) == before
    list(iterator)
    assert (jdist.data.stats(iterator).batches, jdist.data.stats(iterator).examples) == (12, 48)


@few
@hypothesis.given(st.integers(2, 1000), st.integers(0, 10**6), times, times, times, st.integers(0, 1000))
def test_fractions_are_between_0_and_1(batches, examples, startup, waiting, working, stalled):
    stats = Stats(batches, examples, startup, waiting, working, min(stalled, batches - 1))
    assert 0 <= stats.stalled_fraction <= 1
    assert 0 <= stats.waiting_fraction <= 1
    assert stats.examples_per_second >= 0
    assert stats.stalled_fraction == min(stalled, batches - 1) / (batches - 1)
    hypothesis.assume(waiting + working > 1e-3)
    assert stats.waiting_fraction == pytest.approx(waiting / (waiting + working))
