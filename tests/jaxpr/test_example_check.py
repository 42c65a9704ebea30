"""Random numbers that all replicas share warn where they meet examples; clipping per example after a reduction is refused."""

import inspect
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

import jdist
from jdist import SharedRandomnessWarning, sync
from jdist._src.jaxpr import replication
from jdist._src.jaxpr.dims import _reshape_groups

from laws import BACKENDS, STRATEGIES


@pytest.fixture(autouse=True)
def no_warnings_yet(monkeypatch):
    monkeypatch.setattr(replication, "_warned", {})


def dropout(key, x):
    return jnp.where(jax.random.bernoulli(key, 0.5, x.shape), 2 * x, 0)


def convolution(x, w):
    image = x.reshape(4, 2, 2, 2)
    return lax.conv_general_dilated(
        image, w.reshape(1, 2, 2, 6), (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )


def attention(key, x, w):
    q = (x @ w).reshape(4, 1, 3)
    scores = jnp.einsum("bqd,bkd->bqk", q, q)
    return jnp.einsum("bqk,bkd->bqd", dropout(key, scores), q)


def crop(key, x):
    cut = lambda x, start: lax.dynamic_slice(x, (start,), (3,))
    return jax.vmap(cut)(x, jax.random.randint(key, (4,), 0, 5))


def layers(key, x):
    return lax.scan(jax.checkpoint(lambda h, key: (dropout(key, h), None)), x, jax.random.split(key, 3))[0]


def micro_batches(key, x):
    return lax.map(lambda x: dropout(key, x), x.reshape(2, 2, -1))


def until(key, x):
    return lax.while_loop(lambda carry: carry[0] < 3, lambda carry: (carry[0] + 1, dropout(key, carry[1])), (0, x))[1]


# Each is called as `case(key, x, w)`, with x [batch=4, 8] and w [8, 3].
SHARED = {
    "inputs": lambda key, x, w: dropout(key, x) @ w,
    "hidden": lambda key, x, w: dropout(key, x @ w),
    "noise": lambda key, x, w: (x + jax.random.normal(key, x.shape)) @ w,
    "raw_key": lambda key, x, w: dropout(jax.random.key_data(key), x) @ w,
    "key_per_example": lambda key, x, w: jax.vmap(dropout)(jax.random.split(key, 4), x) @ w,
    "drop_path": lambda key, x, w: x @ w * jax.random.bernoulli(key, 0.9, (4, 1)),
    "convolution": lambda key, x, w: dropout(key, convolution(x, w)),
    "embedding": lambda key, x, w: dropout(key, w[x.astype(jnp.int32)]),
    "attention": attention,
    "crop": lambda key, x, w: crop(key, x) @ w[:3],
    "layers": lambda key, x, w: layers(key, x @ w),
    "micro_batches": lambda key, x, w: micro_batches(key, x) @ w,
    "while_loop": lambda key, x, w: until(key, x) @ w,
    "cond": lambda key, x, w: lax.cond(w[0, 0] > 0, dropout, lambda key, x: x, key, x) @ w,
    "concatenated": lambda key, x, w: jnp.concatenate([x[:, :4], jax.random.normal(key, (4, 4))], 1) @ w,
    "categorical": lambda key, x, w: (x @ w)[jnp.arange(4), jax.random.categorical(key, x @ w)],
    "jitted": lambda key, x, w: jax.jit(dropout)(key, x) @ w,
    "gamma": lambda key, x, w: x @ w * jax.random.gamma(key, 2.0, (4, 3)),
    "transposed": lambda key, x, w: dropout(key, x.T).T @ w,
}
REPLICATED = {
    "noise_on_weights": lambda key, x, w: x @ (w + jax.random.normal(key, w.shape)),
    "dropped_weights": lambda key, x, w: x @ (w * jax.random.bernoulli(key, 0.5, w.shape)),
    "kernel": lambda key, x, w: convolution(x, w * jax.random.normal(key, w.shape)),
    "bias": lambda key, x, w: x @ w + jax.random.normal(key, (3,)),
    "bias_of_one_shape_with_the_batch": lambda key, x, w: (x @ w).T + jax.random.normal(key, (3, 1)),
    "embedding": lambda key, x, w: (w * jax.random.normal(key, w.shape))[x.astype(jnp.int32)],
    "permutation": lambda key, x, w: jax.random.permutation(key, x) @ w,
    "mixup": lambda key, x, w: (x + jax.random.beta(key, 1.0, 1.0) * x[jax.random.permutation(key, 4)]) @ w,
    "scalar": lambda key, x, w: x @ w * jax.random.uniform(key),
    "projection": lambda key, x, w: x @ jax.random.normal(key, (8, 3)) * w[0],
    "not_combined": lambda key, x, w: jnp.sum(x @ w) + jnp.sum(jax.random.normal(key, (4, 3))),
    "of_all_examples": lambda key, x, w: dropout(key, jdist.all_gather(x, 0)) @ w,
}


def trained(strategy, draw, steps_per_call=None):
    """Returns the warnings of tracing one step whose loss is the mean of `draw(key, x, w)`."""

    def step(state, x):
        w, key = state
        loss, grad = jax.value_and_grad(lambda w: jnp.mean(draw(key, x, w)))(w)
        grad, loss = jdist.all_reduce("mean", (grad, loss))
        return (w - 0.1 * grad, jax.random.split(key)[0]), loss

    state = strategy.init(lambda: (jnp.ones((8, 3)), jax.random.key(0)))
    x = strategy.put(jdist.PerReplica(np.ones((strategy.num_replicas_in_sync, 4, 8), np.float32)))
    inputs = x if steps_per_call is None else [x] * steps_per_call
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        program = strategy.step(step, steps_per_call=steps_per_call)
        if steps_per_call is None:
            program.lower(state, inputs)
        else:
            program(state, inputs)
    return [warning for warning in caught if warning.category is not jdist.NotEquivalentWarning]


@pytest.mark.parametrize("case", SHARED)
def test_random_numbers_that_all_replicas_combine_with_their_examples_warn(two, case):
    caught = trained(two, SHARED[case])
    assert [(w.category, w.filename) for w in caught] == [(SharedRandomnessWarning, __file__)]
    assert "the same on each of the 2 replicas" in str(caught[0].message)
    assert "`jdist.replica_key(key)`" in str(caught[0].message)
    assert trained(two, lambda key, x, w: SHARED[case](jdist.replica_key(key), x, w)) == []


@pytest.mark.parametrize("case", REPLICATED)
def test_random_numbers_that_have_to_be_replicated_do_not_warn(two, case):
    assert trained(two, REPLICATED[case]) == []


def test_warning_names_the_lines_that_draw_and_that_combine(two):
    lines = []

    def draw(key, x, w):
        lines[:] = [inspect.currentframe().f_lineno + 1]
        mask = jax.random.bernoulli(key, 0.5, x.shape)
        return jnp.where(mask, x, 0) @ w

    (warning,) = trained(two, draw)
    assert (warning.filename, warning.lineno) == (__file__, lines[0])
    assert f"test_example_check.py:{lines[0] + 1} combines them" in str(warning.message)


def test_line_is_the_one_of_the_replicated_key_of_two_draws_of_one_shape(two):
    """JAX traces `jax.random.bernoulli` once for both draws."""
    lines = []

    def draw(key, x, w):
        lines[:] = [inspect.currentframe().f_lineno + 2]
        own = jax.random.bernoulli(jdist.replica_key(key), 0.5, x.shape)
        shared = jax.random.bernoulli(key, 0.5, x.shape)
        return jnp.where(own, x, 0) @ w + jnp.where(shared, x, 0) @ w

    (warning,) = trained(two, draw)
    assert warning.lineno == lines[0]


def test_key_per_example_does_not_warn(two):
    def draw(key, x, w):
        keys = jdist.example_key(key, 4 * jdist.replica_id() + jnp.arange(4))
        return jax.vmap(dropout)(keys, x) @ w

    assert trained(two, draw) == []


@pytest.mark.parametrize("where", ["gradients", "reduced_gradients", "parameters"])
def test_noise_on_gradients_and_parameters_does_not_warn(two, where):
    def step(state, x):
        w, key = state
        noise = jax.random.normal(key, w.shape)
        grad = jax.grad(lambda w: jnp.mean((x @ w) ** 2))(w)
        grad = jdist.all_reduce("mean", grad + noise * grad if where == "gradients" else grad)
        grad = grad * noise if where == "reduced_gradients" else grad
        return (w - grad + (noise if where == "parameters" else 0), key), None

    x = two.put(jdist.PerReplica(np.ones((2, 8, 8), np.float32)))  # a batch as long as the parameters
    two.step(step).lower(two.init(lambda: (jnp.ones((8, 3)), jax.random.key(0))), x)


def test_steps_per_call_and_virtual_replicas_warn_once(two):
    assert len(trained(two, SHARED["hidden"], steps_per_call=2)) == 1
    virtual = jdist.MirroredStrategy(["cpu:0", "cpu:1"], virtual_replicas=4)
    assert len(trained(virtual, SHARED["inputs"])) == 1


@pytest.mark.parametrize("name", ["one_device", *BACKENDS])
def test_only_several_replicas_warn(name):
    strategy = STRATEGIES[name]()
    assert len(trained(strategy, SHARED["noise"])) == (strategy.num_replicas_in_sync > 1)


def test_one_number_per_replica_has_no_examples(two):
    own = two.put(jdist.PerReplica(np.float32([1, 2])))
    two.run(lambda x: x[None] * jax.random.uniform(jax.random.key(0), (1,)), (own,))


def test_environments_in_the_state_warn(two):
    """A step without data, whose state has the environments of each replica."""

    def step(state):
        environments, key = state
        moved = environments + jax.random.normal(key, environments.shape)
        return (moved, key), None

    state = two.init(lambda: (jdist.PerReplica(jnp.zeros((4, 2))), jax.random.key(0)))
    with pytest.warns(SharedRandomnessWarning):
        two.step(step).lower(state)


def test_parameters_of_each_replica_are_not_examples(two):
    """Local SGD: each replica has its own parameters, and the noise on them is the same."""
    tx = sync.local_sgd(optax.sgd(0.1), every=2)

    def step(state, x):
        w, opt_state, key = state
        grad = jax.grad(lambda w: jnp.mean((x @ (w * jax.random.normal(key, w.shape))) ** 2))(w)
        updates, opt_state = tx.update(grad, opt_state, w)
        return (optax.apply_updates(w, updates), opt_state, key), None

    state = two.init(lambda: (w := jnp.ones((8, 3)), tx.init(w), jax.random.key(0)))
    two.step(step).lower(state, two.put(jdist.PerReplica(np.ones((2, 4, 8), np.float32))))


@pytest.mark.parametrize(
    ("old", "new", "groups"),
    [
        ((4, 3, 2), (12, 2), [([0, 1], [0]), ([2], [1])]),
        ((12, 2), (4, 3, 2), [([0], [0, 1]), ([1], [2])]),
        ((4,), (4, 1), [([0], [0]), ([], [1])]),
        ((1, 4), (4,), [([0, 1], [0])]),
        ((2, 6), (4, 3), [([0, 1], [0, 1])]),
        ((), (1,), [([], [0])]),
        ((0, 2), (0,), []),
    ],
)
def test_reshape_groups_dims_with_the_same_elements(old, new, groups):
    assert list(_reshape_groups(old, new)) == groups


# Clipping per example.


def private(noise_multiplier=0.1):
    return optax.contrib.differentially_private_aggregate(1.0, noise_multiplier, jax.random.key(0))


def private_step(tx, reduce=lambda grads: grads):
    def step(state, x):
        w, opt_state = state
        grads = jax.vmap(jax.grad(lambda w, x: jnp.mean((x @ w) ** 2)), (None, 0))(w, x)
        updates, opt_state = tx.update(reduce(grads), opt_state, w)
        return (optax.apply_updates(w, updates), opt_state), None

    return step


def private_state(strategy, tx):
    return strategy.init(lambda: (w := jnp.ones((8, 3)), tx.init(w)))


PRIVATE_LAST = {
    "mean": lambda: optax.chain(sync.mean(), private(), optax.sgd(0.1)),
    "dpsgd": lambda: optax.chain(sync.mean(), optax.contrib.dpsgd(0.1, 1.0, 0.1, 0)),
    "in_dtype": lambda: optax.chain(sync.in_dtype(jnp.bfloat16), private(), optax.sgd(0.1)),
    "int8": lambda: optax.chain(sync.int8(block_size=4), private(), optax.sgd(0.1)),
}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of `dpsgd` in optax
@pytest.mark.parametrize("name", PRIVATE_LAST)
def test_clipping_per_example_after_a_policy_is_refused(two, name):
    tx = PRIVATE_LAST[name]()
    examples = jnp.ones((4, 8, 3))  # the policies have a state per gradient
    state = two.init(lambda: (jnp.ones((8, 3)), tx.init(examples)))
    message = r"test_example_check\.py:\d+ in .*step clips gradients per example.*one row is the mean of examples of different"
    with pytest.raises(ValueError, match=message):
        two.step(private_step(tx)).lower(state, two.put(jdist.PerReplica(np.ones((2, 4, 8), np.float32))))


def test_clipping_per_example_after_all_reduce_is_refused(two):
    step = private_step(private(), reduce=lambda grads: jdist.all_reduce("mean", grads))
    with pytest.raises(ValueError, match=r"Clip first, and reduce the result: `optax\.chain\("):
        two.step(step).lower(private_state(two, private()), two.put(jdist.PerReplica(np.ones((2, 4, 8), np.float32))))


def test_clipping_per_example_before_the_reduction_equals_one_device(strategy):
    """Also by the noise: each replica adds the same noise to its sum, so the multiplier is divided by the replicas."""

    def trained(strategy):
        tx = optax.chain(private(0.5 / strategy.num_replicas_in_sync), sync.mean(), optax.sgd(0.1))
        x = strategy.split(np.random.default_rng(0).normal(size=(24, 8)).astype(np.float32))
        (w, _), _ = strategy.step(private_step(tx))(private_state(strategy, tx), x)
        return np.asarray(w)

    np.testing.assert_allclose(trained(strategy), trained(jdist.OneDeviceStrategy("cpu:0")), rtol=1e-4, atol=1e-6)


def test_gathered_examples_may_be_clipped(two):
    step = private_step(private(), reduce=lambda grads: jdist.all_gather(grads, axis=0))
    two.step(step).lower(private_state(two, private()), two.put(jdist.PerReplica(np.ones((2, 4, 8), np.float32))))
