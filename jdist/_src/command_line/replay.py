"""`jdist replay`: runs a recorded program again, with its updates in the recorded order."""

import argparse
import os
import pathlib
import subprocess
import sys

from jdist._src.command_line.verb import Verb
from jdist._src.parameter_server.event_log import REPLAY_VARIABLE, read_log


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("log", type=pathlib.Path, help="the file of `ParameterServerStrategy(record=...)`")


def _replay(arguments: argparse.Namespace) -> int:
    log = arguments.log.absolute()
    try:
        program, events = read_log(log)
    except (OSError, ValueError) as error:
        print(f"jdist replay: {error}", file=sys.stderr)
        return 2
    print(
        f"{sum('apply' in event for event in events)} updates: python {' '.join(program['arguments'])}", file=sys.stderr
    )
    environment = {**os.environ, REPLAY_VARIABLE: str(log)}
    command = [sys.executable, *program["arguments"]]
    return subprocess.run(command, cwd=program["folder"], env=environment, check=False).returncode


REPLAY = Verb(
    "runs a recorded program again, with its updates in the recorded order", "replay run.log", _add_arguments, _replay
)
