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


HELD = """
import os, time
from jdist._src.core.background_threads import start_thread

class Held:
    def __del__(self):
        time.sleep(2)  # as an array whose memory JAX frees without the lock of the interpreter
        os.write(1, b"freed")

start_thread(lambda held: time.sleep(0.2), (Held(),), name="ended", stop=None)
time.sleep(0.4)
"""


def test_exit_waits_for_threads_that_free_what_they_held():
    done = subprocess.run([sys.executable, "-W", "error", "-c", HELD], capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr) == ("freed", "")
