"""Modules of flax nnx as states: in steps, `init`, `run`, `put`, checkpoints and policies; without `nnx.split`."""

import gc
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jdist
from jdist import sync

from laws import STRATEGIES, traces_of_a_step

X = np.random.default_rng(0).normal(size=(24, 3)).astype(np.float32)
Y = X.sum(axis=1)


class Net(nnx.Module):
    """Two layers with batch norm and dropout."""

    def __init__(self, rngs, rate=0.0):
        self.layers = nnx.List([nnx.Linear(3, 4, rngs=rngs), nnx.Linear(4, 1, rngs=rngs)])
        self.norm = nnx.BatchNorm(4, momentum=0.5, axis_name="replica", rngs=rngs)
        self.dropout = nnx.Dropout(rate, rngs=rngs)

    def __call__(self, x):
        return self.layers[1](self.dropout(nnx.tanh(self.norm(self.layers[0](x)))))[..., 0]


def make_state(optimizer=None, rate=0.0):
    model = Net(nnx.Rngs(0), rate)
    return {"model": model, "optimizer": nnx.Optimizer(model, optimizer or optax.sgd(0.1), wrt=nnx.Param)}


def loss_of(model, x, y):
    return jnp.mean((model(x) - y) ** 2)


def train_step(state, x, y):
    loss, grads = nnx.value_and_grad(loss_of)(state["model"], x, y)
    loss, grads = jdist.all_reduce("mean", (loss, grads))
    state["optimizer"].update(state["model"], grads)
    return state, loss


def add_one(model, *_):
    """A step that changes one parameter in place."""
    model.layers[0].bias[...] += 1
    return model, None


def values(tree):
    return jax.tree.map(np.asarray, nnx.to_pure_dict(nnx.state(tree, nnx.Not(nnx.RngState))))


def assert_close(a, b):
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-5), values(a), values(b))


def plain_steps(num_steps, optimizer=None):
    """Returns the state after steps of plain JAX on the global batch."""
    graph, arrays = nnx.split(make_state(optimizer))

    @jax.jit
    def step(arrays):
        def one(arrays):
            state, loss = train_step(nnx.merge(graph, arrays), X, Y)
            return nnx.state(state), loss

        arrays, loss = jax.vmap(one, axis_name="replica", out_axes=0)(jax.tree.map(lambda x: x[None], arrays))
        return jax.tree.map(lambda x: x[0], arrays), loss[0]

    for _ in range(num_steps):
        arrays, loss = step(arrays)
    return nnx.merge(graph, arrays), loss


# Steps.


def test_modules_train_as_in_plain_jax(strategy):
    step, state = strategy.step(train_step), strategy.init(make_state)
    for _ in range(2):
        state, loss = step(state, *strategy.split((X, Y)))
    reference, reference_loss = plain_steps(2)
    assert_close(state["model"], reference["model"])
    np.testing.assert_allclose(loss, reference_loss, rtol=1e-4)
    assert isinstance(state["model"], Net)
    assert not np.allclose(state["model"].norm.mean[...], 0)


def test_step_may_return_a_new_module(two):
    def step(model, x):
        graph, params, rest = nnx.split(model, nnx.Param, ...)
        return nnx.merge(graph, jax.tree.map(lambda p: p + jdist.all_reduce("mean", x.sum()), params), rest), None

    model = two.put(Net(nnx.Rngs(0)))
    before = np.asarray(model.layers[0].bias[...])
    new, _ = two.step(step)(model, two.split(X))
    np.testing.assert_allclose(new.layers[0].bias[...], before + X.sum() / 2, rtol=1e-5)


# Donation and identity.


def test_donated_modules_are_updated_in_place_by_one_trace(two):
    traces = []

    def counted(*args):
        traces.append(1)
        return train_step(*args)

    state = two.put(make_state())
    model, optimizer, kernel = state["model"], state["optimizer"], state["model"].layers[0].kernel
    old = kernel[...]
    step = two.step(counted)
    for _ in range(3):
        state, _ = step(state, *two.split((X, Y)))
    assert state["model"] is model and state["optimizer"] is optimizer and model.layers[0].kernel is kernel
    assert old.is_deleted() and not kernel[...].is_deleted()
    assert int(optimizer.step[...]) == 3 and len(traces) == traces_of_a_step(two)
    assert "state['model'].layers[0].kernel" in step.proof.replicated


def test_modules_of_a_step_without_donation_are_not_changed(two):
    model = two.put(Net(nnx.Rngs(0)))
    new, _ = two.step(donate=False)(add_one)(model)
    np.testing.assert_array_equal(model.layers[0].bias[...], 0)
    np.testing.assert_array_equal(new.layers[0].bias[...], 1)


@pytest.mark.filterwarnings("ignore::jdist.RetraceWarning")
def test_changes_on_the_host_between_steps_are_noticed(two):
    def step(model, x):
        mode = "train" if not model.dropout.deterministic else "eval"
        modes.append((mode, "new" in vars(model)))
        return model, model.layers[0].bias[0]

    modes, step, model = [], two.step(step), two.put(Net(nnx.Rngs(0)))
    for _ in range(2):
        model, _ = step(model, two.split(X))
    model.eval()
    model, _ = step(model, two.split(X))
    model.layers[0].bias[...] += 5
    model, bias = step(model, two.split(X))
    assert float(bias) == 5
    model.layers[0] = two.put(nnx.Linear(3, 4, rngs=nnx.Rngs(1), bias_init=nnx.initializers.ones))
    model, bias = step(model, two.split(X))
    assert float(bias) == 1
    model.train()
    model.new = two.put(nnx.Param(jnp.zeros(2)))
    model, _ = step(model, two.split(X))
    assert list(dict.fromkeys(modes)) == [("train", False), ("eval", False), ("train", True)]
    assert len(modes) == 3 * traces_of_a_step(two)


def test_state_is_freed_with_its_modules(two):
    step, model = two.step(add_one), two.put(Net(nnx.Rngs(0)))
    for _ in range(2):
        model, _ = step(model)
    reference = weakref.ref(model)
    del model
    gc.collect()
    assert reference() is None


# Shared references.


class Tied(nnx.Module):
    """An encoder and a decoder with one kernel."""

    def __init__(self, rngs):
        self.encoder, self.decoder = nnx.Linear(3, 3, rngs=rngs), nnx.Linear(3, 3, rngs=rngs)
        self.decoder.kernel = self.encoder.kernel

    def __call__(self, x):
        return self.decoder(self.encoder(x))


@pytest.mark.parametrize("create", [pytest.param("init", marks=pytest.mark.slow), "put"])
def test_tied_weights_stay_tied(two, create, tmp_path):
    def step(state, x):
        model, optimizer = state
        grads = nnx.grad(lambda model: jnp.mean((model(x) - x) ** 2))(model)
        optimizer.update(model, jdist.all_reduce("mean", grads))
        return state, None

    def make():
        model = Tied(nnx.Rngs(0))
        return model, nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)

    state = two.init(make) if create == "init" else two.put(make())
    assert state[0].decoder.kernel is state[0].encoder.kernel
    step = two.step(step)
    for _ in range(2):
        state, _ = step(state, two.split(X))
    model, optimizer = make()
    for _ in range(2):
        optimizer.update(model, nnx.grad(lambda model: jnp.mean((model(X) - X) ** 2))(model))
    assert state[0].decoder.kernel is state[0].encoder.kernel
    assert_close(state[0], model)
    assert len([name for name in step.proof.replicated if "kernel" in name and name.startswith("state[0]")]) == 1
    if create == "put":
        with jdist.Checkpointer(tmp_path) as checkpointer:
            checkpointer.save(1, state)
            restored = checkpointer.restore(two, like=two.put(make())).state
        assert restored[0].decoder.kernel is restored[0].encoder.kernel
        assert_close(restored[0], model)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_optimizer_that_contains_the_model(two):
    def step(state, x, y):
        grads = nnx.grad(loss_of)(state["model"], x, y)
        state["optimizer"].update(jdist.all_reduce("mean", grads))
        return state, None

    def make():
        model = Net(nnx.Rngs(0))
        return {"model": model, "optimizer": nnx.ModelAndOptimizer(model, optax.sgd(0.1))}

    state = two.init(make)
    state, _ = two.step(step)(state, *two.split((X, Y)))
    assert state["model"].layers[0].kernel is state["optimizer"].model.layers[0].kernel
    assert_close(state["model"], plain_steps(1)[0]["model"])


# Steps that are refused.


def local_gradients(model, x, y):
    grads = nnx.grad(loss_of)(model, x, y)
    nnx.update(model, jax.tree.map(lambda p, g: p - 0.1 * g, nnx.state(model, nnx.Param), grads))
    return model, None


def returns_a_copy(model, x, y):
    old = nnx.clone(model)
    model(x)
    return old, None


def changes_the_mode(model, x, y):
    model.eval()
    return model, None


def adds_a_variable(model, x, y):
    model.new = nnx.Param(jnp.ones(2))
    return model, None


REFUSED = {
    "proof": (local_gradients, 0.0, jdist.NotMirroredError, r"^state\.layers\[0\]\.(bias|kernel) is not proved"),
    "copy": (
        returns_a_copy,
        0.5,
        ValueError,
        r"step changes state\.dropout\.rngs\.count, state\.norm\.mean.* in place, and returns a",
    ),
    "mode": (
        changes_the_mode,
        0.0,
        TypeError,
        r"changes state\.dropout\.deterministic from False to True\. .*`model\.train\(\)`",
    ),
    "variable": (adds_a_variable, 0.0, TypeError, r"structure of the state: state\.new is new"),
}


@pytest.mark.parametrize("fn, rate, error, message", REFUSED.values(), ids=REFUSED)
def test_error_of_a_refused_step_names_the_variable(fn, rate, error, message, two):
    with pytest.raises(error, match=message):
        two.step(fn)(two.put(Net(nnx.Rngs(0), rate)), *two.split((X, Y)))


def test_change_of_an_input_that_is_not_returned_is_an_error(two):
    with pytest.raises(ValueError, match=r"function changes teacher\.norm\.mean, .* in place, and does not return it"):
        two.step(lambda state, teacher, x: (state, teacher(x)))(two.put(1.0), two.put(Net(nnx.Rngs(0))), two.split(X))


def test_donated_module_of_another_program_is_named(two):
    model = two.put(Net(nnx.Rngs(0)))
    model.layers[0].kernel[...].delete()
    with pytest.raises(ValueError, match=r"state\.layers\[0\]\.kernel was donated"):
        two.step(lambda model: (model, None))(model)


def test_change_in_run_must_be_returned(two):
    model = two.put(Net(nnx.Rngs(0)))

    def predict(model, x):
        return model(x)

    with pytest.raises(ValueError, match=r"changes model\.norm\.mean.*`model.eval\(\)`"):
        two.run(predict, (model, two.split(X)))
    model.eval()
    assert two.run(predict, (model, two.split(X))).values[0].shape == (12,)
    model.train()

    def statistics(model, x):
        model(x)
        return model

    assert not np.allclose(two.run(statistics, (model, two.split(X))).norm.mean[...], 0)
    np.testing.assert_array_equal(model.norm.mean[...], 0)

    def on_copy(model, x):
        return nnx.clone(model)(x)

    two.run(on_copy, (model, two.split(X)))


# Random numbers.


def test_replica_rngs_draw_other_masks_on_each_replica(two):
    def step(model, x):
        with jdist.replica_rngs(model):
            return model, model.dropout(jnp.ones((6, 50)))

    model = two.init(lambda: Net(nnx.Rngs(0), 0.5))
    key = np.asarray(jax.random.key_data(model.dropout.rngs.key[...]))
    step = two.step(step)
    model, first = step(model, two.split(X))
    model, second = step(model, two.split(X))
    assert not np.array_equal(*first.values) and not np.array_equal(first.values[0], second.values[0])
    np.testing.assert_array_equal(jax.random.key_data(model.dropout.rngs.key[...]), key)
    assert int(model.dropout.rngs.count[...]) == 2


def test_shared_masks_warn_of_replica_rngs(two):
    with pytest.warns(jdist.SharedRandomnessWarning, match=r"with jdist\.replica_rngs\(model\)"):
        two.step(lambda model, x: (model, model.dropout(x).mean()))(two.put(Net(nnx.Rngs(0), 0.5)), two.split(X))


def test_replica_rngs_without_keys_is_an_error():
    with pytest.raises(TypeError, match=r"found no `nnx\.RngKey`"), jdist.replica_rngs({"w": 1.0}):
        pass


# Gradients and policies.


def test_value_and_grad_of_a_module(two):
    def loss_fn(model, x, y):
        model.dropout(x)  # counts
        return (model.layers[1](nnx.tanh(model.layers[0](x)))[..., 0] - y) ** 2

    def step(state, x, y):
        with jdist.replica_rngs(state["model"]):
            loss, grads = jdist.value_and_grad(loss_fn, micro_batches=2)(state["model"], x, y)
        state["optimizer"].update(state["model"], jdist.all_reduce("mean", grads))
        return state, jdist.all_reduce("mean", loss)

    state, loss = two.step(step)(two.put(make_state(rate=0.5)), *two.split((X, Y)))
    assert int(state["model"].dropout.rngs.count[...]) == 2
    reference = make_state(rate=0.5)
    expected, grads = nnx.value_and_grad(lambda model: loss_fn(model, X, Y).mean())(reference["model"])
    reference["optimizer"].update(reference["model"], grads)
    assert_close(state["model"], reference["model"])
    np.testing.assert_allclose(loss, expected, rtol=1e-5)


def test_value_and_grad_of_a_module_returns_aux(two):
    def step(model, x):
        (loss, aux), grads = jdist.value_and_grad(lambda model, x: (model(x) ** 2, model.norm.mean[...]), has_aux=True)(
            model, x
        )
        return model, (jdist.all_reduce("mean", loss), aux, jdist.all_reduce("mean", grads))

    model, (_, mean, grads) = two.step(step)(two.put(Net(nnx.Rngs(0))), two.split(X))
    np.testing.assert_array_equal(mean, model.norm.mean[...])
    assert grads["layers"][0]["kernel"].shape == (3, 4)


def test_local_sgd_trains_a_module_per_replica_and_averages_them(two):
    def make(optimizer=None):
        model = nnx.Linear(3, 1, rngs=nnx.Rngs(0))
        return model, nnx.Optimizer(model, optimizer or sync.local_sgd(optax.sgd(0.1), every=2), wrt=nnx.Param)

    def step(state, x, y):
        model, optimizer = state
        optimizer.update(model, nnx.grad(lambda model: jnp.mean((model(x)[..., 0] - y) ** 2))(model))
        return state, None

    state, compiled = two.init(make), two.step(step)
    for _ in range(2):
        state, _ = compiled(state, *two.split((X, Y)))
    kernels = []
    for x, y in zip(np.split(X, 2), np.split(Y, 2), strict=True):
        expected = make(optax.sgd(0.1))
        step(step(expected, x, y)[0], x, y)
        kernels.append(expected[0].kernel[...])
    np.testing.assert_allclose(jdist.read_values(state[0]).kernel[...], np.mean(kernels, axis=0), rtol=1e-4)


# Several steps per call, checkpoints, weights, programs.


@pytest.mark.parametrize("name", ["mirrored_2", pytest.param("central_2", marks=pytest.mark.slow)])
def test_steps_per_call(name):
    strategy = STRATEGIES[name]()
    step = strategy.step(steps_per_call=2)(train_step)
    state, _ = step(strategy.put(make_state()), [strategy.split(X)] * 2, [strategy.split(Y)] * 2)
    assert_close(state["model"], plain_steps(2)[0]["model"])


def test_checkpoint_stores_modules_under_the_names_of_their_attributes(two, tmp_path):
    state = two.put(make_state(optax.adam(0.1)))
    with jdist.Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, state)
        restored = checkpointer.restore(two, like=make_state(optax.adam(0.1))).state
        as_dicts = checkpointer.restore(two).state
    assert isinstance(restored["model"], Net)
    jax.tree.map(np.testing.assert_array_equal, values(restored["model"]), values(state["model"]))
    np.testing.assert_array_equal(as_dicts["model"]["norm"]["mean"], state["model"].norm.mean[...])
    assert as_dicts["model"].keys() == {"dropout", "layers", "norm"}
    assert int(two.step(lambda state: (state, state["model"].norm.mean.sum()))(restored)[1]) == 0


def test_weights_of_a_module(two, tmp_path):
    pytest.importorskip("safetensors")
    model = two.put(Net(nnx.Rngs(0)))
    jdist.weights.save(tmp_path / "model.safetensors", model)
    assert jdist.weights.load(tmp_path / "model.safetensors")["norm"]["mean"].shape == (4,)
    loaded = jdist.weights.load(tmp_path / "model.safetensors", like=Net(nnx.Rngs(1)), strategy=two)
    jax.tree.map(np.testing.assert_array_equal, values(loaded), values(model))


@pytest.mark.slow
def test_compile_and_describe(two):
    shapes = jax.eval_shape(make_state)
    assert "model/layers/0/kernel" in {leaf.path for leaf in two.describe(shapes).leaves}
    batch = [jdist.PerReplica(jax.ShapeDtypeStruct((2, 12, *rest), jnp.float32)) for rest in ((3,), ())]
    step = two.step(train_step)
    assert "all-reduce" in two.compile(step, shapes, *batch).as_text()
    step(two.put(make_state()), *two.split((X, Y)))


def test_module_that_is_not_a_pytree_is_named(two):
    class Old(nnx.Module, pytree=False):
        def __init__(self):
            self.w = nnx.Param(jnp.ones(2))

    with pytest.raises(TypeError, match="value is Old, an nnx object that is not a pytree"):
        two.put(Old())


def test_batch_statistics_per_replica(two):
    def make():
        model = nnx.BatchNorm(3, momentum=0.0, rngs=nnx.Rngs(0))
        nnx.update(model, jax.tree.map(lambda x: jdist.SyncOnRead(x, "mean"), nnx.state(model, nnx.BatchStat)))
        return model

    def step(model, x):
        model(x)
        return model, None

    step, model = two.step(step), two.init(make)
    for _ in range(2):
        model, _ = step(model, two.split(X))
    np.testing.assert_allclose(jdist.read_values(model).mean[...], X.mean(axis=0), atol=1e-6)
    assert model.mean.get_raw_value().tree.shape == (2, 3)
