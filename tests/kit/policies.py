"""Shared by the tests of policies: the table of policies, strategies with two mesh axes, and a small model."""

import re
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import jdist
from jdist import sync

from laws import STRATEGIES, assert_in_step, rows

ROWS = 12  # examples in a global batch; 1, 2, 3 and 4 replicas divide it

# Reduce at every step. Each function returns the policy chained with an optimizer.
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
# Apply the optimizer at some steps only; parameters are replicated.
CONDITIONAL: dict[str, Callable[[Any], Any]] = {
    "every": lambda optimizer: sync.every(optax.chain(sync.mean(), optimizer), 2),
    "every_int8": lambda optimizer: sync.every(optax.chain(sync.int8(block_size=16), optimizer), 2),
    "skip_nonfinite": lambda optimizer: sync.skip_nonfinite(optax.chain(sync.mean(), optimizer)),
    "skip_nonfinite_top_k": lambda optimizer: sync.skip_nonfinite(optax.chain(sync.top_k(0.25), optimizer)),
}
# Parameters diverge between synchronization steps, every 2 steps.
LOCAL_UPDATES: dict[str, Callable[[Any], Any]] = {
    "local_sgd": lambda optimizer: sync.local_sgd(optimizer, every=2),
    "diloco": lambda optimizer: sync.diloco(optimizer, every=2),
    "diloco_int8": lambda optimizer: sync.diloco(optimizer, every=2, reduction=sync.int8(block_size=16)),
    "streaming_diloco": lambda optimizer: sync.streaming_diloco(optimizer, every=2, fragments=1, overlap=0, blend=0.0),
}
POLICIES = REDUCING | CONDITIONAL | LOCAL_UPDATES
FEEDBACK = ("in_dtype", "in_dtype_float16", "int8", "int8_stochastic", "top_k", "power_sgd", "top_k_in_bfloat16")

ONE_LEVEL = {name: STRATEGIES[name] for name in ("one_device", "mirrored_1", "mirrored_2", "mirrored_3")}
TWO_LEVELS = {
    f"groups_of_{size}": lambda size=size: jdist.MirroredStrategy(
        [f"cpu:{i}" for i in range(4)], cross_device_ops=jdist.HierarchicalAllReduce(group_size=size)
    )
    for size in (1, 2)
}
# Two replicas of two devices each, which hold parts of the matrices.
PARTITIONED = lambda: jdist.MirroredStrategy(
    mesh=Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("replica", "model")),
    layout=[("in/w", P(None, "model")), ("in/b", P("model")), ("out", P("model")), (".*", P())],
)
POLICY_STRATEGIES = ONE_LEVEL | TWO_LEVELS | {"partitioned": PARTITIONED}


class State(NamedTuple):
    """The state of a step.

    Attributes:
        params: The parameters.
        opt_state: The state of the optimizer and its policy.
    """

    params: Any
    opt_state: Any


def cases(policies, strategies=POLICY_STRATEGIES):
    """Returns each policy with each strategy that supports it, as `(policy, strategy)`."""
    return [
        (name, strategy_name)
        for name in policies
        for strategy_name in strategies
        if name != "hierarchical" or strategy_name in TWO_LEVELS
    ]


def first_params():
    """Returns two matrices, a vector and a scalar."""
    draw = np.random.default_rng(1).normal
    return {
        "in": {"w": jnp.float32(0.5 * draw(size=(6, 16))), "b": jnp.zeros(16)},
        "out": jnp.float32(0.5 * draw(size=(16, 4))),
        "scale": jnp.ones(()),
    }


def loss(params, x, y):
    """Returns the mean squared error of a network with one hidden layer."""
    hidden = jnp.tanh(x @ params["in"]["w"] + params["in"]["b"])
    return jnp.mean((params["scale"] * (hidden @ params["out"]) - y) ** 2)


def batches(strategy, steps):
    """Returns `steps` batches of random numbers, the same for any number of replicas."""
    draw = np.random.default_rng(0).normal
    x, y = draw(size=(steps * ROWS, 6)).astype(np.float32), draw(size=(steps * ROWS, 4)).astype(np.float32)
    return strategy.distribute_dataset((x, y), ROWS)


def start(strategy, tx, make=first_params):
    """Returns the initial state."""
    return strategy.init(lambda: State(params := make(), tx.init(params)))


def stepper(strategy, tx, loss=loss):
    """Returns a step of `loss(params, *batch)`, whose output is each replica's own loss."""

    @strategy.step
    def step(state, batch):
        value, grads = jax.value_and_grad(loss)(state.params, *batch)
        updates, opt_state = tx.update(grads, state.opt_state, state.params)
        return State(optax.apply_updates(state.params, updates), opt_state), value

    return step


def train(strategy, tx, steps, state=None):
    """Returns the state after `steps` steps, and the step."""
    state, step = state or start(strategy, tx), stepper(strategy, tx)
    for batch in batches(strategy, steps):
        state, _ = step(state, batch)
    return state, step


def once(strategy, tx, grads):
    """Returns the updates of gradients `[replica, ...]` at the first step of a policy, and its state."""
    like = jax.tree.map(lambda x: jnp.zeros(x.shape[1:], x.dtype), grads.tree)
    state = strategy.init(lambda: tx.init(like))
    update = strategy.step(lambda state, grads: tx.update(grads, state, like)[::-1])
    return update(state, grads)


def compiled(strategy, tx, shapes):
    """Returns the compiled step of a model with leaves of these shapes, as text."""
    make = lambda: {f"leaf{i}": jnp.ones(shape) for i, shape in enumerate(shapes)}

    def step(state, x):
        grads = jax.tree.map(lambda p: p * x, state.params)
        updates, opt_state = tx.update(grads, state.opt_state, state.params)
        return State(optax.apply_updates(state.params, updates), opt_state), None

    return strategy.step(step).lower(start(strategy, tx, make), rows(strategy)).compile().as_text()


def sent(text, collective):
    """Returns the result dtypes of each collective of one kind in a compiled program."""
    results = re.findall(rf"= (.*?) {collective}(?:-start)?\(", text)
    return [dtype for result in results for dtype in re.findall(r"(\w+)\[", result)]


def read(tree):
    """Returns `tree` as the host reads it, as numpy arrays."""
    return jax.tree.map(np.asarray, jdist.read_values(tree))


def assert_synchronized(params):
    """Asserts that every leaf is bitwise equal on all replicas, whether it is replicated or local."""
    for leaf in jax.tree.leaves(params, is_leaf=_is_wrapped):
        if _is_wrapped(leaf):
            assert len({np.asarray(own).tobytes() for own in leaf.values}) == 1
        else:
            assert_in_step(leaf)


def _is_wrapped(node):
    return isinstance(node, jdist.SyncOnRead)
