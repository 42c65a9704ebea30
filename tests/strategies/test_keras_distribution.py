"""Keras' own `compile` and `fit` within `strategy.scope()` use the devices of the strategy, or warn."""

import os
import pathlib
import subprocess
import sys
import textwrap
import warnings

import numpy as np
import optax
import pytest

import jdist
from jdist._src.core import jax_compat
from jdist._src.strategies import keras_distribution as module

INPUTS = np.random.default_rng(0).normal(size=(40, 8)).astype(np.float32)
TARGETS = np.random.default_rng(1).integers(0, 3, 40)


@pytest.fixture(autouse=True)
def short_loops_do_not_block(monkeypatch):
    monkeypatch.setattr(jax_compat, "KERAS_ABORTS_ON_CPU", False)


@pytest.fixture
def four():
    return jdist.MirroredStrategy([f"cpu:{i}" for i in range(4)])


def compiled(keras):
    keras.utils.set_random_seed(0)
    model = keras.Sequential(
        [
            keras.Input((8,)),
            keras.layers.Dense(16, "relu"),
            keras.layers.BatchNormalization(),
            keras.layers.Dense(3),
        ]
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(0.01), loss, metrics=["accuracy"])
    return model


def trained(keras):
    """Returns the history, the predictions and the model after `fit`."""
    model = compiled(keras)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Explicitly requested dtype int64")  # of Keras
        data = INPUTS, TARGETS
        fit = model.fit(*data, batch_size=16, validation_data=data, validation_batch_size=16, shuffle=False, verbose=0)
        return fit.history, model.predict(INPUTS, batch_size=16, verbose=0), model


@pytest.mark.slow
def test_fit_in_the_scope_uses_the_devices_and_equals_one_device(four, keras):
    history, predictions, _ = trained(keras)
    with four.scope():
        on_four = trained(keras)
    for name, values in history.items():
        np.testing.assert_allclose(on_four[0][name], values, rtol=1e-4)
    np.testing.assert_allclose(on_four[1], predictions, rtol=1e-3, atol=1e-5)
    assert all(v.value.sharding.device_set == set(four.devices) for v in on_four[2].trainable_variables)
    assert keras.distribution.distribution() is None


def test_set_strategy_distributes_keras_until_it_is_unset(four, keras):
    jdist.set_strategy(four)
    try:
        assert keras.distribution.distribution().device_mesh.devices.size == 4
    finally:
        jdist.set_strategy(None)
    assert keras.distribution.distribution() is None


def test_distribution_of_the_user_is_not_replaced_and_nested_scopes_share_one(four, two, keras):
    mine = keras.distribution.DataParallel(devices=["cpu:0"])
    keras.distribution.set_distribution(mine)
    try:
        with four.scope():
            assert keras.distribution.distribution() is mine
        assert keras.distribution.distribution() is mine
    finally:
        keras.distribution.set_distribution(None)
    with two.scope():
        outer = keras.distribution.distribution()
        with two.scope():
            assert keras.distribution.distribution() is outer
        assert keras.distribution.distribution() is outer


def test_distribution_is_restored_after_an_error(four, keras):
    with pytest.raises(KeyError, match="of the user"), four.scope():
        compiled(keras)
        raise KeyError("of the user")
    assert keras.distribution.distribution() is None


def test_batch_that_cannot_be_split_is_computed_on_each_device_with_a_warning(keras):
    message = (
        r"A batch of 16 examples cannot be split over 3 devices.*a multiple of 3 as `batch_size`.*`jdist\.Trainer\("
    )
    with jdist.MirroredStrategy(["cpu:0", "cpu:1", "cpu:2"]).scope():
        with pytest.warns(UserWarning, match=message) as caught:
            layout = keras.distribution.distribution().get_data_layout((16, 2))
        assert [w.filename for w in caught] == [__file__]
        assert tuple(layout.axes) == (None, None)
        assert tuple(keras.distribution.distribution().get_data_layout((4, 2)).axes) == (
            None,
            None,
        )  # no second warning
        assert tuple(keras.distribution.distribution().get_data_layout((6, 2)).axes) == ("batch", None)


def test_last_batch_that_cannot_be_split_is_an_error_with_the_fix(four, keras):
    message = r"over the 4 devices .*`x\[:len\(x\) // 4 \* 4\]`\. .*`jdist\.Trainer\(.*It pads the last batch"
    with pytest.raises(ValueError, match=message), four.scope():
        compiled(keras).predict(INPUTS[:18], batch_size=16, verbose=0)
    assert keras.distribution.distribution() is None


def test_model_that_was_built_outside_the_scope_is_an_error_with_a_note(four, keras):
    model = compiled(keras)
    with warnings.catch_warnings(), pytest.raises(ValueError, match="incompatible devices") as caught, four.scope():
        warnings.simplefilter("ignore")  # of Keras
        model.fit(INPUTS, TARGETS, batch_size=16, verbose=0)
    assert "Build and compile it inside the scope." in "".join(caught.value.__notes__)


def test_error_of_the_user_is_not_changed(four, keras):
    with pytest.raises(ValueError, match=r"^of the user"), four.scope():
        raise ValueError("of the user")


def test_model_that_is_compiled_in_the_scope_and_trained_outside_warns(four, keras):
    with (
        pytest.warns(UserWarning, match=r"compiled inside .* not trained in it.*move the calls of `fit`"),
        four.scope(),
    ):
        compiled(keras)


def test_trainer_with_a_model_of_the_scope_does_not_warn(four, keras):
    losses = []
    for scope in (four.scope(), pytest.MonkeyPatch.context()):
        keras.utils.set_random_seed(0)
        with scope:
            model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(3)])
            loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
            trainer = jdist.Trainer(model, optax.sgd(0.1), loss, strategy=four)
            fit = trainer.fit((INPUTS, TARGETS), batch_size=8, epochs=1)
        losses.append(list(fit.history["loss"]))
    assert losses[0] == losses[1]


def test_ps23_fit_under_parameter_servers_is_an_error_that_names_the_trainer(keras):
    strategy = jdist.ParameterServerStrategy(workers=2)
    with (
        pytest.raises(RuntimeError, match=r"Keras' own `fit` does not use the workers .*`jdist\.Trainer\("),
        strategy.scope(),
    ):
        compiled(keras).fit(INPUTS[:16], TARGETS[:16], batch_size=16, verbose=0)


def test_devices_that_keras_cannot_use_are_one_device_with_a_warning(four, keras, monkeypatch):
    monkeypatch.setattr(jax_compat, "KERAS_ABORTS_ON_CPU", True)
    message = r"Keras' own `fit` runs on one device: on several CPU devices.*`jdist\.Trainer\(model, optimizer, loss"
    with four.scope():
        assert keras.distribution.distribution().device_mesh.devices.size == 1
        with pytest.warns(UserWarning, match=message):
            keras.distribution.distribution().get_data_layout((16, 2))


def test_devices_of_several_processes_are_a_reason_for_one_device():
    class Device:
        def __init__(self, process_index):
            self.process_index = process_index

    class Strategy:
        devices = (Device(0), Device(1))

    assert "several processes" in module._reason_for_one_device(Strategy())


@pytest.mark.slow
@pytest.mark.parametrize(
    "call, warns", [(".compile('sgd', 'mse')", True), ("", False)], ids=["compiled", "only_imported"]
)
def test_keras_that_is_imported_and_compiled_inside_the_scope_warns(call, warns, keras):
    """In a new process, where nothing has imported Keras."""
    program = f"""
        import sys, warnings
        import jdist
        with jdist.MirroredStrategy(["cpu:0", "cpu:1"]).scope():
            assert "keras" not in sys.modules
        with warnings.catch_warnings(record=True) as caught, jdist.MirroredStrategy(["cpu:0", "cpu:1"]).scope():
            warnings.simplefilter("always")
            import keras
            model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)]){call}  # kept until the exit
        print([str(w.message) for w in caught if "inside `strategy.scope()`" in str(w.message)])
    """
    root = str(pathlib.Path(jdist.__file__).parent.parent)
    environment = {**os.environ, "KERAS_BACKEND": "jax", "PYTHONPATH": root}
    result = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)], env=environment, capture_output=True, text=True, timeout=120
    )
    assert result.returncode == 0, result.stderr
    assert ("Import `keras` before the scope" in result.stdout) == warns
