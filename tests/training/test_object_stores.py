"""Checkpoints, logs and reports at URLs, with a local stand-in of the object store."""

import json

import numpy as np
import optax
import pytest

import jdist
from jdist import callbacks

from small_fits import assert_bitwise_equal

X = np.random.default_rng(0).normal(size=(80, 4)).astype(np.float32)
DATA = (X, X @ np.float32([1, -2, 3, 0.5]))


@pytest.fixture(params=["gs", "s3"])
def url(request, store):
    return f"{request.param}://bucket/run"


@pytest.fixture
def trainer(two):
    model = (lambda key, x: np.zeros(4, np.float32), lambda w, x: x @ w)
    return jdist.Trainer(model, optax.adam(0.1), optax.squared_error, strategy=two)


def fit(trainer, url=None, **options):
    options = {"batch_size": 10, "epochs": 2, "progress": "off", **options}
    if url is None:
        return trainer.fit(DATA, **options)
    with jdist.Checkpointer(url, every=3, keep=2) as checkpointer:
        return trainer.fit(DATA, callbacks=[callbacks.Checkpoint(checkpointer)], resume=checkpointer, **options)


@pytest.mark.slow
def test_training_is_saved_and_resumed(trainer, store, url):
    fit(trainer, url, steps=7)
    checkpointer = jdist.Checkpointer(url)
    assert (checkpointer.steps(), str(checkpointer.folder)) == ((6, 7), url)
    assert_bitwise_equal(fit(trainer, url).state, fit(trainer).state)
    assert_bitwise_equal(trainer.fit(DATA, batch_size=10, epochs=3, resume=url, progress="off").state,
                         fit(trainer, epochs=3).state)  # fmt: skip
    folder = store / url.replace("://", "/")
    assert {child.name for child in folder.iterdir()} == {"15", "16", "jdist.json"}


def test_incomplete_step_is_not_restored_and_is_replaced(trainer, store, url):
    fit(trainer, url, steps=7)
    folder = store / url.replace("://", "/")
    (folder / "7/commit_success.txt").unlink()  # as when the process ends before
    with jdist.Checkpointer(url) as checkpointer:
        assert checkpointer.latest == 6
        message = f"{url}/7 is damaged: commit_success.txt is missing.* A `save` of the same step deletes it"
        with pytest.warns(UserWarning, match=message):
            state = checkpointer.restore(trainer.strategy).state
        assert checkpointer.save(7, state)
        checkpointer.wait()
        assert checkpointer.steps() == (6, 7)
    assert {child.name for child in folder.iterdir()} == {"6", "7", "jdist.json"}
    for step in (6, 7):
        (folder / f"{step}/commit_success.txt").unlink()
    with pytest.raises(FileNotFoundError, match=f"no complete checkpoint.*{url}/7 does not contain commit_success.txt"):
        jdist.Checkpointer(url).restore(trainer.strategy)


def test_best_checkpoint_is_kept(url, two):
    with jdist.Checkpointer(url, keep=1, keep_best=("loss", "min")) as checkpointer:
        for step, loss in enumerate([2.0, 1.0, 3.0, 4.0]):
            checkpointer.save(step, two.put({"w": np.float32(step)}), metrics={"loss": loss})
        checkpointer.wait()
        assert (checkpointer.steps(), checkpointer.best) == ((1, 3), 1)


def test_other_files_and_unsupported_urls_are_refused(store):
    (store / "gs/bucket/papers").mkdir(parents=True)
    (store / "gs/bucket/papers/thesis.tex").write_text("all of it")
    for url, message in {
        "gs://bucket/papers": r"gs://bucket/papers contains other files \(thesis\.tex\)",
        "hf://bucket/run": "`path` is the URL 'hf://bucket/run', and the arrays of .* to gs:// and s3:// only. Mount",
    }.items():
        with pytest.raises(ValueError, match=message):
            jdist.Checkpointer(url)


@pytest.mark.parametrize("scheme", ["gs", "s3"])
def test_logs_are_written_and_resumed(trainer, store, scheme):
    url = f"{scheme}://bucket/logs/log"
    logs = [callbacks.CSVLog(f"{url}.csv", every=3), callbacks.JSONLog(f"{url}.jsonl")]
    first = fit(trainer, epochs=1, callbacks=logs)
    fit(trainer, state=first.state, epochs=1, callbacks=logs)
    assert [json.loads(line)["step"] for line in logs[1].path.read_text().splitlines()] == [8, 16]
    lines = (store / scheme / "bucket/logs/log.csv").read_text().splitlines()
    assert [line.split(",")[2] for line in lines[1:]] == ["3", "6", "8", "9", "12", "15", "16"]
    fit(trainer, epochs=1, callbacks=logs)  # from the beginning: the old log is renamed
    assert {child.name for child in (store / scheme / "bucket/logs").iterdir()} >= {"log.csv", "log.csv.1"}
    with pytest.raises(ValueError, match=f"write to '{scheme}://bucket/logs/log.csv'"):
        fit(trainer, callbacks=[logs[0], callbacks.CSVLog(f"{url}.csv")])


def test_report_is_written(trainer, store):
    fit(trainer, epochs=1).report("s3://bucket/run.html")
    assert "All requested steps were taken." in (store / "s3/bucket/run.html").read_text()


def test_functions_and_profiles_are_written_to_local_paths_only(store):
    local_only = "`directory` must be a path of a local file system, got the URL 'gs://bucket/trace'"
    with pytest.raises(ValueError, match=local_only):
        callbacks.Profile("gs://bucket/trace", start=2, stop=3)
    local_only = "The folder gs://bucket/f cannot be written to a URL. Write it to a local path"
    with pytest.raises(ValueError, match=local_only):
        jdist.export("gs://bucket/f", lambda w, x: x @ w, np.zeros(4, np.float32), (X[:1],))
