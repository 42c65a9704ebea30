"""The names that inline code of the documentation refers to, and the table of names of other libraries."""

import importlib
import inspect
import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "docs/_ext"))

import code_names

CASES = {
    "jdist.Trainer": "jdist.Trainer",
    "Trainer": "jdist.Trainer",
    "Trainer.fit": "jdist.Trainer.fit",
    "trainer.fit(data)": "jdist.Trainer.fit",
    "fit(resume=...)": "jdist.Trainer.fit",
    "fit.history": "jdist.Fit.history",
    "strategy.step": "jdist.Strategy.step",
    "@strategy.step": "jdist.Strategy.step",
    "strategy.step(fn, steps_per_call=k)": "jdist.Strategy.step",
    "strategy.staleness_counts()": "jdist.ParameterServerStrategy.staleness_counts",
    "checkpointer.restore(strategy)": "jdist.Checkpointer.restore",
    "sync.int8": "jdist.sync.int8",
    "jdist.sync": "jdist.sync",
    "metrics.Mean": "jdist.metrics.Mean",
    "all_reduce": "jdist.all_reduce",
    "jdist.plan(strategy, step)": "jdist.plan",
    "coordinator.RemoteValue": "jdist.coordinator.RemoteValue",
    "coordinator.per_worker_values(fn)": "jdist.coordinator.ClusterCoordinator.per_worker_values",
    "jax.jit": "jax.jit",
    "jax.jit(fn)(x)": "jax.jit",
    "nnx.Module": "flax.nnx.Module",
    "lax.psum(x, 'batch')": "jax.lax.psum",
    # Words, variables, arguments, commands, and names of other libraries
    "jdist": None,
    "step": None,
    "Mean": None,
    "train_step": None,
    "state.step": None,
    "strategy.experimental_run": None,
    "tf.distribute.Strategy": None,
    "jdist run -n 2 train.py": None,
    "jdist._src": None,
    "jdist.missing": None,
    "batch_size=64": None,
}


def test_inline_code_refers_to_public_names():
    assert {code: code_names.resolve(code) for code in CASES} == CASES
    # In the column of another library, in a table that compares it with jdist
    assert code_names.resolve("trainer.fit(loader)", of_jdist=False) is None
    assert code_names.resolve("jax.pmap", of_jdist=False) == "jax.pmap"


def test_every_public_name_refers_to_itself_in_full_and_without_the_package():
    names = [name for name in code_names.public_names() if name.rpartition(".")[2] != "__version__"]
    assert len(names) > 1000
    assert {code_names.resolve(name) for name in names} == set(names)
    qualified = [name for name in names if name.count(".") > 1]
    assert [name for name in qualified if code_names.resolve(name.removeprefix("jdist.")) != name] == []


def test_short_names_and_instances_refer_to_public_names():
    classes = {f"jdist.{name}" for name in code_names._INSTANCES.values()}
    assert classes | set(code_names.short_names().values()) <= set(code_names.public_names())


def _exists(name):
    parts = name.split(".")
    for end in range(len(parts), 0, -1):
        try:
            value = importlib.import_module(".".join(parts[:end]))
        except ModuleNotFoundError:
            continue
        for part in parts[end:]:
            if not hasattr(value, part):
                return False
            value = getattr(value, part)
        return True
    return False


def test_names_of_other_libraries_exist_in_the_installed_versions():
    assert not _exists("jax.missing") and not _exists("missing.name")
    names = [*code_names.external_names(), *code_names.names_without_page()]
    assert [name for name in names if not _exists(name)] == []


def test_names_of_other_libraries_in_inline_code_are_in_the_table():
    texts = {path.name: path.read_text(encoding="utf-8") for path in (ROOT / "docs").glob("**/*.md")}
    texts = {name: re.sub(r"^( *```).*?^\1", "", text, flags=re.MULTILINE | re.DOTALL) for name, text in texts.items()}
    texts |= {name: inspect.getdoc(value) or "" for name, value in code_names.public_names().items() if callable(value)}
    codes = {(place, code) for place, text in texts.items() for code in re.findall(r"`+([^`]+)`+", text)}
    names = {(place, code_names.external_name(code)) for place, code in codes}
    known = set(code_names.external_names()) | code_names.names_without_page()
    assert len({name for _, name in names} & known) > 80
    missing = sorted(f"{place}: {name}" for place, name in names if name and name not in known)
    assert missing == [], "add these to docs/_ext/external_names.txt"
    assert not set(code_names.external_names()) & code_names.names_without_page()
