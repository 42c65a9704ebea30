"""Steps to plan, and their analytic counts. No array is created."""

import functools
import os

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, Mesh

import jdist

os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")


def shape(*sizes, dtype="float32"):
    return jax.ShapeDtypeStruct(sizes, dtype)


def make_step(optimizer, width=256, layers=3, reduce=False, gradient=jax.value_and_grad):
    """Returns `(step, make_state)` of a network of equal layers; with `reduce`, the step reduces the gradients."""

    def make_state():
        params = [jnp.zeros((width, width)) for _ in range(layers)]
        return {"params": params, "opt_state": optimizer.init(params)}

    def loss(params, x):
        return (functools.reduce(lambda h, w: jnp.tanh(h @ w), params, x) ** 2).mean()

    def train(state, x):
        value, grads = gradient(loss)(state["params"], x)
        grads = jdist.all_reduce("mean", grads) if reduce else grads
        updates, opt_state = optimizer.update(grads, state["opt_state"], state["params"])
        params = optax.apply_updates(state["params"], updates)
        return {"params": params, "opt_state": opt_state}, jdist.all_reduce("mean", value)

    return train, make_state


def batch_of(strategy, rows=8, width=256):
    """Returns the shapes of a batch with `rows` examples per device."""
    replicas = strategy.num_replicas_in_sync
    return jdist.PerReplica(shape(replicas, rows * strategy.mesh.size // replicas, width))


def mesh_of(devices, *sizes, names=("data",)):
    return Mesh(np.array(devices).reshape(sizes or -1), names, axis_types=(AxisType.Auto,) * len(names))


def all_reduce_bytes(num_bytes, devices):
    """Returns the bytes that one device sends in a ring."""
    return 2 * (devices - 1) / devices * num_bytes
