"""Runs a script in several processes on this machine, and ends all of them when one fails or the time limit is reached."""

import os
import pathlib
import socket
import subprocess
import sys
import time

ROOT = pathlib.Path(__file__).parent.parent.parent


def run_processes(script, count, devices_each, *args, seconds=120):
    """Runs `script` in `count` processes with `devices_each` CPU devices each; returns the output of each process.

    The arguments of the script are the address of the coordinator on the loopback interface, the number of processes, the index
    of the process, and `args`.

    Raises:
        RuntimeError: A process failed or exceeded the time limit; the message contains its output.
    """
    address = f"127.0.0.1:{_free_port()}"
    environment = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "JAX_NUM_CPU_DEVICES": str(devices_each),
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "examples")]),
    }
    processes = [
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
        while None in (codes := [process.poll() for process in processes]) and not any(codes):
            if time.monotonic() > deadline:
                raise RuntimeError(f"{script} was still running after {seconds} seconds.")
            time.sleep(0.05)
    finally:
        for process in processes:
            process.kill()
        outputs = [process.communicate()[0] for process in processes]
    for number, code in enumerate(codes):
        if code:
            raise RuntimeError(f"Process {number} of {script} ended with {code}:\n{outputs[number]}")
    return outputs


def _free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]
