"""A loop of the user that another process interrupts: `interrupted_loop.py KIND STRATEGY`.

Prints "ready" when a loop runs, and "kept" or "lost" after each interrupt. A line of standard input starts the next loop.
"""

import contextlib
import signal
import sys

import jax
import numpy as np

import jdist

from laws import STATES

# The number of devices, a strategy, and the number of examples: a step takes a millisecond at most.
STRATEGIES = {
    "one_device_in_a_scope": (1, lambda: jdist.OneDeviceStrategy("cpu:0"), 2**14),
    "mirrored": (2, jdist.MirroredStrategy, 8),
    "central": (2, jdist.CentralStorageStrategy, 8),
    "sharded": (2, jdist.ShardedStrategy, 8),
}


def keys():
    """A state with a random key, for which a call runs Python code of JAX."""
    make, step = STATES["dict"]()

    def split(state, x):
        new, loss = step({name: state[name] for name in state if name != "key"}, x)
        return new | {"key": jax.random.split(state["key"])[0]}, loss

    return lambda: make() | {"key": jax.random.key(0)}, split


KINDS = {**STATES, "keys": keys}


def is_alive(tree):
    return not any(leaf.is_deleted() for leaf in jax.tree.leaves(tree))


def main(kind, name):
    signal.signal(signal.SIGINT, signal.default_int_handler)  # which a shell in the background has ignored
    devices, make_strategy, examples = STRATEGIES[name]
    jdist.use_cpu_devices(devices)
    make, replica_step = KINDS[kind]()
    strategy = make_strategy()
    step = strategy.step(replica_step)
    (batch,) = strategy.distribute_dataset(np.ones((examples, 4), np.float32), examples)
    scope = strategy.scope() if "scope" in name else contextlib.nullcontext()
    state = None
    for _ in sys.stdin:
        try:
            if state is None or not is_alive(state):
                state = strategy.init(make)
            print("ready", flush=True)
            with scope:
                while True:
                    state, _ = step(state, batch)
        except KeyboardInterrupt:
            print("kept" if is_alive(state) else "lost", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
