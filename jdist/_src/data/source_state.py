"""The position that a source reports, as data that can be stored as JSON.

Iterators, such as grain's, report it by `get_state` and `set_state`; loaders, such as torchdata's, by `state_dict` and
`load_state_dict`.
"""

import base64
import copy
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from jdist._src.core.tree import one_line


def get_state(iterator: Iterator[Any]) -> Any:
    """Returns the position of an iterator as JSON-able data, or None if it does not report one."""
    if not (hasattr(iterator, "get_state") and hasattr(iterator, "set_state")):
        return None
    state = iterator.get_state()  # pyright: ignore[reportAttributeAccessIssue]
    if isinstance(state, bytes):
        return {"base64": base64.b64encode(state).decode()}
    return {"value": copy.deepcopy(state)}  # the source may modify the state later


def check_state(state: Any) -> None:
    """Raises ValueError if `state` is not the position of a source, as `get_state` returns it."""
    is_position = isinstance(state, Mapping) and ("base64" in state or "value" in state)
    if state is not None and not is_position:
        raise ValueError(
            f"The position has source={one_line(state)}, which is not the position of a source. Pass it unchanged."
        )


def set_state(iterator: Iterator[Any], state: Any) -> None:
    """Moves an iterator to a position from `get_state`.

    Raises:
        ValueError: The iterator does not support positions.
    """
    if not hasattr(iterator, "set_state"):
        raise ValueError(
            f"The position contains a position of the source, and this source ({type(iterator).__name__}) has no `set_state`. "
            "Resume with the source that the position was taken with."
        )
    value = base64.b64decode(state["base64"]) if "base64" in state else copy.deepcopy(state["value"])
    iterator.set_state(value)  # pyright: ignore[reportAttributeAccessIssue]


def close_iterator(iterator: Any) -> None:
    """Closes an iterator if it can be closed."""
    if hasattr(iterator, "close"):
        iterator.close()


def encode_state(name: str, value: Any) -> Any:
    """Returns `value` as JSON-able data: `[kind, content]` for everything that JSON does not store exactly.

    Raises:
        TypeError: A part of it is neither a number, text, bytes, an array, nor a container of these.
    """
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, (list, tuple)):
        return [type(value).__name__, [encode_state(f"{name}[{i}]", part) for i, part in enumerate(value)]]
    if isinstance(value, Mapping):
        return [
            "dict",
            [[encode_state(f"{name}, keys", k), encode_state(f"{name}[{k!r}]", v)] for k, v in value.items()],
        ]
    if isinstance(value, bytes):
        return ["bytes", base64.b64encode(value).decode()]
    is_tensor = type(value).__module__.partition(".")[0] == "torch" and hasattr(value, "numpy")
    if is_tensor or isinstance(value, (np.ndarray, np.generic)):
        array = np.asarray(value)
        if array.dtype != object:
            data = base64.b64encode(np.ascontiguousarray(array).tobytes()).decode()
            return ["tensor" if is_tensor else "array", [array.dtype.str, list(array.shape), data]]
    raise TypeError(
        f"{name} of the source is {type(value).__name__}, which cannot be stored in a position. A position consists of "
        "numbers, text, bytes, arrays, and lists and dicts of these."
    )


def decode_state(value: Any) -> Any:
    """Returns the value that `encode_state` encoded."""
    if not isinstance(value, (list, tuple)):
        return value
    kind, content = value
    if kind in ("list", "tuple"):
        parts = [decode_state(part) for part in content]
        return parts if kind == "list" else tuple(parts)
    if kind == "dict":
        return {decode_state(key): decode_state(part) for key, part in content}
    if kind == "bytes":
        return base64.b64decode(content)
    dtype, shape, data = content
    array = np.frombuffer(base64.b64decode(data), np.dtype(dtype)).reshape(shape).copy()
    return sys.modules["torch"].from_numpy(array) if kind == "tensor" else array
