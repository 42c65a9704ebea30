"""Linear regression on several devices: the code that `test_regression.py` tests."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jdist

optimizer = optax.adam(0.1)
State = dict[str, Any]


def make_state() -> State:
    """Returns the parameters and the state of the optimizer."""
    params = {"w": jnp.zeros(3), "b": jnp.zeros(())}
    return {"params": params, "opt_state": optimizer.init(params)}


def loss_of(params: dict[str, jax.Array], x: jax.Array, y: jax.Array) -> jax.Array:
    """Returns the mean squared error of the examples `x` `[batch, 3]` with targets `y` `[batch]`."""
    return jnp.mean((x @ params["w"] + params["b"] - y) ** 2)


def train_step(state: State, x: jax.Array, y: jax.Array) -> tuple[State, jax.Array]:
    """Updates the state of one replica with its examples and the gradients of the global batch."""
    loss, grads = jax.value_and_grad(loss_of)(state["params"], x, y)
    loss, grads = jdist.all_reduce("mean", (loss, grads))
    updates, opt_state = optimizer.update(grads, state["opt_state"], state["params"])
    return {"params": optax.apply_updates(state["params"], updates), "opt_state": opt_state}, loss


def make_batches(count: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """Returns global batches of 16 examples."""
    rng = np.random.default_rng(0)
    batches = rng.normal(size=(count, 16, 3)).astype(np.float32)
    return [(x, x @ np.float32([1, -2, 3]) + 0.5) for x in batches]
