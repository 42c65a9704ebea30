"""Training programs in the styles of other libraries and papers, which compute the same on one device and on several.

`PROGRAMS` are steps of jdist strategies: idioms of flax, nnx, haiku, equinox, Keras and optax, of reinforcement learning,
of contrastive, generative and recommender models, and of statistics that are sums over the examples. `FOREIGN` are such
idioms as plain JAX. Each program is correct: its results on several devices equal its results on one, up to rounding or
in distribution.
"""

import dataclasses
import functools
import os
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import flax.linen as nn
import haiku as hk
import jax
import jax.flatten_util
import jax.numpy as jnp
import numpy as np
import optax
from flax import jax_utils, nnx, struct
from flax.training import common_utils
from flax.training.dynamic_scale import DynamicScale
from flax.training.train_state import TrainState
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jdist

EXAMPLES, CLASSES, VOCAB, WIDTH, TIME = 16, 4, 11, 8, 6
AXIS = "replica"


@dataclasses.dataclass(frozen=True)
class Program:
    """A training program for the replicas of a jdist strategy.

    Attributes:
        name: The name of the step.
        make_state: Makes the state, in `strategy.init`.
        batch: One global batch, `[example, ...]` each.
        step: `(state, *batch)` of one replica to `(state, outputs)`.
        in_distribution: Whether each replica draws other random numbers: the states on 1 and on 4 devices are equal in
            distribution only.
    """

    name: str
    make_state: Callable[[], Any]
    batch: tuple[np.ndarray, ...]
    step: Callable[..., tuple[Any, Any]]
    in_distribution: bool = False


@dataclasses.dataclass(frozen=True)
class Foreign:
    """A training program in plain JAX, without jdist.

    Attributes:
        name: The name of the program.
        make: Takes the number of devices, 1, 2 or 4, and returns the transformed function and its arguments.
        kind: `"pmap"`, `"shard_map"`, `"jit_shard_map"`, `"named_sharding"`, or `"shard_map_2d"` of a mesh
            `(data, model)`.
        in_distribution: See `Program`.
    """

    name: str
    make: Callable[[int], tuple[Callable[..., Any], tuple[Any, ...]]]
    kind: str
    in_distribution: bool = False


PROGRAMS: list[Program] = []
FOREIGN: list[Foreign] = []


def program(make_state: Callable[[], Any], *batch: np.ndarray, name: str = "", in_distribution: bool = False):
    """Returns a decorator of a step that appends its program to `PROGRAMS`."""

    def register(step):
        PROGRAMS.append(Program(name or step.__name__, make_state, batch, step, in_distribution))
        return step

    return register


def foreign(kind: str, in_distribution: bool = False):
    """Returns a decorator of a function `make` that appends its program to `FOREIGN`."""

    def register(make):
        FOREIGN.append(Foreign(make.__name__, make, kind, in_distribution))
        return make

    return register


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng([seed, *shape]).normal(size=(EXAMPLES, *shape)).astype(np.float32)


def integers(below: int, *shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng([seed, below, *shape]).integers(0, below, (EXAMPLES, *shape), dtype=np.int32)


def tokens(length: int = TIME, seed: int = 0) -> np.ndarray:
    """Returns sequences of different lengths, padded with token 0: `[example, length]`."""
    rng = np.random.default_rng([seed, length])
    padding = np.arange(length) >= rng.integers(2, length + 1, (EXAMPLES, 1))
    return np.where(padding, 0, rng.integers(1, VOCAB, (EXAMPLES, length))).astype(np.int32)


IMAGES, FEATURES, TOKENS = normal(6, 6, 2), normal(WIDTH), tokens()
LABELS, TARGETS, NUMBERS = integers(CLASSES), tokens(seed=1), normal(1, seed=1)


def pmean(tree):
    return lax.pmean(tree, AXIS)


def psum(tree):
    return lax.psum(tree, AXIS)


def cross_entropy(logits, labels):
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def example_keys(key, count: int):
    """Returns a key per local example; the numbers that it draws do not depend on the number of replicas."""
    return jdist.example_key(key, jdist.replica_id() * count + jnp.arange(count))


def example_noise(key, count: int, *shape: int):
    return jax.vmap(lambda key: jax.random.normal(key, shape))(example_keys(key, count))


def optimized(init: Callable[[], Any], tx: optax.GradientTransformation, **others: Callable[[], Any]):
    """Returns the `make_state` of params, an optimizer, a step count and others, which are functions of the params."""

    def make_state():
        params = init()
        others_now = {name: make(params) for name, make in others.items()}
        return {"params": params, "opt_state": tx.init(params), "step": jnp.int32(0)} | others_now

    return make_state


def updated(tx: optax.GradientTransformation, state: dict[str, Any], grads: Any, **others: Any) -> dict[str, Any]:
    """Returns the state after an update of the params, with `others` replaced."""
    updates, opt_state = tx.update(grads, state["opt_state"], state["params"])
    params = optax.apply_updates(state["params"], updates)
    return state | {"params": params, "opt_state": opt_state, "step": state["step"] + 1} | others


def linen(module: nn.Module, *inputs: np.ndarray, seed: int = 0) -> Callable[[], Any]:
    """Returns a function that initializes the params of a linen module for two examples."""
    return lambda: module.init(jax.random.key(seed), *(x[:2] for x in inputs))["params"]


def mlp_params(*widths: int, seed: int = 0) -> list[dict[str, jax.Array]]:
    keys = jax.random.split(jax.random.key(seed), len(widths) - 1)
    return [
        {"w": jax.random.normal(key, shape) / np.sqrt(shape[0]), "b": jnp.zeros(shape[1])}
        for key, shape in zip(keys, zip(widths[:-1], widths[1:], strict=True), strict=True)
    ]


def mlp(params, x):
    *hidden, last = params
    for layer in hidden:
        x = jnp.tanh(x @ layer["w"] + layer["b"])
    return x @ last["w"] + last["b"]


# flax linen, in the style of its examples ----------------------------------------------------------------------------


class CNN(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.avg_pool(nn.relu(nn.Conv(4, (3, 3))(x)), (2, 2), strides=(2, 2))
        x = nn.relu(nn.Dense(8)(x.reshape(x.shape[0], -1)))
        return nn.Dense(CLASSES)(x)


MOMENTUM = optax.sgd(0.1, momentum=0.9)


@program(lambda: TrainState.create(apply_fn=CNN().apply, params=linen(CNN(), IMAGES)(), tx=MOMENTUM), IMAGES, LABELS)
def mnist_cnn(state, images, labels):
    def loss_fn(params):
        logits = state.apply_fn({"params": params}, images)
        one_hot = jax.nn.one_hot(labels, CLASSES)
        return optax.softmax_cross_entropy(logits, one_hot).mean(), logits

    (loss, logits), grads = jax.value_and_grad(loss_fn, has_aux=True)(state.params)
    metrics = {"loss": loss, "accuracy": jnp.mean(logits.argmax(-1) == labels)}
    return state.apply_gradients(grads=pmean(grads)), pmean(metrics)


class ResidualBlock(nn.Module):
    features: int
    norm: Any
    strides: tuple[int, int] = (1, 1)

    @nn.compact
    def __call__(self, x):
        residual = x
        y = nn.relu(self.norm()(nn.Conv(self.features, (3, 3), self.strides, use_bias=False)(x)))
        y = self.norm(scale_init=nn.initializers.ones)(nn.Conv(self.features, (3, 3), use_bias=False)(y))
        if residual.shape != y.shape:
            residual = self.norm(name="norm_proj")(nn.Conv(self.features, (1, 1), self.strides, use_bias=False)(x))
        return nn.relu(residual + y)


class ResNet(nn.Module):
    axis_name: str | None = AXIS

    @nn.compact
    def __call__(self, x, train=True):
        norm = functools.partial(nn.BatchNorm, use_running_average=not train, momentum=0.9, axis_name=self.axis_name)
        x = nn.relu(norm(name="bn_init")(nn.Conv(4, (3, 3), use_bias=False, name="conv_init")(x)))
        x = ResidualBlock(4, norm)(x)
        x = ResidualBlock(8, norm, (2, 2))(x)
        return nn.Dense(CLASSES)(x.mean((1, 2)))


class ResNetState(TrainState):
    batch_stats: Any
    dynamic_scale: DynamicScale


WARMUP_COSINE = optax.warmup_cosine_decay_schedule(0.01, 0.1, 2, 10)
NESTEROV = optax.sgd(WARMUP_COSINE, momentum=0.9, nesterov=True)


def resnet_state():
    variables = ResNet().init(jax.random.key(0), IMAGES[:2])
    return ResNetState.create(
        apply_fn=ResNet().apply,
        params=variables["params"],
        tx=NESTEROV,
        batch_stats=variables["batch_stats"],
        dynamic_scale=DynamicScale(growth_interval=1, scale=jnp.float32(256), fin_steps=jnp.int32(0)),
    )


@program(resnet_state, IMAGES, LABELS)
def imagenet_resnet(state, images, labels):
    def loss_fn(params):
        variables = {"params": params, "batch_stats": state.batch_stats}
        logits, new_model_state = state.apply_fn(variables, images, mutable=["batch_stats"])
        weight_penalty = 0.5e-3 * sum(jnp.sum(x**2) for x in jax.tree.leaves(params) if x.ndim > 1)
        return cross_entropy(logits, labels) + weight_penalty, (new_model_state, logits)

    grad_fn = state.dynamic_scale.value_and_grad(loss_fn, has_aux=True, axis_name=AXIS)
    dynamic_scale, is_finite, (loss, (new_model_state, logits)), grads = grad_fn(state.params)
    new_state = state.apply_gradients(grads=grads, batch_stats=new_model_state["batch_stats"])
    keep_finite = functools.partial(jnp.where, is_finite)
    new_state = new_state.replace(
        params=jax.tree.map(keep_finite, new_state.params, state.params),
        opt_state=jax.tree.map(keep_finite, new_state.opt_state, state.opt_state),
        dynamic_scale=dynamic_scale,
    )
    metrics = pmean({"loss": loss, "accuracy": jnp.mean(logits.argmax(-1) == labels)})
    return new_state, metrics | {"learning_rate": WARMUP_COSINE(state.step), "scale": dynamic_scale.scale}


def positions(length: int) -> np.ndarray:
    angles = np.arange(length)[:, None] / 100 ** (np.arange(0, WIDTH, 2) / WIDTH)
    return np.concatenate([np.sin(angles), np.cos(angles)], -1).astype(np.float32)


class AttentionBlock(nn.Module):
    dropout: float = 0.0

    @nn.compact
    def __call__(self, x, mask, memory=None, memory_mask=None):
        drop = nn.Dropout(self.dropout, deterministic=not self.dropout)
        # Without biases: the gradient of the bias of a key is 0, and Adam would turn its rounding error into an update.
        attention = functools.partial(nn.MultiHeadDotProductAttention, num_heads=2, use_bias=False)
        x = x + drop(attention()(nn.LayerNorm()(x), mask=mask))
        if memory is not None:
            x = x + attention()(nn.LayerNorm()(x), memory, mask=memory_mask)
        hidden = nn.gelu(nn.Dense(2 * WIDTH)(nn.LayerNorm()(x)))
        return x + drop(nn.Dense(WIDTH)(hidden))


class EncoderDecoder(nn.Module):
    @nn.compact
    def __call__(self, inputs, targets):
        embed = nn.Embed(VOCAB, WIDTH)
        x = embed(inputs) + positions(inputs.shape[1])
        memory = nn.LayerNorm()(AttentionBlock()(x, nn.make_attention_mask(inputs > 0, inputs > 0)))
        shifted = jnp.pad(targets, ((0, 0), (1, 0)))[:, :-1]
        causal = nn.combine_masks(nn.make_attention_mask(targets > 0, targets > 0), nn.make_causal_mask(targets))
        y = embed(shifted) + positions(targets.shape[1])
        y = AttentionBlock()(y, causal, memory, nn.make_attention_mask(targets > 0, inputs > 0))
        return embed.attend(nn.LayerNorm()(y)) / np.sqrt(WIDTH)


def smoothed_cross_entropy(logits, targets, weights, smoothing=0.1):
    """Returns the weighted sum of the cross entropy with smoothed labels, less its minimum."""
    confidence, rest = 1 - smoothing, smoothing / (VOCAB - 1)
    minimum = -(confidence * np.log(confidence) + (VOCAB - 1) * rest * np.log(rest))
    soft_targets = optax.smooth_labels(jax.nn.one_hot(targets, VOCAB), smoothing * VOCAB / (VOCAB - 1))
    return jnp.sum((optax.softmax_cross_entropy(logits, soft_targets) - minimum) * weights)


RSQRT = optax.adamw(lambda step: 0.01 * jnp.minimum(1.0, (step + 1) / 4) / jnp.sqrt(jnp.maximum(step, 4)), b2=0.98)


@program(optimized(linen(EncoderDecoder(), TOKENS, TARGETS), RSQRT), TOKENS, TARGETS)
def wmt_transformer(state, inputs, targets):
    weights = jnp.where(targets > 0, 1.0, 0.0)
    denominator = psum(weights.sum())

    def loss_fn(params):
        logits = EncoderDecoder().apply({"params": params}, inputs, targets)
        return smoothed_cross_entropy(logits, targets, weights) / denominator, logits

    (loss, logits), grads = jax.value_and_grad(loss_fn, has_aux=True)(state["params"])
    correct = jnp.sum((logits.argmax(-1) == targets) * weights)
    metrics = psum({"loss": loss, "accuracy": correct}) | {"denominator": denominator}
    return updated(RSQRT, state, psum(grads)), metrics


class LanguageModel(nn.Module):
    @nn.compact
    def __call__(self, inputs):
        x = nn.Embed(VOCAB, WIDTH)(inputs) + self.param("positions", nn.initializers.normal(0.02), (TIME, WIDTH))
        for _ in range(2):
            x = AttentionBlock(0.1)(x, nn.make_causal_mask(inputs))
        return nn.Dense(VOCAB)(nn.LayerNorm()(x))


CLIPPED_ADAMW = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(WARMUP_COSINE))


def language_model_params():
    return LanguageModel().init({"params": jax.random.key(0), "dropout": jax.random.key(1)}, TOKENS[:2])["params"]


@program(optimized(language_model_params, CLIPPED_ADAMW, key=lambda _: jax.random.key(2)), TOKENS, in_distribution=True)
def lm1b_dropout(state, inputs):
    key = jdist.replica_key(jax.random.fold_in(state["key"], state["step"]))
    shifted = jnp.pad(inputs, ((0, 0), (1, 0)))[:, :-1]
    weights = (inputs > 0).astype(jnp.float32)

    def loss_fn(params):
        logits = LanguageModel().apply({"params": params}, shifted, rngs={"dropout": key})
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, inputs)
        return jnp.sum(losses * weights) / psum(weights.sum())

    loss, grads = jax.value_and_grad(loss_fn)(state["params"])
    loss, grads = jdist.all_reduce("sum", (loss, grads))
    return updated(CLIPPED_ADAMW, state, grads), {"loss": loss, "perplexity": jnp.exp(jnp.minimum(loss, 10.0))}


class Seq2Seq(nn.Module):
    @nn.compact
    def __call__(self, inputs, targets):
        embed = nn.Embed(VOCAB, WIDTH)
        encoder = nn.RNN(nn.LSTMCell(WIDTH), return_carry=True)
        carry, _ = encoder(embed(inputs), seq_lengths=jnp.sum(inputs > 0, -1))
        shifted = jnp.pad(targets, ((0, 0), (1, 0)))[:, :-1]
        return nn.Dense(VOCAB)(nn.RNN(nn.LSTMCell(WIDTH))(embed(shifted), initial_carry=carry))


ADAM = optax.adam(1e-2)


@program(optimized(linen(Seq2Seq(), TOKENS, TARGETS), ADAM), TOKENS, TARGETS)
def seq2seq_lstm(state, inputs, targets):
    mask = (targets > 0).astype(jnp.float32)

    def loss_fn(params):
        logits = Seq2Seq().apply({"params": params}, inputs, targets)
        return jdist.global_mean(optax.softmax_cross_entropy_with_integer_labels(logits, targets), mask), logits

    (loss, logits), grads = jax.value_and_grad(loss_fn, has_aux=True)(state["params"])
    exact_match = jnp.mean(jnp.all((logits.argmax(-1) == targets) | (mask == 0), -1))
    return updated(ADAM, state, jdist.all_reduce("mean", grads)), {"loss": loss, "exact_match": pmean(exact_match)}


class TextClassifier(nn.Module):
    @nn.compact
    def __call__(self, inputs):
        lengths = jnp.sum(inputs > 0, -1)
        x = nn.Bidirectional(nn.RNN(nn.LSTMCell(4)), nn.RNN(nn.LSTMCell(4)))(
            nn.Embed(VOCAB, WIDTH)(inputs), seq_lengths=lengths
        )
        scores = nn.Dense(1, use_bias=False)(jnp.tanh(nn.Dense(WIDTH)(x)))[..., 0]
        attention = jax.nn.softmax(jnp.where(inputs > 0, scores, -1e9))
        return nn.Dense(1)(jnp.einsum("bt,btd->bd", attention, x))[..., 0]


DECAYED_SGD = optax.chain(optax.add_decayed_weights(1e-3), optax.sgd(0.1, momentum=0.9))


@program(optimized(linen(TextClassifier(), TOKENS), DECAYED_SGD), TOKENS, LABELS % 2)
def sst2_bilstm(state, inputs, labels):
    def loss_fn(params):
        logits = TextClassifier().apply({"params": params}, inputs)
        return optax.sigmoid_binary_cross_entropy(logits, labels).mean(), logits

    (loss, logits), grads = jax.value_and_grad(loss_fn, has_aux=True)(state["params"])
    metrics = psum({"loss": loss * labels.size, "correct": jnp.sum((logits > 0) == labels), "count": labels.size})
    return updated(DECAYED_SGD, state, pmean(grads)), metrics


class Tagger(nn.Module):
    @nn.compact
    def __call__(self, inputs):
        x = nn.Embed(VOCAB, WIDTH)(inputs) + positions(inputs.shape[1])
        x = AttentionBlock()(x, nn.make_attention_mask(inputs > 0, inputs > 0))
        return nn.Dense(VOCAB)(nn.LayerNorm()(x))


DECAY_MATRICES = optax.adamw(1e-2, weight_decay=0.1, mask=lambda params: jax.tree.map(lambda x: x.ndim > 1, params))


@program(optimized(linen(Tagger(), TOKENS), DECAY_MATRICES), TOKENS, TARGETS)
def nlp_seq_tagger(state, inputs, tags):
    weights = jnp.where(inputs > 0, 1.0, 0.0)

    def loss_sum(params):
        logits = Tagger().apply({"params": params}, inputs)
        return jnp.sum(optax.softmax_cross_entropy_with_integer_labels(logits, tags) * weights), logits

    (loss, logits), grads = jax.value_and_grad(loss_sum, has_aux=True)(state["params"])
    sums = {"loss": loss, "correct": jnp.sum((logits.argmax(-1) == tags) * weights), "denominator": weights.sum()}
    sums, grads = psum((sums, grads))
    grads = jax.tree.map(lambda grad: grad / sums["denominator"], grads)
    return updated(DECAY_MATRICES, state, grads), sums


class VAE(nn.Module):
    @nn.compact
    def __call__(self, x, noise):
        hidden = nn.relu(nn.Dense(8)(x))
        mean, log_variance = nn.Dense(3)(hidden), nn.Dense(3)(hidden)
        latent = mean + jnp.exp(0.5 * log_variance) * noise
        return nn.Dense(x.shape[-1])(nn.relu(nn.Dense(8)(latent))), mean, log_variance


@program(
    optimized(linen(VAE(), FEATURES, normal(3)), ADAM, key=lambda _: jax.random.PRNGKey(1)),
    FEATURES,
    in_distribution=True,
)
def vae(state, x):
    key, next_key = jax.random.split(state["key"])
    noise = jax.random.normal(jdist.replica_key(key), (x.shape[0], 3))

    def loss_fn(params):
        logits, mean, log_variance = VAE().apply({"params": params}, x, noise)
        reconstruction = optax.sigmoid_binary_cross_entropy(logits, jax.nn.sigmoid(x)).sum(-1)
        kl = -0.5 * jnp.sum(1 + log_variance - mean**2 - jnp.exp(log_variance), -1)
        return jnp.mean(reconstruction + kl)

    loss, grads = jax.value_and_grad(loss_fn)(state["params"])
    return updated(ADAM, state, pmean(grads), key=next_key), pmean(loss)


class GraphNet(nn.Module):
    """Convolutions over one graph: sums of messages, normalized by the degree of each node."""

    @nn.compact
    def __call__(self, nodes, senders, receivers, mask):
        count = nodes.shape[0]
        degree = jax.ops.segment_sum(mask, receivers, count)
        for features in (8, 8):
            messages = nn.Dense(features)(nodes)[senders] * mask[:, None]
            sums = jax.ops.segment_sum(messages, receivers, count)
            nodes = nn.relu(sums / jnp.maximum(degree, 1)[:, None] + nn.Dense(features)(nodes))
        return nn.Dense(CLASSES)(nodes.mean(0))


GRAPHS = normal(5, 3), integers(5, 9), integers(5, 9, seed=1), (normal(9) > -1).astype(np.float32)


@program(optimized(lambda: GraphNet().init(jax.random.key(0), *(x[0] for x in GRAPHS)), ADAM), *GRAPHS, LABELS)
def graph_net(state, nodes, senders, receivers, mask, labels):
    def loss_fn(params):
        logits = jax.vmap(functools.partial(GraphNet().apply, params))(nodes, senders, receivers, mask)
        return cross_entropy(logits, labels)

    loss, grads = pmean(jax.value_and_grad(loss_fn)(state["params"]))
    return updated(ADAM, state, grads), loss


# flax nnx ------------------------------------------------------------------------------------------------------------


def module_state(make: Callable[[nnx.Rngs], nnx.Module], tx: optax.GradientTransformation, wrt: Any = nnx.Param):
    def make_state():
        model = make(nnx.Rngs(0, dropout=1))
        return {"model": model, "optimizer": nnx.Optimizer(model, tx, wrt=wrt)}

    return make_state


class NormalizedCNN(nnx.Module):
    def __init__(self, rngs):
        self.conv = nnx.Conv(2, 4, (3, 3), use_bias=False, rngs=rngs)
        self.norm = nnx.BatchNorm(4, momentum=0.9, axis_name=AXIS, rngs=rngs)
        self.head = nnx.Linear(4 * 9, CLASSES, rngs=rngs)

    def __call__(self, x):
        x = nnx.avg_pool(nnx.relu(self.norm(self.conv(x))), (2, 2), strides=(2, 2))
        return self.head(x.reshape(x.shape[0], -1))


@program(module_state(NormalizedCNN, optax.adamw(1e-2)), IMAGES, LABELS)
def nnx_batch_norm(state, images, labels):
    model, optimizer = state["model"], state["optimizer"]
    loss, grads = nnx.value_and_grad(lambda model: cross_entropy(model(images), labels))(model)
    optimizer.update(model, jdist.all_reduce("mean", grads))
    return state, jdist.all_reduce("mean", loss)


class DroppedMLP(nnx.Module):
    def __init__(self, rngs):
        self.layers = nnx.List([nnx.Linear(WIDTH, 16, rngs=rngs), nnx.Linear(16, CLASSES, rngs=rngs)])
        self.dropout = nnx.Dropout(0.2, rngs=rngs)

    def __call__(self, x):
        return self.layers[1](self.dropout(nnx.relu(self.layers[0](x))))


@program(module_state(DroppedMLP, optax.sgd(0.1, momentum=0.9)), FEATURES, LABELS, in_distribution=True)
def nnx_dropout(state, x, labels):
    model = state["model"]
    with jdist.replica_rngs(model):
        loss, grads = nnx.value_and_grad(lambda model: cross_entropy(model(x), labels))(model)
    state["optimizer"].update(model, pmean(grads))
    return state, pmean(loss)


class AttentionTagger(nnx.Module):
    def __init__(self, rngs):
        self.embed = nnx.Embed(VOCAB, WIDTH, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(2, WIDTH, use_bias=False, decode=False, rngs=rngs)
        self.norm = nnx.RMSNorm(WIDTH, rngs=rngs)

    def __call__(self, inputs):
        x = self.embed(inputs)
        x = x + self.attention(self.norm(x), mask=nnx.make_causal_mask(inputs))
        return self.embed.attend(x)


@program(module_state(AttentionTagger, optax.adam(1e-2)), TOKENS, TARGETS)
def nnx_attention(state, inputs, targets):
    graphdef, params, rest = nnx.split(state["model"], nnx.Param, ...)

    def loss_fn(params):
        return cross_entropy(nnx.merge(graphdef, params, rest)(inputs), targets)

    loss, grads = jax.value_and_grad(loss_fn)(params)
    loss, grads = jdist.all_reduce("mean", (loss, grads))
    state["optimizer"].update(state["model"], grads)
    return state, loss


class LoRAClassifier(nnx.Module):
    def __init__(self, rngs):
        self.frozen = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.adapted = nnx.LoRA(WIDTH, 2, CLASSES, base_module=nnx.Linear(WIDTH, CLASSES, rngs=rngs), rngs=rngs)

    def __call__(self, x):
        return self.adapted(nnx.tanh(self.frozen(x)))


@program(module_state(LoRAClassifier, optax.adam(1e-2), nnx.LoRAParam), FEATURES, LABELS)
def nnx_lora(state, x, labels):
    trained = nnx.DiffState(0, nnx.LoRAParam)
    loss_fn = lambda model: cross_entropy(model(x), labels)
    loss, grads = nnx.value_and_grad(loss_fn, argnums=trained)(state["model"])
    state["optimizer"].update(state["model"], pmean(grads))
    return state, pmean(loss)


# haiku, equinox, Keras -----------------------------------------------------------------------------------------------


class HaikuState(NamedTuple):
    params: hk.Params
    avg_params: hk.Params
    state: hk.State
    opt_state: optax.OptState


def _haiku_norm_net(images, is_training):
    norm = lambda: hk.BatchNorm(True, True, 0.9, cross_replica_axis=AXIS)
    x = jax.nn.relu(norm()(hk.Conv2D(4, 3, with_bias=False)(images), is_training))
    x = jax.nn.relu(norm()(hk.Conv2D(8, 3, stride=2, with_bias=False)(x), is_training))
    return hk.Linear(CLASSES)(x.mean((1, 2)))


haiku_net = hk.without_apply_rng(hk.transform_with_state(_haiku_norm_net))


def haiku_state():
    params, state = haiku_net.init(jax.random.PRNGKey(0), IMAGES[:2], is_training=True)
    return HaikuState(params, params, state, MOMENTUM.init(params))


@program(haiku_state, IMAGES, LABELS)
def haiku_batch_norm(train_state, images, labels):
    def loss_fn(params):
        logits, new_state = haiku_net.apply(params, train_state.state, images, is_training=True)
        l2 = 0.5 * sum(jnp.sum(jnp.square(p)) for p in jax.tree.leaves(params))
        return cross_entropy(logits, labels) + 1e-4 * l2, new_state

    (loss, new_state), grads = jax.value_and_grad(loss_fn, has_aux=True)(train_state.params)
    updates, opt_state = MOMENTUM.update(lax.pmean(grads, axis_name=AXIS), train_state.opt_state)
    params = optax.apply_updates(train_state.params, updates)
    avg_params = optax.incremental_update(params, train_state.avg_params, step_size=0.001)
    return HaikuState(params, avg_params, new_state, opt_state), lax.pmean(loss, axis_name=AXIS)


def _haiku_lstm(inputs):
    x = hk.Embed(VOCAB, WIDTH)(inputs.T)
    core = hk.DeepRNN([hk.LSTM(WIDTH), jax.nn.relu, hk.LSTM(WIDTH)])
    outputs, _ = hk.dynamic_unroll(core, x, core.initial_state(inputs.shape[0]))
    return hk.BatchApply(hk.Linear(VOCAB))(outputs).swapaxes(0, 1)


haiku_lstm_net = hk.without_apply_rng(hk.transform(_haiku_lstm))


@program(optimized(lambda: haiku_lstm_net.init(jax.random.PRNGKey(0), TOKENS[:2]), ADAM), TOKENS)
def haiku_lstm(state, inputs):
    loss_fn = lambda params: cross_entropy(haiku_lstm_net.apply(params, inputs[:, :-1]), inputs[:, 1:])
    loss, grads = jax.value_and_grad(loss_fn)(state["params"])
    return updated(ADAM, state, lax.pmean(grads, AXIS)), lax.pmean(loss, AXIS)


class GatedMLP(eqx.Module):
    layers: list[eqx.nn.Linear]
    norm: eqx.nn.LayerNorm
    scale: jax.Array

    def __init__(self, key):
        first, second, gate = jax.random.split(key, 3)
        self.layers = [eqx.nn.Linear(WIDTH, WIDTH, key=k) for k in (first, gate)]
        self.layers.append(eqx.nn.Linear(WIDTH, CLASSES, key=second))
        self.norm = eqx.nn.LayerNorm(WIDTH)
        self.scale = jnp.ones(WIDTH)

    def __call__(self, x):
        first, gate, last = self.layers
        return last(self.norm(jax.nn.silu(first(x)) * gate(x)) * self.scale)


def equinox_state():
    model = GatedMLP(jax.random.key(0))
    return {"model": model, "opt_state": ADAM.init(eqx.filter(model, eqx.is_inexact_array))}


@program(equinox_state, FEATURES, LABELS)
def equinox_gated_mlp(state, x, labels):
    @eqx.filter_value_and_grad
    def compute_loss(model):
        return cross_entropy(jax.vmap(model)(x), labels)

    loss, grads = pmean(compute_loss(state["model"]))
    updates, opt_state = ADAM.update(grads, state["opt_state"], state["model"])
    return {"model": eqx.apply_updates(state["model"], updates), "opt_state": opt_state}, loss


@functools.cache
def keras_model():
    """Returns a Keras model and its optimizer, which are built outside the trace of `strategy.init`."""
    os.environ.setdefault("KERAS_BACKEND", "jax")  # before the first import of Keras
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import keras

    with jax.ensure_compile_time_eval():
        keras.utils.set_random_seed(0)
        layers = keras.layers
        model = keras.Sequential(
            [keras.Input((WIDTH,)), layers.Dense(8, "gelu"), layers.LayerNormalization(), layers.Dense(CLASSES)]
        )
        optimizer = keras.optimizers.AdamW(1e-2)
        optimizer.build(model.trainable_variables)
    loss_fn = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    return model, optimizer, loss_fn


def keras_state():
    model, optimizer, _ = keras_model()
    variables = model.trainable_variables, model.non_trainable_variables, optimizer.variables
    return tuple([jnp.array(variable.value) for variable in group] for group in variables)


@program(keras_state, FEATURES, LABELS)
def keras_stateless_call(state, x, labels):
    model, optimizer, loss_fn = keras_model()
    trainable, non_trainable, optimizer_variables = state

    def compute_loss(trainable):
        logits, new_non_trainable = model.stateless_call(trainable, non_trainable, x, training=True)
        return loss_fn(labels, logits), new_non_trainable

    (loss, new_non_trainable), grads = jax.value_and_grad(compute_loss, has_aux=True)(trainable)
    loss, grads = jdist.all_reduce("mean", (loss, grads))
    trainable, optimizer_variables = optimizer.stateless_apply(optimizer_variables, grads, trainable)
    return (trainable, new_non_trainable, optimizer_variables), loss


# optax: one classifier, many optimizers ------------------------------------------------------------------------------

CLASSIFIER = functools.partial(mlp_params, WIDTH, 8, CLASSES)


def classifier_loss(params, x, labels):
    return cross_entropy(mlp(params, x), labels)


def frozen_first_layer(params):
    return ["frozen"] + ["trained"] * (len(params) - 1)


def weights_only(params):
    return jax.tree.map(lambda x: x.ndim > 1, params)


OPTIMIZERS = {
    "multi_steps": optax.MultiSteps(optax.adam(1e-2), 2).gradient_transformation(),
    "clipped_cosine": optax.chain(optax.clip_by_global_norm(0.1), optax.sgd(optax.cosine_decay_schedule(0.1, 9), 0.9)),
    "adafactor": optax.adafactor(1e-2, min_dim_size_to_factor=4),
    "lamb": optax.lamb(1e-2, weight_decay=1e-2, mask=weights_only),
    "lars": optax.lars(1e-1, weight_decay=1e-2),
    "lion": optax.lion(optax.linear_schedule(1e-3, 1e-4, 9)),
    "muon": optax.contrib.muon(1e-2),
    "injected": optax.inject_hyperparams(optax.adamw)(optax.exponential_decay(1e-2, 2, 0.5), weight_decay=1e-3),
    "ema_of_gradients": optax.chain(optax.ema(0.9), optax.scale(-0.1)),
    "partitioned": optax.partition({"frozen": optax.set_to_zero(), "trained": optax.adam(1e-2)}, frozen_first_layer),
    "apply_if_finite": optax.apply_if_finite(optax.rmsprop(1e-2), max_consecutive_errors=3),
    "centralized_adaptive_clip": optax.chain(optax.adaptive_grad_clip(0.1), optax.centralize(), optax.sgd(0.1)),
    "noisy": optax.chain(optax.add_noise(0.01, 0.55, jax.random.key(0)), optax.sgd(0.1)),
    "prodigy": optax.contrib.prodigy(),
    "trust_region": optax.chain(optax.scale_by_adam(), optax.scale_by_trust_ratio(), optax.scale(-1e-2)),
    "sync_mean": optax.chain(jdist.sync.mean(), optax.clip_by_block_rms(0.1), optax.yogi(1e-2)),
    "sync_every": jdist.sync.every(optax.chain(jdist.sync.mean(), optax.novograd(1e-2)), 2),
}


def classifier_step(name: str, tx: optax.GradientTransformation):
    """Registers the step of an optimizer; a policy of `jdist.sync` reduces the gradients itself."""

    @program(optimized(CLASSIFIER, tx), FEATURES, LABELS, name=f"optax_{name}")
    def step(state, x, labels):
        loss, grads = jax.value_and_grad(classifier_loss)(state["params"], x, labels)
        grads = grads if name.startswith("sync") else pmean(grads)
        return updated(tx, state, grads), pmean(loss)


for optimizer_name, optimizer in OPTIMIZERS.items():
    classifier_step(optimizer_name, optimizer)


LOOKAHEAD = optax.lookahead(optax.sgd(0.1), sync_period=2, slow_step_size=0.5)


@program(optimized(lambda: optax.LookaheadParams.init_synced(CLASSIFIER()), LOOKAHEAD), FEATURES, LABELS)
def optax_lookahead(state, x, labels):
    loss, grads = jax.value_and_grad(classifier_loss)(state["params"].fast, x, labels)
    return updated(LOOKAHEAD, state, pmean(grads)), pmean(loss)


LBFGS = optax.lbfgs(memory_size=3, linesearch=optax.scale_by_zoom_linesearch(max_linesearch_steps=5))


@program(optimized(CLASSIFIER, LBFGS), FEATURES, LABELS)
def optax_lbfgs(state, x, labels):
    example_loss = lambda params, x, labels: optax.softmax_cross_entropy_with_integer_labels(mlp(params, x), labels)
    value_fn = lambda params: jdist.global_loss(example_loss)(params, x, labels)
    value, grad = optax.value_and_grad_from_state(value_fn)(state["params"], state=state["opt_state"])
    updates, opt_state = LBFGS.update(
        grad, state["opt_state"], state["params"], value=value, grad=grad, value_fn=value_fn
    )
    params = optax.apply_updates(state["params"], updates)
    return state | {"params": params, "opt_state": opt_state, "step": state["step"] + 1}, value


@program(optimized(CLASSIFIER, MOMENTUM), FEATURES, LABELS)
def sharpness_aware(state, x, labels):
    grad_fn = jax.grad(classifier_loss)
    grads = pmean(grad_fn(state["params"], x, labels))
    radius = 0.05 / (optax.tree.norm(grads) + 1e-12)
    perturbed = jax.tree.map(lambda param, grad: param + radius * grad, state["params"], grads)
    return updated(MOMENTUM, state, pmean(grad_fn(perturbed, x, labels))), optax.tree.norm(grads)


PLATEAU = optax.chain(optax.adam(1e-2), optax.contrib.reduce_on_plateau(patience=1, accumulation_size=1))


@program(optimized(CLASSIFIER, PLATEAU, ema=lambda params: params), FEATURES, LABELS)
def plateau_and_ema(state, x, labels):
    loss, grads = pmean(jax.value_and_grad(classifier_loss)(state["params"], x, labels))
    updates, opt_state = PLATEAU.update(grads, state["opt_state"], state["params"], value=loss)
    params = optax.apply_updates(state["params"], updates)
    decay = jnp.minimum(0.99, (1 + state["step"]) / (10 + state["step"]))
    ema = jax.tree.map(lambda old, new: decay * old + (1 - decay) * new, state["ema"], params)
    return {"params": params, "opt_state": opt_state, "step": state["step"] + 1, "ema": ema}, loss


@program(optimized(CLASSIFIER, ADAM), FEATURES, LABELS)
def accumulated_micro_batches(state, x, labels):
    def accumulate(total, micro_batch):
        return jax.tree.map(jnp.add, total, jax.value_and_grad(classifier_loss)(state["params"], *micro_batch)), None

    zeros = jnp.float32(0), jax.tree.map(jnp.zeros_like, state["params"])
    (loss, grads), _ = lax.scan(accumulate, zeros, (x.reshape(2, -1, WIDTH), labels.reshape(2, -1)))
    loss, grads = pmean(jax.tree.map(lambda value: value / 2, (loss, grads)))
    return updated(ADAM, state, grads), loss


@program(optimized(CLASSIFIER, ADAM, loss_ema=lambda _: jnp.float32(2)), FEATURES, LABELS)
def skipped_spikes(state, x, labels):
    loss, grads = pmean(jax.value_and_grad(classifier_loss)(state["params"], x, labels))
    is_spike = (loss > 2 * state["loss_ema"]) | ~jnp.isfinite(optax.tree.norm(grads))
    new_state = updated(ADAM, state, grads, loss_ema=0.9 * state["loss_ema"] + 0.1 * loss)
    return lax.cond(is_spike, lambda: state | {"step": state["step"] + 1}, lambda: new_state), is_spike


@program(optimized(CLASSIFIER, MOMENTUM), FEATURES, LABELS)
def several_steps_per_call(state, x, labels):
    def body(_, state):
        return updated(MOMENTUM, state, pmean(jax.grad(classifier_loss)(state["params"], x, labels)))

    return lax.fori_loop(0, 3, body, state), None


# Reinforcement learning ----------------------------------------------------------------------------------------------

OBSERVATIONS, REWARDS = normal(TIME + 1, 3), normal(TIME, seed=2)
ACTIONS, DONES = integers(CLASSES, TIME), (integers(5, TIME) == 0).astype(np.float32)


def log_prob_of(logits, actions):
    return jnp.take_along_axis(jax.nn.log_softmax(logits), actions[..., None], -1)[..., 0]


def advantage_estimates(rewards, values, dones, discount=0.99, gae_lambda=0.95):
    """Returns generalized advantage estimates of one trajectory, `[time]`; `values` are `[time + 1]`."""

    def backwards(advantage, transition):
        reward, value, next_value, done = transition
        delta = reward + discount * next_value * (1 - done) - value
        advantage = delta + discount * gae_lambda * (1 - done) * advantage
        return advantage, advantage

    return lax.scan(backwards, jnp.float32(0), (rewards, values[:-1], values[1:], dones), reverse=True)[1]


CLIPPED_ADAM = optax.chain(optax.clip_by_global_norm(0.5), optax.adam(1e-2, eps=1e-5))
actor_critic = lambda: {"actor": mlp_params(3, 8, CLASSES), "critic": mlp_params(3, 8, 1, seed=1)}


@program(optimized(actor_critic, CLIPPED_ADAM, key=lambda _: jax.random.key(3)), OBSERVATIONS, ACTIONS, REWARDS, DONES)
def ppo(state, observations, actions, rewards, dones):
    old_params = state["params"]
    values = mlp(old_params["critic"], observations)[..., 0]
    old_log_probs = log_prob_of(mlp(old_params["actor"], observations[:, :-1]), actions)
    advantages = jax.vmap(advantage_estimates)(rewards, values, dones)
    returns = advantages + values[:, :-1]
    mean = pmean(advantages.mean())
    advantages = (advantages - mean) / (jnp.sqrt(pmean(jnp.mean((advantages - mean) ** 2))) + 1e-8)
    key, next_key = jax.random.split(state["key"])

    def loss_fn(params, indices):
        take = lambda x: x[:, indices]
        logits = mlp(params["actor"], take(observations))
        ratio = jnp.exp(log_prob_of(logits, take(actions)) - take(old_log_probs))
        gain = jnp.minimum(ratio * take(advantages), jnp.clip(ratio, 0.8, 1.2) * take(advantages)).mean()
        value_loss = jnp.mean((mlp(params["critic"], take(observations))[..., 0] - take(returns)) ** 2)
        entropy = -jnp.sum(jax.nn.softmax(logits) * jax.nn.log_softmax(logits), -1).mean()
        return 0.5 * value_loss - gain - 0.01 * entropy

    def minibatch(state, indices):
        loss, grads = pmean(jax.value_and_grad(loss_fn)(state["params"], indices))
        return updated(CLIPPED_ADAM, state, grads), loss

    def epoch(state, key):
        return lax.scan(minibatch, state, jax.random.permutation(key, TIME).reshape(2, -1))

    state, losses = lax.scan(epoch, state, jax.random.split(key, 2))
    return state | {"key": next_key}, losses.mean()


@program(optimized(actor_critic, CLIPPED_ADAM), OBSERVATIONS, ACTIONS, REWARDS, DONES, normal(TIME, seed=3) / 9 - 1)
def impala_v_trace(state, observations, actions, rewards, dones, behaviour_log_probs):
    def loss_of_trajectory(params, observations, actions, rewards, dones, behaviour_log_probs):
        values = mlp(params["critic"], observations)[:, 0]
        logits = mlp(params["actor"], observations[:-1])
        ratios = jnp.minimum(1.0, jnp.exp(log_prob_of(logits, actions) - behaviour_log_probs))
        discounts = 0.99 * (1 - dones)
        deltas = ratios * (rewards + discounts * values[1:] - values[:-1])

        def backwards(correction, step):
            delta, discount, ratio = step
            return (correction := delta + discount * ratio * correction), correction

        _, corrections = lax.scan(backwards, jnp.float32(0), (deltas, discounts, ratios), reverse=True)
        targets = lax.stop_gradient(values[:-1] + corrections)
        next_targets = jnp.append(targets[1:], lax.stop_gradient(values[-1]))
        advantages = ratios * (rewards + discounts * next_targets - values[:-1])
        policy_loss = -jnp.mean(log_prob_of(logits, actions) * lax.stop_gradient(advantages))
        return policy_loss + 0.5 * jnp.mean((targets - values[:-1]) ** 2)

    batch = observations, actions, rewards, dones, behaviour_log_probs
    loss_fn = lambda params: jax.vmap(functools.partial(loss_of_trajectory, params))(*batch).mean()
    loss, grads = pmean(jax.value_and_grad(loss_fn)(state["params"]))
    return updated(CLIPPED_ADAM, state, grads), loss


Q_NETWORK = functools.partial(mlp_params, 3, 8, CLASSES)
TRANSITIONS = OBSERVATIONS[:, 0], ACTIONS[:, 0], REWARDS[:, 0], OBSERVATIONS[:, 1], DONES[:, 0]


@program(optimized(Q_NETWORK, ADAM, target=lambda params: jax.tree.map(jnp.copy, params)), *TRANSITIONS)
def double_dqn(state, observations, actions, rewards, next_observations, dones):
    best = mlp(state["params"], next_observations).argmax(-1)
    next_values = jnp.take_along_axis(mlp(state["target"], next_observations), best[:, None], 1)[:, 0]
    targets = rewards + 0.99 * (1 - dones) * next_values

    def loss_fn(params):
        values = jax.vmap(lambda row, action: row[action])(mlp(params, observations), actions)
        return optax.huber_loss(values, targets).mean()

    loss, grads = jax.value_and_grad(loss_fn)(state["params"])
    state = updated(ADAM, state, jdist.all_reduce("mean", grads))
    target = optax.periodic_update(state["params"], state["target"], state["step"], 2)
    return state | {"target": target}, jdist.all_reduce("mean", loss)


def sac_state():
    params = {
        "actor": mlp_params(3, 8, 4),
        "critics": jax.tree.map(lambda *x: jnp.stack(x), mlp_params(5, 8, 1, seed=1), mlp_params(5, 8, 1, seed=2)),
        "log_alpha": jnp.float32(0),
    }
    opt_states = {name: ADAM.init(value) for name, value in params.items()}
    return {"params": params, "target": params["critics"], "opt_states": opt_states, "key": jax.random.key(4)}


SAC_TRANSITIONS = OBSERVATIONS[:, 0], normal(2), REWARDS[:, 0], OBSERVATIONS[:, 1], DONES[:, 0]


@program(sac_state, *SAC_TRANSITIONS)
def soft_actor_critic(state, observations, actions, rewards, next_observations, dones):
    params, opt_states = dict(state["params"]), dict(state["opt_states"])
    next_key, critic_key, actor_key = jax.random.split(state["key"], 3)
    count = len(rewards)

    def sample(actor, observations, key):
        mean, log_std = jnp.split(mlp(actor, observations), 2, -1)
        noise = example_noise(key, count, 2)
        log_std = jnp.clip(log_std, -5, 2)
        action = jnp.tanh(mean + jnp.exp(log_std) * noise)
        return action, jnp.sum(-0.5 * noise**2 - log_std - jnp.log(1 - action**2 + 1e-6), -1)

    def q_values(critics, observations, actions):
        return jax.vmap(lambda critic: mlp(critic, jnp.concatenate([observations, actions], -1))[:, 0])(critics)

    def minimize(name, loss_fn):
        loss, grads = pmean(jax.value_and_grad(loss_fn)(params[name]))
        updates, opt_states[name] = ADAM.update(grads, opt_states[name], params[name])
        params[name] = optax.apply_updates(params[name], updates)
        return loss

    next_actions, next_log_probs = sample(params["actor"], next_observations, critic_key)
    alpha = jnp.exp(params["log_alpha"])
    next_values = q_values(state["target"], next_observations, next_actions).min(0) - alpha * next_log_probs
    targets = rewards + 0.99 * (1 - dones) * next_values

    def actor_loss(actor):
        sampled_actions, log_probs = sample(actor, observations, actor_key)
        return jnp.mean(alpha * log_probs - q_values(params["critics"], observations, sampled_actions).min(0))

    entropies = -sample(params["actor"], observations, actor_key)[1]
    losses = {
        "critic": minimize(
            "critics", lambda critics: jnp.mean((q_values(critics, observations, actions) - targets) ** 2)
        ),
        "actor": minimize("actor", actor_loss),
        "alpha": minimize("log_alpha", lambda log_alpha: jnp.exp(log_alpha) * jnp.mean(entropies + 0.5)),
    }
    target = optax.incremental_update(params["critics"], state["target"], 0.05)
    return {"params": params, "target": target, "opt_states": opt_states, "key": next_key}, losses


def normalizer_state():
    moments = {"count": jnp.float32(0), "mean": jnp.zeros(3), "squares": jnp.zeros(3)}
    return optimized(functools.partial(mlp_params, 3, 1), MOMENTUM, moments=lambda _: moments)()


@program(normalizer_state, OBSERVATIONS, REWARDS)
def reinforce_with_running_moments(state, observations, rewards):
    """Normalizes observations with running moments of all replicas, by the update of Welford."""
    rows, old = observations[:, :-1].reshape(-1, 3), state["moments"]
    count = old["count"] + psum(len(rows))
    mean = old["mean"] + psum(jnp.sum(rows - old["mean"], 0)) / count
    squares = old["squares"] + psum(jnp.sum((rows - old["mean"]) * (rows - mean), 0))
    normalized = jnp.clip((observations[:, :-1] - mean) / jnp.sqrt(squares / count + 1e-6), -5, 5)
    returns = jnp.flip(jnp.cumsum(jnp.flip(rewards, 1), 1), 1)
    returns -= pmean(returns.mean(0))

    def loss_fn(params):
        logits = mlp(params, normalized)[..., 0]
        return -jnp.mean(jax.nn.log_sigmoid(logits) * returns)

    grads = pmean(jax.grad(loss_fn)(state["params"]))
    moments = {"count": count, "mean": mean, "squares": squares}
    return updated(MOMENTUM, state, grads, moments=moments), pmean(returns.mean())


# Contrastive learning and teachers -----------------------------------------------------------------------------------


def unit(x):
    return x / (jnp.linalg.norm(x, axis=-1, keepdims=True) + 1e-6)


VIEW, OTHER_VIEW = FEATURES, FEATURES + 0.1 * normal(WIDTH, seed=5)
ENCODER = functools.partial(mlp_params, WIDTH, 8, 4)


@program(optimized(ENCODER, ADAM), VIEW, OTHER_VIEW)
def simclr(state, first, second):
    count = len(first)

    def loss_fn(params):
        own = jnp.stack([unit(mlp(params, first)), unit(mlp(params, second))])
        everything = lax.all_gather(own, AXIS, axis=1, tiled=True)
        positions = lax.axis_index(AXIS) * count + jnp.arange(count)
        itself = jax.nn.one_hot(positions, everything.shape[1])
        same_view = jnp.einsum("vbd,vnd->vbn", own, everything) / 0.5 - 1e9 * itself
        other_view = jnp.einsum("vbd,vnd->vbn", own, everything[::-1]) / 0.5
        logits = jnp.concatenate([other_view, same_view], -1)
        return optax.softmax_cross_entropy_with_integer_labels(logits, jnp.stack([positions] * 2)).mean()

    loss, grads = pmean(jax.value_and_grad(loss_fn)(state["params"]))
    return updated(ADAM, state, grads), loss


CLIP_TX = optax.partition(
    {"towers": optax.adamw(1e-2), "temperature": optax.adam(1e-3)},
    lambda params: {name: "temperature" if name == "scale" else "towers" for name in params},
)
clip_params = lambda: {"image": ENCODER(), "text": mlp_params(VOCAB, 4, seed=1), "scale": jnp.float32(np.log(10))}


@program(optimized(clip_params, CLIP_TX), FEATURES, TOKENS)
def clip(state, images, captions):
    def loss_fn(params):
        words = jax.nn.one_hot(captions, VOCAB) * (captions > 0)[..., None]
        image, text = unit(mlp(params["image"], images)), unit(mlp(params["text"], words.sum(1)))
        all_images, all_texts = jdist.all_gather(image, 0), jdist.all_gather(text, 0)
        scale = jnp.exp(params["scale"])
        labels = jdist.replica_id() * len(images) + jnp.arange(len(images))
        image_loss = cross_entropy(scale * image @ all_texts.T, labels)
        return 0.5 * (image_loss + cross_entropy(scale * text @ all_images.T, labels))

    loss, grads = jdist.all_reduce("mean", jax.value_and_grad(loss_fn)(state["params"]))
    state = updated(CLIP_TX, state, grads)
    scale = jnp.clip(state["params"]["scale"], 0, np.log(100))
    return state | {"params": state["params"] | {"scale": scale}}, loss


class Projector(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.Dense(8, use_bias=False)(x)
        x = nn.relu(nn.BatchNorm(use_running_average=False, axis_name=AXIS)(x))
        return nn.Dense(4)(x)


def byol_state():
    online = Projector().init(jax.random.key(0), FEATURES[:2])
    params = {"projector": online["params"], "predictor": mlp_params(4, 8, 4)}
    state = {"params": params, "target": online["params"], "batch_stats": online["batch_stats"]}
    return state | {"opt_state": MOMENTUM.init(params), "step": jnp.int32(0)}


@program(byol_state, VIEW, OTHER_VIEW)
def byol(state, first, second):
    def project(projector, batch_stats, x):
        outputs, new = Projector().apply({"params": projector, "batch_stats": batch_stats}, x, mutable=["batch_stats"])
        return outputs, new["batch_stats"]

    def loss_fn(params):
        loss, batch_stats = 0.0, state["batch_stats"]
        for view, other in ((first, second), (second, first)):
            online, batch_stats = project(params["projector"], batch_stats, view)
            target, _ = project(state["target"], batch_stats, other)
            loss += jnp.mean(
                jnp.sum((unit(mlp(params["predictor"], online)) - lax.stop_gradient(unit(target))) ** 2, -1)
            )
        return loss, batch_stats

    (loss, batch_stats), grads = jax.value_and_grad(loss_fn, has_aux=True)(state["params"])
    decay = 1 - 0.05 * (jnp.cos(jnp.pi * state["step"] / 10) + 1) / 2
    state = updated(MOMENTUM, state, pmean(grads), batch_stats=batch_stats)
    target = optax.incremental_update(state["params"]["projector"], state["target"], 1 - decay)
    return state | {"target": target}, pmean(loss)


def dino_state():
    make_state = optimized(ENCODER, ADAM, teacher=lambda params: params, center=lambda _: jnp.zeros(4))
    return make_state()


@program(dino_state, VIEW, OTHER_VIEW)
def dino(state, first, second):
    teacher_logits = mlp(state["teacher"], second)
    targets = jax.nn.softmax((teacher_logits - state["center"]) / 0.1)

    def loss_fn(params):
        return optax.softmax_cross_entropy(mlp(params, first) / 0.5, targets).mean()

    loss, grads = jax.value_and_grad(loss_fn)(state["params"])
    center = 0.9 * state["center"] + 0.1 * pmean(teacher_logits.mean(0))
    state = updated(ADAM, state, pmean(grads), center=center)
    return state | {"teacher": optax.incremental_update(state["params"], state["teacher"], 0.01)}, pmean(loss)


@program(optimized(lambda: {"encoder": ENCODER(), "prototypes": mlp_params(4, 3, seed=1)}, ADAM), VIEW, OTHER_VIEW)
def swav(state, first, second):
    def assignments(scores):
        """Returns soft assignments that use all prototypes equally in the global batch: Sinkhorn's iteration."""
        q = jnp.exp((scores - lax.pmax(scores.max(), AXIS)) / 0.25)
        for _ in range(3):
            q = q / psum(q.sum(0)) / q.shape[1]
            q = q / q.sum(1, keepdims=True)
        return lax.stop_gradient(q)

    def loss_fn(params):
        scores = [mlp(params["prototypes"], unit(mlp(params["encoder"], view))) for view in (first, second)]
        codes = [assignments(lax.stop_gradient(score)) for score in scores]
        return 0.5 * sum(
            optax.softmax_cross_entropy(score / 0.25, code).mean()
            for score, code in zip(scores, codes[::-1], strict=True)
        )

    loss, grads = pmean(jax.value_and_grad(loss_fn)(state["params"]))
    return updated(ADAM, state, grads), loss


@program(optimized(CLASSIFIER, ADAM, teacher=lambda _: mlp_params(WIDTH, 16, CLASSES, seed=7)), FEATURES, LABELS)
def distillation(state, x, labels):
    soft_targets = jax.nn.softmax(mlp(state["teacher"], x) / 2)

    def loss_fn(params):
        logits = mlp(params, x)
        return 0.5 * cross_entropy(logits, labels) + 2 * optax.softmax_cross_entropy(logits / 2, soft_targets).mean()

    return updated(ADAM, state, pmean(jax.grad(loss_fn)(state["params"]))), None


# Generative models, augmentation, meta-learning ----------------------------------------------------------------------


@program(
    optimized(
        lambda: mlp_params(WIDTH + 1, 16, WIDTH), ADAM, ema=lambda params: params, key=lambda _: jax.random.key(5)
    ),
    FEATURES,
)
def ddpm(state, x):
    keys = example_keys(jax.random.fold_in(state["key"], state["step"]), len(x))
    alphas = jnp.cumprod(1 - jnp.linspace(1e-4, 0.2, 20))

    def example_loss(params, x, key):
        time_key, noise_key = jax.random.split(key)
        t = jax.random.randint(time_key, (), 0, 20)
        noise = jax.random.normal(noise_key, x.shape)
        noisy = jnp.sqrt(alphas[t]) * x + jnp.sqrt(1 - alphas[t]) * noise
        return jnp.mean((mlp(params, jnp.append(noisy, t / 20.0)) - noise) ** 2)

    loss_fn = lambda params: jax.vmap(example_loss, (None, 0, 0))(params, x, keys).mean()
    loss, grads = pmean(jax.value_and_grad(loss_fn)(state["params"]))
    state = updated(ADAM, state, grads)
    return state | {"ema": optax.incremental_update(state["params"], state["ema"], 0.001)}, loss


def gan_state():
    params = {"generator": mlp_params(3, 8, WIDTH), "discriminator": mlp_params(WIDTH, 8, 1, seed=1)}
    return {"params": params, "opt_states": jax.tree.map(ADAM.init, params, is_leaf=lambda x: isinstance(x, list))}


@program(gan_state, FEATURES, normal(3))
def gan(state, real, latent):
    params, opt_states = dict(state["params"]), dict(state["opt_states"])
    discriminate = lambda discriminator, x: mlp(discriminator, x)[:, 0]

    def discriminator_loss(discriminator):
        fake = mlp(params["generator"], latent)
        loss = jax.nn.softplus(-discriminate(discriminator, real)).mean()
        loss += jax.nn.softplus(discriminate(discriminator, fake)).mean()
        slopes = jax.vmap(jax.grad(lambda x: discriminate(discriminator, x[None])[0]))(real)
        return loss + 0.1 * jnp.mean(jnp.sum(slopes**2, -1))

    def generator_loss(generator):
        return jax.nn.softplus(-discriminate(params["discriminator"], mlp(generator, latent))).mean()

    losses = {}
    for name, loss_fn in (("discriminator", discriminator_loss), ("generator", generator_loss)):
        losses[name], grads = jdist.all_reduce("mean", jax.value_and_grad(loss_fn)(params[name]))
        updates, opt_states[name] = ADAM.update(grads, opt_states[name], params[name])
        params[name] = optax.apply_updates(params[name], updates)
    return {"params": params, "opt_states": opt_states}, losses


def codebook(_):
    codes = jax.random.normal(jax.random.key(6), (5, 3))
    return {"codes": codes, "counts": jnp.ones(5), "sums": codes}


autoencoder = lambda: {"encoder": mlp_params(WIDTH, 8, 3), "decoder": mlp_params(3, 8, WIDTH, seed=1)}


@program(optimized(autoencoder, ADAM, codebook=codebook), FEATURES)
def vq_vae(state, x):
    codes = state["codebook"]["codes"]

    def loss_fn(params):
        latent = mlp(params["encoder"], x)
        index = jnp.sum((latent[:, None] - codes) ** 2, -1).argmin(-1)
        quantized = latent + lax.stop_gradient(codes[index] - latent)
        commitment = jnp.mean((lax.stop_gradient(codes[index]) - latent) ** 2)
        return jnp.mean((mlp(params["decoder"], quantized) - x) ** 2) + 0.25 * commitment, (latent, index)

    (loss, (latent, index)), grads = jax.value_and_grad(loss_fn, has_aux=True)(state["params"])
    one_hot = jax.nn.one_hot(index, len(codes))
    counts = 0.9 * state["codebook"]["counts"] + 0.1 * psum(one_hot.sum(0))
    sums = 0.9 * state["codebook"]["sums"] + 0.1 * psum(one_hot.T @ latent)
    smoothed = (counts + 1e-5) / (counts.sum() + 5e-5) * counts.sum()
    new_codebook = {"codes": sums / smoothed[:, None], "counts": counts, "sums": sums}
    return updated(ADAM, state, pmean(grads), codebook=new_codebook), pmean(loss)


@program(optimized(CLASSIFIER, MOMENTUM, key=lambda _: jax.random.key(7)), FEATURES, LABELS, in_distribution=True)
def mixup(state, x, labels):
    """Mixes each example with one of the global batch: a partner of the same replica has another distribution."""
    order_key, weight_key = jax.random.split(jax.random.fold_in(state["key"], state["step"]))
    own = jdist.replica_id() * len(x) + jnp.arange(len(x))
    partners = jax.random.permutation(order_key, len(x) * jdist.num_replicas())[own]
    weight = jax.random.beta(jdist.replica_key(weight_key), 0.4, 0.4, (len(x), 1))
    one_hot = jax.nn.one_hot(labels, CLASSES)
    mixed, targets = (weight * a + (1 - weight) * jdist.all_gather(a, 0)[partners] for a in (x, one_hot))
    loss_fn = lambda params: optax.softmax_cross_entropy(mlp(params, mixed), targets).mean()
    loss, grads = pmean(jax.value_and_grad(loss_fn)(state["params"]))
    return updated(MOMENTUM, state, grads), loss


@program(optimized(CLASSIFIER, MOMENTUM, key=lambda _: jax.random.key(8)), FEATURES, LABELS)
def augmented_by_example_key(state, x, labels):
    def augment(key, x):
        flip_key, mask_key = jax.random.split(key)
        x = jnp.where(jax.random.bernoulli(flip_key), x[::-1], x)
        return x * jax.random.bernoulli(mask_key, 0.8, x.shape)

    key, next_key = jax.random.split(state["key"])
    augmented = jax.vmap(augment)(example_keys(key, len(x)), x)
    grads = pmean(jax.grad(classifier_loss)(state["params"], augmented, labels))
    return updated(MOMENTUM, state, grads, key=next_key), None


TASKS = normal(5, 1), normal(5, 1, seed=1), normal(5, 1, seed=2), normal(5, 1, seed=3)


@program(optimized(functools.partial(mlp_params, 1, 8, 1), ADAM), *TASKS)
def maml(state, *tasks):
    error = lambda params, x, y: jnp.mean((mlp(params, x) - y) ** 2)

    def task_loss(params, x_support, y_support, x_query, y_query):
        for _ in range(2):
            grads = jax.grad(error)(params, x_support, y_support)
            params = jax.tree.map(lambda param, grad: param - 0.1 * grad, params, grads)
        return error(params, x_query, y_query)

    outer_loss = lambda params: jax.vmap(functools.partial(task_loss, params))(*tasks).mean()
    loss, grads = pmean(jax.value_and_grad(outer_loss)(state["params"]))
    return updated(ADAM, state, grads), loss


@program(optimized(functools.partial(mlp_params, 1, 8, 1), ADAM), NUMBERS)
def physics_informed(state, x):
    """Solves u'' = -u with u(0) = 0 and u'(0) = 1, with a residual per example."""

    def loss_fn(params):
        u = lambda x: mlp(params, x[None])[0]
        residual = jax.vmap(lambda x: jax.grad(jax.grad(u))(x) + u(x))(x[:, 0])
        slope = jax.grad(u)(jnp.float32(0))
        return jnp.mean(residual**2) + u(jnp.float32(0)) ** 2 + (slope - 1) ** 2

    loss, grads = pmean(jax.value_and_grad(loss_fn)(state["params"]))
    return updated(ADAM, state, grads), loss


@program(optimized(functools.partial(mlp_params, WIDTH, 8, WIDTH), ADAM), FEATURES, OTHER_VIEW)
def neural_ode(state, x, targets):
    def loss_fn(params):
        def runge_kutta(x, _):
            k1 = mlp(params, x)
            k2 = mlp(params, x + 0.1 * k1)
            return x + 0.1 * (k1 + k2), None

        return jnp.mean((lax.scan(jax.checkpoint(runge_kutta), x, length=4)[0] - targets) ** 2)

    loss, grads = pmean(jax.value_and_grad(loss_fn)(state["params"]))
    return updated(ADAM, state, grads), loss


# Experts, embedding tables -------------------------------------------------------------------------------------------


def expert_params():
    experts = jax.vmap(lambda key: jax.random.normal(key, (WIDTH, WIDTH)) / 3)(jax.random.split(jax.random.key(0), 4))
    return {"router": mlp_params(WIDTH, 4), "experts": experts, "head": mlp_params(WIDTH, CLASSES, seed=1)}


@program(optimized(expert_params, ADAM), normal(TIME, WIDTH), LABELS)
def mixture_of_experts(state, x, labels):
    rows = x.reshape(-1, WIDTH)

    def loss_fn(params):
        probabilities = jax.nn.softmax(mlp(params["router"], rows))
        gates, chosen = lax.top_k(probabilities, 2)
        gates /= gates.sum(-1, keepdims=True)
        combine = jnp.einsum("nk,nke->ne", gates, jax.nn.one_hot(chosen, 4))
        outputs = jnp.einsum("ne,nd,edf->nf", combine, rows, params["experts"])
        logits = mlp(params["head"], jnp.tanh(outputs).reshape(x.shape).mean(1))
        fractions = pmean(jax.nn.one_hot(chosen[:, 0], 4).mean(0))
        load_balance = 4 * jnp.sum(fractions * pmean(probabilities.mean(0)))
        return cross_entropy(logits, labels) + 0.01 * load_balance, fractions

    (loss, fractions), grads = jax.value_and_grad(loss_fn, has_aux=True)(state["params"])
    return updated(ADAM, state, pmean(grads)), {"loss": pmean(loss), "fractions": fractions}


def dlrm_params():
    tables = [0.1 * jax.random.normal(key, (7, 4)) for key in jax.random.split(jax.random.key(0), 3)]
    return {"tables": tables, "bottom": mlp_params(WIDTH, 8, 4), "top": mlp_params(4 + 6, 8, 1, seed=1)}


ADAGRAD = optax.adagrad(0.1)


@program(optimized(dlrm_params, ADAGRAD), FEATURES, integers(7, 3, 2), LABELS % 2)
def dlrm(state, dense, sparse, clicks):
    count = len(dense)

    def loss_fn(params):
        bottom = mlp(params["bottom"], dense)
        segments = jnp.repeat(jnp.arange(count), sparse.shape[2])
        bags = [
            jax.ops.segment_sum(table[sparse[:, i].reshape(-1)], segments, count)
            for i, table in enumerate(params["tables"])
        ]
        vectors = jnp.stack([bottom, *bags], 1)
        products = jnp.einsum("bid,bjd->bij", vectors, vectors)
        interactions = products[:, *np.triu_indices(4, 1)]
        logits = mlp(params["top"], jnp.concatenate([bottom, interactions], -1))[:, 0]
        return optax.sigmoid_binary_cross_entropy(logits, clicks).mean()

    loss, grads = jdist.all_reduce("mean", jax.value_and_grad(loss_fn)(state["params"]))
    return updated(ADAGRAD, state, grads), loss


def factors():
    users, items = (0.3 * jax.random.normal(jax.random.key(i), (n, 3)) for i, n in enumerate((9, 7)))
    return {"users": users, "items": items, "bias": jnp.float32(0)}


@program(factors, integers(9), integers(7), NUMBERS[:, 0])
def matrix_factorization(state, user, item, rating):
    """Sums the sparse gradients of each table over the rows of all replicas, and divides by the counts."""
    user_rows, item_rows = state["users"][user], state["items"][item]
    error = rating - state["bias"] - jnp.sum(user_rows * item_rows, -1)

    def table_update(table, indices, gradients):
        sums, counts = psum(
            (
                jax.ops.segment_sum(gradients, indices, len(table)),
                jax.ops.segment_sum(jnp.ones_like(error), indices, len(table)),
            )
        )
        return table + 0.1 * (sums / jnp.maximum(counts, 1)[:, None] - 0.01 * table)

    new_state = {
        "users": table_update(state["users"], user, error[:, None] * item_rows),
        "items": table_update(state["items"], item, error[:, None] * user_rows),
        "bias": state["bias"] + 0.1 * pmean(error.mean()),
    }
    return new_state, jnp.sqrt(pmean(jnp.mean(error**2)))


@program(optimized(lambda: 0.1 * jax.random.normal(jax.random.key(0), (VOCAB, 4)), MOMENTUM), TOKENS, TARGETS)
def word2vec_negative_sampling(state, words, contexts):
    def loss_fn(table):
        positive = jnp.einsum("btd,btd->bt", table[words], table[contexts])
        negative = jnp.einsum("btd,btd->bt", table[words], table[(contexts + words + 1) % VOCAB])
        return -jnp.mean(jax.nn.log_sigmoid(positive) + jax.nn.log_sigmoid(-negative))

    return updated(MOMENTUM, state, pmean(jax.grad(loss_fn)(state["params"]))), None


# Statistics that are sums over the examples --------------------------------------------------------------------------


@program(lambda: {"centers": jnp.array(FEATURES[:3]), "inertia": jnp.float32(0)}, FEATURES)
def k_means(state, x):
    distances = jnp.sum((x[:, None] - state["centers"]) ** 2, -1)
    one_hot = jax.nn.one_hot(distances.argmin(-1), 3)
    counts, sums = psum((one_hot.sum(0), one_hot.T @ x))
    centers = jnp.where(counts[:, None] > 0, sums / jnp.maximum(counts, 1)[:, None], state["centers"])
    return {"centers": centers, "inertia": psum(distances.min(-1).sum())}, counts


@program(lambda: {"centers": jnp.array(FEATURES[:3]), "counts": jnp.zeros(3)}, FEATURES)
def mini_batch_k_means(state, x):
    index = jnp.sum((x[:, None] - state["centers"]) ** 2, -1).argmin(-1)
    batch_counts = psum(jnp.bincount(index, length=3).astype(jnp.float32))
    batch_sums = psum(jax.ops.segment_sum(x, index, 3))
    counts = state["counts"] + batch_counts
    rate = (batch_counts / jnp.maximum(counts, 1))[:, None]
    target = batch_sums / jnp.maximum(batch_counts, 1)[:, None]
    return {"centers": (1 - rate) * state["centers"] + rate * target, "counts": counts}, None


def mixture():
    return {
        "weights": jnp.ones(3) / 3,
        "means": jnp.array(FEATURES[:3, :2]),
        "covariances": jnp.stack([jnp.eye(2)] * 3),
    }


@program(mixture, FEATURES[:, :2])
def gaussian_mixture_em(state, x):
    log_density = jax.vmap(jax.scipy.stats.multivariate_normal.logpdf, (None, 0, 0))(
        x, state["means"], state["covariances"]
    )
    joint = log_density.T + jnp.log(state["weights"])
    responsibilities = jax.nn.softmax(joint)
    counts, sums, products = psum(
        (responsibilities.sum(0), responsibilities.T @ x, jnp.einsum("nk,ni,nj->kij", responsibilities, x, x))
    )
    means = sums / counts[:, None]
    covariances = products / counts[:, None, None] - jnp.einsum("ki,kj->kij", means, means) + 1e-2 * jnp.eye(2)
    log_likelihood = psum(jax.nn.logsumexp(joint, axis=-1).sum())
    return {"weights": counts / counts.sum(), "means": means, "covariances": covariances}, log_likelihood


@program(lambda: {"xx": jnp.eye(WIDTH), "xy": jnp.zeros(WIDTH), "w": jnp.zeros(WIDTH)}, FEATURES, NUMBERS[:, 0])
def normal_equations(state, x, y):
    xx, xy = (total + psum(part) for total, part in ((state["xx"], x.T @ x), (state["xy"], x.T @ y)))
    w = jax.scipy.linalg.solve(xx, xy, assume_a="pos")
    return {"xx": xx, "xy": xy, "w": w}, psum(jnp.sum((x @ w - y) ** 2))


@program(lambda: {"w": jnp.zeros(WIDTH), "lambda": jnp.float32(0.1)}, FEATURES, LABELS % 2)
def newton_logistic_regression(state, x, labels):
    probabilities = jax.nn.sigmoid(x @ state["w"])
    gradient = psum(x.T @ (probabilities - labels)) + state["lambda"] * state["w"]
    hessian = psum((x.T * probabilities * (1 - probabilities)) @ x) + state["lambda"] * jnp.eye(WIDTH)
    return state | {"w": state["w"] - jnp.linalg.solve(hessian, gradient)}, jnp.linalg.norm(gradient)


@program(optimized(functools.partial(mlp_params, WIDTH, CLASSES), MOMENTUM), FEATURES, LABELS)
def hessian_free(state, x, labels):
    """Solves for a Gauss-Newton direction by conjugate gradients with products that are averaged."""
    grads = pmean(jax.grad(classifier_loss)(state["params"], x, labels))

    def product(direction):
        hvp = jax.jvp(jax.grad(lambda params: classifier_loss(params, x, labels)), (state["params"],), (direction,))[1]
        return jax.tree.map(lambda a, b: pmean(a) + 0.1 * b, hvp, direction)

    direction, _ = jax.scipy.sparse.linalg.cg(product, grads, maxiter=3)
    return updated(MOMENTUM, state, direction), optax.tree.norm(direction)


@program(lambda: {"mean": jnp.zeros(WIDTH), "basis": jnp.eye(WIDTH)[:, :2], "values": jnp.zeros(2)}, FEATURES)
def pca_subspace_iteration(state, x):
    mean = psum(x.sum(0)) / psum(len(x))
    centered = x - mean

    def iteration(_, carry):
        basis, _ = carry
        basis, upper = jnp.linalg.qr(psum(centered.T @ (centered @ basis)))
        return basis, jnp.abs(jnp.diag(upper))

    basis, values = lax.fori_loop(0, 4, iteration, (state["basis"], state["values"]))
    return {"mean": mean, "basis": basis, "values": values}, psum(jnp.sum(centered**2))


@program(lambda: {"vector": jnp.ones(WIDTH) / np.sqrt(WIDTH), "value": jnp.float32(0)}, FEATURES)
def power_iteration(state, x):
    def not_converged(carry):
        count, _, _, change = carry
        return (count < 5) & (change > 1e-4)

    def body(carry):
        count, vector, value, _ = carry
        product = psum(x.T @ (x @ vector))
        new_value = jnp.linalg.norm(product)
        return count + 1, product / new_value, new_value, jnp.abs(new_value - value)

    start = jnp.int32(0), state["vector"], state["value"], jnp.float32(jnp.inf)
    _, vector, value, _ = lax.while_loop(not_converged, body, start)
    return {"vector": vector, "value": value}, None


def metric_state():
    metrics = {"confusion": jnp.zeros((CLASSES, CLASSES), jnp.int32), "histogram": jnp.zeros(5), "best": -jnp.inf}
    return optimized(CLASSIFIER, MOMENTUM, metrics=lambda _: jax.tree.map(jnp.asarray, metrics))()


@program(metric_state, FEATURES, LABELS)
def metrics_in_state(state, x, labels):
    """Accumulates a confusion matrix, a histogram of confidences and the largest logit of all examples."""
    logits, pull_back = jax.vjp(lambda params: mlp(params, x), state["params"])
    cotangents = (jax.nn.softmax(logits) - jax.nn.one_hot(labels, CLASSES)) / psum(len(x))
    (grads,) = pull_back(cotangents)
    confusion = jnp.zeros((CLASSES, CLASSES), jnp.int32).at[labels, logits.argmax(-1)].add(1)
    histogram, _ = jnp.histogram(jax.nn.softmax(logits).max(-1), bins=5, range=(0, 1))
    metrics = {
        "confusion": state["metrics"]["confusion"] + psum(confusion),
        "histogram": state["metrics"]["histogram"] + psum(histogram),
        "best": jnp.maximum(state["metrics"]["best"], lax.pmax(logits.max(), AXIS)),
    }
    return updated(MOMENTUM, state, psum(grads), metrics=metrics), None


@struct.dataclass
class BoostingState:
    stump: jax.Array
    thresholds: jax.Array
    gains: jax.Array


@program(lambda: BoostingState(jnp.int32(0), jnp.linspace(-1, 1, 5), jnp.zeros((WIDTH, 5))), FEATURES, NUMBERS[:, 0])
def decision_stump(state, x, residuals):
    """Chooses a split by histograms of gradients that are summed over the replicas, as in distributed boosting."""
    left = (x[:, :, None] < state.thresholds).astype(jnp.float32)
    left_sum, left_count = psum((jnp.einsum("n,nft->ft", residuals, left), left.sum(0)))
    total_sum, total_count = psum((residuals.sum(), len(residuals)))
    gains = left_sum**2 / (left_count + 1) + (total_sum - left_sum) ** 2 / (total_count - left_count + 1)
    return state.replace(stump=jnp.argmax(gains).astype(jnp.int32), gains=gains), gains.max()


@program(
    lambda: {
        "start": jnp.ones(3) / 3,
        "move": jax.nn.softmax(jnp.eye(3)),
        "emit": jax.nn.softmax(jax.random.normal(jax.random.key(0), (3, VOCAB))),
    },
    TOKENS,
)
def hidden_markov_em(state, sequences):
    """Sums the expected counts of Baum and Welch, which are gradients of the log likelihood, over the replicas."""

    def log_likelihood(log_params, sequence):
        emissions = log_params["emit"][:, sequence].T

        def forward(alpha, emission):
            return jax.nn.logsumexp(alpha[:, None] + log_params["move"], 0) + emission, None

        alpha, _ = lax.scan(forward, log_params["start"] + emissions[0], emissions[1:])
        return jax.nn.logsumexp(alpha)

    total = lambda log_params: jax.vmap(functools.partial(log_likelihood, log_params))(sequences).sum()
    value, counts = psum(jax.value_and_grad(total)(jax.tree.map(jnp.log, state)))
    return jax.tree.map(lambda count: (count + 0.1) / (count + 0.1).sum(-1, keepdims=True), counts), value


@program(lambda: {"w": jnp.zeros(WIDTH), "key": jax.random.key(9), "accepted": jnp.int32(0)}, FEATURES, LABELS % 2)
def hamiltonian_monte_carlo(state, x, labels):
    """Draws the momentum from a replicated key, and accepts by the log density of the examples of all replicas."""
    key, momentum_key, accept_key = jax.random.split(state["key"], 3)
    local_energy = lambda w: optax.sigmoid_binary_cross_entropy(x @ w, labels).sum()

    def energy_and_force(w):
        energy, grad = psum(jax.value_and_grad(local_energy)(w))
        return energy + 0.5 * jnp.sum(w**2), grad + w

    def leapfrog(_, carry):
        w, momentum = carry
        momentum -= 0.05 * energy_and_force(w)[1]
        w += 0.1 * momentum
        return w, momentum - 0.05 * energy_and_force(w)[1]

    momentum = jax.random.normal(momentum_key, (WIDTH,))
    proposal, final_momentum = lax.fori_loop(0, 3, leapfrog, (state["w"], momentum))
    before = energy_and_force(state["w"])[0] + 0.5 * jnp.sum(momentum**2)
    after = energy_and_force(proposal)[0] + 0.5 * jnp.sum(final_momentum**2)
    accept = jnp.log(jax.random.uniform(accept_key)) < before - after
    w = jnp.where(accept, proposal, state["w"])
    return {"w": w, "key": key, "accepted": state["accepted"] + accept}, after - before


@program(optimized(functools.partial(mlp_params, WIDTH, CLASSES), ADAM), FEATURES, LABELS)
def evolution_strategies(state, x, labels):
    """Evaluates one pair of opposite perturbations per example index, and sums perturbations by their fitness."""
    flat, unflatten = jax.flatten_util.ravel_pytree(state["params"])
    noise = example_noise(jax.random.fold_in(jax.random.key(1), state["step"]), len(x), flat.size)
    everything = jdist.all_gather(x, 0), jdist.all_gather(labels, 0)
    fitness = jax.vmap(lambda direction: -classifier_loss(unflatten(flat + 0.1 * direction), *everything))
    scores = fitness(noise) - fitness(-noise)
    estimate = jdist.all_reduce("sum", scores @ noise) / jdist.all_reduce("sum", len(x)) / 0.2
    return updated(ADAM, state, unflatten(-estimate)), None


# Preconditioners, other normalizations of the loss -------------------------------------------------------------------


def factors_of_classifier(_):
    return {"inputs": jnp.eye(WIDTH), "outputs": jnp.eye(CLASSES)}


@program(optimized(lambda: mlp_params(WIDTH, CLASSES), MOMENTUM, factors=factors_of_classifier), FEATURES, LABELS)
def kronecker_factored_curvature(state, x, labels):
    logits = mlp(state["params"], x)
    errors = jax.nn.softmax(logits) - jax.nn.one_hot(labels, CLASSES)
    batch_factors = pmean({"inputs": x.T @ x / len(x), "outputs": errors.T @ errors / len(x)})
    factors = jax.tree.map(lambda old, new: 0.9 * old + 0.1 * new, state["factors"], batch_factors)
    inverse = lambda factor: jnp.linalg.inv(factor + 0.1 * jnp.eye(len(factor)))
    [gradient] = pmean(jax.grad(classifier_loss)(state["params"], x, labels))
    direction = [gradient | {"w": inverse(factors["inputs"]) @ gradient["w"] @ inverse(factors["outputs"])}]
    return updated(MOMENTUM, state, direction, factors=factors), None


@program(optimized(lambda: mlp_params(WIDTH, CLASSES), MOMENTUM, factors=factors_of_classifier), FEATURES, LABELS)
def shampoo(state, x, labels):
    def inverse_root(statistics):
        values, vectors = jnp.linalg.eigh(statistics)
        return (vectors * jnp.maximum(values, 1e-6) ** -0.25) @ vectors.T

    loss, [gradient] = pmean(jax.value_and_grad(classifier_loss)(state["params"], x, labels))
    left = state["factors"]["inputs"] + gradient["w"] @ gradient["w"].T
    right = state["factors"]["outputs"] + gradient["w"].T @ gradient["w"]
    direction = [gradient | {"w": inverse_root(left) @ gradient["w"] @ inverse_root(right)}]
    return updated(MOMENTUM, state, direction, factors={"inputs": left, "outputs": right}), loss


SOPHIA = optax.contrib.sophia(1e-2)


@program(optimized(CLASSIFIER, SOPHIA), FEATURES, LABELS)
def optax_sophia(state, x, labels):
    example_loss = lambda params, x, labels: optax.softmax_cross_entropy_with_integer_labels(mlp(params, x), labels)
    obj_fn = lambda params: jdist.global_loss(example_loss)(params, x, labels)
    loss, grads = jax.value_and_grad(obj_fn)(state["params"])
    updates, opt_state = SOPHIA.update(grads, state["opt_state"], state["params"], obj_fn=obj_fn)
    params = optax.apply_updates(state["params"], updates)
    return state | {"params": params, "opt_state": opt_state, "step": state["step"] + 1}, loss


@program(
    optimized(lambda: mlp_params(WIDTH, 8, CLASSES + 4), MOMENTUM), normal(9, WIDTH), integers(CLASSES, 9), normal(9, 4)
)
def focal_loss_detector(state, anchors, classes, boxes):
    """Divides the loss of all anchors by the number of positive anchors of the global batch."""
    is_positive = (classes > 0).astype(jnp.float32)
    positives = jnp.maximum(psum(is_positive.sum()), 1)

    def loss_fn(params):
        logits, offsets = jnp.split(mlp(params, anchors), [CLASSES], -1)
        one_hot = jax.nn.one_hot(classes, CLASSES)
        focal = optax.sigmoid_focal_loss(logits, one_hot, alpha=0.25, gamma=2).sum()
        box = jnp.sum(optax.huber_loss(offsets, boxes).sum(-1) * is_positive)
        return (focal + box) / positives

    loss, grads = psum(jax.value_and_grad(loss_fn)(state["params"]))
    return updated(MOMENTUM, state, grads), loss


@program(optimized(CLASSIFIER, MOMENTUM, group_weights=lambda _: jnp.ones(3) / 3), FEATURES, LABELS, integers(3))
def group_robust(state, x, labels, groups):
    counts = psum(jnp.bincount(groups, length=3).astype(jnp.float32))

    def group_losses(params):
        losses = optax.softmax_cross_entropy_with_integer_labels(mlp(params, x), labels)
        return jax.ops.segment_sum(losses, groups, 3) / jnp.maximum(counts, 1)

    losses, pull_back = jax.vjp(group_losses, state["params"])
    losses = psum(losses)
    weights = jax.nn.softmax(jnp.log(state["group_weights"]) + 0.1 * losses)
    (grads,) = pull_back(weights)
    return updated(MOMENTUM, state, psum(grads), group_weights=weights), losses


@program(optimized(lambda: mlp_params(WIDTH, 1)[0]["w"], MOMENTUM), FEATURES, NUMBERS[:, 0])
def listwise_ranking(state, x, relevance):
    """Computes one softmax over the items of all replicas: its normalizer is a sum over the replicas."""
    target_sum = psum(jnp.exp(relevance).sum())

    def loss_fn(params):
        scores = (x @ params)[:, 0]
        largest = lax.pmax(lax.stop_gradient(scores.max()), AXIS)
        log_normalizer = jnp.log(psum(jnp.exp(scores - largest).sum())) + largest
        return -jnp.sum(jnp.exp(relevance) / target_sum * (scores - log_normalizer))

    loss, grads = psum(jax.value_and_grad(loss_fn)(state["params"]))
    return updated(MOMENTUM, state, grads), loss


# States with a value per replica, and functions of jdist in place of other libraries ---------------------------------


def average_loss_state():
    counters = {"examples": jdist.SyncOnRead(jnp.int32(0), "sum"), "correct": jdist.SyncOnRead(jnp.float32(0), "sum")}
    return optimized(CLASSIFIER, ADAM)() | {"counters": counters}


@program(average_loss_state, FEATURES, LABELS)
def tf_distribute_average_loss(state, x, labels):
    def loss_fn(params):
        logits = mlp(params, x)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
        l2 = 1e-3 * sum(jnp.sum(layer["w"] ** 2) for layer in params)
        return jdist.compute_average_loss(losses) + jdist.scale_regularization_loss(l2), logits

    (loss, logits), grads = jax.value_and_grad(loss_fn, has_aux=True)(state["params"])
    loss, grads = jdist.all_reduce("sum", (loss, grads))
    counters = {
        "examples": state["counters"]["examples"] + len(x),
        "correct": state["counters"]["correct"] + jnp.sum(logits.argmax(-1) == labels),
    }
    return updated(ADAM, state, grads, counters=counters), loss


ACCELERATED = optax.chain(jdist.sync.mean(), optax.clip_by_global_norm(1.0), optax.adamw(1e-2))


@program(optimized(CLASSIFIER, ACCELERATED), FEATURES, LABELS)
def accelerate_micro_batches(state, x, labels):
    example_loss = lambda params, x, labels: optax.softmax_cross_entropy_with_integer_labels(mlp(params, x), labels)
    loss, grads = jdist.value_and_grad(example_loss, micro_batches=2)(state["params"], x, labels)
    return updated(ACCELERATED, state, grads), jdist.all_reduce("mean", loss)


def stateful_lstm_state():
    carry = jnp.zeros((EXAMPLES // jdist.num_replicas(), WIDTH))
    return optimized(linen(StatefulLSTM(), *STATEFUL), ADAM)() | {"carry": jdist.Sharded((carry, carry))}


class StatefulLSTM(nn.Module):
    @nn.compact
    def __call__(self, inputs, cell, hidden):
        rnn = nn.RNN(nn.LSTMCell(WIDTH), return_carry=True)
        carry, outputs = rnn(nn.Embed(VOCAB, WIDTH)(inputs), initial_carry=(cell, hidden))
        return nn.Dense(VOCAB)(outputs), carry


STATEFUL = TOKENS, np.zeros((EXAMPLES, WIDTH), np.float32), np.zeros((EXAMPLES, WIDTH), np.float32)


@program(stateful_lstm_state, TOKENS, TARGETS)
def stateful_lstm(state, inputs, targets):
    """Continues the recurrent state of each example from the previous batch, without its gradient."""

    def loss_fn(params):
        logits, carry = StatefulLSTM().apply({"params": params}, inputs, *state["carry"])
        return cross_entropy(logits, targets), carry

    (loss, carry), grads = jax.value_and_grad(loss_fn, has_aux=True)(state["params"])
    return updated(ADAM, state, pmean(grads), carry=lax.stop_gradient(carry)), pmean(loss)


LOSS_SCALED = jdist.sync.skip_nonfinite(optax.chain(jdist.sync.mean(), optax.adam(1e-2)))


@program(optimized(CLASSIFIER, LOSS_SCALED), FEATURES, LABELS)
def skip_nonfinite(state, x, labels):
    loss, grads = jax.value_and_grad(classifier_loss)(state["params"], x, labels)
    return updated(LOSS_SCALED, state, grads), jdist.all_reduce("mean", loss)


# Plain JAX: pmap -----------------------------------------------------------------------------------------------------


def pmapped(step, make_state, *batch: np.ndarray, num_devices: int, axis_name: str = "batch"):
    """Returns the `pmap` of a step, and a replicated state with the batch split over the devices."""
    devices = jax.devices()[:num_devices]
    state = jax_utils.replicate(make_state(), devices)
    shards = [x.reshape(num_devices, -1, *x.shape[1:]) for x in batch]
    return jax.pmap(step, axis_name=axis_name, devices=devices), (state, *shards)


def global_update(tx, state, loss_fn, reduce):
    """Returns the state after an update with reduced gradients, and the reduced loss."""
    loss, grads = reduce(jax.value_and_grad(loss_fn)(state["params"]))
    return updated(tx, state, grads), loss


@foreign("pmap")
def pmap_mnist(num_devices):
    def train_step(state, batch):
        def loss_fn(params):
            logits = state.apply_fn({"params": params}, batch["image"])
            return optax.softmax_cross_entropy(logits, common_utils.onehot(batch["label"], CLASSES)).mean(), logits

        (loss, logits), grads = jax.value_and_grad(loss_fn, has_aux=True)(state.params)
        grads = lax.pmean(grads, axis_name="batch")
        metrics = {"loss": loss, "accuracy": jnp.mean(logits.argmax(-1) == batch["label"])}
        return state.apply_gradients(grads=grads), lax.pmean(metrics, axis_name="batch")

    devices = jax.devices()[:num_devices]
    state = TrainState.create(apply_fn=CNN().apply, params=linen(CNN(), IMAGES)(), tx=MOMENTUM)
    batch = {"image": IMAGES, "label": LABELS}
    shards = jax.tree.map(lambda x: x.reshape(num_devices, -1, *x.shape[1:]), batch)
    return jax.pmap(train_step, "batch", devices=devices), (jax_utils.replicate(state, devices), shards)


@foreign("pmap")
def pmap_resnet_dynamic_scale(num_devices):
    return pmapped(imagenet_resnet, resnet_state, IMAGES, LABELS, num_devices=num_devices, axis_name=AXIS)


@foreign("pmap")
def pmap_transformer_token_weights(num_devices):
    def train_step(state, inputs, targets):
        weights = (targets > 0).astype(jnp.float32)

        def loss_fn(params):
            return smoothed_cross_entropy(EncoderDecoder().apply({"params": params}, inputs, targets), targets, weights)

        loss, grads = jax.value_and_grad(loss_fn)(state["params"])
        loss, grads, denominator = lax.psum((loss, grads, weights.sum()), "batch")
        grads = jax.tree.map(lambda grad: grad / denominator, grads)
        return updated(RSQRT, state, grads), {"loss": loss, "denominator": denominator}

    make_state = optimized(linen(EncoderDecoder(), TOKENS, TARGETS), RSQRT)
    return pmapped(train_step, make_state, TOKENS, TARGETS, num_devices=num_devices)


@foreign("pmap", in_distribution=True)
def pmap_dropout_keys(num_devices):
    """Carries one key per device, in the style of `shard_prng_key`."""

    def train_step(state, keys, inputs):
        dropout_key, new_key = jax.random.split(keys)

        def loss_fn(params):
            logits = LanguageModel().apply({"params": params}, inputs, rngs={"dropout": dropout_key})
            return cross_entropy(logits, inputs)

        state, loss = global_update(CLIPPED_ADAMW, state, loss_fn, lambda tree: lax.pmean(tree, "batch"))
        return state, new_key, loss

    make_state = optimized(language_model_params, CLIPPED_ADAMW)
    step, (state, inputs) = pmapped(train_step, make_state, TOKENS, num_devices=num_devices)
    return step, (state, jax.random.split(jax.random.PRNGKey(0), num_devices), inputs)


@foreign("pmap")
def pmap_anakin(num_devices):
    """Trains in environments inside the step: vectorized over a batch axis, and replicated over a device axis."""

    def environment_step(position, action):
        position = 0.9 * position + 0.1 * (action - 1.5)
        return position, -jnp.sum(position**2)

    def loss_fn(params, position, key):
        def move(position, key):
            logits = mlp(params, position)
            action = jax.random.categorical(key, logits)
            position, reward = environment_step(position, action)
            return position, (log_prob_of(logits, action), reward)

        position, (log_probs, rewards) = lax.scan(move, position, jax.random.split(key, TIME))
        returns = jnp.cumsum(rewards[::-1])[::-1]
        return -jnp.mean(log_probs * lax.stop_gradient(returns)), position

    def one_environment(state, position, key):
        (loss, position), grads = jax.value_and_grad(loss_fn, has_aux=True)(state["params"], position, key)
        grads = lax.pmean(lax.pmean(grads, "batch"), "device")
        return updated(ADAM, state, grads), position, lax.pmean(loss, ("batch", "device"))

    def train_step(state, positions, keys):
        vectorized = jax.vmap(one_environment, (None, 0, 0), (None, 0, None), axis_name="batch")
        return vectorized(state, positions, keys)

    make_state = optimized(functools.partial(mlp_params, 3, 8, CLASSES), ADAM)
    keys = np.asarray(jax.random.split(jax.random.PRNGKey(0), EXAMPLES))
    return pmapped(train_step, make_state, normal(3), keys, num_devices=num_devices, axis_name="device")


@foreign("pmap")
def pmap_scan_of_steps(num_devices):
    def train_steps(state, x, labels):
        def body(state, batch):
            loss_fn = lambda params: classifier_loss(params, *batch)
            return global_update(MOMENTUM, state, loss_fn, lambda tree: lax.pmean(tree, "batch"))

        return lax.scan(body, state, (x.reshape(2, -1, WIDTH), labels.reshape(2, -1)))

    # The examples of one step are consecutive on each device: two global batches, in the order of the devices.
    order = np.arange(EXAMPLES).reshape(2, num_devices, -1).swapaxes(0, 1).reshape(-1)
    make_state = optimized(CLASSIFIER, MOMENTUM)
    return pmapped(train_steps, make_state, FEATURES[order], LABELS[order], num_devices=num_devices)


# Plain JAX: shard_map over one axis ----------------------------------------------------------------------------------


def data_mesh(num_devices: int) -> Mesh:
    return Mesh(np.array(jax.devices()[:num_devices]), ("data",))


@foreign("shard_map")
def shard_map_mean_loss(num_devices):
    """Differentiates the mean of the loss over the devices, so that its transpose reduces the gradients."""

    def train_step(state, x, labels):
        loss_fn = lambda params: lax.pmean(classifier_loss(params, x, labels), "data")
        return global_update(MOMENTUM, state, loss_fn, lambda tree: tree)

    mesh, specs = data_mesh(num_devices), (P(), P("data"), P("data"))
    step = jax.shard_map(train_step, mesh=mesh, in_specs=specs, out_specs=(P(), P()))
    return step, (optimized(CLASSIFIER, MOMENTUM)(), FEATURES, LABELS)


@foreign("shard_map")
def shard_map_reduced_gradients(num_devices):
    def train_step(state, batch):
        loss_fn = lambda params: classifier_loss(params, *batch)
        return global_update(CLIPPED_ADAM, state, loss_fn, lambda tree: lax.pmean(tree, "data"))

    step = jax.shard_map(
        train_step, mesh=data_mesh(num_devices), in_specs=(P(), P("data")), out_specs=P(), check_vma=False
    )
    return step, (optimized(CLASSIFIER, CLIPPED_ADAM)(), (FEATURES, LABELS))


@foreign("shard_map")
def shard_map_gaussian_mixture(num_devices):
    step = jax.shard_map(
        gaussian_mixture_em,
        mesh=Mesh(np.array(jax.devices()[:num_devices]), (AXIS,)),
        in_specs=(P(), P(AXIS)),
        out_specs=P(),
    )
    return step, (mixture(), FEATURES[:, :2])


@foreign("jit_shard_map", in_distribution=True)
def jit_shard_map_dropout(num_devices):
    def train_step(state, key, inputs):
        key = jax.random.fold_in(key, state["step"])
        device_key = jax.random.fold_in(key, lax.axis_index("data"))

        def loss_fn(params):
            return cross_entropy(
                LanguageModel().apply({"params": params}, inputs, rngs={"dropout": device_key}), inputs
            )

        return global_update(CLIPPED_ADAMW, state, loss_fn, lambda tree: lax.pmean(tree, "data"))

    step = jax.shard_map(
        train_step, mesh=data_mesh(num_devices), in_specs=(P(), P(), P("data")), out_specs=P(), check_vma=False
    )
    return jax.jit(step), (optimized(language_model_params, CLIPPED_ADAMW)(), jax.random.key(0), TOKENS)


@foreign("jit_shard_map")
def jit_shard_map_gathered_params(num_devices):
    """Stores a shard of each parameter per device, gathers before the use, and scatters the sums of the gradients."""

    def train_step(params, moments, x, labels):
        gather = lambda shard: lax.all_gather(shard, "data", axis=0, tiled=True)
        loss, grads = jax.value_and_grad(classifier_loss)(jax.tree.map(gather, params), x, labels)
        scatter = lambda grad: lax.psum_scatter(grad, "data", scatter_dimension=0, tiled=True)
        grads = jax.tree.map(lambda grad: scatter(grad) / lax.axis_size("data"), grads)
        updates, moments = ADAM.update(grads, moments, params)
        return optax.apply_updates(params, updates), moments, lax.pmean(loss, "data")

    params = CLASSIFIER()
    moments = ADAM.init(params)
    moment_specs = jax.tree.map(lambda x: P("data") if x.ndim else P(), moments)
    step = jax.shard_map(
        train_step,
        mesh=data_mesh(num_devices),
        in_specs=(P("data"), moment_specs, P("data"), P("data")),
        out_specs=(P("data"), moment_specs, P()),
    )
    return jax.jit(step), (params, moments, FEATURES, LABELS)


@foreign("jit_shard_map")
def jit_shard_map_experts(num_devices):
    """Exchanges rows with the devices of their experts by `all_to_all`; each device stores a part of the experts."""
    experts = 4

    def train_step(params, x, labels):
        def loss_fn(params):
            count = len(x) // experts
            rows = x.reshape(experts, count, WIDTH)  # one part per expert: a router by position
            received = lax.all_to_all(rows, "data", split_axis=0, concat_axis=1, tiled=True)
            hidden = jnp.tanh(jnp.einsum("ecd,edf->ecf", received, params["experts"]))
            returned = lax.all_to_all(hidden, "data", split_axis=1, concat_axis=0, tiled=True)
            return lax.pmean(cross_entropy(mlp(params["head"], returned.reshape(-1, WIDTH)), labels), "data")

        loss, grads = jax.value_and_grad(loss_fn)(params)
        return jax.tree.map(lambda param, grad: param - 0.1 * grad, params, grads), loss

    params = {"experts": expert_params()["experts"], "head": mlp_params(WIDTH, CLASSES)}
    specs = {"experts": P("data"), "head": P()}
    step = jax.shard_map(
        train_step, mesh=data_mesh(num_devices), in_specs=(specs, P("data"), P("data")), out_specs=(specs, P())
    )
    # The rows of an expert are at the same positions of each device.
    order = np.arange(EXAMPLES).reshape(experts, num_devices, -1).swapaxes(0, 1).reshape(-1)
    return jax.jit(step), (params, FEATURES[order], LABELS[order])


# Plain JAX: jit of the global batch, with shardings ------------------------------------------------------------------


@foreign("named_sharding")
def named_sharding_resnet(num_devices):
    """Computes the statistics of the global batch without an axis name."""
    mesh = data_mesh(num_devices)
    replicated, split = NamedSharding(mesh, P()), NamedSharding(mesh, P("data"))
    model = ResNet(axis_name=None)
    variables = model.init(jax.random.key(0), IMAGES[:2])
    state = {"params": variables["params"], "opt_state": NESTEROV.init(variables["params"]), "step": jnp.int32(0)}
    state |= {"batch_stats": variables["batch_stats"]}

    @functools.partial(jax.jit, in_shardings=(replicated, split, split), out_shardings=replicated)
    def train_step(state, images, labels):
        def loss_fn(params):
            variables = {"params": params, "batch_stats": state["batch_stats"]}
            logits, new = model.apply(variables, images, mutable=["batch_stats"])
            return cross_entropy(logits, labels), new["batch_stats"]

        (loss, batch_stats), grads = jax.value_and_grad(loss_fn, has_aux=True)(state["params"])
        return updated(NESTEROV, state, grads, batch_stats=batch_stats), loss

    return train_step, (jax.device_put(state, replicated), *jax.device_put((IMAGES, LABELS), split))


@foreign("named_sharding")
def named_sharding_fsdp(num_devices):
    mesh = data_mesh(num_devices)
    state = optimized(CLASSIFIER, ADAM)()
    shardings = jax.tree.map(lambda x: NamedSharding(mesh, P("data") if x.ndim and x.shape[0] % 4 == 0 else P()), state)

    def train_step(state, x, labels):
        loss, grads = jax.value_and_grad(classifier_loss)(state["params"], x, labels)
        return updated(ADAM, state, grads), loss

    batch = jax.device_put((FEATURES, LABELS), NamedSharding(mesh, P("data")))
    step = jax.jit(train_step, out_shardings=(shardings, NamedSharding(mesh, P())))
    return step, (jax.device_put(state, shardings), *batch)


@foreign("named_sharding")
def named_sharding_nnx(num_devices):
    mesh = data_mesh(num_devices)
    graphdef, state = nnx.split(module_state(AttentionTagger, optax.adam(1e-2))())

    @jax.jit
    def train_step(state, inputs, targets):
        modules = nnx.merge(graphdef, state)
        loss_fn = lambda model: cross_entropy(model(inputs), targets)
        loss, grads = nnx.value_and_grad(loss_fn)(modules["model"])
        modules["optimizer"].update(modules["model"], grads)
        return nnx.state(modules), loss

    state = jax.device_put(state, NamedSharding(mesh, P()))
    return train_step, (state, *jax.device_put((TOKENS, TARGETS), NamedSharding(mesh, P("data"))))


@foreign("named_sharding")
def named_sharding_k_means(num_devices):
    mesh = data_mesh(num_devices)

    @jax.jit
    def iteration(centers, x):
        index = jnp.sum((x[:, None] - centers) ** 2, -1).argmin(-1)
        counts = jnp.bincount(index, length=3)
        return jax.ops.segment_sum(x, index, 3) / jnp.maximum(counts, 1)[:, None], counts

    centers = jax.device_put(FEATURES[:3], NamedSharding(mesh, P()))
    return iteration, (centers, jax.device_put(FEATURES, NamedSharding(mesh, P("data"))))


# Plain JAX: meshes (data, model) -------------------------------------------------------------------------------------


def model_mesh(num_devices: int) -> Mesh:
    model = 2 if num_devices % 2 == 0 else 1
    return Mesh(np.array(jax.devices()[:num_devices]).reshape(-1, model), ("data", "model"))


TENSOR_SPECS = [{"w": P(None, "model"), "b": P("model")}, {"w": P("model", None), "b": P()}]


@foreign("named_sharding")
def named_sharding_tensor_parallel(num_devices):
    mesh = model_mesh(num_devices)
    sharding = lambda *axes: NamedSharding(mesh, P(*axes))

    def loss_fn(params, x, labels):
        hidden = jnp.tanh(x @ params[0]["w"] + params[0]["b"])
        hidden = lax.with_sharding_constraint(hidden, sharding("data", "model"))
        return cross_entropy(hidden @ params[1]["w"] + params[1]["b"], labels)

    @jax.jit
    def train_step(state, x, labels):
        loss, grads = jax.value_and_grad(loss_fn)(state["params"], x, labels)
        return updated(MOMENTUM, state, grads), loss

    params = jax.device_put(CLASSIFIER(), jax.tree.map(lambda spec: NamedSharding(mesh, spec), TENSOR_SPECS))
    state = {"params": params, "opt_state": jax.jit(MOMENTUM.init)(params)}
    state |= {"step": jax.device_put(jnp.int32(0), sharding())}
    return train_step, (state, *jax.device_put((FEATURES, LABELS), sharding("data")))


@foreign("shard_map_2d")
def shard_map_tensor_parallel(num_devices):
    """Splits the first layer by columns and the last by rows; one sum over the model axis joins them."""

    def train_step(params, x, labels):
        def loss_fn(params):
            hidden = jnp.tanh(x @ params[0]["w"] + params[0]["b"])
            logits = lax.psum(hidden @ params[1]["w"], "model") + params[1]["b"]
            return lax.pmean(cross_entropy(logits, labels), "data")

        loss, grads = jax.value_and_grad(loss_fn)(params)
        return jax.tree.map(lambda param, grad: param - 0.1 * grad, params, grads), loss

    specs = (TENSOR_SPECS, P("data"), P("data"))
    step = jax.shard_map(train_step, mesh=model_mesh(num_devices), in_specs=specs, out_specs=(TENSOR_SPECS, P()))
    return step, (CLASSIFIER(), FEATURES, LABELS)


@foreign("shard_map_2d")
def shard_map_vocabulary_parallel(num_devices):
    """Splits the table of embeddings over the model axis, and computes the cross entropy from parts of the logits."""

    def train_step(table, inputs, targets):
        rows = table.shape[0]

        def local(indices):
            local_indices = indices - lax.axis_index("model") * rows
            return jnp.clip(local_indices, 0, rows - 1), (local_indices >= 0) & (local_indices < rows)

        def loss_fn(table):
            index, is_local = local(inputs)
            x = lax.psum(table[index] * is_local[..., None], "model")
            logits = x @ table.T
            largest = lax.pmax(lax.stop_gradient(logits).max(-1), "model")
            normalizer = lax.psum(jnp.exp(logits - largest[..., None]).sum(-1), "model")
            index, is_local = local(targets)
            target_logits = jnp.take_along_axis(logits, index[..., None], -1)[..., 0]
            losses = jnp.log(normalizer) + largest - lax.psum(target_logits * is_local, "model")
            return lax.psum(losses.sum(), "data") / lax.psum(losses.size, "data")

        loss, grad = jax.value_and_grad(loss_fn)(table)
        return table - 0.1 * grad, loss

    table = 0.3 * jax.random.normal(jax.random.key(0), (VOCAB + 1, WIDTH))
    step = jax.shard_map(
        train_step,
        mesh=model_mesh(num_devices),
        in_specs=(P("model"), P("data"), P("data")),
        out_specs=(P("model"), P()),
    )
    return jax.jit(step), (table, TOKENS, TARGETS)


@foreign("shard_map_2d")
def shard_map_ring_attention(num_devices):
    """Splits sequences over the model axis; keys and values travel around a ring, with a running softmax."""

    def attention(query, key, value):
        n = lax.axis_size("model")
        ring = [(i, (i + 1) % n) for i in range(n)]
        largest = jnp.full(query.shape[:2], -jnp.inf)
        normalizer, total = jnp.zeros(query.shape[:2]), jnp.zeros_like(query)
        for _ in range(n):
            scores = jnp.einsum("btd,bsd->bts", query, key) / np.sqrt(WIDTH)
            new_largest = jnp.maximum(largest, scores.max(-1))
            weights, rescale = jnp.exp(scores - new_largest[..., None]), jnp.exp(largest - new_largest)
            normalizer = normalizer * rescale + weights.sum(-1)
            total = total * rescale[..., None] + jnp.einsum("bts,bsd->btd", weights, value)
            key, value = lax.ppermute((key, value), "model", ring)
            largest = new_largest
        return total / normalizer[..., None]

    def train_step(params, x, targets):
        def loss_fn(params):
            outputs = attention(*(x @ params[name] for name in ("query", "key", "value")))
            return lax.pmean(jnp.mean((outputs - targets) ** 2), ("data", "model"))

        loss, grads = jax.value_and_grad(loss_fn)(params)
        return jax.tree.map(lambda param, grad: param - 0.1 * grad, params, grads), loss

    params = {name: mlp_params(WIDTH, WIDTH, seed=i)[0]["w"] for i, name in enumerate(("query", "key", "value"))}
    sequences = P("data", "model")
    step = jax.shard_map(train_step, mesh=model_mesh(num_devices), in_specs=(P(), sequences, sequences), out_specs=P())
    return jax.jit(step), (params, normal(TIME, WIDTH), normal(TIME, WIDTH, seed=1))


@foreign("shard_map_2d")
def shard_map_automatic_model_axis(num_devices):
    """Reduces over the data axis by hand, and leaves the model axis to the compiler."""
    mesh = model_mesh(num_devices)

    def train_step(params, x, labels):
        loss_fn = lambda params: lax.pmean(classifier_loss(params, x, labels), "data")
        loss, grads = jax.value_and_grad(loss_fn)(params)
        return jax.tree.map(lambda param, grad: param - 0.1 * grad, params, grads), loss

    step = jax.shard_map(
        train_step, mesh=mesh, in_specs=(P(), P("data"), P("data")), out_specs=P(), axis_names={"data"}
    )
    params = jax.device_put(CLASSIFIER(), jax.tree.map(lambda spec: NamedSharding(mesh, spec), TENSOR_SPECS))
    return jax.jit(step), (params, FEATURES, LABELS)
