"""The models of `benchmarks/models.py` in TensorFlow, as peers: the same shapes, optimizers and batches."""

import json
import os
import pathlib
import socket
import time

os.environ["KERAS_BACKEND"] = "tensorflow"
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import models
import tensorflow as tf

layers = tf.keras.layers


def transformer(blocks, width, length):
    x = inputs = layers.Input((length,), dtype=tf.int32)
    x = layers.Embedding(1000, width)(x)
    for _ in range(blocks):
        y = layers.LayerNormalization()(x)
        x = x + layers.MultiHeadAttention(num_heads=4, key_dim=width // 4)(y, y)
        y = layers.Dense(4 * width)(layers.LayerNormalization()(x))
        x = x + layers.Dense(width)(tf.keras.activations.gelu(y, approximate=True))
    return tf.keras.Model(inputs, layers.Dense(10)(layers.GlobalAveragePooling1D()(x)))


def tensorflow_model(model, shape):
    """Returns the Keras model with the shapes of a flax model, for inputs of shape `shape`."""
    if isinstance(model, models.Transformer):
        return transformer(model.blocks, model.width, shape[1])
    if isinstance(model, models.CNN):
        convolutions = [layers.Conv2D(width, 3, padding="same", activation="relu") for width in (32, 64)]
        hidden = [*convolutions, layers.MaxPooling2D(), layers.Flatten(), layers.Dense(128, activation="relu")]
    else:
        hidden = [layers.Dense(width, activation="relu") for width in model.widths]
    return tf.keras.Sequential([layers.Input(shape[1:]), *hidden, layers.Dense(10)])


class MultiWorkerLoop:
    """Trains with `MultiWorkerMirroredStrategy` and AdamW; every call of `losses` continues the training.

    Args:
        model: The flax model whose shapes are used.
        batch: The inputs and labels of this process.
        compiles: Whether XLA compiles the loss and its gradients.
    """

    def __init__(self, model, batch, compiles):
        strategy = tf.distribute.get_strategy()
        x, y = (tf.constant(part) for part in batch)
        with strategy.scope():
            net = tensorflow_model(model, batch[0].shape)
            optimizer = tf.keras.optimizers.AdamW(1e-3, weight_decay=1e-4)
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

        self.step = tf.function(lambda: strategy.run(train_step, args=(x, y)))

    def losses(self, steps):
        return [self.step().numpy() for _ in range(steps)]


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
