"""Eight CPU devices for every test, set before jax starts; and the strategies that laws are held under."""

import os

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["JAX_NUM_CPU_DEVICES"] = "8"

import pytest

from laws import STRATEGIES


@pytest.fixture(params=[name for name in STRATEGIES if name != "mirrored_1"])  # which is as `one_device`, elsewhere
def strategy(request):
    """Each strategy of the table in turn."""
    return STRATEGIES[request.param]()


@pytest.fixture
def two():
    """Two replicas, for the concrete cases."""
    return STRATEGIES["mirrored_2"]()
