"""The devices that the verbs describe."""

import os

import jax

_PREALLOCATE = "XLA_PYTHON_CLIENT_PREALLOCATE"


def start_devices() -> list[jax.Device]:
    """Returns the devices of all processes. Starts JAX, on GPUs without reserving memory that other programs use.

    Raises:
        RuntimeError: JAX cannot use the devices.
    """
    before = os.environ.get(_PREALLOCATE)
    os.environ.setdefault(_PREALLOCATE, "false")
    try:
        return jax.devices()
    finally:
        if before is None:
            del os.environ[_PREALLOCATE]
