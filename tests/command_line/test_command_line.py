"""The command line: the help, its verbs, and invalid commands."""

import json
import os
import signal
import subprocess
import sys

import jax
import pytest

import jdist
from jdist._src.command_line import start_devices
from jdist._src.command_line.devices import device_drawings, device_table
from jdist._src.command_line.env import describe_environment
from jdist._src.command_line.main import VERBS, main


@pytest.fixture
def run(capsys):
    """Returns a function from the words of a command to its exit status, output and errors."""

    def run(*words):
        status = main(words)
        return status, *capsys.readouterr()

    return run


def test_help_shows_each_verb_with_an_example_that_runs(run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    record = 'import jdist; jdist.ParameterServerStrategy(workers=1, record="run.log")'
    checked = "def step(x): return x\ndef check(): return (1.0,)"
    (tmp_path / "train.py").write_text(f'import os\nif "JDIST_REPLAY" in os.environ: {record}\n{checked}')
    log = {"format": 2, "workers": 1, "arguments": ["train.py"], "folder": str(tmp_path)}
    (tmp_path / "run.log").write_text(json.dumps(log) + '\n{"end": 0}\n')
    plan = "lambda: jdist.plan(jdist.OneDeviceStrategy('cpu:0'), lambda w: (w, None), lambda: 1.0)"
    (tmp_path / "train_plan.py").write_text(f"import jdist\nplan = {plan}")
    status, output, _ = run("--help")
    assert status == 0
    for name, entry in VERBS.items():
        assert f"{name:7}  {entry.summary}\n" in output
        assert f"example: jdist {entry.example}\n" in output
        if name != "doctor":  # in test_doctor.py
            assert run(*entry.example.split())[0] == 0
        status, verb_help, _ = run(name, "--help")
        assert (
            status == 0 and f"usage: jdist {name} [-h]" in verb_help and f"Example: jdist {entry.example}" in verb_help
        )


def test_version(run):
    assert run("--version") == (0, f"jdist {jdist.__version__}\n", "")


def test_command_without_verb_or_with_an_unknown_verb_or_argument_has_status_2(run):
    status, output, errors = run()
    assert (status, output) == (2, "") and "example: jdist devices" in errors
    for word, nearest in {"environment": "env", "dev": "devices", "devcies": "devices"}.items():
        assert run(word) == (2, "", f"jdist: there is no command {word!r}. Did you mean `jdist {nearest}`?\n")
    assert run("qqq") == (
        2,
        "",
        "jdist: there is no command 'qqq'. The commands are check, devices, doctor, env, plan, replay, run.\n",
    )
    for word, line in {"launch": "jdist run -n 2 train.py", "work.py": "jdist run -n 2 work.py"}.items():
        assert run(word) == (2, "", f"jdist: there is no command {word!r}. Write `{line}`.\n")
    status, _, errors = run("env", "--yaml")
    assert status == 2 and "unrecognized arguments: --yaml" in errors


def test_env_reports_versions_devices_flags_and_variables_as_text_and_json(run, monkeypatch):
    monkeypatch.setenv("JDIST_A", "1")
    monkeypatch.setenv("XLA_FLAGS", "--xla_a=1 --xla_b=2")
    status, text, _ = run("env")
    assert status == 0
    for line in (
        "versions:",
        f"  jax: {jax.__version__}",
        "  devices:"[2:],
        "  kinds: 8 x cpu",
        "  JDIST_A: 1",
        "    --xla_b=2",
    ):
        assert line in text.splitlines(), line
    report = json.loads(run("env", "--json")[1])
    assert list(report) == ["versions", "system", "flags", "variables", "devices"]
    assert report["versions"]["jdist"] == jdist.__version__
    assert {"python", "jax", "jaxlib", "flax", "optax", "numpy"} < report["versions"].keys()
    assert report["flags"] == {"XLA_FLAGS": ["--xla_a=1", "--xla_b=2"]}
    assert report["devices"] == {
        "platform": "cpu", "kinds": {"cpu": 8}, "count": 8, "local_count": 8, "processes": 1, "process_index": 0
    }  # fmt: skip


def test_reader_that_ends_before_the_output_is_no_traceback():
    command = subprocess.Popen([sys.executable, "-m", "jdist", "env"], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert command.stdout and command.stderr
    command.stdout.close()
    assert (command.stderr.read(), command.wait()) == (b"", 128 + signal.SIGPIPE)
    command.stderr.close()


def test_env_reports_no_secret_and_no_other_variable(monkeypatch):
    monkeypatch.setenv("HOME", "/home/somebody")
    report = dict(
        describe_environment(
            {
                "XLA_FLAGS": "--xla_dump_to=/home/somebody/dump",
                "JAX_API_TOKEN": "secret",
                "JDIST_PASSWORD": "secret",
                "JDIST_STORE_KEY": "secret",
                "JAX_DEBUG_KEY_REUSE": "1",
                "JAX_COMPILATION_CACHE_DIR": "s3://me:secret@host/cache?Signature=secret",
                "AWS_SECRET": "secret",
                "PATH": "secret",
            }
        )
    )
    assert "secret" not in str(report)
    assert report["flags"] == {"XLA_FLAGS": ["--xla_dump_to=~/dump"]}
    assert report["variables"] == {
        "JAX_API_TOKEN": "(hidden)",
        "JAX_COMPILATION_CACHE_DIR": "s3://(hidden)@host/cache?(hidden)",
        "JAX_DEBUG_KEY_REUSE": "1",
        "JDIST_PASSWORD": "(hidden)",
        "JDIST_STORE_KEY": "(hidden)",
    }


@pytest.mark.parametrize(
    "name, status, message",
    [
        ("env", 0, "  error: Unable to initialize backend 'absent'"),
        pytest.param(
            "devices", 1, "jdist devices: JAX cannot use the devices: Unable to initialize", marks=pytest.mark.slow
        ),
    ],
)
def test_devices_that_cannot_be_used_are_reported_by_the_program(name, status, message):
    environment = {**os.environ, "JAX_PLATFORMS": "absent"}
    done = subprocess.run(
        [sys.executable, "-m", "jdist", name], env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == status
    assert message in done.stdout + done.stderr


def test_memory_is_not_reserved_and_the_variable_is_restored(monkeypatch):
    values = []
    monkeypatch.setattr(
        start_devices.jax, "devices", lambda: values.append(os.environ.get("XLA_PYTHON_CLIENT_PREALLOCATE"))
    )
    monkeypatch.delenv("XLA_PYTHON_CLIENT_PREALLOCATE", raising=False)
    start_devices.start_devices()
    assert "XLA_PYTHON_CLIENT_PREALLOCATE" not in os.environ
    monkeypatch.setenv("XLA_PYTHON_CLIENT_PREALLOCATE", "true")
    start_devices.start_devices()
    assert values == ["false", "true"] == [values[0], os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"]]


def test_devices_prints_a_row_per_device(run):
    status, output, _ = run("devices")
    assert status == 0
    assert output.splitlines() == ["device  kind  process", *(f"cpu:{i}   cpu   0" for i in range(8))]
    assert device_drawings(jax.devices()) == []


def test_devices_with_coordinates_have_them_in_the_table_and_a_drawing_with_a_line_between_processes():
    pytest.importorskip("libtpu")
    devices = jdist.topology_devices("v5e:2x4")
    assert device_table(devices).splitlines()[4:6] == [
        "tpu:3   TPU v5 lite  0        [1, 1, 0]",
        "tpu:4   TPU v5 lite  1        [0, 2, 0]",
    ]
    expected = ["┌───────┐", "│ 0   1 │", "│ 2   3 │", "├───────┤", "│ 4   5 │", "│ 6   7 │", "└───────┘"]
    (drawing,) = device_drawings(devices)
    assert drawing.splitlines() == ["rows along 'y', columns along 'x'", *expected]
    assert device_drawings(devices[:3]) == []  # not a grid


def test_devices_with_two_cores_and_devices_of_two_slices_are_drawn():
    pytest.importorskip("libtpu")
    (cores,) = device_drawings(jdist.topology_devices("v2:2x2"))
    assert cores.splitlines()[:4] == ["rows along 'x', columns along 'core'", "'y' 0", "┌───────┐", "│ 0   1 │"]
    slices = jdist.topology_devices("v5e:2x2", num_slices=2)
    assert device_table(slices).startswith("device      kind         process  slice  coordinates\n")
    assert [drawing.splitlines()[0] for drawing in device_drawings(slices)] == ["slice 0", "slice 1"]
