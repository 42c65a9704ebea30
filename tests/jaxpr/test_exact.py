"""Virtual replicas: the results of training are bitwise equal on any number of devices."""

import hashlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn

import jdist

from digits_data import load_digits
from laws import among

VIRTUAL = 8
# No batch size divides 203: each epoch ends in padding.
IMAGES, LABELS = (array[:203] for array in load_digits())


class MLP(nn.Module):
    @nn.compact
    def __call__(self, images, key):
        return nn.Dense(10)(nn.relu(nn.Dense(32)(images.reshape(len(images), -1))))


class CNN(nn.Module):
    """A convolutional network in bfloat16, with dropout."""

    @nn.compact
    def __call__(self, images, key):
        x = nn.relu(nn.Conv(8, (3, 3), dtype=jnp.bfloat16)(images[..., None]))
        x = nn.relu(nn.Dense(32, dtype=jnp.bfloat16)(x.reshape(len(x), -1)))
        x = nn.Dropout(0.2, deterministic=False)(x, rng=key)
        return nn.Dense(10, dtype=jnp.bfloat16)(x).astype(jnp.float32)


class RNN(nn.Module):
    """A recurrent network over the rows of an image, with a batch norm over all replicas."""

    @nn.compact
    def __call__(self, images, key):
        x = nn.RNN(nn.GRUCell(16))(images)[:, -1]
        # The statistics of this batch; the running averages are not used.
        x = nn.BatchNorm(use_running_average=False, axis_name="replica", use_fast_variance=False)(x)
        return nn.Dense(10)(x)


MODELS = {"mlp": MLP(), "cnn": CNN(), "rnn": RNN()}
OPTIMIZERS = {
    "sgd": lambda: optax.sgd(0.1, momentum=0.9, nesterov=True),
    "adamw": lambda: optax.adamw(3e-3),
    "clipped": lambda: optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(3e-3)),
    "adafactor": lambda: optax.adafactor(1e-2),
    "lion": lambda: optax.lion(1e-3),
    "muon": lambda: optax.contrib.muon(1e-2),
    "schedule_free": lambda: optax.contrib.schedule_free_adamw(1e-2),
}


def digest_of(tree):
    digest = hashlib.sha256()
    for leaf in jax.tree.leaves(tree):
        digest.update(np.asarray(leaf).tobytes())
    return digest.hexdigest()


class Training:
    """A model, an optimizer and digits on some devices."""

    def __init__(self, model, optimizer, devices, policy=jdist.sync.exact, virtual=VIRTUAL):
        self.model, self.optimizer = MODELS[model], OPTIMIZERS[optimizer]
        self.tx = optax.chain(policy(), self.optimizer())
        self.strategy = jdist.MirroredStrategy(jax.devices()[:devices], virtual_replicas=virtual)
        self.step = self.strategy.step(self._step)
        batch = 4 * (virtual or VIRTUAL)
        data = self.strategy.distribute_dataset(
            (IMAGES, LABELS), batch, shuffle=True, seed=1, epochs=None, remainder="pad"
        )
        self.batches = iter(data)

    def begin(self):
        def make(key):
            variables = self.model.init(key, jnp.asarray(IMAGES[:2]), key)
            return {
                "params": variables["params"],
                "opt": self.tx.init(variables["params"]),
                "key": jax.random.key_data(key),
            }

        return self.strategy.init(make, jax.random.key(0))

    def _step(self, state, batch, weights):
        images, labels = batch
        key, draw = jax.random.split(jax.random.wrap_key_data(state["key"]))

        def loss_fn(params):
            extra = {"mutable": ["batch_stats"]} if isinstance(self.model, RNN) else {}
            variables = {"params": params, "batch_stats": {"BatchNorm_0": {"mean": jnp.zeros(16), "var": jnp.ones(16)}}}
            logits = self.model.apply(variables, images, jdist.replica_key(draw), **extra)
            logits = logits[0] if extra else logits
            return jdist.global_mean(optax.softmax_cross_entropy_with_integer_labels(logits, labels), weights)

        loss, grads = jax.value_and_grad(loss_fn)(state["params"])
        updates, opt = self.tx.update(grads, state["opt"], state["params"])
        params = optax.apply_updates(state["params"], updates)
        return {"params": params, "opt": opt, "key": jax.random.key_data(key)}, loss

    def run(self, state, steps):
        losses = []
        for _, (batch, weights) in zip(range(steps), self.batches, strict=False):
            state, loss = self.step(state, batch, weights)
            losses.append(float(loss))
        return state, losses


def after(steps, *args, **kwargs):
    training = Training(*args, **kwargs)
    return training.run(training.begin(), steps)


# Each model and each optimizer: they meet in the mean gradient only, whose bits are the same. The first optimizer of a model
# is tested on each number of devices. The others are tested on one device and on 3, which do not divide the 8 virtual replicas.
TRAINED = {
    "mlp": ("muon", "schedule_free", "lion"),
    "cnn": ("adamw", "adafactor"),
    "rnn": ("sgd", "clipped"),
}


@pytest.mark.slow
@pytest.mark.parametrize("model, optimizer", [(model, name) for model, names in TRAINED.items() for name in names])
def test_parameters_after_100_steps_are_bitwise_equal_on_any_number_of_devices(model, optimizer):
    counts = (1, 2, 3, 4, 8) if optimizer == TRAINED[model][0] else (1, 3)
    runs = [after(100, model, optimizer, devices) for devices in counts]
    hashes = {digest_of(state) for state, _ in runs}
    assert len(hashes) == 1
    losses = runs[0][1]
    assert np.mean(losses[-10:]) < 0.9 * np.mean(losses[:10])  # the model has learned


OTHERS = [("mlp", "adamw", 4), ("mlp", "sgd", 8), ("cnn", "clipped", 3), ("cnn", "muon", 8), ("rnn", "adamw", 4)]


@pytest.mark.slow
@pytest.mark.parametrize("model, optimizer, devices", OTHERS)
def test_parameters_after_a_few_steps_are_bitwise_equal_to_one_device(model, optimizer, devices):
    (one, first), (many, losses) = after(8, model, optimizer, 1), after(8, model, optimizer, devices)
    assert first == losses
    assert digest_of(one) == digest_of(many)


@pytest.mark.parametrize(
    "virtual, devices", [(6, 4), pytest.param(5, 2, marks=pytest.mark.slow), pytest.param(7, 7, marks=pytest.mark.slow)]
)
def test_parameters_are_bitwise_equal_if_devices_have_unequal_numbers_of_replicas(virtual, devices):
    one, _ = after(6, "mlp", "adamw", 1, virtual=virtual)
    many, _ = after(6, "mlp", "adamw", devices, virtual=virtual)
    assert digest_of(one) == digest_of(many)


@pytest.mark.slow
def test_training_resumes_bitwise_equal_on_another_number_of_devices():
    expected, _ = after(6, "cnn", "adamw", 2)
    first, second = Training("cnn", "adamw", 8), Training("cnn", "adamw", 3)
    state, _ = first.run(first.begin(), 4)
    position = first.batches.get_state()
    second.batches.set_state(position)
    state, _ = second.run(second.strategy.put(jax.tree.map(np.asarray, state)), 2)
    assert digest_of(state) == digest_of(expected)


@pytest.mark.slow
def test_without_virtual_replicas_the_parameters_depend_on_the_number_of_devices():
    """If these were equal, the tests above would be vacuous."""
    one, many = (after(6, "mlp", "adamw", devices, jdist.sync.mean, virtual=None) for devices in (1, 8))
    assert digest_of(one) != digest_of(many)


POLICIES = {"mean": jdist.sync.mean, "every_2": lambda: jdist.sync.every(jdist.sync.exact(), 2)}


@pytest.mark.slow
@pytest.mark.parametrize("policy", among(POLICIES, "every_2"))
def test_policies_of_sums_are_exact_with_virtual_replicas(policy):
    one, many = (after(6, "mlp", "sgd", devices, POLICIES[policy])[0] for devices in (1, 4))
    assert digest_of(one) == digest_of(many)


# Rows per replica, columns, outputs: different remainders of the vector width, for which XLA's kernels round differently.
SHAPES = ["22x10x1", "11x10x1", "22x16x1", "5x10x1", "14x16x1", "3x7x1", "22x10x3", "9x33x5"]


def after_regression(shape, devices, virtual, steps=3):
    """Returns the weights of one dense layer, and the error of each replica in the last step."""
    rows, columns, outputs = map(int, shape.split("x"))
    draw = np.random.default_rng(0)
    x, y, weights = (
        draw.normal(size=size).astype(np.float32)
        for size in ((virtual, rows, columns), (virtual, rows, outputs), (columns, outputs))
    )
    strategy = jdist.MirroredStrategy(jax.devices()[:devices], virtual_replicas=virtual)
    tx = optax.chain(jdist.sync.exact(), optax.sgd(0.1))

    @strategy.step
    def step(state, batch):
        x, y = batch
        error, grads = jax.value_and_grad(lambda w: jnp.mean((x @ w - y) ** 2))(state["w"])
        updates, opt = tx.update(grads, state["opt"])
        return {"w": optax.apply_updates(state["w"], updates), "opt": opt}, error

    state, batch = strategy.put({"w": weights, "opt": tx.init(weights)}), strategy.put(jdist.PerReplica((x, y)))
    for _ in range(steps):
        state, error = step(state, batch)
    return np.asarray(state["w"]), np.stack(error.values)


@pytest.mark.slow
@pytest.mark.parametrize("virtual, devices", [(4, (2, 4, 1, 3)), (8, (4, 8))])
@pytest.mark.parametrize("shape", among(SHAPES, "22x10x1", "14x16x1"))
@pytest.mark.one_in(2)
def test_dense_layer_of_any_width_is_bitwise_equal_with_one_virtual_replica_per_device(shape, virtual, devices):
    expected, *others = [after_regression(shape, n, virtual) for n in devices]
    for weights, errors in others:
        np.testing.assert_array_equal(weights, expected[0], strict=True)
        np.testing.assert_array_equal(errors, expected[1], strict=True)
