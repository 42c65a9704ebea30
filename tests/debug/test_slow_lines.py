"""`debug.find_slow_lines`: names the lines of a loop that transfer or compile again and again, and no others."""

import threading
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax._src.array import ArrayImpl

import jdist

from laws import STRATEGIES


def step_fn(w, x, c=0.0):
    return w + 1, jdist.all_reduce("mean", jnp.mean(x) + jnp.mean(c))


class Loop:
    """A loop of steps over one batch."""

    def __init__(self, strategy, num_steps=10):
        self.strategy, self.num_steps = strategy, num_steps
        self.step = strategy.step(step_fn)
        self.x = strategy.split(np.ones(8, np.float32))

    def losses(self, *inputs):
        w = self.strategy.put(0)
        for _ in range(self.num_steps):
            w, loss = self.step(w, self.x, *inputs)
            yield loss


def found(call):
    """The warnings of a call inside the block."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with jdist.debug.find_slow_lines():
            call()
    return [
        (warning.category, str(warning.message), warning.lineno - call.__code__.co_firstlineno) for warning in caught
    ]


READS = {
    "float": float,
    "bool": lambda loss: 1 if loss < 1 else 0,
    "asarray": lambda loss: np.asarray(loss),
    "array": lambda loss: np.array(loss),
    "item": lambda loss: loss.item(),
    "tolist": lambda loss: loss.tolist(),
    "format": lambda loss: f"{loss:.3f}",
    "print": str,
}


@pytest.mark.parametrize("read", READS)
@pytest.mark.parametrize("name", ["one_device", "mirrored_2", "sharded_4"])
def test_reads_of_results_in_each_step(name, read):
    loop, read = Loop(STRATEGIES[name]()), READS[read]

    def train():
        for loss in loop.losses():
            read(loss)

    ((category, message, _),) = found(train)
    assert category is jdist.TransferWarning
    assert (
        "[] is read on the host after 10 of 10 steps, and each read waits for the step. Read it every 100 steps"
        in message
    )
    assert f"at {'tests/debug/test_slow_lines.py'}:" in message


def test_the_line_of_a_read(two):
    loop = Loop(two)

    def train():
        for loss in loop.losses():
            print(float(loss))

    ((_, message, line),) = found(train)
    assert line == 2
    assert message.startswith("`print(float(loss))` at ")


def test_the_same_host_array_in_each_step(two):
    loop, c = Loop(two), np.arange(4, dtype=np.float32)

    def train():
        for _ in loop.losses(c):
            pass

    ((category, message, _),) = found(train)
    assert category is jdist.TransferWarning
    assert "`c`, float32[4], is a numpy array with the same values in 10 of 10 steps" in message
    assert "`strategy.put(x)`, or `strategy.split(x)` for a batch." in message


def test_functions_that_are_compiled_in_a_loop():
    def compile_all():
        for i in range(12):
            jax.jit(lambda x: x + i)(1.0)  # noqa: B023

    ((category, message, line),) = found(compile_all)
    assert (category, line) == (jdist.RetraceWarning, 2)
    assert "a function `<lambda>` is compiled 12 times. Apply `jax.jit` once, outside the loop" in message


def test_reads_in_a_loop_without_steps(two):
    def read_all():
        for i in range(12):
            float(two.put(np.float32(i)))

    ((_, message, _),) = found(read_all)
    assert "is read on the host 12 times" in message


def every_fifth_step(two):
    for i, loss in enumerate(Loop(two, 50).losses()):
        if i % 10 == 0:
            float(loss)


def after_the_loop(two):
    losses = list(Loop(two).losses())
    [float(loss) for loss in losses]


def explicitly(two):
    for loss in Loop(two).losses():
        jax.device_get(loss)


def the_same_array(two):
    rate = two.put(np.float32(0.1))
    for _ in Loop(two).losses():
        float(rate)


def other_host_arrays(two):
    loop, w = Loop(two), two.put(0)
    for i in range(10):
        w, _ = loop.step(w, loop.x, np.full(4, i, np.float32))


def host_numbers(two):
    loop, w = Loop(two), two.put(0)
    for _ in range(10):
        w, _ = loop.step(w, loop.x, 0.5)


def another_thread(two):
    loop = Loop(two)

    def read():
        for loss in loop.losses():
            float(loss)

    thread = threading.Thread(target=read)
    thread.start()
    thread.join()


def functions_of_jax(two):
    for n in range(1, 13):
        jnp.sort(jnp.ones(n) * n)


def data_set(two):
    loop, w = Loop(two), two.put(0)
    for x in two.distribute_dataset(np.ones(80, np.float32), batch_size=8):
        w, _ = loop.step(w, x)


def trainer(two):
    model = (lambda key, x: {"w": jnp.ones(3)}, lambda params, x: x @ params["w"])
    data = np.ones((80, 3), np.float32), np.ones(80, np.float32)
    jdist.Trainer(model, optax.sgd(0.1), optax.squared_error, strategy=two).fit(data, batch_size=8)


def buckets(two):
    loop, w = Loop(two), two.put(0)
    widths = tuple(range(2, 14))
    batches = lambda: (np.ones((2, width), np.float32) for width in widths)
    for x in two.distribute_dataset(batches, batch_size=None, buckets=jdist.data.Buckets(widths)):
        w, _ = loop.step(w, x)


NOT_SLOW = [every_fifth_step, after_the_loop, explicitly, the_same_array, other_host_arrays, host_numbers, another_thread, functions_of_jax, data_set, trainer, buckets]  # fmt: skip


@pytest.mark.parametrize("loop", NOT_SLOW, ids=lambda loop: loop.__name__)
def test_other_lines_are_not_reported(loop, two):
    def call():
        loop(two)

    assert found(call) == []


def hooks():
    return ArrayImpl._value, getattr(ArrayImpl, "__buffer__", None), np.asarray, np.array


def test_everything_is_restored(two):
    before = hooks()
    with pytest.raises(ZeroDivisionError), jdist.debug.find_slow_lines(), jdist.debug.find_slow_lines():
        assert hooks() != before
        1 / 0  # noqa: B018
    assert hooks() == before
    assert jdist._src.core.activity.host_value_observers == []
    with pytest.warns(jdist.TransferWarning) as caught, jdist.debug.find_slow_lines(), jdist.debug.find_slow_lines():
        for loss in Loop(two).losses():
            float(loss)
    assert len(caught) == 2  # of each block
    assert hooks() == before
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for loss in Loop(two).losses():
            float(loss)


def test_ctrl_c_reports(two):
    with pytest.warns(jdist.TransferWarning), pytest.raises(KeyboardInterrupt), jdist.debug.find_slow_lines():
        for loss in Loop(two).losses():
            float(loss)
        raise KeyboardInterrupt
