"""Virtual replicas: the results of training are bitwise equal on any number of devices."""

import hashlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from jax import lax

import jdist

from digits_data import load_digits

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


class Transformer(nn.Module):
    """A transformer block over the rows of an image, with causal attention."""

    @nn.compact
    def __call__(self, images, key):
        x = nn.Dense(12)(images)
        y = nn.LayerNorm()(x)
        x = x + nn.MultiHeadDotProductAttention(3)(y, y, mask=nn.make_causal_mask(images[..., 0]))
        x = x + nn.Dense(12)(nn.gelu(nn.Dense(24)(nn.RMSNorm()(x))))
        return nn.Dense(10)(x.mean(1))


class Mixture(nn.Module):
    """Two of five experts per image, with renormalized gates, and a convolutional network with batch norms."""

    @nn.compact
    def __call__(self, images, key):
        x = nn.Conv(5, (3, 3), strides=2)(images[..., None])
        mean, square = jdist.all_reduce("mean", (x.mean((0, 1, 2)), (x**2).mean((0, 1, 2))))
        x = nn.max_pool(nn.relu((x - mean) / jnp.sqrt(square - mean**2 + 1e-3)), (2, 2), (2, 2)).reshape(len(x), -1)
        gates, chosen = lax.top_k(nn.softmax(nn.Dense(5)(x)), 2)
        experts = jnp.stack([nn.Dense(10)(nn.tanh(nn.Dense(7)(x))) for _ in range(5)], 1)
        experts = jnp.take_along_axis(experts, chosen[..., None], 1)
        return jnp.einsum("be,bed->bd", gates / gates.sum(-1, keepdims=True), experts)


MODELS = {"mlp": MLP(), "cnn": CNN(), "rnn": RNN(), "transformer": Transformer(), "mixture": Mixture()}
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


# All virtual replicas on one device, unequal numbers of them, and one per device.
DEVICES = (1, 3, VIRTUAL)
# Each model and each optimizer: they meet in the mean gradient only, whose bits are the same. The first optimizer of a model
# is tested on each of `DEVICES`, that of the first model also on 2 and 4. The others are tested on one device and on 3.
TRAINED = {
    "mlp": ("muon", "schedule_free", "lion"),
    "cnn": ("adamw", "adafactor"),
    "rnn": ("sgd", "clipped"),
}


@pytest.mark.slow
@pytest.mark.parametrize("model, optimizer", [(model, name) for model, names in TRAINED.items() for name in names])
def test_parameters_after_100_steps_are_bitwise_equal_on_any_number_of_devices(model, optimizer):
    counts = DEVICES if optimizer == TRAINED[model][0] else DEVICES[:2]
    counts += (2, 4) if optimizer == TRAINED["mlp"][0] else ()
    runs = [after(100, model, optimizer, devices) for devices in counts]
    hashes = {digest_of(state) for state, _ in runs}
    assert len(hashes) == 1
    losses = runs[0][1]
    assert all(others == losses for _, others in runs)
    assert np.mean(losses[-10:]) < 0.9 * np.mean(losses[:10])  # the model has learned


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("model", ["transformer", "mixture"])
def test_attention_and_gates_are_bitwise_equal_on_any_number_of_devices(model):
    """Their gradients divide by sums. One device has other results than several if XLA divides by these in several ways."""
    assert len({digest_of(after(4, model, "clipped", devices)) for devices in DEVICES}) == 1


def test_parameters_are_bitwise_equal_if_devices_have_unequal_numbers_of_replicas():
    (one, _), (many, _) = (after(6, "mlp", "adamw", devices, virtual=6) for devices in (1, 4))
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
@pytest.mark.parametrize("policy", POLICIES)
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
@pytest.mark.parametrize("shape", SHAPES)
def test_dense_layer_of_any_width_is_bitwise_equal_with_one_virtual_replica_per_device(shape, virtual, devices):
    expected, *others = [after_regression(shape, n, virtual) for n in devices]
    for weights, errors in others:
        np.testing.assert_array_equal(weights, expected[0], strict=True)
        np.testing.assert_array_equal(errors, expected[1], strict=True)


# Functions of one replica: of its rows `[batch, time, feature]` and of shared parameters.
def _heads(p, x):
    return (jnp.einsum("btd,dhe->bthe", x, p[name]) for name in ("query", "key", "value"))


def _attention(p, x, mask=True):
    query, key, value = _heads(p, x)
    scores = jnp.einsum("bthe,bshe->bhts", query, key) / np.sqrt(query.shape[-1])
    return jnp.einsum("bhts,bshe->bthe", jax.nn.softmax(jnp.where(mask, scores, -1e9)), value)


def _causal(x):
    return jnp.tril(jnp.ones((x.shape[1], x.shape[1]), bool))


def _layer_norm(x):
    return (x - x.mean(-1, keepdims=True)) * lax.rsqrt(x.var(-1, keepdims=True) + 1e-5)


def _unit(x):
    return x / jnp.linalg.norm(x, axis=-1, keepdims=True)


def _shares(x):
    return x / x.sum(-1, keepdims=True)


def _conv(x, kernel, **options):
    return lax.conv_general_dilated(x, kernel, (1,), "SAME", dimension_numbers=("NWC", "WIO", "NWC"), **options)


def _recurrent(p, x):
    def cell(h, x):
        gate = jax.nn.sigmoid(x @ p["w"] + h @ p["square"])
        h = (1 - gate) * h + gate * jnp.tanh(x @ p["v"] + (gate * h) @ p["square"])
        return h, h

    return lax.scan(cell, jnp.zeros((len(x), 6)), x.swapaxes(0, 1))[1]


def _positive(x):
    """Returns a positive definite matrix per example."""
    return jnp.einsum("btd,bte->bde", x, x) + 3 * jnp.eye(x.shape[-1])


def _class(x):
    return jnp.argmax(x, -1)


def _linear_attention(p, x):
    f = jax.nn.elu(x) + 1
    return jnp.einsum("btd,bde->bte", f, jnp.einsum("btd,bte->bde", f, x)) / (f @ f.sum(1)[..., None])


def _segment_softmax(p, x):
    e, ids = jnp.exp(x.reshape(-1, x.shape[-1])), _class(x).ravel() % 3
    return e / jax.ops.segment_sum(e, ids, 3)[ids]


def _sinkhorn(p, x):
    return lax.fori_loop(0, 2, lambda _, m: _shares(m / m.sum(1, keepdims=True)), jnp.exp(x))


def _linear_recurrence(p, x):
    combine = lambda a, b: (a[0] * b[0], a[1] * b[0] + b[1])
    return lax.associative_scan(combine, (jax.nn.sigmoid(x), x), axis=1)[1]


_ACTIVATIONS = """
    celu elu gelu hard_sigmoid hard_silu hard_tanh identity leaky_relu log_sigmoid log_softmax logsumexp mish relu relu6 selu
    sigmoid silu soft_sign softmax softplus sparse_plus sparse_sigmoid squareplus standardize tanh
"""
FUNCTIONS_OF_ROWS = {
    **{name: lambda p, x, name=name: getattr(jax.nn, name)(1.5 * x) for name in _ACTIVATIONS.split()},
    "gelu_by_erf": lambda p, x: jax.nn.gelu(x, approximate=False),
    "glu": lambda p, x: jax.nn.glu(x @ p["w"]),
    "one_hot": lambda p, x: jax.nn.one_hot(_class(x), len(p["table"])) @ p["table"],
    "softmax_where": lambda p, x: jax.nn.softmax(x, where=x > -1),
    "softmax_of_time": lambda p, x: jax.nn.softmax(x, axis=1) * jax.nn.softmax(x),
    "exp_over_sum": lambda p, x: _shares(jnp.exp(x)) + jnp.exp(x) / jnp.exp(x).sum(1, keepdims=True),
    "x_over_sum": lambda p, x: x / (1 + jnp.abs(x).sum(-1, keepdims=True)),
    "layer_norm": lambda p, x: _layer_norm(x @ p["w"]),
    "layer_norm_with_bias": lambda p, x: _layer_norm(x) * p["scale"] + p["table"][0],
    "group_norm": lambda p, x: _layer_norm((x @ p["w"]).reshape(*x.shape[:2], 2, 3)),
    "instance_norm": lambda p, x: (x - x.mean(1, keepdims=True)) / jnp.sqrt(x.var(1, keepdims=True) + 1e-3),
    "rms_norm": lambda p, x: x / jnp.sqrt((x * x).mean(-1, keepdims=True) + 1e-5) * p["scale"],
    "l2_norm": lambda p, x: _unit(x),
    "weight_norm": lambda p, x: x @ (p["w"] / jnp.linalg.norm(p["w"], axis=0)),
    "clipped_norm": lambda p, x: x * jnp.minimum(1, 1 / jnp.linalg.norm(x, axis=-1, keepdims=True)),
    "cosine": lambda p, x: (_unit(x[:, :3]) * _unit(x[:, 3:6])).sum(-1),
    "contrastive": lambda p, x: jax.nn.log_softmax(_unit(x) @ _unit(x).swapaxes(1, 2) / 0.1),
    "attention": _attention,
    "causal_attention": lambda p, x: _attention(p, x, _causal(x)),
    "dot_product_attention": lambda p, x: jax.nn.dot_product_attention(*_heads(p, x)),
    "dot_product_attention_causal": lambda p, x: jax.nn.dot_product_attention(*_heads(p, x), is_causal=True),
    "dot_product_attention_mask": lambda p, x: jax.nn.dot_product_attention(*_heads(p, x), mask=_causal(x)),
    "linear_attention": _linear_attention,
    "float16_attention": lambda p, x: _attention(*jax.tree.map(jnp.float16, (p, x))).astype(jnp.float32),
    "gate": lambda p, x: _shares(lax.top_k(jax.nn.softmax(x @ p["w"]), 2)[0]),
    "mixture": lambda p, x: jnp.einsum("btf,btg,fg->bt", jax.nn.softmax(x @ p["w"]), x @ p["v"], p["square"]),
    "conv": lambda p, x: _conv(jax.nn.relu(_conv(x, p["kernel"])), p["kernel"]),
    "conv_depthwise": lambda p, x: _conv(x, p["kernel"][:, :1], feature_group_count=x.shape[-1]),
    "conv_dilated": lambda p, x: _conv(x, p["kernel"], rhs_dilation=(2,)),
    "conv_in_jit": lambda p, x: jax.jit(lambda x: jax.nn.softmax(_conv(x, p["kernel"])))(x),
    "conv_in_remat": lambda p, x: jax.checkpoint(lambda x: jnp.tanh(_conv(x, p["kernel"])))(x),
    "max_pool": lambda p, x: lax.reduce_window(x, -np.inf, lax.max, (1, 2, 1), (1, 2, 1), "VALID"),
    "mean_pool": lambda p, x: lax.reduce_window(x, 0.0, lax.add, (1, 3, 1), (1, 2, 1), "SAME") / 3,
    "cumsum": lambda p, x: jnp.cumsum(jnp.exp(x), 1) / jnp.exp(x).sum(1, keepdims=True),
    "cumprod": lambda p, x: jnp.cumprod(x, -1),
    "cumlogsumexp": lambda p, x: lax.cumlogsumexp(x, 1),
    "rnn": _recurrent,
    "linear_recurrence": _linear_recurrence,
    "scan_of_softmax": lambda p, x: lax.scan(lambda c, _: (jax.nn.softmax(c) * x, None), x, None, length=3)[0],
    "loop_of_norms": lambda p, x: lax.fori_loop(0, 3, lambda _, c: _unit(c) + x, x),
    "branches": lambda p, x: lax.cond(x[0, 0, 0] > 0, jax.nn.softmax, lambda x: _shares(jnp.exp(x)), x),
    "remat": lambda p, x: jax.checkpoint(lambda x: jax.nn.softmax(jnp.tanh(x @ p["w"])))(x),
    "vmap": lambda p, x: jax.vmap(lambda x: jax.nn.softmax(x @ p["w"]) / x.sum())(x),
    "sinkhorn": _sinkhorn,
    "embedding": lambda p, x: p["table"][_class(x)] * x,
    "gather": lambda p, x: jnp.take_along_axis(x, jnp.argsort(x, 1), 1) ** 2 * x,
    "scatter": lambda p, x: jnp.zeros((4, x.shape[-1])).at[_class(x) % 4].add(x),
    "segment_softmax": _segment_softmax,
    "sort": lambda p, x: jnp.sort(x, -1) * p["scale"],
    "fft": lambda p, x: jnp.fft.irfft(jnp.fft.rfft(x, axis=1) / 3, n=x.shape[1], axis=1),
    "cholesky": lambda p, x: jnp.linalg.cholesky(_positive(x)),
    "solve": lambda p, x: jnp.linalg.solve(_positive(x), x.swapaxes(1, 2)),
    "determinant": lambda p, x: jnp.linalg.slogdet(_positive(x))[1],
    "einsum": lambda p, x: jnp.einsum("btd,bsd,bse->bte", x, x, x),
    "variance": lambda p, x: x.std(1) / (1e-3 + x.std()),
    "product": lambda p, x: jnp.prod(x, -1),
    "cross_entropy": lambda p, x: jax.nn.logsumexp(x @ p["w"], -1) - (x @ p["w"])[..., 0],
    "divergence": lambda p, x: jax.nn.softmax(x) * (jax.nn.log_softmax(x) - jax.nn.log_softmax(x[:, ::-1])),
    "bfloat16": lambda p, x: jax.nn.softmax(jnp.bfloat16(x) @ jnp.bfloat16(p["w"])).astype(jnp.float32),
    "dropout": lambda p, x: jnp.where(
        jax.random.bernoulli(jdist.replica_key(jax.random.key(1)), 0.8, x.shape), x / 0.8, 0
    ),
    "powers": lambda p, x: jnp.abs(x) ** 1.5 + x**3 / (1 + x**2) + jnp.sqrt(1 + x * x) / (2 + jnp.sqrt(1 + x * x)),
    "special": lambda p, x: lax.lgamma(1 + jnp.abs(x)) + lax.erf_inv(jnp.tanh(x) / 2) + jnp.arctan2(x, 2.0),
}


def bits_of_gradients(names, virtual, devices, shape):
    """Returns, by function, the bits of the mean gradient of its parameters and of each replica's gradient of its rows."""
    features, draw = shape[-1], np.random.default_rng(0)
    shapes = {
        **dict(w=(features, 6), v=(features, 6), square=(6, 6), scale=(features,), table=(features, features)),
        **dict.fromkeys(("query", "key", "value"), (features, 3, 4)),
        "kernel": (3, features, features),
    }
    params = {name: draw.normal(size=size).astype(np.float32) for name, size in shapes.items()}
    strategy = jdist.MirroredStrategy(jax.devices()[:devices], virtual_replicas=virtual)
    x = strategy.put(jdist.PerReplica(draw.normal(size=(virtual, *shape)).astype(np.float32)))

    def gradients(params, x):
        loss = lambda params, x, name: (FUNCTIONS_OF_ROWS[name](params, x) ** 2).sum()
        grads = {name: jax.grad(loss, (0, 1))(params, x, name) for name in names}
        return {name: (jdist.all_reduce("mean", of_params), of_rows) for name, (of_params, of_rows) in grads.items()}

    results = strategy.run(gradients, (params, x))
    return {name: [np.asarray(x).tobytes() for x in jax.tree.leaves(grads)] for name, grads in results.items()}


def different_functions(names, virtual, devices, shape):
    """Returns the functions whose gradients on these numbers of devices are not bitwise equal to those on the first number."""
    expected, *others = (bits_of_gradients(names, virtual, n, shape) for n in devices)
    return [name for name in names if any(bits[name] != expected[name] for bits in others)]


@pytest.mark.parametrize("names", [("softmax", "l2_norm", "gate", "exp_over_sum", "conv", "scan_of_softmax")])
def test_gradients_are_bitwise_equal_on_one_device_and_several(names):
    assert different_functions(names, 2, (1, 2), (2, 7, 5)) == []


# One program has the gradients of many functions: compilation takes most of the time. Each function has odd sizes with 8 virtual
# replicas, and even sizes with 4 or others with 3.
MANY = [
    *((part, 8, DEVICES, (2, 7, 5)) for part in range(6)),
    *((part, 4, (1, 4), (3, 8, 16)) for part in (0, 2, 4)),
    *((part, 3, (1, 3), (1, 6, 9)) for part in (1, 3, 5)),
]


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("part, virtual, devices, shape", MANY)
def test_gradients_of_many_functions_are_bitwise_equal_on_any_number_of_devices(part, virtual, devices, shape):
    assert different_functions(tuple(FUNCTIONS_OF_ROWS)[part::6], virtual, devices, shape) == []


# Alone, a function may be compiled in another way than with others.
@pytest.mark.slow
@pytest.mark.parametrize("name", list(FUNCTIONS_OF_ROWS)[::8])
def test_gradient_of_a_function_is_bitwise_equal_on_one_device_and_several(name):
    assert different_functions((name,), 4, (1, 4), (1, 7, 3)) == []


def test_program_with_virtual_replicas_is_not_compiled_inside_another_program():
    strategy = jdist.MirroredStrategy(jax.devices()[:2], virtual_replicas=2)
    x = strategy.put(jdist.PerReplica(np.ones((2, 3), np.float32)))
    total = lambda x: jdist.all_reduce("sum", x)
    run = lambda x: strategy.run(total, (x,))
    assert jax.eval_shape(run, x).shape == (3,)
    with pytest.raises(
        ValueError, match=r"`<lambda>` is called inside a `jax\.jit`, and has virtual replicas.*outside that"
    ):
        jax.jit(run)(x)


def test_options_of_a_step_are_added_to_those_of_virtual_replicas():
    strategy = jdist.MirroredStrategy(jax.devices()[:1], virtual_replicas=2)
    step = strategy.step(
        lambda w, x: (w + jdist.all_reduce("mean", x * 2), None), compiler_options={"xla_disable_hlo_passes": "dce"}
    )
    assert float(step(strategy.put(np.float32(1)), strategy.put(jdist.PerReplica(np.float32([1, 2]))))[0]) == 4
    with pytest.raises(ValueError, match="xla_no_such_option"):
        strategy.compile(
            step,
            jnp.float32(1),
            strategy.put(jdist.PerReplica(np.float32([1, 2]))),
            compiler_options={"xla_no_such_option": True},
        )


def test_convolutions_on_cpu_run_outside_loops():
    """A convolution inside a loop takes about ten times as long."""
    strategy = jdist.MirroredStrategy(jax.devices()[:1], virtual_replicas=3)
    x = strategy.put(jdist.PerReplica(np.ones((3, 1, 7, 2), np.float32)))
    loss = lambda kernel, x: (jax.jit(_conv)(jnp.tanh(x), kernel) ** 2).sum()
    step = strategy.step(lambda kernel, x: (kernel, jdist.all_reduce("mean", jax.grad(loss)(kernel, x))))
    lines = strategy.compile(step, np.ones((3, 2, 2), np.float32), x).as_text().splitlines()
    convolutions = [line for line in lines if " convolution(" in line]
    assert len(convolutions) == 6 and not any("/while/" in line for line in convolutions)
