"""Figures of a training: floating point operations and utilization, tokens per second, and the norms of a step."""

import csv
import dataclasses
import io

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx

import jdist
from jdist import hlo, testing
from jdist._src.training.step_calls import CountedProgram, Totals, peak_flops
from jdist._src.training.steps import TrainCarry

from laws import STRATEGIES, each_row
from small_fits import to_host

NORMS = ["gradient_norm", "update_norm", "parameter_norm"]
OPTIONS = {"one": {}, "several": {"steps_per_call": 2}, "micro_batches": {"micro_batches": 2}}
each_option = pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)

# -- floating point operations -----------------------------------------------------------------------------------------


def mlp(*sizes):
    """Returns a model without biases, whose layers have these sizes."""

    def init(key, x):
        return [jnp.ones(shape) / 4 for shape in zip(sizes, sizes[1:], strict=False)]

    def apply(params, x):
        for i, kernel in enumerate(params):
            x = (jnp.tanh(x) if i else x) @ kernel
        return x

    return init, apply


def train_mlp(strategy, sizes, batch, num_batches=2, model=None, **options):
    x, y = np.ones((batch * num_batches, sizes[0]), np.float32), np.ones((batch * num_batches, sizes[-1]), np.float32)
    trainer = jdist.Trainer(model or mlp(*sizes), optax.adam(0.1), optax.squared_error, strategy=strategy)
    return trainer.fit((x, y), batch_size=batch, progress="off", **options)


# Forward pass, gradients of the kernels, and gradients of the inputs of each layer except for the first one: 2 operations per
# parameter and example each.
FLOPS = [((8, 4), 24, 3072), ((8, 16, 4), 48, 43008), ((3, 5, 7, 2), 48, 16992)]


@each_row("sizes, batch, expected", FLOPS)
def test_flops_of_a_step_are_six_per_parameter_and_example_without_the_gradient_of_the_input(
    sizes, batch, expected, strategy
):
    parameters = sum(a * b for a, b in zip(sizes, sizes[1:], strict=False))
    assert expected == 6 * parameters * batch - 2 * sizes[0] * sizes[1] * batch
    assert train_mlp(strategy, sizes, batch).step_flops == expected


PLACES = {
    "one_device": STRATEGIES["one_device"],
    "mirrored_8": STRATEGIES["mirrored_8"],
    "sharded_4": STRATEGIES["sharded_4"],
    "central_2": STRATEGIES["central_2"],
    "virtual": lambda: jdist.MirroredStrategy(["cpu:0", "cpu:1"], virtual_replicas=4),
    "parameter_server": lambda: jdist.ParameterServerStrategy(),
    "one_worker": lambda: jdist.ParameterServerStrategy(workers=["cpu:0"]),
    "debug": lambda: testing.DebugStrategy(2),
}


@each_option
@pytest.mark.parametrize("place", PLACES)
def test_flops_are_the_same_for_every_way_to_run_a_step(place, options):
    sizes, batch, expected = FLOPS[1]
    assert train_mlp(PLACES[place](), sizes, batch, **options).step_flops == expected


def test_flops_of_several_steps_per_call_with_a_convolution_which_is_called_once_per_step(two):
    class CNN(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Conv(4, (3, 3), use_bias=False)(x).mean((1, 2))

    data = np.ones((16, 6, 6, 2), np.float32), np.ones((16, 4), np.float32)
    counts = [
        jdist.Trainer(CNN(), optax.sgd(0.1), optax.squared_error, strategy=two)
        .fit(data, batch_size=8, progress="off", **options)
        .step_flops
        for options in ({}, {"steps_per_call": 2})
    ]
    assert (
        counts[0] == counts[1] == 2 * (2 * 8 * 6 * 6 * 4 * 3 * 3 * 2)
    )  # the forward pass, and the gradient of the kernel


class Linen(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(4, use_bias=False)(jnp.tanh(nn.Dense(16, use_bias=False)(x)))


class Nnx(nnx.Module):
    def __init__(self):
        self.first = nnx.Linear(8, 16, use_bias=False, rngs=nnx.Rngs(0))
        self.second = nnx.Linear(16, 4, use_bias=False, rngs=nnx.Rngs(1))

    def __call__(self, x):
        return self.second(jnp.tanh(self.first(x)))


@pytest.mark.parametrize("model", [Linen, Nnx])
def test_flops_do_not_depend_on_the_library_of_the_model(two, model):
    sizes, batch, expected = FLOPS[1]
    assert train_mlp(two, sizes, batch, model=model()).step_flops == expected


def test_flops_of_steps_with_different_shapes_add_up_also_in_a_later_fit(two):
    model = lambda key, x: jnp.ones((1, 5)), lambda kernel, x: x[..., None] @ kernel
    loss = lambda outputs, targets: jnp.square(outputs.sum((1, 2)) - targets)
    trainer = jdist.Trainer(model, optax.sgd(0.1), loss, strategy=two)

    def step_flops():
        batches = lambda: ((np.ones((2, width), np.float32), np.ones(2, np.float32)) for width in (3, 7, 4, 8))
        data = two.distribute_dataset(batches, None, buckets=jdist.data.Buckets((4, 8), leaves=(0,)))
        return trainer.fit(data, progress="off").step_flops

    expected = np.mean([2 * 2 * 2 * width * 5 for width in (4, 8, 4, 8)])
    assert step_flops() == step_flops() == expected


def test_step_with_a_custom_function_and_a_step_without_products(two):
    def step(state, batch):
        loss, grad = jax.value_and_grad(lambda w: jnp.mean((batch @ w) ** 2))(state["w"])
        loss, grad = jdist.all_reduce("mean", (loss, grad))
        return {"w": state["w"] - grad, "step": state["step"] + 1}, loss

    make = lambda: {"w": jnp.ones((3, 5)), "step": jnp.int32(0)}
    fit = jdist.Trainer(step=step, strategy=two).fit(
        np.ones((8, 3), np.float32), batch_size=4, state=two.init(make), progress="off"
    )
    assert fit.step_flops == 2 * (2 * 4 * 3 * 5)
    scale = jdist.Trainer((lambda key, x: jnp.ones(3), jnp.multiply), optax.sgd(0.1), optax.squared_error, strategy=two)
    assert scale.fit(np.ones((8, 3), np.float32), batch_size=4, progress="off", peak_flops=1.0).step_flops is None


# -- utilization -------------------------------------------------------------------------------------------------------


def test_utilization_is_recorded_if_the_peak_is_known(two):
    sizes, batch, _ = FLOPS[0]
    assert "mfu" not in train_mlp(two, sizes, batch).history  # a CPU has no published peak
    events = []
    once, half = (
        train_mlp(two, sizes, batch, epochs=2, peak_flops=peak, callbacks=[events.append]).history
        for peak in (1e3, 2e3)
    )
    for history in (once, half):
        assert len(history["mfu"]) == 2 and min(history["mfu"]) > 0
    assert all(event.metrics["mfu"] > 0 for event in events if event.moment in ("step", "epoch"))
    # Of the second row, in which nothing is compiled: operations per second of 2 devices, divided by their peak.
    steps_per_second = once["examples_per_second"][1] / batch
    assert once["mfu"][1] == pytest.approx(FLOPS[0][2] * steps_per_second / (2 * 1e3))


def test_rates_are_those_between_two_times_without_compilation():
    start, end = Totals(10.0, 100, 50, 1e6, 1.0), Totals(14.0, 300, 450, 9e6, 3.0)
    assert end.rates_since(start, 1e8) == {"examples_per_second": 50, "tokens_per_second": 100, "mfu": 0.04}
    assert end.rates_since(start, None) == {"examples_per_second": 50, "tokens_per_second": 100}
    unknown = end._replace(tokens=None, flops=float("nan")).rates_since(start, 1e8)
    assert unknown == {"examples_per_second": 50}


def test_peak_of_a_strategy_is_that_of_its_devices():
    assert peak_flops(STRATEGIES["mirrored_3"](), 1e12) == 3e12
    assert peak_flops(STRATEGIES["sharded_4"](), 10) == 40
    assert peak_flops(PLACES["virtual"](), 1e12) == 2e12
    assert peak_flops(STRATEGIES["mirrored_3"](), None) is None
    assert peak_flops(PLACES["parameter_server"](), 1e12) is None  # the devices of the workers are not counted


@each_row("value", [0, -1.0, float("inf"), float("nan"), "1e12", True])
def test_peak_that_is_not_a_positive_number_raises(value, two):
    with pytest.raises(ValueError, match="`peak_flops` must be a positive number"):
        train_mlp(two, (2, 2), 4, peak_flops=value)


# -- tokens ------------------------------------------------------------------------------------------------------------

MASK = np.arange(6) < np.random.default_rng(0).integers(1, 7, (22, 1))  # 22 sequences
IDS = np.where(MASK, 3, 0)


def language_trainer(strategy, tokens, **options):
    def objective(params, batch, key, apply):
        logits = apply(params, batch["ids"])
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["ids"])
        return losses, batch["mask"]

    model = lambda key, ids: jnp.zeros((5, 5)), lambda table, ids: table[ids]
    return jdist.Trainer(model, optax.sgd(0.1), objective=objective, tokens=tokens, strategy=strategy, **options)


def tokens_per_example(row):
    return row["tokens_per_second"] / row["examples_per_second"]


@each_option
def test_tokens_are_those_of_the_mask_without_padded_examples(strategy, options):
    data = {"ids": IDS, "mask": MASK}  # the last batch of 8 has two rows of padding
    fit = language_trainer(strategy, lambda batch: batch["mask"]).fit(
        data, batch_size=8, epochs=2, progress="off", **options
    )
    for row in fit.history:
        assert tokens_per_example(row) == pytest.approx(MASK.sum() / len(MASK))
    assert "tokens_per_second" not in fit._last_metrics()
    every = language_trainer(strategy, lambda batch: jnp.ones_like(batch["ids"])).fit(
        data, batch_size=8, progress="off", **options
    )
    assert tokens_per_example(every.history[0]) == pytest.approx(6)


def test_tokens_of_padded_rows_of_data_and_of_steps_of_the_user(two):
    ids, weights = jdist.data.pad_rows([[1, 2], [3], [4, 4, 4, 4], [1, 1, 1]])
    trainer = jdist.Trainer(
        (lambda key, ids: jnp.zeros((5, 5)), lambda table, ids: table[ids]),
        optax.sgd(0.1),
        optax.softmax_cross_entropy_with_integer_labels,
        tokens=lambda element: element[2],
        strategy=two,
    )
    fit = trainer.fit((ids, ids, weights), batch_size=4, progress="off")
    assert tokens_per_example(fit.history[0]) == pytest.approx(10 / 4)

    step = lambda state, batch, weights: ({"step": state["step"] + 1}, jnp.float32(0))
    counting = jdist.Trainer(step=step, tokens=lambda batch: batch["mask"], strategy=two)
    state = two.init(lambda: {"step": jnp.int32(0)})
    row = counting.fit({"ids": IDS, "mask": MASK}, batch_size=8, state=state, progress="off").history[0]
    assert tokens_per_example(row) == pytest.approx(MASK.sum() / len(MASK))


@each_row(
    "tokens, error, message",
    [
        ("mask", TypeError, "`tokens` must be a function from an element"),
        (lambda batch: batch["mask"].sum(), ValueError, "`tokens` returned int32\\[\\] for 4 examples"),
        (lambda batch: batch["mask"][:1], ValueError, "`tokens` returned bool\\[1,6\\] for 4 examples"),
        (lambda batch: None, ValueError, "`tokens` returned None for 4 examples"),
    ],
)
def test_tokens_that_are_not_an_array_of_the_examples_raise(tokens, error, message, two):
    with pytest.raises(error, match=message):
        language_trainer(two, tokens).fit({"ids": IDS, "mask": MASK}, batch_size=8, progress="off")


# -- norms -------------------------------------------------------------------------------------------------------------

X = np.random.default_rng(0).normal(size=(72, 3)).astype(np.float32)
Y = (X @ np.float32([1, -2, 3])).astype(np.float32)
BATCH = 24
MODEL = (lambda key, x: {"w": jnp.ones(3), "b": jnp.ones(())}, lambda params, x: x @ params["w"] + params["b"])


def train(strategy, optimizer, model=MODEL, data=(X, Y), loss=optax.squared_error, trainer_options=None, **options):
    trainer = jdist.Trainer(model, optimizer, loss, strategy=strategy, **(trainer_options or {}))
    return trainer.fit(data, **{"batch_size": BATCH, "shuffle": False, "progress": "off", "norms": True, **options})


def norm(tree):
    return np.sqrt(sum(float((np.asarray(leaf, np.float64) ** 2).sum()) for leaf in jax.tree.leaves(tree)))


def expected_norms(optimizer, epochs=1, batch=BATCH, x=X, y=Y):
    """Returns the three norms of each step of a loop on one device."""
    params = MODEL[0](None, None)
    opt_state, norms = optimizer.init(params), []
    for start in [*range(0, len(x), batch)] * epochs:
        rows = slice(start, start + batch)
        grads = jax.grad(lambda p, rows=rows: jnp.mean(optax.squared_error(MODEL[1](p, x[rows]), y[rows])))(params)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        params = optax.apply_updates(params, updates)
        norms.append([norm(grads), norm(updates), norm(params)])
    return np.transpose(norms)


def recorded_norms(fit):
    assert list(fit.history.norms) == NORMS
    return np.array([np.asarray(values) for values in fit.history.norms.values()])


OPTIMIZERS = {
    "adam": lambda: optax.adam(0.1),
    "clipped": lambda: optax.chain(optax.clip_by_global_norm(0.5), optax.sgd(0.1)),
    "accumulated": lambda: optax.MultiSteps(optax.sgd(0.1), 2),
}


@each_option
@pytest.mark.parametrize("optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_norms_are_those_of_a_loop_on_one_device(strategy, optimizer, options):
    fit = train(strategy, optimizer(), epochs=2, **options)
    expected = expected_norms(optimizer(), epochs=2)
    np.testing.assert_allclose(recorded_norms(fit), expected, rtol=1e-4, atol=1e-6)
    for number, name in enumerate(NORMS):  # the means of the rows
        np.testing.assert_allclose(fit.history[name], expected[number].reshape(2, 3).mean(1), rtol=1e-4)


@pytest.mark.parametrize("place", ["one_device", "virtual", "debug", "one_worker"])
def test_norms_of_further_kinds_of_replicas(place):
    np.testing.assert_allclose(
        recorded_norms(train(PLACES[place](), optax.adam(0.1))), expected_norms(optax.adam(0.1)), rtol=1e-4
    )


def test_norms_with_a_padded_batch_are_those_of_the_examples(strategy):
    fit = train(strategy, optax.sgd(0.1), data=(X[:60], Y[:60]))
    np.testing.assert_allclose(
        recorded_norms(fit), expected_norms(optax.sgd(0.1), x=X[:60], y=Y[:60]), rtol=1e-4, atol=1e-6
    )


@pytest.mark.parametrize("non_finite", ["stop", "skip", "keep"])
def test_norms_do_not_change_the_training(strategy, non_finite):
    runs = [
        train(strategy, optax.adam(0.1), trainer_options={"non_finite": non_finite}, norms=norms)
        for norms in (True, False)
    ]
    for a, b in zip(*(to_host((run.state.params, run.state.opt_state)) for run in runs), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6)
    assert runs[1].history.norms == {} and not set(NORMS) & set(runs[1].history.columns)


def test_norms_of_small_dtypes_are_computed_in_float32(two):
    model = (
        lambda key, x: {"w": jnp.full(1000, 300, jnp.float16)},
        lambda params, x: x @ params["w"].reshape(-1, 1)[:3],
    )
    loss = lambda outputs, targets: outputs[:, 0] * 1e-3
    fit = train(two, optax.sgd(1e-3), model, loss=loss)
    assert fit.history.norms["parameter_norm"][1] == pytest.approx(
        300 * np.sqrt(1000), rel=1e-3
    )  # its square is > 65504


def bad_third(outputs, targets):
    """Squared errors, infinite for a target of 7."""
    return jnp.where(targets == 7, jnp.inf, jnp.square(outputs - targets))


def test_skipped_step_has_no_norm_and_does_not_count_in_the_mean(strategy):
    y = Y.copy()
    y[BATCH] = 7  # in the second step
    fit = train(strategy, optax.sgd(0.1), data=(X, y), loss=bad_third, trainer_options={"non_finite": "skip"})
    without = tuple(np.delete(part, slice(BATCH, 2 * BATCH), 0) for part in (X, Y))
    expected = expected_norms(optax.sgd(0.1), x=without[0], y=without[1])
    assert all(list(values) == [1, 3] for values in fit.history.norms.values())
    np.testing.assert_allclose(recorded_norms(fit), expected, rtol=1e-4)
    np.testing.assert_allclose(fit.history["gradient_norm"], [expected[0].mean()], rtol=1e-4)
    stopped = train(strategy, optax.sgd(0.1), data=(X, y), loss=bad_third)
    assert all(list(values) == [1] for values in stopped.history.norms.values())


def local_gradient_norm(num_replicas):
    """Returns the mean over the replicas of the norms of their gradients in the first step."""
    parts = np.split(np.arange(BATCH), num_replicas)
    loss = lambda params, rows: jnp.mean(optax.squared_error(MODEL[1](params, X[rows]), Y[rows]))
    return np.mean([norm(jax.grad(loss)(MODEL[0](None, None), rows)) for rows in parts])


@pytest.mark.parametrize("non_finite", ["stop", "keep"])
def test_norms_with_an_optimizer_that_reduces_gradients_are_means_over_the_replicas(two, non_finite):
    options = {"trainer_options": {"non_finite": non_finite}}
    mean = train(two, optax.chain(jdist.sync.mean(), optax.sgd(0.1)), **options)
    gradient, *others = recorded_norms(mean)
    assert gradient[0] == pytest.approx(local_gradient_norm(2), rel=1e-4)
    np.testing.assert_allclose(others, expected_norms(optax.sgd(0.1))[1:], rtol=1e-4)
    local = train(
        two, jdist.sync.local_sgd(optax.sgd(0.1), every=4), **options
    )  # the parameters of the replicas differ
    gradient, update, _ = recorded_norms(local)
    assert gradient[0] == pytest.approx(local_gradient_norm(2), rel=1e-4)
    np.testing.assert_allclose(update, 0.1 * gradient, rtol=1e-4)


def test_gradients_that_the_optimizer_does_not_read_do_not_count(two):
    optimizer = optax.multi_transform({"w": optax.sgd(0.1), "b": optax.set_to_zero()}, {"w": "w", "b": "b"})
    fit = train(two, optimizer, steps=1)
    grads = jax.grad(lambda p: jnp.mean(optax.squared_error(MODEL[1](p, X[:BATCH]), Y[:BATCH])))(MODEL[0](None, None))
    assert fit.history.norms["gradient_norm"][1] == pytest.approx(norm(grads["w"]), rel=1e-4)


def compiled_step(strategy, optimizer, norms, **options):
    """Returns the compiled program of a step of a trainer."""
    trainer = jdist.Trainer(MODEL, optimizer, optax.squared_error, strategy=strategy, **options)
    functions = dataclasses.replace(trainer._functions, norms=norms)
    program = trainer._train_program(functions, 1).program
    state, metrics = trainer.init(X), strategy.init(functions.empty_metrics)
    carry = TrainCarry(state, metrics, strategy.put(np.bool_(False)))
    (batch,) = strategy.distribute_dataset((X, Y), batch_size=len(X))
    return program.lower(carry, batch).compile()


COLLECTIVES = {
    "mirrored": ("mirrored_2", lambda: optax.adam(0.1), "stop"),
    "keep": ("mirrored_2", lambda: optax.adam(0.1), "keep"),
    "apply_if_finite": ("mirrored_3", lambda: optax.apply_if_finite(optax.sgd(0.1), 3), "stop"),
    "policy": ("mirrored_2", lambda: optax.chain(jdist.sync.mean(), optax.sgd(0.1)), "skip"),
    "local": ("mirrored_2", lambda: jdist.sync.local_sgd(optax.sgd(0.1), every=2), "stop"),
    "central": ("central_2", lambda: optax.sgd(0.1), "stop"),
}


@each_row("place, optimizer, non_finite", COLLECTIVES.values(), ids=COLLECTIVES)
def test_norms_add_no_collective(place, optimizer, non_finite):
    counts = [
        len(hlo.collectives(compiled_step(STRATEGIES[place](), optimizer(), norms, non_finite=non_finite)))
        for norms in (False, True)
    ]
    assert 0 < counts[1] <= counts[0]  # of the messages of a policy, two may become one


def test_outcome_of_a_step_has_three_numbers_unless_more_are_requested(two):
    shapes = [jax.tree.leaves(compiled_step(two, optax.sgd(0.1), norms).out_info)[-1].shape for norms in (False, True)]
    assert shapes == [(3,), (6,)]


@pytest.mark.parametrize("stop_at", [4, 5])
def test_rows_after_a_resume_contain_the_norms_before_it(two, tmp_path, stop_at):
    def run(callbacks=(), path=None):
        return train(two, optax.adam(0.1), epochs=3, callbacks=callbacks, resume=path)

    result = jdist.callbacks.CallbackResult(stop_reason="Killed.")
    stop = lambda event: result if event.moment == "step" and event.step == stop_at else None
    with jdist.Checkpointer(tmp_path) as checkpointer:
        run([jdist.callbacks.Checkpoint(checkpointer), stop])
    resumed, expected = run(path=tmp_path), run()
    assert resumed.history.norms == expected.history.norms
    for name in NORMS:
        assert resumed.history[name] == pytest.approx(expected.history[name])


def test_norms_are_in_logs_events_charts_and_the_report(two, tmp_path):
    at_epochs = []
    record = lambda event: at_epochs.append(event.metrics["gradient_norm"]) if event.moment == "epoch" else None
    log = jdist.callbacks.CSVLog(tmp_path / "log.csv", every=1)
    stopping = jdist.callbacks.EarlyStopping("gradient_norm", patience=9)
    fit = train(two, optax.sgd(0.1), epochs=2, callbacks=[log, record, stopping], peak_flops=1e9)
    rows = list(csv.DictReader(io.StringIO(log.path.read_text())))
    assert [row["moment"] for row in rows] == [*["step"] * 3, "epoch"] * 2
    gradient = recorded_norms(fit)[0]
    means = [gradient[first:step].mean() for first in (0, 3) for step in (first + 1, first + 2, first + 3, first + 3)]
    np.testing.assert_allclose([float(row["gradient_norm"]) for row in rows], means, rtol=1e-5)
    assert {*NORMS, "mfu"} <= set(rows[0])
    assert at_epochs == fit.history["gradient_norm"]
    titles = [axes.get_title(loc="left") for axes in fit.history.plot().axes]
    assert "Norms" in titles and "Model flops utilization" in titles and "Gradient norm" not in titles
    page = fit.report(tmp_path / "page.html").read_text()
    for text in ("model flops utilization", "model flops ", "<h2>Model</h2>", "gradient_norm"):
        assert text in page
    plain = train(two, optax.sgd(0.1), norms=False).report(tmp_path / "plain.html").read_text()
    assert "utilization" not in plain and "tokens per second" not in plain and "gradient_norm" not in plain


def custom_step(state, batch):
    return {"step": state["step"] + 1}, jnp.float32(0)


def test_norms_that_cannot_be_recorded_raise(two):
    state = two.init(lambda: {"step": jnp.int32(0)})
    with pytest.raises(ValueError, match="`norms=True` needs a trainer with `optimizer=`"):
        jdist.Trainer(step=custom_step, strategy=two).fit(X, batch_size=8, state=state, norms=True)
    metrics = {"update_norm": jdist.metrics.MeanSquaredError()}
    with pytest.raises(ValueError, match="no metric can have the name 'update_norm'"):
        train(two, optax.sgd(0.1), trainer_options={"metrics": metrics})
    with pytest.raises(TypeError, match="`norms` is True or False, got 'all'"):
        train(two, optax.sgd(0.1), norms="all")
    assert "update_norm" in train(two, optax.sgd(0.1), trainer_options={"metrics": metrics}, norms=False).history


def test_program_that_was_not_called_has_unknown_flops(two):
    program = CountedProgram(two.step(lambda state, x: (state, x)))
    assert np.isnan(program.flops(None, ())) and program.num_traces == 0
