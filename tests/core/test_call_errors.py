"""Calls whose arguments do not fit: each message names the parameter that was meant, or the line to write."""

import inspect
import pickle
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jdist
from jdist import callbacks, data, hlo, sync, testing

from laws import each_row

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


def step(fn, *args, **options):
    return testing.strategy("mirrored_2").step(fn, **options)(*args)


def train_step(loss_fn, params=None):
    strategy, optimizer = testing.strategy("mirrored_2"), optax.sgd(0.1)
    params = jnp.zeros(3) if params is None else params
    state = strategy.init(lambda: jdist.TrainState.create(params, optimizer))
    return jdist.train_step(loss_fn, optimizer).on(strategy)(state, strategy.split(X))


def fit_step(step):
    custom = jdist.Trainer(step=step, strategy=testing.strategy("mirrored_2"))
    return custom.fit(X, batch_size=4, state={"step": jnp.int32(0)}, progress="off")


def sum_with_reference():
    reference = jax.new_ref(jnp.ones(3))
    return run(lambda x: x + reference[...], X)


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
    "data in several arguments": (
        lambda: testing.strategy("mirrored_2").distribute_dataset(X, X[:, 0], batch_size=4),
        TypeError,
        "Pass arrays as one tree, such as `distribute_dataset((x, y), batch_size)`.",
    ),
    "state in place of its function": (
        lambda: testing.strategy("mirrored_2").init((X, X)),
        TypeError,
        "`fn` must be a function, got tuple. Pass the function that creates the state, without calling it",
    ),
    "named argument of init": (
        lambda: testing.strategy("mirrored_2").init(lambda size: jnp.ones(size), size=3),
        TypeError,
        "`strategy.init` has no argument `size`. Pass arrays by position, `strategy.init(make_state, key)`",
    ),
    "named argument of init of the current strategy": (
        lambda: jdist.init(lambda size: jnp.ones(size), size=3),
        TypeError,
        "`jdist.init` has no argument `size`. Pass arrays by position",
    ),
    "missing axis": (
        lambda: testing.strategy("mirrored_2").reduce("sum", 1.0),
        TypeError,
        "`strategy.reduce`: missing a required argument: 'axis'. Call it as `reduce(op, value, axis)`. `axis=None` reduces",
    ),
    "operation as the second argument": (
        lambda: jdist.all_reduce(X, "mean"),
        ValueError,
        'float32[8,3] is not a reduction. The operation is the first argument, such as "mean".',
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
    "batch by name": (
        lambda: distance.over(0.0, {"x": X}),
        TypeError,
        "`batches` must be an iterable of batches, such as a distributed data set, got dict",
    ),
    "strategy in place of its name": (
        lambda: testing.strategies(testing.strategy("mirrored_2")),
        TypeError,
        "Pass a function that returns the strategy, `strategies(lambda: MirroredStrategy(",
    ),
    "decorator without names": (
        lambda: testing.strategies(test_call_whose_arguments_do_not_fit_says_what_to_write),
        TypeError,
        'Write `@jdist.testing.strategies("one_device", "mirrored_2")`.',
    ),
    "one device compared with itself": (
        lambda: testing.assert_same_as_one_device(lambda: jnp.zeros(3), lambda w, x: (w, None), [X]),
        RuntimeError,
        "No strategy is current, so one device would be compared with itself.",
    ),
    "truth of a report": (
        lambda: bool(jdist.check(jax.jit(lambda x: x), X)),
        TypeError,
        "A report has no truth value: it has 0 findings. Write `assert not report.num_findings`.",
    ),
    "check of a step": (
        lambda: jdist.check(STEP, X, X),
        TypeError,
        "A step of jdist has its own proof: `print(step.proof)`",
    ),
    "optimizer and loss exchanged": (
        lambda: jdist.Trainer(((lambda key, x: x), (lambda w, x: x)), optax.squared_error, optax.sgd(0.1)),
        TypeError,
        "got an optimizer. The order is `Trainer(model, optimizer, loss)`.",
    ),
    "name of a loss": (
        lambda: jdist.Trainer(
            ((lambda key, x: x), (lambda w, x: x)), optax.sgd(0.1), "sparse_categorical_crossentropy"
        ),
        TypeError,
        "Write `loss=optax.softmax_cross_entropy_with_integer_labels`.",
    ),
    "record in place of its state": (
        lambda: trainer().evaluate(fit(steps=1), (X, X[:, 0]), batch_size=4),
        TypeError,
        "got Fit. Write `fit.state`.",
    ),
    "base class": (
        lambda: jdist.Strategy(),
        TypeError,
        "`Strategy`: missing a required argument: 'backend'. Call it as `Strategy(backend, ",
    ),
    "advice of the base class": (
        lambda: jdist.Strategy(),
        TypeError,
        "This is the base class. Write `jdist.MirroredStrategy()`, or another strategy.",
    ),
    "policy": (
        lambda: sync.diloco(),
        TypeError,
        "`diloco`: missing a required argument: 'optimizer'. Call it as `diloco(optimizer, outer_optimizer=None, *, every, reduction=None)`.",
    ),
    "argument of a policy": (
        lambda: sync.local_sgd(optax.sgd(0.1), steps=8),
        TypeError,
        "`local_sgd` has no argument `steps`. Its arguments are `optimizer`, `every`.",
    ),
    "name of a variant": (
        lambda: testing.variants("mirrored"),
        TypeError,
        "`variants` takes these arguments by name: `one_device=`, `mirrored=`, `sharded=`, `central=`. Write `variants(mirrored=2)`.",
    ),
    "optimizer of Keras": (
        lambda: jdist.Trainer(((lambda key, x: x), (lambda w, x: x)), type("Adam", (), {})(), optax.squared_error),
        TypeError,
        "Adam object>. Write `optimizer=optax.adam(1e-3)`.",
    ),
    "callback of Lightning": (
        lambda: fit(callbacks=[type("StochasticWeightAveraging", (), {})()]),
        TypeError,
        "StochasticWeightAveraging object>. The name `StochasticWeightAveraging`: write `jdist.callbacks.EMA(0.99)`.",
    ),
    "callback of Keras": (
        lambda: fit(callbacks=[type("EarlyStopping", (), {})()]),
        TypeError,
        "Write `jdist.callbacks.EarlyStopping(...)`.",
    ),
    "other callback of Keras": (
        lambda: fit(callbacks=[type("ModelCheckpoint", (), {})()]),
        TypeError,
        "write `jdist.callbacks.Checkpoint(jdist.Checkpointer(path))`.",
    ),
    "progress that is False": (
        lambda: trainer().fit((X, X[:, 0]), batch_size=4, progress=False),
        TypeError,
        'got a bool. Write `progress="off"`.',
    ),
    "name of a precision": (
        lambda: step(lambda w, x: (w, None), precision="bf16"),
        TypeError,
        "such as `jdist.Precision(compute_dtype=jnp.bfloat16)`, got 'bf16'.",
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
    "state of evaluation": (
        lambda: trainer().predict(X),
        TypeError,
        "Call it as `predict(state, data, *, batch_size=None)`. The state is the first argument.",
    ),
    "compiler option": (
        lambda: step(lambda s: (s, None), X, compiler_options={"nonsense": 1}),
        ValueError,
        "The option 'nonsense' of `compiler_options` is refused: this version of XLA does not have it.",
    ),
    "value of a compiler option": (
        lambda: step(lambda s: (s, None), X, compiler_options={"xla_cpu_enable_fast_math": "purple"}),
        ValueError,
        "The option 'xla_cpu_enable_fast_math' of `compiler_options` is refused: 'purple' is not a valid bool value.",
    ),
    "option of compile": (
        lambda: testing.strategy("mirrored_2").compile(STEP, X, X, compiler_options={"nonsense": 1}),
        ValueError,
        "The option 'nonsense' of `compiler_options` is refused",
    ),
    "reference": (
        lambda: run(lambda r: r[...], jax.new_ref(jnp.ones(3))),
        TypeError,
        "r is a `jax.Ref`, which has no placement on several devices. Pass its value, `ref[...]`.",
    ),
    "reference in a state": (
        lambda: step(lambda s: (s, None), {"r": jax.new_ref(jnp.ones(3))}),
        TypeError,
        "s['r'] is a `jax.Ref`",
    ),
    "captured reference": (
        sum_with_reference,
        TypeError,
        "The function closes over a `jax.Ref`, which has no placement on several devices. Pass its value",
    ),
    "wrapper in a step": (
        lambda: run(lambda x: x.tree, jdist.PerReplica(X[:2])),
        AttributeError,
        "reads `.tree` of a value that has no wrapper there: a replica function receives the values of one replica",
    ),
    "wrapper of a tree in a step": (
        lambda: run(lambda x: x.tree, jdist.PerReplica((X[:2], X[:2]))),
        AttributeError,
        "reads `.tree` of a value that has no wrapper there",
    ),
    "parameters for evaluation": (
        lambda: trainer(eval_params=optax.contrib.schedule_free_eval_params).evaluate(
            trainer().init(X), (X, X[:, 0]), batch_size=4
        ),
        TypeError,
        "`eval_params` fails for the state of this optimizer, (EmptyState(), EmptyState()) (AttributeError: ",
    ),
    "parameters for evaluation of one argument": (
        lambda: trainer(eval_params=lambda params: params),
        TypeError,
        "`eval_params` must be a function `fn(opt_state, params)` that returns parameters, such as "
        "`optax.contrib.schedule_free_eval_params`, got a function with the parameters (params)",
    ),
    "integer parameters": (
        lambda: train_step(lambda w, x: x @ w["a"], {"a": jnp.zeros(3), "n": jnp.int32(1)}),
        TypeError,
        "params['n'] is int32[], and only parameters that are floats have a gradient. Store it in another part of the state",
    ),
    "no loss": (
        lambda: train_step(lambda w, x: None),
        TypeError,
        "`loss_fn` must return losses [batch, ...], or a pair of these and their weights or other values, got None.",
    ),
    "dict of losses": (lambda: train_step(lambda w, x: {"loss": x @ w}), TypeError, "got {loss: float32[4]}."),
    "three results of a loss": (lambda: train_step(lambda w, x: (x @ w, 1, 2)), TypeError, "got (float32[4], 1, 2)."),
    "three results of an objective": (
        lambda: jdist.Trainer(
            ((lambda key, x: jnp.zeros(3)), (lambda w, x: x @ w)),
            optax.sgd(0.1),
            objective=lambda params, batch, key, apply: (apply(params, batch), 1, 2),
            strategy=testing.strategy("mirrored_2"),
        ).fit(X, batch_size=4, progress="off"),
        TypeError,
        "`objective` must return one array, the losses of the examples, or a pair of these and other values, got (float32[2], ",
    ),
    "no loss to differentiate": (
        lambda: run(jdist.value_and_grad(lambda w, x: None), jnp.zeros(3), X),
        TypeError,
        "The loss function returned None, and the losses must be one array or number.",
    ),
    "tuple to differentiate": (
        lambda: run(jdist.value_and_grad(lambda w, x: (x @ w, 1, 2)), jnp.zeros(3), X),
        TypeError,
        "returned (float32[8], 1, 2), and the losses must be one array or number. If it returns a loss and another value, return a pair",
    ),
    "step without a batch": (
        lambda: jdist.Trainer(step=lambda state: state),
        TypeError,
        "`step` must be a function `fn(state, batch)` or `fn(state, batch, weights)`, got one with the parameters (state)",
    ),
    "loss that is a Python number": (
        lambda: fit_step(lambda state, batch: ({"step": state["step"] + 1}, {"loss": 1.0})),
        TypeError,
        "got {loss: 1.0}. A Python number is a constant of the compiled step: return the array that the step computes.",
    ),
    "state of a callback": (
        lambda: fit(callbacks=[lambda event: callbacks.CallbackResult(state=3)]),
        TypeError,
        "The callback <lambda> returned the state 3, which has another structure than the training state, a TrainState.",
    ),
    "array in host memory": (
        lambda: testing.strategy("central_2").init(lambda: jnp.ones((2, 2)))[0, 0],
        ValueError,
        "An array in host memory, such as a state of `jdist.CentralStorageStrategy`, is not indexed",
    ),
    "name of a leaf": (
        lambda: next(
            iter(
                testing.strategy("mirrored_2").distribute_dataset(
                    [{"t": np.ones(n)} for n in (1, 2)], 2, buckets=data.Buckets((4,), leaves=("tokens",))
                )
            )
        ),
        ValueError,
        "`buckets` pads no leaf of the source in batch 0 of epoch 0: it has no key, field or index of ['tokens']. Its leaves are",
    ),
    "replica context of TensorFlow": (
        lambda: jdist.get_replica_context().devices,
        AttributeError,
        "'ReplicaContext' object has no attribute 'devices'. TensorFlow's `devices`: write `strategy.devices` on the host",
    ),
    "validation metric": (
        lambda: fit(validation_data=(X, X[:, 0]), callbacks=[callbacks.EarlyStopping("val_acc")]),
        ValueError,
        "needs the metric 'val_acc'; available are 'loss', 'val_loss'.",
    ),
}


@each_row("name", CALLS)
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


def test_warnings_of_a_replicated_batch_name_the_line_of_the_call(two):
    state = two.init(lambda: jdist.TrainState.create(jnp.zeros(3), optax.sgd(0.1)))
    with two.scope(), pytest.warns(jdist.ReplicatedBatchWarning, match="^batch is replicated") as warned:
        jdist.train_step(lambda w, x: (x @ w) ** 2, optax.sgd(0.1))(state, X)
        assert distance.over(jnp.zeros(3), [X]) == 1
        distance(jnp.zeros(3), X)  # traced before
    lines = [
        each.lineno - test_warnings_of_a_replicated_batch_name_the_line_of_the_call.__code__.co_firstlineno
        for each in warned
    ]
    assert [each.filename for each in warned] == [__file__] * 2 and lines == [3, 4]


def test_representations_name_the_function():
    assert repr(distance) == "EvalStep(distance)"
    assert repr(STEP) == "Step(<lambda>)"
    assert repr(jdist.train_step(lambda w, x: x @ w, optax.sgd(0.1))) == "Step(train_step)"
    assert repr(testing.strategy("mirrored_2").step(lambda s: (s, None))) == "Program(<lambda>, on 2 cpu devices)"
