"""Cells of a notebook, in a real kernel: run again, redefined, interrupted, ended by an error. The next cell works."""

import warnings

import pytest

pytestmark = pytest.mark.slow

SETUP = """
import gc, sys, threading, time
import jax, jax.numpy as jnp, numpy as np, optax
import jdist

strategy = jdist.MirroredStrategy()
x = np.random.default_rng(0).normal(size=(512, 3)).astype(np.float32)
y = x @ np.float32([1, -2, 3])

def endless():
    while True:
        for i in range(0, 512, 64):
            yield x[i : i + 64], y[i : i + 64]

def prefetch_threads():
    threads = [thread for thread in threading.enumerate() if thread.name.startswith("jdist")]
    for thread in threads:
        thread.join(60)  # a thread that was told to end makes its last item first
    return sum(thread.is_alive() for thread in threads)

def counts():
    gc.collect()
    kinds = [type(value).__name__ for value in gc.get_objects()]
    return kinds.count("Program"), kinds.count("MirroredStrategy"), len(jax.live_arrays())
"""

STEP = """
@strategy.step
def train_step(state, x, y):
    loss, grads = jax.value_and_grad(lambda w: jnp.mean((x @ w - y) ** 2))(state["w"])
    loss, grads = jdist.all_reduce("mean", (loss, grads))
    return {"w": state["w"] - RATE * grads, "steps": state["steps"] + 1}, loss

state = strategy.init(lambda: {"w": jnp.zeros(3), "steps": 0})
for batch in strategy.distribute_dataset((x, y), batch_size=64):
    state, loss = train_step(state, *batch)
"""

LOOP = """
for number, batch in enumerate(strategy.distribute_dataset(endless, batch_size=None)):
    state, loss = train_step(state, *batch)
    if number == 20:
        print("running", flush=True)
"""

TRAINER = """
trainer = jdist.Trainer(
    (lambda key, x: jnp.zeros(3), lambda w, x: x @ w), optax.sgd(0.1), optax.squared_error, strategy=strategy
)
def report(event):
    if event.step == 20:
        print("running", flush=True)
def fail(event):
    if event.step == 20:
        raise RuntimeError("The callback failed.")
def failing():
    for i in range(0, 512, 64):
        yield x[i : i + 64], y[i : i + 64]
    raise OSError("The disk failed.")
"""


@pytest.fixture(scope="module")
def kernel():
    """Returns a kernel in which `SETUP` has run, one for all tests of this file."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of pyzmq and of the kernel's start
        from notebook_kernel import Kernel

        running = Kernel()
    setup = running.run(SETUP)
    assert not setup.error, setup
    yield running
    running.close()


def run(kernel, code, **options):
    """Runs a cell that ends without an error, and returns what it printed."""
    output = kernel.run(code, **options)
    assert not output.error, output
    return output.text.strip()


def test_interrupted_loop_leaves_a_usable_state(kernel):
    run(kernel, STEP.replace("RATE", "0.1"))
    for _ in range(3):
        output = kernel.run(LOOP, interrupt_after="running")
        assert output.error == "KeyboardInterrupt", output
        assert run(kernel, "print(state['w'].is_deleted(), prefetch_threads())") == "False 0"
    assert run(kernel, "state, loss = train_step(state, *batch); print(float(loss) < 1e-3)") == "True"
    assert int(run(kernel, "print(int(state['steps']))")) > 3 * 20


def test_error_names_the_cell_and_the_line(kernel):
    run(kernel, "batch, _ = next(iter(strategy.distribute_dataset((x, y), batch_size=64)))")
    code = "def keep(state, x):\n    return state + x[0, 0], None\nstrategy.step(keep)(jnp.float32(0), batch)"
    output = kernel.run(code)
    assert output.error == "NotMirroredError", output
    cell = run(kernel, "print(len(In) - 2)")
    assert f"add at cell In[{cell}], line 2 in keep" in output.message


def test_cell_that_runs_again_leaves_nothing_behind(kernel):
    run(kernel, STEP.replace("RATE", "0.1"))
    kernel.run("1 / 0")  # replaces the last traceback, which the notebook stores with the values of its frames
    first = run(kernel, "print(counts())")
    for _ in range(3):
        run(kernel, "strategy = jdist.MirroredStrategy()" + STEP.replace("RATE", "0.1"))
    assert run(kernel, "print(counts())") == first


def test_redefined_function_is_the_one_that_runs(kernel):
    assert run(kernel, STEP.replace("RATE", "0.1") + "print(state['w'][2] > 1)") == "True"
    assert run(kernel, STEP.replace("RATE", "0.0") + "print(state['w'].tolist())") == "[0.0, 0.0, 0.0]"
    for factor in (2, 3):
        run(kernel, f"def scaled(x): return {factor} * x")
        assert run(kernel, "print(float(strategy.run(scaled, (1.0,))))") == f"{factor}.0"
        run(kernel, f"def make(): return {{'w': jnp.full(2, {factor})}}")
        assert run(kernel, "print(strategy.init(make)['w'].tolist())") == f"[{factor}, {factor}]"
    run(kernel, TRAINER + "before = trainer.fit((x, y), batch_size=64, progress='off')")
    redefined = TRAINER.replace("sgd(0.1)", "sgd(0.0)")
    run(kernel, redefined + "after = trainer.fit((x, y), batch_size=64, progress='off')")
    assert run(kernel, "print(before.state.params[2] > 1, after.state.params.tolist())") == "True [0.0, 0.0, 0.0]"


@pytest.mark.parametrize("progress", ["off", "auto"])
def test_interrupted_fit_returns_its_result(kernel, progress):
    run(kernel, TRAINER)
    fit = f"fit = trainer.fit(endless, batch_size=None, steps=10**6, callbacks=[report], progress={progress!r})"
    run(kernel, fit, interrupt_after="running")
    assert run(kernel, "print(fit.stop_reason, prefetch_threads())") == "Ctrl-C was pressed. 0"
    more = "fit = trainer.fit((x, y), batch_size=64, steps=fit.steps + 8, state=fit.state, progress='off')"
    assert run(kernel, more + "\nprint(fit.stop_reason)") == "All requested steps were taken."


@pytest.mark.parametrize(
    "arguments, message, steps",
    [
        ("endless, batch_size=None, steps=100, callbacks=[fail]", "RuntimeError: The callback failed.", 20),
        ("failing, batch_size=None, steps=100", "OSError: The disk failed.", 7),
    ],
    ids=["callback", "source"],
)
def test_error_in_fit_leaves_the_state_and_no_thread(kernel, arguments, message, steps):
    run(kernel, TRAINER)
    run(kernel, "trainer.fit((x, y), batch_size=64, progress='off'); fit = None")
    kernel.run("1 / 0")  # replaces the last traceback
    before = run(kernel, "print(counts()[2])")
    output = kernel.run(f"trainer.fit({arguments}, progress='auto')")
    assert output.error == "FitError"
    assert message in output.message
    assert run(kernel, "print(sys.last_value.fit.steps, prefetch_threads())") == f"{steps} 0"
    resumed = "fit = trainer.fit((x, y), batch_size=64, steps=100, state=sys.last_value.fit.state, progress='off')"
    assert run(kernel, resumed + "\nprint(fit.stop_reason)") == "All requested steps were taken."
    kernel.run("fit = None\n1 / 0")
    assert run(kernel, "print(counts()[2])") == before


@pytest.mark.parametrize("method", ["evaluate", "predict"])
def test_error_in_evaluation_leaves_no_thread(kernel, method):
    run(kernel, TRAINER + "fit = trainer.fit((x, y), batch_size=64, progress='off')")
    output = kernel.run(f"trainer.{method}(fit.state, failing, batch_size=None)")
    assert (output.error, output.message) == ("OSError", "The disk failed.")
    assert run(kernel, "print(prefetch_threads(), fit.state.params.is_deleted())") == "0 False"


def test_interrupt_while_tracing_leaves_no_context(kernel):
    run(kernel, STEP.replace("RATE", "0.1"))
    slow = """
@strategy.step
def slow_step(state, x, y):
    print("running", flush=True)
    time.sleep(30)
    return state, jdist.all_reduce("mean", x.sum())

with strategy.scope():
    slow_step(state, *batch)
"""
    output = kernel.run(slow, interrupt_after="running")
    assert output.error == "KeyboardInterrupt", output
    assert run(kernel, "print(jdist.has_strategy(), jdist.in_cross_replica_context())") == "False False"
    assert run(kernel, "state, loss = train_step(state, *batch); print(float(loss) < 1)") == "True"
