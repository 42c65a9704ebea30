"""The models of `benchmarks/models.py` in TensorFlow, as peers: the same shapes, optimizers and batches."""

import json
import os
import pathlib
import socket
import time

os.environ["KERAS_BACKEND"] = "tensorflow"
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import numpy as np
import tensorflow as tf
from keras_models import adamw, keras_model


class StrategyLoop:
    """Trains with the current strategy and AdamW; every call of `losses` continues the training.

    Args:
        model: The flax model whose shapes are used.
        batch: The inputs and labels of the replicas of this process.
        compiles: Whether XLA compiles the loss and its gradients.
    """

    def __init__(self, model, batch, compiles):
        strategy = tf.distribute.get_strategy()
        replicas = len(strategy.extended.worker_devices)
        parts = [tuple(map(tf.constant, part)) for part in zip(*(np.split(x, replicas) for x in batch), strict=True)]
        self.batch = strategy.experimental_distribute_values_from_function(
            lambda context: parts[context.replica_id_in_sync_group % replicas]
        )
        with strategy.scope():
            net, optimizer = keras_model(model, batch[0].shape), adamw()
            optimizer.build(net.trainable_variables)

        @tf.function(jit_compile=compiles)
        def gradients(x, y):
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(y, net(x, training=True)))
                share = loss / strategy.num_replicas_in_sync  # the optimizer sums the gradients of the replicas
            return loss, tape.gradient(share, net.trainable_variables)

        def train_step(x, y):
            loss, grads = gradients(x, y)
            optimizer.apply_gradients(zip(grads, net.trainable_variables, strict=True))
            return loss

        self.step = tf.function(lambda batch: strategy.run(train_step, args=batch))
        self.local_results = strategy.experimental_local_results

    def losses(self, steps):
        return [np.mean([loss.numpy() for loss in self.local_results(self.step(self.batch))]) for _ in range(steps)]


def logical_devices(count):
    """Splits the CPU into devices, before TensorFlow uses it."""
    (cpu,) = tf.config.list_physical_devices("CPU")
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * count)


def join(folder, process, count):
    """Joins the processes, and sets their strategy. They exchange their ports in files of `folder`.

    They connect over the loopback interface, but the server of TensorFlow listens on all interfaces.
    """
    threads = int(os.environ.get("NPROC", "0"))  # as the other libraries
    tf.config.threading.set_intra_op_parallelism_threads(threads)
    ports = [pathlib.Path(folder, f"tensorflow{index}") for index in range(count)]
    with socket.socket() as probe:  # TensorFlow cannot listen at the port before the socket is closed
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    ports[process].with_suffix(".new").write_text(str(port))
    ports[process].with_suffix(".new").rename(ports[process])
    while not all(path.exists() for path in ports):
        time.sleep(0.01)
    workers = [f"127.0.0.1:{path.read_text()}" for path in ports]
    os.environ["TF_CONFIG"] = json.dumps({"cluster": {"worker": workers}, "task": {"type": "worker", "index": process}})
    tf.distribute.experimental_set_strategy(tf.distribute.MultiWorkerMirroredStrategy())
