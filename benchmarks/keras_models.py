"""The models of `benchmarks/models.py` in Keras, as peers: the same shapes, optimizers and batches.

The importing module sets `KERAS_BACKEND` before.
"""

import keras
import models
from keras import layers


def transformer(blocks, width, length):
    x = inputs = layers.Input((length,), dtype="int32")
    x = layers.Embedding(1000, width)(x)
    for _ in range(blocks):
        y = layers.LayerNormalization()(x)
        x = x + layers.MultiHeadAttention(num_heads=4, key_dim=width // 4)(y, y)
        y = layers.Dense(4 * width)(layers.LayerNormalization()(x))
        x = x + layers.Dense(width)(keras.ops.gelu(y, approximate=True))
    return keras.Model(inputs, layers.Dense(10)(layers.GlobalAveragePooling1D()(x)))


def keras_model(model, shape):
    """Returns the Keras model with the shapes of a flax model, for inputs of shape `shape`."""
    if isinstance(model, models.Transformer):
        return transformer(model.blocks, model.width, shape[1])
    if isinstance(model, models.CNN):
        convolutions = [layers.Conv2D(width, 3, padding="same", activation="relu") for width in (32, 64)]
        hidden = [*convolutions, layers.MaxPooling2D(), layers.Flatten(), layers.Dense(128, activation="relu")]
    else:
        hidden = [layers.Dense(width, activation="relu") for width in model.widths]
    return keras.Sequential([layers.Input(shape[1:]), *hidden, layers.Dense(10)])


def adamw():
    """Returns the optimizer of the models, with the defaults of optax."""
    return keras.optimizers.AdamW(1e-3, weight_decay=1e-4, epsilon=1e-8)


class Fit:
    """`model.fit` on several devices of JAX, by `DataParallel`; every call of `losses` continues the training.

    Args:
        model: The flax model whose shapes are used.
        data: Inputs and labels of all steps, in order.
        batch_size: The number of examples per step.
        devices: The devices of JAX.
        weights: The initial weights, or None for random ones.
    """

    def __init__(self, model, data, batch_size, devices, weights):
        self.data, self.batch_size = data, batch_size
        names = [f"{device.platform}:{device.id}" for device in devices]
        self.distribution = keras.distribution.DataParallel(devices=names)
        with self.distribution.scope():
            self.model = keras_model(model, data[0].shape)
            if weights is not None:
                self.model.set_weights(weights)
            loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
            self.model.compile(optimizer=adamw(), loss=loss)

    def losses(self):
        with self.distribution.scope():
            history = self.model.fit(*self.data, batch_size=self.batch_size, shuffle=False, verbose=0)
        return history.history["loss"]
