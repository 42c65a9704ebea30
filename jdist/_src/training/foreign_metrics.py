"""Metrics of flax.nnx, clu, metrax and Keras as metrics of jdist: frozen trees of sums.

No library is imported: their objects exist only where the user has imported them. Each metric becomes the leaves of its state
without examples, a pure function that updates the leaves, and one that computes the value (`ForeignMetric`). Two properties
make the states of batches and replicas mergeable by addition:

* An update adds to each leaf a value that does not depend on the state. This is proved on the jaxpr of the update.
* The value that is added for a batch is the sum of the values for its examples. This is tested with random inputs. So
  `AdaptedMetric` applies weights to the values of single examples: they are exact, also where the library has none.
"""

import dataclasses
import inspect
import sys
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, final

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer

from jdist._src.core.jax_compat import open_jaxpr
from jdist._src.core.tree import describe_tree, dtype_and_shape, has_dtype, one_line
from jdist._src.jaxpr.accumulators import not_accumulated
from jdist._src.jaxpr.numpy_evaluation import TooLargeError, evaluate
from jdist._src.replica.losses import broadcast_weights, weights_array
from jdist._src.replica.metric_sums import USE_A_SUM, clu_metric_types, nnx_metric_types, state_leaf_name
from jdist._src.replica.metrics import Metric
from jdist._src.training.loss_adapters import TARGETS_FIRST, check_keras_backend, is_keras_metric

_MASKS = frozenset(("mask", "sample_weight", "sample_weights"))  # jdist applies the weights itself
_MAX_DELTAS = 2**24  # elements of the states of single examples in memory at the same time
_MAX_OPERATIONS = 5e6  # of the test with random inputs: about 0.1 seconds
_TOLERANCE = 1e-5  # constants of the programs are rounded to float32


@dataclasses.dataclass(frozen=True, eq=False)
class ForeignMetric:
    """A metric of another library as pure functions of the leaves of its state.

    Attributes:
        name: The class.
        key: Equal for metrics with the same functions.
        leaf_names: The names of the leaves.
        empty: The leaves without examples.
        update: From leaves and the arguments of the library to the new leaves.
        compute: From leaves to the value.
        parameters: The names of the arguments, in the order of positional ones.
        checked: The shapes of arguments for which an update adds to the leaves, and whether the sum over examples was tested.
    """

    name: str
    key: Hashable
    leaf_names: tuple[str, ...]
    empty: tuple[Any, ...]
    update: Callable[..., Sequence[Any]]
    compute: Callable[[Sequence[Any]], Any]
    parameters: tuple[str, ...]
    checked: dict[Any, bool] = dataclasses.field(default_factory=dict)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ForeignMetric) and self.key == other.key

    def __hash__(self) -> int:
        return hash(self.key)

    def __repr__(self) -> str:
        return self.name

    def arguments(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the arguments of an update by name."""
        if len(args) > len(self.parameters):
            raise TypeError(
                f"{self.name} has {len(self.parameters)} arguments ({', '.join(self.parameters)}), got {len(args)}. In "
                "`Trainer(metrics=)`, pass a pair of the metric and a function that returns its arguments by name: "
                f'`(metric, lambda outputs, targets: {{"{self.parameters[0]}": ...}})`.'
            )
        return {**dict(zip(self.parameters, args, strict=False)), **kwargs}

    def delta(self, arguments: Mapping[str, Any]) -> list[jax.Array]:
        """Returns the increments of the leaves by an update."""
        new = self.update(self.empty, **arguments)
        return [_wide(after) - _wide(before) for after, before in zip(new, self.empty, strict=True)]

    def check(self, delta: Callable[..., list[jax.Array]], update: Any, arrays: Sequence[Any]) -> bool:
        """Checks that an update adds the sum over the examples of a batch.

        Args:
            delta: From the arguments that are arrays to the increments of the leaves.
            update: From leaves and these arguments to the new leaves.
            arrays: The shapes of these arguments for one example, without the dimension of the batch.

        Returns:
            Whether the sum over examples was tested: not for large arrays.

        Raises:
            ValueError: The update is not such a sum.
        """
        batch = lambda size: [jax.ShapeDtypeStruct((size, *x.shape), x.dtype) for x in arrays]
        jaxpr = open_jaxpr(jax.make_jaxpr(update)(list(self.empty), batch(1)))
        reasons, unused = not_accumulated(jaxpr, len(self.empty)), self._unused()
        for i, reason in reasons.items():
            if i not in unused:
                raise ValueError(
                    f"{self.name} is not a sum over examples: an update of its state leaf {self.leaf_names[i]!r} {reason}. "
                    f"So the states of replicas and batches cannot be added. {USE_A_SUM}"
                )

        def both(arrays: Sequence[Any]) -> tuple[list[Any], list[Any]]:
            examples = [delta([x[i : i + 1] for x in arrays]) for i in range(3)]
            return delta(arrays), list(map(sum, zip(*examples, strict=True)))

        program = jax.make_jaxpr(both)(batch(3))
        for sample in range(2):
            try:
                outputs = evaluate(program, _random(batch(3), sample), _MAX_OPERATIONS)
            except TooLargeError:
                return False
            for i, name in enumerate(self.leaf_names):
                of_batch, of_examples = outputs[i], outputs[i + len(self.leaf_names)]
                scale = max(np.abs(of_batch).max(initial=0), np.abs(of_examples).max(initial=0), 0.1)
                is_known = i not in unused and np.isfinite(scale)
                if is_known and np.abs(of_batch - of_examples).max(initial=0) > _TOLERANCE * scale:
                    advice = (
                        "If it averages over the last dimension, as the means of Keras do, pass arguments [batch, 1]."
                    )
                    hint = "" if all(x.shape for x in arrays) else f" {advice}"
                    raise ValueError(
                        f"{self.name} is not a sum over examples: for three random examples, an update adds {_text(of_batch)} "
                        f"to its state leaf {name!r}, and one update per example adds {_text(of_examples)}. So the value would "
                        f"depend on the batch size and the number of replicas.{hint} {USE_A_SUM}"
                    )
        return True

    def _unused(self) -> frozenset[int]:
        """Returns the numbers of the leaves that `compute` does not use, such as the count of merges of clu."""
        jaxpr = open_jaxpr(jax.make_jaxpr(self.compute)(list(self.empty)))
        used = {id(atom) for equation in jaxpr.eqns for atom in equation.invars} | set(map(id, jaxpr.outvars))
        return frozenset(i for i, var in enumerate(jaxpr.invars) if id(var) not in used)


@final
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class AdaptedMetric(Metric):
    """A metric of another library: the result of `jdist.metrics.adapt`.

    Attributes:
        metric: The functions of the library.
        sums: The increments of the leaves of the library's state by the examples, float32 or wider.
    """

    metric: ForeignMetric = dataclasses.field(metadata={"static": True})
    sums: tuple[Any, ...]

    def update(self, *args: Any, weights: Any = None, **kwargs: Any) -> "AdaptedMetric":
        """Returns this metric with the examples of a batch added.

        Args:
            *args: The arguments of the library's update, in its order. Arrays are `[batch, ...]`; numbers and strings are
                constants.
            weights: `[batch]`, or the first dimensions of all arrays. An example with weight 0 has no effect.
            **kwargs: Arguments by name.

        Raises:
            ValueError: The state of the metric is not a sum over examples, or the shapes do not match.
            TypeError: The library does not accept the arguments.
        """
        leaves, treedef = jax.tree.flatten(self.metric.arguments(args, kwargs))
        is_array = [has_dtype(leaf) and (np.ndim(leaf) > 0 or isinstance(leaf, jax.Array)) for leaf in leaves]
        arrays = [jnp.asarray(leaf) for leaf, flag in zip(leaves, is_array, strict=True) if flag]
        if not arrays or any(x.ndim == 0 for x in arrays):
            raise ValueError(f"{self.metric.name} needs arguments [batch, ...], got {describe_tree((args, kwargs))}.")

        def arguments(arrays: Sequence[Any]) -> Any:
            examples = iter(arrays)
            return treedef.unflatten(
                next(examples) if flag else leaf for leaf, flag in zip(leaves, is_array, strict=True)
            )

        def delta(arrays: Sequence[Any]) -> list[jax.Array]:
            return self.metric.delta(arguments(arrays))

        def update(state: Sequence[Any], arrays: Sequence[Any]) -> Sequence[Any]:
            return self.metric.update(state, **arguments(arrays))

        def weighted_delta(example: Sequence[Any], weight: jax.Array) -> list[jax.Array]:
            return [jnp.where(weight == 0, 0, weight * x) for x in delta([x[None] for x in example])]

        has_weights = not (weights is None or (isinstance(weights, np.ndarray) and (weights == 1).all()))
        weights = jnp.ones(len(arrays[0])) if weights is None else weights_array(weights)
        for x in arrays:
            broadcast_weights(weights, x, f"an argument of {self.metric.name}")
        examples = [x.reshape(-1, *x.shape[weights.ndim :]) for x in arrays]
        shapes = [jax.ShapeDtypeStruct(x.shape[1:], x.dtype) for x in examples]
        key = treedef, *(leaf for leaf, flag in zip(leaves, is_array, strict=True) if not flag), *shapes
        if key not in self.metric.checked:
            self.metric.checked[key] = self.metric.check(delta, update, shapes)
        weights = weights.ravel().astype(jnp.promote_types(weights.dtype, jnp.float32))
        if self.metric.checked[key] and not has_weights:
            added = delta(examples)
        elif weights.size * sum(map(np.size, self.sums)) <= _MAX_DELTAS:
            added = [x.sum(0) for x in jax.vmap(weighted_delta)(examples, weights)]
        else:
            add = lambda sums, example: ([a + b for a, b in zip(sums, weighted_delta(*example), strict=True)], None)
            added, _ = lax.scan(add, list(map(jnp.zeros_like, self.sums)), (examples, weights))
        # A count without weights is constant. A zero that depends on the data prevents a `RepeatedSumWarning` for its sum.
        zero = jnp.where(arrays[0] == arrays[0], 0.0, 0.0).sum()
        return dataclasses.replace(self, sums=tuple(a + b + zero for a, b in zip(self.sums, added, strict=True)))

    def compute(self) -> Any:
        """Returns the library's value over all examples so far: an array, or a dict for several metrics."""
        leaves = [_wide(a) + b for a, b in zip(self.metric.empty, self.sums, strict=True)]
        return jax.tree.map(jnp.asarray, self.metric.compute(leaves))


def adapt(metric: Any, **constants: Any) -> AdaptedMetric:
    """Returns a metric of flax.nnx, clu, metrax or Keras as a metric of jdist, without examples.

    It has exact weights for padding, and is added over batches and replicas. The state of the metric must be a sum over
    examples; the first update with arguments of new shapes checks this on its jaxpr and with random inputs. `Trainer` adapts
    metrics itself.

    Args:
        metric: An `nnx.Metric`, a `keras.metrics.Metric` or a metric of clu or metrax, an instance or the class. An instance of
            nnx or Keras is not changed, and its examples are not included.
        **constants: Further arguments of each update, such as `threshold=0.7`.

    Returns:
        A `jdist.metrics.Metric`. `update(..., weights=None)` takes the arguments of the library, arrays `[batch, ...]`, and
        returns the metric with more examples. It raises ValueError if the state is not a sum. `compute()` returns the value of
        the library.

    Raises:
        TypeError: `metric` is not a metric of these libraries, or it stores examples.

    Example:
        >>> from flax import nnx
        >>> accuracy = jdist.metrics.adapt(nnx.metrics.Accuracy())
        >>> logits, labels = np.float32([[0.1, 0.9], [0.8, 0.2], [0, 0]]), np.array([1, 1, 0])
        >>> accuracy = accuracy.update(
        ...     logits=logits, labels=labels, weights=np.float32([1, 1, 0])
        ... )
        >>> float(accuracy.compute())
        0.5
    """
    if _is_clu(metric):
        adapted = _of_clu(metric, constants)
    elif _is_nnx(metric):
        adapted = _of_nnx(metric, constants)
    elif is_keras_metric(metric):
        adapted = _of_keras(metric, constants)
    else:
        got = f"the class {metric.__name__}: call it" if isinstance(metric, type) else one_line(metric)
        raise TypeError(f"`metric` must be a metric of flax.nnx, clu, metrax or Keras, got {got}.")
    if not adapted.empty:
        raise TypeError(
            f"{adapted.name} has no state of arrays before its first update, so it is not a sum. {USE_A_SUM}"
        )
    return AdaptedMetric(adapted, tuple(np.zeros(np.shape(leaf), _wide_dtype(leaf)) for leaf in adapted.empty))


def is_foreign_metric(value: Any) -> bool:
    """Returns whether `value` is a metric of flax.nnx, clu, metrax or Keras, or a class of clu or metrax."""
    return _is_clu(value) or _is_nnx(value) or is_keras_metric(value)


def metrics_of_collection(value: Any) -> Any:
    """Returns the metrics of a clu `Collection` or an nnx `MultiMetric` by name; another value unchanged."""
    if _is_clu(value) and hasattr(value, "single_from_model_output"):
        value = value.empty() if isinstance(value, type) else value
        return {name: metric for name, metric in vars(value).items() if name != "_reduction_counter"}
    if _is_nnx(value) and isinstance(value, sys.modules["flax.nnx"].MultiMetric):
        return {name: metric for name, metric in vars(value).items() if _is_nnx(metric)}
    return value


def takes_targets_first(metric: AdaptedMetric) -> bool:
    """Returns whether the first arguments of a metric are targets and outputs, as in Keras."""
    return metric.metric.parameters[:2] in TARGETS_FIRST


def _is_nnx(value: Any) -> bool:
    return isinstance(value, nnx_metric_types())


def _is_clu(value: Any) -> bool:
    return issubclass(value if isinstance(value, type) else type(value), clu_metric_types())


def _of_nnx(metric: Any, constants: Mapping[str, Any]) -> ForeignMetric:
    nnx, name = sys.modules["flax.nnx"], type(metric).__name__
    metric = nnx.clone(metric)
    metric.reset()
    graphdef, state = nnx.split(metric)
    leaves, treedef = jax.tree_util.tree_flatten_with_path(state)

    def update(leaves: Sequence[Any], **kwargs: Any) -> list[Any]:
        new = nnx.merge(graphdef, treedef.unflatten(leaves))
        new.update(**constants, **kwargs)
        new_graphdef, new_state = nnx.split(new)
        if new_graphdef != graphdef:
            raise ValueError(
                f"{name} changes attributes that are not arrays in an update, so its state is not a sum. {USE_A_SUM}"
            )
        return jax.tree.leaves(new_state)

    names = _parameters(metric.update) or ((metric.argname,) if hasattr(metric, "argname") else ("logits", "labels"))
    compute = lambda leaves: nnx.merge(graphdef, treedef.unflatten(leaves)).compute()
    key = graphdef, _hashable(constants)
    return ForeignMetric(
        name,
        key,
        tuple(state_leaf_name(path) for path, _ in leaves),
        tuple(x for _, x in leaves),
        update,
        compute,
        names,
    )


def _of_clu(metric: Any, constants: Mapping[str, Any]) -> ForeignMetric:
    start = metric.empty() if isinstance(metric, type) else metric
    create: Any = getattr(start, "single_from_model_output", None) or start.from_model_output
    name = type(start).__name__
    leaves, treedef = jax.tree_util.tree_flatten_with_path(start)
    # A Python number other than 0, such as a number of thresholds, is a constant.
    is_state = [has_dtype(leaf) or leaf == 0 for _, leaf in leaves]

    def join(state: Sequence[Any]) -> Any:
        values = iter(state)
        return treedef.unflatten(next(values) if flag else x for (_, x), flag in zip(leaves, is_state, strict=True))

    def update(state: Sequence[Any], **kwargs: Any) -> list[Any]:
        try:
            batch = create(**constants, **kwargs)
        except KeyError as error:
            raise TypeError(f"{name} needs the argument {error}, got {', '.join(kwargs)}.") from error
        for (path, old), new, flag in zip(leaves, jax.tree.leaves(batch), is_state, strict=True):
            if np.shape(old) != np.shape(new):
                raise ValueError(
                    f"The state leaf {state_leaf_name(path)!r} of {name} is {dtype_and_shape(old)} without examples and "
                    f"{dtype_and_shape(new)} with a batch. Pass an instance whose state is zeros of the second shape."
                )
            if not flag and (isinstance(new, Tracer) or new != old):
                raise ValueError(
                    f"The number {state_leaf_name(path)!r} of {name} is {old} without examples and {new} with a batch."
                )
        try:
            merged = jax.tree.leaves(join(state).merge(batch))
        except NotImplementedError as error:
            raise TypeError(f"{name} has no `merge`, so its state is not a sum. {USE_A_SUM}") from error
        return [x for x, flag in zip(merged, is_state, strict=True) if flag]

    states = [pair for pair, flag in zip(leaves, is_state, strict=True) if flag]
    key = type(start), treedef, tuple(x for (_, x), flag in zip(leaves, is_state, strict=True) if not flag)
    return ForeignMetric(
        name,
        (key, _hashable(constants)),
        tuple(state_leaf_name(path) for path, _ in states),
        tuple(jnp.asarray(x) for _, x in states),
        update,
        lambda state: join(state).compute(),
        _parameters(create) or ("logits", "labels"),
    )


def _of_keras(metric: Any, constants: Mapping[str, Any]) -> ForeignMetric:
    check_keras_backend()
    variables, name = list(metric.variables), type(metric).__name__
    unbuilt = (
        f"{name} creates variables in its first update. Call `metric.update_state(y_true, y_pred)` with one example before "
        "you pass it; the example is not included."
    )
    if not variables:
        raise TypeError(unbuilt)

    def update(leaves: Sequence[Any], **kwargs: Any) -> list[Any]:
        new = metric.stateless_update_state(list(leaves), **constants, **kwargs)
        if len(new) != len(variables):
            raise TypeError(unbuilt)
        return new

    compute = lambda leaves: metric.stateless_result(list(leaves))
    empty = tuple(jnp.asarray(x.value if hasattr(x, "value") else x) for x in metric.stateless_reset_state())
    names = tuple(variable.path for variable in variables)
    # The functions hold the metric, so no other object has its id as long as they exist.
    key = "keras", id(metric), _hashable(constants)
    return ForeignMetric(
        name, key, names, empty, update, compute, _parameters(metric.update_state) or ("y_true", "y_pred")
    )


def _parameters(update: Callable[..., Any]) -> tuple[str, ...]:
    """Returns the names of the arguments of an update, without masks."""
    kinds = inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY
    parameters = inspect.signature(update).parameters.values()
    return tuple(p.name for p in parameters if p.kind in kinds and p.name not in _MASKS)


def _text(values: np.ndarray) -> str:
    return one_line(np.array2string(values.round(4), threshold=6).replace("\n", ""))


def _hashable(constants: Mapping[str, Any]) -> tuple[Any, ...]:
    return tuple((name, repr(value)) for name, value in sorted(constants.items()))


def _wide_dtype(leaf: Any) -> Any:
    return jnp.promote_types(jnp.result_type(leaf), jnp.float32)


def _wide(leaf: Any) -> jax.Array:
    return jnp.asarray(leaf).astype(_wide_dtype(leaf))


def _random(shapes: Sequence[jax.ShapeDtypeStruct], sample: int) -> list[np.ndarray]:
    """Returns random inputs: 0 and 1 for integers; floating-point numbers are positive in one of the samples."""
    rng = np.random.default_rng(sample)
    draw = lambda shape: rng.uniform(0.1, 0.9, shape) if sample else rng.normal(size=shape)
    is_float = lambda x: jnp.issubdtype(x.dtype, jnp.floating)
    return [draw(x.shape) if is_float(x) else rng.integers(0, 2, x.shape).astype(x.dtype) for x in shapes]
