"""A Ray cluster in namespaces of its own, in which only the loopback interface exists.

Ray listens on all interfaces, so it must not be reached from outside. The kernel ends all processes of the namespaces together.
"""

import contextlib
import os
import pathlib
import subprocess
import sys
import tempfile

import pytest

ROOT = pathlib.Path(__file__).parent.parent.parent
UNSHARE = ["unshare", "--net", "--pid", "--mount", "--fork", "--mount-proc", "--kill-child"]
UP = "import fcntl, socket, struct\nfcntl.ioctl(socket.socket(), 0x8914, struct.pack('16sh', b'lo', 1))\n"  # SIOCSIFFLAGS
OPTIONS = "--block --num-gpus=0 --include-log-monitor=false --disable-usage-stats"


def environment():
    """Returns environment variables for processes in the namespaces."""
    path = f"{pathlib.Path(sys.executable).parent}:{os.environ['PATH']}"
    return {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT), "RAY_DISABLE_IMPORT_WARNING": "1"}


def _options(num_cpus, store_bytes):
    return [*OPTIONS.split(), f"--num-cpus={num_cpus}", f"--object-store-memory={store_bytes}"]


@contextlib.contextmanager
def _folder():
    """Creates a folder for Ray. Not that of the test: the paths of Ray's sockets would be too long, with one more digit per node."""
    with tempfile.TemporaryDirectory(prefix="ray", ignore_cleanup_errors=True) as name:
        yield pathlib.Path(name)


@contextlib.contextmanager
def ray_node(prefix, *, num_cpus, store_bytes):
    """Adds a second node to a `ray_cluster`. All its processes end with the block, or with the process that it returns.

    Args:
        prefix: The command in front of a command that runs in the network of the cluster.
        num_cpus: The number of CPUs of the node.
        store_bytes: The size of its object store.
    """
    isolate = [option for option in UNSHARE if option != "--net"]
    command = ["ray", "start", "--address=127.0.0.1:6379", *_options(num_cpus, store_bytes)]
    with _folder() as folder, (folder / "log").open("w+") as log:
        variables = {**environment(), "RAY_TMPDIR": str(folder)}
        with subprocess.Popen([*prefix, *isolate, *command], env=variables, stdout=log, stderr=log) as node:
            try:
                assert has_nodes(prefix, 2), (folder / "log").read_text()
                yield node
            finally:
                node.kill()  # the kernel then kills all processes of the namespace


def has_nodes(prefix, number):
    """Waits until a cluster has a number of nodes, and returns whether it has them after 100 seconds."""
    program = f"""
import time, ray
ray.init(address="auto", log_to_driver=False)
while sum(node["Alive"] for node in ray.nodes()) != {number}: time.sleep(0.2)
"""
    try:
        return not subprocess.run([*prefix, sys.executable, "-c", program], timeout=100, capture_output=True).returncode
    except subprocess.TimeoutExpired:
        return False


@contextlib.contextmanager
def ray_cluster(*, num_cpus, store_bytes):
    """Starts a cluster of one node, and returns the command in front of a command that runs in its network.

    The test is skipped where Ray is not installed, or where namespaces cannot be made.
    """
    pytest.importorskip("ray", reason="Ray is optional and not installed.")
    if subprocess.run([*UNSHARE, "true"], capture_output=True).returncode:
        pytest.skip("Namespaces, in which Ray cannot be reached from outside, cannot be made here.")
    options = [*_options(num_cpus, store_bytes), "--head", "--include-dashboard=false"]
    start = f"{UP}import os\nprint('up', flush=True)\nos.dup2(2, 1)\nos.execvp('ray', ['ray', 'start', *{options}])"
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(_folder())
        log = stack.enter_context((folder / "log").open("w+"))
        cluster = subprocess.Popen(
            [*UNSHARE, sys.executable, "-c", start],
            env={**environment(), "RAY_TMPDIR": str(folder)},
            stdout=subprocess.PIPE,
            stderr=log,
        )
        stack.enter_context(cluster)
        stack.callback(cluster.kill)  # the kernel then kills all processes of the namespace
        assert cluster.stdout.readline() == b"up\n", (folder / "log").read_text()
        (child,) = pathlib.Path(f"/proc/{cluster.pid}/task/{cluster.pid}/children").read_text().split()
        prefix = ["nsenter", "--net", "--target", child]
        check = "import ray; ray.init(address='auto', log_to_driver=False)"
        for _ in range(30):
            command = [*prefix, sys.executable, "-c", check]
            if not subprocess.run(command, capture_output=True, env=environment()).returncode:
                yield prefix
                return
            assert cluster.poll() is None, (folder / "log").read_text()
        pytest.fail((folder / "log").read_text())
