"""The sessions: `nox` runs the default tests, the lint and the types; `nox -s slow` and others by name."""

import pathlib
import shutil
import subprocess

import nox

nox.options.error_on_missing_interpreters = False  # skipped with a message, even where CI is set
nox.options.reuse_existing_virtualenvs = True

OLDEST, NEWEST = "3.11", "3.12"  # with the oldest JAX that jdist supports, and the newest
PYTHONS = [OLDEST, NEWEST]


def _runs(python: str) -> bool:
    """Returns whether an interpreter runs: pyenv has commands for versions that are not selected, too."""
    command = shutil.which(f"python{python}")
    return command is not None and subprocess.run([command, "-c", ""], capture_output=True).returncode == 0


# The default tests run on one Python; session `slow` runs those that depend on the version on the oldest, too.
nox.options.sessions = [f"tests-{NEWEST if _runs(NEWEST) else OLDEST}", "lint", "types"]
CONSTRAINTS = ("-c", "constraints.txt")
# Tests of what depends on JAX's version: jaxprs, what is compiled from them, and one file for each larger part.
JAXPRS = ["tests/core", "tests/execution", "tests/jaxpr"]
JAX_VERSION = [
    *JAXPRS,
    "tests/checkpoint/test_restore_laws.py",
    "tests/sync/test_policy_laws.py",
    "tests/training/test_validation.py",
]
# Tests that depend neither on JAX's version nor on Python's run on the newest Python only: launchers, data, the parameter
# server, numerics, training, parity. `JAX_VERSION` and `ALSO_OLDEST` are the exceptions in these folders.
NEWEST_FOLDERS = (
    "cluster",
    "command_line",
    "data",
    "launch",
    "parameter_server",
    "parity",
    "sync",
    "testing",
    "training",
)
ALSO_OLDEST = [
    "tests/cluster/test_joining.py",
    "tests/data/test_device_cache.py",
    "tests/data/test_iterator.py",
    "tests/parameter_server/test_strategy.py",
    "tests/training/test_loop.py",
    "tests/training/test_trainer.py",
]
NEWEST_ONLY = sorted(
    {
        *(str(path) for folder in NEWEST_FOLDERS for path in pathlib.Path("tests", folder).glob("test_*.py")),
        "tests/replica/test_batch_norm.py",
        "tests/replica/test_losses.py",
        "tests/replica/test_metrics.py",
        "tests/strategies/test_host_reductions.py",
    }.difference(JAX_VERSION, ALSO_OLDEST)
)
# Tests of bits, memory and compiled programs, the longest first: they also run with XLA's default optimization level.
COMPILED = [
    "tests/jaxpr/test_exact.py",
    "tests/training/test_resume.py::test_exact_training_resumes_bitwise_equal_on_another_number_of_devices",
    "tests/training/test_resume.py::test_interrupted_training_is_bitwise_equal[adam]",
    "tests/jaxpr/test_virtual_replicas.py",
    "tests/strategies/test_central_memory.py",
    "tests/strategies/test_same_program.py",
    "tests/strategies/test_sharded_memory.py",
]
# Slow tests whose processes wait for each other, or for a time limit, most of the time: three at once.
WAITING = [
    "tests/faults/test_watchdog.py",
    "tests/processes/test_preemption_processes.py",
    "tests/command_line/test_ray_engine.py",
    "tests/command_line/test_run_restarts.py",
    "tests/faults/test_no_false_alarm.py",
    "tests/testing/test_process_groups.py",
]
# The longest of the slow tests, which start first.
LONGEST = [
    "tests/parameter_server/test_ray.py",
    "tests/command_line/test_run_training.py",
    "tests/test_benchmarks.py",
    "tests/test_policies_example.py",
    "tests/processes/test_policies_processes.py",
    "tests/sync/test_policy_laws.py",
]
# Tests of what depends on Python's version: the language, pickles, threads and files, one training.
PYTHON_VERSION = [
    "tests/core",
    "tests/data/test_iterator.py",
    "tests/jaxpr/test_replication.py",
    "tests/strategies/test_pickling.py",
    "tests/training/test_loop.py",
    "tests/values",
]


def _install(session: nox.Session, extras: str = "test") -> None:
    session.install("--no-compile", *CONSTRAINTS, "-e", f".[{extras}]")


def _pytest(
    session: nox.Session, *arguments: str, workers: int = 2, dist: str = "loadfile", xla_flags: str | None = None
) -> None:
    """Runs pytest in `workers` processes, between which `dist` divides the tests: by file, or one by one with "worksteal".

    The sessions share a compilation cache, whose keys hold the versions and the flags.
    """
    cache = pathlib.Path(session.cache_dir).absolute() / "xla"
    if sum(path.stat().st_size for path in cache.glob("*")) > 2**30:
        shutil.rmtree(cache)
    # The tests start hundreds of processes, which spend most of their time compiling modules where no bytecode is written.
    environment = {"JAX_COMPILATION_CACHE_DIR": str(cache), "PYTHONDONTWRITEBYTECODE": ""}
    if xla_flags is not None:
        environment["XLA_FLAGS"] = xla_flags
    session.run("python", "-m", "pytest", "-n", str(workers), "--dist", dist, *arguments, env=environment)


def _notebooks(session: nox.Session, *arguments: str) -> None:
    environment = {"JAX_PLATFORMS": "cpu", "PYTHONDONTWRITEBYTECODE": ""}
    session.run("python", "-m", "pytest", "--nbmake", "--nbmake-timeout=280", "-n", "2", *arguments, env=environment)


def _without(paths: list[str]) -> list[str]:
    return [f"--ignore={path}" for path in paths]


@nox.session(python=PYTHONS)
def tests(session: nox.Session) -> None:
    """The default tests."""
    _install(session)
    _pytest(session, "-m", "not slow", *session.posargs)


@nox.session(python=[*PYTHONS, "3.13"])
def slow(session: nox.Session) -> None:
    """The slow tests, `COMPILED` and the notebooks.

    On the oldest Python the slow tests of `JAXPRS`, all default cases of `JAX_VERSION`, and one default case of each other
    test, except for `NEWEST_ONLY`. On Python 3.13 one default case of each test of `PYTHON_VERSION`.
    """
    _install(session, "test,ray" if session.python == NEWEST else "test")
    if session.posargs:
        _pytest(session, "-m", "slow", *session.posargs)
    elif session.python == NEWEST:
        arguments = [
            "-m",
            "slow",
            "--no-loadscope-reorder",
            *(f"--deselect={test}" for test in COMPILED if "::" in test),
        ]
        # By file: of a file and its folder, pytest collects the folder only.
        paths = {str(path) for path in pathlib.Path("tests").rglob("test_*.py")}
        others = sorted(paths.difference(WAITING, LONGEST, COMPILED))
        _pytest(session, *arguments, *WAITING, workers=3)
        _pytest(session, *arguments, *LONGEST, *others)
        _pytest(session, *COMPILED, dist="worksteal", xla_flags="")
        _notebooks(session, "examples/notebooks")
    elif session.python == OLDEST:
        _pytest(session, "-m", "not slow", "--first-case", *_without(NEWEST_ONLY), "--all-cases", *JAX_VERSION)
        _pytest(session, "-m", "slow", *JAXPRS, *_without(COMPILED))
    else:
        _pytest(session, "-m", "not slow", "--first-case", *PYTHON_VERSION)


@nox.session(python=NEWEST)
def notebooks(session: nox.Session) -> None:
    """The notebooks of the examples, executed with eight CPU devices. Their outputs are not compared."""
    _install(session)
    _notebooks(session, *(session.posargs or ["examples/notebooks"]))


@nox.session(python="3.11")
def lint(session: nox.Session) -> None:
    """Style, unused code, import order, docstrings."""
    session.install("--no-compile", *CONSTRAINTS, "ruff")
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")


@nox.session(python=[NEWEST])
def types(session: nox.Session) -> None:
    """Type annotations of the package."""
    optional = ".[export,plot,tensorboard]"  # optional imports of the package
    session.install("--no-compile", *CONSTRAINTS, "-e", optional, "pyright[nodejs]", "pytest")
    session.run("pyright")


@nox.session(python=[NEWEST])
def libraries(session: nox.Session) -> None:
    """Data sources of TensorFlow, torch and Hugging Face, Kubernetes' client, Ray and S3, with the real libraries."""
    extras = ".[test,kubernetes,ray,s3]"
    others = ("datasets", "moto[server]", "ray[train]", "tensorflow-cpu", "torch", "torchdata")
    session.install(*CONSTRAINTS, "-e", extras, *others)
    paths = (
        "checkpoint/test_s3.py",
        "data/test_source_adapters.py",
        "cluster/test_kubernetes_resolver.py",
        "command_line/test_ray_engine.py",
        "parameter_server/test_ray.py",
    )
    session.run("python", "-m", "pytest", *(session.posargs or [f"tests/{path}" for path in paths]))


@nox.session(python=PYTHONS)
def gpus(session: nox.Session) -> None:
    """Programs compiled for GPUs without hardware."""
    session.install(*CONSTRAINTS, "-e", ".[test]", "jax-cuda13-plugin")
    session.run("python", "-m", "pytest", "tests/strategies/test_gpu_compile.py", *session.posargs)


@nox.session(python="3.11")
def docs(session: nox.Session) -> None:
    """Documentation pages; a warning is an error."""
    session.install(*CONSTRAINTS, "-e", ".[docs]")
    session.run("sphinx-build", "-W", "--keep-going", "docs", "docs/_build/html")


@nox.session(python="3.11")
def benchmarks(session: nox.Session) -> None:
    """All benchmarks with `--quick`, or with the options after `--`."""
    session.install(*CONSTRAINTS, "-e", ".[grain]")
    for name in (
        "accelerator",
        "import_time",
        "trace_time",
        "step_overhead",
        "all_reduce",
        "train_step",
        "multi_process",
        "parameter_server",
        "recovery",
        "input",
        "policies",
        "memory",
    ):
        session.run("python", f"benchmarks/{name}.py", *(session.posargs or ["--quick"]))
