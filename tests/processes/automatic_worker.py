"""One process of several that uses `auto_strategy`; prints the strategy, and a sum over all replicas.

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
values = strategy.distribute_values_from_function(lambda context: np.float32(1 + context.replica_id_in_sync_group))
total = strategy.run(lambda x: jdist.all_reduce("sum", x), (values,))
print(type(strategy).__name__, strategy.num_replicas_in_sync, len(strategy.replicas.local_devices), float(total))

# The process that hosts the coordinator exits last.
jax.distributed.shutdown()
