"""An annotated model trains under every strategy, with the numbers of one device without annotations."""

import contextlib
import functools
import re
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import jdist
from jdist import testing

from laws import each_row

P = PartitionSpec
X = np.random.default_rng(0).normal(size=(8, 4)).astype(np.float32)


def mesh_of(**shape):
    sizes = tuple(shape.values())
    return Mesh(np.array(jax.devices()[: np.prod(sizes)]).reshape(sizes), tuple(shape))


def data_model(shard="all"):
    return jdist.ShardedStrategy(shard, mesh=mesh_of(data=2, model=2), model_axis="model")


# With these the model's axes exist.
WITH_AXES = {"sharded_2x2": data_model, "sharded_2x2_zero1": lambda: data_model("optimizer")}
WITHOUT_AXES = {
    "one_device": lambda: testing.strategy("one_device"),
    "mirrored_2": lambda: testing.strategy("mirrored_2"),
    "mirrored_axis_name": lambda: jdist.MirroredStrategy(["cpu:0", "cpu:1"], axis_name="data"),
    "multi_worker": lambda: jdist.MultiWorkerMirroredStrategy(),
    "central_2": lambda: testing.strategy("central_2"),
    "virtual": lambda: jdist.MirroredStrategy(["cpu:0", "cpu:1"], virtual_replicas=4),
    "debug": lambda: testing.DebugStrategy(2),
    "sharded_other_axis": lambda: jdist.ShardedStrategy(mesh=mesh_of(fsdp=2)),
}
STRATEGIES = {**WITH_AXES, **WITHOUT_AXES}
OTHER_MESH = lambda: mesh_of(data=1, model=8)


class Model(NamedTuple):
    make: Any  # () -> a tree of parameters
    loss: Any  # (parameters, x) -> mean loss


def loss_of(y):
    return jnp.mean((y - 1) ** 2)


KERNELS = [
    np.random.default_rng(i).normal(size=shape).astype(np.float32) / 2 for i, shape in enumerate([(4, 8), (8, 4)])
]
kernel_init = lambda i: lambda key, shape, dtype=jnp.float32: jnp.asarray(KERNELS[i], dtype)


def linen(annotate, names, constrain=lambda x, names: x, rules=()):
    class MLP(nn.Module):
        @nn.compact
        def __call__(self, x):
            h = nn.Dense(8, use_bias=False, kernel_init=annotate(kernel_init(0), names), name="first")(x)
            h = constrain(nn.tanh(h), (None, names[1]))
            return nn.Dense(4, use_bias=False, kernel_init=annotate(kernel_init(1), names[::-1]), name="second")(h)

    def with_rules(fn):
        @functools.wraps(fn)
        def call(*args):
            with nn.logical_axis_rules(rules):
                return fn(*args)

        return call

    make = with_rules(lambda: MLP().init(jax.random.key(0), jnp.zeros((1, 4))))
    return Model(make, with_rules(lambda variables, x: loss_of(MLP().apply(variables, x))))


class NNX(nnx.Module):
    def __init__(self):
        self.first = nnx.Param(jnp.asarray(KERNELS[0]), out_sharding=(None, "model"))
        self.second = nnx.Param(jnp.asarray(KERNELS[1]), out_sharding=("model", None))

    def __call__(self, x):
        return jnp.tanh(x @ self.first[...]) @ self.second[...]


def params():
    return {"first": jnp.asarray(KERNELS[0]), "second": jnp.asarray(KERNELS[1])}


def plain(constrain=lambda x, *names: x, transform=lambda fn: fn):
    def loss(params, x):
        layer = transform(lambda x: jnp.tanh(constrain(x @ constrain(params["first"], None, "model"), "data", "model")))
        return loss_of(layer(x) @ params["second"])

    return Model(params, loss)


by_spec = lambda x, *names: lax.with_sharding_constraint(x, P(*names))
by_sharding = lambda x, *names: lax.with_sharding_constraint(x, NamedSharding(OTHER_MESH(), P(*names)))


def scanned(fn):
    return lambda x: lax.scan(lambda carry, _: (carry, fn(x)), 0.0, None, length=2)[1][1]


def branch(fn):
    return lambda x: lax.cond(jnp.all(x < 100), fn, lambda x: 2 * fn(x), x)


# Annotations of flax may name axes that the mesh of a `ShardedStrategy` lacks.
METADATA = {
    "linen_partitioning": lambda: linen(nn.with_partitioning, (None, "model")),
    "linen_logical": lambda: linen(
        nn.with_logical_partitioning,
        ("embed", "mlp"),
        nn.with_logical_constraint,
        [("embed", "data"), ("mlp", "model")],
    ),
    "nnx": lambda: Model(NNX, lambda model, x: loss_of(model(x))),
}
RAW = {
    "spec": lambda: plain(by_spec),
    "spec_jit": lambda: plain(by_spec, jax.jit),
    "spec_remat": lambda: plain(by_spec, jax.checkpoint),
    "spec_scan": lambda: plain(by_spec, scanned),
    "spec_cond": lambda: plain(by_spec, branch),
    "spec_vmap": lambda: plain(lambda x, *names: by_spec(x, names[-1]) if x.ndim == 1 else x, jax.vmap),
}


def step_of(model):
    def step(state, x):
        loss, grads = jax.value_and_grad(model.loss)(state, x)
        loss, grads = jdist.all_reduce("mean", (loss, grads))
        return jax.tree.map(lambda p, g: p - 0.5 * g, state, grads), loss

    return step


@functools.cache
def expected():
    """Returns the losses of two steps, and the parameters after them, on one device without annotations."""
    state, step, losses = params(), jax.jit(step_of(plain())), []
    for _ in range(2):
        state, loss = step(state, X)
        losses.append(float(loss))
    return losses, jax.tree.leaves(state)


def assert_equal_to_expected(state, losses):
    np.testing.assert_allclose(losses, expected()[0], rtol=2e-5)
    for leaf, other in zip(jax.tree.leaves(jdist.read_values(state)), expected()[1], strict=True):
        np.testing.assert_allclose(leaf, other, rtol=2e-5, atol=2e-6)


CASES = [
    *[(strategy, model) for strategy in STRATEGIES for model in METADATA],
    *[
        (strategy, model)
        for strategy in STRATEGIES
        if strategy != "sharded_other_axis"
        for model in ("spec", "spec_scan")
    ],
    *[
        (strategy, model)
        for strategy in ("sharded_2x2", "mirrored_2")
        for model in RAW
        if model not in ("spec", "spec_scan")
    ],
]


@pytest.mark.parametrize("name, kind", CASES)
def test_annotated_model_trains_with_the_numbers_of_one_device(name, kind):
    strategy, model = STRATEGIES[name](), {**METADATA, **RAW}[kind]()
    state, step, losses = strategy.init(model.make), strategy.step(step_of(model)), []
    for _ in range(2):
        state, loss = step(state, strategy.split(X))
        losses.append(float(loss))
    assert_equal_to_expected(state, losses)


@pytest.mark.parametrize("kind", [*METADATA, "spec"])
@pytest.mark.parametrize("name", ["sharded_2x2", "one_device", "mirrored_2", "virtual"])
def test_run_and_several_steps_per_call(name, kind):
    strategy, model = STRATEGIES[name](), {**METADATA, **RAW}[kind]()
    state = strategy.init(model.make)
    loss = strategy.run(lambda state, x: jdist.all_reduce("mean", model.loss(state, x)), (state, strategy.split(X)))
    np.testing.assert_allclose(loss, expected()[0][0], rtol=2e-5)
    state, losses = strategy.step(step_of(model), steps_per_call=2)(state, [strategy.split(X)] * 2)
    assert_equal_to_expected(state, losses)


@each_row("name", [name for name in WITHOUT_AXES if name != "sharded_other_axis"])
def test_constraint_by_a_sharding_of_another_mesh_has_no_effect(name):
    strategy, model = STRATEGIES[name](), plain(by_sharding)
    state, loss = strategy.step(step_of(model))(strategy.init(model.make), strategy.split(X))
    np.testing.assert_allclose(loss, expected()[0][0], rtol=2e-5)


@each_row("name", ["replica", "model"])
def test_parameter_server_runs_annotated_steps(name):
    strategy, model = jdist.ParameterServerStrategy(workers=1), plain(lambda x, *names: by_spec(x, name))
    state, loss = strategy.step(step_of(model))(strategy.init(model.make), strategy.split(X))
    np.testing.assert_allclose(np.asarray(loss), expected()[0][0], rtol=2e-5)


def specs_of_constraints(strategy, fn, *args):
    """Returns the constraints in the traced `fn`, and those in the program that the strategy compiles from it."""
    step, traces = strategy.step(lambda state, *args: (state, fn(*args))), []
    step.on_trace.append(lambda traced: traces.append(str(traced.jaxpr)))
    lowered = step.lower(strategy.put(0.0), *args)
    return [line for line in traces[0].splitlines() if "sharding_constraint" in line], lowered


def test_mesh_is_in_the_context_of_a_sharded_step():
    strategy, meshes = data_model(), []

    def note(*args):
        meshes.append(jax.sharding.get_abstract_mesh())
        return (*args,)

    strategy.step(note)(strategy.put(1.0), strategy.split(X))
    strategy.run(note)
    strategy.init(note)
    assert set(meshes) == {strategy.mesh.abstract_mesh}
    assert jax.sharding.get_abstract_mesh().empty


CONSTRAINTS = {
    "spec": lambda x: by_spec(x, "data", "model"),
    "jit": jax.jit(lambda x: by_spec(x, "data", "model")),
    "logical": lambda x: nn.with_logical_constraint(x, ("rows", "mlp"), rules=[("rows", "data"), ("mlp", "model")]),
    "linen": lambda x: nn.Partitioned(x, ("data", "model")).unbox(),
    "nnx": lambda x: nnx.Param(x, out_sharding=("data", "model"))[...],
}


@each_row("constrain", CONSTRAINTS.values(), ids=CONSTRAINTS)
def test_compiled_program_has_the_constraint(constrain):
    """By the jaxpr, by the lowered program, and by the shape of the part that each device computes."""
    strategy = data_model("optimizer")  # which adds no constraint to a reduction
    fn = lambda x: jdist.all_reduce("mean", jnp.tanh(constrain(x * 2)).sum())
    constraints, lowered = specs_of_constraints(strategy, fn, strategy.split(X))
    assert len(constraints) == 1
    assert re.search(r'sharding_constraint.*\{"data"\}, \{"model"\}', lowered.as_text())
    unconstrained = specs_of_constraints(strategy, lambda x: jnp.tanh(x * 2).sum(), strategy.split(X))[1]
    part = re.compile(r"f32\[(1,)?4,2\]")  # of [8, 4] on 2 x 2 devices
    assert part.search(lowered.compile().as_text())
    assert not part.search(unconstrained.compile().as_text())


@each_row("name", [name for name in WITHOUT_AXES if name not in ("sharded_other_axis", "debug")])
def test_program_without_the_axes_has_no_constraint(name):
    strategy = STRATEGIES[name]()
    fn = lambda x: jdist.all_reduce("mean", by_spec(x, "data", "model").sum())
    assert specs_of_constraints(strategy, fn, strategy.split(X))[0] == []


def test_shard_map_without_mesh_in_a_sharded_step():
    strategy = data_model()

    def center(x):
        return x - lax.pmean(x, "data")

    mapped = jax.shard_map(center, in_specs=P("data", "model"), out_specs=P("data", "model"))
    loss = lambda w, x: jnp.sum(mapped(jnp.tanh(w * x)) ** 2)
    looped = lambda w, x: lax.scan(lambda total, _: (total + jax.checkpoint(loss)(w, x), None), 0.0, None, length=2)[0]

    @strategy.step
    def step(w, x):
        return w - jdist.all_reduce("mean", jax.grad(looped)(w, x)), jdist.all_reduce("mean", loss(w, x))

    w, total = step(strategy.put(np.ones(4, np.float32)), strategy.split(X))
    with jax.set_mesh(strategy.mesh):
        grads = jax.jit(jax.grad(looped))(np.ones(4, np.float32), X)
        expected_total = jax.jit(loss)(np.ones(4, np.float32), X)
    np.testing.assert_allclose(w, 1 - grads, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(total, expected_total, rtol=1e-5)


def test_out_sharding_places_the_state_that_init_makes():
    """flax's own FSDP example: eager sharding is on by default, and no `jax.set_mesh` is needed."""
    assert nnx.using_eager_sharding()
    model = data_model("optimizer").init(NNX)
    assert model.first[...].sharding.spec == P(None, "model")
    assert model.second[...].sharding.spec == P("model")
    assert data_model().init(NNX).first[...].sharding.spec == P("data", "model")


def test_one_program_with_and_without_set_mesh():
    strategy, traces = data_model(), []

    @functools.partial(strategy.step, donate=False)
    def step(w, x):
        traces.append(None)
        return w - jdist.all_reduce("mean", by_spec(w * x, "data", "model").sum(0)), None

    w, x, results = strategy.put(np.ones(4, np.float32)), strategy.split(X), []
    for mesh in (None, strategy.mesh, OTHER_MESH(), None):
        with contextlib.nullcontext() if mesh is None else jax.set_mesh(mesh):
            results.append(np.asarray(step(w, x)[0]))
    # In the cache key of jax 0.10, no mesh and a mesh that was left differ: one more trace, of any function.
    assert len(traces) == 1 + (jax.__version_info__ < (0, 11))
    assert all(np.array_equal(result, results[0]) for result in results)


def test_step_in_a_jit_of_the_user():
    strategy = data_model()
    step = strategy.step(lambda w, x: (w - jdist.all_reduce("mean", by_spec(w * x, "data", "model").sum(0)), None))
    w, x = strategy.put(np.ones(4, np.float32)), strategy.split(X)
    alone = np.asarray(step(w, x)[0])
    outer = jax.jit(lambda w, x: step(w, x)[0])
    np.testing.assert_allclose(outer(strategy.put(np.ones(4, np.float32)), x), alone, rtol=1e-6)
    with jax.set_mesh(strategy.mesh):
        np.testing.assert_allclose(outer(strategy.put(np.ones(4, np.float32)), x), alone, rtol=1e-6)


def test_unknown_axis_in_a_sharded_step_is_an_error_with_the_axes_of_the_mesh():
    strategy = data_model()
    step = strategy.step(lambda w, x: (w, by_spec(x, ("data", "seq"))))
    with pytest.raises(ValueError, match=r"test_annotated_models.py:\d+ in .* has no axis 'seq'.*'data', 'model'"):
        step(strategy.put(1.0), strategy.split(X))
