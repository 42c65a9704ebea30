"""Eight CPU devices for every test, set before jax starts; and the strategies that laws are held under."""

import os

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["JAX_NUM_CPU_DEVICES"] = "8"

import pytest

from laws import STRATEGIES, among

TABLE = [name for name in STRATEGIES if name != "mirrored_1"]  # which is as `one_device`, elsewhere


@pytest.fixture(params=among(TABLE, "one_device", "mirrored_2", "mirrored_3", "sharded_4", "central_2"))
def strategy(request):
    """Each strategy of the table in turn."""
    return STRATEGIES[request.param]()


@pytest.fixture
def two():
    """Two replicas, for the concrete cases."""
    return STRATEGIES["mirrored_2"]()
