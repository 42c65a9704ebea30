"""Replicas that are groups of devices: `mesh=` with model axes."""

import pickle
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import AxisType, Mesh, PartitionSpec

import jdist

P = PartitionSpec
LAYOUT = {"w1": P(None, "model"), "w2": P("model", None)}
RNG = np.random.default_rng(0)
PARAMS = {"w1": RNG.normal(size=(6, 8)).astype(np.float32), "w2": RNG.normal(size=(8, 2)).astype(np.float32)}
X, Y = RNG.normal(size=(8, 6)).astype(np.float32), RNG.normal(size=(8, 2)).astype(np.float32)


def grid(*shape):
    return np.array(jax.devices()[: int(np.prod(shape))]).reshape(shape)


def tensor_parallel(num_replicas=2, **options):
    mesh = Mesh(grid(num_replicas, 2), ("replica", "model"))
    return jdist.MirroredStrategy(mesh=mesh, layout=LAYOUT, **options)


def loss_fn(params, x, y):
    return jnp.mean((jnp.tanh(x @ params["w1"]) @ params["w2"] - y) ** 2)


def train(strategy, optimizer, steps=4, steps_per_call=None):
    """Returns the state and the outputs after some steps on one batch."""

    def make():
        params = jax.tree.map(jnp.asarray, PARAMS)
        return {"params": params, "opt_state": optimizer.init(params)}

    def step(state, x, y):
        loss, grads = jax.value_and_grad(loss_fn)(state["params"], x, y)
        updates, opt_state = optimizer.update(grads, state["opt_state"], state["params"])
        params = optax.apply_updates(state["params"], updates)
        return {"params": params, "opt_state": opt_state}, (jdist.all_reduce("mean", loss), loss)

    state, batch = strategy.init(make), strategy.split((X, Y))
    program = strategy.step(step, steps_per_call=steps_per_call)
    inputs = batch if steps_per_call is None else [[x] * steps_per_call for x in batch]
    outputs = None
    for _ in range(steps // (steps_per_call or 1)):
        state, outputs = program(state, *inputs)
    return state, outputs


def read(tree):
    is_wrapper = lambda node: hasattr(node, "tree")
    return jax.tree.map(lambda x: np.asarray(x.tree if is_wrapper(x) else x), tree, is_leaf=is_wrapper)


POLICIES = {
    "mean": lambda: optax.chain(jdist.sync.mean(), optax.adam(0.1)),
    "int8": lambda: optax.chain(jdist.sync.int8(), optax.sgd(0.1)),
    "diloco": lambda: jdist.sync.diloco(optax.sgd(0.1), optax.sgd(0.7, momentum=0.9), every=2),
}


@pytest.mark.parametrize("steps_per_call", [None, 2])
@pytest.mark.parametrize("policy", POLICIES)
def test_policy_between_tensor_parallel_replicas_equals_it_between_devices(policy, steps_per_call):
    expected, (expected_loss, expected_losses) = train(jdist.MirroredStrategy(jax.devices()[:2]), POLICIES[policy]())
    state, (loss, losses) = train(tensor_parallel(), POLICIES[policy](), steps_per_call=steps_per_call)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), read(expected), read(state))
    np.testing.assert_allclose(np.ravel(loss)[-1], expected_loss, rtol=1e-4)
    rows = losses.tree if steps_per_call is None else losses.tree[:, -1]
    np.testing.assert_allclose(rows, expected_losses.tree, rtol=1e-4)


@pytest.mark.parametrize("policy", POLICIES)
def test_state_stays_partitioned_within_a_replica(policy):
    strategy = tensor_parallel()
    state, _ = train(strategy, POLICIES[policy]())
    w1 = state["params"]["w1"]
    leaf, prefix = (w1.tree, ("replica",)) if hasattr(w1, "tree") else (w1, ())
    assert tuple(leaf.sharding.spec) == (*prefix, None, "model")
    assert leaf.addressable_shards[0].data.shape == (1,) * len(prefix) + (6, 4)


def test_exact_mode_has_equal_bits_on_one_and_two_replica_groups():
    optimizer = lambda: optax.chain(jdist.sync.exact(), optax.adam(0.1))
    states = [read(train(tensor_parallel(n, virtual_replicas=4), optimizer())[0]) for n in (1, 2)]
    jax.tree.map(np.testing.assert_array_equal, *states)


@pytest.mark.parametrize("num_replicas", [1, 2])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "int32"])
def test_collectives_over_groups_equal_numpy(num_replicas, dtype):
    strategy = jdist.MirroredStrategy(mesh=Mesh(grid(num_replicas, 2), ("replica", "model")))
    rows = np.arange(num_replicas * 4).reshape(num_replicas, 4)
    x = strategy.put(jdist.PerReplica(jnp.asarray(rows, dtype)))

    def reduce(x):
        doubled, _ = lax.scan(lambda carry, _: (lax.psum(carry, "replica"), None), x, None, length=2)
        return jdist.all_reduce("sum", x), jdist.all_reduce("max", x), lax.pmin(x, "replica"), doubled

    total, largest, smallest, doubled = strategy.run(reduce, (x,))
    np.testing.assert_array_equal(np.asarray(total, np.float32), rows.sum(0))
    np.testing.assert_array_equal(np.asarray(largest, np.float32), rows.max(0))
    np.testing.assert_array_equal(np.asarray(smallest, np.float32), rows.min(0))
    # The carry starts with another value on each replica, so it is not proved to be replicated.
    np.testing.assert_array_equal(np.asarray(doubled.tree[0], np.float32), rows.sum(0) * num_replicas)


def test_values_of_a_group_are_arrays_on_its_devices():
    strategy = tensor_parallel()
    state, _ = train(strategy, POLICIES["diloco"]())
    w1 = state["params"]["w1"]
    values = w1.values
    assert [sorted(d.id for d in value.sharding.device_set) for value in values] == [[0, 1], [2, 3]]
    np.testing.assert_array_equal(np.stack([np.asarray(value) for value in values]), np.asarray(w1.tree))
    np.testing.assert_allclose(w1.read(), np.asarray(w1.tree).mean(0), rtol=1e-6)
    assert tuple(w1.read().sharding.spec) == (None, "model")


def test_host_api_counts_groups():
    strategy = jdist.MirroredStrategy(mesh=Mesh(grid(2, 2), ("replica", "model")))
    ids = strategy.run(jdist.replica_id)
    assert strategy.num_replicas_in_sync == 2
    assert [int(i) for i in ids.values] == [int(i) for i in strategy.local_results(ids)] == [0, 1]
    assert int(strategy.reduce("sum", ids, axis=None)) == 1
    assert strategy.gather(strategy.run(lambda: jdist.replica_id()[None]), axis=0).tolist() == [0, 1]
    made = strategy.distribute_values_from_function(lambda context: np.full(3, context.replica_id_in_sync_group))
    assert [value.tolist() for value in made.values] == [[0] * 3, [1] * 3]
    batches = list(strategy.distribute_dataset(np.arange(8, dtype=np.int32), batch_size=4))
    assert [batch.tree.tolist() for batch in batches] == [[[0, 1], [2, 3]], [[4, 5], [6, 7]]]
    mirrored = strategy.put(jdist.Mirrored(np.arange(2.0, dtype=np.float32)))
    assert [value.tolist() for value in mirrored.values] == [[0, 1], [0, 1]]
    assert re.search("replicas +2, one per 2 devices", str(strategy.describe()))


def test_proof_is_about_replicas():
    strategy = tensor_parallel()
    step = strategy.step(lambda w, x: (w - x.mean(), None))
    with pytest.raises(jdist.NotMirroredError, match=r"not proved to be replicated"):
        step(strategy.put(np.ones(4, np.float32)), strategy.split(X))


BY_HAND = {
    "psum": (lambda x: lax.psum(x, "model"), P()),
    "ppermute": (lambda x: lax.ppermute(x, "model", [(0, 1), (1, 0)]), P("model")),
    "all_to_all": (lambda x: lax.all_to_all(x.reshape(2, -1), "model", 0, 0).reshape(-1), P("model")),
    "replica": (lambda x: lax.psum(x, "replica"), P("model")),
}


@pytest.mark.parametrize("name", BY_HAND)
def test_collective_within_a_replica(name):
    fn, out_spec = BY_HAND[name]
    rows = np.arange(16, dtype=np.float32).reshape(2, 8)
    strategy = jdist.MirroredStrategy(mesh=Mesh(grid(2, 2), ("replica", "model")))

    def by_hand(x):
        options = {"in_specs": P("model"), "out_specs": out_spec, "axis_names": {"model"}, "check_vma": False}
        return jax.shard_map(fn, **options)(x)

    result = strategy.run(by_hand, (strategy.put(jdist.PerReplica(rows)),))
    halves = rows.reshape(2, 2, 4)
    expected = {
        "psum": halves.sum(1),
        "ppermute": halves[:, ::-1].reshape(2, 8),
        "all_to_all": halves.reshape(2, 2, 2, 2).swapaxes(1, 2).reshape(2, 8),
        "replica": rows.sum(0),
    }[name]
    np.testing.assert_array_equal(result if name == "replica" else result.tree, expected)


@pytest.mark.parametrize("num_replicas", [1, 2])
def test_bfloat16_is_reduced_beside_an_axis_that_xla_partitions(num_replicas):
    strategy = jdist.MirroredStrategy(mesh=Mesh(grid(num_replicas, 2, 2), ("replica", "stage", "model")))

    def reduce(x):
        options = {"in_specs": P("stage"), "out_specs": P(), "axis_names": {"stage"}, "check_vma": False}
        return jdist.all_reduce("sum", jax.shard_map(lambda x: lax.psum(x, "stage"), **options)(x))

    rows = np.arange(num_replicas * 8).reshape(num_replicas, 8)
    total = strategy.run(reduce, (strategy.put(jdist.PerReplica(jnp.asarray(rows, jnp.bfloat16))),))
    np.testing.assert_array_equal(np.asarray(total, np.float32), rows.reshape(-1, 2, 4).sum((0, 1)))


def test_callback_in_a_shard_map_over_the_devices_of_a_replica():
    strategy = jdist.MirroredStrategy(mesh=Mesh(grid(2, 2), ("replica", "model")))
    called = lambda x: jax.pure_callback(lambda x: np.asarray(x) + 1, jax.ShapeDtypeStruct(x.shape, x.dtype), x)
    options = {"in_specs": P("model"), "out_specs": P("model"), "axis_names": {"model"}, "check_vma": False}
    x = strategy.put(jdist.PerReplica(np.arange(8, dtype=np.float32).reshape(2, 4)))
    assert strategy.run(jax.shard_map(called, **options), (x,)).tree.tolist() == [[1, 2, 3, 4], [5, 6, 7, 8]]


def test_shard_map_in_a_replica_without_a_mesh_is_an_error_that_names_the_line():
    strategy = tensor_parallel(virtual_replicas=4)
    by_hand = lambda x: jax.shard_map(lambda x: x, in_specs=P("model"), out_specs=P("model"))(x)
    with pytest.raises(
        ValueError, match=r"test_model_axes\.py:\d+ in .*`jax\.shard_map` without `mesh=`.*`virtual_replicas`"
    ):
        strategy.run(by_hand, (np.ones(4, np.float32),))


HANGING = {
    "psum over the model axis": (lambda x: lax.psum(x, "model"), "model", "every device along 'model'"),
    "all_gather over the model axis": (
        lambda x: lax.all_gather(x, "model").sum(0),
        "model",
        "every device along 'model'",
    ),
    "ppermute below a replica": (lambda x: lax.ppermute(x, "model", [(0, 1), (1, 0)]), "replica", "also along replica"),
    "ppermute over replicas": (lambda x: lax.ppermute(x, "replica", [(0, 1), (1, 0)]), "model", "also along model"),
}


@pytest.mark.parametrize("name", HANGING)
def test_collective_that_some_devices_do_not_reach_is_an_error(name):
    collective, axis, message = HANGING[name]

    def body(x):
        return lax.cond(lax.axis_index(axis) == 0, collective, lambda x: x, x)

    def by_hand(x):
        options = {"in_specs": P("model"), "out_specs": P("model"), "axis_names": {"model"}, "check_vma": False}
        return jax.shard_map(body, **options)(x)

    strategy = jdist.MirroredStrategy(mesh=Mesh(grid(2, 2), ("replica", "model")))
    with pytest.raises(jdist.DivergentCollectiveError, match=message):
        strategy.run(by_hand, (strategy.put(jdist.PerReplica(np.ones((2, 4), np.float32))),))


def test_sizes_in_place_of_a_mesh():
    strategy = jdist.MirroredStrategy(mesh={"replica": -1, "model": 4})
    assert dict(strategy.mesh.shape) == {"replica": 2, "model": 4}
    assert strategy.mesh == Mesh(grid(2, 4), ("replica", "model"))


def test_replica_axis_with_another_name():
    mesh = Mesh(grid(2, 2), ("data", "model"))
    strategy = jdist.MirroredStrategy(mesh=mesh, axis_name="data")
    assert strategy.num_replicas_in_sync == 2
    step = strategy.step(lambda w, x: (w - 0.1 * lax.pmean(x.sum(0), "data"), None))
    w, _ = step(strategy.put(np.zeros(6, np.float32)), strategy.split(X))
    np.testing.assert_allclose(w, -0.1 * X.sum(0) / 2, rtol=1e-5)
    assert pickle.loads(pickle.dumps(strategy)).mesh == strategy.mesh


@pytest.mark.parametrize("make", [tensor_parallel, lambda: tensor_parallel(virtual_replicas=4)])
def test_pickle_has_the_same_mesh_and_layout(make):
    strategy = make()
    copy = pickle.loads(pickle.dumps(strategy))
    assert copy.mesh == strategy.mesh and copy.replicas == strategy.replicas
    shapes = {"w1": jax.ShapeDtypeStruct((6, 8), np.float32), "w2": jax.ShapeDtypeStruct((8, 2), np.float32)}
    assert copy.shardings(shapes) == strategy.shardings(shapes)


@pytest.mark.parametrize("before", [lambda: tensor_parallel(), lambda: jdist.MirroredStrategy(jax.devices()[:2])])
@pytest.mark.parametrize(
    "after", [lambda: tensor_parallel(), lambda: tensor_parallel(1), lambda: jdist.OneDeviceStrategy()]
)
def test_checkpoint_continues_on_another_mesh(tmp_path, before, after):
    old, new, optimizer = before(), after(), optax.chain(jdist.sync.mean(), optax.adam(0.1))
    state, _ = train(old, optimizer)
    with jdist.Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(4, state)
        like = new.init(lambda: jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), read(state)))
        restored = checkpointer.restore(new, like=like).state
    jax.tree.map(np.testing.assert_array_equal, read(state), read(restored))
    assert restored["params"]["w1"].sharding == like["params"]["w1"].sharding


def test_hierarchical_all_reduce_has_groups_of_replicas():
    mesh = Mesh(grid(4, 2), ("replica", "model"))
    strategy = jdist.MirroredStrategy(mesh=mesh, cross_device_ops=jdist.HierarchicalAllReduce(2))
    assert dict(strategy.mesh.shape) == {"group": 2, "replica": 2, "model": 2}
    total = strategy.run(lambda: jdist.all_reduce("sum", jdist.replica_id() * jnp.ones(5)))
    assert total.tolist() == [6.0] * 5


def test_multi_worker_strategy_of_one_process():
    strategy = jdist.MultiWorkerMirroredStrategy(mesh={"replica": 2, "model": 4}, layout=LAYOUT)
    state, _ = train(strategy, POLICIES["mean"]())
    expected, _ = train(jdist.MirroredStrategy(jax.devices()[:2]), POLICIES["mean"]())
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), read(expected), read(state))


ERRORS = {
    "no axis of the replicas": (
        lambda: jdist.MirroredStrategy(mesh=Mesh(grid(2, 2), ("data", "model"))),
        ValueError,
        "none of them is the axis of the replicas, 'replica'. Rename one, or name the axis of the replicas: `axis_name='data'`",
    ),
    "not the first axis": (
        lambda: jdist.MirroredStrategy(mesh=Mesh(grid(2, 2), ("model", "replica"))),
        ValueError,
        "must be the first axis of the mesh, and the mesh has 'model', 'replica'. Write `Mesh(np.moveaxis(mesh.devices, 1, 0), ",
    ),
    "two axes of replicas": (
        lambda: jdist.MirroredStrategy(mesh=Mesh(grid(2, 2), ("data", "replica")), axis_name="data"),
        ValueError,
        "The mesh has an axis 'replica' beside the axis of the replicas, 'data'. Rename it.",
    ),
    "explicit axes": (
        lambda: jdist.MirroredStrategy(
            mesh=Mesh(grid(2, 2), ("replica", "model"), axis_types=(AxisType.Explicit,) * 2)
        ),
        ValueError,
        "and a strategy needs `Auto`",
    ),
    "not a mesh": (
        lambda: jdist.MirroredStrategy(mesh=[2, 4]),
        TypeError,
        '`mesh` is a `jax.sharding.Mesh`, or the sizes of its axes, `{"replica": -1, "model": 2}`; got [2, 4].',
    ),
    "two unknown sizes": (
        lambda: jdist.MirroredStrategy(mesh={"replica": -1, "model": -1}),
        ValueError,
        "has several axes of size -1. The size of one axis can be computed: give the others.",
    ),
    "sizes that do not fit": (
        lambda: jdist.MirroredStrategy(mesh={"replica": 2, "model": 3}),
        ValueError,
        "needs 6 devices, and there are 8. Choose sizes whose product is the number of devices, or pass a `Mesh` of some of them.",
    ),
    "sizes that do not divide": (
        lambda: jdist.MirroredStrategy(mesh={"replica": -1, "model": 3}),
        ValueError,
        "needs a multiple of 3 devices, and there are 8.",
    ),
    "devices and mesh": (
        lambda: jdist.MirroredStrategy(["cpu:0"], mesh={"replica": 8}),
        TypeError,
        "takes `devices` or `mesh`, and got both. A mesh contains its devices.",
    ),
    "layout without model axes": (
        lambda: jdist.MirroredStrategy(layout=LAYOUT),
        ValueError,
        "and here a replica is one device. Pass a mesh with a second axis",
    ),
    "layout over the replicas": (
        lambda: jdist.MirroredStrategy(mesh={"replica": 2, "model": 4}, layout={"w": P("replica")}),
        ValueError,
        "names the axis 'replica', and the mesh has model within a replica.",
    ),
    "replicas over slices": (
        lambda: jdist.TPUStrategy(topology="v5e:2x2", num_slices=2, mesh={"replica": 1, "model": 8}),
        ValueError,
        "has 1 replicas on 2 slices, so a replica would span slices. Choose a multiple of 2 replicas.",
    ),
}


@pytest.mark.parametrize("name", ERRORS)
def test_error_of_a_mesh(name):
    make, kind, message = ERRORS[name]
    if name == "replicas over slices":
        pytest.importorskip("libtpu")
    with pytest.raises(kind, match=re.escape(message)):
        make()


@pytest.mark.parametrize("sizes", [{"replica": 2, "model": 2}, {"replica": 1, "model": 4}])
def test_tpu_topology_with_a_model_axis_compiles(sizes):
    pytest.importorskip("libtpu")
    strategy = jdist.TPUStrategy(topology="v5e:2x2", mesh=sizes, layout=LAYOUT)
    assert dict(strategy.mesh.shape) == sizes
    step = lambda w, x, y: (
        jax.tree.map(lambda p, g: p - g, w, jdist.all_reduce("mean", jax.grad(loss_fn)(w, x, y))),
        None,
    )
    n = sizes["replica"]
    batch = [jdist.PerReplica(jax.ShapeDtypeStruct((n, 8, size), np.float32)) for size in (6, 2)]
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), PARAMS)
    program = strategy.compile(step, shapes, *batch)
    axes = {axis for each in jdist.hlo.collectives(program, strategy.mesh) for axis in each.axes}
    assert axes == ({"replica", "model"} if n > 1 else {"model"})
