"""Models, batches and the training step that the benchmarks of training steps share."""

import flax.linen as nn
import jax
import numpy as np
import optax
from jax import lax
from jax.flatten_util import ravel_pytree


class MLP(nn.Module):
    widths: tuple[int, ...]

    @nn.compact
    def __call__(self, x):
        for width in self.widths:
            x = nn.relu(nn.Dense(width)(x))
        return nn.Dense(10)(x)


class CNN(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.relu(nn.Conv(32, (3, 3))(x))
        x = nn.max_pool(nn.relu(nn.Conv(64, (3, 3))(x)), (2, 2), strides=(2, 2))
        return nn.Dense(10)(nn.relu(nn.Dense(128)(x.reshape(len(x), -1))))


class Transformer(nn.Module):
    blocks: int
    width: int

    @nn.compact
    def __call__(self, x):
        x = nn.Embed(1000, self.width)(x)
        for _ in range(self.blocks):
            y = nn.LayerNorm()(x)
            x = x + nn.MultiHeadDotProductAttention(num_heads=4)(y, y)
            x = x + nn.Dense(self.width)(nn.gelu(nn.Dense(4 * self.width)(nn.LayerNorm()(x))))
        return nn.Dense(10)(x.mean(axis=1))


def labelled(shape, kind=np.float32):
    """Returns a batch of random inputs and labels."""
    random = np.random.default_rng(0)
    inputs = random.normal(size=shape) if kind is np.float32 else random.integers(0, 1000, shape)
    return inputs.astype(kind), random.integers(0, 10, shape[0]).astype(np.int32)


# The number of steps per measurement, the model, the optimizer, and the batch of all devices.
CASES = {
    "small": (100, MLP((16, 16)), optax.sgd(1e-2), labelled((64, 16))),
    "tabular": (100, MLP((32, 32)), optax.adamw(1e-3), labelled((64, 32))),
    "mlp": (50, MLP((128,)), optax.adamw(1e-3), labelled((64, 64))),
    "deep": (50, MLP((64,) * 9), optax.sgd(1e-2), labelled((64, 64))),
    "cnn": (10, CNN(), optax.adamw(1e-3), labelled((64, 8, 8, 1))),
    "transformer": (2, Transformer(4, 256), optax.adamw(1e-3), labelled((16, 32), np.int32)),
    "large": (2, Transformer(6, 384), optax.adamw(1e-3), labelled((16, 32), np.int32)),
    "wide": (5, MLP((2048, 2048)), optax.sgd(1e-2, momentum=0.9), labelled((64, 256))),
}


def train_step(model, optimizer, mean, state, batch):
    """A training step of one replica; `mean` averages the loss and the gradients over the replicas."""

    def loss_fn(params):
        logits = model.apply(params, batch[0])
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch[1]).mean()

    params, opt_state = state
    loss, grads = mean(jax.value_and_grad(loss_fn)(params))
    updates, opt_state = optimizer.update(grads, opt_state, params)
    return (optax.apply_updates(params, updates), opt_state), loss


def packed_mean(tree):
    """Reduces all leaves with one collective."""
    flat, unpacked = ravel_pytree(tree)
    return unpacked(lax.pmean(flat, "replica"))
