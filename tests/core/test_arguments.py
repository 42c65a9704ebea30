"""Checks of integer arguments."""

import numpy as np
import pytest

from jdist._src.core.arguments import as_int

from laws import each_row


@pytest.mark.parametrize("value", [3, np.int8(3), np.uint64(3), np.array(3)], ids=repr)
def test_integer_of_any_type_becomes_a_python_int(value):
    number = as_int("`steps`", value, 3)
    assert type(number) is int and number == 3


@each_row("value", [3.0, "3", None, True, np.float32(3), np.array([3, 4])])
def test_value_that_is_not_an_integer_is_a_type_error(value):
    with pytest.raises(TypeError, match="^`steps` must be an integer >= 1, got "):
        as_int("`steps`", value, 1)
    with pytest.raises(TypeError, match="^`steps` must be an integer, got "):
        as_int("`steps`", value)


def test_integer_below_the_minimum_is_a_value_error():
    with pytest.raises(ValueError, match=r"^`steps` must be an integer >= 1, got 0\.$"):
        as_int("`steps`", 0, 1)
    assert as_int("`steps`", -(10**30)) == -(10**30)
