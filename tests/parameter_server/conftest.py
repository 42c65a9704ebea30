"""The check that no test leaves a thread of a worker."""

import gc

import pytest

from local_workers import until, worker_threads


@pytest.fixture(autouse=True)
def no_thread_is_left(request):
    yield
    request.node.funcargs.pop("coordinator", None)  # pytest references it until after this
    if worker_threads():
        gc.collect()
    until(lambda: not worker_threads())
