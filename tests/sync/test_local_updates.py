"""Local SGD and DiLoCo: the placement of their state, their results, and the steps that use collectives."""

import dataclasses
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training.train_state import TrainState

import jdist
from jdist import sync

from laws import traces_of_a_step

SIZES = {"a": 3, "b": 2, "c": 1}
START = np.float32([0.5, -1.0, 2.0, 0.1, -0.3, 1.5])


def mirrored(count):
    return jdist.MirroredStrategy([f"cpu:{i}" for i in range(count)])


# --- a linear model, and the same by numpy


def tree_of(vector, dtype=jnp.float32):
    parts = np.split(np.asarray(vector), np.cumsum(list(SIZES.values()))[:-1])
    return {name: jnp.asarray(part, dtype) for name, part in zip(SIZES, parts, strict=True)}


def predictions(params, x):
    return x @ jnp.concatenate([params[name] for name in SIZES]).astype(x.dtype)


def loss(params, x, y):
    return jnp.mean((predictions(params, x) - y) ** 2)


def batches(steps, replicas, rows=4, seed=0):
    """Yields pairs of x `[replica, rows, 6]` and y `[replica, rows]`; each replica fits another plane."""
    rng = np.random.default_rng(seed)
    planes = rng.normal(size=(replicas, 6))
    for _ in range(steps):
        x = rng.normal(size=(replicas, rows, 6))
        yield np.float32(x), np.float32(np.einsum("rbf,rf->rb", x, planes))


def each(params, replicas):
    """Returns the parameters of each replica, `[replica, 6]`."""
    rows = [
        np.asarray(one.tree) if isinstance(one, jdist.SyncOnRead) else np.stack([one] * replicas)
        for one in (params[name] for name in SIZES)
    ]
    return np.concatenate([row.astype(np.float64) for row in rows], axis=1)


def make_state(strategy, tx, dtype=jnp.float32):
    return strategy.init(lambda: (params := tree_of(START, dtype), tx.init(params)))


def make_step(strategy, tx, after=lambda params: params, seen=None):
    def step(state, batch):
        if seen is not None:
            seen.append(batch)
        params, opt_state = state
        value, grads = jax.value_and_grad(loss)(params, *batch)
        updates, opt_state = tx.update(grads, opt_state, params)
        return (after(optax.apply_updates(params, updates)), opt_state), value

    return strategy.step(step)


def trained(strategy, tx, data, state=None, **options):
    """Returns the final state, and the parameters of each replica after each step, `[step, replica, 6]`."""
    state = make_state(strategy, tx) if state is None else state
    step, history = make_step(strategy, tx, **options), []
    for batch in data:
        state, _ = step(state, strategy.put(jdist.PerReplica(batch)))
        history.append(each(state[0], strategy.num_replicas_in_sync))
    return state, np.stack(history)


class Workers:
    """Replicas in numpy, in double precision."""

    def __init__(self, rule, replicas):
        self._rule, self._memory = rule, None
        self.w = np.stack([np.float64(START)] * replicas)

    def step(self, x, y):
        error = np.einsum("rbf,rf->rb", np.float64(x), self.w) - y
        grads = 2 * np.einsum("rb,rbf->rf", error, x) / x.shape[1]
        self._memory, updates = self._rule(self._memory, grads, self.w)
        self.w = self.w + updates

    def share_out(self, replicas):
        """Continues with another number of replicas, from the mean over all replicas."""
        self.w = np.stack([self.w.mean(0)] * replicas)
        self._memory = [m if np.ndim(m) == 0 else np.stack([m.mean(0)] * replicas) for m in self._memory or []] or None


def sgd(memory, grads, w):
    return memory, -0.1 * grads


def momentum(memory, grads, w):
    (trace,) = memory or [0]
    trace = 0.8 * trace + grads
    return [trace], -0.05 * trace


def adamw(memory, grads, w):
    count, mu, nu = memory or (0, 0, 0)
    count, mu, nu = count + 1, 0.9 * mu + 0.1 * grads, 0.999 * nu + 0.001 * grads**2
    direction = mu / (1 - 0.9**count) / (np.sqrt(nu / (1 - 0.999**count)) + 1e-8)
    return [count, mu, nu], -0.03 * (direction + 0.1 * w)


OPTIMIZERS = {
    "sgd": (lambda: optax.sgd(0.1), sgd),
    "momentum": (lambda: optax.sgd(0.05, momentum=0.8), momentum),
    "adamw": (lambda: optax.adamw(0.03, weight_decay=0.1), adamw),
}


class Nesterov:
    """The outer optimizer of the paper: learning rate 0.7, momentum 0.9."""

    def __init__(self):
        self._velocity = 0

    def __call__(self, anchor, local):
        """Returns the new replicated parameters of the previous ones and each replica's own."""
        pseudo_gradient = anchor - local.mean(0)
        self._velocity = 0.9 * self._velocity + pseudo_gradient
        return anchor - 0.7 * (pseudo_gradient + 0.9 * self._velocity)


def local_sgd_by_numpy(workers, data, every, number=0):
    history = []
    for batch in data:
        workers.step(*batch)
        number += 1
        if number % every == 0:
            workers.w[:] = workers.w.mean(0)
        history.append(workers.w.copy())
    return np.stack(history)


def diloco_by_numpy(workers, data, every):
    anchor, outer, history = np.float64(START), Nesterov(), []
    for number, batch in enumerate(data, 1):
        workers.step(*batch)
        if number % every == 0:
            anchor = outer(anchor, workers.w)
            workers.w[:] = anchor
        history.append(workers.w.copy())
    return np.stack(history)


# --- the compiled program

_COLLECTIVE = re.compile(
    r"\s(?:all-reduce|(?:ragged-)?all-to-all|all-gather|reduce-scatter|collective-permute|collective-broadcast)(?:-start)?\("
)


def collectives(compiled):
    """Returns the number of collectives of a compiled program that every call executes, and of those inside a conditional."""
    bodies, entry, name = {}, None, None
    for line in compiled.splitlines():
        head = re.match(r"(ENTRY )?%?([\w.-]+) \(.*\{$", line)
        if head:
            name = head[2]
            bodies[name] = []
            entry = name if head[1] else entry
        elif name:
            bodies[name].append(line)

    always, front = set(), [entry]
    while front:
        body = front.pop()
        if body not in always:
            always.add(body)
            unconditional = (line for line in bodies[body] if not re.search(r"\sconditional\(", line))
            front += [name for line in unconditional for name in _called(line) if name in bodies]
    counts = {name: sum(bool(_COLLECTIVE.search(line)) for line in body) for name, body in bodies.items()}
    in_every_call = sum(counts[name] for name in always)
    return in_every_call, sum(counts.values()) - in_every_call


def _called(line):
    for value in re.findall(r"\b\w+=(\{[^{}]*\}|%?[\w.-]+)", line):
        yield from re.findall(r"[\w.-]+", value)


def collectives_of(strategy, tx, **options):
    (batch,) = batches(1, strategy.num_replicas_in_sync)
    step = make_step(strategy, tx, **options)
    return collectives(step.lower(make_state(strategy, tx), strategy.put(jdist.PerReplica(batch))).compile().as_text())


QUIET = {
    "local_sgd": lambda: sync.local_sgd(optax.adam(0.1), every=3),
    "diloco": lambda: sync.diloco(optax.adam(0.1), every=3),
    "diloco_int8": lambda: sync.diloco(optax.adam(0.1), every=3, reduction=sync.int8(block_size=2)),
    "diloco_clipped": lambda: sync.diloco(
        optax.adam(0.1), optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(1.0)), every=3
    ),
}


def clip(params):
    return jax.tree.map(lambda w: jnp.clip(w, -0.25, 0.25), params)


@pytest.mark.parametrize("name, options", [*((name, {}) for name in QUIET), ("local_sgd", {"after": clip})])
def test_step_between_synchronization_steps_executes_no_collective(two, name, options):
    in_every_call, in_sync_steps = collectives_of(two, QUIET[name](), **options)
    assert (in_every_call, in_sync_steps > 0) == (0, True)


def test_collectives_of_every_step_are_counted_as_unconditional(two):
    in_every_call, in_sync_steps = collectives_of(two, optax.chain(sync.mean(), optax.sgd(0.1)))
    assert (in_every_call > 0, in_sync_steps) == (True, 0)
    in_every_call, _ = collectives_of(two, sync.local_sgd(optax.sgd(0.1), every=1))
    assert in_every_call > 0


# --- numbers

CASES = [
    (1, 2, "adamw"),
    (2, 1, "sgd"),
    (2, 1, "adamw"),
    (2, 3, "momentum"),
    (3, 2, "adamw"),
    (4, 4, "sgd"),
    (4, 1, "momentum"),
]


@pytest.mark.parametrize("policy, by_numpy", [(sync.local_sgd, local_sgd_by_numpy), (sync.diloco, diloco_by_numpy)])
@pytest.mark.parametrize("replicas, every, name", CASES)
def test_policy_equals_numpy(replicas, every, name, policy, by_numpy):
    strategy, (make, rule) = mirrored(replicas), OPTIMIZERS[name]
    data = list(batches(9, replicas))
    state, history = trained(strategy, policy(make(), every=every), data)
    np.testing.assert_allclose(history, by_numpy(Workers(rule, replicas), data, every), rtol=1e-4, atol=1e-5)
    if every > 1:
        read = np.concatenate([state[0][name].read() for name in SIZES])
        np.testing.assert_allclose(read, history[-1].mean(0), rtol=1e-6)


def test_diloco_with_int8_is_close_to_diloco_and_stores_a_residual(two):
    data = list(batches(6, 2))
    state, history = trained(
        two, sync.diloco(optax.sgd(0.1), optax.sgd(1.0), every=3, reduction=sync.int8(block_size=2)), data
    )
    _, exact = trained(two, sync.diloco(optax.sgd(0.1), optax.sgd(1.0), every=3), data)
    np.testing.assert_allclose(history[2], exact[2], atol=0.02)
    residual = state[1].fragments[0].reduction_state.residual
    assert kinds(residual) == [("SUM", False)] * 2
    np.testing.assert_array_equal(history[2][0], history[2][1])


# --- synchronization steps


@pytest.mark.parametrize(
    "name, dtype",
    [
        ("local_sgd", jnp.float32),
        ("local_sgd", jnp.bfloat16),
        ("diloco", jnp.float32),
        ("diloco", jnp.float16),
        ("diloco_int8", jnp.bfloat16),
    ],
)
def test_replicas_are_bitwise_equal_after_a_synchronization_step_and_not_before(name, dtype):
    strategy, tx = mirrored(3), QUIET[name]()
    state, step = make_state(strategy, tx, dtype), make_step(strategy, tx)
    for number, batch in enumerate(batches(9, 3), 1):
        state, _ = step(state, strategy.put(jdist.PerReplica(batch)))
        assert {x.tree.dtype for x in state[0].values()} == {np.dtype(dtype)}
        history = each(state[0], 3)
        assert len(np.unique(history, axis=0)) == (1 if number % 3 == 0 else 3)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_replicas_are_bitwise_equal_where_parameters_cross_zero(dtype):
    """Each replica starts its step elsewhere, up to 10**8 times as far from the target as the target is from zero."""
    rng = np.random.default_rng(0)
    goals = rng.normal(size=(64, 2, 500)) * 10.0 ** rng.integers(-9, 1, size=(64, 1, 500))
    goals[:, 1] = -goals[:, 0] * (1 + rng.normal(size=(64, 500)) * 1e-7)
    two = mirrored(2)
    tx = sync.local_sgd(optax.sgd(1.0), every=2)
    state = two.init(lambda: (w := jnp.ones(500, dtype), tx.init(w)))

    @two.step
    def move(state, goal):
        w, opt_state = state
        updates, opt_state = tx.update(w - goal.astype(dtype), opt_state, w)
        return (optax.apply_updates(w, updates), opt_state), None

    for goal in goals:
        state, _ = move(state, two.put(jdist.PerReplica(np.float32(goal))))
        state, _ = move(state, two.put(jdist.PerReplica(np.float32(goal))))
        first, second = (np.asarray(w) for w in state[0].values)
        assert first.tobytes() == second.tobytes()


@pytest.mark.parametrize("name", QUIET)
def test_replicas_are_bitwise_equal_inside_an_accumulation(two, name):
    tx = sync.every(QUIET[name](), 2)
    _, history = trained(two, tx, batches(12, 2))
    differ = [len(np.unique(now, axis=0)) > 1 for now in history]
    assert differ[4] and not differ[5] and not differ[6] and not differ[11]


WITHIN = {
    "jit": jax.jit,
    "jit_closing_over": lambda update: lambda *args: jax.jit(lambda: update(*args))(),
    "checkpoint": jax.checkpoint,
    "cond": lambda update: (
        lambda w, opt_state, x: jax.lax.cond(
            jnp.any(opt_state.steps >= 0), lambda: update(w, opt_state, x), lambda: (w, opt_state)
        )
    ),
    "scan": lambda update: (
        lambda w, opt_state, x: jax.lax.scan(
            lambda carry, _: (update(*carry, x), None), (w, opt_state), None, length=1
        )[0]
    ),
}


@pytest.mark.parametrize("name", WITHIN)
def test_replicas_are_equal_up_to_rounding_if_update_is_called_inside_a_traced_function(two, name):
    tx = sync.local_sgd(optax.sgd(0.01), every=2)
    state = two.init(lambda: (w := jnp.full(300, 0.3), tx.init(w)))

    def update(w, opt_state, x):
        updates, opt_state = tx.update(jax.grad(lambda w: jnp.mean((x @ w - 1) ** 2))(w), opt_state, w)
        return optax.apply_updates(w, updates), opt_state

    step = two.step(lambda state, x: (WITHIN[name](update)(*state, x), None))
    rng = np.random.default_rng(0)
    for _ in range(4):
        state, _ = step(state, two.put(jdist.PerReplica(np.float32(rng.normal(size=(2, 5, 300))))))
    first, second = (np.asarray(w) for w in state[0].values)
    np.testing.assert_allclose(first, second, rtol=1e-6)


def test_user_changes_to_the_parameters_after_the_update_are_preserved(two):
    data = list(batches(6, 2))
    _, history = trained(two, sync.local_sgd(optax.sgd(0.1), every=2), data, after=clip)

    workers, expected = Workers(sgd, 2), []
    for number, batch in enumerate(data, 1):
        workers.step(*batch)
        if number % 2 == 0:
            workers.w[:] = workers.w.mean(0)
        workers.w = workers.w.clip(-0.25, 0.25)
        expected.append(workers.w.copy())
    assert np.abs(history).max() == 0.25
    np.testing.assert_allclose(history, np.stack(expected), rtol=1e-4, atol=1e-6)


def test_bound_that_the_mean_misses_by_a_rounding_is_preserved(two):
    """The user clips at a lower bound, and the mean of the replicas is slightly below it."""
    tx = sync.local_sgd(optax.sgd(1.0), every=2)
    state = two.init(lambda: (w := jnp.float32(2), tx.init(w)))

    @two.step
    def move(state, goal):
        w, opt_state = state
        updates, opt_state = tx.update(w - goal, opt_state, w)
        return (jnp.maximum(optax.apply_updates(w, updates), 1), opt_state), None

    for goal in (2.0, 1 - 1e-7):
        state, _ = move(state, two.put(jdist.PerReplica(np.float32([goal, goal]))))
    assert [float(w) for w in state[0].values] == [1, 1]


# --- placement


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Training:
    params: Any
    opt_state: Any


CONTAINERS = {
    "tuple": (lambda params, tx: (params, tx.init(params)), lambda state: state),
    "list": (lambda params, tx: [tx.init(params), params], lambda state: state[::-1]),
    "dict": (
        lambda params, tx: {"opt": {"state": tx.init(params)}, "model": [params]},
        lambda state: (state["model"][0], state["opt"]["state"]),
    ),
    "dataclass": (lambda params, tx: Training(params, tx.init(params)), lambda s: (s.params, s.opt_state)),
    "train_state": (
        lambda params, tx: TrainState.create(apply_fn=predictions, params=params, tx=tx),
        lambda state: (state.params, state.opt_state),
    ),
}


def kinds(tree):
    """Returns for each leaf `(aggregation, trainable)` if it is local to each replica, and None if it is replicated."""
    leaves = jax.tree.leaves(tree, is_leaf=lambda node: isinstance(node, jdist.SyncOnRead))
    return [(x.aggregation.name, x.trainable) if isinstance(x, jdist.SyncOnRead) else None for x in leaves]


LOCAL_KINDS = [("MEAN", True)] * 3
OWN = [("MEAN", False)] * 3


MADE = {
    "local_sgd": lambda optimizer: sync.local_sgd(optimizer, every=2),
    "diloco": lambda optimizer: sync.diloco(optimizer, every=2),
    "streaming_diloco": lambda optimizer: sync.streaming_diloco(optimizer, every=2, fragments=2),
}


@pytest.mark.parametrize(
    "container, policy", [*((name, "local_sgd") for name in CONTAINERS), *(("dict", name) for name in list(MADE)[1:])]
)
def test_init_places_local_leaves_in_any_container(two, container, policy):
    build, parts = CONTAINERS[container]
    tx = MADE[policy](optax.adam(optax.linear_schedule(0.1, 0.0, 9)))
    state = two.init(lambda: build(tree_of(START), tx))
    params, opt_state = parts(state)
    assert kinds(params) == LOCAL_KINDS
    adam, schedule = opt_state.opt_state
    assert (kinds(adam.mu), kinds(adam.nu), kinds(adam.count), kinds(schedule)) == (OWN, OWN, [None], [None])
    rest = opt_state._replace(opt_state=())
    assert kinds(rest) == [None] * len(jax.tree.leaves(rest))


def _is_own(node):
    return isinstance(node, jdist.SyncOnRead)


def reduced():
    return optax.chain(sync.mean(), optax.sgd(0.1))


WRAPPED = {
    "chain": lambda policy: optax.chain(optax.scale(2.0), policy(0.05)),
    "named_chain": lambda policy: optax.named_chain(("own", policy(0.05)), ("same", optax.identity())),
    "inject_hyperparams": lambda policy: optax.inject_hyperparams(policy)(rate=0.1),
    "skip_nonfinite": lambda policy: sync.skip_nonfinite(policy(0.1)),
    "dynamic_loss_scale": lambda policy: sync.dynamic_loss_scale(policy(0.1)),
    "with_extra_args": lambda policy: optax.with_extra_args_support(policy(0.1)),
}


@pytest.mark.parametrize("wrapper", WRAPPED)
def test_local_leaves_of_a_wrapped_policy_are_placed_by_init(two, wrapper):
    tx = WRAPPED[wrapper](lambda rate: sync.local_sgd(optax.sgd(rate, momentum=0.9), every=2))
    state = make_state(two, tx)
    assert kinds(state[0]) == LOCAL_KINDS
    assert kinds(state[1]).count(("MEAN", False)) == 3
    assert kinds(state[1]).count(None) == len(kinds(state[1])) - 3
    _, history = trained(two, tx, batches(4, 2), state=state)
    assert [len(np.unique(now, axis=0)) for now in history] == [2, 1, 2, 1]


PARTED = {
    "masked": lambda policy: optax.chain(
        optax.masked(policy, {"a": True, "b": True, "c": False}),
        optax.masked(reduced(), {"a": False, "b": False, "c": True}),
    ),
    "partition": lambda policy: optax.partition(
        {"own": policy, "all": reduced()}, {"a": "own", "b": "own", "c": "all"}
    ),
}


@pytest.mark.parametrize("wrapper", PARTED)
def test_policy_for_some_parameters_places_only_these(two, wrapper):
    tx = PARTED[wrapper](sync.local_sgd(optax.sgd(0.1, momentum=0.9), every=2))
    state = make_state(two, tx)
    assert kinds(state[0]) == [("MEAN", True), ("MEAN", True), None]
    assert kinds(state[1]).count(("MEAN", False)) == 2
    _, history = trained(two, tx, batches(4, 2), state=state)
    assert [len(np.unique(now, axis=0)) for now in history] == [2, 1, 2, 1]
    assert [len(np.unique(now[:, 5])) for now in history] == [1, 1, 1, 1]


def test_two_policies_for_parts_of_a_model_each_place_their_part(two):
    labels = {"a": "one", "b": "two", "c": "two"}
    parts = {
        "one": sync.local_sgd(optax.adam(0.1), every=2),
        "two": sync.diloco(optax.sgd(0.1), every=3),
    }
    tx = optax.multi_transform(parts, labels)
    state = make_state(two, tx)
    assert kinds(state[0]) == LOCAL_KINDS
    _, history = trained(two, tx, batches(6, 2), state=state)
    assert [len(np.unique(now[:, :3], axis=0)) for now in history] == [2, 1, 2, 1, 2, 1]
    assert [len(np.unique(now[:, 3:], axis=0)) for now in history] == [2, 2, 1, 2, 2, 1]


def test_apply_if_finite_around_a_policy_is_placed_and_its_condition_is_refused_by_the_proof(two):
    """Its condition depends on one replica's numbers, so one replica would skip a collective; `skip_nonfinite` reduces it."""
    tx = optax.apply_if_finite(sync.local_sgd(optax.sgd(0.1), every=2), 3)
    state = make_state(two, tx)
    assert kinds(state[0]) == LOCAL_KINDS
    with pytest.raises(jdist.DivergentCollectiveError, match=r"is_finite.*cond at .*test_local_updates\.py"):
        make_step(two, tx)(state, two.put(jdist.PerReplica(next(batches(1, 2)))))


def test_schedules_and_hyperparameters_of_the_optimizer_stay_replicated(two):
    optimizer = optax.inject_hyperparams(optax.adamw)(learning_rate=optax.linear_schedule(0.1, 0.0, 10), b1=0.8)
    _, opt_state = make_state(two, sync.local_sgd(optimizer, every=2))
    assert kinds(opt_state.opt_state.hyperparams) == [None] * len(opt_state.opt_state.hyperparams)
    assert kinds(opt_state).count(("MEAN", False)) == 6


def test_policy_with_every_1_has_replicated_parameters_and_local_moments(two):
    for tx in (sync.local_sgd(optax.adam(0.1), every=1), sync.diloco(optax.adam(0.1), every=1)):
        params, opt_state = make_state(two, tx)
        assert kinds(params) == [None] * 3
        assert kinds(opt_state.opt_state[0].mu) == OWN


def test_state_computed_from_diverging_parameters_is_local(two):
    """State that the optimizer computes from diverging parameters varies, even where no gradient enters."""
    average = optax.GradientTransformation(
        lambda params: jax.tree.map(jnp.zeros_like, params),
        lambda grads, state, params: (grads, jax.tree.map(lambda s, p: 0.9 * s + 0.1 * p, state, params)),
    )
    _, drifting = make_state(two, sync.local_sgd(optax.chain(average, optax.sgd(0.1)), every=2))
    assert kinds(drifting.opt_state) == OWN
    _, together = make_state(two, sync.local_sgd(optax.chain(average, optax.sgd(0.1)), every=1))
    assert kinds(together.opt_state) == [None] * 3


def test_evaluation_of_diverging_parameters_reads_their_average(two):
    state, history = trained(two, sync.local_sgd(optax.sgd(0.1), every=5), batches(3, 2))
    assert len(np.unique(history[-1], axis=0)) == 2
    x = np.float32(np.random.default_rng(1).normal(size=(5, 6)))
    average = jax.tree.map(lambda p: p.read(), state[0], is_leaf=_is_own)
    results = two.run(predictions, (average, x))
    np.testing.assert_allclose(results, x @ history[-1].mean(0), rtol=1e-5, atol=1e-6)


# --- resuming


def test_another_number_of_replicas_continues_from_the_average():
    data = list(batches(4, 2)), list(batches(5, 3, seed=1))
    two, three = mirrored(2), mirrored(3)
    tx = sync.local_sgd(optax.sgd(0.05, momentum=0.8), every=3)
    state, _ = trained(two, tx, data[0])
    _, history = trained(three, tx, data[1], state=three.put(state))

    workers = Workers(momentum, 2)
    local_sgd_by_numpy(workers, data[0], 3)
    workers.share_out(3)
    expected = local_sgd_by_numpy(workers, data[1], 3, number=4)
    np.testing.assert_allclose(history, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_diloco_with_a_residual_continues_with_another_number_of_replicas():
    replicas = 3
    two, others = mirrored(2), mirrored(replicas)
    tx = sync.diloco(optax.adam(0.05), every=2, reduction=sync.int8(block_size=2))
    state, _ = trained(two, tx, batches(3, 2))
    residual_sums = [np.asarray(state[1].fragments[0].reduction_state.residual[name].read()) for name in "ab"]
    state = others.put(state)
    for name, sum_before in zip("ab", residual_sums, strict=True):
        assert np.abs(sum_before).max() > 1e-5
        np.testing.assert_allclose(
            state[1].fragments[0].reduction_state.residual[name].read(), sum_before, rtol=1e-5, atol=1e-7
        )
    _, history = trained(others, tx, batches(5, replicas, seed=1), state=state)
    assert np.isfinite(history).all()
    np.testing.assert_array_equal(history[4], history[4][[0] * replicas])


TRACED = {**QUIET, "streaming_diloco": lambda: sync.streaming_diloco(optax.adam(0.1), every=3, fragments=3)}


@pytest.mark.parametrize("name", ["local_sgd", "diloco_int8", "streaming_diloco"])
def test_steps_trace_once_without_transfers_and_donate_their_state(two, name):
    seen, tx = [], TRACED[name]()
    step, state = make_step(two, tx, seen=seen), make_state(two, tx)
    data = [two.put(jdist.PerReplica(batch)) for batch in batches(7, 2)]
    state, _ = step(state, data[0])
    with jax.transfer_guard("disallow"):
        for batch in data[1:]:
            before = jax.tree.leaves(state)
            state, _ = step(state, batch)
            assert all(leaf.is_deleted() for leaf in before)
    assert len(seen) == traces_of_a_step(two)


def test_outside_any_strategy_there_is_one_replica():
    tx = sync.diloco(optax.sgd(0.1), every=2)
    data = list(batches(4, 1))
    params = tree_of(START)
    opt_state, update = tx.init(params), jax.jit(tx.update)
    for x, y in data:
        updates, opt_state = update(jax.grad(loss)(params, x[0], y[0]), opt_state, params)
        params = optax.apply_updates(params, updates)
    expected = diloco_by_numpy(Workers(sgd, 1), data, 2)[-1]
    np.testing.assert_allclose(each(params, 1), expected, rtol=1e-4, atol=1e-6)


def test_extra_arguments_of_update_reach_the_optimizer(two):
    scaled = optax.GradientTransformationExtraArgs(
        lambda params: optax.EmptyState(),
        lambda grads, state, params=None, *, by=1.0, **extra: (jax.tree.map(lambda g: -by * g, grads), state),
    )
    tx = sync.local_sgd(scaled, every=2)
    state = two.init(lambda: (w := jnp.float32(0), tx.init(w)))

    @two.step
    def step(state, by):
        w, opt_state = state
        updates, opt_state = tx.update(jnp.float32(1), opt_state, w, by=by)
        return (w + updates, opt_state), None

    for _ in range(2):
        state, _ = step(state, two.put(jdist.PerReplica(np.float32([1, 3]))))
    assert [float(w) for w in state[0].values] == [-4, -4]


# --- errors


@pytest.mark.parametrize("word", ["local_sgd", "diloco", "streaming_diloco"])
@pytest.mark.parametrize(
    "every, error, message",
    [
        (0, ValueError, ">= 1, got 0"),
        (-3, ValueError, ">= 1, got -3"),
        (2.5, TypeError, ">= 1, got 2.5"),
        (True, TypeError, ">= 1, got True"),
        (None, TypeError, ">= 1, got None"),
        ("3", TypeError, ">= 1, got '3'"),
    ],
)
def test_every_that_is_not_a_positive_integer_is_refused(word, every, error, message):
    options = {"fragments": 1} if word == "streaming_diloco" else {}
    with pytest.raises(error, match=rf"`every` of `jdist\.sync\.{word}` must be an integer .*{re.escape(message)}"):
        getattr(sync, word)(optax.sgd(0.1), every=every, **options)


@pytest.mark.parametrize("name", TRACED)
def test_update_without_parameters_is_refused(two, name):
    tx = TRACED[name]()
    word = name.partition("_int8")[0].partition("_clipped")[0]
    with pytest.raises(ValueError, match=rf"`jdist\.sync\.{word}` needs the parameters in each update"):
        two.run(lambda: tx.update(tree_of(START), tx.init(tree_of(START))))


SIMPLE_OPTIMIZERS = {"sgd": lambda: optax.sgd(0.1), "adam": lambda: optax.adam(0.1)}


@pytest.mark.parametrize("name", SIMPLE_OPTIMIZERS)
@pytest.mark.parametrize(
    "make, message",
    [
        (lambda p, tx: (p, jax.jit(tx.init)(p)), r"0 of its \d+ arrays"),
        (lambda p, tx: (p, tx.init(jax.tree.map(lambda x: x + 0, p))), "0 of its 3 arrays"),
        (lambda p, tx: (p, tx.init({**p, "c": p["c"] + 0})), "2 of its 3 arrays"),
        (lambda p, tx: tx.init(p), "0 of its 3 arrays"),
        (
            lambda p, tx: (p, jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), jax.eval_shape(tx.init, p))),
            r"0 of its \d+ arrays",
        ),
        (lambda p, tx: (p, optax.flatten(tx).init(p)), r"0 of its \d+ arrays"),
        (lambda p, tx: (p, tx.init(p), tree_of(-START), tx.init(tree_of(-START))), "0 of its 3 arrays"),
    ],
    ids=["jit", "copied", "one_copied", "not_there", "eval_shape", "flatten", "second_model"],
)
def test_parameters_that_are_not_found_in_the_state_are_refused(two, name, make, message):
    tx = sync.local_sgd(SIMPLE_OPTIMIZERS[name](), every=2)
    with pytest.raises(ValueError, match=rf"`jdist\.sync\.local_sgd` stores .*{message} are in the state"):
        two.init(lambda: make(tree_of(START), tx))


def test_state_is_placed_after_an_abstract_evaluation_of_init(two):
    tx = sync.local_sgd(optax.adam(0.1), every=2)

    def make():
        params = tree_of(START)
        jax.eval_shape(tx.init, params)
        return params, tx.init(params)

    assert kinds(two.init(make)[0]) == LOCAL_KINDS


def test_parameters_that_are_python_numbers_are_refused(two):
    tx = sync.local_sgd(optax.sgd(0.1), every=2)
    with pytest.raises(TypeError, match=r"params\['b'\] is 1\.5, not an array.*jnp\.asarray"):
        two.init(lambda: (params := {"a": jnp.zeros(2), "b": 1.5}, tx.init(params)))


@pytest.mark.parametrize(
    "policy, optimizer, message",
    [
        *(
            (name, optax.apply_if_finite(optax.sgd(0.1), 3), r"cannot place.*its state\.notfinite_count is int32\[\]")
            for name in MADE
        ),
        # `value` is the loss, which `init` does not have.
        ("local_sgd", optax.chain(optax.sgd(0.1), optax.contrib.reduce_on_plateau()), "value"),
        ("local_sgd", optax.chain(optax.sgd(0.1), optax.lbfgs()), "value"),
    ],
    ids=[*(f"integers_in_{name}" for name in MADE), "plateau", "lbfgs"],
)
def test_optimizer_with_integers_from_gradients_or_further_arguments_is_refused(two, policy, optimizer, message):
    with pytest.raises(TypeError, match=rf"`jdist\.sync\.{policy}`.*{message}"):
        make_state(two, MADE[policy](optimizer))


def test_state_made_without_init_is_refused_by_the_proof(two):
    tx = sync.local_sgd(optax.sgd(0.1), every=2)
    state = two.put((params := tree_of(START), tx.init(params)))
    with pytest.raises(jdist.NotMirroredError, match=r"state\[0\]\['a'\] is not proved to be replicated"):
        make_step(two, tx)(state, two.put(jdist.PerReplica(next(batches(1, 2)))))


def test_state_made_on_the_host_within_a_scope_is_replicated(two):
    with two.scope():
        state = sync.local_sgd(optax.adam(0.1), every=2).init({"w": jnp.zeros(2)})
    assert set(kinds(state)) == {None}
