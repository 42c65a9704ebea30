"""Trains a small nnx CNN on real data with `jdist.Trainer`: fit, evaluate, predict, and an HTML report.

    python examples/digits_fit.py                 # all accelerators, or 4 CPU devices
    python examples/digits_fit.py --replicas 2 --epochs 5 --report run.html
    jdist run -n 2 examples/digits_fit.py         # two processes, with one CPU device each, or with half of the GPUs

The data are the 1,797 handwritten digits of scikit-learn: 8 x 8 pixels, 10 classes.
"""

import argparse
import math
import os

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from rich.console import Console

import jdist

try:
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split
except ModuleNotFoundError:
    raise SystemExit('The digits come with scikit-learn: python -m pip install -e ".[examples]"') from None


class CNN(nnx.Module):
    """Two convolutions and two dense layers: `[batch, 8, 8, 1]` to `[batch, 10]`."""

    def __init__(self, rngs: nnx.Rngs):
        self.conv1 = nnx.Conv(1, 32, (3, 3), rngs=rngs)
        self.conv2 = nnx.Conv(32, 64, (3, 3), rngs=rngs)
        self.dense = nnx.Linear(4 * 4 * 64, 128, rngs=rngs)
        self.out = nnx.Linear(128, 10, rngs=rngs)
        self.rngs = nnx.Rngs(shift=rngs.params())

    def __call__(self, images: jax.Array, train: bool) -> jax.Array:
        """Returns the logits of each class. During training each image is shifted by at most one pixel."""
        if train:
            shifts = jax.random.randint(self.rngs.shift(), (len(images), 2), -1, 2)
            images = jax.vmap(lambda image, shift: jnp.roll(image, shift, axis=(0, 1)))(images, shifts)
        x = nnx.relu(self.conv1(images))
        x = nnx.max_pool(nnx.relu(self.conv2(x)), (2, 2), strides=(2, 2))
        return self.out(nnx.relu(self.dense(x.reshape(len(x), -1))))


def load_data():
    """Returns images and labels for training, for validation after each epoch, and for the final test."""
    digits = load_digits()
    images, labels = (digits.images / 16).astype(np.float32)[..., None], digits.target.astype(np.int32)
    others, test = train_test_split(np.arange(len(labels)), test_size=360, random_state=0, stratify=labels)
    train, validation = train_test_split(others, test_size=180, random_state=0, stratify=labels[others])
    return [(images[indices], labels[indices]) for indices in (train, validation, test)]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--replicas", type=int, help="number of devices (default: all accelerators, or 4 CPU devices)")
    parser.add_argument("--epochs", type=int, default=30, help="at most (default: %(default)s)")
    parser.add_argument("--batch-size", type=int, default=128, help="global batch size (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of weights, shuffling and shifts (default: %(default)s)")
    parser.add_argument("--report", metavar="FILE.html", default="digits_fit.html", help="default: %(default)s")
    args = parser.parse_args()
    if "JDIST_NUM_PROCESSES" not in os.environ:  # `jdist run` chooses the number of devices per process
        jdist.use_cpu_devices(args.replicas or 4)  # before JAX starts; no effect on accelerators
    strategy = jdist.auto_strategy()
    if args.replicas:
        strategy = jdist.MirroredStrategy(jax.devices()[: args.replicas])

    console = Console(highlight=False, markup=False, soft_wrap=True, quiet=jax.process_index() > 0)
    train, validation, test = load_data()
    steps = args.epochs * math.ceil(len(train[0]) / args.batch_size)
    schedule = optax.warmup_cosine_decay_schedule(0.0, 3e-3, steps // 10, steps)

    trainer = jdist.Trainer(
        CNN(nnx.Rngs(args.seed)),
        optax.inject_hyperparams(optax.adamw)(schedule, weight_decay=0.1),  # records the learning rate in the history
        optax.softmax_cross_entropy_with_integer_labels,
        metrics={"accuracy": jdist.metrics.Accuracy()},
        strategy=strategy,
        seed=args.seed,
    )
    fit = trainer.fit(
        train,
        batch_size=args.batch_size,
        epochs=args.epochs,
        validation_data=validation,
        callbacks=[jdist.callbacks.EarlyStopping("val_loss", patience=5)],
    )
    console.print(f"{fit.stop_reason}\n{fit.history}")

    result = trainer.evaluate(fit.state, test, batch_size=args.batch_size)
    replicas = strategy.num_replicas_in_sync
    console.print(f"Test accuracy {result['accuracy']:.2%} of {result['examples']} digits, on {replicas} replicas")
    logits = trainer.predict(fit.state, test[0][:10], batch_size=args.batch_size)
    console.print(f"First ten labels: {test[1][:10].tolist()}\n     predictions: {logits.argmax(axis=-1).tolist()}")
    try:
        console.print(f"Report: {fit.report(args.report, title='Digits')}")
    except (ModuleNotFoundError, OSError) as error:
        console.print(f"No report was written. {error}")


if __name__ == "__main__":
    main()
