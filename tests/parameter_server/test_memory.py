"""Memory of parameter servers: constant over many steps, one copy of the state, freed with the strategy."""

import gc
import weakref

import jax
import numpy as np
import optax

import jdist

SIZE = 1000


def make_loop(**options):
    strategy = jdist.ParameterServerStrategy(workers=2, servers=2, **options)
    optimizer = optax.chain(jdist.sync.mean(), optax.adam(0.1))

    @strategy.step
    def step(state, x):
        w, opt_state = state
        updates, opt_state = optimizer.update(w - x, opt_state, w)
        return (optax.apply_updates(w, updates), opt_state), None

    state = strategy.init(lambda: (w := jax.numpy.zeros(SIZE), optimizer.init(w)))
    return strategy, step, state


def live_numbers():
    gc.collect()
    return sum(array.size for array in jax.live_arrays() if array.size == SIZE)


def test_memory_does_not_grow_over_many_steps():
    before = live_numbers()
    strategy, step, state = make_loop()
    x = np.float32(1)
    for _ in range(10):
        state, _ = step(state, x)
    strategy.join()
    after_ten = live_numbers()
    for _ in range(2000):
        state, _ = step(state, x)
    strategy.join()
    assert live_numbers() == after_ten
    assert after_ten - before == 3 * SIZE  # the parameters and two moments, once


def test_servers_are_freed_with_the_strategy_and_the_state():
    before = live_numbers()
    strategy, step, state = make_loop()
    state, _ = step(state, np.float32(1))
    reference = weakref.ref(strategy)
    del strategy, step, state
    gc.collect()
    assert reference() is None and live_numbers() == before
