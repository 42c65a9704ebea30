"""The workers of a strategy without servers, and waiting for threads."""

import dataclasses
import threading
import time

import jax

PATIENCE = 30  # seconds until a test fails


@dataclasses.dataclass(eq=False)
class Workers:
    """The part of a strategy that the coordinator uses."""

    num_workers: int = 3

    @property
    def worker_devices(self):
        return tuple(jax.devices()[: self.num_workers])


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
