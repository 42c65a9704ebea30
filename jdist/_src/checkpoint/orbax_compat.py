"""Changes of orbax by jdist: its log, its event loops, and the stores to which it writes. Uses private functions of orbax.

orbax takes a second to import, so it is imported at the first use.
"""

import asyncio
import concurrent.futures
import contextvars
import functools
import importlib.metadata
import logging
import os
import pathlib
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from jdist._src.execution.interrupts import deferring_interrupts, raise_pending

T = TypeVar("T")

_S3 = "s3://"


@functools.cache
def import_orbax() -> Any:
    """Returns the module `orbax.checkpoint`. Ctrl-C is deferred to the end of the import.

    A process can load tensorstore only once, so after an interrupted import each further one would be an error.
    """
    with deferring_interrupts():
        import orbax.checkpoint
    raise_pending()
    return orbax.checkpoint


def configure_orbax(folder: Any) -> None:
    """Prepares orbax for a folder: turns off its log and the tracebacks of tasks that end after an error; adds `s3://`.

    Errors are raised with messages of jdist.

    Raises:
        ImportError: The folder is at `s3://`, and the version of orbax does not have the functions that this needs.
    """
    _turn_off_log()
    if str(folder).startswith(_S3):
        _add_s3()


@functools.cache
def _turn_off_log() -> None:
    import_orbax()
    logging.getLogger("absl").addFilter(lambda record: "orbax" not in pathlib.Path(record.pathname).parts)
    from orbax.checkpoint._src import asyncio_utils

    # orbax does not have options for its event loops, and all of them run in this function.
    run_sync = getattr(asyncio_utils, "run_sync", None)
    if run_sync is not None:
        asyncio_utils.run_sync = functools.partial(_run_in_own_loop, run_sync)


def _run_in_own_loop(run_sync: Callable[[Coroutine[Any, Any, T]], T], coro: Coroutine[Any, Any, T]) -> T:
    """Returns the result of `coro`, which `run_sync` runs in an event loop of its own.

    In a notebook the event loop of the kernel is running. Older versions of orbax would run it inside the cell, where the
    messages of later cells wait for the end of this one. So `coro` runs in another thread.
    """
    try:
        loop = asyncio.get_running_loop()
    except RuntimeError:
        loop = None
    if loop is None:  # not in the handler, whose error would be part of the tracebacks of orbax
        return run_sync(_until_all_tasks_end(coro))
    with concurrent.futures.ThreadPoolExecutor(1) as thread:
        return thread.submit(contextvars.copy_context().run, run_sync, _until_all_tasks_end(coro)).result()


async def _until_all_tasks_end(coro: Coroutine[Any, Any, T]) -> T:
    """Returns the result of `coro` when all other tasks of its event loop have ended too.

    orbax closes its event loop at the first error. A read or write that ends later would find the loop closed, and Python
    would print a traceback.
    """
    asyncio.get_running_loop().set_default_executor(_Executor())
    try:
        return await coro
    finally:
        others = asyncio.all_tasks() - {asyncio.current_task()}
        await asyncio.gather(*others, return_exceptions=True)


class _Executor(concurrent.futures.ThreadPoolExecutor):
    """Runs functions in threads, or in the thread of the caller if no thread can be started.

    Python 3.12.0 and 3.12.1 cannot start threads while the interpreter waits at exit for the threads that run
    (https://github.com/python/cpython/issues/113964), and a write that is not finished then needs some.
    """

    def submit(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> "concurrent.futures.Future[T]":
        future: concurrent.futures.Future[T] = concurrent.futures.Future()
        is_free = threading.Lock()  # a call that was queued although its thread did not start may run in another thread

        def call() -> None:
            if is_free.acquire(blocking=False) and future.set_running_or_notify_cancel():
                try:
                    future.set_result(fn(*args, **kwargs))
                except BaseException as error:
                    future.set_exception(error)

        try:
            super().submit(call)
        except RuntimeError:
            call()
        return future


@functools.cache
def _add_s3() -> None:
    """Makes orbax treat `s3://` as it treats `gs://`, with the S3 driver of tensorstore, which writes the arrays.

    orbax, without an option, chooses between the driver of Google Cloud Storage and that of files.
    """
    try:
        from orbax.checkpoint._src.path import gcs_utils
        from orbax.checkpoint._src.serialization import tensorstore_utils

        get_kvstore, use_gcs = gcs_utils.get_kvstore_for_gcs, tensorstore_utils._use_gcs_driver
        normalize = tensorstore_utils._normalize_path
    except (ImportError, AttributeError) as error:  # they are private, and orbax 0.12.8 is the first version with them
        version = importlib.metadata.version("orbax-checkpoint")
        raise ImportError(
            f"Checkpoints at s3:// need orbax-checkpoint 0.12.8, and {version} is installed: `python -m pip install "
            f'"orbax-checkpoint==0.12.8"`. ({error})'
        ) from None
    gcs_utils._GCS_PATH_PREFIX = (*gcs_utils._GCS_PATH_PREFIX, _S3)  # a step is complete when its commit file exists
    gcs_utils.get_kvstore_for_gcs = lambda path: s3_store(path) if path.startswith(_S3) else get_kvstore(path)
    tensorstore_utils._use_gcs_driver = lambda folder: folder.startswith(_S3) or use_gcs(folder)
    tensorstore_utils._normalize_path = lambda path: (
        _S3 + os.path.normpath(path.removeprefix(_S3)) if path.startswith(_S3) else normalize(path)
    )


def s3_store(url: str) -> dict[str, Any]:
    """Returns the specification of a folder at `s3://` for tensorstore.

    tensorstore and s3fs, which reads the manifests, find the credentials in the same places. The endpoint of another store
    than Amazon's and the region are in environment variables, which tensorstore does not read.
    """
    bucket, _, path = url.removeprefix(_S3).partition("/")
    endpoint = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
    region = os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION")
    options = {"endpoint": endpoint, "aws_region": region}
    return {"driver": "s3", "bucket": bucket, "path": path, **{name: x for name, x in options.items() if x}}
