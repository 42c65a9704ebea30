"""Trains a few steps under the real profiler: `python trace_worker.py FOLDER`; prints the names of the traced events.

In a separate process: the profiler of jax 0.10.2 aborts a process that has compiled programs for absent TPUs.
"""

import glob
import sys

import jax

from jdist import callbacks

from small_loop import place, regression, train

two = place("mirrored_2")
state, call = regression(two)
state, _ = call(state, 0)
train(two, [callbacks.Profile(sys.argv[1], start=2, stop=3)], start=1, state=state, call=call)
(file,) = glob.glob(f"{sys.argv[1]}/**/*.xplane.pb", recursive=True)
for plane in jax.profiler.ProfileData.from_file(file).planes:
    for line in plane.lines:
        print(*(event.name for event in line.events), sep="\n")
