"""Exchanges of messages: the number of requests, the keys that remain, and waits that cannot end, with JAX's real store."""

import collections
import json
import subprocess
import sys
import threading

import pytest

from jdist._src.core import process_messages
from jdist._src.core.process_messages import MessageExchange, numbered_name

from coordination import connect, coordination_service

_CLIENT = """
import sys, time
from jax._src.lib import _jax
client = _jax.get_distributed_runtime_client(sys.argv[1], 1, init_timeout=60, heartbeat_timeout=10)
client.connect()
client.key_value_set("started", "1")
time.sleep(600)
"""


@pytest.fixture(scope="module")
def client():
    with coordination_service(1) as address:
        client = connect(address)
        yield client
        client.shutdown()


class CountingStore:
    """A store that counts the requests of the simulated processes. Mutable."""

    def __init__(self, client):
        self._client = client
        self.counts = collections.Counter()
        self._lock = threading.Lock()

    def __getattr__(self, method):
        def call(*args):
            with self._lock:
                self.counts[method] += 1
            return getattr(self._client, method)(*args)

        return call


def _simulate(num_processes, store, messages, **options):
    """Exchanges `messages(process, round)` between threads, and returns what each received, with the requests per round."""
    name, results, requests = numbered_name("test/exchange"), [None] * num_processes, []
    barrier = threading.Barrier(
        num_processes, lambda: (requests.append(sum(store.counts.values())), store.counts.clear())
    )

    def run(process):
        exchange = MessageExchange(name, process, num_processes, "a test", store=store, **options)
        received = []
        for number in range(3):
            received.append(exchange.exchange(messages(process, number)))
            barrier.wait()
        results[process] = received
        exchange.close({"error": "closed"})

    threads = [threading.Thread(target=run, args=(process,)) for process in range(num_processes)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results, requests, name


@pytest.mark.parametrize("num_processes", [1, 2, 3, 8, 64, pytest.param(512, marks=pytest.mark.slow)])
def test_a_round_takes_two_requests_per_process_and_one_more_per_changed_message(num_processes, client, monkeypatch):
    monkeypatch.setattr(process_messages, "_POLL_MILLISECONDS", 300_000)  # polls depend on time
    store = CountingStore(client)

    def message(process, number):
        return {"process": process % 7, "number": number == 2 and process == 0}

    results, requests, name = _simulate(num_processes, store, message)
    for number in range(3):
        expected = [message(process, number) for process in range(num_processes)]
        assert all(received[number] == expected for received in results)
    # The last process of a round reads the directory, stores the result, and deletes the round before.
    all_change, none_changes, one_changes = requests
    assert all_change == 3 * num_processes + 1
    assert none_changes == 2 * num_processes + 1
    assert one_changes == 2 * num_processes + 3
    assert client.key_value_dir_get_bytes(f"{name}/") == []


def test_a_process_that_skips_a_round_gets_the_full_messages_of_the_next(client):
    name, received = numbered_name("test/exchange"), {}

    def run(process):
        exchange = MessageExchange(name, process, 3, "a test", store=client)
        received[process] = [exchange.exchange({"text": f"of {process}"})]
        if process == 1:
            exchange.post({"error": "no file"})
        else:
            received[process].append(exchange.exchange({"text": f"new of {process}"}))
        received[process].append(exchange.exchange({"text": f"new of {process}"}))
        received[process].append(exchange.exchange({"text": f"new of {process}"}))

    threads = [threading.Thread(target=run, args=(process,)) for process in range(3)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    new = [{"text": f"new of {process}"} for process in range(3)]
    assert received[1] == [[{"text": f"of {process}"} for process in range(3)], new, new]
    for process in (0, 2):
        assert received[process] == [received[1][0], [new[0], {"error": "no file"}, new[2]], new, new]


def test_number_of_keys_does_not_grow_with_the_rounds_or_the_exchanges(client):
    counts = []
    for rounds in (2, 20, 20):
        name = numbered_name("test/many")
        exchanges = [MessageExchange(name, process, 2, "a test", store=client) for process in range(2)]
        for number in range(rounds):
            thread = threading.Thread(target=exchanges[0].exchange, args=({"number": number},))
            thread.start()
            exchanges[1].exchange({"number": -number})
            thread.join()
        counts.append(len(client.key_value_dir_get_bytes("test/many/")))
        for exchange in exchanges:
            exchange.close({})
    assert counts == [counts[0]] * 3
    assert counts[0] <= 4
    assert client.key_value_dir_get_bytes("test/many/") == []


@pytest.mark.slow
def test_wait_for_a_process_that_has_ended_is_an_error_that_names_its_error(client):
    name = numbered_name("test/ended")
    client.key_value_set("jdist/ended/1", json.dumps({"error": " with KeyError: 'x'", "posts": {name: 1}}))
    first, second = (MessageExchange(name, process, 2, "the save", store=client) for process in range(2))
    second.post({"from": 1})
    assert first.exchange({"from": 0})[1] == {"from": 1}  # it has posted before its end
    with pytest.raises(RuntimeError) as caught:
        first.exchange({"from": 0})
    client.key_value_delete("jdist/ended")
    assert str(caught.value).startswith(
        "Process 1 has ended its program with KeyError: 'x', and did not take part in the save. Process 0 waits there for "
        "process 1 (`first.exchange"
    )
    assert "test_process_messages.py:" in str(caught.value)
    assert "Every process must call the same functions" in str(caught.value)


@pytest.mark.slow
def test_wait_for_a_lost_process_is_an_error_where_the_processes_are_recoverable(monkeypatch):
    monkeypatch.setattr(process_messages, "are_recoverable", lambda: True)
    with coordination_service(2, recoverable=True, heartbeat_timeout=10) as address:
        other = subprocess.Popen([sys.executable, "-c", _CLIENT, address])
        client = connect(address, heartbeat_timeout=10)
        client.blocking_key_value_get("started", 60_000)
        exchange = MessageExchange(numbered_name("test/lost"), 0, 2, "the save", store=client)
        other.kill()
        with pytest.raises(RuntimeError, match="Process 1 is lost, and did not take part in the save"):
            exchange.exchange({})
        assert exchange.missing() == [1]
        client.shutdown()
    other.wait()


def test_requested_stop_ends_a_wait(client):
    exchange = MessageExchange(numbered_name("test/stop"), 0, 2, "a test", lambda: True, store=client)
    with pytest.raises(InterruptedError, match="Stopped waiting"):
        exchange.exchange({})


def test_a_message_whose_wait_was_stopped_leaves_the_round_and_the_next_message_takes_its_place(client):
    name, stops = numbered_name("test/stopped"), [False, True]
    first = MessageExchange(name, 0, 2, "a test", lambda: bool(stops and stops.pop(0)), store=client)
    second = MessageExchange(name, 1, 2, "a test", store=client)
    with pytest.raises(InterruptedError):
        first.exchange({"call": "old"})
    assert first.missing() == [1]
    received = []
    thread = threading.Thread(target=lambda: received.append(second.exchange({"call": "new"})))
    thread.start()
    assert first.exchange({"call": "new"}) == [{"call": "new"}] * 2
    thread.join()
    assert received == [[{"call": "new"}] * 2]


def test_a_wait_that_is_stopped_when_all_have_posted_returns_the_messages(client):
    name = numbered_name("test/complete")
    second = MessageExchange(name, 1, 2, "a test", store=client)

    def complete():
        second.exchange({"of": 1})
        return True

    first = MessageExchange(name, 0, 2, "a test", complete, store=client)
    assert first.exchange({"of": 0}) == [{"of": 0}, {"of": 1}]


def test_an_interrupt_when_all_have_posted_is_raised_and_the_next_round_follows(client):
    name = numbered_name("test/interrupted")
    second = MessageExchange(name, 1, 2, "a test", store=client)

    def interrupt():
        second.exchange({"of": 1})
        raise KeyboardInterrupt

    first = MessageExchange(name, 0, 2, "a test", interrupt, store=client)
    with pytest.raises(KeyboardInterrupt):
        first.exchange({"of": 0})
    second.post({"of": "1, later"})
    assert first.exchange({"of": 0}) == [{"of": 0}, {"of": "1, later"}]
