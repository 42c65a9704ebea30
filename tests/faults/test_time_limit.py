"""Work that does not end: it is named, and ends the process with status 43. A real process."""

import os
import subprocess
import sys

import pytest

from jdist._src.core.exit_statuses import HUNG
from jdist._src.faults.time_limit import time_limit

# The percent sign in the line of the caller is a part of the messages.
PROGRAM = """
import time
from jdist._src.faults.time_limit import time_limit
with time_limit("waits for the devices"[:121 % 100]):
    time.sleep(600)
"""


def test_work_is_named_and_ends_the_process_at_its_limit(tmp_path):
    (tmp_path / "train.py").write_text(PROGRAM)
    variables = {"JDIST_WARNING_SECONDS": "0.2", "JDIST_TIMEOUT_SECONDS": "0.5"}
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(os.path.abspath, sys.path)), **variables}
    done = subprocess.run([sys.executable, "train.py"], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == HUNG, done.stderr
    first, second, last = [line for line in done.stderr.splitlines() if "waits for the devices" in line]
    place = '(`with time_limit("waits for the devices"[:121 % 100]):` at train.py:4)'
    assert first == second == f"This process waits for the devices {place}, for 0 seconds."
    assert last == f"jdist: This process waits for the devices {place}, for 0 seconds. It ends with exit status 43."
    assert 'File "' in done.stderr and "train.py" in done.stderr.partition(last)[2]


def test_work_that_ends_is_not_named(caplog):
    with time_limit("works"):
        pass
    assert caplog.text == ""


def test_variable_that_is_not_a_number_is_an_error(monkeypatch):
    monkeypatch.setenv("JDIST_TIMEOUT_SECONDS", "soon")
    message = "The environment variable JDIST_TIMEOUT_SECONDS must be a number of seconds, got 'soon'"
    with pytest.raises(ValueError, match=message), time_limit("works"):
        pass
