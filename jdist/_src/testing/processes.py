"""Processes on this machine that join each other, for tests of programs on several hosts."""

import contextlib
import dataclasses
import json
import multiprocessing.connection
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any, Literal

from jdist._src.core.arguments import as_int, check_seconds
from jdist._src.launch.child_processes import end_child, reserved_address, start_child
from jdist._src.testing.process_values import load_value
from jdist._src.values.process_calls import processes_text

_POLL_SECONDS = 0.1
_AFTER_ERROR_SECONDS = 10.0  # in which the other processes may return, after one raised an error
_EXIT_SECONDS = 60.0
_OUTPUT_CHARACTERS = 5000  # of each process in an error message
# The child has the import path of this process, also where pytest extended it, before it imports jdist.
_CHILD_PROGRAM = """
import json, sys
settings = json.loads(sys.argv[1])
sys.path[:] = settings["path"]
from jdist._src.testing.process_loop import serve
serve(settings)
"""


@contextlib.contextmanager
def processes(count: int, *, devices_per_process: int = 1, timeout: float = 120.0) -> "Iterator[Processes]":
    """Starts processes that join each other with `jax.distributed`, and ends them when the block is left.

    Each process is a fresh Python interpreter with `devices_per_process` CPU devices, as one host of a cluster:
    `jax.process_index()` is 0 to `count - 1`, `jax.local_devices()` are the devices of the process, and `jax.devices()` the
    devices of all processes. They communicate over the loopback interface. A process inherits the environment variables and
    the import path (`sys.path`) of the test. It does not inherit imported modules, `jax.config` settings or devices. A
    single process does not call `jax.distributed.initialize`.

    Starting takes some seconds, so share the processes between the tests of a module with a fixture::

        @pytest.fixture(scope="module")
        def pair():
            with jdist.testing.processes(2, devices_per_process=2) as pair:
                yield pair

        def test_sum_over_two_hosts(pair):
            assert pair.run("steps:total", 3) == [12, 12]  # the function `total` of tests/steps.py

    At the end of the block, the processes shut down. A process that has not ended after 60 seconds is killed, and this is an
    error. If the block ends with an exception, or a call failed, the processes are killed immediately. They also end if the
    test itself is killed, on Linux even those that are stopped.

    Args:
        count: The number of processes.
        devices_per_process: The number of CPU devices of each process.
        timeout: The seconds in which the processes must join, and in which each call must return.

    Yields:
        The processes.

    Raises:
        TimeoutError: The processes did not join or did not exit in time.
        RuntimeError: A process ended; the message contains its output.

    Example:
        >>> with processes(2, devices_per_process=2) as pair:
        ...     print(pair.run("jax:device_count"), pair.run("jax.numpy:arange", 1, 3))
        [4, 4] [array([1, 2], dtype=int32), array([1, 2], dtype=int32)]
    """
    count = as_int("`count`", count, minimum=1)
    devices = as_int("`devices_per_process`", devices_per_process, minimum=1)
    check_seconds("timeout", timeout)
    with contextlib.ExitStack() as stack:
        name = stack.enter_context(tempfile.TemporaryDirectory(prefix="jdist-processes-", ignore_cleanup_errors=True))
        settings = {
            "address": stack.enter_context(reserved_address()),
            "count": count,
            "folder": name,
            "timeout": timeout,
            "path": [os.path.abspath(entry) for entry in sys.path],
            # Linux would end it with the thread that starts it, which is the process only if this is the main thread.
            "follow_parent": threading.current_thread() is threading.main_thread(),
        }
        environment = {**os.environ, "JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": str(devices)}
        started = [stack.enter_context(_started_process({**settings, "index": i}, environment)) for i in range(count)]
        group = Processes(started, pathlib.Path(name), timeout)
        group._wait(0, "the start of the process", started, timeout)
        try:
            yield group
            group._shut_down()
        finally:
            group._is_closed = True


@dataclasses.dataclass(eq=False)
class _Process:
    """One process: its pipes for requests and for notices of results, its output, and its state."""

    index: int
    popen: subprocess.Popen[bytes]
    requests: int
    notices: int
    output: pathlib.Path
    state: Literal["running", "stopped", "killed"] = "running"

    def end(self) -> None:
        """Kills the process, if it has not ended, and the processes that it started."""
        end_child(self.popen)

    def report(self) -> str:
        text = self.output.read_text(errors="replace").strip()
        text = "…" + text[-_OUTPUT_CHARACTERS:] if len(text) > _OUTPUT_CHARACTERS else text or "(none)"
        return f"Output of process {self.index}:\n{text}"


class Processes:
    """The processes that `jdist.testing.processes` started.

    Only `kill`, `stop` and `resume` may be called from another thread while `run` waits for results.
    """

    def __init__(self, started: Sequence[_Process], folder: pathlib.Path, timeout: float):
        self._processes, self._folder, self._timeout = started, folder, timeout
        self._calls = 0
        self._end_reason = ""  # of an earlier call; empty while they run
        self._is_closed = False  # whether the block was left

    def run(self, function: str, *arguments: Any, timeout: float | None = None) -> list[Any]:
        """Calls a function in each process, and returns the result of each process.

        Processes that the test has stopped or killed are not called, and their result is None. So is the result of a
        process that is stopped or killed by another thread during the call (a `threading.Timer`), so a test can observe
        how the others react.

        Args:
            function: `"module:function"`. Each process imports the module from the same path as the test. With pytest's
                default import mode, this is a module in the folder of the test by its name, and the test module itself by
                `f"{__name__}:function"`.
            *arguments: Positional arguments: values that JSON represents, and paths, which become strings.
            timeout: The seconds in which all processes must return. By default `timeout` of `processes`.

        Returns:
            The result of each process, in order. A result consists of numbers, strings, booleans, None, arrays (which become
            numpy arrays), and lists, tuples and dicts of them. It is sent as JSON and npz; nothing is unpickled.

        Raises:
            RuntimeError: The function raised an error in a process, or a process ended. The message contains the traceback or
                the output of each such process. The processes can be used again if all of them returned or raised an error
                within 10 seconds of the first error; otherwise all are ended.
            TimeoutError: A process did not return in time; the message shows the line that it runs. All processes are ended.
            TypeError: An argument cannot be represented as JSON.
            ValueError: `function` is not `"module:function"`.
        """
        module, colon, name = function.partition(":")
        if not (module and colon and name) or "/" in module:
            raise ValueError(f'`function` must be "module:function", got {function!r}.')
        timeout = self._timeout if timeout is None else timeout
        check_seconds("timeout", timeout)
        request = _as_json(function, arguments)
        self._check_block(f"`{function}` cannot run")
        if self._end_reason:
            raise RuntimeError(f"The processes were ended after an earlier call: {self._end_reason} Start new ones.")
        called = [process for process in self._processes if process.state == "running"]
        if not called:
            raise RuntimeError(f"No process can run `{function}`: the test has stopped or killed all of them.")
        self._calls += 1
        (self._folder / f"{self._calls}.json").write_text(request)
        _send(called, str(self._calls))
        return self._wait(self._calls, f"`{function}`", called, timeout)

    def kill(self, index: int) -> None:
        """Ends a process immediately, with SIGKILL, as a host that fails. It has no effect on a process that has ended.

        JAX ends the other processes some time after one has failed (about 100 seconds by default).

        Args:
            index: The index of the process.
        """
        process = self._process(index)
        process.state = "killed"  # before its end, so that `_wait` does not report the end as a failure
        process.end()

    def stop(self, index: int) -> None:
        """Stops a process, with SIGSTOP: it exists and holds its connections, but does not run until `resume`.

        Args:
            index: The index of the process.

        Raises:
            RuntimeError: The process was killed.
        """
        self._signal(index, signal.SIGSTOP, "stopped")

    def resume(self, index: int) -> None:
        """Resumes a process that `stop` stopped.

        Args:
            index: The index of the process.

        Raises:
            RuntimeError: The process was killed.
        """
        self._signal(index, signal.SIGCONT, "running")

    def output(self, index: int) -> str:
        """Returns the text that a process has written to standard output and standard error so far.

        Args:
            index: The index of the process.
        """
        self._check_block("Their output is deleted")
        return self._process(index).output.read_text(errors="replace")

    def __len__(self) -> int:
        """Returns the number of processes, including those that have ended."""
        return len(self._processes)

    def _check_block(self, problem: str) -> None:
        if self._is_closed:
            raise RuntimeError(
                f"{problem}: the processes ended with the block of `jdist.testing.processes`. Call it inside `with "
                "jdist.testing.processes(...) as pair:`; a fixture of pytest needs `yield pair` in the block, not `return`."
            )

    def _process(self, index: int) -> _Process:
        if index not in range(len(self)):
            raise ValueError(f"`index` must be in [0, {len(self)}), the processes that were started; got {index}.")
        return self._processes[index]

    def _signal(self, index: int, number: signal.Signals, state: Literal["running", "stopped"]) -> None:
        process = self._process(index)
        if process.state == "killed" or process.popen.returncode is not None:
            raise RuntimeError(
                f"Process {index} has ended, so it cannot be {'stopped' if state == 'stopped' else 'resumed'}."
            )
        process.state = state
        os.kill(process.popen.pid, number)

    def _wait(self, call: int, subject: str, called: Sequence[_Process], timeout: float) -> list[Any]:
        """Returns the results of a call, or raises the errors of the processes that failed."""
        deadline = time.monotonic() + timeout
        returned: list[_Process] = []
        failed: list[_Process] = []
        while waiting := [p for p in called if p.state == "running" and p not in returned]:
            if time.monotonic() > deadline:
                break
            for pipe in multiprocessing.connection.wait([p.notices for p in waiting], _POLL_SECONDS):
                process = next(p for p in waiting if p.notices == pipe)
                notice = os.read(process.notices, 2**16)
                if not notice and process.state == "running":
                    self._raise_ended(process, subject)
                if str(call).encode() in notice.split():  # not a call from before the process was stopped
                    returned.append(process)
                    if self._file(call, process, "error").exists():
                        failed.append(process)
                        deadline = min(deadline, time.monotonic() + _AFTER_ERROR_SECONDS)
        if failed:
            self._raise_failed(call, subject, failed, waiting)
        if waiting:
            self._raise_timeout(subject, waiting, timeout)
        return [
            load_value(self._file(call, process, "npz")) if process in returned else None for process in self._processes
        ]

    def _file(self, call: int, process: _Process, kind: str) -> pathlib.Path:
        return self._folder / f"{call}.{process.index}.{kind}"

    def _end_all(self, reason: str) -> None:
        self._end_reason = reason
        for process in self._processes:
            process.end()

    def _raise_ended(self, process: _Process, subject: str) -> None:
        process.end()
        code = process.popen.returncode
        status = f"exit status {code}" if code >= 0 else signal.Signals(-code).name
        reason = f"Process {process.index} of {len(self)} ended with {status} during {subject}."
        self._end_all(reason)
        raise RuntimeError(f"{reason} {process.report()}")

    def _raise_failed(self, call: int, subject: str, failed: Sequence[_Process], waiting: Sequence[_Process]) -> None:
        indices_of: dict[str, list[int]] = {}
        for process in failed:
            indices_of.setdefault(self._file(call, process, "error").read_text(), []).append(process.index)
        message = "\n".join(
            f"{subject} raised an error on {processes_text(sorted(indices))} of {len(self)}:\n{text}"
            for text, indices in indices_of.items()
        )
        if waiting:
            indices = [process.index for process in waiting]
            reason = (
                f"{subject} had not returned on {processes_text(sorted(indices))} {_AFTER_ERROR_SECONDS:g} seconds after the "
                f"error on process {failed[0].index}."
            )
            self._end_all(reason)
            message += f"\n{reason} All processes were ended."
        raise RuntimeError(message)

    def _raise_timeout(self, subject: str, waiting: Sequence[_Process], timeout: float) -> None:
        for process in waiting:  # prints the stack of its main thread
            os.kill(process.popen.pid, signal.SIGUSR1)
        time.sleep(0.5)  # until the stacks are in the output
        indices = [process.index for process in waiting]
        reason = (
            f"{subject} did not return within {timeout:g} seconds on {processes_text(sorted(indices))} of {len(self)}."
        )
        reports = "\n".join(process.report() for process in waiting)
        self._end_all(reason)
        raise TimeoutError(
            f"{reason} All processes were ended. The output ends with the stack of each process.\n{reports}"
        )

    def _shut_down(self) -> None:
        """Requests the exit of the processes, and waits for it, unless the test has stopped or killed one of them."""
        if self._end_reason or any(process.state != "running" for process in self._processes):
            return
        _send(self._processes, "exit")
        deadline = time.monotonic() + _EXIT_SECONDS
        for process in self._processes:
            try:
                process.popen.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                self._raise_timeout("its exit", [process], _EXIT_SECONDS)
            if process.popen.returncode:
                self._raise_ended(process, "its exit")


@contextlib.contextmanager
def _started_process(settings: dict[str, Any], environment: dict[str, str]) -> Iterator[_Process]:
    """Starts one process, and ends it when the block is left."""
    index = settings["index"]
    output = pathlib.Path(settings["folder"]) / f"output_{index}.txt"
    (requests, send), (receive, notices) = os.pipe(), os.pipe()
    with contextlib.ExitStack() as stack:
        stack.callback(os.close, send)
        stack.callback(os.close, receive)
        with output.open("wb") as file:
            settings = {**settings, "requests": requests, "notices": notices}
            popen = start_child(
                [sys.executable, "-u", "-c", _CHILD_PROGRAM, json.dumps(settings)],
                environment,
                stdout=file,
                stderr=subprocess.STDOUT,
                pass_fds=(requests, notices),
            )
        process = _Process(index, popen, send, receive, output)
        stack.callback(process.end)
        os.close(requests)
        os.close(notices)
        yield process


def _as_json(function: str, arguments: Sequence[Any]) -> str:
    for number, argument in enumerate(arguments):
        try:
            json.dumps(argument, default=os.fspath)
        except (TypeError, ValueError) as error:
            raise TypeError(
                f"Argument {number} of `{function}` cannot be represented as JSON: {error}. Pass numbers, strings, booleans, "
                "None, paths, lists and dicts, or let the function create the value in the process."
            ) from error
    return json.dumps([function, arguments], default=os.fspath)


def _send(processes: Sequence[_Process], line: str) -> None:
    for process in processes:
        with contextlib.suppress(BrokenPipeError):  # the process has ended, which `_wait` or `_shut_down` reports
            os.write(process.requests, f"{line}\n".encode())
