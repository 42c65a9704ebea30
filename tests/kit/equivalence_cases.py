"""Steps whose replicas agree, but do not compute what one replica computes with the global batch; and right forms of them.

Each wrong step is accepted by the replication proof. After two steps on 4 devices its state differs by more than 1e-3 from the
state on one device; the states of a right step are equal up to 1e-4. One line of a wrong step ends with the comment of a fault:
the first line whose result cannot be a sum or mean over the examples of all replicas, or the reduction that does not fit the
loss. The line contains traced operations, or the call of a helper that contains them.

On one device the wrong and the right form are equal, except for faults in random numbers and in the order of micro-batches.
`RIGHT_ONLY` contains right programs without a wrong form.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax import lax

import jdist

EXAMPLES, FEATURES, CLASSES, VOCABULARY, TIME = 16, 5, 3, 11, 6


@dataclasses.dataclass(frozen=True)
class Case:
    """A step in a wrong and a right form.

    Attributes:
        name: The name of the wrong step, or of the right step if there is no wrong one.
        make_state: Makes the state; called in `strategy.init`.
        batch: One global batch, arrays `[16, ...]`.
        wrong: A step `(state, *batch) -> (state, outputs)` with one line that ends with the comment of a fault.
        right: The step without the fault.
        in_distribution: Whether the right step draws other random numbers on another number of replicas.
    """

    name: str
    make_state: Callable[[], Any]
    batch: tuple[np.ndarray, ...]
    wrong: Callable[..., Any] | None
    right: Callable[..., Any] | None
    in_distribution: bool = False


CASES: list[Case] = []
RIGHT_ONLY: list[Case] = []


def faulty(make_state, batch, right=None):
    """Adds the decorated step to `CASES` as the wrong form of `right`."""

    def add(wrong):
        CASES.append(Case(wrong.__name__, make_state, batch, wrong, right))
        return wrong

    return add


def correct(make_state, batch, in_distribution=False):
    """Adds the decorated step to `RIGHT_ONLY`."""

    def add(right):
        RIGHT_ONLY.append(Case(right.__name__, make_state, batch, None, right, in_distribution))
        return right

    return add


def norm_of(tree):
    """Returns the norm of all leaves together."""
    return jnp.sqrt(sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(tree)))


# Data. The examples of the replicas have different means, scales and numbers of tokens.


def _random(seed, *shape):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


_POSITION = np.arange(EXAMPLES, dtype=np.float32) / EXAMPLES
X = _random(0, EXAMPLES, FEATURES) * (0.4 + _POSITION[:, None]) + _POSITION[:, None]
Y = (X @ _random(1, FEATURES) + _POSITION).astype(np.float32)
LABELS = ((np.arange(EXAMPLES) // 3 + np.arange(EXAMPLES) % 2) % CLASSES).astype(np.int32)
MASK = (np.arange(EXAMPLES) % 4 <= np.arange(EXAMPLES) // 4).astype(np.float32)
IMAGES = _random(2, EXAMPLES, 6, 6, 2) * (0.4 + _POSITION[:, None, None, None]) + _POSITION[:, None, None, None]
SEQUENCES = _random(3, EXAMPLES, TIME, FEATURES) * (0.4 + _POSITION[:, None, None])
TOKENS = (np.arange(EXAMPLES * TIME).reshape(EXAMPLES, TIME) * 7 // 3 % VOCABULARY).astype(np.int32)
TOKEN_WEIGHTS = (np.arange(TIME) <= np.arange(EXAMPLES)[:, None] // 3).astype(np.float32)

XY, XL, XYM, XLM, TW = (X, Y), (X, LABELS), (X, Y, MASK), (X, LABELS, MASK), (TOKENS, TOKEN_WEIGHTS)
IMAGE_BATCH, SEQUENCE_BATCH = (IMAGES, LABELS), (SEQUENCES, Y)


# Models and states.


def normal(seed, *shape):
    return 0.5 * jax.random.normal(jax.random.key(seed), shape)


def params_of_net():
    return {"w1": normal(0, FEATURES, 8), "b1": jnp.zeros(8), "w2": normal(1, 8, CLASSES), "b2": jnp.zeros(CLASSES)}


def hidden(params, x):
    return jnp.tanh(x @ params["w1"] + params["b1"])


def net(params, x):
    return hidden(params, x) @ params["w2"] + params["b2"]


def squared(params, x, y):
    """The squared error of each example."""
    return (net(params, x)[:, 0] - y) ** 2


def cross_entropy(params, x, labels):
    """The cross entropy of each example."""
    return optax.softmax_cross_entropy_with_integer_labels(net(params, x), labels)


def mean_loss(params, x, y):
    return jnp.mean(squared(params, x, y))


grad_of_mean = jax.grad(mean_loss)


def with_values(**values):
    """A `make_state` of the parameters of the net and other values, made by functions without arguments."""
    return lambda: {"params": params_of_net()} | {name: make() for name, make in values.items()}


def with_optimizer(optimizer):
    """A `make_state` of the parameters of the net and the state of an optimizer."""
    return lambda: (params := params_of_net(), optimizer.init(params))


zero, zero_count = functools.partial(jnp.zeros, ()), functools.partial(jnp.zeros, (), jnp.int32)
with_key = with_values(key=lambda: jax.random.key(7))


def apply_gradient(params, grads, rate=0.1):
    return jax.tree.map(lambda p, g: p - rate * g, params, grads)


def descend(params, loss, rate=0.1):
    """A step of gradient descent on `loss(params)`, with the mean of the gradients; the outputs are None."""
    return apply_gradient(params, jdist.all_reduce("mean", jax.grad(loss)(params)), rate), None


# The reduction of the gradients.


def mean_of_gradients(params, x, y):
    return apply_gradient(params, jdist.all_reduce("mean", grad_of_mean(params, x, y))), None


@faulty(params_of_net, XY, right=mean_of_gradients)
def sum_for_mean(params, x, y):
    grads = grad_of_mean(params, x, y)
    grads = jdist.all_reduce("sum", grads)  # fault
    return apply_gradient(params, grads), None


@faulty(params_of_net, XY, right=mean_of_gradients)
def mean_then_sum(params, x, y):
    grads = jdist.all_reduce("mean", grad_of_mean(params, x, y))
    grads = jdist.all_reduce("sum", grads)  # fault
    return apply_gradient(params, grads), None


@faulty(params_of_net, XY, right=mean_of_gradients)
def max_for_mean(params, x, y):
    grads = grad_of_mean(params, x, y)
    grads = jdist.all_reduce("max", grads)  # fault
    return apply_gradient(params, grads), None


@faulty(params_of_net, XY, right=mean_of_gradients)
def min_for_mean(params, x, y):
    grads = grad_of_mean(params, x, y)
    grads = jax.tree.map(lambda g: lax.pmin(g, "replica"), grads)  # fault
    return apply_gradient(params, grads), None


@faulty(params_of_net, XY, right=mean_of_gradients)
def only_replica_0_in_the_sum(params, x, y):
    grads = grad_of_mean(params, x, y)
    grads = jax.tree.map(lambda g: jnp.where(jdist.replica_id() == 0, g, 0), grads)  # fault
    return apply_gradient(params, jdist.all_reduce("sum", grads)), None


@faulty(params_of_net, XY, right=mean_of_gradients)
def gradient_of_replica_0(params, x, y):
    grads = grad_of_mean(params, x, y)
    grads = jdist.broadcast(grads)  # fault
    return apply_gradient(params, grads), None


@faulty(params_of_net, XY, right=mean_of_gradients)
def first_of_gathered_gradients(params, x, y):
    grads = grad_of_mean(params, x, y)
    gathered = jax.tree.map(lambda g: jdist.all_gather(g[None], axis=0), grads)
    grads = jax.tree.map(lambda g: g[0], gathered)  # fault
    return apply_gradient(params, grads), None


def mean_of_gathered_gradients(params, x, y):
    gathered = jax.tree.map(lambda g: jdist.all_gather(g[None], axis=0), grad_of_mean(params, x, y))
    return apply_gradient(params, jax.tree.map(lambda g: jnp.mean(g, axis=0), gathered)), None


@faulty(params_of_net, XY, right=mean_of_gathered_gradients)
def median_of_gathered_gradients(params, x, y):
    gathered = jax.tree.map(lambda g: jdist.all_gather(g[None], axis=0), grad_of_mean(params, x, y))
    grads = jax.tree.map(lambda g: jnp.median(g, axis=0), gathered)  # fault
    return apply_gradient(params, grads), None


@faulty(params_of_net, XY, right=mean_of_gradients)
def mean_divided_by_replicas(params, x, y):
    grads = jdist.all_reduce("mean", grad_of_mean(params, x, y))
    grads = jax.tree.map(lambda g: g / jdist.num_replicas(), grads)  # fault
    return apply_gradient(params, grads), None


def reduced_loss_then_mean(params, x, y):
    grads = jax.grad(lambda p: jdist.all_reduce("mean", mean_loss(p, x, y)))(params)
    return apply_gradient(params, jdist.all_reduce("mean", grads)), None


@faulty(params_of_net, XY, right=reduced_loss_then_mean)
def reduced_loss_then_sum(params, x, y):
    grads = jax.grad(lambda p: jdist.all_reduce("mean", mean_loss(p, x, y)))(params)
    grads = jdist.all_reduce("sum", grads)  # fault
    return apply_gradient(params, grads), None


@faulty(params_of_net, XY, right=reduced_loss_then_mean)
def summed_loss_then_mean(params, x, y):
    return descend(params, lambda p: jdist.all_reduce("sum", mean_loss(p, x, y)))  # fault


@faulty(params_of_net, XY, right=reduced_loss_then_mean)
def sum_of_gathered_losses(params, x, y):
    return descend(params, lambda p: jdist.all_gather(mean_loss(p, x, y)[None], axis=0).sum())  # fault


def sum_over_global_size(params, x, y):
    size = x.shape[0] * jdist.num_replicas()
    grads = jax.grad(lambda p: jnp.sum(squared(p, x, y)) / size)(params)
    return apply_gradient(params, jdist.all_reduce("sum", grads)), None


@faulty(params_of_net, XY, right=sum_over_global_size)
def sum_over_local_size(params, x, y):
    grads = jax.grad(lambda p: jnp.sum(squared(p, x, y)) / x.shape[0])(params)
    grads = jdist.all_reduce("sum", grads)  # fault
    return apply_gradient(params, grads), None


@faulty(params_of_net, XY, right=sum_over_global_size)
def mean_over_global_size(params, x, y):
    grads = jax.grad(lambda p: jnp.sum(squared(p, x, y)) / EXAMPLES)(params)
    grads = jdist.all_reduce("mean", grads)  # fault
    return apply_gradient(params, grads), None


def sum_of_losses_then_sum(params, x, y):
    grads = jax.grad(lambda p: jnp.sum(squared(p, x, y)))(params)
    return apply_gradient(params, jdist.all_reduce("sum", grads), 0.005), None


@faulty(params_of_net, XY, right=sum_of_losses_then_sum)
def sum_of_losses_then_mean(params, x, y):
    grads = jax.grad(lambda p: jnp.sum(squared(p, x, y)))(params)
    grads = jdist.all_reduce("mean", grads)  # fault
    return apply_gradient(params, grads, 0.005), None


@faulty(params_of_net, XY, right=mean_of_gradients)
def rate_times_replicas(params, x, y):
    grads = jdist.all_reduce("mean", grad_of_mean(params, x, y))
    rate = 0.1 * jdist.num_replicas()
    return jax.tree.map(lambda p, g: p - rate * g, params, grads), None  # fault


@faulty(params_of_net, XY, right=mean_of_gradients)
def rate_times_replicas_with_sum(params, x, y):
    grads = jdist.all_reduce("sum", grad_of_mean(params, x, y))
    return jax.tree.map(lambda p, g: p - 0.1 * jdist.num_replicas() * g, params, grads), None  # fault


def psum_over_axis_size(params, x, y):
    grads = lax.psum(grad_of_mean(params, x, y), "replica")
    return jax.tree.map(lambda p, g: p - 0.1 * g / lax.axis_size("replica"), params, grads), None


@faulty(params_of_net, XY, right=psum_over_axis_size)
def psum_without_division(params, x, y):
    grads = lax.psum(grad_of_mean(params, x, y), "replica")  # fault
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), None


def mean_of_parameters(params, x, y):
    return jdist.all_reduce("mean", apply_gradient(params, grad_of_mean(params, x, y))), None


@faulty(params_of_net, XY, right=mean_of_parameters)
def sum_of_parameters(params, x, y):
    params = apply_gradient(params, grad_of_mean(params, x, y))
    return lax.psum(params, "replica"), None  # fault


@faulty(params_of_net, XY)
def mean_of_parameters_after_two_local_steps(params, x, y):
    params = apply_gradient(params, grad_of_mean(params, x, y))
    params = apply_gradient(params, grad_of_mean(params, x, y))  # fault
    return jdist.all_reduce("mean", params), None


def reduce_scatter_of_mean(params, x, y):
    g = grad_of_mean(params, x, y)["w1"].reshape(-1)
    shard = jdist.reduce_scatter("mean", g, axis=0)
    w1 = params["w1"] - 0.1 * jdist.all_gather(shard, axis=0).reshape(FEATURES, 8)
    return params | {"w1": w1}, None


@faulty(params_of_net, XY, right=reduce_scatter_of_mean)
def reduce_scatter_of_sum(params, x, y):
    g = grad_of_mean(params, x, y)["w1"].reshape(-1)
    shard = jdist.reduce_scatter("sum", g, axis=0)  # fault
    w1 = params["w1"] - 0.1 * jdist.all_gather(shard, axis=0).reshape(FEATURES, 8)
    return params | {"w1": w1}, None


def policy_mean(params, x, y):
    tx = optax.chain(jdist.sync.mean(), optax.sgd(0.1))
    updates, _ = tx.update(grad_of_mean(params, x, y), tx.init(params), params)
    return optax.apply_updates(params, updates), None


@faulty(params_of_net, XY, right=policy_mean)
def policy_sum_of_mean_loss(params, x, y):
    tx = optax.chain(jdist.sync.sum(), optax.sgd(0.1))
    updates, _ = tx.update(grad_of_mean(params, x, y), tx.init(params), params)  # fault
    return optax.apply_updates(params, updates), None


def average_loss_with_sum(params, x, y):
    grads = jax.grad(lambda p: jdist.compute_average_loss(squared(p, x, y)))(params)
    grads, _ = jdist.sync.sum().update(grads, jdist.sync.sum().init(params))
    return apply_gradient(params, grads), None


@faulty(params_of_net, XY, right=average_loss_with_sum)
def average_loss_with_mean(params, x, y):
    grads = jax.grad(lambda p: jdist.compute_average_loss(squared(p, x, y)))(params)
    grads, _ = jdist.sync.mean().update(grads, jdist.sync.mean().init(params))  # fault
    return apply_gradient(params, grads), None


def value_and_grad_with_mean(params, x, y):
    _, grads = jdist.value_and_grad(squared)(params, x, y)
    return apply_gradient(params, jdist.all_reduce("mean", grads)), None


@faulty(params_of_net, XY, right=value_and_grad_with_mean)
def value_and_grad_with_sum(params, x, y):
    _, grads = jdist.value_and_grad(squared)(params, x, y)
    grads = jdist.all_reduce("sum", grads)  # fault
    return apply_gradient(params, grads), None


def global_mean_with_mean(params, x, y, mask):
    return descend(params, lambda p: jdist.global_mean(squared(p, x, y), mask))


@faulty(params_of_net, XYM, right=global_mean_with_mean)
def global_mean_with_sum(params, x, y, mask):
    grads = jax.grad(lambda p: jdist.global_mean(squared(p, x, y), mask))(params)
    grads = jdist.all_reduce("sum", grads)  # fault
    return apply_gradient(params, grads), None


# Functions of the local gradients that are not linear.


def clipped_by_value_after_mean(params, x, y):
    grads = jdist.all_reduce("mean", grad_of_mean(params, x, y))
    return apply_gradient(params, jax.tree.map(lambda g: jnp.clip(g, -0.1, 0.1), grads)), None


@faulty(params_of_net, XY, right=clipped_by_value_after_mean)
def clipped_by_value_before_mean(params, x, y):
    grads = grad_of_mean(params, x, y)
    grads = jax.tree.map(lambda g: jnp.clip(g, -0.1, 0.1), grads)  # fault
    return apply_gradient(params, jdist.all_reduce("mean", grads)), None


def norm_clipped_after_mean(params, x, y):
    tx = optax.chain(jdist.sync.mean(), optax.clip_by_global_norm(0.5), optax.sgd(0.1))
    updates, _ = tx.update(grad_of_mean(params, x, y), tx.init(params), params)
    return optax.apply_updates(params, updates), None


@faulty(params_of_net, XY, right=norm_clipped_after_mean)
def norm_clipped_before_mean(params, x, y):
    tx = optax.chain(optax.clip_by_global_norm(0.5), jdist.sync.mean(), optax.sgd(0.1))
    updates, _ = tx.update(grad_of_mean(params, x, y), tx.init(params), params)  # fault
    return optax.apply_updates(params, updates), None


def clipped_with_norm_of_mean(params, x, y):
    grads = jdist.all_reduce("mean", grad_of_mean(params, x, y))
    norm = norm_of(grads)
    return apply_gradient(params, jax.tree.map(lambda g: g / jnp.maximum(norm, 0.5), grads)), None


@faulty(params_of_net, XY, right=clipped_with_norm_of_mean)
def clipped_with_mean_of_local_norms(params, x, y):
    grads = grad_of_mean(params, x, y)
    norm = jdist.all_reduce("mean", norm_of(grads))  # fault
    grads = jdist.all_reduce("mean", grads)
    return apply_gradient(params, jax.tree.map(lambda g: g / jnp.maximum(norm, 0.5), grads)), None


def adaptive_clip_after_mean(params, x, y):
    tx = optax.chain(jdist.sync.mean(), optax.adaptive_grad_clip(0.05), optax.sgd(1.0))
    updates, _ = tx.update(grad_of_mean(params, x, y), tx.init(params), params)
    return optax.apply_updates(params, updates), None


@faulty(params_of_net, XY, right=adaptive_clip_after_mean)
def adaptive_clip_before_mean(params, x, y):
    tx = optax.chain(optax.adaptive_grad_clip(0.05), jdist.sync.mean(), optax.sgd(1.0))
    updates, _ = tx.update(grad_of_mean(params, x, y), tx.init(params), params)  # fault
    return optax.apply_updates(params, updates), None


def trust_ratio_after_mean(params, x, y):
    tx = optax.chain(jdist.sync.mean(), optax.scale_by_trust_ratio(), optax.sgd(0.1))
    updates, _ = tx.update(grad_of_mean(params, x, y), tx.init(params), params)
    return optax.apply_updates(params, updates), None


@faulty(params_of_net, XY, right=trust_ratio_after_mean)
def trust_ratio_before_mean(params, x, y):
    tx = optax.chain(optax.scale_by_trust_ratio(), jdist.sync.mean(), optax.sgd(0.1))
    updates, _ = tx.update(grad_of_mean(params, x, y), tx.init(params), params)  # fault
    return optax.apply_updates(params, updates), None


def sign_of_mean(params, x, y):
    grads = jdist.all_reduce("mean", grad_of_mean(params, x, y))
    return apply_gradient(params, jax.tree.map(jnp.sign, grads)), None


@faulty(params_of_net, XY, right=sign_of_mean)
def mean_of_signs(params, x, y):
    grads = jax.tree.map(jnp.sign, grad_of_mean(params, x, y))  # fault
    return apply_gradient(params, jdist.all_reduce("mean", grads)), None


def normalized_after_mean(params, x, y):
    grads = jdist.all_reduce("mean", grad_of_mean(params, x, y))
    norm = norm_of(grads)
    return jax.tree.map(lambda p, g: p - 0.1 * g / norm, params, grads), None


@faulty(params_of_net, XY, right=normalized_after_mean)
def normalized_before_mean(params, x, y):
    grads = grad_of_mean(params, x, y)
    norm = norm_of(grads)  # fault
    grads = lax.pmean(jax.tree.map(lambda g: g / norm, grads), "replica")
    return apply_gradient(params, grads), None


def rounded_after_mean(params, x, y):
    grads = jdist.all_reduce("mean", grad_of_mean(params, x, y))
    return apply_gradient(params, jax.tree.map(lambda g: jnp.round(4 * g) / 4, grads)), None


@faulty(params_of_net, XY, right=rounded_after_mean)
def rounded_before_mean(params, x, y):
    grads = jax.tree.map(lambda g: jnp.round(4 * g) / 4, grad_of_mean(params, x, y))  # fault
    return apply_gradient(params, jdist.all_reduce("mean", grads)), None


def largest_entries(g, n=8):
    return jnp.where(jnp.abs(g) >= lax.top_k(jnp.abs(g).reshape(-1), n)[0][-1], g, 0)


def top_k_after_mean(params, x, y):
    g = jdist.all_reduce("mean", grad_of_mean(params, x, y)["w1"])
    return params | {"w1": params["w1"] - 0.1 * largest_entries(g)}, None


@faulty(params_of_net, XY, right=top_k_after_mean)
def top_k_before_mean(params, x, y):
    g = grad_of_mean(params, x, y)["w1"]
    g = jnp.where(jnp.abs(g) >= lax.top_k(jnp.abs(g).reshape(-1), 8)[0][-1], g, 0)  # fault
    return params | {"w1": params["w1"] - 0.1 * jdist.all_reduce("mean", g)}, None


with_moment = with_values(nu=lambda: jax.tree.map(jnp.zeros_like, params_of_net()))


def rms_update(state, grads, squares):
    nu = jax.tree.map(lambda n, s: 0.9 * n + 0.1 * s, state["nu"], squares)
    params = jax.tree.map(lambda p, g, n: p - 0.02 * g / (jnp.sqrt(n) + 1e-2), state["params"], grads, nu)
    return {"params": params, "nu": nu}, None


def second_moment_of_mean(state, x, y):
    grads = jdist.all_reduce("mean", grad_of_mean(state["params"], x, y))
    return rms_update(state, grads, jax.tree.map(jnp.square, grads))


@faulty(with_moment, XY, right=second_moment_of_mean)
def second_moment_of_local_gradients(state, x, y):
    grads = grad_of_mean(state["params"], x, y)
    squares = jax.tree.map(jnp.square, grads)  # fault
    grads, squares = jdist.all_reduce("mean", (grads, squares))
    return rms_update(state, grads, squares)


ADAM = optax.adam(0.05)


def adam_of_mean(state, x, y):
    params, opt_state = state
    grads = jdist.all_reduce("mean", grad_of_mean(params, x, y))
    updates, opt_state = ADAM.update(grads, opt_state, params)
    return (optax.apply_updates(params, updates), opt_state), None


@faulty(with_optimizer(ADAM), XY, right=adam_of_mean)
def mean_of_adam_states(state, x, y):
    params, opt_state = state
    updates, opt_state = ADAM.update(grad_of_mean(params, x, y), opt_state, params)  # fault
    moments = jdist.all_reduce("mean", (opt_state[0].mu, opt_state[0].nu, updates))
    opt_state = (opt_state[0]._replace(mu=moments[0], nu=moments[1]), *opt_state[1:])
    return (optax.apply_updates(params, moments[2]), opt_state), None


def sharpness_aware(params, x, y):
    grads = jdist.all_reduce("mean", grad_of_mean(params, x, y))
    scale = 0.3 / norm_of(grads)
    return descend(params, lambda p: mean_loss(jax.tree.map(lambda a, g: a + scale * g, p, grads), x, y))


@faulty(params_of_net, XY, right=sharpness_aware)
def sharpness_aware_of_local_gradients(params, x, y):
    grads = grad_of_mean(params, x, y)
    scale = 0.3 / norm_of(grads)  # fault
    return descend(params, lambda p: mean_loss(jax.tree.map(lambda a, g: a + scale * g, p, grads), x, y))


def noise_after_mean(state, x, y):
    grads = jdist.all_reduce("mean", grad_of_mean(state["params"], x, y))
    noise = jax.random.normal(state["key"], grads["w1"].shape)
    return state | {"params": apply_gradient(state["params"], grads | {"w1": grads["w1"] + noise})}, None


@faulty(with_key, XY, right=noise_after_mean)
def noise_per_replica_before_mean(state, x, y):
    grads = grad_of_mean(state["params"], x, y)
    noise = jax.random.normal(jdist.replica_key(state["key"]), grads["w1"].shape)  # fault
    grads = jdist.all_reduce("mean", grads | {"w1": grads["w1"] + noise})
    return state | {"params": apply_gradient(state["params"], grads)}, None


@faulty(with_key, XY, right=noise_after_mean)
def noise_before_sum(state, x, y):
    size = x.shape[0] * jdist.num_replicas()
    grads = jax.grad(lambda p: jnp.sum(squared(p, x, y)) / size)(state["params"])
    noise = jax.random.normal(state["key"], grads["w1"].shape)
    grads = jdist.all_reduce("sum", grads | {"w1": grads["w1"] + noise})  # fault
    return state | {"params": apply_gradient(state["params"], grads)}, None


# Losses that are not a mean over the examples.


def rmse(params, x, y):
    return descend(params, lambda p: jnp.sqrt(jdist.all_reduce("mean", mean_loss(p, x, y))))


@faulty(params_of_net, XY, right=rmse)
def rmse_of_local_batch(params, x, y):
    return descend(params, lambda p: jnp.sqrt(jnp.mean(squared(p, x, y))))  # fault


def log_of_mean(params, x, y):
    return descend(params, lambda p: jnp.log(lax.pmean(mean_loss(p, x, y), "replica")))


@faulty(params_of_net, XY, right=log_of_mean)
def log_of_local_mean(params, x, y):
    return descend(params, lambda p: jnp.log(jnp.mean(squared(p, x, y))))  # fault


def huber_of_mean_residual(params, x, y):
    return descend(params, lambda p: optax.huber_loss(jdist.global_mean(net(p, x)[:, 0] - y), delta=0.1))


@faulty(params_of_net, XY, right=huber_of_mean_residual)
def huber_of_local_mean_residual(params, x, y):
    return descend(params, lambda p: optax.huber_loss(jnp.mean(net(p, x)[:, 0] - y), delta=0.1))  # fault


def loss_scaled_by_its_value(params, x, y):
    def loss(params):
        value = mean_loss(params, x, y)
        return value / lax.stop_gradient(jdist.all_reduce("mean", value))

    return descend(params, loss)


@faulty(params_of_net, XY, right=loss_scaled_by_its_value)
def loss_scaled_by_its_local_value(params, x, y):
    def loss(params):
        value = mean_loss(params, x, y)
        return value / lax.stop_gradient(value)  # fault

    return descend(params, loss)


def largest_loss(params, x, y):
    return descend(params, lambda p: jnp.max(jdist.all_gather(squared(p, x, y), axis=0)))


@faulty(params_of_net, XY, right=largest_loss)
def largest_loss_of_local_batch(params, x, y):
    return descend(params, lambda p: jnp.max(squared(p, x, y)))  # fault


def hard_examples(params, x, y):
    return descend(params, lambda p: jnp.mean(lax.top_k(jdist.all_gather(squared(p, x, y), axis=0), EXAMPLES // 4)[0]))


@faulty(params_of_net, XY, right=hard_examples)
def hard_examples_of_local_batch(params, x, y):
    return descend(params, lambda p: jnp.mean(lax.top_k(squared(p, x, y), x.shape[0] // 4)[0]))  # fault


def losses_below_quantile(params, x, y):
    def loss(params):
        losses = squared(params, x, y)
        threshold = jnp.quantile(jdist.all_gather(losses, axis=0), 0.7)
        return jnp.mean(jnp.where(losses < threshold, losses, 0))

    return descend(params, loss)


@faulty(params_of_net, XY, right=losses_below_quantile)
def losses_below_local_quantile(params, x, y):
    def loss(params):
        losses = squared(params, x, y)
        threshold = jnp.quantile(losses, 0.7)  # fault
        return jnp.mean(jnp.where(losses < threshold, losses, 0))

    return descend(params, loss)


def attention_over_batch(params, x, y):
    def loss(params):
        scores = jnp.exp(net(params, x)[:, 1])
        return jnp.sum(scores * squared(params, x, y)) / jdist.all_reduce("mean", jnp.sum(scores))

    return descend(params, loss)


@faulty(params_of_net, XY, right=attention_over_batch)
def softmax_over_local_batch(params, x, y):
    def loss(params):
        weights = jax.nn.softmax(net(params, x)[:, 1], axis=0)  # fault
        return jnp.sum(weights * squared(params, x, y))

    return descend(params, loss)


def log_sum_exp_over_batch(params, x, y):
    def loss(params):
        scores = net(params, x)
        total = jdist.all_reduce("mean", jnp.mean(jnp.exp(scores[:, 1])))
        return jnp.log(total) - jnp.mean(scores[:, 0] * y)

    return descend(params, loss)


@faulty(params_of_net, XY, right=log_sum_exp_over_batch)
def log_sum_exp_over_local_batch(params, x, y):
    def loss(params):
        scores = net(params, x)
        bound = jax.nn.logsumexp(scores[:, 1]) - math.log(x.shape[0])  # fault
        return bound - jnp.mean(scores[:, 0] * y)

    return descend(params, loss)


def sorted_predictions(params, x, y):
    def loss(params):
        predictions, targets = jdist.all_gather((net(params, x)[:, 0], y), axis=0)
        return jnp.mean((jnp.sort(predictions) - jnp.sort(targets)) ** 2)

    return descend(params, loss)


@faulty(params_of_net, XY, right=sorted_predictions)
def sorted_local_predictions(params, x, y):
    def loss(params):
        predictions = jnp.sort(net(params, x)[:, 0])  # fault
        return jnp.mean((predictions - jnp.sort(y)) ** 2)

    return descend(params, loss)


def correlation(params, x, y):
    def loss(params):
        predictions, targets = jdist.all_gather((net(params, x)[:, 0], y), axis=0)
        return -jnp.corrcoef(predictions, targets)[0, 1]

    return descend(params, loss)


@faulty(params_of_net, XY, right=correlation)
def correlation_of_local_batch(params, x, y):
    return descend(params, lambda p: -jnp.corrcoef(net(p, x)[:, 0], y)[0, 1])  # fault


def dice(params, x, labels):
    def loss(params):
        probability = jax.nn.softmax(net(params, x))[:, 0]
        positive = labels == 0
        sums = jnp.sum(probability * positive), jnp.sum(probability) + jnp.sum(positive)
        overlap, size = jdist.all_reduce("sum", sums)
        return 1 - 2 * overlap / size

    return descend(params, loss)


@faulty(params_of_net, XL, right=dice)
def dice_of_local_batch(params, x, labels):
    def loss(params):
        probability = jax.nn.softmax(net(params, x))[:, 0]
        positive = labels == 0
        size = jnp.sum(probability) + jnp.sum(positive)
        return 1 - 2 * jnp.sum(probability * positive) / size  # fault

    return descend(params, loss)


def entropy_of_mean_prediction(params, x, labels):
    def loss(params):
        mean = jdist.all_reduce("mean", jnp.mean(jax.nn.softmax(net(params, x)), axis=0))
        return jnp.mean(cross_entropy(params, x, labels)) + jnp.sum(mean * jnp.log(mean))

    return descend(params, loss)


@faulty(params_of_net, XL, right=entropy_of_mean_prediction)
def entropy_of_local_mean_prediction(params, x, labels):
    def loss(params):
        mean = jnp.mean(jax.nn.softmax(net(params, x)), axis=0)
        return jnp.mean(cross_entropy(params, x, labels)) + jnp.sum(mean * jnp.log(mean))  # fault

    return descend(params, loss)


def class_weights(params, x, labels):
    counts = jdist.all_reduce("mean", jnp.mean(jax.nn.one_hot(labels, CLASSES), axis=0))
    return descend(params, lambda p: jnp.mean(cross_entropy(p, x, labels) / (0.1 + counts[labels])))


@faulty(params_of_net, XL, right=class_weights)
def class_weights_of_local_batch(params, x, labels):
    counts = jnp.mean(jax.nn.one_hot(labels, CLASSES), axis=0)
    return descend(params, lambda p: jnp.mean(cross_entropy(p, x, labels) / (0.1 + counts[labels])))  # fault


def masked_loss(params, x, y, mask):
    def loss(params):
        total, count = jdist.all_reduce("sum", (jnp.sum(squared(params, x, y) * mask), jnp.sum(mask)))
        return total / count

    return descend(params, loss)


@faulty(params_of_net, XYM, right=masked_loss)
def masked_loss_over_local_count(params, x, y, mask):
    return descend(params, lambda p: jnp.sum(squared(p, x, y) * mask) / jnp.sum(mask))  # fault


@faulty(params_of_net, XYM, right=masked_loss)
def masked_sum_over_mean_count(params, x, y, mask):
    count = jdist.all_reduce("mean", jnp.sum(mask))
    grads = jax.grad(lambda p: jnp.sum(squared(p, x, y) * mask) / count)(params)
    grads = jdist.all_reduce("sum", grads)  # fault
    return apply_gradient(params, grads), None


@faulty(params_of_net, XYM, right=global_mean_with_mean)
def mean_over_selected_examples(params, x, y, mask):
    return descend(params, lambda p: jnp.mean(squared(p, x, y), where=mask > 0))  # fault


def gradient_penalty(params, x, y):
    def loss(params):
        slopes = jax.grad(lambda x: jnp.sum(net(params, x)[:, 0]) / (x.shape[0] * jdist.num_replicas()))(x)
        return mean_loss(params, x, y) + 100 * jnp.mean(jnp.sum(slopes**2, axis=1))

    return descend(params, loss)


@faulty(params_of_net, XY, right=gradient_penalty)
def gradient_penalty_of_a_local_mean(params, x, y):
    def loss(params):
        slopes = jax.grad(lambda x: jnp.mean(net(params, x)[:, 0]))(x)  # fault
        return mean_loss(params, x, y) + 100 * jnp.mean(jnp.sum(slopes**2, axis=1))

    return descend(params, loss)


def decay_shared_by_replicas(params, x, y):
    def loss(params):
        decay = 0.1 * jnp.sum(params["w1"] ** 2)
        return jdist.compute_average_loss(squared(params, x, y)) + jdist.scale_regularization_loss(decay)

    return apply_gradient(params, jdist.all_reduce("sum", jax.grad(loss)(params))), None


@faulty(params_of_net, XY, right=decay_shared_by_replicas)
def decay_summed_over_replicas(params, x, y):
    def loss(params):
        decay = 0.1 * jnp.sum(params["w1"] ** 2)
        return jdist.compute_average_loss(squared(params, x, y)) + decay

    grads = jdist.all_reduce("sum", jax.grad(loss)(params))  # fault
    return apply_gradient(params, grads), None


def decay_after_sum(params, x, y):
    grads = jax.grad(lambda p: jdist.compute_average_loss(squared(p, x, y)))(params)
    tx = optax.chain(jdist.sync.sum(), optax.add_decayed_weights(0.1), optax.sgd(0.1))
    updates, _ = tx.update(grads, tx.init(params), params)
    return optax.apply_updates(params, updates), None


@faulty(params_of_net, XY, right=decay_after_sum)
def decay_before_sum(params, x, y):
    grads = jax.grad(lambda p: jdist.compute_average_loss(squared(p, x, y)))(params)
    tx = optax.chain(optax.add_decayed_weights(0.1), jdist.sync.sum(), optax.sgd(0.1))
    updates, _ = tx.update(grads, tx.init(params), params)  # fault
    return optax.apply_updates(params, updates), None


@faulty(params_of_net, XY, right=decay_after_sum)
def decay_divided_by_replicas(params, x, y):
    def loss(params):
        return mean_loss(params, x, y) + jdist.scale_regularization_loss(0.05 * optax.tree.norm(params, squared=True))

    grads = jdist.all_reduce("mean", jax.grad(loss)(params))  # fault
    return apply_gradient(params, grads), None


def scaled_loss(params, x, y):
    scale = 1024.0
    grads = jdist.all_reduce("mean", jax.grad(lambda p: scale * mean_loss(p, x, y))(params))
    return jax.tree.map(lambda p, g: p - 0.1 * g / scale, params, grads), None


@faulty(params_of_net, XY, right=scaled_loss)
def scaled_loss_summed(params, x, y):
    scale = 1024.0
    grads = jax.grad(lambda p: scale * mean_loss(p, x, y))(params)
    grads = jdist.all_reduce("sum", grads)  # fault
    return jax.tree.map(lambda p, g: p - 0.1 * g / scale, params, grads), None


with_scale = with_values(scale=lambda: jnp.float32(64))


def loss_scale_update(state, grads, norm):
    scale = jnp.where(norm > 3 * state["scale"], state["scale"] / 2, state["scale"] * 2)
    grads = jax.tree.map(lambda g: g / state["scale"], grads)
    return {"params": apply_gradient(state["params"], grads), "scale": scale}, None


def loss_scale_of_mean_norm(state, x, y):
    grads = jax.grad(lambda p: state["scale"] * mean_loss(p, x, y))(state["params"])
    grads = jdist.all_reduce("mean", grads)
    return loss_scale_update(state, grads, norm_of(grads))


@faulty(with_scale, XY, right=loss_scale_of_mean_norm)
def loss_scale_of_largest_norm(state, x, y):
    grads = jax.grad(lambda p: state["scale"] * mean_loss(p, x, y))(state["params"])
    norm = jdist.all_reduce("max", norm_of(grads))  # fault
    return loss_scale_update(state, jdist.all_reduce("mean", grads), norm)


# Control flow.


def skipped_by_mean_loss(params, x, y):
    loss, grads = jdist.all_reduce("mean", jax.value_and_grad(mean_loss)(params, x, y))
    grads = lax.cond(loss > 0.5, lambda: grads, lambda: jax.tree.map(lambda g: 0.1 * g, grads))
    return apply_gradient(params, grads), loss


@faulty(params_of_net, XY, right=skipped_by_mean_loss)
def skipped_by_local_loss(params, x, y):
    loss, grads = jax.value_and_grad(mean_loss)(params, x, y)
    grads = lax.cond(loss > 0.5, lambda: grads, lambda: jax.tree.map(lambda g: 0.1 * g, grads))  # fault
    return apply_gradient(params, jdist.all_reduce("mean", grads)), None


def line_search(params, x, y):
    def mean_loss_at(rate):
        return jdist.all_reduce("mean", mean_loss(apply_gradient(params, grads, rate), x, y))

    grads = jdist.all_reduce("mean", grad_of_mean(params, x, y))
    limit = 0.7 * mean_loss_at(0.0)
    rate, _ = lax.while_loop(
        lambda carry: carry[1] > limit,
        lambda carry: (carry[0] / 2, mean_loss_at(carry[0] / 2)),
        (jnp.float32(2), mean_loss_at(2.0)),
    )
    return apply_gradient(params, grads, rate), None


@faulty(params_of_net, XY, right=line_search)
def line_search_of_local_loss(params, x, y):
    grads = jdist.all_reduce("mean", grad_of_mean(params, x, y))
    limit = 0.7 * mean_loss(params, x, y)
    rate = lax.while_loop(
        lambda rate: mean_loss(apply_gradient(params, grads, rate), x, y) > limit,  # fault
        lambda rate: rate / 2,
        jnp.float32(2),
    )
    return apply_gradient(params, grads, jdist.all_reduce("mean", rate)), None


def accumulated(params, x, y):
    parts = x.reshape(2, -1, FEATURES), y.reshape(2, -1)

    def add(total, part):
        return jax.tree.map(jnp.add, total, grad_of_mean(params, *part)), None

    total, _ = lax.scan(add, jax.tree.map(jnp.zeros_like, params), parts)
    return apply_gradient(params, jdist.all_reduce("mean", jax.tree.map(lambda g: g / 2, total))), None


@faulty(params_of_net, XY, right=accumulated)
def accumulated_sums(params, x, y):
    parts = x.reshape(2, -1, FEATURES), y.reshape(2, -1)

    def add(total, part):
        grads = jdist.all_reduce("sum", grad_of_mean(params, *part))  # fault
        return jax.tree.map(jnp.add, total, grads), None

    total, _ = lax.scan(add, jax.tree.map(jnp.zeros_like, params), parts)
    return apply_gradient(params, jax.tree.map(lambda g: g / 2, total)), None


def accumulated_then_clipped(params, x, y):
    parts = x.reshape(2, -1, FEATURES), y.reshape(2, -1)
    grads = jax.tree.map(lambda g: jnp.mean(g, axis=0), lax.map(lambda part: grad_of_mean(params, *part), parts))
    grads = jdist.all_reduce("mean", grads)
    return apply_gradient(params, jax.tree.map(lambda g: jnp.clip(g, -0.1, 0.1), grads)), None


@faulty(params_of_net, XY, right=accumulated_then_clipped)
def accumulated_clipped_gradients(params, x, y):
    parts = x.reshape(2, -1, FEATURES), y.reshape(2, -1)

    def add(total, part):
        grads = jax.tree.map(lambda g: jnp.clip(g, -0.1, 0.1), grad_of_mean(params, *part))  # fault
        return jax.tree.map(jnp.add, total, grads), None

    total, _ = lax.scan(add, jax.tree.map(jnp.zeros_like, params), parts)
    return apply_gradient(params, jdist.all_reduce("mean", jax.tree.map(lambda g: g / 2, total))), None


@faulty(params_of_net, XY, right=accumulated)
def sum_of_micro_batches_of_fixed_size(params, x, y):
    parts = x.reshape(-1, 4, FEATURES), y.reshape(-1, 4)

    def add(total, part):
        return jax.tree.map(jnp.add, total, grad_of_mean(params, *part)), None

    total, _ = lax.scan(add, jax.tree.map(jnp.zeros_like, params), parts)
    grads = jdist.all_reduce("mean", total)  # fault
    return apply_gradient(params, grads, 0.025), None


@faulty(params_of_net, XY, right=accumulated)
def update_per_micro_batch(params, x, y):
    def update(params, part):
        grads = jdist.all_reduce("mean", grad_of_mean(params, *part))
        return apply_gradient(params, grads), None  # fault

    return lax.scan(update, params, (x.reshape(2, -1, FEATURES), y.reshape(2, -1)))[0], None


# Statistics of the batch inside a model.


def normalized_input(params, x, y):
    mean = jdist.all_reduce("mean", jnp.mean(x, axis=0))
    std = jnp.sqrt(jdist.all_reduce("mean", jnp.mean((x - mean) ** 2, axis=0)))
    return descend(params, lambda p: mean_loss(p, (x - mean) / (std + 1e-6), y))


@faulty(params_of_net, XY, right=normalized_input)
def normalized_local_input(params, x, y):
    x = (x - x.mean(axis=0)) / (x.std(axis=0) + 1e-6)  # fault
    return descend(params, lambda p: mean_loss(p, x, y))


def centered_input(params, x, y):
    x = x - jdist.global_mean(x, axis=0)
    return descend(params, lambda p: mean_loss(p, x, y))


@faulty(params_of_net, XY, right=centered_input)
def centered_local_input(params, x, y):
    x = x - jnp.mean(x, axis=0, keepdims=True)  # fault
    return descend(params, lambda p: mean_loss(p, x, y))


def scaled_targets(params, x, y):
    y = y / jdist.all_reduce("max", jnp.max(jnp.abs(y)))
    return descend(params, lambda p: mean_loss(p, x, y))


@faulty(params_of_net, XY, right=scaled_targets)
def targets_scaled_by_local_maximum(params, x, y):
    y = y / jnp.max(jnp.abs(y))  # fault
    return descend(params, lambda p: mean_loss(p, x, y))


def whitened_input(params, x, y):
    gram = jdist.all_reduce("mean", x.T @ x / x.shape[0]) + 0.1 * jnp.eye(FEATURES)
    x = jnp.linalg.solve(jnp.linalg.cholesky(gram), x.T).T
    return descend(params, lambda p: mean_loss(p, x, y))


@faulty(params_of_net, XY, right=whitened_input)
def whitened_local_input(params, x, y):
    gram = x.T @ x / x.shape[0] + 0.1 * jnp.eye(FEATURES)
    x = jnp.linalg.solve(jnp.linalg.cholesky(gram), x.T).T  # fault
    return descend(params, lambda p: mean_loss(p, x, y))


def batch_norm(params, x, y):
    def loss(params):
        h = x @ params["w1"]
        mean = jdist.all_reduce("mean", h.mean(axis=0))
        variance = jdist.all_reduce("mean", jnp.mean((h - mean) ** 2, axis=0))
        h = (h - mean) * lax.rsqrt(variance + 1e-3)
        return jnp.mean((jax.nn.relu(h) @ params["w2"][:, 0] - y) ** 2)

    return descend(params, loss)


@faulty(params_of_net, XY, right=batch_norm)
def batch_norm_of_local_batch(params, x, y):
    def loss(params):
        h = x @ params["w1"]
        h = (h - h.mean(axis=0)) * lax.rsqrt(h.var(axis=0) + 1e-3)  # fault
        return jnp.mean((jax.nn.relu(h) @ params["w2"][:, 0] - y) ** 2)

    return descend(params, loss)


@faulty(params_of_net, XY, right=batch_norm)
def batch_norm_with_local_variance(params, x, y):
    def loss(params):
        h = x @ params["w1"]
        mean, variance = jdist.all_reduce("mean", (h.mean(axis=0), h.var(axis=0)))  # fault
        h = (h - mean) * lax.rsqrt(variance + 1e-3)
        return jnp.mean((jax.nn.relu(h) @ params["w2"][:, 0] - y) ** 2)

    return descend(params, loss)


CONV = nn.Conv(4, (3, 3))


def cnn_state():
    params = {
        "conv": CONV.init(jax.random.key(0), jnp.zeros((1, 6, 6, 2)))["params"],
        "norm": {"scale": jnp.ones(4), "bias": jnp.zeros(4)},
        "dense": normal(2, 4, CLASSES),
    }
    return {"params": params, "stats": {"mean": jnp.zeros(4), "var": jnp.ones(4)}}


def cnn_logits(params, h):
    return jnp.mean(jax.nn.relu(h), axis=(1, 2)) @ params["dense"]


def label_loss(logits, labels):
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def flax_batch_norm(state, images, labels):
    def loss(params):
        norm = nn.BatchNorm(use_running_average=False, momentum=0.9, axis_name="replica")
        variables = {"params": params["norm"], "batch_stats": state["stats"]}
        h = CONV.apply({"params": params["conv"]}, images)
        h, updates = norm.apply(variables, h, mutable=["batch_stats"])
        return label_loss(cnn_logits(params, h), labels), updates["batch_stats"]

    grads, stats = jax.grad(loss, has_aux=True)(state["params"])
    return {"params": apply_gradient(state["params"], jdist.all_reduce("mean", grads)), "stats": stats}, None


@faulty(cnn_state, IMAGE_BATCH, right=flax_batch_norm)
def flax_batch_norm_without_axis_name(state, images, labels):
    def loss(params):
        norm = nn.BatchNorm(use_running_average=False, momentum=0.9)
        variables = {"params": params["norm"], "batch_stats": state["stats"]}
        h = CONV.apply({"params": params["conv"]}, images)
        h, updates = norm.apply(variables, h, mutable=["batch_stats"])  # fault
        return label_loss(cnn_logits(params, h), labels), updates["batch_stats"]

    grads, stats = jdist.all_reduce("mean", jax.grad(loss, has_aux=True)(state["params"]))
    return {"params": apply_gradient(state["params"], grads), "stats": stats}, None


class SmallCnn(nnx.Module):
    """A convolution with batch normalization, over the replicas if there is an axis name."""

    def __init__(self, axis_name=None):
        rngs = nnx.Rngs(0)
        self.conv = nnx.Conv(2, 4, (3, 3), rngs=rngs)
        self.norm = nnx.BatchNorm(4, momentum=0.9, axis_name=axis_name, rngs=rngs)
        self.dense = nnx.Linear(4, CLASSES, rngs=rngs)

    def head(self, h):
        return self.dense(jnp.mean(nnx.relu(h), axis=(1, 2)))


def nnx_state(axis_name=None):
    model = SmallCnn(axis_name)
    return {"model": model, "optimizer": nnx.Optimizer(model, optax.sgd(0.1, momentum=0.9), wrt=nnx.Param)}


@faulty(nnx_state, IMAGE_BATCH)
def nnx_batch_norm_without_axis_name(state, images, labels):
    def loss(model):
        h = model.norm(model.conv(images))  # fault
        return label_loss(model.head(h), labels)

    grads = nnx.grad(loss)(state["model"])
    statistics = nnx.state(state["model"], nnx.BatchStat)
    nnx.update(state["model"], jdist.all_reduce("mean", statistics))
    state["optimizer"].update(state["model"], jdist.all_reduce("mean", grads))
    return state, None


@correct(functools.partial(nnx_state, "replica"), IMAGE_BATCH)
def nnx_batch_norm(state, images, labels):
    grads = nnx.grad(lambda m: label_loss(m.head(m.norm(m.conv(images))), labels))(state["model"])
    state["optimizer"].update(state["model"], jdist.all_reduce("mean", grads))
    return state, None


# Losses between examples.


def unit(h):
    return h / jnp.linalg.norm(h, axis=-1, keepdims=True)


def contrastive(params, x, y):
    def loss(params):
        a, b = unit(hidden(params, x)), unit(hidden(params, jnp.roll(x, 1, axis=1)))
        logits = a @ jdist.all_gather(b, axis=0).T / 0.3
        positions = jdist.replica_id() * x.shape[0] + jnp.arange(x.shape[0])
        return label_loss(logits, positions)

    return descend(params, loss)


@faulty(params_of_net, XY, right=contrastive)
def contrastive_with_local_negatives(params, x, y):
    def loss(params):
        a, b = unit(hidden(params, x)), unit(hidden(params, jnp.roll(x, 1, axis=1)))
        logits = a @ b.T / 0.3
        return label_loss(logits, jnp.arange(x.shape[0]))  # fault

    return descend(params, loss)


@faulty(params_of_net, XY, right=contrastive)
def contrastive_without_gradient_of_others(params, x, y):
    def loss(params):
        a, b = unit(hidden(params, x)), unit(hidden(params, jnp.roll(x, 1, axis=1)))
        start = jdist.replica_id() * x.shape[0]
        others = lax.stop_gradient(jdist.all_gather(b, axis=0))  # fault
        logits = a @ lax.dynamic_update_slice_in_dim(others, b, start, axis=0).T / 0.3
        return label_loss(logits, start + jnp.arange(x.shape[0]))

    return descend(params, loss)


@faulty(params_of_net, XY, right=contrastive)
def contrastive_with_labels_of_replica_0(params, x, y):
    def loss(params):
        a, b = unit(hidden(params, x)), unit(hidden(params, jnp.roll(x, 1, axis=1)))
        logits = a @ jdist.all_gather(b, axis=0).T / 0.3
        return label_loss(logits, jnp.arange(x.shape[0]))  # fault

    return descend(params, loss)


def hardest_negative(params, x, labels):
    def loss(params):
        h = hidden(params, x)
        others, other_labels = jdist.all_gather((h, labels), axis=0)
        distances = jnp.sum((h[:, None] - others[None]) ** 2, axis=-1)
        nearest = jnp.min(jnp.where(labels[:, None] == other_labels[None], 100.0, distances), axis=1)
        return jnp.mean(jax.nn.relu(3 - nearest))

    return descend(params, loss)


@faulty(params_of_net, XL, right=hardest_negative)
def hardest_local_negative(params, x, labels):
    def loss(params):
        h = hidden(params, x)
        distances = jnp.sum((h[:, None] - h[None]) ** 2, axis=-1)
        nearest = jnp.min(jnp.where(labels[:, None] == labels[None], 100.0, distances), axis=1)  # fault
        return jnp.mean(jax.nn.relu(3 - nearest))

    return descend(params, loss)


def cross_correlation(params, x, y):
    def loss(params):
        a, b = hidden(params, x), hidden(params, jnp.roll(x, 1, axis=1))
        matrix = jdist.all_reduce("mean", a.T @ b / x.shape[0])
        return jnp.sum((matrix - jnp.eye(8)) ** 2) / 8

    return descend(params, loss)


@faulty(params_of_net, XY, right=cross_correlation)
def cross_correlation_of_local_batch(params, x, y):
    def loss(params):
        a, b = hidden(params, x), hidden(params, jnp.roll(x, 1, axis=1))
        matrix = a.T @ b / x.shape[0]
        return jnp.sum((matrix - jnp.eye(8)) ** 2) / 8  # fault

    return descend(params, loss)


def variance_term(params, x, y):
    def loss(params):
        h = hidden(params, x)
        mean = lax.pmean(h.mean(axis=0), "replica")
        std = jnp.sqrt(lax.pmean(jnp.mean((h - mean) ** 2, axis=0), "replica") + 1e-4)
        return mean_loss(params, x, y) + jnp.mean(jax.nn.relu(1 - std))

    return descend(params, loss)


@faulty(params_of_net, XY, right=variance_term)
def variance_term_of_local_batch(params, x, y):
    def loss(params):
        std = jnp.sqrt(jnp.var(hidden(params, x), axis=0) + 1e-4)  # fault
        return mean_loss(params, x, y) + jnp.mean(jax.nn.relu(1 - std))

    return descend(params, loss)


def mixed_with_reversed_batch(params, x, y):
    size = x.shape[0]
    reversed_x, reversed_y = jax.tree.map(lambda v: v[::-1], jdist.all_gather((x, y), axis=0))
    start = jdist.replica_id() * size
    x = 0.7 * x + 0.3 * lax.dynamic_slice_in_dim(reversed_x, start, size)
    y = 0.7 * y + 0.3 * lax.dynamic_slice_in_dim(reversed_y, start, size)
    return descend(params, lambda p: mean_loss(p, x, y))


@faulty(params_of_net, XY, right=mixed_with_reversed_batch)
def mixed_with_reversed_local_batch(params, x, y):
    x, y = 0.7 * x + 0.3 * x[::-1], 0.7 * y + 0.3 * y[::-1]  # fault
    return descend(params, lambda p: mean_loss(p, x, y))


@faulty(params_of_net, XY)
def shifted_local_batch_as_negatives(params, x, y):
    def loss(params):
        h = unit(hidden(params, x))
        similarity = jnp.sum(h * jnp.roll(h, 1, axis=0), axis=1)  # fault
        return jnp.mean(squared(params, x, y)) + jnp.mean(jax.nn.softplus(similarity))

    return descend(params, loss)


def balanced_assignment(params, x, y):
    q = jnp.exp(3 * net(params, x))
    for _ in range(2):
        q = q / jdist.all_reduce("sum", jnp.sum(q, axis=0))
        q = q / jnp.sum(q, axis=1, keepdims=True)
    return descend(params, lambda p: -jnp.mean(jnp.sum(q * jax.nn.log_softmax(net(p, x)), axis=1)))


@faulty(params_of_net, XY, right=balanced_assignment)
def balanced_assignment_of_local_batch(params, x, y):
    q = jnp.exp(3 * net(params, x))
    for _ in range(2):
        q = q / jnp.sum(q, axis=0)  # fault
        q = q / jnp.sum(q, axis=1, keepdims=True)
    return descend(params, lambda p: -jnp.mean(jnp.sum(q * jax.nn.log_softmax(net(p, x)), axis=1)))


# Positions and random numbers of examples.


def weights_by_position(params, x, y):
    positions = jdist.replica_id() * x.shape[0] + jnp.arange(x.shape[0])
    return descend(params, lambda p: jnp.mean(squared(p, x, y) / (1 + positions)), rate=0.5)


@faulty(params_of_net, XY, right=weights_by_position)
def weights_by_local_position(params, x, y):
    positions = jnp.arange(x.shape[0])  # fault
    return descend(params, lambda p: jnp.mean(squared(p, x, y) / (1 + positions)), rate=0.5)


def example_noise(state, x, y):
    positions = jdist.replica_id() * x.shape[0] + jnp.arange(x.shape[0])
    noise = jax.vmap(lambda key: jax.random.normal(key, (FEATURES,)))(jdist.example_key(state["key"], positions))
    params, _ = descend(state["params"], lambda p: mean_loss(p, x + noise, y))
    return state | {"params": params}, None


@faulty(with_key, XY, right=example_noise)
def noise_by_local_position(state, x, y):
    keys = jdist.example_key(state["key"], jnp.arange(x.shape[0]))  # fault
    noise = jax.vmap(lambda key: jax.random.normal(key, (FEATURES,)))(keys)
    params, _ = descend(state["params"], lambda p: mean_loss(p, x + noise, y))
    return state | {"params": params}, None


@faulty(with_key, XY, right=example_noise)
def noise_of_a_shared_key(state, x, y):
    noise = jax.random.normal(state["key"], x.shape)  # fault
    params, _ = descend(state["params"], lambda p: mean_loss(p, x + noise, y))
    return state | {"params": params}, None


# Transformer and mixture of experts.


class Transformer(nn.Module):
    """A causal transformer with one block, which returns the loss of each token."""

    @nn.compact
    def __call__(self, tokens):
        h = nn.Embed(VOCABULARY, 8)(tokens) + self.param("position", nn.initializers.normal(0.1), (TIME, 8))
        mask = nn.make_causal_mask(tokens)
        h = h + nn.MultiHeadDotProductAttention(num_heads=2)(nn.LayerNorm()(h), mask=mask)
        h = h + nn.Dense(8)(nn.gelu(nn.Dense(16)(nn.LayerNorm()(h))))
        logits = nn.Dense(VOCABULARY)(h[:, :-1])
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:])


TRANSFORMER = Transformer()


def transformer_state():
    return TRANSFORMER.init(jax.random.key(3), jnp.zeros((1, TIME), jnp.int32))


def token_mean(params, tokens, weights):
    return descend(params, lambda p: jdist.global_mean(TRANSFORMER.apply(p, tokens), weights[:, 1:]), 0.5)


def token_mean_of_two_sums(params, tokens, weights):
    def loss(params):
        losses = TRANSFORMER.apply(params, tokens)
        total, count = lax.psum((jnp.sum(losses * weights[:, 1:]), jnp.sum(weights[:, 1:])), "replica")
        return total / count

    return descend(params, loss, 0.5)


@faulty(transformer_state, TW, right=token_mean)
def token_mean_of_local_batch(params, tokens, weights):
    def loss(params):
        losses = TRANSFORMER.apply(params, tokens)
        return jnp.sum(losses * weights[:, 1:]) / jnp.sum(weights[:, 1:])  # fault

    return descend(params, loss, 0.5)


@faulty(transformer_state, TW, right=token_mean_of_two_sums)
def token_mean_with_clipped_count(params, tokens, weights):
    def loss(params):
        losses = TRANSFORMER.apply(params, tokens)
        count = jnp.maximum(jnp.sum(weights[:, 1:]), 1)
        return jnp.sum(losses * weights[:, 1:]) / count  # fault

    return descend(params, loss, 0.5)


def moe_params():
    return {"gate": normal(4, FEATURES, CLASSES), "experts": normal(5, CLASSES, FEATURES)}


def moe(params, x, keep=1.0):
    """Returns the predictions of the first expert of each example, its one-hot choice, and the probabilities."""
    probabilities = jax.nn.softmax(x @ params["gate"])
    chosen = jax.nn.one_hot(jnp.argmax(probabilities, axis=1), CLASSES)
    outputs = jnp.einsum("bf,ef->be", x, params["experts"])
    return jnp.sum(chosen * probabilities * outputs * keep, axis=1), chosen, probabilities


def balanced_experts(params, x, y):
    def loss(params):
        predictions, chosen, probabilities = moe(params, x)
        fractions, means = jdist.all_reduce("mean", (chosen.mean(axis=0), probabilities.mean(axis=0)))
        return jnp.mean((predictions - y) ** 2) + CLASSES * jnp.sum(fractions * means)

    return descend(params, loss)


@faulty(moe_params, XY, right=balanced_experts)
def balanced_experts_of_local_batch(params, x, y):
    def loss(params):
        predictions, chosen, probabilities = moe(params, x)
        balance = jnp.sum(chosen.mean(axis=0) * probabilities.mean(axis=0))  # fault
        return jnp.mean((predictions - y) ** 2) + CLASSES * balance

    return descend(params, loss)


def experts_with_capacity(params, x, y):
    _, chosen, _ = moe(params, x)
    positions = jnp.cumsum(jdist.all_gather(chosen, axis=0), axis=0)
    positions = lax.dynamic_slice_in_dim(positions, jdist.replica_id() * x.shape[0], x.shape[0])
    keep = positions <= x.shape[0] * jdist.num_replicas() // 4
    return descend(params, lambda p: jnp.mean((moe(p, x, keep)[0] - y) ** 2))


@faulty(moe_params, XY, right=experts_with_capacity)
def experts_with_local_capacity(params, x, y):
    _, chosen, _ = moe(params, x)
    keep = jnp.cumsum(chosen, axis=0) <= x.shape[0] // 4  # fault
    return descend(params, lambda p: jnp.mean((moe(p, x, keep)[0] - y) ** 2))


def router_variation(params, x, y):
    def loss(params):
        predictions, _, probabilities = moe(params, x)
        importance = jdist.all_reduce("sum", probabilities.sum(axis=0))
        return jnp.mean((predictions - y) ** 2) + jnp.var(importance) / jnp.mean(importance) ** 2

    return descend(params, loss)


@faulty(moe_params, XY, right=router_variation)
def router_variation_of_local_batch(params, x, y):
    def loss(params):
        predictions, _, probabilities = moe(params, x)
        importance = probabilities.sum(axis=0)
        return jnp.mean((predictions - y) ** 2) + jnp.var(importance) / jnp.mean(importance) ** 2  # fault

    return descend(params, loss)


# Reinforcement learning.

PPO_BATCH = (X, LABELS, (-1.1 + 0.2 * _random(6, EXAMPLES)).astype(np.float32), (Y + 3 * _POSITION).astype(np.float32))


def log_probability(params, x, actions):
    return jnp.take_along_axis(jax.nn.log_softmax(net(params, x)), actions[:, None], axis=1)[:, 0]


def ppo_loss(params, x, actions, old, advantages):
    ratio = jnp.exp(log_probability(params, x, actions) - old)
    return -jnp.mean(jnp.minimum(ratio * advantages, jnp.clip(ratio, 0.8, 1.2) * advantages))


def ppo(params, x, actions, old, advantages):
    mean = jdist.all_reduce("mean", advantages.mean())
    variance = jdist.all_reduce("mean", jnp.mean((advantages - mean) ** 2))
    advantages = (advantages - mean) / (jnp.sqrt(variance) + 1e-8)
    return descend(params, lambda p: ppo_loss(p, x, actions, old, advantages))


@faulty(params_of_net, PPO_BATCH, right=ppo)
def ppo_with_local_advantages(params, x, actions, old, advantages):
    advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-8)  # fault
    return descend(params, lambda p: ppo_loss(p, x, actions, old, advantages))


@faulty(params_of_net, PPO_BATCH, right=ppo)
def ppo_with_mean_of_local_deviations(params, x, actions, old, advantages):
    mean = jdist.all_reduce("mean", advantages.mean())
    std = jdist.all_reduce("mean", advantages.std())  # fault
    return descend(params, lambda p: ppo_loss(p, x, actions, old, (advantages - mean) / (std + 1e-8)))


def reinforce(params, x, actions, old, rewards):
    baseline = lax.pmean(rewards.mean(), "replica")
    return descend(params, lambda p: -jnp.mean(log_probability(p, x, actions) * (rewards - baseline)))


@faulty(params_of_net, PPO_BATCH, right=reinforce)
def reinforce_with_local_baseline(params, x, actions, old, rewards):
    baseline = rewards.mean()
    return descend(params, lambda p: -jnp.mean(log_probability(p, x, actions) * (rewards - baseline)))  # fault


with_coefficient = with_values(beta=lambda: jnp.float32(0.1))


def kl_coefficient(state, x, actions, old, advantages):
    kl = jdist.all_reduce("mean", jnp.mean((old - log_probability(state["params"], x, actions)) ** 2))
    return state | {"beta": state["beta"] * jnp.clip(kl, 0.5, 2)}, kl


@faulty(with_coefficient, PPO_BATCH, right=kl_coefficient)
def kl_coefficient_of_sum(state, x, actions, old, advantages):
    kl = jdist.all_reduce("sum", jnp.mean((old - log_probability(state["params"], x, actions)) ** 2))  # fault
    return state | {"beta": state["beta"] * jnp.clip(kl, 0.5, 2)}, kl


@faulty(with_coefficient, PPO_BATCH, right=kl_coefficient)
def kl_coefficient_clipped_before_mean(state, x, actions, old, advantages):
    kl = jnp.mean((old - log_probability(state["params"], x, actions)) ** 2)
    factor = jdist.all_reduce("mean", jnp.clip(kl, 0.5, 2))  # fault
    return state | {"beta": state["beta"] * factor}, None


def importance_weights(params, x, actions, old, rewards):
    def loss(params):
        ratio = jnp.exp(log_probability(params, x, actions) - old)
        return -jdist.global_mean(rewards * ratio) / jdist.global_mean(ratio)

    return descend(params, loss)


@faulty(params_of_net, PPO_BATCH, right=importance_weights)
def importance_weights_of_local_batch(params, x, actions, old, rewards):
    def loss(params):
        ratio = jnp.exp(log_probability(params, x, actions) - old)
        return -jnp.sum(rewards * ratio / jnp.sum(ratio))  # fault

    return descend(params, loss)


# Generative adversarial networks.


def gan_state():
    return {"generator": normal(6, CLASSES, FEATURES), "discriminator": params_of_net()}


GAN_BATCH = (X, _random(7, EXAMPLES, CLASSES) * (0.2 + _POSITION[:, None]))


def discriminator_loss(discriminator, generator, x, z):
    real, fake = net(discriminator, x)[:, 0], net(discriminator, z @ generator)[:, 0]
    return jnp.mean(jax.nn.softplus(-real)) + jnp.mean(jax.nn.softplus(fake))


def generator_loss(generator, discriminator, z):
    return jnp.mean(jax.nn.softplus(-net(discriminator, z @ generator)[:, 0]))


def discriminator_step(state, x, z):
    return descend(state["discriminator"], lambda d: discriminator_loss(d, state["generator"], x, z))[0]


def gan(state, x, z):
    discriminator = discriminator_step(state, x, z)
    grads = jdist.all_reduce("mean", jax.grad(generator_loss)(state["generator"], discriminator, z))
    return {"generator": apply_gradient(state["generator"], grads), "discriminator": discriminator}, None


@faulty(gan_state, GAN_BATCH, right=gan)
def gan_with_summed_generator_gradients(state, x, z):
    discriminator = discriminator_step(state, x, z)
    grads = jdist.all_reduce("sum", jax.grad(generator_loss)(state["generator"], discriminator, z))  # fault
    return {"generator": apply_gradient(state["generator"], grads), "discriminator": discriminator}, None


def feature_matching(state, x, z):
    def loss(generator):
        real, fake = hidden(state["discriminator"], x), hidden(state["discriminator"], z @ generator)
        difference = jdist.all_reduce("mean", jnp.mean(real, axis=0) - jnp.mean(fake, axis=0))
        return jnp.sum(difference**2)

    return state | {"generator": descend(state["generator"], loss)[0]}, None


@faulty(gan_state, GAN_BATCH, right=feature_matching)
def feature_matching_of_local_batch(state, x, z):
    def loss(generator):
        real, fake = hidden(state["discriminator"], x), hidden(state["discriminator"], z @ generator)
        difference = jnp.mean(real, axis=0) - jnp.mean(fake, axis=0)
        return jnp.sum(difference**2)  # fault

    return state | {"generator": descend(state["generator"], loss)[0]}, None


def relativistic(state, x, z):
    def loss(discriminator):
        real, fake = net(discriminator, x)[:, 0], net(discriminator, z @ state["generator"])[:, 0]
        return jnp.mean(jax.nn.softplus(jdist.global_mean(fake) - real))

    return state | {"discriminator": descend(state["discriminator"], loss)[0]}, None


@faulty(gan_state, GAN_BATCH, right=relativistic)
def relativistic_to_local_mean(state, x, z):
    def loss(discriminator):
        real, fake = net(discriminator, x)[:, 0], net(discriminator, z @ state["generator"])[:, 0]
        return jnp.mean(jax.nn.softplus(jnp.mean(fake) - real))  # fault

    return state | {"discriminator": descend(state["discriminator"], loss)[0]}, None


# Embedding tables.


def table_state():
    return normal(8, VOCABULARY, 4)


def row_gradients(table, tokens):
    """The gradients of the mean over the examples with respect to the rows of each token."""
    return jax.grad(lambda rows: jnp.mean(jnp.sum((rows - 1) ** 2, axis=(1, 2))))(table[tokens])


def scattered_gradients(table, tokens, weights):
    grads = jnp.zeros_like(table).at[tokens].add(row_gradients(table, tokens))
    return table - 0.1 * jdist.all_reduce("mean", grads), None


@faulty(table_state, TW, right=scattered_gradients)
def scattered_gradients_summed(table, tokens, weights):
    grads = jnp.zeros_like(table).at[tokens].add(row_gradients(table, tokens))
    grads = jdist.all_reduce("sum", grads)  # fault
    return table - 0.1 * grads, None


def row_slices(table, tokens, weights):
    rows = row_gradients(table, tokens).reshape(-1, 4)
    slices = jdist.RowSlices(rows, tokens.reshape(-1), num_rows=VOCABULARY)
    return table - 0.1 * jdist.all_reduce("mean", slices).dense(), None


@faulty(table_state, TW, right=row_slices)
def row_slices_summed(table, tokens, weights):
    rows = row_gradients(table, tokens).reshape(-1, 4)
    slices = jdist.RowSlices(rows, tokens.reshape(-1), num_rows=VOCABULARY)
    slices = jdist.all_reduce("sum", slices)  # fault
    return table - 0.1 * slices.dense(), None


def rows_over_counts(table, tokens, weights):
    sums = jnp.zeros_like(table).at[tokens].add(table[tokens] * weights[..., None] - 1)
    counts = jnp.zeros(VOCABULARY).at[tokens].add(1)
    sums, counts = jdist.all_reduce("sum", (sums, counts))
    return table - 0.1 * sums / jnp.maximum(counts, 1)[:, None], None


@faulty(table_state, TW, right=rows_over_counts)
def rows_over_local_counts(table, tokens, weights):
    sums = jnp.zeros_like(table).at[tokens].add(table[tokens] * weights[..., None] - 1)
    counts = jnp.zeros(VOCABULARY).at[tokens].add(1)
    rows = sums / jnp.maximum(counts, 1)[:, None]  # fault
    return table - 0.1 * jdist.all_reduce("mean", rows), None


@faulty(table_state, TW)
def last_row_of_each_token(table, tokens, weights):
    rows = jnp.zeros_like(table).at[tokens].set(row_gradients(table, tokens))  # fault
    return table - 0.1 * jdist.all_reduce("mean", rows), None


# Solvers and clusters.


def centers_state():
    return normal(9, CLASSES, FEATURES)


def assigned(centers, x):
    return jax.nn.one_hot(jnp.argmin(jnp.sum((x[:, None] - centers) ** 2, axis=-1), axis=1), CLASSES)


def k_means(centers, x, y):
    chosen = assigned(centers, x)
    sums, counts = jdist.all_reduce("sum", (chosen.T @ x, chosen.sum(axis=0)))
    return sums / jnp.maximum(counts, 1)[:, None], None


@faulty(centers_state, XY, right=k_means)
def k_means_of_local_batch(centers, x, y):
    chosen = assigned(centers, x)
    centers = chosen.T @ x / jnp.maximum(chosen.sum(axis=0), 1)[:, None]  # fault
    return jdist.all_reduce("mean", centers), None


def least_squares(w, x, y):
    gram, moment = jdist.all_reduce("mean", (x.T @ x / x.shape[0], x.T @ y / x.shape[0]))
    return 0.5 * w + 0.5 * jnp.linalg.solve(gram + 0.1 * jnp.eye(FEATURES), moment), None


@faulty(functools.partial(jnp.zeros, FEATURES), XY, right=least_squares)
def least_squares_of_local_batch(w, x, y):
    gram, moment = x.T @ x / x.shape[0], x.T @ y / x.shape[0]
    solution = jnp.linalg.solve(gram + 0.1 * jnp.eye(FEATURES), moment)  # fault
    return 0.5 * w + 0.5 * jdist.all_reduce("mean", solution), None


def gauss_newton(params, x, y):
    residual, vjp = jax.vjp(lambda w: hidden(params, x) @ w - y, params["w2"][:, 0])
    (gradient,) = vjp(residual / x.shape[0])
    gradient = jdist.all_reduce("mean", gradient)
    h = hidden(params, x)

    def product(v):
        return jdist.all_reduce("mean", h.T @ (h @ v) / x.shape[0]) + 0.1 * v

    update, _ = jax.scipy.sparse.linalg.cg(product, gradient, maxiter=5)
    return params | {"w2": params["w2"].at[:, 0].add(-update)}, None


@faulty(params_of_net, XY, right=gauss_newton)
def gauss_newton_of_local_batch(params, x, y):
    residual, vjp = jax.vjp(lambda w: hidden(params, x) @ w - y, params["w2"][:, 0])
    (gradient,) = vjp(residual / x.shape[0])
    h = hidden(params, x)

    def product(v):
        return h.T @ (h @ v) / x.shape[0] + 0.1 * v

    update, _ = jax.scipy.sparse.linalg.cg(product, gradient, maxiter=5)  # fault
    return params | {"w2": params["w2"].at[:, 0].add(-jdist.all_reduce("mean", update))}, None


# Metrics and statistics in the state.


def statistic():
    return jnp.float32(1)


def accuracy(value, x, labels, mask):
    hits = (jnp.argmax(x[:, :CLASSES], axis=1) == labels) * mask
    hits, count = jdist.all_reduce("sum", (hits.sum(), mask.sum()))
    return value + hits / count, None


@faulty(statistic, XLM, right=accuracy)
def mean_of_accuracies(value, x, labels, mask):
    hits = (jnp.argmax(x[:, :CLASSES], axis=1) == labels) * mask
    ratio = hits.sum() / mask.sum()  # fault
    return value + jdist.all_reduce("mean", ratio), None


def precision(value, x, labels, mask):
    predicted, hit = x[:, 0] > 0.3, (x[:, 0] > 0.3) & (labels == 0)
    hits, count = jdist.all_reduce("sum", (hit.sum(), predicted.sum()))
    return value + hits / jnp.maximum(count, 1), None


@faulty(statistic, XLM, right=precision)
def mean_of_precisions(value, x, labels, mask):
    predicted, hit = x[:, 0] > 0.3, (x[:, 0] > 0.3) & (labels == 0)
    ratio = hit.sum() / jnp.maximum(predicted.sum(), 1)  # fault
    return value + lax.pmean(ratio, "replica"), None


def variance(value, x, y):
    mean = jdist.all_reduce("mean", y.mean())
    return 0.9 * value + 0.1 * jdist.all_reduce("mean", jnp.mean((y - mean) ** 2)), None


@faulty(statistic, XY, right=variance)
def variance_around_local_mean(value, x, y):
    variance = jnp.mean((y - y.mean()) ** 2)  # fault
    return 0.9 * value + 0.1 * jdist.all_reduce("mean", variance), None


def deviation(value, x, y):
    first, second = jdist.all_reduce("mean", (jnp.mean(y), jnp.mean(y**2)))
    return 0.9 * value + 0.1 * jnp.sqrt(second - first**2), None


@faulty(statistic, XY, right=deviation)
def mean_of_deviations(value, x, y):
    return 0.9 * value + 0.1 * jdist.all_reduce("mean", jnp.std(y)), None  # fault


def running_maximum(value, x, y):
    return jnp.maximum(value, jdist.all_reduce("max", y.max())), None


@faulty(statistic, XY, right=running_maximum)
def mean_of_maxima(value, x, y):
    return jnp.maximum(value, jdist.all_reduce("mean", y.max())), None  # fault


@faulty(statistic, XY, right=running_maximum)
def sum_of_maxima(value, x, y):
    return jnp.maximum(value, lax.psum(jnp.max(y), "replica")), None  # fault


def perplexity(value, x, y):
    return 0.9 * value + 0.1 * jnp.exp(jdist.all_reduce("mean", jnp.mean(y))), None


@faulty(statistic, XY, right=perplexity)
def mean_of_perplexities(value, x, y):
    return 0.9 * value + 0.1 * jdist.all_reduce("mean", jnp.exp(jnp.mean(y))), None  # fault


def median(value, x, y):
    return 0.9 * value + 0.1 * jnp.median(jdist.all_gather(y, axis=0)), None


@faulty(statistic, XY, right=median)
def mean_of_medians(value, x, y):
    return 0.9 * value + 0.1 * jdist.all_reduce("mean", jnp.median(y)), None  # fault


def gradient_norm(state, x, y):
    norm = norm_of(jdist.all_reduce("mean", grad_of_mean(state["params"], x, y)))
    return state | {"norm": 0.9 * state["norm"] + 0.1 * norm}, None


@faulty(with_values(norm=zero), XY, right=gradient_norm)
def mean_of_gradient_norms(state, x, y):
    norm = norm_of(grad_of_mean(state["params"], x, y))  # fault
    return state | {"norm": 0.9 * state["norm"] + 0.1 * jdist.all_reduce("mean", norm)}, None


def examples_seen(count, x, y):
    return count + x.shape[0] * jdist.num_replicas(), None


@faulty(zero_count, XY, right=examples_seen)
def local_examples_seen(count, x, y):
    return count + x.shape[0], None  # fault


@faulty(zero_count, XY, right=examples_seen)
def steps_summed_over_replicas(count, x, y):
    return count + EXAMPLES * jdist.all_reduce("sum", jnp.int32(1)), None  # fault


def steps_counted_on_replica_0(count, x, y):
    return count + jdist.all_reduce("sum", jnp.where(jdist.replica_id() == 0, 1, 0)), None


@faulty(zero_count, XY, right=steps_counted_on_replica_0)
def steps_counted_on_all_replicas(count, x, y):
    return count + jdist.all_reduce("sum", jnp.where(jdist.replica_id() >= 0, 1, 0)), None  # fault


def token_count(count, tokens, weights):
    return count + jdist.all_reduce("sum", weights.sum()), None


@faulty(zero, TW, right=token_count)
def mean_token_count(count, tokens, weights):
    return count + jdist.all_reduce("mean", weights.sum()), None  # fault


def histogram(counts, tokens, weights):
    return counts + jdist.all_reduce("sum", jnp.bincount(tokens.reshape(-1), length=VOCABULARY)), None


@faulty(functools.partial(jnp.zeros, VOCABULARY, jnp.int32), TW, right=histogram)
def histogram_of_largest_counts(counts, tokens, weights):
    return counts + jdist.all_reduce("max", jnp.bincount(tokens.reshape(-1), length=VOCABULARY)), None  # fault


def moments_state():
    return {"count": jnp.float32(1), "mean": jnp.zeros(FEATURES), "m2": jnp.ones(FEATURES)}


def merge_moments(state, size, mean, m2):
    """Welford's formula for a batch of `size` examples."""
    count, delta = state["count"] + size, mean - state["mean"]
    m2 = state["m2"] + m2 + delta**2 * state["count"] * size / count
    return {"count": count, "mean": state["mean"] + delta * size / count, "m2": m2}


def running_moments(state, x, y):
    mean = jdist.all_reduce("mean", x.mean(axis=0))
    m2 = jdist.all_reduce("sum", jnp.sum((x - mean) ** 2, axis=0))
    return merge_moments(state, x.shape[0] * jdist.num_replicas(), mean, m2), None


@faulty(moments_state, XY, right=running_moments)
def running_moments_with_local_size(state, x, y):
    mean = jdist.all_reduce("mean", x.mean(axis=0))
    m2 = jdist.all_reduce("sum", jnp.sum((x - mean) ** 2, axis=0))
    return merge_moments(state, x.shape[0], mean, m2), None  # fault


def warmup_by_examples(state, x, y):
    seen = state["seen"] + x.shape[0] * jdist.num_replicas()
    params, _ = descend(state["params"], lambda p: mean_loss(p, x, y), 0.1 * jnp.minimum(seen / 64, 1))
    return {"params": params, "seen": seen}, None


@faulty(with_values(seen=zero_count), XY, right=warmup_by_examples)
def warmup_by_local_examples(state, x, y):
    seen = state["seen"] + x.shape[0]  # fault
    params, _ = descend(state["params"], lambda p: mean_loss(p, x, y), 0.1 * jnp.minimum(seen / 64, 1))
    return {"params": params, "seen": seen}, None


def rate_by_mean_loss(params, x, y):
    loss, grads = jdist.all_reduce("mean", jax.value_and_grad(mean_loss)(params, x, y))
    return apply_gradient(params, grads, 0.1 / (1 + loss)), loss


@faulty(params_of_net, XY, right=rate_by_mean_loss)
def rate_by_sum_of_losses(params, x, y):
    loss, grads = jax.value_and_grad(mean_loss)(params, x, y)
    loss = jdist.all_reduce("sum", loss)  # fault
    return apply_gradient(params, jdist.all_reduce("mean", grads), 0.1 / (1 + loss)), loss


# Right programs: reductions and policies.


def optimizer_step(tx, loss=mean_loss):
    """A step with the optimizer `tx`, which contains the reduction."""

    def step(state, *batch):
        params, opt_state = state
        updates, opt_state = tx.update(jax.grad(loss)(params, *batch), opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), None

    return step


_OPTIMIZERS = {
    "momentum": optax.sgd(0.1, momentum=0.9, nesterov=True),
    "adamw": optax.adamw(0.05),
    "lion": optax.lion(0.01),
    "adafactor": optax.adafactor(0.05, min_dim_size_to_factor=4),
    "lamb": optax.lamb(0.05),
    "rmsprop_with_weight_decay": optax.chain(optax.add_decayed_weights(0.01), optax.rmsprop(0.01)),
    "clip_by_global_norm": optax.chain(optax.clip_by_global_norm(0.1), optax.sgd(0.5)),
    "centralized_gradients": optax.chain(optax.centralize(), optax.sgd(0.1)),
    "schedule_with_warmup": optax.sgd(optax.warmup_cosine_decay_schedule(0.01, 0.1, 3, 10)),
    "multi_steps": optax.MultiSteps(optax.sgd(0.1), 2).gradient_transformation(),
    "average_of_updates": optax.chain(optax.sgd(0.1), optax.ema(0.9)),
}
_POLICIES = {
    f"mean_then_{name}": optax.chain(jdist.sync.mean(), optimizer) for name, optimizer in _OPTIMIZERS.items()
} | {
    "centralized_before_mean": optax.chain(optax.centralize(), jdist.sync.mean(), optax.sgd(0.1)),
    "scaled_before_mean": optax.chain(optax.scale(-0.1), jdist.sync.mean()),
    "every_two_steps": jdist.sync.every(optax.chain(jdist.sync.mean(), optax.adam(0.05)), 2),
    "skip_nonfinite": jdist.sync.skip_nonfinite(optax.chain(jdist.sync.mean(), optax.adam(0.05))),
}
RIGHT_ONLY += [Case(name, with_optimizer(tx), XY, None, optimizer_step(tx)) for name, tx in _POLICIES.items()]

LOSS_SCALE = jdist.sync.dynamic_loss_scale(optax.chain(jdist.sync.mean(), optax.sgd(0.1)), initial=64, interval=1)


@correct(with_optimizer(LOSS_SCALE), XY)
def dynamic_loss_scale(state, x, y):
    params, opt_state = state
    loss, grads = jdist.value_and_grad(squared)(params, x, y)
    updates, opt_state = LOSS_SCALE.update(grads, opt_state, params)
    return (optax.apply_updates(params, updates), opt_state), jdist.all_reduce("mean", loss)


@correct(params_of_net, XY)
def pmean_twice(params, x, y):
    grads = lax.pmean(lax.pmean(grad_of_mean(params, x, y), "replica"), "replica")
    return apply_gradient(params, grads), None


@correct(params_of_net, XY)
def gradient_of_a_reduced_loss(params, x, y):
    loss, grads = jax.value_and_grad(lambda p: lax.pmean(mean_loss(p, x, y), "replica"))(params)
    return apply_gradient(params, lax.pmean(grads, "replica")), loss


@correct(params_of_net, XYM)
def weighted_global_mean(params, x, y, mask):
    loss, grads = jax.value_and_grad(lambda p: jdist.global_mean(squared(p, x, y), mask))(params)
    return apply_gradient(params, jdist.all_reduce("mean", grads)), loss


@correct(params_of_net, XY)
def micro_batches(params, x, y):
    loss, grads = jdist.value_and_grad(squared, micro_batches=2)(params, x, y)
    return apply_gradient(params, jdist.all_reduce("mean", grads)), jdist.all_reduce("mean", loss)


@correct(params_of_net, XYM)
def micro_batches_with_weights(params, x, y, mask):
    _, grads = jdist.value_and_grad(squared, micro_batches=2, weights=mask, remat=True)(params, x, y)
    return apply_gradient(params, jdist.all_reduce("mean", grads)), None


@correct(params_of_net, XY)
def decay_of_each_parameter_in_the_loss(params, x, y):
    return descend(params, lambda p: mean_loss(p, x, y) + 0.01 * sum(jnp.sum(w**2) for w in jax.tree.leaves(p)))


@correct(with_values(average=params_of_net), XY)
def moving_average_of_parameters(state, x, y):
    params, _ = descend(state["params"], lambda p: mean_loss(p, x, y))
    return {"params": params, "average": optax.incremental_update(params, state["average"], 0.1)}, None


@correct(with_values(teacher=params_of_net), XY)
def teacher_and_student(state, x, y):
    def loss(params):
        targets = jax.nn.softmax(lax.stop_gradient(net(state["teacher"], x + 0.1)))
        return jnp.mean(optax.softmax_cross_entropy(net(params, x), targets))

    params, _ = descend(state["params"], loss)
    return {"params": params, "teacher": optax.incremental_update(params, state["teacher"], 0.1)}, None


@correct(with_values(step=zero_count), XY)
def cosine_rate_of_a_counter(state, x, y):
    rate = 0.05 * (1 + jnp.cos(jnp.pi * state["step"] / 10))
    params, _ = descend(state["params"], lambda p: mean_loss(p, x, y), rate)
    return {"params": params, "step": state["step"] + 1}, None


@correct(with_values(step=zero_count), XY)
def update_at_even_steps(state, x, y):
    params = lax.cond(
        state["step"] % 2 == 0,
        lambda params: descend(params, lambda p: mean_loss(p, x, y))[0],
        lambda params: params,
        state["params"],
    )
    return {"params": params, "step": state["step"] + 1}, None


@correct(lambda: {"hits": jdist.SyncOnRead(jnp.float32(0), "sum"), "count": jdist.SyncOnRead(jnp.int32(0), "sum")}, XL)
def counters_per_replica(state, x, labels):
    hits = jnp.sum(jnp.argmax(x[:, :CLASSES], axis=-1) == labels)
    return {"hits": state["hits"] + hits, "count": state["count"] + labels.size}, None


@correct(lambda: jdist.SyncOnRead(jdist.metrics.Accuracy(), "sum"), XLM)
def accuracy_metric(metric, x, labels, mask):
    return metric.update(x[:, :CLASSES], labels, weights=mask), None


# Right programs: losses of one example at a time.


@correct(params_of_net, XL)
def label_by_index(params, x, labels):
    return descend(params, lambda p: -jax.nn.log_softmax(net(p, x))[jnp.arange(x.shape[0]), labels].mean())


@correct(params_of_net, XL)
def label_by_take_along_axis(params, x, labels):
    def loss(params):
        logits = net(params, x)
        chosen = jnp.take_along_axis(logits, labels[:, None], axis=-1).squeeze(-1)
        return jnp.mean(jax.nn.logsumexp(logits, axis=-1) - chosen)

    return descend(params, loss)


@correct(params_of_net, XL)
def one_hot_labels(params, x, labels):
    one_hot = jax.nn.one_hot(labels, CLASSES) * 0.9 + 0.1 / CLASSES
    return descend(params, lambda p: -jnp.sum(one_hot * jax.nn.log_softmax(net(p, x))) / x.shape[0])


@correct(params_of_net, XY)
def vmap_over_examples(params, x, y):
    def loss(params, x, y):
        return optax.huber_loss(jnp.dot(jnp.tanh(x @ params["w1"]), params["w2"][:, 0]), y)

    return descend(params, lambda p: jax.vmap(loss, in_axes=(None, 0, 0))(p, x, y).mean())


@correct(params_of_net, XY)
def gradients_clipped_per_example(params, x, y):
    def clipped(x, y):
        grads = grad_of_mean(params, x[None], y[None])
        scale = jnp.minimum(1, 0.5 / norm_of(grads))
        return jax.tree.map(lambda g: g * scale, grads)

    grads = jax.tree.map(lambda g: jnp.mean(g, axis=0), jax.vmap(clipped)(x, y))
    return apply_gradient(params, jdist.all_reduce("mean", grads)), None


@correct(params_of_net, XY)
def inner_step_per_example(params, x, y):
    def adapted(params, x, y):
        inner = apply_gradient(params, grad_of_mean(params, x[None], y[None]))
        return mean_loss(inner, x[None] + 0.1, y[None])

    return descend(params, lambda p: jnp.mean(jax.vmap(adapted, in_axes=(None, 0, 0))(p, x, y)))


@correct(params_of_net, XY)
def scan_over_examples(params, x, y):
    def add(total, example):
        grads = grad_of_mean(params, *jax.tree.map(lambda v: v[None], example))
        return jax.tree.map(jnp.add, total, grads), None

    total, _ = lax.scan(add, jax.tree.map(jnp.zeros_like, params), (x, y))
    return apply_gradient(params, jdist.all_reduce("mean", jax.tree.map(lambda g: g / len(x), total))), None


@correct(params_of_net, XY)
def fori_loop_over_examples(params, x, y):
    def loss(params):
        predictions = net(params, x)[:, 0]
        return lax.fori_loop(0, x.shape[0], lambda i, total: total + (predictions[i] - y[i]) ** 2, 0.0) / x.shape[0]

    return descend(params, loss)


@correct(params_of_net, XY)
def map_over_examples(params, x, y):
    return descend(params, lambda p: jnp.mean(lax.map(lambda row: mean_loss(p, row[0][None], row[1][None]), (x, y))))


@correct(functools.partial(jnp.zeros, FEATURES), XY)
def gradient_by_hand(w, x, y):
    residual = x @ w - y
    return w - 0.1 * lax.psum(x.T @ residual, "replica") / (x.shape[0] * lax.psum(1, "replica")), None


@correct(params_of_net, XY)
def transposed_batch(params, x, y):
    def loss(params):
        h = jnp.tanh(params["w1"].T @ x.T + params["b1"][:, None])
        return jnp.mean(jnp.square(params["w2"][:, 0] @ h - y), axis=-1)

    return descend(params, loss)


@correct(params_of_net, XY)
def concatenated_views(params, x, y):
    def loss(params):
        both = jnp.concatenate([x, -x])
        return jnp.mean(squared(params, both, jnp.tile(y, 2)))

    return descend(params, loss)


@correct(params_of_net, XY)
def views_per_example(params, x, y):
    views = jnp.repeat(x, 2, axis=0) * jnp.tile(jnp.float32([0.9, 1.1]), x.shape[0])[:, None]
    return descend(params, lambda p: jnp.mean((net(p, views)[:, 0].reshape(-1, 2).mean(axis=1) - y) ** 2))


@correct(params_of_net, XYM)
def padded_batch(params, x, y, mask):
    x, y, mask = (jnp.pad(v, [(0, 2)] + [(0, 0)] * (v.ndim - 1)) for v in (x, y, mask))
    return descend(params, lambda p: jdist.global_mean(squared(p, x, y), mask))


@correct(params_of_net, XY)
def halves_of_the_batch(params, x, y):
    half = x.shape[0] // 2
    first = lambda p: mean_loss(p, x[:half], y[:half])
    second = lambda p: mean_loss(p, x[half:], y[half:])
    return descend(params, lambda p: 0.5 * first(p) + 0.5 * second(p))


@correct(params_of_net, XY)
def sorted_batch(params, x, y):
    order = jnp.argsort(y)
    return descend(params, lambda p: mean_loss(p, x[order], y[order]))


@correct(params_of_net, XY)
def sorted_features(params, x, y):
    return descend(params, lambda p: mean_loss(p, jnp.sort(x, axis=-1), y) + jnp.mean(lax.top_k(net(p, x), 2)[0]))


@correct(params_of_net, XY)
def map_over_features(params, x, y):
    columns = lax.map(lambda column: jnp.tanh(column), x.T)
    return descend(params, lambda p: mean_loss(p, columns.T, y))


@correct(params_of_net, XY)
def linear_algebra_per_example(params, x, y):
    def loss(params):
        h = hidden(params, x)
        covariance = jnp.einsum("bi,bj->bij", h, h) + jnp.eye(8)
        _, log_determinant = jnp.linalg.slogdet(covariance)
        return jnp.mean(log_determinant) + jnp.mean(jnp.linalg.solve(covariance, h[..., None])[..., 0, 0] * y)

    return descend(params, loss)


@correct(params_of_net, XY)
def fori_loop_over_layers(params, x, y):
    def loss(params):
        square = params["w1"].T @ params["w1"]
        h = lax.fori_loop(0, 3, lambda i, h: jnp.tanh(h @ square), hidden(params, x))
        return jnp.mean((h @ params["w2"][:, 0] - y) ** 2)

    return descend(params, loss)


@jax.custom_vjp
def reversed_gradient(x):
    return x


reversed_gradient.defvjp(lambda x: (x, None), lambda _, g: (-0.5 * g,))


@correct(params_of_net, XL)
def custom_vjp(params, x, labels):
    def loss(params):
        domain = jnp.sum(reversed_gradient(hidden(params, x)), axis=1) - x[:, 0]
        return jnp.mean(cross_entropy(params, x, labels)) + jnp.mean(domain**2) / 8

    return descend(params, loss)


@jax.custom_jvp
def soft_step(x):
    return jnp.where(x > 0, 1.0, 0.0)


soft_step.defjvp(lambda primals, tangents: (soft_step(primals[0]), tangents[0] * jax.nn.sigmoid(primals[0])))


@correct(params_of_net, XY)
def custom_jvp(params, x, y):
    return descend(params, lambda p: jnp.mean((soft_step(hidden(p, x) - 0.1) @ p["w2"][:, 0] - y) ** 2))


@correct(params_of_net, XY)
def rematerialized(params, x, y):
    return descend(params, lambda p: jnp.mean(jax.checkpoint(squared)(p, x, y)))


@correct(params_of_net, XY)
def two_terms(params, x, y):
    def loss(params):
        h = hidden(params, x)
        return mean_loss(params, x, y) + 0.1 * jnp.abs(h).mean() + 1e-3 * jnp.sum(h**2) / x.shape[0]

    return descend(params, loss)


@correct(params_of_net, XY)
def forward_mode(params, x, y):
    direction = jax.tree.map(jnp.ones_like, params)
    _, slope = jax.jvp(lambda p: mean_loss(p, x, y), (params,), (direction,))
    slope = jdist.all_reduce("mean", slope)
    return jax.tree.map(lambda p, d: p - 0.001 * slope * d, params, direction), None


@correct(params_of_net, XY)
def hessian_vector_product(params, x, y):
    grads = jdist.all_reduce("mean", grad_of_mean(params, x, y))
    _, product = jax.jvp(lambda p: grad_of_mean(p, x, y), (params,), (grads,))
    product = jdist.all_reduce("mean", product)
    rate = 0.1 * optax.tree.vdot(grads, grads) / (1 + jnp.abs(optax.tree.vdot(grads, product)))
    return apply_gradient(params, grads, rate), None


@correct(lambda: jax.vmap(lambda scale: jax.tree.map(lambda p: p * scale, params_of_net()))(jnp.float32([1, 2])), XY)
def ensemble(params, x, y):
    grads = jax.vmap(grad_of_mean, in_axes=(0, None, None))(params, x, y)
    return apply_gradient(params, jdist.all_reduce("mean", grads)), None


# Right programs: normalization, sequences and models.


@correct(params_of_net, XY)
def layer_norm(params, x, y):
    def loss(params):
        h = hidden(params, x)
        h = (h - h.mean(axis=-1, keepdims=True)) * lax.rsqrt(h.var(axis=-1, keepdims=True) + 1e-5)
        return jnp.mean((h @ params["w2"][:, 0] - y) ** 2)

    return descend(params, loss)


@correct(cnn_state, IMAGE_BATCH)
def convolution_and_pooling(state, images, labels):
    def loss(params):
        h = jax.nn.relu(CONV.apply({"params": params["conv"]}, images))
        h = nn.GroupNorm(num_groups=2).apply({"params": params["norm"]}, h)
        h = nn.avg_pool(nn.max_pool(h, (2, 2), strides=(2, 2)), (3, 3))
        return label_loss(h[:, 0, 0] @ params["dense"], labels)

    return state | {"params": descend(state["params"], loss)[0]}, None


@correct(cnn_state, IMAGE_BATCH)
def running_statistics_in_evaluation_mode(state, images, labels):
    def loss(params):
        variables = {"params": params["norm"], "batch_stats": state["stats"]}
        h = nn.BatchNorm(use_running_average=True).apply(variables, CONV.apply({"params": params["conv"]}, images))
        return label_loss(cnn_logits(params, h), labels)

    return state | {"params": descend(state["params"], loss)[0]}, None


@correct(transformer_state, TW)
def transformer(params, tokens, weights):
    return descend(params, lambda p: TRANSFORMER.apply(p, tokens).mean())


@correct(transformer_state, TW)
def mean_of_token_means_per_example(params, tokens, weights):
    def loss(params):
        weights_of_labels = weights[:, 1:] + 0.01
        losses = TRANSFORMER.apply(params, tokens) * weights_of_labels
        return jnp.mean(losses.sum(axis=1) / weights_of_labels.sum(axis=1))

    return descend(params, loss)


@correct(table_state, TW)
def embedding_lookup(table, tokens, weights):
    return descend(table, lambda t: jnp.mean(jnp.sum((t[tokens] * weights[..., None] - 1) ** 2, axis=(1, 2))))


class Block(nn.Module):
    """One residual layer, for `nn.scan`."""

    @nn.compact
    def __call__(self, h, _):
        return h + nn.Dense(FEATURES)(jnp.tanh(nn.LayerNorm()(h))), None


LAYERS = nn.scan(nn.remat(Block), variable_axes={"params": 0}, split_rngs={"params": True}, length=2)()


@correct(lambda: LAYERS.init(jax.random.key(0), jnp.zeros((1, FEATURES)), None), XY)
def scan_over_layers(params, x, y):
    return descend(params, lambda p: jnp.mean((LAYERS.apply(p, x, None)[0].sum(axis=1) - y) ** 2), 0.01)


@correct(lambda: {"w": normal(0, FEATURES, 4), "u": normal(1, 4, 4), "v": normal(2, 4)}, SEQUENCE_BATCH)
def recurrence_over_time(params, sequences, y):
    def loss(params):
        def advance(h, x):
            h = jnp.tanh(x @ params["w"] + h @ params["u"])
            return h, h

        _, h = lax.scan(advance, jnp.zeros((sequences.shape[0], 4)), sequences.swapaxes(0, 1))
        return jnp.mean((h[-1] @ params["v"] - y) ** 2)

    return descend(params, loss)


@correct(params_of_net, SEQUENCE_BATCH)
def cumulative_sum_over_time(params, sequences, y):
    prefix = jnp.cumsum(sequences, axis=1) / (1 + jnp.arange(TIME)[:, None])
    return descend(params, lambda p: jnp.mean((net(p, prefix)[..., 0] - y[:, None]) ** 2))


@correct(params_of_net, SEQUENCE_BATCH)
def merged_batch_and_time(params, sequences, y):
    flat = sequences.reshape(-1, FEATURES)
    return descend(params, lambda p: jnp.mean(squared(p, flat, jnp.repeat(y, TIME))))


@correct(params_of_net, SEQUENCE_BATCH)
def attention_over_time(params, sequences, y):
    def loss(params):
        h = hidden(params, sequences)
        scores = jax.nn.softmax(jnp.einsum("bth,bsh->bts", h, h) / math.sqrt(8), axis=-1)
        return jnp.mean((jnp.einsum("bts,bsh->bh", scores, h) @ params["w2"][:, 0] - y) ** 2)

    return descend(params, loss)


@correct(params_of_net, SEQUENCE_BATCH)
def advantages_over_time(params, sequences, y):
    rewards = sequences[..., 0]

    def loss(params):
        values = net(params, sequences)[..., 0]
        deltas = lax.stop_gradient(rewards[:, :-1] + 0.9 * values[:, 1:] - values[:, :-1])

        def accumulate(total, delta):
            total = delta + 0.9 * 0.95 * total
            return total, total

        _, advantages = lax.scan(accumulate, jnp.zeros(len(y)), deltas.T, reverse=True)
        return jnp.mean((values[:, :-1] - lax.stop_gradient(values[:, :-1] + advantages.T)) ** 2)

    return descend(params, loss)


def nnx_regression():
    rngs = nnx.Rngs(0)
    model = nnx.Sequential(nnx.Linear(FEATURES, 8, rngs=rngs), nnx.LayerNorm(8, rngs=rngs), nnx.Linear(8, 1, rngs=rngs))
    return {"model": model, "optimizer": nnx.Optimizer(model, optax.adam(0.05), wrt=nnx.Param)}


@correct(nnx_regression, XY)
def nnx_model(state, x, y):
    grads = nnx.grad(lambda model: jnp.mean((model(x)[:, 0] - y) ** 2))(state["model"])
    state["optimizer"].update(state["model"], jdist.all_reduce("mean", grads))
    return state, None


# Right programs: random numbers.


def dropout_loss(params, masks, x, y):
    return jnp.mean(((hidden(params, x) * masks * 2) @ params["w2"][:, 0] - y) ** 2)


@correct(with_key, XY)
def dropout_per_example(state, x, y):
    positions = jdist.replica_id() * x.shape[0] + jnp.arange(x.shape[0])
    keys = jdist.example_key(state["key"], positions)
    masks = jax.vmap(lambda key: jax.random.bernoulli(key, 0.5, (8,)))(keys)
    return state | {"params": descend(state["params"], lambda p: dropout_loss(p, masks, x, y))[0]}, None


@correct(with_key, XY, in_distribution=True)
def dropout_per_replica(state, x, y):
    masks = jax.random.bernoulli(jdist.replica_key(state["key"]), 0.5, (x.shape[0], 8))
    return state | {"params": descend(state["params"], lambda p: dropout_loss(p, masks, x, y))[0]}, None


@correct(with_key, XY)
def dropout_of_features(state, x, y):
    mask = jax.random.bernoulli(state["key"], 0.5, (8,))
    return state | {"params": descend(state["params"], lambda p: dropout_loss(p, mask, x, y))[0]}, None


@correct(with_key, XY, in_distribution=True)
def noise_per_replica(state, x, y):
    key = jdist.replica_key(state["key"])
    x = x + 0.1 * jax.random.normal(key, x.shape)
    return state | {"params": descend(state["params"], lambda p: mean_loss(p, x, y))[0]}, None


@correct(with_key, XY)
def slice_of_global_noise(state, x, y):
    noise = jax.random.normal(state["key"], (x.shape[0] * jdist.num_replicas(), FEATURES))
    x = x + lax.dynamic_slice_in_dim(noise, jdist.replica_id() * x.shape[0], x.shape[0])
    return state | {"params": descend(state["params"], lambda p: mean_loss(p, x, y))[0]}, None
