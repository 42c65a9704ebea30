"""Batches that are split along other dimensions than the first: `split(axis=)`, and `layout=` of `split` and data sets."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import jdist

from laws import STRATEGIES, each_row, traces_of_a_step


def sharded(*sizes, model_axis="model"):
    grid = np.array(jax.devices()[: np.prod(sizes)]).reshape(sizes)
    return jdist.ShardedStrategy(mesh=Mesh(grid, ("data", "model")), model_axis=model_axis)


def model_axis():
    grid = np.array(jax.devices()[:4]).reshape(2, 2)
    return jdist.MirroredStrategy(mesh=Mesh(grid, ("replica", "model")))


def virtual():
    return jdist.MirroredStrategy(["cpu:0", "cpu:1"], virtual_replicas=4)


MAKERS = {
    "one_device": STRATEGIES["one_device"],
    "mirrored_2": STRATEGIES["mirrored_2"],
    "central_2": STRATEGIES["central_2"],
    "custom_axis": lambda: jdist.MirroredStrategy(["cpu:0", "cpu:1"], axis_name="batch"),
    "virtual_4_on_2": virtual,
    "virtual_5_on_2": lambda: jdist.MirroredStrategy(["cpu:0", "cpu:1"], virtual_replicas=5),
    "sharded_2x2": lambda: sharded(2, 2),
    "model_axis": lambda: model_axis(),
}
X = np.arange(2 * 20 * 3, dtype=np.float32).reshape(2, 20, 3)
BATCH = {"x": X, "labels": np.arange(2), "nested": [np.arange(40).reshape(2, 20)]}


@pytest.fixture(params=MAKERS)
def strategy(request):
    return MAKERS[request.param]()


def global_value(leaf, dim):
    """The leaf of the global batch that was split along a dimension."""
    if not isinstance(leaf, jdist.PerReplica):
        return np.asarray(leaf)
    return np.concatenate([np.asarray(row) for row in np.asarray(leaf.tree)], axis=dim)


def is_leaf(node):
    return isinstance(node, jdist.PerReplica)


def values(tree):
    return jax.tree.map(lambda leaf: np.asarray(leaf.tree if is_leaf(leaf) else leaf), tree, is_leaf=is_leaf)


def placements(tree):
    leaves = [leaf for node in jax.tree.leaves(tree, is_leaf=is_leaf) for leaf in jax.tree.leaves(node)]
    return [(leaf.shape, leaf.dtype, leaf.sharding) for leaf in leaves], jax.tree.structure(tree)


# --- split


@pytest.mark.parametrize("library", [np.asarray, jnp.asarray], ids=["numpy", "jax"])
def test_replica_i_holds_the_ith_block_of_the_dimension(strategy, library):
    size = strategy.num_replicas_in_sync
    split = strategy.split(jax.tree.map(library, BATCH), axis=1)
    for name, dims in (("x", 1), ("labels", 0)):
        np.testing.assert_array_equal(global_value(split[name], dims), BATCH[name])
    assert split["x"].tree.shape == (size, 2, 20 // size, 3)
    assert split["nested"][0].tree.shape == (size, 2, 20 // size)
    np.testing.assert_array_equal(split["x"].tree[size - 1], X[:, 20 - 20 // size :])
    assert isinstance(split["labels"], jdist.PerReplica) == ("data" in strategy.mesh.axis_names)


def test_layout_of_the_first_dimension_is_the_split_without_a_layout(strategy):
    batch = np.arange(20 * 3).reshape(20, 3)
    first = P("data") if "data" in strategy.mesh.axis_names else P("replica")
    for layout in (first, {"x": first}, {"x": None}):
        default = strategy.split({"x": batch})
        split = strategy.split({"x": batch}, layout=layout)
        assert placements(split) == placements(default)
        np.testing.assert_array_equal(values(split)["x"], values(default)["x"])


def test_replica_function_computes_on_blocks_of_the_sequence(strategy):
    """The mean over all tokens and its gradient are those of one device, with any number of replicas."""

    def step(w, x, labels):
        loss = lambda w: jnp.mean((x @ w - labels[:, None]) ** 2)
        loss, grad = jax.value_and_grad(loss)(w)
        return jdist.all_reduce("mean", grad), jdist.all_reduce("mean", loss)

    w, labels = np.ones(3, np.float32), np.float32([1, 2])
    expected = step(w, X / 100, labels)
    x, labels = strategy.split((X / 100, labels), axis=1)
    np.testing.assert_allclose(strategy.step(step)(strategy.put(w), x, labels)[0], expected[0], rtol=1e-5)


LAYOUTS = {
    "both": (P("data", "model"), P("data", "model")),
    "sequence": (P(None, ("data", "model")), P(None, ("data", "model"))),
    "model_first": (P("model", "data"), P("model", "data")),
    "per_leaf": ({"x": P("data", None, None), "labels": None, "nested": [P(None, "model")]}, P("data")),
    "prefix": ({"x": P(None, "model"), "labels": P("data"), "nested": P(("model",))}, P(None, "model")),
    "replicated": (P(), P()),
}


@each_row("layout, spec", LAYOUTS.values(), ids=LAYOUTS)
def test_sharded_strategy_splits_each_leaf_by_its_spec(layout, spec):
    strategy = sharded(2, 2)
    split = strategy.split(BATCH, layout=layout)
    assert split["x"].tree.sharding.is_equivalent_to(jax.NamedSharding(strategy.mesh, P(None, *spec)), 4)
    jax.tree.map(lambda one, other: np.testing.assert_array_equal(one[0], other), values(split), BATCH)
    assert all(leaf.tree.shape[0] == 1 for leaf in jax.tree.leaves(split, is_leaf=is_leaf))


MODEL_LAYOUTS = {
    "sequence": (P("replica", "model"), P("replica", None, "model")),
    "batch": (P(("replica", "model")), P("replica", "model")),
    "swapped": (P("model", "replica"), P("replica", "model")),
    "both_on_sequence": (P(None, ("replica", "model")), P("replica", None, "model")),
}


@each_row("layout, spec", MODEL_LAYOUTS.values(), ids=MODEL_LAYOUTS)
def test_model_axes_split_the_block_of_a_replica(layout, spec):
    strategy, traces = model_axis(), []
    x = np.arange(4 * 8 * 3, dtype=np.float32).reshape(4, 8, 3)
    split = strategy.split(x, layout=layout)
    dim = 0 if layout[0] not in (None, "model") else 1
    np.testing.assert_array_equal(split.tree, np.stack(np.split(x, 2, axis=dim)))
    assert split.tree.sharding.is_equivalent_to(jax.NamedSharding(strategy.mesh, spec), 4)
    (batch,) = strategy.distribute_dataset(x, 4, layout=layout)
    assert placements(batch) == placements(split)
    np.testing.assert_array_equal(batch.tree, split.tree)
    np.testing.assert_array_equal(np.stack([np.asarray(value) for value in split.values]), split.tree)

    def double(w, x):
        traces.append(x.shape)
        return w + jdist.all_reduce("mean", x.mean()), x * 2

    step, state = strategy.step(double), strategy.put(np.float32(0))
    state, doubled = step(state, split)
    with jax.transfer_guard("disallow"):
        state, _ = step(state, batch)
    assert float(state) == pytest.approx(2 * x.mean())
    assert len(traces) == traces_of_a_step(strategy)
    np.testing.assert_array_equal(doubled.tree, 2 * np.asarray(split.tree))
    (_, sharding), _ = strategy.compile(step, np.float32(0), split).input_shardings
    assert jax.tree.leaves(sharding)[0].is_equivalent_to(split.tree.sharding, 4)


# --- data sets


@pytest.mark.parametrize("remainder", ["drop", "pad"])
def test_data_set_has_the_batches_and_placements_of_split(strategy, remainder):
    layout = P("data", "model") if "data" in strategy.mesh.axis_names else P(None, "replica")
    source = {"x": np.arange(6 * 20.0, dtype=np.float32).reshape(6, 20), "labels": np.arange(6, dtype=np.int32)}
    dataset = strategy.distribute_dataset(source, batch_size=2, remainder=remainder, layout=layout)
    batches = list(dataset)
    assert len(batches) == len(dataset) == 3
    for number, element in enumerate(batches):
        batch, weights = element if remainder == "pad" else (element, None)
        part = jax.tree.map(lambda leaf, start=2 * number: leaf[start : start + 2], source)
        expected = strategy.split(part, layout=layout)
        assert placements(batch) == placements(expected)
        jax.tree.map(np.testing.assert_array_equal, values(batch), values(expected))
        if weights is not None:
            np.testing.assert_array_equal(values(weights).ravel(), [1, 1])
        assert placements(dataset.element_spec) == placements(element)


def test_batch_of_one_sequence_is_split_over_all_replicas():
    strategy = STRATEGIES["mirrored_3"]()
    (batch,) = strategy.distribute_dataset(np.arange(12).reshape(1, 12), batch_size=1, layout=P(None, "replica"))
    np.testing.assert_array_equal(batch.tree, np.arange(12).reshape(3, 1, 4))
    (batch,) = sharded(1, 4).distribute_dataset(np.arange(12).reshape(1, 12), batch_size=1, layout=P(None, "model"))
    np.testing.assert_array_equal(batch.tree, np.arange(12).reshape(1, 1, 12))


def test_data_set_with_layout_is_resumed_shuffled_and_read_from_streams(strategy):
    layout = P(None, "model") if "data" in strategy.mesh.axis_names else P(None, "replica")
    source = [np.arange(20) + 100 * i for i in range(6)]
    options = {"batch_size": 2, "layout": layout}
    dataset = strategy.distribute_dataset(np.array(source), shuffle=True, **options)
    iterator = iter(dataset)
    next(iterator)
    state, rest = iterator.get_state(), [values(batch) for batch in iterator]
    again = iter(dataset.repeated(1))
    again.set_state(state)
    np.testing.assert_array_equal(rest, [values(batch) for batch in again])
    streamed = strategy.distribute_dataset((row for row in source), **options)
    plain = strategy.distribute_dataset(np.array(source), **options)
    np.testing.assert_array_equal([values(b) for b in streamed], [values(b) for b in plain])


# --- the step takes a batch as it is placed


@pytest.mark.filterwarnings("error::jdist.RetraceWarning")
@each_row("layout", [P("data", "model"), P(None, ("data", "model")), P("model", "data"), P(("data", "model"))])
def test_step_takes_the_batch_with_its_sharding(layout):
    strategy, traces = sharded(2, 2), []

    def step(w, x):
        traces.append(x.shape)
        return w + jdist.all_reduce("mean", x.mean()), None

    step, state = strategy.step(step), strategy.put(np.float32(0))
    dataset = strategy.distribute_dataset(np.ones((12, 20), np.float32), batch_size=4, layout=layout)
    batches = list(dataset)
    state, _ = step(state, batches[0])
    with jax.transfer_guard("disallow"):
        for batch in batches[1:]:
            state, _ = step(state, batch)
    assert float(state) == 3 and traces == [(4, 20)]
    compiled = strategy.compile(step, np.float32(0), dataset.element_spec)
    ((_, batch_sharding), _) = compiled.input_shardings
    (sharding,) = jax.tree.leaves(batch_sharding)
    assert sharding.is_equivalent_to(batches[0].tree.sharding, 3)
    assert sharding.is_equivalent_to(jax.NamedSharding(strategy.mesh, P(None, *layout)), 3)


def test_steps_per_call_and_another_strategy_take_the_batch():
    strategy = sharded(2, 2)
    batches = [strategy.split(X + i, layout=P("data", "model")) for i in range(2)]
    step = strategy.step(lambda w, x: (w + jdist.all_reduce("mean", x.mean()), None), steps_per_call=2)
    assert float(step(strategy.put(np.float32(0)), batches)[0]) == pytest.approx(2 * X.mean() + 1)
    (row,) = batches[0].values
    np.testing.assert_array_equal(row, X)
    one = STRATEGIES["one_device"]()
    np.testing.assert_array_equal(one.put(batches[0]).tree, X[None])


# --- errors


def mirrored():
    return STRATEGIES["mirrored_2"]()


def dataset(strategy, source=X, batch_size=2, **options):
    return next(iter(strategy.distribute_dataset(source, batch_size, **options)))


INVALID = {
    "unknown": (ValueError, lambda: mirrored().split(X, layout=P("data")), "'data', and this strategy has 'replica'"),
    "unknown_sharded": (
        ValueError,
        lambda: sharded(2, 2).split(X, layout=P(None, "replica")),
        r"names the axis 'replica', and this strategy has 'data', 'model'\.$",
    ),
    "twice": (ValueError, lambda: mirrored().split(X, layout=P("replica", "replica")), "names an axis twice"),
    "size": (
        ValueError,
        lambda: mirrored().split({"x": X[:, :5]}, axis=1),
        r"^batch\['x'\] is float32\[2,5,3\]: its dimension 1 is split over 'replica', and 5 is not a multiple of 2",
    ),
    "size_sharded": (
        ValueError,
        lambda: sharded(2, 2).split(X[:, :5], layout=P(None, ("data", "model"))),
        r"dimension 1 is split over 'data', 'model', and 5 is not a multiple of 4",
    ),
    "dataset_size": (
        ValueError,
        lambda: dataset(mirrored(), X[:, :5], layout=P(None, "replica")),
        r"float32\[2,5,3\]: its dimension 1 is split over 'replica', and 5 is not a multiple of 2",
    ),
    "batch_size": (
        ValueError,
        lambda: dataset(sharded(2, 2), X, batch_size=1, layout=P("data", "model")),
        "A batch of 1 examples cannot be split over 2",
    ),
    "no_split": (
        ValueError,
        lambda: mirrored().split({"x": np.zeros(4)}, axis=1),
        r"^No leaf of the batch, \{x: float64\[4\]\}, is split over the replicas\. Name 'replica'",
    ),
    "structure": (
        ValueError,
        lambda: mirrored().split({"x": X}, layout={"y": P("replica")}),
        r"^`layout` must be a `PartitionSpec` for all leaves, or a tree .*\{x: float32\[2,20,3\]\}: ",
    ),
    "type": (
        TypeError,
        lambda: mirrored().split(X, layout="replica"),
        "`layout` must be a .*PartitionSpec.*got 'replica'",
    ),
    "model_first": (
        ValueError,
        lambda: model_axis().split(X, layout=P(("model", "replica"))),
        "in which 'model' is before 'replica'",
    ),
    "tuple": (TypeError, lambda: mirrored().split(X, layout=("replica",)), "`layout` must be a .*got 'replica'"),
    "axis": (ValueError, lambda: mirrored().split(X, axis=-1), "`axis` must be an integer >= 0, got -1"),
    "both": (ValueError, lambda: mirrored().split(X, axis=1, layout=P("replica")), "`axis` and `layout` both"),
    "wrapped": (
        TypeError,
        lambda: mirrored().split(mirrored().split(X), layout=P("replica")),
        "takes one global batch of plain arrays",
    ),
    "cache": (
        ValueError,
        lambda: dataset(mirrored(), layout=P("replica"), cache="device"),
        '`layout` places batches from the host, and cache="device"',
    ),
    "pad": (
        ValueError,
        lambda: dataset(sharded(2, 2), (X, X), layout=(P("data"), P("model")), remainder="pad"),
        'first dimension of some leaves .* remainder="pad" has one weight per example',
    ),
}


@each_row("error, call, message", INVALID.values(), ids=INVALID)
def test_invalid_layout_raises(error, call, message):
    with pytest.raises(error, match=message):
        call()
