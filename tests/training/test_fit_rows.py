"""Rows KE of `tests/parity/rows.txt`: training, evaluation, metrics and random numbers on two replicas and on one device.

Rows KE12 and KE14 have further tests in `tests/processes/test_fit_processes.py` and `tests/training/test_model_adapters.py`.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn

import jdist

from laws import STRATEGIES, each_row

PLACES = ["one_device", "mirrored_1", "mirrored_2", "central_2"]
every_place = pytest.mark.parametrize("place", PLACES)
every_distributed_place = pytest.mark.parametrize("place", ["mirrored_2", "central_2"])
STATISTICS = np.float32([[0], [2], [10], [14]])  # replica 0 has the first two rows


def line(key, x):
    """Returns the parameters of a dense layer with kernel 1 and bias 0."""
    return {"w": jnp.ones(()), "b": jnp.zeros(())}


@functools.cache
def line_trainer(place):
    model = (line, lambda params, x: params["w"] * x + params["b"])
    metrics = {"mae": jdist.metrics.MeanAbsoluteError()}
    return jdist.Trainer(model, optax.sgd(0.01), optax.squared_error, metrics=metrics, strategy=STRATEGIES[place]())


def examples(count):
    x = np.arange(count, dtype=np.float32)
    return x, 2 * x


def fit(place, count, batch_size, **options):
    return line_trainer(place).fit(
        examples(count), batch_size=batch_size, shuffle=False, progress="off", **{"epochs": 1, **options}
    )


def weights(fitted):
    return [float(fitted.state.params[name]) for name in ("w", "b")]


def test_fit_of_a_generator_function_reads_it_again_in_each_epoch():
    def generator():
        yield from zip(*examples(10), strict=True)

    of_generator = line_trainer("mirrored_2").fit(generator, batch_size=4, epochs=2, progress="off")
    of_arrays = fit("mirrored_2", 10, 4, epochs=2)
    assert of_generator.history["loss"] == pytest.approx(of_arrays.history["loss"])
    assert weights(of_generator) == weights(of_arrays)


def test_fit_of_batches_with_a_batch_size_warns_in_the_line_of_fit():
    batch = np.zeros(4, np.float32), np.zeros(4, np.float32)
    with pytest.warns(jdist.BatchedElementsWarning, match="batch_size=None") as warned:
        line_trainer("mirrored_2").fit(lambda: iter([batch] * 4), batch_size=4, progress="off")
    assert [warning.filename for warning in warned] == [__file__]


@every_place
def test_ke1_fit_of_one_full_batch_has_the_loss_and_the_weights_of_one_device(place):
    fitted = fit(place, 10, 10)
    assert fitted.history["loss"][0] == pytest.approx(28.5)
    assert weights(fitted) == pytest.approx([1.57, 0.09])


KE2 = [(10, 4, [2.133941, 0.188124]), (10, 8, [2.280600, 0.179100]), (8, 4, [1.652600, 0.131700])]


@pytest.mark.slow
@every_distributed_place
@each_row("count, batch_size, expected", KE2)
def test_ke2_fit_with_a_partial_last_batch_has_the_weights_of_one_device(place, count, batch_size, expected):
    assert weights(fit(place, count, batch_size)) == pytest.approx(expected, abs=2e-6)


@every_place
def test_ke3_fit_whose_last_batch_has_one_example_has_the_weights_of_one_device(place):
    assert weights(fit(place, 9, 4)) == pytest.approx([2.0762, 0.18465], abs=5e-5)


@pytest.mark.slow
@every_distributed_place
@each_row("count, loss, error", [(9, 22.6667, 4.0), (5, 6.0, 2.0)])
def test_ke5_evaluate_and_predict_are_exact_and_in_order_for_any_number_of_examples(place, count, loss, error):
    trainer, data = line_trainer(place), examples(count)
    state = trainer.init(data[0])
    results = trainer.evaluate(state, data, batch_size=4)
    assert (results["loss"], results["mae"]) == pytest.approx((loss, error), abs=5e-5)
    assert trainer.predict(state, data[0], batch_size=4).tolist() == data[0].tolist()


@pytest.mark.parametrize("metric, expected", [(jdist.metrics.Mean, 1.5), (jdist.metrics.Sum, 3.0)])
def test_ke6_metric_is_read_over_all_replicas_and_a_new_one_is_empty(metric, expected, two):
    make = lambda: jdist.SyncOnRead(metric(), "sum")
    update = two.step(lambda state: (state.update(1.0 + jdist.replica_id()), None))
    state, _ = update(two.init(make))
    assert float(state.read().compute()) == expected
    assert all(float(leaf) == 0 for leaf in jax.tree.leaves(two.init(make).read()))


class Norm(nn.Module):
    """Batch normalization with the statistics of the last batch."""

    axis_name: str | None

    @nn.compact
    def __call__(self, x, train):
        norm = nn.BatchNorm(use_running_average=not train, momentum=0.0, epsilon=1e-3, axis_name=self.axis_name)
        return norm(x)


@pytest.mark.slow
@pytest.mark.parametrize(
    "axis_name, mean, var, outputs",
    [(None, 6.5, 2.5, [-1, 1, -1, 1]), ("replica", 6.5, 32.75, [-1.1358, -0.7863, 0.6116, 1.3105])],
    ids=["per_replica", "synchronized"],
)
def test_ke8_batch_statistics_are_averaged_over_the_replicas_or_computed_over_the_global_batch(
    axis_name, mean, var, outputs, two
):
    # The targets are row numbers: each output reaches the host as a metric.
    metrics = {f"row_{i}": lambda outputs, targets, i=i: outputs[:, 0] * (targets == i) * 4 for i in range(4)}
    loss = lambda outputs, targets: 0 * outputs[:, 0]
    trainer = jdist.Trainer(Norm(axis_name), optax.sgd(0.1), loss, metrics=metrics, strategy=two)
    data = STATISTICS, np.arange(4, dtype=np.float32)
    fitted = trainer.fit(data, batch_size=4, shuffle=False, progress="off")
    statistics = fitted.state.model_state["batch_stats"]["BatchNorm_0"]
    np.testing.assert_allclose([statistics["mean"][0], statistics["var"][0]], [mean, var], rtol=1e-5)
    np.testing.assert_allclose([fitted.history[f"row_{i}"][0] for i in range(4)], outputs, atol=1e-3)


@every_place
def test_ke9_fit_compiles_one_step_and_runs_it_for_every_batch(place):
    traces = []

    def apply(params, x):
        traces.append(x.shape)
        return params["w"] * x + params["b"]

    trainer = jdist.Trainer((line, apply), optax.sgd(0.01), optax.squared_error, strategy=STRATEGIES[place]())

    def train(epochs):
        traces.clear()
        fitted = trainer.fit(examples(8), batch_size=4, epochs=epochs, shuffle=False, progress="off")
        return fitted, len(traces)

    first, first_traces = train(1)
    assert weights(first) == pytest.approx([1.652600, 0.131700], abs=2e-6)
    longer, longer_traces = train(5)
    assert longer.steps == 10
    assert longer_traces <= first_traces


@pytest.mark.slow
@every_distributed_place
def test_ke10_fit_of_two_steps_per_call_has_the_weights_of_one_step_per_call(place):
    fitted = fit(place, 10, 4, steps_per_call=2)
    assert weights(fitted) == pytest.approx([2.133941, 0.188124], abs=2e-6)
    assert list(fitted.history.losses) == [1, 2, 3]


def test_ke14_random_numbers_differ_between_replicas_with_a_replica_key(two):
    draw = lambda key: (jax.random.uniform(jdist.replica_key(key)), jax.random.uniform(key))
    local, shared = two.run(draw, (jax.random.key(1),))
    assert isinstance(local, jdist.PerReplica) and len({float(value) for value in local.values}) == 2
    assert float(shared) == float(jax.random.uniform(jax.random.key(1)))
