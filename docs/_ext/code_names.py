"""The name that a piece of inline code refers to: a public name of jdist, or a name of another library.

Needs only jdist and the table `external_names.txt`, so that the tests run it without sphinx.
"""

import functools
import inspect
import pathlib
import re
from collections.abc import Iterator

import jdist

TABLE = pathlib.Path(__file__).with_name("external_names.txt")
# `name`, `@name`, `name(...)`, `name[...]`: the name before the first parenthesis
_CODE = re.compile(r"@?([A-Za-z]\w*(?:\.[A-Za-z_]\w*)*)(?:[(\[].*)?", re.DOTALL)
_PREFIXES = {
    "jnp": "jax.numpy",
    "lax": "jax.lax",
    "nn": "flax.linen",
    "nnx": "flax.nnx",
    "np": "numpy",
    "ocp": "orbax.checkpoint",
}
LIST_OF_NAMES = "api"  # the page in which every word is a public name
LIBRARIES = ("jax", "optax", "flax", "orbax", "numpy")

# Variables of the pages and docstrings, with the class of their values.
_INSTANCES = {
    "checkpointer": "Checkpointer",
    "coordinator": "coordinator.ClusterCoordinator",
    "dataset": "DistributedDataset",
    "evaluate": "EvalStep",
    "event": "callbacks.Event",
    "explanation": "debug.Explanation",
    "fit": "Fit",
    "handler": "PreemptionCheckpointHandler",
    "history": "History",
    "iterator": "DistributedIterator",
    "plan": "Plan",
    "resolver": "cluster.ClusterResolver",
    "step": "Program",
    "strategy": "Strategy",
    "trainer": "Trainer",
}
# Methods that the pages call without their object.
_METHODS = {
    "distribute_dataset": "Strategy.distribute_dataset",
    "evaluate": "Trainer.evaluate",
    "fit": "Trainer.fit",
    "num_replicas_in_sync": "Strategy.num_replicas_in_sync",
    "predict": "Trainer.predict",
}
# Short names that are also names of other libraries, of arguments, or of functions that a reader writes.
_AMBIGUOUS = {
    *("train_step", "eval_step", "value_and_grad", "TrainState", "xla_flags"),
    *("Event", "Mean", "Metric", "Processes", "Profile", "Progress", "Rows", "Sum"),
}


def _members(prefix: str, holder: object) -> Iterator[tuple[str, object]]:
    for name, value in inspect.getmembers_static(holder):
        if not name.startswith("_"):
            yield f"{prefix}.{name}", value


@functools.cache
def public_names() -> dict[str, object]:
    """Returns the public names of jdist, such as `jdist.Trainer.fit`, with their values. Fields of classes are included."""
    names: dict[str, object] = {}
    for name, value in [*_members("jdist", jdist)]:
        names[name] = value
        if inspect.ismodule(value):
            names |= dict(_members(name, value))
    for name, value in [*names.items()]:
        if inspect.isclass(value):
            fields = dict.fromkeys(getattr(value, "__dataclass_fields__", ()))
            names |= {f"{name}.{field}": None for field in fields if not field.startswith("_")}
            names |= {member: v for member, v in _members(name, value)}
    return names


@functools.cache
def short_names() -> dict[str, str]:
    """Returns the names that mean one public name without `jdist.`, such as `sync.int8`, `Stage` and `all_reduce`."""
    full = [name.removeprefix("jdist.") for name in public_names()]
    last: dict[str, list[str]] = {}
    for name in full:
        value = public_names()[f"jdist.{name}"]
        is_class = inspect.isclass(value) and not inspect.isclass(
            public_names().get(f"jdist.{name.rpartition('.')[0]}")
        )
        if is_class or (inspect.isfunction(value) and "." not in name):
            last.setdefault(name.rpartition(".")[2], []).append(name)
    short = {name: name for name in full if "." in name}
    for name, candidates in last.items():
        values = {id(public_names()[f"jdist.{candidate}"]) for candidate in candidates}
        is_word = "_" not in name and name.islower()  # such as `step` and `init`
        if len(values) == 1 and not is_word and name not in _AMBIGUOUS:
            short[name] = min(candidates, key=len)
    return {name: f"jdist.{target}" for name, target in (short | _METHODS).items()}


@functools.cache
def _of_instance(name: str) -> str | None:
    variable, _, member = name.partition(".")
    if variable not in _INSTANCES or not member:
        return None
    cls = public_names()[f"jdist.{_INSTANCES[variable]}"]
    first = member.partition(".")[0]
    target = f"jdist.{_INSTANCES[variable]}.{first}"
    if target in public_names():
        return target
    subclasses = [n for n, v in public_names().items() if inspect.isclass(v) and cls in v.__mro__]
    targets = [f"{subclass}.{first}" for subclass in subclasses if f"{subclass}.{first}" in public_names()]
    return targets[0] if len(targets) == 1 else None


@functools.cache
def external_names() -> dict[str, tuple[str, str, str, str]]:
    """Returns the table of names of other libraries: name to site, address of the site, role and path."""
    names = {}
    site = address = ""
    for line in TABLE.read_text(encoding="utf-8").splitlines():
        if line.startswith("["):
            site, _, address = (part.strip() for part in line[1:].partition("]"))
        elif line and not line.startswith("#") and site != "no page":
            name, role, path = line.split()
            names[name] = (site, address, role, path)
    return names


@functools.cache
def names_without_page() -> frozenset[str]:
    """Returns the names of other libraries that the documentation mentions, and that have no page in theirs."""
    return frozenset(TABLE.read_text(encoding="utf-8").partition("[no page]\n")[2].split())


def inherited(name: str) -> list[str]:
    """Returns the names of the same member in the base classes of its class, in their order."""
    owner, _, member = name.rpartition(".")
    bases = getattr(public_names().get(owner), "__mro__", ())[1:]
    classes = {id(value): name for name, value in public_names().items() if inspect.isclass(value)}
    names = [f"{classes[id(base)]}.{member}" for base in bases if id(base) in classes]
    return [name for name in names if name in public_names()]


def external_name(code: str) -> str | None:
    """Returns the full name if `code` is a name of another library, such as `flax.nnx.Module` for `nnx.Module`."""
    match = _CODE.fullmatch(code.strip())
    first, _, rest = match[1].partition(".") if match else ("", "", "")
    if not rest:
        return None
    name = f"{_PREFIXES.get(first, first)}.{rest}"
    return name if name.partition(".")[0] in LIBRARIES else None


def resolve(code: str, *, of_jdist: bool = True, all_of_jdist: bool = False) -> str | None:
    """Returns the full name that inline code refers to, or None.

    Args:
        code: Such as `jdist.Trainer`, `Trainer.fit`, `strategy.step(fn)`, `sync.int8`, `jax.jit`.
        of_jdist: Whether short names are those of jdist. False for the column of a table with the code of another library.
        all_of_jdist: Whether every word is a name of jdist, as on the page that lists them.

    Returns:
        The name, which is in `public_names()` or in `external_names()`.
    """
    match = _CODE.fullmatch(code.strip())
    if not match:
        return None
    name = match[1]
    if name in public_names() and not name.startswith("jdist._"):
        return name
    if all_of_jdist and f"jdist.{name}" in public_names():
        return f"jdist.{name}"
    if of_jdist:
        target = short_names().get(name) or _of_instance(name)
        if target:
            return target
    external = external_name(code)
    return external if external in external_names() else None
