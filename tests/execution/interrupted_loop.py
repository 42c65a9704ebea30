"""A loop of the user that another process interrupts: `interrupted_loop.py KIND DEVICES`.

Prints "ready" when a loop runs, and "kept" or "lost" after each interrupt. A line of standard input starts the next loop.
"""

import signal
import sys

import jax
import numpy as np

import jdist

from laws import STATES


def is_alive(tree):
    return not any(leaf.is_deleted() for leaf in jax.tree.leaves(tree))


def main(kind, devices):
    signal.signal(signal.SIGINT, signal.default_int_handler)  # which a shell in the background has ignored
    jdist.use_cpu_devices(devices)
    make, replica_step = STATES[kind]()
    strategy = jdist.MirroredStrategy()
    step = strategy.step(replica_step)
    (batch,) = strategy.distribute_dataset(np.ones((8, 4), np.float32), 8)
    state = None
    for _ in sys.stdin:
        try:
            if state is None or not is_alive(state):
                state = strategy.init(make)
            print("ready", flush=True)
            while True:
                state, _ = step(state, batch)
        except KeyboardInterrupt:
            print("kept" if is_alive(state) else "lost", flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
