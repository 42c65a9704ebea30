"""Trains a small CNN on real data with `jdist.Trainer`: fit, evaluate, predict, and a page of pictures.

    python examples/digits_fit.py                 # all accelerators there are, or 4 CPU devices
    python examples/digits_fit.py --replicas 2 --epochs 5 --report run.html

The data are the 1,797 handwritten digits that come with scikit-learn: 8 x 8 pixels, 10 classes, divisible by no 2, 4 or 8.
"""

import argparse
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from rich.console import Console

import jdist

try:
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split
except ModuleNotFoundError:
    raise SystemExit('The digits come with scikit-learn: python -m pip install -e ".[examples]"') from None


class CNN(nn.Module):
    """Two convolutions and two dense layers: `[batch, 8, 8, 1]` to `[batch, 10]`."""

    @nn.compact
    def __call__(self, images: jax.Array, train: bool) -> jax.Array:
        """The logits of each class. While it is trained, each image is moved by a pixel or not at all."""
        if train:
            by = jax.random.randint(self.make_rng("dropout"), (len(images), 2), -1, 2)
            images = jax.vmap(lambda image, by: jnp.roll(image, by, axis=(0, 1)))(images, by)
        x = nn.relu(nn.Conv(32, (3, 3))(images))
        x = nn.max_pool(nn.relu(nn.Conv(64, (3, 3))(x)), (2, 2), strides=(2, 2))
        x = nn.relu(nn.Dense(128)(x.reshape(len(x), -1)))
        return nn.Dense(10)(x)


def make_data():
    """Images and labels to train on, to validate on after each epoch, and to test on once."""
    digits = load_digits()
    images, labels = (digits.images / 16).astype(np.float32)[..., None], digits.target.astype(np.int32)
    rest, test = train_test_split(np.arange(len(labels)), test_size=360, random_state=0, stratify=labels)
    train, validation = train_test_split(rest, test_size=180, random_state=0, stratify=labels[rest])
    return [(images[rows], labels[rows]) for rows in (train, validation, test)]


def parse_arguments():
    parser = argparse.ArgumentParser(
        description="Train a small CNN on 1,797 real digits, and write a page about it.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--replicas", type=int, help="devices to use; all accelerators by default, else 4 CPU devices")
    parser.add_argument("--epochs", type=int, default=30, help="times to go through the training images, at most")
    parser.add_argument("--batch-size", type=int, default=128, help="images in a step of all replicas together")
    parser.add_argument("--seed", type=int, default=0, help="of the weights, the order of the images, and their moves")
    parser.add_argument("--report", metavar="FILE.html", default="digits_fit.html", help="where to write the page")
    args = parser.parse_args()
    for name, least in {"replicas": 1, "epochs": 1, "batch_size": 1, "seed": 0}.items():
        if getattr(args, name) is not None and getattr(args, name) < least:
            parser.error(f"--{name.replace('_', '-')} is at least {least}, got {getattr(args, name)}")
    # Before the first use of JAX, and without effect where there are accelerators.
    jax.config.update("jax_num_cpu_devices", args.replicas or 4)
    args.replicas = args.replicas or len(jax.devices())
    if args.replicas > len(jax.devices()):
        parser.error(f"--replicas is at most the number of devices, {len(jax.devices())}, got {args.replicas}")
    if args.batch_size % args.replicas:
        parser.error(f"--batch-size is a multiple of the {args.replicas} replicas, got {args.batch_size}")
    return args


def main():
    args = parse_arguments()
    console = Console(highlight=False, markup=False, soft_wrap=True)
    train, validation, test = make_data()
    steps = args.epochs * math.ceil(len(train[0]) / args.batch_size)
    rate = optax.warmup_cosine_decay_schedule(0.0, 3e-3, steps // 10, steps)

    trainer = jdist.Trainer(
        CNN(),
        optax.inject_hyperparams(optax.adamw)(rate, weight_decay=0.1),  # so that the rate is in the record
        optax.softmax_cross_entropy_with_integer_labels,
        metrics={"accuracy": jdist.metrics.Accuracy()},
        strategy=jdist.MirroredStrategy(jax.devices()[: args.replicas]),
        seed=args.seed,
    )
    fit = trainer.fit(
        train,
        batch_size=args.batch_size,
        epochs=args.epochs,
        validation_data=validation,
        callbacks=[jdist.callbacks.EarlyStopping("val_loss", patience=5)],
    )
    console.print(f"{fit.stop}\n{fit.history}")

    result = trainer.evaluate(fit.state, test, batch_size=args.batch_size)
    console.print(f"Test accuracy {result['accuracy']:.2%} of {result['examples']} digits, on {args.replicas} replicas")
    logits = trainer.predict(fit.state, test[0][:10], batch_size=args.batch_size)
    console.print(f"The first ten are {test[1][:10].tolist()}\n    predicted as {logits.argmax(axis=-1).tolist()}")
    try:
        console.print(f"Pictures of it: {fit.report(args.report, title='Digits')}")
    except (ModuleNotFoundError, OSError) as error:
        console.print(f"There is no page. {error}")


if __name__ == "__main__":
    main()
