"""Adapts Keras models to pure functions."""

import collections
import contextlib
import copy
import functools
import itertools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jdist._src.core.tree import PyTree
from jdist._src.jaxpr.program_fingerprint import named_constant
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
    names = _names(model, variables)
    param_names = names[: len(model.trainable_variables)]
    state_names = names[len(param_names) :]
    signature = CallSignature(model.call, 0)

    def init(key: jax.Array, inputs: PyTree) -> tuple[PyTree, PyTree]:
        values = {
            name: named_constant(_CONSTANT_NAME.format(name), v.value) for name, v in zip(names, variables, strict=True)
        }
        return {name: values[name] for name in param_names}, {name: values[name] for name in state_names}

    def apply(params: PyTree, state: PyTree, inputs: PyTree, key: jax.Array, train: bool, weights: Any) -> ModelResult:
        import keras  # pyright: ignore[reportMissingImports]

        _check_names(model, names, {**params, **state})
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
        _check_names(model, names, {**params, **state})
        new_model = _copied(model)
        new_variables = [*new_model.trainable_variables, *new_model.non_trainable_variables]
        values = [params[name] for name in param_names] + [state[name] for name in state_names]
        for variable, value in zip(new_variables, values, strict=True):
            variable.assign(value)
        return new_model

    return ModelFunctions(init, apply, rebuild)


_CONSTANT_NAME = "the weight `{}` of the Keras model (call `keras.utils.set_random_seed(seed)` before it is built)"


def _names(model: Any, variables: Sequence[Any]) -> list[str]:
    """Returns names of the variables of a Keras model that are the same when the model is built again.

    They are the paths of the variables, in which automatic names of layers are counted from 0. Keras counts them over all
    models of the process: a second `Sequential([Dense(2)])` has the path `sequential_1/dense_1/kernel`. The order of the
    counters is the order in which the layers were created, the same each time. Equal paths are numbered.
    """
    classes = {layer.name: type(layer).__name__ for layer in model._flatten_layers()}
    paths = [_parsed_path(variable.path, classes) for variable in variables]
    counters: dict[str, set[int]] = {}
    for name, counter in itertools.chain(*paths):
        if counter is not None:
            counters.setdefault(name, set()).add(counter)
    ranks = {name: {counter: rank for rank, counter in enumerate(sorted(set_))} for name, set_ in counters.items()}
    counts, names = collections.Counter[str](), []
    for path in paths:
        parts = ((name, counter and ranks[name][counter]) for name, counter in path)
        name = "/".join(f"{name}_{rank}" if rank else name for name, rank in parts)
        counts[name] += 1
        names.append(name if counts[name] == 1 else f"{name}#{counts[name]}")
    return names


def _parsed_path(path: str, classes: Mapping[str, str]) -> list[tuple[str, int | None]]:
    """Returns the names in the path of a variable with their counters, None for a name that the user chose.

    The automatic name of a layer is its class in snake case. A layer that is not in the model is the scope in which a layer of
    the model was built; whether the user chose its name is not known, and it is treated as automatic.

    Args:
        path: The path.
        classes: The names of the classes of the layers of the model, by the names of the layers.
    """
    *layers, variable = path.split("/")
    parsed: list[tuple[str, int | None]] = []
    for part, is_layer in [*((layer, True) for layer in layers), (variable, False)]:
        name, counter = re.fullmatch(r"(.*?)(?:_(\d+))?", part, re.DOTALL).groups()  # type: ignore[union-attr]
        is_automatic = (part not in classes or name == _snake_case(classes[part])) if is_layer else name == "variable"
        parsed.append((name, int(counter or 0)) if is_automatic else (part, None))
    return parsed


def _snake_case(name: str) -> str:
    """Returns the name of a class as Keras derives the name of a layer from it: `Conv2DTranspose` is `conv2d_transpose`."""
    name = re.sub(r"(.)([A-Z][a-z]+)", r"\1_\2", re.sub(r"\W+", "", name))
    return re.sub(r"([a-z])([A-Z])", r"\1_\2", name).lower()


def _check_names(model: Any, names: Sequence[str], values: Mapping[str, Any]) -> None:
    """Raises ValueError if a state does not have the variables of the model."""
    missing, unknown = (sorted(set(a) - set(b)) for a, b in ((names, values), (values, names)))
    if missing or unknown:
        raise ValueError(
            f"The state is of another model than the Keras model {model.name!r}: {len(missing)} of its {len(names)} variables "
            f"are not in the state{_first(missing)}, and {len(unknown)} of the state are not in the model{_first(unknown)}."
        )


def _first(names: Sequence[str]) -> str:
    return f" (the first is {names[0]!r})" if names else ""


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
    # Sums over the numbers of an array, to which the numbers of one example contribute only its own sum.
    sums_over_examples = (keras.regularizers.L1, keras.regularizers.L2, keras.regularizers.L1L2)
    layers = [layer for layer in model._flatten_layers() if isinstance(layer.activity_regularizer, sums_over_examples)]
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
    """Returns the regularizer of the examples in the mask, scaled because Keras divides by the number of all examples."""
    if output.ndim == 0 or len(output) != len(mask):
        return regularizer(output)
    masked = jnp.where(mask.reshape(mask.shape + (1,) * (output.ndim - 1)) == 0, 0, output)
    return regularizer(masked) * (len(mask) / jnp.maximum(mask.sum(), 1)).astype(output.dtype)


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
            "Define `get_config` in its class, and accept `**kwargs` in `__init__`. Or assign the values to a model that is "
            "created after `keras.utils.clear_session()`: `for v in model.variables: v.assign({**state.params, "
            "**state.model_state}[v.path])`."
        ) from error
