"""Eight CPU devices and a quick compiler for every test, set before jax starts; and the `strategy` fixture."""

import atexit
import os
import shutil
import tempfile

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["JAX_NUM_CPU_DEVICES"] = "8"
# Most of the time of a test is XLA's. `XLA_FLAGS= pytest` compiles as a user does; the session `slow` does so where it matters.
os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true")
# What is compiled is kept for all tests of the session, and for the processes that they start.
if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
    os.environ["JAX_COMPILATION_CACHE_DIR"] = tempfile.mkdtemp(prefix="jdist-tests-")
    atexit.register(shutil.rmtree, os.environ["JAX_COMPILATION_CACHE_DIR"], ignore_errors=True)
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"

import pytest

from laws import STRATEGIES, among, each_value

TABLE = [name for name in STRATEGIES if name != "mirrored_1"]  # which is as `one_device`, elsewhere


@pytest.fixture(params=among(TABLE, "one_device", "mirrored_3", "sharded_4", "central_2"))
def strategy(request):
    """Each strategy of the table in turn."""
    return STRATEGIES[request.param]()


@pytest.fixture
def two():
    """Two replicas, for the concrete cases."""
    return STRATEGIES["mirrored_2"]()


@pytest.hookimpl(tryfirst=True)  # before `-m` chooses
def pytest_collection_modifyitems(items):
    """Leaves of the pairs of a strategy and other parameters so many that each of both occurs; others are slow."""
    tests = {}
    for item in items:
        if "strategy" in item.fixturenames and hasattr(item, "callspec") and not item.get_closest_marker("slow"):
            strategy = item.callspec.params.get("strategy", "")
            others = item.callspec.id.replace(str(strategy), "", 1)
            tests.setdefault(item.nodeid.partition("[")[0], {})[strategy, others] = item
    for pairs in tests.values():
        for pair in pairs.keys() - each_value(list(pairs)):
            pairs[pair].add_marker(pytest.mark.slow)
