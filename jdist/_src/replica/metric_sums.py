"""Metrics of flax.nnx, clu and metrax in a sum over the replicas: an error where the sum is not the merge of their states."""

import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jdist._src.core.jax_compat import open_jaxpr
from jdist._src.core.tree import PyTree
from jdist._src.jaxpr.accumulators import not_accumulated
from jdist._src.jaxpr.numpy_evaluation import evaluate
from jdist._src.values.aggregation import VariableAggregation
from jdist._src.values.sync_on_read import SyncOnRead

USE_A_SUM = "Use a metric whose state is sums, or compute the value from the outputs of `Trainer.predict`."


def nnx_metric_types() -> tuple[type, ...]:
    """Returns the base class of the metrics of flax.nnx, if it is imported."""
    nnx = sys.modules.get("flax.nnx")
    return (nnx.Metric,) if nnx else ()


def clu_metric_types() -> tuple[type, ...]:
    """Returns the base classes of the metrics of clu and metrax, if clu is imported."""
    clu = sys.modules.get("clu.metrics")
    return (clu.Metric, clu.Collection) if clu else ()


def state_leaf_name(path: Any) -> str:
    """Returns the name of a leaf of a metric's state."""
    return jax.tree_util.keystr(path, simple=True, separator=".").removesuffix(".value")


def check_metric_sums(name: str, tree: PyTree) -> None:
    """Raises ValueError if a tree that is added over the replicas contains a metric whose merge is not a sum.

    Args:
        name: The name of `tree` in messages.
        tree: Its leaves may be traced.
    """
    nnx_types, clu_types = nnx_metric_types(), clu_metric_types()
    if not nnx_types and not clu_types:
        return
    is_metric = lambda x: isinstance(x, (*nnx_types, *clu_types))
    for path, value in jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_metric):
        place = name + jax.tree_util.keystr(path)
        if isinstance(value, clu_types):
            _check_merge(place, value)
        elif isinstance(value, nnx_types):
            _check_nnx(place, value)


def check_state_metrics(state: PyTree) -> None:
    """Raises ValueError if a `SyncOnRead` of a state sums a metric of another library whose merge is not a sum."""
    is_sync_on_read = lambda x: isinstance(x, SyncOnRead)
    for path, value in jax.tree_util.tree_leaves_with_path(state, is_leaf=is_sync_on_read):
        if is_sync_on_read(value) and value.aggregation is VariableAggregation.SUM:
            check_metric_sums("state" + jax.tree_util.keystr(path), value.tree)


def _check_nnx(place: str, metric: Any) -> None:
    metrics = sys.modules["flax.nnx"].metrics
    if isinstance(metric, metrics.MultiMetric):
        for name, value in vars(metric).items():
            if isinstance(value, nnx_metric_types()):
                _check_nnx(f"{place}.{name}", value)
    # These updates add a total and a count. That of another metric is checked by `adapt`, which knows its arguments.
    elif type(metric).update not in (metrics.Average.update, metrics.Accuracy.update):
        raise ValueError(
            f"{place} is a metric {type(metric).__name__} of flax.nnx, whose state would be added over the replicas. Adapt it, "
            "`metric = jdist.metrics.adapt(...)`, which checks that its state is a sum."
        )


def _check_merge(place: str, metric: Any) -> None:
    leaves, treedef = jax.tree_util.tree_flatten_with_path(metric)
    shapes = [jax.ShapeDtypeStruct(np.shape(leaf), jnp.result_type(leaf)) for _, leaf in leaves]
    merge = lambda a, b: jax.tree.leaves(treedef.unflatten(a).merge(treedef.unflatten(b)))
    first, second = (jax.make_jaxpr(fn)(shapes, shapes) for fn in (merge, lambda a, b: merge(b, a)))
    reasons = [not_accumulated(open_jaxpr(program), len(leaves)) for program in (first, second)]
    zeros = evaluate(first, [np.zeros(x.shape, x.dtype) for x in (*shapes, *shapes)])
    for i, (path, _) in enumerate(leaves):
        reason = reasons[0].get(i) or reasons[1].get(i) or ("adds a constant to it" if zeros[i].any() else None)
        if reason:
            raise ValueError(
                f"{place} is a {type(metric).__name__} whose `merge` is not a sum: for its leaf {state_leaf_name(path)!r} it "
                f"{reason}. So it cannot be added over the replicas. {USE_A_SUM}"
            )
