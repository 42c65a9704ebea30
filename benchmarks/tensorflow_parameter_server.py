"""TensorFlow's `ParameterServerStrategy` for `parameter_server.py`: reads `[size, steps]` per line, and prints seconds.

Its arguments are the numbers of workers and of servers, and for the processes that it starts also job, index and cluster.
"""

import json
import os
import socket
import subprocess
import sys
import time

os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
os.environ["GRPC_FAIL_FAST"] = "use_caller"
import numpy as np  # noqa: E402
import tensorflow as tf  # noqa: E402

RATE, LEAVES = 1e-3, 4
ROWS, WIDTH, IDS = 100_000, 64, 1024


def free_ports(count: int) -> list[int]:
    """Returns ports of the loopback interface that are free now."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports


def serve(job: str, index: int, cluster: dict[str, list[str]]) -> None:
    """Runs a worker or a server until the coordinator ends."""
    server = tf.distribute.Server(tf.train.ClusterSpec(cluster), job_name=job, task_index=index, protocol="grpc")
    assert server.target
    sys.stdin.read()
    os._exit(0)


def coordinate(workers: int, servers: int) -> None:
    """Starts the processes, and runs the measurements of the standard input."""
    ports = free_ports(workers + servers)
    addresses = [f"127.0.0.1:{port}" for port in ports]
    cluster = {"worker": addresses[:workers], "ps": addresses[workers:]}
    processes = [
        subprocess.Popen(
            [sys.executable, __file__, str(workers), str(servers), job, str(index), json.dumps(cluster)],
            stdin=subprocess.PIPE,
        )
        for job, tasks in cluster.items()
        for index in range(len(tasks))
    ]
    resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(tf.train.ClusterSpec(cluster), rpc_layer="grpc")
    strategy = tf.distribute.ParameterServerStrategy(resolver)
    coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
    print(0, flush=True)
    sys.stdin.readline()
    steps_of: dict[int, tf.types.experimental.PolymorphicFunction] = {}
    for line in sys.stdin:
        size, steps = json.loads(line)
        if size not in steps_of:
            steps_of[size] = make_step(strategy, size)
        start = time.perf_counter()
        for _ in range(steps):
            coordinator.schedule(steps_of[size])
        coordinator.join()
        print(time.perf_counter() - start, flush=True)
    for process in processes:
        process.stdin.close()
    os._exit(0)


def make_step(strategy: tf.distribute.Strategy, size: int) -> tf.types.experimental.PolymorphicFunction:
    """Returns a step that reads and updates `size` parameters; for one parameter, a step that does nothing."""
    if not size:
        return make_sparse_step(strategy)
    with strategy.scope():
        variables = [tf.Variable(tf.zeros([size // LEAVES])) for _ in range(LEAVES if size > 1 else 0)]

    @tf.function
    def step():
        with tf.GradientTape() as tape:
            loss = tf.add_n(
                [0.5 * tf.reduce_sum((variable - 1.0) ** 2) for variable in variables] or [tf.constant(0.0)]
            )
        for variable, gradient in zip(variables, tape.gradient(loss, variables), strict=True):
            variable.assign_sub(RATE * gradient)
        return tf.constant(0.0)

    return step


def make_sparse_step(strategy: tf.distribute.Strategy) -> tf.types.experimental.PolymorphicFunction:
    """Returns a step that looks up and updates rows of a table."""
    with strategy.scope():
        table = tf.Variable(tf.zeros([ROWS, WIDTH]))
    ids = np.random.default_rng(0).integers(0, ROWS, IDS)

    @tf.function
    def step():
        with tf.GradientTape() as tape:
            loss = 0.5 * tf.reduce_sum((tf.nn.embedding_lookup(table, ids) - 1.0) ** 2)
        gradient = tape.gradient(loss, table)
        table.scatter_sub(tf.IndexedSlices(RATE * gradient.values, gradient.indices))
        return tf.constant(0.0)

    return step


if __name__ == "__main__":
    if len(sys.argv) > 3:
        serve(sys.argv[3], int(sys.argv[4]), json.loads(sys.argv[5]))
    else:
        coordinate(int(sys.argv[1]), int(sys.argv[2]))
