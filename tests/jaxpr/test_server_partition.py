"""The cut of a step for parameter servers: which equations the servers run, and which leaves are stored together."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jdist._src.core import jax_compat
from jdist._src.jaxpr import update_partition
from jdist._src.jaxpr.replication import Input
from jdist._src.jaxpr.server_partition import split_for_servers

AXIS = "replica"


def cut(step, state, batch, per_replica=()):
    """Returns the partition of `step(state leaves, batch)`, whose state leaves with numbers in `per_replica` vary."""
    leaves, treedef = jax.tree.flatten(state)
    flat_step = lambda *args: jax.tree.leaves(step(treedef.unflatten(args[:-1]), args[-1]))
    program = jax.make_jaxpr(flat_step, axis_env=[(AXIS, 1)])(*leaves, batch)
    jaxpr = jax_compat.consts_as_inputs(update_partition.inline_calls(program, [(AXIS, 1)]))
    names = jaxpr.invars[-len(leaves) - 1 :]
    varying = [*(number in per_replica for number in range(len(leaves))), True]
    constants = jaxpr.invars[: -len(leaves) - 1]
    inputs = [Input("", ()) for _ in constants] + [Input("", (AXIS,) if varies else ()) for varies in varying]
    return split_for_servers(jaxpr, inputs, (AXIS,), names[:-1], constants)


def primitives(part):
    return {equation.primitive.name for equation in part.program.eqns}


def shapes(variables):
    return sorted(jax_compat.shape_of(var) for var in variables)


def mean(tree):
    return jax.lax.pmean(tree, AXIS)


def adam_step(state, x):
    params, opt_state = state
    grads = jax.grad(lambda p: jnp.mean(jnp.tanh(x @ p["w"] + p["b"]) ** 2))(params)
    updates, opt_state = optax.adam(0.1).update(mean(grads), opt_state, params)
    return optax.apply_updates(params, updates), opt_state


PARAMS = {"b": np.zeros(3, np.float32), "w": np.ones((2, 3), np.float32)}
BATCH = np.ones((4, 2), np.float32)


def test_adam_runs_on_servers_and_only_gradients_are_sent():
    partition = cut(adam_step, (PARAMS, optax.adam(0.1).init(PARAMS)), BATCH)
    assert shapes(partition.sent) == [(2, 3), (3,)]
    assert partition.overwritten == ()
    assert "dot_general" in primitives(partition.worker)
    assert all("dot_general" not in primitives(group.part) for group in partition.groups)


def test_parameter_and_its_moments_are_one_group():
    state = PARAMS, optax.adam(0.1).init(PARAMS)
    names = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(state)]
    partition = cut(adam_step, state, BATCH)
    groups = [{names[number].rpartition("[")[2] for number in group.leaves} for group in partition.groups]
    assert groups == [{"'b']"}, {"'w']"}] and [len(group.leaves) for group in partition.groups] == [3, 3]
    assert all(group.is_elementwise for group in partition.groups)
    assert [names[number] for number in partition.scalars.leaves] == ["[1][0].count"]


def test_norm_over_all_parameters_joins_them_to_one_group():
    def step(params, x):
        grads = mean(jax.grad(lambda p: jnp.mean((x @ p["w"] + p["b"]) ** 2))(params))
        norm = optax.tree_utils.tree_norm(params)
        return jax.tree.map(lambda p, g: p - g / norm, params, grads)

    (group,) = cut(step, PARAMS, BATCH).groups
    assert group.leaves == (0, 1) and not group.is_elementwise


def test_norm_of_gradients_is_computed_by_the_worker():
    def step(params, x):
        grads = mean(jax.grad(lambda p: jnp.mean((x @ p["w"] + p["b"]) ** 2))(params))
        norm = optax.tree_utils.tree_norm(grads)
        return jax.tree.map(lambda p, g: p - g / norm, params, grads)

    partition = cut(step, PARAMS, BATCH)
    assert len(partition.groups) == 2 and all(group.is_elementwise for group in partition.groups)
    assert "reduce_sum" in primitives(partition.worker)


def test_key_is_split_on_both_sides():
    def step(state, x):
        key, part = jax.random.split(state["key"])
        noise = jax.random.normal(part, (2, 3))
        grad = mean(jax.grad(lambda w: jnp.mean((x @ (w + noise)) ** 2))(state["w"]))
        return {"key": key, "w": state["w"] - grad}

    partition = cut(step, {"key": jax.random.key(0), "w": PARAMS["w"]}, BATCH)
    assert partition.overwritten == () and shapes(partition.sent) == [(2, 3)]
    key_group = next(group for group in partition.groups if group.leaves == (0,))
    assert primitives(key_group.part) & primitives(partition.worker)


def test_sum_of_a_metric_is_added_on_servers():
    def step(state, x):
        return {"count": state["count"] + x.sum()}

    partition = cut(step, {"count": np.float32(0)}, BATCH, per_replica=[0])
    assert partition.overwritten == () and shapes(partition.sent) == [()]


def test_value_that_the_model_computes_from_its_old_value_is_dependent():
    def step(state, x):
        return {"carry": jnp.tanh(state["carry"] @ x)}

    partition = cut(step, {"carry": np.ones((2, 4), np.float32)}, BATCH, per_replica=[0])
    assert partition.overwritten == partition.dependent == (0,)


def test_average_behind_a_collective_is_overwritten():
    def step(state, x):
        return {"mean": mean(0.9 * state["mean"] + 0.1 * x.mean(0))}

    partition = cut(step, {"mean": np.zeros(2, np.float32)}, BATCH)
    assert partition.overwritten == (0,)


def test_unchanged_leaf_is_a_group_without_equations():
    partition = cut(lambda state, x: state, {"w": PARAMS["w"]}, BATCH)
    assert [group.leaves for group in partition.groups] == [(0,)]
    assert not partition.groups[0].part.program.eqns and not partition.sent and not partition.overwritten


def test_copy_of_another_leaf_joins_its_group():
    def step(state, x):
        grad = mean(jax.grad(lambda w: jnp.mean((x @ w) ** 2))(state["w"]))
        return {"previous": state["w"], "w": state["w"] - grad}

    partition = cut(step, {"previous": PARAMS["w"], "w": PARAMS["w"]}, BATCH)
    assert [group.leaves for group in partition.groups] == [(0, 1)] and not partition.overwritten


def test_host_callback_stays_on_the_worker():
    def step(state, x):
        jax.debug.callback(lambda value: None, x.sum())
        return {"w": state["w"] + mean(x.sum())}

    partition = cut(step, {"w": np.zeros(3, np.float32)}, BATCH)
    assert "debug_callback" in primitives(partition.worker)


@pytest.mark.parametrize(
    "rule", ["sgd", "momentum", "adam", "adamw", "adagrad", "rmsprop", "lion", "nadam", "adamax", "yogi"]
)
def test_optimizer_is_elementwise(rule):
    optimizer = {"momentum": optax.sgd(0.1, 0.9)}.get(rule) or getattr(optax, rule)(0.1)

    def step(state, x):
        params, opt_state = state
        grads = mean(jax.grad(lambda p: jnp.mean((x @ p["w"] + p["b"]) ** 2))(params))
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    partition = cut(step, (PARAMS, optimizer.init(PARAMS)), BATCH)
    assert shapes(partition.sent) == [(2, 3), (3,)]
    assert len(partition.groups) == 2 and all(group.is_elementwise for group in partition.groups)
