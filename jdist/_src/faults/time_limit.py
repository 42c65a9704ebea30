"""A time limit for work of this process that may never end, such as the start of its devices, and the variables of limits."""

import contextlib
import faulthandler
import logging
import math
import os
import threading
from collections.abc import Iterator

from jdist._src.core.arguments import check_seconds
from jdist._src.core.background_threads import start_thread
from jdist._src.core.exit_statuses import HUNG
from jdist._src.core.source_lines import caller_text

_LOG = logging.getLogger("jdist")
TIME_LIMIT = 600.0  # seconds; the variable JDIST_TIMEOUT_SECONDS
WORK_LIMIT = 3600.0  # seconds of one piece of work, such as a compilation; the variable JDIST_WORK_SECONDS
WARNING_INTERVAL = 30.0  # seconds; the variable JDIST_WARNING_SECONDS
STDERR = 2  # the file descriptor of standard error


def seconds_of(variable: str, default: float) -> float:
    """Returns the seconds in an environment variable.

    Raises:
        ValueError: It is not a positive number.
    """
    text = os.environ.get(variable)
    if text is None:
        return default
    try:
        seconds = float(text)
    except ValueError:
        raise ValueError(f"The environment variable {variable} must be a number of seconds, got {text!r}.") from None
    if not math.isinf(seconds):
        check_seconds(variable, seconds)
    return seconds


@contextlib.contextmanager
def time_limit(text: str) -> Iterator[None]:
    """Logs a warning every 30 seconds while the block runs, and ends the process with status `HUNG` after 600 seconds.

    The variables `JDIST_WARNING_SECONDS` and `JDIST_TIMEOUT_SECONDS` change both. The report has the stacks of all threads.

    Args:
        text: The phrase that describes the work, `"waits for the start of the devices"`.

    Raises:
        ValueError: A variable is not a positive number.
    """
    interval, limit = (
        seconds_of("JDIST_WARNING_SECONDS", WARNING_INTERVAL),
        seconds_of("JDIST_TIMEOUT_SECONDS", TIME_LIMIT),
    )
    subject = f"This process {text}{caller_text()}"
    has_ended = threading.Event()

    def watch() -> None:
        waited = 0.0
        while not has_ended.wait(step := min(interval, limit - waited)):
            waited += step
            if waited < limit:
                _LOG.warning("%s, for %.0f seconds.", subject, waited)
                continue
            report = f"jdist: {subject}, for {waited:.0f} seconds. It ends with exit status {HUNG}.\n"
            os.write(STDERR, report.encode())
            faulthandler.dump_traceback(STDERR)
            os._exit(HUNG)

    start_thread(watch, (), name="jdist time limit", stop=has_ended.set)
    try:
        yield
    finally:
        has_ended.set()
