"""What the tests of policies share: the table of policies, the strategies with two levels, and a small model to train."""

import re
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jdist
from jdist import sync

from laws import STRATEGIES, assert_in_step, rows

ROWS = 12  # in a batch of all replicas: 1, 2, 3 and 4 of them share it evenly

# Reduce at every step: from an optimizer to the optimizer under the policy.
REDUCING: dict[str, Callable[[Any], Any]] = {
    "mean": lambda optimizer: optax.chain(sync.mean(), optimizer),
    "sum": lambda optimizer: optax.chain(sync.sum(), optimizer),
    "hierarchical": lambda optimizer: optax.chain(sync.hierarchical("replica", "group"), optimizer),
    "in_dtype": lambda optimizer: optax.chain(sync.in_dtype(jnp.bfloat16), optimizer),
    "in_dtype_float16": lambda optimizer: optax.chain(sync.in_dtype(jnp.float16), optimizer),
    "int8": lambda optimizer: optax.chain(sync.int8(block_size=16), optimizer),
    "int8_stochastic": lambda optimizer: optax.chain(sync.int8(rounding="stochastic", block_size=16), optimizer),
    "top_k": lambda optimizer: optax.chain(sync.top_k(0.25), optimizer),
    "power_sgd": lambda optimizer: optax.chain(sync.power_sgd(2), optimizer),
    "top_k_in_bfloat16": lambda optimizer: optax.chain(
        sync.top_k(0.25, fallback=sync.in_dtype(jnp.bfloat16)), optimizer
    ),
}
# Count some steps only; parameters agree all the time.
GATED: dict[str, Callable[[Any], Any]] = {
    "every": lambda optimizer: sync.every(optax.chain(sync.mean(), optimizer), 2),
    "every_int8": lambda optimizer: sync.every(optax.chain(sync.int8(block_size=16), optimizer), 2),
    "skip_nonfinite": lambda optimizer: sync.skip_nonfinite(optax.chain(sync.mean(), optimizer)),
    "skip_nonfinite_top_k": lambda optimizer: sync.skip_nonfinite(optax.chain(sync.top_k(0.25), optimizer)),
}
# Parameters drift, and meet every 2 steps.
DRIFTING: dict[str, Callable[[Any], Any]] = {
    "local_sgd": lambda optimizer: sync.local_sgd(optimizer, every=2),
    "diloco": lambda optimizer: sync.diloco(optimizer, every=2),
    "diloco_int8": lambda optimizer: sync.diloco(optimizer, every=2, reduction=sync.int8(block_size=16)),
    "streaming_diloco": lambda optimizer: sync.streaming_diloco(optimizer, every=2, fragments=1, overlap=0, blend=0.0),
}
POLICIES = REDUCING | GATED | DRIFTING
FEEDBACK = ("in_dtype", "in_dtype_float16", "int8", "int8_stochastic", "top_k", "power_sgd", "top_k_in_bfloat16")

ONE_LEVEL = {name: STRATEGIES[name] for name in ("one_device", "mirrored_1", "mirrored_2", "mirrored_3")}
TWO_LEVELS = {
    f"groups_of_{size}": lambda size=size: jdist.MirroredStrategy(
        [f"cpu:{i}" for i in range(4)], cross_device_ops=jdist.HierarchicalAllReduce(group_size=size)
    )
    for size in (1, 2)
}
PLACES = ONE_LEVEL | TWO_LEVELS


class State(NamedTuple):
    """What a step takes and gives.

    Attributes:
        params: The parameters.
        opt_state: The state of the optimizer and its policy.
    """

    params: Any
    opt_state: Any


def cases(policies, places=PLACES):
    """Each policy with each strategy that it can run under, as `(policy, place)`."""
    return [(name, place) for name in policies for place in places if name != "hierarchical" or place in TWO_LEVELS]


def first_params():
    """Two matrices, a vector and a number."""
    draw = np.random.default_rng(1).normal
    return {
        "in": {"w": jnp.float32(0.5 * draw(size=(6, 16))), "b": jnp.zeros(16)},
        "out": jnp.float32(0.5 * draw(size=(16, 4))),
        "scale": jnp.ones(()),
    }


def loss(params, x, y):
    """Of a network with one hidden layer, the mean squared error."""
    hidden = jnp.tanh(x @ params["in"]["w"] + params["in"]["b"])
    return jnp.mean((params["scale"] * (hidden @ params["out"]) - y) ** 2)


def batches(strategy, steps):
    """So many batches of numbers drawn at random, the same for any number of replicas."""
    draw = np.random.default_rng(0).normal
    x, y = draw(size=(steps * ROWS, 6)).astype(np.float32), draw(size=(steps * ROWS, 4)).astype(np.float32)
    return strategy.distribute_dataset((x, y), ROWS)


def start(strategy, tx, make=first_params):
    """The state before the first step."""
    return strategy.init(lambda: State(params := make(), tx.init(params)))


def stepper(strategy, tx, loss=loss):
    """A step of `loss(params, *batch)`, whose output is each replica's own loss."""

    @strategy.step
    def step(state, batch):
        value, grads = jax.value_and_grad(loss)(state.params, *batch)
        updates, opt_state = tx.update(grads, state.opt_state, state.params)
        return State(optax.apply_updates(state.params, updates), opt_state), value

    return step


def train(strategy, tx, steps, state=None):
    """The state after so many steps, and the step."""
    state, step = state or start(strategy, tx), stepper(strategy, tx)
    for batch in batches(strategy, steps):
        state, _ = step(state, batch)
    return state, step


def once(strategy, tx, grads):
    """What a policy makes of gradients `[replica, ...]` at its first step."""
    like = jax.tree.map(lambda x: jnp.zeros(x.shape[1:], x.dtype), grads.tree)
    state = strategy.init(lambda: tx.init(like))
    update = strategy.step(lambda state, grads: tx.update(grads, state, like)[::-1])
    return update(state, grads)


def compiled(strategy, tx, shapes):
    """The compiled step of a model with leaves of these shapes."""
    make = lambda: {f"leaf{i}": jnp.ones(shape) for i, shape in enumerate(shapes)}

    def step(state, x):
        grads = jax.tree.map(lambda p: p * x, state.params)
        updates, opt_state = tx.update(grads, state.opt_state, state.params)
        return State(optax.apply_updates(state.params, updates), opt_state), None

    return strategy.step(step).lower(start(strategy, tx, make), rows(strategy)).compile().as_text()


def sent(text, collective):
    """The dtypes of what each collective of a kind in a compiled program gives."""
    found = re.findall(rf"= (.*?) {collective}(?:-start)?\(", text)
    return [dtype for result in found for dtype in re.findall(r"(\w+)\[", result)]


def read(tree):
    """`tree` as the host reads it, in numpy arrays."""
    return jax.tree.map(np.asarray, jdist.read_values(tree))


def assert_met(params):
    """Every replica holds the same bits of every leaf, whether it is mirrored or drifts."""
    for leaf in jax.tree.leaves(params, is_leaf=_is_wrapped):
        if _is_wrapped(leaf):
            assert len({np.asarray(own).tobytes() for own in leaf.values}) == 1
        else:
            assert_in_step(leaf)


def _is_wrapped(node):
    return isinstance(node, jdist.SyncOnRead)
