"""The command line: `jdist VERB`, and the table of its verbs."""

import argparse
import difflib
import sys
from collections.abc import Sequence

from jdist._src.command_line.check import CHECK
from jdist._src.command_line.devices import DEVICES
from jdist._src.command_line.doctor import DOCTOR
from jdist._src.command_line.env import ENV
from jdist._src.command_line.plan import PLAN
from jdist._src.command_line.replay import REPLAY
from jdist._src.command_line.run import RUN
from jdist._src.command_line.verb import run_verb
from jdist._src.core.version import __version__

VERBS = {"check": CHECK, "devices": DEVICES, "doctor": DOCTOR, "env": ENV, "plan": PLAN, "replay": REPLAY, "run": RUN}


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command, and returns its exit status: 0, or 1 if it failed, or 2 if the command is invalid.

    Args:
        arguments: The arguments of `jdist`; by default `sys.argv[1:]`.

    Example:
        >>> main(["devices"])  # doctest: +ELLIPSIS
        device  kind  process...
        0
    """
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    if arguments and arguments[0] in VERBS:
        return run_verb(arguments[0], VERBS[arguments[0]], arguments[1:])
    if arguments and not arguments[0].startswith("-"):
        nearest = [name for name in VERBS if arguments[0].startswith(name) or name.startswith(arguments[0])]
        nearest = nearest or difflib.get_close_matches(arguments[0], VERBS, n=1)
        advice = f"Did you mean `jdist {nearest[0]}`?" if nearest else f"The commands are {', '.join(VERBS)}."
        if arguments[0].endswith(".py") or arguments[0] in ("launch", "start", "torchrun"):
            program = arguments[0] if arguments[0].endswith(".py") else "train.py"
            advice = f"Write `jdist run -n 2 {program}`."
        print(f"jdist: there is no command {arguments[0]!r}. {advice}", file=sys.stderr)
        return 2
    parser = _parser()
    try:
        parser.parse_args(arguments)
    except SystemExit as exit:  # argparse has printed the help, the version or the error
        return int(exit.code or 0)
    parser.print_help(sys.stderr)
    return 2


def _parser() -> argparse.ArgumentParser:
    width = max(map(len, VERBS))
    verbs = [
        f"  {name:{width}}  {verb.summary}\n  {'':{width}}  example: jdist {verb.example}"
        for name, verb in VERBS.items()
    ]
    parser = argparse.ArgumentParser(
        prog="jdist",
        usage="jdist [--help] [--version] COMMAND ...",
        description="Distribution strategies for JAX. Commands:\n\n" + "\n".join(verbs),
        epilog="`jdist COMMAND --help` shows the arguments of a command. `python -m jdist` is the same program.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"jdist {__version__}")
    return parser
