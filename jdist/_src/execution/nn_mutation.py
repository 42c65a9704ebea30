"""Changes of modules in place by a replica function: those that it does not return, and attributes that a state must keep.

A replica function receives copies of the modules that the program was called with. A change in place reaches the caller only
through the results of the function.
"""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import jax

from jdist._src.core.nn_modules import contains_modules, is_nnx_module, is_variable
from jdist._src.core.tree import PyTree, named_leaves, one_line

_MOST_NAMED = 4


class VariableBefore(NamedTuple):
    """An nnx variable in the arguments of a replica function.

    Attributes:
        name: Its name: the argument and the path.
        variable: The variable.
        value: Its value before the function is called.
    """

    name: str
    variable: Any
    value: Any


def variables_before(arguments: Iterable[tuple[str, PyTree]]) -> list[VariableBefore]:
    """Returns the nnx variables in named arguments, with their values."""
    return [
        VariableBefore(name + jax.tree_util.keystr(path), node, node.get_raw_value())
        for name, value in arguments
        if contains_modules(value)
        for path, node in jax.tree_util.tree_leaves_with_path(value, is_leaf=is_variable)
        if is_variable(node)
    ]


def check_returned(before: Sequence[VariableBefore], results: PyTree) -> None:
    """Raises ValueError if the function changed variables of its arguments in place and does not return them."""
    changed = [x for x in before if x.variable.get_raw_value() is not x.value]
    if not changed:
        return
    returned = {id(node) for is_leaf in (is_variable, None) for node in jax.tree.leaves(results, is_leaf=is_leaf)}
    lost = [x for x in changed if not returned & {id(x.variable), id(x.variable.get_raw_value())}]
    if lost:
        raise ValueError(
            f"The function changes {_listed(lost)} in place, and does not return it, so the change would be lost. Return the "
            "module, in a step as part of the state. If the change is not wanted: `model.eval()`, or "
            "`nnx.view(model, deterministic=True, use_running_average=True)`, computes without dropout and without new "
            "statistics, and `model = nnx.clone(model)` in the function changes a copy."
        )


def check_state_returned(before: Sequence[VariableBefore], state: PyTree) -> None:
    """Raises ValueError if a step changed variables of its state in place, and returned a state with the values from before."""
    changed = [x for x in before if x.variable.get_raw_value() is not x.value]
    if not changed:
        return
    returned = dict(named_leaves("state", state))
    lost = [x for x in changed if returned.get(x.name) is x.value]
    if lost:
        raise ValueError(
            f"The step changes {_listed(lost)} in place, and returns a state with the value from before, so the change would "
            "be lost. Return the module that the step changes, or make the new module from all of its variables."
        )


def changed_attribute(name: str, old: PyTree, new: PyTree) -> str | None:
    """Returns the first attribute of an nnx module that differs between two trees, with both values; None if none differs."""
    if type(old) is not type(new) or not contains_modules(old):
        return None
    children, new_children = (
        jax.tree_util.tree_leaves_with_path(node, is_leaf=lambda x, node=node: x is not node) for node in (old, new)
    )
    if is_nnx_module(old):
        arrays = {jax.tree_util.keystr(path[:1], simple=True) for path, _ in [*children, *new_children]}
        for key in sorted(vars(old).keys() | vars(new).keys()):
            before, after = vars(old).get(key), vars(new).get(key)
            if key not in arrays and not key.startswith("_") and before is not after and before != after:
                return f"{name}.{key} from {one_line(before)} to {one_line(after)}"
    for (path, child), (new_path, new_child) in zip(children, new_children, strict=False):
        if path != new_path:
            return None
        if change := changed_attribute(name + jax.tree_util.keystr(path), child, new_child):
            return change
    return None


def _listed(variables: Sequence[VariableBefore]) -> str:
    more = ", ..." if len(variables) > _MOST_NAMED else ""
    return ", ".join(x.name for x in variables[:_MOST_NAMED]) + more
