"""Memory per TPU core under `CentralStorageStrategy`, from programs compiled for topology devices."""

import functools
import importlib.util

import jax
import jax.numpy as jnp
import optax
import pytest

import jdist

ADAMW = optax.adamw(1e-2)
WIDTH, LAYERS = 8192, 20
ONE = WIDTH * WIDTH * 4  # the bytes of a layer


def deep_step(state, x):
    def loss(params):
        return jnp.mean(functools.reduce(lambda h, w: jnp.tanh(h @ w), params, x) ** 2)

    value, grads = jdist.all_reduce("mean", jax.value_and_grad(loss)(state["params"]))
    updates, opt_state = ADAMW.update(grads, state["opt_state"], state["params"])
    return {"params": optax.apply_updates(state["params"], updates), "opt_state": opt_state}, value


@functools.cache
def chip_memory(offload, n):
    if importlib.util.find_spec("libtpu") is None:
        pytest.skip("memory is not checked: libtpu, the TPU's compiler, is not installed (pip install jdist[plan])")
    devices = jdist.topology_devices("v5e:2x4")[:n]
    strategy = jdist.CentralStorageStrategy(devices, offload=offload) if offload else jdist.MirroredStrategy(devices)

    def make():
        params = [jnp.ones((WIDTH, WIDTH))] * LAYERS
        return {"params": params, "opt_state": ADAMW.init(params)}

    batch = jdist.PerReplica(jax.ShapeDtypeStruct((n, 32, WIDTH), jnp.float32))
    return strategy.compile(deep_step, jax.eval_shape(lambda: strategy.init(make)), batch).memory_analysis()


def used(figures):
    return (figures.argument_size_in_bytes + figures.temp_size_in_bytes) / ONE


@pytest.mark.slow
@pytest.mark.parametrize(
    "offload, n",
    [
        ("optimizer", 4),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in (("optimizer", 1), ("all", 1), ("all", 4))),
    ],
)
def test_memory_of_a_core_decreases_by_the_offloaded_leaves(offload, n):
    full, part = chip_memory(None, n), chip_memory(offload, n)
    count = 3 * LAYERS if offload == "all" else 2 * LAYERS
    assert part.host_argument_size_in_bytes / ONE == pytest.approx(count / n, rel=0.01)
    assert part.host_alias_size_in_bytes == pytest.approx(part.host_argument_size_in_bytes, rel=0.01)
    assert part.argument_size_in_bytes / ONE == pytest.approx(3 * LAYERS - count, abs=0.1)
    # During the step the parameters are on the core.
    offloaded = 2 * LAYERS
    assert used(full) - used(part) >= 0.8 * offloaded


SMALL = {"vector": (128,), "odd": (7,), "table": (30, 64), "wide": (256, 512), "cube": (2, 3, 4)}


@pytest.mark.parametrize("offload", ["all", "optimizer"])
def test_step_with_small_and_odd_leaves_compiles(offload):
    if importlib.util.find_spec("libtpu") is None:
        pytest.skip("programs are not compiled: libtpu, the TPU's compiler, is not installed (pip install jdist[plan])")
    strategy = jdist.CentralStorageStrategy(jdist.topology_devices("v5e:2x4")[:2], offload=offload)

    def make():
        params = {name: jnp.ones(shape) for name, shape in SMALL.items()}
        return {"params": params, "opt_state": ADAMW.init(params)}

    def step(state, x):
        grads = jax.grad(lambda p: sum(jnp.sum(jnp.sin(leaf * x)) for leaf in jax.tree.leaves(p)))(state["params"])
        updates, opt_state = ADAMW.update(jdist.all_reduce("mean", grads), state["opt_state"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "opt_state": opt_state}, optax.tree.norm(
            updates
        )

    shapes = jax.eval_shape(lambda: strategy.init(make))
    strategy.compile(step, shapes, jdist.PerReplica(jax.ShapeDtypeStruct((2,), jnp.float32)))
    wide = next(leaf for leaf in strategy.describe(shapes).leaves if leaf.path.endswith("mu/wide"))
    assert wide.placement.startswith("split dim 1 over 'replica' (2 parts), in host memory")
