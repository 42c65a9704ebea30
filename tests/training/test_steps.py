"""A training step equals the step of one device on all examples, for every split of the batch; and its checks."""

import dataclasses
import functools
import io
import json
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training import train_state
from hypothesis import given, settings
from hypothesis import strategies as st

import jdist

from laws import STRATEGIES, assert_in_step, each_row

EXAMPLES = 12  # divisible by 1, 2, 3 and 4 replicas
RATE = 0.1
X = np.random.default_rng(0).normal(size=(EXAMPLES, 3)).astype(np.float32)
Y = (X @ np.float32([1, -2, 3]) + 1).astype(np.float32)
INITIAL = np.float32([0.5, 0, -0.5])
MODEL = (lambda key, x: jnp.asarray(INITIAL), lambda w, x: x @ w)
place = functools.cache(lambda name: STRATEGIES[name]())


def train(trainer, data=(X, Y), *, batch_size=EXAMPLES, **options):
    return trainer.fit(data, batch_size=batch_size, shuffle=False, progress="off", **options)


def trainer_of(strategy, optimizer=None, loss=optax.squared_error, model=MODEL, **options):
    return jdist.Trainer(model, optimizer or optax.sgd(RATE), loss, strategy=strategy, **options)


def by_hand(w, x, y, weights=None):
    """Returns the loss of a linear regression, NaN without examples, and the parameters after a step, in float64."""
    weights = np.ones(len(x)) if weights is None else weights.astype(np.float64)
    error, total = x.astype(np.float64) @ w - y, max(weights.sum(), 1e-300)
    return (weights * error**2).sum() / (weights.sum() or np.nan), w - RATE * 2 * (weights * error) @ x / total


# -- equality with one device ------------------------------------------------------------------------------------------

SPLITS = [("one_device", 1), ("mirrored_2", 2), ("mirrored_3", 1), ("central_2", 2), ("sharded_4", 1)]
MORE_SPLITS = [("one_device", 3), ("mirrored_2", 3), ("mirrored_3", 2), ("sharded_4", 3)]
every_split = pytest.mark.parametrize(
    "name, micro_batches", [*SPLITS, *(pytest.param(*split, marks=pytest.mark.slow) for split in MORE_SPLITS)]
)


@functools.cache
def split_trainer(name):
    return trainer_of(place(name), metrics={"error": lambda outputs, targets: jnp.abs(outputs - targets)})


@every_split
@settings(max_examples=12, deadline=None, derandomize=True)
@given(
    rows=st.integers(1, EXAMPLES),
    weights=st.lists(st.sampled_from([0.0, 0.25, 1.0, 1.0, 7.0]), min_size=EXAMPLES, max_size=EXAMPLES),
)
def test_step_uses_the_mean_over_all_examples(name, micro_batches, rows, weights):
    x, y, weights = X[:rows], Y[:rows], np.float32(weights[:rows])
    fit = train(split_trainer(name), (x, y, weights), micro_batches=micro_batches)
    loss, params = by_hand(INITIAL, x, y, weights)
    np.testing.assert_allclose(fit.state.params, params, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(fit.history.losses[1], loss, rtol=1e-4, atol=1e-6)
    error = (weights * np.abs(x @ INITIAL - y)).sum() / (weights.sum() or np.nan)
    np.testing.assert_allclose(fit.history.rows[0]["error"], error, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(fit.history.rows[0]["loss"], loss, rtol=1e-4, atol=1e-6)
    assert fit.history.rows[0].get("dropped_examples", 0) == np.count_nonzero(weights == 0)


@pytest.mark.parametrize("name, micro_batches", SPLITS)
def test_step_without_padding_weights_uses_the_mean_over_all_examples(name, micro_batches):
    """The dataset drops the remainder, so that batches have no weights."""
    trainer = split_trainer(name)
    dataset = trainer.strategy.distribute_dataset((X, Y), EXAMPLES, shuffle=False)
    fit = trainer.fit(dataset, epochs=2, micro_batches=micro_batches, progress="off")
    once = by_hand(INITIAL, X, Y)[1]
    loss, params = by_hand(once, X, Y)
    np.testing.assert_allclose(fit.state.params, params, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(fit.history.rows[1]["loss"], loss, rtol=1e-4)
    assert_in_step(fit.state)


def counting_trainer(strategy, takes_weights=False):
    """Returns a trainer, and the list of whether each program that it traced receives weights."""
    programs = []

    def objective(params, batch, key, apply, weights=None):
        programs.append(weights is not None)
        return optax.squared_error(apply(params, batch[0]), batch[1])

    without = lambda params, batch, key, apply: objective(params, batch, key, apply)
    fn = objective if takes_weights else without
    return jdist.Trainer(MODEL, optax.sgd(RATE), objective=fn, strategy=strategy), programs


@pytest.mark.parametrize("steps_per_call", [1, 2])
def test_only_a_padded_batch_runs_the_program_with_weights(steps_per_call, two):
    """10 examples are two full batches and one of 2 examples: two programs, for any number of epochs."""
    trainer, programs = counting_trainer(two)
    options = {"batch_size": 4, "steps_per_call": steps_per_call}
    padded = train(trainer, (X[:10], Y[:10]), epochs=3, **options)
    num_traces = len(programs)
    assert (
        steps_per_call > 1 or num_traces == 5
    )  # the first one determines the inputs of the model; each program is traced twice
    full = train(trainer, (X[:8], Y[:8]), epochs=2, **options)
    train(trainer, (X[:10], Y[:10]), epochs=2, **options)
    assert len(programs) == num_traces
    w, losses = INITIAL, []
    for _ in range(3):
        for rows in (slice(0, 4), slice(4, 8), slice(8, 10)):
            loss, w = by_hand(w, X[rows], Y[rows])
            losses.append(loss)
    np.testing.assert_allclose(list(padded.history.losses.values()), losses, rtol=1e-4)
    # The bits of full batches are those of a data set without padding, also before a padded batch.
    dropped = two.distribute_dataset((X[:10], Y[:10]), 4, shuffle=False)
    dropped = trainer.fit(dropped, epochs=2, steps_per_call=steps_per_call, progress="off")
    np.testing.assert_array_equal(full.state.params, dropped.state.params)
    assert list(padded.history.losses.values())[:2] == list(dropped.history.losses.values())[:2]


def test_bits_do_not_depend_on_the_groups_of_steps_before_a_padded_batch(two):
    """Groups of 2 and 4 of 6 batches, of which the last one is padded."""
    trainer = trainer_of(two, optax.adam(RATE))
    one, *others = (train(trainer, (X[:11], Y[:11]), batch_size=2, epochs=2, steps_per_call=k) for k in (1, 2, 4))
    for other in others:
        np.testing.assert_array_equal(one.state.params, other.state.params)
        assert one.history.losses == other.history.losses


def test_functions_of_the_user_receive_the_weights_of_all_batches(two):
    trainer, programs = counting_trainer(two, takes_weights=True)
    train(trainer, (X[:10], Y[:10]), batch_size=4, epochs=2)
    assert programs[-1] and len(set(programs[1:])) == 1  # the first call determines the inputs of the model
    seen = []

    def apply(w, x, weights):
        seen.append(weights is None)
        return x @ w

    train(trainer_of(two, model=(MODEL[0], apply)), (X[:10], Y[:10]), batch_size=4, epochs=2)
    assert not any(seen)


@pytest.mark.parametrize("name, parts", [("mirrored_3", 3), pytest.param("mirrored_2", 8, marks=pytest.mark.slow)])
def test_micro_batches_of_any_number_give_the_same_step(name, parts):
    """12 examples are 4 rows on each of 3 replicas, in 3 parts; also fewer examples, and more parts than rows."""
    for rows, weights in ((12, None), (10, None), (7, np.arange(7, dtype=np.float32))):
        x, y = X[:rows], Y[:rows]
        data = (x, y) if weights is None else (x, y, weights)
        fit = train(split_trainer(name), data, batch_size=rows, micro_batches=parts)
        loss, params = by_hand(INITIAL, x, y, weights)
        np.testing.assert_allclose(fit.state.params, params, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(fit.history.losses[1], loss, rtol=1e-4)
        error = np.average(np.abs(x @ INITIAL - y), weights=weights)
        np.testing.assert_allclose(fit.history["error"][-1], error, rtol=1e-4)


def test_several_losses_per_example_are_averaged(two):
    model = (lambda key, x: jnp.float32(2), lambda w, x: w * x)
    loss = lambda outputs, targets: jnp.square(outputs - targets)
    fit = train(trainer_of(two, loss=loss, model=model), (X[:7], X[:7] + 1))
    x, y = X[:7].ravel()[:, None], X[:7].ravel() + 1
    value, params = by_hand(np.array([2.0]), x, y)
    np.testing.assert_allclose([fit.state.params], params, rtol=1e-5)
    np.testing.assert_allclose(fit.history.losses[1], value, rtol=1e-5)


# -- optimizers that reduce --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [12, 7, 3])
def test_mean_policy_in_the_optimizer_gives_the_same_result(rows, two):
    results = []
    for optimizer in (optax.sgd(RATE), optax.chain(jdist.sync.mean(), optax.sgd(RATE))):
        fit = train(trainer_of(two, optimizer), (X[:rows], Y[:rows]), epochs=2)
        results.append((np.asarray(fit.state.params), np.asarray(fit.history.losses)))
    # Gradients are divided by the number of examples after the reduction, and with the policy before it.
    for one, other in zip(*results, strict=True):
        np.testing.assert_allclose(one, other, rtol=0 if rows == 12 else 1e-5)


POLICIES = {
    "int8": (lambda sgd: optax.chain(jdist.sync.int8(), sgd), 2e-2),
    "in_dtype": (lambda sgd: optax.chain(jdist.sync.in_dtype(jnp.bfloat16), sgd), 2e-2),
    "local_sgd": (lambda sgd: jdist.sync.local_sgd(sgd, every=1), 1e-4),
    "diloco": (lambda sgd: jdist.sync.diloco(sgd, every=1, outer_optimizer=optax.sgd(1.0)), 1e-4),
    "every_1": (lambda sgd: jdist.sync.every(optax.chain(jdist.sync.mean(), sgd), 1), 1e-4),
    "clipped": (lambda sgd: optax.chain(optax.clip_by_global_norm(1e6), sgd), 1e-4),
    "skip_nonfinite": (lambda sgd: jdist.sync.skip_nonfinite(optax.chain(jdist.sync.mean(), sgd)), 1e-4),
    "jitted": (lambda sgd: _jitted(sgd), 1e-4),
    "jitted_mean": (lambda sgd: _jitted(optax.chain(jdist.sync.mean(), sgd)), 1e-4),
}


def _jitted(optimizer):
    return optax.GradientTransformation(optimizer.init, jax.jit(optimizer.update))


@pytest.mark.parametrize("policy, tolerance", POLICIES.values(), ids=POLICIES)
def test_step_with_a_policy_equals_the_step_of_one_device(policy, tolerance, two):
    """9 examples: 6 on one replica, 3 and padding on the other."""
    fit = train(trainer_of(two, policy(optax.sgd(RATE))), (X[:9], Y[:9]))
    loss, params = by_hand(INITIAL, X[:9], Y[:9])
    np.testing.assert_allclose(jdist.read_values(fit.state.params), params, rtol=tolerance, atol=tolerance)
    np.testing.assert_allclose(fit.history.losses[1], loss, rtol=1e-5)


def test_optimizer_that_updates_every_second_step_uses_the_mean_of_two_batches(two):
    trainer = trainer_of(two, jdist.sync.every(optax.chain(jdist.sync.mean(), optax.sgd(RATE)), 2))
    accumulated = "The gradients of the last step were accumulated"
    with pytest.warns(UserWarning, match=rf"^{accumulated} and not applied.*`fit\.state`"):
        fit = train(trainer, batch_size=4, steps=1)
    assert fit.stop_reason.startswith(f"No parameter changed in 1 steps. {accumulated}")
    np.testing.assert_array_equal(fit.state.params, INITIAL)
    fit = train(trainer, batch_size=4, steps=2)
    np.testing.assert_allclose(fit.state.params, by_hand(INITIAL, X[:8], Y[:8])[1], rtol=1e-5)


@pytest.mark.parametrize("name", ["one_device", "mirrored_2"])
@pytest.mark.parametrize("policy", [jdist.sync.mean, jdist.sync.int8])
def test_accumulated_batches_count_by_their_examples(name, policy):
    """Batches of 9 and 1 examples, of which the second is padded, give the step of one batch of 10."""
    trainer = trainer_of(place(name), jdist.sync.every(optax.chain(policy(), optax.sgd(RATE)), 2))
    tolerance = {"rtol": 0.02, "atol": 0.02} if policy is jdist.sync.int8 else {"rtol": 1e-5}
    x, y, weights = X[:10], Y[:10], np.arange(10, dtype=np.float32)
    for data in ((x, y), (x, y, weights)):
        fit = train(trainer, data, batch_size=9)
        np.testing.assert_allclose(fit.state.params, by_hand(INITIAL, *data)[1], **tolerance)


def test_steps_of_optax_that_are_not_applied_are_reported(two):
    optimizer = optax.MultiSteps(optax.sgd(RATE), 3).gradient_transformation()
    with pytest.warns(UserWarning, match="^The gradients of the last 2 steps were accumulated and not applied"):
        train(trainer_of(two, optimizer), batch_size=6)


def test_parameters_differ_between_synchronization_steps_by_local_gradients(two):
    trainer = trainer_of(two, jdist.sync.local_sgd(optax.sgd(RATE), every=3))
    fit = train(trainer, batch_size=4, steps=1)
    for replica, params in enumerate(fit.state.params.values):
        examples = slice(2 * replica, 2 * replica + 2)
        np.testing.assert_allclose(params, by_hand(INITIAL, X[examples], Y[examples])[1], rtol=1e-5)
    fit = train(trainer, batch_size=4, steps=3)
    assert_in_step(fit.state.params.values[0])
    np.testing.assert_array_equal(*fit.state.params.values)


# -- precision ---------------------------------------------------------------------------------------------------------

FINE = np.full(EXAMPLES, 1.001, np.float32)  # 1.0 in bfloat16
ZERO = (lambda key, x: jnp.zeros(3), lambda w, x: x @ w)


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_targets_are_exact_in_lower_precision(micro_batches, two):
    metrics = {"target": lambda outputs, targets: targets}
    trainer = trainer_of(two, model=ZERO, precision=jdist.Precision(), metrics=metrics)
    fit = train(trainer, (np.ones((EXAMPLES, 3), np.float32), FINE), micro_batches=micro_batches)
    assert fit.history.rows[0]["target"] == pytest.approx(1.001, rel=1e-6)
    assert fit.history.losses[1] == pytest.approx(1.001**2, rel=1e-6)
    assert fit.state.params.dtype == jnp.float32


def test_model_receives_inputs_and_parameters_in_lower_precision(two):
    dtypes = []

    def apply(w, x):
        dtypes.append((w.dtype, x.dtype))
        return x @ w

    trainer = trainer_of(two, model=(MODEL[0], apply), precision=jdist.Precision())
    fit = train(trainer, batch_size=4, epochs=1)
    trainer.predict(fit.state, X, batch_size=4)
    assert set(dtypes) == {(jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.bfloat16))}


def test_metrics_are_summed_in_float32_for_bfloat16_outputs(two):
    """bfloat16 represents neither 601, the number of examples, nor the half of 602."""
    precision = jdist.Precision(output_dtype=jnp.bfloat16)
    counts = {"count": (jdist.metrics.Sum(), lambda outputs, targets: (jnp.ones(len(outputs)),))}
    trainer = trainer_of(two, model=ZERO, precision=precision, metrics=counts)
    data = np.ones((601, 3), np.float32), np.ones(601, np.float32)
    fit = train(trainer, data, batch_size=602)
    assert fit.history.rows[0]["count"] == 601


def test_float16_losses_are_scaled_by_the_optimizer(two):
    optimizer = jdist.sync.dynamic_loss_scale(optax.chain(jdist.sync.mean(), optax.sgd(RATE)), initial=2.0**8)
    trainer = trainer_of(two, optimizer, precision=jdist.Precision(compute_dtype=jnp.float16))
    fit = train(trainer, (X[:9], Y[:9]))
    np.testing.assert_allclose(fit.state.params, by_hand(INITIAL, X[:9], Y[:9])[1], rtol=1e-2, atol=1e-2)


# -- losses that are not finite ----------------------------------------------------------------------------------------

BATCH, BAD = 4, 1  # three batches; the second contains a target that is not finite


def poisoned(value=np.inf):
    y = Y.copy()
    y[BAD * BATCH + 3] = value
    return X, y


def after(batches, w=INITIAL):
    for number in batches:
        rows = slice(BATCH * number, BATCH * number + BATCH)
        w = by_hand(w, X[rows], Y[rows])[1]
    return w


def test_training_continues_from_the_state_where_it_stopped(two):
    trainer = trainer_of(two)
    fit = train(trainer, poisoned(), batch_size=BATCH)
    fit = train(trainer, (X[8:], Y[8:]), batch_size=BATCH, state=fit.state)
    np.testing.assert_allclose(fit.state.params, after([0, 2]), rtol=1e-5)
    assert fit.steps == int(fit.state.step) == 2


@pytest.mark.parametrize("name", ["mirrored_2", "central_2"])
def test_skipped_step_changes_nothing_and_is_counted(name):
    trainer = trainer_of(place(name), optax.adam(RATE), non_finite="skip")
    fit = train(trainer, poisoned(), batch_size=BATCH)
    expected = train(trainer, (np.delete(X, slice(4, 8), 0), np.delete(Y, slice(4, 8), 0)), batch_size=BATCH)
    for one, other in zip(
        *(jax.tree.leaves((f.state.params, f.state.opt_state)) for f in (fit, expected)), strict=True
    ):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)
    assert fit.steps == int(fit.state.step) == 3 and expected.steps == 2
    assert not np.isfinite(fit.history.losses[2]) and np.isfinite(fit.history.losses[3])
    assert fit.history.rows[0]["loss"] == pytest.approx(expected.history.rows[0]["loss"], rel=1e-5)
    assert fit.history.rows[0]["skipped_steps"] == 1 and "skipped_steps" not in expected.history
    assert fit.stop_reason == (
        "All requested steps were taken. 1 of 3 steps were skipped: a loss or a gradient was infinite or NaN."
    )


# Runs in which nothing is learned: the data, the options of the trainer, the reason to stop, and the counts of the last row.
ALL_NAN = X * np.nan, Y
WITHOUT_WEIGHTS = X, Y, np.zeros(EXAMPLES, np.float32)
SKIPPED = "were skipped: a loss or a gradient was infinite or NaN."
NOTHING_LEARNED = {
    "stop": (ALL_NAN, {}, "The loss of step 1 is nan (batch 0 of epoch 0). The state is the one before that step.", {}),
    "skip": (ALL_NAN, {"non_finite": "skip"}, f"No parameter changed in 6 steps. 6 of 6 steps {SKIPPED}", {"skipped_steps": 3}),
    "skipped by the optimizer": (
        ALL_NAN, {"non_finite": "keep", "optimizer": optax.apply_if_finite(optax.adam(RATE), 100)},
        f"No parameter changed in 6 steps. 6 of 6 steps {SKIPPED}", {"skipped_steps": 3},
    ),
    "weights 0": (
        WITHOUT_WEIGHTS, {}, "No parameter changed in 6 steps. 24 of 24 examples were dropped: their weights are 0.",
        {"dropped_examples": 12},
    ),
}  # fmt: skip
OTHER_RUNS = [("mirrored_2", {"steps_per_call": 2}), ("mirrored_2", {"micro_batches": 2}), ("sharded_4", {})]
RUNS = [*((case, "mirrored_2", {}) for case in NOTHING_LEARNED), *(("skip", *run) for run in OTHER_RUNS)]


@pytest.mark.parametrize("case, name, options", RUNS)
def test_run_that_learns_nothing_reports_it_and_no_number(case, name, options, tmp_path):
    data, trainer_options, stop_reason, counts = NOTHING_LEARNED[case]
    is_positive = lambda outputs, targets: (jnp.int32(outputs > 0), jnp.int32(targets > 0))
    metrics = {"mae": jdist.metrics.MeanAbsoluteError(), "f1": (jdist.metrics.F1.empty(2), is_positive)}
    trainer = trainer_of(place(name), metrics=metrics, **trainer_options)
    best = jdist.callbacks.EarlyStopping("loss", patience=9)
    log = jdist.callbacks.JSONLog(tmp_path / "log")
    display = io.StringIO()
    progress = jdist.callbacks.Progress("lines", interval_seconds=1e-9, stream=display)
    with jdist.Checkpointer(tmp_path / "run", keep=1, keep_best=("loss", "min")) as checkpointer:
        callbacks = [best, log, progress, jdist.callbacks.Checkpoint(checkpointer)]
        fit = train(trainer, data, batch_size=BATCH, epochs=2, callbacks=callbacks, **options)
        assert checkpointer.best is None
    assert fit.stop_reason == stop_reason
    assert np.isnan(list(fit.history.losses.values())).all() and best.best is None
    is_counted = trainer_options.get("non_finite") == "keep"  # the outputs, which are NaN, have a class
    for row in fit.history.rows:
        assert np.isnan([row[name] for name in ("loss", "mae", *([] if is_counted else ["f1"]))]).all()
        assert {name: row[name] for name in row if name in ("skipped_steps", "dropped_examples")} == counts
    assert "loss nan" in display.getvalue() and "loss 0" not in display.getvalue()
    assert {json.loads(line)["loss"] for line in (tmp_path / "log").read_text().splitlines()} <= {"nan"}


def test_loss_of_examples_without_weights_is_nan(two):
    trainer = trainer_of(two, metrics={"mae": jdist.metrics.MeanAbsoluteError()})
    fit = train(trainer, validation_data=WITHOUT_WEIGHTS)
    assert np.isnan([fit.history["val_loss"], fit.history["val_mae"]]).all() and np.isfinite(fit.history["loss"])
    assert fit.stop_reason == "All requested steps were taken."


@pytest.mark.parametrize("size", [3, 1 << 19])
def test_run_that_changes_no_parameter_says_so(size, two):
    model = lambda key, x: {"w": jnp.ones(3), "unused": jnp.ones(size)}, lambda params, x: x @ params["w"]
    fit = train(trainer_of(two, optax.sgd(0.0), model=model))
    assert fit.stop_reason.startswith("No parameter changed in 1 steps. Look at the learning rate")
    assert train(trainer_of(two, model=model)).stop_reason == "All requested steps were taken."


def test_skipped_steps_are_counted_by_row_and_across_a_resume(two, tmp_path):
    trainer = trainer_of(two, non_finite="skip")
    options = {"batch_size": 2, "epochs": 2}
    with jdist.Checkpointer(tmp_path, every=1) as checkpointer:
        callbacks = [jdist.callbacks.Checkpoint(checkpointer)]
        train(trainer, poisoned(np.nan), steps=5, callbacks=callbacks, **options)
        fit = train(trainer, poisoned(np.nan), resume=checkpointer, **options)
    assert fit.history["skipped_steps"] == [1, 1] and "1 of 7 steps were skipped" in fit.stop_reason


def test_skipped_step_does_not_change_the_model_state(two):
    model = nn.Sequential([nn.BatchNorm(use_running_average=False, momentum=0.5), nn.Dense(1)])
    loss = lambda outputs, targets: jnp.square(outputs[:, 0] - targets)
    trainer = trainer_of(two, loss=loss, model=model, non_finite="skip")
    x = X.copy()
    x[5] = np.nan  # affects the statistics of the second batch
    fit = train(trainer, (x, Y), batch_size=BATCH)
    means = X.reshape(3, BATCH, 3).mean(1)
    mean = fit.state.model_state["batch_stats"]["layers_0"]["mean"]
    np.testing.assert_allclose(mean, 0.25 * means[0] + 0.5 * means[2], rtol=1e-4, atol=1e-6)


def test_non_finite_step_is_taken_with_keep(two):
    fit = train(trainer_of(two, non_finite="keep"), poisoned(), batch_size=BATCH)
    assert not np.isfinite(np.asarray(fit.state.params)).any() and fit.steps == 3
    assert fit.stop_reason == "All requested steps were taken."


def test_non_finite_padding_is_ignored(two):
    model = (MODEL[0], lambda w, x, weights: jnp.where(weights > 0, x @ w, jnp.inf))
    fit = train(trainer_of(two, model=model), (X[:9], Y[:9]))
    np.testing.assert_allclose(fit.state.params, by_hand(INITIAL, X[:9], Y[:9])[1], rtol=1e-5)


# -- losses and metrics of other shapes --------------------------------------------------------------------------------


WRONG_LOSSES = [
    (lambda o, t: jnp.square(o - t).mean(), ValueError, r"`loss` returned float32\[\] for 6 examples.*`\.mean\(\)`"),
    (lambda o, t: 1.0, ValueError, r"for 6 examples.*`\.mean\(\)`"),
    (lambda o, t: jnp.square(o - t)[:1], ValueError, r"`loss` returned float32\[1\] for 6 examples"),
    (lambda o, t: jnp.square(o - t)[None], ValueError, r"`loss` returned float32\[1, ?6\] for 6 examples"),
    (lambda o, t: (jnp.square(o - t), {}), TypeError, "`loss` must return one array"),
    (lambda o, t: {"loss": jnp.square(o - t)}, TypeError, r"`loss` must return one array.*loss: float32\[6\]"),
    (lambda o, t: None, TypeError, "`loss` must return one array"),
]


def assert_raises_in_training_and_evaluation(trainer, error, message):
    for call in (lambda: train(trainer), lambda: trainer.evaluate(trainer.init(X), (X, Y), batch_size=EXAMPLES)):
        with pytest.raises(error, match=message) as raised:
            call()
    return "".join([str(raised.value), *getattr(raised.value, "__notes__", [])])


@each_row("loss, error, message", WRONG_LOSSES, ["mean", "number", "fewer", "transposed", "tuple", "dict", "none"])
def test_losses_that_are_not_one_value_per_example_raise(loss, error, message, two):
    assert_raises_in_training_and_evaluation(trainer_of(two, loss=loss), error, message)


@each_row("dtype, message", [(bool, "bool"), (jnp.int32, "int32")], ["bool", "int"])
def test_loss_that_is_not_a_float_raises_in_training(dtype, message, two):
    trainer = trainer_of(two, loss=lambda outputs, targets: (outputs > targets).astype(dtype))
    results = trainer.evaluate(trainer.init(X), (X, Y), batch_size=EXAMPLES)
    assert results["loss"] == pytest.approx(np.mean(X @ INITIAL > Y), rel=1e-6)
    with pytest.raises(TypeError, match=message):
        train(trainer)


WRONG_SHAPES = [
    (lambda o, t: jnp.abs(o - t).mean(), ValueError, r"The metric 'm' returned .*float32\[\] for 6 examples"),
    (lambda o, t: jnp.abs(o - t)[:2], ValueError, r"The metric 'm' returned .*float32\[2\] for 6 examples"),
    ((jdist.metrics.Mean(), lambda o, t: o - t), TypeError, "The function of the metric 'm' must return a tuple"),
    ((jdist.metrics.Mean(), lambda o, t: (o, t)), TypeError, "positional argument"),
    (jdist.metrics.Accuracy(), ValueError, r"logits float32\[6\]"),
    ((jdist.metrics.Mean(), lambda o, t: (o[:2],)), ValueError, "do not match"),
]


@each_row("metric, error, message", WRONG_SHAPES, [message for *_, message in WRONG_SHAPES])
def test_metrics_of_wrong_shapes_raise_with_their_name(metric, error, message, two):
    assert "'m'" in assert_raises_in_training_and_evaluation(trainer_of(two, metrics={"m": metric}), error, message)


RESERVED = ["loss", "examples", "epoch", "step", "seconds", "examples_per_second", "stalled_fraction", "learning_rate"]
WRONG_METRICS = [
    *(
        ({name: jdist.metrics.Mean()}, ValueError, f"A metric has the name {name!r}")
        for name in [*RESERVED, "val_loss", 1]
    ),
    ({"m": jdist.metrics.Mean}, TypeError, "the class Mean: call it"),
    ({"m": "accuracy"}, TypeError, "got 'accuracy'"),
    ([jdist.metrics.Mean()], TypeError, "`metrics` must be a dict from names to metrics"),
]


@each_row("metrics, error, message", WRONG_METRICS)
def test_wrong_metrics_raise(metrics, error, message, two):
    with pytest.raises(error, match=message):
        trainer_of(two, metrics=metrics)


def test_data_without_targets_are_both_inputs_and_targets(two):
    model = (lambda key, x: jnp.float32(0.5), lambda w, x: w * x)
    loss = lambda outputs, x: jnp.square(outputs - x).mean(-1)
    fit = train(trainer_of(two, loss=loss, model=model), X[:7])
    x = X[:7].ravel()
    np.testing.assert_allclose([fit.state.params], by_hand(np.array([0.5]), x[:, None], x)[1], rtol=1e-5)


# -- states of other kinds ---------------------------------------------------------------------------------------------


class Net(nn.Module):
    """A dense layer with dropout and batch normalization."""

    @nn.compact
    def __call__(self, x, train):
        x = nn.BatchNorm(use_running_average=not train)(x)
        return nn.Dropout(0.5, deterministic=not train)(nn.Dense(1)(x))[:, 0]


class WithStatistics(train_state.TrainState):
    batch_stats: Any = None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Own:
    step: Any
    params: Any
    opt_state: Any
    extra: Any = None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class OwnWithAll:
    step: Any
    params: Any
    opt_state: Any
    model_state: Any = None
    rng: Any = None


@pytest.mark.slow
def test_flax_state_trains_like_a_train_state(two):
    model, optimizer = Net(), optax.adam(RATE)
    trainer = trainer_of(two, optimizer, model=model)

    def make_flax_state(key):
        variables = model.init(key, jnp.zeros((1, 3)), train=False)
        return WithStatistics.create(apply_fn=model.apply, tx=optimizer, **variables)

    def make_train_state(key):
        variables = dict(model.init(key, jnp.zeros((1, 3)), train=False))
        params = variables.pop("params")
        return jdist.TrainState.create(params, optimizer, model_state=variables, rng=jax.random.key(0))

    makes = (make_flax_state, make_train_state)
    fits = [train(trainer, epochs=3, state=two.init(make, jax.random.key(5))) for make in makes]
    flax_state, own_state = (fit.state for fit in fits)
    assert isinstance(flax_state, train_state.TrainState) and int(flax_state.step) == fits[0].steps == 3
    jax.tree.map(
        np.testing.assert_array_equal,
        (flax_state.params, flax_state.opt_state, flax_state.batch_stats),
        (own_state.params, own_state.opt_state, own_state.model_state["batch_stats"]),
    )
    assert np.abs(flax_state.batch_stats["BatchNorm_0"]["mean"]).max() > 0
    np.testing.assert_array_equal(*(trainer.predict(state, X, batch_size=4) for state in (flax_state, own_state)))


STATES = {
    "own": lambda w, opt: Own(jnp.int32(0), w, opt),
    "own_with_more": lambda w, opt: Own(jnp.int32(0), w, opt, extra={"ema": w + 1}),
    "empty_model_state": lambda w, opt: OwnWithAll(jnp.int32(0), w, opt, {}, jax.random.key(3)),
    "model_state_none": lambda w, opt: OwnWithAll(jnp.int32(0), w, opt),
    "train_state_none": lambda w, opt: jdist.TrainState(jnp.int32(0), w, opt, None, jax.random.key(3)),
    "extra_step_count": lambda w, opt: Own(jnp.int32(0), w, opt, extra=jnp.int32(4)),
}


@pytest.mark.parametrize("make", STATES.values(), ids=STATES)
def test_dataclass_of_the_user_is_accepted_as_state(make, two):
    optimizer = optax.sgd(RATE)
    state = two.init(lambda: make(jnp.asarray(INITIAL), optimizer.init(jnp.asarray(INITIAL))))
    kind, extra = type(state), jax.device_get(getattr(state, "extra", None))
    fit = train(trainer_of(two, optimizer), (X[:9], Y[:9]), state=state)
    assert type(fit.state) is kind and int(fit.state.step) == 1
    np.testing.assert_allclose(fit.state.params, by_hand(INITIAL, X[:9], Y[:9])[1], rtol=1e-5)
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(getattr(fit.state, "extra", None)), extra)


def test_steps_of_the_state_count(two):
    state = two.init(lambda: Own(jnp.int32(7), jnp.asarray(INITIAL), optax.sgd(RATE).init(jnp.asarray(INITIAL))))
    fit = train(trainer_of(two), batch_size=4, state=state, steps=9, epochs=None)
    assert fit.steps == int(fit.state.step) == 9 and list(fit.history.losses) == [8, 9]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Lacking:
    step: Any
    params: Any


WRONG_STATES = [
    (lambda: Lacking(jnp.int32(0), jnp.asarray(INITIAL)), "Lacking.*opt_state"),
    (lambda: {"step": jnp.int32(0), "params": jnp.asarray(INITIAL)}, "dict"),
    (lambda: jnp.asarray(INITIAL), r"float32\[3\] is not a dataclass"),
]


@each_row("make, message", WRONG_STATES, ["lacking", "dict", "array"])
def test_wrong_state_raises(make, message, two):
    with pytest.raises(TypeError, match=f"The training state must be a `jdist.TrainState`.*{message}"):
        train(trainer_of(two), state=two.init(make))
