"""One process of several that leaves the choice of a strategy to jdist; prints what it was given, and a sum over all.

python automatic_worker.py COORDINATOR COUNT NUMBER
"""

import logging
import sys

import jax

address, count, number = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
jax.distributed.initialize(address, count, number, coordinator_bind_address=address)

import numpy as np

import jdist

logging.basicConfig(stream=sys.stdout, format="%(name)s: %(message)s")
strategy = jdist.auto_strategy()
mine = strategy.distribute_values_from_function(lambda context: np.float32(1 + context.replica_id_in_sync_group))
total = strategy.run(lambda x: jdist.all_reduce("sum", x), (mine,))
print(type(strategy).__name__, strategy.num_replicas_in_sync, len(strategy.replicas.local), float(total))

# The process that holds the coordinator leaves last.
jax.distributed.shutdown()
