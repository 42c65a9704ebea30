"""Objectives and steps of the user, optimizers with extra arguments, rematerialization, and the trained model."""

import dataclasses

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jdist

EXAMPLES = 48
X = np.random.default_rng(0).normal(size=(EXAMPLES, 3)).astype(np.float32)
Y = np.tanh(X @ np.float32([1, -2, 3]) + 1).astype(np.float32)
MODEL = (lambda key, x: jnp.full(x.shape[-1], 0.1), lambda w, x: jnp.tanh(x @ w))
LINEAR = (lambda key, x: jnp.full(x.shape[-1], 0.1), lambda w, x: x @ w)


def one():
    return jdist.OneDeviceStrategy("cpu:0")


def trainer_of(strategy, optimizer, model=MODEL, loss=optax.squared_error, **options):
    return jdist.Trainer(model, optimizer, loss, strategy=strategy, **options)


def fit(trainer, rows=EXAMPLES, steps=5, **options):
    options = {"batch_size": EXAMPLES, "shuffle": False, "progress": "off", **options}
    return trainer.fit((X[:rows], Y[:rows]), steps=steps, **options)


def assert_close(a, b, rtol=1e-4, atol=1e-5):
    for x, y in zip(jax.tree.leaves(jax.device_get(a)), jax.tree.leaves(jax.device_get(b)), strict=True):
        np.testing.assert_allclose(x, y, rtol=rtol, atol=atol)


# -- optimizers with extra arguments -----------------------------------------------------------------------------------

OPTIMIZERS = {
    "lbfgs": lambda: optax.lbfgs(),
    "backtracking": lambda: optax.chain(
        optax.sgd(1.0), optax.scale_by_backtracking_linesearch(max_backtracking_steps=15)
    ),
    "polyak_sgd": lambda: optax.polyak_sgd(max_learning_rate=0.5),
    "momo": lambda: optax.contrib.momo(learning_rate=0.5),
    "reduce_on_plateau": lambda: optax.chain(optax.sgd(0.5), optax.contrib.reduce_on_plateau(patience=1, rtol=0.9)),
    "sophia": lambda: optax.contrib.sophia(0.1, update_interval=2),
}

SLOW = ["backtracking", "sophia"]


def loop(optimizer, rows, steps):
    """Returns the parameters after some steps of a hand-written loop on one device."""
    params = MODEL[0](None, X)
    loss = lambda w, obj_fn=None: jnp.mean(optax.squared_error(MODEL[1](w, X[:rows]), Y[:rows]))
    state = optimizer.init(params)
    for _ in range(steps):
        value, grad = jax.value_and_grad(loss)(params)
        extra = {"value": value, "grad": grad, "value_fn": loss, "obj_fn": loss}
        updates, state = optax.with_extra_args_support(optimizer).update(grad, state, params, **extra)
        params = optax.apply_updates(params, updates)
    return params


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if name in SLOW else name for name in OPTIMIZERS]
)
def test_optimizer_with_extra_arguments_equals_a_loop_on_one_device(name, two):
    optimizer = OPTIMIZERS[name]()
    fitted = fit(trainer_of(two, optimizer), rows=17)
    assert_close(fitted.state.params, loop(optimizer, 17, 5), rtol=1e-3, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("micro_batches", [1, 2])
def test_lbfgs_equals_one_device_under_every_strategy(strategy, micro_batches):
    fitted = fit(trainer_of(strategy, optax.lbfgs()), micro_batches=micro_batches, steps=4)
    assert_close(fitted.state.params, loop(optax.lbfgs(), EXAMPLES, 4), rtol=1e-3, atol=1e-4)
    assert fitted.history.losses[4] < fitted.history.losses[1] / 4


def test_value_is_the_loss_of_all_replicas_also_with_a_policy(two):
    optimizer = optax.chain(jdist.sync.mean(), optax.polyak_sgd(max_learning_rate=0.5))
    assert_close(fit(trainer_of(two, optimizer)).state.params, loop(OPTIMIZERS["polyak_sgd"](), EXAMPLES, 5))


def test_line_search_behind_a_policy_raises(two):
    with pytest.raises(TypeError, match=r"needs the reduced gradients as `grad`.*Remove the policy of `jdist.sync`"):
        fit(trainer_of(two, optax.chain(jdist.sync.mean(), optax.lbfgs())))


def test_optimizer_that_needs_another_argument_raises(two):
    update = lambda grads, state, params=None, *, temperature, **extra: (grads, state)
    optimizer = optax.GradientTransformationExtraArgs(lambda params: (), update)
    with pytest.raises(TypeError, match=r"needs another argument .*'temperature'.*`Trainer\(step=fn\)`"):
        fit(trainer_of(two, optimizer))


@pytest.mark.skipif(not hasattr(optax, "monitor"), reason="the oldest optax does not have it")
def test_optimizer_state_that_gains_a_leaf_raises(two):
    optimizer = optax.chain(optax.sgd(0.1), optax.monitor({"norm": optax.tree.norm}))
    with pytest.raises(TypeError, match=r"`state.opt_state`: it gains state.opt_state\S*norm.*`optax.monitor`"):
        fit(trainer_of(two, optimizer))


# -- parameters for evaluation -----------------------------------------------------------------------------------------


def test_eval_params_are_used_in_validation_evaluation_and_prediction(strategy):
    optimizer = optax.contrib.schedule_free(optax.sgd(0.5), 0.5, b1=0.9)
    options = {"eval_params": optax.contrib.schedule_free_eval_params}
    trainer, plain = trainer_of(strategy, optimizer, **options), trainer_of(strategy, optimizer)
    fitted = fit(trainer, validation_data=(X, Y))
    averaged = optax.contrib.schedule_free_eval_params(*jax.device_get((fitted.state.opt_state, fitted.state.params)))
    of_average = dataclasses.replace(fitted.state, params=strategy.put(averaged))
    expected = plain.evaluate(of_average, (X, Y), batch_size=EXAMPLES)["loss"]
    assert expected != pytest.approx(plain.evaluate(fitted.state, (X, Y), batch_size=EXAMPLES)["loss"], rel=1e-3)
    assert trainer.evaluate(fitted.state, (X, Y), batch_size=EXAMPLES)["loss"] == pytest.approx(expected, rel=1e-5)
    assert fitted.history["val_loss"][-1] == pytest.approx(expected, rel=1e-5)
    predictions = np.tanh(X @ np.asarray(averaged))
    assert_close(trainer.predict(fitted.state, X, batch_size=EXAMPLES), predictions)
    assert_close(trainer.model(fitted.state), averaged)
    for apply in (trainer.apply, jax.jit(trainer.apply)):
        assert_close(apply(fitted.state, X), predictions)


def test_eval_params_with_other_leaves_raise(two):
    trainer = trainer_of(two, optax.sgd(0.1), eval_params=lambda opt_state, params: {"w": params})
    with pytest.raises(TypeError, match="`eval_params` must return parameters with the same leaves"):
        trainer.evaluate(trainer.init(X), (X, Y), batch_size=EXAMPLES)


# -- objectives --------------------------------------------------------------------------------------------------------


def regularized(params, batch, key, apply):
    x, y = batch
    outputs = apply(params, x)
    penalty = jnp.square(params).sum()
    losses = optax.squared_error(outputs, y) + 0.1 * penalty
    return losses, {"error": jnp.abs(outputs - y), "penalty": penalty, "both": (outputs, y)}


def regularized_metrics():
    return {
        "error": jdist.metrics.Mean(),
        "penalty": jdist.metrics.Mean(),
        "both": jdist.metrics.MeanSquaredError(),
        "margin": lambda aux, batch: aux["error"] - batch[1],
    }


@pytest.mark.parametrize("rows, micro_batches", [(EXAMPLES, 1), (EXAMPLES, 2), (13, 1)])
def test_objective_equals_one_device(strategy, rows, micro_batches):
    options = {"loss": None, "objective": regularized, "metrics": regularized_metrics()}
    trainer = trainer_of(strategy, optax.sgd(0.1), **options)
    fitted = fit(trainer, rows=rows, steps=1, micro_batches=micro_batches)
    w, x, y = MODEL[0](None, X), X[:rows], Y[:rows]
    loss, grad = jax.value_and_grad(lambda w: jnp.mean(regularized(w, (x, y), None, MODEL[1])[0]))(w)
    assert_close(fitted.state.params, w - 0.1 * grad)
    error = np.abs(MODEL[1](w, x) - y)
    expected = {
        "loss": loss,
        "error": error.mean(),
        "penalty": np.square(w).sum(),
        "both": np.square(error).mean(),
        "margin": (error - y).mean(),
    }
    row = fitted.history.rows[0]
    assert_close({name: row[name] for name in expected}, expected)
    evaluated = trainer.evaluate(trainer.init(x), (x, y), batch_size=EXAMPLES)
    assert_close({name: evaluated[name] for name in expected}, expected)


def test_objective_of_dicts_applies_the_model_to_some_entries_with_the_weights_of_examples(two):
    def objective(params, batch, key, apply, weights):
        outputs = apply(params, batch["x"])
        assert weights.shape == outputs.shape
        return optax.squared_error(outputs, batch["y"])

    trainer = trainer_of(two, optax.sgd(0.1), loss=None, objective=objective)
    data = {"y": Y[:13], "x": X[:13]}
    fitted = trainer.fit(data, batch_size=EXAMPLES, steps=2, shuffle=False, progress="off")
    expected = fit(trainer_of(two, optax.sgd(0.1)), rows=13, steps=2)
    assert_close(fitted.state.params, expected.state.params)


def test_contrastive_objective_compares_the_examples_of_all_replicas(strategy):
    def objective(params, batch, key, apply):
        a, b = batch
        first, second = apply(params, a), apply(params, b)
        others = jdist.all_gather(second, axis=0)
        labels = jdist.replica_id() * len(a) + jnp.arange(len(a))
        return optax.softmax_cross_entropy_with_integer_labels(first @ others.T, labels)

    model = (lambda key, x: jnp.ones((x.shape[-1], 4)) * jnp.arange(4), lambda w, x: jnp.tanh(x @ w))
    fitted = []
    for place in (strategy, one()):
        trainer = jdist.Trainer(model, optax.sgd(0.1), objective=objective, strategy=place)
        fitted.append(trainer.fit((X, X[::-1].copy()), batch_size=EXAMPLES, steps=1, shuffle=False, progress="off"))
    np.testing.assert_allclose(fitted[0].history.losses[1], fitted[1].history.losses[1], rtol=1e-5)


def test_objective_applies_the_model_several_times_with_its_state_and_different_keys(two):
    class Noisy(nn.Module):
        @nn.compact
        def __call__(self, x, train):
            calls = self.variable("kept", "calls", lambda: jnp.float32(0))
            if train and not self.is_initializing():
                calls.value += 1
            return nn.Dense(1)(x)[:, 0] + jax.random.normal(self.make_rng("dropout"), (len(x),))

    def objective(params, batch, key, apply):
        a, b, c = apply(params, batch[0]), apply(params, batch[0]), jax.random.normal(key, (len(batch[0]),))
        return jnp.square(a), {"equal": jnp.abs(a - b) < 1e-3, "same_key": jnp.abs(a - b - c) < 1e-3}

    trainer = trainer_of(two, optax.sgd(0.0), Noisy(), None, objective=objective, metrics=["equal", "same_key"])
    fitted = fit(trainer, steps=1)
    assert fitted.history.rows[0]["equal"] < 0.2 and float(fitted.state.model_state["kept"]["calls"]) == 2


TOKENS = np.random.default_rng(1).integers(0, 5, (24, 6)).astype(np.int32)
MASK = (np.arange(6) < np.random.default_rng(2).integers(0, 7, 24)[:, None]).astype(np.float32)
MASK[:8] = 0  # all examples of the first of three replicas
TABLE = np.random.default_rng(3).normal(size=(5, 5)).astype(np.float32)
LANGUAGE = (lambda key, tokens: jnp.asarray(TABLE), lambda table, tokens: table[tokens])
BATCH = {"ids": TOKENS, "next": np.roll(TOKENS, -1, 1), "mask": MASK}


def token_losses(params, batch, key, apply):
    logits = apply(params, batch["ids"])
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["next"])
    return (losses, batch["mask"]), {"accuracy": (logits, batch["next"]), "length": batch["mask"].sum(1)}


def token_means(params, rows):
    """Returns the means over the tokens of some examples with their weights, on one device: the loss and the accuracy."""
    logits, next_tokens, mask = params[TOKENS[:rows]], BATCH["next"][:rows], MASK[:rows]
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, next_tokens)
    return jnp.vdot(losses, mask) / mask.sum(), jnp.vdot(jnp.argmax(logits, -1) == next_tokens, mask) / mask.sum()


def fit_tokens(strategy, objective=token_losses, optimizer=None, rows=24, model=LANGUAGE, metrics=(), **options):
    trainer = jdist.Trainer(
        model, optimizer or optax.sgd(0.5), objective=objective, metrics=dict(metrics), strategy=strategy
    )
    options = {"batch_size": 24, "steps": 1, "shuffle": False, "progress": "off", **options}
    return trainer, trainer.fit({name: x[:rows] for name, x in BATCH.items()}, **options)


@pytest.mark.parametrize("rows, micro_batches", [(24, 1), (24, 2), (13, 1), (13, 2)])
def test_objective_with_weights_per_token_equals_one_device(strategy, rows, micro_batches):
    metrics = {"accuracy": jdist.metrics.Accuracy(), "length": jdist.metrics.Mean()}
    trainer, fitted = fit_tokens(strategy, rows=rows, micro_batches=micro_batches, metrics=metrics)
    (loss, accuracy), grads = jax.value_and_grad(token_means, has_aux=True)(jnp.asarray(TABLE), rows)
    assert_close(fitted.state.params, TABLE - 0.5 * grads)
    expected = {"loss": loss, "accuracy": accuracy, "length": MASK[:rows].sum(1).mean()}
    assert_close({name: fitted.history.rows[0][name] for name in expected}, expected)
    assert_close(fitted.history.losses[1], [loss])
    data = {name: x[:rows] for name, x in BATCH.items()}
    evaluated = trainer.evaluate(trainer.init(TOKENS), data, batch_size=8)
    assert_close({name: evaluated[name] for name in expected}, expected)


@pytest.mark.parametrize("micro_batches", [1, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", ["lbfgs", "every", "exact"])
def test_weights_per_token_with_optimizers_and_virtual_replicas(name, micro_batches):
    optimizer = {
        "lbfgs": optax.lbfgs(),
        "every": jdist.sync.every(optax.chain(jdist.sync.mean(), optax.sgd(0.5)), 2),
    }.get(name, optax.sgd(0.5))
    virtual = {"virtual_replicas": 6} if name == "exact" else {}
    place = jdist.MirroredStrategy(["cpu:0", "cpu:1", "cpu:2"], **virtual)
    options = {"optimizer": optimizer, "steps": 2, "batch_size": 12, "micro_batches": micro_batches, "rows": 23}
    (_, fitted), (_, expected) = fit_tokens(place, **options), fit_tokens(one(), **options)
    assert_close(fitted.state.params, expected.state.params)
    if name == "every":  # the weights of the steps are their numbers of tokens
        assert_close(fitted.state.params, TABLE - 0.5 * jax.grad(lambda w: token_means(w, 23)[0])(jnp.asarray(TABLE)))


@pytest.mark.filterwarnings("ignore::jdist.LocalCountWarning")  # its objective divides by the tokens of a replica
def test_batch_without_tokens_changes_nothing_and_has_no_loss(two):
    def objective(params, batch, key, apply):
        losses = token_losses(params, batch, key, apply)[0][0]
        return losses / batch["mask"].sum(), batch["mask"]  # NaN and infinity without tokens

    trainer, fitted = fit_tokens(two, objective, batch_size=8, steps=1)
    assert_close(fitted.state.params, TABLE)
    assert (
        np.isnan(fitted.history.losses[1]).all() and int(fitted.state.step) == 1 and fitted.stop_reason != "non_finite"
    )


def test_model_that_adds_losses_with_weights_per_token(two):
    class Penalized(nn.Module):
        @nn.compact
        def __call__(self, tokens):
            table = self.param("table", lambda key: jnp.asarray(TABLE))
            self.sow("losses", "penalty", 0.1 * jnp.square(table).sum())
            return table[tokens]

    _, fitted = fit_tokens(two, model=Penalized())
    total = lambda w: token_means(w, 24)[0] + 0.1 * jnp.square(w).sum()
    loss, grads = jax.value_and_grad(total)(jnp.asarray(TABLE))
    assert_close(fitted.history.losses[1], [loss])
    assert_close(fitted.state.params["table"], TABLE - 0.5 * grads)
    with pytest.raises(ValueError, match="weights of its losses, and the model adds losses.*Use `micro_batches=1`"):
        fit_tokens(two, model=Penalized(), micro_batches=2)


WRONG_WEIGHTS = {
    "shape": (
        lambda losses, mask: (losses, mask[:, :-1]),
        ValueError,
        r"`objective` returned losses float32\[12,6\] with weights float32\[12,5\]: the dimensions of the weights must be",
    ),
    "rank": (
        lambda losses, mask: (losses.mean(1), mask),
        ValueError,
        r"losses float32\[12\] with weights float32\[12,6\].*Auxiliary values are a dict",
    ),
    "type": (
        lambda losses, mask: ((losses, "mean"), {}),
        TypeError,
        "`objective` returned weights of its losses that are not an array of numbers, got str",
    ),
    "dtype": (
        lambda losses, mask: (losses, jax.random.split(jax.random.key(0), mask.shape)),
        TypeError,
        r"not an array of numbers, got key<fry>\[12,6\]",
    ),
}


@pytest.mark.parametrize("result, error, message", WRONG_WEIGHTS.values(), ids=WRONG_WEIGHTS)
def test_wrong_weights_of_losses_raise(result, error, message, two):
    def objective(*args):
        (losses, mask), _ = token_losses(*args)
        return result(losses, mask)

    with pytest.raises(error, match=message):
        fit_tokens(two, objective)


WRONG_OBJECTIVES = {
    "both": (dict(loss=optax.squared_error, objective=regularized), TypeError, "either `loss` or `objective`"),
    "not_a_function": (
        dict(objective="mse"),
        TypeError,
        r"must be a function `fn\(params, batch, key, apply\)`, got 'mse'",
    ),
    "few_parameters": (
        dict(objective=lambda params, batch: 0),
        TypeError,
        "is called as `fn.params, batch, key, apply.`",
    ),
    "eval_params": (dict(eval_params=3), TypeError, "`eval_params` must be a function"),
    "remat": (dict(remat="all"), TypeError, "`remat` must be a boolean or a policy"),
    "step": (dict(optimizer=None, step=3), TypeError, r"`step` must be a function"),
    "optimizer_and_step": (dict(step=lambda state, batch: state), TypeError, "either `optimizer` or `step`"),
}


@pytest.mark.parametrize("options, error, message", WRONG_OBJECTIVES.values(), ids=WRONG_OBJECTIVES)
def test_wrong_arguments_raise(options, error, message, two):
    with pytest.raises(error, match=message):
        trainer_of(two, **{"optimizer": optax.sgd(0.1), "loss": None, **options})


WRONG_RESULTS = {
    "mean": (
        lambda params, batch, key, apply: apply(params, batch[0]).mean(),
        {},
        ValueError,
        "`objective` returned float32",
    ),
    "no_aux": (
        lambda params, batch, key, apply: apply(params, batch[0]),
        ["kl"],
        TypeError,
        "the auxiliary value 'kl'.*None",
    ),
    "other_aux": (
        lambda params, batch, key, apply: (apply(params, batch[0]), {"rate": 1.0}),
        ["kl"],
        TypeError,
        "the auxiliary value 'kl' of the objective or the step, got a dict with 'rate'",
    ),
}


@pytest.mark.parametrize("objective, metrics, error, message", WRONG_RESULTS.values(), ids=WRONG_RESULTS)
def test_wrong_results_of_an_objective_raise(objective, metrics, error, message, two):
    with pytest.raises(error, match=message):
        fit(trainer_of(two, optax.sgd(0.1), loss=None, objective=objective, metrics=metrics))


def test_objective_that_uses_parameters_before_the_model_needs_a_state(two):
    def objective(params, batch, key, apply):
        penalty = jnp.square(params).sum()
        return optax.squared_error(apply(params, batch["x"]), batch["y"]) + penalty

    trainer = trainer_of(two, optax.sgd(0.1), loss=None, objective=objective)
    options = {"batch_size": EXAMPLES, "progress": "off"}
    with pytest.raises(ValueError, match=r"uses `params` before it calls `apply`.*state=trainer.init\(inputs\)"):
        trainer.fit({"x": X, "y": Y}, **options)
    assert trainer.fit({"x": X, "y": Y}, state=trainer.init(X), **options).steps == 1


def test_model_is_initialized_with_the_inputs_of_its_first_call(two):
    def objective(params, batch, key, apply):
        return optax.squared_error(apply(params, batch[1]), batch[0])

    trainer = trainer_of(two, optax.sgd(0.1), loss=None, objective=objective)
    fitted = trainer.fit((Y, X), batch_size=EXAMPLES, steps=2, shuffle=False, progress="off")
    assert_close(fitted.state.params, fit(trainer_of(two, optax.sgd(0.1)), steps=2).state.params)


# -- steps of the user -------------------------------------------------------------------------------------------------


def two_optimizers(strategy, as_dict=False):
    """Returns a state and a step with two parameters and two optimizers."""
    first, second = optax.sgd(0.1), optax.adam(0.1)

    def make(key):
        w, b = jnp.zeros(3), jnp.zeros(())
        return {"step": jnp.int32(0), "w": w, "b": b, "first": first.init(w), "second": second.init(b), "key": key}

    def step(state, batch, weights):
        def losses(params, x, y):
            return optax.squared_error(x @ params[0] + params[1], y)

        loss, grads = jdist.value_and_grad(losses, weights=weights)((state["w"], state["b"]), *batch)
        loss, (w_grad, b_grad) = jdist.all_reduce("mean", (loss, grads))
        w_updates, first_state = first.update(w_grad, state["first"])
        b_updates, second_state = second.update(b_grad, state["second"])
        new_state = {
            "step": state["step"] + 1,
            "w": state["w"] + w_updates,
            "b": state["b"] + b_updates,
            "first": first_state,
            "second": second_state,
            "key": jax.random.split(state["key"])[0],
        }
        return new_state, {"loss": loss, "bias": state["b"], "target": batch[1]} if as_dict else loss

    return strategy.init(make, jax.random.key(0)), step


@pytest.mark.parametrize("as_dict", [False, True])
def test_step_of_the_user_runs_in_the_loop_of_the_trainer(strategy, as_dict):
    fitted = []
    for place in (strategy, one()):
        state, step = two_optimizers(place, as_dict)
        trainer = jdist.Trainer(step=step, strategy=place, metrics=["bias", "target"] if as_dict else None)
        fitted.append(fit(trainer, rows=13, state=state, steps=4))
    a, b = fitted
    assert_close(a.state["w"], b.state["w"])
    assert a.steps == int(a.state["step"]) == 4 and len(a.history.losses) == 4
    assert a.history.losses[4] < a.history.losses[1]
    if as_dict:
        assert a.history["target"][-1] == pytest.approx(Y[:13].mean(), rel=1e-5)
    assert a.proof is not None


def test_step_of_the_user_resumes_bitwise_equal(two, tmp_path):
    state, step = two_optimizers(two)
    trainer = jdist.Trainer(step=step, strategy=two)
    options = {"batch_size": 8, "shuffle": True}
    complete = fit(trainer, state=state, steps=6, **options)
    with jdist.Checkpointer(tmp_path, every=2) as checkpointer:
        callbacks = [jdist.callbacks.Checkpoint(checkpointer)]
        fit(trainer, state=two_optimizers(two)[0], steps=4, callbacks=callbacks, **options)
        resumed = fit(trainer, state=two_optimizers(two)[0], steps=6, resume=checkpointer, **options)
    assert resumed.steps == 6
    np.testing.assert_array_equal(complete.state["w"], resumed.state["w"])


@pytest.mark.parametrize("non_finite, expected", [("stop", (1, 1)), ("skip", (6, 6)), ("keep", (6, 6))])
def test_step_of_the_user_with_a_loss_that_is_not_finite(non_finite, expected, two):
    state, step = two_optimizers(two)
    trainer = jdist.Trainer(step=step, strategy=two, non_finite=non_finite)
    y = Y.copy()
    y[10] = np.nan
    fitted = trainer.fit((X, y), batch_size=8, shuffle=False, state=state, progress="off")
    assert (fitted.steps, int(fitted.state["step"])) == expected
    assert np.isfinite(fitted.state["w"]).all() == (non_finite != "keep")


def test_step_of_the_user_with_a_model_evaluates(two):
    optimizer = optax.sgd(0.1)

    def step(state, batch):
        losses = lambda w, x, y: optax.squared_error(MODEL[1](w, x), y)
        loss, grads = jdist.value_and_grad(losses)(state.params, *batch)
        updates, opt_state = optimizer.update(jdist.all_reduce("mean", grads), state.opt_state)
        params = optax.apply_updates(state.params, updates)
        return dataclasses.replace(state, step=state.step + 1, params=params, opt_state=opt_state), loss

    expected = fit(trainer_of(two, optimizer), validation_data=(X, Y))
    trainer = jdist.Trainer(MODEL, loss=optax.squared_error, step=step, strategy=two)
    state = two.init(lambda key: jdist.TrainState.create(MODEL[0](key, X), optimizer), jax.random.key(0))
    fitted = fit(trainer, state=state, validation_data=(X, Y))
    assert_close(fitted.state.params, expected.state.params)
    assert fitted.history["val_loss"] == pytest.approx(expected.history["val_loss"], rel=1e-5)
    assert_close(list(fitted.history.losses.values()), list(expected.history.losses.values()))


WRONG_STEPS = {
    "one_result": (lambda state, batch: state, TypeError, "must return a pair of the new state and a loss"),
    "no_loss": (lambda state, batch: (state, {"a": 1}), TypeError, "a dict with the key `loss`"),
    "same_step": (lambda state, batch: (state, batch[0].sum()), TypeError, "Return `step=state.step . 1`"),
}


@pytest.mark.parametrize("step, error, message", WRONG_STEPS.values(), ids=WRONG_STEPS)
def test_wrong_results_of_a_step_raise(step, error, message, two):
    state = two.put({"step": np.int32(0)})
    with pytest.raises(error, match=message):
        fit(jdist.Trainer(step=step, strategy=two), state=state)


def test_wrong_states_and_data_of_a_step_raise(two):
    trainer = jdist.Trainer(step=lambda state, batch: (state, 0.0), strategy=two)
    with pytest.raises(TypeError, match=r"needs the state to start with: `fit\(data, state=strategy.init"):
        fit(trainer)
    with pytest.raises(TypeError, match="as the attribute or the key `step`; dict has no `step`"):
        fit(trainer, state=two.put({"w": np.zeros(3)}))
    padded = two.distribute_dataset((X, Y), EXAMPLES, remainder="pad")
    with pytest.raises(TypeError, match=r"pads its last batch.*`def step\(state, batch, weights\)`"):
        trainer.fit(padded, state=two.put({"step": np.int32(0)}), progress="off")
    with pytest.raises(TypeError, match="This trainer has no model: it was created with `step=`"):
        trainer.predict(two.init(lambda: jdist.TrainState.create({}, optax.sgd(0.1))), X, batch_size=8)


# -- rematerialization -------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("remat", [True, jax.checkpoint_policies.nothing_saveable])
def test_remat_changes_the_program_and_not_the_results(remat, two):
    trainer = trainer_of(two, optax.sgd(0.1), remat=remat)
    assert_close(fit(trainer).state.params, fit(trainer_of(two, optax.sgd(0.1))).state.params)

    def step(w, batch):
        gradient = lambda **options: jdist.value_and_grad(lambda w, x: jnp.tanh(jnp.sin(x @ w)), **options)
        return w - jdist.all_reduce("mean", gradient(remat=remat)(w, batch)[1]), None

    assert "remat" in str(jax.make_jaxpr(lambda w: step(w, X)[0])(np.zeros(3, np.float32)))


# -- the trained model -------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_trained_nnx_module_comes_back(two):
    class Net(nnx.Module):
        def __init__(self, rngs):
            self.dense, self.norm = nnx.Linear(3, 1, rngs=rngs), nnx.BatchNorm(1, rngs=rngs)
            self.dropout = nnx.Dropout(0.5, rngs=rngs)

        def __call__(self, x):
            return self.dropout(self.norm(self.dense(x)))[:, 0]

    module = Net(nnx.Rngs(0))
    module.eval()
    before = jax.tree.map(np.asarray, nnx.to_pure_dict(nnx.state(module, nnx.Not(nnx.RngState))))
    trainer = trainer_of(two, optax.sgd(0.1), module)
    fitted = fit(trainer)
    trained = trainer.model(fitted.state)
    assert_close(trained(X), trainer.predict(fitted.state, X, batch_size=EXAMPLES))
    assert np.abs(np.asarray(trained(X) - module(X))).max() > 0.01
    assert_close(nnx.to_pure_dict(nnx.state(module, nnx.Not(nnx.RngState))), before, rtol=0, atol=0)
    trained.train()
    assert trained(X).shape == (EXAMPLES,)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:__array__ implementation")  # of Keras, where it saves a model
def test_trained_keras_model_comes_back_and_can_be_saved(two, keras, tmp_path):
    layers = keras.layers
    model = keras.Sequential(
        [keras.Input((3,)), layers.Dense(4), layers.BatchNormalization(), layers.Dropout(0.5), layers.Dense(1)]
    )
    loss = lambda outputs, targets: optax.squared_error(outputs[:, 0], targets)
    trainer = trainer_of(two, optax.sgd(0.1), model, loss)
    before = np.asarray(model(X))
    fitted = fit(trainer)
    trained = trainer.model(fitted.state)
    expected = trainer.predict(fitted.state, X, batch_size=EXAMPLES)
    assert_close(trained(X), expected)
    assert_close(model(X), before, rtol=0, atol=0)
    trained.save(tmp_path / "x.keras")
    assert_close(keras.models.load_model(tmp_path / "x.keras")(X), expected)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:__array__ implementation")
def test_keras_model_that_cannot_be_copied_raises_with_the_fix(two, keras):
    class Custom(keras.Model):
        def __init__(self, units):
            super().__init__()
            self.dense = keras.layers.Dense(units)

        def call(self, x):
            return self.dense(x)

    model = Custom(1)
    model(X)
    trainer = trainer_of(
        two, optax.sgd(0.1), model, lambda outputs, targets: optax.squared_error(outputs[:, 0], targets)
    )
    state = fit(trainer).state
    with pytest.raises(TypeError, match=r"cannot be copied, because Keras cannot serialize it.*Define `get_config`"):
        trainer.model(state)
    values = {**jax.device_get(state.params), **jax.device_get(state.model_state)}
    keras.utils.clear_session()
    model = Custom(1)
    model(X)
    for variable in model.variables:  # the other way that the message names
        variable.assign(values[variable.path])
    assert_close(model(X), trainer.predict(state, X, batch_size=EXAMPLES))


def test_trained_variables_of_linen_come_back(two):
    module = nn.Sequential([nn.Dense(4), nn.BatchNorm(use_running_average=True), nn.Dense(1)])
    loss = lambda outputs, targets: optax.squared_error(outputs[:, 0], targets)
    trainer = trainer_of(two, optax.sgd(0.1), module, loss)
    fitted = fit(trainer)
    variables = trainer.model(fitted.state)
    assert set(variables) == {"params", "batch_stats"}
    assert_close(module.apply(variables, X), trainer.predict(fitted.state, X, batch_size=EXAMPLES))
    assert all(leaf.devices() == {jax.devices()[0]} for leaf in jax.tree.leaves(variables))
