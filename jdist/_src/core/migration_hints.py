"""The line to write in place of a name of tf.distribute, JAX, torch, Accelerate, Horovod or Keras that jdist does not have.

The names are in `migration_hints.toml`, which is read when the first name is missing. `docs/from_tf_distribute.md` is the guide
for moving a program from TensorFlow, `docs/coming_from.md` for the others.
"""

import functools
import pathlib
import sys
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")


@functools.cache
def migration_hints() -> dict[str, Any]:
    """Returns the contents of `migration_hints.toml`, which describes its structure."""
    import tomllib

    return tomllib.loads(pathlib.Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))


def attribute_hint(owner: str, name: str) -> str:
    """Returns the sentence about a name of another library; an empty string if there is none.

    Args:
        owner: The object or module without this attribute, as the file names it.
        name: The attribute.
    """
    for table in [] if name.startswith("_") else migration_hints()["attributes"][owner]:
        if name in table["hints"]:
            return table["sentence"].format(name=name, hint=table["hints"][name])
    return ""


def missing_attribute_error(module: str, name: str) -> AttributeError:
    """Returns the error for a name that the public module of this name does not have. See `attribute_hint`."""
    text = f"module {module!r} has no attribute {name!r}"
    if hint := attribute_hint(module, name):
        return AttributeError(f"{text}. {hint}")
    return AttributeError(text, name=name, obj=sys.modules[module])  # Python looks for similar names in the module


def explains_attributes(owner: str) -> Callable[[type[T]], type[T]]:
    """Returns a decorator of a class whose objects answer names of other libraries with the line to write."""

    def missing(self: Any, name: str) -> Any:
        if hint := attribute_hint(owner, name):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}. {hint}")
        return object.__getattribute__(self, name)  # raises the error again, also one of a property

    def decorate(cls: type[T]) -> type[T]:
        # Not in the body of the class: a type checker would then accept every name.
        cls.__getattr__ = missing  # pyright: ignore[reportAttributeAccessIssue]
        return cls

    return decorate
