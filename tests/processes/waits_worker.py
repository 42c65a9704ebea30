"""Processes that wait for each other in different calls."""

import pathlib

import jax
import numpy as np

import jdist


def error_of_different_calls(folder):
    """Returns the error of this process, of which process 0 makes another call than the others."""
    strategy = jdist.MultiWorkerMirroredStrategy()
    state = strategy.put(np.zeros(3, np.float32))
    checkpointer = jdist.Checkpointer(pathlib.Path(folder))
    try:
        if jax.process_index() == 0:
            checkpointer.save(1, state)
        else:
            strategy.run(lambda x: x + 1, (state,))
    except RuntimeError as error:
        return str(error)
    return None
