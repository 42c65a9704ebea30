"""`Trainer.fit`: the same results under every strategy, for all batches, calls and micro-batches; and argument errors."""

import copy
import pickle
import re

import jax
import numpy as np
import optax
import pytest

import jdist
from jdist.callbacks import Moment

from laws import STRATEGIES, among, assert_in_step, each_row
from small_fits import CROSS_ENTROPY, MLP, assert_bitwise_equal, digits, fit, to_host, trainer


@pytest.fixture(scope="module")
def one_device():
    """The result on one device: 3 epochs of 1,797 examples in batches of 240; the last batch has 117."""
    return fit(STRATEGIES["one_device"](), validation_data=digits())


def assert_close(result, expected):
    for a, b in zip(to_host(result.state.params), to_host(expected.state.params), strict=True):
        np.testing.assert_allclose(a, b, atol=5e-6)  # the order of sums on CPU depends on its load


def assert_close_with_history(result, expected):
    """Compares the parameters, the loss of each step, and the metrics of each row."""
    assert_close(result, expected)
    assert result.steps == expected.steps == int(result.state.step) == len(result.history.losses)
    np.testing.assert_allclose(list(result.history.losses.values()), list(expected.history.losses.values()), atol=1e-5)
    for row, other in zip(result.history.rows, expected.history.rows, strict=True):
        for name in ("loss", "accuracy", "val_loss", "val_accuracy"):
            assert row[name] == pytest.approx(other[name], abs=1e-5)


def test_results_do_not_depend_on_the_strategy(strategy, one_device):
    result = fit(strategy, validation_data=digits())
    assert_close_with_history(result, one_device)
    assert_in_step(jdist.read_values(result.state.params))
    assert result.steps == 3 * 8


@pytest.mark.parametrize("place", among(["mirrored_3", "sharded_4"], "mirrored_3"))
def test_results_do_not_depend_on_how_steps_are_taken(place, one_device):
    result = fit(STRATEGIES[place](), epochs=50, steps=24, steps_per_call=3, micro_batches=2)
    assert_close(result, one_device)
    assert result.steps == len(result.history.losses) == 24
    assert result.stop_reason == "All requested steps were taken."


def test_batch_of_any_size_trains_evaluates_and_predicts_as_on_one_device(strategy):
    """256 examples on 3 replicas are 86 rows each, two of them padding."""
    data = tuple(array[:600] for array in digits())
    options = dict(data=data, batch_size=256, epochs=2, optimizer=optax.sgd(0.1, momentum=0.9), validation_data=data)
    result, expected = fit(strategy, **options), fit(STRATEGIES["one_device"](), **options)
    assert_close_with_history(result, expected)
    assert result.steps == 6
    outputs = trainer(strategy).predict(result.state, data[0], batch_size=250)
    alone = trainer(STRATEGIES["one_device"]())
    np.testing.assert_allclose(outputs, alone.predict(expected.state, data[0], batch_size=600), atol=1e-4)
    assert trainer(strategy).evaluate(result.state, data, batch_size=250)["examples"] == 600


@pytest.mark.slow
def test_data_that_stay_on_the_devices_train_to_the_same_bits(two, tmp_path):
    data = tuple(array[:900] for array in digits())
    options = dict(data=data, batch_size=250, epochs=2, steps_per_call=3)
    expected = fit(two, **options)
    assert_bitwise_equal(fit(two, **options, cache="device").state.params, expected.state.params)
    with jdist.Checkpointer(tmp_path, every=1) as checkpointer:
        saves = [jdist.callbacks.Checkpoint(checkpointer)]
        fit(two, **{**options, "epochs": None}, steps=3, callbacks=saves, cache="device")
        resumed = fit(two, **options, resume=checkpointer, cache="device")
    assert_bitwise_equal(resumed.state.params, expected.state.params)
    assert resumed.steps == expected.steps


def test_cache_of_a_distributed_dataset_is_refused_with_the_place_to_pass_it(two):
    dataset = two.distribute_dataset(digits(), 240)
    with pytest.raises(ValueError, match="`data` is already distributed: pass `cache` to `distribute_dataset`"):
        fit(two, dataset, batch_size=None, cache="device")


def test_generator_that_is_read_several_times_is_refused_before_the_first_step(two):
    def rows(count=480):
        images, classes = digits()
        yield from zip(images[:count], classes[:count], strict=True)

    with pytest.raises(ValueError, match=r"read only once, but epochs=2\..*Write `rows` instead of `rows\(\)`"):
        fit(two, rows(), epochs=2)
    with pytest.raises(ValueError, match="`validation_data` is an iterator, which can be read only once"):
        fit(two, epochs=2, validation_data=rows())
    result = fit(two, rows(), epochs=None, steps=5, validation_data=rows())
    assert (result.steps, result.stop_reason) == (2, "The data ended after 2 of 5 steps.")


def test_distributed_dataset_is_used_unchanged(two, one_device):
    once = two.distribute_dataset(digits(), 240, shuffle=True, remainder="pad")
    assert_close(fit(two, once, batch_size=None, epochs=3), one_device)
    full_batches = two.distribute_dataset(digits(), 240, shuffle=True)
    assert fit(two, full_batches, batch_size=None, epochs=2).steps == 2 * 7


def test_stream_of_unknown_length_is_read_once_per_epoch(two):
    images, labels = digits()

    class Stream:
        def __iter__(self):
            return ((images[i : i + 300], labels[i : i + 300]) for i in range(0, 1200, 300))

    result = fit(two, Stream(), batch_size=None, epochs=2)
    assert result.steps == 8
    assert [row["step"] for row in result.history.rows] == [4, 8]


def test_training_continues_from_the_state_of_the_caller(two):
    of_two = trainer(two)
    first = of_two.fit(digits(), batch_size=240, progress="off")
    second = of_two.fit(digits(), batch_size=240, steps=10, state=first.state, progress="off")
    assert (first.steps, second.steps, list(second.history.losses)) == (8, 10, [9, 10])
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(first.state.params))  # it was donated


def test_function_of_the_step_trains_for_a_number_of_steps(two):
    result = trainer(two).fit(_batch, steps=3, progress="off")
    assert (result.steps, result.stop_reason) == (3, "All requested steps were taken.")
    for use in (trainer(two).evaluate, trainer(two).predict):
        with pytest.raises(ValueError, match="`data` is endless, and one pass over it would never end"):
            use(result.state, endless)


def test_state_that_has_taken_all_steps_warns(two):
    of_two = trainer(two)
    first = of_two.fit(digits(), batch_size=240, progress="off")
    message = r"No step was taken: steps=8 counts from the beginning of training, and the state has already taken 8"
    with pytest.warns(UserWarning, match=message) as warnings:
        second = of_two.fit(digits(), batch_size=240, steps=8, state=first.state, progress="off")
    assert [warning.filename for warning in warnings] == [__file__]
    assert second.stop_reason.startswith("No step was taken: steps=8") and second.steps == 8
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(first.state))


@pytest.mark.parametrize("fails_in", ["model", "loss"])
def test_error_of_a_model_or_loss_on_dicts_names_the_data(two, fails_in):
    inputs = (lambda batch: batch["x"]) if fails_in == "loss" else (lambda batch: batch)
    model = (lambda key, batch: np.zeros(np.shape(jax.tree.leaves(batch)[0])[-1:], np.float32),
             lambda w, batch: inputs(batch) @ w)  # fmt: skip
    wrong = jdist.Trainer(model, optax.sgd(0.1), lambda outputs, targets: outputs - targets.shape[5], strategy=two)
    message = r"failed on data that are dicts of 'x', 'y' \(.*A `Trainer` passes all of it to"
    with pytest.raises(TypeError, match=message) as error:
        wrong.fit({"x": digits()[0], "y": digits()[1]}, batch_size=240, progress="off")
    assert error.value.__cause__ is not None
    with pytest.raises(IndexError):  # on tuples the error is not wrapped
        jdist.Trainer((model[0], lambda w, x: x @ w), optax.sgd(0.1), lambda o, t: t.shape[5], strategy=two).fit(
            digits(), batch_size=240, progress="off"
        )


def test_donated_state_raises_with_its_name(two):
    of_two = trainer(two)
    first = of_two.fit(digits(), batch_size=240, progress="off")
    of_two.fit(digits(), batch_size=240, steps=9, state=first.state, progress="off")
    message = r"^state\.step \(int32\[\]\) was deleted: it was donated to a step.* Pass the state that"
    for use in (
        lambda state: of_two.fit(digits(), batch_size=240, state=state, progress="off"),
        lambda state: of_two.evaluate(state, digits(), batch_size=240),
        lambda state: of_two.predict(state, digits(), batch_size=240),
        lambda state: of_two.apply(state, digits()[0]),
    ):
        with pytest.raises(ValueError, match=message):
            use(first.state)


def test_errors_name_leaves_as_the_caller_does(two):
    of_two, other = trainer(two), STRATEGIES["mirrored_3"]()
    state = trainer(other).init(digits()[0])
    with pytest.raises(ValueError, match=r"^state\.params\['Dense_0'\]\['bias'\] is on cpu:5, cpu:1, cpu:2"):
        of_two.evaluate(state, digits(), batch_size=240)
    with pytest.raises(ValueError, match=r"^batch[.\[].* is on cpu:5, cpu:1, cpu:2"):
        of_two.fit(other.distribute_dataset(digits(), 240, remainder="pad"), progress="off")
    varying = optax.GradientTransformation(lambda p: (), lambda g, s, p: (jax.tree.map(_times_id, g), s))
    with pytest.raises(ValueError, match=r"^state\.params\['Dense_0'\]\['bias'\] is not proved"):
        fit(two, optimizer=varying)


def _times_id(x):
    return x * jdist.replica_id()


def test_trainer_is_a_short_text_and_a_table_in_a_notebook(two):
    assert repr(trainer(two)) == (
        "Trainer(model=MLP, loss=softmax_cross_entropy_with_integer_labels, metrics=accuracy, "
        "strategy=MirroredStrategy(['cpu:0', 'cpu:1']), seed=0)"
    )
    assert re.search("model *</span>MLP", trainer(two)._repr_html_())


def test_trainer_is_not_copied_and_cannot_be_pickled(two):
    of_two = trainer(two)
    assert copy.deepcopy(of_two) is of_two
    message = r"A Trainer cannot be pickled: .* Create it in the other process, by a function"
    with pytest.raises(TypeError, match=message):
        pickle.dumps(of_two)


def test_second_fit_traces_nothing(two):
    traced = []

    class Counted(MLP):
        def __call__(self, x):
            traced.append(1)
            return super().__call__(x)

    counts = []
    one = jdist.Trainer(Counted(), optax.adam(3e-3), CROSS_ENTROPY, strategy=two)
    count_traces = lambda event: counts.append(len(traced)) if event.moment is Moment.STEP else None
    one.fit(digits(), batch_size=240, epochs=3, callbacks=[count_traces], progress="off", validation_data=digits())
    assert len(set(counts[8:])) == 1  # after the first epoch, and its validation
    one.fit(digits(), batch_size=240, callbacks=[count_traces], progress="off")
    assert counts[-1] == counts[8]


def endless(step):
    return pytest.fail("It was called.")


def _batch(step):
    return tuple(array[:240] for array in digits())


NEGATIVE = -np.ones(len(digits()[0]), np.float32)
EMPTY = tuple(x[:0] for x in digits())
EARLY_STOPPING, EMA = jdist.callbacks.EarlyStopping("val_acc"), jdist.callbacks.EMA
TWO_LOGS = [jdist.callbacks.CSVLog("log"), jdist.callbacks.CSVLog("there/../log", every=2)]
WRONG_WEIGHTS = (np.zeros((8, 2), np.float32), np.zeros(8, np.float32), np.float32([1] * 7 + [-1]))
WRONG_STREAM = lambda: iter([(np.zeros(2, np.float32), np.float32(0), np.float32(-1))] * 8)
# Options of the trainer and of `fit`, and the error, which is raised before the first step.
WRONG_ARGUMENTS = [
    (dict(optimizer=None), {}, TypeError, "`fit` needs the argument `optimizer` of the trainer: `jdist.Trainer"),
    (dict(loss=None), {}, TypeError, "`fit` needs the argument `loss` of the trainer"),
    ({}, dict(batch_size=None), ValueError, "batch"),
    ({}, dict(validation_data=EMPTY), ValueError, "empty"),
    ({}, dict(data=EMPTY), ValueError, "empty"),
    ({}, dict(callbacks=["x"]), TypeError,
     "`callbacks` must contain `jdist.callbacks.Callback` objects or functions of an event, got 'x'"),
    ({}, dict(callbacks=[EMA]), TypeError, "functions of an event, got the class EMA: call it"),
    ({}, dict(callbacks=print), TypeError, "`callbacks` must be a list of callbacks, got"),
    ({}, dict(callbacks=TWO_LOGS), ValueError, "Two callbacks, CSVLog and CSVLog, write to"),
    ({}, dict(callbacks=[EARLY_STOPPING]), ValueError,
     "EarlyStopping needs the metric 'val_acc'; available are 'loss'. Pass `validation_data`."),
    ({}, dict(state={"w": 0}), TypeError, "dict is not a dataclass"),
    ({}, dict(resume=3), TypeError, "`resume` must be a `jdist.Checkpointer` or the path"),
    ({}, dict(steps_per_call=0), ValueError, "`steps_per_call` must be an integer >= 1, got 0"),
    ({}, dict(micro_batches=0), ValueError, "`micro_batches` must be an integer >= 1, got 0"),
    ({}, dict(steps=-1), ValueError, "`steps` must be an integer >= 0, got -1"),
    ({}, dict(epochs=0), ValueError, "`epochs` must be at least 1"),
    ({}, dict(progress="loud"), ValueError, "loud"),
    ({}, dict(progress=jdist.callbacks.Progress()), TypeError,
     "got a Progress: pass it as `callbacks=[jdist.callbacks.Progress(...)]`"),
    ({}, dict(data=_batch, batch_size=None, epochs=1), ValueError,
     "`data` is endless, so epochs=1 would never be reached. Pass the number of steps after which training ends: `steps="),
    ({}, dict(data=_batch, batch_size=None), ValueError, "`data` is endless. Pass the number of steps"),
    ({}, dict(validation_data=endless), ValueError, "`validation_data` is endless, and one pass over it would never end"),
    ({}, dict(data=WRONG_WEIGHTS), ValueError,
     "`data`[2], the weights of the examples, has 1 of 8 values that are negative or not finite, the first is -1.0 at [7]"),
    ({}, dict(data=WRONG_STREAM, batch_size=4), ValueError,
     "`data`[2], the weights of the examples in batch 0 of epoch 0, has 4 of 4 values that are negative or not finite"),
    ({}, dict(validation_data={"easy": (*digits(), NEGATIVE)}), ValueError,
     "`validation_data['easy']`[2], the weights of the examples, has"),
]  # fmt: skip


@each_row("trainer_options, fit_options, error, message", WRONG_ARGUMENTS, [row[-1] for row in WRONG_ARGUMENTS])
def test_wrong_arguments_of_fit_raise_before_the_first_step(two, trainer_options, fit_options, error, message):
    options = {"optimizer": optax.adam(1e-3), "loss": CROSS_ENTROPY, "strategy": two, **trainer_options}
    arguments = {"data": digits(), "batch_size": 240, "progress": "off", **fit_options}
    with pytest.raises(error) as raised:
        jdist.Trainer(MLP(), **options).fit(arguments.pop("data"), **arguments)
    assert message in str(raised.value)


WRONG_TRAINERS = [
    (dict(optimizer="adam"), TypeError,
     "`optimizer` must be an optax transformation, got 'adam'. Write `optimizer=optax.adam(1e-3)`."),
    (dict(optimizer="best"), TypeError, "got 'best'. Write `optimizer=optax.adamw(1e-3)`."),
    (dict(optimizer=optax.sgd), TypeError, "Write `optimizer=optax.sgd(1e-3)`."),
    (dict(loss="mse"), TypeError, "`loss` must be a function from outputs and targets"),
    (dict(strategy="gpu"), TypeError, "`strategy` must be a strategy"),
    (dict(precision="bf16"), TypeError, "`precision` must be a `jdist.Precision`, such as"),
    (dict(seed=-1), ValueError, "`seed` must be an integer >= 0, got -1"),
    (dict(non_finite="ignore"), ValueError, '`non_finite` must be "stop", "skip" or "keep"'),
    (dict(metrics=[jdist.metrics.Accuracy()]), TypeError, 'Write `metrics={"accuracy": jdist.metrics.Accuracy()}`.'),
    (dict(metrics=["accuracy", "mse"]), TypeError,
     'Write `metrics={"accuracy": jdist.metrics.Accuracy(), "mse": jdist.metrics.MeanSquaredError()}`.'),
]  # fmt: skip


@each_row("options, error, message", WRONG_TRAINERS)
def test_wrong_arguments_of_the_trainer_raise(two, options, error, message):
    options = {"optimizer": optax.adam(1e-3), "loss": CROSS_ENTROPY, "strategy": two, **options}
    with pytest.raises(error) as raised:
        jdist.Trainer(MLP(), **options)
    assert message in str(raised.value)


def test_current_strategy_is_the_default(two):
    with two.scope():
        assert jdist.Trainer(MLP()).strategy is two


GUESSES = [
    (lambda t, x, y: t.fit(x, y, batch_size=240), "Write `trainer.fit((x, y), batch_size=...)`"),
    (lambda t, x, y: t.fit(x=x, y=y), "no argument `x`. .* one tuple, `trainer.fit((x, y), batch_size=...)`"),
    (lambda t, x, y: t.fit((x, y), verbose=1), '`verbose`. Write `progress="lines"`'),
    (lambda t, x, y: t.fit((x, y), validation_split=0.1), "write `validation_data=(x_validation, y_validation)`"),
    (lambda t, x, y: t.fit((x, y), validation_freq=2), "`Trainer.fit` has no argument `validation_freq`. Write `validate_every=`"),
    (lambda t, x, y: t.fit((x, y), sample_weight=y), "with the data, `(x, y, weights)`"),
    (lambda t, x, y: t.evaluate(None, x, y), "Write `trainer.evaluate(state, (x, y), batch_size=...)`"),
]  # fmt: skip


@each_row("call, line", GUESSES, [line for _, line in GUESSES])
def test_arguments_as_in_keras_raise_with_the_line_to_write(two, call, line):
    with pytest.raises(TypeError, match=re.escape(line).replace(r"\.\*", ".*")):
        call(trainer(two), *digits())


@pytest.mark.slow
def test_list_of_batches_is_read_batch_by_batch(two):
    images, labels = digits()
    batches = [(images[i : i + 240], labels[i : i + 240]) for i in range(0, 960, 240)]
    result = trainer(two).fit(batches, progress="off")
    arrays = trainer(two).fit((images[:960], labels[:960]), batch_size=240, shuffle=False, progress="off")
    assert result.steps == 4
    assert_bitwise_equal(result.state.params, arrays.state.params)
    with pytest.raises(ValueError, match="The source is a list of 4 .* pass `batch_size=None`") as error:
        trainer(two).fit(batches, batch_size=240, progress="off")
    assert "`data`" in "".join(error.value.__notes__)
