"""Calls whose arguments do not fit: each message names the parameter that was meant, or the line to write."""

import inspect
import pickle
import re

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jdist
from jdist import callbacks, data, hlo, testing

X = np.ones((8, 3), np.float32)
STEP = jdist.step(lambda state, x: (state, None))


def trainer(**options):
    model = (lambda key, x: jnp.zeros(3)), (lambda w, x: x @ w)
    return jdist.Trainer(model, optax.sgd(0.1), optax.squared_error, strategy=testing.strategy("mirrored_2"), **options)


def fit(**options):
    return trainer().fit((X, X[:, 0]), batch_size=4, progress="off", **options)


@jdist.eval_step
def distance(w, x):
    return abs(x - w)


def run(fn, *args):
    return testing.strategy("mirrored_2").run(fn, args)


# Each call, its exception, and a part of the message.
CALLS = {
    "other library": (
        lambda: fit(num_epochs=2),
        TypeError,
        "`Trainer.fit` has no argument `num_epochs`. Write `epochs=`.",
    ),
    "misspelled": (lambda: fit(epoch=2), TypeError, "`Trainer.fit` has no argument `epoch`. Did you mean `epochs`?"),
    "constructor": (
        lambda: trainer(learning_rate=0.1),
        TypeError,
        "`Trainer` has no argument `learning_rate`. Pass the rate to the optimizer",
    ),
    "strategy": (
        lambda: jdist.MirroredStrategy(num_replicas=2),
        TypeError,
        "`MirroredStrategy` has no argument `num_replicas`. Pass the devices",
    ),
    "callback": (
        lambda: callbacks.EarlyStopping("loss", patient=3),
        TypeError,
        "`EarlyStopping` has no argument `patient`. Did you mean `patience`?",
    ),
    "unlike all": (
        lambda: callbacks.TimeLimit(1, zzz=3),
        TypeError,
        "`TimeLimit` has no argument `zzz`. Its arguments are",
    ),
    "missing": (
        lambda: trainer().evaluate((X, X[:, 0])),
        TypeError,
        "`Trainer.evaluate`: missing a required argument: 'data'. Call it as `evaluate(state, data, *, batch_size=None)`.",
    ),
    "by position": (
        lambda: jdist.Precision("bfloat16"),
        TypeError,
        "`Precision` takes these arguments by name: `param_dtype=`, `compute_dtype=`, `output_dtype=`.",
    ),
    "state of a training step": (
        lambda: run(jdist.train_step(lambda w, x: x @ w, optax.sgd(0.1)).__wrapped__, jnp.zeros(3), X),
        TypeError,
        "float32[3] is not a dataclass. Create one: `jdist.init(lambda: jdist.TrainState.create(params, optimizer))`.",
    ),
    "collectives of a step": (
        lambda: hlo.collectives(STEP),
        TypeError,
        "`collectives` reads a compiled program, got Step. Compile a step",
    ),
    "collectives without arguments": (lambda: testing.assert_collectives(STEP, {}), TypeError, "with 0 arguments."),
    "expected collectives": (
        lambda: testing.assert_collectives(STEP, 1, X),
        TypeError,
        '`expected` must map kinds of collectives to numbers, such as `{"all-reduce": 1}`, got 1.',
    ),
    "no batches": (
        lambda: distance.over(0.0, 5),
        TypeError,
        "`batches` must be an iterable of batches, such as a distributed data set, got int.",
    ),
    "one batch": (
        lambda: distance.over(0.0, jdist.PerReplica(X)),
        TypeError,
        "Of one batch, call `evaluate(state, batch)`.",
    ),
    "widths": (
        lambda: data.Buckets(4),
        TypeError,
        "`widths` must be a sequence of integers, such as `Buckets((64, 128))`, got 4.",
    ),
    "fill": (lambda: data.Buckets((4,), fill="x"), TypeError, "`fill` must be a number or a boolean, got 'x'."),
    "partitioner": (
        lambda: jdist.ParameterServerStrategy(workers=1, variable_partitioner="x"),
        TypeError,
        "`variable_partitioner` must be a function of a shape and a dtype",
    ),
    "snapshots": (
        lambda: jdist.ParameterServerStrategy(workers=1, snapshots="x"),
        TypeError,
        "`snapshots` must be a `jdist.Checkpointer(path, every=...)`, got 'x'.",
    ),
    "pickle": (
        lambda: pickle.dumps(testing.strategy("mirrored_2").distribute_dataset(X, batch_size=2)),
        TypeError,
        "A distributed data set cannot be pickled",
    ),
    "validation metric": (
        lambda: fit(validation_data=(X, X[:, 0]), callbacks=[callbacks.EarlyStopping("val_acc")]),
        ValueError,
        "needs the metric 'val_acc'; available are 'loss', 'val_loss'.",
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_call_whose_arguments_do_not_fit_says_what_to_write(name):
    call, error, message = CALLS[name]
    with pytest.raises(error, match=re.escape(message)) as info:
        call()
    assert "Pass `validation_data`" not in str(info.value)


def test_error_within_a_function_is_raised_unchanged():
    def fails(state, batch):
        raise TypeError("mine")

    with pytest.raises(TypeError, match="^mine"):
        jdist.Trainer(step=fails, strategy=testing.strategy("mirrored_2")).fit(
            X, batch_size=4, state={"step": 0}, progress="off"
        )


def test_signatures_are_kept():
    assert "epochs" in inspect.signature(jdist.Trainer.fit).parameters
    assert list(inspect.signature(jdist.MirroredStrategy).parameters)[0] == "devices"
    assert list(inspect.signature(jdist.Precision).parameters) == ["param_dtype", "compute_dtype", "output_dtype"]


def test_optimizer_receives_only_the_extra_arguments_that_it_has():
    sam = optax.contrib.sam(optax.sgd(0.1), optax.sgd(0.1), opaque_mode=False)
    model = (lambda key, x: jnp.zeros(3)), (lambda w, x: x @ w)
    sharpness_aware = jdist.Trainer(model, sam, optax.squared_error, strategy=testing.strategy("mirrored_2"))
    assert sharpness_aware.fit((X, X[:, 0]), batch_size=4, steps=4, progress="off").history["loss"][-1] < 1


def test_representations_name_the_function():
    assert repr(distance) == "EvalStep(distance)"
    assert repr(STEP) == "Step(<lambda>)"
    assert repr(testing.strategy("mirrored_2").step(lambda s: (s, None))) == "Program(<lambda>, on 2 cpu devices)"
