"""Models of any library as two functions: one makes parameters, one applies them."""

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
    """A model as training sees it.

    Attributes:
        init: From a key and inputs `[batch, ...]` to parameters, and what the model keeps besides.
        apply: From both of these, inputs, a key, whether it is trained, and weights `[batch]` of the examples (None: all
            count alike), to outputs and what it keeps then.
    """

    init: Callable[[jax.Array, PyTree], tuple[PyTree, PyTree]]
    apply: Callable[[PyTree, PyTree, PyTree, jax.Array, bool, Any], tuple[PyTree, PyTree]]


def adapt_model(model: Any) -> ModelFunctions:
    """A model of flax (linen or nnx) or Keras, or a pair of functions `(init, apply)`, as a `Model`.

    Raises:
        TypeError: It is none of these.
    """
    if isinstance(model, ModelFunctions):
        return model
    for (library, name), adapter in _ADAPTERS.items():
        kind = getattr(sys.modules.get(library), name, None)  # whoever has such a model has imported its library
        if kind is not None and isinstance(model, kind):
            return adapter(model)
    if isinstance(model, (tuple, list)) and len(model) == 2 and all(map(callable, model)):
        return _of_pair(*model)
    what = f"the class {model.__name__}: hand in an instance" if isinstance(model, type) else type(model).__name__
    raise TypeError(
        "`model` is a module of flax (linen or nnx), a Keras model, or a pair of functions `(init, apply)`, where "
        f"`init(key, inputs)` makes parameters and `apply(params, inputs)` gives outputs; got {what}."
    )


def _keywords(fn: Callable[..., Any], known: int) -> Callable[..., dict[str, Any]]:
    """What `fn` is told by name, of those names that it takes behind its first `known` parameters."""
    names = list(inspect.signature(fn).parameters)[known:]

    def told(train: bool, weights: Any = None, **more: Any) -> dict[str, Any]:
        modes = {name: mode(train) for name, mode in _MODES.items()}
        return {name: value for name, value in {**modes, "weights": weights, **more}.items() if name in names}

    return told


def _of_pair(init: Callable[..., PyTree], apply: Callable[..., Any]) -> ModelFunctions:
    told = _keywords(apply, 2)

    def run(params: PyTree, state: PyTree, inputs: PyTree, key: jax.Array, train: bool, weights: Any) -> Any:
        return apply(params, inputs, **told(train, weights, key=key)), state

    return ModelFunctions(lambda key, inputs: (init(key, inputs), {}), run)


def _of_linen(module: Any) -> ModelFunctions:
    from flax.core import meta

    told = _keywords(type(module).__call__, 2)

    def init(key: jax.Array, inputs: PyTree) -> tuple[PyTree, PyTree]:
        keys = dict(zip(("params", "dropout"), jax.random.split(key), strict=True))
        variables = dict(meta.unbox(module.init(keys, inputs, **told(False))))
        variables.pop("intermediates", None)
        return variables.pop("params", {}), variables

    def apply(
        params: PyTree, state: PyTree, inputs: PyTree, key: jax.Array, train: bool, weights: Any
    ) -> tuple[PyTree, PyTree]:
        variables = {"params": params, **state}
        if not train or not state:
            return module.apply(variables, inputs, rngs={"dropout": key}, **told(train, weights)), state
        outputs, new = module.apply(
            variables, inputs, rngs={"dropout": key}, mutable=list(state), **told(train, weights)
        )
        return outputs, {**state, **new}

    return ModelFunctions(init, apply)


def _of_nnx(module: Any) -> ModelFunctions:
    from flax import nnx

    told = _keywords(type(module).__call__, 2)
    module, graphs = nnx.clone(module), {}
    for train in (False, True):
        module.train() if train else module.eval()
        graphs[train], params, keys, rest = nnx.split(module, nnx.Param, nnx.RngState, ...)

    def init(key: jax.Array, inputs: PyTree) -> tuple[PyTree, PyTree]:
        return nnx.to_pure_dict(params), nnx.to_pure_dict(rest)

    def of(like: Any, tree: PyTree) -> Any:
        state = jax.tree.map(lambda x: x, like)
        nnx.replace_by_pure_dict(state, tree)
        return state

    def apply(
        values: PyTree, state: PyTree, inputs: PyTree, key: jax.Array, train: bool, weights: Any
    ) -> tuple[PyTree, PyTree]:
        streams = _drawn_from(key, keys)
        merged = nnx.merge(graphs[train], of(params, values), streams, of(rest, state), copy=True)
        outputs = merged(inputs, **told(train, weights))
        return outputs, nnx.to_pure_dict(nnx.state(merged, nnx.Not(nnx.Any(nnx.Param, nnx.RngState))))

    return ModelFunctions(init, apply)


def _drawn_from(key: jax.Array, keys: PyTree) -> PyTree:
    """The random state of a module of nnx with other keys, and its counts at the beginning."""
    leaves, treedef = jax.tree.flatten(keys)
    fresh = [
        jax.random.fold_in(key, number) if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) else jnp.zeros_like(leaf)
        for number, leaf in enumerate(leaves)
    ]
    return treedef.unflatten(fresh)


def _of_keras(model: Any) -> ModelFunctions:
    check_keras_backend()
    if not model.built:
        raise ValueError(
            "The Keras model has no weights yet. Begin it with a `keras.Input(shape)`, or call `model.build((None, ...))` "
            "with the shape of its inputs."
        )

    if model.losses:
        raise ValueError(
            f"The Keras model adds {len(model.losses)} losses of its own, by regularizers or `add_loss`, and they would be "
            "left out. Leave them out of the model: let the optimizer decay the weights, or put them into `loss`."
        )
    trained, kept = _names(model.trainable_variables), _names(model.non_trainable_variables)
    told = _keywords(model.call, 1)

    def init(key: jax.Array, inputs: PyTree) -> tuple[PyTree, PyTree]:
        pairs = (trained, model.trainable_variables), (kept, model.non_trainable_variables)
        params, state = ({name: v.value for name, v in zip(names, held, strict=True)} for names, held in pairs)
        return params, state

    def apply(
        params: PyTree, state: PyTree, inputs: PyTree, key: jax.Array, train: bool, weights: Any
    ) -> tuple[PyTree, PyTree]:
        seeds = {name: state[name] for name in kept if "seed_generator" in name}
        given = {**state, **_drawn(key, seeds)}
        values = [params[name] for name in trained], [given[name] for name in kept]
        outputs, new = model.stateless_call(*values, inputs, **told(train))
        return outputs, {**dict(zip(kept, new, strict=True)), **seeds}

    return ModelFunctions(init, apply)


def _names(variables: Any) -> list[str]:
    """The paths of the variables of a Keras model, numbered where several have the same."""
    paths, seen = [variable.path for variable in variables], collections.Counter[str]()
    names = []
    for path in paths:
        seen[path] += 1
        names.append(path if seen[path] == 1 else f"{path}#{seen[path]}")
    return names


def _drawn(key: jax.Array, seeds: Mapping[str, Any]) -> dict[str, Any]:
    """States of random generators that draw from `key`: with their own, every replica would drop out the same."""
    return {
        name: jax.random.bits(jax.random.fold_in(key, number), value.shape, value.dtype)
        for number, (name, value) in enumerate(seeds.items())
    }


_ADAPTERS = {
    ("flax.linen", "Module"): _of_linen,
    ("flax.nnx", "Module"): _of_nnx,
    ("keras", "Model"): _of_keras,
}
