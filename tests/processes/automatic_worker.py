"""Uses `auto_strategy`, on one process of several."""

import io
import logging

import numpy as np

import jdist


def strategy_and_total():
    """Returns the log, the class and the numbers of replicas and local devices of the strategy, and a sum over all replicas."""
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    log = logging.getLogger("jdist")
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    strategy = jdist.auto_strategy()
    values = strategy.distribute_values_from_function(lambda context: np.float32(1 + context.replica_id_in_sync_group))
    total = strategy.run(lambda x: jdist.all_reduce("sum", x), (values,))
    log.setLevel(logging.NOTSET)
    log.removeHandler(handler)
    description = type(strategy).__name__, strategy.num_replicas_in_sync, len(strategy.replicas.local_devices)
    return stream.getvalue(), *description, float(total)


def joined_as_another_process():
    """Returns the error of a resolver that describes three processes, and the resolver of a strategy without one."""
    workers = [f"localhost:{8476 + i}" for i in range(3)]
    resolver = jdist.cluster.SimpleClusterResolver({"worker": workers}, task_type="worker", task_id=2)
    try:
        jdist.MultiWorkerMirroredStrategy(resolver)
    except ValueError as error:
        return str(error), jdist.MultiWorkerMirroredStrategy().cluster_resolver
