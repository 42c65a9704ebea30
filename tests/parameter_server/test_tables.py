"""Tables of which a step looks up rows: only these rows are sent and updated, and the results are those of the dense table."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen

import jdist
from jdist._src.jaxpr.table_rows import looked_up_rows
from jdist._src.parameter_server import backend

NUM_ROWS, WIDTH = 50, 4
RNG = np.random.default_rng(0)
IDS = RNG.integers(0, NUM_ROWS - 10, size=(400, 3)).astype(np.int32)  # the last ten rows are never looked up
IDS[5::7] -= NUM_ROWS  # negative ids count from the last row
TARGETS = RNG.normal(size=400).astype(np.float32)


@pytest.fixture
def parts(monkeypatch):
    """The parts of the steps that are compiled."""
    compiled = []
    original = backend.compile_parts
    monkeypatch.setattr(backend, "compile_parts", lambda *args: compiled.append(original(*args)) or compiled[-1])
    return compiled


def three_shards(shape, dtype):
    return [3, 1] if shape[0] == NUM_ROWS else [1]


def make_step(strategy, optimizer, look_up=jdist.lookup):
    def make(key):
        params = {"table": jax.random.normal(key, (NUM_ROWS, WIDTH)), "w": jnp.ones(WIDTH)}
        return params, optimizer.init(params)

    @strategy.step
    def step(state, batch):
        ids, targets = batch
        loss_fn = lambda p: (look_up(p["table"], ids).sum(1) @ p["w"] - targets) ** 2
        loss, grads = jdist.value_and_grad(loss_fn)(state[0])
        updates, opt_state = optimizer.update(grads, state[1], state[0])
        return (optax.apply_updates(state[0], updates), opt_state), loss

    return strategy.init(make, jax.random.key(0)), step


def train(strategy, optimizer, look_up=jdist.lookup, batch_size=20):
    state, step = make_step(strategy, optax.chain(jdist.sync.mean(), optimizer), look_up)
    for batch in strategy.distribute_dataset((IDS, TARGETS), batch_size=batch_size):
        state, _ = step(state, batch)
    return jdist.read_values(state)


@pytest.mark.parametrize("partitioner", [None, three_shards], ids=["whole", "split"])
@pytest.mark.parametrize(
    "optimizer",
    [optax.sgd(0.01), optax.adagrad(0.1), optax.chain(optax.clip_by_global_norm(0.1), optax.sgd(0.1))],
    ids=["sgd", "adagrad", "clipped"],
)
def test_looked_up_rows_are_updated_as_in_the_dense_table(optimizer, partitioner, parts):
    expected = train(jdist.OneDeviceStrategy("cpu:0"), optimizer)
    strategy = jdist.ParameterServerStrategy(max_staleness=0, variable_partitioner=partitioner)
    results = train(strategy, optimizer)
    for a, b in zip(jax.tree.leaves(results), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)
    assert [len(one.tables) for one in parts] == [1]


def test_adam_is_lazy(parts):
    """The moments of a row decay only in the steps that look it up."""
    ids, targets = IDS[:2, :1], TARGETS[:2]
    strategy = jdist.ParameterServerStrategy(max_staleness=0)
    optimizer = optax.adam(0.1)
    state, step = make_step(strategy, optax.chain(jdist.sync.mean(), optimizer))
    before = jdist.read_values(state)[0]["table"]
    for number in (0, 1, 0):
        state, _ = step(state, strategy.split((ids[number : number + 1], targets[number : number + 1])))
    params, (_, adam_state) = jdist.read_values(state)
    looked_up = np.unique(ids)
    others = np.setdiff1d(np.arange(NUM_ROWS), looked_up)
    assert params["table"][others].tobytes() == before[others].tobytes() and not adam_state[0].mu["table"][others].any()
    assert np.abs(params["table"][looked_up] - before[looked_up]).min() > 1e-3
    (first,), (second,) = ids
    mu, nu = (getattr(adam_state[0], name)["table"] for name in ("mu", "nu"))
    assert first != second and int(adam_state[0].count) == 3
    # Row `second` was looked up once: one gradient in its moments, without the decay of the third step.
    np.testing.assert_allclose(mu[second] ** 2 / 0.01, nu[second] / 0.001, rtol=1e-4)
    assert [len(one.tables) for one in parts] == [1]


def test_table_that_is_also_used_as_a_whole_is_sent_as_a_whole(parts):
    look_up = lambda table, ids: jdist.lookup(table, ids) + 0.1 * table.mean(0)
    expected = train(jdist.OneDeviceStrategy("cpu:0"), optax.adam(0.01), look_up)
    results = train(jdist.ParameterServerStrategy(max_staleness=0), optax.adam(0.01), look_up)
    for a, b in zip(jax.tree.leaves(results), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)
    assert [len(one.tables) for one in parts] == [0]


def test_index_without_lookup_keeps_the_dense_update(parts):
    expected = train(jdist.OneDeviceStrategy("cpu:0"), optax.adam(0.01), lambda table, ids: table[ids])
    results = train(jdist.ParameterServerStrategy(max_staleness=0), optax.adam(0.01), lambda table, ids: table[ids])
    np.testing.assert_allclose(results[0]["table"], expected[0]["table"], rtol=1e-4, atol=1e-4)
    assert [len(one.tables) for one in parts] == [0]


def test_sum_over_rows_of_a_power_that_is_not_zero_there_is_that_of_the_dense_table(parts):
    count = lambda grads: sum(jax.lax.integer_pow(g, 0).sum() for g in jax.tree.leaves(grads))
    divided = optax.stateless(lambda grads, _: jax.tree.map(lambda g: g / count(grads), grads))
    expected = train(jdist.OneDeviceStrategy("cpu:0"), optax.chain(divided, optax.sgd(0.1)))
    results = train(jdist.ParameterServerStrategy(max_staleness=0), optax.chain(divided, optax.sgd(0.1)))
    np.testing.assert_allclose(results[0]["table"], expected[0]["table"], rtol=1e-4, atol=1e-4)


@pytest.mark.slow
def test_two_tables_and_two_lookups_of_one_table(parts):
    def run(strategy):
        @strategy.step
        def step(tables, ids):
            def loss_fn(tables):
                a = jdist.lookup(tables["a"], ids) + jdist.lookup(tables["a"], (ids + 1) % 7)
                return jnp.sum((a * jdist.lookup(tables["b"], ids // 2) - 1) ** 2)

            grads = jax.grad(loss_fn)(tables)
            return jax.tree.map(lambda t, g: t - 0.1 * g, tables, jdist.all_reduce("mean", grads)), None

        tables = strategy.put({"a": np.ones((9, 2), np.float32), "b": np.full((5, 2), 0.5, np.float32)})
        for ids in np.arange(30).reshape(5, 6) % 9:
            tables, _ = step(tables, strategy.split(ids))
        return jdist.read_values(tables)

    expected, results = run(jdist.OneDeviceStrategy("cpu:0")), run(jdist.ParameterServerStrategy(max_staleness=0))
    for name in expected:
        np.testing.assert_allclose(results[name], expected[name], rtol=1e-5)
    assert [len(one.tables) for one in parts] == [2]


class Recommender(linen.Module):
    @linen.compact
    def __call__(self, ids):
        table = self.param("table", linen.initializers.normal(1.0), (NUM_ROWS, WIDTH))
        return linen.Dense(1)(jdist.lookup(table, ids).reshape(len(ids), -1))[:, 0]


@pytest.mark.slow
def test_trainer_sends_rows(parts):
    def fit(strategy):
        trainer = jdist.Trainer(Recommender(), optax.adagrad(0.1), optax.squared_error, strategy=strategy)
        return trainer.fit((IDS, TARGETS), batch_size=24, epochs=3, progress="off").history.rows[-1]["loss"]

    expected = fit(jdist.OneDeviceStrategy("cpu:0"))
    assert fit(jdist.ParameterServerStrategy(max_staleness=0)) == pytest.approx(expected, rel=1e-4)
    # The programs of full batches and of the padded batch, whose examples have weights.
    assert [len(one.tables) for one in parts] == [1, 1]
    assert fit(jdist.ParameterServerStrategy(workers=3)) == pytest.approx(expected, rel=0.5)


def test_ids_out_of_range_are_clipped():
    table = jnp.arange(6.0).reshape(3, 2)
    assert jdist.lookup(table, np.array([-4, 9])).tolist() == [[0, 1], [4, 5]]


@pytest.mark.parametrize("dtype", [np.int8, np.int32, np.uint8])
def test_lookup_is_an_index(dtype):
    """Also of negative ids, in values and gradients, and with more rows than numbers of the dtype."""
    table = jnp.arange(600.0).reshape(300, 2)
    ids = np.array([0, 3, 120] if dtype is np.uint8 else [0, 3, 120, -1, -3, -128], dtype)
    wide = ids.astype(np.int32)  # JAX's own index overflows
    square = lambda rows: (rows**2).sum()
    assert jdist.lookup(table, ids).tolist() == table[wide].tolist()
    grads = jax.grad(lambda table: square(jdist.lookup(table, ids)))(table)
    assert grads.tolist() == jax.grad(lambda table: square(table[wide]))(table).tolist()


def test_bad_arguments_of_lookup_are_refused():
    with pytest.raises(TypeError, match=r"`ids` must contain integers.*float32\[1\]"):
        jdist.lookup(jnp.zeros((3, 2)), jnp.zeros(1))
    with pytest.raises(ValueError, match=r"`table` is float32\[\], and a table is \[row, ...\]"):
        jdist.lookup(jnp.float32(0), jnp.zeros(1, int))


@pytest.mark.parametrize("num_rows", [60, 2**31 - 1], ids=["packed", "large"])
def test_looked_up_rows_are_sorted_and_repetitions_have_the_place_of_the_first(num_rows):
    ids = [np.int32([[7], [3], [7]]), np.int32([50, 3, -1, 60])]
    rows = looked_up_rows(list(map(jnp.asarray, ids)), num_rows)
    last = min(60, num_rows - 1)
    assert rows.ids.tolist() == [0, 3, 3, 7, 7, 50, last]
    assert rows.numbers.tolist() == [0, 3, num_rows, 7, num_rows, 50, last]
    assert [places.tolist() for places in rows.places] == [[3, 1, 3], [5, 1, 0, 6]]
