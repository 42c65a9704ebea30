"""Recommended XLA flags: the installed compilers accept each, none is the default, and none is set implicitly."""

import html
import importlib.util
import io
import json
import os
import re
import subprocess
import sys

import jax
import pytest
from rich.console import Console

from jdist._src.devices.xla_flags import XlaFlag, XlaFlags, xla_flags

from laws import each_row

PLATFORMS = ("cpu", "cuda", "gpu", "tpu", "tpu v5e")
WITH_FLAGS = [platform for platform in PLATFORMS if xla_flags(platform).flags]
START = "import jax; jax.jit(lambda x: x + 1)(1.0)"
LATE = r"`XLA_FLAGS` is read once.* they have started.*before the first array.*`compiler_options`"

# Without a TPU, libtpu does not need its lock, which admits one process.
TPU_COMPILER = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_WORKER_ID": "0",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}
COMPILE = """
import json
import jax, jax.numpy as jnp, numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, PartitionSpec as P
from jdist._src.devices.xla_flags import xla_flags

def compiled(topology, options, width=128, **slices):
    mesh = Mesh(np.array(topologies.get_topology_desc(topology, "tpu", **slices).devices), ("replica",))
    def step(weights, x):
        def loss(weights, x):
            for w in weights:
                x = jnp.tanh(x @ w)
            return jnp.mean(x**2)
        return jax.lax.pmean(jax.grad(loss)(weights, x), "replica")
    step = jax.shard_map(step, mesh=mesh, in_specs=(P(), P("replica")), out_specs=P(), check_vma=False)
    shapes = [jax.ShapeDtypeStruct((width, width), jnp.float32)] * 4, jax.ShapeDtypeStruct((mesh.size * 8, width), "f")
    try:
        text = jax.jit(step).lower(*shapes).compile(compiler_options=options).as_text()
        return "fused" if "async_collective_fusion" in text else "compiled"
    except jax.errors.JaxRuntimeError as error:
        return str(error)
"""
ACCEPTED = """
tpu, v5e = xla_flags("tpu").compiler_options, xla_flags("tpu v5e").compiler_options
topologies_ = ("v5e:4x4", "v5p:2x2x2", "v6e:4x4")
print(json.dumps({
    "tpu": [compiled(topology, tpu) for topology in topologies_] + [compiled("v5e:4x4", tpu, num_slices=2)],
    "tpu v5e": [compiled(topology, v5e) for topology in topologies_],
    "unknown": compiled("v5e:4x4", {"xla_tpu_no_such_flag": True}),
}))
"""
FUSED = """
print(json.dumps([compiled("v5e:4x4", options, 4096) for options in ({}, xla_flags("tpu v5e").compiler_options)]))
"""
BY_ENVIRONMENT = """
xla_flags("tpu v5e").apply()
first = compiled("v5e:4x4", {}, 4096)
try:
    xla_flags("tpu").apply()
except RuntimeError as error:
    print(json.dumps([first, str(error)]))
"""


def _python(code, **environment):
    """Runs `code` in a new process, with only these flags."""
    clean = {name: value for name, value in os.environ.items() if name not in ("XLA_FLAGS", "LIBTPU_INIT_ARGS")}
    command = [sys.executable, "-c", code]
    return subprocess.run(command, env={**clean, **environment}, capture_output=True, text=True, timeout=200)


def _tpu(code):
    if importlib.util.find_spec("libtpu") is None:
        pytest.skip("TPU flags are not checked: libtpu, the TPU's compiler, is not installed (pip install jdist[plan])")
    done = _python(COMPILE + code, **TPU_COMPILER)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture
def not_started(monkeypatch):
    """Simulates a process whose backends have not started, and restores the variables that `apply` sets."""
    monkeypatch.setattr("jdist._src.core.jax_compat.flags_are_read", lambda variable: False)
    for variable in ("XLA_FLAGS", "LIBTPU_INIT_ARGS"):
        monkeypatch.setenv(variable, "")
        monkeypatch.delenv(variable)


@pytest.mark.parametrize("platform", PLATFORMS)
def test_flags_of_a_platform_are_unique_and_each_has_reason_and_link(platform):
    flags = xla_flags(platform)
    assert len({flag.name for flag in flags.flags}) == len(flags.flags)
    assert flags == xla_flags(platform.upper())
    assert flags.variable == ("LIBTPU_INIT_ARGS" if platform.startswith("tpu") else "XLA_FLAGS")
    assert str(flags).split() == [f"--{flag.name}={str(flag.value).lower()}" for flag in flags.flags]
    assert flags.compiler_options == {flag.name: flag.value for flag in flags.flags}
    for flag in flags.flags:
        assert flag.reason and flag.link.startswith("https://")


@pytest.mark.parametrize("platform", WITH_FLAGS)
def test_flags_are_a_table_in_a_console_and_in_a_notebook(platform):
    flags = xla_flags(platform)
    wide, narrow = (Console(width=width, record=True, file=io.StringIO()) for width in (400, 60))
    for console in (wide, narrow):
        console.print(flags)
    page = html.unescape(flags._repr_html_())
    for text in (wide.export_text(), page):
        assert f" {flags.variable} for {platform} " in text
        assert all(f" {each} " in text for flag in flags.flags for each in (flag, flag.reason, flag.link))
    rows = [line.split("│")[1].strip() for line in narrow.export_text().splitlines() if "│" in line]
    assert "".join(rows) == "".join(map(str, flags.flags))  # folded, not truncated


def test_flags_in_a_notebook_are_escaped():
    flags = XlaFlags("<b>", "<i>", (XlaFlag("<u>", True, "<s> & more", "<a>"),))
    page = flags._repr_html_()
    assert {"<b>", "<i>", "<u>", "<s>", "<a>"}.isdisjoint(re.findall("<[^>]*>", page))
    assert "&lt;s&gt; &amp; more" in page and "&lt;b&gt;" in page
    assert "No flags are recommended for &lt;b&gt;." in XlaFlags("<b>", "<i>")._repr_html_()


def test_repr_of_flags_is_one_short_line():
    assert repr(xla_flags("gpu")) == "XlaFlags(gpu, 3 flags for XLA_FLAGS)"
    assert repr(xla_flags("cpu")) == "XlaFlags(cpu, 0 flags for XLA_FLAGS)"
    assert repr(XlaFlags("x", "V", xla_flags("gpu").flags[:1])) == "XlaFlags(x, 1 flag for V)"


def test_cpu_has_no_flags(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--mine=1")
    flags = xla_flags("cpu")
    flags.apply()
    assert (flags, str(flags), os.environ["XLA_FLAGS"]) == (XlaFlags("cpu", "XLA_FLAGS"), "", "--mine=1")
    assert flags.__rich__() == "No flags are recommended for cpu."


@each_row("wrong", ["metal", "tpu v5p", "", None, ["gpu"]])
def test_unknown_platform_is_an_error_that_lists_the_valid_ones(wrong):
    known = ", ".join(map(repr, PLATFORMS))
    with pytest.raises(
        ValueError, match=re.escape(f"the platform {wrong!r}; use one of {known}, where 'tpu' is valid")
    ):
        xla_flags(wrong)


@pytest.mark.parametrize("platform", WITH_FLAGS)
@pytest.mark.parametrize("current", ["", " --mine=7 --other "])
def test_apply_keeps_existing_flags_and_applies_once(platform, current, not_started, monkeypatch):
    flags = xla_flags(platform)
    assert flags.variable not in os.environ  # finding the flags does not set them
    monkeypatch.setenv(flags.variable, current)
    flags.apply()
    once = os.environ[flags.variable]
    assert once.split() == [*current.split(), *str(flags).split()]
    flags.apply()
    assert os.environ[flags.variable] == once


@pytest.mark.parametrize("platform", WITH_FLAGS)
@pytest.mark.parametrize(
    "form, shown", [("--{}=false", "False"), ("--{}=True --{}=0", "False"), ("-{}=odd", "'odd'"), ("--no{}", "False")]
)
def test_apply_keeps_a_different_value_of_the_user_and_warns(platform, form, shown, not_started, monkeypatch):
    flags = xla_flags(platform)
    first, *rest = flags.flags
    mine = form.replace("{}", first.name)
    monkeypatch.setenv(flags.variable, mine)
    message = (
        rf"`{flags.variable}` sets `{first.name}` to {shown}, which is not changed. .* for {platform} is `{first}`"
    )
    with pytest.warns(UserWarning, match=message) as caught:
        flags.apply()
    assert len(caught) == 1
    assert os.environ[flags.variable].split() == [*mine.split(), *map(str, rest)]


@pytest.mark.parametrize("form", ["--{}", "--{}=true", "--{}=True", "--{}=1", "--{}=false --{}=true"])
def test_apply_does_not_warn_if_the_user_set_the_same_value(form, not_started, monkeypatch):
    first, *_, limit = xla_flags("gpu").flags
    assert str(limit) == "--xla_gpu_nccl_termination_timeout_seconds=1200"
    monkeypatch.setenv("XLA_FLAGS", f"{form.replace('{}', first.name)} {limit}")
    xla_flags("gpu").apply()
    assert os.environ["XLA_FLAGS"].split()[-1:] == [str(xla_flags("gpu").flags[1])]


def test_apply_to_a_file_of_flags_is_an_error(not_started, monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "my_flags.txt")
    message = re.escape(
        f"`XLA_FLAGS` is 'my_flags.txt', a file that XLA reads its flags from. Add to that file: {xla_flags('gpu')}"
    )
    with pytest.raises(ValueError, match=message):
        xla_flags("gpu").apply()
    assert os.environ["XLA_FLAGS"] == "my_flags.txt"


@each_row("platform", WITH_FLAGS)
def test_apply_after_the_backends_started_is_an_error(platform):
    jax.devices()
    flags, before = xla_flags(platform), dict(os.environ)
    with pytest.raises(RuntimeError, match=LATE.replace("XLA_FLAGS", flags.variable)):
        flags.apply()
    assert dict(os.environ) == before


@pytest.mark.slow
def test_apply_before_start_reaches_the_compiler_and_none_of_gpu_is_on_by_default(tmp_path):
    # XLA dumps the options that differ from their defaults, and terminates the process on an unknown flag.
    def dumped(folder, code):
        done = _python(code + START, JAX_PLATFORMS="cpu", XLA_FLAGS=f"--xla_dump_to={folder}")
        assert done.returncode == 0, done.stderr
        (options,) = folder.glob("*debug_options")
        return {line for line in options.read_text().splitlines() if "xla_dump_to" not in line}

    plain = dumped(tmp_path / "plain", "")
    applied = dumped(
        tmp_path / "applied", "from jdist._src.devices.xla_flags import xla_flags; xla_flags('gpu').apply();"
    )
    assert applied - plain == {f"{flag.name}: {str(flag.value).lower()}" for flag in xla_flags("gpu").flags}


def test_gpu_flags_are_valid_compiler_options():
    step = lambda x: x + 1
    assert jax.jit(step, compiler_options=xla_flags("gpu").compiler_options)(1.0) == 2.0
    with pytest.raises(jax.errors.JaxRuntimeError, match="No such compile option: 'xla_gpu_no_such_flag'"):
        jax.jit(step, compiler_options={"xla_gpu_no_such_flag": True})(1.0)


def test_tpu_flags_in_xla_flags_terminate_the_process():
    done = _python(START, JAX_PLATFORMS="cpu", XLA_FLAGS=str(xla_flags("tpu")))
    assert done.returncode != 0
    assert "Unknown flag" in done.stderr


@pytest.mark.slow
def test_tpu_flags_compile_only_for_the_recommended_generations():
    results = _tpu(ACCEPTED)
    assert results["tpu"] == ["compiled"] * 4
    assert results["tpu v5e"][0] == "compiled"
    for error in results["tpu v5e"][1:]:
        assert re.search("FAILED_PRECONDITION.*not supported/recommended on platforms other than TPU v5e", error)
    assert "No such compile option: 'xla_tpu_no_such_flag'" in results["unknown"]


@pytest.mark.slow
def test_tpu_v5e_flags_fuse_large_all_reduces_with_computation():
    assert _tpu(FUSED) == ["compiled", "fused"]


@pytest.mark.slow
def test_applied_tpu_flags_reach_libtpu_and_are_an_error_once_it_is_loaded():
    compiled, late = _tpu(BY_ENVIRONMENT)
    assert compiled == "fused"
    assert re.search(LATE.replace("XLA_FLAGS", "LIBTPU_INIT_ARGS"), late)
