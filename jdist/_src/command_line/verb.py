"""One verb of the command line, and the devices that the verbs describe."""

import argparse
import os
from collections.abc import Callable
from typing import NamedTuple

import jax


class Verb(NamedTuple):
    """One verb of the command line.

    Attributes:
        summary: One line for `jdist --help`.
        example: A command, without the program's name.
        add_arguments: Adds the arguments of the verb to its parser.
        run: Runs the verb with the parsed arguments; returns the exit status.
    """

    summary: str
    example: str
    add_arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int]


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
