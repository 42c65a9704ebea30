"""`jdist run` with restarts on several machines: several launchers on the loopback interface. The programs do not import JAX."""

import contextlib
import random
import re
import signal
import socket

import pytest

from launchers import read_until

PROGRAM = """
r, n = int(os.environ["JDIST_RESTARTS"]), int(os.environ["JDIST_NUM_PROCESSES"])
signal.signal(signal.SIGTERM, lambda *_: (print("saved"), sys.exit(42)))
print(f"attempt {r} with {n}")
open(f"ready-{r}-{i}", "w").close()
while not all(os.path.exists(f"ready-{r}-{k}") for k in range(n)): time.sleep(0.01)
"""
WAIT = "time.sleep(60)\n"


@pytest.fixture
def port():
    """Returns a port whose next port is free too, above those that the system assigns to connections."""
    while True:
        number = random.randrange(61_000, 65_000)
        with contextlib.suppress(OSError), socket.socket() as first, socket.socket() as second:
            first.bind(("127.0.0.1", number))
            second.bind(("127.0.0.1", number + 1))
            return number


@pytest.fixture
def start(started, port):
    """Returns a function that starts the launcher of a machine."""
    return lambda machine, options, program: started(
        f"--nodes 2 --node-rank {machine} --coordinator 127.0.0.1:{port} {options}", PROGRAM + program
    )


def finish(*launchers):
    """Waits for launchers; returns the exit status, the output and the errors of each."""
    texts = [launcher.communicate(timeout=60) for launcher in launchers]
    return [(launcher.returncode, *text) for launcher, text in zip(launchers, texts, strict=True)]


def attempts(output):
    """Returns the process, the attempt and the number of processes of each line about it."""
    return [tuple(map(int, groups)) for groups in re.findall(r"\[(\d)\] attempt (\d) with (\d)", output)]


def test_failure_on_one_machine_restarts_the_processes_of_all(start):
    program = "if r == 0 and i == 2: os._exit(7)\nif r == 0: " + WAIT
    machines = [start(k, "-n 2 --max-restarts 1", program) for k in range(2)]
    (status0, output0, errors0), (status1, output1, errors1) = finish(*machines)
    assert (status0, status1) == (0, 0), errors0 + errors1
    assert sorted(attempts(output0)) == [(0, 0, 4), (0, 1, 4), (1, 0, 4), (1, 1, 4)]
    assert sorted(attempts(output1)) == [(2, 0, 4), (2, 1, 4), (3, 0, 4), (3, 1, 4)]
    for errors in (errors0, errors1):
        assert re.search("jdist run: restart 1 of 1, .* process 2 failed: exit status 7.\n", errors)


def test_last_failure_is_reported_on_all_machines(start):
    machines = [start(k, "-n 1 --max-restarts 0", "if i: raise ValueError('no')\n" + WAIT) for k in range(2)]
    for status, _, errors in finish(*machines):
        assert status == 1
        assert "jdist run: process 1 of 2 failed first: exit status 1. The end of its output:\nTraceback" in errors
        assert errors.endswith("ValueError: no\n")


def test_machine_that_does_not_fit_is_rejected_on_that_machine(start):
    first = start(0, "-n 1 --max-restarts 1", "")
    status, output, errors = finish(start(1, "-n 2 --max-restarts 1", ""))[0]
    assert (status, output) == (2, "")
    assert re.search(
        r"jdist run: machine 1 \(.*, pid \d+\) has the number of processes 2, but machine 0 .* has 1. Run the", errors
    )
    status, _, errors = finish(start(0, "-n 1 --max-restarts 1", ""))[0]
    assert status == 2
    assert re.search(
        r"port \d+, which follows the port of --coordinator, cannot be used on this machine for the con", errors
    )
    assert [result[0] for result in finish(first, start(1, "-n 1 --max-restarts 1", ""))] == [0, 0]


def test_second_launcher_of_a_machine_is_rejected(start):
    machines = [start(k, "-n 1 --max-restarts 1", WAIT) for k in range(2)]
    read_until(machines[0].stdout, "attempt")
    read_until(machines[1].stdout, "attempt")
    status, _, errors = finish(start(1, "-n 1 --max-restarts 1", WAIT))[0]
    assert status == 2 and "two launchers have --node-rank 1. Give each machine its own index." in errors
    machines[0].terminate()
    assert [result[0] for result in finish(*machines)] == [42, 42]


def test_other_programs_at_the_port_are_ignored(start, port):
    first = start(0, "-n 1 --max-restarts 1", "")
    hello = '{"kind": "Hello", "protocol": "jdist-job-1", "machine": "x", "num_machines": 2, "num_slots": 1, "program": "", '
    messages = (b"", b"GET / HTTP/1.1\r\n\r\n", b"{}\n", b'{"kind": "Alive"}\n', b"\xff" * 100 + b"\n")
    for data in (*messages, (hello + '"name": ""}\n').encode()):
        while True:
            try:
                with socket.create_connection(("127.0.0.1", port + 1)) as connection:
                    connection.sendall(data)
                break
            except ConnectionRefusedError:
                assert first.poll() is None
    assert [result[0] for result in finish(first, start(1, "-n 1 --max-restarts 1", ""))] == [0, 0]


@pytest.mark.slow
def test_lost_machine_is_awaited_and_its_processes_have_ended(start):
    program = "if r == 0: " + WAIT
    first, second = (start(k, "-n 1 --max-restarts 1", program) for k in range(2))
    first_lines = read_until(first.stdout, "attempt")
    read_until(second.stdout, "attempt")
    second.kill()
    lines = read_until(first.stderr, "waits for machine 1 of 2")
    assert "at least 2 processes must run, and 1 can run now." in lines[-1]
    (status0, output, errors), (status1, _, _) = finish(first, start(1, "-n 1 --max-restarts 1", program))
    assert (status0, status1) == (0, 0)
    assert attempts("".join(first_lines) + output) == [(0, 0, 2), (0, 1, 2)]
    assert re.search(r"restart 1 of 1, .* machine 1 \(.*\) was lost: its launcher has ended\.\n", errors)


@pytest.mark.slow
def test_machine_that_does_not_answer_is_lost(start):
    machines = [start(k, "-n 1 --max-restarts 0 --answer-timeout 3", WAIT) for k in range(2)]
    read_until(machines[0].stdout, "attempt")
    read_until(machines[1].stdout, "attempt")
    machines[1].send_signal(signal.SIGSTOP)
    status, _, errors = finish(machines[0])[0]
    machines[1].send_signal(signal.SIGCONT)
    assert status == 1
    assert re.search(r"jdist run: machine 1 \(.*\) was lost: no answer for 3 seconds", errors)
    assert finish(machines[1])[0][0] == 1


def test_other_machines_end_with_machine_0(start):
    machines = [start(k, "-n 1 --max-restarts 1", WAIT) for k in range(2)]
    read_until(machines[1].stdout, "attempt")
    machines[0].kill()
    status, _, errors = finish(machines[1])[0]
    assert status == 1
    assert (
        "the connection to machine 0 was lost (its launcher has ended), and the processes of this machine were"
        in errors
    )


def test_signal_that_all_launchers_receive_is_one_signal(start):
    program = """
signal.signal(signal.SIGINT, lambda *_: print("ignored"))
print("ready")
while True: time.sleep(0.01)
"""
    machines = [start(k, "-n 1 --max-restarts 5", program) for k in range(2)]
    for launcher in machines:
        read_until(launcher.stdout, "ready")
    for count in (1, 2):
        for launcher in machines:
            launcher.send_signal(signal.SIGINT)
        if count == 1:
            for launcher in machines:
                read_until(launcher.stdout, "ignored")
    for status, _, errors in finish(*machines):
        assert status == 130
        assert errors.count("received SIGINT, and forwarded it") == errors.count("received a second SIGINT") == 1


@pytest.mark.parametrize("machine", [0, 1])
def test_signal_to_one_machine_ends_the_job_on_all(start, machine):
    machines = [start(k, "-n 1 --max-restarts 5", WAIT) for k in range(2)]
    read_until(machines[0].stdout, "attempt")
    read_until(machines[1].stdout, "attempt")
    machines[machine].terminate()
    for status, output, errors in finish(*machines):
        assert (status, output.count("saved")) == (42, 1)
        assert "restart" not in errors and "received SIGTERM, and forwarded it to 1 processes." in errors


@pytest.mark.slow
def test_signal_ends_a_job_that_waits_for_machines(start):
    first = start(0, "-n 1 --max-restarts 5", WAIT)
    read_until(first.stderr, "waits for machine 1 of 2")
    first.send_signal(signal.SIGINT)
    assert finish(first)[0][:2] == (128 + signal.SIGINT, "")
    second = start(1, "-n 1 --max-restarts 5", WAIT)
    read_until(second.stderr, "tries to reach machine 0 at 127.0.0.1:")
    second.send_signal(signal.SIGINT)
    assert finish(second)[0][:2] == (128 + signal.SIGINT, "")


@pytest.mark.slow
def test_machines_that_do_not_connect_in_time_are_an_error(start):
    status, output, errors = finish(start(0, "-n 1 --max-restarts 1 --join-timeout 0.5", WAIT))[0]
    assert (status, output) == (1, "")
    assert "the job ends: machine 1 of 2 has not connected within 0.5 seconds. Start `jdist run` there" in errors
    status, output, errors = finish(start(1, "-n 1 --max-restarts 1 --join-timeout 0.5", WAIT))[0]
    assert (status, output) == (2, "")
    assert re.search(r"machine 0 could not be reached at 127.0.0.1:\d+ within 0.5 seconds: Connection refused.", errors)


@pytest.mark.slow
def test_elastic_job_continues_without_a_lost_machine_and_with_one_that_connects(start):
    options = "--elastic 1:4 --rejoin-after 6"  # also the time in which the second machine has to connect
    program = "if r < 2: " + WAIT
    first, second = (start(k, options, program) for k in range(2))
    read_until(second.stdout, "attempt")
    second.kill()
    read_until(first.stdout, "attempt 1 with 2")
    (status0, output0, errors0), (status1, output1, _) = finish(first, start(1, options, program))
    assert (status0, status1) == (0, 0), errors0
    assert set(attempts(output1)) == {(2, 2, 4), (3, 2, 4)}
    assert {(0, 2, 4), (1, 2, 4)} <= set(attempts(output0))
    assert "The job continues with 2 instead of 4 processes." in errors0
    assert "2 more processes can run on machine 1. The job continues with 4 instead of 2 processes." in errors0


def test_machine_leaves_an_elastic_job_after_a_signal(start):
    first, second = (start(k, "--elastic 1:2 --max-restarts 0", "if r == 0: " + WAIT) for k in range(2))
    read_until(first.stdout, "attempt")
    read_until(second.stdout, "attempt")
    second.terminate()
    (status0, output, errors), (status1, _, _) = finish(first, second)
    assert (status0, status1) == (0, 42), errors
    assert attempts(output)[-1] == (0, 1, 1)
    assert re.search(r"restart, .* machine 1 \(.*\) has left after a signal. The job continues with 1 instead", errors)
