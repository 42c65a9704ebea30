"""The threads that read data, and waits for them."""

import gc
import threading
import time

PATIENCE = 30  # seconds until a test fails


def input_threads():
    return [thread for thread in threading.enumerate() if thread.name == "jdist input"]


def until(happened):
    end = time.monotonic() + PATIENCE
    while not happened() and time.monotonic() < end:
        time.sleep(0.001)
    assert happened()


def until_no_thread_is_left():
    if input_threads():
        gc.collect()  # the objects that an error references
    until(lambda: not input_threads())
