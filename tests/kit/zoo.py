"""Ordinary training programs: every model here with every optimizer.

`program("mlp", "adamw")` is a `Program`: a function that makes the state, the step of one replica, and one global batch. The
gradients are averaged over the replicas before the optimizer; `step(state, batch, reduce=False)` is the program without that
line. `controlled(program, "scan")` has the step, including its collectives, inside control flow.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import jdist

CLASSES = 4
EXAMPLES = 16
IMAGE, SEQUENCE, VECTOR = (6, 6, 2), (5, 6), (6,)


@dataclasses.dataclass(frozen=True)
class Model:
    """A model as two pure functions.

    Attributes:
        inputs: The shape of one example.
        init: Makes `(params, batch_stats)` from a key.
        apply: `(params, batch_stats, x, key)` of one replica to `(logits, new batch_stats)`; one key per replica.
    """

    inputs: tuple[int, ...]
    init: Callable[[jax.Array], tuple[Any, Any]]
    apply: Callable[[Any, Any, jax.Array, jax.Array], tuple[jax.Array, Any]]


@dataclasses.dataclass(frozen=True)
class Program:
    """A training program with one model and one optimizer.

    Attributes:
        name: `"model-optimizer"`.
        make_state: Makes the state from a key.
        step: `(state, batch, *, reduce=True)` of one replica to `(state, outputs)`.
        batch: One global batch, `[example, ...]` each.
    """

    name: str
    make_state: Callable[[jax.Array], dict[str, Any]]
    step: Callable[..., tuple[dict[str, Any], dict[str, jax.Array]]]
    batch: dict[str, np.ndarray]


def controlled(inner: Program, flow_name: str) -> Program:
    """Returns a program whose step is inside control flow, by its name in `FLOWS`."""

    def step(state, batch, *, reduce=True):
        return FLOWS[flow_name](functools.partial(inner.step, reduce=reduce), state, batch)

    return dataclasses.replace(inner, name=f"{inner.name}-{flow_name}", step=step)


def program(model_name: str, optimizer_name: str) -> Program:
    """Returns the program of a model and an optimizer, by their names in `MODELS` and `OPTIMIZERS`."""
    model, optimizer = MODELS[model_name], OPTIMIZERS[optimizer_name]

    def make_state(key):
        params, batch_stats = model.init(key)
        opt_state = optimizer.init(params)
        return {
            "params": params,
            "opt_state": opt_state,
            "batch_stats": batch_stats,
            "key": jax.random.fold_in(key, 1),
            "step": jnp.int32(0),
        }

    def step(state, batch, *, reduce=True):
        key = jdist.replica_key(jax.random.fold_in(state["key"], state["step"]))

        def loss_of(params):
            logits, batch_stats = model.apply(params, state["batch_stats"], batch["x"], key)
            losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"])
            return losses.mean(), batch_stats

        (loss, batch_stats), grads = jax.value_and_grad(loss_of, has_aux=True)(state["params"])
        if reduce:
            grads = jdist.all_reduce("mean", grads)
        updates, opt_state = optimizer.update(grads, state["opt_state"], state["params"])
        new_state = {
            "params": optax.apply_updates(state["params"], updates),
            "opt_state": opt_state,
            "batch_stats": batch_stats,
            "key": state["key"],
            "step": state["step"] + 1,
        }
        return new_state, {"loss": jdist.all_reduce("mean", loss), "own_loss": loss}

    rng = np.random.default_rng(0)
    batch = {
        "x": rng.normal(size=(EXAMPLES, *model.inputs)).astype(np.float32),
        "y": rng.integers(0, CLASSES, size=EXAMPLES, dtype=np.int32),
    }
    return Program(f"{model_name}-{optimizer_name}", make_state, step, batch)


def _scanned(step, state, batch):
    """Runs two steps, each with half of the batch."""
    halves = jax.tree.map(lambda x: x.reshape(2, -1, *x.shape[1:]), batch)
    state, outputs = jax.lax.scan(step, state, halves)
    return state, jax.tree.map(lambda x: x[-1], outputs)


def _repeated(step, state, batch):
    """Repeats the step with the same batch until the state has counted four."""
    first = step(state, batch)
    return jax.lax.while_loop(lambda pair: pair[0]["step"] < 4, lambda pair: step(pair[0], batch), first)


def _alternating(step, state, batch):
    """Runs the step if the count is even, and otherwise only counts."""
    outputs = jax.tree.map(jnp.zeros_like, jax.eval_shape(step, state, batch)[1])
    skip = lambda state, batch: (state | {"step": state["step"] + 1}, outputs)
    return jax.lax.cond(state["step"] % 2 == 0, step, skip, state, batch)


class MLP(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.relu(nn.Dense(16)(x))
        return nn.Dense(CLASSES)(x)


class CNN(nn.Module):
    axis_name: str | None

    @nn.compact
    def __call__(self, x):
        for features in (8, 8):
            x = nn.Conv(features, (3, 3), use_bias=False)(x)
            x = nn.relu(nn.BatchNorm(use_running_average=False, axis_name=self.axis_name)(x))
        x = nn.avg_pool(x, (2, 2), strides=(2, 2))
        return nn.Dense(CLASSES)(x.mean(axis=(1, 2)))


class Recurrent(nn.Module):
    cell: type[nn.RNNCellBase]

    @nn.compact
    def __call__(self, x):
        x = nn.RNN(self.cell(8))(x)
        x = nn.RNN(self.cell(8), reverse=True, keep_order=True)(x)
        return nn.Dense(CLASSES)(x[:, -1])


class EncoderBlock(nn.Module):
    @nn.compact
    def __call__(self, x):
        attention = nn.MultiHeadDotProductAttention(num_heads=2, dropout_rate=0.1, deterministic=False)
        x = x + nn.Dropout(0.1, deterministic=False)(attention(nn.LayerNorm()(x)))
        hidden = nn.gelu(nn.Dense(16)(nn.LayerNorm()(x)))
        return x + nn.Dropout(0.1, deterministic=False)(nn.Dense(8)(hidden))


class Transformer(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.Dense(8)(x)
        x = x + self.param("positions", nn.initializers.normal(0.02), x.shape[1:])
        for _ in range(2):
            x = EncoderBlock()(x)
        return nn.Dense(CLASSES)(nn.LayerNorm()(x).mean(axis=1))


class ScannedTransformer(nn.Module):
    """The same blocks as one `scan` over stacked parameters, recomputed in the backward pass."""

    @nn.compact
    def __call__(self, x):
        x = nn.Dense(8)(x)
        layers = nn.scan(
            nn.remat(lambda block, x, _: (block(x), None), prevent_cse=False),
            variable_axes={"params": 0},
            split_rngs={"params": True, "dropout": True},
            length=2,
        )
        x, _ = layers(EncoderBlock(), x, None)
        return nn.Dense(CLASSES)(x.mean(axis=1))


class NnxMLP(nnx.Module):
    def __init__(self, rngs):
        self.first = nnx.Linear(VECTOR[0], 16, rngs=rngs)
        self.norm = nnx.BatchNorm(16, rngs=rngs)
        self.dropout = nnx.Dropout(0.1)
        self.last = nnx.Linear(16, CLASSES, rngs=rngs)

    def __call__(self, x, rngs):
        x = nnx.relu(self.norm(self.first(x)))
        return self.last(self.dropout(x, rngs=rngs))


def _linen(module: nn.Module, inputs: tuple[int, ...], average_stats: bool = False) -> Model:
    """Returns the model of a linen module; `average_stats` averages batch statistics that are computed per replica."""

    def init(key):
        keys = {"params": key, "dropout": key}
        variables = module.init(keys, jnp.zeros((2, *inputs)))
        return variables["params"], variables.get("batch_stats", {})

    def apply(params, batch_stats, x, key):
        variables = {"params": params, "batch_stats": batch_stats}
        logits, updated = module.apply(variables, x, rngs={"dropout": key}, mutable=["batch_stats"])
        batch_stats = updated.get("batch_stats", {})
        return logits, jdist.all_reduce("mean", batch_stats) if average_stats else batch_stats

    return Model(inputs, init, apply)


def _nnx(make: Callable[[nnx.Rngs], nnx.Module], inputs: tuple[int, ...]) -> Model:
    """Returns the model of an nnx module; its batch statistics are averaged over the replicas."""

    def init(key):
        _, params, batch_stats = nnx.split(make(nnx.Rngs(key)), nnx.Param, nnx.BatchStat)
        return params, batch_stats

    @functools.cache
    def graph():
        return nnx.graphdef(nnx.eval_shape(lambda: make(nnx.Rngs(0))))

    def apply(params, batch_stats, x, key):
        module = nnx.merge(graph(), params, batch_stats, copy=True)
        logits = module(x, nnx.Rngs(dropout=key))
        return logits, jdist.all_reduce("mean", nnx.state(module, nnx.BatchStat))

    return Model(inputs, init, apply)


MODELS = {
    "mlp": _linen(MLP(), VECTOR),
    "cnn_synchronised": _linen(CNN(axis_name="replica"), IMAGE),
    "cnn_averaged": _linen(CNN(axis_name=None), IMAGE, average_stats=True),
    "lstm": _linen(Recurrent(nn.LSTMCell), SEQUENCE),
    "gru": _linen(Recurrent(nn.GRUCell), SEQUENCE),
    "transformer": _linen(Transformer(), SEQUENCE),
    "transformer_scanned": _linen(ScannedTransformer(), SEQUENCE),
    "nnx": _nnx(NnxMLP, VECTOR),
}

OPTIMIZERS = {
    "adamw": optax.adamw(1e-3),
    "lamb": optax.lamb(1e-3),
    "muon": optax.contrib.muon(1e-3),
    "schedule_free": optax.contrib.schedule_free_adamw(1e-3, warmup_steps=2),
    "clipped_momentum": optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(1e-2, momentum=0.9)),
    "multi_steps": optax.MultiSteps(optax.adam(1e-3), every_k_schedule=2).gradient_transformation(),
}

FLOWS = {"scan": _scanned, "while_loop": _repeated, "cond": _alternating}
