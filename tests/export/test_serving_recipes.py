"""The scripts of docs/export.md run with the real TensorFlow and ONNX Runtime, and compute what the loaded function computes."""

import importlib.util
import os
import pathlib
import subprocess
import sys

import jax
import numpy as np
import pytest

import jdist

from test_export import MODELS

ROOT = pathlib.Path(__file__).parent.parent.parent
PAGE = (ROOT / "docs/export.md").read_text(encoding="utf-8")
NEEDS_TENSORFLOW = pytest.mark.skipif(not importlib.util.find_spec("tensorflow"), reason="TensorFlow is not installed.")
NEEDS_ONNX = pytest.mark.skipif(not importlib.util.find_spec("jax2onnx"), reason="jax2onnx is not installed.")


def script(heading):
    return PAGE.partition(f"\n## {heading}\n")[2].partition("```python\n")[2].partition("```")[0]


def run(source, folder):
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]),
    }
    command = [sys.executable, "-c", source]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-6000:]


@pytest.mark.parametrize("heading, file", [
    pytest.param("SavedModel", "line_saved_model/saved_model.pb", marks=NEEDS_TENSORFLOW),
    pytest.param("ONNX", "line.onnx", marks=NEEDS_ONNX),
])  # fmt: skip
def test_script_of_the_page_runs(heading, file, tmp_path):
    state = {"w": np.arange(8, dtype=np.float32)}
    signature = (jax.ShapeDtypeStruct((1, 8), np.float32),)
    jdist.export(tmp_path / "line", lambda state, x: {"y": x @ state["w"]}, state, signature)
    run(script(heading), tmp_path)
    assert (tmp_path / file).stat().st_size > 0


COMPARE = """
inputs, results = np.load("inputs.npz"), np.load("results.npz")
served = tf.saved_model.load("line_saved_model")
for result, leaf in zip(results.values(), jax.tree.leaves(served.serve(*inputs.values())), strict=True):
    np.testing.assert_allclose(leaf, result, rtol=2e-5, atol=2e-6)
"""


@NEEDS_TENSORFLOW
@pytest.mark.parametrize("model", ["convolutions", "transformer", "perceptron"])
def test_script_writes_a_saved_model_of_models_with_several_inputs_and_outputs(model, tmp_path):
    apply, state, inputs = MODELS[model]()
    jdist.export(tmp_path / "line", apply, state, inputs(2))
    np.savez(tmp_path / "inputs.npz", *inputs(5))
    np.savez(tmp_path / "results.npz", *jax.tree.leaves(jax.jit(apply)(state, *inputs(5))))
    source, separator, _ = script("SavedModel").replace(", signatures=serve", "").partition("\nx = ")
    assert separator
    run(source + COMPARE, tmp_path)
