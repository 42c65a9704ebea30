"""`jdist doctor`: the command, and each check with the problems that it reports."""

import json
import os
import re
import shutil
import socket
from types import SimpleNamespace

import pytest

from jdist._src.cluster.resolution import resolve_each
from jdist._src.cluster.resolver import ClusterNotFoundError
from jdist._src.command_line import doctor_checks
from jdist._src.command_line.main import main
from jdist._src.core.version import __version__


@pytest.mark.slow
def test_report_as_json_has_a_result_per_check_and_the_environment(capsys):
    assert main(["doctor", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert [check["name"] for check in report["checks"]] == [
        "versions", "devices", "flags", "cores", "shared memory", "cluster", "collective"
    ]  # fmt: skip
    assert {check["status"] for check in report["checks"]} == {"ok"}
    assert report["environment"]["versions"]["jdist"] == __version__
    assert report["environment"]["devices"]["count"] == 8


def test_problems_are_lines_with_advice_and_the_exit_status_is_1(capsys, monkeypatch):
    monkeypatch.setattr(doctor_checks, "check_collective", lambda environ: doctor_checks.Check("collective", "omitted"))
    monkeypatch.setenv("XLA_FLAGS", "--xla_tpu_absent=true")  # JAX ends the process that reads it
    monkeypatch.setenv("TF_CONFIG", "{")
    assert main(["doctor"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("problem  versions: jdist and JAX cannot start in ")
    assert (
        lines[1].startswith("problem  devices: e") and "Unknown flag in XLA_FLAGS: --xla_tpu_absent=true. C" in lines[1]
    )
    assert lines[2] == (
        "problem  flags: XLA_FLAGS contains --xla_tpu_absent=true. JAX ends the process. Move it to LIBTPU_INIT_ARGS."
    )
    (cluster,) = [line for line in lines if "  cluster: " in line]
    assert cluster.startswith(
        "problem  cluster: the settings of TFConfigClusterResolver are not valid. TF_CONFIG is not"
    )
    assert "         - MPIClusterResolver: This process was not started by an MPI launcher: " in "\n".join(lines)


def test_versions_that_do_not_fit_are_problems():
    versions = {"jdist": "1.0", "jax": "0.12.0", "jaxlib": "0.12.0", "python": "3.12.1"}
    assert doctor_checks.check_versions(versions) == (
        "versions",
        "jdist 1.0, jax 0.12.0, jaxlib 0.12.0, python 3.12.1",
        "",
        (),
    )
    assert doctor_checks.check_versions(versions | {"jax-cuda13-plugin": "0.12.0.post1"}).status == "ok"
    plugin = doctor_checks.check_versions(versions | {"jax-cuda13-plugin": "0.11.2"})
    assert plugin.detail.endswith("jax-cuda13-plugin 0.11.2")
    assert plugin.advice.endswith('must have the same version: `python -m pip install -U "jax[cuda13]==0.12.0"`.')
    assert doctor_checks.check_versions(versions | {"jax": "0.9.1"}).advice.startswith("jdist needs jax >= 0.10.2: ")


def test_accelerator_that_jax_does_not_use_is_a_problem(tmp_path):
    devices = {"platform": "cpu", "kinds": {"cpu": 2}}
    result = lambda environ: doctor_checks.check_devices(devices, environ, str(tmp_path))
    (tmp_path / "nvidiactl").touch()
    assert result({}) == ("devices", "2 x cpu (platform cpu)", "", ())
    (tmp_path / "accel0").touch()
    assert result({}).advice == 'This machine has a TPU: `python -m pip install -U "jdist[tpu]"`.'
    (tmp_path / "nvidia0").touch()
    assert result({}).advice == 'This machine has an NVIDIA GPU: `python -m pip install -U "jdist[cuda]"`.'
    assert result({"JAX_PLATFORMS": "cpu"}).status == "ok"


def test_environment_of_a_program_that_does_not_start_is_an_error(monkeypatch):
    monkeypatch.setattr(doctor_checks, "_START_SECONDS", 0.01)
    report = doctor_checks.read_environment(os.environ)
    assert report["devices"]["error"].startswith("JAX did not start within 0.01 seconds. Another process may use")


@pytest.mark.parametrize(
    "environ, detail, advice",
    [
        ({}, "none", ""),
        ({"XLA_FLAGS": "--a --b", "LIBTPU_INIT_ARGS": "--c"}, "2 in XLA_FLAGS, 1 in LIBTPU_INIT_ARGS", ""),
        ({"XLA_FLAGS": "absent.txt"}, "XLA_FLAGS is 'absent.txt'", "Write flags with `--`, or the path of a file"),
        (
            {"XLA_FLAGS": "--xla_force_host_platform_device_count=8", "JAX_NUM_CPU_DEVICES": "4"},
            "XLA_FLAGS forces 8 CPU devices, but JAX_NUM_CPU_DEVICES is 4, which JAX uses",
            "Remove one of them.",
        ),
    ],
)
def test_flags_that_are_not_read_are_problems(environ, detail, advice):
    check = doctor_checks.check_flags(environ)
    assert check.detail == detail and check.advice.startswith(advice)
    assert check.status == ("problem" if advice else "ok")


def test_cpu_quota_below_the_number_of_threads_is_a_problem(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    (tmp_path / "cpu.max").write_text("200000 100000")
    check = doctor_checks.check_cores({}, str(tmp_path))
    assert re.fullmatch(
        r"2 usable of \d+: the container has a CPU quota, but XLA starts 8 threads", check.detail
    ) and check.advice == ("Set NPROC=2.")
    assert doctor_checks.check_cores({"NPROC": "2"}, str(tmp_path)).status == "ok"


def test_little_shared_memory_is_a_problem(tmp_path, monkeypatch):
    assert doctor_checks.check_shared_memory(str(tmp_path)).status == "ok"
    assert doctor_checks.check_shared_memory("/absent").detail == "/absent does not exist on this system"
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=64 << 20))
    check = doctor_checks.check_shared_memory(str(tmp_path))
    assert check.detail == f"64 MiB free in {tmp_path}" and "docker run --shm-size=8g" in check.advice


def test_resolver_that_matched_is_shown_with_the_reasons_of_the_others():
    environ = {"JDIST_COORDINATOR_ADDRESS": "h:1", "JDIST_NUM_PROCESSES": "4", "JDIST_PROCESS_ID": "3"}
    check = doctor_checks.check_cluster(resolve_each(environ))
    assert (check.status, check.detail) == ("ok", "EnvironmentClusterResolver: process 3 of 4, coordinator h:1")
    assert "TFConfigClusterResolver: TF_CONFIG is not set." in check.notes[0]
    check = doctor_checks.check_cluster({"A": ClusterNotFoundError("no A"), "B": ValueError("bad B")})
    assert check == ("cluster", "the settings of B are not valid", "bad B", ("A: no A", "B: bad B"))
    assert doctor_checks.check_cluster({}).detail == "none: this program runs alone"


def test_coordinator_that_cannot_be_used_is_a_problem(monkeypatch):
    def check(address, process_id):
        resolver = SimpleNamespace(coordinator_address=address, process_id=process_id)
        result = doctor_checks.check_coordinator(resolver)
        return result.status, result.detail, result.advice

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
        address = f"127.0.0.1:{port}"
        assert check(address, 1)[:2] == (
            "ok",
            f"{address} (127.0.0.1): the host responds, and process 0 does not listen yet",
        )
        probe.listen()
        assert check(address, 1)[:2] == ("ok", f"{address} (127.0.0.1): process 0 listens")
        status, detail, advice = check(address, 0)
        assert status == "problem" and detail.endswith("cannot listen on the port (Address already in use)")
        assert advice == f"End the program that uses it (`ss -ltnp 'sport = :{port}'`), or choose another port."
    assert check(address, 0)[1].endswith("the port is free on this machine, which has process 0")
    status, detail, advice = check("absent.invalid:1", 1)
    assert status == "problem" and "the host 'absent.invalid' cannot be resolved (" in detail
    assert "`getent hosts absent.invalid`" in advice
    monkeypatch.setattr(socket.socket, "connect", lambda *_: (_ for _ in ()).throw(TimeoutError("timed out")))
    status, detail, advice = check(address, 1)
    assert status == "problem" and detail.endswith(": no connection (timed out)") and f"permit port {port}" in advice


def test_collective_that_fails_is_a_problem_with_the_end_of_its_output(tmp_path):
    (tmp_path / "jax.py").write_text("raise RuntimeError('no JAX')")
    check = doctor_checks.check_collective({**os.environ, "PYTHONPATH": str(tmp_path)})
    assert check.status == "problem" and check.detail.endswith(" of 2 failed: exit status 1")
    assert check.notes[-1] == "RuntimeError: no JAX"
