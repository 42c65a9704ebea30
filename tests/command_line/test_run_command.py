"""`jdist run`: output, failures, signals, and the end of the processes in every case. The programs do not import JAX."""

import argparse
import os
import pty
import re
import signal
import socket
import subprocess
import sys

import pytest

from jdist._src.command_line.main import main
from jdist._src.command_line.run_options import add_arguments, set_number_of_processes
from jdist._src.launch.output import PrefixedLines, failure_text
from jdist._src.launch.variables import divisible_gpus, process_variables, usable_cores

from launchers import COMMAND, PROCESS, ROOT, children_of, is_running, read_until, wait_until_ended

# The program.


def test_each_process_runs_the_script_with_its_arguments_its_index_and_unbuffered_output(run, tmp_path):
    program = 'print(__name__, __file__, sys.path[0], sys.argv, os.environ["JDIST_NUM_PROCESSES"], sys.stdin.read())\n'
    program += 'print("error", file=sys.stderr); os._exit(0)'  # without a flush
    status, output, errors = run("-n 2", program, "-n", "3", "--help", "--", "-x")
    assert status == 0, errors
    script = f"__main__ {tmp_path}/train.py {tmp_path} ['train.py', '-n', '3', '--help', '--', '-x'] 2 \n"
    assert sorted(output.splitlines(True)) == [f"[0] {script}", f"[1] {script}"]
    assert sorted(errors.splitlines()) == ["[0] error", "[1] error"]


def test_modules_and_worker_processes_run_as_under_python(run, tmp_path):
    (tmp_path / "package").mkdir()
    program = PROCESS + "import concurrent.futures, multiprocessing\ndef square(x):\n    return x * x\n"
    program += "if __name__ == '__main__':\n    context = multiprocessing.get_context('spawn')\n"
    program += "    with concurrent.futures.ProcessPoolExecutor(1, mp_context=context) as pool:\n"
    program += "        print(list(pool.map(square, [2, 3])), sys.argv[1:], sys.path[0])\n"
    (tmp_path / "package/work.py").write_text(program)
    launcher = subprocess.run(
        [*COMMAND, "-n", "1", "-m", "package.work", "-x"],
        cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert launcher.stdout == f"[0] [4, 9] ['-x'] {tmp_path}\n", launcher.stderr


def test_lines_of_several_processes_are_complete(run):
    program = "for k in range(300):\n    for part in (f'{i}-{k}-', 'x' * 2000, '\\n'): sys.stdout.write(part)"
    status, output, _ = run("-n 3", program)
    assert status == 0
    lines = output.splitlines()
    for i in range(3):
        assert [line for line in lines if line[1] == str(i)] == [f"[{i}] {i}-{k}-" + "x" * 2000 for k in range(300)]
    assert len(lines) == 900


def test_prefixed_lines_divide_long_lines_and_end_incomplete_and_overwritten_lines():
    written = []
    lines = PrefixedLines(b"> ", written.append)
    for data in (b"a\r", b"\nb", b"", b"c\n\n10%\r", b"20%", b"\r30%\nend"):
        lines.feed(data)
    assert b"".join(written) == b"> a\n> bc\n> \n> 30%\n"
    assert lines.tail() == [b"a", b"bc", b"", b"30%", b"end"]
    lines.close()
    lines.close()
    assert written.pop() == b"> end\n"
    lines.feed(b"x" * 70_000)
    assert len(written.pop()) == 70_003
    for _ in range(1000):
        lines.feed(b"\rprogress" * 100)
    assert written[-1] == b"> 30%\n" and lines.tail()[-1] == b"progress"


def test_prefix_is_colored_on_a_terminal_only(started):
    for environment, prefix in (({}, "\x1b[32m[0]\x1b[0m "), ({"NO_COLOR": "1"}, "[0] ")):
        terminal, child = pty.openpty()
        launcher = started(
            "-n 1", 'print("text"); print("error", file=sys.stderr)', stdout=child, environment=environment
        )
        os.close(child)
        with os.fdopen(terminal) as output:
            assert output.readline() == f"{prefix}text\n"
        assert launcher.communicate(timeout=60)[1] == "[0] error\n"


# Failures.


def test_first_failure_ends_the_other_processes_and_is_shown_at_the_end_with_its_traceback(run):
    program = """
def work():
    try:
        {}["key"]
    except KeyError as error:
        raise ValueError("no value") from error
if i == 1:
    work()
signal.pause()
"""
    status, output, errors = run("-n 3", program)
    assert (status, output) == (1, "")
    others, _, report = errors.partition(
        "jdist run: process 1 of 3 failed first: exit status 1. The end of its output:\n"
    )
    assert (
        "\njdist run: process 1 failed: exit status 1. The other processes of this command (2) receive SIGTERM"
        in others
    )
    traceback = re.sub(r'File ".*/', 'File "', re.sub(r"\n *[\^~]+(?=\n)", "", report))
    assert (
        traceback
        == """Traceback (most recent call last):
  File "train.py", line 5, in work
    {}["key"]
KeyError: 'key'

The above exception was the direct cause of the following exception:

Traceback (most recent call last):
  File "train.py", line 9, in <module>
    work()
  File "train.py", line 7, in work
    raise ValueError("no value") from error
ValueError: no value
"""
    )


@pytest.mark.parametrize(
    "line, expected, text",
    [
        ("sys.exit('message')", 1, "exit status 1. The end of its output:\nlast line\nmessage\n"),
        ("os._exit(7)", 7, "exit status 7. The end of its output:\nlast line\n"),
        ("os.kill(os.getpid(), signal.SIGKILL)", 137, "ended by SIGKILL. The machine may be out of memory. The end"),
        ("compile('1 +', 'file.py', 'exec')", 1, '  File "file.py", line 1\n    1 +'),
        ("sys.excepthook = lambda *error: print('own report', file=sys.stderr); 1 / 0", 1, "last line\nown report\n"),
        ("raise KeyboardInterrupt", 130, "ended by SIGINT. The end of its output:\nTraceback"),
    ],
)  # fmt: skip
def test_exit_status_is_that_of_the_first_failure(run, line, expected, text):
    status, _, errors = run("-n 2", f"if i == 0: print('last line', file=sys.stderr); {line}\nsignal.pause()")
    assert status == expected, errors
    assert text in errors.partition("jdist run: process 0 of 2 failed first: ")[2]


def test_failure_text_is_the_last_traceback_or_the_last_lines():
    traceback = [b"Traceback (most recent call last):", b"  f()", b"ValueError: no"]
    assert failure_text([*traceback, b"caught", *traceback], []) == b"\n".join(traceback).decode()
    assert failure_text([], [b"a", b"b", b""]) == "a\nb"
    assert failure_text([b"\xff", b"c"], [b"a"]) == "\ufffd\nc"


def test_process_that_hangs_at_its_exit_is_reported_and_the_others_are_killed_after_the_grace_period(run):
    program = "import atexit, pathlib\natexit.register(signal.pause)\nready = pathlib.Path('ready')\n"
    program += "while i == 1:\n    if ready.exists(): sys.exit(5)\n    time.sleep(0.01)\n"
    program += "signal.signal(signal.SIGTERM, lambda *_: print('saved')); ready.touch()\nwhile True: time.sleep(0.01)"
    status, output, errors = run("-n 2 --grace 0.3", program)
    assert (status, output) == (5, "[0] saved\n")
    assert "process 1 failed: exit status 5." in errors and "SIGKILL after 0.3 seconds" in errors


def test_single_process_with_an_error_has_time_at_its_exit(run):
    program = "import atexit\natexit.register(lambda: (time.sleep(0.3), print('uploaded')))\nsys.exit(4)"
    assert run("-n 1 --grace 0.1", program)[:2] == (4, "[0] uploaded\n")


JOIN = "notice = sys.modules['_jdist_child'].write_notice; "  # as `jdist` does when it joins the processes


@pytest.mark.parametrize("other", ["sys.exit(0)", "notice('joining'); sys.exit()", "os._exit(0)"])
def test_process_that_ends_with_status_0_before_it_joins_the_others_is_a_failure(run, other):
    status, _, errors = run("-n 2", JOIN + f"\nif i == 1: print('last'); {other}\nnotice('joining'); signal.pause()")
    reason = "it ended with exit status 0 before it joined the others, which wait for it."
    assert status == 1 and f"process 1 of 2 failed first: {reason} The end of its output:\nlast\n" in errors


def test_process_that_ends_before_the_others_is_no_failure_if_none_waits_for_it(run):
    program = JOIN + "\nif i == 0: notice('joined'); notice('left'); sys.exit()\ntime.sleep(0.5)"
    assert run("-n 2", program)[0] == 0
    assert run("-n 2", "if i == 0: sys.exit()\ntime.sleep(0.5)")[0] == 0


@pytest.mark.slow
def test_process_that_has_joined_and_ends_without_its_exit_functions_is_a_failure(run):
    status, _, errors = run("-n 2", JOIN + "\nnotice('joined')\nif i == 1: os._exit(0)\nsignal.pause()")
    assert status == 1 and "it ended with exit status 0 without leaving the others, as `os._exit` does" in errors


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="only Linux lists the states of processes")
def test_process_that_is_stopped_is_reported_until_it_runs_again(started):
    launcher = started("-n 2", "if i == 1: print('id', os.getpid())\nsignal.pause()")
    pid = int(read_until(launcher.stdout, "[1] id")[-1].split()[-1])
    os.kill(pid, signal.SIGSTOP)
    (line,) = [line for line in read_until(launcher.stderr, "is stopped") if "is stopped" in line]
    assert (
        f"process 1 is stopped, by SIGSTOP or a debugger, and the others wait for it. `kill -CONT {pid}` continues"
        in line
    )
    os.kill(pid, signal.SIGCONT)
    read_until(launcher.stderr, "process 1 runs again.")
    launcher.terminate()
    assert launcher.wait(60) == 143


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="the system does not have this file")
@pytest.mark.parametrize("streams", [">/dev/full", ">/dev/full 2>&1"])
def test_full_disk_under_the_output_does_not_end_the_processes(streams, tmp_path):
    (tmp_path / "train.py").write_text(
        "import pathlib, sys\nfor n in range(3): print(n, flush=True)\npathlib.Path('done').touch()"
    )
    done = subprocess.run(
        f"{sys.executable} -m jdist run -n 1 train.py {streams}", shell=True, cwd=tmp_path, capture_output=True, text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(map(os.path.abspath, sys.path))},
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (0, "") and (tmp_path / "done").exists(), done.stderr
    if "2>" not in streams:
        assert "standard output cannot be written: No space left on device. The processes continue." in done.stderr
        assert "the last 18 bytes of standard output could not be written: No space left on device." in done.stderr


# Signals.


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_signal_is_forwarded_and_is_not_a_failure_and_all_processes_end(started, number):
    launcher = started("-n 2", "print('ready'); time.sleep(60)")
    read_until(launcher.stdout, "[0] ready", "[1] ready")
    children = children_of(launcher.pid)  # also the guard
    assert len(children) == 3
    launcher.send_signal(number)
    _, errors = launcher.communicate(timeout=60)
    assert launcher.returncode == 128 + number
    assert f"jdist run: received {number.name}, and forwarded it to 2 processes." in errors
    assert "failed" not in errors
    assert not any(map(is_running, children))


def test_processes_that_handle_a_signal_have_time_to_save_and_their_exit_status_counts(started):
    program = "signal.signal(signal.SIGTERM, lambda *_: (time.sleep(0.3), print('saved'), sys.exit(0)))\n"
    launcher = started("-n 2", program + "print('ready'); time.sleep(60)")
    read_until(launcher.stdout, "[0] ready", "[1] ready")
    launcher.terminate()
    output, _ = launcher.communicate(timeout=60)
    assert (launcher.returncode, sorted(output.splitlines())) == (0, ["[0] saved", "[1] saved"])


def test_processes_that_ignore_a_signal_are_killed_after_the_grace_period(started):
    program = "signal.signal(signal.SIGTERM, lambda *_: None)\nprint('ready')\nwhile True: time.sleep(0.01)"
    launcher = started("-n 2 --grace 0.3", program)
    read_until(launcher.stdout, "[0] ready", "[1] ready")
    launcher.terminate()
    _, errors = launcher.communicate(timeout=60)
    assert launcher.returncode == 128 + signal.SIGTERM
    assert "forwarded it to 2 processes. SIGKILL follows after 0.3 seconds." in errors and "failed" not in errors


def test_second_interrupt_kills_processes_that_ignore_the_first(started):
    program = "signal.signal(signal.SIGINT, lambda *_: print('ignored'))\nprint('ready')\nwhile True: time.sleep(0.01)"
    launcher = started("-n 2", program)
    read_until(launcher.stdout, "[0] ready", "[1] ready")
    launcher.send_signal(signal.SIGINT)
    read_until(launcher.stdout, "[0] ignored", "[1] ignored")
    launcher.send_signal(signal.SIGINT)
    _, errors = launcher.communicate(timeout=60)
    assert launcher.returncode == 130
    assert "received a second SIGINT, and killed the processes." in errors and "failed" not in errors


# The end of all processes.

WITH_CHILD = """
child = subprocess.Popen([sys.executable, "-I", "-S", "-c", "import signal; signal.pause()"])
print("ids", os.getpid(), child.pid)
"""


def read_ids(launcher, count):
    ids = []
    while len(ids) < 2 * count:
        ids += map(int, re.findall(r"\d+", launcher.stdout.readline().partition("ids ")[2]))
    return ids


IN_SESSION = WITH_CHILD.replace('pause()"])', 'pause()"], start_new_session=True)')
on_linux = pytest.mark.skipif(sys.platform != "linux", reason="only Linux shows the environment of processes")


@pytest.mark.parametrize("program", [WITH_CHILD, pytest.param(IN_SESSION, marks=on_linux)], ids=["group", "session"])
def test_processes_and_those_that_they_started_end_with_a_launcher_that_is_killed(started, program):
    launcher = started("-n 2", program + "signal.pause()")
    ids = read_ids(launcher, 2)
    assert all(map(is_running, ids))
    os.kill(ids[0], signal.SIGSTOP)
    launcher.kill()
    wait_until_ended(ids)


@pytest.mark.slow
def test_processes_that_a_program_started_end_with_it(run):
    status, output, _ = run("-n 1", WITH_CHILD)
    assert status == 0
    wait_until_ended(list(map(int, re.findall(r"\d+", output.partition("ids ")[2]))))


@on_linux
def test_process_in_a_session_ends_after_a_failure_and_survives_without_the_mark(run):
    keep = IN_SESSION.replace(
        "start_new", "env={k: v for k, v in os.environ.items() if k != 'JDIST_LAUNCH'}, start_new"
    )
    _, output, _ = run("-n 1", IN_SESSION + keep + "sys.exit(3)")
    ended, kept = (int(line.split()[-1]) for line in output.splitlines())
    try:
        wait_until_ended([ended])
        assert is_running(kept)
    finally:
        os.kill(kept, signal.SIGKILL)


def test_closed_output_ends_the_processes(started):
    launcher = started("-n 2", "while True: print('line'); time.sleep(0.01)")
    launcher.stdout.readline()
    launcher.stdout.close()
    assert launcher.wait(timeout=60) == 128 + signal.SIGPIPE
    assert launcher.stderr.read().count("\n") == 0


# Several machines, devices and threads.


def test_processes_of_several_machines_have_consecutive_indices_and_one_coordinator(run):
    with socket.socket() as probe:
        probe.bind(("", 0))
        address = f"localhost:{probe.getsockname()[1]}"
    program = (
        'print(*(os.environ[f"JDIST_{name}"] for name in "NUM_PROCESSES LOCAL_PROCESS_ID COORDINATOR_ADDRESS".split()))'
    )
    for rank in range(2):
        status, output, _ = run(f"-n 2 --nodes 2 --node-rank {rank} --coordinator {address}", program)
        assert (status, sorted(output.splitlines())) == (0, [f"[{2 * rank + i}] 4 {i} {address}" for i in range(2)])


def test_variables_divide_the_cores_and_do_not_change_a_number_that_is_set():
    settings = {"coordinator": "h:1", "num_processes": 2, "first_process": 0}
    variables = process_variables({"OMP_NUM_THREADS": "7"}, num_local_processes=2, cores=5, **settings)
    assert (variables[1]["NPROC"], variables[1]["OMP_NUM_THREADS"]) == ("2", "7")
    assert process_variables({}, num_local_processes=2, cores=1, **settings)[0]["NPROC"] == "1"
    assert "NPROC" not in process_variables({}, num_local_processes=1, cores=4, **settings)[0]
    assert "JAX_NUM_CPU_DEVICES" not in variables[0]
    variables = process_variables(
        {"JAX_NUM_CPU_DEVICES": "8"},
        num_local_processes=2,
        devices_per_process=3,
        gpus=["a", "b", "c", "d"],
        **settings,
    )
    assert [(v["JAX_NUM_CPU_DEVICES"], v["CUDA_VISIBLE_DEVICES"]) for v in variables.values()] == [
        ("3", "a,b"),
        ("3", "c,d"),
    ]


def test_usable_cores_are_those_of_the_affinity_and_of_the_quota(tmp_path):
    cores = len(os.sched_getaffinity(0))
    assert usable_cores(str(tmp_path)) == cores  # no control groups
    for text, expected in {"max 100000": cores, "100000 100000": 1, "20000 100000": 1, "9900000 100000": cores}.items():
        (tmp_path / "cpu.max").write_text(text + "\n")
        assert usable_cores(str(tmp_path)) == expected


def test_gpus_are_divided_over_the_processes_if_jax_can_use_them(tmp_path, monkeypatch):
    for name in ("nvidia0", "nvidia1", "nvidia2", "nvidia3", "nvidiactl", "nvidia-uvm"):
        (tmp_path / name).touch()
    shares = lambda environ, *counts: divisible_gpus(environ, *counts, str(tmp_path))
    assert shares({}, 2, None) is None  # JAX's plugin is not installed
    (tmp_path / "jax_cuda13_plugin.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    assert shares({"JAX_PLATFORMS": "cpu"}, 2, None) is None
    assert shares({"JAX_PLATFORMS": "cuda,cpu"}, 2, None) == ["0", "1", "2", "3"]
    assert shares({"CUDA_VISIBLE_DEVICES": "GPU-a, 3"}, 2, 1) == ["GPU-a", "3"]
    assert shares({"CUDA_VISIBLE_DEVICES": ""}, 2, None) is None
    assert shares({}, 3, 1) == ["0", "1", "2"]
    for environ, counts, message in (
        ({}, (8, None), "8 processes with 1 GPU per process need 8 GPUs, but this machine has 4 GPUs. Start"),
        (
            {"CUDA_VISIBLE_DEVICES": "1"},
            (2, 2),
            "need 4 GPUs, but CUDA_VISIBLE_DEVICES contains 1 GPU. .* set JAX_PLATF",
        ),
        ({}, (3, None), "4 GPUs, which cannot be divided evenly over 3 .* `--devices-per-process 1` to leave 1"),
    ):
        with pytest.raises(ValueError, match=message):
            shares(environ, *counts)


@pytest.mark.parametrize("options, processes", [([], 4), (["--devices-per-process", "2"], 2), (["-n", "3"], 3)])
def test_default_number_of_processes_is_one_per_gpu_or_one(options, processes, tmp_path, monkeypatch):
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    for variable in ("JAX_PLATFORMS", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3")
    without_plugin, with_plugin = (parser.parse_args([*options, "train.py"]) for _ in range(2))
    set_number_of_processes(without_plugin)
    assert without_plugin.processes == (3 if "-n" in options else 1)
    (tmp_path / "jax_cuda13_plugin.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    set_number_of_processes(with_plugin)
    assert with_plugin.processes == processes


def test_one_process_runs_without_a_number_and_without_gpus(run):
    program = "print(os.environ['JDIST_NUM_PROCESSES'], sys.argv[1:])"
    assert run("", program, "-n", "7")[:2] == (0, "[0] 1 ['-n', '7']\n")


# Invalid commands.


@pytest.mark.parametrize(
    "command, message",
    {
        "-n 2 absent.py": "jdist run: 'absent.py' is not a file in {folder}. Pass the path of a Python script, without",
        "-n 2 python train.py": "jdist run: 'python' is not a file in",
        "-n 2 -m absent.work": "jdist run: the module 'absent.work' is not found. Pass its name without `.py`",
        "-n 2 -m ../train.py": "jdist run: the module '../train.py' is not found.",
        "-n 0 train.py": "argument -n/--processes: must be an integer >= 1, got '0'",
        "-n two train.py": "argument -n/--processes: must be an integer >= 1, got 'two'",
        "--engine ray train.py": "--engine ray needs -n, the number of processes on the cluster.",
        "-n 2": "the following arguments are required: program",
        "-n 2 --devices-per-process 0 train.py": "argument --devices-per-process: must be an integer >= 1, got '0'",
        "-n 2 --grace -1 train.py": "argument --grace: must be a number of seconds >= 0, got '-1'",
        "-n 2 --grace soon train.py": "argument --grace: must be a number of seconds >= 0, got 'soon'",
        "-n 2 --nodes 2 train.py": "jdist run: --nodes without --node-rank and --coordinator. Pass all of",
        "-n 2 --node-rank 1 --coordinator h:1 train.py": "--node-rank, --coordinator without --nodes.",
        "-n 2 --nodes 2 --node-rank 2 --coordinator h:1 train.py": "--node-rank must be 0 to 1 for --nodes 2, got 2.",
        "-n 2 --coordinator h train.py": "must be a host and a port, such as 10.0.0.1:8476, got 'h'",
        "-n 2 --coordinator h:70000 train.py": "must be a host and a port, such as 10.0.0.1:8476, got 'h:70000'",
        "-np 2 train.py": "-np is an option of another launcher. Write -n N, the number of processes on this machine.",
        "--nproc_per_node=2 train.py": "--nproc_per_node is an option of another launcher. Write -n N",
        "--num_processes 2 train.py": "--num_processes is an option of another launcher. Write -n N",
        "-n 2 --nnodes 2 train.py": "--nnodes is an option of another launcher. Write --nodes M",
        "-n 2 --master_addr h train.py": "--master_addr is an option of another launcher. Write --coordinator HOST:PORT",
        "-n 2 --unknown train.py": "unrecognized arguments: --unknown",
        "-n 2 --max-restarts -1 train.py": "argument --max-restarts: must be an integer >= 0, got '-1'",
        "-n 2 --max-restarts all train.py": "argument --max-restarts: must be an integer >= 0, got 'all'",
        "--elastic 2 train.py": "argument --elastic: must be MIN:MAX, integers with 1 <= MIN <= MAX, such as 2:8, got '2'",
        "--elastic 3:2 train.py": "argument --elastic: must be MIN:MAX, integers with 1 <= MIN <= MAX, such as 2:8, got '3:2'",
        "--elastic 0:2 train.py": "argument --elastic: must be MIN:MAX, integers with 1 <= MIN <= MAX, such as 2:8, got '0:2'",
        "-n 2 --elastic 1:2 train.py": "argument --elastic: not allowed with argument -n/--processes",
        "--elastic 1:4 --nodes 2 --node-rank 1 --coordinator h:1 train.py": "--elastic with --nodes 2: the launchers of several ",
        "-n 1 --max-restarts 1 --nodes 2 --node-rank 1 --coordinator h:1 train.py": "--max-restarts with --nodes 2: the launchers of "
        "several machines do not restart each other's processes. Use a Ray cluster (--engine ray instead of --nodes, --node-rank and "
        "--coordinator), or remove --max-restarts and let the scheduler restart the job, as `sbatch --requeue` of Slurm or "
        "`failurePolicy.maxRestarts` of a Kubernetes JobSet.",
        "-n 2 --answer-timeout 9 train.py": "--answer-timeout has no effect without --max-restarts or --elastic. Add --max-",
        "-n 2 --max-restarts 1 --answer-timeout 0 train.py": "--answer-timeout: must be a number of seconds > 0, got '0'",
        "-n 2 --max-restarts 1 --rejoin-after 9 train.py": "--rejoin-after has no effect without --elastic. Add --elastic, or rem",
        "-n 2 --max-restarts 1 --join-timeout 9 train.py": "--join-timeout has no effect without --engine ray, and --max-restarts ",
    }.items(),
)  # fmt: skip
def test_invalid_command_has_status_2_and_starts_nothing(command, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "train.py").write_text("print('started')")
    assert main(["run", *command.split()]) == 2
    output, errors = capsys.readouterr()
    assert output == "" and message.format(folder=tmp_path) in " ".join(errors.split())


def test_number_of_processes_after_the_program_is_its_argument_and_noted(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("import sys; print(sys.argv[1:])")
    assert main(["run", "train.py", "-n", "2"]) == 0
    output, errors = capfd.readouterr()
    assert output == "[0] ['-n', '2']\n"
    assert "`-n 2` after the program is an argument of train.py. To start 2 processes, write `jdist run -n 2" in errors
    assert main(["run", "-n", "1", "train.py", "-n", "2"]) == 0
    assert capfd.readouterr() == ("[0] ['-n', '2']\n", "")


def test_port_in_use_is_an_error_on_machine_0_only(run):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        options = f"-n 1 --nodes 2 --coordinator 127.0.0.1:{port} --node-rank "
        status, output, errors = run(options + "0", "print('started')")
        assert (status, output) == (2, "")
        assert f"port {port} of --coordinator 127.0.0.1:{port} cannot be used on this machine" in errors
        assert "Address already in use" in errors and "or pass another port on all machines" in errors
        assert run(options + "1", "print('started')")[0] == 0


def test_launcher_does_not_import_jax(tmp_path):
    (tmp_path / "train.py").write_text("print('started')")
    program = "import sys; from jdist_tools.__main__ import main; status = main(); print(status, 'jax' in sys.modules)"
    command = [sys.executable, "-c", program, "run", "-n", "1", "train.py"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60)
    assert done.stdout == "[0] started\n0 False\n", done.stderr


# Programs that use JAX.

JOINED = """
import jax, jax.numpy as jnp
from jax.experimental import multihost_utils
from jdist.cluster import resolve
resolve().initialize()
total = multihost_utils.process_allgather(jnp.float32(i + 1)).sum()
"""


def test_processes_join_each_other_with_their_devices(run):
    program = (
        JOINED + "print(jax.process_index(), jax.local_device_count(), jax.device_count(), total, file=sys.stderr)"
    )
    status, _, errors = run("-n 2 --devices-per-process 3", program)
    assert status == 0, errors
    assert {"[0] 0 3 6 3.0", "[1] 1 3 6 3.0"} <= set(errors.splitlines())  # gloo writes to standard output


@pytest.mark.slow
def test_error_of_a_joined_process_is_reported_although_jax_waits_at_exit_and_ignores_sigterm(run):
    program = JOINED + "if i == 1: raise ValueError('no')\nwhile True: multihost_utils.process_allgather(total)"
    status, _, errors = run("-n 2 --grace 1", program)
    assert status == 1
    assert errors.endswith("ValueError: no\n") and "process 1 of 2 failed first: exit status 1" in errors
