"""JAX's persistent compilation cache for the attempts of a program, so that a restart does not compile again."""

import contextlib
import importlib
import pathlib
import sys
import tempfile
import zlib
from collections.abc import Iterator, Mapping

_ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"


class CompilationCache:
    """A folder for each slot, or the cache that the user has chosen.

    Each process has its own folder: JAX writes entries in place, so another process could read an incomplete one.

    Args:
        folder: The folder that contains them; None if the user has chosen the cache.
    """

    def __init__(self, folder: pathlib.Path | None):
        self._folder = folder

    def variables(self, slot: int) -> dict[str, str]:
        """Returns the environment variables of the process in a slot."""
        if self._folder is None:
            return {}
        return {
            "JAX_COMPILATION_CACHE_DIR": str(self._folder / f"slot-{slot}"),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "JDIST_COMPILATION_CACHE_DIR": str(self._folder / f"slot-{slot}"),  # all processes write their entries
        }

    def remove_incomplete_entries(self) -> None:
        """Removes entries that a process had not written completely when it was killed.

        JAX would warn about such an entry at each start, and would not replace it.
        """
        for path in self._folder.glob("*/*-cache") if self._folder is not None else ():
            data = path.read_bytes()
            try:
                _decompress(data)
            except Exception:  # an error of the decompression; each library has its own
                path.unlink()


@contextlib.contextmanager
def compilation_cache(environ: Mapping[str, str], has_restarts: bool) -> Iterator[CompilationCache]:
    """Creates a cache that exists while the block runs, unless the environment variables choose one.

    Args:
        environ: The environment variables of the launcher.
        has_restarts: Whether the processes may start again; otherwise they do not have a cache.
    """
    if environ.get("JAX_COMPILATION_CACHE_DIR") or not has_restarts:
        yield CompilationCache(None)
        return
    with tempfile.TemporaryDirectory(prefix="jdist-compiled-", ignore_cleanup_errors=True) as folder:
        yield CompilationCache(pathlib.Path(folder))


def _decompress(data: bytes) -> bytes:
    """Returns data that JAX has compressed: by zstd where it is available, and otherwise by zlib."""
    if not data.startswith(_ZSTD_MAGIC):
        return zlib.decompress(data)
    if sys.version_info >= (3, 14):
        return importlib.import_module("compression.zstd").decompress(data)
    return importlib.import_module("zstandard").ZstdDecompressor().decompress(data)
