"""Strategies shared by the tests of data, and the check that none leaves a thread."""

import pytest

from input_threads import until_no_thread_is_left
from laws import STRATEGIES


@pytest.fixture(autouse=True)
def no_thread_is_left():
    until_no_thread_is_left()  # of tests of other folders
    yield
    until_no_thread_is_left()


@pytest.fixture(scope="session")
def one():
    """Returns a strategy with one replica."""
    return STRATEGIES["one_device"]()


@pytest.fixture(scope="session")
def two():
    """Returns a strategy with two replicas."""
    return STRATEGIES["mirrored_2"]()
