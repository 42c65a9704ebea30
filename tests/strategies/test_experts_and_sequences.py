"""A mixture of experts and ring attention in a `jax.shard_map` inside a replica: the numbers of one device, gradients included."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh, PartitionSpec

import jdist
from jdist import testing

P = PartitionSpec
RNG = np.random.default_rng(0)


def normal(*shape):
    return RNG.normal(size=shape).astype(np.float32) / 2


def over(axis, split, alone, in_specs, out_specs):
    """Returns `split`, mapped over the devices along `axis`; `alone` if the mesh does not have this axis."""
    if axis not in jax.sharding.get_abstract_mesh().axis_names:
        return alone
    return jax.shard_map(split, in_specs=in_specs, out_specs=out_specs, axis_names={axis}, check_vma=False)


def experts(params, x):
    """Returns the mean over the two best experts of each token, weighted by a router, `[token, feature]`."""
    gates, ids = lax.top_k(jax.nn.softmax(x @ params["router"]), 2)
    num_experts = len(params["up"])

    def alone(up, down, x, gates, ids):
        hidden = jnp.tanh(jnp.einsum("tf,tkfh->tkh", x, up[ids]))
        return jnp.einsum("tk,tkh,tkhf->tf", gates, hidden, down[ids])

    def split(up, down, x, gates, ids):  # the experts and the tokens of one device
        chosen = jax.nn.one_hot(ids, num_experts)  # [token, choice, expert]
        received = lax.all_to_all(jnp.einsum("tke,tf->etf", chosen, x), "expert", 0, 1, tiled=True)
        results = jnp.einsum("eth,ehf->etf", jnp.tanh(jnp.einsum("etf,efh->eth", received, up)), down)
        returned = lax.all_to_all(results, "expert", 1, 0, tiled=True)
        return jnp.einsum("tk,tke,etf->tf", gates, chosen, returned)

    mapped = over("expert", split, alone, (P("expert"),) * 5, P("expert"))
    return mapped(params["up"], params["down"], x, gates, ids)


def causal_attention(params, x):
    """Returns causal attention with two heads, `[example, token, feature]`."""

    def alone(q, k, v):
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k)
        scores = jnp.where(jnp.tri(q.shape[1], dtype=bool), scores, -jnp.inf)
        return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), v)

    def split(q, k, v):  # the tokens of one device
        count, index, length = lax.axis_size("sequence"), lax.axis_index("sequence"), q.shape[1]
        ring = [(i, (i + 1) % count) for i in range(count)]

        def add_part(carry, turn):
            largest, total, weighted, k, v = carry
            first = (index - turn) % count * length  # of the keys that have arrived
            is_before = index * length + jnp.arange(length)[:, None] >= first + jnp.arange(length)
            scores = jnp.where(is_before, jnp.einsum("bqhd,bkhd->bhqk", q, k), -1e9)
            new_largest = jnp.maximum(largest, scores.max(-1))
            old, new = jnp.exp(largest - new_largest), jnp.exp(scores - new_largest[..., None])
            total = total * old + new.sum(-1)
            weighted = weighted * old[..., None] + jnp.einsum("bhqk,bkhd->bhqd", new, v)
            k, v = lax.ppermute((k, v), "sequence", ring)
            return (new_largest, total, weighted, k, v), None

        zeros = jnp.zeros((q.shape[0], q.shape[2], length))
        start = zeros - 1e9, zeros, jnp.zeros((*zeros.shape, q.shape[3])), k, v
        (_, total, weighted, _, _), _ = lax.scan(add_part, start, jnp.arange(count))
        return (weighted / total[..., None]).swapaxes(1, 2)

    q, k, v = jnp.einsum("btf,cfhd->cbthd", x, params["in"])
    tokens = P(None, "sequence")
    mixed = over("sequence", split, alone, (tokens,) * 3, tokens)(q, k, v)
    return jnp.einsum("bthd,hdf->btf", mixed, params["out"])


class Program(NamedTuple):
    axis: str
    layer: Callable[[Any, Any], Any]
    params: Any
    batches: np.ndarray  # [step, example, ...]
    layout: Any  # of the parameters
    batch_layout: Callable[[str], Any]  # from the name of the data axis


PROGRAMS = {
    "experts": Program(
        "expert",
        experts,
        {"router": normal(6, 4), "up": normal(4, 6, 8), "down": normal(4, 8, 6)},
        normal(2, 32, 6),
        [("up|down", P("expert")), (".*", P())],
        lambda axis: P(axis),
    ),
    "ring": Program(
        "sequence",
        causal_attention,
        {"in": normal(3, 6, 2, 4), "out": normal(2, 4, 6)},
        normal(2, 4, 16, 6),
        None,
        lambda axis: P(axis, "sequence"),
    ),
}


EXCHANGES = {"experts": ("all-to-all", "expert"), "ring": ("collective-permute", "sequence")}


def mesh_of(sizes, axes):
    return Mesh(np.array(jax.devices()[: np.prod(sizes)]).reshape(sizes), axes)


STRATEGIES = {
    "groups_2x2": lambda axis, layout: jdist.MirroredStrategy(mesh=mesh_of((2, 2), ("replica", axis)), layout=layout),
    "groups_1x4": lambda axis, layout: jdist.MirroredStrategy(mesh=mesh_of((1, 4), ("replica", axis)), layout=layout),
    "sharded_2x2": lambda axis, layout: jdist.ShardedStrategy(
        mesh=mesh_of((2, 2), ("data", axis)), model_axis=axis, layout=layout
    ),
    "one_device": lambda axis, layout: testing.strategy("one_device"),
    "mirrored_2": lambda axis, layout: testing.strategy("mirrored_2"),
    "virtual": lambda axis, layout: jdist.MirroredStrategy(["cpu:0", "cpu:1"], virtual_replicas=4),
}


def step_of(program):
    def loss_fn(params, x):
        layer = jax.checkpoint(lambda x, _: (x + program.layer(params, x), None))
        y, _ = lax.scan(layer, x, length=2)
        return jnp.mean((y - jnp.roll(x, 1, -1)) ** 2)

    def step(params, x):
        loss, grads = jdist.all_reduce("mean", jax.value_and_grad(loss_fn)(params, x))
        return jax.tree.map(lambda p, g: p - 0.5 * g, params, grads), loss

    return step


@pytest.mark.parametrize("name", STRATEGIES)
@pytest.mark.parametrize("kind", PROGRAMS)
def test_training_has_the_numbers_of_one_device(kind, name):
    program = PROGRAMS[kind]
    strategy, step = STRATEGIES[name](program.axis, program.layout), step_of(program)
    expected, losses = program.params, []
    for x in program.batches:
        expected, loss = jax.jit(step)(expected, x)
        losses.append(loss)
    axis = {"groups": "replica", "sharded": "data"}.get(name.split("_")[0])
    layout = {"layout": program.batch_layout(axis)} if axis else {}
    batches = [strategy.split(x, **layout) for x in program.batches]
    params, own_losses = strategy.step(step, steps_per_call=2)(strategy.put(program.params), batches)
    np.testing.assert_allclose(own_losses, losses, rtol=1e-5)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), jdist.read_values(params), expected
    )
    if program.layout and axis:
        assert params["up"].sharding.spec[0] == program.axis


@pytest.mark.parametrize("kind", PROGRAMS)
def test_it_compiles_for_a_tpu(kind):
    pytest.importorskip("libtpu")
    program = PROGRAMS[kind]
    strategy = jdist.TPUStrategy(topology="v5e:2x2", mesh={"replica": 2, program.axis: 2}, layout=program.layout)
    x = program.batches[0]
    batch = jdist.PerReplica(jax.ShapeDtypeStruct((2, len(x) // 2, *x.shape[1:]), np.float32))
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), program.params)
    compiled = strategy.compile(step_of(program), shapes, batch)
    kinds = {(each.kind, axis) for each in jdist.hlo.collectives(compiled, strategy.mesh) for axis in each.axes}
    assert {("all-reduce", "replica"), EXCHANGES[kind]} <= kinds
