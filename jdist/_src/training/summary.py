"""`jdist.summary`: the layers of a model with their arrays, the number of parameters, and the bytes."""

import dataclasses
import math
import sys
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from jdist._src.core.arguments import as_int
from jdist._src.core.nn_modules import is_module, is_variable, to_array_tree
from jdist._src.core.rendering import html_of, rows_table, text_of
from jdist._src.core.tree import PyTree, has_dtype, one_line
from jdist._src.strategies.description import grouped, listed, size_text
from jdist._src.training.keras_models import adapt_keras
from jdist._src.training.state import model_state_of, params_of
from jdist._src.values.state_sharding import state_leaves

_WIDTH = 120
_MAX_ARRAYS = 4  # in a row


@dataclasses.dataclass(frozen=True)
class LayerSummary:
    """The arrays of a model whose paths differ in the last key only.

    Attributes:
        path: The other keys: `params/dense`. Empty for arrays without a layer.
        arrays: The name, the dtype and the shape of each array: `kernel float32[8,3]`.
        parameters: The number of parameters: numbers that an optimizer updates.
        variables: The number of other numbers, such as batch statistics.
        bytes: The size of one copy of all arrays.

    Example:
        >>> layer = jdist.summary({"dense": {"kernel": jnp.ones((3, 4))}}).layers[0]
        >>> layer.path, layer.arrays, layer.parameters, layer.bytes
        ('dense', ('kernel float32[3,4]',), 12, 48)
    """

    path: str
    arrays: tuple[str, ...]
    parameters: int
    variables: int
    bytes: int


@dataclasses.dataclass(frozen=True, repr=False)
class Summary:
    """The layers of a model. Text when printed, a table in a notebook.

    Attributes:
        layers: The layers, in order.
        max_rows: The maximum number of rows of the table. If there are more layers, layers with the same first keys, or whose
            paths differ in a number, share a row.

    Example:
        >>> jdist.summary({"dense": {"kernel": jnp.ones((3, 4)), "bias": jnp.ones(4)}})
        Summary(1 layer, 16 parameters, 64 B)
    """

    layers: tuple[LayerSummary, ...]
    max_rows: int = 40

    @property
    def parameters(self) -> int:
        """The number of parameters."""
        return sum(layer.parameters for layer in self.layers)

    @property
    def variables(self) -> int:
        """The number of other numbers of the model, such as batch statistics."""
        return sum(layer.variables for layer in self.layers)

    @property
    def bytes(self) -> int:
        """The size of one copy of the model."""
        return sum(layer.bytes for layer in self.layers)

    def __repr__(self) -> str:
        layers = f"{len(self.layers):,} layer{'s' * (len(self.layers) != 1)}"
        return f"Summary({layers}, {self.parameters:,} parameters, {size_text(self.bytes)})"

    def __str__(self) -> str:
        return text_of(self, _WIDTH)

    def __rich__(self) -> Any:
        totals = {
            "layer": "total",
            "arrays": "",
            "parameters": f"{self.parameters:,}",
            "variables": f"{self.variables:,}",
            "bytes": size_text(self.bytes),
        }
        names = [name for name in totals if name != "variables" or self.variables]
        rows: list[list[str]] = []
        for path, layers in grouped(self.layers, self.max_rows):
            arrays = list(dict.fromkeys(array for layer in layers for array in layer.arrays))
            row = {
                "layer": path + (f" ({len(layers):,} layers)" if len(layers) > 1 else ""),
                "arrays": listed(arrays, _MAX_ARRAYS),
                "parameters": f"{sum(layer.parameters for layer in layers):,}",
                "variables": f"{sum(layer.variables for layer in layers):,}",
                "bytes": size_text(sum(layer.bytes for layer in layers)),
            }
            rows.append([row[name] for name in names])
        return rows_table(names, rows, footer=[totals[name] for name in names], num_texts=2)

    def _repr_html_(self) -> str:
        return html_of(self)


def summary(model: PyTree, *, max_rows: int = 40) -> Summary:
    """Returns the layers of a model with their arrays, the number of parameters, and the bytes.

    Args:
        model: Parameters; or variables of linen, a module of nnx or equinox, a Keras model; or a training state, whose `params`
            and `model_state` are summarized. The leaves are arrays or their shapes, such as the result of `jax.eval_shape`. No
            value is read.
        max_rows: The maximum number of rows of the table.

    Returns:
        A `Summary`. Parameters are the floats of `params`; of an nnx module the variables of class `nnx.Param`, of a Keras
        model the trainable ones, and of another tree all floats. A variable that several nnx layers share counts once.

    Raises:
        TypeError: The model contains no array, or `max_rows` is not an integer.
        ValueError: `max_rows` is less than 1, or a Keras model is not built.

    Example:
        >>> params = {
        ...     "dense_0": {"kernel": jnp.ones((3, 4)), "bias": jnp.ones(4)},
        ...     "dense_1": {"kernel": jnp.ones((4, 2))},
        ... }
        >>> print(jdist.summary(params))
        layer     arrays                                 parameters   bytes
        ───────────────────────────────────────────────────────────────────
        dense_0   bias float32[4], kernel float32[3,4]           16    64 B
        dense_1   kernel float32[4,2]                             8    32 B
        <BLANKLINE>
        total                                                    24    96 B
    """
    max_rows = as_int("`max_rows`", max_rows, 1)
    params, variables = _parts(model)
    layers = _layers(params, True), _layers(variables, False)
    if not any(layers):
        raise TypeError(
            f"`model` contains no array: got {one_line(model)}. Pass parameters, such as `trainer.init(inputs).params`, or a "
            "module with parameters."
        )
    return Summary(tuple(layer for part in layers for layer in part), max_rows)


def _parts(model: Any) -> tuple[PyTree, PyTree]:
    """Returns the parameters of a model, and its other variables."""
    if isinstance(model, getattr(sys.modules.get("keras"), "Model", ())):
        return adapt_keras(model).init(jax.random.key(0), None)
    params = () if is_module(model) else params_of(model)
    if isinstance(params, tuple) and not params:
        return model, {}
    is_state = not isinstance(model, Mapping) or "opt_state" in model or "step" in model
    others = model_state_of(model) if is_state else {name: model[name] for name in model if name != "params"}
    return params, others


def _layers(tree: PyTree, has_params: bool) -> list[LayerSummary]:
    tree = to_array_tree(tree)
    nodes = jax.tree.leaves(tree, is_leaf=is_variable)
    param_class = getattr(sys.modules.get("flax.nnx"), "Param", ())
    is_param = [not is_variable(node) or isinstance(node, param_class) for node in nodes for _ in jax.tree.leaves(node)]
    layers: dict[str, LayerSummary] = {}
    for leaf, is_trained in zip(state_leaves(tree), is_param, strict=True):
        if not has_dtype(leaf.value):
            continue
        *prefix, name = "/".join(leaf.path).split("/")  # keys of Keras and haiku are paths
        path, size = "/".join(prefix), math.prod(leaf.shape)
        layer = layers.setdefault(path, LayerSummary(path, (), 0, 0, 0))
        is_parameter = has_params and is_trained and jnp.issubdtype(leaf.value.dtype, jnp.inexact)
        layers[path] = LayerSummary(
            path,
            (*layer.arrays, f"{name} {leaf.value.dtype}[{','.join(map(str, leaf.shape))}]".strip()),
            layer.parameters + size * is_parameter,
            layer.variables + size * (not is_parameter),
            layer.bytes + size * leaf.value.dtype.itemsize,
        )
    return list(layers.values())
