"""Replica functions under virtual replicas, and the values that the host sees of them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jdist

from laws import each_row

VIRTUAL = 6
ON = {devices: jdist.MirroredStrategy(jax.devices()[:devices], virtual_replicas=VIRTUAL) for devices in (1, 2, 3, 4, 6)}
ONE_PER_DEVICE = jdist.MirroredStrategy(jax.devices()[:VIRTUAL])


def _loop(x):
    def body(carry, t):
        carry = carry + jdist.all_reduce("mean", x * t)
        return carry, (carry.sum(), x[0] * t)

    return lax.scan(body, jnp.zeros(3), jnp.arange(4.0))


def _branches(x):
    total = jdist.all_reduce("sum", x)
    both = lambda: (jdist.all_reduce("max", x), x)
    return lax.cond(total.sum() > 0, both, lambda: (total, 2 * total))


def _nested(x):
    inner = lambda y: jdist.all_reduce("mean", y) + jax.jit(jnp.tanh)(y)
    return jax.jit(inner)(x), jax.checkpoint(inner)(x)


def _loop_of_both(x):
    """Returns a loop without collectives; one part of its carry is replicated, the other varies."""
    return lax.scan(lambda carry, _: ((carry[0] + 1, carry[1] * x), None), (jnp.zeros(2), x), None, length=3)[0]


def _looped_while(x):
    """A loop with a reduction: one part of the carry is replicated from the start, one after one iteration, one never."""

    def body(carry):
        number, total, value = carry
        return number + 1, jdist.all_reduce("mean", total * value), value + x

    return lax.while_loop(lambda carry: carry[0] + jdist.all_reduce("max", carry[2])[0] < 40, body, (0, x, x))


def _solved(x):
    """Conjugate gradients of a sum of products that vary between replicas."""
    matrix = lambda v: jdist.all_reduce("mean", v + x * jnp.vdot(x, v))
    return jax.scipy.sparse.linalg.cg(matrix, jdist.all_reduce("mean", jnp.sin(x)), maxiter=3)[0]


@jax.custom_batching.custom_vmap
def _summed(x):
    return jdist.all_reduce("sum", x)


_summed.def_vmap(lambda size, batched, x: (jdist.all_reduce("sum", x), batched[0]))


def _index_in_a_loop(x):
    body = lambda carry: (carry[0] + 1, carry[1] + jdist.replica_id())
    return lax.while_loop(lambda carry: carry[0] < jdist.replica_id(), body, (0, x))


def _index_in_branches(x):
    """Branches that are chosen per replica and use the replica index; one of the results is replicated."""
    return lax.cond(x[0] > 1, lambda: (x[1] * jdist.replica_id(), 1), lambda: (x[1], 1)), jax.jit(jdist.replica_id)()


FUNCTIONS = {
    "sum": lambda x: jdist.all_reduce("sum", x),
    "mean": lambda x: jdist.all_reduce("mean", {"a": x, "b": [x[:1]]}),
    "max": lambda x: jdist.all_reduce("max", x),
    "min": lambda x: jdist.all_reduce("min", x),
    "integers": lambda x: jdist.all_reduce("sum", (x * 10).astype(jnp.int32)),
    "bfloat16": lambda x: jdist.all_reduce("sum", x.astype(jnp.bfloat16)),
    "empty": lambda x: jdist.all_reduce("sum", x[:0]),
    "of_a_constant": lambda x: jdist.all_reduce("sum", np.ones(2)),
    "gather": lambda x: jdist.all_gather(jnp.stack([x, x]), 1),
    "broadcast": lambda x: jdist.broadcast((x, x > 0)),
    "id": lambda x: (jdist.replica_id(), jdist.num_replicas()),
    "mean_of_losses": lambda x: jdist.global_mean(x**2, jnp.abs(x)),
    "key": lambda x: jax.random.uniform(jdist.replica_key(jax.random.key(3)), (2,)),
    "gradient_of_a_reduction": jax.grad(lambda x: jnp.sum(jdist.all_reduce("mean", x) ** 2 * x)),
    "merge_call": lambda x: jdist.get_replica_context().merge_call(lambda s, v: s.reduce("sum", v, axis=0), (x,)),
    "scan": _loop,
    "cond": _branches,
    "nested": _nested,
    "loop_of_both": _loop_of_both,
    "no_collective": lambda x: (x + 1, jnp.zeros(2)),
    "barrier": lambda x: lax.optimization_barrier((jdist.all_reduce("mean", x), x, x.sum())),
    "while_loop": _looped_while,
    "gradient_of_a_gather": jax.grad(lambda x: jnp.sum(jdist.all_gather(x, 0) ** 3)),
    "gradient_of_a_stack": jax.grad(lambda x: jnp.sum(lax.all_gather(x, "replica", axis=1) ** 3)),
    "scattered_sum": lambda x: lax.psum_scatter(jnp.arange(12.0)[:, None] * x, "replica", tiled=True),
    "conjugate_gradients": _solved,
    "custom_vmap": lambda x: (_summed(x), jax.vmap(_summed)(x)),
    "index_in_a_loop": _index_in_a_loop,
    "index_in_branches": _index_in_branches,
}


def sums(strategy, result):
    return [np.asarray(strategy.reduce("sum", leaf, axis=None)) for leaf in jax.tree.leaves(result)]


def argument(strategy):
    def value(context):
        return np.float32([context.replica_id_in_sync_group, 0.1 * context.replica_id_in_sync_group, 0.7])

    return strategy.distribute_values_from_function(value)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_results_are_those_of_one_replica_per_device(name):
    fn, strategy = FUNCTIONS[name], ON[4]
    expected, results = (s.run(fn, (argument(s),)) for s in (ONE_PER_DEVICE, strategy))
    assert jax.tree.structure(results) == jax.tree.structure(expected)
    # Not bitwise equal: XLA adds in another order.
    for a, b in zip(jax.tree.leaves(results), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(np.float32(a), np.float32(b), rtol=1e-5)


# All replicas on one device, unequal numbers of them, and one per device.
FEW, UNEQUAL, MOST = ON[1], ON[4], ON[6]


@pytest.mark.slow
@pytest.mark.parametrize("name", FUNCTIONS)
def test_results_are_bitwise_equal_on_any_number_of_devices(name):
    fn = FUNCTIONS[name]
    results = [s.run(fn, (argument(s),)) for s in (FEW, UNEQUAL, MOST)]
    bits = {tuple(np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(result)) for result in results}
    assert len(bits) == 1


@pytest.mark.parametrize("devices", ON)
def test_host_sees_every_virtual_replica(devices):
    strategy = ON[devices]
    assert strategy.num_replicas_in_sync == VIRTUAL
    x = argument(strategy)
    assert [float(row[0]) for row in x.values] == [0, 1, 2, 3, 4, 5]
    ids = strategy.run(jdist.replica_id)
    assert [int(i) for i in strategy.local_results(ids)] == [0, 1, 2, 3, 4, 5]
    assert [float(i) for i in strategy.local_results(strategy.put(2.0))] == [2.0] * VIRTUAL
    assert int(strategy.reduce("sum", ids, axis=None)) == 15
    assert float(strategy.reduce("sum", strategy.put(2.0), axis=None)) == 2.0 * VIRTUAL
    assert strategy.gather(x, axis=0).shape == (3 * VIRTUAL,)
    (batch,) = strategy.distribute_dataset(np.arange(12), batch_size=12)
    assert [row.tolist() for row in batch.values] == np.arange(12).reshape(VIRTUAL, 2).tolist()


@pytest.mark.slow
@pytest.mark.parametrize("strategy", [FEW, UNEQUAL, MOST], ids=["1", "4", "6"])
def test_step_updates_a_state_with_every_wrapper(strategy):
    def make():
        index = jdist.replica_id()
        return {
            "w": jnp.zeros(2),
            "mirrored": jdist.Mirrored(jnp.float32(1), "mean"),
            "seen": jdist.SyncOnRead(1.0 * index, "sum"),
            "own": jdist.PerReplica(jax.random.fold_in(jax.random.key(0), index)),
            "table": jdist.Sharded(jnp.arange(2) + 10 * index),
        }

    @strategy.step
    def step(state):
        index = jdist.replica_id()
        return {
            **state,
            "mirrored": state["mirrored"] + index,
            "seen": state["seen"] + 1,
            "table": state["table"] + 1,
        }, index

    state, ids = step(strategy.init(make))
    assert state["w"].tolist() == [0, 0]
    assert float(state["mirrored"].read()) == 3.5
    assert float(state["seen"].read()) == 21
    assert state["table"].read().tolist() == [i + 1 + 10 * j for j in range(VIRTUAL) for i in range(2)]
    assert len({jax.random.key_data(key).tobytes() for key in state["own"].values}) == VIRTUAL
    assert [int(i) for i in ids.values] == [0, 1, 2, 3, 4, 5]


def test_state_continues_with_another_number_of_virtual_replicas():
    state = ON[2].init(lambda: {"seen": jdist.SyncOnRead(1.0 * jdist.replica_id(), "sum"), "w": jnp.ones(2)})
    other = jdist.MirroredStrategy(jax.devices()[:2], virtual_replicas=4)
    moved = other.put(state)
    assert [float(x) for x in moved["seen"].values] == [3.75] * 4


@each_row(
    "communicate",
    [
        lambda x: lax.ppermute(x, "replica", [(0, 1)]),
        lambda x: jdist.sync.int8(block_size=1).update({"w": x}, jdist.sync.int8(block_size=1).init({"w": x}))[0],
    ],
    ids=["ppermute", "int8"],
)
def test_collective_without_a_fixed_order_raises_with_its_line(communicate):
    with pytest.raises(ValueError, match=r"(ppermute|all_to_all) at .*py:\d+ is not supported with virtual"):
        ON[2].run(communicate, (argument(ON[2]),))


def test_exact_without_virtual_replicas_raises_with_the_fix():
    tx = jdist.sync.exact()
    with pytest.raises(
        ValueError, match=r"this strategy does not have virtual replicas\. Pass their number: .*virtual_replicas=6"
    ):
        ONE_PER_DEVICE.run(lambda x: tx.update(x, tx.init(x))[0], (argument(ONE_PER_DEVICE),))
    assert float(tx.update(jnp.float32(3), tx.init(None))[0]) == 3  # outside any strategy there is one replica


def test_cross_device_ops_are_refused_with_virtual_replicas():
    with pytest.raises(
        ValueError, match=r"one fixed tree, so `cross_device_ops=ReductionToOneDevice\(\)` has no effect"
    ):
        jdist.MirroredStrategy(
            jax.devices()[:2], cross_device_ops=jdist.ReductionToOneDevice(), virtual_replicas=VIRTUAL
        )


def test_varying_state_is_refused_with_virtual_replicas():
    step = ON[2].step(lambda state, x: (state + x.sum(), None))
    with pytest.raises(jdist.NotMirroredError, match=r"state is not proved to be replicated"):
        step(ON[2].put(np.float32(0)), argument(ON[2]))
