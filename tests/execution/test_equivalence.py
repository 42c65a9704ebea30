"""The equivalence of steps: every seeded fault is found with its line, no right program is called wrong, and policies say what they are.

The steps of the corpora (`equivalence_cases`, `ported_programs`) are traced on 4 replicas, and not run.
"""

import collections
import inspect
import tracemalloc
import warnings

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx

import jdist

import equivalence_cases
import policies
import ported_programs
from laws import STRATEGIES

# Faults that the analysis does not tell: thresholds that random inputs do not pass, and the order of examples.
NOT_FOUND = {
    "kl_coefficient_clipped_before_mean",
    "loss_scale_of_largest_norm",
    "mixed_with_reversed_local_batch",
    "skipped_by_local_loss",
    "update_per_micro_batch",
}
# The line of the fault is not in the chain: another one of the lines that make the value wrong is.
OTHER_LINE = {
    "contrastive_without_gradient_of_others",
    "cross_correlation_of_local_batch",
    "feature_matching_of_local_batch",
    "weights_by_local_position",
}
MAX_UNKNOWN = 0.1  # the largest share of the state leaves of right programs


def verdicts_of(strategy, step, make_state, batch, **options):
    """Returns the verdict on each leaf of the state that a step returns, and on its outputs."""
    with warnings.catch_warnings():  # of more special kinds
        warnings.simplefilter("ignore")
        state = jax.eval_shape(lambda: strategy.init(make_state))
        program = strategy.step(step, **options)
        program.lower(state, *strategy.split(batch))
    found = program._compiled.proof.equivalence
    return {name: verdict for name, verdict in found.items() if name.startswith("state")}


def wrong(found):
    return [verdict for verdict in found.values() if verdict.name == "not equivalent"]


def fault_lines(step):
    source, first = inspect.getsourcelines(step)
    return {first + i for i, line in enumerate(source) if line.rstrip().endswith("# fault")}


def lines_of(verdict):
    """Returns the lines of this corpus from which the operations in the chain of a verdict were called."""
    sites = verdict._cause.chain() if verdict._cause else []
    equations = [equation for site in sites for equation in (site.equation, *site.calls)]
    frames = [frame for equation in equations for frame in equation.source_info.traceback.frames]
    return {frame.line_num for frame in frames if frame.file_name == equivalence_cases.__file__}


@pytest.fixture(scope="module")
def four():
    return jdist.MirroredStrategy([f"cpu:{i}" for i in range(4)])


@pytest.mark.slow
@pytest.mark.parametrize("case", equivalence_cases.CASES, ids=lambda case: case.name)
def test_seeded_fault_is_found_with_its_line(four, case):
    found = wrong(verdicts_of(four, case.wrong, case.make_state, case.batch))
    assert bool(found) == (case.name not in NOT_FOUND)
    if found and case.name not in OTHER_LINE:
        assert fault_lines(case.wrong) & set().union(*map(lines_of, found))
        assert all(
            verdict.reason and verdict.fix for verdict in found if not verdict.reason.startswith("random inputs")
        )


RIGHT = [(case.name, case.make_state, case.batch, case.right) for case in equivalence_cases.CASES if case.right]
RIGHT += [(case.name, case.make_state, case.batch, case.right) for case in equivalence_cases.RIGHT_ONLY]


@pytest.mark.slow
def test_right_steps_are_not_called_wrong_and_most_are_proved(four, subtests):
    counts = collections.Counter()
    for name, make_state, batch, step in RIGHT:
        with subtests.test(name):
            found = verdicts_of(four, step, make_state, batch)
            counts.update(verdict.name for verdict in found.values())
            assert not wrong(found), wrong(found)[0]
    assert counts["unknown"] <= MAX_UNKNOWN * counts.total(), counts


@pytest.mark.slow
def test_ported_programs_are_not_called_wrong_and_most_are_proved(four, subtests, keras):
    counts = collections.Counter()
    for program in ported_programs.PROGRAMS:
        with subtests.test(program.name):
            found = verdicts_of(four, program.step, program.make_state, program.batch)
            counts.update(verdict.name for verdict in found.values())
            assert not wrong(found), wrong(found)[0]
    assert counts["unknown"] <= MAX_UNKNOWN * counts.total(), counts


@pytest.mark.slow
@pytest.mark.parametrize("program", ported_programs.FOREIGN, ids=lambda program: program.name)
def test_check_of_programs_of_others_finds_nothing(program):
    fn, args = program.make(4)
    report = jdist.check(fn, *args)
    assert report.functions
    assert report.num_findings == 0, str(report)


X, Y = np.arange(16, dtype=np.float32) / 16, np.arange(16, dtype=np.float32) / 8 + 1
GRAD = jax.grad(lambda w, x, y: jnp.mean((w * x - y) ** 2))


def summed(w, x, y):
    return w - 0.1 * jdist.all_reduce("sum", GRAD(w, x, y)), None


def averaged(w, x, y):
    return w - 0.1 * jdist.all_reduce("mean", GRAD(w, x, y)), None


def called(strategy, step, **options):
    program = strategy.step(step, **options)
    w = strategy.init(lambda: jnp.float32(0.5))
    for batch in strategy.distribute_dataset((X, Y), batch_size=16):
        w, _ = program(w, *batch)
    return program


@pytest.fixture(params=["mirrored_3", "central_2", "groups_2"])
def strategy(request):
    return STRATEGIES[request.param]() if request.param != "mirrored_3" else STRATEGIES["mirrored_2"]()


def test_sum_for_mean_warns_once_with_the_factor_the_line_and_the_fix(strategy):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        program = called(strategy, summed)
    (warning,) = [one for one in caught if one.category is jdist.NotEquivalentWarning]
    line = inspect.getsourcelines(summed)[1] + 1
    assert (warning.filename, warning.lineno) == (__file__, line)
    text = str(warning.message)
    assert f"`summed` on {strategy.num_replicas_in_sync} replicas" in text
    assert f"{strategy.num_replicas_in_sync} times too large" in text
    assert f"all_reduce at {__file__}"[:10] in text
    assert 'jdist.all_reduce("mean", x)' in text
    assert program.proof.not_equivalent == ("state",)
    assert str(program.proof).endswith("0 of 1 results are what one device computes from the global batch; not: state")


def test_mean_is_proved(strategy):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        program = called(strategy, averaged)
    assert program.proof.equivalent == ("state",)
    assert str(program.proof).endswith("1 of 1 results are what one device computes from the global batch")


FORMS = {
    "call": lambda strategy, step, w, batch: strategy.step(step)(w, *batch),
    "ahead of time": lambda strategy, step, w, batch: strategy.step(step).lower(w, *batch).compile(),
    "in a jit": lambda strategy, step, w, batch: jax.jit(lambda w, x, y: strategy.step(step)(w, x, y))(w, *batch),
    "in a scan": lambda strategy, step, w, batch: jax.jit(
        lambda w, x, y: jax.lax.scan(lambda w, _: strategy.step(step)(w, x, y), w, length=2)
    )(w, *batch),
    "with a constant of a jit": lambda strategy, step, w, batch: jax.jit(
        lambda w, x, y, c: strategy.step(lambda w, x, y: step(w, x * c, y))(w, x, y)
    )(w, *batch, 2.0),
    "several steps": lambda strategy, step, w, batch: strategy.step(step, steps_per_call=2)(
        w, *([x, x] for x in batch)
    ),
    "by name": lambda strategy, step, w, batch: strategy.step(step)(w, **dict(zip("xy", batch, strict=True))),
    "late": lambda strategy, step, w, batch: jdist.step(step).on(strategy)(w, *batch),
    "proof in a scope": lambda strategy, step, w, batch: read_in_scope(strategy, strategy.step(step), w, batch),
    "leaks are checked": lambda strategy, step, w, batch: jax.checking_leaks()(strategy.step(step))(w, *batch),
}


def read_in_scope(strategy, program, w, batch):
    program.lower(w, *batch)
    with strategy.scope(), jax.set_mesh(strategy.mesh):
        return program.proof.not_equivalent


@pytest.mark.parametrize("form", FORMS)
def test_one_warning_in_each_form_of_a_call(strategy, form):
    def step(w, x, y):
        jnp.sin(X)  # JAX compiles it during the trace
        return summed(w, x, y)

    w, batch = strategy.init(lambda: jnp.float32(0.5)), strategy.split((X, Y))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        FORMS[form](strategy, step, w, batch)
    (warning,) = [one for one in caught if one.category is jdist.NotEquivalentWarning]
    assert (warning.filename, warning.lineno) == (__file__, inspect.getsourcelines(summed)[1] + 1)


def test_traced_step_is_compared_when_it_is_compiled_or_its_verdicts_are_read(strategy):
    traces = []

    def step(w, x, y):
        traces.append(x.shape)
        return averaged(w, x, y)

    program, w, batch = strategy.step(step), strategy.init(lambda: jnp.float32(0.5)), strategy.split((X, Y))
    jax.eval_shape(program, w, *batch)
    program.lower(w, *batch)
    assert len(traces) == 1
    assert program.proof.equivalent == program.proof.equivalent == ("state",)
    assert len(traces) == 2
    program.lower(w, *batch).compile()
    assert len(traces) == 2


def test_state_survives_a_warning_that_is_an_error(strategy):
    program, w, batch = strategy.step(summed), strategy.init(lambda: jnp.float32(0.5)), strategy.split((X, Y))
    with warnings.catch_warnings(), pytest.raises(jdist.NotEquivalentWarning):
        warnings.simplefilter("error")
        program(w, *batch)
    expected = 0.5 - strategy.num_replicas_in_sync * 0.1 * GRAD(0.5, X, Y)
    np.testing.assert_allclose(program(w, *batch)[0], expected, rtol=1e-5)


def test_error_is_raised_before_the_step_runs(strategy):
    with pytest.raises(jdist.NotEquivalentError, match="is not what one device computes from the global batch"):
        called(strategy, summed, equivalence="error")
    called(strategy, averaged, equivalence="error")


def test_ignored_step_is_traced_once_and_has_no_verdict(strategy):
    traces = []

    def step(w, x, y):
        traces.append(x.shape)
        return summed(w, x, y)

    program = called(strategy, step, equivalence="ignore")
    assert len(traces) == 1 and not program.proof.equivalence


def test_the_only_replica_is_traced_last(strategy):
    """The trace that runs is the first one, so code that can be traced once only, as by chex, is accepted."""
    sizes = []

    def step(w, x, y):
        sizes.append(x.shape[0])
        return averaged(w, x, y)

    called(strategy, step)
    assert sizes == [16 // strategy.num_replicas_in_sync, 16]


def test_function_that_can_be_traced_once_only_runs_without_a_verdict():
    two = STRATEGIES["mirrored_2"]()
    assert called(two, chex.assert_max_traces(n=1)(lambda *args: averaged(*args))).proof.unknown == ("state",)


@pytest.mark.parametrize("name", ["one_device", "mirrored_1", "sharded_4"])
def test_one_replica_is_not_compared(name):
    assert not called(STRATEGIES[name](), summed).proof.equivalence


def test_unknown_choice_is_an_error(strategy):
    with pytest.raises(ValueError, match='`equivalence` says what to do .* "error", "warn" or "ignore", got \'yes\'.'):
        strategy.step(averaged, equivalence="yes")


def test_step_that_needs_the_size_of_a_part_is_unknown(strategy):
    size = 16 // strategy.num_replicas_in_sync

    def step(w, x, y):
        return averaged(w, x.reshape(size), y)

    (verdict,) = called(strategy, step).proof.equivalence.values()
    assert verdict.name == "unknown"
    assert verdict.reason.startswith("it cannot be traced with the global batch: TypeError: ")


def test_number_of_replicas_in_a_constant_is_not_called_wrong(strategy):
    number = strategy.num_replicas_in_sync

    def step(w, x, y):
        return w - 0.1 * jdist.all_reduce("sum", GRAD(w, x, y)) / number, None

    (verdict,) = called(strategy, step).proof.equivalence.values()
    assert (verdict.name, verdict.reason) == ("unknown", "a constant may be the number of replicas")


def test_values_of_one_number_per_replica_are_unknown(strategy):
    program = strategy.step(lambda w, x: (w - jdist.all_reduce("mean", x), None))
    program(strategy.init(lambda: jnp.float32(0)), strategy.distribute_values_from_function(lambda c: 1.0))
    assert program.proof.unknown == ("state",)


def test_outputs_have_verdicts_and_do_not_warn(strategy):
    def step(w, x, y):
        total = jnp.sum(x)
        return averaged(w, x, y)[0], {
            "per_example": w * x,
            "total": jdist.all_reduce("sum", total),
            "part": total,
            "wrong": jdist.all_reduce("mean", total),
        }

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = called(strategy, step).proof.equivalence
    assert {name: verdict.name for name, verdict in found.items()} == {
        "state": "equivalent",
        "output['part']": "equivalent",
        "output['per_example']": "equivalent",
        "output['total']": "equivalent",
        "output['wrong']": "not equivalent",
    }
    assert found["output['part']"].reason == "the sum over the replicas is that of one device"
    assert found["output['wrong']"].reason == f"it is {strategy.num_replicas_in_sync} times too small"


@pytest.mark.parametrize("aggregation", ["SUM", "MEAN"])
def test_values_that_are_aggregated_when_read_are_compared_as_they_are_read(strategy, aggregation):
    def step(state, x, y):
        add = jnp.sum(x) if aggregation == "SUM" else jnp.mean(x)
        return {"right": state["right"] + add, "wrong": state["wrong"] + jnp.sum(x) / jnp.sum(y)}, None

    program = strategy.step(step)
    state = strategy.init(lambda: {name: jdist.SyncOnRead(jnp.float32(0), aggregation) for name in ("right", "wrong")})
    program.lower(state, *strategy.split((X, Y)))
    assert program._compiled.proof.equivalent == ("state['right']",)
    assert program._compiled.proof.not_equivalent == ("state['wrong']",)


def test_several_steps_per_call_are_compared_too(strategy):
    def lists():
        return [[batch[i] for batch in [strategy.split((X, Y))] * 2] for i in (0, 1)]

    for step, expected in ((averaged, "equivalent"), (summed, "not equivalent")):
        program = strategy.step(step, steps_per_call=2)
        program(strategy.init(lambda: jnp.float32(0.5)), *lists())
        assert program.proof.equivalence["state"].name == expected


APPROXIMATE = {
    "int8",
    "int8_stochastic",
    "top_k",
    "power_sgd",
    "top_k_in_bfloat16",
    "every_int8",
    "skip_nonfinite_top_k",
}


@pytest.mark.parametrize(
    ("policy", "name"),
    policies.cases([name for name in policies.POLICIES if name != "sum"], ["mirrored_2", "groups_of_2"]),
)
def test_policy_is_equivalent_or_says_in_which_sense(policy, name):
    strategy, tx = policies.POLICY_STRATEGIES[name](), policies.POLICIES[policy](optax.adam(0.1))

    def make_state():
        params = policies.first_params()
        return policies.State(params, tx.init(params))

    def step(state, x, y):
        loss, grads = jax.value_and_grad(policies.loss)(state.params, x, y)
        updates, opt_state = tx.update(grads, state.opt_state, state.params)
        return policies.State(optax.apply_updates(state.params, updates), opt_state), jdist.all_reduce("mean", loss)

    batch = [np.zeros((policies.ROWS, size), np.float32) for size in (6, 4)]
    found = verdicts_of(strategy, step, make_state, batch)
    params = [verdict for leaf, verdict in found.items() if leaf.startswith("state.params")]
    chex.assert_equal(len(params), 4)
    if policy in policies.LOCAL_UPDATES:
        assert all(verdict.by_design and "by design of the policy" in verdict.reason for verdict in params)
        with pytest.raises(jdist.NotEquivalentError, match="by design of the policy"):
            verdicts_of(strategy, step, make_state, batch, equivalence="error")
    else:
        assert {verdict.name for verdict in found.values()} == {"equivalent"}
        assert any("up to the rounding" in verdict.reason for verdict in params) == (policy in APPROXIMATE)


class Classifier(nn.Module):
    normalized: bool = False

    @nn.compact
    def __call__(self, x, train=False):
        x = nn.Dense(8)(x)
        if self.normalized:
            x = nn.BatchNorm(use_running_average=not train)(x)
        x = nn.Dropout(0.1, deterministic=not train)(nn.relu(x))
        return nn.Dense(3)(x)


LOSS = optax.softmax_cross_entropy_with_integer_labels
DATA = np.random.default_rng(0).normal(size=(18, 5)).astype(np.float32), np.arange(18) % 3


@pytest.mark.parametrize("steps", [{}, {"micro_batches": 2}], ids=["whole", "micro_batches"])
def test_trainer_is_equivalent_by_construction(steps):
    """Also for the last batch, which is padded to 8 examples with weights."""
    trainer = jdist.Trainer(
        Classifier(),
        optax.adamw(1e-2),
        LOSS,
        metrics={"accuracy": jdist.metrics.Accuracy()},
        strategy=STRATEGIES["mirrored_2"](),
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fit = trainer.fit(DATA, batch_size=8, epochs=1, progress="off", **steps)
    assert not fit.proof.not_equivalent and not fit.proof.unknown
    assert len(fit.proof.equivalent) == len(fit.proof.replicated) + len(fit.proof.per_replica)


class NnxClassifier(nnx.Module):
    def __init__(self):
        rngs = nnx.Rngs(0)
        self.dense, self.norm, self.head = (
            nnx.Linear(5, 8, rngs=rngs),
            nnx.BatchNorm(8, rngs=rngs),
            nnx.Linear(8, 3, rngs=rngs),
        )

    def __call__(self, x):
        return self.head(self.norm(self.dense(x)))


def keras_classifier(keras):
    layers = keras.layers
    return keras.Sequential(
        [keras.Input((5,)), layers.Dense(8), layers.BatchNormalization(name="norm"), layers.Dense(3)]
    )


# The model, the leaf of the layer, the line of the layer after the first one of the function, and the fix.
NORMALIZED = {
    "linen": (
        lambda request: Classifier(normalized=True),
        "state.model_state['batch_stats']['BatchNorm_0']['var']",
        (Classifier.__call__, 4),
        'Write `BatchNorm(..., axis_name="replica")`.',
    ),
    "nnx": (
        lambda request: NnxClassifier(),
        "state.model_state['norm']['var']",
        (NnxClassifier.__call__, 1),
        'Write `BatchNorm(..., axis_name="replica")`.',
    ),
    "keras": (
        lambda request: keras_classifier(request.getfixturevalue("keras")),
        "state.model_state['sequential/norm/moving_variance']",
        None,
        "Keras has no `synchronized=True` on JAX. Use `jdist.ShardedStrategy()`, whose one replica normalizes the global batch, "
        "or another layer, such as `GroupNormalization`.",
    ),
}


@pytest.mark.parametrize("make, leaf, line, fix", NORMALIZED.values(), ids=NORMALIZED)
def test_batch_norm_of_a_trainer_warns_once_and_names_the_layer_and_the_fix(make, leaf, line, fix, request):
    """The step is traced twice: the last batch is padded."""
    trainer = jdist.Trainer(make(request), optax.sgd(1e-2), LOSS, strategy=STRATEGIES["mirrored_2"]())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fit = trainer.fit(DATA, batch_size=8, epochs=1, progress="off")
        call_line = inspect.currentframe().f_lineno - 1
    assert fit.steps == 3
    (found,) = [one for one in caught if one.category is jdist.NotEquivalentWarning]
    line = call_line if line is None else inspect.getsourcelines(line[0])[1] + line[1]
    assert (found.filename, found.lineno) == (__file__, line)
    first, *others = str(found.message).splitlines()
    assert first.startswith(f"{leaf} of `train` on 2 replicas is not what one device computes from the global batch: ")
    assert "batch normalization uses the statistics of each replica's part of the batch" in first
    assert first.endswith("The running statistics are averaged over the replicas.")
    ignore = 'If this is intended: `warnings.simplefilter("ignore", jdist.NotEquivalentWarning)`.'
    assert others == [f"  {fix}", f"  {ignore}"]
    lines = [line for verdict in fit.proof.equivalence.values() for line in verdict.lines]
    assert lines and not any("jdist/_src" in line for line in lines)


def test_batch_norm_of_equinox_over_both_axes_does_not_warn():
    eqx = pytest.importorskip("equinox")

    class Net(eqx.Module):
        norm: eqx.nn.BatchNorm
        head: eqx.nn.Linear

        def __call__(self, x, state):
            x, state = self.norm(x, state)
            return self.head(x), state

    found = {}
    for axis in ("batch", ("batch", "replica")):
        make = lambda axis=axis: Net(
            eqx.nn.BatchNorm(5, axis, mode="batch"), eqx.nn.Linear(5, 3, key=jax.random.key(0))
        )
        trainer = jdist.Trainer(
            eqx.nn.make_with_state(make)(), optax.sgd(0.1), LOSS, strategy=STRATEGIES["mirrored_2"]()
        )
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            trainer.fit(DATA, batch_size=6, progress="off")
        found[axis] = [str(one.message) for one in caught if one.category is jdist.NotEquivalentWarning]
    assert found.pop(("batch", "replica")) == []
    ((message,),) = found.values()
    assert "batch normalization uses the statistics of each replica's part of the batch, at" in message
    assert 'Write `BatchNorm(..., axis_name=("batch", "replica"))`.' in message and len(message.splitlines()) == 3


def test_keras_batch_norm_under_the_sharded_strategy_equals_one_device(keras):
    """The fix of the warning."""
    model, states = keras_classifier(keras), []
    sharded = jdist.ShardedStrategy(mesh=jax.sharding.Mesh(jax.devices()[:2], ("data",)))
    for strategy in (sharded, jdist.OneDeviceStrategy("cpu:0")):
        with warnings.catch_warnings():
            warnings.simplefilter("error", jdist.NotEquivalentWarning)
            fit = jdist.Trainer(model, optax.sgd(0.1), LOSS, strategy=strategy).fit(DATA, batch_size=6, progress="off")
        states.append(jdist.read_values((fit.state.params, fit.state.model_state)))
    chex.assert_trees_all_close(*states, rtol=1e-5, atol=1e-6)


def test_large_step_is_compared_without_arrays():
    """Random inputs are not evaluated for it, and not drawn either: a state can be larger than the memory of the host."""
    strategy, rows = STRATEGIES["mirrored_2"](), jax.ShapeDtypeStruct((2, 1, 2**25), np.float32)
    program = strategy.step(lambda w, x: (w - jdist.all_reduce("sum", x[0]), None))
    program.lower(jax.ShapeDtypeStruct((2**25,), np.float32), jdist.PerReplica(rows))
    tracemalloc.start()
    try:
        assert program.proof.equivalence
        assert tracemalloc.get_traced_memory()[1] < 2**25
    finally:
        tracemalloc.stop()
