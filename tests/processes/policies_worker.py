"""Trains under sync policies, on one process of several."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from jax.experimental.compilation_cache import compilation_cache

import jdist
from jdist import sync

from digits_data import load_digits


class CNN(nn.Module):
    """In bfloat16, with dropout."""

    @nn.compact
    def __call__(self, images, key):
        x = nn.relu(nn.Conv(8, (3, 3), dtype=jnp.bfloat16)(images[..., None]))
        x = nn.relu(nn.Dense(32, dtype=jnp.bfloat16)(x.reshape(len(x), -1)))
        return nn.Dense(10)(nn.Dropout(0.2, deterministic=False)(x, rng=key)).astype(jnp.float32)


MODEL = CNN()
DATA = tuple(array[:203] for array in load_digits())


def trained(strategy, tx):
    def make(key):
        params = MODEL.init(key, jnp.asarray(DATA[0][:2]), key)["params"]
        return {"params": params, "opt_state": tx.init(params), "step": jnp.int32(0)}

    @strategy.step
    def step(state, batch, weights):
        images, labels = batch
        key = jdist.replica_key(jax.random.fold_in(jax.random.key(1), state["step"]))

        def losses(params, images, labels):
            return optax.softmax_cross_entropy_with_integer_labels(MODEL.apply({"params": params}, images, key), labels)

        loss, grads = jdist.value_and_grad(losses, weights=weights)(state["params"], images, labels)
        updates, opt_state = tx.update(grads, state["opt_state"], state["params"])
        params = optax.apply_updates(state["params"], updates)
        return {"params": params, "opt_state": opt_state, "step": state["step"] + 1}, loss

    state = strategy.init(make, jax.random.key(0))
    for batch, weights in strategy.distribute_dataset(DATA, 32, shuffle=True, epochs=2, remainder="pad"):
        state, _ = step(state, batch, weights)
    return jdist.read_values(state["params"])


POLICIES = {
    "exact": (optax.chain(sync.exact(), optax.adamw(3e-3)), {"virtual_replicas": 8}),
    "int8": (optax.chain(sync.int8(), optax.sgd(0.05)), {}),
    "diloco": (sync.diloco(optax.adamw(3e-3), every=7), {}),
    "streaming": (sync.streaming_diloco(optax.sgd(0.05), every=4, fragments=2), {}),
}


def final_parameters(devices, *policies):
    """Returns the final parameters under each policy, on the first `devices` devices."""
    results = {}
    for name in policies:
        if name == "streaming":  # loaded from the cache, its CPU program corrupts memory (jax 0.10.2 and 0.12.0)
            jax.config.update("jax_enable_compilation_cache", False)
            compilation_cache.reset_cache()
        tx, options = POLICIES[name]
        params = trained(jdist.MirroredStrategy(jax.devices()[:devices], **options), tx)
        for path, leaf in jax.tree_util.tree_leaves_with_path(params):
            results[name + jax.tree_util.keystr(path)] = np.asarray(leaf.addressable_shards[-1].data)
    return results
