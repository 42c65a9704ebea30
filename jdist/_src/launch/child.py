"""The program of a child process: runs a script or a module as `python` does, and reports an error to the launcher.

The launcher runs this file by its path, so a script that does not use jdist does not import it.
"""

import builtins
import contextlib
import ctypes
import importlib.machinery
import os
import runpy
import signal
import sys
import threading
import time
import types
from typing import Any

_ANSWER_SECONDS = 1.0
_notices: tuple[int, int] | None = None  # the pipe, and the id of this process
_NOT_SHOWN = (__file__, runpy.__file__, "<frozen runpy>")  # files whose frames are not part of a traceback


def end_with_parent(parent: int | None = None) -> None:
    """Lets Linux end this process with its parent, also if it is stopped, or in a call that holds Python's lock.

    Linux ends it with the thread that started it, so that thread must be the main thread of the parent.

    Args:
        parent: The id of the parent, if the parent may have ended already; then this process ends.
    """
    with contextlib.suppress(OSError, AttributeError):  # other systems do not have `prctl`
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    if parent is not None and os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)


def run_program(kind: str, target: str, arguments: list[str]) -> None:
    """Runs a script or a module as `__main__`, with `sys.argv` and `sys.path` as `python` sets them.

    Args:
        kind: `"script"` or `"module"`.
        target: The path of the script, or the name of the module.
        arguments: The arguments of the program.
    """
    sys.argv[:] = [target, *arguments]
    if not sys.flags.safe_path:
        sys.path[0] = os.path.dirname(os.path.realpath(target)) if kind == "script" else os.getcwd()
    main = types.ModuleType("__main__")
    sys.modules["_jdist_child"], sys.modules["__main__"] = sys.modules["__main__"], main
    vars(main)["__builtins__"] = builtins
    if kind == "module":
        runpy._run_module_as_main(target)  # pyright: ignore[reportAttributeAccessIssue]  # `python -m` calls it
        return
    path = os.path.abspath(target)
    main.__file__ = path
    main.__loader__ = importlib.machinery.SourceFileLoader("__main__", path)
    with open(path, "rb") as file:
        source = file.read()
    exec(compile(source, path, "exec", dont_inherit=True), vars(main))


def write_notice(text: str = "") -> None:
    """Writes a notice to the launcher, unless this is a fork of its process."""
    if _notices is None or _notices[1] != os.getpid():
        return
    with contextlib.suppress(OSError):  # the launcher has ended
        os.write(_notices[0], text.encode() + b"\n")


def _send_answers() -> None:
    """Starts a thread that writes a line every second, unless the process is stopped or a call holds Python's lock."""

    def send() -> None:
        while True:
            write_notice()
            time.sleep(_ANSWER_SECONDS)

    threading.Thread(target=send, name="jdist-answers", daemon=True).start()


def _main() -> None:
    parent, notices, sends_answers, kind, target, *arguments = sys.argv[1:]
    end_with_parent(int(parent))
    global _notices
    _notices = int(notices), os.getpid()
    os.set_inheritable(int(notices), False)
    if int(sends_answers):
        _send_answers()

    # A process with an error may wait for the other processes before it ends, as `jax.distributed` does at exit.
    def report(status: int) -> None:
        write_notice(str(status))

    try:
        run_program(kind, target, arguments)
    except SystemExit as error:
        status = error.code
        if status is not None and not isinstance(status, int):
            print(status, file=sys.stderr)  # as the interpreter does, but before the report
            status = 1
        if status:
            report(status & 0xFF)
        raise SystemExit(status) from None
    except BaseException:
        print_error = sys.excepthook  # the program may have replaced it

        def print_and_report(kind: type[BaseException], error: BaseException, frames: Any) -> None:
            while frames is not None and frames.tb_frame.f_code.co_filename in _NOT_SHOWN:
                frames = frames.tb_next
            try:
                print_error(kind, error.with_traceback(frames), frames)
            finally:
                exit_work = sys.modules.get("jdist._src.core.exit_work")
                status = exit_work.status_of(error) if exit_work is not None else 1
                report(-signal.SIGINT if issubclass(kind, KeyboardInterrupt) else status)

        sys.excepthook = print_and_report
        raise


if __name__ == "__main__":
    _main()
