"""Gradients that are clipped before they are reduced: one warning, on the line of the update."""

import inspect
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jdist
from jdist import ClippedPerReplicaWarning, sync
from jdist._src.jaxpr import replication

from laws import each_row, each_value

CLIPS = {
    "clip_by_global_norm": lambda: optax.clip_by_global_norm(1.0),
    "clip": lambda: optax.clip(0.5),
    "adaptive_grad_clip": lambda: optax.adaptive_grad_clip(0.1),
    "clip_by_block_rms": lambda: optax.clip_by_block_rms(1.0),
}
POLICIES = {
    "mean": sync.mean,
    "sum": sync.sum,
    "in_dtype": lambda: sync.in_dtype(jnp.bfloat16),
    "int8": lambda: sync.int8(block_size=4),
    "int8_of_small_leaves": sync.int8,
    "top_k": lambda: sync.top_k(0.5),
    "power_sgd": lambda: sync.power_sgd(1),
    "every": lambda: sync.every(sync.mean(), 2),
    "skip_nonfinite": lambda: sync.skip_nonfinite(sync.mean()),
    "dynamic_loss_scale": lambda: sync.dynamic_loss_scale(sync.mean()),
}


@pytest.fixture(autouse=True)
def no_warnings_yet(monkeypatch):
    monkeypatch.setattr(replication, "_warned", {})


def warned(strategy, tx, calls=1):
    """Returns the warnings of tracing `calls` steps with `tx`, and the line of this file that calls `tx.update`."""
    params = {"w": jnp.ones((8, 4)), "b": jnp.ones(4)}
    state = strategy.init(lambda: (copied := jax.tree.map(jnp.copy, params), tx.init(copied)))
    lines = []

    def step(state, x):
        params, opt_state = state
        grads = jax.grad(lambda p: jnp.mean((x @ p["w"] + p["b"]) ** 2))(params)
        lines[:] = [inspect.currentframe().f_lineno + 1]
        updates, opt_state = tx.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), None

    x = strategy.put(jdist.PerReplica(np.ones((strategy.num_replicas_in_sync, 2, 8), np.float32)))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        for _ in range(calls):
            strategy.step(lambda state, x: step(state, x)).lower(state, x)
    others = jdist.RetraceWarning, jdist.NotEquivalentWarning  # local steps are clipped before they are averaged
    return [each for each in caught if each.category not in others], lines[0]


@each_row("policy", POLICIES)
@each_row("clip", ["clip_by_global_norm", "clip", "adaptive_grad_clip"])
def test_clipping_before_a_policy_warns_on_the_users_line(two, clip, policy):
    caught, line = warned(two, optax.chain(CLIPS[clip](), POLICIES[policy](), optax.sgd(0.1)))
    assert [(w.category, w.filename, w.lineno) for w in caught] == [(ClippedPerReplicaWarning, __file__, line)]
    assert "each replica clips its own" in str(caught[0].message)
    assert "`optax.chain(jdist.sync.mean(), optax.clip_by_global_norm(1.0), ...)`" in str(caught[0].message)


def test_clipping_before_a_hierarchy_warns():
    ops = jdist.HierarchicalAllReduce(group_size=2)
    strategy = jdist.MirroredStrategy([f"cpu:{i}" for i in range(4)], cross_device_ops=ops)
    tx = optax.chain(optax.clip_by_global_norm(1.0), sync.hierarchical("replica", "group"))
    assert len(warned(strategy, tx)[0]) == 1


@each_row(
    "tx",
    [
        lambda: sync.every(optax.chain(optax.clip(1.0), sync.mean()), 2),
        lambda: sync.skip_nonfinite(optax.chain(optax.clip_by_global_norm(1.0), sync.mean(), optax.adam(0.1))),
        lambda: optax.chain(optax.clip_by_global_norm(1.0), optax.scale(0.5), sync.mean()),
        lambda: optax.chain(optax.clip_by_global_norm(1.0), optax.chain(optax.identity(), sync.mean())),
        lambda: optax.chain(optax.masked(optax.clip(1.0), {"w": True, "b": False}), sync.mean()),
        lambda: optax.inject_hyperparams(lambda bound: optax.chain(optax.clip(bound), sync.mean()))(bound=1.0),
        lambda: sync.diloco(
            optax.sgd(0.1), every=2, reduction=optax.chain(optax.clip_by_global_norm(1.0), sync.mean())
        ),
    ],
    ids=["in_every", "in_skip", "scale_between", "chain_in_chain", "masked", "injected", "reduction_of_diloco"],
)
def test_clipping_inside_other_transformations_warns(two, tx):
    assert [w.category for w in warned(two, tx())[0]] == [ClippedPerReplicaWarning]


@pytest.mark.parametrize("clip", CLIPS)
@pytest.mark.parametrize("policy", ["mean", "int8", "top_k", "every"])
def test_clipping_after_a_policy_does_not_warn(two, clip, policy):
    assert warned(two, optax.chain(POLICIES[policy](), CLIPS[clip](), optax.sgd(0.1)))[0] == []


LOCAL_POLICIES = {
    "local_sgd_2": lambda inner: sync.local_sgd(inner, every=2),
    "local_sgd_1": lambda inner: sync.local_sgd(inner, every=1),
    "diloco_2": lambda inner: sync.diloco(inner, every=2),
    "diloco_1": lambda inner: sync.diloco(inner, every=1),
    "diloco_int8": lambda inner: sync.diloco(inner, every=2, reduction=sync.int8(block_size=4)),
    "streaming_2": lambda inner: sync.streaming_diloco(inner, every=2, fragments=2),
    "streaming_1": lambda inner: sync.streaming_diloco(inner, every=1, fragments=1, overlap=0),
}


@pytest.mark.parametrize("name, clip", each_value([(name, clip) for name in LOCAL_POLICIES for clip in CLIPS]))
def test_clipping_in_local_steps_does_not_warn(two, name, clip):
    policy, clipped = LOCAL_POLICIES[name], CLIPS[clip]()
    assert warned(two, policy(optax.chain(clipped, optax.sgd(0.1))))[0] == []
    assert warned(two, policy(optax.chain(optax.sgd(0.1), clipped)))[0] == []


@pytest.mark.parametrize(
    "first", [optax.scale(2.0), optax.add_decayed_weights(0.1), optax.identity(), optax.centralize()]
)
def test_other_transformations_before_a_policy_do_not_warn(two, first):
    assert warned(two, optax.chain(first, sync.mean(), optax.sgd(0.1)))[0] == []


def test_clipping_of_reduced_gradients_does_not_warn(two):
    assert warned(two, optax.chain(sync.mean(), optax.clip(1.0), optax.scale(1.0), optax.adam(0.1)))[0] == []


def test_clipped_loss_does_not_warn(two):
    """Uses `jnp.clip` in the model, and a function of the user with the name `clip`."""

    def clip(x):
        return jnp.clip(x, -1, 1)

    tx = optax.chain(sync.mean(), optax.sgd(0.1))
    state = two.init(lambda: (w := jnp.float32(1), tx.init(w)))

    @two.step
    def step(state, x):
        w, opt_state = state
        grad = clip(jax.grad(lambda w: clip(w * x))(w))
        updates, opt_state = tx.update(grad, opt_state, w)
        return (w + updates, opt_state), None

    step(state, two.put(jdist.PerReplica(np.float32([1, 2]))))  # a warning would be an error


def test_line_that_is_traced_several_times_warns_once(two):
    tx = optax.chain(optax.clip_by_global_norm(1.0), sync.mean(), optax.sgd(0.1))
    assert len(warned(two, tx, calls=3)[0]) == 1


def test_two_leaves_and_several_transformations_warn_once(two):
    tx = optax.chain(optax.clip(1.0), optax.clip_by_global_norm(1.0), sync.mean(), sync.mean())
    assert len(warned(two, tx)[0]) == 1


def test_warning_can_be_made_an_error(two):
    tx = optax.chain(optax.clip_by_global_norm(1.0), sync.mean())
    with warnings.catch_warnings():
        warnings.simplefilter("error", ClippedPerReplicaWarning)
        state = two.init(lambda: (w := jnp.ones(3), tx.init(w)))

        @two.step
        def step(state, x):
            w, opt_state = state
            updates, opt_state = tx.update(w * x, opt_state, w)
            return (w + updates, opt_state), None

        with pytest.raises(ClippedPerReplicaWarning, match="Put the policy first"):
            step(state, two.put(jdist.PerReplica(np.float32([1, 2]))))
