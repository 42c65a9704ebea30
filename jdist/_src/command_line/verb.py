"""One verb of the command line. This module does not import JAX, because `jdist run` starts without it."""

import argparse
import os
import signal
import sys
from collections.abc import Callable, Sequence
from typing import NamedTuple


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


def run_verb(name: str, verb: Verb, arguments: Sequence[str]) -> int:
    """Runs a verb with its arguments; returns the exit status, which is 2 if the arguments are invalid.

    Args:
        name: The name of the verb.
        verb: The verb.
        arguments: The arguments after the name.
    """
    parser = argparse.ArgumentParser(
        prog=f"jdist {name}",
        description=f"{verb.summary.capitalize()}.",
        epilog=f"Example: jdist {verb.example}",
        allow_abbrev=False,
    )
    verb.add_arguments(parser)
    try:
        parsed = parser.parse_args(arguments)
    except SystemExit as exit:  # argparse has printed the help or the error
        return int(exit.code or 0)
    try:
        status = verb.run(parsed)
        sys.stdout.flush()
    except BrokenPipeError:  # the reader of the output has ended, as in `jdist env | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for the flush at the end of Python
        return 128 + signal.SIGPIPE
    return status
