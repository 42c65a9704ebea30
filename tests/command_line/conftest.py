"""Fixtures that start `jdist run`."""

import pytest

from launchers import starter


@pytest.fixture
def started(tmp_path):
    """Returns a function that starts `jdist run OPTIONS train.py` with the lines of the program."""
    with starter(tmp_path) as start:
        yield start


@pytest.fixture
def run(started):
    """Returns a function that does the same and returns the exit status, the output and the errors."""

    def run(options, program, *arguments, **settings):
        launcher = started(options, program, *arguments, **settings)
        output, errors = launcher.communicate(timeout=60)
        return launcher.returncode, output, errors

    return run
