"""Metrics of flax.nnx, clu, metrax and Keras: equal to the library's own value of all examples, or refused with the reason."""

import functools
import importlib
import inspect
import pathlib
import sys
import warnings
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jdist
from jdist.callbacks import CallbackResult, Moment
from jdist.metrics import adapt

from laws import STRATEGIES

pytestmark = pytest.mark.filterwarnings("ignore:Explicitly requested dtype int64")  # `MeanIoU` of Keras

rng = np.random.default_rng(0)
SIZE = 11
DATA = {
    "values": rng.normal(size=SIZE).astype(np.float32),
    "binary": rng.integers(0, 2, SIZE).astype(np.float32),
    "fractions": rng.uniform(size=SIZE).astype(np.float32),
    "labels": rng.integers(0, 3, SIZE).astype(np.int32),
    "other_labels": rng.integers(0, 3, SIZE).astype(np.int32),
    "logits": rng.normal(size=(SIZE, 3)).astype(np.float32),
    "rows": rng.uniform(0.1, 0.9, (SIZE, 3)).astype(np.float32),
    "other_rows": rng.uniform(0.1, 0.9, (SIZE, 3)).astype(np.float32),
    "scores": rng.normal(size=(SIZE, 5)).astype(np.float32),
    "relevant": rng.integers(0, 2, (SIZE, 5)).astype(np.float32),
    "binary_column": rng.integers(0, 2, (SIZE, 1)).astype(np.float32),
    "fraction_column": rng.uniform(size=(SIZE, 1)).astype(np.float32),
    "words": rng.integers(0, 3, (SIZE, 4)).astype(np.int32),
    "word_fractions": rng.dirichlet(np.ones(3), (SIZE, 4)).astype(np.float32),
    "images": rng.uniform(size=(SIZE, 12, 12, 1)).astype(np.float32),
    "other_images": rng.uniform(size=(SIZE, 12, 12, 1)).astype(np.float32),
    "classes": rng.integers(0, 2, (SIZE, 4, 4)).astype(np.int32),
}
DATA |= {
    "one_hot": np.eye(3, dtype=np.float32)[DATA["labels"]],
    "probabilities": np.asarray(jax.nn.softmax(DATA["logits"])),
    "other_classes": DATA["classes"][::-1].copy(),
}


class Case(NamedTuple):
    """A metric.

    Attributes:
        make: Returns the metric, or its class.
        arguments: The names of its arguments in `DATA`; with a name of the argument of the library where it has no position.
        constants: Further arguments of its update.
        error: What the message contains if it is refused.
    """

    make: Any
    arguments: tuple[str, ...] | dict[str, str]
    constants: dict[str, Any] = {}
    error: str | None = None

    def of(self, data: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]:
        """Returns positional and keyword arguments of an update."""
        if isinstance(self.arguments, dict):
            return [], {name: data[key] for name, key in self.arguments.items()}
        return [data[key] for key in self.arguments], {}


def nnx_cases():
    return {
        "Average": Case(nnx.metrics.Average, ("values",)),
        "Accuracy": Case(nnx.metrics.Accuracy, ("logits", "labels")),
        "MultiMetric": Case(
            lambda: nnx.MultiMetric(accuracy=nnx.metrics.Accuracy(), mean=nnx.metrics.Average()),
            {"logits": "logits", "labels": "labels", "values": "values"},
        ),
        "Welford": Case(nnx.metrics.Welford, ("values",), error="its state leaf 'm2' does more than to add to it"),
    }


def clu_cases():
    from clu import metrics as clu

    of_loss = clu.Average.from_output("loss")
    outputs = {"logits": "logits", "labels": "labels", "loss": "values"}
    return {
        "Average": Case(lambda: clu.Average, ("values",)),
        "Accuracy": Case(lambda: clu.Accuracy, ("logits", "labels")),
        "Average.from_output": Case(lambda: of_loss, {"loss": "values"}),
        "Collection": Case(lambda: clu.Collection.create(accuracy=clu.Accuracy, loss=of_loss), outputs),
        "LastValue": Case(lambda: clu.LastValue, ("values",), error="its state leaf 'total' replaces it"),
        "CollectingMetric": Case(
            lambda: clu.CollectingMetric.from_outputs(["logits"]), ("logits",), error="no state of arrays before"
        ),
        "Std": Case(
            lambda: clu.Std, ("values",), error="unexpected keyword argument 'a_min'"
        ),  # a defect of clu 0.0.12
    }


def metrax_cases():
    import metrax

    zeros, ranks = jnp.zeros, {"ks": np.array([1, 3])}
    ranked = ("AveragePrecisionAtK", "DCGAtK", "MRR", "NDCGAtK", "PrecisionAtK", "RecallAtK")
    pair, image_pair = ("fractions", "binary"), ("images", "other_images")
    in_bits = {"num_classes": 2, "target_class_ids": np.array([0, 1])}
    text = {
        name: Case(lambda name=name: getattr(metrax, name), (), error="")
        for name in ("BLEU", "RougeL", "RougeN", "WER")
    }
    return {
        "Accuracy": Case(lambda: metrax.Accuracy, ("labels", "other_labels")),
        "Average": Case(lambda: metrax.Average, ("values",)),
        "AUCPR": Case(lambda: metrax.AUCPR(*[zeros(200)] * 3, 200), pair),
        "AUCROC": Case(lambda: metrax.AUCROC(*[zeros(200)] * 4, 200), pair),
        **{name: Case(lambda name=name: getattr(metrax, name)(zeros(2), zeros(())), ("scores", "relevant"), ranks)
           for name in ranked},
        "Dice": Case(lambda: metrax.Dice, pair),
        "MAE": Case(lambda: metrax.MAE, ("values", "fractions")),
        "MSE": Case(lambda: metrax.MSE, ("values", "fractions")),
        "RMSE": Case(lambda: metrax.RMSE, ("values", "fractions")),
        "RSQUARED": Case(lambda: metrax.RSQUARED, ("values", "fractions")),
        "Precision": Case(lambda: metrax.Precision, pair, {"threshold": 0.3}),
        "Recall": Case(lambda: metrax.Recall, pair),
        "Perplexity": Case(lambda: metrax.Perplexity, ("word_fractions", "words")),
        "PSNR": Case(lambda: metrax.PSNR, image_pair, {"max_val": 1.0}),
        "SSIM": Case(lambda: metrax.SSIM, image_pair, {"max_val": 1.0}),
        "SNR": Case(lambda: metrax.SNR, ("rows", "other_rows")),
        "FBetaScore": Case(lambda: metrax.FBetaScore, pair, error="has no `merge`"),
        "IoU": Case(lambda: metrax.IoU, ("classes", "other_classes"), in_bits, "three random examples, an update adds"),
        **{name: case._replace(error="needs arguments [batch, ...]") for name, case in text.items()},
    }  # fmt: skip


def keras_cases():
    metrics = sys.modules["keras"].metrics
    names = "MeanSquaredError MeanAbsoluteError MeanAbsolutePercentageError MeanSquaredLogarithmicError RootMeanSquaredError "
    names += (
        "LogCoshError Poisson KLDivergence CosineSimilarity Hinge SquaredHinge CategoricalHinge PearsonCorrelation "
    )
    names += "ConcordanceCorrelation"
    binary = "TruePositives TrueNegatives FalsePositives FalseNegatives Precision Recall AUC BinaryIoU"
    at = {"PrecisionAtRecall": "recall", "RecallAtPrecision": "precision"}
    at |= {"SensitivityAtSpecificity": "specificity", "SpecificityAtSensitivity": "sensitivity"}
    one_hot, sparse, two_labels = ("one_hot", "probabilities"), ("labels", "probabilities"), ("labels", "other_labels")

    def case(name, arguments, built=False, error=None, **options):
        def make():
            metric = getattr(metrics, name)(**options)
            if built:
                metric.update_state(*[DATA[key][:1] for key in arguments])
            return metric

        return name, Case(make, arguments, error=error)

    return dict([
        *[case(name, ("rows", "other_rows")) for name in names.split()],
        *[case(name, ("binary", "fractions")) for name in binary.split()],
        *[case(name, ("binary_column", "fraction_column")) for name in ("BinaryAccuracy", "BinaryCrossentropy")],
        *[case(name, ("binary", "fractions"), **{option: 0.5}) for name, option in at.items()],
        *[case(name, ("values",)) for name in ("Mean", "Sum")],
        *[case(name, one_hot) for name in ("CategoricalAccuracy", "CategoricalCrossentropy")],
        *[case(name, sparse) for name in ("SparseCategoricalAccuracy", "SparseCategoricalCrossentropy")],
        case("TopKCategoricalAccuracy", one_hot, k=2),
        case("SparseTopKCategoricalAccuracy", sparse, k=2),
        case("Accuracy", two_labels),
        case("MeanMetricWrapper", ("rows", "other_rows"), fn=lambda y_true, y_pred: (y_true - y_pred) ** 4),
        case("IoU", two_labels, num_classes=3, target_class_ids=[0]),
        case("MeanIoU", two_labels, num_classes=3),
        case("OneHotIoU", one_hot, num_classes=3, target_class_ids=[0]),
        case("OneHotMeanIoU", one_hot, num_classes=3),
        case("F1Score", one_hot, built=True),
        case("FBetaScore", one_hot, built=True, beta=2.0),
        case("R2Score", ("rows", "other_rows"), built=True),
    ])  # fmt: skip


CASES = {"flax.nnx": nnx_cases, "clu": clu_cases, "metrax": metrax_cases, "keras": keras_cases}
ACCEPTED = {
    "flax.nnx": "Accuracy, Average, MultiMetric",
    "clu": "Accuracy, Average, Average.from_output, Collection",
    "metrax": "AUCPR, AUCROC, Accuracy, Average, AveragePrecisionAtK, DCGAtK, Dice, MAE, MRR, MSE, NDCGAtK, PSNR, Perplexity, "
    "Precision, PrecisionAtK, RMSE, RSQUARED, Recall, RecallAtK, SNR, SSIM",
    "keras": "all others",
}
REFUSED = {
    "flax.nnx": {"Welford": "its update divides by the count so far"},
    "clu": {
        "LastValue": "replaces its state",
        "CollectingMetric": "stores the outputs",
        "Std": "its `compute` fails with these versions of JAX (clu 0.0.12)",
    },
    "metrax": {
        "FBetaScore": "has no `merge`",
        "IoU": "divides counts of the batch",
        **dict.fromkeys(("BLEU", "RougeL", "RougeN", "WER"), "its arguments are strings"),
    },
    "keras": {},
}


@functools.cache
def two():
    return STRATEGIES["mirrored_2"]()


@pytest.fixture(params=CASES)
def library(request):
    """Returns the name of an installed library."""
    return installed(request, request.param)


def installed(request, library):
    if library == "keras":
        request.getfixturevalue("keras")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pytest.importorskip(library, reason=f"{library} is optional and not installed.")
    return library


def of_library(case, size):
    """Returns the value of the library of the first examples in one batch on one device."""
    args, kwargs = case.of({name: jnp.asarray(array[:size]) for name, array in DATA.items()})
    metric = case.make()
    if hasattr(metric, "result"):
        metric.reset_state()
        metric.update_state(*args, **kwargs)
        return metric.result()
    if isinstance(metric, nnx.Metric):
        names = [name for name in inspect.signature(metric.update).parameters if name not in ("mask", "kwargs")]
        metric.update(**dict(zip(names or ["values"], args, strict=False)), **kwargs)
        return metric.compute()
    create: Any = getattr(metric, "single_from_model_output", None) or metric.from_model_output
    names = [name for name in inspect.signature(create).parameters if name not in ("mask", "kwargs", "_")]
    kwargs |= dict(zip(names, args, strict=False))
    return jax.jit(lambda kwargs: create(**kwargs, **case.constants).compute())(kwargs)


@pytest.mark.parametrize(
    "name", ["flax.nnx", "clu", *(pytest.param(name, marks=pytest.mark.slow) for name in ("metrax", "keras"))]
)
def test_values_equal_those_of_the_library_on_all_examples(request, name):
    """Over two replicas, batches of four and padding; and over full batches, which take another path."""
    library = installed(request, name)
    cases = {name: case for name, case in CASES[library]().items() if case.error is None}
    adapted = {name: adapt(case.make(), **case.constants) for name, case in cases.items()}

    @jdist.eval_step
    def evaluate(_, batch, weights):
        updated = {}
        for name, case in cases.items():
            args, kwargs = case.of(batch)
            updated[name] = adapted[name].update(*args, weights=weights, **kwargs)
        return updated

    padded = two().distribute_dataset(DATA, 4, remainder="pad")
    full = two().distribute_dataset(DATA, 4, remainder="drop")
    for dataset, size in ((padded, SIZE), (full, 8)):
        with two().scope():
            values = evaluate.over(None, dataset)
        for name, case in cases.items():
            close = functools.partial(np.testing.assert_allclose, rtol=2e-5, atol=1e-6, err_msg=name)
            jax.tree.map(close, values[name], of_library(case, size))


def test_other_metrics_are_refused_with_the_reason(library, subtests):
    for name, case in CASES[library]().items():
        if case.error is not None:
            args, kwargs = case.of(DATA)
            with subtests.test(name), pytest.raises((TypeError, ValueError)) as caught:
                adapt(case.make(), **case.constants).update(*args, **kwargs)
            assert case.error in str(caught.value), caught.value


def test_every_metric_of_the_library_has_a_case(library):
    modules = {"flax.nnx": "flax.nnx.training.metrics", "clu": "clu.metrics", "keras": "keras.metrics"}
    module = importlib.import_module(modules.get(library, library))
    base = module.Metric if hasattr(module, "Metric") else sys.modules["clu.metrics"].Metric
    classes = {name for name, kind in vars(module).items() if inspect.isclass(kind) and issubclass(kind, base)}
    names = {name for name in classes if name[0] != "_"} - {"Metric", "MetricState"}
    cases = CASES[library]()
    assert names <= set(cases)
    accepted = sorted(name for name, case in cases.items() if case.error is None)
    assert ACCEPTED[library] in (", ".join(accepted), "all others")
    assert sorted(REFUSED[library]) == sorted(set(cases) - set(accepted))


def test_table_of_the_docs_lists_the_cases():
    rows = []
    for name in CASES:
        names = (
            ", ".join(f"`{one}`" for one in ACCEPTED[name].split(", ")) if name != "keras" else "all of `keras.metrics`"
        )
        reasons: dict[str, list[str]] = {}
        for refused, reason in REFUSED[name].items():
            reasons.setdefault(reason, []).append(f"`{refused}`")
        refused = "; ".join(f"{', '.join(names)}: {reason}" for reason, names in reasons.items())
        rows.append(f"| {name} | {names} | {refused or 'none'} |")
    page = (pathlib.Path(__file__).parents[2] / "docs/api/metrics.md").read_text(encoding="utf-8")
    assert "\n".join(rows) in page, "\n".join(rows)


X, Y = DATA["logits"], DATA["labels"]
MODEL = lambda key, x: jnp.eye(3), lambda w, x: x @ w
cross_entropy = optax.softmax_cross_entropy_with_integer_labels


def trainer_of(strategy, metrics, **options):
    return jdist.Trainer(MODEL, optax.sgd(0.1), cross_entropy, metrics=metrics, strategy=strategy, **options)


def test_trainer_accepts_them_with_every_strategy(strategy, keras):
    """Their values in training, validation and evaluation equal those of the metric of jdist."""
    metrics = {
        "jdist": jdist.metrics.Accuracy(),
        "nnx": nnx.metrics.Accuracy(),
        "keras": keras.metrics.SparseCategoricalAccuracy(),
        "mean": (nnx.metrics.Average(), lambda outputs, targets: {"values": outputs.argmax(-1) == targets}),
    }
    trainer = trainer_of(strategy, metrics)
    fit = trainer.fit((X, Y), batch_size=12, epochs=2, validation_data=(X, Y), progress="off")
    results = trainer.evaluate(fit.state, (X, Y), batch_size=12)
    expected = (trainer.predict(fit.state, X, batch_size=12).argmax(-1) == Y).mean()
    for name in metrics:
        assert fit.history[name] == fit.history["jdist"]
        assert fit.history[f"val_{name}"] == fit.history["val_jdist"]
        assert results[name] == pytest.approx(expected)
    assert metrics["nnx"].count[...] == 0 and float(metrics["keras"].count.value) == 0  # the objects are not changed


def test_resume_within_an_epoch_continues_their_sums(tmp_path):
    metrics = {"nnx": nnx.metrics.Accuracy(), "jdist": jdist.metrics.Accuracy()}

    def fit(**options):
        return trainer_of(two(), metrics).fit((X, Y), batch_size=4, epochs=2, progress="off", **options)

    whole = fit()
    stop = lambda event: CallbackResult(stop_reason="Killed.") if event.moment is Moment.STEP else None
    with jdist.Checkpointer(tmp_path, every=1) as checkpointer:
        save = jdist.callbacks.Checkpoint(checkpointer)
        save_until_killed = lambda event: save(event) if event.moment is not Moment.END else None
        assert fit(callbacks=[save_until_killed, stop]).steps == 1
        rest = fit(callbacks=[save], resume=checkpointer)
    assert rest.steps == 6
    assert rest.history["nnx"] == whole.history["nnx"] == whole.history["jdist"]


def test_collection_is_a_dict_of_metrics():
    metrics = nnx.MultiMetric(accuracy=nnx.metrics.Accuracy(), binary=nnx.metrics.Accuracy())
    trainer = trainer_of(two(), metrics)
    results = trainer.evaluate(trainer.init(X), (X, Y), batch_size=4)
    assert results["accuracy"] == results["binary"] == pytest.approx((X.argmax(-1) == Y).mean())
    with pytest.raises(TypeError, match=r"^The metric 'all' is a collection of metrics\. Pass it as `metrics=`"):
        trainer_of(two(), {"all": metrics})
    with pytest.raises(ValueError, match="A metric has the name 'loss'"):
        trainer_of(two(), nnx.MultiMetric(loss=nnx.metrics.Average("loss")))


def test_arguments_that_do_not_fit_raise(keras):
    rows = {
        "one_argument": (nnx.metrics.Average(), TypeError, r"^Average has 1 arguments \(values\), got 2\. In `Trainer"),
        "values_of_keras": (keras.metrics.Mean(), TypeError, r"^Mean has 1 arguments \(values\), got 2"),
        "mean": ((nnx.metrics.Average(), lambda o, t: (o.mean(),)), ValueError, r"^Average needs arguments \[batch, "),
        "last_dim": ((keras.metrics.MeanSquaredError(), lambda o, t: (o[:, 0], o[:, 1])), ValueError,
                     r"three random examples.*\[batch, 1\]"),
        "variance": ((nnx.metrics.Welford(), lambda o, t: (o[:, 0],)), ValueError, r"'m2' does more than to add to it"),
    }  # fmt: skip
    for name, (metric, kind, message) in rows.items():
        trainer = trainer_of(two(), {name: metric})
        with pytest.raises(kind, match=message) as caught:
            trainer.evaluate(trainer.init(X), (X, Y), batch_size=4)
        assert any(f"In the metric '{name}'" in note for note in caught.value.__notes__)
    with pytest.raises(TypeError, match=r"^F1Score creates variables in its first update\. Call `metric\.update_state"):
        trainer_of(two(), {"f1": keras.metrics.F1Score()})
    with pytest.raises(TypeError, match=r"^`metric` must be a metric of flax\.nnx.*the class Accuracy: call it"):
        adapt(nnx.metrics.Accuracy)
    with pytest.raises(ValueError, match=r"^weights float32\[3\] do not match an argument of Average float32\[11\]"):
        adapt(nnx.metrics.Average()).update(DATA["values"], weights=np.ones(3, np.float32))


def test_own_loop_adds_local_sums_and_reduces_them(strategy):
    """In the state of a step, and by `all_reduce`. Neither warns of a repeated sum."""
    average = adapt(nnx.metrics.Average())
    batches = [np.arange(24, dtype=np.float32) + i for i in range(3)]

    @strategy.step
    def step(state, batch):
        return state.update(batch), jdist.all_reduce("sum", average.update(batch))

    state = strategy.init(lambda: jdist.SyncOnRead(average, "sum"))
    for batch in batches:
        state, reduced = step(state, strategy.split(batch))
    assert float(state.read().compute()) == pytest.approx(np.mean(batches), rel=1e-5)
    assert float(reduced.compute()) == pytest.approx(batches[-1].mean(), rel=1e-5)


def test_weights_are_exact():
    """Fractions and token weights, also where the library has a mask of booleans or no weights; NaN with weight 0."""
    values, weights = np.float32([1, 2, np.nan, 5]), np.float32([0.5, 1.5, 0, 1])
    average = adapt(nnx.metrics.Average()).update(values, weights=weights)
    assert float(average.compute()) == pytest.approx((0.5 + 3 + 5) / 3)
    tokens, of_tokens = DATA["scores"], (DATA["relevant"] * 0.25)
    average = adapt(nnx.metrics.Average()).update(tokens, weights=of_tokens)
    assert float(average.compute()) == pytest.approx((tokens * of_tokens).sum() / of_tokens.sum(), rel=1e-5)


def test_large_states_are_added_example_by_example(monkeypatch):
    from jdist._src.training import foreign_metrics

    metric, weights = adapt(nnx.metrics.Accuracy()), np.float32(np.arange(SIZE) % 3)
    expected = metric.update(X, Y, weights=weights).compute()
    monkeypatch.setattr(foreign_metrics, "_MAX_DELTAS", 1)
    assert metric.update(X, Y, weights=weights).compute() == expected > 0


def test_update_that_changes_an_attribute_is_refused():
    class Counting(nnx.metrics.Average):
        def __init__(self):
            super().__init__()
            self.calls = 0

        def update(self, **kwargs):
            self.calls += 1
            super().update(**kwargs)

    with pytest.raises(ValueError, match="Counting changes attributes that are not arrays"):
        adapt(Counting()).update(values=DATA["values"])


def test_metrics_adapted_twice_merge():
    first, second = (adapt(nnx.metrics.Average()).update(np.float32(x)) for x in ([1, 2], [6]))
    assert float(first.merge(second).compute()) == 3
    with pytest.raises(ValueError, match="Cannot merge"):
        first.merge(adapt(nnx.metrics.Accuracy()))


def test_eval_step_accepts_the_states_of_clu(request):
    installed(request, "clu")
    from clu import metrics as clu

    @jdist.eval_step
    def evaluate(_, batch, weights):
        values, labels, logits = batch
        collection = clu.Collection.create(accuracy=clu.Accuracy, loss=clu.Average.from_output("loss"))
        return {"all": collection.single_from_model_output(loss=values, logits=logits, labels=labels, mask=weights)}

    data = DATA["values"], DATA["labels"], DATA["logits"]
    for size, remainder in ((11, "pad"), (8, "drop")):
        with two().scope():
            values = evaluate.over(None, two().distribute_dataset(data, 4, remainder=remainder))["all"]
        assert values["loss"] == pytest.approx(data[0][:size].mean(), rel=1e-5)
        assert values["accuracy"] == pytest.approx((data[2].argmax(-1) == data[1])[:size].mean())


def test_eval_step_refuses_other_states_of_libraries(request):
    dataset = two().distribute_dataset(DATA["values"], 4, remainder="pad")

    def of_nnx(_, batch, weights):
        metric = nnx.metrics.Average()
        metric.update(values=batch, mask=weights)
        return {"mean": metric}

    with (
        two().scope(),
        pytest.raises(TypeError, match=r"result\['mean'\], a metric Average\. Adapt the metric outside"),
    ):
        jdist.eval_step(of_nnx).over(None, dataset)
    installed(request, "clu")
    from clu import metrics as clu

    last = lambda _, batch, weights: clu.LastValue.from_model_output(batch, mask=weights)
    with (
        two().scope(),
        pytest.raises(ValueError, match=r"a LastValue whose `merge` .*for its leaf 'total' it replaces it"),
    ):
        jdist.eval_step(last).over(None, dataset)
    without = lambda _, batch: clu.Average.from_model_output(batch)
    with (
        two().scope(),
        pytest.raises(TypeError, match=r"a metric Average, for a padded batch .*metric of clu or metrax"),
    ):
        jdist.eval_step(without).over(None, dataset)
