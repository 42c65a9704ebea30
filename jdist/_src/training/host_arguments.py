"""Compares the arguments of `fit`, `evaluate` and `predict` between the processes, before the first of them waits for another.

Arguments that differ would otherwise end in a wait: a process that takes one more step, or saves a checkpoint that the others
do not save, waits for them.
"""

import operator
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from jdist._src.strategies.base import Strategy
from jdist._src.training.events import Callback
from jdist._src.values.process_calls import digests_of, exchange_call, find_difference, listed, processes_of

_SCALARS = (bool, int, float, str, type(None))


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
    all_others = f" ({listed(difference.others)} differ from process {difference.first})" if len(processes) > 2 else ""
    raise ValueError(
        f"`{call}` was called with different values of `{difference.subject}`: {_text(difference.value)} on process "
        f"{difference.local}, and {_text(difference.other_value)} on process {other}{all_others}. Pass the same arguments on "
        f"every process.{_ADVICE if difference.subject == 'callbacks' else ''}"
    )


_ADVICE = " Callbacks that save, average or restore the state must be on all processes; logs may be on one only."


def _lines(value: Any) -> list[str]:
    if isinstance(value, _SCALARS):
        return [repr(value)]
    try:
        return [repr(operator.index(value))]
    except TypeError:
        pass
    if isinstance(value, Mapping):
        return sorted(f"a value for {key!r}" for key in value if isinstance(key, str)) or ["a mapping"]
    if isinstance(value, Callbacks):
        return [_describe(callback) for callback in value]
    if isinstance(value, list):
        return [repr(item) for item in value]
    return ["a value"]


class Callbacks(list[Callback]):
    """The callbacks of `fit` that all processes must have."""

    def __init__(self, callbacks: Any):
        are_listed = isinstance(callbacks, Sequence) and not isinstance(callbacks, str)
        candidates: Iterable[Any] = callbacks if are_listed else ()
        super().__init__(
            c for c in candidates if isinstance(c, Callback) and (c.is_collective or c.checkpointer is not None)
        )


def _describe(callback: Callback) -> str:
    """Returns the class of a callback, and its options that are numbers or text."""
    options = {
        k: v for k, v in vars(callback).items() if not k.startswith("_") and k != "identity" and isinstance(v, _SCALARS)
    }
    if callback.checkpointer is not None:
        options["every"] = callback.checkpointer.every
    return f"{type(callback).__name__}({', '.join(f'{name}={value!r}' for name, value in options.items())})"


def _text(lines: Sequence[str]) -> str:
    return ", ".join(lines) or "none"
