"""Threads that are stopped when the interpreter exits."""

import subprocess
import sys

PROGRAM = """
import queue, threading
from jdist._src.core.background_threads import start_thread

requests, begun = queue.SimpleQueue(), threading.Event()

def wait(name):
    begun.set()
    requests.get()
    print(name, "stopped", threading.current_thread().daemon, flush=True)

start_thread(wait, ("waiting",), name="first", stop=lambda: requests.put(None))
begun.wait()
start_thread(print, ("ended",), name="second", stop=lambda: print("not called")).join()
"""


def test_threads_are_stopped_and_awaited_at_exit():
    done = subprocess.run([sys.executable, "-W", "error", "-c", PROGRAM], capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr) == ("ended\nwaiting stopped True\n", "")
