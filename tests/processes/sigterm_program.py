"""Joins two processes, and waits for SIGTERM: without a handler, with an own one, or with JAX's preemption service.

jdist run -n 2 sigterm_program.py KIND
"""

import signal
import sys
import time

import jax
from jax.experimental import multihost_utils

import jdist

kind = sys.argv[1]
if kind == "own handler before":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(3))
jdist.MultiWorkerMirroredStrategy()
if kind == "own handler after":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(3))
check = 1
if kind == "JAX's service":
    multihost_utils.reached_preemption_sync_point(check)
print(f"process {jax.process_index()} is ready", flush=True)
while kind != "JAX's service" or not multihost_utils.reached_preemption_sync_point(check := check + 1):
    time.sleep(0.02)
print("agreed", flush=True)
sys.exit(5)
