"""Models of any library as two functions: one makes parameters, one applies them."""

import inspect
import sys
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jdist._tree import PyTree

_MODES = {
    "train": lambda train: train,
    "training": lambda train: train,
    "is_training": lambda train: train,
    "deterministic": lambda train: not train,
}


class Model(NamedTuple):
    """A model as training sees it.

    Attributes:
        init: From a key and inputs `[batch, ...]` to parameters, and what the model keeps besides.
        apply: From both of these, inputs, a key, whether it is trained, and weights `[batch]` of the examples (None: all
            count alike), to outputs and what it keeps then.
    """

    init: Callable[[jax.Array, PyTree], tuple[PyTree, PyTree]]
    apply: Callable[[PyTree, PyTree, PyTree, jax.Array, bool, Any], tuple[PyTree, PyTree]]


def model_of(model: Any) -> Model:
    """A model of flax (linen or nnx) or Keras, or a pair of functions `(init, apply)`, as a `Model`.

    Raises:
        TypeError: It is none of these.
    """
    if isinstance(model, Model):
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


def _keywords(fn: Callable[..., Any]) -> Callable[..., dict[str, Any]]:
    """What `fn` is told by name, of those names that it takes: whether it is trained, and what the examples weigh."""
    names = inspect.signature(fn).parameters

    def told(train: bool, weights: Any = None, **more: Any) -> dict[str, Any]:
        modes = {name: mode(train) for name, mode in _MODES.items()}
        return {name: value for name, value in {**modes, "weights": weights, **more}.items() if name in names}

    return told


def _of_pair(init: Callable[..., PyTree], apply: Callable[..., Any]) -> Model:
    told = _keywords(apply)

    def run(params: PyTree, state: PyTree, inputs: PyTree, key: jax.Array, train: bool, weights: Any) -> Any:
        return apply(params, inputs, **told(train, weights, key=key)), state

    return Model(lambda key, inputs: (init(key, inputs), {}), run)


def _of_linen(module: Any) -> Model:
    from flax.core import meta

    told = _keywords(type(module).__call__)

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

    return Model(init, apply)


def _of_nnx(module: Any) -> Model:
    from flax import nnx

    told = _keywords(type(module).__call__)
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

    return Model(init, apply)


def _drawn_from(key: jax.Array, keys: PyTree) -> PyTree:
    """The random state of a module of nnx with other keys, and its counts at the beginning."""
    leaves, treedef = jax.tree.flatten(keys)
    fresh = [
        jax.random.fold_in(key, number) if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) else jnp.zeros_like(leaf)
        for number, leaf in enumerate(leaves)
    ]
    return treedef.unflatten(fresh)


def _of_keras(model: Any) -> Model:
    import keras

    if keras.backend.backend() != "jax":
        raise ValueError(
            f"Keras computes with {keras.backend.backend()} here, and has to with JAX: set the environment variable "
            "KERAS_BACKEND=jax before it is imported."
        )

    if not model.built:
        raise ValueError(
            "The Keras model has no weights yet. Begin it with a `keras.Input(shape)`, or call `model.build((None, ...))` "
            "with the shape of its inputs."
        )

    def init(key: jax.Array, inputs: PyTree) -> tuple[PyTree, PyTree]:
        return _values(model.trainable_variables), _values(model.non_trainable_variables)

    def apply(
        params: PyTree, state: PyTree, inputs: PyTree, key: jax.Array, train: bool, weights: Any
    ) -> tuple[PyTree, PyTree]:
        seeded = _reseeded(model.non_trainable_variables, state, key)
        trained = [params[variable.path] for variable in model.trainable_variables]
        others = [variable.path for variable in model.non_trainable_variables]
        outputs, new = model.stateless_call(trained, [seeded[path] for path in others], inputs, training=train)
        return outputs, {**dict(zip(others, new, strict=True)), **_seeds(model.non_trainable_variables, state)}

    return Model(init, apply)


def _values(variables: Any) -> dict[str, jax.Array]:
    return {variable.path: variable.value for variable in variables}


def _seeds(variables: Any, state: Mapping[str, Any]) -> dict[str, Any]:
    """The states of random generators among the variables of a Keras model."""
    return {variable.path: state[variable.path] for variable in variables if "seed_generator" in variable.path}


def _reseeded(variables: Any, state: Mapping[str, Any], key: jax.Array) -> dict[str, Any]:
    """`state` with generators that draw from `key`: else every replica would drop out the same."""
    seeds = _seeds(variables, state)
    drawn = {
        path: jax.random.bits(jax.random.fold_in(key, number), value.shape, value.dtype)
        for number, (path, value) in enumerate(seeds.items())
    }
    return {**state, **drawn}


_ADAPTERS = {
    ("flax.linen", "Module"): _of_linen,
    ("flax.nnx", "Module"): _of_nnx,
    ("keras", "Model"): _of_keras,
}
