"""Weights as safetensors files: `save` writes a pytree, `load` reads it."""

from jdist._src.export.weights import load as load
from jdist._src.export.weights import save as save


def __dir__() -> list[str]:
    return sorted(name for name in globals() if not name.startswith("_"))
