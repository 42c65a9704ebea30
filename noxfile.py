"""The sessions: `nox` runs the default tests, the lint and the types; `nox -s slow` and others by name."""

import pathlib
import re
import shutil

import nox

nox.options.error_on_missing_interpreters = False  # skipped with a message, even where CI is set
nox.options.reuse_existing_virtualenvs = True
OLDEST, NEWEST = "3.11", "3.12"  # with the oldest JAX that jdist supports, and the newest
CONSTRAINTS = ("-c", "constraints.txt")
BITS_AND_MEMORY = "test_exact.py or test_exact_training_resumes or bitwise_equal[adam] or test_virtual_replicas.py or "
BITS_AND_MEMORY += "test_same_program.py or test_central_memory.py or test_sharded_memory.py"


def _pytest(session: nox.Session, *arguments: str, **environment: str) -> None:
    """Runs pytest in two processes. All processes share compiled programs, by versions and flags, and write bytecode."""
    cache = pathlib.Path(session.cache_dir).absolute() / "xla"
    if sum(path.stat().st_size for path in cache.glob("*")) > 2**30:
        shutil.rmtree(cache)
    environment |= {"JAX_COMPILATION_CACHE_DIR": str(cache), "PYTHONDONTWRITEBYTECODE": ""}
    session.run("python", "-m", "pytest", "-n", "2", "--dist", "loadfile", *arguments, env=environment)


@nox.session
def tests(session: nox.Session) -> None:
    """The default tests, on the Python that runs nox."""
    session.install("--no-compile", *CONSTRAINTS, "-e", ".[test]")
    _pytest(session, "-m", "not slow", *session.posargs)


@nox.session(python=[OLDEST, NEWEST], default=False)
def slow(session: nox.Session) -> None:
    """The slow tests, those of bits and memory at XLA's default optimization level, the notebooks; on `OLDEST` a part."""
    session.install("--no-compile", *CONSTRAINTS, "-e", ".[test,ray]" if session.python == NEWEST else ".[test]")
    if session.python == OLDEST:
        return _pytest(session, "-m", "not slow", "tests/core", "tests/execution", "tests/jaxpr")
    _pytest(session, "-m", "slow and processes", "-n", "3")  # they wait for each other most of the time
    _pytest(session, "-m", "slow and not processes", "-k", f"not ({BITS_AND_MEMORY})")
    _pytest(session, "-k", BITS_AND_MEMORY, "--dist", "worksteal", XLA_FLAGS="")
    _pytest(session, "--nbmake", "--nbmake-timeout=280", "examples/notebooks")


@nox.session(python=OLDEST)
def lint(session: nox.Session) -> None:
    """Style, unused code, import order, docstrings."""
    session.install("--no-compile", *CONSTRAINTS, "ruff")
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")


@nox.session(python=NEWEST)
def types(session: nox.Session) -> None:
    """Type annotations of the package, with its optional imports."""
    session.install(*CONSTRAINTS, "-e", ".[export,plot,tensorboard]", "pyright[nodejs]", "pytest")
    session.run("pyright")


@nox.session(python=OLDEST, default=False)
def docs(session: nox.Session) -> None:
    """Documentation pages; a warning is an error, and so is the name of a function without a link to it."""
    session.install(*CONSTRAINTS, "-e", ".[docs]")
    session.run("sphinx-build", "-W", "--keep-going", "docs", "docs/_build/html")
    session.run("python", "docs/_ext/check_links.py", "docs/_build/html")


@nox.session(python=NEWEST, default=False)
def release(session: nox.Session) -> None:
    """The sdist and the wheel: contents, metadata, and the examples of the README with the wheel in an empty environment."""
    session.install("build", "twine")
    folder = pathlib.Path(session.create_tmp()).absolute()
    shutil.rmtree(folder)
    session.run("python", "-m", "build", "--outdir", str(folder / "dist"))  # the wheel is built from the sdist
    session.run("python", "-m", "build", "--wheel", "--outdir", str(folder / "tree"))
    files = [str(*(folder / "dist").glob(pattern)) for pattern in ("*.tar.gz", "*.whl")]
    session.run("twine", "check", "--strict", *files)
    session.run("python", ".ci/check_release.py", *files, str(*(folder / "tree").glob("*.whl")))
    session.run("python", "-m", "venv", str(folder / "empty"))
    programs = folder / "empty/bin"
    session.run(str(programs / "pip"), "install", "-q", "--no-compile", *CONSTRAINTS, files[1], external=True)
    readme = pathlib.Path("README.md").read_text()
    examples = "\n".join(re.findall(r"^```python\n(.*?)^```", readme, re.MULTILINE | re.DOTALL))
    session.chdir(folder)
    for command in (["jdist", "--help"], ["jdist", "env"], ["python", "-W", "error", "-c", examples]):
        session.run(str(programs / command[0]), *command[1:], external=True, env={"PYTHONPATH": ""})


@nox.session(python=NEWEST, default=False)
def libraries(session: nox.Session) -> None:
    """Tests that need TensorFlow, torch, Hugging Face, Kubernetes, Ray, S3, ONNX, or the compiler of JAX for GPUs."""
    others = "datasets jax-cuda13-plugin jax2onnx mlflow moto[server] onnxruntime optuna ray[train,tune] tensorflow-cpu torch"
    others += " torchdata tyro wandb"
    session.install(*CONSTRAINTS, "-e", ".[test,kubernetes,ray,s3]", *others.split())
    names = (
        "test_s3 or source_adapters or kubernetes or test_ray or gpu_compile or from_pytorch or serving or tool_pages"
    )
    session.run("python", "-m", "pytest", "-k", names)


@nox.session(python=NEWEST, default=False)
def benchmarks(session: nox.Session) -> None:
    """Benchmarks against hand-written programs, `--quick` or with the options after `--`: a section of docs/benchmarks.md."""
    session.install(*CONSTRAINTS, "-e", ".[grain,plot]")
    session.run("python", "benchmarks/page.py", "benchmarks", *session.posargs)


@nox.session(python=NEWEST, default=False)
def peers(session: nox.Session) -> None:
    """The benchmarks against TensorFlow, Keras on JAX, torch and orbax; writes their section of docs/benchmarks.md."""
    session.install(*CONSTRAINTS, "-e", ".[grain,plot]", "keras", "tensorflow-cpu", "torch")
    # The LLVM of Triton, which torch does not need on CPU, ends a process that also uses TensorFlow.
    session.run("python", "-m", "pip", "uninstall", "--quiet", "--yes", "triton")
    session.run("python", "benchmarks/page.py", "peers", *session.posargs)
