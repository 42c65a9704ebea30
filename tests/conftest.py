"""Sets a low optimization level before JAX starts; the fixtures that all tests share.

`jdist_devices` in pyproject.toml creates the eight CPU devices.
"""

import atexit
import gc
import os
import shutil
import sys
import tempfile
import warnings

os.environ["JAX_PLATFORMS"] = "cpu"
# Compilation dominates the tests. `XLA_FLAGS= pytest` uses XLA's default level, as session `slow` does for some.
os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true")
# The tests and the processes that they start share one compilation cache.
if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
    os.environ["JAX_COMPILATION_CACHE_DIR"] = tempfile.mkdtemp(prefix="jdist-tests-")
    atexit.register(shutil.rmtree, os.environ["JAX_COMPILATION_CACHE_DIR"], ignore_errors=True)
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"

import pytest

from laws import BACKENDS, STRATEGIES


@pytest.fixture(params=BACKENDS)
def strategy(request):
    """Returns one strategy per backend."""
    return STRATEGIES[request.param]()


@pytest.fixture
def two():
    """Two replicas, for the concrete cases."""
    return STRATEGIES["mirrored_2"]()


@pytest.fixture
def frozen_heap():
    """Excludes everything that exists before the test from the collections in it, which would take more than a second each.

    Garbage first: it would never be freed, and an iterator in it would keep its thread until the process ends.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def keras(tmp_path_factory):
    """Returns Keras with JAX as its backend. The environment variables are restored."""
    if "keras" not in sys.modules:
        with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            patch.setenv("KERAS_BACKEND", "jax")
            patch.setenv("KERAS_HOME", str(tmp_path_factory.mktemp("keras")))
            pytest.importorskip("keras", reason="Keras is optional and not installed.")
    module = sys.modules["keras"]
    if module.backend.backend() != "jax":
        pytest.skip("Keras was imported with another backend than JAX.")
    return module


@pytest.fixture
def store(monkeypatch, tmp_path_factory):
    """Serves `gs://` and `s3://` from folders; returns the folder that contains them."""
    import object_store

    pytest.importorskip("orbax.checkpoint", minversion="0.12.8")  # `s3://` needs it; Python 3.11 has the oldest orbax
    root = tmp_path_factory.mktemp("store")
    object_store.install(monkeypatch, root)
    return root


def pytest_collection_finish():
    """Excludes modules and tests from garbage collection: `gc.collect` in a test took more than a second.

    Tracing creates many objects: at Python's default threshold, garbage collection took 3 to 6 % of the time of the tests.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(100_000, 50, 50)
