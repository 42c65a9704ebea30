"""A stand-in for object stores: buckets are folders. Objects cannot be appended to, and there are no empty folders."""

import importlib
import pathlib

from etils.epath import backend, gpath
from fsspec.implementations.local import LocalFileSystem


class _Store(LocalFileSystem):
    root: pathlib.Path

    def __init__(self, finalize_on_close=True, **options):
        super().__init__(**options)

    @classmethod
    def _strip_protocol(cls, path):
        scheme, separator, rest = str(path).partition("://")
        return f"{cls.root}/{scheme}/{rest}".rstrip("/") if separator else super()._strip_protocol(path)

    def _open(self, path, mode="rb", **options):
        if "a" in mode:
            raise NotImplementedError("Objects cannot be appended to.")
        if "w" in mode:
            pathlib.Path(path).parent.mkdir(parents=True, exist_ok=True)
        return super()._open(path, mode, **options)

    def glob(self, path, **options):
        root = self._strip_protocol(f"{str(path).partition('://')[0]}://")
        return [found.removeprefix(f"{root}/") for found in super().glob(path, **options)]

    def mkdir(self, path, **options):
        pass

    def makedirs(self, path, exist_ok=False):
        pass


def install(patch, root):
    """Serves `gs://` and `s3://` from the folders `root/gs` and `root/s3` until `patch` is undone."""
    from orbax.checkpoint._src.path import gcs_utils
    from orbax.checkpoint._src.serialization import tensorstore_utils

    from jdist._src.checkpoint.orbax_compat import configure_orbax

    configure_orbax("s3://")  # before the patches, which end earlier
    registry = importlib.import_module("fsspec.registry")
    stores = {name: type("Store", (_Store,), {"root": root, "protocol": name}) for name in ("gcs", "s3")}
    for name, store in stores.items():
        patch.setitem(registry._registry, name, store)
    backend.fsspec_backend._get_filesystem.cache_clear()
    patch.setattr(gpath, "_is_tf_installed", lambda: False)  # TensorFlow would read `gs://`
    # tensorstore, which writes the arrays, does not use epath.
    normalize = tensorstore_utils._normalize_path
    patch.setattr(tensorstore_utils, "_normalize_path", lambda path: normalize(stores["gcs"]._strip_protocol(path)))
    patch.setattr(gcs_utils, "get_bucket", lambda name: object())
