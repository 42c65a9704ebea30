"""The rendezvous, with all processes as threads of this one."""

import concurrent.futures
import contextlib
import dataclasses
import re
import socket
import threading
import time

import pytest

from jdist._src.cluster import rendezvous
from jdist._src.cluster.rendezvous import Participant, compare_processes, split_address
from jdist._src.core.connections import json_line, read_lines

from laws import each_row


@pytest.fixture
def port():
    with socket.socket() as reserved:  # does not listen, as a launcher that reserves a port
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        reserved.bind(("127.0.0.1", 0))
        yield reserved.getsockname()[1]


def results(port, *participants, timeout=30):
    """Returns the error of each participant, or None; index 0 is process 0."""

    def attempt(participant):
        try:
            if participant.index == 0:
                rendezvous._Coordinator("127.0.0.1", port, "127.0.0.1", participant).run(time.monotonic() + timeout)
            else:
                rendezvous._connect_to_process_0("127.0.0.1", port, participant, timeout)
        except RuntimeError as error:
            return str(error)
        return None

    with concurrent.futures.ThreadPoolExecutor(len(participants)) as pool:
        return list(pool.map(attempt, participants))


def participant(index, count, **changes):
    return dataclasses.replace(Participant.this_process(index, count), **changes)


def test_all_processes_meet(port):
    address = f"127.0.0.1:{port}"
    with concurrent.futures.ThreadPoolExecutor(5) as pool:
        list(pool.map(lambda index: compare_processes(address, index, 5, 30, "127.0.0.1"), [3, 1, 0, 4, 2]))


def test_a_process_that_ends_early_is_replaced(port, monkeypatch):
    monkeypatch.setattr(rendezvous, "_PROGRESS_SECONDS", 0.1)
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        host = pool.submit(compare_processes, f"127.0.0.1:{port}", 0, 3, 30, "127.0.0.1")
        with contextlib.closing(connected(port)) as ended:
            lines = read_lines(ended)
            next(lines)
            ended.sendall(json_line(dataclasses.asdict(participant(1, 3))))
            while rendezvous.json.loads(next(lines))["missing"] != [2]:
                pass
        again = pool.submit(compare_processes, f"127.0.0.1:{port}", 1, 3, 30)
        compare_processes(f"127.0.0.1:{port}", 2, 3, 30)
        again.result()
        host.result()


def connected(port):
    while True:
        with contextlib.suppress(ConnectionRefusedError):
            return socket.create_connection(("127.0.0.1", port), 30)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"index": 1},
            r"Two processes have the index 1: \S+ \(pid \d+, .*\) and .*Give each of the 3 processes its own",
        ),
        ({"index": 3}, r"out of range: process 3 on \S+ \(pid \d+\), but 3 processes have the indices 0 to 2"),
        ({"count": 4}, r"different numbers of processes: process 0 .* expects 3, and process 2 .* 4\. Start all with"),
        ({"jax": "0.1.2"}, r"different versions of jax: process 0 .* and process 2 .* has 0\.1\.2\. Install the same"),
        ({"jdist": "9"}, r"different versions of jdist: .* has 9\."),
        ({"program": "eval.py"}, r"run different programs: .* and process 2 .* runs eval\.py\. Start the same script"),
    ],
)
def test_processes_that_do_not_fit_get_one_error(port, monkeypatch, changes, message):
    monkeypatch.setattr(rendezvous, "_LATE_SECONDS", 0.3)
    other = dataclasses.replace(participant(2, 3), **changes)
    errors = results(port, participant(0, 3), participant(1, 3), other)
    assert len(set(errors)) == 1
    assert re.search(message, errors[0])


@pytest.mark.slow
@pytest.mark.parametrize("delay", [0, 0.5])
def test_two_processes_0_get_one_error_and_so_does_a_process_that_waits(port, monkeypatch, delay):
    """Without a delay both listen, because the port can be shared."""
    monkeypatch.setattr(rendezvous, "_LATE_SECONDS", 0.5)
    monkeypatch.setattr(rendezvous, "_PROBE_SECONDS", 0.1)
    address = "127.0.0.1", port, "127.0.0.1"

    def attempt(index):
        try:
            if index == 1:
                rendezvous._connect_to_process_0("127.0.0.1", port, participant(1, 3), 30)
            else:
                time.sleep(delay if index else 0)
                host = rendezvous._Coordinator(*address, participant(0, 3, pid=index + 1))
                host.run(time.monotonic() + 30)
        except RuntimeError as error:
            return str(error)
        return None

    with concurrent.futures.ThreadPoolExecutor(3) as pool:
        errors = list(pool.map(attempt, range(3)))
    assert len(set(errors)) == 1
    message = r"Two processes have the index 0: \S+ \(pid 1, .*\) and \S+ \(pid 3, .*\)\. Give each of the 3 processes its own index"
    assert re.search(message, errors[0])


def test_process_0_that_cannot_reach_its_address_waits_for_the_others(port):
    host = rendezvous._Coordinator("unknown.invalid", port, "127.0.0.1", participant(0, 2))
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        joined = pool.submit(host.run, time.monotonic() + 30)
        rendezvous._connect_to_process_0("127.0.0.1", port, participant(1, 2), 30)
        joined.result()


def test_missing_processes_are_named_on_all_others(port):
    errors = results(port, participant(0, 4), participant(2, 4), timeout=5)
    assert errors[0] == errors[1]
    assert "After 5 seconds, processes 1, 3 of 4 have not joined process 0 at 127.0.0.1:" in errors[0]
    assert "Check that each was started" in errors[0]


def test_unreachable_process_0_is_an_error_with_the_reason(port):
    with pytest.raises(
        RuntimeError, match=rf"Process 1 \(on .*\) could not reach process 0 at 127\.0\.0\.1:{port} within 1 s"
    ):
        compare_processes(f"127.0.0.1:{port}", 1, 2, 0.6)
    with pytest.raises(
        RuntimeError, match=r"could not reach process 0 at unknown\.invalid:1 within 1 seconds: .*known"
    ):
        compare_processes("unknown.invalid:1", 1, 2, 0.6)


@pytest.mark.slow
@pytest.mark.parametrize("answer", [b"HTTP/1.1 400 Bad Request\n", b"\x00\x00\x12\x04\n", None])
def test_another_program_at_the_port_is_an_error(port, monkeypatch, answer):
    monkeypatch.setattr(rendezvous, "_ANSWER_SECONDS", 0.5)
    with socket.create_server(("127.0.0.1", port), reuse_port=True) as server:

        def serve():
            connection, _ = server.accept()
            with connection:
                if answer is None:
                    connection.recv(1)  # until the other side gives up
                else:
                    connection.sendall(answer)
                    connection.recv(1000)

        thread = threading.Thread(target=serve)
        thread.start()
        problem = "did not answer within" if answer is None else "answered, but not as process 0"
        with pytest.raises(RuntimeError, match=rf"Process 1 cannot join: a program at .*{problem}.*choose another one"):
            compare_processes(f"127.0.0.1:{port}", 1, 2, 30)
        thread.join()
        with pytest.raises(
            RuntimeError,
            match="this is process 0, which listens there: another program, or another process 0, already accepts",
        ):
            compare_processes(f"127.0.0.1:{port}", 0, 2, 30, "127.0.0.1")


def test_port_without_permission_or_of_another_socket_is_an_error():
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))  # without SO_REUSEPORT: the port is not shared
        with pytest.raises(RuntimeError, match=r"listens there: .*in use.*Choose another port"):
            compare_processes(f"127.0.0.1:{other.getsockname()[1]}", 0, 2, 5, "127.0.0.1")


def test_other_programs_that_connect_to_process_0_are_ignored_with_a_warning(port, caplog):
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        host = pool.submit(compare_processes, f"127.0.0.1:{port}", 0, 2, 30, "127.0.0.1")
        for data in (
            b"PRI * HTTP/2.0\r\n",
            b'{"index": 1}\n',
            b'{"index":"1","count":2,"jax":1,"jdist":1,"program":1,"host":1,"pid":1}\n',
        ):
            with contextlib.closing(connected(port)) as stranger:
                stranger.sendall(data)
                while stranger.recv(1000):  # until process 0 closes the connection
                    pass
        compare_processes(f"127.0.0.1:{port}", 1, 2, 30)
        host.result()
    assert [record.message for record in caplog.records] == [
        f"A program that does not use jdist connected to process 0 at port {port}."
    ] * 3


@pytest.mark.slow
def test_waiting_processes_warn(port, monkeypatch, caplog):
    for name in ("_FIRST_WARNING_SECONDS", "_WARNING_SECONDS", "_PROGRESS_SECONDS"):
        monkeypatch.setattr(rendezvous, name, 0.1)
    results(port, participant(0, 3), participant(1, 3), timeout=5)
    messages = "\n".join(record.message for record in caplog.records)
    assert "process 2 of 3 has not joined process 0" in messages
    assert f"Process 1 waits at 127.0.0.1:{port} for the processes [2]." in messages
    caplog.clear()
    with pytest.raises(RuntimeError, match="could not reach"):
        compare_processes(f"127.0.0.1:{port}", 1, 2, 0.5)
    assert "Process 1 has tried for 0 seconds to reach process 0" in caplog.records[0].message


@each_row("address", ["localhost", "localhost:0", "localhost:65536", "host:port", ":80", "a b:80"])
def test_address_without_host_or_port_is_an_error(address):
    with pytest.raises(
        ValueError, match="must be a host with a port, such as '10.0.0.1:8476'|a port is a number from 1 to 65535"
    ):
        split_address(address)
