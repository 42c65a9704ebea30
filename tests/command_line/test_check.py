"""`jdist check`, `jdist.check` and their report, on programs that do not use jdist."""

import json
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import P, lax

import jdist
from jdist._src.command_line.main import main
from jdist._src.debug import check
from jdist._src.jaxpr import mapped_functions

PROGRAM = """
import functools, sys

import jax, jax.numpy as jnp, optax
from flax import jax_utils

N = 8
optimizer = optax.adam(1e-3)


def loss_fn(params, batch):
    return jnp.mean((jnp.tanh(batch["x"] @ params["a"]) @ params["b"] - batch["y"]) ** 2)


def update(state, batch, reduce):
    loss, grads = jax.value_and_grad(loss_fn)(state["params"], batch)
    if reduce:
        grads = jax.lax.pmean(grads, "batch")
    updates, opt = optimizer.update(grads, state["opt"], state["params"])
    return {"params": optax.apply_updates(state["params"], updates), "opt": opt}, jax.lax.pmean(loss, "batch")


good = jax.pmap(functools.partial(update, reduce=True), axis_name="batch")
bad = jax.pmap(functools.partial(update, reduce=False), axis_name="batch")


class Model:
    step = staticmethod(good)


def make():
    params = {"a": jnp.ones((8, 16)), "b": jnp.ones((16, 1))}
    state = {"params": params, "opt": optimizer.init(params)}
    return jax_utils.replicate(state), {"x": jnp.ones((N, 2, 8)), "y": jnp.ones((N, 2, 1))}
"""
PAIRS = PROGRAM + "\ndef check(): return [(good, make()), (bad, make())]\n"
MAIN = """
if __name__ == "__main__":
    state, batch = make()
    for _ in range(2):
        state, loss = {step}(state, batch)
    print("trained with", sys.argv)
    {end}
"""


def mesh(**sizes):
    count = int(np.prod(list(sizes.values())))
    types = (jax.sharding.AxisType.Auto,) * len(sizes)
    return jax.make_mesh(tuple(sizes.values()), tuple(sizes), axis_types=types, devices=jax.devices()[:count])


def shard(fn, in_specs, out_specs, check_vma=False, **sizes):
    return jax.shard_map(
        fn, mesh=mesh(**(sizes or {"data": 4})), in_specs=in_specs, out_specs=out_specs, check_vma=check_vma
    )


@pytest.fixture
def run(capsys, tmp_path, monkeypatch):
    """Returns a function from the text of `train.py` and a command line to the exit status, output and errors."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))

    def run(text, *arguments):
        (tmp_path / "train.py").write_text(text)
        status = main(["check", "--devices", "8", *arguments])
        return status, *capsys.readouterr()

    return run


def verdicts(report):
    return [result.replication.text for function in report.functions for result in function.results]


# --- the command


def test_pairs_of_functions_and_arguments(run):
    status, output, _ = run(PAIRS, "train.py")
    assert status == 1
    assert "update, pmap over batch=8: train.py:" in output
    assert "batch['x'], which holds one value per replica" in output and 'jax.lax.pmean(x, "batch")' in output
    assert "6 findings in 2 functions" in output


@pytest.mark.parametrize("name, status", [("good", 0), ("bad", 1), ("Model.step", 0)])
def test_one_function(run, name, status):
    arguments = PROGRAM + "\ndef check(): return make()\n"
    assert run(arguments, f"train.py:{name}")[0] == status
    assert run(PAIRS, f"train.py:{name}")[0] == status


def test_json(run):
    status, output, _ = run(PAIRS, "train.py:bad", "--json")
    report = json.loads(output)
    assert status == 1 and report["findings"] == 6
    (function,) = report["functions"]
    assert function["axes"] == {"batch": 8} and function["line"] == ""
    assert function["results"][0]["replication"]["text"] == "proved"  # the number of steps


@pytest.mark.parametrize("step, status", [("good", 0), ("bad", 1)])
def test_run(run, step, status):
    found, output, _ = run(PROGRAM + MAIN.format(step=step, end=""), "--run", "train.py", "--lr", "3")
    assert found == status
    assert "trained with ['train.py', '--lr', '3']" in output and "called at train.py:" in output


@pytest.mark.parametrize("end", ["raise RuntimeError('out of data')", "sys.exit(3)"])
def test_program_that_fails(run, end):
    status, output, errors = run(PROGRAM + MAIN.format(step="good", end=end), "--run", "train.py")
    assert status == 1
    assert "train.py failed" in errors and "0 findings in 1 function" in output


def test_program_that_exits(run):
    assert run(PROGRAM + MAIN.format(step="good", end="sys.exit()"), "--run", "train.py")[0] == 0


def test_function_that_raises(run):
    text = "import jax\ndef step(x): raise KeyError('missing')\ndef check(): return [(step, (1.0,))]"
    status, output, errors = run(text, "train.py")
    assert status == 1 and "KeyError: 'missing'" in errors and "step could not be traced" in errors
    assert output == ""
    status, output, _ = run(text, "train.py", "--json")
    assert status == 1 and json.loads(output) == {"findings": 0, "functions": []}


@pytest.mark.parametrize(
    "text, arguments, message",
    [
        ("", [], "Pass one file"),
        ("", ["train.py", "--run", "train.py"], "Pass one file"),
        ("", ["--run"], "Pass one file"),
        ("", ["missing.py"], "missing.py does not exist"),
        ("", ["train.py"], "does not define a function `check`. Write `def check(): return (state, batch)`"),
        ("def check(): return 1", ["train.py"], "`check()` of train.py returned"),
        ("def check(): return (1, 2)", ["train.py"], "Name the function: `jdist check train.py:step`"),
        ("def check(): return (1, 2)", ["train.py:step"], "does not define 'step'"),
        ("x = 1\ndef check(): return (1, 2)", ["train.py:x.step"], "has no attribute 'step'"),
        ("def f(): pass\ndef check(): return [(print, ())]", ["train.py:f"], "does not return arguments of f"),
        ("import nothing", ["train.py"], "could not be loaded"),
        ("", ["train.py", "--devices", "3"], "is too late"),
        ("", ["train.py", "--devices", "0"], "`--devices` must be at least 1, got 0"),
    ],
)
def test_usage_errors(run, text, arguments, message):
    status, _, errors = run(text, *arguments)
    assert status == 2 and message in errors


def test_devices_in_a_new_process(tmp_path):
    text = "import jax\ndef check(): return [(jax.pmap(lambda x: x), (jax.numpy.ones((jax.device_count(), 2)),))]"
    (tmp_path / "train.py").write_text(text)
    settings = {name: value for name, value in os.environ.items() if name not in ("XLA_FLAGS", "JAX_NUM_CPU_DEVICES")}
    command = [sys.executable, "-m", "jdist", "check", "train.py"]
    root = os.path.dirname(os.path.dirname(jdist.__file__))
    done = subprocess.run(
        command, cwd=tmp_path, env={**settings, "PYTHONPATH": root}, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert "pmap over devices=4" in done.stdout


# --- jdist.check


def loss(w, x):
    return jnp.mean((x @ w) ** 2)


W, X = jnp.ones(3), jnp.ones((8, 3))


def test_shapes_are_enough():
    step = shard(lambda w, x: w - lax.pmean(jax.grad(loss)(w, x), "data"), (P(), P("data")), P())
    shapes = jax.ShapeDtypeStruct((3,), "float32"), jax.ShapeDtypeStruct((8, 3), "float32")
    assert verdicts(jdist.check(jax.jit(step), *shapes)) == ["proved"]


def test_missing_reduction():
    def step(w, x):
        value, gradient = jax.value_and_grad(loss)(w, x)
        return w - gradient, lax.pmean(value, "data"), x @ w

    report = jdist.check(shard(step, (P(), P("data")), (P(), P(), P("data"))), W, X)
    assert verdicts(report) == ["not proved", "proved", "not claimed"]
    assert report.num_findings == 1
    assert 'jax.lax.pmean(x, "data")' in str(report) and "name the axes in its `out_specs`" in " ".join(
        str(report).split()
    )
    assert repr(report) == "CheckReport(1 finding in 1 function, 1 result with an unknown verdict)"
    assert "<pre" in report._repr_html_()


def test_check_of_jax():
    def step(w, x):
        return lax.pmean(jax.grad(loss)(w, x), "data"), lax.psum(x.sum(), "data")

    assert verdicts(jdist.check(shard(step, (P(), P("data")), P(), check_vma=True), W, X)) == ["proved", "proved"]


def test_tensor_parallelism():
    def layer(x, a, b, reduce):
        y = jax.nn.relu(x @ a) @ b
        return lax.psum(y, "model") if reduce else y

    specs = (P("data"), P(None, "model"), P("model"))
    for reduce, verdict in [(True, "proved"), (False, "not proved")]:
        mapped = shard(lambda *args: layer(*args, reduce=reduce), specs, P("data"), data=2, model=2)  # noqa: B023
        report = jdist.check(mapped, jnp.ones((8, 4)), jnp.ones((4, 6)), jnp.ones((6, 4)))
        assert verdicts(report) == [verdict]
        assert report.functions[0].results[0].placement == "split over data"


def test_collective_that_some_devices_do_not_reach():
    def step(x):
        return lax.cond(x.sum() > 0, lambda x: lax.psum(x, "data"), lambda x: x, x)

    report = jdist.check(shard(step, P("data"), P("data")), X)
    # The result of the `cond` is wrong, too.
    assert report.num_findings == 2 and "waits for every" in report.functions[0].problem
    assert "finding" in str(report)


def test_fixed_batch_size_is_unknown():
    report = jdist.check(shard(lambda x: lax.psum(x.reshape(2, 3).sum(), "data"), P("data"), P()), X)
    (result,) = report.functions[0].results
    assert result.replication.text == "proved" and result.equivalence.text == "unknown"
    assert "cannot reshape" in result.equivalence.reasons[0] and report.num_findings == 0


def test_scan_of_a_jitted_shard_map():
    step = jax.jit(shard(lambda w, x: w - jax.grad(loss)(w, x), (P(), P("data")), P()))

    def train(w, xs):
        return lax.scan(lambda w, x: (step(w, x), None), w, xs)[0]

    report = jdist.check(jax.jit(train), W, jnp.ones((5, 8, 3)))
    assert verdicts(report) == ["not proved"]
    assert report.functions[0].line.startswith("tests/command_line/test_check.py:")


def test_jit_with_shardings():
    sharding = jax.NamedSharding(mesh(data=4), P("data"))
    for fn in (jax.jit(lambda x: x.sum()), jax.jit(lambda x: lax.with_sharding_constraint(x, sharding).sum())):
        report = jdist.check(fn, jax.ShapeDtypeStruct((8, 3), "float32", sharding=sharding))
        assert [function.kind for function in report.functions] == ["jit"] and report.num_findings == 0
        assert "global view" in str(report)


def test_nothing_is_mapped():
    report = jdist.check(jax.jit(lambda x: x * 2), X)
    assert report.functions == () and "No function is mapped" in str(report)


def test_static_arguments():
    step = jax.jit(lambda w, kind: shard(lambda w: w * len(kind), P(), P())(w), static_argnums=1)
    assert verdicts(jdist.check(step, W, "mean")) == ["proved"]
    assert verdicts(jdist.check(lambda w, *, kind: step(w, kind), W, kind="sum")) == ["proved"]


def test_not_a_function():
    with pytest.raises(TypeError):
        jdist.check(3)


def test_error_in_an_analysis_is_unknown(monkeypatch):
    from jdist._src.jaxpr import replication

    monkeypatch.setattr(replication, "prove", lambda *args: 1 / 0)
    (result,) = jdist.check(shard(lambda w: w, P(), P()), W).functions[0].results
    assert result.replication == jdist.CheckVerdict("unknown", ("ZeroDivisionError: division by zero",))


def test_call_that_cannot_be_read_is_unknown(monkeypatch):
    monkeypatch.setattr(mapped_functions, "_mapped_function", lambda *args: 1 / 0)
    report = jdist.check(shard(lambda w: w, P(), P()), W)
    assert "jdist cannot read this call: ZeroDivisionError" in str(report) and report.num_findings == 0


# --- the equivalence analysis


def equivalences(report):
    return [result.equivalence.text for function in report.functions for result in function.results]


def test_results_are_compared_as_they_are_placed():
    step = shard(lambda w, x: (w, x, x.T, x[::-1]), (P(), P("data")), (P(), P("data"), P(None, "data"), P("data")))
    assert equivalences(jdist.check(step, W, X)) == ["equivalent", "equivalent", "equivalent", "unknown"]


def test_sum_for_mean_is_a_finding_with_its_factor_and_line():
    def step(w, x):
        return w - lax.psum(jax.grad(loss)(w, x), "data")

    report = jdist.check(shard(step, (P(), P("data")), P()), W, X)
    (result,) = report.functions[0].results
    assert (result.replication.text, result.equivalence.text, report.num_findings) == ("proved", "not equivalent", 1)
    assert result.equivalence.reasons[0] == "it is computed from a value that is 4 times too large"
    line = step.__code__.co_firstlineno + 1
    assert f"tests/command_line/test_check.py:{line} in " in result.equivalence.reasons[-1]
    assert json.loads(report.to_json())["findings"] == 1


def test_several_split_dimensions():
    spec = P("data", "model")
    step = shard(lambda x: (2 * x, lax.psum(x.sum(), ("data", "model"))), spec, (spec, P()), data=2, model=2)
    assert equivalences(jdist.check(step, jnp.ones((8, 4)))) == ["equivalent", "equivalent"]


def test_results_of_random_keys_per_device_are_unknown():
    def step(w, key, x):
        total = lax.pmean(x.mean(), "batch")
        return w + total, lax.psum(jax.random.normal(key), "batch") + total

    keys, w = jax.random.split(jax.random.key(0), 4), jnp.ones((4, 3))
    report = jdist.check(jax.pmap(step, axis_name="batch"), w, keys, jnp.ones((4, 2, 3)))
    first, second = [result.equivalence for result in report.functions[0].results]
    assert first.text == "equivalent"
    assert second.text == "unknown" and "computed from key" in second.reasons[0]


def test_error_in_the_equivalence_analysis_is_unknown(monkeypatch):
    monkeypatch.setattr(check, "relate", lambda *args: 1 / 0)
    report = jdist.check(shard(lambda w: w, P(), P()), W)
    assert report.functions[0].results[0].equivalence.reasons == ("ZeroDivisionError: division by zero",)
