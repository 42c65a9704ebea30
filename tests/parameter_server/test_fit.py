"""`Trainer` under `ParameterServerStrategy`: the same results without staleness, and no batch lost with it."""

import jax
import numpy as np
import optax
import pytest
from flax import linen, nnx

import jdist

RNG = np.random.default_rng(0)
X = RNG.normal(size=(200, 8)).astype(np.float32)
Y = (X.sum(1) > 0).astype(np.int32)
LOSS = optax.softmax_cross_entropy_with_integer_labels


class Classifier(linen.Module):
    @linen.compact
    def __call__(self, x, train=False):
        x = linen.relu(linen.Dense(16, use_bias=False)(x))
        x = linen.BatchNorm(use_running_average=not train)(x)
        x = linen.Dropout(0.2, deterministic=not train)(x)
        return linen.Dense(2)(x)


def make_trainer(strategy, model=None, **options):
    metrics = {
        "accuracy": lambda outputs, targets: (outputs.argmax(-1) == targets) * 1.0,
        "nnx": nnx.metrics.Accuracy(),
    }
    model = Classifier() if model is None else model
    return jdist.Trainer(model, optax.adam(1e-2), LOSS, metrics=metrics, strategy=strategy, **options)


def fit(strategy, *, data=(X, Y), epochs=3, **options):
    return make_trainer(strategy).fit(data, batch_size=24, epochs=epochs, progress="off", **options)


def test_without_staleness_fit_equals_one_device():
    one = fit(jdist.OneDeviceStrategy("cpu:0"), validation_data=(X, Y))
    server = fit(jdist.ParameterServerStrategy(workers=2, max_staleness=0), validation_data=(X, Y))
    assert one.steps == server.steps == 27
    for row, other in zip(one.history.rows, server.history.rows, strict=True):
        for name in ("loss", "accuracy", "val_loss", "val_accuracy"):
            assert row[name] == pytest.approx(other[name], rel=1e-3), name
    for name in ("accuracy", "val_accuracy"):
        assert server.history[name.replace("accuracy", "nnx")] == pytest.approx(server.history[name])
    assert server.proof.per_replica == one.proof.per_replica


@pytest.mark.slow
def test_every_batch_of_an_asynchronous_fit_is_one_update():
    strategy = jdist.ParameterServerStrategy(workers=3, servers=2)
    result = fit(strategy, epochs=8, steps_per_call=2)
    assert result.steps == int(result.state.step) == 72
    assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(result.state))
    assert result.history.rows[-1]["accuracy"] > 0.8
    trainer = make_trainer(strategy)
    assert trainer.evaluate(result.state, (X, Y), batch_size=24)["examples"] == 200
    assert trainer.predict(result.state, X, batch_size=24).shape == (200, 2)


@pytest.mark.slow
def test_callbacks_read_the_state_and_a_run_resumes(tmp_path):
    strategy = jdist.ParameterServerStrategy(workers=2, max_staleness=0)
    whole = fit(strategy, epochs=4)
    with jdist.Checkpointer(tmp_path) as checkpointer:
        callbacks = [
            jdist.callbacks.Checkpoint(checkpointer),
            jdist.callbacks.EMA(0.9),
            jdist.callbacks.EarlyStopping("loss", patience=9, restore_best=True),
        ]
        fit(strategy, epochs=2, callbacks=callbacks)
    resumed = fit(strategy, epochs=4, resume=tmp_path, callbacks=callbacks[1:])
    for one, other in zip(jax.tree.leaves(whole.state.params), jax.tree.leaves(resumed.state.params), strict=True):
        assert one.tobytes() == other.tobytes()
    on_mirrored = fit(jdist.MirroredStrategy(["cpu:0", "cpu:1"]), epochs=4, resume=tmp_path, callbacks=callbacks[1:])
    assert on_mirrored.steps == 36


def test_loss_that_is_not_finite_stops_training():
    data = X.copy()
    data[30] = np.nan
    result = fit(jdist.ParameterServerStrategy(workers=2), data=(data, Y), shuffle=False)
    assert "not finite" in result.stop_reason or "nan" in result.stop_reason
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(result.state.params))


def test_nnx_module_and_optimizer_are_a_state():
    strategy = jdist.ParameterServerStrategy(workers=2, servers=2, max_staleness=0)

    def make():
        model = nnx.Linear(8, 2, rngs=nnx.Rngs(0))
        return model, nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)

    def step(state, x, y):
        model, optimizer = state
        loss, grads = jdist.value_and_grad(lambda model, x, y: LOSS(model(x), y))(model, x, y)
        optimizer.update(model, jdist.all_reduce("mean", grads))
        return (model, optimizer), jdist.all_reduce("mean", loss)

    losses = {}
    for one in (strategy, jdist.OneDeviceStrategy("cpu:0")):
        state, compiled = one.init(make), one.step(step)
        for x, y in one.distribute_dataset((X, Y), batch_size=20):
            state, loss = compiled(state, x, y)
        losses[type(one)] = float(loss), jdist.read_values(state)[0].kernel[...].sum().item()
    assert losses[jdist.ParameterServerStrategy] == pytest.approx(losses[jdist.OneDeviceStrategy], rel=1e-5)
