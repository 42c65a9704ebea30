"""Public names of classes and functions: `help`, tracebacks and pickles show the public module, not the private one."""

from collections.abc import Mapping
from typing import Any


def set_public_module(namespace: Mapping[str, Any], module: str) -> None:
    """Sets `__module__` of the classes and functions of this package in the namespace of a public module."""
    for name, value in namespace.items():
        private = getattr(value, "__module__", None)
        is_public = not name.startswith("_") and isinstance(private, str) and private.startswith("jdist._src.")
        if is_public and getattr(value, "__qualname__", None) == name:
            value.__module__ = module
