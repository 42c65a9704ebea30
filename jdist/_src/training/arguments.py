"""Checks of the arguments of a `Trainer` and its methods, whose errors contain the line to write.

`check_same_arguments` compares them between the processes, before the first of them waits for another. Arguments that differ
would otherwise end in a wait: a process that takes one more step, or saves a checkpoint that the others do not save, waits for
them.
"""

import inspect
import operator
from collections.abc import Mapping, Sequence
from typing import Any

from jdist._src.core.tree import ReprText, one_line
from jdist._src.strategies.base import Strategy
from jdist._src.training.events import Callback
from jdist._src.values.process_calls import digests_of, exchange_call, find_difference, processes_of, processes_text

_SCALARS = (bool, int, float, str, type(None))


def require_arguments(method: str, **arguments: Any) -> None:
    """Raises TypeError if an argument of the trainer that `method` needs is None."""
    missing = [name for name, value in arguments.items() if value is None]
    if missing:
        raise TypeError(
            f"`{method}` needs the argument `{'`, `'.join(missing)}` of the trainer: `jdist.Trainer(model, optimizer, loss)`, "
            "such as `jdist.Trainer(model, optax.adamw(1e-3), optax.softmax_cross_entropy_with_integer_labels)`."
        )


def check_alternatives(optimizer: Any, loss: Any, objective: Any, step: Any) -> None:
    """Raises TypeError if arguments of the trainer exclude each other, or `step` is not a function."""
    if loss is not None and objective is not None:
        raise TypeError("Pass either `loss` or `objective`: an objective computes the losses itself.")
    if step is not None and optimizer is not None:
        raise TypeError("Pass either `optimizer` or `step`: a step updates the parameters itself.")
    if step is None:
        return
    expected = "`step` must be a function `fn(state, batch)` or `fn(state, batch, weights)`"
    if not callable(step):
        raise TypeError(f"{expected}, got {one_line(step)}.")
    signature = inspect.signature(step)
    try:
        signature.bind(*range(2 + (len(signature.parameters) > 2)))
    except TypeError as error:
        raise TypeError(f"{expected}, got one with the parameters {signature}: {error}.") from None


def check_eval_params(eval_params: Any) -> None:
    """Raises TypeError if `eval_params` is neither a function of two arguments nor None."""
    if eval_params is None:
        return
    got = one_line(eval_params)
    if callable(eval_params):
        try:
            inspect.signature(eval_params).bind(None, None)
            return
        except TypeError as error:
            got = f"a function with the parameters {inspect.signature(eval_params)}: {error}"
    raise TypeError(
        "`eval_params` must be a function `fn(opt_state, params)` that returns parameters, such as "
        f"`optax.contrib.schedule_free_eval_params`, got {got}."
    )


def check_same_arguments(call: str, strategy: Strategy, arguments: Mapping[str, Any]) -> None:
    """Raises ValueError, on all processes of a strategy, if the arguments of a call differ between them.

    Args:
        call: The name of the method.
        strategy: The strategy.
        arguments: The arguments by name. Of an object, only its presence is compared; of callbacks, those that all processes
            must have.

    Raises:
        ValueError: An argument differs, or the processes make different calls.
        RuntimeError: A process has ended.
    """
    processes = processes_of(strategy.mesh)
    if len(processes) == 1:
        return
    facts = {name: _lines(value) for name, value in arguments.items()}
    reason = f"the start of `{call}`"
    messages = exchange_call(reason, {"digests": digests_of(facts)}, processes)
    difference = find_difference(reason, facts, messages, processes)
    if difference is None:
        return
    other = difference.first if difference.local != difference.first else difference.others[0]
    all_others = (
        f" ({processes_text(difference.others)} differ from process {difference.first})" if len(processes) > 2 else ""
    )
    raise ValueError(
        f"`{call}` was called with different values of `{difference.subject}`: {_text(difference.value)} on process "
        f"{difference.local}, and {_text(difference.other_value)} on process {other}{all_others}. Pass the same arguments on "
        f"every process.{_CALLBACKS_ADVICE if difference.subject == 'callbacks' else ''}"
    )


_CALLBACKS_ADVICE = (
    " Callbacks that save, average or restore the state must be on all processes; logs may be on one only."
)


def _lines(value: Any) -> list[str]:
    """Returns the texts that the processes compare: the value of a number or a string, the presence of another object."""
    if isinstance(value, _SCALARS):
        return [repr(value)]
    try:
        return [repr(operator.index(value))]
    except TypeError:
        pass
    if isinstance(value, Mapping):
        return sorted(f"a value for {key!r}" for key in value if isinstance(key, str)) or ["a mapping"]
    if isinstance(value, list):
        return [repr(item) for item in value]
    return ["a value"]


def collective_callbacks(callbacks: Any) -> list[ReprText]:
    """Returns the callbacks of `fit` that all processes must have, each with its options that are numbers or text."""
    texts: list[ReprText] = []
    for callback in callbacks if isinstance(callbacks, Sequence) and not isinstance(callbacks, str) else ():
        if not isinstance(callback, Callback) or not (callback.is_collective or callback.checkpointer is not None):
            continue
        public = {name: x for name, x in vars(callback).items() if not name.startswith("_") and name != "identity"}
        options = {name: value for name, value in public.items() if isinstance(value, _SCALARS)}
        if callback.checkpointer is not None:
            options["every"] = callback.checkpointer.every
        arguments = ", ".join(f"{name}={value!r}" for name, value in options.items())
        texts.append(ReprText(f"{type(callback).__name__}({arguments})"))
    return texts


def _text(lines: Sequence[str]) -> str:
    return ", ".join(lines) or "none"
