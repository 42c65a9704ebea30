"""`ModelFunctions`: a model of any library as pure functions, and how these receive inputs and keyword arguments."""

import inspect
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jdist._src.core.tree import PyTree, describe_tree, is_named_tuple

_MODES = {
    "train": lambda train: train,
    "training": lambda train: train,
    "is_training": lambda train: train,
    "deterministic": lambda train: not train,
}
_OPTIONAL = frozenset({*_MODES, "weights", "key", "rngs"})


class ModelLosses(NamedTuple):
    """The losses that a model adds, beside the loss of its outputs.

    Attributes:
        means: Arrays `[]`, the mean over the examples of a batch or a function of the parameters only; or `[batch, ...]`, one
            or several values per example, which are averaged over all examples.
        sums: Arrays `[batch, ...]`, which are added over all examples.
    """

    means: Sequence[jax.Array] = ()
    sums: Sequence[jax.Array] = ()


class ModelResult(NamedTuple):
    """The results of a model for a batch.

    Attributes:
        outputs: The outputs, usually `[batch, ...]`.
        state: The new model state.
        losses: The losses that the model adds.
    """

    outputs: PyTree
    state: PyTree
    losses: ModelLosses = ModelLosses()


class ModelFunctions(NamedTuple):
    """A model as pure functions.

    Attributes:
        init: From a random key and inputs `[batch, ...]` to parameters and model state (the other variables).
        apply: From parameters, model state, inputs, a random key, whether the model is trained, and weights `[batch]` of the
            examples (None: equal weights), to a `ModelResult`.
        rebuild: From parameters and model state to a model of its library with these values.
        takes_weights: Whether the model itself receives the weights of the examples.
    """

    init: Callable[[jax.Array, PyTree], tuple[PyTree, PyTree]]
    apply: Callable[[PyTree, PyTree, PyTree, jax.Array, bool, Any], ModelResult]
    rebuild: Callable[[PyTree, PyTree], Any]
    takes_weights: bool = False


class TrainedModel(Mapping[Any, Any]):
    """The values of a model whose library has no object for a model with values, as a function of inputs `[batch, ...]`.

    It has the items of these values, and is a pytree of them: `jax.tree.map` returns plain values.

    Attributes:
        variables: The values, as the library expects them.
    """

    def __init__(self, variables: PyTree, outputs: Callable[[PyTree], PyTree]):
        self.variables, self._outputs = variables, outputs

    def __call__(self, *args: PyTree, **kwargs: PyTree) -> PyTree:
        """Returns the outputs for inputs, in evaluation mode."""
        return self._outputs(as_inputs(args, kwargs))

    def __getitem__(self, key: Any) -> Any:
        return self.variables[key]

    def __iter__(self) -> Iterator[Any]:
        return iter(self.variables)

    def __len__(self) -> int:
        return len(self.variables)

    def __repr__(self) -> str:
        return f"TrainedModel({describe_tree(self.variables)})"


jax.tree_util.register_pytree_node(
    TrainedModel, lambda model: ((model.variables,), None), lambda _, children: children[0]
)


def as_inputs(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> PyTree:
    """Returns the arguments of a call as the inputs of a model: a dict, one tree, or a tuple."""
    return dict(kwargs) if kwargs else args[0] if len(args) == 1 else args


class CallSignature:
    """The parameters of a model's function, which decide how it receives inputs and which keyword arguments it receives.

    Immutable.

    Args:
        fn: The function.
        num_leading: The number of parameters before the inputs, such as `self` or the parameters of the model.
        excluded: Names of parameters that are not inputs.

    Example:
        >>> one = CallSignature(lambda x, train: x, 0)
        >>> two = CallSignature(lambda x, y, train: x, 0)
        >>> one.arguments((1, 2)), two.arguments((1, 2)), two.arguments({"y": 2, "x": 1})
        ((((1, 2),), {}), ((1, 2), {}), ((), {'y': 2, 'x': 1}))
        >>> one.keywords(True, key=3)
        {'train': True}
    """

    def __init__(self, fn: Callable[..., Any], num_leading: int, excluded: Collection[str] = ()):
        parameters = list(inspect.signature(fn).parameters.values())[num_leading:]
        variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
        named = [p for p in parameters if p.kind not in variadic and p.name not in excluded]
        first = (
            parameters[0]
            if parameters and parameters[0].kind not in (*variadic, inspect.Parameter.KEYWORD_ONLY)
            else None
        )
        inputs = [p for p in named if p is first or p.name not in _OPTIONAL]
        self._input_names = {p.name for p in inputs if p.kind is not p.POSITIONAL_ONLY}
        self._required = [p.name for p in inputs if p.default is p.empty]
        self._num_positional = sum(p.kind is not p.KEYWORD_ONLY for p in inputs)
        self._optional_names = {p.name for p in named if p is not first} & _OPTIONAL

    def arguments(self, inputs: PyTree) -> tuple[tuple[Any, ...], Mapping[str, Any]]:
        """Returns `inputs` as positional and keyword arguments.

        A dict whose keys are parameters is passed by keywords. A tuple or a list is passed as several arguments if two or more
        parameters have no default. Other inputs are one argument.
        """
        has_names = isinstance(inputs, Mapping) and bool(inputs) and self._input_names.issuperset(inputs)
        if has_names and all(name in inputs for name in self._required):
            return (), inputs
        is_several = isinstance(inputs, (tuple, list)) and not is_named_tuple(inputs)
        if is_several and 2 <= len(self._required) <= len(inputs) <= self._num_positional:
            return tuple(inputs), {}
        return (inputs,), {}

    @property
    def takes_weights(self) -> bool:
        """Whether the function accepts the keyword argument `weights`."""
        return "weights" in self._optional_names

    def keywords(self, train: bool, weights: Any = None, **optional: Any) -> dict[str, Any]:
        """Returns the accepted keyword arguments out of the mode (`train`, `deterministic`, ...), `weights` and `optional`."""
        modes = {name: mode(train) for name, mode in _MODES.items()}
        candidates = {**modes, "weights": weights, **optional}
        return {name: value for name, value in candidates.items() if name in self._optional_names}


def example_mask(weights: Any) -> jax.Array:
    """Returns 1 for each example with a weight other than 0, else 0: float32 `[batch]`."""
    weights = jnp.asarray(weights)
    return (weights != 0).any(axis=tuple(range(1, weights.ndim))).astype(jnp.float32)


def _no_model(*args: Any) -> Any:
    raise TypeError(
        "This trainer has no model: it was created with `step=`. Pass a model too, `Trainer(model, loss=..., step=...)`, to "
        "use `evaluate`, `predict`, `apply` and `model`; the state then needs `params`."
    )


NO_MODEL = ModelFunctions(_no_model, _no_model, _no_model)
