"""The sessions: `nox` runs the tests on both Pythons, the lint and the types; `nox -s docs` and others by name."""

import nox

nox.options.default_venv_backend = "venv"
nox.options.error_on_missing_interpreters = False  # skipped with a message, even where CI is set
nox.options.reuse_existing_virtualenvs = True
nox.options.sessions = ["tests", "lint", "types"]

OLDEST, NEWEST = "3.11", "3.12"  # with the oldest JAX that jdist supports, and the newest
PYTHONS = [OLDEST, NEWEST]
CONSTRAINTS = ("-c", "constraints.txt")
# Tests of what depends on JAX's version: jaxprs and what is compiled from them, and one file for each larger part.
JAX_VERSION = (
    "tests/core",
    "tests/execution",
    "tests/jaxpr",
    "tests/checkpoint/test_restore_laws.py",
    "tests/sync/test_policy_laws.py",
    "tests/training/test_loop.py",
)
# Tests about bits, memory and the compiled program. The session `slow` runs all of them with XLA's own optimization level.
COMPILED = (
    "tests/checkpoint/test_restore_laws.py",
    "tests/jaxpr/test_exact.py",
    "tests/jaxpr/test_virtual_replicas.py",
    "tests/strategies/test_central_memory.py",
    "tests/strategies/test_same_program.py",
    "tests/strategies/test_sharded_memory.py",
    "tests/training/test_resume.py",
)


def _install(session: nox.Session, *packages: str) -> None:
    session.install("--no-compile", *CONSTRAINTS, *packages)


def _pytest(session: nox.Session, *arguments: str, **environment: str) -> None:
    environment.setdefault("JAX_COMPILATION_CACHE_DIR", str(session.cache_dir / "xla"))
    session.run("python", "-m", "pytest", "-n", "2", "--dist", "loadfile", *arguments, env=environment)


@nox.session(python=PYTHONS)
def tests(session: nox.Session) -> None:
    """The tests that are not slow: all on the newest Python, and on the oldest those that depend on JAX's version."""
    _install(session, "-e", ".[test]")
    _pytest(session, "-m", "not slow", *(session.posargs or (JAX_VERSION if session.python == OLDEST else ())))


@nox.session(python="3.11")
def lint(session: nox.Session) -> None:
    """Style, unused code, import order, docstrings."""
    session.install(*CONSTRAINTS, "ruff")
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")


@nox.session(python="3.11")
def types(session: nox.Session) -> None:
    """The annotations of the package."""
    session.install(*CONSTRAINTS, "-e", ".[test]", "pyright[nodejs]")
    session.run("pyright")


@nox.session(python="3.11")
def libraries(session: nox.Session) -> None:
    """Data from the libraries that are not needed otherwise, the real ones."""
    session.install(*CONSTRAINTS, "-e", ".[test]", "datasets", "tensorflow-cpu", "torch")
    session.run("python", "-m", "pytest", "tests/data/test_libraries.py", *session.posargs)


@nox.session(python=PYTHONS)
def gpus(session: nox.Session) -> None:
    """Programs compiled for GPUs that are not there."""
    session.install(*CONSTRAINTS, "-e", ".[test]", "jax-cuda13-plugin")
    session.run("python", "-m", "pytest", "tests/strategies/test_gpu_compile.py", *session.posargs)


@nox.session(python="3.11")
def docs(session: nox.Session) -> None:
    """The documents, as pages; a warning is an error."""
    session.install(*CONSTRAINTS, "-e", ".[docs]")
    session.run("sphinx-build", "-W", "--keep-going", "docs", "docs/_build/html")


@nox.session(python="3.11")
def benchmarks(session: nox.Session) -> None:
    """Every benchmark, quickly; give other options after `--`."""
    session.install(*CONSTRAINTS, "-e", ".")
    for name in (
        "import_time",
        "trace_time",
        "step_overhead",
        "all_reduce",
        "train_step",
        "input",
        "policies",
        "memory",
    ):
        session.run("python", f"benchmarks/{name}.py", *(session.posargs or ["--quick"]))
