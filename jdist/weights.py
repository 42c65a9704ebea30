"""Weights as safetensors files: `save` writes a pytree, `load` reads it."""

from jdist._src.core.public_names import set_public_module as _set_public_module
from jdist._src.export.weights import load as load
from jdist._src.export.weights import save as save

_set_public_module(globals(), __name__)


def __dir__() -> list[str]:
    return sorted(name for name in globals() if not name.startswith("_"))
