"""Prefetching of items, in a thread or inline."""

import threading
import time
import traceback

import hypothesis
import hypothesis.strategies as st
import pytest

from jdist._src.data.prefetch import Inline, Threaded

from input_threads import PATIENCE, input_threads, until

few = hypothesis.settings(max_examples=40, deadline=None, derandomize=True, database=None)
KINDS = {"inline": Inline, "threaded": Threaded}
every_kind = pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)


def _making(count, fails=None, log=None):
    """Returns a generator function of the numbers below `count`, which then raises `fails` if set; `log` records its calls."""
    log = [] if log is None else log

    def make(stopped):
        try:
            for number in range(count):
                log.append(number)
                yield number
            if fails is not None:
                raise fails
        finally:
            log.append("closed")

    return make


def _taken(items):
    received = []
    while True:
        try:
            received.append(items.take())
        except StopIteration:
            return received


class _MakerError(Exception):
    pass


@few
@hypothesis.given(st.sampled_from(list(KINDS)), st.integers(0, 20), st.integers(1, 25))
def test_items_are_returned_in_order(kind, count, depth):
    items = KINDS[kind](_making(count), depth)
    assert _taken(items) == list(range(count))
    assert _taken(items) == []  # and StopIteration on each further call
    items.close()


@pytest.mark.parametrize("depth", [0, 1, 2, 5])
def test_inline_makes_at_most_depth_items_ahead(depth):
    log = []
    items = Inline(_making(100, log=log), depth)
    assert log == []  # nothing before the first request
    for number in range(10):
        assert items.take() == number
        assert log == list(range(number + 1 + depth))
    items.close()


@few
@hypothesis.given(st.sampled_from(list(KINDS)), st.integers(0, 10), st.integers(1, 12))
def test_error_is_raised_once_after_the_items_before_it(kind, count, depth):
    error = _MakerError("broken")
    items = KINDS[kind](_making(count, error), depth)
    assert [items.take() for _ in range(count)] == list(range(count))
    with pytest.raises(_MakerError) as caught:
        items.take()
    assert caught.value is error
    assert traceback.extract_tb(error.__traceback__)[-1].name == "make"
    assert _taken(items) == []
    items.close()


def test_interrupt_while_items_are_made_loses_none():
    raised = []

    class Made:  # continues after an error, unlike a generator
        def __init__(self, stopped):
            self.number = -1

        def __next__(self):
            if self.number == 1 and not raised:
                raised.append(1)
                raise KeyboardInterrupt
            self.number += 1
            return self.number

    items = Inline(Made, 2)
    with pytest.raises(KeyboardInterrupt):
        items.take()
    assert [items.take() for _ in range(4)] == [0, 1, 2, 3]


@every_kind
def test_ready_after_an_item_is_made(kind):
    items = kind(_making(3), 1)
    items.take()
    until(items.ready)
    assert (items.take(), items.take()) == (1, 2)
    items.close()


def test_not_ready_while_the_thread_makes_the_first_item():
    go = threading.Event()

    def make(stopped):
        assert go.wait(PATIENCE)
        yield 0

    items = Threaded(make, 2)
    assert not items.ready()
    go.set()
    assert items.take() == 0
    items.close()


@every_kind
@pytest.mark.parametrize("depth", [1, 4])
@pytest.mark.parametrize("taken", [0, 1, 3, 10])
def test_close_at_any_time_ends_the_items_and_can_be_repeated(kind, depth, taken):
    log = []
    items = kind(_making(10, log=log), depth)
    for number in range(taken):
        assert items.take() == number
    for _ in range(3):
        items.close()
    assert input_threads() == []
    assert log[-1:] == ["closed"] or log == []  # a generator that was not started is not closed
    assert log.count("closed") <= 1
    assert not log or len(log) - 1 <= taken + depth
    assert _taken(items) == []


def test_close_while_an_item_is_made_waits_for_it_and_closes_the_generator():
    busy, go, log = threading.Event(), threading.Event(), []

    def make(stopped):
        try:
            yield 0
            busy.set()
            assert go.wait(PATIENCE)
            log.append(stopped())
            yield 1
        finally:
            log.append("closed")

    items = Threaded(make, 2)
    assert items.take() == 0
    assert busy.wait(PATIENCE)
    closing = threading.Thread(target=items.close, daemon=True)
    closing.start()
    until(lambda: items._stop.is_set())
    go.set()
    closing.join(PATIENCE)
    assert not closing.is_alive()
    assert log == [True, "closed"]  # the generator was requested to stop
    assert _taken(items) == []


def test_generator_that_polls_should_stop_ends_when_the_items_are_deleted():
    begun = threading.Event()

    def make(stopped):
        begun.set()
        while not stopped():
            time.sleep(0.001)
        yield 0

    items = Threaded(make, 1)
    assert begun.wait(PATIENCE)
    assert len(input_threads()) == 1
    del items
    until(lambda: not input_threads())


def test_two_consumer_threads_share_the_items():
    items, received = Threaded(_making(200), 3), [[], []]

    def take(own_items):
        for _ in range(100):
            own_items.append(items.take())

    takers = [threading.Thread(target=take, args=(own_items,)) for own_items in received]
    for taker in takers:
        taker.start()
    for taker in takers:
        taker.join(PATIENCE)
    assert sorted(sum(received, [])) == list(range(200))
    assert all(own_items == sorted(own_items) for own_items in received)
    items.close()
