"""A strategy whose workers have devices of their own, and waiting for threads."""

import threading
import time

import jax

import jdist

PATIENCE = 30  # seconds until a test fails


def Workers(num_workers=3):  # noqa: N802  # a strategy
    return jdist.ParameterServerStrategy(workers=jax.devices()[:num_workers], servers=1)


def worker_threads():
    return [thread for thread in threading.enumerate() if thread.name.startswith("jdist worker")]


def until(happened):
    end = time.monotonic() + PATIENCE
    while not happened() and time.monotonic() < end:
        time.sleep(0.001)
    assert happened()


def in_thread(fn):
    """Returns a started thread, and the list that receives the result of `fn` or its error."""
    results = []

    def run():
        try:
            results.append(fn())
        except BaseException as error:
            results.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread, results


def ends(thread):
    thread.join(PATIENCE)
    return not thread.is_alive()
