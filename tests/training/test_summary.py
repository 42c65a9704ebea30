"""`jdist.summary`: the layers of models of every library, and the number of parameters."""

import io

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx

import jdist

from laws import each_row


class Linen(nn.Module):
    @nn.compact
    def __call__(self, x, train=False):
        x = nn.BatchNorm(use_running_average=not train)(nn.Dense(4)(x))
        return nn.Dense(2, use_bias=False)(x)


class Nnx(nnx.Module):
    def __init__(self):
        rngs = nnx.Rngs(0)
        self.first, self.norm = nnx.Linear(3, 4, rngs=rngs), nnx.BatchNorm(4, rngs=rngs)
        self.last, self.drop = nnx.Linear(4, 2, use_bias=False, rngs=rngs), nnx.Dropout(0.1, rngs=rngs)
        self.tied = self.first

    def __call__(self, x):
        return self.last(self.norm(self.first(x)))


def linen_variables():
    return Linen().init(jax.random.key(0), jnp.ones((1, 3)))


def train_state(optimizer):
    variables = linen_variables()
    model_state = {"batch_stats": variables["batch_stats"]}
    return jdist.TrainState.create(variables["params"], optimizer, model_state=model_state)


def equinox_module():
    equinox = pytest.importorskip("equinox")
    return equinox.nn.MLP(3, 2, 4, 1, key=jax.random.key(0))


def policy_state():
    """A state whose parameters are stored per replica."""
    optimizer = jdist.sync.local_sgd(optax.sgd(0.1), every=2)
    strategy = jdist.MirroredStrategy(["cpu:0", "cpu:1"])
    return strategy.init(lambda: jdist.TrainState.create({"w": jnp.ones((3, 4))}, optimizer))


# The model; its parameters, other numbers, and bytes.
MODELS = {
    "array": (lambda: np.ones((3, 4), np.float32), (12, 0, 48)),
    "dict": (lambda: {"w": np.ones((3, 4), np.float16), "ids": np.ones(5, np.int32)}, (12, 5, 44)),
    "params": (lambda: linen_variables()["params"], (32, 0, 128)),
    "variables": (linen_variables, (32, 8, 160)),
    "shapes": (lambda: jax.eval_shape(linen_variables), (32, 8, 160)),
    "nnx": (Nnx, (32, 10, 32 * 4 + 8 * 4 + 12)),  # batch statistics, and a key and a counter for dropout
    "equinox": (equinox_module, (26, 0, 104)),
    "train_state": (lambda: train_state(optax.adam(0.1)), (32, 8, 160)),
    "dict_state": (lambda: {"params": {"w": np.ones(3)}, "opt_state": np.ones(9), "step": 0}, (3, 0, 24)),
    "policy": (policy_state, (12, 0, 48)),
}


@each_row("model, expected", MODELS.values(), ids=MODELS)
def test_numbers_of_a_model_are_counted(model, expected):
    summary = jdist.summary(model())
    assert (summary.parameters, summary.variables, summary.bytes) == expected
    assert str(summary).splitlines()[-1].split()[:2] == ["total", f"{expected[0]:,}"]
    layers = f"{len(summary.layers)} layer{'s' * (len(summary.layers) > 1)}"
    assert repr(summary).startswith(f"Summary({layers}, {expected[0]} parameters, ")
    assert "parameters" in summary._repr_html_()


def test_keras_model(keras):
    layers = [keras.Input((3,)), keras.layers.Dense(4), keras.layers.BatchNormalization(), keras.layers.Dense(2)]
    model = keras.Sequential(layers)
    summary = jdist.summary(model)
    assert summary.parameters + summary.variables == model.count_params()
    assert summary.layers[1].path.endswith("dense") and summary.layers[1].parameters == 3 * 4 + 4


def test_rows_are_the_layers_with_their_arrays():
    head, _, *rows = str(jdist.summary(linen_variables())).splitlines()
    assert head.split() == ["layer", "arrays", "parameters", "variables", "bytes"]
    assert [" ".join(row.split()) for row in rows] == [
        "BatchNorm_0 bias float32[4], scale float32[4] 8 0 32 B",
        "Dense_0 bias float32[4], kernel float32[3,4] 16 0 64 B",
        "Dense_1 kernel float32[4,2] 8 0 32 B",
        "batch_stats/BatchNorm_0 mean float32[4], var float32[4] 0 8 32 B",
        "",
        "total 32 8 160 B",
    ]


def test_many_layers_share_rows_and_long_paths_and_markup_are_shown():
    layers = {f"layer_{i}": {"[bold]": np.ones((2, 2), np.float32)} for i in range(300)}
    summary = jdist.summary({"decoder": layers, "[red]head": {"w": np.ones(3, np.float32)}}, max_rows=2)
    assert len(summary.layers) == 301 and summary.parameters == 1203
    text = str(summary)
    assert "decoder/layer_* (300 layers)" in text and "[bold] float32[2,2]" in text and "[red]head" in text
    assert len(text.splitlines()) == 6


def test_state_of_a_fit_that_was_donated_still_has_a_summary(two):
    trainer = jdist.Trainer(Linen(), optax.sgd(0.1), optax.squared_error, strategy=two)
    data = np.ones((8, 3), np.float32), np.ones((8, 2), np.float32)
    first = trainer.fit(data, batch_size=8, progress="off")
    trainer.fit(data, batch_size=8, state=first.state, steps=2, progress="off")
    assert first.summary().parameters == 32
    assert jdist.Fit(None, jdist.History(), 0, "").summary() is None


def test_progress_shows_the_number_of_parameters_before_the_first_step(two):
    stream = io.StringIO()
    progress = jdist.callbacks.Progress("live", stream=stream)
    trainer = jdist.Trainer(Linen(), optax.sgd(0.1), optax.squared_error, strategy=two)
    trainer.fit(
        (np.ones((8, 3), np.float32), np.ones((8, 2), np.float32)), batch_size=8, callbacks=[progress], progress="off"
    )
    assert "32 parameters" in stream.getvalue()


@each_row("model", [None, 3, {}, "text", {"params": {}}])
def test_model_without_an_array_raises(model):
    with pytest.raises(TypeError, match="`model` contains no array"):
        jdist.summary(model)


def test_number_of_rows_that_is_not_positive_raises():
    with pytest.raises(ValueError, match="`max_rows` must be an integer >= 1, got 0"):
        jdist.summary(np.ones(3), max_rows=0)
