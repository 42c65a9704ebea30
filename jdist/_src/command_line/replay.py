"""`jdist replay`: runs a recorded program again, with its updates in the recorded order, and compares the states."""

import argparse
import json
import os
import pathlib
import subprocess
import sys
import tempfile

from jdist._src.command_line.verb import Verb
from jdist._src.parameter_server.event_log import REPLAY_VARIABLE, VERDICT_VARIABLE, ReplayVerdict, read_log


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    text = "the file of `ParameterServerStrategy(record=...)`; the command that it contains is run"
    parser.add_argument("log", type=pathlib.Path, help=text)


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
    command = [sys.executable, *program["arguments"]]
    with tempfile.TemporaryDirectory() as folder:
        verdict_file = pathlib.Path(folder, "verdict.json")
        environment = {**os.environ, REPLAY_VARIABLE: str(log), VERDICT_VARIABLE: str(verdict_file)}
        status = subprocess.run(command, cwd=program["folder"], env=environment, check=False).returncode
        verdict = ReplayVerdict(*json.loads(verdict_file.read_text())) if verdict_file.exists() else None
    result = verdict or "the program did not replay this file: it ended before its first step, or records another file."
    print(f"jdist replay: {result}", file=sys.stderr)
    return status or (0 if verdict and verdict.is_equal else 1)


REPLAY = Verb(
    "run a recorded program again, with its updates in the recorded order, and compare the states",
    "replay run.log",
    _add_arguments,
    _replay,
)
