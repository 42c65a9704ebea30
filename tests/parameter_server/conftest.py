"""The check that no test leaves a thread of a worker."""

import gc

import pytest

from local_workers import until, worker_threads


@pytest.fixture(autouse=True)
def no_thread_is_left(request, frozen_heap):
    yield
    request.node.funcargs.pop("coordinator", None)  # pytest references it until after this
    until(_no_worker_threads)


def _no_worker_threads():
    if worker_threads():
        gc.collect()  # each time: a thread that ends may hold the traceback of an error, which references the coordinator
    return not worker_threads()
