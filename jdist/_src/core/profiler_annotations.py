"""The annotations that jdist adds to a trace of `jax.profiler`."""

from typing import Any

import jax

BLOCK = "jdist.profile"  # the interval of a `jdist.profile`, with `process` and `num_processes`
INPUT = "jdist.input"  # a wait for a batch
BATCH = "jdist.batch"  # at the time of a batch: its true examples per replica, `replica:examples replica:examples ...`
COMPILE = "jdist.compile"  # at the end of a trace, lowering or compilation, with its `seconds`

is_profile_open = False  # whether a `jdist.profile` reads the current trace; `profiling/profile.py` sets it


def input_wait() -> jax.profiler.TraceAnnotation:
    """Returns the annotation of a wait for a batch, which starts now."""
    annotation = jax.profiler.TraceAnnotation(INPUT)
    annotation.__enter__()
    return annotation


def mark(name: str, **values: Any) -> None:
    """Adds an event without a duration to the current trace, if there is one."""
    with jax.profiler.TraceAnnotation(name, **values):
        pass
