"""Weights as safetensors files: `save` writes a pytree, `load` reads it."""

from jdist._src.export.safetensors import load as load
from jdist._src.export.safetensors import save as save
