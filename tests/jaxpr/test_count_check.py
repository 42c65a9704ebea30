"""A mean over replicas of values that were divided by a count of each replica warns; right means do not."""

import inspect
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import Mesh

import jdist
from jdist import LocalCountWarning, sync
from jdist._src.jaxpr import replication

BATCH, TIME, FEATURES = 4, 3, 5


@pytest.fixture(autouse=True)
def no_warnings_yet(monkeypatch):
    monkeypatch.setattr(replication, "_warned", {})


def token_losses(w, x):
    return jnp.tanh(x @ w) ** 2  # [batch, time]


def scanned(losses, mask):
    def body(carry, part):
        losses, mask = part
        return (carry[0] + jnp.sum(losses * mask), carry[1] + jnp.sum(mask)), None

    (total, count), _ = lax.scan(body, (0.0, 0.0), (losses.reshape(2, 2, TIME), mask.reshape(2, 2, TIME)))
    return total / count


def micro_batches(losses, mask):
    part = lambda part: jnp.sum(part[0] * part[1]) / jnp.maximum(jnp.sum(part[1]), 1)
    return jnp.mean(lax.map(part, (losses.reshape(2, 2, TIME), mask.reshape(2, 2, TIME))))


def per_example(losses, mask):
    return jnp.mean(jnp.sum(losses * mask, -1) / jnp.maximum(jnp.sum(mask, -1), 1))


def guarded(losses, mask):
    count = jnp.sum(mask)
    return lax.cond(count > 0, lambda: jnp.sum(losses * mask) / count, lambda: 0.0)


# Functions of losses and a mask [batch, time]. Each has the local count of a replica as its divisor.
WRONG = {
    "quotient": lambda losses, mask: jnp.sum(losses * mask) / jnp.sum(mask),
    "bounded": lambda losses, mask: jnp.sum(losses * mask) / jnp.maximum(jnp.sum(mask), 1),
    "epsilon": lambda losses, mask: jnp.sum(losses * mask) / (jnp.sum(mask) + 1e-8),
    "where": lambda losses, mask: jnp.mean(losses, where=mask > 0),
    "means": lambda losses, mask: jnp.mean(losses * mask) / jnp.mean(mask),
    "boolean": lambda losses, mask: jnp.where(mask > 0, losses, 0).sum() / jnp.sum(mask > 0),
    "counted": lambda losses, mask: jnp.sum(losses * mask) / jnp.count_nonzero(mask),
    "reciprocal": lambda losses, mask: jnp.sum(losses * mask) * (1 / jnp.sum(mask)),
    "power": lambda losses, mask: jnp.sum(losses * mask) * jnp.sum(mask) ** -1,
    "two_sums": lambda losses, mask: (losses * mask).sum(-1).sum() / mask.sum(-1).sum(),
    "weights": lambda losses, mask: jnp.sum(losses * (mask / jnp.sum(mask))),
    "average": lambda losses, mask: jnp.average(losses, weights=mask),
    "flat": lambda losses, mask: jnp.dot(losses.reshape(-1), mask.reshape(-1)) / mask.reshape(-1).sum(),
    "no_zero": lambda losses, mask: jnp.sum(losses * mask) / jnp.where(jnp.sum(mask) == 0, 1, jnp.sum(mask)),
    "jitted": lambda losses, mask: jax.jit(lambda a, m: jnp.sum(a * m) / jnp.sum(m))(losses, mask),
    "checkpointed": lambda losses, mask: jax.checkpoint(lambda a, m: jnp.sum(a * m) / jnp.sum(m))(losses, mask),
    "plus_another": lambda losses, mask: jnp.sum(losses * mask) / jnp.sum(mask) + 0.1,
    "scan": scanned,
    "micro_batches": micro_batches,
    "cond": guarded,
}
RIGHT = {
    "mean": lambda losses, mask: jnp.mean(losses),
    "masked_mean": lambda losses, mask: jnp.mean(losses * mask),
    "constant": lambda losses, mask: jnp.sum(losses * mask) / (BATCH * TIME),
    "global_mean": lambda losses, mask: jdist.global_mean(losses, mask),
    "global_count": lambda losses, mask: jnp.sum(losses * mask) / jdist.all_reduce("mean", jnp.sum(mask)),
    "global_sum": lambda losses, mask: jnp.sum(losses * mask) / lax.psum(jnp.sum(mask), "replica") * 2,
    "weighted_back": lambda losses, mask: (
        jnp.sum(losses * mask) / jnp.sum(mask) * jnp.sum(mask) / jdist.all_reduce("mean", jnp.sum(mask))
    ),
    "weight_of_replica": lambda losses, mask: (
        jnp.sum(losses * mask) / jnp.sum(mask) * (jnp.sum(mask) / jdist.all_reduce("mean", jnp.sum(mask)))
    ),
    "per_example": per_example,
    "vmapped": lambda losses, mask: jnp.mean(jax.vmap(lambda a, m: jnp.sum(a * m) / jnp.sum(m))(losses, mask)),
    "mapped": lambda losses, mask: jnp.mean(lax.map(lambda p: jnp.sum(p[0] * p[1]) / jnp.sum(p[1]), (losses, mask))),
    "per_time": lambda losses, mask: jnp.mean(jnp.sum(losses * mask, 0) / jnp.sum(mask, 0)),
    "standardized": lambda losses, mask: jnp.mean(losses * (mask - mask.mean()) / (mask.std() + 1e-6)),
    "centered": lambda losses, mask: jnp.mean((losses - jnp.sum(losses * mask) / jnp.sum(mask)) ** 2),
    "attention": lambda losses, mask: jnp.mean(jax.nn.softmax(losses, where=mask > 0, axis=-1) * losses),
    "normalized": lambda losses, mask: jnp.mean(losses / jnp.sum(losses)),
    "rms": lambda losses, mask: jnp.mean(losses / jnp.sqrt(jnp.mean(losses**2))),
    "attention_weights": lambda losses, mask: jnp.sum(lax.stop_gradient(losses) * losses) / jnp.sum(losses),
}


def with_replica_mean(reduce, loss_of):
    """Returns a step that reduces the gradient, and the loss, as `reduce` does."""

    def step(w, batch):
        x, mask = batch
        loss, grad = jax.value_and_grad(lambda w: loss_of(token_losses(w, x), mask))(w)
        return reduce(w, loss, grad)

    return step


def optimized(policy):
    def reduce(w, loss, grad):
        tx = optax.chain(policy(), optax.sgd(0.1))
        updates, _ = tx.update(grad, tx.init(w), w)
        return optax.apply_updates(w, updates), jnp.float32(0)

    return reduce


REDUCTIONS = {
    "loss_and_gradient": lambda w, loss, grad: (w - jdist.all_reduce("mean", grad), jdist.all_reduce("mean", loss)),
    "loss": lambda w, loss, grad: (w, jdist.all_reduce("mean", loss)),
    "gradient": lambda w, loss, grad: (w - jdist.all_reduce("mean", grad), jnp.float32(0)),
    "pmean": lambda w, loss, grad: (w - lax.pmean(grad, "replica"), jnp.float32(0)),
    "psum": lambda w, loss, grad: (w - 0.1 * lax.psum(grad, "replica") / lax.axis_size("replica"), jnp.float32(0)),
    "policy": optimized(sync.mean),
    "int8": optimized(sync.int8),
    "top_k": optimized(lambda: sync.top_k(0.5)),
    "every": optimized(lambda: sync.every(optax.chain(sync.mean(), optax.sgd(0.1)), 2)),
    "clipped": lambda w, loss, grad: optimized(sync.mean)(w, loss, grad / jnp.maximum(1, optax.tree.norm(grad))),
}


def warnings_of(strategy, step, steps_per_call=None):
    n = strategy.num_replicas_in_sync
    mask = np.float32(np.arange(TIME) < np.arange(1, n * BATCH + 1)[:, None] % TIME + 1)
    batch = strategy.split((np.ones((n * BATCH, TIME, FEATURES), np.float32), mask))
    state = strategy.put(jnp.ones(FEATURES))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        program = strategy.step(step, steps_per_call=steps_per_call, donate=False)
        if steps_per_call is None:
            program.lower(state, batch)
        else:
            program(state, [batch] * steps_per_call)
    return [warning for warning in caught if warning.category is not jdist.NotEquivalentWarning]


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("case", WRONG)
def test_mean_of_values_divided_by_a_local_count_warns(two, case, reduction):
    caught = warnings_of(two, with_replica_mean(REDUCTIONS[reduction], WRONG[case]))
    assert [(w.category, w.filename) for w in caught] == [(LocalCountWarning, __file__)]


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("case", RIGHT)
def test_right_means_do_not_warn(two, case, reduction):
    assert warnings_of(two, with_replica_mean(REDUCTIONS[reduction], RIGHT[case])) == []


def test_warning_names_the_lines_of_the_division_and_of_the_mean(two):
    lines = []

    def step(w, batch):
        x, mask = batch
        losses = token_losses(w, x)
        lines[:] = [inspect.currentframe().f_lineno + 1]
        loss = jnp.sum(losses * mask) / jnp.sum(mask)
        return w, jdist.all_reduce("mean", loss)

    (warning,) = warnings_of(two, step)
    assert (warning.filename, warning.lineno) == (__file__, lines[0])
    message = str(warning.message)
    assert f"test_count_check.py:{lines[0] + 1} averages it over the 2 replicas" in message
    assert "Use `jdist.global_mean(values, weights)`" in message


def test_warning_names_a_line_of_the_user_if_a_library_divides(two):
    def step(w, batch):
        x, mask = batch
        logits = x @ jnp.stack([w, -w], 1)
        labels = jnp.zeros(mask.shape, jnp.int32)
        accuracy = jnp.mean(jnp.argmax(logits, -1) == labels, where=mask > 0)
        return w, lax.pmean(accuracy, "replica")

    (warning,) = warnings_of(two, step)
    assert warning.filename == __file__


def test_several_steps_per_call_warn_once(two):
    step = with_replica_mean(REDUCTIONS["loss_and_gradient"], WRONG["quotient"])
    assert [w.category for w in warnings_of(two, step, steps_per_call=2)] == [LocalCountWarning]


def test_one_replica_does_not_warn():
    for strategy in (
        jdist.OneDeviceStrategy("cpu:0"),
        jdist.ShardedStrategy("all", mesh=Mesh(np.array(jax.devices()[:2]), ("data",))),
    ):
        step = with_replica_mean(REDUCTIONS["loss_and_gradient"], WRONG["quotient"])
        assert warnings_of(strategy, step) == []


def test_virtual_replicas_warn():
    strategy = jdist.MirroredStrategy(["cpu:0", "cpu:1"], virtual_replicas=4)
    step = with_replica_mean(REDUCTIONS["loss_and_gradient"], WRONG["quotient"])
    (warning,) = warnings_of(strategy, step)
    assert "over the 4 replicas" in str(warning.message)


def test_a_number_that_the_data_contain_and_a_replicated_count_do_not_warn(two):
    """What a number of the data counts is not known; a replicated count is the same on every replica."""

    def step(w, x, weights, number):
        loss = jnp.sum(token_losses(w, x)) / number + jnp.sum(token_losses(w, x)) / jnp.sum(weights)
        return w, jdist.all_reduce("mean", loss)

    x = two.split(np.ones((2 * BATCH, TIME, FEATURES), np.float32))
    arguments = (x, np.float32([1, 2]), jdist.PerReplica(np.float32([1, 2])))
    with warnings.catch_warnings():
        warnings.simplefilter("error", LocalCountWarning)
        two.step(step).lower(two.put(jnp.ones(FEATURES)), *arguments)


def mean_with_its_count(w, batch):
    x, mask = batch
    count = jnp.sum(mask)
    return (jnp.sum(token_losses(w, x) * mask) / jnp.where(count == 0, 1, count), count), None


def test_mean_with_its_count_as_its_weight_does_not_warn(two):
    train_step = jdist.train_step(mean_with_its_count, optax.sgd(0.1))
    batch = two.split((np.ones((8, TIME, FEATURES), np.float32), np.ones((8, TIME), np.float32)))
    with two.scope(), warnings.catch_warnings():
        warnings.simplefilter("error", LocalCountWarning)
        train_step(jdist.init(lambda: jdist.TrainState.create(jnp.ones(FEATURES), optax.sgd(0.1))), batch)


def mean_of_replica(params, batch, key, apply):
    losses = token_losses(apply(params, batch["x"]), batch["x"])
    return losses * batch["mask"] / jnp.mean(batch["mask"])


def weighted(params, batch, key, apply):
    return token_losses(apply(params, batch["x"]), batch["x"]), batch["mask"]


@pytest.mark.parametrize(("objective", "categories"), [(mean_of_replica, {LocalCountWarning}), (weighted, set())])
def test_objective_of_a_trainer_that_divides_by_its_tokens_warns(two, objective, categories):
    model = lambda key, x: jnp.ones(FEATURES), lambda w, x: w
    mask = np.float32(np.arange(TIME) < np.arange(8)[:, None] % TIME + 1)
    data = {"x": np.ones((8, TIME, FEATURES), np.float32), "mask": mask}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", LocalCountWarning)
        trainer = jdist.Trainer(model, optax.sgd(0.1), objective=objective, strategy=two)
        trainer.fit(data, batch_size=8, progress="off")
    assert {w.category for w in caught} == categories
    assert all(w.filename == __file__ for w in caught)
