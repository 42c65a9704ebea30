"""Real processes on this machine: starts them together, and ends them all when one fails or time is up."""

import os
import pathlib
import socket
import subprocess
import sys
import time

ROOT = pathlib.Path(__file__).parent.parent.parent


def run_processes(script, count, devices_each, *args, seconds=120):
    """Runs `script` in `count` processes of `devices_each` CPU devices; returns what each one printed.

    The script gets the coordinator's address on the loopback interface, the number of processes, its own number, and
    `args`.

    Raises:
        RuntimeError: A process failed or took too long; the message holds what it printed.
    """
    address = f"127.0.0.1:{_free_port()}"
    environment = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "JAX_NUM_CPU_DEVICES": str(devices_each),
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "examples")]),
    }
    started = [
        subprocess.Popen(
            [sys.executable, script, address, str(count), str(number), *map(str, args)],
            env=environment,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        for number in range(count)
    ]
    deadline = time.monotonic() + seconds
    try:
        while None in (codes := [process.poll() for process in started]) and not any(codes):
            if time.monotonic() > deadline:
                raise RuntimeError(f"{script} was still running after {seconds} seconds.")
            time.sleep(0.05)
    finally:
        for process in started:
            process.kill()
        printed = [process.communicate()[0] for process in started]
    for number, code in enumerate(codes):
        if code:
            raise RuntimeError(f"Process {number} of {script} ended with {code}:\n{printed[number]}")
    return printed


def _free_port():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]
