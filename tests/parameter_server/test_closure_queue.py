"""The queue of scheduled functions: order, capacity, errors, lost workers, functions of one worker, and the end of threads."""

import logging

import hypothesis
import hypothesis.strategies as st
import pytest

from jdist._src.parameter_server.closure_queue import (
    MAX_ATTEMPTS,
    CancelledError,
    Closure,
    ClosureQueue,
    WorkerLostError,
)

from local_workers import ends, in_thread

few = hypothesis.settings(max_examples=60, deadline=None, derandomize=True, database=None)


class _FunctionError(Exception):
    pass


def _closure(name="fn", worker=None):
    return Closure(print, name, worker)


def _queue(*names, capacity=100):
    queue = ClosureQueue(capacity)
    closures = [_closure(name) for name in names]
    for closure in closures:
        queue.put(closure)
    return queue, closures


def test_functions_are_returned_in_the_order_of_put():
    queue, closures = _queue("a", "b", "c")
    assert [queue.get(0), queue.get(1), queue.get(0)] == closures


def test_ps11_wait_returns_when_no_function_runs():
    queue, (closure,) = _queue("a")
    assert not queue.is_done()
    assert queue.get(0) is closure
    assert not queue.is_done()
    thread, results = in_thread(queue.wait)
    assert not results
    queue.finish(closure, 7)
    assert ends(thread)
    assert results == [None]
    assert queue.is_done()
    assert closure.future.result() == 7
    queue.wait()


def test_ps11_function_of_a_lost_worker_is_put_back_as_the_next_one():
    queue, (first, second) = _queue("a", "b")
    queue.requeue(queue.get(0), WorkerLostError())
    assert not queue.is_done()
    assert [queue.get(1), queue.get(1)] == [first, second]
    for closure in (first, second):
        queue.finish(closure, None)
    queue.wait()
    assert (first.attempts, second.attempts) == (2, 1)


def test_later_errors_of_functions_scheduled_before_the_first_error_are_not_raised():
    queue, (a, b) = _queue("a", "b")
    queue.get(0), queue.get(1)
    queue.fail(a, _FunctionError("first"))
    with pytest.raises(_FunctionError, match="first"):
        queue.is_done()
    queue.put(c := _closure("c"))
    queue.fail(b, _FunctionError("second"))
    queue.finish(queue.get(0), None)
    queue.wait()
    assert c.future.result() is None
    with pytest.raises(_FunctionError, match="second"):
        b.future.result()


def test_wait_raises_after_the_running_functions_have_ended():
    queue, (a, b) = _queue("a", "b")
    queue.get(0), queue.get(1)
    queue.fail(a, _FunctionError())
    thread, results = in_thread(queue.wait)
    assert not results
    queue.finish(b, None)
    assert ends(thread)
    assert isinstance(results[0], _FunctionError)


def test_function_that_loses_every_worker_fails():
    queue, (closure,) = _queue("poison")
    for _ in range(MAX_ATTEMPTS):
        assert queue.get(0) is closure
        queue.requeue(closure, WorkerLostError("killed"))
    with pytest.raises(WorkerLostError, match="killed") as raised:
        queue.wait()
    assert raised.value.__notes__ == ["`poison` is not run again: it has lost 10 workers."]


def test_ps11_function_of_one_worker_is_returned_to_it_only_and_is_not_counted():
    queue, (untagged,) = _queue("untagged")
    queue.put(tagged := _closure("tagged", worker=1))
    assert queue.get(0) is untagged
    queue.finish(untagged, None)
    assert queue.is_done()
    queue.wait()
    assert queue.get(1) is tagged
    assert queue.is_done()
    queue.requeue(tagged, WorkerLostError())
    assert queue.get(1) is tagged
    queue.fail(tagged, _FunctionError())
    queue.wait()
    with pytest.raises(_FunctionError):
        tagged.future.result()


def test_ps11_function_of_one_worker_wakes_it():
    queue = ClosureQueue()
    threads = [in_thread(lambda i=i: queue.get(i)) for i in range(3)]
    for i in (2, 0, 1):
        queue.put(closure := _closure(worker=i))
        assert ends(threads[i][0])
        assert threads[i][1] == [closure]


def test_put_waits_while_the_queue_is_full():
    queue, (first, _) = _queue("a", "b", capacity=2)
    thread, results = in_thread(lambda: queue.put(_closure("c")))
    assert not results
    assert repr(queue) == "2 waiting, 0 running"
    queue.requeue(queue.get(0), WorkerLostError())  # a function that is put back does not wait for space
    queue.finish(queue.get(0), None)
    assert ends(thread)
    assert results == [None]


def test_put_that_waits_for_space_raises_the_error():
    queue, (first, second, _) = _queue("a", "b", "c", capacity=3)
    queue.get(0), queue.put(_closure("d"))
    thread, results = in_thread(lambda: queue.put(_closure("e")))
    queue.fail(first, _FunctionError())
    assert ends(thread)
    assert isinstance(results[0], _FunctionError)
    assert queue.is_done()


def test_error_that_is_not_raised_is_logged_when_the_threads_end(caplog):
    queue, _ = _queue("a")
    queue.attach_workers(1)
    queue.fail(queue.get(0), _FunctionError("wrong"))
    queue.release_workers()
    with caplog.at_level(logging.WARNING, "jdist"):
        assert queue.get(0) is None
    assert caplog.messages == ["A scheduled function failed, and `join` was not called after it: _FunctionError: wrong"]
    with pytest.raises(_FunctionError):
        queue.wait()


def test_close_cancels_the_functions_that_wait():
    queue, (running, waiting) = _queue("running", "waiting")
    queue.put(tagged := _closure("tagged", worker=5))
    queue.get(0)
    queue.close()
    for closure in (waiting, tagged):
        with pytest.raises(CancelledError, match="because the interpreter exits"):
            closure.future.result()
    assert queue.get(0) is None
    queue.finish(running, 1)
    assert running.future.result() == 1
    for worker in (None, 0):
        with pytest.raises(RuntimeError, match="cannot be scheduled while the interpreter exits"):
            queue.put(_closure(worker=worker))


@few
@hypothesis.given(st.lists(st.sampled_from(["ok", "fail", "lost"]), max_size=40), st.integers(1, 4))
def test_every_function_is_run_or_cancelled_and_one_error_is_raised(kinds, num_workers):
    queue = ClosureQueue()
    lost = set()

    def work(worker):
        while (closure := queue.get(worker)) is not None:
            if closure.name == "fail":
                queue.fail(closure, _FunctionError())
            elif closure.name == "lost" and closure not in lost:
                lost.add(closure)
                queue.requeue(closure, WorkerLostError())
            else:
                queue.finish(closure, closure.name)

    threads = [in_thread(lambda i=i: work(i)) for i in queue.attach_workers(num_workers)]
    closures, errors = [], 0
    for name in kinds:
        closure = _closure(name)
        try:
            queue.put(closure)
        except _FunctionError:
            errors += 1
        else:
            closures.append(closure)
    try:
        queue.wait()
    except _FunctionError:
        errors += 1
    queue.release_workers()
    assert all(ends(thread) for thread, _ in threads)
    assert [results for _, results in threads] == [[None]] * num_workers
    queue.wait()
    assert all(closure.future.done() for closure in closures)
    failed = sum(closure.future.exception() is not None and closure.name == "fail" for closure in closures)
    assert (errors == 0) == (failed == 0)
    if "fail" not in kinds:
        assert [closure.future.result() for closure in closures] == kinds
