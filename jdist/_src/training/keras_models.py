"""Adapts Keras models to pure functions."""

import collections
import contextlib
import copy
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from jdist._src.core.tree import PyTree
from jdist._src.training.loss_adapters import check_keras_backend
from jdist._src.training.model_functions import CallSignature, ModelFunctions, ModelLosses, ModelResult, example_mask


def adapt_keras(model: Any) -> ModelFunctions:
    """Returns a Keras model as `ModelFunctions`.

    Raises:
        ValueError: The model is not built, or the backend of Keras is not JAX.
    """
    check_keras_backend()
    if not model.built:
        raise ValueError(
            "The Keras model is not built. Add a `keras.Input(shape)` as its first layer, or call "
            "`model.build((None, ...))` with the shape of its inputs."
        )
    variables = [*model.trainable_variables, *model.non_trainable_variables]
    param_names, state_names = _names(model.trainable_variables), _names(model.non_trainable_variables)
    signature = CallSignature(model.call, 0)

    def init(key: jax.Array, inputs: PyTree) -> tuple[PyTree, PyTree]:
        params = {name: v.value for name, v in zip(param_names, model.trainable_variables, strict=True)}
        return params, {name: v.value for name, v in zip(state_names, model.non_trainable_variables, strict=True)}

    def apply(params: PyTree, state: PyTree, inputs: PyTree, key: jax.Array, train: bool, weights: Any) -> ModelResult:
        import keras  # pyright: ignore[reportMissingImports]

        seeds = {name: state[name] for name in state_names if "seed_generator" in name}
        seeded_state = {**state, **_new_seeds(key, seeds)}
        values = [params[name] for name in param_names] + [seeded_state[name] for name in state_names]
        args, kwargs = signature.arguments(inputs)
        mapping = list(zip(variables, values, strict=True))
        # Not `stateless_call`: it loses the losses of all calls of a shared layer except for the last one.
        with (
            keras.StatelessScope(state_mapping=mapping, collect_losses=True) as scope,
            _without_padding(model, weights),
        ):
            outputs = model(*args, **kwargs, **signature.keywords(train))
            losses = list(model.losses)
        state_variables = zip(state_names, variables[len(param_names) :], strict=True)
        new_state = {name: scope.get_current_value(variable) for name, variable in state_variables}
        return ModelResult(outputs, {**new_state, **seeds}, _model_losses(losses, inputs))

    def rebuild(params: PyTree, state: PyTree) -> Any:
        new_model = _copied(model)
        new_variables = [*new_model.trainable_variables, *new_model.non_trainable_variables]
        values = [params[name] for name in param_names] + [state[name] for name in state_names]
        for variable, value in zip(new_variables, values, strict=True):
            variable.assign(value)
        return new_model

    return ModelFunctions(init, apply, rebuild)


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


def _model_losses(losses: list[Any], inputs: PyTree) -> ModelLosses:
    """Returns the losses of a Keras model. Keras adds up an array that is passed to `add_loss`."""
    num_examples = len(jax.tree.leaves(inputs)[0])
    arrays = [jnp.asarray(loss) for loss in losses]
    is_per_example = [array.ndim > 0 and len(array) == num_examples for array in arrays]
    return ModelLosses(
        [array.sum() for array, per_example in zip(arrays, is_per_example, strict=True) if not per_example],
        [array for array, per_example in zip(arrays, is_per_example, strict=True) if per_example],
    )


@contextlib.contextmanager
def _without_padding(model: Any, weights: Any) -> Iterator[None]:
    """Inside, activity regularizers have no contribution of examples with weight 0."""
    import keras  # pyright: ignore[reportMissingImports]

    if weights is None:
        yield
        return
    # Sums over the numbers of an array, so the contribution of an example is that of its row.
    sums_over_rows = (keras.regularizers.L1, keras.regularizers.L2, keras.regularizers.L1L2)
    layers = [layer for layer in model._flatten_layers() if isinstance(layer.activity_regularizer, sums_over_rows)]
    regularizers = [layer.activity_regularizer for layer in layers]
    mask = example_mask(weights)
    try:
        for layer, regularizer in zip(layers, regularizers, strict=True):
            layer.activity_regularizer = functools.partial(_masked_regularizer, regularizer, mask)
        yield
    finally:
        for layer, regularizer in zip(layers, regularizers, strict=True):
            layer.activity_regularizer = regularizer


def _masked_regularizer(regularizer: Callable[[Any], Any], mask: jax.Array, output: Any) -> Any:
    """Returns the regularizer of the rows of `output` in the mask, scaled because Keras divides by the number of all rows."""
    if output.ndim == 0 or len(output) != len(mask):
        return regularizer(output)
    rows = jnp.where(mask.reshape(mask.shape + (1,) * (output.ndim - 1)) == 0, 0, output)
    return regularizer(rows) * (len(mask) / jnp.maximum(mask.sum(), 1)).astype(output.dtype)


def _copied(model: Any) -> Any:
    """Returns a copy of a Keras model with new variables.

    Raises:
        TypeError: Keras cannot serialize the model.
    """
    import keras  # pyright: ignore[reportMissingImports]

    classes = {type(layer).__name__: type(layer) for layer in model._flatten_layers()}
    custom = {name: kind for name, kind in classes.items() if not kind.__module__.startswith("keras.")}
    try:
        with keras.saving.custom_object_scope(custom):
            return copy.deepcopy(model)
    except (TypeError, ValueError, NotImplementedError) as error:
        raise TypeError(
            f"The Keras model {model.name!r} cannot be copied, because Keras cannot serialize it ({type(error).__name__}). "
            "Define `get_config` in its class, and accept `**kwargs` in `__init__`. Or assign the values to the variables of a "
            "model: `for v in model.variables: v.assign({**state.params, **state.model_state}[v.path])`."
        ) from error
