"""JAX's compilation cache between the attempts of `jdist run --max-restarts`."""

import os
import pathlib
import re
import subprocess
import sys
import zlib

import pytest

from jdist._src.launch.compilation_cache import CompilationCache, compilation_cache

ROOT = pathlib.Path(__file__).parent.parent.parent
# In the first attempt, process 0 is killed while it writes an entry: after process 1 has printed, because the launcher
# then ends process 1. In the second attempt, a warning is an error.
PROGRAM = """
import collections, os, pathlib, signal, time, warnings
import jax, jax.numpy as jnp
from jdist.cluster import resolve
events = collections.Counter()
jax.monitoring.register_event_listener(lambda name, **_: events.update([name]))
attempt = int(os.environ["JDIST_RESTARTS"])
if attempt: warnings.simplefilter("error")
resolve().initialize()
mesh = jax.make_mesh((2,), ("replica",))
split = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("replica"))
x = jax.make_array_from_callback((2,), split, lambda index: jnp.ones(2)[index])
total = jax.jit(lambda x: x.sum())(x)
local = jax.jit(lambda x: 2 * x)(jnp.float32(3))
assert (float(total), float(local)) == (2, 6)
requests, hits = (events[f"/jax/compilation_cache/{name}"] for name in ("compile_requests_use_cache", "cache_hits"))
print("attempt", attempt, "requests", requests, "hits", hits, flush=True)
if attempt == 0:
    printed = pathlib.Path("printed")
    if jax.process_index() == 0:
        while not printed.exists():
            time.sleep(0.01)
        printed.unlink()
        largest = max(pathlib.Path(os.environ["JAX_COMPILATION_CACHE_DIR"]).glob("*-cache"), key=os.path.getsize)
        os.truncate(largest, largest.stat().st_size // 2)
        os.kill(os.getpid(), signal.SIGKILL)
    printed.touch()
    signal.pause()
"""


@pytest.mark.slow
def test_restart_reads_all_programs_from_the_cache_except_for_incomplete_entries(tmp_path):
    (tmp_path / "train.py").write_text(PROGRAM)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("JAX_COMPILATION_CACHE")}
    environment |= {"PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path)}
    command = [sys.executable, "-m", "jdist_tools", "run", "-n", "2", "--max-restarts", "1"]
    command += ["--devices-per-process", "1", "train.py"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    rows = re.findall(r"\[(\d)\] attempt (\d) requests (\d+) hits (\d+)", done.stdout)
    table = {(int(process), int(attempt)): (int(requests), int(hits)) for process, attempt, requests, hits in rows}
    for process, missing in ((0, 1), (1, 0)):
        requests, hits = table[process, 0]
        assert requests > 2 and hits == 0
        assert table[process, 1] == (requests, requests - missing)
    assert list(tmp_path.iterdir()) == [tmp_path / "train.py"]  # the cache is removed


def test_cache_is_not_used_if_the_user_has_chosen_one_or_the_processes_do_not_start_again():
    for environ, has_restarts in (({"JAX_COMPILATION_CACHE_DIR": "/cache"}, True), ({}, False)):
        with compilation_cache(environ, has_restarts) as cache:
            assert cache.variables(0) == {}
            cache.remove_incomplete_entries()
    with compilation_cache({}, True) as cache:
        variables = [cache.variables(slot) for slot in range(2)]
        assert variables[0]["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] == "0"
        assert variables[0]["JAX_COMPILATION_CACHE_DIR"] != variables[1]["JAX_COMPILATION_CACHE_DIR"]


def compressed(library):
    if library == "zlib":
        return zlib.compress(os.urandom(1000))
    name = "compression.zstd" if sys.version_info >= (3, 14) else "zstandard"
    zstd = pytest.importorskip(name, reason="zstd is optional and not installed.")
    return zstd.compress(os.urandom(1000))


@pytest.mark.parametrize("library", ["zlib", "zstd"])
def test_entries_that_are_not_complete_are_removed(tmp_path, library):
    data = compressed(library)
    folder = tmp_path / "slot-0"
    folder.mkdir()
    for number in range(0, len(data), 50):
        (folder / f"jit_f-{number}-cache").write_bytes(data[:number])
    (folder / "jit_f-complete-cache").write_bytes(data)
    (folder / "other").write_bytes(b"")
    CompilationCache(tmp_path).remove_incomplete_entries()
    assert sorted(path.name for path in folder.iterdir()) == ["jit_f-complete-cache", "other"]
