"""Notices of preemption in a single process: real signals, and the handlers that the program had installed."""

import os
import signal
import threading
import time

import jax
import pytest

from jdist._src.faults import preemption_notice
from jdist._src.faults.preemption_notice import PreemptionNotice


@pytest.fixture
def received():
    """Installs a handler of SIGTERM; returns the list of the signals that it receives."""
    received = []
    previous = signal.signal(signal.SIGTERM, lambda number, frame: received.append(number))
    yield received
    signal.signal(signal.SIGTERM, previous)


@pytest.fixture
def notice():
    notice = PreemptionNotice()
    yield notice
    notice.close()


def terminate():
    os.kill(os.getpid(), signal.SIGTERM)


def test_sigterm_is_a_notice_also_if_it_arrives_twice(notice, received):
    notice.start()
    assert not notice.is_agreed()
    terminate()
    terminate()
    assert notice.is_agreed() and notice.is_agreed()
    notice.reset()
    assert not notice.is_agreed()
    terminate()
    assert notice.is_agreed()
    assert received == []


def test_previous_handler_is_restored(notice, received):
    before = signal.getsignal(signal.SIGTERM)
    notice.start()
    notice.close()
    assert signal.getsignal(signal.SIGTERM) is before
    terminate()
    assert received == [signal.SIGTERM] and not notice.is_agreed()
    notice.close()
    assert signal.getsignal(signal.SIGTERM) is before


def test_notice_can_be_started_again_and_a_handler_that_the_program_installs_later_stays(notice, received):
    later = lambda number, frame: None
    for _ in range(2):
        notice.start()
        terminate()
        assert notice.is_agreed()
        notice.reset()
        signal.signal(signal.SIGTERM, later)
        notice.close()
        assert signal.getsignal(signal.SIGTERM) is later
    assert received == []


def test_watcher_is_called_until_it_returns_true_also_after_an_error(monkeypatch, caplog):
    monkeypatch.setattr(preemption_notice, "_WATCHER_INTERVAL", 0.01)
    answers, threads = [False, None, True], []

    def watcher():
        threads.append(threading.current_thread().name)
        if (answer := answers.pop(0)) is None:
            raise OSError("no metadata server")
        return answer

    notice = PreemptionNotice(watcher)
    notice.start()
    deadline = time.monotonic() + 60
    while not notice.is_agreed():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    notice.close()
    assert threads == ["jdist preemption"] * 3
    (record,) = caplog.records
    assert "watcher of preemption raised an error; it is called again" in record.message
    assert "no metadata server" in str(record.exc_info[1])


def test_watcher_that_is_not_a_function_is_refused():
    with pytest.raises(
        TypeError, match="`watcher` must be a function without arguments that returns whether .* got bool"
    ):
        PreemptionNotice(True)


def test_other_threads_warn_that_they_do_not_receive_sigterm(notice, received, caplog):
    before = signal.getsignal(signal.SIGTERM)
    thread = threading.Thread(target=notice.start)
    thread.start()
    thread.join()
    assert "SIGTERM ends this process: only the main thread can handle it" in caplog.text
    assert signal.getsignal(signal.SIGTERM) is before


def test_disabled_preemption_service_is_an_error():
    enabled = jax.config.jax_enable_preemption_service
    jax.config.update("jax_enable_preemption_service", False)
    try:
        with pytest.raises(
            RuntimeError, match="JAX's preemption service is disabled.*Enable it before the processes join"
        ):
            preemption_notice._check_preemption_service()
    finally:
        jax.config.update("jax_enable_preemption_service", enabled)
