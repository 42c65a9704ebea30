"""The states of callbacks in a checkpoint, identified by class and options."""

import logging

import pytest

from jdist import callbacks
from jdist._src.training.events import as_callbacks
from jdist._src.training.resume import restore_callback_states, saved_callback_states, stateful_callbacks

from laws import each_row


class Counter(callbacks.Callback):
    """A callback whose state is a number."""

    def __init__(self, number=0):
        self.number = number

    def get_state(self):
        return {"number": self.number}

    def set_state(self, state):
        self.number = state["number"]


class Named(Counter):
    """A callback whose `repr` contains an option and its address."""

    def __init__(self, option, number=0):
        super().__init__(number)
        self.option = option

    def __repr__(self):
        return f"<{self.option} at {hex(id(self))}>"


def restored_numbers(saved, target):
    restore_callback_states(stateful_callbacks(target), saved_callback_states(stateful_callbacks(saved)))
    return [callback.number for callback in target]


def test_states_are_restored_by_class_and_options_and_not_by_order():
    saved = [Named("a", 1), Named("b", 2), Counter(3)]
    assert restored_numbers(saved, [Counter(), Named("b"), Named("a")]) == [3, 2, 1]


def test_identity_distinguishes_callbacks_of_one_class():
    saved, target = [Counter(1), Counter(2)], [Counter(), Counter()]
    saved[0].identity = target[1].identity = "first"
    assert restored_numbers(saved, target) == [2, 1]


def test_callbacks_with_one_identity_are_restored_in_order_with_a_warning():
    with pytest.warns(UserWarning, match="2 callbacks are named Counter; their states are restored in order"):
        assert restored_numbers([Counter(1), Counter(2)], [Counter(), Counter()]) == [1, 2]


@each_row("number", [1, 3])
def test_other_number_of_callbacks_with_one_identity_raises(number):
    message = f"the states of 2 callbacks named Counter, and `callbacks` has {number} of them.*`identity`"
    with pytest.raises(ValueError, match=message):
        restored_numbers([Counter(1), Counter(2)], [Counter() for _ in range(number)])


def test_state_without_a_callback_raises_before_any_is_restored():
    target = [Counter()]
    message = r"the state of Named <a>, which is not in `callbacks`\. The callbacks with a state are: Counter"
    with pytest.raises(ValueError, match=message):
        restored_numbers([Counter(1), Named("a", 2)], target)
    assert target[0].number == 0


def test_callback_without_a_saved_state_starts_without_one_and_is_logged(caplog):
    with caplog.at_level(logging.WARNING, "jdist"):
        assert restored_numbers([Counter(1)], [Named("a"), Counter()]) == [0, 1]
    assert "The checkpoint contains no state of Named <a>: it starts without one." in caplog.messages


def double(state):
    return 2 * state.params


def test_identity_of_an_average_contains_all_options():
    identity = lambda *args, **options: stateful_callbacks([callbacks.EMA(*args, **options)])[0][0]
    assert identity(0.9999999) == "EMA(0.9999999, debias=True)"
    assert identity(0.9, debias=False, params=double) == "EMA(0.9, debias=False, params=double)"


def test_identity_of_early_stopping_does_not_contain_the_patience():
    identity = lambda **options: stateful_callbacks([callbacks.EarlyStopping("loss", **options)])[0][0]
    assert identity(patience=3, min_delta=0.1) == identity() != identity(mode="max")


def test_callbacks_that_do_not_override_get_state_are_stateless():
    assert stateful_callbacks([callbacks.TimeLimit(9), callbacks.Callback(), *as_callbacks([print])]) == []


@each_row("method", ["get_state", "set_state", "close"])
def test_object_with_methods_of_a_callback_must_be_a_subclass(method):
    class Own:
        def __call__(self, event):
            return None

    setattr(Own, method, lambda self: None)
    with pytest.raises(TypeError, match=rf"`{method}`, .* Write `class Own\(jdist\.callbacks\.Callback\)`"):
        as_callbacks([Own()])
