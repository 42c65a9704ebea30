"""Strategies shared by the tests of data."""

import pytest

from laws import STRATEGIES


@pytest.fixture(scope="session")
def one():
    """Returns a strategy with one replica."""
    return STRATEGIES["one_device"]()


@pytest.fixture(scope="session")
def two():
    """Returns a strategy with two replicas."""
    return STRATEGIES["mirrored_2"]()
