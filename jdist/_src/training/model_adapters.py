"""Adapts models of flax, Keras, haiku and equinox, and pairs of functions, to `ModelFunctions`."""

import inspect
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jdist._src.core.nn_modules import is_box, is_variable, value_in
from jdist._src.core.tree import PyTree
from jdist._src.training.keras_models import adapt_keras
from jdist._src.training.model_functions import CallSignature, ModelFunctions, ModelLosses, ModelResult
from jdist._src.values.state_sharding import partition_metadata

LOSSES = "losses"  # the collection of linen, and the name of intermediates of nnx, whose values are added to the loss


def adapt_model(model: Any) -> ModelFunctions:
    """Returns a model of flax (linen or nnx), Keras, haiku or equinox, or a pair of functions, as `ModelFunctions`.

    Raises:
        TypeError: `model` is none of these.
    """
    if isinstance(model, ModelFunctions):
        return model
    for (library, name), adapter in _ADAPTERS.items():
        kind = getattr(sys.modules.get(library), name, None)  # the creator of such a model has imported its library
        if kind is not None and isinstance(model, kind):
            return adapter(model)
    if isinstance(model, (tuple, list)) and len(model) == 2:
        equinox = sys.modules.get("equinox")
        if equinox is not None and isinstance(model[0], equinox.Module) and isinstance(model[1], equinox.nn.State):
            return _adapt_equinox(*model)
        if all(map(callable, model)):
            return _adapt_pair(*model)
    got = f"the class {model.__name__}: pass an instance" if isinstance(model, type) else type(model).__name__
    raise TypeError(
        "`model` must be a module of flax (linen or nnx), a Keras model, a transformed function of haiku, an equinox module, "
        "or a pair of functions `(init, apply)`, where `init(key, inputs)` returns parameters and `apply(params, inputs)` "
        f"returns outputs; got {got}."
    )


def _adapt_pair(init: Callable[..., PyTree], apply: Callable[..., Any]) -> ModelFunctions:
    signature = CallSignature(apply, 1)

    def init_params(key: jax.Array, inputs: PyTree) -> tuple[PyTree, PyTree]:
        args, kwargs = signature.arguments(inputs)
        return init(key, *args, **kwargs), {}

    def apply_with_state(
        params: PyTree, state: PyTree, inputs: PyTree, key: jax.Array, train: bool, weights: Any
    ) -> ModelResult:
        args, kwargs = signature.arguments(inputs)
        return ModelResult(apply(params, *args, **kwargs, **signature.keywords(train, weights, key=key)), state)

    return ModelFunctions(init_params, apply_with_state, lambda params, state: params, signature.takes_weights)


def _adapt_linen(module: Any) -> ModelFunctions:
    signature = CallSignature(type(module).__call__, 1)

    def init(key: jax.Array, inputs: PyTree) -> tuple[PyTree, PyTree]:
        keys = dict(zip(("params", "dropout"), jax.random.split(key), strict=True))
        args, kwargs = signature.arguments(inputs)
        variables = dict(module.init(keys, *args, **kwargs, **signature.keywords(False)))
        for name in ("intermediates", LOSSES):
            variables.pop(name, None)
        return variables.pop("params", {}), variables

    def apply(params: PyTree, state: PyTree, inputs: PyTree, key: jax.Array, train: bool, weights: Any) -> ModelResult:
        # flax uses the key "params" for `make_rng` of any other collection.
        rngs = {"dropout": key, "params": jax.random.fold_in(key, 0)}
        args, kwargs = signature.arguments(inputs)
        outputs, new_state = module.apply(
            {"params": params, **state},
            *args,
            rngs=rngs,
            mutable=[*(state if train else ()), LOSSES],
            **kwargs,
            **signature.keywords(train, weights),
        )
        new_state = {**state, **new_state}
        losses = jax.tree.leaves(new_state.pop(LOSSES, ()))
        return ModelResult(outputs, new_state, ModelLosses(losses))

    rebuild = lambda params, state: {"params": params, **state}
    return ModelFunctions(init, apply, rebuild, signature.takes_weights)


def _adapt_nnx(module: Any) -> ModelFunctions:
    from flax import nnx

    signature = CallSignature(type(module).__call__, 1)
    module, graphs = nnx.clone(module), {}
    nnx.pop(module, nnx.Intermediate)  # of an earlier call
    for train in (False, True):
        module.train() if train else module.eval()
        graphs[train], params, keys, rest = nnx.split(module, nnx.Param, nnx.RngState, ...)

    def init(key: jax.Array, inputs: PyTree) -> tuple[PyTree, PyTree]:
        return nnx.to_pure_dict(params, _boxed_value), nnx.to_pure_dict(rest, _boxed_value)

    def with_values(template: Any, values: PyTree) -> Any:
        state = jax.tree.map(lambda x: x, template)
        nnx.replace_by_pure_dict(state, _unboxed(values))
        return state

    def apply(values: PyTree, state: PyTree, inputs: PyTree, key: jax.Array, train: bool, weights: Any) -> ModelResult:
        merged = nnx.merge(
            graphs[train], with_values(params, values), _new_keys(key, keys), with_values(rest, state), copy=True
        )
        args, kwargs = signature.arguments(inputs)
        keywords = signature.keywords(
            train, weights, rngs=nnx.Rngs(jax.random.fold_in(key, len(jax.tree.leaves(keys))))
        )
        call = nnx.capture(lambda module: module(*args, **kwargs, **keywords), nnx.Intermediate)
        outputs, intermediates = call(merged)
        new_state = nnx.to_pure_dict(nnx.state(merged, nnx.Not(nnx.Any(nnx.Param, nnx.RngState, nnx.Intermediate))))
        leaves = jax.tree_util.tree_leaves_with_path(nnx.to_pure_dict(intermediates))
        losses = [leaf for path, leaf in leaves if any(getattr(key, "key", None) == LOSSES for key in path)]
        return ModelResult(outputs, _boxed_like(state, new_state), ModelLosses(losses))

    def rebuild(values: PyTree, state: PyTree) -> Any:
        return nnx.merge(graphs[False], with_values(params, values), keys, with_values(rest, state), copy=True)

    return ModelFunctions(init, apply, rebuild, signature.takes_weights)


def _boxed_value(leaf: Any) -> Any:
    """Returns the value of an nnx variable, in a box with its partition metadata if it has any; and any other leaf.

    The box is one of linen. A variable in the state would make steps slow: to flatten and unflatten one takes 0.1 ms per step.
    """
    from flax.core import meta

    if not is_variable(leaf):
        return leaf
    spec = partition_metadata(leaf)
    return leaf.get_value() if spec is None else meta.Partitioned(leaf.get_value(), names=tuple(spec))


def _unboxed(values: PyTree) -> PyTree:
    return jax.tree.map(lambda node: value_in(node) if is_box(node) else node, values, is_leaf=is_box)


def _boxed_like(boxed: PyTree, values: PyTree) -> PyTree:
    """Returns `values` in the boxes of the values of `boxed`."""
    if not any(map(is_box, jax.tree.leaves(boxed, is_leaf=is_box))):
        return values
    box = lambda old, new: old.replace_boxed(new) if is_box(old) else new
    return jax.tree.map(box, boxed, values, is_leaf=is_box)


def _new_keys(key: jax.Array, keys: PyTree) -> PyTree:
    """Returns the random state of an nnx module with keys derived from `key`, and its counters set to 0."""
    leaves, treedef = jax.tree.flatten(keys)
    new_leaves = [
        jax.random.fold_in(key, number) if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) else jnp.zeros_like(leaf)
        for number, leaf in enumerate(leaves)
    ]
    return treedef.unflatten(new_leaves)


def _adapt_haiku(model: Any) -> ModelFunctions:
    """`hk.transform(fn)`, and `hk.transform_with_state(fn)` if `model` has a state."""
    has_state = type(model).__name__ == "TransformedWithState"
    signature = CallSignature(model.init, 1)
    # `hk.without_apply_rng` removes the parameter.
    takes_key = "rng" in list(inspect.signature(model.apply).parameters)[: 2 + has_state]

    def init(key: jax.Array, inputs: PyTree) -> tuple[PyTree, PyTree]:
        args, kwargs = signature.arguments(inputs)
        variables = model.init(key, *args, **kwargs, **signature.keywords(True))  # haiku creates states in training
        return variables if has_state else (variables, {})

    def apply(params: PyTree, state: PyTree, inputs: PyTree, key: jax.Array, train: bool, weights: Any) -> ModelResult:
        leading = (params, *([state] if has_state else []), *([key] if takes_key else []))
        args, kwargs = signature.arguments(inputs)
        result = model.apply(*leading, *args, **kwargs, **signature.keywords(train, weights))
        outputs, new_state = result if has_state else (result, state)
        return ModelResult(outputs, new_state if train else state)

    rebuild = lambda params, state: (params, state) if has_state else params
    return ModelFunctions(init, apply, rebuild, signature.takes_weights)


def _adapt_equinox(model: Any, model_state: Any = None) -> ModelFunctions:
    """An equinox module computes one example, so it is mapped over the batch, with the axis name "batch"."""
    import equinox  # pyright: ignore[reportMissingImports]

    params, static = equinox.partition(model, equinox.is_inexact_array)
    signature = CallSignature(type(model).__call__, 1, excluded=("state",))
    has_state, takes_key = model_state is not None, "key" in inspect.signature(type(model).__call__).parameters

    def init(key: jax.Array, inputs: PyTree) -> tuple[PyTree, PyTree]:
        return params, {"state": model_state} if has_state else {}

    def apply(values: PyTree, state: PyTree, inputs: PyTree, key: jax.Array, train: bool, weights: Any) -> ModelResult:
        module = equinox.nn.inference_mode(equinox.combine(values, static), value=not train)

        def call(example: PyTree, module_state: Any, example_key: jax.Array) -> Any:
            args, kwargs = signature.arguments(example)
            states = (module_state,) if has_state else ()
            keywords = {"key": example_key} if takes_key else {}
            result = module(*args, *states, **kwargs, **keywords)
            return result if has_state else (result, None)

        keys = jax.random.split(key, len(jax.tree.leaves(inputs)[0]))
        mapped = jax.vmap(call, in_axes=(0, None, 0), out_axes=(0, None), axis_name="batch")
        outputs, new_state = mapped(inputs, state.get("state"), keys)
        return ModelResult(outputs, {"state": new_state} if has_state and train else state)

    def rebuild(values: PyTree, state: PyTree) -> Any:
        module = equinox.nn.inference_mode(equinox.combine(values, static))
        return (module, state["state"]) if has_state else module

    return ModelFunctions(init, apply, rebuild)


_ADAPTERS = {
    ("flax.linen", "Module"): _adapt_linen,
    ("flax.nnx", "Module"): _adapt_nnx,
    ("keras", "Model"): adapt_keras,
    ("haiku", "Transformed"): _adapt_haiku,
    ("haiku", "TransformedWithState"): _adapt_haiku,
    ("equinox", "Module"): _adapt_equinox,
}
