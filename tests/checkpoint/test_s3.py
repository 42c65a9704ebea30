"""Checkpoints in a server of the S3 protocol: moto, which is optional. The other tests of URLs use a stand-in."""

import logging

import numpy as np
import pytest

import jdist
from jdist._src.checkpoint import orbax_compat
from jdist._src.checkpoint.orbax_compat import s3_store


def test_specification_for_tensorstore_has_the_endpoint_and_the_region_of_the_environment(monkeypatch):
    for name in ("AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "AWS_REGION", "AWS_DEFAULT_REGION"):
        monkeypatch.delenv(name, raising=False)
    folder = {"driver": "s3", "bucket": "bucket", "path": "run/1/arrays"}
    assert s3_store("s3://bucket/run/1/arrays") == folder
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9000")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "eu-central-1")
    options = {"endpoint": "http://127.0.0.1:9000", "aws_region": "eu-central-1"}
    assert s3_store("s3://bucket/run/1/arrays") == {**folder, **options}


def test_other_orbax_writes_to_folders_and_refuses_s3_with_the_version_to_install(monkeypatch, tmp_path, two):
    from orbax.checkpoint._src.path import gcs_utils

    monkeypatch.setattr(orbax_compat, "_add_s3", orbax_compat._add_s3.__wrapped__)  # it may have been called
    monkeypatch.delattr(gcs_utils, "get_kvstore_for_gcs", raising=False)
    message = (
        r'Checkpoints at s3:// need orbax-checkpoint 0.12.8, and [\d.]+ is installed: `python -m pip install "orbax-'
    )
    with pytest.raises(ImportError, match=message):
        orbax_compat.configure_orbax("s3://bucket/run")
    with jdist.Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, states(two, 1), now=True)
        assert checkpointer.restore(two).step == 1


@pytest.fixture
def bucket(monkeypatch):
    """Serves a bucket on loopback; returns its URL."""
    moto = pytest.importorskip("moto.server", reason="moto is optional and not installed.")
    boto3 = pytest.importorskip("boto3")
    fsspec_backend = pytest.importorskip("etils.epath.backend").fsspec_backend
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = moto.ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://{host}:{port}")
    _forget_connections(fsspec_backend)
    boto3.client("s3").create_bucket(Bucket="bucket")
    yield "s3://bucket"
    server.stop()
    _forget_connections(fsspec_backend)


def _forget_connections(fsspec_backend):
    import s3fs

    fsspec_backend._get_filesystem.cache_clear()
    s3fs.S3FileSystem.clear_instance_cache()


def states(strategy, step):
    return strategy.put({"w": np.arange(64, dtype=np.float32) + step, "count": np.int32(step)})


def test_checkpoints_are_written_read_replaced_and_deleted(bucket, two):
    from etils import epath

    url = f"{bucket}/run"
    with jdist.Checkpointer(url, keep=2) as checkpointer:
        for step in range(4):
            checkpointer.save(step, states(two, step))
        checkpointer.wait()
        assert checkpointer.steps() == (2, 3)
        np.testing.assert_array_equal(checkpointer.restore(two).state["w"], np.arange(64) + 3)
    assert {child.name for child in epath.Path(url).iterdir()} == {"2", "3", "jdist.json"}
    (epath.Path(url) / "3/commit_success.txt").unlink()  # as when the process ends before
    with jdist.Checkpointer(url) as checkpointer:
        with pytest.warns(UserWarning, match="s3://bucket/run/3 is damaged: commit_success.txt is missing"):
            assert checkpointer.restore(two).step == 2
        checkpointer.save(3, states(two, 30))
        checkpointer.wait()
        assert int(checkpointer.restore(two).state["count"]) == 30


def test_store_that_does_not_answer_is_a_checkpoint_error(bucket, monkeypatch):
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    with pytest.raises(
        jdist.CheckpointError, match=r"written to s3://bucket/other: .*Check the credentials, the region and"
    ):
        jdist.Checkpointer(f"{bucket}/other")
