"""Sets a low optimization level before JAX starts; the `strategy` fixture and the default cases.

`jdist_devices` in pyproject.toml creates the eight CPU devices.
"""

import atexit
import gc
import os
import shutil
import sys
import tempfile
import warnings
import zlib

os.environ["JAX_PLATFORMS"] = "cpu"
# Compilation dominates the tests. `XLA_FLAGS= pytest` uses XLA's default level, as session `slow` does for `COMPILED`.
os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true")
# The tests and the processes that they start share one compilation cache.
if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
    os.environ["JAX_COMPILATION_CACHE_DIR"] = tempfile.mkdtemp(prefix="jdist-tests-")
    atexit.register(shutil.rmtree, os.environ["JAX_COMPILATION_CACHE_DIR"], ignore_errors=True)
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"

import pytest

from laws import STRATEGIES, each_value

# `mirrored_1` is as `one_device`, and `mirrored_2` and `mirrored_8` as `mirrored_3`: the concrete cases, and some laws, use them.
TABLE = ["one_device", "mirrored_3", "sharded_4", "central_2"]


@pytest.fixture(params=TABLE)
def strategy(request):
    """Returns each strategy of the table in turn."""
    return STRATEGIES[request.param]()


@pytest.fixture
def two():
    """Two replicas, for the concrete cases."""
    return STRATEGIES["mirrored_2"]()


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


def pytest_addoption(parser):
    parser.addoption("--first-case", action="store_true", help="run the first case of each parametrized test only")
    parser.addoption(
        "--all-cases", nargs="+", default=[], help="the files and folders of which `--first-case` runs all cases"
    )


@pytest.hookimpl(tryfirst=True)  # before `-m` chooses
def pytest_collection_modifyitems(config, items):
    """Marks as slow the cases left out by `one_in`, and cases with strategies that add no code path.

    By default a test runs on one of the strategies, which its name selects. In the slow tests, each strategy and each other
    parameter is tested, but not each of their pairs: the rest of the pairs is left out.
    """
    pairs, cases, ratios, only_slow = {}, {}, {}, {}
    for item in items:
        if not hasattr(item, "callspec"):
            continue
        test, is_slow = item.nodeid.partition("[")[0], item.get_closest_marker("slow") is not None
        if one_in := item.get_closest_marker("one_in"):
            ratios[test] = one_in.args[0]
        if "strategy" in item.callspec.params:
            values = item.callspec.id.split("-")
            name = next((value for value in values if value in STRATEGIES), "")
            pair = name, "-".join(value for value in values if value != name)
            (only_slow if is_slow else pairs).setdefault(test, {})[pair] = item
        elif one_in and not is_slow:
            cases.setdefault(test, []).append(item)
    slow = [item for test, items_of in cases.items() for number, item in enumerate(items_of) if number % ratios[test]]
    left_out = set()
    for test, pairs_of in {**only_slow, **pairs}.items():  # where some cases are slow, all of these run
        chosen = each_value(list(pairs_of))
        names = list(dict.fromkeys(name for name, _ in chosen))
        # "" is a strategy of the test itself.
        in_turn = names if "" in names else [names[zlib.crc32(test.encode()) % len(names)]]
        if test in ratios or test not in pairs:
            default = chosen[:: ratios.get(test, 1)]
        else:
            default = each_value([pair for pair in pairs_of if pair[0] in in_turn])
        slow += [pairs_of[pair] for pair in chosen if pair not in default]
        left_out.update(item for pair, item in pairs_of.items() if pair not in {*chosen, *default})
    for item in slow:
        item.add_marker(pytest.mark.slow)
    if config.getoption("--first-case"):
        first_cases, all_cases = {}, tuple(config.getoption("--all-cases"))
        for item in items:
            if not item.get_closest_marker("slow"):
                name = item.nodeid if item.nodeid.startswith(all_cases) else item.nodeid.partition("[")[0]
                first_cases.setdefault(name, item)
        left_out |= set(items) - set(first_cases.values())
    config.hook.pytest_deselected(items=list(left_out))
    items[:] = [item for item in items if item not in left_out]


def pytest_collection_finish():
    """Excludes modules and tests from garbage collection: `gc.collect` in a test took more than a second.

    Tracing creates many objects: at Python's default threshold, garbage collection took 3 to 6 % of the time of the tests.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(100_000, 50, 50)
