"""`jdist run --max-restarts` and `--elastic` on one machine: what is restarted, and what is not. The programs do not import JAX."""

import os
import re
import signal
import socket
import time

import pytest

from launchers import children_of, is_running, read_until, wait_until_ended

pytestmark = pytest.mark.processes

RESTARTS = 'r = int(os.environ["JDIST_RESTARTS"])\n'


# All processes have started before one of them fails.
READY = """
open(f"ready-{r}-{i}", "w").close()
while not all(os.path.exists(f"ready-{r}-{k}") for k in range(int(os.environ["JDIST_NUM_PROCESSES"]))): time.sleep(0.01)
"""


def failing(line, attempts=1):
    """Returns a program in which process 1 runs a line in the first attempts, and the others wait for it."""
    return RESTARTS + f"print('attempt', r)\n{READY}\nif r < {attempts}:\n    if i == 1: {line}\n    signal.pause()\n"


# Restarts.


@pytest.mark.parametrize(
    "line, reason",
    [
        ("raise ValueError('no')", "exit status 1"),
        ("os.kill(os.getpid(), signal.SIGKILL)", "ended by SIGKILL (the machine may be out of memory)"),
        ("sys.exit(42)", "exit status 42 (it saved a checkpoint after a signal)"),
        ("os._exit(43)", "exit status 43 (a step, a collective or a barrier took longer than its time limit)"),
    ],
)
def test_job_starts_again_after_a_failure(run, line, reason):
    status, output, errors = run("-n 2 --max-restarts 1", failing(line))
    assert status == 0, errors
    assert sorted(output.splitlines()) == [f"[{i}] attempt {r}" for i in range(2) for r in range(2)]
    verb = "ended" if "42" in line else "failed"
    pattern = rf"jdist run: restart 1 of 1, [0-9.]+ seconds after this: process 1 {verb}: {re.escape(reason)}\.\n"
    assert len(re.findall(pattern, errors)) == 1, errors
    assert "failed first" not in errors


@pytest.mark.parametrize(
    "line",
    [
        "os.kill(os.getpid(), signal.SIGSTOP)",
        "import ctypes; ctypes.PyDLL(None).sleep(1000)",  # holds Python's lock
    ],
)
@pytest.mark.slow
def test_process_that_does_not_answer_is_killed_and_the_job_starts_again(run, line):
    status, output, errors = run("-n 2 --max-restarts 1 --answer-timeout 3", failing(line))
    assert status == 0, errors
    assert sorted(output.splitlines()) == [f"[{i}] attempt {r}" for i in range(2) for r in range(2)]
    assert "process 1 has not answered for " in errors and "It is killed after 3 seconds." in errors
    assert "process 1 failed: no answer for 3 seconds." in errors
    assert "seconds after this: process 1 failed: no answer for 3 seconds.\n" in errors


@pytest.mark.slow
def test_processes_that_were_stopped_together_with_the_launcher_are_not_killed(started):
    program = RESTARTS + "print('ready')\nwhile True: time.sleep(0.01)"
    launcher = started("-n 2 --max-restarts 1 --answer-timeout 3", program)
    read_until(launcher.stdout, "[0] ready", "[1] ready")
    pids = [*children_of(launcher.pid), launcher.pid]
    for number in (signal.SIGSTOP, signal.SIGCONT):
        for pid in pids:
            os.kill(pid, number)
        time.sleep(8)  # longer than the time limit and the pause that the launcher notices
    assert launcher.poll() is None
    launcher.terminate()
    assert "no answer" not in launcher.communicate(timeout=60)[1]


def test_after_the_last_restart_the_failure_of_the_last_attempt_is_reported(run):
    status, output, errors = run("-n 2 --max-restarts 2", failing("raise SystemExit(10 + r)", attempts=9))
    assert status == 12
    assert len(output.splitlines()) == 6
    assert "restart 2 of 2" in errors
    report = "jdist run: process 1 of 2 failed first: exit status 12. The end of its output:\nattempt 2\n"
    assert errors.endswith(report), errors


def test_without_restarts_left_nothing_is_started_again(run):
    status, output, _ = run("-n 2 --max-restarts 0", failing("sys.exit(3)"))
    assert (status, len(output.splitlines())) == (3, 2)


def test_each_attempt_has_another_port_unless_the_address_is_passed(run):
    program = RESTARTS + "print(os.environ['JDIST_COORDINATOR_ADDRESS'])\nif r < 1: sys.exit(1)"
    _, output, _ = run("-n 1 --max-restarts 1", program)
    assert len(set(output.splitlines())) == 2
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    # Process 0 ends with open connections, and the next one listens at the same port.
    program += f"""
import socket
server = socket.create_server({(address.partition(":")[0], int(address.partition(":")[2]))})
connected = socket.create_connection(server.getsockname())
accepted, _ = server.accept()
if r < 2: accepted.sendall(b"x"); os._exit(1)
"""
    options = f"-n 1 --nodes 1 --node-rank 0 --coordinator {address} --max-restarts 2"
    status, output, errors = run(options, program)
    assert (status, output.splitlines()) == (0, [f"[0] {address}"] * 3), errors


def test_process_that_has_reported_an_error_and_hangs_at_its_exit_is_killed(run):
    program = "import atexit, signal\natexit.register(signal.pause)\n" + failing("raise ValueError('no')")
    program += "atexit.unregister(signal.pause)"
    status, _, errors = run("-n 1 --max-restarts 1 --grace 100", program.replace("i == 1", "i == 0"))
    assert status == 0, errors
    assert "restart 1 of 1" in errors


def test_other_processes_that_ignore_sigterm_are_killed_after_the_grace_period(run):
    program = "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + failing("sys.exit(3)").replace("pause()", "pause")
    program = program.replace("    signal.pause\n", "    while True: time.sleep(0.01)\n")
    status, _, errors = run("-n 2 --max-restarts 1 --grace 0.2", program)
    assert status == 0 and "SIGKILL after 0.2 seconds" in errors


@pytest.mark.slow
def test_processes_of_a_failed_attempt_and_those_that_they_started_have_ended(run):
    program = 'child = subprocess.Popen([sys.executable, "-I", "-S", "-c", "import signal; signal.pause()"])\n'
    program += "print('ids', os.getpid(), child.pid)\n" + failing("os.kill(os.getpid(), signal.SIGKILL)")
    status, output, errors = run("-n 2 --max-restarts 1", program)
    assert status == 0, errors
    ids = [int(number) for line in re.findall("ids (.*)", output) for number in line.split()]
    assert len(ids) == 8 and not any(map(is_running, ids))


# Signals.


def test_signal_ends_the_job_without_a_restart(started):
    launcher = started("-n 2 --max-restarts 5", "print('ready'); time.sleep(60)")
    read_until(launcher.stdout, "[0] ready", "[1] ready")
    launcher.terminate()
    output, errors = launcher.communicate(timeout=60)
    assert (launcher.returncode, output) == (128 + signal.SIGTERM, "")
    assert "restart" not in errors and "failed" not in errors


@pytest.mark.parametrize("options", ["", "--max-restarts 5"])
def test_checkpoint_saved_after_a_signal_is_the_exit_status_of_the_job(started, options):
    program = "signal.signal(signal.SIGTERM, lambda *_: (time.sleep(0.2 * i), print('saved'), sys.exit(42)))\n"
    launcher = started(f"-n 2 {options}", program + "print('ready'); time.sleep(60)")
    read_until(launcher.stdout, "[0] ready", "[1] ready")
    launcher.terminate()
    output, errors = launcher.communicate(timeout=60)
    assert (launcher.returncode, sorted(output.splitlines())) == (42, ["[0] saved", "[1] saved"])
    assert "failed" not in errors and "restart" not in errors


def test_processes_end_with_a_launcher_that_is_killed(started):
    launcher = started("-n 2 --max-restarts 5", failing("sys.exit(1)") + "print('ids', os.getpid()); signal.pause()")
    lines = read_until(launcher.stdout, "[0] ids", "[1] ids")
    launcher.kill()
    wait_until_ended([int(line.split()[-1]) for line in lines if "ids" in line])


def test_closed_output_ends_the_job(started):
    launcher = started("-n 2 --max-restarts 5", "while True: print('line'); time.sleep(0.01)")
    launcher.stdout.readline()
    launcher.stdout.close()
    assert launcher.wait(timeout=60) == 128 + signal.SIGPIPE
    assert "restart" not in launcher.stderr.read()


# Elastic jobs. `--rejoin-after` is longer than an attempt takes to end and the next one to start, also on a loaded machine.

SAVING = (
    """
n = os.environ["JDIST_NUM_PROCESSES"]
signal.signal(signal.SIGTERM, lambda *_: (time.sleep(0.1 * i), print("saved"), sys.exit(42)))
print(f"attempt {r} with {n}, index {os.environ['JDIST_LOCAL_PROCESS_ID']}")
"""
    + READY
)


def test_elastic_job_continues_with_fewer_processes_and_later_with_more(run):
    program = RESTARTS + SAVING + "if r == 0 and i == 2: os._exit(5)\nif r < 2: time.sleep(60)"
    status, output, errors = run("--elastic 1:3 --rejoin-after 4", program)
    assert status == 0, errors
    attempts = [sorted(re.findall(rf"\[(\d)\] attempt {r} with (\d), index (\d)", output)) for r in range(3)]
    assert attempts == [[(str(i), str(n), str(i)) for i in range(n)] for n in (3, 2, 3)]
    assert output.count("saved") >= 2  # before the growth
    assert (
        "1 more process can run on machine 0. The processes of this command (2) receive SIGTERM, and SIGKILL after"
        in errors
    )
    assert "jdist run: restart 1 of 10, " in errors
    assert "process 2 failed: exit status 5. The job continues with 2 instead of 3 processes.\n" in errors
    growth = (
        r"jdist run: restart, [0-9.]+ seconds after this: 1 more process can run on machine 0. The job continues with 3"
    )
    assert re.search(growth, errors)


def test_elastic_job_keeps_its_smallest_number_of_processes(run):
    program = RESTARTS + SAVING + "if r < 3 and i == 0: os._exit(5)\nif r < 3: time.sleep(60)"
    status, output, errors = run("--elastic 1:2 --rejoin-after 100", program)
    assert status == 0, errors
    assert re.findall(r"\[0\] attempt \d with (\d)", output) == ["2", "1", "1", "1"]


@pytest.mark.slow
def test_failures_of_an_elastic_job_are_counted_and_restarts_with_more_processes_are_not(run):
    program = RESTARTS + SAVING + "if i == 1: os._exit(5)\ntime.sleep(60)"
    status, output, errors = run("--elastic 1:2 --rejoin-after 4 --max-restarts 1", program)
    assert status == 5
    assert re.findall(r"\[0\] attempt (\d) with (\d)", output) == [("0", "2"), ("1", "1"), ("2", "2")]
    assert errors.count("jdist run: restart") == 2


@pytest.mark.slow
def test_elastic_job_that_ends_instead_of_growing_has_succeeded(run):
    program = RESTARTS + "print(r)\nsignal.signal(signal.SIGTERM, lambda *_: sys.exit(0))\n" + READY
    program += "if i: os._exit(5)\nif r == 0: signal.signal(signal.SIGTERM, signal.SIG_DFL)\ntime.sleep(60)"
    status, output, errors = run("--elastic 1:2 --rejoin-after 4", program)
    assert (status, output.splitlines()[-1]) == (0, "[0] 1"), errors


def test_signal_ends_an_elastic_job(started):
    launcher = started("--elastic 1:2", RESTARTS + SAVING + "time.sleep(60)")
    read_until(launcher.stdout, "[0] attempt", "[1] attempt")
    launcher.terminate()
    _, errors = launcher.communicate(timeout=60)
    assert launcher.returncode == 42 and "restart" not in errors
