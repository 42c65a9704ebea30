"""Records of calls and waits, as the watchdog reads them."""

import threading

import pytest

from jdist._src.core import activity


def in_thread(function):
    """Runs `function(release)` in a thread that holds its records until the block ends."""
    ready, release = threading.Event(), threading.Event()

    def run():
        function(lambda: (ready.set(), release.wait(60)))

    thread = threading.Thread(target=run)
    thread.start()
    assert ready.wait(60)
    return thread, release


def test_innermost_wait_of_a_thread_is_recorded_and_removed_also_after_an_error():
    ident = threading.get_ident()
    with pytest.raises(KeyError), activity.waiting("outer"):
        assert activity.wait_of(ident).reason == "outer"
        with activity.waiting("inner"):
            assert activity.waits_for_processes()[ident].reason == "inner"
        assert activity.wait_of(ident).reason == "outer"
        raise KeyError
    assert activity.wait_of(ident) is None and ident not in activity.waits_for_processes()


def test_wait_of_a_background_thread_counts_while_another_thread_waits_for_it():
    def wait_in_background(hold):
        with activity.background_thread(), activity.waiting("a message"):
            hold()

    thread, release = in_thread(wait_in_background)
    try:
        assert thread.ident in activity.background_threads()
        assert activity.waits_for_processes() == {}
        with activity.waiting_for_thread("the next batch"):
            assert [wait.reason for wait in activity.waits_for_processes().values()] == ["a message"]
        assert activity.waits_for_processes() == {}
    finally:
        release.set()
        thread.join()
    assert thread.ident not in activity.background_threads()


def test_work_is_recorded_while_the_block_runs():
    assert activity.recorded_work() is None
    with pytest.raises(KeyError), activity.working("writes a file"):
        assert activity.recorded_work() == "writes a file"
        raise KeyError
    assert activity.recorded_work() is None


def test_launch_records_the_program_while_it_is_called_and_its_results_afterwards():
    label, seen = activity.Label("program"), []
    launches = activity.calls.launches

    def call(x):
        seen.append((activity.calls.running, activity.calls.launches))
        return x + 1

    assert activity.launch(label, call, 1) == 2
    assert seen == [(label, launches + 1)]
    assert activity.calls.running is None and activity.calls.last == [2, label]
    with pytest.raises(ZeroDivisionError):
        activity.launch(label, lambda: 1 / 0)
    assert activity.calls.running is None and activity.calls.last == [2, label]
    activity.calls.last = [None, None]
