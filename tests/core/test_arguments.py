"""What arguments may be."""

import numpy as np
import pytest

from jdist._src.core.arguments import as_int


@pytest.mark.parametrize("value", [3, np.int8(3), np.uint64(3), np.array(3)], ids=repr)
def test_whole_number_is_given_as_a_python_one(value):
    found = as_int("`steps`", value, 3)
    assert type(found) is int and found == 3


@pytest.mark.parametrize("value", [3.0, "3", None, True, np.float32(3), np.array([3, 4])], ids=repr)
def test_what_is_no_whole_number_is_refused_as_of_the_wrong_type(value):
    with pytest.raises(TypeError, match="^`steps` is a whole number from 1 up, got "):
        as_int("`steps`", value, 1)
    with pytest.raises(TypeError, match="^`steps` is a whole number, got "):
        as_int("`steps`", value)


def test_whole_number_that_is_too_small_is_refused_as_a_wrong_value():
    with pytest.raises(ValueError, match=r"^`steps` is a whole number from 1 up, got 0\.$"):
        as_int("`steps`", 0, 1)
    assert as_int("`steps`", -(10**30)) == -(10**30)
