"""The memory of callbacks, found again by class and options."""

import logging

import pytest

from jdist import callbacks
from jdist._src.training.callback_state import memories_of, restore_memories, saved_memories


class Counts:
    """Remembers a number."""

    def __init__(self, number=0):
        self.number = number

    def __call__(self, event):
        return None

    def get_state(self):
        return {"number": self.number}

    def set_state(self, tree):
        self.number = tree["number"]


class Named(Counts):
    """Says its option, and where it is in memory."""

    def __init__(self, option, number=0):
        super().__init__(number)
        self.option = option

    def __repr__(self):
        return f"<{self.option} at {hex(id(self))}>"


def restored(saved, into):
    restore_memories(memories_of(into), saved_memories(memories_of(saved)))
    return [callback.number for callback in into]


def test_memories_follow_class_and_options_and_not_the_order():
    saved = [Named("a", 1), Named("b", 2), Counts(3)]
    assert restored(saved, [Counts(), Named("b"), Named("a")]) == [3, 2, 1]


def test_identity_of_their_own_tells_callbacks_of_one_class_apart():
    saved, into = [Counts(1), Counts(2)], [Counts(), Counts()]
    saved[0].identity = into[1].identity = "first"
    assert restored(saved, into) == [2, 1]


def test_callbacks_that_nothing_tells_apart_keep_their_order_and_it_is_said():
    with pytest.warns(
        UserWarning, match="2 callbacks are Counts, and get their memories from the checkpoint by their order"
    ):
        assert restored([Counts(1), Counts(2)], [Counts(), Counts()]) == [1, 2]


@pytest.mark.parametrize("number", [1, 3])
def test_more_or_fewer_callbacks_that_nothing_tells_apart_are_refused(number):
    with pytest.raises(
        ValueError, match=f"the memory of 2 callbacks Counts, and `callbacks` has {number} of them.*`identity`"
    ):
        restored([Counts(1), Counts(2)], [Counts() for _ in range(number)])


def test_memory_without_a_callback_is_refused_before_any_is_given():
    into = [Counts()]
    with pytest.raises(
        ValueError, match=r"the memory of Named <a>, and `callbacks` has no such callback\. These have one: Counts"
    ):
        restored([Counts(1), Named("a", 2)], into)
    assert into[0].number == 0


def test_callback_without_a_memory_begins_anew_and_it_is_said(caplog):
    with caplog.at_level(logging.WARNING, "jdist"):
        assert restored([Counts(1)], [Named("a"), Counts()]) == [0, 1]
    assert "The checkpoint has no memory of Named <a>: it begins anew." in caplog.messages


def test_average_of_a_function_of_the_state_has_its_name():
    of = lambda *args, **options: memories_of([callbacks.EMA(*args, **options)])[0].identity
    assert of(0.9999999) == "EMA(0.9999999, debias=True)"
    assert of(0.9, debias=False, params=restored) == "EMA(0.9, debias=False, params=restored)"


def test_best_value_does_not_depend_on_the_patience():
    of = lambda **options: memories_of([callbacks.EarlyStopping("loss", **options)])[0].identity
    assert of(patience=3, min_delta=0.1) == of() != of(mode="max")
