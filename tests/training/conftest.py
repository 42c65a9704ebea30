"""Keras, for the tests of training."""

import sys
import warnings

import pytest


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
