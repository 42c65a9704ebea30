"""Examples, run as a user runs them."""

import json
import os
import pathlib
import subprocess
import sys

EXAMPLES = pathlib.Path(__file__).parent.parent / "examples"

# JAX, which takes most of the time, is imported once; each call has a process in which it has not begun.
_EACH = """
import contextlib, io, json, os, runpy, sys
import jax, jdist
example, calls = sys.argv[1], json.loads(sys.argv[2])
for arguments in calls:
    if os.fork():
        os.wait()
        continue
    sys.argv, said = [example, *arguments], io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            runpy.run_path(example, run_name="__main__")
    except SystemExit as end:
        print(json.dumps([end.code, said.getvalue()]), flush=True)
    finally:
        os._exit(0)
"""


def run(*command, folder=None):
    """What comes of `python COMMAND`, with the devices that an example asks for, not those that the tests force."""
    environment = {name: value for name, value in os.environ.items() if name != "JAX_NUM_CPU_DEVICES"}
    environment["COLUMNS"] = "200"  # no line is broken
    environment["PYTHONPATH"] = os.pathsep.join([str(EXAMPLES), *filter(None, [environment.get("PYTHONPATH")])])
    command = [sys.executable, *map(str, command)]
    return subprocess.run(command, env=environment, cwd=folder, text=True, capture_output=True, timeout=280)


def assert_refused(example, wrong):
    """Each of these arguments ends the example, with 2 and such words."""
    done = run("-c", _EACH, EXAMPLES / example, json.dumps([arguments.split() for arguments in wrong]))
    assert done.returncode == 0, done.stderr
    ends = [json.loads(line) for line in done.stdout.splitlines()]
    for (arguments, says), (code, said) in zip(wrong.items(), ends, strict=True):
        assert code == 2 and says in said, arguments
