"""Processes that the tests of this folder share, because most of the time of such a test is the start of its processes.

A test whose functions need processes in their first state, or leave them in another state, starts its own.
"""

import pytest

import jdist


@pytest.fixture(scope="session")
def pair():
    """Returns two joined processes with two devices each."""
    with jdist.testing.processes(2, devices_per_process=2) as pair:
        yield pair


@pytest.fixture(scope="session")
def one_process():
    """Returns a single process with two devices, which has not joined others."""
    with jdist.testing.processes(1, devices_per_process=2) as one:
        yield one


@pytest.fixture(scope="session")
def four_devices():
    """Returns a single process with four devices."""
    with jdist.testing.processes(1, devices_per_process=4) as one:
        yield one
