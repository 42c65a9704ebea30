"""Runs the examples as a user does."""

import json
import os
import pathlib
import subprocess
import sys

EXAMPLES = pathlib.Path(__file__).parent.parent.parent / "examples"

# JAX, whose import takes most of the time, is imported once; each call runs in a fork in which no backend has started.
_RUN_CALLS = """
import contextlib, io, json, os, runpy, sys
import jax, jdist
example, calls = sys.argv[1], json.loads(sys.argv[2])
for arguments in calls:
    if os.fork():
        os.wait()
        continue
    sys.argv, errors = [example, *arguments], io.StringIO()
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(errors):
            runpy.run_path(example, run_name="__main__")
        status = 0
    except SystemExit as exit:
        status = exit.code
    except Exception as error:
        status = f"{type(error).__name__}: {error}"
    print(json.dumps([status, errors.getvalue()]), flush=True)
    os._exit(0)
"""


def run(*command, folder=None, xla_flags=None):
    """Runs `python COMMAND` with the devices that the example configures, not the devices of the tests.

    Without `xla_flags`, XLA compiles quickly, as in the tests, and long training is slow.
    """
    environment = {name: value for name, value in os.environ.items() if name != "JAX_NUM_CPU_DEVICES"}
    if xla_flags is not None:
        environment["XLA_FLAGS"] = xla_flags
    environment["COLUMNS"] = "200"  # so that lines are not wrapped
    environment["PYTHONPATH"] = os.pathsep.join([str(EXAMPLES), *filter(None, [environment.get("PYTHONPATH")])])
    command = [sys.executable, *map(str, command)]
    done = subprocess.run(command, env=environment, cwd=folder, text=True, capture_output=True, timeout=280)
    assert "NotEquivalentWarning" not in done.stderr, done.stderr
    return done


def assert_invalid_arguments(example, wrong):
    """Checks the errors of an example for each key of `wrong` as its arguments.

    A value is the message of argparse, which exits with status 2, or the beginning of an error that jdist raises.
    """
    done = run("-c", _RUN_CALLS, EXAMPLES / example, json.dumps([arguments.split() for arguments in wrong]))
    assert done.returncode == 0, done.stderr
    results = [json.loads(line) for line in done.stdout.splitlines()]
    for (arguments, message), (status, errors) in zip(wrong.items(), results, strict=True):
        assert (status == 2 and message in errors) or str(status).startswith(message), (arguments, status, errors)
