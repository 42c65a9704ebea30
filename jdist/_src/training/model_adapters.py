"""Adapts models of flax and Keras to a pair of functions: one creates parameters, one applies them."""

import collections
import inspect
import sys
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jdist._src.core.tree import PyTree
from jdist._src.training.loss_adapters import check_keras_backend

_MODES = {
    "train": lambda train: train,
    "training": lambda train: train,
    "is_training": lambda train: train,
    "deterministic": lambda train: not train,
}


class ModelFunctions(NamedTuple):
    """A model as a pair of pure functions.

    Attributes:
        init: From a random key and inputs `[batch, ...]` to parameters and model state (the other variables).
        apply: From parameters, model state, inputs, a random key, whether the model is trained, and weights `[batch]` of the
            examples (None: equal weights), to outputs and the new model state.
    """

    init: Callable[[jax.Array, PyTree], tuple[PyTree, PyTree]]
    apply: Callable[[PyTree, PyTree, PyTree, jax.Array, bool, Any], tuple[PyTree, PyTree]]


def adapt_model(model: Any) -> ModelFunctions:
    """Returns a model of flax (linen or nnx) or Keras, or a pair of functions `(init, apply)`, as `ModelFunctions`.

    Raises:
        TypeError: `model` is none of these.
    """
    if isinstance(model, ModelFunctions):
        return model
    for (library, name), adapter in _ADAPTERS.items():
        kind = getattr(sys.modules.get(library), name, None)  # the creator of such a model has imported its library
        if kind is not None and isinstance(model, kind):
            return adapter(model)
    if isinstance(model, (tuple, list)) and len(model) == 2 and all(map(callable, model)):
        return _adapt_pair(*model)
    got = f"the class {model.__name__}: pass an instance" if isinstance(model, type) else type(model).__name__
    raise TypeError(
        "`model` must be a module of flax (linen or nnx), a Keras model, or a pair of functions `(init, apply)`, where "
        f"`init(key, inputs)` returns parameters and `apply(params, inputs)` returns outputs; got {got}."
    )


def _accepted_keywords(fn: Callable[..., Any], num_positional: int) -> Callable[..., dict[str, Any]]:
    """Returns a function that returns the keyword arguments that `fn` accepts after its first `num_positional` parameters."""
    accepted_names = list(inspect.signature(fn).parameters)[num_positional:]

    def keywords(train: bool, weights: Any = None, **optional: Any) -> dict[str, Any]:
        modes = {name: mode(train) for name, mode in _MODES.items()}
        candidates = {**modes, "weights": weights, **optional}
        return {name: value for name, value in candidates.items() if name in accepted_names}

    return keywords


def _adapt_pair(init: Callable[..., PyTree], apply: Callable[..., Any]) -> ModelFunctions:
    keywords = _accepted_keywords(apply, 2)

    def apply_with_state(
        params: PyTree, state: PyTree, inputs: PyTree, key: jax.Array, train: bool, weights: Any
    ) -> tuple[PyTree, PyTree]:
        return apply(params, inputs, **keywords(train, weights, key=key)), state

    return ModelFunctions(lambda key, inputs: (init(key, inputs), {}), apply_with_state)


def _adapt_linen(module: Any) -> ModelFunctions:
    from flax.core import meta

    keywords = _accepted_keywords(type(module).__call__, 2)

    def init(key: jax.Array, inputs: PyTree) -> tuple[PyTree, PyTree]:
        keys = dict(zip(("params", "dropout"), jax.random.split(key), strict=True))
        variables = dict(meta.unbox(module.init(keys, inputs, **keywords(False))))
        variables.pop("intermediates", None)
        return variables.pop("params", {}), variables

    def apply(
        params: PyTree, state: PyTree, inputs: PyTree, key: jax.Array, train: bool, weights: Any
    ) -> tuple[PyTree, PyTree]:
        variables = {"params": params, **state}
        if not train or not state:
            return module.apply(variables, inputs, rngs={"dropout": key}, **keywords(train, weights)), state
        outputs, new_state = module.apply(
            variables, inputs, rngs={"dropout": key}, mutable=list(state), **keywords(train, weights)
        )
        return outputs, {**state, **new_state}

    return ModelFunctions(init, apply)


def _adapt_nnx(module: Any) -> ModelFunctions:
    from flax import nnx

    keywords = _accepted_keywords(type(module).__call__, 2)
    module, graphs = nnx.clone(module), {}
    for train in (False, True):
        module.train() if train else module.eval()
        graphs[train], params, keys, rest = nnx.split(module, nnx.Param, nnx.RngState, ...)

    def init(key: jax.Array, inputs: PyTree) -> tuple[PyTree, PyTree]:
        return nnx.to_pure_dict(params), nnx.to_pure_dict(rest)

    def with_values(template: Any, values: PyTree) -> Any:
        state = jax.tree.map(lambda x: x, template)
        nnx.replace_by_pure_dict(state, values)
        return state

    def apply(
        values: PyTree, state: PyTree, inputs: PyTree, key: jax.Array, train: bool, weights: Any
    ) -> tuple[PyTree, PyTree]:
        merged = nnx.merge(
            graphs[train], with_values(params, values), _new_keys(key, keys), with_values(rest, state), copy=True
        )
        outputs = merged(inputs, **keywords(train, weights))
        return outputs, nnx.to_pure_dict(nnx.state(merged, nnx.Not(nnx.Any(nnx.Param, nnx.RngState))))

    return ModelFunctions(init, apply)


def _new_keys(key: jax.Array, keys: PyTree) -> PyTree:
    """Returns the random state of an nnx module with keys derived from `key`, and its counters set to 0."""
    leaves, treedef = jax.tree.flatten(keys)
    new_leaves = [
        jax.random.fold_in(key, number) if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) else jnp.zeros_like(leaf)
        for number, leaf in enumerate(leaves)
    ]
    return treedef.unflatten(new_leaves)


def _adapt_keras(model: Any) -> ModelFunctions:
    check_keras_backend()
    if not model.built:
        raise ValueError(
            "The Keras model is not built. Add a `keras.Input(shape)` as its first layer, or call "
            "`model.build((None, ...))` with the shape of its inputs."
        )
    if model.losses:
        raise ValueError(
            f"The Keras model adds {len(model.losses)} losses by regularizers or `add_loss`, which a `Trainer` would ignore. "
            "Remove them from the model: use an optimizer with weight decay, or add them in `loss`."
        )
    param_names, state_names = _names(model.trainable_variables), _names(model.non_trainable_variables)
    keywords = _accepted_keywords(model.call, 1)

    def init(key: jax.Array, inputs: PyTree) -> tuple[PyTree, PyTree]:
        params = {name: v.value for name, v in zip(param_names, model.trainable_variables, strict=True)}
        return params, {name: v.value for name, v in zip(state_names, model.non_trainable_variables, strict=True)}

    def apply(
        params: PyTree, state: PyTree, inputs: PyTree, key: jax.Array, train: bool, weights: Any
    ) -> tuple[PyTree, PyTree]:
        seeds = {name: state[name] for name in state_names if "seed_generator" in name}
        seeded_state = {**state, **_new_seeds(key, seeds)}
        values = [params[name] for name in param_names], [seeded_state[name] for name in state_names]
        outputs, new_values = model.stateless_call(*values, inputs, **keywords(train))
        return outputs, {**dict(zip(state_names, new_values, strict=True)), **seeds}

    return ModelFunctions(init, apply)


def _names(variables: Any) -> list[str]:
    """Returns the paths of the variables of a Keras model, numbered if several are equal."""
    counts, names = collections.Counter[str](), []
    for variable in variables:
        path = variable.path
        counts[path] += 1
        names.append(path if counts[path] == 1 else f"{path}#{counts[path]}")
    return names


def _new_seeds(key: jax.Array, seeds: Mapping[str, Any]) -> dict[str, Any]:
    """Returns seeds derived from `key`: with the seeds of the model, every replica would drop out the same units."""
    return {
        name: jax.random.bits(jax.random.fold_in(key, number), value.shape, value.dtype)
        for number, (name, value) in enumerate(seeds.items())
    }


_ADAPTERS = {
    ("flax.linen", "Module"): _adapt_linen,
    ("flax.nnx", "Module"): _adapt_nnx,
    ("keras", "Model"): _adapt_keras,
}
