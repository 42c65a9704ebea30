"""The checks of `jdist doctor`."""

import io
import json
import os
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from jdist._src.cluster.resolution import resolve_each
from jdist._src.cluster.resolver import ClusterNotFoundError, ClusterResolver
from jdist._src.launch.attempt import AttemptSettings, run_attempt
from jdist._src.launch.child_processes import reserved_address
from jdist._src.launch.command import Command
from jdist._src.launch.end_rules import EndTimes, status_text
from jdist._src.launch.output import Console
from jdist._src.launch.signals import received_signals
from jdist._src.launch.variables import process_variables, usable_cores

_MINIMUM_JAX = "0.10.2"
_GPU_PLUGINS = ("jax-cuda12-plugin", "jax-cuda13-plugin")
_MINIMUM_SHARED_MEMORY = 128 << 20
_START_SECONDS = 120.0
_CONNECT_SECONDS = 3.0


class Check(NamedTuple):
    """The result of one check.

    Attributes:
        name: The subject.
        detail: The observed state.
        advice: The remedy of a problem; empty if there is no problem.
        notes: Further lines.
    """

    name: str
    detail: str
    advice: str = ""
    notes: tuple[str, ...] = ()

    @property
    def status(self) -> str:
        """`"ok"` or `"problem"`."""
        return "problem" if self.advice else "ok"


def read_environment(environ: Mapping[str, str]) -> dict[str, Any]:
    """Returns the report of `jdist env`, from another process: JAX ends a process that has an unknown flag, or may hang."""
    command = [sys.executable, "-m", "jdist", "env", "--json"]
    try:
        done = subprocess.run(
            command, env=environ, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_START_SECONDS
        )
        return json.loads(done.stdout)
    except subprocess.TimeoutExpired:
        error = f"JAX did not start within {_START_SECONDS:g} seconds. Another process may use the accelerators"
    except ValueError:
        lines = done.stderr.strip().splitlines()  # pyright: ignore[reportPossiblyUnboundVariable]
        error = " ".join([status_text(done.returncode), *lines[-1:]])  # pyright: ignore[reportPossiblyUnboundVariable]
    return {"versions": {}, "devices": {"error": error}}


def all_checks(environ: Mapping[str, str], report: Mapping[str, Any]) -> Iterator[Check]:
    """Yields the results of the checks, the slowest last.

    Args:
        environ: The environment variables.
        report: The result of `read_environment`.
    """
    yield check_versions(report["versions"])
    yield check_devices(report["devices"], environ)
    yield check_flags(environ)
    yield check_cores(environ)
    yield check_shared_memory()
    outcomes = resolve_each(environ)
    yield check_cluster(outcomes)
    resolver = next((outcome for outcome in outcomes.values() if not isinstance(outcome, Exception)), None)
    if resolver is not None and resolver.num_processes > 1:
        yield check_coordinator(resolver)
    yield check_collective(environ)


def check_versions(versions: Mapping[str, str]) -> Check:
    """Returns whether the versions fit each other.

    Args:
        versions: The versions by the name of the package.
    """
    if not versions:
        return Check("versions", f"jdist and JAX cannot start in {sys.executable}", "See the check of the devices.")
    detail = ", ".join(f"{name} {versions[name]}" for name in ("jdist", "jax", "jaxlib", "python") if name in versions)
    if _numbers(versions["jax"]) < _numbers(_MINIMUM_JAX):
        return Check("versions", detail, f'jdist needs jax >= {_MINIMUM_JAX}: `python -m pip install -U "jax"`.')
    for plugin in _GPU_PLUGINS:
        if plugin in versions and _numbers(versions[plugin])[:3] != _numbers(versions["jaxlib"])[:3]:
            extra = plugin.split("-")[1]
            return Check(
                "versions",
                f"{detail}, {plugin} {versions[plugin]}",
                f"{plugin} and jaxlib must have the same version: "
                f'`python -m pip install -U "jax[{extra}]=={versions["jax"]}"`.',
            )
    return Check("versions", detail)


def check_devices(devices: Mapping[str, Any], environ: Mapping[str, str], folder: str = "/dev") -> Check:
    """Returns whether JAX starts, and uses the accelerators of this machine.

    Args:
        devices: The section `devices` of the report.
        environ: The environment variables.
        folder: The folder of the device files.
    """
    if "error" in devices:
        advice = "Check JAX_PLATFORMS, the installation of JAX for the accelerator, and that no other process uses it."
        return Check("devices", devices["error"], advice)
    kinds = ", ".join(f"{count} x {kind}" for kind, count in devices["kinds"].items())
    detail = f"{kinds} (platform {devices['platform']})"
    if devices["platform"] == "cpu" and not environ.get("JAX_PLATFORMS"):
        names = os.listdir(folder)
        for pattern, kind, extra in (("nvidia[0-9]+", "an NVIDIA GPU", "cuda"), ("accel_?[0-9]+", "a TPU", "tpu")):
            if any(re.fullmatch(pattern, name) for name in names):
                advice = f'This machine has {kind}: `python -m pip install -U "jdist[{extra}]"`.'
                return Check("devices", detail, advice)
    return Check("devices", detail)


def check_flags(environ: Mapping[str, str]) -> Check:
    """Returns whether the flags of XLA are in the variable that is read, and do not contradict each other.

    Args:
        environ: The environment variables.
    """
    text = environ.get("XLA_FLAGS", "").strip()
    flags = {name: environ[name].split() for name in ("XLA_FLAGS", "LIBTPU_INIT_ARGS") if environ.get(name)}
    detail = ", ".join(f"{len(words)} in {name}" for name, words in flags.items()) or "none"
    if text and not text.startswith("-") and not os.path.isfile(text):
        return Check("flags", f"XLA_FLAGS is {text!r}", "Write flags with `--`, or the path of a file of flags.")
    if wrong := [flag for flag in flags.get("XLA_FLAGS", []) if "xla_tpu" in flag]:
        return Check("flags", f"XLA_FLAGS contains {wrong[0]}", "JAX ends the process. Move it to LIBTPU_INIT_ARGS.")
    forced, count = re.search(r"device_count=(\d+)", text), environ.get("JAX_NUM_CPU_DEVICES")
    if forced and count and forced[1] != count:
        return Check(
            "flags",
            f"XLA_FLAGS forces {forced[1]} CPU devices, but JAX_NUM_CPU_DEVICES is {count}, which JAX uses",
            "Remove one of them.",
        )
    return Check("flags", detail)


def check_cores(environ: Mapping[str, str], folder: str = "/sys/fs/cgroup") -> Check:
    """Returns whether XLA starts more threads than this process has cores.

    Args:
        environ: The environment variables.
        folder: The control group of this process.
    """
    cores, all_cores = usable_cores(folder), usable_cores("/dev/null")
    detail = f"{cores} usable of {os.cpu_count()}"
    if cores < all_cores and "NPROC" not in environ:
        return Check(
            "cores",
            f"{detail}: the container has a CPU quota, but XLA starts {all_cores} threads",
            f"Set NPROC={cores}.",
        )
    return Check("cores", detail)


def check_shared_memory(folder: str = "/dev/shm") -> Check:
    """Returns whether there is shared memory, which worker processes of data loaders and NCCL use.

    Args:
        folder: The folder of the shared memory.
    """
    if not os.path.isdir(folder):
        return Check("shared memory", f"{folder} does not exist on this system")
    free = shutil.disk_usage(folder).free
    detail = f"{free / 2**20:,.0f} MiB free in {folder}"
    if free < _MINIMUM_SHARED_MEMORY:
        return Check("shared memory", detail, "Start the container with more, such as `docker run --shm-size=8g`.")
    return Check("shared memory", detail)


def check_cluster(outcomes: Mapping[str, ClusterResolver | ValueError]) -> Check:
    """Returns which resolver matched, and why the others did not.

    Args:
        outcomes: The result of `resolve_each`.
    """
    notes = tuple(f"{name}: {outcome}" for name, outcome in outcomes.items() if isinstance(outcome, Exception))
    for name, outcome in outcomes.items():
        if isinstance(outcome, ClusterNotFoundError):
            continue
        if isinstance(outcome, Exception):
            return Check("cluster", f"the settings of {name} are not valid", str(outcome), notes)
        address = f", coordinator {outcome.coordinator_address}" if outcome.num_processes > 1 else ""
        detail = f"{name}: process {outcome.process_id} of {outcome.num_processes}{address}"
        return Check("cluster", detail, notes=notes)
    return Check("cluster", "none: this program runs alone", notes=notes)


def check_coordinator(resolver: ClusterResolver) -> Check:
    """Returns whether process 0 can listen at the address of the coordinator, and this process can reach it.

    Args:
        resolver: The resolver.
    """
    address = resolver.coordinator_address
    host, _, port = address.rpartition(":")
    host = host.strip("[]")
    try:
        family, _, _, _, socket_address = socket.getaddrinfo(host, int(port), type=socket.SOCK_STREAM)[0]
    except OSError as error:
        advice = (
            f"Use a name or an address of process 0 that this machine can resolve; check with `getent hosts {host}`."
        )
        return Check("coordinator", f"{address}: the host {host!r} cannot be resolved ({error.strerror})", advice)
    detail = f"{address} ({socket_address[0]})"
    with socket.socket(family) as probe:
        if resolver.process_id == 0:
            try:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind(("", socket_address[1]))
                probe.listen()
            except OSError as error:
                advice = f"End the program that uses it (`ss -ltnp 'sport = :{port}'`), or choose another port."
                return Check("coordinator", f"{detail}: process 0 cannot listen on the port ({error.strerror})", advice)
            return Check("coordinator", f"{detail}: the port is free on this machine, which has process 0")
        probe.settimeout(_CONNECT_SECONDS)
        try:
            probe.connect(socket_address)
        except ConnectionRefusedError:
            return Check("coordinator", f"{detail}: the host responds, and process 0 does not listen yet")
        except OSError as error:
            advice = f"Check that process 0 runs, and that the network and its firewalls permit port {port}."
            return Check("coordinator", f"{detail}: no connection ({error.strerror or error})", advice)
        return Check("coordinator", f"{detail}: process 0 listens")


def check_collective(environ: Mapping[str, str]) -> Check:
    """Returns whether two processes of this machine can join each other and compute an all-reduce on CPU devices.

    Args:
        environ: The environment variables.
    """
    output = io.StringIO()
    with reserved_address() as address:
        environments = process_variables(
            {**environ, "JAX_PLATFORMS": "cpu"},
            coordinator=address,
            num_processes=2,
            first_process=0,
            num_local_processes=2,
            devices_per_process=1,
            cores=usable_cores(),
        )
        command = Command("module", "jdist._src.command_line.loopback", [])
        with received_signals() as signals:
            settings = AttemptSettings(EndTimes(grace_seconds=1.0), Console(output, output), signals)
            result = run_attempt(command, environments, settings)
    if (failure := result.first_failure) is None:
        return Check(
            "collective", "two processes of this machine joined and computed a sum over the loopback interface"
        )
    return Check(
        "collective",
        f"process {failure.process} of 2 failed: {status_text(failure.status)}",
        "Check that the name of this host can be resolved (`getent hosts $(hostname)`) and that a firewall permits connections "
        "over the loopback interface.",
        tuple(failure.text.splitlines()[-5:]),
    )


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", version)[:3]))
