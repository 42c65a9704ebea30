"""Local paths and URLs."""

import importlib.util
import pathlib
import sys

import numpy as np
import pytest

import jdist
from jdist._src.core import paths


def test_local_paths_are_unchanged(tmp_path):
    assert paths.as_path(str(tmp_path)) == tmp_path and isinstance(paths.as_path(tmp_path), pathlib.Path)
    assert not paths.is_url(tmp_path) and paths.absolute(paths.as_path("a")) == pathlib.Path.cwd() / "a"


def test_urls_keep_their_text(store):
    path = paths.as_path("gs://bucket/run")
    assert str(path / "a") == "gs://bucket/run/a" and paths.is_url(path / "a")
    assert str(paths.absolute(path)) == "gs://bucket/run" and paths.as_path(path) == path


def test_text_is_appended(store, tmp_path):
    for path in (tmp_path / "log", paths.as_path("s3://bucket/log")):
        paths.append_text(path, "a\n")
        paths.append_text(path, "b\n")
        assert path.read_text() == "a\nb\n"
        paths.remove_tree(path.parent)
        paths.remove_tree(path.parent)
        assert not path.exists()


def test_unknown_urls_are_refused():
    with pytest.raises(
        ValueError, match="'ftp://host/x' is a URL of an unknown kind. jdist reads and writes local paths, gs:"
    ):
        paths.as_path("ftp://host/x")


def test_url_that_pathlib_changed_is_refused():
    with pytest.raises(
        ValueError, match="'gs:/bucket/run' is a URL that `pathlib.Path` has changed. Pass the URL as a string"
    ):
        jdist.weights.save(pathlib.Path("gs://bucket/run"), {"w": np.zeros(1)})


@pytest.mark.parametrize("scheme, module, extra", [("gs", "gcsfs", "gcs"), ("s3", "s3fs", "s3")])
def test_missing_package_is_an_error_with_the_command_to_install_it(scheme, module, extra, monkeypatch):
    if scheme == "gs" and importlib.util.find_spec("tensorflow") is not None:
        pytest.skip("TensorFlow, which reads this URL, is installed.")
    registry = importlib.import_module("fsspec.registry")
    monkeypatch.delitem(registry._registry, {"gs": "gcs"}.get(scheme, scheme), raising=False)
    monkeypatch.setitem(sys.modules, module, None)
    message = rf"'{scheme}://bucket/run' need a package, .*: `python -m pip install \"jdist\[{extra}\]\"`"
    with pytest.raises(ImportError, match=message):
        jdist.Checkpointer(f"{scheme}://bucket/run")
