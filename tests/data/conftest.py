"""Strategies for the concrete cases, made once."""

import pytest

from laws import STRATEGIES


@pytest.fixture(scope="session")
def one():
    """A single replica."""
    return STRATEGIES["one_device"]()


@pytest.fixture(scope="session")
def two():
    """Two replicas."""
    return STRATEGIES["mirrored_2"]()
