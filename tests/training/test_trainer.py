"""`Trainer.fit`: the same results under every strategy, whatever batches, calls and micro-batches."""

import copy
import pickle

import jax
import numpy as np
import optax
import pytest

import jdist
from jdist.callbacks import Moment

from laws import STRATEGIES, assert_in_step
from small_fits import CROSS_ENTROPY, MLP, assert_bitwise_equal, digits, fit, to_host, trainer


@pytest.fixture(scope="module")
def alone():
    """Training on one device, 3 epochs of 1,797 examples in batches of 240, the last of which has 117."""
    return fit(STRATEGIES["one_device"](), validation_data=digits())


def assert_close(found, expected):
    for a, b in zip(to_host(found.state.params), to_host(expected.state.params), strict=True):
        np.testing.assert_allclose(a, b, atol=2e-6)


@pytest.mark.one_in(2)
def test_results_do_not_depend_on_the_strategy(strategy, alone):
    found = fit(strategy, validation_data=digits())
    assert_close(found, alone)
    assert_in_step(jdist.read_values(found.state.params))
    assert found.steps == 3 * 8 == int(found.state.step)
    for row, expected in zip(found.history.rows, alone.history.rows, strict=True):
        for name in ("loss", "accuracy", "val_loss", "val_accuracy"):
            assert row[name] == pytest.approx(expected[name], abs=1e-5)
    assert len(found.history.losses) == 24
    np.testing.assert_allclose(list(found.history.losses.values()), list(alone.history.losses.values()), atol=1e-5)


OPTIONS = {
    "four_steps_a_call": dict(steps_per_call=4),
    "micro_batches": dict(micro_batches=4),
    "both": dict(steps_per_call=3, micro_batches=2),
    "steps_in_place_of_epochs": dict(epochs=None, steps=24),
    "more_epochs_than_steps": dict(epochs=50, steps=24),
}


@pytest.mark.parametrize(
    "place, options",
    [
        pytest.param(
            place,
            options,
            id=f"{place}-{name}",
            marks=() if (place, name) == ("mirrored_3", "both") else pytest.mark.slow,
        )
        for place in ("mirrored_3", "sharded_4")
        for name, options in OPTIONS.items()
    ],
)
def test_results_do_not_depend_on_how_steps_are_taken(place, options, alone):
    found = fit(STRATEGIES[place](), **options)
    assert_close(found, alone)
    assert found.steps == 24
    assert len(found.history.losses) == 24
    assert found.stop_reason == "All requested steps were taken."


def test_last_batch_of_one_example_counts_as_one_example(two):
    """tf.distribute halves its gradient: one replica of two has no example."""
    data = tuple(array[:9] for array in digits())
    found = fit(two, data, batch_size=4, epochs=1, optimizer=optax.sgd(0.1), shuffle=False)
    expected = fit(STRATEGIES["one_device"](), data, batch_size=4, epochs=1, optimizer=optax.sgd(0.1), shuffle=False)
    assert_close(found, expected)
    assert found.history.losses[3] == pytest.approx(expected.history.losses[3], abs=1e-6)


def test_policy_of_the_optimizer_is_left_to_it(two):
    reduced = fit(two, optimizer=optax.chain(jdist.sync.mean(), optax.adam(3e-3)))
    assert_bitwise_equal(reduced.state.params, fit(two, optimizer=optax.adam(3e-3)).state.params)


def test_policy_under_which_parameters_drift_keeps_one_set_a_replica(two):
    drifting = fit(two, optimizer=jdist.sync.local_sgd(optax.sgd(0.1), every=5), epochs=1)
    assert all(isinstance(x, jdist.SyncOnRead) for x in jax.tree.leaves(drifting.state.params, is_leaf=_is_wrapped))
    every_step = fit(two, optimizer=jdist.sync.local_sgd(optax.sgd(0.1), every=1), epochs=1)
    assert_close(every_step, fit(two, optimizer=optax.sgd(0.1), epochs=1))


def _is_wrapped(node):
    return isinstance(node, jdist.DistributedValues)


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", [optax.sgd(0.1, momentum=0.9), optax.adam(3e-3)])
def test_exact_policy_trains_to_the_same_bits_on_any_number_of_devices(optimizer):
    states = [
        fit(
            jdist.MirroredStrategy([f"cpu:{i}" for i in range(devices)], virtual_replicas=4),
            optimizer=optax.chain(jdist.sync.exact(), optimizer),
            epochs=1,
        ).state
        for devices in (1, 2, 4)
    ]
    for state in states[1:]:
        assert_bitwise_equal(state, states[0])


def test_dataset_that_is_distributed_already_is_taken_as_it_is(two, alone):
    once = two.distribute_dataset(digits(), 240, shuffle=True, remainder="pad")
    assert_close(fit(two, once, batch_size=None, epochs=3), alone)
    whole_batches = two.distribute_dataset(digits(), 240, shuffle=True)
    assert fit(two, whole_batches, batch_size=None, epochs=2).steps == 2 * 7


def test_stream_whose_end_nobody_knows_is_gone_through_so_often(two):
    images, labels = digits()

    class Parts:
        def __iter__(self):
            return ((images[i : i + 300], labels[i : i + 300]) for i in range(0, 1200, 300))

    found = fit(two, Parts(), batch_size=None, epochs=2)
    assert found.steps == 8
    assert [row["step"] for row in found.history.rows] == [4, 8]


def test_data_without_targets_are_both_inputs_and_targets(two):
    images, labels = digits()
    model = (lambda key, batch: np.zeros((64, 10), np.float32), lambda w, batch: batch["image"] @ w)
    by_name = jdist.Trainer(
        model, optax.sgd(0.1), lambda logits, batch: CROSS_ENTROPY(logits, batch["label"]), strategy=two
    )
    found = by_name.fit({"image": images, "label": labels}, batch_size=240, progress="off")
    assert found.history["loss"][-1] < 2.3


def test_weights_of_examples_count_in_loss_and_metrics(two):
    images, labels = digits()
    weights = (np.arange(len(labels)) < 500).astype(np.float32)
    weighed = trainer(two)
    found = weighed.fit((images, labels, weights), batch_size=240, shuffle=False, progress="off")
    few = weighed.evaluate(found.state, (images[:500], labels[:500]), batch_size=240)
    all_weighed = weighed.evaluate(found.state, (images, labels, weights), batch_size=240)
    assert all_weighed["accuracy"] == pytest.approx(few["accuracy"], abs=1e-6)
    assert (all_weighed["examples"], few["examples"]) == (1797, 500)


def test_training_goes_on_from_a_state_that_is_handed_in(two):
    of_two = trainer(two)
    first = of_two.fit(digits(), batch_size=240, progress="off")
    second = of_two.fit(digits(), batch_size=240, steps=10, state=first.state, progress="off")
    assert (first.steps, second.steps, list(second.history.losses)) == (8, 10, [9, 10])
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(first.state.params))  # it is the memory of the second


def test_function_of_the_step_trains_for_so_many_steps(two):
    found = trainer(two).fit(_batch, steps=3, progress="off")
    assert (found.steps, found.stop_reason) == (3, "All requested steps were taken.")
    for use in (trainer(two).evaluate, trainer(two).predict):
        with pytest.raises(ValueError, match="`data` has no end, and one pass over it would never end"):
            use(found.state, _endless)


def test_steps_that_the_state_has_taken_already_are_said(two):
    of_two = trainer(two)
    first = of_two.fit(digits(), batch_size=240, progress="off")
    said = r"No step was taken: steps=8 counts from the beginning of training, and the state has gone through 8 already"
    with pytest.warns(UserWarning, match=said):
        again = of_two.fit(digits(), batch_size=240, steps=8, state=first.state, progress="off")
    assert again.stop_reason.startswith("No step was taken: steps=8") and again.steps == 8
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(first.state))


@pytest.mark.parametrize("fails_in", ["model", "loss"])
def test_model_or_loss_that_fails_on_dicts_is_said_with_the_data(two, fails_in):
    inputs = (lambda batch: batch["x"]) if fails_in == "loss" else (lambda batch: batch)
    model = (lambda key, batch: np.zeros(np.shape(jax.tree.leaves(batch)[0])[-1:], np.float32),
             lambda w, batch: inputs(batch) @ w)  # fmt: skip
    wrong = jdist.Trainer(model, optax.sgd(0.1), lambda outputs, targets: outputs - targets.shape[5], strategy=two)
    with pytest.raises(
        TypeError, match=r"failed on data that are dicts of 'x', 'y' \(.*A `Trainer` passes all of it to"
    ) as error:
        wrong.fit({"x": digits()[0], "y": digits()[1]}, batch_size=240, progress="off")
    assert error.value.__cause__ is not None
    with pytest.raises(IndexError):  # of a tuple it is the error of the loss alone
        jdist.Trainer((model[0], lambda w, x: x @ w), optax.sgd(0.1), lambda o, t: t.shape[5], strategy=two).fit(
            digits(), batch_size=240, progress="off"
        )


def test_spent_state_is_refused_by_name(two):
    of_two = trainer(two)
    first = of_two.fit(digits(), batch_size=240, progress="off")
    of_two.fit(digits(), batch_size=240, steps=9, state=first.state, progress="off")
    uses = (
        lambda state: of_two.fit(digits(), batch_size=240, state=state, progress="off"),
        lambda state: of_two.evaluate(state, digits(), batch_size=240),
        lambda state: of_two.predict(state, digits(), batch_size=240),
        lambda state: of_two.apply(state, digits()[0]),
    )
    for use in uses:
        with pytest.raises(ValueError, match=r"^state\.step \(int32\[\]\) was deleted: it was donated to a step"):
            use(first.state)


def test_leaves_are_named_as_the_caller_does(two):
    of_two, other = trainer(two), STRATEGIES["mirrored_3"]()
    state = trainer(other).init(digits()[0])
    with pytest.raises(ValueError, match=r"^state\.step is on cpu:5, cpu:1, cpu:2, and this"):
        of_two.fit(digits(), batch_size=240, state=state, progress="off")
    with pytest.raises(ValueError, match=r"^state\.params\['Dense_0'\]\['bias'\] is on cpu:5, cpu:1, cpu:2"):
        of_two.evaluate(state, digits(), batch_size=240)
    with pytest.raises(ValueError, match=r"^batch[.\[].* is on cpu:5, cpu:1, cpu:2"):
        of_two.fit(other.distribute_dataset(digits(), 240, remainder="pad"), progress="off")
    varies = optax.GradientTransformation(lambda p: (), lambda g, s, p: (jax.tree.map(_times_id, g), s))
    with pytest.raises(ValueError, match=r"^state\.params\['Dense_0'\]\['bias'\] is not proved"):
        fit(two, optimizer=varies)


def _times_id(x):
    return x * jdist.replica_id()


def test_trainer_is_short_in_text_and_a_table_in_a_notebook(two):
    said = repr(trainer(two))
    assert said == (
        "Trainer(model=MLP, loss=softmax_cross_entropy_with_integer_labels, metrics=accuracy, "
        "strategy=MirroredStrategy(['cpu:0', 'cpu:1']), seed=0)"
    )
    assert ">model</td>" in (page := trainer(two)._repr_html_()) and ">MLP</td>" in page


def test_trainer_is_its_own_deep_copy_and_says_what_to_pickle(two):
    of_two = trainer(two)
    assert copy.deepcopy(of_two) is of_two
    with pytest.raises(
        TypeError, match=r"A Trainer cannot be pickled: .* Make it anew in the other process, by a function"
    ):
        pickle.dumps(of_two)


def test_loop_moves_nothing_that_nobody_asked_for_and_traces_nothing_anew(two):
    traced = []

    class Counted(MLP):
        def __call__(self, x):
            traced.append(1)
            return super().__call__(x)

    counts = []
    one = jdist.Trainer(Counted(), optax.adam(3e-3), CROSS_ENTROPY, strategy=two)
    counting = lambda event: counts.append(len(traced)) if event.moment is Moment.STEP else None
    one.fit(digits(), batch_size=240, epochs=3, callbacks=[counting], progress="off", validation_data=digits())
    assert len(set(counts[8:])) == 1  # after the first epoch, and its validation
    one.fit(digits(), batch_size=240, callbacks=[counting], progress="off")
    assert counts[-1] == counts[8]


def _endless(step):
    return pytest.fail("It was called.")


def _batch(step):
    return tuple(array[:240] for array in digits())


NOT_TO_BE = {
    "no_optimizer": (dict(optimizer=None), {}, TypeError, "To fit, a trainer needs `optimizer`: `jdist.Trainer"),
    "no_loss": (dict(loss=None), {}, TypeError, "To fit, a trainer needs `loss`"),
    "no_batch_size": ({}, dict(batch_size=None), ValueError, "batch"),
    "empty_validation": (
        {},
        dict(validation_data=tuple(x[:0] for x in digits())),
        ValueError,
        "empty",
    ),
    "empty": ({}, dict(data=tuple(x[:0] for x in digits())), ValueError, "empty"),
    "callback_no_function": ({}, dict(callbacks=["x"]), TypeError, "among `callbacks` there is 'x'"),
    "callback_class": (
        {},
        dict(callbacks=[jdist.callbacks.EMA]),
        TypeError,
        "among `callbacks` there is the class EMA: call it",
    ),
    "one_callback": ({}, dict(callbacks=print), TypeError, "`callbacks` is a list of functions of an event"),
    "state_no_state": ({}, dict(state={"w": 0}), TypeError, "dict is none"),
    "resume_no_checkpointer": ({}, dict(resume=3), TypeError, "`resume` is a `jdist.Checkpointer`, or a path"),
    "steps_per_call": ({}, dict(steps_per_call=0), ValueError, "`steps_per_call` must be an integer >= 1, got 0"),
    "micro_batches": ({}, dict(micro_batches=0), ValueError, "`micro_batches` must be an integer >= 1, got 0"),
    "micro_batches_that_do_not_split": ({}, dict(micro_batches=7), ValueError, "cannot be split into 7 micro-batches"),
    "steps": ({}, dict(steps=-1), ValueError, "`steps` must be an integer >= 0, got -1"),
    "epochs": ({}, dict(epochs=0), ValueError, "`epochs` is at least 1"),
    "progress": ({}, dict(progress="loud"), ValueError, "loud"),
    "display_as_progress": (
        {},
        dict(progress=jdist.callbacks.Progress()),
        TypeError,
        "got a display. What `jdist.callbacks.Progress(...)` returns is a callback: pass it as `callbacks=[",
    ),
    "two_logs_on_one_path": (
        {},
        dict(callbacks=[jdist.callbacks.CSVLog("log"), jdist.callbacks.CSVLog("there/../log", every=2)]),
        ValueError,
        "Two callbacks, CSVLog and CSVLog, write to",
    ),
    "function_of_the_step_for_epochs": (
        {},
        dict(data=_batch, batch_size=None, epochs=1),
        ValueError,
        "`data` has no end, and no epochs: epochs=1 would never be reached. Say after how many steps training ends: `steps=",
    ),
    "function_of_the_step": (
        {},
        dict(data=_batch, batch_size=None),
        ValueError,
        "`data` has no end. Say after how many",
    ),
    "weights_of_examples_that_are_negative": (
        {},
        dict(data=(np.zeros((8, 2), np.float32), np.zeros(8, np.float32), np.float32([1] * 7 + [-1]))),
        ValueError,
        "`data`[2], the weights of the examples, has 1 of 8 values that are negative or not finite, the first is -1.0 at [7]",
    ),
    "function_of_the_step_to_validate": (
        {},
        dict(validation_data=_endless),
        ValueError,
        "`validation_data` has no end, and one pass over it would never end",
    ),
    "early_stopping": (
        {},
        dict(callbacks=[jdist.callbacks.EarlyStopping("val_acc")]),
        ValueError,
        "EarlyStopping watches 'val_acc', and there are only 'loss'. Hand in `validation_data`.",
    ),
    "state_on_the_host": (
        {},
        dict(state=jdist.TrainState(np.int32(0), {}, {}, {}, np.zeros(2, np.uint32))),
        TypeError,
        "state.step is int32[] on the host, and `fit` takes a state on the devices",
    ),
}


@pytest.mark.parametrize("made, fitted, kind, message", NOT_TO_BE.values(), ids=NOT_TO_BE)
def test_what_cannot_be_is_refused_before_the_first_step(two, made, fitted, kind, message):
    options = {"optimizer": optax.adam(1e-3), "loss": CROSS_ENTROPY, "strategy": two, **made}
    given = {"data": digits(), "batch_size": 240, "progress": "off", **fitted}
    with pytest.raises(kind) as error:
        jdist.Trainer(MLP(), **options).fit(given.pop("data"), **given)
    assert message in str(error.value)


MADE_WRONG = {
    "optimizer": (dict(optimizer="adam"), TypeError, "`optimizer` is a transformation of optax"),
    "loss": (dict(loss="mse"), TypeError, "`loss` is a function from outputs and targets"),
    "strategy": (dict(strategy="gpu"), TypeError, "`strategy` is a strategy"),
    "precision": (dict(precision="bf16"), TypeError, "`precision` is a `jdist.Precision"),
    "seed": (dict(seed=-1), ValueError, "`seed` must be an integer >= 0, got -1"),
    "non_finite": (dict(non_finite="ignore"), ValueError, '`non_finite` is "stop", "skip" or "keep"'),
    "metrics": (dict(metrics=[jdist.metrics.Accuracy()]), TypeError, "`metrics` maps names to metrics"),
    "metric": (dict(metrics={"a": jdist.metrics.Accuracy}), TypeError, "got the class Accuracy: call it"),
    "metric_name": (dict(metrics={"loss": jdist.metrics.Accuracy()}), ValueError, "A metric is called 'loss'"),
}


@pytest.mark.parametrize("made, kind, message", MADE_WRONG.values(), ids=MADE_WRONG)
def test_trainer_of_what_cannot_be_is_refused(two, made, kind, message):
    options = {"optimizer": optax.adam(1e-3), "loss": CROSS_ENTROPY, "strategy": two, **made}
    with pytest.raises(kind) as error:
        jdist.Trainer(MLP(), **options)
    assert message in str(error.value)


def test_loss_of_one_number_is_refused_with_what_to_do(two):
    wrong = jdist.Trainer(MLP(), optax.adam(1e-3), lambda *args: CROSS_ENTROPY(*args).mean(), strategy=two)
    with pytest.raises(ValueError, match=r"`loss` returned float32\[\] for 120 examples.*leave `.mean\(\)` or"):
        wrong.fit(digits(), batch_size=240, progress="off")


def test_strategy_in_force_is_the_default(two):
    with two.scope():
        assert jdist.Trainer(MLP()).strategy is two
