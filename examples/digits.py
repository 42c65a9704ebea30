"""Trains a small CNN on real data over several replicas, proves that they stay in step, and compares with one device.

    python examples/digits.py                 # all accelerators there are, or 8 CPU devices
    python examples/digits.py --replicas 4 --epochs 5

The data are the 1,797 handwritten digits that come with scikit-learn: 8 x 8 pixels, 10 classes, divisible by no 2, 4 or 8.
"""

import argparse
import time

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
    def __call__(self, images: jax.Array) -> jax.Array:
        """The logits of each class."""
        x = nn.relu(nn.Conv(32, (3, 3))(images))
        x = nn.max_pool(nn.relu(nn.Conv(64, (3, 3))(x)), (2, 2), strides=(2, 2))
        x = nn.relu(nn.Dense(128)(x.reshape(len(x), -1)))
        return nn.Dense(10)(x)


model = CNN()


def make_optimizer(steps):
    return optax.adamw(optax.cosine_decay_schedule(3e-3, steps), weight_decay=0.1)


def make_state(key, steps):
    params = model.init(key, jnp.zeros((1, 8, 8, 1)))["params"]
    return {"params": params, "opt_state": make_optimizer(steps).init(params)}


def make_step(steps):
    """A training step as one replica sees it. Rows that only fill the last batch up have weight 0, and so no effect."""

    def train_step(state, batch, weights):
        images, labels = batch
        total = jdist.all_reduce("sum", weights.sum())

        def loss_fn(params):
            logits = model.apply({"params": params}, images)
            return jnp.sum(weights * optax.softmax_cross_entropy_with_integer_labels(logits, labels)) / total

        loss, grads = jax.value_and_grad(loss_fn)(state["params"])
        loss, grads = jdist.all_reduce("sum", (loss, grads))
        updates, opt_state = make_optimizer(steps).update(grads, state["opt_state"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "opt_state": opt_state}, loss

    return train_step


def count_right(params, batch, weights):
    """How many of the rows that count are classified right, and how many count, over all replicas."""
    images, labels = batch
    right = model.apply({"params": params}, images).argmax(-1) == labels
    return jdist.all_reduce("sum", (jnp.sum(weights * right), weights.sum()))


def evaluate(strategy, params, data):
    right = rows = 0.0
    for batch, weights in strategy.distribute_dataset(data, batch_size=256, remainder="pad"):
        batch_right, batch_rows = strategy.run(count_right, (params, batch, weights))
        right, rows = right + float(batch_right), rows + float(batch_rows)
    return right / rows, int(rows)


def train(strategy, train_data, test_data, args, console):
    batches = strategy.distribute_dataset(
        train_data, args.batch_size, shuffle=True, seed=args.seed, epochs=args.epochs, remainder="pad"
    )
    steps = len(batches)
    state = strategy.init(lambda key: make_state(key, steps), jax.random.key(args.seed))
    train_step = strategy.step(make_step(steps))

    start = time.perf_counter()
    for number, (batch, weights) in enumerate(batches, start=1):
        state, loss = train_step(state, batch, weights)
        if number % (steps // args.epochs) == 0:
            accuracy, rows = evaluate(strategy, state["params"], test_data)
            console.print(
                f"  epoch {number * args.epochs // steps:3}/{args.epochs}   loss {float(loss):.4f}   "
                f"test accuracy {accuracy:6.2%} of {rows}   {time.perf_counter() - start:5.1f} s"
            )
    return state, train_step


def parse_arguments():
    parser = argparse.ArgumentParser(
        description="Train a small CNN on 1,797 real digits over several replicas, then on one device, and compare.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--replicas", type=int, help="devices to use; all accelerators by default, else 8 CPU devices")
    parser.add_argument("--epochs", type=int, default=20, help="times to go through the training images")
    parser.add_argument("--batch-size", type=int, default=128, help="images in a step of all replicas together")
    parser.add_argument("--seed", type=int, default=0, help="of the weights and of the order of the images")
    args = parser.parse_args()
    for name in ("replicas", "epochs", "batch_size"):
        if getattr(args, name) is not None and getattr(args, name) < 1:
            parser.error(f"--{name.replace('_', '-')} is at least 1, got {getattr(args, name)}")
    if args.seed < 0:
        parser.error(f"--seed is at least 0, got {args.seed}")
    # Before the first use of JAX, and without effect where there are accelerators.
    jax.config.update("jax_num_cpu_devices", args.replicas or 8)
    args.replicas = args.replicas or len(jax.devices())
    if args.replicas > len(jax.devices()):
        parser.error(f"--replicas is at most the number of devices, {len(jax.devices())}, got {args.replicas}")
    if args.batch_size % args.replicas:
        parser.error(f"--batch-size is a multiple of the {args.replicas} replicas, got {args.batch_size}")
    return args


def main():
    args = parse_arguments()
    console = Console(highlight=False, soft_wrap=True)
    digits = load_digits()
    images = (digits.images / 16).astype(np.float32)[..., None]
    arrays = train_test_split(
        images, digits.target.astype(np.int32), test_size=0.2, random_state=0, stratify=digits.target
    )
    train_data, test_data = (arrays[0], arrays[2]), (arrays[1], arrays[3])

    devices = jax.devices()[: args.replicas]
    console.print(
        f"{len(images)} digits, {len(train_data[0])} to train; {args.replicas} replicas on {devices[0].device_kind}"
    )
    state, train_step = train(jdist.MirroredStrategy(devices), train_data, test_data, args, console)

    console.print("The same seed on one device")
    alone, _ = train(jdist.OneDeviceStrategy(devices[0]), train_data, test_data, args, console)
    pairs = zip(jax.tree.leaves(state["params"]), jax.tree.leaves(alone["params"]), strict=True)
    difference = max(np.abs(np.asarray(a) - np.asarray(b)).max() for a, b in pairs)
    console.print(f"Largest difference between the two models' weights: {difference:.1e}")

    leaves = sum(name.startswith("state") for name in train_step.proof.mirrored)
    total = len(jax.tree.leaves(state))
    console.print(
        f"Proved while tracing: {leaves} of {total} state leaves are the same on all {args.replicas} replicas after "
        "every step, whatever the data."
    )


if __name__ == "__main__":
    main()
