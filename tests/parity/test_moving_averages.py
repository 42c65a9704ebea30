"""Moving averages of values: the rows MA of `rows.txt`, and VA37."""

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jdist

EMA = optax.ema(0.25)
PLAIN_EMA = optax.ema(0.25, debias=False)


def _made(strategy, value, aggregation="none"):
    with strategy.scope():
        return jdist.variable(np.float32(value), synchronization="on_write", aggregation=aggregation)


def _average(old, value, decay=0.25):
    return old * decay + value * (1 - decay)


def test_ma1_average_of_varying_values_is_the_average_of_their_mean(strategy):
    values = lambda: jnp.stack([1.0 + jdist.replica_id(), 2.0 - jdist.replica_id()])
    written, _ = strategy.step(lambda old: (_average(old, values()), None))(_made(strategy, [10, 11], "mean"))
    more = 0.5 * (strategy.num_replicas_in_sync - 1)
    np.testing.assert_allclose(
        written.read(), [10 * 0.25 + (1 + more) * 0.75, 11 * 0.25 + (2 - more) * 0.75], rtol=1e-6
    )


def test_ma1_average_on_two_replicas(two):
    values = lambda: jnp.stack([1.0 + jdist.replica_id(), 2.0 - jdist.replica_id()])
    written, _ = two.step(lambda old: (_average(old, values()), None))(_made(two, [10, 11], "mean"))
    assert [x.tolist() for x in written.values] == [[3.625, 3.875]] * 2


@pytest.mark.parametrize("aggregation", ["none", "sum", "mean", "only_first_replica"])
def test_ma3_average_computed_on_the_host_is_replicated(aggregation, two):
    value = _made(two, [10, 11], aggregation)
    for expected in ([3.25, 4.25], [1.5625, 2.5625]):
        value = value.assign(_average(value.read(), np.float32([1, 2])))
        assert [x.tolist() for x in value.values] == [expected] * 2


def test_ma4_debiased_average_on_the_host_starts_at_the_value(strategy):
    before = jdist.read_values(strategy.put(EMA.init(np.zeros(2, np.float32))))
    average, state = EMA.update(np.float32([1, 2]), before)
    assert average.tolist() == [1.0, 2.0]
    assert [x.tolist() for x in strategy.local_results(state.ema)] == [[0.75, 1.5]] * strategy.num_replicas_in_sync


AVERAGES = {"without_bias": (EMA, [2.0, 4.0]), "with_bias": (PLAIN_EMA, [1.5, 3.0])}


@pytest.mark.parametrize("ema, expected", AVERAGES.values(), ids=AVERAGES)
def test_ma5_average_in_a_step_is_local_to_the_replica(ema, expected, strategy):
    state = strategy.init(lambda: ema.init(jnp.zeros(2)))
    state, average = strategy.step(lambda state: ema.update(jnp.array([2.0, 4.0]), state)[::-1])(state)
    assert average.tolist() == expected
    assert state.ema.tolist() == [1.5, 3.0]


def test_ma5_average_in_a_map_applies_to_every_copy(two):
    averaged = _made(two, [0, 0]).map(lambda old: _average(old, jnp.array([2.0, 4.0])))
    assert [x.tolist() for x in averaged.values] == [[1.5, 3.0]] * 2


def test_ma6_average_of_a_changing_weight_tracks_it(strategy):
    def follow(state):
        w = state["w"] - 0.5
        return {"w": w, "average": optax.incremental_update(w, state["average"], step_size=0.2)}, None

    state, _ = strategy.step(follow)({"w": _made(strategy, 1, "mean"), "average": _made(strategy, 1, "mean")})
    np.testing.assert_allclose([float(x) for x in state["average"].values], 0.9, rtol=1e-6)

    average, w = _made(strategy, 1, "mean"), _made(strategy, 1, "mean")
    average = average.assign(optax.incremental_update(w.assign(0.5).read(), average.read(), step_size=0.2))
    np.testing.assert_allclose([float(x) for x in average.values], 0.9, rtol=1e-6)


def test_ma7_average_on_the_host_of_per_replica_values_is_an_error_until_they_are_reduced(two):
    value = _made(two, 10, "mean")
    values = two.put(jdist.PerReplica(np.float32([1, 2])))
    with pytest.raises(
        TypeError,
        match=r"is not defined for PerReplica\(\[1\., 2\.\], dtype=float32\), whose values are stored on several devices.*`strategy\.reduce`",
    ):
        _average(value.read(), values)
    averaged = value.assign(_average(value.read(), two.reduce("mean", values, axis=None)))
    assert [float(x) for x in averaged.values] == [3.625, 3.625]


def test_va37_average_is_stored_and_read_in_and_out_of_scope(strategy):
    ema = optax.ema(0.9)

    def apply(state, w):
        average, state = ema.update(w, state)
        return state, average

    with strategy.scope():
        state, w = (
            strategy.put(ema.init(np.float32(0))),
            jdist.variable(10.0, synchronization="on_write", aggregation="mean"),
        )
        state, average = strategy.step(apply)(state, w)
        np.testing.assert_allclose(average, 10.0, rtol=1e-6)
    state, average = strategy.step(apply)(state, w)
    np.testing.assert_allclose(average, 10.0, rtol=1e-6)
