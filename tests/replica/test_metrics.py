"""Metrics: one table, the laws of every metric, and a comparison with scikit-learn."""

import chex
import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import sklearn.datasets
import sklearn.metrics

import jdist
from jdist import metrics

from laws import each_row

WIDTH = 6
CLASSES = 4
some = hypothesis.settings(max_examples=12, deadline=None, derandomize=True, database=None)
SPLITS = {n: jdist.MirroredStrategy([f"cpu:{i}" for i in range(n)]) for n in (2, 3)}
GROUPS = jdist.MirroredStrategy(
    [f"cpu:{i}" for i in range(4)], cross_device_ops=jdist.HierarchicalAllReduce(group_size=2)
)


def _numbers(rng, n):
    return rng.integers(-9, 9, size=(n, 2)).astype(np.float32)


def _classes(rng, n):
    return rng.integers(0, CLASSES, size=n)


# For each metric its empty value, and a function that returns arguments of `update` for n examples: integers, for exact sums.
METRICS = {
    "sum": (metrics.Sum(), lambda rng, n: (_numbers(rng, n),)),
    "mean": (metrics.Mean(), lambda rng, n: (_numbers(rng, n),)),
    "accuracy": (metrics.Accuracy(), lambda rng, n: (rng.normal(size=(n, CLASSES)), _classes(rng, n))),
    "top_2_accuracy": (metrics.TopKAccuracy(2), lambda rng, n: (rng.normal(size=(n, CLASSES)), _classes(rng, n))),
    "mean_squared_error": (metrics.MeanSquaredError(), lambda rng, n: (_numbers(rng, n), _numbers(rng, n))),
    "mean_absolute_error": (metrics.MeanAbsoluteError(), lambda rng, n: (_numbers(rng, n), _numbers(rng, n))),
    "confusion_matrix": (
        metrics.ConfusionMatrix.empty(CLASSES),
        lambda rng, n: (_classes(rng, n), rng.integers(-1, CLASSES + 1, size=n)),
    ),
    "f1": (metrics.F1.empty(CLASSES), lambda rng, n: (_classes(rng, n), _classes(rng, n))),
}
every_metric = pytest.mark.parametrize("name", METRICS)


def _summed(empty):
    return lambda weights, *args: jdist.all_reduce("sum", empty.update(*args, weights=weights))


SUMMED = {name: _summed(empty) for name, (empty, _) in METRICS.items()}
UPDATE = {name: jax.jit(type(empty).update) for name, (empty, _) in METRICS.items()}


def _examples(name, n, seed=0):
    """Returns weights and arguments for n examples."""
    rng = np.random.default_rng(seed)
    args = METRICS[name][1](rng, n)
    return rng.integers(0, 4, size=n).astype(np.float32), args


def _part(args, start, stop):
    return tuple(x[start:stop] for x in args)


def _all(name, weights, args):
    return UPDATE[name](METRICS[name][0], *args, weights=weights)


@every_metric
@some
@hypothesis.given(st.tuples(*3 * [st.integers(0, 99)]))
def test_merge_is_associative_and_commutative_and_empty_is_its_identity(name, seeds):
    empty = METRICS[name][0]
    a, b, c = (_all(name, *_examples(name, WIDTH, seed)) for seed in seeds)
    chex.assert_trees_all_equal(a.merge(b).merge(c), a.merge(b.merge(c)))
    chex.assert_trees_all_equal(a.merge(b), b.merge(a))
    chex.assert_trees_all_equal(a.merge(empty), a)
    chex.assert_trees_all_equal(empty.merge(a), a)


@every_metric
@pytest.mark.parametrize("cut", [2, 4])
def test_update_with_two_parts_equals_update_with_all_examples(name, cut):
    weights, args = _examples(name, WIDTH)
    first, second = (weights[:cut], _part(args, 0, cut)), (weights[cut:], _part(args, cut, WIDTH))
    expected_metric = _all(name, weights, args)
    chex.assert_trees_all_equal(_all(name, *first).merge(_all(name, *second)), expected_metric)
    chex.assert_trees_all_equal(UPDATE[name](_all(name, *first), *second[1], weights=second[0]), expected_metric)


@every_metric
def test_update_without_weights_counts_each_example_once(name):
    _, args = _examples(name, WIDTH)
    chex.assert_trees_all_equal(METRICS[name][0].update(*args), _all(name, np.ones(WIDTH, np.float32), args))


@every_metric
def test_update_without_examples_has_no_effect(name):
    empty = METRICS[name][0]
    chex.assert_trees_all_equal(_all(name, *_examples(name, 0)), empty)
    assert np.all(np.asarray(empty.compute()) == 0)


@every_metric
@pytest.mark.parametrize("fill", [0, np.nan, np.inf], ids=str)
def test_rows_of_weight_zero_have_no_effect(name, fill):
    weights, args = _examples(name, 4)
    padded = [
        np.concatenate([x, np.full((2, *x.shape[1:]), fill if x.dtype.kind == "f" else 1, x.dtype)]) for x in args
    ]
    chex.assert_trees_all_equal(
        _all(name, np.append(weights, np.zeros(2, np.float32)), padded), _all(name, weights, args)
    )


@pytest.mark.parametrize("n", SPLITS)
@every_metric
@some
@hypothesis.given(st.integers(0, 9), st.integers(0, WIDTH), st.integers(0, WIDTH))
def test_sum_over_replicas_equals_all_examples_in_one_update_for_every_split(name, n, seed, a, b):
    weights, args = _examples(name, WIDTH, seed)
    ends = [0, *sorted([a, b])[: n - 1], WIDTH]
    rows = [np.zeros((n, *x.shape), x.dtype) for x in (weights, *args)]
    for i in range(n):
        for row, x in zip(rows, (weights, *args), strict=True):
            part = x[ends[i] : ends[i + 1]]
            row[i, : len(part)] = part
    result = SPLITS[n].run(SUMMED[name], tuple(map(jdist.PerReplica, rows)))
    chex.assert_trees_all_equal(result, _all(name, weights, args))


@pytest.mark.parametrize("name", ["mean", "f1"])
def test_sum_over_groups_of_replicas_equals_all_examples_in_one_update(name):
    weights, args = _examples(name, 8)
    split = [jdist.PerReplica(x.reshape(4, 2, *x.shape[1:])) for x in (weights, *args)]
    chex.assert_trees_all_equal(GROUPS.run(SUMMED[name], split), _all(name, weights, args))


@every_metric
def test_update_and_compute_under_jit_are_the_same_as_outside(name):
    weights, args = _examples(name, WIDTH)
    expected = METRICS[name][0].update(*args, weights=weights)
    chex.assert_trees_all_equal(_all(name, weights, args), expected)
    chex.assert_trees_all_close(jax.jit(type(expected).compute)(expected), expected.compute(), rtol=1e-6)


@every_metric
def test_update_in_scan_equals_one_update(name):
    weights, args = _examples(name, WIDTH)
    xs = [x.reshape(3, 2, *x.shape[1:]) for x in (weights, *args)]
    turn = lambda metric, x: (metric.update(*x[1:], weights=x[0]), None)
    chex.assert_trees_all_equal(jax.lax.scan(turn, METRICS[name][0], xs)[0], _all(name, weights, args))


@every_metric
def test_metric_synced_on_read_is_of_all_replicas_and_steps(name, two):
    weights, args = _examples(name, 8)
    empty = METRICS[name][0]
    step = two.step(lambda seen, weights, *args: (seen.update(*args, weights=weights), None))
    state = two.init(lambda: jdist.SyncOnRead(empty, "sum"))
    for start in (0, 4):
        part = [x[start : start + 4] for x in (weights, *args)]
        state, _ = step(state, *(jdist.PerReplica(x.reshape(2, 2, *x.shape[1:])) for x in part))
    expected = _all(name, weights, args)
    chex.assert_trees_all_equal(state.read(), expected)
    chex.assert_trees_all_close(state.read().compute(), expected.compute(), rtol=1e-6)


@every_metric
def test_metric_in_the_state_of_a_step_is_replicated_after_it_is_reduced(name, two):
    weights, args = _examples(name, 4)
    empty = METRICS[name][0]

    def evaluate(seen, weights, *args):
        batch = jdist.all_reduce("sum", empty.update(*args, weights=weights))
        return seen.merge(batch), batch.compute()

    step = two.step(evaluate)
    split = [jdist.PerReplica(x.reshape(2, 2, *x.shape[1:])) for x in (weights, *args)]
    state, value = step(two.init(lambda: empty), *split)
    state, _ = step(state, *split)
    once = _all(name, weights, args)
    assert isinstance(state, type(empty)) and not step.proof.per_replica
    chex.assert_trees_all_equal(state, once.merge(once))
    chex.assert_trees_all_close(value, once.compute(), rtol=1e-6)


@every_metric
def test_metric_of_each_replica_is_summed_by_the_host(name, two):
    weights, args = _examples(name, 4)
    split = [jdist.PerReplica(x.reshape(2, 2, *x.shape[1:])) for x in (weights, *args)]
    metrics_per_replica = two.run(lambda weights, *args: METRICS[name][0].update(*args, weights=weights), split)
    chex.assert_trees_all_equal(two.reduce("sum", metrics_per_replica, axis=None), _all(name, weights, args))


@pytest.fixture(scope="module")
def predicted():
    """Returns scores of 40 examples, their labels, and weights."""
    rng = np.random.default_rng(11)
    scores = rng.normal(size=(40, CLASSES)).astype(np.float32)
    return scores, rng.integers(0, CLASSES, size=40), rng.integers(0, 3, size=40).astype(np.float32)


@pytest.mark.parametrize("weighted", [False, True])
def test_metrics_of_classes_equal_scikit_learn(weighted, predicted):
    scores, labels, weights = predicted
    weights = weights if weighted else None
    taken = scores.argmax(-1)
    judge = {"sample_weight": weights}
    matrix = metrics.ConfusionMatrix.empty(CLASSES).update(taken, labels, weights=weights)
    both = labels, taken
    result = {
        "accuracy": metrics.Accuracy().update(scores, labels, weights=weights).compute(),
        **{f"top_{k}": metrics.TopKAccuracy(k).update(scores, labels, weights=weights).compute() for k in (1, 2, 3)},
        "matrix": matrix.compute(),
        "precision": matrix.precision(),
        "recall": matrix.recall(),
        "f1": matrix.f1(),
        "macro": metrics.F1.empty(CLASSES).update(taken, labels, weights=weights).compute(),
    }
    expected = {
        "accuracy": sklearn.metrics.accuracy_score(*both, **judge),
        **{f"top_{k}": sklearn.metrics.top_k_accuracy_score(labels, scores, k=k, **judge) for k in (1, 2, 3)},
        "matrix": sklearn.metrics.confusion_matrix(*both, **judge),
        "precision": sklearn.metrics.precision_score(*both, average=None, **judge),
        "recall": sklearn.metrics.recall_score(*both, average=None, **judge),
        "f1": sklearn.metrics.f1_score(*both, average=None, **judge),
        "macro": sklearn.metrics.f1_score(*both, average="macro", **judge),
    }
    chex.assert_trees_all_close(result, jax.tree.map(np.float32, expected), rtol=1e-6)


@pytest.mark.parametrize("weighted", [False, True])
def test_metrics_of_numbers_equal_scikit_learn(weighted, predicted):
    scores, labels, weights = predicted
    weights = weights if weighted else None
    targets = labels.astype(np.float32)
    squared = metrics.MeanSquaredError().update(scores[:, 0], targets, weights=weights).compute()
    absolute = metrics.MeanAbsoluteError().update(scores[:, 0], targets, weights=weights).compute()
    judge = sklearn.metrics.mean_squared_error, sklearn.metrics.mean_absolute_error
    expected = [error(targets, scores[:, 0], sample_weight=weights) for error in judge]
    np.testing.assert_allclose([squared, absolute], expected, rtol=1e-5)


def test_class_without_examples_and_predictions_scores_zero_as_in_scikit_learn():
    labels, taken = np.array([0, 0, 1]), np.array([0, 3, 1])
    matrix = metrics.ConfusionMatrix.empty(4).update(taken, labels)
    judge = {"average": None, "labels": range(4), "zero_division": 0}
    np.testing.assert_allclose(matrix.precision(), sklearn.metrics.precision_score(labels, taken, **judge))
    np.testing.assert_allclose(matrix.recall(), sklearn.metrics.recall_score(labels, taken, **judge))
    np.testing.assert_allclose(matrix.f1(), sklearn.metrics.f1_score(labels, taken, **judge), rtol=1e-6)


def test_padded_digits_over_eight_replicas_are_counted_exactly():
    images, labels = sklearn.datasets.load_digits(return_X_y=True)
    images = images.astype(np.float32)
    scorer = np.stack([images[labels == label].mean(0) for label in range(10)], axis=1) / 64
    score = lambda images: images @ scorer - np.square(scorer).sum(0) * 32
    empty = {
        "count": metrics.Sum(),
        "accuracy": metrics.Accuracy(),
        "top_3": metrics.TopKAccuracy(3),
        "matrix": metrics.ConfusionMatrix.empty(10),
        "f1": metrics.F1.empty(10),
    }

    def evaluate(seen, batch, weights):
        scores, labels = score(batch["image"]), batch["label"]
        taken = scores.argmax(-1)
        return {
            "count": seen["count"].update(jnp.ones_like(weights), weights=weights),
            "accuracy": seen["accuracy"].update(scores, labels, weights=weights),
            "top_3": seen["top_3"].update(scores, labels, weights=weights),
            "matrix": seen["matrix"].update(taken, labels, weights=weights),
            "f1": seen["f1"].update(taken, labels, weights=weights),
        }, None

    strategy = jdist.MirroredStrategy()
    step = strategy.step(evaluate)
    state = strategy.init(lambda: jdist.SyncOnRead(empty, "sum"))
    source = {"image": images, "label": labels}
    for batch, weights in strategy.distribute_dataset(source, 256, shuffle=True, remainder="pad"):
        state, _ = step(state, batch, weights)
    result = state.read()
    scores = score(images)
    taken = scores.argmax(-1)
    assert float(result["count"].compute()) == float(result["accuracy"].correct.weight) == 1797
    assert float(result["accuracy"].correct.total) == sklearn.metrics.accuracy_score(labels, taken, normalize=False)
    top_3 = sklearn.metrics.top_k_accuracy_score(labels, scores, k=3, normalize=False)
    assert float(result["top_3"].correct.total) == top_3
    np.testing.assert_array_equal(result["matrix"].compute(), sklearn.metrics.confusion_matrix(labels, taken))
    assert float(result["f1"].compute()) == pytest.approx(sklearn.metrics.f1_score(labels, taken, average="macro"))


OUTSIDE = {"minus_one": -1, "one_too_many": CLASSES, "far": 10**6}


@pytest.mark.parametrize("label", OUTSIDE.values(), ids=OUTSIDE)
def test_label_that_is_not_a_class_is_never_correct(label):
    scores = np.eye(CLASSES, dtype=np.float32)
    labels = np.array([0, 1, 2, label])
    assert float(metrics.Accuracy().update(scores, labels).compute()) == 0.75
    assert float(metrics.TopKAccuracy(CLASSES).update(scores, labels).compute()) == 0.75


@pytest.mark.parametrize("label", OUTSIDE.values(), ids=OUTSIDE)
def test_label_or_prediction_that_is_not_a_class_has_no_effect_on_a_confusion_matrix(label):
    empty = metrics.ConfusionMatrix.empty(CLASSES)
    known = empty.update(np.array([0, 1]), np.array([0, 2]))
    chex.assert_trees_all_equal(empty.update(np.array([0, 1, 3]), np.array([0, 2, label])), known)
    chex.assert_trees_all_equal(empty.update(np.array([0, 1, label]), np.array([0, 2, 3])), known)


def test_equal_logits_count_for_the_lower_class():
    scores, labels = np.zeros((3, 3), np.float32), np.array([0, 1, 2])
    assert [float(metrics.TopKAccuracy(k).update(scores, labels).compute()) for k in (1, 2, 3)] == pytest.approx(
        [1 / 3, 2 / 3, 1]
    )
    assert float(metrics.Accuracy().update(scores, labels).compute()) == pytest.approx(1 / 3)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int32", "uint8", "bool"])
def test_sums_are_float32_for_every_dtype(dtype):
    values = np.array([1, 0, 1]).astype(jnp.dtype(dtype))
    seen = metrics.Mean().update(values)
    assert (seen.total.dtype, seen.weight.dtype) == (jnp.float32, jnp.float32)
    assert float(seen.compute()) == pytest.approx(2 / 3)


def test_errors_of_unsigned_numbers_do_not_wrap():
    small, great = np.uint8([1]), np.uint8([3])
    assert float(metrics.MeanSquaredError().update(small, great).compute()) == 4
    assert float(metrics.MeanAbsoluteError().update(small, great).compute()) == 2


def test_weights_of_tokens_exclude_single_tokens():
    scores = np.eye(2, dtype=np.float32)[np.array([[0, 1], [1, 1]])]
    labels = np.array([[0, 1], [0, 1]])
    weights = np.float32([[1, 1], [0, 1]])
    assert float(metrics.Accuracy().update(scores, labels, weights=weights).compute()) == 1
    matrix = metrics.ConfusionMatrix.empty(2).update(scores.argmax(-1), labels, weights=weights)
    np.testing.assert_array_equal(matrix.compute(), [[1, 0], [0, 2]])


def test_weights_of_examples_count_for_each_of_their_tokens():
    taken, labels = np.array([[0, 1], [1, 1]]), np.array([[0, 1], [0, 1]])
    matrix = metrics.ConfusionMatrix.empty(2).update(taken, labels, weights=np.float32([2, 3]))
    np.testing.assert_array_equal(matrix.compute(), [[2, 3], [0, 5]])


FOUR, TWO = np.zeros((4, 3), np.float32), np.zeros(2, np.int32)
MERGE_MESSAGE = "Cannot merge TopKAccuracy.* metrics must have the same class and size"
REFUSED = {
    "labels": (
        lambda: metrics.Accuracy().update(FOUR, TWO),
        r"logits float32\[4,3\] are .* need integer labels .*, got int32\[2\]",
    ),
    "one_hot": (
        lambda: metrics.Accuracy().update(FOUR, FOUR),
        r"need integer labels \[batch, \.\.\.\]",
    ),
    "no_logits": (
        lambda: metrics.Accuracy().update(np.float32(1), np.int32(1)),
        r"logits float32\[\] are .* need integer labels",
    ),
    "top_k_labels": (
        lambda: metrics.TopKAccuracy(1).update(FOUR, TWO),
        r"logits float32\[4,3\] are .* need integer labels",
    ),
    "top_0": (
        lambda: metrics.TopKAccuracy(0).update(FOUR, np.zeros(4, np.int32)),
        "`k` must be an integer >= 1, got 0",
    ),
    "top_4": (
        lambda: metrics.TopKAccuracy(4).update(FOUR, np.zeros(4, np.int32)),
        r"`k` must be from 1 to the number of classes, 3, got 4",
    ),
    "squares": (
        lambda: metrics.MeanSquaredError().update(FOUR, FOUR[:, 0]),
        r"predictions float32\[4,3\] and targets float32\[4\] have different shapes",
    ),
    "distances": (lambda: metrics.MeanAbsoluteError().update(FOUR[:1], FOUR), r"have different shapes"),
    "logits_as_classes": (
        lambda: metrics.ConfusionMatrix.empty(3).update(FOUR[:2, 0], TWO),
        r"predictions float32\[2\] and labels int32\[2\] must be classes, integers of the same shape\. For logits, "
        r"use `logits\.argm",
    ),
    "classes_of_another_shape": (lambda: metrics.F1.empty(3).update(TWO[:1], TWO), r"integers of the same shape"),
    "weights": (
        lambda: metrics.Mean().update(FOUR, weights=np.ones(3, np.float32)),
        r"weights float32\[3\] do not match values float32\[4,3\]: the dimensions of the weights must be",
    ),
    "weights_of_classes": (
        lambda: metrics.F1.empty(3).update(TWO, TWO, weights=np.ones(3, np.float32)),
        r"weights float32\[3\] do not match labels int32\[2\]",
    ),
    "no_classes_of_matrix": (lambda: metrics.ConfusionMatrix.empty(0), "`num_classes` must be at least 1, got 0"),
    "no_classes_of_f1": (lambda: metrics.F1.empty(0), "`num_classes` must be at least 1, got 0"),
    "merge_of_classes": (lambda: metrics.TopKAccuracy(2).merge(metrics.Sum()), MERGE_MESSAGE),
    "merge_of_k": (lambda: metrics.TopKAccuracy(2).merge(metrics.TopKAccuracy(1)), MERGE_MESSAGE),
    "merge_of_sizes": (
        lambda: metrics.ConfusionMatrix.empty(1).merge(metrics.ConfusionMatrix.empty(3)),
        r"Cannot merge .*\(1, 1\).* and .*\(3, 3\)",
    ),
}


@each_row("call, message", REFUSED.values(), ids=REFUSED)
def test_call_with_invalid_arguments_is_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()


@each_row("values", [np.complex64([1j]), jax.random.key(0)], ids=["complex", "key"])
def test_values_that_are_not_real_numbers_are_refused(values):
    with pytest.raises(TypeError, match="values is .* a metric needs real numbers"):
        metrics.Mean().update(values)


def test_update_with_a_wrapper_on_the_host_is_refused(two):
    value = two.put(jdist.PerReplica(np.ones((2, 3), np.float32)))
    for metric, args in (
        (metrics.Mean(), (value,)),
        (metrics.Accuracy(), (value, TWO)),
        (metrics.F1.empty(2), (value, TWO)),
    ):
        with pytest.raises(TypeError, match=r"PerReplica\(float32\[2,3\]\).*`strategy\.run\(fn, \(value,\)\)`"):
            metric.update(*args)


def test_metric_is_frozen():
    with pytest.raises(AttributeError, match="total"):
        metrics.Sum().total = jnp.float32(1)


@pytest.mark.parametrize("dtype", [np.uint8, np.int8, np.uint16, np.int64])
def test_classes_of_small_integers_are_counted(dtype):
    classes = np.array([1, np.iinfo(np.int8).max], dtype)
    assert metrics.ConfusionMatrix.empty(300).update(classes, classes).compute().sum() == 2


def test_sum_over_replicas_of_a_metric_without_weights_gives_no_repeated_sum_warning(two):
    values = two.put(jdist.PerReplica(np.arange(6, dtype=np.float32).reshape(2, 3)))
    metric = two.run(lambda x: jdist.all_reduce("sum", metrics.Mean().update(x)), (values,))
    assert float(metric.compute()) == 2.5


def test_counts_beyond_32_bits_are_added_on_the_host():
    np.testing.assert_allclose(metrics.Sum().update(np.array([2**31 + 512])).compute(), 2.0**31 + 512)


def test_lists_are_values_like_arrays():
    assert float(metrics.Accuracy().update([[0.0, 1.0]], [1]).compute()) == 1.0
    assert float(metrics.MeanSquaredError().update([0.0, 1.0], [1, 1]).compute()) == 0.5
