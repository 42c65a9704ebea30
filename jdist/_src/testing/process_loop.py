"""The loop of a process that `processes` starts: it joins the others, calls functions, and writes their results."""

import faulthandler
import importlib
import json
import operator
import os
import pathlib
import queue
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from typing import Any

import jax

from jdist._src.core.jax_compat import use_loopback_for_cpu_collectives
from jdist._src.launch.child import end_with_parent
from jdist._src.testing import process_values

_HIDDEN_FILES = (__file__, process_values.__file__, importlib.__file__)  # their frames are omitted from tracebacks


def serve(settings: dict[str, Any]) -> None:
    """Calls the functions that the parent process requests, until the parent requests the exit.

    Args:
        settings: `index` and `count` of the processes, the `address` of the coordinator, the seconds (`timeout`) in which all
            join, the `folder` of requests and results, the pipes `requests` and `notices` (file descriptors), and
            `follow_parent`, whether this process ends with the thread that started it.
    """
    requests, notices = settings["requests"], settings["notices"]
    for pipe in (requests, notices):
        os.set_inheritable(pipe, False)  # a process that the user's function starts would hold it open
    if settings["follow_parent"]:
        end_with_parent()
    faulthandler.register(signal.SIGUSR1, all_threads=False)  # prints the stack of the main thread, after a timeout
    sys.argv = [""]  # functions that parse arguments must not read the settings
    calls: queue.SimpleQueue[int | None] = queue.SimpleQueue()
    threading.Thread(target=_read_requests, args=(requests, calls), daemon=True).start()
    folder, index = pathlib.Path(settings["folder"]), settings["index"]
    _serve_one(lambda: _join(settings), 0, folder, index, notices)
    while (call := calls.get()) is not None:
        _serve_one(lambda call=call: _call_function(folder / f"{call}.json"), call, folder, index, notices)
    if settings["count"] > 1:
        jax.distributed.shutdown()


def _join(settings: dict[str, Any]) -> None:
    use_loopback_for_cpu_collectives()
    address, count = settings["address"], settings["count"]
    if count > 1:
        timeout = max(1, round(settings["timeout"]))
        jax.distributed.initialize(
            address, count, settings["index"], initialization_timeout=timeout, coordinator_bind_address=address
        )
        jax.devices()  # a module that the user's function imports must not change the number of devices


def _call_function(request: pathlib.Path) -> Any:
    function, arguments = json.loads(request.read_text())
    module, _, name = function.partition(":")
    return operator.attrgetter(name)(importlib.import_module(module))(*arguments)


def _serve_one(function: Callable[[], Any], call: int, folder: pathlib.Path, index: int, notices: int) -> None:
    """Writes the result of `function`, or its traceback, and then the number of the call to the pipe."""
    try:
        process_values.save_value(folder / f"{call}.{index}.npz", function())
    except BaseException as error:  # SystemExit too: the process continues with the next call
        frames = error.__traceback__
        while frames is not None and frames.tb_frame.f_code.co_filename in _HIDDEN_FILES:
            frames = frames.tb_next
        text = "".join(traceback.format_exception(type(error), error, frames))
        (folder / f"{call}.{index}.error").write_text(text)
    sys.stdout.flush()
    os.write(notices, f"{call}\n".encode())


def _read_requests(pipe: int, calls: queue.SimpleQueue[int | None]) -> None:
    """Puts the numbers from the pipe into `calls`, and None for "exit". Its end is the end of the parent: ends this process."""
    with os.fdopen(pipe) as lines:
        for line in lines:
            calls.put(None if line == "exit\n" else int(line))
    os.kill(os.getpid(), signal.SIGKILL)
