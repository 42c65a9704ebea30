"""The handwritten digits, a small model, and its training in the tests."""

import functools

import jax
import numpy as np
import optax
from flax import linen as nn

import jdist

from digits_data import load_digits

CROSS_ENTROPY = optax.softmax_cross_entropy_with_integer_labels


@functools.cache
def digits():
    """Returns 1,797 images `[example, 64]` and their classes."""
    images, labels = load_digits()
    return images.reshape(-1, 64), labels


class MLP(nn.Module):
    """Two dense layers."""

    @nn.compact
    def __call__(self, x):
        return nn.Dense(10)(nn.relu(nn.Dense(16)(x)))


def trainer(strategy, optimizer=None, **options):
    """Returns a trainer of the model, with the accuracy as a metric."""
    options = {"metrics": {"accuracy": jdist.metrics.Accuracy()}, **options}
    return jdist.Trainer(MLP(), optimizer or optax.adam(3e-3), CROSS_ENTROPY, strategy=strategy, **options)


def fit(strategy, data=None, optimizer=None, trainer_options=None, **options):
    """Returns the result of 3 epochs."""
    options = {"batch_size": 240, "epochs": 3, "progress": "off", **options}
    return trainer(strategy, optimizer, **(trainer_options or {})).fit(data or digits(), **options)


def to_host(tree):
    """Returns the leaves of a tree as numpy arrays, with the data of random keys."""

    def to_numpy(leaf):
        is_key = jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)
        return np.asarray(jax.random.key_data(leaf) if is_key else leaf)

    return [to_numpy(leaf) for leaf in jax.tree.leaves(jdist.read_values(tree))]


def assert_bitwise_equal(a, b):
    """Asserts that the trees are bitwise equal."""
    pairs = list(zip(to_host(a), to_host(b), strict=True))
    assert pairs
    assert all(x.tobytes() == y.tobytes() and x.dtype == y.dtype for x, y in pairs)
