"""Training on two processes gives the results of one process. Row KE12 of `tests/parity/rows.txt`."""

import importlib.util
import json

import numpy as np
import pytest

import jdist


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("keras") is None, reason="Keras is optional and is not installed.")
def test_ke12_keras_model_on_two_processes_is_trained_and_evaluated_as_on_one_device(monkeypatch, tmp_path):
    monkeypatch.setenv("KERAS_HOME", str(tmp_path))
    with jdist.testing.processes(2) as joined:
        results = joined.run("processes.keras_worker:results_of_training")
    for replicas, weights, loss, error, refused, unseeded in results:
        assert (
            "head/kernel` of the Keras model (call `keras.utils.set_random_seed(seed)` before it is built)" in unseeded
        )
        assert refused.startswith("In `strategy.scope()`, Keras' own `fit` trains a separate model on each process")
        assert "`jdist.Trainer(model, optimizer, loss, strategy=strategy)`" in refused
        assert replicas == 2
        assert weights == pytest.approx([0.18465, 2.0762], abs=5e-5)
        assert (loss, error) == pytest.approx((22.6667, 4.0), abs=5e-5)


@pytest.mark.slow
def test_ke12_training_on_two_processes_equals_training_on_one(four_devices, pair, tmp_path):
    function = "processes.fit_worker:results_by_optimizer"
    (one,) = four_devices.run(function, tmp_path, timeout=200)
    first, second = pair.run(function, tmp_path, timeout=200)
    for name, expected in one.items():
        assert first[name].tobytes() == second[name].tobytes(), name
        if not name.endswith("/steps"):
            np.testing.assert_allclose(first[name], expected, rtol=1e-4, atol=1e-5, err_msg=name)
    for name in ("adam", "top_k"):
        assert one[f"{name}/steps"].tolist() == [5, 16]
        assert first[f"{name}/steps"].tolist() == [8, 16]  # they agree at the end of an epoch
        rows = [json.loads(line) for line in (tmp_path / f"{name}_2.jsonl").read_text().splitlines()]
        assert rows and max(row["step"] for row in rows) == 16
        assert (tmp_path / f"{name}_2.0.html").exists() and not (tmp_path / f"{name}_2.1.html").exists()
