"""Profiles in a process of their own: the profiler of jax 0.10.2 aborts a process that has compiled programs for absent TPUs."""

import pathlib
import shutil
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import jdist

from laws import STATES, STRATEGIES

# Otherwise an executable from the cache of an earlier run has the source lines of that run.
jax.config.update("jax_compilation_cache_include_metadata_in_key", True)
X = np.linspace(-1, 1, 96, dtype=np.float32).reshape(24, 4)


def _result(profile):
    """Returns the summary as a dict, and as text; checks that `read` returns it, also from the traces only."""
    summary, logdir = profile.summary, pathlib.Path(profile.summary.logdir)
    assert jdist.ProfileSummary.read(logdir) == summary
    (logdir / "summary.json").unlink()
    assert jdist.ProfileSummary.read(logdir) == summary
    return {**summary.as_dict(), "examples": {str(i): n for i, n in summary.examples.items()}, "text": str(summary)}


PLACES = {
    **STRATEGIES,
    "virtual": lambda: jdist.MirroredStrategy(["cpu:0", "cpu:1"], virtual_replicas=4),
    "debug": lambda: jdist.testing.DebugStrategy(2),
    "parameter_server": lambda: jdist.ParameterServerStrategy(workers=2, servers=1),
}


def steps_of_strategy(folder, strategy_name, state_name):
    """Returns the summary of four steps, the first of which compiles."""
    strategy, kind = PLACES[strategy_name](), STATES[state_name]()
    state, step = strategy.init(kind.make), strategy.step(kind.step)
    with jdist.profile(folder) as profile:
        for batch in strategy.distribute_dataset(X, batch_size=24, epochs=4):
            state, _ = step(state, batch)
    return _result(profile)


def several_steps_per_call(folder):
    strategy, kind = jdist.MirroredStrategy(["cpu:0", "cpu:1"]), STATES["dict"]()
    state, step = strategy.init(kind.make), strategy.step(kind.step, steps_per_call=3)
    batches = iter(strategy.distribute_dataset(X, batch_size=24, epochs=None))
    for _ in range(2):
        state, _ = step(state, [next(batches) for _ in range(3)])
    with jdist.profile(folder) as profile:
        state, _ = step(state, [next(batches) for _ in range(3)])
    return _result(profile)


def trainer(folder):
    """Returns the summary of three calls of `fit`, and the one of a block around another `fit`."""
    strategy = jdist.MirroredStrategy(["cpu:0", "cpu:1"])
    labels = np.arange(24) % 3
    loss = optax.softmax_cross_entropy_with_integer_labels
    trainer = jdist.Trainer(nnx.Linear(4, 3, rngs=nnx.Rngs(0)), optax.adam(0.1), loss, strategy=strategy)
    callback = jdist.callbacks.Profile(pathlib.Path(folder) / "callback", start=3, stop=5)
    trainer.fit((X, labels), batch_size=4, epochs=2, callbacks=[callback], progress="off")
    with jdist.profile(pathlib.Path(folder) / "block") as profile:
        trainer.fit((X, labels), batch_size=4, epochs=1, progress="off")
    return _result(callback), _result(profile)


def plain_jax(folder):
    """Returns the summary of a large and a small product, which are compiled before the block, and the line of the large one."""

    @jax.jit
    def products(small, large):
        first = jnp.tanh(small @ small)
        return first, large @ large  # the line of the large product

    arguments = jnp.ones((8, 8)), jnp.ones((600, 600))
    jax.block_until_ready(products(*arguments))
    with jdist.profile(folder) as profile:
        for _ in range(5):
            results = products(*arguments)
        del results
    lines = pathlib.Path(__file__).read_text().splitlines()
    number = 1 + next(i for i, line in enumerate(lines) if line.endswith("# the line of the large product"))
    return _result(profile), f"profile_worker.py:{number}"


def slow_source(folder):
    """Returns the summary of steps whose source sleeps."""

    def examples():
        for _ in range(24):
            time.sleep(0.02)
            yield X[0]

    strategy, kind = jdist.MirroredStrategy(["cpu:0", "cpu:1"]), STATES["dict"]()
    state, step = strategy.init(kind.make), strategy.step(kind.step)
    state, _ = step(state, strategy.split(X[:2]))
    with jdist.profile(folder) as profile:
        for batch in strategy.distribute_dataset(examples(), batch_size=2):
            state, _ = step(state, batch)
    return _result(profile)


def compilation(folder):
    """Returns the summary of a block that traces and compiles."""

    def slow_to_trace(x):
        time.sleep(0.3)
        return x * 3

    with jdist.profile(folder) as profile:
        jax.jit(slow_to_trace)(jnp.ones(3))
    return _result(profile)


def loop_with_collectives(folder):
    """Returns the summary of a program whose loop and branch contain collectives."""
    mesh = jax.make_mesh((2,), ("i",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:2])

    def fn(x):
        x = jax.lax.fori_loop(0, 4, lambda _, x: jax.lax.psum(jnp.tanh(x @ x), "i"), x)
        return jax.lax.cond(x.sum() > 1e9, lambda x: x, lambda x: jax.lax.pmax(x, "i"), jax.lax.pmean(x, "i"))

    spec = jax.sharding.PartitionSpec()
    fn = jax.jit(jax.shard_map(fn, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False))
    x = jnp.ones((64, 64))
    jax.block_until_ready(fn(x))
    with jdist.profile(folder) as profile:
        fn(x).block_until_ready()
    return _result(profile)


def nothing(folder):
    with jdist.profile(folder) as profile:
        time.sleep(0.01)
    return _result(profile)


def examples_of(folder, strategy_name, num_examples, batch_size, options):
    """Returns the true examples per replica in the summary, and those that the weights of the batches count."""
    strategy = STRATEGIES[strategy_name]()
    data = strategy.distribute_dataset(X[:num_examples], batch_size=batch_size, remainder="pad", **options)
    next(iter(data))  # outside the block
    parts = strategy.num_replicas_in_sync if strategy_name != "sharded_4" else 4
    counts = np.zeros(parts, int)
    with jdist.profile(folder) as profile:
        for _, weights in data:
            counts += np.asarray(weights.tree).reshape(parts, -1).sum(1).astype(int)
    result = _result(profile)
    return result["examples"], counts.tolist(), result["imbalance"]


def errors(folder):
    """Returns the errors of wrong uses, each followed by a profile that must work."""
    folder = pathlib.Path(folder)
    messages = {}

    def attempt(name, fn):
        try:
            fn()
        except Exception as error:
            messages[name] = f"{type(error).__name__}: {error}"
        with jdist.profile(folder / "after") as profile:
            jnp.ones(3).block_until_ready()
        _result(profile)

    def nested():
        with jdist.profile(folder / "a"), jdist.profile(folder / "b"):
            pass

    def beside_jax():
        jax.profiler.start_trace(folder / "jax")
        try:
            with jdist.profile(folder / "a"):
                pass
        finally:
            jax.profiler.stop_trace()

    def in_block():
        profile = jdist.profile(folder / "failed")
        try:
            with profile:
                raise OSError("The disk is full.")
        finally:
            messages["files"] = [file.name for file in (folder / "failed").rglob("*.*")]
            try:
                profile.summary  # noqa: B018
            except RuntimeError as error:
                messages["summary"] = str(error)

    def not_ended():
        with jdist.profile(folder / "a") as profile:
            profile.summary  # noqa: B018

    def file_in_the_way():
        (folder / "file").write_text("")
        with jdist.profile(folder / "file" / "logs"):
            messages["ran"] = True

    for fn in (nested, beside_jax, in_block, not_ended, file_in_the_way):
        attempt(fn.__name__, fn)
    return messages


def trace_of_jax(folder):
    """Writes a trace with `jax.profiler`, and returns its path and its summary."""
    x = jnp.ones((64, 64))
    with jax.profiler.trace(folder):
        (x @ x).block_until_ready()
    summary = jdist.ProfileSummary.read(folder)
    (file,) = pathlib.Path(folder).rglob("*.xplane.pb")
    assert jdist.ProfileSummary.read(file).devices == summary.devices
    return str(file), summary.as_dict()


def rerun(folder):
    """Returns the summary of the second of two profiles in one directory."""
    for shape in (4, 8):
        shutil.rmtree(pathlib.Path(folder) / "plugins", ignore_errors=True)
        with jdist.profile(folder) as profile:
            jnp.sin(jnp.ones(shape)).block_until_ready()
    return _result(profile)
